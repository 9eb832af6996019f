"""Exports: each server's exact layout, proven from its files; and read back bit for bit."""

import json
import shlex

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from drafters.build import build_eagle, build_medusa
from drafters.checkpoint import load_drafter, probe_logits, save_drafter
from drafters.describe import describe
from drafters.eagle import NORMS
from drafters.errors import UserError
from drafters.export import HOT_TOKENS, _write, check_export, export, weight_file
from drafters.files import CONFIG, META, WEIGHTS, read_folder
from drafters.servers import SUPPORT, check_pair, findings, launch
from tests.tiny import make_target

SOME = torch.randperm(512, generator=torch.Generator().manual_seed(1))[:100].sort().values
PAIRS = [(server, kind) for server, kinds in SUPPORT.items() for kind in kinds]
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


def perturb(drafter):
    torch.manual_seed(4)
    for weight in drafter.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.05)
    return drafter


@pytest.fixture(scope="module")
def deep():
    """A target deep enough for SafeAILab's fixed taps, tied and with scaled rotary angles."""
    return make_target(layers=8, tie_word_embeddings=True, rope_parameters={"rope_theta": 5000.0, **LLAMA3})


@pytest.fixture(scope="module")
def runs(deep, tmp_path_factory):
    """Saved drafters: kind -> folder; "medusa full" has the whole vocabulary."""
    root = tmp_path_factory.mktemp("runs")
    made = {
        "eagle1": build_eagle(deep, SOME, version=1),
        "eagle3": build_eagle(deep, SOME, version=3),
        "eagle3 full": build_eagle(deep, None, version=3),
        "medusa": build_medusa(deep, SOME, heads=2, layers=2, zero_blocks=False),
        "medusa full": build_medusa(deep, None, heads=2, zero_blocks=False),
    }
    return {
        name: save_drafter(perturb(d), root / name.replace(" ", "-"), deep, {"data": {"tokens": 7}})
        for name, d in made.items()
    }


def source(runs, server, kind):
    return runs["medusa full" if kind == "medusa" and server != "vllm" else kind]


def config_of(folder):
    return json.loads((folder / CONFIG).read_text())


@pytest.mark.parametrize(("server", "kind"), PAIRS)
def test_every_writer_is_read_back_bit_equal(deep, runs, tmp_path, capsys, server, kind):
    run = source(runs, server, kind)
    out = export(run, server, tmp_path / "out", deep)
    mine, again = load_drafter(run, deep, pack=False), load_drafter(out, deep, pack=False)
    a, b = mine.state_dict(), again.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert torch.equal(probe_logits(mine, deep), probe_logits(again, deep))
    assert again.kind == kind and again.taps == mine.taps
    assert (mine.draft_ids is None) == (again.draft_ids is None)
    assert mine.draft_ids is None or torch.equal(mine.draft_ids, again.draft_ids)
    assert again.meta["target"] == deep.fingerprint and again.meta["data"] == {"tokens": 7}
    assert again.digest == mine.digest and mine.digest not in (out / META).read_text()  # it would go stale there
    assert capsys.readouterr().err == ""  # no warning
    weights = [p.name for p in out.iterdir() if p.suffix in (".safetensors", ".bin", ".pt") and p.name != HOT_TOKENS]
    assert weights == [weight_file(server, kind)]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not [why for stops, why in findings(read_folder(out), kind, server) if stops]


@pytest.mark.parametrize(("server", "kind"), [("vllm", "eagle3"), ("speculators", "eagle3"), ("vllm", "medusa")])
def test_full_vocabularies_carry_no_map(deep, runs, tmp_path, server, kind):
    out = export(runs[f"{kind} full"], server, tmp_path / "out", deep)
    assert not load_file(out / WEIGHTS).keys() & {"d2t", "t2d", "token_map"}
    assert load_drafter(out, deep).draft_ids is None


@pytest.mark.parametrize("norm", NORMS)
def test_eagle31_norms_go_where_they_are_computed(deep, tmp_path, norm):
    """Every server that computes it gives the trainer's logits (`check_export`); one that ignores it is refused."""
    drafter = perturb(build_eagle(deep, SOME, version=3, norms=(norm,)))
    run = save_drafter(drafter, tmp_path / "run", deep, {})
    ignored = {"norm_before_residual": ["sglang", "trtllm"], "fc_norm": ["trtllm"], "norm_output": ["sglang"]}
    works = ", ".join(s for s in ("vllm", "sglang", "speculators", "trtllm") if s not in ignored.get(norm, ()))
    for server in ("vllm", "speculators", "sglang", "trtllm", "eagle"):
        if server == "eagle" or server in ignored.get(norm, ()):
            with pytest.raises(UserError, match=f"ignores {norm}.*works with --to {works}$"):
                export(run, server, tmp_path / server, deep)
        else:
            again = load_drafter(export(run, server, tmp_path / server, deep), deep, pack=False)
            assert again.config.norms == (norm,)
            assert torch.equal(probe_logits(again, deep), probe_logits(load_drafter(run, deep, pack=False), deep))


