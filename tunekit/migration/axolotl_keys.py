"""Axolotl's keys beside method, rows, adapter and batch: the model, kernels, devices, trackers and the rest."""

from tunekit.migration import axolotl_rows as rows
from tunekit.migration import trackers
from tunekit.migration import training as hf
from tunekit.migration.draft import (
    Draft,
    Rule,
    UnfitError,
    both,
    carried,
    decided,
    each,
    flag,
    names,
    refused,
    silent,
    text,
    to,
    whole,
)
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate

_NOT_THERE = refused("not there")
OTHER: dict[str, Rule] = {
    "base_model": to("model.path", text),
    "revision_of_model": to("model.revision", text),
    "trust_remote_code": flag(both(decided(hf.REMOTE_CODE), "code that comes with a model is run")),
    "chat_template": rows.template,
    "chat_template_jinja": rows.jinja,
    "default_system_message": refused("a system message stands in the rows, or in the template"),
    "eot_tokens": decided("which tokens end a turn is found from the template"),
    "chat_template_kwargs": refused(
        "arguments of a template: write them into a template of your own, model.chat_template"
    ),
    "special_tokens": lambda draft, entry: _special(draft, entry),
    "tokens": refused("tokens are not added to a vocabulary"),
    "added_tokens_overrides": refused("tokens are not added to a vocabulary"),
    "fix_untrained_tokens": refused("embeddings of tokens are not mended"),
    **each(
        silent("embeddings stay as they are"),
        "resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings embeddings_skip_upcast",
    ),
    **each(
        decided(hf.MODEL_CLASS),
        "base_model_config base_model_ignore_patterns model_type type_of_model tokenizer_type "
        "tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common "
        "tokenizer_save_jinja_files cls_model_config is_falcon_derived_model is_llama_derived_model "
        "is_mistral_derived_model is_qwen_derived_model experimental_skip_move_to_device",
    ),
    **each(
        refused("a model's configuration is not changed"),
        "overrides_of_model_config overrides_of_model_kwargs model_config rope_scaling "
        "model_quantization_config model_quantization_config_kwargs use_onebitllms processor_kwargs",
    ),
    **each(
        refused(hf.MULTIMODAL),
        "image_size image_resize_algorithm freeze_mm_modules processor_type",
    ),
    **each(
        decided(hf.ATTENTION),
        "flash_attention xformers_attention sdp_attention flex_attention flex_attn_compile_kwargs "
        "sage_attention flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_d512 "
        "sdpa_varlen fused_attn_kernel gemma4_hybrid_attn_impl large_head_attention flash_optimum",
    ),
    "eager_attention": flag(to("model.attn_implementation", lambda value: "eager")),
    "attn_implementation": hf.attention,
    "s2_attention": refused("shifted sparse attention is not there"),
    **each(
        decided(hf.KERNELS),
        "liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_swiglu "
        "liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy "
        "liger_use_token_scaling liger_kernel_impl cut_cross_entropy unsloth_cross_entropy_loss "
        "chunked_cross_entropy chunked_cross_entropy_num_chunks use_kernels use_scattermoe use_sonicmoe "
        "moe_grouped_backend experts_implementation tiled_mlp tiled_mlp_num_shards "
        "tiled_mlp_use_original_mlp expert_backend llama4_linearized_experts unsloth_lora_mlp "
        "unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope",
    ),
    "plugins": lambda draft, entry: _plugins(draft, entry),
    **each(
        decided(hf.DEVICES),
        "fsdp fsdp_config fsdp_version fsdp_final_state_dict_type deepspeed deepcompile device device_map "
        "world_size ddp heads_k_stride ring_attn_func dp_replicate_size ray_num_workers use_ray "
        "resources_per_worker ray_run_name capabilities env_capabilities torch_dist",
    ),
    "dp_shard_size": to("parallel.dp_shard_size", whole),
    "tensor_parallel_size": lambda draft, entry: _size(draft, entry, "parallel.tp_size"),
    "context_parallel_size": lambda draft, entry: _size(draft, entry, "parallel.cp_size"),
    "sequence_parallel_degree": lambda draft, entry: _size(draft, entry, "parallel.cp_size"),
    "expert_parallel_size": refused("experts are not spread by themselves; the plan shards them with the layers"),
    **each(
        decided(hf.LOADING),
        "dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory "
        "skip_prepare_dataset is_preprocess preprocess_iterable num_dataset_shards_to_save",
    ),
    **each(
        refused(rows.SHARDED),
        "dataset_shard_num dataset_shard_idx",
    ),
    "dataset_exact_deduplication": refused("equal rows are kept; `tunekit data` shows them"),
    "push_dataset_to_hub": refused(hf.HUB),
    "hf_use_auth_token": silent("the hub's own login is used"),
    "pretraining_dataset": lambda draft, entry: carried("data.train", entry.value),
    "auto_resume_from_checkpoints": decided("`tunekit train --resume` goes on with the run of a recipe"),
    "lora_model_dir": refused("model.path names the folder of an adapter to go on with"),
    "use_wandb": trackers.switch("wandb"),
    "wandb_project": trackers.variable("WANDB_PROJECT", implies="wandb"),
    "wandb_entity": trackers.variable("WANDB_ENTITY"),
    "wandb_mode": trackers.variable("WANDB_MODE"),
    "wandb_run_id": trackers.variable("WANDB_RUN_ID"),
    "use_mlflow": trackers.switch("mlflow"),
    "mlflow_experiment_name": trackers.variable("MLFLOW_EXPERIMENT_NAME", implies="mlflow"),
    "mlflow_tracking_uri": trackers.variable("MLFLOW_TRACKING_URI"),
    "use_trackio": trackers.switch("trackio"),
    "trackio_project_name": trackers.variable("TRACKIO_PROJECT", implies="trackio"),
    "trackio_space_id": trackers.variable("TRACKIO_SPACE_ID"),
    "use_tensorboard": trackers.switch("tensorboard"),
    **each(refused(trackers.NAME), "mlflow_run_name trackio_run_name"),
    **each(refused(trackers.UPLOADS), "wandb_watch wandb_log_model hf_mlflow_log_artifacts"),
    **each(
        refused(trackers.NO_TRACKER, off=("disabled",)),
        "use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode "
        "comet_online comet_experiment_config use_swanlab swanlab_project swanlab_experiment_name "
        "swanlab_description swanlab_mode swanlab_workspace swanlab_api_key swanlab_log_model "
        "swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer "
        "use_otel_metrics otel_metrics_host otel_metrics_port",
    ),
    "wandb_name": hf.run_name,
    **each(
        decided("output.sample_prompts are answered before and after training"),
        "eval_table_size eval_max_new_tokens generate_samples num_generation_samples "
        "generation_max_new_tokens generation_temperature generation_top_p generation_top_k "
        "generation_prompt_ratio generation_do_sample",
    ),
    **each(
        refused("measures beside the loss are not taken while it trains"),
        "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split lm_eval_tasks "
        "lm_eval_batch_size lm_eval_post_train",
    ),
    **each(
        silent("asks for nothing here"),
        "strict debug axolotl_config_path save_jinja_files gradio_title gradio_share gradio_server_name "
        "gradio_server_port gradio_max_new_tokens gradio_temperature profiler_steps_start include_tkps "
        "profiler_steps",
    ),
    **each(
        _NOT_THERE,
        "lisa_n_layers lisa_step_interval lisa_layers_attribute ebft use_pose pose_split_on_token_ids "
        "pose_max_context_len pose_num_chunks use_eaft eaft_alpha eaft_k scaling_softmax "
        "scaling_softmax_factor scaling_softmax_bias dynamic_checkpoint diffusion mora hatchery "
        "kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_beta kd_normalize_topk spectrum_top_fraction "
        "spectrum_model_name llmcompressor grokfast_alpha grokfast_lamb dense_mixer quantize_moe_experts "
        "use_dft use_dynamic_finetuning ple_cpu_offload nemo_gym_enabled nemo_gym_datasets use_bitnet "
        "role_boundaries nvfp4_merge_aware nvfp4_merge_aware_start_step use_dsv4_kernels "
        "use_glm_dsa_kernels dsv4_fp4_grouped_mode expert_parallel_backend expert_parallel_num_nvl_bytes "
        "expert_parallel_num_rdma_bytes expert_parallel_token_capacity "
        "expert_parallel_fallback_on_unsupported",
    ),
}

"""Keys by their rules."""


def _special(draft: Draft, entry: Entry) -> Fate:
    if entry.key.endswith("pad_token"):
        return Fate("decided", "padding is never learned, whichever token it is")
    return Fate("different", "the tokenizer of the model keeps its own special tokens")


def _plugins(draft: Draft, entry: Entry) -> Fate:
    supported = ("liger", "cut_cross_entropy", "kernels")
    unsupported = [name for name in names(entry.value) if not any(word in name.lower() for word in supported)]
    if unsupported:
        raise UnfitError(f"not there: {', '.join(name.rpartition('.')[2] for name in unsupported)}")
    return Fate("decided", hf.KERNELS)


def _size(draft: Draft, entry: Entry, target: str) -> Fate:
    size = whole(entry.value)
    if size == 1:
        return Fate("silent", "is off")
    draft.put(target, size, entry.key)
    return carried(target, size)
