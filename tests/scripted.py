"""Drafters without weights that know the answer, or never do: every path of the decoder is taken on purpose."""

import random
from collections.abc import Callable, Sequence

import torch

from drafters.base import DraftSettings, DraftTree

VOCAB = 512


class Scripted:
    """Proposes what a function of the emitted count says; its state is what `extend` was given.

    Args:
        continuation: number of emitted tokens -> tokens expected next, any number of them.
        prompt_length: of the one prompt it serves.
        seed: of the wrong tokens that a tree adds.
    """

    kind, taps, meta, default_settings = "scripted", (), {}, None

    def __init__(self, continuation: Callable[[int], Sequence[int]], prompt_length: int, seed: int = 0):
        self.continuation, self.prompt_length = continuation, prompt_length
        self.random = random.Random(seed)

    def begin(self, capacity):
        self.seen = []
        return self.seen

    def extend(self, state, tokens, features):
        assert features.final.shape[1] == len(tokens)
        state.extend(tokens.tolist())

    def propose(self, state, settings: DraftSettings, temperature=0.0, generator=None) -> DraftTree:
        emitted = len(state) + 1 - self.prompt_length
        tokens = list(self.continuation(emitted))[: settings.length]
        if not tokens:
            return DraftTree.empty(torch.device("cpu"))
        if settings.kind == "chain":
            return DraftTree.chain(torch.tensor(tokens))
        return bushy(tokens, settings, self.random)


def bushy(path: Sequence[int], settings: DraftSettings, rng: random.Random) -> DraftTree:
    """The path with other tokens beside it at every depth, before and after it, and children below those."""
    tokens: list[int] = []
    parents: list[int] = []
    at = {"right": -1, "other": -1}
    for token in path[: settings.total // 3]:
        wrong = rng.sample([t for t in range(VOCAB) if t != token], 2)
        level = [("right", token, at["right"]), ("wrong", wrong[0], at["right"]), ("other", wrong[1], at["other"])]
        rng.shuffle(level)
        for name, node, parent in level:
            at[name] = len(tokens)
            tokens.append(node)
            parents.append(parent)
    return DraftTree(torch.tensor(tokens, dtype=torch.long), torch.tensor(parents, dtype=torch.long))


def oracle(answer: Sequence[int], prompt_length: int) -> Scripted:
    """Always right."""
    return Scripted(lambda emitted: answer[emitted:], prompt_length)


def contrary(answer: Sequence[int], prompt_length: int) -> Scripted:
    """Never right."""
    return Scripted(lambda emitted: [(t + 1) % VOCAB for t in answer[emitted:]], prompt_length)


def wavering(answer: Sequence[int], prompt_length: int) -> Scripted:
    """Right for 0 to 4 tokens, then wrong."""

    def continuation(emitted: int) -> list[int]:
        right = emitted * 7 % 5
        return [t if i < right else (t + 1) % VOCAB for i, t in enumerate(answer[emitted:])]

    return Scripted(continuation, prompt_length)


def noise(answer: Sequence[int], prompt_length: int) -> Scripted:
    """Random tokens, out of 4 so that some are right by chance where the answer is among them."""
    rng = random.Random(3)
    return Scripted(lambda emitted: [rng.choice([1, 2, answer[0], answer[-1]]) for _ in range(8)], prompt_length)


SCRIPTS = {"oracle": oracle, "contrary": contrary, "wavering": wavering, "noise": noise}
