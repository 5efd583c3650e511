# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nystrom_models.data.sentences import sentence_starts, split_sentences

TEXTS = {
    "en": ["Mr. Smith came on Jan. 5, e.g. by train.", "He met Dr. Jones.", '"Are you well?" he asked.', "3 is next."],
    "lower-cased": ["the film was bad .", "i left early.", "raise an error, e.g. if the file does not exist."],
    "fr": ["Il était là.", "Élise vint.", "Où ?"],
    "ru": ["Он пришёл.", "Она ушла!", "Что делать?"],
    "ja": ["今日は天気がいい。", "散歩に行こう！", "どこへ？"],
    "hi": ["यह एक वाक्य है।", "यह दूसरा है।"],
    "ar": ["هذا كتاب.", "أين القلم؟", "لا أعرف."],
}


@pytest.mark.parametrize("language", TEXTS)
def test_sentences_of_any_script(language):
    """Sentences are split without knowing the language."""
    between = "" if language == "ja" else " "
    assert split_sentences(between.join(TEXTS[language])) == TEXTS[language]


def test_the_language_knows_its_abbreviations():
    assert split_sentences("Am 3. Oktober 1990 kam er, z. B. so. Dann ging er.", "de") == [
        "Am 3. Oktober 1990 kam er, z. B. so.",
        "Dann ging er.",
    ]


def test_a_line_ends_a_sentence():
    assert split_sentences("See above!\nNo end here\n\n(Or None.) It is 1.5.\r\n") == [
        "See above!",
        "No end here",
        "(Or None.) It is 1.5.",
    ]


@given(st.text(alphabet="ab .!?。\n\t'\"(É1😀", max_size=80))
def test_nothing_is_lost(text):
    starts = sentence_starts(text)
    assert starts == sorted(set(starts)) and all(not text[start].isspace() for start in starts)
    assert not text[: starts[0] if starts else None].strip()
    assert "".join(split_sentences(text)).split() == [] or "".join("".join(split_sentences(text)).split()) == "".join(
        text.split()
    )
