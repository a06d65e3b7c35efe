"""Building the model chunks of this rank, and seeing them as shards of the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.engine import translate
from accelerate_megatron.engine.bert import BertChunk
from accelerate_megatron.engine.encoder_decoder import EncoderDecoderStage
from accelerate_megatron.engine.experts import keep_routers_in_fp32, mark_experts
from accelerate_megatron.engine.fully_sharded import FullySharded
from accelerate_megatron.engine.model import GPTChunk
from accelerate_megatron.engine.shards import Shard, shards_of_module
from accelerate_megatron.engine.wrapping import finish_parameter_gather
from accelerate_megatron.errors import ConfigurationError

ModelProvider = Callable[..., torch.nn.Module]
"""A user's function: (pre_process, post_process, ...) -> the module of one stage."""


def build_chunks(
    run: RunConfig, device: torch.device, *, provider: ModelProvider | None = None
) -> list[torch.nn.Module]:
    """Return this rank's model chunks, with uninitialised weights. Every rank calls it.

    One chunk, or one for each virtual stage. In bf16 the parameters are bf16; the
    optimizer keeps fp32 copies.

    Args:
        run: The resolved run.
        device: Where the parameters go.
        provider: Builds the module of a stage instead; see `bind_provider`.
    """
    config = translate.transformer_config(run)
    count = run.layout.chunks_per_stage(run.shape.num_layers)
    stages: Iterable[int | None] = [None] if count is None else range(count)
    if provider is None and run.shape.encoder_decoder is not None:
        chunks: list[torch.nn.Module] = [EncoderDecoderStage(run, config)]
    elif provider is None:
        kind = GPTChunk if run.shape.encoder is None else BertChunk
        chunks = [kind(run, config, stage) for stage in stages]
    else:
        chunks = [bind_provider(provider, config, stage)() for stage in stages]
    chunks = [chunk.to(device) for chunk in chunks]
    for chunk in chunks:
        mark_experts(chunk)
    if run.precision == "no":
        return chunks
    wrapped = [Float16Module(config, chunk) for chunk in chunks]
    for chunk in wrapped:
        keep_routers_in_fp32(chunk)
    return wrapped


def bind_provider(
    provider: ModelProvider, config: TransformerConfig, stage: int | None = None
) -> ModelProvider:
    """Return `provider` with what it takes of this rank's place filled in.

    Passed by name, where its signature has them: `pre_process` and `post_process`, whether the
    stage holds the embedding and the output layer; `config`, the run as Megatron's
    TransformerConfig; `vp_stage`, the index of the chunk under interleaving.
    """
    place = {"ignore_virtual": False, "vp_stage": stage}
    offered = {
        "pre_process": parallel_state.is_pipeline_first_stage(**place),
        "post_process": parallel_state.is_pipeline_last_stage(**place),
        "config": config,
        "vp_stage": stage,
    }
    taken = inspect.signature(provider).parameters
    takes_all = any(kind.kind is inspect.Parameter.VAR_KEYWORD for kind in taken.values())
    return partial(
        provider, **{name: value for name, value in offered.items() if takes_all or name in taken}
    )


def prepared_chunks(
    run: RunConfig, prepare: Callable[[ModelProvider], Any], provider: ModelProvider
) -> list[torch.nn.Module]:
    """Return the wrapped chunks that a user's prepare function makes of the model provider.

    Raises:
        ConfigurationError: It returned something else than Megatron's wrapped chunks.
    """
    chunks = prepare(bind_provider(provider, translate.transformer_config(run)))
    if not isinstance(chunks, list) or not all(
        isinstance(chunk, DistributedDataParallel) for chunk in chunks
    ):
        raise ConfigurationError(
            f"custom_prepare_model_function returned {type(chunks).__name__}; it has to return "
            "the list of this rank's model chunks, each in Megatron-Core's "
            "DistributedDataParallel."
        )
    return chunks


def wrap_chunks(chunks: list[torch.nn.Module], run: RunConfig) -> list[torch.nn.Module]:
    """Return the chunks inside Megatron's DistributedDataParallel, which reduces gradients.

    Or inside FSDP2, which also splits them; their weights must be imported before.

    Called after freezing: a parameter that needs no gradient gets no buffer.
    """
    settings = translate.ddp_config(run)
    if run.use_fsdp:
        return [FullySharded(chunk.config, settings, chunk) for chunk in chunks]
    wrapped: list[torch.nn.Module] = [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=settings,
            module=chunk,
            # Only the first chunk's backward pass can overlap with its reduction.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    if settings.overlap_grad_reduce:
        # Micro-batches but the last leave their gradients where they are.
        no_sync = [chunk.no_sync for chunk in wrapped]
        get_model_config(chunks[0]).no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def model_shards(chunks: Iterable[torch.nn.Module]) -> list[Shard]:
    """Return this rank's pieces of the model's parameters, as `shards_of_module` has them."""
    chunks = list(chunks)
    finish_parameter_gather(chunks)
    shards = []
    for chunk in chunks:
        shards += chunk.shards() if isinstance(chunk, FullySharded) else shards_of_module(chunk)
    return shards


def named_parameters(
    chunks: Iterable[torch.nn.Module],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield canonical name and parameter, also where this rank holds no row of it."""
    for chunk in chunks:
        if isinstance(chunk, FullySharded):
            yield from chunk.named()
        else:
            yield from ((shard.name, shard.parameter) for shard in shards_of_module(chunk))


def parameter_norm(chunks: Iterable[torch.nn.Module]) -> float:
    """Return the L2 norm of all parameters of the model; every rank calls it."""
    shards = model_shards(chunks)
    total = torch.zeros((), dtype=torch.float64, device=shards[0].data.device)
    for shard in shards:
        if shard.is_main_replica:
            total += shard.data.detach().double().square().sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def freeze(chunks: Iterable[torch.nn.Module], trainable: Collection[str]) -> None:
    """Let only the parameters of the canonical names `trainable` receive gradients."""
    for shard in model_shards(chunks):
        if isinstance(shard.parameter, torch.nn.Parameter):
            shard.parameter.requires_grad_(shard.name in trainable)
