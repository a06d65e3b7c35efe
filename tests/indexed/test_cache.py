"""The cache: whole or invisible, never unpickled, and safe for two jobs at once."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelerate_megatron.indexed import cache
from accelerate_megatron.indexed.cache import cached

KEY = {"class": "Numbers", "split": "train", "seed": 1}


class Builder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray[Any, Any]]:
        self.calls += 1
        return {"numbers": np.arange(1000), "pairs": np.ones((3, 2), np.int32)}


def entry_of(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry


def test_an_entry_is_built_once_and_mapped_afterwards(tmp_path: Path) -> None:
    build = Builder()

    first, second = cached(tmp_path, KEY, build), cached(tmp_path, KEY, build)

    assert build.calls == 1
    assert isinstance(second["numbers"], np.memmap)
    assert np.array_equal(first["numbers"], np.arange(1000))


class Payload:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda e: (e / "numbers.npy").write_bytes(b"\x93NUMPY"), id="half-written"),
        pytest.param(lambda e: (e / "numbers.npy").unlink(), id="missing"),
        pytest.param(lambda e: (e / "description.json").write_text("{"), id="broken-description"),
        pytest.param(
            lambda e: (e / "description.json").write_text(json.dumps({"key": "other"})),
            id="another-version",
        ),
        pytest.param(
            lambda e: (e / "numbers.npy").write_bytes(pickle.dumps(Payload())), id="pickle"
        ),
        pytest.param(
            lambda e: np.save(e / "numbers.npy", np.array([Payload()], object)), id="object-array"
        ),
        pytest.param(lambda e: np.save(e / "numbers.npy", np.arange(1000) + 1), id="other-numbers"),
    ],
)
def test_what_is_damaged_is_built_again_and_replaced(
    damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build = Builder()
    cached(tmp_path / "cache", KEY, build)
    damage(entry_of(tmp_path / "cache"))

    arrays = cached(tmp_path / "cache", KEY, build)
    cached(tmp_path / "cache", KEY, build)

    assert np.array_equal(arrays["numbers"], np.arange(1000))
    assert build.calls == 2
    assert not (tmp_path / "ran").exists()


def test_another_version_of_the_format_has_entries_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Builder()
    cached(tmp_path, KEY, build)

    with monkeypatch.context() as other:
        other.setattr(cache, "FORMAT", cache.FORMAT + 1)
        cached(tmp_path, KEY, build)
        cached(tmp_path, KEY, build)
    cached(tmp_path, KEY, build)

    assert build.calls == 2


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    build = Builder()

    assert len(cached(blocked / "cache", KEY, build)["numbers"]) == 1000
    assert len(cached(None, KEY, build)["numbers"]) == 1000


def fill(folder: str) -> bool:
    key = KEY | {"seed": 5}
    return all(
        np.array_equal(cached(Path(folder), key, Builder())["numbers"], np.arange(1000))
        for _ in range(20)
    )


def test_two_jobs_that_build_one_entry_at_once_both_get_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as jobs:
        results = [jobs.submit(fill, str(tmp_path)) for _ in range(2)]

    assert [result.result() for result in results] == [True, True]
    assert not entry_of(tmp_path).name.startswith(".")
