# SPDX-License-Identifier: Apache-2.0
"""The table of capabilities: ours pass all checks, and implementations that fail are found."""

import pytest
import torch
from torch import nn

from benchmarks import capabilities, cli

OURS = [contender for contender in capabilities.CONTENDERS if contender.ours]


@pytest.mark.parametrize("contender", OURS, ids=lambda contender: contender.family)
def test_ours_can_do_everything(contender):
    answers = capabilities.measure([contender])
    assert capabilities.failures(answers) == []
    missing = [check for check, (verdict, _) in answers[contender.title].items() if verdict != "yes"]
    assert missing == ([] if contender.family == "Nystromformer" else ["inv_coeff_init_option=True"])


class Encoder(nn.Module):
    """Exact attention that ignores the mask, depends on the other rows, and takes only even lengths in float32."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(capabilities.VOCABULARY, capabilities.WIDTH)
        self.linear = nn.Linear(capabilities.WIDTH, capabilities.WIDTH)

    def forward(self, input_ids, mask=None):
        states = self.embeddings(input_ids).float()
        if states.shape[1] % 2:
            raise ValueError("odd")
        print(end="")  # breaks the graph
        scores = states @ states.mT / capabilities.WIDTH
        mixed = scores.softmax(-1) @ states + states.mean(0)
        return self.linear(mixed).float()


class Broken(capabilities.Contender):
    title = "broken"

    def __init__(self, max_length=capabilities.LENGTH):
        super().__init__(max_length)
        self.encoder = Encoder()

    def takes_mask(self):
        return capabilities.has_argument(self.encoder.forward, "mask")

    def forward(self, input_ids, mask=None):
        return self.encoder(input_ids, mask)

    def enable_checkpointing(self):
        pass


class Unsaved(capabilities.OurLinformer):
    """Loads as another class than it was saved as, and has a pretraining head without sentence order."""

    @classmethod
    def model(cls, head, **fields):
        model = super().model("ForMaskedLM" if head == "ForPreTraining" else head, **fields)
        if head == "Model":
            model.__class__ = type("Other", (type(model),), {})
        return model


def test_what_cannot_is_found_out():
    answers = capabilities.measure([Broken])["broken"]
    for check, (verdict, seen) in answers.items():
        if check.startswith(("inv_coeff", "MLM", "pipeline", "AutoModel")):
            assert (verdict, seen) == ("–", None), check
        else:
            assert verdict in ("no", "error") and seen, check
    assert "operations" in answers["cost linear in the length"][1]
    assert "ValueError: odd" in answers["any length up to the maximum"][1]
    assert answers["gradient checkpointing"] == ("no", "nothing is recomputed")


def test_wrong_models_are_found_out():
    assert capabilities.answer(Unsaved, capabilities.loads_with_auto_model)[0] == "no"
    assert capabilities.answer(Unsaved, capabilities.sentence_order_head)[0] != "yes"


def test_the_command_prints_the_table_and_fails_if_ours_cannot(monkeypatch, capsys):
    monkeypatch.setattr(capabilities, "CONTENDERS", [capabilities.OurLinformer, Broken])
    checks = ("row in a batch = row alone", "any length up to the maximum", "inv_coeff_init_option=True")
    monkeypatch.setattr(capabilities, "CHECKS", {name: capabilities.CHECKS[name] for name in checks})
    threads = torch.get_num_threads()
    assert cli.main(["capabilities", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "|  | ours: Linformer | broken |" in lines
    assert "| row in a batch = row alone | yes | no [1] |" in lines
    assert "| inv_coeff_init_option=True | – | – |" in lines
    assert any(line.startswith("[1] `in a batch against alone: off by ") for line in lines)
    assert torch.get_num_threads() == threads

    monkeypatch.setattr(Broken, "ours", True)
    assert cli.main(["capabilities"]) == 1
