"""torchtune's YAML -> a recipe: its components by their names, and their arguments."""

import re
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
    carried,
    decided,
    each,
    names,
    number,
    refused,
    silent,
    to,
    truth,
    whole,
    with_adapter,
)
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.recipe.sections.section import Tracker

MARKS = frozenset({"checkpointer", "tokenizer", "metric_logger", "optimizer", "enable_activation_checkpointing"})
"""Keys by which a configuration of torchtune is told from others, besides `_component_`."""

_MODELS = {
    "llama2_7b": "meta-llama/Llama-2-7b-hf",
    "llama2_13b": "meta-llama/Llama-2-13b-hf",
    "llama2_70b": "meta-llama/Llama-2-70b-hf",
    "code_llama2_7b": "codellama/CodeLlama-7b-hf",
    "code_llama2_13b": "codellama/CodeLlama-13b-hf",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B",
    "llama3_70b": "meta-llama/Meta-Llama-3-70B",
    "llama3_1_8b": "meta-llama/Llama-3.1-8B",
    "llama3_1_70b": "meta-llama/Llama-3.1-70B",
    "llama3_1_405b": "meta-llama/Llama-3.1-405B",
    "llama3_2_1b": "meta-llama/Llama-3.2-1B",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B",
    "llama3_3_70b": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral_7b": "mistralai/Mistral-7B-v0.1",
    "gemma_2b": "google/gemma-2b",
    "gemma_7b": "google/gemma-7b",
    "gemma2_2b": "google/gemma-2-2b",
    "gemma2_9b": "google/gemma-2-9b",
    "gemma2_27b": "google/gemma-2-27b",
    "phi3_mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi4_14b": "microsoft/phi-4",
    "qwen2_0_5b": "Qwen/Qwen2-0.5B",
    "qwen2_1_5b": "Qwen/Qwen2-1.5B",
    "qwen2_7b": "Qwen/Qwen2-7B",
    "qwen2_5_0_5b": "Qwen/Qwen2.5-0.5B",
    "qwen2_5_1_5b": "Qwen/Qwen2.5-1.5B",
    "qwen2_5_3b": "Qwen/Qwen2.5-3B",
    "qwen2_5_7b": "Qwen/Qwen2.5-7B",
    "qwen2_5_14b": "Qwen/Qwen2.5-14B",
    "qwen2_5_32b": "Qwen/Qwen2.5-32B",
    "qwen2_5_72b": "Qwen/Qwen2.5-72B",
}
"""Builders of models, and the names of those models on the hub."""

_INSTRUCT = {"meta-llama": "-Instruct", "Qwen": "-Instruct", "google": "-it"}
"""Suffixes that makers add to the names of chat models."""

_OPTIMIZERS = {
    "torch.optim.AdamW": ("adamw_torch_fused", 0.01),
    "torch.optim.Adam": ("adamw_torch_fused", 0.0),
    "torch.optim.SGD": ("sgd", 0.0),
    "torch.optim.Adafactor": ("adafactor", 0.0),
    "bitsandbytes.optim.PagedAdamW": ("paged_adamw_32bit", 0.01),
    "bitsandbytes.optim.PagedAdamW8bit": ("paged_adamw_8bit", 0.01),
    "bitsandbytes.optim.AdamW8bit": ("adamw_bnb_8bit", 0.01),
    "bitsandbytes.optim.AdamW": ("adamw_torch_fused", 0.01),
    "torchao.optim.AdamW8bit": ("adamw_8bit", 0.01),
    "torchao.prototype.low_bit_optim.AdamW8bit": ("adamw_8bit", 0.01),
}
"""Optimizers, ours and the weight decay that each has by itself."""

