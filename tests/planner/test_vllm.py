"""Whether vLLM generates answers, and what the plan says and reckons of it. No vLLM stands behind the figures."""

from dataclasses import replace
from typing import Any

import pytest

from tests.estimates.shapes import LLAMA_8B
from tunekit.errors import PlanError
from tunekit.estimates.facts import DataFacts, Device, Hardware
from tunekit.estimates.hardware.machines import find_machine
from tunekit.launching.local import devices_of
from tunekit.launching.ssh_hosts import for_hosts
from tunekit.planner.plan import VLLM, Plan
from tunekit.planner.resolve import resolve
from tunekit.probe.nodes import check_for_launcher
from tunekit.process.watchdog import Beat, silent_server
from tunekit.recipe.schema import Recipe

ROWS = DataFacts(num_train=1000)
H100 = find_machine("h100").hardware().model_copy(update={"vllm": True})
ON_ROCM = H100.model_copy(update={"accelerators": (H100.accelerators[0].model_copy(update={"gfx": "gfx942"}),)})
ON_CPU = Hardware(
    cpu=Device(kind="cpu", name="CPU", memory_total_bytes=2**36, memory_free_bytes=2**36, native_bfloat16=False),
    vllm=True,
)
URL = "http://there:8000"


def planned(
    hardware: Hardware = H100,
    *,
    adapter: Any = "lora",
    parallel: Any = None,
    generation: Any = None,
    data: Any = None,
    train: Any = None,
    **method: Any,
) -> Plan:
    asked = {
        "model": "meta-llama/Llama-3.1-8B",
        "data": {"train": "x.jsonl", **(data or {})},
        "method": {"type": "grpo", "generation": generation or {}, **method},
        "adapter": adapter,
        "train": {"global_batch_size": 32, **(train or {})},
        "parallel": parallel or {},
    }
    return resolve(Recipe.model_validate(asked), hardware, LLAMA_8B, ROWS)


def why(plan: Plan) -> str:
    return next(f"{one.choice}; {one.why}" for one in plan.reasons if one.topic == "generation")


def test_vllm_generates_where_it_is_installed_and_fits_and_takes_its_share_of_the_whole_device():
    plan = planned()
    assert plan.vllm is not None
    share = plan.vllm.gpu_memory_utilization
    assert plan.memory.parts["vllm"] == int(share * plan.device.memory_total_bytes)
    # 8.03 G weights and 32 answers of 1,024 tokens at 128 KiB each, and what is computed at once beside them.
    needed = 2 * LLAMA_8B.num_params + 32 * 1024 * 128 * 2**10
    assert needed < share * plan.device.memory_total_bytes < 1.15 * needed
    assert "generation" not in plan.memory.phases and "kv cache" not in plan.memory.parts
    assert f"vLLM on the training devices, {share:.0%} of their memory" in why(plan)
    assert "installed, and fits together with the model; TRL merges and unmerges the adapter for it" in why(plan)
    assert plan.memory.total_bytes <= plan.memory_limit_bytes
    assert Plan.from_yaml(plan.to_yaml(), plan.recipe).vllm == plan.vllm


def test_many_answers_get_no_more_than_trls_default_share():
    plan = planned(generation={"use_vllm": True}, num_generations=32, max_completion_length=1000)
    assert plan.vllm.gpu_memory_utilization <= 0.3
    asked = planned(generation={"vllm_gpu_memory_utilization": 0.45})
    assert asked.vllm == VLLM(mode="colocate", gpu_memory_utilization=0.45)
    assert asked.memory.parts["vllm"] == int(0.45 * asked.device.memory_total_bytes)


def test_it_is_left_out_where_it_is_not_known_to_be_or_does_not_fit():
    unknown = planned(H100.model_copy(update={"vllm": None}))
    assert unknown.vllm is None and "unknown whether vLLM is installed there" in why(unknown)
    missing = planned(H100.model_copy(update={"vllm": False}))
    assert missing.vllm is None and "vLLM 0.24 or newer is not installed" in why(missing)
    assert "kv cache" in missing.memory.parts or "generation" in missing.memory.phases
    left = planned(find_machine("rtx5090").hardware().model_copy(update={"vllm": True}))
    assert left.vllm is None and "vLLM would not fit together with the model" in why(left)


