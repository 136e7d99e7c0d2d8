"""What agl_core costs beside Agent Lightning 0.3, which has an environment of its own.

Import: fresh interpreters, both in turn. Rollouts: `Trainer.fit` with runner processes ("cs") and
an agent that does nothing; the same script, store in memory, tracer and polling for both.

python -m venv PEER && PEER/bin/pip install agentlightning==0.3.0 (pins: tests/peer/README.md)
python -m benchmarks.peer --peer PEER/bin/python
"""

import argparse
import asyncio
import importlib
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

OURS, PEER = "agl_core", "agentlightning"
ROUNDS = 5
POLL_SECONDS = 0.05
SAMPLE_SECONDS = 0.5
ROOT = Path(__file__).parent.parent

_IMPORT = """
import json, sys, time
started = time.perf_counter()
package = __import__(sys.argv[1])
imported = time.perf_counter() - started
package.Trainer, package.OtelTracer, package.LitAgentRunner, package.rollout
used = time.perf_counter() - started
print(json.dumps([imported, used, len(sys.modules)]))
"""
"""Names may be loaded when they are first used."""


@dataclass(frozen=True)
class Measured:
    """What one package needed; None where it did not finish."""

    import_s: float | None = None
    used_s: float | None = None
    modules: int | None = None
    start_s: float | None = None
    fit_s: float | None = None
    cpu_s: float | None = None
    peak_mib: float | None = None
    note: str = ""


def python_env(package: str) -> dict[str, str]:
    """Return the environment of a package's interpreter; the peer asks no network for prices."""
    path = str(ROOT) if package == OURS else ""
    return os.environ | {"PYTHONPATH": path, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def import_once(python: str, package: str) -> list[float]:
    """Return the seconds of an import in a fresh interpreter, those until a trainer's names are
    there, and the modules loaded then.
    """
    done = subprocess.run(
        [python, "-c", _IMPORT, package],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=python_env(package),
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def tree_mib(pid: int) -> float:
    """Return the memory of a process and its descendants, pages that they share counted once."""
    import psutil  # the peer's environment need not have it

    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has just ended
    return total / 2**20


def fit_elsewhere(python: str, package: str, rollouts: int, args: argparse.Namespace) -> Measured:
    """Run the rollouts in an interpreter of their own, killed with its children at the deadline."""
    command = [python, str(Path(__file__)), "--run", package]
    command += ["--rollouts", str(rollouts), "--runners", str(args.runners)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=output, stderr=log, env=python_env(package), start_new_session=True
        )
        until, peak = time.monotonic() + args.deadline, 0.0
        while process.poll() is None and time.monotonic() < until:
            peak = max(peak, tree_mib(process.pid))
            time.sleep(SAMPLE_SECONDS)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Measured(peak_mib=peak, note=f"did not finish in {args.deadline:g} s")
        output.seek(0)
        log.seek(0)
        if process.returncode:
            return Measured(peak_mib=peak, note=f"failed: {log.read()[-500:]}")
        wall, cpu, succeeded, spans = json.loads(output.read().strip().splitlines()[-1])
    note = f"{succeeded} of {rollouts} succeeded, {spans} spans stored"
    return Measured(fit_s=wall, cpu_s=cpu, peak_mib=peak, note=note)


def run_rollouts(package: str, rollouts: int, runners: int) -> None:
    """Run no-op rollouts in this process and print what that took."""
    agl: Any = importlib.import_module(package)
    ended: list[Any] = []
    num_spans = 0

    @agl.rollout
    def nothing(task: Any, llm: Any) -> float:
        return 1.0

    class Enqueues(agl.Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            nonlocal num_spans
            store = self.get_store()
            await store.add_resources(self.get_initial_resources())
            requests = [agl.EnqueueRolloutRequest(input=row) for row in train_dataset]
            ids = [one.rollout_id for one in await store.enqueue_many_rollouts(requests)]
            while len(ended) < len(ids):
                await asyncio.sleep(POLL_SECONDS)
                ended[:] = await store.wait_for_rollouts(rollout_ids=ids, timeout=0)
            num_spans = (await store.statistics())["total_spans"]

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    tracer = agl.OtelTracer()
    trainer = agl.Trainer(
        tracer=tracer,
        runner=agl.LitAgentRunner(tracer, poll_interval=POLL_SECONDS, interval_jitter=0.0),
        algorithm=Enqueues(),
        initial_resources={"main_llm": agl.LLM(endpoint="http://127.0.0.1:9/v1", model="none")},
        strategy="cs",
        n_runners=runners,
        port=port,
    )
    cpu, started = cpu_seconds(), time.perf_counter()
    trainer.fit(nothing, train_dataset=list(range(rollouts)))
    wall = time.perf_counter() - started
    succeeded = sum(one.status == "succeeded" for one in ended)
    print("\n" + json.dumps([wall, cpu_seconds() - cpu, succeeded, num_spans]))


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(pythons: dict[str, str], args: argparse.Namespace) -> dict[str, Measured]:
    """Return what each package needed; both in turn, so that a noisy moment meets them all."""
    imports: dict[str, list[list[float]]] = {package: [] for package in pythons}
    for _ in range(ROUNDS):
        for package, python in pythons.items():
            imports[package].append(import_once(python, package))
    found = {}
    for package, python in pythons.items():
        imported, used, modules = map(statistics.median, zip(*imports[package], strict=True))
        found[package] = replace(
            fit_elsewhere(python, package, args.rollouts, args),
            start_s=fit_elsewhere(python, package, args.runners, args).fit_s,
            import_s=imported,
            used_s=used,
            modules=int(modules),
        )
    return found


def show(found: dict[str, Measured], args: argparse.Namespace) -> None:
    """Print each measurement of both and their ratio."""
    print(f"{'':40} {OURS:>14} {PEER:>14} {'peer / ours':>12}")
    rows = (
        ("import, s", "import_s"),
        ("import and use of a trainer's names, s", "used_s"),
        ("modules loaded then", "modules"),
        (f"{args.runners} rollouts, {args.runners} runners: fit, s", "start_s"),
        (f"{args.rollouts} rollouts, {args.runners} runners: fit, s", "fit_s"),
        ("  CPU of its process tree, s", "cpu_s"),
        ("  peak memory of its tree, MiB", "peak_mib"),
    )
    for title, name in rows:
        ours, peer = (getattr(found[package], name) for package in (OURS, PEER))
        shown = ["-" if value is None else f"{value:.2f}" for value in (ours, peer)]
        ratio = "-" if None in (ours, peer) else f"{peer / ours:.1f}"
        print(f"{title:40} {shown[0]:>14} {shown[1]:>14} {ratio:>12}")
    for package, one in found.items():
        print(f"{package}: {one.note}")


def main() -> None:
    """Measure both packages and print the table."""
    summary, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer",
        default=os.environ.get("AGL_PEER_PYTHON"),
        help="interpreter of the peer's environment (default: AGL_PEER_PYTHON)",
    )
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds, of each fit")
    parser.add_argument("--run", choices=(OURS, PEER), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run_rollouts(args.run, args.rollouts, args.runners)
        return
    if not args.peer:
        parser.error("give --peer, the interpreter of an environment with agentlightning==0.3.0")
    show(measure({OURS: sys.executable, PEER: args.peer}, args), args)


if __name__ == "__main__":
    main()
