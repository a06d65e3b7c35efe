r"""Continue a Hugging Face model on indexed text, in a run that can be stopped and goes on.

The text is made into Megatron's indexed files once, with the model's own tokenizer:

    accelerate-megatron data build corpus/ --tokenizer MODEL --append-eod \
        --output-prefix data/corpus
    accelerate-megatron launch --cpu --num_processes 2 --tp_degree 2 \
        examples/continue_pretraining.py --model MODEL --data data/corpus_text_document

A checkpoint is saved every --save_every updates. Started again by the same line, the script goes on
from the newest one, with the next sample; the launcher's --max_restarts does so by itself. At the
end the model is a Hugging Face folder again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProjectConfiguration, set_seed, tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from accelerate_megatron import (
    Accelerator,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
)


class Progress:
    """Updates done; part of every checkpoint."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="a Hugging Face folder or name, with its tokenizer")
    add("--data", required=True, help="prefix of the indexed files, without .bin or .idx")
    add("--steps", type=int, default=200, help="updates of the whole run")
    add("--save_every", type=int, default=50, help="updates between checkpoints")
    add("--seq_length", type=int, default=256)
    add("--micro_batch_size", type=int, default=4)
    add("--num_micro_batches", type=int, default=1)
    add("--lr", type=float, default=5e-4)
    add("--eval_iters", type=int, default=8, help="batches of an evaluation")
    add("--output", type=Path, default=Path("runs/continued"))
    return parser.parse_args()


def evaluate(model: torch.nn.Module, loader: Any) -> float:
    """Return the mean loss of the next evaluation's batches."""
    model.eval()
    with torch.no_grad():
        losses = [model(**batch).loss.item() for batch in loader]
    model.train()
    return sum(losses) / len(losses)


def main() -> None:
    args = parse_args()
    plugin = MegatronLMPlugin(
        num_micro_batches=args.num_micro_batches,
        train_iters=args.steps,
        lr_warmup_fraction=0.05,
        lr_decay_style="cosine",
        eval_interval=args.save_every,
        eval_iters=args.eval_iters,
    )
    accelerator = Accelerator(
        megatron_lm_plugin=plugin,
        project_config=ProjectConfiguration(
            str(args.output), automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = MegatronLMDummyScheduler(optimizer)  # how long it is, the plugin says
    data = MegatronLMDummyDataLoader(
        data_path=[args.data],
        splits_string="95,5,0",
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    model, optimizer, scheduler, train_loader, valid_loader, _ = accelerator.prepare(
        model, optimizer, scheduler, data, data, data
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if accelerator.load_state("auto"):
        accelerator.print(f"going on after update {progress.step}")
    train(accelerator, (model, optimizer, scheduler, train_loader, valid_loader), args, progress)
    model.save_pretrained(
        args.output / "model", tokenizer=AutoTokenizer.from_pretrained(args.model)
    )
    accelerator.end_training()


def train(
    accelerator: Accelerator, parts: tuple[Any, ...], args: argparse.Namespace, progress: Progress
) -> None:
    """Do the updates that are left, with a checkpoint and an evaluation now and then."""
    model, optimizer, scheduler, train_loader, valid_loader = parts
    model.train()
    bar = tqdm(total=args.steps, initial=progress.step, unit="update")
    # One iteration is the whole training; after load_state it begins where the checkpoint was.
    for batch in train_loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        bar.update()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if progress.step % args.save_every == 0 or progress.step == args.steps:
            loss = evaluate(model, valid_loader)
            accelerator.print(f"update {progress.step}: validation loss {loss:.4f}")
            accelerator.save_state()
    bar.close()


if __name__ == "__main__":
    main()
