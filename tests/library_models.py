# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The library's own tests of its models on ours: `python tests/library_models.py FOLDER`, its unpacked source.

They were written for models inside the library and import from folders that a source distribution lacks; what they
would inherit from there is empty.
"""

import sys
import types
import unittest

import torch
from helpers import VARIANTS

from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel, companions

# What asks whether a class inherits from such a folder, or for a rotary embedding that cached keys cannot bear.
LEFT_OUT = ("test_generation_tester_mixin_inheritance", "test_model_rope_scaling_from_config_1_dynamic")
# What takes a field rope_parameters, None without attention, for rotary positions.
ROTARY = (
    *("test_model_rope_scaling_from_config_0_linear", "test_model_rope_scaling_from_config_2_yarn"),
    "test_model_rope_with_partial_rotation",
)
LEFT_OUT_OF_S4D = ("test_torch_save_load",)  # it calls a state dict of bool tensors
ABSENT = {"exporters": ("test_export", "ExportTesterMixin"), "generation": ("test_utils", "GenerationTesterMixin")}
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_spectral_channels": 4, "filter_length": 64}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2}
CLASSES = (ESSMModel, ESSMForCausalLM, ESSMForSequenceClassification)
DIAGONAL = tuple(getattr(companions, cls.__name__.replace("ESSM", "DiagonalSSM")) for cls in CLASSES)
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def library_tests(folder: str):
    """Its module tests.test_modeling_common."""
    sys.modules["tests"] = package = types.ModuleType("tests")
    package.__path__ = [f"{folder}/tests"]
    for name, (file, mixin) in ABSENT.items():
        module = types.ModuleType(f"tests.{name}.{file}")
        setattr(module, mixin, type(mixin, (), {}))
        sys.modules |= {f"tests.{name}": types.ModuleType(f"tests.{name}"), f"tests.{name}.{file}": module}
    from tests import test_modeling_common

    return test_modeling_common


def test_case(common, fields, classes=CLASSES):
    """The tests of models of these classes with these fields."""

    class Tester:
        is_training, batch_size, seq_length, hidden_size, num_hidden_layers = True, 3, 10, 16, 2

        def __init__(self, parent):
            self.parent = parent

        def get_config(self):
            return classes[0].config_class(**TOKENS | fields)

        def prepare_config_and_inputs_for_common(self):
            ids = common.ids_tensor([3, 10], 64)
            return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    class Models(common.ModelTesterMixin, unittest.TestCase):
        all_model_classes = classes
        has_attentions = False

        def setUp(self):
            self.model_tester = Tester(self)

    return Models


if __name__ == "__main__":
    common, suite = library_tests(sys.argv[1]), unittest.TestSuite()
    cases = [(test_case(common, SIZES | fields), LEFT_OUT + ROTARY) for fields in ({}, VARIANTS["memory"])]
    cases.append((test_case(common, SIZES | HYBRID), LEFT_OUT))
    for kind, left_out in (("s5", LEFT_OUT), ("lru", LEFT_OUT), ("s4d", LEFT_OUT + LEFT_OUT_OF_S4D)):
        shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
        cases.append((test_case(common, shape | {"parameterization": kind}, DIAGONAL), left_out))
    for cls, left_out in cases:
        names = unittest.defaultTestLoader.getTestCaseNames(cls)
        suite.addTests(cls(name) for name in names if name not in left_out)
    result = unittest.TextTestRunner(verbosity=0).run(suite)
    sys.exit(not result.wasSuccessful() or result.testsRun - len(result.skipped) < 150)
