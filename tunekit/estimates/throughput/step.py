"""Work and time of an optimizer step: its FLOPs, exchanges and updates.

The work of one optimizer step, and how long it takes: computing, sending and updating.

A device computes at a share of its peak, and sends meanwhile: what it gathers or reduces hides behind computing
unless it takes longer, so that a micro-batch takes the longer of both; what it has to wait for comes on top. Then the
optimizer goes through memory. Both ends of each figure are carried along: computing fast over fast links, and slowly
over slow ones.

Floating-point operations (FLOPs) of a training step: its products of matrices, two for each multiplication.

They are counted as torch's FlopCounterMode counts them; the tests compare the two. Of routed experts a token goes
through a few, and so only these are counted; what PEFT adds to the fused matrix of all experts is made once for all
tokens of a micro-batch (see `tunekit.estimates.memory.experts`).

Symbols: N parameters of the linear layers without the head, A those of their adapters, V vocabulary, h hidden size,
q = heads x head size, L layers.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunekit.estimates.facts import Device, Figures, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.experts import trained_experts
from tunekit.estimates.memory.states import Dtype
from tunekit.estimates.models.architectures import ATTENTION_LAYERS
from tunekit.estimates.models.model_config import model_types
from tunekit.estimates.throughput.communication import CPU_PARAMS_PER_SECOND, Range, Transfer
from tunekit.recipe.sections.model import FullAdapter, LoraAdapter

MUCH_BANDWIDTH = 202
"""Operations in the time of one byte from memory, up to which a device is one of much bandwidth: A100s have 153 and
201, an RTX 4090 164, an H100 295. Between the two kinds lies what published figures differ by."""

EFFICIENCY: Mapping[str, Range] = {
    "full": Range(low=0.25, high=0.50),
    "lora": Range(low=0.19, high=0.50),
    "qlora": Range(low=0.14, high=0.41),
}
"""Share of a CUDA device's peak that training reaches, recomputation counted, by `adapter.type`; predictions, not
measured by tunekit. The rows behind it are in tests/estimates/test_published_speed.py.

- full: torchtitan trains an 8B model on H100s at 33 % of their peak, at 39 % compiled (github.com/pytorch/torchtitan,
  benchmarks/llama3_h100_202412_torchtitan.md, December 2024), LLM Foundry models of 3B to 13B at 40 to 46 %
  (github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md); guides of 2026 call 15 to 25 % poorly
  tuned.
- lora, qlora: the shares of full fine-tuning's that they reach on A100s, below."""

EFFICIENCY_WITH_MUCH_BANDWIDTH: Mapping[str, Range] = {
    "full": Range(low=0.35, high=0.70),
    "lora": Range(low=0.27, high=0.70),
    "qlora": Range(low=0.20, high=0.57),
}
"""The same for a device of `MUCH_BANDWIDTH`, where what is not a product takes less of the time.

- full: transformers with ZeRO-2 trains a 7B model on A800s at 40 to 42 %
  (gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a), torchtitan an 8B model on A100s at 57 %
  (github.com/pytorch/torchtitan, docs/performance.md), LLM Foundry at 55 to 75 %.
- lora: transformers trains Mistral 7B on an A100 1.2 to 1.3 times as fast as in full, at 55 %
  (github.com/foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv), and Qwen at 40 to 59 %
  with rows of 2,048 to 8,192 tokens (github.com/QwenLM/Qwen, README). Weights that are not trained need no gradient,
  so two thirds of the operations; the products that are left are as large.
- qlora: 42 to 54 % in the first table, 29 to 57 % in the second."""

LAYER_SECONDS = Range(low=0.0015, high=0.005)
"""Least time of a layer in a micro-batch on CUDA, for the processor to launch its kernels. High: LoRA of a 1.8B model
took 0.125 s for each micro-batch of up to 512 tokens, in 24 layers (github.com/QwenLM/Qwen, README, A100,
transformers). Low: faster processors and fewer kernels, a choice and not a measurement."""

