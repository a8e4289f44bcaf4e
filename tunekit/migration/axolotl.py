"""Axolotl's YAML -> a recipe, by its documented keys."""

from typing import Any

from tunekit.migration import axolotl_rows as rows
from tunekit.migration import training as hf
from tunekit.migration.axolotl_keys import OTHER
from tunekit.migration.draft import (
    Draft,
    Rule,
    Rules,
    UnfitError,
    both,
    carried,
    decided,
    each,
    flag,
    is_off,
    names,
    no_method,
    number,
    refused,
    silent,
    text,
    to,
    truth,
    whole,
    with_adapter,
)
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.migration.rewards import rewards

_METHODS = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo", "grpo": "grpo"}
_NEEDS_FLASH = ("flash_attention", "flex_attention", "xformers_attention", "sage_attention")


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    devices = draft.get("world_size")
    if draft.num_devices is None and isinstance(devices, int):
        draft.num_devices = devices
    hf.set_batch(draft, "micro_batch_size", "gradient_accumulation_steps")
    _method(draft)
    _adapter(draft)
    method = draft.values.get("method.type", "sft")
    for target, key in (("data.train", "datasets"), ("data.eval", "test_datasets")):
        datasets = draft.get(key) or (draft.get("pretraining_dataset") if key == "datasets" else None) or []
        datasets = (
            [{"path": datasets}]
            if isinstance(datasets, str)
            else datasets
            if isinstance(datasets, list)
            else [datasets]
        )
        sources = [
            rows.source(dataset, method) for dataset in datasets if isinstance(dataset, dict) and dataset.get("path")
        ]
        hf.put_sources(draft, target, sources, key)


def finish(draft: Draft) -> None:
    """Say what Axolotl does where the file says nothing, and what looks wrong."""
    own = "Axolotl's default, where the file says nothing"
    draft.assume("data.max_length", 512, own)
    if not rows.are_texts(draft):
        hf.drops_too_long(draft, "excess_length_strategy", "drop")
    if draft.get("pretraining_dataset") is not None and not draft.values.get("data.streaming"):
        what = "Axolotl streams pretraining_dataset"
        draft.differ("streaming", True, f"{what}; here it is read whole first: data.streaming streams it")
    if draft.values.get("method.type") == "grpo":
        hf.room_for_answers(draft, prompt=0)
    if draft.values.get("adapter.type") in ("lora", "qlora"):
        draft.assume("adapter.rank", 8, "PEFT's default, where the file says nothing")
        draft.assume("adapter.alpha", 8, "PEFT's default, where the file says nothing")
        if "adapter.target_modules" not in draft.values and not draft.get("lora_target_linear"):
            draft.suspect(
                "adapter", "neither lora_target_linear nor lora_target_modules: all linear layers are taken here"
            )
    if draft.get("sample_packing") is True:
        _suspect_packing(draft)
    if draft.get("tokens") and draft.values.get("adapter.type") != "full" and not draft.get("lora_modules_to_save"):
        draft.suspect(
            "tokens", "tokens are added, but embed_tokens and lm_head are not in lora_modules_to_save: they stay random"
        )
    if draft.get("shuffle_merged_datasets") and draft.get("shuffle_before_merging_datasets"):
        draft.suspect("shuffle_before_merging_datasets", "rows are shuffled twice, before and after merging")
    if draft.get("load_in_4bit") and draft.get("load_in_8bit"):
        draft.suspect("load_in_8bit", "load_in_4bit and load_in_8bit are both on")
    if draft.get("adapter") == "qlora" and not draft.get("load_in_4bit"):
        draft.suspect("adapter", "adapter: qlora without load_in_4bit: true")
    if draft.get("load_in_4bit") and is_off(draft.get("adapter", False)):
        draft.suspect(
            "load_in_4bit",
            "load_in_4bit without an adapter: weights of 4 bits cannot be trained; the recipe trains all of them",
        )


def _suspect_packing(draft: Draft) -> None:
    attention = str(draft.get("attn_implementation", ""))
    if not any(draft.get(key) for key in _NEEDS_FLASH) and ("flash" not in attention and "flex" not in attention):
        what = (
            "sample_packing without flash or flex attention: documents of one sequence saw each other; here they do not"
        )
        draft.suspect("sample_packing", what)
    if draft.get("eval_sample_packing") is None and draft.get("val_set_size"):
        draft.suspect(
            "sample_packing", "evaluation is packed too, as eval_sample_packing is not off: few rows may fill no batch"
        )


