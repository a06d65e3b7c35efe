from __future__ import annotations

import pytest
import torch

from accelerate_megatron.errors import WeightsError
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.weights.importing import import_weights
from accelerate_megatron.weights.source import LiveSource
from tests.weights.cutting import FakeShard, cut_model, emptied
from tests.weights.tiny import DTYPES, MODELS, TP_SIZES, tiny_gpt2, tiny_llama


def _import(model, shards, source=None):
    family = family_of(model.config)
    shape = family.shape(model.config)
    import_weights(shards, source or LiveSource(model), family.parameters(shape), shape)


class DictSource:
    label = "the folder"

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def read(self, name, index):
        return self.tensors[name][index]


def _tensors(model):
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize(("build", "changes"), MODELS)
def test_each_shard_gets_the_rows_that_packing_by_hand_gives(build, changes, tp_size, dtype):
    model = build(dtype, **changes)
    expected = cut_model(model, tp_size)

    for rank in range(tp_size):
        shards = emptied(expected[rank])
        _import(model, shards)

        for got, want in zip(shards, expected[rank], strict=True):
            assert torch.equal(got.data, want.data), got.name


def test_shards_keep_their_dtype():
    model = tiny_llama(torch.float32)
    [expected] = cut_model(tiny_llama(torch.bfloat16), 1)
    shards = emptied(expected)

    _import(model, shards)

    assert {shard.data.dtype for shard in shards} == {torch.bfloat16}
    assert all(torch.equal(a.data, b.data) for a, b in zip(shards, expected, strict=True))


def test_rows_after_the_vocabulary_become_zero():
    model = tiny_gpt2()
    shards = emptied(cut_model(model, 4, padded_vocab=512)[1])

    _import(model, shards)

    words = next(s for s in shards if s.name == "embedding.word_embeddings.weight")
    assert torch.count_nonzero(words.data) == 0


def test_a_tied_output_layer_on_another_stage_gets_the_embedding():
    model = tiny_gpt2()
    replica = FakeShard(
        "embedding.word_embeddings.weight", torch.empty(64, 64), (128, 64), (64, 0), False
    )

    _import(model, [replica])

    assert torch.equal(replica.data[:35], model.lm_head.weight[64:])


def test_a_parameter_that_requires_grad_is_written():
    model = tiny_gpt2()
    parameter = torch.nn.Parameter(torch.zeros(64))

    _import(model, [FakeShard("decoder.final_layernorm.bias", parameter, (64,), (0,))])

    assert torch.equal(parameter, model.transformer.ln_f.bias)


def test_only_the_slices_of_a_rank_are_read():
    model = tiny_llama()
    tensors = _tensors(model)
    num_read = 0

    class Counting(DictSource):
        def read(self, name, index):
            nonlocal num_read
            piece = super().read(name, index)
            num_read += piece.numel()
            return piece

    [shards, _] = cut_model(model, 2, padded_vocab=128)
    _import(model, emptied(shards), Counting(tensors))

    num_padding = 29 * 64 * 2  # vocabulary 99 of 128: all padding is on the second rank
    num_held = sum(shard.data.numel() for shard in shards)
    assert num_read == num_held
    assert num_held < sum(t.numel() for t in tensors.values()) / 2 + num_padding


def test_all_missing_and_unused_names_are_listed_in_one_error():
    model = tiny_llama()
    tensors = _tensors(model)
    for layer in (0, 1, 3):
        del tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["score.weight"] = torch.zeros(2)

    with pytest.raises(
        WeightsError,
        match=r"(?s)weights of the folder do not fit this llama model.*"
        r"4 missing: model\.layers\.\{0-1,3\}\.self_attn\.q_proj\.weight, model\.norm\.weight\n"
        r".*1 not used: score\.weight",
    ):
        _import(model, [], DictSource(tensors))


def test_all_wrong_shapes_are_listed_with_the_expected_ones():
    model = tiny_llama()
    tensors = _tensors(model)
    tensors["lm_head.weight"] = torch.zeros(101, 64)

    with pytest.raises(
        WeightsError,
        match=r"of shape \[101, 64\] where the config says \[99, 64\]: lm_head\.weight",
    ):
        _import(model, [], DictSource(tensors))


def test_nothing_is_written_when_the_weights_do_not_fit():
    model = tiny_llama()
    tensors = _tensors(model)
    del tensors["model.norm.weight"]
    [shards] = cut_model(model, 1)
    shards = emptied(shards)

    with pytest.raises(WeightsError, match=r"1 missing: model\.norm\.weight"):
        _import(model, shards, DictSource(tensors))

    assert all(shard.data.isnan().all() for shard in shards)


def test_an_untied_head_in_a_tied_model_is_refused_as_not_used():
    model = tiny_llama(tie_word_embeddings=False)
    model.config.tie_word_embeddings = True

    with pytest.raises(WeightsError, match=r"1 not used: lm_head\.weight"):
        _import(model, [])


def test_a_model_on_the_meta_device_is_refused():
    with pytest.raises(WeightsError, match=r"parameters of the GPT2LMHeadModel are on the meta"):
        LiveSource(tiny_gpt2().to("meta"))


def test_weights_that_are_not_floating_point_are_refused():
    model = torch.nn.Module()
    model.codes = torch.nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)

    with pytest.raises(WeightsError, match=r"not floating point: codes \(torch\.int8\)"):
        LiveSource(model)


def test_a_slice_that_comes_out_too_small_is_refused():
    model = tiny_llama()

    class Truncated(DictSource):
        def read(self, name, index):
            return super().read(name, index)[:1]

    with pytest.raises(WeightsError, match=r"the folder gave \[1\] for rows 0 to 64 of model.norm"):
        _import(
            model,
            [FakeShard("decoder.final_layernorm.weight", torch.empty(64), (64,), (0,))],
            Truncated(_tensors(model)),
        )


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        pytest.param(
            FakeShard("decoder.layers.4.mlp.linear_fc1.bias", torch.empty(1), (1,), (0,)),
            r"decoder\.layers\.4\.mlp\.linear_fc1\.bias is not in the table",
            id="unknown-name",
        ),
        pytest.param(
            FakeShard("decoder.final_layernorm.weight", torch.empty(65), (65,), (0,)),
            r"final_layernorm\.weight is of shape \[65\] where the table says \[64\]$",
            id="shape",
        ),
        pytest.param(
            FakeShard("output_layer.weight", torch.empty(98, 64), (98, 64), (0, 0)),
            r"is of shape \[98, 64\] where the table says \[99, 64\] \(or more rows\)",
            id="vocabulary-too-small",
        ),
        pytest.param(
            FakeShard("decoder.final_layernorm.weight", torch.empty(40), (64,), (32,)),
            r"piece of decoder\.final_layernorm\.weight at \[32\] of shape \[40\] leaves",
            id="outside",
        ),
        pytest.param(
            FakeShard("decoder.final_layernorm.weight", torch.empty(32, 2), (64,), (32,)),
            r"at \[32\] of shape \[32, 2\] leaves its whole of shape \[64\]",
            id="dims",
        ),
    ],
)
def test_a_shard_that_the_table_does_not_place_is_refused(shard, message):
    with pytest.raises(WeightsError, match=message):
        _import(tiny_llama(), [shard])


def test_buffers_of_the_model_are_no_weights():
    model = tiny_llama()
    assert [name for name, _ in model.named_buffers() if name.endswith("inv_freq")]

    assert not [name for name in LiveSource(model).names() if name.endswith("inv_freq")]
