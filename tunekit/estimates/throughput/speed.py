"""Speed of a run, from its steps and from records of finished runs.

Speed of a run, its duration and cost: the time of a step, and the number of steps.

That time comes from the user's own runs on the same device where there are any, within 15 %, or else from the device's
sheet, within a factor of two (`tunekit.estimates.throughput.step`); where there is neither, nothing is predicted.

Records of finished runs that inform the plan of the next one on the same device.

Goodput of a long run: some time goes into checkpoints, and some is lost when hardware fails.

Of a run that saves every `t` seconds, each time standing still for `c`, on machines that fail every `M` seconds and
take `r` to start again, the useful share is 1 - c/t - t/(2M) - r/M: a failure costs half an interval on average. It
is largest at t = sqrt(2 c M) (Young, doi.org/10.1145/361147.361115, 1974; Daly, doi.org/10.1016/j.future.2004.11.016,
2006).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from tunekit.estimates.facts import DataFacts, Device, Facts, Figures, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.states import (
    BYTES,
    Dtype,
    matrix_cost_of,
    num_trainable_params,
    optimizer_bytes_per_param,
    trained_bytes,
    trained_tables,
)
from tunekit.estimates.passes import Passes, generation_bytes, passes_of
from tunekit.estimates.throughput import step as steps
from tunekit.estimates.throughput.stages import slowest_stage, staged_transfers
from tunekit.estimates.throughput.step import Range, Step
from tunekit.estimates.throughput.traffic import launched_passes, traffic_of
from tunekit.recipe.schema import Recipe

MIN_ALLOCATED_BYTES = 2**30
"""Runs with less tell nothing of the reserve: torch takes memory in pieces of 20 MiB and more (`kLargeBuffer` in its
CUDACachingAllocator), which are much of little. A choice, not a measurement."""


class RunRecord(Facts):
    """Record of a finished run."""

    device: str
    """Name of the device."""
    model_type: str
    adapter: str
    dtype: Dtype
    num_params: int
    flops_per_token: float
    """As its plan counted them."""
    tokens_per_second: float
    """Of all devices together."""
    method: str = "sft"
    """Methods compute and wait for different things: GRPO's steps generate answers."""
    by_vllm: bool = False
    """True if vLLM generated them."""
    generation_share: float | None = None
    """Share of the steps in which answers were generated; None where there were none, or it was not measured."""
    peak_memory_bytes: int
    planned_memory_bytes: int
    layout: Layout = Layout()
    """Layout of the run: another layout waits for other collectives."""
    num_nodes: int = 1
    sheet_flops_per_second: float | None = None
    """FLOP/s of a device that its plan expected by the device's sheet; None where that was not known."""
    micro_batch_tokens: float | None = None
    """Tokens of a micro-batch of its plan; None where an earlier version did not write them."""
    planned_tensor_bytes: int | None = None
    """Planned bytes of tensors alone."""
    peak_allocated_bytes: int | None = None
    """Most that its tensors took; None where torch does not count it, as on a CPU."""
    peak_reserved_bytes: int | None = None
    """Most that torch took of the device for them."""

    @property
    def flops_per_second(self) -> float:
        """FLOP/s that each device achieved; padding and data movement are in it as lost time."""
        return self.tokens_per_second * self.flops_per_token / self.layout.num_processes

    @property
    def computing_flops_per_second(self) -> float:
        """The same in the part of the steps in which no answers were generated."""
        return self.flops_per_second / (1 - (self.generation_share or 0))

    @property
    def memory_share(self) -> float:
        """Measured over planned memory."""
        return self.peak_memory_bytes / self.planned_memory_bytes

    @property
    def reserve_share(self) -> float | None:
        """Bytes beyond the planned tensors, as a share of them; None where that is not known.

        Tensors that the plan did not foresee count as reserve. Fewer than planned are no reason to reserve less: rows
        may just have been shorter than the longest that the plan reckons with.
        """
        planned, allocated, reserved = self.planned_tensor_bytes, self.peak_allocated_bytes, self.peak_reserved_bytes
        if planned is None or allocated is None or reserved is None or allocated < MIN_ALLOCATED_BYTES:
            return None
        return reserved / allocated * max(1.0, allocated / planned) - 1


