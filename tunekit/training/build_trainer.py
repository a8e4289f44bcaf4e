"""Build the trainer of a run, whose overrides are checked against the installed libraries.

The trainer of a run: the one that its recipe's method names, around the model and the rows that the folder names.

Check the names of other libraries that a run overrides, before anything is loaded.

A run replaces methods of a trainer on the trainer that it holds, some of them private. Where a version renames one, the
assignment would go unnoticed and the library's own method would run: rows in another order, a checkpoint that is not
restored. So each name has to be there, take the arguments that it took, and be used by the library's own code.
"""

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.row_formats import learner_of
from tunekit.data.packing.stream import stream
from tunekit.data.prepare import read_dataset
from tunekit.data.tokenization.alignment import read_rows
from tunekit.errors import DependencyError
from tunekit.estimates.facts import continued_adapter
from tunekit.files import read_table
from tunekit.methods.arguments import Parts
from tunekit.models.load import attach_adapter, load_model, load_processor, merge_adapter, task_of, use_liger
from tunekit.planner.plan import VARLEN, Plan, Schedule
from tunekit.probe.origin import in_folder
from tunekit.recipe.methods import METHODS, is_rewarded
from tunekit.recipe.methods.on_policy import OnPolicyMethod, RewardedMethod
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.prepared_data import FILES, STREAM_SKIPPED
from tunekit.runs.run import Run
from tunekit.runs.small_files import Place

if TYPE_CHECKING:
    from datasets import IterableDataset
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

    from tunekit.methods.run_trainer import RunTrainer
    from tunekit.models.fusion.fuse import Report
    from tunekit.models.initial import Sources


def load_policy(plan: Plan, *, device: str | None) -> "PreTrainedModel":
    """The model that is trained, without the adapter that is trained; one that is not is merged into it.

    New layers are there already: they change nothing that a reference would compute.
    """
    from tunekit.models.attention import activate
    from tunekit.models.expansion import expand
    from tunekit.training.engines.engine import distributed_config

    recipe = plan.recipe
    if plan.attn_implementation == VARLEN:
        activate(plan.flash_attention)
    model = load_model(
        plan.base,
        dtype=plan.trained_dtype if isinstance(recipe.adapter, FullAdapter) else plan.dtype,
        attn_implementation=plan.attn_implementation,
        device=device,
        distributed=distributed_config(plan),
        score_head=recipe.method.score_head,
        head_seed=recipe.train.seed,
        quantization=recipe.adapter if isinstance(recipe.adapter, QloraAdapter) else None,
    )
    if plan.kernels == "liger":
        use_liger(model)
    origin = plan.origin
    if origin is not None and origin.adapter is not None and origin.is_merged_for(recipe.adapter) and device != "meta":
        model = merge_adapter(model, origin.adapter, Path(origin.folder))
    new_layers = recipe.adapter.new_layers if isinstance(recipe.adapter, FullAdapter) else None
    return model if new_layers is None else expand(model, new_layers)


def continued_folder(plan: Plan, device: str | None) -> Path | None:
    """Folder of the adapter that is trained further; None in processes that are given their weights by another one."""
    continued = continued_adapter(plan.origin, plan.recipe.adapter)
    return None if continued is None or device == "meta" else Path(continued.folder)


def load_adapted(
    plan: Plan, *, device: str | None, run: Run | None = None, checkpoint: Path | None = None
) -> "PreTrainedModel | Module":
    """The model with the adapter that is trained, as it is before the first step.

    Args:
        plan: The plan.
        device: Where it goes.
        run: The run, whose rows some adapters begin with.
        checkpoint: Folder of weights that the adapter is to get next.
    """
    recipe, model, trained = plan.recipe, load_policy(plan, device=device), continued_folder(plan, device)
    if recipe.train.qat is not None:
        from tunekit.models.fake_quantization import to_fake_quantized

        to_fake_quantized(model, recipe.train.qat)
    task = task_of(recipe.method.score_head)
    seed, tokens, adapter, sources = recipe.train.seed, plan.new_tokens, recipe.adapter, None
    if isinstance(adapter, LoraAdapter) and adapter.needs_sources:
        if checkpoint is not None and adapter.distributes_ranks:
            adapter = in_folder(adapter, checkpoint)
        sources = None if checkpoint is not None else _sources_of(plan, adapter, run)
    return attach_adapter(model, adapter, seed=seed, trained=trained, task=task, new_tokens=tokens, sources=sources)


