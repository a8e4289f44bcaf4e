"""Bytes that a run keeps from step to step, by phase, with those of a reference and of DoRA.

Bytes of what a run keeps from step to step: weights, adapters, gradients and the states of the optimizer.

Everything is counted tensor by tensor, as transformers, PEFT, bitsandbytes and the optimizers hold it; the tests build
the real ones and compare to the byte. Left out are buffers, tables of some KiB that a model computes with, and what a
CUDA allocator rounds up each tensor by (512 bytes).

The phases of a training step, and what each needs for a time.

Reference of a trained model: its kind and its cost.

A new adapter has its reference for nothing: the model without it. An adapter that is trained further has not: without
it the model is another one than training starts from. So a frozen copy of the adapter as it was stays beside it, and
takes its place for the reference's passes.

Bytes of DoRA (arXiv 2402.09353) as PEFT computes it: beside each product its norm, and so the whole update.

In each forward pass PEFT multiplies an identity matrix by both matrices of the adapter, adds the update to the weight
and takes the norm of each row. Under autocast all of that is float32. The magnitude is learned from the base layer's
output and from the adapter's, so both are kept; with dropout they are computed from what it lets through, by a copy of
the weight.

`e` is the number of bytes of the compute type.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tunekit.estimates.facts import SCORE, SCORE_BIAS, ModelFacts, Origin, continued_adapter, is_embedding, is_head
from tunekit.recipe.methods.spec import MethodSection
from tunekit.recipe.sections.adapters import (
    AdaloraAdapter,
    Adapter,
    FullAdapter,
    Ia3Adapter,
    LoraAdapter,
    MissAdapter,
    PeftAdapter,
    PromptTuningAdapter,
    QloraAdapter,
    Shape,
    VeraAdapter,
    layer_of,
)
from tunekit.recipe.sections.section import BLOCK_OPTIMS, LOW_RANK_OPTIMS, LowRank, Optim

Dtype = Literal["float32", "bfloat16", "float16"]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

BLOCK_4BIT, BLOCK_8BIT = 64, 256
"""Values that share a constant in bitsandbytes: of 4-bit weights, and of 8-bit states and constants."""

BLOCK_STATES = 256
"""Values that share a constant in states of tunekit's optimizers, of 8 and 4 bits."""

BLOCK_MXFP4 = 32
"""Values that share an exponent of a byte in MXFP4 (OCP Microscaling Formats 1.0)."""

CHUNK_VALUES, CHUNK_BYTES = 2**22, 16
"""Values of a packed weight that are written out at a time, and bytes for each while they are computed."""

CODE_4BIT_BYTES, CODE_8BIT_BYTES = 4 * 16, 4 * 256
"""Size of the float32 table of a quantized type's values."""

MIN_8BIT_VALUES = 4096
"""Smaller tensors keep states of more bits in 8-bit optimizers of bitsandbytes (`min_8bit_size`), and in 4 bits."""


_NUM_STATES = {
    "adamw": 2,
    "adagrad": 1,
    "rmsprop": 1,
    "sgd": 0,
    "ademamix": 3,
    "lion": 1,
    "schedule": 2,
    "galore": 2,
    "apollo": 2,
}
"""Values that an optimizer keeps of each trained one, by the first word of its name behind `paged_`: those of torch and
bitsandbytes, as transformers makes them, SGD without momentum. Adafactor is a case of its own."""

_WITH_STEP: frozenset[Optim] = LOW_RANK_OPTIMS | frozenset[Optim](
    {"adamw_torch", "adamw_torch_fused", "adagrad", "rmsprop", "tunekit_adamw"}
)
"""Optimizers of torch, and some of tunekit: they keep values in the type of the weight, and count the steps of each
tensor in another one of float32. Those of bitsandbytes keep values in float32 or 8 bits."""


def trained_whole(model: ModelFacts, adapter: PeftAdapter) -> list[str]:
    """Modules that are trained wholly beside an adapter; the score of a model that judges always is, as PEFT has it."""
    return [*(adapter.modules_to_save or []), *([SCORE.removesuffix(".weight")] if model.judges else [])]


