"""A short real decode on the built-in prompts: what training passes for acceptance has to show here too."""

from decode.engine import DraftSettings, generate
from decode.prompts import load_prompts
from drafters.base import Drafter
from drafters.target import Target

TOKENS = 48


def acceptance_length(drafter: Drafter, target: Target, prompts: int, length: int = 4) -> float:
    """Tokens per target step over the first built-in prompts, greedy chain of `length` drafts.

    Args:
        drafter: in evaluation mode.
        target: the model it was made for.
        prompts: how many prompts.
        length: drafts a step.
    """
    rounds = []
    for prompt in load_prompts("headstart", limit=prompts):
        out = generate(target, drafter, prompt.messages, max_new_tokens=TOKENS, settings=DraftSettings(length=length))
        rounds += out.rounds
    return sum(r.tokens for r in rounds) / max(1, len(rounds))
