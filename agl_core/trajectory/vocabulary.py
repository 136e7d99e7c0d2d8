"""A policy's tokens, from the `tokenizer.json` of its Hugging Face folder: neither torch nor
transformers is loaded.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_core.errors import ConfigError

if TYPE_CHECKING:  # part of the extra `train` only
    from tokenizers import Tokenizer


class TokenizerVocabulary:
    """The `Vocabulary` of `agl_core.trajectory.breaks`, from a tokenizer."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_json(cls, text: str) -> "TokenizerVocabulary":
        """Return the vocabulary of a `tokenizer.json`.

        Raises:
            ConfigError: It is none.
        """
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_str(text))
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(f"this is no tokenizer.json: {error}") from error

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    def is_special(self, token_id: int) -> bool:
        """Say whether a token was added beside the text vocabulary, as those of templates are."""
        return token_id in self._special

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of some tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def find_end_ids(folder: Path) -> frozenset[int]:
    """Return the tokens by which a policy ends a response; empty if its files do not say.

    Servers stop at those of `generation_config.json` and at the tokenizer's end token, which
    `config.json` names too.

    Raises:
        ConfigError: One of these files is not JSON.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            ends = json.loads(path.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path} is not a JSON object: {error}") from error
        found.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return frozenset(found)


def find_vocabulary_size(folder: Path) -> int | None:
    """Return how many tokens a policy has embeddings for, by its `config.json`; None where that
    does not say.
    """
    return _number(_read_config(folder), "vocab_size")


def find_positions(folder: Path) -> int | None:
    """Return how many tokens of prompt and response a policy can hold, by its `config.json`; None
    where that does not say, or a server may stretch them (`rope_scaling`).
    """
    config = _read_config(folder)
    is_stretched = any(
        holder.get("rope_scaling")
        or (holder.get("rope_parameters") or {}).get("rope_type", "default") != "default"
        for holder in config
    )
    return None if is_stretched else _number(config, "max_position_embeddings")


def _read_config(folder: Path) -> list[dict[str, Any]]:
    """Return the mappings of `config.json` that say how large a policy is."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return []
    holders = (config, config.get("text_config")) if isinstance(config, dict) else ()
    return [holder for holder in holders if isinstance(holder, dict)]


def _number(holders: Sequence[dict[str, Any]], name: str) -> int | None:
    sizes = [holder.get(name) for holder in holders]
    return next((size for size in sizes if type(size) is int and size > 0), None)


def find_vocabulary(folder: Path) -> TokenizerVocabulary | None:
    """Return the vocabulary of a policy, or None where it has no `tokenizer.json` or the library
    `tokenizers` is missing.
    """
    path = folder / "tokenizer.json"
    if find_spec("tokenizers") is None or not path.is_file():
        return None
    return TokenizerVocabulary.from_json(path.read_text())
