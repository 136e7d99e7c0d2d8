"""The notebook of the examples, run as Jupyter runs it."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from agl_core.ledger.run import open_run
from agl_core.ledger.verify import verify_run

NOTEBOOK = Path("examples/calculator/notebook.ipynb")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_trains_the_calculator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path.cwd())]))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(cwd=str(tmp_path))
    (run,) = (tmp_path / ".agl/ledger/runs").iterdir()
    ledger = open_run(str(tmp_path / ".agl/ledger"), run.name)
    assert verify_run(ledger) == []
    first, *_, last = ledger.manifests()
    assert (last.iteration, last.coverage.trained) == (3, 64)
    assert last.rewards.mean_reward > first.rewards.mean_reward
