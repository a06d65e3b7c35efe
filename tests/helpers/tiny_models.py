"""Tiny Hugging Face models, batches and optimizers, made in code and equal on both sides.

The oracle and the ranks under test build the same model from the same `TinyModel`. Nothing here
imports accelerate_megatron: the oracle's process imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.helpers.rotary_positions import turn_positions
from tests.helpers.tiny_encoders import ENCODERS, MAX_POSITIONS, VOCAB_SIZE, encoder_config


@dataclass(frozen=True)
class TinyModel:
    """A recipe: the same one gives the same weights everywhere.

    `changes` overrides fields of the Hugging Face config; dropout is 0 unless it says otherwise.
    A GPT-2 or BERT with `rotary_base` has rotary positions of that base, and none of its own.
    """

    family: str = "gpt2"
    tied: bool = True
    seed: int = 1234
    changes: dict[str, Any] = field(default_factory=dict)
    rotary_base: float | None = None

    def config(self) -> PreTrainedConfig:
        """Return the Hugging Face config: 4 layers, hidden 64, 4 heads, vocabulary 99."""
        return _CONFIGS[self.family](self)

    def build(self) -> PreTrainedModel:
        """Return the model in fp32 and training mode; the global random state does not move."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = _CLASSES[self.family](self.config())
            if self.family in ("t5", "mt5") and not self.tied:
                # Their configs always say tied; transformers unties what a folder holds twice.
                model.lm_head.weight = torch.nn.Parameter(
                    torch.randn_like(model.shared.weight) * 0.2
                )
            _move_away_from_defaults(model)
        if self.rotary_base is not None:
            turn_positions(model, self.rotary_base)
        model.train()
        return model


def _gpt2_config(recipe: TinyModel) -> GPT2Config:
    fields: dict[str, Any] = {
        "n_layer": 4,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": VOCAB_SIZE,
        "n_positions": MAX_POSITIONS,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        # Large enough for gradients that are not lost in the noise of fp32.
        "initializer_range": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
        "tie_word_embeddings": recipe.tied,
    }
    return GPT2Config(**(fields | recipe.changes))


def _decoder_config(config_class: type[PreTrainedConfig], recipe: TinyModel) -> PreTrainedConfig:
    """Return a config of a Llama or one of its kin, which name their fields alike."""
    fields: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "attention_dropout": 0.0,
        "initializer_range": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        "use_cache": False,
        "tie_word_embeddings": recipe.tied,
        **_EXPERT_FIELDS.get(recipe.family, {}),
    }
    return config_class(**(fields | recipe.changes))


def _t5_config(config_class: type[PreTrainedConfig], recipe: TinyModel) -> PreTrainedConfig:
    """Return a config with stacks of 6 layers, and heads that do not divide the hidden size.

    tied=False is v1.1: the output is not scaled, and `TinyModel.build` gives it a head.
    """
    fields: dict[str, Any] = {
        "num_layers": 6,
        "num_decoder_layers": 6,
        "d_model": 64,
        "d_kv": 24,
        "d_ff": 96,
        "num_heads": 4,
        "vocab_size": VOCAB_SIZE,
        # Few enough for sequences of 32 tokens to reach the last bucket.
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
        "dropout_rate": 0.0,
        "initializer_factor": 0.5,
        "decoder_start_token_id": 3,
        "pad_token_id": 2,
        "use_cache": False,
        "tie_word_embeddings": recipe.tied,
    }
    return config_class(**(fields | recipe.changes))


_EXPERT_FIELDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 24,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 24,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
_DECODERS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "stablelm": (StableLmConfig, StableLmForCausalLM),
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM),
}


def _encoder_config(config_class: type[PreTrainedConfig], recipe: TinyModel) -> PreTrainedConfig:
    return encoder_config(config_class, recipe.changes)


_CONFIGS: dict[str, Callable[[TinyModel], PreTrainedConfig]] = {
    "gpt2": _gpt2_config,
    "t5": partial(_t5_config, T5Config),
    "mt5": partial(_t5_config, MT5Config),
    **{name: partial(_decoder_config, classes[0]) for name, classes in _DECODERS.items()},
    **{name: partial(_encoder_config, classes[0]) for name, classes in ENCODERS.items()},
}
_CLASSES: dict[str, type[PreTrainedModel]] = {
    "gpt2": GPT2LMHeadModel,
    "t5": T5ForConditionalGeneration,
    "mt5": MT5ForConditionalGeneration,
    **{name: classes[1] for name, classes in _DECODERS.items()},
    **{name: classes[1] for name, classes in ENCODERS.items()},
}


