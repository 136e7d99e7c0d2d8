"""What every agent here is asked to do, and where it is told that its model is."""

import json
import sys
from collections.abc import Iterable
from typing import NamedTuple

QUESTION = "What is 12+34?"


class Model(NamedTuple):
    """The model that an agent asks, and whether it asks for streams."""

    base_url: str
    api_key: str
    name: str
    stream: bool


def model_of_arguments() -> Model:
    """Return what the command line names: base URL, key, model, `plain` or `stream`."""
    base_url, api_key, name, how = sys.argv[1:]
    return Model(base_url, api_key, name, how == "stream")


def finish(pieces: Iterable[str]) -> None:
    """Print the agent's answer, in the pieces in which it came."""
    json.dump(list(pieces), sys.stdout)
