"""`Accelerator` between the ranks: who is the main one, who waits, what is gathered."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.training.start import SGD, TWO_LAYERS, start


def make(**plugin: Any) -> Accelerator:
    return Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))


# --- the shared state -----------------------------------------------------------------------


def shared_states() -> dict[str, Any]:
    accelerator = make(tp_degree=2)
    again = Accelerator()  # scripts and libraries make another one
    return {
        "types": [
            accelerator.distributed_type,
            PartialState().distributed_type,
            AcceleratorState().distributed_type,
            again.distributed_type,
        ],
        "plugin": AcceleratorState().megatron_lm_plugin.tp_degree,
        "main": accelerator.is_main_process,
        "local main": accelerator.is_local_main_process,
        "last": accelerator.is_last_process,
        "device": accelerator.device.type,
        "count": accelerator.num_processes,
    }


@pytest.fixture(scope="module")
def states() -> list[dict[str, Any]]:
    return run_ranks(shared_states, num_ranks=4)


def test_both_shared_states_say_megatron(states: Any) -> None:
    for told in states:
        assert set(told["types"]) == {DistributedType.MEGATRON_LM}


def test_another_accelerator_without_a_plugin_keeps_the_one_in_use(states: Any) -> None:
    assert {told["plugin"] for told in states} == {2}


def test_the_last_rank_is_the_main_one(states: Any) -> None:
    assert [told["main"] for told in states] == [False, False, False, True]
    assert [told["local main"] for told in states] == [False, False, False, True]
    assert [told["last"] for told in states] == [False, False, False, True]


def test_the_cpu_is_used_where_it_was_asked_for(states: Any) -> None:
    assert {told["device"] for told in states} == {"cpu"}
    assert {told["count"] for told in states} == {4}


def on_two_machines(_: None = None) -> Any:
    import os

    rank = dist.get_rank()
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    accelerator = make()
    return accelerator.is_main_process, accelerator.is_local_main_process


def test_every_machine_has_a_main_rank_of_its_own() -> None:
    ranks = run_ranks(on_two_machines, num_ranks=4)

    assert [is_main for is_main, _ in ranks] == [False, False, False, True]
    assert [is_local for _, is_local in ranks] == [False, True, False, True]


def test_the_environment_variable_of_accelerates_launcher_does_no_harm() -> None:
    env = {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "2"}

    (kind, tp_degree), *_ = run_ranks(kind_from_environment, num_ranks=2, env=env)

    assert (kind, tp_degree) == (DistributedType.MEGATRON_LM, 2)


def kind_from_environment() -> Any:
    import os

    accelerator = Accelerator()
    assert os.environ["ACCELERATE_USE_MEGATRON_LM"] == "true"
    return accelerator.distributed_type, accelerator.state.megatron_lm_plugin.tp_degree


# --- waiting --------------------------------------------------------------------------------


def wait_for_a_sleeper() -> float:
    """Return when the sleeper came, and when the other rank went on, on the machine's clock."""
    accelerator = make()
    dist.barrier()
    if accelerator.process_index == 1:
        time.sleep(0.5)
        came = time.monotonic()
    accelerator.wait_for_everyone()
    return came if accelerator.process_index == 1 else time.monotonic()


def test_a_sleeping_rank_is_waited_for() -> None:
    went_on, came = run_ranks(wait_for_a_sleeper, num_ranks=2)

    assert went_on >= came


def order_of_blocks(method: str) -> float:
    accelerator = make()
    dist.barrier()
    with getattr(accelerator, method)():
        if accelerator.is_main_process:
            time.sleep(0.3)
        return time.monotonic()


@pytest.mark.parametrize("method", ["main_process_first", "local_main_process_first"])
def test_the_main_rank_goes_first(method: str) -> None:
    *others, main = run_ranks(order_of_blocks, method, num_ranks=3)

    assert main <= min(others)


def fail_first(who: int) -> str:
    accelerator = make()
    try:
        with accelerator.main_process_first():
            if accelerator.process_index == who:
                raise KeyError("a file that is not there")
    except KeyError as error:
        return str(error)
    return "went on"


def test_a_main_rank_that_fails_inside_its_block_leaves_nobody_waiting() -> None:
    assert run_ranks(fail_first, 1, num_ranks=2) == ["went on", "'a file that is not there'"]


def print_from_all(path: str) -> None:
    accelerator = make()
    with Path(f"{path}/{accelerator.process_index}").open("w") as file:
        accelerator.print("a line", file=file)


def test_only_the_main_rank_prints(tmp_path: Path) -> None:
    run_ranks(print_from_all, str(tmp_path), num_ranks=2)

    assert [(tmp_path / name).read_text() for name in "01"] == ["", "a line\n"]


# --- trackers -------------------------------------------------------------------------------


