# SPDX-License-Identifier: Apache-2.0
"""What each implementation can do, tested by running it: `python -m benchmarks capabilities`.

A check is a function of a contender. It returns None if the contender does what the check's title says, otherwise what
happened instead. An error that the contender raises is a result, too. A check raises `NotOffered` if the contender's
classes have no such feature, which is found by inspection.
"""

import contextlib
import copy
import importlib
import importlib.util
import inspect
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.models import nystromformer as built_in
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import nystrom_models

WIDTH, LAYERS, HEADS, SLOTS, LENGTH, VOCABULARY = 32, 2, 2, 16, 64, 100
# Relative to the largest entry, in float32. Wrong results differ by percents, rounding errors are about 1e-6.
TOLERANCE = 1e-4
HALF_TOLERANCE = 0.2  # for two layers with eight-bit mantissas; the error of a wrong result is about 1

FIELDS = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class NotOffered(Exception):
    """The contender's classes have no such feature."""


class Contender(nn.Module):
    """An encoder with the same signature for all: token ids (B, N), mask (B, N) bool or None -> states (B, N, C)."""

    title: str
    package: str | None = None  # to be installed, if it is not a dependency
    ours = False

    def __init__(self, max_length: int = LENGTH):
        super().__init__()
        self.max_length = max_length

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def takes_mask(self) -> bool:
        raise NotImplementedError

    def enable_checkpointing(self) -> None:
        raise NotOffered

    @classmethod
    def model(cls, head: str, **fields) -> transformers.PreTrainedModel:
        """A Transformers model with this head."""
        raise NotOffered


class TransformersContender(Contender):
    """A family of Transformers models."""

    module: object  # where its classes are
    family: str
    fields: dict

    def __init__(self, max_length: int = LENGTH, **fields):
        super().__init__(max_length)
        self.encoder = self.model("Model", max_length=max_length, **fields)

    @classmethod
    def config(cls, max_length: int = LENGTH, **fields) -> transformers.PreTrainedConfig:
        config_class = getattr(cls.module, cls.family + "Config")
        return config_class(**FIELDS | {"max_position_embeddings": max_length} | cls.fields | fields)

    @classmethod
    def model(cls, head: str, **fields) -> transformers.PreTrainedModel:
        model_class = getattr(cls.module, cls.family + head, None)
        if model_class is None:
            raise NotOffered
        return model_class(cls.config(**fields))

    def takes_mask(self) -> bool:
        return has_argument(type(self.encoder).forward, "attention_mask")

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.encoder(input_ids, attention_mask=None if mask is None else mask.long()).last_hidden_state

    def enable_checkpointing(self) -> None:
        self.encoder.gradient_checkpointing_enable()


class OurNystromformer(TransformersContender):
    title, ours = "ours: Nyströmformer", True
    module, family, fields = nystrom_models, "Nystromformer", {"num_landmarks": SLOTS}


class OurLinformer(TransformersContender):
    title, ours = "ours: Linformer", True
    module, family, fields = nystrom_models, "Linformer", {"projected_dim": SLOTS}


class OurLinearTransformer(TransformersContender):
    title, ours = "ours: linear transformer", True
    module, family, fields = nystrom_models, "LinearTransformer", {}


class BuiltIn(TransformersContender):
    title = "transformers, as shipped"
    module, family, fields = built_in, "Nystromformer", {}

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return super().forward(input_ids)
        # As with BERT, the caller must give position ids that padding on the left does not shift.
        positions = (mask.long().cumsum(dim=-1) - 1).clamp_min(0) + 2
        return self.encoder(input_ids, attention_mask=mask.long(), position_ids=positions).last_hidden_state


class BuiltInNystrom(BuiltIn):
    title = "transformers, Nyström on"
    fields = {"num_landmarks": SLOTS}

    @classmethod
    def config(cls, max_length: int = LENGTH, **fields) -> transformers.PreTrainedConfig:
        # It can run only one length, which is configured.
        return super().config(max_length, segment_means_seq_len=max_length, **fields)


class NystromAttentionPackage(Contender):
    title = package = "nystrom-attention"

    def __init__(self, max_length: int = LENGTH):
        super().__init__(max_length)
        encoder_class = importlib.import_module("nystrom_attention").Nystromformer
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = encoder_class(
            dim=WIDTH, depth=LAYERS, dim_head=WIDTH // HEADS, heads=HEADS, num_landmarks=SLOTS
        )

    def takes_mask(self) -> bool:
        return has_argument(type(self.encoder).forward, "mask")

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.encoder(self.embeddings(input_ids), mask=mask)


