"""`BertTrainStep` on real ranks: what it returns, what it reads, what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.models.megatron_bert.modeling_megatron_bert import (
    MegatronBertForPreTrainingOutput,
)

from accelerate_megatron import Accelerator, BertTrainStep, MegatronLMPlugin, engine
from accelerate_megatron.errors import (
    BatchError,
    ConfigurationError,
    TrainingLoopError,
    UnsupportedError,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_encoders import encoder_samples, pad_encoder_samples
from tests.helpers.tiny_models import TinyModel

TWO_LAYERS = {"num_hidden_layers": 2}
Sample = dict[str, torch.Tensor]


def prepared(
    model: TinyModel, samples: list[Sample], *, collate: Any = pad_encoder_samples, **plugin: Any
) -> tuple[Any, Any, torch.nn.Module]:
    """Return the prepared model and loader, and the model that was given."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    hf_model = model.build()
    optimizer = torch.optim.SGD(hf_model.parameters(), lr=0.1)
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    ours, _, loader = accelerator.prepare(hf_model, optimizer, loader)
    return ours, loader, hf_model


def tiny(family: str, **changes: Any) -> TinyModel:
    return TinyModel(family, changes={**TWO_LAYERS, **changes})


def output_of(model: TinyModel, labels: str) -> tuple[str, float, float]:
    """Return class and loss of the first step, and transformers' own loss."""
    samples = encoder_samples(2, labels)
    ours, loader, hf_model = prepared(model, samples)
    (batch,) = list(loader)
    outputs = ours.eval()(**batch)
    with torch.no_grad():
        wanted = hf_model.eval()(**pad_encoder_samples(samples)).loss
    return type(outputs).__name__, float(outputs.loss), float(wanted)


@pytest.mark.parametrize(
    ("family", "labels", "output_class"),
    [
        pytest.param("bert", "tokens", MaskedLMOutput, id="masked"),
        pytest.param("bert-pretraining", "sentences", BertForPreTrainingOutput, id="sentences"),
        pytest.param(
            "megatron-bert-pretraining",
            "sentences",
            MegatronBertForPreTrainingOutput,
            id="megatron",
        ),
        pytest.param("bert-classifier", "class", SequenceClassifierOutput, id="classes"),
    ],
)
def test_the_output_is_of_transformers_class_with_its_loss(
    family: str, labels: str, output_class: type
) -> None:
    model = tiny(family, num_labels=3)
    ((name, loss, wanted),) = run_ranks(output_of, model, labels, num_ranks=1)

    assert name == output_class.__name__
    assert abs(loss - wanted) <= 1e-5


def losses_without_masks(model: TinyModel) -> tuple[float, float]:
    """Train on micro-batches of unequal lengths without attention masks; return both losses."""
    samples = encoder_samples(2, "tokens")
    for sample in samples:
        del sample["attention_mask"]
    samples[0] = {key: value[:9] for key, value in samples[0].items()}
    assert len(samples[0]["input_ids"]) != len(samples[1]["input_ids"])
    accelerator = Accelerator(
        cpu=True, megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2, tp_degree=2)
    )
    hf_model = model.build()
    loader = DataLoader(samples, batch_size=1, collate_fn=pad_encoder_samples)
    ours, loader = accelerator.prepare(hf_model, loader)
    (batch,) = list(loader)
    loss = float(ours.eval()(**batch).loss)
    counts = [int((sample["labels"] != -100).sum()) for sample in samples]
    with torch.no_grad():
        alone = [float(hf_model.eval()(**pad_encoder_samples([sample])).loss) for sample in samples]
    return loss, sum(a * n for a, n in zip(alone, counts, strict=True)) / sum(counts)


def test_tokens_do_not_see_what_micro_batches_are_padded_with() -> None:
    ours, wanted = run_ranks(losses_without_masks, tiny("bert"), num_ranks=2)[0]

    assert abs(ours - wanted) <= 1e-5


def masked_ids(samples: list[Sample]) -> list[torch.Tensor]:
    """Return what a collator that masks at random gave this rank."""
    words = {f"w{number}": number for number in range(99)}
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")),
        mask_token="w1",
        pad_token="w0",
        cls_token="w2",
    )
    torch.manual_seed(torch.distributed.get_rank())  # so that ranks would draw differently
    masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    plugin = {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2}
    ids = [{"input_ids": sample["input_ids"].tolist()} for sample in samples]
    _, loader, _ = prepared(tiny("bert"), ids, collate=masking, **plugin)  # type: ignore[arg-type]
    return [torch.stack([batch["input_ids"], batch["labels"]]) for batch in loader]


