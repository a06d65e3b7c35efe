"""Files whose checksum is taken while they are written."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from accelerate_megatron.checkpoint import files
from accelerate_megatron.checkpoint.files import FileFacts, facts_of, new_file

SIZES = (1, 3, 1 << 20, 5, (1 << 20) + 1, 3 << 20)


@pytest.mark.parametrize("has_helper", [False, True])
@pytest.mark.parametrize("sizes", [(), (7,), SIZES], ids=["empty", "small", "large"])
def test_the_facts_are_those_of_what_was_written(
    sizes: tuple[int, ...], has_helper: bool, tmp_path: Path
) -> None:
    parts = [os.urandom(size) for size in sizes]
    path = tmp_path / "file"

    with new_file(path, has_helper=has_helper) as file:
        for part in parts:
            file.write(part)
        facts = file.sync()

    content = b"".join(parts)
    assert path.read_bytes() == content
    assert facts == facts_of(path) == FileFacts(len(content), hashlib.sha256(content).hexdigest())
    assert "checkpoint file" not in [thread.name for thread in threading.enumerate()]


def test_a_file_that_cannot_be_read_again_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "preadv", fail)

    with new_file(tmp_path / "file", has_helper=True) as file:
        file.write(bytes(1 << 12))
        with pytest.raises(OSError, match="Input/output error"):
            file.sync()


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"

    with new_file(path, has_helper=True) as file:
        file.write(bytes(1 << 12))
        os.truncate(path, 1 << 11)
        with pytest.raises(OSError, match="shorter than what was written"):
            file.sync()


def test_a_checksum_that_could_not_be_taken_is_an_error(tmp_path: Path) -> None:
    def fail(*_args: Any) -> None:
        raise MemoryError

    with new_file(tmp_path / "file", has_helper=True) as file:
        file._helper._action = fail  # type: ignore[union-attr]
        file.write(bytes(1 << 12))
        with pytest.raises(MemoryError):
            file.sync()


def test_a_write_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    def write_and_fail() -> Any:
        with new_file(tmp_path / "file", has_helper=True) as file:
            file.write(bytes(1 << 22))
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        write_and_fail()

    assert "checkpoint file" not in [thread.name for thread in threading.enumerate()]
