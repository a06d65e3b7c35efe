"""Fine-tuning on packed conversations: what is learned, and that it is learned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ANSWER = "Return its sum."


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    import finetune_sft

    return finetune_sft


def test_only_what_the_assistant_says_is_learned(example: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.BPE())
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.add_special_tokens(["<end>"])
    letters.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>")
    tokenizer.chat_template = example.CHAT_TEMPLATE
    messages = [
        {"role": "user", "content": "sum?"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "max?"},
        {"role": "assistant", "content": ANSWER},
    ]

    sample = example.tokenize(tokenizer, messages, 1000)

    said = tokenizer.convert_ids_to_tokens([n for n in sample["labels"] if n != -100])
    expected = tokenizer.convert_ids_to_tokens(tokenizer(ANSWER + "<end>")["input_ids"])
    assert said == 2 * expected
    assert len(sample["input_ids"]) > len(said)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_learns_on_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerate_megatron", "launch", "--cpu"]
    command += ["--num_processes=2", "--tp_degree=2", str(EXAMPLES / "finetune_sft.py")]
    command += ["--conversations=200", "--seq-length=128", "--epochs=2"]
    command += [f"--cache={tmp_path / 'cache'}", f"--output={tmp_path / 'out'}"]

    job = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)

    assert job.returncode == 0, job.stderr[-3000:]
    before, *_, after = map(float, re.findall(r"held-out loss .*: ([0-9.]+)", job.stdout))
    assert after < before - 0.5
