"""Fixtures of the training tests."""

from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState

import train.loop


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Forgets the process's accelerator, which cannot change its precision."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def spy(monkeypatch):
    """Sees the loop's own `Run` in `spy.run`, and the weights that it starts from in `spy.start`."""
    seen = SimpleNamespace(run=None, start=None)
    fit = train.loop._fit

    def watched(run, total):
        seen.run = run
        seen.start = {name: weight.detach().clone() for name, weight in run.drafter.named_parameters()}
        fit(run, total)

    monkeypatch.setattr(train.loop, "_fit", watched)
    return seen
