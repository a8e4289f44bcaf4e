"""How fast a run is, and so how long it takes and what it costs: operations over what the device does in a second.

Counted are the products of matrices (`tunekit.planner.flops`). Everything else of a step moves data, and is the reason
why a device reaches only a share of its peak. That share is taken from published figures, as a range, or better from
the user's own runs on the same device; where there is neither, nothing is predicted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tunekit.planner.facts import DataFacts, Device, Facts, Figures, ModelFacts
from tunekit.planner.flops import flops_per_token, is_counted
from tunekit.planner.states import OPTIMIZER_BYTES, Dtype, num_trainable_params
from tunekit.recipe.schema import Optim, Recipe


class Range(Facts):
    """Two ends between which a figure is expected."""

    low: float
    high: float


EFFICIENCY: Mapping[str, Range] = {
    "full": Range(low=0.25, high=0.40),
    "lora": Range(low=0.15, high=0.35),
    "qlora": Range(low=0.09, high=0.28),
}
"""Share of a CUDA device's peak that training reaches, by `adapter.type`; predictions, not measured by tunekit.

- full: torchtitan trains an 8B model on H100s at 33 % of their peak, at 39 % compiled
  (github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, December 2024); guides of 2026 call 15
  to 25 % poorly tuned.
- lora: narrower products, so from the lower end of poorly tuned to what torchtitan reaches uncompiled.
- qlora: as lora, with 20 to 40 % of it spent on dequantising weights, which is an unconfirmed rule of thumb."""

SIMILAR_SIZE = 2
"""How many times larger or smaller than the planned one a recorded model may be: with the size of the products changes
the share of the peak that they reach. A choice, not a measurement."""


class RunRecord(Facts):
    """What a finished run tells about the next one."""

    device: str
    """Name of the device."""
    model_type: str
    adapter: str
    dtype: Dtype
    num_params: int
    flops_per_token: float
    """As its plan counted them."""
    tokens_per_second: float
    peak_memory_bytes: int
    planned_memory_bytes: int

    @property
    def flops_per_second(self) -> float:
        """What the device achieved; padding and data movement are in it as lost time."""
        return self.tokens_per_second * self.flops_per_token

    @property
    def memory_share(self) -> float:
        """Measured over planned memory."""
        return self.peak_memory_bytes / self.planned_memory_bytes


class Speed(Facts):
    """How fast a run is expected to be. Ranges are None where nothing is known that would give them."""

    model_type: str
    """With `flops_per_token` what later plans need of this one, once its run is recorded."""
    flops_per_token: float
    """Floating-point operations of one token's training step, recomputation included."""
    tokens_per_second: Range | None = None
    """Tokens without padding, in the training steps alone."""
    seconds: Range | None = None
    """Time of all training steps; an upper bound while the rows are not tokenised."""
    cost_usd: Range | None = None
    """Price of that time."""
    basis: str
    """What the figures come from, in words."""

    def words(self, *, at_most: bool) -> str:
        """The figures in one line.

        Args:
            at_most: Whether time and cost are upper bounds.
        """
        if self.tokens_per_second is None:
            return "not predicted"
        parts = [_between(self.tokens_per_second, _rounded) + " tokens/s"]
        if self.seconds is not None:
            parts.append(_upto(self.seconds, duration, at_most=at_most))
        if self.cost_usd is not None:
            parts.append(_upto(self.cost_usd, _price, at_most=at_most) + " USD")
        return ", ".join(parts)


@dataclass(frozen=True)
class Step:
    """The work of one optimizer step.

    Attributes:
        adapter: Kind of the adapter.
        flops_per_token: Operations for one token.
        num_tokens: Tokens without padding.
        max_computed_tokens: Tokens with the most padding that there can be.
        optimizer_bytes: Memory that the optimizer reads and writes.
    """

    model_type: str
    num_params: int
    adapter: str
    dtype: Dtype
    flops_per_token: float
    num_tokens: float
    max_computed_tokens: float
    optimizer_bytes: float


def optimizer_bytes(num_trained: int, optim: Optim) -> float:
    """Bytes of memory that an optimizer step reads and writes for `num_trained` float32 parameters.

    Weights read and written (8), gradients read for their norm, scaled by it and read again (4 + 8 + 4), states read
    and written.
    """
    return num_trained * (24 + 2 * OPTIMIZER_BYTES[optim])


