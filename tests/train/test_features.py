"""The store gives what the target gives; features that can't be right are refused; a killed store goes on."""

import shutil
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F

import train.features
from drafters.errors import UserError
from drafters.target import Features
from tests.train.small import as_data, encoded_rows
from train.features import FeatureStore, check_features, feature_key, target_features

TAPS = (0, 1, 3)


@pytest.fixture(scope="module")
def data():
    return as_data(encoded_rows(40))


@pytest.fixture
def store(target, data, tmp_path):
    return FeatureStore(target, data, TAPS, tmp_path / "features", limit_gb=1.0)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_taps_and_final_are_what_the_named_blocks_give(target):  # pitfalls 12, 16
    seen = {}

    def keep(name):
        return lambda module, inputs, output: seen.update({name: output[0] if isinstance(output, tuple) else output})

    modules = {0: target.decoder.embed_tokens, 1: target.blocks[0], 3: target.blocks[2], "final": target.decoder.norm}
    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    ids = torch.tensor([encoded_rows(1)[0]["input_ids"]])
    features = target_features(target, ids, TAPS)
    for hook in hooks:
        hook.remove()
    assert torch.equal(features.final, seen["final"])
    for k, tap in zip(TAPS, features.taps.split(target.hidden_size, dim=-1), strict=True):
        assert torch.equal(tap, seen[k])
    assert not torch.equal(features.taps[..., -target.hidden_size :], features.final)  # the last block's is not normed


def test_store_equals_the_target_in_process(target, data, store):  # pitfall 15
    batch = data.batch(range(40), store.pad_id)
    ids, lengths = batch["input_ids"], batch["lengths"]
    live = store.get(range(40), ids)
    store.prepare()
    kept = store.get(range(40), ids)
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    for one, two in ((live.final, kept.final), (live.taps, kept.taps)):
        torch.testing.assert_close(two[real], one[real].bfloat16().float(), rtol=1e-2, atol=1e-5)
        assert two.dtype == target.dtype and not two[~real].any()
    picked = [31, 2, 17]
    part = data.batch(picked, store.pad_id)["input_ids"]
    again = store.get(picked, part)
    assert torch.equal(again.taps, kept.taps[picked][:, : part.shape[1]])


def test_padding_does_not_matter(target):
    ids = torch.tensor([encoded_rows(1)[0]["input_ids"]])
    one = target_features(target, ids, TAPS)
    two = target_features(target, F.pad(ids, (0, 11), value=9), TAPS)
    torch.testing.assert_close(two.final[:, : ids.shape[1]], one.final, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(two.taps[:, : ids.shape[1]], one.taps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda f: Features(f.final * 0, f.taps), "final hidden state is zero"),
        (lambda f: Features(f.final, torch.ones_like(f.taps)), "layer 0 is the same at every position"),
        (
            lambda f: Features(f.final, f.taps.clone().index_fill_(1, torch.tensor([3]), float("nan"))),
            "layer 0 has non-f",
        ),
        (lambda f: Features(f.taps[..., -64:], f.taps), "differ by .* of their range"),  # before the final norm
        (lambda f: Features(f.final.roll(1, dims=1), f.taps), "differ by .* of their range"),  # shifted once too often
        (lambda f: Features(f.final.flip(0), f.taps), "differ by .* of their range"),  # rows mixed up
    ],
)
@pytest.mark.parametrize("stored", [False, True])
def test_wrong_features_are_refused(target, store, monkeypatch, change, expected, stored):  # pitfalls 12, 13
    if stored:
        store.prepare()
    check_features(target, store)
    right = store.get
    monkeypatch.setattr(store, "get", lambda rows, ids: change(right(rows, ids)))
    with pytest.raises(UserError, match=expected):
        check_features(target, store)


def test_wrong_head_is_refused(target, store, monkeypatch):
    monkeypatch.setattr(target, "head", lambda hidden: target.lm_head(hidden) * 1.05)
    with pytest.raises(UserError, match="logits, recomputed from the features used, differ"):
        check_features(target, store)


def test_killed_store_goes_on(target, data, store, tmp_path, monkeypatch):  # pitfall 19
    store.prepare()
    whole = contents(store.folder)
    assert sorted(whole) == [f"block-{k:05d}.safetensors" for k in range(3)]

    second = FeatureStore(target, data, TAPS, tmp_path / "killed", limit_gb=1.0)
    right = train.features.save_file

    def die(tensors, path):
        if "00001" in path.name:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        right(tensors, path)

    monkeypatch.setattr(train.features, "save_file", die)
    with pytest.raises(KeyboardInterrupt):
        second.prepare()
    assert sorted(contents(second.folder)) == ["block-00000.safetensors"]
    monkeypatch.setattr(train.features, "save_file", right)
    first = second.folder / "block-00000.safetensors"
    first.write_bytes(whole[first.name][:-100])  # cut short, as a full disk would leave it
    FeatureStore(target, data, TAPS, second.folder, limit_gb=1.0).prepare()
    assert contents(second.folder) == whole
    monkeypatch.setattr(train.features, "target_features", None)  # nothing is left to compute
    FeatureStore(target, data, TAPS, second.folder, limit_gb=1.0).prepare()


def test_size_is_known_before(store):  # pitfall 17
    store.prepare()
    written = sum(path.stat().st_size for path in store.folder.iterdir())
    assert abs(store.bytes / written - 1) < 0.05


def test_disk_too_small(target, data, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(UserError, match=r"need .* GB, .* are free; set train.cache_features=false"):
        FeatureStore(target, data, TAPS, tmp_path / "features", limit_gb=1.0)
    in_process = FeatureStore(target, data, TAPS, tmp_path / "features", limit_gb=0.0)
    in_process.prepare()
    assert not in_process.ready and not (tmp_path / "features").exists()


def test_drafters_with_other_taps_share_a_store(target, data, store, monkeypatch):
    store.prepare()
    other = FeatureStore(target, data, (2,), store.folder, limit_gb=1.0)
    other.prepare()
    ids = data.batch([5, 6], store.pad_id)["input_ids"]
    expected = target_features(target, ids, (2,)).taps.bfloat16().float()
    length = min(store.lengths[5], store.lengths[6])
    torch.testing.assert_close(other.get([5, 6], ids).taps[:, :length], expected[:, :length], rtol=1e-2, atol=1e-5)
    monkeypatch.setattr(train.features, "target_features", None)  # the first one's layers are all there still
    FeatureStore(target, data, TAPS, store.folder, limit_gb=1.0).prepare()


def test_key_follows_the_rows(target):
    rows = encoded_rows(8, low=16, high=17)  # all of one length: two splits differ in their tokens only
    one, two, again = (feature_key(target, as_data(part)) for part in (rows[:4], rows[4:], rows[:4]))
    assert one == again != two
