# SPDX-License-Identifier: Apache-2.0
"""The special tokens that a tokenizer puts around texts."""

import itertools

from transformers import PreTrainedTokenizerBase


class Template:
    """The special tokens that a tokenizer puts around one text or the two of a pair, and the token types of all.

    All types are 0 if the tokenizer gives none to a model, such as DistilBERT's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_texts: int):
        # Any token serves as a text: only the special tokens around it are read.
        text_token = tokenizer.mask_token or tokenizer.eos_token
        encoding = tokenizer(*[text_token] * num_texts, return_token_type_ids=True)[0]
        # DistilBERT's tokenizer has BERT's types within, and leaves them out of what it returns.
        types = encoding.type_ids if "token_type_ids" in tokenizer.model_input_names else [0] * len(encoding.ids)
        self.special: list[list[int]] = [[] for _ in range(num_texts + 1)]  # ids before each text, and after the last
        self.special_types: list[list[int]] = [[] for _ in range(num_texts + 1)]
        self.text_types = [0] * num_texts
        text = -1  # the number of the last text so far
        for token, kind, sequence in zip(encoding.ids, types, encoding.sequence_ids, strict=True):
            if sequence is None:
                self.special[text + 1].append(token)
                self.special_types[text + 1].append(kind)
            else:
                text = sequence
                self.text_types[text] = kind

    @property
    def num_types(self) -> int:
        """The number of token types that a model needs: the largest type, plus 1."""
        return 1 + max(itertools.chain(self.text_types, *self.special_types))
