"""What the source of the installed TRL says about its config, read without importing it."""

import ast
import dataclasses
import importlib
import types
import typing
from pathlib import Path

import pytest

from tunekit.errors import DependencyError, RecipeError
from tunekit.recipe import trainer_args
from tunekit.recipe.load import load_recipe
from tunekit.recipe.methods import METHODS
from tunekit.recipe.methods.on_policy import GenerationSection
from tunekit.recipe.schema import Recipe, holders_along
from tunekit.recipe.trainer_args import (
    check_trainer_args,
    config_fields,
    owned_args,
    owner_hint,
)

BUILDERS = Path(__file__).parents[2] / "tunekit" / "methods"
OWNED, OWNED_PREFIXES = owned_args()
SOURCE = {"model": "pico", "data": {"train": "x.jsonl"}}


def faults(**args: object) -> dict[str, str]:
    return {name: what for name, what, _, _ in check_trainer_args("sft", args)}


def real_config(method: str) -> type:
    package, file, name = trainer_args.CONFIGS[method]
    module = importlib.import_module(f"{package}.{file.removesuffix('.py').replace('/', '.')}")
    found = vars(module)[name]
    assert isinstance(found, type)
    return found


def real_defaults(method: str) -> dict[str, object]:
    fields = dataclasses.fields(real_config(method))
    made = {field.name: field.default_factory for field in fields}
    return {
        field.name: field.default if field.default is not dataclasses.MISSING else made[field.name]()
        for field in fields
    }


@pytest.mark.parametrize("method", trainer_args.CONFIGS)
def test_the_fields_read_off_the_source_are_those_of_the_real_config(method: str) -> None:
    real = {field.name for field in dataclasses.fields(real_config(method)) if field.init}
    assert set(config_fields(method)) == real


@pytest.mark.parametrize("method", [name for name in trainer_args.CONFIGS if name != "sft"])
def test_the_defaults_of_a_method_are_those_of_trl(method: str) -> None:
    needed = {"teacher": "pico"} if method in ("distillation", "gkd", "gold") else {}
    needed |= {"num_labels": 2} if method == "classification" else {}
    section = load_recipe({**SOURCE, "method": {"type": method, **needed}}).method
    real = real_defaults(method)
    # Left out, it is TRL's 1, but for the losses that have no likelihood.
    deliberate = {"cpo_alpha"} if method == "cpo" else set()
    # TRL's default is no limit.
    deliberate |= {"max_tool_calling_iterations"} if method == "grpo" else set()
    if method == "online_dpo":  # Its trainer is GRPO's; TRL's own has no groups, but pairs.
        from trl.experimental.online_dpo import OnlineDPOConfig

        own = {field.name: field for field in dataclasses.fields(OnlineDPOConfig)}
        assert (section.num_generations, section.loss_type) == (2, own["loss_type"].default)
        assert [section.beta] == own["beta"].default_factory()
        deliberate |= {"beta", "loss_type", "num_generations"}
    if method == "sdft":  # Its trainer is that of distillation. The paper has the reverse divergence, TRL half of each.
        from trl.experimental.sdft import SDFTConfig

        own = {field.name: field.default for field in dataclasses.fields(SDFTConfig)}
        deliberate |= {name for name, _ in section if name in own and name != "type"} - {"trainer_args"}
        assert {name: dict(section)[name] for name in deliberate} == {name: own[name] for name in deliberate}
    ours = {name: value for name, value in section if name in real and name not in deliberate}
    assert ours == {name: real[name] for name in ours}
    others = {"type", "trainer_args", "rewards", "generation", "teacher"}
    # Rows are those of SFTConfig, and what is learned from them is the teacher's.
    others |= (
        {"lmbda", "beta", "temperature", "kd_ratio", "max_completion_length"} if method in ("gkd", "gold") else set()
    )
    others |= {"uld_use_hybrid_loss", "uld_hybrid_matched_weight", "uld_hybrid_unmatched_weight"}
    # TRL had them in its PRMConfig, with these defaults, as long as it had a trainer for them.
    others |= {"step_separator", "train_on_last_step_only"} if method == "prm" else set()
    others |= {"labels", "num_labels", "problem_type"} if method == "classification" else set()
    others |= {"tools", "environment", "rollout", "tool_timeout_seconds", "max_tool_result_chars", "max_resample_times"}
    others |= {"replay_buffer_size", "max_staleness"}
    # TRL has no such method.
    features = {"feature_layers", "embed_method", "use_whitening", "alignment_coef", "diversity_coef"}
    others |= features if method == "ebft" else set()
    assert set(dict(section)) - set(ours) - deliberate <= others


