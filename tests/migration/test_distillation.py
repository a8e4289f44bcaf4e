"""Distillation of other tools becomes method gkd: the same divergence, on the same rows and completions."""

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.migration.test_differences import AXOLOTL, CHAT, SWIFT, TORCHTUNE, TRL, made
from tests.tiny import make_tokenizer
from tunekit.errors import RecipeError
from tunekit.migration.migration import migrate
from tunekit.migration.report import Migration

TEACHER = {
    "teacher_model": {"_component_": "torchtune.models.qwen2_5.qwen2_5_7b"},
    "teacher_checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "/tmp/Qwen2.5-7B-Instruct/",
        "checkpoint_files": ["model.safetensors"],
        "model_type": "QWEN2",
    },
    "kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss", "num_output_chunks": 8},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "packed": True},
}
GKD = {"rlhf_type": "gkd", "teacher_model": "Qwen/Qwen3-8B"}


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def line_of(report: Migration, key: str) -> Any:
    (line,) = [line for line in report.lines if line.key == key]
    return line


def divergence(name: str, **more: Any) -> dict[str, Any]:
    return {**TEACHER, "kd_loss": {"_component_": f"torchtune.modules.loss.{name}", **more}}


# torchtune


def test_torchtunes_distillation_is_learned_from_a_teacher_on_rows_alone() -> None:
    report = made(TORCHTUNE, **TEACHER, kd_ratio=0.25)
    method = report.recipe.method
    assert (method.type, method.teacher.path, method.lmbda) == ("gkd", "Qwen/Qwen2.5-7B-Instruct", 0)
    assert (method.beta, method.temperature, method.kd_ratio) == (0, 1, 0.25)
    assert report.recipe.data.packing and report.recipe.data.prompt_style == "alpaca_turn"
    assert report.is_whole


def test_torchtune_weighs_the_divergence_with_a_half_by_itself() -> None:
    report = made(TORCHTUNE, **TEACHER)
    assert report.recipe.method.kd_ratio == 0.5
    assert [one.value for one in report.assumed if one.key == "method.kd_ratio"] == [0.5]


def test_a_ratio_of_0_is_fine_tuning_without_a_teacher() -> None:
    report = made(TORCHTUNE, **TEACHER, kd_ratio=0)
    assert report.recipe.method.type == "sft"
    assert line_of(report, "kd_loss._component_").words == "no effect with kd_ratio 0"
    assert report.is_whole


@pytest.mark.parametrize(
    ("loss", "beta"),
    [
        (divergence("ForwardKLLoss"), 0),
        (divergence("ReverseKLLoss"), 1),
        (divergence("ReverseKLWithChunkedOutputLoss"), 1),
        (divergence("SymmetricKLLoss", sym_kd_ratio=1.0), 0),
        (divergence("SymmetricKLWithChunkedOutputLoss", sym_kd_ratio=0), 1),
    ],
)
def test_torchtunes_divergences_have_a_beta(loss, beta) -> None:
    report = made(TORCHTUNE, **loss)
    assert report.recipe.method.beta == beta
    assert report.is_whole


@pytest.mark.parametrize("loss", [divergence("SymmetricKLLoss"), divergence("TVDistanceLoss")])
def test_a_divergence_without_a_beta_is_named(loss) -> None:
    (line,) = made(TORCHTUNE, **loss).of_kind("unsupported")
    assert line.key == "kd_loss._component_" and "method.beta" in line.words


def test_the_gradients_of_torchtunes_divergences_are_those_of_beta_0_and_1() -> None:
    """torchtune 0.6 computes the cross-entropy to the teacher, and the reverse divergence; TRL both divergences."""
    import torch
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(0)
    student, teacher = torch.randn(1, 5, 11, requires_grad=True), torch.randn(1, 5, 11)
    own, its = student.log_softmax(-1), teacher.log_softmax(-1)
    theirs = {0.0: -(its.exp() * own).sum(-1).mean(), 1.0: -(own.exp() * its - own.exp() * own).sum(-1).mean()}
    for beta, loss in theirs.items():
        labels = torch.zeros(1, 5, dtype=torch.long)
        expected = GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta)
        (of_theirs,) = torch.autograd.grad(loss, student, retain_graph=True)
        (of_trl,) = torch.autograd.grad(expected, student, retain_graph=True)
        assert torch.allclose(of_theirs, of_trl, atol=1e-7)


