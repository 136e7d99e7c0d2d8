"""How a critic's model is loaded: a language model whose output layer gives one value a token.

VERL asks for flash attention there, whatever the configuration says, and has no seed for the new
layer. Both are put right while a critic is built.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from agl_core.algorithm.verl.platform_cpu import quiet_imports

with quiet_imports():
    from transformers import AutoModelForTokenClassification
    from transformers.utils import logging as transformers_logging
    from verl.utils import model as verl_model


@contextmanager
def value_head(seed: int) -> Generator[None]:
    """Let VERL load critics with the attention of their configuration and a seeded output layer.

    Torch's random state is as before afterwards.
    """

    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        with torch.random.fork_rng(), _no_report():
            torch.manual_seed(seed)
            return AutoModelForTokenClassification.from_pretrained(
                local_path,
                dtype=torch_dtype,
                config=model_config,
                trust_remote_code=trust_remote_code,
            )

    original = verl_model.load_valuehead_model
    verl_model.load_valuehead_model = load
    try:
        yield
    finally:
        verl_model.load_valuehead_model = original


@contextmanager
def _no_report() -> Generator[None]:
    """Keep back transformers' report that the output layer is new, which it is meant to be."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
