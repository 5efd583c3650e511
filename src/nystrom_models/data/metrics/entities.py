# SPDX-License-Identifier: Apache-2.0
"""Precision, recall and F1 of entities, as `seqeval` (Nakayama 2018) counts them in its default mode, which follows
the CoNLL-2000 script `conlleval`."""

import re
from collections.abc import Mapping, Sequence


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Type, first word and the word after the last one of every entity in the tags of a sentence.

    A tag is O, outside, or a prefix and a type: B-x and I-x (begin, inside), in some schemes also E-x and S-x (end,
    single). As in `conlleval`, an entity also begins at an I after O or after another type, as in the scheme IOB1.
    """
    found: set[tuple[str, int, int]] = set()
    begin, previous = 0, ("O", "")
    for place, tag in enumerate([*tags, "O"]):
        prefix, kind = _split(tag)
        if _ends(*previous, prefix, kind):
            found.add((previous[1], begin, place))
        if _begins(*previous, prefix, kind):
            begin = place
        previous = (prefix, kind)
    return found


def _split(tag: str) -> tuple[str, str]:
    """Prefix and type of a tag."""
    return tag[:1], tag[1:].split("-", maxsplit=1)[-1] or "_"


def without_scheme(names: Sequence[str]) -> list[str]:
    """The tags in which no entity can be found: neither O nor a prefix B, I, E or S, alone or with a type."""
    return [name for name in names if not re.fullmatch(r"O|[BIES](-.+)?", name)]


def _ends(previous: str, previous_kind: str, prefix: str, kind: str) -> bool:
    """Whether an entity ends before a tag."""
    if previous in ("E", "S"):
        return True
    if previous in ("B", "I") and prefix in ("B", "S", "O"):
        return True
    return previous not in ("O", ".") and previous_kind != kind


def _begins(previous: str, previous_kind: str, prefix: str, kind: str) -> bool:
    """Whether an entity begins at a tag."""
    if prefix in ("B", "S"):
        return True
    if prefix in ("E", "I") and previous in ("E", "S", "O"):
        return True
    return prefix not in ("O", ".") and previous_kind != kind


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _scores(right: int, predicted: int, there: int) -> dict[str, float]:
    return {
        "precision": _ratio(right, predicted),
        "recall": _ratio(right, there),
        "f1": _ratio(2 * right, predicted + there),
    }


def entity_scores(
    references: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]], kinds: Sequence[str] = ()
) -> dict[str, float]:
    """Scores over all entities of all sentences (micro averages), and the share of words whose tags are right.

    An entity is right if its type and both its ends are.

    Args:
        references, predictions: the tags of each sentence.
        kinds: types for which separate scores are also returned, as `{type}_precision`, `{type}_recall` and
            `{type}_f1`.

    Returns:
        `precision`, `recall`, `f1` and `accuracy`; 0 if nothing is predicted, or there is nothing to find.
    """
    counts: dict[str | None, list[int]] = {kind: [0, 0, 0] for kind in (None, *kinds)}
    words = same = 0
    for reference, prediction in zip(references, predictions, strict=True):
        there, predicted = entities(reference), entities(prediction)
        words += len(reference)
        same += sum(a == b for a, b in zip(reference, prediction, strict=True))
        for place, found in enumerate((there & predicted, predicted, there)):
            counts[None][place] += len(found)
            for kind, _, _ in found:
                if kind in counts:
                    counts[kind][place] += 1
    by_kind: Mapping[str, dict[str, float]] = {kind: _scores(*counts[kind]) for kind in kinds}
    return {
        **_scores(*counts[None]),
        "accuracy": _ratio(same, words),
        **{f"{kind}_{name}": value for kind, scores in by_kind.items() for name, value in scores.items()},
    }
