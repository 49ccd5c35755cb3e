"""A checkpoint, and a run of other weights to load it into."""

import pytest

import octavo
from tests.support.small_run import make, seed_all, train


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of step 3, and a run of other weights to load it into."""
    seed_all(1)
    model, optimizer = make()
    train(model, optimizer, 3)
    path = octavo.save_checkpoint(tmp_path / "run", model, optimizer, step=3, extra={"note": "x"})
    return path, *make(seed=9)
