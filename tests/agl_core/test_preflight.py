import logging
from pathlib import Path

import pytest

from agl_core import identity
from agl_core.preflight import prepare_run
from deployments.cli import read_config
from tests.conftest import CALCULATOR


def test_a_manifest_will_name_the_code_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    config = read_config(CALCULATOR / "run.yaml", {"ledger": str(tmp_path)})
    first = prepare_run(config)
    assert first.record == first.ledger.record()
    assert not [r for r in caplog.records if r.name.startswith("agl_core")]

    code = {**first.record.code, "package_version": "0.0"}
    monkeypatch.setattr(identity, "code", lambda agent: code)
    monkeypatch.setattr(identity, "packages", lambda: {**first.record.packages, "torch": "0.1"})
    with caplog.at_level(logging.WARNING):
        again = prepare_run(config)
    assert again.record.code["package_version"] == "0.0"
    assert again.record.packages["torch"] == "0.1"
    assert again.ledger.record() == first.record, "the run's own record stays"
    assert "package_version was" in caplog.text
    assert "torch was" in caplog.text
