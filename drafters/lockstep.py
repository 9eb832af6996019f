"""EAGLE over many requests at once: chains drafted in lockstep, committed tokens taken in by one pass.

Linear products see real rows only. Attention sees the requests' caches copied side by side, padded to the longest: the
drafter has one layer, so that the copy is cheap where it would not be for the target.

Shapes: B requests, T rows of all of them, M most rows of one, S most committed rows, K key/value heads, H width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafters.attention import headstart_attention
from drafters.base import DraftSettings, DraftTree, draw_draft
from drafters.target import Features

if TYPE_CHECKING:
    from drafters.eagle import EagleDrafter, EagleState


def extend_batch(
    drafter: EagleDrafter, states: Sequence[EagleState], tokens: Sequence[Tensor], features: Sequence[Features]
) -> None:
    """`EagleDrafter.extend` for every request, in one pass."""
    counts, starts = [len(t) for t in tokens], [state.length for state in states]
    packed = Features.join(features)
    device, M = packed.final.device, max(counts)
    index = torch.tensor(
        [[s + i for s, n in zip(starts, counts, strict=True) for i in range(n)]]
        + [[b * M + i for b, n in enumerate(counts) for i in range(n)]],
        device=device,
    )
    positions, real = index[:1], index[1]  # (1, T) and, for each row, its place among the B * M padded ones
    residual, q, k, v = drafter.inputs(torch.cat(list(tokens))[None], drafter.fuse(packed), positions)
    for state, n, key, value in zip(states, counts, k.split(counts, dim=2), v.split(counts, dim=2), strict=True):
        state.keys[:, :, state.length : state.length + n] = key
        state.values[:, :, state.length : state.length + n] = value
        state.length += n
    keys, values = _side_by_side(states, max(state.length for state in states))
    query = pad_sequence(list(q[0].transpose(0, 1).split(counts)), batch_first=True)  # (B, M, heads, d)
    last = torch.tensor(starts, device=device)[:, None] + torch.arange(M, device=device)  # (B, M) row a query ends at
    mask = torch.arange(keys.shape[2], device=device) <= last[:, None, :, None]  # (B, 1, M, S)
    attended, _ = headstart_attention(drafter, query.transpose(1, 2), keys, values, mask)
    out = drafter.outputs(residual, attended.flatten(0, 1)[real].flatten(1)[None])  # (1, T, H)
    for state, rows in zip(states, out.split(counts, dim=1), strict=True):
        state.out = rows[:, -1:]


def propose_batch(
    drafter: EagleDrafter,
    states: Sequence[EagleState],
    settings: Sequence[DraftSettings],
    temperatures: Sequence[float],
    generators: Sequence[torch.Generator],
) -> list[DraftTree]:
    """`EagleDrafter.propose` for every request: chains in lockstep, trees one by one."""
    trees: list[DraftTree | None] = [None] * len(states)
    chains = [b for b, wanted in enumerate(settings) if wanted.kind == "chain" and wanted.length]
    for b in set(range(len(states))) - set(chains):
        trees[b] = drafter.propose(states[b], settings[b], temperatures[b], generators[b])
    if chains:
        drafted = _chains(
            drafter,
            [states[b] for b in chains],
            [settings[b] for b in chains],
            [temperatures[b] if settings[b].sample else 0.0 for b in chains],
            [generators[b] for b in chains],
        )
        for b, tree in zip(chains, drafted, strict=True):
            trees[b] = tree
    return [tree for tree in trees if tree is not None]


def _chains(
    drafter: EagleDrafter,
    states: list[EagleState],
    settings: list[DraftSettings],
    temperatures: list[float],
    generators: list[torch.Generator],
) -> list[DraftTree]:
    B, device = len(states), states[0].keys.device
    steps, S = max(wanted.length for wanted in settings), max(state.length for state in states)
    keys, values = _side_by_side(states, S, steps - 1)
    lengths = torch.tensor([state.length for state in states], device=device)
    own = torch.arange(S, device=device) < lengths[:, None]  # (B, S)
    mask = torch.cat([own, own.new_ones(B, steps - 1)], dim=1)[:, None, None]  # drafts stand behind all columns
    out = torch.cat([state.out for state in states])  # (B, 1, H)
    tokens: list[Tensor] = []
    dists: list[list[Tensor]] = [[] for _ in states]
    for j in range(steps):
        logits = drafter.logits(out[:, -1])  # (B, Vd)
        draft = logits.argmax(-1)
        for b, temperature in enumerate(temperatures):
            if temperature > 0 and j < settings[b].length:
                draft[b : b + 1], q = draw_draft(logits[b : b + 1], temperature, generators[b])
                dists[b].append(drafter.scatter(q[0]))
        tokens.append(drafter.to_target(draft))
        if j + 1 < steps:
            # draft step j+1 pairs x[t+2+j] with its own previous output at position t+1+j; t = length - 1
            residual, query, k, v = drafter.inputs(tokens[-1][:, None], out, (lengths + j)[:, None])
            keys[:, :, S + j : S + j + 1], values[:, :, S + j : S + j + 1] = k, v
            end = S + j + 1
            attended, _ = headstart_attention(drafter, query, keys[:, :, :end], values[:, :, :end], mask[..., :end])
            out = drafter.outputs(residual, attended.flatten(2))
    rows = torch.stack(tokens, dim=1)  # (B, steps)
    return [
        DraftTree.chain(rows[b, : wanted.length], torch.stack(dists[b]) if dists[b] else None)
        for b, wanted in enumerate(settings)
    ]


def _side_by_side(states: Sequence[EagleState], rows: int, room: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values of all requests, (B, K, rows + room, d), zeros where a request has none."""
    _, K, _, d = states[0].keys.shape
    keys, values = (states[0].keys.new_zeros(len(states), K, rows + room, d) for _ in range(2))
    for b, state in enumerate(states):
        keys[b, :, : state.length] = state.keys[0, :, : state.length]
        values[b, :, : state.length] = state.values[0, :, : state.length]
    return keys, values
