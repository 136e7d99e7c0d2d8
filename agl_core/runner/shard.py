"""The rollouts that one runner executes, apart from who schedules them: agent, proxy, tracer,
flushes.

    open_shard(ref) -> Shard
        turn(index)                   holds one of the slots, but not between two tries
        run_attempt(index, attempt)   one try; its outcome and spans stay in memory
        finish(index)                 the last try decides; ready to be flushed, and counted
        flushing()                    writes what is ready every few seconds or rollouts, and all at
        the end

A kill therefore costs at most the rollouts of one flush window.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from agl_core import env_var, progress
from agl_core.config import RolloutSettings, S3Settings
from agl_core.errors import IterationStopped, LedgerError, TransientError
from agl_core.failures import FailureSettings, FailureTally
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.run import open_run
from agl_core.ledger.s3_access import S3Access, S3Credentials
from agl_core.ledger.spans import spans_to_table
from agl_core.ledger.tables import OUTCOMES
from agl_core.litagent.decorator import load_agent
from agl_core.litagent.litagent import LitAgent
from agl_core.llm_proxy.backends import Backend
from agl_core.llm_proxy.config import ProxyConfig
from agl_core.llm_proxy.server import ProxyServer
from agl_core.runner.agent_pool import AgentPool
from agl_core.runner.execution import LeakCounter
from agl_core.runner.failed import MAX_SHOWN, FailedRollout, describe_failed
from agl_core.runner.outcome import JudgedAttempt, judge_attempt, make_attempt_id, outcome_row
from agl_core.runner.rollout import AttemptCancelled, AttemptResult, run_attempt
from agl_core.sources import local_sources
from agl_core.tracer.otel import OtelTracer
from agl_core.types.core import Attempt, AttemptedRollout
from agl_core.types.outcome import AttemptOutcome, FailureKind
from agl_core.types.resources import NamedResources, ProxyLLM

logger = logging.getLogger(__name__)

FlushListener = Callable[[int, int], Awaitable[None]]
"""Called after each flush with the rollouts flushed so far and those expected."""


class ShardRef(BaseModel):
    """Names the rollouts of one shard attempt, and where their model is served."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ledger: str
    s3: S3Settings = S3Settings()
    conditional_put: bool
    """Of the ledger's store, as the run's preflight found it."""
    run_id: str
    iteration: int
    rollout_set: str
    claim: int
    model_servers: tuple[str, ...]
    """Base URLs without `/v1`; calls go to the least loaded one."""
    settings: RolloutSettings
    """As the run was started this time."""
    start: int
    """Number of the start of the run that the shard belongs to; it stops when that is over."""
    concurrency: int
    """Rollouts that run at once: the shard's share of what the model server bears."""
    failures: FailureSettings = FailureSettings()
    """The same."""

    @property
    def name(self) -> str:
        """Name for logs and the UI."""
        return f"{self.run_id}-{self.key}"

    @property
    def key(self) -> str:
        """Name within the run."""
        return f"{self.iteration:06d}-{self.rollout_set}-{self.claim:04d}"


