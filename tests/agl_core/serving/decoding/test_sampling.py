import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agl_core.serving.decoding.sampling import (
    Sampling,
    draw_uniforms,
    pick_tokens,
    sampling_logits,
    truncate,
)
from agl_core.serving.generation import GenerationRequest

CPU = torch.device("cpu")
PROBS = [0.4, 0.3, 0.15, 0.1, 0.05]


def make_request(max_tokens: int = 4, **more: Any) -> GenerationRequest:
    return GenerationRequest("v000000", [1], max_tokens, **more)


def frequencies(num: int, **more: Any) -> np.ndarray:
    """Return how often each token of PROBS is picked at evenly spread uniforms."""
    logits = torch.log(torch.tensor([PROBS])).repeat(num, 1)
    sampling = Sampling.of([make_request(**more)] * num, CPU)
    uniforms = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    tokens = pick_tokens(sampling_logits(logits, sampling), sampling.temperatures, uniforms)
    return np.bincount(tokens.numpy(), minlength=len(PROBS)) / num


def expected(kept: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    weights = np.zeros(len(PROBS))
    weights[list(kept)] = np.array(PROBS)[list(kept)] ** (1 / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({}, range(5)),
        ({"temperature": 0.5}, range(5)),
        ({"temperature": 2.0}, range(5)),
        ({"top_k": 2}, range(2)),
        ({"top_k": 9}, range(5)),
        ({"top_p": 0.7}, range(2)),  # 0.4 + 0.3 is enough
        ({"top_p": 0.71}, range(3)),
        ({"top_p": 0.01}, range(1)),
        ({"top_k": 3, "top_p": 0.8}, range(2)),  # of 0.85 that top-k leaves, 0.7 is 82 %
        ({"temperature": 0.5, "top_p": 0.6}, range(2)),  # 0.57, then 0.89
        ({"temperature": 0, "top_p": 0.5, "top_k": 3}, range(1)),
    ],
)
def test_frequencies_are_those_of_the_truncated_softmax(
    more: dict[str, Any], kept: Sequence[int]
) -> None:
    temperature = more.get("temperature", 1.0) or 1.0
    assert frequencies(20_000, **more) == pytest.approx(expected(kept, temperature), abs=1e-3)


def test_seeded_draws_follow_the_softmax() -> None:
    request = make_request(20_000, temperature=0.5, seed=11)
    uniforms = torch.tensor(draw_uniforms(request), dtype=torch.float64)
    sampling = Sampling.of([request] * 20_000, CPU)
    logits = torch.log(torch.tensor([PROBS])).repeat(20_000, 1)
    tokens = pick_tokens(sampling_logits(logits, sampling), sampling.temperatures, uniforms)
    counts = np.bincount(tokens.numpy(), minlength=5)
    wanted = expected(range(5), 0.5) * 20_000
    # Chi-squared with 4 degrees of freedom: 18.5 is passed by chance once in a thousand seeds.
    assert ((counts - wanted) ** 2 / wanted).sum() < 18.5


def test_rows_are_truncated_as_their_own_requests_say() -> None:
    logits = torch.log(torch.tensor([PROBS] * 3))
    requests = [make_request(), make_request(top_k=1), make_request(temperature=0.0, top_k=1)]
    finite = sampling_logits(logits, Sampling.of(requests, CPU)).isfinite().sum(dim=1)
    assert finite.tolist() == [5, 1, 5]


def test_equal_logits_at_the_limit_keep_the_lower_ids() -> None:
    kept = truncate(torch.zeros(1, 6), torch.tensor([2]), torch.tensor([1.0], dtype=torch.float64))
    assert kept.isfinite().tolist() == [[True, True, False, False, False, False]]


@pytest.mark.parametrize("uniform", [math.nextafter(1.0, 0.0), 1.0 - 1e-17])
def test_a_uniform_near_one_picks_a_token_that_can_be_sampled(uniform: float) -> None:
    drawn = torch.tensor([min(uniform, math.nextafter(1.0, 0.0))], dtype=torch.float64)
    logits = torch.tensor([[0.0] * 7 + [-torch.inf] * 3])
    assert pick_tokens(logits, torch.ones(1), drawn).item() == 6


def test_a_token_without_probability_is_not_picked_at_zero() -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf, 0.0, 0.0]])
    zero = torch.zeros(1, dtype=torch.float64)
    assert pick_tokens(logits, torch.ones(1), zero).item() == 2


def test_uniforms_are_decided_by_seed_and_draw_and_not_by_the_limit() -> None:
    drawn = {
        (seed, draw): draw_uniforms(make_request(6, seed=seed, draw=draw))
        for seed in (5, 6)
        for draw in (0, 1, 2)
    }
    assert len({tuple(uniforms) for uniforms in drawn.values()}) == 6
    for (seed, draw), uniforms in drawn.items():
        assert draw_uniforms(make_request(3, seed=seed, draw=draw)) == uniforms[:3]
        assert all(0 <= uniform < 1 for uniform in uniforms)
