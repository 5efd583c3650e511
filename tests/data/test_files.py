# SPDX-License-Identifier: Apache-2.0
import csv
import gzip
import io
import json
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value, packaged_modules

from nystrom_models.data import json_files
from nystrom_models.data.file_rows import decoded_lines
from nystrom_models.data.files import load_files
from tests.fasta import needs_fasta

ROWS = [
    {"text": 'A "quoted", long\ntext', "label": 1},
    {"text": "NA", "label": 0},
    {"text": "Nyström", "label": 1},
]

# As pandas writes it: with a group of rows, which has none.
_EMPTY = io.BytesIO()
pq.write_table(pa.Table.from_pylist(ROWS).slice(0, 0), _EMPTY)
EMPTY_PARQUET = _EMPTY.getvalue()


def write(path, rows):
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    else:
        Dataset.from_list(rows).to_parquet(path)
    return path


def compressed(path):
    packed = path.with_name(path.name + ".gz")
    with path.open("rb") as source, gzip.open(packed, "wb") as target:
        shutil.copyfileobj(source, target)
    return packed


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".csv", ".parquet"])
def test_tables(ending, tmp_path):
    first = write(tmp_path / f"first{ending}", ROWS[:2])
    second = compressed(write(tmp_path / f"second{ending}", ROWS[2:]))
    assert load_files(first, cache_dir=tmp_path / "cache").to_list() == ROWS[:2]
    assert load_files([first, str(second)], cache_dir=tmp_path / "cache").to_list() == ROWS


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("between", ["", "\n", "\n\n"])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_json_may_have_objects_one_after_another(name, between, indent, tmp_path):
    """In a line each, in several, or without a line between them; `jq` writes them in several."""
    path = tmp_path / name
    path.write_text(between + between.join(json.dumps(row, indent=indent) for row in ROWS), encoding="utf-8")
    assert load_files(path, cache_dir=tmp_path / "cache").to_list() == ROWS
    assert list(load_files(path, streaming=True)) == ROWS


def test_json_may_be_divided_into_lines_in_any_way(tmp_path):
    first, second, third = map(json.dumps, ROWS[:3])
    values = json.dumps(ROWS[1], indent=1)
    for text in (
        f"{first}\n{values}\n{third}\n",
        f'{first[:-1]}, "more": {{}}\n}}{values}\n\n{third}',
        f"{first}\n[{second},\n{third}]",
        f"[{first}]\n{second}\n{third}",
    ):
        (tmp_path / "rows.json").write_text(text)
        rows = list(load_files(tmp_path / "rows.json", streaming=True))
        assert [{name: row[name] for name in ROWS[0]} for row in rows] == ROWS[:3], text


def test_json_is_read_no_further_than_it_needs(tmp_path, monkeypatch):
    """Files of gigabytes: neither objects over several lines nor a truncated one need the lines that follow."""
    taken = 0

    def counted(path):
        nonlocal taken
        for line in decoded_lines(path):
            taken += 1
            yield line

    monkeypatch.setattr(json_files, "decoded_lines", counted)
    monkeypatch.setattr(json_files, "PART", 4)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(ROWS[0], indent=1) for _ in range(1000)))
    assert next(iter(load_files(path, streaming=True))) == ROWS[0]
    assert taken < 1000
    taken = 0
    path.write_text('{"text": "a"}\n{"text": "b",\n' + '{"text": "c"}\n' * 1000)
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: not JSON .*column 14"):
        load_files(path, streaming=True)
    assert taken < 100


def test_json_columns_whose_objects_have_no_common_type_are_left_out(tmp_path):
    """Corpora have columns such as `meta`, which nothing here reads."""
    path = tmp_path / "rows.jsonl"
    for first, second in (({"a": 1}, "x"), ({"a": 1}, {"a": [1]}), ([{"a": 1}], [{"a": "x"}])):
        values = [None, *[first] * 149, second]
        path.write_text("".join(json.dumps(ROWS[0] | {"huggingface": value}) + "\n" for value in values))
        for _ in range(2):  # also from the cache
            with pytest.warns(
                UserWarning, match=r"'huggingface' of --train_file is left out: .*rows\.jsonl, line 151"
            ):
                rows = load_files(path, cache_dir=tmp_path / "cache")
            assert rows.to_list() == [ROWS[0]] * 151
        assert [row["huggingface"] for row in load_files(path, streaming=True)] == values
    # What began as text is needed, and so is the only column.
    path.write_text(json.dumps(ROWS[0]) + '\n{"text": {"a": 1}}')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2, column 'text': "):
        load_files(path, cache_dir=tmp_path / "cache")
    path.write_text('{"data": [{"a": 1},\n{"a": "x"}]}')
    with pytest.raises(ValueError, match=r"rows\.jsonl, item 1, column 'data': "):
        load_files(path, cache_dir=tmp_path / "cache")


