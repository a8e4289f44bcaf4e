"""Megatron's configurations of ms-swift and LLaMA-Factory: the batch, the schedule, the layout, and what differs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tunekit.migration.migration import migrate
from tunekit.migration.report import Migration

SWIFT: dict[str, Any] = {
    "model": "Qwen/Qwen3-4B",
    "dataset": "chats.jsonl",
    "max_length": 512,
    "train_iters": 100,
    "micro_batch_size": 1,
    "global_batch_size": 32,
    "lr": 2e-5,
    "use_hf": True,
}
LORA = {"tuner_type": "lora", "lora_rank": 8}
MCA: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-4B",
    "stage": "sft",
    "finetuning_type": "full",
    "dataset": "chats",
    "cutoff_len": 512,
    "max_steps": 10,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
}


def of_swift(program: str = "megatron", task: str = "sft", /, **more: Any) -> Migration:
    """Migrate a script of ms-swift's Megatron; a key of None is not in it."""
    words = [f"--{key} {json.dumps(value)}" for key, value in (SWIFT | more).items() if value is not None]
    Path("run.sh").write_text(" \\\n  ".join([f"NPROC_PER_NODE=8 {program} {task}", *words]) + "\n")
    return migrate("run.sh")


def of_llama_factory(num_devices: int = 8, **more: Any) -> Migration:
    Path("config.yaml").write_text(json.dumps(MCA | more))
    return migrate("config.yaml", num_devices=num_devices)


def fates(report: Migration) -> dict[str, tuple[str, str]]:
    return {line.key: (line.kind, line.words) for line in report.lines}


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_batch_is_that_of_a_step_whatever_the_devices() -> None:
    report = of_swift(tensor_model_parallel_size=2)
    assert (report.tool, report.recipe.train.global_batch_size) == ("ms-swift", 32)
    assert of_swift(global_batch_size=None).recipe.train.global_batch_size == 16
    assert report.is_same


def test_all_weights_are_trained_by_default_at_the_rate_of_ms_swift() -> None:
    recipe = of_swift(lr=None).recipe
    assert (recipe.adapter.type, recipe.train.learning_rate, recipe.train.weight_decay) == ("full", 1e-5, 0.1)
    assert recipe.method.trainer_args["adam_beta2"] == 0.95
    assert of_swift(lr=None, **LORA).recipe.train.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("settings", "schedule", "kwargs"),
    [
        ({}, "cosine", None),
        ({"min_lr": 2e-6}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ({"min_lr": 0}, "cosine", None),
        ({"lr_decay_style": "constant", "min_lr": 2e-6}, "constant_with_warmup", None),
        ({"lr_decay_style": "linear"}, "linear", None),
        ({"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 10}, "inverse_sqrt", None),
    ],
)
def test_a_schedule_of_megatron_is_that_of_transformers(settings, schedule, kwargs) -> None:
    report = of_swift(**settings)
    assert report.is_whole
    assert report.recipe.train.lr_scheduler_type == schedule
    assert report.recipe.method.trainer_args.get("lr_scheduler_kwargs") == kwargs


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"lr_decay_style": "WSD"}, "lr_decay_style"),
        ({"lr_decay_style": "inverse-square-root"}, "lr_decay_style"),
        ({"lr_decay_style": "linear", "min_lr": 1e-6}, "min_lr"),
        ({"lr_decay_iters": 50}, "lr_decay_iters"),
        ({"lr_warmup_init": 1e-6}, "lr_warmup_init"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"mcore_adapter": "run/adapter"}, "mcore_adapter"),
        ({"tensor_modle_parallel_size": 2}, "tensor_modle_parallel_size"),
    ],
)
def test_what_has_no_counterpart_is_named(settings, key) -> None:
    assert [line.key for line in of_swift(**settings).of_kind("unsupported")] == [key]


