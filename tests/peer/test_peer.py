"""Scripts written against Agent Lightning 0.3 give the same results with agl_core.

What is expected was said by the peer itself, but for the facts of `DIFFERENCES`. The tests marked
`peer` run it again; they need its environment (README.md).
"""

import os
import sys
from typing import Any

import pytest

from tests.peer.run_scripts import names
from tests.peer.sides import (
    OURS,
    PEER,
    PEER_PYTHON,
    Difference,
    at,
    expected,
    record,
    replace,
    results,
)

pytestmark = pytest.mark.slow
needs_peer = pytest.mark.skipif(PEER_PYTHON not in os.environ, reason=f"{PEER_PYTHON} is not set")

_REWARD_SEEN = "a hook sees all spans of the attempt, the one of the returned reward too"
_ON_FAILURE = "a trace that was started also ends where the agent raises"
_CREDIT = "the last reward is the final one, as find_final_reward says: on the last call"
_TOKENS = "a call without token ids could only become a row of length zero"

DIFFERENCES = [
    Difference("dev/triplet_exporter/2", [False], [True], "a deprecated name says so"),
    Difference(
        "emitters/operation at import",
        "RuntimeError tracer",
        "returned function",
        "a decorated function of a module needs no tracer before it is called",
    ),
    Difference(
        "emitters/stored/statuses/agentlightning.exception",
        ["OK"],
        ["ERROR"],
        "a span of an exception is an error",
    ),
    *(
        Difference(
            f"emitters/stored/statuses/agentlightning.{name}",
            ["OK"],
            ["UNSET"],
            "what did not fail is left unset, as messages and operations are in both",
        )
        for name in ("annotation", "object")
    ),
    Difference("hooks/one/spans at its end", [2], [3], _REWARD_SEEN),
    Difference("hooks/two/spans at its end", [4, 4], [5, 5], _REWARD_SEEN),
    Difference("hooks/raising/spans at its end", [2], [3], _REWARD_SEEN),
    Difference(
        "hooks/failed/calls",
        ["a: rollout start", "a: trace start", "agent", "a: rollout end"],
        ["a: rollout start", "a: trace start", "agent", "a: trace end", "a: rollout end"],
        _ON_FAILURE,
    ),
    Difference("hooks/failed/spans at its end", [0], [2], _ON_FAILURE),
    Difference(
        "hooks/failed/spans",
        ["agentlightning.annotation"],
        ["agentlightning.annotation"] * 2,
        _ON_FAILURE,
    ),
    Difference(
        "returns/has a root", False, True, "each attempt has a root span, its spans' parent"
    ),
    Difference(
        "returns/no spans/raised",
        "ValueError",
        "TypeError",
        "a list of other things than spans is of a wrong type, as a text is in both",
    ),
    Difference(
        "rewards/reward at the top",
        False,
        True,
        "the decorator is found by its name; the peer has a module in its place",
    ),
    Difference(
        "step/worker before",
        "returned str",
        "ValueError",
        "a runner that is in no worker has no id, as it has no agent and no store",
    ),
    Difference(
        "triplets/a call without ids",
        [[[1, 1], [1], None], [[], [], None]],
        [[[1, 1], [1], None]],
        _TOKENS,
    ),
    Difference(
        "triplets/keys/2",
        ["agent_name", "request", "response", "response_id"],
        ["agent_name", "request", "response", "response_id", "span_id"],
        "a triplet names its span",
    ),
    Difference(
        "triplets/no spans", "ValueError", "returned list", "no spans are no triplets, not an error"
    ),
    Difference(
        "triplets/two rewards after one call", [[[1, 1], [1], 0.25]], [[[1, 1], [1], 0.75]], _CREDIT
    ),
    Difference(
        "triplets/two rewards at the end",
        [[[1, 1], [1], 1.0], [[2, 2], [2], 0.125]],
        [[[1, 1], [1], None], [[2, 2], [2], 1.0]],
        _CREDIT,
    ),
    Difference(
        "utilities/as large, shuffled",
        True,
        False,
        "a batch of the whole dataset is in its order; nothing depends on another",
    ),
    Difference(
        "utilities/200 passes have each row 200 times",
        False,
        True,
        "the peer leaves a row out of a pass if the batch has it from the pass before",
    ),
]


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return results(sys.executable, OURS)


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    return results(os.environ[PEER_PYTHON], PEER)


@pytest.mark.parametrize("script", names())
def test_a_script_gives_the_expected_results(script: str, ours: dict[str, Any]) -> None:
    assert ours[script] == expected()[script]


@pytest.mark.parametrize("one", DIFFERENCES, ids=lambda one: one.fact)
def test_what_differs_is_our_side_of_what_is_expected(one: Difference) -> None:
    assert at(expected(), one.fact) == one.ours != one.peer


@needs_peer
@pytest.mark.peer
@pytest.mark.parametrize("one", DIFFERENCES, ids=lambda one: one.fact)
def test_the_peer_differs_as_stated(one: Difference, theirs: dict[str, Any]) -> None:
    assert at(theirs, one.fact) == one.peer


@needs_peer
@pytest.mark.peer
@pytest.mark.parametrize("script", names())
def test_the_peer_says_all_else_that_is_expected(script: str, theirs: dict[str, Any]) -> None:
    found = {script: theirs[script]}
    for one in DIFFERENCES:
        if one.fact.startswith(f"{script}/"):
            replace(found, one.fact, one.ours)
    assert found[script] == expected()[script]


if __name__ == "__main__":  # what the peer says from now on is expected
    record(DIFFERENCES)
