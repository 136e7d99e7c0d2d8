"""Artifacts in the Prefect UI, drawn from the manifest; the ledger stays the record."""

import logging
from collections.abc import Mapping, Sequence

from prefect.artifacts import acreate_markdown_artifact
from prefect.utilities.urls import url_for

from agl_core.ledger.files import hashed
from agl_core.ledger.manifest import Manifest, RewardSummary
from agl_core.runner.failed import FailedRollout
from agl_core.runner.shard import Shard
from agl_core.stages.commit import read_manifest
from agl_core.types.outcome import CallCoverage, Coverage, FailureKind, TokenCoverage
from tasks.context import IterationRef
from tasks.policies import ledger_task

logger = logging.getLogger(__name__)

_MAX_CELL = 300
"""Characters of a message that are shown in a table; the record has all."""


@ledger_task(name="report", task_run_name="report")
async def report(ref: IterationRef) -> None:
    """Show an iteration's manifest as a page of the run."""
    await acreate_markdown_artifact(
        key=f"{ref.run_id}-iterations",
        markdown=iteration_report(read_manifest(ref.open()), ref.ledger, manifest_sha256(ref)),
        description=f"iteration {ref.iteration}",
    )


async def show_failed(shard: Shard) -> None:
    """Show a shard's failed rollouts as a page of its flow run, if there are any."""
    if not shard.failed:
        return
    try:
        await acreate_markdown_artifact(
            key=f"{shard.ref.run_id}-failed-rollouts",
            markdown=failed_report(shard.failed, shard.kinds()),
            description=shard.ref.name,
        )
    except Exception as error:  # noqa: BLE001 - a display; the ledger has the rollouts
        logger.warning("shard=%s could not show its failures: %s", shard.ref.name, error)


def failed_report(failed: Sequence[FailedRollout], kinds: Mapping[str, int]) -> str:
    """Return the rollouts that failed as markdown, each with a link to its task run.

    Args:
        failed: The first ones.
        kinds: All rollouts by how they ended.
    """
    counts = {kind: count for kind, count in kinds.items() if kind != FailureKind.SUCCEEDED.value}
    lines = [
        "# Failed rollouts",
        *(f"- {kind}: {count}" for kind, count in sorted(counts.items())),
        "",
        f"The first {len(failed)} of {sum(counts.values())}, each linked to the page of its task "
        "run, with its log lines.",
        "",
        "| rollout | kind | attempts | message | last span |",
        "|---|---|---|---|---|",
        *(_failed_row(rollout) for rollout in failed),
    ]
    return "\n".join(lines)


def _failed_row(rollout: FailedRollout) -> str:
    url = url_for("task-run", obj_id=rollout.task_run) if rollout.task_run else None
    name = f"[{rollout.rollout_id}]({url})" if url else rollout.rollout_id
    return (
        f"| {name} | {rollout.kind} | {rollout.attempts} | "
        f"{_cell(rollout.message)} | {_cell(rollout.last_span)} |"
    )


def _cell(text: str) -> str:
    """Return a text as code of a table's cell: an agent decides what it says."""
    line = " ".join(text.replace("`", "'").replace("|", "\\|").split())
    if not line:
        return ""
    return f"`{line[:_MAX_CELL]}...`" if len(line) > _MAX_CELL else f"`{line}`"


def manifest_sha256(ref: IterationRef) -> str:
    """Return the sha256 of an iteration's manifest."""
    iteration = ref.open()
    return hashed(iteration.storage, iteration.manifest_key).sha256


def iteration_report(manifest: Manifest, ledger: str, sha256: str = "") -> str:
    """Return an iteration's summary as markdown.

    Args:
        manifest: Of the iteration.
        ledger: Where it lies.
        sha256: Of the manifest's file.
    """
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
        *_failures(manifest.rewards),
        "## Coverage",
        "Every expected rollout is in exactly one column.",
        "",
        "| expected | trained | masked | filtered | failed | omitted | unknown |",
        "|---|---|---|---|---|---|---|",
        _coverage_row(manifest.coverage),
        "",
        *(f"- {reason}: {count}" for reason, count in sorted(manifest.coverage.reasons.items())),
        *_by_policy(manifest.coverage),
        f"- batch rows: {manifest.rows.built} built, {manifest.rows.trained} trained, "
        f"{manifest.rows.masked} masked"
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
        *([f"- sha256 of the manifest: `{sha256}`"] if sha256 else []),
        f"- content digest: `{manifest.content_digest}`",
        *(f"- changed since the run began: {difference}" for difference in manifest.changed),
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


def _failures(rewards: RewardSummary) -> list[str]:
    """Return how training rollouts and their attempts failed, if any did."""
    kinds = {*rewards.failures, *rewards.attempts} - {FailureKind.SUCCEEDED.value}
    if not kinds:
        return []
    return [
        "## Failures",
        "Rollouts by their last attempt; an attempt that a later one made good is an attempt only.",
        "",
        "| kind | rollouts | attempts |",
        "|---|---|---|",
        *(
            f"| {kind} | {rewards.failures.get(kind, 0)} | {rewards.attempts.get(kind, 0)} |"
            for kind in sorted(kinds)
        ),
        "",
    ]


def _by_policy(coverage: Coverage) -> list[str]:
    if not coverage.rewards_by_policy:
        return []
    count = coverage.rewards_by_policy
    return [f"- {count} of these gave no reward and have 0 by failures.no_reward"]


def _coverage_row(coverage: Coverage) -> str:
    counts = coverage.model_dump(exclude={"reasons", "rewards_by_policy"}).values()
    return f"| {' | '.join(map(str, counts))} |"


def _sampled_line(what: str, found: CallCoverage | TokenCoverage) -> str:
    dropped = "".join(f", {count} {reason}" for reason, count in found.dropped.items())
    kept = f"{found.trained} trained, {found.masked} masked"
    return f"- {what}: {found.sampled} sampled, {kept}{dropped}"


def _token_lines(manifest: Manifest) -> list[str]:
    """Say what became of the sampled calls and tokens, and how often trajectories broke off."""
    lines = [_sampled_line("model calls", manifest.calls)] if manifest.calls else []
    if manifest.tokens is None:
        return lines
    breaks = ", ".join(f"{count} {kind}" for kind, count in manifest.breaks.items() if count)
    return [*lines, f"{_sampled_line('tokens', manifest.tokens)}; breaks: {breaks or 'none'}"]


def _reward_row(label: str, summary: RewardSummary) -> str:
    notes = ", ".join(f"{name} {value:.2f}" for name, value in summary.annotations.items())
    return (
        f"| {label} | {summary.policy_version} | {number(summary.mean_reward)} | "
        f"{number(summary.pass_rate)} | {summary.rewarded} of {summary.expected} | {notes} |"
    )


def number(value: float | None) -> str:
    """Return a number for a table; `none` where there is none."""
    return "none" if value is None else f"{value:.3f}"
