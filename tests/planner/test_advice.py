"""Advice on plans that are legal but poor, and recipes ranked beside each other."""

import pytest

from tests.planner.advice import LLAMA_8B, SITUATIONS, text
from tests.planner.golden import GOLDEN, ROWS, known_facts, plan_of, recipe
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.advice import middle
from tunekit.planner.decisions.changes import change_of
from tunekit.planner.plan import Plan
from tunekit.planner.ranking import alternatives, ranked
from tunekit.planner.resolve import resolve
from tunekit.planner.variants import to_words
from tunekit.recipe.load import load_recipe

ALONE = {"parallel": {"strategy": "single"}}


def planned(model, machine, sections):
    return plan_of(recipe(**sections), find_machine(machine).hardware(), known_facts(model))


def test_the_advice_is_the_golden_one():
    assert text() == (GOLDEN / "advice.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SITUATIONS)
def test_advice_that_is_followed_does_as_it_says(name):
    model, machine, sections = SITUATIONS[name]
    plan = planned(model, machine, sections)
    for line in plan.advice if isinstance(plan, Plan) else ():
        words = line.choice.split(" and ")
        followed = resolve(
            load_recipe(recipe(**sections), words), find_machine(machine).hardware(), known_facts(model), ROWS
        )
        assert followed.layout_words in line.why
        if "times as fast (" in line.why:
            before, after = plan.speed.tokens_per_second, followed.speed.tokens_per_second
            assert middle(after) > middle(before) and after.low > before.low and after.high > before.high


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_change_that_a_refusal_names_fits(name):
    model, machine, sections = SITUATIONS[name]
    plan = planned(model, machine, sections)
    if isinstance(plan, PlanError) and plan.changes:
        changed = load_recipe(recipe(**sections), list(plan.changes))
        assert isinstance(plan_of(changed, find_machine(machine).hardware(), known_facts(model)), Plan)


def test_a_plan_that_offloads_nothing_and_forces_nothing_gets_no_advice():
    assert planned(LLAMA_8B, "h100", {}).advice == ()


def test_advice_says_what_it_gives_up():
    pure, adapter = planned(LLAMA_8B, "h100", {"adapter": "full"}).advice
    assert pure.why.endswith("in bfloat16, rounded stochastically")
    assert adapter.why.endswith("trains an adapter instead of all weights")


def test_offloading_that_is_forced_without_need_is_contested():
    forced = {"parallel": {"offload_param_device": "cpu", "offload_optimizer_device": "cpu", "strategy": "zero3"}}
    (line,) = planned(LLAMA_8B, "8xh100", {"adapter": "full", **forced}).advice
    assert line.choice.startswith("parallel.strategy=auto and parallel.offload_param_device=auto")
    assert line.why.endswith("the same result")


def test_two_changes_are_named_where_none_alone_fits():
    long = planned("Qwen/Qwen2.5-7B", "t4", {"adapter": "full", "data": {"max_length": 16384}} | ALONE)
    assert long.changes == ("parallel.strategy=auto", "data.max_length=8192")
    tight = planned(LLAMA_8B, "h100", {"adapter": "full", "method": "dpo"} | ALONE)
    assert tight.changes == ("train.pure_bf16=true", "train.optim=tunekit_adamw_8bit")


def test_a_lower_rank_is_named_where_it_is_enough():
    refused = planned("Qwen/Qwen2.5-32B", "rtx4090", {"adapter": {"type": "qlora", "rank": 32}})
    assert refused.changes == ("adapter.rank=8", "adapter.alpha=8")


def test_a_changed_adapter_keeps_what_both_kinds_have():
    lora = recipe(adapter={"type": "lora", "rank": 64, "target_modules": ["q_proj"]})
    change = change_of(lora, {"adapter.type": "qlora"})
    assert (change.recipe.adapter.type, change.recipe.adapter.rank) == ("qlora", 64)
    assert change.recipe == load_recipe(lora, list(change.overrides)).model_copy(
        update={"output": change.recipe.output}
    )


def test_a_change_that_is_not_valid_or_none_is_no_change():
    lora = recipe(adapter="lora")
    assert change_of(lora, {"train.pure_bf16": True}) is None
    assert change_of(lora, {"adapter.type": "lora"}) is None


def test_a_learning_rate_of_all_weights_is_not_that_of_an_adapter():
    plan = planned(LLAMA_8B, "h100", {"adapter": "full", "train": {"learning_rate": 1e-5}})
    assert "adapter.type=lora and train.learning_rate=null" in [line.choice for line in plan.advice]


def test_recipes_are_ranked_by_time_with_what_does_not_fit_last():
    asked = recipe(adapter="full")
    variants = ranked(
        [
            variant
            for machine in ("rtx4090", "h100")
            for variant in alternatives(
                asked,
                lambda other, machine=machine: plan_of(other, find_machine(machine).hardware(), known_facts(LLAMA_8B)),
                machine,
                131072,
            )
        ]
    )
    fits = [isinstance(variant.plan, Plan) for variant in variants]
    assert fits == sorted(fits, reverse=True) and not all(fits)
    times = [middle(variant.plan.speed.seconds) for variant in variants if isinstance(variant.plan, Plan)]
    assert times == sorted(times)
    assert "fastest" in variants[0].note
    notes = " ".join(variant.note for variant in variants)
    assert all(notes.count(note) == 1 for note in ("fastest", "cheapest", "least memory"))
    changes = {" ".join(to_words(variant.changes)) for variant in variants}
    assert {"", "adapter.type=lora", "adapter.type=qlora", "train.pure_bf16=true", "data.max_length=2048"} & changes
