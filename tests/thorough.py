"""Which cases of a test are looked at in ``make test-all`` alone.

A test says so of cases of its own (:func:`some_thorough`). Of long tests with many cases ``make test`` looks at one in
so many (:data:`ONE_IN`), of some at none (:data:`LEFT_OUT`): on two cores each second is half a second of everybody's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

_examples_left = 1.0
"""Which part of the examples of a law is tried."""


def try_fewer() -> None:
    """Says that a third of the examples of laws is enough; before they are imported."""
    global _examples_left
    _examples_left = 1 / 3


def tries(examples: int) -> int:
    """How many examples of a law are tried (``max_examples``): in ``make test-all`` all, in ``make test`` a third."""
    return max(1, round(examples * _examples_left))


def some_thorough(cases: Iterable[Any], thorough: Collection[Any]) -> list[Any]:
    """The cases for ``parametrize``, where a tuple is several arguments; those in ``thorough`` are thorough ones."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.thorough] * (case in thorough))
        for case in cases
    ]


LEFT_OUT: dict[str, tuple[str, ...]] = {
    "benchmarks/test_published.py": (
        "test_a_row_that_fails_or_takes_too_long_stops_no_other",
        "test_asynchronous_tensor_parallelism_pays_a_share_of_what_it_hides",
        "test_in_float8_products_of_layers_are_faster_and_casts_take_their_bytes",
        "test_megatron_holds_18_bytes_for_a_parameter",
        "test_of_several_micro_batches_only_the_optimizer_steps_once",
        "test_runs_of_every_kind_are_built",
        "test_weights_that_stay_gathered_are_gathered_once",
        "test_what_fsdp2_reserves_beside_the_computation_is_counted_by_hand",
    ),
    "benchmarks/test_two_hosts.py": (
        "test_a_command_past_its_time_is_ended",
        "test_a_command_that_fails_gives_its_status_and_leaves_nothing",
        "test_a_signal_takes_the_hosts_and_every_process_in_them_down",
        "test_four_ranks_meet_over_a_link_of_the_rate_that_was_asked_for",
        "test_what_a_killed_run_left_is_taken_down_by_the_next",
    ),
    "benchmarks/test_zoo.py": (
        "test_a_member_passes_all_checks_and_has_its_rows_on_the_page",
        "test_another_number_on_a_rank_fails_its_cell",
    ),
    "capture/test_annotation.py": ("test_the_plan_keeps_to_it_and_it_takes_no_time",),
    "capture/test_flat.py": ("test_another_order_of_blocks_is_seen",),
    "capture/test_folded_heads.py": ("test_whatever_is_cut",),
    "capture/test_parts.py": ("test_attention_without_a_kernel",),
    "constraints/test_schemes.py": (
        "test_hybrid_sharding_scatters_inside_and_reduces_the_shard_outside",
        "test_keys_and_values_are_gathered_before_heads_are_repeated",
    ),
    "distributed/test_agreement.py": (
        "test_a_rank_that_does_not_come_is_named",
        "test_a_rank_that_ends_in_the_middle_is_named",
    ),
    "distributed/test_annotation.py": (
        "test_an_annotated_model_trains_like_one_process_and_nothing_runs_for_the_annotation",
    ),
    "distributed/test_batches.py": (
        "test_ranks_read_their_part_of_a_batch_and_a_loss_outside_is_that_of_one_process",
        "test_ranks_that_have_not_read_what_they_are_to_are_told_at_the_first_call",
    ),
    "distributed/test_compile.py": (
        "test_a_compiled_module_trains_as_one_process_in_one_graph_with_the_planned_collectives",
    ),
    "distributed/test_draws.py": ("test_gpt2_with_dropout_trains_as_in_one_process_under_any_plan",),
    "distributed/test_edited_plans.py": ("test_a_plan_edited_at_random_is_refused_or_right",),
    "distributed/test_fused.py": (
        "test_random_plans_with_parts_train_like_one_process",
        "test_whoever_reads_or_writes_a_parameter_cut_in_parts_has_the_models_own_values",
    ),
    "distributed/test_harness.py": (
        "test_one_rank_of_a_run_captures_and_nothing_is_left_for_the_next_run_unless_runs_share_it",
    ),
    "distributed/test_hybrid_mesh.py": (
        "test_a_plan_runs_on_the_order_of_ranks_of_a_hybrid_mesh",
        "test_where_their_ranks_do_not_rise_axis_by_axis_and_other_plans_are_refused",
    ),
    "distributed/test_initialisation.py": (
        "test_initialisation_gives_the_values_of_one_process_one_parameter_at_a_time",
    ),
    "distributed/test_micro_batches.py": (
        "test_a_step_that_is_given_up_and_evaluations_in_between_leave_no_trace",
        "test_steps_that_are_not_all_backwards_for_all_gradients_are_refused",
        "test_the_measured_peak_is_within_three_percent_of_the_predicted",
    ),
    "distributed/test_models.py": (
        "test_batch_norm_statistics_are_those_of_the_whole_batch",
        "test_model_on_the_meta_device",
    ),
    "distributed/test_module.py": (
        "test_a_step_leaves_nothing_behind_without_waiting_for_the_garbage_collector",
        "test_one_call_gives_every_rank_the_same_plan_and_the_values_of_the_first",
    ),
    "distributed/test_odd_sizes.py": ("test_loss_and_gradients_are_those_of_one_process",),
    "distributed/test_parity.py": (
        "test_activations_cut_along_the_sequence",
        "test_sums_of_gradients_that_set_out_early",
    ),
    "distributed/test_readme.py": (
        "test_several_plans_give_the_losses_of_one_process",
        "test_two_halves_give_the_loss_of_one_process",
    ),
    "distributed/test_recomputation.py": (
        "test_anything_may_be_computed_again_under_any_strategies",
        "test_checkpointed_layers_run_as_planned_and_train_as_one_process_does",
        "test_the_marks_of_the_model_count_unless_they_are_not_to",
    ),
    "distributed/test_redistribution.py": ("test_other_dtypes_and_reductions",),
    "distributed/test_several_plans.py": (
        "test_one_plan_serves_batches_of_other_sizes",
        "test_training_evaluation_and_a_last_batch_are_those_of_one_process",
    ),
    "distributed/test_state.py": ("test_buffers_and_inputs_without_elements_are_those_of_one_process",),
    "distributed/test_train_llama.py": (
        "test_a_rank_is_killed_and_torchrun_starts_again_then_all_are_and_fewer_go_on_under_another_plan",
        "test_with_dropout_and_in_bfloat16_a_run_that_was_cut_short_says_what_a_whole_one_says",
    ),
    "distributed/test_tutorial.py": ("test_every_command_of_the_tutorial_runs_and_prints_what_the_page_shows",),
    "distributed/test_vocabulary.py": (
        "test_each_rank_looks_up_the_rows_that_it_has",
        "test_table_head_and_loss_are_cut_along_the_vocabulary",
    ),
    "distributed/test_warm_start.py": ("test_the_second_start_captures_nothing_and_notices_what_the_first_does",),
    "fuzz/test_fuzz.py": ("test_a_planted_bug_is_found",),
    "lowering/test_asked_of_tensors.py": ("test_so_it_is_where_the_call_is_compiled",),
    "lowering/test_batch_inside.py": ("test_whatever_is_cut",),
    "lowering/test_dropless.py": ("test_columns_of_experts_are_cut_with_and_without_the_sequence_between_them",),
    "lowering/test_expert_loops.py": (
        "test_what_masks_add_that_is_of_no_experts_is_computed_of_all_rows",
        "test_whatever_is_cut",
    ),
    "lowering/test_heap.py": ("test_blocks_that_come_and_go_are_not_taken_from_the_kernel_again",),
    "lowering/test_left_attributes.py": (
        "test_a_deep_model_leaves_what_all_its_blocks_leave",
        "test_a_gradient_goes_back_through_what_was_left",
        "test_torch_compile_leaves_the_step_as_it_is",
    ),
    "lowering/test_local_values.py": ("test_graphs_say_of_every_value_what_torch_says_of_it",),
    "lowering/test_matrix_functions.py": (
        "test_functions_of_matrices_compute_what_one_process_computes",
        "test_heads_of_triangular_systems_are_cut",
    ),
    "lowering/test_representative.py": ("test_whatever_is_cut",),
    "lowering/test_rows_of_masks.py": ("test_in_half_precision_a_number_is_as_precise_as_pythons",),
    "lowering/test_seen_or_refused.py": ("test_such_loops_and_rows_without_more_are_captured",),
    "lowering/test_several_plans.py": (
        "test_a_plan_does_not_depend_on_how_its_example_lies_in_memory",
        "test_another_plan_holds_parameters_as_the_first_by_few_pins",
        "test_layers_that_evaluate_as_they_train_are_planned_operator_by_operator_for_both",
        "test_one_call_plans_for_evaluation_and_serves_other_sizes_too",
    ),
    "lowering/test_statistics.py": ("test_statistics_are_kept_in_float32_and_travel_as_planned",),
    "lowering/test_steps_first.py": (
        "test_dim_0_is_the_batch_where_layers_say_so_or_say_nothing",
        "test_layers_and_steps_are_cut_beside_them",
        "test_ranks_read_rows",
        "test_there_may_be_more_rows",
        "test_whatever_is_cut",
    ),
    "lowering/test_strided_windows.py": ("test_windows_are_what_they_are_in_one_process",),
    "lowering/test_taken_apart.py": ("test_a_random_plan_computes_what_one_process_computes",),
    "lowering/test_what_mixes_rows.py": (
        "test_determinants_of_matrices_that_lie_otherwise_in_memory",
        "test_lengths_of_weights_are_torchs_with_their_gradients",
        "test_spreads_are_torchs_with_their_gradients",
        "test_whatever_is_cut",
    ),
    "lowering/test_without_elements.py": ("test_whatever_their_layouts",),
    "lowering/test_written_out_attention.py": ("test_heads_are_cut_where_all_rows_meet_the_same_matrix",),
    "lowering/test_written_parameters.py": ("test_whatever_is_cut",),
    "measure/test_calibrate_command.py": (
        "test_a_job_that_ends_early_says_so_once_and_keeps_samples_and_profile",
        "test_a_rank_that_outlives_the_first_one_speaks_for_itself",
    ),
    "measure/test_output.py": ("test_a_disk_that_is_full_leaves_the_old_file",),
    "measure/test_runs.py": (
        "test_a_profile_of_another_mesh_cannot_be_checked",
        "test_a_rank_that_dies_is_an_error_on_all_others_and_the_samples_are_kept",
        "test_four_ranks_write_a_profile_that_prices_their_mesh",
        "test_links_that_are_a_thousand_times_slower_in_the_profile_do_not_fit",
        "test_of_a_kind_of_kernel_a_check_measures_all_because_one_curve_lies_between_them",
        "test_samples_of_another_mesh_stop_every_rank",
        "test_where_every_size_takes_too_long_the_smallest_of_each_is_measured",
    ),
    "mesh_search/test_search.py": (
        "test_of_several_batches_the_least_for_a_sample_wins",
        "test_the_winner_is_the_best_of_planning_on_every_shape",
    ),
    "ops/test_expert_cuts.py": ("test_a_graph_that_takes_no_product_apart_is_offered_no_parts",),
    "planning/test_against_experts.py": (
        "test_a_kept_plan_is_another_one_with_experts",
        "test_experts_are_held_to_the_constraints_of_the_plan",
        "test_experts_compute_again_what_they_must_where_memory_is_short",
        "test_the_expert_is_the_best_baseline_of_a_contest",
    ),
    "planning/test_allocator_margin.py": (
        "test_a_check_holds_the_plan_against_its_budget_with_the_margin_of_the_profile_now",
        "test_a_tightened_plan_is_good_under_its_own_margin",
        "test_the_smallest_budget_is_named_with_the_margin_and_works",
    ),
    "planning/test_blocking.py": ("test_the_operator_up_to_which_tensor_parallelism_has_no_plan_is_named",),
    "planning/test_budget.py": (
        "test_a_search_starts_from_a_baseline_whose_cuts_its_program_offers",
        "test_a_soft_limit_trades_time_for_bytes",
        "test_where_a_schedule_holds_too_much_one_that_holds_less_is_taken",
    ),
    "planning/test_chosen_again.py": (
        "test_it_is_the_best_of_all_sets_of_operators_on_one_rank",
        "test_it_prices_and_counts_as_the_program_in_which_the_same_is_decided",
        "test_operators_have_the_same_strategies_whatever_is_computed_again",
    ),
    "planning/test_comparison.py": ("test_the_json_of_a_contest_says_who_wins_and_where_they_differ",),
    "planning/test_context_in_parts.py": (
        "test_a_sequence_has_the_most_parts_that_ranks_can_share",
        "test_of_several_rows_a_rank_has_a_block_of_each",
        "test_parts_are_taken_where_they_are_faster",
        "test_results_are_tensors_in_parts_that_can_be_put_together",
        "test_the_optimum_may_cut_what_the_best_baseline_does_and_is_checked_as_such",
    ),
    "planning/test_layer_ties.py": ("test_a_plan_says_whether_identical_layers_were_decided_alike",),
    "planning/test_lone_matrices.py": (
        "test_a_contender_that_leaves_matrices_says_so",
        "test_a_matrix_without_another_to_go_with_is_left_to_the_solver_and_the_others_are_cut",
        "test_schemes_of_what_is_written_out_are_the_step_of_one_process",
    ),
    "planning/test_micro_batch_laws.py": (
        "test_the_cost_never_falls_as_the_budget_shrinks",
        "test_the_optimum_is_the_cheapest_of_all_layouts_of_a_parameter_its_copy_and_its_sum",
        "test_what_the_step_takes_follows_from_the_entries_of_the_plan",
    ),
    "planning/test_mixing.py": (
        "test_a_comparison_has_the_schemes_and_says_what_they_gather",
        "test_what_is_gathered_for_is_found_by_solving_where_no_input_alone_is_missing",
    ),
    "planning/test_moved.py": ("test_weights_that_are_let_go_are_gathered_anew",),
    "planning/test_optimizer_step.py": (
        "test_the_price_makes_compute_and_communication_slower_by_no_more_than_it_saves",
    ),
    "planning/test_overlap.py": (
        "test_a_file_whose_cost_is_not_that_of_its_schedule_is_refused",
        "test_at_full_contention_both_objectives_are_one_program",
        "test_the_plan_is_the_shorter_of_those_that_count_on_all_and_on_nothing_to_hide",
    ),
    "planning/test_precision_policy.py": (
        "test_casts_travel_in_the_buckets_of_their_parameters",
        "test_gathers_are_halved_and_gradients_are_reduced_in_their_dtype",
        "test_memory_is_what_a_rank_measures",
    ),
    "planning/test_schedule_prices.py": ("test_the_price_is_that_of_the_schedule_but_for_buckets_that_are_not_full",),
    "planning/test_tensor_networks.py": ("test_shared_steps_run_once_and_others_for_each_that_takes_them",),
    "planning/test_timeline.py": ("test_so_it_is_where_the_backward_computes_again",),
    "plans/test_expert_distance.py": ("test_parts_of_any_two_plans_of_a_mesh_add_up",),
    "plans/test_formats.py": (
        "test_what_format_1_could_say_is_read_as_it_was",
        "test_what_format_2_could_say_is_read_as_it_was",
        "test_what_format_3_could_say_is_read_as_it_was",
    ),
    "plans/test_imports.py": ("test_the_review_loop_runs_in_an_environment_that_has_only_what_it_needs",),
    "plans/test_report.py": (
        "test_any_two_plans_can_be_compared",
        "test_nothing_is_wider_than_the_window",
        "test_the_numbers_of_a_comparison_are_those_of_both_plans",
        "test_the_page_prints_and_is_a_picture",
    ),
    "plans/test_round_trip.py": (
        "test_the_order_of_entries_does_not_change_the_bytes",
        "test_the_pure_python_reader_reads_the_same",
    ),
    "plans/test_simulation.py": ("test_some_of_these_plans_hide_something",),
    "review/test_again.py": (
        "test_a_plan_that_computes_again_is_good_for_its_model",
        "test_what_a_plan_computes_again_stays_unless_it_is_to_be_kept",
    ),
    "review/test_check.py": (
        "test_a_budget_is_compared_with_the_peak",
        "test_a_plan_made_under_a_budget_is_good_under_it",
        "test_numbers_that_the_layouts_do_not_come_to_are_told",
    ),
    "review/test_replan.py": (
        "test_the_line_of_every_decision_is_found",
        "test_the_nearest_optimum_is_the_nearest_of_all",
    ),
    "solver/test_fixing.py": ("test_what_cannot_be_below_the_cutoff_is_cut_and_all_else_is_solved",),
    "solver/test_lean.py": ("test_peaks_fall_and_none_is_below_the_least_one",),
    "solver/test_networks.py": ("test_where_each_phase_has_one_consumer_a_network_costs_what_its_pairs_do",),
    "solver/test_reductions.py": ("test_the_chain_keeps_the_least_cost_and_lifts_to_it",),
    "solver/test_tree.py": ("test_what_a_relaxation_mixes_are_two_assignments_of_the_problem_as_given",),
    "strategies/test_enumerator.py": ("test_one_rank_warns_of_nothing",),
    "strategies/test_views.py": ("test_aligned_shards_in_parts_hold_the_same_elements_in_the_same_order",),
    "test_packaging.py": ("test_planning_without_its_solver_names_the_extra_before_the_model_is_captured",),
    "test_plan_cache.py": (
        "test_a_key_is_the_same_whatever_order_sets_have",
        "test_the_code_of_the_user_is_part_of_the_key",
    ),
}
"""Long tests of which no case is looked at, by file. Other tests look at what most of them do in another way."""

