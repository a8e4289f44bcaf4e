"""Passes of a training method besides one forward and one backward pass, and their memory.

What a method does in a step stands with its section (`tunekit.recipe.methods.spec`). Where vLLM generates
(`tunekit.planner.decisions.vllm`) there is no cache of transformers'. The memory of a teacher, a second, frozen
model and the comparison with it, is a closed form; a test compares its peak with a trace of TRL's loss.

Symbols: h hidden size, i intermediate size, q = heads x head size, kv = key-value heads x head size, e bytes of the
compute type.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from tunekit.errors import PlanError
from tunekit.estimates.facts import ModelFacts, Origin
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory import states
from tunekit.estimates.memory.activations import HEAD_COLUMNS, HEAD_TOKENS, Head, Layers, Products, products_of
from tunekit.estimates.memory.states import BYTES, Dtype, Kept, Need, Phase, weights_bytes
from tunekit.recipe.methods import generates
from tunekit.recipe.methods.spec import Generation, MethodPasses, MethodSection, PassInputs
from tunekit.recipe.sections.adapters import Adapter, FullAdapter, num_virtual_tokens
from tunekit.recipe.sections.data import DataSection


@dataclass(frozen=True)
class Passes(MethodPasses):
    """Passes of a method in an optimizer step of a plan."""

    copies_adapter: bool = False
    """True if the reference is a copy of the adapter, kept besides the trained one."""
    teacher: ModelFacts | None = None
    """The model that another one learns from, which goes through each micro-batch too."""


SFT = Passes()
Needs = Mapping[Phase, Need]


_SORTED_PIECES = 32
"""Pieces of text whose probabilities are sorted at once (`TILE_PIECES` of tunekit/methods/logit_distance.py)."""


def passes_of(
    method: MethodSection,
    adapter: Adapter,
    data: DataSection,
    *,
    global_batch_size: int,
    teacher: ModelFacts | None = None,
    by_vllm: bool = False,
) -> Passes:
    """Return the passes of a method in a step.

    Args:
        method: The method.
        adapter: What is trained.
        data: How long sequences are.
        global_batch_size: Rows, pairs or answers of an optimizer step.
        teacher: The model to learn from, for distillation.
        by_vllm: Whether vLLM generates answers.
    """
    inputs = PassInputs(isinstance(adapter, FullAdapter), data.max_length, global_batch_size, by_vllm)
    passes, virtual = method.passes(inputs), num_virtual_tokens(adapter)
    pads = passes.always_pads or not method.spec.masks_as_told or virtual > 0
    return Passes(**vars(replace(passes, num_virtual_tokens=virtual, always_pads=pads)), teacher=teacher)


def method_words(method: MethodSection, adapter: Adapter, origin: Origin | None = None) -> tuple[str, str] | None:
    """Return a method and what it does in a step, in words: the choice and the reason of a plan; None for sft."""
    return method.summary(states.reference_words(states.reference_of(method, adapter, origin), origin))


def steps_per_epoch(method: MethodSection, num_rows: int, global_batch_size: int) -> int:
    """Optimizer steps in which every row is used once. Prompts that fill no step are left out (TRL's `RepeatSampler`).

    Raises:
        PlanError: There are too few prompts for a single step.
    """
    if not generates(method):
        return -(-num_rows // global_batch_size)
    num_generations = method.answers_per_prompt
    prompts = global_batch_size // num_generations
    if num_rows < prompts:
        raise PlanError(
            f"train.global_batch_size: {global_batch_size} answers, {num_generations} per prompt, need "
            f"{prompts} prompts, but data.train has {num_rows}",
            hint=f"set it to {num_rows * num_generations} or less",
        )
    return num_rows // prompts * method.steps_per_generation


def with_reference(
    kept: Kept,
    model: ModelFacts,
    passes: Passes,
    dtype: Dtype,
    layout: Layout,
    *,
    devices_per_node: int,
    trained_dtype: Dtype = "float32",
) -> Kept:
    """Return the bytes kept from step to step, with a second model: a reference, or a teacher.

    A reference has weights in the type of the trained model's, and whole but where FSDP2 or ZeRO-3 divides
    them; DeepSpeed casts them. TRL's `prepare_fsdp` makes one unit of the whole model, so where units are not freed
    after the forward pass it stays gathered whole. A teacher is loaded in the type of the products, and ZeRO-3 alone
    divides it. What is divided lies where the model's weights do. A copy of an adapter lies as the adapter does.
    """
    if passes.copies_adapter:
        return replace(kept, reference=kept.adapters)
    by_zero = layout.strategy.startswith("zero")
    if passes.teacher is not None:
        whole = BYTES[dtype] * passes.teacher.num_params
        is_divided, stays = layout.strategy == "zero3", False
    elif passes.keeps_reference:
        whole = BYTES[dtype if by_zero else trained_dtype] * model.num_params
        is_divided = layout.strategy in ("fsdp2", "zero3")
        stays = layout.strategy == "fsdp2" and not layout.reshard_after_forward
    else:
        return kept
    share = -(-whole // (layout.num_shards if is_divided else 1))
    gathered = BYTES[dtype] * model.num_params if stays else 0
    match layout.offload_param_device if is_divided else "none":
        case "none":
            return replace(kept, reference=share + gathered)
        case "cpu":
            return replace(kept, reference=gathered, host_bytes=kept.host_bytes + devices_per_node * share)
        case "nvme":
            return replace(kept, reference=gathered, nvme_bytes=kept.nvme_bytes + devices_per_node * share)
        case place:
            assert_never(place)


def method_needs(
    products: Products, passes: Passes, layout: Layout, layers: Layers, head: Head, num_tokens: int, needs: Needs
) -> Iterator[tuple[Phase, Need]]:
    """Yield the needs of the phases that supervised fine-tuning does not have.

    GRPO's passes without gradients need no phase: they are those of a micro-batch, at a time when nothing is kept for a
    backward pass. One that returns the hidden states of all layers has one: where a step's own are offloaded, it needs
    more.

    Args:
        products: The products of the step.
        passes: What the method does.
        layout: How the run is spread.
        layers: What the decoder layers hold.
        head: What the final norm and the head hold.
        num_tokens: Tokens of a micro-batch on a device, with its padding.
        needs: What the other phases need.
    """
    compared: dict[Phase, Need] = {}
    teacher = products.model if passes.compares_with_itself else passes.teacher
    if teacher is not None:
        scored = int(passes.max_scored_share * num_tokens)
        tiles = _comparing_tiles(teacher, products.e, scored, needs["head"], head)
        if passes.sorts_probabilities:
            tiles = _sorting_tiles(products, teacher, scored, needs["head"], head)
        compared |= _teacher_needs(teacher, products.e, layout, layers, head, num_tokens, scored, needs, tiles)
        yield from compared.items()
    if passes.refers_in_micro_batch:
        reference, forward = reference_pass(products, passes, layout, head, num_tokens), needs["forward"]
        activations = layers.kept + layers.shared + head.kept + reference.activations
        gathered = forward.gathered + reference.gathered
        passing = Need(forward.gradients, activations, reference.logits, gathered)
        yield "reference", max(passing, compared.get("reference", passing), key=lambda need: need.total)
    if passes.num_feature_layers:
        features = _features_pass(products, passes, layout, head, num_tokens)
        yield "reference", replace(features, gathered=needs["optimizer"].gathered + features.gathered)
    if passes.generation is not None and not passes.generation.by_vllm:
        generation = _generation(products, passes.generation, layout)
        # Gradients are gone after the optimizer's step; the buckets of DDP are not.
        yield "generation", replace(generation, gathered=needs["optimizer"].gathered + generation.gathered)


def _comparing_tiles(teacher: ModelFacts, e: int, scored: int, backward: Need, head: Head) -> tuple[int, int]:
    """Return the bytes of tiles in which probabilities are compared, in the forward and in the backward pass.

    They are of float32, one of each model's (trl/kernels/chunked_divergence.py).
    """
    rows = min(scored, HEAD_TOKENS)
    # The tile of the model alone is in its head already.
    more = (2 * 4 - e) * rows * HEAD_COLUMNS
    # Gradients of the tile are cast from float32.
    cast = e * rows * min(teacher.vocab_size, HEAD_COLUMNS) if e == 2 else 0
    return head.forward + more, max(backward.logits, head.backward) + more + cast


def _sorting_tiles(products: Products, teacher: ModelFacts, scored: int, backward: Need, head: Head) -> tuple[int, int]:
    """Return the bytes of tiles in which probabilities are compared by rank, in the forward and the backward pass.

    Whole vocabularies of a few pieces of text are sorted, in float32 with places of 8 bytes
    (tunekit/methods/logit_distance.py). Before that the tokens before the last one of each piece are scored as in
    TRL's head: at most all. Both make a gradient of the head's weight in float32, of which one is counted beside.
    """
    model, rows = products.model, min(scored, _SORTED_PIECES)
    largest = max(model.vocab_size, teacher.vocab_size)
    tile = 4 * rows * (5 * model.vocab_size + 2 * teacher.vocab_size + 3 * largest)
    other = 4 * model.vocab_size * model.hidden_size if products.tables.head else 0
    return max(head.forward, tile), max(backward.logits, head.backward, tile) + other


def _teacher_needs(
    teacher: ModelFacts,
    e: int,
    layout: Layout,
    layers: Layers,
    head: Head,
    num_tokens: int,
    scored: int,
    needs: Needs,
    tiles: tuple[int, int],
) -> Iterator[tuple[Phase, Need]]:
    """Yield the needs of the phases where a teacher scores each token.

    Its pass is one without gradients, up to its head. Then the probabilities of both are compared in tiles, both in the
    forward and in the backward pass.

    Args:
        teacher: The teacher.
        e: Bytes of the compute type, and of its weights.
        layout: How the run is spread.
        layers: What the decoder layers of the model that learns hold.
        head: What its final norm and head hold.
        num_tokens: Tokens of a micro-batch on a device, with its padding.
        scored: Those of them that are compared.
        needs: What the phases need without a teacher.
        tiles: Bytes of the tiles in the forward and in the backward pass.
    """
    forward, backward = needs["forward"], needs["head"]
    layer = 3 * e * teacher.intermediate_size + 4 * e * teacher.hidden_size
    kept_bytes = e * teacher.hidden_size * scored
    gathered = forward.gathered + (e * teacher.num_params if layout.strategy == "zero3" else 0)
    through = layers.kept + layers.shared + head.kept + layer * num_tokens
    passing = Need(forward.gradients, through, 0, gathered)
    comparing = Need(forward.gradients, forward.activations + kept_bytes, tiles[0], gathered)
    yield "reference", max(passing, comparing, key=lambda need: need.total)
    gathered += backward.gathered - forward.gathered
    yield "head", Need(backward.gradients, backward.activations + kept_bytes, tiles[1], gathered)


def reference_pass(products: Products, passes: Passes, layout: Layout, head: Head, num_tokens: int) -> Need:
    """Return the need of the reference's forward pass: at its end, in the head, or in a layer.

    Autocast remembers the copies of all weights until the pass ends. FSDP2 gathers the whole reference model, and
    keeps the buffer in which it arrived beside the weights until it gathers again.
    """
    model, e, casts = products.model, products.e, _casts_bytes(products)
    h, stream = model.hidden_size, 4 if casts else e
    layer = (3 * e * model.intermediate_size + (3 * stream + e) * h) * num_tokens
    gathered = 0
    if passes.keeps_reference and layout.strategy == "fsdp2":
        gathered = e * model.num_params * (2 if layout.reshard_after_forward else 1)
    copies = stream * h * int(passes.max_scored_share * num_tokens)
    if layer > copies + head.forward:
        return Need(activations=casts + layer, gathered=gathered)
    return Need(activations=casts + copies, logits=head.forward, gathered=gathered)


def _features_pass(products: Products, passes: Passes, layout: Layout, head: Head, num_tokens: int) -> Need:
    """Return the need of a pass whose hidden states are compared, those of all layers, and of some in float32.

    Those are cast one by one and then concatenated (tunekit/methods/ebft/trainer.py). Under autocast Accelerate gives
    all of them in float32 besides (accelerate 1.15, `convert_outputs_to_fp32`).
    """
    model, reference = products.model, reference_pass(products, passes, layout, head, num_tokens)
    stream = 4 if _casts_bytes(products) or products.e == 4 else products.e + 4
    states = (model.num_layers + 1) * stream + 2 * passes.num_feature_layers * 4
    return Need(
        activations=reference.activations + states * model.hidden_size * num_tokens, gathered=reference.gathered
    )


def kv_cache_bytes(products: Products, *, num_sequences: int, num_tokens: int, windows: bool = True) -> int:
    """Bytes of the keys and values of sequences, as transformers' DynamicCache keeps them.

    Layers of sliding attention keep those of their window alone, but for the first token behind the prompt, when
    `windows` are views of all. Where weights are float32 under autocast, so are keys, since rotating them is no
    product; values are in the type of the products (transformers 5.24).
    """
    model, pair_bytes = products.model, _key_bytes(products) + products.e
    sliding = model.num_sliding_layers if windows else 0
    tokens = (model.num_layers - sliding) * num_tokens + sliding * min(num_tokens, model.sliding_window or num_tokens)
    return pair_bytes * model.num_kv_heads * model.head_dim * tokens * num_sequences


def _key_bytes(products: Products) -> int:
    return 4 if _casts_bytes(products) else products.e


def _generation(products: Products, generation: Generation, layout: Layout) -> Need:
    """Return the need of generating the answers of a step, which TRL does for all of them at once.

    The most is there either while the prompts are read, in one layer, or at the last token: the cache, the copies that
    autocast makes of all weights, and logits of one token of each sequence with their copy and their probabilities.
    """
    num_sequences = -(-generation.num_sequences // layout.num_batches)
    prompt_tokens, length = generation.prompt_tokens, generation.prompt_tokens + generation.completion_tokens
    model, casts = products.model, _casts_bytes(products)
    cache_of = partial(kv_cache_bytes, products, num_sequences=num_sequences)
    cache = cache_of(num_tokens=length)
    logits = 12 * model.vocab_size * num_sequences
    # A layer's keys are laid out anew with those of the new token; later the head's weights are cast.
    key_bytes = _key_bytes(products)
    keys = cache // model.num_layers * key_bytes // (key_bytes + products.e)
    last = Need(
        activations=casts + max(2 * model.vocab_size * model.hidden_size if casts else 0, keys),
        logits=logits,
        gathered=_gathered_for_generation(products, layout),
        kv_cache=cache,
    )
    reading = _reading_bytes(products, prompt_tokens) * num_sequences * prompt_tokens
    first = Need(
        activations=casts + reading, gathered=last.gathered, kv_cache=cache_of(num_tokens=prompt_tokens, windows=False)
    )
    return max(first, last, key=lambda need: need.total)


def _casts_bytes(products: Products) -> int:
    """Bytes of the copies that autocast makes of all layers' weights; FSDP2 and DeepSpeed hand them over cast."""
    return products.cast_bytes if products.full else 0


def _reading_bytes(products: Products, prompt_tokens: int) -> int:
    """Bytes per token of a prompt that a layer holds without gradients, in its MLP or in its attention.

    Where prompts are padded, SDPA has a mask and repeats keys and values for all heads.
    """
    model, e = products.model, products.e
    h, i, q = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    if not products.full:
        # An adapter of float32 beside what it is added to.
        mlp, attention = (12 * i + 12 * h, 4 * e * q + 12 * h) if e == 2 else (16 * i + 16 * h, 16 * q + 12 * h)
    elif products.casted:
        mlp, attention = 3 * e * i + 14 * h, 20 * q + 12 * h
    else:
        mlp, attention = 3 * e * i + 4 * e * h, 4 * e * q + 3 * e * h
    return max(mlp, attention) + prompt_tokens


def _gathered_for_generation(products: Products, layout: Layout) -> int:
    """Bytes of weights that are there whole while tokens are generated.

    TRL gathers all of them at once from ZeRO-3 (`ds3_gather_for_generation`); FSDP2 gathers layer after layer, with
    the next one on its way, and keeps the head, or all of them where they are not freed after a forward pass.
    """
    model, e = products.model, products.e
    if layout.strategy == "zero3" or (layout.strategy == "fsdp2" and not layout.reshard_after_forward):
        return e * model.num_params
    layers, vocabulary = 2 * (model.num_params // model.num_layers), model.vocab_size * model.hidden_size
    return e * (layers + vocabulary) if layout.strategy == "fsdp2" else 0


def generation_bytes(
    model: ModelFacts,
    adapter: Adapter,
    passes: Passes,
    dtype: Dtype,
    layout: Layout,
    trained_dtype: Dtype = "float32",
) -> float:
    """Bytes of memory that a device reads and writes to generate the answers of an optimizer step.

    Each new token reads all weights, for all sequences together, and the keys and values of all tokens before it.
    Autocast reads float32 weights, writes their copies and reads those.
    """
    generation = passes.generation
    if generation is None:
        return 0.0
    products = products_of(model, adapter, dtype, autocast=layout.autocasts, trained_dtype=trained_dtype)
    weights = weights_bytes(model, adapter, dtype, trained_dtype) + 2 * _casts_bytes(products)
    num_sequences = -(-generation.num_sequences // layout.num_batches)
    num_tokens = generation.prompt_tokens + generation.completion_tokens // 2
    cache = kv_cache_bytes(products, num_sequences=num_sequences, num_tokens=num_tokens)
    return generation.completion_tokens * (weights + cache) / generation.num_steps
