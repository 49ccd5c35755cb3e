"""The checks that every layer's contract must pass, for one config and its inputs."""

import torch

from octavo.quant import TensorProto
from octavo.runtime.contract import DTYPES


def wants(grads):
    """The fields of a config that wants these gradients, such as "dx dw"."""
    return {f"wants_{name}": True for name in grads.split()}


def flatten(fields):
    """The tensors among fields, some of which are tuples of tensors."""
    return [t for entry in fields for t in (entry if isinstance(entry, tuple) else (entry,)) if t is not None]


def abstract(entry):
    if isinstance(entry, tuple):
        return tuple(map(abstract, entry))
    return None if entry is None else TensorProto.of(entry)


def check_forward(layer, config, inputs):
    """Forward returns the tensors that `abstract` describes, as many as the layer counts."""
    made = layer.forward(config, inputs)
    described = layer.abstract(config, inputs._make(map(abstract, inputs)))
    counts = layer.outputs(config), layer.auxiliary(config), layer.intermediates_size(config)
    for kind, tensors, protos, count in zip(made._fields, made, described, counts, strict=True):
        assert len(tensors) == len(protos) == count, (config, kind)
        check_alike(tensors, protos, (config, kind))
    return made


def check_alike(tensors, protos, where):
    for tensor, proto in zip(tensors, protos, strict=True):
        assert (tensor is None) == (proto is None), where
        assert tensor is None or proto.unsupported_reason(tensor) == "", where


def check_backward(layer, config, inputs, made, dys, buffers=None):
    """Save chooses among what there is, and backward needs nothing else: the other tensors are NaN when it runs. It
    returns the gradients that `wants` and `abstract_gradients` announce, and leaves its inputs as they are."""
    saved = layer.save(config, inputs, made)
    assert len(saved) == layer.saved_size(config)
    known = {id(t) for t in [*flatten(inputs), *made.outputs, *made.auxiliary, *made.intermediates]}
    chosen = {id(t) for t in saved if t is not None}
    assert chosen <= known, config
    before = [t.clone() for t in flatten(inputs)]
    buffers = layer.Buffers() if buffers is None else buffers
    grads = layer.backward(config, tuple(saved), buffers, dys)
    for tensor, old in zip(flatten(inputs), before, strict=True):
        assert torch.equal(bits(tensor), bits(old)), config
    check_gradients(layer, config, inputs, saved, grads, dys)
    for tensor in flatten(inputs):
        if id(tensor) not in chosen and tensor.dtype in DTYPES.values():
            tensor.fill_(float("nan"))
    again = layer.backward(config, tuple(saved), buffers, dys)
    for first, second in zip(grads, again, strict=True):
        assert first is second is None or torch.equal(first, second), config
    return grads


def check_gradients(layer, config, inputs, saved, grads, dys):
    assert [g is not None for g in grads] == list(layer.wants(config)), config
    assert len(grads) == len(inputs)
    announced = layer.abstract_gradients(config, tuple(saved), *[abstract(t) for t in dys])
    elsewhere = layer.gradients_in_buffers(config)
    for i, (grad, proto, tensor) in enumerate(zip(grads, announced, inputs, strict=True)):
        assert grad is None or grad.shape == tensor.shape, config
        assert grad is None or i in elsewhere or proto.unsupported_reason(grad) == "", config
    for i, other in layer.gradient_aliases(config).items():
        assert grads[i] is (dys[-1 - other] if other < 0 else grads[other]), config


def bits(tensor):
    """A tensor to compare, NaN included."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)
