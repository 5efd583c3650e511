# SPDX-License-Identifier: Apache-2.0
"""The summary that a run leaves."""

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "evaluate")


def _json(value: Any) -> Any:
    """`value` with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_results(output_dir: str | os.PathLike, results: Mapping[str, Any], *arguments: Any) -> Path:
    """Writes `all_results.json`, complete or not at all.

    Args:
        output_dir: an existing folder.
        results: figures, in any nesting; NaN is written as null.
        arguments: dataclasses, all of whose fields are written.

    Returns:
        The file: an object with `results`, `arguments` and `versions`.
    """
    content = {
        "results": results,
        "arguments": {name: value for part in arguments for name, value in asdict(part).items()},
        "versions": {
            "python": platform.python_version(),
            "nystrom_models": __version__,
            **{name: version(name) for name in PACKAGES},
        },
    }
    path = Path(output_dir, "all_results.json")
    aside = path.with_suffix(".json.tmp")
    aside.write_text(json.dumps(_json(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    aside.replace(path)
    return path
