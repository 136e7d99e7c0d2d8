"""The rollouts of one set, run through a store by whoever works there, and kept in the ledger.

    claim --> enqueue --> wait (a long poll) --> spans, outcome --> another try, or final
                 ^                                                       |
                 +------- after the kind's delay <-----------------------+

Every few seconds what has ended is flushed, as a shard does, so a process that is killed loses at
most that; the next start runs what has no outcome. A try is a rollout of the store of its own,
because ends are final there. Its metadata says which rollout of the ledger it is.
"""

import asyncio
import json
import logging
import random
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import pyarrow as pa

from agl_core import progress
from agl_core.algorithm.stored_outcome import judge_stored
from agl_core.algorithm.waiting import Patience, cancel_rollouts
from agl_core.errors import IterationStopped, LedgerError
from agl_core.failures import FailureTally
from agl_core.ledger.rollout_set import Claim, RolloutSet
from agl_core.ledger.spans import spans_to_table
from agl_core.ledger.tables import OUTCOMES
from agl_core.llm_proxy.store_calls import SEED
from agl_core.prepared import PreparedRun
from agl_core.runner.outcome import JudgedAttempt, TriedRollout, outcome_row
from agl_core.store.base import LightningStore
from agl_core.types.core import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
)
from agl_core.types.outcome import AttemptOutcome
from agl_core.types.tracer import Span

if TYPE_CHECKING:  # only named; it loads a web server
    from agl_core.llm_proxy.proxy import LLMProxy

logger = logging.getLogger(__name__)

RUN_ID = "agl_run_id"
"""In the metadata of a store's rollout."""
_LIVING = ("queuing", "requeuing", "preparing", "running")


