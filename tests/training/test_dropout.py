"""Dropout: equal where ranks hold the same activations, different where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.training.start import SGD, Started, start, weights_of

BATCH = pad_samples(ragged_samples(4))


def gpt2(embedding: float = 0.0, residual: float = 0.0, attention: float = 0.0) -> TinyModel:
    return TinyModel(
        "gpt2",
        changes={
            "n_layer": 2,
            "embd_pdrop": embedding,
            "resid_pdrop": residual,
            "attn_pdrop": attention,
        },
    )


def innermost(chunk: Any) -> Any:
    """Return Megatron's model inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def watch(started: Started) -> dict[str, torch.Tensor]:
    """Return a dictionary that the next forward pass fills with activations."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            seen[name] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return hook

    for chunk in started.model.chunks:
        module = innermost(chunk)
        if module.pre_process:
            module.embedding.embedding_dropout.register_forward_hook(keep("embedding"))
        for index, layer in enumerate(module.decoder.layers):
            layer.register_forward_hook(keep(f"layer {index}"))
            core = layer.self_attention.core_attention
            core.register_forward_hook(keep(f"attention {index}"))
    return seen


def one_update(recipe: TinyModel, plugin: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    started = start(recipe, **plugin)
    seen = watch(started)
    losses = [started.model(**BATCH).loss.item() for _ in range(2)]
    return losses, seen, weights_of(started.model)


def is_dropped(activations: torch.Tensor) -> torch.Tensor:
    return activations == 0


@pytest.fixture(scope="module")
def over_tp() -> Any:
    return run_ranks(one_update, gpt2(0.1, 0.1, 0.1), {"tp_degree": 2}, num_ranks=2)


def test_tensor_parallel_ranks_hold_equal_replicated_activations(over_tp: Any) -> None:
    (losses, seen, _), (other_losses, other_seen, _) = over_tp

    assert losses == other_losses
    assert is_dropped(seen["embedding"]).any()
    for name in ("embedding", "layer 0", "layer 1"):
        assert torch.equal(seen[name], other_seen[name]), name


@pytest.mark.parametrize("sequence_parallelism", [False, True], ids=["tp2", "tp2-sp"])
def test_replicated_weights_stay_equal_over_tensor_parallel_ranks(
    sequence_parallelism: bool,
) -> None:
    plugin = {"tp_degree": 2, "sequence_parallelism": sequence_parallelism}

    (_, _, weights), (_, _, others) = run_ranks(
        one_update, gpt2(0.1, 0.1, 0.1), plugin, num_ranks=2
    )

    replicated = [name for name in weights if "norm" in name or "position" in name]
    assert len(replicated) == 2 * 4 + 2 + 1
    for name in replicated:
        assert torch.equal(weights[name], others[name]), name


def heads_with_equal_inputs(plugin: dict[str, Any]) -> torch.Tensor:
    """Return what the core attention makes of the same q, k and v on every rank."""
    started = start(gpt2(attention=0.5), **plugin)
    module = innermost(started.model.chunks[0])
    core = module.decoder.layers[0].self_attention.core_attention
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(8, 1, 2, 16, generator=generator) for _ in range(3))
    with started.model.session.randomness.active():
        context: torch.Tensor = core(q, k, v, None)
    return context.detach()


@pytest.mark.parametrize("plugin", [{"tp_degree": 2}, {}], ids=["heads", "replicas"])
def test_attention_drops_other_scores_on_other_ranks(plugin: dict[str, Any]) -> None:
    first, second = run_ranks(heads_with_equal_inputs, plugin, num_ranks=2)

    assert not torch.allclose(first, second)


def test_sequence_parallel_ranks_drop_other_tokens() -> None:
    plugin = {"tp_degree": 2, "sequence_parallelism": True}

    (_, first, _), (_, second, _) = run_ranks(one_update, gpt2(embedding=0.5), plugin, num_ranks=2)

    assert first["embedding"].shape[0] == BATCH["input_ids"].shape[1] // 2
    assert not torch.equal(is_dropped(first["embedding"]), is_dropped(second["embedding"]))


def test_replicas_drop_other_activations() -> None:
    (_, first, _), (_, second, _) = run_ranks(one_update, gpt2(embedding=0.5), {}, num_ranks=2)

    assert not torch.equal(is_dropped(first["embedding"]), is_dropped(second["embedding"]))


def test_every_update_drops_anew() -> None:
    ((losses, _, _),) = run_ranks(one_update, gpt2(embedding=0.5), {"min_lr": 0.0}, num_ranks=1)

    assert losses[0] != losses[1]


def test_replicated_dropout_does_not_depend_on_tensor_parallelism() -> None:
    recipe = gpt2(embedding=0.2, residual=0.3)

    ((alone, *_),) = run_ranks(one_update, recipe, {}, num_ranks=1)
    (split, *_), _ = run_ranks(one_update, recipe, {"tp_degree": 2}, num_ranks=2)

    assert split == pytest.approx(alone, abs=1e-5)


def test_the_users_seed_decides_what_is_dropped() -> None:
    recipe = gpt2(0.1, 0.1, 0.1)

    losses = [run_ranks(one_update, recipe, {}, seed, num_ranks=1)[0][0] for seed in (0, 0, 1)]

    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.parametrize("num_ranks", [1, 2], ids=["1", "pp2"])
def test_embedding_and_residual_dropout_reach_their_own_places(num_ranks: int) -> None:
    plugin = {"pp_degree": num_ranks}
    update = (plugin, 0)

    embedding = run_ranks(one_update, gpt2(embedding=0.5), *update, num_ranks=num_ranks)
    residual = run_ranks(one_update, gpt2(residual=0.5), *update, num_ranks=num_ranks)

    plain = oracle_run(OracleCase(gpt2(), SGD, [BATCH])).losses[0]
    assert 0.4 < is_dropped(embedding[0][1]["embedding"]).float().mean() < 0.6
    assert not is_dropped(residual[0][1]["embedding"]).any()
    # Half of the residual branches' outputs are cut out of the first layer's sum.
    unchanged = residual[0][1]["layer 0"] == residual[0][1]["embedding"]
    assert 0.15 < unchanged.float().mean() < 0.35
    assert abs(embedding[0][0][0] - plain) > 1e-3
    assert abs(residual[0][0][0] - plain) > 1e-3


@pytest.mark.parametrize(
    ("plugin", "is_plain"),
    [
        ({"hidden_dropout": 0.0, "attention_dropout": 0.0}, True),
        ({"hidden_dropout": 0.0}, False),
        ({"attention_dropout": 0.0}, False),
    ],
    ids=["both", "hidden", "attention"],
)
def test_the_plugins_dropouts_win_over_the_configs(plugin: dict[str, Any], is_plain: bool) -> None:
    ((losses, _, _),) = run_ranks(one_update, gpt2(0.1, 0.1, 0.1), plugin, num_ranks=1)

    plain = oracle_run(OracleCase(gpt2(), SGD, [BATCH])).losses[0]
    assert (abs(losses[0] - plain) < 1e-5) == is_plain


def test_llama_drops_attention_scores_alone() -> None:
    recipe = TinyModel("llama", changes={"num_hidden_layers": 2, "attention_dropout": 0.3})

    ((losses, seen, _),) = run_ranks(one_update, recipe, {}, num_ranks=1)

    quiet = TinyModel("llama", changes={"num_hidden_layers": 2})
    assert not is_dropped(seen["embedding"]).any()
    assert abs(losses[0] - oracle_run(OracleCase(quiet, SGD, [BATCH])).losses[0]) > 1e-4
