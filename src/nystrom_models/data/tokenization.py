# SPDX-License-Identifier: Apache-2.0
"""Training of the tokenizer that a model of this package is pretrained with."""

from collections.abc import Iterable, Iterator

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# In the order of the default ids of the configurations: bos 0, pad 1, eos 2.
SPECIAL_TOKENS = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")


def iter_texts(dataset: Dataset, column: str = "text", batch_size: int = 1000) -> Iterator[list[str]]:
    """Batches of one text column, as [`train_tokenizer`] takes them."""
    for batch in dataset.select_columns(column).iter(batch_size):
        yield batch[column]


def train_tokenizer(
    texts: Iterable[str] | Iterable[list[str]],
    vocab_size: int = 30000,
    model_max_length: int = 512,
    lowercase: bool = True,
    min_frequency: int = 2,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Trains a WordPiece tokenizer in the manner of BERT.

    Sequences come out as `[CLS] A [SEP]` with token type 0, pairs as `[CLS] A [SEP] B [SEP]` with token types 0 and 1.

    Args:
        texts: strings or lists of strings.
        vocab_size: upper bound of the vocabulary, special tokens included.
        model_max_length: the longest sequence, special tokens included, that the model takes; it is saved along.
        lowercase: whether case and accents are dropped.
        min_frequency: how often a pair of pieces must occur to become one piece.
        show_progress: progress bars of `tokenizers`.

    Returns:
        A tokenizer that `save_pretrained` writes and `AutoTokenizer.from_pretrained` reads.

    Raises:
        ValueError: if `vocab_size` cannot hold the special tokens, or `texts` holds no text.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size must be above {len(SPECIAL_TOKENS)}, for example 8000, but is {vocab_size}.")
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() <= len(SPECIAL_TOKENS):
        raise ValueError("texts holds no text to train a tokenizer from: check the data set and its text column.")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        bos_token="[CLS]",
        eos_token="[SEP]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )
