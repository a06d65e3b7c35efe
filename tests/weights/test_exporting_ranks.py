"""The same export with the shards spread over real gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from accelerate_megatron.errors import ConfigurationError, WeightsError
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.weights.exporting import (
    ExportOptions,
    FolderContents,
    gather_state_dict,
    save_hf_folder,
)
from accelerate_megatron.weights.holders import ModelHolders
from tests.helpers.ranks import run_ranks
from tests.weights.cutting import cut_model
from tests.weights.tiny import DTYPES, tiny_gpt2, tiny_llama


def _export(build, dtype, directory, options, tokenizer=None, lost=None):
    """Save a model of which each rank holds its tensor-parallel part."""
    model = build(dtype)
    ranks = ModelHolders(group=dist.group.WORLD)
    shards = cut_model(model, dist.get_world_size())[ranks.rank]
    family = family_of(model.config)
    shape = family.shape(model.config)
    save_hf_folder(
        directory,
        [shard for shard in shards if shard.name != lost],
        table=family.parameters(shape),
        shape=shape,
        contents=FolderContents(
            hf_config=model.config, architecture=family.architectures[0], tokenizer=tokenizer
        ),
        options=options,
        ranks=ranks,
    )
    # Returning means that the folder is complete, on every rank.
    return sorted(path.name for path in directory.iterdir())


def _gather(build):
    model = build()
    ranks = ModelHolders(group=dist.group.WORLD)
    family = family_of(model.config)
    shape = family.shape(model.config)
    return gather_state_dict(
        cut_model(model, dist.get_world_size())[ranks.rank],
        table=family.parameters(shape),
        shape=shape,
        ranks=ranks,
    )


class FailingTokenizer:
    def save_pretrained(self, directory):
        raise OSError("disk full")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama], ids=["gpt2", "llama"])
def test_two_ranks_write_one_folder_with_every_bit(build, dtype, tmp_path):
    directory = tmp_path / "out"

    listings = run_ranks(
        _export, build, dtype, directory, ExportOptions(max_shard_size="100KB"), num_ranks=2
    )

    assert listings[0] == listings[1]
    assert "model.safetensors.index.json" in listings[0]
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    for (name, got), (_, want) in zip(
        loaded.named_parameters(), build(dtype).named_parameters(), strict=True
    ):
        assert got.dtype == dtype
        assert torch.equal(got, want), name


def test_the_last_rank_gets_the_state_dict_and_the_others_nothing():
    first, last = run_ranks(_gather, tiny_llama, num_ranks=2)

    assert first is None
    expected = dict(tiny_llama().named_parameters())
    assert last.keys() == expected.keys()
    assert all(torch.equal(last[name], tensor) for name, tensor in expected.items())


def test_every_rank_refuses_a_folder_that_holds_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    errors = run_ranks(
        _export,
        tiny_gpt2,
        torch.float32,
        tmp_path,
        ExportOptions(overwrite=False),
        num_ranks=2,
        errors="return",
    )

    assert [type(error) for error in errors] == [ConfigurationError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "already holds a model (config.json)" in str(errors[0])


def test_every_rank_says_which_parameter_no_rank_holds(tmp_path):
    errors = run_ranks(
        _export,
        tiny_gpt2,
        torch.float32,
        tmp_path / "out",
        ExportOptions(),
        None,
        "decoder.final_layernorm.bias",
        num_ranks=2,
        errors="return",
    )

    assert [type(error) for error in errors] == [WeightsError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "no rank holds decoder.final_layernorm.bias" in str(errors[0])


def test_when_the_writer_fails_all_ranks_raise_its_error(tmp_path):
    errors = run_ranks(
        _export,
        tiny_gpt2,
        torch.float32,
        tmp_path / "out",
        ExportOptions(),
        FailingTokenizer(),
        num_ranks=2,
        errors="return",
    )

    assert [type(error) for error in errors] == [OSError, OSError]
    assert [str(error) for error in errors] == ["disk full", "disk full"]
    assert list(tmp_path.iterdir()) == []


def _export_on_a_part_of_the_world(directory):
    """Ranks 0 and 2 hold the model; rank 1 has nothing to do with it."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    model = tiny_llama()
    ranks = ModelHolders(group=group)
    family = family_of(model.config)
    shape = family.shape(model.config)
    save_hf_folder(
        directory,
        cut_model(model, 2)[ranks.rank],
        table=family.parameters(shape),
        shape=shape,
        contents=FolderContents(hf_config=model.config, architecture="LlamaForCausalLM"),
        ranks=ranks,
    )


def test_a_group_that_is_not_the_world_can_write(tmp_path):
    run_ranks(_export_on_a_part_of_the_world, tmp_path / "out", num_ranks=3)

    written = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(written[n], p) for n, p in tiny_llama().named_parameters())
