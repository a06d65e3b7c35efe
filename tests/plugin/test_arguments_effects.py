"""What arguments of `other_megatron_args` do in a run."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

from accelerate_megatron import Accelerator, MegatronLMPlugin, engine
from accelerate_megatron.errors import ConfigurationError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.training.start import TWO_LAYERS, TWO_LLAMA_LAYERS, start

SAMPLES = ragged_samples(8)
BATCH = pad_samples(SAMPLES)
MIXTRAL = TinyModel("mixtral", changes={"num_hidden_layers": 2})


def losses(arguments: dict[str, Any], recipe: TinyModel = TWO_LAYERS, **settings: Any) -> Any:
    """Return the losses of an evaluation and of two updates."""
    started = start(recipe, samples=SAMPLES, other_megatron_args=arguments, **settings)
    started.model.eval()
    values = [started.model(**BATCH).loss.item()]
    started.model.train()
    return values + [started.model(**BATCH).loss.item() for _ in range(2)]


def hf_loss(recipe: TinyModel, changed: dict[str, Any]) -> float:
    """Return the loss of `recipe`'s weights in a model whose config has `changed`."""
    model = recipe.build()
    config = type(model.config)(**{**model.config.to_dict(), **changed})
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = other(BATCH["input_ids"], attention_mask=BATCH["attention_mask"]).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), BATCH["labels"][:, 1:].flatten()
    ).item()


