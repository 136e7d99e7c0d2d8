"""How much one OTLP request may hold: found out from its bytes, before protobuf makes objects.

Two bytes make an empty span, so a request within its limit of bytes could still become millions of
objects. The walk follows only the fields that nest: requests, resources, scopes, spans, events,
links, attributes and their values. Everything else is skipped by its length.
"""

from collections.abc import Mapping
from typing import Final

MAX_SPANS: Final = 50_000
MAX_MESSAGES: Final = 3 * MAX_SPANS
"""Groups of a resource, scopes, spans, events and links: each becomes an object of ours. Our own
exporter gives each span a group and a scope."""
MAX_FIELDS: Final = 3_000_000
"""Protobuf fields: an attribute has about four, each further value of a list has one."""
MAX_RESOURCE_BYTES: Final = 64 * 1024 * 1024
"""Of all spans' resources together: each span is stored with a copy of its resource."""
_SMALL_BYTES = 50_000
"""Smaller requests need no walk."""
_LEAF_BYTES = 11
"""A value of so few bytes is counted as one field."""

_PLACES: Mapping[str, Mapping[int, str]] = {
    "request": {1: "resource_spans"},
    "resource_spans": {1: "resource", 2: "scope_spans"},
    "resource": {1: "pair"},
    "scope_spans": {1: "scope", 2: "span"},
    "scope": {3: "pair"},
    "span": {9: "pair", 11: "event", 13: "link"},
    "event": {3: "pair"},
    "link": {4: "pair"},
    "pair": {2: "value"},
    "value": {5: "list", 6: "map"},
    "list": {1: "value"},
    "map": {1: "pair"},
}
_COUNTED = frozenset(["resource_spans", "scope_spans", "span", "event", "link"])


def check_limits(body: bytes) -> None:
    """Return if a request is worth parsing; what is not protobuf at all is left to the parser.

    Raises:
        ValueError: It has more spans, messages, fields or copies of resources than the limits
            allow.
    """
    if len(body) > _SMALL_BYTES:
        _Walk(body).run()


_LENGTH = 2
"""Wire type of texts, bytes and messages."""
_SIZES = {1: 8, 5: 4}


class _Walk:
    def __init__(self, body: bytes) -> None:
        self._body = body
        self._num_fields = self._num_messages = self._num_spans = self._resource_bytes = 0

    def run(self) -> None:
        try:
            self._message("request", 0, len(self._body))
        except IndexError:  # cut short: the parser says so
            return

    def _message(self, place: str, position: int, end: int) -> None:
        """Count the fields of one message; nested messages first come, first counted."""
        body, nested = self._body, _PLACES[place]
        spans_before, resource_bytes = self._num_spans, 0
        while position < end:
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise ValueError(f"the request has more than {MAX_FIELDS} fields")
            tag, position = _varint(body, position)
            if tag & 7 != _LENGTH:
                position = _skip(body, position, tag & 7)
                continue
            size, position = _varint(body, position)
            child = nested.get(tag >> 3)
            if child in _COUNTED:
                self._count(child)
            elif child == "resource":
                resource_bytes += size
            if child is not None and (child != "value" or size > _LEAF_BYTES):
                self._message(child, position, min(position + size, end))
            position += size
        if place == "resource_spans":
            self._resource_bytes += resource_bytes * (self._num_spans - spans_before)
            if self._resource_bytes > MAX_RESOURCE_BYTES:
                raise ValueError(
                    f"the resources of the spans are more than {MAX_RESOURCE_BYTES} bytes together"
                )

    def _count(self, message: str) -> None:
        self._num_messages += 1
        self._num_spans += message == "span"
        if self._num_spans > MAX_SPANS:
            raise ValueError(f"the request has more than {MAX_SPANS} spans")
        if self._num_messages > MAX_MESSAGES:
            raise ValueError(
                f"the request has more than {MAX_MESSAGES} resources, scopes, spans, events and "
                "links together"
            )


def _skip(body: bytes, position: int, wire_type: int) -> int:
    """Return where a field without a length ends."""
    if wire_type == 0:
        return _varint(body, position)[1]
    if wire_type not in _SIZES:
        raise ValueError("the request has groups or unknown wire types")
    return position + _SIZES[wire_type]


def _varint(body: bytes, position: int) -> tuple[int, int]:
    byte = body[position]
    if byte < 128:
        return byte, position + 1
    value, shift = byte & 127, 7
    while byte >= 128 and shift < 70:
        position += 1
        byte = body[position]
        value |= (byte & 127) << shift
        shift += 7
    return value, position + 1