def test_half_a_character_is_named_by_its_line(tmp_path):
    """Whole ones, and backslashes before a u, may stand before it."""
    rows = [r'{"text": "\ud55c \ud83d\ude00"}', r'{"text": "C:\\udade"}', r'{"text": "\udc00"}']
    (tmp_path / "rows.json").write_text("[\n" + ",\n".join(rows) + "\n]")
    with pytest.raises(ValueError, match=r"rows\.json, line 4: surrogates not allowed, but it holds '\\udc00'"):
        load_files(tmp_path / "rows.json", cache_dir=tmp_path / "cache")


@needs_fasta
def test_sequences_of_fasta_files(tmp_path, monkeypatch):
    path = tmp_path / "genome.fna"
    path.write_text(">chr1 first one\nACGTN\nacg\n\n>chr2\nTT\n", encoding="utf-8")
    rows = [
        {"id": "chr1", "description": "first one", "sequence": "ACGTNacg"},
        {"id": "chr2", "description": "", "sequence": "TT"},
    ]
    assert load_files([path, compressed(path)], cache_dir=tmp_path / "cache").to_list() == rows * 2
    assert list(load_files(compressed(path), streaming=True)) == rows
    path.write_text("; no sequence\n", encoding="utf-8")
    for streaming in (False, True):
        with pytest.raises(ValueError, match="contain no rows"):
            load_files(path, cache_dir=tmp_path / "cache", streaming=streaming)
    monkeypatch.delattr(packaged_modules, "fasta")
    with pytest.raises(ValueError, match=r"\.fna files are read by datasets 5\.1 or newer"):
        load_files(tmp_path / "genome.fna.gz")


@needs_fasta
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("beginning", "message"),
    [
        ("; a comment\n\nACGT\n", r"genome\.fa, line 3: 'ACGT' is before the first header\."),
        ("@read\nACGT\n+\nIIII\n", r"genome\.fa, line 1: '@read' is before the first header\."),
        ("\ufeff>chr0\nACGT\n", r"genome\.fa begins with a byte-order mark"),
    ],
)
def test_nothing_before_the_first_header_of_a_fasta_file_is_lost(beginning, message, streaming, tmp_path):
    (tmp_path / "genome.fa").write_text(beginning + ">chr1\nTT\n", encoding="utf-8", newline="")
    with pytest.raises(ValueError, match=message):
        load_files(tmp_path / "genome.fa", cache_dir=tmp_path / "cache", streaming=streaming)


