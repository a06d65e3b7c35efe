"""How long saving and loading take, beside plain writing and reading of the same bytes.

    python benchmarks/checkpoint.py [--gigabytes 1.0] [--folder DIR] [--rounds 3]

One rank on the CPU. The state is a GPT-2 in fp32 with Adam: 12 bytes a parameter. Saving and plain
writing take turns, each file is waited for (fsync); the fastest of the rounds counts. Loading
includes the checksums of all files. What was read before may be in the system's memory.

Then the same with `async_save`: how long `save_state` holds the script up, beside a synchronous
save, and until the files are there. Each save comes after some updates, as in a training; the first
one, whose memory is made while they run, is shown apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate_megatron import Accelerator, MegatronLMPlugin

BYTES_PER_PARAMETER = 12
HIDDEN = 768
VOCABULARY = 16384
POSITIONS = 64
MOST_RATIO = 1.5
"""What a save may take, in plain writing of the same bytes."""
UPDATES_BETWEEN = 20
"""Before each save in the background."""
MOST_HELD_UP = 0.2
"""How long a save in the background may hold the script up, in synchronous saves."""


def build(gigabytes: float, **arguments: object) -> tuple[Accelerator, Any, Any]:
    """Prepare a model whose state has about that size, with Megatron's `arguments`.

    Returns:
        The accelerator, and the prepared model and optimizer.
    """
    per_layer = 12 * HIDDEN * HIDDEN
    fixed = VOCABULARY * HIDDEN
    layers = max(1, round((gigabytes * 1e9 / BYTES_PER_PARAMETER - fixed) / per_layer))
    accelerator = Accelerator(
        cpu=True, megatron_lm_plugin=MegatronLMPlugin(other_megatron_args=arguments or None)
    )
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_embd=HIDDEN,
            n_head=12,
            vocab_size=VOCABULARY,
            n_positions=POSITIONS,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def seconds(action: Callable[[], object]) -> float:
    """Return how long `action` takes."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def write_plainly(path: Path, num_bytes: int) -> None:
    """Write one file of that size from memory, and wait until it is on the disk."""
    block = memoryview(torch.empty(1 << 26, dtype=torch.uint8).random_().numpy())
    with open(path, "wb", buffering=0) as file:
        left = num_bytes
        while left:
            left -= file.write(block[: min(left, len(block))])
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    """Read one file."""
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 26):
            pass


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        accelerator, *_ = build(args.gigabytes)
        found = measure(accelerator, folder, args.rounds)
        accelerator.free_memory()
        accelerator, model, optimizer = build(args.gigabytes, async_save=True)

        def update() -> None:
            tokens = torch.zeros((1, POSITIONS), dtype=torch.long)
            model(input_ids=tokens, labels=tokens)
            optimizer.step()

        found |= measure_background(accelerator, update, folder, args.rounds, found["save"])
        print(json.dumps(found, indent=2))
    finally:
        shutil.rmtree(folder)


def measure_background(
    accelerator: Accelerator, update: Callable[[], None], folder: Path, rounds: int, save: float
) -> dict[str, Any]:
    """Return how long saves in the background hold the script up.

    Args:
        accelerator: With `async_save`.
        update: Does an update.
        folder: To write to.
        rounds: How many saves, after the first.
        save: Seconds of a synchronous save.
    """
    held_up, written = [], []
    for _ in range(rounds + 1):
        for _ in range(UPDATES_BETWEEN):
            update()
        begun = time.perf_counter()
        accelerator.save_state(str(folder / "background"))
        held_up.append(time.perf_counter() - begun)
        accelerator.wait_for_save()
        written.append(time.perf_counter() - begun)
        shutil.rmtree(folder / "background")
    first, best = held_up.pop(0), min(held_up[-rounds:])
    return {
        "seconds held up by a save in the background": [round(value, 2) for value in held_up],
        "and by the first one": round(first, 2),
        "seconds until it was written": [round(value, 2) for value in written[1:]],
        "held up / save": round(best / save, 2),
        "first held up / save": round(first / save, 2),
        "at most held up": MOST_HELD_UP,
        "good in the background": max(best, first) <= MOST_HELD_UP * save,
    }


def measure(accelerator: Accelerator, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the times and their ratio."""
    accelerator.save_state(str(folder / "warm"))
    manifest = json.loads((folder / "warm/manifest.json").read_text())
    num_bytes = sum(facts["num_bytes"] for facts in manifest["files"].values())
    shutil.rmtree(folder / "warm")
    checkpoint = str(folder / "checkpoint")
    times: dict[str, list[float]] = {"save": [], "write": [], "load": [], "read": []}
    for _ in range(rounds):
        times["write"].append(seconds(lambda: write_plainly(folder / "plain", num_bytes)))
        times["read"].append(seconds(lambda: read_plainly(folder / "plain")))
        (folder / "plain").unlink()
        times["save"].append(seconds(lambda: accelerator.save_state(checkpoint)))
        times["load"].append(seconds(lambda: accelerator.load_state(checkpoint)))
        shutil.rmtree(checkpoint)
    best = {name: min(values) for name, values in times.items()}
    return {
        "bytes": num_bytes,
        "save": best["save"],
        "seconds": {name: [round(value, 2) for value in values] for name, values in times.items()},
        "save / plain write": round(best["save"] / best["write"], 2),
        "load / plain read": round(best["load"] / best["read"], 2),
        "at most": MOST_RATIO,
        "good": best["save"] <= MOST_RATIO * best["write"],
    }


if __name__ == "__main__":
    main()
