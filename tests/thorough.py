"""Which cases of a test are looked at in ``make test-all`` alone.

A test says so of cases of its own (:func:`some_thorough`). Of the longest tests with many cases ``make test`` looks at
one in so many (:data:`ONE_IN`): on two cores each second of a case is half a second of everybody's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest


def some_thorough(cases: Iterable[Any], thorough: Collection[Any]) -> list[Any]:
    """The cases for ``parametrize``, where a tuple is several arguments; those in ``thorough`` are thorough ones."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.thorough] * (case in thorough))
        for case in cases
    ]


ONE_IN: dict[tuple[str, int], tuple[str, ...]] = {
    ("benchmarks/test_published.py", 3): ("test_runs_of_every_kind_are_built",),
    ("capture/test_annotation.py", 2): ("test_the_plan_keeps_to_it_and_it_takes_no_time",),
    ("capture/test_capture.py", 3): ("test_parameters_and_buffers_stand_under_their_fqns_and_names_are_unique",),
    ("capture/test_effects.py", 3): (
        "test_a_buffer_that_cannot_be_replaced_is_refused",
        "test_a_buffer_that_is_replaced_is_a_mutation_whether_it_was_read_or_not",
        "test_a_change_of_python_state_is_refused_with_its_line",
    ),
    ("capture/test_failures.py", 3): ("test_the_error_names_the_line_and_the_next_capture_works",),
    ("capture/test_flat.py", 2): ("test_a_model_that_asks_in_turn_for_other_things_than_constants_is_captured_whole",),
    ("capture/test_flat.py", 4): ("test_the_graph_is_that_of_a_whole_capture",),
    ("capture/test_folded_heads.py", 2): ("test_whatever_is_cut",),
    ("capture/test_folded_heads.py", 3): ("test_products_by_an_equation_are_torchs_with_their_gradients",),
    ("capture/test_folded_heads.py", 4): ("test_heads_are_cut",),
    ("capture/test_kept_graph.py", 2): ("test_a_model_that_changed_is_captured",),
    ("capture/test_kept_graph.py", 3): ("test_a_kept_graph_is_that_of_a_capture_node_by_node",),
    ("capture/test_losses.py", 3): ("test_every_operator_on_rows_can_be_cut_by_rows",),
    ("capture/test_parts.py", 3): ("test_attention_without_a_kernel",),
    ("capture/test_silent.py", 3): ("test_what_a_forward_says_is_left_out_of_its_graph",),
    ("capture/test_static_shapes.py", 3): (
        "test_a_number_out_of_a_tensor_is_refused",
        "test_a_shape_that_depends_on_numbers_is_refused",
    ),
    ("cli/test_progress_of_commands.py", 3): ("test_a_command_says_what_it_does_and_what_is_known",),
    ("constraints/test_schemes.py", 3): (
        "test_context_parallelism_cuts_the_sequence_and_gathers_keys_and_values",
        "test_projections_that_ranks_cannot_share_are_left_whole_and_attention_is_cut_by_heads",
    ),
    ("distributed/test_baselines.py", 2): (
        "test_a_baseline_moves_the_bytes_that_torch_moves",
        "test_a_baseline_trains_like_one_process",
    ),
    ("distributed/test_failures.py", 2): ("test_the_others_say_which_rank_failed_and_why",),
    ("distributed/test_models.py", 2): (
        "test_batch_norm_statistics_are_those_of_the_whole_batch",
        "test_loss_outside_of_the_model",
    ),
    ("distributed/test_parity.py", 2): (
        "test_inputs_over_dp_heads_and_columns_over_tp",
        "test_sizes_that_the_axes_do_not_divide",
    ),
    ("lowering/test_expert_loops.py", 2): ("test_what_masks_add_that_is_of_no_experts_is_computed_of_all_rows",),
    ("lowering/test_expert_loops.py", 3): ("test_experts_compute_their_own_tokens_alone",),
    ("lowering/test_expert_loops.py", 4): ("test_loops_that_do_something_else_are_refused",),
    ("lowering/test_filled.py", 2): (
        "test_a_product_that_is_reduced_with_others_is_written_where_they_travel",
        "test_gradients_hold_no_memory_but_their_own",
    ),
    ("lowering/test_held.py", 3): ("test_a_tensor_that_is_not_what_the_plan_was_made_for_is_refused",),
    ("lowering/test_known_numbers.py", 3): ("test_a_forward_may_go_by_numbers_that_stand_in_it",),
    ("lowering/test_left_attributes.py", 2): (
        "test_weights_that_hooks_compute_and_set",
        "test_what_layers_keep_is_what_one_process_keeps",
    ),
    ("lowering/test_left_attributes.py", 3): (
        "test_what_is_left",
        "test_what_the_next_call_would_find_is_refused",
    ),
    ("lowering/test_local_values.py", 3): ("test_graphs_say_of_every_value_what_torch_says_of_it",),
    ("lowering/test_matrix_functions.py", 2): ("test_heads_of_triangular_systems_are_cut",),
    ("lowering/test_matrix_functions.py", 3): ("test_functions_of_matrices_compute_what_one_process_computes",),
    ("lowering/test_numbers_as_indices.py", 2): ("test_whatever_is_cut",),
    ("lowering/test_numbers_as_indices.py", 4): ("test_what_is_picked_or_written_is_that_of_one_process",),
    ("lowering/test_order.py", 2): ("test_ranks_issue_and_wait_in_one_order",),
    ("lowering/test_picked_rows.py", 3): ("test_nothing_is_gathered",),
    ("lowering/test_put_back.py", 3): ("test_what_is_put_back_is_no_change",),
    ("lowering/test_representative.py", 2): ("test_whatever_is_cut",),
    ("lowering/test_representative.py", 3): ("test_a_step_that_decides_otherwise_says_so",),
    ("lowering/test_representative.py", 4): ("test_steps_that_decide_the_same_are_those_of_one_process",),
    ("lowering/test_results.py", 3): ("test_results_and_gradients_are_those_of_the_model",),
    ("lowering/test_rows_of_masks.py", 3): (
        "test_what_reads_picked_rows_in_another_way_is_refused",
        "test_whatever_is_cut",
    ),
    ("lowering/test_rows_of_masks.py", 4): ("test_what_is_computed_of_picked_rows",),
    ("lowering/test_seen_or_refused.py", 4): ("test_it_is_refused_or_right",),
    ("lowering/test_shard_steps.py", 3): ("test_every_optimizer_does_to_shards_what_it_does_to_dtensors",),
    ("lowering/test_state.py", 2): ("test_parametrized_and_compiled_submodules_train_as_they_do",),
    ("lowering/test_steps_first.py", 2): (
        "test_layers_and_steps_are_cut_beside_them",
        "test_whatever_is_cut",
    ),
    ("lowering/test_steps_first.py", 3): ("test_rows_are_cut",),
    ("lowering/test_taken_apart.py", 3): ("test_a_random_plan_computes_what_one_process_computes",),
    ("lowering/test_users_model.py", 3): ("test_a_parallel_module_is_the_model_it_was_made_from",),
    ("lowering/test_vocabulary.py", 3): ("test_logits_stay_cut_and_only_numbers_for_rows_travel",),
    ("lowering/test_what_mixes_rows.py", 2): (
        "test_determinants_of_matrices_that_lie_otherwise_in_memory",
        "test_fewer_heads_of_keys_are_cut_with_those_of_the_queries_that_read_them",
        "test_spreads_are_torchs_with_their_gradients",
    ),
    ("lowering/test_what_mixes_rows.py", 3): (
        "test_lengths_over_the_batch_are_torchs_with_their_gradients",
        "test_the_batch_is_cut",
        "test_whatever_is_cut",
    ),
    ("lowering/test_without_elements.py", 3): ("test_models_with_them_have_the_schemes_of_others",),
    ("lowering/test_written_out_attention.py", 2): (
        "test_heads_are_cut_and_one_all_reduce_follows_each_attention",
        "test_heads_are_cut_where_all_rows_meet_the_same_matrix",
    ),
    ("lowering/test_written_parameters.py", 2): ("test_whatever_is_cut",),
    ("lowering/test_written_parameters.py", 3): ("test_parameters_are_what_one_process_writes",),
    ("measure/test_calibrate_command.py", 2): ("test_a_rank_that_outlives_the_first_one_speaks_for_itself",),
    ("mesh_search/test_search.py", 3): ("test_a_mistake_leaves_every_file_as_it_was",),
    ("ops/test_expert_cuts.py", 2): (
        "test_the_columns_of_a_fused_projection_are_cut_in_the_parts_that_they_are_taken_apart_into",
    ),
    ("planning/test_chosen_again.py", 2): ("test_it_prices_and_counts_as_the_program_in_which_the_same_is_decided",),
    ("planning/test_chosen_again.py", 3): ("test_operators_have_the_same_strategies_whatever_is_computed_again",),
    ("planning/test_comparison.py", 2): ("test_the_optimum_costs_no_more_than_any_baseline",),
    ("planning/test_context_in_parts.py", 2): ("test_of_several_rows_a_rank_has_a_block_of_each",),
    ("planning/test_tensor_networks.py", 2): ("test_shared_steps_run_once_and_others_for_each_that_takes_them",),
    ("planning/test_timeline.py", 2): ("test_the_course_in_the_file_does_not_grow_with_depth_and_keeps_its_peak",),
    ("planning/test_timeline.py", 3): ("test_the_predicted_peak_is_the_measured_one_on_every_rank",),
    ("plans/test_schedule.py", 3): ("test_real_plans_keep_the_laws",),
    ("plans/test_simulation.py", 2): ("test_the_step_is_no_shorter_than_any_lane_and_no_longer_than_all_together",),
    ("redistribution/test_steps.py", 3): (
        "test_executing_every_path_gives_every_rank_its_slice_of_the_whole",
        "test_what_the_ranks_copy_is_what_copied_bytes_says",
        "test_what_the_ranks_exchange_is_what_size_bytes_says",
    ),
    ("review/test_check.py", 2): (
        "test_a_plan_just_made_is_good_and_optimal",
        "test_numbers_that_the_layouts_do_not_come_to_are_told",
    ),
    ("review/test_replan.py", 3): ("test_an_edited_tensor_is_recognised_kept_and_planned_around",),
    ("strategies/test_enumerator.py", 3): (
        "test_partial_results_are_what_a_collective_can_combine",
        "test_the_test_models_have_a_rule_for_every_operator",
    ),
    ("strategies/test_meaning.py", 3): ("test_what_is_offered_on_the_word_of_a_small_form_is_right_at_real_size",),
    ("strategies/test_rules_are_right.py", 3): (
        "test_every_one_axis_strategy_gives_the_whole_result",
        "test_every_rule_is_verified_on_shrunken_sizes",
        "test_no_strategy_leaves_a_rank_without_elements",
        "test_replication_is_always_among_the_strategies_and_none_comes_twice",
        "test_sampled_two_axis_strategies_give_the_whole_result",
    ),
    ("test_plan_cache.py", 3): ("test_another_question_is_answered_anew",),
}
"""Tests of which every second, third or fourth case is looked at, by file and number."""


def check_names(folder: Path) -> None:
    """Raises an AssertionError where a test of :data:`ONE_IN` is not there."""
    for (path, _), names in ONE_IN.items():
        text = (folder / path).read_text()
        assert all(f"def {name}(" in text for name in names), (path, names)


def thinned(folder: Path, items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases among items that :data:`ONE_IN` leaves to ``make test-all``; the first one of a test is never."""
    one_in = {(folder / path, name): n for (path, n), names in ONE_IN.items() for name in names}
    seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        key = item.path, getattr(item, "originalname", item.name)
        if key in one_in and item.get_closest_marker("thorough") is None:
            if seen[key] % one_in[key]:
                yield item
            seen[key] += 1
