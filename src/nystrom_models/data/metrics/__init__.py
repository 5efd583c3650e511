# SPDX-License-Identifier: Apache-2.0
"""Metric modules for `evaluate` that come with the package, so that nothing is fetched."""

from pathlib import Path

import evaluate

TEXT_CLASSIFICATION = str(Path(__file__).with_name("text_classification.py"))


def load_metric(config_name: str) -> evaluate.EvaluationModule:
    """The metrics of a GLUE task by its name, or of other data by `"classification"` or `"regression"`."""
    return evaluate.load(TEXT_CLASSIFICATION, config_name, keep_in_memory=True)