_SCHEDULES = {"get_cosine_schedule_with_warmup": "cosine"}
_KNOWN_ROWS: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"path": "tatsu-lab/alpaca", "format": "alpaca", "loss_on": "all"},
    "alpaca_cleaned_dataset": {"path": "yahma/alpaca-cleaned", "format": "alpaca", "loss_on": "all"},
    "slimorca_dataset": {"path": "Open-Orca/SlimOrca-Dedup", "format": "sharegpt"},
    "samsum_dataset": {
        "path": "Samsung/samsum",
        "format": "prompt_completion",
        "columns": {"prompt": "dialogue", "completion": "summary"},
    },
    "grammar_dataset": {
        "path": "liweili/c4_200m",
        "format": "prompt_completion",
        "columns": {"prompt": "input", "completion": "output"},
    },
    "cnn_dailymail_articles_dataset": {
        "path": "ccdv/cnn_dailymail",
        "name": "3.0.0",
        "format": "text",
        "columns": {"text": "article"},
    },
    "wikitext_dataset": {
        "path": "EleutherAI/wikitext_document_level",
        "name": "wikitext-103-raw-v1",
        "format": "text",
        "columns": {"text": "page"},
    },
    "stack_exchange_paired_dataset": {
        "path": "lvwerra/stack-exchange-paired",
        "format": "preference",
        "columns": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
    },
    "hh_rlhf_helpful_dataset": {"path": "RLHFlow/HH-RLHF-Helpful-standard", "format": "preference"},
    "chat_dataset": {"path": None},
    "instruct_dataset": {
        "path": None,
        "format": "prompt_completion",
        "columns": {"prompt": "input", "completion": "output"},
    },
    "preference_dataset": {"path": None, "format": "preference"},
    "text_completion_dataset": {"path": None, "format": "text"},
}
"""Builders of data sets: what they read by themselves, in what shape."""

_PREAMBLE = (
    "torchtune writes 'Below is an instruction ... ### Instruction: ... ### Response:' into the user's turn; here "
    "instruction and input stand there as they are"
)
_AS_TURNS = "torchtune writes {}; here prompt and answer are joined as plain text"
_OTHER_PROMPTS = {
    **dict.fromkeys(("alpaca_dataset", "alpaca_cleaned_dataset"), _PREAMBLE),
    "samsum_dataset": _AS_TURNS.format("turns of a user, who asks to summarise, and the assistant"),
    "grammar_dataset": _AS_TURNS.format("turns of a user, who asks to correct, and the assistant"),
    "instruct_dataset": _AS_TURNS.format("a user's turn and the assistant's"),
    "stack_exchange_paired_dataset": _AS_TURNS.format("'Question: ... Answer: ' into a user's turn"),
}
"""Prompt templates of dataset builders that differ from the recipe's."""

_ROWS = re.compile(r"_(?:alpaca|chat|instruct)_")


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    draft.original.entries = tuple(_resolved(draft, entry) for entry in draft.original.entries)
    for key in ("teacher_model", "policy_model", "reward_and_value_model"):
        if draft.get(key) is not None:
            what = "distillation from a teacher's rows" if key == "teacher_model" else "PPO"
            where = f"{draft.original.path}:{draft.line_of(key)}: {key}"
            raise RecipeError(f"{where}: {what} is no method of tunekit's", hint="`tunekit explain method` lists those")
    hf.set_batch(draft, "batch_size", "gradient_accumulation_steps")
    if "method.type" not in draft.values:
        component = _last(draft.get("loss._component_", ""))
        losses = {"DPOLoss": "sigmoid", "RSOLoss": "hinge", "IPOLoss": "ipo", "SimPOLoss": "simpo"}
        if component in losses:
            draft.put("method.type", "cpo" if component == "SimPOLoss" else "dpo", "loss")
            if losses[component] != "sigmoid":
                draft.put("method.loss_type", losses[component], "loss._component_")
    _model(draft)
    for target, key in (("data.train", "dataset"), ("data.eval", "dataset_val")):
        dataset_values = draft.get(key)
        dataset_values = (
            dataset_values
            if isinstance(dataset_values, list)
            else [dataset_values]
            if isinstance(dataset_values, dict)
            else []
        )
        sources = [
            source_values
            for source_values in (_source(draft, item) for item in dataset_values)
            if source_values is not None
        ]
        if target == "data.eval":
            sources = [
                {name: value for name, value in source_values.items() if name != "loss_on"} for source_values in sources
            ]
        hf.put_sources(draft, target, sources, key)


