"""Training a drafter on the traffic that it serves, between requests.

The live drafter decodes; a float32 copy learns, and its weights go into the live one when no request runs (compare
Online Speculative Decoding, arXiv 2310.07177; here the loss is the recipe's own). Weights change how fast the output
comes and never what it is. Every update is on probation: on the requests decoded since, which neither has learnt from,
the acceptance of the weights in use is held against that of the weights before, on the same text. The worse one goes.
A change of topic, which makes both fall, thus costs no good update.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from drafters.build import TrainedDrafter, pack_drafter
from drafters.combine import own_features
from drafters.eagle import EagleDrafter
from drafters.record import Row
from drafters.target import Features, Target
from train.build import make_optimizers
from train.data import collate
from train.objectives import Objective, position_weights
from train.recipe import Recipe
from train.validation import validate

Weights = dict[str, Tensor]
HURT = 0.98  # an update that leaves less of the acceptance length than this was too bold; less than that is noise


@dataclass(frozen=True)
class Update:
    """What one update found and did."""

    before: float | None
    """Acceptance length of the weights before the last update, on the new rows; None on the first call."""
    now: float
    """The same of the weights in use, on the same rows."""
    restored: bool
    """The last update was undone."""
    losses: list[float]
    """Of each optimizer step made now."""


class Online:
    """A drafter's trainer between requests.

    Args:
        live: the drafter in use, in any dtype, packed or not; its weights are replaced in place.
        target: what it serves.
        recipe: objective and optimizer; `train.lr` is halved by an update that hurt, and doubled back later.
        taps: layers of the rows' features; None: the drafter's own. A router records more.
        steps: optimizer steps an update, each on `train.micro_batch` rows.
    """

    def __init__(
        self, live: TrainedDrafter, target: Target, recipe: Recipe, taps: Sequence[int] | None = None, steps: int = 8
    ):
        self.live, self.target, self.recipe, self.steps = live, target, recipe, steps
        self.taps = tuple(live.taps if taps is None else taps)
        kind: Any = type(live)
        self.learner: TrainedDrafter = kind(live.config, live.draft_ids).to(target.device)  # in float32
        self.learner.load_state_dict(live.state_dict())
        if isinstance(live, EagleDrafter) and isinstance(self.learner, EagleDrafter):
            self.learner.embed_scale = live.embed_scale  # no part of the weights
        self.learner.bind(target)
        self.objective = Objective(self.learner, target, recipe.objective)
        self.optimizers, self.lr = make_optimizers(self.learner, recipe), recipe.train.lr
        self.good = _copy(self.learner)  # the weights before the last update
        self.random = random.Random(recipe.seed)
        self.updates = self.restored = 0

    def update(self, rows: Sequence[Row], fresh: int) -> Update:
        """Judges the last update by the fresh rows, then makes the next one.

        Args:
            rows: from `Recorder.rows`.
            fresh: how many of them, at the end, were decoded since the last call; at least one.

        Returns:
            What happened. The live drafter has the new weights.
        """
        before, now = None, self.acceptance(rows[-fresh:])
        restored = False
        if self.updates:
            with self._weights(self.good):
                before = self.acceptance(rows[-fresh:])
            restored = now < before
        if restored:
            self.learner.load_state_dict(self.good)
            self.restored += 1
        if before is not None:
            self._set_rate(self.lr / 2 if now < HURT * before else self.lr if restored else 2 * self.lr, restored)
        self.good = _copy(self.learner)
        losses = [self._step(self._draw(rows, fresh)) for _ in range(self.steps)]
        refresh(self.live, self.learner, self.target.dtype)
        self.updates += 1
        return Update(before, now, restored, losses)

    def acceptance(self, rows: Sequence[Row]) -> float:
        """Estimated tokens a target step on these rows, of a chain, with the learner's weights."""
        replay = _Replay(rows, self.taps, self.learner.taps)
        data: Any = replay  # has what `validate` reads of rows and of their features
        self.learner.eval()
        return validate(self.learner, self.target, data, data, self.recipe).tau

    def _set_rate(self, lr: float, anew: bool) -> None:
        """The learning rate of the next update, the recipe's at most; `anew`: the optimizers' averages led astray."""
        self.lr = min(lr, self.recipe.train.lr)
        if anew:
            now = replace(self.recipe, train=replace(self.recipe.train, lr=self.lr))
            self.optimizers = make_optimizers(self.learner, now)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr

    def _draw(self, rows: Sequence[Row], fresh: int) -> list[Row]:
        """A batch, half of it new rows: after a change of topic they would else be few among the old ones."""
        count = min(self.recipe.train.micro_batch, len(rows))
        new, old = rows[-fresh:], rows[:-fresh]
        first = max(count - len(old), min(len(new), (count + 1) // 2))
        return self.random.sample(new, first) + self.random.sample(old, count - first)

    def _step(self, rows: list[Row]) -> float:
        """One optimizer step on these rows."""
        replay = _Replay(rows, self.taps, self.learner.taps)
        self.learner.train()
        batch = replay.batch(range(len(rows)), replay.pad_id)
        ids, mask = batch["input_ids"].to(self.target.device), batch["loss_mask"].to(self.target.device)
        masks = [row.written for row in rows]
        normalization = self.recipe.objective.normalization
        weights = position_weights(masks, self.objective.steps, normalization, slice(0, len(rows)))
        loss = self.objective(ids, mask, replay.get(range(len(rows)), ids), weights.to(ids.device))["loss"]
        loss.backward()
        if self.recipe.train.clip:
            nn.utils.clip_grad_norm_(self.learner.parameters(), self.recipe.train.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    @contextmanager
    def _weights(self, weights: Weights) -> Iterator[None]:
        """The learner with other weights for a while."""
        own = _copy(self.learner)
        self.learner.load_state_dict(weights)
        try:
            yield
        finally:
            self.learner.load_state_dict(own)


@torch.no_grad()
def refresh(live: nn.Module, learner: nn.Module, dtype: torch.dtype) -> None:
    """Puts the learner's weights into the live drafter, and packs its products anew, in `dtype`, if they were."""
    live.load_state_dict(learner.state_dict())
    if any("forward" in vars(module) for module in live.modules()):
        pack_drafter(live, dtype)


def _copy(drafter: nn.Module) -> Weights:
    return {name: weight.detach().clone() for name, weight in drafter.state_dict().items()}


class _Replay:
    """Recorded rows as training and validation read them."""

    pad_id = 0

    def __init__(self, rows: Sequence[Row], have: Sequence[int], want: Sequence[int]):
        self.rows, self.have, self.want = rows, have, want

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int], pad_id: int) -> dict[str, Tensor]:
        """Ids and mask of these rows, padded on the right."""
        picked = [self.rows[i] for i in indices]
        return collate(
            [{"input_ids": row.ids.tolist(), "loss_mask": row.written.int().tolist()} for row in picked], pad_id
        )

    def get(self, indices: Sequence[int], ids: Tensor) -> Features:
        """Their features, padded like `ids` (B, T)."""
        picked = [own_features(self.rows[i].features, self.have, self.want) for i in indices]
        final = _padded([row.final for row in picked], ids.shape[1])
        taps = [row.taps for row in picked if row.taps is not None]
        return Features(final, _padded(taps, ids.shape[1]) if taps else None)


def _padded(parts: list[Tensor], length: int) -> Tensor:
    """(1, M, D) each -> (B, length, D)."""
    out = parts[0].new_zeros(len(parts), length, parts[0].shape[-1])
    for i, part in enumerate(parts):
        out[i, : part.shape[1]] = part[0]
    return out
