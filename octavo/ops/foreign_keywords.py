"""Keywords of Transformer Engine's layers that Octavo's do not have: each with the line to write in its place. A
constructor that is called with one raises it, and for any other unknown keyword the names that are known."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NoReturn, TypeVar

from octavo.errors import UnknownSetting, nearest

Constructor = TypeVar("Constructor", bound=Callable[..., None])

_RANDOM = "Seed all ranks alike before construction: a part of a weight is that of the whole weight."
_OVERLAP = (
    "Collectives do not overlap with GEMMs here; y and the gradients are those without it. Leave it out; pipelines "
    "overlap with delay_wgrad_compute=True and backward_dw()."
)
WRITE = {
    "params_dtype": "Write dtype=...",
    "init_method": "Initialise after construction: torch.nn.init.normal_(layer.weight, std=0.023).",
    "output_layer_init_method": "Initialise after construction: torch.nn.init.normal_(layer.fc2.weight, std=0.023).",
    "get_rng_state_tracker": _RANDOM,
    "rng_tracker_name": _RANDOM,
    "rng_state_tracker_function": _RANDOM,
    "parameters_split": (
        "The layer has one weight; q, k, v = layer.weight.split(sizes) are views of it. Use a Linear for each part if "
        "an optimizer or a checkpoint needs parameters of their own."
    ),
    "tp_size": "The size is that of tp_group=...; parallel_mode= says how the weight is split.",
    "return_layernorm_output": "The blocks take it: octavo.LayerNormLinear and octavo.LayerNormMLP.",
    "return_layernorm_output_gathered": (
        "Write return_layernorm_output=True: each rank returns its own rows. octavo.ops.AllGather gathers them."
    ),
    "name": "A layer's name is its path in the model, which reports and errors show. Leave it out.",
    "sm_margin": "Kernels take the whole GPU. Leave it out.",
    "symmetric_ar_type": _OVERLAP,
    "ub_name": _OVERLAP,
    "num_gemms": "Write num_groups=...",
    "accumulate_into_main_grad": "Write fuse_wgrad_accumulation=...",
    "tensor_parallel_mode": "Write parallel_mode=...",
    "tensor_parallel_group": "Write tp_group=...",
    "userbuffers_options": _OVERLAP,
    "use_grouped_tensor": "Sizes of groups stay on the device always. Leave it out.",
    "checkpoint": "Write activation_recompute=...",
    "seq_length": "Sizes are those of x in each call. Leave it out.",
    "micro_batch_size": "Sizes are those of x in each call. Leave it out.",
    "input_quantizer_role": "Settings of one layer are a rule of octavo.Policy. Leave it out.",
    "output_quantizer_role": "Settings of one layer are a rule of octavo.Policy. Leave it out.",
    "grad_input_quantizer_role": "Settings of one layer are a rule of octavo.Policy. Leave it out.",
}


def refuse(title: str, name: str, known: Iterable[str]) -> NoReturn:
    """Raise for a keyword that a layer does not take."""
    if name in WRITE or name.startswith("ub_"):
        raise UnknownSetting(f"{title} has no setting {name!r}. {WRITE.get(name, _OVERLAP)}")
    known = list(known)
    raise UnknownSetting(f"{title} has no setting {name!r}.{nearest(name, known)} It takes {', '.join(known)}.")


def refused(constructor: Constructor) -> Constructor:
    """Decorate a constructor so that a keyword which it does not take raises with the line to write."""
    parameters = list(signature(constructor).parameters.values())[1:]
    known = [p.name for p in parameters if p.kind is not Parameter.VAR_KEYWORD]

    @wraps(constructor)
    def checked(self: Any, *arguments: Any, **settings: Any) -> None:
        if not settings.keys() <= set(known):
            refuse(type(self).__name__, next(name for name in settings if name not in known), known)
        constructor(self, *arguments, **settings)

    return checked  # type: ignore[return-value]
