# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""One model at several sizes, side by side in the browser, and at a size that follows a deadline.

    pip install -r examples/space/requirements.txt && python examples/space/app.py [folder or Hub name]

The model is the argument, else the variable ESSM_MODEL, else the released one. Only a Hub name needs the network.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gradio as gr
import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent / "../.."
sys.path.append(str(ROOT))  # a clone's package, unless it is installed or lies beside this file

from modeling_essm import ESSMCache, ESSMForCausalLM  # noqa: E402
from modeling_essm.decoding import DeadlineBudget  # noqa: E402

source = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("ESSM_MODEL", str(ROOT / "hub_configs/essm-novels-6m"))
model = ESSMForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(source)
config, capacity = model.config, model.config.num_spectral_channels
ends = model.generation_config.eos_token_id
SIZES = [(f"{name} (K = {K})", name) for name, K in (config.budget_presets or {}).items()]
SIZES += [(f"K = {K}", str(K)) for K in range(1, capacity + 1)]
REDRAW = 0.1  # seconds
LONGEST = 4000  # characters of a prompt


class Writer:
    """Continues a prompt by a token at a time, at the budget that `budget_of(step)` names; the state has that room.

    Attributes: tokens, and the budget of each; seconds of all steps but the first, which reads the prompt; ended.
    """

    def __init__(
        self, prompt: str, budget_of: Callable, room: int | str, count: int, temperature: float, seed: int
    ) -> None:
        if len(prompt) > LONGEST:  # the page's own limit holds in a browser only
            raise gr.Error(f"A prompt has at most {LONGEST} characters, got {len(prompt)}.")
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        if not ids.numel() and config.bos_token_id is None:
            raise gr.Error("This model needs a prompt: it has no token that begins a text.")
        self.ids = ids if ids.numel() else torch.tensor([[config.bos_token_id]])
        self.cache, self.random = ESSMCache(config, state_budget=room), torch.Generator().manual_seed(seed or 0)
        self.budget_of, self.count, self.temperature = budget_of, count, temperature
        self.tokens, self.budgets, self.seconds, self.ended = [], [], 0.0, False

    @torch.inference_mode()
    def advance(self) -> None:
        start, step = time.perf_counter(), len(self.tokens)
        budget = self.budget_of(step)
        outputs = model(self.ids, past_key_values=self.cache, spectral_budget=budget, logits_to_keep=1)
        logits = outputs.logits[:, -1]
        if self.temperature:
            self.ids = (logits / self.temperature).softmax(-1).multinomial(1, generator=self.random)
        else:
            self.ids = logits.argmax(-1, keepdim=True)
        self.tokens.append(int(self.ids))
        self.budgets.append(budget)
        self.seconds += time.perf_counter() - start if step else 0.0
        self.ended = step + 1 == self.count or self.tokens[-1] in (ends if isinstance(ends, list) else [ends])

    def figures(self) -> str:
        if not self.seconds:
            return ""
        weights, state = model.num_active_parameters(self.budgets[-1]), self.cache.num_bytes
        speed = f"**{(len(self.tokens) - 1) / self.seconds:.0f} tokens/s**"
        return f"{speed}, {weights / 1e6:.2f}M weights ({4 * weights / 1e6:.1f} MB), {state / 1e3:.0f} kB of state"


def compare(
    prompt: str, size_1: str, size_2: str, size_3: str, tokens: int, temperature: float, seed: int
) -> Iterator[list[str]]:
    """Texts of three sizes, then their figures. Each size gets the same time: the one that had least goes on."""
    sizes = [int(size) if size.isdigit() else size for size in (size_1, size_2, size_3)]
    writers = [Writer(prompt, lambda step, K=K: K, K, tokens, temperature, seed) for K in sizes]
    shown = time.perf_counter()
    while running := [writer for writer in writers if not writer.ended]:
        min(running, key=lambda writer: writer.seconds).advance()
        if (len(running) == 1 and running[0].ended) or time.perf_counter() - shown > REDRAW:
            texts = [tokenizer.decode(writer.tokens, skip_special_tokens=True) for writer in writers]
            yield texts + [writer.figures() for writer in writers]
            shown = time.perf_counter()


def keep_deadline(
    prompt: str, milliseconds: float, tokens: int, temperature: float, seed: int
) -> Iterator[tuple[list[tuple[str, str]], str]]:
    """The text in pieces of one budget each, named "K = 6"; figures of the last budget and the mean time of a token."""
    deadline = DeadlineBudget(model, milliseconds)
    writer, shown = Writer(prompt, deadline, capacity, tokens, temperature, seed), time.perf_counter()
    while not writer.ended:
        writer.advance()
        if writer.ended or time.perf_counter() - shown > REDRAW:
            runs = itertools.groupby(zip(writer.tokens, writer.budgets), key=lambda pair: pair[1])
            pieces, read, before = [], [], ""
            for K, run in runs:
                read += [token for token, _ in run]
                text = tokenizer.decode(read, skip_special_tokens=True).rstrip("\ufffd")  # a begun character waits
                pieces.append((text[len(before) :], f"K = {K}"))
                before = text
            times = [seconds for _, seconds in deadline.history]
            mean = f"**{1000 * sum(times) / len(times):.1f} ms a token**, K = {writer.budgets[-1]}: " if times else ""
            yield pieces, mean + writer.figures()
            shown = time.perf_counter()


with gr.Blocks(title="One model, many sizes") as page:
    gr.Markdown(
        "# One model, many sizes\n"
        f"A budget K reads the first K of the {capacity} channels of {model.num_parameters() / 1e6:.1f}M weights."
    )
    prompt = gr.Textbox("She looked at him, and", label="Prompt", lines=2, max_length=LONGEST)
    with gr.Accordion("Settings", open=False):
        count = gr.Slider(1, 1000, 300, step=1, precision=0, label="Tokens")
        temperature = gr.Slider(0, 1.5, 0.7, step=0.1, label="Temperature (0: always the likeliest token)")
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**53)
    how = [count, temperature, seed]
    with gr.Tab("Side by side"):
        gr.Markdown("Three sizes continue the prompt. Each gets the same time.")
        choices, texts, notes = [], [], []
        with gr.Row():
            write, stop = gr.Button("Write", variant="primary", min_width=120), gr.Button("Stop", min_width=120)
        with gr.Row():
            for i in range(3):
                with gr.Column(min_width=280):
                    choices.append(gr.Dropdown(SIZES, value=SIZES[i % len(SIZES)][1], label=f"Size {i + 1}"))
                    texts.append(gr.Textbox(label=f"Text of size {i + 1}", lines=8, max_lines=8))
                    notes.append(gr.Markdown())
        inputs, outputs = [prompt, *choices, *how], texts + notes
        running = write.click(compare, inputs, outputs, api_name="compare", concurrency_id="model")
        stop.click(None, cancels=running)
    with gr.Tab("Keep a deadline"):
        gr.Markdown("Each step runs the largest budget that keeps the mean time of a token within the deadline.")
        milliseconds = gr.Slider(1, 50, 5, step=0.5, label="Milliseconds a token")
        with gr.Row():
            write, stop = gr.Button("Write", variant="primary", min_width=120), gr.Button("Stop", min_width=120)
        text, note = gr.HighlightedText(label="Text, by its budget", show_legend=True), gr.Markdown()
        inputs, outputs = [prompt, milliseconds, *how], [text, note]
        running = write.click(keep_deadline, inputs, outputs, api_name="keep_deadline", concurrency_id="model")
        stop.click(None, cancels=running)

if __name__ == "__main__":
    page.launch(show_error=True)
