"""`accelerate-megatron data`: what is built is what was read, and broken input is named."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from accelerate_megatron.cli.main import main
from accelerate_megatron.errors import BuildStoppedError, ConfigurationError, DataFileError
from accelerate_megatron.indexed import building, documents
from accelerate_megatron.indexed.building import BuildPlan, build
from accelerate_megatron.indexed.index import read_index
from accelerate_megatron.indexed.merging import inspect, merge
from accelerate_megatron.indexed.tokenizing import Encoder, TokenizerPlan, plan_tokenizer
from tests.indexed.files import write_files

WORDS = ["<eos>", "<unk>", *(f"w{n}" for n in range(50))]
TEXTS = ["w1 w2", "", "w3 w4 w5 w6", "w7", " ", "w8 w9 w0 w1 w2 w3"]
IDS = [[WORDS.index(word) for word in text.split()] for text in TEXTS]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


def write_jsonl(path: Path, texts: Sequence[str] = TEXTS, key: str = "text") -> str:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def read_back(prefix: str) -> list[list[int]]:
    index = read_index(prefix)
    starts = np.cumsum(index.document_lengths())[:-1]
    return [part.tolist() for part in np.split(np.asarray(index.tokens()), starts)]


def plan(tokenizer: str, tmp_path: Path, *inputs: str, **changes: Any) -> BuildPlan:
    eod = changes.pop("append_eod", False)
    return BuildPlan(
        inputs=inputs,
        output=str(tmp_path / "out"),
        tokenizer=plan_tokenizer(tokenizer, append_eod=eod),
        **changes,
    )


@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_are_those_of_the_input_in_order_with_their_last_token(
    append_eod: bool, tokenizer: str, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl")

    report = build(plan(tokenizer, tmp_path, source, append_eod=append_eod))

    expected = [[*ids, 0] if ids and append_eod else ids for ids in IDS]
    assert read_back(report.prefixes["text"]) == expected
    assert (report.documents, report.empty) == (6, {"text": 2})


def test_lengths_and_documents_count_the_appended_token(tokenizer: str, tmp_path: Path) -> None:
    texts = [" ".join(["w1"] * (n - 1)) for n in (3, 5, 7)]
    source = write_jsonl(tmp_path / "in.jsonl", texts)

    report = build(plan(tokenizer, tmp_path, source, append_eod=True))

    index = read_index(report.prefixes["text"])
    assert index.lengths.tolist() == [3, 5, 7]
    assert index.document_ends.tolist() == [0, 1, 2, 3]


def test_an_empty_first_document_is_a_document(tokenizer: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["", "w1 w2"])

    report = build(plan(tokenizer, tmp_path, source, append_eod=True))

    assert read_back(report.prefixes["text"]) == [[], [3, 4, 0]]


@pytest.mark.parametrize("part_bytes", [1, 7, 40, 10**6])
def test_wherever_lines_are_cut_into_parts_each_is_read_once(
    part_bytes: int, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    texts = [f"w{n} ü" * (n % 3) for n in range(20)]
    write_jsonl(source, texts)

    parts = documents.find_parts([str(source)], part_bytes=part_bytes)
    read = [doc["text"] for part in parts for doc in documents.read_documents(part, ["text"])]

    assert read == texts


@pytest.mark.parametrize("kind", ["txt", "parquet", "dataset"])
def test_other_sources_give_the_same_documents(
    kind: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text for text in TEXTS if text.strip()] * 3
    monkeypatch.setattr(documents, "PART_ROWS", 5)
    source = tmp_path / f"in.{kind}"
    if kind == "txt":
        source.write_text("\n\n".join(texts))
    elif kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        parquet.write_table(
            pyarrow.table({"text": texts, "n": range(len(texts))}), source, row_group_size=4
        )
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(source))

    report = build(plan(tokenizer, tmp_path, str(source)))

    expected = [[WORDS.index(word) for word in text.split()] for text in texts]
    assert read_back(report.prefixes["text"]) == expected


def test_each_key_has_files_of_its_own_and_lists_are_sequences(
    tokenizer: str, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"title": "w1", "body": ["w2 w3", "", "w4"]}\n')

    report = build(plan(tokenizer, tmp_path, str(source), keys=("title", "body"), append_eod=True))

    index = read_index(report.prefixes["body"])
    assert read_back(report.prefixes["title"]) == [[3, 0]]
    assert read_back(report.prefixes["body"]) == [[4, 5, 6, 0]]
    assert index.lengths.tolist() == [2, 2]
    assert index.document_ends.tolist() == [0, 2]


def test_the_files_are_byte_for_byte_those_of_megatrons_builder(
    tokenizer: str, tmp_path: Path
) -> None:
    from accelerate_megatron import engine

    engine.activate("cpu")
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    source = write_jsonl(tmp_path / "in.jsonl")
    report = build(plan(tokenizer, tmp_path, source, append_eod=True))
    theirs = str(tmp_path / "theirs")
    builder = IndexedDatasetBuilder(theirs + ".bin", dtype=DType.optimal_dtype(len(WORDS)))
    for ids in IDS:
        document = [*ids, 0] if ids else []
        builder.add_document(document, [len(document)] if document else [])
    builder.finalize(theirs + ".idx")

    for suffix in (".bin", ".idx"):
        ours = Path(report.prefixes["text"] + suffix).read_bytes()
        assert ours == Path(theirs + suffix).read_bytes()


def test_a_build_that_was_stopped_goes_on_and_gives_the_same_files(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS * 40)
    cut = lambda inputs, split=None: documents.find_parts(inputs, part_bytes=500)  # noqa: E731
    monkeypatch.setattr(building, "find_parts", cut)
    wanted = plan(tokenizer, tmp_path, source)
    whole = build(wanted)
    expected = Path(whole.prefixes["text"] + ".bin").read_bytes()

    def stop(_part: Any, seen: list[int] = []) -> None:  # noqa: B006
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(wanted, overwrite=True, on_part=stop)
    resumed = build(wanted, overwrite=True)

    assert resumed.parts_found == 3
    assert Path(resumed.prefixes["text"] + ".bin").read_bytes() == expected
    assert sorted(p.name for p in tmp_path.iterdir() if "out" in p.name) == [
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_a_process_that_is_killed_ends_the_build_and_the_next_one_goes_on(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS * 40)
    cut = lambda inputs, split=None: documents.find_parts(inputs, part_bytes=500)  # noqa: E731
    monkeypatch.setattr(building, "find_parts", cut)
    wanted = plan(tokenizer, tmp_path, source, workers=2)

    others = set(multiprocessing.active_children())

    def kill_one() -> None:
        while not (children := set(multiprocessing.active_children()) - others):
            time.sleep(0.01)
        children.pop().kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(BuildStoppedError, match=r"stays in .*out\.parts: repeat the command"):
        build(wanted)
    killer.join()

    build(replace(wanted, workers=1))
    assert read_back(wanted.prefix_of("text")) == IDS * 40


def test_a_second_build_of_the_same_files_at_the_same_time_is_refused(
    tokenizer: str, tmp_path: Path
) -> None:
    wanted = plan(tokenizer, tmp_path, write_jsonl(tmp_path / "in.jsonl"))
    parts = tmp_path / "out.parts"
    parts.mkdir()
    holding = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", holding, parts / "lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match="Another build is writing to"):
            build(wanted)
        assert other.stdin is not None
        other.stdin.close()

    build(wanted)
    assert read_back(wanted.prefix_of("text")) == IDS


def test_parts_of_another_build_are_not_taken(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl")
    wanted = plan(tokenizer, tmp_path, source)
    monkeypatch.setattr(building, "_join", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build(wanted)

    with pytest.raises(ConfigurationError, match="parts of another build"):
        build(plan(tokenizer, tmp_path, source, append_eod=True))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "w1"}\n{"text": \n', "line 2: no JSON"),
        (b'{"text": "w1"}\n\n\n{"text": "\xff"}\n', "line 4: byte 27 of the file is no UTF-8"),
        (b'{"text": "w1"}\n[1]\n', "line 2: a JSON list"),
        (b'{"text": "w1"}\n{"other": "w1"}\n', "line 2: there is no 'text'; there are 'other'"),
        (b'{"text": 5}\n', "line 1: 'text' is a int"),
        (b'{"text": "w1"}\n{"text": "w2 \\ud800"}\n', "line 2: 'text' holds half"),
        (b"", "there is no document in it"),
    ],
)
def test_broken_input_is_named_with_its_line(
    content: bytes, message: str, tokenizer: str, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)

    with pytest.raises(DataFileError, match=r"in\.jsonl") as caught:
        build(plan(tokenizer, tmp_path, str(source)))

    assert message in str(caught.value)
    assert not list(tmp_path.glob("out*.idx"))


def test_ids_that_do_not_fit_the_dtype_are_refused() -> None:
    encoder = Encoder(TokenizerPlan("wide", Tokenizer(models.BPE()).to_str(), 100, None, False))

    with pytest.raises(DataFileError, match="gave the id 70000"):
        encoder.as_array([[1, 70000]])


def test_a_missing_library_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.parquet").write_bytes(b"")

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(documents.importlib, "import_module", missing)

    with pytest.raises(ImportError, match=r"pyarrow is needed.*accelerate-megatron\[data\]"):
        documents.find_parts([str(tmp_path / "in.parquet")])


def test_merging_puts_documents_one_after_another(tmp_path: Path) -> None:
    docs = [[[1, 2], [3]], [[4, 5, 6]]]
    prefixes = [write_files(tmp_path / name, part) for name, part in zip("ab", docs, strict=True)]

    merge(prefixes, str(tmp_path / "both"))

    assert read_back(str(tmp_path / "both")) == [[1, 2], [3], [4, 5, 6]]
    with pytest.raises(ConfigurationError, match="is there already"):
        merge(prefixes, str(tmp_path / "both"))
    with pytest.raises(ConfigurationError, match="one of the datasets"):
        merge(prefixes, prefixes[0], overwrite=True)


def test_datasets_of_two_dtypes_are_not_merged(tmp_path: Path) -> None:
    prefixes = [
        write_files(tmp_path / name, [[1, 2]], dtype)
        for name, dtype in zip("ab", ("<u2", "<i4"), strict=True)
    ]

    with pytest.raises(ConfigurationError, match="different dtypes"):
        merge(prefixes, str(tmp_path / "both"))


def test_a_histogram_counts_every_document_once(tmp_path: Path) -> None:
    docs = [[1] * n for n in (0, 1, 1, 2, 3, 4, 9, 100)]

    contents = inspect(write_files(tmp_path / "a", docs))

    assert sum(count for *_, count in contents.histogram) == len(docs)
    for low, high, count in contents.histogram:
        assert count == sum(low <= len(doc) <= high for doc in docs)


def test_the_command_builds_with_two_processes_inspects_and_says_what_is_wrong(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / name)
    output = str(tmp_path / "out")
    words = ["data", "build", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--json"]
    words += ["--output-prefix", output, "--tokenizer", tokenizer, "--workers", "2"]

    assert main(words) == 0
    built = json.loads(capsys.readouterr().out)
    assert main(words) == 1
    again = json.loads(capsys.readouterr().out)
    prefix = built["prefixes"]["text"]
    assert main(["data", "inspect", prefix, "--tokenizer", tokenizer, "--samples", "12"]) == 0
    shown = capsys.readouterr().out
    os.truncate(prefix + ".bin", 3)
    assert main(["data", "inspect", prefix]) == 1

    assert (built["documents"], built["tokens"]["text"]) == (12, 2 * sum(map(len, IDS)))
    assert "is there already" in again["problems"][0]
    assert "'w3 w4 w5 w6'" in shown
    assert "the file has 3 bytes" in capsys.readouterr().err


def test_more_parts_are_joined_than_files_may_be_open(tokenizer: str, tmp_path: Path) -> None:
    sources = [write_jsonl(tmp_path / f"{n:02d}.jsonl", [f"w{n}"]) for n in range(50)]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, most[1]))
    try:
        report = build(plan(tokenizer, tmp_path, *sources))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)

    assert report.parts == 50
    assert read_index(report.prefixes["text"]).num_documents == 50
