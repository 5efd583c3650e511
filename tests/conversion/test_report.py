# SPDX-License-Identifier: Apache-2.0
"""The content of the report, and where it is written."""

import json
import shutil

import pytest
import torch

from nystrom_models.conversion import Matching, convert, convert_checkpoint, converted_config
from nystrom_models.conversion.sample import Sample
from tests.conversion.sources import LENGTH, save_source
from tests.conversion.test_convert import bert_tokenizer
from tests.models.options import make_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("source")
    save_source(folder, "Bert", "ForMaskedLM")
    bert_tokenizer().save_pretrained(folder)
    return folder


def test_it_is_printed_and_saved(source, tmp_path):
    config = converted_config(source, max_position_embeddings=50, num_landmarks=8, conv_kernel_size=3)
    options = {"sample": ["a long text"] * 60, "return_report": True}
    _, report = convert_checkpoint(source, tmp_path / "out", config, save_report=True, **options)
    saved = json.loads((tmp_path / "out" / "conversion_report.json").read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(report.to_dict()))
    assert len(saved["origins"]) == len(report.origins) and saved["sample"] == "texts"
    printed = str(report)
    # All except the positions and the two kernels.
    count = len(report.origins)
    assert f"NystromformerForMaskedLM from BertForMaskedLM: {count - 3} of {count} parameters copied" in printed
    assert "zero, to be trained: nystromformer.encoder.layer.*.attention.self.conv.weight" in printed
    short, long = report.differences
    assert (short.tokens, long.tokens) == (8, LENGTH) and f"{long.largest:.2e}" in printed
    # Up to `num_landmarks` tokens it agrees with the source, beyond it does not.
    assert short.largest < 1e-6 * short.scale < long.largest and short.agreement == 1.0
    _, quick = convert(source, config, return_report=True, compare=False)
    assert not quick.differences and quick.origins == report.origins
    assert not (tmp_path / "plain").exists()
    convert_checkpoint(source, tmp_path / "plain", config)
    assert not (tmp_path / "plain" / "conversion_report.json").exists()


def test_pairs_are_compared_as_pairs(tmp_path):
    make_model("nystromformer-landmarks", "ForSequenceClassification", dual_encoder=True).save_pretrained(tmp_path)
    config = converted_config(tmp_path, "linformer", projected_dim=8)
    _, report = convert(tmp_path, config, return_report=True)
    assert {found.of for found in report.differences} == {"logits"}
    assert all(found.largest > 0 for found in report.differences)


@pytest.mark.parametrize("reverse", [False, True])
def test_differences_are_those_of_the_models(reverse, source):
    config = converted_config(source, "linformer", projected_dim=8)
    rows = torch.randint(5, 99, (3, LENGTH))
    rows = rows.flip(0) if reverse else rows
    model, report = convert(source, config, sample=rows, return_report=True)
    theirs = convert(source, converted_config(source, num_landmarks=None, conv_kernel_size=None))
    with torch.no_grad():
        ours, exact = model(rows).logits, theirs(rows).logits
    found = report.differences[-1]
    assert (found.rows, found.tokens, found.of) == (3, LENGTH, "logits")
    assert found.largest == pytest.approx((ours - exact).abs().max().item(), rel=1e-4)
    assert found.scale == pytest.approx(exact.abs().max().item(), rel=1e-4)
    assert found.agreement == pytest.approx((ours.argmax(-1) == exact.argmax(-1)).float().mean().item())


def test_rows_of_texts_have_the_special_tokens():
    sample = Sample.of_texts(["a long text", "", "a text"] * 4, bert_tokenizer())
    assert sample.rows(7).tolist()[:2] == [[2, 5, 6, 7, 5, 7, 3], [2, 5, 6, 7, 5, 7, 3]]
    fit, held_out = sample.split(5)
    assert (len(fit), len(held_out)) == (5, 1)
    with pytest.raises(ValueError, match="room only for the special tokens"):
        sample.rows(2)
    with pytest.raises(ValueError, match="no tokens"):
        Sample.of_texts([""], bert_tokenizer())
    with pytest.raises(ValueError, match=r"67% of the tokens of sample \(--sample_file\) are \[UNK\]"):
        Sample.of_texts(["a 长 文"], bert_tokenizer())
    assert len(Sample.of_texts(["a 长"], bert_tokenizer()).tokens) == 2
    # Texts after the limit are not tokenized.
    assert len(Sample.of_texts(["a long text"] * 1000, bert_tokenizer(), most_tokens=7).tokens) == 9
    # As many rows as the text has, up to a limit.
    assert len(Sample(torch.arange(1000), "token ids").rows(10, most_tokens=200)) == 20
    random = Sample.random(7, 1000, pad_token_id=3)
    assert set(random.tokens.tolist()) == {0, 1, 2, 4, 5, 6}


def test_a_source_without_a_tokenizer_is_converted_but_not_saved(source, tmp_path):
    shutil.copytree(source, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "vocab*"))
    config = converted_config(tmp_path / "bare", num_landmarks=8)
    assert convert(tmp_path / "bare", config) is not None
    with pytest.raises(ValueError, match="has no tokenizer"):
        convert_checkpoint(tmp_path / "bare", tmp_path / "out", config)
    with pytest.raises(ValueError, match="has no tokenizer"):
        convert(tmp_path / "bare", config, sample=["a text"])
    with pytest.raises(ValueError, match="give sample"):
        convert(tmp_path / "bare", config, matching=Matching(steps=2))
    assert not (tmp_path / "out").exists()
