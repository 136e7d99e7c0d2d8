"""Agents, traces, rewards and learning: the library of the pipeline, without Prefect.

The public names stand in `__init__.pyi`. Each is imported when it is first used, so
`import agl_core` is quick and loads none of torch, verl, ray, transformers or prefect.
"""

from importlib.util import find_spec

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
if find_spec("verl") is None:  # without the extra `train`: `from agl_core import *` works
    __all__ = [name for name in __all__ if name != "VERL"]