def trained_tensors(model: ModelFacts, adapter: Adapter) -> dict[str, Shape]:
    """Shape of every tensor that is trained, by name.

    PEFT adapts all experts of a layer by one pair of matrices, of rank r for each of them, or 2r where gate and up
    projection are one. Modules in `modules_to_save` are copied, and trained wholly instead.
    """
    tensors = dict(model.tensors)
    if isinstance(adapter, FullAdapter):
        return {name: shape for name, shape in tensors.items() if _is_trained(name, model, adapter)}
    if isinstance(adapter, PromptTuningAdapter):
        width = tensors[model.vocabulary_tables[0]][1]
        return {"prompt_encoder.embedding.weight": (adapter.num_virtual_tokens, width)}
    whole = trained_whole(model, adapter)
    trained = model.tensors_in(whole) if whole else {}
    for name, own_rank in model.adapted(adapter).ranks.items():
        if whole and not set(whole).isdisjoint(name.split(".")):
            continue
        *experts, outputs, inputs = model.linears.get(name) or tensors.get(name) or tensors[name + ".weight"]
        shapes = adapter.shapes_of(name, outputs, inputs)
        if isinstance(adapter, LoraAdapter):
            rank = own_rank * math.prod(experts) * (2 if experts and adapter.doubles_rank(name) else 1)
            shapes |= {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}
        trained |= {f"{name}.{part}": shape for part, shape in shapes.items()}
    return trained | token_rows(model, adapter)


def shared_matrices(model: ModelFacts, adapter: Adapter) -> tuple[Shape, ...]:
    """Return the shapes of frozen tensors beside trained ones.

    VeRA has matrices that the adapters of all layers share, as large as the largest needs, and AdaLoRA a rank for each.
    """
    if isinstance(adapter, AdaloraAdapter):
        return ((1,),) * len(model.adapted(adapter).sizes)
    if not isinstance(adapter, VeraAdapter):
        return ()
    sizes = model.adapted(adapter).sizes.values()
    outputs, inputs = (max(size) for size in zip(*sizes, strict=True)) if sizes else (0, 0)
    return (adapter.rank, inputs), (outputs, adapter.rank)


def trained_tokens(model: ModelFacts, adapter: Adapter) -> tuple[int, ...]:
    """Return the ids of tokens whose rows are trained beside an adapter: those that are added, and chosen ones."""
    if not isinstance(adapter, LoraAdapter):
        return ()
    return tuple(dict.fromkeys((*model.new_tokens, *(adapter.trainable_token_indices or ()))))


def token_rows(model: ModelFacts, adapter: Adapter) -> dict[str, Shape]:
    """Shape of the rows of tokens that are trained beside an adapter, by table: a tied head has none of its own.

    PEFT copies them out of the table (`trainable_token_indices`). A table that is trained wholly has them anyway.
    """
    tokens = trained_tokens(model, adapter)
    if isinstance(adapter, FullAdapter) or not tokens:
        return {}
    whole = model.tensors_in(adapter.modules_to_save) if adapter.modules_to_save else {}
    tables = [name for name in model.vocabulary_tables if name not in whole]
    shape = (len(tokens), model.hidden_size)
    return {name.removesuffix(".weight") + ".token_adapter.trainable_tokens_delta": shape for name in tables}


def row_copies_bytes(model: ModelFacts, adapter: Adapter) -> int:
    """Bytes of a table with the trained rows of tokens in it, which PEFT makes anew in each forward pass."""
    return 4 * model.vocab_size * model.hidden_size if token_rows(model, adapter) else 0


def num_adapted_layers(model: ModelFacts, adapter: PeftAdapter) -> int:
    """Number of decoder layers that adapters are spread over."""
    return len(set(adapter.layers_to_transform or ())) or model.num_layers


def _is_trained(name: str, model: ModelFacts, adapter: FullAdapter) -> bool:
    """Return whether a tensor is trained in full fine-tuning; the score of a model that judges always is."""
    if model.is_untrained(name, adapter):
        return False
    if model.is_tower(name):
        return True
    names = dict.fromkeys((name, model.module_name(name)))
    return any(adapter.trains(each, model.num_layers) for each in names) or (
        model.judges and name in (SCORE, SCORE_BIAS)
    )


def num_live_layers(model: ModelFacts, adapter: Adapter) -> int:
    """Return the number of last layers through which gradients pass: not those below all that is trained.

    Where layers differ it is that of all layers, an upper bound.
    """
    if not isinstance(adapter, FullAdapter) or not adapter.is_partial or model.num_experts or model.num_sliding_layers:
        return model.num_layers
    trained = trained_tensors(model, adapter)
    if any(is_embedding(name) or model.is_tower(name) for name in trained):
        return model.num_layers
    numbers = [number for name in trained if (number := layer_of(name)) is not None]
    return model.num_layers - min(numbers, default=model.num_layers)


@dataclass(frozen=True)
class Tables:
    """Trained ones of the two large tables of a vocabulary."""

    embedding: bool
    head: bool
    """Also where it is the embedding."""
    is_one: bool
    """True if they are the same trained tensor. PEFT copies modules that it trains whole, so that nothing is tied to
    them."""

    @property
    def num(self) -> int:
        """Trained tables."""
        return 1 if self.is_one else self.embedding + self.head


