r"""Pretrain a GPT of 6M parameters on real text, as an ordinary Accelerate script.

On four CPU ranks, the model split over tensor- and pipeline-parallel ranks:

    accelerate-megatron launch --cpu --num_processes 4 --tp_degree 2 --pp_degree 2 \
        --mixed_precision bf16 examples/pretrain_gpt.py

The layout is the launcher's: with --tp_degree 2 alone it is TP2 x DP2, with neither it is DP4.
The text is the Python standard library's source (text.py). Writes metrics.jsonl, loss.svg and a
Hugging Face folder, which plain transformers then reads back. Ends with a few lines of code that
the trained model writes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed, tqdm
from curves import draw_curves, read_metrics
from measure import fast_dtype, flops_per_token, matmul_peak, peak_memory_gb
from text import Windows, load_text
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin

# Both sides compute in bf16 from the same bf16 weights, in another order of sums.
LARGEST_LOSS_DIFFERENCE = 0.01

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 48


class JsonLinesTracker(GeneralTracker):
    """One JSON object per logged step, in a file: an Accelerate tracker like any other."""

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def start(self) -> None:
        self.path.write_text("")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_kwargs: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain a GPT on the standard library's source.")
    add = parser.add_argument
    add("--steps", type=int, default=600, help="updates")
    add("--global_batch_size", type=int, default=8, help="sequences of one update")
    add("--num_micro_batches", type=int, default=1, help="micro-batches they are cut into")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--warmup", type=float, default=0.08, help="part of the updates until it is reached")
    add("--seq_length", type=int, default=256, help="tokens of one sequence")
    add("--hidden_size", type=int, default=256)
    add("--layers", type=int, default=6)
    add("--heads", type=int, default=8)
    add("--vocab_size", type=int, default=4096, help="tokens of the vocabulary")
    add("--eval_rows", type=int, default=128, help="validation sequences")
    add("--eval_every", type=int, default=200, help="updates between evaluations")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("runs/pretrain_gpt"))
    add("--cache", type=Path, default=Path(".cache"), help="where tokens and tokenizer are kept")
    return parser.parse_args()


def build_model(args: argparse.Namespace, end_of_text: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.seq_length,
        n_embd=args.hidden_size,
        n_layer=args.layers,
        n_head=args.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )
    return GPT2LMHeadModel(config)


def build_optimizer(model: torch.nn.Module, lr: float) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def replicas_and_batch_size(accelerator: Accelerator, args: argparse.Namespace) -> tuple[int, int]:
    """Return how many replicas of the model there are, and one micro-batch of one of them.

    The latter is the batch size of their DataLoaders.

    Raises:
        SystemExit: The global batch is not made of them.
    """
    plugin = accelerator.state.megatron_lm_plugin
    ranks_of_one = plugin.tp_degree * plugin.pp_degree * plugin.context_parallel_size
    replicas = accelerator.num_processes // ranks_of_one
    size, rest = divmod(args.global_batch_size, replicas * args.num_micro_batches)
    if rest or not size:
        raise SystemExit(
            f"--global_batch_size {args.global_batch_size}: it must be a multiple of {replicas} "
            f"replica(s) x {args.num_micro_batches} micro-batch(es)."
        )
    return replicas, size


def evaluate(model: torch.nn.Module, loader: Iterable[Any]) -> float:
    """Return the mean loss in nats per token; every batch has equally many tokens."""
    model.eval()
    with torch.no_grad():
        losses = [model(**batch).loss.item() for batch in loader]
    model.train()
    return sum(losses) / len(losses)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def train(
    accelerator: Accelerator,
    parts: tuple[Any, ...],
    args: argparse.Namespace,
) -> float:
    """Do all updates; return their seconds, without those of the evaluations."""
    model, optimizer, train_loader, eval_loader, scheduler = parts
    clipping = accelerator.state.megatron_lm_plugin.gradient_clipping
    seconds, start = 0.0, time.perf_counter()
    progress = tqdm(total=args.steps, unit="update")
    for step, batch in enumerate(islice(endless(train_loader), args.steps), start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        values = {"loss": loss.item(), "grad_norm": grad_norm.item()}
        values["lr"] = scheduler.get_last_lr()[0]
        progress.update()
        progress.set_postfix(loss=f"{values['loss']:.3f}")
        if step % args.eval_every == 0 or step == args.steps:
            seconds += time.perf_counter() - start
            values["eval_loss"] = evaluate(model, eval_loader)
            start = time.perf_counter()
        accelerator.log(values, step=step)
    progress.close()
    return seconds


def sample_code(model: Any, tokenizer: Any, args: argparse.Namespace) -> str:
    """Return a few lines that the model writes; the ranks generate them together."""
    prompt = tokenizer(SAMPLE_PROMPT, return_tensors="pt")["input_ids"]
    tokens = model.megatron_generate(
        prompt,
        max_new_tokens=min(SAMPLE_TOKENS, args.seq_length - prompt.shape[1]),
        temperature=0.7,
        top_k=40,
        seed=args.seed,
        eos_token_id=[],
    )
    return tokenizer.decode(tokens[0])


def read_back(folder: Path, data: Dataset[Any]) -> float:
    """Return the validation loss of the saved folder under plain transformers, in one process."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = GPT2LMHeadModel.from_pretrained(folder, dtype="auto")
    model = model.to(fast_dtype(model.dtype))
    return evaluate(model, DataLoader(data, batch_size=8))


