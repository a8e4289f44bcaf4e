"""Choice of what computes a layer: attention, padding, kernels, torch.compile and float8.

Attention. Rows that are padded have sdpa, which needs no mask but a causal one. Rows that are padding-free are
told their boundaries: flash attention does no more work than for each alone, wherever a device has it, and on a CPU one
document is computed after another. Where neither is, a mask over the whole micro-batch keeps them apart.

Isolation. A packed or padding-free batch has no mask: positions that begin again at zero say where a document begins.
Attention that builds its mask from them, or flash attention that is handed the boundaries, keeps documents apart.
Layers that carry a state from token to token do not look at positions, and some models drop them on the way.
`benchmarks/isolation.py` found out which: of the 196 types of causal language models in transformers 5.24 it built 169
small with random weights, and compared the logits of a second document with those that it has alone, and with those
after another first one (`benchmarks/results/isolation.json`). What `families.yaml` does not name was seen to isolate,
could not be built, or is not in transformers; every run that needs it looks again, at the model itself, before it
trains.

Padding is computed and thrown away. Rows in a single row need none, but attention has to keep them apart: flash
attention and tunekit's own are told where each begins and do no more work than for each alone, while sdpa and eager
take a mask over the whole micro-batch and compute what it hides.

Kernels. tunekit's are operations with two forms: Triton kernels for accelerators, and plain torch. Both give the same
results, so that a choice depends on nothing but where they are known to be right.

torch.compile and float8 change how a layer is computed and nothing of what: layers are compiled one by one, in place,
so that they share what was compiled for the first, and weights keep their names. Products in float8 (torchao's, dynamic
scales for whole tensors) have factors of 8 bits and weights in float32, and are slower than 16 bits unless they are
compiled.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tunekit.errors import PlanError
from tunekit.estimates.facts import Device, Hardware, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.activations import is_traced
from tunekit.estimates.memory.states import Dtype
from tunekit.estimates.models.architectures import ATTENTION_LAYERS
from tunekit.estimates.models.model_config import model_types
from tunekit.estimates.passes import SFT, Passes
from tunekit.files import read_table
from tunekit.planner.plan import VARLEN, FlashAttention, Kernels, Reason
from tunekit.recipe.methods import has_teacher
from tunekit.recipe.methods.spec import HeadKind, MethodSection
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter
from tunekit.recipe.sections.data import DataSection
from tunekit.recipe.trainer_args import config_fields

TRITON_CAPABILITY = (8, 0)
"""Oldest CUDA compute capability for which the kernels are compiled by the tests."""

FLASH_CAPABILITY = (8, 0)
"""Oldest CUDA compute capability with FlashAttention 2, torch's own and the package."""

FLASH_HEAD_DIM = 256
"""Widest head that it takes."""

FA4_HEAD_DIMS = {9: (128,), 10: (64, 128)}
"""Widths of heads that FlashAttention 4 trains with, by the major number of the compute capability."""


@cache
def families() -> Mapping[str, frozenset[str]]:
    """Types of models by what was seen of them, from `families.yaml`."""
    table = read_table(Path(__file__).with_name("families.yaml"))
    return {name: frozenset(types) for name, types in table.items()}


def _is_among(family: str, model: ModelFacts) -> bool:
    return model.model_type in families()[family]


