"""Every method of training on a target that counts: step j drafts exactly j + 2 ahead, by the decoder's own reading."""

import pytest
import torch

from drafters.base import DraftSettings
from drafters.build import build_eagle, build_medusa
from drafters.target import Features
from tests.tiny import make_target
from train.features import target_features
from train.objectives import Objective, position_weights
from train.recipe import ObjectiveOptions

FIRST, CYCLE, T, STEPS = 30, 12, 12, 3
COMMITTED = T - STEPS
IDS = torch.arange(FIRST - 5, FIRST + CYCLE)  # draft vocabulary: also tokens that never come
ROWS = FIRST + (torch.arange(CYCLE)[:, None] + torch.arange(T)) % CYCLE  # (12, 12): each token is the last plus one

REGRESSION = {"smooth_l1": 1.0, "kl": 0.1}
METHODS = {  # builder, objective
    "medusa-1": ({"heads": STEPS}, {"losses": {"ce": 1.0}}),
    "medusa-1, distilled": ({"heads": STEPS}, {"losses": {"kl": 1.0}}),
    "hydra": ({"heads": STEPS, "kind": "hydra"}, {"losses": {"kl": 1.0}}),
    "eagle1": ({"version": 1}, {"losses": REGRESSION, "steps": 1}),
    "hass": ({"version": 1}, {"losses": {**REGRESSION, "topk": 0.1}, "steps": STEPS, "detach": True}),
    "eagle3": ({"version": 3}, {"losses": {"kl": 1.0}, "steps": STEPS}),
    "eagle3.1": ({"version": 3, "norms": ("fc_norm", "norm_output")}, {"losses": {"kl": 1.0}, "steps": STEPS}),
    "eagle3, lk": ({"version": 3}, {"losses": {"lk": 1.0}, "steps": STEPS}),
}


@pytest.fixture(scope="module")
def counting():
    """A target whose blocks add nothing and whose head names the token after the one it reads."""
    target = make_target(layers=3)
    with torch.no_grad():
        for block in target.blocks:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        following = torch.arange(512)
        following[FIRST : FIRST + CYCLE] = ROWS[0].roll(1)  # the head's row of a token is its predecessor's embedding
        directions = target.embedding / target.embedding.norm(dim=-1, keepdim=True)
        target.lm_head.weight.copy_(directions[following])
        features = target_features(target, ROWS, ())
        assert torch.equal(target.head(features.final[:, :-1]).argmax(-1), ROWS[:, 1:])
    return target


@pytest.mark.parametrize("method", METHODS)
def test_each_step_learns_its_own_offset(counting, method):
    shape, objective = METHODS[method]
    torch.manual_seed(3)
    if "heads" in shape:
        drafter = build_medusa(counting, IDS, **shape, zero_blocks=False)
    else:
        drafter = build_eagle(counting, IDS, **shape, warm_layer=False)
    learning = Objective(drafter.train(), counting, ObjectiveOptions(decay=1.0, **{"steps": STEPS, **objective}))
    mask = torch.ones_like(ROWS, dtype=torch.bool)
    features = target_features(counting, ROWS, drafter.taps)
    weights = position_weights(list(mask), learning.steps, "per_token", slice(0, CYCLE))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        learning(ROWS, mask, features, weights)["loss"].backward()
        optimizer.step()
    drafted = [draft(drafter.eval(), row, features, learning.steps) for row in range(CYCLE)]
    assert torch.equal(torch.stack(drafted), ROWS[:, COMMITTED : COMMITTED + learning.steps])


@torch.no_grad()
def draft(drafter, row, features, steps):
    """What the decoder gets once the first tokens of a row are committed, of which the target has not read the last."""
    state = drafter.begin(T)
    seen = (None if x is None else x[row : row + 1, : COMMITTED - 1] for x in (features.final, features.taps))
    drafter.extend(state, ROWS[row, 1:COMMITTED], Features(*seen))
    return drafter.propose(state, DraftSettings("chain", length=steps)).tokens