@pytest.mark.parametrize("method", ["grpo", "rloo", "distillation"])
def test_the_defaults_of_generation_are_those_of_trl(method: str) -> None:
    real = real_defaults(method)
    ours = dict(GenerationSection())
    differing = {name for name, value in ours.items() if name not in real or real[name] != value}
    # Stop texts are among TRL's generation_kwargs; whether vLLM is there, and what is left to it, the plan sees. In TRL
    # a server has its sizes from whoever starts it.
    sizes = {"vllm_tensor_parallel_size", "vllm_data_parallel_size"}
    assert differing == {"stop", "use_vllm", "vllm_gpu_memory_utilization"} | sizes


@pytest.mark.parametrize("method", trainer_args.CONFIGS)
def test_the_types_read_off_the_source_are_those_of_the_real_config(method: str) -> None:
    builtins = {int, float, str, bool, dict, list, type(None)}
    real = typing.get_type_hints(real_config(method))
    checked = 0
    for name, field in config_fields(method).items():
        hint = real[name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = {typing.get_origin(kind) or kind for kind in (typing.get_args(hint) if union else [hint])}
        if field.types is not None:
            assert field.types == {"None" if kind is type(None) else kind.__name__ for kind in kinds}, name
            checked += 1
        else:
            assert not kinds <= builtins, name
    assert checked > 60


def test_what_is_free_and_right_passes_to_trl_as_it_is() -> None:
    args = {
        "neftune_noise_alpha": 5,
        "adam_beta1": 0.8,
        "torch_compile": True,
        "label_smoothing_factor": 0.1,
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "label_names": None,
        "optim_args": "alpha=0.9",
    }
    assert load_recipe({**SOURCE, "method": {"type": "sft", "trainer_args": args}}).method.trainer_args == args


def test_a_whole_number_is_a_number_but_true_is_not() -> None:
    assert faults(adam_beta1=1, torch_empty_cache_steps=2) == {}
    assert faults(adam_beta1=True) == {"adam_beta1": "must be a number, got true"}
    wrong = "must be an integer or null, got false"
    assert faults(torch_empty_cache_steps=False) == {"torch_empty_cache_steps": wrong}


def test_what_takes_a_type_of_transformers_is_left_to_trl_to_judge() -> None:
    field = config_fields("sft")["parallelism_config"]
    assert field.types is None
    assert trainer_args._value_fault(field, object()) is None


@pytest.mark.parametrize("name", sorted(OWNED))
def test_what_tunekit_sets_is_refused_with_what_to_use(name: str) -> None:
    ((refused, what, hint, in_value),) = check_trainer_args("sft", {name: 1})
    assert (refused, what, hint, in_value) == (name, "set by tunekit", OWNED[name], False)


@pytest.mark.parametrize("name", ["hub_model_id", "hub_token", "ddp_backend", "ddp_find_unused_parameters"])
def test_families_of_arguments_are_refused_whole(name: str) -> None:
    assert faults(**{name: None}) == {name: "set by tunekit"}


def keys_returned(file: str, name: str) -> set[str]:
    """Return the keys of the dict that a function in a file of the builders returns."""
    tree = ast.parse((BUILDERS / file).read_text())
    (function,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    (returned,) = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    assert isinstance(returned, ast.Dict)
    return {str(key.value) for key in returned.keys if isinstance(key, ast.Constant)}


def test_everything_that_a_method_sets_is_refused_from_a_recipe() -> None:
    """Else the argument would be given twice, and the run would end in a traceback."""
    to_all = keys_returned("arguments.py", "arguments")
    to_groups = keys_returned("generation.py", "arguments_in_groups")
    assert len(to_all) > 20
    assert len(to_groups) == 7
    for method, (_, _, config) in trainer_args.CONFIGS.items():
        file = BUILDERS / f"{method}.py"
        tree = ast.parse((file if file.is_file() else BUILDERS / method / "trainer.py").read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if names & {"token_trainer", "taught_trainer"}:
            tree = ast.parse((BUILDERS / "sft.py").read_text())
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and config in map(ast.unparse, (node.func, *node.args))
        ]
        given = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg is not None}
        assert calls, method
        if "rewarded_trainer" in names:
            given |= to_groups | set(load_recipe({**SOURCE, "method": method}).method.own_arguments)
        assert {name for name in to_all | given if owner_hint(method, str(name)) is None} == set()


def test_every_owned_name_is_one_that_trl_knows_now_or_knew() -> None:
    gone = {"warmup_ratio"}
    assert set(OWNED) - set(config_fields("sft")) <= gone
    for method in METHODS:
        own = {name for name, hint in owned_args(method)[0].items() if OWNED.get(name) != hint}
        assert own <= set(config_fields(method))
    known = set().union(*(config_fields(method) for method in METHODS))
    for prefix in OWNED_PREFIXES:
        assert any(name.startswith(prefix) for name in known)


def test_every_recipe_key_that_a_hint_names_exists() -> None:
    by_method = [hint for method in METHODS for hint in owned_args(method)[0].values()]
    hints = [*OWNED.values(), *by_method, *OWNED_PREFIXES.values()]
    for word in " ".join(hints).replace(":", " ").replace(",", " ").split():
        key = tuple(word.split("."))
        if len(key) > 1 and key[0] in Recipe.model_fields:
            assert len(holders_along(key)) == len(key), word


def test_a_suggestion_is_never_an_argument_that_would_be_refused() -> None:
    for typo in ("learning_rte", "ouput_dir", "seeed", "per_device_train_batch"):
        ((_, _, hint, _),) = check_trainer_args("sft", {typo: 1})
        suggested = (hint or "").split("'")
        assert len(suggested) < 3 or owner_hint("sft", suggested[1]) is None


def test_a_missing_trl_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trainer_args.CONFIGS, "sft", ("no_such_package", "sft_config.py", "SFTConfig"))
    config_fields.cache_clear()
    try:
        with pytest.raises(RecipeError) as error:
            load_recipe({**SOURCE, "method": {"type": "sft", "trainer_args": {"adam_beta1": 0.9}}})
    finally:
        config_fields.cache_clear()
    expected = "recipe: method.trainer_args: no_such_package is not installed; pip install no_such_package"
    assert str(error.value) == expected


