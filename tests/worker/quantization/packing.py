"""Quantizes the linears of a tiny model as the formats have it, and says what is meant by it.

Written from the formats' descriptions and apart from the reader: what is meant is made of codes
that were never packed.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Tensors, Tensor]]  # tensors by suffix, and what they mean


def words_of(codes: Tensor, bits: int) -> Tensor:
    """Return codes [A, B] as words of 32 bits [A, B bits / 32], the first in the lowest bits."""
    in_word = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % in_word)).long()
    words = torch.zeros(codes.shape[0], codes.shape[1] // in_word, dtype=torch.int64)
    for place in range(in_word):
        words |= codes[:, place::in_word] << (bits * place)
    return (words - ((words >> 31) << 32)).int()


def spread(of_groups: Tensor, size: int, width: int) -> Tensor:
    """Return the numbers [A, width] of each column of groups [A, G] of so many columns."""
    return of_groups.repeat_interleave(size, dim=1)[:, :width]


def int8_channels(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def int8_with_zeros(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = (weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)) / 255
    zeros = (-128 - weight.amin(1, keepdim=True) / scales).round().clamp(-128, 127)
    codes = (weight / scales + zeros).round().clamp(-128, 127)
    stored = {"weight": codes.to(torch.int8), "weight_scale": scales}
    return stored | {"weight_zero_point": zeros.to(torch.int8)}, (codes - zeros) * scales


def fp8_whole(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(())}
    return stored, codes.float() * scale


def fp8_blocks(weight: Tensor) -> tuple[Tensors, Tensor]:
    outputs, inputs = weight.shape
    height, width = -(-outputs // 16), -(-inputs // 32)
    scales = torch.rand(height, width) * 0.01 + 0.001
    spread_scales = spread(spread(scales, 32, inputs).T, 16, outputs).T
    codes = (weight / spread_scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread_scales


def groups(weight: Tensor, size: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, K] from 0 on, zeros [N, G] and scales [N, G] of groups of inputs."""
    outputs, inputs = weight.shape
    num_groups, most = -(-inputs // size), (1 << bits) - 1
    padded = torch.nn.functional.pad(weight, (0, num_groups * size - inputs))
    parts = padded.view(outputs, num_groups, size)
    scales = (parts.amax(2) - parts.amin(2)) / most
    zeros = (-parts.amin(2) / scales).round().clamp(1, most)
    spread_scales, spread_zeros = spread(scales, size, inputs), spread(zeros, size, inputs)
    codes = (weight / spread_scales + spread_zeros).round().clamp(0, most)
    return codes, zeros, scales


def packed(bits: int, size: int, *, has_zeros: bool) -> Quantize:
    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, zeros, scales = groups(weight, size, bits)
        inputs = weight.shape[1]
        if not has_zeros:
            zeros = torch.full_like(zeros, 1 << (bits - 1))
        stored = {
            "weight_packed": words_of(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if has_zeros:
            stored["weight_zero_point"] = words_of(zeros.T, bits).T.contiguous()
        return stored, (codes - spread(zeros, size, inputs)) * spread(scales, size, inputs)

    return quantize


def packed_in_order(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Groups that are not of neighbours, as GPTQ with activation order leaves them."""
    size, inputs = 16, weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    stored, meant = packed(4, size, has_zeros=False)(weight[:, order])
    back = order.argsort()
    codes = groups(weight[:, order], size, 4)[0][:, back]
    stored["weight_packed"] = words_of(codes, 4)
    stored["weight_g_idx"] = (torch.arange(inputs) // size)[back].int()
    return stored, meant[:, back]


def gptq(bits: int, size: int, *, offset: int, in_order: bool = False) -> Quantize:
    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        order = torch.arange(inputs)
        if in_order:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        codes, zeros, scales = groups(weight[:, order], size, bits)
        meant = (codes - spread(zeros, size, inputs)) * spread(scales, size, inputs)
        back = order.argsort()
        stored = {
            "qweight": words_of(codes[:, back], bits).T.contiguous(),
            "qzeros": words_of((zeros - offset).T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": (torch.arange(inputs) // size)[back].int(),
        }
        return stored, meant[:, back]

    return quantize


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    size, inputs = 32, weight.shape[1]
    codes, zeros, scales = groups(weight, size, 4)

    def words(of: Tensor) -> Tensor:
        """Return codes [A, N] as words, in which outputs 0, 2, 4, 6, 1, 3, 5, 7 take turns."""
        of = torch.nn.functional.pad(of, (0, -of.shape[1] % 8))
        eights = of.view(len(of), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return words_of(eights.flatten(1), 4)

    stored = {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T.contiguous()}
    return stored, (codes - spread(zeros, size, inputs)) * spread(scales, size, inputs)


def nf4(weight: Tensor, *, is_nested: bool) -> tuple[Tensors, Tensor]:
    numbers = torch.tensor([-1.0, *torch.linspace(-0.7, 0.7, 14).tolist(), 1.0])
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scales = flat.abs().amax(1) + 1e-4
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    stored: Tensors = {"weight.quant_map": numbers, "weight.absmax": scales}
    if is_nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03}
        table = torch.linspace(-1, 1, 256)
        outer = torch.nn.functional.pad(scales, (0, -len(scales) % 256)).view(-1, 256).amax(1)
        spread_outer = outer.repeat_interleave(256)[: len(scales)]
        codes = ((scales - 0.03) / spread_outer).unsqueeze(1).sub(table).abs().argmin(1)
        scales = table[codes] * spread_outer + 0.03
        stored["weight.absmax"] = codes.to(torch.uint8)
        stored |= {"weight.nested_absmax": outer, "weight.nested_quant_map": table}
    chosen = (flat / scales.unsqueeze(1)).unsqueeze(2).sub(numbers).abs().argmin(2)
    meant = (numbers[chosen] * scales.unsqueeze(1)).flatten()[: weight.numel()]
    of_weight = chosen.flatten()[: weight.numel()]
    of_weight = torch.nn.functional.pad(of_weight, (0, len(of_weight) % 2)).view(-1, 2)
    stored["weight"] = (of_weight[:, :1] * 16 + of_weight[:, 1:]).to(torch.uint8)
    written = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    stored["weight.quant_state.bitsandbytes__nf4"] = written
    return stored, meant.view(weight.shape)


def compressed(weights: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*layers\\.1\\.mlp.*", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


def _int4(**changes: Any) -> dict[str, Any]:
    of_groups = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    return compressed(of_groups | changes, "pack-quantized")


FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "int8 by channels": (
        compressed({"num_bits": 8, "strategy": "channel"}, "int-quantized"),
        int8_channels,
    ),
    "int8 with zeros": (
        compressed({"num_bits": 8, "strategy": "channel", "symmetric": False}, "int-quantized"),
        int8_with_zeros,
    ),
    "fp8 of a tensor": (
        compressed({"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized"),
        fp8_whole,
    ),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, fp8_blocks),
    "int4 in groups": (_int4(group_size=16), packed(4, 16, has_zeros=False)),
    "int4 with zeros": (_int4(group_size=24, symmetric=False), packed(4, 24, has_zeros=True)),
    "int4 in order": (_int4(group_size=16, actorder="group"), packed_in_order),
    "int8 packed": (_int4(num_bits=8, group_size=32), packed(8, 32, has_zeros=False)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(4, 32, offset=1)),
    "gptq of 8 bits, second format": (
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "checkpoint_format": "gptq_v2"},
        gptq(8, 16, offset=0),
    ),
    "gptq in order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        gptq(4, 16, offset=1, in_order=True),
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        partial(nf4, is_nested=False),
    ),
    "nf4, scales too": (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        partial(nf4, is_nested=True),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
        awq,
    ),
}


def quantize_checkpoint(path: Path, config: dict[str, Any], quantize: Quantize) -> Tensors:
    """Quantize the linears of the layers of a checkpoint; return what all tensors mean."""
    tensors: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    meant, stored = dict(tensors), {}
    has_kept = "ignore" in config
    for name, tensor in tensors.items():
        is_kept = has_kept and ("layers.1.mlp" in name or name.endswith("mlp.gate.weight"))
        if ".layers." not in name or tensor.dim() != 2 or is_kept:
            stored[name] = tensor
            continue
        module = name.removesuffix(".weight")
        parts, meant[name] = quantize(tensor.float())
        stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(stored, path / "model.safetensors")
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {"quantization_config": config}))
    return meant
