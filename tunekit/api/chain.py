"""Plans of recipes that run one after another, such as SFT, DPO and GRPO, with disk, time and cost in sum."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunekit.errors import PlanError
from tunekit.estimates.facts import Ancestor, Origin
from tunekit.estimates.throughput.step import Range
from tunekit.planner.plan import Plan
from tunekit.planner.variants import plan_columns
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
        recipe, earlier = absolute(self.plan.recipe), self.plan.origin
        adapter, model = recipe.adapter, self._folder.absolute() / "model"
        unknown = None
        if isinstance(adapter, FullAdapter) and adapter.new_layers:
            unknown = "its new layers"
        elif isinstance(adapter, FullAdapter) and self.plan.new_tokens:
            unknown = "its new tokens"
        elif isinstance(adapter, LoraAdapter) and (adapter.distributes_ranks or adapter.relora):
            unknown = "the ranks of its adapter"
        if unknown is not None:
            problem = f"model.path: {unknown} are known once {self.name} has finished"
            raise PlanError(problem, hint="plan this recipe then")
        base = earlier.loaded_for(recipe.model) if earlier is not None else recipe.model
        is_full = isinstance(adapter, FullAdapter)
        if is_full:
            base = ModelSection(path=str(model), trust_remote_code=base.trust_remote_code)
        this = Ancestor(name=model.parent.name, path=str(model.parent), method=recipe.method.type, adapter=adapter.type)
        return Origin(
            folder=str(model),
            base=base,
            adapter=None if isinstance(adapter, FullAdapter) else adapter.as_saved,
            start=earlier.start if earlier is not None else recipe.model.path,
            runs=(*(earlier.runs if earlier is not None else ()), this),
        )

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
        return self._sum_of("seconds")

    @property
    def cost_usd(self) -> Range | None:
        """Price of that time for all devices; None where one is not known."""
        return self._sum_of("cost_usd")

    def _sum_of(self, figure: Literal["seconds", "cost_usd"]) -> Range | None:
        spans = [span for plan in self.plans if (span := getattr(plan.speed, figure, None)) is not None]
        return reduce(Range.plus, spans) if len(spans) == len(self) else None

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
