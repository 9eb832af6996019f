"""From logits to the distribution a token is drawn from, in transformers' own order, one row a tree slot.

Order: repetition penalty, minimum length, temperature, top-k, top-p, min-p. All in float32.

Shapes: n rows (tree slots), V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the defaults are greedy."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, as transformers counts it."""
    min_new_tokens: int = 0
    """No end of sequence before so many new tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (greedy) or a positive number"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or a positive integer"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "a number in [0, 1]"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0 < self.repetition_penalty < float("inf"),
                "a positive number",
            ),
            ("seed", self.seed, -(2**63) <= self.seed < 2**63, "a whole number of 64 bits"),
            ("min_new_tokens", self.min_new_tokens, self.min_new_tokens >= 0, "0 or a positive integer"),
        )
        wrong = [f"{name}={value}: {allowed} is allowed" for name, value, good, allowed in checks if not good]
        if wrong:
            raise UserError("; ".join(wrong))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0


def penalize(
    logits: Tensor, params: SamplingParams, seen: Tensor | None, too_early: Tensor | None, eos: Tensor
) -> Tensor:
    """What applies to greedy decoding too: repetition penalty and minimum length.

    Args:
        logits: (n, V) float32.
        params: settings.
        seen: (n, V) bool, tokens in each slot's own prefix; needed when there is a penalty.
        too_early: (n,) bool, slots whose next token may not end the output; None: none.
        eos: (E,) end tokens.
    """
    if params.repetition_penalty != 1.0:
        assert seen is not None
        penalized = torch.where(logits < 0, logits * params.repetition_penalty, logits / params.repetition_penalty)
        logits = torch.where(seen, penalized, logits)
    if too_early is not None and len(eos):
        banned = torch.zeros_like(logits, dtype=torch.bool)
        banned[:, eos] = too_early[:, None]
        logits = logits.masked_fill(banned, float("-inf"))
    return logits


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """(n, V) penalized logits -> (n, V) float32 probabilities after temperature, top-k, top-p and min-p."""
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if params.top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - params.top_p
        drop[..., -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
    if params.min_p > 0.0:
        probs = logits.softmax(dim=-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(dim=-1, keepdim=True), float("-inf"))
    return logits.softmax(dim=-1)


def greedy_choice(logits: Tensor) -> Tensor:
    """(n, V) -> (n,), the token of greatest logit."""
    if logits.device.type == "cpu":  # numpy's takes a quarter of the time that torch's does there
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One token a row, (n, V) -> (n,): the exponential race, which needs no host sync where multinomial does."""
    return (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax(dim=-1)
