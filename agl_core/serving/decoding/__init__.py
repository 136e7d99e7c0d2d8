"""Decoding with a small causal model in this process: load a folder, sample a batch, exactly.

A leaf: torch and transformers are loaded here. A response depends on the policy, the prompt, the
sampling parameters, the seed and the draw, and on nothing else: each request draws its uniforms
from its own generator and picks tokens by inverse CDF in float64. (Sums inside a batched matrix
product may differ in the last bit with the batch's shape; that moves a token only where a uniform
falls within about 1e-7 of a boundary.)

    policy    a folder in memory: model, tokenizer, chat template
    sampling  logits -> token and log-prob
    batch     the rows that are sampled together, and their key-value cache
"""

from agl_core.serving.decoding.batch import Batch
from agl_core.serving.decoding.policy import (
    LoadedPolicy,
    encode_chat,
    load_policy,
    load_tokenizer,
    score,
    set_num_threads,
)

__all__ = [
    "Batch",
    "LoadedPolicy",
    "encode_chat",
    "load_policy",
    "load_tokenizer",
    "score",
    "set_num_threads",
]
