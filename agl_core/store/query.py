"""Questions as SQL: names come from an allow-list of columns, values are always parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from agl_core.errors import StoreError
from agl_core.store.json_text import encode
from agl_core.types.core import FilterLogic, FilterOptions, SortOrder


def where(filters: FilterOptions, columns: Sequence[str], table: str = "") -> tuple[str, list[Any]]:
    """Return a condition and its parameters.

    Args:
        filters: Field names to conditions; none at all is always met.
        columns: Fields that may be asked for.
        table: Alias of the table, with its dot.

    Raises:
        StoreError: A field that is not among `columns`, or a condition that there is not.
    """
    logic = filters.get("_aggregate", "and")
    if logic not in get_args(FilterLogic):
        raise StoreError(
            f"Unsupported filter aggregate '{logic}': filter logic is {logic!r}; it is 'and' or "
            "'or'"
        )
    parts: list[str] = []
    parameters: list[Any] = []
    for name, field in filters.items():
        if name.startswith("_"):
            continue
        if name not in columns:
            raise StoreError(f"cannot filter by {name!r}; fields: {', '.join(sorted(columns))}")
        for kind, value in field.items():
            if kind == "within" and len(value) == 1:  # an index on it gives the order of creation
                kind, value = "exact", value[0]
            parts.append(_condition(f"{table}{name}", kind))
            # One parameter for a list: the text stays the same, and there is no limit.
            parameters.append(encode(list(value)) if kind == "within" else value)
    condition = f" {logic.upper()} ".join(parts)
    must = filters.get("_must", [])
    groups = [f"({condition})"] if parts else []
    for group in [must] if isinstance(must, Mapping) else must:
        sql, values = where(group, columns, table)
        groups.append(f"({sql})")
        parameters += values
    return " AND ".join(groups) or "1", parameters


def order_by(
    sort_by: str | None, sort_order: SortOrder, columns: Sequence[str], table: str = ""
) -> str:
    """Return an ORDER BY clause; equals stay in order of creation, None comes first in ascending
    order, and no field means the order of creation.

    Raises:
        StoreError: No such field, or an order that is neither "asc" nor "desc".
    """
    if sort_order not in get_args(SortOrder):
        raise StoreError(
            f"Unsupported sort order '{sort_order}': sort order is {sort_order!r}; it is 'asc' or "
            "'desc'"
        )
    if sort_by is None:
        return f"ORDER BY {table}rowid {sort_order.upper()}"
    if sort_by not in columns:
        raise StoreError(
            f"Failed to sort items by '{sort_by}': field does not exist: cannot sort by "
            f"{sort_by!r}; Invalid sort_by: {sort_by}, allowed fields are: "
            f"{', '.join(sorted(columns))}"
        )
    return f"ORDER BY {table}{sort_by} {sort_order.upper()}, {table}rowid"


def page(limit: int, offset: int) -> tuple[str, list[int]]:
    """Return a LIMIT clause and its parameters.

    Raises:
        StoreError: A limit below -1, or an offset below 0.
    """
    if limit < -1:
        raise StoreError(f"Limit must be greater than 0 or -1 for no limit: limit is {limit}")
    if offset < 0:
        raise StoreError(f"Offset must be greater than or equal to 0: offset is {offset}")
    return "LIMIT ? OFFSET ?", [limit, offset]


def text_filters(**values: str | None) -> dict[str, dict[str, str]]:
    """Return filters from arguments named after a field, for its exact value, or after a field and
    `_contains`; those that are None are left out.
    """
    filters: dict[str, dict[str, str]] = {}
    for argument, value in values.items():
        if value is not None:
            name = argument.removesuffix("_contains")
            condition = "exact" if name == argument else "contains"
            filters.setdefault(name, {})[condition] = value
    return filters


def known(values: Sequence[str], literal: Any) -> Sequence[str]:
    """Return values as they are.

    Raises:
        StoreError: One is none of the literal's.
    """
    choices = get_args(literal)
    for value in values:
        if value not in choices:
            raise StoreError(f"no status {value!r}; there are {', '.join(choices)}")
    return values


def _condition(column: str, kind: str) -> str:
    if kind == "exact":
        return f"{column} IS ?"
    if kind == "within":
        return f"{column} IN (SELECT value FROM json_each(?))"
    if kind == "contains":
        return f"instr({column}, ?) > 0"
    raise StoreError(
        f"Unsupported filter operator '{kind}' for field '{column.rpartition('.')[2]}': no "
        f"condition {kind!r}; conditions: exact, within, contains"
    )
