"""ms-swift's arguments, in YAML, JSON or a script that calls `swift sft` -> a recipe."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunekit.migration import trackers
from tunekit.migration import training as hf
from tunekit.migration.draft import (
    Draft,
    Rule,
    Rules,
    UnfitError,
    both,
    carried,
    decided,
    different,
    each,
    flag,
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

MARKS = frozenset(
    {
        *("train_type", "tuner_type", "sft_type", "rlhf_type", "torch_dtype", "split_dataset_ratio", "attn_impl"),
        *("target_modules", "model_type", "lora_rank", "loss_scale", "val_dataset", "custom_register_path", "use_hf"),
        *("external_plugins", "freeze_vit", "model", "dataset", "load_from_cache_file"),
    }
)
"""Keys by which a configuration of ms-swift is told from others."""

_METHODS = {"dpo": "dpo", "orpo": "orpo", "simpo": "cpo", "cpo": "cpo", "kto": "kto", "rm": "reward", "grpo": "grpo"}
_BETAS = {"simpo": 2.0, "grpo": 0.04}
_FILES = (".json", ".jsonl", ".csv", ".txt", ".parquet", ".arrow")
_PLAIN_TEXT = "ms-swift writes rows as plain text; here conversations have the model's chat template"
_BATCH = 16
"""The batch of a step that ms-swift accumulates to where nothing says how far."""


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    variables = draft.original.environment
    if draft.num_devices is None and draft.original.task is not None:
        of_node, nodes = variables.get("NPROC_PER_NODE", "1"), variables.get("NNODES", "1")
        if of_node.isdigit() and nodes.isdigit():
            draft.num_devices = int(of_node) * int(nodes)
    micro = draft.get("per_device_train_batch_size", 1)
    times = math.ceil(_BATCH / (micro if isinstance(micro, int) and micro > 0 else 1) / (draft.num_devices or 1))
    hf.set_batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps", default_accumulation=times)
    kind = draft.get("rlhf_type", "dpo" if draft.original.task == "rlhf" else None)
    if kind is not None and kind not in _METHODS:
        raise no_method(draft, "rlhf_type", str(kind))
    draft.put("method.type", _METHODS[kind] if kind else "sft", "rlhf_type")
    if kind == "simpo":
        draft.put("method.loss_type", "simpo", "rlhf_type")
    tuner = str(_tuner(draft))
    is_small = draft.get("quant_bits", draft.get("quantization_bit")) == 4 and draft.get("quant_method", "bnb") == "bnb"
    draft.put(
        "adapter.type",
        "full" if tuner == "full" else "qlora" if is_small else "lora",
        "tuner_type",
        "train_type",
        "sft_type",
    )
    for target, key in (("data.train", "dataset"), ("data.eval", "val_dataset")):
        hf.put_sources(draft, target, list(_sources(draft, key)), key)


def _tuner(draft: Draft) -> Any:
    return draft.get("tuner_type", draft.get("train_type", draft.get("sft_type", "lora")))


def _sources(draft: Draft, key: str) -> Iterator[dict[str, Any]]:
    """The data sets: `path`, `hub-name:subset`, each with `#rows` where not all are taken."""
    value = draft.get(key)
    if value is None:
        return
    shares = draft.get("interleave_prob")
    shares = shares if isinstance(shares, list) else []
    for place, word in enumerate(value if isinstance(value, list) else [value]):
        path, _, rows = text(word).partition("#")
        if _is_file(path):
            source_values = hf.source(path)
        else:
            path = path.removeprefix("hf::").removeprefix("ms::").removeprefix("HF::").removeprefix("MS::")
            name, _, subset = path.partition(":")
            source_values = hf.source(name, name=subset or None, split=f"train[:{rows}]" if rows.isdigit() else None)
        if draft.original.task == "pt":
            source_values["loss_on"] = "all"
        if place < len(shares):
            source_values["weight"] = number(shares[place])
        yield source_values


def _is_file(path: str) -> bool:
    return path.endswith(_FILES) or path.startswith(("/", "./", "../")) or Path(path).exists()


def finish(draft: Draft) -> None:
    """Say what ms-swift does where the file says nothing, and what looks wrong."""
    own = "ms-swift's default, where the file says nothing"
    method, is_full = draft.values["method.type"], draft.values["adapter.type"] == "full"
    if "train.max_steps" not in draft.values:
        draft.assume("train.num_epochs", 3, own)
    draft.assume("train.learning_rate", 1e-5 if is_full else 1e-4, own)
    draft.assume("train.warmup_steps", 0, own)
    draft.assume("train.weight_decay", 0.1, own)
    draft.assume("method.trainer_args.adam_beta2", 0.95, own)
    if not is_full:
        draft.assume("adapter.rank", 8, own)
        draft.assume("adapter.alpha", 32, own)
        draft.assume("adapter.dropout", 0.05, own)
    hf.drops_too_long(draft, "truncation_strategy", "delete")
    if draft.original.task == "pt" and draft.get("use_chat_template") is None:
        draft.differ("use_chat_template", False, f"by itself in swift pt: {_PLAIN_TEXT}")
    kind = str(draft.get("rlhf_type", ""))
    if kind in _BETAS:
        draft.assume("method.beta", _BETAS[kind], own)
    if kind == "simpo":
        draft.assume("method.simpo_gamma", 1.0, own)
    if method == "grpo":
        draft.assume("method.generation.temperature", 0.9, own)
        draft.assume("method.loss_type", "grpo", own)
    if method == "grpo":
        hf.room_for_answers(draft, prompt=draft.values.get("data.max_length", 1024))
    elif draft.get("max_length") is None and draft.get("max_model_len") is None:
        draft.suspect(
            "", "max_length is not given: ms-swift takes what the model can; data.max_length is tunekit's default here"
        )
    if draft.get("packing") and "flash" not in str(draft.get("attn_impl", "")):
        draft.suspect(
            "packing", "packing without flash attention: documents of one sequence saw each other; here they do not"
        )
    if is_full and draft.get("quant_bits"):
        draft.suspect("quant_bits", "quant_bits with all weights trained: quantised weights cannot be")
    if not draft.get("use_hf") and "data.train" in draft.values and "/" in str(draft.get("model", "")):
        draft.suspect("model", "names are those of ModelScope's hub; the same are looked for on Hugging Face")


# Rules


def _kind(draft: Draft, entry: Entry) -> Fate:
    return carried("method.type", draft.values["method.type"])


def _tuner_type(draft: Draft, entry: Entry) -> Fate:
    if entry.value not in ("full", "lora"):
        raise UnfitError(f"{entry.value} is not there: adapter takes full, lora, qlora; the recipe has lora")
    return carried("adapter.type", draft.values["adapter.type"])


def _bits(draft: Draft, entry: Entry) -> Fate:
    if draft.values["adapter.type"] == "qlora":
        return carried("adapter.type", "qlora")
    raise UnfitError("adapter: qlora has a base in 4 bits by bitsandbytes, and there is no other")


def _dataset(draft: Draft, entry: Entry) -> Fate:
    target = "data.train" if entry.key == "dataset" else "data.eval"
    datasets = entry.value if isinstance(entry.value, list) else [entry.value]
    cut = [str(dataset) for dataset in datasets if "#" in str(dataset) and _is_file(str(dataset).partition("#")[0])]
    if cut:
        raise UnfitError(f"{target} has them, but all rows: {', '.join(cut)} takes some of a file")
    return carried(target, draft.values.get(target))


def _loss_scale(draft: Draft, entry: Entry) -> Fate:
    base, _, more = text(entry.value).partition("+")
    if draft.values["method.type"] != "sft":
        return Fate("decided", "methods other than sft learn from whole answers")
    if base not in ("default", "last_round", "all") or (more and more != "ignore_empty_think"):
        raise UnfitError(f"{entry.value}: data.loss_on takes assistant, last and all, without weights in between")
    if more:
        draft.differ(entry.key, entry.value, "ms-swift leaves empty <think> passages out of the loss; here they count")
    if base == "default":
        return Fate("silent", "data.loss_on assistant is the default")
    draft.put("data.loss_on", "last" if base == "last_round" else "all", entry.key)
    return carried("data.loss_on", draft.values["data.loss_on"])


def _packing(draft: Draft, entry: Entry) -> Fate:
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.values["method.type"] != "sft":
        raise UnfitError("rows of this method are not packed")
    draft.put("data.packing", True, entry.key)
    return carried("data.packing", True)


def _modules(draft: Draft, entry: Entry) -> Fate:
    modules = names(entry.value)
    value: Any = "all-linear" if modules in (["all-linear"], ["ALL"]) else modules
    draft.put("adapter.target_modules", value, entry.key)
    return carried("adapter.target_modules", value)


def _template(draft: Draft, entry: Entry) -> Fate:
    if entry.value in ("default", "dummy"):
        draft.suspect(entry.key, f"template {entry.value} is not the model's own, which is taken here")
    return Fate("different", f"ms-swift writes rows by its template {entry.value}; {hf.OTHER_TEMPLATE}")


def _for(methods: str, target: str) -> Rule:
    def rule(draft: Draft, entry: Entry) -> Fate:
        if draft.values["method.type"] not in methods.split():
            return Fate("silent", f"goes with {methods}")
        value = entry.value
        if target == "method.beta" and value == 0 and draft.values["method.type"] != "grpo":
            draft.suspect(entry.key, "beta 0: nothing holds the model to what it was")
        if target == "method.label_smoothing" and value == 0:
            return Fate("silent", "is off")
        if target == "method.generation.top_k" and value == -1:
            value = 0
        if target == "method.scale_rewards" and isinstance(value, bool):
            value = "group" if value else "none"
        draft.put(target, value, entry.key)
        return carried(target, value)

    return rule


def _server(draft: Draft, entry: Entry) -> Fate:
    if draft.get("vllm_mode") != "server":
        return Fate("silent", "goes with vllm_mode server")
    host, port = draft.get("vllm_server_host", "127.0.0.1"), draft.get("vllm_server_port", 8000)
    host = host[0] if isinstance(host, list) else host
    port = port[0] if isinstance(port, list) else port
    draft.put("method.generation.vllm_server_base_url", f"http://{host}:{port}", entry.key)
    return carried("method.generation.vllm_server_base_url", f"http://{host}:{port}")


def _utilization(draft: Draft, entry: Entry) -> Fate:
    if draft.values["method.type"] != "grpo" or draft.get("vllm_mode") == "server" or not draft.get("use_vllm"):
        return Fate("silent", "goes with vLLM on the devices that train")
    return to("method.generation.vllm_gpu_memory_utilization", number)(draft, entry)


def _size(draft: Draft, entry: Entry) -> Fate:
    size = whole(entry.value)
    if size == 1:
        return Fate("silent", "is off")
    draft.put("parallel.sp_size", size, entry.key)
    return carried("parallel.sp_size", size)


_LORA: dict[str, Rule] = {
    "lora_rank": to("adapter.rank", whole),
    "lora_alpha": to("adapter.alpha", number),
    "lora_dropout": to("adapter.dropout", number),
    "target_modules": _modules,
    "modules_to_save": to("adapter.modules_to_save", names),
    "use_rslora": to("adapter.use_rslora", truth),
    "use_dora": to("adapter.use_dora", truth),
    "lora_dtype": decided(hf.PRECISION),
    "lora_bias": refused("biases are not trained beside an adapter", off=("none",)),
    "bnb_4bit_quant_type": to("adapter.quant_type", text),
    "bnb_4bit_use_double_quant": to("adapter.double_quant", truth),
    **each(decided(hf.PRECISION), "bnb_4bit_compute_dtype bnb_4bit_quant_storage"),
    "init_weights": refused("adapters start at zero, as in PEFT", off=(True,)),
    **each(
        refused("not there: adapters lie on modules, with one learning rate"),
        "target_regex target_parameters lorap_lr_ratio",
    ),
}

_METHOD: dict[str, Rule] = {
    "rlhf_type": _kind,
    "beta": _for("dpo kto orpo cpo grpo", "method.beta"),
    "loss_type": _for("dpo kto cpo grpo", "method.loss_type"),
    "loss_weights": _for("dpo", "method.loss_weights"),
    "label_smoothing": _for("dpo cpo", "method.label_smoothing"),
    "cpo_alpha": _for("cpo", "method.cpo_alpha"),
    "simpo_gamma": _for("cpo", "method.simpo_gamma"),
    "desirable_weight": _for("kto", "method.desirable_weight"),
    "undesirable_weight": _for("kto", "method.undesirable_weight"),
    "center_rewards_coefficient": _for("reward", "method.center_rewards_coefficient"),
    "rpo_alpha": refused("method.loss_type [sigmoid, sft] with method.loss_weights comes to the same"),
    "ld_alpha": _for("dpo", "method.trainer_args.ld_alpha"),
    "discopop_tau": _for("dpo", "method.trainer_args.discopop_tau"),
    "precompute_ref_log_probs": _for("dpo kto", "method.precompute_ref_log_probs"),
    **{
        name: _for("grpo", f"method.{name}")
        for name in (
            *("num_generations", "max_completion_length", "num_iterations", "scale_rewards"),
            *("epsilon", "epsilon_high", "importance_sampling_level"),
        )
    },
    **{
        name: _for("grpo", f"method.generation.{name}")
        for name in ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "use_vllm", "vllm_mode"]
    },
    "overlong_filter": _for("grpo", "method.mask_truncated_completions"),
    "stop_words": _for("grpo", "method.generation.stop"),
    "reward_funcs": rewards("reward_weights"),
    "reward_weights": silent("each of method.rewards has its weight"),
    "reward_model": refused("method.rewards takes {type: reward_model, model: NAME}"),
    "vllm_gpu_memory_utilization": _utilization,
    "vllm_server_host": _server,
    "vllm_server_port": _server,
    "vllm_server_base_url": _for("grpo", "method.generation.vllm_server_base_url"),
    "sync_ref_model": hf.trainer_arg(),
    "ref_model_sync_steps": hf.trainer_arg(),
    "ref_model_mixup_alpha": hf.trainer_arg(),
    **each(
        decided("answers and their rewards are in the run's folder"),
        "log_completions log_entropy wandb_log_unique_prompts",
    ),
    **each(
        decided("the plan says how vLLM is used: method.generation"),
        "vllm_max_model_len vllm_max_num_seqs vllm_tensor_parallel_size vllm_enforce_eager "
        "vllm_limit_mm_per_prompt vllm_enable_prefix_caching vllm_server_timeout vllm_server_group_port "
        "vllm_enable_lora vllm_data_parallel_size vllm_max_lora_rank vllm_pipeline_parallel_size "
        "vllm_engine_kwargs sleep_level move_model_batches offload_optimizer offload_model "
        "gc_collect_after_offload async_generate vllm_disable_custom_all_reduce vllm_use_async_engine "
        "vllm_device num_infer_workers tensor_parallel_size",
    ),
    **each(
        refused("not there for grpo; `tunekit explain method` lists what is"),
        "delta dynamic_sample max_resample_times soft_max_length soft_cache_length top_entropy_quantile "
        "tau_pos tau_neg advantage_estimator kl_in_reward multi_turn_scheduler max_turns "
        "completion_length_limit_scope vllm_server_pass_dataset use_gym_env gym_env reward_model_plugin "
        "chord_sft_dataset chord_sft_per_device_train_batch_size chord_enable_phi_function "
        "chord_mu_warmup_steps chord_mu_decay_steps chord_mu_peak chord_mu_valley "
        "cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct "
        "cosine_max_len_value_correct cosine_max_len repetition_n_grams repetition_max_penalty "
        "generation_batch_size steps_per_generation num_generations_eval rollout_importance_sampling_mode "
        "rollout_importance_sampling_threshold real_tau structured_outputs_regex reward_template "
        "reward_adapters reward_model_type fipo_decay_rate fipo_clip_range fipo_clip_high_only "
        "fipo_safety_threshold off_policy_sequence_mask_delta log_rollout_offpolicy_metrics",
    ),
    **each(
        refused("what training holds to is the model that it starts from"),
        "ref_model ref_adapters ref_model_type ref_model_revision",
    ),
}

_OWN: dict[str, Rule] = {
    "model": to("model.path", text),
    "model_id_or_path": both(to("model.path", text), "is called model in ms-swift now"),
    "model_revision": to("model.revision", text),
    "model_type": decided(hf.MODEL_CLASS),
    "task_type": refused("method: sft and reward have their own heads", off=("causal_lm",)),
    "torch_dtype": hf.dtype,
    "attn_impl": hf.attention,
    "tuner_type": _tuner_type,
    "train_type": _tuner_type,
    "sft_type": both(_tuner_type, "is called tuner_type in ms-swift now"),
    "tuner_backend": decided(hf.KERNELS),
    "quant_bits": _bits,
    "quant_method": refused("adapter: qlora quantises with bitsandbytes", off=("bnb",)),
    "adapters": refused("model.path names the folder of an adapter to go on with"),
    "resume_only_model": silent("goes with resume_from_checkpoint"),
    "dataset": _dataset,
    "val_dataset": _dataset,
    "split_dataset_ratio": hf.holdout,
    "dataset_shuffle": hf.shuffle,
    "train_dataloader_shuffle": hf.shuffle,
    "val_dataset_shuffle": silent("evaluation has no order"),
    "interleave_prob": lambda draft, entry: carried("data.train", draft.values.get("data.train")),
    "stopping_strategy": lambda draft, entry: _stopping(draft, entry),
    "columns": refused("data.columns names them: {ours: theirs}"),
    "streaming": flag(to("data.streaming", truth)),
    "shuffle_buffer_size": decided("a stream is shuffled as far as memory allows"),
    "custom_dataset_info": refused("a source names its columns and format itself"),
    "custom_register_path": refused("a function makes rows: data.format: module:function"),
    "external_plugins": refused("a function of yours is named as module:function in data.format or method.rewards"),
    "system": refused("a system message stands in the rows, or in the template"),
    "model_author": refused("rows are taken as they are"),
    "model_name": refused("rows are taken as they are"),
    "template": _template,
    "template_backend": decided(hf.TEMPLATE),
    "use_chat_template": flag(decided(hf.TEMPLATE), different(_PLAIN_TEXT)),
    **each(different(hf.OTHER_TEMPLATE), "agent_template response_prefix"),
    **each(
        refused("reasoning stands in the rows, as the template writes it"),
        "enable_thinking preserve_thinking add_non_thinking_prefix",
    ),
    "max_length": to("data.max_length", whole),
    "max_model_len": decided("data.max_length is the longest sequence"),
    "truncation_strategy": hf.too_long("right"),
    "loss_scale": _loss_scale,
    "is_binary_loss_scale": silent("masks are on or off"),
    "packing": _packing,
    **each(
        decided("tunekit fills packed sequences as full as they get"),
        "packing_cache packing_length packing_num_proc packing_strategy",
    ),
    "padding_free": decided("data.padding_free auto lays rows one behind the other where flash attention runs"),
    "padding_side": decided("rows are padded to their longest or not at all"),
    "sequence_parallel_size": _size,
    "add_version": decided(hf.FOLDER),
    "create_checkpoint_symlink": decided(hf.FOLDER),
    "max_epochs": refused("train.num_epochs and train.max_steps say how long"),
    "check_model": silent("looked at when the model is loaded"),
    "strict": lambda draft, entry: Fate("decided", "a bad row ends it; data.max_bad_rows lets some be left out"),
    "ignore_args_error": silent("unknown keys are named"),
    "use_hf": silent("names are those of Hugging Face's hub"),
    "optimizer": refused("train.optim names those that are there"),
    "early_stop_interval": refused("a run is not ended early; its best checkpoint is kept beside"),
    "metric": decided("train.metric_for_best_model"),
    "eval_metric": decided("train.metric_for_best_model"),
    "router_aux_loss_coef": hf.trainer_arg(),
    "ddp_timeout": decided(hf.DEVICES),
    **each(
        decided(hf.DEVICES),
        "deepspeed fsdp device_map max_memory zero_hpz_partition_size deepspeed_autotp_size ddp_backend "
        "low_cpu_mem_usage ray use_ray device_groups",
    ),
    **each(decided(hf.CHECKPOINTING), "vit_gradient_checkpointing"),
    **each(decided(hf.KERNELS), "use_logits_to_keep use_cce experts_impl"),
    **each(
        decided(hf.LOADING),
        "dataset_num_proc load_from_cache_file lazy_tokenize download_mode model_kwargs hub_token "
        "cached_dataset_dir remove_unused_columns local_repo_path disable_auto_column_mapping "
        "safe_serialization max_shard_size acc_strategy",
    ),
    **each(refused("prepared by another tool: data.train names the rows"), "cached_dataset cached_val_dataset"),
    **each(refused(hf.MULTIMODAL), "freeze_vit freeze_aligner max_pixels norm_bbox vit_lr aligner_lr"),
    "freeze_llm": refused("parts of a model are not trained by themselves"),
    **each(
        refused("parts of a model are not trained by themselves: adapter.modules_to_save"),
        "freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters "
        "trainable_parameters_regex",
    ),
    "rope_scaling": refused("a model's configuration is not changed"),
    "new_special_tokens": refused("tokens are not added to a vocabulary"),
    "num_labels": refused("method: reward has one output"),
    "problem_type": refused("method: reward has one output"),
    **each(refused("this loss is not there"), "enable_dft_loss enable_channel_loss mrl_dims sft_alpha"),
    **each(
        refused("this optimizer is not there"),
        "use_galore galore_target_modules galore_rank galore_update_proj_gap galore_scale "
        "galore_proj_type galore_optim_per_parameter galore_with_embedding galore_quantization "
        "galore_proj_quant galore_proj_bits galore_proj_group_size galore_cos_threshold galore_gamma_proj "
        "galore_queue_size lisa_activated_layers lisa_step_interval",
    ),
    **each(
        refused("adapter takes full, lora and qlora"),
        "fourier_n_frequency fourier_scaling boft_block_size boft_block_num boft_n_butterfly_factor "
        "boft_dropout vera_rank vera_projection_prng_key vera_dropout vera_d_initial adapter_act "
        "adapter_length adalora_target_r adalora_init_r adalora_tinit adalora_tfinal adalora_deltaT "
        "adalora_beta1 adalora_beta2 adalora_orth_reg_weight llamapro_num_new_blocks llamapro_num_groups "
        "reft_layer_key reft_layers reft_rank reft_intervention_type reft_args hqq_axis "
        "lora_ga_batch_size lora_ga_iters lora_ga_max_length lora_ga_direction lora_ga_scale "
        "lora_ga_stable_gamma use_swift_lora",
    ),
    **each(
        refused(trackers.NO_TRACKER),
        "swanlab_token swanlab_project swanlab_workspace swanlab_exp_name swanlab_mode "
        "swanlab_lark_webhook_url swanlab_lark_secret",
    ),
    **each(
        silent("settings of generation; training does not read them"),
        "max_new_tokens num_beams stream logprobs top_logprobs eval_use_evalscope eval_dataset "
        "eval_dataset_args eval_limit eval_generation_config extra_eval_args predict_with_generate "
        "infer_backend",
    ),
    "callbacks": refused("functions of yours are not called while it trains"),
    "loss": refused("a loss of your own is not taken"),
    "use_flash_ckpt": decided(hf.CHECKPOINTS),
    "load_args": silent("the file says it"),
    "load_data_args": silent("the file says it"),
    "config": silent("the file says it"),
}


def _stopping(draft: Draft, entry: Entry) -> Fate:
    if draft.get("interleave_prob") is None:
        return Fate("silent", "goes with interleave_prob")
    return to("data.stopping_strategy", text)(draft, entry)


def rules(draft: Draft) -> Rules:
    """ms-swift's arguments."""
    return {**hf.HF_RULES, **_OWN, **with_adapter(_LORA), **_METHOD}
