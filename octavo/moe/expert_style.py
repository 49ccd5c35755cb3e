"""A style for `parallelize_module`: the experts of a converted model over ranks, `ExpertwiseParallel`."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from octavo.errors import UnsupportedConfig
from octavo.moe.expert_parallel import ExpertParallel, check_modes


class ExpertwiseParallel(ParallelStyle):
    """Split experts of transformers or torchtitan, which `octavo.convert` took, over the ranks of a mesh of one dim.

    Each rank keeps its part of the parameters, under their names, and runs it on the tokens of all ranks: the module
    around them, a router above all, stays as it is, on each rank with its own tokens. Convert the model and load its
    weights first, alike on all ranks; make the optimizer after. Scales that a step has measured are measured anew.

    Args:
        payload: as in `octavo.moe.ExpertParallel`.
        engine: as in `octavo.moe.ExpertParallel`. "padded" and "symmetric" have rows for every assignment, and all
            ranks have as many tokens.

    Raises:
        UnsupportedConfig: `payload` or `engine` is unknown.

    Example:
        >>> def split(model, mesh):  # octavo.convert(model, "fp8-block") came before
        ...     from torch.distributed.tensor.parallel import parallelize_module
        ...
        ...     plan = {"model.layers.*.mlp.experts": octavo.moe.ExpertwiseParallel()}
        ...     return parallelize_module(model, mesh["ep"], plan)
    """

    def __init__(self, *, payload: str = "auto", engine: str = "auto") -> None:
        super().__init__()
        check_modes(payload, engine)
        self.payload, self.engine = payload, engine

    def __repr__(self) -> str:
        return f"ExpertwiseParallel(payload={self.payload!r}, engine={self.engine!r})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split = getattr(module, "_octavo_split", None)
        if split is None:
            raise UnsupportedConfig(
                f"ExpertwiseParallel splits experts that octavo.convert took, got {type(module).__name__}. Convert the "
                "model first, and name the module that holds the experts' parameters; an octavo.MoE takes ep_group="
            )
        split(ExpertParallel(device_mesh, payload=self.payload, engine=self.engine))
        return module
