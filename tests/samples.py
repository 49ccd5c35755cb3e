"""Grids of which `make test` runs a sample, and `pytest -m slow` the rest.

`PERIODS` has the functions whose cases take most of a run's processor time: a case is in the sample if its number is a
multiple of its function's period, counted from a place that differs by function, so that not every sample has the same
recipes. Cases that need a GPU are all run.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.fast import function_of

ROOT = Path(__file__).parent

PERIODS: dict[str, dict[str, int]] = {
    "cli/test_bench_moe.py": {
        "test_octavos_mixture_is_measured_each_way": 2,
    },
    "cli/test_output.py": {
        "test_a_bench_keeps_its_rows_wherever_it_is_interrupted": 4,
    },
    "demo/test_moe_gpt.py": {
        "test_a_seed_fixes_a_run": 2,
    },
    "demo/test_saves.py": {
        "test_an_interrupted_and_resumed_command_has_every_bit": 4,
    },
    "demo/test_training.py": {
        "test_gradients_in_lock_step": 3,
        "test_gradients_with_the_head_quantized_too": 3,
    },
    "distributed/test_one_rank.py": {
        "test_a_block_is_the_plain_one": 3,
        "test_a_linear_is_the_plain_one": 2,
    },
    "distributed/test_unused_results.py": {
        "test_a_graph_keeps_the_collectives_of_a_linear": 4,
    },
    "fusion/test_add_norm_linear.py": {
        "test_a_graph_has_one_node_each_way_and_the_bits_of_eager": 4,
    },
    "fusion/test_block_options.py": {
        "test_a_block_returns_its_bias_and_fuses_all_the_same": 2,
        "test_a_block_returns_the_output_of_its_norm": 2,
    },
    "fusion/test_blocks.py": {
        "test_compiled_is_eager": 2,
    },
    "fusion/test_compiled_runs.py": {
        "test_compiled_is_eager_in_as_many_nodes_as_there_are_runs": 4,
        "test_every_fusion_compiled_is_eager": 3,
        "test_one_graph_serves_many_batch_sizes": 2,
        "test_training_and_inference_in_turn": 3,
    },
    "fusion/test_edits.py": {
        "test_an_edit_is_compiled": 4,
    },
    "fusion/test_fork_order.py": {
        "test_three_gradients_at_a_fork_in_one_order": 4,
    },
    "fusion/test_fused_contract.py": {
        "test_a_fused_operation_that_returns_something_else_is_named_with_its_function_and_what_came_back": 2,
    },
    "fusion/test_fusions.py": {
        "test_a_rule_fires_and_fused_is_unfused_bit_for_bit": 2,
    },
    "fusion/test_grouped_mlp.py": {
        "test_a_compiled_grouped_mlp_is_one_node_each_way_with_the_bits_of_eager": 2,
        "test_memory_for_y_and_dx_is_written_in_place": 4,
    },
    "fusion/test_sharded.py": {
        "test_a_weight_that_is_made_of_another_parameter": 3,
    },
    "fusion/test_split_call.py": {
        "test_a_split_call_gives_the_same_bits_in_a_graph": 4,
        "test_operations_give_the_bits_of_autograd": 2,
    },
    "fusion/test_wrong_results.py": {
        "test_a_gradient_unlike_its_input_is_an_error_that_names_it": 4,
        "test_rows_may_change_places": 2,
    },
    "inspection/test_debug.py": {
        "test_a_function_sees_and_replaces_one_tensor": 2,
    },
    "inspection/test_inspect_compiled.py": {
        "test_a_graph_records_what_eager_mode_records": 3,
    },
    "kernels/test_activation_quantize_groups.py": {
        "test_groups_of_any_size": 2,
    },
    "model/test_convert_experts_compiled.py": {
        "test_a_graph_of_converted_experts_computes_what_eager_does": 3,
    },
    "model/test_offload.py": {
        "test_all_results_have_the_bits_without_it": 3,
    },
    "model/test_policy.py": {
        "test_a_change_at_a_step_equals_one_by_hand": 4,
        "test_a_run_resumes_before_and_after_the_change": 2,
    },
    "moe/test_expert_parallel_surroundings.py": {
        "test_copies_and_checkpoints_have_the_same_bits": 2,
    },
    "moe/test_experts.py": {
        "test_compiled_with_changing_routing": 2,
    },
    "moe/test_experts_storage.py": {
        "test_compiled_has_the_bits_of_eager": 3,
    },
    "moe/test_moe.py": {
        "test_compiled_has_the_bits_of_eager": 2,
    },
    "moe/test_permute.py": {
        "test_compiled_gives_the_bits_of_eager": 3,
    },
    "moe/test_router.py": {
        "test_a_compiled_router_under_autocast_has_the_bits_of_an_eager_one": 2,
    },
    "ops/test_attention.py": {
        "test_a_graph_has_the_same_bits": 3,
    },
    "ops/test_basic_ops.py": {
        "test_compiled_is_eager_bit_for_bit_in_one_node_each_way": 4,
        "test_half_precision_parameters_under_autocast": 2,
        "test_one_graph_serves_many_batch_sizes": 3,
        "test_operators_pass_their_own_tests": 3,
    },
    "ops/test_extra_ops.py": {
        "test_a_float32_extra_input_is_rounded_once_with_x": 2,
    },
    "ops/test_from_meta.py": {
        "test_state_comes_with_the_weights": 2,
    },
    "ops/test_grouped_compiled.py": {
        "test_an_operation_before_the_layer_reads_the_gradient_of_this_step": 3,
        "test_compiled_is_eager_in_one_graph_of_any_number_of_rows": 2,
        "test_compiled_weight_cache": 2,
    },
    "ops/test_keep_codes.py": {
        "test_the_same_bits_with_a_cache_which_of_groups_holds_rows_alone_where_they_can_be_transposed": 4,
    },
    "ops/test_linear_layer.py": {
        "test_forward_returns_what_abstract_describes": 2,
    },
    "ops/test_microbatch.py": {
        "test_compiled_accumulation_has_the_bits_of_flags_and_a_graph_for_each_value": 2,
    },
    "ops/test_repeated_calls.py": {
        "test_a_call_of_another_kind_is_one": 2,
        "test_a_change_of_the_layer_counts": 2,
    },
    "ops/test_save_original_input.py": {
        "test_all_results_have_the_bits_of_codes": 2,
    },
    "quant/test_scales.py": {
        "test_2d_block_scale_of_every_bf16_amax": 2,
    },
    "runtime/test_call_cache.py": {
        "test_a_change_of_an_operation_of_a_run_counts": 2,
    },
    "runtime/test_compiled_backward.py": {
        "test_saved_tensors_pass_through_hooks": 2,
    },
    "runtime/test_compiled_copies.py": {
        "test_a_copy_of_a_compiled_module_is_compiled": 3,
    },
    "runtime/test_direct.py": {
        "test_recorded_nodes_have_the_bits_of_eager": 4,
    },
    "runtime/test_grouped_nodes.py": {
        "test_a_graph_refreshes_the_cache_where_it_is_told_to": 2,
        "test_fakes_agree_with_what_the_operators_give": 3,
        "test_one_node_forward_and_one_backward_for_each_layer": 2,
        "test_opcheck_of_every_operator_of_a_step": 2,
    },
    "runtime/test_hidden_buffers.py": {
        "test_their_addresses_are_static_and_their_sizes_constants": 2,
    },
    "runtime/test_operators.py": {
        "test_opcheck_of_every_operator_of_a_step": 3,
    },
    "runtime/test_operators_by_name.py": {
        "test_compiled_is_eager_bit_for_bit_in_one_graph": 3,
        "test_deferred_weight_gradients_with_several_microbatches_in_flight": 3,
        "test_fakes_are_the_same_on_every_chip": 3,
        "test_main_grad_with_several_microbatches_in_flight": 2,
        "test_no_tokens_one_token_and_leading_dims": 3,
        "test_the_weight_cache_from_a_cold_start": 4,
    },
    "runtime/test_replay.py": {
        "test_replays_of_a_compiled_model_have_the_bits_of_eager": 3,
    },
    "scaling/test_cold_start.py": {
        "test_compiled_layers_share_two_graphs": 2,
    },
    "scaling/test_update_operators.py": {
        "test_amaxes_are_read_and_reset_where_the_program_says": 4,
    },
    "strange/test_compiled_environments.py": {
        "test_a_compiled_layer_in_an_environment": 2,
    },
    "strange/test_environments.py": {
        "test_a_layer_in_an_environment": 4,
    },
    "strange/test_functions.py": {
        "test_a_function_in_a_state_of_torch": 2,
    },
    "strange/test_long_runs.py": {
        "test_a_long_run_holds_no_more_than_a_short_one": 2,
    },
    "upstream/test_block_grid.py": {
        "test_an_mlp": 3,
    },
    "weights/test_code_layers.py": {
        "test_a_layer_computes_what_it_computes_with_a_weight_that_is_cast": 2,
    },
    "weights/test_codes_in_programs.py": {
        "test_a_recipe_that_quantizes_nothing_multiplies_the_values": 2,
    },
    "weights/test_stale_codes.py": {
        "TestInAGraph::test_a_step_makes_a_cache_stale": 2,
        "TestInAGraph::test_ways_out": 2,
    },
    "weights/test_waiting_gradients.py": {
        "test_a_new_weight_of_another_shape_is_refused_and_the_gradient_waits_on": 2,
        "test_a_new_weight_of_the_same_shape_gets_the_gradient": 2,
    },
}


def period_of(function: str) -> int:
    file, _, name = function.partition("::")
    return PERIODS.get(file.removeprefix("tests/"), {}).get(name, 1)


def mark_the_rest(items: Sequence[Any]) -> None:
    """Mark as slow the cases that are not in the sample of their function."""
    numbers: Counter[str] = Counter()
    for item in items:
        function = function_of(item.nodeid)
        period = period_of(function)
        if period == 1 or item.get_closest_marker("gpu") or item.get_closest_marker("slow"):
            continue
        if (numbers[function] + crc32(function.encode())) % period:
            item.add_marker(pytest.mark.slow)
        numbers[function] += 1
