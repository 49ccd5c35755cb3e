"""A layer that wraps another: the same contract, with some members of its own."""

from octavo.runtime.contract import Layer


class Adapter(Layer):
    """Wrap a layer. Members that a subclass does not define are the wrapped layer's."""

    def __init__(self, layer: Layer) -> None:
        for name in dir(layer):
            if not name.startswith("_") and getattr(type(self), name, None) is getattr(Layer, name, None):
                setattr(self, name, getattr(layer, name))  # bound to the wrapped layer: a call goes there directly
        self.layer = layer  # last: a wrapped adapter has one of its own
