"""Speeds that others measured and published (`published_speed.yaml`), and what the planner estimates for the same runs.

Each run is estimated as if it were one of tunekit's. Half of the rows of each source are held out: the constants of
`tunekit.estimates.throughput` are fitted to the others. The rule was fixed before: the rows of a source in the order of
a hash of their settings, every second of them, counted over all sources. Fresh rows came when all constants were set.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from tests.estimates import published
from tests.estimates.shapes import llama_facts
from tests.estimates.test_architectures import facts_of
from tunekit.estimates.facts import DataFacts, Device, Figures, ModelFacts
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.layout import Layout
from tunekit.estimates.models.model_config import known_models
from tunekit.estimates.throughput.speed import RunRecord, speed_of, step_of
from tunekit.estimates.throughput.step import Range, Step, modelled_rate
from tunekit.recipe.schema import Recipe

TABLE = Path(__file__).parent / "published_speed.yaml"

UNITS = ("tokens_per_second", "total_tokens_per_second", "samples_per_second", "seconds_per_step", "seconds")


Part = Literal["development", "held out", "fresh"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, eq=False)
class Row:
    """One published run."""

    name: str
    source: str
    setting: Mapping[str, Any]
    part: Part
    missed: str | None = None
    """Reason that its speed is outside the range, where it is."""

    @property
    def layout(self) -> Layout:
        """Layout of its devices."""
        return Layout(**self.setting.get("layout", {}))

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step, of all devices."""
        how = self.setting
        return int(how["batch"] * how.get("accumulated", 1) * self.layout.num_batches)

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        how, devices = self.setting, self.layout.num_processes
        unit = next(unit for unit in UNITS if unit in how)
        match unit:
            case "tokens_per_second":
                return float(how[unit])
            case "total_tokens_per_second":
                return float(how[unit] / devices)
            case "samples_per_second":
                return float(how[unit] * how["length"] / devices)
            case "seconds_per_step":
                return float(self.rows_per_step * how["length"] / how[unit] / devices)
            case _:
                return float(how["num_rows"] * how["length"] / how[unit] / devices)

    @property
    def words(self) -> str:
        """The row in words: `qlora Llama-2-7b-hf 4 x 2048 on 2xa100, FSDP2, full shard`."""
        how = self.setting
        recomputed = ", recomputed" if how.get("checkpointing") else ""
        fused = ", fused" if how.get("fused") else ""
        name = how["model"].rpartition("/")[2]
        where = f"{how['machine'].replace(self._kind, self.accelerator)}, {self.layout.name}"
        return f"{how['type']} {name} {how['batch']} x {how['length']} on {where}{recomputed}{fused}"

    @property
    def accelerator(self) -> str:
        """Kind of its devices; those beyond the catalogue by the source's name."""
        _, _, kind = self.name.rpartition(", ")
        return kind if kind in ("L40", "RTX 4080") else self._kind

    @property
    def _kind(self) -> str:
        return str(self.setting["machine"].rpartition("x8x")[2].lstrip("248x"))


@cache
def rows() -> tuple[Row, ...]:
    """All of the table."""
    return tuple(_rows(_table()["groups"]))


def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


def _rows(groups: list[dict[str, Any]]) -> Iterator[Row]:
    number = 0
    for group in groups:
        for setting in sorted((group["setting"] | row for row in group["rows"]), key=_hash):
            yield _row(group, setting, PARTS[number % 2])
            number += 1
        for row in group.get("fresh", []):
            yield _row(group, group["setting"] | row, "fresh")


def _row(group: dict[str, Any], setting: dict[str, Any], part: Part) -> Row:
    how = {key: value for key, value in setting.items() if key != "missed"} | group.get("corrected", {})
    return Row(group["name"], group["source"], how, part, setting.get("missed"))


def _hash(setting: Mapping[str, Any]) -> str:
    known = {key: value for key, value in setting.items() if key != "missed"}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


@cache
def model_of(name: str) -> ModelFacts:
    """Facts of a model, from this table, that of peaks, or the planner's."""
    own = {**published.own_models(), **_table()["models"]}
    config = own[name] if name in own else known_models()[name].config
    return facts_of(config) if "model_type" in config else _mpt(config["hidden_size"], config["num_hidden_layers"])


def _mpt(hidden: int, layers: int) -> ModelFacts:
    """LLM Foundry's MPT: no gate in the MLP, as many key heads as query heads, a tied head."""
    tensors = {"transformer.wte.weight": (50368, hidden)}
    for n in range(layers):
        block = f"transformer.blocks.{n}."
        tensors |= {
            block + "attn.Wqkv.weight": (3 * hidden, hidden),
            block + "attn.out_proj.weight": (hidden, hidden),
            block + "ffn.up_proj.weight": (4 * hidden, hidden),
            block + "ffn.down_proj.weight": (hidden, 4 * hidden),
        }
    shape = llama_facts(path="", hidden=hidden, intermediate=4 * hidden, layers=0, heads=32, kv_heads=32, vocab=50368)
    return shape.model_copy(update={"model_type": "mpt", "tensors": tensors, "num_layers": layers})


