# SPDX-License-Identifier: Apache-2.0
import pytest

from nystrom_models.data import load_docstrings
from nystrom_models.data.docstrings import deduplicate, english_text, iter_docstrings, source_files

NUMPYDOC = """
    Return the mean of the values along an axis of
    the array, as a new array.

    Parameters
    ----------
    values : array_like
        The values of which the mean is to
        be computed.
    axis : int
        The axis along which it is taken.

    +-------+-------+
    | the a | of it |
    +-------+-------+

    See :func:`numpy.mean` for what it does with ``None``.

    >>> mean_of_the_values(if_it_is, not_in_the, text=of_this)
    is it and the are of
"""


def test_prose_is_kept_and_the_rest_is_not():
    assert english_text(NUMPYDOC).splitlines() == [
        "Return the mean of the values along an axis of the array, as a new array.",
        "The values of which the mean is to be computed.",
        "The axis along which it is taken.",
        "See numpy.mean for what it does with None.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "x = f(y) + g(z) if a else b[c]",
        "Gibt den Mittelwert aller Werte entlang einer Achse zurück",
        "devuelve los valores medios a lo largo del eje indicado",
        "float32 float64 int32 int64 bool_ complex64",
    ],
    ids=["code", "German", "Spanish", "names"],
)
def test_what_is_not_english_prose_is_left_out(text):
    assert english_text(text) == ""


def test_sources_are_parsed_and_never_imported(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        '"""The text of the module, which is long enough to be kept."""\n'
        "raise SystemExit('imported')\n"
        "class A:\n"
        "    def method(self):\n"
        '        """The text of the method, which is long enough to be kept."""\n'
        "    def short(self):\n"
        '        """Too short for it."""\n'
    )
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    files = [(str(path), f"package/{path.name}", "package", 0) for path in (broken, source)]
    rows = list(iter_docstrings(files))
    assert {row["object"] for row in rows} == {"package.module", "package.module.A.method"}
    assert {row["package"] for row in rows} == {"package"} and {row["file"] for row in rows} == {"package/module.py"}


def test_repeated_lines_are_dropped():
    first = "The axis along which the mean of the values is computed."
    near = "The axis along which the mean of all the values is computed."
    other = "Raised if the file to be read does not exist on this machine."
    rows = [{"text": text, "id": i} for i, text in enumerate((first, f"{near}\n{other}", other.upper()))]
    assert [(row["id"], row["text"]) for row in deduplicate(rows, max_seen=0.3)] == [(0, first), (1, other)]


def test_a_sample_of_files_stays_within_its_bytes_and_is_seeded():
    files = source_files(max_bytes_per_package=200_000, seed=1)
    sizes = {}
    for _, _, package, size in files:
        sizes[package] = sizes.get(package, 0) + size
    assert max(sizes.values()) <= 200_000
    assert {"stdlib", "torch", "transformers"} <= sizes.keys()
    assert files == source_files(max_bytes_per_package=200_000, seed=1)
    assert files != source_files(max_bytes_per_package=200_000, seed=2)


def test_heldout_text_is_not_in_the_training_text(tmp_path):
    data = load_docstrings(1_500_000, 0.3, cache_dir=tmp_path / "a", packages=["accelerate", "datasets"], num_proc=2)
    train, heldout = data["train"], data["validation"]
    assert len(train) > 300 and len(heldout) > 100
    assert set(train["package"]) == {"accelerate", "datasets"} == set(heldout["package"])
    assert not set(train["file"]) & set(heldout["file"])
    lines = {line for text in train["text"] for line in text.split("\n")}
    assert not lines & {line for text in heldout["text"] for line in text.split("\n")}
    again = load_docstrings(1_500_000, 0.3, cache_dir=tmp_path / "b", packages=["accelerate", "datasets"], num_proc=2)
    assert again["train"]["text"] == train["text"] and again["validation"]["object"] == heldout["object"]


def test_unknown_package_is_named(tmp_path):
    with pytest.raises(ValueError, match="no_such_package"):
        load_docstrings(cache_dir=tmp_path, packages=["accelerate", "no_such_package"])