def _method(draft: Draft) -> None:
    name = draft.get("rl")
    if draft.get("reward_model") is True:
        draft.put("method.type", "reward", "reward_model")
    elif name and name not in _METHODS:
        raise no_method(draft, "rl", str(name))
    elif name:
        draft.put("method.type", _METHODS[name], "rl")
        if name == "simpo":
            draft.put("method.loss_type", "simpo", "rl")
        if name == "ipo":
            draft.put("method.loss_type", "ipo", "rl")


def _adapter(draft: Draft) -> None:
    name = draft.get("adapter")
    if name in ("lora", "qlora"):
        draft.put(
            "adapter.type", "qlora" if name == "qlora" or draft.get("load_in_4bit") is True else "lora", "adapter"
        )
    else:
        draft.put("adapter.type", "full")


# Single keys


def _rl(draft: Draft, entry: Entry) -> Fate:
    return carried("method.type", draft.values["method.type"])


def _adapter_rule(draft: Draft, entry: Entry) -> Fate:
    if entry.value in ("lora", "qlora"):
        return carried("adapter.type", draft.values["adapter.type"])
    raise UnfitError(f"{entry.value}: adapter.type takes full, lora and qlora")


def _four_bits(draft: Draft, entry: Entry) -> Fate:
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.values["adapter.type"] == "qlora":
        return carried("adapter.type", "qlora")
    raise UnfitError("weights of 4 bits are trained with an adapter only: adapter: qlora")


def _loss_on(draft: Draft, entry: Entry) -> Fate:
    if not truth(entry.value):
        return Fate("silent", "data.loss_on assistant is the default")
    draft.put("data.loss_on", "all", entry.key)
    draft.suspect(entry.key, "train_on_inputs: the model learns to write the user's turns as well")
    return carried("data.loss_on", "all")


def _lr_scheduler(draft: Draft, entry: Entry) -> Fate:
    name, ratio = text(entry.value), draft.get("cosine_min_lr_ratio")
    if name == "cosine" and ratio:
        draft.put("train.lr_scheduler_type", "cosine_with_min_lr", entry.key, "cosine_min_lr_ratio")
        draft.put("method.trainer_args.lr_scheduler_kwargs", {"min_lr_rate": number(ratio)}, "cosine_min_lr_ratio")
        return carried("train.lr_scheduler_type", "cosine_with_min_lr")
    return hf.scheduler(draft, entry)


def _min_lr(draft: Draft, entry: Entry) -> Fate:
    if draft.get("lr_scheduler", "cosine") != "cosine":
        raise UnfitError("goes with lr_scheduler cosine only")
    if draft.get("lr_scheduler") is None:
        _lr_scheduler(draft, Entry("lr_scheduler", "cosine", entry.line))
    return Fate("carried", f"method.trainer_args.lr_scheduler_kwargs: {{min_lr_rate: {entry.value}}}")


def _beta(draft: Draft, entry: Entry) -> Fate:
    if draft.values.get("method.type", "sft") in ("sft", "reward"):
        return Fate("silent", "goes with methods that hold a model to a reference")
    return to("method.beta", number)(draft, entry)


def _for(method: str, target: str) -> Rule:
    """A key that goes with one method."""

    def rule(draft: Draft, entry: Entry) -> Fate:
        if draft.values.get("method.type", "sft") != method:
            return Fate("silent", f"goes with {method}")
        value = entry.value if isinstance(entry.value, bool | list | dict | str) else number(entry.value)
        draft.put(target, value, entry.key)
        return carried(target, value)

    return rule


def _packing(draft: Draft, entry: Entry) -> Fate:
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.values.get("method.type", "sft") != "sft":
        raise UnfitError("rows of this method are not packed")
    draft.put("data.packing", True, entry.key)
    return carried("data.packing", True)


def _target_linear(draft: Draft, entry: Entry) -> Fate:
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.get("lora_target_modules"):
        draft.suspect(entry.key, "lora_target_linear and lora_target_modules are both given; the modules are taken")
        return Fate("silent", "lora_target_modules names them")
    draft.put("adapter.target_modules", "all-linear", entry.key)
    return carried("adapter.target_modules", "all-linear")