def test_a_server_takes_nothing_of_the_devices():
    generation = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": URL}
    plan = planned(generation=generation)
    assert plan.vllm == VLLM(mode="server")
    assert "vllm" not in plan.memory.parts and "generation" not in plan.memory.phases
    assert f"vLLM server, {URL}; set by the recipe" in why(plan)


EIGHT = find_machine("8xh100").hardware().model_copy(update={"vllm": True})
NAMED = EIGHT.model_copy(
    update={
        "accelerators": tuple(
            device.model_copy(update={"visible_as": f"GPU-{number}"})
            for number, device in enumerate(EIGHT.accelerators)
        )
    }
)


def own(**generation: Any) -> dict[str, Any]:
    return {"use_vllm": True, "vllm_mode": "server", **generation}


def test_a_server_that_the_run_starts_gets_devices_of_its_own():
    plan = planned(NAMED, adapter="full", generation=own(vllm_tensor_parallel_size=2), train={"global_batch_size": 48})
    assert plan.layout.num_processes == 6
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == ",".join(f"GPU-{number}" for number in range(6))
    assert plan.vllm == VLLM(mode="server", gpu_memory_utilization=0.9, devices=("GPU-6", "GPU-7"))
    assert "vllm" not in plan.memory.parts
    assert "vLLM server on 2 other devices, 90% of their memory; set by the recipe; started and stopped with" in why(
        plan
    )
    assert devices_of(plan) == tuple(f"GPU-{number}" for number in range(8))
    assert Plan.from_yaml(plan.to_yaml(), plan.recipe).vllm == plan.vllm
    twice = own(vllm_tensor_parallel_size=2, vllm_data_parallel_size=2, vllm_gpu_memory_utilization=0.5)
    plan = planned(NAMED, adapter="full", generation=twice)
    assert plan.layout.num_processes == 4 and len(plan.vllm.devices) == 4
    assert plan.vllm.gpu_memory_utilization == 0.5
    assert planned(EIGHT, adapter="full", generation=own(), train={"global_batch_size": 56}).vllm.devices == ()


@pytest.mark.parametrize(
    ("hardware", "changes", "problem"),
    [
        (H100, {}, "vllm_mode: a vLLM server on 1 of 1 H100 .* leaves none to train on; set .*colocate"),
        (EIGHT, {"vllm_data_parallel_size": 8}, "vllm_mode: a vLLM server on 8 of 8 .* leaves none to train on"),
        (
            find_machine("2x8xh100").hardware().model_copy(update={"vllm": True}),
            {},
            "vllm_mode: a vLLM server is started on a single node; there are 2; start `vllm serve`",
        ),
        (EIGHT, {"vllm_tensor_parallel_size": 3}, "vllm_tensor_parallel_size: 3 does not divide the 32 heads"),
        (
            find_machine("8xrtx4090").hardware().model_copy(update={"vllm": True}),
            {"vllm_gpu_memory_utilization": 0.5},
            r"vllm_mode: a vLLM server needs .* GiB of each device .*; 50% of a .* is .*; raise .*tensor_parallel_size",
        ),
        (
            EIGHT.model_copy(
                update={
                    "accelerators": (
                        *EIGHT.accelerators[:-1],
                        EIGHT.accelerators[-1].model_copy(update={"memory_free_bytes": 40 * 2**30}),
                    )
                }
            ),
            {},
            r"vllm_gpu_memory_utilization: 90% of a .* is .* GiB, but 40.0 GiB are free; lower it",
        ),
        (ON_CPU, {}, "use_vllm: vLLM is supported on CUDA devices only"),
    ],
)
def test_a_server_that_cannot_be_started_is_refused(hardware, changes, problem):
    with pytest.raises(PlanError, match=rf"(?s)method\.generation\.{problem}"):
        planned(hardware, adapter="full", generation=own(**changes))


