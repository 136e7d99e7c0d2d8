"""Attributes of spans: nested values under dotted names, tags, links, exceptions. Pure functions.

{"a": {"b": [1, "x"], "c": [1, 2]}}  <->  {"a.b.0": 1, "a.b.1": "x", "a.c": [1, 2]}
"""

import json
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from agl_core import semconv
from agl_core.semconv import LinkPydanticModel
from agl_core.types.tracer import AttributeValue

Primitive = str | bool | int | float
_MAX_DEPTH = 100
"""Parts of a dotted name that count; what follows stays one name."""


class _Span(Protocol):
    @property
    def trace_id(self) -> str: ...
    @property
    def span_id(self) -> str: ...
    @property
    def attributes(self) -> Mapping[str, Any]: ...


AnySpan = TypeVar("AnySpan", bound=_Span)


def flatten_attributes(
    nested: Mapping[str, Any] | Sequence[Any], expand_leaf_lists: bool = False
) -> dict[str, Any]:
    """Return the leaves of nested mappings and lists under dotted names; what is empty is left out.

    Args:
        nested: Mappings with string keys, lists, and any leaves.
        expand_leaf_lists: Whether a list of primitives of one type is taken apart as well; else it
            stays one attribute, as OpenTelemetry records lists of one type.

    Raises:
        ValueError: A key is not a string or is empty, or two leaves have the same dotted name.
    """
    flat: dict[str, Any] = {}
    for name, value in _leaves("", nested, expand_leaf_lists):
        if name in flat:
            raise ValueError(f"two values have the attribute name {name!r}")
        flat[name] = value
    return flat


def _leaves(path: str, value: Any, expand_leaf_lists: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, list | tuple) and (
        expand_leaf_lists or not path or not value or not _is_uniform(value)
    ):
        children = [(str(number), child) for number, child in enumerate(value)]
    else:
        yield path, value
        return
    for name, child in children:
        if not isinstance(name, str):
            raise ValueError(
                f"Only string keys are supported in dictionaries, got '{name}' of "
                f"type {type(name)} in {path}: attribute name {name!r} under {path!r} is not a "
                "string"
            )
        if not name:
            raise ValueError(f"an attribute name under {path!r} is empty")
        yield from _leaves(f"{path}.{name}" if path else name, child, expand_leaf_lists)


def to_plain(value: Any, *, with_defaults: bool = True) -> Any:
    """Return pydantic models and mappings as dicts with string keys, however deep.

    Args:
        value: What JSON cannot express in a model (bytes that are no text) stays as it is.
        with_defaults: Whether fields of models that nobody set are in the dicts.
    """
    if isinstance(value, BaseModel):
        try:
            return value.model_dump(mode="json", exclude_unset=not with_defaults, warnings=False)
        except ValueError:
            fields = value.model_dump(exclude_unset=not with_defaults, warnings=False)
            return to_plain(fields, with_defaults=with_defaults)
    if isinstance(value, Mapping):
        return {
            str(name): to_plain(child, with_defaults=with_defaults) for name, child in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_plain(child, with_defaults=with_defaults) for child in value]
    return value


def unflatten_attributes(flat: Mapping[str, Any]) -> dict[str, Any] | list[Any]:
    """Return the nested form of dotted names.

    Names that are exactly 0 .. n-1 become a list. Where a name has a value and names below it, the
    names below it count.
    """
    root: dict[str, Any] = {}
    # Longer names last, so that they replace a value at a shorter one.
    for name in sorted(flat, key=lambda name: name.count(".")):
        *parents, last = name.split(".", _MAX_DEPTH)
        node = root
        for parent in parents:
            child = node.get(parent)
            if not isinstance(child, _Branch):
                child = node[parent] = _Branch()
            node = child
        node[last] = flat[name]
    return _with_lists(root)


class _Branch(dict[str, Any]):
    """A mapping that unflattening made, apart from mappings that are values."""


def _with_lists(node: dict[str, Any]) -> dict[str, Any] | list[Any]:
    children = {
        name: _with_lists(child) if isinstance(child, _Branch) else child
        for name, child in node.items()
    }
    names = [str(number) for number in range(len(children))]
    if children and set(names) == set(children):
        return [children[name] for name in names]
    return children