def step_of(
    recipe: Recipe,
    model: ModelFacts,
    data: DataFacts,
    device: Device,
    *,
    dtype: Dtype,
    mask_length: int | None,
    padding_free: bool,
    micro_batch_size: int,
    gradient_checkpointing: bool,
) -> Step | None:
    """The work of one optimizer step; None for models whose operations are not counted.

    Args:
        recipe: The recipe.
        model: The model.
        data: Its rows; while they are not tokenised, each is taken as `data.max_length` tokens.
        device: Where.
        dtype: Type of the products.
        mask_length: Length of a row of the attention mask, None without a mask.
        padding_free: Whether rows lie one behind the other.
        micro_batch_size: Rows of a micro-batch.
        gradient_checkpointing: Whether layers are computed again.
    """
    if not is_counted(model):
        return None
    row = document = longest = float(recipe.data.max_length)
    head_share = 1.0
    if data.tokenized and data.num_train_tokens:
        row = document = longest = data.num_train_tokens / data.num_train
        if recipe.data.packing and data.num_rows:
            document = min(row, data.num_train_tokens / data.num_rows)
        if micro_batch_size > 1 and not padding_free and data.longest_tokens:
            longest = float(data.longest_tokens)
        if device.kind == "cuda":
            # Elsewhere TRL's head computes every position.
            head_share = (data.num_trainable_tokens or 0) / data.num_train_tokens
    attended = document if mask_length is None else micro_batch_size * row if padding_free else row
    batch = recipe.train.global_batch_size
    return Step(
        model_type=model.model_type,
        num_params=model.num_params,
        adapter=recipe.adapter.type,
        dtype=dtype,
        flops_per_token=flops_per_token(
            model,
            recipe.adapter,
            attended_tokens=attended,
            num_tokens=micro_batch_size * row,
            head_share=head_share,
            gradient_checkpointing=gradient_checkpointing,
        ),
        num_tokens=batch * row,
        max_computed_tokens=batch * longest,
        optimizer_bytes=optimizer_bytes(num_trainable_params(model, recipe.adapter), recipe.train.optim),
    )


def speed_of(
    step: Step,
    device: Device,
    figures: Figures | None,
    records: Sequence[RunRecord],
    *,
    num_steps: int | None,
) -> Speed:
    """How fast steps are on a device: as in similar recorded runs, or by published shares of its peak.

    Args:
        step: The work of a step.
        device: Where it is done.
        figures: What its sheet says of it, None where that is not known.
        records: The user's finished runs, of which the similar ones count.
        num_steps: Steps of the run, None while they are not known.
    """
    similar = [record for record in records if _is_similar(record, step, device)]
    if similar:
        seconds, basis = _by_records(step, similar), _words_of(similar)
    else:
        by_peak = _by_peak(step, device, figures)
        if by_peak is None:
            return Speed(
                model_type=step.model_type,
                flops_per_token=step.flops_per_token,
                basis=f"how much {device.name} computes in a second is not known; a finished run on it will tell",
            )
        seconds, basis = by_peak
    total = None if num_steps is None else _times(seconds, num_steps)
    price = None if figures is None else figures.usd_per_hour
    return Speed(
        model_type=step.model_type,
        flops_per_token=step.flops_per_token,
        tokens_per_second=Range(low=step.num_tokens / seconds.high, high=step.num_tokens / seconds.low),
        seconds=total,
        cost_usd=None if price is None or total is None else _times(total, price / 3600),
        basis=f"{basis}; steps alone, without evaluations and checkpoints",
    )


def _is_similar(record: RunRecord, step: Step, device: Device) -> bool:
    kind = (record.device, record.model_type, record.adapter, record.dtype)
    of_a_size = 1 / SIMILAR_SIZE <= record.num_params / step.num_params <= SIMILAR_SIZE
    return kind == (device.name, step.model_type, step.adapter, step.dtype) and of_a_size


def _by_records(step: Step, records: Sequence[RunRecord]) -> Range:
    """Seconds of a step, from the fastest and the slowest of similar runs."""
    work = step.num_tokens * step.flops_per_token
    achieved = [record.flops_per_second for record in records]
    return Range(low=work / max(achieved), high=work / min(achieved))


def _words_of(records: Sequence[RunRecord]) -> str:
    runs = "1 run" if len(records) == 1 else f"{len(records)} runs"
    shares = [record.memory_share for record in records]
    memory = _between(Range(low=min(shares), high=max(shares)), "{:.0%}".format)
    return f"from {runs} on this device, which took {memory} of the planned memory"


def _by_peak(step: Step, device: Device, figures: Figures | None) -> tuple[Range, str] | None:
    """Seconds of a step from what the device's sheet says, and the basis in words; None where it is not known."""
    # Tensor cores compute both 16-bit types at one rate.
    peak = None if figures is None or step.dtype == "float32" else figures.flops_16bit
    bandwidth = None if figures is None else figures.memory_bytes_per_second
    if device.kind != "cuda" or peak is None or bandwidth is None:
        return None
    share = EFFICIENCY[step.adapter]
    update = step.optimizer_bytes / bandwidth
    seconds = Range(
        low=step.num_tokens * step.flops_per_token / (share.high * peak) + update,
        high=step.max_computed_tokens * step.flops_per_token / (share.low * peak) + update,
    )
    return seconds, f"a prediction: {share.low:.0%} to {share.high:.0%} of {peak / 1e12:,.0f} TFLOP/s"


def _times(span: Range, factor: float) -> Range:
    return Range(low=span.low * factor, high=span.high * factor)


def duration(seconds: float) -> str:
    """A time in words: `45 s`, `12 min`, `3 h 20 min`, `5.2 days`."""
    if seconds < 99.5:
        return f"{_rounded(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{seconds / 86400:,.1f} days"


def _rounded(number: float) -> str:
    """A figure with about three digits; a prediction knows no more."""
    digits = f"{number:.3g}"
    return f"{float(digits):,.0f}" if number >= 100 else digits


def _price(usd: float) -> str:
    return f"{usd:,.2f}"


def _between(span: Range, words: Callable[[float], str]) -> str:
    low, high = words(span.low), words(span.high)
    return low if low == high else f"{low} to {high}"


def _upto(span: Range, words: Callable[[float], str], *, at_most: bool) -> str:
    return f"at most {words(span.high)}" if at_most else _between(span, words)
