"""What masked samples of indexed datasets are made with: BERT's and T5's. No torch.

The numbers that nobody is asked for are those that Megatron-LM's `pretrain_bert.py` and
`pretrain_t5.py` set (core_r0.16.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accelerate_megatron.errors import ConfigurationError

Kind = Literal["bert", "t5"]

_ONLY_OF_MASKED = ("tokenizer_type", "tokenizer_model", "mask_prob", "short_seq_prob")
_ONLY_OF_CAUSAL = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens by id, and the ids that samples are made with; None where there is no such token.

    Attributes:
        words: The text of each token; "##" begins those that go on with a word.
        sentinels: The tokens that stand for what was taken out, in the order of their use.
    """

    words: tuple[str, ...]
    pad: int
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    eos: int | None = None
    sentinels: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MaskedData:
    """How samples are masked.

    Attributes:
        kind: Whose samples: BERT's, or T5's spans.
        tokenizer: The folder of the tokenizer that made the files.
        mask_prob: The share of tokens that are to be predicted.
        short_seq_prob: The share of samples that are made shorter, at random.
        two_sentences: Whether a sample has two parts, in order or not; BERT's.
        decoder_seq_length: What the targets are padded to; T5's.
    """

    kind: Kind
    tokenizer: str
    mask_prob: float = 0.15
    short_seq_prob: float = 0.1
    two_sentences: bool = False
    decoder_seq_length: int | None = None

    @property
    def min_sentences(self) -> int:
        """Sequences that a document needs, to be used at all."""
        return 2 if self.two_sentences else 1


def resolve_masked_data(
    kind: Kind | None, arguments: Mapping[str, Any], plugin: Any, view: Mapping[str, Any]
) -> MaskedData | None:
    """Return how the model's samples are masked; None for a model that reads on.

    Args:
        kind: The kind of masked samples that the model is trained on; None: it reads on.
        arguments: Those of `MegatronLMDummyDataLoader`, by Megatron's names; None: not given.
        plugin: The plugin.
        view: The run by Megatron's names.

    Raises:
        ConfigurationError: An argument is missing, out of its range, or of another kind of model.
    """
    model_type = view["model_type_name"]
    foreign = _ONLY_OF_MASKED if kind is None else _ONLY_OF_CAUSAL
    problems = [
        f"MegatronLMDummyDataLoader has {name}={arguments[name]!r}, which has no effect on the "
        f"samples of a {model_type} model; leave it out."
        for name in foreign
        if arguments[name]
    ]
    if kind is not None:
        problems += [*_tokenizer_problems(arguments, model_type), *_share_problems(arguments)]
        if kind == "t5" and plugin.decoder_seq_length is None:
            problems.append(
                "MegatronLMPlugin has no decoder_seq_length, which the targets of T5's samples "
                "are padded to; set it, such as decoder_seq_length=128 for 512 tokens of input."
            )
        if kind == "bert" and view["bert_head"] not in ("masked_lm", "pretraining"):
            problems.append(
                f"The samples of indexed datasets are for masked language models, and this "
                f"{model_type} has the head {view['bert_head']!r}. Prepare a ...ForMaskedLM or "
                "...ForPreTraining, or use a DataLoader."
            )
    if problems:
        raise ConfigurationError.of(problems)
    if kind is None:
        return None
    shares = {
        name: arguments[name]
        for name in ("mask_prob", "short_seq_prob")
        if arguments[name] is not None
    }
    return MaskedData(
        kind=kind,
        tokenizer=arguments["tokenizer_model"],
        two_sentences=bool(view["bert_binary_head"]),
        decoder_seq_length=plugin.decoder_seq_length if kind == "t5" else None,
        **shares,
    )


def _tokenizer_problems(arguments: Mapping[str, Any], model_type: str) -> list[str]:
    problems = []
    if arguments["tokenizer_type"] not in (None, "HuggingFaceTokenizer"):
        problems.append(
            f"tokenizer_type is {arguments['tokenizer_type']!r}; 'HuggingFaceTokenizer' is read, "
            "with tokenizer_model, the folder of a transformers tokenizer."
        )
    if not arguments["tokenizer_model"]:
        problems.append(
            f"The samples of a {model_type} model are masked, for which MegatronLMDummyDataLoader "
            "needs tokenizer_model: the folder of the tokenizer that made the files."
        )
    return problems


def _share_problems(arguments: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, rule in (("mask_prob", "above 0 and below 1"), ("short_seq_prob", "from 0 to 1")):
        share = arguments[name]
        if share is None:
            continue
        is_number = isinstance(share, (int, float)) and 0 <= share <= 1
        if not is_number or (name == "mask_prob" and share in (0, 1)):
            problems.append(
                f"MegatronLMDummyDataLoader has {name}={share!r}; it has to be a number {rule}."
            )
    return problems
