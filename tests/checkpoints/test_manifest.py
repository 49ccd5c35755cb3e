"""checkpoint.json has a digest of its own: no flipped bit loads as another run, and files from before it still load."""

import json

import pytest
import torch
from torch import nn

import octavo
from octavo.checkpoints import folder
from octavo.errors import InvalidCheckpoint, Unsupported
from tests.support.small_run import assert_same, make, signed, values


def rewritten(path, **changes):
    """Changes the entries of a manifest, and leaves out those that are None. It signs none."""
    manifest = json.loads((path / "checkpoint.json").read_text()) | changes
    (path / "checkpoint.json").write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))


def test_the_digest_is_that_of_the_other_entries(saved):
    path, *_ = saved
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert signed(manifest) == manifest


def test_no_flipped_bit_of_a_manifest_changes_a_run(tmp_path):
    model = nn.Sequential(octavo.Linear(2, 2, recipe="fp8-delayed"))
    path = octavo.save_checkpoint(tmp_path, model, step=5)
    wanted = folder.read_manifest(path)
    content = (path / "checkpoint.json").read_bytes()
    accepted = 0
    for at in range(len(content)):
        for bit in range(8):
            (path / "checkpoint.json").write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            try:
                assert folder.read_manifest(path) == wanted, (at, bit)
                accepted += 1
            except InvalidCheckpoint:
                pass
    assert accepted == 0


def test_a_step_or_a_recipe_that_was_changed_is_refused_by_the_digest(saved):
    path, model, optimizer = saved
    rewritten(path, recipes={"up": "bf16"})
    with pytest.raises(
        InvalidCheckpoint, match=r"checkpoint.json is damaged .* its SHA-256 is \w{64}, and it was writt"
    ):
        octavo.load_checkpoint(path, model, optimizer)


@pytest.mark.parametrize("digest", [None, "", "none", 0, []])
def test_a_digest_that_is_none_is_not_a_missing_one(digest, saved):
    path, model, optimizer = saved
    manifest = json.loads((path / "checkpoint.json").read_text()) | {"sha256": digest}
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(InvalidCheckpoint, match="its SHA-256 is"):
        octavo.load_checkpoint(path, model, optimizer)


def test_a_checkpoint_from_before_the_digest_loads_bit_for_bit(saved):
    path, model, optimizer = saved
    other, its = make(seed=5)
    octavo.load_checkpoint(path, model, optimizer)
    rewritten(path, sha256=None)
    assert octavo.load_checkpoint(path, other, its).step == 3
    assert_same(values(other, its), values(model, optimizer))


OLD = {
    "a step of true": {"step": True}, "a step of NaN": {"step": float("nan")}, "a step of 3.0": {"step": 3.0},
    "a step beyond all": {"step": 10**18}, "an unknown entry": {"steps": 3}, "a version of true": {"version": True},
    "a size of true": {"files": {"model.safetensors": {"bytes": True, "sha256": "0"}}},
    "a torch of NaN": {"torch": float("nan")}, "no torch": {"torch": None}, "no octavo": {"octavo": None},
    "another step than its folder": {"step": 7},
}  # fmt: skip


@pytest.mark.parametrize("changes", OLD.values(), ids=OLD)
def test_the_entries_of_a_manifest_without_a_digest_are_checked(changes, saved):
    path, model, optimizer = saved
    rewritten(path, sha256=None, **changes)
    before = values(model, optimizer)
    for named in (path, path.parent):
        with pytest.raises(InvalidCheckpoint):
            octavo.load_checkpoint(named, model, optimizer)
    assert_same(values(model, optimizer), before)


def test_a_folder_with_the_name_of_another_step_is_refused_and_another_name_is_not(saved):
    path, model, optimizer = saved
    wrong = path.rename(path.with_name("step-000030"))
    with pytest.raises(InvalidCheckpoint, match=r"step-000030 has step 3 in its checkpoint.json. Rename the folder"):
        octavo.load_checkpoint(wrong, model, optimizer)
    best = wrong.rename(path.with_name("best"))
    assert octavo.load_checkpoint(best, model, optimizer).step == 3


TEXTS = {
    "no UTF-8": b'{"format": "\xff"}', "a mark of byte order": b"\xef\xbb\xbf{}", "UTF-16": '{"a": 1}'.encode("utf-16"),
    "an entry twice": b'{"format": "octavo-checkpoint", "step": 1, "step": 2}', "NaN": b"NaN",
    "deep": b"[" * 100_000, "a huge number": b'{"step": ' + b"9" * 10_000 + b"}", "zeros": bytes(1000),
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_that_is_no_manifest_is_refused(text, saved):
    path, model, optimizer = saved
    (path / "checkpoint.json").write_bytes(text)
    with pytest.raises(InvalidCheckpoint, match=r"checkpoint\.json is damaged or no file of a checkpoint"):
        octavo.load_checkpoint(path, model, optimizer)


# -- what could be saved and never loaded ------------------------------------------------------------------------------


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "LARGEST_MANIFEST", 100)
    with pytest.raises(Unsupported, match=r"checkpoint.json has at most 100 bytes, and this one would have \d+"):
        octavo.save_checkpoint(tmp_path, nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_with_the_name_of_the_metadata_is_refused_before_it_is_saved(tmp_path):
    model = nn.Linear(2, 2)
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    with pytest.raises(Unsupported, match=r"keeps texts under the name __metadata__, and a tensor has it\."):
        octavo.save_checkpoint(tmp_path, model)
    assert list(tmp_path.iterdir()) == []


NAMES = ["_", "a b", "ß", "\ud800", '"', "\\", "\n", "__metadata__x", "tensor", "0", "a" * 1000]


def test_other_strange_names_come_back(tmp_path):
    models = []
    for value in (1.0, 2.0):
        model = nn.Module()
        for name in NAMES:
            model.register_parameter(name, nn.Parameter(torch.full((2,), value)))
        model.add_module("__metadata__", nn.Linear(2, 2))
        models.append(model)
    extra = {"__metadata__": torch.ones(1), "structure": {"tensor": 1, "dict": [], "__metadata__": torch.zeros(1)}}
    octavo.save_checkpoint(tmp_path, models[0], extra=extra)
    loaded = octavo.load_checkpoint(tmp_path, models[1])
    assert all((p == q).all() for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert loaded.extra["__metadata__"] == 1 and loaded.extra["structure"]["__metadata__"] == 0


@pytest.mark.parametrize("dims", [32, 33])
def test_a_tensor_of_very_many_dims_comes_back_or_is_refused_before_it_is_saved(dims, tmp_path):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones((1,) * dims))
    if dims == 32:
        octavo.save_checkpoint(tmp_path, model)
        octavo.load_checkpoint(tmp_path, model)
    else:
        with pytest.raises(Unsupported, match="tensors of up to 32 dims, and weight has 33"):
            octavo.save_checkpoint(tmp_path, model)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("deep", range(28, 36))
def test_nested_values_come_back_or_are_refused_before_they_are_saved(deep, tmp_path):
    value = torch.ones(1)
    for i in range(deep):
        value = [value] if i % 2 else {"a": (value,)} if i % 3 else {0: value}
    model = nn.Linear(2, 2)
    try:
        octavo.save_checkpoint(tmp_path, model, extra={"value": value})
    except Unsupported:
        return
    assert repr(octavo.load_checkpoint(tmp_path, model).extra["value"]) == repr(value)
