# SPDX-License-Identifier: Apache-2.0
"""Cached results of `datasets` that are not reused by other code than that which made them."""

from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any


@cache
def code_digest(folder: Path) -> str:
    """SHA-256 of all Python files in a folder and those below it, with their paths."""
    digest = sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _call(function: Callable[..., Any], code: str, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def with_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of this folder as `datasets.Dataset.map` and `Dataset.from_generator` should get it.

    They look for cached results by a hash of the function. Of a package's functions, they hash the names only: without
    this, a newer version of the package would go on with the rows of the older one.
    """
    return partial(_call, function, code_digest(Path(__file__).parent))