def test_all_ranks_of_a_replica_get_what_one_of_them_masked() -> None:
    ranks = run_ranks(masked_ids, encoder_samples(8, "class"), num_ranks=4)

    assert len(ranks[0]) == 2
    for other in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0], other, strict=True))
    assert any((batch[1] != -100).any() for batch in ranks[0])


def step_with(model: TinyModel, labels: str, changes: dict[str, Any]) -> None:
    """Do a step with a batch in which keys were replaced, or removed where None."""
    samples = [{**sample, **changes} for sample in encoder_samples(2, labels)]
    samples = [{k: v for k, v in sample.items() if v is not None} for sample in samples]
    ours, loader, _ = prepared(model, samples, tp_degree=2)
    for batch in loader:
        ours(**batch)


@pytest.mark.parametrize(
    ("family", "labels", "changes", "message"),
    [
        pytest.param("bert", "tokens", {"labels": None}, "no labels", id="no-labels"),
        pytest.param(
            "bert",
            "tokens",
            {
                "input_ids": torch.ones(9).long(),
                "labels": torch.full((9,), 99),
                "attention_mask": None,
                "token_type_ids": None,
            },
            "labels holds 99, but the vocabulary has 99 tokens",
            id="token",
        ),
        pytest.param(
            "bert-pretraining",
            "tokens",
            {},
            "no next_sentence_label.*0 or 1 for each row",
            id="no-order",
        ),
        pytest.param(
            "bert-classifier",
            "class",
            {"labels": torch.tensor(3)},
            "labels holds 3, but config.num_labels is 3",
            id="class",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "bert-classifier",
            "class",
            {"labels": torch.tensor(1.0)},
            "num_labels 3: labels of 2 rows",
            id="dtype",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "megatron-bert",
            "tokens",
            {
                "input_ids": torch.ones(65).long(),
                "labels": torch.ones(65).long(),
                "attention_mask": None,
                "token_type_ids": None,
            },
            "65 tokens.*64 positions",
            id="too-long",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_on_every_rank(
    family: str, labels: str, changes: dict[str, Any], message: str
) -> None:
    errors = run_ranks(
        step_with, tiny(family, num_labels=3), labels, changes, num_ranks=2, errors="return"
    )

    assert all(isinstance(error, BatchError) for error in errors)
    for error in errors:
        with pytest.raises(BatchError, match=message):
            raise error


def unread_key(model: TinyModel) -> None:
    ours, loader, _ = prepared(model, encoder_samples(2, "sentences"))
    for batch in loader:
        ours(**batch)


def test_a_key_without_effect_is_refused() -> None:
    with pytest.raises(BatchError, match="next_sentence_label, which BertTrainStep does not read"):
        run_ranks(unread_key, tiny("bert"), num_ranks=1)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        pytest.param(
            {"pipeline_model_parallel_split_rank": 1},
            "pipeline_model_parallel_split_rank",
            id="split-rank",
        ),
        pytest.param(
            {"context_parallel_size": 2}, "context_parallel_size is 2, but a bert", id="context"
        ),
        pytest.param({"use_custom_fsdp": True}, "use_custom_fsdp", id="fsdp"),
    ],
)
def test_what_an_encoder_cannot_have_is_refused(plugin: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedError), match=message):
        run_ranks(partial(prepared, **plugin), tiny("bert"), encoder_samples(4), num_ranks=2)


def hidden_states(model: TinyModel, plugin: dict[str, Any]) -> Any:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    batch = pad_encoder_samples(encoder_samples(2, "tokens"))
    del batch["labels"]
    ours = accelerator.prepare(model.build()).eval()
    with pytest.raises(TrainingLoopError, match="an encoder without a head, which has no loss"):
        ours(**batch, labels=batch["input_ids"])
    return engine.encoder_outputs(ours.session.chunks, ours.session.run, batch)


@pytest.mark.parametrize(
    "family", ["bert-plain", pytest.param("megatron-bert-plain", marks=pytest.mark.slow)]
)
def test_an_encoder_without_a_head_gives_transformers_hidden_states(family: str) -> None:
    plugin = {"tp_degree": 2, "pp_degree": 2, "sequence_parallelism": True}
    ours = run_ranks(hidden_states, tiny(family), plugin, num_ranks=4)

    batch = pad_encoder_samples(encoder_samples(2, "tokens"))
    del batch["labels"]
    with torch.no_grad():
        wanted = tiny(family).build().eval()(**batch)
    assert ours[0] is None
    for name in ("last_hidden_state", "pooler_output"):
        torch.testing.assert_close(ours[-1][name], wanted[name], rtol=0, atol=1e-5)


