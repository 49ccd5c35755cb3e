"""FSDP2 that gathers codes of weights in place of their values."""

from torch import nn

from octavo._torch.tensors import is_sharded
from octavo.communication.sharded_weights import ShardedWeight, WeightSource
from octavo.errors import UnsupportedConfig
from octavo.ops.linear import Linear
from octavo.weights.quantized_weight import QuantizedWeight


def gather_codes(model: nn.Module) -> nn.Module:
    """Have FSDP2 gather the weights of a model's Linear layers as codes: half of the bytes of bfloat16.

    Call it after `octavo.convert` and before `fully_shard`. A rank casts its shard once a step, however many
    microbatches follow, and sends row codes and scales. Parameters stay as they were for optimizers and checkpoints:
    DTensors of values.

    Args:
        model: a module with Octavo layers that have recipes of their own.

    Returns:
        The model.

    Raises:
        UnsupportedConfig: a weight is sharded already, or is codes.

    Example:
        >>> from octavo.distributed import gather_codes
        >>> model = gather_codes(nn.Sequential(octavo.Linear(256, 128, recipe="fp8-block")))
        >>> type(model[0].weight).__name__         # torch.distributed.fsdp.fully_shard(model) is next
        'ShardedWeight'
    """
    for layer in model.modules():
        weight = layer._parameters.get("weight") if isinstance(layer, Linear) else None
        if weight is None or not isinstance(layer, Linear) or layer.recipe is None or layer.parallel is not None:
            continue
        if is_sharded(weight) or isinstance(weight, QuantizedWeight):
            what = "is sharded already" if is_sharded(weight) else "is codes already"
            raise UnsupportedConfig(
                f"gather_codes prepares weights for fully_shard, and that of {layer.op_describe()} {what}. Call it "
                "after octavo.convert, before fully_shard and without octavo.quantize_weights."
            )
        if isinstance(weight, ShardedWeight):
            continue
        layer._sharded = WeightSource(layer)
        layer.register_parameter(
            "weight", nn.Parameter(ShardedWeight(weight.detach(), layer._sharded), weight.requires_grad)
        )
    return model
