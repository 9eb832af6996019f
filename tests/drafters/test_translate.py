"""A draft model with another tokenizer: texts meet, characters stay whole, and the target's text does not change."""

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from decode.engine import generate
from drafters.base import DraftSettings, DraftTree
from drafters.draft_model import DraftModel
from drafters.errors import UserError
from drafters.target import wrap_target
from drafters.translate import TAIL, TranslatedDraftModel
from tests.tiny import make_model

TEXT = "a naïve café in 日本語 and 🦉🦉 said hello hello to the quick brown fox, " * 3


def tokenizer(kind):
    """Byte-level BPE with words, or one of pieces with a space put before every text and no words."""
    special = [AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")]
    built = Tokenizer(models.BPE(byte_fallback=kind == "pieces"))
    if kind == "pieces":
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        built.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
        special += [AddedToken(f"<0x{b:02X}>", special=False) for b in range(256)]
        corpus, alphabet = ["hello to the quick brown fox and the said one"], []
    else:
        built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        corpus, alphabet = (
            ["hello to the quick brown fox", "said and in a quick café"],
            sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
    size = 266 if kind == "short" else 345
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator(corpus, trainer)
    if kind == "pieces":  # as in Llama 2: merges learned within words, but applied to a text as one
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        plain = json.loads(built.to_str())
        plain["added_tokens"] = plain["added_tokens"][:2]  # the trainer takes bytes for special tokens
        built = Tokenizer.from_str(json.dumps(plain))
    return PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token="</s>")


def model(kind, seed, **shape):
    tok = tokenizer(kind)
    lm = make_model("gemma2", vocab_size=400, layers=1, seed=seed, **shape)  # its greedy text repeats itself
    lm.generation_config.eos_token_id = tok.eos_token_id
    return wrap_target(lm, tok, kind)


@pytest.fixture(scope="module", params=["short", "pieces"])
def pair(request):
    """A target, and a draft model of another tokenizer."""
    return model("words", 0), model(request.param, 1)


class Oracle(DraftModel):
    """Drafts a known text in the draft model's tokens, from where its state stands."""

    def propose(self, state, settings, temperature=0.0, generator=None):
        return DraftTree.chain(torch.tensor(self.answer[state.length :][: settings.length], dtype=torch.long))


def test_both_tokenizers_keep_the_text(pair):
    for side in pair:
        ids = side.tokenizer.encode(TEXT, add_special_tokens=False)
        assert side.tokenizer.decode(ids) == TEXT
    with pytest.raises(UserError, match="another tokenizer"):
        DraftModel(pair[1], pair[0])


@pytest.mark.parametrize("size", [1, 2, 5, 300])
def test_a_text_known_in_other_tokens_is_drafted_without_a_mistake(pair, size):
    """Every proposal must be what follows, in the target's tokens, also after part of a character."""
    target, draft = pair
    drafter = TranslatedDraftModel(draft, target)
    oracle = Oracle(draft, draft)
    oracle.answer = drafter.opening + draft.tokenizer.encode(TEXT, add_special_tokens=False)
    drafter.model = oracle
    ids = target.tokenizer.encode(TEXT, add_special_tokens=False)
    state = drafter.begin(4)
    right = rounds = 0
    for start in range(0, len(ids), size):
        drafter.extend(state, torch.tensor(ids[start : start + size]), None)
        tree = drafter.propose(state, DraftSettings("chain", 6), 0.0, None)
        at = start + size
        aligned = state.read == oracle.answer[: len(state.read)]  # else the draft model reads a word that is cut
        if aligned:
            assert tree.tokens.tolist() == ids[at:][: len(tree.tokens)]
            right += len(tree.tokens)
            rounds += 1
    assert state.model.length == len(state.read) <= state.model.cache.capacity
    if size < 10:
        assert right > rounds


def test_only_a_tail_is_tokenized_again(pair):
    target, draft = pair
    drafter = TranslatedDraftModel(draft, target)
    state = drafter.begin(4)
    for token in target.tokenizer.encode(TEXT * 4, add_special_tokens=False):
        drafter.extend(state, torch.tensor([token]), None)
        drafter._catch_up(state)
    whole = draft.tokenizer.encode(TEXT * 4, add_special_tokens=False)
    assert state.read == drafter.opening + whole
    assert len(state.read) - len(state.frozen) <= 2 * TAIL < len(whole)


def test_special_tokens_are_matched_by_name_or_role(pair):
    target, draft = pair
    drafter = TranslatedDraftModel(draft, target)
    state = drafter.begin(4)
    hello = target.tokenizer.encode("hello to", add_special_tokens=False)
    drafter.extend(state, torch.tensor([*hello, target.tokenizer.eos_token_id, *hello]), None)
    drafter._catch_up(state)
    mine = draft.tokenizer.encode("hello to", add_special_tokens=False)
    assert state.read == [draft.tokenizer.bos_token_id, *mine, draft.tokenizer.eos_token_id, *mine]
    end = draft.tokenizer.eos_token_id
    the = draft.tokenizer.encode("hello to the", add_special_tokens=False)[len(mine) :]
    expected = target.tokenizer.encode("hello to the", add_special_tokens=False)[len(hello) :]
    assert drafter._translate(state, [*the, end, 7]) == [*expected, target.tokenizer.eos_token_id]
    assert drafter._translate(state, the) == [], "the word may go on"


@pytest.mark.parametrize("prompt", ["hello to the quick", "日本語 🦉"])
def test_greedy_text_is_the_targets(pair, prompt):
    target, draft = pair
    ids = target.tokenizer.encode(prompt, add_special_tokens=False)[:-1]  # ends inside a character
    plain = generate(target, None, ids, max_new_tokens=16, eos_token_ids=()).tokens
    drafter = TranslatedDraftModel(draft, target)
    for settings in (DraftSettings("chain", 4), DraftSettings("tree", 3, 2, 6)):
        out = generate(target, drafter, ids, max_new_tokens=16, settings=settings, eos_token_ids=())
        assert out.tokens == plain
