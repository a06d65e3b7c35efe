"""What a rank holds is what the formulas and `plan` say; see benchmarks/memory.py."""

from __future__ import annotations

import pytest
import torch

from benchmarks import memory

FAST = ("Llama, full recomputation",)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
        for case in memory.CASES
    ],
)
def test_bytes_are_those_of_the_formulas_and_of_the_plan(case: memory.Case) -> None:
    record = memory.measure(case)

    wrong = [check for check in record["checks"] if not check["agrees"]]
    assert record["checks"]
    assert not wrong
    assert record["agrees"]


def test_saved_bytes_count_each_storage_once_and_its_end() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8, requires_grad=True)
    saved = memory.SavedBytes({weight.untyped_storage().data_ptr()})

    with saved.hooks():
        y = (x @ weight).relu()  # keeps x, the weight, and its result
        z = y * y.view(4, 8)  # keeps the result of relu twice more, as one storage
        assert saved.most == 2 * 4 * 8 * 4
        z.sum().backward()
        (x * x).sum()

    assert saved.most == 2 * 4 * 8 * 4
