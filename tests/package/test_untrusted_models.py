# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Code that lies beside weights runs only where it is asked for. The code here leaves a file when it runs."""

import contextlib
import json

import pytest
import torch
from helpers import random_ids, random_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from essm_train.models import load_model
from modeling_essm import ESSMForCausalLM, build_byte_tokenizer

FOREIGN = """
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedModel

Path(MARKER).touch()


class Config(PreTrainedConfig):
    model_type = "foreign"


class Model(PreTrainedModel):
    config_class = Config
"""


@pytest.mark.parametrize("auto", [AutoConfig, AutoModel, AutoModelForCausalLM], ids=lambda auto: auto.__name__)
def test_a_model_of_an_unknown_type_runs_its_code_with_leave_alone(auto, tmp_path):
    marker = tmp_path / "the code ran"
    (tmp_path / "their_code.py").write_text(FOREIGN.replace("MARKER", repr(str(marker))))
    auto_map = dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), "their_code.Model")
    config = {"model_type": "foreign", "auto_map": auto_map | {"AutoConfig": "their_code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="give --trust_remote_code"):
        load_model(auto, tmp_path)
    assert not marker.exists()
    with contextlib.suppress(OSError):  # there are no weights
        load_model(auto, tmp_path, trust_remote_code=True)
    assert marker.exists()
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    with pytest.raises(ValueError, match="unheard of"):  # as it is
        load_model(auto, tmp_path)


@pytest.mark.parametrize("trust", [False, True])
def test_our_own_checkpoint_needs_none_of_its_code(trust, tmp_path):
    """Config, model and tokenizer are read by this package, whatever the files say."""
    model, ids, marker = random_model(), random_ids(1, 9), tmp_path / "the code ran"
    model.save_pretrained(tmp_path)
    build_byte_tokenizer(512).save_pretrained(tmp_path)
    for path in tmp_path.glob("*.py"):
        path.write_text(f"open({str(marker)!r}, 'w')\n{path.read_text()}")
    loaded = load_model(AutoModelForCausalLM, tmp_path, trust_remote_code=trust)
    assert type(loaded) is ESSMForCausalLM and torch.equal(loaded(ids).logits, model(ids).logits)
    load_model(AutoTokenizer, tmp_path, trust_remote_code=trust)
    assert not marker.exists()
