"""Choice of the attention backend of a model.

Rows that are padded have sdpa, which needs no mask but a causal one. Rows that lie one behind the other are told their
boundaries: flash attention does no more work than for each alone, wherever a device has it, and on a CPU one document
is computed after another. Where neither is, a mask over the whole micro-batch keeps them apart.
"""

from tunekit.errors import PlanError
from tunekit.planner.decisions.isolation import FLEX_TYPES, VARLEN, VARLEN_TYPES, WITHOUT_SDPA, FlashAttention
from tunekit.planner.facts import Device, Hardware, ModelFacts
from tunekit.planner.memory.states import Dtype
from tunekit.planner.plan import Reason
from tunekit.recipe.schema import Recipe

FLASH_CAPABILITY = (8, 0)
"""Oldest CUDA compute capability with FlashAttention 2, torch's own and the package."""

FLASH_HEAD_DIM = 256
"""Widest head that it takes."""

FA4_HEAD_DIMS = {9: (128,), 10: (64, 128)}
"""Widths of heads that FlashAttention 4 trains with, by the major number of the compute capability."""


def choose_attention(recipe: Recipe, hardware: Hardware, model: ModelFacts, dtype: Dtype) -> Reason:
    """Attention implementation, and why.

    Raises:
        PlanError: What is asked for does not run, or is not installed.
    """
    device, requested = hardware.device, recipe.model.attn_implementation
    without_flash = "eager" if model.model_type in WITHOUT_SDPA else "sdpa"
    if requested != "auto":
        _check_asked(recipe, hardware, model, dtype, use=without_flash)
        return Reason(topic="attention", choice=requested, why="as in the recipe")
    if _lies_apart(recipe, device) and why_no_varlen(recipe, hardware, model, dtype) is None:
        flash = flash_attention_of(hardware, model)
        if device.kind == "cpu":
            why = "sdpa for one document after another: no mask over the whole row"
            return Reason(topic="attention", choice=VARLEN, why=why)
        if flash != "FA2" or not hardware.flash_attn:
            why = f"{_FLASH_WORDS[flash]} is told where each document begins, and needs no mask"
            return Reason(topic="attention", choice=VARLEN, why=why)
    in_one_row = recipe.data.packing or recipe.data.padding_free is True
    if in_one_row and model.model_type in FLEX_TYPES and _has_flash(device, dtype):
        why = f"it squeezes scores as {model.model_type} does, and its mask has an entry for blocks of tokens"
        return Reason(topic="attention", choice="flex_attention", why=why)
    if _has_flash(device, dtype) and hardware.flash_attn and model.model_type not in FLEX_TYPES:
        return Reason(topic="attention", choice="flash_attention_2", why="flash-attn is installed and runs here")
    if without_flash != "sdpa":
        return Reason(topic="attention", choice=without_flash, why=f"transformers has no sdpa for {model.model_type}")
    return dense_reason()


def dense_reason() -> Reason:
    """The attention of rows that are padded."""
    return Reason(topic="attention", choice="sdpa", why="torch's fused attention; needs no further package")


def of_rows(attn_implementation: str, *, lie_apart: bool) -> str:
    """The attention of a micro-batch: padded rows have sdpa where those that lie one behind the other have varlen's."""
    return "sdpa" if attn_implementation == VARLEN and not lie_apart else attn_implementation


def flash_attention_of(hardware: Hardware, model: ModelFacts) -> FlashAttention:
    """Return the flash attention that torch's own varlen attention dispatches to: the newest that is installed and
    supports it.
    """
    major = (hardware.device.compute_capability or (0, 0))[0]
    if major == 9 and hardware.flash_attn_3:
        return "FA3"
    if hardware.flash_attn_4 and model.head_dim in FA4_HEAD_DIMS.get(major, ()):
        return "FA4"
    return "FA2"


_FLASH_WORDS = {
    "FA2": "torch's FlashAttention 2",
    "FA3": "FlashAttention 3, which is installed and made for Hopper,",
    "FA4": "FlashAttention 4, which is installed and made for this device,",
}


def why_no_varlen(recipe: Recipe, hardware: Hardware, model: ModelFacts, dtype: Dtype) -> str | None:
    """Return why a model does not use tunekit's attention for packed rows; None where it can."""
    device, parallel = hardware.device, recipe.parallel
    if model.model_type not in VARLEN_TYPES:
        return f"it was not seen to be right for {model.model_type}"
    if model.attention_dropout:
        return f"it has no dropout, and attention of {model.path} drops {model.attention_dropout:.0%}"
    if max(parallel.cp_size or 1, parallel.sp_size or 1, parallel.tp_size or 1) > 1:
        return "it is not divided over devices"
    if device.kind == "cpu":
        return None
    if not _has_flash(device, dtype):
        return f"it needs a CUDA device of compute capability 8.0 or newer and 16-bit products; this is {device.name}"
    if model.head_dim > FLASH_HEAD_DIM:
        return f"flash attention takes heads of up to {FLASH_HEAD_DIM}, and these have {model.head_dim}"
    return None


def _lies_apart(recipe: Recipe, device: Device) -> bool:
    """Return whether rows may be concatenated in this run.

    On a CPU that has to be asked for: documents are computed one after another there, however they come.
    """
    if not recipe.method.spec.masks_as_told:
        return False
    requested = recipe.data.padding_free
    return recipe.data.packing or requested is True or (requested == "auto" and device.kind == "cuda")


def _has_flash(device: Device, dtype: Dtype) -> bool:
    """Return whether torch's flash attention runs, and the package would. ROCm has its own, which is not tried."""
    return device.kind == "cuda" and (device.compute_capability or (0, 0)) >= FLASH_CAPABILITY and dtype != "float32"


def _check_asked(recipe: Recipe, hardware: Hardware, model: ModelFacts, dtype: Dtype, *, use: str) -> None:
    requested, device = recipe.model.attn_implementation, hardware.device
    if requested.startswith("flash_attention") and not _has_flash(device, dtype):
        raise PlanError(
            f"model.attn_implementation: {requested} needs a CUDA device of compute capability 8.0 or newer and 16-bit "
            f"products; this is {device.name} with {dtype}",
            hint=f"use {use}",
        )
    if requested.startswith("flash_attention") and hardware.flash_attn is False:
        raise PlanError(
            f"model.attn_implementation: {requested} is not installed", hint=f"install flash-attn, or use {use}"
        )
    if requested == "sdpa" and use != "sdpa":
        raise PlanError(
            f"model.attn_implementation: transformers has no sdpa for {model.model_type}", hint=f"use {use}"
        )
    if requested == "flex_attention" and device.kind != "cuda":
        raise PlanError("model.attn_implementation: flex_attention has no backward pass on a CPU", hint=f"use {use}")
    why_not = why_no_varlen(recipe, hardware, model, dtype) if requested == VARLEN else None
    if why_not is not None:
        raise PlanError(f"model.attn_implementation: {VARLEN} cannot be used: {why_not}", hint=f"use {use}")