def _sources_of(plan: Plan, adapter: LoraAdapter, run: Run | None) -> "Sources":
    """Return what initial matrices are computed from."""
    from tunekit.models.initial import Document, Sources, draw

    def documents() -> list[Document]:
        assert run is not None, "initial matrices can be computed only from the rows of a run"
        rows = read_dataset(run.path / "data" / FILES["train"])
        return draw(rows, adapter.num_init_rows, plan.recipe.train.seed)

    def weights() -> "PreTrainedModel":
        return load_model(plan.base, dtype=plan.dtype, device="cpu", score_head=plan.recipe.method.score_head)

    return Sources(documents, weights)


def fuse_as_planned(model: "Module", plan: Plan) -> "Report | None":
    """Give a model the plan's kernels before it is divided or wrapped; None where they are not tunekit's."""
    if plan.kernels != "tunekit":
        return None
    import torch

    from tunekit.models.fusion.fuse import fuse

    return fuse(model, dtype=getattr(torch, plan.dtype))


def load_frozen(plan: Plan, teacher: ModelSection | None = None) -> "PreTrainedModel":
    """A teacher, or else the reference: the model as it was before training. It is whole on each device."""
    device, attention = plan.device.kind, plan.attn_implementation
    if teacher is None:
        model = load_policy(plan, device=device)
    else:
        model = load_model(teacher, dtype=plan.dtype, attn_implementation=attention, device=device)
    fuse_as_planned(model, plan)
    return model


def loads_bare_reference(plan: Plan) -> bool:
    """Return whether TRL loads the second model itself, without the adapter that is merged into the first."""
    merged = plan.origin is not None and plan.origin.is_merged_for(plan.recipe.adapter)
    method = plan.recipe.method
    return merged and plan.reference == "second model" and is_rewarded(method) and method.trl_loads_reference


def build_trainer(
    run: Run,
    plan: Plan,
    schedule: Schedule,
    *,
    model: "Module",
    tokenizer: "PreTrainedTokenizerBase",
    callbacks: "list[TrainerCallback]",
    place: Place,
) -> "RunTrainer":
    """The trainer of the recipe's method, around a model with its adapter."""
    from tunekit.training.engines.engine import trainer_args
    from tunekit.training.own_callbacks import OwnCallback

    recipe, folder = plan.recipe, run.path / "data"
    method, train_file = recipe.method, folder / FILES["train"]
    read = read_dataset if method.spec.trains_on == "tokens" else read_rows
    parts = Parts(
        train=recipe.train,
        data=recipe.data,
        plan=plan,
        schedule=schedule,
        model=model,
        tokenizer=tokenizer,
        train_dataset=_stream(folder, recipe, tokenizer, place) if recipe.data.streaming else read(train_file),
        eval_dataset=read(folder / FILES["eval"]) if plan.data.num_eval else None,
        checkpoints=run.path / "checkpoints",
        callbacks=callbacks,
        engine=trainer_args(plan),
        load_reference=partial(load_frozen, plan),
        load_teacher=partial(load_frozen, plan),
        processor=load_processor(recipe.model, tokenizer, plan.data.media) if plan.data.media else None,
    )
    trainer: RunTrainer = import_module(f"tunekit.methods.{method.type}").build(method, parts)
    for path in recipe.train.callbacks or ():
        trainer.add_callback(OwnCallback(path))
    return trainer


def _stream(folder: Path, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", place: Place) -> "IterableDataset":
    skipped = folder / STREAM_SKIPPED if place.is_main else Path(os.devnull)
    return stream(recipe.data, tokenizer, learner_of(recipe.method.type), seed=recipe.train.seed, skipped=skipped)


def upstream() -> dict[str, Any]:
    """Return the names of other libraries that a run overrides: `upstream.yaml`, beside this file."""
    names: dict[str, Any] = read_table(Path(__file__).with_name("upstream.yaml"))
    return names


@dataclass(frozen=True)
class Renamed:
    """A name that is not what a run overrides.

    Attributes:
        owner: The class, such as `transformers.Trainer`.
        name: The name.
        problem: What is wrong with it.
    """

    owner: str
    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.owner}.{self.name} {self.problem}"


