"""The target's own text: repeatable, resumable, counted, and really what the target says to those very tokens."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train.features
import train.synthesis
from decode.engine import generate
from drafters.errors import UserError
from drafters.target import wrap_target
from tests.tiny import CHATML, make_model, make_tokenizer
from train.data import load_rows
from train.recipe import recipe_from_dict
from train.synthesis import MANIFEST, Block, synthesize

SMALL = {
    "tokens": 300,
    "turns": 3,
    "batch": 5,
    "columns": 150,
    "max_user_tokens": 7,
    "max_new_tokens": 16,
    "temperature": 0.8,
}


@pytest.fixture(scope="module")
def chatty():
    """A target that often ends its turn, so that conversations go on and begin anew within a block."""
    model, tokenizer = make_model(layers=2, seed=4), make_tokenizer()
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 2.0
    return wrap_target(model, tokenizer, "chatty")


def recipe_for(folder, prompts=None, seed=0, name="text", kind="medusa", train=None, **options):
    raw = {"output": str(folder / "run"), "drafter": {"kind": kind}, "seed": seed, "data": {"validation_rows": 0}}
    raw |= {"train": train} if train else {}
    given = {"prompts": str(prompts)} if prompts else {}
    return recipe_from_dict({**raw, "synthesis": {**SMALL, **given, "folder": str(folder / name), **options}})


def shards(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("shard-*.jsonl"))}


def rows_of(folder):
    return [json.loads(line) for text in shards(folder).values() for line in text.decode().splitlines()]


def manifest_of(folder):
    return json.loads((Path(folder) / MANIFEST).read_text())


def spans(row):
    """(start, end) of each run of supervised tokens."""
    mask = [0, *row["loss_mask"], 0]
    starts = [i for i in range(len(mask) - 1) if mask[i + 1] > mask[i]]
    return list(zip(starts, [i for i in range(len(mask) - 1) if mask[i + 1] < mask[i]], strict=True))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_same_seed_same_text(chatty, tmp_path):
    one, two, other = (recipe_for(tmp_path, name=name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    first = shards(synthesize(one, chatty))
    assert len(first) > 1 and shards(synthesize(two, chatty)) == first != shards(synthesize(other, chatty))


@pytest.mark.parametrize("die_in", ["_write_shard", "_save_manifest"])
def test_killed_after_the_first_shard(chatty, tmp_path, monkeypatch, die_in):  # pitfall 19
    whole = shards(synthesize(recipe_for(tmp_path, name="whole"), chatty))
    recipe, calls, right = recipe_for(tmp_path, name="killed"), [], getattr(train.synthesis, die_in)

    def die(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return right(*args)

    monkeypatch.setattr(train.synthesis, die_in, die)
    with pytest.raises(KeyboardInterrupt):
        synthesize(recipe, chatty)
    (Path(recipe.synthesis.folder) / ".shard-00001.jsonl").write_text('{"half')
    monkeypatch.setattr(train.synthesis, die_in, right)
    assert shards(synthesize(recipe, chatty)) == whole
    one, two = (manifest_of(tmp_path / name) for name in ("whole", "killed"))
    assert one["totals"] == two["totals"] and two["complete"]


def test_every_conversation_is_counted(chatty, tmp_path):
    folder = synthesize(recipe_for(tmp_path), chatty)
    manifest, rows = manifest_of(folder), rows_of(folder)
    totals = manifest["totals"]
    assert totals["rows_written"] == len(rows) > 0 and totals["tokens"] >= SMALL["tokens"]
    assert totals["rows_asked"] == totals["rows_written"] + sum(totals["dropped"].values())
    for shard in manifest["shards"]:
        assert shard["written"] == len((folder / shard["file"]).read_text().splitlines())
    assert any(shard["asked"] > SMALL["batch"] for shard in manifest["shards"])  # rows began anew within a block
    assert any(len(spans(row)) > 1 for row in rows)  # and conversations went on


def test_damaged_shard_is_written_anew(chatty, tmp_path, capsys):
    recipe = recipe_for(tmp_path)
    folder = synthesize(recipe, chatty)
    whole = shards(folder)
    (folder / "shard-00001.jsonl").write_bytes(whole["shard-00001.jsonl"][:-5])
    capsys.readouterr()
    assert shards(synthesize(recipe, chatty)) == whole
    assert "shard-00001.jsonl is damaged; writing it and what follows anew" in capsys.readouterr().out
    (folder / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="manifest.json is damaged"):
        synthesize(recipe, chatty)


def test_more_tokens_continue_the_same_text(chatty, tmp_path, monkeypatch):
    first = shards(synthesize(recipe_for(tmp_path, tokens=150), chatty))
    more = shards(synthesize(recipe_for(tmp_path, tokens=450), chatty))
    assert len(more) > len(first) and all(more[name] == text for name, text in first.items())
    monkeypatch.setattr(train.synthesis, "_write_shard", None)  # a finished text is not touched again
    assert shards(synthesize(recipe_for(tmp_path, tokens=450), chatty)) == more


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"temperature": 0.5}, "temperature=0.8, not 0.5"),
        ({"seed": 3}, "seed=0, not 3"),
        ({"openers": ["The fox"]}, r"openers=None, not \['The fox'\]"),
    ],
)
def test_text_of_other_settings_is_refused(chatty, target, tmp_path, change, key):
    synthesize(recipe_for(tmp_path, tokens=50), chatty)
    with pytest.raises(UserError, match=f"holds text made with {key}; choose another folder"):
        synthesize(recipe_for(tmp_path, tokens=50, **change), chatty)
    with pytest.raises(UserError, match="holds text made with target="):
        synthesize(recipe_for(tmp_path, tokens=50), target)


@pytest.mark.parametrize("mode", ["self-written", "openers", "prompts"])
def test_text_is_what_the_target_says(chatty, tmp_path, monkeypatch, mode):  # pitfall 3
    if mode == "prompts":
        turns = [[f"{one} {two}", two, one] for one in WORDS for two in WORDS]
        several = [{"messages": [{"role": "user", "content": text} for text in texts]} for texts in turns]
        path = write_jsonl(tmp_path / "prompts.jsonl", [*PROMPTS, *several])
        options = {"prompts": path, "temperature": 0.0, "tokens": 1000, "batch": 40}
    else:  # users by chance, so that rows differ; answers greedy, so that they can be compared
        options, right = {"tokens": 700}, Block._sample
        if mode == "openers":
            options["openers"] = ["The fox", "one two\n\n"]

        def sample(block, logits):
            answers = torch.tensor([row is not None and row.role == "assistant" for row in block.rows])
            return torch.where(answers, logits.argmax(-1), right(block, logits))

        monkeypatch.setattr(Block, "_sample", sample)
    folder = synthesize(recipe_for(tmp_path, **options), chatty)
    rows, checked, at_depth = rows_of(folder), 0, Counter()
    for row in rows:
        answers = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        assert len(answers) == len(spans(row)) and len(row["input_ids"]) == len(row["loss_mask"])
        for k, ((start, end), index) in enumerate(zip(spans(row), answers, strict=True)):
            assert row["input_ids"][:start] == chatty.render(row["messages"][:index])
            said = row["input_ids"][start:end]
            assert generate(chatty, None, row["input_ids"][:start], max_new_tokens=len(said)).tokens == said
            text = chatty.tokenizer.decode(said, skip_special_tokens=True)
            assert text == row["messages"][index]["content"]
            checked, at_depth[k] = checked + 1, at_depth[k] + 1
    assert checked >= 5 and at_depth[1] > 0
    if mode == "openers":
        assert {row["messages"][0]["content"][:7] for row in rows} == {"The fox", "one two"}


WORDS = ("Hi", "one", "fox", "dog", "Paris", "text", "draft")
PROMPTS = [
    {"prompt": "How are you?"},
    {"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "What is the capital?"}]},
    {"messages": [{"role": "user", "content": w} for w in ("Count to three", "and on", "and back")]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "not the target's"}]},
    {"prompt": "one two three"},
    {"prompt": "def add"},
]


def test_prompts_are_answered_turn_by_turn(chatty, tmp_path, capsys):
    bad = [
        {"prompt": ""},
        {"messages": [{"role": "user"}]},
        {"messages": []},
        {"text": "x"},
        {"prompt": "one two " * 400},
    ]
    path = write_jsonl(tmp_path / "prompts.jsonl", [*bad, *PROMPTS])
    path.write_text(path.read_text() + "{broken\n")
    folder = synthesize(recipe_for(tmp_path, path, tokens=10_000, batch=4), chatty)
    rows = rows_of(folder)
    assert manifest_of(folder)["totals"]["rows_asked"] == len(PROMPTS) == len(rows)
    out = capsys.readouterr().out
    assert "'without user text': 5" in out and "'longer than 512 positions with the answer': 1" in out
    told = [[m["content"] for m in row["messages"] if m["role"] == "user"] for row in rows]
    assert sorted(turns[0] for turns in told) == sorted(p.get("prompt") or user_of(p) for p in PROMPTS)
    assert not any("not the target's" in str(row) for row in rows)
    assert all(turns in (["Count to three", "and on", "and back"][: len(turns)], turns[:1]) for turns in told)
    assert [m["role"] for m in next(r for r in rows if "capital" in str(r))["messages"]] == [
        "system",
        "user",
        "assistant",
    ]
    assert rows_of(synthesize(recipe_for(tmp_path, path, tokens=10_000, batch=4, rows=2, name="two"), chatty))[2:] == []


def user_of(row):
    return next(m["content"] for m in row["messages"] if m["role"] == "user")


def test_multi_turn_prompts_need_no_template_that_takes_two_user_turns(tmp_path):
    model, tokenizer = make_model(layers=1, vocab_size=512), make_tokenizer("gemma")
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    strict = wrap_target(model, tokenizer, "strict")
    path = write_jsonl(tmp_path / "prompts.jsonl", [PROMPTS[2]])
    assert len(rows_of(synthesize(recipe_for(tmp_path, path), strict))) == 1


@pytest.mark.parametrize(
    ("content", "expected"), [(None, "no such file"), ('{"text": "x"}\n', "has no usable row with a `prompt`")]
)
def test_prompts_that_are_none(chatty, tmp_path, content, expected):
    path = tmp_path / "prompts.jsonl"
    if content:
        path.write_text(content)
    with pytest.raises(UserError, match=expected):
        synthesize(recipe_for(tmp_path, path), chatty)


def test_what_was_written_holds_both_sides_and_no_template(chatty, tmp_path):
    folder = synthesize(recipe_for(tmp_path), chatty)
    rows = rows_of(folder)
    assert all(w >= m for row in rows for w, m in zip(row["written"], row["loss_mask"], strict=True))
    answers, written = (sum(sum(row[key]) for row in rows) for key in ("loss_mask", "written"))
    # a user turn that is tokenized anew counts up to where that shows
    assert 1.1 * answers < written <= manifest_of(folder)["totals"]["tokens"]


def test_rows_load_as_they_are(chatty, tmp_path):
    recipe = recipe_for(tmp_path, tokens=800)
    rows = rows_of(synthesize(recipe, chatty))
    data, _, report = load_rows(recipe, chatty.tokenizer, vocab_size=512)
    assert set(report.dropped) <= {"empty"}, report  # an answer that is nothing but its end
    assert report.dropped["empty"] == sum(any(not m["content"].strip() for m in row["messages"]) for row in rows)
    kept = [row for row in rows if all(m["content"].strip() for m in row["messages"])]
    assert [row["input_ids"] for row in kept] == list(data.rows["input_ids"]) and len(kept) > 10
    assert [[bool(flag) for flag in row["loss_mask"]] for row in kept] == list(data.rows["loss_mask"])


@pytest.mark.parametrize("given", [False, True], ids=["self-written", "prompts"])
def test_features_come_with_the_text(chatty, tmp_path, monkeypatch, given):
    asked = [{"prompt": text} for text in ("the quick brown fox", "one", "how are you today my friend")]
    prompts = write_jsonl(tmp_path / "prompts.jsonl", asked) if given else None
    recipe = recipe_for(tmp_path, prompts, kind="eagle3", tokens=800)
    folder = synthesize(recipe, chatty)
    data, _, _ = load_rows(recipe, chatty.tokenizer, vocab_size=512)
    taps = chatty.default_taps()
    store = train.features.FeatureStore(chatty, data, taps, tmp_path / "features", limit_gb=1.0)
    compute = train.features.target_features
    computed = []
    monkeypatch.setattr(
        train.features, "target_features", lambda t, ids, taps: computed.append(ids) or compute(t, ids, taps)
    )
    store.prepare(folder)
    assert len(computed) < len(data) / 16, "only blocks with a row that was cut off while it was read anew"
    batch = data.batch(range(len(data)), store.pad_id)
    kept, read = store.get(range(len(data)), batch["input_ids"]), batch["lengths"][:, None] - 1
    live = compute(chatty, batch["input_ids"], taps)
    real = torch.arange(batch["input_ids"].shape[1]) < read  # the last token of a row was never read
    for one, two in ((live.final, kept.final), (live.taps, kept.taps)):
        torch.testing.assert_close(two[real], one[real].bfloat16().float(), rtol=2e-2, atol=1e-3)
    train.features.check_features(chatty, store)
    seen = train.features._written(folder)
    train.features.drop_written(folder)
    monkeypatch.setattr(train.features, "_written", lambda text: seen)  # another run dropped it after we had looked
    other = train.features.FeatureStore(chatty, data, taps, tmp_path / "other", limit_gb=1.0)
    computed.clear()
    other.prepare(folder)
    assert len(computed) == -(-len(data) // 16)


def test_layers_that_are_not_there_are_an_error_before_anything_is_written(chatty, tmp_path):
    recipe = recipe_for(tmp_path)
    recipe = replace(recipe, drafter=replace(recipe.drafter, kind="eagle3", taps=(0, 99)))
    with pytest.raises(UserError, match="99"):
        synthesize(recipe, chatty)


def test_features_that_would_not_fit_are_not_kept(chatty, tmp_path):
    folder = synthesize(recipe_for(tmp_path, train={"cache_gb": 1e-6}), chatty)
    assert shards(folder) and not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "has no chat template"),
        (
            "{% for message in messages if message['role'] != 'user' %}{{ message['content'] }}{% endfor %}",
            "does not show",
        ),
    ],
)
def test_template_without_a_user_turn(tmp_path, template, expected):
    target = wrap_target(make_model(layers=1), make_tokenizer(template), "mute")
    with pytest.raises(UserError, match=expected):
        synthesize(recipe_for(tmp_path), target)


def test_target_that_says_nothing(tmp_path):
    model, tokenizer = make_model(layers=1), make_tokenizer(CHATML)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    target = wrap_target(model, tokenizer, "mute")
    target.head = lambda hidden: (
        torch.nn.functional.one_hot(torch.full(hidden.shape[:-1], tokenizer.eos_token_id), 512) * 1e3
    )
    with pytest.raises(UserError, match="wrote no conversation; dropped: .*empty_user_turn"):
        synthesize(recipe_for(tmp_path), target)
