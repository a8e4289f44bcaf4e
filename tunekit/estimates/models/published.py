"""Checkpoints that are published quantized, by the `quantization_config` of config.json and the names in their files.

Bytes are those of the weights that are kept as they are published, below an adapter on few bits: of each linear layer
its integers with all scales and tables, as they are held in memory.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tunekit.estimates.facts import PackedWeights
from tunekit.estimates.memory.states import bytes_in_4_bits, bytes_in_8_bits

SIZES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "f8_e4m3": 1, "f8_e5m2": 1},
}
"""Bytes of a value, by the names that the probe gives types of safetensors."""

NO_TENSORS = ("weight_format", "quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
"""Last names of tensors that are read and not kept."""

_MARKS = {"bitsandbytes": ".weight.absmax", "bitsandbytes_8bit": ".SCB", "gptq": ".qweight", "awq": ".qweight"}
"""Ending of a tensor that only a packed weight has, by the methods whose weights can be kept."""

_TYPES = {"bitsandbytes_8bit": "int8"}
"""Values of `adapter.quant_type` by method."""

CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
"""Formats of compressed-tensors that are made dense as they are read."""

Stored = Mapping[str, tuple[tuple[int, ...], str]]


def stated_in(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a config.json states of its weights' quantization; None where they are not quantized."""
    stated: Mapping[str, Any] | None = config.get("quantization_config")
    return stated or (config.get("text_config") or {}).get("quantization_config")


def method_of(config: Mapping[str, Any]) -> str | None:
    """Return the quantization that a config.json states, by transformers' name, with the 8 bits of bitsandbytes."""
    stated = stated_in(config)
    if stated is None:
        return None
    method = str(stated.get("quant_method") or "bitsandbytes")
    return f"{method}_8bit" if stated.get("load_in_8bit") else method


def packed_weights(
    config: Mapping[str, Any], linears: Mapping[str, tuple[int, int]], stored: Stored | None
) -> PackedWeights | None:
    """Return the weights that a checkpoint holds in few bits, where they can be kept so; else None.

    Args:
        config: Its config.json.
        linears: Outputs and inputs of the linear layers of the model, by name.
        stored: Shape and type of the tensors in its files; None where these are not at hand, and all linear layers are
            taken to be packed but those that config.json leaves out.
    """
    stated, method = stated_in(config), method_of(config)
    if stated is None or method not in _MARKS:
        return None
    bits = {"bitsandbytes": 4, "bitsandbytes_8bit": 8}.get(method) or int(stated.get("bits") or 4)
    if stored is not None and method != "bitsandbytes_8bit":
        mark = _MARKS[method]
        names = [name.removesuffix(mark) for name in stored if name.endswith(mark)]
        weights = {name: _stored_bytes(name, stored, stated, method) for name in names}
    else:
        names = list(_named(linears, stated))
        if stored is not None:
            names = [name.removesuffix(".SCB") for name in stored if name.endswith(".SCB")]
        weights = {name: _bytes(*linears[name], stated, method, bits) for name in names if name in linears}
    if not set(names) <= set(linears):
        return None
    is_4bit = method == "bitsandbytes"
    return PackedWeights(
        bits=bits,
        weights=weights,
        quant_type=str(stated.get("bnb_4bit_quant_type") or "fp4") if is_4bit else _TYPES.get(method),
        double_quant=bool(stated.get("bnb_4bit_use_double_quant")) if is_4bit else None,
    )


def _stored_bytes(name: str, stored: Stored, stated: Mapping[str, Any], method: str) -> int:
    """Return the bytes of a packed weight as its file has it, but for what is read and not kept."""
    total, is_nested = 0, f"{name}.weight.nested_absmax" in stored
    for ending, (shape, dtype) in _tensors_of(name, stored):
        if ending.endswith(NO_TENSORS) or ending == "bias" or (ending == "g_idx" and not stated.get("desc_act")):
            continue
        total += math.prod(shape) * SIZES[dtype]
    # The mean of nested scales is in the state of the file, and a tensor in memory.
    return total + (4 if method == "bitsandbytes" and is_nested else 0)


