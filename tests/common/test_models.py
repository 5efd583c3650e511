# SPDX-License-Identifier: Apache-2.0
"""Transformers' common tests on every family and head: with rows shorter and rows longer than the landmarks or k, and
of linear transformers as encoders and as causal models."""

import inspect
import unittest
from unittest import mock

import pytest
import torch
import transformers
from accelerate import infer_auto_device_map
from transformers import DynamicCache
from transformers.models.auto import modeling_auto

import nystrom_models
from nystrom_models.models.recurrent_cache import CACHE
from tests.common import upstream

modeling_common = upstream.load("test_modeling_common")
configuration_common = upstream.load("test_configuration_common")

HEADS = {
    "Model": "MODEL",
    "ForPreTraining": "MODEL_FOR_PRETRAINING",
    "ForMaskedLM": "MODEL_FOR_MASKED_LM",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING",
    "ForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE",
}
CAUSAL_HEADS = {
    "Model": "MODEL",
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING",
    "ForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE",
}

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "type_vocab_size": 3,
}


class ModelTester:
    """What `ModelTesterMixin` needs for a model: a small configuration and a batch.

    The batch has a full row, and rows with `min_valid` valid tokens: right-padded, left-padded and with holes.
    """

    is_training = True
    batch_size = 4
    num_choices = 2
    hidden_size = SMALL["hidden_size"]
    num_hidden_layers = SMALL["num_hidden_layers"]
    num_attention_heads = SMALL["num_attention_heads"]

    def __init__(self, config_class, seq_length, min_valid, options):
        self.config_class = config_class
        self.seq_length = seq_length
        self.min_valid = min_valid
        self.options = options

    def get_config(self):
        return self.config_class(**SMALL, **self.options)

    def prepare_config_and_inputs_for_common(self):
        size = (self.batch_size, self.seq_length)
        padding = self.seq_length - self.min_valid
        attention_mask = torch.ones(size, dtype=torch.long)
        attention_mask[1, -padding:] = 0
        attention_mask[2, :padding] = 0
        attention_mask[3, 1 : 1 + padding] = 0
        inputs = {
            "input_ids": modeling_common.ids_tensor(size, SMALL["vocab_size"]),
            "attention_mask": attention_mask,
            "token_type_ids": modeling_common.ids_tensor(size, SMALL["type_vocab_size"]),
        }
        return self.get_config(), inputs


def load_with_the_cpu_as_accelerator(load, model_class, folder, *, device_map, max_memory, **kwargs):
    """`from_pretrained` with device_map="auto", where the CPU is device 0, and offloaded weights are on the disk."""
    assert device_map == "auto"
    with torch.device("meta"):
        empty = model_class(model_class.config_class.from_pretrained(folder))
    empty.tie_weights()
    places = infer_auto_device_map(empty, max_memory, no_split_module_classes=model_class._no_split_modules)
    here = {name: "cpu" if place == 0 else "disk" for name, place in places.items()}
    model = load(model_class, folder, device_map=here, **kwargs)
    model.hf_device_map = dict(places)
    return model


