"""Import and export of a 1B-parameter Llama on two tensor-parallel CPU ranks.

python benchmarks/weights.py [--json] [--size 1b]

Writes a bf16 folder of 2 GB in shards of 500 MB, imports it on TP2 and exports it again. Each
rank reports its peak memory above what it had before the model was built, and the times are
compared with plain safetensors in the same run: reading the same number of bytes, and writing
the same tensors from memory. All files stay in the page cache, so this measures our work and not
the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

MB = 1e6


@dataclass(frozen=True)
class Size:
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    shard_size: str


SIZES = {
    "1b": Size(2048, 5632, 20, 32000, "500MB"),
    "tiny": Size(256, 512, 2, 1000, "1MB"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", choices=list(SIZES), default="1b", help="of the Llama")
    parser.add_argument("--on-rank", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_rank:
        measure(Path(args.on_rank), SIZES[args.size])
        return
    with tempfile.TemporaryDirectory(prefix="weights-benchmark-") as folder:
        write_folder(Path(folder) / "hf", SIZES[args.size])
        words = ["launch", "--cpu", "--num_processes", "2", "--tp_degree", "2", "--threads", "1"]
        words += ["--mixed_precision", "bf16", __file__, "--on-rank", folder, "--size", args.size]
        subprocess.run([sys.executable, "-m", "accelerate_megatron", *words], check=True)
        ranks = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(2)]
    print(json.dumps(ranks, indent=2) if args.json else table(ranks))


def config(size: Size) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_hidden_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=size.vocab_size,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def write_folder(folder: Path, size: Size) -> None:
    """Write the model with random bits for weights: drawing real ones would take minutes."""
    from accelerate import init_empty_weights
    from transformers import LlamaForCausalLM

    with init_empty_weights():
        model = LlamaForCausalLM(config(size)).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    largest = torch.tensor(0.25, dtype=torch.bfloat16).view(torch.int16).item()
    for parameter in model.parameters():
        parameter.data.view(torch.int16).random_(0, largest)
    model.save_pretrained(folder, max_shard_size=size.shard_size)


# --- on a rank -----------------------------------------------------------------------------


def measure(folder: Path, size: Size) -> None:
    """Import, export and the plain counterparts, on one rank; write what was measured."""
    from accelerate import init_empty_weights
    from transformers import LlamaForCausalLM

    from accelerate_megatron import Accelerator, engine
    from accelerate_megatron.training.resolve import resolve_model, sort_objects
    from accelerate_megatron.weights.importing import import_weights

    accelerator = Accelerator()
    with init_empty_weights():
        empty = LlamaForCausalLM(config(size))
    plugin = accelerator.state.megatron_lm_plugin
    resolved = resolve_model(
        sort_objects([empty]),
        plugin,
        accelerator._layout,
        "bf16",
        num_micro_batches=1,
        weights=folder / "hf",
        rank=accelerator.process_index,
    )
    run = resolved.run
    read_plainly(folder / "hf", accelerator.process_index)  # into the page cache

    before = reset_peak()
    ranks = engine.start_groups(run.layout, None)
    with engine.ModelRandomness(0, ranks, accelerator.device).active():
        chunks = engine.build_chunks(run, accelerator.device)
    shards = engine.model_shards(chunks)
    accelerator.wait_for_everyone()
    started = time.perf_counter()
    import_weights(shards, resolved.weights.source, resolved.weights.table, run.shape)
    import_seconds = time.perf_counter() - started
    import_peak = peak() - before
    accelerator.wait_for_everyone()
    plain_seconds = read_plainly(folder / "hf", accelerator.process_index)

    result = {
        "rank": accelerator.process_index,
        "parameters_mb": sum(shard.data.nbytes for shard in shards) / MB,
        "largest_slice_mb": max(shard.data.nbytes for shard in shards) / MB,
        "import_peak_mb": import_peak / MB,
        "import_seconds": import_seconds,
        "plain_read_seconds": plain_seconds,
        **export(folder, shards, resolved, accelerator, size.shard_size),
    }
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(result))
    accelerator.wait_for_everyone()


def export(
    folder: Path, shards: Any, resolved: Any, accelerator: Any, shard_size: str
) -> dict[str, Any]:
    """Save the model and, on the writer, the same tensors plainly."""
    import torch.distributed as dist

    from accelerate_megatron.weights.exporting import ExportOptions, save_hf_folder
    from accelerate_megatron.weights.holders import ModelHolders

    before = reset_peak()
    started = time.perf_counter()
    save_hf_folder(
        folder / "exported",
        shards,
        table=resolved.disk_table,
        shape=resolved.run.shape,
        contents=resolved.contents,
        options=ExportOptions(max_shard_size=shard_size),
        ranks=ModelHolders(group=dist.group.WORLD, device=accelerator.device),
    )
    seconds = time.perf_counter() - started
    measured = {"export_peak_mb": (peak() - before) / MB, "export_seconds": seconds}
    if accelerator.is_main_process:
        measured["plain_write_seconds"] = write_plainly(folder)
        check_equal(folder)
    accelerator.wait_for_everyone()
    return measured


def read_plainly(folder: Path, rank: int) -> float:
    """Copy half the rows of every tensor out of the files; return the seconds."""
    started = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                rows = file.get_slice(name).get_shape()[0] // 2
                file.get_slice(name)[rank * rows : (rank + 1) * rows].clone()
    return time.perf_counter() - started


def write_plainly(folder: Path) -> float:
    """Write the tensors of each exported file from memory; return the seconds."""
    seconds = 0.0
    (folder / "plain").mkdir()
    for path in sorted((folder / "exported").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            tensors = {name: file.get_tensor(name).clone() for name in names}
        started = time.perf_counter()
        save_file(tensors, folder / "plain" / path.name, {"format": "pt"})
        seconds += time.perf_counter() - started
    return seconds


def check_equal(folder: Path) -> None:
    """Fail unless the exported tensors are those that were imported."""
    where = {}
    for path in (folder / "exported").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            where.update(dict.fromkeys(file.keys(), path))
    for path in (folder / "hf").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                with safe_open(where.pop(name), framework="pt") as other:
                    assert torch.equal(file.get_tensor(name), other.get_tensor(name)), name
    assert not where, sorted(where)


def reset_peak() -> int:
    """Let the peak start anew; return the memory now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def table(ranks: list[dict[str, Any]]) -> str:
    lines = [f"{os.cpu_count()} cores, torch {torch.__version__}"]
    for rank in ranks:
        limit = rank["parameters_mb"] + 300 + 1.2 * rank["largest_slice_mb"]
        lines.append(
            f"rank {rank['rank']}: parameters {rank['parameters_mb']:.0f} MB, "
            f"import peak {rank['import_peak_mb']:.0f} MB (limit {limit:.0f}), "
            f"import {rank['import_seconds']:.2f} s, plain {rank['plain_read_seconds']:.2f} s "
            f"({rank['import_seconds'] / rank['plain_read_seconds']:.2f} x), "
            f"export peak {rank['export_peak_mb']:.0f} MB"
        )
    writer = ranks[-1]
    lines.append(
        f"export {writer['export_seconds']:.2f} s, plain {writer['plain_write_seconds']:.2f} s "
        f"({writer['export_seconds'] / writer['plain_write_seconds']:.2f} x)"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