def test_a_teacher_in_a_folder_of_transformers_is_loaded_from_there() -> None:
    Path("big").mkdir()
    Path("big/config.json").write_text("{}")
    folder = {**TEACHER, "teacher_checkpointer": {"checkpoint_dir": "big"}}
    report = made(TORCHTUNE, **folder)
    assert report.recipe.method.teacher.path == "big"
    assert line_of(report, "teacher_checkpointer.checkpoint_dir").kind == "carried"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"teacher_model": {"_component_": "my.own_model"}, "teacher_checkpointer": None}, "method.teacher"),
        ({"kd_loss": None}, "no kd_loss"),
    ],
)
def test_a_distillation_without_a_teacher_or_a_loss_is_an_error(change, problem) -> None:
    with pytest.raises(RecipeError, match=problem):
        made(TORCHTUNE, **TEACHER | change)


def test_the_scale_of_torchtunes_gradients_is_reported() -> None:
    (line,) = [line for line in made(TORCHTUNE, **TEACHER).different if line.key == "kd_loss"]
    assert "divides the gradients by the tokens of the step" in line.words


# ms-swift


def test_ms_swifts_gkd_has_its_defaults() -> None:
    """Of ms-swift 4.6: temperature 0.9 of both, 512 tokens, the last turn, no dropout, dropped rows."""
    report = made(SWIFT, **GKD, lora_dropout=0.1)
    recipe = report.recipe
    method = recipe.method
    assert (method.type, method.teacher.path, method.lmbda, method.beta) == ("gkd", "Qwen/Qwen3-8B", 0.5, 0.5)
    assert (method.temperature, method.generation.temperature, method.max_completion_length) == (0.9, 0.9, 512)
    assert (recipe.data.loss_on, recipe.data.too_long, recipe.adapter.dropout) == ("last", "drop", 0)
    assert line_of(report, "lora_dropout").kind == "silent"
    assert report.is_whole
    assert {line.key for line in report.different} == {"max_completion_length", "per_device_train_batch_size"}


def test_settings_of_ms_swifts_gkd_come_along() -> None:
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1}
    more = {"lmbda": 1, "beta": 0, "max_completion_length": 64, "loss_scale": "default", "teacher_model_revision": "v2"}
    report = made(SWIFT, **GKD, **sampling, **more, gradient_accumulation_steps=1)
    method = report.recipe.method
    assert (method.lmbda, method.beta, method.temperature, method.max_completion_length) == (1, 0, 0.7, 64)
    assert method.generation.model_dump() == {**sampling, "top_k": 0}
    assert (method.teacher.revision, report.recipe.data.loss_on) == ("v2", "assistant")
    assert report.is_whole
    assert not [one for one in report.suspicious if "KL penalty" in one.words]
    assert [line.key for line in report.different] == ["max_completion_length"]


@pytest.mark.parametrize("method", ["gkd", "grpo"])
def test_the_longest_completion_has_older_names(method) -> None:
    more = {**GKD, "rlhf_type": method} if method == "gkd" else {"rlhf_type": method}
    report = made(SWIFT, **more, max_new_tokens=96, max_completion_length=48)
    assert report.recipe.method.max_completion_length == 96
    assert line_of(report, "max_completion_length").words == "max_new_tokens takes precedence"


def test_rows_alone_need_no_sampling() -> None:
    sampling = {"temperature": 0.7, "top_p": 0.8, "max_completion_length": 64, "use_vllm": True, "stop_words": ["."]}
    report = made(SWIFT, **GKD, lmbda=0, **sampling, packing=True)
    method = report.recipe.method
    assert (method.lmbda, method.temperature, method.generation.temperature) == (0, 0.7, 1)
    assert {line_of(report, key).kind for key in ("top_p", "max_completion_length", "use_vllm")} == {"silent"}
    assert line_of(report, "packing").words == "ms-swift does not pack rows in gkd"
    assert report.is_whole and not report.recipe.data.packing