def reserve_share(records: Sequence[RunRecord], device: Device) -> tuple[float, str] | None:
    """Return the allocator's overhead by the user's own runs on a device, as a share of the tensors, and its
    description.

    The median, which a run of another kind does not move. None where no run tells. On a CPU none does: what is resident
    there beyond the tensors depends on what else the process did.

    Args:
        records: Finished runs.
        device: Where.
    """
    shares = [
        record.reserve_share for record in records if record.device == device.name and record.reserve_share is not None
    ]
    return (median(shares), f"measured in {_runs(len(shares))} on this device") if shares else None


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


DEVICE_SECONDS_PER_FAILURE = 54 * 16384 / 419 * 86400
"""Seconds of one device between failures that stop a run: 2,112 days. Llama 3 405B was interrupted 419 times without
plan in 54 days on 16,384 H100 (arXiv 2407.21783, section 3.3.4, 78 % of them hardware). Spot machines are taken away
far more often, which is not in it."""

RESTART_SECONDS = 600.0
"""From a failure until steps are made again: a choice. The run above was useful for more than 90 % of its time, so
that an interruption cost at most 54 days / 10 / 419 = 19 minutes, what it had to compute again included."""

STORAGE_BYTES_PER_SECOND = 1e9
"""Write rate of one node: an assumption, to be replaced by the time of the first checkpoint."""

WORTH_SAYING = 0.05
"""Failures that are to be expected in a run from which on a plan speaks of them: a choice."""


class Goodput(Facts):
    """Expected share of useful time of a run."""

    share: float
    """Useful time over all time, with checkpoints at `save_steps`."""
    num_failures: float
    """That are to be expected."""
    hours_between_failures: float
    save_steps: int
    """Steps between checkpoints: those asked for, or else the best."""
    best_save_steps: int
    save_seconds: float
    """For which a checkpoint stops the training."""

    def words(self) -> str:
        """Describe the expectation in one line."""
        if self.num_failures < 1:
            failures = f"{1 - math.exp(-self.num_failures):.0%} chance of a failure"
        else:
            failures = f"{self.num_failures:,.1f} failures expected"
        sentence = f"{self.share:.1%} goodput: {failures} (one per {_hours(self.hours_between_failures)})"
        loses = f"a checkpoint every {self.best_save_steps:,} steps is best"
        if self.save_steps != self.best_save_steps:
            loses = f"with a checkpoint every {self.save_steps:,} steps; {loses}"
        return f"{sentence}, {loses}, if saving stalls training for {self.save_seconds:,.1f} s"


def goodput_of(
    *,
    num_devices: int,
    num_writers: int,
    num_steps: int,
    step_seconds: float,
    checkpoint_bytes: float,
    save_steps: int | None,
) -> Goodput | None:
    """Estimate the share of useful time of a run; None for a run that will hardly see a failure.

    Args:
        num_devices: Devices in use; the failure of one stops them all.
        num_writers: Machines that write their parts of a checkpoint at the same time.
        num_steps: Optimizer steps of the run.
        step_seconds: Time of each.
        checkpoint_bytes: Size of a checkpoint.
        save_steps: Steps between checkpoints, None for the best number.
    """
    between = DEVICE_SECONDS_PER_FAILURE / num_devices
    expected = num_steps * step_seconds / between
    if expected < WORTH_SAYING:
        return None
    stall = checkpoint_bytes / num_writers / STORAGE_BYTES_PER_SECOND
    best = max(1, min(num_steps, round(best_interval_seconds(stall, between) / step_seconds)))
    interval = save_steps or best
    share = useful_share(interval * step_seconds, stall, between, RESTART_SECONDS)
    return Goodput(
        share=share,
        num_failures=expected / share,
        hours_between_failures=between / 3600,
        save_steps=interval,
        best_save_steps=best,
        save_seconds=stall,
    )


def best_interval_seconds(save_seconds: float, between_failures_seconds: float) -> float:
    """Time between checkpoints that loses least: sqrt(2 c M)."""
    return math.sqrt(2 * save_seconds * between_failures_seconds)


