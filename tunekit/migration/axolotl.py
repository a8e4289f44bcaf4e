"""Axolotl's YAML -> a recipe, by its documented keys."""

import re
from dataclasses import replace

from tunekit.migration import axolotl_ebft, images, optimizers
from tunekit.migration import axolotl_rows as rows
from tunekit.migration import training as hf
from tunekit.migration.draft import (
    Draft,
    UnfitError,
    carried,
    figure,
    is_off,
    names,
    number,
    reason,
    text,
    truth,
    whole,
)
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate

_METHODS = {
    **{name: name for name in ("dpo", "kto", "orpo", "grpo", "ebft")},
    "ipo": "dpo",
    "simpo": "cpo",
    "gdpo": "grpo",
}
_NEEDS_FLASH = ("flash_attention", "flex_attention", "xformers_attention", "sage_attention")


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    hf.set_batch(draft, "micro_batch_size", devices="world_size")
    _method(draft)
    kind = draft.get("adapter")
    if kind in ("lora", "qlora"):
        is_small = kind == "qlora" or draft.get("load_in_4bit") is True or draft.get("gptq") is True
        hf.put_quantized(draft, 4 if is_small else 8 if draft.get("load_in_8bit") is True else 16, "adapter")
    else:
        draft.put("adapter.type", "full")
    for target, key in (("data.train", "datasets"), ("data.eval", "test_datasets")):
        datasets = draft.get(key) or (draft.get("pretraining_dataset") if key == "datasets" else None) or []
        datasets = [{"path": datasets}] if isinstance(datasets, str) else datasets
        sources = [
            rows.source(dataset, draft.method)
            for dataset in (datasets if isinstance(datasets, list) else [datasets])
            if isinstance(dataset, dict) and dataset.get("path")
        ]
        hf.put_sources(draft, target, sources, key)


def _method(draft: Draft) -> None:
    name = draft.get("rl")
    if draft.get("reward_model") is True:
        draft.put("method.type", "reward", "reward_model")
    elif name and name not in _METHODS:
        raise draft.no_method("rl", name)
    elif name:
        draft.put("method.type", _METHODS[name], "rl")
        if name in ("simpo", "ipo"):
            draft.put("method.loss_type", name, "rl")
        if name == "ebft":
            axolotl_ebft.check_mode(draft)
        if name == "gdpo":
            draft.put("method.trainer_args.multi_objective_aggregation", "normalize_then_sum", "rl")


def finish(draft: Draft) -> None:
    """Record Axolotl's defaults for what the file does not set, and what looks wrong."""
    draft.assume({"data.max_length": 512})
    rows.note_untrained_roles(draft)
    if draft.has_images or draft.has_audio:
        _note_media(draft, "images" if draft.has_images else "audio")
    elif not all(kind == "text" for kind in hf.source_formats(draft)):
        hf.drops_too_long(draft, "excess_length_strategy", "drop")
    if "text" in hf.source_formats(draft) and draft.get("pretraining_dataset") is None:
        words = "texts longer than data.max_length continue in the next sequence, which begins with the next token in"
        words += " Axolotl, and with the last one again in tunekit, so that every token is predicted"
        draft.differ("datasets", "completion", words)
    if draft.get("pretraining_dataset") is not None and not draft.values.get("data.streaming"):
        what = "Axolotl streams pretraining_dataset"
        if "train.max_steps" in draft.values:
            draft.assume({"data.streaming": True}, what)
        else:
            words = f"{what}; the recipe reads it in full first: data.streaming streams it"
            draft.differ("streaming", True, words, remedy="data.streaming")
    if rows.PREFIXED.search(str(draft.values.get("model.path"))) and rows.is_plain_alpaca(draft):
        words = "Axolotl tokenizes answers separately, so this tokenizer starts them with a space"
        draft.differ("datasets", "alpaca", f"{words}; tunekit tokenizes prompt and answer together")
    if draft.method == "grpo":
        hf.room_for_answers(draft, prompt=0)
    if draft.method == "ebft":
        axolotl_ebft.finish(draft)
    if draft.has_adapter:
        draft.assume({"adapter.rank": 8, "adapter.alpha": 8}, "PEFT's default; not set in the file")
        if "adapter.target_modules" not in draft.values and not draft.get("lora_target_linear"):
            words = "neither lora_target_linear nor lora_target_modules: the recipe adapts all linear layers"
            draft.suspect("adapter", words)
    if draft.get("sample_packing") is True:
        _suspect_packing(draft)
    if draft.get("tokens") and draft.has_adapter and not draft.get("lora_modules_to_save"):
        words = "tokens are added without embed_tokens and lm_head in lora_modules_to_save: they stay random"
        draft.suspect("tokens", words)
    if draft.get("shuffle_merged_datasets") and draft.get("shuffle_before_merging_datasets"):
        draft.suspect("shuffle_before_merging_datasets", "rows are shuffled twice, before and after merging")
    if draft.get("load_in_4bit") and draft.get("load_in_8bit"):
        draft.suspect("load_in_8bit", "load_in_4bit and load_in_8bit are both on")
    if draft.get("adapter") == "qlora" and not draft.get("load_in_4bit"):
        draft.suspect("adapter", "adapter: qlora without load_in_4bit: true")
    if draft.get("load_in_4bit") and is_off(draft.get("adapter", False)):
        words = "load_in_4bit without an adapter: 4-bit weights cannot be trained; the recipe trains all parameters"
        draft.suspect("load_in_4bit", words)