@needs_fasta
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # `datasets` would read the bases 1ACGT4.
        ("x.fa", b">a 1\n; 2\n1 ACGT 4\n", r"x\.fa, line 3: '1 ACGT 4' has the digit '1'.* Leave out numbers"),
        ("x.fa", b">a\nAC\n>b M\xfcller\nAC\n", r"x\.fa, line 3: not UTF-8"),
        ("x.fa.gz", gzip.compress(b">a\n" + b"ACGT\n" * 2000, mtime=0)[:-12], r"x\.fa\.gz is damaged after line"),
    ],
    ids=["digit", "encoding", "truncated"],
)
def test_faults_of_fasta_files_are_named_before_they_are_read(name, content, message, streaming, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_files(tmp_path / name, cache_dir=tmp_path / "cache", streaming=streaming)


def test_quotes_are_text_in_tsv_files(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text('text\tlabel\nHe said "no.\t0\n"Yes" and left\t1\nNA\t1\n', encoding="utf-8")
    rows = [{"text": 'He said "no.', "label": 0}, {"text": '"Yes" and left', "label": 1}, {"text": "NA", "label": 1}]
    assert load_files([path, compressed(path)], cache_dir=tmp_path / "cache").to_list() == rows * 2


def test_documents_of_text_are_separated_by_empty_lines(tmp_path):
    path = tmp_path / "corpus.txt"
    # With a byte-order mark, line ends of Windows, and an empty line that has a space and a tab.
    path.write_bytes("\ufeff\r\n= Title =\r\n  A paragraph.\u2028\x0c\r\n \t\r\n\r\n\r\nAnother.".encode())
    texts = ["= Title =\n  A paragraph.\u2028\x0c", "Another."]
    assert load_files([path, compressed(path)], cache_dir=tmp_path / "cache")["text"][:] == texts * 2
    (tmp_path / "mac.txt").write_bytes(b"a\rb\r\rc")
    assert load_files(tmp_path / "mac.txt", cache_dir=tmp_path / "cache")["text"][:] == ["a\nb", "c"]
    stream = load_files([path, compressed(path)], streaming=True)
    assert [row["text"] for row in stream] == texts * 2 and stream.num_shards == 2


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_tables_have_line_ends_of_any_system(end, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(f'text,label{end}"a{end}b",1{end}c,2'.encode())
    rows = [{"text": f"a{end}b", "label": 1}, {"text": "c", "label": 2}]
    assert load_files(path, cache_dir=tmp_path / "cache").to_list() == rows


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_column_may_begin_with_missing_values(ending, tmp_path):
    """Of more rows than are read at once."""
    path, count = tmp_path / f"rows.{ending}", 10_500
    rows = [{"text": f"{'long ' * 20}{i}", "note": None} for i in range(count)] + [{"text": "a", "note": "checked"}]
    if ending == "csv":
        path.write_text("text,note\n" + "".join(f"{row['text']},{row['note'] or ''}\n" for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_files(path, cache_dir=tmp_path / "cache")
    assert loaded[-1] == rows[-1] and loaded[0] == rows[0] and len(loaded) == count + 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"text": "a"}\n{"text": "b"\n{"text": "c"}\n', r"rows\.jsonl, line 2: not JSON .*column 13"),
        ("rows.jsonl", b'{"text": "a"}\n\n[1, 2]\n', r"rows\.jsonl, line 3: must be a JSON object"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"rows\.jsonl, line 2: not UTF-8"),
        ("rows.jsonl", b'{"label": 1}\n{"label": "x"}\n', r"rows\.jsonl, line 2, column 'label': .* int64 vs string"),
        ("rows.jsonl", b'{"label": true}\n{"label": 3}\n', r"rows\.jsonl, line 2, column 'label': .* bool vs int64"),
        # pyarrow makes 1.0 of true.
        (
            "rows.jsonl",
            b'{"label": 0.5}\n{"label": true}\n',
            r"rows\.jsonl, line 2, column 'label': .* double vs bool",
        ),
        ("rows.jsonl", b'{"label": [0.5, true]}\n', r"rows\.jsonl, line 1, column 'label': .* got true or false"),
        ("rows.jsonl", b'{"label": [1, "x"]}\n', r"rows\.jsonl, line 1, column 'label': Could not convert 'x'"),
        # Half a character outside the basic plane.
        ("rows.jsonl", b'{"label": "\\ud83d"}', r"rows\.jsonl, line 1: surrogates not allowed, .*'\\ud83d'"),
        ("rows.json", b"\n \n", r"--test_file contain no rows"),
        ("rows.json", b'{\n "label": [1, 2]\n', r"rows\.json, line 2: not JSON .* one after another, or a list"),
        ("rows.csv", b"text,label\na,1\nb,2,3\n", r"rows\.csv, line 3: 3 fields, but the header has 2"),
        # pandas fills up short lines.
        ("rows.csv", b"text,label\na,1\nb\nc,3\n", r"rows\.csv, line 3: 1 fields, but the header has 2"),
        ("rows.csv", b"text,label\n" + b"a" * 200_000 + b",1\nb,2,3\n", r"rows\.csv, line 3: 3 fields"),
        # pandas takes the first of three fields as an index without a warning.
        ("rows.csv", b"text,label\na,1,2\nb,2,3\n", r"rows\.csv, line 2: 3 fields, but the header has 2"),
        ("rows.csv", b'text,label\n"a,1\nb,2\n', r"rows\.csv, line 3: unexpected end of data"),
        ("rows.csv", b'text,label\n"a" b,1\n', r"rows\.csv, line 2: .* its quotes twice"),
        ("rows.csv", b"text,text\na,1\n", r"rows\.csv: several columns are called text: give each"),
        ("rows.csv", b'"text" x,label\na,1\n', r"rows\.csv, line 1: .* its quotes twice"),
        ("rows.csv", b"\n\n", r"--test_file contain no rows"),
        ("rows.csv", b"text,label\n", r"--test_file contain no rows"),
        # pandas leaves the empty line out, and all later rows would get other numbers.
        ("rows.csv", b"text\na\n\nb\n", r"rows\.csv, line 3: empty"),
        ("rows.txt", b"a\n\xff\n", r"rows\.txt, line 2: not UTF-8"),
        # Without a byte-order mark, these are valid UTF-8.
        ("rows.txt", "One.\nTwo.\n".encode("utf-16-le"), r"rows\.txt is UTF-16 .* save it as UTF-8"),
        ("rows.csv", "text,label\na,1\n".encode("utf-16-be"), r"rows\.csv is UTF-16"),
        ("rows.csv", "text,label\na,1\n".encode("utf-16"), r"rows\.csv is UTF-16"),
        ("rows.txt", b" \n", r"--test_file contain no rows"),
        ("rows.txt", b"", r"rows\.txt, given by --test_file, is empty"),
        ("rows.jsonl.gz", b"plain", r"rows\.jsonl\.gz is damaged"),
        ("rows.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 2000, mtime=0)[:-12], r"rows\.jsonl\.gz is damaged"),
        ("rows.parquet", EMPTY_PARQUET, r"--test_file contain no rows"),
        ("rows.parquet.gz", gzip.compress(EMPTY_PARQUET, mtime=0), r"--test_file contain no rows"),
        ("rows.parquet", b"PAR1 and no more", r"rows\.parquet, given by --test_file, cannot be read"),
        ("rows.tsv", b"text\tlabel\na\t1\nb\t2\t3\n", r"rows\.tsv, line 3: 3 fields, but the header has 2"),
        ("rows.json", b'[{"text": "a"}, {"text": ]', r"rows\.json, line 1: not JSON \(.*, column 26\)"),
        ("rows.json", b'[{"text": "a"}, 3]', r"rows\.json, item 2: must be a JSON object, but is 3"),
        ("rows.xlsx", b"x", r"rows\.xlsx must end in one of \.txt, \.json, \.jsonl, \.csv, \.tsv, \.parquet"),
    ],
)
def test_faults_are_named(name, content, message, tmp_path):
    good = tmp_path / ("good." + name.split(".", 1)[1])
    good.write_bytes(b'{"text": "a"}\n' if "jsonl" in name and "gz" not in name else content)
    path = tmp_path / name
    path.write_bytes(content)
    paths = [good, path] if name == "rows.jsonl" and b"label" not in content else path
    with pytest.raises(ValueError, match=message):
        load_files(paths, "--test_file", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_parquet_file_without_rows_among_others(streaming, tmp_path):
    (tmp_path / "empty.parquet").write_bytes(EMPTY_PARQUET)
    files = [tmp_path / "empty.parquet", write(tmp_path / "rows.parquet", ROWS), tmp_path / "empty.parquet"]
    assert list(load_files(files, cache_dir=tmp_path / "cache", streaming=streaming)) == ROWS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.txt", b" \n\n"),
        ("rows.json", b"[]"),
        ("rows.jsonl", b"\n\n"),
        ("rows.csv", b"text\n"),
        ("rows.tsv", b"text\n"),
        ("rows.parquet", EMPTY_PARQUET),
        ("rows.fa", b";comment\n"),
    ],
)
def test_a_stream_without_rows_is_named(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"files of --train_file contain no rows: .*{re.escape(name)}"):
        load_files(tmp_path / name, streaming=True)
    if name.endswith(("txt", "jsonl")):
        (tmp_path / f"more-{name}").write_bytes(b'{"text": "a"}\n')
        assert len(list(load_files([tmp_path / name, tmp_path / f"more-{name}"], streaming=True))) == 1


@pytest.mark.parametrize(("value", "inner"), [(0, lambda feature: feature), ([0], List)], ids=["label", "list"])
def test_parquet_files_that_number_classes_differently_are_refused(value, inner, tmp_path):
    """`datasets` would read the numbers of all files as those of the first one."""
    for name, classes in (("one", ["bad", "good"]), ("same", ["bad", "good"]), ("other", ["good", "bad"])):
        data = {"text": ["x"], "label": [value]}
        features = Features({"text": Value("string"), "label": inner(ClassLabel(names=classes))})
        Dataset.from_dict(data, features=features).to_parquet(tmp_path / f"{name}.parquet")
    files = [tmp_path / "one.parquet", tmp_path / "same.parquet"]
    assert len(load_files(files, cache_dir=tmp_path / "cache")) == 2
    with pytest.raises(ValueError, match=r"other\.parquet: the column 'label' numbers the classes \['good', 'bad'\]"):
        load_files([files[0], tmp_path / "other.parquet"], cache_dir=tmp_path / "cache")


def test_a_missing_file_and_mixed_formats(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(FileNotFoundError, match=r"--train_file .*absent\.jsonl is not a file"):
        load_files([path, tmp_path / "absent.jsonl"])
    with pytest.raises(ValueError, match="must have one format"):
        load_files([path, write(tmp_path / "rows.csv", ROWS)])


@pytest.mark.parametrize("name", ["a[1].jsonl", "run[1]/a.jsonl", "?.jsonl", "a*.jsonl"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_name_is_not_a_pattern(name, streaming, tmp_path):
    for other in ("a1.jsonl", "run1/a.jsonl", "b.jsonl"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        write(tmp_path / other, [{"text": "another file"}])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write(tmp_path / name, [{"text": "this file"}])
    assert [row["text"] for row in load_files(tmp_path / name, streaming=streaming)] == ["this file"]


@pytest.mark.parametrize("name", ["dates.json", "dates.jsonl", "dates.jsonl.gz"])
def test_texts_that_look_like_dates_stay_texts(name, tmp_path):
    rows = [
        {"label": "2024-01-31", "text": "a\u2028b", "at": None, "number": 1},
        {"label": "2025-06-30", "text": "c", "at": "2024-01-31T10:00:00", "number": 2},
    ]
    text = (
        json.dumps(rows)
        if name == "dates.json"
        else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    )
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    loaded = load_files([tmp_path / name, tmp_path / name], cache_dir=tmp_path / "cache")
    assert list(loaded) == rows * 2 and loaded.column_names == list(rows[0])


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
def test_values_of_json_are_those_of_the_files(ending, tmp_path):
    """Whatever stands in the first rows and files: types are those of all values."""
    first = [{"text": "a", "at": "not known", "p": 1, "days": [], "note": None}] * 1200
    rest = [
        {"text": "\U0001f600", "at": "2024-01-31", "p": 3e-11, "days": ["2024-01-31", "x"], "note": "checked"},
        {"text": "b", "at": "2024-01-31 10:00", "p": 0.1 + 0.2, "days": ["2024-02-01"], "more": {"on": "2024-01-31"}},
    ]
    paths = [write(tmp_path / f"{i}{ending}", rows) for i, rows in enumerate((first + rest[:1], rest[1:], first[:1]))]
    missing = {"note": None, "more": None}
    first, rest = ([missing | row for row in rows] for rows in (first, rest))
    assert load_files(paths, cache_dir=tmp_path / "cache").to_list() == [*first, *rest, first[0]]
    assert load_files(paths[::-1], cache_dir=tmp_path / "cache").to_list() == [first[0], rest[1], *first, rest[0]]
    with pytest.raises(ValueError, match=r"2\.json.*, column 'p': .* double vs string"):
        write(paths[2], [{"p": "0.5"}])
        load_files(paths, cache_dir=tmp_path / "cache")


def test_large_integers_are_numbers(tmp_path):
    """Such as hashes beside a text, which are in no row of a model."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"hash": 18446744073709551615, "id": 1152921504606846977}\n{"hash": -1, "id": 0.5}\n')
    rows = [{"hash": 2.0**64, "id": 2.0**60}, {"hash": -1.0, "id": 0.5}]
    assert load_files(path, cache_dir=tmp_path / "cache").to_list() == rows
    streamed = list(load_files(path, streaming=True))
    assert streamed == [rows[0] | {"id": 2**60 + 1}, rows[1]]
    assert Dataset.from_list(streamed[:1]).to_list() == streamed[:1]


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
def test_a_stream_of_json(ending, tmp_path):
    rows = [{"text": "2024-01-31", "number": 1}, {"text": "b"}, {"number": 2.5, "text": "c"}]
    paths = [write(tmp_path / f"a{ending}", rows[:2]), compressed(write(tmp_path / f"b{ending}", rows[2:]))]
    stream = load_files(paths, streaming=True)
    assert list(stream) == [{"number": None} | row for row in rows]
    late = [{"text": "a"}] * 150 + [{"title": "T", "text": "b"}]
    assert list(load_files(write(tmp_path / f"late{ending}", late), streaming=True)) == late
    write(tmp_path / f"late{ending}", [*late, {"text": "\ud83d"}])
    with pytest.raises(ValueError, match=r"late\.jsonl?, line (457|152): surrogates"):
        list(load_files(tmp_path / f"late{ending}", streaming=True))
    assert stream.num_shards == 2 and [row["text"] for row in stream.skip(1).take(1)] == ["b"]


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        (["1", "-20", "0"], [1, -20, 0]),
        ([" 1", "2 "], [1, 2]),
        (["", "3"], [None, 3]),
        (["0.5", "-1", ".5", "2e-3"], [0.5, -1.0, 0.5, 0.002]),
        (["01", "02"], None),
        (["+1", "2"], None),
        (["0.5", "007"], None),
        (["1", "x"], None),
        (["12345678901234567890", "1"], None),
        (["nan", "1.5"], None),
        (["True", "False"], None),
        (["1,5", "2"], None),
    ],
)
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_column_of_numbers_in_a_table(fields, values, ending, tmp_path):
    """Whatever would be written in another way as a number stays text."""
    with (tmp_path / f"rows.{ending}").open("w", newline="") as file:
        writer = csv.writer(file, "excel-tab" if ending == "tsv" else "excel")
        writer.writerows([["label", "text"], *([field, "a"] for field in fields)])
    found = load_files(tmp_path / f"rows.{ending}", cache_dir=tmp_path / "cache")
    assert found.column_names == ["label", "text"] and found["label"][:] == (values or fields)


def test_several_tables(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext,label\r\na,1\r\n")
    (tmp_path / "b.csv").write_text('label,text\n2,"b\nc"\n')
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    rows = [{"text": "a", "label": 1}, {"text": "b\nc", "label": 2}]
    assert load_files(paths, cache_dir=tmp_path / "cache").to_list() == rows
    assert list(load_files(paths, streaming=True)) == [row | {"label": str(row["label"])} for row in rows]


@pytest.mark.parametrize("streaming", [False, True])
def test_several_tables_have_the_same_columns(streaming, tmp_path):
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    paths[0].write_text("text,label\na,1\n")
    for header, message in (
        ("text,name", r"b\.csv: its columns are \['text', 'name'\], but must be \['text', 'label'\]"),
        ("text,label,label", r"b\.csv: several columns are called label"),
    ):
        paths[1].write_text(f"{header}\nb{',2' * header.count(',')}\n")
        with pytest.raises(ValueError, match=message):
            load_files(paths, cache_dir=tmp_path / "cache", streaming=streaming)


def test_empty_lines_at_the_end_are_no_rows(tmp_path):
    (tmp_path / "rows.csv").write_text("\ntext\na\nb\n\n\n")
    assert load_files(tmp_path / "rows.csv", cache_dir=tmp_path / "cache")["text"][:] == ["a", "b"]
    (tmp_path / "rows.csv").write_text('text\n"a\n\nb"\nc\n')
    assert load_files(tmp_path / "rows.csv", cache_dir=tmp_path / "cache")["text"][:] == ["a\n\nb", "c"]
