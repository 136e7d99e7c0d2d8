"""Logging for entry points: scripts, notebooks, command lines. Nothing is configured at import.

Only the loggers of this package (and those named) get handlers; the root logger is left alone.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from agl_core.errors import ConfigError

PACKAGE = "agl_core"
DEFAULT_FORMAT = "%(asctime)s [%(levelname)s] (%(process)d) %(name)s: %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"

Level = int | str


def setup(
    level: Level = "INFO",
    *,
    console: bool = True,
    color: bool = True,
    propagate: bool = False,
    capture_warnings: bool = False,
    submodule_levels: Mapping[str, Level] | None = None,
    extra_handlers: Sequence[logging.Handler] = (),
    formatter: logging.Formatter | None = None,
    apply_to: Sequence[str] = (),
    files: str | Path | Mapping[str, str | Path] | None = None,
    disable_existing_loggers: bool = False,
) -> logging.Logger:
    """Let the package log, and return its logger; a second call replaces what the first one set up.

    Args:
        level: Of the package, and of `apply_to`.
        console: Whether lines go to stderr.
        color: Whether they are coloured where stderr is a terminal.
        propagate: Whether handlers of the root logger get the lines too.
        capture_warnings: Whether Python's warnings are logged (as `py.warnings`, handled alike).
        submodule_levels: Other levels, by logger.
        extra_handlers: Further handlers, as they are.
        formatter: Instead of `DEFAULT_FORMAT`; not for `extra_handlers`.
        apply_to: Other loggers to set up alike.
        files: A file for all of these loggers, or one for each logger named; appended to.
        disable_existing_loggers: Whether loggers that exist already and are not set up here, nor
            below one that is, write nothing from now on.
    """
    names = [PACKAGE, *apply_to]
    if capture_warnings:
        logging.captureWarnings(True)
        names.append("py.warnings")
    by_logger = files if isinstance(files, Mapping) else {}
    shared = files if isinstance(files, str | Path) else None
    for name in dict.fromkeys([*names, *by_logger]):
        is_ours = name in names
        setup_module(
            level if is_ours else logging.NOTSET,
            name=name,
            console=console and is_ours,
            color=color,
            propagate=propagate if is_ours else True,
            extra_handlers=extra_handlers if is_ours else (),
            formatter=formatter,
            file=by_logger.get(name, shared),
        )
    for name, other in (submodule_levels or {}).items():
        logging.getLogger(name).setLevel(_number(other))
    if disable_existing_loggers:
        _disable_others([*names, *by_logger, *(submodule_levels or {})])
    return logging.getLogger(PACKAGE)


def setup_module(
    level: Level = "INFO",
    *,
    name: str = PACKAGE,
    console: bool = True,
    color: bool = True,
    propagate: bool = False,
    extra_handlers: Sequence[logging.Handler] = (),
    formatter: logging.Formatter | None = None,
    file: str | Path | None = None,
    disable_existing_loggers: bool = False,
) -> logging.Logger:
    """Set one logger up and return it; a second call replaces what the first one set up.

    Args:
        level: Of the logger.
        name: Of the logger.
        console: Whether lines go to stderr.
        color: Whether they are coloured where stderr is a terminal.
        propagate: Whether handlers of the loggers above get the lines too.
        extra_handlers: Further handlers, as they are.
        formatter: Instead of `DEFAULT_FORMAT`; not for `extra_handlers`.
        file: Where lines are appended.
        disable_existing_loggers: Whether loggers that are there already write nothing from now on,
            but for this one and those below it.
    """
    formatter = formatter or logging.Formatter(DEFAULT_FORMAT, DATE_FORMAT)
    handlers: list[logging.Handler] = []
    if console:
        handlers.append(_console_handler(color, formatter))
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file, encoding="utf-8", delay=True))
        handlers[-1].setFormatter(formatter)
    logger = logging.getLogger(name)
    logger.setLevel(_number(level))
    logger.propagate = propagate
    for old in [handler for handler in logger.handlers if getattr(handler, _OURS, False)]:
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        setattr(handler, _OURS, True)
    for handler in [*handlers, *extra_handlers]:
        logger.addHandler(handler)
    if disable_existing_loggers:
        _disable_others([name])
    return logger


def _disable_others(names: Sequence[str]) -> None:
    """Disable the loggers that are neither named nor below a named one."""
    for other, logger in list(logging.root.manager.loggerDict.items()):
        is_kept = any(other == name or other.startswith(f"{name}.") for name in names)
        if isinstance(logger, logging.Logger) and not is_kept:
            logger.disabled = True


_OURS = "_set_up_by_agl_core"


def _console_handler(color: bool, formatter: logging.Formatter) -> logging.Handler:
    if color:
        from rich.console import Console
        from rich.logging import RichHandler

        console = Console(stderr=True)
        if console.is_terminal:
            return RichHandler(console=console, log_time_format=DATE_FORMAT)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    return handler


def _number(level: Level) -> int:
    """Return a level as a number; its name may be in lower case.

    Raises:
        ConfigError: There is no level of that name.
    """
    if isinstance(level, int):
        return level
    known = logging.getLevelNamesMapping()
    if level.upper() not in known:
        raise ConfigError(f"Invalid log level: {level}; there are {', '.join(known)}")
    return known[level.upper()]


def configure_logger(level: Level = logging.INFO, name: str = PACKAGE) -> logging.Logger:
    """Let a logger write plain lines to stderr, and return it.

    Deprecated: call `setup`.
    """
    warnings.warn("configure_logger is deprecated; call setup", DeprecationWarning, stacklevel=2)
    return setup_module(level, name=name, color=False)


setup_logging = setup
setup_module_logging = setup_module
"""Names at the top level of the package."""
