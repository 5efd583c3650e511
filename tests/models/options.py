# SPDX-License-Identifier: Apache-2.0
"""The option sets of model tests, and their tolerances."""

import torch

import nystrom_models

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

NYSTROM = {
    "landmarks": {"num_landmarks": 16, "conv_kernel_size": 5},
    "no_convolution": {"num_landmarks": 16, "conv_kernel_size": None},
    "wide_convolution": {"num_landmarks": 8, "conv_kernel_size": 65, "embedding_size": 12},
    "one_landmark": {"num_landmarks": 1, "conv_kernel_size": 3},
    "softmax": {"num_landmarks": None, "conv_kernel_size": None},
    "by_layer": {"num_landmarks": [7, 16], "conv_kernel_size": 5},
    "exact_last_layer": {"num_landmarks": [7, None], "conv_kernel_size": 5},
    "pre_norm": {"num_landmarks": 16, "conv_kernel_size": 5, "layer_norm_position": "pre"},
}
LINFORMER = {
    "layerwise": {},
    "none": {"share_projection": "none"},
    "headwise": {"share_projection": "headwise", "conv_kernel_size": 5, "classifier_activation": "tanh"},
    "key_value": {"share_projection": "key_value", "projected_dim": [8, 5]},
    "by_head": {"share_projection": "none", "projected_dim": [[8, 1, 5, 3], [2, 7, 7, 4]], "conv_kernel_size": 5},
    "mean_pool": {"projection_type": "mean_pool"},
    "max_pool": {"projection_type": "max_pool"},
    "conv": {"projection_type": "conv"},
    "conv_none": {"projection_type": "conv", "share_projection": "none"},
    "pre_norm": {"layer_norm_position": "pre"},
}
LINEAR_TRANSFORMER = {
    "elu": {},
    "relu": {"feature_map": "relu", "conv_kernel_size": 5, "embedding_size": 40},
    "hedgehog": {"feature_map": "hedgehog", "layer_norm_position": "pre"},
    "projected": {"projected_dim": 8},
    "softmax": {"feature_map": None},
    "causal_softmax": {"is_decoder": True, "feature_map": None},
    "causal": {"is_decoder": True, "conv_kernel_size": 5},
    "causal_sinusoidal": {
        "is_decoder": True,
        "position_embedding_type": "sinusoidal",
        "feature_map": "hedgehog",
        "initializer_range": 0.1,
    },
}
OPTIONS = {f"nystromformer-{name}": ("Nystromformer", options) for name, options in NYSTROM.items()} | {
    f"linformer-{name}": ("Linformer", {"projected_dim": 8} | options) for name, options in LINFORMER.items()
}
OPTIONS |= {f"linear-{name}": ("LinearTransformer", options) for name, options in LINEAR_TRANSFORMER.items()}
HEADS = (
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
# Heads that the encoders of Transformers have, too.
SHARED_HEADS = tuple(head for head in HEADS if head != "ForPreTraining")

# Largest error over largest entry, by dtype: four times the largest value in all tests on two processors.
# For models of two layers with large weights: rounding errors, amplified by the pseudo-inverse and the layers.
TOLERANCE = {
    torch.float64: 1e-14,  # 2.7e-15
    torch.float32: 1e-5,  # 2.5e-6: a row of 1,000 tokens alone and in a batch
    torch.bfloat16: 5e-2,  # 1.2e-2
    torch.float16: 5.6e-3,  # 1.4e-3
}
# For one attention against its reference, outputs and gradients.
ATTENTION_TOLERANCE = {
    torch.float64: 1e-14,  # 2.7e-15
    torch.float32: 6.4e-6,  # 1.6e-6
    torch.bfloat16: 7.2e-2,  # 1.8e-2: gradients of queries are differences of rounded numbers
    torch.float16: 1.2e-2,  # 2.9e-3
}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert torch.isfinite(actual).all()
    difference = (actual.double() - expected.double()).abs().max().item()
    return difference / max(expected.double().abs().max().item(), 1e-30)


def enlarge(model):
    """Makes weights three times as large, so that attention is not nearly uniform, and biases that are not
    zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_model(option: str, head: str = "Model", **fields):
    """A model with enlarged weights."""
    family, options = OPTIONS[option]
    config = getattr(nystrom_models, family + "Config")(**TINY | {"max_position_embeddings": 64} | options | fields)
    return enlarge(getattr(nystrom_models, family + head)(config))


def language_model(option: str, **fields):
    """The same with the head that the option can have: for the next token, or for masked ones."""
    causal = OPTIONS[option][1].get("is_decoder", False)
    return make_model(option, "ForCausalLM" if causal else "ForMaskedLM", **fields)


def padded_inputs(head="Model", labels=False, length=40):
    """A batch of rows padded on the right, padded on the left and not padded; for multiple choice, three choices."""
    mask = torch.ones(3, length, dtype=torch.long)
    mask[0, 25:] = mask[1, :11] = 0
    ids = torch.randint(3, 99, mask.shape)
    if head == "ForMultipleChoice":
        ids, mask = ids[None], mask[None]
    inputs = {"input_ids": ids, "attention_mask": mask}
    if labels:
        rows = {"ForSequenceClassification": (3,), "ForMultipleChoice": (1,)}
        if head == "ForQuestionAnswering":
            inputs |= {"start_positions": torch.tensor([3, 12, 0]), "end_positions": torch.tensor([4, 20, 39])}
        elif head != "Model":
            inputs["labels"] = torch.randint(0, 2, rows.get(head, ids.shape))
        if head == "ForPreTraining":
            inputs["sentence_order_label"] = torch.tensor([0, 1, 0])
    return inputs


def result(model, inputs):
    """All numbers that a model returns, as one vector on the CPU."""
    outputs = model(**inputs)
    leaves = [leaf for value in outputs.to_tuple() for leaf in (value if isinstance(value, tuple) else (value,))]
    return torch.cat([leaf.detach().float().flatten().cpu() for leaf in leaves])
