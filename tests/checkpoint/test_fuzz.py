"""Whatever happens to the bytes of an index: it is read, or refused; nothing runs, nothing dies."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelerate_megatron.checkpoint.safe import read_metadata
from accelerate_megatron.errors import CheckpointError
from tests.checkpoint.tensors import data_folder

_GLOBALS = (b"cos\nsystem\n", b"cposix\nsystem\n", b"cbuiltins\nexec\n", b"csubprocess\nPopen\n")


def mutate(content: bytes, seed: int, num_changes: int) -> bytes:
    """Return `content` with bytes changed, cut, doubled, or calls put in."""
    rng = random.Random(seed)
    changed = bytearray(content)
    for _ in range(num_changes):
        at = rng.randrange(len(changed)) if changed else 0
        kind = rng.randrange(6)
        if kind == 0 and changed:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        elif kind == 2:
            del changed[at : at + rng.randrange(1, 64)]
        elif kind == 3:
            changed[at:at] = changed[at : at + rng.randrange(1, 256)]
        elif kind == 4:
            changed[at:at] = rng.choice(_GLOBALS) + b"(S'touch IT-RAN'\ntR"
        else:
            del changed[at:]
    return bytes(changed)


def check_mutations(saved: Path, tmp_path: Path, seed: int, num_changes: int) -> None:
    source = data_folder(saved) / "tensors"
    content = (source / ".metadata").read_bytes()
    file = tmp_path / "__0_0.distcp"
    if not file.exists():
        file.write_bytes((source / "__0_0.distcp").read_bytes())
    (tmp_path / ".metadata").write_bytes(mutate(content, seed, num_changes))

    with contextlib.suppress(CheckpointError):
        read_metadata(tmp_path)
    assert not Path("IT-RAN").exists()


FUZZ = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(FUZZ, max_examples=60)
@given(seed=st.integers(0, 2**32), num_changes=st.integers(1, 4))
def test_a_mutated_index_is_read_or_refused(
    saved: Path, tmp_path: Path, seed: int, num_changes: int
) -> None:
    check_mutations(saved, tmp_path, seed, num_changes)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(FUZZ, max_examples=2000)
@given(seed=st.integers(2**32, 2**33), num_changes=st.integers(1, 8))
def test_two_thousand_mutated_indices_are_read_or_refused(
    saved: Path, tmp_path: Path, seed: int, num_changes: int
) -> None:
    check_mutations(saved, tmp_path, seed, num_changes)
