"""The rules of a batch written a second time, as plain loops over lists: what the columns are
compared with.
"""

from collections import defaultdict
from typing import Any

from agl_core.trajectory.settings import BatchSettings


def plain_rows(triplets: list[dict[str, Any]], settings: BatchSettings) -> list[dict[str, Any]]:
    """Return the rows of a batch; triplets are ordered by rollout, then by call."""
    rollouts: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for triplet in triplets:
        rollouts[triplet["index"]].append(triplet)
    rows: list[dict[str, Any]] = []
    for index in sorted(rollouts):
        rows += _rows_of_rollout(rollouts[index], settings)
    _drop_groups(rows, settings)
    for number, row in enumerate(rows):
        row["row"] = number
        _cut(row, settings)
        row["response_ids"] = [token["id"] for token in row["tokens"]]
        row["response_mask"] = [int(token["call"] is not None) for token in row["tokens"]]
        if settings.unfinished == "mask" and row["finish_reason"] == "length":
            row["response_mask"] = [0] * len(row["tokens"])
        row["rollout_logprobs"] = [token["logprob"] for token in row["tokens"]]
        row["policy_versions"] = [token["version"] for token in row["tokens"]]
        row["token_rewards"], row["reward"] = _place(row, settings)
    return rows


def _value(entries: list[dict[str, Any]], settings: BatchSettings) -> float:
    total = 0.0
    for entry in entries:
        if settings.reward_weights is None:
            total += entry["value"] if entry["primary"] else 0.0
        else:
            total += settings.reward_weights.get(entry["name"], 0.0) * entry["value"]
    return total


def _credit(
    calls: list[dict[str, Any]], settings: BatchSettings
) -> tuple[list[float], float, bool]:
    """Return the reward of each call, the rollout's, and whether any that counts has a weight."""
    matched = [[entry for entry in call["rewards"] if entry["matched"]] for call in calls]
    emitted = [entry for call in calls for entry in call["rewards"]]
    credits = [_value(entries, settings) for entries in matched]
    used = [entry for entries in matched for entry in entries]
    if settings.credit == "final":
        used = [entry for entry in emitted if entry["final"]]
        rollout_reward = (
            calls[0]["reward"] if settings.reward_weights is None else _value(used, settings)
        )
    elif settings.credit == "sum":
        used = emitted
        rollout_reward = sum((_value(call["rewards"], settings) for call in calls), start=0.0)
    elif settings.credit == "per_call":
        rollout_reward = sum(credits, start=0.0)
    else:
        for place in range(len(credits) - 2, -1, -1):
            credits[place] += settings.discount * credits[place + 1]
        rollout_reward = credits[0]
    if settings.reward_weights is None:
        usable = settings.credit == "final" or any(entry["primary"] for entry in used)
    else:
        usable = any(entry["name"] in settings.reward_weights for entry in used)
    return credits, rollout_reward, usable


def _rows_of_rollout(calls: list[dict[str, Any]], settings: BatchSettings) -> list[dict[str, Any]]:
    credits, rollout_reward, usable = _credit(calls, settings)
    rows: list[dict[str, Any]] = []
    for place, call in enumerate(calls):
        sampled = [
            {"id": i, "logprob": p, "version": call["policy_version"], "call": place}
            for i, p in zip(call["response_ids"], call["logprobs"], strict=True)
        ]
        row = None
        if settings.level == "trajectory" and call["temperature"] == settings.temperature:
            open_rows = [r for r in rows if r["comparable"] and _starts_with(call, r["context"])]
            if open_rows:
                row = max(open_rows, key=lambda r: (len(r["context"]), r["last"]))
        if row is None:
            row = {
                "index": call["index"],
                "group": call["group"],
                "rollout_id": call["rollout_id"],
                "call_index": call["call_index"],
                "step": len(rows),
                "num_calls": 0,
                "prompt_ids": call["prompt_ids"],
                "tokens": [],
                "comparable": call["temperature"] == settings.temperature,
                "usable": usable,
                "rollout_reward": rollout_reward,
                "credits": credits,
            }
            rows.append(row)
        else:
            row["tokens"] += [
                {"id": i, "logprob": 0.0, "version": None, "call": None}
                for i in call["prompt_ids"][len(row["context"]) :]
            ]
        row["tokens"] += sampled
        row["num_calls"] += 1
        row["last"] = place
        row["finish_reason"] = call["finish_reason"]
        row["context"] = call["prompt_ids"] + call["response_ids"]
    for row in rows:
        row["drop_reason"] = _reason(row, settings)
    return rows


def _starts_with(call: dict[str, Any], context: list[int]) -> bool:
    return call["prompt_ids"][: len(context)] == context


def _reason(row: dict[str, Any], settings: BatchSettings) -> str | None:
    if not row["comparable"]:
        return "other_temperature"
    if not row["usable"]:
        return "unusable_reward"
    if len(row["prompt_ids"]) > settings.max_prompt_length and (
        settings.prompt_truncation == "drop"
    ):
        return "prompt_too_long"
    if len(row["tokens"]) > settings.max_response_length and (
        settings.response_truncation == "drop"
    ):
        return "response_too_long"
    if settings.unfinished == "drop" and row["finish_reason"] == "length":
        return "unfinished"
    return None


def _drop_groups(rows: list[dict[str, Any]], settings: BatchSettings) -> None:
    groups: dict[int, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["drop_reason"] is None:
            groups[row["group"]][row["index"]] = row["rollout_reward"]
    for row in rows:
        if row["drop_reason"] is not None:
            continue
        rewards = list(groups[row["group"]].values())
        if len(rewards) < settings.min_group_size:
            row["drop_reason"] = "group_too_small"
        elif settings.drop_equal_rewards and len(rewards) > 1 and len(set(rewards)) == 1:
            row["drop_reason"] = "equal_rewards"


def _cut(row: dict[str, Any], settings: BatchSettings) -> None:
    notes = []
    for part, name, limit, policy in (
        ("prompt", "prompt_ids", settings.max_prompt_length, settings.prompt_truncation),
        ("response", "tokens", settings.max_response_length, settings.response_truncation),
    ):
        if row["drop_reason"] is None and len(row[name]) > limit:
            row[name] = row[name][-limit:] if policy == "left" else row[name][:limit]
            notes.append(f"{part}_{policy}")
    row["truncated"] = ",".join(notes) or None


def _place(row: dict[str, Any], settings: BatchSettings) -> tuple[list[float], float]:
    rewards = [0.0] * len(row["tokens"])
    last = {t["call"]: place for place, t in enumerate(row["tokens"]) if t["call"] is not None}
    if settings.credit in ("final", "sum"):
        rewards[max(last.values())] = row["rollout_reward"]
        return rewards, row["rollout_reward"]
    total = 0.0
    for call in sorted(last):
        rewards[last[call]] = row["credits"][call]
        total += row["credits"][call]
    return rewards, total