def test_what_eagle3_servers_read_in_silence(deep, runs, tmp_path):
    out = export(runs["eagle3"], "sglang", tmp_path / "out", deep)
    config, weights = config_of(out), load_file(out / WEIGHTS)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # vLLM: index into hidden_states
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # SGLang: the layer before
    assert config["num_aux_hidden_states"] == 3 and config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["tie_word_embeddings"] is False and deep.config.tie_word_embeddings is True
    assert [config[f] for f in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")] == [False] * 4
    assert config["rope_theta"] == 5000.0 and LLAMA3.items() <= config["rope_scaling"].items()
    assert config["rope_scaling"]["type"] == "llama3"
    assert config["max_position_embeddings"] == deep.max_positions == 512
    assert config["draft_vocab_size"] == 100 and config["vocab_size"] == 512
    assert weights["d2t"].dtype == torch.int64 and torch.equal(weights["d2t"] + torch.arange(100), SOME)
    assert torch.equal(weights["t2d"].nonzero()[:, 0], SOME)
    assert "lm_head.weight" in weights and not any(n.startswith(("model.", "embed")) for n in weights)


def test_both_tap_conventions_give_the_trained_features(deep):
    """A capture under each convention: vLLM's input of block k, SGLang's output of block k - 1."""
    ids = torch.arange(6)[None]
    positions = torch.arange(6)[None]
    want = deep.forward(ids, positions, taps=(2, 4, 5)).taps
    seen = {}
    hooks = [
        *(deep.blocks[k].register_forward_pre_hook(
            lambda m, args, kwargs, k=k: seen.__setitem__(("in", k), args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        ) for k in (2, 4, 5)),
        *(deep.blocks[k].register_forward_hook(lambda m, args, out, k=k: seen.__setitem__(("out", k), out))
          for k in (1, 3, 4)),
    ]  # fmt: skip
    deep.forward(ids, positions)
    for hook in hooks:
        hook.remove()
    assert torch.equal(torch.cat([seen["in", k] for k in (2, 4, 5)], -1), want)
    assert torch.equal(torch.cat([seen["out", k] for k in (1, 3, 4)], -1), want)


def test_speculators_format(deep, runs, tmp_path):
    out = export(runs["eagle3"], "speculators", tmp_path / "out", deep)
    config, weights = config_of(out), load_file(out / WEIGHTS)
    assert "model_type" not in config and config["transformer_layer_config"]["model_type"] == "llama"
    assert config["norm_before_residual"] is False and config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["speculators_config"]["verifier"]["name_or_path"] == deep.name
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["transformer_layer_config"]["rope_theta"] == 5000.0
    assert torch.equal(weights["embed_tokens.weight"], deep.embedding)
    assert "layers.0.hidden_norm.weight" in weights and not any(n.startswith("midlayer") for n in weights)


def test_eagle1_bias_and_architecture_by_server(deep, runs, tmp_path):
    ours = {s: export(runs["eagle1"], s, tmp_path / s, deep) for s in ("vllm", "sglang", "eagle")}
    assert config_of(ours["vllm"])["architectures"] == ["LlamaForCausalLM"]
    assert config_of(ours["sglang"])["architectures"] == ["LlamaForCausalLMEagle"]
    biases = {s: load_file(f / WEIGHTS).get("fc.bias") for s, f in ours.items()}
    assert biases["vllm"] is None and biases["eagle"] is None and not biases["sglang"].any()
    assert config_of(ours["eagle"])["bias"] is False  # absent means true there
    assert torch.load(ours["sglang"] / HOT_TOKENS, weights_only=True) == SOME.tolist()


def test_medusa_by_server(deep, runs, tmp_path):
    vllm = export(runs["medusa"], "vllm", tmp_path / "vllm", deep)
    weights, trained = load_file(vllm / WEIGHTS), load_file(runs["medusa"] / WEIGHTS)
    blocks = {f"blocks.{i}.layers.{j}.{p}" for i in (0, 1) for j in (0, 1) for p in ("weight", "bias")}
    assert set(weights) == blocks | {"lm_heads.0.weight", "lm_heads.1.weight"}
    assert config_of(vllm)["medusa_fc_bias"] is True and "truncated_vocab_size" not in config_of(vllm)
    # vLLM 0.32 has no smaller heads: whatever the hidden state, the best token of the full one is a trained one
    full, rows = weights["lm_heads.1.weight"], trained["1.2.weight"]
    hidden = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(full[SOME], rows) and full.shape == (512, 64)
    assert torch.equal((hidden @ full.T).argmax(-1), SOME[(hidden @ full[SOME].T).argmax(-1)])
    tgi = export(runs["medusa full"], "tgi", tmp_path / "tgi", deep)
    assert "architectures" not in config_of(tgi)
    reference = export(runs["medusa full"], "medusa", tmp_path / "medusa", deep)
    state = torch.load(reference / "medusa_lm_head.pt", weights_only=True)
    assert state.keys() == load_file(tgi / "medusa_lm_head.safetensors").keys()
    assert set(state) == {"0.0.linear.weight", "0.0.linear.bias", "0.1.weight"} | {
        "1.0.linear.weight", "1.0.linear.bias", "1.1.weight",
    }  # fmt: skip


@pytest.mark.parametrize("server", ["vllm", "speculators"])
def test_bfloat16_says_so_and_means_it(deep, runs, tmp_path, server):
    out = export(runs["eagle3"], server, tmp_path / "out", deep, "bfloat16")
    weights = load_file(out / WEIGHTS)
    assert config_of(out)["torch_dtype"] == "bfloat16" and weights["fc.weight"].dtype == torch.bfloat16
    assert weights["d2t"].dtype == torch.int64
    trained = load_file(runs["eagle3"] / WEIGHTS)
    assert torch.equal(weights["fc.weight"], trained["fc.weight"].bfloat16())
    assert load_drafter(out, deep).digest == load_drafter(runs["eagle3"], deep).digest


# ---- refusals


@pytest.mark.parametrize(
    ("server", "kind", "message"),
    [
        ("sglang", "medusa", "only eagle1, eagle3. This drafter works with --to vllm, tgi, trtllm, medusa"),
        ("tgi", "eagle3", "This drafter works with --to vllm, sglang, speculators, trtllm, eagle"),
        ("speculators", "eagle1", "This drafter works with --to vllm, sglang, eagle"),
        ("triton", "eagle3", "one of vllm, sglang"),
    ],
)
def test_pairs_that_do_not_exist(server, kind, message):
    with pytest.raises(UserError, match=message):
        check_pair(server, kind, {}, {})


def test_a_bias_that_vllm_drops_is_refused_before_a_file_is_written(deep, runs, tmp_path):
    run = save_drafter(load_drafter(runs["eagle1"], deep, pack=False), tmp_path / "run", deep, {})
    weights = load_file(run / WEIGHTS) | {"fc.bias": torch.ones(64)}
    save_file(weights, run / WEIGHTS)
    (run / CONFIG).write_text(json.dumps(config_of(run) | {"bias": True}))
    with pytest.raises(UserError, match="drops fc.bias.*This drafter works with --to sglang, eagle$"):
        export(run, "vllm", tmp_path / "out", deep)
    assert load_file(export(run, "sglang", tmp_path / "out", deep) / WEIGHTS)["fc.bias"].all()


@pytest.mark.parametrize(("server", "kind"), [p for p in PAIRS if p[1] != "medusa"])
def test_the_position_limit_is_the_target_s(deep, runs, tmp_path, server, kind):
    run = save_drafter(load_drafter(runs[kind], deep, pack=False), tmp_path / "run", deep, {})
    (run / CONFIG).write_text(json.dumps(config_of(run) | {"max_position_embeddings": 256}))
    config = config_of(export(run, server, tmp_path / "out", deep))
    assert config.get("transformer_layer_config", config)["max_position_embeddings"] == deep.max_positions


def test_two_exports_at_once(deep, runs, tmp_path, monkeypatch):
    """The slower one finds the other's folder, and leaves it alone."""
    out = tmp_path / "out"

    def meanwhile(*args):
        out.mkdir()
        (out / CONFIG).write_text("theirs")

    monkeypatch.setattr("drafters.export.check_export", meanwhile)
    with pytest.raises(UserError, match="out already exists"):
        export(runs["eagle3"], "vllm", out, deep)
    assert (out / CONFIG).read_text() == "theirs" and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_launch_lines_survive_odd_paths_and_name_the_draft_vocabulary():
    line = launch("trtllm", "eagle3", "t", "/a: b, {c}", 3, (2, 4, 5))
    spec = yaml.safe_load(shlex.split(line.partition("<(echo ")[2])[0].removesuffix(")"))["speculative_config"]
    assert spec["speculative_model"] == "/a: b, {c}" and spec["eagle3_layers_to_capture"] == [1, 3, 4]
    mapped = f"--speculative-token-map /x/{HOT_TOKENS}"
    assert mapped in launch("sglang", "eagle1", "t", "/x", 3, draft_vocabulary=True)
    assert "token-map" not in launch("sglang", "eagle1", "t", "/x", 3)
    assert "token-map" not in launch("sglang", "eagle3", "t", "/x", 3, draft_vocabulary=True)


def test_hydra_is_for_this_decoder_only(target, tmp_path):
    run = save_drafter(build_medusa(target, None, heads=2, kind="hydra"), tmp_path / "run", target, {})
    with pytest.raises(UserError, match="loads no hydra drafter.*--to nothing yet; it decodes with headstart only"):
        export(run, "vllm", tmp_path / "out", target)
    told = "\n".join(describe(run))
    assert "hydra, headstart" in told and "broken" not in told and "vLLM: will not: loads no hydra drafter" in told


def test_heads_that_were_trained_with_an_adapter_keep_it(target, tmp_path):
    class Adapter:
        def save(self, folder):
            folder.mkdir()
            (folder / "adapter_model.safetensors").write_text("peft's")

    drafter = build_medusa(target, None, heads=2)
    run = save_drafter(drafter, tmp_path / "run", target, {})
    loaded = load_drafter(run, target, pack=False)
    loaded.adapter = Adapter()
    out = tmp_path / "out"
    out.mkdir()
    _write(loaded, "vllm", out, target, "float32")
    assert (out / "adapter" / "adapter_model.safetensors").exists()
    assert json.loads((out / META).read_text())["adapter"] == "adapter"
    check_export(out, "vllm", loaded, target)


def test_a_draft_vocabulary_that_the_server_does_not_know(deep, runs, tmp_path):
    with pytest.raises(UserError, match="draft_vocab=null"):
        export(runs["medusa"], "tgi", tmp_path / "out", deep)
    assert list(tmp_path.iterdir()) == []


def test_taps_that_safeailab_can_not_read(target, tmp_path):
    run = save_drafter(build_eagle(target, SOME, version=3), tmp_path / "run", target, {})
    with pytest.raises(UserError, match="always taps.*works with --to vllm, sglang, speculators, trtllm$"):
        export(run, "eagle", tmp_path / "out", target)


def test_a_folder_in_use_is_left_alone(deep, runs, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(UserError, match="not an empty folder"):
        export(runs["eagle3"], "vllm", tmp_path / "out", deep)
    assert (tmp_path / "out" / "notes").read_text() == "mine"
    with pytest.raises(UserError, match="--out is empty"):
        export(runs["eagle3"], "vllm", "", deep)


# ---- the self-check sees what servers do not


def breaks(change):
    """An edit of weights and config that no server would report."""

    def edit(folder):
        weights, config = load_file(folder / WEIGHTS), config_of(folder)
        change(weights, config)
        save_file(weights, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config))

    return edit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, c: w.pop("lm_head.weight"), "no lm_head"),
        (lambda w, c: w.pop("d2t"), "no d2t"),
        (lambda w, c: w.update(d2t=SOME.clone()), "absolute map|vocabulary map"),
        (lambda w, c: w.update(d2t=w["d2t"].int()), "not the layout"),
        (lambda w, c: w.update({"fc.bias": torch.zeros(64)}), "not the layout"),
        (lambda w, c: w["midlayer.mlp.up_proj.weight"].normal_(), "neither a trained tensor"),
        (lambda w, c: w.update({"model.fc.weight": w.pop("fc.weight")}), "begin with model"),
        (lambda w, c: c.update(tie_word_embeddings=True), "tie_word_embeddings"),
        (lambda w, c: c.update(rope_theta=10000.0), "logits rebuilt"),
        (lambda w, c: c.update(rope_scaling=None), "logits rebuilt"),
        (lambda w, c: c.update(norm_before_residual=True), "logits rebuilt"),
        (lambda w, c: c.update(rms_norm_eps=0.1), "logits rebuilt"),
        (lambda w, c: c.update(max_position_embeddings=64), "position limit"),
        (lambda w, c: c.update(architectures=["LlamaForCausalLMEagle"]), "architectures"),
        (lambda w, c: c.pop("eagle_aux_hidden_state_layer_ids"), "eagle_config only"),
    ],
)
def test_silent_failures_are_caught(deep, runs, tmp_path, change, message):
    out = export(runs["eagle3"], "vllm", tmp_path / "out", deep)
    drafter = load_drafter(runs["eagle3"], deep, pack=False)
    check_export(out, "vllm", drafter, deep)
    breaks(change)(out)
    with pytest.raises(UserError, match=message):
        check_export(out, "vllm", drafter, deep)


def test_an_export_of_an_export_is_the_same(deep, runs, tmp_path):
    first = export(runs["eagle3"], "speculators", tmp_path / "first", deep)
    second = export(first, "vllm", tmp_path / "second", deep)
    direct = export(runs["eagle3"], "vllm", tmp_path / "direct", deep)
    assert (second / WEIGHTS).read_bytes() == (direct / WEIGHTS).read_bytes()
    assert config_of(second) == config_of(direct) and json.loads((second / META).read_text())["layout"] == "vllm"
