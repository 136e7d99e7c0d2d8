"""One response while it grows: takes tokens, finds its end, tells whoever waits."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from agl_core.serving.generation import (
    Completion,
    FinishReason,
    GenerationRequest,
    OnToken,
    SampledToken,
    ServedPolicy,
)
from agl_core.serving.text import IncrementalText, StopTexts


class Work(NamedTuple):
    """A request and where its answer goes.

    The future stays pending until it is answered: its caller may cancel it at any time.
    """

    request: GenerationRequest
    future: Future[Completion]
    on_token: OnToken | None = None

    def fail(self, error: Exception) -> None:
        """Hand an error to the caller, unless it left."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class _End(NamedTuple):
    reason: FinishReason
    stop: int | str | None = None


class Row:
    """The growing response of one request.

    Args:
        work: What is asked for.
        policy: What samples it.
        end_ids: The policy's own end tokens.
        decode: Returns the text of token ids, special tokens left out.
        uniforms: [max_tokens] numbers in [0, 1) that pick its tokens.
    """

    def __init__(
        self,
        work: Work,
        policy: ServedPolicy,
        end_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        uniforms: Sequence[float],
    ) -> None:
        self.request = work.request
        self.is_done = False
        self._work = work
        self._policy = policy
        self._end_ids = end_ids
        self._uniforms = uniforms
        self._characters = IncrementalText(decode)
        self._stops = StopTexts(work.request.stop)
        self._tokens: list[SampledToken] = []

    @property
    def uniform(self) -> float:
        """What picks the next token."""
        return self._uniforms[len(self._tokens)]

    @property
    def forced_id(self) -> int | None:
        """The next token where it is forced."""
        forced = self.request.forced_ids
        return None if forced is None else forced[len(self._tokens)]

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._work.future.cancelled()

    def add(self, token_id: int, logprob: float, top: list[tuple[int, float]]) -> None:
        """Take one more token; answer if the response ends with it."""
        if self.is_left:
            self.is_done = True
            return
        text, end = self._text_of(token_id)
        reason, stop = end or (None, None)
        token = SampledToken(token_id, logprob, top, text, self._policy, reason, stop)
        self._tokens.append(token)
        if self._work.on_token is not None:
            self._work.on_token(token)
        if end is not None:
            self.is_done = True
            text = "".join(token.text for token in self._tokens)
            if self._work.future.set_running_or_notify_cancel():
                self._work.future.set_result(Completion(self._tokens, text))

    def fail(self, error: Exception) -> None:
        """End the response with an error."""
        if not self.is_done:
            self.is_done = True
            self._work.fail(error)

    def _text_of(self, token_id: int) -> tuple[str, _End | None]:
        """Return the text that a token makes certain, and the end if it ends the response."""
        if token_id in self._end_ids or token_id in self.request.stop_token_ids:
            found = self._stops.add(self._characters.end())
            own_end = None if token_id in self._end_ids else token_id
            end = _End("stop", own_end if found.stop is None else found.stop)
            return found.text + self._stops.end(), end
        found = self._stops.add(self._characters.add(token_id))
        if found.stop is not None:
            return found.text, _End("stop", found.stop)
        count, forced = len(self._tokens) + 1, self.request.forced_ids
        if count < self.request.max_tokens and (forced is None or count < len(forced)):
            return found.text, None
        last = self._stops.add(self._characters.end())
        text = found.text + last.text + self._stops.end()
        if last.stop is not None:
            return text, _End("stop", last.stop)
        return text, _End("stop" if forced is not None and count == len(forced) else "length")
