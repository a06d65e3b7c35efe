"""Files that are on the disk when they are said to be, with their checksums taken on the way."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 22
_HASHED_BYTES = 1 << 20


@dataclass(frozen=True)
class FileFacts:
    """Size and checksum of a file."""

    num_bytes: int
    sha256: str


class HashingFile(io.RawIOBase):
    """A new file that is written from front to end; its checksum is taken as it is written."""

    def __init__(self, path: Path, *, has_helper: bool = False) -> None:
        """Create the file; it must not exist.

        Args:
            path: The file.
            has_helper: Let a thread take the checksum while more is written.
        """
        super().__init__()
        self._file = open(path, "x+b", buffering=0)  # noqa: SIM115  # closed by close()
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        self._helper = _Helper(self._hash_range) if has_helper else None
        self.failure: OSError | None = None
        """Why a write failed: a caller in C++ may report something else."""

    def write(self, content: Any) -> int:
        """Write all of `content`; a partial write of the system is continued."""
        view = memoryview(content).cast("B")
        start = 0
        while start < len(view):
            try:
                start += self._file.write(view[start:]) or 0
            except OSError as error:
                self.failure = error
                raise
        self._num_bytes += len(view)
        if self._helper is None:
            self._hash.update(view)
        else:
            self._helper.go_on(self._num_bytes)
        return len(view)

    def _hash_range(self, start: int, end: int) -> None:
        """Take in what was written: from the file, as the writer's memory may be gone."""
        block = memoryview(bytearray(min(_HASHED_BYTES, end - start)))
        while start < end:
            got = os.preadv(self._file.fileno(), [block[: end - start]], start)
            if not got:
                raise OSError(errno.EIO, f"{self._file.name} is shorter than what was written")
            self._hash.update(block[:got])
            start += got

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._num_bytes

    def sync(self) -> FileFacts:
        """Wait until the content is on the disk, and return what was written. Ends the writing.

        Raises:
            OSError: Something could not be written, or not be read again for the checksum.
        """
        os.fsync(self._file.fileno())
        if self._helper is not None:
            self._helper.finish(self._num_bytes)
            if self._helper.failure is not None:
                raise self._helper.failure
        return FileFacts(self._num_bytes, self._hash.hexdigest())

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            if self._helper is not None:
                self._helper.finish(self._num_bytes)
            self._file.close()
        super().close()


class _Helper:
    """A thread that does something with what has been written to a file, while more is written."""

    def __init__(self, action: Callable[[int, int], None]) -> None:
        """Start.

        Args:
            action: Given first and last position of what it has not had yet.
        """
        self.failure: Exception | None = None
        self._action = action
        self._end = 0
        self._is_complete = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpoint file", daemon=True)
        self._thread.start()

    def go_on(self, end: int) -> None:
        """Say how much has been written."""
        if end - self._end >= _HASHED_BYTES:
            with self._changed:
                self._end = end
                self._changed.notify()

    def finish(self, end: int) -> None:
        """Wait until all of it is done; what went wrong is in `failure`."""
        with self._changed:
            self._end, self._is_complete = end, True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        done = 0
        try:
            while (end := self._next_end(done)) > done:
                self._action(done, end)
                done = end
        except Exception as error:  # the writer raises it
            self.failure = error

    def _next_end(self, done: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._is_complete or self._end > done)
            return self._end


@contextmanager
def new_file(path: Path, *, has_helper: bool = False) -> Iterator[HashingFile]:
    """Open a new file for writing, and close it after the block."""
    file = HashingFile(path, has_helper=has_helper)
    try:
        yield file
    finally:
        file.close()


def replace_file(path: Path, text: str) -> None:
    """Give `path` the content `text`: afterwards it has the old content or the new, all of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def facts_of(path: Path) -> FileFacts:
    """Return size and checksum of a file, read from the disk."""
    digest = hashlib.sha256()
    num_bytes = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            num_bytes += len(block)
    return FileFacts(num_bytes, digest.hexdigest())
