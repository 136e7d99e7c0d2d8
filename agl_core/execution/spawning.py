"""Whether a bundle can travel to a spawned process; told before anything starts."""

import dataclasses
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from agl_core.errors import ConfigError


def check_picklable(bundle: Any) -> None:
    """Check that a bundle can be pickled, and loaded by another process.

    Raises:
        ConfigError: Some part of it cannot; the message names it.
    """
    for name, part in _parts(bundle).items():
        try:
            text = pickle.dumps(part)
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be sent to a spawned process ({type(error).__name__}: {error}); "
                "define it at the level of a module, or use start_method='fork'"
            ) from error
        if b"__main__" in text and not hasattr(sys.modules["__main__"], "__file__"):
            raise ConfigError(
                f"{name} is defined in a notebook or an interactive session, where a spawned "
                "process cannot find it; put it in a module, or use start_method='fork'"
            )


def _parts(bundle: Any) -> Mapping[str, Any]:
    """Return the parts of a bundle by name; a bundle of another kind is one part."""
    if dataclasses.is_dataclass(bundle):
        return {field.name: getattr(bundle, field.name) for field in dataclasses.fields(bundle)}
    return {"the bundle": bundle}
