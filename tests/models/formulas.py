# SPDX-License-Identifier: Apache-2.0
"""The papers' formulas in float64, for one row without padding, written without the package.

Shapes: L tokens, H heads, D head size, C = H·D. Weights come by the names of the parameters.
"""

import math

import torch
from torch import Tensor


def softmax(scores: Tensor) -> Tensor:
    exponentials = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def segment_means(states: Tensor, num_landmarks: int) -> Tensor:
    """Means (m, D) of consecutive tokens: L = s m + r, the first m - r segments of s tokens, the last r of s + 1."""
    size, rest = divmod(len(states), num_landmarks)
    means, start = [], 0
    for segment in range(num_landmarks):
        stop = start + size + (segment >= num_landmarks - rest)
        means.append(states[start:stop].sum(dim=0) / (stop - start))
        start = stop
    assert start == len(states)
    return torch.stack(means)


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    identity = torch.eye(len(a), dtype=a.dtype)
    z = a.T / (a.abs().sum(dim=0).max() * a.abs().sum(dim=1).max())
    for _ in range(iterations):
        z = z / 4 @ (13 * identity - a @ z @ (15 * identity - a @ z @ (7 * identity - a @ z)))
    return z


def nystrom_matrix(q: Tensor, k: Tensor, num_landmarks: int | None, iterations: int = 6) -> Tensor:
    """One head: q (N, D), k (K, D) -> (N, K)."""
    scale = 1 / math.sqrt(q.shape[-1])
    if num_landmarks is None or min(len(q), len(k)) <= num_landmarks:
        return softmax(q @ k.T * scale)
    q_landmarks, k_landmarks = segment_means(q, num_landmarks), segment_means(k, num_landmarks)
    inverse = pseudo_inverse(softmax(q_landmarks @ k_landmarks.T * scale), iterations)
    return softmax(q @ k_landmarks.T * scale) @ inverse @ softmax(q_landmarks @ k.T * scale)


def convolution(v: Tensor, kernel: Tensor, causal: bool = False) -> Tensor:
    """v (L, D), kernel (odd,): each channel convolved along the tokens, zeros outside; causal: previous tokens."""
    reach = len(kernel) - 1 if causal else len(kernel) // 2
    out = torch.zeros_like(v)
    for token in range(len(v)):
        for tap in range(len(kernel)):
            source = token + tap - reach
            if 0 <= source < len(v):
                out[token] += kernel[tap] * v[source]
    return out


def project(states: Tensor, projection: Tensor | None, projection_type: str, kernel_size: int | None) -> Tensor:
    """One head: (L, D) -> (k, D), by a (k, N) matrix or over slots of `kernel_size` tokens."""
    if projection_type == "linear":
        return projection[:, : len(states)] @ states
    slots = []
    for start in range(0, len(states), kernel_size):
        part = states[start : start + kernel_size]
        if projection_type == "mean_pool":
            slots.append(part.sum(dim=0) / len(part))
        elif projection_type == "max_pool":
            slots.append(part.max(dim=0).values)
        else:
            slots.append(sum(tap * token for tap, token in zip(projection, part, strict=False)))
    return torch.stack(slots)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """One head: φ(q), φ(k) (L, F) and v (L, D) -> (L, D), token by token."""
    outputs = []
    for token in range(len(q)):
        seen = slice(0, token + 1 if causal else None)
        weights = (k[seen] * q[token]).sum(dim=1)
        outputs.append((weights[:, None] * v[seen]).sum(dim=0) / (weights.sum() + 1e-6))
    return torch.stack(outputs)


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(dim=-1, keepdim=True) + eps) * weight + bias