def test_ms_swifts_likelihood_is_a_share_of_the_loss() -> None:
    """A loss D + a L is 1 + a times D / (1 + a) + L a / (1 + a)."""
    report = made(SWIFT, **GKD, lmbda=0, sft_alpha=0.25)
    assert report.recipe.method.kd_ratio == 0.8
    assert "1.25 times as large" in line_of(report, "sft_alpha").words
    (line,) = made(SWIFT, **GKD, sft_alpha=0.25).of_kind("unsupported")
    assert line.key == "sft_alpha" and "lmbda 0" in line.words
    assert made(SWIFT, **GKD, sft_alpha=0).is_whole


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"teacher_adapters": ["out/teacher"]}, "teacher_adapters"),
        ({"gkd_logits_topk": 64}, "gkd_logits_topk"),
        ({"seq_kd": True}, "seq_kd"),
        ({"stop_words": ["."]}, "stop_words"),
    ],
)
def test_what_gkd_has_not_of_ms_swifts_is_named(more, key) -> None:
    assert [line.key for line in made(SWIFT, **GKD, **more).of_kind("unsupported")] == [key]


def test_a_teacher_is_placed_and_asked_by_the_plan() -> None:
    vllm = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_host": "127.0.0.1",
        "vllm_gpu_memory_utilization": 0.3,
    }
    report = made(SWIFT, **GKD, teacher_deepspeed="zero3", offload_teacher_model=True, seq_kd=False, **vllm)
    assert report.is_whole
    assert {line_of(report, key).kind for key in (*vllm, "teacher_deepspeed", "offload_teacher_model")} == {"decided"}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({}, "rlhf_type: a model that is its own teacher is unsupported; set teacher_model"),
        ({"teacher_model_server": "http://big:8000"}, "teacher_model_server: a teacher on a server is unsupported"),
    ],
)
def test_a_teacher_that_is_not_loaded_is_an_error(more, problem) -> None:
    with pytest.raises(RecipeError, match=rf"config\.yaml:1: {problem}"):
        made(SWIFT, rlhf_type="gkd", **more)


def test_a_teacher_of_other_methods_is_named() -> None:
    grpo = made(SWIFT, rlhf_type="grpo", teacher_model="Qwen/Qwen3-8B")
    assert [line.words for line in grpo.of_kind("unsupported")] == ["a teacher with rewards is unsupported"]
    assert line_of(made(SWIFT, rlhf_type="dpo", teacher_model="m"), "teacher_model").kind == "silent"


def test_a_distillation_on_images_comes_over_without_completions() -> None:
    images = {**GKD, "model": "Qwen/Qwen2.5-VL-7B-Instruct", "max_pixels": 1003520}
    with pytest.raises(
        RecipeError, match=r"config\.yaml(:\d+: lmbda)?: completions of rows with images are unsupported"
    ):
        made(SWIFT, **images)
    method = made(SWIFT, **{**images, "lmbda": 0}).recipe.method
    assert (method.type, method.lmbda) == ("gkd", 0)


# TRL

SCRIPT = "python examples/scripts/gkd.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name me/chats"
WITH = "--teacher_model_name_or_path Qwen/Qwen3-4B"


def of_script(*words: str) -> Migration:
    Path("run.sh").write_text(" ".join([SCRIPT, WITH, *words]) + "\n")
    return migrate("run.sh", num_devices=1)


def test_trls_gkd_has_the_defaults_of_its_config() -> None:
    from trl.experimental.gkd import GKDConfig

    defaults = {field.name: field.default for field in fields(GKDConfig)}
    recipe = of_script("--use_peft").recipe
    method = recipe.method
    assert (method.type, method.teacher.path) == ("gkd", "Qwen/Qwen3-4B")
    assert (method.lmbda, method.beta) == (defaults["lmbda"], defaults["beta"])
    assert method.generation.temperature == defaults["temperature"]
    assert method.max_completion_length == defaults["max_new_tokens"]
    assert recipe.data.max_length == defaults["max_length"]
    assert recipe.train.num_epochs == defaults["num_train_epochs"]
    assert defaults["disable_dropout"] and recipe.adapter.dropout == 0
    assert made(TRL, **{**TEACHERS, "use_peft": False}).recipe.learning_rate == defaults["learning_rate"]


TEACHERS = {"teacher_model_name_or_path": "Qwen/Qwen3-4B", "lmbda": 0.5}


