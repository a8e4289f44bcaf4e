"""Tiny checkpoints in the layouts in which quantized models are published, written out by hand, with their values."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import save_tiny_model

GROUP = 32
FP8_MAX = 448.0


def words_of(integers, bits, order=None):
    """Integers of some bits as words of 32 along the last dimension, the lowest bits first."""
    per_word = 32 // bits
    rows = integers.reshape(*integers.shape[:-1], -1, per_word).long()
    words = sum(rows[..., source] << (bits * at) for at, source in enumerate(order or range(per_word)))
    return torch.where(words >= 2**31, words - 2**32, words).int().contiguous()


def grouped(weight, bits, group):
    """Integers with zero points and scales of groups of inputs: (inputs, outputs), and (groups, outputs) twice."""
    parts = weight.T.reshape(-1, group, len(weight))
    low, high = parts.amin(1).clamp(max=0), parts.amax(1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-4).half()
    # A zero point of 0 has no place in the first version of GPTQ's layout.
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    integers = (parts / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 2**bits - 1)
    return integers.reshape(-1, len(weight)), zeros, scales


def gptq(weight, *, bits=4, group=GROUP, order=None, version=1):
    """A matrix in GPTQ, with its values; `order` has the inputs in the order in which they were quantized."""
    taken = torch.arange(weight.shape[1]) if order is None else order
    integers, zeros, scales = grouped(weight[:, taken], bits, group)
    back = taken.argsort()
    index = (torch.arange(weight.shape[1]) // group)[back]
    integers = integers[back]
    values = (integers.double() - zeros.double()[index]) * scales.double()[index]
    tensors = {
        "qweight": words_of(integers.T, bits).T.contiguous(),
        "qzeros": words_of((zeros - int(version == 1)) % 2**bits, bits),
        "scales": scales,
        "g_idx": index.int(),
    }
    return tensors, values.T


def awq(weight):
    integers, zeros, scales = grouped(weight, 4, GROUP)
    index = torch.arange(weight.shape[1]) // GROUP
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {"qweight": words_of(integers, 4, order), "qzeros": words_of(zeros, 4, order), "scales": scales}
    return tensors, ((integers.double() - zeros.double()[index]) * scales.double()[index]).T


def int8(weight):
    """A matrix as LLM.int8() has it."""
    largest = weight.abs().amax(1)
    integers = (weight / largest[:, None] * 127).round()
    tensors = {"weight": integers.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, integers.double() * largest.double()[:, None] / 127


def fbgemm(weight):
    scales = weight.abs().amax(1, keepdim=True) / FP8_MAX
    values = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scales}, values.double() * scales.double()


def fp8(weight):
    """A matrix as DeepSeek-V3 has it, with a scale for each square."""
    rows, columns = (-(-size // GROUP) for size in weight.shape)
    tiles = weight.reshape(rows, GROUP, columns, GROUP)
    scales = tiles.abs().amax((1, 3)) / FP8_MAX
    values = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    dense = values.double() * scales.double()[:, None, :, None]
    return {"weight": values.reshape(weight.shape), "weight_scale_inv": scales}, dense.reshape(weight.shape)


def compressed_int4(weight):
    """A matrix in `pack-quantized` of compressed-tensors: words of integers of which each has 8 added."""
    parts = weight.reshape(len(weight), -1, GROUP)
    scales = parts.abs().amax(-1) / 7
    integers = (parts / scales[..., None]).round().clamp(-8, 7)
    tensors = {
        "weight_packed": words_of(integers.reshape(weight.shape) + 8, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, (integers.double() * scales.double()[..., None]).reshape(weight.shape)


def compressed_int8(weight):
    tensors, values = int8(weight)
    return {"weight": tensors["weight"], "weight_scale": tensors["SCB"][:, None] / 127}, values


def compressed(bits, kind, layout, **weights):
    how = {"num_bits": bits, "type": kind, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": how}},
        "format": layout,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
LAYOUTS = {
    "gptq": (gptq, GPTQ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "bitsandbytes_8bit": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}),
    "fbgemm_fp8": (fbgemm, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "activation_scheme": "dynamic"}),
    "compressed_int4": (
        compressed_int4,
        compressed(4, "int", "pack-quantized", strategy="group", group_size=GROUP),
    ),
    "compressed_int8": (compressed_int8, compressed(8, "int", "int-quantized", strategy="channel")),
    "compressed_fp8": (fbgemm, compressed(8, "float", "float-quantized", strategy="channel")),
}
"""Stored form of a matrix with its values, and what config.json states, by layout."""


def save_published(folder: Path, layout: str, store=None, **stated) -> dict[str, torch.Tensor]:
    """Save a tiny Llama as it would be published, and return its values in float32 by name.

    Args:
        folder: Where to.
        layout: One of `LAYOUTS`, or `bitsandbytes`, whose own code quantizes it.
        store: Other way to store a matrix.
        stated: What config.json states besides.
    """
    save_tiny_model(folder, hidden=64, intermediate=128)
    if layout == "bitsandbytes":
        return _save_in_4_bits(folder, **stated)
    way, config = LAYOUTS[layout]
    tensors, values = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.dim() == 2 and name.startswith("model.layers."):
            parts, dense = (store or way)(weight)
            tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            values[name] = dense.float()
        else:
            tensors[name] = values[name] = weight
    _state(folder, tensors, config | stated)
    return values


def _state(folder, tensors, quantization):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def _save_in_4_bits(folder, **stated):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    how = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, **stated}
    tensors, values = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.dim() != 2 or not name.startswith("model.layers."):
            tensors[name] = values[name] = weight
            continue
        packed, state = quantize_4bit(
            weight, quant_type=how["bnb_4bit_quant_type"], compress_statistics=how["bnb_4bit_use_double_quant"]
        )
        tensors[name] = packed
        tensors |= {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
        values[name] = dequantize_4bit(packed, state)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16", **how}
    _state(folder, tensors, settings)
    return values
