"""A checkpoint that Octavo wrote before it read with the safetensors package still loads, to the bit."""

from pathlib import Path

import octavo
from tests.checkpoints.old_run import EXTRA, fingerprint, make, train

WRITTEN = Path(__file__).parent / "written_before"
VALUES = "33c15b50a1c930409b6bcaf9a092fbd5ec3c0fd1e134f42157a25cca57306ad6"  # of the run that wrote it


def test_an_older_checkpoint_loads_bit_for_bit():
    model, optimizer = make(7)
    train(model, optimizer, 1)
    loaded = octavo.load_checkpoint(WRITTEN, model, optimizer)
    assert loaded.step == 3
    assert fingerprint(model, optimizer, loaded.extra) == VALUES


def test_the_same_values_are_written_in_the_same_bytes(tmp_path):
    model, optimizer = make(7)
    extra = octavo.load_checkpoint(WRITTEN, model, optimizer).extra
    path = octavo.save_checkpoint(tmp_path, model, optimizer, step=3, extra=extra)
    assert list(extra) == list(EXTRA)
    for name in ("model", "recipe", "optimizer", "run"):
        file = f"{name}.safetensors"
        assert (path / file).read_bytes() == (WRITTEN / "step-000003" / file).read_bytes(), file
