"""Learning by VERL: its own Hydra configuration, estimators, losses and `TrainingWorker`.

`algorithm.VERL` is the class that users name. `config` composes VERL's configuration and `keys`
says which of its keys are honoured; both load without torch. `batch` turns rows into VERL's
tensors, `worker` drives the update, and `platform_cpu` lets both run where there is no GPU; these
three load torch and VERL (about 12 s).
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from agl_core.errors import ConfigError

if TYPE_CHECKING:  # it imports this package
    from agl_core.algorithm.verl.algorithm import VERL

__all__ = ["VERL", "check_installed"]


def __getattr__(name: str) -> Any:
    if name == "VERL":  # Agent Lightning's path
        return import_module("agl_core.algorithm.verl.algorithm").VERL
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def check_installed() -> None:
    """Return if VERL is there.

    Raises:
        ConfigError: This package was installed without its extra `train`.
    """
    if find_spec("verl") is None:
        raise ConfigError(
            "training by VERL needs the extra 'train' of this package, which is not installed "
            "here: pip install '.[train]' in the project's folder"
        )