class FileTracker(GeneralTracker):
    name = "file"
    requires_logging_directory = False

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> None:
        return None

    def _write(self, line: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{PartialState().process_index}: {line}\n")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write(f"config {values}")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self._write(f"{step} {values}")

    @on_main_process
    def finish(self) -> None:
        self._write("end")


def track(path: str) -> bool:
    accelerator = Accelerator(
        cpu=True,
        log_with=FileTracker(path),
        megatron_lm_plugin=MegatronLMPlugin(tp_degree=2),
    )
    accelerator.init_trackers("tiny", config={"lr": 0.1})
    accelerator.log({"loss": 1.5}, step=3)
    accelerator.end_training()
    return dist.is_initialized()


def test_a_tracker_is_told_once_by_the_main_rank(tmp_path: Path) -> None:
    path = tmp_path / "log"

    still_there = run_ranks(track, str(path), num_ranks=2)

    assert path.read_text().splitlines() == [
        "1: config {'lr': 0.1}",
        "1: 3 {'loss': 1.5}",
        "1: end",
    ]
    assert still_there == [False, False]


# --- weights --------------------------------------------------------------------------------


def train_and_save(recipe: TinyModel, directory: str, plugin: dict[str, Any]) -> Any:
    started = start(recipe, **plugin)
    accelerator, model = started.accelerator, started.model
    for batch in started.loader:
        model(**batch)
    accelerator.unwrap_model(model).save_pretrained(
        directory,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        safe_serialization=True,
    )
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    model.eval()
    return model(**pad_samples(ragged_samples(8))).loss.item(), state


def size_without_a_loader() -> None:
    accelerator = make()
    accelerator.prepare(TWO_LAYERS.build())
    _ = accelerator.state.megatron_lm_plugin.global_batch_size


def test_a_batch_size_that_no_loader_has_told_is_said_to_be_missing() -> None:
    with pytest.raises(AttributeError, match="sees the DataLoader's batch size"):
        run_ranks(size_without_a_loader, num_ranks=1)


def handed_out() -> tuple[bool, bool, bool]:
    started = start()
    accelerator, given = started.accelerator, started.hf_model
    other = torch.nn.Linear(1, 1)
    started.model(**next(iter(started.loader)))
    of_given, of_prepared = (accelerator.get_state_dict(m) for m in (given, started.model))
    accelerator.end_training()
    with pytest.raises(TrainingLoopError, match="Save before that call"):
        accelerator.unwrap_model(given).save_pretrained("nowhere")
    return (
        accelerator.unwrap_model(given) is started.model,
        accelerator.unwrap_model(other) is other,
        all(torch.equal(of_given[name], value) for name, value in of_prepared.items()),
    )


def test_the_model_that_was_given_to_prepare_stands_for_the_trained_one_until_the_end() -> None:
    assert run_ranks(handed_out, num_ranks=1) == [(True, True, True)]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_loads_what_was_trained_with_the_same_loss(
    family: str, tmp_path: Path
) -> None:
    plugin = {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2}
    recipe = TinyModel(family)

    ranks = run_ranks(train_and_save, recipe, str(tmp_path / "out"), plugin, num_ranks=4)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        loss = loaded(**pad_samples(ragged_samples(8))).loss.item()
    assert {told for told, _ in ranks} == {ranks[0][0]}
    assert ranks[0][0] == pytest.approx(loss, abs=1e-5)
    assert [state is None for _, state in ranks] == [True, True, True, False]
    for name, value in ranks[-1][1].items():
        assert torch.equal(value, loaded.state_dict()[name]), name


# --- what is refused ------------------------------------------------------------------------


def construct(arguments: dict[str, Any]) -> None:
    Accelerator(cpu=True, **arguments)


@pytest.mark.parametrize(
    "name", ["deepspeed_plugin", "fsdp_plugin", "dynamo_backend", "parallelism_config"]
)
def test_another_strategy_is_refused_by_name_alike(name: str) -> None:
    errors = run_ranks(construct, {name: "anything"}, num_ranks=2, errors="return")

    assert [type(error) for error in errors] == [UnsupportedError] * 2
    assert f"{name} cannot be combined with Megatron-Core" in str(errors[0])


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_another_precision_is_refused(precision: str) -> None:
    with pytest.raises(ValueError, match=precision):
        run_ranks(construct, {"mixed_precision": precision}, num_ranks=1)


def test_accelerates_own_plugin_is_refused_with_ours() -> None:
    with pytest.raises(ConfigurationError, match=r"give accelerate_megatron.MegatronLMPlugin"):
        run_ranks(construct, {"megatron_lm_plugin": "tp2"}, num_ranks=1)


def gather_objects() -> None:
    started = start(optimizer=SGD)
    started.accelerator.gather_for_metrics(["text"], use_gather_object=True)


def test_gathering_objects_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="use_gather_object is not supported"):
        run_ranks(gather_objects, num_ranks=1)


def place_by_hand() -> None:
    make().prepare(TWO_LAYERS.build(), device_placement=[True])


def test_device_placement_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="device_placement cannot be given"):
        run_ranks(place_by_hand, num_ranks=1)


def save_with(arguments: dict[str, Any]) -> None:
    start().model.save_pretrained("never written", **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state_dict": None}, "got state_dict, but the weights are on all ranks"),
        ({"safe_serialization": False}, "written as safetensors only"),
        ({"push_to_hub": True}, "does not take push_to_hub here"),
    ],
)
def test_what_transformers_would_do_with_an_argument_is_done_or_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        run_ranks(save_with, arguments, num_ranks=1)
