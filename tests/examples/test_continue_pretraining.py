"""Continuing a Hugging Face model on indexed text: stopped and started again, it is one run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

SCRIPT = Path(__file__).parents[2] / "examples" / "continue_pretraining.py"
PROGRAM = [sys.executable, "-m", "accelerate_megatron"]


def _run(*command: str) -> str:
    job = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert job.returncode == 0, job.stderr[-4000:]
    return job.stdout


def _model_folder(folder: Path) -> Path:
    """Save a tiny GPT-2, whose tokenizer has a token for each byte."""
    letters = Tokenizer(models.BPE())
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.add_special_tokens(["<end>"])
    letters.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>").save_pretrained(folder)
    config = GPT2Config(
        vocab_size=len(letters.get_vocab()),
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_lost_its_last_checkpoint_ends_with_the_same_loss(tmp_path: Path) -> None:
    model = _model_folder(tmp_path / "model")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(SCRIPT.read_text() * 4)
    build = ["data", "build", str(corpus), "--tokenizer", str(model), "--append-eod"]
    _run(*PROGRAM, *build, "--output-prefix", str(tmp_path / "data"), "--workers", "1")
    train = [*PROGRAM, "launch", "--cpu", "--num_processes=2", "--tp_degree=2", str(SCRIPT)]
    train += [f"--model={model}", f"--data={tmp_path / 'data_text_document'}"]
    train += [f"--output={tmp_path / 'out'}", "--steps=6", "--save_every=3", "--eval_iters=2"]
    train += ["--seq_length=64", "--micro_batch_size=2"]

    first = re.findall(r"update (\d+): validation loss ([0-9.]+)", _run(*train))
    shutil.rmtree(tmp_path / "out/model")
    shutil.rmtree(tmp_path / "out/checkpoints/checkpoint_1")
    second = _run(*train)

    assert [step for step, _ in first] == ["3", "6"]
    assert float(first[1][1]) < float(first[0][1])
    assert "going on after update 3" in second
    assert re.findall(r"update (\d+): validation loss ([0-9.]+)", second) == first[1:]
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "out/model").config.n_layer == 2
