r"""Fine-tune a chat model on packed conversations; only the assistant's tokens are learned.

    accelerate-megatron launch --cpu --num_processes 2 --tp_degree 2 examples/finetune_sft.py

Without --model it starts from a small Llama with random weights. The conversations are questions
about the Python standard library, answered by its own docstrings. Each is rendered by the
tokenizer's chat template, whose {% generation %} block says which tokens are the assistant's;
several of them share a row, and none of them sees another.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from text import load_text, standard_library_files
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin
from accelerate_megatron.data.packing import PackedDataset

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
)


def conversations(files: list[Path]) -> Iterator[list[dict[str, str]]]:
    """Yield a question about each documented function of the files, and its docstring."""
    for path in files:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            answer = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if answer:
                question = f"What does {node.name} in {path.stem} do?"
                yield [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer.splitlines()[0]},
                ]


def tokenize(tokenizer: Any, messages: list[dict[str, str]], length: int) -> dict[str, list[int]]:
    """Return input_ids, and labels that are -100 at every token that the assistant did not say."""
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, said = rendered["input_ids"][:length], rendered["assistant_masks"][:length]
    labels = [token if is_said else -100 for token, is_said in zip(ids, said, strict=True)]
    return {"input_ids": ids, "labels": labels}


def make_model(args: argparse.Namespace) -> tuple[Any, Any]:
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
        return AutoModelForCausalLM.from_pretrained(args.model), tokenizer
    tokenizer, _, _ = load_text(args.cache, vocab_size=2048)
    tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=args.seq_length,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face folder or name; else a small Llama")
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    parser.add_argument("--output", type=Path, default=Path("runs/sft"))
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2))
    set_seed(1)
    with accelerator.main_process_first():
        model, tokenizer = make_model(args)
    train_files, held_out_files = standard_library_files()
    rows = [
        packed(tokenizer, files, number, args.seq_length)
        for files, number in (
            (train_files, args.conversations),
            (held_out_files, args.conversations // 10),
        )
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_loader = DataLoader(rows[0], batch_size=4, shuffle=True)
    scheduler = MegatronLMDummyScheduler(
        optimizer, total_num_steps=args.epochs * len(train_loader), warmup_num_steps=10
    )
    model, optimizer, train_loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, train_loader, DataLoader(rows[1], batch_size=4), scheduler
    )
    accelerator.print(f"held-out loss before: {evaluate(model, held_out):.3f}")
    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"held-out loss after epoch {epoch + 1}: {evaluate(model, held_out):.3f}")
    model.save_pretrained(args.output, tokenizer=tokenizer)


def packed(tokenizer: Any, files: list[Path], number: int, length: int) -> PackedDataset:
    samples = [tokenize(tokenizer, messages, length) for messages in conversations(files)]
    learned = [s for s in samples if any(label != -100 for label in s["labels"][1:])]
    return PackedDataset(learned[:number], length)


def evaluate(model: Any, loader: Any) -> float:
    model.eval()
    losses = [model(**batch).loss for batch in loader]
    return float(torch.stack(losses).mean())


if __name__ == "__main__":
    main()
