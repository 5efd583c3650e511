# SPDX-License-Identifier: Apache-2.0
"""Upload and download through the real client, with processes that share only a small Hub."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from nystrom_models.training.hub import IGNORED_OF_CHECKPOINTS, push

EXAMPLES = Path(__file__).parents[2] / "examples"

PUSH = """
import json, sys
from huggingface_hub import upload_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer
import nystrom_models
from nystrom_models.training.hub import push

masks, sentences = json.loads(sys.argv[1])
for folder, auto, repo_id in (
    (masks, AutoModelForMaskedLM, "ada/masks"),
    (sentences, AutoModelForSequenceClassification, "ada/sentences"),
):
    auto.from_pretrained(folder).push_to_hub(repo_id)
    AutoTokenizer.from_pretrained(folder).push_to_hub(repo_id)
    upload_file(repo_id=repo_id, path_or_fileobj=folder + "/README.md", path_in_repo="README.md")
# By one call, to a new repository and to the same one again.
urls = [push(sentences, "finished", private=True), push(sentences, "ada/finished")]
print(json.dumps(urls))
"""

LOAD = """
import importlib.util, json, sys
import torch, transformers
from huggingface_hub import hf_hub_download

text, repo_ids, with_package = json.loads(sys.argv[1])
assert with_package == (importlib.util.find_spec("nystrom_models") is not None)
if with_package:
    import nystrom_models
options = {} if with_package else {"trust_remote_code": True}
answers = {}
for repo_id in repo_ids:
    # The Hub knows the task from the card.
    pipe = transformers.pipeline(model=repo_id, **options)
    inputs = pipe.tokenizer(text, return_tensors="pt")
    auto = "AutoModelForMaskedLM" if pipe.task == "fill-mask" else "AutoModelForSequenceClassification"
    model = getattr(transformers, auto).from_pretrained(repo_id, **options)
    assert type(model).__module__.split(".")[0] == ("nystrom_models" if with_package else "transformers_modules")
    with torch.no_grad():
        logits = [instance(**inputs).logits for instance in (model, pipe.model)]
    assert torch.equal(*logits)
    answers[repo_id] = [logits[0].tolist(), pipe(text)]
print(json.dumps(answers))
"""

FAULTS = """
import json, sys
from huggingface_hub import hf_hub_download
from nystrom_models.training.hub import check_metadata, push

answers = []
for case in json.loads(sys.argv[1]):
    try:
        if "read" in case:
            hf_hub_download(case["read"], "config.json", token=case["token"])
        elif "license" in case:
            check_metadata(**case)
        else:
            push(**case)
        answers.append(["", ""])
    except Exception as error:
        answers.append([type(error).__name__, str(error)])
print(json.dumps(answers))
"""


RUN = """
import json, sys
sys.path.insert(0, json.loads(sys.argv[1])[0])
import run_imdb

print(json.dumps(run_imdb.main(json.loads(sys.argv[1])[1:])["validation"]))
"""


def digests(folder):
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in folder.rglob("*") if path.is_file()}


def test_pushed_then_loaded_in_another_process(hub, client, classifier, fill_mask, clean_python):
    before = digests(classifier)
    first, second = client(PUSH, str(fill_mask), str(classifier))
    assert digests(classifier) == before

    code = {"layers.py", "batch.py", "configuration_base.py", "tokenizer.json", "README.md", "config.json"}
    assert code | {"modeling_nystromformer.py"} <= hub.repositories["ada/masks"].files.keys()
    assert code | {"modeling_linformer.py"} <= hub.repositories["ada/sentences"].files.keys()
    finished = hub.repositories["ada/finished"]
    # The top-level files, without checkpoints and hidden files; the second push had no changes.
    assert finished.files.keys() - {".gitattributes"} == {path.name for path in classifier.glob("[!.]*.*")}
    assert finished.private and first == second and len(finished.commits) == 2
    assert finished.files["model.safetensors"].lfs and not finished.files["layers.py"].lfs
    assert finished.files["README.md"].content == (classifier / "README.md").read_bytes()

    text = "the rain and the old [MASK]"
    repo_ids = ["ada/masks", "ada/sentences", "ada/finished"]
    with_package = client(LOAD, text, repo_ids, True)
    without = client(LOAD, text, repo_ids, False, python=clean_python)
    for repo_id, folder, auto in (
        ("ada/masks", fill_mask, AutoModelForMaskedLM),
        ("ada/sentences", classifier, AutoModelForSequenceClassification),
        ("ada/finished", classifier, AutoModelForSequenceClassification),
    ):
        inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
        with torch.no_grad():
            expected = auto.from_pretrained(folder)(**inputs).logits
        for answers in (with_package, without):
            logits, answer = answers[repo_id]
            torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-6, atol=1e-6)
            assert len(answer) == (5 if repo_id == "ada/masks" else 1)
    assert with_package["ada/finished"][1][0]["label"] in ("weather", "music")


def test_a_script_pushes_what_its_run_leaves(hub, client, rows, fill_mask, tmp_path):
    file, output = tmp_path / "rows.jsonl", tmp_path / "talk"
    rows.to_json(file)
    options = ["--train_file", file, "--validation_file", file, "--model_name_or_path", fill_mask]
    options += ["--per_device_train_batch_size", 16, "--max_train_steps", 3, "--output_dir", output]
    options += ["--push_to_hub", "--hub_token", "token-of-ada", "--checkpointing_steps", 2, "--with_tracking"]
    scores = client(RUN, str(EXAMPLES), *map(str, options), token="")
    pushed = hub.repositories["ada/talk"].files
    left = {"all_results.json", "history.jsonl", "training_curve.png", "README.md", "model.safetensors", "layers.py"}
    assert left <= pushed.keys() and not any("/" in name for name in pushed)
    assert not any(b"token-of-ada" in file.content for file in pushed.values())
    assert json.loads(pushed["all_results.json"].content)["results"]["validation"] == scores
    card = pushed["README.md"].content.decode()
    assert "rows of rows.jsonl" in card and str(tmp_path) not in card
    assert card.count('model="ada/talk"') == 2  # although only the name of the folder was given
    assert set(json.loads(pushed["config.json"].content)["label2id"]) == {"weather", "music"}


RUN_REFUSED = """
import json, sys
sys.path.insert(0, json.loads(sys.argv[1])[0])
import run_imdb