class Shard:
    """The rollouts of one claim, while they run in this process."""

    def __init__(
        self,
        ref: ShardRef,
        rollouts: RolloutSet,
        requests: list[dict[str, Any]],
        agent: LitAgent[Any],
        agent_name: str = "",
        expected: int | None = None,
    ) -> None:
        self.ref = ref
        self.agent_name = agent_name
        """`package.module:name` of the agent."""
        self.settings = ref.settings
        self.failed: list[FailedRollout] = []
        """The first rollouts that failed, for display; see `tally` for all."""
        self.tally = FailureTally(ref.failures, ref.rollout_set, expected or len(requests))
        """Of this shard's rollouts, against the limits of the whole set."""
        self._slots = asyncio.Semaphore(ref.concurrency)
        self._holding: set[int] = set()
        self._random = random.Random()
        self._rollouts = rollouts
        self._requests = {request["index"]: request for request in requests}
        self._seeds = {request["rollout_id"]: request["seed"] for request in requests}
        self._agent = agent
        self._tracer = OtelTracer()
        self._leaks = LeakCounter()
        self._pool: AgentPool | None = None
        self._llm: ProxyLLM | None = None
        self._vocabulary_size: int | None = None
        self._attempts: dict[int, list[JudgedAttempt]] = {}
        self._finished: set[int] = set()
        self._ready: list[int] = []
        self._num_chunks = 0
        self._num_flushed = 0
        self._wake = asyncio.Event()

    @property
    def indices(self) -> list[int]:
        """The rollouts of the shard, by their place among the requests."""
        return list(self._requests)

    def rollout_id(self, index: int) -> str:
        """Return the id of a rollout."""
        return self._requests[index]["rollout_id"]

    def kinds(self) -> dict[str, int]:
        """Return how the finished rollouts ended."""
        return {kind.value: count for kind, count in self.tally.kinds.items()}

    def has_outcome(self, index: int) -> bool:
        """Say whether at least one attempt at the rollout has ended."""
        return bool(self._attempts.get(index))

    @asynccontextmanager
    async def turn(self, index: int) -> AsyncGenerator[None]:
        """Hold one of the shard's slots while the block runs, except between two attempts."""
        await self._take_slot(index)
        try:
            yield
        finally:
            self._give_slot(index)

    async def _take_slot(self, index: int) -> None:
        if index not in self._holding:
            await self._slots.acquire()
            self._holding.add(index)

    def _give_slot(self, index: int) -> None:
        if index in self._holding:
            self._holding.remove(index)
            self._slots.release()

    async def run_attempt(self, index: int, attempt: int) -> AttemptOutcome:
        """Run one attempt; its spans and outcome are kept until the rollout is flushed.

        Waits for a slot where the rollout holds none.

        Raises:
            TransientError: Too many agents run on after their deadline; the shard has to be
            replaced.
        """
        if self._leaks.threads > self.settings.max_leaked_threads:
            raise TransientError(
                f"shard {self.ref.name}: {self._leaks.threads} agents still run past their "
                f"deadline of {self.settings.timeout_seconds:g} s; threads cannot be killed"
            )
        await self._take_slot(index)
        resources: NamedResources = {} if self._llm is None else {"main_llm": self._llm}
        try:
            result = await run_attempt(
                self._agent,
                self._attempted_rollout(index, attempt),
                resources=resources,
                tracer=self._tracer,
                timeout_seconds=self.settings.timeout_seconds,
                leaks=self._leaks,
                pool=self._pool,
            )
        except AttemptCancelled as error:
            self._keep(index, error.result)
            raise
        return self._keep(index, result)

    def _keep(self, index: int, result: AttemptResult) -> AttemptOutcome:
        judged = judge_attempt(result, index, self.ref.failures, self._vocabulary_size)
        if judged.outcome.traceback:
            logger.info("attempt=%s %s", judged.outcome.attempt_id, judged.outcome.traceback)
        self._attempts.setdefault(index, []).append(judged)
        return judged.outcome

    def retry_seconds(self, outcome: AttemptOutcome) -> float | None:
        """Return how long a rollout waits for its next attempt, and free its slot meanwhile; None
        where this one was its last.
        """
        delay = self.ref.failures.policy(outcome.kind).delay_after(
            outcome.attempt, outcome.message, draw=self._random.uniform(-1.0, 1.0)
        )
        if delay is not None:
            self._give_slot(outcome.index)
        return delay

    def _attempted_rollout(self, index: int, attempt: int) -> AttemptedRollout:
        request, now = self._requests[index], time.time()
        rollout_id = request["rollout_id"]
        return AttemptedRollout(
            rollout_id=rollout_id,
            input=json.loads(request["input"]),
            start_time=now,
            mode=request["mode"],
            status="running",
            metadata={name: request[name] for name in ("dataset", "row", "group", "sample")},
            attempt=Attempt(
                rollout_id=rollout_id,
                attempt_id=make_attempt_id(rollout_id, attempt, self.ref.claim),
                sequence_id=attempt,
                start_time=now,
                status="running",
            ),
        )

    def finish(self, index: int, task_run: str = "") -> None:
        """Let the last attempt decide the rollout; it is written with the next flush.

        Args:
            index: Of the rollout.
            task_run: Id of the task run that made its attempts, for display.

        Raises:
            IterationStopped: The shard's failures alone are more than the run's limits permit.
        """
        last = self._attempts[index][-1]
        outcome = last.outcome
        group = self._requests[index]["group"]
        self.tally.add(outcome.rollout_id, group, outcome.kind, outcome.message)
        if outcome.kind is not FailureKind.SUCCEEDED and len(self.failed) < MAX_SHOWN:
            self.failed.append(describe_failed(outcome, last.spans, task_run))
        self._finished.add(index)
        self._ready.append(index)
        progress.report(
            progress.RolloutsFinished(
                self.ref.rollout_set, self.tally.kinds.total(), len(self._requests)
            )
        )
        if len(self._ready) >= self.settings.flush_rollouts:
            self._wake.set()
        if reason := self.tally.stop_reason():
            raise IterationStopped(reason)

    @asynccontextmanager
    async def flushing(self, on_flush: FlushListener) -> AsyncGenerator[None]:
        """Flush what is ready while the block runs, and the rest at its end, even if it fails.

        Raises:
            LedgerError: The last flush could not be written.
        """
        stopping = asyncio.Event()
        flusher = asyncio.create_task(self._flush_regularly(on_flush, stopping))
        try:
            yield
        finally:
            stopping.set()
            self._wake.set()
            await flusher  # a flush that is under way ends first
            # Where the shard was stopped: attempts of rollouts that did not finish, for the record.
            self._ready += sorted(self._attempts.keys() - set(self._ready))
            await self._flush(on_flush)
            if self._leaks.threads or self._leaks.tasks:
                logger.warning(
                    "shard=%s: %d agents run on after their attempts were given up; they end with "
                    "this process",
                    self.ref.name,
                    self._leaks.threads + self._leaks.tasks,
                )

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Run the recording proxy, and processes for agents, while the block runs."""
        resources = self._rollouts.read_resources()
        self._vocabulary_size = resources.vocabulary_size
        key = env_var.engine_key()
        config = ProxyConfig(
            backends=tuple(Backend(f"{url}/v1", key) for url in self.ref.model_servers),
            policy=resources.policy,
            sampling_parameters=resources.sampling_parameters,
            rollout_seeds=self._seeds,
            deadline_seconds=self.settings.timeout_seconds,
        )
        async with AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(ProxyServer(config, self._tracer))
            self._llm = proxy.as_resource(resources.policy.version, resources.sampling_parameters)
            if self.settings.isolation == "process":
                self._pool = await stack.enter_async_context(AgentPool.open(self.agent_name))
            yield

    async def _flush_regularly(self, on_flush: FlushListener, stopping: asyncio.Event) -> None:
        """Flush every window until told to stop; what could not be written stays for the next."""
        while not stopping.is_set():
            with suppress(TimeoutError):  # the usual case: the window has passed
                async with asyncio.timeout(self.settings.flush_seconds):
                    await self._wake.wait()
            try:
                await self._flush(on_flush)
            except LedgerError as error:
                logger.warning("shard=%s could not flush, will try again: %s", self.ref.name, error)

    async def _flush(self, on_flush: FlushListener) -> None:
        """Write one chunk with every rollout that has ended since the last one.

        Raises:
            LedgerError: It could not be written; its rollouts are ready again.
        """
        self._wake.clear()
        indices, self._ready = self._ready, []
        if not indices:
            return
        self._num_chunks += 1
        results = {index: self._attempts.pop(index) for index in indices}
        try:
            await asyncio.to_thread(self._write_chunk, self._num_chunks, results)
        except BaseException:
            self._ready = indices + self._ready
            self._attempts |= results
            raise
        self._num_flushed += len(indices)
        logger.info(
            "shard=%s flushed %d of %d rollouts: %s",
            self.ref.name,
            self._num_flushed,
            len(self._requests),
            ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds().items())),
        )
        try:
            await on_flush(self._num_flushed, len(self._requests))
        except Exception as error:  # noqa: BLE001 - a display; the ledger has the rollouts
            logger.warning("shard=%s could not show its progress: %s", self.ref.name, error)

    def _write_chunk(self, number: int, results: dict[int, list[JudgedAttempt]]) -> None:
        spans = spans_to_table(
            (index, attempt.spans) for index, attempts in results.items() for attempt in attempts
        )
        outcomes = [
            outcome_row(attempt, final=index in self._finished and attempt is attempts[-1])
            for index, attempts in results.items()
            for attempt in attempts
        ]
        self._rollouts.put_chunk(
            self.ref.claim,
            number,
            spans,
            pa.Table.from_pylist(outcomes, schema=OUTCOMES),
        )


_current: ContextVar[Shard | None] = ContextVar("agl_current_shard", default=None)


def current_shard() -> Shard:
    """Return the shard that this code runs in.

    Raises:
        LedgerError: It runs in none.
    """
    shard = _current.get()
    if shard is None:
        raise LedgerError("no shard is open here; rollouts run inside the flow rollout-shard")
    return shard


@asynccontextmanager
async def open_shard(
    ref: ShardRef, credentials: S3Credentials | None = None
) -> AsyncGenerator[Shard]:
    """Load the agent, start the proxy, and make the shard current.

    Args:
        ref: Names the shard.
        credentials: Those that `ref.s3` names.

    Raises:
        ConfigError: The agent cannot be imported here, or is not the one that the run records.
        LedgerError: The run, the claim or the requests cannot be read.
    """
    access = S3Access(ref.s3, credentials)
    ledger = open_run(ref.ledger, ref.run_id, access, conditional_put=ref.conditional_put)
    record = ledger.record()
    name = record.config.agent
    agent = load_agent(name)
    if ref.settings.deployment is not None or ref.settings.isolation == "process":
        # Read now, by this process or by those of the agents; else the run did, and compared it.
        paths = local_sources(name.partition(":")[0])
        ledger.check_sources(record, {place: path.read_bytes() for place, path in paths.items()})
    rollouts = RolloutSet(ledger.iteration(ref.iteration), ref.rollout_set)
    claimed = set(rollouts.read_claim(ref.claim).indices)
    table = rollouts.read_requests()
    requests = [row for row in table.to_pylist() if row["index"] in claimed]
    shard = Shard(ref, rollouts, requests, agent, name, expected=len(table))
    token = _current.set(shard)
    try:
        async with shard.serving():
            yield shard
    finally:
        _current.reset(token)
