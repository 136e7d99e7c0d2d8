"""A function is an algorithm: a trainer's parts go to its parameters by name."""

import inspect
import pickle

import pytest

from agl_core.adapter.triplet import TracerTraceToTriplet
from agl_core.algorithm.decorator import FunctionalAlgorithm, algo
from agl_core.errors import ConfigError
from agl_core.store import InMemoryLightningStore
from agl_core.types.resources import PromptTemplate


@algo
def at_module_level(train_dataset=None):
    return train_dataset


async def test_an_async_function_gets_what_it_names():
    @algo
    async def run(store, train_dataset, adapter, initial_resources, llm_proxy):
        """Keeps its name."""
        return store, train_dataset, adapter, initial_resources, llm_proxy

    store, adapter = InMemoryLightningStore(), TracerTraceToTriplet()
    resources = {"p": PromptTemplate(template="x")}
    run.set_store(store)
    run.set_adapter(adapter)
    run.set_initial_resources(resources)
    assert run.is_async()
    assert await run.run(train_dataset=[1]) == (store, [1], adapter, resources, None)
    assert next(iter(inspect.signature(run).parameters)) == "store"
    assert (run.__name__, run.__doc__) == ("run", "Keeps its name.")


def test_a_function_that_is_not_async_stays_callable():
    assert at_module_level([3]) == [3]
    assert not at_module_level.is_async()
    assert at_module_level.run(train_dataset=[1, 2]) == [1, 2]
    assert algo(at_module_level) is at_module_level


def test_a_dataset_that_it_does_not_take_is_refused():
    with pytest.raises(TypeError, match="val_dataset is provided but not supported"):
        at_module_level.run(train_dataset=[1], val_dataset=[2])


def test_a_store_that_is_not_set_is_an_error():
    @algo
    def run(store):
        return store

    with pytest.raises(ValueError, match="no store is set"):
        run.run()


def test_a_parameter_that_nothing_is_given_for_is_refused():
    with pytest.raises(ConfigError, match="nothing is known to give for its parameter 'epochs'"):
        algo(lambda store, epochs: None)
    assert isinstance(algo(lambda store, epochs=3, **more: None), FunctionalAlgorithm)


def test_it_travels_by_name():
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level
