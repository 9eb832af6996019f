"""Published layouts, written here as their authors write them, load bit for bit; what does not fit is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.engine import generate
from drafters.base import DraftSettings
from drafters.build import build_eagle, build_medusa
from drafters.checkpoint import load_drafter, probe_logits, save_drafter
from drafters.describe import describe, is_broken
from drafters.errors import UserError
from drafters.files import CONFIG, META, WEIGHTS, read_folder
from drafters.readers import read_checkpoint
from drafters.servers import NAMES
from tests.tiny import make_target

SOME = torch.randperm(512, generator=torch.Generator().manual_seed(1))[:100].sort().values
LLAMA_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size",
    "max_position_embeddings", "hidden_act", "num_hidden_layers",
)  # fmt: skip


@pytest.fixture(scope="module")
def deep():
    return make_target(layers=8)


@pytest.fixture(scope="module")
def trained(deep, tmp_path_factory):
    """kind -> (drafter, its native tensors, its native config)."""
    out = {}
    for name, drafter in {
        "eagle1": build_eagle(deep, None, version=1),
        "eagle3": build_eagle(deep, SOME, version=3),
        "medusa": build_medusa(deep, None, heads=2, layers=1, zero_blocks=False),
    }.items():
        torch.manual_seed(5)
        for weight in drafter.parameters():
            weight.data.add_(torch.randn_like(weight) * 0.05)
        folder = save_drafter(drafter, tmp_path_factory.mktemp(name) / "run", deep, {})
        out[name] = drafter, load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    return out


def write(folder, config, weights, name=WEIGHTS):
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({k: w.contiguous() for k, w in weights.items()}, folder / name)
    else:
        torch.save(weights, folder / name)
    return folder


def llama_of(config):
    return {"model_type": "llama", **{k: config[k] for k in LLAMA_KEYS}}


def same(folder, drafter, target, **changes):
    again = load_drafter(folder, target)
    assert torch.equal(probe_logits(again, target), probe_logits(drafter, target)) and again.taps == drafter.taps
    assert (again.draft_ids is None) == (drafter.draft_ids is None)
    assert drafter.draft_ids is None or torch.equal(again.draft_ids, drafter.draft_ids)
    return again


def warnings_of(drafter):
    return [w for w in drafter.meta["warnings"] if "no target fingerprint" not in w]


# ---- EAGLE-3


def test_safeailab_eagle3(deep, trained, tmp_path):
    drafter, weights, config = trained["eagle3"]
    published = llama_of(config) | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 100, "bias": False}
    folder = write(tmp_path / "x", published, weights, "pytorch_model.bin")  # no taps, no head_dim, no rope_theta
    again = same(folder, drafter, deep)
    assert again.taps == (2, 4, 5) and warnings_of(again) == []
    plain = generate(deep, None, "hello", max_new_tokens=16)
    drafted = generate(deep, again, "hello", max_new_tokens=16, settings=DraftSettings("tree", 3, 3, 6))
    assert drafted.tokens == plain.tokens


def test_specforge(deep, trained, tmp_path):
    drafter, weights, config = trained["eagle3"]
    published = llama_of(config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 100,
        "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }
    weights = {n.replace("midlayer.", "layers.0."): w for n, w in weights.items() if n != "t2d"}
    same(write(tmp_path / "x", published, weights | {"embed_tokens.weight": deep.embedding}), drafter, deep)


def test_speculators_and_its_own_defaults(deep, trained, tmp_path):
    drafter, weights, config = trained["eagle3"]
    published = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 100,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": llama_of(config) | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        "speculators_config": {"verifier": {"name_or_path": "some/target"}},
    }
    weights = {n.replace("midlayer.", "layers.0."): w for n, w in weights.items()}
    other = deep.embedding.roll(1, 0)
    folder = write(tmp_path / "x", published, weights | {"embed_tokens.weight": other})
    again = same(folder, drafter, deep)
    assert again.meta["made_for"] == "some/target"
    assert [w.split(" ")[0] for w in warnings_of(again)] == ["embed_tokens.weight", "norm_before_residual"]
    published |= {"norm_before_residual": True}
    assert load_drafter(write(tmp_path / "y", published, weights), deep).config.norms == ("norm_before_residual",)
    with pytest.raises(UserError, match="missing input_norm.weight"):
        load_drafter(write(tmp_path / "z", published | {"norm_before_fc": True}, weights), deep)


def test_draft_ids_out_of_order_are_sorted_with_the_head(deep, trained, tmp_path):
    drafter, weights, config = trained["eagle3"]
    shuffle = torch.randperm(100, generator=torch.Generator().manual_seed(3))
    weights = weights | {"lm_head.weight": weights["lm_head.weight"][shuffle], "d2t": SOME[shuffle] - torch.arange(100)}
    same(write(tmp_path / "x", config, weights), drafter, deep)


def test_an_absolute_map_without_t2d_is_suspicious(deep, trained, tmp_path):
    _, weights, config = trained["eagle3"]
    ids = torch.arange(0, 200, 2)
    weights = {n: w for n, w in weights.items() if n != "t2d"} | {"d2t": ids}
    again = load_drafter(write(tmp_path / "x", config, weights), deep)
    assert "absolute ids" in warnings_of(again)[0]


@pytest.mark.parametrize("size", [None, 512])
def test_no_head_of_its_own(deep, tmp_path, size):
    drafter = build_eagle(deep, None, version=3)
    run = save_drafter(drafter, tmp_path / "run", deep, {})
    weights, config = load_file(run / WEIGHTS), json.loads((run / CONFIG).read_text())
    weights = {n: w for n, w in weights.items() if n != "lm_head.weight"}
    again = load_drafter(write(tmp_path / "x", config | {"draft_vocab_size": size}, weights), deep)
    assert torch.equal(again.lm_head.weight, deep.lm_head.weight)


# ---- EAGLE-1


def shards(folder, config, weights):
    """Two shards with an index, as `save_pretrained` of a large model writes them."""
    names = sorted(weights)
    halves = {"model-1.safetensors": names[:4], "model-2.safetensors": names[4:]}
    for file, part in halves.items():
        write(folder, config, {n: weights[n] for n in part}, file)
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_eagle1_with_a_bias_of_its_own(deep, trained, tmp_path):
    _, weights, config = trained["eagle1"]
    bias = torch.randn(64)
    folder = shards(
        tmp_path / "x", llama_of(config) | {"architectures": ["LlamaForCausalLM"]}, weights | {"fc.bias": bias}
    )
    again = load_drafter(folder, deep)
    assert torch.equal(again.fc.bias, bias) and warnings_of(again) == []
    run = save_drafter(again, tmp_path / "run", deep, {})  # and lives on in our own folder
    assert torch.equal(load_drafter(run, deep).fc.bias, bias)
    told = "\n".join(describe(folder))
    assert "vLLM: will not: drops fc.bias" in told


def test_eagle1_of_safeailab_and_of_speculators(deep, trained, tmp_path):
    drafter, weights, config = trained["eagle1"]
    shared = {"embed_tokens.weight": deep.embedding, "fc.bias": torch.zeros(64)}
    same(write(tmp_path / "x", llama_of(config) | {"bias": True}, weights | shared, "pytorch_model.bin"), drafter, deep)
    names = {n.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): w for n, w in weights.items()}
    published = {"speculators_model_type": "eagle", "fusion_bias": False, "transformer_layer_config": llama_of(config)}
    same(write(tmp_path / "y", published, names | {"lm_head.weight": deep.lm_head.weight}), drafter, deep)


# ---- Medusa


def test_medusa_reference_pt_without_counts(deep, trained, tmp_path):
    drafter, weights, _ = trained["medusa"]
    config = {"base_model_name_or_path": "some/target"}
    again = same(write(tmp_path / "x", config, weights, "medusa_lm_head.pt"), drafter, deep)
    assert again.config.heads == 2 and again.config.layers == 1 and again.meta["made_for"] == "some/target"
    named = {f"medusa_head.{n}": w for n, w in weights.items()}
    wrong = write(tmp_path / "y", config | {"medusa_num_heads": 5}, named, "medusa_lm_head.safetensors")
    assert "medusa_num_heads=5" in warnings_of(same(wrong, drafter, deep))[0]


def vllm_names(weights):
    out = {}
    for name, w in weights.items():
        i, j, *rest = name.split(".")
        out[f"blocks.{i}.layers.{j}.{rest[-1]}" if rest[0] == "linear" else f"lm_heads.{i}.weight"] = w
    return out


def test_medusa_vllm_names(deep, trained, tmp_path):
    drafter, weights, config = trained["medusa"]
    same(write(tmp_path / "x", config, vllm_names(weights)), drafter, deep)


def test_medusa_with_one_head_for_all_and_without_biases(deep, trained, tmp_path):
    _, weights, config = trained["medusa"]
    bare = {n: w for n, w in vllm_names(weights).items() if n.startswith("blocks") and n.endswith("weight")}
    head = weights["0.1.weight"]
    again = load_drafter(
        write(tmp_path / "x", config | {"original_lm_head": True}, bare | {"lm_head.weight": head}), deep
    )
    assert all(torch.equal(h[-1].weight, head) and not h[0].linear.bias.any() for h in again.heads)
    shared = load_drafter(write(tmp_path / "y", config, bare), deep)  # TGI's second layout: the target's head
    assert all(torch.equal(h[-1].weight, deep.lm_head.weight) for h in shared.heads)


# ---- nothing is ignored


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "medusa"])
def test_unknown_tensors_are_named(deep, trained, tmp_path, kind):
    _, weights, config = trained[kind]
    extra = {"layers.0.self_attn.q_proj.bias": torch.ones(64)}
    folder = write(tmp_path / "x", config, weights | extra)
    with pytest.raises(UserError, match="unknown .*q_proj.bias"):
        load_drafter(folder, deep)
    assert "broken: unknown" in "\n".join(describe(folder))


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"x": Evil()}, "more than tensors"),
        ([torch.ones(2)], "names to tensors"),
        (
            {"model.layers.0.weight": torch.ones(2)},
            "no layout known here; found 1 tensors such as model.layers.0.weight",
        ),
    ],
)
def test_files_that_are_no_drafter(deep, tmp_path, capsys, weights, message):
    folder = write(tmp_path / "x", {"hidden_size": 64}, weights, "pytorch_model.bin")
    with pytest.raises(UserError, match=message):
        load_drafter(folder, deep)
    assert "run" not in capsys.readouterr().out


def test_files_that_do_not_add_up(deep, trained, tmp_path):
    _, weights, config = trained["eagle3"]
    cases = {
        "lm_head.weight has 100 of 512 rows": (config, {n: w for n, w in weights.items() if n not in ("d2t", "t2d")}),
        "d2t has shape": (config, weights | {"d2t": weights["d2t"][:50]}),
        "key 'hidden_size' is missing": ({k: v for k, v in config.items() if k != "hidden_size"}, weights),
        "speculators_model_type='dflash'": (config | {"speculators_model_type": "dflash"}, weights),
        "num_attention_heads=0 must be at least 1": (config | {"num_attention_heads": 0}, weights),
        "hidden_act='foo' is not known; one of .*silu": (config | {"hidden_act": "foo"}, weights),
        "rope_type='foo' is not known; one of default": (config | {"rope_scaling": {"type": "foo"}}, weights),
    }
    for i, (message, (changed, tensors)) in enumerate(cases.items()):
        with pytest.raises(UserError, match=message):
            load_drafter(write(tmp_path / str(i), changed, tensors), deep)
    folder = write(tmp_path / "two", config, weights, "a.safetensors")
    write(folder, config, weights, "b.safetensors")
    with pytest.raises(UserError, match="several weight files"):
        load_drafter(folder, deep)
    for listed in ({"x": "../a.safetensors"}, ["a.safetensors"], {}, None):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
        with pytest.raises(UserError, match="files of this folder"):
            load_drafter(folder, deep)
    (write(tmp_path / "empty", config, {}, "pytorch_model.bin") / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot be read \(an empty file\); was the copy cut short"):
        load_drafter(tmp_path / "empty", deep)


# ---- describe


def test_describe_without_a_target(deep, trained, tmp_path):
    _, weights, config = trained["eagle3"]
    weights = {n.replace("midlayer.", "layers.0."): w for n, w in weights.items()}
    bare = llama_of(config) | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100}
    folder = write(tmp_path / "x", bare | {"tie_word_embeddings": True}, weights)
    told = "\n".join(describe(folder))
    assert "eagle3, raw EAGLE-3" in told and "draft vocabulary 100" in told and "taps 2, L // 2, L - 3" in told
    assert "target: not named; no fingerprint" in told and "broken" not in told
    assert "vLLM: will not: tie_word_embeddings is true" in told and "SafeAILab/EAGLE: will not" in told
    assert "TGI: will not: loads no eagle3 drafter; only medusa" in told
    broken = write(tmp_path / "y", bare, {n: w for n, w in weights.items() if "o_proj" not in n})
    lines = describe(broken)
    assert "broken: missing midlayer.self_attn.o_proj.weight (64, 64)" in lines and is_broken(lines)
    assert lines[-7:] == [f"  {name}: will not: broken (reason above)" for name in NAMES.values()]


def test_describe_a_run_folder(deep, trained, tmp_path):
    """A run also holds the trainer's state, which vLLM would read as weights."""
    run = save_drafter(trained["eagle3"][0], tmp_path / "run", deep, {})
    told = "\n".join(describe(run, deep))
    assert "vLLM: will load" in told and f"loads for {deep.name!r}" in told and not is_broken(told.splitlines())
    save_file({"optimizer": torch.ones(2)}, run / "state.safetensors")
    told = "\n".join(describe(run))
    assert "vLLM: will not: reads every *.safetensors of a folder, so state.safetensors too" in told
    assert "scripts/export.py writes what these read: --to vllm, sglang, speculators" in told
    other = save_drafter(build_eagle(deep, None, version=3, taps=(1, 3, 5)), tmp_path / "other", deep, {})
    assert "SafeAILab/EAGLE: will not: always taps 2, L // 2 and L - 3, and this" in "\n".join(describe(other))
    narrow = make_target(hidden_size=32, head_dim=8)
    lines = describe(run, narrow)
    assert any(line.startswith("does not load for 'tiny-llama'") for line in lines) and is_broken(lines)
    assert "  vLLM: will not: does not load for 'tiny-llama' (reason above)" in lines


def test_describe_offers_only_exports_that_work(deep, trained, tmp_path):
    """The same check as in the export itself: a norm that SGLang ignores is not mended by writing it anew."""
    drafter = build_eagle(deep, SOME, version=3, norms=("norm_before_residual",))
    run = save_drafter(drafter, tmp_path / "run", deep, {})
    assert "scripts/export.py writes what these read: --to speculators" in describe(run)
    (run / META).write_text(json.dumps(json.loads((run / META).read_text()) | {"draft": {"depth": 3}}))
    assert any(line.startswith("broken:") and "no draft settings" in line for line in describe(run))


def test_ours_stays_strict(deep, trained, tmp_path):
    """What a foreign checkpoint may lack, ours may not: a hole there is damage."""
    run = save_drafter(trained["eagle3"][0], tmp_path / "run", deep, {})
    weights = load_file(run / WEIGHTS)
    del weights["t2d"]
    save_file(weights, run / WEIGHTS)
    with pytest.raises(UserError, match="missing t2d"):
        load_drafter(run, deep)
    (run / META).unlink()
    assert load_drafter(run, deep).draft_ids is not None
    assert read_checkpoint(read_folder(run)).notes == ["t2d made from d2t"]
