"""Recipes are read strictly, and every mistake is one clear line."""

import re
from pathlib import Path

import pytest
import yaml

from drafters.errors import UserError, cli
from train.recipe import Recipe, load_recipe, recipe_from_dict

MINIMAL = "output: runs/x\ndrafter:\n  kind: eagle3\n"


@pytest.fixture
def recipe_file(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def message(path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_defaults_follow_the_kind_of_drafter(recipe_file):
    path = recipe_file(MINIMAL)
    eagle3 = load_recipe(path)
    assert (eagle3.objective.losses, eagle3.objective.steps) == ({"kl": 1.0}, 3)
    eagle1 = load_recipe(path, ["drafter.kind=eagle1"])
    assert (eagle1.objective.losses, eagle1.objective.steps) == ({"smooth_l1": 1.0, "kl": 0.1}, 1)
    assert load_recipe(path, ["drafter.kind=medusa"]).objective.losses == {"kl": 1.0}
    assert load_recipe(path, ["objective.losses={ce: 0.5}", "objective.steps=5"]).objective.losses == {"ce": 0.5}


def test_overrides_are_parsed_as_yaml(recipe_file):
    recipe = load_recipe(
        recipe_file(MINIMAL + "train:\n  lr: 1e-4\n"),
        ["train.min_lr=1E-2", "drafter.taps=[1, 15]", "train.clip=null", "seed=3", "train.mixed_precision=no"]
        + ["drafter.draft_vocab=0.95", "train.warmup=20", "data.source=a=b.jsonl"],
    )
    assert recipe.train.lr == 1e-4 and recipe.train.min_lr == 0.01 and recipe.train.clip is None
    assert recipe.drafter.taps == (1, 15) and recipe.drafter.draft_vocab == 0.95 and recipe.seed == 3
    assert recipe.train.warmup == 20 and isinstance(recipe.train.warmup, int)
    assert recipe.train.mixed_precision == "no" and recipe.data.source == "a=b.jsonl"


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle1", "eagle3"])
def test_resolved_recipe_loads_equal(recipe_file, kind):
    recipe = load_recipe(recipe_file(MINIMAL), [f"drafter.kind={kind}", "train.lr=1e-5", "train.trackers=[]"])
    again = load_recipe(recipe_file(yaml.safe_dump(recipe.to_dict(), sort_keys=False)))
    assert again == recipe and isinstance(again, Recipe)
    assert recipe_from_dict(recipe.to_dict()) == recipe


def test_unknown_keys_name_the_nearest(recipe_file):  # pitfall 86
    path = recipe_file(MINIMAL)
    assert "unknown key train.global_bach; did you mean train.global_batch?" in message(path, "train.global_bach=4")
    assert "unknown key lr; did you mean train.lr?" in message(path, "lr=1e-3")
    assert "unknown key data.lr; did you mean train.lr?" in message(path, "data.lr=1e-3")
    assert "unknown key drafters; did you mean drafter?" in message(path, "drafters={kind: medusa}")
    assert "did you mean" in message(path, "train.zzz=1")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr=fast", "train.lr=fast must be a number above 0"),
        ("train.lr=.inf", "train.lr=inf must be a number"),
        ("train.global_batch=8.5", "train.global_batch=8.5 must be a whole number of at least 1"),
        ("train.global_batch=true", "train.global_batch=true must be a whole number"),
        ("train.cache_features=1", "train.cache_features=1 must be true or false"),
        ("train.optimizer=adam", "must be one of adamw, muon; did you mean adamw?"),
        ("train.betas=[0.9]", "train.betas=[0.9] must be a list of 2"),
        ("train.trackers=[tensorbord]", "must be a list of one of jsonl, tensorboard, wandb"),
        ("objective.losses={l2: 1.0}", "must be a mapping of one of ce, kl, reverse_kl"),
        ("drafter.draft_vocab=1.5", "or a number above 0 and below 1, or null"),
        ("data.max_length=null", "data.max_length=null must be a whole number of at least 4"),
        ("output=2024", "output=2024 must be text; put it in quotes"),
        ("train=3", "train=3 must be a section"),
        ("train.lr", "'train.lr' must have the form section.key=value"),
        ("objective.losses.kl=1", "write objective.losses={kl: 1}"),
        ("train.lr=[1", "train.lr=[1 is not valid YAML"),
        ("train.micro_batch=3", "train.global_batch=8 is not a multiple of train.micro_batch=3"),
        ("objective.losses={smooth_l1: 1}", "smooth_l1 needs drafter.kind=eagle1, not eagle3"),
        ("objective.losses={kl: 0}", "needs a weight above 0"),
        ("drafter.heads=3", "drafter.heads=3 has no effect on eagle3"),
        ("objective.top_k=5", "objective.top_k=5 has no effect without the loss topk"),
        ("drafter.taps=[1, 1]", "names a layer twice"),
        ("seed=4294967296", "seed=4294967296 must be a whole number"),
        ("data.source='hub:'", "names no data set"),
        ("data.source=rows.json", "must be synthesis, the path of a .jsonl file, or hub:ID"),
        ("data.max_rows=32", "leaves nothing to train on"),
    ],
)
def test_wrong_values(recipe_file, override, expected):
    assert expected in message(recipe_file(MINIMAL), override)


