# SPDX-License-Identifier: Apache-2.0
"""The five tasks of the Long Range Arena (Tay et al. 2021, arXiv:2011.04006): lengths, classes and tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from ..classification import TextTask
from . import pictures
from .cifar import CLASSES
from .listops import DIGITS, TOKENS
from .vocabularies import byte_tokenizer, character_tokenizer, word_tokenizer


@dataclass(frozen=True)
class ArenaTask:
    """A task: its inputs and classes, and the longest text in tokens."""

    text_task: TextTask
    max_length: int
    tokenizer: Callable[[int], PreTrainedTokenizerFast]  # by the largest number of tokens
    title: str  # for model cards
    fixed_length: bool = False  # True for pictures
    generated: tuple[int, int, int] | None = None  # training, validation and test rows


def _text_task(
    label_names: tuple[str, ...], columns: tuple[str, ...] = ("text",), example: str | None = None
) -> TextTask:
    # The inputs are data, in which every byte counts.
    return TextTask(columns, label_names=label_names, example=example, split_special_tokens=True)


def _pixel_tokenizer(model_max_length: int) -> PreTrainedTokenizerFast:
    return character_tokenizer(pictures.CHARACTERS, model_max_length)


ARENA_TASKS: dict[str, ArenaTask] = {
    "listops": ArenaTask(
        _text_task(DIGITS, example="[MAX 2 9 [MIN 4 7 ] 0 ]"),
        2000,
        lambda length: word_tokenizer(TOKENS, length),
        "expressions of the Long Range Arena's ListOps",
        generated=(96_000, 2_000, 2_000),
    ),
    "text": ArenaTask(
        _text_task(("neg", "pos")), 4000, byte_tokenizer, "IMDB's reviews, read as bytes as in the Long Range Arena"
    ),
    "retrieval": ArenaTask(
        _text_task(("unrelated", "related"), ("text1", "text2")),
        4000,
        byte_tokenizer,
        "pairs of papers of the ACL Anthology Network, read as bytes as in the Long Range Arena",
    ),
    "image": ArenaTask(
        _text_task(CLASSES, example=pictures.CHARACTERS[128] * 1024),
        1024,
        _pixel_tokenizer,
        "grey pictures of CIFAR-10, read pixel by pixel as in the Long Range Arena",
        fixed_length=True,
    ),
    "pathfinder": ArenaTask(
        _text_task(("apart", "connected"), example=pictures.CHARACTERS[0] * 1024),
        1024,
        _pixel_tokenizer,
        "pictures like those of the Long Range Arena's Pathfinder, read pixel by pixel",
        fixed_length=True,
        generated=(160_000, 20_000, 20_000),
    ),
}
