"""export, describe and serve_profile as commands; the model card; no figure that was not measured."""

import json
import sys

import pytest
import torch

from decode.evaluate import evaluate
from decode.prompts import load_prompts
from decode.report import write_report
from drafters import card
from drafters.base import DraftSettings
from drafters.build import build_eagle
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from scripts import describe, export, serve_profile


@pytest.fixture(scope="module")
def run(target, tmp_path_factory):
    recipe = {"output": "/somewhere/private/run", "target": {"name": "/somewhere/private/model"}, "seed": 3}
    meta = {"data": {"tokens": 1234, "samples": 9}, "recipe": recipe, "results": {"tau_estimate": 1.5}}
    torch.manual_seed(1)
    drafter = build_eagle(target, torch.arange(1, 101), version=3)
    return save_drafter(drafter, tmp_path_factory.mktemp("r") / "mine", target, meta)


@pytest.fixture(scope="module")
def report(target, run, tmp_path_factory):
    """A real, tiny evaluation of it."""
    folder = tmp_path_factory.mktemp("report")
    page = evaluate(
        target, {"mine": load_drafter(run, target)}, load_prompts("headstart", limit=2), max_new_tokens=6, runs=1,
        settings=DraftSettings("chain", 2), warmup=0, hf_generate=False, progress=False,
    )  # fmt: skip
    write_report(page, page["outputs"], folder)
    return folder


@pytest.fixture
def command(monkeypatch, target, capsys):
    """Runs a script's main on the tiny target; returns what it printed."""
    for script in (describe, export, serve_profile):
        monkeypatch.setattr(script, "load_target", lambda *args, **kwargs: target)

    def call(script, *args):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, args)])
        script.main()
        return capsys.readouterr().out

    return call


def test_export_and_describe(command, run, tmp_path):
    told = command(export, run, "--to", "sglang", "--out", tmp_path / "x")
    assert "checked from the files" in told and "--speculative-algorithm EAGLE3" in told
    assert "SGLang: will load" in command(describe, tmp_path / "x")
    with pytest.raises(UserError, match="eagle3 works with --to vllm"):
        command(export, run, "--to", "tgi", "--out", tmp_path / "y")
    with pytest.raises(UserError, match="belong to --to hub"):
        command(export, run, "--to", "vllm", "--out", tmp_path / "y", "--push", "me/it")


def test_a_card_without_a_measurement_claims_nothing(command, run, tmp_path, target):
    command(export, run, "--to", "hub", "--out", tmp_path / "x")
    page = (tmp_path / "x" / "README.md").read_text()
    assert "not measured" in page and "speedup" not in page and "tokens/s" not in page
    assert "1,234 tokens in 9 samples" in page and "which flatters: acceptance length 1.50" in page
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == [
        "README.md", "config.json", "headstart.json", "model.safetensors",
    ]  # fmt: skip
    assert "private" not in "".join(p.read_text() for p in (tmp_path / "x").glob("*.[jm][sd]*"))
    assert load_drafter(tmp_path / "x", target).meta["warnings"] == []


def test_a_card_states_what_was_measured(command, run, report, tmp_path):
    command(export, run, "--to", "hub", "--report", report, "--out", tmp_path / "x")
    arm = next(a for a in json.loads((report / "report.json").read_text())["arms"] if a["name"] == "mine")
    page = (tmp_path / "x" / "README.md").read_text()
    assert f"| {arm['tau']:.2f} |" in page and f"{arm['speedup']:.2f}x" in page and "On 2 prompts" in page
    assert f"| greedy output | | {arm['exact_match']['verdict']}" in page


def test_a_report_of_something_else_is_refused(run, report, tmp_path):
    page = json.loads((report / "report.json").read_text())
    page["target"]["fingerprint"]["weights"] = "other"
    (tmp_path / "report.json").write_text(json.dumps(page))
    with pytest.raises(UserError, match="other weights"):
        card.measured(run, tmp_path)
    page["drafters"] = {"theirs": {"kind": "medusa"}}
    (tmp_path / "report.json").write_text(json.dumps(page))
    with pytest.raises(UserError, match="none of which"):
        card.measured(run, tmp_path)


def test_pushing_needs_the_flag_and_makes_private_repositories(command, run, tmp_path, monkeypatch):
    calls = []

    class Api:
        def create_repo(self, repo, **options):
            calls.append((repo, options))

        def upload_folder(self, **options):
            calls.append(options["folder_path"])
            return "address"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    command(export, run, "--to", "hub", "--out", tmp_path / "x")
    assert calls == []
    assert "pushed to address" in command(export, run, "--to", "hub", "--out", tmp_path / "y", "--push", "me/it")
    assert calls == [("me/it", {"private": True, "exist_ok": True}), str(tmp_path / "y")]


def test_profile_claims_nothing_without_results(command, run):
    told = command(serve_profile, run)
    assert "no claim: no evaluation" in told and "x expected" not in told
    assert "vllm serve tiny-llama --speculative-config" in told and "baseline: vllm serve tiny-llama\n" in told
    assert "sglang.launch_server" in told and "eagle3_layers_to_capture" in told and "TGI" not in told


def test_profile_from_measured_results(command, run, report, tmp_path):
    page = json.loads((report / "report.json").read_text())
    arm = next(a for a in page["arms"] if a["name"] == "mine")
    arm["survival"] = [0.9, 0.8]
    arm["cost_split"]["draft"]["ms"] = 0.0
    (tmp_path / "report.json").write_text(json.dumps(page))
    env = {"dtype": "float32", "cpu": "this one"}
    bench = {"v2": 1.0, "v4": 1.5, "v8": 3.0, "environment": env}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    options = ("--report", tmp_path, "--bench", tmp_path, "--json", tmp_path / "profile.json")
    told = command(serve_profile, run, *options)
    profile = json.loads((tmp_path / "profile.json").read_text())
    # one request, chain of 2: 1 + .9 + .8 tokens for v(3) = 1.25 plain steps
    assert profile["plan"][0]["length"] == 2 and profile["plan"][0]["speedup"] == pytest.approx(2.7 / 1.25)
    assert '"num_speculative_tokens": 1' in told and profile["rollout"]["length"] == 1
    assert "16 requests: not measured that wide" in told and "switch off below" in told
    (tmp_path / "bench.json").write_text(json.dumps(bench | {"environment": {"dtype": "bfloat16"}}))
    assert "measure both in one dtype" in command(serve_profile, run, *options)


def test_compatibility_sees_another_template_and_a_lost_stop_token(target, run, monkeypatch):
    drafter = load_drafter(run, target)
    assert all(item["ok"] is not False for item in serve_profile.compatibility(drafter, target))
    monkeypatch.setitem(target.fingerprint, "template", "other")
    drafter.draft_ids = torch.arange(100, 200)  # without <|im_end|>
    wrong = {i["item"] for i in serve_profile.compatibility(drafter, target) if i["ok"] is False}
    assert wrong == {"template", "stop tokens"}