def why_not_isolated(model: ModelFacts, attn_implementation: str) -> str | None:
    """Return why documents in one row would see each other; None where nothing is known to cause it.

    Args:
        model: The model, of which its type and the types of its layers count.
        attn_implementation: Attention implementation by its transformers name.
    """
    layer_types = sorted(set(model.layer_types) - ATTENTION_LAYERS)
    if layer_types and not runs_by_document(model):
        return f"its {' and '.join(layer_types)} layers do not separate documents"
    if model.model_type in model_types().carry_state and not model.layer_types and not runs_by_document(model):
        return f"{model.model_type} layers carry state from one document to the next"
    if _is_among("own_positions", model):
        return f"the positions of {model.model_type} do not start at 0"
    if _is_among("never_isolates", model):
        return f"the code of {model.model_type} does not separate documents"
    if attn_implementation == VARLEN:
        is_supported = _is_among("varlen", model)
        return None if is_supported else f"{VARLEN} is not verified to separate documents in {model.model_type}"
    flash = attn_implementation.startswith("flash_attention")
    if _is_among("isolates_with_masks_only" if flash else "isolates_with_flash_only", model):
        return f"the code of {model.model_type} does not separate documents with {attn_implementation}"
    return None


def why_media_not_packed(model: ModelFacts, attn_implementation: str) -> str | None:
    """Return why rows with media are not packed; None where nothing is known against it.

    Args:
        model: The model.
        attn_implementation: Attention implementation by its transformers name.
    """
    if model.tower is not None and model.tower.form == "crossed":
        return f"the cross-attention of {model.model_type} reads the images of a whole row"
    return why_not_isolated(model, attn_implementation)


def runs_by_document(model: ModelFacts) -> bool:
    """Return whether layers that carry a state are run once for each document of a row."""
    attends_only = bool(model.layer_types) and set(model.layer_types) <= ATTENTION_LAYERS
    return _is_among("by_document", model) and not attends_only


def runs_decoder_by_document(model: ModelFacts, attn_implementation: str) -> bool:
    """Return whether a whole decoder is run once for each document of a row."""
    return why_not_isolated(model, attn_implementation) is not None


def why_not_packed(teacher: ModelFacts, attn_implementation: str) -> str | None:
    """Return why a second model cannot read documents in one row, in a single pass; None where it can."""
    if runs_by_document(teacher):
        return f"the state of {teacher.model_type} layers would pass from one document to the next"
    return why_not_isolated(teacher, attn_implementation)


def repeats(data: DataSection, model: ModelFacts, attn_implementation: str) -> str | None:
    """Return what runs once for each document of a row; None if nothing does."""
    if not lies_in_one_row(data):
        return None
    if runs_decoder_by_document(model, attn_implementation):
        return "the decoder"
    return "a recurrent layer" if runs_by_document(model) else None


def documents_reasons(
    model: ModelFacts, attn_implementation: str, *, by_document: bool, decoder_by_document: bool
) -> Iterator[Reason]:
    """Yield the reason for running layers or the decoder once for each document."""
    if by_document:
        why = f"the state of {model.model_type} layers would pass from one document to the next"
        yield Reason(topic="documents", choice="recurrent layers run once per document", why=why)
    if decoder_by_document:
        why = f"{why_not_isolated(model, attn_implementation)}; no faster than without packing"
        if why_not_isolated(model, "flash_attention_2") is None:
            why += ", except flash_attention_2 if supported"
        yield Reason(topic="documents", choice="the decoder runs once per document", why=why)


