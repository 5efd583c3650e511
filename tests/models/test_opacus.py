# SPDX-License-Identifier: Apache-2.0
"""Differential privacy by Opacus: each row of a padded batch has its own gradient."""

from tests.models import apart

# Embeddings are fixed, as Opacus needs it in a BERT, too.
PROGRAM = """
import sys

import torch
from opacus import GradSampleModule
from peft import LoraConfig, get_peft_model

from tests.models.options import make_model

torch.manual_seed(0)
ids, mask, labels = torch.randint(3, 99, (3, 30)), torch.ones(3, 30, dtype=torch.long), torch.tensor([0, 1, 1])
mask[1, 10:] = mask[2, :20] = 0
for option in sys.argv[1:]:
    for lora in (False, True):
        model = make_model(option, "ForSequenceClassification").train()
        model.base_model.embeddings.requires_grad_(False)
        if lora:
            config = LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)
            model = get_peft_model(model, config)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        alone = []
        for row in range(3):
            loss = model(input_ids=ids[row : row + 1, mask[row] == 1], labels=labels[row : row + 1]).loss
            alone.append(torch.autograd.grad(loss, trained, allow_unused=True))
        GradSampleModule(model)(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        compared = 0
        for parameter, *rows in zip(trained, *alone, strict=True):
            if rows[0] is not None:
                torch.testing.assert_close(parameter.grad_sample, torch.stack(rows), rtol=2e-5, atol=2e-6)
                compared += 1
        print(option, lora, compared)
"""


def test_the_gradients_of_each_row(tmp_path):
    options = (
        "nystromformer-landmarks linformer-layerwise linformer-headwise linformer-conv_none linear-elu linear-causal"
    )
    lines = apart.run(PROGRAM, tmp_path, *options.split()).splitlines()
    assert len(lines) == 12 and all(int(line.split()[-1]) >= 8 for line in lines), lines
