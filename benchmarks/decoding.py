# SPDX-License-Identifier: Apache-2.0
"""Causal models: a generated token over the length of the context, prefill, and a training step.

Our linear transformer is compared with a GPT-2 of the same size with exact attention (PyTorch's
`scaled_dot_product_attention`) and two key-value caches: the one that `generate` uses by default, and a static one,
which has its full length from the start and is never copied. Both run the same loop: a call of the model for one
token, then the most likely token from its logits. The caches then forget this token, so that every timed one follows
the same number of tokens. Weights are random.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel, StaticCache

from benchmarks.measure import interleave, spread
from benchmarks.runners import peak_memory
from nystrom_models import LinearTransformerConfig, LinearTransformerForCausalLM
from nystrom_models.models.attention_linear import elu_features, linear_attention
from nystrom_models.models.recurrent_cache import CACHE

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 256, 4, 1000
# Shown in the tables.
SIZES = f": {LAYERS} layers of {WIDTH}, vocabulary {VOCABULARY}"
OURS, GROWING, STATIC = "linear transformer", "GPT-2, its cache", "GPT-2, static cache"
PREFILL_CHUNK = 8192
DEFAULT_LENGTHS = {
    "decode": [1024, 2048, 8192, 32768, 131072],
    "prefill": [2048, 8192, 32768],
    "train": [1024, 4096, 16384, 65536],
    "projected": [512, 2048, 8192],
}
# Above this length, a sample of exact attention would take minutes.
LONGEST_EXACT = {"decode": 32768, "prefill": 32768, "train": 16384, "projected": 0}
PROJECTED_DIM = 256
PROJECTED = f"projected_dim={PROJECTED_DIM}"


class Place(NamedTuple):
    """The device of models, and the dtype of their weights."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32


def linear_transformer(place: Place) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LinearTransformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        hidden_dropout_prob=0.0,
        is_decoder=True,
        position_embedding_type="sinusoidal",
    )
    return LinearTransformerForCausalLM(config).to(*place).eval()


def gpt2(length: int, place: Place) -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).to(*place).eval()


def random_tokens(length: int, place: Place) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(5, VOCABULARY, (1, length), generator=generator).to(place.device)


def bytes_of(cache: object) -> int:
    """Bytes of all tensors in a cache."""
    tensors = []
    for layer in cache.layers:
        states = getattr(layer, "recurrent_states", None)
        tensors += [layer.keys, layer.values] if states is None else [s for s in states.values() if s is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def check(device: str) -> None:
    """Raises RuntimeError unless the steps of the recurrent model agree with its output for the whole sequence."""
    place = Place(device)
    model, ids = linear_transformer(place), random_tokens(80, place)
    whole = model(ids).logits[:, 64:]
    cache = getattr(model(ids[:, :64], use_cache=True), CACHE)
    steps = torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(64, 80)], dim=1)
    if (steps - whole).abs().max() > 1e-5 * whole.abs().max():
        raise RuntimeError("The steps of the recurrence differ from the whole sequence: times would mean nothing.")


# ---- a generated token ----


class Decoder:
    """A model after a context. Each call generates the next token.

    place: the token's position, for GPT-2. Its cache would grow with every call, and a static one would need room for
    them all, which attention reads, too: it forgets the token, which takes some microseconds a layer. The state of the
    recurrent model has the same size after any number of tokens.
    """

    def __init__(self, model: PreTrainedModel, cache: object, place: int | None = None):
        self.model, self.cache = model, cache
        self.token = torch.full((1, 1), 7, device=model.device)
        self.given = {CACHE: cache}
        if place is not None:
            self.given["position_ids"] = torch.tensor([[place]], device=model.device)

    @torch.no_grad()
    def __call__(self) -> None:
        out = self.model(self.token, use_cache=True, **self.given)
        self.token = out.logits[:, -1:].argmax(dim=-1)
        if isinstance(self.cache, StaticCache):
            for layer in self.cache.layers:
                layer.cumulative_length.sub_(1)  # as crop(-1), which Transformers 5.17 does not have here
        elif "position_ids" in self.given:
            self.cache.crop(-1)


@torch.no_grad()
def recurrent_decoder(length: int, place: Place) -> Decoder:
    model, ids, cache = linear_transformer(place), random_tokens(length, place), None
    for part in ids.split(PREFILL_CHUNK, dim=1):
        cache = getattr(model(part, cache=cache, use_cache=True, logits_to_keep=1), CACHE)
    return Decoder(model, cache)


