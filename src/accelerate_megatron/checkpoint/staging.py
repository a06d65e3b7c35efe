"""The copies that a save in the background writes from, in host memory that is made beforehand.

New memory costs several times the copying, since the system hands it out page by page. A thread
therefore makes it while the first updates run, and every save uses it again.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext

import torch

from accelerate_megatron import engine

_CHUNK = 1 << 26
"""Bytes that are touched without looking whether the process is ending."""


class Staging:
    """Memory on the host that tensors are copied to."""

    def __init__(self) -> None:
        """Have none yet."""
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._is_ending = threading.Event()

    def reserve(self, pieces: engine.TensorPieces) -> None:
        """Begin to make memory for `pieces`, in a thread; `hold` waits for it.

        Args:
            pieces: What will be held, of these names, shapes and types. Not kept.
        """
        wanted = {
            (name, index): torch.empty_like(piece.data, device="meta")
            for name, found in pieces.by_name.items()
            for index, piece in enumerate(found)
        }
        device = pieces.device()
        self._thread = threading.Thread(
            target=self._make, args=(wanted, device), name="checkpoint memory", daemon=True
        )
        self._thread.start()

    def hold(self, pieces: engine.TensorPieces) -> engine.TensorPieces:
        """Return copies of `pieces`, valid until the next call."""
        self._join()
        return pieces.copied_into(self._buffer_for)

    def stop(self) -> None:
        """Let the thread end soon: a process must not end while it runs."""
        self._is_ending.set()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _make(self, wanted: dict[tuple[str, int], torch.Tensor], device: torch.device) -> None:
        # A thread begins on the first device, where it would take memory.
        is_cuda = device.type == "cuda"
        with torch.cuda.device(device) if is_cuda else nullcontext():
            for (name, index), like in wanted.items():
                if self._is_ending.is_set():
                    return
                buffer = self._new_buffer(name, index, like, is_pinned=is_cuda)
                for start in range(0, 0 if is_cuda else buffer.nbytes, _CHUNK):
                    if self._is_ending.is_set():
                        return
                    size = min(_CHUNK, buffer.nbytes - start)
                    # Not torch's zero_: its threads would be those of another team.
                    ctypes.memset(buffer.data_ptr() + start, 0, size)

    def _buffer_for(self, name: str, index: int, data: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get((name, index))
        if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
            buffer = self._new_buffer(name, index, data, is_pinned=data.is_cuda)
        return buffer

    def _new_buffer(
        self, name: str, index: int, like: torch.Tensor, *, is_pinned: bool
    ) -> torch.Tensor:
        buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=is_pinned)
        self._buffers[name, index] = buffer
        return buffer
