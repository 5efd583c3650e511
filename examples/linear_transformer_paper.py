# SPDX-License-Identifier: Apache-2.0
"""Two small versions of experiments of "Transformers are RNNs" (Katharopoulos et al. 2020, arXiv:2006.16236), on a
CPU.

    python examples/linear_transformer_paper.py copy --output_dir outputs/copy
    python examples/linear_transformer_paper.py digits --output_dir outputs/digits

`copy` (figure 2): the model learns to repeat a sequence of random symbols. Plots the loss of the copy over the
training steps, for linear attention and for softmax attention in a GPT-2 of the same size.

`digits` (table 1): scikit-learn's 1,797 pictures of 8 × 8 pixels in 17 levels of grey, pixel by pixel. Reports the
bits per pixel on held-out pictures and the sampled pictures per second, with and without states or caches, and draws
samples. With `--upsample 4` the speeds are those of 32 × 32 pixels.

Needs matplotlib and scikit-learn.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, get_scheduler, set_seed

from nystrom_models import LinearTransformerConfig, LinearTransformerForCausalLM
from nystrom_models.training.run import create_folder

SYMBOLS = 10
LEVELS = 17
TEST_PICTURES = 297


def linear_model(vocab_size: int, length: int, args: argparse.Namespace) -> PreTrainedModel:
    config = LinearTransformerConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        feature_map=args.feature_map,
        is_decoder=True,
        pad_token_id=None,
        bos_token_id=vocab_size - 1,
        eos_token_id=None,
    )
    return LinearTransformerForCausalLM(config)


def softmax_model(vocab_size: int, length: int, args: argparse.Namespace) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=args.hidden_size,
        n_layer=args.num_hidden_layers,
        n_head=args.num_attention_heads,
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=vocab_size - 1,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[int, int, argparse.Namespace], PreTrainedModel]] = {
    "linear": linear_model,
    "softmax": softmax_model,
}


def train(model: PreTrainedModel, batches: Iterator[dict[str, Tensor]], args: argparse.Namespace) -> list[float]:
    """Trains with AdamW, a warm-up of a twentieth of the steps and a cosine to zero; returns the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    scheduler = get_scheduler("cosine", optimizer, args.max_train_steps // 20, args.max_train_steps)
    losses = []
    model.train()
    for step in range(args.max_train_steps):
        loss = model(**next(batches)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"  step {step + 1:>6,}: loss {statistics.fmean(losses[-100:]):.4f}", flush=True)
    return losses


# ---- the copy task ----


def copy_batches(args: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """Rows of a separator, random symbols, a separator and the same symbols again; only these count for the loss."""
    half = (args.length - 2) // 2
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        symbols = torch.randint(SYMBOLS, (args.batch_size, half), generator=generator)
        separator = torch.full((args.batch_size, 1), SYMBOLS)
        ids = torch.cat([separator, symbols, separator, symbols], dim=1)
        labels = ids.clone()
        labels[:, : half + 2] = -100
        yield {"input_ids": ids, "labels": labels}


def run_copy(args: argparse.Namespace) -> dict:
    curves = {}
    for name in args.models:
        set_seed(args.seed)
        model = MODELS[name](SYMBOLS + 1, args.length, args)
        print(f"{name}: {model.num_parameters():,} parameters")
        curves[name] = train(model, copy_batches(args), args)
    plot_curves(curves, Path(args.output_dir) / "copy.png")
    last = {name: statistics.fmean(losses[-100:]) for name, losses in curves.items()}
    for name, loss in last.items():
        print(f"{name:<8} loss of the last 100 steps {loss:.4f} (guessing: {math.log(SYMBOLS):.4f})")
    return {"loss_of_the_last_100_steps": last, "losses": curves}


def plot_curves(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, losses in curves.items():
        width = max(1, len(losses) // 200)
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(np.arange(len(smooth)) + width, smooth, label=name)
    axes.set(xlabel="step", ylabel="loss of the copy, nats per symbol", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ---- pictures pixel by pixel ----


def load_digits(upsample: int) -> tuple[Tensor, Tensor]:
    """Training and held-out pictures, (pictures, pixels) int64 from 0 to 16, with the pixels row by row."""
    from sklearn.datasets import load_digits as load

    pictures = torch.from_numpy(load().images.astype(np.int64))
    pictures = pictures.repeat_interleave(upsample, 1).repeat_interleave(upsample, 2).flatten(1)
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    return pictures[order[TEST_PICTURES:]], pictures[order[:TEST_PICTURES]]


def as_rows(pictures: Tensor) -> dict[str, Tensor]:
    """Rows of a start token and the pixels. Every pixel is predicted."""
    ids = torch.nn.functional.pad(pictures, (1, 0), value=LEVELS)
    return {"input_ids": ids, "labels": ids}


def picture_batches(pictures: Tensor, args: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        yield as_rows(pictures[torch.randint(len(pictures), (args.batch_size,), generator=generator)])


@torch.no_grad()
def bits_a_pixel(model: PreTrainedModel, pictures: Tensor) -> float:
    model.eval()
    total = sum(model(**as_rows(part)).loss.item() * len(part) for part in pictures.split(64))
    return total / len(pictures) / math.log(2)


def draw(model: PreTrainedModel, count: int, pixels: int, use_cache: bool) -> tuple[Tensor, float]:
    """Sampled pictures (count, pixels), and pictures per second."""
    model.eval()
    start = torch.full((count, 1), LEVELS)
    began = time.perf_counter()
    out = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        do_sample=True,
        top_k=0,
        max_new_tokens=pixels,
        min_new_tokens=pixels,
        use_cache=use_cache,
        suppress_tokens=[LEVELS],
        pad_token_id=LEVELS,
    )
    return out[:, 1:], count / (time.perf_counter() - began)


def save_pictures(pictures: dict[str, Tensor], path: Path) -> None:
    """Saves an image with one row of pictures for each name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    side = math.isqrt(next(iter(pictures.values())).shape[1])
    figure, grid = pyplot.subplots(len(pictures), 1, figsize=(8, 1.3 * len(pictures)), squeeze=False)
    for axes, (name, drawn) in zip(grid[:, 0], pictures.items(), strict=True):
        strip = np.concatenate([np.pad(picture.reshape(side, side), 1) for picture in drawn[:16].numpy()], axis=1)
        axes.imshow(strip, cmap="gray_r", vmin=0, vmax=LEVELS - 1)
        axes.set_title(name, fontsize=8)
        axes.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def run_digits(args: argparse.Namespace) -> dict:
    training, held_out = load_digits(1)
    results: dict[str, dict] = {"bits_a_pixel": {}, "pictures_a_second": {}}
    drawn = {"held out": held_out}
    pixels = training.shape[1] * args.upsample**2
    for name in args.models:
        set_seed(args.seed)
        model = MODELS[name](LEVELS + 1, training.shape[1] + 1, args)
        print(f"{name}: {model.num_parameters():,} parameters")
        train(model, picture_batches(training, args), args)
        results["bits_a_pixel"][name] = bits_a_pixel(model, held_out)
        drawn[name], _ = draw(model, 16, training.shape[1], use_cache=True)
        if args.upsample > 1:
            # The speed does not depend on the weights.
            model = MODELS[name](LEVELS + 1, pixels + 1, args)
        ways = {f"{name}, states": True} if name == "linear" else {f"{name}, cache": True, f"{name}, no cache": False}
        for way, use_cache in ways.items():
            draw(model, 1, 2, use_cache)  # work that is done only once is not timed
            results["pictures_a_second"][way] = draw(model, args.num_pictures, pixels, use_cache)[1]
    counts = torch.bincount(training.flatten(), minlength=LEVELS) + 1.0
    entropy = -(counts / counts.sum()).log2()[held_out.flatten()].mean().item()
    results["bits_a_pixel"]["frequencies of the levels alone"] = entropy
    save_pictures(drawn, Path(args.output_dir) / "digits.png")
    for name, bits in results["bits_a_pixel"].items():
        print(f"{name:<32} {bits:.3f} bits a pixel")
    for way, speed in results["pictures_a_second"].items():
        print(f"{way:<32} {speed:.3g} pictures of {pixels} pixels a second, {args.num_pictures} at once")
    return results


# ---- command line ----


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="task", required=True)
    for task, help_text in (("copy", "figure 2: the copy task"), ("digits", "table 1: pictures pixel by pixel")):
        command = commands.add_parser(task, help=help_text)
        command.add_argument("--output_dir", required=True, help="folder for the picture and results.json")
        command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
        command.add_argument("--max_train_steps", type=int, default=3000)
        command.add_argument("--batch_size", type=int, default=32)
        command.add_argument("--learning_rate", type=float, default=1e-3)
        command.add_argument("--weight_decay", type=float, default=0.01 if task == "copy" else 0.1)
        command.add_argument("--hidden_size", type=int, default=128)
        command.add_argument("--num_hidden_layers", type=int, default=4)
        command.add_argument("--num_attention_heads", type=int, default=8)
        command.add_argument("--feature_map", default="elu", help="feature map of the linear model (default: elu)")
        command.add_argument("--seed", type=int, default=0)
        if task == "copy":
            command.add_argument("--length", type=int, default=128, help="tokens of a row (default: 128)")
        else:
            command.add_argument("--num_pictures", type=int, default=16, help="pictures sampled at once (default: 16)")
            command.add_argument(
                "--upsample", type=int, default=1, help="factor for rows and columns of pixels (default: 1)"
            )
    args = parser.parse_args(argv)
    for name in ("max_train_steps", "batch_size", "upsample", "num_pictures"):
        if getattr(args, name, 1) < 1:
            parser.error(f"argument --{name}: must be at least 1")
    if args.task == "copy" and (args.length < 4 or args.length % 2):
        parser.error("argument --length: must be an even number from 4 on, such as 128")
    return args


def main(argv: list[str] | None = None) -> dict:
    args = parse_args(argv)
    folder = Path(args.output_dir)
    create_folder(args.output_dir)
    results = run_copy(args) if args.task == "copy" else run_digits(args)
    text = json.dumps({"arguments": vars(args), "torch": torch.__version__, **results}, indent=1)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
