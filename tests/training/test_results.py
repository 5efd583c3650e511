# SPDX-License-Identifier: Apache-2.0
import json
import math
from dataclasses import dataclass

import pytest

import nystrom_models
from nystrom_models.training.results import read_results, write_results


@dataclass
class Arguments:
    seed: int = 3


def test_what_is_written(tmp_path):
    path = write_results(tmp_path, {"validation": {"pearson": math.nan, "loss": 0.5}}, Arguments())
    content = json.loads(path.read_text())
    # An undefined correlation: NaN is not valid JSON.
    assert content["results"] == {"validation": {"pearson": None, "loss": 0.5}}
    assert math.isnan(read_results(tmp_path)["results"]["validation"]["pearson"])
    assert content["arguments"] == {"seed": 3}
    assert content["versions"]["nystrom_models"] == nystrom_models.__version__


def test_a_failure_leaves_what_was_there(tmp_path):
    path = write_results(tmp_path, {"loss": 0.5})
    before = path.read_text()
    with pytest.raises(TypeError):
        write_results(tmp_path, {"loss": object()})
    assert path.read_text() == before and [file.name for file in tmp_path.iterdir()] == ["all_results.json"]
