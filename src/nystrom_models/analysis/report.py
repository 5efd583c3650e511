# SPDX-License-Identifier: Apache-2.0
"""An `Inspection` as files: inspection.json, inspection.html and pictures."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..json_values import json_value
from .results import Inspection

# Increased with every change that may break a program that reads the file.
SCHEMA_VERSION = 1
# Number of tokens that reports show for a chosen token: those with the largest weights.
MOST = 10


def content(
    inspection: Inspection,
    *,
    error: float,
    model: Mapping[str, Any],
    settings: Mapping[str, Any],
    command: str,
    versions: Mapping[str, str],
    token: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of inspection.json, in which numbers that are not finite become null. They come from too many
    iterations of the pseudo-inverse.

    - schema_version, command, versions, model (name, model_type) and settings, as given.
    - layers: layer (its number), name, num_heads. skipped_layers: name, reason.
    - main_setting: length, method, num_landmarks, pinv_iterations.
    - errors: for each layer and setting output_error and map_error, over all heads and by head, and
      pinv_residual_by_head, null where there is no pseudo-inverse.
    - mlm: for each number of landmarks (null: exact) the accuracy of masked tokens; null if it was not measured.
    - mlm_by_layer: the same with exact attention in exact_layers alone; null if it was not measured.
    - spectra: for each layer the normalised cumulative singular values by head.
    - needed: for the relative error `error` num_landmarks and projected_dim, by_layer and by_head, at a length.
    - token: see `attended`; null if none was chosen.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "versions": dict(versions),
        "model": dict(model),
        "settings": dict(settings),
        **inspection.to_dict(error),
        "token": None if token is None else dict(token),
    }


def attended(inspection: Inspection, token: int, ids: Tensor, name_of: Callable[[int], str]) -> dict[str, Any]:
    """What a token attends to most in each layer, as the mean over heads, exactly and with the main setting.

    Args:
        token: its position in the row, counted from 0, or from the end if negative.
        ids: (N,), the ids of the row. name_of: gives the name of an id.
    """

    def most(weights: Tensor) -> list[dict[str, Any]]:
        found = weights.topk(min(MOST, len(weights)))
        return [
            {"index": place, "token": name_of(int(ids[place])), "weight": float(f"{weight:.5g}")}
            for weight, place in zip(found.values.tolist(), found.indices.tolist(), strict=True)
        ]

    layers = []
    for index, layer in inspection.layers.items():
        assert layer.token is not None
        exact, approximated = layer.token.mean(dim=1)
        layers.append({"layer": index, "exact": most(exact), "approximated": most(approximated)})
    place = token % len(ids)
    return {"index": place, "token": name_of(int(ids[place])), "length": len(ids), "layers": layers}


def write_report(inspection: Inspection, content: Mapping[str, Any], output_dir: str | os.PathLike) -> list[Path]:
    """Writes inspection.json, inspection.html and the pictures; returns their paths, the page first.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from .drawing import pictures
    from .page import page

    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "inspection.html", folder / "inspection.json"]
    paths[0].write_text(page(inspection, content, content["needed"]["error"]), encoding="utf-8")
    paths[1].write_text(json.dumps(json_value(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for picture in pictures(inspection):
        paths.append(folder / f"{picture.name}.png")
        picture.save(paths[-1])
    return paths