class LinformerPackage(Contender):
    title = package = "linformer"

    def __init__(self, max_length: int = LENGTH):
        super().__init__(max_length)
        encoder_class = importlib.import_module("linformer").Linformer
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = encoder_class(dim=WIDTH, seq_len=max_length, depth=LAYERS, k=SLOTS, heads=HEADS)

    def takes_mask(self) -> bool:
        return has_argument(type(self.encoder).forward, "mask")

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        options = {} if mask is None else {"mask": mask}
        return self.encoder(self.embeddings(input_ids), **options)


class LinformerPytorchPackage(Contender):
    title = package = "linformer-pytorch"

    def __init__(self, max_length: int = LENGTH):
        super().__init__(max_length)
        package = importlib.import_module("linformer_pytorch")
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = package.Linformer(
            max_length, WIDTH, SLOTS, dim_ff=4 * WIDTH, nhead=HEADS, depth=LAYERS, dropout=0.0, dropout_ff=0.0
        )
        # The package's own option for sequences shorter than the configured length.
        self.padder = package.Padder(self.encoder)

    def takes_mask(self) -> bool:
        return has_argument(type(self.encoder).forward, "input_mask")

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        missing = self.max_length - input_ids.shape[1]
        options = {} if mask is None else {"input_mask": F.pad(mask, (0, missing), value=False)}
        return (self.padder if missing else self.encoder)(self.embeddings(input_ids), **options)

    def enable_checkpointing(self) -> None:
        self.encoder.checkpoint_level = "C1"


CONTENDERS: list[type[Contender]] = [
    OurNystromformer,
    OurLinformer,
    OurLinearTransformer,
    BuiltIn,
    BuiltInNystrom,
    NystromAttentionPackage,
    LinformerPackage,
    LinformerPytorchPackage,
]


