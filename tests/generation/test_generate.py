"""`megatron_generate` on ranks: the same everywhere, and nothing left behind."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from tests.generation.calling import (
    LAYOUTS,
    generated,
    prompts,
    reference,
    refusal_of,
    refusals,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.plugin.test_custom import own_model
from tests.training.start import TWO_LAYERS, WITH_DROPOUT, start

aten = torch.ops.aten
SAMPLED = {"max_new_tokens": 12, "temperature": 1.2, "top_p": 0.9, "seed": 11}
DOCUMENTED = [
    {"top_p": 0.8, "top_p_decay": 0.5, "temperature": 0.9, "seed": 1},
    {"top_k": 50, "temperature": 0.9, "seed": 1},
    {"add_BOS": True},
    {"num_beams": 20, "length_penalty": 1.5},
]
"""The forms that Accelerate's documentation shows."""

UNTIED = TinyModel("llama", tied=False, changes={"num_hidden_layers": 2})


def own_prompts(plugin: dict[str, Any], asked: dict[str, Any]) -> tuple[int, torch.Tensor]:
    """Let each of two replicas continue its own two of four prompts."""
    model = start(TWO_LAYERS, **plugin).model
    ids, mask = prompts(5, 7, 3, 6)
    dp_rank = model.session.ranks.dp_rank
    mine = slice(2 * dp_rank, 2 * dp_rank + 2) if model.session.ranks.dp_size == 2 else slice(None)
    return dp_rank, model.megatron_generate(ids[mine], mask[mine], **asked)


def test_sampled_tokens_are_the_same_on_every_layout() -> None:
    [(_, alone)] = run_ranks(own_prompts, {}, SAMPLED, num_ranks=1)
    split = run_ranks(own_prompts, {"tp_degree": 2}, SAMPLED, num_ranks=4)
    staged = run_ranks(own_prompts, {"pp_degree": 2}, SAMPLED, num_ranks=2)

    assert len({tuple(row[7:].tolist()) for row in alone}) == 4
    for dp_rank, tokens in split:
        assert torch.equal(tokens, alone[2 * dp_rank : 2 * dp_rank + 2])
    for _, tokens in staged:
        assert torch.equal(tokens, alone)


def test_the_documented_calls_run_and_each_prompt_stops_at_its_end() -> None:
    batch = prompts(3, 7)
    free = reference(TWO_LAYERS, batch, max_new_tokens=10)
    end = int(free[0, 10])  # the fourth token of the first prompt, and none of the second
    assert end not in free[0, 7:10].tolist() + free[1, 7:].tolist()
    calls = [(batch, {"max_new_tokens": 8, **asked}) for asked in DOCUMENTED]
    calls.append((batch, {"max_new_tokens": 10, "eos_token_id": end}))
    calls.append((batch, {"max_new_tokens": 8, "vocab_size": 10}))

    *documented, stopped, small = run_ranks(generated, TWO_LAYERS, {}, calls, num_ranks=1)[0]

    for tokens, asked in zip(documented, DOCUMENTED, strict=True):
        assert tokens.shape[0] == 2
        assert tokens.shape[1] <= 7 + 8 + int(asked.get("add_BOS", False))
    want = reference(TWO_LAYERS, batch, max_new_tokens=8, num_beams=20, length_penalty=1.5)
    assert torch.equal(documented[3], want)
    assert torch.equal(
        stopped,
        reference(TWO_LAYERS, batch, max_new_tokens=10, eos_token_id=end, pad_token_id=end),
    )
    assert small[:, 7:].max() < 10


def decaying(asked: dict[str, Any]) -> list[int]:
    model = start(TWO_LAYERS).model
    ids, _ = prompts(4)
    return model.megatron_generate(ids, max_new_tokens=10, seed=3, **asked)[0, 4:].tolist()


