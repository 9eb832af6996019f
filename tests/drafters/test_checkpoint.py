"""Drafter folders: exactly the tensors and keys that servers read, bit-equal round trips, plain refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.base import DraftSettings
from drafters.build import build_eagle, build_medusa
from drafters.checkpoint import CONFIG, META, WEIGHTS, expected_tensors, load_drafter, probe_logits, save_drafter
from drafters.eagle import NORMS
from drafters.errors import UserError
from drafters.target import wrap_target
from tests.tiny import make_model, make_target, make_tokenizer

SOME = torch.randperm(512, generator=torch.Generator().manual_seed(1))[:100].sort().values
KINDS = [(kind, ids) for kind in ("medusa", "hydra", "eagle1", "eagle3") for ids in ("full", "some")]


def build(kind, target, ids):
    torch.manual_seed(4)
    draft_ids = SOME if ids == "some" else None
    if kind in ("medusa", "hydra"):
        drafter = build_medusa(target, draft_ids, heads=3, layers=2, zero_blocks=False, kind=kind)
    else:
        drafter = build_eagle(
            target, draft_ids, version=int(kind[-1]), num_heads=2, num_kv_heads=1, intermediate_size=48
        )
    for weight in drafter.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.05)
    return drafter


@pytest.fixture
def saved(target, tmp_path):
    """A saved EAGLE-3 drafter with a draft vocabulary."""
    return save_drafter(build("eagle3", target, "some"), tmp_path / "run", target, {"recipe": {"lr": 1e-3}})


def edit_config(folder, **changes):
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_weights(folder, change):
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def refuses(folder, target, message):
    with pytest.raises(UserError, match=message) as error:
        load_drafter(folder, target)
    assert "\n" not in str(error.value)


# ---- round trips


@pytest.mark.parametrize(("kind", "ids"), KINDS)
def test_round_trip_is_bit_equal(target, tmp_path, capsys, kind, ids):
    drafter = build(kind, target, ids)
    save_drafter(drafter, tmp_path / "run", target, {"recipe": {"lr": 1e-3}})
    again = load_drafter(tmp_path / "run", target)
    assert again.kind == kind and again.config.draft_vocab_size == (100 if ids == "some" else 512)
    mine, theirs = drafter.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert torch.equal(probe_logits(drafter, target), probe_logits(again, target))
    assert again.taps == drafter.taps and again.meta["recipe"] == {"lr": 1e-3} and again.meta["warnings"] == []
    assert (again.draft_ids is None) == (ids == "full") or torch.equal(again.draft_ids, SOME)
    assert not any(p.requires_grad for p in again.parameters()) and not again.training
    assert capsys.readouterr().err == ""
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted([WEIGHTS, CONFIG, META])
    assert [p.name for p in tmp_path.iterdir()] == ["run"]  # nothing temporary is left


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle1", "eagle3"])
def test_a_tied_target_with_a_small_draft_vocabulary(tmp_path, kind):
    target = make_target(layers=2, tie_word_embeddings=True)
    assert target.lm_head.weight is target.embedding
    drafter = build(kind, target, "some")
    save_drafter(drafter, tmp_path / "run", target, {})
    again = load_drafter(tmp_path / "run", target)
    assert torch.equal(probe_logits(drafter, target), probe_logits(again, target))
    if kind.startswith("eagle"):
        assert json.loads((tmp_path / "run" / CONFIG).read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle1", "eagle3"])
def test_a_bfloat16_target(tmp_path, kind):
    """Master weights stay float32 on disk; what decodes is cast, except rotary frequencies and ids."""
    target = wrap_target(make_model(layers=2).to(torch.bfloat16), make_tokenizer(), "half")
    drafter = build(kind, target, "some")
    save_drafter(drafter, tmp_path / "run", target, {})
    assert {w.dtype for n, w in load_file(tmp_path / "run" / WEIGHTS).items() if w.is_floating_point()} == {
        torch.float32
    }
    again = load_drafter(tmp_path / "run", target)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16} and again.draft_ids.dtype == torch.int64
    if kind.startswith("eagle"):
        assert torch.equal(again.rotary.inv_freq, drafter.rotary.inv_freq)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle1", "eagle3"])
def test_beside_a_packed_target_it_drafts_the_same(tmp_path, kind, dtype):
    target = wrap_target(make_model(layers=2).to(dtype), make_tokenizer(), "packed")
    save_drafter(build(kind, target, "some"), tmp_path / "run", target, {})
    ids = torch.arange(2, 22, device=target.device)
    features = target.forward(ids[None], torch.arange(20)[None], taps=load_drafter(tmp_path / "run", target).taps)
    drafts = []
    for packed in (False, True):
        if packed:
            target.pack()
        drafter = load_drafter(tmp_path / "run", target)
        assert any("forward" in vars(m) for m in drafter.modules()) == packed
        state = drafter.begin(40)
        drafter.extend(state, ids[1:], features.rows(slice(0, 19)))
        drafts.append(drafter.propose(state, DraftSettings("chain", 3)).tokens.tolist())
    assert drafts[0] == drafts[1] or dtype == torch.bfloat16, "which rounds otherwise"


# ---- what is on disk


def test_eagle3_tensors_and_config(target, saved):
    H, Vd, V, heads, inner = 64, 100, 512, 64, 48  # 2 heads of 32, one KV head
    layer = "midlayer"
    expected = {
        "fc.weight": (H, 3 * H),
        f"{layer}.input_layernorm.weight": (H,),
        f"{layer}.hidden_norm.weight": (H,),
        f"{layer}.self_attn.q_proj.weight": (heads, 2 * H),
        f"{layer}.self_attn.k_proj.weight": (32, 2 * H),
        f"{layer}.self_attn.v_proj.weight": (32, 2 * H),
        f"{layer}.self_attn.o_proj.weight": (H, heads),
        f"{layer}.post_attention_layernorm.weight": (H,),
        f"{layer}.mlp.gate_proj.weight": (inner, H),
        f"{layer}.mlp.up_proj.weight": (inner, H),
        f"{layer}.mlp.down_proj.weight": (H, inner),
        "norm.weight": (H,),
        "lm_head.weight": (Vd, H),
        "d2t": (Vd,),
        "t2d": (V,),
    }
    weights = load_file(saved / WEIGHTS)
    assert {name: tuple(w.shape) for name, w in weights.items()} == expected
    assert weights["d2t"].dtype == torch.int64 and weights["t2d"].dtype == torch.bool
    ids = torch.arange(Vd) + weights["d2t"]
    assert torch.equal(ids, SOME) and torch.equal(ids, weights["t2d"].nonzero()[:, 0])
    config = json.loads((saved / CONFIG).read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]  # indices into hidden_states
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # layers whose output it is
    fixed = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": H,
        "vocab_size": V,
        "draft_vocab_size": Vd,
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "num_aux_hidden_states": 3,
        "max_position_embeddings": 512,
    }
    assert fixed.items() <= config.items()
    meta = json.loads((saved / META).read_text())
    assert meta["kind"] == "eagle3" and meta["target"] == target.fingerprint and meta["recipe"] == {"lr": 1e-3}


@pytest.mark.parametrize("norms", [(n,) for n in NORMS] + [("fc_norm", "norm_output")], ids="+".join)
def test_further_norms_of_eagle3(target, tmp_path, norms):
    plain = build("eagle3", target, "some")
    drafter = build_eagle(target, SOME, num_heads=2, num_kv_heads=1, intermediate_size=48, norms=norms)
    for weight in drafter.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.05)
    folder = save_drafter(drafter, tmp_path / "run", target, {})
    again = load_drafter(folder, target)
    assert again.config.norms == norms
    assert torch.equal(probe_logits(again, target), probe_logits(drafter, target))
    more = {
        "norm_before_fc": {"input_norm.weight": (192,)},
        "fc_norm": {f"fc_norm.{i}.weight": (64,) for i in range(3)},
    }
    added = {name: shape for norm in norms for name, shape in more.get(norm, {}).items()}
    mine, usual = expected_tensors(drafter), expected_tensors(plain)
    assert {n: mine[n][0] for n in mine.keys() - usual.keys()} == added and usual.items() <= mine.items()
    config = json.loads((folder / CONFIG).read_text())
    assert {n for n in NORMS if config.get(n)} == set(norms)
    assert {
        "norm_before_residual",
        "norm_before_fc",
    } <= config.keys()  # always said; the two of EAGLE-3.1 if they are used
    nested = set(config["eagle_config"]) - {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"}
    names = {"norm_before_fc": "norm_before_fc", "norm_output": "return_hidden_post_norm"}
    assert nested == {names[n] for n in norms if n in names}


@pytest.mark.parametrize(
    ("norm", "keys"),
    [
        ("norm_before_fc", {"norm_before_fc": ..., "eagle_config": {"norm_before_fc": True}}),
        ("fc_norm", {"fc_norm": ..., "use_aux_norm": True}),
        ("norm_output", {"norm_output": ..., "eagle_config": {"return_hidden_post_norm": True}}),
    ],
)
def test_other_keys_of_published_norms(target, tmp_path, norm, keys):
    drafter = build_eagle(target, SOME, norms=(norm,))
    folder = save_drafter(drafter, tmp_path / "run", target, {})
    edit_config(folder, **keys)
    again = load_drafter(folder, target)
    assert again.config.norms == (norm,)
    assert torch.equal(probe_logits(again, target), probe_logits(drafter, target))
    edit_config(folder, use_aux_norm=..., **{norm: False}, eagle_config={})
    if norm != "norm_output":  # which has no tensor that could tell
        refuses(folder, target, "unknown")


def test_a_full_vocabulary_needs_no_map(target):
    names = expected_tensors(build("eagle3", target, "full"))
    assert "d2t" not in names and "t2d" not in names and names["lm_head.weight"][0] == (512, 64)


def test_eagle1_holds_nothing_that_servers_refuse(target):
    for ids in ("full", "some"):
        names = set(expected_tensors(build("eagle1", target, ids)))
        assert not any(n.startswith(("lm_head", "norm", "embed", "d2t")) or n.endswith(".bias") for n in names)
        assert "layers.0.input_layernorm.weight" not in names and "layers.0.self_attn.q_proj.weight" in names


def test_medusa_tensors_and_config(target, tmp_path):
    save_drafter(build("medusa", target, "some"), tmp_path / "run", target, {})
    weights = load_file(tmp_path / "run" / WEIGHTS)
    expected = {f"{i}.{j}.linear.{part}" for i in range(3) for j in range(2) for part in ("weight", "bias")}
    assert set(weights) == expected | {f"{i}.2.weight" for i in range(3)} | {"token_map"}
    assert torch.equal(weights["token_map"], SOME)  # absolute ids here
    config = json.loads((tmp_path / "run" / CONFIG).read_text())
    assert "architectures" not in config and config["medusa_fc_bias"] is True
    assert config["truncated_vocab_size"] == 100
    assert {k for k in config if "num" in k and ("heads" in k or "layers" in k)} == {
        "medusa_num_heads",
        "medusa_num_layers",
    }


def test_hydra_tensors_and_config(target, tmp_path):
    save_drafter(build("hydra", target, "some"), tmp_path / "run", target, {})
    weights = load_file(tmp_path / "run" / WEIGHTS)
    # head k reads the hidden state and k + 1 embeddings; the embedding itself is the target's and not in the file
    assert [tuple(weights[f"{k}.0.linear.weight"].shape) for k in range(3)] == [(64, 128), (64, 192), (64, 256)]
    assert tuple(weights["2.1.linear.weight"].shape) == (64, 64) and len(weights) == 3 * 5 + 1
    assert json.loads((tmp_path / "run" / CONFIG).read_text())["model_type"] == "hydra"  # which no server takes


SCALINGS = {
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "linear": {"rope_type": "linear", "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_survives(tmp_path, name, layout):
    scaling = SCALINGS[name]
    if layout == "rope_parameters":
        target = make_target(layers=2, rope_parameters={"rope_theta": 5000.0, **scaling})
    else:
        target = make_target(layers=2, rope_theta=5000.0, rope_scaling=dict(scaling))
    drafter = build("eagle3", target, "full")
    own = target.decoder.rotary_emb
    # the drafter's head dimension is 32, the target's 16: compare what scales, not the frequencies
    assert drafter.config.llama.rope_parameters["rope_theta"] == 5000.0
    assert scaling.items() <= drafter.config.llama.rope_parameters.items()
    assert drafter.rotary.attention_scaling == own.attention_scaling
    save_drafter(drafter, tmp_path / "run", target, {})
    config = json.loads((tmp_path / "run" / CONFIG).read_text())
    assert config["rope_theta"] == 5000.0 and scaling.items() <= config["rope_scaling"].items()
    again = load_drafter(tmp_path / "run", target)
    assert torch.equal(again.rotary.inv_freq, drafter.rotary.inv_freq)
    assert not torch.equal(again.rotary.inv_freq, build("eagle3", make_target(layers=2), "full").rotary.inv_freq)


# ---- saving is careful


def test_saving_again_touches_no_other_file(target, saved):
    (saved / "state.pt").write_text("optimizer")
    (saved / "logs").mkdir()
    (saved / "logs" / "train.jsonl").write_text("{}")
    drafter = build("eagle3", target, "some")
    drafter.norm.weight.data.add_(1)
    save_drafter(drafter, saved, target, {})
    assert (saved / "state.pt").read_text() == "optimizer" and (saved / "logs" / "train.jsonl").read_text() == "{}"
    assert torch.equal(load_drafter(saved, target).norm.weight, drafter.norm.weight)


def test_a_nan_weight_is_refused_and_the_old_files_stay(target, saved):
    before = (saved / WEIGHTS).read_bytes()
    drafter = build("eagle3", target, "some")
    drafter.layer.mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match="differs"):
        save_drafter(drafter, saved, target, {})
    assert (saved / WEIGHTS).read_bytes() == before and len(list(saved.parent.iterdir())) == 1


# ---- loading refuses


def test_missing_files(target, saved, tmp_path):
    refuses(tmp_path / "nothing", target, "no such file")
    (saved / WEIGHTS).rename(saved / "other.safetensors")
    refuses(saved, target, "no such file")


def test_a_truncated_file(target, saved):
    data = (saved / WEIGHTS).read_bytes()
    for size in (len(data) - 100, 50, 0):
        (saved / WEIGHTS).write_bytes(data[:size])
        refuses(saved, target, "cut short")


def test_broken_json(target, saved):
    (saved / CONFIG).write_text("{")
    refuses(saved, target, "not valid JSON")
    (saved / CONFIG).write_text("[]")
    refuses(saved, target, "JSON object")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("fc.weight"), "missing fc.weight"),
        (lambda w: w.pop("lm_head.weight"), "missing lm_head.weight"),
        (lambda w: w.update(extra=torch.zeros(2)), "unknown extra"),
        (lambda w: w.update({"norm.weight": torch.ones(3)}), r"norm.weight is \(3,\), not \(64,\)"),
        (lambda w: w.update(d2t=SOME.clone()), "absolute map|d2t and t2d"),
        (lambda w: w.update(d2t=w["d2t"].flip(0)), "offsets"),
        (lambda w: w.update(t2d=~w["t2d"]), "d2t and t2d"),
        (lambda w: (w.pop("d2t"), w.pop("t2d")), r"lm_head.weight is \(100, 64\), not \(512, 64\)"),
        (lambda w: w.pop("t2d"), "missing t2d"),
        (lambda w: w["norm.weight"].fill_(float("nan")), "norm.weight holds NaN"),
    ],
)
def test_wrong_tensors(target, saved, change, message):
    edit_weights(saved, change)
    refuses(saved, target, message)


def test_an_absolute_map_that_ascends_within_the_vocabulary(target, saved):
    def absolute(weights):
        ids = torch.arange(100)
        weights["d2t"], weights["t2d"] = ids, torch.zeros(512, dtype=torch.bool).index_fill(0, ids, True)

    edit_weights(saved, absolute)
    refuses(saved, target, "d2t and t2d")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden_size=128, but target 'tiny-llama' has 64"),
        ({"vocab_size": 1000}, "vocab_size=1000"),
        ({"architectures": ["Other"], "model_type": "other"}, "no drafter known here"),
        ({"rope_theta": ...}, "'rope_theta' is missing"),
        ({"eagle_aux_hidden_state_layer_ids": ...}, "layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, "fc.weight is"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"0\.\.3"),
        ({"num_attention_heads": "two"}, "num_attention_heads='two' is not a whole number"),
        ({"rope_theta": "big"}, "rope_theta='big' is not a number"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' is not an object"),
        ({"eagle_config": [1]}, "eagle_config=.* is not an object"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "12"}}, "is not a list of whole numbers"),
    ],
)
def test_wrong_config(target, saved, changes, message):
    edit_config(saved, **changes)
    refuses(saved, target, message)


@pytest.mark.parametrize("key", ["medusa_num_heads", "medusa_num_layers"])
def test_counts_of_heads_that_the_file_cannot_hold(target, tmp_path, key):
    folder = save_drafter(build("medusa", target, "some"), tmp_path / "run", target, {})
    edit_config(folder, **{key: 10**9})
    refuses(folder, target, f"{key}=1000000000, but there are only")


def test_wrong_metadata(target, tmp_path):
    folder = save_drafter(build("eagle1", target, "some"), tmp_path / "run", target, {})
    meta = json.loads((folder / META).read_text())
    for change in ({"draft_ids": "1, 2"}, {"draft_ids": ["a"]}, {"target": "mine"}, {"draft": 4}):
        (folder / META).write_text(json.dumps(meta | change))
        refuses(folder, target, f"headstart.json: {next(iter(change))}=.* is not a")


def test_a_token_map_outside_the_vocabulary(target, tmp_path):
    folder = save_drafter(build("medusa", target, "some"), tmp_path / "run", target, {})
    edit_weights(folder, lambda w: w["token_map"].__setitem__(-1, 512))
    refuses(folder, target, "ascending target ids below 512")


# ---- another target


def test_another_template_alone_is_told_in_the_singular(target, saved, monkeypatch):
    monkeypatch.setitem(target.fingerprint, "template", "other")
    assert "whose template differs from" in load_drafter(saved, target).meta["warnings"][0]


def test_another_target_is_a_warning(target, saved, capsys):
    other = make_target(layers=3, seed=9)
    drafter = load_drafter(saved, other)
    (warning,) = drafter.meta["warnings"]
    assert "made for 'tiny-llama', whose weights differ" in warning
    assert capsys.readouterr().err.startswith("warning: ")
    meta = json.loads((saved / META).read_text())
    (saved / META).write_text(json.dumps({k: v for k, v in meta.items() if k != "target"}))
    assert "no target fingerprint" in load_drafter(saved, target).meta["warnings"][0]
    (saved / META).unlink()
    assert "no target fingerprint" in load_drafter(saved, target).meta["warnings"][0]
