# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What must hold of every class of the package, whoever wrote it: packed rows, smoothed labels, hidden numbers."""

import pytest
import torch
from helpers import assert_close, random_ids, random_model, randomise, trainer_arguments
from recurrences import diagonal_model
from transformers import DataCollatorWithFlattening, Trainer

from essm_train.baselines.ar_stu import ARSTUForCausalLM, ARSTUForPairClassification, ARSTUForSequenceClassification
from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM, BaselineForSequenceClassification
from essm_train.pairs import ESSMForPairClassification
from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel
from modeling_essm.companions import (
    DiagonalSSMForCausalLM,
    DiagonalSSMForSequenceClassification,
    DiagonalSSMModel,
    ElasticStateConfig,
    ElasticStateModel,
)

SPECTRAL = (ESSMModel, ESSMForCausalLM, ESSMForSequenceClassification, ESSMForPairClassification)
AR_STU = (ARSTUForCausalLM, ARSTUForSequenceClassification, ARSTUForPairClassification)
DIAGONAL = (DiagonalSSMModel, DiagonalSSMForCausalLM, DiagonalSSMForSequenceClassification)
BASELINES = (BaselineForCausalLM, BaselineForSequenceClassification)
DOCUMENTS = [random_ids(n, seed=n) for n in (5, 1, 6)]


def baseline(architecture, cls=BaselineForCausalLM, **fields):
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64, "num_labels": 3}
    torch.manual_seed(0)
    return randomise(cls(BaselineConfig(architecture=architecture, **shape | fields))).eval()


class Derived(ESSMForCausalLM):
    """As a user's, or the one that FSDP2 makes."""


EVERY = {cls.__name__: (lambda cls=cls: random_model(cls)) for cls in (*SPECTRAL, *AR_STU)}
EVERY |= {cls.__name__: (lambda cls=cls: diagonal_model("s5", cls, vocab_size=259)) for cls in DIAGONAL}
EVERY |= {cls.__name__: (lambda cls=cls: baseline("transformer", cls)) for cls in BASELINES}
EVERY["derived ForCausalLM"] = lambda: random_model(Derived)
EVERY["ElasticStateModel"] = lambda: ElasticStateModel(ElasticStateConfig(num_input_features=5)).eval()


def inputs_of(model, ids):
    """(1, L) ids, as the kind of input that a model reads: a number of each id in every feature."""
    if model.main_input_name == "input_features":
        return {"input_features": (ids[..., None] / 128 - 1).expand(*ids.shape, 5)}
    pairs = isinstance(model, ESSMForPairClassification)
    return {"input_ids": ids[:, None].expand(-1, 2, -1) if pairs else ids}


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_packed_rows_are_read_or_refused(name):
    """Every document as if alone, or an error with the argument's name."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = dict(collator([{"input_ids": ids.tolist()} for ids in DOCUMENTS]))
    batch["cu_seqlens"] = batch["cu_seq_lens_q"]
    model = EVERY[name]()
    for how in ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seqlens"):
        try:
            packed = model(**inputs_of(model, batch["input_ids"]), **{how: batch[how]})[0]
        except (ValueError, TypeError) as error:
            assert "packed sequences" in str(error) or how in str(error)
            assert not isinstance(model, (ESSMModel, ESSMForCausalLM))
            continue
        alone = [model(**inputs_of(model, ids[None]))[0] for ids in DOCUMENTS]
        assert_close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("name", [name for name in EVERY if name.endswith("ForCausalLM")])
@torch.no_grad()
def test_label_smoothing_predicts_the_next_token(name, tmp_path):
    """Where the library does not know a class by its name, smoothed labels are those of the present token."""
    model, ids, epsilon = EVERY[name](), random_ids(2, 9), 0.1
    trainer = Trainer(model, trainer_arguments(tmp_path, label_smoothing_factor=epsilon))
    loss = trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    log_p = model(ids).logits[:, :-1].log_softmax(-1)
    nll = -log_p.gather(-1, ids[:, 1:, None]).mean()
    assert_close(loss, (1 - epsilon) * nll + epsilon * -log_p.mean())
    assert trainer._loss_shifts_labels  # by which it counts what an update predicts


def test_numbers_behind_a_mask_are_not_read():
    model = baseline("transformer", BaselineForSequenceClassification, num_input_features=5)
    assert model.main_input_name == "input_features" and not model.supports_context_parallel
    mask, x = torch.ones(2, 12), torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0))
    mask[0, 9:] = 0
    results = []
    for filling in (0.0, float("nan")):
        model.zero_grad()
        given = x.masked_fill(mask[..., None] == 0, filling).requires_grad_()
        outputs = model(input_features=given, attention_mask=mask, labels=torch.tensor([0, 1]))
        outputs.loss.backward()
        results.append([outputs.logits, given.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *results)) and all(tensor.isfinite().all() for tensor in results[1])


def test_a_network_without_checkpoints_says_so():
    for architecture in ("cnn", "tc_resnet"):
        model = baseline(architecture, BaselineForSequenceClassification, num_input_features=5)
        assert model.supports_gradient_checkpointing == (architecture == "cnn")
