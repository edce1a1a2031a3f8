# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Complete text in the terminal, byte by byte, and change the budget while it runs.

    python examples/byte_terminal.py runs/train_clm/model [bytes per completion]

Type some text and Enter to have it continued. A number, or a size's name as "small", sets the budget, also while text
is coming; an empty line stops a completion, and at the prompt it leaves. After each completion or change it says how
fast and big it was.
"""

import codecs
import queue
import sys
import threading
import time

import torch

from modeling_essm import ESSMCache, ESSMForCausalLM
from modeling_essm.training.byte_tokenizer import VOCAB_SIZE

model = ESSMForCausalLM.from_pretrained(sys.argv[1]).eval()
if model.config.vocab_size != VOCAB_SIZE:
    sys.exit(f"a model of bytes has {VOCAB_SIZE} tokens, and this one {model.config.vocab_size}")
length = int(sys.argv[2]) if len(sys.argv) > 2 else 400
capacity = budget = model.config.num_spectral_channels
presets = model.config.budget_presets or {}
lines: queue.Queue = queue.Queue()
threading.Thread(target=lambda: [*map(lines.put, sys.stdin.buffer), lines.put(b"")], daemon=True).start()


def next_line() -> bytes:
    """The next line that was typed; b"" without an end of line at the end of input, and from then on."""
    if not (line := lines.get()):
        lines.put(line)
    return line


def budget_in(line: bytes) -> int | None:
    """The budget that a line says, by number or name; None of other text."""
    return max(1, min(int(line), capacity)) if line.isdigit() else presets.get(line.decode(errors="replace"))


def report(K: int, tokens: int, seconds: float, cache) -> None:
    if not tokens:
        return
    weights = model.num_active_parameters(K) * model.dtype.itemsize
    held = f"{weights / 2**20:.1f} MiB of weights read per token, {cache.num_bytes / 2**10:.0f} KiB of state"
    print(f"\n[K = {K}: {tokens / seconds:.0f} tokens/s, {held}]", flush=True)


@torch.inference_mode()
def complete(text: bytes) -> None:
    global budget
    decoder, ids = codecs.getincrementaldecoder("utf-8")("replace"), torch.tensor([list(text)])
    cache = ESSMCache(model.config, state_budget=capacity)  # room for every budget
    outputs = model(ids, past_key_values=cache, spectral_budget=capacity)
    running, tokens, start = budget, 0, time.perf_counter()
    for _ in range(length):
        token = torch.multinomial((outputs.logits[:, -1, :256] / 0.7).softmax(-1), 1)
        print(decoder.decode(bytes(token[0].tolist())), end="", flush=True)
        if not lines.empty():
            if (said := budget_in(next_line().strip())) is None:
                break
            report(running, tokens, time.perf_counter() - start, cache)
            running = budget = said
            tokens, start = 0, time.perf_counter()
        outputs = model(token, past_key_values=cache, spectral_budget=running)
        tokens += 1
    report(running, tokens, time.perf_counter() - start, cache)


while print(f"K = {budget} of {capacity}> ", end="", flush=True) or (typed := next_line().rstrip(b"\r\n")):
    if (said := budget_in(typed.strip())) is not None:
        budget = said
    else:
        complete(typed)
