# SPDX-License-Identifier: Apache-2.0
"""A corpus that every machine has: the English text in the docstrings of the installed Python packages."""

import ast
import hashlib
import inspect
import os
import random
import re
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, Value

from .caching import with_code

FEATURES = Features({name: Value("string") for name in ("text", "package", "object", "file", "split")})

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "_vendor", "vendor"})

# English prose contains some of these words; code, tables, signatures and other languages contain few.
STOPWORDS = frozenset(
    "a an and are as at be but by can do does each for from has have if in into is it its may more most no not of on"
    " one only or other same should so such than that the their then there these they this to used was we were when"
    " where which will with you your".split()
)

_ROLE = re.compile(r":[a-zA-Z:+-]+:`[~!]?([^`<]*?)\s*(?:<[^`]*>)?`|\[`~?([^`]*)`\](?:\([^)]*\))?")
_WORD = re.compile(r"[A-Za-z][A-Za-z']*")
_ENTRY = re.compile(
    r"^\s*[\w*.,` \[\]]+ ?: \S|^\s*[-*+] |^\s*\d+[.)] |^\s*[\w*`]+(?: \([^()]*(?:\([^()]*\)[^()]*)*\))?:"
)
_CODE = re.compile(r"^\s*(?:>>>|#|\.\.\.|\.\. |\$ |In \[|[|+=~^-]{2,}|:\w+(?: \w+)*:|@|```)")


def source_files(max_bytes_per_package: int = 8_000_000, seed: int = 0) -> list[tuple[str, str, str, int]]:
    """A seeded sample of the installed source files, found by listing folders.

    Args:
        max_bytes_per_package: upper bound of source read from one package, so that large packages do not dominate.
        seed: of the sample within each package.

    Returns:
        (absolute path, path relative to the import root, package, size in bytes), ordered by package. The standard
        library counts as one package, `"stdlib"`.
    """
    paths = sysconfig.get_paths()
    roots = {os.path.realpath(paths[key]) for key in ("stdlib", "purelib", "platlib")}
    stdlib = os.path.realpath(paths["stdlib"])
    by_package: dict[str, list[tuple[str, str, str, int]]] = defaultdict(list)
    for root in sorted(roots):
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
            for name in sorted(names):
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    relative = os.path.relpath(path, root)
                    package = "stdlib" if root == stdlib else relative.split(os.sep)[0].removesuffix(".py")
                    by_package[package].append((path, Path(relative).as_posix(), package, os.path.getsize(path)))
    chosen = []
    for package in sorted(by_package):
        files = by_package[package]
        random.Random(f"{seed}:{package}").shuffle(files)
        budget = max_bytes_per_package
        for file in files:
            if file[3] <= budget:
                budget -= file[3]
                chosen.append(file)
    return chosen


def _blocks(docstring: str) -> Iterator[str]:
    """Paragraphs and list entries of a docstring, each in one line."""
    block: list[str] = []
    previous_indent = 0
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        indent = len(line) - len(line.lstrip())
        starts = (
            not line.strip()
            or indent < previous_indent
            or bool(_ENTRY.match(line) or _CODE.match(line))
            or (indent > previous_indent and bool(block) and (block[-1][-1] in ".:" or " : " in block[-1]))
        )
        if starts and block:
            yield " ".join(block)
            block = []
        if line.strip():
            block.append(line.strip())
            previous_indent = indent


def english_text(docstring: str) -> str:
    """The prose of a docstring, one paragraph or list entry per line, without code, tables, headings and markup."""
    lines = []
    for block in _blocks(docstring):
        if _CODE.match(block):
            continue
        block = _ROLE.sub(lambda match: match[1] or match[2] or "", block)
        block = re.sub(r"[`*]+|\|[\w ]+\|_?", "", block)
        block = re.sub(r"\s+", " ", block).strip(" -_+")
        words = [word.lower() for word in _WORD.findall(block)]
        if len(words) < 4 or not block.isascii():
            continue
        letters = sum(len(word) for word in words) + block.count(" ")
        if letters >= 0.85 * len(block) and sum(word in STOPWORDS for word in words) >= 0.2 * len(words):
            lines.append(block)
    return "\n".join(lines)