def test_top_p_decays_after_the_first_token_down_to_its_bound() -> None:
    greedy = reference(TWO_LAYERS, prompts(4), max_new_tokens=1)
    wide, decayed, bounded = (
        run_ranks(decaying, {"temperature": 4.0, "top_p": 1.0, **more}, num_ranks=1)[0]
        for more in ({}, {"top_p_decay": 1e-6}, {"top_p_decay": 1e-6, "top_p_bound": 1.0})
    )

    assert bounded == wide
    assert decayed[0] == wide[0] != greedy[0, 4]
    rest = reference(
        TWO_LAYERS,
        (torch.cat([prompts(4)[0], torch.tensor([[wide[0]]])], dim=1), torch.ones(1, 5).long()),
        max_new_tokens=9,
    )
    assert decayed[1:] == rest[0, 5:].tolist()


def steps_around(calls: list[dict[str, Any]], plugin: dict[str, Any]) -> list[Any]:
    """Train two updates with a generation between them; return what could differ."""
    started = start(WITH_DROPOUT, num_micro_batches=2, batch_size=4, **plugin)
    model = started.model
    batch = pad_samples(ragged_samples(8))
    model.train()
    losses = [model(**batch).loss.item()]
    modules = {name: module.training for name, module in model.named_modules()}
    split = [getattr(m, "sequence_parallel", None) for m in model.modules()]
    before = torch.get_rng_state(), random.getstate()
    for asked in calls:
        model.megatron_generate(*prompts(3, 7), **asked)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert modules == {name: module.training for name, module in model.named_modules()}
    assert split == [getattr(m, "sequence_parallel", None) for m in model.modules()]
    losses += [model(**batch).loss.item() for _ in range(2)]
    return [*losses, *(value.detach().clone() for value in model.parameters())]


@pytest.mark.parametrize(
    "plugin",
    [
        {"tp_degree": 2, "sequence_parallelism": True, "recompute_activations": True},
        {"pp_degree": 2, "use_distributed_optimizer": True},
    ],
    ids=["tp2-sp-recompute", "pp2"],
)
def test_training_goes_on_bit_for_bit_as_without_it(plugin: dict[str, Any]) -> None:
    calls = [SAMPLED, {"max_new_tokens": 4}, {"max_new_tokens": 4, "num_beams": 2}]

    plain = run_ranks(steps_around, [], plugin, num_ranks=2)
    between = run_ranks(steps_around, calls, plugin, num_ranks=2)

    for before, after in zip(plain, between, strict=True):
        assert before[:3] == after[:3]
        assert all(torch.equal(a, b) for a, b in zip(before[3:], after[3:], strict=True))