def _modules(draft: Draft, entry: Entry) -> Fate:
    if any(sign in name for name in names(entry.value) for sign in "*\\|("):
        raise UnfitError("a regular expression: adapter.target_modules takes name endings; all linear layers are taken")
    value: Any = names(entry.value)
    value = "all-linear" if value == ["all-linear"] else value
    draft.put("adapter.target_modules", value, entry.key)
    return carried("adapter.target_modules", value)


def _unfrozen(draft: Draft, entry: Entry) -> Fate:
    return Fate(
        "unsupported",
        "parts of a model are not trained by themselves: adapter full, lora or qlora; adapter.modules_to_save",
    )


_ADAPTER: dict[str, Rule] = {"adapter": _adapter_rule, "load_in_4bit": _four_bits}
_LORA: dict[str, Rule] = {
    "load_in_8bit": refused("a base in 8 bits is not there: adapter: qlora keeps it in 4, lora in 16"),
    "lora_model_dir": refused("model.path names the folder of an adapter to go on with"),
    "lora_r": to("adapter.rank", whole),
    "lora_alpha": to("adapter.alpha", number),
    "lora_dropout": to("adapter.dropout", number),
    "lora_target_modules": _modules,
    "lora_target_linear": _target_linear,
    "lora_modules_to_save": to("adapter.modules_to_save", names),
    "peft_use_dora": to("adapter.use_dora", truth),
    "peft_use_rslora": to("adapter.use_rslora", truth),
    "lora_fan_in_fan_out": silent("found from the layer"),
    **{
        name: refused(f"{name}: not there; adapter has one rank, alpha and list of modules")
        for name in (
            "lora_target_parameters",
            "peft_layers_to_transform",
            "peft_layers_pattern",
            "peft_layer_replication",
            "lora_rank_pattern",
            "lora_alpha_pattern",
            "peft_init_lora_weights",
            "peft_trainable_token_indices",
            "peft_ensure_weight_tying",
            "loraplus_lr_ratio",
            "loraplus_lr_embedding",
            "relora",
            "relora_prune_ratio",
            "relora_prune_method",
            "relora_cpu_offload",
            "peft",
            "gptq",
            "gptq_groupsize",
            "gptq_model_v1",
            "gptq_disable_exllama",
        )
    },
    "peft_autocast_adapter_dtype": decided(hf.PRECISION),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": to("adapter.double_quant", truth),
    "bnb_config_kwargs.bnb_4bit_quant_type": to("adapter.quant_type", text),
    "bnb_config_kwargs": decided(hf.PRECISION),
    **each(
        decided(hf.DEVICES),
        "qlora_sharded_model_loading lora_on_cpu",
    ),
    "merge_lora": silent("`tunekit export` merges"),
    "merge_method": silent("`tunekit export` merges"),
    **each(
        decided(hf.KERNELS),
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel",
    ),
}

