"""Folders of published codes: models that are saved into them, and files of them that are changed by hand."""

import json
from pathlib import Path

import torch
from torch import nn

import octavo
from octavo.checkpoints import tensor_file
from octavo.checkpoints.published.layouts import LAYOUTS

WRITTEN = tuple(name for name, row in LAYOUTS.items() if not row.unpacks)
SIZES = torch.tensor([20, 20, 24])


class Net(nn.Module):
    """Layers with and without a bias, sizes that are no multiples of 128, groups, and a head of values."""

    def __init__(self, recipe=None, **options):
        super().__init__()
        make = nn.Linear if recipe is None else (lambda *sizes, **more: octavo.Linear(*sizes, recipe=recipe, **more))
        self.up, self.down = make(256, 320, **options), make(320, 192, bias=False, **options)
        self.experts = octavo.GroupedLinear(3, 192, 256, recipe=recipe, **options)
        self.head = nn.Linear(256, 8, **options)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device="cpu"))

    def forward(self, x):
        return self.head(self.experts(self.down(self.up(x)), SIZES))


def trained(layout, **options):
    """A model whose weights are codes as the layout has them."""
    torch.manual_seed(0)
    return Net(LAYOUTS[layout].recipe, **options)


def on_meta():
    with torch.device("meta"):
        return Net()


def saved(folder, layout, **options):
    octavo.save_fp8(trained(layout, **options), folder, layout=layout, shard_bytes=150_000)
    return folder


def contents(folder):
    """The bytes of each file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def tensors(folder):
    """The tensors of a folder by name."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= tensor_file.read(path).tensors
    return found


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def change(folder, changes=None, entry=None):
    """Rewrite a folder as one file, with tensors replaced, or left out if they are None, and keys of its
    quantization_config replaced."""
    now = {name: t for name, t in {**tensors(folder), **(changes or {})}.items() if t is not None}
    for path in [*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.index.json")]:
        path.unlink()
    tensor_file.write(Path(folder) / "model.safetensors", now)
    if entry is not None:
        path = Path(folder) / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"].update(entry)
        path.write_text(json.dumps(config))
