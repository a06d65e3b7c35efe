"""How the ranks of a job are cut up, and what a model must satisfy to fit. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_megatron.config.context_rules import (
    context_model_problems,
    context_world_problems,
    sequence_multiple,
)
from accelerate_megatron.config.encoder_decoder_rules import (
    encoder_decoder_problems,
    stages_of_stacks,
)
from accelerate_megatron.config.expert_rules import expert_model_problems, expert_world_problems
from accelerate_megatron.config.nearest import divisors, either, nearest_layouts, nearest_multiples
from accelerate_megatron.config.pipeline_rules import (
    interleaving_problems,
    pipeline_problems,
    stage_layers,
)
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The size of each axis of the job, and the rules that tie them to the world and the model.

    Sizes count ranks; 1 means that the axis is not used. The data-parallel size is not a
    field: it is what the other axes leave of the world (`dp_size`).

    Rank order is Megatron's "tp-cp-ep-dp-pp": tensor-parallel neighbours are adjacent,
    pipeline stages farthest apart.
    """

    world_size: int
    tp_size: int = 1
    pp_size: int = 1
    layers_per_virtual_stage: int | None = None
    """Layers of one model chunk under interleaved 1F1B; None: one chunk per stage."""
    split_rank: int | None = None
    """The first stage with decoder layers, of a model with an encoder; None: of any other."""
    last_stage_layers: int | None = None
    """Layers of the last stage; None: as many as on the others."""
    sequence_parallel: bool = False
    cp_size: int = 1
    """Ranks that a sequence is spread over."""
    cp_comm_type: str = "all_gather"
    """How context-parallel ranks see each other's tokens; see `context_rules`."""
    ep_size: int = 1
    """Ranks that the experts of a layer are spread over."""
    etp_size: int = 1
    """Ranks that share one expert; Megatron's own default would be `tp_size`."""

    @property
    def model_size(self) -> int:
        """Ranks that one copy of the model takes."""
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def dp_size(self) -> int:
        """Copies of the model in the world."""
        return self.world_size // self.model_size

    @property
    def sequence_multiple(self) -> int:
        """What a sequence is padded to a multiple of."""
        return sequence_multiple(cp_size=self.cp_size, split_over=self.sequence_split_over)

    @property
    def sequence_split_over(self) -> int:
        """Tensor-parallel ranks that share a sequence: all under sequence parallelism, else 1."""
        return self.tp_size if self.sequence_parallel else 1

    def layers_of_stages(self, num_layers: int) -> list[int]:
        """Layers of each pipeline stage, first to last."""
        return stage_layers(
            num_layers, pp_size=self.pp_size, last_stage_layers=self.last_stage_layers
        )

    def layers_of_blocks(self, shape: ModelShape) -> list[int]:
        """Layers of each stack of layers on each stage: one stack, or an encoder's and a decoder's.

        The layers of an encoder-decoder model must divide; see `encoder_decoder_problems`.
        """
        if shape.encoder_decoder is None:
            return self.layers_of_stages(shape.num_layers)
        encoder_stages, decoder_stages = stages_of_stacks(self.pp_size, self.split_rank)
        encoder = shape.encoder_decoder.num_encoder_layers // encoder_stages
        decoder = shape.num_layers // decoder_stages
        return [encoder] * encoder_stages + [decoder] * decoder_stages

    def chunks_per_stage(self, num_layers: int) -> int | None:
        """Model chunks on each stage when interleaved, else None."""
        if self.layers_per_virtual_stage is None:
            return None
        return self.layers_of_stages(num_layers)[0] // self.layers_per_virtual_stage

    def padded_vocab_size(self, vocab_size: int, divisible_by: int = 128) -> int:
        """Rows of the vocabulary tensors: `vocab_size` up to a multiple of divisible_by * tp.

        Source: Megatron-LM, `_vocab_size_with_padding`.
        """
        multiple = divisible_by * self.tp_size
        return -(-vocab_size // multiple) * multiple

    def world_problems(self) -> list[str]:
        """What is wrong with the sizes alone; empty when nothing is."""
        problems = [
            f"{name} is {size}; it must be at least 1."
            for name, size in (
                ("tp_degree", self.tp_size),
                ("pp_degree", self.pp_size),
                ("context_parallel_size", self.cp_size),
                ("expert_model_parallel_size", self.ep_size),
                ("expert_tensor_parallel_size", self.etp_size),
            )
            if size < 1
        ]
        if problems:
            return problems
        problems += context_world_problems(self.cp_comm_type)
        if self.world_size % self.model_size:
            problems.append(
                f"{self.world_size} ranks cannot hold tp_degree={self.tp_size} x "
                f"{self._context_factor()}pp_degree={self.pp_size} = {self.model_size}: the "
                f"number of ranks must be a multiple of {self.model_size}, such as "
                f"{nearest_multiples(self.world_size, self.model_size)}."
            )
        else:
            problems += expert_world_problems(
                world_size=self.world_size,
                ep_size=self.ep_size,
                etp_size=self.etp_size,
                pp_size=self.pp_size,
            )
        if self.sequence_parallel and self.tp_size == 1:
            problems.append(
                "sequence_parallelism is on but tp_degree is 1: it splits activations over the "
                "tensor-parallel ranks. Set tp_degree to 2 or more, or sequence_parallelism off."
            )
        if self.layers_per_virtual_stage is not None and self.pp_size == 1:
            problems.append(
                f"num_layers_per_virtual_pipeline_stage is {self.layers_per_virtual_stage} but "
                "pp_degree is 1: virtual stages interleave a pipeline. Set pp_degree to 2 or "
                "more, or leave num_layers_per_virtual_pipeline_stage out."
            )
        return problems

    def _context_factor(self) -> str:
        return f"context_parallel_size={self.cp_size} x " if self.cp_size > 1 else ""

    def model_problems(self, shape: ModelShape, num_micro_batches: int) -> list[str]:
        """Why `shape` cannot be cut up this way; empty when it can.

        Args:
            shape: The model.
            num_micro_batches: Micro-batches per update.
        """
        return [
            *self._tensor_problems(shape),
            *self._pipeline_problems(shape, num_micro_batches),
            *context_model_problems(
                shape,
                cp_size=self.cp_size,
                tp_size=self.tp_size,
                cp_comm_type=self.cp_comm_type,
                world_size=self.world_size,
            ),
            *expert_model_problems(
                shape,
                ep_size=self.ep_size,
                etp_size=self.etp_size,
                tp_size=self.tp_size,
                sequence_parallel=self.sequence_parallel,
            ),
        ]

    def _tensor_problems(self, shape: ModelShape) -> list[str]:
        bad = _sizes_not_divided(shape, self.tp_size)
        if not bad:
            return []
        listed = ", ".join(f"{size} {what}" for what, size in bad.items())
        working = [tp for tp in divisors(self.world_size) if not _sizes_not_divided(shape, tp)]
        return [
            f"tp_degree={self.tp_size} must divide each of the model's sizes, and it does not "
            f"divide {listed}. On {self.world_size} ranks, tp_degree can be {either(working)}."
        ]

    def _pipeline_problems(self, shape: ModelShape, num_micro_batches: int) -> list[str]:
        if shape.encoder_decoder is not None:
            return encoder_decoder_problems(
                shape.encoder_decoder.num_encoder_layers,
                shape.num_layers,
                pp_size=self.pp_size,
                split_rank=self.split_rank,
                last_stage_layers=self.last_stage_layers,
                layers_per_virtual_stage=self.layers_per_virtual_stage,
            )
        if self.split_rank is not None:
            return [
                f"pipeline_model_parallel_split_rank is {self.split_rank}, the first decoder stage "
                f"of a model with an encoder, and a {shape.model_type} model has none. Leave it "
                "out."
            ]
        problems = pipeline_problems(
            shape.num_layers,
            pp_size=self.pp_size,
            last_stage_layers=self.last_stage_layers,
            world_size=self.world_size,
        )
        return problems or interleaving_problems(
            shape.num_layers,
            num_micro_batches,
            pp_size=self.pp_size,
            layers_per_virtual_stage=self.layers_per_virtual_stage,
            last_stage_layers=self.last_stage_layers,
        )

    def check(self) -> None:
        """Raise what `world_problems` finds.

        Raises:
            ConfigurationError: The sizes do not fit the world or each other; names the nearest
                layouts whose sizes do.
        """
        problems = self.world_problems()
        if problems:
            sizes = (self.tp_size, self.pp_size, self.cp_size, self.ep_size, self.etp_size)
            nearest = (
                nearest_layouts(self, lambda other: not other.world_problems())
                if min(sizes) >= 1
                else None
            )
            raise ConfigurationError.of(problems, advice=nearest)


def _sizes_not_divided(shape: ModelShape, tp_size: int) -> dict[str, int]:
    """Return the sizes that cannot be split over `tp_size` ranks, by what they count.

    With fewer key/value heads than ranks, several ranks share one: Megatron then gathers the
    projections, and cuts their rows evenly wherever the heads begin.
    """
    sizes = {
        "attention heads": shape.num_attention_heads,
        "hidden channels": shape.hidden_size,
    }
    if shape.has_dense_layers:
        sizes["feed-forward channels"] = shape.ffn_hidden_size
    groups = shape.num_query_groups
    if groups >= tp_size or tp_size % groups:
        sizes["key/value heads"] = groups
    else:
        sizes["key and value channels"] = 2 * groups * shape.kv_channels
    return {what: size for what, size in sizes.items() if size % tp_size}
