"""The files of the tensors, in torch's format, which Megatron-Core reads too.

One file for each rank that has something to write, one after another in this process: Megatron's
own writer starts processes, which a script without a `__main__` guard cannot bear.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from accelerate_megatron import engine
from accelerate_megatron.checkpoint.files import FileFacts, HashingFile, new_file
from accelerate_megatron.checkpoint.safe import METADATA_NAME, unsafe_object
from accelerate_megatron.errors import CheckpointError

_SUFFIX = ".distcp"


class TensorWriter(StorageWriter):
    """Writes this rank's pieces into one file, and on the first rank the index of all.

    Attributes:
        written: Name -> size and checksum of the files that this rank wrote.
    """

    def __init__(self, folder: Path, *, in_background: bool) -> None:
        """Write into `folder`, which exists.

        Args:
            folder: Of the tensors.
            in_background: Leave the other cores, and what is one for the process, to the training.
                It also starts no thread, which a process that is ending cannot.
        """
        self.written: dict[str, FileFacts] = {}
        self._folder = folder
        self._in_background = in_background

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank the name of its file."""
        return [
            dataclasses.replace(plan, storage_data=f"__{rank}_0{_SUFFIX}")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors of `plan` one after another."""
        results: list[WriteResult] = []
        if plan.items:
            name: str = plan.storage_data
            checksums = nullcontext() if self._in_background else _without_torch_checksums()
            with (
                checksums,
                new_file(self._folder / name, has_helper=not self._in_background) as file,
            ):
                try:
                    results = [self._write(item, planner, file, name) for item in plan.items]
                except RuntimeError as error:
                    # What torch makes of an error of the file does not say what it was.
                    raise file.failure or error from None
                self.written[name] = file.sync()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(
        self, item: WriteItem, planner: SavePlanner, file: HashingFile, name: str
    ) -> WriteResult:
        assert item.type != WriteItemType.BYTE_IO, "only tensors are written"
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        start = file.tell()
        torch.save(_own_storage(tensor), cast("IO[bytes]", file))
        place = _StorageInfo(name, start, file.tell() - start)
        return WriteResult(index=item.index, size_in_bytes=place.length, storage_data=place)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index. Called on the first rank."""
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        with new_file(self._folder / METADATA_NAME) as file:
            file.write(pickle.dumps(metadata))
            self.written[METADATA_NAME] = file.sync()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True."""
        return True


@contextmanager
def _without_torch_checksums() -> Iterator[None]:
    """Let torch.save compute no checksum of its own: the manifest has a better one."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU without the rest of a larger memory it is a part of."""
    tensor = tensor.detach().cpu()
    is_part = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.clone() if is_part else tensor


class TensorReader(FileSystemReader):
    """Reads tensors by an index that was read before, by `safe.read_metadata`."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        """Read from `folder` what `metadata` says."""
        super().__init__(folder)
        self.folder = folder
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the index that was given; nothing is unpickled."""
        return self._metadata


def read_tensors(pieces: engine.TensorPieces, reader: TensorReader) -> None:
    """Read this rank's pieces, in place. Communicates with nobody.

    Raises:
        UnsafeCheckpointError: Where a tensor should be, there is what could run code.
        CheckpointError: A file cannot be read.
    """
    try:
        engine.read_pieces(pieces, reader)
    except CheckpointException as error:  # torch's, a BaseException, with the ranks' own in it
        causes = [failure[0] for failure in error.failures.values()]
        if any(isinstance(cause, pickle.UnpicklingError) for cause in causes):
            raise unsafe_object(reader.folder, causes[0]) from error
        raise CheckpointError(
            f"The tensors in {reader.folder} cannot be read: {causes[0]}"
        ) from error
    except pickle.UnpicklingError as error:
        raise unsafe_object(reader.folder, error) from error
