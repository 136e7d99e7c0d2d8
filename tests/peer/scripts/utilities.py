"""Batches of a dataset, components that cannot be built, strategies that are refused, settings."""

import collections
import importlib
import itertools
import logging
import os
import sys
from typing import Any

from facts import answer, fails

agl: Any = importlib.import_module(sys.argv[1])
utils: Any = importlib.import_module(f"{agl.__name__}.algorithm.utils")
logging.disable(logging.CRITICAL)
HOME = agl.__name__


def batches(size: int, batch_size: int, count: int) -> list[list[int]]:
    rows = list(range(size))
    return [
        list(batch)
        for batch in itertools.islice(utils.batch_iter_over_dataset(rows, batch_size), count)
    ]


def build(spec: Any, **options: Any) -> Any:
    return agl.build_component(spec, expected_type=agl.Tracer, spec_name="tracer", **options)


def shown(found: Any) -> str:
    return type(found).__name__


passes = batches(6, 2, 6)
uneven = batches(5, 2, 500)  # 200 passes
counts = collections.Counter(itertools.chain(*uneven))
path = f"{HOME}.tracer.otel.OtelTracer"
memory = f"{HOME}.store.memory.InMemoryLightningStore"
registry = {"otel": path}
tracer = agl.OtelTracer()
env = agl.LightningEnvVar
os.environ |= {"AGL_SERVER_PORT": "4321", "AGL_MANAGED_STORE": "off", "AGL_CURRENT_ROLE": "runner"}
found = {
    "a pass has each row once": [sorted(itertools.chain(*passes[i : i + 3])) for i in (0, 3)],
    "200 passes have each row 200 times": set(counts.values()) == {200},
    "a batch has no row twice": all(len(set(batch)) == len(batch) for batch in uneven),
    "sizes": sorted({len(batch) for batch in uneven}),
    "larger than the dataset": [sorted(batch) for batch in batches(3, 4, 2)],
    "as large": [sorted(batch) for batch in batches(3, 3, 2)],
    "as large, shuffled": any(batch != list(range(50)) for batch in batches(50, 50, 2)),
    "instance": build(tracer) is tracer,
    "class": shown(build(agl.OtelTracer)),
    "factory": shown(build(lambda: tracer)),
    "path": shown(build(path)),
    "name": shown(build("otel", registry=registry)),
    "dict": shown(build({"type": path})),
    "dict with name": shown(build({"name": "otel"}, registry=registry)),
    "default": shown(build(None, default_factory=agl.OtelTracer)),
    "nothing": build(None, allow_none=True),
    "none": fails(lambda: build(None), ValueError, "tracer"),
    "number": fails(lambda: build(3), ValueError, "tracer"),
    "other type": fails(lambda: build(lambda: 3), TypeError, "tracer"),
    "other class": fails(lambda: build(memory), TypeError, "tracer"),
    "dict without type": fails(lambda: build({"a": 1}), ValueError, "type"),
    "no such module": fails(lambda: build("no_such_module.Tracer"), Exception),
    "no such class": fails(lambda: build(f"{HOME}.tracer.otel.Nothing"), Exception),
    "no such argument": fails(lambda: build({"type": path, "nothing": 1}), Exception),
    "no such name": fails(lambda: build("nothing", registry=registry), ValueError),
    "strategy": fails(lambda: agl.Trainer(tracer=tracer, strategy=3), ValueError, "strategy"),
    "adapter": fails(lambda: agl.Trainer(tracer=tracer, adapter=3), ValueError, "adapter"),
    "role": fails(lambda: agl.ClientServerExecutionStrategy(role="boss"), ValueError, "role"),
    "two in the main process": fails(
        lambda: agl.ClientServerExecutionStrategy(role="both", main_process="runner", n_runners=2),
        ValueError,
        "runner",
    ),
    "two in the main thread": fails(
        lambda: agl.SharedMemoryExecutionStrategy(n_runners=2, main_thread="runner"),
        ValueError,
        "runner",
    ),
    "by the environment": [
        (strategy := agl.ClientServerExecutionStrategy()).server_port,
        strategy.managed_store,
        strategy.role,
    ],
    "argument first": agl.ClientServerExecutionStrategy(server_port=99, role="algorithm").role,
    "bool": [agl.resolve_bool_env_var(env.AGL_MANAGED_STORE, fallback=True)],
    "int": agl.resolve_int_env_var(env.AGL_SERVER_PORT),
    "str": agl.resolve_str_env_var(env.AGL_SERVER_HOST, fallback="here"),
    "override": agl.resolve_int_env_var(env.AGL_SERVER_PORT, override=5),
}
os.environ |= {"AGL_SERVER_PORT": "many", "AGL_MANAGED_STORE": "perhaps"}
found |= {
    "no number": fails(
        lambda: agl.resolve_int_env_var(env.AGL_SERVER_PORT), ValueError, "AGL_SERVER_PORT"
    ),
    "no truth": fails(
        lambda: agl.resolve_bool_env_var(env.AGL_MANAGED_STORE), ValueError, "AGL_MANAGED_STORE"
    ),
    "template": agl.PromptTemplate(template="a {b}", engine="f-string").format(b="c"),
}
event = agl.ThreadingEvent()
event.set()
found["event"] = [event.is_set(), event.wait(0.01), event.clear(), event.is_set()]
answer(found)