def useful_share(
    interval_seconds: float, save_seconds: float, between_failures_seconds: float, restart_seconds: float
) -> float:
    """Useful time over all time: 1 - c/t - t/(2M) - r/M, but never below a hundredth, where it does not hold."""
    lost = save_seconds / interval_seconds + (interval_seconds / 2 + restart_seconds) / between_failures_seconds
    return max(0.01, 1 - lost)


def _hours(hours: float) -> str:
    return f"{hours / 24:,.0f} days" if hours >= 48 else f"{hours:,.1f} hours"


SIMILAR_SIZE = 2
"""Factor by which a recorded model, or micro-batch, may be larger or smaller than the planned one: the share of the
peak depends on the size of the products. A choice, not a measurement."""

RECORDED_SPREAD = Range(low=0.85, high=1.15)
"""Ends of the range around what runs of one's own with similar micro-batches let expect. Of published runs, seven of
ten are as near to what one run of the same source and devices lets expect (`python -m benchmarks.speed`); those differ
in length, model and kernels."""


class Speed(Facts):
    """Expected speed of a run. Ranges are None where nothing is known that would give them."""

    model_type: str
    """With `flops_per_token` what later plans need of this one, once its run is recorded."""
    flops_per_token: float
    """Floating-point operations of one token's training step: recomputation and passes of a reference included,
    generating it not."""
    model_flops_per_token: float = 0.0
    """Of these, what is no recomputation, and those of generating it: what counts to the MFU."""
    peak_flops_per_second: float | None = None
    """Of one device by its sheet, for the type of the products; None where that is not known."""
    sheet_flops_per_second: float | None = None
    """Operations a second of a device that its sheet gives for such a step; None where that is not known."""
    micro_batch_tokens: float | None = None
    """Tokens of a micro-batch, with the most padding that there can be."""
    tokens_per_second: Range | None = None
    """Tokens without padding, in the training steps alone, on all devices together."""
    num_devices: int = 1
    """That the run is spread over."""
    mfu: Range | None = None
    """Share of the devices' peak that goes into the model's own operations, recomputation left out."""
    seconds: Range | None = None
    """Time of all training steps, with what is computed before them and what failures cost; an upper bound while the
    rows are not tokenized."""
    cost_usd: Range | None = None
    """Price of that time, for all devices."""
    usd_per_million_tokens: Range | None = None
    """Price of a million tokens without padding."""
    num_workers: int = 0
    """Processes that make micro-batches beside each that computes."""
    fed_tokens_per_second: float | None = None
    """Tokens a second of which a device computes micro-batches at most, were they always there."""
    communication: str | None = None
    """Description of the communication and whether it overlaps with computing; None where nothing is sent."""
    generation_share: Range | None = None
    """Share of the steps' time in which answers are generated; None where there are none, or it is not known."""
    goodput: Goodput | None = None
    """Cost of failures; None for a run that will hardly see one."""
    basis: str
    """Description of the source of the figures."""

    def words(self, *, at_most: bool) -> str:
        """The figures in one line.

        Args:
            at_most: Whether time and cost are upper bounds.
        """
        if self.tokens_per_second is None:
            return "throughput unknown"
        parts = [self.tokens_per_second.words(_rounded) + " tokens/s"]
        if self.seconds is not None:
            parts.append(_upto(self.seconds, duration, at_most=at_most))
        if self.cost_usd is not None:
            parts.append(_upto(self.cost_usd, _price, at_most=at_most) + " USD")
        return ", ".join(parts)


