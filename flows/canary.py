"""What a run tries with its model server before its first iteration: log-probs, and one rollout.

The canary is a shard with one rollout, started where the others will be, so it shows whether the
agent can be imported and gives a reward *there*. Its set, `canary`, is no stage's: nothing reads it
again.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pyarrow.compute as pc

from agl_core.errors import ConfigError
from agl_core.failures import FailureSettings, RetriedFailure
from agl_core.ledger.requests import requests_table
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.preflight import Checks
from agl_core.prepared import PreparedRun
from agl_core.runner.shard import ShardRef
from agl_core.serving.attached import check_attached
from agl_core.trajectory.vocabulary import find_vocabulary_size
from agl_core.types.outcome import FailureKind
from agl_core.types.training import Proposal, RolloutRequest
from flows.shard_runs import run_shard
from tasks import context
from tasks.publish import serve

CANARY_SET = "canary"
_MAX_ROWS = 3
"""Agents fail now and then; one that fails on this many rows in a row is broken."""
_FINAL_KINDS = (FailureKind.TIMEOUT, FailureKind.CANCELLED)
"""Not tried on another row."""
_FAILURES = FailureSettings(timeout=RetriedFailure(attempts=1), min_success_fraction=0.0)
"""How often each row is tried; whether there were too many failures is judged here."""


async def check_live(run: PreparedRun, checks: Checks) -> None:
    """Check the model server that the run started, and run one rollout.

    Nothing is done for a run that began its first iteration before.

    Raises:
        ConfigError: The rollout failed, or its shard did; the message carries the agent's error.
        UpstreamError: The model server does not answer.
    """
    iteration = run.ledger.iteration(0)
    if run.ledger.committed() > 0 or iteration.record("propose") is not None:
        return
    services = context.current()
    if not run.config.serving.urls:
        with checks("model server has the policy's tokens and log-probs"):
            await asyncio.to_thread(check_attached, services.server.url, run.record.base)
    if run.config.preflight.canary:
        with checks("one rollout succeeds"):
            await _Canary(run).fly()


class _Canary:
    def __init__(self, run: PreparedRun) -> None:
        self._run = run
        self._rollouts = RolloutSet(run.ledger.iteration(0), CANARY_SET)

    async def fly(self) -> None:
        """Run rollouts on different rows, one after another, until one succeeds."""
        proposal = self._run.algorithm.propose(self._run.start_state)
        requests = tuple(_one_of_each_group(proposal.requests))[:_MAX_ROWS]
        self._open(proposal.model_copy(update={"requests": requests}))
        serve(proposal.policy)
        problem = ""
        for index in range(len(requests)):
            kind, problem = await self._try(index)
            if kind is FailureKind.SUCCEEDED:
                return
            if kind is None or kind in _FINAL_KINDS:
                break
        where = self._run.config.rollout.deployment or "this process"
        raise ConfigError(
            f"one rollout was tried in {where} before the first iteration, and failed: {problem} "
            "(preflight.canary: false skips it)"
        )

    def _open(self, proposal: Proposal) -> None:
        table = requests_table(
            proposal,
            self._run.inputs,
            run_id=self._run.ledger.run_id,
            iteration=0,
            rollout_set=CANARY_SET,
            seed=self._run.config.seed,
        )
        size = find_vocabulary_size(Path(self._run.algorithm.model_path).expanduser())
        self._rollouts.write_requests(table, proposal.policy, proposal.sampling_parameters, size)

    async def _try(self, index: int) -> tuple[FailureKind | None, str]:
        """Return how one rollout ended and its message; None where its shard left no outcome."""
        ledger, config = self._run.ledger, self._run.config
        assert ledger.lease is not None, "rollouts run only while this process holds the run"
        shard = ShardRef(
            ledger=config.ledger,
            s3=config.s3,
            conditional_put=ledger.storage.conditional_put,
            run_id=ledger.run_id,
            iteration=0,
            rollout_set=CANARY_SET,
            claim=self._rollouts.claim([index]).number,
            model_servers=context.current().server.advertised_urls,
            settings=config.rollout,
            failures=_FAILURES,
            start=ledger.lease.number,
            concurrency=1,
        )
        end = await run_shard(shard, 1, ledger.starts)
        outcomes = self._rollouts.outcomes()
        mine = pc.and_(outcomes["final"], pc.equal(outcomes["index"], index))
        found = outcomes.filter(mine).to_pylist()
        if not found:
            return None, end.reason or "its shard left no outcome"
        kind = FailureKind(found[-1]["kind"])
        return kind, f"{kind}: {found[-1]['message']}"


def _one_of_each_group(requests: Iterable[RolloutRequest]) -> Iterable[RolloutRequest]:
    seen: set[int] = set()
    for request in requests:
        if request.group not in seen:
            seen.add(request.group)
            yield request
