"""Faults that the tests must catch, each by a test whose name says what broke.

    python -m tests.planted_faults                  all of them
    python -m tests.planted_faults 'the tail*'      those whose name matches

Each fault is planted alone in a copy of the package, and its test runs there. A fault that its test does not catch, or
whose source is not found exactly once, ends the command with 1. So does a test that fails without a fault.
"""

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("octavo", "tests", "pyproject.toml")
PATIENCE = 600  # seconds for a run of tests


class Fault(NamedTuple):
    """One fault, and the test that catches it."""

    name: str  # what no longer holds
    file: str  # in which the source is
    source: str  # a piece of it that occurs once
    fault: str  # what replaces the piece
    test: str  # its file and its name


FAULTS = (
    # -- casts
    Fault(
        "the amax of a block leaves negative numbers out",
        "octavo/quant/scale_blocks.py",
        "F.pad(x.float().abs(), (0,",
        "F.pad(x.float(), (0,",
        "tests/quant/test_scales.py::test_amax_is_taken_over_the_magnitudes_of_the_whole_group",
    ),
    Fault(
        "a tie of E2M1 is rounded away from zero",
        "octavo/formats.py",
        "a > 1.25,",
        "a >= 1.25,",
        "tests/test_formats.py::test_every_tie_goes_to_the_even_code_and_its_neighbours_do_not",
    ),
    Fault(
        "transposed codes are in the wrong rows",
        "octavo/quant/byte_transpose/reference.py",
        "out.copy_(codes.T)",
        "out.copy_(codes.T.flip(0))",
        "tests/quant/test_byte_transpose.py::test_column_codes_are_the_codes_of_the_transposed_matrix",
    ),
    Fault(
        "the counter of stochastic rounding does not advance",
        "octavo/runtime/gradient_targets.py",
        "    seed[1:].add_(1)",
        "    seed[1:].add_(0)",
        "tests/ops/test_gradients.py::test_a_stochastic_backward_advances_its_step_by_one_and_keeps_its_seed",
    ),
    # -- delayed scaling
    Fault(
        "the amax of dy is not remembered",
        "octavo/ops/matmul.py",
        "else (kept.dy_scaling, buffers.amax)",
        "else (kept.dy_scaling, None)",
        "tests/scaling/test_delayed.py::test_the_amax_of_dy_sets_the_scale_of_dy_in_the_next_step",
    ),
    Fault(
        "the window of amaxes does not advance",
        "octavo/scaling/delayed_state.py",
        "self.head.add_(entering)",
        "self.head.clamp_min_(entering)",
        "tests/scaling/test_delayed_state.py::test_the_window_advances_by_one_entry_in_each_step",
    ),
    Fault(
        "an infinite amax enters the window",
        "octavo/scaling/delayed_state.py",
        "entering = finite & (self.running_amax > 0)",
        "entering = self.running_amax > 0",
        "tests/scaling/test_delayed_state.py::test_an_infinite_amax_does_not_enter_the_window",
    ),
    # -- the weight cache
    Fault(
        "an optimizer step leaves cached codes in use",
        "octavo/weights/optimizer_hooks.py",
        "        torch.autograd.graph.increment_version([p for p in found if type(p) is not QuantizedWeight])\n",
        "        pass\n",
        "tests/weights/test_weight_cache.py::test_an_optimizer_step_makes_the_cached_codes_of_its_weights_stale",
    ),
    Fault(
        "a write in place leaves cached codes in use",
        "octavo/weights/weight_state.py",
        "version = -1 if weight.is_inference() else weight._version",
        "version = -1",
        "tests/weights/test_weight_cache.py::test_a_write_in_place_makes_the_cached_codes_of_the_weight_stale",
    ),
    Fault(
        "the flag of a microbatch stays after its block",
        "octavo/recipes/ambient.py",
        "ambient.first, ambient.outer_first = ambient.outer_first  #",
        "_, ambient.outer_first = ambient.outer_first  #",
        "tests/ops/test_microbatch.py::test_the_flag_of_a_microbatch_ends_with_its_block",
    ),
    # -- weight gradients
    Fault(
        "dw is written over main_grad",
        "octavo/ops/operands.py",
        'out.add_(dw) if config.main_grad == "add" else out.copy_(dw)',
        "out.copy_(dw)",
        "tests/weights/test_main_grad.py::test_dw_is_added_to_the_numbers_that_main_grad_holds",
    ),
    Fault(
        "the newest deferred weight gradient is taken first",
        "octavo/weights/wgrad_queue.py",
        "for place, entry in enumerate(self._entries):",
        "for place, entry in reversed(list(enumerate(self._entries))):",
        "tests/weights/test_backward_dw.py::test_the_oldest_microbatch_comes_first_and_gradients_accumulate",
    ),
    # -- GEMMs and groups
    Fault(
        "a GEMM adds the bias after rounding",
        "octavo/kernels/gemm/reference.py",
        "y32 = y32 + bias.float()",
        "y32 = y32.to(dtype).float() + bias.float()",
        "tests/kernels/test_gemm.py::test_bias_is_added_in_float32_before_the_last_rounding",
    ),
    Fault(
        "rows after the last group come out as they are",
        "octavo/kernels/grouped_gemm/reference.py",
        "out[int(groups.start[-1]) :] = 0",
        "out[int(groups.start[-1]) :] += 0",
        "tests/kernels/test_grouped_gemm.py::test_zero_tail_zeros_the_tail_and_nothing_else",
    ),
    Fault(
        "a group is cast by the scale of its neighbour",
        "octavo/quant/reference_cast.py",
        "return amax[g] if spec.two_level else amax[g, None]",
        "return amax.roll(1)[g] if spec.two_level else amax.roll(1)[g, None]",
        "tests/quant/test_grouped.py::test_each_group_is_cast_by_the_scale_of_its_own_rows",
    ),
    # -- gradients of operations
    Fault(
        "the gradient of a LayerNorm lacks the mean",
        "octavo/kernels/norm/reference.py",
        "        dx = dx - g.mean(1, keepdim=True)",
        "        pass",
        "tests/kernels/test_norm.py::test_the_gradient_of_a_layer_norm_sums_to_zero_over_each_row",
    ),
    Fault(
        "the gradient of q is rotated forwards",
        "octavo/kernels/rotary/reference.py",
        "_turned(dq, own, -other)",
        "_turned(dq, own, other)",
        "tests/kernels/test_rotary.py::test_the_gradient_of_rotated_heads_is_rotated_back",
    ),
    Fault(
        "the gradient of an unpermuted row lacks its probability",
        "octavo/kernels/permute/reference.py",
        "scatter(dy, drows, assignments, sources, probs, zero_tail)",
        "scatter(dy, drows, assignments, sources, None, zero_tail)",
        "tests/moe/test_permute.py::test_the_gradient_of_an_unpermuted_row_is_multiplied_by_its_probability",
    ),
    # -- fusion
    Fault(
        "a rule that fuses a cast fires without one",
        "octavo/fusion/rules/conditions.py",
        "On(QUANTIZED, lambda c: c.casts_x,",
        "On(QUANTIZED, lambda c: True,",
        "tests/fusion/test_rules.py::test_a_rule_that_fuses_a_cast_does_not_fire_without_a_cast",
    ),
    Fault(
        "gradients at a fork are added the first use first",
        "octavo/runtime/chain_config.py",
        "return tuple(sorted(self.routes, reverse=True))",
        "return tuple(sorted(self.routes))",
        "tests/fusion/test_fork_order.py::test_gradients_at_a_fork_are_added_the_last_use_first",
    ),
    Fault(
        "a fused norm saves x instead of the sum",
        "octavo/fusion/rules/add_norm_linear.py",
        "return [ForwardResult((z,), (), ()), *forks, *last]",
        "return [ForwardResult((x,), (), ()), *forks, *last]",
        "tests/fusion/test_add_norm_linear.py::test_the_backward_of_a_fused_norm_reads_the_sum_and_not_its_first_term",
    ),
    # -- graphs and replays
    Fault(
        "the digest of graphs leaves a room out",
        "octavo/runtime/digest.py",
        "not in NOT_IN_GRAPHS:",
        'not in (*NOT_IN_GRAPHS, "ops"):',
        "tests/runtime/test_operators_by_name.py::test_another_process_with_other_sources_has_another_digest",
    ),
    Fault(
        "a replay runs for memory of another alignment",
        "octavo/runtime/call_cache.py",
        "        and list(map(and_, map(Tensor.data_ptr, tensors), _FOUR_BITS)) == hit.ends",
        "       ",
        "tests/runtime/test_replay.py::test_a_call_of_another_alignment_does_not_run_the_replay_of_the_last_one",
    ),
    # -- models
    Fault(
        "a checkpoint loads no state of the recipe",
        "octavo/checkpoints/checkpoint.py",
        "        write_state(recipe)\n",
        "",
        "tests/checkpoints/test_checkpoint.py::test_loading_a_checkpoint_brings_the_scales_of_delayed_scaling_back",
    ),
    Fault(
        "a head with the weight of the embedding is converted",
        "octavo/model/high_precision.py",
        " _tied_heads(model), of_vocabulary",
        " of_vocabulary",
        "tests/model/test_convert.py::test_a_head_with_the_weight_of_the_embedding_stays_unquantized",
    ),
    Fault(
        "the last rule of a policy decides",
        "octavo/model/policy.py",
        "for found in self._matches.get(path, ()) if",
        "for found in reversed(self._matches.get(path, ())) if",
        "tests/model/test_policy.py::test_the_first_rule_that_matches_decides",
    ),
    # -- ranks
    Fault(
        "ranks do not gather the rows of the others",
        "octavo/communication/collectives.py",
        'return sent("all-gather", all_gather_into_tensor, where, group, x.contiguous(), size)',
        "return torch.cat([x] * size)",
        "tests/distributed/test_local_ranks.py::test_each_rank_gathers_the_rows_of_all_ranks",
    ),
    Fault(
        "each rank scales by its own amax",
        "octavo/communication/collectives.py",
        'return sent("all-reduce (max)", all_reduce_operator, where, group, amaxes, "max")',
        "return amaxes",
        "tests/distributed/test_parallel_linear.py::test_an_outlier_on_the_last_rank_scales_all_ranks",
    ),
    # -- mixtures of experts
    Fault(
        "the weights of a token's experts are not normalized",
        "octavo/moe/routing.py",
        "_scaled(shares(weights) if normalize else weights, scale)",
        "_scaled(weights, scale)",
        "tests/moe/test_route.py::test_normalized_weights_of_a_token_sum_to_one",
    ),
    # -- inspection
    Fault(
        "inspect reports the error of x as that of w",
        "octavo/inspection/measure.py",
        'record_operand(stats, "w", None if w is None else as_matrix(w), w_cast)',
        'record_operand(stats, "w", x, x_cast)',
        "tests/inspection/test_inspect.py::test_the_error_of_the_weight_is_that_of_the_weights_own_cast",
    ),
)