_ENDINGS = (
    *("qweight", "qzeros", "scales", "g_idx", "weight", "weight.absmax", "weight.quant_map"),
    *("weight.nested_absmax", "weight.nested_quant_map"),
)


def _tensors_of(name: str, stored: Stored) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    for ending in _ENDINGS:
        if f"{name}.{ending}" in stored:
            yield ending, stored[f"{name}.{ending}"]


def _bytes(outputs: int, inputs: int, stated: Mapping[str, Any], method: str, bits: int) -> int:
    """Return the bytes of a packed weight by its sizes."""
    if method == "bitsandbytes":
        return bytes_in_4_bits(outputs * inputs, double=bool(stated.get("bnb_4bit_use_double_quant")))
    if method == "bitsandbytes_8bit":
        return bytes_in_8_bits(outputs, inputs)
    size = int(stated.get("group_size") or 128)
    groups = math.ceil(inputs / size) if size > 0 else 1
    order = 4 * inputs if method == "gptq" and stated.get("desc_act") else 0
    return (outputs * inputs + groups * outputs) * bits // 8 + 2 * groups * outputs + order


def _named(linears: Mapping[str, tuple[int, int]], stated: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of linear layers that config.json does not leave out."""
    skipped = [*(stated.get("llm_int8_skip_modules") or ()), *(stated.get("modules_to_not_convert") or ())]
    for name in linears:
        if not any(f".{skip}." in f".{name}." for skip in skipped):
            yield name


def why_unread(config: Mapping[str, Any]) -> str | None:
    """Return why the layout of a published quantization is not read, where it depends on its settings; else None."""
    stated, method = stated_in(config), method_of(config)
    if stated is None:
        return None
    if method == "gptq":
        return _why_not_gptq(stated)
    if method == "awq":
        version, bits = str(stated.get("version") or "gemm").lower(), stated.get("bits", 4)
        if version != "gemm":
            return f"in AWQ's layout {version}; only gemm is supported"
        return None if bits == 4 else f"in AWQ with {bits} bits; only 4 are supported"
    return _why_not_compressed(stated) if method == "compressed-tensors" else None


def _why_not_gptq(stated: Mapping[str, Any]) -> str | None:
    bits, layout = stated.get("bits"), stated.get("checkpoint_format") or "gptq"
    if bits not in (4, 8):
        return f"in GPTQ with {bits} bits; 4 and 8 are supported"
    if layout not in ("gptq", "gptq_v2") or stated.get("is_marlin_format"):
        return (
            f"in GPTQ's layout {'marlin' if stated.get('is_marlin_format') else layout}; gptq and gptq_v2 are supported"
        )
    if stated.get("pack_dtype") not in (None, "int32"):
        return f"in GPTQ with words of {stated['pack_dtype']}; int32 is supported"
    return "in GPTQ with per-layer settings (dynamic)" if stated.get("dynamic") else None


def _why_not_compressed(stated: Mapping[str, Any]) -> str | None:
    """Return what transformers 5.24 does not read right of compressed-tensors.

    It dequantizes all linear layers by one scheme, and without the order of inputs.
    """
    groups = list((stated.get("config_groups") or {}).values())
    schemes = [group.get("weights") or {} for group in groups]
    if len(groups) != 1:
        return f"in compressed-tensors with {len(groups)} schemes; one is supported"
    layout = groups[0].get("format") or stated.get("format")
    if layout not in CT_FORMATS:
        return f"in compressed-tensors' format {layout}, which is unsupported"
    if schemes[0].get("actorder") in ("group", "dynamic", True):
        return "in compressed-tensors with reordered inputs (actorder: group), which is unsupported"
    if stated.get("transform_config"):
        return "in compressed-tensors with transformed weights (transform_config), which are unsupported"
    sparsity = (stated.get("sparsity_config") or {}).get("format")
    return (
        None
        if sparsity in (None, "dense")
        else f"in compressed-tensors' sparse format {sparsity}, which is unsupported"
    )
