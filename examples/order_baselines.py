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
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, ShuffleSplit

from nystrom_models.data.masking import IGNORED, PretrainingCollator
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


def one_hot(ids: np.ndarray, weights: np.ndarray, vocab_size: int) -> sparse.csr_matrix:
    """Sums of weights (pairs, tokens) by id (pairs, tokens), of shape (pairs, vocab_size)."""
    places = np.repeat(np.arange(len(ids)), ids.shape[1])
    return sparse.csr_matrix((weights.ravel(), (places, ids.ravel())), shape=(len(ids), vocab_size))


def length_difference(pairs: Sequence[Pair], vocab_size: int) -> sparse.csr_matrix:
    """Differences of the logarithms of the lengths, (pairs, 1)."""
    return sparse.csr_matrix([[np.log(len(first) / len(second))] for first, second in pairs])


def token_difference(place: int) -> Callable[[Sequence[Pair], int], sparse.csr_matrix]:
    """A function for the token at one place of each segment: 1 for that of the first, -1 for that of the second."""

    def difference(pairs: Sequence[Pair], vocab_size: int) -> sparse.csr_matrix:
        ids = np.array([[first[place], second[place]] for first, second in pairs])
        return one_hot(ids, np.broadcast_to([1.0, -1.0], ids.shape), vocab_size)

    return difference


def count_difference(pairs: Sequence[Pair], vocab_size: int) -> sparse.csr_matrix:
    """Differences of log(1 + count) of each token, (pairs, vocab_size)."""
    parts = []
    for side in (0, 1):
        ids = [pair[side] for pair in pairs]
        starts = np.cumsum([0, *map(len, ids)])
        flat = np.concatenate(ids)
        counts = sparse.csr_matrix((np.ones(len(flat)), flat, starts), shape=(len(pairs), vocab_size))
        counts.sum_duplicates()
        parts.append(counts.log1p())
    return (parts[0] - parts[1]).tocsr()


# All change their sign when the segments are swapped, as the label does, so that no constant is needed.
FEATURES: dict[str, tuple[Callable[[Sequence[Pair], int], sparse.csr_matrix], ...]] = {
    "lengths": (length_difference,),
    "first tokens": (token_difference(0),),
    "first and last tokens": (token_difference(0), token_difference(-1)),
    "counts of all tokens": (count_difference,),
    "all of these": (length_difference, token_difference(0), token_difference(-1), count_difference),
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
    results = {}
    for name, parts in FEATURES.items():
        train, held_out = (
            sparse.hstack([part(found, len(tokenizer)) for part in parts]).tocsr() for found in (train_pairs, pairs)
        )
        results[name] = accuracy((train, train_orders), (held_out, orders))
        print(f"  {name:<24}{results[name]:.1%}", flush=True)
    path = Path(arguments.output_dir, "order_baselines.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pairs": len(orders), "accuracy": results}, indent=2) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
