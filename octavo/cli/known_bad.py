"""Known defects of the installed torch and triton, and what Octavo does about each."""

from typing import Any

from octavo.version import parse


def known_bad(facts: dict[str, Any], environment: dict[str, str]) -> list[dict[str, str]]:
    """Return the entries that apply here. `facts` comes from `machine.describe`."""
    found = []
    if parse(facts["torch"]) == (2, 11):
        found.append(
            {
                "what": "torch 2.11 can give silently wrong gradients for an autograd.Function traced by torch.compile",
                "where": "pytorch #180642, #183604",
                "octavo": "Octavo compiles through custom operators instead; check your own autograd.Functions.",
            }
        )
    if facts["triton"] and parse(facts["triton"]) <= (3, 6):
        found.append(
            {
                "what": "triton up to 3.6 may miscompile FP8 clamped with NaN propagation and stored transposed",
                "where": "triton #11111",
                "octavo": "Octavo's kernels do not clamp that way, and every configuration is checked byte for byte.",
            }
        )
    if environment.get("TRITON_INTERPRET", "0") not in ("", "0"):
        found.append(
            {
                "what": "TRITON_INTERPRET is set, and the interpreter rounds FP8 casts wrongly",
                "where": "triton #8322",
                "octavo": "Unset it: codes will not match the reference.",
            }
        )
    return found