_TRAINING: dict[str, Rule] = {
    "sequence_len": to("data.max_length", whole),
    "max_prompt_len": decided("prompts have what answers leave of data.max_length"),
    "eval_sequence_len": decided("evaluation has data.max_length too"),
    "excess_length_strategy": hf.too_long("truncate"),
    "min_sample_len": refused("short rows are kept"),
    "sample_packing": _packing,
    "eval_sample_packing": decided("evaluation rows are laid out like training rows"),
    "pad_to_sequence_len": decided(
        "what is packed has no padding; other rows are padded to their longest or not at all"
    ),
    "pad_to_multiple_of": decided("rows are padded to their longest or not at all"),
    **each(
        decided("tunekit fills packed sequences as full as they get"),
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially "
        "sample_packing_mp_start_method sample_packing_eff_est sample_packing_seq_len_multiplier",
    ),
    **each(
        decided("tunekit fills packed sequences as full as they get"),
        "multipack_real_batches pretrain_multipack_buffer_size streaming_multipack_buffer_size "
        "pretrain_multipack_attn pretraining_sample_concatenation total_num_tokens "
        "total_supervised_tokens",
    ),
    "batch_flattening": decided("data.padding_free auto lays rows one behind the other where flash attention runs"),
    "curriculum_sampling": hf.not_shuffled,
    "max_packed_sequence_len": both(silent("sequence_len says it"), "is deprecated in Axolotl"),
    "micro_batch_size": hf.batch,
    "gradient_accumulation_steps": hf.accumulation,
    "batch_size": both(silent("micro_batch_size and gradient_accumulation_steps say it"), "is deprecated in Axolotl"),
    "eval_batch_size": decided("evaluation takes the micro-batch of training"),
    "num_epochs": hf.epochs,
    "lr_scheduler": _lr_scheduler,
    "cosine_min_lr_ratio": _min_lr,
    "optimizer": hf.optimizer,
    **each(
        refused("not there: train.lr_scheduler_type with trainer_args.lr_scheduler_kwargs"),
        "cosine_constant_lr_ratio lr_quadratic_warmup lr_div_factor lr_groups embedding_lr "
        "embedding_lr_scale eta_min jagged_restart_steps jagged_restart_warmup_steps "
        "jagged_restart_anneal_steps log_sweep_min_lr log_sweep_max_lr",
    ),
    **each(
        refused("settings of an optimizer that is not there"),
        "adam_beta3 adam_epsilon2 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of torchdistx_path",
    ),
    "adam_eps": hf.trainer_arg("adam_epsilon"),
    "torch_dtype": hf.dtype,
    "bfloat16": hf.precision_bf16,
    "float16": hf.half,
    "float32": flag(to("model.dtype", lambda value: "float32")),
    "fp8": to("train.fp8", truth),
    "fp8_config": decided(hf.PRECISION),
    "fp8_enable_fsdp_float8_all_gather": decided(hf.DEVICES),
    "train_on_inputs": _loss_on,
    "evals_per_epoch": decided(hf.EVALUATIONS),
    "saves_per_epoch": decided(hf.CHECKPOINTS),
    "save_first_step": refused("no checkpoint is made of the first step"),
    "val_set_size": hf.holdout,
    "early_stopping_patience": refused("a run is not ended early; its best checkpoint is kept beside"),
    "loss_watchdog_threshold": decided("a loss that is not finite ends the run; train.non_finite says what else"),
    "loss_watchdog_patience": decided("a loss that is not finite ends the run; train.non_finite says what else"),
    "neftune_noise_alpha": hf.trainer_arg(),
    "noisy_embedding_alpha": both(
        hf.trainer_arg("neftune_noise_alpha"), "is deprecated in Axolotl: neftune_noise_alpha"
    ),
    "shuffle_merged_datasets": hf.shuffle,
    "shuffle_before_merging_datasets": decided("data.shuffle mixes all rows"),
    "streaming": to("data.streaming", truth),
    "unfrozen_parameters": _unfrozen,
    **each(
        decided("the plan says it"),
        "gc_steps gc_collect_steps torch_empty_cache_steps low_cpu_mem_usage max_memory gpu_memory_limit",
    ),
    "activation_offloading": decided(hf.CHECKPOINTING),
    "selective_checkpointing": decided(hf.CHECKPOINTING),
    "layer_offloading": decided(hf.DEVICES),
    "fp32_norms": decided(hf.PRECISION),
    "torch_compile_options": decided("train.torch_compile auto compiles where it is known to pay"),
    "trainer_cls": refused("a trainer of your own is not taken"),
    "qat": refused("training for quantisation is not there"),
    "quantization": refused("quantising after training is not there"),
    "reinit_weights": refused("models start from their weights"),
}

