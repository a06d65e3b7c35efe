"""MegatronLMDummyDataLoader: what its three loaders give on every rank."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_megatron import (
    Accelerator,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    engine,
)
from accelerate_megatron.errors import ConfigurationError, DataFileError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer
from tests.indexed.files import EOD, documents, write_files

SEQ_LENGTH = 16
TINY = TinyModel("gpt2", changes={"n_layer": 2})


def prepare(
    prefix: Any, plugin: dict[str, Any], model: TinyModel = TINY, **data: Any
) -> tuple[Accelerator, Any, list[Any]]:
    """Prepare a tiny model with the three loaders of one dummy; every rank calls it."""
    accelerator = Accelerator(
        cpu=True,
        megatron_lm_plugin=MegatronLMPlugin(
            **{"num_micro_batches": 2, "eval_iters": 2, "eval_interval": 3} | plugin
        ),
    )
    hf_model = model.build()
    optimizer = TinyOptimizer("sgd", {"lr": 0.1}).build(hf_model)
    settings = {
        "data_path": prefix,
        "splits_string": "80,10,10",
        "seq_length": SEQ_LENGTH,
        "micro_batch_size": 2,
    }
    dummy = MegatronLMDummyDataLoader(**settings | data)
    prepared, _, *loaders = accelerator.prepare(hf_model, optimizer, dummy, dummy, dummy)
    return accelerator, prepared, loaders


def real_rows(batches: Any) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch["input_ids"]]


def splits_on_rank(prefix: Any, plugin: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    _, model, (train, valid, test) = prepare(prefix, plugin, **data)
    losses = [model(**batch).loss.item() for batch in islice(train, 2)]
    return {
        "lengths": (len(train), len(valid), len(test)),
        "train": list(train),
        "valid": [real_rows(valid), real_rows(next(valid) for _ in range(2)), real_rows(valid)],
        "test": [real_rows(test), real_rows(test)],
        "losses": losses,
    }


def megatron_samples(prefix: Any, sizes: list[int | None], **changes: Any) -> list[Any]:
    """Return Megatron-Core's own three datasets, built by its own builder without ours."""
    engine.activate("cpu")
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    class Tokenizer:
        eod, vocab_size = EOD, 99
        unique_identifiers: dict[str, str] = {}  # noqa: RUF012

    settings = {
        "random_seed": 1234,
        "sequence_length": SEQ_LENGTH,
        "blend": get_blend_from_list([str(item) for item in prefix]),
        "split": "80,10,10",
        "path_to_cache": "",
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    }
    config = GPTDatasetConfig(**settings | changes)
    return list(BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build())


@pytest.fixture
def two_files(tmp_path: Path) -> list[str]:
    return [write_files(tmp_path / name, documents(60, seed)) for seed, name in enumerate("ab")]


