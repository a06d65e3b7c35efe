"""Plans: parameter counts, bytes, bubbles, and the layouts that are found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_megatron.cli.plan import main
from accelerate_megatron.config.layout import Layout
from accelerate_megatron.models.registry import FAMILIES, family_of
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.planning.activations import Workload, layer_activation_bytes
from accelerate_megatron.planning.bubble import bubble_share
from accelerate_megatron.planning.config_defaults import DEFAULTS
from accelerate_megatron.planning.config_file import read_config
from accelerate_megatron.planning.memory import micro_batches_in_flight, rank_memory
from accelerate_megatron.planning.parameters import (
    RankParameters,
    stage_parameters,
    total_parameters,
)
from accelerate_megatron.planning.report import rank_grid, timeline
from accelerate_megatron.planning.search import PlanRequest, find_plans
from tests.helpers.tiny_models import TinyModel

WORK = Workload(precision="bf16", micro_batch_size=4, seq_length=512, num_micro_batches=8)


def shape_of(recipe: TinyModel) -> ModelShape:
    config = recipe.config()
    return family_of(config).shape(config)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_the_whole_model_are_those_of_hugging_face(family: str, tied: bool) -> None:
    recipe = TinyModel(family, tied=tied)

    counted = total_parameters(FAMILIES[family], shape_of(recipe))

    assert counted == sum(parameter.numel() for parameter in recipe.build().parameters())


def test_stages_and_tensor_ranks_add_up_to_the_model_and_its_copies() -> None:
    shape = shape_of(TinyModel("llama", tied=False, changes={"vocab_size": 256}))
    layout = Layout(world_size=4, tp_size=2, pp_size=2)

    held = [stage_parameters(FAMILIES["llama"], shape, layout, stage).total for stage in (0, 1)]

    # Two tensor ranks hold each norm twice: two of each layer, and the last one.
    copies = (2 * shape.num_layers + 1) * shape.hidden_size
    assert 2 * sum(held) == total_parameters(FAMILIES["llama"], shape) + copies


def test_a_tied_head_on_another_stage_is_counted_as_a_copy() -> None:
    shape = shape_of(TinyModel("gpt2", tied=True))
    layout = Layout(world_size=2, pp_size=2)

    last = stage_parameters(FAMILIES["gpt2"], shape, layout, 1).total
    untied = stage_parameters(
        FAMILIES["gpt2"], shape_of(TinyModel("gpt2", tied=False)), layout, 1
    ).total

    assert last == untied


@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel", "recompute", "factor"),
    [
        pytest.param(1, False, None, 32, id="plain"),
        pytest.param(2, False, None, 8 + 24 / 2, id="tp2"),
        pytest.param(2, True, None, 32 / 2, id="tp2-sp"),
        pytest.param(1, False, "full", 2, id="full"),
    ],
)
def test_activations_of_a_layer_are_the_published_terms(
    tp_size: int, sequence_parallel: bool, recompute: str | None, factor: float
) -> None:
    shape = shape_of(TinyModel("gpt2", changes={"n_embd": 256, "n_head": 4}))
    layout = Layout(world_size=tp_size, tp_size=tp_size, sequence_parallel=sequence_parallel)
    work = Workload(
        precision="bf16",
        micro_batch_size=4,
        seq_length=512,
        num_micro_batches=1,
        recompute=recompute,
    )

    sbh = 512 * 4 * 256
    attention_sums = 0 if recompute else 4 * 4 / tp_size / 256  # 4 bytes a head and query

    assert layer_activation_bytes(shape, layout, work) == pytest.approx(
        (factor + attention_sums) * sbh
    )


@pytest.mark.parametrize("changes", [{}, {"feed_forward_proj": "gated-gelu"}])
def test_both_stacks_of_a_t5_are_counted(changes: dict[str, object]) -> None:
    recipe = TinyModel("t5", changes={"num_layers": 2, "num_decoder_layers": 4, **changes})
    shape = shape_of(recipe)
    layout = Layout(world_size=3, pp_size=3, split_rank=1)

    whole = total_parameters(FAMILIES["t5"], shape)
    held = [stage_parameters(FAMILIES["t5"], shape, layout, stage).total for stage in range(3)]

    assert whole == sum(parameter.numel() for parameter in recipe.build().parameters())
    # The vocabulary is on all three stages, padded to 128, the decoder's positions on both of its.
    words, positions = 128 * 64, 8 * 4
    assert sum(held) == whole - 99 * 64 + 3 * words + positions


def test_plans_of_a_t5_give_each_stack_its_stages() -> None:
    shape = shape_of(TinyModel("t5", changes={"num_layers": 2, "num_decoder_layers": 4}))

    plans = find_plans(FAMILIES["t5"], shape, request(num_devices=4))

    splits = {(plan.layout.pp_size, plan.layout.split_rank) for plan in plans}
    assert splits == {(1, None), (2, 1), (4, 2)}  # three stages would not divide 2 or 4 layers
    assert all(not plan.layout.model_problems(shape, 1) for plan in plans)


def test_the_distributed_optimizer_divides_twelve_bytes_over_the_replicas() -> None:
    shape = shape_of(TinyModel("gpt2"))
    layout = Layout(world_size=4)
    sharded = Workload(**{**vars(WORK), "shard_optimizer": True})
    parameters = RankParameters(dense=4000)

    assert rank_memory(shape, layout, 0, parameters, WORK).optimizer == 12 * 4000
    assert rank_memory(shape, layout, 0, parameters, sharded).optimizer == 12 * 1000


def test_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    layout = Layout(world_size=4, pp_size=4)

    assert [micro_batches_in_flight(layout, stage, 8, 8) for stage in range(4)] == [4, 3, 2, 1]


def test_interleaved_stages_hold_their_warm_up_and_one_chunk_more() -> None:
    layout = Layout(world_size=2, pp_size=2, layers_per_virtual_stage=1)

    # Four and two forward passes of a half before the first backward pass, and one after it.
    assert [micro_batches_in_flight(layout, stage, 8, 4) for stage in range(2)] == [2.5, 1.5]


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    assert bubble_share(4, 8) == 3 / 11
    assert bubble_share(4, 8, chunks_per_stage=2) == 3 / 19


def test_timeline_draws_one_forward_one_backward() -> None:
    assert timeline(2, 3).splitlines() == [
        "stage 0  12..aa3bb.cc",
        "stage 1  .1aa2bb3cc..",
    ]


def test_rank_grid_numbers_tensor_ranks_first_and_stages_last() -> None:
    assert rank_grid(tp_size=2, cp_size=1, dp_size=2, pp_size=2).splitlines() == [
        "pp 0  dp 0   [  0   1 ]",
        "pp 0  dp 1   [  2   3 ]",
        "pp 1  dp 0   [  4   5 ]",
        "pp 1  dp 1   [  6   7 ]",
    ]


def request(memory_bytes: int | None = None, num_devices: int = 8) -> PlanRequest:
    return PlanRequest(
        num_devices=num_devices,
        memory_bytes=memory_bytes,
        global_batch_size=64,
        micro_batch_size=1,
        seq_length=64,
        precision="bf16",
    )


def test_every_plan_obeys_the_rules_that_training_obeys() -> None:
    shape = shape_of(TinyModel("llama"))

    plans = find_plans(FAMILIES["llama"], shape, request())

    assert plans
    for plan in plans:
        assert not plan.layout.world_problems()
        assert not plan.layout.model_problems(shape, plan.work.num_micro_batches)
        assert 64 % plan.layout.sequence_multiple == 0


def test_less_memory_asks_for_more_saving_and_none_is_said_to_fit() -> None:
    shape = shape_of(TinyModel("llama"))
    roomy = find_plans(FAMILIES["llama"], shape, request())[0]

    tight = find_plans(FAMILIES["llama"], shape, request(roomy.memory.total // 2))
    none = find_plans(FAMILIES["llama"], shape, request(1))

    assert tight[0].memory.total <= roomy.memory.total // 2
    assert not any(plan.fits for plan in none)


SIZES = {
    "gpt2": ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions"),
    "llama": (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
    ),
}
EXPERT_SIZES = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
)
T5_SIZES = ("num_layers", "d_model", "d_kv", "d_ff", "num_heads", "vocab_size")
SIZES |= {"t5": T5_SIZES, "mt5": T5_SIZES}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        *((name, {}) for name in FAMILIES),
        *((name, WINDOWS) for name, fields in DEFAULTS.items() if "use_sliding_window" in fields),
        ("t5", {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3}),
        ("t5", {"feed_forward_proj": "gated-silu"}),
        ("mt5", {"feed_forward_proj": "relu"}),
    ],
)
def test_a_file_of_sizes_alone_is_what_transformers_makes_of_it(
    model_type: str, more: dict[str, object], tmp_path: Path
) -> None:
    recipe = TinyModel(model_type).config()
    names = (*SIZES.get(model_type, SIZES["llama"]), *EXPERT_SIZES)
    content = {name: getattr(recipe, name) for name in names if hasattr(recipe, name)} | more
    if model_type == "phi3":  # whose default is beyond so small a vocabulary
        content["pad_token_id"] = None
    config = type(recipe)(**content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **content}))

    family = FAMILIES[model_type]
    assert family.shape(read_config(tmp_path)) == family.shape(config)


@pytest.mark.parametrize("model_type", ["bert", "megatron-bert", "t5", "mt5"])
def test_a_file_without_sizes_is_what_transformers_makes_of_it(
    model_type: str, tmp_path: Path
) -> None:
    config = type(TinyModel(model_type).config())()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))

    family = FAMILIES[model_type]
    assert family.shape(read_config(tmp_path)) == family.shape(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_file_that_transformers_wrote_is_read_as_it_reads_it(
    model_type: str, tmp_path: Path
) -> None:
    config = TinyModel(model_type).config()
    config.save_pretrained(tmp_path)

    family = FAMILIES[model_type]
    assert family.shape(read_config(tmp_path)) == family.shape(config)


def test_an_older_file_of_t5_v1_1_has_a_head_of_its_own_and_no_scale(tmp_path: Path) -> None:
    content = {"model_type": "t5", "tie_word_embeddings": False, "num_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))

    shape = FAMILIES["t5"].shape(read_config(tmp_path))

    assert not shape.tied_embeddings
    assert shape.encoder_decoder is not None
    assert shape.encoder_decoder.output_scale == 1.0


def test_rotary_settings_of_older_files_are_read(tmp_path: Path) -> None:
    content = {
        **TinyModel("llama").config().to_dict(),
        "rope_theta": 500000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }
    del content["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(content))

    config = read_config(tmp_path)

    assert config.rope_parameters == {
        "rope_type": "linear",
        "rope_theta": 500000.0,
        "factor": 4.0,
    }


def test_command_prints_plans_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TinyModel("llama").config().save_pretrained(tmp_path)

    assert main([str(tmp_path), "--devices", "4", "--memory", "1GB"]) == 0
    text = capsys.readouterr().out
    assert "MegatronLMPlugin(" in text
    assert "pp 0  dp 0" in text
    assert main([str(tmp_path), "--devices", "4", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert plans[0]["fits"] is True
    assert plans[0]["bytes"]["total"] > 0


def test_command_plans_an_encoder_and_a_decoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "num_layers": 4}))
    words = [str(tmp_path), "--devices", "4", "--json", "--seq-length", "64"]

    assert main(words) == 0
    long = json.loads(capsys.readouterr().out)
    assert main([*words, "--decoder-seq-length", "16"]) == 0
    short = json.loads(capsys.readouterr().out)

    arguments = [plan["plugin"] for plan in long]
    assert {"pp_degree": 2, "pipeline_model_parallel_split_rank": 1}.items() <= next(
        plugin.items() for plugin in arguments if plugin.get("pp_degree") == 2
    )
    assert long[0]["bytes"]["activations"] > short[0]["bytes"]["activations"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["--decoder_seq_length", "8"], "a llama model has one stack", id="decoder"),
        pytest.param(["nowhere.json"], "cannot be read", id="no-file"),
        pytest.param(["--memory", "80 bananas"], "a number with a unit", id="unit"),
        pytest.param(["--memory", "1.2.3GB"], "a number with a unit", id="number"),
    ],
)
def test_command_names_what_is_wrong(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TinyModel("llama").config().save_pretrained(tmp_path)
    model = [] if words[0].endswith(".json") else [str(tmp_path)]

    assert main([*model, *words, "--devices", "4"]) == 2

    assert said in capsys.readouterr().err


def test_command_exits_1_when_nothing_fits(tmp_path: Path) -> None:
    TinyModel("llama").config().save_pretrained(tmp_path)

    assert main([str(tmp_path), "--devices", "4", "--memory", "1KB"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # The model has 4 layers and 4 heads: of 7 devices all would have to be replicas.
        pytest.param(
            ["--devices", "7", "--global_batch_size", "16"],
            "Nearest that works: --devices 4; or --devices 8.",
            id="devices",
        ),
        pytest.param(
            ["--devices", "12", "--global_batch_size", "16"],
            "Nearest that works: --devices 8; or --devices 16.",
            id="nodes",
        ),
        pytest.param(
            ["--devices", "4", "--global_batch_size", "10", "--micro_batch_size", "4"],
            "must be a multiple of --micro_batch_size 4, such as 8 or 12.",
            id="batch",
        ),
    ],
)
def test_a_number_of_devices_that_no_layout_divides_is_answered_with_the_nearest(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TinyModel("llama").config().save_pretrained(tmp_path)

    assert main([str(tmp_path), *words]) == 1
    assert said in capsys.readouterr().out
    assert main([str(tmp_path), *words, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == []
    assert said in err
    for devices in re.findall(r"--devices (\d+)", said):
        again = ["--devices", devices, *words[2:]]
        assert main([str(tmp_path), *again]) == 0


def test_too_little_memory_is_answered_with_the_least_that_fits_and_with_more_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    TinyModel("llama", changes=sizes).config().save_pretrained(tmp_path)
    words = [str(tmp_path), "--seq_length", "32"]

    assert main([*words, "--devices", "1", "--memory", "12MB"]) == 1

    text = capsys.readouterr().out
    found = re.search(r"memory\. Nearest that works: --memory (\S+); or --devices (\d+)\.", text)
    assert found, text
    memory, devices = found.groups()
    assert main([*words, "--devices", "1", "--memory", memory]) == 0
    assert main([*words, "--devices", devices, "--memory", "12MB"]) == 0
    assert main([*words, "--devices", str(int(devices) - 1), "--memory", "12MB"]) == 1


def test_where_more_devices_do_not_help_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TinyModel("llama").config().save_pretrained(tmp_path)

    assert main([str(tmp_path), "--devices", "4", "--memory", "1KB"]) == 1
    assert re.search(r"--memory \S+\. Up to \d+ devices, none fits\.", capsys.readouterr().out)


def test_planning_needs_no_torch() -> None:
    code = "import accelerate_megatron.cli.plan, sys; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
