from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from accelerate_megatron.errors import ConfigurationError, WeightsError
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.weights.exporting import (
    ExportOptions,
    FolderContents,
    gather_state_dict,
    save_hf_folder,
)
from accelerate_megatron.weights.importing import import_weights
from accelerate_megatron.weights.source import LiveSource
from tests.weights.cutting import FakeShard, cut_model, emptied
from tests.weights.tiny import DTYPES, MODELS, TP_SIZES, tiny_gpt2, tiny_llama


def _tables(model):
    family = family_of(model.config)
    shape = family.shape(model.config)
    return {"table": family.parameters(shape), "shape": shape}


def _shards(model, tp_size=1):
    """The shards of all tensor-parallel ranks, as if one process held them."""
    return [shard for rank in cut_model(model, tp_size) for shard in rank]


def _contents(model, **more):
    [architecture] = family_of(model.config).architectures
    return FolderContents(hf_config=model.config, architecture=architecture, **more)


def _save(model, directory, *, shards=None, contents=None, **options):
    save_hf_folder(
        directory,
        shards if shards is not None else _shards(model),
        **_tables(model),
        contents=contents or _contents(model),
        options=ExportOptions(**options),
    )


def _assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize(("build", "changes"), MODELS)
def test_import_then_export_gives_every_bit_back(build, changes, tp_size, dtype):
    model = build(dtype, **changes)
    tables = _tables(model)
    shards = emptied(_shards(model, tp_size))
    import_weights(shards, LiveSource(model), tables["table"], tables["shape"])

    gathered = gather_state_dict(shards, **tables)

    _assert_same_bits(gathered, dict(model.named_parameters()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("build", "changes"), MODELS)
def test_transformers_loads_the_folder_with_the_same_logits(build, changes, dtype, tmp_path):
    model = build(dtype, **changes).eval()
    _save(model, tmp_path / "out", shards=_shards(model, 2))

    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )

    assert not any(report.values())
    assert type(loaded) is type(model)
    assert loaded.dtype == dtype
    tokens = torch.arange(32).reshape(2, 16)
    assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(("build", "changes"), MODELS)
def test_the_config_survives_but_for_dtype_and_architecture(build, changes, tmp_path):
    model = build(**changes)
    before = model.config.to_dict()
    _save(model, tmp_path / "out")

    written = json.loads((tmp_path / "out/config.json").read_text())

    expected = type(model.config).from_dict(before).to_dict()
    expected |= {"architectures": [type(model).__name__], "dtype": "float32"}
    del expected["_name_or_path"], expected["output_attentions"]
    found = type(model.config).from_dict(written).to_dict()
    assert {name: found[name] for name in expected} == expected
    assert model.config.to_dict() == before


