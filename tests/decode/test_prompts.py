"""Prompt files: each layout is read, each mistake is named by file and line."""

import json

import pytest

from decode.prompts import load_prompts
from drafters.errors import UserError


def test_built_in_set_has_ten_of_each_category():
    prompts = load_prompts("headstart")
    counts = {c: sum(p.category == c for p in prompts) for c in {p.category for p in prompts}}
    assert counts == dict.fromkeys(("chat", "code", "math", "summarization", "extraction", "rewriting"), 10)
    assert all(p.messages[0]["role"] == "user" and len(p.messages) == 1 for p in prompts)
    assert len({p.messages[0]["content"] for p in prompts}) == 60


def test_traffic_is_of_one_topic_and_then_of_another():
    prompts = load_prompts("traffic")
    assert [p.category for p in prompts] == ["orders"] * 40 + ["sql"] * 40
    assert len({p.messages[0]["content"] for p in prompts}) > 70


def test_limit_is_spread_over_categories():
    assert [p.id for p in load_prompts("headstart", limit=6)] == [
        "chat-01", "code-01", "math-01", "summarization-01", "extraction-01", "rewriting-01",
    ]  # fmt: skip
    assert len(load_prompts("headstart", per_category=2)) == 12
    assert len(load_prompts("headstart", per_category=2, limit=7)) == 7


def test_layouts(tmp_path):
    path = tmp_path / "mixed.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"prompt": "plain"},
        {
            "id": "m",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
            ],
        },
    ]
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    first, second, third = load_prompts(path)
    assert (first.id, first.category, first.messages) == ("81", "writing", [{"role": "user", "content": "first"}])
    assert (second.id, second.category) == ("mixed-2", None)
    assert [m["role"] for m in third.messages] == ["system", "user"]

    text = tmp_path / "lines.txt"
    text.write_text("one\n\ntwo\n")
    assert [(p.id, p.messages[0]["content"]) for p in load_prompts(text)] == [("lines-1", "one"), ("lines-3", "two")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        ("{}", "found nothing"),
        ('{"text": "x"}', "found text"),
        ('{"turns": []}', "turns"),
        ('{"turns": [3]}', "turns"),
        ('{"prompt": "  "}', "prompt"),
        ('{"messages": "x"}', "must be a list"),
        ('{"messages": [{"role": "user"}]}', "role"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "end with a user message"),
        ('{"id": "a", "prompt": "x"}', "already used in line 1"),
    ],
)
def test_bad_row_is_named_by_line(tmp_path, row, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "a", "prompt": "fine"}\n' + row + "\n")
    with pytest.raises(UserError, match=rf"bad\.jsonl:2: .*{message}"):
        load_prompts(path)


def test_nothing_to_read(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(UserError, match="holds no prompt"):
        load_prompts(empty)
    with pytest.raises(UserError, match="no such file"):
        load_prompts("headstrat")
    with pytest.raises(UserError, match="limit=0"):
        load_prompts("headstart", limit=0)
