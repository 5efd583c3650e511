# SPDX-License-Identifier: Apache-2.0
"""Pages that are generated from other files when the documentation is built, and links to them.

MkDocs calls the functions whose names begin with `on_` (mkdocs.yml names this file under `hooks`):

- results/ from benchmarks/results/, model-cards/ from model_cards/, recipes.md from configs/recipes/;
- reference/ from the `__all__` of the packages: a public name cannot be left out;
- changelog.md, contributing.md and security.md from the files of these names;
- a paragraph that is only a link to a Python file, such as [`segment_sizes`](../src/.../attention_nystrom.py),
  becomes the code of that function, class or `module` (its docstring); `name:first..last` gives the lines from the
  first that contains one text to the next that contains another.

Links in the pages are those of the repository, so that the pages can be read there, too.
"""

import ast
import functools
import importlib
import inspect
import json
import posixpath
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "nystrom_models"
# Files of the repository that become pages, and their names in the documentation.
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
FAMILIES = {"nystromformer": "Nyströmformer", "linformer": "Linformer", "linear_transformer": "Linear transformer"}
# Packages whose public names are documented, with the titles of their pages.
PUBLIC = {
    "nystrom_models": "Configurations and models",
    "nystrom_models.data": "Data",
    "nystrom_models.training": "Training",
    "nystrom_models.conversion": "Conversion",
    "nystrom_models.analysis": "Analysis",
    "nystrom_models.deployment": "Deployment",
    "nystrom_models.kernels": "Triton kernels",
}
# Modules that all families share, which are described once, and functions that are used separately.
SHARED = {
    "Base classes": {
        "models.configuration_base": ["BaseConfig"],
        "models.modeling_base": ["BasePreTrainedModel", "BaseModel", "BaseModelOutput"],
        "models.pretraining_heads": ["BaseForMaskedLM", "BaseForPreTraining"],
        "models.causal_head": ["BaseForCausalLM"],
        "models.task_heads": [
            "BaseForSequenceClassification",
            "BaseForTokenClassification",
            "BaseForQuestionAnswering",
            "BaseForMultipleChoice",
        ],
    },
    "Attention functions": {
        "models.attention_nystrom": [
            "nystrom_attention",
            "nystrom_attention_reference",
            "nystrom_attention_map",
            "iterative_pinv",
        ],
        "models.attention_linformer": [
            "linformer_attention",
            "linformer_attention_reference",
            "linformer_attention_map",
        ],
        "models.attention_linear": [
            "linear_attention",
            "linear_attention_reference",
            "causal_linear_attention",
            "causal_linear_attention_reference",
            "recurrent_linear_attention",
            "linear_attention_map",
        ],
    },
}


# ---- pages ----


def slug(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


@functools.cache
def public_names(package: str) -> tuple[str, list[str]]:
    """A package's docstring, and the names in its `__all__`; none if there is no such package."""
    path = PACKAGE.parent.joinpath(*package.split("."), "__init__.py")
    if not path.is_file():
        return "", []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.get_docstring(tree) or "", list(ast.literal_eval(node.value))
    return "", []


def reference_pages() -> dict[str, str]:
    """Text by file; the directives that begin with `:::` are for mkdocstrings."""
    pages = {}
    for package, title in PUBLIC.items():
        docstring, names = public_names(package)
        if names:
            lines = [f"# {title}", f"What `{package}` offers. {docstring}"]
            lines += [f"::: {package}.{name}" for name in names]
            pages[f"reference/{slug(title)}.md"] = "\n\n".join(lines) + "\n"
    for title, modules in SHARED.items():
        lines = [f"# {title}"]
        for module, names in modules.items():
            lines += [f"::: nystrom_models.{module}.{name}" for name in names]
        pages[f"reference/{slug(title)}.md"] = "\n\n".join(lines) + "\n"
    return pages


def model_card_pages() -> dict[str, str]:
    """Text by file, without the metadata for the Hub."""
    pages = {}
    for family in FAMILIES:
        for path in sorted((ROOT / "model_cards" / family).glob("*.md")):
            text = path.read_text(encoding="utf-8")
            pages[f"model_cards/{family}/{path.name}"] = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.S | re.M)
    return pages


def result_title(path: Path) -> str:
    """The title of a file such as 2026-11-21-cpu-attention.json: "cpu attention, 2026-11-21"."""
    return f"{path.stem[11:].replace('-', ' ')}, {path.stem[:10]}"


