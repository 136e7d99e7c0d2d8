"""The embedded model engine: one queue and one thread in front of a small model.

Requests wait in one queue and join the batch that is being sampled between two of its steps, while
there is room. New weights pass through the same queue: requests that came before them are answered
by the old ones, later ones wait until those are done and are answered by the new ones.
`agl_core.serving.decoding` samples a batch, `agl_core.serving.engine_server` is the HTTP side, and
`python -m agl_core.serving.engine_main` starts all of it (`engine_main`).
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeVar

from agl_core.errors import ConfigError, TransientError, UpstreamError
from agl_core.serving.decoding import Batch, LoadedPolicy, load_policy
from agl_core.serving.generation import Completion, GenerationRequest, OnToken, ServedPolicy
from agl_core.serving.row import Work

T = TypeVar("T")

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
        gather_seconds: How long the first request of an idle engine waits for company, at most.
        device: Where the policies are, as torch names it.

    Raises:
        ConfigError: The folder cannot be loaded.
    """

    def __init__(
        self,
        folder: Path,
        version: str,
        max_batch_size: int = 64,
        gather_seconds: float = 0.005,
        device: str = "cpu",
    ) -> None:
        self.num_batches = 0
        """Groups of requests that were taken up together so far."""
        self._device = device
        self._max_batch_size = max_batch_size
        self._gather_seconds = gather_seconds
        self._policy = load_policy(version, folder, device)
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

    def submit(
        self, request: GenerationRequest, on_token: OnToken | None = None
    ) -> Future[Completion]:
        """Queue a request; from any thread.

        Args:
            request: What to sample.
            on_token: Gets each token as it comes; an error that it raises ends the batch.

        Returns:
            Its completion, or one of these errors: UpstreamError (another version is served when
            its turn comes), ConfigError (prompt and `max_tokens` exceed the model's positions),
            TransientError (the engine closed). Cancel it to stop the work.
        """
        return self.submit_together([request], [on_token])[0]

    def submit_together(
        self, requests: Sequence[GenerationRequest], on_token: Sequence[OnToken | None]
    ) -> list[Future[Completion]]:
        """Queue requests that the same weights answer; see `submit`."""
        works = [
            Work(request, Future(), sink) for request, sink in zip(requests, on_token, strict=True)
        ]
        self._enqueue(works)
        return [work.future for work in works]

    def load(self, version: str, folder: Path, digest: str | None = None) -> ServedPolicy:
        """Replace the policy once the requests that wait already are answered; return the new one.

        The folder is read in the caller's thread while generation goes on, so two policies are in
        memory meanwhile.

        Raises:
            ConfigError: The folder cannot be loaded, or holds other weights than those of the
                digest, if one is given; the old policy is still served.
            TransientError: The engine is closed.
        """
        with self._load_lock:
            policy = load_policy(version, folder, self._device)
            if digest not in (None, policy.served.weights_digest):
                raise ConfigError(f"{folder}: its weights are not {digest}")
            swap = _Swap(policy, Future())
            self._enqueue([swap])
            return swap.future.result()

    def close(self) -> None:
        """Finish the batch in flight, refuse what waits, end the worker thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        while self._waiting:
            _refuse(self._waiting.popleft(), TransientError("the engine is closed"))

    def _enqueue(self, items: Sequence[Work | _Swap]) -> None:
        """Let the worker know of more, unless it has ended."""
        with self._changed:
            if not self._is_closed:
                self._waiting.extend(items)
                self._changed.notify()
                return
        for item in items:
            _refuse(item, TransientError("the engine is closed"))

    def _run(self) -> None:
        """Answer until closed: the body of the worker thread."""
        batch: Batch | None = None
        while (found := self._next(batch)) is not None:
            if isinstance(found, _Swap):
                self._policy = found.policy
                found.future.set_result(found.policy.served)
                continue
            if batch:
                self._guard(batch.step, batch.fail)
            works = self._accept(found)
            if works and (new := self._begin(works)):
                batch = self._join(batch, new) if batch else new

    def _next(self, batch: Batch | None) -> list[Work] | _Swap | None:
        """Return who joins the batch now; wait for them, or for a swap, where it is empty.

        None once closed and empty.
        """
        num_running = len(batch) if batch else 0
        with self._changed:
            if not num_running:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return None
                first = self._waiting[0]
                if isinstance(first, _Swap):
                    self._waiting.popleft()
                    return first
                self._changed.wait_for(
                    lambda: len(self._waiting) >= self._max_batch_size or self._is_closed,
                    timeout=self._gather_seconds,
                )
            elif self._is_closed or not (batch and batch.can_join):
                return []
            works: list[Work] = []
            while self._waiting and num_running + len(works) < self._max_batch_size:
                item = self._waiting[0]
                if isinstance(item, _Swap):
                    break
                self._waiting.popleft()
                works.append(item)
            return works

    def _accept(self, works: list[Work]) -> list[Work]:
        """Return the requests that can be answered; the others get their errors."""
        accepted: list[Work] = []
        for work in works:
            error = self._refusal(work.request)
            if error is not None:
                work.fail(error)
            elif not work.future.cancelled():
                accepted.append(work)
        return accepted

    def _begin(self, works: list[Work]) -> Batch | None:
        """Return a batch of new requests, unless all ended with their first tokens."""
        self.num_batches += 1

        def fail(error: Exception) -> None:
            for work in works:
                if not work.future.done():
                    work.fail(error)

        return self._guard(lambda: Batch(self._policy, works), fail) or None

    def _join(self, batch: Batch, new: Batch) -> Batch:
        """Return a running batch with the rows of a new one."""

        def fail(error: Exception) -> None:
            batch.fail(error)
            new.fail(error)

        self._guard(lambda: batch.join(new), fail)
        return batch

    def _guard(self, action: Callable[[], T], fail: Callable[[Exception], None]) -> T | None:
        """Return what an action returns; its failure is its requests', not the worker's."""
        try:
            return action()
        except Exception as error:
            logger.exception("a batch failed")
            fail(error)
            return None

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
        largest = max(request.prompt_ids + list(request.forced_ids or ()))
        if largest >= served.num_tokens:
            return ConfigError(f"token id {largest} is none of the model's {served.num_tokens}")
        return None


def _refuse(item: Work | _Swap, error: Exception) -> None:
    """Hand an error to whoever waits, unless they left."""
    if item.future.set_running_or_notify_cancel():
        item.future.set_exception(error)
