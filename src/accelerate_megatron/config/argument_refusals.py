"""Megatron's arguments that are known and refused, by reason. No torch here."""

from __future__ import annotations

_BY_REASON: dict[str, str] = {
    "the torch optimizer given to prepare says it; set it there, by parameter group if need be": """
        lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum optimizer decoupled_lr
        decoupled_min_lr decoupled_weight_decay apply_wd_to_qk_layernorm
    """,
    "of Megatron's optimizers, those that torch.optim's AdamW, Adam and SGD stand for are run": """
        muon_momentum muon_split_qkv muon_use_nesterov muon_nesterov muon_scale_mode
        muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
        muon_coefficient_type muon_scalar_optimizer adaptive_muon_beta2 adaptive_muon_eps
        adaptive_muon_moment2_method lion_beta1 lion_beta2 soap_precondition_frequency
        soap_shampoo_beta soap_use_kl_shampoo use_layer_wise_distributed_optimizer
        optimizer_cuda_graph overlap_param_gather_with_optimizer_step grad_norm_skip_threshold
    """,
    "it belongs to Transformer Engine's layers, and the layers here are torch's": """
        transformer_engine te_rng_tracker use_te_rng_tracker inference_rng_tracker fp8 fp8_format
        fp8_recipe fp8_param fp8_param_gather fp8_quantizer_factory fp8_margin fp8_interval
        fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention
        fp8_multi_head_attention fp8_output_proj tp_only_amax_red first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 keep_fp8_transpose_cache
        reuse_grad_buf_for_mxfp8_param_ag fp4 fp4_format fp4_recipe fp4_param fp4_param_gather
        fp4_quantizer_factory use_kitchen use_kitchen_attention kitchen_attention_backend
        quant_recipe activation_func_fp8_input_store use_te_activation_func tp_comm_overlap
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs
        tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
        tp_comm_bootstrap_backend cpu_offloading cpu_offloading_num_layers
        _cpu_offloading_context cpu_offloading_activations cpu_offloading_weights
        cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers
        fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
        fine_grained_offloading_max_inflight_offloads activation_offload_fraction
        delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks delay_wgrad_compute
        disable_parameter_transpose_cache use_transformer_engine_op_fuser flash_attention_version
        moe_permute_fusion moe_router_fusion moe_router_padding_for_quantization
        moe_router_padding_for_fp8 moe_use_legacy_grouped_gemm moe_permute_fusion_into_hybridep
        use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert moe_single_grouped_bias
        moe_single_grouped_weight fused_residual_rmsnorm moe_mlp_glu_interleave_size
        moe_shared_expert_glu_interleave_size
    """,
    "it needs a fused kernel of Apex, Transformer Engine or a compiler, none of which is used": """
        masked_softmax_fusion bias_activation_fusion bias_gelu_fusion bias_swiglu_fusion
        bias_dropout_fusion rope_fusion apply_rope_fusion gradient_accumulation_fusion
        persist_layer_norm memory_efficient_layer_norm cross_entropy_loss_fusion
        cross_entropy_fusion_impl use_fused_weighted_squared_relu fused_single_qkv_rope
        async_tensor_model_parallel_allreduce use_flash_attn wgrad_deferral_limit
        defer_embedding_wgrad_compute jit_fuser
    """,
    "CUDA graphs are not used": """
        enable_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
        cuda_graph_warmup_steps external_cuda_graph cuda_graph_impl cuda_graph_scope
        cuda_graph_modules inference_cuda_graph_scope moe_pad_experts_for_cuda_graph_inference
        moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
    """,
    "the package decides it, from mixed_precision, the layout and the device": """
        params_dtype pipeline_dtype enable_autocast autocast_dtype perform_initialization
        init_model_with_meta_device timers finalize_model_grads_func grad_scale_func no_sync_func
        grad_sync_func param_sync_func overlap_p2p_comm batch_p2p_comm batch_p2p_sync
        use_ring_exchange_p2p deallocate_pipeline_outputs variable_seq_lengths
        clone_scatter_output_in_embedding barrier_with_L1_time config_logger_dir init_method
        output_layer_init_method embedding_init_method pipeline_model_parallel_comm_backend
        virtual_pipeline_model_parallel_size test_mode deterministic_mode batch_invariant_mode
        moe_router_dtype num_microbatches_with_partial_activation_checkpoints distributed_backend
        distributed_timeout_minutes local_rank rank align_grad_reduce gradient_reduce_div_fusion
        disable_bf16_reduced_precision_matmul symmetric_ar_type moe_layer_freq
        nccl_all_reduce_for_prefill moe_grad_scale_func mtp_grad_scale_func moe_per_layer_logging
        experimental_attention_variant_loss_scale_func num_buckets
    """,
    "the model's Hugging Face config decides the architecture; change the model": """
        softmax_type fp32_residual_connection apply_residual_connection_post_layernorm
        layernorm_zero_centered_gamma apply_layernorm_1p gated_linear_unit activation_func
        squared_relu quick_geglu glu_linear_offset activation_func_clamp_value num_moe_experts
        rotary_interleaved rotary_scaling_factor rotary_seq_len_interpolation_factor
        use_rope_scaling rope_scaling_factor rope_type window_size window_attn_skip_freq
        qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit
        attention_output_gate multi_latent_attention no_rope_freq experimental_attention_variant
        linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
        linear_num_key_heads linear_num_value_heads apply_query_key_layer_scaling
        embedding_init_method_std mrope_section is_hybrid_model heterogeneous_block_specs
        heterogeneous_layers_config_path hetereogenous_dist_checkpoint mlp_chunks_for_prefill
        mlp_chunks_for_training moe_shared_expert_intermediate_size moe_shared_expert_gate
        moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
        moe_router_topk_limited_devices moe_router_score_function moe_router_enable_expert_bias
        moe_apply_probs_on_input moe_latent_size
    """,
    "no model family with it is supported": """
        mtp_num_layers mtp_loss_scaling_factor mtp_standalone mtp_detach_heads
        mtp_hybrid_override_pattern mtp_use_repeated_layer dsa_indexer_n_heads
        dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved
        dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset
        dsa_indexer_topk_freq dsa_kernel_backend mamba_state_dim mamba_head_dim mamba_num_groups
        mamba_num_heads use_mamba_mem_eff_path mamba_training_ssm_states_dtype use_mup
        mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult
        mup_output_mult mup_width_mult
    """,
    "expert parallelism here has the dispatchers alltoall and allgather, and losses of its own": """
        moe_extended_tp moe_shared_expert_overlap
        moe_enable_routing_replay moe_router_force_load_balancing moe_router_force_biased
        moe_router_quantile_balancing_ema moe_input_jitter_eps moe_token_dropping
        moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
        moe_layer_recompute moe_deepep_num_sms moe_hybridep_num_sms
        moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_pad_uneven_dispatch_inputs
        moe_ncclep_static_shape moe_ncclep_zero_copy moe_expert_rank_capacity_factor
        overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release
        high_priority_a2a_comm_stream overlap_dispatch_backward_with_experts_wgrad
        expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
        gtp_weight_remat_size tensor_parallel_num_weight_shards
    """,
    "stages hold equally many layers; decoder_last_pipeline_num_layers sets those of the last": """
        num_layers_in_first_pipeline_stage pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        decoder_first_pipeline_num_layers num_virtual_stages_per_pipeline_rank
    """,
    "sequences are split evenly over the context-parallel ranks": """
        hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel
    """,
    "each replica shards over all of its data-parallel ranks; use_custom_fsdp is PyTorch's": """
        num_distributed_optimizer_instances use_megatron_fsdp data_parallel_sharding_strategy
        outer_dp_sharding_strategy suggested_communication_unit_size preserve_fp32_weights nccl_ub
        fsdp_double_buffer disable_symmetric_registration fsdp_manual_registration
        reduce_scatter_with_fp32_accumulation fsdp_all_gather_in_start_param_sync
        fsdp_db_use_persist_buf_on_alloc_fail megatron_fsdp_cuda_graph_mode
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_grad_comm_dtype
        megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype
        megatron_fsdp_max_pool_double_buffer megatron_fsdp_use_decoupled_grad
        param_name_patterns_for_fp32_local_accumulation use_torch_fsdp2 DDP_impl
        delay_grad_reduce delay_param_gather
    """,
    "generation takes its settings from model.megatron_generate": """
        flash_decode inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication inference_disable_triton_nvls_kernels
        inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type
    """,
    "data arguments belong to MegatronLMDummyDataLoader": """
        data_path train_data_path valid_data_path test_data_path split splits_string
        data_impl num_workers reset_position_ids reset_attention_mask mock_data data_cache_path
        mmap_bin_files dataloader_type data_sharding
    """,
    "accelerator.save_state and load_state write and read checkpoints": """
        save load save_interval ckpt_format finetune no_save_rng no_load_rng
        auto_detect_ckpt_format dist_ckpt_format use_dist_ckpt use_checkpoint_args
        override_opt_param_scheduler use_checkpoint_opt_param_scheduler
    """,
    "trackers are Accelerator's log_with": """
        wandb_project wandb_exp_name wandb_save_dir tensorboard_queue_size log_progress
        log_energy one_logger_project
    """,
    "the training loop is the script's": """
        exit_interval exit_duration_in_mins exit_signal_handler skip_train test_iters
        rampup_batch_size manual_gc manual_gc_interval manual_gc_eval profile iterations_to_skip
        rerun_mode
    """,
}

REFUSED: dict[str, str] = {
    name: reason for reason, names in _BY_REASON.items() for name in names.split()
}
"""Argument -> why it is refused."""
