"""Components from what a user gives for them, in five forms.

Trainer(tracer=OtelTracer())                                   an instance
Trainer(tracer=OtelTracer)                                     a class
Trainer(tracer=lambda: OtelTracer(instrument_openai=False))    a factory
Trainer(strategy="shm", tracer="my_package.tracing.MyTracer")  a registry's name, or a path
Trainer(strategy={"type": "cs", "n_runners": 4})               a dict
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agl_core.errors import ConfigError

T = TypeVar("T")

Registry = Mapping[str, str | type]


def load_class(path: str) -> Any:
    """Return what a dotted path names, a class for one.

    Args:
        path: `package.module.Class`; a colon before the class will do as well.

    Raises:
        ConfigError: There is no such module, or it has no such name.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name or not name:
        raise ConfigError(f"{path!r} is no path; expected 'package.module.Class'")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        package, _, rest = path.partition(".")
        hint = f"; write {f'agl_core.{rest}'!r}" if package == "agentlightning" else ""
        raise ConfigError(f"{path!r}: cannot import {module_name!r}: {error}{hint}") from error
    except AttributeError as error:
        raise ConfigError(f"{path!r}: module {module_name!r} has no {name!r}") from error


def instantiate_component(
    cls: Callable[..., T],
    provided_kwargs: Mapping[str, Any] | None = None,
    optional_defaults: Mapping[str, Any] | None = None,
) -> T:
    """Return an instance of a class.

    Args:
        cls: The class.
        provided_kwargs: Arguments; the class must know them.
        optional_defaults: Further ones, given where the class knows them and they are not among
            the others; a function is called for its value.

    Raises:
        ConfigError: The class does not know an argument that is provided.
    """
    kwargs = dict(provided_kwargs or {})
    parameters = inspect.signature(cls).parameters.values()
    names = {
        one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if not takes_any and (unknown := sorted(kwargs.keys() - names)):
        known = ", ".join(sorted(names)) or "none"
        raise ConfigError(f"{_name(cls)} has no argument {unknown[0]!r}; it has {known}")
    for name, value in (optional_defaults or {}).items():
        if name in names and name not in kwargs:
            kwargs[name] = value() if inspect.isfunction(value) else value
    return cls(**kwargs)


def instantiate_from_spec(
    spec: str | Mapping[str, Any],
    *,
    spec_name: str = "component",
    registry: Registry | None = None,
    optional_defaults: Mapping[str, Any] | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: type | None = None,
) -> Any:
    """Return a component from its name, its path, or a dict.

    Args:
        spec: A name of the registry or a dotted path; or a dict with that under "type" (a name also
            under "name"), and arguments.
        spec_name: What it is for, for messages.
        registry: Names and the paths of their classes.
        optional_defaults: See `instantiate_component`.
        dict_requires_type: Whether a dict must have a type; else `dict_default_cls` is meant.
        dict_default_cls: See there.

    Raises:
        ConfigError: The dict has no type, the path leads nowhere, or an argument is not known.
        TypeError: It is neither a text nor a dict.
    """
    if isinstance(spec, str):
        found, kwargs = _find(spec, spec_name, registry), {}
    elif not isinstance(spec, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{spec_name} spec must be a string or dict (got {type(spec).__name__})")
    else:
        kwargs = dict(spec)
        path = kwargs.pop("type", None)
        if path is None and registry is not None:
            path = kwargs.pop("name", None)
        if path is not None:
            found = path if isinstance(path, type) else _find(str(path), spec_name, registry)
        elif dict_default_cls is not None and not dict_requires_type:
            found = dict_default_cls
        elif not dict_requires_type:
            raise ConfigError(
                f"{spec_name} dict missing 'type' and no default class provided; got {dict(spec)!r}"
            )
        else:
            raise ConfigError(
                f"{spec_name} dict must have a 'type' key with the class full "
                f"name ({spec_name}: a dict needs a 'type', its class); got {dict(spec)!r}"
            )
    if isinstance(found, type) or (callable(found) and kwargs):
        return instantiate_component(found, kwargs, optional_defaults)
    if kwargs:
        raise ConfigError(f"{spec_name}: {spec!r} names no class, so it takes no arguments")
    return found


def build_component(
    spec: Any,
    *,
    expected_type: type[T],
    spec_name: str,
    default_factory: Callable[[], T] | None = None,
    allow_none: bool = False,
    optional_defaults: Mapping[str, Any] | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: type[T] | None = None,
    type_error_fmt: str | None = None,
    invalid_spec_error_fmt: str | None = None,
    registry: Registry | None = None,
) -> T | None:
    """Return a component from an instance, a class, a factory, a name or path, or a dict.

    Args:
        spec: What the user gave; None for the default.
        expected_type: What it has to be in the end.
        spec_name: What it is for, for messages.
        default_factory: Makes the default.
        allow_none: Whether None stays None where there is no default.
        optional_defaults: See `instantiate_component`.
        dict_requires_type: See `instantiate_from_spec`.
        dict_default_cls: The same.
        type_error_fmt: Of the message about a wrong type, with `{type_name}` and `{expected_type}`.
        invalid_spec_error_fmt: Of that about a spec of no known form, with `{actual_type}` and
            `{expected_type}`.
        registry: Names and the paths of their classes.

    Raises:
        TypeError: What came of it is of another type.
        ValueError: The spec is of no known form, or names what there is not.
    """
    if isinstance(spec, expected_type):
        return spec
    if spec is None:
        if default_factory is not None:
            return default_factory()
        if allow_none:
            return None
        text = f"{spec_name} cannot be None: {spec_name} is needed; give {_forms(expected_type)}"
        raise ConfigError(_no_form(invalid_spec_error_fmt or text, spec, expected_type))
    if isinstance(spec, str | Mapping):
        built: Any = instantiate_from_spec(
            spec,
            spec_name=spec_name,
            registry=registry,
            optional_defaults=optional_defaults,
            dict_requires_type=dict_requires_type,
            dict_default_cls=dict_default_cls,
        )
        is_factory = callable(built) and not isinstance(built, expected_type)
        built = built() if is_factory else built
    elif isinstance(spec, type) and issubclass(spec, expected_type):
        built = instantiate_component(spec, None, optional_defaults)
    elif callable(spec) and not isinstance(spec, type):
        built = spec()
    else:
        text = f"Invalid {spec_name} type: {{actual_type}}. Expected {{expected_type}}, str, dict, "
        text += f"or None: {spec_name} cannot be {{actual_type}}; give {_forms(expected_type)}"
        raise ConfigError(_no_form(invalid_spec_error_fmt or text, spec, expected_type))
    if not isinstance(built, expected_type):
        raise TypeError(_wrong_type(type_error_fmt, spec_name, type(built), expected_type))
    return built


def _find(name: str, spec_name: str, registry: Registry | None) -> Any:
    """Return what a registry's name or a path stands for."""
    found = (registry or {}).get(name, name)
    if not isinstance(found, str):
        return found
    if "." not in found.replace(":", "."):
        known = f"{', '.join(sorted(registry))}, or " if registry else ""
        raise ConfigError(f"{spec_name}: there is no {name!r}; give {known}a path to a class")
    try:
        return load_class(found)
    except ConfigError as error:
        raise ConfigError(f"{spec_name}: {error}") from error


def _forms(expected: type) -> str:
    return f"a {expected.__name__}, its class, a function that makes one, its path, or a dict"


def _no_form(text: str, spec: Any, expected: type) -> str:
    given = spec.__name__ if isinstance(spec, type) else type(spec).__name__
    return text.format(actual_type=given, expected_type=expected.__name__)


def _wrong_type(text: str | None, spec_name: str, found: type, expected: type) -> str:
    text = text or (
        f"{spec_name} factory returned {{type_name}}, which is not a {{expected_type}} subclass: "
        f"{spec_name} is a {{type_name}}, not a {{expected_type}}"
    )
    return text.format(type_name=found.__name__, expected_type=expected.__name__)


def _name(cls: Any) -> str:
    return getattr(cls, "__qualname__", repr(cls))
