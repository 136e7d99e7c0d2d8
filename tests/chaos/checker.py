"""An independent check of a run's ledger: plain loops over its Parquet and JSON files.

Nothing of the product is imported. What the ledger promises is written down here a second time,
from its description (docs/design/ledger.md), so that a fault of the product's own `verify` cannot
hide one of its own.

    check_run(folder, "run-1") -> [Violation("coverage", "iteration 0: ..."), ...]
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

CALL = "openai.chat.completion"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that a ledger must not hold."""

    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass(slots=True)
class Claim:
    """The rollouts that one shard took, and what it stored of them."""

    number: int
    indices: list[int]
    stored_at: int
    """Nanoseconds; of its file."""
    is_retry: bool = False
    """Its shard was retried by itself, on somebody's wish."""
    outcomes: dict[int, list[Row]] = field(default_factory=dict)
    """Attempts of each rollout, from the first chunk that has it."""
    spans: dict[int, list[Row]] = field(default_factory=dict)
    outcome_stored_at: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run's settings say about its batches."""

    joins: bool
    """A row is a trajectory, not a call."""
    temperature: float
    credit: str
    unfinished: str
    zero: bool
    """A missing reward counts 0."""
    drop_group: frozenset[str]
    """Kinds of failures that drop their group."""

    @classmethod
    def of(cls, manifest: Row) -> "Rules":
        """Read them from the configuration that a manifest states."""
        config = manifest["identity"]["config"]
        verl = config["algorithm"]["config"]
        policies = {k: v for k, v in config["failures"].items() if isinstance(v, dict)}
        return cls(
            joins=verl.get("agentlightning.trace_aggregator.level") == "trajectory",
            temperature=verl["actor_rollout_ref.rollout.temperature"],
            credit=verl.get("agentlightning.credit.assignment", "final"),
            unfinished=verl.get("agentlightning.truncation.unfinished", "keep"),
            zero=policies["no_reward"]["then"] == "zero",
            drop_group=frozenset(k for k, v in policies.items() if v["then"] == "drop_group"),
        )

    def reward_of(self, outcome: Row) -> float | None:
        """Return the reward that a rollout is trained on; None where it has none."""
        if outcome["kind"] == "no_reward" and self.zero:
            return 0.0
        return outcome["reward"] if outcome["kind"] == "succeeded" else None

    def masks(self, row: Row) -> bool:
        """Say whether a row is in the batch without weight."""
        return self.unfinished == "mask" and row["finish_reason"] == "length"


def check_run(ledger: Path, run_id: str, *, retries_failed: bool = False) -> list[Violation]:
    """Return everything that is wrong with the committed iterations of a run.

    Args:
        ledger: Local folder of the ledger.
        run_id: Of the run.
        retries_failed: Somebody asked for another try of the failed rollouts.
    """
    found = list(_check_starts(ledger / "runs" / run_id))
    policy: Any = None
    for folder in sorted((ledger / "runs" / run_id / "iterations").glob("*")):
        if not (folder / "manifest.json").exists():
            found += _check_claims(folder, retries_failed)
            continue
        manifest = _json(folder / "manifest.json")
        found += _check_files(ledger, folder, manifest)
        found += _check_claims(folder, retries_failed)
        try:
            found += _check_training(ledger, folder, manifest)
        except (KeyError, OSError, ValueError) as error:
            found.append(Violation("unreadable", f"{folder.name}: {error!r}"))
        if policy is not None and manifest["policy_in"]["weights_digest"] != policy:
            found.append(Violation("policy", f"{folder.name} starts from other weights"))
        policy = manifest["state"]["policy"]["weights_digest"]
    return found


