# SPDX-License-Identifier: Apache-2.0
"""A model's attention measured on its own inputs, layer by layer."""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from .capture import LayerAttention, visit_attention
from .measures import (
    cumulative_share,
    exact_map,
    landmark_matrix,
    nystrom_map,
    pinv_residual,
    relative_error,
    singular_values,
    squared_sums,
    squared_tails,
)
from .results import Inspection, Layer, Setting, Spectrum, Sums

NUM_LANDMARKS = (16, 32, 64, 128, 256)
# Side of the maps that are kept for drawing, in pixels.
PICTURE = 128


def inspect_attention(
    model: PreTrainedModel,
    inputs: Iterable[Mapping[str, Tensor]],
    *,
    num_landmarks: Sequence[int] = NUM_LANDMARKS,
    pinv_iterations: Sequence[int] = (6,),
    max_rows: int = 512,
    layers: Collection[int] | None = None,
    token: int | None = None,
    seed: int = 0,
    on_layer: Callable[[], object] = lambda: None,
) -> Inspection:
    """Measures the error of linear attention against exact softmax attention in each layer and head of a model.

    Every layer is measured on its inputs in the unchanged model: after layers with exact attention in a model of
    Transformers, after layers with the model's own attention in a model of this package.

    - Models of Transformers and Nyströmformers: Nyström attention with each of `num_landmarks` and `pinv_iterations`,
      and with a Nyströmformer's own numbers.
    - Linformers: their own projections. Linear transformers: the map of their kernel.
    - All: the singular values of the exact maps of the longest rows with at most `max_rows` tokens.

    Convolutions are left out, because they approximate nothing. See `measures` for the formulas.

    Args:
        model: see `visit_attention`.
        inputs: the arguments of each call of the model. The length of a row is its number of valid tokens.
        num_landmarks, pinv_iterations: the numbers to try.
        max_rows: rows of a map that are measured; of longer maps, this many are drawn at random, without replacement.
        layers: the attention layers to measure, counted from 0; all if None.
        token: the position of a token, counted from 0, -1 for the last; `Layer.token` then holds what it attends to in
            the first of the longest rows, exactly and with the main setting.
        seed: the seed of the rows that are drawn.
        on_layer: called after each layer, for a progress bar.

    Raises:
        ValueError: for numbers below 1, for layers or a token that do not exist, for inputs without a valid token, for
            layers that attend to rows of different lengths, and for models that cannot be inspected.
    """
    # NumPy's arrays have no truth value, and their integers are not Python's.
    num_landmarks = list(map(operator.index, num_landmarks))
    pinv_iterations = list(map(operator.index, pinv_iterations))
    for name, numbers in (("num_landmarks", num_landmarks), ("pinv_iterations", pinv_iterations)):
        if not numbers or min(numbers) < 1:
            raise ValueError(f"{name} must be numbers of at least 1, but is {numbers}.")
    if max_rows < 2:
        raise ValueError(f"max_rows must be at least 2, but is {max_rows}.")
    layers = None if layers is None else set(map(operator.index, layers))
    if layers is not None and not layers:
        raise ValueError("layers is empty: give the numbers of attention layers, or None for all.")
    measuring = _Measuring(model, num_landmarks, pinv_iterations, max_rows, layers, token, seed, on_layer)
    skipped: dict[str, str] = {}
    for call in inputs:
        skipped |= visit_attention(model, call, measuring.visit)
    if not measuring.seen:
        raise ValueError("inputs is empty: give the arguments of at least one call of the model.")
    if layers is not None and (unknown := sorted(layers - measuring.seen)):
        raise ValueError(f"layers names {unknown}, but the model's attention layers are 0 to {max(measuring.seen)}.")
    found = dict(sorted(measuring.layers.items()))
    if not found:
        raise ValueError("inputs have no valid token: give an attention_mask with 1 at the tokens.")
    _require_same_lengths(found)
    if token is not None and all(layer.token is None for layer in found.values()):
        longest = max(setting.length for layer in found.values() for setting in layer.errors)
        raise ValueError(f"token must lie between 0 and {longest - 1}, or be negative, but is {token}.")
    settings = sorted(
        {setting for layer in found.values() for setting in layer.errors},
        key=lambda s: (s.length, s.method, s.num_landmarks or 0, s.pinv_iterations or 0),
    )
    return Inspection(found, settings, measuring.main_setting(settings), skipped)


