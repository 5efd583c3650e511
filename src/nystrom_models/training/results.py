# SPDX-License-Identifier: Apache-2.0
"""`all_results.json`, the summary of a run, and other JSON files."""

import json
import math
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..json_values import json_value
from .identity import flags

RESULTS = "all_results.json"
PACKAGES = ("transformers", "accelerate", "datasets", "evaluate")


def write_json(path: Path, content: Any, lines: bool = False, append: bool = False) -> None:
    """Writes a JSON file, completely or not at all. With `lines`, each item of `content` is a line; `append` adds
    lines to an existing file. NaN becomes null. An OSError names the file."""
    content = json_value(content)
    parts = [json.dumps(item, allow_nan=False) for item in content] if lines else [json.dumps(content, indent=2)]
    text = "".join(part + "\n" for part in parts)
    aside = path.with_name(path.name + ".tmp")
    try:
        if append:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)
            return
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from error


def _with_nan(value: Any) -> Any:
    """`value` with NaN in place of null, as it was before [`json_value`]; infinities become NaN, too."""
    if isinstance(value, Mapping):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return math.nan if value is None else value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one object in each line, without a last line that was cut off; null becomes NaN. An
    empty list if there is no such file."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        rows.append(_with_nan(row))
    return rows


def results_content(
    results: Mapping[str, Any], *arguments: Any, identity: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The content of [`write_results`], in the form in which it is read back."""
    return json_value(
        {
            "results": results,
            "arguments": flags(*arguments, leave_out=()),
            "identity": dict(identity or {}),
            "versions": {
                "python": platform.python_version(),
                "nystrom_models": __version__,
                "torch": torch.__version__,  # with the build, such as +cu130
                **{name: version(name) for name in PACKAGES},
            },
        }
    )


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def markdown_cell(value: object) -> str:
    """The text of a value in a cell of a table in Markdown."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def read_results(output_dir: str | os.PathLike) -> dict[str, Any] | None:
    """What [`write_results`] wrote into `output_dir`, null in `results` as NaN; None if there is no such file."""
    content = read_json(Path(output_dir, RESULTS))
    return content if content is None else {**content, "results": _with_nan(content.get("results", {}))}


def write_results(
    output_dir: str | os.PathLike,
    results: Mapping[str, Any],
    *arguments: Any,
    identity: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `all_results.json`, complete or not at all.

    Args:
        output_dir: an existing folder.
        results: figures, in any nesting; NaN is written as null.
        arguments: dataclasses, whose fields are written. Fields whose names end in `_token` are secret and left out.
        identity: digests of the data and weights that the results come from.

    Returns:
        The file: an object with `results`, `arguments`, `identity` and `versions`.
    """
    path = Path(output_dir, RESULTS)
    write_json(path, results_content(results, *arguments, identity=identity))
    return path


def discard_results(output_dir: str | os.PathLike) -> None:
    """Removes the `all_results.json` of a run whose model is about to be replaced, and before it the summaries that
    count the run: of its grid, and of GLUE's tasks."""
    folder = Path(output_dir).absolute()
    if _is_counted(folder):
        discard_results(folder.parent)
    (folder / RESULTS).unlink(missing_ok=True)


def _is_counted(folder: Path) -> bool:
    """Whether the folder above has a summary that names this one."""
    try:
        content = read_json(folder.parent / RESULTS)
    except (OSError, ValueError):  # of another program
        return False
    results = content.get("results") if isinstance(content, Mapping) else None
    if not isinstance(results, Mapping):
        return False
    runs = [name for point in results.get("grid", ()) for name in point["runs"]]
    return folder.name in (*runs, *results.get("tasks", ()))


def validation_metrics(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Loss and metrics of the validation sets in `results`, by name, or by `{split}/{name}` if there are several."""
    splits = [split for split in results if split.startswith("validation")]
    return {
        name if len(splits) == 1 else f"{split}/{name}": value
        for split in splits
        for name, value in results[split].items()
    }