_METHOD: dict[str, Rule] = {
    "rl": _rl,
    "reward_model": flag(lambda draft, entry: carried("method.type", "reward")),
    "process_reward_model": refused("rewards of steps are not there: method: reward judges whole answers"),
    "center_rewards_coefficient": _for("reward", "method.center_rewards_coefficient"),
    "num_labels": silent("a reward model has one output"),
    "rl_beta": _beta,
    "dpo_beta": both(_beta, "is deprecated in Axolotl: rl_beta"),
    "orpo_alpha": _for("orpo", "method.beta"),
    "simpo_gamma": _for("cpo", "method.simpo_gamma"),
    "cpo_alpha": _for("cpo", "method.cpo_alpha"),
    "kto_desirable_weight": _for("kto", "method.desirable_weight"),
    "kto_undesirable_weight": _for("kto", "method.undesirable_weight"),
    "dpo_label_smoothing": _for("dpo", "method.label_smoothing"),
    "dpo_loss_type": _for("dpo", "method.loss_type"),
    "dpo_loss_weights": _for("dpo", "method.loss_weights"),
    "dpo_use_weighting": _for("dpo", "method.trainer_args.use_weighting"),
    "precompute_ref_log_probs": _for("dpo", "method.precompute_ref_log_probs"),
    "rpo_alpha": refused("method.loss_type [sigmoid, sft] with method.loss_weights comes to the same"),
    "dpo_norm_loss": refused("method.loss_type sigmoid_norm divides by the length of an answer"),
    "dpo_generate_during_eval": decided("output.sample_prompts are answered before and after training"),
    "dpo_use_logits_to_keep": decided(hf.KERNELS),
    "dpo_use_liger_kernel": decided(hf.KERNELS),
    "dpo_padding_free": decided("TRL pads the batches of this method"),
    "trl.beta": _beta,
    **{
        f"trl.{name}": _for("grpo", f"method.{name}")
        for name in (
            "num_generations",
            "max_completion_length",
            "num_iterations",
            "epsilon",
            "epsilon_high",
            "loss_type",
            "mask_truncated_completions",
            "importance_sampling_level",
        )
    },
    **{
        f"trl.{name}": _for("grpo", f"method.generation.{name}")
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "use_vllm", "vllm_mode")
    },
    "trl.scale_rewards": lambda draft, entry: _scale(draft, entry),
    "trl.reward_funcs": rewards("trl.reward_weights"),
    "trl.reward_weights": silent("each of method.rewards has its weight"),
    "trl.log_completions": decided("answers and their rewards are in the run's folder"),
    "trl.sync_ref_model": hf.trainer_arg("sync_ref_model"),
    "trl.ref_model_mixup_alpha": hf.trainer_arg("ref_model_mixup_alpha"),
    "trl.ref_model_sync_steps": hf.trainer_arg("ref_model_sync_steps"),
    "trl.vllm_server_host": lambda draft, entry: _server(draft, entry),
    "trl.vllm_server_port": lambda draft, entry: _server(draft, entry),
    "trl.vllm_server_timeout": decided("tunekit waits for the server"),
    "trl.use_liger_loss": decided(hf.KERNELS),
    "trl": refused("not there for this method; `tunekit explain method` lists what is"),
    "vllm.gpu_memory_utilization": lambda draft, entry: _utilization(draft, entry),
    "vllm": decided("the plan says how vLLM is used: method.generation"),
}


def _scale(draft: Draft, entry: Entry) -> Fate:
    value = entry.value if isinstance(entry.value, str) else "group" if entry.value else "none"
    draft.put("method.scale_rewards", value, entry.key)
    return carried("method.scale_rewards", value)


def _server(draft: Draft, entry: Entry) -> Fate:
    if draft.get("trl.vllm_mode") != "server":
        return Fate("silent", "goes with vllm_mode server")
    address = f"http://{draft.get('trl.vllm_server_host', '0.0.0.0')}:{draft.get('trl.vllm_server_port', 8000)}"
    draft.put("method.generation.vllm_server_base_url", address, entry.key)
    return carried("method.generation.vllm_server_base_url", address)


def _utilization(draft: Draft, entry: Entry) -> Fate:
    if draft.get("trl.vllm_mode") == "server":
        return Fate("silent", "the server has its own")
    return _for("grpo", "method.generation.vllm_gpu_memory_utilization")(draft, entry)


_RULES: Rules = {
    **hf.HF_RULES,
    **OTHER,
    **_ADAPTER,
    **with_adapter(_LORA),
    **_TRAINING,
    **_METHOD,
    **rows.rules("datasets[]"),
    **rows.rules("test_datasets[]"),
    **rows.rules("pretraining_dataset[]"),
    **rows.rules("pretraining_dataset"),
}


def rules(draft: Draft) -> Rules:
    """Axolotl's keys."""
    return _RULES


MARKS = frozenset(
    {"base_model", "datasets", "sequence_len", "micro_batch_size", "lora_r", "val_set_size", "sample_packing"}
)
"""Keys by which a configuration of Axolotl is told from others."""
