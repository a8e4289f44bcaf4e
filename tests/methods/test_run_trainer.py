"""The one trainer of ours: it changes nothing by itself, and nobody else changes a trainer."""

import ast
import inspect
from pathlib import Path
from typing import get_args

import pytest
from transformers import Trainer

import tunekit
from tunekit.methods.run_trainer import RunTrainer, Wrapped, run_trainer
from tunekit.recipe.methods import METHODS
from tunekit.recipe.methods.on_policy import OnPolicyMethod
from tunekit.training.build_trainer import method_names, trainer_class, upstream

PACKAGE = Path(tunekit.__file__).parent

PATCHED = {
    ("inference/episode_trial.py", "generation_config.do_sample"): "TRL samples always, and an evaluation is greedy",
    ("methods/generation.py", "model.generate"): "TRL gives it no tokenizer, by which stop texts are found",
    ("methods/run_trainer.py", "accelerator.backward"): "Accelerate's backward pass is no method of the trainer",
    ("methods/sft.py", "accelerator.dataloader_config.dispatch_batches"): "TRL's config has no such field",
    ("training/non_finite.py", "model_wrapped.optimizer.overflow"): "by it DeepSpeed leaves a step out",
    ("training/early_stopping.py", "control.should_training_stop"): "a callback can set it only after a step was taken",
    ("training/engines/fsdp2.py", "accelerator.state.fsdp_plugin.mixed_precision_policy"): "no argument sets it",
    ("training/engines/fsdp2.py", "accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap"): "no argument sets it",
}
"""Attributes of other libraries' objects, reached through a trainer, that are assigned, and why."""


class Base:
    """What the mixin lies over here."""

    def evaluate(self, name):
        return [name]

    def training_step(self, number):
        return [number]


def test_without_anything_around_it_a_method_is_that_of_the_class():
    assert run_trainer(Base)().evaluate("plain") == ["plain"]


def test_the_last_that_stands_around_a_method_is_the_outermost():
    trainer = run_trainer(Base)()
    trainer.wrap("evaluate", lambda evaluate, name: ["first", *evaluate(name)])
    trainer.wrap("evaluate", lambda evaluate, name: ["last", *evaluate(name)])
    assert trainer.evaluate("plain") == ["last", "first", "plain"]
    assert trainer.training_step(1) == [1]
    assert run_trainer(Base)().evaluate("another") == ["another"]


def test_a_method_that_there_is_not_cannot_be_wrapped():
    with pytest.raises(AssertionError, match="evaluates"):
        run_trainer(Base)().wrap("evaluates", lambda evaluate: evaluate())


def test_every_word_for_a_method_is_used_by_an_override():
    source = inspect.getsource(RunTrainer)
    assert all(f'self._run("{name}"' in source or f'self._run, "{name}"' in source for name in get_args(Wrapped))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_overridden_is_checked_before_a_run(method):
    trainer = trainer_class(method)
    overridden = {name for name in vars(RunTrainer) if not name.startswith("__") and hasattr(trainer, name)}
    assert overridden >= {"evaluate", "_save_checkpoint", "_get_train_sampler"}
    if not issubclass(METHODS[method], OnPolicyMethod):
        overridden.discard("_compute_loss")  # Nothing stands around it but where answers are generated.
    assert overridden <= {*upstream()["trainer"], *upstream()["states"], *method_names(method)}
    assert issubclass(run_trainer(trainer), Trainer)


def test_nobody_assigns_to_a_trainer_but_by_the_words_of_ours():
    words = {name for name, value in vars(RunTrainer).items() if isinstance(value, property)}
    assigned = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                chain = ast.unparse(target) if isinstance(target, ast.Attribute) else ""
                chain = chain.removeprefix("self.")
                is_ours = file.name == "run_trainer.py" and chain.startswith("accelerator.")
                if chain.startswith("trainer.") or is_ours:
                    assigned.add((file.relative_to(PACKAGE).as_posix(), chain.removeprefix("trainer.")))
    others = {(file, name) for file, name in assigned if name not in words}
    settings = {(file, name) for file, name in others if name.startswith("args.") or name in SETTINGS}
    assert others - settings == set(PATCHED)


SETTINGS = {
    "chat_template_kwargs",
    "control",
    "data_collator",
    "learns_from_sums",
    "lost_reasons",
    "optimizer_cls_and_kwargs",
    "rank_allocation",
    "prompt_order",
    "replayed_groups",
    "rollouts_ahead",
    "stored_buffers",
    "tool_hosts",
    "train_dataset",
}
"""Public attributes of a trainer that hold data, and are read from it at each use."""
