"""What a training method does with a row besides one forward and one backward pass, and what that needs.

Supervised fine-tuning takes a row through the model once. DPO (TRL 1.16, trl/trainer/dpo_trainer.py) takes both answers
of a pair through it in one batch, then both through the reference model without gradients, while everything that the
backward pass needs is kept. GRPO (trl/trainer/grpo_trainer.py) first generates all answers of an optimizer step at once
with a cache of keys and values, and then trains on them in micro-batches. Both score tokens with the same head in tiles
as supervised fine-tuning, so logits are never there whole.

With adapters the reference is the model without them. Where all weights are trained it is a second model, in their
type, float32. DPO can compute its log-probabilities before training instead.

Generation is transformers' own; engines of their own, such as vLLM in the same process, are not counted.

Symbols: h hidden size, i intermediate size, q = heads x head size, kv = key-value heads x head size, e bytes of the
compute type.
"""

from dataclasses import dataclass
from typing import Literal

from tunekit.planner.activations import Head
from tunekit.planner.facts import ModelFacts
from tunekit.planner.layout import Layout
from tunekit.planner.states import BYTES, Dtype, weights_bytes
from tunekit.recipe.schema import DataSection, DPOMethod, FullAdapter, GRPOMethod, LoraAdapter, Method, SFTMethod