def test_a_server_is_started_for_the_processes_of_tunekit_train_alone():
    recipe = planned(EIGHT, adapter="full", generation=own(), train={"global_batch_size": 56}).recipe
    with pytest.raises(PlanError, match="no vLLM server is started for runs under torchrun; start `vllm serve`"):
        check_for_launcher(recipe, "torchrun")
    with pytest.raises(PlanError, match="vllm_mode: no vLLM server is started for runs on hosts"):
        for_hosts(recipe, ["there"])


def test_completions_that_are_generated_ahead_cost_only_what_they_take_longer():
    generation = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": URL}
    plan, ahead = planned(generation=generation), planned(generation=generation, max_staleness=1)
    assert ahead.speed.seconds.high < plan.speed.seconds.high
    method = next(reason for reason in ahead.reasons if reason.topic == "method")
    assert "completions are generated 1 step ahead, while others are trained on" in method.why
    assert ahead.memory == plan.memory


def test_a_server_that_does_not_answer_is_named_by_the_process_that_asks_it():
    plan = planned(generation={"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": URL})
    beat = Beat(0, 1, "", "here", 0.0, 3, "generation", 0.0)
    error = silent_server(plan, beat, 600.4)
    assert error is not None and "`vllm serve`" in str(error.hint)
    assert f"the vLLM server at {URL} has not answered for 600 s, in generation of step 3" in error.problem
    assert silent_server(plan, replace(beat, rank=1), 600.4) is None
    assert silent_server(plan, replace(beat, at="forward"), 600.4) is None
    assert silent_server(planned(), beat, 600.4) is None
    plan = planned(EIGHT, adapter="full", generation=own(), train={"global_batch_size": 56})
    assert str(silent_server(plan, beat, 600.4)) == (
        "method.generation.vllm_mode: the run's vLLM server has not answered for 600 s, in generation of step 3; "
        "see vllm.log in the run's folder"
    )


@pytest.mark.parametrize(
    ("hardware", "changes", "problem"),
    [
        (
            H100.model_copy(update={"vllm": False}),
            {},
            r"vLLM 0\.24 or newer is not installed.*pip install 'tunekit\[vllm\]'",
        ),
        (ON_ROCM, {}, "vLLM is supported on CUDA devices only"),
        (H100, {"adapter": "qlora"}, "TRL merges the adapter into the quantized weights"),
        (
            H100,
            {"train": {"ema_decay": 0.9}, "data": {"eval_size": 0.1}},
            "after an evaluation, vLLM would keep generating with the averaged weights",
        ),
        (H100, {"loss_type": "vespo"}, "vespo needs a different importance-sampling correction"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_the_reason(hardware, changes, problem):
    with pytest.raises(PlanError, match=rf"(?s)method\.generation\.use_vllm: {problem}"):
        planned(hardware, generation={"use_vllm": True}, **changes)


def test_averaged_weights_that_are_not_evaluated_never_reach_vllm():
    assert planned(train={"ema_decay": 0.9}, generation={"use_vllm": True}).vllm is not None
    assert planned(train={"ema_decay": 0.9}, data={"eval_size": 0.1}).vllm is None


def test_an_adapter_on_divided_weights_is_refused_with_vllm_and_generates_with_transformers():
    eight = find_machine("8xh100").hardware().model_copy(update={"vllm": True})
    divided = {"strategy": "fsdp2"}
    with pytest.raises(PlanError, match="TRL cannot merge an adapter into FSDP2-sharded weights"):
        planned(eight, parallel=divided, generation={"use_vllm": True})
    plan = planned(eight, parallel=divided)
    assert plan.vllm is None and "TRL cannot merge an adapter into FSDP2-sharded weights" in why(plan)
    assert planned(eight, parallel=divided, adapter="full").vllm is not None


def test_answers_that_vllm_drew_are_scored_once_more_by_grpo():
    """TRL compares the probabilities that they were drawn with and those of the model."""
    with_vllm, without = planned(), planned(generation={"use_vllm": False})
    assert with_vllm.speed.flops_per_token > 1.1 * without.speed.flops_per_token
    low, high = with_vllm.speed.generation_share.low, without.speed.generation_share.low
    assert 0 < low < high < 1