class Outcome(NamedTuple):
    """What a run of tests said."""

    status: int  # of pytest: 0 if all passed, 1 if one failed
    failed: str  # the name of the first test that failed
    output: str


def occurrences(fault: Fault) -> int:
    """How often a fault's source occurs in its file."""
    path = ROOT / fault.file
    return path.read_text().count(fault.source) if path.is_file() else 0


def outcome(tests: list[str], fault: Fault | None = None) -> Outcome:
    """Runs tests in a copy of the package, with a fault planted or without, up to the first test that fails."""
    with tempfile.TemporaryDirectory(prefix="octavo-fault-") as name:
        folder = _copied(Path(name))
        if fault is not None:
            path = folder / fault.file
            path.write_text(path.read_text().replace(fault.source, fault.fault))
        return _ran(folder, tests)


def _copied(folder: Path) -> Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def _ran(folder: Path, tests: list[str]) -> Outcome:
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": str(folder),  # before an installed package
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "-p", "no:cacheprovider", *tests]
    try:
        found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return Outcome(-1, "", f"There was no result after {PATIENCE} s.")
    failed = re.search(r"^FAILED \S+?::(\w+)", found.stdout, re.MULTILINE)
    return Outcome(found.returncode, failed[1] if failed else "", found.stdout + found.stderr)


