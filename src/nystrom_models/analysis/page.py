# SPDX-License-Identifier: Apache-2.0
"""An `Inspection` as one self-contained HTML page: sortable tables, pictures as SVG."""

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from .drawing import describe, pictures
from .results import Inspection

Row = Mapping[str, Any]


def page(inspection: Inspection, content: Mapping[str, Any], error: float) -> str:
    """The page.

    Args:
        content: the result of `report.content`, of which the page uses model, command, versions and token.
        error: the relative error for which the needed numbers are shown.
    """
    name = content["model"]["name"]
    parts = [f"<h1>Attention of {_text(name)}</h1>", f"<p>{_summary(inspection, content)}</p>"]
    parts += [_configuration(inspection, error)]
    parts += ["<h2>Layers</h2>", _table(_layer_rows(inspection, error))]
    if inspection.mlm_by_layer is not None:
        parts += _exact_layers(inspection.mlm_by_layer)
    parts.append('<div class="figures">')
    for picture in pictures(inspection):
        caption = f"<figcaption><b>{_text(picture.title)}</b>{_text(picture.caption)}</figcaption>"
        parts.append(f'<figure id="{picture.name}">{picture.svg()}{caption}</figure>')
    parts.append("</div>")
    if content["token"] is not None:
        parts += _token(content["token"])
    parts += ["<h2>Heads</h2>", _table(_head_rows(inspection, error))]
    parts += ["<h2>All that was measured</h2>", _table(_setting_rows(inspection))]
    if inspection.skipped:
        rows = [{"layer": layer, "reason": reason} for layer, reason in inspection.skipped.items()]
        parts += ["<h2>Layers that were left out</h2>", _table(rows)]
    parts += ["<h2>How it was measured</h2>", f"<p>{_text(_METHOD)}</p>"]
    parts.append(f"<pre>{_text(content['command'])}</pre>")
    versions = "\n".join(f"{key}: {value}" for key, value in content["versions"].items())
    parts.append(f"<pre>{_text(versions)}</pre>")
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("{{title}}", _text(f"Attention of {name}")).replace("{{body}}", "\n".join(parts))


_METHOD = (
    "Every layer is measured on its inputs in the unchanged model. The relative error of an approximation X̂ of X, a "
    "map or an output of exact softmax attention, is √(Σ (x̂ − x)² / Σ x²), over all entries, and over all heads and "
    "texts that a figure covers. The residual is ‖A Z A − A‖ / ‖A‖ of the landmarks' attention A and its iterative "
    "pseudo-inverse Z. Convolutions are left out. The rank needed is the smallest k for which the best map of rank k "
    "stays within the error (Eckart and Young): fewer slots cannot."
)


def _summary(inspection: Inspection, content: Mapping[str, Any]) -> str:
    main = inspection.main
    own = {"linformer": "the model's own projections", "linear": "the model's own kernel"}
    what = own.get(main.method, "Nyström attention")
    return _text(
        f"{what[0].upper()}{what[1:]} compared with exact softmax attention in {len(inspection.layers)} layers of a "
        f"{content['model']['model_type']}, on {content['settings']['texts']} texts; {describe(main)}. The output "
        f"differs by {inspection.model_error(main):.1%}, the map by {inspection.model_error(main, 'map'):.1%}, the "
        "mean over layers."
    )


def _configuration(inspection: Inspection, error: float) -> str:
    """The numbers that a given error needs, as lines of a configuration."""
    lines = []
    landmarks, ranks = inspection.landmarks_needed(error), inspection.ranks_needed(error)
    if landmarks["by_layer"]:
        lines += [f"num_landmarks={landmarks['by_layer']}"]
    if ranks["by_layer"]:
        lines += [f"projected_dim={ranks['by_layer']}", f"projected_dim={ranks['by_head']}"]
    text = (
        f"Landmarks by layer, for the output at {inspection.main.length:,} tokens. If no number that was tried is "
        "enough, it is the number of tokens: exact attention. "
        if landmarks["by_layer"]
        else ""
    )
    if ranks["by_layer"]:
        text += (
            f"The rank of the maps by layer and by head, at {inspection.spectrum_length:,} tokens: a Linformer with "
            "fewer slots has a larger error."
        )
    return f"<h2>What an error of {error:g} needs</h2><p>{_text(text)}</p><pre>{_text(chr(10).join(lines))}</pre>"