def choose_attention(
    recipe: Recipe, hardware: Hardware, model: ModelFacts, dtype: Dtype, *, reads_media: bool = False
) -> tuple[str, str]:
    """Attention implementation, and why.

    Args:
        recipe: What is asked for.
        hardware: The machine.
        model: The model.
        dtype: The type that it computes in.
        reads_media: Whether rows have media, whose towers do not use the attention for packed rows.

    Raises:
        PlanError: What is asked for does not run, or is not installed.
    """
    device, requested = hardware.device, recipe.model.attn_implementation
    without_flash, why_dense = dense_attention(model)
    if recipe.parallel.engine == "automodel":
        if requested not in ("auto", without_flash):
            problem = f"model.attn_implementation: {requested} is untested with parallel.engine=automodel"
            raise PlanError(problem, hint=f"use {without_flash}")
        return without_flash, "set by the recipe" if requested != "auto" else why_dense
    has_flash, squeezes = _has_flash(device, dtype), _is_among("flex", model)
    if requested != "auto":
        why_not = _why_not_asked(recipe, hardware, model, dtype, without_flash)
        if why_not is not None:
            install = "install flash-attn, or " if why_not.endswith("is not installed") else ""
            raise PlanError(f"model.attn_implementation: {why_not}", hint=f"{install}use {without_flash}")
        return requested, "set by the recipe"
    if not reads_media and _lies_apart(recipe, device) and why_no_varlen(recipe, hardware, model, dtype) is None:
        flash = flash_attention_of(hardware, model)
        if device.kind == "cpu":
            return VARLEN, "sdpa per document, no mask over the whole row"
        if flash != "FA2" or not hardware.flash_attn:
            return VARLEN, f"{_FLASH_WORDS[flash]} reads the document boundaries, no mask needed"
    if lies_in_one_row(recipe.data) and squeezes and has_flash:
        return "flex_attention", f"supports the soft-capped scores of {model.model_type}, with a block-sparse mask"
    if has_flash and hardware.flash_attn and not squeezes:
        return "flash_attention_2", "flash-attn is installed and supported here"
    return dense_attention(model)


def dense_attention(model: ModelFacts) -> tuple[str, str]:
    """Return the attention of padded rows, and why."""
    if _is_among("without_sdpa", model):
        return "eager", f"transformers has no sdpa for {model.model_type}"
    return "sdpa", "torch's fused attention, no extra package"


def of_rows(attn_implementation: str, model: ModelFacts, *, lie_apart: bool) -> str:
    """Return the attention of a micro-batch: varlen's is for rows that are padding-free."""
    return dense_attention(model)[0] if attn_implementation == VARLEN and not lie_apart else attn_implementation


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
    "FA3": "FlashAttention 3 (installed, for Hopper)",
    "FA4": "FlashAttention 4 (installed, for this device)",
}


def why_not_divided(model: ModelFacts) -> str | None:
    """Return why the experts of a model are not divided among devices; None where they can be."""
    if _is_among("expert_parallel", model):
        return None
    return f"transformers has no plan to divide the experts of {model.model_type}"


def why_not_divided_by_automodel(model: ModelFacts) -> str | None:
    """Return why NeMo Automodel does not divide the experts of a model; None where it does."""
    if _is_among("automodel_expert_parallel", model):
        return None
    return f"divided experts of {model.model_type} are untested with NeMo Automodel"


def why_no_stages(model: ModelFacts) -> str | None:
    """Return why NeMo Automodel does not divide the layers of a model into stages; None where it does."""
    if model.has_tied_head:
        return f"{model.path} shares the weights of embedding and head, which lie in different stages"
    if not _is_among("automodel_pipeline", model):
        return f"stages of {model.model_type} are untested with NeMo Automodel"
    if set(model.layer_types) - {"full_attention"}:
        return f"stages of layers with a sliding window, as {model.path} has, are untested with NeMo Automodel"
    return None


def why_no_varlen(recipe: Recipe, hardware: Hardware, model: ModelFacts, dtype: Dtype) -> str | None:
    """Return why a model does not use tunekit's attention for packed rows; None where it can."""
    device, parallel = hardware.device, recipe.parallel
    if not _is_among("varlen", model):
        return f"not verified for {model.model_type}"
    if model.attention_dropout:
        return f"no dropout support, and {model.path} has attention dropout of {model.attention_dropout:.0%}"
    if max(parallel.cp_size or 1, parallel.sp_size or 1, parallel.tp_size or 1) > 1:
        return "not supported with cp_size, sp_size or tp_size"
    if device.kind == "cpu":
        return None
    if not _has_flash(device, dtype):
        return f"needs a CUDA device of compute capability 8.0 or newer and a 16-bit dtype; this is {device.name}"
    if model.head_dim > FLASH_HEAD_DIM:
        return f"flash attention supports head dimensions up to {FLASH_HEAD_DIM}, not {model.head_dim}"
    return None