def trained_tables(model: ModelFacts, adapter: Adapter) -> Tables:
    """Return which tables are trained: all, or those that are trained beside an adapter."""
    if isinstance(adapter, FullAdapter) and not adapter.is_partial:
        return Tables(embedding=True, head=not model.judges, is_one=model.has_tied_head)
    if isinstance(adapter, FullAdapter):
        trained = trained_tensors(model, adapter)
        embedding, tied = any(map(is_embedding, trained)), model.has_tied_head
        return Tables(embedding, embedding if tied else any(map(is_head, trained)), is_one=tied and embedding)
    names = model.tensors_in(adapter.modules_to_save) if adapter.modules_to_save else ()
    return Tables(any(map(is_embedding, names)), any(map(is_head, names)), is_one=False)


def unties_head(model: ModelFacts, adapter: Adapter) -> bool:
    """Return whether an embedding is trained beside an adapter while the head that shares it stays as it was."""
    return not isinstance(adapter, FullAdapter) and model.has_tied_head and trained_tables(model, adapter).embedding


def num_trainable_params(model: ModelFacts, adapter: Adapter) -> int:
    """Number of parameters that are trained."""
    if isinstance(adapter, FullAdapter):
        if adapter.is_partial:
            return sum(math.prod(shape) for shape in trained_tensors(model, adapter).values())
        return model.num_params - model.num_untrained_params(adapter)
    if isinstance(adapter, LoraAdapter) and not trained_whole(model, adapter):
        adapters = model.adapted(adapter).adapters.items()
        vectors = adapter.use_dora + adapter.lora_bias
        magnitudes = vectors * sum(outputs * times for (outputs, _, _), times in adapters)
        magnitudes += sum(math.prod(shape) for shape in token_rows(model, adapter).values())
        return magnitudes + sum(rank * (outputs + inputs) * times for (outputs, inputs, rank), times in adapters)
    return sum(math.prod(shape) for shape in trained_tensors(model, adapter).values())


def initial_bytes(model: ModelFacts, adapter: Adapter) -> int:
    """Bytes beside the weights while `corda` and `loftq` compute initial matrices, in float32.

    CorDA has the covariances of all modules' inputs, and of one weight its covariance three times more, itself, its
    product and the factors of that. LoftQ has of one weight itself, what it loses and the factors of that.
    """
    if not isinstance(adapter, LoraAdapter) or adapter.init_lora_weights not in ("corda", "loftq"):
        return 0
    sizes = model.adapted(adapter).sizes.values()
    factors = 4 * 4 * max((outputs * inputs for outputs, inputs in sizes), default=0)
    if adapter.init_lora_weights == "loftq":
        return factors
    return factors + 4 * (sum(inputs**2 for _, inputs in sizes) + 3 * max(inputs**2 for _, inputs in sizes))


def dense_bytes(model: ModelFacts, adapter: Adapter, dtype: Dtype) -> int:
    """Bytes of the weights that `loftq` reads beside those in 4 bits, in host memory."""
    return BYTES[dtype] * model.num_params if isinstance(adapter, LoraAdapter) and adapter.is_of_4bit_base else 0


def weights_bytes(model: ModelFacts, adapter: Adapter, dtype: Dtype, trained_dtype: Dtype = "float32") -> int:
    """Bytes of the model's own weights: in `trained_dtype` where they are trained, else in `dtype`, or in few bits.

    Embeddings, norms, routers and head are not quantized.
    """
    if isinstance(adapter, FullAdapter):
        return BYTES[trained_dtype] * model.num_params
    if not isinstance(adapter, QloraAdapter):
        return BYTES[dtype] * model.num_params
    return quantised_bytes(model, adapter) + BYTES[dtype] * (model.num_params - num_quantised(model))


def num_quantised(model: ModelFacts) -> int:
    """Number of parameters that QLoRA keeps in few bits: of linear layers but the head, and of experts.

    Of a model published in MXFP4 it keeps the experts as they are, and nothing else; of other packed ones the linear
    layers that are packed.
    """
    stacks = sum(math.prod(shape) * times for shape, times in model.expert_stacks.items())
    stacks = 0 if model.packed is not None else stacks
    return stacks if model.published_as == "mxfp4" else model.quantised_linears.num_params + stacks


def quantised_bytes(model: ModelFacts, adapter: Adapter) -> int:
    """Bytes of the weights that are kept in few bits."""
    if not isinstance(adapter, QloraAdapter):
        return 0
    if model.published_as == "mxfp4":
        return num_quantised(model) // 2 + num_quantised(model) // BLOCK_MXFP4
    if model.packed is not None:
        return sum(model.packed.weights.values())
    if adapter.bits == 8:
        return sum(times * bytes_in_8_bits(*size) for size, times in model.quantised_linears.shapes.items())
    shapes = (*model.quantised_linears.shapes.items(), *model.expert_stacks.items())
    return sum(times * bytes_in_4_bits(math.prod(shape), double=adapter.double_quant) for shape, times in shapes)


