"""export, describe and serve_profile as commands; the model card; no figure that was not measured."""

import json
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.engine import generate
from decode.evaluate import evaluate
from decode.prompts import load_prompts
from decode.report import write_report
from drafters import card
from drafters.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapted, read_adapter
from drafters.base import DraftSettings
from drafters.build import build_eagle, build_medusa
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from scripts import describe, export, serve_profile
from tests.tiny import make_target


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


@pytest.fixture(scope="module")
def medusa2(target, tmp_path_factory):
    """Heads with an adapter of the target, and its evaluation: (drafter's folder, report's folder)."""
    root, name = tmp_path_factory.mktemp("medusa2"), "model.layers.0.self_attn.q_proj"
    parts = {"A": torch.ones(1, 64), "B": torch.full((64, 1), 0.05)}
    (root / "peft").mkdir()
    tensors = {f"base_model.model.{name}.lora_{part}.weight": w for part, w in parts.items()}
    save_file(tensors, root / "peft" / ADAPTER_WEIGHTS)
    (root / "peft" / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    drafter = build_medusa(target, torch.arange(1, 101), heads=2)
    drafter.adapter = read_adapter(root / "peft", target)
    run = save_drafter(drafter, root / "two", target, {})
    page = evaluate(
        target, {"two": load_drafter(run, target)}, load_prompts("headstart", limit=1), max_new_tokens=6, runs=1,
        settings=DraftSettings("chain", 2), warmup=0, hf_generate=False, progress=False,
    )  # fmt: skip
    write_report(page, page["outputs"], root / "report")
    return run, root / "report"


@pytest.fixture
def command(monkeypatch, target, capsys):
    """Runs a script's main on the tiny target; returns what it printed."""
    for script in (describe, export, serve_profile):
        monkeypatch.setattr(script, "load_target", lambda *args, **kwargs: target)

    def call(script, *args):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, args)])
        call.status = script.main()
        out, call.told = capsys.readouterr()
        return out

    return call


