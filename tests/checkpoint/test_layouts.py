"""A checkpoint of one layout goes on in another one, optimizer state included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.tensors import global_tensors
from tests.checkpoint.training import Run, train
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel
from tests.parity.training import LayoutCase

DIST = {"use_distributed_optimizer": True}
VP2 = {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}
SPLIT_2 = {"pp_degree": 2, "pipeline_model_parallel_split_rank": 1}
SPLIT_4 = {"pp_degree": 4, "pipeline_model_parallel_split_rank": 3}
T5 = TinyModel("t5", changes={"num_layers": 3, "num_decoder_layers": 2})
LLAMA = TinyModel("llama", tied=False, changes={"num_key_value_heads": 4})

MIXTRAL = TinyModel("mixtral", tied=False)
EP2 = {"expert_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}

# The layouts add the same terms in other orders: as in the tests of parity.
LOSSES = 1e-4
GRAD_NORMS = 1e-4  # relative
STOPPED_AT = 3

ONE = LayoutCase(1)
SLOW = pytest.mark.slow
TP2_DIST = LayoutCase(4, {"tp_degree": 2, **DIST})
CHANGES = [
    pytest.param(
        ONE, LayoutCase(2, {"tp_degree": 2}), TinyModel("gpt2"), id="1-to-tp2", marks=SLOW
    ),
    pytest.param(ONE, LayoutCase(4, {"tp_degree": 4}), LLAMA, id="1-to-tp4", marks=SLOW),
    pytest.param(
        ONE, LayoutCase(2, {"pp_degree": 2}, 4), TinyModel("gpt2"), id="1-to-pp2", marks=SLOW
    ),
    pytest.param(ONE, LayoutCase(2, VP2, 4), LLAMA, id="1-to-pp2-vp2"),
    pytest.param(ONE, LayoutCase(2, DIST), TinyModel("gpt2"), id="1-to-dp2-dist-opt", marks=SLOW),
    pytest.param(TP2_DIST, ONE, LLAMA, id="tp2-dp2-dist-opt-to-1", marks=SLOW),
    pytest.param(
        TP2_DIST, LayoutCase(2), TinyModel("gpt2"), id="tp2-dp2-dist-opt-to-dp2", marks=SLOW
    ),
    pytest.param(
        TP2_DIST,
        LayoutCase(4, {"tp_degree": 2, "pp_degree": 2, **DIST}, 4),
        LLAMA,
        id="tp2-dp2-dist-opt-to-tp2-pp2-dist-opt",
    ),
    pytest.param(
        LayoutCase(2, VP2, 4),
        LayoutCase(2, {"tp_degree": 2}),
        TinyModel("gpt2"),
        id="vp2-to-tp2",
        marks=SLOW,
    ),
    pytest.param(
        LayoutCase(2, VP2, 4),
        LayoutCase(4, {"pp_degree": 4}, 4),
        LLAMA,
        id="vp2-to-pp4",
        marks=SLOW,
    ),
    pytest.param(
        LayoutCase(2, DIST), LayoutCase(4, DIST), LLAMA, id="dp2-to-dp4-dist-opt", marks=SLOW
    ),
    pytest.param(
        LayoutCase(4, {"pp_degree": 2, **DIST}, 2),
        LayoutCase(4, {"tp_degree": 2, "sequence_parallelism": True}),
        LLAMA,
        id="pp2-dp2-dist-opt-to-tp2-dp2-sp",
    ),
    pytest.param(
        LayoutCase(2), LayoutCase(2, DIST), TinyModel("gpt2"), id="dist-opt-on", marks=SLOW
    ),
    pytest.param(LayoutCase(2, DIST), LayoutCase(2), LLAMA, id="dist-opt-off"),
    pytest.param(
        LayoutCase(4, {**SPLIT_2, "tp_degree": 2, **DIST}, 4),
        LayoutCase(2, {"tp_degree": 2}),
        T5,
        id="t5-tp2-pp2-dist-opt-to-tp2",
    ),
    pytest.param(ONE, LayoutCase(4, SPLIT_4, 4), T5, id="t5-1-to-pp4", marks=SLOW),
    pytest.param(
        LayoutCase(4, SPLIT_4, 4),
        LayoutCase(4, {**SPLIT_2, **DIST}),
        T5,
        id="t5-pp4-to-pp2-dp2-dist-opt",
        marks=SLOW,
    ),
    pytest.param(ONE, LayoutCase(2, CP2), LLAMA, id="1-to-cp2", marks=SLOW),
    pytest.param(
        LayoutCase(4, {**CP2, **DIST}),
        LayoutCase(2, {"tp_degree": 2}),
        TinyModel("gpt2"),
        id="cp2-dp2-dist-opt-to-tp2",
        marks=SLOW,
    ),
    pytest.param(ONE, LayoutCase(2, EP2), MIXTRAL, id="1-to-ep2", marks=SLOW),
    pytest.param(
        LayoutCase(4, {**EP2, **DIST}),
        LayoutCase(2, {"tp_degree": 2, "sequence_parallelism": True}),
        MIXTRAL,
        id="dp4-ep2-dist-opt-to-tp2-sp",
        marks=SLOW,
    ),
    pytest.param(
        LayoutCase(2, EP2),
        LayoutCase(4, {**EP2, "pp_degree": 2}),
        MIXTRAL,
        id="ep2-to-ep2-pp2",
        marks=SLOW,
    ),
    pytest.param(
        LayoutCase(4, {"tp_degree": 2, "pp_degree": 2}, 4),
        LayoutCase(2, DIST),
        TinyModel("bert"),
        id="bert-tp2-pp2-to-dp2-dist-opt",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize(("before", "after", "model"), CHANGES)
def test_another_layout_goes_on_where_the_first_one_stopped(
    before: LayoutCase, after: LayoutCase, model: TinyModel, tmp_path: Path
) -> None:
    saved, again = str(tmp_path / "saved"), str(tmp_path / "again")
    run = Run(before, model, shuffle=False, steps=6)

    whole = run_ranks(train, replace(run, save={STOPPED_AT: saved}), num_ranks=before.num_ranks)
    resumed = run_ranks(
        train,
        replace(run, layout=after, load=saved, save_loaded=again),
        num_ranks=after.num_ranks,
    )

    torch.testing.assert_close(
        torch.tensor(resumed[0].losses),
        torch.tensor(whole[0].losses[STOPPED_AT:]),
        rtol=0,
        atol=LOSSES,
    )
    torch.testing.assert_close(
        torch.tensor(resumed[0].grad_norms),
        torch.tensor(whole[0].grad_norms[STOPPED_AT:]),
        rtol=GRAD_NORMS,
        atol=0,
    )
    assert resumed[0].rates == whole[0].rates[STOPPED_AT:]
    check_same_tensors(saved, again)


def check_same_tensors(saved: str, again: str) -> None:
    """Check that what was loaded and saved at once, in another layout, is the same."""
    tensors, after = global_tensors(saved), global_tensors(again)
    assert set(after) == set(tensors)
    kinds = {name.split(".")[2] for name in tensors if name.startswith("optimizer.state.")}
    assert {"exp_avg", "exp_avg_sq"} <= kinds
    for name, tensor in tensors.items():
        assert torch.equal(after[name], tensor), name


def test_a_checkpoint_in_bf16_goes_on_in_fp32_from_its_fp32_copies(tmp_path: Path) -> None:
    saved, again = str(tmp_path / "saved"), str(tmp_path / "again")
    run = Run(LayoutCase(2, DIST), LLAMA, precision="bf16", steps=3, save={3: saved})

    run_ranks(train, run, num_ranks=2)
    fp32 = Run(ONE, LLAMA, load=saved, save_loaded=again, steps=3)
    run_ranks(train, fp32, num_ranks=1)

    tensors, after = global_tensors(saved), global_tensors(again)
    for name, tensor in after.items():
        copy = tensors.get(f"optimizer.state.fp32_param.{name}", tensors[name])
        assert torch.equal(tensor, copy), name


@pytest.mark.slow
def test_a_checkpoint_in_fp32_goes_on_in_bf16_with_exact_copies(tmp_path: Path) -> None:
    saved, again = str(tmp_path / "saved"), str(tmp_path / "again")
    run_ranks(train, Run(ONE, LLAMA, steps=3, save={3: saved}), num_ranks=1)

    bf16 = Run(LayoutCase(2, DIST), LLAMA, precision="bf16", load=saved, save_loaded=again, steps=3)
    run_ranks(train, bf16, num_ranks=2)

    tensors, after = global_tensors(saved), global_tensors(again)
    for name, tensor in tensors.items():
        copy = after.get(f"optimizer.state.fp32_param.{name}", after[name])
        assert torch.equal(tensor, copy), name
