# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of the Long Range Arena's tasks: a token for each word of an expression, byte of a text, or pixel."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# No special tokens are added to a sequence. The mask token is for --pretrain_on_task.
PAD, UNKNOWN, MASK = "[PAD]", "[UNK]", "[MASK]"


def _fast(tokenizer: Tokenizer, model_max_length: int) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([PAD, UNKNOWN, MASK])
    # Token types mark the two texts if a collator keeps them in one row.
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        pad_token=PAD,
        unk_token=UNKNOWN,
        mask_token=MASK,
    )


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate((PAD, UNKNOWN, MASK, *tokens))}


def word_tokenizer(words: Sequence[str], model_max_length: int) -> PreTrainedTokenizerFast:
    """A token for each of these words, which spaces separate."""
    tokenizer = Tokenizer(models.WordLevel(_ids(words), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _fast(tokenizer, model_max_length)


def character_tokenizer(characters: Sequence[str], model_max_length: int) -> PreTrainedTokenizerFast:
    """A token for each of these characters."""
    tokenizer = Tokenizer(models.BPE(_ids(characters), merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    return _fast(tokenizer, model_max_length)


def byte_tokenizer(model_max_length: int) -> PreTrainedTokenizerFast:
    """A token for each byte of a text's UTF-8 form."""
    tokenizer = Tokenizer(models.BPE(_ids(sorted(pre_tokenizers.ByteLevel.alphabet())), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer, model_max_length)
