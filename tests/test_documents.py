# SPDX-License-Identifier: Apache-2.0
"""The documentation is correct: its Python runs, its commands parse, names and tables agree with the code."""

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import re
import runpy
import shlex
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from transformers import HfArgumentParser, PreTrainedConfig

import nystrom_models
from benchmarks import capabilities
from benchmarks.cli import build_parser
from nystrom_models.data import causal_tokenizer, train_tokenizer
from tests.models import apart
from tests.packaging.floors import project

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# The documents for users: the README, and a page for each task.
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
OTHERS = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
SENTENCES = (
    "Return a list of the names of all columns. Raise an error if the file does not exist. Open the file. Read every "
    "line. Close the file at the end."
)


def blocks(language):
    """Code blocks of all pages, with page and line."""
    for page, text in PAGES.items():
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            heading = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)[-1]
            name = page.removeprefix("docs/").removesuffix(".md")
            yield pytest.param(match[1], page, line, id=f"{name}-{re.sub(r'[^a-zA-Z]+', '_', heading)}")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder as after the quickstart, with smaller models that were not trained."""
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
        for name, head in (("pretrained", "ForPreTraining"), ("classifier", "ForSequenceClassification")):
            checkpoint = folder / "outputs" / "quickstart" / family.lower() / name
            getattr(nystrom_models, family + head)(config).save_pretrained(checkpoint)
            tokenizer.save_pretrained(checkpoint)
    causal = {"num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128, "is_decoder": True}
    checkpoint = folder / "outputs" / "quickstart" / "causal" / "trained"
    tokenizer = causal_tokenizer(tokenizer)
    config = nystrom_models.LinearTransformerConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, **causal
    )
    nystrom_models.LinearTransformerForCausalLM(config).save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    return folder


@pytest.mark.parametrize(("code", "page", "line"), list(blocks("python")))
def test_python_of_the_pages_runs(code, page, line, quickstart, monkeypatch):
    monkeypatch.chdir(quickstart)
    if "BitsAndBytesConfig" in code:
        apart.run(code, quickstart)
        return
    # The default back end needs a C++ compiler, which not every machine has.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    # After empty lines, so that a traceback has the line number of the page.
    exec(compile("\n" * line + code, page, "exec"), {"__name__": "__main__"})


class ParsedError(Exception):
    """The command line was accepted; nothing is run."""


def stop_after(function):
    @functools.wraps(function)
    def parse(*args, **kwargs):
        function(*args, **kwargs)
        raise ParsedError

    return parse


def without_launcher(words):
    """The command that `torchrun` or `accelerate launch` starts, as a Python command."""
    if words[0] == "torchrun" or words[:2] == ["accelerate", "launch"]:
        if "--config_file" in words:
            assert (ROOT / words[words.index("--config_file") + 1]).is_file()
        script = next(number for number, word in enumerate(words) if word.endswith(".py"))
        return ["python", *words[script:]]
    return ["python" if words[0].endswith("bin/python") else words[0], *words[1:]]


def check_command(words):
    """Fails, or raises SystemExit, for an invalid command. Scripts are run only until their flags are parsed."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif words[:2] == ["pip", "install"]:
        extras = set(re.findall(r"\w+", " ".join(re.findall(r"\.\[(.*?)\]", " ".join(words)))))
        assert extras <= set(project()["optional-dependencies"])
    elif words[:3] == ["python", "-m", "benchmarks"]:
        build_parser().parse_args(words[3:])
    elif words[0] == "python" and words[1].startswith("examples/"):
        with pytest.raises(ParsedError):
            runpy.run_path(words[1])["main"](words[2:])
    elif words[0] in project().get("scripts", {}):
        main = EntryPoint(words[0], project()["scripts"][words[0]], "console_scripts").load()
        with pytest.raises(ParsedError):
            main(words[1:])
    else:
        pytest.fail(f"no check is known for: {shlex.join(words)}")


@pytest.mark.parametrize(("code", "page", "line"), list(blocks("bash")))
def test_commands_of_the_pages_are_taken(code, page, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        HfArgumentParser, "parse_args_into_dataclasses", stop_after(HfArgumentParser.parse_args_into_dataclasses)
    )
    commands = [shlex.split(command, comments=True) for command in code.replace("\\\n", " ").splitlines()]
    commands = [without_launcher(words) for words in commands if words and words[0] != "git"]
    for words in commands:
        with monkeypatch.context() as patches:
            if words[0] != "python" or words[1] != "-m":
                patches.setattr(argparse.ArgumentParser, "parse_args", stop_after(argparse.ArgumentParser.parse_args))
            check_command(words)


@pytest.mark.parametrize(
    "command",
    [
        "make quickstrat",
        "pip install '.[trian]'",
        "python -m benchmarks run --model encoder --length 512 --contender ours --opp x",
        "python examples/run_glue.py --output_dir x --task mrpcc --model_name_or_path x",
        "python examples/run_pretraining.py --recipe configs/recipes/none.args --output_dir x",
        "rm -rf outputs",
    ],
)
def test_a_wrong_command_is_noticed(command, monkeypatch):
    with pytest.raises((AssertionError, SystemExit, ValueError, OSError, pytest.fail.Exception)):
        test_commands_of_the_pages_are_taken(command, "page", 1, monkeypatch)


def test_the_readme_is_short_and_names_both_commands():
    assert len(README.splitlines()) <= 150
    for command in ("make quickstart", "make test"):
        assert f"    {command}\n" in README


