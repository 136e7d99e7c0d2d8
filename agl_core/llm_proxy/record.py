"""The record of one call: its span, and its part in the accounts."""

import logging
from collections.abc import Mapping
from typing import Any

from agl_core import semconv
from agl_core.llm_proxy import capture
from agl_core.llm_proxy.accounts import Accounts
from agl_core.llm_proxy.refusal import fail
from agl_core.tracer.base import ModelCall

logger = logging.getLogger(__name__)


class CallRecord:
    """One call while it is served; who serves it ends it, once."""

    def __init__(self, call: ModelCall, rollout_id: str, accounts: Accounts) -> None:
        self.call = call
        self._rollout_id = rollout_id
        self._accounts = accounts
        self._model: Any = None
        self._recorded: Mapping[str, Any] = {}
        self._has_failed = False

    def ask(self, attributes: Mapping[str, Any]) -> None:
        """Record the request."""
        self._model = attributes.get(semconv.REQUEST_MODEL)
        self.call.span.set_attributes(attributes)

    def status(self, status: int) -> None:
        """Record the HTTP status of the answer."""
        self.call.span.set_attribute(semconv.HTTP_STATUS, status)

    def answer(self, recorded: Mapping[str, Any], defect: str | None) -> None:
        """Record an answer.

        Args:
            recorded: Its attributes.
            defect: Why it cannot be trained on, or None.
        """
        self._recorded = recorded
        self.call.span.set_attributes(recorded)
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
        self._has_failed = True
        fail(self.call.span, reason)

    def end(self) -> None:
        """Count the call and end its span."""
        self._accounts.count(
            self._rollout_id, self._model, self._recorded, has_failed=self._has_failed
        )
        self.call.span.end()