def _resolved(draft: Draft, entry: Entry) -> Entry:
    """An entry in which `${other.key}` is filled in."""
    if not isinstance(entry.value, str) or "${" not in entry.value:
        return entry
    value = re.sub(r"\$\{([\w.]+)\}", lambda found: str(draft.get(found[1], found[0])), entry.value)
    return Entry(entry.key, value, entry.line)


def _last(component: Any) -> str:
    return str(component).rpartition(".")[2]


def _model(draft: Draft) -> None:
    """The model by its builder, and the adapter that the builder's name begins with."""
    builder = _last(draft.get("model._component_", ""))
    plain = builder.removeprefix("qlora_").removeprefix("lora_").removeprefix("dora_")
    is_small = builder.startswith("qlora_") or draft.get("model.quantize_base") is True
    has_adapter = plain != builder or draft.get("model.lora_rank") is not None
    draft.put("adapter.type", "qlora" if is_small else "lora" if has_adapter else "full", "model._component_")
    folder = str(draft.get("checkpointer.checkpoint_dir", ""))
    if Path(folder).is_dir() and (Path(folder) / "config.json").is_file():
        draft.put("model.path", folder, "checkpointer.checkpoint_dir")
        return
    chats = re.search(r"instruct|chat|-it\b", f"{folder} {builder}", re.IGNORECASE) is not None
    name = _MODELS.get(plain.removesuffix("_instruct").removesuffix("_base"))
    if name is None:
        if folder and not _is_of_images(plain):
            draft.put("model.path", folder.rstrip("/"), "checkpointer.checkpoint_dir")
        return
    maker = name.partition("/")[0]
    ending = _INSTRUCT.get(maker, "")
    if chats and not name.endswith(("-hf", "nstruct")):
        name += ending
    draft.put("model.path", name, "model._component_")


def _is_of_images(builder: str) -> bool:
    return "vision" in builder or "clip" in builder or "flux" in builder


def _source(draft: Draft, given: dict[str, Any]) -> dict[str, Any] | None:
    """A data set as a source of rows; None where its builder is not known."""
    defaults = _KNOWN_ROWS.get(_last(given.get("_component_")))
    if defaults is None:
        return None
    source_values = {name: value for name, value in defaults.items() if value is not None}
    if isinstance(given.get("source"), str):
        files = given.get("data_files")
        file = files if isinstance(files, str) else files[0] if isinstance(files, list) and files else None
        source_values["path"] = (
            file if given["source"] in ("json", "csv", "text", "parquet") and file else given["source"]
        )
    if given.get("split") not in (None, "train") and not _is_file(source_values.get("path")):
        source_values["split"] = given["split"]
    if given.get("name") or given.get("subset"):
        source_values["name"] = given.get("name") or given.get("subset")
    if given.get("train_on_input") is not None:
        source_values.pop("loss_on", None)
        if given["train_on_input"] is True:
            source_values["loss_on"] = "all"
    if isinstance(given.get("column_map"), dict):
        source_values["columns"] = _columns(given["column_map"], source_values.get("columns", {}))
    style = given.get("conversation_style")
    if _last(given.get("_component_")) == "chat_dataset":
        kind, column = ("sharegpt", "conversations") if style == "sharegpt" else ("messages", "messages")
        source_values["format"] = kind
        named = given.get("conversation_column", column)
        source_values["columns"] = {} if named == column else {column: named}
    if given.get("column") and source_values.get("format") == "text":
        source_values["columns"] = {"text": given["column"]} if given["column"] != "text" else {}
    return (
        {name: value for name, value in source_values.items() if value not in ({}, None)}
        if "path" in source_values
        else None
    )


