import logging
import sys
import warnings

import pytest

from agl_core import logging as agl_logging  # pytest runs a setup_module in a test module
from agl_core.logging import configure_logger, setup


@pytest.fixture(autouse=True)
def _loggers_as_before():
    names = ("agl_core", "agl_core.store", "py.warnings", "other")
    before = {
        name: (log.level, log.propagate, list(log.handlers))
        for name in names
        if (log := logging.getLogger(name))
    }
    yield
    logging.captureWarnings(False)
    for name, (level, propagate, handlers) in before.items():
        log = logging.getLogger(name)
        for handler in set(log.handlers) - set(handlers):
            log.removeHandler(handler)
            handler.close()
        log.setLevel(level)
        log.propagate = propagate


def test_lines_go_to_stderr_in_the_default_format(capsys):
    logger = setup("INFO")
    logging.getLogger("agl_core.store").info("hello %d", 1)
    logging.getLogger("agl_core.store").debug("too quiet")
    lines = capsys.readouterr().err.splitlines()
    assert logger.name == "agl_core"
    assert len(lines) == 1
    assert lines[0].endswith("agl_core.store: hello 1")
    assert "[INFO]" in lines[0]


def test_a_second_call_replaces_the_first(capsys):
    mine = logging.NullHandler()
    logging.getLogger("agl_core").addHandler(mine)
    setup()
    setup("DEBUG").debug("once")
    assert capsys.readouterr().err.count("once") == 1
    assert mine in logging.getLogger("agl_core").handlers


def test_a_file_for_all_or_one_for_each_logger(tmp_path):
    setup(console=False, files=tmp_path / "all.log", apply_to=["other"])
    logging.getLogger("other").info("first")
    setup(console=False, files={"agl_core.store": str(tmp_path / "deep" / "store.log")})
    logging.getLogger("agl_core.store").info("second")
    assert "other: first" in (tmp_path / "all.log").read_text()
    assert "agl_core.store: second" in (tmp_path / "deep" / "store.log").read_text()
    assert "second" not in (tmp_path / "all.log").read_text()


def test_levels_handlers_and_formats_can_be_given(capsys):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    setup(
        submodule_levels={"agl_core.store": "ERROR"},
        extra_handlers=[handler],
        formatter=logging.Formatter("<%(message)s>"),
    )
    logging.getLogger("agl_core.store").warning("quiet")
    logging.getLogger("agl_core").warning("loud")
    assert capsys.readouterr().err == "<loud>\n"
    assert [record.getMessage() for record in records] == ["loud"]


def test_warnings_are_logged_on_request(capsys):
    setup(capture_warnings=True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", UserWarning, stacklevel=1)
    assert "py.warnings" in capsys.readouterr().err


def test_a_terminal_gets_colours(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    (handler,) = agl_logging.setup_module(name="other").handlers
    assert type(handler).__name__ == "RichHandler"


def test_the_old_name_says_what_to_call(capsys):
    with pytest.deprecated_call(match="call setup"):
        logger = configure_logger("WARNING", "other")
    logger.warning("hello")
    assert "other: hello" in capsys.readouterr().err


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="LOUD"):
        setup("LOUD")


def test_other_loggers_are_disabled_where_that_is_asked_for():
    other, ours = logging.getLogger("someone.else"), logging.getLogger("agl_core.some_module")
    try:
        setup(disable_existing_loggers=False)
        assert not other.disabled
        setup(disable_existing_loggers=True)
        assert other.disabled
        assert not ours.disabled
    finally:
        for logger in list(logging.root.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger):
                logger.disabled = False
