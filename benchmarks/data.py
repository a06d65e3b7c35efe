"""How fast text becomes token ids, against Megatron-LM's tool, and how fast they are read again.

python benchmarks/data.py --megatron FOLDER [--megabytes 64] [--workers 2]

FOLDER is a checkout of Megatron-LM (its tag core_v0.16.1 was used), whose
tools/preprocess_data.py is run unmodified on the same corpus, with the same tokenizer and number
of processes. Times are of whole processes, imports included. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

RUN_TOOL = """
import runpy, sys
from unittest.mock import MagicMock
# Kernels that need Triton, which the machine may not have, and preprocessing does not use.
sys.modules["megatron.core.transformer.custom_layers.batch_invariant_kernels"] = MagicMock()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> None:
    tokenizer, corpus = make_corpus(folder, args.megabytes)
    tokens = 0
    seconds: dict[str, list[float]] = {"accelerate-megatron": [], "Megatron-LM": []}
    for repeat in range(args.repeats):
        out = folder / f"ours{repeat}"
        took, peak, printed = run(our_command(tokenizer, corpus, out, args.workers))
        seconds["accelerate-megatron"].append(took)
        tokens = json.loads(printed)["tokens"]["text"]
        report = {"benchmark": "data_build", "who": "accelerate-megatron", "repeat": repeat}
        show(report, seconds=took, tokens_per_second=tokens / took)
        show({"benchmark": "data_build_memory", "repeat": repeat}, largest_process_mb=peak)
        if args.megatron is None:
            continue
        theirs = folder / f"theirs{repeat}"
        command = their_command(tokenizer, corpus, theirs, args.workers, folder)
        took, _, _ = run(command, path=str(args.megatron), cwd=args.megatron)
        seconds["Megatron-LM"].append(took)
        report |= {"who": "Megatron-LM"}
        show(report, seconds=took, tokens_per_second=tokens / took)
        same = {
            suffix: same_bytes(f"{out}_text_document{suffix}", f"{theirs}_text_document{suffix}")
            for suffix in (".bin", ".idx")
        }
        show({"benchmark": "data_build_files"}, identical=same)
    best = {who: min(took) for who, took in seconds.items() if took}
    summary = {"benchmark": "data_build_summary", "megabytes": args.megabytes, "tokens": tokens}
    speedup = best.get("Megatron-LM", 0) / best["accelerate-megatron"]
    show(summary, workers=args.workers, best_seconds=best, speedup=speedup or None)
    read(f"{folder}/ours0_text_document", args.seq_length)


def make_corpus(folder: Path, megabytes: int) -> tuple[str, str]:
    """Write the standard library's sources as JSON lines, as often as the size needs."""
    from text import load_text, standard_library_files

    tokenizer, _, _ = load_text(folder / "cache", vocab_size=8192)
    tokenizer.save_pretrained(folder / "tokenizer")
    texts = [
        path.read_text(encoding="utf-8", errors="replace") for path in standard_library_files()[0]
    ]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    corpus, written = folder / "corpus.jsonl", 0
    with corpus.open("w", encoding="utf-8") as file:
        while written < megabytes << 20:
            for line in lines:
                written += file.write(line)
                if written >= megabytes << 20:
                    break
    return str(folder / "tokenizer"), str(corpus)


def our_command(tokenizer: str, corpus: str, out: Path, workers: int) -> list[str]:
    return [
        *(sys.executable, "-m", "accelerate_megatron", "data", "build", corpus, "--json"),
        *("--tokenizer", tokenizer, "--output-prefix", str(out), "--append-eod"),
        *("--workers", str(workers)),
    ]


def their_command(tokenizer: str, corpus: str, out: Path, workers: int, folder: Path) -> list[str]:
    runner = folder / "run_tool.py"
    runner.write_text(RUN_TOOL)
    return [
        *(sys.executable, str(runner), "tools/preprocess_data.py", "--input", corpus),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer),
        *("--output-prefix", str(out), "--append-eod", "--workers", str(workers)),
        *("--log-interval", "1000000"),
    ]


def run(command: list[str], *, path: str = "", cwd: Path | None = None) -> tuple[float, float, str]:
    """Run a command; return its seconds, the peak of its largest process in MB, and its output."""
    paths = [path, os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": ":".join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    start = time.perf_counter()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=env, cwd=cwd, text=True, **pipes) as process:
        peak = [0.0]
        watcher = threading.Thread(target=watch, args=(process, peak))
        watcher.start()
        printed, errors = process.communicate()
        took = time.perf_counter() - start
        watcher.join()
    if process.returncode:
        sys.exit(f"{command} failed:\n{errors[-2000:]}")
    return took, peak[0], printed


def watch(process: subprocess.Popen[str], peak: list[float]) -> None:
    """Keep the largest resident memory of a process and its children, in MB, until it ends.

    Not from getrusage: of a new process that counts the one it was forked from.
    """
    while process.returncode is None:
        pids = [str(process.pid)]
        for file in Path(f"/proc/{process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # gone in between
                pids += file.read_text().split()
        for pid in pids:
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                for found in re.findall(r"VmHWM:\s+(\d+) kB", status):
                    peak[0] = max(peak[0], int(found) / 1024)
        time.sleep(0.05)


def same_bytes(one: str, other: str) -> bool:
    return Path(one).read_bytes() == Path(other).read_bytes()


def read(prefix: str, seq_length: int) -> None:
    """Read the samples of a built dataset in their shuffled order through torch's DataLoader."""
    from torch.utils.data import DataLoader

    from accelerate_megatron import engine
    from accelerate_megatron.config.indexed_data import Blend, IndexedData
    from accelerate_megatron.data.indexed_samples import IndexedSamples, Windows

    engine.activate("cpu")
    data = IndexedData(
        blend=Blend((prefix,)),
        blends=(None, None, None),
        split="100,0,0",
        seq_length=seq_length,
        micro_batch_size=8,
        vocab_size=8192,
    )
    dataset = engine.build_gpt_datasets(data)[0]
    loader = DataLoader(
        IndexedSamples(dataset, len(dataset)), batch_size=8, sampler=Windows(len(dataset), None)
    )
    start, tokens = time.perf_counter(), 0
    for batch in loader:
        tokens += batch["input_ids"].numel()
        if time.perf_counter() - start > 5:
            break
    took = time.perf_counter() - start
    show({"benchmark": "data_read", "seq_length": seq_length}, tokens_per_second=tokens / took)


def show(report: dict[str, object], **numbers: object) -> None:
    print(json.dumps(report | numbers), flush=True)


if __name__ == "__main__":
    main()
