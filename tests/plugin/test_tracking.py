"""What is logged of a run: event files, lines, tokens per second, TFLOP/s and MFU."""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_megatron.config.logging import flops_per_token, peak_tflops
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.models.bert import bert_shape
from accelerate_megatron.models.gpt2 import gpt2_shape
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.training.start import TWO_LAYERS, start

SAMPLES = ragged_samples(8)
BATCH = pad_samples(SAMPLES)


def logged_run(folder: str | None, plugin: dict[str, Any]) -> Any:
    """Train two updates with an evaluation of two batches between them; return what was seen."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("accelerate_megatron")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    started = start(TWO_LAYERS, samples=SAMPLES, tensorboard_dir=folder, **plugin)
    model = started.model
    losses, norms, evaluated = [], [], []
    for _ in range(2):
        model.train()
        losses.append(model(**BATCH).loss.item())
        norms.append(model.session.grad_norm)
        started.optimizer.step()
        model.eval()
        for rows in (slice(0, 2), slice(2, 8)):
            part = {key: value[rows] for key, value in BATCH.items()}
            valid = int((part["labels"][:, 1:] != -100).sum())
            evaluated.append((model(**part).loss.item(), valid))
    weights = started.model.gather_state_dict()
    started.accelerator.end_training()  # ends the process group too
    norm = None
    if weights is not None:
        norm = math.sqrt(sum(float(value.double().square().sum()) for value in weights.values()))
    last = model.meter.last
    return losses, norms, evaluated, norm, lines, last, last.mfu(torch.device("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_a_folder_that_cannot_be_written_is_told_to_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors = run_ranks(
        logged_run, str(tmp_path / "file" / "runs"), {}, num_ranks=2, errors="return"
    )

    assert all(isinstance(error, ConfigurationError) for error in errors)
    assert "which cannot be written" in str(errors[0])


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard"
)


@needs_tensorboard
@pytest.mark.filterwarnings("ignore")  # of tensorboard's own imports
def test_event_files_have_every_update_from_the_rank_that_writes(tmp_path: Path) -> None:
    layout = {"pp_degree": 2, "num_micro_batches": 2}
    *_, (losses, norms, evaluated, *_) = run_ranks(logged_run, str(tmp_path), layout, num_ranks=2)

    assert len(list(tmp_path.iterdir())) == 1, "one rank writes"
    events = read_events(tmp_path)
    assert [step for step, _ in events["lm loss"]] == [1, 2]
    assert [value for _, value in events["lm loss"]] == pytest.approx(losses, rel=1e-6)
    assert [value for _, value in events["grad-norm"]] == pytest.approx(norms, rel=1e-6)
    assert [value for _, value in events["learning-rate"]] == pytest.approx([0.1, 0.1])
    assert [value for _, value in events["loss-scale"]] == [1.0, 1.0]
    assert all(value > 0 for _, value in events["tokens-per-second"])
    # One entry per evaluation, weighted by tokens.
    means = [
        sum(loss * count for loss, count in pair) / sum(count for _, count in pair)
        for pair in (evaluated[:2], evaluated[2:])
    ]
    assert [step for step, _ in events["lm loss validation"]] == [1, 2]
    assert [value for _, value in events["lm loss validation"]] == pytest.approx(means, rel=1e-5)
    perplexities = [value for _, value in events["lm loss validation ppl"]]
    assert perplexities == pytest.approx([math.exp(mean) for mean in means], rel=1e-5)
    assert "params-norm" not in events


@needs_tensorboard
@pytest.mark.filterwarnings("ignore")
def test_all_logging_options_add_what_there_is(tmp_path: Path) -> None:
    plugin = {
        "tp_degree": 2,
        "set_all_logging_options": True,
        "other_megatron_args": {
            "tensorboard_log_interval": 2,
            "log_batch_size_to_tensorboard": False,
        },
    }
    *_, (_, _, _, norm, *_) = run_ranks(logged_run, str(tmp_path), plugin, num_ranks=2)

    events = read_events(tmp_path)
    assert [step for step, _ in events["lm loss"]] == [2]
    assert events["params-norm"][0][1] == pytest.approx(norm, rel=1e-5)
    assert events["num-zeros"][0][1] >= 0
    assert events["world-size"][0][1] == 2
    assert {"peak memory", "iteration-time", "weight-decay", "MFU"} <= set(events)
    assert "batch-size" not in events


def run_with_words(folder: str) -> None:
    """Train three updates under a command line that Megatron-LM's own parser would read."""
    words = ["--log-interval", "3", "--no-log-learning-rate-to-tensorboard", "--lr", "9"]
    sys.argv = ["train.py", *words]
    started = start(
        TWO_LAYERS, samples=SAMPLES, tensorboard_dir=folder, set_all_logging_options=True
    )
    for _ in range(3):
        started.model(**BATCH)
        started.optimizer.step()
    started.accelerator.end_training()


@needs_tensorboard
@pytest.mark.filterwarnings("ignore")
def test_all_logging_options_switch_words_on_and_leave_the_interval_a_number(
    tmp_path: Path,
) -> None:
    run_ranks(run_with_words, str(tmp_path), num_ranks=1)

    events = read_events(tmp_path)
    assert [step for step, _ in events["lm loss"]] == [1, 2, 3], "of every update"
    assert [rate for _, rate in events["learning-rate"]] == pytest.approx([0.1] * 3)
    assert {"params-norm", "num-zeros", "peak memory", "loss-scale"} <= set(events)


