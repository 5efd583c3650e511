# SPDX-License-Identifier: Apache-2.0
"""model_cards/: a card for every configuration in configs/, as written by the command."""

import re

import pytest
from huggingface_hub import ModelCard

import model_cards.__main__ as cards
from nystrom_models import LinearTransformerConfig, LinformerConfig, NystromformerConfig
from nystrom_models.training.configuration_card import configuration_card


@pytest.mark.parametrize("size", [pytest.param("base", marks=pytest.mark.slow), "small", "mini", "tiny"])
def test_the_cards_are_up_to_date(size):
    chosen = [name for name in cards.names() if f"/{size}-" in name]
    for name in chosen:
        assert (cards.CARDS / f"{name}.md").read_text(encoding="utf-8") == cards.card(name), (
            f"{name}: run python -m model_cards"
        )
    assert len(chosen) >= 3


def test_every_configuration_has_a_card():
    written = sorted(str(path.relative_to(cards.CARDS).with_suffix("")) for path in cards.CARDS.glob("*former/*.md"))
    assert written == cards.names() and len(written) >= 30


def test_an_outdated_a_missing_and_a_foreign_card_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cards, "CARDS", tmp_path / "model_cards")
    monkeypatch.setattr(cards, "ROOT", tmp_path)
    monkeypatch.setattr(cards, "names", lambda: ["linformer/tiny", "linformer/new"])
    monkeypatch.setattr(cards, "card", lambda name: "new text\n")
    (tmp_path / "model_cards" / "linformer").mkdir(parents=True)
    for name in ("tiny", "old"):
        (tmp_path / "model_cards" / "linformer" / f"{name}.md").write_text("old text\n")
    assert cards.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "model_cards/linformer/old.md: no configuration has this name",
        "model_cards/linformer/tiny.md: not up to date",
        "model_cards/linformer/new.md: missing",
    ]


@pytest.mark.parametrize("name", ["nystromformer/small-512", "linformer/tiny-256-k32-layerwise"])
def test_the_snippet_gives_the_parameters_that_the_table_says(name, monkeypatch, capsys):
    monkeypatch.chdir(cards.ROOT)
    text = (cards.CARDS / f"{name}.md").read_text(encoding="utf-8")
    [snippet] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(snippet, {})
    assert f"| Parameters, with the MLM and SOP heads | {capsys.readouterr().out.strip()}, of which" in text


@pytest.mark.parametrize("comparison", cards.COMPARISONS, ids=lambda comparison: comparison.file)
def test_every_reported_run_is_on_the_card_of_its_configuration_and_on_the_page(comparison):
    runs = comparison.content["results"]
    assert set(runs) == set(comparison.arms)
    assert {task for task, _, _ in comparison.columns} == {task for scores in runs.values() for task in scores}
    page = (cards.ROOT / "docs" / "attention-compared.md").read_text(encoding="utf-8")
    for arm, (name, _) in comparison.arms.items():
        text = (cards.CARDS / f"{name}.md").read_text(encoding="utf-8")
        for task, metric, _ in comparison.columns:
            scores = runs[arm][task][metric]
            spread = isinstance(scores, dict)
            cell = f"{100 * scores['mean']:.1f} ± {100 * scores['std']:.1f}" if spread else f"{100 * scores:.1f}"
            assert f"| {cell} |" in text and f"| {cell} |" in page


def test_results_are_in_the_metadata():
    card = ModelCard.load(cards.CARDS / "nystromformer" / "tiny-256.md")
    assert card.data.pipeline_tag == "fill-mask" and card.data.tags == ["nystrom_models", "nystromformer"]
    found = {result.dataset_name: result.metric_value for result in card.data.eval_results}
    first = cards.COMPARISONS[0]
    runs = first.content["results"]
    assert found["SST-2"] == round(runs["nystrom"]["sst2"]["accuracy"]["mean"], 6)
    assert len(found) == len(first.columns) == len(cards.COLUMNS)


@pytest.mark.parametrize(
    ("config", "cost"),
    [
        (NystromformerConfig(num_hidden_layers=2, num_landmarks=[64, 32]), "time and memory linear"),
        (NystromformerConfig(num_hidden_layers=2, num_landmarks=[64, None]), "time quadratic, and memory linear,"),
        (NystromformerConfig(num_landmarks=256, max_position_embeddings=256), "time quadratic, and memory linear,"),
        (NystromformerConfig(num_landmarks=255, max_position_embeddings=256), "time and memory linear"),
        (NystromformerConfig(num_landmarks=None), "time quadratic, and memory linear,"),
        (LinformerConfig(), "time and memory linear"),
        (LinearTransformerConfig(), "time and memory linear"),
        (LinearTransformerConfig(feature_map=None, use_cache=False), "time quadratic, and memory linear,"),
    ],
)
def test_exact_layers_take_quadratic_time(config, cost):
    text = str(configuration_card(config, name="x", file="x.json"))
    assert f"{cost} in their number." in text
    approximates = isinstance(config, NystromformerConfig) and config.num_landmarks not in (None, 256)
    assert ("get an approximation" in text or "layers, an approximation" in text) == approximates
    assert ("64 landmarks, 6 iterations of the pseudo-inverse; exact in 1 of 2 layers" in text) == (
        getattr(config, "num_landmarks", 0) == [64, None]
    )


def test_rows_of_results_with_other_columns_are_refused():
    results = cards.results_of("nystromformer/tiny-256")
    results[1] = (results[1][0], results[1][1][:-1])
    with pytest.raises(ValueError, match="same columns"):
        configuration_card(NystromformerConfig(), name="x", file="x.json", results=results)