def _move_away_from_defaults(model: PreTrainedModel) -> None:
    """Give norms and biases, which start as ones and zeros, values of their own.

    A norm weight of all ones, or a bias of all zeros, is right even when it was never copied.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)


def tiny_gpt2(*, tied: bool = True, seed: int = 1234, **changes: Any) -> GPT2LMHeadModel:
    """Return a GPT-2; `changes` are fields of its config."""
    return TinyModel("gpt2", tied=tied, seed=seed, changes=changes).build()


def tiny_llama(*, tied: bool = False, seed: int = 1234, **changes: Any) -> LlamaForCausalLM:
    """Return a Llama with 2 key/value heads; `changes` are fields of its config."""
    return TinyModel("llama", tied=tied, seed=seed, changes=changes).build()


def ragged_samples(
    num_samples: int, *, max_length: int = 24, min_length: int = 9, seed: int = 7
) -> list[dict[str, torch.Tensor]]:
    """Return samples of different lengths whose first tokens are masked with -100 in the labels.

    Each is {"input_ids": [s], "attention_mask": [s], "labels": [s]}; a third of a sample's
    labels at most is masked.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    samples = []
    for _ in range(num_samples):
        length = draw(min_length, max_length)
        ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
        labels = ids.clone()
        labels[: draw(0, length // 3)] = -100
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return samples


def translation_samples(
    num_samples: int, *, encoder_length: int = 32, decoder_length: int = 16, seed: int = 7
) -> list[dict[str, torch.Tensor]]:
    """Return samples of an encoder-decoder model, of different lengths up to the two given.

    Each is {"input_ids": [s], "attention_mask": [s], "labels": [t]}; the first one has both full
    lengths, and every third one a label of -100 in the middle.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(longest: int, index: int) -> torch.Tensor:
        low = longest if index % 8 == 0 else longest // 3
        length = int(torch.randint(low, longest + 1, (), generator=generator))
        return torch.randint(0, VOCAB_SIZE, (length,), generator=generator)

    samples = []
    for index in range(num_samples):
        ids, labels = draw(encoder_length, index), draw(decoder_length, index)
        if index % 3 == 0:
            labels[2] = -100
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return samples


def pad_samples(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return one right-padded batch [b, s] of `samples`: a DataLoader's `collate_fn`."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: torch.nn.utils.rnn.pad_sequence(
            [sample[key] for sample in samples], batch_first=True, padding_value=value
        )
        for key, value in fill.items()
    }


def global_batches(
    samples: Sequence[dict[str, torch.Tensor]], rows: int
) -> list[dict[str, torch.Tensor]]:
    """Return the batches of `rows` samples in order; the last one may be shorter."""
    return [pad_samples(samples[start : start + rows]) for start in range(0, len(samples), rows)]


@dataclass(frozen=True)
class TinyOptimizer:
    """A recipe for a torch optimizer on a Hugging Face model.

    Args:
        name: "sgd", "adam" or "adamw".
        settings: Arguments of the class, such as momentum; they hold for every group.
        groups: Parameter groups, first match wins: a substring of the parameter's name and the
            group's own settings. What matches none is in the last group, without own settings.
        frozen: Substrings of the names of parameters that get no gradient.
    """

    name: str = "adamw"
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    groups: tuple[tuple[str, dict[str, Any]], ...] = ()
    frozen: tuple[str, ...] = ()

    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Freeze what is to be frozen and return the optimizer of all other parameters."""
        grouped: list[list[torch.nn.Parameter]] = [[] for _ in range(len(self.groups) + 1)]
        for name, parameter in model.named_parameters():
            if any(part in name for part in self.frozen):
                parameter.requires_grad_(False)
                continue
            grouped[self._group_of(name)].append(parameter)
        own = [settings for _, settings in self.groups] + [{}]
        groups = [
            {"params": parameters, **settings}
            for parameters, settings in zip(grouped, own, strict=True)
            if parameters
        ]
        classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        return classes[self.name](groups, **self.settings)

    def _group_of(self, name: str) -> int:
        for index, (part, _) in enumerate(self.groups):
            if part in name:
                return index
        return len(self.groups)
