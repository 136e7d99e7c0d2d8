"""What a run that is done leaves to look at: its curves in the ledger, its table in the UI."""

from prefect.artifacts import acreate_markdown_artifact

from agl_core.ledger import files
from agl_core.ledger.chain import seal
from agl_core.ledger.manifest import Manifest
from agl_core.ledger.run import RunLedger
from agl_core.plot import reward_plot
from tasks.policies import ledger_task
from tasks.report import number


@ledger_task(name="plot", task_run_name="plot")
async def plot(ledger: RunLedger) -> str:
    """Write the reward plot of a run that is done, seal the run, and return the plot's key; what is
    there stays.

    The same numbers are shown as a page of the run.
    """
    manifests = ledger.manifests()
    if not ledger.storage.exists(ledger.plot_key):
        picture = reward_plot(manifests, title=f"run {ledger.run_id}")
        files.put_bytes(ledger.storage, ledger.plot_key, picture)
    seal(ledger)
    await acreate_markdown_artifact(
        key=f"{ledger.run_id}-run",
        markdown=run_report(ledger, manifests),
        description=f"{len(manifests)} iterations",
    )
    return ledger.plot_key


def run_report(ledger: RunLedger, manifests: list[Manifest]) -> str:
    """Return a run's iterations as a markdown table."""
    lines = [
        f"# {ledger.run_id}",
        f"Ledger: `{ledger.storage.uri}/{ledger.prefix}`",
        f"Reward plot: `{ledger.storage.uri}/{ledger.plot_key}`",
        "",
        "| iteration | policy | mean reward | validation | trained | not trained | digest |",
        "|---|---|---|---|---|---|---|",
    ]
    for manifest in manifests:
        scores = [number(summary.mean_reward) for _, summary in sorted(manifest.validation.items())]
        reasons = [f"{count} {why}" for why, count in sorted(manifest.coverage.reasons.items())]
        cells = [
            str(manifest.iteration),
            manifest.policy_in.version,
            number(manifest.rewards.mean_reward),
            " -> ".join(scores),
            f"{manifest.coverage.trained} of {manifest.coverage.expected}",
            ", ".join(reasons),
            f"`{manifest.content_digest[:19]}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
