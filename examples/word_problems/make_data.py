"""Make the word problems: `data/train.jsonl` and `data/val.jsonl`.

A problem is a kind of story with two small numbers. Every combination of kind and numbers goes to
one part only, so that validation asks for sums that training never showed, whatever the names.

    python -m examples.word_problems.make_data
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).parent / "data"
NUM_VAL = 32
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps")
STORIES = {
    "more": "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "both": "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?",
    "less": "{name} has {a} {things} and gives {b} to {other}. How many {things} are left?",
}


class Problem(NamedTuple):
    """A kind of story and its two numbers."""

    kind: str
    a: int
    b: int

    @property
    def answer(self) -> int:
        """The number that is asked for."""
        return self.a - self.b if self.kind == "less" else self.a + self.b


class Split(NamedTuple):
    """Disjoint problems."""

    train: list[Problem]
    val: list[Problem]


def split_problems(seed: int = 7) -> Split:
    """Return every problem of the stories with numbers from 2 to 12, each in exactly one part."""
    numbers = range(2, 13)
    problems = [Problem(kind, a, b) for kind in STORIES for a in numbers for b in numbers]
    problems = [problem for problem in problems if problem.answer > 0]
    random.Random(seed).shuffle(problems)
    return Split(train=problems[NUM_VAL:], val=problems[:NUM_VAL])


def row(problem: Problem, rng: random.Random) -> dict[str, Any]:
    """Return a problem told as a story, with names and things drawn at random."""
    name, other = rng.sample(NAMES, 2)
    values = {"a": problem.a, "b": problem.b, "name": name, "other": other}
    question = STORIES[problem.kind].format(**values, things=rng.choice(THINGS))
    return {"question": question, "answer": problem.answer}


def rows(seed: int = 7) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file."""
    rng = random.Random(seed)
    split = split_problems(seed)._asdict()
    return {name: [row(problem, rng) for problem in part] for name, part in split.items()}


def main() -> None:
    """Write both files."""
    DATA.mkdir(exist_ok=True)
    for name, part in rows().items():
        text = "".join(json.dumps(entry) + "\n" for entry in part)
        (DATA / f"{name}.jsonl").write_text(text, encoding="ascii")
        print(f"{name}: {len(part)} rows")


if __name__ == "__main__":
    main()