def scales_bytes(model: ModelFacts, adapter: Adapter) -> int:
    """Bytes of what belongs to weights in few bits besides their values: scales and tables."""
    if not isinstance(adapter, QloraAdapter):
        return 0
    bits = adapter.bits if model.packed is None else model.packed.bits
    return quantised_bytes(model, adapter) - num_quantised(model) * bits // 8


def bytes_in_8_bits(outputs: int, inputs: int) -> int:
    """Bytes of a weight in 8 bits with a float32 scale for each output (arXiv 2208.07339, section 2.1)."""
    return outputs * inputs + 4 * outputs


def bytes_in_4_bits(size: int, *, double: bool) -> int:
    """Bytes of a weight in 4 bits: half a byte a value, a constant for every 64 of them, and the table of the type.

    The constants are float32, or with double quantization 8-bit values, which have a float32 constant for every 256 of
    them, their mean and a table of their own (arXiv 2305.14314, section 3).
    """
    constants = math.ceil(size / BLOCK_4BIT)
    packed = math.ceil(size / 2) + CODE_4BIT_BYTES
    if not double:
        return packed + 4 * constants
    return packed + constants + 4 * math.ceil(constants / BLOCK_8BIT) + 4 + CODE_8BIT_BYTES


def dequantised_bytes(model: ModelFacts, adapter: Adapter, dtype: Dtype) -> int:
    """Bytes of the largest quantized weight in the compute type, in which each one is for as long as it is used.

    Experts are counted where they are computed. Packed weights are made dense a part at a time.
    """
    if not isinstance(adapter, QloraAdapter) or model.published_as == "mxfp4":
        return 0
    size = max((outputs * inputs for outputs, inputs in model.quantised_linears.shapes), default=0)
    return BYTES[dtype] * size + (CHUNK_BYTES * min(CHUNK_VALUES, size) if model.is_packed_for(adapter) else 0)


def trained_bytes(
    model: ModelFacts,
    adapter: Adapter,
    optim: Optim,
    trained_dtype: Dtype = "float32",
    low_rank: LowRank | None = None,
) -> tuple[int, int]:
    """Bytes of adapters and of what is trained whole beside them, and of the optimizer's states; counted once."""
    key = (repr(adapter), optim, trained_dtype, low_rank)
    if key not in model.trained_bytes:
        tensors = trained_tensors(model, adapter)
        shared = sum(4 * math.prod(shape) for shape in shared_matrices(model, adapter))
        adapters = shared + adapters_bytes(tensors, adapter)
        # AdaLoRA keeps of each trained value its importance, and the means of that and of how much it varies.
        scores = 3 * adapters_bytes(tensors, adapter) if isinstance(adapter, AdaloraAdapter) else 0
        of_optimizer = states_bytes(tensors, optim, trained_dtype, low_rank, model.head_dim)
        model.trained_bytes[key] = adapters, of_optimizer + scores
    return model.trained_bytes[key]


def adapters_bytes(trained: Mapping[str, Shape], adapter: Adapter) -> int:
    """Bytes of what is trained besides the model's own weights, in float32."""
    return 0 if isinstance(adapter, FullAdapter) else sum(4 * math.prod(shape) for shape in trained.values())


def states_bytes(
    trained: Mapping[str, Shape],
    optim: Optim,
    trained_dtype: Dtype = "float32",
    low_rank: LowRank | None = None,
    head_dim: int = 1,
) -> int:
    """Bytes of an optimizer's states for what is trained, after its first step.

    8-bit states carry a float32 constant for every 256 values (arXiv 2110.02861). Those of bitsandbytes share a table
    for signed and one for unsigned values; embeddings keep float32 states (transformers asks for it), and so does what
    is small. Those of tunekit have no table, and are of all tensors; in 4 bits, of those with whole blocks. Muon keeps
    one value of each in the type of the weight, and what AdamW updates beside it has two and a step. GaLore and APOLLO
    have states of a low rank. Adam-mini has one value of each, a float32 for each block, of which queries and keys have
    one in `head_dim` rows, and a step.
    """
    if optim == "adam_mini":
        return sum(_mini_bytes(name, shape, head_dim, BYTES[trained_dtype]) for name, shape in trained.items())
    if low_rank is not None:
        others = {name: shape for name, shape in trained.items() if not has_low_rank(name, shape, low_rank)}
        matrices = [shape for name, shape in trained.items() if name not in others]
        total = sum(_low_rank_bytes(shape, low_rank, BYTES[trained_dtype]) for shape in matrices)
        return total + states_bytes(others, optim, trained_dtype)
    if optim in BLOCK_OPTIMS:
        return block_states_bytes(trained.values(), optim, trained_dtype)
    if optim == "adafactor":
        return sum(_factored_bytes(shape) for shape in trained.values())
    if optim == "muon":
        e = BYTES[trained_dtype]
        return sum(
            (e if uses_muon(name, shape) else 2 * e) * math.prod(shape) + 4 * (not uses_muon(name, shape))
            for name, shape in trained.items()
        )
    num_states, is_8bit = _NUM_STATES[_family(optim)], optim.endswith("_8bit")
    each = BYTES[trained_dtype] if optim in _WITH_STEP or optim == "schedule_free_adamw" else 4
    total, quantised = 0, False
    for name, shape in trained.items():
        size = math.prod(shape)
        if is_8bit and size >= MIN_8BIT_VALUES and not is_embedding(name):
            total += num_states * (size + 4 * math.ceil(size / BLOCK_8BIT))
            quantised = True
        else:
            total += each * num_states * size + 4 * (optim in _WITH_STEP)
    return total + (min(num_states, 2) * CODE_8BIT_BYTES if quantised else 0)


