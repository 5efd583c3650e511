# SPDX-License-Identifier: Apache-2.0
"""What sentence order prediction (SOP) must beat: how much of the order shows without reading the sentences.

    python examples/order_baselines.py --config_name configs/nystromformer/mini-256.json \\
        --tokenizer_name outputs/tokenizer --train_file corpus.txt --output_dir outputs/mini-256

takes the flags of run_pretraining.py, and draws the same pairs: the held-out ones that it is evaluated on, and those
of its first epoch. Logistic regression predicts the order from the difference between the two segments in their
lengths, in their first tokens, in their first and last tokens, and in how often they contain each token. Its
accuracies are printed, and written to order_baselines.json in the output folder.

A model that is no better has not learned the order. If the first three are far above 50 %, the documents show it by
something other than sentences, such as numbered headings.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, ShuffleSplit

from nystrom_models.data.masking import PretrainingCollator
from nystrom_models.models.losses import IGNORED
from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.optimization import OptimizationArguments
from nystrom_models.training.pretraining import PretrainingArguments, pretraining_rows, read_model_inputs
from nystrom_models.training.splits import load_documents

# Inverse strengths of the regularization. The best one on a tenth of the training pairs is taken.
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)

Pair = tuple[np.ndarray, np.ndarray]


def ordered_pairs(rows: Dataset, collator: PretrainingCollator) -> tuple[list[Pair], np.ndarray]:
    """The pairs of segments, each ids (tokens,), in the order in which a model reads them, and the labels of these
    orders, int64 of shape (pairs,). Rows without a pair are left out."""
    drawn = [(segments, order) for segments, order in map(collator.segments, rows) if order != IGNORED]
    return [(first, second) for (first, second), _ in drawn], np.array([order for _, order in drawn], dtype=np.int64)


def counts(segments: Sequence[np.ndarray], vocab_size: int) -> sparse.csr_matrix:
    """How often each segment contains each token, (segments, vocab_size)."""
    ids = np.concatenate(segments)
    starts = np.cumsum([0, *map(len, segments)])
    found = sparse.csr_matrix((np.ones(len(ids)), ids, starts), shape=(len(segments), vocab_size))
    found.sum_duplicates()
    return found


def differences(pairs: Sequence[Pair], vocab_size: int) -> dict[str, sparse.csr_matrix]:
    """Features of the first segment minus those of the second, each of shape (pairs, ...). They change their sign when
    the segments are swapped, as the label does, so that no constant is needed."""
    firsts, seconds = zip(*pairs, strict=True)

    def tokens_at(place: slice) -> sparse.csr_matrix:
        of_first, of_second = (counts([ids[place] for ids in side], vocab_size) for side in (firsts, seconds))
        return of_first - of_second

    return {
        "length": sparse.csr_matrix([[np.log(len(first) / len(second))] for first, second in pairs]),
        "first token": tokens_at(slice(1)),
        "last token": tokens_at(slice(-1, None)),
        "counts": counts(firsts, vocab_size).log1p() - counts(seconds, vocab_size).log1p(),
    }


# What is printed, and the features that it is learned from.
FEATURES = {
    "lengths": ("length",),
    "first tokens": ("first token",),
    "first and last tokens": ("first token", "last token"),
    "counts of all tokens": ("counts",),
    "all of these": ("length", "first token", "last token", "counts"),
}


def accuracy(train: tuple[sparse.csr_matrix, np.ndarray], held_out: tuple[sparse.csr_matrix, np.ndarray]) -> float:
    """The accuracy of logistic regression, trained and scored on features and labels."""
    model = LogisticRegression(fit_intercept=False, max_iter=1000)
    split = ShuffleSplit(1, test_size=0.1, random_state=0)
    search = GridSearchCV(model, {"C": STRENGTHS}, cv=split).fit(*train)
    return float(search.score(*held_out))


def main(args: Sequence[str] | None = None) -> dict[str, float]:
    """Prints and returns the accuracies by features."""
    arguments, _ = parse_arguments((PretrainingArguments, OptimizationArguments), args, __doc__)
    if not arguments.sentence_order or arguments.streaming or not arguments.do_train:
        raise ValueError(
            "The order of pairs is learned from rows for training that can be counted: omit --no_sentence_order, "
            "--streaming and --no_do_train."
        )
    arguments, _, tokenizer = read_model_inputs(arguments)
    collator = arguments.collator(tokenizer, arguments.mlm_probability)
    sets = {}
    for name, documents in load_documents(arguments).items():
        what = "training" if name == "train" else name
        pairs, orders = ordered_pairs(pretraining_rows(arguments, documents, tokenizer, what), collator)
        if len(set(orders.tolist())) < 2:
            raise ValueError(
                f"The {what} documents give {len(pairs)} pairs of segments, which do not have both orders: give more "
                "documents of several sentences, or a larger --max_length."
            )
        sets[name] = (pairs, orders)
    (train_pairs, train_orders), (pairs, orders) = sets["train"], sets["validation"]
    error = 0.5 / len(orders) ** 0.5
    print(f"{len(orders):,} held-out pairs (standard error {error:.1%}), learned from {len(train_orders):,}")
    parts = [differences(found, len(tokenizer)) for found in (train_pairs, pairs)]
    results = {}
    for name, features in FEATURES.items():
        train, held_out = (sparse.hstack([part[feature] for feature in features]).tocsr() for part in parts)
        results[name] = accuracy((train, train_orders), (held_out, orders))
        print(f"  {name:<24}{results[name]:.1%}", flush=True)
    path = Path(arguments.output_dir, "order_baselines.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pairs": len(orders), "accuracy": results}, indent=2) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
