"""Plans of NeMo Automodel: which layouts are tried, in which order, what is refused, and what a plan says."""

import pytest

from tests.estimates.shapes import LLAMA_1B, LLAMA_8B
from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.decisions.candidates import candidates
from tunekit.planner.decisions.engines import automodel_words
from tunekit.planner.resolve import resolve, setting_of
from tunekit.probe.model import known_model

A3B = known_model("Qwen/Qwen3-30B-A3B")


def asked(parallel, batch=64, length=2048, **sections):
    train = {"global_batch_size": batch, **sections.pop("train", {})}
    parallel = {"engine": "automodel", **parallel}
    return recipe(adapter="full", parallel=parallel, data={"max_length": length}, train=train, **sections)


def planned(parallel, machine="8xh100", model=LLAMA_8B, **how):
    return resolve(asked(parallel, **how), find_machine(machine).hardware(), model, ROWS)


def sizes(parallel, machine="8xh100", model=LLAMA_8B, **how):
    """Stages, experts and devices of a stage of the layouts to try, each once."""
    setting = setting_of(asked(parallel, **how), find_machine(machine).hardware(), model)
    layouts = [candidate.layout for candidate in candidates(setting)]
    assert all((one.engine, one.strategy) == ("automodel", "fsdp2") for one in layouts)
    return list(dict.fromkeys((one.pp_size, one.ep_size, one.dp_shard_size) for one in layouts))


def test_a_pipeline_comes_behind_layouts_without_one():
    assert sizes({}) == [(1, 1, 8), (2, 1, 4), (4, 1, 2), (8, 1, 1)]
    assert sizes({}, model=A3B)[:5] == [(1, 1, 8), (1, 2, 8), (1, 4, 8), (1, 8, 8), (2, 1, 4)]


def test_gradients_are_reduced_in_every_micro_batch_only_behind_all_others():
    setting = setting_of(asked({}), find_machine("8xh100").hardware(), LLAMA_8B)
    often = [candidate.layout.sync_each_batch for candidate in candidates(setting)]
    assert often == sorted(often) and any(often) and not all(often)


def test_sizes_that_are_asked_for_are_taken():
    assert sizes({"pp_size": 4}) == [(4, 1, 2)]
    assert sizes({"dp_shard_size": 2}) == [(4, 1, 2)]
    assert sizes({"pp_size": 2, "ep_size": 4}, model=A3B) == [(2, 4, 4)]
    assert sizes({"pp_size": 2, "num_processes": 4}) == [(2, 1, 2)]
    # Experts of a node by default, beyond it where that is asked for.
    assert sizes({"ep_size": 16}, "2x8xh100", A3B) == [(1, 16, 16)]


def test_no_layout_of_accelerate_has_stages():
    setting = setting_of(recipe(adapter="full"), find_machine("8xh100").hardware(), LLAMA_8B)
    assert all((one.layout.engine, one.layout.pp_size) == ("accelerate", 1) for one in candidates(setting))


def test_a_plan_says_what_each_stage_has_and_that_nobody_checked_it():
    plan = planned({"pp_size": 2})
    topics = {reason.topic: reason for reason in plan.reasons}
    assert plan.layout.name == "NeMo Automodel, FSDP2, full shard, no reshard, pipeline parallel 2"
    assert topics["layout"].why == (
        "2 stages of 16 layers, each sharded over 4 devices; set by the recipe; weights stay gathered from micro-batch "
        "to micro-batch"
    )
    assert plan.headline.endswith("memory estimate not verified for NeMo Automodel, by formulas alone")
    assert plan.memory.confidence == "closed form"
    assert (plan.kernels, plan.attn_implementation, plan.padding_free) == ("torch", "sdpa", False)
    assert (plan.autocast, plan.torch_compile) == (False, False)
    assert topics["head"].why == "NeMo Automodel's masked cross-entropy reads them in float32, in the last stage"
    assert topics["communication"].choice.startswith("6% bubble with 16 micro-batches in 2 stages")


def test_a_batch_is_counted_in_pipelines():
    topics = {reason.topic: reason for reason in planned({"pp_size": 2}).reasons}
    assert topics["batch"].choice == "64 = 1 x 16 accumulated x 4 pipelines"


def test_as_few_stages_as_fit_are_chosen():
    plan = planned({}, "2x8xh100", known_model("Qwen/Qwen3-32B"), batch=512)
    assert plan.layout.pp_size > 1
    (reason,) = [reason for reason in plan.reasons if reason.topic == "layout"]
    assert "fewer stages would not fit" in reason.why
    fewer = [one for one in plan.rejected if one.layout.pp_size < plan.layout.pp_size]
    assert fewer and all(one.needed_bytes > plan.memory_limit_bytes for one in fewer)


def test_each_stage_has_a_micro_batch():
    plan = planned({"pp_size": 8}, batch=8)
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps) == (1, 8)
    # Two rows keep a stage busy; with more there would be fewer micro-batches, and a wider bubble.
    plan = planned({"pp_size": 2}, batch=256, length=1024)
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps) == (2, 32)


