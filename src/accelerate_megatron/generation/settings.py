"""What a call of `megatron_generate` asks for, checked."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accelerate_megatron.errors import ConfigurationError, GenerationError


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """One way to continue prompts, the same on every rank."""

    max_length: int | None
    """Tokens of a row in the end, prompt, padding and BOS included; None: `max_new_tokens` says."""
    max_new_tokens: int | None
    do_sample: bool
    num_beams: int
    temperature: float
    top_k: int
    """How many of the likeliest tokens are drawn from; 0: all."""
    top_p: float
    """Probability that the likeliest tokens, as few as possible, have to reach; 1: all."""
    top_p_decay: float
    """What `top_p` is multiplied by after each token."""
    top_p_bound: float
    """What `top_p` does not fall below."""
    length_penalty: float
    """A beam's score is its log-probability over its new tokens to this power."""
    early_stopping: bool | Literal["never"]
    """When beams end: as soon as there are enough, or when none of those running can be better."""
    vocab_size: int
    """Only tokens below it are generated."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a row; empty: none does."""
    pad_token_id: int
    bos_token_id: int | None
    """What is put before each prompt; None: nothing."""
    decoder_start_token_id: int | None
    """What a decoder's rows begin with where an encoder reads the prompts; None: there is none."""
    seed: int | None
    """What sampling starts from; None: another number in each call, the same in each run."""


