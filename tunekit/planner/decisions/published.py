"""Decisions about checkpoints that are published quantized: kept as they are, made dense, or refused."""

from collections.abc import Iterator

from tunekit.estimates.facts import KEPT_PACKED, Hardware, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.states import BYTES, Dtype, num_quantised, quantised_bytes
from tunekit.planner.plan import gib
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import QloraAdapter

KEPT = ("bitsandbytes", "mxfp4", *KEPT_PACKED)
"""Quantizations that stay as they are published below an adapter on few bits."""

READ = (*KEPT, "fp8", "fbgemm_fp8", "compressed-tensors")
"""Quantizations that are read, the others made dense."""

NAMES = {
    **{"bitsandbytes": "bitsandbytes 4 bits", "bitsandbytes_8bit": "bitsandbytes 8 bits"},
    **{"gptq": "GPTQ", "awq": "AWQ", "mxfp4": "MXFP4"},
}
"""Quantizations that can be kept, as messages name them."""

ORIGINAL = "use the model that they were quantized from"


def published_faults(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Refuse quantized weights that are not read, or not kept as this adapter asks."""
    method, adapter = model.published_as, recipe.adapter
    if method is None:
        return
    problem = f"model.path: the weights of {model.path} are published"
    if method not in READ:
        yield f"{problem} in {method}, which is unsupported", ORIGINAL
    elif model.why_unread is not None:
        yield f"{problem} {model.why_unread}", ORIGINAL
    elif isinstance(adapter, QloraAdapter) and method not in KEPT:
        yield (
            f"{problem} in {method}, which cannot be quantized again",
            "set adapter.type to lora, or use a 16-bit copy of the model",
        )
    elif method not in ("fp8", "mxfp4", "bitsandbytes", "compressed-tensors") and model.num_experts:
        yield f"{problem} in {method}, which is unsupported for experts", ORIGINAL
    elif method in KEPT_PACKED and model.packed is None:
        yield f"{problem} in {method}, and packed weights are not linear layers in {model.model_type}", ORIGINAL
    if method == "compressed-tensors" and hardware.compressed_tensors is False:
        yield (
            f"{problem} in compressed-tensors, which is not installed",
            "pip install 'tunekit[compressed-tensors]'",
        )
    if isinstance(adapter, QloraAdapter) and method in KEPT:
        yield from _type_faults(adapter, model)


def _type_faults(adapter: QloraAdapter, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Refuse a data type that the published weights do not have."""
    published, fields = model.packed, type(adapter).model_fields
    for name in ("quant_type", "double_quant"):
        stated = None if published is None else dict(published)[name]
        value = fields[name].default if stated is None else stated
        if name in adapter.model_fields_set and dict(adapter)[name] != value:
            problem = f"adapter.{name}: the weights of {model.path} are published quantized and stay so"
            yield problem, "unset it"


def published_refusals(recipe: Recipe, model: ModelFacts, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield layouts that do not divide, send or read such weights."""
    method, is_kept = model.published_as, isinstance(recipe.adapter, QloraAdapter)
    if method is None:
        return
    other = "use ddp, or adapter.type=lora"
    if model.is_packed_for(recipe.adapter) and layout.strategy not in ("single", "ddp"):
        yield f"weights published in {NAMES[method]} cannot be sharded or broadcast", other
    if is_kept and method == "bitsandbytes" and layout.strategy == "fsdp2":
        yield "transformers cannot load weights published in bitsandbytes 4 bits in one process for all", other
    if not is_kept and layout.is_divided_at_load and (method not in ("fp8", "mxfp4") or layout.ep_size > 1):
        way = "tensor" if layout.tp_size > 1 else "expert"
        yield f"{way} parallelism is untested with weights dequantized from {method}", "use another layout"


def base_words(recipe: Recipe, model: ModelFacts, stored: str, dtype: str) -> str:
    """Return what the weights of a base that is published quantized are kept as."""
    method, packed = model.published_as, model.packed
    assert method is not None
    if not isinstance(recipe.adapter, QloraAdapter):
        return f"{stored}, dequantized from {method}"
    if method == "mxfp4":
        return f"experts in MXFP4 as published, {dtype} for the rest of the base"
    bits = f" {packed.bits} bits" if packed is not None and method in ("gptq", "awq") else ""
    return f"base in {NAMES[method]}{bits} as published"


def base_cost(recipe: Recipe, model: ModelFacts, dtype: Dtype) -> str:
    """Return the bytes of published weights as they are kept, and as they could be, as words behind a reason."""
    num, qlora = num_quantised(model), QloraAdapter()
    if not num or (model.packed is None and model.published_as != "mxfp4"):
        return ""
    dense, packed = gib(BYTES[dtype] * num), gib(quantised_bytes(model, qlora))
    if isinstance(recipe.adapter, QloraAdapter):
        return f"; packed weights take {packed} instead of {dense}"
    return f"; packed weights would take {packed} instead of {dense} with adapter.type=qlora"
