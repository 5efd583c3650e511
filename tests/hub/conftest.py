# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithPadding

import nystrom_models
from nystrom_models.data import RowLoader, eval_dataloader, train_tokenizer
from nystrom_models.training import (
    ClassificationObjective,
    OptimizationArguments,
    create_accelerator,
    evaluate,
    save_pretrained,
    train,
)
from nystrom_models.training.model_card import write_model_card
from tests.hub.server import HubServer

TOKENS = {"token-of-ada": "ada", "token-of-grace": "grace"}
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
SENTENCES = {
    "weather": "the rain falls on the hills and the wind is cold",
    "music": "a choir sings the old song again",
}


@pytest.fixture
def hub():
    with HubServer(TOKENS) as server:
        yield server


@pytest.fixture(scope="session")
def rows():
    """Half of the words of one of two sentences, and the number of the sentence."""
    rows = []
    for index in range(128):
        label = list(SENTENCES)[index % 2]
        words = SENTENCES[label].split()
        keep = torch.randperm(len(words), generator=torch.Generator().manual_seed(index))[: len(words) // 2]
        rows.append({"text": " ".join(words[i] for i in keep), "label": label})
    return Dataset.from_list(rows)


@pytest.fixture(scope="session")
def tokenizer(rows):
    return train_tokenizer(rows["text"], vocab_size=150, model_max_length=64, show_progress=False)


@pytest.fixture(scope="session")
def classifier(rows, tokenizer, tmp_path_factory):
    """The folder of a finished run: a Linformer trained to distinguish the sentences, and its card."""
    folder = tmp_path_factory.mktemp("runs") / "sentences"
    torch.manual_seed(0)
    config = nystrom_models.LinformerConfig(
        **TINY, vocab_size=len(tokenizer), projected_dim=8, id2label=dict(enumerate(SENTENCES))
    )
    model = nystrom_models.LinformerForSequenceClassification(config)
    examples = [
        dict(tokenizer(row["text"]))
        | {"labels": list(SENTENCES).index(row["label"]), "length": len(row["text"].split())}
        for row in rows
    ]
    pad = DataCollatorWithPadding(tokenizer)

    def collate(batch):
        return pad([{name: value for name, value in row.items() if name not in ("length", "epoch")} for row in batch])

    examples = Dataset.from_list(examples)
    args = OptimizationArguments(per_device_train_batch_size=16, learning_rate=1e-2, max_train_steps=80)
    accelerator = create_accelerator()
    state = train(accelerator, model, ClassificationObjective(), RowLoader(examples, collate, 16), args)
    loader = eval_dataloader(examples, collate, 32)
    scores = evaluate(accelerator, state.model, ClassificationObjective(), loader)
    save_pretrained(accelerator, state.model, tokenizer, folder)
    write_model_card(
        folder,
        data="Words of two English sentences, made up for this test.",
        hub_model_id="ada/sentences",
        metrics={"accuracy": scores["accuracy"]},
        hyperparameters=vars(args) | {"hub_token": "secret"},
        language="en",
        example=rows[0]["text"],
    )
    (folder / "all_results.json").write_text(json.dumps(scores))
    (folder / "step_10").mkdir()
    (folder / "step_10" / "optimizer.bin").write_bytes(b"\0" * 99)
    (folder / ".secret").write_text("not to be published")
    return folder


@pytest.fixture(scope="session")
def fill_mask(tokenizer, tmp_path_factory):
    """A Nyströmformer with its tokenizer and card, not trained."""
    folder = tmp_path_factory.mktemp("runs") / "masks"
    torch.manual_seed(1)
    config = nystrom_models.NystromformerConfig(**TINY, vocab_size=len(tokenizer), num_landmarks=4, conv_kernel_size=3)
    nystrom_models.NystromformerForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_model_card(folder, data="None.", hub_model_id="ada/masks")
    return folder


@pytest.fixture
def client(hub, tmp_path):
    """Runs Python in a new process as a client of `hub` with an empty cache; returns the JSON of its last line."""

    def run(script, *arguments, token="token-of-ada", python=sys.executable):
        home = tmp_path / f"home-{len(list(tmp_path.iterdir()))}"
        home.mkdir()
        environment = os.environ | {
            "HOME": str(home),
            "HF_HOME": str(home / "hf"),
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": token,
            "HF_HUB_OFFLINE": "0",
            # Xet stores large files on another server; without it, they are sent to the Hub itself.
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        if python != sys.executable:
            environment.pop("PYTHONPATH", None)  # so that this package is found in only one way
        command = [python, "-c", script, json.dumps(arguments)]
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
