# SPDX-License-Identifier: Apache-2.0
"""Architectures of Transformers as small models with random weights, to try `attn_implementation="nystrom"` on.

All have 2 layers, 2 heads and a width of 32, no dropout, and some 40 tokens. Their weights are large enough that
attention is far from uniform, so that wrong attention changes the output.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel

# Tokens of a text: more than LANDMARKS and fewer than MANY_LANDMARKS. The same holds for the other kinds of input.
LENGTH = 40
VOCABULARY = 100
WIDTH, LAYERS, HEADS = 32, 2, 2
SIDE, PATCH = 24, 4  # of an image, in pixels: 36 patches
SAMPLES, STRIDE = 410, 10  # of a sound: 40 frames

Inputs = dict[str, Tensor]

STACK = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 64}
WIDE = {"initializer_range": 0.2}
TEXT = (
    STACK
    | WIDE
    | {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2 * LENGTH,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
)
IMAGE = STACK | WIDE | {"image_size": SIDE, "patch_size": PATCH, "drop_path_rate": 0.0}
SPEECH = (
    STACK
    | WIDE
    | {
        "vocab_size": VOCABULARY,
        "conv_dim": [8, 8],
        "conv_kernel": [STRIDE // 2, 2],
        "conv_stride": [STRIDE // 2, 2],
        "feat_extract_norm": "layer",  # over a frame; a norm over a row would depend on padding
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "hidden_dropout": 0.0,
        "activation_dropout": 0.0,
        "attention_dropout": 0.0,
        "feat_proj_dropout": 0.0,
        "layerdrop": 0.0,
        "apply_spec_augment": False,
    }
)
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
    "init_std": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def token_ids(rows: int) -> Inputs:
    return {"input_ids": torch.randint(10, VOCABULARY, (rows, LENGTH))}


def pixels(rows: int) -> Inputs:
    return {"pixel_values": torch.randn(rows, 3, SIDE, SIDE)}


def samples(rows: int) -> Inputs:
    return {"input_values": torch.randn(rows, SAMPLES)}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model and its inputs.

    Args:
        name: its name in the table.
        kind: "text", "protein", "vision", "speech" or "several parts".
        model_type: the model type of its configuration.
        fields: fields of its configuration.
        inputs: makes the inputs for a number of full rows.
        padded: the mask's name if rows may be padded, and the number of its entries for each token.
        part: the attribute name of the part that gets Nyström attention; by default, the whole model.
        key: the key of `attn_implementation` for this part on loading; None for a part without a configuration of its
            own, which gets its attention back from `use_nystrom`.
        model_class: used instead of `AutoModel`.
        call: keyword arguments of every call.
    """

    name: str
    kind: str
    model_type: str
    fields: dict[str, Any]
    inputs: Callable[[int], Inputs] = token_ids
    padded: tuple[str, int] | None = None
    part: str | None = None
    key: str | None = None
    model_class: str | None = None
    call: dict[str, Any] = dataclasses.field(default_factory=dict)

    def build(self) -> PreTrainedModel:
        """The model with `sdpa` if it supports it, in evaluation mode; its weights depend on PyTorch's seed."""
        config = AutoConfig.for_model(self.model_type, **self.fields)
        if self.model_class is None:
            return AutoModel.from_config(config).eval()
        return getattr(transformers, self.model_class)(config).eval()

    def part_of(self, model: PreTrainedModel) -> PreTrainedModel:
        for name in (self.part or "").split("."):
            model = getattr(model, name) if name else model
        return model

    def output(self, model: PreTrainedModel, inputs: Inputs) -> Tensor:
        """The states of the part, or an output of the model that depends on them."""
        outputs = self.part_of(model)(**inputs, **self.call)
        return outputs["last_hidden_state"] if "last_hidden_state" in outputs else outputs[0]


def _text(name: str, model_type: str, kind: str = "text", **fields: Any) -> Architecture:
    return Architecture(name, kind, model_type, TEXT | fields, padded=("attention_mask", 1))


def _vision(name: str, model_type: str, **options: Any) -> Architecture:
    fields = IMAGE | options.pop("fields", {})
    return Architecture(name, "vision", model_type, fields, **{"inputs": pixels} | options)


def _speech(name: str, model_type: str, **fields: Any) -> Architecture:
    padded = ("attention_mask", STRIDE)
    return Architecture(name, "speech", model_type, SPEECH | fields, inputs=samples, padded=padded)


def _video(rows: int) -> Inputs:
    return {"pixel_values": torch.randn(rows, 4, 3, 16, 16)}