def _is_file(path: Any) -> bool:
    return isinstance(path, str) and Path(path).suffix in (".json", ".jsonl", ".csv", ".txt", ".parquet")


def _columns(given: dict[str, Any], known: dict[str, str]) -> dict[str, str]:
    """A column map of torchtune's in our names."""
    ours = {"input": "prompt", "output": "completion", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    columns = dict(known) | {ours[name]: str(theirs) for name, theirs in given.items() if name in ours}
    return {name: theirs for name, theirs in columns.items() if name != theirs}


def finish(draft: Draft) -> None:
    """Say what torchtune does where the file says nothing, and what looks wrong."""
    own = "torchtune's way, where the file says nothing"
    if draft.get("tokenizer.max_seq_len") is None:
        draft.suspect(
            "tokenizer", "max_seq_len is null: torchtune cuts nothing; data.max_length is tunekit's default here"
        )
    if draft.get("lr_scheduler._component_") is None:
        draft.assume("train.lr_scheduler_type", "constant", own)
        draft.assume("train.warmup_steps", 0, own)
    decay = _OPTIMIZERS.get(str(draft.get("optimizer._component_")), ("", 0.0))[1]
    if draft.get("optimizer._component_") and draft.get("optimizer.weight_decay") is None:
        draft.assume("train.weight_decay", decay, f"the default of {_last(draft.get('optimizer._component_'))}")
    if draft.get("clip_grad_norm") is None:
        draft.assume(
            "train.max_grad_norm",
            1.0,
            "torchtune clips no gradients here, tunekit does: a large number comes to the same",
        )
    if draft.values.get("adapter.type") != "full" and "adapter.target_modules" not in draft.values:
        draft.assume("adapter.target_modules", "all-linear", own)
    loss_on = draft.values.get("data.loss_on")
    if loss_on == "all":
        draft.suspect(
            "dataset",
            "train_on_input is on (alpaca_dataset has it by itself): the model learns to write prompts as well",
        )
    if draft.values.get("method.type") in ("dpo", "cpo"):
        draft.values.pop("data.loss_on", None)


# Rules


def _component(draft: Draft, entry: Entry) -> Fate:
    if "model.path" not in draft.values:
        raise UnfitError(
            f"{_last(entry.value)}: "
            + (hf.MULTIMODAL if _is_of_images(str(entry.value)) else "this model is not known")
        )
    return Fate("carried", f"model.path: {draft.values['model.path']}, adapter.type: {draft.values['adapter.type']}")


def _folder(draft: Draft, entry: Entry) -> Fate:
    if draft.values.get("model.path") == str(entry.value).rstrip("/"):
        return carried("model.path", draft.values["model.path"])
    return Fate("decided", "the model is taken from the hub; model.path may be a folder with a config.json")


def _attention_modules(draft: Draft, entry: Entry) -> Fate:
    value = _targets(draft)
    draft.put("adapter.target_modules", value, entry.key)
    return carried("adapter.target_modules", value)


def _targets(draft: Draft) -> Any:
    """Modules by their names in transformers; all linear ones where torchtune names all of them."""
    chosen = names(draft.get("model.lora_attn_modules", []))
    mlp, head = (
        draft.get("model.apply_lora_to_mlp", False) is True,
        draft.get("model.apply_lora_to_output", False) is True,
    )
    if {"q_proj", "k_proj", "v_proj", "output_proj"} <= set(chosen) and mlp and not head:
        return "all-linear"
    is_phi = "phi" in str(draft.get("model._component_"))
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} if is_phi else {}
    modules = [fused.get(name, "o_proj" if name == "output_proj" else name) for name in chosen]
    modules += (["gate_up_proj", "down_proj"] if is_phi else ["gate_proj", "up_proj", "down_proj"]) if mlp else []
    return list(dict.fromkeys(modules + (["lm_head"] if head else [])))