def has_argument(function: Callable, name: str) -> bool:
    """Whether a function has the argument, or takes any keyword."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def build(contender: type[Contender], **options) -> Contender:
    """An instance with random weights, of the same scale for all: attention is as uneven as in trained models."""
    torch.manual_seed(0)
    encoder = contender(**options).eval()
    for module in encoder.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1.5 * module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
    return encoder


def token_ids(batch: int, length: int) -> Tensor:
    return torch.randint(5, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def deviation(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> str | None:
    """None if two results agree, otherwise how much they differ."""
    if actual.shape != expected.shape:
        return f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if not actual.isfinite().all():
        return f"{what}: not finite"
    error = ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
    return None if error <= tolerance else f"{what}: off by {error:.1%} of the largest value"


# ---- checks ----


@torch.no_grad()
def linear_in_the_length(contender: type[Contender]) -> str | None:
    """Counts the operations of matrix products and convolutions."""
    counts = []
    for length in (512, 1024):
        encoder = build(contender, max_length=length)
        # With SDPA as matrix products, which are counted on every device.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            encoder(token_ids(1, length))
        counts.append(counter.get_total_flops())
    ratio = counts[1] / counts[0]
    return None if ratio < 2.05 else f"{ratio:.1f} times the operations at twice the length"


def _padded_equals_alone(contender: type[Contender], left: bool) -> str | None:
    encoder = build(contender)
    if not encoder.takes_mask():
        raise NotOffered
    ids = token_ids(1, LENGTH * 2 // 3)
    length = ids.shape[1]
    sides = (LENGTH - length, 0) if left else (0, LENGTH - length)
    padded = encoder(F.pad(ids, sides, value=1), F.pad(torch.ones_like(ids), sides).bool())
    valid = padded[:, -length:] if left else padded[:, :length]
    return deviation(valid, encoder(ids, torch.ones_like(ids).bool()), "padded against alone")


@torch.no_grad()
def right_padding(contender: type[Contender]) -> str | None:
    return _padded_equals_alone(contender, left=False)


@torch.no_grad()
def left_padding(contender: type[Contender]) -> str | None:
    return _padded_equals_alone(contender, left=True)


@torch.no_grad()
def content_of_padding(contender: type[Contender]) -> str | None:
    encoder, ids = build(contender), token_ids(1, LENGTH)
    if not encoder.takes_mask():
        raise NotOffered
    mask = torch.arange(LENGTH)[None] < LENGTH * 2 // 3
    one, other = (encoder(torch.where(mask, ids, filler), mask)[mask] for filler in (1, 7))
    return deviation(other, one, "with other tokens at the padding")


@torch.no_grad()
def independent_of_batch(contender: type[Contender]) -> str | None:
    encoder, ids = build(contender), token_ids(4, LENGTH)
    return deviation(encoder(ids)[:1], encoder(ids[:1]), "in a batch against alone")


@torch.no_grad()
def any_length(contender: type[Contender]) -> str | None:
    encoder = build(contender)
    for length in (LENGTH, 1, 2, SLOTS - 1, SLOTS, SLOTS + 1, LENGTH // 2, 53, LENGTH - 1):
        for batch in (1, 2):
            try:
                states = encoder(token_ids(batch, length))
            except Exception as error:
                return f"length {length} of {LENGTH}, batch {batch}: {words(error)}"
            if states.shape[:2] != (batch, length) or not states.isfinite().all():
                return f"length {length} of {LENGTH}, batch {batch}: shape {tuple(states.shape)} or not finite"
    return None


@torch.no_grad()
def _half_weights(contender: type[Contender], dtype: torch.dtype) -> str | None:
    encoder, ids = build(contender), token_ids(2, LENGTH)
    expected = encoder(ids)
    states = encoder.to(dtype)(ids)
    if states.dtype != dtype:
        return f"result in {states.dtype}"
    return deviation(states, expected, "against float32", HALF_TOLERANCE)


def bfloat16_weights(contender: type[Contender]) -> str | None:
    return _half_weights(contender, torch.bfloat16)


def float16_weights(contender: type[Contender]) -> str | None:
    return _half_weights(contender, torch.float16)


def gradient_checkpointing(contender: type[Contender]) -> str | None:
    """The same gradients, with layers run a second time in the backward pass."""
    plain = build(contender).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.enable_checkpointing()
    runs = []
    for encoder in (plain, checkpointed):
        calls = []
        for module in encoder.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        encoder(token_ids(2, LENGTH)).square().sum().backward()
        runs.append(len(calls))
    if runs[1] <= runs[0]:
        return "nothing is recomputed"
    for (name, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        if (one.grad is None) != (other.grad is None):
            return f"no gradient of {name}"
        if one.grad is not None and one.grad.abs().max() > 0:
            problem = deviation(other.grad, one.grad, f"gradient of {name}", 1e-3)
            if problem:
                return problem
    return None


@torch.no_grad()
def compile_fullgraph(contender: type[Contender]) -> str | None:
    encoder, ids = build(contender), token_ids(2, LENGTH)
    torch.compiler.reset()
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    return deviation(compiled(ids), encoder(ids), "compiled against not")


@torch.no_grad()
def export_dynamic_length(contender: type[Contender]) -> str | None:
    encoder = build(contender)
    dynamic = {"input_ids": {1: torch.export.Dim("length", min=2, max=LENGTH - 1)}}
    program = torch.export.export(encoder, (), {"input_ids": token_ids(2, 40)}, dynamic_shapes=dynamic).module()
    for length in (3, 29, LENGTH - 1):
        ids = token_ids(2, length)
        problem = deviation(program(input_ids=ids), encoder(ids), f"exported, length {length}")
        if problem:
            return problem
    return None


@torch.no_grad()
def inv_coeff_init_option(contender: type[Contender]) -> str | None:
    if not issubclass(contender, TransformersContender) or not hasattr(contender.config(), "inv_coeff_init_option"):
        raise NotOffered
    states = build(contender, inv_coeff_init_option=True)(token_ids(2, LENGTH))
    return None if states.isfinite().all() else "not finite"


def sentence_order_head(contender: type[Contender]) -> str | None:
    model = contender.model("ForPreTraining")
    if not has_argument(model.forward, "sentence_order_label"):
        raise NotOffered
    ids = token_ids(2, LENGTH)
    outputs = model(ids, labels=ids, sentence_order_label=torch.tensor([0, 1]))
    outputs.loss.backward()
    if outputs.sop_logits.shape != (2, 2) or outputs.prediction_logits.shape != (*ids.shape, VOCABULARY):
        return "logits of a wrong shape"
    gradient = model.get_input_embeddings().weight.grad
    return None if gradient is not None and gradient.isfinite().all() and gradient.any() else "no gradient"


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words w0, w1, ... as tokens."""
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokens = [*special.values(), "<mask>"]
    tokens += [f"w{number}" for number in range(VOCABULARY - len(tokens))]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, mask_token="<mask>", model_max_length=LENGTH, **special
    )


def fill_mask(contender: type[Contender]) -> str | None:
    model = contender.model("ForMaskedLM")
    fill = transformers.pipeline("fill-mask", model=model, tokenizer=word_tokenizer(), device="cpu")
    for length in (LENGTH, 1, 7, 53):
        answers = fill(" ".join(["<mask>"] + [f"w{number}" for number in range(length - 1)]), top_k=3)
        if not all(0 < answer["score"] <= 1 for answer in answers):
            return f"length {length}: scores {[answer['score'] for answer in answers]}"
    return None


