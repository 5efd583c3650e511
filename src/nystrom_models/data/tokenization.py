# SPDX-License-Identifier: Apache-2.0
"""Training of tokenizers for pretraining."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from datasets import Dataset, IterableDataset
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast

from .encoding import text_parts
from .rows import documents_of_a_batch

# In the order of the default ids of the configurations: bos 0, pad 1, eos 2.
SPECIAL_TOKENS = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
CAUSAL_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>")

# The most characters of a text that the trainers of `tokenizers` get at once. They take time that is quadratic in the
# length of a word: hours for a genome of a few million bases, which is a single word.
LONGEST_PART = 2000

_NO_TEXT = "texts contains no text to train a tokenizer on: check the data set and its text column."


class TextBatches:
    """Batches of one text column, of `batch_size` texts or fewer if they are long. They can be iterated over several
    times, as [`train_tokenizer`] does."""

    def __init__(self, dataset: Dataset | IterableDataset, column: str = "text", batch_size: int = 1000):
        self.dataset = dataset.select_columns(column)
        self.column = column
        self.batch_size = batch_size
        if isinstance(dataset, Dataset):
            self.batch_size = documents_of_a_batch(dataset, column, batch_size)

    def __iter__(self) -> Iterator[list[str]]:
        for batch in self.dataset.iter(self.batch_size):
            texts = list(batch[self.column])
            if None in texts:
                raise ValueError(f"The column {self.column!r} has a document without a text: leave it out.")
            if others := [text for text in texts if not isinstance(text, str)]:
                raise ValueError(f"The column {self.column!r} must hold text, but holds {str(others[0])[:40]}.")
            yield texts


def _in_parts(texts: Iterable[str] | Iterable[list[str]]) -> Iterator[list[str]]:
    """The same texts, long ones in parts that begin at a space, if there is one."""
    for batch in texts:
        yield [
            part
            for text in ([batch] if isinstance(batch, str) else batch)
            for _, part in text_parts(text, LONGEST_PART)
        ]


def _check_vocab_size(vocab_size: int) -> None:
    if vocab_size <= len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size must be above {len(SPECIAL_TOKENS)}, for example 8000, but is {vocab_size}.")


def _continuations(texts: Iterable[str], tokenizer: Tokenizer) -> list[str]:
    """`##c` for every character c of the texts that can occur inside a word, in a fixed order."""
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    pieces: set[str] = set()
    for character in characters:
        word = tokenizer.normalizer.normalize_str(f"a{character}a")
        if len(tokenizer.pre_tokenizer.pre_tokenize_str(word)) == 1:
            pieces.update(word)
    return [f"##{piece}" for piece in sorted(pieces)]


def train_tokenizer(
    texts: Iterable[str] | Iterable[list[str]],
    vocab_size: int = 30000,
    model_max_length: int = 512,
    lowercase: bool = True,
    min_frequency: int = 2,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Trains a WordPiece tokenizer like BERT's.

    Sequences become `[CLS] A [SEP]` with token type 0, pairs as `[CLS] A [SEP] B [SEP]` with token types 0 and 1.
    The same texts give the same vocabulary.

    Args:
        texts: strings or lists of strings, read twice; an iterator is first read into memory.
        vocab_size: upper bound of the vocabulary, special tokens included. It is exceeded if it has no room for all
            characters, each at the beginning of words and within: none is left out.
        model_max_length: the longest sequence, special tokens included, that the model takes; saved with the
            tokenizer.
        lowercase: whether case and accents are dropped.
        min_frequency: how often a pair of pieces must occur to become one piece.
        show_progress: progress bars of `tokenizers`.

    Returns:
        A tokenizer that `save_pretrained` writes and `AutoTokenizer.from_pretrained` reads.

    Raises:
        ValueError: if `vocab_size` is too small for the special tokens, or `texts` contains no text.
    """
    _check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if iter(texts) is texts:
        texts = list(texts)
    # The trainer would number these pieces in the order of a hash map, which differs between processes, and resolve
    # ties between merges by these numbers: two runs would give different vocabularies.
    continuations = _continuations(
        chain.from_iterable([item] if isinstance(item, str) else item for item in texts), tokenizer
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[*SPECIAL_TOKENS, *continuations],
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(_in_parts(texts), trainer)
    trained = tokenizer.get_vocab()
    # Such as `##a`, from the words by which the continuations were found, if no text has an a.
    unused = {piece for piece in continuations if piece[2:] not in trained}
    tokens = [token for token in sorted(trained, key=trained.__getitem__) if token not in unused]
    if len(tokens) <= len(SPECIAL_TOKENS):
        raise ValueError(_NO_TEXT)
    # A new model: the trained tokenizer treats the continuations as special tokens.
    fresh = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    fresh.normalizer, fresh.pre_tokenizer, fresh.decoder = (
        tokenizer.normalizer,
        tokenizer.pre_tokenizer,
        tokenizer.decoder,
    )
    return _for_encoders(fresh, model_max_length)


def train_character_tokenizer(
    texts: Iterable[str] | Iterable[list[str]],
    vocab_size: int = 30000,
    model_max_length: int = 512,
    lowercase: bool = True,
    min_frequency: int = 2,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Trains a tokenizer whose tokens are single characters, white space included: for texts without words, such as
    genomes and proteins, and for scripts without spaces.

    Special tokens, their ids and pairs are those of [`train_tokenizer`].

    Args:
        texts: strings or lists of strings, read once.
        vocab_size: upper bound of the vocabulary, special tokens included; the most frequent characters are kept.
        model_max_length: the longest sequence, special tokens included, that the model takes; saved with the
            tokenizer.
        lowercase: whether case is dropped.
        min_frequency: how often a character must occur.
        show_progress: progress bars of `tokenizers`.

    Returns:
        A tokenizer that `save_pretrained` writes and `AutoTokenizer.from_pretrained` reads.

    Raises:
        ValueError: if `vocab_size` is too small for the special tokens, `texts` contains no text, or no character
            occurs often enough.
    """
    _check_vocab_size(vocab_size)
    lower = normalizers.Lowercase()
    # The trainer of `tokenizers` finds the same, but takes hundreds of bytes for each character of a text meanwhile.
    counts: Counter[str] = Counter()
    for batch in tqdm(_in_parts(texts), desc="Counting characters", disable=not show_progress):
        for part in batch:
            counts.update(lower.normalize_str(part) if lowercase else part)
    if not counts:
        raise ValueError(_NO_TEXT)
    frequent = [character for character, count in counts.items() if count >= min_frequency]
    if not frequent:
        most = max(counts.values())
        raise ValueError(f"min_frequency={min_frequency} leaves out all characters: give one of at most {most}.")
    frequent.sort(key=lambda character: (-counts[character], character))
    vocabulary = [*SPECIAL_TOKENS, *frequent][:vocab_size]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    if lowercase:
        tokenizer.normalizer = lower
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _for_encoders(tokenizer, model_max_length)


def _for_encoders(tokenizer: Tokenizer, model_max_length: int) -> PreTrainedTokenizerFast:
    """A trained tokenizer with BERT's special tokens around texts and pairs."""
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
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


def train_byte_level_tokenizer(
    texts: Iterable[str] | Iterable[list[str]],
    vocab_size: int = 30000,
    model_max_length: int = 512,
    min_frequency: int = 2,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer like GPT-2's, for causal models.

    It is lossless: no character is unknown, and decoding restores case and spaces. A prompt becomes `<s> A`, without
    an end-of-sequence token; that token is `</s>`.

    Args:
        texts: strings or lists of strings, read once.
        vocab_size: upper bound of the vocabulary, the 256 bytes and the special tokens included.
        model_max_length: the longest sequence, special tokens included, that the model takes; saved with the
            tokenizer.
        min_frequency: how often a pair of pieces must occur to become one piece.
        show_progress: progress bars of `tokenizers`.

    Returns:
        A tokenizer that `save_pretrained` writes and `AutoTokenizer.from_pretrained` reads.

    Raises:
        ValueError: if `vocab_size` is too small for the bytes and the special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + len(CAUSAL_SPECIAL_TOKENS)
    if vocab_size < least:
        raise ValueError(f"vocab_size must be at least {least}, for example 8000, but is {vocab_size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(CAUSAL_SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(_in_parts(texts), trainer)
    bos, pad, eos = CAUSAL_SPECIAL_TOKENS
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B:1", special_tokens=[(bos, CAUSAL_SPECIAL_TOKENS.index(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
    )
