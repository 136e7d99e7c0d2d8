"""From logits to tokens and their log-probs, row by row as each row's request says."""

import hashlib
from dataclasses import dataclass
from typing import Self

import torch

from agl_core.serving.generation import GenerationRequest


def draw_uniforms(request: GenerationRequest) -> list[float]:
    """Return [max_tokens] float64 uniforms in [0, 1), decided by seed and draw alone.

    A longer request draws the same ones first.
    """
    seed = request.seed
    if request.draw:
        digest = hashlib.sha256(f"{seed}/{request.draw}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(request.max_tokens, generator=generator, dtype=torch.float64).tolist()


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of a batch; each [batch], on the logits' device."""

    temperatures: torch.Tensor
    """fp32; 0 picks the likeliest token."""
    top_ps: torch.Tensor
    """float64 in (0, 1]."""
    top_ks: torch.Tensor
    """int64; 0 leaves all tokens."""
    is_truncated: torch.Tensor
    """bool: whether top-p or top-k applies; where it does not, `top_ps` and `top_ks` are unread."""

    @classmethod
    def of(cls, requests: list[GenerationRequest], device: torch.device) -> Self:
        """Return the parameters of some requests."""
        rows = [(r.temperature, r.top_p, r.top_k, r.is_truncated) for r in requests]
        temperatures, top_ps, top_ks, are_truncated = zip(*rows, strict=True)
        return cls(
            torch.tensor(temperatures, dtype=torch.float32, device=device),
            torch.tensor(top_ps, dtype=torch.float64, device=device),
            torch.tensor(top_ks, dtype=torch.int64, device=device),
            torch.tensor(are_truncated, dtype=torch.bool, device=device),
        )


def truncate(scaled: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Return logits with -inf for the tokens that top-k, then top-p leave out.

    Args:
        scaled: [batch, vocabulary] logits at the sampling temperature.
        top_ks: [batch] tokens to keep; 0 keeps all. Of equal logits the lower ids are kept.
        top_ps: [batch] the likeliest tokens are kept until their probability reaches this; at least
            one is.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)
    limits = torch.where(top_ks > 0, top_ks, scaled.shape[-1]).unsqueeze(1)
    ordered = ordered.masked_fill(ranks >= limits, -torch.inf)
    probs = ordered.double().softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    ordered = ordered.masked_fill((before >= top_ps.unsqueeze(1)) & (ranks > 0), -torch.inf)
    return torch.full_like(scaled, -torch.inf).scatter(1, order, ordered)


def sampling_logits(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return [batch, vocabulary] logits whose softmax is sampled from.

    Args:
        logits: [batch, vocabulary] fp32, of the model.
        sampling: How; greedy rows are left as they are.
    """
    temperatures = torch.where(sampling.temperatures == 0, 1.0, sampling.temperatures)
    scaled = logits / temperatures.unsqueeze(1)
    rows = sampling.is_truncated.nonzero().squeeze(1)
    if len(rows):  # a sort of the vocabulary, for these rows alone
        scaled[rows] = truncate(scaled[rows], sampling.top_ks[rows], sampling.top_ps[rows])
    return scaled


def pick_tokens(
    scaled: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """Return [batch] token ids.

    Args:
        scaled: [batch, vocabulary] as `sampling_logits` gives them.
        temperatures: [batch]; 0 picks the likeliest token.
        uniforms: [batch] float64 in [0, 1): where in the cumulated probabilities a row's token is.
    """
    cdf = scaled.double().softmax(dim=-1).cumsum(dim=-1)
    total = cdf[:, -1:]
    # Below the total, however the product rounds: what comes after it has probability 0.
    targets = torch.minimum(uniforms.unsqueeze(1) * total, total.nextafter(torch.zeros_like(total)))
    sampled = torch.searchsorted(cdf, targets, right=True).squeeze(1)
    return torch.where(temperatures == 0, scaled.argmax(dim=-1), sampled)
