"""Which iteration may be run by itself."""

import pytest

from agl_core.errors import ConfigError
from agl_core.ledger.run import RunLedger
from agl_core.ledger.storage import Storage
from tasks.context import _check_open


@pytest.fixture
def ledger(local_storage: Storage) -> RunLedger:
    """A run with one committed iteration."""
    found = RunLedger(local_storage, "run")
    local_storage.write_once(found.iteration(0).manifest_key, b"{}")
    return found


def test_a_committed_iteration_is_refused_and_what_can_be_done_is_named(ledger: RunLedger):
    with pytest.raises(ConfigError, match=r"is committed .* `agl ledger show run`, or start an"):
        _check_open(ledger, 0)


def test_the_next_iteration_may_run(ledger: RunLedger):
    _check_open(ledger, 1)


def test_an_iteration_whose_turn_has_not_come_is_refused(ledger: RunLedger):
    with pytest.raises(ConfigError, match="cannot run yet: iteration 1 is not committed"):
        _check_open(ledger, 2)