@pytest.mark.parametrize(
    ("make_path", "train_iters"),
    [
        pytest.param(lambda a, b: [a], 5, id="one"),
        pytest.param(lambda a, b: [a], 37, id="three-and-a-half-epochs"),
        pytest.param(lambda a, b: [0.3, a, 0.7, b], 5, id="weights"),
        pytest.param(lambda a, b: [a, b], 5, id="no-weights"),
    ],
)
def test_samples_are_those_of_megatrons_own_builder(
    make_path: Any, train_iters: int, two_files: list[str]
) -> None:
    path = make_path(*two_files)
    plugin = {"train_iters": train_iters}

    (ours,) = run_ranks(partial(splits_on_rank, path, plugin, {}), num_ranks=1)

    train_size, window = 4 * train_iters, 2 * 4
    valid_size = (train_iters // 3 + 1) * window
    train, valid, test = megatron_samples(path, [train_size, valid_size, window])
    steps = ours["train"]
    assert len(steps) == ours["lengths"][0] == train_iters
    assert len(train) >= train_size
    for number, sample in enumerate(train[i] for i in range(train_size)):
        batch, row = steps[number // 4], number % 4
        assert batch["input_ids"][row].tolist() == sample["tokens"].tolist()
        assert batch["shift_labels"][row].tolist() == sample["labels"].tolist()
    for window_number, rows in enumerate(ours["valid"][:2]):
        expected = [valid[i]["tokens"].tolist() for i in range(min(valid_size, len(valid)))]
        if len(valid) >= 2 * window:
            assert rows == expected[window_number * window : (window_number + 1) * window]
    assert ours["test"][0] == [test[i]["tokens"].tolist() for i in range(len(ours["test"][0]))]
    assert ours["test"][0] == ours["test"][1]


@pytest.mark.parametrize(
    ("plugin", "num_ranks"),
    [
        pytest.param({"tp_degree": 2}, 4, id="tp2-dp2"),
        pytest.param({"pp_degree": 2}, 2, id="pp2"),
    ],
)
def test_every_rank_gets_the_batches_of_its_replica_and_all_see_each_sample_once(
    plugin: dict[str, Any], num_ranks: int, two_files: list[str]
) -> None:
    settings = {"train_iters": 6} | plugin
    one = run_ranks(partial(splits_on_rank, two_files[0], settings, {}), num_ranks=num_ranks)
    dp_size = num_ranks // 2
    updates = {"train_iters": 6 * dp_size}
    (alone,) = run_ranks(partial(splits_on_rank, two_files[0], updates, {}), num_ranks=1)

    by_replica = {str(real_rows(rank["train"])) for rank in one}
    together = sorted(row for rows in by_replica for row in eval(rows))
    assert len(by_replica) == dp_size
    assert together == sorted(real_rows(alone["train"]))
    assert len({tuple(rank["losses"]) for rank in one}) == 1
    assert one[0]["lengths"] == (6, 2, 2)


def losses_and_hf_losses(prefix: str, data: dict[str, Any]) -> tuple[list[float], list[float]]:
    _, model, (train, _, _) = prepare(prefix, {"train_iters": 3}, TinyModel("llama"), **data)
    hf_model = TinyModel("llama").build().eval()
    model.eval()
    ours, theirs = [], []
    for batch in train:
        ours.append(model(**batch).loss.item())
        batch.pop("seq_idx", None)
        with torch.no_grad():
            theirs.append(hf_model(**batch).loss.item())
    return ours, theirs


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({}, id="plain"),
        pytest.param({"eod_mask_loss": True}, id="eod"),
        pytest.param({"reset_position_ids": True, "reset_attention_mask": True}, id="resets"),
    ],
)
def test_the_loss_is_that_of_the_hugging_face_model(
    data: dict[str, Any], two_files: list[str]
) -> None:
    ((ours, theirs),) = run_ranks(losses_and_hf_losses, two_files[0], data, num_ranks=1)

    assert ours == pytest.approx(theirs, abs=1e-5)


def batches_and_resumed(prefix: str, folder: str, plugin: dict[str, Any]) -> tuple[Any, Any, Any]:
    accelerator, model, (train, valid, _) = prepare(prefix, plugin)
    rest, evaluated = [], []
    for number, batch in enumerate(train):
        model(**batch)
        if number == 2:
            list(valid)
            accelerator.save_state(folder)
        if number > 2:
            rest.append(batch["input_ids"].tolist())
    evaluated.append(real_rows(valid))
    fetched = train.dataset.dataset
    accelerator.load_state(folder)
    if fetched is not None:
        train.dataset.dataset = counting = _Counting(fetched)
    resumed = [batch["input_ids"].tolist() for batch in train]
    evaluated.append(real_rows(valid))
    num_fetched = None if fetched is None else counting.number
    return (rest, resumed), evaluated, num_fetched


def rows_after(prefix: str, consumed: list[int] | None) -> tuple[Any, Any]:
    plugin = {"train_iters": 6, "consumed_samples": consumed}
    _, _, (train, valid, _) = prepare(prefix, plugin)
    return real_rows(train), [real_rows(valid), real_rows(valid)]


def test_consumed_samples_are_left_out_of_train_and_of_the_windows_of_validation(
    two_files: list[str],
) -> None:
    ((train, valid),) = run_ranks(rows_after, two_files[0], None, num_ranks=1)
    ((rest, later),) = run_ranks(rows_after, two_files[0], [8, 8], num_ranks=1)

    assert rest == train[8:]
    assert later[0] == valid[1]
    assert later[0] != valid[0]


