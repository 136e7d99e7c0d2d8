"""The record of one call: its span, and its part in the accounts."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from agl_core import semconv
from agl_core.llm_proxy import capture
from agl_core.llm_proxy.accounts import Accounts
from agl_core.llm_proxy.refusal import fail
from agl_core.tracer.base import ModelCall

logger = logging.getLogger(__name__)


class CallRecord:
    """One call while it is served; it ends once, at the latest with its attempt.

    The attempt may end in another thread, while the proxy still writes: whoever ends the record
    second waits until it is whole.
    """

    def __init__(self, call: ModelCall, rollout_id: str, accounts: Accounts) -> None:
        self.call = call
        self._rollout_id = rollout_id
        self._accounts = accounts
        self._model: Any = None
        self._recorded: Mapping[str, Any] = {}
        self._has_failed = False
        self._has_ended = False
        self._lock = threading.RLock()
        self._last_words: Callable[[], None] = lambda: self.fail(
            "the attempt ended before the answer"
        )
        self._forget: Callable[[], None] = lambda: None
        self._forget = call.before_close(self._leave)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is recorded."""
        return self._has_ended

    def ask(self, attributes: Mapping[str, Any]) -> None:
        """Record the request."""
        self._model = attributes.get(semconv.REQUEST_MODEL)
        self._set(attributes)

    def status(self, status: int) -> None:
        """Record the HTTP status of the answer."""
        self._set({semconv.HTTP_STATUS: status})

    def answer(self, recorded: Mapping[str, Any], defect: str | None) -> None:
        """Record an answer.

        Args:
            recorded: Its attributes.
            defect: Why it cannot be trained on, or None.
        """
        with self._lock:
            if self._has_ended:
                return
            self._recorded = recorded
            self._set(recorded)
            if defect:
                self.fail(defect)
        if defect and capture.NO_TOKEN_IDS in defect and self._accounts.is_first_without_ids():
            logger.warning(
                "the model server gives no token ids, so nothing can be trained on its answers; "
                "does it honour return_token_ids? rollout=%s (said once)",
                self._rollout_id,
            )

    def fail(self, reason: str) -> None:
        """Mark the call as failed."""
        with self._lock:
            if not self._has_ended:
                self._has_failed = True
                fail(self.call.span, reason)

    def at_end_of_attempt(self, last_words: Callable[[], None]) -> None:
        """Say what to record where the attempt ends first, instead of a failure."""
        self._last_words = last_words

    def end(self, last_words: Callable[[], None] | None = None) -> None:
        """Count the call and end its span; only the first time.

        Args:
            last_words: Records what is left.
        """
        with self._lock:
            if self._has_ended:
                return
            try:
                if last_words is not None:
                    last_words()
            finally:
                self._has_ended = True
                self._accounts.count(
                    self._rollout_id, self._model, self._recorded, has_failed=self._has_failed
                )
                self.call.span.end()
        self._forget()

    def _leave(self) -> None:
        """End the record with its attempt."""
        self.end(self._last_words)

    def _set(self, attributes: Mapping[str, Any]) -> None:
        with self._lock:
            if not self._has_ended:
                self.call.span.set_attributes(attributes)
