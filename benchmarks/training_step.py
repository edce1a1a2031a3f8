# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What does a training step cost, beside a Transformer and a Mamba-2 of the same size from the same library?

    python -m benchmarks.training_step
    python -m benchmarks.training_step --length 1024 --batch 4

One step is forward, backward, AdamW and zero_grad on random bytes. ES-SSM is the paper's 21M-parameter model at K = 4
and K = 32; LlamaForCausalLM and Mamba2ForCausalLM have the same vocabulary and a parameter count within 5% of it, in
shapes usual for them. The models take turns. fp32 on the CPU, bf16 autocast over fp32 weights on a GPU.

Mamba2ForCausalLM runs transformers' pure torch path wherever the mamba_ssm kernels are not installed, always on a CPU:
its figure then is that path's, not the architecture's. A model whose step would exceed --memory, extrapolated from
shorter lengths, is measured at the longest length that fits, and the output says so.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from modeling_essm import ESSMConfig, ESSMForCausalLM

from . import common

IDS = {"vocab_size": 259, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258, "tie_word_embeddings": True}


def make_models(length: int, quick: bool) -> dict[str, torch.nn.Module]:
    """The three models at matched parameter counts."""
    if quick:
        essm = ESSMConfig(hidden_size=64, num_hidden_layers=2, filter_length=max(length, 512))
        llama = {"hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 208, "num_attention_heads": 2}
        mamba = {"hidden_size": 64, "num_hidden_layers": 11, "num_heads": 4, "head_dim": 32, "state_size": 32}
    else:
        essm = ESSMConfig(filter_length=max(length, 4096))
        llama = {"hidden_size": 384, "num_hidden_layers": 12, "intermediate_size": 1024, "num_attention_heads": 6}
        mamba = {"hidden_size": 384, "num_hidden_layers": 22, "num_heads": 12, "head_dim": 64, "state_size": 128}
    torch.manual_seed(0)
    return {
        "ES-SSM": ESSMForCausalLM(essm),
        "Llama": LlamaForCausalLM(LlamaConfig(**IDS, **llama, max_position_embeddings=length)),
        "Mamba-2": Mamba2ForCausalLM(Mamba2Config(**IDS, **mamba, n_groups=1, use_cache=False)),
    }


def make_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int, length: int, arguments: dict
) -> Callable[[], torch.Tensor]:
    """A call that makes one whole training step."""
    device = next(model.parameters()).device
    tokens = torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False, **arguments).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def check(model: ESSMForCausalLM, length: int, device: torch.device) -> float:
    """Gradients of the first layer's M_k by `chunked` and by the paper's FFT must agree in fp32; raises otherwise."""
    tokens = torch.randint(0, 256, (1, min(length, 512)), device=device)
    gradients = []
    for algorithm in ("fft", "chunked"):
        for layer in model.model.layers:
            layer.mixer.algorithm = algorithm
        loss = model(input_ids=tokens, labels=tokens).loss
        gradients += torch.autograd.grad(loss, model.model.layers[0].mixer.channel_mixing)
    expected, actual = gradients
    return common.require_close("gradient of channel_mixing by chunked and by FFT", actual, expected, 1e-3)


def peaks_that_fit(make: Callable[[int], Callable], longest: int, limit: int, device: torch.device) -> dict[int, int]:
    """Peak bytes at longest / 8 and its doubles, while memory that keeps growing as it did would stay in the limit."""
    length, growth, peaks = max(1, longest // 8), 2.0, {}
    make(length)()  # the optimizer's moments and other lasting things exist from here on
    while True:
        peaks[length] = common.peak_memory(make(length), device)
        if length // 2 in peaks:
            growth = max(2.0, peaks[length] / peaks[length // 2])
        if 2 * length > longest or peaks[length] * growth > limit:
            return peaks
        length *= 2


def main(argv: list[str] | None = None) -> dict:
    p = common.parser(__doc__)
    p.add_argument("--length", type=int, default=None)
    p.add_argument("--batch", type=int, default=None)
    p.add_argument("--memory", type=float, default=None, help="GiB a step may take; default 12 on a CPU, 100 on a GPU")
    args = p.parse_args(argv)
    gpu = common.pick_device(args.device).type == "cuda"
    length = args.length or (128 if args.quick else 4096)
    batch = args.batch or (8 if gpu and not args.quick else 1)
    limit = int((args.memory or (100 if gpu else 12)) * 2**30)
    dtype = "bfloat16 autocast" if gpu else "float32"
    rounds = min(args.rounds, 7 if gpu else 3)
    settings = {"length": length, "batch": batch, "dtype": dtype, "warmup": 1, "rounds": rounds}
    device, report = common.start("training_step", args, **settings, threads=torch.get_num_threads())
    common.check_peak_memory(device)
    models = {name: model.to(device).train() for name, model in make_models(length, args.quick).items()}
    report["parameters"] = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    print("parameters: " + ", ".join(f"{name} {count}" for name, count in report["parameters"].items()))
    kernels = gpu and importlib.util.find_spec("mamba_ssm") is not None
    report["mamba2_path"] = "mamba_ssm kernels" if kernels else "pure torch"
    print(f"Mamba-2 runs on: {report['mamba2_path']}" + ("" if kernels else " (not its architecture's best speed)"))
    report["gradient_error"] = check(models["ES-SSM"], length, device)
    print(f"gradients by chunked and by FFT agree to {report['gradient_error']:.1e}")

    makers = {f"ES-SSM K={K}": ("ES-SSM", {"spectral_budget": K}) for K in (4, 32)}
    makers |= {"Llama": ("Llama", {}), "Mamba-2": ("Mamba-2", {})}
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for name, m in models.items()}
    steps, lengths, memory = {}, {}, {}
    for label, (name, arguments) in makers.items():
        make = functools.partial(make_step, models[name], optimizers[name], batch, arguments=arguments)
        memory[label] = peaks_that_fit(make, length, limit, device)
        lengths[label] = max(memory[label])
        steps[label] = make(lengths[label])
        if lengths[label] < length:
            print(f"{label} does not fit {limit / 2**30:.0f} GiB at L = {length}: measured at L = {lengths[label]}")
    seconds = common.paired(steps, device, rounds, warmup=1, limit_seconds=240.0)
    rows, report["results"] = [], []
    for label, samples in seconds.items():
        rate = common.spread([batch * lengths[label] / s for s in samples])
        peak = memory[label][lengths[label]]
        relative = common.ratio(seconds["ES-SSM K=32"], samples) if lengths[label] == length else None
        report["results"].append(
            {
                "model": label,
                "length": lengths[label],
                "seconds": common.spread(samples),
                "tokens_per_second": rate,
                "peak_bytes": peak,
                "peak_bytes_by_length": memory[label],
                "speed_over_essm_32": relative,
            }
        )
        speed = "{median:.2f}({min:.2f}-{max:.2f})".format(**relative) if relative else "-"
        shown = "{median:.0f}({min:.0f}-{max:.0f})".format(**rate)
        rows.append(
            [
                label.replace(" ", "_"),
                batch,
                lengths[label],
                common.ms(common.spread(samples)),
                shown,
                speed,
                f"{peak / 2**20:.0f}",
            ]
        )
    common.table("model batch L step_ms(min-max) tokens/s(min-max) speed/ES-SSM_K=32 peak_MiB", rows)
    counts = report["parameters"]
    worst = max(abs(count / counts["ES-SSM"] - 1) for count in counts.values())
    report["targets"] = [common.target("parameter counts apart, worst", worst, most=0.05)]
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
