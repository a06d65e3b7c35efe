"""Does a job over two machines train as on one? `sudo python benchmarks/two_machines.py`.

The machines are two network namespaces of this host, joined by a virtual cable: their ranks reach
each other over it alone. Each gets `accelerate-megatron launch --num_machines 2` with its rank, and
the same script runs on one machine as well: TP2 x DP2 on four ranks. Prints both lists of losses
and ends with status 1 unless they are equal to 1e-6. Needs Linux, iproute2 and root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29571
NUM_UPDATES = 10
TOLERANCE = 1e-6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", metavar="FILE", help=argparse.SUPPRESS)  # what each rank runs
    file = parser.parse_args().train
    if file is not None:
        train(Path(file))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder, "one.json"), Path(folder, "two.json")
        subprocess.run(launch(one, "--num_processes", "4"), check=True)
        with two_namespaces() as namespaces:
            run_on_both(namespaces, two)
        here, apart = (json.loads(path.read_text()) for path in (one, two))
    for name, run in (("one machine", here), ("two machines", apart)):
        print(f"{name}: {run['machines']} x {run['local ranks']} ranks, {run['losses']}")
    difference = max(abs(a - b) for a, b in zip(here["losses"], apart["losses"], strict=True))
    is_equal = difference <= TOLERANCE and apart["machines"] == 2
    print(f"largest difference {difference:.1e}: {'equal' if is_equal else 'DIFFERENT'}")
    return 0 if is_equal else 1


def launch(output: Path, *words: str) -> list[str]:
    """Return the line that starts this file's training on a machine's ranks."""
    return [
        *(sys.executable, "-m", "accelerate_megatron", "launch", "--cpu", "--tp_degree", "2"),
        *("--threads", "1", *words, __file__, "--train", str(output)),
    ]


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Make two network namespaces with a cable between them; undo it at the end."""
    names = [f"machine{n}-{os.getpid()}" for n in range(2)]
    cables = [f"am{n}x{os.getpid()}"[:15] for n in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "name", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def run_on_both(namespaces: list[str], output: Path) -> None:
    """Start the job's part in each namespace and wait for both.

    Raises:
        SystemExit: One of them failed.
    """
    # gloo would take the address that the host's name stands for, which both share.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "cable"}
    jobs = []
    for rank, name in enumerate(namespaces):
        words = launch(
            output,
            *("--num_processes", "4", "--num_machines", "2", "--machine_rank", str(rank)),
            *("--main_process_ip", ADDRESSES[0], "--main_process_port", str(PORT)),
        )
        jobs.append(subprocess.Popen(["ip", "netns", "exec", name, *words], env=environment))
    statuses = [job.wait() for job in jobs]
    if any(statuses):
        raise SystemExit(f"the launchers of the two machines ended with {statuses}")


def train(output: Path) -> None:
    """Train a small GPT-2 on this rank; the main rank writes the losses."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator

    from accelerate_megatron import Accelerator, MegatronLMDummyScheduler

    accelerator = Accelerator()
    torch.manual_seed(0)
    rows = torch.randint(0, 256, (NUM_UPDATES * 8, 32))
    samples = [{"input_ids": row, "labels": row} for row in rows]
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples, batch_size=4, collate_fn=default_data_collator)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=len(loader))
    model, optimizer, loader, _ = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for batch in loader:
        losses.append(model(**batch).loss.item())
        optimizer.step()
    if accelerator.is_main_process:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        run = {
            "machines": accelerator.num_processes // local,
            "local ranks": local,
            "losses": losses,
        }
        output.write_text(json.dumps(run))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    sys.exit(main())
