"""Changes of a recipe with which it fits, or fits better: for refusals, for what to try first, and for advice.

A change is some values by their dotted keys, and what it gives up of the result. Those that give up nothing come
first: what a recipe forces is left to the plan. Then states and weights of fewer bits, a 4-bit base, shorter rows, and
an adapter in place of all weights. Where no change fits alone, two of them are tried together.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from pydantic import ValidationError

from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import MemoryEstimate
from tunekit.estimates.memory.states import Dtype
from tunekit.planner.decisions.adapters import linears_beside_experts
from tunekit.planner.decisions.candidates import Fit, Setting, candidates, least
from tunekit.planner.decisions.checks import refusal
from tunekit.planner.plan import gib
from tunekit.recipe.methods import generates, is_rewarded
from tunekit.recipe.reading.parse import to_inline_yaml
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter
from tunekit.recipe.sections.section import BLOCK_OPTIMS, TAG, Section

LEAST_RANK = 4
"""Rank of the smallest adapters that are suggested."""

SHORTEST = 256
"""Tokens of the shortest rows that are suggested."""

KINDS: dict[str, type[FullAdapter | LoraAdapter]] = {"full": FullAdapter, "lora": LoraAdapter, "qlora": QloraAdapter}
"""Sections of the adapters that are suggested, by their types."""

OF_FULL: dict[str, Any] = {
    "train.pure_bf16": False,
    "train.fp8": False,
    "train.qat": None,
    "train.learning_rate": None,
    "train.learning_rates": None,
    "train.layerwise_lr_decay": None,
}
"""Values that all weights were trained with, which an adapter does not take or not so."""


LAYOUT_FIELDS = (
    "strategy",
    "dp_shard_size",
    "tp_size",
    "ep_size",
    "cp_size",
    "sp_size",
    "reshard_after_forward",
    "offload_param_device",
    "offload_optimizer_device",
)
"""Fields that force a layout."""


class Change(NamedTuple):
    """Some values of a recipe, and what they give up."""

    values: Mapping[str, Any]
    """By their dotted keys."""
    recipe: Recipe
    """With these values."""
    gives_up: str = ""
    """Of the result; empty where that stays as it is."""

    @property
    def is_rare(self) -> bool:
        """True if an optimizer is in it that somebody takes only where nothing else fits."""
        return self.values.get("train.optim") in ("paged_adamw_8bit", "tunekit_adamw_4bit")

    @property
    def overrides(self) -> tuple[str, ...]:
        """The values as they are given to a command: `train.pure_bf16=true`."""
        return tuple(f"{key}={to_inline_yaml(value)}" for key, value in self.values.items())

    @property
    def words(self) -> str:
        """The same in words."""
        return " and ".join(self.overrides)


def change_of(recipe: Recipe, values: Mapping[str, Any], gives_up: str = "") -> Change | None:
    """Return a change of a recipe; None where it would not be valid, or is none.

    An adapter of another type keeps the values that its type has too, as an override does.
    """
    try:
        changed = _with(recipe, {tuple(key.split(".")): value for key, value in values.items()})
    except ValidationError:
        return None
    assert isinstance(changed, Recipe)
    return None if changed == recipe else Change(values, changed, gives_up)


def _with(section: Section, values: Mapping[tuple[str, ...], Any]) -> Section:
    """Return a section with some values by their keys, validated.

    Raises:
        ValidationError: It is not valid so.
    """
    fields = {name: value for name, value in section if name in section.model_fields_set}
    below: dict[str, dict[tuple[str, ...], Any]] = {}
    for (name, *more), value in values.items():
        if more:
            below.setdefault(name, {})[tuple(more)] = value
        else:
            fields[name] = value
    fields |= {name: _with(dict(section)[name], inner) for name, inner in below.items()}
    kind: type[Section] = type(section)
    if isinstance(section, FullAdapter | LoraAdapter) and (TAG,) in values:
        kind = KINDS[fields[TAG]]
    return kind.model_validate({name: value for name, value in fields.items() if name in kind.model_fields})


def without_forcing(recipe: Recipe) -> Iterator[Change]:
    """Yield changes that leave to the plan what a recipe forces and costs memory; the result stays as it is."""
    train = recipe.train
    batch: dict[str, Any] = {} if train.micro_batch_size is None else {"train.micro_batch_size": None}
    batch |= {"train.gradient_checkpointing": "auto"} if train.gradient_checkpointing is False else {}
    yield from _valid(recipe, batch)
    for name in ("activation_offloading", "tiled_mlp"):
        if dict(train)[name] is False:
            yield from _valid(recipe, {f"train.{name}": "auto"})
    yield from _valid(recipe, {"model.dtype": "auto"} if recipe.model.dtype == "float32" else {})
    if generates(recipe.method) and recipe.method.generation.use_vllm is True:
        yield from _valid(recipe, {"method.generation.use_vllm": "auto"})


def defaults_of(section: Section, name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the defaults of the fields of a section that have another value."""
    defaults = {field: type(section).model_fields[field].default for field in fields}
    return {f"{name}.{field}": value for field, value in defaults.items() if dict(section)[field] != value}


