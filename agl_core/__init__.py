"""Agents, traces, rewards and learning: the library of the pipeline, without Prefect.

The public names stand in `__init__.pyi`. Each is imported when it is first used, so
`import agl_core` is quick and loads none of torch, verl, ray, transformers or prefect.
"""

from importlib.util import find_spec

import lazy_loader

_attached = lazy_loader.attach_stub(__name__, __file__)
if find_spec("verl") is None:  # without the extra `train`: `from agl_core import *` works
    _attached[2].remove("VERL")
__getattr__, __dir__, __all__ = _attached