@dataclass(frozen=True, kw_only=True)
class ModelTokens:
    """What a model's configs say about tokens."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    has_encoder: bool = False
    decoder_start_token_id: int | None = None
    """None also where the model has no encoder."""

    @classmethod
    def of(cls, configs: Sequence[Any], vocab_size: int, *, has_encoder: bool) -> ModelTokens:
        """Read them from the generation config and the config, the first that has one."""

        def find(name: str) -> Any:
            found = (getattr(config, name, None) for config in configs)
            return next((value for value in found if value is not None), None)

        return cls(
            vocab_size=vocab_size,
            eos_token_ids=_ids(find("eos_token_id")),
            pad_token_id=find("pad_token_id"),
            bos_token_id=find("bos_token_id"),
            has_encoder=has_encoder,
            decoder_start_token_id=find("decoder_start_token_id") if has_encoder else None,
        )


GENERATION_ARGUMENTS = (
    "max_length",
    "max_new_tokens",
    "num_beams",
    "temperature",
    "top_k",
    "top_p",
    "length_penalty",
    "top_p_decay",
    "top_p_bound",
    "vocab_size",
    "add_BOS",
)
"""Those of `megatron_generate` after the prompts, as Accelerate documents them."""

_NAMES = (
    *GENERATION_ARGUMENTS,
    "do_sample",
    "early_stopping",
    "seed",
    "random_seed",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "decoder_start_token_id",
    "streamer",
)


def resolve_settings(asked: Mapping[str, Any], model: ModelTokens) -> GenerationSettings:
    """Return the settings of a call.

    Args:
        asked: Keyword arguments of `megatron_generate`, without those that are None.
        model: What the model's configs say.

    Raises:
        GenerationError: A value is outside its range, a name is unknown, or two contradict.
    """
    asked = {name: value for name, value in asked.items() if value is not None}
    problems = [*_unknown_names(asked), *_out_of_range(asked, model)]
    if not problems:  # what follows compares numbers
        problems = _contradictions(asked, model)
    if problems:
        raise GenerationError(str(ConfigurationError.of(problems)))
    eos = _ids(asked["eos_token_id"]) if "eos_token_id" in asked else model.eos_token_ids
    pad = asked.get("pad_token_id", model.pad_token_id)
    return GenerationSettings(
        max_length=asked.get("max_length"),
        max_new_tokens=asked.get("max_new_tokens"),
        do_sample=asked.get("do_sample", bool(_SAMPLING & asked.keys())),
        num_beams=asked.get("num_beams", 1),
        temperature=float(asked.get("temperature", 1.0)),
        top_k=asked.get("top_k", 0),
        top_p=float(asked.get("top_p", 1.0)),
        top_p_decay=float(asked.get("top_p_decay", 0.0)) or 1.0,
        top_p_bound=float(asked.get("top_p_bound", 0.0)),
        length_penalty=float(asked.get("length_penalty", 1.0)),
        early_stopping=asked.get("early_stopping", False),
        vocab_size=asked.get("vocab_size", model.vocab_size),
        eos_token_ids=eos,
        pad_token_id=pad if pad is not None else (eos[0] if eos else 0),
        bos_token_id=(
            asked.get("bos_token_id", model.bos_token_id) if asked.get("add_BOS") else None
        ),
        decoder_start_token_id=asked.get("decoder_start_token_id", model.decoder_start_token_id),
        seed=asked.get("seed", asked.get("random_seed")),
    )


_SAMPLING = frozenset({"temperature", "top_k", "top_p", "top_p_decay", "top_p_bound"})
"""Settings that mean that tokens are drawn, unless do_sample says otherwise."""


def _ids(given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _unknown_names(asked: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in asked:
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(_NAMES)}."
            problems.append(f"megatron_generate does not know {name}; {hint}")
    return problems


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class _Rule:
    """What a value has to be, in words and as a test."""

    text: str
    holds: Callable[[Any], bool]


def _rules(model: ModelTokens) -> dict[str, _Rule]:
    size = model.vocab_size

    def is_token(value: Any) -> bool:
        return _is_int(value) and 0 <= value < size

    flag = _Rule("True or False", lambda x: isinstance(x, bool))
    positive_count = _Rule("a whole number of at least 1", lambda x: _is_int(x) and x >= 1)
    share = _Rule("in [0, 1]; 0 is off", lambda x: _is_number(x) and 0 <= x <= 1)
    token = _Rule(f"a token of the model, 0 to {size - 1}", is_token)
    seed = _Rule("a whole number from 0 to 2**63 - 1", lambda x: _is_int(x) and 0 <= x < 2**63)
    return {
        "max_length": positive_count,
        "max_new_tokens": positive_count,
        "num_beams": positive_count,
        "temperature": _Rule(
            "above 0; leave out temperature, top_k and top_p to take the likeliest token",
            lambda x: _is_number(x) and x > 0,
        ),
        "top_k": _Rule("a whole number; 0 draws from all tokens", lambda x: _is_int(x) and x >= 0),
        "top_p": _Rule(
            "in (0, 1]; 1 draws from all tokens", lambda x: _is_number(x) and 0 < x <= 1
        ),
        "top_p_decay": share,
        "top_p_bound": share,
        "length_penalty": _Rule("a finite number", _is_number),
        "early_stopping": _Rule("True, False or 'never'", lambda x: x in (True, False, "never")),
        "vocab_size": _Rule(
            f"from 1 to the model's {size}", lambda x: _is_int(x) and 1 <= x <= size
        ),
        "add_BOS": flag,
        "do_sample": flag,
        "seed": seed,
        "random_seed": seed,
        "eos_token_id": _Rule(
            f"a token of the model, 0 to {size - 1}, or a list of them; [] ends no row",
            lambda x: all(map(is_token, _ids(x))),
        ),
        "pad_token_id": token,
        "bos_token_id": token,
        "decoder_start_token_id": token,
    }


def _out_of_range(asked: Mapping[str, Any], model: ModelTokens) -> list[str]:
    return [
        f"{name} is {asked[name]!r}; it must be {rule.text}."
        for name, rule in _rules(model).items()
        if name in asked and not rule.holds(asked[name])
    ]


def _contradictions(asked: Mapping[str, Any], model: ModelTokens) -> list[str]:
    problems = []
    if "max_length" not in asked and "max_new_tokens" not in asked:
        problems.append(
            "Neither max_new_tokens nor max_length is given; one has to say how much to generate."
        )
    sampling = [name for name in asked if name in _SAMPLING]
    if asked.get("do_sample") is False and sampling:
        problems.append(
            f"do_sample is False, and {', '.join(sampling)} would have no effect; drop one."
        )
    if "top_p" not in asked:
        problems += [
            f"{name} is {asked[name]} without top_p, which it changes; give top_p too."
            for name in ("top_p_decay", "top_p_bound")
            if asked.get(name)
        ]
    elif asked.get("top_p_bound", 0) > asked["top_p"]:
        problems.append(
            f"top_p_bound is {asked['top_p_bound']} and top_p {asked['top_p']}; the bound is what "
            "top_p may fall to, so it cannot be above it."
        )
    if "seed" in asked and "random_seed" in asked and asked["seed"] != asked["random_seed"]:
        problems.append(
            f"seed is {asked['seed']} and random_seed {asked['random_seed']}, which mean the same; "
            "give one."
        )
    problems += _first_token_contradictions(asked, model)
    return [*problems, *_beam_contradictions(asked, sampling, model)]


def _first_token_contradictions(asked: Mapping[str, Any], model: ModelTokens) -> list[str]:
    if model.has_encoder:
        problems = []
        if asked.get("add_BOS"):
            problems.append(
                "add_BOS is True, which is for models without an encoder: this one's rows begin "
                "with decoder_start_token_id. Leave it out."
            )
        if asked.get("decoder_start_token_id", model.decoder_start_token_id) is None:
            problems.append("The model's config has no decoder_start_token_id; give one.")
        return problems
    if asked.get("decoder_start_token_id") is not None:
        return [
            f"decoder_start_token_id is {asked['decoder_start_token_id']}, which is for models "
            "with an encoder. Leave it out; add_BOS=True begins with bos_token_id."
        ]
    if asked.get("add_BOS") and asked.get("bos_token_id", model.bos_token_id) is None:
        return ["add_BOS is True, but the model's config has no bos_token_id; give one."]
    return []


def _beam_contradictions(
    asked: Mapping[str, Any], sampling: Sequence[str], model: ModelTokens
) -> list[str]:
    beams = asked.get("num_beams", 1)
    if beams == 1:
        return [
            f"{name} is {asked[name]!r} without beams, and would have no effect; give num_beams."
            for name in ("length_penalty", "early_stopping")
            if name in asked and asked[name] not in (1.0, False)
        ]
    problems = []
    drawn = [*sampling, *(["do_sample"] if asked.get("do_sample") else [])]
    if drawn:
        problems.append(
            f"num_beams is {beams} together with {', '.join(drawn)}: beams are the likeliest "
            "continuations, nothing is drawn. Drop num_beams or the others."
        )
    if "streamer" in asked:
        problems.append(
            f"num_beams is {beams} with a streamer: which beam wins is known at the end only. "
            "Leave out one of them."
        )
    vocabulary = asked.get("vocab_size", model.vocab_size)
    if beams > vocabulary:
        problems.append(f"num_beams is {beams}; it can be at most vocab_size, {vocabulary}.")
    return problems
