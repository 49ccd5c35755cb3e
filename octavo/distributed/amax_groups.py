"""Groups of ranks that have the same layers, for scales that follow from the amaxes of all of them."""

from torch import nn

from octavo.communication.groups import ALONE, Group, name_of
from octavo.errors import UnsupportedConfig
from octavo.ops.quantized import Quantized


def set_amax_group(module: nn.Module, group: Group) -> None:
    """Set the ranks that agree on the amaxes of a module's layers at each `octavo.step`, in place of the step's group.

    Use it where not all ranks of the step's group have these layers: experts of which each rank has others, or the
    stages of a pipeline. Each group makes one all-reduce a step.

    Args:
        module: the module that holds the layers.
        group: the ranks with the same layers: a ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim); or
            "alone" if no other rank has them. None returns to the group of the step.

    Raises:
        UnsupportedConfig: the module has no layer of Octavo's, or torch knows no such group.

    Example:
        >>> from octavo.distributed import set_amax_group
        >>> experts = octavo.MoE(16, 32, 4, 2, recipe="fp8-delayed").experts
        >>> set_amax_group(experts, "alone")
    """
    own = [layer for layer in module.modules() if isinstance(layer, Quantized)]
    if not own:
        raise UnsupportedConfig(
            f"set_amax_group sets the ranks of Octavo's layers, and this {type(module).__name__} holds none. Convert "
            "the model first, or pass the module that holds them."
        )
    name = None if group is None else ALONE if isinstance(group, str) and group == ALONE else name_of(group)
    for layer in own:
        layer.amax_group = name