def test_a_source_laid_out_otherwise_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match=r"does not define SFTConfig; install the version of TRL"):
        trainer_args._class_fields(tmp_path / "sft_config.py", "SFTConfig")


def test_fields_follow_the_rules_of_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from typing import Any, ClassVar, Optional\n"
        "class Base:\n"
        "    rate: float = 1.0\n"
        "    shared: ClassVar[int] = 3\n"
        "    made: int = field(init=False, default=0)\n"
        "    plain = 5\n"
        "    def method(self) -> None: ...\n"
    )
    (tmp_path / "config.py").write_text(
        "from .base import Base\n"
        "class Middle(Base):\n"
        "    size: int | None = None\n"
        "class Config(Middle):\n"
        "    rate: int = 1\n"
        "    mode: Optional[str] = field(default=None, metadata={'choices': ['a', 'b']})\n"
        "    other: Any = None\n"
    )
    fields = trainer_args._class_fields(tmp_path / "config.py", "Config")
    assert {name: field.types for name, field in fields.items()} == {
        "rate": {"int"},
        "size": {"int", "None"},
        "mode": {"str", "None"},
        "other": None,
    }
    assert fields["mode"].choices == ("a", "b")


@pytest.mark.parametrize("name", ["eos_token", "pad_token"])
def test_words_of_a_tokenizer_are_no_secrets_and_refused_for_what_they_are(name: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe({**SOURCE, "method": {"type": "sft", "trainer_args": {name: "<|im_end|>"}}})
    assert "set by the tokenizer of the model" in str(refused.value)
    assert "secret" not in str(refused.value)
