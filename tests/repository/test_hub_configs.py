# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""hub_configs/: every configuration is whole, loads, runs and can be published; the released model is as it says."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import BLOCK, ROOT, randomise
from huggingface_hub import ModelCard
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from essm_train.publish.hub import split_files
from essm_train.publish.model_card import SECTIONS, check_template, write_model_card
from modeling_essm import ESSMConfig, ESSMForCausalLM, build_byte_tokenizer
from modeling_essm.budgets import read_profile

FOLDER = ROOT / "hub_configs"
RELEASED = "essm-novels-6m"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json") if path.parent.name != RELEASED)
# The same in small: everything that a loader could stumble over, without the millions of numbers.
SMALL = {"hidden_size": 8, "intermediate_size": 8, "gate_hidden_size": 8, "num_hidden_layers": 1}
SMALL |= {"layer_types": ["linear_attention"]}


def fields(record: dict) -> dict:
    return {key: v for key, v in record.items() if key not in ("auto_map", "transformers_version", "_name_or_path")}


def auto_class(config):
    return AutoModelForCausalLM if "CausalLM" in config.architectures[0] else AutoModelForSequenceClassification


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_is_whole_and_as_large_as_its_page_says(name):
    folder, config = FOLDER / name, AutoConfig.from_pretrained(FOLDER / name)
    assert fields(json.loads((folder / "config.json").read_text())) == fields(json.loads(config.to_json_string()))
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    sizes = " | ".join(f"{count / 1e6:.1f}M" for count in (model.num_parameters(), model.num_active_parameters(2)))
    shape = f"{config.num_hidden_layers} x {config.hidden_size}"
    row = f"| `{name}` | {sizes} | {config.block} | {shape} | {config.filter_length:,} |"
    assert row in (FOLDER / "README.md").read_text()
    assert check_template((folder / "README.md").read_text()).data.license == "apache-2.0"
    assert not any(path.is_symlink() for path in folder.iterdir())
    if "Pair" in config.architectures[0]:  # a class of the training library
        assert [*folder.glob("*.py")] == []
    else:
        assert [path.read_bytes() for path in folder.glob("*.py")] == [(FOLDER / RELEASED / "essm.py").read_bytes()]
        assert json.loads((folder / "config.json").read_text())["auto_map"] == {
            auto: reference.replace(reference.split(".")[0], "essm") for auto, reference in config.auto_classes.items()
        }
    if config.vocab_size == 259 and config.num_input_features is None:
        made = build_byte_tokenizer(model_max_length=config.filter_length)
        saved = AutoTokenizer.from_pretrained(folder)
        assert saved.backend_tokenizer.to_str() == made.backend_tokenizer.to_str()
        assert saved.model_max_length == made.model_max_length


def test_the_21m_configuration_is_the_papers():
    config = AutoConfig.from_pretrained(FOLDER / "essm-21m")
    paper = ESSMConfig(architectures=config.architectures, dtype=torch.float32)
    assert fields(config.to_dict()) == fields(paper.to_dict())


@pytest.mark.parametrize("name", ["essm-tiny", "essm-lra-listops", "essm-lra-image", "essm-audio"])
def test_a_saved_model_with_its_card_can_be_published(name, tmp_path):
    """What README.md there tells to do, with a smaller model; and the card's example runs as it stands."""
    source, folder = FOLDER / name, tmp_path / "model"
    config = AutoConfig.from_pretrained(source, **SMALL)
    model = randomise(auto_class(config).from_config(config)).eval()
    model.save_pretrained(folder)
    for auto, file in ((AutoTokenizer, "tokenizer.json"), (AutoFeatureExtractor, "preprocessor_config.json")):
        if (source / file).exists():
            auto.from_pretrained(source).save_pretrained(folder)
    card_path = write_model_card(
        folder, sweep=None, training=None, hub_model_id="org/it", template=source / "README.md"
    )
    files, _ = split_files(folder)
    assert {"README.md", "config.json", "model.safetensors", "modeling_essm.py"} <= set(files)
    assert ("generation_config.json" in files) == hasattr(model, "lm_head")
    card, template = ModelCard(card_path.read_text()), ModelCard((source / "README.md").read_text())
    assert card.data.pipeline_tag == template.data.pipeline_tag and card.data.library_name == "transformers"
    assert not any(f"<!-- {section} -->" in card.text for section in SECTIONS)

    code = card.text.split("```python\n")[2].split("```")[0]
    code = code.replace('"org/it"', repr(str(folder))).replace("the 40 digits of the commit you have read", "main")
    variables: dict = {}
    exec(code, variables)
    with torch.no_grad():
        expected, got = (m(**variables["inputs"], spectral_budget=5).logits for m in (model, variables["model"]))
    assert torch.equal(expected, got)


