"""Every field of the plugin has a test that sees its effect in a run; those that had none."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.config.plugin_fields import FIELDS
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import (
    TinyModel,
    TinyOptimizer,
    pad_samples,
    ragged_samples,
    translation_samples,
)
from tests.training.start import TWO_LAYERS, TWO_LLAMA_LAYERS, hf_loss, start, weights_of

TESTS = Path(__file__).resolve().parents[1]
EFFECTS = runpy.run_path(str(TESTS.parent / "docs" / "plugin_effects.py"))["EFFECTS"]
SAMPLES = ragged_samples(8)
BATCH = pad_samples(SAMPLES)
GPT2 = TinyModel("gpt2")
MIXTRAL = TinyModel("mixtral", changes={"num_hidden_layers": 2})


def test_every_field_that_acts_names_what_is_seen_and_a_test_that_exists() -> None:
    acting = {field.name for field in FIELDS}

    assert set(EFFECTS) == acting
    missing = []
    for name, effect in EFFECTS.items():
        file, _, function = effect.test.partition("::")
        text = (TESTS / file).read_text(encoding="utf-8") if (TESTS / file).is_file() else ""
        if not re.search(rf"^def {re.escape(function)}\(", text, re.MULTILINE):
            missing.append(f"{name}: {effect.test}")
    assert missing == []


# --- what each rank holds ------------------------------------------------------------------


def held(recipe: TinyModel, plugin: dict[str, Any]) -> Any:
    """Return this rank's chunks: Megatron's name over the whole model and the shape held.

    The experts of a layer have one name, so it may come more than once.
    """
    from accelerate_megatron import engine

    started = start(recipe, **plugin)
    return [
        [(shard.name, tuple(shard.data.shape)) for shard in engine.model_shards([chunk])]
        for chunk in started.model.chunks
    ]


def layers(chunks: list[list[tuple[str, Any]]]) -> list[list[int]]:
    return [
        sorted({int(n) for name, _ in chunk for n in re.findall(r"layers\.(\d+)\.", name)})
        for chunk in chunks
    ]


@pytest.mark.parametrize(
    ("plugin", "wanted"),
    [
        ({}, [[[0, 1]], [[2, 3]]]),
        ({"decoder_last_pipeline_num_layers": 1}, [[[0, 1, 2]], [[3]]]),
        (
            {"num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 2},
            [[[0], [2]], [[1], [3]]],
        ),
    ],
    ids=["even", "last", "virtual"],
)
def test_each_stage_holds_the_layers_it_is_asked_to(plugin: dict[str, Any], wanted: Any) -> None:
    ranks = run_ranks(held, GPT2, {"pp_degree": 2, **plugin}, num_ranks=2)

    assert [layers(chunks) for chunks in ranks] == wanted


def test_an_encoder_and_a_decoder_are_on_the_stages_that_the_split_says() -> None:
    model = TinyModel("t5", changes={"num_layers": 4, "num_decoder_layers": 2})
    plugin = {"pp_degree": 3, "pipeline_model_parallel_split_rank": 2}

    ranks = run_ranks(held, model, plugin, num_ranks=3)

    stacks = [
        sorted({match[0] for name, _ in chunk if (match := re.match(r"(en|de)coder", name))})
        for [chunk] in ranks
    ]
    assert stacks == [["encoder"], ["encoder"], ["decoder"]]
    assert [layers(chunks) for chunks in ranks] == [[[0, 1]], [[2, 3]], [[0, 1]]]


def test_tensor_parallel_ranks_hold_their_part_of_the_weights() -> None:
    [[whole]] = run_ranks(held, TWO_LAYERS, {}, num_ranks=1)
    parts = run_ranks(held, TWO_LAYERS, {"tp_degree": 2}, num_ranks=2)

    wholes = dict(whole)
    for [part] in parts:
        assert {name for name, _ in part} == set(wholes)
        for name, shape in part:
            if "word_embeddings" in name:
                assert shape[0] == 128, "of 256: 99 words, padded to 128 for each rank"
            elif name.endswith(
                ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")
            ):
                assert shape[0] * 2 == wholes[name][0], name
            elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                assert shape[1] * 2 == wholes[name][1], name
            else:
                assert shape == wholes[name], name


def test_experts_and_their_rows_are_over_ranks() -> None:
    def elements(plugin: dict[str, Any], num_ranks: int) -> list[int]:
        ranks = run_ranks(held, MIXTRAL, plugin, num_ranks=num_ranks)
        return [
            sum(math.prod(shape) for name, shape in chunk if "expert" in name) for [chunk] in ranks
        ]

    [whole] = elements({}, 1)

    assert elements({"expert_model_parallel_size": 2}, 2) == [whole // 2] * 2
    tensor_parallel = {"tp_degree": 2, "sequence_parallelism": True}
    assert elements({**tensor_parallel, "expert_tensor_parallel_size": 2}, 2) == [whole // 2] * 2
    assert elements(tensor_parallel, 2) == [whole] * 2


# --- what is kept for the backward pass ------------------------------------------------------


def kept_bytes(plugin: dict[str, Any]) -> Any:
    """Return the bytes an update kept, and its losses."""
    started = start(TWO_LLAMA_LAYERS, samples=SAMPLES, **plugin)
    parameters = {p.untyped_storage().data_ptr() for p in started.model.parameters()}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)  # keeps the storage, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = [started.model(**BATCH).loss.item()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
    losses += [started.model(**BATCH).loss.item()]
    return sum(size for key, size in storages.items() if key not in parameters), losses


@pytest.mark.parametrize(
    ("without", "with_it"),
    [
        ({"tp_degree": 2}, {"sequence_parallelism": True}),
        ({}, {"context_parallel_size": 2}),
    ],
    ids=["sequence_parallelism", "context_parallel_size"],
)
def test_ranks_that_share_a_sequence_keep_fewer_bytes(
    without: dict[str, Any], with_it: dict[str, Any]
) -> None:
    # Two replicas have the same batch each, so their loss is that of one.
    whole = run_ranks(kept_bytes, without, num_ranks=2)
    split = run_ranks(kept_bytes, without | with_it, num_ranks=2)

    for (size, losses), (smaller, same) in zip(whole, split, strict=True):
        assert smaller < size
        assert same == pytest.approx(losses, abs=1e-5)


@pytest.mark.slow
def test_recompute_activations_is_selective_recomputation() -> None:
    def run(**plugin: Any) -> Any:
        plugin = {"attention_backend": "unfused", **plugin}
        return run_ranks(saved_bytes_at_the_loss, plugin, num_ranks=1)[0]

    plain, selective = run(), run(recompute_granularity="selective")

    assert run(recompute_activations=True) == selective
    assert selective < plain


def saved_bytes_at_the_loss(plugin: dict[str, Any]) -> int:
    from tests.parity.test_recompute import saved_bytes

    return saved_bytes(plugin)


# --- the update ----------------------------------------------------------------------------


def step_length(plugin: dict[str, Any]) -> float:
    """Return the L2 norm of what one update of plain SGD at rate 0.1 changed, over the rate."""
    started = start(TWO_LAYERS, samples=SAMPLES, **plugin)
    before = weights_of(started.model)
    started.model(**BATCH)
    after = weights_of(started.model)
    squares = [(after[name] - before[name]).double().square().sum() for name in before]
    return float(torch.stack(squares).sum().sqrt()) / 0.1


def test_gradients_are_scaled_to_the_norm_that_is_asked_for() -> None:
    [unclipped] = run_ranks(step_length, {"gradient_clipping": 0.0}, num_ranks=1)
    [clipped] = run_ranks(step_length, {"gradient_clipping": unclipped / 10}, num_ranks=1)
    [untouched] = run_ranks(step_length, {"gradient_clipping": unclipped * 10}, num_ranks=1)

    assert clipped == pytest.approx(unclipped / 10, rel=1e-4)
    assert untouched == pytest.approx(unclipped, rel=1e-6)


def optimizer_of(plugin: dict[str, Any]) -> Any:
    """Return the class that makes the step, and where each of its moments is."""
    started = start(TWO_LAYERS, optimizer=TinyOptimizer(), samples=SAMPLES, **plugin)
    started.model(**BATCH)
    ours = started.model.session.optimizer
    stepping = getattr(ours, "chained_optimizers", [ours])[0].optimizer
    moments = [value for state in stepping.state.values() for value in state.values()]
    return type(stepping).__name__, {str(value.device) for value in moments if value.dim()}


def test_an_offloaded_optimizer_steps_in_host_memory() -> None:
    [(plain, _)] = run_ranks(optimizer_of, {}, num_ranks=1)
    [(offloaded, places)] = run_ranks(optimizer_of, {"optimizer_cpu_offload": True}, num_ranks=1)

    assert plain != offloaded == "HybridDeviceOptimizer"
    assert places == {"cpu"}


# --- batches -------------------------------------------------------------------------------


def updates_of_an_epoch(plugin: dict[str, Any]) -> Any:
    """Return the rows of each update of an epoch, its forward passes, and the first loss."""
    started = start(TWO_LAYERS, samples=SAMPLES, batch_size=2, **plugin)
    passes: list[Any] = []
    started.model.chunks[0].register_forward_pre_hook(lambda *_: passes.append(None))
    rows, losses = [], []
    for batch in started.loader:
        rows.append(batch["input_ids"].shape[0])
        losses.append(started.model(**batch).loss.item())
    return rows, len(passes) // len(rows), losses[0]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_an_update_takes_so_many_micro_batches(number: int) -> None:
    [(rows, passes, loss)] = run_ranks(
        updates_of_an_epoch, {"num_micro_batches": number}, num_ranks=1
    )

    assert rows == [2 * number] * (4 // number)
    assert passes == number
    assert loss == pytest.approx(hf_loss(SAMPLES[: 2 * number]), abs=1e-5)


def two_loaders(plugin: dict[str, Any]) -> Any:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    model = TWO_LAYERS.build()
    loaders = [DataLoader(SAMPLES, batch_size=n, collate_fn=pad_samples) for n in (4, 2)]
    model, train, evaluation = accelerator.prepare(model, *loaders)
    size = accelerator.state.megatron_lm_plugin.micro_batch_size
    rows = [next(iter(loader))["input_ids"].shape[0] for loader in (train, evaluation)]
    return size, rows, len(train)


def test_the_smallest_or_the_largest_batch_is_the_micro_batch() -> None:
    assert run_ranks(two_loaders, {}, num_ranks=1) == [(2, [2, 2], 4)]
    assert run_ranks(two_loaders, {"is_train_batch_min": False}, num_ranks=1) == [(4, [4, 4], 2)]


def lengths(plugin: dict[str, Any]) -> Any:
    started = start(TWO_LAYERS, samples=SAMPLES, batch_size=8, **plugin)
    started.model.eval()
    [batch] = list(started.loader)
    return batch["input_ids"].shape[1], started.model(**batch).loss.item()


def lengths_of_stacks(plugin: dict[str, Any]) -> Any:
    """Return the tokens of a T5's encoder and decoder, and the loss and transformers' of them."""
    recipe = TinyModel("t5", changes={"num_layers": 1, "num_decoder_layers": 1})
    started = start(recipe, samples=translation_samples(4), batch_size=4, **plugin)
    started.model.eval()
    [batch] = list(started.loader)
    with torch.no_grad():
        wanted = recipe.build().eval()(**batch).loss.item()
    sizes = (batch["input_ids"].shape[1], batch["labels"].shape[1])
    return sizes, started.model(**batch).loss.item(), wanted


@pytest.mark.parametrize(
    ("plugin", "wanted"),
    [
        ({}, (32, 16)),
        ({"encoder_seq_length": 40, "decoder_seq_length": 10}, (40, 10)),
        ({"encoder_seq_length": 20}, (20, 16)),
    ],
    ids=["longest", "both", "encoder"],
)
def test_each_stack_has_the_length_that_is_asked_for(
    plugin: dict[str, Any], wanted: tuple[int, int]
) -> None:
    [(sizes, loss, of_transformers)] = run_ranks(lengths_of_stacks, plugin, num_ranks=1)

    assert sizes == wanted
    assert loss == pytest.approx(of_transformers, abs=1e-5)


def test_batches_have_the_length_that_is_asked_for() -> None:
    longest = BATCH["input_ids"].shape[1]
    [(length, loss)] = run_ranks(lengths, {}, num_ranks=1)
    [(padded, same)] = run_ranks(lengths, {"seq_length": 48}, num_ranks=1)
    [(cut, other)] = run_ranks(lengths, {"seq_length": 6}, num_ranks=1)

    assert (length, padded, cut) == (longest, 48, 6)
    assert same == pytest.approx(loss, abs=1e-5)
    assert abs(other - loss) > 1e-4


# --- positions -----------------------------------------------------------------------------


def evaluated(recipe: TinyModel, plugin: dict[str, Any]) -> float:
    started = start(recipe, samples=SAMPLES, **plugin)
    started.model.eval()
    loss: float = started.model(**BATCH).loss.item()
    return loss


def test_the_models_own_positions_may_be_said() -> None:
    rotary = {"use_rotary_position_embeddings": True}

    assert run_ranks(evaluated, TWO_LLAMA_LAYERS, rotary, num_ranks=1) == run_ranks(
        evaluated, TWO_LLAMA_LAYERS, {}, num_ranks=1
    )
