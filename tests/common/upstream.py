# SPDX-License-Identifier: Apache-2.0
"""Transformers' own common model tests, imported from its unpacked source distribution.

The source distribution contains only the top-level files of Transformers' `tests/`. They are imported as modules of
a synthetic package, with a stand-in for each name they take from a folder that is not distributed.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import transformers

PACKAGE = "transformers_tests"
SDIST = Path(__file__).parents[2] / ".cache" / f"transformers-{transformers.__version__}"

# A value that differs from the default for each field that every configuration has.
CONFIG_COMMON_KWARGS = {
    "architectures": ["SomeModel"],
    "chunk_size_feed_forward": 5,
    "dtype": "float16",
    "id2label": {0: "first", 1: "second", 2: "third"},
    "label2id": {"first": 0, "second": 1, "third": 2},
    "name_or_path": "somewhere/some-model",
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
}


class ExportTesterMixin:
    """A stand-in: this repository has its own tests of export."""


class GenerationTesterMixin:
    """A stand-in for tests that are not in the source distribution; tests/models/test_generation.py replaces them."""


STAND_INS = {
    "exporters.test_export": {"ExportTesterMixin": ExportTesterMixin},
    "generation.test_utils": {"GenerationTesterMixin": GenerationTesterMixin},
    "utils.test_configuration_utils": {"config_common_kwargs": CONFIG_COMMON_KWARGS},
}


def _add_module(name: str, **attributes: object) -> None:
    module = ModuleType(f"{PACKAGE}.{name}" if name else PACKAGE)
    module.__dict__.update(attributes)
    sys.modules[module.__name__] = module


def load(name: str) -> ModuleType:
    """Import `tests/<name>.py` of Transformers' source distribution."""
    if not (SDIST / "tests" / f"{name}.py").is_file():
        raise FileNotFoundError(
            f"Transformers' own tests are not in {SDIST}; `make test` fetches them, or alone: "
            f"make .cache/{SDIST.name}/unpacked"
        )
    if PACKAGE not in sys.modules:
        _add_module("", __path__=[str(SDIST / "tests")])
        for path, attributes in STAND_INS.items():
            _add_module(path.split(".")[0], __path__=[])
            _add_module(path, **attributes)
    # One of them executes the `__init__.py` of the tests, which is not distributed, only to get `transformers`.
    with mock.patch("transformers.utils.direct_transformers_import", return_value=transformers):
        return importlib.import_module(f"{PACKAGE}.{name}")
