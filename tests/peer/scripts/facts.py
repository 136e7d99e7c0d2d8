"""What the scripts say their results with."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def fails(call: Callable[[], object], kind: type[BaseException], *words: str) -> str:
    """Return the kind of error and the words, if a call raises that kind and says those words."""
    try:
        result = call()
    except kind as error:
        missing = [word for word in words if word.lower() not in str(error).lower()]
        said = f" without {missing}: {error}" if missing else " " + " ".join(words)
        return kind.__name__ + said.rstrip()
    except BaseException as error:  # noqa: BLE001 - a fact like any other
        return f"{type(error).__name__}: {error}"
    return f"returned {type(result).__name__}"


async def fails_async(call: Callable[[], Any], kind: type[BaseException], *words: str) -> str:
    """The same of an async call."""
    try:
        result = await call()
    except BaseException as error:  # noqa: BLE001 - a fact like any other
        raised = error
        return fails(lambda: _raise(raised), kind, *words)
    return f"returned {type(result).__name__}"


def _raise(error: BaseException) -> None:
    raise error


def own(spans: Iterable[Any]) -> list[Any]:
    """Return the spans without the root that our tracer gives each attempt."""
    return [span for span in spans if span.name != "agentlightning.rollout"]


def names(spans: Iterable[Any]) -> list[str]:
    """Return the names of the spans that are not the root, in order."""
    return [span.name for span in own(spans)]


def keys(spans: Iterable[Any]) -> list[list[str]]:
    """Return the names of each span's attributes, without the root's."""
    return sorted(sorted(span.attributes or {}) for span in own(spans))


def answer(found: Mapping[str, Any]) -> None:
    """Print the results as the last line."""
    print("\n" + json.dumps(found, sort_keys=True), flush=True)
