import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from agl_core.errors import ConfigError
from agl_core.ledger.run import RunLedger
from agl_core.ledger.storage import Storage
from agl_core.sources import local_sources, source_diff, source_digest
from tests.agl_core.ledger.test_run import make_record

FILES = {
    "local_agent/__init__.py": "",
    "local_agent/main.py": "import json\nimport prefect\nfrom agl_core import llm_proxy\n"
    "from . import rewards\nfrom my_tools import numbers as n\n",
    "local_agent/rewards.py": "def reward():\n    from local_agent.deep.exact import score\n",
    "local_agent/deep/exact.py": "import importlib\nimportlib.import_module('my_plugin')\n"
    "importlib.import_module('..near', __package__)\n"
    "from importlib import import_module as load\nload(name='.far', package='my_tools')\n"
    "load('....nowhere')\n",
    "local_agent/near.py": "",
    "my_tools/far.py": "",
    "local_agent/unused.py": "",
    "my_tools/numbers.py": "",
    "my_plugin.py": "import local_agent.main",
}
IMPORTED = sorted(set(FILES) - {"local_agent/unused.py"})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_all_that_an_agent_imports_of_its_project_is_found_without_executing_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(project))
    assert list(local_sources("local_agent.main")) == IMPORTED
    assert "my_plugin" not in sys.modules
    assert local_sources("agl_core.config") == local_sources("json") == {}
    assert local_sources("not_there") == {}


def test_a_script_is_found_as_main(project: Path):
    (project / "script.py").write_text(
        "import local_agent.rewards\nfrom agl_core.sources import local_sources\n"
        "print(*local_sources('__main__'))"
    )
    found = subprocess.run(
        [sys.executable, "script.py"],
        cwd=project,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "__main__.py" in found.stdout
    assert "local_agent/rewards.py" in found.stdout


BASE = 'def reward(x):\n    "Score x."\n    return x + 1\n'


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (
            '# twice\ndef reward( x ):\n    """Score\n    it."""\n\n    return (x + 1)  # x\n',
            1,
        ),
        ("def reward(x):\n    return x + 1\n", 1),
        (BASE.replace("1", "2"), 0),
        (BASE.replace("x):", "x, y=0):"), 0),
        ("def reward(x:\n", 0),
    ],
)
def test_comments_docstrings_and_formatting_do_not_matter(text: str, same: int):
    assert (source_digest(text.encode()) == source_digest(BASE.encode())) is bool(same)


def test_a_changed_helper_is_refused_with_its_difference_and_a_comment_is_not(
    local_storage: Storage,
):
    ledger = RunLedger(local_storage, "run")

    def start(**texts: str) -> None:
        new = {f"{name}.py": ledger.source(dedent(text).encode()) for name, text in texts.items()}
        sources = {name: file.ref for name, file in new.items()}
        record = make_record(ledger).model_copy(update={"sources": sources})
        ledger.start(record, list(new.values()))

    start(agent="import helper\n", helper=BASE)
    before = local_storage.list("")
    start(agent="import helper  # of ours\n", helper=BASE)
    with pytest.raises(ConfigError) as refused:
        start(agent="import helper\n", helper=BASE.replace("+ 1", "+ 2"))
    sentence, _, diff = str(refused.value).partition("\n")
    assert "the agent's helper.py changed" in sentence
    assert "sha256" not in sentence
    assert "-    return x + 1\n+    return x + 2" in diff
    with pytest.raises(ConfigError, match=r"the agent imports more\.py, which it did not"):
        start(agent="import helper\n", helper=BASE, more="x = 1\n")
    with pytest.raises(ConfigError, match=r"the agent's helper\.py is imported no more"):
        start(agent="import helper\n")
    assert local_storage.list("") == before

    # A shard reads them again, in a process of its own.
    record = ledger.record()
    ledger.check_sources(record, {"helper.py": f"{BASE}# twice\n".encode(), "more.py": b""})
    changed = {"helper.py": BASE.replace("+ 1", "+ 2").encode()}
    with pytest.raises(ConfigError, match=r"the agent's helper\.py is not the one") as refused:
        ledger.check_sources(record, changed)
    assert "-    return x + 1\n+    return x + 2" in str(refused.value)


def test_a_long_difference_is_cut():
    diff = source_diff("a.py", b"x = 1\n" * 90, b"y = 1\n" * 90)
    assert len(diff.splitlines()) == 21
    assert diff.endswith("more lines")
