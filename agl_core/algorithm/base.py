"""What a trainer runs beside its runners: a program over a store.

An algorithm publishes resources, enqueues rollouts, waits for them and reads their spans. It meets
runners only in the store, so it does not know whether they are threads or other machines.
"""

import inspect
import weakref
from typing import TYPE_CHECKING, Any

from agl_core.adapter.base import TraceAdapter
from agl_core.store.base import LightningStore
from agl_core.types.core import Dataset
from agl_core.types.resources import NamedResources

if TYPE_CHECKING:  # only named
    from agl_core.llm_proxy.proxy import LLMProxy


class Algorithm:
    """Overrides `run`; a trainer sets the rest before it calls that.

    The trainer, the adapter and the proxy are held weakly: they are the trainer's.
    """

    _trainer: "weakref.ref[Any] | None" = None
    _adapter: "weakref.ref[TraceAdapter[Any]] | None" = None
    _llm_proxy: "weakref.ref[LLMProxy] | None" = None
    _store: LightningStore | None = None
    _initial_resources: NamedResources | None = None

    def set_trainer(self, trainer: Any) -> None:
        """Say which trainer runs the algorithm."""
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """Return the trainer.

        Raises:
            ValueError: None is set, or it is gone.
        """
        return _alive(self._trainer, "trainer")

    def set_adapter(self, adapter: TraceAdapter[Any]) -> None:
        """Say what turns spans into what the algorithm learns from."""
        self._adapter = weakref.ref(adapter)

    def get_adapter(self) -> TraceAdapter[Any]:
        """Return the adapter.

        Raises:
            ValueError: None is set, or it is gone.
        """
        return _alive(self._adapter, "adapter")

    def find_adapter(self) -> TraceAdapter[Any] | None:
        """Return the adapter, or None where none is set.

        Raises:
            ValueError: It is gone.
        """
        return None if self._adapter is None else self.get_adapter()

    def set_llm_proxy(self, llm_proxy: "LLMProxy | None") -> None:
        """Say which proxy agents call through; None for none."""
        self._llm_proxy = None if llm_proxy is None else weakref.ref(llm_proxy)

    def get_llm_proxy(self) -> "LLMProxy | None":
        """Return the proxy, or None where there is none.

        Raises:
            ValueError: It is gone.
        """
        return None if self._llm_proxy is None else _alive(self._llm_proxy, "llm_proxy")

    def set_store(self, store: LightningStore) -> None:
        """Say where rollouts are enqueued and spans are read."""
        self._store = store

    def get_store(self) -> LightningStore:
        """Return the store.

        Raises:
            ValueError: None is set.
        """
        if self._store is None:
            raise ValueError(
                "Store has not been set for this algorithm: no store is set; run "
                "the algorithm by a Trainer, or call set_store"
            )
        return self._store

    def set_initial_resources(self, resources: NamedResources) -> None:
        """Say what the first rollouts are given."""
        self._initial_resources = resources

    def get_initial_resources(self) -> NamedResources | None:
        """Return what the first rollouts are given, or None."""
        return self._initial_resources

    def is_async(self) -> bool:
        """Tell whether `run` is to be awaited."""
        return inspect.iscoroutinefunction(self.run)

    def run(
        self,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
    ) -> Any:
        """Run to the end; a coroutine function or not.

        Args:
            train_dataset: Inputs to learn from.
            val_dataset: Inputs to score with.
        """
        raise NotImplementedError(
            f"Subclasses must implement run(): {type(self).__name__} does not implement run()"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `run`."""
        return self.run(*args, **kwargs)


_SAID = {"trainer": "Trainer", "llm_proxy": "LLM proxy", "adapter": "Adapter"}


def _alive(reference: "weakref.ref[Any] | None", what: str) -> Any:
    found = None if reference is None else reference()
    if found is None:
        gone = "is not set" if reference is None else "is gone; keep a reference to it"
        said = (
            "has not been set for this algorithm"
            if reference is None
            else "reference is no longer valid (object has been garbage collected)"
        )
        raise ValueError(f"{_SAID[what]} {said}: the algorithm's {what} {gone}")
    return found