def _is_caught(fault: Fault) -> bool:
    """Plants a fault, runs its test and prints a line about it."""
    start, number = time.monotonic(), occurrences(fault)
    if number != 1:
        print(f"NOT CAUGHT          {fault.name}: its source occurs {number} times in {fault.file}", flush=True)
        return False
    found = outcome([fault.test], fault)
    caught = found.status == 1 and found.failed == fault.test.rpartition("::")[2]
    seconds = time.monotonic() - start
    # without a failed test: an error of pytest's, such as a file that cannot be imported
    said = found.failed or ("its test passed" if found.status == 0 else found.output.strip())
    print(f"{'caught' if caught else 'NOT CAUGHT':10} {seconds:5.1f} s  {fault.name}: {said}", flush=True)
    return caught


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults", description="Plants faults, one by one.")
    parser.add_argument("names", nargs="*", default=["*"], help="names of faults, or globs of them; all if none")
    wanted = parser.parse_args(arguments).names
    faults = [fault for fault in FAULTS if any(fnmatch.fnmatchcase(fault.name, name) for name in wanted)]
    if not faults:
        print(f"No fault has a name like {', '.join(wanted)}.")
        return 1
    sound = outcome(sorted({fault.test for fault in faults}))
    if sound.status != 0:
        print(f"{sound.output}\nA test fails without a fault: {sound.failed or 'see above'}.")
        return 1
    missed = [fault for fault in faults if not _is_caught(fault)]
    print(f"{len(faults) - len(missed)} of {len(faults)} caught.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