def _layer_rows(inspection: Inspection, error: float) -> list[Row]:
    landmarks, ranks = (
        found["by_layer"] for found in (inspection.landmarks_needed(error), inspection.ranks_needed(error))
    )
    rows: list[Row] = []
    for place, (index, layer) in enumerate(inspection.layers.items()):
        residual = inspection.residual(index, inspection.main)
        row: dict[str, Any] = {
            "layer": index,
            "output error": inspection.layer_error(index, inspection.main),
            "map error": inspection.layer_error(index, inspection.main, "map"),
        }
        if inspection.main.method == "nystrom":
            row["residual"] = None if residual is None else residual.mean().item()
        if landmarks:
            row["landmarks needed"] = landmarks[place]
        if ranks:
            row["rank needed"] = ranks[place]
        rows.append({**row, "name": layer.name})
    return rows


def _exact_layers(found: Sequence[Row]) -> list[str]:
    """The accuracy of masked tokens with exact attention in some layers."""
    rows = [
        {
            "exact layers": ", ".join(map(str, row["exact_layers"])),
            "accuracy": row["mlm_accuracy"],
            "standard error": row["standard_error"],
            "loss": row["mlm_loss"],
            "num_landmarks": str(row["num_landmarks"]),
        }
        for row in found
    ]
    text = (
        "Accuracy of masked tokens with exact attention in some layers and landmarks in all others: first in each "
        "layer alone, then with layers added in the order of their losses."
    )
    return ["<h2>Masked tokens with exact layers</h2>", f"<p>{_text(text)}</p>", _table(rows)]


def _head_rows(inspection: Inspection, error: float) -> list[Row]:
    landmarks, ranks = (
        found["by_head"] for found in (inspection.landmarks_needed(error), inspection.ranks_needed(error))
    )
    rows: list[Row] = []
    for place, index in enumerate(inspection.layers):
        outputs, maps = inspection.output_error(index, inspection.main), inspection.map_error(index, inspection.main)
        for head in range(len(outputs)):
            row: dict[str, Any] = {
                "layer": index,
                "head": head,
                "output error": outputs[head].item(),
                "map error": maps[head].item(),
            }
            if landmarks:
                row["landmarks needed"] = landmarks[place][head]
            if ranks:
                row["rank needed"] = ranks[place][head]
            rows.append(row)
    return rows


def _setting_rows(inspection: Inspection) -> list[Row]:
    rows: list[Row] = []
    for setting in inspection.settings:
        row: dict[str, Any] = {"length": setting.length}
        if setting.method == "nystrom":
            row |= {"landmarks": setting.num_landmarks, "iterations": setting.pinv_iterations}
        row |= {
            "output error": inspection.model_error(setting),
            "map error": inspection.model_error(setting, "map"),
        }
        rows.append(row)
    return rows


def _token(token: Mapping[str, Any]) -> list[str]:
    """What the chosen token attends to, as the mean over heads."""
    rows = []
    for layer in token["layers"]:
        for rank, (exact, near) in enumerate(zip(layer["exact"], layer["approximated"], strict=True), start=1):
            rows.append(
                {
                    "layer": layer["layer"],
                    "place": rank,
                    "exact: token": f"{exact['token']} ({exact['index']})",
                    "weight": exact["weight"],
                    "approximated: token": f"{near['token']} ({near['index']})",
                    "its weight": near["weight"],
                }
            )
    heading = f"What token {token['index']}, {token['token']}, attends to"
    text = f"The largest weights in a row of {token['length']:,} tokens, the mean over heads; positions in brackets."
    return [f"<h2>{_text(heading)}</h2>", f"<p>{_text(text)}</p>", _table(rows)]


def _table(rows: Sequence[Row]) -> str:
    """A table that is sorted by a click on the head of a column."""
    names = list(rows[0])
    kinds = [' class="text"' if isinstance(value, str) else "" for value in rows[0].values()]
    head = "".join(
        f'<th scope="col"{kind}><button type="button">{_text(name)}</button></th>'
        for name, kind in zip(names, kinds, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(row[name], kind) for name, kind in zip(names, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any, kind: str) -> str:
    if value is None:
        return f"<td{kind}></td>"
    if isinstance(value, float):
        return f'<td{kind} data-value="{value!r}">{value:.3g}</td>'
    return f"<td{kind}>{_text(str(value))}</td>"


def _text(text: str) -> str:
    return html.escape(text)