@dataclass(frozen=True)
class Generation:
    """The answers that are generated for an optimizer step."""

    num_sequences: int
    """On all devices together."""
    prompt_tokens: int
    """Length to which prompts are padded, at most."""
    completion_tokens: int
    """Length of the answers, at most."""
    num_steps: int
    """Optimizer steps on the same answers."""

    @property
    def length(self) -> int:
        """Tokens of a prompt with its answer, at most."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Passes:
    """What a method does in an optimizer step."""

    method: Literal["sft", "dpo", "grpo"] = "sft"
    sequences_per_row: int = 1
    """Sequences that a row of a micro-batch is: both answers of a pair."""
    max_scored_share: float = 1.0
    """Share of the tokens that count in the loss, at most."""
    keeps_reference: bool = False
    """Whether a reference model is there besides the trained one."""
    refers_in_micro_batch: bool = False
    """Whether the reference is computed between the forward and the backward pass."""
    num_forwards: float = 0.0
    """Forward passes without gradients of each sequence, in each optimizer step."""
    num_forwards_before: int = 0
    """The same once, before the training."""
    generation: Generation | None = None

    @property
    def always_pads(self) -> bool:
        """Whether TRL pads batches whatever is asked for."""
        return self.method != "sft"


SFT = Passes()


def passes_of(
    method: Method, adapter: FullAdapter | LoraAdapter, data: DataSection, *, global_batch_size: int
) -> Passes:
    """What a method does in a step.

    Args:
        method: The method.
        adapter: What is trained.
        data: How long sequences are.
        global_batch_size: Rows, pairs or answers of an optimizer step.
    """
    full = isinstance(adapter, FullAdapter)
    match method:
        case DPOMethod():
            refers = not method.precompute_ref_log_probs
            return Passes(
                "dpo",
                sequences_per_row=2,
                keeps_reference=full and refers,
                refers_in_micro_batch=refers,
                num_forwards=float(refers),
                num_forwards_before=int(not refers),
            )
        case GRPOMethod():
            prompt_tokens = data.max_length - method.max_completion_length
            # Once for all steps on the same answers: the reference, and the model that gave them where it has changed.
            once = (method.beta > 0) + (method.num_iterations > 1)
            return Passes(
                "grpo",
                max_scored_share=method.max_completion_length / data.max_length,
                keeps_reference=full and method.beta > 0,
                num_forwards=once / method.num_iterations,
                generation=Generation(
                    global_batch_size, prompt_tokens, method.max_completion_length, method.num_iterations
                ),
            )
        case SFTMethod():
            return SFT


def steps_per_epoch(method: Method, num_rows: int, global_batch_size: int) -> int:
    """Optimizer steps in which every row is used once. GRPO leaves out prompts that fill no step (`RepeatSampler`)."""
    if isinstance(method, GRPOMethod):
        return num_rows * method.num_generations // global_batch_size * method.num_iterations
    return -(-num_rows // global_batch_size)


@dataclass(frozen=True)
class Held:
    """Bytes that a pass without gradients holds at its peak, besides weights and what was there before."""

    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    gathered: int = 0


def reference_bytes(model: ModelFacts, passes: Passes, dtype: Dtype, layout: Layout) -> int:
    """Bytes of the reference model's weights that a device holds all the time.

    FSDP2 and ZeRO-3 divide them as those of the model. TRL's `prepare_fsdp` makes one unit of the whole model, so it is
    gathered whole, and stays so where units are not freed after the forward pass.
    """
    if not passes.keeps_reference:
        return 0
    whole = 4 * model.num_params
    if layout.strategy == "fsdp2":
        stays = 0 if layout.reshard_after_forward else BYTES[dtype] * model.num_params
        return stays + (0 if layout.offload_param_device == "cpu" else -(-whole // layout.num_shards))
    return -(-whole // layout.num_shards) if layout.strategy == "zero3" else whole


def reference_pass(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    passes: Passes,
    dtype: Dtype,
    layout: Layout,
    head: Head,
    num_tokens: int,
) -> Held:
    """What the reference's forward pass holds: at its end, in the head, or in a layer.

    Autocast remembers the copies of all weights until the pass ends. FSDP2 gathers the whole reference model first,
    and lays it out anew.

    Args:
        model: The model.
        adapter: What is trained.
        passes: What the method does.
        dtype: Type of the products.
        layout: How the run is spread.
        head: What the head of the trained model holds, whose tiles are the same.
        num_tokens: Tokens of a micro-batch with its padding.
    """
    h, e, full = model.hidden_size, BYTES[dtype], isinstance(adapter, FullAdapter)
    casts = _casts_bytes(model, dtype) if full and _is_cast(layout) else 0
    stream = 4 if full and _is_cast(layout) else e
    scored = int(passes.max_scored_share * num_tokens)
    layer = (3 * e * model.intermediate_size + (3 * stream + e) * h) * num_tokens
    gathered = 0
    if passes.keeps_reference and layout.strategy == "fsdp2" and layout.reshard_after_forward:
        gathered = e * model.num_params
    # Laying out anew comes before anything else is there.
    layer, copies = max(layer, gathered), stream * h * scored
    if layer > copies + head.forward:
        return Held(activations=casts + layer, gathered=gathered)
    return Held(activations=casts + copies, logits=head.forward, gathered=gathered)


def kv_cache_bytes(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype, layout: Layout, *, sequences: int, length: int
) -> int:
    """Bytes of the keys and values of all tokens, as transformers' DynamicCache keeps them.

    Layers of sliding attention keep those of their window alone. Where weights are float32 under autocast, so are keys,
    since rotating them is no product; values are stored in the keys' type.
    """
    e = 4 if _rotates_in_float32(adapter, layout) else BYTES[dtype]
    sliding = model.num_sliding_layers
    window = min(length, (model.sliding_window or length) - 1)
    tokens = (model.num_layers - sliding) * length + sliding * window
    return 2 * e * model.num_kv_heads * model.head_dim * tokens * sequences


def generation(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, generated: Generation, dtype: Dtype, layout: Layout
) -> Held:
    """What generating the answers of a step holds, which TRL does for all of them at once.

    The most is held either while the prompts are read, in one layer, or at the last token: the cache, the copies that
    autocast makes of all weights, and logits of one token of each sequence with their copy and their probabilities.
    """
    sequences = -(-generated.num_sequences // layout.num_batches)
    full, e = isinstance(adapter, FullAdapter), BYTES[dtype]
    casts = _casts_bytes(model, dtype) if full and _is_cast(layout) else 0

    def cache(length: int) -> int:
        return kv_cache_bytes(model, adapter, dtype, layout, sequences=sequences, length=length)

    whole = cache(generated.length)
    # A layer's keys are laid out anew with those of the new token.
    rewritten = whole // (2 * model.num_layers)
    head = (2 * model.vocab_size * model.hidden_size if casts else 0) + 12 * model.vocab_size * sequences
    last = whole + casts + max(head, rewritten)
    # Until the first token behind them, windows are views of all keys.
    prompt = whole * generated.prompt_tokens // generated.length if not model.num_sliding_layers else 0
    reading = casts + _reading_bytes(model, adapter, e, generated.prompt_tokens, cast=_is_cast(layout)) * (
        sequences * generated.prompt_tokens
    )
    gathered = _gathered_for_generation(model, e, layout)
    if prompt + reading > last:
        return Held(activations=reading, kv_cache=prompt, gathered=gathered)
    logits = 12 * model.vocab_size * sequences
    return Held(activations=last - whole - logits, logits=logits, kv_cache=whole, gathered=gathered)


def generation_bytes(model: ModelFacts, adapter: FullAdapter | LoraAdapter, passes: Passes, dtype: Dtype) -> float:
    """Bytes of memory that generating an optimizer step's answers reads and writes, on one device for all of them.

    Each token of the answers reads all weights once for all sequences, and the keys and values of what came before;
    autocast reads float32 weights, writes their copies and reads those.
    """
    if passes.generation is None:
        return 0.0
    generated = passes.generation
    single = Layout()
    weights = weights_bytes(model, adapter, dtype) + (2 * _casts_bytes(model, dtype) if _is_full(adapter) else 0)
    halfway = generated.prompt_tokens + generated.completion_tokens // 2
    cache = kv_cache_bytes(model, adapter, dtype, single, sequences=generated.num_sequences, length=halfway)
    return generated.completion_tokens * (weights + cache) / generated.num_steps


def _is_full(adapter: FullAdapter | LoraAdapter) -> bool:
    return isinstance(adapter, FullAdapter)


def _is_cast(layout: Layout) -> bool:
    """Whether trained weights are float32 and cast for each product; FSDP2 and DeepSpeed hand them over cast."""
    return layout.strategy in ("single", "ddp")


def _rotates_in_float32(adapter: FullAdapter | LoraAdapter, layout: Layout) -> bool:
    return _is_full(adapter) and _is_cast(layout)


def _casts_bytes(model: ModelFacts, dtype: Dtype) -> int:
    """Bytes of the copies of all layers' weights in the compute type."""
    if dtype == "float32":
        return 0
    return 2 * sum(outputs * inputs for outputs, inputs in model.linears.values())


