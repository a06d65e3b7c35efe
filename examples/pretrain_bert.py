r"""Pretrain a small BERT on real text: predict the tokens that were masked.

On two CPU ranks that share each layer:

    accelerate-megatron launch --cpu --num_processes 2 --tp_degree 2 examples/pretrain_bert.py

The text is the Python standard library's source (text.py). transformers' own collator masks anew
in every epoch; all ranks of a replica get what one of them drew. The baseline is a model that
knows how often each token occurs in training, at the same masked tokens of validation files: the
BERT stays at its loss for some hundred updates, until it looks at the tokens around a masked one,
and ends well below. Writes metrics.jsonl, loss.svg and a Hugging Face folder, which plain
transformers then reads back and finetune_classifier.py starts from.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed, tqdm
from pretrain_gpt import (
    JsonLinesTracker,
    build_optimizer,
    draw_loss,
    endless,
    evaluate,
    keep,
    replicas_and_batch_size,
)
from text import Windows, load_text
from torch.utils.data import DataLoader, Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    MegatronBertConfig,
    MegatronBertForMaskedLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin

SPECIAL_TOKENS = {"cls_token": "<|cls|>", "mask_token": "<|mask|>", "pad_token": "<|pad|>"}
MASKED_SHARE = 0.15


class Fragments(Dataset[dict[str, torch.Tensor]]):
    """Windows of a stream of tokens, each after the token that stands for the whole of it."""

    def __init__(self, tokens: np.ndarray, length: int, first_token: int) -> None:
        self.windows = Windows(tokens, length - 1)
        self.first = torch.tensor([first_token])

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.cat([self.first, self.windows[index]["input_ids"]])}


class MaskedOnce(Dataset[dict[str, torch.Tensor]]):
    """Evenly spaced fragments with equally many masked tokens each, always the same ones."""

    def __init__(self, fragments: Fragments, count: int, mask_token: int) -> None:
        chosen = range(0, len(fragments), max(1, len(fragments) // count))[:count]
        ids = torch.stack([fragments[index]["input_ids"] for index in chosen])
        noise = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0))
        noise[:, 0] = 2.0  # the first token stays
        number = max(1, int(MASKED_SHARE * ids.shape[1]))
        is_masked = noise <= noise.kthvalue(number, dim=1, keepdim=True).values
        self.labels = ids.masked_fill(~is_masked, -100)
        self.ids = ids.masked_fill(is_masked, mask_token)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain a BERT on the library's source.")
    add = parser.add_argument
    add("--steps", type=int, default=1200, help="updates")
    add("--global_batch_size", type=int, default=64, help="fragments of one update")
    add("--num_micro_batches", type=int, default=1, help="micro-batches they are cut into")
    add("--lr", type=float, default=1e-2, help="highest learning rate")
    add("--seq_length", type=int, default=32, help="tokens of one fragment")
    add("--hidden_size", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--vocab_size", type=int, default=512, help="tokens besides the special ones")
    add("--eval_rows", type=int, default=256, help="validation fragments")
    add("--eval_every", type=int, default=300, help="updates between evaluations")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("runs/pretrain_bert"))
    add("--cache", type=Path, default=Path(".cache"), help="where tokens and tokenizer are kept")
    return parser.parse_args()


def build_model(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast
) -> MegatronBertForMaskedLM:
    config = MegatronBertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=args.seq_length,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        # The usual 0.02 is for a width of a thousand. Scores of so narrow an encoder would be all
        # but equal, and it would learn no more than how often tokens occur.
        initializer_range=args.hidden_size**-0.5,
        pad_token_id=tokenizer.pad_token_id,
    )
    return MegatronBertForMaskedLM(config)


def unigram_loss(tokens: np.ndarray, labels: torch.Tensor, vocab_size: int) -> float:
    """Return the loss of a model that knows how often each token occurs in training."""
    counts = np.bincount(tokens, minlength=vocab_size) + 1.0
    log_share = np.log(counts / counts.sum())
    return float(-log_share[labels[labels >= 0].numpy()].mean())


def train(accelerator: Accelerator, parts: tuple[Any, ...], args: argparse.Namespace) -> None:
    model, optimizer, train_loader, eval_loader, scheduler = parts
    progress = tqdm(total=args.steps, unit="update")
    for step, batch in enumerate(islice(endless(train_loader), args.steps), start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        values = {"loss": loss.item()}
        progress.update()
        progress.set_postfix(loss=f"{values['loss']:.3f}")
        if step % args.eval_every == 0 or step == args.steps:
            values["eval_loss"] = evaluate(model, eval_loader)
        accelerator.log(values, step=step)
    progress.close()


def read_back(folder: Path, data: Dataset[Any]) -> float:
    """Return the validation loss of the saved folder under plain transformers, in one process."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = MegatronBertForMaskedLM.from_pretrained(folder, dtype="auto")
    return evaluate(model, DataLoader(data, batch_size=32))


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    metrics, folder = args.output / "metrics.jsonl", args.output / "model"
    set_seed(args.seed)
    plugin = MegatronLMPlugin(
        num_micro_batches=args.num_micro_batches,
        train_iters=args.steps,
        lr_warmup_fraction=0.1,
        lr_decay_style="cosine",
    )
    accelerator = Accelerator(megatron_lm_plugin=plugin, log_with=JsonLinesTracker(metrics))
    accelerator.init_trackers("pretrain_bert")

    with accelerator.main_process_first():
        tokenizer, train_tokens, eval_tokens = load_text(args.cache, vocab_size=args.vocab_size)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    train_data = Fragments(train_tokens, args.seq_length, tokenizer.cls_token_id)
    eval_data = MaskedOnce(
        Fragments(eval_tokens, args.seq_length, tokenizer.cls_token_id),
        args.eval_rows,
        tokenizer.mask_token_id,
    )
    baseline = unigram_loss(train_tokens, eval_data.labels, len(tokenizer))

    replicas, batch_size = replicas_and_batch_size(accelerator, args)
    masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASKED_SHARE)
    model = build_model(args, tokenizer)
    optimizer = build_optimizer(model, args.lr)
    parts = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_data, batch_size=batch_size, shuffle=True, collate_fn=masking),
        DataLoader(eval_data, batch_size=batch_size),
        MegatronLMDummyScheduler(optimizer),
    )
    model, eval_loader = parts[0], parts[3]

    before = evaluate(model, eval_loader)
    accelerator.log({"eval_loss": before}, step=0)
    start = time.perf_counter()
    train(accelerator, parts, args)
    seconds = time.perf_counter() - start
    after = evaluate(model, eval_loader)
    accelerator.unwrap_model(model).save_pretrained(folder)
    accelerator.wait_for_everyone()

    if accelerator.is_main_process:
        tokenizer.save_pretrained(folder)
        draw_loss(metrics, args.output / "loss.svg")
        summary = {
            "tp": plugin.tp_degree,
            "pp": plugin.pp_degree,
            "dp": replicas,
            "updates": args.steps,
            "loss_before": before,
            "loss_after": after,
            "loss_read_back": read_back(folder, eval_data),
            "loss_unigram": baseline,
            "seconds": seconds,
        }
        report(accelerator, summary, args.output)
    accelerator.end_training()


def report(accelerator: Accelerator, summary: dict[str, Any], output: Path) -> None:
    """Print what came out, and keep it."""
    accelerator.print(
        f"validation loss: {summary['loss_before']:.3f} before, {summary['loss_after']:.3f} after "
        f"{summary['updates']} updates in {summary['seconds']:.0f} s (nats per masked token)\n"
        f"baseline, how often tokens occur: {summary['loss_unigram']:.3f}\n"
        f"read back by transformers: {summary['loss_read_back']:.3f}\n"
        f"written: metrics.jsonl, loss.svg, summary.json and model/ in {output}"
    )
    keep(summary, output)


if __name__ == "__main__":
    main()
