# SPDX-License-Identifier: Apache-2.0
"""Whole encoders from token ids (B, N) to the last hidden states (B, N, C), random weights.

In `encoder` all tokens are valid. In `encoder-variable` the rows of a batch have different lengths and are padded on
the right to N: the setting "variable" of the comparison in Warner et al. 2024 (ModernBERT, arXiv:2412.13663), where
lengths are normally distributed around half the maximum.

All are base size: 12 layers (22 for ModernBERT, as in its base model), or `--num_layers` for all; 768 wide. All have
the same vocabulary and no pooler.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.nystrom import builtin_modeling, needs_even_segments
from benchmarks.registry import Inputs, Prepared, Setting, Workload, register
from nystrom_models import LinformerConfig, LinformerModel, NystromformerConfig, NystromformerModel
from nystrom_models.models.attention_nystrom import iterative_pinv

VOCABULARY = 30000


def draw_inputs(setting: Setting, generator: torch.Generator) -> Inputs:
    # Without the first ids, which are special tokens: from the padding id, some models derive position ids.
    return {"input_ids": torch.randint(10, VOCABULARY, (setting.batch_size, setting.length), generator=generator)}


def draw_variable_inputs(setting: Setting, generator: torch.Generator) -> Inputs:
    """Lengths with a mean of N / 2 and a standard deviation of N / 8."""
    inputs = draw_inputs(setting, generator)
    lengths = setting.length * (0.5 + torch.randn(setting.batch_size, 1, generator=generator) / 8)
    mask = (torch.arange(setting.length) < lengths.round().clamp(1, setting.length)).long()
    return inputs | {"attention_mask": mask}


def count_tokens(inputs: Inputs) -> int:
    return int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else inputs["input_ids"].numel()


def floor(setting: Setting, inputs: Inputs) -> tuple[int, int] | None:
    """The minimum of a Nyströmformer's forward pass: the linear layers' weights read once; the products for tokens
    without padding."""
    if setting.backward:
        return None
    width, tokens = setting.hidden_size, count_tokens(inputs)
    weights = setting.num_layers * 12 * width**2
    attention = setting.num_layers * tokens * width * (4 * setting.num_landmarks + setting.conv_kernel_size)
    return weights * setting.dtype.itemsize, 2 * (tokens * weights + attention)


def linformer_floor(setting: Setting, inputs: Inputs) -> tuple[int, int] | None:
    """The same of a Linformer, whose E = F is applied before the layers of keys and values, which then see only the
    slots."""
    if setting.backward:
        return None
    width, tokens, slots = setting.hidden_size, count_tokens(inputs), setting.projected_dim
    weights = setting.num_layers * 12 * width**2 + slots * setting.length
    linear = (10 * tokens + 2 * slots * setting.batch_size) * width**2
    attention = tokens * width * 3 * slots
    return weights * setting.dtype.itemsize, 2 * setting.num_layers * (linear + attention)


def sizes(setting: Setting) -> dict:
    """Configuration fields that all families share."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": setting.hidden_size,
        "num_hidden_layers": setting.num_layers,
        "num_attention_heads": setting.num_heads,
        "intermediate_size": 4 * setting.hidden_size,
        "max_position_embeddings": setting.length,
        # Large enough that attention is far from uniform, so that wrong attention changes the output.
        "initializer_range": 0.05,
    }


def seeded(setting: Setting, build: Callable[[], nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    """A model in evaluation mode whose weights depend only on the seed, rounded to the setting's dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        model = build()
    return model.to(setting.device, setting.dtype).to(dtype or setting.dtype).eval()


def nystromformer(setting: Setting, attention: str | None = None, **options) -> nn.Module:
    options = {"num_landmarks": setting.num_landmarks, "conv_kernel_size": setting.conv_kernel_size, **options}
    config = NystromformerConfig(**sizes(setting), **options, attn_implementation=attention)
    return NystromformerModel(config, add_pooling_layer=False)


def linformer(setting: Setting, attention: str | None = None) -> nn.Module:
    # Its slots are sums of all tokens: with larger weights it amplifies rounding errors a hundredfold in twelve
    # layers.
    fields = sizes(setting) | {"initializer_range": 0.02, "projected_dim": setting.projected_dim}
    return LinformerModel(LinformerConfig(**fields, attn_implementation=attention), add_pooling_layer=False)


def builtin_nystromformer(setting: Setting) -> nn.Module:
    """Transformers' Nyströmformer with the weights of ours: the parameters have the same names."""
    weights = nystromformer(setting).state_dict()
    modeling = builtin_modeling()
    config = modeling.NystromformerConfig(
        **sizes(setting),
        num_landmarks=setting.num_landmarks,
        segment_means_seq_len=setting.length,
        conv_kernel_size=setting.conv_kernel_size,
    )
    model = modeling.NystromformerModel(config)
    model.load_state_dict(weights)
    return model


def builtin_as_shipped(setting: Setting) -> nn.Module:
    """Transformers' Nyströmformer with its defaults: num_landmarks equals segment_means_seq_len, so it is exact."""
    modeling = builtin_modeling()
    config = modeling.NystromformerConfig(**sizes(setting), conv_kernel_size=setting.conv_kernel_size)
    return modeling.NystromformerModel(config)


def bert(setting: Setting) -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**sizes(setting), attn_implementation="sdpa"), add_pooling_layer=False)


