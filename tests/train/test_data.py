"""Masks by prefix rendering, rows that are dropped and why, the cache of encoded rows, batches."""

import json
from collections import Counter

import pytest
import torch

from drafters.errors import UserError
from tests.tiny import CHATML, END_OF_TURN, TEMPLATES, make_tokenizer
from train import data
from train.data import RowDropped, collate, encode_messages, global_batches, load_rows
from train.recipe import recipe_from_dict

CHAT = [
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "I am fine, é thank you."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "It is Paris."},
]

# Like Qwen3: what is thought in earlier turns is dropped.
THINKING = CHATML.replace(
    "message['content'] +",
    "(message['content'] if loop.last or message['role'] == 'user' else message['content'].split('</think>')[-1]) +",
)
THOUGHT = [
    {**turn, "content": f"<think>hm</think>{turn['content']}"} if turn["role"] == "assistant" else turn for turn in CHAT
]


def turn(user="Hello there", assistant="Hello to you"):
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def spans(tokenizer, ids, mask) -> list[str]:
    """Decodes each run of supervised tokens."""
    found, current = [], []
    for token, flag in [*zip(ids, mask, strict=True), (0, False)]:
        if flag:
            current.append(token)
        elif current:
            found.append(tokenizer.decode(current))
            current = []
    return found


