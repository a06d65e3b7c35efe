"""A Hugging Face folder as a source: what it gives, and what it refuses to be."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Model, LlamaForCausalLM

from accelerate_megatron.errors import WeightsError
from accelerate_megatron.models.glm4_moe import GLM4_MOE
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.weights.choosing import open_folder
from accelerate_megatron.weights.folder_files import canonical_names
from accelerate_megatron.weights.importing import import_weights
from accelerate_megatron.weights.source import TensorSource
from tests.weights.cutting import cut_model, emptied
from tests.weights.tiny import DTYPES, MODELS, TP_SIZES, tiny_gpt2, tiny_llama

INDEX = "model.safetensors.index.json"


def opened(model, folder: Path) -> TensorSource:
    family = family_of(model.config, architectures=[type(model).__name__])
    return open_folder(folder, family, family.shape(model.config)).source


def sharded_llama(folder: Path, **changes):
    """Save a tiny Llama in several files; return it."""
    model = tiny_llama(**changes)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / INDEX).is_file()
    return model


def first_file(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


# --- reading -------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("build", "changes"), MODELS)
def test_shards_filled_from_a_folder_are_those_cut_by_hand(
    build, changes, dtype, tp_size, tmp_path
):
    model = build(dtype, **changes)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    family = family_of(model.config)
    shape = family.shape(model.config)

    chosen = open_folder(tmp_path, family, shape)

    for wanted in cut_model(model, tp_size):
        shards = emptied(wanted)
        import_weights(shards, chosen.source, chosen.table, shape)
        assert all(torch.equal(a.data, b.data) for a, b in zip(shards, wanted, strict=True))


def test_a_slice_stays_right_when_its_file_is_opened_again(tmp_path, monkeypatch):
    model = sharded_llama(tmp_path)
    monkeypatch.setattr("accelerate_megatron.weights.folder_source._MAPPED_BYTES", 1000)
    source = opened(model, tmp_path)
    weight = model.model.layers[1].mlp.down_proj.weight

    reads = [
        source.read("model.layers.1.mlp.down_proj.weight", (slice(row, row + 6), slice(8, 24)))
        for row in range(0, 60, 6)
    ]

    assert torch.equal(torch.cat(reads), weight[:60, 8:24])


def test_a_folder_of_the_model_without_its_head_is_read_under_the_full_names(tmp_path):
    model = tiny_gpt2()
    headless = GPT2Model(model.config)
    headless.load_state_dict(model.transformer.state_dict())
    headless.save_pretrained(tmp_path)

    source = opened(model, tmp_path)

    assert set(source.names()) == {name for name, _ in model.named_parameters()}
    read = source.read("transformer.h.0.ln_1.weight", (slice(None),))
    assert torch.equal(read, model.transformer.h[0].ln_1.weight)


def test_what_old_folders_hold_besides_weights_is_passed_over(tmp_path):
    model = tiny_gpt2()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, tmp_path / "model.safetensors")

    assert "transformer.h.0.attn.bias" not in opened(model, tmp_path).names()


def test_a_layer_that_smaller_models_have_not_is_passed_over_in_their_folders_only():
    weight = "model.layers.46.mlp.gate.weight"

    def taken(expected):
        return canonical_names([weight], expected, "model", GLM4_MOE.disk_extras)

    assert taken([]) == {}
    assert taken([weight]) == {weight: weight}


def test_a_tied_head_may_be_there_too_if_it_is_the_embedding(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")

    assert "lm_head.weight" not in opened(model, tmp_path).names()

    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight and model\.embed_tokens\.weight with"):
        opened(model, tmp_path)


def test_a_link_into_the_download_cache_is_followed(tmp_path):
    repo = tmp_path / "models--someone--tiny"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "abc"
    model = tiny_llama()
    model.save_pretrained(snapshot)
    (snapshot / "model.safetensors").rename(repo / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")

    assert opened(model, snapshot).names()


def test_pickled_weights_are_taken_if_they_hold_nothing_but_tensors(tmp_path):
    model = tiny_llama()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    read = opened(model, tmp_path).read("model.norm.weight", (slice(2, 5),))

    assert torch.equal(read, model.model.norm.weight[2:5])


def test_pickled_weights_may_be_in_several_files_of_an_index(tmp_path):
    model = tiny_llama()
    state = model.state_dict()
    files = {name: f"pytorch_model-{1 + number % 2}.bin" for number, name in enumerate(state)}
    for file in set(files.values()):
        torch.save({n: state[n] for n in files if files[n] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))

    source = opened(model, tmp_path)

    assert set(source.names()) == state.keys()
    assert all(torch.equal(source.read(name, ()), value) for name, value in state.items())


def test_pickled_weights_that_are_cut_short_are_refused(tmp_path):
    torch.save(tiny_llama().state_dict(), tmp_path / "pytorch_model.bin")
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content[: len(content) // 2])

    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is refused"):
        opened(tiny_llama(), tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x02.", b"\x80\x02K\x01K\x02s."])
def test_pickled_weights_that_are_no_pickle_are_refused(content, tmp_path):
    whole, path = tmp_path / "whole", tmp_path / "pytorch_model.bin"
    torch.save({}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            is_pickle = name.endswith("data.pkl")
            target.writestr(name, content if is_pickle else source.read(name))

    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is refused"):
        opened(tiny_llama(), tmp_path)


# --- bad folders ---------------------------------------------------------------------------


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model.norm.weight": Payload()}, tmp_path / "pytorch_model.bin")

    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is refused.*weights_only=True"):
        opened(tiny_llama(), tmp_path)

    assert not (tmp_path / "ran").exists()


def test_an_old_pickle_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))

    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is refused"):
        opened(tiny_llama(), tmp_path)


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path):
    with pytest.raises(WeightsError, match=r"holds none of model\.safetensors, pytorch_model\.bin"):
        opened(tiny_llama(), tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(WeightsError, match="an adapter without its model"):
        opened(tiny_llama(), tmp_path)


def test_missing_files_are_all_named(tmp_path):
    model = sharded_llama(tmp_path)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    files[0].unlink()
    files[2].unlink()

    with pytest.raises(
        WeightsError, match=rf"lacks 2 of the {len(files)} files .*{files[0].name}, {files[2].name}"
    ):
        opened(model, tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    model = sharded_llama(tmp_path)
    file = first_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(WeightsError, match=rf"{file.name} is not a whole safetensors file"):
        opened(model, tmp_path)


@pytest.mark.parametrize("size", [2**62, 200 * 2**20, 10**6])
def test_an_oversized_header_is_refused(size, tmp_path):
    model = sharded_llama(tmp_path)
    file = first_file(tmp_path)
    file.write_bytes(struct.pack("<Q", size) + file.read_bytes()[8:])

    with pytest.raises(WeightsError, match=rf"{file.name} is not a whole safetensors file"):
        opened(model, tmp_path)


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/passwd", "..", "", "sub/a.safetensors", "a\\b"]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(name, tmp_path):
    model = sharded_llama(tmp_path)
    edit_index(tmp_path, lambda weight_map: weight_map.update({"model.norm.weight": name}))

    with pytest.raises(WeightsError, match="it must be a plain name of a file in the folder"):
        opened(model, tmp_path)


@pytest.mark.parametrize("which", ["file", "single", "index"])
def test_a_link_out_of_the_folder_is_refused(which, tmp_path):
    folder = tmp_path / "model"
    model = tiny_llama()
    model.save_pretrained(folder, max_shard_size="5GB" if which == "single" else "100KB")
    path = {"file": first_file, "single": lambda f: f / "model.safetensors"}.get(
        which, lambda f: f / INDEX
    )
    link = first_file(folder) if which == "file" else path(folder)
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(WeightsError, match=rf"{link.name} is a link to .*outside the folder"):
        opened(model, folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{", "is not JSON", id="cut"),
        pytest.param("[]", "has no weight_map", id="list"),
        pytest.param('{"weight_map": {"a": 1}}', "not all file names", id="numbers"),
    ],
)
def test_an_index_that_is_none_is_refused(text, message, tmp_path):
    (tmp_path / INDEX).write_text(text)

    with pytest.raises(WeightsError, match=message):
        opened(tiny_llama(), tmp_path)


def test_an_index_that_does_not_fit_its_files_is_refused_with_all_names(tmp_path):
    model = sharded_llama(tmp_path)

    def change(weight_map):
        weight_map["model.extra"] = weight_map.pop("model.norm.weight")

    edit_index(tmp_path, change)

    with pytest.raises(
        WeightsError, match=r"(?s)1 in the index only: model\.extra.*1 in the files only: model\.no"
    ):
        opened(model, tmp_path)


def test_missing_left_over_and_misshapen_tensors_are_all_listed(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(4):
        del tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
    tensors["score.weight"] = torch.zeros(2, 64)
    tensors["model.norm.weight"] = torch.zeros(32)
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(WeightsError) as caught:
        opened(model, tmp_path)

    message = str(caught.value)
    assert "4 missing: model.layers.{0-3}.mlp.up_proj.weight" in message
    assert "1 not used: score.weight" in message
    assert "of shape [32] where the config says [64]: model.norm.weight" in message


def test_a_folder_of_another_kind_of_model_is_refused(tmp_path):
    tiny_gpt2().save_pretrained(tmp_path)

    with pytest.raises(WeightsError, match=r"config\.json is of a 'gpt2' model.* type 'llama'"):
        opened(tiny_llama(), tmp_path)


def test_quantised_weights_are_refused_by_name(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(WeightsError, match=r"1 tensors .*not floating point: model\.norm\.weight"):
        opened(model, tmp_path)


def test_the_digest_tells_two_folders_apart(tmp_path):
    one = sharded_llama(tmp_path / "one")
    other = tiny_llama(torch.bfloat16)
    other.save_pretrained(tmp_path / "two")

    digests = [opened(one, tmp_path / "one").digest(), opened(other, tmp_path / "two").digest()]

    assert digests[0] != digests[1]
    assert isinstance(LlamaForCausalLM.from_pretrained(tmp_path / "two"), LlamaForCausalLM)