def _check_files(ledger: Path, folder: Path, manifest: Row) -> Iterator[Violation]:
    """Every file as the manifest says, none of them younger than it, no other file beside them."""
    committed = (folder / "manifest.json").stat().st_mtime_ns
    listed = {folder / "manifest.json"}
    for entry in manifest["files"]:
        path = ledger / entry["key"]
        listed.add(path)
        if not path.exists():
            yield Violation("sha256", f"{entry['key']} is missing")
            continue
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            yield Violation("sha256", f"{entry['key']} has another sha256")
        if len(content) != entry["size_bytes"]:
            yield Violation("sha256", f"{entry['key']} has another size")
        if path.stat().st_mtime_ns > committed:
            yield Violation("written_late", f"{entry['key']} was written after the manifest")
    there = {path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."}
    for path in sorted(there ^ listed):
        name = path.relative_to(ledger)
        if not path.is_relative_to(folder):  # starts and signs of life, say: those change
            yield Violation("unlisted", f"{name} is listed and is no file of {folder.name}")
        elif path in there and not _is_late_chunk(path, listed):
            yield Violation("unlisted", f"{name} is not in the manifest")


def _is_late_chunk(path: Path, listed: set[Path]) -> bool:
    """A shard that was given up may live on, and flush after the commit: kept and unused."""
    found = re.fullmatch(r"(\d+)-\d+\.(spans|outcomes)\.parquet", path.name)
    return bool(found) and path.parent.parent / "claims" / f"{found[1]}.json" in listed


def _check_claims(folder: Path, retries_failed: bool) -> Iterator[Violation]:
    """No rollout is claimed whose outcome is stored already."""
    for rollouts in sorted((folder / "rollouts").glob("*")):
        claims = _claims(rollouts)
        for later in claims:
            for earlier in claims:
                if earlier.number >= later.number:
                    continue
                for index in later.indices:
                    stored = earlier.outcome_stored_at.get(index)
                    if stored is None or stored >= later.stored_at:
                        continue
                    kind = _deciding(earlier, index)[0]["kind"]
                    may_retry = retries_failed or later.is_retry
                    if kind != "succeeded" and may_retry:
                        continue
                    yield Violation(
                        "run_again",
                        f"{folder.name}/{rollouts.name}: claim {later.number} takes rollout "
                        f"{index}, which claim {earlier.number} had finished as {kind}",
                    )


def _claims(rollouts: Path) -> list[Claim]:
    """Return the claims of a set, oldest first, each with what its shard flushed."""
    claims: dict[int, Claim] = {}
    for path in rollouts.glob("claims/*.json"):
        stated = _json(path)
        number = int(path.stem)
        claims[number] = Claim(
            number,
            list(stated["indices"]),
            path.stat().st_mtime_ns,
            stated["retry_of"] is not None,
        )
    for path in sorted(rollouts.glob("chunks/*.outcomes.parquet")):
        claim = claims[int(path.name.split("-")[0])]
        spans = pq.read_table(path.with_name(path.name.replace(".outcomes.", ".spans.")))
        new: set[int] = set()
        for row in pq.read_table(path).to_pylist():
            if row["index"] in claim.outcomes and row["index"] not in new:
                continue  # a flush that was written again
            new.add(row["index"])
            claim.outcomes.setdefault(row["index"], []).append(row)
            if row["final"]:  # a cancelled attempt is kept, and its rollout unfinished
                claim.outcome_stored_at[row["index"]] = path.stat().st_mtime_ns
        for row in spans.to_pylist():
            if row["index"] in new:
                claim.spans.setdefault(row["index"], []).append(row)
    return [claims[number] for number in sorted(claims)]


def _deciding(claim: Claim, index: int) -> list[Row]:
    return [row for row in claim.outcomes.get(index, []) if row["final"]]


def _check_training(ledger: Path, folder: Path, manifest: Row) -> Iterator[Violation]:
    """Requests, outcomes, rewards, batch and coverage of the training rollouts agree."""
    name = folder.name
    requests = pq.read_table(folder / "rollouts/train/requests.parquet").to_pylist()
    claims = _claims(folder / "rollouts/train")
    collected = _output(ledger, folder, "collect", "outcomes")
    batch = _output(ledger, folder, "adapt", "batch")

    if manifest["coverage"]["expected"] != len(requests):
        yield Violation(
            "expected",
            f"{name}: {len(requests)} requests, the manifest expects "
            f"{manifest['coverage']['expected']}",
        )
    deciding: dict[int, Row] = {}
    spans: dict[int, list[Row]] = {}
    for request in requests:
        index = request["index"]
        latest = [claim for claim in claims if index in claim.indices][-1:]
        rows = _deciding(latest[0], index) if latest else []
        if len(rows) != 1:
            yield Violation("deciding", f"{name}: rollout {index} has {len(rows)} deciding rows")
            continue
        if rows[0]["kind"] == "cancelled":
            yield Violation("deciding", f"{name}: rollout {index} was cancelled, and decides")
        deciding[index] = rows[0]
        attempt = rows[0]["attempt_id"]
        spans[index] = [
            span for span in latest[0].spans.get(index, []) if span["attempt_id"] == attempt
        ]
    yield from _check_collected(name, deciding, collected)
    for claim in claims:
        yield from _check_rewards(name, claim)
    rules = Rules.of(manifest)
    yield from _check_batch(name, rules, deciding, spans, batch)
    yield from _check_groups(name, rules, requests, deciding, batch)
    yield from _check_coverage(name, rules, deciding, batch, manifest)
    yield from _check_tokens(name, rules, deciding, spans, batch, manifest)
    asked = {request["rollout_id"] for request in requests}
    for row in batch:
        if row["rollout_id"] not in asked:
            yield Violation("batch", f"{name}: row {row['row']} is of no training rollout")


def _check_collected(
    name: str, deciding: dict[int, Row], collected: list[Row]
) -> Iterator[Violation]:
    """The table that training reads has the deciding outcomes, once each."""
    final = [row for row in collected if row["final"]]
    for index, count in Counter(row["index"] for row in final).items():
        if count != 1:
            yield Violation("deciding", f"{name}: rollout {index} has {count} final outcomes")
    for row in final:
        expected = deciding.get(row["index"])
        for column in ("attempt_id", "kind", "reward"):
            if expected is None or row[column] != expected[column]:
                yield Violation(
                    "deciding",
                    f"{name}: collect has {column}={row[column]} for rollout {row['index']}, the "
                    f"deciding claim has {expected and expected[column]}",
                )
    if missing := set(deciding) - {row["index"] for row in final}:
        yield Violation("deciding", f"{name}: collect lacks rollouts {sorted(missing)}")


def _check_rewards(name: str, claim: Claim) -> Iterator[Violation]:
    """A reward is what the agent gave in that attempt; a failure has none."""
    for index, attempts in claim.outcomes.items():
        for row in attempts:
            reward = row["reward"]
            if row["kind"] != "succeeded":
                if reward is not None:
                    yield Violation(
                        "reward", f"{name}: rollout {index} {row['kind']} has reward {reward}"
                    )
                continue
            given = {
                span["reward"]
                for span in claim.spans.get(index, [])
                if span["attempt_id"] == row["attempt_id"] and span["reward"] is not None
            }
            if reward not in given:
                yield Violation(
                    "reward", f"{name}: rollout {index} has reward {reward}, its agent gave {given}"
                )


def _check_batch(
    name: str,
    rules: Rules,
    deciding: dict[int, Row],
    spans: dict[int, list[Row]],
    batch: list[Row],
) -> Iterator[Violation]:
    """The batch holds each answered call of each deciding attempt that has a reward, once."""
    expected: dict[tuple[int, int], Row] = {}
    for index, outcome in deciding.items():
        if rules.reward_of(outcome) is not None:
            for row in _rows_of(rules, spans[index]):
                expected[index, row["call_index"]] = row
    seen: Counter[tuple[int, int]] = Counter()
    for row in batch:
        key = (row["index"], row["call_index"])
        seen[key] += 1
        if key in expected:
            reward = rules.reward_of(deciding[row["index"]])
            yield from _check_row(name, rules, row, expected[key], reward)
        else:
            yield Violation("batch", f"{name}: row {row['row']} {key} is no deciding call")
    for key, count in seen.items():
        if count > 1:
            yield Violation("used_twice", f"{name}: call {key} is in the batch {count} times")
    if missing := set(expected) - set(seen):
        yield Violation("batch", f"{name}: calls {sorted(missing)} are not in the batch")


def _rows_of(rules: Rules, spans: list[Row]) -> list[Row]:
    """Return the rows that the answered calls of an attempt form, token by token.

    A call joins the row whose ids so far are the beginning of its prompt: the longest, then the
    latest.
    """
    calls = [span for span in spans if span["name"] == CALL and span["status"] != "ERROR"]
    rows: list[Row] = []
    for call in sorted(calls, key=lambda span: span["call_index"]):
        prompt, response = call["prompt_token_ids"], call["response_token_ids"]
        joins = rules.joins and call["temperature"] == rules.temperature
        into: Row | None = None
        for row in rows:
            context = row["prompt_ids"] + row["response_ids"]
            if not (joins and row["joins"] and prompt[: len(context)] == context):
                continue
            if into is None or (len(context), row["last"]) > (_length(into), into["last"]):
                into = row
        if into is None:
            into = {
                "call_index": call["call_index"],
                "num_calls": 0,
                "prompt_ids": prompt,
                "response_ids": [],
                "sampled": [],
                "rollout_logprobs": [],
                "joins": joins,
            }
            rows.append(into)
        observed = prompt[len(into["prompt_ids"]) + len(into["response_ids"]) :]
        into["response_ids"] += observed + response
        into["sampled"] += [0] * len(observed) + [1] * len(response)
        into["rollout_logprobs"] += [0.0] * len(observed) + call["logprobs"]
        into["num_calls"] += 1
        into["last"] = call["call_index"]
        into["finish_reason"] = call["finish_reason"]
    return rows


def _length(row: Row) -> int:
    return len(row["prompt_ids"]) + len(row["response_ids"])


def _check_row(
    name: str, rules: Rules, row: Row, expected: Row, reward: float | None
) -> Iterator[Violation]:
    """A row holds what its calls' spans recorded, and its rollout's reward."""
    columns = ["num_calls"]
    if row["truncated"] is None:
        columns += ["prompt_ids", "response_ids", "rollout_logprobs"]
    for column in columns:
        if row[column] != expected[column]:
            yield Violation("batch", f"{name}: {column} of row {row['row']} was not recorded")
    mask = row["response_mask"]
    if any(mask) or not rules.masks(expected):
        sampled = [int(version is not None) for version in row["policy_versions"]]
        if mask != sampled or (row["truncated"] is None and mask != expected["sampled"]):
            yield Violation("batch", f"{name}: row {row['row']} weights what was not sampled")
    for column in ("response_mask", "rollout_logprobs", "policy_versions", "token_rewards"):
        if len(row[column]) != len(row["response_ids"]):
            yield Violation("batch", f"{name}: {column} of row {row['row']} has another length")
    if rules.credit == "final":
        yield from _check_final_reward(name, row, reward)


def _check_final_reward(name: str, row: Row, reward: float | None) -> Iterator[Violation]:
    """The rollout's reward is on one token of the row, and nothing else is."""
    if row["reward"] != reward or row["rollout_reward"] != reward:
        yield Violation("reward", f"{name}: row {row['row']} has another reward than given")
    given = [value for value in row["token_rewards"] if value]
    if given != ([reward] if reward else []):
        yield Violation("reward", f"{name}: row {row['row']} has token rewards {given}")


def _check_groups(
    name: str, rules: Rules, requests: list[Row], deciding: dict[int, Row], batch: list[Row]
) -> Iterator[Violation]:
    """Groups that a failed rollout drops are out of the batch, with that reason, and no others."""
    group = {request["index"]: request["group"] for request in requests}
    lost = {
        group[index] for index, outcome in deciding.items() if outcome["kind"] in rules.drop_group
    }
    for row in batch:
        if row["group"] != group.get(row["index"]):
            yield Violation("group", f"{name}: row {row['row']} is in another group than asked for")
        is_dropped = row["drop_reason"] is not None
        if row["group"] in lost and not is_dropped:
            yield Violation("group", f"{name}: row {row['row']} is of a group that lost a rollout")
        if row["drop_reason"] == "group_failed" and row["group"] not in lost:
            yield Violation("group", f"{name}: the group of row {row['row']} lost no rollout")


def _check_coverage(
    name: str, rules: Rules, deciding: dict[int, Row], batch: list[Row], manifest: Row
) -> Iterator[Violation]:
    """All identities, counted again."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for index, outcome in deciding.items():
        rows = [row for row in batch if row["index"] == index]
        fate, reason = _fate(outcome, rows)
        counts[fate] += 1
        counts["rewards_by_policy"] += bool(rows) and outcome["kind"] == "no_reward"
        if reason is not None:
            reasons[reason] += 1
        if rows and rules.reward_of(outcome) is None:
            yield Violation("reward", f"{name}: rollout {index} has rows and no reward")
    stated = manifest["coverage"]
    parts = ("trained", "masked", "filtered", "failed", "omitted", "unknown")
    if sum(stated[part] for part in parts) != stated["expected"]:
        yield Violation("coverage", f"{name}: {stated} does not add up")
    for part in (*parts, "rewards_by_policy"):
        if stated[part] != counts[part]:
            yield Violation(
                "coverage", f"{name}: {part} is {counts[part]}, the manifest says {stated[part]}"
            )
    if stated["unknown"]:
        yield Violation("coverage", f"{name}: {stated['unknown']} rollouts are unknown")
    if {k: v for k, v in stated["reasons"].items() if v} != dict(reasons):
        yield Violation("coverage", f"{name}: reasons are {dict(reasons)}, not {stated['reasons']}")
    dropped = Counter(row["drop_reason"] for row in batch if row["drop_reason"] is not None)
    kept = [row for row in batch if row["drop_reason"] is None]
    trained = [row for row in kept if any(row["response_mask"])]
    built = {
        "built": len(batch),
        "trained": len(trained),
        "masked": len(kept) - len(trained),
        "dropped": dict(dropped),
    }
    if built != manifest["rows"]:
        yield Violation("rows", f"{name}: rows are {built}, the manifest says {manifest['rows']}")


def _check_tokens(
    name: str,
    rules: Rules,
    deciding: dict[int, Row],
    spans: dict[int, list[Row]],
    batch: list[Row],
    manifest: Row,
) -> Iterator[Violation]:
    """Every token that was sampled by a rollout with a reward is trained, masked or dropped."""
    sampled = sum(
        sum(row["sampled"])
        for index, outcome in deciding.items()
        if rules.reward_of(outcome) is not None
        for row in _rows_of(rules, spans[index])
    )
    counts: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for row in batch:
        of_policy = sum(version is not None for version in row["policy_versions"])
        if row["drop_reason"] is not None:
            dropped[row["drop_reason"]] += of_policy
        else:
            counts["trained"] += sum(row["response_mask"])
            counts["masked"] += of_policy - sum(row["response_mask"])
    if cut_off := sampled - counts.total() - dropped.total():
        dropped["truncated"] = cut_off
        if not any(row["truncated"] for row in batch):
            yield Violation("tokens", f"{name}: {cut_off} sampled tokens are in no row")
    found = {
        "sampled": sampled,
        "trained": counts["trained"],
        "masked": counts["masked"],
        "dropped": {reason: number for reason, number in dropped.items() if number},
    }
    stated = manifest["tokens"]
    if stated is not None:
        stated = stated | {"dropped": {k: v for k, v in stated["dropped"].items() if v}}
    if stated != found:
        yield Violation("tokens", f"{name}: tokens are {found}, the manifest says {stated}")


def _fate(outcome: Row, rows: list[Row]) -> tuple[str, str | None]:
    """Return what became of a rollout, and why."""
    kept = [row for row in rows if row["drop_reason"] is None]
    if kept:
        return ("trained" if any(any(row["response_mask"]) for row in kept) else "masked"), None
    if rows:
        return "filtered", rows[0]["drop_reason"]
    if outcome["kind"] != "succeeded":
        return "failed", outcome["kind"]
    return "unknown", None


def _check_starts(run: Path) -> Iterator[Violation]:
    """Starts are numbered, and each but the latest has its end."""
    starts = sorted(path.name.split(".")[0] for path in run.glob("starts/*.start.json"))
    if starts != [f"{number:06d}" for number in range(1, len(starts) + 1)]:
        yield Violation("starts", f"starts are {starts}")
    for start in starts[:-1]:
        if not (run / f"starts/{start}.end.json").exists():
            yield Violation("starts", f"start {start} has no end, and there is a later one")


def _output(ledger: Path, folder: Path, stage: str, name: str) -> list[Row]:
    """Return a table that a stage's record names."""
    record = _json(folder / f"stages/{stage}.json")
    return pq.read_table(ledger / record["outputs"][name]["key"]).to_pylist()


def _json(path: Path) -> Any:
    return json.loads(path.read_text())