def test_files_hold_what_transformers_writes(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")

    _save(model, tmp_path / "ours", max_shard_size="100KB")

    ours = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    theirs = json.loads((tmp_path / "theirs/model.safetensors.index.json").read_text())
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    files = sorted(set(ours["weight_map"].values()))
    assert files == sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    for file in files:
        assert sum(t.nbytes for t in load_file(tmp_path / "ours" / file).values()) <= 100_000
        with safe_open(tmp_path / "ours" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            listed = {name for name, where in ours["weight_map"].items() if where == file}
            assert set(opened.keys()) == listed
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    _assert_same_bits(dict(loaded.named_parameters()), dict(model.named_parameters()))


def test_a_small_model_is_one_file_without_an_index(tmp_path):
    _save(tiny_gpt2(), tmp_path / "out")

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_a_tensor_larger_than_a_file_gets_one_of_its_own(tmp_path):
    model = tiny_gpt2(n_layer=1)

    _save(model, tmp_path / "out", max_shard_size=1)

    num_tensors = len(list(model.parameters()))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == num_tensors


def test_padded_rows_and_the_tied_head_are_not_written(tmp_path):
    _save(tiny_gpt2(), tmp_path / "out", shards=_shards(tiny_gpt2(), 4))

    written = load_file(tmp_path / "out/model.safetensors")

    assert written["transformer.wte.weight"].shape == (99, 64)
    assert "lm_head.weight" not in written


def test_another_dtype_can_be_asked_for(tmp_path):
    model = tiny_llama()

    _save(model, tmp_path / "out", dtype=torch.bfloat16)

    expected = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
    _assert_same_bits(load_file(tmp_path / "out/model.safetensors"), expected)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_replicas_are_not_asked_for_their_values():
    model = tiny_gpt2()
    replica = FakeShard(
        "embedding.word_embeddings.weight",
        torch.full((128, 64), torch.nan),
        (128, 64),
        (0, 0),
        False,
    )

    gathered = gather_state_dict([*_shards(model), replica], **_tables(model))

    _assert_same_bits(gathered, dict(model.named_parameters()))


def test_generation_config_and_tokenizer_are_saved_when_given(tmp_path):
    class Tokenizer:
        def save_pretrained(self, directory):
            (directory / "tokenizer.json").write_text("{}")

    model = tiny_gpt2()
    contents = _contents(
        model, generation_config=GenerationConfig(max_new_tokens=7), tokenizer=Tokenizer()
    )

    _save(model, tmp_path / "out", contents=contents)

    assert GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 7
    assert (tmp_path / "out/tokenizer.json").exists()


def test_overwriting_leaves_no_weights_of_the_older_model_and_nothing_else_touched(tmp_path):
    _save(tiny_llama(), tmp_path / "out", max_shard_size="50KB")
    (tmp_path / "out/metrics.jsonl").write_text("kept")

    _save(tiny_gpt2(), tmp_path / "out")

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
    ]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "gpt2"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_tokenizer_with_a_subfolder_replaces_its_older_files(tmp_path):
    class Tokenizer:
        def __init__(self, text):
            self.text = text

        def save_pretrained(self, directory):
            (directory / "templates").mkdir()
            (directory / "templates/chat.jinja").write_text(self.text)

    model = tiny_gpt2(n_layer=1)
    for text in ("old", "new"):
        _save(model, tmp_path / "out", contents=_contents(model, tokenizer=Tokenizer(text)))

    assert (tmp_path / "out/templates/chat.jinja").read_text() == "new"


def test_a_folder_with_a_model_is_refused_when_it_may_not_be_overwritten(tmp_path):
    _save(tiny_gpt2(), tmp_path / "out")

    with pytest.raises(
        ConfigurationError,
        match=r"out already holds a model \(config\.json, model\.safetensors\)\. Name another",
    ):
        _save(tiny_gpt2(), tmp_path / "out", overwrite=False)


def test_a_folder_without_a_model_is_written_to_without_overwriting(tmp_path):
    (tmp_path / "notes.txt").write_text("kept")

    _save(tiny_gpt2(), tmp_path, overwrite=False)

    assert (tmp_path / "notes.txt").read_text() == "kept"
    assert (tmp_path / "model.safetensors").exists()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("")

    with pytest.raises(ConfigurationError, match=r"out is a file; name a folder"):
        _save(tiny_gpt2(), tmp_path / "out")


@pytest.mark.parametrize("size", ["5 apples", "0GB", 0, -3], ids=str)
def test_a_shard_size_that_is_none_is_refused(size, tmp_path):
    with pytest.raises(ConfigurationError, match=f"max_shard_size is {size!r}; it must be"):
        _save(tiny_gpt2(), tmp_path / "out", max_shard_size=size)


def test_a_failure_leaves_the_older_model_and_no_other_files(tmp_path):
    class Failing:
        def save_pretrained(self, directory):
            raise OSError("disk full")

    _save(tiny_gpt2(), tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()

    with pytest.raises(OSError, match="disk full"):
        _save(
            tiny_llama(),
            tmp_path / "out",
            contents=_contents(tiny_llama(), tokenizer=Failing()),
        )

    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _without(shards, name):
    return [shard for shard in shards if shard.name != name]


NORM = "decoder.final_layernorm.weight"
QKV = "decoder.layers.2.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda shards: _without(shards, NORM),
            r"no rank holds decoder\.final_layernorm\.weight",
            id="missing",
        ),
        pytest.param(
            lambda shards: [*shards, FakeShard("x.0.y", torch.ones(1), (1,), (0,))],
            r"not in the table: x\.0\.y",
            id="unknown",
        ),
        pytest.param(
            lambda shards: [*shards, FakeShard(NORM, torch.ones(64), (64,), (0,))],
            r"ranks 0 and 0 both hold elements of decoder\.final_layernorm\.weight, from \[0\]",
            id="twice",
        ),
        pytest.param(
            lambda shards: [
                *_without(shards, QKV),
                FakeShard(QKV, torch.ones(64, 64), (128, 64), (0, 0)),
            ],
            r"ranks hold 4096 of the 8192 elements of decoder\.layers\.2\.self_attention\.linear",
            id="half",
        ),
        pytest.param(
            lambda shards: [
                *_without(shards, NORM),
                FakeShard(NORM, torch.ones(65), (65,), (0,)),
            ],
            r"final_layernorm\.weight is of shape \[65\] where the table says \[64\]",
            id="shape",
        ),
        pytest.param(
            lambda shards: [
                *_without(shards, NORM),
                FakeShard(NORM, torch.ones(32), (64,), (0,)),
                FakeShard(NORM, torch.ones(32).bfloat16(), (64,), (32,)),
            ],
            r"ranks disagree on decoder\.final_layernorm\.weight: shapes \[\(64,\)\], dtypes torch",
            id="dtypes",
        ),
    ],
)
def test_shards_that_do_not_make_up_the_model_are_refused(change, message):
    model = tiny_llama()

    with pytest.raises(WeightsError, match=message):
        gather_state_dict(change(_shards(model)), **_tables(model))
