"""Jinja for templates whose text may come from a model: a sandbox that counts what is done.

Every operation of a template (operator, filter, test, call, loop, literal, output) is charged for
what it reads and makes, before it does so where its result could be larger than its arguments. One
render has `MAX_WORK` units; a unit is about a byte that is copied, or 10 ns. So a render ends
within seconds and with little memory, whatever the template says.

How: the parsed template is rewritten so that loops, literals, comparisons, slices and output pass
through filters of ours; operators and calls are intercepted by Jinja's own sandbox. Nothing is
folded into constants when a template is compiled, since that would run filters uncounted.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from jinja2 import StrictUndefined, Template, nodes, pass_context
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from agl_core.types.template import MAX_WIDTH, check_format, refuse_number

MAX_WORK = 100_000_000
"""Units for one render."""
MAX_TOKENS = 20_000
"""Of a template, as Jinja reads it; compiling takes about 50 us for each."""
_STEP = 200
"""Units of one operation besides its data."""
_MAX_BITS = 100_000
"""Of a whole number."""

_TEXT_METHODS = (
    "capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper join "
    "lower lstrip partition removeprefix removesuffix rfind rpartition rsplit rstrip split "
    "splitlines startswith strip title upper"
)
_HARMLESS_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    list: frozenset(["count", "index"]),
    tuple: frozenset(["count", "index"]),
    dict: frozenset(["get", "items", "keys", "values"]),
}
_MULTIPLYING = ("indent", "join", "replace", "wordwrap", "center", "trim", "truncate")
"""Filters whose result can be as large as the product of their arguments."""
_NUMBERED = ("batch", "center", "indent", "round", "slice", "wordwrap", "truncate")
"""Filters that make as much text as a number says."""
_LEFT_OUT = ("format", "urlize")
"""Filters that are not offered: `%` does the same as the one, and the other makes links."""

_budget: ContextVar["_Budget"] = ContextVar("template_budget")


_SIZED = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


class _Budget:
    """The work that one render may still do."""

    def __init__(self) -> None:
        self._left = MAX_WORK

    def charge(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise ValueError("it does too much work: loops, repeats or texts are too large")

    def size(self, value: Any) -> int:
        """Charge for a value, with all that is in it, and return its size."""
        size = self._size(value)
        self.charge(size)
        return size

    def total(self, values: Iterable[Any]) -> int:
        """Charge for values and return all that was charged."""
        before = self._left
        for value in values:
            self.size(value)
        return before - self._left

    def _size(self, value: Any) -> int:
        if isinstance(value, str | bytes):
            return 50 + len(value)
        if isinstance(value, int):
            return 28 + value.bit_length() // 8
        if isinstance(value, range):
            return 50
        parts: Iterable[Any]
        if isinstance(value, Mapping):
            parts = (part for item in value.items() for part in item)
        elif isinstance(value, _SIZED):
            parts = value
        else:
            return 50
        self.charge(50)
        for part in parts:
            self.charge(_STEP // 2 + self._size(part))  # at once: it may never end
        return 50 + 8 * len(value)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def is_safe_callable(self, obj: Any) -> bool:
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, Macro | LoopContext | Joiner) or isinstance(owner, LoopContext | Cycler):
            return True
        if any(obj is known for known in self.globals.values()):
            return True
        return getattr(obj, "__name__", "") in _HARMLESS_METHODS.get(type(owner), ())

    def wrap_str_format(self, value: Any) -> None:
        """Leave `str.format` to `is_safe_callable`, which refuses it: it has no bounds."""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.charge(_STEP)
        sizes = budget.size(left), budget.size(right)
        if operator == "%" and isinstance(left, str | bytes):
            check_format(left, right)
            num_fields = left.count("%") if isinstance(left, str) else left.count(b"%")
            budget.charge(num_fields * sum(sizes))
        elif operator in ("*", "**"):
            _check_product(budget, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = _budget.get()
        budget.charge(_STEP)
        if isinstance(__obj, LoopContext):  # a recursive loop
            args = (_counted(budget, args[0]), *args[1:]) if args else args
        elif not isinstance(__obj, Macro):
            owner = getattr(__obj, "__self__", None)
            args = tuple(_sized(budget, value) for value in args)
            sizes = [budget.size(value) for value in (*args, *kwargs.values())]
            if isinstance(owner, str):
                product = len(owner) * sum(_num_chars(value) for value in args)
                name = getattr(__obj, "__name__", "")
                budget.charge(len(owner) + (product if name == "join" else product // 32))
                if name in ("split", "rsplit", "splitlines"):
                    budget.charge(20 * len(owner))
            elif owner is not None and not isinstance(owner, Cycler | LoopContext):
                budget.size(owner)
            budget.charge(sum(sizes))
        made = super().call(__context, __obj, *args, **kwargs)
        budget.size(made)
        return made

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        for number, _ in enumerate(self._tokenize(source, name, filename)):
            if number > MAX_TOKENS:
                raise ValueError(f"it has more than {MAX_TOKENS} tokens")
        return _rewritten(super()._parse(source, name, filename))


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> Template:
    """Return a template, ready to be rendered."""
    return _sandbox().from_string(source)


def render_parts(template: Template, values: Mapping[str, Any]) -> Iterator[str]:
    """Give the texts that a template makes of values, one after the other.

    Raises:
        ValueError: It does more work than `MAX_WORK`.
    """
    token = _budget.set(_Budget())
    try:
        yield from template.generate(values)
    finally:
        _budget.reset(token)


@functools.cache
def _sandbox() -> _Sandbox:
    sandbox = _Sandbox(undefined=StrictUndefined, keep_trailing_newline=True, optimized=False)
    sandbox.globals = {
        "range": sandbox.globals["range"],
        "dict": dict,
        "cycler": Cycler,
        "joiner": Joiner,
        "namespace": Namespace,
    }
    for name in _LEFT_OUT:
        del sandbox.filters[name]
    sandbox.filters = {
        name: _charged(name, function) for name, function in sandbox.filters.items()
    } | {"_out": _out, "_read": _read, "_loop": _loop, "_concat": _concat}
    sandbox.tests = {name: _charged(name, test) for name, test in sandbox.tests.items()}
    return sandbox


def _rewritten(tree: nodes.Template) -> nodes.Template:
    """Have loops, literals, comparisons, slices and output pass through filters of ours."""
    for node in tree.find_all((nodes.For, nodes.Output, nodes.Concat, nodes.Compare)):
        if isinstance(node, nodes.For):
            node.iter = _through("_loop", node.iter)
        elif isinstance(node, nodes.Output):
            node.nodes = [_through("_out", _as_expression(child)) for child in node.nodes]
        elif isinstance(node, nodes.Compare):
            node.expr = _through("_read", node.expr)
            for operand in node.ops:
                operand.expr = _through("_read", operand.expr)
        else:
            node.nodes = [_through("_concat", nodes.List(node.nodes, lineno=node.lineno))]
    for node in tree.find_all(nodes.Getitem):
        node.node = _through("_read", node.node) if isinstance(node.arg, nodes.Slice) else node.node
    for parent in [tree, *tree.find_all(nodes.Node)]:
        _wrap_literals(parent)
    return tree


def _wrap_literals(parent: nodes.Node) -> None:
    """Have the lists, tuples and dicts that a node makes pass through `_read`."""
    if isinstance(parent, nodes.Filter) and parent.name in ("_read", "_concat"):
        return
    for field, value in parent.iter_fields():
        if isinstance(value, list):
            setattr(parent, field, [_wrapped_literal(item) for item in value])
        else:
            setattr(parent, field, _wrapped_literal(value))


def _wrapped_literal(value: Any) -> Any:
    is_literal = isinstance(value, nodes.List | nodes.Dict) or (
        isinstance(value, nodes.Tuple) and value.ctx == "load"
    )
    return _through("_read", value) if is_literal else value


def _through(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _as_expression(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.TemplateData):
        return nodes.Const(node.data, lineno=node.lineno)
    return node


@pass_context
def _out(context: Context, value: Any) -> str:
    del context
    budget = _budget.get()
    budget.charge(_STEP)
    budget.size(value)
    text = value if isinstance(value, str) else str(value)
    budget.charge(len(text))
    return text


@pass_context
def _read(context: Context, value: Any) -> Any:
    del context
    budget = _budget.get()
    budget.charge(_STEP)
    budget.size(value)
    return value


@pass_context
def _loop(context: Context, values: Any) -> Iterator[Any]:
    del context
    return _counted(_budget.get(), values)


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    return "".join(_out(context, value) for value in values)


def _counted(budget: _Budget, values: Any) -> Iterator[Any]:
    for value in values:
        budget.charge(_STEP)
        yield value


def _sized(budget: _Budget, value: Any) -> Any:
    """Return a generator as a list, counted item by item, and any other value as it is."""
    if isinstance(value, Iterator) and not isinstance(value, LoopContext):
        items: list[Any] = []
        for item in _counted(budget, value):
            budget.size(item)
            items.append(item)
        return items
    return value


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that charges for its arguments and its result."""
    mark = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def charged(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.charge(_STEP)
        args = tuple(_sized(budget, value) for value in args)
        given = (*args, *kwargs.values())
        size = budget.total(given)
        if name in _NUMBERED:
            for value in given[1:]:
                if isinstance(value, int | float) and abs(value) > MAX_WIDTH:
                    refuse_number(value)
        if name in _MULTIPLYING:
            width = sum(
                value if isinstance(value, int) and name != "replace" else _num_chars(value)
                for value in given[1:]
            )
            budget.charge(_times(name, given[0]) * max(0, width) if given else 0)
        if name == "sum" and not isinstance(kwargs.get("start", (*args, 0, 0)[2]), int | float):
            raise ValueError("sum adds numbers only")  # lists would be copied for each item
        if name in ("pprint", "tojson") and given:
            budget.charge(_num_indented(name, given) * size)
        budget.charge(5 * size)  # escapes, sorted copies, words
        if mark is not None:
            first = _first_argument(str(mark), context)
            made = function(first, *args, **kwargs)
        else:
            made = function(*args, **kwargs)
        if not isinstance(made, Iterator):
            budget.size(made)
        return made

    return charged


def _num_indented(name: str, given: Sequence[Any]) -> int:
    """Return about how many spaces can come before each part of a nested value."""
    width = 50 if name == "pprint" else given[1] if len(given) > 1 else 0
    return _depth(given[0]) * width if isinstance(width, int) and width > 0 else 0


def _depth(value: Any) -> int:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return 1
    return 1 + max(map(_depth, value), default=0)


def _first_argument(mark: str, context: Context) -> Any:
    if mark.endswith("eval_context"):
        return context.eval_ctx
    return context.environment if mark.endswith("environment") else context


def _times(name: str, value: Any) -> int:
    """Return how often a filter's further argument can come in its result."""
    if name == "join":
        return len(value) if hasattr(value, "__len__") else MAX_WORK
    text = value if isinstance(value, str) else str(value)
    if name == "indent":
        return text.count("\n") + 1
    return 1 if name in ("center", "truncate") else len(text)


def _num_chars(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


def _check_product(budget: _Budget, operator: str, left: Any, right: Any) -> None:
    """Refuse a repeated text or list, a power or a product that is too large."""
    if operator == "**":
        if isinstance(right, int | float) and abs(right) > MAX_WIDTH:
            refuse_number(right)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for repeated, number in ((left, right), (right, left)):
        if isinstance(repeated, str | bytes | list | tuple) and isinstance(number, int):
            width = 1 if isinstance(repeated, str | bytes) else 8
            budget.charge(width * len(repeated) * max(0, number))


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise ValueError(f"it makes a number of more than {_MAX_BITS} bits")
