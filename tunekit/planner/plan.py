"""The plan: every decision about a run, with its reasons. Written once, read by every process, never decided again."""

import html
from typing import Any, Literal

import yaml
from pydantic import Field

from tunekit.planner.facts import DataFacts, Device, Facts
from tunekit.planner.layout import Layout
from tunekit.planner.memory import MemoryEstimate
from tunekit.planner.speed import Speed
from tunekit.planner.states import Dtype
from tunekit.recipe.schema import Recipe


class Reason(Facts):
    """One decision: what it is about, what was chosen, and why."""

    topic: str
    choice: str
    why: str


class Rejected(Facts):
    """A layout that was looked at before the chosen one, and the number that ruled it out."""

    layout: Layout
    why: str
    needed_bytes: int | None = None
    """What each device would have needed at least; None where something else than memory ruled it out."""


class Schedule(Facts):
    """When things happen, in optimizer steps."""

    num_steps: int
    steps_per_epoch: int | None
    warmup_steps: int
    eval_steps: int | None
    """Steps between evaluations; none without evaluation rows."""
    save_steps: int


class Plan(Facts):
    """How a recipe is run on a machine."""

    recipe: Recipe = Field(exclude=True)
    layout: Layout
    """How the work is spread over devices."""
    num_nodes: int
    """Machines that the processes of `layout` run on, as many on each."""
    device: Device
    """One of those devices; they are equal."""
    dtype: Dtype
    """Type of the products, and of the frozen weights. Trained weights are float32."""
    autocast: bool
    """Whether products are computed in `dtype` while trained weights are kept in float32."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"]
    padding_free: bool
    """Whether the rows of a micro-batch lie one behind the other, kept apart by their positions; always when packed."""
    gradient_checkpointing: bool
    micro_batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    num_params: int
    num_trainable_params: int
    data: DataFacts
    schedule: Schedule | None
    """None while the number of packed sequences is not known, which is only before tokenising."""
    memory: MemoryEstimate
    memory_limit_bytes: int
    """What the plan allows itself to use of the device."""
    speed: Speed | None = None
    """Time and cost; None for models whose operations are not counted."""
    reasons: tuple[Reason, ...]
    rejected: tuple[Rejected, ...] = ()
    """What was looked at first, in its order."""
    change_first: str | None = None
    """What to change in the recipe first if memory runs out after all."""

    def to_yaml(self) -> str:
        """The plan as YAML, without the recipe, which stands beside it in the run folder."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)

    @classmethod
    def from_yaml(cls, text: str, recipe: Recipe) -> "Plan":
        """The plan that `to_yaml` wrote, with its recipe."""
        return cls.model_validate({**yaml.safe_load(text), "recipe": recipe})

    def explain(self) -> str:
        """The plan in words: each choice with its reason, then memory by part."""
        width = max(len(reason.topic) for reason in self.reasons)
        choice = max(len(reason.choice) for reason in self.reasons)
        lines = [f"{r.topic:<{width}}  {r.choice:<{choice}}  {r.why}".rstrip() for r in self.reasons]
        lines += ["", f"{'memory':<{width}}  {self.memory_line()}"]
        return "\n".join(lines)

    def memory_line(self) -> str:
        """Predicted memory by part against the limit, in one line."""
        parts = ", ".join(f"{name} {gib(size)}" for name, size in self.memory_parts().items())
        total = f"{gib(self.memory.total_bytes)} of {gib(self.memory_limit_bytes)} (estimate)"
        return f"{total}, {self.memory.peak_words}: {parts}"

    def memory_parts(self) -> dict[str, int]:
        """Predicted bytes by part, the largest first."""
        return dict(sorted(self.memory.parts.items(), key=lambda part: -part[1]))

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(r.topic)}</th><td style='text-align:left'>"
            f"{html.escape(r.choice)}</td><td style='text-align:left'>{html.escape(r.why)}</td></tr>"
            for r in self.reasons
        )
        memory = (
            "<tr><th style='text-align:left'>memory</th><td colspan='2' style='text-align:left'>"
            f"{html.escape(self.memory_line())}</td></tr>"
        )
        return f"<table>{rows}{memory}</table>"

    def to_dict(self) -> dict[str, Any]:
        """The plan and its recipe as plain data, for JSON."""
        return {"recipe": self.recipe.model_dump(mode="json"), "plan": self.model_dump(mode="json")}


def gib(size_bytes: float) -> str:
    """A size in words: `1.4 GiB`, or `23 MiB` below a tenth of a GiB."""
    if size_bytes < 2**30 / 10:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes < 10 * 2**30 else f"{size_bytes / 2**30:.1f} GiB"


def count(number: int) -> str:
    """A count of parameters in words: `2.75 M`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