class StoreRollouts:
    """Runs some rollouts of a set.

    Args:
        run: Whose rollouts they are.
        rollouts: The set.
        store: Where runners take them.
        llm_proxy: Through which their agents call the model.
    """

    def __init__(
        self,
        run: PreparedRun,
        rollouts: RolloutSet,
        store: LightningStore,
        llm_proxy: "LLMProxy",
    ) -> None:
        table = rollouts.read_requests()
        self._requests = {row["index"]: row for row in table.to_pylist()}
        self._run = run
        self._rollouts = rollouts
        self._vocabulary_size = rollouts.read_resources().vocabulary_size
        self._store = store
        self._llm_proxy = llm_proxy
        self._tally = FailureTally(run.config.failures, rollouts.name, len(table))
        self._random = random.Random()
        self._pending: dict[str, tuple[int, int]] = {}
        """Place and attempt number of what is in the store, by the store's rollout id."""
        self._due: dict[int, tuple[float, int]] = {}
        """When which attempt is enqueued, by place."""
        self._attempts: defaultdict[int, list[JudgedAttempt]] = defaultdict(list)
        self._ready: list[int] = []
        self._num_chunks = 0

    async def run(self, claim: Claim, resources_id: str) -> None:
        """Run the rollouts of a claim to their ends.

        Raises:
            IterationStopped: More of them failed than the run permits; the others are cancelled.
            TransientError: No runner took one for too long, or the store is away.
            LedgerError: The last flush could not be written.
        """
        settings = self._run.config.rollout
        patience = Patience(
            self._store, settings.startup_timeout_seconds, f"rollouts of {self._rollouts.name}"
        )
        self._due = dict.fromkeys(claim.indices, (0.0, 1))
        try:
            while self._due or self._pending:
                if await self._enqueue(resources_id):
                    patience.renew()
                ended = await self._wait(settings.flush_seconds)
                if ended:
                    await self._llm_proxy.flush()
                    patience.renew()
                else:
                    await patience.check(self._pending)
                for rollout in ended:
                    await self._harvest(rollout)
                self._try_to_flush(claim.number)
                if reason := self._tally.stop_reason():
                    raise IterationStopped(reason)
        finally:
            await cancel_rollouts(self._store, self._pending)
            self._flush(claim.number)

    async def _enqueue(self, resources_id: str) -> bool:
        """Enqueue what is due; say whether anything was."""
        now = time.monotonic()
        due = [(index, n) for index, (when, n) in sorted(self._due.items()) if when <= now]
        if not due:
            return False
        requests = [self._request(index, number, resources_id) for index, number in due]
        queued = await self._store.enqueue_many_rollouts(requests)
        for (index, number), rollout in zip(due, queued, strict=True):
            del self._due[index]
            self._pending[rollout.rollout_id] = (index, number)
        return True

    def _request(self, index: int, attempt: int, resources_id: str) -> EnqueueRolloutRequest:
        request = self._requests[index]
        names = ("rollout_id", "dataset", "row", "group", "sample")
        return EnqueueRolloutRequest(
            input=json.loads(request["input"]),
            mode=request["mode"],
            resources_id=resources_id,
            config=RolloutConfig(timeout_seconds=self._run.config.rollout.timeout_seconds),
            metadata={
                RUN_ID: self._run.ledger.run_id,
                SEED: request["seed"],
                "attempt": attempt,
                **{name: request[name] for name in names},
            },
        )

    async def _wait(self, seconds: float) -> list[Rollout]:
        """Return what has ended, at the latest when something is due again."""
        if self._due:
            next_due = min(when for when, _ in self._due.values())
            seconds = min(seconds, max(0.0, next_due - time.monotonic()))
        if not self._pending:
            await asyncio.sleep(seconds)
            return []
        return await self._store.wait_for_rollouts(rollout_ids=list(self._pending), timeout=seconds)

    async def _harvest(self, rollout: Rollout) -> None:
        """Read what a try left, and decide whether another one follows."""
        index, number = self._pending.pop(rollout.rollout_id)
        attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
        spans: list[Span] = []
        if attempt is not None:
            spans += await self._store.query_spans(rollout.rollout_id, attempt.attempt_id)
        tried = self._tried(index, number, rollout)
        judged = judge_stored(
            tried, rollout, attempt, spans, self._run.config.failures, self._vocabulary_size
        )
        self._attempts[index].append(judged)
        outcome = judged.outcome
        delay = self._delay(outcome)
        if delay is not None:
            self._due[index] = (time.monotonic() + delay, number + 1)
            return
        group = self._requests[index]["group"]
        self._tally.add(outcome.rollout_id, group, outcome.kind, outcome.message)
        self._ready.append(index)
        progress.report(
            progress.RolloutsFinished(
                self._rollouts.name, self._tally.kinds.total(), len(self._requests)
            )
        )

    def _tried(self, index: int, number: int, rollout: Rollout) -> TriedRollout:
        attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
        attempt_id = attempt.attempt_id if attempt is not None else f"none-{rollout.rollout_id}"
        return TriedRollout(index, self._requests[index]["rollout_id"], attempt_id, number)

    def _delay(self, outcome: AttemptOutcome) -> float | None:
        policy = self._run.config.failures.policy(outcome.kind)
        draw = self._random.uniform(-1.0, 1.0)
        return policy.delay_after(outcome.attempt, outcome.message, draw=draw)

    def _try_to_flush(self, claim: int) -> None:
        """Flush; what could not be written is written with the next flush, as in a shard."""
        try:
            self._flush(claim)
        except LedgerError as error:
            logger.warning("%s could not flush, will try again: %s", self._rollouts.name, error)

    def _flush(self, claim: int) -> None:
        """Write a chunk with every rollout that has ended since the last one.

        Raises:
            LedgerError: It could not be written; its rollouts are written with the next one.
        """
        if not self._ready:
            return
        attempts = [(index, one) for index in self._ready for one in self._attempts[index]]
        last = {index: self._attempts[index][-1] for index in self._ready}
        outcomes = [outcome_row(one, final=one is last[index]) for index, one in attempts]
        self._num_chunks += 1
        self._rollouts.put_chunk(
            claim,
            self._num_chunks,
            spans_to_table((index, one.spans) for index, one in attempts),
            pa.Table.from_pylist(outcomes, schema=OUTCOMES),
        )
        for index in self._ready:
            del self._attempts[index]
        self._ready = []


async def cancel_leftovers(store: LightningStore, run_id: str) -> None:
    """End the rollouts of a run in the store that a process which was killed has left there."""
    living = await store.query_rollouts(status_in=_LIVING)
    left = [r.rollout_id for r in living if (r.metadata or {}).get(RUN_ID) == run_id]
    if left:
        logger.info("run=%s: %d rollouts of an earlier start are cancelled", run_id, len(left))
        await cancel_rollouts(store, left)
