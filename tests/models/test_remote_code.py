# SPDX-License-Identifier: Apache-2.0
"""A saved checkpoint contains its code: it runs without the package, with trust_remote_code=True."""

import json
import os
import subprocess

import torch
from transformers import AutoModel

import nystrom_models
from tests.models.options import make_model, relative_error

LOAD = """
import importlib.util, json, pickle, sys
import torch, transformers
assert importlib.util.find_spec("nystrom_models") is None, "the package must not be installed here"
results = {}
for folder, auto in json.loads(sys.argv[1]):
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    inputs = torch.load(folder + "/inputs.pt")
    with torch.no_grad():
        torch.save(model(**inputs)[0], folder + "/" + auto + ".pt")
    model.save_pretrained(folder + "/again")
    assert type(pickle.loads(pickle.dumps(model))) is type(model)
    if auto == "AutoModelForCausalLM":
        # By this, Trainer knows that labels are to be shifted before their smoothing.
        names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        assert model._get_name() in names.values()
"""


def run(python, script, argument, home):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HOME": str(home), "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [python, "-c", script, argument], env=environment, cwd=home, capture_output=True, text=True, timeout=300
    )


def test_same_logits_without_the_package(clean_python, tmp_path):
    saved = {
        "nystromformer-landmarks": ("ForMaskedLM", "AutoModelForMaskedLM"),
        "linformer-none": ("ForPreTraining", "AutoModelForPreTraining"),
        "nystromformer-softmax": ("ForSequenceClassification", "AutoModelForSequenceClassification"),
        "linformer-max_pool": ("Model", "AutoModel"),
        "linear-causal": ("ForCausalLM", "AutoModelForCausalLM"),
    }
    inputs = {"input_ids": torch.randint(3, 99, (2, 40)), "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    inputs["attention_mask"][0, :7] = 0
    expected = {}
    for option, (head, _) in saved.items():
        model = make_model(option, head)
        model.save_pretrained(tmp_path / option)
        torch.save(inputs, tmp_path / option / "inputs.pt")
        with torch.no_grad():
            expected[option] = model(**inputs)[0]
    jobs = [(str(tmp_path / option), auto) for option, (_, auto) in saved.items()]
    # A checkpoint with one head loads as another, as with the package.
    jobs.append((str(tmp_path / "linformer-none"), "AutoModelForTokenClassification"))
    result = run(clean_python, LOAD, json.dumps(jobs), tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    for option, (_, auto) in saved.items():
        assert relative_error(torch.load(tmp_path / option / f"{auto}.pt"), expected[option]) < 1e-6, option
        # Saved again without the package, it still contains the code.
        files, again = (
            {path.name for path in folder.glob("*.py")} for folder in (tmp_path / option, tmp_path / option / "again")
        )
        assert again == files, option


def test_the_installed_package_is_preferred(tmp_path):
    make_model("linformer-layerwise").save_pretrained(tmp_path)
    loaded = nystrom_models.LinformerModel.from_pretrained(tmp_path)
    for trust in (None, False, True):
        assert type(AutoModel.from_pretrained(tmp_path, trust_remote_code=trust)) is type(loaded)


def test_the_code_travels_whole_and_alone(tmp_path):
    """The files of a checkpoint are those that its code imports; none imports from outside the folder."""
    for option, own in (("nystromformer-landmarks", "nystrom"), ("linformer-layerwise", "linformer")):
        make_model(option, "ForMaskedLM").save_pretrained(tmp_path / option)
        names = {path.stem for path in (tmp_path / option).glob("*.py")}
        assert {"layers", "batch", "modeling_base", "configuration_base", f"attention_{own}"} <= names
        for path in (tmp_path / option).glob("*.py"):
            text = path.read_text()
            assert "nystrom_models" not in "".join(
                line for line in text.splitlines() if line.startswith(("import ", "from "))
            ), path