def test_settings_of_trls_gkd_come_along() -> None:
    report = of_script("--lmbda 0.8 --beta 0 --temperature 0.7 --max_new_tokens 64 --use_peft --lora_dropout 0.1")
    method = report.recipe.method
    assert (method.lmbda, method.beta, method.max_completion_length) == (0.8, 0, 64)
    assert (method.temperature, method.generation.temperature) == (1, 0.7)
    assert report.is_whole and report.recipe.adapter.dropout == 0
    for switch in ("--disable_dropout false", "--no_disable_dropout"):
        assert of_script(f"--use_peft --lora_dropout 0.1 {switch}").recipe.adapter.dropout == 0.1


def test_trls_temperature_is_not_that_of_the_divergence() -> None:
    from trl.experimental.gkd import GKDTrainer

    assert "temperature" not in inspect.getsource(GKDTrainer.compute_loss)
    assert inspect.signature(GKDTrainer.generalized_jsd_loss).parameters["temperature"].default == 1


def test_trl_trains_on_the_end_of_the_last_turn() -> None:
    """As its collator lays rows out: with what the template writes after it, and cut at the start."""
    from trl.experimental.utils import DataCollatorForChatML

    tokenizer = make_tokenizer()
    turns = [("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "last")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]}]
    batch = DataCollatorForChatML(tokenizer, max_length=30)(rows)
    trained = batch["labels"][0][batch["labels"][0] != -100]
    assert tokenizer.decode(trained) == "last<|im_end|>\n"
    assert batch["input_ids"].shape == (1, 30)
    report = of_script()
    assert report.recipe.data.loss_on == "last"
    words = {line.key: line.words for line in report.different}
    assert "lose their start" in words["max_length"] and "after the end token" in words["dataset_name"]


def test_trls_draws_and_divisors_are_reported() -> None:
    assert {"lmbda", "per_device_train_batch_size", "max_new_tokens"} <= {line.key for line in of_script().different}
    assert "lmbda" not in {line.key for line in of_script("--lmbda 1").different}
    alone = {line.key for line in of_script("--lmbda 0 --temperature 0.5").different}
    assert alone == {"max_length", "dataset_name"}
    Path("run.sh").write_text(f"accelerate launch --num_processes 2 {SCRIPT.removeprefix('python ')} {WITH}\n")
    assert "num_processes" in {line.key for line in migrate("run.sh").different}


def test_what_trls_gkd_does_not_read_has_no_effect() -> None:
    report = of_script("--packing --assistant_only_loss --lmbda 0 --max_new_tokens 9 --seq_kd false")
    unread = ("packing", "assistant_only_loss", "max_new_tokens", "seq_kd")
    assert {line_of(report, key).kind for key in unread} == {"silent"}
    assert not report.recipe.data.packing and report.is_whole


def test_answers_of_a_teacher_are_to_be_put_into_the_rows() -> None:
    (line,) = of_script("--seq_kd").of_kind("unsupported")
    assert (line.key, line.words) == ("seq_kd", "put the teacher's answers into the rows")
    assert of_script("--seq_kd --lmbda 1").is_whole


def test_a_file_of_gkd_is_told_by_its_keys() -> None:
    assert made(TRL, **TEACHERS, beta=0.1).recipe.method.type == "gkd"


# Axolotl, and quantized teachers


def test_axolotls_prepared_log_probabilities_are_named() -> None:
    report = made(AXOLOTL, datasets=[CHAT], kd_trainer=True, kd_alpha=0.9, kd_online_topk=64)
    lines = report.of_kind("unsupported")
    assert {line.key for line in lines} == {"kd_trainer", "kd_alpha", "kd_online_topk"}
    assert all("method gkd loads the teacher itself" in line.words for line in lines)


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (SWIFT, {**GKD, "quant_bits": 4, "quant_method": "bnb"}),
        (TRL, {**TEACHERS, "load_in_4bit": True}),
    ],
)
def test_a_teacher_in_few_bits_is_reported(config, more) -> None:
    words = [line.words for line in made(config, **more).different if "quantizes the teacher" in line.words]
    assert len(words) == 1


def test_errors_of_methods_name_gkd() -> None:
    Path("ppo.yaml").write_text(json.dumps({**SWIFT, "rlhf_type": "ppo"}))
    with pytest.raises(RecipeError, match="distillation and gkd"):
        migrate("ppo.yaml")