class _Counting:
    """A dataset that knows how many samples were asked for."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.number = dataset, 0

    def __getitem__(self, index: int) -> Any:
        self.number += 1
        return self.dataset[index]


def test_a_resumed_run_sees_the_rest_of_the_samples_in_order_and_fetches_no_others(
    two_files: list[str], tmp_path: Path
) -> None:
    results = run_ranks(
        batches_and_resumed, two_files[0], str(tmp_path / "state"), {"train_iters": 6}, num_ranks=2
    )

    for (rest, resumed), (evaluated, again), num_fetched in results:
        assert resumed == rest
        assert again == evaluated
        assert num_fetched == 3 * 4


def error_of(prefix: Any, plugin: dict[str, Any], data: dict[str, Any]) -> str:
    try:
        prepare(prefix, plugin, **data)
    except (ConfigurationError, DataFileError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.parametrize(
    ("data", "plugin", "message"),
    [
        ({"splits_string": "9998,0.002,0.002"}, {}, "validation split gets 0 of 60 sequences"),
        ({"seq_length": 64, "split": "1,0,99", "splits_string": None}, {}, "seq_length"),
        ({"seq_length": 1000}, {}, "64 positions"),
        ({"micro_batch_size": None}, {}, "micro_batch_size=None"),
        ({"data_path": None}, {}, "needs data_path"),
        ({"split": "1,1,1"}, {}, "Give one"),
        ({"create_attention_mask": False, "reset_attention_mask": True}, {}, "create_attention"),
        ({"data_path": [0.3, "a", "b", "c"]}, {}, "weights"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    data: dict[str, Any], plugin: dict[str, Any], message: str, two_files: list[str]
) -> None:
    (error,) = run_ranks(error_of, two_files[0], plugin, data, num_ranks=1)

    assert message in error


def test_a_damaged_file_is_an_error_on_every_rank(two_files: list[str]) -> None:
    Path(two_files[0] + ".bin").write_bytes(b"\x01\x00" * 10)

    errors = run_ranks(error_of, two_files[0], {"tp_degree": 2}, {}, num_ranks=2)

    assert len(set(errors)) == 1
    assert "the file has 20 bytes" in errors[0]


def test_ids_beyond_the_vocabulary_are_an_error_before_the_first_step(tmp_path: Path) -> None:
    prefix = write_files(tmp_path / "large", [*documents(60), [1, 2, 99]])

    (error,) = run_ranks(error_of, prefix, {}, {}, num_ranks=1)

    assert "the token id is 99" in error
    assert "at byte" in error


def test_unknown_arguments_are_named_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean data_path"):
        MegatronLMDummyDataLoader(data_pth="x")


def own_provider(prefix: str) -> list[list[int]]:
    tokens = torch.arange(3 * SEQ_LENGTH).reshape(3, SEQ_LENGTH)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    sizes = []

    def provide(given: list[int | None]) -> list[Any]:
        sizes.append(given)
        return [rows, rows, None]

    plugin = {"custom_megatron_datasets_provider_function": provide, "train_iters": 1}
    _, _, (train, _, test) = prepare(prefix, plugin)
    assert sizes == [[4, 8, 8]]
    assert list(test) == []
    return [row.tolist() for batch in train for row in batch["input_ids"][:3]]


def test_datasets_of_ones_own_are_used(two_files: list[str]) -> None:
    (rows,) = run_ranks(own_provider, two_files[0], num_ranks=1)

    assert rows == torch.arange(3 * SEQ_LENGTH).reshape(3, SEQ_LENGTH).tolist()


class _Drawn:
    """Rows from a generator of the dataset's own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, _index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(1, 50, (SEQ_LENGTH,), generator=self.generator)
        return {"input_ids": row, "labels": row}


def drawn_rows(prefix: str, state: dict[str, Any] | None) -> tuple[dict[str, Any], Any]:
    """Return the position after two batches and the rows after it; or those after `state`."""
    plugin = {
        "custom_megatron_datasets_provider_function": lambda _sizes: [_Drawn(), _Drawn(), None],
        "train_iters": 5,
    }
    _, _, (train, _, _) = prepare(prefix, plugin)
    if state is not None:
        train.load_state_dict(state)
        return state, real_rows(train)
    batches = iter(train)
    list(islice(batches, 2))
    return train.state_dict(), real_rows(batches)


