# SPDX-License-Identifier: Apache-2.0
"""The measurements of a model's attention, and figures derived from them.

Legend: H heads, N tokens, P pixels along a side of a picture.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .measures import relative_error, smallest_rank, smallest_sufficient


class Setting(NamedTuple):
    """How a layer was approximated. `num_landmarks` and `pinv_iterations` are None except for "nystrom"."""

    length: int
    method: str
    num_landmarks: int | None = None
    pinv_iterations: int | None = None


@dataclass
class Sums:
    """`squared_sums` of maps and outputs over texts, (H, 2) each; residuals of the pseudo-inverse, (H,) per text."""

    map: Tensor
    output: Tensor
    residuals: list[Tensor] = field(default_factory=list)

    def add(self, other: "Sums") -> None:
        self.map = self.map + other.map
        self.output = self.output + other.output
        self.residuals += other.residuals


@dataclass
class Spectrum:
    """Of the exact maps of a layer: `cumulative_share` (H, n) and `squared_tails`, summed over texts; their number."""

    length: int
    share: Tensor
    tails: Tensor
    texts: int = 1

    def add(self, other: "Spectrum") -> None:
        self.share = self.share + other.share
        self.tails = self.tails + other.tails
        self.texts += 1


@dataclass
class Layer:
    """The measurements of a layer.

    errors: sums by setting. spectrum: that of the exact maps.
    pictures: (2, H, P, P), the exact and the approximated maps of a text. picture_errors: (H,), the relative errors of
        these.
    token: what the chosen token attends to, (2, H, N), exactly and approximated.
    """

    name: str
    num_heads: int
    errors: dict[Setting, Sums] = field(default_factory=dict)
    spectrum: Spectrum | None = None
    pictures: Tensor | None = None
    picture_errors: Tensor | None = None
    token: Tensor | None = None

    def add_errors(self, setting: Setting, sums: Sums) -> None:
        """Adds the errors of a text to those of the same setting."""
        if setting in self.errors:
            self.errors[setting].add(sums)
        else:
            self.errors[setting] = sums

    def add_spectrum(self, spectrum: Spectrum) -> None:
        """Adds the spectrum of a text; only spectra of the greatest length are kept."""
        if self.spectrum is None or self.spectrum.length < spectrum.length:
            self.spectrum = spectrum
        else:
            self.spectrum.add(spectrum)


@dataclass
class Inspection:
    """What `inspect_attention` measured.

    layers: by their number among the attention layers. settings: all that were measured. main: the one that pictures
    and tables show first. skipped: layers that were left out, with the reason. mlm, mlm_by_layer: the results of
    `masked_accuracy` and `masked_accuracy_by_layer` for rows of the main setting's length, if they were computed.
    """

    layers: dict[int, Layer]
    settings: list[Setting]
    main: Setting
    skipped: dict[str, str]
    mlm: list[dict[str, Any]] | None = None
    mlm_by_layer: list[dict[str, Any]] | None = None

    # ---- errors ----

    def map_error(self, layer: int, setting: Setting) -> Tensor:
        """(H,), the relative error of each head's map."""
        return relative_error(self.layers[layer].errors[setting].map)

    def output_error(self, layer: int, setting: Setting) -> Tensor:
        """(H,), the relative error of each head's output."""
        return relative_error(self.layers[layer].errors[setting].output)

    def residual(self, layer: int, setting: Setting) -> Tensor | None:
        """(H,), the residual of the pseudo-inverse, the mean over texts; None for exact attention."""
        residuals = self.layers[layer].errors[setting].residuals
        return torch.stack(residuals).mean(dim=0) if residuals else None

    def layer_error(self, layer: int, setting: Setting, of: str = "output") -> float:
        """The relative error over all heads; of: "output" or "map"."""
        return relative_error(getattr(self.layers[layer].errors[setting], of).sum(dim=0)).item()

    def model_error(self, setting: Setting, of: str = "output") -> float:
        """The mean of the layers' relative errors."""
        return sum(self.layer_error(layer, setting, of) for layer in self.layers) / len(self.layers)

    # ---- what a given error needs ----

    def landmarks_needed(self, error: float) -> dict[str, list]:
        """How many landmarks keep the relative error of the output within `error`, at the greatest length measured.

        It is the smallest number such that it and all larger ones that were tried are enough; if none is, the length,
        which gives exact attention.

        Returns: "by_layer", a number for each layer, and "by_head", a list for each layer. Empty lists if no Nyström
        attention was measured.
        """
        tried = [s for s in self.settings if s.method == "nystrom" and s.pinv_iterations == self.main.pinv_iterations]
        length = max((setting.length for setting in tried), default=0)
        tried = [setting for setting in tried if setting.length == length]
        needed: dict[str, list] = {"by_layer": [], "by_head": []}
        for index in self.layers if tried else ():
            by_layer = [(s.num_landmarks or 0, self.layer_error(index, s)) for s in tried]
            needed["by_layer"].append(smallest_sufficient(by_layer, error, length))
            by_head = torch.stack([self.output_error(index, s) for s in tried], dim=1).tolist()
            numbers = [s.num_landmarks or 0 for s in tried]
            needed["by_head"].append(
                [smallest_sufficient(list(zip(numbers, head, strict=True)), error, length) for head in by_head]
            )
        return needed

    def ranks_needed(self, error: float) -> dict[str, list]:
        """The smallest k for which some map of rank k is within a relative error of the exact one: a lower bound for a
        Linformer's `projected_dim`, at the length of the spectrum.

        Returns: "by_layer" and "by_head", as `landmarks_needed`; the k of a layer is the same for all of its heads,
        and its error is taken over all heads. Empty lists if no spectrum was measured.
        """
        needed: dict[str, list] = {"by_layer": [], "by_head": []}
        for layer in self.layers.values():
            if layer.spectrum is not None:
                needed["by_layer"].append(smallest_rank(layer.spectrum.tails.sum(dim=0), error))
                needed["by_head"].append([smallest_rank(tails, error) for tails in layer.spectrum.tails])
        return needed

    @property
    def spectrum_length(self) -> int | None:
        """Length of the rows whose singular values were measured; None if none were."""
        return next((layer.spectrum.length for layer in self.layers.values() if layer.spectrum is not None), None)

    # ---- as plain data ----

    def to_dict(self, error: float) -> dict[str, Any]:
        """All figures for JSON: lists, numbers, strings."""
        errors = []
        for setting in self.settings:
            for index in self.layers:
                residual = self.residual(index, setting)
                errors.append(
                    {
                        "layer": index,
                        **setting._asdict(),
                        "map_error": _rounded(self.layer_error(index, setting, "map")),
                        "output_error": _rounded(self.layer_error(index, setting)),
                        "map_error_by_head": _rounded(self.map_error(index, setting).tolist()),
                        "output_error_by_head": _rounded(self.output_error(index, setting).tolist()),
                        "pinv_residual_by_head": None if residual is None else _rounded(residual.tolist()),
                    }
                )
        spectra = [
            {
                "layer": index,
                "length": layer.spectrum.length,
                "cumulative_share_by_head": _rounded((layer.spectrum.share / layer.spectrum.texts).tolist()),
            }
            for index, layer in self.layers.items()
            if layer.spectrum is not None
        ]
        return {
            "layers": [
                {"layer": index, "name": layer.name, "num_heads": layer.num_heads}
                for index, layer in self.layers.items()
            ],
            "skipped_layers": [{"name": name, "reason": reason} for name, reason in self.skipped.items()],
            "main_setting": self.main._asdict(),
            "errors": errors,
            "mlm": self.mlm,
            "mlm_by_layer": self.mlm_by_layer,
            "spectra": spectra,
            "needed": {
                "error": error,
                "num_landmarks": {"length": self.main.length, **self.landmarks_needed(error)},
                "projected_dim": {"length": self.spectrum_length, **self.ranks_needed(error)},
            },
        }


def _rounded(value: Any) -> Any:
    """Rounds numbers, in lists of any depth, to five significant digits."""
    return [_rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.5g}")
