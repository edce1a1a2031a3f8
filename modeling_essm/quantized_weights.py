# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Small weights: the matrices of an ES-SSM in 8 or 4 bits, everything else as it was, through torchao.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, quantization_config="int8")

Scales belong to a row of a matrix or to a part of one, in channel_mixing (K, D, E) to a row of one M_k. So nothing of
channel k depends on another channel, and the first channels of a quantised model are the quantised first channels: a
budget stays a prefix, in memory and on disk.

"int8" is torchao's Int8Tensor, one scale a row M_k[d, :] or output of a linear layer. "int4" is a tensor class of its
own, because those of torchao pack only for GPUs: what one input gives to up to 64 outputs is a group of entries q in
0..15 with an fp16 scale s and an fp16 bias b, value s q + b, laid out as torch's 4-bit embedding rows.

Kept in full precision: embedding and head, norms, biases, the gate's output layer, the short convolution and the
diagonal skip of the gated block, the projections of attention layers, and what AR-STU adds: its feedback amplifies
errors, and files of torchao 0.18 confuse names that begin alike. So are matrices whose rows are shorter than 16, which
would spend on scales what they save: with `mixing_size` below 16 the M_k, of which a diagonal holds little; in "int4"
also rows that 16 does not divide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .channels import QUANTIZED_TENSOR

FORMATS = ("int8", "int4")
GROUP_SIZE = 64  # of int4: 4.5 bits a weight, scales included
_LEAST_GROUP = 16  # smaller ones would spend more on scales than they save

# Parameters of a layer that are quantised, as torchao matches names.
_MATRICES = (
    rf"re:(.+\.)?layers\.\d+\.mixer\.{QUANTIZED_TENSOR}",
    r"re:(.+\.)?layers\.\d+\.(mixer\.(skip|gate_in)|ffn\.(up|down)|in_proj|out_proj)\.weight",
)
INSTALL = "quantised weights need torchao: pip install 'torchao>=0.18'"


def essm_quantization(name: str) -> Any:
    """The `TorchAoConfig` of a format, for `from_pretrained(.., quantization_config=..)`, which takes the name as well.

    Args:
        name: one of FORMATS.
    Raises:
        ValueError: another name. ImportError: no torchao, saying what to install.
    """
    if name not in FORMATS:
        raise ValueError(f"quantization_config as a name must be one of {FORMATS}, got {name!r}")
    register_formats()
    from transformers import TorchAoConfig

    try:
        from torchao.quantization import FqnToConfig
    except ImportError as error:
        raise ImportError(INSTALL) from error
    config = globals()[{"int8": "ESSMInt8Config", "int4": "ESSMInt4Config"}[name]]()
    return TorchAoConfig(FqnToConfig({key: config for key in _MATRICES}), modules_to_not_convert=["lm_head", "score"])


# ---------------------------------------------------------------------------------------------------------------------
# What the model does with quantised weights.


def is_quantized(weight: Tensor) -> bool:
    """Whether it is one of the tensor classes of quantised weights."""
    return hasattr(weight, "qdata")


