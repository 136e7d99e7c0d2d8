"""A run's curves as a picture, from its manifests."""

import io
from collections.abc import Sequence

from agl_core.ledger.manifest import Manifest, RewardSummary


def validation_by_version(manifests: Sequence[Manifest]) -> dict[str, RewardSummary]:
    """Return the validation summary of each policy version that was scored, oldest first."""
    found: dict[str, RewardSummary] = {}
    for manifest in manifests:
        found |= manifest.validation
    return dict(sorted(found.items()))


def reward_plot(manifests: Sequence[Manifest], title: str) -> bytes:
    """Return a PNG: mean reward of training and validation rollouts, and what agents noted, by
    iteration.

    Args:
        manifests: Of one run, in order.
        title: Headline.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    trained = [_or_gap(manifest.rewards.mean_reward) for manifest in manifests]
    axes.plot([m.iteration for m in manifests], trained, marker="o", label="training reward")
    scored = validation_by_version(manifests)
    if scored:
        versions = [int(version.removeprefix("v")) for version in scored]
        means = [_or_gap(summary.mean_reward) for summary in scored.values()]
        axes.plot(versions, means, marker="s", label="validation reward")
        for name in sorted({name for summary in scored.values() for name in summary.annotations}):
            noted = [_or_gap(summary.annotations.get(name)) for summary in scored.values()]
            axes.plot(versions, noted, linestyle="--", label=f"{name} (validation)")
    axes.set(title=title, xlabel="updates made before sampling", ylabel="mean", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _or_gap(value: float | None) -> float:
    """Return NaN, which leaves a gap in the curve, where there is no value."""
    return float("nan") if value is None else value
