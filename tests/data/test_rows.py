# SPDX-License-Identifier: Apache-2.0
import pytest
from datasets import Dataset, Features, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_models.data import rows


@pytest.mark.parametrize("kind", ["string", "large_string"])
@settings(deadline=None)
@given(st.lists(st.none() | st.integers(0, 30), max_size=40), st.integers(1, 12), st.randoms(use_true_random=False))
def test_batches_are_small_in_any_order(kind, lengths, most, random):
    """A batch of several chromosomes would take far more memory than one of them."""
    features = Features({"text": Value(kind)})
    dataset = Dataset.from_dict({"text": [None if n is None else "ä" * n for n in lengths]}, features=features)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(rows, "MOST_BYTES", 100)
        size = rows.documents_of_a_batch(dataset, "text", most)
    assert 1 <= size <= most
    order = random.sample(range(len(lengths)), len(lengths))
    sizes = [2 * (lengths[i] or 0) for i in order]
    batches = [sizes[i : i + size] for i in range(0, len(sizes), size)]
    assert all(sum(batch) <= 100 for batch in batches if len(batch) > 1)
    # No larger one would always do.
    if size < min(most, len(lengths)):
        assert sum(sorted(sizes)[-size - 1 :]) > 100


def test_columns_without_texts_are_left_to_their_own_checks():
    assert rows.documents_of_a_batch(Dataset.from_dict({"text": [1, 2]}), "text") == rows.MOST_DOCUMENTS