def _note_media(draft: Draft, media: str) -> None:
    """Note what Axolotl does otherwise with rows that have images or audio."""
    images.paths_from_here(draft)
    images.note_towers(draft)
    if draft.get("excess_length_strategy") is None:
        words = (
            f"Axolotl neither truncates nor drops rows with {media}; tunekit drops those longer than data.max_length"
        )
        draft.differ("excess_length_strategy", None, words)
    if not draft.get("train_on_inputs"):
        words = f"with {media}, Axolotl masks user turns only for some models; tunekit masks them for all"
        draft.differ("train_on_inputs", False, words)
    if media == "audio":
        return
    words = "Axolotl puts the first image of a column after the first question; tunekit puts all before it"
    draft.differ("datasets", "images", f"if texts have no image marks, {words}")


def _suspect_packing(draft: Draft) -> None:
    attention = str(draft.get("attn_implementation", ""))
    if not any(draft.get(key) for key in _NEEDS_FLASH) and "flash" not in attention and "flex" not in attention:
        hf.suspect_packing(draft, "sample_packing", "flash or flex attention")
    if draft.get("eval_sample_packing") is None and draft.get("val_set_size"):
        words = "evaluation is packed too unless eval_sample_packing is off: few rows may not fill a batch"
        draft.suspect("sample_packing", words)


# Single keys


def adapter(draft: Draft, entry: Entry) -> Fate:
    """The adapter."""
    if entry.value in ("lora", "qlora"):
        return carried("adapter.type", draft.values["adapter.type"])
    raise UnfitError(f"{entry.value}: adapter.type accepts full, lora and qlora")


def gptq(draft: Draft, entry: Entry) -> Fate:
    """A base that is published in GPTQ, and kept so below an adapter."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    return carried("adapter.type", draft.values["adapter.type"])


def lr_scheduler(draft: Draft, entry: Entry) -> Fate:
    """The schedule; a cosine may end above zero."""
    name, ratio = text(entry.value), draft.get("cosine_min_lr_ratio")
    if name == "cosine" and ratio:
        draft.put("train.lr_scheduler_type", "cosine_with_min_lr", entry.key, "cosine_min_lr_ratio")
        draft.put("method.trainer_args.lr_scheduler_kwargs", {"min_lr_rate": number(ratio)}, "cosine_min_lr_ratio")
        return carried("train.lr_scheduler_type", "cosine_with_min_lr")
    return draft.carry(entry, "train.lr_scheduler_type", name.lower())


def optimizer(draft: Draft, entry: Entry) -> Fate:
    """An optimizer by its name; Axolotl's Muon (Dion's, `spectral_norm`) gives updates another size."""
    if str(entry.value).lower() == "muon":
        own = "Axolotl scales Muon's updates by sqrt(rows / columns), tunekit to the size of AdamW's"
        draft.suspect(entry.key, f"{own}: set train.learning_rate as for AdamW")
    return optimizers.named(draft, entry)


def min_lr(draft: Draft, entry: Entry) -> Fate:
    """The share of the learning rate that a cosine ends at."""
    if draft.get("lr_scheduler", "cosine") != "cosine":
        raise UnfitError("only used with lr_scheduler cosine")
    if draft.get("lr_scheduler") is None:
        lr_scheduler(draft, Entry("lr_scheduler", "cosine", entry.line))
    return Fate("carried", f"method.trainer_args.lr_scheduler_kwargs: {{min_lr_rate: {entry.value}}}")


def beta(draft: Draft, entry: Entry) -> Fate:
    """The weight of what holds a model to its reference."""
    if draft.method in ("sft", "reward"):
        return Fate("silent", "only used by methods with a reference model")
    return draft.carry(entry, "method.beta", number(entry.value))


def target_linear(draft: Draft, entry: Entry) -> Fate:
    """The wish to adapt all linear layers."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.get("lora_target_modules"):
        draft.suspect(entry.key, "lora_target_linear and lora_target_modules are both set; the modules are used")
        return Fate("silent", "lora_target_modules sets them")
    return draft.carry(entry, "adapter.target_modules", "all-linear")


