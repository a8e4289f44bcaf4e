"""Configurations of other tools become recipes: right values, every key accounted for, each fault in one line."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

import tunekit
from tests.commands import run_command
from tunekit.errors import PlanError, RecipeError
from tunekit.migration.migration import migrate
from tunekit.migration.report import Migration
from tunekit.recipe.load import load_recipe
from tunekit.recipe.sections.adapters import AdaloraAdapter, MissAdapter, VeraAdapter

CONFIGS = Path(__file__).parent / "configs"
NAMES = sorted(path.name for path in CONFIGS.iterdir())
TOOLS = {
    "axolotl": "axolotl",
    "llamafactory": "llama-factory",
    "trl": "trl",
    "torchtune": "torchtune",
    "swift": "ms-swift",
}
DOUBTFUL = [name for name in NAMES if "doubtful" in name]

# What each configuration means, worked out by hand from its file and its tool's documentation.
EXPECTED: dict[str, dict[str, Any]] = {
    "axolotl-alpaca-lora.yaml": {
        "model.path": "Qwen/Qwen2.5-7B-Instruct", "data.train.path": "data/alpaca.jsonl", "data.format": "alpaca",
        "data.eval_size": 0.1, "data.max_length": 2048, "data.packing": True,
        "adapter.type": "lora", "adapter.rank": 32,
        "adapter.alpha": 64, "adapter.dropout": 0.05, "adapter.target_modules": "all-linear",
        "train.global_batch_size": 8, "train.num_epochs": 3, "train.optim": "adamw_torch",
        "train.lr_scheduler_type": "cosine", "train.learning_rate": 2e-4, "train.warmup_steps": 20,
        "train.weight_decay": 0.01, "train.logging_steps": 5, "data.loss_on": "assistant",
    },
    "axolotl-qlora-8bit-optimizer.yaml": {
        "adapter.type": "qlora", "adapter.rank": 64, "adapter.alpha": 16,
        "adapter.target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "data.format": "messages",
        "train.optim": "paged_adamw_8bit", "train.lr_scheduler_type": "constant_with_warmup",
        "train.warmup_steps": 0.05,
        "train.global_batch_size": 8, "train.save_total_limit": 2, "data.max_length": 4096,
    },
    "axolotl-full-fsdp.yaml": {
        "adapter.type": "full", "train.global_batch_size": 16, "data.format": "sharegpt", "data.packing": True,
        "train.lr_scheduler_type": "cosine_with_min_lr", "train.max_grad_norm": 0.5, "train.seed": 7,
        "method.trainer_args": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, "parallel.strategy": "auto",
    },
    "axolotl-completion.yaml": {
        "adapter.type": "full", "data.format": "text", "data.columns": {"text": "body"}, "train.max_steps": 200,
        "train.num_epochs": None, "train.optim": "adafactor", "train.global_batch_size": 4, "train.save_steps": 50,
        "train.save_total_limit": 3, "method.trainer_args": {"neftune_noise_alpha": 5},
        "model.rope_scaling.rope_type": "linear", "model.rope_scaling.factor": 2.0,
    },
    "axolotl-dora.yaml": {
        "adapter.use_dora": True, "adapter.use_rslora": True, "adapter.modules_to_save": ["embed_tokens", "lm_head"],
        "train.optim": "adamw_bnb_8bit", "method.trainer_args": {"adam_beta2": 0.95, "adam_epsilon": 1e-6},
        "train.global_batch_size": 16, "data.eval_size": None, "adapter.layers_to_transform": [0, 1, 27],
        "adapter.rank_pattern": {"q_proj": 8, "layers.0.mlp.up_proj": 32}, "adapter.alpha_pattern": {"q_proj": 16},
        "adapter.init_lora_weights": "gaussian",
    },
    "axolotl-dpo.yaml": {
        "method.type": "dpo", "method.beta": 0.2, "data.columns": {"prompt": "question"}, "adapter.dropout": 0.0,
        "train.learning_rate": 5e-6, "train.global_batch_size": 16, "train.warmup_steps": 10,
    },
    "axolotl-kto.yaml": {
        "method.type": "kto", "method.beta": 0.3, "method.desirable_weight": 0.5, "method.undesirable_weight": 1.5,
        "adapter.type": "qlora", "adapter.rank": 8, "train.global_batch_size": 16,
    },
    "axolotl-orpo.yaml": {"method.type": "orpo", "method.beta": 0.25, "adapter.rank": 32, "train.num_epochs": 2},
    "axolotl-simpo.yaml": {
        "method.type": "cpo", "method.loss_type": "simpo", "method.beta": 2.5, "method.simpo_gamma": 1.2,
        "method.cpo_alpha": 0, "adapter.type": "full",
    },
    "axolotl-grpo.yaml": {
        "method.type": "grpo", "method.beta": 0.02, "method.num_generations": 4, "method.max_completion_length": 256,
        "method.loss_type": "dr_grpo", "method.scale_rewards": "none", "method.generation.temperature": 0.8,
        "method.generation.use_vllm": True, "method.generation.vllm_gpu_memory_utilization": 0.3,
        "train.max_steps": 100, "train.global_batch_size": 16, "data.max_length": 1024,
    },
    "axolotl-ebft.yaml": {
        "method.type": "ebft", "method.feature_layers": [0.5, 1.0], "method.embed_method": "completion_mean",
        "method.use_whitening": True, "method.alignment_coef": 1.5, "method.diversity_coef": 0.5, "method.rewards": [],
        "method.num_generations": 4, "method.max_completion_length": 200, "method.scale_rewards": "none",
        "method.loss_type": "grpo", "method.generation.temperature": 0.8, "method.generation.use_vllm": True,
        "method.generation.vllm_gpu_memory_utilization": 0.4, "data.format": "alpaca", "train.global_batch_size": 8,
        "method.trainer_args": {
            "generation_kwargs": {"stop_token_ids": [151645]}, "chat_template_kwargs": {"enable_thinking": False},
        },
        "data.columns": {"instruction": "input"}, "data.max_length": 1024,
    },
    "axolotl-reward.yaml": {
        "method.type": "reward", "method.center_rewards_coefficient": 0.01, "train.eval_steps": 50,
        "train.global_batch_size": 16,
    },
    "axolotl-mixed-sources.yaml": {
        "train.optim": "lion_8bit", "train.global_batch_size": 4, "train.num_epochs": 2, "data.max_length": 2048,
    },
    "axolotl-doubtful.yaml": {
        "data.loss_on": "all", "adapter.type": "qlora", "adapter.quant_type": "int8", "train.learning_rate": 1e-6,
        "train.num_epochs": 20, "output.name": "second-try", "model.dtype": "auto", "train.optim": None,
    },
    "axolotl-pure-bf16.yaml": {
        "adapter.type": "full", "train.pure_bf16": True, "train.optim": "adamw_torch_fused", "model.dtype": "auto",
        "train.global_batch_size": 16,
    },
    "llamafactory-lora-sft.yaml": {
        "adapter.init_lora_weights": "pissa_niter_16",
        "model.path": "Qwen/Qwen3-4B-Instruct-2507", "adapter.rank": 8, "adapter.alpha": 16, "data.max_length": 2048,
        "train.global_batch_size": 8, "train.learning_rate": 1e-4, "train.num_epochs": 3, "train.warmup_steps": 0.1,
        "train.eval_steps": 500, "train.save_steps": 500, "data.eval_size": 0.1, "train.logging_steps": 10,
    },
    "llamafactory-full-ds3.yaml": {
        "adapter.type": "full", "data.packing": True, "train.lr_scheduler_type": "cosine_with_min_lr",
        "method.trainer_args": {"lr_scheduler_kwargs": {"min_lr": 1e-6}}, "train.warmup_steps": 50,
        "train.max_grad_norm": 0.5, "train.weight_decay": 0.1, "train.seed": 1234, "train.global_batch_size": 8,
    },
    "llamafactory-qlora.yaml": {
        "adapter.type": "qlora", "adapter.rank": 16, "adapter.alpha": 16, "adapter.dropout": 0.05,
        "adapter.target_modules": ["q_proj", "v_proj"], "adapter.modules_to_save": ["embed_tokens", "lm_head"],
        "adapter.use_rslora": True, "adapter.double_quant": False, "data.loss_on": "last",
        "train.optim": "paged_adamw_32bit", "train.global_batch_size": 16, "train.lr_scheduler_type": "linear",
    },
    "llamafactory-dora.json": {
        "adapter.use_dora": True, "adapter.rank": 4, "adapter.alpha": 8, "train.max_steps": 120,
        "train.global_batch_size": 2, "train.save_total_limit": 4, "method.trainer_args": {"neftune_noise_alpha": 5},
        "data.format": "alpaca", "data.columns": {"instruction": "ask", "output": "say"}, "data.max_length": 2048,
    },
    "llamafactory-dpo.yaml": {
        "method.type": "dpo", "method.beta": 0.25, "method.loss_type": ["sigmoid", "sft"],
        "method.loss_weights": [1.0, 0.1], "adapter.dropout": 0.0, "data.format": "preference",
        "data.columns": {"prompt": "instruction"}, "train.global_batch_size": 8,
    },
    "llamafactory-orpo.yaml": {"method.type": "orpo", "method.beta": 0.05, "adapter.rank": 16, "adapter.alpha": 32},
    "llamafactory-simpo.yaml": {
        "method.type": "cpo", "method.loss_type": "simpo", "method.beta": 2.0, "method.simpo_gamma": 1.0,
        "adapter.type": "full", "train.global_batch_size": 16,
    },
    "llamafactory-kto.yaml": {
        "method.type": "kto", "method.beta": 0.2, "method.desirable_weight": 1.0, "method.undesirable_weight": 2.0,
        "data.format": "unpaired_preference", "train.global_batch_size": 8,
        "data.columns": {"prompt": "instruction", "completion": "output", "label": "kto_tag"},
    },
    "llamafactory-pure-bf16.yaml": {
        "adapter.type": "full", "train.pure_bf16": True, "train.optim": None, "train.global_batch_size": 16,
    },
    "llamafactory-reward.yaml": {"method.type": "reward", "adapter.type": "lora", "train.learning_rate": 1e-4},
    "llamafactory-pretrain.yaml": {
        "method.type": "sft", "data.format": "text", "data.packing": True, "data.max_length": 512,
        "train.global_batch_size": 16, "train.warmup_steps": 0.03, "train.optim": "muon",
    },
    "llamafactory-mixed.yaml": {
        "data.stopping_strategy": "all_exhausted", "train.max_steps": 300, "output.name": "phi-mixture",
        "adapter.alpha": 32,
    },
    "llamafactory-defaults.yaml": {
        "adapter.rank": 8, "adapter.alpha": 16, "train.num_epochs": 3, "train.learning_rate": 5e-5,
        "train.lr_scheduler_type": "linear", "train.warmup_steps": 0, "train.global_batch_size": 8,
        "data.max_length": 2048, "data.eval.path": "data/held.jsonl",
    },
    "llamafactory-doubtful.yaml": {"data.loss_on": "all", "data.packing": True, "adapter.rank": 8},
    "trl-sft-lora.yaml": {
        "adapter.rank": 32, "adapter.alpha": 16, "adapter.dropout": 0.1, "data.packing": True,
        "data.loss_on": "assistant", "train.global_batch_size": 16, "train.warmup_steps": 0.1,
        "train.logging_steps": 25, "data.max_length": 2048,
    },
    "trl-sft-full.yaml": {
        "adapter.type": "full", "data.max_length": 4096, "data.loss_on": "all", "train.num_epochs": 2,
        "train.lr_scheduler_type": "linear", "train.warmup_steps": 0, "train.global_batch_size": 8,
        "train.eval_steps": 100, "train.save_steps": 200, "train.weight_decay": 0.1, "train.seed": 3,
    },
    "trl-sft-qlora.yaml": {
        "adapter.type": "qlora", "adapter.quant_type": "fp4", "adapter.double_quant": False, "adapter.use_dora": True,
        "adapter.modules_to_save": ["embed_tokens"], "train.max_steps": 500, "train.optim": "paged_adamw_8bit",
        "adapter.rank": 8, "adapter.alpha": 8, "data.packing": False,
    },
    "trl-sft-text.yaml": {
        "data.columns": {"text": "body"}, "data.packing": True, "data.max_length": 512, "train.max_steps": 1000,
        "train.warmup_steps": 100, "train.lr_scheduler_type": "cosine_with_min_lr", "train.global_batch_size": 16,
        "method.trainer_args": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "neftune_noise_alpha": 5},
    },
    "trl-dpo.yaml": {
        "method.type": "dpo", "method.beta": 0.05, "method.loss_type": ["sigmoid", "sft"],
        "method.loss_weights": [1.0, 0.2], "method.precompute_ref_log_probs": True, "train.learning_rate": 5e-7,
        "train.global_batch_size": 16, "data.max_length": 2048,
    },
    "trl-dpo-lora.yaml": {
        "method.type": "dpo", "method.loss_type": ["ipo"], "method.beta": 0.3, "adapter.rank": 64, "adapter.alpha": 128,
        "train.learning_rate": 1e-6, "method.trainer_args": {"ld_alpha": 0.5}, "adapter.dropout": 0.0,
    },
    "trl-kto.yaml": {
        "method.type": "kto", "method.desirable_weight": 1.0, "method.undesirable_weight": 1.33, "method.beta": 0.2,
        "train.global_batch_size": 8,
    },
    "trl-orpo.sh": {
        "model.path": "Qwen/Qwen2.5-3B", "method.type": "orpo", "method.beta": 0.2, "train.num_epochs": 3,
        "adapter.target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "train.global_batch_size": 8,
    },
    "trl-reward.yaml": {"method.type": "reward", "method.center_rewards_coefficient": 0.01, "data.max_length": 2048},
    "trl-grpo.yaml": {
        "method.type": "grpo", "method.num_generations": 4, "method.max_completion_length": 256, "method.beta": 0.01,
        "method.loss_type": "grpo", "method.scale_rewards": "batch", "method.epsilon": 0.1, "method.epsilon_high": 0.28,
        "method.generation.temperature": 0.7, "method.generation.vllm_gpu_memory_utilization": 0.4,
        "method.mask_truncated_completions": True, "method.trainer_args": {"top_entropy_quantile": 0.2},
        "data.max_length": 512, "train.max_steps": 50,
    },
    "trl-rloo.sh": {
        "method.type": "rloo", "method.num_generations": 4, "method.max_completion_length": 128, "method.beta": 0.03,
        "train.learning_rate": 3e-6, "train.max_steps": 20,
    },
    "trl-gkd.sh": {
        "method.type": "gkd", "method.teacher.path": "Qwen/Qwen3-4B", "method.lmbda": 0.9, "method.beta": 1.0,
        "method.temperature": 1.0, "method.max_completion_length": 64, "method.generation.temperature": 0.9,
        "data.loss_on": "last", "adapter.rank": 64, "adapter.dropout": 0.0, "train.learning_rate": 2e-5,
        "train.global_batch_size": 16,
    },
    "trl-sft-mixture.yaml": {
        "train.max_grad_norm": 0.3, "train.global_batch_size": 32, "method.trainer_args": {"adam_beta2": 0.98},
        "output.name": "mixture-first",
    },
    "trl-doubtful.yaml": {"adapter.type": "full", "data.packing": True, "data.max_length": 1024},
    "torchtune-lora-single.yaml": {
        "model.path": "meta-llama/Llama-3.1-8B-Instruct", "adapter.rank": 8, "adapter.alpha": 16,
        "data.format": "alpaca",
        "adapter.target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "data.loss_on": "all", "data.max_length": 2048, "train.global_batch_size": 16, "train.weight_decay": 0.05,
        "train.learning_rate": 3e-4, "train.warmup_steps": 100, "train.lr_scheduler_type": "cosine",
    },
    "torchtune-full-distributed.yaml": {
        "model.path": "Qwen/Qwen2.5-7B-Instruct", "adapter.type": "full", "data.format": "messages",
        "data.packing": True, "data.max_length": 4096, "train.num_epochs": 3, "train.global_batch_size": 2,
        "train.weight_decay": 0.01, "train.lr_scheduler_type": "constant", "train.warmup_steps": 0, "train.seed": 5,
        "train.pure_bf16": True, "train.optim": "adamw_torch_fused",
    },
    "torchtune-qlora.yaml": {
        "model.path": "models/qwen", "adapter.type": "qlora", "adapter.target_modules": "all-linear",
        "train.pure_bf16": False,
        "adapter.dropout": 0.05, "data.format": "prompt_completion", "train.optim": "paged_adamw_8bit",
        "data.columns": {"prompt": "question", "completion": "reply"}, "train.weight_decay": 0.01,
    },
    "torchtune-dora.yaml": {
        "model.path": "meta-llama/Llama-3.2-1B", "adapter.use_dora": True, "adapter.rank": 64, "train.max_steps": 250,
        "method.trainer_args": {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-7},
        "train.max_grad_norm": 0.5, "data.format": "text", "data.packing": True,
    },
    "torchtune-dpo.yaml": {
        "method.type": "dpo", "method.beta": 0.2, "train.max_steps": 1000, "train.global_batch_size": 32,
        "adapter.target_modules": ["q_proj", "v_proj"], "train.warmup_steps": 100,
    },
    "torchtune-full-dpo.yaml": {
        "model.path": "Qwen/Qwen2.5-3B-Instruct", "method.type": "dpo", "method.beta": 0.05, "adapter.type": "full",
        "train.num_epochs": 2, "train.weight_decay": 0.0, "train.lr_scheduler_type": "constant",
    },
    "torchtune-gkd.yaml": {
        "model.path": "meta-llama/Llama-3.2-1B-Instruct", "method.type": "gkd",
        "method.teacher.path": "meta-llama/Llama-3.1-8B-Instruct", "method.lmbda": 0.0, "method.beta": 1.0,
        "method.kd_ratio": 0.75, "data.packing": True, "data.loss_on": "all", "adapter.rank": 16,
        "adapter.dropout": 0.1, "train.global_batch_size": 8,
    },
    "torchtune-simpo.yaml": {
        "method.type": "cpo", "method.loss_type": "simpo", "method.beta": 2.0, "method.simpo_gamma": 0.8,
    },
    "torchtune-gemma-fsdp.yaml": {
        "model.path": "google/gemma-2-9b", "adapter.rank": 32, "data.loss_on": "assistant", "train.eval_steps": 25,
        "train.num_epochs": 3, "adapter.target_modules": "all-linear",
    },
    "torchtune-phi.yaml": {
        "model.path": "microsoft/phi-4",
        "adapter.target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    },
    "torchtune-mistral-full.yaml": {
        "model.path": "mistralai/Mistral-7B-v0.1", "data.format": "sharegpt", "train.optim": "adamw_torch_fused",
        "train.weight_decay": 0.0,
    },
    "torchtune-concat.yaml": {
        "data.shuffle": False, "train.seed": 11, "train.optim": "sgd", "train.learning_rate": 1e-3,
    },
    "torchtune-doubtful.yaml": {"model.path": "Qwen/Qwen2.5-1.5B-Instruct", "train.global_batch_size": 2},
    "swift-lora-sft.sh": {
        "adapter.init_lora_weights": "olora",
        "adapter.rank": 8, "adapter.alpha": 32, "adapter.dropout": 0.05, "train.global_batch_size": 16,
        "train.eval_steps": 50, "train.save_steps": 50, "train.save_total_limit": 5, "train.warmup_steps": 0.05,
        "train.weight_decay": 0.1, "method.trainer_args": {"adam_beta2": 0.95}, "data.max_length": 2048,
    },
    "swift-full-zero3.sh": {
        "adapter.type": "full", "train.global_batch_size": 32, "data.packing": True, "data.eval_size": 0.05,
        "data.max_length": 8192, "train.learning_rate": 1e-5, "train.num_epochs": 2,
    },
    "swift-qlora.json": {
        "adapter.type": "qlora", "adapter.quant_type": "fp4", "adapter.double_quant": False, "adapter.rank": 16,
        "adapter.target_modules": ["q_proj", "v_proj"], "adapter.modules_to_save": ["embed_tokens"],
        "data.loss_on": "last", "train.global_batch_size": 16,
    },
    "swift-dora.yaml": {
        "adapter.use_dora": True, "adapter.use_rslora": True, "adapter.rank": 32, "adapter.alpha": 32,
        "adapter.target_modules": r".*\.self_attn\.[qv]_proj",
        "train.global_batch_size": 16, "data.eval.path": "data/held.jsonl",
    },
    "swift-pretrain.sh": {
        "data.loss_on": "all", "train.max_steps": 1000, "train.num_epochs": None, "train.global_batch_size": 16,
    },
    "swift-dpo.sh": {
        "method.type": "dpo", "method.beta": 0.2, "method.loss_type": ["hinge"], "train.global_batch_size": 16,
        "adapter.dropout": 0.0,
    },
    "swift-dpo-mixed.yaml": {
        "method.loss_type": ["sigmoid", "sft"], "method.loss_weights": [1.0, 0.5], "adapter.type": "full",
    },
    "swift-kto.sh": {
        "method.type": "kto", "method.beta": 0.15, "method.undesirable_weight": 2.0, "train.global_batch_size": 16,
    },
    "swift-orpo.yaml": {"method.type": "orpo", "method.beta": 0.3, "adapter.rank": 8, "adapter.alpha": 32},
    "swift-simpo.yaml": {
        "method.type": "cpo", "method.loss_type": "simpo", "method.beta": 2.0, "method.simpo_gamma": 1.0,
    },
    "swift-reward.sh": {
        "method.type": "reward", "method.center_rewards_coefficient": 0.02, "adapter.rank": 16,
        "train.learning_rate": 1e-4, "train.global_batch_size": 16,
    },
    "swift-classification.sh": {
        "method.type": "classification", "method.num_labels": 3, "method.problem_type": "multi_label_classification",
        "data.too_long": "truncate", "adapter.type": "lora", "train.global_batch_size": 16,
    },
    "swift-grpo.sh": {
        "method.type": "grpo", "method.num_generations": 8, "method.max_completion_length": 2048, "method.beta": 0.0,
        "method.loss_type": "dapo", "method.epsilon_high": 0.28, "method.mask_truncated_completions": True,
        "method.generation.temperature": 1.0, "method.generation.use_vllm": True, "train.global_batch_size": 32,
        "data.max_length": 3072,
    },
    "swift-gkd.sh": {
        "method.type": "gkd", "method.teacher.path": "Qwen/Qwen2.5-14B-Instruct", "method.lmbda": 0.25,
        "method.beta": 0.5, "method.temperature": 0.8, "method.max_completion_length": 256,
        "method.generation.temperature": 0.8, "method.generation.top_p": 0.95, "data.loss_on": "last",
        "data.too_long": "drop", "adapter.rank": 8, "adapter.dropout": 0.0, "train.global_batch_size": 16,
    },
    "swift-doubtful.sh": {"adapter.type": "lora", "train.warmup_steps": 5, "train.learning_rate": 1e-6},
}  # fmt: skip


def save(path: Path, *rows: dict[str, Any]) -> None:
    texts = [json.dumps(row) for row in rows]
    lines = [text.replace("Who?", f"Who {n}?").replace("Add", f"{n}: add") for text in texts for n in range(400)]
    path.write_text("\n".join(lines))


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    """A folder with the rows, the functions and the model that the configurations name, and no network."""
    (tmp_path / "data").mkdir()
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    save(tmp_path / "data/alpaca.jsonl", {"instruction": "Add 1 and 2.", "input": "", "output": "3"})
    save(tmp_path / "data/held.jsonl", {"instruction": "Add 2 and 2.", "input": "", "output": "4"})
    save(tmp_path / "data/ask.jsonl", {"ask": "Add 1 and 2.", "say": "3"})
    save(tmp_path / "data/opencode.jsonl", {"input": "Add 1 and 2.", "output": "3", "domain": "sums"})
    save(tmp_path / "data/messages.jsonl", {"messages": chat})
    save(tmp_path / "data/messages2.jsonl", {"messages": chat})
    turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]
    save(tmp_path / "data/sharegpt.jsonl", {"conversations": turns})
    save(tmp_path / "data/text.jsonl", {"body": "Once upon a time."})
    save(tmp_path / "data/text2.jsonl", {"text": "Once upon a time."})
    (tmp_path / "data/plain.txt").write_text("Once upon a time.\n\n\n" * 32)
    save(tmp_path / "data/questions.jsonl", {"question": "Who?", "reply": "I."})
    save(tmp_path / "data/questions2.jsonl", {"prompt": "Who?", "completion": "I."})
    save(tmp_path / "data/pairs.jsonl", {"question": "Who?", "chosen": "I.", "rejected": "No."})
    save(tmp_path / "data/pairs3.jsonl", {"prompt": "Who?", "chosen": "I.", "rejected": "No."})
    save(tmp_path / "data/better.jsonl", {"instruction": "Who?", "chosen": "I.", "rejected": "No."})
    other = [chat[0], {"role": "assistant", "content": "No."}]
    save(tmp_path / "data/chosen.jsonl", {"chosen": chat, "rejected": other})
    good, bad = ({"prompt": "Who?", "completion": text, "label": text == "I."} for text in ("I.", "No."))
    save(tmp_path / "data/ratings.jsonl", good, bad)
    rated = ({"instruction": "Who?", "output": text, "kto_tag": text == "I."} for text in ("I.", "No."))
    save(tmp_path / "data/rated.jsonl", *rated)
    save(tmp_path / "data/labeled.jsonl", {"messages": [chat[0]], "label": [0, 2]})
    save(tmp_path / "data/prompts.jsonl", {"prompt": "1 + 1?", "answer": "2", "solution": "2"})
    info = {
        "chats": {"file_name": "messages.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"},
                  "tags": {"role_tag": "role", "content_tag": "content"}},
        "alpacas": {"file_name": "alpaca.jsonl"},
        "held": {"file_name": "held.jsonl"},
        "columns": {"file_name": "ask.jsonl", "columns": {"prompt": "ask", "response": "say"}},
        "better": {"file_name": "better.jsonl", "ranking": True,
                   "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}},
        "rated": {"file_name": "rated.jsonl", "columns": {"kto_tag": "kto_tag"}},
        "stories": {"file_name": "text2.jsonl", "columns": {"prompt": "text"}},
    }  # fmt: skip
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "my_rewards.py").write_text(
        "def right(completions, **columns):\n    return [1.0 for _ in completions]\n"
    )
    (tmp_path / "models/qwen").mkdir(parents=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "models/qwen/config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


RATES = {
    "sft": (2e-5, 2e-4), "dpo": (5e-7, 5e-6), "kto": (5e-7, 5e-6), "orpo": (5e-6, 5e-5), "cpo": (1e-6, 1e-5),
    "reward": (1e-5, 1e-4), "classification": (1e-5, 1e-4), "grpo": (1e-6, 1e-5), "rloo": (1e-6, 1e-5),
    "distillation": (1e-6, 1e-5), "gkd": (2e-5, 2e-4),
}  # fmt: skip
"""What a recipe that gives no learning rate trains with: all weights, and adapters."""


def value_of(made: Migration, key: str) -> Any:
    at: Any = made.recipe.model_dump()
    for part in key.split("."):
        at = at[part]
    if key == "train.learning_rate" and at is None:
        full, lora = RATES[made.recipe.method.type]
        return full if made.recipe.adapter.type == "full" else lora
    return at


def line_of(made: Migration, key: str) -> Any:
    (line,) = [line for line in made.lines if line.key == key]
    return line


def test_there_are_sixty_configurations_and_each_has_its_expected_values() -> None:
    assert len(NAMES) >= 60
    assert sorted(EXPECTED) == NAMES
    for tool in TOOLS:
        assert sum(name.startswith(tool) for name in NAMES) >= 12


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_becomes_the_recipe_that_it_means(name) -> None:
    made = migrate(CONFIGS / name)
    assert made.tool == TOOLS[name.partition("-")[0]]
    found = {key: value_of(made, key) for key in EXPECTED[name]}
    expected = {
        key: [value] if key == "method.loss_type" and isinstance(found[key], list) and isinstance(value, str) else value
        for key, value in EXPECTED[name].items()
    }
    assert found == expected


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_loads_as_it_was_made_and_has_a_plan(name) -> None:
    made = migrate(CONFIGS / name)
    Path("made.yaml").write_text(made.text)
    loaded = load_recipe("made.yaml")
    named = loaded.output.name if made.recipe.output.name is None else made.recipe.output.name
    assert loaded == made.recipe.model_copy(update={"output": made.recipe.output.model_copy(update={"name": named})})
    try:
        tunekit.plan("made.yaml", on="8xh100")
    except PlanError:
        assert tunekit.plan("made.yaml", on="h100").recipe.model == loaded.model


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_the_file_is_accounted_for_once(name) -> None:
    made = migrate(CONFIGS / name)
    keys = [line.key for line in made.lines]
    assert len(keys) == len(set(keys))
    assert all(line.words for line in made.lines)
    text = (CONFIGS / name).read_text().splitlines()
    for line in made.lines:
        last = line.key.rpartition(".")[2].partition("[")[0]
        assert last.replace("_", "") in text[line.line - 1].replace("_", "").replace("-", ""), line
    kinds = [made.of_kind(kind) for kind in ("carried", "decided", "different", "unsupported", "silent")]
    assert sum(map(len, kinds)) == len(made.lines)


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_says_no_default(name) -> None:
    made = migrate(CONFIGS / name)
    stated = [line.split("#")[0].strip() for line in made.text.splitlines()]
    defaults = (
        "lr_scheduler_type: cosine",
        "loss_on: assistant",
        "packing: false",
        "max_grad_norm: 1.0",
        "strategy: auto",
    )
    assert not set(stated) & set(defaults)
    assert "num_epochs: 1.0" not in stated


UNSUPPORTED = {
    "axolotl-doubtful.yaml": {
        "lora_dropuot": "unknown key of Axolotl; did you mean 'lora_dropout'?",
        "optimizer": "train.optim must be one of",
    },
    "llamafactory-doubtful.yaml": {
        "lora_ranks": "did you mean 'lora_rank'?",
        "use_galore": "galore_adamw trains all weights: adapter lora has none for it",
    },
    "trl-doubtful.yaml": {
        "load_in_4bit": "4-bit weights need an adapter to train",
        "max_lenght": "did you mean 'max_length'?",
        "group_by_length": "grouping rows by length is unsupported",
    },
    "torchtune-doubtful.yaml": {
        "dataset.new_system_prompt": "set system messages in the rows",
        "gradient_acumulation_steps": "did you mean 'gradient_accumulation_steps'?",
        "lr_scheduler._component_": "get_exponential_schedule: `tunekit explain train.lr_scheduler_type` lists",
    },
    "swift-doubtful.sh": {
        "train_type": "longlora is unsupported",
        "learning_rat": "did you mean 'learning_rate'?",
    },
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_cannot_be_had_is_named_with_its_line(name) -> None:
    made = migrate(CONFIGS / name)
    found = {line.key.partition("[")[0]: line.words for line in made.of_kind("unsupported")}
    assert found.keys() == UNSUPPORTED[name].keys()
    for key, words in UNSUPPORTED[name].items():
        assert words in found[key]


SUSPICIOUS = {
    "axolotl-doubtful.yaml": [
        "learning rate 1e-06 is low for LoRA", "20 epochs", "train_on_inputs", "sample_packing without flash",
        "conversation: is deprecated", "warmup_steps 10 and warmup_ratio 0.1 are both set",
        "bf16 and fp16 are both on", "without embed_tokens and lm_head in lora_modules_to_save",
        "the number of devices is not in the file",
    ],
    "axolotl-mixed-sources.yaml": ["rows are shuffled twice"],
    "llamafactory-doubtful.yaml": [
        "learning rate 1e-06 is low for LoRA", "packing without neat_packing", "train_on_prompt",
        "template llama3 is for another family than the model", "bf16 and fp16 are both on",
    ],
    "llamafactory-defaults.yaml": ["template default is not the model's own"],
    "trl-doubtful.yaml": ["lora settings without use_peft", "load_in_4bit without use_peft", "packing without flash"],
    "torchtune-doubtful.yaml": ["max_seq_len is null", "train_on_input is on", "learning rate 1e-06 is low for LoRA"],
    "swift-doubtful.sh": [
        "learning rate 1e-06 is low for LoRA", "packing without flash", "names refer to the ModelScope hub",
        "warmup_steps 5 and warmup_ratio 0.1 are both set",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SUSPICIOUS))
def test_what_looks_wrong_in_the_original_is_said(name) -> None:
    words = [one.words for one in migrate(CONFIGS / name).suspicious]
    for expected in SUSPICIOUS[name]:
        assert any(expected in said for said in words), (expected, words)


def test_a_plain_configuration_is_carried_over_whole() -> None:
    made = migrate(CONFIGS / "axolotl-alpaca-lora.yaml")
    assert made.is_whole
    assert line_of(made, "lora_r").words == "adapter.rank: 32"
    assert line_of(made, "lora_r").line == 18
    assert line_of(made, "gradient_accumulation_steps").words == (
        "the plan splits train.global_batch_size 8 into micro-batches that fit"
    )
    assert line_of(made, "gradient_checkpointing").kind == "decided"
    assert line_of(made, "wandb_project").kind == "silent"
    assert made.text == (
        "# from Axolotl: axolotl-alpaca-lora.yaml\n"
        "model: Qwen/Qwen2.5-7B-Instruct\n"
        "data:\n"
        "  train: data/alpaca.jsonl\n"
        "  format: alpaca\n"
        "  max_length: 2048\n"
        "  too_long: drop\n"
        "  packing: true\n"
        "  prompt_style: alpaca\n"
        "  eval_size: 0.1\n"
        "adapter:\n"
        "  type: lora\n"
        "  rank: 32\n"
        "  alpha: 64.0\n"
        "  dropout: 0.05\n"
        "train:\n"
        "  num_epochs: 3.0\n"
        "  global_batch_size: 8  # was micro_batch_size 2 x gradient_accumulation_steps 4, for one device\n"
        "  warmup_steps: 20.0\n"
        "  optim: adamw_torch\n"
        "  weight_decay: 0.01\n"
        "  logging_steps: 5\n"
    )


def test_axolotls_muon_comes_along_with_a_word_on_the_size_of_its_updates(tmp_path) -> None:
    asked = (CONFIGS / "axolotl-alpaca-lora.yaml").read_text().replace("optimizer: adamw_torch", "optimizer: muon")
    (tmp_path / "axolotl.yaml").write_text(asked)
    made = migrate(tmp_path / "axolotl.yaml")
    assert made.recipe.train.optim == "muon"
    assert any("set train.learning_rate as for AdamW" in one.words for one in made.suspicious)


LOW_RANK = {
    "LLaMA-Factory": (
        "llamafactory-pretrain.yaml", ("use_muon: true", "use_apollo: true\napollo_rank: 1\napollo_scale_type: tensor"),
        "apollo_adamw", {"rank": 1, "update_proj_gap": 200, "scale": 32.0, "scale_type": "tensor"}, None,
    ),
    "LLaMA-Factory, parts": (
        "llamafactory-pretrain.yaml", ("use_muon: true", "use_galore: true\ngalore_target: attn,mlp.up"),
        "galore_adamw", {"rank": 16, "update_proj_gap": 200, "scale": 2.0}, ["attn", r"mlp\.up"],
    ),
    "TRL": (
        "trl-sft-full.yaml",
        ("learning_rate:", "optim: galore_adamw\noptim_args: rank=64, update_proj_gap=100\n"
         "optim_target_modules: ['.*.attn.*', mlp]\nlearning_rate:"),
        "galore_adamw", {"rank": 64, "update_proj_gap": 100}, [".*.attn.*", "mlp"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", LOW_RANK)
def test_galore_and_apollo_come_along_with_their_arguments(tool, tmp_path) -> None:
    name, (old, new), optim, args, modules = LOW_RANK[tool]
    text = (CONFIGS / name).read_text()
    assert text.count(old) == 1
    (tmp_path / name).write_text(text.replace(old, new))
    train = migrate(tmp_path / name).recipe.train
    assert (train.optim, train.optim_args.model_dump(exclude_unset=True)) == (optim, args)
    assert train.optim_target_modules == modules


def test_llama_factorys_adam_mini_comes_along(tmp_path) -> None:
    text = (CONFIGS / "llamafactory-pretrain.yaml").read_text().replace("use_muon", "use_adam_mini")
    (tmp_path / "full.yaml").write_text(text)
    assert migrate(tmp_path / "full.yaml").recipe.train.optim == "adam_mini"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("galore_proj_type: reverse_std", "tunekit supports only std"),
        ("galore_layerwise: true", "unsupported with galore"),
    ],
)
def test_what_tunekits_galore_has_not_is_unsupported(key, words, tmp_path) -> None:
    text = (CONFIGS / "llamafactory-pretrain.yaml").read_text().replace("use_muon: true", f"use_galore: true\n{key}")
    (tmp_path / "full.yaml").write_text(text)
    (line,) = migrate(tmp_path / "full.yaml").of_kind("unsupported")
    assert line.key == key.partition(":")[0] and words in line.words


def test_a_trl_file_without_a_batch_size_has_trls(tmp_path) -> None:
    (tmp_path / "sft.yaml").write_text("model_name_or_path: a/b\ndataset_name: c/d\ngradient_accumulation_steps: 3\n")
    made = migrate(tmp_path / "sft.yaml", tool="trl")
    (size,) = (field.default for field in fields(TrainingArguments) if field.name == "per_device_train_batch_size")
    assert made.recipe.train.global_batch_size == 3 * size


def test_epochs_count_where_transformers_own_default_of_steps_is_written_down(tmp_path) -> None:
    config = "model_name_or_path: a/b\ndataset_name: c/d\nnum_train_epochs: 5\n"
    (tmp_path / "sft.yaml").write_text(f"{config}max_steps: {TrainingArguments.max_steps}\n")
    train = migrate(tmp_path / "sft.yaml", tool="trl").recipe.train
    assert (train.num_epochs, train.max_steps) == (5, None)


def test_devices_multiply_the_batch_of_a_step() -> None:
    made = migrate(CONFIGS / "axolotl-alpaca-lora.yaml", num_devices=8)
    assert made.recipe.train.global_batch_size == 64
    assert "# was micro_batch_size 2 x gradient_accumulation_steps 4 x 8 devices" in made.text
    assert not any("the number of devices" in one.words for one in made.suspicious)


def test_what_a_tool_does_by_itself_is_said_in_the_recipe_and_the_report() -> None:
    made = migrate(CONFIGS / "llamafactory-defaults.yaml")
    assumed = {one.key: one.value for one in made.assumed}
    assert assumed["train.learning_rate"] == 5e-5
    assert assumed["train.lr_scheduler_type"] == "linear"
    assert "lr_scheduler_type: linear" in made.text


def test_several_sources_keep_their_shapes_and_weights() -> None:
    mixed = migrate(CONFIGS / "axolotl-mixed-sources.yaml").recipe.data
    assert [(one.path, one.format, one.columns) for one in mixed.sources] == [
        ("data/alpaca.jsonl", "alpaca", {}),
        ("data/questions.jsonl", "prompt_completion", {"prompt": "question", "completion": "reply"}),
    ]
    assert [one.path for one in mixed.eval_sources] == ["data/held.jsonl"]
    weighted = migrate(CONFIGS / "llamafactory-mixed.yaml").recipe.data
    assert [(one.path, one.weight) for one in weighted.sources] == [
        ("data/messages.jsonl", 0.75),
        ("data/alpaca.jsonl", 0.25),
    ]


def test_rewards_become_those_of_tunekit_and_functions_of_the_users_own() -> None:
    method = migrate(CONFIGS / "trl-grpo.yaml").recipe.method
    assert [(one.type, one.weight) for one in method.rewards] == [("function", 1.0), ("regex", 0.5)]
    assert method.rewards[0].path == "my_rewards:right"
    method = migrate(CONFIGS / "swift-grpo.sh").recipe.method
    assert [(one.type, one.weight) for one in method.rewards] == [("math", 1.0), ("regex", 0.5)]


def test_a_hub_data_set_keeps_its_configuration_and_its_slice(tmp_path) -> None:
    script = "swift sft --model Qwen/Qwen3-4B --dataset someone/rows:en#200 --max_length 512 --use_hf true\n"
    (tmp_path / "run.sh").write_text(script)
    (source,) = migrate(tmp_path / "run.sh").recipe.data.sources
    assert (source.path, source.name, source.max_samples, source.sampling) == ("someone/rows", "en", 200, "random")


def test_a_script_is_read_with_its_variables_its_defaults_and_its_quotients(tmp_path) -> None:
    script = (
        "devices=2\n"
        "export MODEL=Qwen/Qwen3-4B\n"
        "# swift sft --model other\n"
        "NPROC_PER_NODE=$devices \\\n"
        "swift sft \\\n"
        "  --model ${MODEL} \\\n"
        "  # its rows\n"
        "  --dataset ${ROWS:-data/messages.jsonl} \\\n"
        "  --gradient_accumulation_steps $(expr 16 / $devices) \\\n"
        "  --max_length 512 > log.txt 2>&1\n"
    )
    (tmp_path / "run.sh").write_text(script)
    made = migrate(tmp_path / "run.sh")
    assert (made.recipe.model.path, made.recipe.data.sources[0].path) == ("Qwen/Qwen3-4B", "data/messages.jsonl")
    assert made.recipe.train.global_batch_size == 16
    assert line_of(made, "max_length").value == 512
    assert line_of(made, "max_length").line == 10


def test_a_file_that_a_command_names_is_read_with_what_the_command_says_besides(tmp_path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sft.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-4B\n"
        "dataset_name: someone/rows\n"
        "learning_rate: 1.0e-5\n"
        "num_processes: 4\n"
        "per_device_train_batch_size: 2\n"
    )
    script = tmp_path / "configs" / "run.sh"
    script.write_text("trl sft --config sft.yaml --learning_rate 3e-5\n")
    made = migrate(script)
    assert made.path == str(tmp_path / "configs" / "sft.yaml")
    assert (made.recipe.model.path, made.recipe.train.learning_rate) == ("Qwen/Qwen3-4B", 3e-5)
    assert made.recipe.train.global_batch_size == 8
    assert [line_of(made, key).line for key in ("dataset_name", "learning_rate")] == [2, 0]
    script.write_text("llamafactory-cli train more.yaml\n")
    with pytest.raises(RecipeError, match=r"run\.sh: the command reads more\.yaml: file not found; put it next to"):
        migrate(script)
    (tmp_path / "configs" / "more.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\ndataset: identity\n"
    )
    assert migrate(script).tool == "llama-factory"


SWIFTS = [
    "NPROC_PER_NODE=2 swift sft {}",
    "torchrun --nproc_per_node=2 swift/cli/sft.py {}",
    "accelerate launch --num_processes 2 -m swift.cli.sft {}",
    "NPROC_PER_NODE=2 \\\nswift sft \\\n  {} \\\n",
]


@pytest.mark.parametrize("script", SWIFTS)
def test_ms_swift_is_started_by_its_command_or_by_its_modules(script, tmp_path) -> None:
    rest = "--model Qwen/Qwen3-4B --dataset someone/rows --per_device_train_batch_size 2"
    rest += " --gradient_accumulation_steps 3"
    (tmp_path / "run.sh").write_text(script.format(rest))
    made = migrate(tmp_path / "run.sh")
    assert (made.tool, made.recipe.model.path) == ("ms-swift", "Qwen/Qwen3-4B")
    assert made.recipe.train.global_batch_size == 12


def test_a_quoted_address_of_a_script_of_trl_is_read(tmp_path) -> None:
    address = "https://raw.githubusercontent.com/huggingface/trl/main/trl/scripts/sft.py"
    (tmp_path / "run.sh").write_text(f'uv run "{address}" --model_name_or_path a/b --dataset_name c/d --packing\n')
    made = migrate(tmp_path / "run.sh")
    assert (made.tool, made.recipe.data.packing) == ("trl", True)


TRLS = "python examples/scripts/{}.py --model_name_or_path a/b --dataset_name c/d --learning_rate 1e-5 {}\n"


@pytest.mark.parametrize(
    ("name", "arguments", "fields"),
    [
        ("gmpo", "--epsilon 0.3 --num_generations 4 --top_k 7", {"epsilon": 0.3, "num_generations": 4}),
        (
            "prm",
            "--step_separator @@ --train_on_last_step_only",
            {"step_separator": "@@", "train_on_last_step_only": True},
        ),
    ],
)
def test_fields_of_methods_that_trl_has_in_scripts_alone_are_carried_over(name, arguments, fields, tmp_path) -> None:
    (tmp_path / "run.sh").write_text(TRLS.format(name, arguments))
    method = migrate(tmp_path / "run.sh").recipe.method
    assert (method.type, {key: dict(method)[key] for key in fields}) == (name, fields)
    assert name == "prm" or method.generation.top_k == 7


@pytest.mark.parametrize("name", ["sdft", "gold"])
def test_arguments_of_a_trainer_that_mean_something_else_are_not_half_read(name, tmp_path) -> None:
    (tmp_path / "run.sh").write_text(TRLS.format(name, ""))
    with pytest.raises(RecipeError, match=f"{name}: arguments of TRL's trainer for {name} cannot be carried over"):
        migrate(tmp_path / "run.sh")


def test_the_command_line_of_the_other_tool_goes_before_the_file() -> None:
    made = migrate(CONFIGS / "trl-sft-full.yaml", arguments=["trl", "orpo", "--beta", "0.4", "--seed", "9"])
    assert made.recipe.method.type == "orpo"
    assert made.recipe.method.beta == 0.4
    assert made.recipe.train.seed == 9


def ebft_config(tmp_path: Any, *changes: tuple[str, str]) -> Any:
    """Write Axolotl's configuration of ebft with changes of its text."""
    text = (CONFIGS / "axolotl-ebft.yaml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "ebft.yaml").write_text(text)
    return tmp_path / "ebft.yaml"


def test_the_strided_mode_of_ebft_is_refused(tmp_path) -> None:
    path = ebft_config(tmp_path, ("ebft:\n", "ebft:\n  mode: strided\n"))
    with pytest.raises(RecipeError, match=r"ebft\.yaml:4: ebft\.mode: strided generates at many places of a text"):
        migrate(path)


def test_limits_of_completions_by_the_length_of_answers_are_noted_where_axolotl_has_them(tmp_path) -> None:
    made = migrate(ebft_config(tmp_path))
    assert "only used with trl.async_prefetch" in line_of(made, "ebft.adaptive_max_tokens").words
    ahead = ("  temperature: 0.8\n", "  temperature: 0.8\n  async_prefetch: true\n")
    made = migrate(ebft_config(tmp_path, ahead, ("  adaptive_max_tokens: true\n", "  gt_length_multiplier: 2.0\n")))
    assert "by the model of each step" in line_of(made, "trl.async_prefetch").words
    (note,) = [line for line in made.unsaid if line.key == "ebft.adaptive_max_tokens"]
    assert "limits the completions of a batch to 2.0 times" in note.words


def test_stop_tokens_of_vllm_are_refused_where_it_does_not_generate(tmp_path) -> None:
    made = migrate(ebft_config(tmp_path, ("use_vllm: true", "use_vllm: false")))
    assert "is an argument of vLLM" in line_of(made, "trl.generation_kwargs.stop_token_ids").words
    assert made.recipe.method.trainer_args == {"chat_template_kwargs": {"enable_thinking": False}}


def test_a_function_that_is_not_there_is_named_and_left_out(tmp_path) -> None:
    (tmp_path / "my_rewards.py").unlink()
    made = migrate(CONFIGS / "axolotl-grpo.yaml")
    assert "unknown reward: my_rewards.right" in line_of(made, "trl.reward_funcs").words
    assert any("grpo has no rewards yet" in one.words for one in made.suspicious)


BROKEN = {
    "empty.yaml": ("", r"empty\.yaml: is empty; pass a configuration of Axolotl"),
    "list.yaml": ("- a\n- b\n", r"list\.yaml: is a list, not a YAML mapping"),
    "word.yaml": ("hello\n", r"word\.yaml: is a single value, not a YAML mapping"),
    "syntax.yaml": ("base_model: [a\n", r"syntax\.yaml:1:13: unclosed '\['"),
    "syntax.json": ('{"model": ', r"syntax\.json:1"),
    "twice.yaml": ("base_model: a\nbase_model: b\n", r"twice\.yaml:2:1: base_model: duplicate key, first at line 1"),
    "config.py": ("model = 'a'\n", r"config\.py: is a Python program, not a configuration"),
    "other.yaml": (
        "services:\n  web: 1\nvolumes: 2\n",
        r"not a configuration of a known tool: it has services, volumes",
    ),
    "run.sh": ("python train.py --lr 1\n", r"run\.sh: no command of a known tool"),
    "quote.sh": ("swift sft --model 'a\n", r"quote\.sh:1: no closing quotation"),
    "words.sh": ("swift sft model\n", r"words\.sh:1: 'model' has no --key"),
    "no-rows.yaml": (
        "model_name_or_path: a\nstage: sft\nfinetuning_type: lora\n",
        r"no-rows\.yaml: no training rows; required in a recipe",
    ),
    "no-model.yaml": (
        "sequence_len: 8\nmicro_batch_size: 1\ndatasets: [{path: a}]\n",
        r"no-model\.yaml: no model",
    ),
    "ppo.yaml": (
        "model_name_or_path: a\nstage: ppo\nfinetuning_type: lora\ndataset: b\n",
        r"ppo\.yaml:2: stage: method ppo is unsupported; available: sft, dpo",
    ),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_what_is_no_configuration_is_refused_in_one_line(name) -> None:
    text, message = BROKEN[name]
    Path(name).write_text(text)
    with pytest.raises(RecipeError, match=message) as raised:
        migrate(name)
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path) -> None:
    with pytest.raises(RecipeError, match=r"gone\.yaml: file not found"):
        migrate("gone.yaml")
    with pytest.raises(RecipeError, match="data: is a folder, not a configuration"):
        migrate("data")
    Path("binary.yaml").write_bytes(b"\0\1")
    with pytest.raises(RecipeError, match=r"binary\.yaml: is a binary file"):
        migrate("binary.yaml")
    Path("latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(RecipeError, match=r"latin\.yaml:1: is not UTF-8 text"):
        migrate("latin.yaml")


def test_a_configuration_that_could_be_of_two_tools_asks_whose_it_is() -> None:
    Path("both.yaml").write_text(
        "model_name_or_path: pico\nlora_rank: 8\nlora_target: all\nlora_r: 4\nuse_peft: true\n"
    )
    with pytest.raises(RecipeError, match="has keys of LLaMA-Factory and TRL; pass the tool with --from"):
        migrate("both.yaml")
    with pytest.raises(RecipeError, match="--from axlotl: no such tool; available: axolotl, llama-factory"):
        migrate("both.yaml", tool="axlotl")


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_command("migrate", *arguments)


def test_the_command_prints_the_report_and_writes_a_recipe_that_is_not_there_yet() -> None:
    config = str(CONFIGS / "axolotl-doubtful.yaml")
    answer = run(config, "-o", "mine.yaml", "--num-devices", "2")
    assert answer.returncode == 0, answer.stderr
    titles = ("carried over", "decided by tunekit", "unsupported", "suspicious in the original", "without effect")
    order = [answer.stdout.index(title, answer.stdout.index("# from Axolotl")) for title in titles]
    assert order == sorted(order)
    assert "did you mean 'lora_dropout'?" in answer.stdout
    assert load_recipe("mine.yaml").train.global_batch_size == 4
    again = run(config, "-o", "mine.yaml")
    assert (again.returncode, again.stderr) == (2, "'mine.yaml' already exists; pass another file, or delete it\n")


def test_the_command_prints_json_and_one_line_of_an_error() -> None:
    answer = run(str(CONFIGS / "trl-sft-full.yaml"), "--json", "--", "trl", "orpo", "--beta", "0.4")
    report = json.loads(answer.stdout)
    assert report["tool"] == "trl"
    line = {"kind": "carried", "key": "beta", "value": 0.4, "line": 0, "words": "method.beta: 0.4", "remedy": ""}
    assert line in report["keys"]
    refused = run("nothing.yaml")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


def test_migrating_imports_no_torch() -> None:
    code = f"import sys, tunekit; tunekit.migrate({str(CONFIGS / 'trl-grpo.yaml')!r}); "
    code += "assert not {'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


TRACKED = [
    ("axolotl-alpaca-lora.yaml", "wandb_project:", "use_mlflow: true\nwandb_project: trials\nwandb_watch: gradients",
     ["mlflow", "wandb"], {"wandb_project": "WANDB_PROJECT=trials", "wandb_watch": "weights and gradients do not"}),
    ("llamafactory-lora-sft.yaml", "report_to: none", "report_to: [tensorboard, swanlab]",
     ["tensorboard"], {"report_to": "no swanlab: metrics are kept in the run folder; output.report_to"}),
    ("trl-sft-full.yaml", "report_to: none", "report_to: trackio\nproject: trials", ["trackio"],
     {"project": "set in the environment: TRACKIO_PROJECT=trials"}),
    ("torchtune-lora-single.yaml", "DiskLogger", "TensorBoardLogger", ["tensorboard"], {}),
    ("swift-doubtful.sh", "report_to swanlab", "report_to wandb tensorboard", ["tensorboard", "wandb"], {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "before", "now", "expected", "named"), TRACKED)
def test_trackers_are_carried_over_and_what_a_recipe_has_no_key_for_is_named(
    tmp_path, name, before, now, expected, named
) -> None:
    text = (CONFIGS / name).read_text()
    assert before in text
    (tmp_path / name).write_text(text.replace(before, now))
    made = migrate(tmp_path / name)
    assert sorted(made.recipe.output.report_to) == expected
    for key, words in named.items():
        (line,) = [line for line in made.of_kind("decided") if line.key.partition("[")[0] == key]
        assert words in line.words


AXOLOTL_FULL = "base_model: m\ndatasets: [{path: x.jsonl, type: alpaca}]\nsequence_len: 64\nmicro_batch_size: 1\n"
FACTORY_FREEZE = (
    "model_name_or_path: m\nstage: sft\nfinetuning_type: freeze\ndataset: x\ntemplate: qwen\ncutoff_len: 64\n"
)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (
            f"{AXOLOTL_FULL}unfrozen_parameters: [lm_head.weight, 'model.layers.2[0-9]+.mlp']\n",
            {"unfrozen_parameters": [r"^lm_head\.weight", r"^model\.layers\.2[0-9]+\.mlp"]},
        ),
        (FACTORY_FREEZE, {"last_layers": 2}),
        (f"{FACTORY_FREEZE}freeze_trainable_layers: 6\nfreeze_trainable_modules: all\n", {"last_layers": 6}),
        (
            f"{FACTORY_FREEZE}freeze_trainable_layers: -2\nfreeze_extra_modules: embed_tokens,norm\n",
            {"unfrozen_parameters": [r"^\D*\.(0|1)\.", r"^\D*embed_tokens", r"^\D*norm"]},
        ),
        (f"{FACTORY_FREEZE}freeze_trainable_layers: 8\nuse_llama_pro: true\n", {"new_layers": 8}),
        (f"{FACTORY_FREEZE}use_llama_pro: true\n", {"new_layers": 2}),
        ("model: m\ntrain_type: llamapro\ndataset: x.jsonl\nllamapro_num_new_blocks: 8\n", {"new_layers": 8}),
        ("model: m\ntrain_type: llamapro\ndataset: x.jsonl\n", {"new_layers": 4}),
    ],
    ids=["axolotl", "freeze", "last layers", "first layers and modules", "pro", "pro's two", "swift", "swift's four"],
)
def test_the_part_of_a_model_that_is_trained_is_carried_over(config, part, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(config)
    made = migrate(tmp_path / "config.yaml")
    adapter = made.recipe.adapter
    assert adapter.model_dump(exclude_none=True, exclude_defaults=True) == part
    assert not made.of_kind("unsupported")


def test_layers_that_llama_factory_inserted_before_are_pointed_out(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(f"{FACTORY_FREEZE}freeze_trainable_layers: 8\nuse_llama_pro: true\n")
    made = migrate(tmp_path / "config.yaml")
    assert any("set model.path to the model before scripts/llama_pro.py" in one.words for one in made.suspicious)


def test_several_new_layers_behind_one_group_are_not_carried_over(tmp_path) -> None:
    config = "model: m\ntrain_type: llamapro\ndataset: x.jsonl\nllamapro_num_new_blocks: 8\nllamapro_num_groups: 4\n"
    (tmp_path / "config.yaml").write_text(config)
    (line,) = migrate(tmp_path / "config.yaml").of_kind("unsupported")
    assert (line.key, line.words) == ("llamapro_num_groups", "adapter.new_layers inserts one layer after each group")


QLORA = "adapter: qlora\nload_in_4bit: true\npeft: {loftq_config: "
STARTS = {
    "eva": ("adapter: lora\npeft_init_lora_weights: eva", "eva", []),
    "loftq": (f"{QLORA}{{loftq_bits: 4, loftq_iter: 1}}}}", "loftq", []),
    "8 bits": (f"{QLORA}{{loftq_bits: 8}}}}", True, ["8 bits: adapter.init_lora_weights=loftq is for 4"]),
    "5 iterations": (
        f"{QLORA}{{loftq_bits: 4, loftq_iter: 5}}}}",
        "loftq",
        ["5 iterations: loftq uses 1, which keeps the base model of QLoRA"],
    ),
    "loftq of a whole base": (
        "adapter: lora\npeft_init_lora_weights: loftq",
        True,
        ["loftq: adapter.init_lora_weights supports it only for a 4-bit base, adapter.type=qlora"],
    ),
}


SWIFT = "model: m\ndataset: x.jsonl\nadalora_init_r: 16\nadalora_tfinal: 20\nlora_rank: 4\nlora_dropout: 0.1\n"


def test_adalora_is_carried_over_with_what_it_reads(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(f"{SWIFT}tuner_type: adalora\n")
    made = migrate(tmp_path / "config.yaml")
    wanted = {"type": "adalora", "init_r": 16, "tfinal": 20, "dropout": 0.1, "alpha": 32.0}
    assert made.recipe.adapter == AdaloraAdapter(**wanted)
    assert line_of(made, "lora_rank").words == "not used with tuner_type adalora"
    assert not made.of_kind("unsupported")
    (tmp_path / "config.yaml").write_text(f"{SWIFT}tuner_type: lora\n")
    made = migrate(tmp_path / "config.yaml")
    assert made.recipe.adapter.type == "lora" and made.recipe.adapter.rank == 4
    assert line_of(made, "adalora_init_r").words == "only used with tuner_type adalora"
    (tmp_path / "config.yaml").write_text(f"{SWIFT}tuner_type: adalora\nquant_bits: 4\nquant_method: bnb\n")
    (line,) = migrate(tmp_path / "config.yaml").of_kind("unsupported")
    assert line.words == "adalora is unsupported: adapter accepts full, lora, qlora; the recipe uses qlora"


def test_vera_has_a_rank_of_its_own(tmp_path) -> None:
    config = "model: m\ndataset: x.jsonl\nlora_rank: 4\nlora_dropout: 0.1\ntuner_type: vera\n"
    (tmp_path / "config.yaml").write_text(config)
    made = migrate(tmp_path / "config.yaml")
    assert made.recipe.adapter == VeraAdapter(rank=256)
    assert line_of(made, "lora_rank").words == "not used with tuner_type vera"
    (tmp_path / "config.yaml").write_text(f"{config}vera_rank: 64\nvera_d_initial: 0.2\nvera_projection_prng_key: 3\n")
    made = migrate(tmp_path / "config.yaml")
    assert made.recipe.adapter == VeraAdapter(rank=64, d_initial=0.2, projection_prng_key=3)
    assert not made.of_kind("unsupported")
    (tmp_path / "config.yaml").write_text("model: m\ndataset: x.jsonl\nvera_rank: 64\n")
    assert line_of(migrate(tmp_path / "config.yaml"), "vera_rank").words == "only used with tuner_type vera"


def test_bone_is_miss_as_peft_calls_it_now(tmp_path) -> None:
    config = "model: m\ndataset: x.jsonl\nlora_rank: 32\ntuner_type: bone\n"
    (tmp_path / "config.yaml").write_text(config)
    made = migrate(tmp_path / "config.yaml")
    assert made.recipe.adapter == MissAdapter(rank=4) and not made.of_kind("unsupported")
    assert line_of(made, "lora_rank").words == "not used with tuner_type miss"
    (tmp_path / "config.yaml").write_text(f"{config}reft_rank: 16\ninit_weights: bat\n")
    made = migrate(tmp_path / "config.yaml")
    assert made.recipe.adapter == MissAdapter(rank=16)
    assert line_of(made, "init_weights").words == "bat: adapter.type=miss starts as by PEFT's default"
    (tmp_path / "config.yaml").write_text("model: m\ndataset: x.jsonl\nreft_rank: 16\n")
    assert line_of(migrate(tmp_path / "config.yaml"), "reft_rank").words == "only used with tuner_type bone"


def test_of_a_stream_the_first_rows_are_taken(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("model: m\ndataset: x.jsonl#100\nstreaming: true\nmax_steps: 9\n")
    (source,) = migrate(tmp_path / "config.yaml").recipe.data.sources
    assert (source.max_samples, source.sampling) == (100, "first")


PARAMETERS = ["mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "config",
    [
        f"{AXOLOTL_FULL}adapter: lora\nlora_target_parameters: {PARAMETERS}\n",
        f"model: m\ntuner_type: lora\ndataset: x.jsonl\ntarget_parameters: {PARAMETERS}\n",
        f"model_name_or_path: m\ndataset_name: x\nuse_peft: true\nlora_target_parameters: {PARAMETERS}\n"
        "max_length: 64\nper_device_train_batch_size: 1\n",
    ],
    ids=["axolotl", "ms-swift", "trl"],
)
def test_parameters_that_get_an_adapter_are_carried_over(config, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(config)
    assert migrate(tmp_path / "config.yaml").recipe.adapter.target_parameters == PARAMETERS


@pytest.mark.parametrize("name", STARTS)
def test_initial_weights_of_adapters_are_carried_over_or_named(name, tmp_path) -> None:
    config, start, refused = STARTS[name]
    (tmp_path / "config.yaml").write_text(f"{AXOLOTL_FULL}{config}\n")
    made = migrate(tmp_path / "config.yaml")
    assert made.recipe.adapter.init_lora_weights == start
    assert [line.words for line in made.of_kind("unsupported")] == refused


@pytest.mark.parametrize(
    ("config", "patience"),
    [
        (f"{AXOLOTL_FULL}early_stopping_patience: 3\n", 3),
        (f"{FACTORY_FREEZE}early_stopping_steps: 4\n", 4),
        ("model: m\ntrain_type: lora\ndataset: x.jsonl\nearly_stop_interval: 5\n", 5),
    ],
    ids=["axolotl", "llama-factory", "ms-swift"],
)
def test_early_stopping_is_carried_over(config, patience, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(config)
    assert migrate(tmp_path / "config.yaml").recipe.train.early_stopping_patience == patience


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (f"{AXOLOTL_FULL}adapter: lora\nlora_r: 8\nloraplus_lr_ratio: 16\n", ("adapter", "loraplus_lr_ratio"), 16),
        (f"{AXOLOTL_FULL}embedding_lr: 1e-5\n", ("train", "learning_rates"), {"embed_tokens|lm_head": 1e-5}),
        (
            FACTORY_FREEZE.replace("freeze", "lora") + "loraplus_lr_ratio: 8.0\n",
            ("adapter", "loraplus_lr_ratio"),
            8,
        ),
        (
            "model: m\ntrain_type: lora\ndataset: x.jsonl\nlorap_lr_ratio: 10\n",
            ("adapter", "loraplus_lr_ratio"),
            10,
        ),
    ],
    ids=["axolotl", "axolotl's embedding", "llama-factory", "ms-swift"],
)
def test_learning_rates_by_group_are_carried_over(config, key, value, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(config)
    section, field = key
    made = migrate(tmp_path / "config.yaml")
    assert made.recipe.model_dump()[section][field] == value
    assert not made.of_kind("unsupported")


@pytest.mark.parametrize(("switch", "kind"), [("true", "qlora"), ("false", "lora")])
def test_a_base_in_gptq_is_kept_below_an_adapter(switch, kind, tmp_path) -> None:
    config = f"{AXOLOTL_FULL}adapter: lora\nlora_r: 8\ngptq: {switch}\ngptq_disable_exllama: true\n"
    (tmp_path / "config.yaml").write_text(config)
    made = migrate(tmp_path / "config.yaml")
    assert made.recipe.adapter.type == kind
    assert not made.of_kind("unsupported")


EIGHT_BITS = {
    "axolotl": (f"{AXOLOTL_FULL}adapter: lora\nlora_r: 8\nload_in_8bit: true\n", "load_in_8bit"),
    "llama-factory": (
        "model_name_or_path: m\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: d\ntemplate: qwen\n"
        "quantization_bit: 8\nquantization_method: bnb\n",
        "quantization_bit",
    ),
    "ms-swift": ("model: m\ndataset: d\ntuner_type: lora\nquant_method: bnb\nquant_bits: 8\n", "quant_bits"),
    "trl": (
        "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nload_in_8bit: true\nmax_length: 512\n",
        "load_in_8bit",
    ),
}


@pytest.mark.parametrize("tool", EIGHT_BITS)
def test_a_base_in_8_bits_is_carried_over_and_its_activations_named(tool, tmp_path) -> None:
    text, key = EIGHT_BITS[tool]
    (tmp_path / "config.yaml").write_text(text)
    made = migrate(tmp_path / "config.yaml", tool=tool)
    assert (made.recipe.adapter.type, made.recipe.adapter.quant_type) == ("qlora", "int8")
    (line,) = [line for line in made.of_kind("different") if line.key == key]
    assert "LLM.int8() quantizes activations too" in line.words


def test_restarts_of_an_adapter_are_carried_over(tmp_path) -> None:
    def of(*lines: str) -> Migration:
        (tmp_path / "config.yaml").write_text(AXOLOTL_FULL + "\n".join(["", *lines, ""]))
        return migrate(tmp_path / "config.yaml")

    restarts = ["relora: true", "jagged_restart_steps: 50", "jagged_restart_warmup_steps: 5", "relora_prune_ratio: 0.8"]
    made = of("adapter: lora", *restarts, "relora_prune_method: magnitude", "relora_cpu_offload: true")
    assert made.recipe.adapter.relora.model_dump() == {"steps": 50, "warmup_steps": 5, "prune_ratio": 0.8}
    assert not made.of_kind("unsupported")
    for lines, problem in (
        (["adapter: lora", *restarts, "relora_prune_method: reset"], "by magnitude only"),
        (["adapter: qlora", "load_in_4bit: true", *restarts], "requires adapter: lora"),
        (["adapter: lora", *restarts[1:3]], "without relora are unsupported"),
    ):
        made = of(*lines)
        assert made.recipe.adapter.relora is None
        assert all(problem in line.words for line in made.of_kind("unsupported")), lines


def test_quantization_aware_training_is_carried_over_where_it_rounds_alike(tmp_path) -> None:
    def of(text: str) -> Migration:
        (tmp_path / "config.yaml").write_text(text)
        return migrate(tmp_path / "config.yaml")

    made = of(f"{AXOLOTL_FULL}qat:\n  weight_dtype: int4\n  activation_dtype: int8\n  group_size: 64\n")
    assert made.recipe.train.qat.model_dump() == {"weight_dtype": "int4", "activation_dtype": "int8", "group_size": 64}
    assert {line.key for line in made.different} >= {"qat.weight_dtype"}
    made = of(
        f"{AXOLOTL_FULL}qat:\n  weight_dtype: int4\n  quantize_embedding: true\n  fake_quant_after_n_steps: 100\n"
    )
    assert made.recipe.train.qat is None
    assert {line.key for line in made.of_kind("unsupported")} == {
        "qat.weight_dtype", "qat.quantize_embedding", "qat.fake_quant_after_n_steps",
    }  # fmt: skip
    torchtune = (CONFIGS / "torchtune-full-distributed.yaml").read_text()
    quantizer = "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
    made = of(f"{torchtune}\nquantizer:\n  _component_: {quantizer}\n  groupsize: 32\n")
    assert made.recipe.train.qat.model_dump() == {"weight_dtype": "int4", "activation_dtype": "int8", "group_size": 32}
    assert {line.key for line in made.different} >= {"quantizer._component_"}
    doubtful = migrate(CONFIGS / "torchtune-doubtful.yaml")
    assert doubtful.recipe.adapter.type == "lora" and doubtful.recipe.train.qat.group_size == 256


MXFP4 = "model_quantization_config: Mxfp4Config\nmodel_quantization_config_kwargs:\n  dequantize: {}\n"
GDPO = """\
rl: gdpo
gradient_accumulation_steps: 8
trl:
  multi_objective_aggregation: normalize_then_sum
  num_completions_to_print: 3
"""


@pytest.mark.parametrize(
    ("config", "values", "unsupported"),
    [
        (f"{AXOLOTL_FULL}{MXFP4.format('true')}", {"adapter.type": "full"}, []),
        (f"{AXOLOTL_FULL}adapter: lora\nlora_r: 8\n{MXFP4.format('true')}", {"adapter.type": "lora"}, []),
        (
            f"{AXOLOTL_FULL}{MXFP4.format('false')}",
            {},
            ["model_quantization_config", "model_quantization_config_kwargs.dequantize"],
        ),
        (
            f"{AXOLOTL_FULL}adapter: qlora\nlora_r: 8\nload_in_4bit: true\nnf4_backend: bitsandbytes\n",
            {"adapter.type": "qlora"},
            [],
        ),
        (
            f"{AXOLOTL_FULL}adapter: qlora\nlora_r: 8\nload_in_4bit: true\nnf4_backend: torchao\n",
            {},
            ["nf4_backend"],
        ),
        (f"{AXOLOTL_FULL}context_parallel:\n  size: 8\n  backend: auto\n", {"parallel.cp_size": 8}, []),
        (f"{AXOLOTL_FULL}eta_min: 7.0e-07\nautotune_cache_path: a.json\n", {}, []),
        (
            f"{AXOLOTL_FULL}{GDPO}",
            {"method.type": "grpo", "method.trainer_args.multi_objective_aggregation": "normalize_then_sum"},
            ["datasets[0].type"],
        ),
        (f"{AXOLOTL_FULL}plugins: [axolotl.integrations.swanlab.SwanLabPlugin]\nuse_swanlab: true\n", {}, []),
        (f"{AXOLOTL_FULL}plugins: [swanlab.SwanLabPlugin, spectrum.SpectrumPlugin]\n", {}, ["plugins"]),
        (f"{AXOLOTL_FULL}do_causal_lm_eval: true\neval_causal_lm_metrics: [perplexity]\n", {}, []),
        (
            f"{AXOLOTL_FULL}do_causal_lm_eval: true\neval_causal_lm_metrics: [sacrebleu]\n",
            {},
            ["do_causal_lm_eval", "eval_causal_lm_metrics"],
        ),
    ],
    ids=[
        "mxfp4",
        "mxfp4 lora",
        "mxfp4 kept",
        "nf4",
        "torchao",
        "context parallel",
        "unread",
        "gdpo",
        "tracker",
        "plugin",
        "perplexity",
        "bleu",
    ],
)
def test_keys_of_axolotls_newer_versions_are_accounted_for(config, values, unsupported, tmp_path) -> None:
    (tmp_path / "axolotl.yaml").write_text(config)
    made = migrate(tmp_path / "axolotl.yaml")
    recipe = made.recipe.model_dump(mode="json")
    for key, value in values.items():
        found = recipe
        for part in key.split("."):
            found = found[part]
        assert found == value
    assert [line.key for line in made.of_kind("unsupported")] == unsupported


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--task_type seq_cls", r"train\.sh:1: num_labels: must be a number of labels, at least 2, got None"),
        ("--task_type seq_cls --num_labels 1", r"at least 2, got 1; set it; regression is unsupported"),
        ("--num_labels N", r"train\.sh:1: num_labels: must be a number of labels, at least 2, got N"),
    ],
)
def test_a_classifier_of_ms_swift_without_a_number_of_labels_is_an_error(arguments, problem, tmp_path) -> None:
    (tmp_path / "train.sh").write_text(f"swift sft --model Qwen/Qwen3-4B --dataset a/b --use_hf true {arguments}\n")
    with pytest.raises(RecipeError, match=problem):
        migrate(tmp_path / "train.sh")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--task_type embedding", "embedding is unsupported"),
        ("--num_labels 3 --model Qwen/Qwen3-VL-4B-Instruct --task_type seq_cls", "classification reads texts"),
        ("--num_labels 3 --problem_type regression", "multi_label_classification, got 'regression'"),
    ],
)
def test_tasks_of_ms_swift_that_are_not_there_are_named(arguments, words, tmp_path) -> None:
    model = "" if "--model" in arguments else "--model Qwen/Qwen3-4B"
    (tmp_path / "train.sh").write_text(f"swift sft {model} --dataset a/b --use_hf true {arguments}\n")
    migration = migrate(tmp_path / "train.sh")
    assert any(words in line.words for line in migration.of_kind("unsupported")), migration.lines
