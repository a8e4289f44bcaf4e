"""Choice of torch.compile for decoder layers, and of float8 for their products.

Both change how a layer is computed and nothing of what: layers are compiled one by one, in place, so that they share
what was compiled for the first, and weights keep their names. Products in float8 (torchao's, dynamic scales for whole
tensors) have factors of 8 bits and weights in float32, and are slower than 16 bits unless they are compiled.
"""

from tunekit.errors import PlanError
from tunekit.planner.decisions.kernels import TRITON_CAPABILITY, Kernels
from tunekit.planner.facts import Hardware, ModelFacts
from tunekit.planner.layout import Layout
from tunekit.planner.memory.states import Dtype
from tunekit.planner.plan import Reason
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter, QloraAdapter

FLOAT8_CAPABILITY = (9, 0)
"""Oldest CUDA compute capability that is trained on in float8."""

FLOAT8_MULTIPLE = 16
"""Divisor of both sizes of a matrix."""


def check_compile(recipe: Recipe, hardware: Hardware) -> None:
    """Refuse to compile what cannot be compiled.

    Raises:
        PlanError: There is no C++ compiler, or the adapter's base is one that is not compiled.
    """
    if recipe.train.torch_compile is not True:
        return
    if hardware.device.kind == "cpu" and hardware.cxx is False:
        raise PlanError("train.torch_compile: torch compiles for a CPU with g++, which is not here", hint="install g++")
    if isinstance(recipe.adapter, QloraAdapter):
        raise PlanError(
            "train.torch_compile: products with the 4-bit weights of bitsandbytes are not compiled",
            hint="leave it out, or use adapter.type=lora",
        )


def why_not_compiled_in(layout: Layout) -> str | None:
    """Return why layers are not compiled in a layout; None where they are."""
    if layout.strategy.startswith("zero"):
        return "the hooks by which DeepSpeed gathers and sums would split what is compiled"
    if layout.tp_size > 1 or layout.cp_size > 1:
        return "compiling layers that are divided over devices is not tried"
    return None


def choose_compile(recipe: Recipe, hardware: Hardware, kernels: Kernels, layout: Layout) -> tuple[bool, str]:
    """Return whether layers are compiled, and the reason."""
    requested = recipe.train.torch_compile
    if requested != "auto":
        return requested, "as in the recipe"
    device = hardware.device
    if device.kind != "cuda":
        return False, f"compiling takes longer than it saves on {device.name}"
    if (device.compute_capability or (0, 0)) < TRITON_CAPABILITY:
        return False, f"it is known to pay from compute capability 8.0 on; this is {device.name}"
    if isinstance(recipe.adapter, QloraAdapter):
        return False, "products with 4-bit weights are not compiled"
    why_not = why_not_compiled_in(layout)
    if why_not is not None:
        return False, why_not
    if not recipe.data.packing:
        return False, "rows that are not packed differ in length, and each length would be compiled anew"
    if recipe.train.fp8:
        return True, "casts to float8 are slow unless they are compiled with what is before them"
    if kernels != "torch":
        return False, f"{kernels}'s kernels do what there is to gain from it"
    return True, "packed rows are about as long as each other, and no other kernels are used"


def check_float8(recipe: Recipe, hardware: Hardware, model: ModelFacts, dtype: Dtype) -> None:
    """Refuse training in float8 where it cannot be.

    Raises:
        PlanError: It is asked for, and the device, the adapter, the types or the packages are not for it.
    """
    if not recipe.train.fp8:
        return
    device = hardware.device
    if device.kind != "cuda" or (device.compute_capability or (0, 0)) < FLOAT8_CAPABILITY:
        raise PlanError(
            f"train.fp8: needs a CUDA device of compute capability 9.0 or newer; this is {device.name}",
            hint="leave it out",
        )
    if not isinstance(recipe.adapter, FullAdapter):
        raise PlanError(
            f"train.fp8: trains all weights, and adapter.type is {recipe.adapter.type}",
            hint="leave it out, or use adapter.type=full",
        )
    if dtype != "bfloat16":
        raise PlanError(f"train.fp8: other products are bfloat16 then, not {dtype}", hint="use model.dtype=bfloat16")
    if hardware.torchao is False:
        raise PlanError("train.fp8: torchao is not installed", hint="pip install 'tunekit[fp8]'")
    if not num_float8(model):
        raise PlanError(
            f"train.fp8: no matrix of {model.path} has sizes that are multiples of {FLOAT8_MULTIPLE}",
            hint="leave it out",
        )


def why_no_float8_in(layout: Layout) -> str | None:
    """Return why a layout does not train in float8; None where it does."""
    if layout.strategy.startswith("zero"):
        return "float8 is not tried with weights that DeepSpeed divides"
    if layout.tp_size > 1 or layout.cp_size > 1:
        return "float8 is not tried on layers that are divided over devices"
    return None


def num_float8(model: ModelFacts) -> int:
    """Linear layers whose products float8 can compute."""
    fits = (all(size % FLOAT8_MULTIPLE == 0 for size in sizes) for sizes in model.linears.values())
    return sum(fits)


def compile_reasons(recipe: Recipe, model: ModelFacts, compiled: bool, why: str) -> tuple[Reason, ...]:
    """The decisions for the plan."""
    reasons = [Reason(topic="compile", choice="each decoder layer" if compiled else "off", why=why)]
    if recipe.train.fp8:
        number = f"{num_float8(model):,} of {len(model.linears):,} linear layers, without the head"
        why = "as in the recipe; speed and memory are predicted as without it"
        reasons.append(Reason(topic="float8", choice=number, why=why))
    return tuple(reasons)
