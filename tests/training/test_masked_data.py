"""MegatronLMDummyDataLoader for BERT and T5: masked samples, as Megatron-Core makes them."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accelerate_megatron import Accelerator, MegatronLMDummyDataLoader, MegatronLMPlugin
from accelerate_megatron.config.indexed_data import data_arguments
from accelerate_megatron.config.masked_data import Vocabulary, resolve_masked_data
from accelerate_megatron.errors import ConfigurationError, DataFileError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer
from tests.indexed.files import write_sentences

VOCAB = 99
SEQ_LENGTH, DECODER_LENGTH = 32, 24
BERT = TinyModel("bert-pretraining")
SPECIAL = {
    "bert": {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "unk": "[UNK]"},
    "t5": {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
}
SENTINELS = 10
PLUGINS = {
    "bert": {"seq_length": SEQ_LENGTH},
    "t5": {"encoder_seq_length": SEQ_LENGTH, "decoder_seq_length": DECODER_LENGTH},
}


def words_of(kind: str, num_sentinels: int = SENTINELS) -> list[str]:
    """Return a vocabulary of 99 tokens: special ones, whole words, ends of words, sentinels."""
    words = list(SPECIAL[kind].values())
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(num_sentinels))] if kind == "t5" else []
    count = VOCAB - len(words) - len(sentinels)
    return [*words, *(f"{'##' if i % 3 == 2 else ''}w{i}" for i in range(count)), *sentinels]


def write_tokenizer(folder: Path, kind: str, *, without: str = "", sentinels: int = 10) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {word: number for number, word in enumerate(words_of(kind, sentinels))}
    special = {f"{name}_token": word for name, word in SPECIAL[kind].items() if name != without}
    core = Tokenizer(models.WordLevel(vocab, unk_token=special["unk_token"]))
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)
    return str(folder)


def sentences(number: int, seed: int = 0) -> list[list[list[int]]]:
    """Return documents of 1 to 6 sentences of 2 to 12 tokens."""
    draw = np.random.default_rng(seed).integers
    return [[draw(5, 80, draw(2, 13)).tolist() for _ in range(draw(1, 7))] for _ in range(number)]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_sentences(tmp_path / "a", sentences(80))


def prepare(
    kind: str, prefix: str, tokenizer: str, model: TinyModel, plugin: dict[str, Any], **data: Any
) -> tuple[Any, list[Any]]:
    fields = {"num_micro_batches": 2, "eval_iters": 1, "eval_interval": 3, "train_iters": 6}
    plugin_object = MegatronLMPlugin(**fields | PLUGINS[kind] | plugin)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin_object)
    hf_model = model.build()
    dummy = MegatronLMDummyDataLoader(
        **{
            "data_path": prefix,
            "split": "80,10,10",
            "micro_batch_size": 2,
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": tokenizer,
        }
        | data
    )
    optimizer = TinyOptimizer("sgd", {"lr": 0.1}).build(hf_model)
    prepared, _, *loaders = accelerator.prepare(hf_model, optimizer, dummy, dummy, dummy)
    return prepared, loaders


def vocabulary_of(kind: str) -> Vocabulary:
    words = words_of(kind)
    ids = {name: words.index(word) for name, word in SPECIAL[kind].items() if name != "unk"}
    sentinels = tuple(words.index(f"<extra_id_{i}>") for i in range(SENTINELS) if kind == "t5")
    return Vocabulary(words=tuple(words), sentinels=sentinels, **ids)


def megatron_samples(kind: str, prefix: str, folder: str, sizes: list[int]) -> list[Any]:
    """Return Megatron-Core's own datasets, built by its own builder, with its own cache."""
    from megatron.core.datasets.bert_dataset import (
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
    )
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.t5_dataset import (
        T5MaskedWordPieceDataset,
        T5MaskedWordPieceDatasetConfig,
    )

    vocabulary = vocabulary_of(kind)

    tokenizer = SimpleNamespace(
        cls=vocabulary.cls,
        sep=vocabulary.sep,
        mask=vocabulary.mask,
        bos=vocabulary.eos,
        eos=vocabulary.eos,
        inv_vocab=dict(enumerate(vocabulary.words)),
        additional_special_tokens_ids=vocabulary.sentinels,
        unique_identifiers={},
    )

    classes: Any = {
        "bert": (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig),
        "t5": (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig),
    }[kind]
    of_kind: dict[str, Any] = {
        "bert": {
            "classification_head": True,
            "masking_max_ngram": 3,
            "masking_use_geometric_distribution": False,
        },
        "t5": {
            "sequence_length_decoder": DECODER_LENGTH,
            "masking_max_ngram": 10,
            "masking_use_geometric_distribution": True,
        },
    }[kind]
    config = classes[1](
        random_seed=1234,
        sequence_length=SEQ_LENGTH,
        blend=([prefix], None),
        split="80,10,10",
        path_to_cache=folder,
        tokenizer=tokenizer,
        masking_probability=0.15,
        short_sequence_probability=0.1,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        **of_kind,
    )
    return list(BlendedMegatronDatasetBuilder(classes[0], sizes, lambda: True, config).build())


