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
from accelerate_megatron.generation.pace import Pace
from accelerate_megatron.generation.prompts import Prompts, check_tokens, read_prompts
from accelerate_megatron.generation.sampling import uniforms
from accelerate_megatron.generation.settings import (
    GenerationSettings,
    ModelTokens,
    resolve_settings,
)
from accelerate_megatron.weights.holders import gather_objects


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
    streams: bool


@dataclass(frozen=True)
class _Agreed:
    """What all ranks generate, as this one does."""

    settings: GenerationSettings
    prompts: Prompts
    first_row: int
    """Number of this replica's first prompt over all replicas."""
    streaming_ranks: frozenset[int]


def generate(
    model: GeneratingModel, input_ids: Any, attention_mask: Any, asked: Mapping[str, Any]
) -> torch.Tensor:
    """Return the prompts with their new tokens, int64 [b, s + new]; all ranks call it.

    Of a model with an encoder, what its decoder says: int64 [b, 1 + new].

    Args:
        model: The model.
        input_ids: int [b, s]; equal on the ranks of a replica.
        attention_mask: [b, s] or None.
        asked: The other arguments of `megatron_generate`.

    Raises:
        GenerationError: On any rank something does not fit, or a streamer failed; alike on every
            rank.
    """
    agreed = _agreed(model, input_ids, attention_mask, asked)
    settings, prompts = agreed.settings, agreed.prompts
    decoder, rows = _begin(model, prompts, settings)
    pace = Pace(_ending_together(model, agreed.streaming_ranks), asked.get("streamer"))
    pace.put(rows.as_given(rows.tokens, settings.pad_token_id))
    if settings.num_beams > 1:
        is_source = dist.get_rank() == decoder.source
        tokens = search_beams(decoder, rows, settings, pace, is_source=is_source)
    else:
        choice = _token_choice(model, agreed)
        tokens = continue_rows(decoder, rows, settings, choice, pace)
    if agreed.streaming_ranks:
        on_every_rank(pace.finish, gather_objects, otherwise=GenerationError)
    return rows.as_given(tokens, settings.pad_token_id)


def _begin(
    model: GeneratingModel, prompts: Prompts, settings: GenerationSettings
) -> tuple[engine.Decoder, Prompts]:
    """Return what reads tokens, and the rows that it begins with."""
    parts = (model.chunks, model.run, model.ranks, model.device)
    if model.run.shape.encoder_decoder is None:
        return engine.Decoder(*parts), prompts
    assert settings.decoder_start_token_id is not None
    decoder = engine.TwoStackDecoder(*parts, prompts=prompts.tokens, is_padding=prompts.is_padding)
    return decoder, prompts.answers(settings.decoder_start_token_id)


def _token_choice(model: GeneratingModel, agreed: _Agreed) -> TokenChoice:
    settings, prompts = agreed.settings, agreed.prompts
    if not settings.do_sample:
        return TokenChoice(settings, None)
    seed = model.run.seed + model.num_calls if settings.seed is None else settings.seed
    numbers = uniforms(seed, agreed.first_row, len(prompts.tokens), prompts.max_new_tokens)
    return TokenChoice(settings, numbers.to(model.device))


def _ending_together(
    model: GeneratingModel, streaming_ranks: frozenset[int]
) -> dist.ProcessGroup | None:
    """Return the ranks that have to tell each other that they end; None: this one has none.

    Replicas that share experts exchange tokens until the last one is done. The ranks of a replica
    know the same tokens, but not whether a streamer of one of them has failed.
    """
    if model.run.layout.ep_size > 1:
        return dist.group.WORLD
    members = model.ranks.all_replicas[model.ranks.dp_rank]
    streams = not streaming_ranks.isdisjoint(members)
    return model.ranks.replica_group if streams and len(members) > 1 else None


def _agreed(
    model: GeneratingModel, input_ids: Any, attention_mask: Any, asked: Mapping[str, Any]
) -> _Agreed:
    """Return what all ranks agree on.

    Raises:
        GenerationError: Alike on every rank.
    """
    resolved: list[tuple[GenerationSettings, Prompts]] = []

    def resolve() -> _Call:
        resolved.append(_resolve(model, input_ids, attention_mask, asked))
        return _call_of(*resolved[0], streams=asked.get("streamer") is not None)

    calls = on_every_rank(resolve, gather_objects, otherwise=GenerationError)
    problem = _difference(calls, model)
    if problem:
        raise GenerationError(problem)
    before = model.ranks.all_replicas[: model.ranks.dp_rank]
    return _Agreed(
        *resolved[0],
        first_row=sum(calls[members[0]].num_rows for members in before),
        streaming_ranks=frozenset(rank for rank, call in enumerate(calls) if call.streams),
    )


def _resolve(
    model: GeneratingModel, input_ids: Any, attention_mask: Any, asked: Mapping[str, Any]
) -> tuple[GenerationSettings, Prompts]:
    run = model.run
    _check_model(model)
    vocabulary = run.shape.vocab_size
    has_encoder = run.shape.encoder_decoder is not None
    known = ModelTokens.of(model.configs, vocabulary, has_encoder=has_encoder)
    settings = resolve_settings(asked, known)
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
            "megatron_generate runs models with a decoder that prepare builds; this one "
            f"({model.run.shape.model_type}) is another kind of model, or comes from "
            "custom_model_provider_function. Save it, and generate with transformers."
        )
    experts = model.run.experts
    if model.run.shape.experts is not None and experts.capacity_factor is not None:
        raise GenerationError(
            f"moe_expert_capacity_factor is {experts.capacity_factor}: with it, which tokens an "
            "expert drops depends on the other prompts. Generate in a job without it: "
            "accelerate-megatron generate."
        )


def _call_of(settings: GenerationSettings, prompts: Prompts, *, streams: bool) -> _Call:
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
        streams=streams,
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
