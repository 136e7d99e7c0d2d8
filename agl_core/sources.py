"""The source files that an agent is made of: its module, and whatever that imports of its project.

Found by reading, nothing is executed. Of the project is what lies neither in the standard library
nor among the installed packages, and not in this package. A file is compared by its syntax tree
without docstrings, so comments and formatting do not matter. Imports whose name is computed are not
seen.
"""

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from difflib import unified_diff
from functools import cache
from pathlib import Path

import agl_core

_OWN = ("agl_core", "deployments", "flows", "tasks")
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_MAX_DIFF_LINES = 20
"""Of one file."""
_IMPORTERS = ("import_module", "__import__")


def local_sources(module: str) -> dict[str, Path]:
    """Return the files of a module and of all that it imports of its project, by their place below
    the project (`package/helper.py`); empty for a module without a file, as a notebook's.
    """
    found: dict[str, Path] = {}
    waiting, seen = [module], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _file(name)
        if path is None:
            continue
        is_package = path.name == "__init__.py"
        place = name.replace(".", "/") + ("/__init__.py" if is_package else ".py")
        found[place] = path
        waiting.extend(_parents(name))
        waiting.extend(_imports(path, name if is_package else name.rpartition(".")[0]))
    return dict(sorted(found.items()))


def source_digest(source: bytes) -> str:
    """Return the sha256 of what a Python file means: its syntax tree without docstrings."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        text = source
    else:
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and ast.get_docstring(node, clean=False) is not None
            ):
                node.body = node.body[1:] or [ast.Pass()]
        text = ast.dump(tree).encode()
    return "sha256:" + hashlib.sha256(text).hexdigest()


def source_diff(name: str, was: bytes, now: bytes) -> str:
    """Return how a file changed, as the first lines of a unified diff."""
    old, new = (text.decode(errors="replace").splitlines() for text in (was, now))
    lines = [
        *unified_diff(old, new, f"{name} (recorded)", f"{name} (now)", n=1, lineterm=""),
    ]
    if len(lines) > _MAX_DIFF_LINES:
        lines = [*lines[:_MAX_DIFF_LINES], f"... {len(lines) - _MAX_DIFF_LINES} more lines"]
    return "\n".join(lines)


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _imports(path: Path, package: str) -> Iterator[str]:
    """Yield the names that a file may import as modules, wherever in it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    importers = set(_importers(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in importers:
            yield from _imported_by_call(node, package)


def _importers(tree: ast.AST) -> Iterator[str]:
    """Yield the names by which a file calls the functions that import."""
    yield from _IMPORTERS
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (a.asname for a in node.names if a.asname and a.name in _IMPORTERS)


def _imported_by_call(node: ast.Call, package: str) -> Iterator[str]:
    """Yield the name that `import_module` and the like are called with, where it stands there."""
    arguments = dict(zip(("name", "package"), node.args, strict=False))
    arguments |= {word.arg: word.value for word in node.keywords if word.arg}
    texts = {key: of.value for key, of in arguments.items() if isinstance(of, ast.Constant)}
    name, of = texts.get("name"), texts.get("package", package)
    if isinstance(name, str) and isinstance(of, str):
        with suppress(ImportError):  # above the top, or relative to no package
            yield importlib.util.resolve_name(name, of)


def _called(node: ast.Call) -> str | None:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def _file(name: str) -> Path | None:
    """Return the file of a module of the project; None for any other."""
    top, *parts = name.split(".")
    path, folders = _top(top)
    for part in parts:
        path, folders = _below(part, folders)
    return path if path is not None and _is_local(path) else None


def _top(name: str) -> tuple[Path | None, list[Path]]:
    """Return the file of a top-level module, and the folders of its submodules."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # `__main__` and the like: loaded, without a spec
        file = getattr(sys.modules.get(name), "__file__", None)
        return (Path(file) if file else None), []
    if spec is None:
        return None, []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return (Path(spec.origin) if spec.has_location and spec.origin else None), folders


def _below(name: str, folders: list[Path]) -> tuple[Path | None, list[Path]]:
    namespace: list[Path] = []
    for folder in folders:
        if (package := folder / name / "__init__.py").is_file():
            return package, [package.parent]
        if (module := folder / f"{name}.py").is_file():
            return module, []
        if (folder / name).is_dir():
            namespace.append(folder / name)
    return None, namespace


def _is_local(path: Path) -> bool:
    path = path.absolute()
    return (
        path.suffix == ".py"
        and not any(part in _INSTALLED for part in path.parts)
        and not any(path.is_relative_to(folder) for folder in _elsewhere())
    )


@cache
def _elsewhere() -> tuple[Path, ...]:
    """Return the folders of the standard library and of this package."""
    libraries = [Path(sysconfig.get_path(name)).absolute() for name in _LIBRARIES]
    root = Path(agl_core.__file__).absolute().parent.parent
    return (*libraries, *(root / name for name in _OWN))
