"""Passes of a training method besides one forward and one backward pass, and their memory.

Supervised fine-tuning takes a row through the model once. DPO (TRL 1.16, trl/trainer/dpo_trainer.py) takes both answers
of a pair through it in one batch, then both through the reference model without gradients, while everything that the
backward pass needs is kept. KTO (trl/trainer/kto_trainer.py) does so with single answers, and its loss `kto` takes each
prompt with another's answer through both models besides, without gradients. ORPO and CPO (trl/experimental) have no
reference, and score with all logits at once; a reward model has a score of a text in their place. GRPO
(trl/trainer/grpo_trainer.py) first generates all answers of an optimizer step at once with a cache of keys and values,
and then trains on them in micro-batches. The others score tokens with the same head in tiles as supervised fine-tuning,
so logits are never there whole.

With adapters the reference is the model without them. Where all weights are trained it is a second model, in their
type, float32. DPO and KTO can compute its log-probabilities before training instead.

RLOO (trl/trainer/rloo_trainer.py) does as GRPO, and always scores its answers once before it learns from them.
Distillation (trl/trainer/distillation_trainer.py) generates one answer to each prompt, and takes each micro-batch
through a teacher between the forward and the backward pass, as DPO does through its reference.

Where vLLM generates (`tunekit.planner.decisions.vllm`) there is no cache of transformers'.

Symbols: h hidden size, i intermediate size, q = heads x head size, kv = key-value heads x head size, e bytes of the
compute type.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from tunekit.errors import PlanError
from tunekit.planner.facts import ModelFacts
from tunekit.planner.layout import Layout
from tunekit.planner.memory.activations import Head, HeadKind, Layers, cast_weights_bytes
from tunekit.planner.memory.phases import Kept, Need, Phase
from tunekit.planner.memory.reference import reference_of, reference_words
from tunekit.planner.memory.states import BYTES, Dtype, weights_bytes
from tunekit.planner.memory.teacher import teacher_needs
from tunekit.planner.origin import Origin
from tunekit.recipe.methods import (
    CPOMethod,
    DistillationMethod,
    DPOMethod,
    GRPOMethod,
    KTOMethod,
    Method,
    OnPolicyMethod,
    ORPOMethod,
    RewardedMethod,
    RewardMethod,
    RLOOMethod,
    SFTMethod,
)
from tunekit.recipe.schema import DataSection
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter


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
    by_vllm: bool = False
    """True if vLLM generates them rather than transformers."""


@dataclass(frozen=True)
class Passes:
    """Passes of a method in an optimizer step."""

    method: Literal["sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo", "distillation"] = "sft"
    sequences_per_row: int = 1
    """Sequences that a row of a micro-batch is: both answers of a pair."""
    max_scored_share: float = 1.0
    """Share of the tokens that count in the loss, at most."""
    keeps_reference: bool = False
    """True if a reference model is loaded besides the trained one."""
    copies_adapter: bool = False
    """True if the reference is a copy of the adapter, kept besides the trained one."""
    refers_in_micro_batch: bool = False
    """True if the reference is computed between the forward and the backward pass."""
    num_forwards: float = 0.0
    """Forward passes without gradients of each sequence, in each optimizer step."""
    num_forwards_before: int = 0
    """The same once, before the training."""
    generation: Generation | None = None
    head: HeadKind = "tiles"
    """Kind of head that scores tokens."""
    estimates: bool = False
    """True if each sequence passes the model and its reference once more, with another's answer."""
    least_rows: int = 1
    """Rows of a micro-batch that there are at least."""
    teacher: ModelFacts | None = None
    """The model that another one learns from, which goes through each micro-batch too."""

    @property
    def num_reference_forwards(self) -> float:
        """Of `num_forwards` those of a reference model that is there besides the trained one."""
        if not self.keeps_reference:
            return 0.0
        if self.generation is not None:
            return 1 / self.generation.num_steps
        return 2.0 if self.estimates else 1.0

    @property
    def always_pads(self) -> bool:
        """True if TRL pads batches whatever the recipe says."""
        return self.method != "sft"


