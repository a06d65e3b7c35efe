"""What `megatron_generate` refuses, by name and before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_megatron.errors import GenerationError
from accelerate_megatron.generation.prompts import Prompts, read_prompts
from accelerate_megatron.generation.settings import ModelTokens, resolve_settings
from tests.generation.calling import prompts

MODEL = ModelTokens(vocab_size=99, eos_token_ids=(5,), pad_token_id=None, bos_token_id=1)


def read(input_ids: Any, attention_mask: Any = None, **asked: Any) -> Prompts:
    settings = resolve_settings({"max_new_tokens": 4, **asked}, MODEL)
    return read_prompts(input_ids, attention_mask, settings, max_positions=64)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"temperature": 0}, "temperature is 0; it must be above 0"),
        ({"temperature": -0.5}, "temperature is -0.5; it must be above 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must be in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p is 1.01; it must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k is -1; it must be a whole number"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"num_beams": 0}, "num_beams is 0; it must be a whole number of at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number of at least 1"),
        ({"max_length": "9"}, "max_length is '9'"),
        ({"vocab_size": 100}, "vocab_size is 100; it must be from 1 to the model's 99"),
        ({"seed": -1}, "seed is -1"),
        ({"eos_token_id": [3, 99]}, r"eos_token_id is \[3, 99\]; it must be a token of the model"),
        ({"top_p": 0.9, "top_p_decay": 1.5}, "top_p_decay is 1.5"),
        ({"top_p_decay": 0.5}, "top_p_decay is 0.5 without top_p"),
        ({"top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound is 0.6 and top_p 0.5"),
        ({"length_penalty": 2.0}, "length_penalty is 2.0 without beams"),
        ({"num_beams": 2, "top_k": 4}, "num_beams is 2 together with top_k"),
        ({"num_beams": 2, "streamer": object()}, "num_beams is 2 with a streamer"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"num_beams": 4, "vocab_size": 3}, "num_beams is 4; it can be at most vocab_size, 3"),
        ({"do_sample": False, "top_k": 4}, "do_sample is False, and top_k would have no effect"),
        ({"seed": 1, "random_seed": 2}, "seed is 1 and random_seed 2"),
        ({"decoder_start_token_id": 3}, "decoder_start_token_id is 3, which is for models with an"),
        ({"topk": 4}, "does not know topk; did you mean top_k?"),
        ({"repetition_penalty": 1.2}, "does not know repetition_penalty"),
    ],
)
def test_settings_that_cannot_be_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        resolve_settings({"max_new_tokens": 4, **asked}, MODEL)


def test_a_length_and_a_first_token_have_to_be_there() -> None:
    without = ModelTokens(vocab_size=9, eos_token_ids=(), pad_token_id=None, bos_token_id=None)

    with pytest.raises(GenerationError, match="Neither max_new_tokens nor max_length"):
        resolve_settings({}, MODEL)
    with pytest.raises(GenerationError, match="add_BOS is True, but the model's config has no"):
        resolve_settings({"max_new_tokens": 1, "add_BOS": True}, without)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(GenerationError, match="2 settings do not fit") as caught:
        resolve_settings({"max_new_tokens": 4, "top_p": 2.0, "temperature": 0}, MODEL)

    assert "top_p is 2.0" in str(caught.value)
    assert "temperature is 0" in str(caught.value)


IDS, MASK = prompts(3, 7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": [[1, 2]]}, r"input_ids is a list; it must be a tensor \[prompts, tokens\]"),
        ({"input_ids": torch.ones(3, dtype=torch.int64)}, r"of shape \[3\]"),
        ({"input_ids": torch.ones(2, 3)}, "input_ids is torch.float32; it must be int64"),
        ({"input_ids": torch.ones(0, 3, dtype=torch.int64)}, "input_ids has no rows"),
        ({"input_ids": torch.ones(2, 0, dtype=torch.int64)}, "The prompts are empty"),
        ({"attention_mask": MASK[:, 1:]}, r"attention_mask is \[2, 6\] for input_ids of \[2, 7\]"),
        ({"attention_mask": MASK * torch.tensor([[0], [1]])}, "prompt 0 hides all of its tokens"),
        ({"attention_mask": MASK.flip(1) | MASK}, "prompt 0 hides tokens in between"),
        ({"attention_mask": torch.stack([MASK[0], MASK[0].flip(0)])}, "some prompts on the left"),
        ({"max_new_tokens": 58}, "7 tokens and 58 new ones are 65; the model has 64 positions"),
        ({"max_new_tokens": None, "max_length": 7}, "max_length is 7, but the prompts have 7"),
        ({"max_length": 20}, "max_length is 20 and max_new_tokens 4, .* 7 . 4 is 11"),
    ],
)
def test_prompts_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    call = {"input_ids": IDS, "attention_mask": MASK if "input_ids" not in given else None}
    with pytest.raises(GenerationError, match=message):
        read(**{**call, **given})


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_first_token_stands_before_the_prompt_and_its_padding_outside(side: str) -> None:
    ids, mask = prompts(3, 7, side=side)

    read_in = read(ids, mask, add_BOS=True, pad_token_id=0)
    back = read_in.as_given(read_in.tokens, 0)

    assert read_in.lengths.tolist() == [4, 8]
    assert read_in.is_padding.sum(dim=1).tolist() == [4, 0]
    prompt = [1, *ids[0][mask[0].bool()].tolist()]
    assert back[0].tolist() == ([0] * 4 + prompt if side == "left" else prompt + [0] * 4)
    assert back[1].tolist() == [1, *ids[1].tolist()]


def test_max_length_counts_the_padded_prompt() -> None:
    assert read(IDS, MASK, max_new_tokens=None, max_length=20).max_new_tokens == 13
    assert read(IDS, MASK, max_length=11).max_new_tokens == 4
