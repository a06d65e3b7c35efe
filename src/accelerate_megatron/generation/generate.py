"""`megatron_generate`: from a call on every rank to the tokens on every rank."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate_megatron import engine
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.errors import GenerationError
from accelerate_megatron.failures import on_every_rank
from accelerate_megatron.generation.loop import TokenChoice, continue_rows, search_beams
from accelerate_megatron.generation.prompts import Prompts, check_tokens, read_prompts
from accelerate_megatron.generation.sampling import uniforms
from accelerate_megatron.generation.settings import (
    GenerationSettings,
    ModelTokens,
    resolve_settings,
)


@dataclass(frozen=True, kw_only=True)
class GeneratingModel:
    """A prepared model as generation needs it."""

    chunks: list[torch.nn.Module]
    run: RunConfig
    ranks: engine.Ranks
    device: torch.device
    configs: Sequence[Any]
    """Hugging Face configs that say which tokens begin, end and pad, the first one first."""
    num_calls: int
    """Calls before this one; sampling without a seed starts from it."""


@dataclass(frozen=True)
class _Call:
    """What each rank tells the others of its call before the first token."""

    settings: str
    prompts: str
    num_rows: int
    width: int
    max_new_tokens: int


def generate(
    model: GeneratingModel, input_ids: Any, attention_mask: Any, asked: Mapping[str, Any]
) -> torch.Tensor:
    """Return the prompts with their new tokens, int64 [b, s + new]; all ranks call it.

    Args:
        model: The model.
        input_ids: int [b, s]; equal on the ranks of a replica.
        attention_mask: [b, s] or None.
        asked: The other arguments of `megatron_generate`.

    Raises:
        GenerationError: On any rank something does not fit; alike on every rank.
    """
    settings, prompts, first_row = _agreed(model, input_ids, attention_mask, asked)
    ranks = model.ranks
    decoder = engine.Decoder(model.chunks, model.run, ranks, model.device)
    streamer = asked.get("streamer")
    if streamer is not None:
        streamer.put(prompts.as_given(prompts.tokens, settings.pad_token_id).cpu())
    all_done = _together if model.run.layout.ep_size > 1 else bool
    if settings.num_beams > 1:
        is_source = dist.get_rank() == decoder.source
        tokens = search_beams(decoder, prompts, settings, is_source=is_source, all_done=all_done)
    else:
        numbers = None
        if settings.do_sample:
            seed = model.run.seed + model.num_calls if settings.seed is None else settings.seed
            rows = prompts.tokens.shape[0]
            numbers = uniforms(seed, first_row, rows, prompts.max_new_tokens).to(model.device)
        choice = TokenChoice(settings, numbers)
        tokens = continue_rows(
            decoder, prompts, settings, choice, all_done=all_done, streamer=streamer
        )
    if streamer is not None:
        streamer.end()
    return prompts.as_given(tokens, settings.pad_token_id)


def _agreed(
    model: GeneratingModel, input_ids: Any, attention_mask: Any, asked: Mapping[str, Any]
) -> tuple[GenerationSettings, Prompts, int]:
    """Return settings, prompts and the number of the first one over all replicas.

    Raises:
        GenerationError: Alike on every rank.
    """
    resolved: list[tuple[GenerationSettings, Prompts]] = []

    def resolve() -> _Call:
        resolved.append(_resolve(model, input_ids, attention_mask, asked))
        return _call_of(*resolved[0])

    calls = on_every_rank(resolve, _gather, otherwise=GenerationError)
    problem = _difference(calls, model)
    if problem:
        raise GenerationError(problem)
    before = model.ranks.all_replicas[: model.ranks.dp_rank]
    return *resolved[0], sum(calls[members[0]].num_rows for members in before)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _resolve(
    model: GeneratingModel, input_ids: Any, attention_mask: Any, asked: Mapping[str, Any]
) -> tuple[GenerationSettings, Prompts]:
    run = model.run
    _check_model(model)
    vocabulary = run.shape.vocab_size
    settings = resolve_settings(asked, ModelTokens.of(model.configs, vocabulary))
    prompts = read_prompts(
        input_ids, attention_mask, settings, max_positions=run.shape.max_positions or sys.maxsize
    )
    check_tokens(prompts.tokens, vocabulary)
    prompts = Prompts(
        tokens=prompts.tokens.to(model.device),
        lengths=prompts.lengths.to(model.device),
        padded_right=prompts.padded_right,
        max_new_tokens=prompts.max_new_tokens,
    )
    return settings, prompts


def _check_model(model: GeneratingModel) -> None:
    """Refuse models that cannot generate.

    Raises:
        GenerationError: This one cannot.
    """
    if model.run.use_fsdp:
        raise GenerationError(
            "use_custom_fsdp is True, and layers whose weights are spread over the ranks cannot "
            "generate. Save the model and generate in a job without it: accelerate-megatron "
            "generate."
        )
    if not engine.can_decode(model.chunks):
        raise GenerationError(
            "megatron_generate runs the layers of decoder-only models that prepare builds; this "
            f"one ({model.run.shape.model_type}) is another kind of model, or comes from "
            "custom_model_provider_function. Save it, and generate with transformers."
        )
    experts = model.run.experts
    if model.run.shape.experts is not None and experts.capacity_factor is not None:
        raise GenerationError(
            f"moe_expert_capacity_factor is {experts.capacity_factor}: with it, which tokens an "
            "expert drops depends on the other prompts. Generate in a job without it: "
            "accelerate-megatron generate."
        )


def _call_of(settings: GenerationSettings, prompts: Prompts) -> _Call:
    digest = hashlib.blake2b(digest_size=16)
    for values in (prompts.tokens, prompts.lengths):
        digest.update(values.cpu().contiguous().numpy().tobytes())
    rows, width = prompts.tokens.shape
    return _Call(
        settings=repr(settings),
        prompts=f"{digest.hexdigest()} {prompts.padded_right}",
        num_rows=rows,
        width=width,
        max_new_tokens=prompts.max_new_tokens,
    )


def _difference(calls: Sequence[_Call], model: GeneratingModel) -> str:
    """Return what all ranks raise, or an empty string."""
    if len({call.settings for call in calls}) > 1:
        return (
            "The ranks call megatron_generate with different settings; give the same on every "
            f"rank:\n  rank 0: {calls[0].settings}\n  "
            + next(
                f"rank {rank}: {call.settings}"
                for rank, call in enumerate(calls)
                if call.settings != calls[0].settings
            )
        )
    for members in model.ranks.all_replicas:
        if len({calls[rank].prompts for rank in members}) > 1:
            return (
                f"The prompts differ between ranks {', '.join(map(str, members))}, which work on "
                "the same ones: they are one data-parallel replica. Give each replica its own."
            )
    return _experts_problem(calls, model.run)


def _experts_problem(calls: Sequence[_Call], run: RunConfig) -> str:
    """Say what does not fit where replicas exchange tokens of experts in every step."""
    if run.layout.ep_size == 1:
        return ""
    if len({call.max_new_tokens for call in calls}) > 1:
        return (
            "expert_model_parallel_size is above 1, so all replicas generate together, but their "
            "prompts leave room for different numbers of new tokens; give max_new_tokens."
        )
    sizes = {(call.num_rows, call.width) for call in calls}
    if run.needs_equal_lengths and len(sizes) > 1:
        return (
            "moe_token_dispatcher_type is 'allgather', with which all replicas need prompts of "
            f"one shape; they have {', '.join(map(str, sorted(sizes)))}. Pad them."
        )
    return ""


def _together(is_done: bool) -> bool:
    """Say whether all ranks are done: replicas that share experts end together."""
    backend = dist.get_backend()
    flag = torch.tensor([int(is_done)], device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
