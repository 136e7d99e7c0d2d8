"""Policies in memory: a Hugging Face folder with its model, tokenizer and chat template."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from agl_core.errors import ConfigError
from agl_core.serving.generation import ServedPolicy
from agl_core.serving.weights import chat_template_digest, tokenizer_digest, weights_digest

_DTYPE = torch.float32
_LOADING = threading.Lock()
"""Transformers replaces methods of its classes while it loads a model: two loads at once leave the
tying of embeddings switched off, and tied heads random."""

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]


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
        self.device = next(model.parameters()).device
        self.end_ids = end_ids
        """Token ids that end a response."""
        self._token_texts: dict[int, str] = {}

    def encode(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Return the token ids of a chat, ready for the assistant's turn; see `encode_chat`."""
        return encode_chat(self.tokenizer, messages, tools)

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text, with what the tokenizer begins each text with."""
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special tokens included."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = str(self.tokenizer.decode([token_id]))
        return text


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools = ()
) -> list[int]:
    """Return the token ids of a chat, ready for the assistant's turn.

    Args:
        tokenizer: With its chat template.
        messages: As the template takes them; arguments of tool calls are objects.
        tools: What the model may call, in OpenAI's shape.

    Raises:
        ConfigError: The chat template refuses the messages, or does not show tools to the model.
    """
    if tools and "tools" not in str(tokenizer.chat_template):
        raise ConfigError("tools: the policy's chat template does not show them to the model")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise ConfigError(f"messages: the chat template refuses them: {error}") from error
    return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])


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


def _load_model(folder: Path) -> Any:
    try:
        with _LOADING:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=_DTYPE,
                attn_implementation="sdpa",
                local_files_only=True,
                use_safetensors=True,  # what the digest is over; never a pickle beside it
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{folder}: cannot be loaded as a causal model: {error}") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):  # which transformers fills with random numbers
        raise ConfigError(f"{folder}: its weights lack {', '.join(missing)}")
    return model


def load_policy(version: str, folder: Path, device: str = "cpu") -> LoadedPolicy:
    """Read a Hugging Face folder in fp32, from local files only.

    Args:
        version: Name to serve it under.
        folder: Holds weights, tokenizer and chat template.
        device: Of torch, for example `cpu` or `cuda:0`.

    Raises:
        ConfigError: The folder is missing or incomplete, is no causal model, or its tokenizer has
            no chat template.
    """
    transformers_logging.disable_progress_bar()
    digest = weights_digest(folder)
    model = _load_model(folder)
    tokenizer = load_tokenizer(folder)
    try:
        model.requires_grad_(False).eval().to(device)
    except (RuntimeError, AssertionError) as error:  # what torch raises where there is none
        raise ConfigError(f"device {device} cannot be used: {error}") from error
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
        num_tokens=int(model.get_input_embeddings().weight.shape[0]),
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
