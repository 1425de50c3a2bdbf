"""Quantises a tiny checkpoint into the layouts of public ones, in plain torch and without the loader's code.

    encode(model_dir, out, "awq", group=32) -> directory of the same weights, dequantised, in F32

The packing follows the tools that write such files: AutoAWQ's "gemm" kernel, AutoGPTQ / GPTQModel, AutoRound,
DeepSeek's block-wise fp8, compressed-tensors, NVIDIA's Model Optimizer, vLLM's w8a8.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_PROJECTIONS = re.compile(r"((?<!eh)_proj(_with_mqa|_qkvz?|_z)?|\.w[123])\.weight$")
_ALL_EXPERTS = re.compile(r"experts\.(gate_up|down)_proj$")
_GATES = re.compile(r"in_proj_[ba]\.weight$")

Encoded = tuple[dict[str, Tensor], Tensor]  # tensors by the last part of their name; the weight that they encode


def encode(
    model_dir: Path, out: Path, layout: str, *, keep: tuple[str, ...] = (), gates: bool = False, **options: Any
) -> Path:
    """Write `out` and `out`-plain, and return the latter.

    keep: parts of names of modules that stay floats. gates: b and a of delta nets are quantised with the rest.
    """
    tensors = {name: tensor for path in model_dir.glob("*.safetensors") for name, tensor in load_file(path).items()}
    encoder, config = LAYOUTS[layout](keep=list(keep), **options)
    coded: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if layout == "mxfp4" and _ALL_EXPERTS.search(name):  # [experts, in, out]
            parts, values = encoder(tensor.float().mT)
            coded |= {f"{name}_{end}": part.contiguous() for end, part in parts.items()}
            plain[name] = values.mT.contiguous()
            continue
        chosen = _PROJECTIONS.search(name) or (gates and _GATES.search(name))
        if layout != "mxfp4" and tensor.ndim == 2 and chosen and not any(part in name for part in keep):
            parts, plain[name] = encoder(tensor.float())
            coded |= {f"{module}.{end}": part.contiguous() for end, part in parts.items()}
        else:
            coded[name], plain[name] = tensor, tensor.float()
    files = Path(f"{out}-plain")
    for where, held, extra in ((out, coded, {"quantization_config": config}), (files, plain, {"dtype": "float32"})):
        shutil.copytree(model_dir, where, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(held, where / "model.safetensors", metadata={"format": "pt"})
        raw = json.loads((model_dir / "config.json").read_text())
        raw.pop("torch_dtype", None)
        (where / "config.json").write_text(json.dumps({"dtype": "bfloat16"} | raw | extra))
    return files


def _groups(
    weight: Tensor, group: int, symmetric: bool, bits: int = 4, scales_in: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes [n, k], zeros [n, groups] and scales [n, groups] by rounding to nearest, and their values."""
    n, k = weight.shape
    middle, most = 1 << bits - 1, (1 << bits) - 1
    size = k if group == -1 else group
    codes, dequantised = torch.empty(n, k, dtype=torch.int64), torch.empty(n, k)
    zeros, scales = [], []
    for start in range(0, k, size):
        part = weight[:, start : start + size]
        if symmetric:
            scale = (part.abs().amax(1) / (middle - 1)).to(scales_in)
            zero = torch.full((n,), middle)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / most).to(scales_in)
            zero = (-low / scale.float()).round().clamp(0, most).long()
        code = ((part / scale.float()[:, None]).round() + zero[:, None]).clamp(0, most).long()
        codes[:, start : start + size] = code
        dequantised[:, start : start + size] = (code - zero[:, None]) * scale.float()[:, None]
        zeros.append(zero)
        scales.append(scale)
    return codes, torch.stack(zeros, 1), torch.stack(scales, 1), dequantised


def _int32(codes: list[Tensor]) -> Tensor:
    """Pack eight tensors of codes of 4 bits, or four of 8 bits, into one of int32, the first in the lowest bits."""
    bits = 32 // len(codes)
    total = sum(code.long() << bits * place for place, code in enumerate(codes))
    assert isinstance(total, Tensor)
    total = total % 2**32
    return torch.where(total < 2**31, total, total - 2**32).to(torch.int32)


def awq(*, keep: list[str], group: int = 32) -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(columns: Tensor) -> Tensor:  # [rows, n] -> [rows, n / 8]
        return _int32([columns[:, output::8] for output in order])

    def encoder(weight: Tensor) -> Encoded:
        codes, zeros, scales, dequantised = _groups(weight, group, symmetric=False)
        return {"qweight": pack(codes.T), "qzeros": pack(zeros.T), "scales": scales.T}, dequantised

    config: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return encoder, config | {"version": "gemm", "modules_to_not_convert": keep or None}


