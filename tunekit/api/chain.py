"""Plans of recipes that run one after another, such as SFT, DPO and GRPO, with disk, time and cost in sum."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.errors import PlanError
from tunekit.estimates.facts import Origin
from tunekit.estimates.throughput.step import Range
from tunekit.planner.plan import Plan
from tunekit.planner.variants import plan_columns
from tunekit.probe.origin import origin_in
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.prepared_data import absolute
from tunekit.runs.run import RUNS

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Link:
    """Plan of a recipe in a chain."""

    plan: Plan
    files: ModelSection
    """The model whose files have its configuration and its tokenizer: the base that the first run starts from."""
    before: "Link | None" = None
    """The plan whose result it starts from; None where that is another model."""

    @property
    def name(self) -> str:
        """Name of the recipe's run."""
        return str(self.plan.recipe.output.name)

    @property
    def start(self) -> str:
        """Name of what training starts from."""
        return self.plan.recipe.model.path if self.before is None else self.before.name

    @property
    def _folder(self) -> Path:
        """Folder of the run, without the time that its name gets."""
        written = self.plan.recipe.output.dir
        return RUNS / self.name if written is None else Path(written)

    def is_meant_by(self, path: str) -> bool:
        """Return whether the path of a model is the name or the folder of this run, or of its result."""
        return path == self.name or Path(path).absolute() in (
            self._folder.absolute(),
            self._folder.absolute() / "model",
        )

    def result(self) -> Origin:
        """Return the run's result as what training starts from.

        Raises:
            PlanError: It is not known before the run has finished.
        """
        recipe, unknown = absolute(self.plan.recipe), None
        adapter = recipe.adapter
        if isinstance(adapter, FullAdapter) and adapter.new_layers:
            unknown = "its new layers"
        elif isinstance(adapter, FullAdapter) and self.plan.new_tokens:
            unknown = "its new tokens"
        elif isinstance(adapter, LoraAdapter) and (adapter.distributes_ranks or adapter.relora):
            unknown = "the ranks of its adapter"
        if unknown is not None:
            problem = f"model.path: {unknown} are known once {self.name} has finished"
            raise PlanError(problem, hint="plan this recipe then")
        saved = None if isinstance(adapter, FullAdapter) else adapter.as_saved
        return origin_in(self._folder.absolute() / "model", recipe, saved, self.plan.origin)

    def files_for(self, section: ModelSection) -> ModelSection:
        """Return the model with the files for a recipe that starts from this run, with what that recipe changes."""
        written = {name: value for name, value in section if name != "path" and name in section.model_fields_set}
        return self.files.model_copy(update=written)


@dataclass(frozen=True)
class Chain:
    """Plans of recipes that run one after another, with disk, time and cost in sum; a notebook shows a table."""

    links: tuple[Link, ...]

    def __iter__(self) -> Iterator[Link]:
        return iter(self.links)

    def __len__(self) -> int:
        return len(self.links)

    def __getitem__(self, position: int) -> Link:
        return self.links[position]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans, in the order of the recipes."""
        return tuple(link.plan for link in self.links)

    @property
    def disk_bytes(self) -> int | None:
        """Bytes of all run folders at most; None where that of one is not known."""
        sizes = [plan.saving.run_bytes for plan in self.plans if plan.saving.run_bytes is not None]
        return sum(sizes) if len(sizes) == len(self) else None

    @property
    def seconds(self) -> Range | None:
        """Time of all training; None where that of one is not known."""
        return _sum(plan.speed.seconds if plan.speed else None for plan in self.plans)

    @property
    def cost_usd(self) -> Range | None:
        """Price of that time for all devices; None where one is not known."""
        return _sum(plan.speed.cost_usd if plan.speed else None for plan in self.plans)

    def to_dict(self) -> dict[str, Any]:
        """The plans and their sums as plain data, for JSON."""
        return {
            "plans": [{"name": link.name, "start": link.start, **link.plan.to_dict()} for link in self],
            "disk_bytes": self.disk_bytes,
            "seconds": None if self.seconds is None else self.seconds.model_dump(),
            "cost_usd": None if self.cost_usd is None else self.cost_usd.model_dump(),
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row for each plan: what it needs and how long it takes."""
        import pandas as pd

        names = ({"recipe": link.name, "starts from": link.start} for link in self)
        return pd.DataFrame([row | plan_columns(plan) for row, plan in zip(names, self.plans, strict=True)])

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False, na_rep="", float_format="{:,.4g}".format)


def _sum(spans: Iterable[Range | None]) -> Range | None:
    """Return the sum of ranges; None where one is not known."""
    total = Range(low=0, high=0)
    for span in spans:
        if span is None:
            return None
        total = total.plus(span)
    return total