def _patches(rows: int) -> Inputs:
    """Images cut into patches, for models that take sizes of any shape."""
    return {
        "pixel_values": torch.randn(rows, LENGTH, 3 * PATCH**2),
        "pixel_attention_mask": torch.ones(rows, LENGTH, dtype=torch.long),
        "spatial_shapes": torch.tensor([[5, LENGTH // 5]] * rows),
    }


TEXT_PART = TEXT | {"projection_dim": WIDTH}
CLIP = {"text_config": TEXT_PART, "vision_config": IMAGE | {"projection_dim": WIDTH}, "projection_dim": WIDTH}

ARCHITECTURES = (
    _text("BERT", "bert"),
    _text("RoBERTa", "roberta"),
    _text("XLM-RoBERTa", "xlm-roberta"),
    _text("CamemBERT", "camembert"),
    _text("ELECTRA", "electra", embedding_size=16),
    _text("DistilBERT", "distilbert", hidden_dim=64, dropout=0.0, attention_dropout=0.0),
    _text("ALBERT", "albert", embedding_size=16),
    _text("ModernBERT", "modernbert", local_attention=8, layer_types=["full_attention", "sliding_attention"]),
    _text("EuroBERT (grouped queries)", "eurobert", num_key_value_heads=1, mask_token_id=3),
    _text("NomicBERT", "nomic_bert"),
    _text("jina-embeddings-v3", "jina_embeddings_v3"),
    _text("ERNIE", "ernie"),
    _text("X-MOD", "xmod", languages=["en"], default_language="en"),
    _text("MobileBERT", "mobilebert", embedding_size=16, intra_bottleneck_size=16),
    _text("LayoutLM", "layoutlm"),
    _text(
        "EmbeddingGemma",
        "gemma3_text",
        use_bidirectional_attention=True,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _text("Llama with is_causal=False", "llama", is_causal=False),
    _text("ESM-2", "esm", "protein", position_embedding_type="rotary", token_dropout=False, mask_token_id=3),
    _vision("ViT", "vit"),
    _vision("DeiT", "deit"),
    _vision("BEiT", "beit", fields={"use_absolute_position_embeddings": True}),
    _vision("DINOv2", "dinov2"),
    _vision("DINOv3 ViT", "dinov3_vit"),
    _vision("I-JEPA", "ijepa"),
    _vision("ViT-MSN", "vit_msn"),
    _vision("ViT-MAE", "vit_mae", fields={"mask_ratio": 0.0}, call={"noise": torch.arange(36.0)[None]}),
    _vision("SigLIP vision", "siglip_vision_model"),
    _vision("CLIP vision", "clip_vision_model"),
    _vision(
        "SigLIP 2 vision (patches)",
        "siglip2_vision_model",
        fields={"num_patches": 36},
        inputs=_patches,
        padded=("pixel_attention_mask", 1),
    ),
    _vision("VideoMAE", "videomae", fields={"image_size": 16, "num_frames": 4}, inputs=_video),
    _vision("ViViT", "vivit", fields={"image_size": 16, "num_frames": 4, "tubelet_size": [2, 4, 4]}, inputs=_video),
    _speech("wav2vec 2.0", "wav2vec2"),
    _speech("HuBERT", "hubert"),
    _speech("UniSpeech", "unispeech"),
    _speech("data2vec audio", "data2vec-audio", conv_pos_kernel_size=3, num_conv_pos_embeddings=2),
    Architecture(
        "Audio Spectrogram Transformer",
        "speech",
        "audio-spectrogram-transformer",
        IMAGE | {"frequency_stride": PATCH, "time_stride": PATCH, "max_length": SIDE, "num_mel_bins": SIDE},
        inputs=lambda rows: {"input_values": torch.randn(rows, SIDE, SIDE)},
    ),
    Architecture(
        "Whisper encoder",
        "speech",
        "whisper",
        SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": LENGTH},
        inputs=lambda rows: {"input_features": torch.randn(rows, 8, 2 * LENGTH)},
        part="encoder",
    ),
    Architecture(
        "CLIP, its vision part",
        "several parts",
        "clip",
        CLIP,
        inputs=pixels,
        part="vision_model",
        key="vision_config",
    ),
    Architecture(
        "SigLIP, both parts",
        "several parts",
        "siglip",
        {"text_config": TEXT | {"max_position_embeddings": LENGTH}, "vision_config": IMAGE},
        inputs=lambda rows: token_ids(rows) | pixels(rows),
    ),
    Architecture(
        "BART, its encoder",
        "several parts",
        "bart",
        SEQ2SEQ | {"max_position_embeddings": 2 * LENGTH},
        padded=("attention_mask", 1),
        part="encoder",
    ),
    Architecture(
        "DETR (self- and cross-attention)",
        "vision",
        "detr",
        SEQ2SEQ
        | {
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 8],
                "depths": [1, 1],
                "out_features": ["stage2"],
            },
            "num_queries": 20,
            "init_std": 0.5,
            "init_xavier_std": 3.0,
        },
        inputs=lambda rows: {"pixel_values": torch.randn(rows, 3, 56, 56)},
    ),
    # Models that are refused, each for a different reason.
    Architecture("BART, whole (causal decoder)", "several parts", "bart", SEQ2SEQ | {"max_position_embeddings": 80}),
    Architecture("CLIP, whole (causal text)", "several parts", "clip", CLIP, lambda n: token_ids(n) | pixels(n)),
    Architecture(
        "T5 encoder",
        "text",
        "t5",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_layers": LAYERS, "num_heads": HEADS},
        model_class="T5EncoderModel",
    ),
    Architecture("GPT-2", "text", "gpt2", TEXT),
    Architecture("Llama", "text", "llama", TEXT),
    _text("DeBERTa-v2", "deberta-v2"),
    _text("MPNet", "mpnet"),
    _text("RoFormer", "roformer"),
    _text("Longformer", "longformer", attention_window=8),
    _speech("WavLM", "wavlm"),
    Architecture(
        "BEiT with relative positions", "vision", "beit", IMAGE | {"use_relative_position_bias": True}, pixels
    ),
    Architecture(
        "Swin",
        "vision",
        "swin",
        WIDE
        | {
            "image_size": SIDE,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 3,
        },
        inputs=pixels,
    ),
)
