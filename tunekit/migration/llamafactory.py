"""LLaMA-Factory's YAML or JSON -> a recipe, with its dataset_info.json where it is at hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunekit.errors import RecipeError
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
from tunekit.migration.original import Entry, read_mapping
from tunekit.migration.report import Fate

MARKS = frozenset(
    {
        "stage",
        "finetuning_type",
        "cutoff_len",
        "template",
        "dataset_dir",
        "lora_target",
        "pref_beta",
        "pref_loss",
        "lora_rank",
        "quantization_bit",
        "preprocessing_num_workers",
        "plot_loss",
        "val_size",
        "overwrite_cache",
        "model_name_or_path",
    }
)
"""Keys by which a configuration of LLaMA-Factory is told from others."""

_METHODS = {"sft": "sft", "pt": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}
_LIKE_MODELS = {
    "llama2": "llama-2",
    "llama3": "llama-3",
    "qwen": "qwen",
    "mistral": "mistral",
    "gemma": "gemma",
    "phi": "phi",
    "deepseek": "deepseek",
    "chatglm": "glm",
    "glm4": "glm",
    "baichuan": "baichuan",
    "yi": "yi",
    "intern": "intern",
}
"""Beginnings of templates, and what the name of a model has that they are for."""


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    hf.set_batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps", default_micro=8)
    stage, loss = draft.get("stage", "sft"), draft.get("pref_loss", "sigmoid")
    if stage not in _METHODS:
        raise no_method(draft, "stage", str(stage))
    method = {"orpo": "orpo", "simpo": "cpo"}.get(loss, "dpo") if stage == "dpo" else _METHODS[stage]
    draft.put("method.type", method, "stage")
    if method == "cpo":
        draft.put("method.loss_type", "simpo", "pref_loss")
    _adapter(draft)
    for target, key in (("data.train", "dataset"), ("data.eval", "eval_dataset")):
        hf.put_sources(draft, target, list(_sources(draft, key)), key)


def _adapter(draft: Draft) -> None:
    kind = draft.get("finetuning_type", "lora")
    is_small = draft.get("quantization_bit") in (4, "4") and str(draft.get("quantization_method", "bnb")) in (
        "bnb",
        "bitsandbytes",
    )
    draft.put(
        "adapter.type",
        "full" if kind == "full" else "qlora" if is_small else "lora",
        "finetuning_type",
        "quantization_bit",
    )


def finish(draft: Draft) -> None:
    """Say what LLaMA-Factory does where the file says nothing, and what looks wrong."""
    own = "LLaMA-Factory's default, where the file says nothing"
    draft.assume("data.max_length", 2048, own)
    hf.hf_defaults(draft, learning_rate=5e-5)
    if draft.values["adapter.type"] != "full":
        draft.assume("adapter.rank", 8, own)
        draft.assume("adapter.alpha", 2 * draft.values["adapter.rank"], own)
    if draft.get("stage") == "pt" and draft.get("packing") is None:
        draft.assume("data.packing", True, "LLaMA-Factory packs texts of stage pt")
    if _has_alpaca(draft):
        what = "LLaMA-Factory joins instruction and input by a line break"
        draft.differ("dataset", draft.get("dataset"), f"{what}; here a blank line stands between them")
    if draft.get("stage", "sft") != "pt":
        what = "LLaMA-Factory shortens the turns of a row longer than cutoff_len, questions as well as answers"
        draft.differ("cutoff_len", draft.values["data.max_length"], f"{what}; {hf.CUT}")
    if draft.get("packing") is True and not draft.get("neat_packing"):
        draft.suspect(
            "packing", "packing without neat_packing: documents of one sequence saw each other; here they do not"
        )
    if draft.get("finetuning_type") == "full" and draft.get("quantization_bit"):
        draft.suspect(
            "quantization_bit", "quantization_bit with finetuning_type full: quantised weights cannot be trained"
        )


def _has_alpaca(draft: Draft) -> bool:
    sources = draft.values.get("data.train")
    formats = (
        [source_values.get("format") if isinstance(source_values, dict) else None for source_values in sources]
        if isinstance(sources, list)
        else []
    )
    return "alpaca" in (*formats, draft.values.get("data.format"))


def _sources(draft: Draft, key: str) -> Iterator[dict[str, Any]]:
    """The data sets that a key names, as sources of rows."""
    value = draft.get(key)
    if value is None:
        return
    folder = text(draft.get("dataset_dir", "data"))
    info = _dataset_info(draft, folder)
    weights = draft.get("interleave_probs")
    shares = [number(weight) for weight in names(weights)] if weights is not None else []
    chosen = names(value)
    interleaves = (
        str(draft.get("mix_strategy", "concat")).startswith("interleave") and len(chosen) > 1 and key == "dataset"
    )
    for place, name in enumerate(chosen):
        dataset = info.get(name)
        if not isinstance(dataset, dict):
            what = f"dataset {name} stands in no dataset_info.json that is at hand: data names {folder}/{name}.json"
            draft.suspect(key, f"{what}; look whether it is that")
            source_values = hf.source(f"{folder}/{name}.json")
        else:
            source_values = _source(draft, dataset, folder)
        if interleaves:
            source_values["weight"] = shares[place] if place < len(shares) else 1
        yield source_values
    if interleaves and draft.get("mix_strategy") == "interleave_over":
        draft.put("data.stopping_strategy", "all_exhausted", "mix_strategy")


def _dataset_info(draft: Draft, folder: str) -> dict[str, Any]:
    """Read dataset_info.json, in the folder of the data or beside the configuration."""
    for place in (Path(folder), draft.original.folder / folder, draft.original.folder):
        if (place / "dataset_info.json").is_file():
            return read_mapping(place / "dataset_info.json")
    return {}


def _source(draft: Draft, said: dict[str, Any], folder: str) -> dict[str, Any]:
    """An entry of dataset_info.json as a source of rows."""
    theirs = said.get("columns") if isinstance(said.get("columns"), dict) else {}
    media = next((name for name in ("images", "videos", "audios") if name in (theirs or {})), None)
    if media is not None:
        name = said.get("file_name") or said.get("hf_hub_url")
        raise RecipeError(
            f"{draft.original.path}: the dataset {name} has {media}, and only text is trained on",
            hint="name data sets of text in the file",
        )
    hub = said.get("hf_hub_url")
    split, limit = said.get("split"), draft.get("max_samples")
    if hub and isinstance(limit, int):
        split = f"{split or 'train'}[:{limit}]"
    path = str(hub) if hub else f"{folder}/{said.get('file_name', said.get('script_url', ''))}"
    format_, columns = _shape(said, draft.values["method.type"], draft.get("stage"))
    return hf.source(path, name=said.get("subset"), split=split if hub else None, format=format_, columns=columns)


def _shape(said: dict[str, Any], method: str, stage: Any) -> tuple[str | None, dict[str, str]]:
    """The format of rows, and their columns where they have other names than ours."""
    theirs = said.get("columns") if isinstance(said.get("columns"), dict) else {}
    tags = said.get("tags") if isinstance(said.get("tags"), dict) else {}
    assert isinstance(theirs, dict) and isinstance(tags, dict)
    is_chat = said.get("formatting", "alpaca") == "sharegpt"
    columns: dict[str, Any]
    if said.get("ranking") or method in ("dpo", "orpo", "cpo", "reward"):
        messages_key = theirs.get("messages", "conversations") if is_chat else theirs.get("prompt", "instruction")
        columns = {"conversations" if is_chat else "prompt": messages_key}
        columns |= {name: theirs.get(name, name) for name in ("chosen", "rejected")}
        return "preference", _differing(columns)
    if method == "kto" and not is_chat:
        columns = {"prompt": theirs.get("prompt", "instruction"), "completion": theirs.get("response", "output")}
        return "unpaired_preference", _differing(columns | {"label": theirs.get("kto_tag", "label")})
    if stage == "pt":
        return "text", _differing({"text": theirs.get("prompt", "text")})
    if is_chat:
        kind = "messages" if tags.get("role_tag", "from") == "role" else "sharegpt"
        column = "messages" if kind == "messages" else "conversations"
        return kind, _differing({column: theirs.get("messages", "conversations")})
    ours = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
    return "alpaca", _differing({ours[name]: column for name, column in theirs.items() if name in ours})


def _differing(columns: dict[str, Any]) -> dict[str, str]:
    return {ours: str(theirs) for ours, theirs in columns.items() if theirs and ours != theirs}


# Rules


def _stage(draft: Draft, entry: Entry) -> Fate:
    return carried("method.type", draft.values["method.type"])


def _finetuning(draft: Draft, entry: Entry) -> Fate:
    if entry.value not in ("full", "lora"):
        raise UnfitError(f"{entry.value} is not there: adapter takes full, lora, qlora; the recipe has lora")
    return carried("adapter.type", draft.values["adapter.type"])


def _bits(draft: Draft, entry: Entry) -> Fate:
    if draft.values["adapter.type"] == "qlora":
        return carried("adapter.type", "qlora")
    if draft.values["adapter.type"] == "full":
        raise UnfitError("quantised weights cannot be trained: adapter: qlora trains an adapter beside them")
    raise UnfitError("adapter: qlora has a base in 4 bits by bitsandbytes, and there is no other")


def _quantization_method(draft: Draft, entry: Entry) -> Fate:
    if str(entry.value) in ("bnb", "bitsandbytes"):
        return Fate("silent", "adapter: qlora quantises with bitsandbytes")
    raise UnfitError(f"{entry.value} is not there: adapter: qlora quantises with bitsandbytes")


def _template(draft: Draft, entry: Entry) -> Fate:
    name, model = text(entry.value).lower(), str(draft.get("model_name_or_path", "")).lower()
    if name in ("default", "empty", "alpaca", "vicuna"):
        draft.suspect(
            entry.key,
            f"template {name} is not the model's own, which is taken here: the model learned another form of dialogue",
        )
    for beginning, of_model in _LIKE_MODELS.items():
        if name.startswith(beginning) and of_model not in model.replace("_", "-") and "/" in model:
            draft.suspect(
                entry.key, f"template {name} is for another family than the model {draft.get('model_name_or_path')}"
            )
            break
    return Fate("different", f"LLaMA-Factory writes rows by its template {entry.value}; {hf.OTHER_TEMPLATE}")


def _dataset(draft: Draft, entry: Entry) -> Fate:
    target = "data.train" if entry.key == "dataset" else "data.eval"
    return carried(target, draft.values.get(target))


def _max_samples(draft: Draft, entry: Entry) -> Fate:
    existing_sources = draft.values.get("data.train")
    sources = existing_sources if isinstance(existing_sources, list) else [existing_sources]
    if all(isinstance(source_values, dict) and "[:" in str(source_values.get("split")) for source_values in sources):
        return Fate("carried", f"split: train[:{entry.value}]")
    return Fate("unsupported", "all rows of a file are taken; a hub data set takes split: train[:1000]")


def _loss_on_all(draft: Draft, entry: Entry) -> Fate:
    if not truth(entry.value):
        return Fate("silent", "data.loss_on assistant is the default")
    draft.put("data.loss_on", "all", entry.key)
    draft.suspect(entry.key, "train_on_prompt: the model learns to write the user's turns as well")
    return carried("data.loss_on", "all")


def _loss_on_last(draft: Draft, entry: Entry) -> Fate:
    if not truth(entry.value):
        return Fate("silent", "is off")
    draft.put("data.loss_on", "last", entry.key)
    return carried("data.loss_on", "last")


def _packing(draft: Draft, entry: Entry) -> Fate:
    if not truth(entry.value):
        if draft.get("neat_packing"):
            return Fate("silent", "neat_packing packs")
        draft.put("data.packing", False, entry.key)
        return Fate("silent", "is off")
    draft.put("data.packing", True, entry.key)
    return carried("data.packing", True)


def _targets(draft: Draft, entry: Entry) -> Fate:
    modules = names(entry.value)
    value: Any = "all-linear" if modules == ["all"] else modules
    draft.put("adapter.target_modules", value, entry.key)
    return carried("adapter.target_modules", value)


def _loss(draft: Draft, entry: Entry) -> Fate:
    method = draft.values["method.type"]
    if method in ("orpo", "cpo"):
        return carried("method.type", method)
    if method != "dpo":
        return Fate("silent", "goes with stage dpo")
    if entry.value == "kto_pair":
        raise UnfitError("kto_pair is gone from TRL; stage kto learns from single answers")
    mixed = number(draft.get("pref_ftx", 0))
    value: Any = [entry.value, "sft"] if mixed else entry.value
    draft.put("method.loss_type", value, entry.key)
    return carried("method.loss_type", value)


def _mixed(draft: Draft, entry: Entry) -> Fate:
    weight = number(entry.value)
    if not weight or draft.values["method.type"] != "dpo":
        return Fate("silent", "is off")
    draft.put("method.loss_type", [draft.get("pref_loss", "sigmoid"), "sft"], entry.key)
    draft.put("method.loss_weights", [1.0, float(weight)], entry.key)
    return carried("method.loss_weights", [1.0, float(weight)])


def _beta(draft: Draft, entry: Entry) -> Fate:
    if draft.values["method.type"] not in ("dpo", "kto", "orpo", "cpo"):
        return Fate("silent", "goes with stages dpo and kto")
    value = number(entry.value)
    if value == 0:
        draft.suspect(entry.key, "pref_beta 0: nothing holds the model to what it was")
    draft.put("method.beta", value, entry.key)
    return carried("method.beta", value)


def _only(method: str, target: str) -> Rule:
    def rule(draft: Draft, entry: Entry) -> Fate:
        value = number(entry.value)
        if draft.values["method.type"] != method:
            return Fate("silent", f"goes with {method}")
        if value == 0:
            return Fate("silent", "is off")
        draft.put(target, value, entry.key)
        return carried(target, value)

    return rule


def _optimizer(name: str) -> Rule:
    return refused(f"{name} is not there: train.optim names those that are; adapter: lora saves as much memory")


_OWN: dict[str, Rule] = {
    "stage": _stage,
    "finetuning_type": _finetuning,
    "model_name_or_path": to("model.path", text),
    "model_revision": lambda draft, entry: (
        Fate("silent", "main is the default") if entry.value == "main" else to("model.revision", text)(draft, entry)
    ),
    "adapter_name_or_path": refused("model.path names the folder of an adapter to go on with"),
    "quantization_bit": _bits,
    "quantization_method": _quantization_method,
    "quantization_type": with_adapter({"": to("adapter.quant_type", text)})[""],
    "double_quantization": with_adapter({"": to("adapter.double_quant", truth)})[""],
    "quantization_device_map": decided(hf.DEVICES),
    "dataset": _dataset,
    "eval_dataset": _dataset,
    "dataset_dir": silent("the files of data.train lie there"),
    "interleave_probs": lambda draft, entry: carried("data.train", draft.values.get("data.train")),
    "mix_strategy": lambda draft, entry: _mix(draft, entry),
    "max_samples": _max_samples,
    "val_size": hf.holdout,
    "template": _template,
    "cutoff_len": to("data.max_length", whole),
    "packing": _packing,
    "neat_packing": _packing,
    "train_on_prompt": _loss_on_all,
    "mask_history": _loss_on_last,
    "streaming": flag(to("data.streaming", truth)),
    "buffer_size": decided("a stream is shuffled as far as memory allows"),
    "disable_shuffling": hf.not_shuffled,
    "pref_loss": _loss,
    "pref_beta": _beta,
    "pref_ftx": _mixed,
    "pref_bco_weight": refused("method.loss_type [sigmoid, bco_pair] with method.loss_weights says it"),
    "dpo_label_smoothing": _only("dpo", "method.label_smoothing"),
    "ld_alpha": _only("dpo", "method.trainer_args.ld_alpha"),
    "simpo_gamma": _only("cpo", "method.simpo_gamma"),
    "kto_chosen_weight": _only("kto", "method.desirable_weight"),
    "kto_rejected_weight": _only("kto", "method.undesirable_weight"),
    "ref_model": refused("what training holds to is the model that it starts from"),
    "ref_model_adapters": refused("what training holds to is the model that it starts from"),
    "ref_model_quantization_bit": refused("what training holds to is the model that it starts from"),
    "trust_remote_code": flag(both(decided(hf.REMOTE_CODE), "code that comes with a model is run")),
    "flash_attn": decided(hf.ATTENTION),
    **each(refused("not there: attention is whole"), "shift_attn mixture_of_depths"),
    **each(decided(hf.KERNELS), "use_unsloth enable_liger_kernel use_v1_kernels"),
    **each(decided(hf.CHECKPOINTING), "use_unsloth_gc disable_gradient_checkpointing use_reentrant_gc"),
    **each(decided(hf.PRECISION), "pure_bf16 upcast_layernorm upcast_lmhead_output compute_dtype infer_dtype"),
    "fp8": flag(to("train.fp8", truth)),
    **each(decided(hf.PRECISION), "fp8_backend fp8_enable_fsdp_float8_all_gather"),
    **each(
        decided(hf.DEVICES),
        "device_map offload_folder low_cpu_mem_usage ray_run_name ray_storage_path ray_num_workers "
        "resources_per_worker placement_strategy ray_init_kwargs master_addr master_port use_ray "
        "ray_storage_filesystem",
    ),
    **each(
        refused("Megatron and other engines are not there"),
        "use_mca use_hyper_parallel hyper_parallel_args use_kt kt_weight_path kt_expert_checkpoint_path "
        "kt_use_lora_experts kt_optimize_rule cpu_infer chunk_size mode tensor_model_parallel_size "
        "pipeline_model_parallel_size expert_model_parallel_size sequence_parallel bias_activation_fusion "
        "apply_rope_fusion use_distributed_optimizer overlap_param_gather overlap_grad_reduce "
        "moe_grouped_gemm moe_token_dispatcher_type recompute_granularity "
        "virtual_pipeline_model_parallel_size kt_backend kt_num_threads kt_tp_enabled kt_num_gpu_experts "
        "kt_lora_expert_num kt_lora_expert_intermediate_size",
    ),
    **each(
        decided(hf.LOADING),
        "overwrite_cache preprocessing_num_workers preprocessing_batch_size tokenized_path cache_dir "
        "data_shared_file_system use_fast_tokenizer split_special_tokens media_dir eval_on_each_dataset "
        "ignore_pad_token_for_loss hf_hub_token ms_hub_token om_hub_token adapter_folder",
    ),
    **each(
        refused("tokens are not added to a vocabulary"),
        "resize_vocab add_tokens add_special_tokens new_special_tokens_config new_special_tokens init_special_tokens",
    ),
    "rope_scaling": refused("a model's configuration is not changed"),
    "moe_aux_loss_coef": hf.trainer_arg("router_aux_loss_coef"),
    "train_from_scratch": refused("models start from their weights"),
    "print_param_status": silent("the plan says what is trained"),
    **each(
        refused(hf.MULTIMODAL),
        "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels "
        "video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate "
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model image_resolution",
    ),
    **each(refused("reasoning stands in the rows, as the template writes it"), "enable_thinking preserve_thinking"),
    "tool_format": different(hf.OTHER_TEMPLATE),
    "default_system": refused("a system message stands in the rows, or in the template"),
    **each(
        _optimizer("GaLore"),
        "use_galore galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise",
    ),
    **each(
        _optimizer("APOLLO"),
        "use_apollo apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj "
        "apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front",
    ),
    **each(
        _optimizer("BAdam"),
        "use_badam badam_mode badam_start_block badam_switch_mode badam_switch_interval "
        "badam_update_ratio badam_mask_mode badam_verbose",
    ),
    **each(_optimizer("this optimizer"), "use_adam_mini use_muon"),
    **each(refused("this loss is not there"), "use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha"),
    **each(
        refused("adapter takes full, lora and qlora"),
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules use_llama_pro oft_rank "
        "oft_block_size oft_target module_dropout",
    ),
    **each(
        refused("PPO is not there; grpo and rloo learn from rewards"),
        "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model "
        "reward_model_adapters reward_model_quantization_bit reward_model_type",
    ),
    **each(
        refused(trackers.NO_TRACKER),
        "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key "
        "swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret",
    ),
    **each(refused("a run trains; what its model says is another command's"), "predict_with_generate compute_accuracy"),
    **each(
        silent("settings of generation; training does not read them"),
        "do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty "
        "length_penalty skip_special_tokens eval_num_beams infer_backend use_kv_cache vllm_maxlen "
        "vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen "
        "sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend",
    ),
    **each(
        silent("`tunekit export` takes a run"),
        "export_dir export_size export_device export_quantization_bit export_quantization_dataset "
        "export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id",
    ),
    **each(
        silent("profiles nothing"),
        "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps "
        "profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory "
        "profiler_with_stack",
    ),
    "early_stopping_steps": refused("a run is not ended early; its best checkpoint is kept beside"),
}

_LORA: dict[str, Rule] = {
    "lora_rank": to("adapter.rank", whole),
    "lora_alpha": to("adapter.alpha", number),
    "lora_dropout": to("adapter.dropout", number),
    "lora_target": _targets,
    "additional_target": to("adapter.modules_to_save", names),
    "use_rslora": to("adapter.use_rslora", truth),
    "use_dora": to("adapter.use_dora", truth),
    **each(
        refused("LoRA+ and PiSSA are not there"),
        "loraplus_lr_ratio loraplus_lr_embedding pissa_init pissa_iter pissa_convert",
    ),
    "create_new_adapter": silent("a run begins with a new adapter"),
}


def _mix(draft: Draft, entry: Entry) -> Fate:
    name = text(entry.value)
    if name == "concat":
        return Fate("silent", "sources without weights are taken whole")
    if "data.stopping_strategy" in draft.values:
        return carried("data.stopping_strategy", "all_exhausted")
    return Fate("carried", "data.train: weights of its sources")


def rules(draft: Draft) -> Rules:
    """LLaMA-Factory's arguments."""
    return {**hf.HF_RULES, **_OWN, **with_adapter(_LORA)}