def _require_same_lengths(layers: Mapping[int, Layer]) -> None:
    """Raises ValueError for layers of rows of different lengths, as in a model of texts and images: their errors would
    not be those of one setting."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, layer in layers.items():
        lengths = tuple(sorted({setting.length for setting in layer.errors}))
        groups.setdefault(lengths, []).append(index)
    if len(groups) > 1:
        first, second, *_ = groups.values()
        raise ValueError(
            f"Layers {first} and {second} attend to rows of different lengths, which have no error in common: inspect "
            f"them one after the other, by layers={first} and layers={second}, or give one part of the model."
        )


class _Measuring:
    """What `inspect_attention` collects while the model runs."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_landmarks: Sequence[int],
        pinv_iterations: Sequence[int],
        max_rows: int,
        layers: Collection[int] | None,
        token: int | None,
        seed: int,
        on_layer: Callable[[], object],
    ):
        # If each layer has its own number, there is no setting that all layers share.
        own = getattr(model.config, "num_landmarks", None)
        own_numbers = [number for number in (own if isinstance(own, list) else [own]) if number is not None]
        own_iterations = getattr(model.config, "pinv_iterations", None)
        self.num_landmarks = sorted({*num_landmarks, *own_numbers})
        self.pinv_iterations = sorted({*pinv_iterations} | ({own_iterations} if own_iterations else set()))
        self.own_landmarks = own if isinstance(own, int) else None
        self.main_iterations: int = own_iterations or _middle(self.pinv_iterations)
        self.max_rows, self.chosen_layers, self.token, self.seed = max_rows, layers, token, seed
        self.on_layer = on_layer
        self.layers: dict[int, Layer] = {}
        self.seen: set[int] = set()
        self.rows: dict[int, Tensor] = {}

    def visit(self, attention: LayerAttention) -> None:
        self.seen.add(attention.index)
        if self.chosen_layers is None or attention.index in self.chosen_layers:
            for row in range(len(attention.query)):
                self.measure(_Row(attention, row))
        self.on_layer()

    def measure(self, row: "_Row") -> None:
        index, length = row.attention.index, row.length
        if length == 0:
            return
        layer = self.layers.setdefault(index, Layer(row.attention.name, len(row.query)))
        rows = self.rows_of(length).to(row.query.device)
        exact = row.exact_map(rows)
        exact_output = exact @ row.value
        main, main_error = None, None
        for setting in self.settings(row):
            found, output = row.approximation(setting, rows)
            sums = Sums(squared_sums(found, exact).cpu(), squared_sums(output, exact_output).cpu())
            if setting.num_landmarks is not None and setting.num_landmarks < length:
                matrix = landmark_matrix(row.query, row.key, setting.num_landmarks, row.attention.scaling)
                sums.residuals.append(pinv_residual(matrix, setting.pinv_iterations or 0).cpu())
            layer.add_errors(setting, sums)
            if self.is_main(setting):
                main, main_error = found, relative_error(squared_sums(found, exact)).cpu()
        is_longest = layer.spectrum is None or layer.spectrum.length <= length
        if length <= self.max_rows and is_longest:
            values = singular_values(exact).cpu()
            layer.add_spectrum(Spectrum(length, cumulative_share(values), squared_tails(values)))
            if main is not None and layer.spectrum is not None and layer.spectrum.texts == 1:
                layer.pictures = torch.stack([_shrunk(exact), _shrunk(main)])
                layer.picture_errors = main_error
        has_token = self.token is not None and -length <= self.token < length
        if has_token and (layer.token is None or layer.token.shape[-1] < length):
            layer.token = self.rows_of_token(row).cpu()

    def settings(self, row: "_Row") -> list[Setting]:
        if row.attention.own is not None:
            return [Setting(row.length, row.attention.method)]
        return [
            Setting(row.length, "nystrom", number, iterations)
            for number in self.num_landmarks
            for iterations in self.pinv_iterations
        ]

    def is_main(self, setting: Setting) -> bool:
        """Whether a setting is the main one, apart from its length."""
        number = self.own_landmarks
        if number is None:
            # As many landmarks as tokens would be exact attention.
            fewer = [tried for tried in self.num_landmarks if tried < setting.length]
            number = _middle(fewer or self.num_landmarks)
        wanted = (number, self.main_iterations)
        return setting.method != "nystrom" or (setting.num_landmarks, setting.pinv_iterations) == wanted

    def main_setting(self, settings: Sequence[Setting]) -> Setting:
        """The model's own setting at the greatest length; without one, the middle one of those that approximate."""
        length = max(setting.length for setting in settings)
        return next(setting for setting in settings if setting.length == length and self.is_main(setting))

    def rows_of(self, length: int) -> Tensor:
        """The rows of a map that are measured, (R,) int64, the same in all layers."""
        if length not in self.rows:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randperm(length, generator=generator)[: self.max_rows]
            self.rows[length] = drawn.sort().values
        return self.rows[length]

    def rows_of_token(self, row: "_Row") -> Tensor:
        """(2, H, N): what the chosen token attends to, exactly and with the main setting."""
        assert self.token is not None
        place = torch.tensor([self.token % row.length], device=row.query.device)
        setting = next(setting for setting in self.settings(row) if self.is_main(setting))
        return torch.stack([row.exact_map(place)[:, 0], row.approximation(setting, place)[0][:, 0]])