def modernbert(setting: Setting) -> nn.Module:
    from transformers import ModernBertConfig, ModernBertModel

    fields = (
        sizes(setting)
        | {
            "num_hidden_layers": max(1, round(22 / 12 * setting.num_layers)),
            "intermediate_size": 3 * setting.hidden_size // 2,  # gated: 1152 for 768, as in ModernBERT-base
        }
        | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    )
    return ModernBertModel(ModernBertConfig(**fields, attn_implementation="sdpa", reference_compile=False))


def longformer(setting: Setting) -> nn.Module:
    from transformers import LongformerConfig, LongformerModel

    # Its position ids start after the padding id.
    fields = sizes(setting) | {"max_position_embeddings": setting.length + 2}
    return LongformerModel(LongformerConfig(**fields, attention_window=512), add_pooling_layer=False)


def big_bird(setting: Setting) -> nn.Module:
    from transformers import BigBirdConfig, BigBirdModel

    return BigBirdModel(BigBirdConfig(**sizes(setting), attention_type="block_sparse"), add_pooling_layer=False)


def hidden_states(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(**inputs).last_hidden_state


Output = Callable[[nn.Module, Inputs], Tensor]


def prepare(
    setting: Setting, inputs: Inputs, build: Callable[[Setting], nn.Module], output: Output = hidden_states
) -> Prepared:
    model = seeded(setting, lambda: build(setting)).requires_grad_(setting.backward)
    parameters = tuple(model.parameters()) if setting.backward else ()
    return Prepared(lambda: output(model, inputs), parameters=parameters)


def in_float64(build: Callable[..., nn.Module], output: Output = hidden_states) -> Callable[[Setting, Inputs], Tensor]:
    """The same weights with the reference attention, in float64."""

    def reference(setting: Setting, inputs: Inputs) -> Tensor:
        model = seeded(setting, lambda: build(setting, "eager"), torch.float64)
        # Gradients of weights are not compared: without them, the matrices of softmax attention are not kept.
        return output(model.requires_grad_(False), inputs)

    return reference


SIZES = (
    "({num_layers} layers, {num_heads} heads of {head_dim}, {num_landmarks} landmarks, "
    "convolution {conv_kernel_size}, k = {projected_dim}, batch {batch_size})"
)
encoder = register(
    Workload(
        name="encoder",
        kind="model",
        title=f"Encoder {SIZES}",
        inputs=draw_inputs,
        reference=None,
        baseline="ours",
        tokens=count_tokens,
        floor=floor,
    )
)
variable = register(
    Workload(
        name="encoder-variable",
        kind="model",
        title=f"Encoder at variable lengths, about half padding {SIZES}",
        inputs=draw_variable_inputs,
        reference=None,
        baseline="ours",
        tokens=count_tokens,
        floor=floor,
    )
)

OWN_WEIGHTS = "against the same weights through the reference attention in float64"
nystromformer_reference, linformer_reference = in_float64(nystromformer), in_float64(linformer)
OURS_LINFORMER = {"ours": True, "reference": linformer_reference, "judged": OWN_WEIGHTS, "floor": linformer_floor}


@variable.contender("ours", ours=True, reference=nystromformer_reference, judged=OWN_WEIGHTS)
@encoder.contender("ours", ours=True, reference=nystromformer_reference, judged=OWN_WEIGHTS)
def ours(setting, inputs):
    return prepare(setting, inputs, nystromformer)


@variable.contender("ours-linformer", **OURS_LINFORMER)
@encoder.contender("ours-linformer", **OURS_LINFORMER)
def ours_linformer(setting, inputs):
    return prepare(setting, inputs, linformer)


@encoder.contender(
    "transformers",
    reference=nystromformer_reference,
    refuses=needs_even_segments,
    judged=(
        "with our weights against our float64 reference, its pseudo-inverse replaced by one that starts from each "
        "matrix's own norm; timed with its own, which starts from a maximum over batch and heads and so deviates"
    ),
)
def transformers(setting, inputs):
    prepared = prepare(setting, inputs, builtin_nystromformer)

    def verify():
        model = seeded(setting, lambda: builtin_nystromformer(setting))
        for layer in model.encoder.layer:
            layer.attention.self.iterative_inv = iterative_pinv
        return hidden_states(model, inputs)

    return Prepared(prepared.call, prepared.parameters, verify)


@variable.contender(
    "transformers",
    judged=(
        "to be finite: as shipped, with exact attention, because its Nyström attention takes no mask; padding leaks "
        "through its convolution"
    ),
)
def transformers_as_shipped(setting, inputs):
    return prepare(setting, inputs, builtin_as_shipped)


@variable.contender("bert-sdpa")
@encoder.contender("bert-sdpa")
def bert_sdpa(setting, inputs):
    return prepare(setting, inputs, bert)


@variable.contender("modernbert-sdpa")
@encoder.contender("modernbert-sdpa")
def modernbert_sdpa(setting, inputs):
    return prepare(setting, inputs, modernbert)


@encoder.contender("longformer")
def longformer_model(setting, inputs):
    return prepare(setting, inputs, longformer)


def needs_blocks(setting: Setting) -> str | None:
    return None if setting.length > 704 else "falls back to full attention up to 704 tokens"


@encoder.contender("bigbird", refuses=needs_blocks)
def bigbird_model(setting, inputs):
    return prepare(setting, inputs, big_bird)
