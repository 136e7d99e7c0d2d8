"""Decoding with a small causal model in this process: load a folder, sample a batch, exactly.

A leaf: torch and transformers are loaded here. A response depends on the policy, the prompt, the
temperature, the seed and the draw, and on nothing else: each request draws its uniforms from its
own generator and picks tokens by inverse CDF in float64. (Sums inside a batched matrix product may
differ in the last bit with the batch's shape; that moves a token only where a uniform falls within
about 1e-7 of a boundary.)
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from agl_core.errors import ConfigError
from agl_core.serving.generation import Completion, FinishReason, GenerationRequest, ServedPolicy
from agl_core.serving.weights import chat_template_digest, tokenizer_digest, weights_digest

_DTYPE = torch.float32


class LoadedPolicy:
    """A policy in memory."""

    def __init__(
        self,
        served: ServedPolicy,
        model: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: frozenset[int],
    ) -> None:
        self.served = served
        self.model = model
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        """Token ids that end a response."""
        self._token_texts: dict[int, str] = {}

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a chat, ready for the assistant's turn.

        Raises:
            ConfigError: The chat template refuses the messages.
        """
        return encode_chat(self.tokenizer, messages)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special tokens included."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = str(self.tokenizer.decode([token_id]))
        return text


class Work(NamedTuple):
    """A request and where its completion goes."""

    request: GenerationRequest
    future: Future[Completion]


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of a chat, ready for the assistant's turn.

    Raises:
        ConfigError: The chat template refuses the messages.
    """
    try:
        text = str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    except TemplateError as error:
        raise ConfigError(f"messages: the chat template refuses them: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a Hugging Face folder, from local files only.

    Raises:
        ConfigError: There is none, it cannot be read, or it has no chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{folder}: its tokenizer cannot be loaded: {error}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"{folder}: the tokenizer has no chat template")
    return tokenizer


def set_num_threads(num_threads: int) -> None:
    """Let torch use that many cores."""
    torch.set_num_threads(num_threads)


def draw_uniforms(request: GenerationRequest) -> torch.Tensor:
    """Return [max_tokens] float64 uniforms in [0, 1), decided by seed and draw alone."""
    generator = torch.Generator().manual_seed(request.seed)
    for _ in range(request.draw):
        torch.rand(request.max_tokens, generator=generator, dtype=torch.float64)
    return torch.rand(request.max_tokens, generator=generator, dtype=torch.float64)


def pick_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick one token for each row and return it with its log-prob.

    Args:
        logits: [batch, vocabulary] fp32.
        temperatures: [batch] fp32; 0 picks the likeliest token.
        uniforms: [batch] float64 in [0, 1).

    Returns:
        [batch] token ids, and [batch] `log_softmax(logits / T)` of them in fp32, with T = 1 for
        greedy rows.
    """
    greedy = temperatures == 0
    scaled = logits / torch.where(greedy, 1.0, temperatures).unsqueeze(1)
    logprobs = torch.log_softmax(scaled, dim=-1)
    cdf = torch.softmax(scaled.double(), dim=-1).cumsum(dim=-1)
    targets = (uniforms * cdf[:, -1]).unsqueeze(1)
    sampled = torch.searchsorted(cdf, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), sampled.squeeze(1))
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def load_policy(version: str, folder: Path) -> LoadedPolicy:
    """Read a Hugging Face folder in fp32, from local files only.

    Raises:
        ConfigError: The folder is missing or incomplete, is no causal model, or its tokenizer has
            no chat template.
    """
    transformers_logging.disable_progress_bar()
    digest = weights_digest(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=_DTYPE,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,  # what the digest is over; never a pickle beside it
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{folder}: cannot be loaded as a causal model: {error}") from error
    tokenizer = load_tokenizer(folder)
    model.requires_grad_(False).eval()
    ends: Any = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    end_ids = frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)
    served = ServedPolicy(
        version=version,
        weights_digest=digest,
        tokenizer_digest=tokenizer_digest(folder),
        chat_template_digest=chat_template_digest(folder),
        folder=folder,
        max_positions=int(model.config.max_position_embeddings),
    )
    return LoadedPolicy(served, model, tokenizer, end_ids)


@torch.inference_mode()
def score(
    policy: LoadedPolicy, prompt_ids: list[int], response_ids: list[int], temperature: float
) -> list[float]:
    """Return [response_length] log-probs in nats of a given response: `log_softmax(logits / T)`."""
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    logits = policy.model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(response_ids).unsqueeze(1)).squeeze(1).tolist()


@torch.inference_mode()
def generate(policy: LoadedPolicy, batch: list[Work]) -> None:
    """Sample every response of a batch; each future is resolved as soon as its own response ends.

    Args:
        policy: What samples.
        batch: Requests that fit its positions; ragged prompts are padded on the left.
    """
    rows = [_Row(policy, work) for work in batch]
    longest = max(len(work.request.prompt_ids) for work in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.long)
    for index, work in enumerate(batch):
        prompt = work.request.prompt_ids
        ids[index, longest - len(prompt) :] = torch.tensor(prompt)
        mask[index, longest - len(prompt) :] = 1
    positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)
    temperatures = torch.tensor([work.request.temperature for work in batch])
    num_steps = max(work.request.max_tokens for work in batch)
    uniforms = torch.zeros(len(batch), num_steps, dtype=torch.float64)
    for index, work in enumerate(batch):
        uniforms[index, : work.request.max_tokens] = draw_uniforms(work.request)

    cache = None
    one = torch.ones(len(batch), 1, dtype=torch.long)
    for step in range(num_steps):
        output = policy.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        tokens, logprobs = pick_tokens(
            output.logits[:, -1].float(), temperatures, uniforms[:, step]
        )
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.add(token, logprob)
        if all(row.is_done for row in rows):
            return
        ids = tokens.unsqueeze(1)
        mask = torch.cat([mask, one], dim=1)
        positions = positions[:, -1:] + 1


class _Row:
    """The growing response of one request."""

    def __init__(self, policy: LoadedPolicy, work: Work) -> None:
        self.is_done = False
        self._policy = policy
        self._request = work.request
        self._future = work.future
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    def add(self, token: int, logprob: float) -> None:
        """Take one more token; resolve the future if the response ends with it."""
        if self.is_done:
            return
        self._token_ids.append(token)
        self._logprobs.append(logprob)
        if token in self._policy.end_ids:
            self._finish("stop", self._decode(self._token_ids[:-1]))
            return
        if self._request.stop:
            text = self._decode(self._token_ids)
            found = [text.find(stop) for stop in self._request.stop if stop in text]
            if found:
                self._finish("stop", text[: min(found)])
                return
        if len(self._token_ids) == self._request.max_tokens:
            self._finish("length", self._decode(self._token_ids))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._policy.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _finish(self, reason: FinishReason, text: str) -> None:
        self.is_done = True
        served = self._policy.served
        completion = Completion(self._token_ids, self._logprobs, text, reason, served)
        self._future.set_result(completion)
