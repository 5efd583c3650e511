# SPDX-License-Identifier: Apache-2.0
"""Names of checkpoints: folders, or names on the Hub."""

import pytest

from nystrom_models.checkpoint import load_tokenizer


@pytest.mark.parametrize("name", ["outputs/missing/pretrained", "../missing", "./missing", "/missing"])
def test_a_missing_folder_is_named(name):
    with pytest.raises(FileNotFoundError, match=f"There is no file or folder '{name}': correct the path"):
        load_tokenizer(name)


@pytest.mark.parametrize("name", ["missing", "nobody/missing"])
def test_other_names_may_be_on_the_hub(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"Hub|Hugging ?Face|huggingface"):
        load_tokenizer(name)
