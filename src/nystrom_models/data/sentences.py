# SPDX-License-Identifier: Apache-2.0
"""Where sentences begin, in any script."""

import sentencex


def sentence_starts(text: str, language: str = "en") -> list[int]:
    """The characters at which the sentences of a text begin, in ascending order.

    A line is a paragraph: a sentence ends with its line. Lines are split by `sentencex`, Wikimedia's splitter, which
    knows the punctuation of all scripts and the abbreviations of many languages.

    Args:
        text: a document.
        language: ISO 639-1 code, for the abbreviations. For an unknown language, general rules are used.

    Returns:
        Offsets into `text`, each of a character that is not white space. Empty if the text is blank.
    """
    starts: list[int] = []
    offset = 0
    for line in text.splitlines(keepends=True):
        for sentence in sentencex.get_sentence_boundaries(language, line):
            content = line[sentence["start_index"] : sentence["end_index"]]
            if stripped := content.lstrip():
                starts.append(offset + sentence["start_index"] + len(content) - len(stripped))
        offset += len(line)
    return starts


def split_sentences(text: str, language: str = "en") -> list[str]:
    """The sentences that begin at [`sentence_starts`], without the white space around them."""
    starts = sentence_starts(text, language)
    ends = [*starts[1:], len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=False)]