def lies_in_one_row(data: DataSection) -> bool:
    """Return whether a recipe asks for rows that are padding-free."""
    return data.packing or data.padding_free is True


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


def _why_not_asked(recipe: Recipe, hardware: Hardware, model: ModelFacts, dtype: Dtype, dense: str) -> str | None:
    """Return why the attention that a recipe asks for cannot be had; None where it can."""
    requested, device = recipe.model.attn_implementation, hardware.device
    if requested.startswith("flash_attention") and not _has_flash(device, dtype):
        why = f"{requested} needs a CUDA device of compute capability 8.0 or newer and a 16-bit dtype; this is "
        return f"{why}{device.name} with {dtype}"
    if requested.startswith("flash_attention") and hardware.flash_attn is False:
        return f"{requested} is not installed"
    if requested == "sdpa" and dense != "sdpa":
        return f"transformers has no sdpa for {model.model_type}"
    if requested == "flex_attention" and device.kind != "cuda":
        return "flex_attention has no backward pass on a CPU"
    why_not = why_no_varlen(recipe, hardware, model, dtype) if requested == VARLEN else None
    return None if why_not is None else f"{VARLEN} is not supported here: {why_not}"


@dataclass(frozen=True)
class Padding:
    """Collation of the rows of a micro-batch.

    Attributes:
        is_free: Whether they are padding-free, packed or not.
        mask_length: Length of a row of the attention mask, None where attention needs none.
        why: Why so.
    """

    is_free: bool
    mask_length: int | None
    why: str

    def reason(self) -> Reason:
        """The decision for the plan."""
        choice = "none (padding-free)" if self.is_free else "to the longest row in the micro-batch"
        return Reason(topic="padding", choice=choice, why=self.why)


def padding_of(
    data: DataSection, model: ModelFacts, attn_implementation: str, micro_batch_size: int, passes: Passes = SFT
) -> Padding:
    """Choose the collation of the rows of a micro-batch, with the reason."""
    masks = needs_mask(attn_implementation)
    is_single = micro_batch_size * passes.sequences_per_row == 1
    if passes.always_pads or (passes.media and not data.packing):
        masks_pictures = "image" in passes.media and model.tower is not None and model.tower.masks_text
        length = data.max_length + passes.num_virtual_tokens
        mask_length = length if masks and (masks_pictures or not is_single) else None
        why = f"rows with {'audio' if 'audio' in passes.media else 'images'} are padded"
        why = why if passes.media else f"TRL pads {passes.method} batches"
        why = "each row follows its virtual tokens" if passes.num_virtual_tokens else why
        return Padding(False, mask_length, why)
    whole = micro_batch_size * data.max_length
    apart = f"{attn_implementation} separates documents by a mask over the whole micro-batch" if masks else ""
    requested = data.padding_free
    if (data.packing or requested is True) and runs_decoder_by_document(model, attn_implementation):
        return Padding(True, data.max_length if masks else None, "packed" if data.packing else "set by the recipe")
    if data.packing:
        return Padding(True, whole if masks else None, f"packed; {apart}" if masks else "packed")
    if requested is True:
        masked = masks and not is_single
        return Padding(
            True, whole if masked else None, f"set by the recipe; {apart}" if masked else "set by the recipe"
        )
    padded = None if is_single else data.max_length
    if requested is False:
        return Padding(False, padded, "set by the recipe")
    keeps_scores = attn_implementation == VARLEN and _is_among("without_sdpa", model)
    if is_single and not keeps_scores:
        return Padding(False, padded, "one row per micro-batch")
    if masks:
        return Padding(False, padded, f"padding-free with {attn_implementation} would need a quadratic mask")
    if runs_by_document(model):
        return Padding(False, padded, "recurrent layers would process padding-free rows one by one")
    why_not = why_not_isolated(model, attn_implementation)
    if why_not is not None:
        return Padding(False, padded, f"padding-free rows would attend to each other: {why_not}")
    why_not = None if passes.teacher is None else why_not_packed(passes.teacher, attn_implementation)
    if why_not is not None:
        return Padding(False, padded, f"the teacher would read padding-free rows as one document: {why_not}")
    return Padding(True, None, f"{attn_implementation} reads the row boundaries")


