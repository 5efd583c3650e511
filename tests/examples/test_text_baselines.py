# SPDX-License-Identifier: Apache-2.0
import json
import math
import random
import re

import numpy as np
import pytest
import text_baselines
from datasets import ClassLabel, Dataset, Features, Value
from sklearn.metrics import f1_score


@pytest.fixture(scope="module")
def reviews(write_rows, filler):
    """Files of 400 and 40 texts, of which three quarters are good; the word that says so is one of many."""

    def rows(numbers):
        for number in numbers:
            word = "bad" if number % 4 == 0 else "good"
            yield {"text": f"{filler(6, number)} {word} {filler(6, number + 1000)}", "label": word}

    return write_rows(rows(range(400))), write_rows(rows(range(400, 440)))


def flags(files, *others):
    return ["--train_file", files[0], "--validation_file", files[1], *others]


def test_a_constant_and_words(reviews, tmp_path, capsys):
    """The constant prediction has the frequency of its class; words that decide are found."""
    saved = tmp_path / "scores.json"
    scores = text_baselines.main(flags(reviews, "--output_file", str(saved)))["validation"]
    constant = scores["constant prediction"]
    assert constant["accuracy"] == 0.75
    assert constant["loss"] == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), abs=1e-6)
    assert scores["tf-idf and a linear model"]["accuracy"] == 1
    assert json.loads(saved.read_text()) == {"validation": scores}
    assert "validation: 40 rows, trained on 400" in capsys.readouterr().out


def test_classes_with_names_and_numbers(reviews, tmp_path):
    """As data sets of the Hub have them: labels are numbers, which have names."""
    for split, file in zip(("train", "test"), reviews, strict=True):
        features = Features({"text": Value("string"), "label": ClassLabel(names=["good", "bad"])})
        Dataset.from_json(file, cache_dir=str(tmp_path / "cache")).cast(features).to_parquet(
            tmp_path / "reviews" / f"{split}.parquet"
        )
    data = ["--dataset_name", f"{tmp_path}/reviews", "--validation_split", "test", "--cache_dir", f"{tmp_path}/cache"]
    scores = text_baselines.main(data)["validation"]
    assert scores["constant prediction"]["accuracy"] == 0.75
    assert scores["tf-idf and a linear model"]["accuracy"] == 1


def test_glue_files_and_their_metrics(write_rows, filler):
    """Pairs of which one is the other with a word more, or a different text; F1 as scikit-learn computes it."""

    def rows(numbers):
        for number in numbers:
            text, same = filler(5, number), number % 3 > 0
            second = f"{text} indeed" if same else filler(5, number + 5000)
            yield {"sentence1": text, "sentence2": second, "label": int(same)}

    files = write_rows(rows(range(300))), write_rows(rows(range(300, 360)))
    scores = text_baselines.main(flags(files, "--task_name", "mrpc"))["validation"]
    labels = [number % 3 > 0 for number in range(300, 360)]
    assert scores["constant prediction"]["f1"] == pytest.approx(f1_score(labels, np.ones(60)))
    assert scores["tf-idf and a linear model"]["accuracy"] > 0.9


def test_a_pair_is_compared_not_concatenated():
    """Which text is first makes no difference, and equal texts differ in no word."""
    rows = Dataset.from_dict({"a": ["red fox", "red fox", "old dog"], "b": ["red fox", "old dog", "red fox"]})
    features = text_baselines.Features(("a", "b"), rows)(rows).toarray()
    words = (features.shape[1] - 1) // 2
    assert not features[0, :words].any() and features[0, -1] == pytest.approx(1)
    assert np.array_equal(features[1], features[2]) and features[1, :words].any() and not features[1, words:].any()


@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_numbers(write_rows):
    """The constant prediction of numbers is their mean in the training set."""
    generator = random.Random(0)

    def rows(count):
        for _ in range(count):
            n = generator.randrange(1, 5)
            yield {"text": " ".join(["very"] * n + ["old"] * (5 - n)), "score": float(n)}

    train, validation = list(rows(80)), list(rows(20))
    files = write_rows(train), write_rows(validation)
    scores = text_baselines.main(flags(files, "--do_regression", "--label_column_name", "score"))["validation"]
    mean = np.mean([row["score"] for row in train])
    expected = np.mean([(row["score"] - mean) ** 2 for row in validation])
    assert scores["constant prediction"]["mse"] == pytest.approx(expected, rel=1e-5)
    assert "pearson" not in scores["constant prediction"]  # it has no correlation
    assert scores["tf-idf and a linear model"]["mse"] < expected / 10


def test_wrong_input_is_refused(reviews, write_rows):
    with pytest.raises(ValueError, match="Give --validation_file"):
        text_baselines.main(["--train_file", reviews[0]])
    with pytest.raises(ValueError, match="--task_name must be one of cola"):
        text_baselines.main(flags(reviews, "--task_name", "imdb"))
    with pytest.raises(ValueError, match="has no column 'review'"):
        text_baselines.main(flags(reviews, "--text_column_names", "review"))
    several = write_rows([{"text": "good", "label": ["a", "b"]}, {"text": "bad", "label": []}])
    with pytest.raises(ValueError, match="lists of labels in the column 'label'"):
        text_baselines.main(flags((several, several)))
    faces = write_rows([{"text": "😀", "label": "good"}, {"text": "😡", "label": "bad"}] * 5)
    with pytest.raises(ValueError, match=r"No word of the columns \['text'\] is in two texts of the train set"):
        text_baselines.main(flags((faces, faces)))
    other = write_rows([{"text": "good", "label": "mixed"}])
    with pytest.raises(
        ValueError, match=r"the validation set contains \['mixed'\], not among the labels \['bad', 'good'\]"
    ):
        text_baselines.main(flags((reviews[0], other)))


def test_scripts_without_spaces_are_counted_by_letter(write_rows):
    """A word of Chinese would be a whole sentence, which no other text contains."""
    rows = [{"text": f"第{number}天{word}极了", "label": word} for number in range(40) for word in ("好", "坏")]
    scores = text_baselines.main(flags((write_rows(rows[:60]), write_rows(rows[60:]))))["validation"]
    assert scores["tf-idf and a linear model"]["accuracy"] == 1
    assert (
        re.findall(text_baselines.WORD, "A 3D-film: the iPhone很好, I'd say") == "3D film the iPhone 很 好 say".split()
    )


@pytest.mark.parametrize(
    "text", ["It's a déjà-vu, x2 & 10_000 ways; naïve Ünïcode don't", "Очень хорошо! كتاب جميل 좋은 영화"]
)
def test_other_scripts_are_counted_by_word_as_scikit_learn_does(text):
    assert re.findall(text_baselines.WORD, text) == re.findall(r"\b\w\w+\b", text)
