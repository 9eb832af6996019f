"""The command line of scripts/evaluate.py."""

import pytest

from drafters.errors import UserError
from scripts import evaluate as script


def test_drafters_are_named_by_folder_or_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "make_drafter", lambda spec, target: spec)
    (tmp_path / "a=b").mkdir()
    odd = str(tmp_path / "a=b")
    assert script.load_drafters([odd, "mine=runs/x", "runs/y"], None) == {"a=b": odd, "mine": "runs/x", "y": "runs/y"}
    named = ["suffix:a=b.txt", "suffix", "mine=lookup"]
    assert script.load_drafters(named, None) == {
        "suffix:a=b.txt": "suffix:a=b.txt",
        "suffix": "suffix",
        "mine": "lookup",
    }
    with pytest.raises(UserError, match="taken"):
        script.load_drafters(["runs/x", "other/x"], None)


def test_chain_and_tree_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        script.parser().parse_args(["--chain", "3", "--tree", "16,4,4"])
