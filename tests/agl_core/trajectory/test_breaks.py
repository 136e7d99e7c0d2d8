from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from agl_core.errors import ConfigError
from agl_core.trajectory.batch import build_batch
from agl_core.trajectory.breaks import Vocabulary, count_breaks
from agl_core.trajectory.settings import BatchSettings
from agl_core.trajectory.vocabulary import TokenizerVocabulary, find_vocabulary
from examples.calculator import agent
from tests.builders import make_triplets

SETTINGS = BatchSettings(
    level="trajectory", max_prompt_length=99, max_response_length=99, temperature=1.0
)


class Letters(Vocabulary):
    """1 to 26 are letters, 30 + n is letter n twice, and ids from 90 on are the template's."""

    def is_special(self, token_id: int) -> bool:
        return token_id >= 90

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f"<{i}>" if i >= 90 else chr(96 + i % 30) * (1 + i // 30) for i in token_ids)


def breaks(*calls: tuple[list[int], list[int]], vocabulary: Vocabulary | None = None) -> list[Any]:
    table = make_triplets(
        *(
            {
                "index": 0,
                "group": 0,
                "call_index": place,
                "prompt_ids": prompt,
                "response_ids": response,
                "logprobs": [-1.0] * len(response),
            }
            for place, (prompt, response) in enumerate(calls)
        )
    )
    found = build_batch(table, SETTINGS, vocabulary).breaks.to_pylist()
    return [
        tuple(b[n] for n in ("call_index", "kind", "position", "expected_id", "found_id"))
        for b in found
    ]


def test_a_row_that_goes_on_has_no_break():
    assert breaks(([1], [2]), ([1, 2, 3], [4]), vocabulary=Letters()) == []


def test_the_same_text_with_other_ids_is_retokenised():
    calls = (([1, 5], [1, 1, 2]), ([1, 5, 31, 2, 3], [4]))
    assert breaks(*calls, vocabulary=Letters()) == [(1, "retokenised", 2, 1, 31)]
    assert breaks(*calls) == [(1, "other", 2, 1, 31)], "without a tokenizer nobody knows"


def test_a_special_token_that_differs_is_the_templates():
    calls = (([1, 91], [90, 2]), ([1, 91, 2, 3], [4]))
    assert breaks(*calls, vocabulary=Letters()) == [(1, "template", 2, 90, 2)]


def test_another_text_is_other():
    calls = (([1, 5], [2]), ([1, 5, 3], [4]))
    assert breaks(*calls, vocabulary=Letters()) == [(1, "other", 2, 2, 3)]


def test_the_nearest_row_is_the_one_that_is_compared():
    calls = (([1, 2], [3]), ([7], [8]), ([1, 2, 9], [4]))
    assert breaks(*calls, vocabulary=Letters())[1] == (2, "other", 2, 3, 9)


def test_a_second_observation_after_one_context_is_a_branch():
    calls = (([1], [2]), ([1, 2, 3], [4]), ([1, 2, 5], [6]))
    assert breaks(*calls, vocabulary=Letters()) == [(2, "branch", 2, 3, 5)]


def test_a_retokenised_answer_after_a_shared_context_is_no_branch():
    calls = (([1], [2]), ([1, 2, 3], [1, 1]), ([1, 2, 3, 31, 5], [6]))
    assert breaks(*calls, vocabulary=Letters()) == [(2, "retokenised", 3, 1, 31)]


def test_a_call_that_is_made_again_is_a_branch_without_a_difference():
    assert breaks(([1], [2]), ([1], [2])) == [(1, "branch", None, None, None)]


def test_breaks_are_counted_by_kind():
    table = make_triplets({"index": 0, "group": 0}, {"index": 0, "group": 0, "call_index": 1})
    counts = count_breaks(build_batch(table, SETTINGS).breaks)
    assert counts == {"branch": 1, "template": 0, "retokenised": 0, "other": 0}


def test_a_policys_tokenizer_says_which_tokens_are_special():
    folder = Path(agent.__file__).parent / "policy"
    found = find_vocabulary(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert found is not None
    assert found.is_special(2)
    ids = tokenizer.encode("12", add_special_tokens=False).ids
    assert not any(map(found.is_special, ids))
    assert found.decode([2, *ids]) == "<|end|>12"


def test_a_folder_without_a_tokenizer_gives_none(tmp_path):
    assert find_vocabulary(tmp_path) is None


def test_a_broken_tokenizer_is_an_error():
    with pytest.raises(ConfigError, match=r"this is no tokenizer\.json"):
        TokenizerVocabulary.from_json("{}")