WRITES = (
    BLOCK
    + """
import json, math, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
remote = {"trust_remote_code": True}
try:
    AutoModelForCausalLM.from_pretrained("copied", **remote)
except ImportError as error:
    assert "run `pip install .` in a clone" in str(error), error
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "Refuse"]  # from here on it is installed
for folder in ("zipped", "copied"):
    config = AutoConfig.from_pretrained(folder, **remote, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config, **remote)
AutoModelForCausalLM.from_config(config).save_pretrained("saved")
config.save_pretrained("saved_config")
assert type(AutoModel.from_pretrained("saved", **remote)).__name__ == "ESSMModel"
for folder in ("saved", "saved_config"):
    AutoConfig.from_pretrained(folder, **remote)
    named = json.loads((Path(folder) / "config.json").read_text())["auto_map"].values()
    assert not any(name.startswith("essm.") for name in named)
    assert all((Path(folder) / f"{name.split('.')[0]}.py").exists() for name in named), named
model = AutoModelForCausalLM.from_pretrained("released", **remote)
tokenizer = AutoTokenizer.from_pretrained("released", **remote)
ids = tokenizer(sys.argv[1], return_tensors="pt").input_ids
for K in (2, 4, model.config.num_spectral_channels):
    written = model.generate(ids, spectral_budget=K, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        print(K, written.shape[1] - ids.shape[1], model(ids, labels=ids, spectral_budget=K).loss.item() / math.log(2))
"""
)
PROSE = (
    "She looked at him for a moment without speaking, and then she turned away to the window and said that she would "
    "go to London in the morning, and that nothing he could say would change her mind."
)


def test_any_copy_loads_by_the_package_and_writes_its_code(tmp_path):
    """And says what it needs where the package is not. The released model has learnt: a trigram needs 2.9 bits."""
    shutil.copytree(FOLDER / "essm-tiny", tmp_path / "copied", symlinks=True)
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", FOLDER / "essm-tiny")
    shutil.unpack_archive(archive, tmp_path / "zipped")
    shutil.copytree(FOLDER / RELEASED, tmp_path / "released")
    for name in ("copied", "zipped", "released"):  # unasked, by classes that are imported
        config = AutoConfig.from_pretrained(tmp_path / name)
        with torch.device("meta"):
            assert isinstance(AutoModelForCausalLM.from_config(config), ESSMForCausalLM)
    env = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITES, PROSE]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert [int(K) for K, _, _ in rows] == [2, 4, 8] and {new for _, new, _ in rows} == {"8"}
    assert all(float(bits) < 2.2 for _, _, bits in rows), rows


def test_the_released_models_card_says_what_was_measured():
    folder = FOLDER / RELEASED
    card, sweep = (folder / "README.md").read_text(), json.loads((folder / "budget_sweep.json").read_text())
    assert all(f"{bits:.4f}" in card for bits in sweep["bits_per_byte"])
    config, profile = AutoConfig.from_pretrained(folder), json.loads((folder / "budget_profile.json").read_text())
    assert profile["quality"]["budgets"] == sweep["budgets"] and sweep["budgets"][-1] == config.num_spectral_channels
    assert config.budget_presets == read_profile(folder).presets()
    assert config.budget_presets["medium"] == sweep["sweet_spot"]
    assert all(f"`{preset}` ({budget})" in card for preset, budget in config.budget_presets.items())
    assert f'folder = "hub_configs/{RELEASED}"' in card


def test_listops_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "essm-lra-listops")
    assert len(tokenizer) == 16 == AutoConfig.from_pretrained(FOLDER / "essm-lra-listops").vocab_size
    batch = tokenizer(["[MAX 2 9 [MIN 4 7 ] 0 ]", "[SM 1 ]"], padding=True)
    assert batch["input_ids"] == [[11, 2, 9, 10, 4, 7, 14, 0, 14], [13, 1, 14, 15, 15, 15, 15, 15, 15]]
    assert batch["attention_mask"][1] == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert tokenizer.decode([12, 3, 14]) == "[MED 3 ]"
    with pytest.raises(Exception, match="Missing"):
        tokenizer("[MAX 2 ( ]")