def needs_mask(attn_implementation: str) -> bool:
    """Return whether concatenated rows are kept apart by a mask over all of them.

    FlexAttention's says it of blocks of tokens and takes next to no room.
    """
    return not (attn_implementation.startswith("flash_attention") or attn_implementation in (VARLEN, "flex_attention"))


FLOAT8_CAPABILITY = (9, 0)
"""Oldest CUDA compute capability that is trained on in float8."""

FLOAT8_MULTIPLE = 16
"""Divisor of both sizes of a matrix."""


def compile_faults(
    recipe: Recipe, hardware: Hardware, model: ModelFacts, attn_implementation: str
) -> Iterator[tuple[str, str]]:
    """Refuse to compile what cannot be compiled."""
    if recipe.train.torch_compile is not True:
        return
    repeated = repeats(recipe.data, model, attn_implementation)
    if repeated is not None:
        key = "data.packing" if recipe.data.packing else "data.padding_free"
        yield f"train.torch_compile: {_why_recompiled(repeated)}", f"unset it, or set {key}=false"
    if hardware.device.kind == "cpu" and hardware.cxx is False:
        yield "train.torch_compile: torch compiles CPU code with g++, which is not installed", "install g++"
    if isinstance(recipe.adapter, QloraAdapter):
        problem = f"train.torch_compile: {recipe.adapter.bits}-bit weights cannot be compiled"
        yield problem, "unset it, or use adapter.type=lora"


def why_not_offloaded(recipe: Recipe, device: Device, layout: Layout) -> str | None:
    """Return why activations are not offloaded on a device in a layout; None where they can be."""
    if device.kind == "cpu":
        return "on a CPU, activations are in host memory already"
    if layout.strategy != "single":
        return "activation offloading is untested on several devices, which can split long rows instead"
    if recipe.train.qat is not None:
        return "activation offloading is untested with train.qat"
    if recipe.train.fp8 or recipe.train.torch_compile is True:
        return f"activation offloading is untested with train.{'fp8' if recipe.train.fp8 else 'torch_compile'}"
    if has_teacher(recipe.method):
        return "activation offloading is untested with a teacher"
    if "activation_offloading" not in config_fields(recipe.method.type):
        return f"TRL does not offload activations of {recipe.method.type}"
    return None


def why_not_tiled(recipe: Recipe, model: ModelFacts, layout: Layout) -> str | None:
    """Return why MLPs are not computed in tiles in a layout; None where they can be."""
    train, adapter = recipe.train, recipe.adapter
    if layout.strategy != "single":
        return "tiled MLPs are untested on several devices, which can split long rows instead"
    if not recipe.method.is_single_pass:
        return f"tiled MLPs are untested with {recipe.method.type}"
    if model.num_experts:
        return f"the experts of {model.model_type} are not computed per token: their router loss balances all tokens"
    if not is_traced(model):
        return f"tiled MLPs are untested with {model.model_type}"
    if not isinstance(adapter, FullAdapter | LoraAdapter):
        return f"tiled MLPs are untested with adapter.type={adapter.type}"
    if model.is_packed_for(adapter):
        return f"tiled MLPs are untested with {model.published_as or 'int8'} weights"
    if isinstance(adapter, LoraAdapter) and (adapter.dropout or adapter.use_dora):
        return f"tiled MLPs are untested with adapter.{'dropout' if adapter.dropout else 'use_dora'}"
    if train.pure_bf16:
        return "gradients of tiles would be summed in bfloat16"
    if train.qat is not None:
        return "tiled MLPs are untested with train.qat"
    if train.fp8 or train.torch_compile is True:
        return f"tiled MLPs are untested with train.{'fp8' if train.fp8 else 'torch_compile'}"
    if recipe.model.kernels == "liger":
        return "tiled MLPs are untested with liger's kernels"
    return None