def modules(draft: Draft, entry: Entry) -> Fate:
    """The modules that are adapted, by their names or by a regular expression."""
    if isinstance(entry.value, str):
        return draft.carry(entry, "adapter.target_modules", images.language_model_regex(entry.value))
    value = names(entry.value)
    if any(sign in name for name in value for sign in "*\\|("):
        words = "a list names modules by suffix, not by regular expression; all linear layers are used"
        raise UnfitError(words)
    return draft.carry(entry, "adapter.target_modules", "all-linear" if value == ["all-linear"] else value)


_QAT_TYPES = {"weight_dtype": ("int4",), "activation_dtype": ("int8",)}
"""Types of quantization-aware training that are those of torchao's `Int8DynamicActivationInt4WeightConfig`."""


def qat(draft: Draft, entry: Entry) -> Fate:
    """A setting of quantization-aware training."""
    name = entry.key.rpartition(".")[2]
    if draft.has_adapter:
        raise UnfitError("Axolotl refuses it with an adapter")
    if draft.get("qat.activation_dtype") is None:
        raise UnfitError("without activation_dtype Axolotl rounds weights with zero points; train.qat does not")
    if name == "group_size":
        return draft.carry(entry, "train.qat.group_size", whole(entry.value))
    value = str(entry.value).lower().removeprefix("torch.")
    if value not in _QAT_TYPES[name]:
        raise UnfitError(f"{value}: only {_QAT_TYPES[name][0]} is rounded as by Axolotl")
    fate = draft.carry(entry, f"train.qat.{name}", value)
    if name != "weight_dtype":
        return fate
    return Fate("different", f"{fate.words}; Axolotl rounds the head too; the recipe leaves it unrounded")


_RELORA_FIELDS = {
    "jagged_restart_steps": "steps",
    "jagged_restart_warmup_steps": "warmup_steps",
    "relora_prune_ratio": "prune_ratio",
}
"""Fields of `adapter.relora` by key."""


def relora(draft: Draft, entry: Entry) -> Fate:
    """A setting of the restarts of an adapter."""
    if not truth(draft.get("relora", False)):
        if entry.key.startswith("relora"):
            return Fate("silent", "is off")
        raise UnfitError("restarts of the learning rate without relora are unsupported")
    if draft.values["adapter.type"] != "lora":
        raise UnfitError("adapter.relora requires adapter: lora")
    if draft.get("relora_prune_method", "magnitude") != "magnitude":
        raise UnfitError("adapter.relora prunes optimizer states by magnitude only")
    field = _RELORA_FIELDS.get(entry.key)
    if field is not None:
        return draft.carry(entry, f"adapter.relora.{field}", entry.value)
    if entry.key == "relora":
        draft.differ("cosine_min_lr_ratio", 0.001, "share of the rate in the first step after a restart, here 0")
        return Fate("decided", "adapter.relora; the result is an adapter for the original base, not a merged model")
    return Fate("silent", "is the same here")


_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"}
"""Names of linear layers that experts have."""


def expert_parallel(draft: Draft, entry: Entry) -> Fate:
    """Devices that divide the experts of a layer."""
    if whole(entry.value) == 1:
        return Fate("silent", "is off")
    targets = draft.get("lora_target_modules")
    leaves_experts = isinstance(targets, list) and not {*targets} & _OF_EXPERTS and not draft.get("lora_target_linear")
    if draft.has_adapter and (draft.values["adapter.type"] != "lora" or not leaves_experts):
        raise UnfitError("parallel.ep_size requires full fine-tuning, or LoRA on other layers than experts")
    if draft.get("lora_target_parameters"):
        raise UnfitError("PEFT adapts only whole experts; parallel.ep_size divides them")
    return draft.carry(entry, "parallel.ep_size", whole(entry.value))


def dequantized(draft: Draft, entry: Entry) -> Fate:
    """The wish to load weights in MXFP4 as dense ones, or to keep them."""
    config, kwargs = draft.get("model_quantization_config"), draft.get("model_quantization_config_kwargs.dequantize")
    if config != "Mxfp4Config" or kwargs is not True or draft.values["adapter.type"] == "qlora":
        raise UnfitError("changing the model's configuration is unsupported")
    return Fate("decided", "weights in MXFP4 are made dense for full fine-tuning and LoRA")


def quantizer(draft: Draft, entry: Entry) -> Fate:
    """The library that has weights in 4 bits."""
    if entry.value != "bitsandbytes":
        raise UnfitError("4-bit weights are those of bitsandbytes")
    return Fate("decided", "adapter: qlora has bitsandbytes' 4-bit weights")


