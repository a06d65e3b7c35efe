r"""Teach a small T5 to fill in what was cut out of real text, as an ordinary Accelerate script.

On two CPU ranks, the encoder on one and the decoder on the other:

    accelerate-megatron launch --cpu --num_processes 2 --pp_degree 2 \
        --pipeline_model_parallel_split_rank 1 examples/train_t5.py

The layout is the launcher's; without it, one process trains alone. The text is the Python
standard library's source (text.py). Half of the tokens of each window are cut out in spans; the
encoder reads the rest with a mark for each span, and the decoder writes the spans. The loss is
compared with that of guessing by how often a token occurs, and the saved folder is read back by
plain transformers.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import set_seed
from pretrain_gpt import endless, evaluate, keep, replicas_and_batch_size
from text import Windows, load_text
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration
from transformers.utils import logging as transformers_logging

from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin

SPAN_LENGTH = 8


class CutSpans:
    """A `collate_fn` that cuts spans out of windows of one length; its numbers are seeded.

    Window [length] -> input_ids: the kept tokens, mark i where span i was; labels: for each span
    its mark and its tokens, and the mark after the last one at the end.
    """

    def __init__(self, vocab_size: int, num_spans: int, seed: int) -> None:
        self.marks = torch.arange(vocab_size, vocab_size + num_spans + 1)
        self.num_spans = num_spans
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        pairs = [self.cut(sample["input_ids"]) for sample in samples]
        inputs, labels = (torch.stack(side) for side in zip(*pairs, strict=True))
        return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "labels": labels}

    def cut(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the encoder reads, and what the decoder writes, of one window."""
        # One span within each of equally long parts, so that no two touch.
        part = len(tokens) // self.num_spans
        inputs, labels = [], []
        for index, piece in enumerate(tokens[: part * self.num_spans].split(part)):
            mark = self.marks[index : index + 1]
            start = int(torch.randint(1, part - SPAN_LENGTH, (), generator=self.generator))
            end = start + SPAN_LENGTH
            inputs += [piece[:start], mark, piece[end:]]
            labels += [mark, piece[start:end]]
        return torch.cat(inputs), torch.cat([*labels, self.marks[-1:]])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a T5 to fill in spans of source code.")
    add = parser.add_argument
    add("--steps", type=int, default=300, help="updates")
    add("--global_batch_size", type=int, default=32, help="windows of one update")
    add("--num_micro_batches", type=int, default=2, help="micro-batches they are cut into")
    add("--lr", type=float, default=5e-3, help="highest learning rate")
    add("--window", type=int, default=64, help="tokens of a window before spans are cut out")
    add("--spans", type=int, default=4, help="spans cut out of a window")
    add("--hidden_size", type=int, default=128)
    add("--layers", type=int, default=2, help="of the encoder, and of the decoder")
    add("--heads", type=int, default=4)
    add("--vocab_size", type=int, default=512, help="tokens of the vocabulary, without marks")
    add("--eval_rows", type=int, default=128, help="validation windows")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("runs/train_t5"))
    add("--cache", type=Path, default=Path(".cache"), help="where tokens and tokenizer are kept")
    return parser.parse_args()


def build_model(args: argparse.Namespace, pad_token_id: int) -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=args.vocab_size + args.spans + 1,
        d_model=args.hidden_size,
        d_kv=args.hidden_size // args.heads,
        d_ff=4 * args.hidden_size,
        num_layers=args.layers,
        num_heads=args.heads,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=pad_token_id,
        pad_token_id=pad_token_id,
        eos_token_id=args.vocab_size + args.spans,
        # As in v1.1: what the decoder gives to the output layer is not scaled down.
        tie_word_embeddings=False,
    )
    model = T5ForConditionalGeneration(config)
    # T5's embeddings start with a deviation of 1, for Adafactor, whose steps are relative. Those
    # of AdamW are of the rate, and would hardly move them.
    with torch.no_grad():
        model.shared.weight.mul_(0.05)
    return model


def unigram_loss(train: Windows, validation: list[dict[str, torch.Tensor]], size: int) -> float:
    """Return the loss of guessing each validation label by how often it occurs in training.

    Of the labels the marks are known for certain from their place, and cost nothing.
    """
    counts = torch.ones(size) + torch.bincount(train.rows.flatten(), minlength=size)
    costs = -(counts / counts.sum()).log()
    labels = torch.cat([batch["labels"] for batch in validation])
    is_text = torch.arange(labels.shape[1]) % (SPAN_LENGTH + 1) != 0
    return float(costs[labels][:, is_text].sum() / labels.numel())


def read_back(folder: Path, batches: list[dict[str, torch.Tensor]]) -> float:
    """Return the validation loss of the saved folder under plain transformers, in one process."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return evaluate(T5ForConditionalGeneration.from_pretrained(folder), batches)


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    set_seed(args.seed)
    plugin = MegatronLMPlugin(
        num_micro_batches=args.num_micro_batches,
        train_iters=args.steps,
        lr_warmup_fraction=0.1,
        lr_decay_style="cosine",
    )
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    with accelerator.main_process_first():
        tokenizer, train_tokens, eval_tokens = load_text(args.cache, vocab_size=args.vocab_size)
    train_data = Windows(train_tokens, args.window)
    eval_data = Windows(eval_tokens, args.window).spread(args.eval_rows)
    # The same spans in every evaluation: cut once.
    cut = CutSpans(args.vocab_size, args.spans, seed=args.seed + 1)
    eval_rows = [
        {key: value[0] for key, value in cut([eval_data[index]]).items()}
        for index in range(len(eval_data))
    ]

    _, batch_size = replicas_and_batch_size(accelerator, args)
    model = build_model(args, tokenizer.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    spans = CutSpans(args.vocab_size, args.spans, seed=args.seed)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_data, batch_size=batch_size, shuffle=True, collate_fn=spans),
        DataLoader(eval_rows, batch_size=batch_size),
        MegatronLMDummyScheduler(optimizer),
    )

    before = evaluate(model, eval_loader)
    start = time.perf_counter()
    for batch in islice(endless(train_loader), args.steps):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    after = evaluate(model, eval_loader)
    folder = args.output / "model"
    accelerator.unwrap_model(model).save_pretrained(folder)
    accelerator.wait_for_everyone()

    if accelerator.is_main_process:
        validation = list(DataLoader(eval_rows, batch_size=8))
        summary = {
            "ranks": accelerator.num_processes,
            "tp": plugin.tp_degree,
            "pp": plugin.pp_degree,
            "updates": args.steps,
            "loss_before": before,
            "loss_after": after,
            "loss_unigram": unigram_loss(train_data, validation, model.config.vocab_size),
            "loss_read_back": read_back(folder, validation),
            "seconds": seconds,
        }
        accelerator.print(
            f"validation loss: {before:.3f} before, {after:.3f} after {args.steps} updates, "
            f"{summary['loss_unigram']:.3f} by guessing (nats per token)\n"
            f"read back by transformers: {summary['loss_read_back']:.3f}\n"
            f"{seconds:.0f} s of updates; written: summary.json and model/ in {args.output}"
        )
        keep(summary, args.output)
    accelerator.end_training()


if __name__ == "__main__":
    main()
