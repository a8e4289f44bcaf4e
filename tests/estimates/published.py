"""Peaks that others measured and published (`published.yaml`), and what the planner estimates for the same runs.

Those runs differ from tunekit's where they say so: most compute the logits of all tokens, some train adapters of 16
bits. What such a difference costs is added here by a formula, the same one for every row.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from tests.estimates.test_architectures import facts_of
from tunekit.estimates.facts import ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.activations import HEAD_COLUMNS, HEAD_TOKENS, activation_bytes_per_layer, products_of
from tunekit.estimates.memory.memory import CONTEXT_BYTES, RESERVE_SHARE, MemoryEstimate, estimate
from tunekit.estimates.memory.stages import stages_of
from tunekit.estimates.memory.states import BYTES, Phase, num_trainable_params
from tunekit.estimates.models.model_config import known_models
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter

TABLE = Path(__file__).parent / "published.yaml"

LOGITS: Mapping[str, tuple[int, int]] = {
    "dropped": (10, 12),
    "kept": (10, 14),
    "kept in float32": (12, 16),
    "pieces": (4, 4),
    "pieces in float32": (6, 6),
}
"""Bytes per token and vocabulary entry of a loss over all logits, at the end of the forward pass and in the backward
pass. A test counts them. `dropped`: transformers' loss, where nothing holds on to the model's output; `kept`: where the
caller does, `kept in float32` before transformers 4.45; `pieces`: logits and loss are made for some tokens at a time,
in 16 bits or with a loss in float32, and all stay until the backward pass."""

UNITS = {"bytes": 1, "mib": 2**20, "gb": 10**9, "gib": 2**30}


@dataclass(frozen=True, eq=False)
class Row:
    """One published measurement."""

    name: str
    source: str
    measure: str
    """allocated, reserved or device."""
    tolerance: tuple[float, float]
    because: str
    """Why the tolerance is as wide as it is."""
    measured_bytes: int
    setting: Mapping[str, Any]
    other: Mapping[str, str] = field(default_factory=dict)
    """Differences from tunekit's path that are computed."""
    missed: str | None = None
    """Why the estimate is further off than the tolerance, where it is."""

    @property
    def model(self) -> ModelFacts:
        """Facts of its model, from the planner's table or from this one's."""
        return _model(self.setting["model"])

    @property
    def adapter(self) -> FullAdapter | LoraAdapter:
        """What is trained, as a recipe says it."""
        how = self.setting
        if how["type"] == "full":
            return FullAdapter()
        common = {
            "rank": how["rank"],
            "dropout": how.get("dropout", 0.0),
            "target_modules": how.get("targets", "all-linear"),
            "use_dora": how.get("dora", False),
        }
        return (
            QloraAdapter(**common, double_quant=how.get("double_quant", True))
            if how["type"] == "qlora"
            else LoraAdapter(**common)
        )

    @property
    def layout(self) -> Layout:
        """How it is spread over devices."""
        return Layout(**self.setting.get("layout", {}))

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return int(self.setting["batch"] * self.setting["length"])

    @property
    def words(self) -> str:
        """The row in words: `qlora Llama-2-7b-hf 4 x 2048, FSDP2, full shard of 2`."""
        how = self.setting
        name = how["model"].partition("/")[2]
        return (
            f"{how['type']} {name} {how['batch']} x {how['length']}, {self.layout.name} of {self.layout.num_processes}"
        )


@cache
def rows() -> tuple[Row, ...]:
    """All of the table."""
    return tuple(_rows(yaml.safe_load(TABLE.read_text(encoding="utf-8"))["groups"]))


def _rows(groups: list[dict[str, Any]]) -> Iterator[Row]:
    own = {"tolerance", "because", "missed", "other", *UNITS}
    for group in groups:
        for row in group["rows"]:
            unit = next(unit for unit in UNITS if unit in row)
            yield Row(
                name=group["name"],
                source=f"{group['source']}, read {group['read']}",
                measure=group["measure"],
                tolerance=tuple(row.get("tolerance", group["tolerance"])),
                because=row.get("because", group["because"]),
                measured_bytes=round(row[unit] * UNITS[unit]),
                setting=group["setting"] | {key: value for key, value in row.items() if key not in own},
                other=group.get("other", {}) | row.get("other", {}),
                missed=row.get("missed", group.get("missed")),
            )


@cache
def own_models() -> Mapping[str, Any]:
    """Configurations of models that the planner's table does not hold."""
    models: Mapping[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))["models"]
    return models


@cache
def _model(name: str) -> ModelFacts:
    own = own_models()
    return facts_of(own[name] if name in own else known_models()[name].config)


def estimate_of(row: Row) -> MemoryEstimate:
    """What the planner says of the run, as if it were one of tunekit's."""
    how = row.setting
    return estimate(
        row.model,
        row.adapter,
        device="cuda",
        dtype=how.get("dtype", "bfloat16"),
        optim=how["optim"],
        num_tokens=row.num_tokens,
        mask_length=how["length"] if how.get("padded") else None,
        sliding_mask_length=None,
        gradient_checkpointing=how["checkpointing"],
        accumulates=how.get("accumulates", False),
        num_micro_batches=how.get("accumulated", 1),
        layout=row.layout,
        devices_per_node=min(8, row.layout.num_processes),
        reserve_share=0.0,
    )