@pytest.mark.parametrize(
    ("recipe", "given", "config"),
    [
        (TWO_LAYERS, {"layernorm_epsilon": 0.1}, {"layer_norm_epsilon": 0.1}),
        (TWO_LAYERS, {"softmax_scale": 1.0}, {"scale_attn_weights": False}),
        (
            TinyModel("gpt2", changes={"n_layer": 2, "activation_function": "relu"}),
            {"openai_gelu": True},
            {"activation_function": "gelu_new"},
        ),
        (
            TWO_LLAMA_LAYERS,
            {"rotary_base": 50.0},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        ),
        (TWO_LLAMA_LAYERS, {"norm_epsilon": 0.1}, {"rms_norm_eps": 0.1}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_argument_wins_over_the_models_config(
    recipe: TinyModel, given: dict[str, Any], config: dict[str, Any]
) -> None:
    [[value, *_]] = run_ranks(losses, given, recipe, num_ranks=1)

    assert value == pytest.approx(hf_loss(recipe, config), abs=1e-5)
    assert abs(value - hf_loss(recipe, {})) > 1e-3


def losses_after_seeding(torch_seed: int, arguments: dict[str, Any]) -> Any:
    torch.manual_seed(torch_seed)
    return losses(arguments, hidden_dropout=0.3)[1:]


def test_seed_decides_the_models_random_numbers_instead_of_torchs() -> None:
    def run(torch_seed: int, arguments: dict[str, Any]) -> Any:
        return run_ranks(losses_after_seeding, torch_seed, arguments, num_ranks=1)[0]

    assert run(1, {"seed": 5}) == run(2, {"seed": 5})
    assert run(1, {"seed": 5}) != run(1, {"seed": 6})
    assert run(1, {}) != run(2, {})


def embedding_rows(arguments: dict[str, Any]) -> int:
    started = start(other_megatron_args=arguments)
    return next(
        shard.global_shape[0]
        for shard in engine.model_shards(started.model.session.chunks)
        if "word_embeddings" in shard.name
    )


def test_the_padded_vocabulary_is_a_multiple_of_what_is_asked_for() -> None:
    assert run_ranks(embedding_rows, {}, num_ranks=1) == [128]
    assert run_ranks(embedding_rows, {"make_vocab_size_divisible_by": 50}, num_ranks=1) == [100]


def initial_deviation(arguments: dict[str, Any]) -> float:
    plugin = MegatronLMPlugin(other_megatron_args=arguments)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    with accelerate.init_empty_weights():
        model = GPT2LMHeadModel(TWO_LAYERS.build().config)
    prepared = accelerator.prepare(model)
    weights = prepared.gather_state_dict()
    assert weights is not None
    return float(weights["transformer.h.0.mlp.c_fc.weight"].std())


def test_init_method_std_is_what_a_model_without_weights_starts_from() -> None:
    [deviation] = run_ranks(initial_deviation, {"init_method_std": 0.5}, num_ranks=1)

    assert deviation == pytest.approx(0.5, rel=0.1)


def two_replicas(arguments: dict[str, Any], **plugin: Any) -> Any:
    started = start(samples=SAMPLES, batch_size=2, other_megatron_args=arguments, **plugin)
    values = []
    for _ in range(2):
        for batch in started.loader:
            values.append(started.model(**batch).loss.item())
    buckets = sum(len(buffer.buckets) for buffer in started.model.session.chunks[0].buffers)
    return values, buckets, started.model.gather_state_dict()


def test_overlapping_in_small_buckets_changes_no_number() -> None:
    shared = {"use_distributed_optimizer": True, "num_micro_batches": 2}
    arguments = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}

    *_, (plain, one_bucket, weights) = _replicas({}, shared)
    *_, (overlapped, buckets, other_weights) = _replicas(arguments, shared)

    assert (one_bucket, buckets > 3) == (1, True)
    assert overlapped == pytest.approx(plain, abs=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(other_weights[name], value, rtol=1e-5, atol=1e-6)


def _replicas(arguments: dict[str, Any], plugin: dict[str, Any]) -> Any:
    return run_ranks(replicas_with, arguments, plugin, num_ranks=2)


def replicas_with(arguments: dict[str, Any], plugin: dict[str, Any]) -> Any:
    return two_replicas(arguments, **plugin)


def ddp_settings(arguments: dict[str, Any], precision: str, plugin: dict[str, Any]) -> Any:
    started = start(other_megatron_args=arguments, mixed_precision=precision, **plugin)
    chunk = started.model.session.chunks[0]
    scale = getattr(started.model.session.optimizer, "get_loss_scale", lambda: torch.ones(1))()
    # As values: reading Megatron's own class would import it here, outside of the engine's hook.
    return vars(chunk.ddp_config), chunk.buffers[0].grad_dtype, float(scale)


@pytest.mark.parametrize(
    ("given", "plugin", "field", "value"),
    [
        ({"grad_reduce_in_fp32": False}, {}, "grad_reduce_in_fp32", False),
        ({"check_for_nan_in_loss_and_grad": True}, {}, "check_for_nan_in_grad", True),
        (
            {"ddp_average_in_collective": True},
            {"calculate_per_token_loss": False},
            "average_in_collective",
            True,
        ),
        (
            {"ddp_pad_buckets_for_high_nccl_busbw": True},
            {"use_distributed_optimizer": True},
            "pad_buckets_for_high_nccl_busbw",
            True,
        ),
    ],
    ids=lambda value: next(iter(value), None) if isinstance(value, dict) else None,
)
def test_settings_of_the_gradient_reduction_arrive_in_megatrons_wrapper(
    given: dict[str, Any], plugin: dict[str, Any], field: str, value: bool
) -> None:
    [(config, grad_dtype, _)] = run_ranks(ddp_settings, given, "bf16", plugin, num_ranks=1)

    assert config[field] is value
    assert grad_dtype == (torch.bfloat16 if field == "grad_reduce_in_fp32" else torch.float32)


def test_the_loss_scale_of_fp16_starts_where_it_is_told_to() -> None:
    [(*_, scale)] = run_ranks(ddp_settings, {"initial_loss_scale": 4096.0}, "fp16", {}, num_ranks=1)

    assert scale == 4096.0


@pytest.mark.parametrize(
    ("num_ranks", "given", "plugin"),
    [
        (
            2,
            {"distribute_saved_activations": True},
            {"tp_degree": 2, "recompute_granularity": "full"},
        ),
        (1, {"recompute_modules": ["mlp"]}, {"recompute_granularity": "selective"}),
        (2, {"cp_comm_type": "a2a"}, {"context_parallel_size": 2}),
        (
            2,
            {"microbatch_group_size_per_vp_stage": 4},
            {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 4},
        ),
        (
            2,
            {"overlap_p2p_comm_warmup_flush": True},
            {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 4},
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_how_the_work_is_done_changes_no_loss(
    num_ranks: int, given: dict[str, Any], plugin: dict[str, Any]
) -> None:
    recipe = TinyModel("gpt2") if "pp_degree" in plugin else TWO_LAYERS
    *_, plain = run_ranks(losses_with, {}, recipe, plugin, num_ranks=num_ranks)
    *_, changed = run_ranks(losses_with, given, recipe, plugin, num_ranks=num_ranks)

    assert changed[0] == pytest.approx(plain[0], abs=1e-5)
    assert changed[0] == pytest.approx(hf_loss(recipe, {}), abs=1e-5)
    assert changed[1:] == pytest.approx(plain[1:], abs=1e-4)


def losses_with(given: dict[str, Any], recipe: TinyModel, plugin: dict[str, Any]) -> Any:
    return losses(given, recipe, **plugin)


def expert_run(arguments: dict[str, Any]) -> Any:
    started = start(MIXTRAL, samples=SAMPLES, other_megatron_args=arguments)
    values = [started.model(**BATCH).loss.item() for _ in range(2)]
    return started.model.session.chunks[0].config.moe_token_dispatcher_type, values


def test_experts_have_the_dispatcher_and_the_capacity_that_are_asked_for() -> None:
    [(default, plain)] = run_ranks(expert_run, {}, num_ranks=1)
    [(other, same)] = run_ranks(expert_run, {"moe_token_dispatcher_type": "allgather"}, num_ranks=1)
    [(_, dropped)] = run_ranks(expert_run, {"moe_expert_capacity_factor": 0.25}, num_ranks=1)

    assert (default, other) == ("alltoall", "allgather")
    assert same == pytest.approx(plain, abs=1e-5)
    assert abs(dropped[0] - plain[0]) > 1e-4


def prepared_with(arguments: dict[str, Any], **plugin: Any) -> None:
    start(other_megatron_args=arguments, **plugin)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_layers": 7}, "num_layers=7, but the run has num_layers=2"),
        ({"hidden_size": 8}, "hidden_size=8, but the run has hidden_size=64"),
        ({"micro_batch_size": 5}, "micro_batch_size=5, but the run has micro_batch_size=2"),
        ({"num_experts": 8}, "num_experts=8, but the run has num_experts=None"),
        ({"moe_router_topk": 2}, "moe_router_topk=2, but the run has moe_router_topk=None"),
        ({"transformer_impl": "transformer_engine"}, "the run has transformer_impl='local'"),
        ({"attention_head_type": "multiquery"}, "has 4 key/value heads"),
        ({"position_embedding_type": "alibi"}, "positions here are learned_absolute and rope"),
        ({"rotary_base": 5.0}, "effect only with a model with rotary positions"),
        ({"exp_avg_dtype": "bf16"}, "effect only with use_precision_aware_optimizer"),
    ],
)
def test_what_the_scripts_objects_decide_cannot_be_changed(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run_ranks(prepared_with, given, num_ranks=1)


def test_what_the_scripts_objects_decide_may_be_repeated() -> None:
    given = {"num_layers": 2, "micro_batch_size": 2, "swiglu": False, "normalization": "LayerNorm"}

    run_ranks(prepared_with, given, num_ranks=1)


def late_arguments() -> Any:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    plugin = accelerator.state.megatron_lm_plugin
    plugin.other_megatron_args = {"make_vocab_size_divisible_by": 50, "tokenizer_type": "Null"}
    model = TWO_LAYERS.build()
    loader = DataLoader(SAMPLES, batch_size=2, collate_fn=pad_samples)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    shown = plugin.megatron_lm_default_args
    return shown["padded_vocab_size"], shown["tokenizer_type"]


def test_arguments_may_be_set_on_the_plugin_until_prepare() -> None:
    assert run_ranks(late_arguments, num_ranks=1) == [(100, "Null")]
