"""The probabilities that tokens are drawn from, and that they are drawn with them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from accelerate_megatron.generation.sampling import SamplingRule, draw, probabilities, uniforms

DRAWS = 20_000
RULES = [
    SamplingRule(temperature=0.7),
    SamplingRule(temperature=1.8),
    SamplingRule(top_k=5),
    SamplingRule(top_p=0.6),
    SamplingRule(temperature=1.3, top_k=9, top_p=0.8),
]


def logits(vocabulary: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 1.5


def transformers_probabilities(scores: torch.Tensor, rule: SamplingRule) -> torch.Tensor:
    scores = TemperatureLogitsWarper(rule.temperature)(None, scores.double())
    if rule.top_k:
        scores = TopKLogitsWarper(rule.top_k)(None, scores)
    if rule.top_p < 1:
        scores = TopPLogitsWarper(rule.top_p)(None, scores)
    return scores.softmax(dim=-1)


def chi_squared_is_plausible(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Say whether counts are within what chance does once in 10^6 (Wilson-Hilferty)."""
    is_possible = expected > 0
    if counts[~is_possible].any():
        return False
    counts, expected = counts[is_possible], expected[is_possible]
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    spread = (2 / (9 * freedom)) ** 0.5
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / spread < 4.75


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_probabilities_are_those_of_transformers(rule: SamplingRule) -> None:
    for seed in range(20):
        scores = logits(seed=seed)
        torch.testing.assert_close(
            probabilities(scores, rule), transformers_probabilities(scores, rule)
        )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_draws_pass_a_chi_squared_test_against_the_exact_distribution(rule: SamplingRule) -> None:
    scores = logits()
    exact = transformers_probabilities(scores, rule)[0]
    uniform = uniforms(7, 0, 1, DRAWS)[0]

    tokens = draw(probabilities(scores, rule).expand(DRAWS, -1), uniform)

    counts = torch.bincount(tokens, minlength=scores.shape[1]).double()
    assert chi_squared_is_plausible(counts, exact * DRAWS)
    other = torch.full_like(exact, 1 / len(exact)) * DRAWS  # the test can fail
    assert not chi_squared_is_plausible(counts, other)


def test_rows_of_one_call_are_independent_of_each_other() -> None:
    first, second = uniforms(7, 0, 2, DRAWS)
    pairs = (first * 4).long() * 4 + (second * 4).long()

    counts = torch.bincount(pairs, minlength=16).double()

    assert chi_squared_is_plausible(counts, torch.full((16,), DRAWS / 16).double())


@given(
    seed=st.integers(0, 2**63 - 1),
    rows=st.integers(1, 5),
    cut=st.integers(0, 4),
    steps=st.integers(1, 4),
)
def test_a_rows_numbers_do_not_depend_on_the_rows_beside_it(
    seed: int, rows: int, cut: int, steps: int
) -> None:
    whole = uniforms(seed, 0, rows + cut, steps)

    assert torch.equal(whole[cut:], uniforms(seed, cut, rows, steps))
    assert whole.min() >= 0
    assert whole.max() < 1


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 0.5, 3.0]), min_size=1, max_size=8),
    place=st.floats(0, 1, exclude_max=True),
)
def test_a_token_without_probability_is_never_drawn(weights: list[float], place: float) -> None:
    shares = torch.tensor([weights], dtype=torch.float64)
    if shares.sum() == 0:
        return

    [token] = draw(shares, torch.tensor([place], dtype=torch.float64)).tolist()

    assert weights[token] > 0


def test_one_of_the_likeliest_is_the_likeliest() -> None:
    scores = logits(vocabulary=50)

    shares = probabilities(scores, SamplingRule(top_k=1))

    assert shares.argmax() == scores.argmax()
    assert shares.max() == 1
    assert probabilities(scores, SamplingRule(top_p=1e-9)).max() == 1
