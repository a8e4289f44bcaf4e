"""Migration of another tool's configuration to a checked recipe and a report.

The tool is known by its keys, its rules fill a draft, and the draft is checked as any recipe is. What the schema
refuses moves from the draft to the list of unsupported keys, with the schema's own message, so that what is left is
always valid.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tunekit.errors import RecipeError
from tunekit.estimates.models.model_config import known_models, num_experts_of, text_config
from tunekit.migration import (
    axolotl,
    images,
    llamafactory,
    llamafactory_v1,
    megatron,
    swift,
    swift_megatron,
    torchtune,
    training,
    trl,
)
from tunekit.migration.draft import Draft, apply, data_file
from tunekit.migration.original import NoConfigurationError, Original, read_original
from tunekit.migration.report import TOOLS, Fate, Line, Migration, Suspicion
from tunekit.migration.suspects import suspects
from tunekit.migration.table import tool_rules
from tunekit.recipe.load import check_text
from tunekit.recipe.methods import METHODS
from tunekit.recipe.reading.parse import Fault, Place, read_yaml, to_yaml
from tunekit.recipe.reading.rewrite import short_recipe
from tunekit.recipe.schema import Recipe

WITHOUT_DROPOUT = [name for name, method in METHODS.items() if method.spec.trains_on in ("pairs", "answers")]
"""Methods for which TRL switches dropout off."""


class Tool(Protocol):
    """Interface of a tool's module."""

    def prepare(self, draft: Draft) -> None:
        """Lay in what several keys say together."""

    def finish(self, draft: Draft) -> None:
        """Record the tool's defaults for what the file does not set."""


_MODULES: dict[str, Tool] = {
    "axolotl": axolotl,
    "llama-factory": llamafactory,
    "trl": trl,
    "torchtune": torchtune,
    "ms-swift": swift,
    "ms-swift-megatron": swift_megatron,
    "llama-factory-v1": llamafactory_v1,
}
"""Modules by their tables; a tool has several where its keys are of several kinds."""


def migrate(
    path: str | Path, *, tool: str | None = None, num_devices: int | None = None, arguments: Sequence[str] = ()
) -> Migration:
    """Convert another tool's configuration into a recipe, and report on each key.

    Reads no rows, and of a model no more than a local config.json; `tunekit.plan` says how the recipe would run.

    Args:
        path: A configuration of Axolotl, LLaMA-Factory, TRL's commands, torchtune or ms-swift: YAML, JSON, or a shell
            script that calls one of them.
        tool: Source tool: axolotl, llama-factory, trl, torchtune or ms-swift. Default: detected from its keys.
        num_devices: Devices that it was written for: they multiply the global batch size. Default: as in the
            file, or one.
        arguments: Further `--key value` words of the tool's command line; they go before the file.

    Raises:
        RecipeError: It cannot be read, is of no known tool, or names no model or no rows.
    """
    if tool is not None and tool not in TOOLS:
        raise RecipeError(f"--from {tool}: no such tool", hint=f"available: {', '.join(TOOLS)}")
    words = tuple(arguments)
    # The `--key value` words behind `trl sft`.
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    original = read_original(path, words[first:])
    if words and original.task is None and not words[0].startswith("-"):
        original.task = words[1] if words[0] in ("trl", "swift", "megatron", "tune") and len(words) > 1 else words[0]
    if words and words[0] == "megatron":
        original.program = words[0]
    name = tool or original.tool or _recognised(original)
    draft = Draft(original, TOOLS[name], num_devices)
    table = _table(draft, name)
    module = _MODULES[table]
    module.prepare(draft)
    apply(draft, trl.rules(draft) if name == "trl" else tool_rules(table))
    images.refuse_audio(draft)
    images.refuse_images(draft)
    module.finish(draft)
    images.finish(draft)
    _settle(draft)
    recipe = _checked(draft)
    suspects(draft, recipe)
    return Migration(
        path=original.path,
        tool=name,
        recipe=recipe,
        text=_text(draft, recipe),
        lines=tuple(
            Line(fate.kind, entry.key, entry.value, entry.line, fate.words, fate.remedy)
            for entry in original.entries
            for fate in [draft.fates[entry.key]]
        ),
        assumed=tuple(draft.assumed),
        suspicious=tuple(sorted(dict.fromkeys(draft.suspicious))),
        unsaid=tuple(draft.unsaid),
        files=draft.files,
    )


def _table(draft: Draft, tool: str) -> str:
    """Return the table of a configuration's keys."""
    if tool == "llama-factory" and draft.get("train_dataset") is not None:
        return "llama-factory-v1"
    return "ms-swift-megatron" if tool == "ms-swift" and swift_megatron.is_megatron(draft) else tool


def _recognised(original: Original) -> str:
    """The tool whose keys a configuration has: the one with the most marks."""
    if any(entry.key.endswith("_component_") for entry in original.entries):
        return "torchtune"
    names = set(original.values)
    marks = {name: len(names & {*data_file(name)["marks"].split()}) for name in TOOLS}
    marks["ms-swift"] += len(names & {*data_file("ms-swift-megatron")["marks"].split()})
    most = max(marks.values())
    best = [name for name, count in marks.items() if count == most]
    if most < 2:
        what = f"{original.path}: not a configuration of a known tool: it has {', '.join(list(original.values)[:5])}"
        raise NoConfigurationError(what, hint=f"pass the tool with --from: {', '.join(TOOLS)}")
    if len(best) > 1:
        what = f"{original.path}: has keys of {' and '.join(TOOLS[name] for name in best)}"
        raise RecipeError(what, hint=f"pass the tool with --from: {', '.join(best)}")
    return best[0]


