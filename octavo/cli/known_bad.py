"""Known defects of the installed torch and triton, and what Octavo does about each."""

from typing import Any

from octavo.version import parse


def known_bad(facts: dict[str, Any], environment: dict[str, str]) -> list[dict[str, str]]:
    """Return the entries that apply here. `facts` comes from `machine.describe`."""
    rows = (
        (
            parse(facts["torch"]) == (2, 11), "pytorch #180642, #183604",
            "torch 2.11 can give silently wrong gradients for an autograd.Function traced by torch.compile",
            "Octavo compiles through custom operators instead; check your own autograd.Functions.",
        ),
        (
            facts["triton"] and parse(facts["triton"]) <= (3, 6), "triton #11111",
            "triton up to 3.6 may miscompile FP8 clamped with NaN propagation and stored transposed",
            "Octavo's kernels do not clamp that way, and every configuration is checked byte for byte.",
        ),
        (
            environment.get("TRITON_INTERPRET", "0") not in ("", "0"), "triton #8322",
            "TRITON_INTERPRET is set, and the interpreter rounds FP8 casts wrongly",
            "Unset it: codes will not match the reference.",
        ),
    )  # fmt: skip
    return [{"what": what, "where": where, "octavo": octavo} for is_here, where, what, octavo in rows if is_here]
