"""Choice of fused kernels: tunekit's own, Liger's, or none.

tunekit's are operations with two forms: Triton kernels for accelerators, and plain torch. Both give the same results,
so that a choice depends on nothing but where they are known to be right.
"""

from typing import Literal

from tunekit.errors import PlanError
from tunekit.estimates.facts import Device, Hardware, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.recipe.methods.spec import HeadKind, MethodSection
from tunekit.recipe.schema import Recipe

Kernels = Literal["tunekit", "liger", "torch"]
"""Kernels of norms, gated MLPs, rotary embeddings, adapters and the head."""

TRITON_CAPABILITY = (8, 0)
"""Oldest CUDA compute capability for which the kernels are compiled by the tests."""

LIGER_TYPES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v4",
        "exaone4",
        "falcon_h1",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma4",
        "gemma4_text",
        "glm4",
        "gpt_oss",
        "granite",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "llama",
        "llama4",
        "llama4_text",
        "ministral",
        "mistral",
        "mixtral",
        "muse_glimmer",
        "nemotron",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "smollm3",
    }
)
"""Types of language models that liger-kernel 0.8.5 knows (`MODEL_TYPE_TO_APPLY_LIGER_FN`)."""


def check_kernels(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> None:
    """Refuse kernels that this machine or model cannot have.

    Raises:
        PlanError: Liger's are asked for, and it does not run here, is not installed, or does not know the model.
    """
    if recipe.model.kernels != "liger":
        return
    device = hardware.device
    if device.kind != "cuda" or hardware.triton is False:
        why = "is not installed" if device.kind == "cuda" else f"does not run on {device.name}"
        raise PlanError(
            f"model.kernels: liger's kernels are written in Triton, which {why}",
            hint="use tunekit, whose operations torch can compute too, or torch",
        )
    if hardware.liger_kernel is False:
        raise PlanError(
            "model.kernels: liger-kernel is not installed",
            hint="pip install 'tunekit[gpu]', or leave model.kernels out",
        )
    if model.model_type not in LIGER_TYPES:
        raise PlanError(
            f"model.kernels: liger-kernel has none for {model.model_type}",
            hint="leave model.kernels out: tunekit's go by what a module computes, not by the name of a model",
        )


def why_no_kernels(kernels: Kernels, layout: Layout) -> str | None:
    """Return why a layout takes no such kernels; None where it does."""
    if kernels == "torch":
        return None
    if layout.tp_size > 1:
        return "tensor parallel divides weights into DTensors, which only torch's own operations take"
    if kernels == "tunekit" and layout.strategy == "zero3":
        return "ZeRO-3 gathers the weights of a module for its own forward pass, and fused ones read those of several"
    return None


def choose_kernels(recipe: Recipe, hardware: Hardware, layout: Layout) -> tuple[Kernels, str]:
    """Choose the kernels for a layout, with the reason; a requested kind was checked before."""
    requested, device = recipe.model.kernels, hardware.device
    if requested != "auto":
        return requested, "as in the recipe" if requested != "tunekit" else f"as in the recipe; {_forms(hardware)}"
    why_not = why_no_kernels("tunekit", layout) or _why_not_on(device)
    if why_not is not None:
        return "torch", f"torch's own operations: {why_not}"
    return "tunekit", _forms(hardware)


def why_trl_head(kernels: Kernels, layout: Layout) -> str | None:
    """Return why tokens are scored by TRL's head; None where by tunekit's. For methods whose trainers have one."""
    if kernels != "tunekit":
        return f"tunekit's is one of its kernels, and those are {kernels}'s"
    if layout.cp_size > 1 or layout.sp_size > 1:
        return "tunekit's is not tried on sequences that are divided"
    return None


def head_kind(kind: HeadKind, method: MethodSection, kernels: Kernels, layout: Layout) -> HeadKind:
    """Return the kind of head, where TRL's trainer of a method scores tokens in tiles, which tunekit's head may
    replace.
    """
    if kind != "tiles" or not method.spec.uses_tiled_head or why_trl_head(kernels, layout) is not None:
        return kind
    incompatible = {"loss_type", "label_smoothing_factor"} & method.trainer_args.keys()
    return "sums" if method.spec.trains_on == "tokens" and not incompatible else "chunks"


def _why_not_on(device: Device) -> str | None:
    if device.gfx is not None:
        return "tunekit's kernels are not tried on ROCm"
    if device.kind == "cuda" and (device.compute_capability or (0, 0)) < TRITON_CAPABILITY:
        return f"tunekit's kernels are made for compute capability 8.0 and later, and {device.name} is older"
    return None


def _forms(hardware: Hardware) -> str:
    """In which of their forms tunekit's kernels run."""
    if hardware.device.kind != "cuda":
        return "in their torch forms, as Triton needs an accelerator; the head is what pays there"
    if hardware.triton is False:
        return "in their torch forms, as Triton is not installed; the head is what pays so"
    return "in Triton, for each module that computes what they do; the log names the others"
