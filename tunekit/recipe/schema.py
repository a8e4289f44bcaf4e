"""Schema of recipes, as pydantic models and as data.

Schema of recipes: every section, every field, every default, and the sentence that explains it.

A recipe holds intent in machine-free units; how it is carried out on a machine is the plan's. The string under a
field is its only description: `tunekit explain`, the JSON schema for editors and the reference page show that string.
A default lives here and nowhere else.

Values are strict: a number in quotes is not a number, and 2.5 is not a count. Unknown keys are errors.

The recipe's schema as data: which fields a section has, which sections lie below a field, what a field allows.

A field may take one section or a list of them; its sections are the same either way.

Reading, explaining and suggesting all ask the same questions of the pydantic models; they are answered here, once.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tunekit.recipe.methods import METHODS, Method
from tunekit.recipe.methods.sft import SFTMethod
from tunekit.recipe.methods.spec import OtherSections
from tunekit.recipe.sections.adapters import Adapter, FullAdapter, LoraAdapter, num_virtual_tokens
from tunekit.recipe.sections.data import DataSection
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.section import (
    EXPANDS_ENV,
    OUR_OPTIMS,
    TAG,
    Conflict,
    OutputSection,
    ParallelSection,
    Section,
    TrainSection,
)


def has_choice(key: tuple[str, ...], method: str) -> bool:
    """Return whether a field may differ from its default with a method; a form leaves out those that may not.

    Args:
        key: The field's key without positions in lists.
        method: `method.type`.
    """
    return key != ("data", "eval", "weight") and (method not in METHODS or METHODS[method].offers(key))


class Recipe(Section):
    """Machine-independent description of a training run."""

    model: ModelSection
    """Model to start from."""

    data: DataSection
    """Data and its tokenization."""

    method: Method = SFTMethod()
    """Training method."""

    adapter: Adapter = LoraAdapter()
    """Trained parameters: all of them (`full`), or low-rank adapters (`lora`, `qlora`)."""

    train: TrainSection = TrainSection()
    """Optimization: duration, batch size, learning rate, checkpoints."""

    parallel: ParallelSection = ParallelSection()
    """Parallelism across devices."""

    output: OutputSection = OutputSection()
    """Run folder, samples and trackers."""

    @property
    def num_positions(self) -> int:
        """Positions of the longest row: its tokens, and the virtual ones before them."""
        return self.data.max_length + num_virtual_tokens(self.adapter)

    @property
    def learning_rate(self) -> float:
        """Peak learning rate: the one given, or the default of the method and the adapter."""
        return self.train.learning_rate or self.method.default_learning_rate(self.adapter)

    def _conflicts_within(self) -> Iterator[Conflict]:
        """Yield what does not go together with the method and types, or else why a stream would not end."""
        others = OtherSections(self.data, self.train, self.adapter, self.output)
        conflicts = [*self.method.conflicts(others), *self._conflicts_of_types()]
        yield from conflicts
        if conflicts or not self.data.streaming:
            return
        if self.train.num_epochs is not None:
            what = "unsupported with data.streaming: the number of rows per epoch is unknown"
            yield Conflict(("train", "num_epochs"), what, "set train.max_steps instead")
        elif self.train.max_steps is None:
            what = "requires train.max_steps: the number of rows per epoch is unknown"
            yield Conflict(("data", "streaming"), what, "set train.max_steps")

    def _conflicts_of_types(self) -> Iterator[Conflict]:
        """Yield what does not go together with trained weights in bfloat16, or with updates of matrices."""
        if self.train.optim == "muon" and not isinstance(self.adapter, FullAdapter | LoraAdapter):
            what = f"updates only matrices of layers, and adapter.type {self.adapter.type} trains none"
            yield Conflict(("train", "optim"), what, "use adamw_torch_fused")
        if self.train.low_rank is not None and not isinstance(self.adapter, FullAdapter):
            what = f"projects to a low rank, but the weights of adapter.type {self.adapter.type} already have one"
            yield Conflict(("train", "optim"), what, "use adamw_torch_fused, or set adapter.type=full")
        if self.train.optim == "adam_mini" and not isinstance(self.adapter, FullAdapter):
            what = f"needs the heads and rows of layers, which adapter.type {self.adapter.type} does not train"
            yield Conflict(("train", "optim"), what, "use adamw_torch_fused, or set adapter.type=full")
        if self.train.optimizer in OUR_OPTIMS and "optim_args" in self.method.trainer_args:
            what = f"{self.train.optimizer} does not read them"
            yield Conflict(("method", "trainer_args", "optim_args"), what, "use train.optim_args, or unset it")
        if not self.train.pure_bf16:
            return
        key = ("train", "pure_bf16")
        if not isinstance(self.adapter, FullAdapter):
            what = f"saves almost nothing with adapter {self.adapter.type}, which is small compared with the base model"
            yield Conflict(key, what, "unset it, or set adapter.type=full")
        if self.model.dtype not in ("auto", "bfloat16"):
            what = f"contradicts model.dtype {self.model.dtype}"
            yield Conflict(key, what, "unset one of them")
        if self.train.fp8:
            what = "unsupported with train.pure_bf16: its products are cast from float32 weights"
            yield Conflict(("train", "fp8"), what, "unset one of them")


def members(annotation: Any) -> Iterator[Any]:
    """The types that a union allows; for any other annotation, itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from members(get_args(annotation)[0])
    elif origin is Union or origin is types.UnionType:
        for member in get_args(annotation):
            yield from members(member)
    else:
        yield annotation