def _dataset(draft: Draft, entry: Entry) -> Fate:
    target = "data.eval" if entry.key.startswith("dataset_val") else "data.train"
    if _last(entry.value) not in _KNOWN_ROWS:
        raise UnfitError(
            f"{_last(entry.value)}: no known rows: data.train names them, data.format may be a function of yours"
        )
    how = _OTHER_PROMPTS.get(_last(entry.value))
    if how is not None:
        return Fate("different", f"{carried(target, draft.values.get(target)).words}; {how}")
    return carried(target, draft.values.get(target))


def _of_rows(draft: Draft, entry: Entry) -> Fate:
    target = "data.eval" if entry.key.startswith("dataset_val") else "data.train"
    if entry.key.endswith(".split") and entry.value == "train":
        return Fate("silent", "train is the default")
    return carried(target, draft.values.get(target))


def _train_on_input(draft: Draft, entry: Entry) -> Fate:
    if draft.values.get("data.loss_on") == "all":
        return carried("data.loss_on", "all")
    return Fate("silent", "data.loss_on assistant is the default")


def _packed(draft: Draft, entry: Entry) -> Fate:
    if not truth(entry.value) or entry.key.startswith("dataset_val"):
        return Fate("silent", "is off")
    draft.put("data.packing", True, entry.key)
    return carried("data.packing", True)


def _optimizer(draft: Draft, entry: Entry) -> Fate:
    optimizer = _OPTIMIZERS.get(str(entry.value))
    if optimizer is None:
        raise UnfitError(f"{entry.value}: train.optim names those that are there")
    draft.put("train.optim", optimizer[0], entry.key)
    return carried("train.optim", optimizer[0])


def _betas(draft: Draft, entry: Entry) -> Fate:
    if not isinstance(entry.value, list) or len(entry.value) != 2:
        raise UnfitError("must be two numbers")
    for name, value in zip(("adam_beta1", "adam_beta2"), entry.value, strict=True):
        draft.put(f"method.trainer_args.{name}", number(value), entry.key)
    return Fate("carried", f"method.trainer_args.adam_beta1 and adam_beta2: {entry.value}")


def _schedule(draft: Draft, entry: Entry) -> Fate:
    name = _SCHEDULES.get(_last(entry.value))
    if name is None:
        raise UnfitError(f"{_last(entry.value)}: train.lr_scheduler_type names those that are there")
    draft.put("train.lr_scheduler_type", name, entry.key)
    if draft.get("lr_scheduler.num_warmup_steps") is None:
        draft.put("train.warmup_steps", 0, entry.key)
    return carried("train.lr_scheduler_type", name)


def _warmup(draft: Draft, entry: Entry) -> Fate:
    steps = whole(entry.value)
    draft.put("train.warmup_steps", steps, entry.key)
    return carried("train.warmup_steps", steps)


def _epochs(draft: Draft, entry: Entry) -> Fate:
    if draft.get("max_steps_per_epoch"):
        return Fate("carried", "train.max_steps, with max_steps_per_epoch")
    return to("train.num_epochs", number)(draft, entry)


def _steps(draft: Draft, entry: Entry) -> Fate:
    steps, times = whole(entry.value), whole(draft.get("epochs", 1))
    draft.put("train.max_steps", steps * times, entry.key, "epochs")
    draft.comments["train.max_steps"] = f"was {times} epochs of at most {steps} steps"
    return carried("train.max_steps", steps * times)


def _loss(draft: Draft, entry: Entry) -> Fate:
    if "method.type" in draft.values:
        return carried("method.type", draft.values["method.type"])
    return Fate("decided", hf.KERNELS)


def _of_loss(name: str) -> Rule:
    def rule(draft: Draft, entry: Entry) -> Fate:
        if "method.type" not in draft.values:
            return Fate("decided", hf.KERNELS)
        value = number(entry.value)
        if value == 0:
            if name == "beta":
                draft.suspect(entry.key, "beta 0: nothing holds the model to what it was")
            else:
                return Fate("silent", "is off")
        draft.put(f"method.{name}", value, entry.key)
        return carried(f"method.{name}", value)

    return rule