@torch.no_grad()
def loads_with_auto_model(contender: type[Contender]) -> str | None:
    model = contender.model("Model").eval()
    ids = token_ids(1, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = transformers.AutoModel.from_pretrained(folder).eval()
    if type(loaded) is not type(model):
        return f"gives {type(loaded).__module__}.{type(loaded).__name__}"
    return deviation(loaded(ids).last_hidden_state, model(ids).last_hidden_state, "loaded against saved")


CHECKS: dict[str, Callable[[type[Contender]], str | None]] = {
    "cost linear in the length": linear_in_the_length,
    "content of padding does not matter": content_of_padding,
    "row padded on the right = row alone": right_padding,
    "row padded on the left = row alone": left_padding,
    "row in a batch = row alone": independent_of_batch,
    "any length up to the maximum": any_length,
    "bfloat16 weights": bfloat16_weights,
    "float16 weights": float16_weights,
    "gradient checkpointing": gradient_checkpointing,
    "torch.compile(fullgraph=True)": compile_fullgraph,
    "torch.export, dynamic length": export_dynamic_length,
    "inv_coeff_init_option=True": inv_coeff_init_option,
    "MLM + SOP pretraining head": sentence_order_head,
    'pipeline("fill-mask"), any length': fill_mask,
    "AutoModel.from_pretrained": loads_with_auto_model,
}


# ---- running them ----


def words(error: BaseException) -> str:
    """The first words of an error, or of its cause."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {line.strip()}" if line else type(error).__name__
    return text if len(text) <= 110 else text[:107] + "..."


@contextlib.contextmanager
def environment(contender: type[Contender]) -> Iterator[None]:
    """Suppresses output; for contenders of others, the Auto classes are as if this package had not been imported."""
    with contextlib.ExitStack() as stack:
        # One thread is faster for so little work.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        if transformers.logging.is_progress_bar_enabled():
            stack.callback(transformers.logging.enable_progress_bar)
            transformers.logging.disable_progress_bar()
        if not contender.ours:
            for mapping in (CONFIG_MAPPING, transformers.AutoModel._model_mapping):
                stack.enter_context(mock.patch.dict(mapping._extra_content, clear=True))
        yield


def answer(contender: type[Contender], check: Callable[[type[Contender]], str | None]) -> tuple[str, str | None]:
    """("yes", "no", "error" or "–", what happened instead)."""
    with environment(contender):
        try:
            seen = check(contender)
        except NotOffered:
            return "–", None
        except Exception as error:
            return "error", words(error)
    return ("yes", None) if seen is None else ("no", seen)


Answers = dict[str, dict[str, tuple[str, str | None]]]  # by the title of a contender and of a check


def measure(contenders: Iterable[type[Contender]], report: Callable[[str], None] = lambda line: None) -> Answers:
    """Runs every check on every contender that is installed."""
    answers: Answers = {}
    for contender in contenders:
        package = contender.package
        if package and importlib.util.find_spec(package.replace("-", "_")) is None:
            report(f"{contender.title}: not installed (pip install {package})")
            continue
        report(contender.title)
        answers[contender.title] = {title: answer(contender, check) for title, check in CHECKS.items()}
    return answers


def table(answers: Answers, markdown: bool = False) -> str:
    """A table of checks (rows) and contenders (columns); numbered notes below say what happened instead of a yes."""
    notes: dict[str, int] = {}
    rows = [["", *answers]]
    for check in CHECKS:
        row = [check]
        for results in answers.values():
            verdict, seen = results[check]
            row.append(verdict if seen is None else f"{verdict} [{notes.setdefault(seen, len(notes) + 1)}]")
        rows.append(row)
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "| --- |" + " :-: |" * len(answers))
    else:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
    lines += ["", "–: its classes have no such option, argument or head.", *([""] if markdown else [])]
    lines += [f"[{number}] {f'`{seen}`  ' if markdown else seen}" for seen, number in notes.items()]
    return "\n".join(lines)


def failures(answers: Answers) -> list[str]:
    """The checks that our implementations offer but do not pass."""
    return [
        f"{title}: {check}: {verdict} ({seen})"
        for title in (contender.title for contender in CONTENDERS if contender.ours)
        for check, (verdict, seen) in answers.get(title, {}).items()
        if verdict not in ("yes", "–")
    ]