def filter_attributes(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the attributes with this name or below it."""
    prefix = prefix.removesuffix(".")
    return {
        name: value
        for name, value in attributes.items()
        if name == prefix or name.startswith(f"{prefix}.")
    }


def filter_and_unflatten_attributes(
    attributes: Mapping[str, Any], prefix: str
) -> dict[str, Any] | list[Any]:
    """Return the nested form of the attributes below a name, without it."""
    prefix = prefix.removesuffix(".") + "."
    return unflatten_attributes(
        {
            name.removeprefix(prefix): value
            for name, value in attributes.items()
            if name.startswith(prefix)
        }
    )


def sanitize_attribute_value(value: Any, force: bool = True) -> AttributeValue:
    """Return a value that OpenTelemetry can record: a primitive, a list of one kind, else JSON.

    Args:
        value: Anything.
        force: Whether a value that JSON does not know becomes its text.

    Raises:
        ValueError: JSON does not know the value, and `force` is False.
    """
    if isinstance(value, Primitive):
        return value
    if isinstance(value, list | tuple) and _is_uniform(value):
        return list(value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        if force:
            return safe_str(value)
        raise ValueError(f"Object must be JSON serializable, got: {type(value)}.") from error


def sanitize_attributes(
    attributes: Mapping[str, Any], force: bool = True
) -> dict[str, AttributeValue]:
    """Return attributes whose values OpenTelemetry can record; see `sanitize_attribute_value`.

    Raises:
        ValueError: JSON does not know one of the values, and `force` is False.
    """
    sane: dict[str, AttributeValue] = {}
    for name, value in attributes.items():
        try:
            sane[name] = sanitize_attribute_value(value, force)
        except ValueError as error:
            raise ValueError(f"Failed to sanitize attribute '{name}': {error}") from error
    return sane


def check_attributes_sanity(attributes: Mapping[Any, Any]) -> None:
    """Check that a span can record these attributes.

    Raises:
        ValueError: A name is not a string, or a value neither a primitive nor a list of primitives
            of one type.
    """
    for name, value in attributes.items():
        if not isinstance(name, str):
            raise ValueError(
                f"Attribute key must be a string, got {type(name)} for key "
                f"'{name}': attribute name {name!r} is not a string"
            )
        if isinstance(value, Primitive) or (isinstance(value, list | tuple) and _is_uniform(value)):
            continue
        if isinstance(value, list | tuple):
            kinds = sorted({type(item).__name__ for item in value})
            raise ValueError(
                "List must contain only one type of primitive values, got: "
                f"{', '.join(kinds)}; attribute {name!r} is a list of them"
            )
        raise ValueError(
            "Attribute value must be a string, int, float, bool, or list of these, got "
            f"{type(value)} for value '{value!r:.80}': "
            f"attribute {name!r} is a {type(value).__name__}; only str, bool, int, float and lists "
            "of one of them can be recorded"
        )


def _is_uniform(values: Sequence[Any]) -> bool:
    kinds = {type(value) for value in values}
    return len(kinds) <= 1 and all(isinstance(value, Primitive) for value in values)


def make_tag_attributes(tags: Sequence[str]) -> dict[str, str]:
    """Return attributes that tag a span."""
    return {f"{semconv.TAG_PREFIX}.{number}": tag for number, tag in enumerate(tags)}


def extract_tags_from_attributes(attributes: Mapping[str, Any]) -> list[str]:
    """Return the tags of a span.

    Raises:
        ValueError: They are not a list of strings.
    """
    tags = filter_and_unflatten_attributes(attributes, semconv.TAG_PREFIX)
    if not tags:
        return []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError(f"tags are not {semconv.TAG_PREFIX}.0 .. n-1 with strings: {tags!r:.80}")
    return tags


def make_link_attributes(links: Mapping[str, str]) -> dict[str, str]:
    """Return attributes by which a span names another one.

    Args:
        links: Attributes that the other span has, all of them; the names `trace_id` and `span_id`
            stand for its ids.

    Raises:
        ValueError: A value is not a string.
    """
    attributes: dict[str, str] = {}
    for number, (key, value) in enumerate(links.items()):
        if not isinstance(value, str):
            raise ValueError(
                f"Link value must be a string, got {type(value)} for key '{key}': "
                f"link {key!r} is a {type(value).__name__}, not a string"
            )
        attributes[f"{semconv.LINK_PREFIX}.{number}.key_match"] = key
        attributes[f"{semconv.LINK_PREFIX}.{number}.value_match"] = value
    return attributes


def extract_links_from_attributes(attributes: Mapping[str, Any]) -> list[LinkPydanticModel]:
    """Return by what a span names another one.

    Raises:
        ValueError: They are not a list of `key_match` and `value_match`.
    """
    links = filter_and_unflatten_attributes(attributes, semconv.LINK_PREFIX)
    if not links:
        return []
    if not isinstance(links, list):
        raise ValueError(f"links are not {semconv.LINK_PREFIX}.0 .. n-1: {links!r:.80}")
    return [LinkPydanticModel.model_validate(link) for link in links]


def query_linked_spans(
    spans: Iterable[AnySpan], links: Iterable[LinkPydanticModel]
) -> list[AnySpan]:
    """Return the spans that all links match; attributes are compared as text."""
    links = list(links)
    return [span for span in spans if all(_matches(span, link) for link in links)]


def _matches(span: _Span, link: LinkPydanticModel) -> bool:
    if link.key_match == "trace_id":
        return span.trace_id == link.value_match
    if link.key_match == "span_id":
        return span.span_id == link.value_match
    return str(span.attributes.get(link.key_match, "")) == link.value_match


def full_qualified_name(kind: type) -> str:
    """Return the name of a class with its module, without it for builtins."""
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def format_exception_attributes(exception: BaseException) -> dict[str, Primitive]:
    """Return the attributes that OpenTelemetry gives an exception, also one that has no text."""
    try:
        stacktrace = "".join(traceback.format_exception(exception))
    except Exception as error:  # noqa: BLE001 - any code may run in there
        stacktrace = f"not available: {type(error).__name__}"
    return {
        semconv.EXCEPTION_TYPE: full_qualified_name(type(exception)),
        semconv.EXCEPTION_MESSAGE: safe_str(exception),
        semconv.EXCEPTION_STACKTRACE: stacktrace,
        semconv.EXCEPTION_ESCAPED: True,
    }


def describe_exception(exception: BaseException) -> str:
    """Return an exception's class and text."""
    return f"{type(exception).__name__}: {safe_str(exception)}"


def safe_str(value: Any) -> str:
    """Return the text of a value, or where it has none (its `__str__` raises) its class."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - any code may run in there
        return f"<{full_qualified_name(type(value))} without text>"
