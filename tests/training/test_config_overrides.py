# SPDX-License-Identifier: Apache-2.0
"""Fields that `--config_overrides` changes."""

import pytest
from transformers import BertConfig

from nystrom_models import LinearTransformerConfig, LinformerConfig, NystromformerConfig
from nystrom_models.training.language_modeling import override


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (NystromformerConfig, "num_landmarks=[32,16],num_hidden_layers=2", [32, 16]),
        (NystromformerConfig, "num_landmarks=[32,none],num_hidden_layers=2", [32, None]),
        (NystromformerConfig, "num_landmarks=none", None),
        (NystromformerConfig, "conv_kernel_size=none,num_landmarks=32", None),
        (NystromformerConfig, "conv_kernel_size=None", None),
        (NystromformerConfig, "conv_kernel_size=null", None),
        (NystromformerConfig, "num_landmarks=[None,null],num_hidden_layers=2", [None, None]),
        (NystromformerConfig, "classifier_dropout=0.25", 0.25),
        (NystromformerConfig, "classifier_activation=relu", "relu"),
        (NystromformerConfig, "unpad_inputs=false", False),
        (NystromformerConfig, "hidden_dropout_prob=0.5", 0.5),
        (
            LinformerConfig,
            "projected_dim=[[8,4],[2,1]],share_projection=none,num_hidden_layers=2,num_attention_heads=2",
            [[8, 4], [2, 1]],
        ),
        (LinearTransformerConfig, "feature_map=none,use_cache=false", None),
        (BertConfig, "classifier_dropout=0.25", 0.25),
    ],
    ids=str,
)
def test_values_are_those_that_the_field_may_have(config, overrides, expected):
    name = overrides.partition("=")[0]
    found = getattr(override(config(), overrides), name)
    assert found == expected and type(found) is type(expected)


def test_a_list_is_replaced_by_a_number():
    config = NystromformerConfig(num_hidden_layers=2, num_landmarks=[8, 4])
    assert override(config, "num_landmarks=16").num_landmarks == 16


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("num_landmarks=[32,16]", "has 2 numbers for num_hidden_layers=12"),
        ("num_landmarks=[32,16", "'num_landmarks=.32,16'.*expected a list"),
        ("num_landmarks=many", "'num_landmarks=many': num_landmarks must be a whole number or none, not many"),
        ("num_hidden_layers=2.5", "num_hidden_layers must be a whole number, not 2.5"),
        ("hidden_dropout_prob=none", "hidden_dropout_prob must be a number, not none"),
        ("unpad_inputs=perhaps", "can't derive true or false from perhaps"),
        ("landmarks=none", "'landmarks=none' must be a field of NystromformerConfig"),
        ("num_landmarks", "'num_landmarks' must be a field of NystromformerConfig with a value, name=value"),
        ("num_landmarks=8,16", "write a list as num_landmarks=.8,16., and else name=value,name=value"),
    ],
)
def test_wrong_values_are_refused_by_name(overrides, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        override(NystromformerConfig(), overrides)