def test_every_page_opens_with_what_one_gets_and_ends_with_what_can_go_wrong():
    without = {"changelog", "tasks", "results", "reference", "model-cards", "limits"}
    for page, text in PAGES.items():
        title, _, opening = re.sub(r"\A---\n.*?\n---\n\n", "", text, flags=re.DOTALL).partition("\n\n")
        if page.startswith("docs/"):
            assert title.startswith("# ") and not opening.startswith(("#", "```", "|", "- ")), page
            if Path(page).stem not in without:
                assert re.findall(r"^## (.*)$", text, re.MULTILINE)[-1] == "What can go wrong", page


def test_every_task_is_two_clicks_from_the_readme_and_the_first_page():
    tasks = set(re.findall(r"\]\(([\w-]+\.md)\)", PAGES["docs/tasks.md"]))
    assert len(tasks) >= 13
    for page, prefix in (("README.md", "docs/"), ("docs/index.md", "")):
        assert tasks - {"options.md", "training-scripts.md"} <= {
            target.removeprefix(prefix) for target in re.findall(r"\]\(([\w/-]+\.md)\)", PAGES[page])
        }, page


PUBLIC = sorted(
    ".".join(path.relative_to(ROOT / "src").parts[:-1])
    for path in (ROOT / "src/nystrom_models").rglob("__init__.py")
    if "__all__" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_documented(package):
    module = importlib.import_module(package)
    undocumented = []
    for name in module.__all__:
        member = getattr(module, name)
        if not callable(member):
            continue  # a constant, which is described in its module
        undocumented += [] if own_doc(member) else [name]
        if inspect.isclass(member):
            for key, attribute in vars(member).items():
                function = attribute.fget if isinstance(attribute, property) else attribute
                if not key.startswith("_") and inspect.isfunction(function):
                    inherited = inspect.getdoc(attribute)
                    undocumented += [] if inherited else [f"{name}.{key}"]
    assert not undocumented


def own_doc(member):
    """The object's own docstring, not the generated one of a dataclass, nor that of a base class."""
    text = vars(member).get("__doc__") if inspect.isclass(member) else member.__doc__
    return text and not text.startswith(f"{member.__name__}(")


def table_rows(text, first_cell):
    """The rows of a page's Markdown tables, as lists of cells, by the first cell of their header."""
    lines = text.splitlines()
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
    """The default in a cell: one for all, and perhaps that of a family by its name."""
    default, *others = cell.split("; ")
    names = {"Nyströmformer": "Nystromformer", "linear transformer": "LinearTransformer"}
    of_family = {names[name]: value for name, value in (other.split(": ") for other in others)}
    return of_family.get(family, default)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_option_tables_hold_every_field_and_its_default(family):
    described = {}
    for names, defaults, _ in table_rows(PAGES["docs/options.md"], "field"):
        names = re.findall(r"`(\w+)`", names)
        if len(names) == 1:
            defaults = default_of(family, defaults)
        described |= dict(zip(names, defaults.split(", "), strict=True))
    config = FAMILIES[family]()
    own = {item.name for item in dataclasses.fields(config)} - {
        item.name for item in dataclasses.fields(PreTrainedConfig)
    }
    # Fields that distinguish encoders from decoders are fixed; token ids are fields of every configuration.
    for name in own - {"is_decoder", "add_cross_attention"} | {"pad_token_id", "bos_token_id", "eos_token_id"}:
        assert ast.literal_eval(described[name].strip("`")) == getattr(config, name), name
    known = set().union(*(config_class().to_dict() for config_class in FAMILIES.values()))
    assert described.keys() <= known


def test_the_table_of_capabilities_is_that_of_the_command():
    text = PAGES["docs/capabilities.md"]
    rows = table_rows(text, "")
    assert [row[0] for row in rows] == list(capabilities.CHECKS)
    head = next(line for line in text.splitlines() if capabilities.OurNystromformer.title in line)
    titles = [cell.strip() for cell in head.strip("|").split("|")][1:]
    assert titles == [contender.title for contender in capabilities.CONTENDERS]
    # Ours are tested by tests/benchmarks/test_capabilities.py.
    for row in rows:
        assert set(row[1:4]) <= {"yes", "–"}, row[0]


def test_the_readme_has_an_excerpt_of_the_table_of_capabilities():
    whole = {
        row[0]: [cell.split(" [")[0] for cell in row[1:]] for row in table_rows(PAGES["docs/capabilities.md"], "")
    }
    excerpt = [row for row in table_rows(README, "") if row[0] in whole]
    assert len(excerpt) >= 5
    for name, *cells in excerpt:
        # The same for all of ours, and for all others except `linformer`, which takes no mask.
        assert cells == [*set(whole[name][:3]), *whole[name][3:6], whole[name][7]], name


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


def groups():
    """The files of models/, group by group, as listed in CONTRIBUTING.md."""
    drawn = CONTRIBUTING.split("## Imports between files")[1].split("A call goes down once")[0]
    return [line.split() for line in drawn.splitlines() if line.startswith(" " * 8)]


def test_files_of_models_import_only_files_listed_above():
    folder = ROOT / "src/nystrom_models/models"
    order = [name for group in groups() for name in group]
    assert set(order) == {path.stem for path in folder.glob("*.py")} - {"__init__"} and len(order) == len(set(order))
    for place, name in enumerate(order):
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        known = set(re.findall(r"^from \.(\w+) import", text, re.MULTILINE))
        assert known <= set(order[:place]), (name, known - set(order[:place]))
        assert not re.search(r"^\s*(from \.\.|from \. import|(from|import) nystrom_models)", text, re.MULTILINE), name
        assert len(text.splitlines()) <= 500, name


def anchors(text):
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [*PAGES, *OTHERS])
def test_links_between_the_documents_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"(?:\]\(|srcset=\"|src=\")([^)\"\s]+)[)\"]", text):
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not target.startswith("https://"):
            assert file.exists(), target
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file.read_text(encoding="utf-8")), target