def check_upstream(method: str) -> None:
    """Check the names that a run of a method overrides against the installed libraries.

    Args:
        method: The method's type.

    Raises:
        DependencyError: A name is missing, is used by nobody, or takes other arguments.
    """
    from accelerate import Accelerator
    from transformers import Trainer

    problems = [
        *trainer_problems(Trainer, trainer_class(method), method),
        *accelerator_problems(Trainer, Accelerator),
        *field_problems(upstream()["fields"]),
    ]
    if problems:
        libraries = ("transformers", "trl", "accelerate")
        installed = ", ".join(f"{name} {version(name)}" for name in libraries)
        problem = f"{installed} lack names that tunekit overrides: " + "; ".join(map(str, problems))
        raise DependencyError(problem, hint="install versions that this tunekit was tested with, or a newer tunekit")


def method_names(method: str) -> tuple[str, ...]:
    """Return the names of TRL's trainer that a run of a method needs, by `method.type`."""
    section = METHODS[method]
    kinds = ["storing" if section.spec.stores_metrics else "learning"]
    if issubclass(section, OnPolicyMethod):
        kinds = ["generating", "rewarded"] if issubclass(section, RewardedMethod) else ["generating"]
    return (*section.spec.upstream_names, *(name for kind in kinds for name in upstream()[kind]))


def trainer_class(method: str) -> type:
    """Return TRL's trainer of a method."""
    package, file, config = METHODS[method].spec.config
    module = import_module(f"{package}.{file.removesuffix('_config.py').replace('/', '.')}_trainer")
    trainer = vars(module)[config.removesuffix("Config") + "Trainer"]
    assert isinstance(trainer, type)
    return trainer


def trainer_problems(base: type, trainer: type, method: str) -> Iterator[Renamed]:
    """Yield the names of a trainer that are not as a run overrides them.

    Args:
        base: Transformers' `Trainer`.
        trainer: TRL's class of the method.
        method: The method's type.
    """
    used_by_base, used = names_used(base), names_used(trainer)
    for name, parameters in upstream()["trainer"].items():
        owner = f"transformers.{base.__name__}"
        if name not in used_by_base:
            yield Renamed(owner, name, "is not called")
        elif not callable(inspect.getattr_static(base, name, None)):
            yield Renamed(owner, name, "does not exist")
        else:
            took = [parameter for parameter in inspect.signature(getattr(base, name)).parameters if parameter != "self"]
            if took != parameters:
                yield Renamed(owner, name, f"takes ({', '.join(took)}), not ({', '.join(parameters)})")
    for name in (*upstream()["states"], *method_names(method)):
        if name not in used:
            yield Renamed(f"trl.{trainer.__name__}", name, "is not used")


def accelerator_problems(trainer: type, accelerator: type) -> Iterator[Renamed]:
    """Yield the names of Accelerate's class that transformers' does not call, or that are not there."""
    used = names_used(trainer)
    for name in upstream()["accelerator"]:
        if name not in used or inspect.getattr_static(accelerator, name, None) is None:
            yield Renamed(f"accelerate.{accelerator.__name__}", name, "is not called by transformers' Trainer")


def field_problems(wanted: Mapping[str, str]) -> Iterator[Renamed]:
    """Yield the fields, by dotted path of their dataclass, that are not there."""
    for path, name in wanted.items():
        module, _, owner = path.rpartition(".")
        if name not in {field.name for field in fields(vars(import_module(module))[owner])}:
            yield Renamed(path, name, "is not a field")


def names_used(cls: type) -> set[str]:
    """Return the names of attributes, and of globals, in the code of a class and of those that it builds on.

    A wrapper counts with what it wraps: somebody else may have put it there.
    """
    values = [value for base in cls.__mro__ for value in vars(base).values()]
    return {name for function in _functions(values) for name in _names(function.__code__)}


def _functions(values: Iterable[Any]) -> list[FunctionType]:
    """Return the functions among values, those of properties, and those that wrappers hold."""
    waiting, functions = list(values), dict[int, FunctionType]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, property):
            waiting.append(value.fget)
        elif isinstance(value, staticmethod | classmethod):
            waiting.append(value.__func__)
        elif isinstance(value, FunctionType) and id(value) not in functions:
            functions[id(value)] = value
            waiting.extend(_held(value))
    return list(functions.values())


def _held(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        # A cell is empty until the name that it holds is assigned.
        with suppress(ValueError):
            yield cell.cell_contents


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
