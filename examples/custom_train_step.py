r"""Train with a loss of one's own: a train step whose loss function weighs the tokens.

    accelerate-megatron launch --cpu --num_processes 2 --pp_degree 2 examples/custom_train_step.py

The focal loss of a token, (1 - p)^gamma * -log p, counts those that the model predicts well for
less (Lin et al. 2017, equation 4). It needs no more than the loss per token, which the last stage
of a pipeline has; `GPTTrainStep` does the rest: batches, masks and the forward step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from pretrain_gpt import endless
from text import Windows, load_text
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate_megatron import (
    Accelerator,
    GPTTrainStep,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
)

VOCABULARY = 2048


class FocalTrainStep(GPTTrainStep):
    """`GPTTrainStep` with the focal loss; gamma 0 is the plain one."""

    def __init__(self, accelerator: Accelerator, args: Any, gamma: float) -> None:
        self.gamma = gamma  # before super().__init__, which asks for the loss function
        super().__init__(accelerator, args)

    def get_loss_func(self, accelerator: Accelerator) -> Callable[..., Any]:
        def focal_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
            """Return the sum of a micro-batch's losses, how many they are, and a report of both.

            Args:
                loss_mask: 1.0 where a token counts, [b, s].
                losses: -log p of each token, fp32 [b, s].
            """
            focal = (1 - torch.exp(-losses)) ** self.gamma * losses
            total, count = (focal * loss_mask).sum(), loss_mask.sum()
            return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}

        return focal_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gamma", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seq_length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    args = parser.parse_args()
    plugin = MegatronLMPlugin(
        num_micro_batches=2,
        custom_train_step_class=FocalTrainStep,
        custom_train_step_kwargs={"gamma": args.gamma},
    )
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    set_seed(0)
    with accelerator.main_process_first():
        tokenizer, train_tokens, _ = load_text(args.cache, vocab_size=VOCABULARY)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=args.seq_length,
            n_embd=128,
            n_layer=4,
            n_head=4,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(Windows(train_tokens, args.seq_length), batch_size=4, shuffle=True)
    scheduler = MegatronLMDummyScheduler(
        optimizer, total_num_steps=2 * args.steps, warmup_num_steps=10
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    for step, batch in enumerate(islice(endless(loader), args.steps), start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == 1 or step % 20 == 0:
            accelerator.print(f"update {step}: focal loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