def _settle(draft: Draft) -> None:
    """Mend what follows from the schema whatever the tool."""
    _settle_router_loss(draft)
    if any(target.startswith("method.") for target in draft.values):
        draft.values.setdefault("method.type", "sft")
    method = draft.values.get("method.type", "sft")
    if method in WITHOUT_DROPOUT and draft.values.get("adapter.dropout"):
        training.leave_out_dropout(draft, Fate("decided", f"TRL disables dropout for {method}, in both tools"))
    rates = METHODS[method].spec.learning_rate
    rate = rates.full if draft.values.get("adapter.type") == "full" else rates.lora
    if draft.values.get("train.learning_rate") == rate:
        del draft.values["train.learning_rate"]  # the default of the method and the adapter
    if draft.values.get("train.num_epochs") == 1:
        del draft.values["train.num_epochs"]  # the default, which has no value of its own
    if draft.values.get("data.streaming") and "train.max_steps" in draft.values:
        draft.values.pop("train.num_epochs", None)


_WITHOUT_ROUTER_LOSS = ("Axolotl", "LLaMA-Factory", "ms-swift")
"""Tools that balance the load of experts only where they are told to."""

_BALANCED = ("model_config.output_router_logits", "overrides_of_model_config.output_router_logits")


def _settle_router_loss(draft: Draft) -> None:
    """Let the recipe add no router loss where the tool adds none; tunekit does by default, as TRL."""
    facts = known_models().get(str(draft.values.get("model.path")))
    method = METHODS[draft.values.get("method.type", "sft")]
    if draft.tool not in _WITHOUT_ROUTER_LOSS or not method.spec.adds_router_loss:
        return
    if draft.tool == "LLaMA-Factory" and megatron.is_of_llama_factory(draft):
        return  # `megatron.assume_router_loss` has it
    divides_experts = "parallel.ep_size" in draft.values
    has_experts = divides_experts if facts is None else num_experts_of(text_config(facts.config))
    if has_experts and not any(draft.get(key) is True for key in _BALANCED):
        draft.assume({megatron.ROUTER_ARG: 0.0}, f"{draft.tool} adds no router loss by default")


def _checked(draft: Draft) -> Recipe:
    """The recipe that the draft makes, once what the schema refuses is taken out of it."""
    for target, (what, keys) in _NEEDED.items():
        if draft.values.get(target) in (None, "", []):
            fates = [fate.words for key, fate in draft.fates.items() if fate.kind == "unsupported" and key in keys]
            why = "".join(f": {words}" for words in fates[:1])
            raise RecipeError(f"{draft.original.path}: {what}{why}", hint="required in a recipe: add it to the file")
    while True:
        recipe, faults = check_text(to_yaml(_nested(draft.values)), find_functions=False)
        if recipe is not None:
            named = draft.values.get("output.name")
            # A recipe that is given no name has that of its file.
            return recipe.model_copy(update={"output": recipe.output.model_copy(update={"name": named})})
        before = dict(draft.values)
        for fault in faults:
            _take_out(draft, fault)
        if before == draft.values:
            raise RecipeError(f"{draft.original.path}: {faults[0]}", hint="change it in the file")


_NEEDED = {
    "model.path": ("no model", ["base_model", "model", "model_name_or_path", "model._component_"]),
    "data.train": (
        "no training rows",
        ["dataset", "datasets", "dataset_name", "train_dataset", "dataset._component_", "dataset.source"],
    ),
}
"""Required fields of a recipe: the problem without one, and the keys of other tools that set it."""


def _take_out(draft: Draft, fault: Fault) -> None:
    """Take what is at fault out of the draft, and say so of the keys that it came from."""
    near = [
        target for target in draft.values if fault.key == target or fault.key.startswith((f"{target}.", f"{target}["))
    ]
    near = near or [target for target in draft.values if target.startswith(f"{fault.key}.") and fault.key]
    for target in near:
        if target in ("model.path", "data.train"):
            raise RecipeError(f"{draft.original.path}: {fault.key}: {fault.message}", hint="change it in the file")
        value = draft.values.pop(target)
        draft.comments.pop(target, None)
        keys = draft.origins.pop(target, [])
        for key in keys:
            for recorded in draft.fates:
                if recorded == key or recorded.startswith((f"{key}.", f"{key}[")):
                    draft.fates[recorded] = Fate("unsupported", f"{target} {fault.message}")
        if not keys:
            draft.suspicious.append(Suspicion(0, f"{target}: {value} is unsupported: {fault.message}"))


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested sections."""
    tree: dict[str, Any] = {}
    for target, value in values.items():
        at = tree
        *above, name = target.split(".")
        for part in above:
            at = at.setdefault(part, {})
        at[name] = value
    return tree


def _text(draft: Draft, recipe: Recipe) -> str:
    """The recipe as short YAML, with comments behind what a reader must know."""
    lines = short_recipe(recipe).splitlines()
    _, places, _ = read_yaml("\n".join(lines), Place(0, 1, 1, "recipe"))
    for target, words in draft.comments.items():
        key = tuple(target.split("."))
        if key in places.keys:
            at = places.keys[key].line - 1
            lines[at] = f"{lines[at]}  # {words}"
    head = f"# from {draft.tool}: {Path(draft.original.path).name}"
    return "\n".join([head, *lines]) + "\n"
