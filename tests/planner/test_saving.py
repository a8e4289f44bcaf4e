"""What a run writes to disk, worked out by hand for a model of 8 billion weights."""

import pytest

from tests.estimates.shapes import LAPTOP, LLAMA_8B
from tunekit.errors import PlanError
from tunekit.estimates.facts import DataFacts
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.decisions.reasons import check_disk
from tunekit.planner.resolve import resolve
from tunekit.recipe.schema import Recipe

WEIGHTS = LLAMA_8B.num_params
TOKENIZER = 128 * LLAMA_8B.vocab_size
GIB = 2**30


def planned(machine="8xh100", *, num_eval=None, free=None, main_memory=0, **sections):
    asked = {"model": "m", "data": {"train": "x", "max_length": 1024}, "adapter": "full", **sections}
    asked["train"] = {"global_batch_size": 64, "max_steps": 100, **sections.get("train", {})}
    hardware = find_machine(machine).hardware().model_copy(update={"disk_free_bytes": free})
    if main_memory:
        sizes = {"memory_free_bytes": main_memory, "memory_total_bytes": main_memory}
        hardware = hardware.model_copy(update={"cpu": LAPTOP.cpu.model_copy(update=sizes)})
    data = DataFacts(num_train=1000, num_eval=num_eval)
    return resolve(Recipe.model_validate(asked), hardware, LLAMA_8B, data)


def reason(plan, topic):
    (found,) = [reason for reason in plan.reasons if reason.topic == topic]
    return found


@pytest.mark.parametrize(
    ("strategy", "bytes_per_weight"),
    [
        # Weights and the two moments of Adam, in float32.
        ("fsdp2", 4 + 8),
        # What is computed with, as a model; float32 copies; moments.
        ("zero3", 2 + 4 + 8),
        # What is computed with twice: as a model, and as DeepSpeed goes on with it.
        ("zero2", 2 * 2 + 4 + 8),
    ],
)
def test_a_checkpoint_takes_weights_and_states(strategy, bytes_per_weight):
    saving = planned(parallel={"strategy": strategy}).saving
    assert saving.checkpoint_bytes == pytest.approx(bytes_per_weight * WEIGHTS + TOKENIZER, rel=1e-4)
    assert saving.result_bytes == 4 * WEIGHTS + TOKENIZER
    # The newest two and the one that is being written.
    assert saving.run_bytes == 3 * saving.checkpoint_bytes + saving.result_bytes


def test_the_best_is_kept_besides_and_a_limit_counts():
    saving = planned(num_eval=10, train={"save_total_limit": 5}).saving
    assert saving.run_bytes == 7 * saving.checkpoint_bytes + saving.result_bytes
    assert (saving.metric_for_best_model, saving.greater_is_better) == ("eval_loss", False)


def test_an_adapter_takes_little_and_is_told_so():
    saving = planned("1xh100", adapter={"type": "lora", "rank": 8}).saving
    assert saving.checkpoint_bytes < 0.01 * planned().saving.checkpoint_bytes


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_a_copy_to_write_from_is_made_where_main_memory_has_room_for_it(strategy):
    sharing = {"strategy": strategy}
    size = planned(parallel=sharing).saving.checkpoint_bytes
    roomy, tight = (planned(parallel=sharing, main_memory=int(share * size)) for share in (2, 0.5))
    assert roomy.saving.in_background and not tight.saving.in_background
    assert "written in the background" in reason(roomy, "checkpoints").why
    assert reason(tight, "checkpoints").why == "training waits: a copy to write from would not fit in host memory"


def test_training_waits_where_one_process_writes_all():
    alone = planned("1xh100", adapter="lora", main_memory=2**41)
    assert not alone.saving.in_background
    assert reason(alone, "checkpoints").why == "training waits: one process writes everything"


def test_what_is_free_is_told_and_too_little_is_refused():
    plan = planned(free=100 * GIB, train={"save_total_limit": 3})
    assert reason(plan, "disk space").why.endswith("the one being written, the result and the rows; 100.0 GiB free")
    needed = plan.saving.run_bytes
    check_disk(plan, needed, "runs")
    with pytest.raises(PlanError, match="the run needs up to") as refused:
        check_disk(plan, needed - 1, "runs")
    assert "train.save_total_limit=2" in refused.value.hint and "adapter.type=lora" in refused.value.hint
    # Of another machine the plan says what is needed, and no more.
    assert "free" not in reason(planned(), "disk space").why


