"""Keywords and recipes of Transformer Engine that Octavo does not have: each with the line to write in its place. A
constructor or function that is called with one raises it, and for another unknown keyword the names that are known."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NoReturn, TypeVar

from octavo.errors import UnknownSetting, nearest

Function = TypeVar("Function", bound=Callable[..., Any])

_RANDOM = "Seed all ranks alike before construction: a part of a weight is that of the whole weight."
_OVERLAP = (
    "Collectives do not overlap with GEMMs here; y and the gradients are those without it. Leave it out; pipelines "
    "overlap with delay_wgrad_compute=True and backward_dw()."
)
_REDUCED = "octavo.attach(model, optimizer, group) reduces the amaxes of fp8-delayed over a group. Leave it out."
_BY_MAP = "Rows follow from the map; capacity= and align= change their number. Leave it out."
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
    "hidden_size": "Write normalized_shape=...",
    "sequence_parallel": "Call norm.sum_gradients_over(group) after construction.",
    "enabled": "Enter octavo.autocast(recipe) where it is enabled, and contextlib.nullcontext() where not.",
    "fp8_recipe": "Write recipe=...",
    "fp8_group": _REDUCED,
    "amax_reduction_group": _REDUCED,
    "calibrating": "fp8-delayed's first step measures the scales of tensors that it has not seen. Leave it out.",
    "num_out_tokens": _BY_MAP,
    "max_token_num": _BY_MAP,
    "map_type": "An index is int32 or int64, a mask bool. Leave it out.",
    "merging_probs": "Write probs=...",
    "restore_shape": "The permutation has the shape. Leave it out.",
    "use_pre_softmax": "Write normalize=False for True, and leave it out for False.",
    "score_function": "Write score=...",
    "scaling_factor": "Write scale=...",
    "expert_bias": "Write bias=...",
    "group_topk": "Write top_groups=...",
}
# settings of its recipes
OF_RECIPES = {
    "amax_history_len": "Write history=...",
    "amax_compute_algo": "Write algorithm='max' or algorithm='most_recent'.",
    "fp8_format": "HYBRID is the default; for E4M3 write grad_format=E4M3.",
    "reduce_amax": _REDUCED,
    "scaling_factor_compute_algo": "Write margin=..., powers of two to keep free. Recipes hold no functions.",
    "interval": "Scales move after every step. Leave it out.",
    "fp8_dpa": "Attention stays in high precision. Leave it out.",
    "fp8_mha": "Attention stays in high precision. Leave it out.",
    "override_linear_precision": "Write fprop='bf16', dgrad='bf16' or wgrad='bf16'.",
    "backward_override": "Write backward=...",
    "disable_rht": "Write rht=False.",
    "disable_stochastic_rounding": "Write stochastic=False.",
    "disable_2d_quantization": "Write square_weights=False.",
}
# its recipes
RECIPES = {
    "DelayedScaling": "fp8-delayed",
    "Float8CurrentScaling": "fp8-current",
    "Float8BlockScaling": "fp8-block",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}


def refuse(title: str, name: str, known: Iterable[str]) -> NoReturn:
    """Raise for a keyword that a layer or function does not take."""
    if name in WRITE or name.startswith("ub_"):
        raise UnknownSetting(f"{title} has no setting {name!r}. {WRITE.get(name, _OVERLAP)}")
    known = list(known)
    raise UnknownSetting(f"{title} has no setting {name!r}.{nearest(name, known)} It takes {', '.join(known)}.")


def recipe_named(name: str) -> str:
    """Return " Write 'fp8-delayed'." for the name of a recipe there; "" for others."""
    return f" Write {RECIPES[name]!r}." if name in RECIPES else ""


def refused(function: Function) -> Function:
    """Decorate a constructor or function so that a keyword which it does not take raises with the line to write, and
    so do settings by position. One with `**settings` checks these itself."""
    every = list(signature(function).parameters.values())
    of_object = every[0].name == "self"
    known = [p.name for p in every[of_object:] if p.kind is not Parameter.VAR_KEYWORD]
    by_position = [p.name for p in every if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in every)

    @wraps(function)
    def checked(*arguments: Any, **settings: Any) -> Any:
        if len(arguments) > len(by_position) or (settings and not takes_any):
            title = type(arguments[0]).__name__ if of_object else function.__name__
            for name in () if takes_any else settings:
                if name not in known:
                    refuse(title, name, known)
            if len(arguments) > len(by_position):
                names, given = by_position[of_object:], len(arguments) - of_object
                by_name = ", ".join(f"{name}=" for name in known if name not in names)
                raise UnknownSetting(
                    f"{title} takes {', '.join(names) or 'nothing'} by position, got {given} arguments. Write the "
                    f"names of the others: {by_name}."
                )
        return function(*arguments, **settings)

    return checked  # type: ignore[return-value]