def gptq(
    *,
    keep: list[str],
    bits: int = 4,
    group: int = 32,
    sym: bool = False,
    form: str | None = None,
    stored_zero: int | None = None,
    act_order: bool = False,
) -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    """Return an encoder and its quantization_config. form: checkpoint_format. stored_zero: what a symmetric file stores
    for its zero, if it differs from the rule of its format. act_order: the columns of a group are not neighbours."""
    per_word = 32 // bits

    def encoder(weight: Tensor) -> Encoded:
        k = weight.shape[1]
        columns = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if act_order else torch.arange(k)
        codes, zeros, scales, dequantised = _groups(weight[:, columns], group, sym, bits)
        place = columns.argsort()
        codes, dequantised = codes[:, place], dequantised[:, place]
        stored = zeros if form == "gptq_v2" else zeros - 1  # a zero point of 0 borrows from the next in its word
        if stored_zero is not None:
            stored = torch.full_like(zeros, stored_zero)
        parts = {
            "qweight": _int32([codes.T[row::per_word] for row in range(per_word)]),
            "qzeros": _int32([stored.T[:, output::per_word] for output in range(per_word)]),
            "scales": scales.T,
            "g_idx": (place // (k if group == -1 else group)).int(),
        }
        return parts, dequantised

    config: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym}
    config["desc_act"] = act_order
    rules: dict[str, dict[str, Any]] = {f"-:.*{part.replace('.', '[.]')}": {} for part in keep}
    if keep:  # as Qwen's own files: rules without settings come first and change nothing
        rules = {"lm_head": {}, "model.language_model.embed_tokens": {}, **rules}
    return encoder, config | ({"dynamic": rules} if keep else {}) | ({"checkpoint_format": form} if form else {})


def auto_round(
    *, keep: list[str], group: int = 32, sym: bool = True, packing: str = "auto_round:auto_gptq"
) -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    """packing: GPTQ's with zero points less one, or AutoRound's own, with zero points as they are."""
    encoder, _ = gptq(keep=[], group=group, sym=sym, form=None if packing.endswith("gptq") else "gptq_v2")
    config = {"quant_method": "auto-round", "bits": 4, "group_size": group, "sym": sym, "data_type": "int"}
    return encoder, config | {
        "packing_format": packing,
        "extra_config": {f".*{part}.*": {"bits": 16} for part in keep},
    }