ONE_IN: dict[tuple[str, int], tuple[str, ...]] = {
    ("capture/test_capture.py", 12): ("test_parameters_and_buffers_stand_under_their_fqns_and_names_are_unique",),
    ("capture/test_contained.py", 2): (
        "test_what_is_read_out_of_a_container_becomes_a_buffer_that_checkpoints_leave_out",
    ),
    ("capture/test_effects.py", 2): ("test_a_write_in_place_that_shards_cannot_repeat_is_refused",),
    ("capture/test_effects.py", 3): (
        "test_a_buffer_that_cannot_be_replaced_is_refused",
        "test_a_buffer_that_is_replaced_is_a_mutation_whether_it_was_read_or_not",
        "test_a_change_of_python_state_is_refused_with_its_line",
        "test_why_the_first_call_cannot_be_made_in_advance_is_said",
    ),
    ("capture/test_failures.py", 2): ("test_what_is_not_supported_is_said_with_what_to_do",),
    ("capture/test_failures.py", 3): ("test_the_error_names_the_line_and_the_next_capture_works",),
    ("capture/test_flat.py", 4): ("test_a_model_that_asks_in_turn_for_other_things_than_constants_is_captured_whole",),
    ("capture/test_flat.py", 48): ("test_the_graph_is_that_of_a_whole_capture",),
    ("capture/test_folded_heads.py", 12): (
        "test_heads_are_cut",
        "test_products_by_an_equation_are_torchs_with_their_gradients",
    ),
    ("capture/test_graph_computes_the_model.py", 4): (
        "test_nodes_stand_in_execution_order_forward_before_backward_without_dead_ones",
        "test_recorded_shapes_and_dtypes_are_those_of_the_real_tensors",
    ),
    ("capture/test_graph_computes_the_model.py", 8): ("test_interpreting_the_nodes_gives_eager_results_and_gradients",),
    ("capture/test_kept_graph.py", 4): ("test_a_model_that_changed_is_captured",),
    ("capture/test_kept_graph.py", 12): ("test_a_kept_graph_is_that_of_a_capture_node_by_node",),
    ("capture/test_losses.py", 2): ("test_the_lines_of_a_loss_are_those_of_the_model",),
    ("capture/test_losses.py", 6): ("test_every_operator_on_rows_can_be_cut_by_rows",),
    ("capture/test_only_raises.py", 3): ("test_the_graph_is_that_without_the_condition",),
    ("capture/test_parts.py", 2): ("test_picking_from_rows_that_are_mapped",),
    ("capture/test_parts.py", 8): ("test_picking_from_rows",),
    ("capture/test_python_draws.py", 2): ("test_a_number_that_decides_nothing_is_not_drawn",),
    ("capture/test_recompute.py", 3): ("test_results_and_gradients_are_the_same_to_the_bit",),
    ("capture/test_silent.py", 3): ("test_what_a_forward_says_is_left_out_of_its_graph",),
    ("capture/test_softmax_parts.py", 2): ("test_dtypes_and_shapes_are_those_of_torch_whatever_is_held_at_a_time",),
    ("capture/test_sorted_rows.py", 3): ("test_experts_are_captured_in_the_tokens_own_order_however_they_are_written",),
    ("capture/test_sorted_rows.py", 4): ("test_a_sort_that_a_reader_depends_on_stays_as_it_was",),
    ("capture/test_static_shapes.py", 2): ("test_numbers_are_finite_for_who_asks_whether_all_are",),
    ("capture/test_static_shapes.py", 3): ("test_a_number_out_of_a_tensor_is_refused",),
    ("capture/test_static_shapes.py", 4): ("test_a_way_that_depends_on_numbers_is_refused",),
    ("capture/test_static_shapes.py", 6): ("test_a_shape_that_depends_on_numbers_is_refused",),
    ("cli/test_commands.py", 2): ("test_output_that_takes_no_more_is_no_difference_and_no_traceback",),
    ("cli/test_commands.py", 3): (
        "test_a_shell_completes_commands_options_and_names",
        "test_the_largest_buffer_of_a_calibration_is_a_size_as_any",
    ),
    ("cli/test_progress_of_commands.py", 6): ("test_a_command_says_what_it_does_and_what_is_known",),
    ("cli/test_review_commands.py", 2): ("test_a_mistake_is_one_line_and_exit_code_2",),
    ("constraints/test_file.py", 2): (
        "test_a_pin_to_what_nothing_leads_to_is_refused_with_what_the_operator_can_have",
    ),
    ("constraints/test_schemes.py", 3): ("test_under_ddp_gradients_alone_communicate_and_are_all_reduced_once",),
    ("constraints/test_schemes.py", 4): (
        "test_megatron_cuts_pairs_of_columns_and_rows",
        "test_under_fsdp_parameters_are_gathered_in_both_phases_and_gradients_scattered",
    ),
    ("constraints/test_schemes.py", 6): ("test_context_parallelism_cuts_the_sequence_and_gathers_keys_and_values",),
    ("constraints/test_schemes.py", 12): (
        "test_projections_that_ranks_cannot_share_are_left_whole_and_attention_is_cut_by_heads",
    ),
    ("constraints/test_tied_names.py", 2): ("test_a_constraint_by_another_name_is_one_by_the_first",),
    ("distributed/test_baselines.py", 4): ("test_a_baseline_moves_the_bytes_that_torch_moves",),
    ("distributed/test_baselines.py", 12): ("test_a_baseline_trains_like_one_process",),
    ("distributed/test_draws.py", 2): ("test_numbers_as_in_one_process_are_those_of_one_process",),
    ("distributed/test_failures.py", 24): ("test_the_others_say_which_rank_failed_and_why",),
    ("distributed/test_late_results.py", 24): ("test_the_loss_is_the_loss_whoever_reads_it_when",),
    ("distributed/test_models.py", 24): ("test_loss_outside_of_the_model",),
    ("distributed/test_parity.py", 2): (
        "test_plans_drawn_at_random",
        "test_sizes_that_the_axes_do_not_divide",
    ),
    ("distributed/test_parity.py", 4): (
        "test_inputs_over_dp_heads_and_columns_over_tp",
        "test_one_rank",
    ),
    ("distributed/test_precision.py", 2): (
        "test_a_policy_trains_as_casts_in_one_process_do_and_communicates_as_planned",
    ),
    ("distributed/test_redistribution.py", 12): (
        "test_every_pair_of_layouts_gives_what_the_layout_says_with_the_bytes_priced",
    ),
    ("lowering/test_as_one_process.py", 24): ("test_the_numbers_are_those_of_the_model_itself",),
    ("lowering/test_asked_of_tensors.py", 2): ("test_a_forward_is_not_told_that_it_is_compiled",),
    ("lowering/test_asked_of_tensors.py", 3): ("test_parameters_are_the_objects_that_they_are",),
    ("lowering/test_asked_of_tensors.py", 4): ("test_of_which_class_an_argument_is_is_looked_at_where_that_is_asked",),
    ("lowering/test_asked_of_tensors.py", 12): ("test_what_changes_is_noticed",),
    ("lowering/test_backward.py", 4): ("test_a_session_ends_as_with_the_model",),
    ("lowering/test_batch_inside.py", 3): ("test_the_batch_is_cut_and_nothing_is_sent_for_it",),
    ("lowering/test_batch_inside.py", 8): ("test_what_is_no_such_product_stays_as_it_is",),
    ("lowering/test_batch_norm.py", 2): ("test_channels_are_cut_between_two_convolutions",),
    ("lowering/test_batch_norm.py", 3): (
        "test_a_gradient_that_arrives_lies_otherwise_in_memory_than_the_images",
        "test_blocks_that_are_shorter_channels_beside_the_batch_and_parts_of_images",
    ),
    ("lowering/test_batch_norm.py", 6): ("test_by_statistics_that_are_kept_rows_are_not_mixed",),
    ("lowering/test_batch_norm.py", 12): ("test_the_batch_is_cut_and_only_numbers_for_channels_travel",),
    ("lowering/test_buffers.py", 16): ("test_buffers_are_what_they_are_in_one_process",),
    ("lowering/test_ctc.py", 2): ("test_losses_and_gradients_are_those_of_one_process",),
    ("lowering/test_cut_by_columns.py", 8): ("test_a_layer_is_cut_by_columns_and_is_as_before",),
    ("lowering/test_cut_by_columns.py", 16): ("test_a_weight_that_is_computed_is_cut_as_the_parameter_that_it_is_of",),
    ("lowering/test_dropless.py", 2): (
        "test_a_step_is_that_of_one_process_however_experts_are_cut",
        "test_experts_are_balanced_by_the_tokens_of_all_ranks",
        "test_products_in_groups_may_be_in_float32",
    ),
    ("lowering/test_dropless.py", 6): ("test_a_step_is_that_of_one_process_with_the_batch_and_the_experts_cut",),
    ("lowering/test_expert_loops.py", 12): ("test_experts_compute_their_own_tokens_alone",),
    ("lowering/test_expert_loops.py", 24): ("test_loops_that_do_something_else_are_refused",),
    ("lowering/test_filled.py", 2): ("test_where_nothing_is_gathered_ahead_a_bucket_is_made_as_it_sets_out",),
    ("lowering/test_filled.py", 4): ("test_a_product_that_is_reduced_with_others_is_written_where_they_travel",),
    ("lowering/test_filled.py", 24): ("test_gradients_hold_no_memory_but_their_own",),
    ("lowering/test_forward_alone.py", 2): ("test_without_a_backward_the_peak_does_not_grow_with_the_layers",),
    ("lowering/test_held.py", 3): ("test_a_tensor_that_is_not_what_the_plan_was_made_for_is_refused",),
    ("lowering/test_known_numbers.py", 12): ("test_a_forward_may_go_by_numbers_that_stand_in_it",),
    ("lowering/test_leaves_within.py", 3): ("test_a_tensor_whose_gradient_nobody_takes_may_ask_for_one",),
    ("lowering/test_left_attributes.py", 4): ("test_weights_that_hooks_compute_and_set",),
    ("lowering/test_left_attributes.py", 6): ("test_what_the_next_call_would_find_is_refused",),
    ("lowering/test_left_attributes.py", 12): (
        "test_what_is_left",
        "test_what_layers_keep_is_what_one_process_keeps",
    ),
    ("lowering/test_look_alikes.py", 2): ("test_a_shard_runs_the_plan_that_it_was_cut_for",),
    ("lowering/test_matrix_functions.py", 3): ("test_orthogonal_parametrizations_train",),
    ("lowering/test_matrix_functions.py", 4): ("test_of_a_matrix_that_has_none_the_result_is_nan",),
    ("lowering/test_numbers_as_indices.py", 4): ("test_whatever_is_cut",),
    ("lowering/test_numbers_as_indices.py", 16): ("test_what_is_picked_or_written_is_that_of_one_process",),
    ("lowering/test_order.py", 4): ("test_ranks_issue_and_wait_in_one_order",),
    ("lowering/test_packed.py", 2): (
        "test_data_parallel_training_gathers_nothing_but_gradients",
        "test_losses_and_gradients_are_those_of_one_process",
    ),
    ("lowering/test_picked_rows.py", 3): ("test_nothing_is_gathered",),
    ("lowering/test_put_back.py", 12): ("test_what_is_put_back_is_no_change",),
    ("lowering/test_quantized.py", 2): ("test_quantized_weights_and_activations_are_cut_along_every_dim",),
    ("lowering/test_representative.py", 12): (
        "test_a_step_that_decides_otherwise_says_so",
        "test_steps_that_decide_the_same_are_those_of_one_process",
    ),
    ("lowering/test_results.py", 12): ("test_results_and_gradients_are_those_of_the_model",),
    ("lowering/test_rows_of_masks.py", 2): ("test_rare_classes_are_computed_of_all_rows",),
    ("lowering/test_rows_of_masks.py", 6): ("test_what_reads_picked_rows_in_another_way_is_refused",),
    ("lowering/test_rows_of_masks.py", 12): ("test_whatever_is_cut",),
    ("lowering/test_rows_of_masks.py", 24): ("test_what_is_computed_of_picked_rows",),
    ("lowering/test_seen_or_refused.py", 24): ("test_it_is_refused_or_right",),
    ("lowering/test_shard_steps.py", 6): ("test_every_optimizer_does_to_shards_what_it_does_to_dtensors",),
    ("lowering/test_sketch.py", 12): ("test_a_sketch_has_the_nodes_of_the_graph_that_runs",),
    ("lowering/test_state.py", 4): ("test_parametrized_and_compiled_submodules_train_as_they_do",),
    ("lowering/test_steps_first.py", 12): ("test_rows_are_cut",),
    ("lowering/test_taken_apart.py", 4): ("test_the_batch_can_be_cut_with_nothing_sent_but_gradients",),
    ("lowering/test_unread.py", 2): ("test_what_reads_it_makes_it",),
    ("lowering/test_unread.py", 3): ("test_what_the_caller_can_change_is_read_in_the_forward",),
    ("lowering/test_upstream.py", 2): ("test_half_a_gradient_is_refused",),
    ("lowering/test_upstream.py", 3): ("test_a_whole_gradient_is_that_of_the_model",),
    ("lowering/test_users_model.py", 3): (
        "test_a_hook_of_any_kind_on_the_module_itself_fires",
        "test_a_parallel_module_is_the_model_it_was_made_from",
    ),
    ("lowering/test_vocabulary.py", 12): ("test_logits_stay_cut_and_only_numbers_for_rows_travel",),
    ("lowering/test_what_mixes_rows.py", 2): ("test_means_of_a_batch_that_is_cut_unevenly",),
    ("lowering/test_what_mixes_rows.py", 4): (
        "test_fewer_heads_of_keys_are_cut_with_those_of_the_queries_that_read_them",
    ),
    ("lowering/test_what_mixes_rows.py", 6): ("test_lengths_over_the_batch_are_torchs_with_their_gradients",),
    ("lowering/test_what_mixes_rows.py", 12): ("test_the_batch_is_cut",),
    ("lowering/test_without_elements.py", 6): ("test_models_with_them_have_the_schemes_of_others",),
    ("lowering/test_written_out_attention.py", 2): (
        "test_heads_are_cut_and_one_all_reduce_follows_each_attention",
        "test_products_with_two_dims_in_front_are_one_operator",
    ),
    ("lowering/test_written_out_attention.py", 4): ("test_rows_columns_and_sums_are_cut_unevenly_too",),
    ("lowering/test_written_parameters.py", 12): ("test_parameters_are_what_one_process_writes",),
    ("mesh_search/test_search.py", 3): ("test_a_mistake_leaves_every_file_as_it_was",),
    ("ops/test_expert_cuts.py", 4): (
        "test_the_columns_of_a_fused_projection_are_cut_in_the_parts_that_they_are_taken_apart_into",
    ),
    ("ops/test_memory_order.py", 12): (
        "test_what_works_element_by_element_makes_what_the_graph_says_however_its_tensors_lie",
    ),
    ("planning/test_budget.py", 2): (
        "test_plans_fit_their_budget_exactly_counted_and_cost_no_less_under_less",
        "test_where_only_an_expert_has_a_plan_that_fits_it_is_that_one_however_short_the_search",
    ),
    ("planning/test_comparison.py", 2): (
        "test_full_recomputation_is_every_layer_checkpointed",
        "test_the_optimum_costs_no_more_than_any_baseline",
    ),
    ("planning/test_context_in_parts.py", 2): ("test_rows_that_ranks_have_not_as_many_of_or_too_many_are_refused",),
    ("planning/test_formulation.py", 2): ("test_a_pin_is_respected",),
    ("planning/test_formulation.py", 3): (
        "test_copies_that_are_kept_never_cost_more_than_copies_made_again",
        "test_the_optimum_costs_no_more_than_full_replication",
    ),
    ("planning/test_formulation.py", 4): ("test_tying_identical_layers_costs_nothing",),
    ("planning/test_formulation.py", 8): ("test_highs_and_cbc_prove_the_same_cost",),
    ("planning/test_interpretation.py", 2): (
        "test_operators_that_are_priced_once_cost_what_each_of_them_costs",
        "test_the_cost_is_the_compute_and_the_redistributions_priced_again",
    ),
    ("planning/test_interpretation.py", 4): ("test_collectives_are_the_communicating_steps_with_their_bytes",),
    ("planning/test_interpretation.py", 8): (
        "test_a_redistribution_names_exactly_those_who_want_it",
        "test_every_layout_needed_has_one_redistribution_and_none_is_superfluous",
        "test_the_order_of_execution_is_that_of_the_graph_and_its_times_are_the_computation",
    ),
    ("planning/test_interruption.py", 8): ("test_ctrl_c_during_a_solve_ends_the_search",),
    ("planning/test_layer_ties.py", 12): (
        "test_a_layer_that_a_constraint_names_is_decided_for_itself_at_the_cost_of_free_layers",
    ),
    ("planning/test_lives.py", 4): (
        "test_the_program_never_counts_more_than_the_timeline_and_at_most_operators_the_same",
        "test_with_the_schedule_of_a_plan_the_program_counts_what_is_under_way",
    ),
    ("planning/test_lone_matrices.py", 3): ("test_of_matrices_that_could_be_left_the_smallest_is",),
    ("planning/test_micro_batch_laws.py", 2): ("test_the_optimum_is_concave_in_the_number_of_micro_batches",),
    ("planning/test_micro_batch_laws.py", 4): ("test_the_program_never_counts_more_than_the_timeline",),
    ("planning/test_mixing.py", 3): (
        "test_operators_are_named_with_their_lines_and_written_down",
        "test_what_keeps_rows_apart_is_not_gathered_for",
    ),
    ("planning/test_mixing.py", 4): ("test_what_mixes_a_sequence_is_gathered_for",),
    ("planning/test_mixing.py", 12): ("test_what_mixes_rows_is_gathered_for",),
    ("planning/test_moved.py", 3): ("test_what_people_do_is_an_answer_of_the_program_that_decides_everything",),
    ("planning/test_optimizer_step.py", 2): ("test_a_plan_counts_the_step_over_the_largest_shard_of_every_parameter",),
    ("planning/test_overlap.py", 2): ("test_what_an_activations_first_reader_waits_for_counts_whole",),
    ("planning/test_overlap.py", 12): ("test_no_schedule_takes_less_than_the_program_counts",),
    ("planning/test_schedule_prices.py", 3): ("test_by_itself_every_collective_has_its_own_price",),
    ("planning/test_tensor_networks.py", 2): ("test_pairs_of_layouts_never_cost_less",),
    ("planning/test_tensor_networks.py", 3): ("test_every_network_is_that_of_its_own_tensor_and_its_own_ends",),
    ("planning/test_timeline.py", 2): ("test_what_computing_again_saves_is_no_longer_held_at_the_turn",),
    ("planning/test_timeline.py", 4): ("test_the_course_in_the_file_does_not_grow_with_depth_and_keeps_its_peak",),
    ("planning/test_timeline.py", 6): ("test_the_predicted_peak_is_the_measured_one_on_every_rank",),
    ("planning/test_whole.py", 2): ("test_weights_that_are_computed_and_cut_as_no_parameter_are_said",),
    ("plans/test_bad_files.py", 2): (
        "test_a_broken_file_says_where_and_what",
        "test_a_file_cut_short_anywhere_is_refused",
    ),
    ("plans/test_imports.py", 3): ("test_reviewing_loads_neither_torch_nor_a_solver",),
    ("plans/test_parts.py", 2): ("test_a_plan_with_parts_is_read_as_it_is_written_and_says_what_they_are",),
    ("plans/test_report.py", 2): ("test_the_lanes_are_as_full_as_their_links_are_busy",),
    ("plans/test_report.py", 4): ("test_every_text_can_be_read",),
    ("plans/test_schedule.py", 6): ("test_real_plans_keep_the_laws",),
    ("plans/test_simulation.py", 5): ("test_a_lane_does_one_thing_at_a_time_and_operators_wait_for_what_they_read",),
    ("plans/test_simulation.py", 6): ("test_the_step_is_no_shorter_than_any_lane_and_no_longer_than_all_together",),
    ("plans/test_simulation.py", 12): ("test_without_buckets_one_thing_runs_at_a_time",),
    ("redistribution/test_steps.py", 2): ("test_transient_bytes_are_those_alive_while_the_steps_run",),
    ("redistribution/test_steps.py", 3): ("test_what_the_ranks_copy_is_what_copied_bytes_says",),
    ("redistribution/test_steps.py", 12): ("test_what_the_ranks_exchange_is_what_size_bytes_says",),
    ("redistribution/test_steps.py", 24): ("test_executing_every_path_gives_every_rank_its_slice_of_the_whole",),
    ("review/test_check.py", 4): ("test_a_plan_just_made_is_good_and_optimal",),
    ("review/test_explain.py", 6): ("test_the_answer_is_the_golden_text",),
    ("review/test_replan.py", 2): ("test_a_pin_that_was_added_is_kept",),
    ("review/test_replan.py", 3): ("test_an_edited_tensor_is_recognised_kept_and_planned_around",),
    ("solver/test_decomposition.py", 24): ("test_memory_from_one_byte_too_little_to_plenty",),
    ("solver/test_fixing.py", 2): ("test_fixing_finds_the_optimum_and_proves_it",),
    ("solver/test_interruption.py", 4): ("test_ctrl_c_gives_every_backends_best_answer_and_leaves_no_process",),
    ("solver/test_interruption.py", 8): ("test_ctrl_c_that_is_to_have_no_answer_is_raised_at_once",),
    ("solver/test_lives.py", 4): ("test_the_optimum_is_that_of_trying_everything",),
    ("solver/test_lives.py", 6): ("test_every_exact_backend_finds_it",),
    ("solver/test_networks.py", 6): ("test_every_exact_backend_finds_the_optimum_of_networks",),
    ("solver/test_reductions.py", 12): ("test_one_reduction_keeps_the_least_cost_and_lifts_to_it",),
    ("solver/test_solve.py", 3): ("test_backends_agree_with_trying_everything",),
    ("solver/test_tree.py", 3): ("test_a_bound_is_never_above_the_best_nor_an_answer_below_it",),
    ("strategies/test_enumerator.py", 4): (
        "test_no_tensor_that_enters_or_leaves_is_cut_unevenly_by_two_axes_or_partial",
    ),
    ("strategies/test_enumerator.py", 12): ("test_the_test_models_have_a_rule_for_every_operator",),
    ("strategies/test_enumerator.py", 16): ("test_partial_results_are_what_a_collective_can_combine",),
    ("strategies/test_guesses.py", 2): (
        "test_an_operator_that_writes_outside_of_shards_that_do_not_fit_leaves_the_process_alone",
    ),
    ("strategies/test_meaning.py", 6): ("test_what_is_offered_on_the_word_of_a_small_form_is_right_at_real_size",),
    ("strategies/test_operators.py", 4): ("test_every_strategy_of_an_operator_is_right",),
    ("strategies/test_operators.py", 8): ("test_every_strategy_of_an_operator_that_changes_a_length_is_right",),
    ("strategies/test_rules_are_right.py", 2): (
        "test_every_rule_is_verified_on_shrunken_sizes",
        "test_matrix_products_attention_and_embeddings_are_cut_over_rows_columns_and_contraction",
    ),
    ("strategies/test_rules_are_right.py", 6): ("test_no_strategy_leaves_a_rank_without_elements",),
    ("strategies/test_rules_are_right.py", 12): (
        "test_every_one_axis_strategy_gives_the_whole_result",
        "test_replication_is_always_among_the_strategies_and_none_comes_twice",
        "test_sampled_two_axis_strategies_give_the_whole_result",
    ),
    ("test_plan_cache.py", 6): ("test_another_question_is_answered_anew",),
}
"""Tests of which one case in so many is looked at, the first one always, by file and number."""


def check_names(folder: Path) -> None:
    """Raises an AssertionError where a test of :data:`ONE_IN` or :data:`LEFT_OUT` is not there."""
    for path, names in (*((path, names) for (path, _), names in ONE_IN.items()), *LEFT_OUT.items()):
        text = (folder / path).read_text()
        assert all(f"def {name}(" in text for name in names), (path, names)


def thinned(folder: Path, items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The items that :data:`ONE_IN` and :data:`LEFT_OUT` leave to ``make test-all``."""
    one_in = {(folder / path, name): n for (path, n), names in ONE_IN.items() for name in names}
    left_out = {(folder / path, name) for path, names in LEFT_OUT.items() for name in names}
    seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        key = item.path, getattr(item, "originalname", item.name)
        if key in left_out:
            yield item
        elif key in one_in and item.get_closest_marker("thorough") is None:
            if seen[key] % one_in[key]:
                yield item
            seen[key] += 1
