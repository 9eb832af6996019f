"""The chat's stream: the pieces add up to the text, characters come whole, marks follow the tokens."""

import io

import pytest
from rich.console import Console

from scripts import chat
from tests.tiny import make_tokenizer

TEXT = "naïve café: 日本語 and 🦉🦉, done"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_add_up_and_no_character_is_cut(size):
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(ids) > len(TEXT.split())  # characters spread over several tokens
    stream = chat.TextStream(tokenizer)
    pieces = [p for i in range(0, len(ids), size) for p, _ in stream.push(ids[i : i + size], 0)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == TEXT
    assert list(stream.flush()) == []


def test_a_character_is_drafted_only_if_all_its_tokens_were():
    tokenizer = make_tokenizer()
    owl = tokenizer.encode("🦉", add_special_tokens=False)
    assert len(owl) > 1
    stream = chat.TextStream(tokenizer)
    assert list(stream.push(owl[:-1], len(owl) - 1)) == []
    assert list(stream.push(owl[-1:], 0)) == [("🦉", False)]
    assert list(stream.push(owl, len(owl))) == [("🦉", True)]
    # One round: an accepted token and then the target's own.
    a, b = tokenizer.encode("x", add_special_tokens=False), tokenizer.encode("y", add_special_tokens=False)
    assert list(stream.push(a + a + b, 2)) == [("xx", True), ("y", False)]


def test_an_answer_cut_inside_a_character_is_flushed_and_special_tokens_stay_hidden():
    tokenizer = make_tokenizer()
    owl = tokenizer.encode("🦉", add_special_tokens=False)
    stream = chat.TextStream(tokenizer)
    assert list(stream.push([tokenizer.eos_token_id], 0)) in ([], [("", False)])
    list(stream.push(owl[:-1], 0))
    assert "\ufffd" in "".join(piece for piece, _ in stream.flush())


def test_marks_on_a_terminal_and_in_a_file():
    pieces = [("a", False), ("b", True)]
    plain, terminal = io.StringIO(), io.StringIO()
    assert chat.show(Console(file=plain), iter(pieces)) == "ab"
    assert plain.getvalue() == "a‹b›"
    console = Console(file=terminal, force_terminal=True, color_system="standard", _environ={})
    chat.show(console, iter(pieces))
    assert terminal.getvalue().startswith("a\x1b[") and "‹" not in terminal.getvalue()
