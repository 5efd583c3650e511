# SPDX-License-Identifier: Apache-2.0
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = "the a cat dog sat ran on under mat table and then slept quickly big small red blue one two three".split()
SPECIAL = ["<pad>", "<cls>", "<sep>", "<unk>", "<mask>"]


@pytest.fixture(scope="module")
def tokenizer():
    """Whole words of `WORDS`, for models of up to 64 tokens."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL + WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>", pair="<cls> $A <sep> $B:1 <sep>:1", special_tokens=[("<cls>", 1), ("<sep>", 2)]
    )
    names = {"pad_token": "<pad>", "cls_token": "<cls>", "sep_token": "<sep>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="<mask>", model_max_length=64, **names)
