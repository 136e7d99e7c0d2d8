"""Answers kept under the key of a call, so that a repeated call finds the first one's."""

import secrets

from agl_core.store.database import Transaction
from agl_core.store.json_text import decode, encode

KEEP_SECONDS = 3600.0
"""How long a repeated call is known as such; retries end long before."""


def recall(transaction: Transaction, operation: str, key: str | None) -> list[list[str]] | None:
    """Return what was remembered for a key of an operation, or None."""
    if key is None:
        return None
    ids = transaction.value(
        "SELECT ids FROM answers WHERE operation = ? AND idempotency_key = ?", operation, key
    )
    return None if ids is None else decode(ids)


def remember(
    transaction: Transaction, operation: str, key: str | None, ids: list[list[str]]
) -> None:
    """Keep the ids of an answer for `KEEP_SECONDS`."""
    if key is None:
        return
    transaction.run("DELETE FROM answers WHERE time < ?", transaction.now - KEEP_SECONDS)
    transaction.run(
        "INSERT INTO answers VALUES (?, ?, ?, ?)", operation, key, transaction.now, encode(ids)
    )


def new_id(prefix: str, num_bytes: int) -> str:
    """Return a random id: a prefix and two hex digits for each byte."""
    return f"{prefix}-{secrets.token_hex(num_bytes)}"
