from multiprocessing import get_context

import pytest

from agl_core.execution import ExecutionEvent, MultiprocessingEvent, ThreadingEvent


def set_it(event: ExecutionEvent) -> None:
    event.set()


@pytest.mark.parametrize("event", [ThreadingEvent(), MultiprocessingEvent()], ids=["t", "mp"])
def test_an_event_is_a_flag(event: ExecutionEvent):
    assert not event.is_set()
    assert not event.wait(0.01)
    event.set()
    event.set()
    assert event.is_set()
    assert event.wait()
    event.clear()
    assert not event.is_set()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_event_is_seen_by_other_processes(method: str):
    context = get_context(method)
    event = MultiprocessingEvent(context)
    process = context.Process(target=set_it, args=(event,))
    process.start()
    assert event.wait(30)
    process.join()
    event.close()
