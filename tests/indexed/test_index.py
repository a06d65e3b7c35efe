"""Opening an index: every field of it is checked, whatever its bytes are."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_megatron.errors import DataFileError
from accelerate_megatron.indexed.index import check_tokens, read_index
from tests.indexed.files import documents, write_files

DOCS = [[5, 6, 0], [7, 8, 9, 10, 0], [1, 2, 3, 4, 5, 6, 0]]
LENGTHS, POINTERS, ENDS = 34, 34 + 12, 34 + 12 + 24


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_files(tmp_path / "a", DOCS)


def test_documents_are_read_back(prefix: str) -> None:
    index = read_index(prefix)

    assert index.lengths.tolist() == [3, 5, 7]
    assert index.document_lengths().tolist() == [3, 5, 7]
    assert index.tokens().tolist() == [token for doc in DOCS for token in doc]
    assert (index.num_documents, index.num_tokens, index.dtype) == (3, 15, np.uint16)


@pytest.mark.parametrize(
    ("at", "content", "message"),
    [
        (0, b"NOTANIDX!", "at byte 0"),
        (0, b"TNTIDX\x00\x00", "older cached or lazy format"),
        (9, struct.pack("<Q", 2), "at byte 9, the version is 2"),
        (17, b"\x63", "at byte 17, the dtype code is 99"),
        (17, b"\x07", "a float"),
        (17, b"\x04", "begins at byte 6, but the int32 tokens before it end at byte 12"),
        (18, struct.pack("<Q", 2**60), "the file has"),
        (26, struct.pack("<Q", 9), "9 document ends"),
        (LENGTHS + 4, struct.pack("<i", -5), "at byte 38, sequence 1 has the length -5"),
        (POINTERS + 8, struct.pack("<q", 10**12), "sequence 1 begins at byte 1000000000000"),
        (ENDS, struct.pack("<q", 1), "the first document end is 1"),
        (ENDS + 8, struct.pack("<q", 9), "document end 2 is 2, below the one before it, 9"),
        (ENDS + 24, struct.pack("<q", 8), "the last document end is 8"),
    ],
)
def test_a_wrong_field_is_named_with_its_offset(
    at: int, content: bytes, message: str, prefix: str
) -> None:
    path = Path(prefix + ".idx")
    raw = bytearray(path.read_bytes())
    raw[at : at + len(content)] = content
    path.write_bytes(raw)

    with pytest.raises(DataFileError, match=r"a\.idx") as caught:
        read_index(prefix)

    assert message in str(caught.value)


def test_a_wrong_but_valid_dtype_of_equal_size_is_found_by_its_negative_ids(
    tmp_path: Path,
) -> None:
    prefix = write_files(tmp_path / "a", [[1, 60000, 2]])
    path = Path(prefix + ".idx")
    path.write_bytes(path.read_bytes().replace(b"\x08", b"\x03", 1))

    with pytest.raises(DataFileError, match="at byte 2, the token id is -5536"):
        check_tokens(read_index(prefix), 65000)


@pytest.mark.parametrize("name", ["a.idx", "a.bin"])
def test_missing_empty_and_cut_files_are_refused(name: str, prefix: str) -> None:
    path = Path(prefix).with_name(name)
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:20], b"", whole + b"\x00"):
        path.write_bytes(content)
        with pytest.raises(DataFileError, match=r"a\.(idx|bin)"):
            read_index(prefix)
    path.unlink()
    with pytest.raises(DataFileError, match="there is no such file"):
        read_index(prefix)


def test_ids_beyond_the_vocabulary_are_named_with_their_place(prefix: str) -> None:
    assert check_tokens(read_index(prefix), 11) == (0, 10)

    with pytest.raises(DataFileError, match="at byte 12, the token id is 10"):
        check_tokens(read_index(prefix), 10)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_files(tmp_path_factory.mktemp("fuzz") / "a", documents(5))


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4), st.data())
def test_no_damage_of_the_index_gives_other_tokens_unnoticed(
    fuzzed: str, changes: list[tuple[int, int]], data: st.DataObject
) -> None:
    path = Path(fuzzed + ".idx")
    whole = path.read_bytes()
    raw = bytearray(whole)
    for at, value in changes:
        raw[at % len(raw)] = value
    cut = data.draw(st.integers(0, len(raw)))
    raw = raw if data.draw(st.booleans()) else raw[:cut]
    expected = read_index(fuzzed)
    try:
        path.write_bytes(raw)
        index = read_index(fuzzed)
        check_tokens(index, 99)
        pointers = np.frombuffer(raw, "<i8", len(index.lengths), 34 + 4 * len(index.lengths))
        assert pointers[-1] + index.lengths[-1] * index.dtype.itemsize <= 10**9
        assert index.num_tokens * index.dtype.itemsize == expected.num_tokens * 2
    except DataFileError:
        pass
    finally:
        path.write_bytes(whole)