def test_a_share_of_the_steps_for_warm_up_goes_before_their_number() -> None:
    assert of_swift(lr_warmup_iters=20).recipe.train.warmup_steps == 20
    assert of_swift(lr_warmup_iters=20, lr_warmup_fraction=0.05).recipe.train.warmup_steps == 0.05
    assert of_swift().recipe.train.warmup_steps == 0


def test_epochs_go_before_steps_unless_rows_are_streamed() -> None:
    train = of_swift(max_epochs=2).recipe.train
    assert (train.num_epochs, train.max_steps) == (2, None)
    report = of_swift(max_epochs=2, streaming=True, truncation_strategy="right")
    assert (report.recipe.train.num_epochs, report.recipe.train.max_steps) == (None, 100)
    assert fates(report)["max_epochs"][0] == "different"
    (line,) = of_swift(num_train_epochs=2).unsaid
    assert "skips the last rows" in line.words


def test_megatron_weights_are_those_of_the_model_that_they_were_made_of() -> None:
    report = of_swift(model=None, load="weights/Qwen3-4B-mcore")
    assert report.recipe.model.path == "Qwen/Qwen3-4B"
    assert any("check model.path" in suspicion.words for suspicion in report.suspicious)
    Path("converted").mkdir()
    Path("converted/args.json").write_text(json.dumps({"model": "someone/model"}))
    assert of_swift(model=None, mcore_model="converted").recipe.model.path == "someone/model"
    assert fates(of_swift(mcore_model="converted"))["mcore_model"][0] == "different"