COLLATED_TOKENS_PER_SECOND = 2.0e6
"""Of which a process makes micro-batches, from tokenised rows on disk: 2.1 million padding-free, 2.6 million padded, on
one core of an AMD EPYC with TRL 1.16 (`python -m benchmarks.collate`, 2026-11-21). Workers do it while devices compute;
without them it comes on top, at worst. Tokenising a stream is not in it."""

FORWARD_SECONDS = Range(low=0.0004, high=0.0008)
"""The same of a forward pass alone. High: generating takes 0.76 to 0.78 ms a layer and token with models of 1.8B to
14B, of 24 to 40 layers (github.com/QwenLM/Qwen, README, "Inference Performance": 54.09, 40.93 and 32.22 tokens/s on an
A100, transformers). Low: faster processors than those of the 0.6 ms that Qwen3 takes, a choice and not a
measurement."""

BANDWIDTH_SHARE = Range(low=0.6, high=1.0)
"""Share of the peak of its memory at which a device reads weights to generate. Low: 8.48 tokens/s with a 72B model, 145
GB on two A100 that take turns (the same table); high: the peak itself."""

HIDDEN_BY_LAST_BACKWARD = Range(low=0.0, high=0.5)
"""Share of a micro-batch's computing that overlaps with communication once a step: the gradients of the last layers are
ready while the first are still computed. From nothing to all of a backward pass, which is at least half of the
computing."""


@dataclass(frozen=True)
class Generating:
    """The work of generating answers in one optimizer step.

    Attributes:
        num_tokens: New tokens of an answer, which come one after another.
        read_bytes: Memory that each device reads and writes.
        flops: Operations, on all devices.
        is_launched: Whether the processor launches each kernel; vLLM replays them, so that this may take no time.
    """

    num_tokens: float
    read_bytes: float
    flops: float
    is_launched: bool = True


@dataclass(frozen=True)
class Before:
    """A forward pass over all rows before the training.

    Attributes:
        flops: Operations, on all devices.
        num_micro_batches: Micro-batches that a device computes one after another.
    """

    flops: float
    num_micro_batches: float