def why_not_compiled_in(layout: Layout) -> str | None:
    """Return why layers are not compiled in a layout; None where they are."""
    if layout.strategy.startswith("zero"):
        return "the gather and reduce hooks of DeepSpeed would break the compiled graph"
    if layout.engine == "automodel":
        return "untested with NeMo Automodel"
    if layout.is_divided_at_load or layout.cp_size > 1:
        return "untested with tensor, expert or context parallelism"
    return None


def choose_compile(
    recipe: Recipe,
    hardware: Hardware,
    kernels: Kernels,
    layout: Layout,
    *,
    saves_activations: bool,
    repeated: str | None,
) -> tuple[bool, str]:
    """Return whether layers are compiled, and the reason; `repeated` is what runs once for each document."""
    requested = recipe.train.torch_compile
    if requested != "auto":
        return requested, "set by the recipe"
    device = hardware.device
    if device.kind != "cuda":
        return False, f"compilation costs more time than it saves on {device.name}"
    if (device.compute_capability or (0, 0)) < TRITON_CAPABILITY:
        return False, f"only known to pay off from compute capability 8.0; this is {device.name}"
    if isinstance(recipe.adapter, QloraAdapter):
        return False, f"{recipe.adapter.bits}-bit weights cannot be compiled"
    if recipe.train.qat is not None:
        return False, "untested with train.qat"
    if saves_activations:
        return False, "untested with activation offloading or tiled MLPs"
    why_not = why_not_compiled_in(layout)
    if why_not is not None:
        return False, why_not
    if repeated is not None:
        return False, _why_recompiled(repeated)
    if not recipe.data.packing:
        return False, "unpacked rows differ in length, and every new length would recompile"
    if recipe.train.fp8:
        return True, "float8 casts are slow unless compiled with the preceding operations"
    if kernels != "torch":
        return False, f"no gain beyond {kernels}'s kernels"
    return True, "packed rows have similar lengths, and no other kernels are used"


def _why_recompiled(repeated: str) -> str:
    return f"{repeated} runs once per document, and every new length would recompile"


def float8_faults(recipe: Recipe, hardware: Hardware, model: ModelFacts, dtype: Dtype) -> Iterator[tuple[str, str]]:
    """Refuse training in float8 where device, adapter, types or packages are not for it."""
    if not recipe.train.fp8:
        return
    device = hardware.device
    if device.kind != "cuda" or (device.compute_capability or (0, 0)) < FLOAT8_CAPABILITY:
        problem = f"train.fp8: needs a CUDA device of compute capability 9.0 or newer; this is {device.name}"
        yield problem, "unset it"
    if not isinstance(recipe.adapter, FullAdapter):
        problem = f"train.fp8: requires full fine-tuning, but adapter.type is {recipe.adapter.type}"
        yield problem, "unset it, or use adapter.type=full"
    if dtype != "bfloat16":
        yield f"train.fp8: requires bfloat16 compute, not {dtype}", "use model.dtype=bfloat16"
    if hardware.torchao is False:
        yield "train.fp8: torchao is not installed", "pip install 'tunekit[fp8]'"
    if not num_float8(model):
        problem = f"train.fp8: no matrix of {model.path} has dimensions that are multiples of {FLOAT8_MULTIPLE}"
        yield problem, "unset it"