def _reading_bytes(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, e: int, prompt_tokens: int, *, cast: bool
) -> int:
    """Bytes per token of a prompt that a layer holds: in its MLP, or in its attention, whose mask repeats keys."""
    h, i, q = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    if not _is_full(adapter):
        mlp = (4 * i + (e + 2) * 2 * i) + (4 * h + 4 * e * h) if e == 2 else 16 * i + 16 * h
        attention = 4 * e * q + 3 * 4 * h
    elif cast:
        mlp, attention = 3 * e * i + (16 if e == 4 else 14) * h, (16 if e == 4 else 20) * q + 12 * h
    else:
        mlp, attention = 3 * e * i + 4 * e * h, 4 * e * q + 3 * e * h
    return max(mlp, attention) + prompt_tokens


def _gathered_for_generation(model: ModelFacts, e: int, layout: Layout) -> int:
    """Bytes of weights that are there whole while tokens are generated.

    TRL gathers all of them at once from ZeRO-3 (`ds3_gather_for_generation`); FSDP2 gathers layer after layer, with
    the next one on its way, and keeps the head.
    """
    if layout.num_shards == 1 or layout.strategy not in ("fsdp2", "zero3"):
        return 0
    if layout.strategy == "zero3":
        return e * model.num_params
    vocabulary = model.vocab_size * model.hidden_size
    return e * (2 * (model.num_params // model.num_layers) + vocabulary)
