"""Generated rollouts whose calls continue each other, branch, repeat and break off."""

from typing import Any

from hypothesis import strategies as st

from agl_core.trajectory.settings import BatchSettings

_IDS = st.lists(st.integers(1, 3), min_size=1, max_size=3)
"""Few ids, so that prompts share prefixes by chance as well."""
_REWARD = st.sampled_from([0.0, 0.1, 0.5, 1.0])


@st.composite
def rollouts(draw: st.DrawFn, max_rollouts: int = 5) -> list[dict[str, Any]]:
    """Triplets of some rollouts in groups of at most three, ordered by rollout and call."""
    found: list[dict[str, Any]] = []
    for index in range(draw(st.integers(1, max_rollouts))):
        found += draw(_calls(index))
    return found


@st.composite
def _calls(draw: st.DrawFn, index: int) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    final = draw(_REWARD)
    for place in range(draw(st.integers(1, 6))):
        response = draw(_IDS)
        calls.append(
            {
                "index": index,
                "group": index // 3,
                "call_index": place * 2,
                "prompt_ids": draw(_prompt(calls)),
                "response_ids": response,
                "logprobs": [-0.25 * (k + 1) for k in range(len(response))],
                "reward": final,
                "rewards": draw(_rewards()),
                "policy_version": draw(st.sampled_from(["v000001", "v000002"])),
                "temperature": draw(st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.0])),
                "finish_reason": draw(st.sampled_from(["stop", "stop", "length"])),
            }
        )
    entry = {"primary": True, "final": True, "matched": True}
    calls[-1]["rewards"].append({"name": "primary", "value": final, **entry})
    return calls


@st.composite
def _prompt(draw: st.DrawFn, calls: list[dict[str, Any]]) -> list[int]:
    """A prompt that stands in some relation to an earlier call's."""
    how = draw(st.sampled_from(["new", "continue", "continue", "continue", "repeat", "break"]))
    if not calls or how == "new":
        return draw(_IDS)
    earlier = draw(st.sampled_from(calls[-3:]))
    if how == "repeat":
        return list(earlier["prompt_ids"])
    context = earlier["prompt_ids"] + earlier["response_ids"]
    if how == "break":  # other ids for what the model wrote
        context = earlier["prompt_ids"] + draw(_IDS)
    return context + draw(st.lists(st.integers(1, 3), max_size=2))


@st.composite
def _rewards(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rewards of one call: at most two, of one or two dimensions."""
    entries: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(0, 2))):
        flags = {"final": False, "matched": draw(st.booleans())}
        name = draw(st.sampled_from(["primary", "accuracy"]))
        entries.append({"name": name, "value": draw(_REWARD), "primary": True, **flags})
        if draw(st.booleans()):
            entries.append({"name": "format", "value": draw(_REWARD), "primary": False, **flags})
    return entries


@st.composite
def batch_settings(draw: st.DrawFn) -> BatchSettings:
    """Any settings but truncation `error`, with limits that some rows exceed."""
    credit = draw(st.sampled_from(["final", "per_call", "discounted", "sum"]))
    cuts = st.sampled_from(["drop", "left", "left", "right"])
    return BatchSettings(
        level=draw(st.sampled_from(["transition", "trajectory", "trajectory"])),
        max_prompt_length=draw(st.integers(1, 8)),
        max_response_length=draw(st.integers(1, 12)),
        prompt_truncation=draw(cuts),
        response_truncation=draw(cuts),
        unfinished=draw(st.sampled_from(["keep", "mask", "drop"])),
        credit=credit,
        discount=0.5 if credit == "discounted" else 1.0,
        reward_weights=draw(
            st.sampled_from([None, None, None, {"accuracy": 1.0, "format": 0.25}, {"primary": 2.0}])
        ),
        drop_equal_rewards=draw(st.booleans()),
        min_group_size=draw(st.sampled_from([1, 1, 2, 3])),
        temperature=1.0,
    )