def encode(weights: dict[str, Tensor], config, input_ids: Tensor) -> Tensor:
    """The whole encoder of any family: weights of the base model by name, input_ids (L,) -> (L, C), in float64."""
    weights = {name: weight.double() for name, weight in weights.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        return layer_norm(x, weights[name + ".weight"], weights[name + ".bias"], config.layer_norm_eps)

    x = weights["embeddings.word_embeddings.weight"][input_ids]
    first = 2 if config.model_type == "nystromformer" else 0
    if getattr(config, "position_embedding_type", "learned") == "sinusoidal":
        x = x + math.sqrt(2) * config.initializer_range * sinusoids(len(input_ids), x.shape[1])
    else:
        x = x + weights["embeddings.position_embeddings.weight"][first : first + len(input_ids)]
    x = norm("embeddings.LayerNorm", x + weights["embeddings.token_type_embeddings.weight"][0])
    if config.embedding_size is not None:
        x = linear("embeddings.projection", x)
    dim = config.hidden_size // config.num_attention_heads
    pre = config.layer_norm_position == "pre"
    for layer in range(config.num_hidden_layers):
        residual = x
        if pre:
            x = norm(f"encoder.layer.{layer}.attention.LayerNorm", x)
        name = f"encoder.layer.{layer}.attention.self."
        heads = []
        for head in range(config.num_attention_heads):
            part = slice(head * dim, (head + 1) * dim)
            q = linear(name + "query", x)[:, part]
            v = linear(name + "value", x)[:, part]
            if config.model_type == "nystromformer":
                k = linear(name + "key", x)[:, part]
                landmarks = config.num_landmarks
                landmarks = landmarks[layer] if isinstance(landmarks, list) else landmarks
                out = nystrom_matrix(q, k, landmarks, config.pinv_iterations) @ v
            elif config.model_type == "linear_transformer":
                out = linear_transformer_head(weights, config, name, head, q, linear(name + "key", x)[:, part], v)
            else:
                out = linformer_head(weights, config, name, layer, head, part, q, x)
            if config.conv_kernel_size is not None:
                out = out + convolution(v, weights[name + "conv.weight"][head, 0, :, 0], config.is_decoder)
            heads.append(out)
        name = f"encoder.layer.{layer}."
        x = linear(name + "attention.output.dense", torch.cat(heads, 1)) + residual
        x = x if pre else norm(name + "attention.output.LayerNorm", x)
        hidden = norm(name + "intermediate.LayerNorm", x) if pre else x
        x = linear(name + "output.dense", gelu_new(linear(name + "intermediate.dense", hidden))) + x
        x = x if pre else norm(name + "output.LayerNorm", x)
    return norm("encoder.LayerNorm", x) if pre else x


def sinusoids(length: int, width: int) -> Tensor:
    """sin(p / 10000^(2 i / C)) at columns i < C / 2, the cosines in the others, (L, C)."""
    waves = torch.zeros(length, width, dtype=torch.float64)
    for position in range(length):
        for i in range(width // 2):
            angle = position / 10_000 ** (2 * i / width)
            waves[position, i], waves[position, width // 2 + i] = math.sin(angle), math.cos(angle)
    return waves


def linear_transformer_head(weights, config, name, head, q, k, v) -> Tensor:
    if config.feature_map is None:
        scores = q @ k.T / math.sqrt(q.shape[-1])
        if config.is_decoder:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
        return softmax(scores) @ v

    def features(x: Tensor, which: str) -> Tensor:
        if config.feature_map == "hedgehog":
            mapped = x @ weights[f"{name}{which}_features.weight"][head].T
            return softmax(torch.cat([mapped, -mapped], dim=1))
        return torch.where(x > 0, x + 1, torch.exp(x)) if config.feature_map == "elu" else x.clamp_min(0)

    q, k = features(q, "query"), features(k, "key")
    if config.projected_dim is None:
        return linear_attention(q, k, v, config.is_decoder)
    matrix = weights[name + "projection.weight"][:, : len(k)]
    return linear_attention(q, matrix @ k, matrix @ v)


def linformer_head(weights, config, name, layer, head, part, q, x) -> Tensor:
    k = config.projected_dim[layer] if isinstance(config.projected_dim, list) else config.projected_dim
    slots_of_heads = k if isinstance(k, list) else None
    kernel_size = None if slots_of_heads else math.ceil(config.max_position_embeddings / k)

    def projection(which: str) -> Tensor | None:
        if config.projection_type.endswith("pool"):
            return None
        if config.share_projection == "layerwise":
            return weights["encoder.sequence_projection.weight"]
        which = "key" if config.share_projection == "key_value" else which
        matrix = weights[f"{name}{which}_projection.weight"]
        if slots_of_heads:
            # The heads' matrices are concatenated.
            start = sum(slots_of_heads[:head])
            return matrix[start : start + slots_of_heads[head]]
        return matrix[head] if config.share_projection == "none" else matrix

    def projected(which: str) -> Tensor:
        states = x @ weights[f"{name}{which}.weight"][part].T
        states = project(states, projection(which), config.projection_type, kernel_size)
        return states + weights[f"{name}{which}.bias"][part]

    return softmax(q @ projected("key").T / math.sqrt(q.shape[-1])) @ projected("value")