def draw_loss(metrics: Path, target: Path) -> None:
    curves = {
        "training": read_metrics(metrics, "loss"),
        "validation": read_metrics(metrics, "eval_loss"),
    }
    picture = draw_curves(curves, title="Loss", x_name="update", y_name="nats per token")
    target.write_text(picture)


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    metrics, folder = args.output / "metrics.jsonl", args.output / "model"
    set_seed(args.seed)
    plugin = MegatronLMPlugin(
        num_micro_batches=args.num_micro_batches,
        train_iters=args.steps,
        lr_warmup_fraction=args.warmup,
        lr_decay_style="cosine",
    )
    accelerator = Accelerator(megatron_lm_plugin=plugin, log_with=JsonLinesTracker(metrics))
    accelerator.init_trackers("pretrain_gpt")

    with accelerator.main_process_first():
        tokenizer, train_tokens, eval_tokens = load_text(args.cache, vocab_size=args.vocab_size)
    train_data = Windows(train_tokens, args.seq_length)
    eval_data = Windows(eval_tokens, args.seq_length).spread(args.eval_rows)

    replicas, batch_size = replicas_and_batch_size(accelerator, args)
    model = build_model(args, tokenizer.eos_token_id)
    optimizer = build_optimizer(model, args.lr)
    parts = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_data, batch_size=batch_size, shuffle=True),
        DataLoader(eval_data, batch_size=batch_size),
        MegatronLMDummyScheduler(optimizer),
    )
    model, eval_loader = parts[0], parts[3]

    peak = matmul_peak(next(model.parameters()).dtype, accelerator.device)
    before = evaluate(model, eval_loader)
    accelerator.log({"eval_loss": before}, step=0)
    seconds = train(accelerator, parts, args)
    after = evaluate(model, eval_loader)
    started = time.perf_counter()
    sample = sample_code(model, tokenizer, args)
    sample_seconds = time.perf_counter() - started
    accelerator.unwrap_model(model).save_pretrained(folder)
    accelerator.wait_for_everyone()
    memory = peak_memory_gb(accelerator.device)

    if accelerator.is_main_process:
        tokenizer.save_pretrained(folder)
        draw_loss(metrics, args.output / "loss.svg")
        rate = args.steps * args.global_batch_size * args.seq_length / seconds
        summary = {
            "ranks": accelerator.num_processes,
            "tp": plugin.tp_degree,
            "pp": plugin.pp_degree,
            "dp": replicas,
            "precision": accelerator.mixed_precision,
            "updates": args.steps,
            "loss_before": before,
            "loss_after": after,
            "loss_read_back": read_back(folder, eval_data),
            "seconds": seconds,
            "tokens_per_second": rate,
            "share_of_matmul_peak": rate * flops_per_token(model.config) / peak,
            "matmul_peak_gflops": peak / 1e9,
            "peak_memory_gb": memory,
            "sample": sample,
            "sample_seconds": sample_seconds,
            "versions": {name: version(name) for name in ("torch", "megatron-core", "accelerate")},
        }
        report(accelerator, summary, args.output)
    accelerator.end_training()


def keep(
    summary: dict[str, Any], output: Path, largest_difference: float = LARGEST_LOSS_DIFFERENCE
) -> None:
    """Write summary.json.

    Raises:
        SystemExit: The saved model is not the trained one.
    """
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    difference = abs(summary["loss_read_back"] - summary["loss_after"])
    if difference > largest_difference:
        raise SystemExit(f"The saved model's loss is {difference:.4f} off the trained one's.")


def report(accelerator: Accelerator, summary: dict[str, Any], output: Path) -> None:
    """Print what came out, and keep it."""
    text = (
        f"validation loss: {summary['loss_before']:.3f} before, {summary['loss_after']:.3f} after "
        f"{summary['updates']} updates (nats per token)\n"
        f"read back by transformers: {summary['loss_read_back']:.3f}\n"
        f"speed: {summary['tokens_per_second']:,.0f} tokens/s, "
        f"{summary['share_of_matmul_peak']:.0%} of what large matmuls reach here "
        f"({summary['matmul_peak_gflops']:,.0f} GFLOP/s)\n"
        f"memory: {summary['peak_memory_gb']:.2f} GB at most on a rank\n"
        f"sampled in {summary['sample_seconds']:.1f} s:\n\n{summary['sample'].rstrip()}\n\n"
        f"written: metrics.jsonl, loss.svg, summary.json and model/ in {output}"
    )
    accelerator.print(text)
    (output / "report.txt").write_text(text + "\n")
    keep(summary, output)


if __name__ == "__main__":
    main()