ROUTERS_OFF = {"method": {"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.0}}}

REFUSED = {
    "too few micro-batches": (
        {"pp_size": 4},
        {"batch": 4},
        "NeMo Automodel, FSDP2, full shard, no reshard, pipeline parallel 4: 4 stages need as many micro-batches, but "
        "a step has 2 for each; set train.global_batch_size to a multiple of 2, 8 or more",
    ),
    "more stages than layers": (
        {"pp_size": 64},
        {"machine": "8x8xh100"},
        "parallel.pp_size: 64 stages, but llama-3.1-8b has 32 layers; set it to 32 or less",
    ),
    "stages that are no divisor": (
        {"pp_size": 3},
        {},
        "parallel.pp_size: 3 does not divide the 8 devices; use one of 1, 2, 4, 8",
    ),
    "sizes that do not multiply to the devices": (
        {"pp_size": 4, "dp_shard_size": 4},
        {},
        "parallel.dp_shard_size 4 x parallel.pp_size 4: NeMo Automodel uses all 8 devices, as stages of equally many; "
        "unset parallel.dp_shard_size, which is then 2",
    ),
    "more experts than devices of a stage": (
        {"pp_size": 2, "ep_size": 8},
        {"model": A3B, **ROUTERS_OFF},
        "parallel.ep_size: 8 does not divide the 4 devices of a stage; unset it",
    ),
    "experts of a family that it does not divide": (
        {"ep_size": 8},
        {"model": A3B.model_copy(update={"model_type": "mixtral"}), **ROUTERS_OFF},
        "parallel.ep_size: divided experts of mixtral are untested with NeMo Automodel; unset it, or use "
        "parallel.engine=accelerate",
    ),
    "a head that shares the embedding": (
        {"pp_size": 2},
        {"model": LLAMA_1B},
        "parallel.pp_size: llama-3.2-1b shares the weights of embedding and head, which lie in different stages; "
        "unset it",
    ),
    "tensor parallel": (
        {"tp_size": 2},
        {},
        "parallel.tp_size: untested with parallel.engine=automodel; unset it, or use parallel.engine=accelerate",
    ),
    "context parallel": (
        {"cp_size": 2},
        {},
        "parallel.cp_size: untested with parallel.engine=automodel; unset it, or use parallel.engine=accelerate",
    ),
    "another strategy": (
        {"strategy": "zero3"},
        {},
        "parallel.strategy: parallel.engine=automodel shards by fsdp2, not zero3; unset it",
    ),
    "offloading": (
        {"offload_optimizer_device": "cpu"},
        {},
        "parallel.offload_optimizer_device: untested with parallel.engine=automodel; unset it, or use "
        "parallel.engine=accelerate",
    ),
    "one device": (
        {},
        {"machine": "h100"},
        "parallel.engine: automodel needs several accelerators; this is H100 SXM 80 GB; unset it",
    ),
    "Accelerate": (
        {"engine": "accelerate", "pp_size": 2},
        {},
        "parallel.pp_size: Accelerate runs no pipeline; set parallel.engine=automodel, or unset it",
    ),
    "flash attention": (
        {},
        {"model_section": {"path": "m", "attn_implementation": "flash_attention_2"}},
        "model.attn_implementation: flash_attention_2 is untested with parallel.engine=automodel; use sdpa",
    ),
}


@pytest.mark.parametrize(("parallel", "how", "words"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_with_a_remedy(parallel, how, words):
    how = dict(how)
    if "model_section" in how:
        section = how.pop("model_section")
        with pytest.raises(PlanError) as raised:
            resolve(asked(parallel, model=section), find_machine("8xh100").hardware(), LLAMA_8B, ROWS)
    else:
        with pytest.raises(PlanError) as raised:
            planned(parallel, **how)
    assert str(raised.value) == words


def test_where_nothing_of_accelerates_fits_automodel_is_named_first():
    model, machine = known_model("Qwen/Qwen3-235B-A22B"), find_machine("8x8xh100").hardware()
    sections = {"data": {"max_length": 8192}, "train": {"global_batch_size": 64}}
    parallel = {"strategy": "fsdp2", "offload_param_device": "none", "offload_optimizer_device": "none"}
    request = recipe(adapter="full", parallel={**parallel, "dp_shard_size": 8, "ep_size": 8}, **sections)
    words = automodel_words(setting_of(request, machine, model))
    assert words is not None and words.startswith("NeMo Automodel can: parallel.engine=automodel parallel.pp_size=")
    assert "method.trainer_args.router_aux_loss_coef=0" in words
    assert words.endswith("per device (estimate by formulas alone)")


def test_automodel_is_not_named_where_it_does_not_train_so():
    machine = find_machine("8xh100").hardware()
    assert automodel_words(setting_of(recipe(adapter="lora"), machine, LLAMA_8B)) is None
    assert automodel_words(setting_of(recipe(adapter="full", method="dpo"), machine, LLAMA_8B)) is None
    one = find_machine("h100").hardware()
    assert automodel_words(setting_of(recipe(adapter="full"), one, LLAMA_8B)) is None
