"""Make the calculator's questions: `data/train.jsonl`, `data/val.jsonl`, the rest for the warm-up.

All 24,300 expressions `a op b` with two-digit operands are shuffled by one seed and cut into three
parts, so that no expression of the warm-up, of training or of validation occurs in another part.

    python -m examples.calculator.make_data
"""

import json
import random
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parent / "data"
NUM_VAL = 64
NUM_TRAIN = 512


class Split(NamedTuple):
    """Expressions such as `12+34`, pairwise disjoint."""

    train: list[str]
    val: list[str]
    warm_up: list[str]


def split_expressions(seed: int = 7) -> Split:
    """Return every expression, each in exactly one part."""
    expressions = [f"{a}{op}{b}" for a in range(10, 100) for op in "+-*" for b in range(10, 100)]
    random.Random(seed).shuffle(expressions)
    val, train = expressions[:NUM_VAL], expressions[NUM_VAL : NUM_VAL + NUM_TRAIN]
    split = Split(train=train, val=val, warm_up=expressions[NUM_VAL + NUM_TRAIN :])
    parts = [set(part) for part in split]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(expressions), "parts overlap"
    return split


def question(expression: str) -> str:
    """Return what the agent is asked."""
    return f"What is {expression}?"


def answer(expression: str) -> int:
    """Return the value of `a op b`."""
    position = next(i for i, character in enumerate(expression) if character in "+-*")
    a, b = int(expression[:position]), int(expression[position + 1 :])
    return {"+": a + b, "-": a - b, "*": a * b}[expression[position]]


def main() -> None:
    """Write both files."""
    split = split_expressions()
    DATA.mkdir(exist_ok=True)
    for name, expressions in (("train", split.train), ("val", split.val)):
        rows = [{"question": question(e), "answer": answer(e)} for e in expressions]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (DATA / f"{name}.jsonl").write_text(text, encoding="ascii")
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