def qat_faults(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Refuse quantization-aware training of what is not quantized by it."""
    qat, train = recipe.train.qat, recipe.train
    if qat is None:
        return
    adapter = recipe.adapter
    if isinstance(adapter, FullAdapter):
        if adapter.is_partial or adapter.new_layers:
            yield "train.qat: requires that all parameters are trained, or LoRA", "unset it, or train all of them"
    elif adapter.type != "lora":
        yield f"train.qat: unsupported with adapter.type {adapter.type}", "use adapter.type=lora or full"
    elif others := beyond_plain_lora(adapter):
        yield f"train.qat: untested with adapter.{others[0]}", "unset one of them"
    elif model.published_as is not None:
        yield f"train.qat: {model.path} is quantized already", "unset it, or use the unquantized model"
    if not recipe.method.is_single_pass:
        yield f"train.qat: untested with {recipe.method.type}", "unset it, or use method.type=sft"
    if hardware.torchao is False:
        yield "train.qat: torchao is not installed", "pip install 'tunekit[fp8]'"
    if recipe.model.kernels not in ("auto", "torch"):
        yield f"train.qat: unsupported with {recipe.model.kernels}'s kernels", "unset model.kernels"
    levers = {"fp8": train.fp8, "pure_bf16": train.pure_bf16, "torch_compile": train.torch_compile is True}
    for name in [name for name, is_set in {**levers, "tiled_mlp": train.tiled_mlp is True}.items() if is_set]:
        yield f"train.qat: untested with train.{name}", "unset one of them"
    if model.num_experts or model.is_multimodal:
        kind = "experts" if model.num_experts else "image models"
        yield f"train.qat: untested with {kind}", "unset it"
    odd = sorted({sizes[1] for sizes in model.linears.values() if qat.group_size and sizes[1] % qat.group_size})
    if odd:
        words = f"train.qat.group_size: {qat.group_size} does not divide the inputs of all linear layers"
        yield f"{words}: {', '.join(map(str, odd))}", "use a divisor of them, or null for one scale per output"
    if model.model_type in model_types().stored_transposed:
        yield f"train.qat: torchao does not quantize the layers of {model.model_type}", "unset it"


def beyond_plain_lora(adapter: LoraAdapter) -> list[str]:
    """Return the settings of LoRA by which more than two matrices of a linear layer are trained, or read weights."""
    settings: dict[str, object] = {
        "init_lora_weights": adapter.init_lora_weights not in (True, "gaussian", "orthogonal"),
        "use_dora": adapter.use_dora,
        "relora": adapter.relora,
        "modules_to_save": adapter.modules_to_save,
        "target_parameters": adapter.target_parameters,
        "trainable_token_indices": adapter.trainable_token_indices,
    }
    return [name for name, value in settings.items() if value]


def why_no_qat_in(layout: Layout) -> str | None:
    """Return why a layout does not train quantization-aware; None where it does."""
    if layout.strategy.startswith("zero"):
        return "quantization-aware training is untested with DeepSpeed ZeRO"
    if layout.engine == "automodel":
        return "quantization-aware training is untested with NeMo Automodel"
    if layout.is_divided_at_load or layout.cp_size > 1 or layout.sp_size > 1:
        return "quantization-aware training is untested with tensor, expert, context or sequence parallelism"
    return None


def why_no_float8_in(layout: Layout) -> str | None:
    """Return why a layout does not train in float8; None where it does."""
    if layout.strategy.startswith("zero"):
        return "float8 is untested with DeepSpeed ZeRO"
    if layout.engine == "automodel":
        return "float8 is untested with NeMo Automodel"
    if layout.is_divided_at_load or layout.cp_size > 1:
        return "float8 is untested with tensor, expert or context parallelism"
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
        why = "set by the recipe; throughput and memory are estimated without it"
        reasons.append(Reason(topic="float8", choice=number, why=why))
    if (qat := recipe.train.qat) is not None:
        why = f"{len(model.linears):,} linear layers round in training, evaluations and samples"
        reasons.append(
            Reason(topic="QAT", choice=qat.words, why=f"{why}; `tunekit export --quantized` writes their values")
        )
    return tuple(reasons)


def kernels_faults(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Refuse Liger's kernels where it does not run, is not installed, or does not know the model."""
    if recipe.model.kernels != "liger":
        return
    device = hardware.device
    if device.kind != "cuda" or hardware.triton is False:
        why = "is not installed" if device.kind == "cuda" else f"does not run on {device.name}"
        problem = f"model.kernels: liger kernels need Triton, which {why}"
        yield problem, "use tunekit, which has torch implementations too, or torch"
    if hardware.liger_kernel is False:
        yield "model.kernels: liger-kernel is not installed", "pip install 'tunekit[gpu]', or unset model.kernels"
    if not _is_among("liger", model):
        hint = "unset model.kernels: tunekit's kernels match modules by what they compute, not by model type"
        yield f"model.kernels: liger-kernel has none for {model.model_type}", hint


def why_no_kernels(kernels: Kernels, layout: Layout) -> str | None:
    """Return why a layout takes no such kernels; None where it does."""
    if kernels == "torch":
        return None
    if layout.engine == "automodel":
        return "NeMo Automodel builds the model itself"
    if layout.tp_size > 1:
        return "tensor parallel weights are DTensors, which only torch's own operations support"
    if layout.ep_size > 1:
        return "transformers divides experts as it loads them, before kernels could take their place"
    if kernels == "tunekit" and layout.strategy == "zero3":
        return "ZeRO-3 gathers weights one module at a time, and fused modules read those of several"
    return None


def choose_kernels(recipe: Recipe, hardware: Hardware, layout: Layout) -> tuple[Kernels, str]:
    """Choose the kernels for a layout, with the reason; a requested kind was checked before."""
    requested, device = recipe.model.kernels, hardware.device
    if recipe.train.qat is not None:
        return "torch", "linear layers round their weights, which fused kernels do not"
    if requested != "auto":
        return requested, "set by the recipe" if requested != "tunekit" else f"set by the recipe; {_forms(hardware)}"
    why_not = why_no_kernels("tunekit", layout)
    if why_not is None and device.gfx is not None:
        why_not = "tunekit's kernels are untested on ROCm"
    elif why_not is None and device.kind == "cuda" and (device.compute_capability or (0, 0)) < TRITON_CAPABILITY:
        why_not = f"tunekit's kernels need compute capability 8.0 or newer; {device.name} is older"
    if why_not is not None:
        return "torch", f"torch's own operations: {why_not}"
    return "tunekit", _forms(hardware)


def why_trl_head(kernels: Kernels, layout: Layout) -> str | None:
    """Return why tokens are scored by TRL's head; None where by tunekit's. For methods whose trainers have one."""
    if kernels != "tunekit":
        return f"tunekit's head needs tunekit's kernels, not {kernels}'s"
    if layout.cp_size > 1 or layout.sp_size > 1:
        return "tunekit's head is untested on split sequences"
    return None


def head_kind(kind: HeadKind, method: MethodSection, kernels: Kernels, layout: Layout) -> HeadKind:
    """Return the kind of head, where TRL's trainer of a method scores tokens in tiles, which tunekit's head may
    replace.
    """
    if kind != "tiles" or not method.spec.uses_tiled_head or why_trl_head(kernels, layout) is not None:
        return kind
    is_sum = method.spec.trains_on == "tokens" and method.sums_losses
    return "sums" if is_sum and "label_smoothing_factor" not in method.trainer_args else "chunks"


def _forms(hardware: Hardware) -> str:
    """In which of their forms tunekit's kernels run."""
    if hardware.device.kind != "cuda":
        return "torch implementations (Triton needs an accelerator); most of the gain is from the loss head"
    if hardware.triton is False:
        return "torch implementations (Triton is not installed); most of the gain is from the loss head"
    return "Triton, for every module they match; the log lists the others"
