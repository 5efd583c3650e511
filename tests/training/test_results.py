# SPDX-License-Identifier: Apache-2.0
import json
import math
from dataclasses import dataclass

import pytest

import nystrom_models
from nystrom_models.training.results import discard_results, read_results, write_results


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


def test_summaries_go_with_the_results_that_they_count(tmp_path):
    """Of a grid within GLUE's tasks; not that of other runs, nor a file of another program."""
    task = tmp_path / "all" / "mrpc"
    run = task / "seed=0"
    run.mkdir(parents=True)
    others = [write_results(tmp_path, {"grid": [{"runs": ["other"]}]}), tmp_path / "other" / "all_results.json"]
    others[1].parent.mkdir()
    counting = [
        write_results(run, {"validation": {"loss": 0.5}}),
        write_results(task, {"grid": [{"runs": ["seed=1"]}, {"runs": ["seed=0"]}]}),
        write_results(task.parent, {"tasks": {"mrpc": {"run": "seed=0"}}}),
    ]
    for content in ("[]", "no JSON", '{"results": 0.5}'):
        others[1].write_text(content)
        (tmp_path / "other" / "run").mkdir(exist_ok=True)
        discard_results(tmp_path / "other" / "run")
    discard_results(run)
    assert [path.exists() for path in counting] == [False] * 3 and all(path.exists() for path in others)