def estimated_bytes(row: Row) -> int:
    """The planner's estimate of what was measured, with the differences that are computed."""
    peak = max(_phases(row).values())
    if row.measure == "allocated":
        return peak
    reserved = int((1 + RESERVE_SHARE["cuda"]) * peak)
    return reserved if row.measure == "reserved" else reserved + CONTEXT_BYTES["cuda"]


def _phases(row: Row) -> dict[Phase, int]:
    model, layout = row.model, row.layout
    phases = dict(estimate_of(row).phases)

    def add(size: int, *names: Phase) -> None:
        for name in names or tuple(phases):
            if name in phases:
                phases[name] += size

    tokens = row.num_tokens // (layout.cp_size * layout.sp_size)
    if (logits := row.other.get("logits")) is not None:
        # In place of the tile of TRL's head.
        tile = min(tokens, HEAD_TOKENS) * HEAD_COLUMNS * BYTES[row.setting.get("dtype", "bfloat16")]
        forward, backward = LOGITS[logits]
        entries = tokens * model.vocab_size // layout.tp_size
        add(forward * entries - tile, "forward")
        add(backward * entries - tile, "head")
    if row.other.get("loss") == "without logits":
        forward, backward = LOGITS["kept"]
        add(-forward * tokens * model.vocab_size, "forward")
        add(-backward * tokens * model.vocab_size, "head")
    if row.other.get("experts") == "16 bit":
        # No copies of experts' weights that a forward pass casts and keeps.
        experts = sum(stage.all.experts for stage in stages_of(model, layout))
        add(-2 * experts, "forward", "head", "last layer")
    if row.other.get("adapters") == "16 bit":
        # Weights, states and, late in a step, gradients of half the size.
        trained = num_trainable_params(model, row.adapter) // layout.num_shards
        if layout.offload_param_device == "none":
            add(-(2 + 4) * trained)
            add(-2 * trained, "first layer", "optimizer")
        if layout.strategy in ("single", "ddp"):
            # No copies of what adapters read, which autocast makes.
            with_casts, without = (
                activation_bytes_per_layer(products_of(model, row.adapter, "bfloat16", autocast=autocast), None)
                for autocast in (True, False)
            )
            casts = (with_casts - without) * tokens
            layers = 1 if row.setting["checkpointing"] else model.num_layers
            add(-casts, "first layer")
            add(-casts * layers, "last layer")
            if layers > 1:
                add(-casts * layers, "forward", "head")
    if row.other.get("head") == "4 bit":
        # Lightning quantises every linear layer, the head too (lightning.fabric.plugins.BitsandbytesPrecision).
        add(-int((2 - 0.5 - 4 / 64) * model.vocab_size * model.hidden_size))
    if row.other.get("checkpointing") == "selected products":
        add(_selected_bytes(model) * tokens * model.num_layers, "forward", "head", "last layer")
    return phases


def _selected_bytes(model: ModelFacts) -> int:
    """Bytes per token that torchtitan's selective checkpointing keeps of a layer besides its input.

    The output of attention with a log-sum per head, and every second product: of q and v, gate and down projection
    (torchtitan/parallelisms/parallelize_llama.py at 9dec370, `_apply_ac_to_transformer_block`).
    """
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return 2 * (q + q + kv + model.intermediate_size + model.hidden_size) + 4 * model.num_heads


def error(row: Row) -> float:
    """How far the estimate is from what was measured, as a share of that."""
    return estimated_bytes(row) / row.measured_bytes - 1


def print_errors(console: Console | None = None) -> None:
    """Print the errors of all rows, by source, and how they are distributed."""
    console = console or Console()
    table = Table("source", "rows", "measured as", "median", "from", "to", "within tolerance", title="published peaks")
    errors = {row: error(row) for row in rows()}
    for name in dict.fromkeys(row.name for row in errors):
        table.add_row(name, *_figures([row for row in errors if row.name == name], errors))
    table.add_section()
    for measure in ("allocated", "reserved", "device"):
        table.add_row("all", *_figures([row for row in errors if row.measure == measure], errors))
    console.print(table)
    sizes = [abs(value) for value in errors.values()]
    console.print(
        f"{len(sizes)} rows: median of the error's size {statistics.median(sizes):.1%}, worst {max(sizes):.1%}"
    )


def _figures(some: list[Row], errors: Mapping[Row, float]) -> tuple[str, ...]:
    values = [errors[row] for row in some]
    within = sum(row.tolerance[0] <= errors[row] <= row.tolerance[1] for row in some)
    figures = (statistics.median(values), min(values), max(values))
    return (str(len(some)), some[0].measure, *(f"{value:+.1%}" for value in figures), f"{within} of {len(some)}")