def differing(recipe: TinyModel) -> list[str]:
    """Call with what one rank alone gets wrong, and with what differs between the ranks."""
    model = start(recipe, tp_degree=2).model
    rank = model.session.ranks.tp_rank
    batch = prompts(3, 7)
    told = [
        refusal_of(model, batch, {"max_new_tokens": 4, "top_p": 0.5 + rank}),
        refusal_of(model, batch, {"max_new_tokens": 4 + rank}),
        refusal_of(model, (batch[0] // (1 + rank), batch[1]), {"max_new_tokens": 4}),
        refusal_of(model, (batch[0] + 98, batch[1]), {"max_new_tokens": 4}),
        refusal_of(model, (batch[0] if rank else None,), {"max_new_tokens": 4}),
    ]
    model.megatron_generate(*batch, max_new_tokens=2)  # and then it works
    return told


def test_what_one_rank_gets_wrong_is_refused_on_all() -> None:
    results = run_ranks(differing, TWO_LAYERS, num_ranks=2)

    assert results[0] == results[1]
    for text, expected in zip(
        results[0],
        (
            "rank 1: top_p is 1.5",
            "different settings",
            "The prompts differ between ranks 0, 1",
            "the model's are 0 to 98",
            "rank 0: input_ids is a NoneType",
        ),
        strict=True,
    ):
        assert expected in text


class Reader:
    """A streamer that counts what it is given, and may go away at one of its tokens."""

    def __init__(self, last_put: int | None = None) -> None:
        self.num_puts = 0
        self._last_put = last_put

    def put(self, _tokens: torch.Tensor) -> None:
        self.num_puts += 1
        if self.num_puts == self._last_put:
            raise BrokenPipeError("nobody reads")

    def end(self) -> None:
        assert self._last_put is None, "a streamer that failed is not ended"


def broken_streams(recipe: TinyModel, plugin: dict[str, Any]) -> tuple[str, int]:
    """Let the last rank's streamer fail; return what this rank raises, and its streamer's puts."""
    model = start(recipe, **plugin).model
    is_last = dist.get_rank() == dist.get_world_size() - 1
    reader = Reader(last_put=4 if is_last else None)
    asked = {"max_new_tokens": 20, "eos_token_id": [], "streamer": reader}
    text = refusal_of(model, prompts(3, 7), asked)
    model.megatron_generate(*prompts(3, 7), max_new_tokens=2)  # and then it works
    return text, reader.num_puts


def test_a_streamer_that_fails_on_one_rank_ends_the_call_on_all() -> None:
    results = run_ranks(broken_streams, TWO_LAYERS, {"tp_degree": 2}, num_ranks=4)

    told = "rank 3: BrokenPipeError: nobody reads"
    assert results == [(told, 21), (told, 21), (told, 4), (told, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "plugin", "puts_of_the_other"),
    [
        (TWO_LAYERS, {"pp_degree": 2}, 4),
        (TWO_LAYERS, {}, 21),
        (TinyModel("mixtral"), {"expert_model_parallel_size": 2}, 4),
    ],
    ids=["pp2", "dp2", "ep2"],
)
def test_a_streamer_that_fails_ends_the_call_on_other_layouts(
    recipe: TinyModel, plugin: dict[str, Any], puts_of_the_other: int
) -> None:
    results = run_ranks(broken_streams, recipe, plugin, num_ranks=2)

    told = "rank 1: BrokenPipeError: nobody reads"
    assert results == [(told, puts_of_the_other), (told, 4)]


def products_of_each_token(recipe: TinyModel, batch_size: int) -> list[int]:
    """Return the floating-point operations of all linear layers, for each new token."""
    model = start(recipe).model
    counts: list[int] = []

    class Notes:
        def put(self, _tokens: torch.Tensor) -> None:
            by_operation = counter.get_flop_counts().get("Global", {})
            counts.append(sum(by_operation.get(op, 0) for op in (aten.mm, aten.addmm)))

        def end(self) -> None:
            pass

    ids = prompts(5)[0].expand(batch_size, -1)
    with FlopCounterMode(display=False) as counter:
        model.megatron_generate(ids, max_new_tokens=48, eos_token_id=[], streamer=Notes())
    return [after - before for before, after in itertools.pairwise(counts)]


@pytest.mark.parametrize("recipe", [TWO_LAYERS, TinyModel("llama")], ids=["gpt2", "llama"])
def test_a_token_takes_the_same_products_however_many_came_before(recipe: TinyModel) -> None:
    [(prompt, *tokens)] = run_ranks(products_of_each_token, recipe, 2, num_ranks=1)

    assert len(tokens) == 47
    assert set(tokens) == {tokens[0]}
    assert 0 < tokens[0] < prompt / 2


@pytest.mark.parametrize(
    ("recipe", "plugin", "expected"),
    [
        (UNTIED, {"use_custom_fsdp": True}, "use_custom_fsdp is True"),
        (
            TWO_LAYERS,
            {"custom_model_provider_function": own_model},
            "(gpt2) is another kind of model, or comes from custom_model_provider_function",
        ),
        (
            TinyModel("mixtral", changes={"num_hidden_layers": 2}),
            {"other_megatron_args": {"moe_expert_capacity_factor": 1.0}},
            "moe_expert_capacity_factor is 1.0",
        ),
    ],
    ids=["fsdp", "provider", "capacity"],
)
def test_models_that_cannot_generate_are_refused_by_name(
    recipe: TinyModel, plugin: dict[str, Any], expected: str
) -> None:
    calls = [(prompts(3), {"max_new_tokens": 2})]

    results = run_ranks(refusals, recipe, plugin, calls, num_ranks=2)

    assert results[0] == results[1]
    assert expected in results[0][0]


OTHER_LAYOUTS: dict[str, tuple[TinyModel, int, dict[str, Any]]] = {
    "interleaved": (
        TinyModel("llama"),
        2,
        {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 2},
    ),
    "window": (TinyModel("mistral", changes={"sliding_window": 5}), 2, {"tp_degree": 2}),
    "sp-experts": (TinyModel("qwen3_moe"), 2, {"tp_degree": 2, "sequence_parallelism": True}),
    "context": (TinyModel("llama"), 2, {"context_parallel_size": 2}),
    "partial-rotary": (TinyModel("glm4_moe"), 2, {"pp_degree": 2}),
    "latent": (TinyModel("deepseek_v3"), 2, {"tp_degree": 2, "sequence_parallelism": True}),
    "shared-groups": (TinyModel("llama"), 4, {"tp_degree": 4}),
    "biases": (TinyModel("starcoder2"), 2, {"tp_degree": 2}),
    "norm-biases": (TinyModel("stablelm"), 2, {"tp_degree": 2}),
    "shared-expert": (TinyModel("qwen2_moe"), 2, {"pp_degree": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_tokens_are_those_of_transformers_on_other_axes(name: str) -> None:
    recipe, num_ranks, plugin = OTHER_LAYOUTS[name]
    calls = [
        (prompts(3, 7), {"max_new_tokens": 12}),
        (prompts(3, 7), {"max_new_tokens": 12, "num_beams": 3}),
    ]

    results = run_ranks(generated, recipe, plugin, calls, num_ranks=num_ranks)

    for tokens in results:
        for got, (batch, asked) in zip(tokens, calls, strict=True):
            assert torch.equal(got, reference(recipe, batch, **asked))


def with_experts_over_replicas() -> tuple[int, list[torch.Tensor]]:
    model = start(TinyModel("mixtral"), expert_model_parallel_size=2).model
    dp_rank = model.session.ranks.dp_rank
    calls = ({"max_new_tokens": 12}, {"max_new_tokens": 12, "num_beams": 3})
    batch = expert_prompts(dp_rank)
    return dp_rank, [model.megatron_generate(*batch, **asked) for asked in calls]


def expert_prompts(dp_rank: int) -> Any:
    return prompts(3, 7) if dp_rank == 0 else prompts(5, seed=9)


@pytest.mark.slow
def test_replicas_that_share_experts_wait_for_each_other() -> None:
    for dp_rank, (greedy, beams) in run_ranks(with_experts_over_replicas, num_ranks=2):
        batch = expert_prompts(dp_rank)
        assert torch.equal(greedy, reference(TinyModel("mixtral"), batch, max_new_tokens=12))
        want = reference(TinyModel("mixtral"), batch, max_new_tokens=12, num_beams=3)
        assert torch.equal(beams, want)


@pytest.mark.slow
def test_bf16_generates_the_tokens_of_one_rank_over_stages() -> None:
    num_ranks, plugin = LAYOUTS["pp2"]
    calls = [(prompts(3, 7), {"max_new_tokens": 12})]

    [[alone]] = run_ranks(generated, TWO_LAYERS, {}, calls, "bf16", num_ranks=1)
    staged = run_ranks(generated, TWO_LAYERS, plugin, calls, "bf16", num_ranks=num_ranks)

    assert all(torch.equal(tokens[0], alone) for tokens in staged)
