"""The resolved run under the names of Megatron's arguments. No torch here.

What train steps see as `args`, and `plugin.megatron_lm_default_args` after `prepare`. Of this
package the train steps read it, whose signatures are Accelerate's, and what resolves indexed
datasets, whose arguments have Megatron's names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate_megatron.config.megatron_names import (
    ARCHITECTURE,
    EXPERTS,
    GRADIENTS,
    PARALLELISM,
    PRECISION,
    RECOMPUTE,
    given_values,
    values_of,
)
from accelerate_megatron.config.plugin_fields import FIELDS
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.errors import ConfigurationError

NUM_SPLITS = 3
"""Train, validation and test."""


def megatron_view(run: RunConfig, plugin: Any, hf_config: Any) -> dict[str, Any]:
    """Return the run by Megatron's names; later sources win over earlier ones.

    Args:
        run: The resolved run.
        plugin: The plugin, whose fields are in it under their own names too.
        hf_config: The model's Hugging Face config.
    """
    view = {field.name: getattr(plugin, field.name) for field in FIELDS if field.kind != "object"}
    view |= _of_model_kind(hf_config, run)
    view |= _of_shape(run)
    view |= _of_layout(run)
    view |= _of_training(run, plugin)
    given = plugin.routed_arguments
    # The others stand in the run already, in the form in which they act.
    unseen = {name: value for name, value in given.given.items() if name not in view}
    return {**view, **unseen, **given.of("steps")}


def consumed_samples(plugin: Any) -> list[int]:
    """Return [train, valid, test] samples used before the run; those not given are 0."""
    given = list(plugin.consumed_samples or ())
    return given + [0] * (NUM_SPLITS - len(given))


def check_consumed_samples(consumed: Iterable[int], samples_per_step: int | None) -> None:
    """Refuse consumed samples of DataLoaders that are no whole number of their steps.

    Args:
        consumed: Samples that were used, by DataLoader.
        samples_per_step: What one step takes; None without any DataLoader.

    Raises:
        ConfigurationError: One is no multiple of it.
    """
    if samples_per_step is None:
        return
    for number in consumed:
        rest = number % samples_per_step
        if rest:
            raise ConfigurationError(
                f"consumed_samples has {number} for a DataLoader of which one step takes "
                f"{samples_per_step} samples (micro-batch x num_micro_batches x data-parallel "
                f"ranks); it must be a multiple: {number - rest} or "
                f"{number - rest + samples_per_step}."
            )


def _of_model_kind(hf_config: Any, run: RunConfig) -> dict[str, Any]:
    encoder = run.shape.encoder
    eos = getattr(hf_config, "eos_token_id", None)
    return {
        "model_type_name": getattr(hf_config, "model_type", None),
        "model_return_dict": getattr(hf_config, "return_dict", True),
        "eos_token_id": eos[0] if isinstance(eos, (list, tuple)) and eos else eos,
        "pad_token_id": getattr(hf_config, "pad_token_id", None),
        "bos_token_id": getattr(hf_config, "bos_token_id", None),
        "num_labels": getattr(hf_config, "num_labels", None),
        "pretraining_flag": encoder is None or encoder.has_vocabulary_head,
        "bert_binary_head": encoder is not None and encoder.head == "pretraining",
        "bert_head": None if encoder is None else encoder.head,
        "problem_type": None if encoder is None else encoder.problem_type,
    }


def _of_shape(run: RunConfig) -> dict[str, Any]:
    shape, experts = run.shape, run.shape.experts
    view = {
        **given_values(run),
        **values_of(ARCHITECTURE, run),
        **values_of(EXPERTS, run),
        "encoder_num_layers": shape.num_layers,
        "group_query_attention": shape.num_query_groups != shape.num_attention_heads,
        "attention_head_type": "multiquery" if shape.num_query_groups == 1 else "multihead",
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab_size,
        "orig_vocab_size": shape.vocab_size,
        "padded_vocab_size": run.padded_vocab_size,
        "swiglu": shape.gated_mlp and shape.activation == "silu",
        "openai_gelu": shape.activation == "gelu_tanh",
        "add_position_embedding": shape.position_embedding == "learned_absolute",
        "use_rotary_position_embeddings": shape.position_embedding == "rope",
        "rotary_base": shape.rope_parameters.get("rope_theta"),
        "rotary_percent": (shape.rotary_channels or shape.kv_channels) / shape.kv_channels,
        "untie_embeddings_and_output_weights": not shape.tied_embeddings,
        "num_experts": experts and experts.num_experts,
        "transformer_impl": "local",
        "use_cpu_initialization": False,
    }
    if experts is not None:
        view["moe_aux_loss_coeff"] = experts.balance_coefficient
        view["moe_router_topk_scaling_factor"] = experts.scaling_factor
    if shape.encoder_decoder is not None:
        view |= {
            "encoder_num_layers": shape.encoder_decoder.num_encoder_layers,
            "decoder_num_layers": shape.num_layers,
            "decoder_start_token_id": shape.encoder_decoder.decoder_start_token_id,
            "relative_attention_num_buckets": shape.encoder_decoder.position_buckets,
            "relative_attention_max_distance": shape.encoder_decoder.max_distance,
        }
    return view


def _of_layout(run: RunConfig) -> dict[str, Any]:
    return {
        **values_of(PARALLELISM, run),
        "world_size": run.layout.world_size,
        "data_parallel_size": run.layout.dp_size,
    }


def _of_training(run: RunConfig, plugin: Any) -> dict[str, Any]:
    consumed = consumed_samples(plugin)
    view = {
        "micro_batch_size": run.micro_batch_size,
        "num_micro_batches": run.num_micro_batches,
        "global_batch_size": run.global_batch_size,
        "seq_length": plugin.seq_length or run.shape.max_positions,
        **values_of(PRECISION, run),
        **values_of(GRADIENTS, run),
        **values_of(RECOMPUTE, run),
        "clip_grad": run.gradient_clipping,
        "consumed_train_samples": consumed[0],
        "consumed_valid_samples": consumed[1],
        "consumed_test_samples": consumed[2],
        "optimizer": None,
    }
    if run.optimizer is not None:
        first = run.optimizer.groups[0]
        view |= {"optimizer": run.optimizer.kind, "lr": first.lr}
        view |= {"weight_decay": first.weight_decay}
        betas = first.options.get("betas")
        if betas is not None:
            view |= {"adam_beta1": betas[0], "adam_beta2": betas[1]}
            view["adam_eps"] = first.options["eps"]
    if run.schedule is not None:
        in_updates = run.schedule.steps_per_update == 1
        unit = "iters" if in_updates else "samples"
        view |= {
            f"train_{unit}": run.schedule.total_steps,
            f"lr_decay_{unit}": run.schedule.decay_steps,
            f"lr_warmup_{unit}": run.schedule.warmup_steps,
            "lr_warmup_init": run.schedule.init_lr,
        }
    return view
