"""One fault, injected into one run at one stage, and what must be true afterwards."""

import random
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_API_URL, temporary_settings

from agl_core.config import RunConfig
from tests.chaos.agents import Plan
from tests.chaos.checker import check_run
from tests.chaos.model_server import ALWAYS, DeterministicEngine, seeded_fault
from tests.chaos.process import STAGES, Victim, run_here
from tests.chaos.runs import chaos_config, chosen, digests, outcomes, triplets, without
from tests.chaos.s3 import IllBucket, download
from tests.chaos.servers import MortalPool, MortalServer

_SECONDS = {"rollout": 0.6, "update": 0.8, "evaluate": 0.4}
"""Within which a kill comes after its stage began; elsewhere 0.05 s."""
_SHARES = (0.1, 0.3, 0.6)
"""Of a bucket's requests; each is sent again for 30 s."""
ROLLOUT_STAGES = ("rollout", "evaluate")


@dataclass(frozen=True, slots=True)
class Case:
    """One fault of a kind at a stage; the seed decides everything else."""

    kind: str
    stage: str
    seed: int

    @property
    def run_id(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", self.kind.lower()).strip("-")
        return f"{words}-{self.stage}-{self.seed}"

    @property
    def rng(self) -> random.Random:
        return random.Random(f"{self.kind}/{self.stage}/{self.seed}")


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case."""

    case: Case
    hits: int
    """How often the fault was there; 0: it came too late, or nobody met it."""
    ended: str
    """The reason with which the run stopped; empty where it went on to its end."""
    problems: list[str]
    """What must not be; empty where the case is passed."""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class World:
    """Everything that runs may be given, started where it is first needed."""

    folder: Path
    engine: DeterministicEngine
    plan: Path
    """File that `AGL_CHAOS_PLAN` names."""
    bucket: Callable[[], IllBucket]
    server: Callable[[], MortalServer]
    pool: Callable[[], MortalPool]
    reference: dict[int, tuple[list[str], list[Any]]]
    """Digests and triplets of the undisturbed run, by the number of its iterations."""
    iterations: int = 2
    """Of each run."""

    def config(self, case: Case, **overrides: Any) -> RunConfig:
        ledger = overrides.pop("ledger", str(self.folder / "ledger"))
        overrides["iterations"] = self.iterations
        return chaos_config(self.engine.url, ledger, case.run_id, **overrides)

    def expected(self) -> tuple[list[str], list[Any]]:
        """Return digests and triplets of the undisturbed run."""
        iterations = self.iterations
        if iterations not in self.reference:
            ledger, run_id = self.folder / "ledger", f"undisturbed-{iterations}"
            # A busy machine must not fail rollouts here; the deadline is not part of a digest.
            config = chaos_config(
                self.engine.url,
                str(ledger),
                run_id,
                iterations=iterations,
                rollout={"timeout_seconds": 60.0},
            )
            if error := run_here(config):
                raise error
            for number in range(iterations):
                ends = {row["kind"] for row in outcomes(ledger, run_id, number)}
                assert ends == {"succeeded"}, f"the undisturbed run has attempts that ended {ends}"
            rows = [triplets(ledger, run_id, number) for number in range(iterations)]
            self.reference[iterations] = digests(ledger, run_id), rows
        return self.reference[iterations]


@dataclass(slots=True)
class Disturbed:
    """How a disturbed run ended."""

    config: RunConfig
    hits: int
    error: str
    """Why it stopped; empty where it did not."""
    reason: str = ""
    """Pattern of the reasons with which it may stop."""
    failing: Plan | None = None
    """Rollouts that must fail for ever."""
    may_fail: bool = False
    """Some rollouts fail for ever; which ones is not known beforehand."""


Injector = Callable[[World, Case], Disturbed]


def play(world: World, case: Case, inject: Injector | None = None) -> Result:
    """Run the case, resume it where it stopped, and say what is wrong with what it left."""
    expected_digests, expected_triplets = world.expected()
    started = time.monotonic()
    end = (inject or KINDS[case.kind])(world, case)
    problems: list[str] = []
    if end.error:
        if not re.search(end.reason or "$^", end.error):
            problems.append(f"stopped for another reason: {end.error}")
        local = end.config.rollout.model_copy(update={"deployment": None})
        if error := run_here(end.config.model_copy(update={"rollout": local})):
            problems.append(f"the resumed run stopped: {type(error).__name__}: {error}")
    ledger = Path(end.config.ledger)
    if end.config.ledger.startswith("s3://"):
        ledger = download(end.config.ledger, world.folder / "downloads" / case.run_id)
    problems += map(str, check_run(ledger, case.run_id))
    if end.failing or end.may_fail:
        problems += _check_failures(ledger, case, end, expected_triplets)
    elif (found := digests(ledger, case.run_id)) != expected_digests:
        problems.append(f"content digests {found}, undisturbed {expected_digests}")
    return Result(case, end.hits, end.error, problems, time.monotonic() - started)


_ENDS = {
    "raises": "agent_error",
    "hangs": "timeout",
    "hangs_in_c": "timeout",
    "sys_exit": "agent_error",
    "nan": "agent_error",
    "no_reward": "no_reward",
    "no_call": "no_trace",
}
"""Failure kind of each illness of an agent."""


def _check_failures(ledger: Path, case: Case, end: Disturbed, expected: list[Any]) -> Iterator[str]:
    """The ill rollouts failed, with the right kind; the others gave what they always give.

    Rollouts that are not trained on make other weights, so other log-probs of the same replies in
    the iterations that follow.
    """
    names = ["index", "call_index", "prompt_ids", "response_ids", "reward", "logprobs"]
    for iteration in range(len(expected)):
        rows = outcomes(ledger, case.run_id, iteration)
        failed = {
            row["index"]: row["kind"] for row in rows if row["final"] and row["reward"] is None
        }
        if end.failing is not None:
            ill = chosen(ledger, case.run_id, iteration, end.failing)
            must = {index: _ENDS[kind] for index, kind in ill.items()}
            if failed != must:
                yield f"iteration {iteration}: failed {failed}, must be {must}"
        left, right = (
            [{name: row[name] for name in names} for row in without(rows, set(failed))]
            for rows in (triplets(ledger, case.run_id, iteration), expected[iteration])
        )
        if failed and "logprobs" in names:
            names.remove("logprobs")
        if left != right:
            yield f"iteration {iteration}: other rollouts than the failed ones are changed"


def _at(world: World, case: Case, rng: random.Random) -> tuple[int, str]:
    """Return iteration and stage of the fault."""
    return rng.randrange(world.iterations), case.stage


def _text(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def kill_run(world: World, case: Case) -> Disturbed:
    """SIGKILL of the training run, a seeded moment after a stage began."""
    rng = case.rng
    config = world.config(case)
    victim = Victim(config, world.folder / "victim.log")
    at = _at(world, case, rng)
    reached = victim.until(*at)
    time.sleep(rng.random() * _SECONDS.get(case.stage, 0.05))
    status = victim.kill()
    hits = int(reached and status == -9)
    return Disturbed(config, hits, f"exit status {status}" if status else "", "exit status -9")


def agent_exits(world: World, case: Case) -> Disturbed:
    """`os._exit` in an agent takes its whole process along, each time that the run is started."""
    config = world.config(case)
    Plan(("os_exit",), case.seed, share=0.12, times=1, mode=_mode(case)).write(world.plan)
    hits = 0
    try:
        for _ in range(12):
            victim = Victim(config, world.folder / "victim.log")
            victim.until(-1, "")
            status = victim.ended()
            if status != 3:
                return Disturbed(config, hits, f"exit status {status}" if status else "")
            hits += 1
    finally:
        world.plan.unlink()
    return Disturbed(config, hits, "exit status 3 for the 12th time")


def _mode(case: Case) -> str:
    return "train" if case.stage == "rollout" else "val"


def ill_agent(*kinds: str, agent: str = "", times: int | None = None) -> Injector:
    """Agents that end in another way, on their first attempt or on each."""

    def inject(world: World, case: Case) -> Disturbed:
        rng = case.rng
        functions = (agent,) if agent else ("solve", "solve_async")
        name = f"tests.chaos.agents:{rng.choice(functions)}"
        count = times or rng.choice((1, ALWAYS))
        # Whoever holds the interpreter lock stops all others: one at a time.
        share = 0.12 if "holds_gil" in kinds else 0.25
        plan = Plan(kinds, case.seed, share, count, _mode(case))
        config = world.config(case, agent=name)
        plan.write(world.plan)
        try:
            error = run_here(config)
        finally:
            world.plan.unlink()
        hits = len(list(world.plan.parent.glob(f"{world.plan.name}.ro-*")))
        for marker in world.plan.parent.glob(f"{world.plan.name}.ro-*"):
            marker.unlink()
        fails = count == ALWAYS and case.stage == "rollout"
        return Disturbed(config, hits, _text(error), failing=plan if fails else None)

    return inject


def ill_model(*kinds: str, times: int | None = None) -> Injector:
    """A model server that answers some calls badly during one stage."""

    def inject(world: World, case: Case) -> Disturbed:
        rng = case.rng
        at = _at(world, case, rng)
        count = times or rng.choice((1, 2, ALWAYS))
        engine, hits = world.engine, [0]
        fault = seeded_fault(kinds, case.seed, 0.15 if count == ALWAYS else 0.4, count)

        def counted(seed: int, arrival: int) -> str | None:
            found = fault(seed, arrivals.setdefault(seed, 0) + 1)
            arrivals[seed] += 1
            hits[0] += found is not None
            return found

        arrivals: dict[int, int] = {}

        def on_stage(iteration: int, stage: str) -> None:
            engine.fault = counted if (iteration, stage) == at else _well

        config = world.config(case)
        try:
            error = run_here(config, on_stage)
        finally:
            engine.fault = _well
        return Disturbed(config, hits[0], _text(error), may_fail=count == ALWAYS)

    return inject


def _well(seed: int, arrival: int) -> str | None:
    return None


def ill_storage(*kinds: str, share: float | None = None) -> Injector:
    """A bucket that fails for a share of the requests of one stage."""

    def inject(world: World, case: Case) -> Disturbed:
        rng = case.rng
        at = _at(world, case, rng)
        bucket = world.bucket()
        bucket.seed, bucket.share, bucket.hits = case.seed, share or rng.choice(_SHARES), 0

        def on_stage(iteration: int, stage: str) -> None:
            bucket.kinds = kinds if (iteration, stage) == at else ()

        config = world.config(case, ledger=bucket.new_bucket())
        try:
            error = run_here(config, on_stage)
        finally:
            bucket.kinds = ()
        return Disturbed(config, bucket.hits, _text(error), r"ledger s3://|ledger cannot|flush")

    return inject


@contextmanager
def _later(action: Callable[[], Any]) -> Generator[Callable[[float], None]]:
    """Give a function that has the action done in a thread after some seconds; waits for it."""
    threads: list[threading.Thread] = []

    def schedule(seconds: float) -> None:
        def act() -> None:
            time.sleep(seconds)
            action()

        threads.append(threading.Thread(target=act))
        threads[-1].start()

    try:
        yield schedule
    finally:
        for thread in threads:
            thread.join()


def kill_server(world: World, case: Case) -> Disturbed:
    """SIGKILL of the Prefect server, which is back after a second or more."""
    rng = case.rng
    at, server, hits = _at(world, case, rng), world.server(), [0]

    def kill_and_restart() -> None:
        server.kill()
        hits[0] += 1
        time.sleep(rng.random() * 3)
        server.start()

    config = world.config(case)
    with temporary_settings({PREFECT_API_URL: server.url}), _later(kill_and_restart) as later:

        def on_stage(iteration: int, stage: str) -> None:
            if (iteration, stage) == at:
                later(rng.random() * _SECONDS.get(case.stage, 0.05))

        error = run_here(config, on_stage)
    return Disturbed(config, hits[0], _text(error), r"(?i)connect|prefect|timeout|50[0-9]|read")


def kill_on_pool(what: str) -> Injector:
    """SIGKILL of a shard's process or of the worker, with the shards on a process pool."""

    def inject(world: World, case: Case) -> Disturbed:
        rng = case.rng
        at, pool, hits = _at(world, case, rng), world.pool(), [0]
        world.engine.delay_seconds = 0.2

        def strike() -> None:
            if what == "shard":
                hits[0] += pool.kill_shard()
            else:
                hits[0] += pool.kill_worker()
                time.sleep(2.0)
                pool.start_worker()

        settings = {
            "deployment": "rollout-shard/rollout-shard",
            "startup_timeout_seconds": 45.0,
            "concurrency": 4,
        }
        config = world.config(case, rollout=settings)
        try:
            with _later(strike) as later:

                def on_stage(iteration: int, stage: str) -> None:
                    if (iteration, stage) == at:
                        later(rng.random() * 8 if case.stage in ROLLOUT_STAGES else 0)

                error = run_here(config, on_stage)
        finally:
            world.engine.delay_seconds = 0.0
        return Disturbed(config, hits[0], _text(error), r"has not ended|no outcome after")

    return inject


KINDS: dict[str, Injector] = {
    "kill training run": kill_run,
    "kill shard": kill_on_pool("shard"),
    "kill worker": kill_on_pool("worker"),
    "kill server": kill_server,
    "S3 500": ill_storage("500"),
    "S3 503": ill_storage("503"),
    "S3 slow": ill_storage("slow"),
    "S3 half bodies": ill_storage("half"),
    "model 429": ill_model("429"),
    "model 500": ill_model("500"),
    "model garbage": ill_model("garbage"),
    "model half bodies": ill_model("half"),
    "model nothing": ill_model("nothing"),
    "agent raises": ill_agent("raises"),
    "agent hangs, async": ill_agent("hangs", agent="solve_async"),
    "agent hangs, sync": ill_agent("hangs", agent="solve"),
    "agent hangs in C": ill_agent("hangs_in_c", agent="solve"),
    "agent holds the lock": ill_agent("holds_gil", times=1),
    "agent sys.exit": ill_agent("sys_exit"),
    "agent os._exit": agent_exits,
    "agent NaN": ill_agent("nan"),
    "agent no reward": ill_agent("no_reward"),
    "agent no call": ill_agent("no_call"),
}


REASONS: tuple[str, ...] = (
    "no agent runs",
    "no rollout asks the model server",
    "no shard runs",
)
"""Why a fault cannot come at a stage."""


def impossible(kind: str, stage: str) -> str | None:
    """Return why a fault cannot come at a stage, or None."""
    if stage in ROLLOUT_STAGES:
        return None
    if kind.startswith("agent"):
        return REASONS[0]
    if kind.startswith("model"):
        return REASONS[1]
    return REASONS[2] if kind == "kill shard" else None


def all_cases(seed: int, count: int) -> list[Case]:
    """Return that many cases, each possible cell in turn."""
    cells = [(kind, stage) for kind in KINDS for stage in STAGES if not impossible(kind, stage)]
    return [
        Case(*cells[number % len(cells)], seed * 1000 + number // len(cells))
        for number in range(count)
    ]


def reseeded(case: Case) -> Case:
    """Return the same fault at another moment."""
    return replace(case, seed=case.seed + 100)