try:
    run_imdb.main(json.loads(sys.argv[1])[1:])
except PermissionError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.slow
def test_the_hub_is_asked_before_training_and_gets_every_checkpoint(hub, client, rows, fill_mask, tmp_path):
    file, output = tmp_path / "rows.jsonl", tmp_path / "talk"
    rows.to_json(file)
    options = ["--train_file", file, "--validation_file", file, "--model_name_or_path", fill_mask]
    options += ["--per_device_train_batch_size", 16, "--max_train_steps", 6, "--output_dir", output, "--push_to_hub"]
    refused = client(RUN_REFUSED, str(EXAMPLES), *map(str, options), "--hub_token", "expired", token="")
    assert "refused the token for talk" in refused and not any(output.iterdir())

    options += ["--hub_token", "token-of-ada", "--checkpointing_steps", 2, "--hub_strategy", "every_save"]
    options += ["--logging_steps", 1]
    client(RUN, str(EXAMPLES), *map(str, options), token="")
    talk = hub.repositories["ada/talk"]
    commits = list(talk.commits.values())
    weights = [files["model.safetensors"].content for files in commits if "model.safetensors" in files]
    assert len(commits) == 1 + 3 + 1 and len(set(weights)) == 3  # those of the last checkpoint are the final ones
    assert {"config.json", "tokenizer.json", "history.jsonl"} <= commits[1].keys()
    assert not {"optimizer.bin", "progress.json", "manifest.json"} & talk.files.keys()
    assert not any("/" in name or name.startswith("random_states") for name in talk.files)


def test_the_model_of_a_checkpoint_is_uploaded_without_the_states_of_fsdp_and_deepspeed():
    model = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "history.jsonl"]
    model += ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    run = ["manifest.json", "progress.json", "optimizer.bin", "scaler.pt", "random_states_0.pkl"]
    # As Accelerate names them in its `save_fsdp_model` and `save_fsdp_optimizer`, and DeepSpeed in `save_checkpoint`.
    fsdp = ["pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp"]
    fsdp += ["pytorch_model_fsdp_0_rank1.bin"]
    deepspeed = ["latest", "zero_to_fp32.py", "pytorch_model/mp_rank_00_model_states.pt"]
    uploaded = filter_repo_objects([*model, *run, *fsdp, *deepspeed], ignore_patterns=IGNORED_OF_CHECKPOINTS)
    assert list(uploaded) == model


def test_faults_are_clear_and_leave_the_files(hub, client, classifier, tmp_path):
    wrong_card = tmp_path / "wrong-card"
    shutil.copytree(classifier, wrong_card)
    readme = wrong_card / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8").replace("  results:", "  result:"), encoding="utf-8")
    hub.lose_once = {"/ada/lost/commit/main"}
    before = digests(classifier)
    run = {"output_dir": str(classifier)}
    wrong, foreign, bad_name, lost, again, hidden, other, private, card, license, right = client(
        FAULTS,
        run | {"hub_model_id": "ada/wrong", "token": "expired"},
        run | {"hub_model_id": "grace/foreign"},
        run | {"hub_model_id": "ada/no:name"},
        run | {"hub_model_id": "ada/lost"},
        run | {"hub_model_id": "ada/lost"},
        run | {"hub_model_id": "ada/hidden", "private": True},
        {"read": "ada/hidden", "token": "token-of-grace"},
        {"read": "ada/hidden", "token": "token-of-ada"},
        {"output_dir": str(wrong_card), "hub_model_id": "ada/card"},
        {"language": None, "license": "Apache 2.0"},
        {"language": "en", "license": "apache-2.0"},
    )
    assert digests(classifier) == before
    for (name, message), expected, hints in (
        (wrong, "PermissionError", ("refused the token for ada/wrong", "HF_TOKEN", "Invalid credentials")),
        (foreign, "PermissionError", ("may not write to grace/foreign", "--hub_model_id")),
        (bad_name, "ValueError", ("--hub_model_id 'ada/no:name'",)),
        (lost, "ConnectionError", (f"upload of {classifier} to ada/lost did not finish: the folder is unchanged",)),
        (card, "ValueError", ("Invalid metadata in README.md", "model_index", f"Correct the first lines of {readme}")),
        (license, "ValueError", ("does not take --license 'Apache 2.0' for", "must be one of")),
        (other, "RepositoryNotFoundError", ("ada/hidden",)),
    ):
        assert name == expected and all(hint in message for hint in hints), message
    assert again == hidden == private == right == ["", ""]
    assert hub.repositories.keys() == {"ada/lost", "ada/hidden", "ada/card"}
    # The failed push left nothing visible, and the second one did not send the large file again.
    assert len(hub.repositories["ada/lost"].commits) == 2
    uploads = [path for method, path in hub.requests if method == "PUT"]
    assert len(uploads) == len(set(uploads)) == 1


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_model_is_refused(missing, tmp_path):
    (tmp_path / ({"config.json", "model.safetensors"} - {missing}).pop()).touch()
    with pytest.raises(FileNotFoundError, match=r"--output_dir .* has no "):
        push(tmp_path, "ada/empty")
