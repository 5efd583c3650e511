# SPDX-License-Identifier: Apache-2.0
"""Pages of flags, made when the documentation is built: one for every example script that calls `parse_arguments`, and
one for the command `nystrom-models`.

Those of the scripts are read from the source of the dataclasses, so that nothing must be imported; those of the
command are its parser's. MkDocs calls the functions whose names begin with `on_` (mkdocs.yml names this file under
`hooks`).
"""

import argparse
import ast
import functools
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from nystrom_models.command_line.main import PROGRAM, make_parser

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
COMMAND = f"flags/{PROGRAM}.md"
SOURCES = (ROOT / "src" / "nystrom_models" / "training", EXAMPLES)


class Flag(NamedTuple):
    """default: Python source; None for a flag that must be given."""

    name: str
    kind: str
    default: str | None
    help: str


def is_flag(node: ast.stmt) -> bool:
    """Whether a statement of a class defines a field of the dataclass."""
    return isinstance(node, ast.AnnAssign) and not ast.unparse(node.annotation).startswith("ClassVar")


def flag(node: ast.AnnAssign) -> Flag:
    """The flag of a dataclass's field, which has its help in `field(metadata={"help": ...})`."""
    assert isinstance(node.target, ast.Name)
    default, text = None, ""
    if isinstance(node.value, ast.Call):
        given = {keyword.arg: keyword.value for keyword in node.value.keywords}
        default = ast.unparse(given["default"]) if "default" in given else None
        if isinstance(metadata := given.get("metadata"), ast.Dict):
            help_text = next(
                v for k, v in zip(metadata.keys, metadata.values, strict=True) if ast.unparse(k) == "'help'"
            )
            text = words(help_text)
    elif node.value is not None:
        default = ast.unparse(node.value)
    return Flag(node.target.id, ast.unparse(node.annotation), default, text)


def words(node: ast.expr) -> str:
    """A string of the source, with the expressions in braces as code."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) for part in node.values)
    return f"`{ast.unparse(node.value)}`" if isinstance(node, ast.FormattedValue) else ast.unparse(node)


@functools.cache
def dataclasses() -> dict[str, tuple[list[str], list[Flag], str]]:
    """For every class with fields, by name: its bases, its own flags and the first line of its docstring."""
    found = {}
    for folder in SOURCES:
        for path in sorted(folder.glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    fields = [flag(part) for part in node.body if is_flag(part)]
                    docstring = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
                    found[node.name] = ([ast.unparse(base) for base in node.bases], fields, docstring)
    return found


def groups(name: str) -> dict[str, list[Flag]]:
    """The flags of a class and of its bases, by the class that defines them: its own first. A flag that a class
    redefines is not repeated."""
    bases, own, _ = dataclasses()[name]
    found = {name: own}
    for base in bases:
        if base in dataclasses():
            found |= {group: flags for group, flags in groups(base).items() if group not in found}
    seen: set[str] = set()
    for group, flags in found.items():
        found[group] = [one for one in flags if one.name not in seen]
        seen |= {one.name for one in flags}
    return {group: flags for group, flags in found.items() if flags}


@functools.cache
def scripts() -> dict[str, tuple[str, list[str]]]:
    """The docstring of each script, and the names of its dataclasses."""
    found = {}
    for path in sorted(EXAMPLES.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "parse_arguments":
                assert isinstance(node.args[0], ast.Tuple)
                found[path.name] = (ast.get_docstring(tree) or "", [ast.unparse(name) for name in node.args[0].elts])
    return found


def page(script: str) -> str:
    """The text of a script's page."""
    docstring, names = scripts()[script]
    lines = [f"# {script}", f"```text\n{docstring}\n```"]
    lines.append(
        "`--recipe FILE` reads flags from a file; flags on the command line take precedence, of `--config_overrides` "
        "field by field. A flag that is `True` or `False` is switched on by its name, and off by `--no_NAME`."
    )
    for name in names:
        for group, flags in groups(name).items():
            rows = []
            for one in flags:
                default = "must be given" if one.default is None else f"`{one.default}`"
                rows.append((f"`--{one.name}`", default, one.help))
            lines += [f"## {dataclasses()[group][2].rstrip('.')}", table("flag", "default", "what it does", rows=rows)]
    return "\n\n".join(lines) + "\n"


def table(*columns: str, rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    cells = [columns, ("---",) * len(columns), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def command_page() -> str:
    """The text of the page of `nystrom-models`."""
    parser = make_parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    rows = [(f"[`{action.dest}`](#{action.dest})", str(action.help)) for action in subparsers._choices_actions]
    lines = [f"# {PROGRAM}", "The command that the package installs.", table("subcommand", "what it does", rows=rows)]
    for name, subparser in subparsers.choices.items():
        lines += [f"## {name}", f"```text\n{subparser.format_usage()}\n{subparser.description}\n```"]
        rows = []
        for action in subparser._actions:
            names = (
                ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.metavar or action.dest}`"
            )
            choices = f" ({', '.join(map(str, action.choices))})" if action.choices else ""
            rows.append((names + choices, (action.help or "") % (vars(action) | {"prog": PROGRAM})))
        lines.append(table("argument", "what it does", rows=rows))
    return "\n\n".join(lines) + "\n"


def place(script: str) -> str:
    return f"flags/{Path(script).stem}.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages to the navigation."""
    section: list[Any] = next(part["Reference"] for part in config["nav"] if "Reference" in part)
    section.append({"Flags": [{PROGRAM: COMMAND}, *({script: place(script)} for script in scripts())]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    files.append(File.generated(config, COMMAND, content=command_page()))
    for script in scripts():
        files.append(File.generated(config, place(script), content=page(script)))
    return files
