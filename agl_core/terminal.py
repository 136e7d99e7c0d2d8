"""A run in the terminal: a progress bar while it works, one table row for each committed
iteration.
"""

from collections.abc import Sequence
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agl_core.ledger.manifest import Manifest, RewardSummary
from agl_core.progress import Event, IterationCommitted, RolloutsFinished, StageStarted

_MIN_WIDTH = 40


class RunDisplay:
    """Shows the events of a run (a `progress.Listener`).

    On a terminal the table stays in view and grows; elsewhere each iteration is printed as one
    line.
    """

    def __init__(self, console: Console, run_id: str, iterations: int | None = None) -> None:
        self.console = console
        self.manifests: list[Manifest] = []
        self._run_id = run_id
        self._shown: set[str] = set()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._run = self._progress.add_task(f"run {run_id}, iterations", total=iterations)
        self._stage = self._progress.add_task("starting", total=None)
        self._live = Live(self._progress, console=console, refresh_per_second=4, transient=True)

    def __call__(self, event: Event, /) -> None:
        """Show one event."""
        match event:
            case StageStarted():
                text = f"iteration {event.iteration}: {event.stage}"
                self._progress.reset(self._stage, description=text, total=None)
            case RolloutsFinished():
                self._progress.update(self._stage, completed=event.done, total=event.expected)
            case IterationCommitted():
                self.manifests.append(event.manifest)
                self._progress.update(self._run, completed=len(self.manifests))
                if not self.console.is_terminal:
                    line = escape(plain_line(event.manifest))
                    self.console.print(line, highlight=False, soft_wrap=True)
                self._show_failure(event)
                table = iterations_table(self._run_id, self.manifests)
                self._live.update(Group(table, self._progress))

    def _show_failure(self, event: IterationCommitted) -> None:
        """Show how most failed rollouts of an iteration ended, unless one before had the same."""
        _, _, message = event.failure.partition(": ")
        if not message or message in self._shown:
            return
        self._shown.add(message)
        text = Text(f"iteration {event.manifest.iteration}, {event.failure}")
        text.truncate(max(self.console.width, _MIN_WIDTH), overflow="ellipsis")
        self.console.print(text, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if not self.console.is_terminal:
            self.console.print(f"run {self._run_id} is starting", highlight=False)
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()


def iterations_table(run_id: str, manifests: Sequence[Manifest]) -> Table:
    """Return one row for each iteration: rewards, what agents noted, update metrics, times."""
    notes = sorted({name for m in manifests for name in m.rewards.annotations})
    table = Table(
        title=f"run {run_id}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
    table.add_column("#", justify="right")
    for name in (
        "policy",
        "reward",
        "pass",
        *(escape(_short(name)) for name in notes),
        "validation",
        "trained",
    ):
        table.add_column(name, justify="right")
    for name in ("KL", "grad", "roll s", "upd s", "all s"):
        table.add_column(name, justify="right")
    for manifest in manifests:
        table.add_row(*_cells(manifest, notes))
    return table


def _cells(manifest: Manifest, notes: Sequence[str]) -> list[str]:
    rewards, seconds = manifest.rewards, manifest.cost.stage_seconds
    return [
        str(manifest.iteration),
        manifest.policy_in.version.replace("v0000", "v"),
        _number(rewards.mean_reward),
        _number(rewards.pass_rate),
        *(_number(rewards.annotations.get(name)) for name in notes),
        _validation_cell(manifest),
        f"{manifest.coverage.trained}/{manifest.coverage.expected}",
        _number(manifest.update.get("actor/ppo_kl"), "{:.4f}"),
        _number(manifest.update.get("actor/grad_norm")),
        f"{seconds.get('rollout', 0.0):.1f}",
        f"{seconds.get('update', 0.0):.1f}",
        f"{sum(seconds.values()):.1f}",
    ]


def _validation_cell(manifest: Manifest) -> str:
    """Return the score of the version that the iteration made; at first also that of the base."""
    means = [_number(summary.mean_reward) for _, summary in sorted(manifest.validation.items())]
    return ">".join(means)


def plain_line(manifest: Manifest) -> str:
    """Return an iteration as one line of text."""
    scored = ", ".join(_scored(summary) for _, summary in sorted(manifest.validation.items()))
    return (
        f"iteration {manifest.iteration}: reward {_number(manifest.rewards.mean_reward)}"
        f" ({_notes(manifest.rewards)}), validation {scored or 'none'}, "
        f"trained {manifest.coverage.trained}/{manifest.coverage.expected}{_reasons(manifest)}, "
        f"KL {_number(manifest.update.get('actor/ppo_kl'), '{:.4f}')}, "
        f"grad norm {_number(manifest.update.get('actor/grad_norm'))}, "
        f"{sum(manifest.cost.stage_seconds.values()):.1f} s"
    )


def _reasons(manifest: Manifest) -> str:
    """Return why rollouts were not trained, by count; empty where all were."""
    reasons = manifest.coverage.reasons
    text = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return f" ({text})" if text else ""


def _scored(summary: RewardSummary) -> str:
    return f"{summary.policy_version} {_number(summary.mean_reward)} ({_notes(summary)})"


def _notes(summary: RewardSummary) -> str:
    parts = [f"{_short(name)} {value:.2f}" for name, value in summary.annotations.items()]
    return ", ".join([f"pass {_number(summary.pass_rate)}", *parts])


def _short(name: str) -> str:
    """Return the last part of an annotation's name as words: `calculator.tool_used` is `tool
    used`.
    """
    return name.rsplit(".", 1)[-1].replace("_", " ")


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "none" if value is None else form.format(value)