def block_states_bytes(
    shapes: Iterable[Shape], optim: Optim, trained_dtype: Dtype = "float32", num_shards: int = 1
) -> int:
    """Bytes of a device's states of `tunekit_adamw_8bit` or `tunekit_adamw_4bit`, of the largest shards of tensors."""
    total = 0
    for shape in shapes:
        rows, *sides = shape or (1,)
        size = math.ceil(rows / num_shards) * math.prod(sides)
        if BLOCK_OPTIMS[optim] == 8:
            each = size + 4 * math.ceil(size / BLOCK_STATES)
        elif size >= MIN_8BIT_VALUES and size % BLOCK_STATES == 0 and math.prod(shape) % BLOCK_STATES == 0:
            each = size // 2 + 4 * size // BLOCK_STATES
        else:
            each = BYTES[trained_dtype] * size
        total += 2 * each + 4
    return total


def _family(optim: Optim) -> str:
    return optim.removeprefix("paged_").removeprefix("tunekit_").partition("_")[0]


def _factored_bytes(shape: Shape) -> int:
    """Bytes that Adafactor keeps: of a matrix its rows and columns (arXiv 1804.04235), and the weight's size."""
    if len(shape) < 2:
        return 4 * math.prod(shape) + 4
    *leading, rows, columns = shape
    return 4 * math.prod(leading) * (rows + columns) + 4


def uses_muon(name: str, shape: Shape) -> bool:
    """Return whether `muon` updates a trained tensor by Muon, and not by AdamW.

    These are matrices of layers and of adapters, and stacks of them, one for each expert: no embedding, head or score.
    """
    if name.endswith("bias") or ".token_adapter." in name or name == SCORE or is_embedding(name) or is_head(name):
        return False
    return len(shape) == 2 or (len(shape) == 3 and ".experts." in name)


def has_low_rank(name: str, shape: Shape, low_rank: LowRank) -> bool:
    """Return whether the states of a trained tensor have a low rank: of a matrix whose sides are both greater.

    These are the matrices of layers, or those whose names match.
    """
    if len(shape) != 2 or min(shape) <= low_rank.rank:
        return False
    if low_rank.target_modules is None:
        return uses_muon(name, shape)
    return not is_embedding(name) and any(re.search(pattern, name) for pattern in low_rank.target_modules)


def _low_rank_bytes(shape: Shape, low_rank: LowRank, e: int) -> int:
    """Bytes of two moments and the number of steps; beside them GaLore keeps the projection, APOLLO a norm."""
    lesser, greater = sorted(shape)
    beside = low_rank.rank * lesser if low_rank.optim == "galore_adamw" else 1
    return e * (2 * low_rank.rank * greater + beside) + 4


def rows_per_block(name: str, shape: Shape, head_dim: int) -> int:
    """Return the rows of a trained tensor that share a second moment in `adam_mini`: of queries and keys those of a
    head, 1 else; 0 for biases, which AdamW updates.
    """
    if name.endswith("bias"):
        return 0
    is_of_heads = not {"q_proj", "k_proj"}.isdisjoint(name.split(".")) and len(shape) == 2
    return head_dim if is_of_heads and shape[0] % head_dim == 0 else 1


