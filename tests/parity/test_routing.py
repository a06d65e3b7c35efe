"""Every token is processed by the experts that transformers chooses for it."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from accelerate_megatron import Accelerator, MegatronLMPlugin, engine
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples

IDS = pad_samples(ragged_samples(4))["input_ids"]


def experts_of_tokens(model: TinyModel) -> list[torch.Tensor]:
    """Return by layer with experts which ones each token went to, bool [s x b, experts]."""
    accelerator = Accelerator(
        cpu=True, megatron_lm_plugin=MegatronLMPlugin(expert_model_parallel_size=2)
    )
    prepared = accelerator.prepare(model.build()).eval()
    chosen: list[torch.Tensor] = []
    for name, module in prepared.session.chunks[0].named_modules():
        if name.endswith("mlp.router"):
            module.register_forward_hook(lambda _module, _given, output: chosen.append(output[1]))
    engine.model_logits(prepared.session.chunks, prepared.session.run, IDS)
    return [routing_map.bool() for routing_map in chosen]


def transformers_choice(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the same of a Hugging Face model."""
    chosen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _module, _given, output: chosen.append(output[2]))
    with torch.no_grad():
        model.eval()(IDS)
    return chosen


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_the_experts_of_each_token_are_those_that_transformers_chooses(family: str) -> None:
    model = TinyModel(family)
    ranks = run_ranks(experts_of_tokens, model, num_ranks=2)

    wanted = transformers_choice(model.build())
    assert len(wanted) >= 3
    for layers in ranks:
        assert len(layers) == len(wanted)
        for routing_map, indices in zip(layers, wanted, strict=True):
            num_experts = routing_map.shape[1]
            by_row = torch.zeros(IDS.numel(), num_experts, dtype=torch.bool)
            by_row.scatter_(1, indices.reshape(IDS.numel(), -1), True)
            # Megatron counts tokens position by position, transformers row by row.
            by_position = by_row.view(*IDS.shape, num_experts).transpose(0, 1).flatten(0, 1)
            assert torch.equal(routing_map, by_position)
