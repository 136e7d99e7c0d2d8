"""What algorithms over a store are written with."""

from collections import Counter
from itertools import islice

import pytest

from agl_core.algorithm.base import Algorithm
from agl_core.algorithm.utils import batch_iter_over_dataset, with_llm_proxy, with_store
from agl_core.errors import ConfigError
from agl_core.llm_proxy import LLMProxy
from agl_core.store import InMemoryLightningStore
from tests.fakes import ScriptedModelServer


class Both(Algorithm):
    @with_store
    async def stored(self, store, word):
        return store, word

    @with_store
    def stored_now(self, store):
        return store

    @with_llm_proxy()
    @with_store
    async def proxied(self, store, llm_proxy, word):
        return store, llm_proxy is not None and llm_proxy.is_running(), word

    @with_llm_proxy(required=True)
    async def needs(self, llm_proxy):
        return llm_proxy

    @with_llm_proxy(auto_start=False)
    async def as_it_is(self, llm_proxy):
        return llm_proxy.is_running()


async def test_the_store_is_the_first_argument():
    algorithm, store = Both(), InMemoryLightningStore()
    with pytest.raises(ValueError, match="no store is set"):
        await algorithm.stored("x")
    algorithm.set_store(store)
    assert await algorithm.stored("x") == (store, "x")
    assert algorithm.stored_now() is store


async def test_the_proxy_runs_while_the_method_does():
    algorithm, store = Both(), InMemoryLightningStore()
    algorithm.set_store(store)
    with ScriptedModelServer() as server:
        model = {"model": "openai/m", "api_base": server.base_url}
        proxy = LLMProxy(model_list=[{"model_name": "m", "litellm_params": model}], store=store)
        algorithm.set_llm_proxy(proxy)
        assert await algorithm.proxied("x") == (store, True, "x")
        assert not proxy.is_running()
        assert await algorithm.as_it_is() is False
        await proxy.start()
        assert await algorithm.proxied("x") == (store, True, "x")
        assert proxy.is_running(), "who started it stops it"
        await proxy.stop()


async def test_a_method_may_do_without_a_proxy_or_need_one():
    algorithm = Both()
    algorithm.set_store(InMemoryLightningStore())
    assert (await algorithm.proxied("x"))[1] is False
    with pytest.raises(ValueError, match="Both needs an LLMProxy"):
        await algorithm.needs()


def test_a_method_that_is_not_async_cannot_have_a_proxy():
    with pytest.raises(TypeError, match="for async methods"):
        with_llm_proxy()(lambda self, llm_proxy: None)


def test_each_pass_has_each_row_once_in_another_order():
    batches = list(islice(batch_iter_over_dataset(range(5), 3, seed=1), 10))
    rows = [row for batch in batches for row in batch]
    assert all(len(batch) == 3 for batch in batches)
    passes = [rows[start : start + 5] for start in range(0, 30, 5)]
    assert all(Counter(one) == Counter(range(5)) for one in passes)
    assert len({tuple(one) for one in passes}) > 1
    again = islice(batch_iter_over_dataset(range(5), 3, seed=1), 10)
    assert list(again) == batches


@pytest.mark.parametrize(("size", "batch_size"), [(5, 2), (5, 3), (5, 4), (7, 5)])
def test_no_row_comes_twice_in_a_batch_or_in_a_pass(size: int, batch_size: int):
    batches = list(islice(batch_iter_over_dataset(range(size), batch_size, seed=3), 50 * size))
    assert all(len(set(batch)) == batch_size for batch in batches)
    taken = [row for batch in batches for row in batch]
    passes = [taken[start : start + size] for start in range(0, len(taken), size)]
    assert all(sorted(one) == list(range(size)) for one in passes)


def test_a_small_dataset_is_each_batch_as_a_whole():
    assert list(islice(batch_iter_over_dataset("abc", 3), 2)) == [["a", "b", "c"]] * 2


@pytest.mark.parametrize(("rows", "size", "why"), [([], 1, "no rows"), ([1], 0, "batch_size")])
def test_what_cannot_be_batched_is_refused(rows, size, why):
    with pytest.raises(ConfigError, match=why):
        batch_iter_over_dataset(rows, size)
