import pytest

from drafters.base import DraftSettings
from drafters.errors import UserError


def test_settings_from_flags():
    assert DraftSettings.from_flags(None, None) is None
    assert DraftSettings.from_flags("5", None) == DraftSettings("chain", 5)
    assert DraftSettings.from_flags(None, "16,4,3") == DraftSettings("tree", total=16, length=4, top_k=3)
    for tree in ("16,4", "a,b,c", "16,4,-1", "0,4,4"):
        with pytest.raises(UserError, match="TOTAL,DEPTH,TOPK"):
            DraftSettings.from_flags(None, tree)
