"""Recipes that NeMo Automodel is not given: each field that is not known to be honoured is refused by name."""

from typing import get_args

import pytest

from tests.estimates.shapes import LLAMA_8B
from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.decisions.automodel import HONOURED, INSTALL, VALUES
from tunekit.planner.resolve import resolve
from tunekit.probe.model import known_model
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.section import Section

A3B = known_model("Qwen/Qwen3-30B-A3B")


def planned(machine="8xh100", facts=LLAMA_8B, hardware=None, **sections):
    parallel = {"engine": "automodel", **sections.pop("parallel", {})}
    request = recipe(**{"adapter": "full", "parallel": parallel, **sections})
    return resolve(request, hardware or find_machine(machine).hardware(), facts, ROWS)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"adapter": "lora"}, r"adapter.type lora is untested; set adapter.type=full"),
        ({"adapter": {"type": "full", "unfrozen_parameters": ["lm_head"]}}, r"adapter.unfrozen_parameters: untested"),
        ({"data": {"packing": True}}, r"data.packing: untested with parallel.engine=automodel; unset it"),
        ({"data": {"padding_free": True}}, r"data.padding_free: untested"),
        ({"data": {"shuffle": False, "curriculum": "length"}}, r"data.curriculum: untested"),
        ({"model": {"path": "m", "kernels": "liger"}}, r"model.kernels: untested"),
        ({"model": {"path": "m", "add_tokens": ["<x>"]}}, r"model.add_tokens: untested"),
        ({"train": {"ema_decay": 0.9}}, r"train.ema_decay: untested"),
        ({"train": {"learning_rates": {"lm_head": 1e-5}}}, r"train.learning_rates: untested"),
        ({"train": {"non_finite": "skip"}}, r"train.non_finite: untested"),
        ({"train": {"optim": "muon"}}, r"train.optim: muon is untested with .*; use train.optim=adamw_torch_fused"),
        ({"train": {"fp8": True}}, r"train.fp8: untested"),
        ({"train": {"retry_out_of_memory": True}}, r"train.retry_out_of_memory: untested"),
        ({"method": {"type": "sft", "trainer_args": {"neftune_noise_alpha": 5.0}}}, r"neftune_noise_alpha: untested"),
        ({"parallel": {"strategy": "ddp"}}, r"parallel.strategy: .* shards by fsdp2, not ddp"),
        ({"parallel": {"tp_size": 2}}, r"parallel.tp_size: untested"),
        ({"parallel": {"offload_param_device": "cpu"}}, r"parallel.offload_param_device: untested"),
        ({"output": {"sample_prompts": ["hello"]}}, r"output.sample_prompts: untested"),
    ],
)
def test_a_field_that_is_not_known_to_be_honoured_is_refused_by_name(sections, words):
    with pytest.raises(PlanError, match=words):
        planned(**sections)


def test_values_that_change_nothing_are_accepted():
    plan = planned(
        data={"padding_free": False},
        model={"path": "m", "kernels": "torch"},
        train={"optim": "adamw_torch", "activation_offloading": False},
        output={"sample_prompts": []},
        method={"type": "sft", "trainer_args": {"adam_beta2": 0.95}},
    )
    assert plan.layout.engine == "automodel" and plan.kernels == "torch" and not plan.padding_free


def test_the_lists_name_fields_of_the_recipe():
    for section, names in HONOURED.items():
        assert names <= _fields(section), section
    for key in VALUES:
        section, name = key.split(".")
        assert name in _fields(section)


def _fields(section):
    """Return the fields of a section, or of all that may stand in its place."""
    return {name for kind in _kinds(Recipe.model_fields[section].annotation) for name in kind.model_fields}


def _kinds(annotation):
    """Return the sections that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in _kinds(argument)]


def test_a_router_loss_that_it_computes_otherwise_is_to_be_switched_off():
    with pytest.raises(PlanError, match=r"set method.trainer_args.router_aux_loss_coef=0"):
        planned(facts=A3B)
    off = {"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.0}}
    assert planned("2x8xh100", facts=A3B, method=off, parallel={"ep_size": 8}).layout.ep_size == 8


def test_experts_and_stages_of_untested_families_are_refused():
    mixtral = known_model("mistralai/Mixtral-8x7B-v0.1")
    off = {"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.0}}
    with pytest.raises(PlanError, match=r"divided experts of mixtral are untested with NeMo Automodel"):
        planned("4x8xh100", facts=mixtral, method=off, parallel={"ep_size": 8})
    with pytest.raises(PlanError, match=r"stages of mixtral are untested with NeMo Automodel"):
        planned("4x8xh100", facts=mixtral, method=off, parallel={"pp_size": 2})


def test_another_version_is_named_with_the_command_that_installs_this_one():
    hardware = find_machine("8xh100").hardware().model_copy(update={"automodel": False})
    with pytest.raises(PlanError) as caught:
        planned(hardware=hardware)
    assert INSTALL in str(caught.value)
    assert planned(hardware=hardware.model_copy(update={"automodel": True})).layout.engine == "automodel"
