"""Learning rate and weight decay of every update, against tables worked out by hand.

Six updates, two of warm-up, from 1e-3 to 1e-4; the seventh number is what the next update would
have. Each table is run at each data-parallel size and number of micro-batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, pad_samples, ragged_samples
from tests.training.start import start

ONE_LAYER = TinyModel("gpt2", changes={"n_layer": 1})
NUM_UPDATES, WARMUP = 6, 2
MAX, MIN = 1e-3, 1e-4

RATES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear": ({"lr_decay_style": "linear"}, [0, 5e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4]),
    "cosine": (
        {"lr_decay_style": "cosine"},
        [0, 5e-4, 1e-3, 8.681981e-4, 5.5e-4, 2.318019e-4, 1e-4],
    ),
    "constant": ({"lr_decay_style": "constant"}, [0, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3]),
    "inverse-square-root": (
        {"lr_decay_style": "inverse-square-root"},
        [0, 5e-4, 1e-3, 8.164966e-4, 7.071068e-4, 6.324555e-4, 5.773503e-4],
    ),
    "from a first rate": (
        {"other_megatron_args": {"lr_warmup_init": 4e-4}},
        [4e-4, 7e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4],
    ),
    "decay ends early": (
        {"lr_decay_iters": 4},
        [0, 5e-4, 1e-3, 5.5e-4, 1e-4, 1e-4, 1e-4],
    ),
    "plugin's updates over the scheduler's": (
        {"train_iters": 8},
        [0, 5e-4, 1e-3, 8.5e-4, 7e-4, 5.5e-4, 4e-4],
    ),
    "plugin's warm-up over the scheduler's": (
        {"lr_warmup_iters": 3},
        [0, 3.333333e-4, 6.666667e-4, 1e-3, 7e-4, 4e-4, 1e-4],
    ),
    "fraction": (
        {"lr_warmup_fraction": 0.5},
        [0, 3.333333e-4, 6.666667e-4, 1e-3, 7e-4, 4e-4, 1e-4],
    ),
    **{
        f"WSD {style}": (
            {
                "lr_decay_style": "WSD",
                "other_megatron_args": {"lr_wsd_decay_style": style, "lr_wsd_decay_iters": 2},
            },
            [0, 5e-4, 1e-3, 1e-3, 1e-3, fifth, 1e-4],
        )
        for style, fifth in (
            ("linear", 5.5e-4),
            ("cosine", 5.5e-4),
            ("exponential", 4.727922e-4),
            ("minus_sqrt", 3.636039e-4),
        )
    },
}
DECAYS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "constant": ({}, [0.3] * 7),
    "linear": (
        {
            "weight_decay_incr_style": "linear",
            "start_weight_decay": 0.1,
            "end_weight_decay": 0.7,
        },
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
    ),
    "cosine": (
        {
            "weight_decay_incr_style": "cosine",
            "start_weight_decay": 0.1,
            "end_weight_decay": 0.7,
        },
        [0.1, 0.1401924, 0.25, 0.4, 0.55, 0.6598076, 0.7],
    ),
}


def seen_in_a_run(
    accelerator: Accelerator, num_micro_batches: int, fields: dict[str, Any], in_samples: bool
) -> tuple[list[float], list[float]]:
    """Return rate and weight decay of each update, and of the one after the last."""
    plugin = MegatronLMPlugin(num_micro_batches=num_micro_batches, min_lr=MIN, **fields)
    accelerator.state._shared_state["megatron_lm_plugin"] = plugin
    batches_per_update = accelerator.num_processes * num_micro_batches
    samples = ragged_samples(NUM_UPDATES * batches_per_update, max_length=8, min_length=4)
    model = ONE_LAYER.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=MAX, weight_decay=0.3)
    loader = DataLoader(samples, batch_size=1, collate_fn=pad_samples)
    counts = (
        {}
        if in_samples
        else {
            "total_num_steps": len(samples),
            "warmup_num_steps": WARMUP * batches_per_update,
        }
    )
    if in_samples:
        plugin.train_samples = len(samples)
        plugin.lr_warmup_samples = WARMUP * batches_per_update
        if plugin.lr_decay_iters is not None:  # said in updates, for the table
            plugin.lr_decay_samples = plugin.lr_decay_iters * batches_per_update
            plugin.lr_decay_iters = None
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, MegatronLMDummyScheduler(optimizer, **counts)
    )
    rates, decays = [], []
    for batch in loader:
        rates.append(optimizer.param_groups[0]["lr"])
        decays.append(optimizer.param_groups[0]["weight_decay"])
        model(**batch)
        scheduler.step()
    [last] = scheduler.get_last_lr()
    decay = optimizer.param_groups[0]["weight_decay"]
    accelerator.free_memory()
    return [*rates, last], [*decays, decay]


def all_tables(num_micro_batches: int) -> Any:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    seen = {}
    for name, (fields, _) in RATES.items():
        rates, _ = seen_in_a_run(accelerator, num_micro_batches, fields, in_samples=False)
        seen[f"rate {name}"] = rates
    for name, (fields, _) in DECAYS.items():
        _, decays = seen_in_a_run(accelerator, num_micro_batches, fields, in_samples=False)
        seen[f"decay {name}"] = decays
    for name in ("linear", "cosine"):
        fields = {**RATES[name][0], **DECAYS[name][0]}
        seen[f"samples {name}"] = seen_in_a_run(
            accelerator, num_micro_batches, fields, in_samples=True
        )
    fields = RATES["decay ends early"][0]
    seen["samples, decay ends early"], _ = seen_in_a_run(
        accelerator, num_micro_batches, fields, in_samples=True
    )
    return seen


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize(
    "dp_size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]
)
def test_rate_and_weight_decay_of_every_update_are_those_of_the_tables(
    dp_size: int, num_micro_batches: int
) -> None:
    *_, seen = run_ranks(all_tables, num_micro_batches, num_ranks=dp_size)

    for name, (_, wanted) in RATES.items():
        assert seen[f"rate {name}"] == pytest.approx(wanted, rel=1e-6), name
    name = "decay ends early"
    assert seen[f"samples, {name}"] == pytest.approx(RATES[name][1], rel=1e-6)
    for name, (_, wanted) in DECAYS.items():
        assert seen[f"decay {name}"] == pytest.approx(wanted, rel=1e-6), name
    for name in ("linear", "cosine"):
        rates, decays = seen[f"samples {name}"]
        assert rates == pytest.approx(RATES[name][1], rel=1e-6)
        assert decays == pytest.approx(DECAYS[name][1], rel=1e-6)


# --- conditions on single parameters -----------------------------------------------------

SAMPLES = ragged_samples(8)


def is_norm_or_bias(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.dim() == 1


def is_first_layer(name: str, parameter: torch.nn.Parameter) -> bool:
    return ".h.0." in name


def is_query(name: str, parameter: torch.nn.Parameter) -> bool:
    return "q_proj" in name


def conditioned_weights(recipe: TinyModel, plugin: dict[str, Any]) -> Any:
    optimizer = TinyOptimizer("sgd", {"lr": 0.1, "weight_decay": 0.5})
    started = start(recipe, optimizer=optimizer, samples=SAMPLES, batch_size=4, **plugin)
    for batch in started.loader:
        started.model(**batch)
    return started.model.gather_state_dict()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_conditions_change_decay_and_rate_of_the_parameters_they_name(num_ranks: int) -> None:
    recipe = TinyModel("gpt2", changes={"n_layer": 2})
    plugin = {
        "no_wd_decay_cond": is_norm_or_bias,
        "scale_lr_cond": is_first_layer,
        "lr_mult": 0.25,
        "num_micro_batches": 2 // num_ranks,
    }

    *_, weights = run_ranks(conditioned_weights, recipe, plugin, num_ranks=num_ranks)

    # The same as groups of plain PyTorch; what comes first wins, so the finer ones stand first.
    first_layer_1d = [f"transformer.h.0.{part}" for part in ("ln_1", "ln_2")] + [
        f"transformer.h.0.{part}.bias"
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    slow, slow_no_decay = {"lr": 0.025}, {"lr": 0.025, "weight_decay": 0.0}
    groups = (
        *((name, slow_no_decay) for name in first_layer_1d),
        (".h.0.", slow),
        (".bias", {"weight_decay": 0.0}),
        ("ln_", {"weight_decay": 0.0}),
    )
    oracle = oracle_run(
        OracleCase(
            recipe,
            TinyOptimizer("sgd", {"lr": 0.1, "weight_decay": 0.5}, groups=groups),
            [pad_samples(SAMPLES)],
            clip=1.0,
        )
    )
    for name, value in weights.items():
        torch.testing.assert_close(value, oracle.weights[name], rtol=1e-4, atol=1e-6)


def test_a_condition_that_divides_a_fused_parameter_is_refused() -> None:
    recipe = TinyModel("llama", changes={"num_hidden_layers": 2})
    plugin = {"no_wd_decay_cond": is_query}

    with pytest.raises(ConfigurationError, match=r"linear_qkv.weight.*q_proj.*no weight decay"):
        run_ranks(conditioned_weights, recipe, plugin, num_ranks=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start_weight_decay": 0.1}, "'constant', with which the weight decay is the optimizer"),
        ({"weight_decay_incr_style": "linear"}, "it needs both, with 0 <= start <= end"),
        (
            {
                "weight_decay_incr_style": "cosine",
                "start_weight_decay": 0.5,
                "end_weight_decay": 0.1,
            },
            "needs both, with 0 <= start <= end",
        ),
        ({"lr_mult": 2.0}, "lr_mult is 2 without scale_lr_cond"),
        ({"scale_lr_cond": is_query}, "lr_mult is 1 with scale_lr_cond"),
        ({"scale_lr_cond": is_query, "lr_mult": -1.0}, "must be above 0"),
        ({"no_wd_decay_cond": "bias"}, "must be a function"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MegatronLMPlugin(**fields)


def two_decays() -> None:
    accelerator = Accelerator(
        cpu=True,
        megatron_lm_plugin=MegatronLMPlugin(
            weight_decay_incr_style="linear",
            start_weight_decay=0.0,
            end_weight_decay=0.1,
            train_iters=3,
        ),
    )
    model = ONE_LAYER.build()
    optimizer = TinyOptimizer(
        "adamw", {"lr": 1e-3, "weight_decay": 0.1}, groups=(("ln", {"weight_decay": 0.2}),)
    ).build(model)
    accelerator.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer))


def test_a_moving_weight_decay_and_two_in_the_optimizer_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match=r"groups have 2 of them \(0.1, 0.2\)"):
        run_ranks(two_decays, num_ranks=1)
