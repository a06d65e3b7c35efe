"""Megatron's packed parameters written down by hand, and cut as tensor parallelism cuts them.

The reference for the conversion: it knows neither tables nor segments. Each packed tensor is put
together with `torch.cat`, head by head, from the Hugging Face model's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

COLUMN_PARALLEL = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")
VOCABULARY_PARALLEL = ("word_embeddings.weight", "output_layer.weight")
ROW_PARALLEL = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True)
class FakeShard:
    name: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    is_main_replica: bool = True


def packed(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the whole Megatron parameters of a GPT-2 or Llama, not padded."""
    hf = {name: value.detach() for name, value in model.named_parameters()}
    return (
        _packed_gpt2(hf, model) if model.config.model_type == "gpt2" else _packed_llama(hf, model)
    )


def _packed_gpt2(hf: Mapping[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    config = model.config
    whole = {
        "embedding.word_embeddings.weight": hf["transformer.wte.weight"],
        "embedding.position_embeddings.weight": hf["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": hf["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": hf["transformer.ln_f.bias"],
    }
    if not config.tie_word_embeddings:
        whole["output_layer.weight"] = hf["lm_head.weight"]
    for layer in range(config.n_layer):
        old, new = f"transformer.h.{layer}", f"decoder.layers.{layer}"
        attention, mlp = f"{new}.self_attention", f"{new}.mlp"
        for kind in ("weight", "bias"):
            whole[f"{attention}.linear_qkv.layer_norm_{kind}"] = hf[f"{old}.ln_1.{kind}"]
            whole[f"{mlp}.linear_fc1.layer_norm_{kind}"] = hf[f"{old}.ln_2.{kind}"]
            # A bias is 1-D: .t() leaves it as it is.
            q, k, v = hf[f"{old}.attn.c_attn.{kind}"].t().chunk(3)
            whole[f"{attention}.linear_qkv.{kind}"] = by_group(q, k, v, config.n_head)
            whole[f"{attention}.linear_proj.{kind}"] = hf[f"{old}.attn.c_proj.{kind}"].t()
            whole[f"{mlp}.linear_fc1.{kind}"] = hf[f"{old}.mlp.c_fc.{kind}"].t()
            whole[f"{mlp}.linear_fc2.{kind}"] = hf[f"{old}.mlp.c_proj.{kind}"].t()
    return whole


def _packed_llama(
    hf: Mapping[str, torch.Tensor], model: PreTrainedModel
) -> dict[str, torch.Tensor]:
    config = model.config
    whole = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        whole["output_layer.weight"] = hf["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        old, new = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attention, mlp = f"{new}.self_attention", f"{new}.mlp"
        whole[f"{attention}.linear_qkv.layer_norm_weight"] = hf[f"{old}.input_layernorm.weight"]
        whole[f"{mlp}.linear_fc1.layer_norm_weight"] = hf[f"{old}.post_attention_layernorm.weight"]
        for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
            q, k, v = (hf[f"{old}.self_attn.{name}_proj.{kind}"] for name in "qkv")
            whole[f"{attention}.linear_qkv.{kind}"] = by_group(q, k, v, config.num_key_value_heads)
            whole[f"{attention}.linear_proj.{kind}"] = hf[f"{old}.self_attn.o_proj.{kind}"]
            whole[f"{mlp}.linear_fc1.{kind}"] = torch.cat(
                [hf[f"{old}.mlp.gate_proj.{kind}"], hf[f"{old}.mlp.up_proj.{kind}"]]
            )
            whole[f"{mlp}.linear_fc2.{kind}"] = hf[f"{old}.mlp.down_proj.{kind}"]
    return whole


def by_group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_groups: int) -> torch.Tensor:
    parts = []
    for group in zip(q.chunk(num_groups), k.chunk(num_groups), v.chunk(num_groups), strict=True):
        parts += group
    return torch.cat(parts)


def cut(
    whole: Mapping[str, torch.Tensor], tp_size: int, *, padded_vocab: int, gated: bool
) -> list[list[FakeShard]]:
    """Return each tensor-parallel rank's shards, holding copies of their pieces of `whole`."""
    ranks: list[list[FakeShard]] = [[] for _ in range(tp_size)]
    for name, tensor in whole.items():
        if name.endswith(VOCABULARY_PARALLEL):
            padding = tensor.new_zeros(padded_vocab - tensor.shape[0], tensor.shape[1])
            _cut_along(ranks, name, torch.cat([tensor, padding]), dim=0)
        elif gated and "linear_fc1." in name and "layer_norm" not in name:
            # Each rank holds its part of the gate and its part of up, as two shards.
            gate, up = tensor.chunk(2)
            _cut_along(ranks, name, gate, dim=0, whole=tensor.shape)
            _cut_along(ranks, name, up, dim=0, whole=tensor.shape, first=gate.shape[0])
        elif name.endswith(COLUMN_PARALLEL):
            _cut_along(ranks, name, tensor, dim=0)
        elif name.endswith(ROW_PARALLEL):
            _cut_along(ranks, name, tensor, dim=1)
        else:
            for rank, shards in enumerate(ranks):
                shards.append(
                    FakeShard(
                        name, tensor.clone(), tuple(tensor.shape), (0,) * tensor.dim(), rank == 0
                    )
                )
    return ranks


def _cut_along(
    ranks: list[list[FakeShard]],
    name: str,
    tensor: torch.Tensor,
    *,
    dim: int,
    whole: torch.Size | None = None,
    first: int = 0,
) -> None:
    assert tensor.shape[dim] % len(ranks) == 0
    for rank, piece in enumerate(tensor.chunk(len(ranks), dim)):
        offset = [0] * tensor.dim()
        offset[dim] = first + rank * piece.shape[dim]
        global_shape = tuple(tensor.shape if whole is None else whole)
        ranks[rank].append(FakeShard(name, piece.clone(), global_shape, tuple(offset)))


def emptied(shards: list[FakeShard]) -> list[FakeShard]:
    """Return the same shards with NaN in every element, to be filled."""
    return [
        FakeShard(
            shard.name,
            torch.full_like(shard.data, torch.nan),
            shard.global_shape,
            shard.global_offset,
            shard.is_main_replica,
        )
        for shard in shards
    ]


def cut_model(
    model: PreTrainedModel, tp_size: int, padded_vocab: int = 128
) -> list[list[FakeShard]]:
    """Return each rank's shards of a Hugging Face model, packed and cut by hand."""
    gated = model.config.model_type == "llama"
    return cut(packed(model), tp_size, padded_vocab=padded_vocab, gated=gated)
