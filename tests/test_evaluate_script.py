"""The command line of scripts/evaluate.py."""

import pytest

from drafters.base import DraftSettings
from drafters.errors import UserError
from scripts import evaluate as script


def test_draft_settings():
    assert script.draft_settings(None, None) is None
    assert script.draft_settings(5, None) == DraftSettings(kind="chain", length=5)
    assert script.draft_settings(None, "16,4,3") == DraftSettings(kind="tree", total=16, length=4, top_k=3)
    for tree in ("16,4", "a,b,c", "16,4,-1", "0,4,4"):
        with pytest.raises(UserError):
            script.draft_settings(None, tree)


def test_drafters_are_named_by_folder_or_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "load_drafter", lambda folder, target: str(folder))
    (tmp_path / "a=b").mkdir()
    odd = str(tmp_path / "a=b")
    assert script.load_drafters([odd, "mine=runs/x", "runs/y"], None) == {"a=b": odd, "mine": "runs/x", "y": "runs/y"}
    with pytest.raises(UserError, match="taken"):
        script.load_drafters(["runs/x", "other/x"], None)


def test_chain_and_tree_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        script.parser().parse_args(["--chain", "3", "--tree", "16,4,4"])
