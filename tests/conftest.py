"""Fixtures that several tests share: one tiny target, and an untrained drafter of every kind for it."""

import pytest
import torch

from drafters.build import build_eagle, build_medusa
from tests.tiny import make_target

torch.set_num_threads(1)  # models this small only lose by sharing their work


@pytest.fixture(scope="session")
def target():
    """A float32 Llama of 3 layers, vocabulary 512, with tokenizer and chat template. Read-only."""
    return make_target(layers=3)


@pytest.fixture(scope="session")
def drafters(target):
    """Untrained drafters by kind, three with a draft vocabulary. Read-only."""
    torch.manual_seed(1)
    some = torch.randperm(target.vocab_size)[:100].sort().values
    return {
        "medusa": build_medusa(target, None, heads=4),
        "hydra": build_medusa(target, some, heads=4, zero_blocks=False, kind="hydra"),
        "eagle1": build_eagle(target, some, version=1),
        "eagle3": build_eagle(target, some, version=3),
    }
