"""Artifacts in the Prefect UI, drawn from the manifest; the ledger stays the record."""

from prefect.artifacts import acreate_markdown_artifact

from agl_core.ledger.manifest import Manifest, RewardSummary
from agl_core.types.outcome import Coverage
from tasks.commit import read_manifest
from tasks.context import IterationRef
from tasks.policies import ledger_task


@ledger_task(name="report", task_run_name="report")
async def report(ref: IterationRef) -> None:
    """Show an iteration's manifest as a page of the run."""
    await acreate_markdown_artifact(
        key=f"{ref.run_id}-iterations",
        markdown=iteration_report(read_manifest(ref), ref.ledger),
        description=f"iteration {ref.iteration}",
    )


def iteration_report(manifest: Manifest, ledger: str) -> str:
    """Return an iteration's summary as markdown."""
    version_out = manifest.policy_out.version if manifest.policy_out else "none"
    folder = f"{ledger}/runs/{manifest.run_id}/iterations/{manifest.iteration:06d}"
    lines = [
        f"# {manifest.run_id}, iteration {manifest.iteration}",
        f"Policy `{manifest.policy_in.version}` -> `{version_out}`",
        "",
        "## Rewards",
        "| rollouts | policy | mean reward | pass rate | with reward | noted by the agent |",
        "|---|---|---|---|---|---|",
        _reward_row("training", manifest.rewards),
        *(_reward_row("validation", summary) for summary in manifest.validation.values()),
        "",
        "## Coverage",
        "Every expected rollout is in exactly one column.",
        "",
        "| expected | trained | masked | filtered | failed | omitted | unknown |",
        "|---|---|---|---|---|---|---|",
        _coverage_row(manifest.coverage),
        "",
        *(f"- {reason}: {count}" for reason, count in sorted(manifest.coverage.reasons.items())),
        f"- batch rows: {manifest.rows.built} built, {manifest.rows.trained} trained"
        + "".join(f", {count} {reason}" for reason, count in manifest.rows.dropped.items()),
        *_token_lines(manifest),
        "",
        "## Update",
        "| metric | mean over steps |",
        "|---|---|",
        *(f"| {name} | {value:.6g} |" for name, value in manifest.update.items()),
        "",
        "## Record",
        f"- manifest: `{folder}/manifest.json`",
        f"- content digest: `{manifest.content_digest}`",
        f"- {len(manifest.files)} files, "
        f"{sum(file.size_bytes for file in manifest.files) / 1e6:.1f} MB",
        f"- {manifest.cost.model_calls} model calls, {manifest.cost.prompt_tokens} prompt and "
        f"{manifest.cost.completion_tokens} completion tokens; "
        f"{manifest.cost.failed_attempts} failed attempts",
        "",
        "| stage | seconds |",
        "|---|---|",
        *(f"| {name} | {seconds:.1f} |" for name, seconds in manifest.cost.stage_seconds.items()),
    ]
    return "\n".join(lines)


def _coverage_row(coverage: Coverage) -> str:
    counts = coverage.model_dump(exclude={"reasons"}).values()
    return f"| {' | '.join(map(str, counts))} |"


def _token_lines(manifest: Manifest) -> list[str]:
    """Say what became of the sampled tokens, and how often trajectories broke off."""
    if manifest.tokens is None:
        return []
    tokens = manifest.tokens
    dropped = "".join(f", {count} {reason}" for reason, count in tokens.dropped.items())
    breaks = ", ".join(f"{count} {kind}" for kind, count in manifest.breaks.items() if count)
    return [
        f"- tokens: {tokens.sampled} sampled, {tokens.trained} trained, {tokens.masked} masked"
        f"{dropped}; breaks: {breaks or 'none'}"
    ]


def _reward_row(label: str, summary: RewardSummary) -> str:
    notes = ", ".join(f"{name} {value:.2f}" for name, value in summary.annotations.items())
    return (
        f"| {label} | {summary.policy_version} | {number(summary.mean_reward)} | "
        f"{number(summary.pass_rate)} | {summary.rewarded} of {summary.expected} | {notes} |"
    )


def number(value: float | None) -> str:
    """Return a number for a table; `none` where there is none."""
    return "none" if value is None else f"{value:.3f}"
