"""An algorithm as a user writes it, in a module that any process can import."""

from typing import Any

from agl_core.algorithm.baseline import BaselineIterations, BaselineState
from agl_core.types.training import Proposal


class OddRows(BaselineIterations):
    """A user's own: asks for every second row."""

    def __init__(self, model: str, first: int = 1) -> None:
        super().__init__(model, batch_size=8, max_tokens=16)
        self._first = first

    def arguments(self) -> dict[str, Any]:
        return {"model": self.model_path, "first": self._first}

    def propose(self, state: BaselineState) -> Proposal:
        whole = super().propose(state)
        requests = tuple(r for r in whole.requests if r.row % 2 == self._first)
        return whole.model_copy(update={"requests": requests})

    def num_iterations(self, state: BaselineState) -> int:
        return 2
