# SPDX-License-Identifier: Apache-2.0
"""What was measured of a model's attention, and what follows from it.

Legend: H heads, N tokens, P pixels along a side of a picture.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .measures import relative_error, smallest_rank, smallest_sufficient


class Setting(NamedTuple):
    """What a layer was approximated with. `num_landmarks` and `pinv_iterations` are None but for "nystrom"."""

    length: int
    method: str
    num_landmarks: int | None = None
    pinv_iterations: int | None = None


@dataclass
class Sums:
    """(H, 2) each, `squared_sums` over texts; the residuals of the pseudo-inverse, (H,), one a text."""

    map: Tensor
    output: Tensor
    residuals: list[Tensor] = field(default_factory=list)

    def add(self, other: "Sums") -> None:
        self.map = self.map + other.map
        self.output = self.output + other.output
        self.residuals += other.residuals


@dataclass
class Spectrum:
    """Of the true maps of a layer: `cumulative_share` (H, n), summed over texts, their number; `squared_tails`."""

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
    """What was measured of a layer.

    errors: sums by setting. spectrum: of the true maps. pictures: (2, H, P, P), true and approximated maps of a text.
    token: what the chosen token attends to, (2, H, N), exactly and approximated.
    """

    name: str
    num_heads: int
    errors: dict[Setting, Sums] = field(default_factory=dict)
    spectrum: Spectrum | None = None
    pictures: Tensor | None = None
    token: Tensor | None = None

    def add_errors(self, setting: Setting, sums: Sums) -> None:
        """Adds the errors of a text to those of the same setting."""
        if setting in self.errors:
            self.errors[setting].add(sums)
        else:
            self.errors[setting] = sums

    def add_spectrum(self, spectrum: Spectrum) -> None:
        """Of the greatest length alone."""
        if self.spectrum is None or self.spectrum.length < spectrum.length:
            self.spectrum = spectrum
        else:
            self.spectrum.add(spectrum)


@dataclass
class Inspection:
    """What `inspect_attention` measured.

    layers: by their place among the attention layers. settings: all that were measured. main: the one that pictures
    and tables show first. skipped: layers that were left out, with the reason. mlm: what `masked_accuracy` gave for
    rows of the main setting's length, if it was asked.
    """

    layers: dict[int, Layer]
    settings: list[Setting]
    main: Setting
    skipped: dict[str, str]
    mlm: list[dict[str, Any]] | None = None

    # ---- errors ----

    def map_error(self, layer: int, setting: Setting) -> Tensor:
        """(H,): of each head's map."""
        return relative_error(self.layers[layer].errors[setting].map)

    def output_error(self, layer: int, setting: Setting) -> Tensor:
        """(H,): of each head's output."""
        return relative_error(self.layers[layer].errors[setting].output)

    def residual(self, layer: int, setting: Setting) -> Tensor | None:
        """(H,): of the pseudo-inverse, the mean over texts; None where there is none, in exact attention."""
        residuals = self.layers[layer].errors[setting].residuals
        return torch.stack(residuals).mean(dim=0) if residuals else None

    def layer_error(self, layer: int, setting: Setting, of: str = "output") -> float:
        """Of all heads together; of: "output" or "map"."""
        return relative_error(getattr(self.layers[layer].errors[setting], of).sum(dim=0)).item()

    def model_error(self, setting: Setting, of: str = "output") -> float:
        """The mean over layers."""
        return sum(self.layer_error(layer, setting, of) for layer in self.layers) / len(self.layers)

    # ---- what a given error needs ----

    def landmarks_needed(self, error: float) -> dict[str, list]:
        """How many landmarks keep the relative error of the output within `error`, at the greatest length measured.

        Of the numbers that were tried, the least from which on all are good enough; the length itself, which is exact
        attention, if none is.

        Returns: "by_layer", a list with a number a layer, and "by_head", one with a list a layer. Empty lists where no
        Nyström attention was measured.
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
        """The least k for which a map of rank k can come within a relative error of the true one: a lower bound for a
        Linformer's `projected_dim`, at the length of the spectrum.

        Returns: "by_layer" and "by_head", as `landmarks_needed`; a layer's k is the same for all of its heads, and
        the error then that of all heads together. Empty lists where no spectrum was measured.
        """
        needed: dict[str, list] = {"by_layer": [], "by_head": []}
        for layer in self.layers.values():
            if layer.spectrum is not None:
                needed["by_layer"].append(smallest_rank(layer.spectrum.tails.sum(dim=0), error))
                needed["by_head"].append([smallest_rank(tails, error) for tails in layer.spectrum.tails])
        return needed

    @property
    def spectrum_length(self) -> int | None:
        """Tokens of the rows whose singular values were measured; None where none were."""
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
            "spectra": spectra,
            "needed": {
                "error": error,
                "num_landmarks": {"length": self.main.length, **self.landmarks_needed(error)},
                "projected_dim": {"length": self.spectrum_length, **self.ranks_needed(error)},
            },
        }


def _rounded(value: Any) -> Any:
    """Numbers with five significant digits, in lists of any depth."""
    return [_rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.5g}")