def result_page(path: Path) -> str:
    """One file of benchmarks/results as text, as the benchmarks print it."""
    heading = f"# {result_title(path)}\n\nFile: `{path.relative_to(ROOT).as_posix()}`\n\n"
    if path.suffix == ".md":
        return heading + path.read_text(encoding="utf-8")
    results = json.loads(path.read_text(encoding="utf-8"))
    if "command" in results:
        heading += f"    {results['command']}\n\n"
    elif "commands" in results:
        heading += f"Commands: {results['commands']}\n\n"
    picture = path.with_suffix(".png")
    if picture.is_file():
        heading += f"![{result_title(path)}]({picture.name})\n\n"
    if isinstance(results["results"], list):
        return heading + printed_tables(results)
    if "decode" in results["results"]:
        return heading + fenced(printed_decoding(results))
    return heading + fenced(json.dumps(results, indent=1, ensure_ascii=False), "json")


def printed_tables(results: dict[str, Any]) -> str:
    return report().table(results)


def printed_decoding(results: dict[str, Any]) -> str:
    tables = [report().decoding_table(what, rows) for what, rows in results["results"].items()]
    return "\n\n".join([report().describe_machine(results), *tables])


def report() -> Any:
    """benchmarks/report.py, which prints result files. (All of benchmarks/ would take seconds to import.)"""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module("benchmarks.report")


def fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```\n"


def recipes_page() -> str:
    """All recipes, each a file of flags."""
    parts = ["# Recipes", "Files of flags for the example scripts, one for each experiment: `--recipe FILE`."]
    for path in sorted((ROOT / "configs" / "recipes").glob("*.args")):
        parts += [f"## {path.stem}", fenced(path.read_text(encoding="utf-8").rstrip(), "bash")]
    return "\n\n".join(parts) + "\n"


def generated() -> dict[str, str]:
    """Every page that is generated from other files: its text by its path in the documentation."""
    pages = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in PAGES.items()}
    pages |= reference_pages() | model_card_pages()
    pages["recipes.md"] = recipes_page()
    for path in result_files():
        pages[f"results/{path.stem}.md"] = result_page(path)
    return pages


def result_files() -> list[Path]:
    """The result files of runs, the newest first."""
    found = [path for kind in ("json", "md") for path in (ROOT / "benchmarks" / "results").glob(f"*.{kind}")]
    return sorted(found, key=lambda path: (path.stem[:10], path.stem), reverse=True)


# ---- links ----


def places() -> dict[str, str]:
    """The page or picture of the documentation, by the file or folder of the repository that it is made from."""
    found = {f"docs/{path.relative_to(ROOT / 'docs')}": str(path.relative_to(ROOT / "docs")) for path in doc_files()}
    found |= PAGES
    found |= {page: page for page in model_card_pages()}
    found |= {f"benchmarks/results/{path.name}": f"results/{path.stem}.md" for path in result_files()}
    pictures = (ROOT / "benchmarks" / "results").glob("*.png")
    found |= {f"benchmarks/results/{path.name}": f"results/{path.name}" for path in pictures}
    found |= {"model_cards": "model-cards.md", "benchmarks/results": "results.md", "configs/recipes": "recipes.md"}
    found |= {"benchmarks/README.md": "benchmarks.md", "README.md": "index.md"}
    return {origin: page.replace("\\", "/") for origin, page in found.items()}


def doc_files() -> list[Path]:
    return [path for path in (ROOT / "docs").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]


def redirected(markdown: str, page: str, known: dict[str, str]) -> str:
    """Replaces the links of a page by those of the documentation; a link without a page there becomes its text."""
    origins = {place: origin for origin, place in reversed(known.items())}
    folder = posixpath.dirname(origins.get(page, f"docs/{page}"))

    def replace(match: re.Match) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        origin = posixpath.normpath(posixpath.join(folder, target))
        if origin in known:
            return f"{text}({posixpath.relpath(known[origin], posixpath.dirname(page) or '.')}{anchor})"
        if (ROOT / origin).exists() and not text.startswith("!"):
            return text.strip("[]") if text.startswith("[`") else text[1:-1]
        return match[0]

    # Code is not changed.
    parts = re.split(r"(^```.*?^```$|^(?: {4}.*\n)+|`[^`\n]+`(?!\]))", markdown, flags=re.MULTILINE | re.DOTALL)
    link = re.compile(r"(!?\[[^\]]*\])\(([^)#\s]+)(#[^)\s]*)?\)")
    return "".join(part if number % 2 else link.sub(replace, part) for number, part in enumerate(parts))