def parents(name):
    """a.b.c, a.b, a and the empty name."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


class CommonTests(modeling_common.ModelTesterMixin):
    test_can_init_all_missing_weights_before_2023 = True

    @classmethod
    def setUpClass(cls):
        # Many common tests look a class up in these names of built-in classes, to choose labels and expected results.
        model_type = cls.config_class.model_type
        for suffix, mapping in cls.heads.items():
            names = getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")
            cls.enterClassContext(mock.patch.dict(names, {model_type: cls.family + suffix}))

    def setUp(self):
        self.model_tester = ModelTester(self.config_class, self.seq_length, self.min_valid, self.options)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and model_class.__name__.endswith("ForPreTraining"):
            size = (self.model_tester.batch_size, self.model_tester.seq_length)
            inputs["labels"] = torch.zeros(size, dtype=torch.long)
            inputs["sentence_order_label"] = torch.zeros(size[0], dtype=torch.long)
        return inputs

    def test_support_is_declared(self):
        # The common tests skip themselves for a class that does not declare these.
        for model_class in self.all_model_classes:
            self.assertTrue(model_class._supports_sdpa)
            self.assertTrue(model_class.supports_gradient_checkpointing)

    def test_config(self):
        configuration_common.ConfigTester(self, self.config_class, **SMALL, **self.options).run_common_tests()

    def test_bc_cache_name_forward(self):
        # The common test expects a warning of the older name, and that every model with this argument takes a cache.
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = self.all_model_classes[0](config).eval()
        for name in ("cache", "past_key_values"):
            given = {name: DynamicCache(config=config)}
            if config.has_states:
                with torch.no_grad():
                    self.assertIs(getattr(model(**inputs, **given), CACHE), given[name])
            else:
                with self.assertRaisesRegex(ValueError, f"leave {CACHE} out"):
                    model(**inputs, **given)

    @pytest.mark.slow
    def test_bc_torch_dtype(self):
        super().test_bc_torch_dtype()

    def test_cpu_offload(self):
        self.run_offload_test("test_cpu_offload")

    def test_disk_offload_bin(self):
        self.run_offload_test("test_disk_offload_bin")

    def test_disk_offload_safetensors(self):
        self.run_offload_test("test_disk_offload_safetensors")

    def run_offload_test(self, name):
        """A common test that skips itself without an accelerator, run with the CPU instead."""
        base = getattr(nystrom_models, f"{self.family}PreTrainedModel")
        load = base.from_pretrained.__func__

        @classmethod
        def placed(model_class, *args, **kwargs):
            return load_with_the_cpu_as_accelerator(load, model_class, *args, **kwargs)

        with mock.patch.object(base, "from_pretrained", placed):
            inspect.unwrap(getattr(modeling_common.ModelTesterMixin, name))(self)

    def check_device_map_is_respected(self, model, device_map):
        """The same as in the common tests, but device 0 is the CPU."""
        for name, parameter in model.named_parameters():
            place = next(device_map[part] for part in parents(name) if part in device_map)
            self.assertEqual(parameter.device.type, "cpu" if place == 0 else "meta", name)

    def test_model_weights_reload_no_missing_tied_weights(self):
        # It loads a checkpoint without any of the model's weights, which this package otherwise refuses.
        loader = classmethod(transformers.PreTrainedModel.from_pretrained.__func__)
        base = getattr(nystrom_models, f"{self.family}PreTrainedModel")
        with mock.patch.object(base, "from_pretrained", loader):
            super().test_model_weights_reload_no_missing_tied_weights()


def common_tests(name, family, *, seq_length, min_valid, heads=HEADS, slow=False, **options):
    """A test class for one family and regime; slow: left to `make slow`."""
    attributes = {
        "__module__": __name__,
        "family": family,
        "config_class": getattr(nystrom_models, f"{family}Config"),
        "heads": heads,
        "all_model_classes": tuple(getattr(nystrom_models, family + suffix) for suffix in heads),
        "seq_length": seq_length,
        "min_valid": min_valid,
        "options": options,
        "pytestmark": [pytest.mark.slow] if slow else [],
    }
    # Its place among the base classes makes a model able to generate.
    generates = (modeling_common.GenerationTesterMixin,) if "ForCausalLM" in heads else ()
    return type(name, (CommonTests, *generates, unittest.TestCase), attributes)


# What differs in short rows is the attention alone, which tests/models/ looks at.
SHORT_ROWS = {"seq_length": 7, "min_valid": 5, "slow": True}
LONG_ROWS = {"seq_length": 13, "min_valid": 6}

TestNystromformerShortRows = common_tests(
    "TestNystromformerShortRows", "Nystromformer", **SHORT_ROWS, num_landmarks=16, conv_kernel_size=3
)
TestNystromformerLongRows = common_tests(
    "TestNystromformerLongRows", "Nystromformer", **LONG_ROWS, num_landmarks=4, conv_kernel_size=3
)
TestLinformerShortRows = common_tests(
    "TestLinformerShortRows", "Linformer", **SHORT_ROWS, projected_dim=16, share_projection="none"
)
TestLinformerLongRows = common_tests("TestLinformerLongRows", "Linformer", **LONG_ROWS, projected_dim=4)
TestLinearTransformer = common_tests("TestLinearTransformer", "LinearTransformer", **LONG_ROWS)
TestCausalLinearTransformer = common_tests(
    "TestCausalLinearTransformer",
    "LinearTransformer",
    **LONG_ROWS,
    heads=CAUSAL_HEADS,
    is_decoder=True,
    conv_kernel_size=3,
)
