"""Our processors give what transformers' own give, in its own order."""

import pytest
import torch
from transformers import GenerationConfig

from decode.sampling import SamplingParams, distribution, draw, penalize
from drafters.errors import UserError

V, EOS = 512, [3, 77]
PREFIX = torch.tensor([[5, 9, 9, 200, 3]])
PROMPT = 3  # of the prefix; the rest is output


def theirs(target, logits, params):
    """Probabilities by the processors that HF `generate` would build, one row at a time."""
    config = GenerationConfig(
        do_sample=True,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens or None,
        min_length=0,
        eos_token_id=EOS,
    )
    target.model._prepare_special_tokens(config, device="cpu")
    processors = target.model._get_logits_processor(
        config, input_ids_seq_length=PROMPT, encoder_input_ids=PREFIX[:, :PROMPT], device="cpu"
    )
    return torch.cat([processors(PREFIX, row[None].clone()) for row in logits]).softmax(-1)


def ours(logits, params):
    seen = torch.zeros(1, V, dtype=torch.bool)
    seen[0, PREFIX[0]] = True
    too_early = torch.full((len(logits),), PREFIX.shape[1] - PROMPT < params.min_new_tokens)
    return distribution(penalize(logits, params, seen, too_early, torch.tensor(EOS)), params)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_k": 5000},
        {"top_p": 0.7},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"min_new_tokens": 3},
        {"min_new_tokens": 2},
        {"temperature": 1.6, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.3, "min_new_tokens": 4},
    ],
    ids=str,
)
def test_equals_transformers(target, settings):
    params = SamplingParams(**({"temperature": 1.0} | settings))
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, :4] = logits[0].max()  # ties at the top
    mine, reference = ours(logits, params), theirs(target, logits, params)
    assert torch.equal(mine > 0, reference > 0)
    torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"min_new_tokens": -1},
    ],
    ids=str,
)
def test_bad_values_are_named(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=name):
        SamplingParams(**wrong)


def test_draw_follows_the_distribution_and_never_takes_what_has_no_probability():
    probs = torch.tensor([0.0, 0.5, 0.3, 0.2, 0.0]).expand(20000, 5)
    counts = torch.bincount(draw(probs, torch.Generator().manual_seed(0)), minlength=5) / 20000
    assert counts[0] == counts[4] == 0
    torch.testing.assert_close(counts, probs[0], atol=0.02, rtol=0)