def test_datasets_of_ones_own_that_draw_are_fetched_again_to_go_on(two_files: list[str]) -> None:
    ((state, rest),) = run_ranks(drawn_rows, two_files[0], None, num_ranks=1)
    ((_, resumed),) = run_ranks(drawn_rows, two_files[0], state, num_ranks=1)

    assert len(rest) == 3 * 4
    assert resumed == rest


def evaluations(prefix: str, plugin: dict[str, Any]) -> Any:
    """Return the sizes that the datasets are built with, and the steps of two evaluations."""
    rows = [{"input_ids": row, "labels": row} for row in torch.ones(64, SEQ_LENGTH).long()]
    sizes = []

    def provide(given: list[int | None]) -> list[Any]:
        sizes.extend(given)
        return [rows] * 3

    fields = {"custom_megatron_datasets_provider_function": provide, "train_iters": 5}
    _, _, (_, valid, test) = prepare(prefix, fields | plugin)
    return sizes, len(valid), [len(list(valid)), len(list(test))]


@pytest.mark.parametrize(
    ("eval_iters", "eval_interval", "num_evaluations"), [(2, 3, 2), (3, 3, 2), (2, 2, 3)]
)
def test_evaluations_have_the_steps_and_the_samples_that_are_asked_for(
    eval_iters: int, eval_interval: int, num_evaluations: int, two_files: list[str]
) -> None:
    plugin = {"eval_iters": eval_iters, "eval_interval": eval_interval}

    [(sizes, length, steps)] = run_ranks(evaluations, two_files[0], plugin, num_ranks=1)

    one = 4 * eval_iters  # two micro-batches of two rows in a step
    assert sizes == [5 * 4, num_evaluations * one, one], "one more than 5 updates have"
    assert (length, steps) == (eval_iters, [eval_iters, eval_iters])


def test_a_number_out_of_range_is_refused_in_the_data_arguments_too(two_files: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="eval_interval is 0; it must be at least 1"):
        run_ranks(partial(prepare, eval_interval=0), two_files[0], {}, num_ranks=1)


def streams(sizes: list[int | None]) -> list[Any]:
    return [iter(()), None, None]


def test_datasets_of_ones_own_without_a_length_are_refused_alike(two_files: list[str]) -> None:
    plugin = {"tp_degree": 2, "custom_megatron_datasets_provider_function": streams}

    errors = run_ranks(
        partial(prepare, two_files[0]), plugin, num_ranks=2, errors="return", timeout=60
    )

    assert {type(error) for error in errors} == {ConfigurationError}
    assert "returned list where three datasets with a length are needed" in str(errors[1])


def prepared_after_the_model(prefix: str) -> list[int]:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(train_iters=5))
    model = TINY.build()
    accelerator.prepare(model, TinyOptimizer().build(model))
    dummy = MegatronLMDummyDataLoader(
        data_path=prefix, split="8,1,1", seq_length=SEQ_LENGTH, micro_batch_size=2, eval_iters=1
    )
    return [len(part) for part in dummy.build_train_valid_test_data_iterators(accelerator)]


def test_prepared_after_the_model_it_is_as_long_as_with_it(two_files: list[str]) -> None:
    assert run_ranks(prepared_after_the_model, two_files[0], num_ranks=1) == [[5, 1, 1]]


def with_another_loader_and_schedule(prefix: str) -> tuple[int, int]:
    from torch.utils.data import DataLoader

    from tests.helpers.tiny_models import pad_samples, ragged_samples

    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(eval_iters=1))
    model = TINY.build()
    optimizer = TinyOptimizer().build(model)
    plain = DataLoader(ragged_samples(8), batch_size=2, collate_fn=pad_samples)
    dummy = MegatronLMDummyDataLoader(
        data_path=prefix, split="8,1,1", seq_length=SEQ_LENGTH, micro_batch_size=2
    )
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=7)
    prepared = accelerator.prepare(plain, model, optimizer, scheduler, dummy)
    train = prepared[-1]
    return len(train), sum(prepared[1](**batch).loss.item() > 0 for batch in train)


def test_it_goes_together_with_a_plain_loader_and_the_scheduler_says_how_long(
    two_files: list[str],
) -> None:
    ((length, steps),) = run_ranks(with_another_loader_and_schedule, two_files[0], num_ranks=1)

    assert (length, steps) == (7, 7)