def _valid(recipe: Recipe, values: Mapping[str, Any], gives_up: str = "") -> Iterator[Change]:
    change = change_of(recipe, values, gives_up) if values else None
    if change is not None:
        yield change


BF16 = "weights, gradients and optimizer states in bfloat16, rounded stochastically"
FOUR_BIT = "base weights in 4 bits"
ADAPTER = "trains an adapter instead of all weights"


def fewer_bits(recipe: Recipe, dtype: Dtype) -> Iterator[Change]:
    """Yield changes of the optimizer's states and of the trained weights, those that give up the least first."""
    train = recipe.train
    for optim in BLOCK_OPTIMS if train.pure_bf16 else ("adamw_8bit", "paged_adamw_8bit", "tunekit_adamw_8bit"):
        bits = BLOCK_OPTIMS.get(optim, 8)
        yield from _valid(recipe, {"train.optim": optim}, f"optimizer states in {bits} bits")
    if train.ema_decay is not None:
        yield from _valid(recipe, {"train.ema_decay": None}, "no average of the weights")
    if not isinstance(recipe.adapter, FullAdapter) or train.pure_bf16 or train.fp8 or dtype != "bfloat16":
        return
    # An optimizer that is named for float32 weights would round to the nearest.
    unset = {} if train.optim is None else {"train.optim": None}
    yield from _valid(recipe, {"train.pure_bf16": True, **unset}, BF16)
    for optim, bits in BLOCK_OPTIMS.items():
        words = f"weights and gradients in bfloat16, rounded stochastically; optimizer states in {bits} bits"
        yield from _valid(recipe, {"train.pure_bf16": True, "train.optim": optim}, words)


def lower_rank(recipe: Recipe) -> Iterator[Change]:
    """Yield lower ranks of adapters with the scale that they have, each half of the one before."""
    adapter = recipe.adapter
    if not isinstance(adapter, LoraAdapter):
        return
    rank, alpha = adapter.rank // 2, adapter.alpha / 2
    while rank >= LEAST_RANK:
        values = {"adapter.rank": rank, "adapter.alpha": int(alpha) if alpha.is_integer() else alpha}
        yield from _valid(recipe, values, f"rank {rank}")
        rank, alpha = rank // 2, alpha / 2


def as_adapter(recipe: Recipe) -> Iterator[Change]:
    """Yield LoRA and QLoRA, as far as they give up more than what a recipe has."""
    adapter, train = recipe.adapter, recipe.train
    if not isinstance(adapter, FullAdapter | LoraAdapter) or isinstance(adapter, QloraAdapter):
        return
    if isinstance(adapter, LoraAdapter):
        yield from _valid(recipe, {"adapter.type": "qlora"}, FOUR_BIT)
        return
    unset = {key: value for key, value in OF_FULL.items() if dict(train)[key.partition(".")[2]] != value}
    for kind, gives_up in (("lora", ADAPTER), ("qlora", f"{ADAPTER}; {FOUR_BIT}")):
        # What the optimizer was named for is the weights: the default of adapters is good for any of them.
        for optim in ({}, {"train.optim": None, "train.optim_args": None, "train.optim_target_modules": None}):
            change = change_of(recipe, {"adapter.type": kind, **unset, **optim}, gives_up)
            if change is not None:
                yield change
                break


