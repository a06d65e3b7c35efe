"""A checkpoint from a stranger cannot run code, also when all of it is otherwise right."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accelerate_megatron.checkpoint.safe import load_torch_file, read_metadata
from accelerate_megatron.errors import CheckpointError, UnsafeCheckpointError
from tests.checkpoint import crafting
from tests.checkpoint.crafting import Payload
from tests.checkpoint.tensors import data_folder

PAYLOADS = [
    crafting.in_metadata,
    crafting.in_a_right_metadata,
    crafting.in_a_tensor,
    crafting.in_common,
    crafting.in_registered,
    crafting.in_registered_bare,
]


@pytest.mark.parametrize("craft", PAYLOADS)
def test_a_payload_does_not_run_and_the_checkpoint_is_refused(
    craft: Callable[[Path, Payload], None],
    copied: Path,
    tmp_path: Path,
    load: Callable[..., list[object]],
) -> None:
    flag = tmp_path / "it-ran"
    craft(copied, Payload(flag))
    crafting.recompute_manifest(copied)

    [error] = load(copied)

    assert isinstance(error, UnsafeCheckpointError), error
    assert not flag.exists()


def test_the_payload_would_run_if_it_were_unpickled(tmp_path: Path) -> None:
    flag = tmp_path / "it-ran"

    pickle.loads(pickle.dumps(Payload(flag)))

    assert flag.exists()


PATHS = [
    crafting.names_a_file_outside,
    crafting.links_outside,
    crafting.manifest_names_a_folder_outside,
    crafting.manifest_names_a_file_outside,
]


@pytest.mark.parametrize("craft", PATHS)
def test_a_file_outside_of_the_folder_is_not_read(
    craft: Callable[[Path], None], copied: Path, load: Callable[..., list[object]]
) -> None:
    craft(copied)
    crafting.recompute_manifest(copied)

    [error] = load(copied)

    assert isinstance(error, CheckpointError), error
    assert any(word in str(error) for word in ("outside", "link", "not the name", "not beside"))


def test_the_error_names_what_was_mentioned_and_the_users_way_out(copied: Path) -> None:
    crafting.in_metadata(copied, Payload(copied / "x"))

    with pytest.raises(UnsafeCheckpointError, match=r"mentions posix\.system.*allow_pickle=True"):
        read_metadata(data_folder(copied) / "tensors")


def test_a_real_index_is_read(saved: Path) -> None:
    folder = data_folder(saved) / "tensors"

    metadata = read_metadata(folder)

    assert metadata == pickle.loads((folder / ".metadata").read_bytes())


def test_allow_pickle_is_the_users_word(tmp_path: Path) -> None:
    flag, path = tmp_path / "it-ran", tmp_path / "object.pkl"
    torch.save({"x": Payload(flag)}, path)

    with pytest.raises(UnsafeCheckpointError, match="Nothing of it was run"):
        load_torch_file(path)
    assert not flag.exists()

    load_torch_file(path, allow_pickle=True)
    assert flag.exists()


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (
            b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'x'\nI1\nstb.",
            "attributes of a type",
        ),
        (
            b"ctorch.distributed.checkpoint.planner\nWriteItemType\n(I1\ntR}S'x'\nI1\nsb.",
            "attributes of a WriteItemType",
        ),
        (b"cbuiltins\neval\n(S'1+1'\ntR.", r"builtins\.eval"),
        (b"ctorch\nload\n(S'x'\ntR.", r"torch\.load"),
        (b"ctorch.storage\n_load_from_bytes\n(S'x'\ntR.", "_load_from_bytes"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", r"os\.system"),
        (b"\x80\x04\x8c\x05torch\x8c\x0chub.download\x93.", r"torch\.hub"),
    ],
    ids=[
        "class-attributes",
        "enum-attributes",
        "eval",
        "torch.load",
        "bytes",
        "stack-global",
        "dotted",
    ],
)
def test_names_that_an_index_has_no_use_for_are_refused(
    content: bytes, refusal: str, tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(content)

    with pytest.raises(UnsafeCheckpointError, match=refusal):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04N.",
        b"r\xff\xff\xff\xff.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",
        b"Pid\n.",
        b"\x82\x01.",
        b"(ios\nsystem\n.",
    ],
    ids=["empty", "no-object", "none", "memo", "bytearray", "persistent", "extension", "inst"],
)
def test_a_damaged_index_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        read_metadata(tmp_path)