def iter_docstrings(
    files: Sequence[tuple[str, str, str, int]], heldout_fraction: float = 0.1, min_words: int = 8
) -> Iterator[dict[str, str]]:
    """English docstrings of `files` (see [`source_files`]), which are parsed but never imported.

    Whole files are held out, chosen by a hash of their paths: objects often share text with others in their file.
    """
    for path, relative, package, _ in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in the sources of other packages
                tree = ast.parse(Path(path).read_bytes())
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        digest = int(hashlib.sha256(relative.encode()).hexdigest(), 16)
        split = "validation" if digest % 10_000 < heldout_fraction * 10_000 else "train"
        module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        stack: list[tuple[ast.AST, str]] = [(tree, module)]
        while stack:
            node, name = stack.pop()
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = english_text(ast.get_docstring(node, clean=False) or "")
                if len(text.split()) >= min_words:
                    yield {"text": text, "package": package, "object": name, "file": relative, "split": split}
            # Not of functions inside functions, which rarely have docstrings.
            if isinstance(node, ast.Module | ast.ClassDef | ast.If | ast.Try):
                for child in ast.iter_child_nodes(node):
                    child_name = getattr(child, "name", None)
                    stack.append((child, f"{name}.{child_name}" if isinstance(child_name, str) else name))


def deduplicate(
    rows: Iterable[Mapping[str, Any]], ngram: int = 5, max_seen: float = 0.5, min_words: int = 8
) -> Iterator[dict[str, Any]]:
    """Drops each line of `text` if more than `max_seen` of its word `ngram`s have occurred before.

    Documentation repeats text (inherited and generated docstrings, the same paragraph in many functions), and a
    held-out text that was also trained on measures memorization. Rows with fewer than `min_words` remaining words are
    dropped.
    """
    seen: set[int] = set()
    for row in rows:
        kept, new = [], []
        for line in row["text"].split("\n"):
            words = re.findall(r"[a-z]+", line.lower())
            grams = [hash(tuple(words[i : i + ngram])) for i in range(max(1, len(words) - ngram + 1))]
            if sum(gram in seen for gram in grams) <= max_seen * len(grams):
                kept.append(line)
            new += grams
        seen.update(new)
        text = "\n".join(kept)
        if len(text.split()) >= min_words:
            yield {**row, "text": text}


def load_docstrings(
    max_bytes_per_package: int = 8_000_000,
    heldout_fraction: float = 0.1,
    seed: int = 0,
    num_proc: int | None = None,
    cache_dir: str | os.PathLike | None = None,
    packages: Sequence[str] | None = None,
) -> DatasetDict:
    """The docstrings of the installed packages as a data set.

    Args:
        max_bytes_per_package: upper bound of the source read from one package. A sample is enough, and fast.
        heldout_fraction: share of the source files in `"validation"`.
        seed: of the sample of files and of the order of the training documents.
        num_proc: number of processes that parse.
        cache_dir: where `datasets` stores its files; its default if None.
        packages: names of the packages to read (`"stdlib"` for the standard library); all if not given.

    Returns:
        `"train"` and `"validation"` with string columns `text` (one paragraph or list entry a line), `package`,
        `object` (qualified name) and `file`. No file is in both, and no line of validation repeats one of train.
    """
    if not 0 < heldout_fraction < 1:
        raise ValueError(f"heldout_fraction must lie between 0 and 1, for example 0.1, but is {heldout_fraction}.")
    files = source_files(max_bytes_per_package, seed)
    if packages is not None:
        missing = set(packages) - {package for _, _, package, _ in files}
        if missing:
            raise ValueError(f"packages has {sorted(missing)}, of which no Python source is installed.")
        files = [file for file in files if file[2] in set(packages)]
    random.Random(seed).shuffle(files)  # about the same work for each process
    cache = {"cache_dir": None if cache_dir is None else os.fspath(cache_dir), "features": FEATURES}
    raw = Dataset.from_generator(
        with_code(iter_docstrings),
        gen_kwargs={"files": files, "heldout_fraction": heldout_fraction},
        num_proc=num_proc,
        **cache,
    )
    # Training documents first, so that the held-out documents that repeat them are the ones to be dropped.
    order = np.random.default_rng(seed).permutation(len(raw))
    heldout = np.asarray(raw["split"])[order] == "validation"
    raw = raw.select(np.concatenate([order[~heldout], order[heldout]]))
    unique = Dataset.from_generator(with_code(deduplicate), gen_kwargs={"rows": raw}, **cache)
    num_train = sum(split == "train" for split in unique["split"])
    unique = unique.remove_columns("split")
    return DatasetDict(train=unique.select(range(num_train)), validation=unique.select(range(num_train, len(unique))))