def sections_of(field: FieldInfo) -> list[type[Section]]:
    """The sections that may stand in a field, alone or listed: none for a plain value, several where a tag chooses."""
    kinds = [item for kind in members(field.annotation) for item in (kind, *_items(kind))]
    return list(dict.fromkeys(kind for kind in kinds if _is_section(kind)))


def takes_list(field: FieldInfo) -> bool:
    """Return whether a field takes a list of sections."""
    return any(_is_section(item) for kind in members(field.annotation) for item in _items(kind))


def takes_one(field: FieldInfo) -> bool:
    """Return whether a field takes a section by itself: not where it takes lists alone, such as `method.rewards`."""
    return any(_is_section(kind) for kind in members(field.annotation))


def _items(kind: Any) -> Iterator[Any]:
    """The types of the items, if a type is that of a list."""
    return members(get_args(kind)[0]) if get_origin(kind) is list else iter(())


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def choices_of(field: FieldInfo) -> list[str]:
    """The words that a field allows by name; empty where it is open or takes none."""
    literals = [kind for kind in members(field.annotation) if get_origin(kind) is Literal]
    return [str(choice) for kind in literals for choice in get_args(kind) if not isinstance(choice, bool)]


def expands_env(field: FieldInfo) -> bool:
    """Return whether `${NAME}` is expanded to an environment variable in a field."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(next(iter(EXPANDS_ENV))))


def tag_of(section: type[Section]) -> str | None:
    """The word that names a variant (`lora`); None for a section that has no variants."""
    field = section.model_fields.get(TAG)
    return choices_of(field)[0] if field is not None and choices_of(field) else None


def is_free_mapping(field: FieldInfo) -> bool:
    """Return whether a field takes any keys, such as `method.trainer_args`."""
    return any(get_origin(kind) is dict or kind is dict for kind in members(field.annotation))


def variant(variants: list[type[Section]], value: Any) -> type[Section] | None:
    """The section that a value means among those that may stand in a field; None if its tag names none of them."""
    if len(variants) == 1:
        return variants[0]
    tag = value.get(TAG) if isinstance(value, dict) else None
    return next((section for section in variants if tag_of(section) == tag), None)


@dataclass(frozen=True)
class Holder:
    """A section that has some key, with its field of that name."""

    section: type[Section]
    field: FieldInfo

    @property
    def sections(self) -> list[type[Section]]:
        """The sections that may stand in the field."""
        return sections_of(self.field)


def holders_along(key: tuple[Any, ...], values: Any = None) -> list[list[Holder]]:
    """For each part of a dotted key, the sections that have it: several where variants share it.

    A position in a list of sections counts as its list. Shorter than the key where no section has the next part: it
    is unknown, or stands below a plain value or in a free mapping.

    Args:
        key: The key.
        values: A recipe's values. Where they choose a variant that has the next part, the others do not count.
    """
    sections: list[type[Section]] = [Recipe]
    path: list[list[Holder]] = []
    for depth, part in enumerate(key):
        chosen = variant(sections, values) if sections else None
        if chosen is not None and part in chosen.model_fields:
            sections = [chosen]
        if isinstance(values, list) and isinstance(part, int):
            values = values[part] if part < len(values) else None
        else:
            values = values.get(part) if isinstance(values, dict) else None
        if isinstance(part, int):
            is_item = path and takes_list(path[-1][0].field) and not isinstance(key[depth - 1], int)
            holders = path[-1] if is_item else []
        else:
            with_it = [section for section in sections if part in section.model_fields]
            holders = [Holder(section, section.model_fields[part]) for section in with_it]
        if not holders:
            break
        path.append(holders)
        sections = list(dict.fromkeys(below for holder in holders for below in holder.sections))
    return path


def all_fields(
    section: type[Section] = Recipe, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field of a section and of the sections below it, with its key; variants one after the other."""
    for name, field in section.model_fields.items():
        yield (*above, name), field
        for below in sections_of(field):
            yield from all_fields(below, (*above, name))
