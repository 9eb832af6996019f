"""The packaged target itself: converted, rendered, decoded. Slow: run by `make test-all`."""

import pytest
import torch

from decode.engine import DraftSettings, generate
from decode.prompts import load_prompts
from drafters.build import build_eagle, build_medusa
from drafters.target import load_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2():
    return load_target("smollm2-135m", "float32")


def test_what_it_is(smollm2):
    assert (smollm2.num_layers, smollm2.hidden_size, smollm2.vocab_size) == (30, 576, 49152)
    text = smollm2.tokenizer.decode(smollm2.render([{"role": "user", "content": "Hi"}]))
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.fingerprint == load_target("smollm2-135m", "bfloat16").fingerprint, "the same model in any dtype"


@pytest.mark.parametrize("settings", [DraftSettings("chain", 3), DraftSettings("tree", 3, 3, 8)], ids=["chain", "tree"])
def test_greedy_float32_is_exact(smollm2, settings):
    ids = torch.arange(0, smollm2.vocab_size, 12)
    drafters = [build_eagle(smollm2, ids, 3), build_eagle(smollm2, ids, 1), build_medusa(smollm2, ids, heads=3)]
    for prompt in load_prompts("headstart", limit=3):
        plain = generate(smollm2, None, prompt.messages, max_new_tokens=20)
        for drafter in drafters:
            out = generate(smollm2, drafter, prompt.messages, max_new_tokens=20, settings=settings)
            assert out.tokens == plain.tokens, drafter.kind


def test_plain_decoding_is_that_of_transformers(smollm2):
    for prompt in load_prompts("headstart", limit=3):
        ids = torch.tensor([smollm2.render(prompt.messages)])
        with smollm2.as_loaded(), torch.inference_mode():
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
            theirs = smollm2.model.generate(ids, **options)[0, ids.shape[1] :].tolist()
        assert generate(smollm2, None, prompt.messages, max_new_tokens=20).tokens == theirs