def _seed(draft: Draft, entry: Entry) -> Fate:
    return to("train.seed", whole)(draft, entry)


_LORA: dict[str, Rule] = {
    "model.lora_rank": to("adapter.rank", whole),
    "model.lora_alpha": to("adapter.alpha", number),
    "model.lora_dropout": to("adapter.dropout", number),
    "model.use_dora": to("adapter.use_dora", truth),
    "model.lora_attn_modules": _attention_modules,
    **{
        f"model.{name}": lambda draft, entry: carried("adapter.target_modules", _targets(draft))
        for name in ("apply_lora_to_mlp", "apply_lora_to_output")
    },
    "model.quantize_base": lambda draft, entry: carried("adapter.type", draft.values["adapter.type"]),
    "save_adapter_weights_only": decided("checkpoints hold the adapter; `tunekit export` merges"),
}


def _rows(prefix: str) -> dict[str, Rule]:
    handlers: dict[str, Rule] = {
        "_component_": _dataset,
        **each(
            _of_rows, "source data_files split column column_map conversation_column conversation_style name subset"
        ),
        **{f"column_map.{name}": _of_rows for name in ("input", "output", "prompt", "chosen", "rejected")},
        "train_on_input": _train_on_input,
        "packed": _packed,
        **each(decided("a packed sequence is filled with whole documents"), "split_across_pack max_seq_len"),
        "masking_strategy": decided("data.loss_on assistant is the default"),
        "add_eos": decided("a document ends with the tokenizer's end token"),
        "new_system_prompt": refused("a system message stands in the rows, or in the template"),
        "filter_fn": refused("rows are not filtered: data.format may be a function that leaves some out"),
        **each(
            refused("not read: data.format may be a function of yours"),
            "image_dir image_tag template chat_format use_clean",
        ),
        "column_map": refused("only columns of text are mapped"),
    }
    return {f"{prefix}.{name}": rule for name, rule in handlers.items()}


