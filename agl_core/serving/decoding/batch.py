"""Rows that are sampled together, with their key-value cache: they join and leave between steps.

    prompts  [batch, longest]  padded on the left
    cache    [batch, heads, longest + steps, head_dim] in each layer

A row that is done leaves at once; columns that only it used go with it. Joining pads the shorter
cache on the left. Both need caches that keep every position: a batch of a model with sliding
windows or states takes no one in while it runs, and keeps its rows to the end.
"""

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from agl_core.serving.decoding.policy import LoadedPolicy
from agl_core.serving.decoding.sampling import (
    Sampling,
    draw_uniforms,
    pick_tokens,
    sampling_logits,
)
from agl_core.serving.row import Row, Work


class Batch:
    """Rows of one policy that are sampled now; their first tokens are when it is made.

    Args:
        policy: What samples.
        works: At least one request; each fits the policy's positions.
    """

    def __init__(self, policy: LoadedPolicy, works: list[Work]) -> None:
        self._policy = policy
        self._device = policy.device
        self._rows = [
            Row(work, policy.served, policy.end_ids, policy.decode, draw_uniforms(work.request))
            for work in works
        ]
        self._sampling = self._sampling_of_rows()
        prompts = [work.request.prompt_ids for work in works]
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._cache: Any = None
        self._mask = torch.tensor(masks, device=self._device)
        """[batch, length] 1 where the cache holds a token."""
        self._ids = torch.tensor(padded, device=self._device)
        """[batch, 1] sampled and not in the cache yet; at first the prompts."""
        self._forward((self._mask.cumsum(dim=1) - 1).clamp_(min=0))

    def __len__(self) -> int:
        """Return the number of rows that are not done."""
        return sum(not row.is_done for row in self._rows)

    @property
    def can_join(self) -> bool:
        """Whether the cache keeps every position, so that it can be cut and padded."""
        return all(type(layer) is DynamicLayer for layer in self._cache.layers)

    def step(self) -> None:
        """Sample one token more in every row."""
        positions = self._mask.sum(dim=1, keepdim=True)
        self._mask = pad(self._mask, (0, 1), value=1)
        self._forward(positions)

    def join(self, new: "Batch") -> None:
        """Take the rows of another batch of the same policy; both have some, and `can_join`."""
        length = max(self._mask.shape[1], new._mask.shape[1])
        for batch in (self, new):
            batch._pad_to(length)
        self._rows += new._rows
        self._sampling = self._sampling_of_rows()
        self._mask = torch.cat([self._mask, new._mask])
        self._ids = torch.cat([self._ids, new._ids])
        for layer, other in zip(self._cache.layers, new._cache.layers, strict=True):
            layer.keys = torch.cat([layer.keys, other.keys])
            layer.values = torch.cat([layer.values, other.values])

    def fail(self, error: Exception) -> None:
        """End every row with an error."""
        for row in self._rows:
            row.fail(error)

    def _sampling_of_rows(self) -> Sampling:
        return Sampling.of([row.request for row in self._rows], self._device)

    @torch.inference_mode()
    def _forward(self, positions: torch.Tensor) -> None:
        """Read the ids into the cache, sample the next ones, drop rows that are done."""
        output = self._policy.model(
            input_ids=self._ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        self._ids = self._sample(output.logits[:, -1].float()).unsqueeze(1)
        self._drop_done()

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Give every row a token; return [batch] ids."""
        rows, sampling = self._rows, self._sampling
        scaled = sampling_logits(logits, sampling)
        uniforms = [0.0 if row.is_done else row.uniform for row in rows]
        drawn = torch.tensor(uniforms, dtype=torch.float64, device=self._device)
        tokens = pick_tokens(scaled, sampling.temperatures, drawn)
        for index, row in enumerate(rows):
            if not row.is_done and row.forced_id is not None:
                tokens[index] = row.forced_id
        logprobs = scaled.log_softmax(dim=-1)
        num_top = max(row.request.num_top_logprobs for row in rows)
        tops = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
        picked = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
        values, ids = tops.values.tolist(), tops.indices.tolist()
        for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if not row.is_done:
                top = list(zip(ids[index], values[index], strict=True))
                row.add(token, picked[index], top[: row.request.num_top_logprobs])
        return tokens

    def _drop_done(self) -> None:
        """Drop rows that are done, and columns that none of the rest uses."""
        indices = [index for index, row in enumerate(self._rows) if not row.is_done]
        if len(indices) in (0, len(self._rows)) or not self.can_join:
            return
        kept = torch.tensor(indices, device=self._device)
        self._rows = [self._rows[index] for index in indices]
        self._sampling = self._sampling_of_rows()
        self._mask, self._ids = self._mask[kept], self._ids[kept]
        start = int(self._mask.any(dim=0).int().argmax())
        self._mask = self._mask[:, start:]
        for layer in self._cache.layers:
            layer.keys = layer.keys[kept, :, start:]
            layer.values = layer.values[kept, :, start:]

    def _pad_to(self, length: int) -> None:
        """Add columns of padding on the left."""
        missing = length - self._mask.shape[1]
        if missing:
            self._mask = pad(self._mask, (missing, 0))
            for layer in self._cache.layers:
                layer.keys = pad(layer.keys, (0, 0, missing, 0))
                layer.values = pad(layer.values, (0, 0, missing, 0))
