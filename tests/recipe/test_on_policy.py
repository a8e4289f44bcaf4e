"""What does not go together in methods that learn from generated answers is told with its place, before anything."""

import pytest

from tunekit.errors import RecipeError
from tunekit.recipe.load import load_recipe

OWN = {"grpo": {}, "rloo": {}, "distillation": {"teacher": "pico"}}


def recipe(kind: str, **sections: dict[str, object]) -> dict[str, object]:
    method = {"type": kind, **OWN[kind], **sections.pop("method", {})}
    return {"model": "pico", "data": {"train": "x.jsonl"}, "method": method, **sections}


@pytest.mark.parametrize("kind", OWN)
def test_what_every_such_method_takes_is_taken(kind: str) -> None:
    generation = {"temperature": 0.7, "top_p": 0.9, "stop": ["</answer>"], "use_vllm": False}
    method = load_recipe(recipe(kind, method={"generation": generation, "max_completion_length": 64})).method
    assert method.generation.stop == ["</answer>"]


@pytest.mark.parametrize(
    ("loss", "method"),
    [
        ("grpo", {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
        ("luspo", {"importance_sampling_level": "sequence"}),
        ("cispo", {"epsilon_high": 5.0}),
        ("dapo", {"epsilon_high": 0.28}),
        ("sapo", {"trainer_args": {"sapo_temperature_neg": 1.1}}),
        ("vespo", {}),
    ],
)
def test_losses_are_taken_as_their_papers_have_them(loss: str, method: dict[str, object]) -> None:
    assert load_recipe(recipe("grpo", method={"loss_type": loss, **method})).method.loss_type == loss


def vllm(**generation: object) -> dict[str, object]:
    return {"generation": generation}


URL = "http://there:8000"

AHEAD = {"max_staleness": 1, **vllm(use_vllm=True, vllm_mode="server", vllm_server_base_url=URL)}


@pytest.mark.parametrize(
    ("kind", "method", "problem"),
    [
        ("rloo", {"max_completion_length": 1024}, r"max_completion_length: 1024 leaves no room for a prompt"),
        ("distillation", {"max_completion_length": 1024}, "max_completion_length: 1024 leaves no room for a prompt"),
        ("rloo", {"num_generations": 5}, r"num_generations: 5 does not divide train\.global_batch_size 16"),
        ("rloo", {"epsilon": 0.3, "epsilon_high": 0.2}, r"epsilon_high: 0\.2 is less than method\.epsilon 0\.3"),
        ("grpo", {"epsilon_high": 0.1}, r"epsilon_high: 0\.1 is less than method\.epsilon 0\.2"),
        ("grpo", {"loss_type": "luspo"}, "importance_sampling_level: must be sequence for loss_type luspo"),
        (
            "grpo",
            {"loss_type": "vespo", "importance_sampling_level": "sequence"},
            "importance_sampling_level: must be token for loss_type vespo",
        ),
        (
            "grpo",
            {"importance_sampling_level": "sequence"},
            "importance_sampling_level: cannot be sequence for loss_type dapo, a sum over tokens",
        ),
        ("grpo", {"loss_type": "cispo"}, "epsilon_high: must be at least 1 for loss_type cispo"),
        ("grpo", {"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high: must be at least 1 for loss_type cispo"),
        ("grpo", {"loss_type": "sapo", "epsilon": 0.1}, "epsilon: has no effect for loss_type sapo"),
        ("grpo", {"loss_type": "sapo", "epsilon_high": 0.3}, "epsilon_high: has no effect for loss_type sapo"),
        (
            "rloo",
            {"beta": 0.0, "trainer_args": {"sync_ref_model": True}},
            r"trainer_args\.sync_ref_model: has no effect with method\.beta 0",
        ),
        (
            "grpo",
            {"beta": 0.1, "trainer_args": {"sync_ref_model": True}},
            r"trainer_args\.sync_ref_model: unsupported with an adapter",
        ),
        (
            "grpo",
            {"trainer_args": {"multi_objective_aggregation": "sum"}},
            r"trainer_args\.multi_objective_aggregation: must be one of sum_then_normalize, normalize_then_sum",
        ),
        (
            "rloo",
            {"trainer_args": {"num_generations_eval": -1}},
            r"trainer_args\.num_generations_eval: must be at least 1",
        ),
        (
            "rloo",
            {"trainer_args": {"generation_kwargs": {"temperature": 2.0}}},
            r"trainer_args\.generation_kwargs: must not contain temperature, which tunekit sets",
        ),
        (
            "grpo",
            {"trainer_args": {"log_completions_hub_repo": "mine/answers"}},
            r"trainer_args\.log_completions_hub_repo: set by tunekit",
        ),
        (
            "grpo",
            vllm(use_vllm=True, vllm_server_base_url=URL),
            "vllm_server_base_url: has no effect with vllm_mode colocate",
        ),
        (
            "grpo",
            vllm(use_vllm=True, vllm_mode="server", vllm_server_base_url=URL, vllm_gpu_memory_utilization=0.5),
            "vllm_gpu_memory_utilization: has no effect with vllm_server_base_url",
        ),
        (
            "grpo",
            vllm(use_vllm=True, vllm_mode="server", vllm_server_base_url=URL, vllm_tensor_parallel_size=2),
            "vllm_tensor_parallel_size: has no effect with vllm_server_base_url",
        ),
        (
            "rloo",
            vllm(use_vllm=True, vllm_data_parallel_size=2),
            "vllm_data_parallel_size: has no effect with vllm_mode colocate",
        ),
        ("rloo", vllm(vllm_mode="server"), "vllm_mode: has no effect unless use_vllm is true"),
        (
            "rloo",
            vllm(vllm_mode="server", vllm_server_base_url=URL),
            "vllm_mode: has no effect unless use_vllm is true",
        ),
        (
            "distillation",
            vllm(use_vllm=False, vllm_gpu_memory_utilization=0.5),
            "vllm_gpu_memory_utilization: has no effect with use_vllm false",
        ),
        ("grpo", {"max_staleness": 1}, "max_staleness: needs a vLLM server, which generates on other devices"),
        ("grpo", {**AHEAD, "num_iterations": 2}, "max_staleness: not supported with num_iterations above 1"),
        ("grpo", {**AHEAD, "tools": ["calculator"]}, "max_staleness: not supported with method.tools"),
        ("grpo", {**AHEAD, "rollout": "my:own"}, "max_staleness: not supported with method.tools, .* method.rollout"),
        (
            "grpo",
            {**AHEAD, "trainer_args": {"vllm_importance_sampling_correction": False}},
            "max_staleness: needs trainer_args.vllm_importance_sampling_correction",
        ),
        (
            "distillation",
            {"teacher": {"path": "pico", "attn_implementation": "eager"}},
            r"teacher\.attn_implementation: not configurable: the teacher uses the model's setting",
        ),
    ],
)
def test_what_does_not_go_together_is_told_with_its_place(kind: str, method: dict[str, object], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        load_recipe(recipe(kind, method=method))


def test_completions_are_generated_ahead_by_a_server() -> None:
    assert load_recipe(recipe("grpo", method={**AHEAD, "max_resample_times": 2, "beta": 0.1})).method.max_lag == 1


def test_a_checkpoint_is_made_where_new_answers_are_due() -> None:
    asked = recipe("grpo", method={"num_iterations": 4}, train={"save_steps": 6})
    with pytest.raises(RecipeError, match=r"train\.save_steps: 6 is not a multiple of method\.num_iterations 4"):
        load_recipe(asked)
    assert load_recipe({**asked, "train": {"save_steps": 8}}).train.save_steps == 8