def test_without_a_folder_all_options_are_lines_of_the_log() -> None:
    *others, (losses, *_, lines, _, _) = run_ranks(
        logged_run, None, {"set_all_logging_options": True}, num_ranks=2
    )

    updates = [line for line in lines if line.startswith("update 2 |") and "grad-norm" in line]
    assert len(updates) == 1
    assert f"lm loss {losses[1]:.6g}" in updates[0]
    assert "params-norm" in updates[0]
    assert not any("grad-norm" in line for line in others[0][4]), "one rank speaks"


def test_a_record_counts_tokens_time_and_work() -> None:
    [(*_, last, mfu)] = run_ranks(logged_run, None, {}, num_ranks=1)

    rows, length = BATCH["input_ids"].shape
    assert (last.number, last.num_samples, last.num_tokens) == (2, rows, rows * length)
    assert last.tokens_per_second == pytest.approx(rows * length / last.seconds)
    work = rows * length * flops_per_token(gpt2_shape(TWO_LAYERS.build().config), length)
    assert last.tflops_per_device == pytest.approx(work / last.seconds / 1e12)
    assert 0 < mfu < 1


def test_the_work_of_a_token_is_that_of_its_matrices() -> None:
    shape = gpt2_shape(TWO_LAYERS.build().config)
    hidden, length = shape.hidden_size, 16

    per_layer = 12 * hidden**2 + hidden * length  # qkv 3, output 1, MLP 8; half of both products
    wanted = 6 * (2 * per_layer + hidden * shape.vocab_size)

    assert flops_per_token(shape, length) == pytest.approx(wanted)


def test_tokens_of_an_encoder_see_all_others_and_meet_the_head_that_there_is() -> None:
    shape = bert_shape(TinyModel("bert").build().config)
    assert shape.encoder is not None
    hidden, length = shape.hidden_size, 16

    layer = 4 * hidden**2 + 2 * hidden * shape.ffn_hidden_size + 2 * hidden * length
    heads = {"classification": 0, "masked_lm": hidden * (hidden + shape.vocab_size)}
    for head, work in heads.items():
        with_head = replace(shape, encoder=replace(shape.encoder, head=head))
        wanted = 6 * (shape.num_layers * layer + work)
        assert flops_per_token(with_head, length) == pytest.approx(wanted), head


def test_peaks_are_known_by_name_and_unknown_ones_are_none() -> None:
    assert peak_tflops("NVIDIA H200") == 989.4
    assert peak_tflops("NVIDIA H100 PCIe") == 756.5
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert peak_tflops("NVIDIA L40") is None
    assert peak_tflops("Some Other Card") is None


def test_event_files_without_tensorboard_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate_megatron.config.logging import LoggingSettings
    from accelerate_megatron.training import tracking

    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigurationError, match="pip install tensorboard"):
        tracking.check_tensorboard(LoggingSettings(tensorboard_dir="somewhere"))


def tracked_run(folder: str) -> Any:
    from accelerate_megatron import Accelerator, MegatronLMPlugin

    accelerator = Accelerator(
        cpu=True,
        log_with="tensorboard",
        project_dir=folder,
        megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=2),
    )
    hf_model = TWO_LAYERS.build()
    model, optimizer = accelerator.prepare(hf_model, torch.optim.SGD(hf_model.parameters(), lr=0.1))
    accelerator.init_trackers("tiny", config={"lr": 0.1})
    for step in range(2):
        accelerator.log({"train_loss": model(**BATCH).loss.item()}, step=step)
        optimizer.step()
    accelerator.end_training()


@needs_tensorboard
@pytest.mark.filterwarnings("ignore")
def test_accelerates_tracker_has_one_run_with_the_true_loss(tmp_path: Path) -> None:
    run_ranks(tracked_run, str(tmp_path), num_ranks=4)

    files = [path for path in tmp_path.rglob("events*") if path.parent.name == "tiny"]
    assert len(files) == 1, "one rank writes"
    losses = read_events(files[0].parent)["train_loss"]
    assert [step for step, _ in losses] == [0, 1]
    model = TWO_LAYERS.build().eval()
    with torch.no_grad():
        assert losses[0][1] == pytest.approx(float(model(**BATCH).loss), abs=1e-5)
    assert losses[1][1] < losses[0][1]


def loop_mistakes() -> Any:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate_megatron").addHandler(handler)
    started = start(TWO_LAYERS, samples=SAMPLES)
    started.optimizer.step()
    started.model(**BATCH)
    started.optimizer.step()
    before = len(said)
    started.model(**BATCH)
    started.model(**BATCH)
    return said, before


def test_a_loop_that_steps_too_seldom_or_too_often_is_told() -> None:
    [(said, before)] = run_ranks(loop_mistakes, num_ranks=1)

    assert "called before any model(**batch)" in said[0]
    assert "again without optimizer.step()" in said[-1]
    assert (before, len(said)) == (1, 2)