@cache
def step_and_figures(row: Row) -> tuple[Step, Device, Figures]:
    """The work of a step of the run, and what it is done on."""
    how, hardware = row.setting, find_machine(row.setting["machine"]).hardware()
    adapter: dict[str, Any] = {"type": how["type"]}
    if how["type"] != "full":
        adapter |= {"rank": how.get("rank", 16), "target_modules": how.get("targets", "all-linear")}
    train: dict[str, Any] = {"global_batch_size": row.rows_per_step, "micro_batch_size": how["batch"]}
    if how["type"] == "full" and how.get("pure"):
        train["pure_bf16"] = True
    elif "optim" in how:
        train["optim"] = how["optim"]
    recipe = Recipe.model_validate(
        {
            "model": "m",
            "data": {"train": "rows.jsonl", "max_length": how["length"]},
            "adapter": adapter,
            "train": train,
        }
    )
    step = step_of(
        recipe,
        model_of(how["model"]),
        DataFacts(num_train=1000),
        hardware.device,
        dtype="bfloat16",
        mask_length=None,
        padding_free=False,
        micro_batch_size=how["batch"],
        gradient_checkpointing=how.get("checkpointing", False),
        layout=row.layout,
        num_nodes=hardware.num_nodes,
        is_fused=how.get("fused", False),
    )
    assert step is not None and hardware.figures is not None
    return step, hardware.device, hardware.figures.model_copy(update=how.get("figures", {}))


def predicted(row: Row) -> Range:
    """Tokens a second of a device, as a plan would predict them."""
    step, device, figures = step_and_figures(row)
    speed = speed_of(step, device, figures, [], num_steps=None).tokens_per_second
    assert speed is not None
    return speed.times(1 / row.layout.num_processes)


def recorded(row: Row) -> RunRecord:
    """The run as if it were one of one's own."""
    step, device, figures = step_and_figures(row)
    return RunRecord(
        device=device.name,
        model_type=step.model_type,
        adapter=step.adapter,
        dtype=step.dtype,
        num_params=step.num_params,
        flops_per_token=step.flops_per_token,
        tokens_per_second=row.tokens_per_second * row.layout.num_processes,
        sheet_flops_per_second=modelled_rate(step, device, figures),
        micro_batch_tokens=step.tokens_of_micro_batch,
        peak_memory_bytes=1,
        planned_memory_bytes=1,
        layout=row.layout,
        num_nodes=step.num_nodes,
    )


@cache
def told_by_another() -> tuple["Outcome", ...]:
    """Rows with what one development run of the same source, devices and kernels lets expect."""
    found = []
    for row, other in permutations(rows(), 2):
        same = all(row.setting.get(key) == other.setting.get(key) for key in ("type", "machine", "layout", "fused"))
        if row.name != other.name or not same or other.part != "development":
            continue
        step, device, figures = step_and_figures(row)
        speed = speed_of(step, device, figures, [recorded(other)], num_steps=None)
        assert speed.tokens_per_second is not None
        if speed.basis.startswith("measured"):
            found.append(Outcome(row, speed.tokens_per_second.times(1 / row.layout.num_processes)))
    return tuple(found)


@dataclass(frozen=True)
class Outcome:
    """A row, and the range that is predicted for it."""

    row: Row
    span: Range

    @property
    def is_inside(self) -> bool:
        """True if the published speed is in the range."""
        return self.span.low <= self.row.tokens_per_second <= self.span.high

    @property
    def width(self) -> float:
        """Upper end of the range over the lower one."""
        return self.span.high / self.span.low

    @property
    def offset(self) -> float:
        """Published speed over the geometric middle of the range."""
        return self.row.tokens_per_second / math.sqrt(self.span.low * self.span.high)


@cache
def outcomes() -> tuple[Outcome, ...]:
    """Of all rows."""
    return tuple(Outcome(row, predicted(row)) for row in rows())


def coverage(some: Sequence[Outcome]) -> float:
    """Share of the rows whose published speed is in the range."""
    return sum(one.is_inside for one in some) / len(some)


def summary(some: Sequence[Outcome]) -> list[tuple[str, Sequence[Outcome]]]:
    """Rows by adapter, accelerator, number of devices and source, with the name of each part."""
    parts: list[tuple[str, Sequence[Outcome]]] = [("all", some)]
    keys = (
        lambda one: one.row.setting["type"],
        lambda one: one.row.accelerator,
        lambda one: "one device" if one.row.layout.num_processes == 1 else "several devices",
        lambda one: one.row.name,
    )
    for key in keys:
        names = sorted({key(one) for one in outcomes()})
        parts += [(name, [one for one in some if key(one) == name]) for name in names]
    return parts


def table() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles and rows of how often the published speed is in the range, by part of the table."""
    lines = []
    for name, some in summary(outcomes()):
        widths, offsets = [one.width for one in some], [one.offset for one in some]
        lines.append(
            (
                name,
                *(_cell([one for one in some if one.row.part == part]) for part in PARTS),
                f"{statistics.median(widths):.2f}, at most {max(widths):.2f}",
                f"{min(offsets):.2f} to {max(offsets):.2f}",
            )
        )
    return ("rows", *PARTS, "range", "published / middle"), lines


def recorded_words() -> list[str]:
    """Sentences of how often one run of a source tells the speed of another."""
    parts = {
        kind: _cell([one for one in told_by_another() if (one.width < 1.5) == is_near])
        for kind, is_near in (("similar", True), ("other", False))
    }
    return [
        f"Predicted from one recorded run of the same source, with {kind} micro-batches: {cell} in the range."
        for kind, cell in parts.items()
    ]


def _cell(some: Sequence[Outcome]) -> str:
    return f"{sum(one.is_inside for one in some)} of {len(some)} ({coverage(some):.0%})" if some else ""