def exact_decoder(length: int, static: bool, place: Place) -> Decoder:
    """A decoder with random keys and values in the cache: times do not depend on their values."""
    model = gpt2(length + 1, place)
    cache = StaticCache(model.config, max_cache_len=length + 1) if static else DynamicCache(config=model.config)
    shape = (1, HEADS, length, WIDTH // HEADS)
    for layer in range(LAYERS):
        keys, values = (torch.randn(shape, device=place.device, dtype=place.dtype) for _ in range(2))
        cache.update(keys, values, layer)
    return Decoder(model, cache, length)


def decode(length: int, repeats: int, max_seconds: float, longest_exact: int, place: Place) -> list[dict]:
    decoders = {OURS: recurrent_decoder(length, place)}
    if length <= longest_exact:
        decoders[GROWING] = exact_decoder(length, False, place)
        decoders[STATIC] = exact_decoder(length, True, place)
    sizes = {name: bytes_of(decoder.cache) for name, decoder in decoders.items()}
    samples = interleave(dict(decoders), repeats=repeats, max_seconds=max_seconds, device=place.device)
    return [row(name, length, samples, state_bytes=sizes[name]) for name in decoders]


# ---- prefill and training ----


def prefill(length: int, repeats: int, max_seconds: float, longest_exact: int, place: Place) -> list[dict]:
    """From token ids to the logits of the last token, and the cache."""

    def caller(model: PreTrainedModel) -> Callable[[], object]:
        def call():
            with torch.no_grad():
                return model(random_tokens(length, place), use_cache=True, logits_to_keep=1)

        return call

    calls = {OURS: caller(linear_transformer(place))}
    if length <= longest_exact:
        calls[GROWING] = caller(gpt2(length, place))
    samples = interleave(calls, repeats=repeats, max_seconds=max_seconds, device=place.device)
    return [row(name, length, samples) for name in calls]


def train(length: int, repeats: int, max_seconds: float, longest_exact: int, place: Place) -> list[dict]:
    """Forward and backward pass of one row, with the loss."""

    def caller(model: PreTrainedModel) -> Callable[[], object]:
        model.train()

        def call():
            model.zero_grad()
            ids = random_tokens(length, place)
            model(ids, labels=ids, use_cache=False).loss.backward()

        return call

    calls = {OURS: caller(linear_transformer(place))}
    if length <= longest_exact:
        calls[GROWING] = caller(gpt2(length, place))
    samples = interleave(calls, repeats=repeats, max_seconds=max_seconds, device=place.device)
    return [row(name, length, samples, peak_bytes=peak_memory(calls[name], place.device)) for name in calls]


def projected(length: int, repeats: int, max_seconds: float, longest_exact: int, place: Place) -> list[dict]:
    """Linear attention in both directions from given features, and Linformer's projection of φ(K) and V before it.

    With weights of both signs, as in a Linformer, and as training may make ours, sums of features can become negative:
    the tokens and heads whose normaliser is not positive are counted.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (1, length, HEADS, WIDTH // HEADS)
    query, key, value = (torch.randn(shape, generator=generator).to(*place).transpose(1, 2) for _ in range(3))
    query, key = elu_features(query), elu_features(key)
    matrix = torch.randn(PROJECTED_DIM, length, generator=generator) * (PROJECTED_DIM + length) ** -0.5
    matrix = matrix.to(*place)
    calls = {
        OURS: lambda: linear_attention(query, key, value),
        PROJECTED: lambda: linear_attention(query, matrix @ key, matrix @ value),
    }
    with torch.no_grad():
        samples = interleave(calls, repeats=repeats, max_seconds=max_seconds, device=place.device)
    share = ((query @ (matrix @ key).sum(dim=2, keepdim=True).mT) <= 0).double().mean().item()
    rows = [row(name, length, samples) for name in calls]
    return [rows[0] | {"not_positive": 0.0}, rows[1] | {"not_positive": share}]


MEASURES: dict[str, Callable[..., list[dict]]] = {
    "decode": decode,
    "prefill": prefill,
    "train": train,
    "projected": projected,
}


# ---- results ----


def row(name: str, length: int, samples: dict[str, list[float | None]], **more: float) -> dict:
    seconds = [value for value in samples[name] if value is not None]
    own = samples[OURS]
    ratios = [theirs / ours for theirs, ours in zip(samples[name], own, strict=True) if theirs and ours]
    return {"contender": name, "length": length, "seconds": spread(seconds), "times_ours": spread(ratios), **more}


def measure(
    what: str, lengths: list[int] | None, repeats: int, max_seconds: float, report: Callable, place: Place
) -> list[dict]:
    rows = []
    for length in lengths or DEFAULT_LENGTHS[what]:
        rows += copy.deepcopy(MEASURES[what](length, repeats, max_seconds, LONGEST_EXACT[what], place))
        report(f"{what} at {length}: done")
    return rows
