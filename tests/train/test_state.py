"""The resumable state: by name, whole, or refused."""

import pytest
import torch

from drafters.build import build_medusa
from drafters.errors import UserError
from train.state import STATE, read_state, restore, save_state

FACTS = {"step": 7, "best": float("-inf"), "recipe": {"seed": 0}}


def make(target, seed, reverse=False, train_head=True):
    """A drafter after two steps, and its optimizer."""
    torch.manual_seed(seed)
    drafter = build_medusa(target, torch.arange(50), heads=2, zero_blocks=False)
    for name, weight in drafter.named_parameters():
        weight.requires_grad_(train_head or ".1." not in name)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters[::-1] if reverse else parameters, lr=1e-2)
    for _ in range(2):
        sum((p * torch.randn_like(p)).sum() for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter, optimizer


def by_name(drafter, optimizer):
    return {name: optimizer.state[p] for name, p in drafter.named_parameters() if p in optimizer.state}


def test_round_trip_is_by_name(target, tmp_path):  # pitfall 42
    drafter, optimizer = make(target, seed=0)
    save_state(tmp_path / "run", drafter, [optimizer], FACTS)
    tensors, facts = read_state(tmp_path / "run")
    assert facts == FACTS and torch.equal(tensors["draft_ids"], torch.arange(50))
    assert [path.name for path in (tmp_path / "run").iterdir()] == [STATE]
    assert not any(tensor.shape == target.embedding.shape for tensor in tensors.values())  # no target weights
    other, its_optimizer = make(target, seed=1, reverse=True)
    restore(tensors, other, [its_optimizer])
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name])
    expected, found = by_name(drafter, optimizer), by_name(other, its_optimizer)
    assert expected.keys() == found.keys() and len(found) == 6
    for name, slots in expected.items():
        assert slots.keys() == found[name].keys()
        assert all(torch.equal(value, found[name][slot]) for slot, value in slots.items()), name


@pytest.mark.parametrize(
    ("then", "now", "expected"), [(True, False, "frozen now"), (False, True, "was it frozen then")]
)
def test_other_frozen_parts_are_refused(target, tmp_path, then, now, expected):
    save_state(tmp_path, *[(d, [o]) for d, o in [make(target, 0, train_head=then)]][0], FACTS)
    drafter, optimizer = make(target, 1, train_head=now)
    with pytest.raises(UserError, match=expected):
        restore(read_state(tmp_path)[0], drafter, [optimizer])


@pytest.mark.parametrize("damage", [lambda b: b[:-50], lambda b: b[:20], lambda b: b"", lambda b: b"\xff" * 64])
def test_damaged_file_is_named(target, tmp_path, damage):
    drafter, optimizer = make(target, seed=0)
    save_state(tmp_path, drafter, [optimizer], FACTS)
    path = tmp_path / STATE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=f"{STATE} is damaged .* delete it to train from the start"):
        read_state(tmp_path)


def test_no_state_yet(tmp_path):
    assert read_state(tmp_path) is None
