"""`left_out`: the parameters for which a checkpoint in the layout of transformers has no values."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from octavo.errors import InvalidCheckpoint
from octavo.integrations.weights_file import left_out


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"first": nn.Linear(32, 16), "experts": nn.ParameterList([torch.randn(2, 16, 32)])})


def split(state):
    """The state with experts one by one, each transposed."""
    return {
        "first.weight": state["first.weight"], "first.bias": state["first.bias"],
        **{f"experts.{i}.w": expert.T.contiguous() for i, expert in enumerate(state["experts.0"])},
    }  # fmt: skip


def write(folder, state, *, shards):
    names = list(state)
    files = [names] if shards == 1 else [names[i::shards] for i in range(shards)]
    places = {}
    for i, part in enumerate(files):
        file = "model.safetensors" if shards == 1 else f"model-{i}.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_parameter_that_no_tensor_begins_like_was_left_out(shards, tmp_path):
    found = model()
    write(tmp_path, split(found.state_dict()), shards=shards)
    assert left_out(tmp_path, found) == []  # the trainer loaded the experts from their parts
    found["experts"][0].data.zero_()
    assert left_out(tmp_path, found) == ["experts.0"]


def test_a_checkpoint_with_all_names_leaves_nothing_out(tmp_path):
    found = model()
    write(tmp_path, {name: torch.zeros_like(t) for name, t in found.state_dict().items()}, shards=1)
    assert left_out(tmp_path, found) == []


def test_a_folder_without_a_checkpoint_is_not_looked_at_and_a_damaged_one_is_refused(tmp_path):
    assert left_out(tmp_path, model()) == [] == left_out(tmp_path / "nowhere", model())
    (tmp_path / "model.safetensors").write_bytes(b"no checkpoint")
    with pytest.raises(InvalidCheckpoint, match="safetensors"):
        left_out(tmp_path, model())
