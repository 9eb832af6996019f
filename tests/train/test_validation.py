"""The acceptance estimate, on drafts whose fate is known."""

import pytest
import torch

import train.validation
from decode.engine import DraftSettings, generate
from drafters.build import build_eagle, build_medusa
from tests.train.small import as_data, small_recipe
from train.features import FeatureStore, target_features
from train.objectives import Objective, position_weights
from train.recipe import ObjectiveOptions
from train.validation import DEPTHS, Estimate, _argmax, validate

PROMPT, ANSWER = 6, 14


@pytest.fixture(scope="module")
def rows(target):
    """Rows whose answer is the target's own greedy text, so that every window stays on its path."""
    torch.manual_seed(0)
    rows = []
    for _ in range(3):
        ids = torch.randint(20, 500, (PROMPT,)).tolist()
        for _ in range(ANSWER):
            positions = torch.arange(len(ids))[None]
            ids.append(int(target.head(target.forward(torch.tensor([ids]), positions).final[0, -1]).argmax()))
        rows.append({"input_ids": ids, "loss_mask": [0] * PROMPT + [1] * ANSWER})
    return rows


@pytest.fixture
def check(target, tmp_path, monkeypatch):
    """Validates with a drafter whose rank of the wanted token is scripted: (row, step) -> rank."""

    def run(rows, rank):
        data = as_data(rows)
        drafter = build_eagle(target, None).eval()
        monkeypatch.setattr(train.validation, "_rank", lambda drafter, hidden, j, wanted: rank(j, wanted))
        store = FeatureStore(target, data, drafter.taps, tmp_path, limit_gb=0.0)
        return validate(drafter, target, data, store, small_recipe(tmp_path))

    return run


def always(value):
    return lambda j, wanted: torch.full_like(wanted, value)


def test_oracle_is_accepted_all_the_way(rows, check):
    estimate = check(rows, always(0))
    assert estimate.survival == [1.0] * DEPTHS and estimate.tau == estimate.tree_tau == 1.0 + DEPTHS
    assert estimate.rank_hits == [[1.0, 0.0, 0.0, 0.0]] * DEPTHS and estimate.survival_text().startswith("1.000 1.000")


def test_second_choices_count_in_a_tree_only(rows, check):
    estimate = check(rows, always(1))
    assert estimate.survival == [0.0] * DEPTHS and estimate.tau == 1.0 and estimate.tree_tau == 1.0 + DEPTHS
    assert estimate.rank_hits[0] == [0.0, 1.0, 0.0, 0.0]


def test_prefixes_are_joint(rows, check):  # pitfall 76: no product of marginals
    # Step 0 is right in every second window, step 1 in exactly those windows: survival is 1/2, not 1/4.
    def rank(j, wanted):
        return torch.arange(len(wanted)) % 2 if j < 2 else torch.zeros_like(wanted)

    estimate = check(rows, rank)
    assert estimate.conditional[1:] == [1.0] * (DEPTHS - 1)
    assert estimate.survival[0] == pytest.approx(0.5, abs=0.05) and estimate.survival[1] == estimate.survival[0]
    assert estimate.rank_hits[1][0] == pytest.approx(0.5, abs=0.05)


def test_windows_by_hand(rows, check):
    seen = []

    def rank(j, wanted):
        seen.append((wanted >= 0).sum().item())
        return torch.zeros_like(wanted)

    check(rows, rank)
    # Roots are the answer's tokens but the last: the first token comes with the prefill and is nobody's draft.
    assert seen == [3 * (ANSWER - 1 - j) for j in range(DEPTHS)]


def test_text_that_leaves_the_argmax_ends_a_window(target, rows, check):
    changed = [{**row, "input_ids": list(row["input_ids"])} for row in rows]
    place = PROMPT + 5
    for row in changed:  # one sampled token: what follows is the text's own way
        row["input_ids"][place] = (row["input_ids"][place] + 1) % target.vocab_size
    estimate = check(changed, always(0))
    assert estimate.survival == [1.0] * DEPTHS  # no verdict is no miss


def test_argmax_reads_the_state_before(target, rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    mask = torch.tensor([row["loss_mask"] for row in rows]).bool()
    final = target.forward(ids, torch.arange(ids.shape[1]).expand(3, -1)).final
    found = _argmax(target, final, mask, chunk=4)
    assert torch.equal(found[:, PROMPT:], ids[:, PROMPT:]) and (found[:, :PROMPT] == -1).all()


def test_estimate_in_numbers():
    estimate = Estimate([0.5, 0.5, 0.0], [1.0, 0.5, 0.5], [])
    assert estimate.survival == [0.5, 0.25, 0.0] and estimate.tau == 1.75 and estimate.tree_tau == 2.75
    assert estimate.to_dict() == {
        "tau_estimate": 1.75,
        "tree_tau_estimate": 2.75,
        "survival_estimate": [0.5, 0.25, 0.0],
        "conditional_estimate": [0.5, 0.5, 0.0],
    }


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle1", "eagle3"])
def test_estimate_agrees_with_a_real_decode(target, rows, tmp_path, kind):  # pitfall 80, DESIGN.md decision 11
    torch.manual_seed(0)
    if kind in ("medusa", "hydra"):
        drafter = build_medusa(target, None, heads=4, warm_head=False, kind=kind)
    else:
        drafter = build_eagle(target, None, version=int(kind[-1]), warm_layer=False)
    objective = Objective(drafter, target, ObjectiveOptions(losses={"ce": 1.0}, steps=4, decay=1.0))
    ids = torch.tensor([row["input_ids"] for row in rows])
    mask = torch.tensor([row["loss_mask"] for row in rows]).bool()
    features = target_features(target, ids, drafter.taps)
    weights = position_weights(list(mask), 4, "per_token", slice(0, 3))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        objective(ids, mask, features, weights)["loss"].backward()
        optimizer.step()
    drafter.eval()
    data = as_data(rows)
    store = FeatureStore(target, data, drafter.taps, tmp_path, limit_gb=0.0)
    estimate = validate(drafter, target, data, store, small_recipe(tmp_path, kind))
    expected = 1.0 + sum(estimate.survival[:4])
    tokens, steps = 0, 0
    for row in rows:
        out = generate(
            target,
            drafter,
            row["input_ids"][:PROMPT],
            max_new_tokens=ANSWER,
            settings=DraftSettings(length=4),
            eos_token_ids=(),
        )
        assert out.tokens == row["input_ids"][PROMPT:]
        tokens, steps = tokens + sum(r.tokens for r in out.rounds[:-1]), steps + len(out.rounds) - 1  # the last is cut
    assert expected > 3.5 and tokens / steps == pytest.approx(expected, rel=0.2)
