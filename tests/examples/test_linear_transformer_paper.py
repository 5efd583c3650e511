# SPDX-License-Identifier: Apache-2.0
import json
import math

import linear_transformer_paper as paper
import pytest
import torch

SMALL = ["--hidden_size", "32", "--num_hidden_layers", "2", "--num_attention_heads", "4", "--batch_size", "16"]


def test_copying_is_learned_and_plotted(tmp_path):
    """With two symbols to copy, the loss falls from that of guessing to nearly zero."""
    command = ["copy", "--output_dir", str(tmp_path), "--length", "6", "--max_train_steps", "250", *SMALL]
    results = paper.main(command)
    assert (tmp_path / "copy.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["losses"].keys() == {"linear", "softmax"}
    for name, losses in results["losses"].items():
        assert abs(losses[0] - math.log(paper.SYMBOLS + 1)) < 0.5, name
        assert results["loss_of_the_last_100_steps"][name] < 0.6 * losses[0], name


def test_the_loss_is_that_of_the_copy():
    args = paper.parse_args(["copy", "--output_dir", "x", "--length", "10"])
    batch = next(paper.copy_batches(args))
    assert torch.equal(batch["input_ids"][:, 1:5], batch["input_ids"][:, 6:])
    assert (batch["labels"][:, :6] == -100).all() and torch.equal(batch["labels"][:, 6:], batch["input_ids"][:, 6:])


def test_digits_are_drawn_and_timed(tmp_path):
    command = ["digits", "--output_dir", str(tmp_path), "--max_train_steps", "60", "--num_pictures", "2", *SMALL]
    results = paper.main([*command, "--upsample", "2"])
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    bits = results["bits_a_pixel"]
    assert bits["linear"] < bits["frequencies of the levels alone"] < math.log2(paper.LEVELS)
    assert results["pictures_a_second"].keys() == {"linear, states", "softmax, cache", "softmax, no cache"}


def test_pictures_are_those_of_scikit_learn():
    training, held_out = paper.load_digits(1)
    assert (len(training), len(held_out)) == (1500, 297) and training.max() == paper.LEVELS - 1
    large = paper.load_digits(4)[0]
    assert torch.equal(large.view(-1, 32, 32)[:, ::4, 3::4].flatten(1), training)


def test_wrong_flags_are_refused(capsys):
    with pytest.raises(SystemExit):
        paper.parse_args(["copy", "--output_dir", "x", "--length", "7"])
    assert "--length: must be an even number" in capsys.readouterr().err
