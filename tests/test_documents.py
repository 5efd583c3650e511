# SPDX-License-Identifier: Apache-2.0
"""What the documents say holds: the README's Python runs, and names and tables are those of the code."""

import ast
import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

import nystrom_models
from benchmarks import capabilities
from nystrom_models.data import train_tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SENTENCES = (
    "Return a list of the names of all columns. Raise an error if the file does not exist. Open the file. Read every "
    "line. Close the file at the end."
)


def python_blocks():
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            heading = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)[-1]
            yield pytest.param(match[1], page.name, line, id=f"{page.stem}_{re.sub(r'[^a-zA-Z]+', '_', heading)}")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder in which the quickstart was run, but for the size and the training of its models."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "configs").symlink_to(ROOT / "configs")
    tokenizer = train_tokenizer([SENTENCES] * 4, vocab_size=200, model_max_length=128, show_progress=False)
    for family in ("Nystromformer", "Linformer"):
        config = getattr(nystrom_models, family + "Config")(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=128,
            **({"num_landmarks": 16} if family == "Nystromformer" else {"projected_dim": 16}),
        )
        checkpoint = folder / "outputs" / "quickstart" / family.lower() / "pretrained"
        getattr(nystrom_models, family + "ForPreTraining")(config).save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
    return folder


@pytest.mark.parametrize(("code", "page", "line"), list(python_blocks()))
def test_python_of_the_documents_runs(code, page, line, quickstart, monkeypatch):
    monkeypatch.chdir(quickstart)
    # The default back end needs a C++ compiler, which not every machine has.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    # Padded to its place, so that a traceback names the line of the page.
    exec(compile("\n" * line + code, page, "exec"), {"__name__": "__main__"})


def test_the_readme_names_both_commands():
    for command in ("make quickstart", "make test"):
        assert f"    {command}\n" in README


def table_rows(first_cell):
    """The rows of a Markdown table, as lists of cells, by the first cell of its head."""
    lines = README.splitlines()
    rows = []
    for start, line in enumerate(lines):
        if re.match(rf"\| *{re.escape(first_cell)} *\|", line):
            for row in lines[start + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append([cell.strip() for cell in row.strip("|").split("|")])
    return rows


FAMILIES = {
    "Nystromformer": nystrom_models.NystromformerConfig,
    "Linformer": nystrom_models.LinformerConfig,
    "LinearTransformer": nystrom_models.LinearTransformerConfig,
}


def default_of(family, cell):
    """The default in a cell: one for all, or that of Nyströmformer and then those of others by name."""
    default, *others = re.split(r", (others|linear transformer) ", cell)
    for name, other in zip(others[::2], others[1::2], strict=True):
        if family == "LinearTransformer" or (name == "others" and family == "Linformer"):
            default = other
    return default


@pytest.mark.parametrize("family", FAMILIES)
def test_the_option_tables_hold_every_field_and_its_default(family):
    described = {}
    for names, defaults, _ in table_rows("field"):
        names = re.findall(r"`(\w+)`", names)
        if len(names) == 1:
            defaults = default_of(family, defaults)
        described |= dict(zip(names, defaults.split(", "), strict=True))
    config = FAMILIES[family]()
    own = {item.name for item in dataclasses.fields(config)} - {
        item.name for item in dataclasses.fields(PreTrainedConfig)
    }
    # What tells an encoder from a decoder is fixed; token ids are fields of every configuration.
    for name in own - {"is_decoder", "add_cross_attention"} | {"pad_token_id", "bos_token_id", "eos_token_id"}:
        assert ast.literal_eval(described[name].strip("`")) == getattr(config, name), name
    known = set().union(*(config_class().to_dict() for config_class in FAMILIES.values()))
    assert described.keys() <= known


def test_the_table_of_capabilities_is_that_of_the_command():
    rows = table_rows("")
    assert [row[0] for row in rows] == list(capabilities.CHECKS)
    head = next(line for line in README.splitlines() if capabilities.OurNystromformer.title in line)
    titles = [cell.strip() for cell in head.strip("|").split("|")][1:]
    assert titles == [contender.title for contender in capabilities.CONTENDERS]
    # Ours are measured anew by tests/benchmarks/test_capabilities.py.
    for row in rows:
        assert set(row[1:4]) <= {"yes", "–"}, row[0]


def test_contributing_names_every_source_file_and_folder():
    sources = [path for folder in ("src", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 20
    missing = {path.name for path in sources if not re.search(rf"(?<![\w.]){re.escape(path.name)}", CONTRIBUTING)}
    files = [
        path
        for folder in ("src", "examples", "benchmarks", "configs", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not re.search(r"__pycache__|\.egg-info", str(path.relative_to(ROOT)))
    ]
    missing |= {f"{path.parent.name}/" for path in files if f"{path.parent.name}/" not in CONTRIBUTING}
    assert not missing


def rooms():
    """The files of models/, room by room, as CONTRIBUTING.md draws them."""
    drawn = CONTRIBUTING.split("## The house")[1].split("A call goes down once")[0]
    return [line.split() for line in drawn.splitlines() if line.startswith(" " * 8)]


def test_files_of_models_know_only_rooms_above_their_own():
    folder = ROOT / "src/nystrom_models/models"
    order = [name for room in rooms() for name in room]
    assert set(order) == {path.stem for path in folder.glob("*.py")} - {"__init__"} and len(order) == len(set(order))
    for place, name in enumerate(order):
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        known = set(re.findall(r"^from \.(\w+) import", text, re.MULTILINE))
        assert known <= set(order[:place]), (name, known - set(order[:place]))
        assert not re.search(r"^\s*(from \.\.|from \. import|(from|import) nystrom_models)", text, re.MULTILINE), name
        assert len(text.splitlines()) <= 500, name


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"])
def test_links_between_the_documents_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif not target.startswith("https://"):
            assert ((ROOT / name).parent / target).exists(), target