def _mini_bytes(name: str, shape: Shape, head_dim: int, e: int, num_shards: int = 1) -> int:
    """Bytes that `adam_mini` keeps of a tensor, or of one of its shards: blocks of several rows and of vectors are
    whole.
    """
    rows, (first, *sides) = rows_per_block(name, shape, head_dim), shape or (1,)
    num_values = -(-first // num_shards) * math.prod(sides)
    if rows == 0:
        return 2 * e * num_values + 4
    num_blocks = 1 if len(shape) < 2 else first // rows if rows > 1 else num_values // sides[-1]
    return e * num_values + 4 * num_blocks + 4


@dataclass(frozen=True)
class MatrixCost:
    """Bytes and operations, on a device, of an optimizer that updates matrices otherwise than other tensors."""

    states_bytes: int
    step_bytes: int
    """Bytes of the largest matrix while its update is computed."""
    gathered_bytes: int
    """Bytes of the matrices that devices divide, whole."""
    flops: int
    num_params: int
    """Parameters that are updated so, on all devices."""


@cache
def muon_cost(trained: tuple[tuple[str, Shape], ...], trained_dtype: Dtype, num_shards: int = 1) -> MatrixCost:
    """Return what `muon` costs a device that holds one of `num_shards` shards, cut along the first dimension.

    An update is in bfloat16: the momentum, normalized, after an iteration and before it, and two products of it with
    itself, of the lesser side squared. Of shards there are those of as many matrices as devices beside a whole one. An
    iteration takes three products (`tunekit.kernels.muon`).
    """
    shards = {name: (-(-rows // num_shards), *sides) for name, shape in trained for rows, *sides in [shape or (1,)]}
    step_bytes = gathered_bytes = flops = num_params = 0
    for name, shape in trained:
        if not uses_muon(name, shape):
            continue
        is_cut = num_shards > 1 and len(shape) == 2
        *_, rows, columns = shape
        num = math.prod(shards[name][:-2])
        less, more = min(rows, columns), max(rows, columns)
        copies = 2 * num * ((4 if is_cut else 3) * less * more + 2 * less * less)
        step_bytes = max(step_bytes, copies)
        gathered_bytes += 2 * less * more * is_cut
        flops += 5 * num * (4 * less * less * more + 2 * less**3) // (num_shards if is_cut else 1)
        num_params += math.prod(shape)
    return MatrixCost(states_bytes(shards, "muon", trained_dtype), step_bytes, gathered_bytes, flops, num_params)


def muon_cost_of(model: ModelFacts, adapter: Adapter, trained_dtype: Dtype, num_shards: int = 1) -> MatrixCost:
    """Return what `muon` costs a device for a model."""
    return muon_cost(tuple(trained_tensors(model, adapter).items()), trained_dtype, num_shards)


@cache
def low_rank_cost(
    trained: tuple[tuple[str, Shape], ...], low_rank: LowRank, trained_dtype: Dtype, num_shards: int = 1
) -> MatrixCost:
    """Return what GaLore or APOLLO costs a device that holds one of `num_shards` shards of the weights.

    Each device has the states of whole matrices, gathers the gradient of each, and computes its update. Singular
    vectors take 6 m n² + 20 n³ operations (Golub and Van Loan, Matrix Computations, 8.6: R-SVD), in float32 and on a
    copy.
    """
    e, rank, is_galore = BYTES[trained_dtype], low_rank.rank, low_rank.optim == "galore_adamw"
    matrices = [shape for name, shape in trained if has_low_rank(name, shape, low_rank)]
    others = {
        name: (-(-rows // num_shards), *more)
        for name, shape in trained
        if not has_low_rank(name, shape, low_rank)
        for rows, *more in [shape or (1,)]
    }
    flops = step_bytes = 0
    for lesser, greater in map(sorted, matrices):
        whole, low = lesser * greater, rank * greater
        flops += (4 if is_galore else 2) * rank * whole
        moments = 3 * e * low
        if is_galore:
            flops += (6 * lesser * whole + 20 * lesser**3) // low_rank.update_proj_gap
            vectors = 4 * (whole + lesser * lesser + lesser)
            step = max(moments, e * (low + whole), vectors + (4 if e == 4 else 8) * whole)
        else:
            # Beside the update, norms of channels and of the whole.
            drawn = rank * lesser * (4 if e == 4 else 4 + e)
            norms = e * (2 * low + 3 * greater)
            step = max(moments, drawn, e * (rank * lesser + low), norms, e * (whole + greater + 3))
        step_bytes = max(step_bytes, step + (e * whole if num_shards > 1 else 0))
    num_params = sum(map(math.prod, matrices))
    states = sum(_low_rank_bytes(shape, low_rank, e) for shape in matrices)
    states += states_bytes(others, low_rank.optim, trained_dtype)
    return MatrixCost(states, step_bytes, e * num_params if num_shards > 1 else 0, flops, num_params)


def matrix_cost_of(
    model: ModelFacts,
    adapter: Adapter,
    optim: Optim,
    trained_dtype: Dtype,
    low_rank: LowRank | None,
    num_shards: int = 1,
) -> MatrixCost | None:
    """Return what an optimizer that updates matrices otherwise costs a device for a model; None for others."""
    if optim == "muon":
        return muon_cost_of(model, adapter, trained_dtype, num_shards)
    if optim == "adam_mini":
        trained, e = trained_tensors(model, adapter), BYTES[trained_dtype]
        kept = sum(_mini_bytes(name, shape, model.head_dim, e, num_shards) for name, shape in trained.items())
        return MatrixCost(kept, 0, 0, 0, sum(map(math.prod, trained.values())))
    if low_rank is None:
        return None
    return low_rank_cost(tuple(trained_tensors(model, adapter).items()), low_rank, trained_dtype, num_shards)


_LARGE = {"layer": (4096, 4096)}


@cache
def optimizer_bytes_per_param(optim: Optim, trained_dtype: Dtype = "float32") -> float:
    """Return the optimizer state bytes per trained parameter of a large matrix, rounded: for how much an update
    moves.
    """
    return round(states_bytes(_LARGE, optim, trained_dtype) / 4096**2, 3)


_Forward = Literal["load", "generation", "pictures", "forward", "reference"]
_Backward = Literal["head", "last layer", "middle layers", "first layer", "embedding"]
Phase = Literal[_Forward, _Backward, "optimizer"]
"""Phase of a run in which memory peaks: while the model is loaded; and of a step while answers are generated, while
pictures are encoded, at the end of the forward pass, in that of a reference model after it, in the backward pass of the
head, of the last layer, of those between, of the first and of the embedding, or in the optimizer's step. On one device
memory falls or rises evenly from layer to layer, so the layers between are never the peak there."""

PHASE_WORDS: dict[Phase, str] = {
    "load": "while loading the model",
    "generation": "during generation",
    "pictures": "while the vision tower encodes images",
    "forward": "at the end of the forward pass",
    "reference": "in the forward pass of the reference",
    "head": "in the backward pass of the head",
    "last layer": "in the backward pass of the last layer",
    "middle layers": "in the backward pass of the layers",
    "first layer": "in the backward pass of the first layer",
    "embedding": "in the backward pass of the embedding",
    "optimizer": "in the optimizer step",
}


@dataclass(frozen=True)
class Need:
    """Bytes that a phase needs besides what a run keeps from step to step."""

    gradients: int = 0
    activations: int = 0
    logits: int = 0
    gathered: int = 0
    kv_cache: int = 0
    pictures: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.gradients + self.activations + self.logits + self.gathered + self.kv_cache + self.pictures


@dataclass(frozen=True)
class Kept:
    """Bytes that a run keeps from step to step: on each device, and on each node for its devices together."""

    weights: int
    adapters: int = 0
    masters: int = 0
    reference: int = 0
    vllm: int = 0
    optimizer: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0

    @property
    def total(self) -> int:
        """On a device."""
        return self.loaded + self.optimizer

    @property
    def loaded(self) -> int:
        """On a device before the first step: an optimizer makes its states then."""
        return self.weights + self.adapters + self.masters + self.reference + self.vllm


Reference = Literal["none", "without adapter", "copied adapter", "second model", "beforehand"]
"""Reference of a run: none; the model without its adapter; the adapter as it was, kept frozen beside the trained one; a
second model; or log-probabilities that were computed before training."""


def reference_of(method: MethodSection, adapter: Adapter, origin: Origin | None) -> Reference:
    """Return the reference of a run."""
    if method.reference_use != "model":
        return method.reference_use
    if isinstance(adapter, FullAdapter):
        return "second model"
    return "without adapter" if continued_adapter(origin, adapter) is None else "copied adapter"


def reference_words(reference: Reference, origin: Origin | None) -> str:
    """Describe the reference of a run."""
    name = "" if origin is None else origin.name
    merged = f", {name} merged" if origin is not None and origin.adapter is not None else ""
    words: dict[Reference, str] = {
        "none": "no reference",
        "without adapter": "the model without its adapters as reference",
        "beforehand": "reference log-probabilities precomputed before training",
        "second model": f"a second model as reference{merged}",
        "copied adapter": f"the initial adapter of {name} as reference",
    }
    return words[reference]


@dataclass(frozen=True)
class Dora:
    """Bytes of the layers of a model with such adapters, besides those of plain ones."""

    copies: int
    """Bytes of weights that a layer keeps."""
    norming: int
    """Most bytes of weights while the norm of one is computed: of the last in a layer, where it has an adapter."""
    applying: int
    """Bytes of weights that are there still when its result is used."""


def reads_inputs(adapter: Adapter) -> bool:
    """Return whether the gradients of what is trained need the inputs of linear layers.

    Those of VeRA and (IA)3 need what comes behind frozen products, those of MiSS sums of inputs, virtual tokens nothing
    of them.
    """
    return not isinstance(adapter, VeraAdapter | Ia3Adapter | MissAdapter | PromptTuningAdapter)


def kept_beside(model: ModelFacts, adapter: Adapter, e: int, *, casted: bool) -> int:
    """Return the bytes per token that a layer's adapters keep, besides inputs and the results of LoRA's matrices A.

    DoRA keeps the outputs of the base layer and of the adapter, VeRA those of both random matrices, (IA)3 what it
    multiplies: outputs, or inputs in the type of the factors; MiSS keeps the inputs summed over its blocks.
    """
    if isinstance(adapter, FullAdapter):
        return 0
    sizes, num_layers = model.adapter_linears(adapter), num_adapted_layers(model, adapter)
    all_outputs = sum(outputs for outputs, _ in sizes.values())
    if isinstance(adapter, LoraAdapter):
        return 2 * e * (all_outputs // num_layers) if adapter.use_dora else 0
    if isinstance(adapter, VeraAdapter):
        return e * (all_outputs + adapter.rank * len(sizes)) // num_layers
    if isinstance(adapter, MissAdapter):
        return e * adapter.rank * len(sizes) // num_layers
    if isinstance(adapter, Ia3Adapter):
        of_inputs = {name: inputs for name, (_, inputs) in sizes.items() if adapter.scales_input(name)}
        outputs = sum(outputs for name, (outputs, _) in sizes.items() if name not in of_inputs)
        return (e * outputs + (4 if casted else e) * sum(of_inputs.values())) // num_layers
    return 0


def kept_matrices(model: ModelFacts, adapter: Adapter, e: int, *, casted: bool) -> int:
    """Return the bytes of weights that a layer's adapters compute anew in each forward pass, and keep.

    (IA)3 multiplies its factors by 1. AdaLoRA multiplies directions by values, and adds to the rank; under autocast the
    other directions are cast, as VeRA's frozen matrices are for each layer. OFT keeps of each block the matrix Q, its
    square and cube, and the rotation, and under autocast the copies that each product casts.
    """
    if isinstance(adapter, FullAdapter | LoraAdapter | PromptTuningAdapter):
        return 0
    sizes = model.adapter_linears(adapter)
    if isinstance(adapter, MissAdapter):
        total = e * adapter.rank * sum(outputs for outputs, _ in sizes.values()) if casted else 0
    elif isinstance(adapter, Ia3Adapter):
        factors = (adapter.shapes_of(name, *size)["ia3_l"] for name, size in sizes.items())
        total = 4 * sum(math.prod(shape) for shape in factors)
    elif isinstance(adapter, AdaloraAdapter):
        total = len(sizes) * 4 + e * adapter.init_r * sum(inputs for _, inputs in sizes.values())
        total += e * adapter.init_r * sum(outputs for outputs, _ in sizes.values()) if casted else 0
    elif isinstance(adapter, VeraAdapter):
        total = e * adapter.rank * sum(map(sum, sizes.values())) if casted else 0
    else:
        rotations = adapter.oft_block_size * sum(inputs for _, inputs in sizes.values())
        blocks = len(sizes) * adapter.oft_block_size**2 if adapter.block_share else rotations
        total = (6 if casted else 3) * e * blocks + e * rotations
    return total // num_adapted_layers(model, adapter)


def dora_of(model: ModelFacts, adapter: LoraAdapter, e: int, *, casted: bool, last: str) -> Dora:
    """Return these bytes; `last` names the last linear layer of a decoder layer."""
    linears, num_layers = model.adapter_linears(adapter), num_adapted_layers(model, adapter)
    params = sum(outputs * inputs for outputs, inputs in linears.values()) // num_layers
    lasts = {sizes for name, sizes in linears.items() if name.endswith(last)}
    moments = (_moments(*sizes, e, casted=casted) for sizes in lasts or set(linears.values()))
    norming, applying = max(moments, default=(0, 0))
    copies = e * params if casted and adapter.dropout else 0
    return Dora(copies, norming, applying)


def _moments(outputs: int, inputs: int, e: int, *, casted: bool) -> tuple[int, int]:
    """Bytes around a weight when its norm is computed, and when the result is used.

    The identity matrix in the compute type is kept with the update until its layer has been computed. Under autocast
    weight and update are float32, and the scaled update and the sum too; else the weight is what it was.
    """
    weight, identity = outputs * inputs, e * inputs**2
    if casted:
        # Before: both identity matrices, and the update in the compute type.
        return max(16 * weight + identity, 4 * inputs**2 + identity + e * weight), 8 * weight + identity
    return 3 * e * weight + identity, e * weight + identity
