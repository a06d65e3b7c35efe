"""`T5TrainStep`: how it reads a batch, and subclasses in the forms that Accelerate documents."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import T5ForConditionalGeneration

from accelerate_megatron import Accelerator, MegatronLMPlugin, T5TrainStep
from accelerate_megatron.errors import BatchError, ConfigurationError, UnsupportedError
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, pad_samples, translation_samples

T5 = TinyModel("t5", changes={"num_layers": 2, "num_decoder_layers": 2})
SGD = TinyOptimizer("sgd", {"lr": 0.02})
BATCH = pad_samples(translation_samples(4))
PP2 = {"pp_degree": 2, "pipeline_model_parallel_split_rank": 1}


class DocumentedStep(T5TrainStep):
    """One argument, `get_loss_func(self)`, masks by the static methods."""

    def __init__(self, megatron_args: Any, factor: float) -> None:
        super().__init__(megatron_args)
        self.factor = factor

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        def get_batch(data_iterator: Any) -> Any:
            data = next(data_iterator)
            labels = data["labels"]
            loss_mask = (labels != -100).float()
            length = labels.shape[1]
            return (
                data["input_ids"],
                self.shift_right(labels),
                loss_mask,
                labels.clamp(min=0),
                self.attn_mask_postprocess(data["attention_mask"]),
                self.get_decoder_mask(length, labels.device),
                self.get_enc_dec_mask(data["attention_mask"], length, labels.device),
            )

        return get_batch

    def get_loss_func(self) -> Any:  # type: ignore[override]
        def loss_func(loss_mask: Any, output_tensor: Any) -> Any:
            loss = self.factor * (output_tensor * loss_mask).sum() / loss_mask.sum()
            return loss, {"lm loss": loss}

        return loss_func

    def get_forward_step_func(self) -> Any:
        def forward_step(data_iterator: Any, model: Any) -> Any:
            tokens_enc, tokens_dec, loss_mask, labels, *masks = self.get_batch(data_iterator)
            output = model(tokens_enc, tokens_dec, *masks, tokentype_ids=None, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


def update(plugin: dict[str, Any], batch: dict[str, torch.Tensor], **config: Any) -> Any:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    hf_model = T5.build()
    for name, value in config.items():
        setattr(hf_model.config, name, value)
    model, _ = accelerator.prepare(hf_model, SGD.build(hf_model))
    return model(**batch).loss.item(), model.session.grad_norm


def test_a_documented_subclass_computes_what_the_built_in_step_does() -> None:
    kwargs = {"factor": 0.5}
    plugin = {"custom_train_step_class": DocumentedStep, "custom_train_step_kwargs": kwargs}

    ranks = run_ranks(update, {**PP2, **plugin}, BATCH, num_ranks=2)

    oracle = oracle_run(OracleCase(T5, SGD, [BATCH]))
    for loss, norm in ranks:
        assert loss == pytest.approx(0.5 * oracle.losses[0], abs=1e-5)
        assert norm == pytest.approx(0.5 * oracle.grad_norms[0], rel=1e-4)


class OwnMasks(T5TrainStep):
    """Masks of one's own, each with a mark in its last place."""

    @staticmethod
    def attn_mask_postprocess(attention_mask: Any) -> torch.Tensor:
        return torch.tensor([False, True, False])

    @staticmethod
    def get_decoder_mask(seq_length: int, device: Any) -> torch.Tensor:
        return torch.tensor([False, False, True])

    @staticmethod
    def get_enc_dec_mask(attention_mask: Any, dec_seq_length: int, device: Any) -> torch.Tensor:
        return torch.tensor([True, False, False])


def test_masks_of_ones_own_are_taken() -> None:
    accelerator = SimpleNamespace(state=SimpleNamespace(megatron_lm_plugin=MegatronLMPlugin()))
    step = OwnMasks(accelerator, SimpleNamespace(decoder_start_token_id=0, pad_token_id=0))

    masks = step.get_batch(iter([BATCH]))[-3:]

    assert [mask.tolist().index(True) for mask in masks] == [1, 2, 0]


def error_of(plugin: dict[str, Any], batch: dict[str, torch.Tensor], config: Any) -> str:
    try:
        update(plugin, batch, **config)
    except (BatchError, ConfigurationError) as error:
        return str(error)
    return ""


def own_stage(pre_process: bool, post_process: bool) -> torch.nn.Module:
    raise AssertionError("nothing is built")


@pytest.mark.parametrize(
    ("plugin", "changes", "config", "part"),
    [
        ({"pp_degree": 2}, {}, {}, "pipeline_model_parallel_split_rank is not set"),
        ({"context_parallel_size": 2}, {}, {}, "context_parallel_size is 2, and a t5 model"),
        (PP2, {"labels": None}, {}, "The batch has no labels; it has input_ids"),
        (PP2, {}, {"decoder_start_token_id": None}, "The batch has no decoder_input_ids"),
        (PP2, {"labels": BATCH["labels"] + 99}, {}, "but the vocabulary has 99 tokens"),
        (
            {**PP2, "custom_model_provider_function": own_stage},
            {},
            {},
            "custom_model_provider_function is set, the model is a t5, and pp_degree is 2",
        ),
    ],
    ids=["no-split", "cp", "no-labels", "no-start-token", "range", "own-stages"],
)
def test_what_does_not_fit_is_refused_on_every_rank_alike(
    plugin: dict[str, Any], changes: dict[str, Any], config: dict[str, Any], part: str
) -> None:
    batch = {key: value for key, value in {**BATCH, **changes}.items() if value is not None}

    first, second = run_ranks(error_of, plugin, batch, config, num_ranks=2)

    assert part in first
    assert first == second


def untied_afterwards(shares: bool) -> Any:
    """Do a step with a model whose config was told afterwards not to tie its embeddings."""
    config = T5.config()
    config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf_model = T5ForConditionalGeneration(config)
    if shares:
        hf_model.encoder.embed_tokens = hf_model.decoder.embed_tokens = hf_model.shared
    with torch.no_grad():
        wanted = hf_model(**BATCH).loss.item()
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**PP2))
    model, _ = accelerator.prepare(hf_model, SGD.build(hf_model))
    loss = model(**BATCH).loss.item()
    return loss, wanted, model.gather_state_dict()


def test_embeddings_of_their_own_for_encoder_and_decoder_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"is set to False after .*\(it is False\)"):
        run_ranks(untied_afterwards, False, num_ranks=2)


def test_an_output_layer_of_its_own_is_trained_in_a_live_model() -> None:
    _, (loss, wanted, state) = run_ranks(untied_afterwards, True, num_ranks=2)

    assert loss == pytest.approx(wanted, abs=1e-5)
    assert not torch.equal(state["lm_head.weight"], state["shared.weight"])


def recorded(plugin: dict[str, Any], batch: dict[str, torch.Tensor]) -> Any:
    accelerator = Accelerator(
        cpu=True, megatron_lm_plugin=MegatronLMPlugin(return_logits=True, **plugin)
    )
    return accelerator.prepare(T5.build()).eval()(**batch).logits


def test_logits_are_those_of_the_decoders_tokens() -> None:
    # The decoder's row is longer than the encoder's, and an odd one that tp does not divide.
    batch = {key: value[:3, :5] for key, value in BATCH.items() if key != "labels"}
    batch["labels"] = BATCH["labels"][:3, :9].clamp(min=0)
    plugin = {"tp_degree": 2, "sequence_parallelism": True, "num_micro_batches": 2}

    for logits in run_ranks(recorded, plugin, batch, num_ranks=2):
        with torch.no_grad():
            wanted = T5.build().eval()(**batch).logits
        torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)
