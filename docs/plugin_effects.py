"""What each field of the plugin is seen to do in a run, and the test that sees it.

What docs/plugin.md has of them. A field that acts has an entry; tests/plugin/test_effects.py checks
that, and that the tests exist. A test is named FILE::FUNCTION, from the folder `tests`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effect:
    """What a field is seen to do.

    Attributes:
        seen: What one sees.
        test: The test that sees it.
        refused: When the field is refused, if it is not about values alone.
    """

    seen: str
    test: str
    refused: str = ""


_RECOMPUTE = "parity/test_recompute.py::test_the_saved_activations_fall"
_SCHEDULES = (
    "plugin/test_schedules.py::test_rate_and_weight_decay_of_every_update_are_those_of_the_tables"
)
_CONDITIONS = (
    "plugin/test_schedules.py::test_conditions_change_decay_and_rate_of_the_parameters_they_name"
)
_SHARED_SEQUENCE = "plugin/test_effects.py::test_ranks_that_share_a_sequence_keep_fewer_bytes"
_STACKS = "plugin/test_effects.py::test_each_stack_has_the_length_that_is_asked_for"
_EVALUATIONS = (
    "training/test_indexed.py::test_evaluations_have_the_steps_and_the_samples_that_are_asked_for"
)
_WITHOUT_DATASETS = "without a MegatronLMDummyDataLoader"
_LAYERS = "plugin/test_effects.py::test_each_stage_holds_the_layers_it_is_asked_to"
_DROPOUT = "training/test_dropout.py::test_the_plugins_dropouts_win_over_the_configs"
_EXPERTS = "plugin/test_effects.py::test_experts_and_their_rows_are_over_ranks"
_CUSTOM_MODEL = (
    "plugin/test_custom.py::test_a_model_provider_builds_the_stages_and_gets_the_weights"
)

EFFECTS: dict[str, Effect] = {
    "tp_degree": Effect(
        "each rank holds its part of heads, MLP and vocabulary",
        "plugin/test_effects.py::test_tensor_parallel_ranks_hold_their_part_of_the_weights",
    ),
    "pp_degree": Effect("each rank holds its layers", _LAYERS),
    "use_custom_fsdp": Effect(
        "bytes of parameters, gradients and optimizer fall with the ranks",
        "parity/test_sharded_state.py::test_fully_sharded_state_falls_with_the_ranks",
        refused="with pipelines, spread experts, tied embeddings, save_state",
    ),
    "overlap_cpu_optimizer_d2h_h2d": Effect(
        "equal losses on CUDA (never run yet)",
        "plugin/test_cuda.py::test_overlapped_copies_of_an_offloaded_optimizer_change_no_loss",
        refused="on the CPU; without optimizer_cpu_offload",
    ),
    "no_load_optim": Effect(
        "the weights are the checkpoint's, the optimizer is fresh",
        "checkpoint/test_bad_input.py::"
        "test_no_load_optim_takes_the_weights_and_starts_the_optimizer_anew",
    ),
    "no_save_optim": Effect(
        "a checkpoint of weights, which says so when it is loaded",
        "checkpoint/test_bad_input.py::test_weights_alone_do_not_pass_for_a_whole_state",
    ),
    "optimizer_cpu_offload": Effect(
        "the step and its moments are in host memory; equal losses and weights",
        "plugin/test_effects.py::test_an_offloaded_optimizer_steps_in_host_memory",
        refused="with torch.optim.Adam",
    ),
    "use_precision_aware_optimizer": Effect(
        "moments in the dtype asked for, on CUDA (never run yet)",
        "plugin/test_cuda.py::test_moments_have_the_dtype_that_is_asked_for",
        refused="without Transformer Engine's FusedAdam, so on the CPU",
    ),
    "decoder_last_pipeline_num_layers": Effect("layers of the last rank", _LAYERS),
    "recompute_granularity": Effect("bytes kept for the backward pass fall", _RECOMPUTE),
    "recompute_method": Effect("other bytes than with the other method", _RECOMPUTE),
    "recompute_num_layers": Effect("bytes fall, or rise, with the number", _RECOMPUTE),
    "attention_backend": Effect(
        "equal losses, and the scores are kept for the backward pass",
        "plugin/test_attention.py::"
        "test_unfused_attention_keeps_the_scores_and_gives_the_same_losses",
        refused="flash and fused, which are Transformer Engine's",
    ),
    "expert_model_parallel_size": Effect("each rank holds its experts", _EXPERTS),
    "context_parallel_size": Effect(
        "bytes kept for the backward pass fall; equal losses, norms and weights",
        _SHARED_SEQUENCE,
    ),
    "attention_dropout": Effect("other losses in training", _DROPOUT),
    "hidden_dropout": Effect("other losses in training", _DROPOUT),
    "attention_softmax_in_fp32": Effect(
        "False: bf16's rounding in the loss",
        "plugin/test_attention.py::test_a_softmax_in_bf16_rounds_and_one_in_fp32_does_not",
        refused="False with fused attention, or with mixed_precision no",
    ),
    "expert_tensor_parallel_size": Effect("each rank holds its rows of every expert", _EXPERTS),
    "calculate_per_token_loss": Effect(
        "False: the mean of the micro-batches' means",
        "training/test_losses.py::"
        "test_without_per_token_loss_it_is_the_mean_of_the_micro_batches_means",
    ),
    "use_rotary_position_embeddings": Effect(
        "True: a GPT-2 trains as one whose queries and keys are turned",
        "parity/test_forced_rotary.py::"
        "test_training_equals_a_gpt2_whose_queries_and_keys_are_turned",
        refused="True: T5, and then save_pretrained; False: rotary models",
    ),
    "num_micro_batches": Effect(
        "rows and forward passes of one update",
        "plugin/test_effects.py::test_an_update_takes_so_many_micro_batches",
    ),
    "gradient_clipping": Effect(
        "the norm of the update",
        "plugin/test_effects.py::test_gradients_are_scaled_to_the_norm_that_is_asked_for",
    ),
    "sequence_parallelism": Effect(
        "bytes kept for the backward pass fall",
        _SHARED_SEQUENCE,
        refused="with tp_degree 1",
    ),
    "recompute_activations": Effect(
        "bytes and numbers of selective recomputation",
        "plugin/test_effects.py::test_recompute_activations_is_selective_recomputation",
        refused="with recompute_granularity full",
    ),
    "use_distributed_optimizer": Effect(
        "bytes of the optimizer per rank",
        "parity/test_sharded_state.py::"
        "test_the_distributed_optimizer_holds_12_bytes_per_parameter_over_its_ranks",
    ),
    "num_layers_per_virtual_pipeline_stage": Effect("layers of each chunk", _LAYERS),
    "is_train_batch_min": Effect(
        "rows of a micro-batch",
        "plugin/test_effects.py::test_the_smallest_or_the_largest_batch_is_the_micro_batch",
    ),
    "train_iters": Effect("rate of each update", _SCHEDULES),
    "train_samples": Effect("rate of each update", _SCHEDULES),
    "weight_decay_incr_style": Effect("weight decay of each update", _SCHEDULES),
    "start_weight_decay": Effect("weight decay of each update", _SCHEDULES),
    "end_weight_decay": Effect("weight decay of each update", _SCHEDULES),
    "lr_decay_style": Effect("rate of each update", _SCHEDULES),
    "lr_decay_iters": Effect("rate of each update", _SCHEDULES),
    "lr_decay_samples": Effect("rate of each update", _SCHEDULES),
    "lr_warmup_iters": Effect("rate of each update", _SCHEDULES),
    "lr_warmup_samples": Effect("rate of each update", _SCHEDULES),
    "lr_warmup_fraction": Effect("rate of each update", _SCHEDULES),
    "min_lr": Effect("rate of each update", _SCHEDULES),
    "consumed_samples": Effect(
        "the batches that are left",
        "plugin/test_custom.py::test_consumed_samples_are_skipped_once",
    ),
    "no_wd_decay_cond": Effect("weights after updates", _CONDITIONS),
    "scale_lr_cond": Effect("weights after updates", _CONDITIONS),
    "lr_mult": Effect("weights after updates", _CONDITIONS),
    "seq_length": Effect(
        "length of the batches",
        "plugin/test_effects.py::test_batches_have_the_length_that_is_asked_for",
    ),
    "tensorboard_dir": Effect(
        "event files with every update",
        "plugin/test_tracking.py::test_event_files_have_every_update_from_the_rank_that_writes",
    ),
    "set_all_logging_options": Effect(
        "more numbers in them, or lines of the log",
        "plugin/test_tracking.py::test_all_logging_options_add_what_there_is",
    ),
    "custom_train_step_class": Effect(
        "the loss is the class's",
        "training/test_train_steps.py::test_a_step_class_is_built_in_either_documented_form",
    ),
    "custom_train_step_kwargs": Effect(
        "the class gets them",
        "plugin/test_custom.py::test_a_step_sees_the_resolved_run_under_megatrons_names",
    ),
    "custom_model_provider_function": Effect("its modules are trained", _CUSTOM_MODEL),
    "custom_prepare_model_function": Effect(
        "its chunks are trained",
        "plugin/test_custom.py::test_a_prepare_function_is_given_the_provider_and_wraps_the_chunks",
    ),
    "custom_get_batch_function": Effect(
        "the loss is that of its batches",
        "training/test_train_steps.py::test_a_batch_function_of_ones_own_may_make_the_labels",
    ),
    "custom_loss_function": Effect(
        "the loss is its own",
        "training/test_losses.py::"
        "test_a_loss_function_of_ones_own_gives_the_token_mean_however_the_batch_is_cut",
    ),
    "other_megatron_args": Effect(
        "losses, shapes and settings by argument",
        "plugin/test_arguments_effects.py::test_an_argument_wins_over_the_models_config",
    ),
    "pipeline_model_parallel_split_rank": Effect(
        "a T5's encoder and decoder are on stages of their own",
        "plugin/test_effects.py::"
        "test_an_encoder_and_a_decoder_are_on_the_stages_that_the_split_says",
        refused="without a decoder, and where it leaves a stack no stage",
    ),
    "encoder_seq_length": Effect("the encoder's tokens of a batch", _STACKS),
    "decoder_seq_length": Effect("the decoder's tokens of a batch", _STACKS),
    "return_logits": Effect(
        "outputs.logits, those of transformers",
        "training/test_logits.py::"
        "test_logits_are_those_of_transformers_on_every_rank_of_the_last_stage",
    ),
    "megatron_dataset_flag": Effect(
        "get_batch_func of a train step is told; MegatronLMDummyDataLoader sets it",
        "plugin/test_custom.py::test_a_step_of_ones_own_is_told_where_its_batches_come_from",
        refused=f"{_WITHOUT_DATASETS} and without custom_train_step_class",
    ),
    "eod_mask_loss": Effect(
        "the loss without those predictions",
        "plugin/test_end_tokens.py::test_the_first_of_several_end_tokens_ends_documents",
    ),
    "eval_iters": Effect("the batches of one evaluation", _EVALUATIONS, refused=_WITHOUT_DATASETS),
    "eval_interval": Effect(
        "how many samples the validation set is built with",
        _EVALUATIONS,
        refused=_WITHOUT_DATASETS,
    ),
    "custom_megatron_datasets_provider_function": Effect(
        "its datasets are read",
        "training/test_indexed.py::test_datasets_of_ones_own_are_used",
        refused=_WITHOUT_DATASETS,
    ),
}
"""By field."""
