"""The command itself, in processes of its own: from a recipe to a drafter folder, on two processes, killed for real."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from drafters.checkpoint import load_drafter
from drafters.target import load_target
from tests.tiny import make_model, make_tokenizer
from tests.train.small import metrics, small_recipe
from train.loop import lr_factor, total_steps, train
from train.recipe import load_recipe
from train.state import read_state

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny target on disk."""
    folder = tmp_path_factory.mktemp("target")
    model, tokenizer = make_model(layers=3), make_tokenizer()
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_recipe(folder, recipe):
    path = folder / f"{Path(recipe['output']).name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def launch(path, *before, **kwargs):
    command = [sys.executable, *before, "-m", "train", str(path)]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **kwargs
    )


def finish(process, seconds=300):
    out, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, out
    return out


def test_one_command_makes_a_drafter(served, tmp_path):  # pitfalls 80, 87
    recipe = {
        "output": str(tmp_path / "run"),
        "target": {"name": str(served), "device": "cpu", "dtype": "float32"},
        "drafter": {"kind": "eagle3", "draft_vocab": 200},
        "data": {"validation_rows": 4, "max_length": 128},
        "synthesis": {"folder": str(tmp_path / "text"), "tokens": 600, "turns": 1, "batch": 8, "columns": 128}
        | {"max_user_tokens": 8, "max_new_tokens": 24},
        "train": {"global_batch": 4, "micro_batch": 4, "max_steps": 6, "decode_every": 6, "decode_prompts": 1},
    }
    out = finish(launch(write_recipe(tmp_path, recipe)))
    assert "rows read" in out and "trained 6 steps; best acceptance length" in out and "Traceback" not in out
    target = load_target(str(served), dtype="float32", device="cpu")
    drafter = load_drafter(tmp_path / "run", target)
    assert drafter.meta["warnings"] == [] and len(drafter.draft_ids) == 200
    assert drafter.meta["results"].keys() >= {"tau_estimate", "tau_decoded", "survival_estimate", "step"}
    assert drafter.meta["data"]["tokens"] > 0 and drafter.meta["recipe"]["train"]["max_steps"] == 6


def two_process_recipe(served, folder, name):
    """9 rows, 8 a step: in the last step of each epoch one process has no row at all."""
    train_options = {"global_batch": 8, "micro_batch": 4, "warmup": 2, "epochs": 2, "eval_every": 2}
    recipe = small_recipe(
        folder, name=name, target={"name": str(served)}, train=train_options, objective={"normalization": "per_token"}
    )
    return write_recipe(folder, recipe.to_dict())


def test_two_processes_equal_one(served, tmp_path):  # pitfalls 33, 35, 36
    path = two_process_recipe(served, tmp_path, "two")
    # What `accelerate launch` runs for several GPUs of a machine; for CPUs it would want MPI.
    process = launch(path, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    one = load_recipe(two_process_recipe(served, tmp_path, "one"))
    train(one, load_target(str(served), dtype="float32", device="cpu"))
    finish(process, seconds=120)
    two = load_recipe(path)
    made = [json.loads((Path(recipe.output) / "headstart.json").read_text()) for recipe in (one, two)]
    assert [meta["processes"] for meta in made] == [1, 2]
    first, second = metrics(one), metrics(two)
    assert [line.keys() for line in first] == [line.keys() for line in second]
    for line, other in zip(first, second, strict=True):
        assert list(line.values()) == pytest.approx(list(other.values()), rel=1e-5, abs=1e-5)
    rates = [[line["train/lr"] for line in lines if "train/lr" in line] for lines in (first, second)]
    total = total_steps(one, 9)
    assert rates[0] == rates[1] == pytest.approx([1e-3 * lr_factor(k, total, one) for k in range(4)])
    (weights, facts), (others, other_facts) = (read_state(Path(recipe.output)) for recipe in (one, two))
    assert facts["step"] == other_facts["step"] == 4
    for name in weights:
        if name.startswith("weight/"):
            torch.testing.assert_close(weights[name], others[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_killed_process_goes_on(served, tmp_path):  # pitfall 38
    def recipe(name):
        options = {"epochs": 40, "save_every_seconds": 0.1, "eval_every": 25, "mixed_precision": "no"}
        made = small_recipe(tmp_path, name=name, target={"name": str(served)}, train=options)
        return write_recipe(tmp_path, made.to_dict())

    finish(launch(recipe("whole")))
    killed = tmp_path / "killed"
    process = launch(recipe("killed"), start_new_session=True)
    log = killed / "metrics.jsonl"
    while not (killed / "state.safetensors").exists() or len(log.read_text().splitlines()) < 40:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 0 < read_state(killed)[1]["step"] < 120
    assert "continuing" in finish(launch(tmp_path / "killed.yaml"))
    one, two = (read_state(tmp_path / name) for name in ("whole", "killed"))
    assert one[1]["history"] == two[1]["history"] and one[1]["step"] == two[1]["step"] == 120
    assert all(torch.equal(tensor, two[0][name]) for name, tensor in one[0].items())
    logs = [
        [(line["step"], line.get("train/loss_0")) for line in map(json.loads, (tmp_path / n / "metrics.jsonl").open())]
        for n in ("whole", "killed")
    ]
    assert logs[0] == logs[1]
    best = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(tensor, best[1][name]) for name, tensor in best[0].items())


@pytest.mark.parametrize(
    ("text", "expected"),
    [("output: x\ndrafter: {kind: eagle3}\ntrain: {learning_rate: 1}\n", "unknown key train.learning_rate")],
)
def test_mistakes_are_one_line(tmp_path, text, expected):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    process = launch(path)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and out.startswith("error: ") and expected in out and "Traceback" not in out