_RULES: Rules = {
    "model._component_": _component,
    **with_adapter(_LORA),
    **each(
        refused(hf.MULTIMODAL),
        "model.decoder_trainable model.encoder_trainable model.fusion_trainable model.image_size tokenizer.image_size",
    ),
    "model": refused("a model's configuration is not changed"),
    "tokenizer.max_seq_len": to("data.max_length", whole),
    "tokenizer.prompt_template": lambda draft, entry: _prompt_template(draft, entry),
    "tokenizer": decided("the tokenizer comes with the model"),
    "checkpointer.checkpoint_dir": _folder,
    "checkpointer.recipe_checkpoint": hf.resume_from,
    "checkpointer.adapter_checkpoint": hf.resume_from,
    "checkpointer.output_dir": decided(hf.FOLDER),
    "checkpointer": decided("the model is read and written as transformers does"),
    "ref_checkpointer": decided("what training holds to is the model that it starts from"),
    "resume_from_checkpoint": hf.resume_from,
    **_rows("dataset"),
    **_rows("dataset[]"),
    **_rows("dataset_val"),
    **_rows("dataset_val[]"),
    "run_val_every_n_steps": hf.some_steps("train.eval_steps", hf.EVALUATIONS),
    "batch_size_val": decided("evaluation takes the micro-batch of training"),
    "seed": _seed,
    "shuffle": hf.shuffle,
    "batch_size": hf.batch,
    "gradient_accumulation_steps": hf.accumulation,
    "optimizer._component_": _optimizer,
    "optimizer.lr": to("train.learning_rate", number),
    "optimizer.weight_decay": to("train.weight_decay", number),
    "optimizer.betas": _betas,
    "optimizer.eps": hf.trainer_arg("adam_epsilon"),
    "optimizer.fused": decided("train.optim says it by its name"),
    "optimizer.foreach": decided("train.optim says it by its name"),
    "optimizer_in_bwd": decided(hf.DEVICES),
    "lr_scheduler._component_": _schedule,
    "lr_scheduler.num_warmup_steps": _warmup,
    "lr_scheduler.num_cycles": refused("train.lr_scheduler_type cosine has half a wave"),
    "loss._component_": _loss,
    "loss.beta": _of_loss("beta"),
    "loss.label_smoothing": _of_loss("label_smoothing"),
    "loss.gamma": _of_loss("simpo_gamma"),
    "loss": decided(hf.KERNELS),
    "epochs": _epochs,
    "max_steps_per_epoch": _steps,
    "clip_grad_norm": hf.clipping,
    "compile": decided("train.torch_compile auto compiles where it is known to pay"),
    "dtype": hf.dtype,
    "device": decided(hf.DEVICES),
    **each(
        decided(hf.CHECKPOINTING),
        "enable_activation_checkpointing enable_activation_offloading ac_mode ac_option "
        "activation_offloading_use_streams low_cpu_ram use_activation_checkpointing",
    ),
    **each(
        decided(hf.DEVICES),
        "fsdp_cpu_offload fsdp fsdp_reshard_after_forward memory_efficient_fsdp_wrap "
        "custom_sharded_layers tensor_parallel_dim tensor_parallel_plan data_parallel_shard_dim "
        "data_parallel_replicate_dim context_parallel_dim enable_async_checkpointing parallelize_plan "
        "dp_replicate_dim",
    ),
    "output_dir": decided(hf.FOLDER),
    "metric_logger._component_": lambda draft, entry: _logger(draft, entry),
    "metric_logger.project": trackers.variable("WANDB_PROJECT"),
    "metric_logger.experiment_name": trackers.variable("MLFLOW_EXPERIMENT_NAME"),
    "metric_logger.tracking_uri": trackers.variable("MLFLOW_TRACKING_URI"),
    "metric_logger": silent("goes with the logger"),
    "log_every_n_steps": hf.logging,
    **each(silent("every loss is logged from the first step on"), "log_peak_memory_stats log_level"),
    "profiler": silent("profiles nothing"),
    "save_every_n_steps": hf.some_steps("train.save_steps", hf.CHECKPOINTS),
    **each(decided(hf.CHECKPOINTS), "save_every_epoch save_last_epoch_only keep_last_n_checkpoints epochs_to_save"),
    "quantizer": refused("training for quantisation is not there"),
    "fake_quant_after_n_steps": refused("training for quantisation is not there"),
    "collate_fn": decided("rows are padded or packed by tunekit"),
    **each(
        refused("goes with other programs of torchtune's"),
        "prompt temperature top_k max_new_tokens tasks limit enable_kv_cache max_seq_length num_generations",
    ),
    "cudnn_deterministic_mode": silent("is off"),
}
"""torchtune's keys."""


def _prompt_template(draft: Draft, entry: Entry) -> Fate:
    draft.suspect(entry.key, f"prompt_template {entry.value} is not the model's own, which is taken here")
    return Fate("different", f"torchtune writes rows by {_last(entry.value)}; {hf.OTHER_TEMPLATE}")


_LOGGERS: dict[str, Tracker] = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard", "MLFlowLogger": "mlflow"}
"""Loggers of torchtune's that are trackers of tunekit's."""


def _logger(draft: Draft, entry: Entry) -> Fate:
    if _last(entry.value) in ("DiskLogger", "StdoutLogger"):
        return Fate("silent", "losses are in the run's folder")
    tracker = _LOGGERS.get(_last(entry.value))
    return Fate("unsupported", trackers.NO_TRACKER) if tracker is None else trackers.switch(tracker)(draft, entry)


def rules(draft: Draft) -> Rules:
    """Torchtune's keys."""
    return _RULES