def measuring_device(device: torch.device) -> torch.device:
    """The device on which a model on `device` is measured: the CPU for Apple's MPS, which has no float64, and whose
    singular values and adaptive pooling do not work in all versions of PyTorch."""
    return torch.device("cpu") if device.type == "mps" else device


class _Row:
    """The valid tokens of one row in one layer: query, key, value (H, N, D), in float32 at least."""

    def __init__(self, attention: LayerAttention, row: int):
        self.attention, self.row = attention, row
        states = (attention.query[row], attention.key[row], attention.value[row])
        if attention.mask is not None:
            states = tuple(tensor[:, attention.mask[row]] for tensor in states)  # type: ignore[assignment]
        dtype = torch.promote_types(attention.query.dtype, torch.float32)
        device = measuring_device(attention.query.device)
        self.query, self.key, self.value = (tensor.to(device, dtype) for tensor in states)
        self.length = self.query.shape[1]

    def exact_map(self, rows: Tensor) -> Tensor:
        return exact_map(self.query, self.key, self.attention.scaling, rows, self.attention.is_causal)

    def approximation(self, setting: Setting, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The map (H, R, N) and the output (H, R, D)."""
        if self.attention.own is not None:
            # In these models, the valid tokens come first in each row.
            own_map, output = self.attention.own(rows.to(self.attention.query.device))
            return own_map[self.row, :, :, : self.length].to(self.query), output[self.row].to(self.query)
        iterations = setting.pinv_iterations or 0
        found = nystrom_map(self.query, self.key, setting.num_landmarks, iterations, self.attention.scaling, rows)
        return found, found @ self.value


def _middle(numbers: Sequence[int]) -> int:
    return numbers[len(numbers) // 2]


def _shrunk(attention_map: Tensor) -> Tensor:
    """(H, N, N) -> (H, P, P), means of blocks, for a picture."""
    return F.adaptive_avg_pool2d(attention_map, min(PICTURE, attention_map.shape[-1])).half().cpu()