FULL_LAYOUTS = [
    ({"pipeline_model_parallel_size": 2}, {"engine": "automodel", "pp_size": 2}),
    (
        {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4, "tensor_model_parallel_size": 2},
        {"engine": "automodel", "pp_size": 2, "ep_size": 4},
    ),
    ({"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2}, {"ep_size": 4}),
    ({"expert_model_parallel_size": 4, "context_parallel_size": 2}, {"ep_size": 4}),
    ({"context_parallel_size": 2}, {"cp_size": 2}),
    ({"tensor_model_parallel_size": 8}, {}),
    ({"pipeline_model_parallel_size": 1}, {}),
]


@pytest.mark.parametrize(("layout", "parallel"), FULL_LAYOUTS)
def test_a_layout_is_that_of_an_engine_or_left_to_the_plan(layout, parallel) -> None:
    for report in (of_swift(**layout), of_llama_factory(**layout)):
        assert report.recipe.parallel.model_dump(exclude_defaults=True) == parallel
        kinds = {fates(report)[key][0] for key in layout}
        assert kinds <= {"carried", "decided", "silent"}


@pytest.mark.parametrize(
    ("settings", "key", "why"),
    [
        (LORA, "pipeline_model_parallel_size", "trains in full by sft"),
        ({"packing": True}, "pipeline_model_parallel_size", "trains without packing"),
        ({"moe_aux_loss_coeff": 1e-3}, "pipeline_model_parallel_size", "without the routers' auxiliary loss"),
        ({"fp8_format": "hybrid"}, "pipeline_model_parallel_size", "by AdamW and without float8"),
        ({"optimizer": "muon"}, "pipeline_model_parallel_size", "by AdamW and without float8"),
        ({"packing": True}, "context_parallel_size", "trains without packing"),
        ({"model": "Qwen/Qwen3-VL-8B-Instruct"}, "pipeline_model_parallel_size", "trains on text"),
        ({"model": "Qwen/Qwen3-VL-8B-Instruct"}, "expert_model_parallel_size", "rows that have images"),
        (LORA, "expert_model_parallel_size", "LoRA on attention alone"),
    ],
)
def test_a_layout_that_no_engine_has_for_a_run_is_left_to_the_plan(settings, key, why) -> None:
    report = of_swift(**settings, **{key: 2})
    kind, words = fates(report)[key]
    assert (kind, report.recipe.parallel.model_dump(exclude_defaults=True)) == ("decided", {})
    assert why in words


def test_only_sft_divides_experts_and_rows() -> None:
    report = of_swift("megatron", "rlhf", rlhf_type="dpo", expert_model_parallel_size=2, context_parallel_size=2)
    assert report.recipe.method.type == "dpo"
    assert report.recipe.parallel.model_dump(exclude_defaults=True) == {}


def test_adapters_have_the_names_of_modules_in_transformers() -> None:
    lora = {**LORA, "expert_model_parallel_size": 2}
    script = "megatron sft --model m/m --dataset d.jsonl --train_iters 1 --tuner_type lora"
    modules = "--target_modules linear_qkv linear_proj --modules_to_save word_embeddings output_layer"
    Path("run.sh").write_text(f"{script} --expert_model_parallel_size 2 {modules}\n")
    recipe = migrate("run.sh").recipe
    assert recipe.adapter.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert recipe.adapter.modules_to_save == ["embed_tokens", "lm_head"]
    assert recipe.parallel.ep_size == 2
    (line,) = of_swift(**lora).unsaid
    assert "one LoRA A for the three" in line.words
    assert of_swift(**LORA, target_modules="linear_proj").unsaid == ()


DIFFERENT = [
    ({"moe_aux_loss_coeff": 1e-3}, "moe_aux_loss_coeff", "Megatron adds the loss of every layer"),
    ({"moe_expert_capacity_factor": 2}, "moe_expert_capacity_factor", "drops tokens"),
    ({"fp8_format": "e4m3", "fp8_recipe": "blockwise"}, "fp8_format", "train.fp8: true"),
    ({"fp8_format": "e4m3", **LORA}, "fp8_format", "the recipe in bfloat16"),
    ({"exp_avg_dtype": "bf16"}, "exp_avg_dtype", "optimizer states are bf16"),
    ({"calculate_per_token_loss": False}, "calculate_per_token_loss", "averages the loss of each micro-batch"),
    ({"optimizer": "dist_muon"}, "optimizer", "train.optim: muon"),
]


@pytest.mark.parametrize(("settings", "key", "words"), DIFFERENT)
def test_what_trains_otherwise_than_in_megatron_is_said(settings, key, words) -> None:
    kind, said = fates(of_swift(**settings))[key]
    assert kind == "different"
    assert words in said


def test_levers_of_memory_and_speed_are_the_plans() -> None:
    levers = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "cross_entropy_loss_fusion": True,
        "sequence_parallel": True,
        "attention_backend": "flash",
        "optimizer_cpu_offload": True,
        "moe_permute_fusion": True,
        "no_save_optim": True,
        "finetune": True,
        "exp_avg_dtype": "fp32",
        "moe_expert_capacity_factor": 0,
    }
    report = of_swift(**levers)
    assert report.is_same
    assert {fates(report)[key][0] for key in levers} == {"decided", "silent"}


def test_packs_are_counted_in_a_step_of_preferences() -> None:
    report = of_swift("megatron", "rlhf", rlhf_type="kto", packing=True)
    assert "32 packs of rows" in fates(report)["packing"][1]
    assert of_swift(packing=True).recipe.data.packing is True


@pytest.mark.parametrize("kind", ["dpo", "kto", "rm"])
def test_dropout_that_megatron_keeps_is_said_to_be_off(kind) -> None:
    more = {"rlhf_type": kind, **LORA, "target_modules": "linear_proj"}
    report = of_swift("megatron", "rlhf", **more)
    assert report.recipe.adapter.dropout == 0
    assert "lora_dropout" in [line.key for line in report.unsaid]
    assert fates(of_swift("megatron", "rlhf", **more, lora_dropout=0.1))["lora_dropout"][0] == "different"
    distilled = {"rlhf_type": "gkd", "teacher_model": "Qwen/Qwen3-8B", "lmbda": 0, **LORA}
    assert of_swift("megatron", "rlhf", **distilled).recipe.adapter.dropout == 0.05


def test_special_tokens_are_read_from_a_file() -> None:
    key = "new_special_tokens"
    assert "no file 'tokens.txt'" in fates(of_swift(new_special_tokens="tokens.txt"))[key][1]
    Path("tokens.txt").write_text("<a>\n<b> <c>\n")
    assert of_swift(new_special_tokens="tokens.txt").recipe.model.add_special_tokens == ["<a>", "<b>", "<c>"]


def test_a_second_loss_of_dpo_stays_whatever_the_order_of_its_keys() -> None:
    for settings in ({"rpo_alpha": 0.1, "loss_type": "sigmoid"}, {"loss_type": "sigmoid", "rpo_alpha": 0.1}):
        method = of_swift("megatron", "rlhf", rlhf_type="dpo", **settings).recipe.method
        assert (method.loss_type, method.loss_weights) == (["sigmoid", "sft"], [1.0, 0.1])


@pytest.mark.parametrize("program", ["megatron", "torchrun --nproc_per_node=4 swift/cli/_megatron/{task}.py"])
def test_megatron_is_started_by_its_command_or_by_its_modules(program) -> None:
    script = program.format(task="pt") + ("" if "/" in program else " pt")
    Path("run.sh").write_text(f"{script} --model a/b --dataset rows.jsonl --train_iters 5 --lr 1e-5\n")
    report = migrate("run.sh")
    assert (report.tool, report.recipe.train.max_steps) == ("ms-swift", 5)
    assert report.recipe.data.loss_on == "all"


def test_a_file_of_keys_alone_is_known_as_megatrons() -> None:
    Path("config.yaml").write_text(json.dumps({key: value for key, value in SWIFT.items() if key != "use_hf"}))
    report = migrate("config.yaml")
    assert (report.tool, report.recipe.train.max_steps, report.recipe.adapter.type) == ("ms-swift", 100, "full")
    report = migrate("config.yaml", arguments=["megatron", "rlhf", "--rlhf_type", "dpo"])
    assert report.recipe.method.type == "dpo"


def test_devices_that_share_a_row_count_once_in_the_batch_of_llama_factory() -> None:
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    assert of_llama_factory(16, **layout).recipe.train.global_batch_size == 8
    assert of_llama_factory(16, expert_model_parallel_size=4).recipe.train.global_batch_size == 64


def test_llama_factory_averages_micro_batches_with_megatron_alone() -> None:
    def unsaid(**more: Any) -> list[str]:
        return [line.key for line in of_llama_factory(**more).unsaid]

    assert "calculate_per_token_loss" in unsaid(tensor_model_parallel_size=2)
    assert "calculate_per_token_loss" not in unsaid()
    assert "calculate_per_token_loss" not in unsaid(tensor_model_parallel_size=2, calculate_per_token_loss=True)
    Path("run.sh").write_text("USE_MCA=1 llamafactory-cli train config.yaml\n")
    unsaid()
    assert "calculate_per_token_loss" in [line.key for line in migrate("run.sh").unsaid]


def test_llama_factory_trains_by_megatrons_adam_whatever_optim_says() -> None:
    eight_bits = {"optim": "adamw_8bit"}
    assert of_llama_factory(**eight_bits).recipe.train.optim == "adamw_8bit"
    report = of_llama_factory(tensor_model_parallel_size=2, **eight_bits)
    assert (report.recipe.train.optim, fates(report)["optim"][0]) == (None, "silent")


def test_the_router_loss_of_llama_factory_with_megatron_is_the_models() -> None:
    mixtral = {"model_name_or_path": "mistralai/Mixtral-8x7B-v0.1"}
    report = of_llama_factory(expert_model_parallel_size=2, **mixtral)
    assert report.recipe.method.trainer_args["router_aux_loss_coef"] == 0.02
    assert "moe_aux_loss_coeff" in [line.key for line in report.unsaid]
    assert of_llama_factory(**mixtral).recipe.method.trainer_args["router_aux_loss_coef"] == 0.0
    report = of_llama_factory(expert_model_parallel_size=2, moe_aux_loss_coeff=0.01, **mixtral)
    assert report.recipe.method.trainer_args["router_aux_loss_coef"] == 0.01