# ---- code next to text ----


def code_of(path: Path, name: str) -> str:
    """The source of a function or class without its docstring; of `module`, the docstring; or a range of lines.

    Raises:
        PluginError: if there is no such name or line.
    """
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if name == "module":
        return ast.get_docstring(tree) or ""
    name, _, wanted = name.partition(":")
    node = next((node for node in tree.body if getattr(node, "name", None) == name), None)
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        raise PluginError(f"{path}: there is no function or class {name}.")
    lines = text.splitlines()
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    body = list(range(first, node.end_lineno or node.lineno))
    docstring = node.body[0]
    if ast.get_docstring(node) is not None:
        body = [line for line in body if not docstring.lineno - 1 <= line < (docstring.end_lineno or 0)]
    chosen = [lines[line] for line in body]
    if wanted:
        start, _, stop = wanted.partition("..")
        begin = next((i for i, line in enumerate(chosen) if start in line), None)
        end = next((i for i, line in enumerate(chosen) if begin is not None and i >= begin and stop in line), None)
        if begin is None or end is None:
            raise PluginError(f"{path}: {name} has no lines from {start!r} to {stop!r}.")
        chosen = chosen[begin : end + 1]
    return inspect.cleandoc("\n" + textwrap.dedent("\n".join(chosen)))


def with_code(markdown: str) -> str:
    """Replaces paragraphs that are links to Python files by the code that they name."""

    def replace(match: re.Match) -> str:
        name, target = match[1], match[2]
        path = (ROOT / "docs" / target).resolve()
        title = f"{path.relative_to(PACKAGE).as_posix()}: {name.partition(':')[0]}"
        if name == "module":
            return code_of(path, name)
        return f'```python title="{title}"\n{code_of(path, name)}\n```'

    return re.sub(r"^\[`([^`]+)`\]\((\.\./src/[^)]+\.py)\)$", replace, markdown, flags=re.MULTILINE)


# ---- called by MkDocs ----


def section(config: MkDocsConfig, title: str) -> list[Any]:
    """The part of the navigation with this title."""
    return next(part[title] for part in config["nav"] if title in part)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the generated pages to the navigation."""
    results = [{result_title(path): f"results/{path.stem}.md"} for path in result_files()]
    section(config, "Results").append({"Result files": results})
    section(config, "Reference").append({"Recipes": "recipes.md"})
    pages = [{text.split("\n")[0][2:]: page} for page, text in reference_pages().items()]
    section(config, "Reference").append({"Python": pages})
    cards = model_card_pages()
    for family, title in FAMILIES.items():
        chosen = [{Path(page).stem: page} for page in cards if page.split("/")[1] == family]
        section(config, "Model cards").append({title: chosen})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages, and the pictures of the results."""
    for page, text in generated().items():
        files.append(File.generated(config, page, content=text))
    for path in (ROOT / "benchmarks" / "results").glob("*.png"):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


@functools.cache
def known_places() -> dict[str, str]:
    return places()


@functools.cache
def identifiers() -> dict[str, str]:
    """The place where a public name is documented, by the name without its module."""
    found = {name: f"{package}.{name}" for package in PUBLIC for name in public_names(package)[1]}
    return found | {
        name: f"nystrom_models.{module}.{name}"
        for modules in SHARED.values()
        for module, names in modules.items()
        for name in names
    }


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Names that docstrings write as [`name`] become links, if they are public."""

    def replace(match: re.Match) -> str:
        code = f"<code>{match[1]}</code>"
        identifier = identifiers().get(match[1])
        return code if identifier is None else f'<autoref optional identifier="{identifier}">{code}</autoref>'

    html = re.sub(r"\[<code>(\w+)</code>\](?!\()", replace, html)
    # Types that Transformers' docstrings write as (`int`, defaults to 1).
    return re.sub(r"<code>(`[^<]*)</code>", lambda match: f"<code>{match[1].replace('`', '')}</code>", html)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inserts code, and makes links lead to pages."""
    return redirected(with_code(markdown), page.file.src_uri, known_places())