def test_export_and_describe(command, run, tmp_path):
    told = command(export, run, "--to", "sglang", "--out", tmp_path / "x")
    assert "checked from the files" in told and "--speculative-algorithm EAGLE3" in told
    assert "SGLang: will load" in command(describe, tmp_path / "x") and command.status == 0
    with pytest.raises(UserError, match="This drafter works with --to vllm"):
        command(export, run, "--to", "tgi", "--out", tmp_path / "y")
    with pytest.raises(UserError, match="belong to --to hub"):
        command(export, run, "--to", "vllm", "--out", tmp_path / "y", "--push", "me/it")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    (tmp_path / "x" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    command(export, tmp_path / "x", "--to", "hub", "--out", tmp_path / "z")
    assert "note: max_position_embeddings 64 became the target's 512" in command.told
    assert json.loads((tmp_path / "z" / "config.json").read_text())["max_position_embeddings"] == 512
    save_file(load_file(tmp_path / "z" / "model.safetensors") | {"x": torch.ones(1)}, tmp_path / "z/model.safetensors")
    assert "vLLM: will not: broken" in command(describe, tmp_path / "z") and command.status == 1


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


def test_a_report_is_found_by_the_weights_alone(target, run, report, tmp_path, command):
    mine = load_drafter(run, target)
    copy = tmp_path / "by-another-name"
    command(export, run, "--to", "vllm", "--dtype", "bfloat16", "--out", copy)
    assert card.measured(load_drafter(copy, target), copy, target, report)["arm"]["name"] == "mine"
    noise = load_drafter(run, target, dtype=torch.float32)
    for weight in noise.parameters():
        weight.normal_()
    noisy = save_drafter(noise, tmp_path / "mine", target, {"weights": mine.digest})
    with pytest.raises(UserError, match="none of which is known.*evaluate it again with scripts/evaluate.py"):
        card.measured(load_drafter(noisy, target), noisy, target, report)
    page = json.loads((report / "report.json").read_text())
    page["drafters"] = {"eagle2": page["drafters"]["mine"], "mine": page["drafters"]["mine"]}  # twice, in two shapes
    (tmp_path / "report.json").write_text(json.dumps(page))
    assert card.measured(mine, run, target, tmp_path)["arm"]["name"] == "mine"
    del page["drafters"]["mine"]["weights"]  # of an older version
    (tmp_path / "report.json").write_text(json.dumps(page))
    with pytest.raises(UserError, match="evaluate it again"):
        card.measured(mine, run, target, tmp_path)


def test_figures_of_another_target_are_refused_and_the_provenance_is_kept(command, run, report, tmp_path, monkeypatch):
    other = make_target(layers=3, seed=9)
    for script in (export, serve_profile):
        monkeypatch.setattr(script, "load_target", lambda *args, **kwargs: other)
    for script, options in ((export, ("--to", "hub", "--out", tmp_path / "x")), (serve_profile, ())):
        with pytest.raises(UserError, match="was measured on target 'tiny-llama', whose weights differ"):
            command(script, run, "--target", "other", "--report", report, *options)
    command(export, run, "--target", "other", "--to", "hub", "--out", tmp_path / "x")
    page = (tmp_path / "x" / "README.md").read_text()
    trained = json.loads((run / "headstart.json").read_text())["target"]
    assert f"| Trained for | tiny-llama (weights {trained['weights']}) |" in page
    assert f"| Target | tiny-llama (weights {other.fingerprint['weights']}," in page
    assert "whose weights differ" in load_drafter(tmp_path / "x", other).meta["warnings"][0]


def test_a_card_of_heads_that_change_the_target_says_so(command, target, medusa2, tmp_path, monkeypatch, capsys):
    run, report = medusa2
    command(export, run, "--to", "hub", "--report", report, "--out", tmp_path / "x")
    page, told = (tmp_path / "x" / "README.md").read_text(), json.loads((report / "report.json").read_text())
    assert "text is that of the *adapted* target" in page and "stays its own" not in page
    snippet = page.partition("```python\n")[2].partition("```")[0].replace("PATH_OF_THIS_FOLDER", str(tmp_path / "x"))
    said: dict[str, Any] = {}
    with monkeypatch.context() as patched:
        patched.setattr("drafters.target.load_target", lambda name: target)
        exec(snippet, said)
    with adapted(said["drafter"]):
        text = generate(target, None, "Why is the sky blue?", max_new_tokens=64).text
    assert capsys.readouterr().out == text + "\n"
    assert "`adapter/`, which changes the target" in page and "| adapted target, plain |" in page
    moved, plain = told["drafters"]["two"]["target_kl"], next(a for a in told["arms"] if a["name"] == "plain+two")
    assert f"(by {moved:.3g} nats a token" in page and f"| tokens/s | {plain['tokens_per_second']:.1f} |" in page
    assert page.endswith("writes it for vLLM, to serve the target with `adapter/` merged into it.\n")
    lines = command(serve_profile, run)
    assert f"serve tiny-llama with {run / 'adapter'} merged into it" in lines and lines.count("speculative:") == 1


def test_a_drafter_without_servers(command, target, tmp_path):
    run = save_drafter(build_medusa(target, None, heads=1, kind="hydra"), tmp_path / "run", target, {})
    command(export, run, "--to", "hub", "--out", tmp_path / "x")
    assert (tmp_path / "x" / "README.md").read_text().endswith("No server loads it: it decodes with headstart only.\n")
    told = command(serve_profile, run)
    assert "No server loads this drafter: it decodes with headstart only" in told and "Compatibility" in told
    assert "Launch" not in told and "Rollout" not in told and "export.py" not in told


def test_a_policy_s_report(command, target, run, report, tmp_path):
    page = json.loads((report / "report.json").read_text())
    page["settings"]["draft"]["mine"] = {"policy": "adaptive"}
    (tmp_path / "report.json").write_text(json.dumps(page))
    command(export, run, "--to", "hub", "--report", tmp_path, "--out", tmp_path / "x")
    assert ", adaptive drafts, temperature 0" in (tmp_path / "x" / "README.md").read_text()
    assert "the evaluation drafted by policy adaptive" in command(serve_profile, run, "--report", tmp_path)


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
    assert f"export: python scripts/export.py {run} --to vllm --out runs/exports/vllm\n" in told
    assert "writes it for" not in told and "merged into" not in told


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
    assert f"acceptance was measured at contexts of {', '.join(arm['by_context'])} tokens" in told and arm["by_context"]
    assert "the evaluation drafted 2 at most; --chain 5 would show longer ones" in told
    (tmp_path / "bench.json").write_text(json.dumps(bench | {"environment": {"dtype": "bfloat16"}}))
    assert "measure both in one dtype" in command(serve_profile, run, *options)


def test_compatibility_sees_another_template_and_a_lost_stop_token(target, run, monkeypatch):
    drafter = load_drafter(run, target)
    assert all(item["ok"] is not False for item in serve_profile.compatibility(drafter, target))
    monkeypatch.setitem(target.fingerprint, "template", "other")
    drafter.draft_ids = torch.arange(100, 200)  # without <|im_end|>
    wrong = {i["item"] for i in serve_profile.compatibility(drafter, target) if i["ok"] is False}
    assert wrong == {"template", "stop tokens"}