def rows_and_megatrons(kind: str, prefix: str, tokenizer: str, folder: str) -> tuple[Any, Any]:
    model = BERT if kind == "bert" else TinyModel("t5")
    _, (train, valid, test) = prepare(kind, prefix, tokenizer, model, {})
    ours = [[batch for batch in loader] for loader in (train, valid, test)]  # noqa: C416
    return ours, [
        [dataset[i] for i in range(size)]
        for dataset, size in zip(
            megatron_samples(kind, prefix, folder, [24, 12, 4]), (24, 4, 4), strict=True
        )
    ]


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_samples_are_those_of_megatrons_own_builder(kind: str, prefix: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", kind)

    ((ours, theirs),) = run_ranks(
        rows_and_megatrons, kind, prefix, tokenizer, str(tmp_path / "cache"), num_ranks=1
    )

    text, mask = ("text", "padding_mask") if kind == "bert" else ("text_enc", "enc_mask")
    for batches, samples in zip(ours, theirs, strict=True):
        rows = [{k: v[i] for k, v in b.items()} for b in batches for i in range(4)]
        assert len(rows) == len(samples)
        for row, sample in zip(rows, samples, strict=True):
            is_token, counts = sample[mask] == 1, sample["loss_mask"] == 1
            assert row["input_ids"][is_token].tolist() == sample[text][is_token].tolist()
            assert row["attention_mask"].tolist() == is_token.astype(int).tolist()
            assert row["labels"][counts].tolist() == sample["labels"][counts].tolist()
            assert set(row["labels"][~counts].tolist()) <= {-100}
            if kind == "bert":
                assert row["next_sentence_label"] == sample["is_random"]
                assert (
                    row["token_type_ids"][is_token].tolist() == sample["types"][is_token].tolist()
                )


def losses_and_hf_losses(kind: str, prefix: str, tokenizer: str) -> tuple[Any, Any]:
    model = BERT if kind == "bert" else TinyModel("t5")
    prepared, (train, _, _) = prepare(kind, prefix, tokenizer, model, {"tp_degree": 2})
    hf_model = model.build().eval()
    prepared.eval()
    ours, theirs = [], []
    for batch in islice(train, 3):
        ours.append(prepared(**batch).loss.item())
        with torch.no_grad():
            theirs.append(hf_model(**batch).loss.item())
    return ours, theirs


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_the_loss_is_that_of_the_hugging_face_model(kind: str, prefix: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", kind)

    for ours, theirs in run_ranks(losses_and_hf_losses, kind, prefix, tokenizer, num_ranks=2):
        assert ours == pytest.approx(theirs, abs=1e-5)


def error_of(kind: str, *args: Any, **data: Any) -> str:
    model = BERT if kind == "bert" else TinyModel("t5")
    try:
        _, (train, _, _) = prepare(kind, *args[:2], model, *args[2:], **data)
        list(train)
    except (ConfigurationError, DataFileError) as error:
        return str(error)
    return "none"


def test_documents_of_one_sequence_each_are_refused_where_two_are_needed(tmp_path: Path) -> None:
    prefix = write_sentences(tmp_path / "a", [[[5, 6, 7]]] * 40)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "bert")

    errors = run_ranks(error_of, "bert", prefix, tokenizer, {"tp_degree": 2}, num_ranks=2)

    assert len(set(errors)) == 1
    assert "the train split gets 32 of 40 documents, none of which has 2 sequence(s)" in errors[0]


@pytest.mark.parametrize(
    ("without", "sentinels", "message"),
    [("eos", 10, "has no eos_token"), ("", 0, "<extra_id_0>"), ("", 1, "sentinel tokens (1)")],
)
def test_a_tokenizer_that_samples_cannot_be_made_with_is_refused(
    without: str, sentinels: int, message: str, prefix: str, tmp_path: Path
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "t5", without=without, sentinels=sentinels)
    run = partial(error_of, "t5", prefix, tokenizer, {}, mask_prob=0.5)

    (error,) = run_ranks(run, num_ranks=1)

    assert message in error


BERT_VIEW = {"model_type_name": "bert", "bert_head": "masked_lm", "bert_binary_head": False}
T5_VIEW = {"model_type_name": "t5", "bert_head": None, "bert_binary_head": False}


@pytest.mark.parametrize(
    ("view", "given", "message"),
    [
        (BERT_VIEW, {}, "needs tokenizer_model"),
        (BERT_VIEW, {"tokenizer_type": "BertWordPieceCase"}, "'HuggingFaceTokenizer' is read"),
        (BERT_VIEW, {"mask_prob": 1.0}, "above 0 and below 1"),
        (BERT_VIEW, {"short_seq_prob": "x"}, "from 0 to 1"),
        (BERT_VIEW, {"reset_position_ids": True}, "reset_position_ids=True, which has no effect"),
        (BERT_VIEW | {"bert_head": "classification"}, {}, "has the head 'classification'"),
        (T5_VIEW, {}, "no decoder_seq_length"),
        ({"model_type_name": "gpt2"}, {"mask_prob": 0.1}, "mask_prob=0.1, which has no effect"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    view: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    kind: Any = {"bert": "bert", "t5": "t5", "gpt2": None}[view["model_type_name"]]

    with pytest.raises(ConfigurationError) as caught:
        resolve_masked_data(kind, data_arguments(given), MegatronLMPlugin(), view)

    assert message in str(caught.value)