def test_contradictions_between_sections(recipe_file):
    path = recipe_file(MINIMAL)
    assert "train_on=all needs" in message(path, "data.train_on=all", "data.source=x.jsonl")
    assert "drafter.taps=" in message(path, "drafter.kind=eagle1", "drafter.taps=[3]")
    assert "has no effect on eagle1" in message(path, "drafter.kind=eagle1", "drafter.norm_output=true")
    assert "norm the tapped layers twice" in message(path, "drafter.norm_before_fc=true", "drafter.fc_norm=true")
    for key in ("drafter.kind=eagle1", "objective.steps"), ("drafter.kind=hydra", "drafter.heads"):
        told = message(path, key[0], f"{key[1]}=31", "data.max_length=32")
        assert f"{key[1]}=31 predicts past the end of every row of data.max_length=32; 30 at most" in told
    for kind in ("medusa", "hydra"):
        for key in ("steps=3", "detach=true"):
            assert f"{key} has no effect on {kind}" in message(path, f"drafter.kind={kind}", f"objective.{key}")


def test_all_errors_at_once_one_line_each(recipe_file):
    text = message(
        recipe_file("drafter:\n  kind: eagel3\n"), "train.lr=-1", "train.optimiser=muon", "train.micro_batch=x"
    )
    head, *lines = text.splitlines()
    assert head.endswith("has 5 errors:") and len(lines) == 5
    assert any("did you mean eagle3?" in line for line in lines) and any("output is missing" in line for line in lines)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n- b\n", "must be a mapping of sections, not a list"),
        (b"\x80\x81\xff\xfe" * 9, "is not a text file"),
        (b"GGUF\x00\x01\x02", "is not valid YAML"),
        ("train: {lr: 1\n", "is not valid YAML"),
        (MINIMAL + "output: runs/y\n", "key output is written twice (line 4"),
        ("output: x\ndrafter:\n  kind: medusa\n  kind: eagle1\n", "key kind is written twice"),
        ("train: 3\noutput: x\n", "train=3 must be a section"),
    ],
)
def test_broken_files(recipe_file, content, expected):
    assert expected in message(recipe_file(content))


def test_missing_file_and_folder(tmp_path):
    assert "cannot read recipe" in message(tmp_path / "none.yaml")
    assert "cannot read recipe" in message(tmp_path)


RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_the_repository(path):
    recipe, text = load_recipe(path), path.read_text()
    assert recipe.output == f"runs/{path.stem}"
    header = text[: text.index("output:")]
    assert re.search(rf"accelerate launch .*-m train recipes/{path.name}", header) and "easured" in header
    others = [other for other in map(load_recipe, RECIPES) if other.synthesis.folder == recipe.synthesis.folder]
    assert all(other.synthesis == recipe.synthesis and other.target == recipe.target for other in others)


def test_every_field_has_its_reference():
    import ast
    import inspect

    import train.recipe

    for node in ast.parse(inspect.getsource(train.recipe)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for item, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(item, ast.AnnAssign) and not (
                node.name == "Recipe"
                and item.target.id in ("drafter", "target", "data", "synthesis", "objective", "backbone", "train")
            ):
                assert isinstance(following, ast.Expr), f"{node.name}.{item.target.id} has no docstring"


@pytest.mark.parametrize(
    ("raised", "status", "expected"),
    [
        (UserError("no such thing"), 2, "error: no such thing\n"),
        (KeyboardInterrupt(), 130, "interrupted; run the same"),
    ],
)
def test_cli_prints_one_line(capsys, raised, status, expected):
    @cli
    def main():
        raise raised

    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == status and expected in capsys.readouterr().err
