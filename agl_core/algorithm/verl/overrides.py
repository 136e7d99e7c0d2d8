"""Settings as users write them, as one flat dict of dotted keys.

Three forms say the same::

    {"data": {"train_batch_size": 16}, "actor_rollout_ref.actor.optim.lr": 1e-6}
    "settings.yaml"                        # such a dict in a file
    ["data.train_batch_size=16", "actor_rollout_ref.actor.optim.lr=1e-6"]  # as VERL is started
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException

from agl_core.errors import ConfigError
from agl_core.text_formats import read_yaml

Overrides = Mapping[str, Any] | Sequence[str] | str | Path
"""A dict, nested or dotted or both; the path of a YAML file; or command-line overrides."""


def normalise(overrides: Overrides) -> dict[str, Any]:
    """Return the settings as one flat dict of dotted keys.

    Raises:
        ConfigError: A key is not a name, or is set twice by different spellings; the file cannot be
            read; or an override is not in Hydra's grammar.
    """
    if isinstance(overrides, str | Path):
        return normalise(_read(Path(overrides)))
    if not isinstance(overrides, Mapping):
        return parse_overrides(overrides)
    flat: dict[str, Any] = {}

    def walk(prefix: str, node: Mapping[str, Any]) -> None:
        for name, value in node.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(f"VERL config: key {name!r} below {prefix!r} is not a name")
            key = prefix + name
            if isinstance(value, Mapping) and value:
                walk(key + ".", value)
            elif key in flat:
                raise ConfigError(f"VERL config: {key} is set twice")
            else:
                flat[key] = value

    walk("", overrides)
    return flat


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Return `key=value` texts as a flat dict of dotted keys; the last one of a key decides.

    The grammar is Hydra's: `a.b=[1,2]`, `a.b='some text'`, `a.b=null`, and `+a.b=1` or `++a.b=1`
    for a key that an open mapping, such as `engine_kwargs.vllm`, does not have yet.

    Raises:
        ConfigError: A text is not in this grammar, deletes a key, or asks for a sweep.
    """
    flat: dict[str, Any] = {}
    try:
        parsed = OverridesParser.create().parse_overrides(list(texts))
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"VERL config: not an override of the form key=value: {reason}"
        ) from error
    for override in parsed:
        text = override.input_line
        if override.type is OverrideType.DEL:
            raise ConfigError(f"VERL config: {text}: keys cannot be deleted")
        if override.is_sweep_override():
            raise ConfigError(f"VERL config: {text}: several values; write a list as [a,b]")
        key, value = override.key_or_group, override.value()
        for name, item in normalise({key: value}).items():
            flat[name] = item
    return flat


def _read(path: Path) -> Mapping[str, Any]:
    content = read_yaml(path, f"VERL config: {path}")
    if not isinstance(content, Mapping):
        raise ConfigError(f"VERL config: {path} holds no mapping of settings")
    return content