def context_parallel(draft: Draft, entry: Entry) -> Fate:
    """Devices that divide a sequence."""
    if whole(entry.value) == 1:
        return Fate("silent", "is off")
    return draft.carry(entry, "parallel.cp_size", whole(entry.value))


def experts(draft: Draft, entry: Entry) -> Fate:
    """The wish to quantize the experts of a layer with its linear layers."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.values["adapter.type"] != "qlora" or draft.values.get("adapter.quant_type") == "int8":
        raise UnfitError("adapter: qlora quantizes experts to 4 bits; 8 bits are unsupported")
    return Fate("decided", "adapter: qlora quantizes experts too")


def router_loss(draft: Draft, entry: Entry) -> Fate:
    """The wish to balance the load of experts, by the coefficient of the model's configuration."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.method != "sft":
        raise UnfitError("changing the model's configuration is unsupported")
    return Fate("decided", "models with experts are trained with their router loss, by the coefficient in config.json")


def pattern(draft: Draft, entry: Entry) -> Fate:
    """Ranks or alphas of some modules; there is an entry for each of them."""
    key = entry.key.partition(".")[0]
    return draft.carry(entry, f"adapter.{key.removeprefix('lora_')}", draft.get(key))


def unfrozen(draft: Draft, entry: Entry) -> Fate:
    """Patterns of the parameters that are trained, from the beginning of their names, in which a dot is a dot."""
    if draft.has_adapter:
        raise UnfitError("trains parameters in addition to an adapter: use adapter.modules_to_save")
    patterns = names(entry.value)
    if any(images.names_tower(pattern) for pattern in patterns):
        raise UnfitError("for the language model: adapter.vision_tower and adapter.projector train those parts")
    if any(re.search(r"\[\d*:\d*\]$", pattern) for pattern in patterns):
        raise UnfitError("training a range of a parameter's rows is unsupported")
    return draft.carry(
        entry, "adapter.unfrozen_parameters", ["^" + re.sub(r"\.(?!\+)", r"\.", pattern) for pattern in patterns]
    )


def embedding_lr(draft: Draft, entry: Entry) -> Fate:
    """The learning rate of embedding and head."""
    return draft.carry(entry, "train.learning_rates", {"embed_tokens|lm_head": number(entry.value)})


def plugins(draft: Draft, entry: Entry) -> Fate:
    """Plugins, of which those for kernels have their like here."""
    if all("swanlab" in name.lower() for name in names(entry.value)):
        return Fate("decided", reason("no_tracker"))
    supported = ("liger", "cut_cross_entropy", "kernels", "swanlab")
    unsupported = [name for name in names(entry.value) if not any(word in name.lower() for word in supported)]
    if unsupported:
        raise UnfitError(f"unsupported: {', '.join(name.rpartition('.')[2] for name in unsupported)}")
    return Fate("decided", reason("kernels"))


def text_metrics(draft: Draft, entry: Entry) -> Fate:
    """Metrics of generated texts in an evaluation, or the wish to have them."""
    if draft.get("do_causal_lm_eval") is not True:
        return Fate("silent", "is off")
    if draft.get("eval_causal_lm_metrics") != ["perplexity"]:
        raise UnfitError("metrics besides the loss are unsupported during training")
    words = "Axolotl computes the perplexity of texts in windows; the recipe logs eval_loss, its logarithm"
    return Fate("different", words)


def texts(draft: Draft, entry: Entry) -> Fate:
    """Texts to train on."""
    return carried("data.train", entry.value)


def utilization(draft: Draft, entry: Entry) -> Fate:
    """The share of a device's memory that vLLM takes."""
    if draft.get("trl.vllm_mode") == "server":
        return Fate("silent", "the server has its own setting")
    if draft.method not in ("grpo", "ebft"):
        return Fate("silent", "only used with grpo and ebft")
    return draft.carry(entry, "method.generation.vllm_gpu_memory_utilization", figure(entry.value))


def loftq(draft: Draft, entry: Entry) -> Fate:
    """The wish to begin with what 4 bits lose, told by how many bits that is."""
    if number(entry.value) != 4:
        raise UnfitError(f"{entry.value} bits: adapter.init_lora_weights=loftq is for 4")
    return hf.first_weights(draft, replace(entry, value="loftq"))


def loftq_iterations(draft: Draft, entry: Entry) -> Fate:
    """Rounds in which LoftQ quantizes what its adapter leaves; after the first one the base is another."""
    if number(entry.value) != 1:
        raise UnfitError(f"{entry.value} iterations: loftq uses 1, which keeps the base model of QLoRA")
    return Fate("silent", "is the only value for loftq")
