# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Positions of an elastic state model that do not exist: they change nothing, and what lies there is not read."""

import torch
from elastic_states import FIELDS, random_inputs, random_model, run, smooth


def test_padding_does_not_exist():
    model, x = random_model(history_length=2), random_inputs(3, 8, 5)
    model.set_objective(smooth)
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, :3], mask[1, 6:], mask[2, 2:4] = 0, 0, 0
    output = run(model, x, attention_mask=mask, use_cache=True)
    total = count = 0
    for i in range(3):
        real = mask[i].bool()
        alone = run(model, x[i : i + 1, real])
        for name in FIELDS:
            torch.testing.assert_close(output[name][i, real], alone[name][0], rtol=0, atol=1e-12)
        assert (output.refine_depths[i, ~real] == 0).all()
        last = alone.latents[0, -1]
        torch.testing.assert_close(output.past_key_values.states[0][i], last, rtol=0, atol=1e-12)
        total, count = total + alone.loss * real.sum(), count + real.sum()
    torch.testing.assert_close(output.loss, total / count)
    forced = run(model, x, attention_mask=mask, refine_depth=2)
    assert torch.equal(forced.refine_depths, 2 * mask) and forced.gradient_calls == 2 * mask.sum()


class SinceTheFirst:
    """The distance from the observation before the first step, as a history of its own; not its square."""

    def initial_history(self, observation):
        return observation

    def commit(self, history, y, observation):
        return history

    def __call__(self, y, observation, history):
        return (y - history).square().sum(-1).sqrt()


def test_padding_before_the_first_position_does_not_exist():
    """Not as the first observation, nor as a gradient of the norm of zero: nothing is read and nothing observed."""
    model, x = random_model(), random_inputs(2, 5, 5)
    model.set_objective(SinceTheFirst())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()  # so that y is 0 where nothing was read
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    padded, alone = run(model, x, attention_mask=mask), run(model, x[:1, 2:])
    torch.testing.assert_close(padded.losses[0, 2:], alone.losses[0], rtol=0, atol=1e-12)
    assert torch.equal(padded.refine_depths[0, 2:], alone.refine_depths[0]) and alone.refine_depths.any()
    model.train().set_objective(lambda y, observation, history: (y - observation).square().sum(-1).sqrt())
    model(x, attention_mask=mask).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_what_lies_at_positions_that_do_not_exist_is_not_read():
    model, x = random_model().train(), random_inputs(2, 4, 5)
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]])
    grads = []
    for filling in (0.0, float("nan")):
        filled = x.masked_fill(mask[..., None] == 0, filling)
        model.zero_grad()
        model(filled, attention_mask=mask).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