SFT = Passes()


def passes_of(
    method: Method,
    adapter: FullAdapter | LoraAdapter,
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
        case KTOMethod():
            refers, estimates = not method.precompute_ref_log_probs, method.loss_type == "kto"
            return Passes(
                "kto",
                keeps_reference=full and refers,
                refers_in_micro_batch=refers,
                num_forwards=float(estimates + (1 + estimates) * refers),
                num_forwards_before=(1 + estimates) * (not refers),
                estimates=estimates,
                least_rows=2 if estimates else 1,
            )
        case ORPOMethod() | CPOMethod():
            return Passes(method.type, sequences_per_row=2, head="whole")
        case RewardMethod():
            return Passes("reward", sequences_per_row=2, head="score")
        case GRPOMethod() | RLOOMethod() | DistillationMethod():
            passes = _on_policy(method, data, global_batch_size, full=full, by_vllm=by_vllm)
            return replace(passes, teacher=teacher)
        case SFTMethod():
            return SFT


def _on_policy(
    method: OnPolicyMethod, data: DataSection, global_batch_size: int, *, full: bool, by_vllm: bool
) -> Passes:
    """Return the passes of a method that generates answers and learns from them."""
    completion_tokens = method.max_completion_length
    share = completion_tokens / data.max_length
    num_steps = 1 if isinstance(method, DistillationMethod) else method.num_iterations
    generation = Generation(
        global_batch_size, data.max_length - completion_tokens, completion_tokens, num_steps, by_vllm=by_vllm
    )
    if isinstance(method, DistillationMethod):
        return Passes(method.type, max_scored_share=share, generation=generation)
    # Once for all steps on the same answers: the reference, and the model that gave them. GRPO takes the first pass of
    # training for the latter, unless the model has changed since or vLLM drew with probabilities of its own.
    scores_answers = isinstance(method, RLOOMethod) or num_steps > 1 or by_vllm
    return Passes(
        method.type,
        max_scored_share=share,
        keeps_reference=full and method.beta > 0,
        num_forwards=((method.beta > 0) + scores_answers) / num_steps,
        generation=generation,
    )


def method_words(method: Method, adapter: FullAdapter | LoraAdapter, origin: Origin | None = None) -> tuple[str, str]:
    """A method and what it does in a step, in words: the choice and the reason of a plan."""
    reference = reference_words(reference_of(method, adapter, origin), origin)
    match method:
        case DPOMethod():
            return _dpo_words(method), "; ".join(["each row is two sequences", reference, *_mixed(method)])
        case KTOMethod():
            return f"kto, loss {method.loss_type}, beta {method.beta:g}", "; ".join([*_estimated(method), reference])
        case ORPOMethod():
            why = f"experimental in TRL; {_PAIR_WITHOUT_REFERENCE}; {_MEAN_OVER_TOKENS.format('likelihood')}"
            return f"orpo, beta {method.beta:g}", why
        case CPOMethod():
            why = f"experimental in TRL; {_PAIR_WITHOUT_REFERENCE}"
            if likelihood_weight(method):
                why += f"; {_MEAN_OVER_TOKENS.format('likelihood')}"
            choice = f"cpo, loss {method.loss_type}, beta {method.beta:g}"
            return f"{choice}, likelihood by {likelihood_weight(method):g}", why
        case RewardMethod():
            return "reward", "each row is two sequences; a score of a text in the place of the head: it answers nothing"
    if isinstance(method, RewardedMethod):
        choice = f"{method.type}, {method.num_generations} answers of up to {method.max_completion_length} tokens"
        used = "" if method.num_iterations == 1 else f"; they are used for {method.num_iterations} steps"
        return choice, (f"beta {method.beta:g}: {reference}" if method.beta else "beta 0: no reference") + used
    if isinstance(method, DistillationMethod):
        choice = f"distillation, an answer of up to {method.max_completion_length} tokens"
        return choice, f"{method.teacher.path} says how likely each of its tokens is; the teacher is a second model"
    raise AssertionError(f"{method.type} needs no words: a row goes through the model once")


_PAIR_WITHOUT_REFERENCE = "each row is two sequences; no reference"
_MEAN_OVER_TOKENS = "the {} is a mean over the tokens of a micro-batch: how a batch is cut shows in it a little"


def likelihood_weight(method: CPOMethod) -> float:
    """Weight of the likelihood of the better answer, which SimPO and AlphaPO have none of."""
    if method.cpo_alpha is not None:
        return method.cpo_alpha
    return 0.0 if method.loss_type in ("simpo", "alphapo") else 1.0


def _dpo_words(method: DPOMethod) -> str:
    """A mix of losses with their weights, where it is not the one that DPO is known by."""
    if method.loss_type == ["sigmoid"]:
        return f"dpo, beta {method.beta:g}"
    weights = method.loss_weights or [1.0] * len(method.loss_type)
    mix = " + ".join(
        loss if weight == 1 else f"{weight:g} {loss}" for weight, loss in zip(weights, method.loss_type, strict=True)
    )
    return f"dpo, loss {mix}, beta {method.beta:g}"


def _mixed(method: DPOMethod) -> Iterator[str]:
    """Yield the losses that depend on which pairs share a micro-batch."""
    if "sft" in method.loss_type:
        yield _MEAN_OVER_TOKENS.format("sft loss")
    if {"aot", "aot_unpaired"} & set(method.loss_type):
        yield "aot sorts the pairs of a micro-batch: it depends on which share one"


def _estimated(method: KTOMethod) -> Iterator[str]:
    """Describe how KTO's loss estimates the divergence of the model from its reference."""
    if method.loss_type == "kto":
        yield (
            "the divergence is estimated from the answers of a micro-batch to each other's prompts, over all devices: "
            "how a batch is cut shows in it"
        )
        yield "rows are put into one order before training, and keep it in every epoch"


def steps_per_epoch(method: Method, num_rows: int, global_batch_size: int) -> int:
    """Optimizer steps in which every row is used once. Prompts that fill no step are left out (TRL's `RepeatSampler`).

    Raises:
        PlanError: There are too few prompts for a single step.
    """
    if not isinstance(method, OnPolicyMethod):
        return -(-num_rows // global_batch_size)
    if isinstance(method, DistillationMethod):
        num_generations = num_iterations = 1
    else:
        num_generations, num_iterations = method.num_generations, method.num_iterations
    prompts = global_batch_size // num_generations
    if num_rows < prompts:
        raise PlanError(
            f"train.global_batch_size: {global_batch_size} answers, {num_generations} to each prompt, need "
            f"{prompts} prompts, and data.train has {num_rows}",
            hint=f"set it to {num_rows * num_generations} or less",
        )
    return num_rows // prompts * num_iterations


def with_reference(
    kept: Kept, model: ModelFacts, passes: Passes, dtype: Dtype, layout: Layout, *, devices_per_node: int
) -> Kept:
    """Return the bytes kept from step to step, with a second model: a reference, or a teacher.

    A reference has weights in the type of the trained model's, float32, and whole but where FSDP2 or ZeRO-3 divides
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
        whole = (BYTES[dtype] if by_zero else 4) * model.num_params
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


def method_needs(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    passes: Passes,
    dtype: Dtype,
    layout: Layout,
    layers: Layers,
    head: Head,
    num_tokens: int,
    needs: Mapping[Phase, Need],
) -> Iterator[tuple[Phase, Need]]:
    """Yield the needs of the phases that supervised fine-tuning does not have.

    GRPO's passes without gradients need no phase: they are those of a micro-batch, at a time when nothing is kept for a
    backward pass.

    Args:
        model: The model.
        adapter: What is trained.
        passes: What the method does.
        dtype: Type of the products.
        layout: How the run is spread.
        layers: What the decoder layers hold.
        head: What the final norm and the head hold.
        num_tokens: Tokens of a micro-batch on a device, with its padding.
        needs: What the other phases need.
    """
    if passes.teacher is not None:
        scored = int(passes.max_scored_share * num_tokens)
        yield from teacher_needs(passes.teacher, dtype, layout, layers, head, num_tokens, scored, needs)
    if passes.refers_in_micro_batch:
        reference_need = reference_pass(model, adapter, passes, dtype, layout, head, num_tokens)
        yield (
            "reference",
            replace(
                reference_need,
                gradients=needs["forward"].gradients,
                activations=layers.kept + layers.shared + head.kept + reference_need.activations,
                gathered=needs["forward"].gathered + reference_need.gathered,
            ),
        )
    if passes.generation is not None and not passes.generation.by_vllm:
        reference_need = _generation(model, adapter, passes.generation, dtype, layout)
        # Gradients are gone after the optimizer's step; the buckets of DDP are not.
        yield "generation", replace(reference_need, gathered=needs["optimizer"].gathered + reference_need.gathered)


def reference_pass(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    passes: Passes,
    dtype: Dtype,
    layout: Layout,
    head: Head,
    num_tokens: int,
) -> Need:
    """Return the need of the reference's forward pass: at its end, in the head, or in a layer.

    Autocast remembers the copies of all weights until the pass ends. FSDP2 gathers the whole reference model, and
    keeps the buffer in which it arrived beside the weights until it gathers again.
    """
    h, e = model.hidden_size, BYTES[dtype]
    casts = _casts_bytes(model, adapter, dtype, layout)
    stream = 4 if casts else e
    layer = (3 * e * model.intermediate_size + (3 * stream + e) * h) * num_tokens
    gathered = 0
    if passes.keeps_reference and layout.strategy == "fsdp2":
        gathered = e * model.num_params * (2 if layout.reshard_after_forward else 1)
    copies = stream * h * int(passes.max_scored_share * num_tokens)
    if layer > copies + head.forward:
        return Need(activations=casts + layer, gathered=gathered)
    return Need(activations=casts + copies, logits=head.forward, gathered=gathered)


def kv_cache_bytes(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    dtype: Dtype,
    layout: Layout,
    *,
    num_sequences: int,
    num_tokens: int,
    windows: bool = True,
) -> int:
    """Bytes of the keys and values of sequences, as transformers' DynamicCache keeps them.

    Layers of sliding attention keep those of their window alone, but for the first token behind the prompt, when
    `windows` are views of all. Where weights are float32 under autocast, so are keys, since rotating them is no
    product; the cache has one type for both.
    """
    e = 4 if _casts_bytes(model, adapter, dtype, layout) else BYTES[dtype]
    sliding = model.num_sliding_layers if windows else 0
    tokens = (model.num_layers - sliding) * num_tokens + sliding * min(num_tokens, model.sliding_window or num_tokens)
    return 2 * e * model.num_kv_heads * model.head_dim * tokens * num_sequences


def _generation(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, generation: Generation, dtype: Dtype, layout: Layout
) -> Need:
    """Return the need of generating the answers of a step, which TRL does for all of them at once.

    The most is there either while the prompts are read, in one layer, or at the last token: the cache, the copies that
    autocast makes of all weights, and logits of one token of each sequence with their copy and their probabilities.
    """
    num_sequences = -(-generation.num_sequences // layout.num_batches)
    prompt_tokens, length = generation.prompt_tokens, generation.prompt_tokens + generation.completion_tokens
    casts = _casts_bytes(model, adapter, dtype, layout)
    how: _Sequences = {"layout": layout, "num_sequences": num_sequences}
    cache = kv_cache_bytes(model, adapter, dtype, **how, num_tokens=length)
    logits = 12 * model.vocab_size * num_sequences
    # A layer's keys are laid out anew with those of the new token; later the head's weights are cast.
    last = Need(
        activations=casts
        + max(2 * model.vocab_size * model.hidden_size if casts else 0, cache // model.num_layers // 2),
        logits=logits,
        gathered=_gathered_for_generation(model, dtype, layout),
        kv_cache=cache,
    )
    reading = _reading_bytes(model, adapter, dtype, prompt_tokens, casts=casts > 0) * num_sequences * prompt_tokens
    first = Need(
        activations=casts + reading,
        gathered=last.gathered,
        kv_cache=kv_cache_bytes(model, adapter, dtype, **how, num_tokens=prompt_tokens, windows=False),
    )
    return max(first, last, key=lambda need: need.total)


class _Sequences(TypedDict):
    """Common part of the caches of prompts and of whole sequences."""

    layout: Layout
    num_sequences: int


def _casts_bytes(model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype, layout: Layout) -> int:
    """Bytes of the copies that autocast makes of all layers' weights; FSDP2 and DeepSpeed hand them over cast."""
    if dtype == "float32" or not isinstance(adapter, FullAdapter) or layout.strategy not in ("single", "ddp"):
        return 0
    return cast_weights_bytes(model, adapter, dtype)


def _reading_bytes(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype, prompt_tokens: int, *, casts: bool
) -> int:
    """Bytes per token of a prompt that a layer holds without gradients, in its MLP or in its attention.

    Where prompts are padded, SDPA has a mask and repeats keys and values for all heads.
    """
    h, i, q = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    e = BYTES[dtype]
    if not isinstance(adapter, FullAdapter):
        # An adapter of float32 beside what it is added to.
        mlp, attention = (12 * i + 12 * h, 4 * e * q + 12 * h) if e == 2 else (16 * i + 16 * h, 16 * q + 12 * h)
    elif casts:
        mlp, attention = 3 * e * i + 14 * h, 20 * q + 12 * h
    else:
        mlp, attention = 3 * e * i + 4 * e * h, 4 * e * q + 3 * e * h
    return max(mlp, attention) + prompt_tokens


def _gathered_for_generation(model: ModelFacts, dtype: Dtype, layout: Layout) -> int:
    """Bytes of weights that are there whole while tokens are generated.

    TRL gathers all of them at once from ZeRO-3 (`ds3_gather_for_generation`); FSDP2 gathers layer after layer, with
    the next one on its way, and keeps the head, or all of them where they are not freed after a forward pass.
    """
    e, vocabulary = BYTES[dtype], model.vocab_size * model.hidden_size
    match layout.strategy:
        case "fsdp2" if not layout.reshard_after_forward:
            return e * model.num_params
        case "zero3":
            return e * model.num_params
        case "fsdp2":
            return e * (2 * (model.num_params // model.num_layers) + vocabulary)
    return 0


def generation_bytes(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, passes: Passes, dtype: Dtype, layout: Layout
) -> float:
    """Bytes of memory that a device reads and writes to generate the answers of an optimizer step.

    Each new token reads all weights, for all sequences together, and the keys and values of all tokens before it.
    Autocast reads float32 weights, writes their copies and reads those.
    """
    generation = passes.generation
    if generation is None:
        return 0.0
    weights = weights_bytes(model, adapter, dtype) + 2 * _casts_bytes(model, adapter, dtype, layout)
    cache = kv_cache_bytes(
        model,
        adapter,
        dtype,
        layout,
        num_sequences=-(-generation.num_sequences // layout.num_batches),
        num_tokens=generation.prompt_tokens + generation.completion_tokens // 2,
    )
    return generation.completion_tokens * (weights + cache) / generation.num_steps
