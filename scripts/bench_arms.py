"""What adaptation is worth by kind of text, and our speculation beside transformers' own.

    python scripts/bench.py --target smollm2-135m --drafter runs/smollm2-eagle3

Every prompt goes through every arm and back (A B B A); ratios are of end-to-end seconds a token, so above 1 the arm
named first is the faster.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from decode.adapt import Adaptive, build_policy
from decode.arms import PLAIN, Arm, Run, run_hf
from decode.evaluate import Records, summarize
from decode.prompts import Prompt, load_prompts
from decode.sampling import SamplingParams
from drafters.base import Drafter, DraftSettings, DraftTree
from drafters.draft_model import DraftModel
from drafters.errors import UserError
from drafters.lookup import LookupDrafter
from drafters.target import Features, Target, wrap_target

FIXED = 3  # settings that the profile puts first
LOOKUP, ASSISTED = 8, 4  # tokens drafted a round where both sides draft equally many
TOKENS = 48
HF_TOKENS = 24  # beside transformers, whose own speculation is slow here
BLOCKS = 6  # of the target that make its draft model
TURNS = 2


class Adversary:
    """Costs what another drafter costs and is never right, save by a freak: its tokens half a vocabulary away."""

    kind = "adversary"

    def __init__(self, drafter: Drafter, vocab_size: int):
        self.drafter, self.vocab_size = drafter, vocab_size
        self.taps, self.meta, self.default_settings = drafter.taps, drafter.meta, drafter.default_settings

    def begin(self, capacity: int) -> Any:
        """See `Drafter.begin`."""
        return self.drafter.begin(capacity)

    def extend(self, state: Any, tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`."""
        self.drafter.extend(state, tokens, features)

    def propose(
        self, state: Any, settings: DraftSettings, temperature: float, generator: torch.Generator | None
    ) -> DraftTree:
        """See `Drafter.propose`."""
        tree = self.drafter.propose(state, settings, temperature, generator)
        return DraftTree((tree.tokens + self.vocab_size // 2) % self.vocab_size, tree.parents)


@dataclass(frozen=True)
class HfArm(Arm):
    """Speculation by transformers' `generate`, on the model as transformers itself would run it."""

    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `generate`."""
    assistant: Target | None = None
    assistant_options: dict[str, Any] = field(default_factory=dict)
    """Of the draft model's own generation config, from which `generate` takes how much to draft."""

    def run(self, target: Target, ids: list[int], sampling: SamplingParams, max_new_tokens: int) -> Run:
        """See `Arm.run`."""
        if self.assistant is None:
            return run_hf(target, ids, sampling, max_new_tokens, **self.options)
        model = self.assistant.model
        model.generation_config = GenerationConfig(**self.assistant_options)  # rounds may have changed the last one
        with self.assistant.as_loaded():
            return run_hf(target, ids, sampling, max_new_tokens, assistant_model=model, **self.options)


def measure(target: Target, arms: Sequence[Arm], prompts: Sequence[Prompt], tokens: int, turns: int) -> Records:
    """Times the prompts in turns, greedily and after a warm-up; records that `summarize` reads."""
    requests = [target.render(prompt.messages) for prompt in prompts]
    for arm in arms:
        arm.run(target, requests[0], SamplingParams(), tokens)
    records: Records = []
    for prompt, ids in zip(prompts, requests, strict=True):
        runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
        for turn in range(turns):
            for arm in arms if turn % 2 == 0 else reversed(arms):
                runs[arm.name].append(arm.run(target, ids, SamplingParams(), tokens))
        records.append({"id": prompt.id, "category": prompt.category, "arms": runs})
    return records


def adaptation(target: Target, drafter: Drafter, prompts: Sequence[Prompt], tokens: int = TOKENS) -> dict[str, float]:
    """The adaptive policy against plain decoding and against the best fixed setting, category by category.

    The adversary drafts under a policy made for the real drafter, which therefore trusts it at first. The fixed
    settings are the three that the profile expects most of; the best of them is known only afterwards, for each
    category anew: its noise counts for it.

    Args:
        target: as it will decode.
        drafter: what drafts; with an adapter, plain decoding is that of the adapted target.
        prompts: with categories.
        tokens: of every answer, at most.
    """
    make = functools.partial(Arm, adapts=drafter if getattr(drafter, "adapter", None) is not None else None)
    adversary = Adversary(drafter, target.vocab_size)
    policy = build_policy("adaptive", target, drafter)
    assert isinstance(policy, Adaptive)
    drafting = [s for s in policy.settings if s.nodes][:FIXED]
    names = [f"chain{s.length}" if s.kind == "chain" else f"tree{s.total}x{s.length}" for s in drafting]
    names = [name + ("cut" if s.min_confidence else "") for name, s in zip(names, drafting, strict=True)]
    arms = [
        make(PLAIN),
        make("adaptive", drafter, policy),
        *(make(name, drafter, settings) for name, settings in zip(names, drafting, strict=True)),
        make("adversarial", adversary, build_policy("adaptive", target, drafter)),
    ]
    records = measure(target, arms, prompts, tokens, TURNS)
    against_plain = {arm.name: summarize(arm.name, records, PLAIN) for arm in arms[1:]}
    results = {f"{name}_vs_plain": summary["speedup"] for name, summary in against_plain.items()}
    results["adversarial_accepted_per_step"] = against_plain["adversarial"]["accepted_per_step"]
    against_fixed = [summarize("adaptive", records, name)["by_category"] for name in names]
    plain: list[float] = []
    fixed: list[float] = []
    for category, row in against_plain["adaptive"]["by_category"].items():
        wrong = against_plain["adversarial"]["by_category"][category]["speedup"]
        plain += [row["speedup"], wrong]
        fixed.append(min(table[category]["speedup"] for table in against_fixed))
        results[f"adaptive_vs_plain_{category}"] = row["speedup"]
        results[f"adversarial_vs_plain_{category}"] = wrong
        results[f"adaptive_vs_best_fixed_{category}"] = fixed[-1]
    return results | {"adaptive_vs_plain_min": min(plain), "adaptive_vs_best_fixed_min": min(fixed)}


def beside_hf(target: Target, draft: Target, prompts: Sequence[Prompt], tokens: int = HF_TOKENS) -> dict[str, float]:
    """Prompt lookup and a draft model, transformers' own over ours; each key's second arm is transformers'.

    `vs_hf_lookup` and `vs_hf_assisted` run both sides as they come: ours adapts, transformers drafts up to 20 tokens
    while the draft model is sure. With `_fixed` both draft equally many tokens a round.

    Args:
        target: as it will decode.
        draft: a smaller model with the target's tokenizer.
        prompts: of any kind.
        tokens: of every answer, at most.
    """
    lookup, model = LookupDrafter(), DraftModel(draft, target)
    equal = {"num_assistant_tokens": ASSISTED, "assistant_confidence_threshold": 0.0}
    arms = [
        Arm("lookup", lookup, build_policy("adaptive", target, lookup)),
        Arm("lookup_fixed", lookup, DraftSettings("chain", LOOKUP)),
        HfArm("hf_lookup", options={"prompt_lookup_num_tokens": LOOKUP}),
        Arm("assisted", model, build_policy("adaptive", target, model)),
        Arm("assisted_fixed", model, DraftSettings("chain", ASSISTED)),
        HfArm("hf_assisted", assistant=draft),
        HfArm("hf_assisted_fixed", assistant=draft, assistant_options=equal),
    ]
    records = measure(target, arms, prompts, tokens, TURNS)
    pairs = {"lookup": "hf_lookup", "lookup_fixed": "hf_lookup"}
    pairs |= {name: f"hf_{name}" for name in ("assisted", "assisted_fixed")}
    return {f"vs_hf_{ours}": summarize(ours, records, theirs)["speedup"] for ours, theirs in pairs.items()}


def truncated(target: Target, blocks: int = BLOCKS) -> Target:
    """The target's first blocks with its final norm and head: a smaller model with the same tokenizer, weights copied.

    Raises:
        UserError: a family whose shorter model has other weights.
    """
    config = copy.deepcopy(target.model.config)
    shape = config.get_text_config()
    shape.num_hidden_layers = blocks
    if getattr(shape, "layer_types", None):
        shape.layer_types = shape.layer_types[:blocks]
    model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    if missing := model.load_state_dict(target.model.state_dict(), strict=False).missing_keys:
        raise UserError(f"{target.name} can't be cut to {blocks} blocks: it has no {missing[0]}")
    nn.Module.to(model, target.device)
    draft = wrap_target(model, target.tokenizer, f"{target.name}, {blocks} blocks")
    return draft.pack() if target.is_packed else draft


def arms(target: Target, drafter: Drafter, tokens: int = TOKENS, hf_tokens: int = HF_TOKENS) -> dict[str, float]:
    """Both parts on built-in prompts: four of each category for adaptation, one beside transformers."""
    blocks = max(1, min(BLOCKS, target.num_layers - 1))
    results = adaptation(target, drafter, load_prompts("headstart", per_category=4), tokens)
    prompts = load_prompts("headstart", per_category=1)
    return results | beside_hf(target, truncated(target, blocks), prompts, hf_tokens)
