"""The trainer of a run: the one that its recipe's method names, around the model and the rows that the folder names."""

import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tunekit.data.formats.row_formats import learner_of
from tunekit.data.packing.stream import stream
from tunekit.data.prepare import read_dataset
from tunekit.data.tokenization.alignment import read_rows
from tunekit.methods.arguments import Parts
from tunekit.models.adapters import Task
from tunekit.planner.decisions.isolation import VARLEN
from tunekit.planner.facts import continued_adapter
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.methods import is_rewarded
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import FullAdapter, ModelSection, QloraAdapter
from tunekit.runs.liveness import Place
from tunekit.runs.prepared_data import FILES, STREAM_SKIPPED
from tunekit.runs.run import Run

if TYPE_CHECKING:
    from datasets import IterableDataset
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

    from tunekit.models.fusion.fuse import Report


def load_policy(recipe: Recipe, plan: Plan, *, device: str | None) -> "PreTrainedModel":
    """The model that is trained, without the adapter that is trained; one that is not is merged into it."""
    from tunekit.models.adapters import merge_adapter
    from tunekit.models.attention import activate
    from tunekit.models.load import load_model, use_liger
    from tunekit.training.engines.tensor_parallel import distributed_config

    if plan.attn_implementation == VARLEN:
        activate(plan.flash_attention)
    model = load_model(
        plan.base,
        dtype="float32" if isinstance(recipe.adapter, FullAdapter) else plan.dtype,
        attn_implementation=plan.attn_implementation,
        device=device,
        distributed=distributed_config(plan),
        head_seed=recipe.train.seed if recipe.method.spec.classifies else None,
        quantization=recipe.adapter if isinstance(recipe.adapter, QloraAdapter) else None,
    )
    if plan.kernels == "liger":
        use_liger(model)
    origin = plan.origin
    if origin is None or origin.adapter is None or not origin.is_merged_for(recipe.adapter) or device == "meta":
        return model
    return merge_adapter(model, origin.adapter, Path(origin.folder))


def continued_folder(plan: Plan, device: str | None) -> Path | None:
    """Folder of the adapter that is trained further; None in processes that are given their weights by another one."""
    continued = continued_adapter(plan.origin, plan.recipe.adapter)
    return None if continued is None or device == "meta" else Path(continued.folder)


def load_adapted(recipe: Recipe, plan: Plan, *, device: str | None) -> "PreTrainedModel | Module":
    """The model with the adapter that is trained, as it is before the first step."""
    from tunekit.models.adapters import attach_adapter

    model = load_policy(recipe, plan, device=device)
    trained = continued_folder(plan, device)
    task: Task = "SEQ_CLS" if recipe.method.spec.classifies else "CAUSAL_LM"
    return attach_adapter(model, recipe.adapter, seed=recipe.train.seed, trained=trained, task=task)


def fuse_as_planned(model: "Module", plan: Plan) -> "Report | None":
    """Give a model the plan's kernels before it is divided or wrapped; None where they are not tunekit's."""
    if plan.kernels != "tunekit":
        return None
    import torch

    from tunekit.models.fusion.fuse import fuse

    return fuse(model, dtype=getattr(torch, plan.dtype))


def load_teacher(teacher: ModelSection, plan: Plan) -> "PreTrainedModel":
    """The model that another one learns from, whole on each device."""
    from tunekit.models.load import load_model

    model = load_model(teacher, dtype=plan.dtype, attn_implementation=plan.attn_implementation, device=plan.device.kind)
    fuse_as_planned(model, plan)
    return model


def load_reference(recipe: Recipe, plan: Plan) -> "PreTrainedModel":
    """The model as it was before training, whole on each device."""
    model = load_policy(recipe, plan, device=plan.device.kind)
    fuse_as_planned(model, plan)
    return model


def loads_bare_reference(plan: Plan) -> bool:
    """Return whether TRL loads the second model itself, without the adapter that is merged into the first."""
    merged = plan.origin is not None and plan.origin.is_merged_for(plan.recipe.adapter)
    return merged and plan.reference == "second model" and is_rewarded(plan.recipe.method)


def build_trainer(
    run: Run,
    recipe: Recipe,
    plan: Plan,
    schedule: Schedule,
    *,
    model: "Module",
    tokenizer: "PreTrainedTokenizerBase",
    callbacks: "list[TrainerCallback]",
    place: Place,
) -> "Trainer":
    """The trainer of the recipe's method, around a model with its adapter."""
    from tunekit.training.engines.engine import trainer_args

    folder, method = run.path / "data", recipe.method
    read = read_dataset if method.spec.trains_on == "tokens" else read_rows
    streams = recipe.data.streaming
    parts = Parts(
        train=recipe.train,
        data=recipe.data,
        plan=plan,
        schedule=schedule,
        model=model,
        tokenizer=tokenizer,
        train_dataset=_stream(folder, recipe, tokenizer, place) if streams else read(folder / FILES["train"]),
        eval_dataset=read(folder / FILES["eval"]) if plan.data.num_eval else None,
        checkpoints=run.path / "checkpoints",
        callbacks=callbacks,
        engine=trainer_args(plan),
        load_reference=partial(load_reference, recipe, plan),
        load_teacher=partial(load_teacher, plan=plan),
    )
    trainer: Trainer = import_module(f"tunekit.methods.{method.type}").build(method, parts)
    return trainer


def _stream(folder: Path, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", place: Place) -> "IterableDataset":
    skipped = folder / STREAM_SKIPPED if place.is_main else Path(os.devnull)
    return stream(recipe.data, tokenizer, learner_of(recipe.method.type), seed=recipe.train.seed, skipped=skipped)
