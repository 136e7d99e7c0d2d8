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
    outcomes: dict[int, list[Row]] = field(default_factory=dict)
    """Attempts of each rollout, from the first chunk that has it."""
    spans: dict[int, list[Row]] = field(default_factory=dict)
    outcome_stored_at: dict[int, int] = field(default_factory=dict)


def check_run(ledger: Path, run_id: str, *, retries_failed: bool = False) -> list[Violation]:
    """Return everything that is wrong with the committed iterations of a run.

    Args:
        ledger: Local folder of the ledger.
        run_id: Of the run.
        retries_failed: Somebody asked for another try of the failed rollouts.
    """
    found: list[Violation] = []
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
    for path in folder.rglob("*"):
        if path.is_dir() or path in listed or path.name.startswith("."):
            continue
        if not _is_late_chunk(path, listed):
            yield Violation("unlisted", f"{path.relative_to(ledger)} is not in the manifest")


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
                    if kind != "succeeded" and retries_failed:
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
        claims[number] = Claim(number, list(stated["indices"]), path.stat().st_mtime_ns)
    for path in sorted(rollouts.glob("chunks/*.outcomes.parquet")):
        claim = claims[int(path.name.split("-")[0])]
        spans = pq.read_table(path.with_name(path.name.replace(".outcomes.", ".spans.")))
        new: set[int] = set()
        for row in pq.read_table(path).to_pylist():
            if row["index"] in claim.outcomes and row["index"] not in new:
                continue  # a flush that was written again
            new.add(row["index"])
            claim.outcomes.setdefault(row["index"], []).append(row)
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
        deciding[index] = rows[0]
        attempt = rows[0]["attempt_id"]
        spans[index] = [
            span for span in latest[0].spans.get(index, []) if span["attempt_id"] == attempt
        ]
    yield from _check_collected(name, deciding, collected)
    for claim in claims:
        yield from _check_rewards(name, claim)
    yield from _check_batch(name, deciding, spans, batch)
    yield from _check_coverage(name, deciding, batch, manifest)


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
    name: str, deciding: dict[int, Row], spans: dict[int, list[Row]], batch: list[Row]
) -> Iterator[Violation]:
    """The batch holds each answered call of each deciding attempt that succeeded, once."""
    expected: dict[tuple[int, int], Row] = {}
    for index, outcome in deciding.items():
        for span in spans[index]:
            is_answered = span["name"] == CALL and span["status"] != "ERROR"
            if outcome["kind"] == "succeeded" and is_answered:
                expected[index, span["call_index"]] = span
    seen: Counter[tuple[int, int]] = Counter()
    for row in batch:
        key = (row["index"], row["call_index"])
        seen[key] += 1
        if key in expected:
            yield from _check_row(name, row, expected[key], deciding[row["index"]])
        else:
            yield Violation("batch", f"{name}: row {row['row']} {key} is no deciding call")
    for key, count in seen.items():
        if count > 1:
            yield Violation("used_twice", f"{name}: call {key} is in the batch {count} times")
    if missing := set(expected) - set(seen):
        yield Violation("batch", f"{name}: calls {sorted(missing)} are not in the batch")


def _check_row(name: str, row: Row, span: Row, outcome: Row) -> Iterator[Violation]:
    """A row holds what its call's span recorded, and its rollout's reward."""
    pairs = {
        "prompt_ids": "prompt_token_ids",
        "response_ids": "response_token_ids",
        "rollout_logprobs": "logprobs",
    }
    for column, recorded in pairs.items():
        if row[column] != span[recorded]:
            yield Violation("batch", f"{name}: {column} of row {row['row']} was not recorded")
    if row["reward"] != outcome["reward"]:
        yield Violation("reward", f"{name}: row {row['row']} has another reward than given")


def _check_coverage(
    name: str, deciding: dict[int, Row], batch: list[Row], manifest: Row
) -> Iterator[Violation]:
    """Both identities, counted again."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for index, outcome in deciding.items():
        fate, reason = _fate(outcome, [row for row in batch if row["index"] == index])
        counts[fate] += 1
        if reason is not None:
            reasons[reason] += 1
    stated = manifest["coverage"]
    parts = ("trained", "masked", "filtered", "failed", "omitted", "unknown")
    if sum(stated[part] for part in parts) != stated["expected"]:
        yield Violation("coverage", f"{name}: {stated} does not add up")
    for part in parts:
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
    if built != {"masked": 0} | manifest["rows"]:
        yield Violation("rows", f"{name}: rows are {built}, the manifest says {manifest['rows']}")


def _fate(outcome: Row, rows: list[Row]) -> tuple[str, str | None]:
    """Return what became of a rollout, and why."""
    if outcome["kind"] != "succeeded":
        return "failed", outcome["kind"]
    kept = [row for row in rows if row["drop_reason"] is None]
    if kept:
        return ("trained" if any(any(row["response_mask"]) for row in kept) else "masked"), None
    return ("filtered", rows[0]["drop_reason"]) if rows else ("unknown", None)


def _output(ledger: Path, folder: Path, stage: str, name: str) -> list[Row]:
    """Return a table that a stage's record names."""
    record = _json(folder / f"stages/{stage}.json")
    return pq.read_table(ledger / record["outputs"][name]["key"]).to_pylist()


def _json(path: Path) -> Any:
    return json.loads(path.read_text())
