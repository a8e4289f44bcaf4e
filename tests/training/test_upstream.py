"""A name of another library that a run overrides is renamed: the run is refused before anything is loaded."""

from types import CodeType, FunctionType

import pytest
from accelerate import Accelerator
from transformers import Trainer

import tunekit
from tests.rows import save_rows
from tests.tiny import save_tiny_model
from tunekit.errors import DependencyError
from tunekit.recipe.methods import METHODS
from tunekit.training import build_trainer
from tunekit.training.build_trainer import (
    accelerator_problems,
    check_upstream,
    field_problems,
    method_names,
    names_used,
    trainer_class,
    trainer_problems,
    upstream,
)


def renamed(cls, name):
    """Return the class with everything that it inherits, in which a name is another one wherever it stands."""

    def again(code):
        constants = tuple(again(one) if isinstance(one, CodeType) else one for one in code.co_consts)
        return code.replace(
            co_names=tuple("renamed" if one == name else one for one in code.co_names), co_consts=constants
        )

    def copy(value):
        if not isinstance(value, FunctionType):
            return property(copy(value.fget)) if isinstance(value, property) else value
        while "__wrapped__" in vars(value):
            value = value.__wrapped__
        code = again(value.__code__)
        return FunctionType(code, value.__globals__, value.__name__, value.__defaults__, value.__closure__)

    parts = {}
    for base in reversed(cls.__mro__[:-1]):
        parts |= vars(base)
    skipped = {"__dict__", "__weakref__", "__slots__"}
    return type(
        cls.__name__,
        (),
        {"renamed" if one == name else one: copy(value) for one, value in parts.items() if one not in skipped},
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_installed_versions_have_every_name(method):
    check_upstream(method)


@pytest.mark.parametrize("name", upstream()["trainer"])
def test_a_renamed_method_of_transformers_trainer_is_named(name):
    (problem,) = trainer_problems(renamed(Trainer, name), trainer_class("sft"), "sft")
    assert (problem.owner, problem.name, problem.problem) == ("transformers.Trainer", name, "is not called")


def test_a_method_that_nobody_defines_or_that_takes_other_arguments_is_named():
    class Without(Trainer):
        _save = None

        def _get_output_dir(self, trial, more): ...

    problems = {problem.name: problem.problem for problem in trainer_problems(Without, trainer_class("sft"), "sft")}
    assert problems["_save"] == "does not exist"
    assert problems["_get_output_dir"] == "takes (trial, more), not (trial)"


@pytest.mark.parametrize(("method", "name"), [(method, name) for method in METHODS for name in method_names(method)])
def test_a_renamed_attribute_of_trls_trainer_is_named(method, name):
    problems = [*trainer_problems(Trainer, renamed(trainer_class(method), name), method)]
    assert [problem.name for problem in problems] == [name]


@pytest.mark.parametrize("name", upstream()["states"])
def test_a_renamed_state_is_named(name):
    assert [problem.name for problem in trainer_problems(Trainer, renamed(trainer_class("sft"), name), "sft")] == [name]


@pytest.mark.parametrize("name", upstream()["accelerator"])
def test_a_renamed_method_of_accelerate_is_named(name):
    assert [problem.name for problem in accelerator_problems(Trainer, renamed(Accelerator, name))] == [name]
    assert [problem.name for problem in accelerator_problems(renamed(Trainer, name), Accelerator)] == [name]


def test_a_renamed_field_of_accelerates_settings_is_named():
    assert not [*field_problems(upstream()["fields"])]
    (problem,) = field_problems({"accelerate.utils.DataLoaderConfiguration": "dispatch"})
    assert str(problem) == "accelerate.utils.DataLoaderConfiguration.dispatch is not a field"


def test_names_in_nested_functions_and_properties_count():
    class Some:
        @property
        def one(self):
            return [self.two for _ in range(3)]

    assert "two" in names_used(Some)


def test_a_wrapper_that_somebody_put_there_counts_with_what_it_wraps():
    def wrapped(method):
        def wrapper(self):
            return method(self)

        return wrapper

    class Some:
        def one(self):
            return self.two

    Some.one = wrapped(Some.one)
    assert "two" in names_used(Some)


def test_a_run_with_a_renamed_sampler_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    save_tiny_model(tmp_path / "model")
    recipe = {
        "model": str(tmp_path / "model"),
        "data": {"train": str(save_rows(tmp_path / "rows.jsonl", "sft", 4)), "shuffle": False, "max_length": 64},
        "train": {"max_steps": 1, "global_batch_size": 2},
        "output": {"dir": str(tmp_path / "run")},
    }
    other = renamed(trainer_class("sft"), "_total_train_tokens")
    monkeypatch.setattr(build_trainer, "trainer_class", lambda method: other)
    with pytest.raises(DependencyError, match=r"trl\.SFTTrainer\._total_train_tokens is not used"):
        tunekit.train(recipe)