def as_full(recipe: Recipe) -> Change | None:
    """Return training of all weights in place of an adapter; None where that would not be valid."""
    # What was named for adapters is ten times what all weights are trained with.
    unset = {} if recipe.train.learning_rate is None else {"train.learning_rate": None}
    return change_of(recipe, {"adapter.type": "full", **unset})


def shorter(recipe: Recipe, longest: int | None = None) -> Iterator[Change]:
    """Yield changes to shorter rows, each half as long as the one before.

    Args:
        recipe: The recipe.
        longest: Tokens of the longest that is yielded. Default: half of what the recipe has.
    """
    length = recipe.data.max_length // 2
    while length >= SHORTEST:
        if longest is None or length <= longest:
            answer = {}
            if is_rewarded(recipe.method) and recipe.method.max_completion_length > length // 2:
                answer = {"method.max_completion_length": length // 2}
            yield from _valid(recipe, {"data.max_length": length, **answer}, f"rows of at most {length} tokens")
        length //= 2


def _beside_experts(recipe: Recipe, setting: Setting) -> Iterator[Change]:
    beside = linears_beside_experts(setting.model, recipe.adapter)
    if isinstance(recipe.adapter, LoraAdapter) and beside:
        yield from _valid(recipe, {"adapter.target_modules": list(beside)}, "experts are not adapted")


def single_changes(recipe: Recipe, setting: Setting) -> Iterator[Change]:
    """Yield single changes that save memory, the one that changes the least of the result first.

    Another layout changes nothing of it; one that offloads comes after fewer bits, which keep the run fast.
    """
    yield from without_forcing(recipe)
    layout = list(_valid(recipe, defaults_of(recipe.parallel, "parallel", LAYOUT_FIELDS)))
    offloading = [change for change in layout if not fits_on_devices(setting, change.recipe)]
    yield from (change for change in layout if change not in offloading)
    yield from fewer_bits(recipe, setting.dtype)
    yield from offloading
    yield from _beside_experts(recipe, setting)
    yield from lower_rank(recipe)
    adapters, lengths = list(as_adapter(recipe)), list(shorter(recipe))
    if not isinstance(recipe.adapter, FullAdapter):
        yield from adapters
    yield from lengths[:1]
    if isinstance(recipe.adapter, FullAdapter):
        yield from adapters
    yield from lengths[1:]


def _pairs(recipe: Recipe, setting: Setting) -> Iterator[Change]:
    """Yield two changes together, the ones that change the least first."""
    for first in without_forcing(recipe):
        for second in single_changes(first.recipe, setting):
            yield together(first, second)
    changes = [change for change in single_changes(recipe, setting) if "data.max_length" not in change.values]
    for first in changes:
        if "adapter.type" in first.values:
            yield from with_less_beside(first, setting)
    for first in changes:
        lengths = list(shorter(first.recipe))
        # Where the shortest rows do not fit, none do.
        if lengths and _least_that_fits(setting, lengths[-1].recipe) is not None:
            yield from (together(first, second) for second in lengths)


def with_less_beside(first: Change, setting: Setting) -> Iterator[Change]:
    """Yield a change of the adapter with another that makes what it trains smaller."""
    recipe = first.recipe
    for second in (
        *fewer_bits(recipe, setting.dtype),
        *_beside_experts(recipe, setting),
        *islice(lower_rank(recipe), 1),
    ):
        yield together(first, second)


def together(first: Change, second: Change) -> Change:
    """Return two changes as one."""
    both = "; ".join(filter(None, (first.gives_up, second.gives_up)))
    return Change({**first.values, **second.values}, second.recipe, both)


class Smaller(NamedTuple):
    """Change of a recipe so that it fits."""

    words: str
    """Description of the change, and its result."""
    changes: tuple[str, ...] = ()
    """The same as `key=value`; none where nothing would do."""


def what_would_fit(setting: Setting) -> Smaller:
    """The smallest change of a recipe with which it fits: one alone, or else two together."""
    for changes in (single_changes, _pairs):
        for change in changes(setting.recipe, setting):
            smallest = _least_that_fits(setting, change.recipe)
            if smallest is not None:
                layout, memory = smallest
                how = f" ({layout.name})" if layout.num_processes > 1 or layout.offloads else ""
                return Smaller(f"set {change.words}: needs {gib(memory.total_bytes)}{how}", change.overrides)
    return Smaller(
        "no change of optimizer, precision, adapter or length fits; use a smaller model or a device with more memory"
    )


def _least_that_fits(setting: Setting, recipe: Recipe) -> tuple[Layout, MemoryEstimate] | None:
    """Return the first layout in which a recipe can be run and fits, and the least that it needs."""
    other = replace(setting, recipe=recipe)
    for candidate in candidates(other):
        if refusal(other, candidate.layout) is None:
            memory = least(other, candidate.layout, candidate.num_nodes)
            if other.fits(memory, candidate.devices_per_node):
                return candidate.layout, memory
    return None


def fits_on_devices(setting: Setting, recipe: Recipe) -> bool:
    """Return whether a recipe fits without weights or states off the devices, so that a run of it can be resumed."""
    other = replace(setting, recipe=recipe)
    return any(
        not candidate.layout.offloads
        and candidate.layout.why_not_resumed is None
        and refusal(other, candidate.layout) is None
        and other.fits(least(other, candidate.layout, candidate.num_nodes), candidate.devices_per_node)
        for candidate in candidates(other)
    )


def change_first(setting: Setting, num_nodes: int, chosen: Fit) -> str | None:
    """Return the change to try first if memory runs out after all: preferably one that leaves the result as it is."""
    for change, changed, other in _savings(setting, chosen):
        if refusal(changed, other.layout) is not None:
            continue
        checkpointing, size = other.gradient_checkpointing, other.micro_batch_size
        memory = changed.memory_as(other, num_nodes, size, checkpointing=checkpointing)
        if memory.total_bytes < chosen.memory.total_bytes:
            return f"{change}: {gib(memory.total_bytes)} instead of {gib(chosen.memory.total_bytes)}"
    return None


def _savings(setting: Setting, chosen: Fit) -> Iterator[tuple[str, Setting, Fit]]:
    """Single changes of what was chosen, the one that costs least first."""
    train, size = setting.recipe.train, chosen.micro_batch_size
    if chosen.layout.strategy == "fsdp2" and not chosen.layout.reshard_after_forward:
        resharded = chosen.layout.model_copy(update={"reshard_after_forward": True})
        yield "parallel.reshard_after_forward=true", setting, replace(chosen, layout=resharded)
    if not chosen.gradient_checkpointing and train.gradient_checkpointing == "auto":
        yield "train.gradient_checkpointing=true", setting, replace(chosen, gradient_checkpointing=True)
    if size > 1:
        smaller = max(part for part in range(1, size) if size % part == 0)
        yield f"train.micro_batch_size={smaller}", setting, replace(chosen, micro_batch_size=smaller)
    if chosen.gradient_checkpointing and not chosen.activation_offloading and setting.may_offload(chosen.layout):
        yield "train.activation_offloading=true", setting, replace(chosen, activation_offloading=True)
    if chosen.gradient_checkpointing and chosen.mlp_tile_tokens is None and setting.may_tile(chosen.layout):
        yield "train.tiled_mlp=true", setting, replace(chosen, mlp_tile_tokens=setting.model.hidden_size)
    for change in single_changes(setting.recipe, setting):
        yield change.words, replace(setting, recipe=change.recipe), chosen
