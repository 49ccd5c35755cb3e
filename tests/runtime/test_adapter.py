"""A wrapped layer answers as the layer itself, and fields that are packed come back as they were."""

import pytest

from octavo.runtime.adapter import Adapter
from octavo.runtime.contract import LAYERS, Layer, Packing, pack
from octavo.runtime.node_call import layer_of_node

OWN = {"forward"}  # of the layer of a node, which returns bytes and flat scales


@pytest.mark.parametrize("name", sorted(name for name, entry in LAYERS.items() if isinstance(entry, Layer)))
def test_the_layer_of_a_node_answers_as_the_layer_itself(name):
    layer = LAYERS[name]
    wrapped = layer_of_node(name)
    assert isinstance(wrapped, Layer) and wrapped is layer_of_node(name) and LAYERS[name] is layer
    members = {member for member in dir(layer) if not member.startswith("_")}
    assert members > OWN
    for member in members - OWN:
        assert getattr(wrapped, member) == getattr(layer, member), member


def test_adapters_of_adapters_have_what_they_wrap():
    class Named(Adapter):
        def outputs(self, config):
            return "named"

    class Counted(Adapter):
        def auxiliary(self, config):
            return "counted"

    inner = Named(LAYERS["linear"])
    outer = Counted(inner)
    assert outer.layer is inner and inner.layer is LAYERS["linear"]
    assert (outer.outputs(None), outer.auxiliary(None)) == ("named", "counted")
    assert outer.Inputs is LAYERS["linear"].Inputs


@pytest.mark.parametrize(
    ("fields", "marks", "starts"),
    [
        ((), "", []),
        (("x", None, "w"), "1,0,1", [0, 1, 1]),
        (("x", (), ("a", "b"), None, "w"), "1,t0,t2,0,1", [0, 1, 1, 3, 3]),
    ],
)
def test_packed_fields_come_back(fields, marks, starts):
    tensors = ["before"]
    assert pack(fields, tensors) == marks
    packing = Packing(marks)
    assert packing.count == len(tensors) - 1 and packing.starts == starts
    assert packing.unpack([*tensors[1:], "more"]) == list(fields)