def packed(
    *, keep: list[str], bits: int = 4, group: int = 32, sym: bool = True
) -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    """compressed-tensors' pack-quantized, with a second group of modules that the files do not have."""
    per_word = 32 // bits

    def pack(codes: Tensor) -> Tensor:  # [n, k] -> [n, k / per_word], filled up with zeros
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
        return _int32([codes[:, place::per_word] for place in range(per_word)])

    def encoder(weight: Tensor) -> Encoded:
        codes, zeros, scales, dequantised = _groups(weight, group, sym, bits, torch.bfloat16)
        parts = {"weight_packed": pack(codes), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        return parts | ({} if sym else {"weight_zero_point": pack(zeros.T).T}), dequantised

    numbers = {"num_bits": bits, "type": "int", "symmetric": sym, "actorder": None}
    weights = numbers | ({"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group})
    groups = {
        "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": "pack-quantized"},
        "group_1": {
            "targets": ["re:.*mtp\\..*proj$"],
            "weights": numbers | {"strategy": "group", "group_size": 64},
            "format": "pack-quantized",
        },
    }
    return encoder, _compressed("mixed-precision", groups, keep)


def fp8(
    *, keep: list[str], block: tuple[int, int] = (128, 128), exponents: bool = False
) -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    """exponents: scales are powers of two, stored as U8 (ue8m0)."""

    def encoder(weight: Tensor) -> Encoded:
        codes, scales, dequantised = _in_blocks(weight, block, 448, torch.float8_e4m3fn, exponents)
        stored = (scales.log2() + 127).to(torch.uint8) if exponents else scales
        return {"weight": codes, "weight_scale_inv": stored}, dequantised

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    config |= {"scale_fmt": "ue8m0"} if exponents else {}
    return encoder, config | ({"modules_to_not_convert": keep} if keep else {})


def fp8_tensor(
    *, keep: list[str], method: str = "fp8", shape: tuple[int, ...] = ()
) -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    """One scale for a weight, stored in a tensor of `shape`, and one for its inputs, which is not used."""

    def encoder(weight: Tensor) -> Encoded:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        parts = {"weight": codes, "weight_scale": scale.reshape(shape), "input_scale": torch.tensor(0.7)}
        return parts, codes.float() * scale

    if method == "modelopt":
        return encoder, {"quant_algo": "FP8", "ignore": ["lm_head", *keep], "producer": {"name": "modelopt"}}
    return encoder, {"quant_method": method, "activation_scheme": "static", "ignored_layers": ["lm_head", *keep]}


def fp8_compressed(
    *, keep: list[str], strategy: str = "channel", scales: torch.dtype = torch.float32
) -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    """compressed-tensors' float-quantized, with a scale for each output, or for each block."""

    def encoder(weight: Tensor) -> Encoded:
        block = (1, weight.shape[1]) if strategy == "channel" else (128, 128)
        codes, scale, _ = _in_blocks(weight, block, 448, torch.float8_e4m3fn)
        scale = scale.to(scales)
        each = scale.float().repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(block[1], 1)
        return {"weight": codes, "weight_scale": scale}, codes.float() * each[:, : weight.shape[1]]

    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights |= {"block_structure": [128, 128]} if strategy == "block" else {}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return encoder, _compressed("float-quantized", {"group_0": group}, keep)


def _compressed(form: str, groups: dict[str, Any], keep: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head", *(f"re:.*{part.replace('.', '[.]')}" for part in keep)],
        "kv_cache_scheme": None,
    }


def blockwise_int8(
    *, keep: list[str], block: tuple[int, int] = (128, 128)
) -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    def encoder(weight: Tensor) -> Encoded:
        codes, scales, dequantised = _in_blocks(weight, block, 127, torch.int8)
        return {"weight": codes, "weight_scale_inv": scales}, dequantised

    config = {"quant_method": "blockwise_int8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return encoder, config | ({"modules_to_not_convert": keep} if keep else {})


def mxfp4(*, keep: list[str]) -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    """OpenAI's files of gpt-oss: experts alone, the first of two codes in the low bits of a byte."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def encoder(weight: Tensor) -> Encoded:
        groups = torch.unflatten(weight, -1, (-1, 32))
        exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
        steps = groups * (-exponents).exp2()
        codes = (steps.abs()[..., None] - values).abs().argmin(-1)
        dequantised = values[codes] * steps.sign() * exponents.exp2()
        codes = (codes + 8 * (steps < 0)).to(torch.uint8)
        blocks = codes[..., ::2] | codes[..., 1::2] << 4
        return {"blocks": blocks, "scales": (exponents[..., 0] + 127).to(torch.uint8)}, dequantised.flatten(-2)

    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head", *keep]
    return encoder, {"quant_method": "mxfp4", "modules_to_not_convert": kept}


def nvfp4(*, keep: list[str], by: str = "compressed-tensors") -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    """Scales of 16 columns in e4m3, and one for the whole weight: a divisor (compressed-tensors) or a factor (Model
    Optimizer). The first of two codes is in the low bits of a byte."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def encoder(weight: Tensor) -> Encoded:
        divisor = 448 * 6 / weight.abs().max()
        groups = torch.unflatten(weight, -1, (-1, 16))
        scales = (groups.abs().amax(-1) / 6 * divisor).to(torch.float8_e4m3fn)
        each = (scales.float() / divisor)[..., None]
        steps = torch.where(each > 0, groups / each, 0)
        codes = (steps.abs()[..., None] - values).abs().argmin(-1)
        dequantised = (values[codes] * steps.sign() * each).flatten(-2)
        codes = (codes + 8 * (steps < 0)).to(torch.uint8).flatten(-2)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        if by == "modelopt":
            parts = {"weight": packed, "weight_scale_2": 1 / divisor, "input_scale": torch.tensor(0.01)}
        else:
            parts = {"weight_packed": packed, "weight_global_scale": divisor[None]}
            parts["input_global_scale"] = torch.tensor([100.0])
        return parts | {"weight_scale": scales}, dequantised

    if by == "modelopt":
        return encoder, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", *keep]}
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": weights | {"dynamic": "local"}}
    return encoder, _compressed("nvfp4-pack-quantized", {"group_0": group}, keep)


def _in_blocks(
    weight: Tensor, block: tuple[int, int], most: int, dtype: torch.dtype, powers: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [n, k], scales [row blocks, column blocks] and the values that they encode."""
    n, k = weight.shape
    codes, dequantised = torch.empty(n, k, dtype=dtype), torch.empty(n, k)
    scales = torch.empty(-(-n // block[0]), -(-k // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows, columns = (slice(x * b, (x + 1) * b) for x, b in zip((i, j), block, strict=True))
            scale = weight[rows, columns].abs().max() / most
            scales[i, j] = scale.log2().ceil().exp2() if powers else scale
            steps = weight[rows, columns] / scales[i, j]
            codes[rows, columns] = steps.to(dtype) if dtype.is_floating_point else steps.round().to(dtype)
            dequantised[rows, columns] = codes[rows, columns].float() * scales[i, j]
    return codes, scales, dequantised


def _int8(weight: Tensor) -> Encoded:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes * scale


def w8a8_int8(*, keep: list[str]) -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    return _int8, {"quant_method": "w8a8_int8"} | ({"modules_to_not_convert": keep} if keep else {})


def compressed_tensors(*, keep: list[str]) -> tuple[Callable[[Tensor], Encoded], dict[str, Any]]:
    def encoder(weight: Tensor) -> Encoded:
        parts, _ = _int8(weight)
        scale = parts["weight_scale"].bfloat16()
        return {"weight": parts["weight"], "weight_scale": scale}, parts["weight"] * scale.float()

    numbers = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return encoder, _compressed("int-quantized", {"group_0": group}, keep)


LAYOUTS: dict[str, Callable[..., tuple[Callable[[Tensor], Encoded], dict[str, Any]]]] = {
    "awq": awq,
    "gptq": gptq,
    "fp8": fp8,
    "blockwise_int8": blockwise_int8,
    "w8a8_int8": w8a8_int8,
    "compressed-tensors": compressed_tensors,
    "auto-round": auto_round,
    "packed": packed,
    "fp8-tensor": fp8_tensor,
    "fp8-compressed": fp8_compressed,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
}
