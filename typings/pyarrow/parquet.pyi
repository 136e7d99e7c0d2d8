"""pyarrow ships no types and makes its functions at run time: everything is Any to the checker."""

from typing import Any

def __getattr__(name: str) -> Any: ...
