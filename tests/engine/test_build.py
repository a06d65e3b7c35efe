"""The chunks of a rank, and the view of their parameters as pieces of the whole."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer
from tests.training.start import start


def pieces(recipe: TinyModel, plugin: dict[str, Any]) -> list[Any]:
    """Return this rank's shards as (name, whole shape, offset, shape, speaks for it, values)."""
    from accelerate_megatron import engine

    started = start(recipe, **plugin)
    shards = engine.model_shards(list(started.model.chunks))
    for shard in shards:
        assert shard.data.untyped_storage().data_ptr() == (
            shard.parameter.untyped_storage().data_ptr()
        )
    return [
        (
            shard.name,
            shard.global_shape,
            shard.global_offset,
            tuple(shard.data.shape),
            shard.is_main_replica,
            shard.data.clone(),
        )
        for shard in shards
    ]


LAYOUTS = [
    pytest.param(1, {}, id="1"),
    pytest.param(2, {"tp_degree": 2}, id="tp2"),
    pytest.param(2, {"pp_degree": 2, "num_micro_batches": 2}, id="pp2"),
    pytest.param(
        2,
        {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1},
        id="virtual",
    ),
    pytest.param(2, {}, id="dp2"),
    pytest.param(4, {"tp_degree": 2, "pp_degree": 2}, id="tp2-pp2"),
]


@pytest.mark.parametrize(
    "recipe", [TinyModel("gpt2"), TinyModel("llama", tied=False)], ids=["gpt2", "llama"]
)
@pytest.mark.parametrize(("num_ranks", "plugin"), LAYOUTS)
def test_the_pieces_of_all_ranks_cover_every_parameter_once(
    num_ranks: int, plugin: dict[str, Any], recipe: TinyModel
) -> None:
    ranks = run_ranks(pieces, recipe, plugin, num_ranks=num_ranks)

    covered: Counter[str] = Counter()
    wholes: dict[str, tuple[int, ...]] = {}
    places: Counter[Any] = Counter()
    for name, whole, offset, shape, speaks, _ in (piece for rank in ranks for piece in rank):
        assert wholes.setdefault(name, whole) == whole
        if speaks:
            covered[name] += torch.Size(shape).numel()
            places[name, offset] += 1
    assert set(covered) == set(wholes)
    assert set(places.values()) == {1}
    for name, whole in wholes.items():
        assert covered[name] == torch.Size(whole).numel(), name


def test_layers_are_named_by_their_place_in_the_whole_model() -> None:
    plugin = {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1}

    ranks = run_ranks(pieces, TinyModel("gpt2"), plugin, num_ranks=2)

    def layers_of(rank: Any) -> set[str]:
        return {name.split(".")[2] for name, *_ in rank if name.startswith("decoder.layers.")}

    assert [layers_of(rank) for rank in ranks] == [{"0", "2"}, {"1", "3"}]


def test_a_tied_table_is_on_both_ends_of_the_pipeline_with_one_speaker() -> None:
    ranks = run_ranks(pieces, TinyModel("gpt2"), {"pp_degree": 2}, num_ranks=2)

    name = "embedding.word_embeddings.weight"
    (first,), (last,) = ([piece for piece in rank if piece[0] == name] for rank in ranks)
    assert (first[4], last[4]) == (True, False)
    assert torch.equal(first[5], last[5])


def test_the_halves_of_a_gated_layer_are_two_pieces_gate_first() -> None:
    recipe = TinyModel("llama", changes={"num_hidden_layers": 1})

    ranks = run_ranks(pieces, recipe, {"tp_degree": 2}, num_ranks=2)

    found = [
        [(offset, shape) for name, _, offset, shape, *_ in rank if name.endswith("fc1.weight")]
        for rank in ranks
    ]
    assert found == [
        [((0, 0), (64, 64)), ((128, 0), (64, 64))],
        [((64, 0), (64, 64)), ((192, 0), (64, 64))],
    ]


def counts_beyond_bf16() -> list[float]:
    started = start(
        TinyModel("glm4_moe"),
        mixed_precision="bf16",
        other_megatron_args={"moe_router_bias_update_rate": 0.001},
    )
    counted = [b for n, b in started.model.named_buffers() if n.endswith("tokens_per_expert")]
    return [float(buffer.fill_(256).add_(1).max()) for buffer in counted]


def test_routers_count_every_token_in_bf16_too() -> None:
    (counts,) = run_ranks(counts_beyond_bf16, num_ranks=1)

    assert counts
    assert set(counts) == {257.0}


def trainable() -> dict[str, bool]:
    frozen = TinyOptimizer("sgd", {"lr": 0.1}, frozen=("wte", "ln_"))
    started = start(optimizer=frozen)
    return {name: value.requires_grad for name, value in started.model.named_parameters()}


def test_only_what_the_optimizer_trains_receives_gradients() -> None:
    (told,) = run_ranks(trainable, num_ranks=1)

    for name, is_trainable in told.items():
        is_frozen = "word_embeddings" in name or "layernorm" in name
        assert is_trainable != is_frozen, name
