"""A small model as the drafter: it drafts what it would write, and its cache forgets what was rejected."""

import pytest
import torch

from decode.engine import generate
from decode.sampling import SamplingParams
from drafters.base import DraftSettings
from drafters.draft_model import DraftModel
from drafters.target import wrap_target
from tests.tiny import make_model, make_target, make_tokenizer

PROMPT = "the quick brown fox"
CHAIN, TREE = DraftSettings("chain", 4), DraftSettings("tree", 4, 3, 16)


@pytest.fixture(scope="module", params=["llama", "mistral"])  # the other has a window of 8
def family(request):
    return request.param, make_target(request.param, layers=2)


@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_model_that_drafts_for_itself_is_always_right(family, settings):
    _, target = family
    plain = generate(target, None, PROMPT, max_new_tokens=21, eos_token_ids=()).tokens
    out = generate(target, DraftModel(target, target), PROMPT, max_new_tokens=21, settings=settings, eos_token_ids=())
    assert out.tokens == plain
    if settings == CHAIN:
        assert [r.accepted for r in out.rounds] == [4, 4, 4, 4]
    else:
        assert all(r.accepted for r in out.rounds)


@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafting_leaves_no_trace(family, settings):
    """After rounds of extend and propose, the last committed row is what one forward over the text gives."""
    name, target = family
    draft = make_target(name, layers=1, seed=4)
    drafter = DraftModel(draft, target)
    text = torch.arange(30) * 7 % 512
    state = drafter.begin(31 + settings.rows)
    for start, end in ((0, 12), (12, 13), (13, 17), (17, 30)):
        drafter.extend(state, text[start:end], None)
        first = drafter.propose(state, settings)
        again = drafter.propose(state, settings)
        assert torch.equal(first.tokens, again.tokens) and torch.equal(first.parents, again.parents)
        ids = torch.cat([torch.tensor([drafter.first]), text[:end]])[None]
        whole = draft.forward(ids, torch.arange(ids.shape[1])[None]).final[0, -1:]
        torch.testing.assert_close(state.out, whole, atol=1e-4, rtol=1e-4)


def test_a_tree_is_scored_on_each_nodes_own_path(family):
    name, target = family
    draft = make_target(name, layers=1, seed=4)
    drafter = DraftModel(draft, target)
    text = torch.arange(10) * 7 % 512
    state = drafter.begin(10 + TREE.rows)
    drafter.extend(state, text, None)
    tree = drafter.propose(state, TREE)
    paths = [torch.cat([torch.tensor([drafter.first]), text])]
    for token, parent in zip(tree.tokens, tree.parents.tolist(), strict=True):
        before = paths[parent + 1]
        logits = draft.head(draft.forward(before[None], torch.arange(len(before))[None]).final[0, -1])
        assert token in logits.topk(TREE.top_k).indices
        paths.append(torch.cat([before, token[None]]))
    assert max(map(len, paths)) > 12


def test_q_is_what_was_drawn_from_and_padded_heads_are_cut(target):
    shape = {"vocab_size": 576, "layers": 1}
    wide = wrap_target(make_model(**shape, seed=3), make_tokenizer(), "wide")
    drafter = DraftModel(wide, target)
    state = drafter.begin(20)
    drafter.extend(state, torch.tensor([5, 6, 7]), None)
    settings = DraftSettings("chain", 3, sample=True)
    tree = drafter.propose(state, settings, 1.5, torch.Generator().manual_seed(0))
    assert tree.q.shape == (3, 512)
    ids = torch.cat([torch.tensor([drafter.first, 5, 6, 7]), tree.tokens[:2]])[None]
    logits = wide.head(wide.forward(ids, torch.arange(6)[None]).final[0, 3:])[:, :512]
    torch.testing.assert_close(tree.q, (logits / 1.5).softmax(-1), atol=1e-5, rtol=1e-4)
    narrow = DraftModel(target, wide)  # the other way round: tokens that it does not know have no chance
    state = narrow.begin(20)
    narrow.extend(state, torch.tensor([5, 6, 7]), None)
    assert narrow.propose(state, settings, 1.0, torch.Generator().manual_seed(0)).q[:, 512:].sum() == 0


def test_a_text_longer_than_the_draft_model_takes_goes_on_plainly(target):
    short = make_target(layers=1, max_position_embeddings=40)
    plain = generate(target, None, PROMPT, max_new_tokens=60, eos_token_ids=()).tokens
    for settings in (CHAIN, TREE):
        out = generate(
            target, DraftModel(short, target), PROMPT, max_new_tokens=60, settings=settings, eos_token_ids=()
        )
        assert out.tokens == plain
        assert out.rounds[0].drafted and not out.rounds[-2].drafted


def test_sampling_with_itself_accepts_everything(target):
    sampling = SamplingParams(temperature=1.0, seed=3)
    settings = DraftSettings("chain", 4, sample=True)
    out = generate(
        target,
        DraftModel(target, target),
        PROMPT,
        max_new_tokens=21,
        settings=settings,
        sampling=sampling,
        eos_token_ids=(),
    )
    assert out.acceptance_length == 5.0