@dataclass(frozen=True)
class Step:
    """The work of one optimizer step, on all devices unless said otherwise.

    Attributes:
        adapter: Kind of the adapter.
        layout: How it is spread.
        num_nodes: Machines that it is spread over.
        flops_per_token: Operations for one token, in all passes of a micro-batch.
        model_flops_per_token: Of these, what is no recomputation, and those of generating it.
        num_tokens: Tokens without padding.
        max_computed_tokens: Tokens with the most padding that there can be.
        num_micro_batches: Micro-batches that a device computes one after another.
        num_trained: Trained parameters.
        optimizer_bytes: Memory that the optimizer reads and writes on each device.
        checkpoint_bytes: Size of a checkpoint with the optimizer's states.
        transfers: What each device sends.
        is_sparse: Whether tokens go through experts.
        method: Kind of the method.
        num_forwards: Passes without gradients of a micro-batch.
        generating: The work of generating its answers; None where there are none.
        before: What is computed before the first step; None where nothing is.
        max_workers: Processes that may make micro-batches beside each that computes; None for as many as it takes.
    """

    model_type: str
    num_params: int
    num_layers: int
    adapter: str
    dtype: Dtype
    layout: Layout
    num_nodes: int
    flops_per_token: float
    model_flops_per_token: float
    num_tokens: float
    max_computed_tokens: float
    num_micro_batches: int
    num_trained: int
    optimizer_bytes: float
    checkpoint_bytes: float
    transfers: tuple[Transfer, ...] = ()
    is_sparse: bool = False
    method: str = "sft"
    num_forwards: float = 0.0
    generating: Generating | None = None
    before: Before | None = None
    max_workers: int | None = None

    @property
    def num_devices(self) -> int:
        """Devices that it is spread over."""
        return self.layout.num_processes

    @property
    def num_writers(self) -> int:
        """Machines that hold a part of a checkpoint each: those of one replica."""
        return max(1, self.num_nodes // self.layout.dp_replicate_size)

    @property
    def tokens_of_micro_batch(self) -> float:
        """Tokens of one micro-batch, with the most padding that there can be."""
        return self.max_computed_tokens / self.num_micro_batches / self.layout.num_batches

    def computing(self, rate: Range) -> Range:
        """Seconds in which a device computes one micro-batch, at `rate` operations a second."""
        share = self.flops_per_token / self.num_micro_batches / self.num_devices
        floor, again = LAYER_SECONDS.times(self.num_layers), FORWARD_SECONDS.times(self.num_layers * self.num_forwards)
        return Range(
            low=max(self.num_tokens * share / rate.high, floor.low + again.low),
            high=max(self.max_computed_tokens * share / rate.low, floor.high + again.high),
        )


def rate_of(step: Step, device: Device, figures: Figures | None) -> tuple[Range, str] | None:
    """Operations a second that a device reaches by its sheet, and in words; None where that is not known."""
    peak = peak_of(step, device, figures)
    bandwidth = None if figures is None else figures.memory_bytes_per_second
    if peak is None or bandwidth is None:
        return None
    shares = EFFICIENCY_WITH_MUCH_BANDWIDTH if peak / bandwidth <= MUCH_BANDWIDTH else EFFICIENCY
    share = shares[step.adapter]
    words = f"a prediction: {share.low:.0%} to {share.high:.0%} of {peak / 1e12:,.0f} TFLOP/s"
    return share.times(peak), words + (", as dense models reach" if step.is_sparse else "")


def peak_of(step: Step, device: Device, figures: Figures | None) -> float | None:
    """Operations a second that a device's sheet promises for the step's type; None where it says nothing."""
    if device.kind != "cuda" or figures is None or step.dtype == "float32":
        return None
    # Tensor cores compute both 16-bit types at one rate.
    return figures.flops_16bit


def unknown_link(step: Step, figures: Figures) -> str | None:
    """A link that the step needs and whose speed is not known, in words."""
    return next((each.link_name for each in step.transfers if each.seconds(figures) is None), None)


def seconds_of(step: Step, rate: Range, figures: Figures) -> Range | None:
    """Return the seconds of a step, where devices compute at `rate`; None where a link or the memory's speed is not
    known.
    """
    update, generation = _updating(step, figures), generating(step, rate, figures)
    if update is None or generation is None or unknown_link(step, figures) is not None:
        return None
    computing = step.computing(rate)
    hidden, exposed = waiting(step, figures)
    behind = _sum(
        (transfer for transfer in step.transfers if transfer.per_step and transfer.hides_behind == "compute"), figures
    )
    after = _sum(
        (transfer for transfer in step.transfers if transfer.per_step and transfer.hides_behind == "nothing"), figures
    )
    number = step.num_micro_batches
    workers = num_workers(step, rate, figures)
    collating = step.tokens_of_micro_batch / COLLATED_TOKENS_PER_SECOND / max(1, workers)
    beside, on_top = (collating, 0.0) if workers else (0.0, collating)
    return Range(
        low=number * (max(computing.low, hidden.low, collating) + exposed.low)
        + max(0.0, behind.low - HIDDEN_BY_LAST_BACKWARD.high * computing.low)
        + after.low
        + update.low
        + generation.low,
        high=number * (max(computing.high, hidden.high, beside) + exposed.high + on_top)
        + max(0.0, behind.high - HIDDEN_BY_LAST_BACKWARD.low * computing.high)
        + after.high
        + update.high
        + generation.high,
    )


def fed_tokens_per_second(step: Step, rate: Range, figures: Figures) -> float:
    """Tokens a second of which a device computes micro-batches at most, were they always there."""
    hidden, exposed = waiting(step, figures)
    return step.tokens_of_micro_batch / (max(step.computing(rate).low, hidden.low) + exposed.low)


def num_workers(step: Step, rate: Range, figures: Figures) -> int:
    """Processes that make micro-batches beside each that computes: none where that one makes them as fast itself.

    The loader of what generates answers makes none: prompts alone come from it.
    """
    if step.generating is not None:
        return 0
    needed = workers_for(fed_tokens_per_second(step, rate, figures))
    return needed if step.max_workers is None else min(needed, step.max_workers)


def workers_for(tokens_per_second: float) -> int:
    """Processes that it takes to make micro-batches beside a device that computes so many tokens of them."""
    share = tokens_per_second / COLLATED_TOKENS_PER_SECOND
    return 0 if share <= 1 else math.ceil(share)


def generating(step: Step, rate: Range, figures: Figures) -> Range | None:
    """Seconds in which the answers of a step are generated; None where the memory's speed is not known.

    For each token all weights are read from memory, kernels launched and, where they are divided, weights gathered: the
    longest of these. Computing is hidden by it at best.
    """
    work, bandwidth = step.generating, figures.memory_bytes_per_second
    if work is None:
        return Range(low=0.0, high=0.0)
    if bandwidth is None:
        return None
    reading = BANDWIDTH_SHARE.times(bandwidth)
    launching = FORWARD_SECONDS.times(step.num_layers * work.num_tokens)
    if not work.is_launched:
        launching = Range(low=0.0, high=launching.high)
    sending = _sum((transfer for transfer in step.transfers if transfer.hides_behind == "generation"), figures)
    computing = work.flops / step.num_devices
    return Range(
        low=max(work.read_bytes / reading.high, launching.low, sending.low, computing / rate.high),
        high=max(work.read_bytes / reading.low, launching.high, sending.high) + computing / rate.low,
    )


def seconds_before(step: Step, rate: Range) -> Range:
    """Seconds of what is computed before the first step."""
    work = step.before
    if work is None:
        return Range(low=0.0, high=0.0)
    each, launching = work.flops / step.num_devices, FORWARD_SECONDS.times(step.num_layers * work.num_micro_batches)
    return Range(low=max(each / rate.high, launching.low), high=max(each / rate.low, launching.high))


def waiting(step: Step, figures: Figures) -> tuple[Range, Range]:
    """Seconds of a micro-batch in which is sent what may hide behind computing, and what may not."""
    each = [transfer for transfer in step.transfers if not transfer.per_step]
    # Different links work at the same time.
    by_link = [
        _sum((transfer for transfer in each if transfer.hides_behind == "compute" and transfer.link == link), figures)
        for link in ("devices", "host", "disk")
    ]
    attention = _sum((transfer for transfer in each if transfer.hides_behind == "attention"), figures)
    nothing = _sum((transfer for transfer in each if transfer.hides_behind == "nothing"), figures)
    return (
        Range(low=max(link.low for link in by_link), high=max(link.high for link in by_link)),
        Range(low=nothing.low, high=nothing.high + attention.high),
    )


def communication_words(step: Step, rate: Range, figures: Figures) -> str | None:
    """Describe the communication and whether it is hidden, for a reason; None where nothing is sent."""
    if not step.transfers:
        return None
    unknown = unknown_link(step, figures)
    if unknown is not None:
        return f"how fast the link {unknown} is, is not known, so neither is how long devices wait"
    return "; ".join(
        sentence
        for sentence in (
            _hiding_words(step, rate, figures),
            _waiting_words(step, rate, figures),
            _once_words(step),
        )
        if sentence
    )


def _hiding_words(step: Step, rate: Range, figures: Figures) -> str | None:
    """Describe whether the tokens of a micro-batch suffice to hide the communication meanwhile.

    It takes as long for few tokens as for many, and so needs as many as a device computes while it lasts.
    """
    sent = [transfer for transfer in step.transfers if not transfer.per_step and transfer.hides_behind == "compute"]
    if not sent:
        return None
    hidden, _ = waiting(step, figures)
    tokens = step.tokens_of_micro_batch
    a_token = step.flops_per_token / step.layout.devices_per_sequence
    least, most = hidden.low * rate.low / a_token, hidden.high * rate.high / a_token
    how = "hidden" if tokens >= most else "not hidden" if tokens < least else "perhaps hidden"
    slowest = max(sent, key=lambda one: (one.seconds(figures) or hidden).high)
    size = sum(transfer.sent_bytes for transfer in sent) / 1e9
    needed = f"{_rounded(least)} to {_rounded(most)} are needed"
    return f"{size:,.1f} GB a micro-batch {slowest.link_name}, {how} by its {tokens:,.0f} tokens ({needed})"


def _waiting_words(step: Step, rate: Range, figures: Figures) -> str | None:
    """Describe the share of a micro-batch in which devices wait for each other."""
    hidden, exposed = waiting(step, figures)
    if exposed.high == 0:
        return None
    computing = step.computing(rate)
    shares = sorted(
        [
            exposed.low / (exposed.low + max(computing.low, hidden.low)),
            exposed.high / (exposed.high + max(computing.high, hidden.high)),
        ]
    )
    return f"{shares[0]:.0%} to {shares[1]:.0%} of a micro-batch is waiting for other devices"


def _once_words(step: Step) -> str | None:
    """Describe the communication once a step, and that of generating answers."""
    once = [transfer for transfer in step.transfers if transfer.per_step]
    sentences = []
    for when, sent in (
        ("once a step", [transfer for transfer in once if transfer.hides_behind != "generation"]),
        ("a step to generate", [transfer for transfer in once if transfer.hides_behind == "generation"]),
    ):
        links = " and ".join(dict.fromkeys(transfer.link_name for transfer in sent))
        if sent:
            sentences.append(f"{_in_gb(sum(transfer.sent_bytes for transfer in sent))} {when} {links}")
    return "; ".join(sentences) or None


def _in_gb(size_bytes: float) -> str:
    size = size_bytes / 1e9
    return f"{size:,.0f} GB" if size >= 100 else f"{size:,.3g} GB"


def _updating(step: Step, figures: Figures) -> Range | None:
    """Seconds of the optimizer: on the device it goes through memory, on processors at what they were seen to do."""
    layout = step.layout
    # FSDP2 has one switch for all that is offloaded.
    if layout.offload_optimizer_device != "none" or (layout.strategy, layout.offload_param_device) == ("fsdp2", "cpu"):
        params = step.num_trained / step.num_nodes
        return Range(low=params / CPU_PARAMS_PER_SECOND.high, high=params / CPU_PARAMS_PER_SECOND.low)
    bandwidth = figures.memory_bytes_per_second
    if bandwidth is None:
        return None
    return Range(low=step.optimizer_bytes / bandwidth, high=step.optimizer_bytes / bandwidth)


def _sum(transfers: Iterable[Transfer], figures: Figures) -> Range:
    spans = [span for transfer in transfers if (span := transfer.seconds(figures)) is not None]
    return Range(low=sum(span.low for span in spans), high=sum(span.high for span in spans))


def _rounded(tokens: float) -> str:
    """A number of tokens with two digits."""
    return f"{float(f'{tokens:.2g}'):,.0f}"


def is_counted(model: ModelFacts) -> bool:
    """Return whether the closed form holds: a decoder whose layers mix tokens by attention alone."""
    if any("expert" in name for name in model.tensors) and model.mixture is None:
        return False
    if model.layer_types:
        return set(model.layer_types) <= ATTENTION_LAYERS
    return model.model_type not in model_types().carry_state


def flops_per_token(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    *,
    attended_tokens: float,
    num_tokens: float,
    head_share: float,
    gradient_checkpointing: bool,
    whole_head: bool = False,
) -> float:
    """Floating-point operations of one token in a training step.

    A product costs 2 forward and 2 for each of the gradients of its input and its weight: 6N where weights are
    trained, 4N + 6A with adapters. Attention costs 12 L q a over `a` tokens, causal or not (arXiv 2204.02311, appendix
    B; kernels that skip the masked half do half of it). The head is TRL's in tiles: computed, computed again in the
    backward pass, and one or two gradients. Checkpointing computes each layer again up to the input of its last
    product. DoRA's norms, which are computed once a step and not for each token, are not counted.

    Args:
        model: A model that `is_counted`.
        adapter: What is trained.
        attended_tokens: Length of a row of attention scores.
        num_tokens: Tokens of a micro-batch.
        head_share: Share of the tokens for which logits are computed.
        gradient_checkpointing: Whether layers are computed again in the backward pass.
        whole_head: Whether logits are computed once: all together, and kept, or in chunks with their gradients.
    """
    linear = _sizes(model.linears)
    attention = 2 * model.num_layers * (model.num_heads * model.head_dim + _value_width(model)) * attended_tokens
    last = {name: s for name, s in model.linears.items() if _is_last(name, s, model)}
    experts = _experts(model, adapter, num_tokens)
    forward: float
    backward: float
    if isinstance(adapter, FullAdapter):
        forward, backward, head_is_trained = 2 * linear, 4 * linear, True
    else:
        adapted = {n: s for n, s in model.adapter_linears(adapter.target_modules).items() if n in model.linears}
        added = sum(adapter.rank * (outputs + inputs) for outputs, inputs in adapted.values())
        whole = adapter.modules_to_save or []
        forward = 2 * linear + 2 * added
        backward = 2 * linear + 4 * added + 2 * (_sizes(model.adapter_linears(whole)) if whole else 0)
        head_is_trained = model.judges or "lm_head" in whole
        # Where the last product has an adapter, the adapter's own comes after it and is the one left out.
        last = {name: s for name, s in last.items() if name not in adapted}
    forward, backward = forward + experts.forward, backward + experts.backward
    head = ((6 if whole_head else 8) - (0 if head_is_trained else 2)) * head_params(model) * head_share
    again = forward + attention - 2 * _sizes(last) if gradient_checkpointing else 0
    return forward + backward + 3 * attention + head + again


def forward_flops_per_token(model: ModelFacts, *, attended_tokens: float, head_share: float) -> float:
    """Floating-point operations of one token in a forward pass without gradients and without adapters.

    Args:
        model: A model that `is_counted`.
        attended_tokens: Length of a row of attention scores.
        head_share: Share of the tokens for which logits are computed.
    """
    attention = 2 * model.num_layers * (model.num_heads * model.head_dim + _value_width(model)) * attended_tokens
    experts = _experts(model, FullAdapter(), 1).forward
    return 2 * _sizes(model.linears) + experts + attention + 2 * head_params(model) * head_share


def head_params(model: ModelFacts) -> int:
    """Parameters of the product that scores a token: by each word of the vocabulary, or a text by one number."""
    return (1 if model.judges else model.vocab_size) * model.hidden_size


def _is_last(name: str, sizes: tuple[int, int], model: ModelFacts) -> bool:
    """Return whether a linear layer is the last product of its decoder layer; experts are weighted after it."""
    if model.num_experts:
        return name.endswith(".down_proj")
    return sizes == (model.hidden_size, model.intermediate_size)


def _value_width(model: ModelFacts) -> int:
    """Width of all values, which with latent attention are narrower than queries and keys."""
    inputs = [inputs for name, (_, inputs) in model.linears.items() if name.endswith("self_attn.o_proj")]
    return inputs[0] if inputs else model.num_heads * model.head_dim


@dataclass(frozen=True)
class _Passes:
    forward: float = 0
    backward: float = 0


def _experts(model: ModelFacts, adapter: FullAdapter | LoraAdapter, num_tokens: float) -> _Passes:
    """Operations per token of all layers' routers and routed experts.

    An adapter of experts is added to their matrices before the product, so that the whole matrices' gradients are
    computed as in full training, and then those of the adapter's two factors.
    """
    mixture = model.mixture
    if mixture is None:
        return _Passes()
    h, layers = model.hidden_size, mixture.num_layers
    trained = trained_experts(None if isinstance(adapter, FullAdapter) else model.adapted(adapter.target_modules).kinds)
    router = mixture.num_experts * h
    down = mixture.per_token * mixture.inner * h
    linear = router + 3 * down
    gradients = router * trained.router + 2 * down * trained.gate_up + down * trained.down
    forward: float = 2 * linear
    backward: float = 2 * linear + 2 * gradients
    if not isinstance(adapter, FullAdapter):
        all_gate_up, all_down = mixture.expert_params(h)
        ranks = 2 * adapter.rank * all_gate_up * trained.gate_up + adapter.rank * all_down * trained.down
        ranks += adapter.rank * router * trained.router
        # Twice forward: torch tries a parametrization when it is registered, which PEFT does in each forward pass.
        forward, backward = forward + 4 * ranks / num_tokens, backward + 4 * ranks / num_tokens
    return _Passes(layers * forward, layers * backward)


def _sizes(linears: Mapping[str, tuple[int, int]]) -> int:
    return sum(outputs * inputs for outputs, inputs in linears.values())
