"""The long form of the chaos test: a table of fault kind x stage.

    python -m tests.chaos --faults 200 --seed 1

Each result is a line of the record, with its seed; started again, it goes on where the record ends.
Exit status 1 where something must not be.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.world import open_world

Lines = dict[tuple[str, str, int], dict[str, Any]]
"""Lines of the record by kind, stage and first seed."""
_RECORD = Path(".agl/chaos")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds that begin with this")
    parser.add_argument("--stage", default="", help="this stage alone")
    parser.add_argument("--iterations", type=int, default=2, help="of each run")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    return parser.parse_args()


def main() -> int:
    """Play what the record lacks, and print the table."""
    from tests.chaos.cases import all_cases, play, reseeded

    options = _options()
    record = _RECORD / f"seed-{options.seed}.jsonl"
    record.parent.mkdir(parents=True, exist_ok=True)
    done = _read(record)
    console = Console(width=130)
    until = time.monotonic() + options.minutes * 60
    cases = [
        case
        for case in all_cases(options.seed, options.faults)
        if case.kind.startswith(options.only) and options.stage in ("", case.stage)
    ]
    with open_world() as world:
        world.iterations = options.iterations
        for number, case in enumerate(cases):
            if (case.kind, case.stage, case.seed) in done:
                continue
            if time.monotonic() > until:
                break
            result = play(world, case)
            while not result.hits and not result.problems and case.seed < options.seed * 1000 + 999:
                console.print(f"{case}: the fault came too late, another moment is tried")
                result = play(world, case := reseeded(case))
            line = result.as_json()
            line["cell"] = [cases[number].kind, cases[number].stage, cases[number].seed]
            with record.open("a") as file:
                file.write(json.dumps(line) + "\n")
            console.print(
                f"{number + 1}/{len(cases)} {case.kind} at {case.stage} seed {case.seed}: "
                f"{result.hits} hits, {result.seconds:.0f} s, "
                f"{'; '.join(result.problems) or result.ended or 'went on'}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    results = _read(record)
    console.print(_table(results))
    bad = [line for line in results.values() if line["problems"] or not line["hits"]]
    for line in bad:
        said = line["problems"] or "nobody met the fault"
        console.print(f"{line['case']}: {said}", markup=False, soft_wrap=True)
    return 1 if bad else 0


def _read(record: Path) -> Lines:
    if not record.exists():
        return {}
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return {tuple(line["cell"]): line for line in lines}


def _table(results: Lines) -> Table:
    """Return passed and played cases of each cell; why there are none, where it is impossible."""
    from tests.chaos.cases import KINDS, REASONS, impossible
    from tests.chaos.process import STAGES

    notes = dict(zip(REASONS, "abcdefgh", strict=False))
    caption = "; ".join(f"{letter}: {reason}" for reason, letter in notes.items())
    table = Table("fault", *STAGES, title="passed of played", caption=caption)
    for kind in KINDS:
        cells = [kind]
        for stage in STAGES:
            lines = [line for key, line in results.items() if key[:2] == (kind, stage)]
            passed = sum(bool(line["hits"]) and not line["problems"] for line in lines)
            cells.append(notes.get(impossible(kind, stage) or "") or f"{passed} of {len(lines)}")
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
