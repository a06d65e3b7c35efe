"""What the objects that `prepare` returns promise to an ordinary training loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import pad_samples, ragged_samples
from tests.training.start import SGD, TWO_LAYERS, WITH_DROPOUT, hf_loss, start, weights_of

SAMPLES = ragged_samples(8)


# --- training and evaluation ----------------------------------------------------------------


def forward_only() -> dict[str, Any]:
    started = start(WITH_DROPOUT, pp_degree=2, num_micro_batches=2)
    before = weights_of(started.model)
    model, batch = started.model, next(iter(started.loader))

    def changed() -> bool:
        return any(not torch.equal(v, before[name]) for name, v in weights_of(model).items())

    told: dict[str, Any] = {}
    model.eval()
    told["eval"] = model(**batch).loss
    with torch.no_grad():
        told["eval no_grad"] = model(**batch).loss
        model.train()
        told["train no_grad"] = model(**batch).loss
    told["changed by forward"] = changed()
    told["train"] = model(**batch).loss
    told["changed by update"] = changed()
    return told


def test_eval_mode_and_no_grad_go_forward_only() -> None:
    ranks = run_ranks(forward_only, num_ranks=2)

    wanted = hf_loss(SAMPLES[:4])
    for told in ranks:
        assert told["eval"].item() == pytest.approx(wanted, abs=1e-5)
        assert told["eval no_grad"].item() == told["eval"].item()
        assert not told["changed by forward"]
        assert told["changed by update"]


def test_the_loss_is_one_number_on_all_ranks_and_has_no_gradient() -> None:
    ranks = run_ranks(forward_only, num_ranks=2)

    for name in ("eval", "train no_grad", "train"):
        assert len({told[name].item() for told in ranks}) == 1
        assert not ranks[0][name].requires_grad
        assert ranks[0][name].dtype == torch.float32
        assert ranks[0][name].shape == ()


def test_dropout_changes_the_training_loss_only() -> None:
    told = run_ranks(forward_only, num_ranks=2)[0]

    assert abs(told["train"].item() - told["eval"].item()) > 1e-4
    assert abs(told["train no_grad"].item() - told["eval"].item()) > 1e-4


def without_optimizer() -> str:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    loader = DataLoader(SAMPLES, batch_size=2, collate_fn=pad_samples)
    model, loader = accelerator.prepare(TWO_LAYERS.build(), loader)
    batch = next(iter(loader))
    model.eval()
    model(**batch)
    with torch.no_grad():
        model.train()(**batch)
    try:
        model(**batch)
    except TrainingLoopError as error:
        return str(error)
    return ""


def test_training_without_an_optimizer_says_what_is_missing() -> None:
    (message,) = run_ranks(without_optimizer, num_ranks=1)

    assert "no optimizer was given to prepare" in message
    assert "model.eval()" in message


# --- backward and clipping ------------------------------------------------------------------


def backward_of(kind: str) -> None:
    started = start()
    model, accelerator = started.model, started.accelerator
    batch = next(iter(started.loader))
    if kind in ("eval", "no_grad"):
        model.train(kind != "eval")
        with torch.set_grad_enabled(kind != "no_grad"):
            loss = model(**batch).loss
    else:
        loss = model(**batch).loss
    if kind == "scaled":
        loss = loss / 2
    elif kind == "summed":
        loss = loss + torch.zeros((), requires_grad=True)
    elif kind == "older":
        model(**batch)
    accelerator.backward(loss)


@pytest.mark.parametrize("kind", ["scaled", "summed", "older"])
def test_backward_of_another_tensor_names_the_custom_loss_function(kind: str) -> None:
    with pytest.raises(TrainingLoopError, match="custom_loss_function"):
        run_ranks(backward_of, kind, num_ranks=1)


@pytest.mark.parametrize("kind", ["eval", "no_grad"])
def test_backward_after_a_forward_pass_alone_says_that_nothing_was_updated(kind: str) -> None:
    with pytest.raises(TrainingLoopError, match=r"forward pass alone.*Call model.train\(\)"):
        run_ranks(backward_of, kind, num_ranks=1)


def test_backward_takes_the_loss_of_the_update() -> None:
    run_ranks(backward_of, "", num_ranks=1)


def clip_rules() -> dict[str, Any]:
    started = start(gradient_clipping=0.5)
    model, accelerator = started.model, started.accelerator
    told: dict[str, Any] = {}

    def attempt(name: str, *args: Any) -> None:
        try:
            told[name] = accelerator.clip_grad_norm_(*args).item()
        except TrainingLoopError as error:
            told[name] = str(error)

    attempt("early", model.parameters(), 0.5)
    model(**next(iter(started.loader)))
    attempt("right", model.parameters(), 0.5)
    attempt("limit", model.parameters(), 1.0)
    attempt("norm", model.parameters(), 0.5, 1)
    attempt("some", list(model.parameters())[:3], 0.5)
    return told


def test_clipping_reports_the_norm_before_it_and_refuses_what_was_not_done() -> None:
    (told,) = run_ranks(clip_rules, num_ranks=1)

    oracle = oracle_run(OracleCase(TWO_LAYERS, SGD, [pad_samples(SAMPLES[:2])]))
    assert told["right"] == pytest.approx(oracle.grad_norms[0], rel=1e-4)
    assert told["right"] > 0.5
    assert "before any update" in told["early"]
    assert "max_norm=1.0" in told["limit"]
    assert "gradient_clipping=0.5" in told["limit"]
    assert "norm_type=1" in told["norm"]
    assert "Pass model.parameters()" in told["some"]


def without_clipping() -> Any:
    started = start(gradient_clipping=0)
    started.model(**next(iter(started.loader)))
    clip = started.accelerator.clip_grad_norm_
    with pytest.raises(UnsupportedError, match="gradient_clipping="):
        started.accelerator.clip_grad_value_(started.model.parameters(), 1.0)
    return [clip(started.model.parameters(), limit).item() for limit in (0, float("inf"))]


def test_the_norm_is_reported_without_clipping_too() -> None:
    (norms,) = run_ranks(without_clipping, num_ranks=1)

    oracle = oracle_run(OracleCase(TWO_LAYERS, SGD, [pad_samples(SAMPLES[:2])], clip=None))
    assert norms == pytest.approx([oracle.grad_norms[0]] * 2, rel=1e-4)


# --- accumulation -----------------------------------------------------------------------


def accumulate(steps: int, plugin: dict[str, Any]) -> Any:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=steps,
        megatron_lm_plugin=MegatronLMPlugin(**plugin),
    )
    model = TWO_LAYERS.build()
    loader = DataLoader(ragged_samples(16), batch_size=1, collate_fn=pad_samples)
    model, optimizer, loader = accelerator.prepare(model, SGD.build(model), loader)
    synced, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            synced.append(accelerator.sync_gradients)
    return model.session.num_updates, len(loader), synced, norms


@pytest.mark.parametrize("steps", [{"steps": 4}, {"micro": 4}], ids=["accumulation", "micro"])
def test_accumulation_steps_are_micro_batches_of_one_update(steps: dict[str, int]) -> None:
    plugin = {"num_micro_batches": steps["micro"]} if "micro" in steps else {}

    ranks = run_ranks(accumulate, steps.get("steps", 1), plugin, num_ranks=2)

    updates, length, synced, norms = ranks[0]
    assert (updates, length, synced) == (2, 2, [True, True])
    oracle = oracle_run(OracleCase(TWO_LAYERS, SGD, [pad_samples(ragged_samples(16)[:8])]))
    assert norms[0] == pytest.approx(oracle.grad_norms[0], rel=1e-4)


def accumulate_twice_with_one_plugin() -> list[Any]:
    plugin = MegatronLMPlugin()
    sizes = []
    for _ in range(2):
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=4, megatron_lm_plugin=plugin
        )
        model = TWO_LAYERS.build()
        loader = DataLoader(ragged_samples(16), batch_size=1, collate_fn=pad_samples)
        accelerator.prepare(model, SGD.build(model), loader)
        shown = plugin.megatron_lm_default_args["num_micro_batches"]
        sizes.append((plugin.num_micro_batches, shown, plugin.global_batch_size))
        accelerator.free_memory()
    return sizes


def test_accumulation_leaves_the_scripts_plugin_as_it_is() -> None:
    assert run_ranks(accumulate_twice_with_one_plugin, num_ranks=1) == [[(1, 4, 4)] * 2]


def test_accumulation_on_top_of_micro_batches_is_refused_alike() -> None:
    errors = run_ranks(accumulate, 4, {"num_micro_batches": 2}, num_ranks=2, errors="return")

    assert {type(error) for error in errors} == {ConfigurationError}
    assert "gradient_accumulation_steps=4 and num_micro_batches=2" in str(errors[0])
    assert "num_micro_batches=8" in str(errors[0])


def accumulate_by_hand() -> None:
    started = start()
    with started.accelerator.no_sync(started.model):
        started.model(**next(iter(started.loader)))


def test_no_sync_is_refused_since_each_call_is_an_update() -> None:
    with pytest.raises(UnsupportedError, match=r"Set MegatronLMPlugin\(num_micro_batches="):
        run_ranks(accumulate_by_hand, num_ranks=1)