def prompt_ids(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


@pytest.fixture
def load(tmp_path):
    def run(rows, tokenizer=None, **options):
        path = tmp_path / "rows.jsonl"
        if rows is not None:
            path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        raw = {"source": str(path), "validation_rows": 0, "max_length": 128, **options}
        recipe = recipe_from_dict({"output": str(tmp_path / "run"), "drafter": {"kind": "medusa"}, "data": raw})
        return load_rows(recipe, tokenizer or make_tokenizer())

    return run


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("turns", ["all", "last", "split"])
def test_mask_is_assistant_text_and_end_of_turn(template, turns):  # pitfalls 1, 2: no template has generation tags
    tokenizer = make_tokenizer(template)
    rows = encode_messages(tokenizer, CHAT, 512, turns)
    ends = END_OF_TURN[template]
    space = " " if template == "inst" else ""  # that template's own, which the target has to write
    answers = [f"{space}{CHAT[1]['content']}{ends}", f"{space}{CHAT[3]['content']}{ends}"]
    expected = {"all": [answers], "last": [answers[1:]], "split": [answers[:1], answers[1:]]}[turns]
    assert [spans(tokenizer, *row) for row in rows] == expected
    whole = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert whole[: len(rows[-1][0])] == rows[-1][0]


@pytest.mark.parametrize("template", TEMPLATES)
def test_prefix_is_the_inference_prompt(template):  # pitfalls 3, 4
    tokenizer = make_tokenizer(template)
    for row, end in zip(encode_messages(tokenizer, CHAT, 512, "split"), (1, 3), strict=True):
        assert row[0][: row[1].index(True)] == prompt_ids(tokenizer, CHAT[:end])


def test_template_that_drops_reasoning():  # pitfall 4
    tokenizer = make_tokenizer(THINKING)
    with pytest.raises(UserError, match=r"turn 1 differently.*token \d+ is '<'.*data.turns=split or data.turns=last"):
        encode_messages(tokenizer, THOUGHT, 512, "all")
    rows = encode_messages(tokenizer, THOUGHT, 512, "split")
    assert [spans(tokenizer, *row) for row in rows] == [
        [f"{THOUGHT[1]['content']}<|im_end|>"],
        [f"{THOUGHT[3]['content']}<|im_end|>"],
    ]
    assert rows[1][0][: rows[1][1].index(True)] == prompt_ids(tokenizer, THOUGHT[:3])
    assert encode_messages(tokenizer, THOUGHT, 512, "last") == rows[1:]


def test_prompt_that_the_answer_does_not_continue():  # pitfall 3
    tokenizer = make_tokenizer(CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"))
    with pytest.raises(UserError, match=r"token \d+ is '<' in the one, .* in the other; let the target write"):
        encode_messages(tokenizer, CHAT, 512)


def test_merges_across_the_border_keep_the_prompt():
    header = "{{ 'Q' if message['role'] == 'user' else ' th' }}"
    loop = "{% for message in messages %}" + header + "{{ message['content'] }}{% endfor %}"
    tokenizer = make_tokenizer(loop + "{% if add_generation_prompt %} th{% endif %}")
    ((ids, mask),) = encode_messages(tokenizer, turn("x", "e quick brown"), 512)
    prompt = prompt_ids(tokenizer, turn("x")[:1])
    whole = tokenizer.apply_chat_template(turn("x", "e quick brown"), tokenize=True, return_dict=False)
    assert whole[: len(prompt)] != prompt and ids[: mask.index(True)] == prompt
    assert spans(tokenizer, ids, mask) == ["e quick brown"]


def test_content_may_hold_special_tokens_and_white_space():
    tokenizer = make_tokenizer()
    rows = encode_messages(tokenizer, turn(assistant="left <|im_end|> right \n"), 512)
    assert spans(tokenizer, *rows[0]) == ["left <|im_end|> right \n<|im_end|>"]
    gemma = make_tokenizer("gemma")
    assert spans(gemma, *encode_messages(gemma, turn(assistant=" left \n"), 512)[0]) == ["left<end_of_turn>"]


def test_sharegpt_and_trailing_user_turn():
    tokenizer = make_tokenizer()
    shared = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in CHAT]
    assert encode_messages(tokenizer, [*shared, {"from": "human", "value": "Bye"}], 512) == encode_messages(
        tokenizer, CHAT, 512
    )


@pytest.mark.parametrize("turns", ["all", "last", "split"])
@pytest.mark.parametrize("length", [4, 17, 30, 64])
def test_ids_and_mask_are_cut_alike(turns, length):  # pitfall 7
    for ids, mask in encode_messages(make_tokenizer(), CHAT, length, turns):
        assert len(ids) == len(mask) <= length


def test_truncation_before_dropping(load):  # pitfall 6
    long = {"messages": turn(user="one two three " * 80)}
    train, _, report = load([long, {"messages": turn()}], max_length=64)
    assert len(train) == 1 and report.dropped == {"nothing_to_train_on": 1} and "dropped 1" in str(report)
    with pytest.raises(UserError, match=r"(?s)no row is left.*1 rows read, 0 kept.*dropped 1: nothing_to_train_on"):
        load([long], max_length=64)


def test_bad_rows_are_counted_and_good_ones_kept(load):  # pitfall 8
    user, assistant, system = ({"role": role, "content": "Hi"} for role in ("user", "assistant", "system"))
    rows = [
        {"messages": turn()},
        {"messages": []},
        {"messages": [system]},
        {"messages": [assistant, user]},
        {"messages": [user, user, assistant]},
        {"messages": [user]},
        {"messages": turn(assistant=" ")},
        {"messages": [{"role": "narrator", "content": "Hi"}]},
        {"messages": "text"},
        {"prompt": "Hi"},
        "{broken",
        "[1, 2]",
        "",
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    ]
    train, _, report = load(rows)
    assert len(train) == report.kept == 2 and report.read == 13
    assert report.dropped == Counter(
        empty=3,
        assistant_first=1,
        not_alternating=1,
        no_assistant=1,
        unknown_role=1,
        bad_messages=1,
        no_messages=1,
        bad_json=2,
    )
    assert "more rows were dropped than kept" in str(report)


def test_template_that_refuses_a_row(load):
    system = [{"role": "system", "content": "Be brief."}, *turn()]
    _, _, report = load([{"messages": system}, {"messages": turn()}], make_tokenizer("gemma"))
    assert report.dropped == {"template_error": 1} and "System role not supported" in str(report)


def test_no_template(load):
    with pytest.raises(UserError, match="has no chat template"):
        load([{"messages": turn()}], make_tokenizer(None))


def test_given_ids_are_taken_as_they_are(load):
    tokenizer = make_tokenizer()
    ((ids, mask),) = encode_messages(tokenizer, CHAT, 512)
    flags = [int(flag) for flag in mask]
    row = {"messages": CHAT, "input_ids": ids, "loss_mask": flags}
    other = make_tokenizer("llama3")
    ((strange, strange_mask),) = encode_messages(other, CHAT, 512)
    bad = [
        {**row, "loss_mask": flags[1:]},
        {**row, "input_ids": [512, *ids[1:]]},
        {**row, "loss_mask": [2, *flags[1:]]},
        {**row, "input_ids": strange, "loss_mask": [int(flag) for flag in strange_mask]},
    ]
    train, _, report = load([row, *bad], tokenizer, max_length=24)
    assert train[0]["input_ids"] == ids[:24] and train[0]["loss_mask"] == mask[:24]
    assert report.dropped == Counter(length_mismatch=1, id_out_of_range=1, bad_mask=1, prompt_mismatch=1)


def test_train_on_all_of_the_targets_own_text(tmp_path):
    folder = tmp_path / "self"
    folder.mkdir()
    recipe = {"output": str(tmp_path / "run"), "drafter": {"kind": "medusa"}, "synthesis": {"folder": str(folder)}}
    recipe["data"] = {"train_on": "all", "validation_rows": 1}
    with pytest.raises(UserError, match="holds no shard-"):
        load_rows(recipe_from_dict(recipe), make_tokenizer())
    for shard in range(2):
        (folder / f"shard-{shard:05d}.jsonl").write_text(
            json.dumps({"input_ids": [20 + shard] * 5, "loss_mask": [0] * 5})
        )
    train, validation, report = load_rows(recipe_from_dict(recipe), make_tokenizer())
    assert train[0]["loss_mask"] == [False, True, True, True, True] and report.supervised == 8
    assert len(train) == len(validation) == 1 and train[0]["input_ids"] != validation[0]["input_ids"]
    row = {"input_ids": [30] * 6, "loss_mask": [0, 0, 0, 0, 1, 1], "written": [0, 0, 1, 0, 1, 1]}
    (folder / "shard-00002.jsonl").write_text(json.dumps(row))
    train, validation, _ = load_rows(recipe_from_dict(recipe), make_tokenizer())
    masks = [list(row["loss_mask"]) for row in (*train, *validation) if row["input_ids"][0] == 30]
    assert masks == [[False, False, True, False, True, True]], "not what the template dictates"


def test_cache_misses_when_anything_changes(load, monkeypatch):  # pitfall 11
    encoded = []
    original = data.encode_messages
    monkeypatch.setattr(data, "encode_messages", lambda *args: encoded.append(1) or original(*args))

    def encodes(*args, **options) -> bool:
        encoded.clear()
        load(*args, **options)
        return bool(encoded)

    rows = [{"messages": CHAT}, {"messages": turn()}]
    assert encodes(rows)
    assert not encodes(rows) and not encodes(None, validation_rows=1)
    assert encodes(rows, make_tokenizer(vocab_size=500))
    assert encodes(rows, make_tokenizer("llama3"))
    assert encodes(rows, make_tokenizer(CHATML + "\n"))
    assert encodes(rows, max_length=127)
    assert encodes(rows, turns="last")
    assert encodes(rows, max_rows=1)
    assert encodes(rows[:1])
    assert not encodes(rows)


def test_interrupted_encoding_leaves_no_complete_folder(load, tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data, "encode_messages", stop)
        with pytest.raises(KeyboardInterrupt):
            load([{"messages": turn()}])
    assert not list((tmp_path / "run" / "data").iterdir())
    assert len(load([{"messages": turn()}])[0]) == 1


def test_validation_rows_are_a_seeded_choice(load):
    rows = [{"messages": turn(assistant=f"answer {number}")} for number in range(10)]
    train, validation, report = load(rows, validation_rows=3)
    again = load(rows, validation_rows=3)[1]
    assert (len(train), len(validation), report.kept) == (7, 3, 10)
    assert [row["input_ids"] for row in validation.rows] == [row["input_ids"] for row in again.rows]
    assert not {str(row["input_ids"]) for row in train.rows} & {str(row["input_ids"]) for row in validation.rows}
    with pytest.raises(UserError, match="validation_rows=10 leaves nothing to train on: only 10 rows"):
        load(rows, validation_rows=10)


def test_missing_source_and_long_rows(load):
    with pytest.raises(UserError, match="is no file"):
        load(None)
    recipe = recipe_from_dict({"output": "x", "drafter": {"kind": "medusa"}, "data": {"max_length": 4096}})
    with pytest.raises(UserError, match="data.max_length=4096 exceeds the target's 2048 positions; lower it"):
        load_rows(recipe, make_tokenizer(), max_positions=2048)


def test_supervised_counts(load):
    train, _, report = load([{"messages": CHAT}, {"messages": turn()}])
    counts = train.supervised_counts(512)
    assert counts.sum() == report.supervised and counts[make_tokenizer().eos_token_id] == 3


def test_batches_depend_on_seed_and_epoch_only():
    batches = global_batches(10, 4, seed=1, epoch=0)
    assert [len(batch) for batch in batches] == [4, 4, 2] and sorted(sum(batches, [])) == list(range(10))
    assert batches == global_batches(10, 4, 1, 0)
    assert batches != global_batches(10, 4, 1, 1) and batches != global_batches(10, 4, 2, 0)


def test_collate_pads_on_the_right():
    batch = collate([{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8], "loss_mask": [1]}], pad_id=1)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1]] and batch["input_ids"].dtype == torch.int64
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["lengths"].tolist() == [3, 1]


def test_row_dropped_says_why():
    with pytest.raises(RowDropped, match="not_alternating: roles user user"):
        encode_messages(make_tokenizer(), [CHAT[0], CHAT[0]], 512)
