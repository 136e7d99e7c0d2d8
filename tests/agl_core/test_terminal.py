import io

from rich.console import Console

from agl_core import terminal
from agl_core.ledger.manifest import Cost, Manifest, RewardSummary
from agl_core.progress import IterationCommitted, RolloutsFinished
from agl_core.terminal import RunDisplay, iterations_table
from agl_core.types.outcome import Coverage, RowCoverage
from tests.builders import POLICY


def make_manifest(**annotations: float) -> Manifest:
    return Manifest(
        run_id="run",
        iteration=0,
        identity={},
        policy_in=POLICY,
        policy_out=None,
        state={},
        coverage=Coverage(
            expected=2, trained=2, masked=0, filtered=0, failed=0, omitted=0, unknown=0, reasons={}
        ),
        rows=RowCoverage(built=2, trained=2, dropped={}),
        rewards=RewardSummary(
            expected=2,
            rewarded=2,
            mean_reward=0.5,
            pass_rate=0.5,
            annotations=annotations,
            failures={},
            policy_version="v000000",
        ),
        validation={},
        update={},
        cost=Cost(
            model_calls=2,
            prompt_tokens=4,
            completion_tokens=4,
            failed_attempts=0,
            failed_attempt_tokens=0,
            stage_seconds={},
        ),
        files=(),
        content_digest="",
        observed={},
    )


def test_names_that_agents_choose_are_shown_as_they_are():
    console = Console(file=io.StringIO(), width=200)
    manifest = make_manifest(**{"f1[macro]": 0.25, "score[/max]": 0.75})
    with RunDisplay(console, "run", 1) as display:
        display(IterationCommitted(manifest))
    console.print(iterations_table("run", [manifest]))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert shown.count("f1[macro]") == shown.count("score[/max]") == 2


def test_a_failure_is_one_line_cut_to_the_width_and_shown_once():
    console = Console(file=io.StringIO(), width=60)
    with RunDisplay(console, "run", 3) as display:
        for times, message in [(2, "[key] " + "x" * 90), (3, "[key] " + "x" * 90), (1, "other")]:
            failure = f"{times} of 4 failures: agent_error: {message}"
            display(IterationCommitted(make_manifest(), failure))
        display(IterationCommitted(make_manifest()))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    lines = [line for line in shown.splitlines() if "failures" in line]
    assert [line[:58] for line in lines] == [
        "iteration 0, 2 of 4 failures: agent_error: [key] xxxxxxxxx",
        "iteration 0, 1 of 4 failures: agent_error: other",
    ]
    assert [len(line) for line in lines] == [60, 48]


def test_the_table_is_built_for_iterations_and_not_for_rollouts(monkeypatch):
    built = []

    def count(run_id, manifests):
        built.append(len(manifests))
        return iterations_table(run_id, manifests)

    monkeypatch.setattr(terminal, "iterations_table", count)
    with RunDisplay(Console(file=io.StringIO()), "run", 2) as display:
        for done in range(100):
            display(RolloutsFinished("train", done, 100))
        display(IterationCommitted(make_manifest()))
    assert built == [1]
