"""Drafters by the names that users type."""

import pytest

from drafters.checkpoint import save_drafter
from drafters.draft_model import DraftModel
from drafters.errors import UserError
from drafters.named import make_drafter
from drafters.translate import TranslatedDraftModel
from tests.tiny import make_target


def test_names_and_their_arguments(target, tmp_path):
    assert (make_drafter("lookup:5,3", target).longest, make_drafter("lookup", target).shortest) == (5, 2)
    assert make_drafter("lookahead:7,4", target).window == 7
    text = tmp_path / "a=b.txt"
    text.write_text("the quick brown fox")
    suffix = make_drafter(f"suffix:{text}", target)
    assert suffix.references.size == len(target.tokenizer.encode("the quick brown fox")) > 0
    assert make_drafter("suffix", target).references.size == 0


def test_another_model_with_the_same_tokenizer_or_another(target, tmp_path):
    for vocab_size, kind in ((512, DraftModel), (400, TranslatedDraftModel)):
        small = make_target(layers=1, vocab_size=vocab_size)
        small.model.save_pretrained(tmp_path / "small")
        small.tokenizer.save_pretrained(tmp_path / "small")
        drafter = make_drafter(f"model:{tmp_path / 'small'}", target)
        assert type(drafter) is kind and drafter.meta["draft_model"]["weights"] == small.fingerprint["weights"]


def test_a_folder_of_that_name_wins(target, drafters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_drafter(drafters["medusa"], "lookup", target, {})
    assert make_drafter("lookup", target).kind == "medusa"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lookpu", r"lookpu.*no such folder.*lookup\[:.*suffix.*lookahead.*model:NAME_OR_DIR"),
        ("runs/none", "no such folder"),
        ("lookup:a", r"lookup\[:LONGEST"),
        ("lookup:1,2,3", r"lookup\[:LONGEST"),
        ("lookahead:0,1", "ngram=1"),
        ("lookahead:99999999", "4096 the most"),
        ("lookup:9999999999", "longest <= 256 is allowed"),
        ("suffix:none.txt", "none.txt: No such file"),
        ("model", "model:NAME_OR_DIR"),
        ("model:./none", "no such folder"),
    ],
)
def test_what_is_refused(target, spec, message):
    with pytest.raises(UserError, match=message):
        make_drafter(spec, target)
