"""Hugging Face -> Megatron -> Hugging Face: bit for bit, the config included."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from accelerate_megatron.errors import ConfigurationError, RanksDisagreeError, UnsupportedError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel
from tests.parity.exports import save
from tests.parity.test_families import LAYER_TYPES, PARTIAL_ROPE, recipe

SLOW = pytest.mark.slow
MODELS = [
    pytest.param(recipe("gpt2", tied=True), id="gpt2"),
    pytest.param(recipe("llama", attention_bias=True, vocab_size=101), id="llama-attention-bias"),
    pytest.param(recipe("mistral", sliding_window=5, head_dim=24), id="mistral"),
    pytest.param(
        recipe("qwen2", use_sliding_window=True, sliding_window=4, layer_types=LAYER_TYPES),
        id="qwen2",
        marks=SLOW,
    ),
    pytest.param(recipe("qwen3", tied=True, head_dim=24), id="qwen3", marks=SLOW),
    pytest.param(recipe("phi3", rope_parameters=PARTIAL_ROPE), id="phi3"),
    pytest.param(recipe("stablelm", use_qkv_bias=True), id="stablelm", marks=SLOW),
    pytest.param(recipe("starcoder2", tied=True), id="starcoder2", marks=SLOW),
]
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16}


def original(model: TinyModel, dtype: torch.dtype, folder: Path) -> None:
    hf_model = model.build()
    for parameter in hf_model.parameters():
        parameter.data = parameter.data.to(dtype)
    hf_model.config.dtype = dtype
    hf_model.save_pretrained(folder)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("dtype", "plugin", "num_ranks"),
    [
        pytest.param("no", {"tp_degree": 4}, 4, id="fp32-tp4", marks=SLOW),
        pytest.param("bf16", {"tp_degree": 2, "pp_degree": 2}, 4, id="bf16-tp2-pp2"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_a_round_trip_is_bit_identical_and_transformers_loads_it(
    model: TinyModel, dtype: str, plugin: dict[str, int], num_ranks: int, tmp_path: Path
) -> None:
    original(model, DTYPES[dtype], tmp_path / "before")

    run_ranks(
        partial(save, dtype=dtype, max_shard_size="100KB"),
        model,
        plugin,
        str(tmp_path / "after"),
        num_ranks=num_ranks,
    )

    before, after = load_all(tmp_path / "before"), load_all(tmp_path / "after")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        assert torch.equal(value, after[name]), name
    configs = [
        json.loads((tmp_path / at / "config.json").read_text()) for at in ("before", "after")
    ]
    assert configs[0] == configs[1]
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "after", output_loading_info=True)
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys"))


@pytest.mark.parametrize(
    ("plugin", "num_ranks"),
    [
        pytest.param({"tp_degree": 2}, 2, id="tp2"),
        pytest.param({"use_distributed_optimizer": True}, 2, id="dp2-dist-opt"),
        pytest.param(
            {"tp_degree": 2, "pp_degree": 1, "use_distributed_optimizer": True},
            4,
            id="tp2-dp2-dist-opt",
        ),
        pytest.param({"use_custom_fsdp": True}, 2, id="dp2-fsdp"),
    ],
)
def test_fp32_is_exported_from_the_optimizers_copies(
    plugin: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    model = TinyModel("qwen3", tied="use_custom_fsdp" not in plugin)
    for dtype in ("float32", None):
        run_ranks(
            partial(save, dtype="bf16", updates=2, export_dtype=dtype),
            model,
            plugin,
            str(tmp_path / str(dtype)),
            num_ranks=num_ranks,
        )

    main, rounded = load_all(tmp_path / "float32"), load_all(tmp_path / "None")
    assert all(value.dtype == torch.float32 for value in main.values())
    assert main.keys() == rounded.keys()
    for name, value in main.items():
        assert torch.equal(value.bfloat16(), rounded[name]), name
    # Nobody's bf16 values would have bits beyond bf16.
    assert any(not torch.equal(value.bfloat16().float(), value) for value in main.values())
    config = json.loads((tmp_path / "float32" / "config.json").read_text())
    assert config["dtype"] == "float32"


def test_save_model_writes_what_save_pretrained_writes(tmp_path: Path) -> None:
    model = TinyModel("llama")

    run_ranks(
        partial(save, with_save_model=True), model, {"tp_degree": 2}, str(tmp_path), num_ranks=2
    )

    wanted = dict(model.build().named_parameters())
    after = load_all(tmp_path)
    assert after.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in after.items())


def test_pickled_weights_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="safe_serialization=False"):
        run_ranks(
            partial(save, with_save_model=True, safe_serialization=False),
            TinyModel("llama"),
            {},
            str(tmp_path),
            num_ranks=1,
        )


def test_ranks_that_ask_for_different_files_are_told_so(tmp_path: Path) -> None:
    with pytest.raises(RanksDisagreeError, match=r"save_pretrained was called with different arg"):
        run_ranks(save_in_a_dtype_of_its_own, str(tmp_path), num_ranks=2)


def save_in_a_dtype_of_its_own(folder: str) -> None:
    dtype = ["float32", "bfloat16"][int(os.environ["RANK"])]
    save(TinyModel("gpt2"), {}, folder, export_dtype=dtype)


def save_without_room(model: TinyModel, folder: str) -> None:
    usage = namedtuple("usage", "total used free")
    shutil.disk_usage = lambda _path: usage(10**9, 10**9, 1000)
    save(model, {"tp_degree": 2}, folder)


def test_a_disk_too_small_is_said_on_every_rank_before_anything_is_written(
    tmp_path: Path,
) -> None:
    errors = run_ranks(
        save_without_room, TinyModel("llama"), str(tmp_path / "new"), num_ranks=2, errors="return"
    )

    assert all(isinstance(error, ConfigurationError) for error in errors)
    assert all("has 0.00 GB free" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_weights_are_not_saved_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dtype is 'int8'; it must be one of float32"):
        run_ranks(
            partial(save, export_dtype="int8"), TinyModel("llama"), {}, str(tmp_path), num_ranks=1
        )


def check_rectangles(shape: tuple[int, ...]) -> None:
    from accelerate_megatron.engine.main_copies import rectangles  # here the engine is active

    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            parts = [
                whole[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].flatten()
                for offset, size in rectangles(shape, start, stop)
            ]
            flat = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
            assert flat.tolist() == list(range(start, stop))
            assert len(parts) <= 3


@pytest.mark.parametrize("shape", [(7,), (3, 5), (1, 4), (4, 1)])
def test_rectangles_are_the_elements_of_a_flat_range_once_each(shape: tuple[int, ...]) -> None:
    run_ranks(check_rectangles, shape, num_ranks=1)