def dequantize(weight: Any, num_channels: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An ordinary tensor of the first `num_channels` slices of a quantised weight (all by default).

    Nothing behind them is read. Works under `torch.inference_mode`, where slicing a quantised tensor does not.
    """
    dtype = weight.dtype if dtype is None else dtype
    qdata = weight.qdata[:num_channels]
    if type(weight).__name__ == "ESSMInt4Tensor":
        values = unpack_rows(qdata, dtype)
        return values if weight.ndim == 3 else values.T
    if type(weight).__name__ != "Int8Tensor" or weight.scale.shape != (*weight.shape[:-1], 1):
        raise ValueError(f"channel_mixing must be quantised as {FORMATS}, got {type(weight).__name__}")
    return (qdata.to(weight.scale.dtype) * weight.scale[:num_channels]).to(dtype)


def quantized_product(x: Tensor, weight: Any) -> Tensor:
    """x (.., K D) times the first K channels of a quantised weight (>= K, D, E), flattened to (K D, E): (.., E).

    For the few rows of a decoding step: not the int8 weights are scaled but x; a single row on a CPU reads int4 weights
    as they are stored.
    """
    K = x.shape[-1] // weight.shape[1]
    if hasattr(weight, "scale"):
        scaled = x * weight.scale[:K].to(x.dtype).view(-1)
        return scaled @ weight.qdata[:K].to(x.dtype).flatten(0, 1)
    if _is_single(x):
        return _row_sum(x, weight.qdata[:K].flatten(0, 1))
    return x @ dequantize(weight, K, x.dtype).flatten(0, 1)


def _is_single(x: Tensor) -> bool:
    """Whether x is one row that torch's kernel for 4-bit rows takes."""
    if x.shape[-1] != x.numel() or x.dtype != torch.float32 or x.device.type != "cpu" or _BAG is None:
        return False
    return not (x.requires_grad or torch.compiler.is_compiling() or torch.compiler.is_exporting())


def _row_sum(x: Tensor, rows: Tensor) -> Tensor:
    """x (.., R), a single row, times packed rows (R, G, b): (.., E). Each group is a bag of its own."""
    R, G, _ = rows.shape
    indices, offsets = _bags(R, G)
    weights = x.reshape(1, R).expand(G, R).flatten()
    return _BAG(rows.flatten(0, 1), indices, offsets, False, 0, False, weights, None, False).view(*x.shape[:-1], -1)


@functools.lru_cache(maxsize=256)
def _bags(num_rows: int, num_groups: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # cached for the life of the process; group j of row r stands at r G + j
        count = functools.partial(torch.arange, dtype=torch.int32, device="cpu")
        return count(num_rows * num_groups).view(num_rows, num_groups).T.flatten(), count(num_groups) * num_rows


_BAG: Any = getattr(torch.ops.quantized, "embedding_bag_4bit_rowwise_offsets", None)


def weight_bytes(weight: Tensor) -> int:
    """Bytes that a weight occupies, with its scales; `nbytes` of a quantised one tells those of its logical dtype."""
    return sum(part.nbytes for part in parts(weight))


def parts(weight: Any) -> list[Tensor]:
    """The ordinary tensors of which a weight consists."""
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]] if is_quantized(weight) else [weight]


# ---------------------------------------------------------------------------------------------------------------------
# int4: the arithmetic, and the place of both formats in torchao.


def pack_rows(weight: Tensor, group_size: int) -> Tensor:
    """(.., E) weights to (.., E / g, g / 2 + 4) uint8 groups: g entries, low half first, fp16 scale, fp16 bias."""
    groups = weight.detach().float().unflatten(-1, (-1, group_size))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    bias = low.half()
    scale = ((high - bias.float()) / 15).half()
    step = torch.where(scale > 0, scale, 1.0).float()
    q = ((groups - bias.float()) / step).round().clamp(0, 15).to(torch.uint8)
    return torch.cat([q[..., ::2] | q[..., 1::2] << 4, torch.cat([scale, bias], -1).view(torch.uint8)], -1)