def test_an_encoder_without_a_head_is_not_trained() -> None:
    with pytest.raises(UnsupportedError, match="BertModel, which has no head and so no loss"):
        run_ranks(prepared, tiny("bert-plain"), encoder_samples(2), num_ranks=1)


class DoubledLoss(BertTrainStep):
    """Overrides the loss in the documented forms."""

    def __init__(self, megatron_args: Any) -> None:
        super().__init__(megatron_args)
        self.args = megatron_args

    def get_loss_func(self, accelerator: Any, pretraining_flag: Any, num_labels: Any) -> Any:  # type: ignore[override]
        assert (pretraining_flag, num_labels) == (True, 2)

        def loss_func(loss_mask: Any, sentence_order: Any, output: Any) -> Any:
            losses, sentence_logits = output
            assert sentence_order is None
            assert sentence_logits is None
            mean = 2.0 * (losses * loss_mask).sum() / loss_mask.sum()
            return mean, {"lm loss": mean.detach()}

        return loss_func

    def get_forward_step_func(self, pretraining_flag: Any, bert_binary_head: Any) -> Any:  # type: ignore[override]
        assert (pretraining_flag, bert_binary_head) == (True, False)
        return super().get_forward_step_func(pretraining_flag, bert_binary_head)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: Any) -> Any:
        return super().get_batch_func(accelerator, megatron_dataset_flag)


def custom_loss(step_class: Any) -> float:
    ours, loader, _ = prepared(
        tiny("bert"),
        encoder_samples(2, "tokens"),
        custom_train_step_class=step_class,
        tp_degree=2,
    )
    (batch,) = list(loader)
    return float(ours(**batch).loss)


def test_a_subclass_overrides_each_function() -> None:
    doubled = run_ranks(custom_loss, DoubledLoss, num_ranks=2)
    plain = run_ranks(custom_loss, None, num_ranks=2)

    assert doubled[0] == doubled[1]
    assert abs(doubled[0] - 2 * plain[0]) <= 1e-5


def dropouts(model: TinyModel, plugin: dict[str, Any]) -> dict[str, float]:
    ours, _, _ = prepared(model, encoder_samples(2, "class"), **plugin)
    (chunk,) = (getattr(chunk, "module", chunk) for chunk in ours.session.chunks)
    layer = chunk.encoder.layers[0]
    return {
        "embedding": chunk.embedding.embedding_dropout.p,
        "hidden": layer.hidden_dropout,
        "attention": layer.self_attention.core_attention.dropout,
        "classifier": chunk.head_dropout.p,
    }


@pytest.mark.parametrize(
    ("changes", "plugin", "wanted"),
    [
        pytest.param({"classifier_dropout": 0.3}, {}, (0.1, 0.1, 0.2, 0.3), id="own"),
        pytest.param({}, {"hidden_dropout": 0.4}, (0.4, 0.4, 0.2, 0.4), id="plugin"),
    ],
)
def test_every_dropout_of_the_config_is_in_the_model(
    changes: dict[str, Any], plugin: dict[str, Any], wanted: tuple[float, ...]
) -> None:
    config = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, **changes}
    (found,) = run_ranks(dropouts, tiny("bert-classifier", **config), plugin, num_ranks=1)

    assert tuple(found.values()) == wanted


def dropped_losses(model: TinyModel) -> list[float]:
    ours, loader, _ = prepared(model, encoder_samples(8, "class"), tp_degree=2)
    losses = [float(ours(**batch).loss) for batch in loader]
    state = ours.gather_state_dict()
    replicated = {
        name: value.detach().clone()
        for name, value in ours.named_parameters()
        if "layernorm" in name or "layer_norm" in name or "pooler" in name
    }
    assert state is None or all(torch.isfinite(value).all() for value in state.values())
    return [*losses, *(float(value.double().sum()) for value in replicated.values())]


def test_tensor_parallel_ranks_drop_the_same_and_stay_equal() -> None:
    model = tiny(
        "bert-classifier",
        num_labels=3,
        hidden_dropout_prob=0.2,
        attention_probs_dropout_prob=0.2,
    )
    with_dropout = run_ranks(dropped_losses, model, num_ranks=2)
    without = run_ranks(dropped_losses, tiny("bert-classifier", num_labels=3), num_ranks=2)

    assert with_dropout[0] == with_dropout[1]
    assert with_dropout[0][0] != without[0][0]