def optimizer_bytes(
    num_trained: int, states_each: float, trained_dtype: Dtype = "float32", *, has_ema: bool = False
) -> float:
    """Bytes of memory that an optimizer step reads and writes for `num_trained` parameters.

    Weights read and written (8 in float32), gradients read for their norm, scaled by it and read again (4 + 8 + 4),
    states of `states_each` bytes read and written. An average is read and written, and the weights are read for it.
    """
    return num_trained * ((9 if has_ema else 6) * BYTES[trained_dtype] + 2 * states_each)


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
    layout: Layout,
    num_nodes: int,
    num_cores: int | None = None,
    passes: Passes | None = None,
    offloaded_bytes: int = 0,
    tiled_mlp: bool = False,
    is_fused: bool = True,
) -> Step | None:
    """The work of one optimizer step; None for models whose operations are not counted.

    Args:
        recipe: The recipe.
        model: The model.
        data: Its rows; while they are not tokenized, each is taken as `data.max_length` tokens. So is each answer to a
            prompt with its prompt, as long as it is not generated.
        device: Where.
        dtype: Type of the products.
        mask_length: Length of a row of the attention mask, None without a mask.
        padding_free: Whether rows are padding-free.
        micro_batch_size: Rows of a micro-batch.
        gradient_checkpointing: Whether layers are computed again.
        layout: How the run is spread over devices.
        num_nodes: Machines that its processes are on.
        num_cores: Of each machine; None where that is not known.
        passes: What the method does in a step; as transformers generates and without a teacher where left out.
        offloaded_bytes: Activations that a device copies to host memory in a micro-batch, and back.
        tiled_mlp: Whether MLPs are computed in tiles.
        is_fused: Whether kernels fuse what lies between products, or layers are compiled.
    """
    if not steps.is_counted(model):
        return None
    row = document = longest = float(recipe.data.max_length)
    batch = recipe.train.global_batch_size
    passes = passes or passes_of(recipe.method, recipe.adapter, recipe.data, global_batch_size=batch)
    # Elsewhere TRL's head computes every position.
    leaves_out = device.kind == "cuda" or passes.head in ("sums", "chunks")
    head_share = passes.max_scored_share if leaves_out else 1.0
    computes_again = passes.head == "tiles" or (passes.head == "chunks" and trained_tables(model, recipe.adapter).head)
    if data.tokenized and data.num_train_tokens and passes.method == "sft":
        row = document = longest = data.num_train_tokens / data.num_train
        if recipe.data.packing and data.num_rows:
            document = min(row, data.num_train_tokens / data.num_rows)
        if micro_batch_size > 1 and not padding_free and data.longest_tokens:
            longest = float(data.longest_tokens)
        if leaves_out:
            head_share = (data.num_trainable_tokens or 0) / data.num_train_tokens
    elif data.tokenized and data.num_train_tokens and data.longest_tokens and passes.generation is None:
        row = document = data.num_train_tokens / data.num_train / passes.sequences_per_row
        longest = min(longest, float(data.longest_tokens))
    if virtual := passes.num_virtual_tokens:
        # Tokens are those of rows, the work is that of virtual ones too.
        document, longest = document + virtual, longest + virtual
    attended = document if mask_length is None else micro_batch_size * row if padding_free else row + virtual
    sequences, more = passes.sequences_per_row, (row + virtual) / row

    operations = partial(
        steps.flops_per_token,
        model,
        recipe.adapter,
        attended_tokens=attended,
        num_tokens=micro_batch_size * sequences * row,
        head_share=head_share,
        whole_head=not computes_again,
    )
    forward = steps.forward_flops_per_token(model, attended_tokens=attended, head_share=head_share)
    generation = _generating(recipe, model, passes, dtype, layout, forward_flops=batch * row * forward)
    num_forwards, without_gradients = passes.num_forwards, passes.num_forwards * forward
    if passes.teacher is not None:
        num_forwards += passes.teacher.num_layers / model.num_layers
        without_gradients += steps.forward_flops_per_token(
            passes.teacher, attended_tokens=attended, head_share=head_share
        )
    generated = 0.0 if generation is None else generation.flops / (batch * row)
    cores = None if num_cores is None else max(0, num_cores * num_nodes // layout.num_processes - 1)
    trained = num_trainable_params(model, recipe.adapter)
    optim, trained_dtype = recipe.train.optimizer, recipe.train.trained_dtype
    has_ema = recipe.train.ema_decay is not None
    states_each = optimizer_bytes_per_param(optim, trained_dtype)
    cost = matrix_cost_of(model, recipe.adapter, optim, trained_dtype, recipe.train.low_rank, layout.num_shards)
    if recipe.train.low_rank is not None:
        states_each = trained_bytes(model, recipe.adapter, optim, trained_dtype, recipe.train.low_rank)[1] / trained
    kept_bytes = (2 if has_ema else 1) * BYTES[trained_dtype] + states_each
    moved_bytes = optimizer_bytes(trained, states_each, trained_dtype, has_ema=has_ema)
    head_again = 2 * steps.head_params(model) * head_share * computes_again
    num_tokens, gathered_bytes = micro_batch_size * sequences * longest, 0 if cost is None else cost.gathered_bytes
    if layout.engine == "automodel":
        transfers = staged_transfers(
            model,
            dtype,
            layout,
            num_nodes,
            num_tokens,
            gradient_checkpointing=gradient_checkpointing,
            trained_dtype=trained_dtype,
            update_bytes=gathered_bytes,
        )
    else:
        transfers = steps.transfers_of(
            model,
            recipe.adapter,
            dtype,
            layout,
            num_nodes=num_nodes,
            num_tokens=num_tokens,
            gradient_checkpointing=gradient_checkpointing,
            passes=passes,
            trained_dtype=trained_dtype,
            offloaded_bytes=offloaded_bytes,
            update_bytes=gathered_bytes,
        )
    return Step(
        model_type=model.model_type,
        num_params=model.num_params,
        num_layers=model.num_layers,
        is_sparse=model.num_experts > 0,
        method=passes.method,
        adapter=recipe.adapter.type,
        dtype=dtype,
        layout=layout,
        num_nodes=num_nodes,
        flops_per_token=more * operations(gradient_checkpointing=gradient_checkpointing, tiled_mlp=tiled_mlp)
        + without_gradients,
        model_flops_per_token=more * operations(gradient_checkpointing=False)
        - head_again
        + without_gradients
        + generated,
        num_tokens=batch * sequences * row,
        max_computed_tokens=batch * sequences * longest,
        num_micro_batches=max(1, batch // (micro_batch_size * layout.num_batches)),
        num_trained=trained,
        optimizer_bytes=moved_bytes / (layout.num_shards * layout.tp_size * layout.pp_size),
        optimizer_flops=0 if cost is None else cost.flops,
        checkpoint_bytes=trained * kept_bytes,
        transfers=transfers,
        num_forwards=num_forwards,
        generating=generation,
        before=steps.Before(
            flops=passes.num_forwards_before * data.num_train * sequences * row * forward,
            num_micro_batches=passes.num_forwards_before * data.num_train / (micro_batch_size * layout.num_batches),
        )
        if passes.num_forwards_before
        else None,
        # A stream is read in its order, by one process.
        max_workers=0 if recipe.data.streaming else cores,
        attention_flops_per_token=more
        * steps.attention_flops_per_token(
            model, attended_tokens=attended, num_passes=3 + gradient_checkpointing + passes.num_forwards
        ),
        traffic=traffic_of(model, recipe.adapter, dtype, trained_dtype, gradient_checkpointing=gradient_checkpointing),
        is_fused=is_fused,
        launched_passes=launched_passes(model, recipe.adapter, gradient_checkpointing=gradient_checkpointing),
        slowest_stage=1.0 if layout.pp_size == 1 else slowest_stage(model, layout.pp_size, gradient_checkpointing),
    )


def _generating(
    recipe: Recipe, model: ModelFacts, passes: Passes, dtype: Dtype, layout: Layout, *, forward_flops: float
) -> steps.Generating | None:
    """The work of generating the answers of a step; each token goes through the model once."""
    generation = passes.generation
    if generation is None:
        return None
    return steps.Generating(
        num_tokens=generation.completion_tokens / generation.num_steps,
        read_bytes=generation_bytes(model, recipe.adapter, passes, dtype, layout, recipe.train.trained_dtype),
        flops=forward_flops / generation.num_steps,
        is_launched=not generation.by_vllm,
        is_ahead=generation.is_ahead,
    )


def speed_of(
    step: Step,
    device: Device,
    figures: Figures | None,
    records: Sequence[RunRecord],
    *,
    num_steps: int | None,
    save_steps: int | None = None,
) -> Speed:
    """Estimate the speed of steps on devices: from similar recorded runs, or by published shares of their peak.

    Args:
        step: The work of a step.
        device: One of the devices it is done on.
        figures: What its sheet says of it, None where that is not known.
        records: The user's finished runs, of which the similar ones count.
        num_steps: Steps of the run, None while they are not known.
        save_steps: Steps between checkpoints, None for as many as lose least.
    """
    peak = steps.peak_of(step, device, figures)
    speed = Speed(
        model_type=step.model_type,
        flops_per_token=step.flops_per_token,
        model_flops_per_token=step.model_flops_per_token,
        peak_flops_per_second=peak,
        sheet_flops_per_second=steps.modelled_rate(step, device, figures),
        micro_batch_tokens=step.tokens_of_micro_batch,
        num_devices=step.num_devices,
        basis="",
    )
    sheet = figures or Figures()
    timed = _timed(step, device, sheet, records)
    if isinstance(timed, str):
        return speed.model_copy(update={"basis": timed})
    seconds, rate = timed.seconds, timed.rate
    tokens = seconds.seconds_of(step.num_tokens)
    goodput = None
    if num_steps is not None and device.kind == "cuda":
        goodput = goodput_of(
            num_devices=step.num_devices,
            num_writers=step.num_writers,
            num_steps=num_steps,
            step_seconds=(seconds.low + seconds.high) / 2,
            checkpoint_bytes=step.checkpoint_bytes,
            save_steps=save_steps,
        )
    lost = 1.0 if goodput is None else 1 / goodput.share
    total = None if num_steps is None else seconds.times(num_steps * lost).plus(steps.seconds_before(step, rate))
    price = None if figures is None else figures.usd_per_hour
    a_second = None if price is None else step.num_devices * price / 3600
    return speed.model_copy(
        update={
            "tokens_per_second": tokens,
            "mfu": None if peak is None else tokens.times(step.model_flops_per_token / step.num_devices / peak),
            "seconds": total,
            "cost_usd": None if a_second is None or total is None else total.times(a_second),
            "usd_per_million_tokens": None if a_second is None else tokens.seconds_of(1e6 * (a_second * lost)),
            "num_workers": steps.num_workers(step, rate, sheet),
            "fed_tokens_per_second": steps.fed_tokens_per_second(step, rate, sheet),
            "communication": steps.communication_words(step, rate, sheet),
            "generation_share": _generation_share(step, timed),
            "goodput": goodput,
            "basis": f"{timed.basis}{_parts_words(step, timed)}; training steps only, without evaluations"
            + (" and checkpoints" if goodput is None else ", with checkpoints and failures"),
        }
    )


@dataclass(frozen=True)
class _Timed:
    """Seconds of a step, and the rate they come from, with its source in words."""

    seconds: Range
    generating: Range
    """Of these, in which answers are generated."""
    rate: Range
    """Operations a second of a device."""
    basis: str
    generation_share: Range | None = None
    """Share of the time in which similar runs generated answers; None where that was not measured."""


def _generation_share(step: Step, timed: _Timed) -> Range | None:
    """The least of generating in the longest of the rest, and the other way round; None of what is done beside it."""
    if step.generating is None or step.generates_ahead:
        return None
    if timed.generation_share is not None:
        return timed.generation_share
    part, whole = timed.generating, timed.seconds
    remainder = Range(low=whole.low - part.low, high=whole.high - part.high)
    return Range(low=part.low / (part.low + remainder.high), high=part.high / (part.high + remainder.low))


def _parts_words(step: Step, timed: _Timed) -> str:
    """Describe the share of time that is no training."""
    text = ""
    if step.generating is not None:
        generating, whole = timed.generating.words(duration), timed.seconds.words(duration)
        text += f"; generation takes {generating} of {whole} per step"
        text += ", overlapped with training" if step.generates_ahead else ""
    if step.before is not None:
        before = steps.seconds_before(step, timed.rate)
        text += f"; {before.words(duration)} for the reference before training"
    return text


def _timed(step: Step, device: Device, figures: Figures, records: Sequence[RunRecord]) -> _Timed | str:
    """Return the time of a step, or a description of missing figures."""
    similar = [record for record in records if _is_similar(record, step, device)]
    as_spread = [record for record in similar if (record.layout, record.num_nodes) == (step.layout, step.num_nodes)]
    # A process that had a whole processor tells nothing of those that share it.
    is_shared = device.kind == "cpu" and step.num_devices > 1
    alone = [] if is_shared else [record for record in similar if record.layout == Layout()]
    if as_spread:
        rate = _recorded_rate(step, device, figures, [(each, each.flops_per_second) for each in as_spread])
        basis = _words_of(as_spread, device)
    elif alone:
        rate = _recorded_rate(step, device, figures, [(each, each.computing_flops_per_second) for each in alone])
        basis = _words_of(alone, device)
    else:
        by_peak = steps.rate_of(step, device, figures)
        if by_peak is None:
            return f"throughput on {device.name} unknown until a run has finished on it"
        rate, basis = by_peak
    generation = steps.generating(step, rate, figures)
    seconds = steps.seconds_of(step, rate, figures)
    share = None
    if as_spread:
        # What devices waited is in it, and generating.
        whole = rate.seconds_of(step.num_tokens * step.flops_per_token / step.num_devices)
        shares = [record.generation_share for record in as_spread if record.generation_share is not None]
        if shares and step.generating is not None:
            share = steps.range_of(shares)
            seconds, generation = whole, Range(low=whole.low * share.low, high=whole.high * share.high)
        elif generation is not None:
            seconds = steps.with_generation(step, whole, generation)
    if seconds is None or generation is None:
        link = steps.unknown_link(step, figures)
        what = link or f"of the memory of {device.name}"
        return f"bandwidth {what} unknown; throughput unknown until a run has finished with this layout"
    return _Timed(seconds, generation, rate, basis, share)


def _recorded_rate(step: Step, device: Device, figures: Figures, recorded: Sequence[tuple[RunRecord, float]]) -> Range:
    """Return the operations a second that recorded runs let expect: their median, and a range around it.

    Another length, micro-batch or model is as much faster or slower as the sheet of the device lets expect. Runs of
    similar micro-batches count alone where there are any. Runs that differ more among each other widen the range.

    Args:
        step: The planned step.
        device: One of the devices it is done on.
        figures: What its sheet says of it.
        recorded: Runs, with what each reached.
    """
    by_sheet = steps.modelled_rate(step, device, figures)
    near = [each for each in recorded if _is_near(each[0].micro_batch_tokens, step.tokens_of_micro_batch)]
    rates = [
        reached * (by_sheet / record.sheet_flops_per_second if by_sheet and record.sheet_flops_per_second else 1)
        for record, reached in near or recorded
    ]
    spread = RECORDED_SPREAD if near else steps.SPREAD
    around = spread.times(median(rates))
    return Range(low=min(*rates, around.low), high=max(*rates, around.high))


def _is_near(recorded_tokens: float | None, tokens: float) -> bool:
    return recorded_tokens is None or 1 / SIMILAR_SIZE <= recorded_tokens / tokens <= SIMILAR_SIZE


def _is_similar(record: RunRecord, step: Step, device: Device) -> bool:
    kind = (record.device, record.model_type, record.method, record.adapter, record.dtype)
    of_a_size = 1 / SIMILAR_SIZE <= record.num_params / step.num_params <= SIMILAR_SIZE
    alike = record.by_vllm == (step.generating is not None and not step.generating.is_launched)
    wanted_key = (device.name, step.model_type, step.method, step.adapter, step.dtype)
    return kind == wanted_key and of_a_size and alike


def _words_of(records: Sequence[RunRecord], device: Device) -> str:
    number = records[0].layout.num_processes
    where = "this device" if number == 1 else f"{number} of {device.name}"
    memory = steps.range_of([record.memory_share for record in records]).words(steps.PERCENT)
    return f"measured in {_runs(len(records))} on {where}, which used {memory} of the planned memory"


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
    return "less than 0.01" if usd < 0.01 else f"{usd:,.2f}" if usd < 10 else _rounded(usd)


def _upto(span: Range, words: Callable[[float], str], *, at_most: bool) -> str:
    return f"at most {words(span.high)}" if at_most else span.words(words)