def unpack_rows(qdata: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights (.., E) that `pack_rows` stored, in a floating dtype; computed in fp32."""
    q, (scale, bias) = qdata[..., :-4], qdata[..., -4:].contiguous().view(torch.float16).float().split(1, -1)
    entries = torch.stack([q & 15, q >> 4], -1).flatten(-2).float()
    return torch.addcmul(bias, entries, scale).flatten(-2).to(dtype)


def _int4_tensor_class(base: Any, fill_defaults: Callable) -> Any:
    """The class, of torchao.utils.TorchAOBaseTensor. Imports of torchao outside of a `try` would make it a requirement
    of every checkpoint's code (transformers' check_imports)."""

    class ESSMInt4Tensor(base):
        """Weights in 4 bits: (K, D, E), or (E, D) of a linear layer, whose transpose is stored.

        qdata: (K, D, E / g, g / 2 + 4) or (D, E / g, g / 2 + 4) uint8, as `pack_rows` makes it.
        """

        tensor_data_names: ClassVar = ["qdata"]
        tensor_attribute_names: ClassVar = ["dtype"]

        def __new__(cls, qdata: Tensor, dtype: torch.dtype):
            shape = (*qdata.shape[:-2], qdata.shape[-2] * 2 * (qdata.shape[-1] - 4))
            shape = shape if len(shape) == 3 else shape[::-1]
            return torch.Tensor._make_wrapper_subclass(
                cls, shape, dtype=dtype, device=qdata.device, requires_grad=False
            )

        def __init__(self, qdata: Tensor, dtype: torch.dtype):
            super().__init__()
            self.qdata = qdata

        def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
            return dequantize(self, dtype=output_dtype)

    @ESSMInt4Tensor.implements_torch_function(F.linear)
    def _(func, types, args, kwargs):
        x, weight, *bias = args
        if _is_single(x):
            y, bias = _row_sum(x, weight.qdata), [*bias, *(kwargs or {}).values(), None][0]
            return y if bias is None else y + bias
        return func(x, dequantize(weight, dtype=x.dtype), *bias, **(kwargs or {}))

    @ESSMInt4Tensor.implements(torch.ops.aten.slice.Tensor)
    def _(func, types, args, kwargs):
        weight, dim, start, end, step = fill_defaults(args, 5, [0, None, None, 1])
        if dim != 0 or weight.ndim != 3:
            raise NotImplementedError(f"int4 weights can be sliced by channels only, got dimension {dim}")
        return ESSMInt4Tensor(func(weight.qdata, 0, start, end, step), weight.dtype)

    return ESSMInt4Tensor


@functools.lru_cache(maxsize=1)
def register_formats() -> None:
    """Make ESSMInt4Tensor and the configs of both formats known to torchao and to files; nothing without torchao."""
    try:
        from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig
        from torchao.prototype.safetensors import safetensors_utils
        from torchao.quantization import Int8Tensor, PerRow
        from torchao.quantization.transform_module import register_quantize_module_handler
        from torchao.utils import TorchAOBaseTensor, fill_defaults
    except ImportError:
        return

    ESSMInt4Tensor = _int4_tensor_class(TorchAOBaseTensor, fill_defaults)

    @dataclass
    class ESSMInt8Config(AOBaseConfig):
        """Weight-only int8 of ES-SSM, a scale for each row; rows that are too short stay."""

    @dataclass
    class ESSMInt4Config(AOBaseConfig):
        """Weight-only int4 of ES-SSM, in groups of at most that size; where 16 does not divide a row it stays."""

        group_size: int = GROUP_SIZE

    @register_quantize_module_handler(ESSMInt8Config)
    @register_quantize_module_handler(ESSMInt4Config)
    def _(module, config, *, parameter_name: str = "weight"):
        weight: Any = getattr(module, parameter_name)
        if weight.ndim == 1:  # the diagonal skip of the gated block
            return module
        if isinstance(config, ESSMInt8Config):
            small = Int8Tensor.from_hp(weight, granularity=PerRow()) if weight.shape[-1] >= _LEAST_GROUP else None
        else:
            rows = weight if weight.ndim == 3 else weight.T
            group_size = math.gcd(rows.shape[-1], config.group_size)
            small = ESSMInt4Tensor(pack_rows(rows, group_size), weight.dtype) if group_size >= _LEAST_GROUP else None
        if small is not None:
            setattr(module, parameter_name, torch.nn.Parameter(small, requires_grad=False))
        return module

    # Where torchao looks for the classes named in config.json and in safetensors files. Each copy of this module, in
    # the package and beside a model, has classes of its own; files name no copy, so the first one reads them all.
    for cls in (ESSMInt4Tensor, ESSMInt8Config, ESSMInt4Config):
        cls.__qualname__ = cls.__name__
        globals()[cls.__name__] = cls
    ALLOWED_AO_MODULES.add(__name__)
    if "ESSMInt4Tensor" not in safetensors_utils.ALLOWED_TENSORS_SUBCLASSES:
        safetensors_utils.ALLOWED_TENSORS_SUBCLASSES.append("ESSMInt4Tensor")
    safetensors_utils.ALLOWED_CLASSES.setdefault("ESSMInt4Tensor", ESSMInt4Tensor)