def test_rewards_tell_the_best_of_a_method_that_learns_from_them():
    method = {"type": "grpo", "rewards": ["exact_match"]}
    saving = planned(num_eval=8, adapter="lora", method=method).saving
    assert (saving.metric_for_best_model, saving.greater_is_better) == ("eval_reward", True)


@pytest.mark.parametrize("asked", [{"metric_for_best_model": "eval_loss"}, {"greater_is_better": False}])
def test_the_best_of_no_evaluations_is_refused(asked):
    with pytest.raises(PlanError, match="no evaluation rows"):
        planned(train=asked)


def test_a_checkpoint_of_answers_that_several_steps_learn_from_is_made_behind_the_last():
    method = {"type": "grpo", "rewards": ["exact_match"], "num_iterations": 4}
    schedule = planned(adapter="lora", method=method).schedule
    assert schedule.save_together == 4
    assert schedule.save_steps % 4 == 0


def test_a_plan_tells_what_stops_it_early():
    asked = {"eval_steps": 10, "early_stopping_patience": 3, "early_stopping_threshold": 0.01}
    steps = reason(planned(num_eval=8, train=asked), "steps")
    assert steps.choice == "at most 100, 3 of warmup"
    assert steps.why.endswith("; stops early once 3 consecutive evaluations do not improve eval_loss by more than 0.01")


def test_a_plan_tells_that_a_single_step_of_warmup_trains_nothing():
    (alone, none, two) = (
        reason(planned(train={"lr_scheduler_type": "cosine", **train}), "steps").why
        for train in ({"max_steps": 1}, {"max_steps": 1, "warmup_steps": 0}, {"max_steps": 2})
    )
    assert alone.endswith(
        "; warm-up begins at learning rate 0: the weights do not change unless train.warmup_steps is 0"
    )
    assert "warm-up" not in none + two


@pytest.mark.parametrize(
    ("train", "num_eval", "why", "hint"),
    [
        ({}, None, "no evaluation rows to stop early by", "set data.eval"),
        ({}, 8, "3 needs 4 evaluations before the last step, 100, but there are 3, every 25 steps", "eval_steps=24"),
        ({"eval_steps": 60}, 8, "there is 1, every 60 steps", "set train.eval_steps=24"),
        ({"max_steps": 3, "eval_steps": 1}, 8, "there are 2, every step", "set train.early_stopping_patience=1"),
    ],
    ids=["nothing to evaluate", "four evaluations", "one evaluation", "few steps"],
)
def test_a_patience_that_no_evaluations_can_exhaust_is_refused_with_a_remedy(train, num_eval, why, hint):
    with pytest.raises(PlanError, match=why) as refused:
        planned(num_eval=num_eval, train={"early_stopping_patience": 3, **train})
    assert hint in refused.value.hint


@pytest.mark.parametrize("warmup", [{"warmup_steps": 3}, {"max_steps": 1}], ids=["all steps", "the only step"])
def test_a_polynomial_decay_without_steps_is_refused_with_a_remedy(warmup):
    train = {"lr_scheduler_type": "polynomial", "max_steps": 3}
    with pytest.raises(PlanError, match="leaves none of") as refused:
        planned(train={**train, **warmup})
    assert "set train.lr_scheduler_type=linear" in refused.value.hint
    assert planned(train={**train, "warmup_steps": 2}).schedule.warmup_steps == 2


def test_early_stopping_in_a_layout_without_checkpoints_is_refused():
    asked = {"eval_steps": 10, "early_stopping_patience": 3}
    with pytest.raises(PlanError, match=r"train.early_stopping_patience: .* saves no checkpoints"):
        planned(num_eval=8, train=asked, parallel={"strategy": "fsdp2", "tp_size": 2})


def test_a_layout_without_checkpoints_keeps_no_best_one():
    saving = planned(num_eval=8, parallel={"strategy": "fsdp2", "tp_size": 2}).saving
    assert saving.metric_for_best_model is None
    assert saving.run_bytes == saving.result_bytes
