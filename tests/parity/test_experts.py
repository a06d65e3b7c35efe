"""Models with experts give what transformers gives, on every layout; balancing losses too."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from accelerate_megatron import GPTTrainStep
from accelerate_megatron.errors import ConfigurationError, EngineError
from tests.helpers.oracle import oracle_run
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel
from tests.parity.exports import save
from tests.parity.folders import prepare_empty
from tests.parity.test_families import check as check_family
from tests.parity.test_parity import (
    ADAMW,
    SAMPLES,
    SCHEDULE,
    SGD,
    check_losses_and_norms,
    check_weights,
    expected,
    oracle_case,
)
from tests.parity.training import LayoutCase, train

SLOW = pytest.mark.slow
TP2 = {"tp_degree": 2, "sequence_parallelism": True}
EP2 = {"expert_model_parallel_size": 2}
ETP2 = {"expert_tensor_parallel_size": 2}
PP2 = {"pp_degree": 2}
DIST_OPT = {"use_distributed_optimizer": True}

LAYOUTS = [
    pytest.param(LayoutCase(1), id="1"),
    pytest.param(LayoutCase(2, EP2), id="ep2"),
    # The experts of both tensor-parallel ranks are replicas of each other.
    pytest.param(LayoutCase(2, TP2), id="tp2-sp"),
    pytest.param(LayoutCase(2, {**TP2, **ETP2}), id="tp2-sp-etp2", marks=SLOW),
    pytest.param(LayoutCase(2, {**TP2, **EP2}), id="tp2-sp-ep2", marks=SLOW),
    pytest.param(LayoutCase(2, PP2, 4), id="pp2", marks=SLOW),
    pytest.param(LayoutCase(2, DIST_OPT), id="dp2-dist-opt", marks=SLOW),
    pytest.param(LayoutCase(4, {**TP2, **EP2}), id="tp2-sp-dp2-ep2", marks=SLOW),
    pytest.param(LayoutCase(4, {**TP2, **EP2, **ETP2}), id="tp2-sp-dp2-ep2-etp2"),
    pytest.param(LayoutCase(4, {**EP2, **PP2}), id="ep2-pp2"),
    pytest.param(LayoutCase(4, {**EP2, **DIST_OPT}), id="dp4-ep2-dist-opt", marks=SLOW),
]
MORE_LAYOUTS = [
    pytest.param(LayoutCase(4, {"expert_model_parallel_size": 4}), id="ep4"),
    pytest.param(LayoutCase(4, {**TP2, "expert_model_parallel_size": 4}), id="tp2-sp-dp2-ep4"),
    pytest.param(
        LayoutCase(2, {**PP2, "num_layers_per_virtual_pipeline_stage": 1}, 4), id="pp2-vp2"
    ),
    pytest.param(LayoutCase(8, {**TP2, **PP2, **EP2}), id="tp2-sp-pp2-dp2-ep2"),
]


def recipe(family: str, *, tied: bool = False, **changes: Any) -> TinyModel:
    return TinyModel(family, tied=tied, changes=changes)


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
MIXTRAL = recipe("mixtral")


def check_training(layout: LayoutCase, model: TinyModel, **plugin: Any) -> None:
    for optimizer in (ADAMW, SGD):
        ranks = run_ranks(
            partial(train, **plugin),
            layout,
            model,
            optimizer,
            SAMPLES,
            SCHEDULE,
            num_ranks=layout.num_ranks,
        )
        oracle = expected(model, optimizer)
        check_losses_and_norms(ranks, oracle)
        check_weights(ranks[-1].weights, oracle)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_with_experts_equals_plain_pytorch(layout: LayoutCase) -> None:
    check_training(layout, MIXTRAL)


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_training_with_experts_equals_plain_pytorch_on_more_layouts(layout: LayoutCase) -> None:
    check_training(layout, MIXTRAL)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LayoutCase(1, num_micro_batches=1), id="1-one-micro-batch", marks=SLOW),
        pytest.param(LayoutCase(1, num_micro_batches=4), id="1-four-micro-batches"),
        pytest.param(LayoutCase(4, {**TP2, **EP2}), id="tp2-sp-dp2-ep2"),
        pytest.param(LayoutCase(4, {**TP2, **PP2}), id="tp2-sp-pp2", marks=SLOW),
        pytest.param(LayoutCase(2, {"context_parallel_size": 2}), id="cp2"),
        pytest.param(
            LayoutCase(2, {**PP2, "recompute_granularity": "full"}), id="pp2-full", marks=SLOW
        ),
    ],
)
def test_the_load_balancing_loss_is_hugging_faces_on_the_global_batch(layout: LayoutCase) -> None:
    check_training(layout, recipe("mixtral", **BALANCED))


class _StepThatReadsTooLate(GPTTrainStep):
    """Runs the model on the batch of the call before."""

    def get_forward_step_func(self):  # type: ignore[no-untyped-def]
        def forward_step(data_iterator, model):  # type: ignore[no-untyped-def]
            tokens = torch.zeros(2, 8, dtype=torch.long)
            output = model(tokens, torch.arange(8).expand(2, -1), None, labels=tokens)
            return output, partial(self.loss_func, torch.ones(2, 8))

        return forward_step


def test_a_step_that_reads_no_micro_batch_is_told_so() -> None:
    with pytest.raises(EngineError, match=r"took no micro-batch from its data iterator"):
        run_ranks(
            partial(train, custom_train_step_class=_StepThatReadsTooLate),
            LayoutCase(1),
            recipe("mixtral", **BALANCED),
            SGD,
            SAMPLES,
            num_ranks=1,
        )


def test_the_load_balancing_loss_is_hugging_faces_with_a_loss_of_micro_batches() -> None:
    model = recipe("mixtral", **BALANCED)
    one, two = (
        run_ranks(
            partial(train, calculate_per_token_loss=False),
            LayoutCase(num_ranks, plugin, 2 // num_ranks),
            model,
            SGD,
            SAMPLES[:16],
            SCHEDULE,
            num_ranks=num_ranks,
        )[0]
        for num_ranks, plugin in ((1, {}), (2, EP2))
    )

    assert one.losses == pytest.approx(two.losses, abs=1e-5)
    assert one.grad_norms == pytest.approx(two.grad_norms, rel=1e-5)


@pytest.mark.parametrize(
    ("losses", "arguments"),
    [
        pytest.param({"z_loss": 0.1}, {"moe_z_loss_coeff": 0.1}, id="z-loss"),
        pytest.param(
            {"sequence_loss": 1.0},
            {"moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "seq_aux_loss"},
            id="sequence-loss",
        ),
    ],
)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LayoutCase(1), id="1", marks=SLOW),
        pytest.param(LayoutCase(4, {**TP2, **EP2}, 1), id="tp2-sp-dp2-ep2-one-micro-batch"),
        pytest.param(LayoutCase(2, {"context_parallel_size": 2}), id="cp2"),
        pytest.param(LayoutCase(2, PP2, 4), id="pp2-four-micro-batches", marks=SLOW),
    ],
)
def test_router_losses_do_not_depend_on_how_the_batch_is_cut(
    layout: LayoutCase, losses: dict[str, float], arguments: dict[str, Any]
) -> None:
    model = recipe("mixtral", output_router_logits=True, router_aux_loss_coef=0.0)
    ranks = run_ranks(
        partial(train, other_megatron_args=arguments),
        layout,
        model,
        SGD,
        SAMPLES,
        SCHEDULE,
        num_ranks=layout.num_ranks,
    )

    oracle = oracle_run(replace(oracle_case(model, SGD), **losses))
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)
    without = expected(model, SGD)
    assert abs(oracle.grad_norms[0] / without.grad_norms[0] - 1) > 1e-2


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.8,
    "mscale_all_dim": 1.2,
}
FAMILIES = [
    pytest.param(recipe("deepseek_v3", rope_parameters=YARN), id="deepseek-v3"),
    pytest.param(
        recipe("deepseek_v3", q_lora_rank=None, rope_interleave=False, v_head_dim=24, tied=True),
        id="deepseek-v3-no-query-latent",
        marks=SLOW,
    ),
    pytest.param(MIXTRAL, id="mixtral"),
    pytest.param(
        recipe("mixtral", tied=True, head_dim=24, sliding_window=5), id="mixtral-window", marks=SLOW
    ),
    pytest.param(recipe("qwen3_moe"), id="qwen3-moe"),
    pytest.param(
        recipe("qwen3_moe", mlp_only_layers=[1], norm_topk_prob=False, attention_bias=True),
        id="qwen3-moe-dense-layer-unnormalised",
        marks=SLOW,
    ),
    pytest.param(recipe("glm4_moe"), id="glm4-moe"),
    pytest.param(
        recipe("glm4_moe", n_group=1, topk_group=1, first_k_dense_replace=2, use_qk_norm=False),
        id="glm4-moe-one-group-two-dense-layers",
        marks=SLOW,
    ),
    pytest.param(recipe("qwen2_moe", vocab_size=101), id="qwen2-moe"),
    pytest.param(
        recipe("qwen2_moe", decoder_sparse_step=2, tied=True), id="qwen2-moe-step-2", marks=SLOW
    ),
]
OTHER_VOCABULARY = [
    pytest.param(recipe(family, vocab_size=101), id=f"{family}-vocab-101")
    for family in ("mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3")
]
FAMILY_LAYOUTS = [
    pytest.param(1, {}, id="1", marks=SLOW),
    pytest.param(4, {**TP2, **EP2}, id="tp2-sp-dp2-ep2"),
    pytest.param(4, {**EP2, **PP2}, id="ep2-pp2", marks=SLOW),
]
MORE_FAMILY_LAYOUTS = [
    pytest.param(4, {**TP2, **PP2, **EP2}, id="tp2-sp-pp2-ep2"),
    # As many key/value heads as ranks, or two ranks share each.
    pytest.param(4, {**TP2, "tp_degree": 4, **EP2}, id="tp4-sp-ep2"),
    pytest.param(8, {**TP2, "tp_degree": 4, **PP2, **EP2}, id="tp4-sp-pp2-ep2"),
]


@pytest.mark.parametrize(("num_ranks", "plugin"), FAMILY_LAYOUTS)
@pytest.mark.parametrize("model", FAMILIES)
def test_every_family_with_experts_equals_transformers(
    model: TinyModel, num_ranks: int, plugin: dict[str, Any]
) -> None:
    check_family(model, num_ranks, plugin)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "plugin"), MORE_FAMILY_LAYOUTS)
@pytest.mark.parametrize("model", [*FAMILIES, *OTHER_VOCABULARY])
def test_every_family_with_experts_equals_transformers_on_more_layouts(
    model: TinyModel, num_ranks: int, plugin: dict[str, Any]
) -> None:
    check_family(model, num_ranks, plugin)


def original(model: TinyModel, dtype: torch.dtype, folder: Path) -> None:
    """Save a model as transformers does when it was loaded in `dtype`."""
    hf_model = model.build()
    in_fp32 = type(hf_model)._keep_in_fp32_modules_strict or []
    for name, parameter in hf_model.named_parameters():
        parameter.data = parameter.data.to(dtype)
        if any(kept in name for kept in in_fp32):
            parameter.data = parameter.data.float()
    hf_model.config.dtype = dtype
    hf_model.save_pretrained(folder)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("dtype", "plugin", "num_ranks"),
    [
        pytest.param("no", {**TP2, **EP2}, 4, id="fp32-tp2-dp2-ep2", marks=SLOW),
        pytest.param("bf16", {**EP2, **PP2}, 4, id="bf16-ep2-pp2"),
    ],
)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(MIXTRAL, id="mixtral"),
        pytest.param(recipe("qwen3_moe", mlp_only_layers=[2]), id="qwen3-moe", marks=SLOW),
        pytest.param(recipe("deepseek_v3"), id="deepseek-v3"),
        pytest.param(recipe("glm4_moe"), id="glm4-moe", marks=SLOW),
        pytest.param(recipe("qwen2_moe"), id="qwen2-moe", marks=SLOW),
    ],
)
def test_a_round_trip_is_bit_identical_and_transformers_loads_it(
    model: TinyModel, dtype: str, plugin: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    torch_dtype = {"no": torch.float32, "bf16": torch.bfloat16}[dtype]
    original(model, torch_dtype, tmp_path / "before")

    run_ranks(
        partial(save, dtype=dtype, max_shard_size="100KB"),
        model,
        plugin,
        str(tmp_path / "after"),
        num_ranks=num_ranks,
    )

    before, after = load_all(tmp_path / "before"), load_all(tmp_path / "after")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype, name
        assert torch.equal(value, after[name]), name
    configs = [
        json.loads((tmp_path / at / "config.json").read_text()) for at in ("before", "after")
    ]
    assert configs[0] == configs[1]
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "after", output_loading_info=True)
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys"))


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_an_empty_model_reads_its_experts_from_the_folder(family: str, tmp_path: Path) -> None:
    model = recipe(family)
    hf_model = model.build()
    hf_model.save_pretrained(tmp_path, max_shard_size="100KB")

    *_, (_, state) = run_ranks(
        prepare_empty, str(tmp_path), {**TP2, **EP2}, str(tmp_path), num_ranks=4
    )

    wanted = hf_model.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], value) for name, value in wanted.items())


def test_the_correction_bias_stays_as_it_was_loaded() -> None:
    model = recipe("glm4_moe")
    layout = LayoutCase(2, EP2)

    *_, last = run_ranks(train, layout, model, SGD, SAMPLES, SCHEDULE, num_ranks=2)

    biases = {
        name: value
        for name, value in model.build().state_dict().items()
        if name.endswith("e_score_correction_bias")
    }
    assert len(biases) == 3
    assert last.weights is not None
    for name, value in biases.items():
        assert value.abs().max() > 0
        assert torch.equal(last.weights[name], value), name


def test_in_bf16_routers_stay_fp32_and_training_is_that_of_fp32_up_to_rounding() -> None:
    # The rounding of hidden states changes the experts of a few tokens: a wide tolerance.
    layout = LayoutCase(2, EP2)
    ranks = run_ranks(
        partial(train, mixed_precision="bf16"), layout, MIXTRAL, SGD, SAMPLES, SCHEDULE, num_ranks=2
    )

    routers = {name: p for name, p in ranks[0].shards.items() if "router.weight" in name}
    assert len(routers) == 4
    assert all(value.dtype == torch.float32 for value in routers.values())
    experts = [p for name, p in ranks[0].shards.items() if "experts" in name]
    assert experts
    assert all(value.dtype == torch.bfloat16 for value in experts)
    oracle = expected(MIXTRAL, SGD)
    assert ranks[0].losses == pytest.approx(oracle.losses, abs=0.05)


@pytest.mark.parametrize(
    ("model", "num_ranks", "plugin", "message"),
    [
        pytest.param(
            MIXTRAL,
            2,
            {"tp_degree": 2},
            "tp_degree is 2 and sequence_parallelism is off: a model with experts needs it",
            id="tp-without-sp",
        ),
        pytest.param(
            recipe("mixtral", num_local_experts=3),
            2,
            EP2,
            r"expert_model_parallel_size=2 must divide the model's 3 experts; it can be 1 or 3\. "
            r"Nearest that works on 2 ranks: tp_degree=1, pp_degree=1, expert_model_parallel_size",
            id="experts-not-divisible",
        ),
        pytest.param(
            recipe("mixtral", intermediate_size=127),
            2,
            ETP2,
            r"expert_tensor_parallel_size=2 must divide the 127 feed-forward channels",
            id="channels-not-divisible",
        ),
        pytest.param(
            TinyModel("gpt2"),
            2,
            EP2,
            r"expert_model_parallel_size is 2, but a gpt2 model has no experts; leave it out",
            id="no-experts",
        ),
        pytest.param(
            MIXTRAL,
            2,
            {"expert_model_parallel_size": 4},
            r"2 ranks cannot hold expert_model_parallel_size=4 x expert_tensor_parallel_size=1 x "
            r"pp_degree=1 = 4: .* can be 1 x 1, 1 x 2, 2 x 1\.",
            id="world",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_with_choices(
    model: TinyModel, num_ranks: int, plugin: dict[str, Any], message: str
) -> None:
    layout = LayoutCase(num_ranks, plugin, 1)

    with pytest.raises(ConfigurationError, match=message):
        run_ranks(train, layout, model, SGD, SAMPLES, num_ranks=num_ranks)
