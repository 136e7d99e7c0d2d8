"""The embedded model engine: one queue and one thread in front of a small model.

Requests wait in one queue; what waits when a batch ends forms the next one. New weights pass
through the same queue: requests that came before them are answered by the old ones, later ones by
the new ones. `agl_core.serving.decoding` samples a batch, `agl_core.serving.engine_server` is the
HTTP side, and `python -m agl_core.serving.engine_main` starts all of it (`engine_main`).
"""

import logging
import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from agl_core.errors import ConfigError, TransientError, UpstreamError
from agl_core.serving.decoding import LoadedPolicy, Work, generate, load_policy
from agl_core.serving.generation import Completion, GenerationRequest, ServedPolicy

logger = logging.getLogger(__name__)


class _Swap(NamedTuple):
    policy: LoadedPolicy
    future: Future[ServedPolicy]


def not_served(asked: str, served: str) -> UpstreamError:
    """Return the error for a request that names another version."""
    return UpstreamError(f"model {asked} is not served; serving {served}")


class Engine:
    """Samples for many callers, from one policy at a time.

    Args:
        folder: Hugging Face folder of the first policy.
        version: Its name.
        max_batch_size: Most responses sampled at once.
        gather_seconds: How long the first request of a batch waits for company, at most.

    Raises:
        ConfigError: The folder cannot be loaded.
    """

    def __init__(
        self,
        folder: Path,
        version: str,
        max_batch_size: int = 64,
        gather_seconds: float = 0.005,
    ) -> None:
        self.num_batches = 0
        """Batches started so far."""
        self._max_batch_size = max_batch_size
        self._gather_seconds = gather_seconds
        self._policy = load_policy(version, folder)
        self._waiting: deque[Work | _Swap] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._load_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def policy(self) -> ServedPolicy:
        """The policy that answers now."""
        return self._policy.served

    @property
    def loaded(self) -> LoadedPolicy:
        """The same with its model and tokenizer."""
        return self._policy

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue a request; from any thread.

        Returns:
            Its completion, or one of these errors: UpstreamError (another version is served when
            its turn comes), ConfigError (prompt and `max_tokens` exceed the model's positions),
            TransientError (the engine closed).
        """
        future: Future[Completion] = Future()
        self._enqueue(Work(request, future))
        return future

    def load(self, version: str, folder: Path) -> ServedPolicy:
        """Replace the policy once the requests that wait already are answered; return the new one.

        The folder is read in the caller's thread while generation goes on, so two policies are in
        memory meanwhile.

        Raises:
            ConfigError: The folder cannot be loaded; the old policy is still served.
            TransientError: The engine is closed.
        """
        with self._load_lock:
            swap = _Swap(load_policy(version, folder), Future())
            self._enqueue(swap)
            return swap.future.result()

    def close(self) -> None:
        """Finish the batch in flight, refuse what waits, end the worker thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        while self._waiting:
            future = self._waiting.popleft().future
            if future.set_running_or_notify_cancel():
                future.set_exception(TransientError("the engine is closed"))

    def _enqueue(self, item: Work | _Swap) -> None:
        """Let the worker know of one more item, unless it has ended."""
        with self._changed:
            if not self._is_closed:
                self._waiting.append(item)
                self._changed.notify()
                return
        item.future.set_exception(TransientError("the engine is closed"))

    def _run(self) -> None:
        """Answer until closed: the body of the worker thread."""
        while (item := self._next()) is not None:
            if isinstance(item, _Swap):
                self._policy = item.policy
                item.future.set_result(item.policy.served)
                continue
            self._answer(item)

    def _next(self) -> list[Work] | _Swap | None:
        """Wait for the next batch or swap, in order of arrival; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            first = self._waiting.popleft()
            if isinstance(first, _Swap):
                return first
            batch = [first]
            self._changed.wait_for(
                lambda: len(self._waiting) + 1 >= self._max_batch_size or self._is_closed,
                timeout=self._gather_seconds,
            )
            while self._waiting and len(batch) < self._max_batch_size:
                item = self._waiting.popleft()
                if isinstance(item, _Swap):
                    self._waiting.appendleft(item)
                    break
                batch.append(item)
            return batch

    def _answer(self, batch: list[Work]) -> None:
        """Resolve every future of a batch."""
        accepted: list[Work] = []
        for work in batch:
            # From here on the caller cannot cancel, so that results can be set without a race.
            if not work.future.set_running_or_notify_cancel():
                continue
            error = self._refusal(work.request)
            if error is None:
                accepted.append(work)
            else:
                work.future.set_exception(error)
        if not accepted:
            return
        self.num_batches += 1
        try:
            generate(self._policy, accepted)
        except Exception as error:
            # The callers get it; the worker must outlive one batch.
            logger.exception("a batch of %d requests failed", len(accepted))
            for work in accepted:
                if not work.future.done():
                    work.future.set_exception(error)

    def _refusal(self, request: GenerationRequest) -> Exception | None:
        """Return why the policy that is served now cannot answer, or None."""
        served = self._policy.served
        if request.version != served.version:
            return not_served(request.version, served.version)
        needed = len(request.prompt_ids) + request.max_tokens
        if needed > served.max_positions:
            return ConfigError(
                f"prompt of {len(request.prompt_ids)} tokens and max_tokens {request.max_tokens} "
                f"exceed the model's {served.max_positions} positions"
            )
        return None
