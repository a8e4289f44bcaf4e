"""Suggestions for unknown keys: near keys, keys of other sections, and the names that other tools use.

People come with habits. `lr`, `lora_r` and `per_device_train_batch_size` are right elsewhere, so they are answered
with the name that they have here rather than with "unknown key" alone.
"""

from collections.abc import Iterable

from tunekit.recipe.fields import all_fields, holders_along, tag_of
from tunekit.recipe.reading.phrases import any_of, near, plain_word
from tunekit.recipe.reading.source_locations import Key, dotted
from tunekit.recipe.sections.section import TAG, Section
from tunekit.recipe.trainer_args import CONFIGS, config_fields, owner_hint

_DERIVED = "it is derived: train.global_batch_size over train.micro_batch_size and the devices"
_PRECISION = "set model.dtype; mixed precision follows from it"
_WEIGHTS = "give each source of data.train a weight"

FAMILIAR_NAMES = {
    "base_model": "model.path",
    "model_id": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
    "precision": "model.dtype",
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "attention": "model.attn_implementation",
    "flash_attention": "set model.attn_implementation to flash_attention_2",
    "flash_attn": "set model.attn_implementation to flash_attention_2",
    "liger": "set model.kernels to liger",
    "liger_kernel": "set model.kernels to liger",
    "use_liger": "set model.kernels to liger",
    "use_liger_kernel": "set model.kernels to liger",
    "dataset": "data.train",
    "datasets": "data.train",
    "dataset_name": "data.train",
    "dataset_path": "data.train",
    "train_file": "data.train",
    "train_data": "data.train",
    "train_dataset": "data.train",
    "eval_dataset": "data.eval",
    "eval_file": "data.eval",
    "test_file": "data.eval",
    "val_set_size": "data.eval_size",
    "validation": "data.eval",
    "validation_file": "data.eval",
    "dataset_mixer": _WEIGHTS,
    "dataset_weights": _WEIGHTS,
    "interleave_probs": _WEIGHTS,
    "mixing_weights": _WEIGHTS,
    "probabilities": _WEIGHTS,
    "sampling_weights": _WEIGHTS,
    "weights": _WEIGHTS,
    "mix_strategy": "set data.mixing, and data.stopping_strategy for when to stop",
    "disable_shuffling": "set data.shuffle to false",
    "shuffle_dataset": "data.shuffle",
    "shuffle_merged_datasets": "data.shuffle",
    "train_sampling_strategy": "data.shuffle",
    "cutoff_len": "data.max_length",
    "max_len": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "model_max_length": "data.max_length",
    "seq_len": "data.max_length",
    "sequence_len": "data.max_length",
    "sequence_length": "data.max_length",
    "sample_packing": "data.packing",
    "train_on_inputs": "set data.loss_on to all",
    "finetuning_type": "adapter.type",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_modules_to_save": "adapter.modules_to_save",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_target": "adapter.target_modules",
    "lora_target_modules": "adapter.target_modules",
    "peft_use_dora": "adapter.use_dora",
    "peft_use_rslora": "adapter.use_rslora",
    "r": "adapter.rank",
    "bnb_4bit_quant_type": "adapter.quant_type",
    "bnb_4bit_use_double_quant": "adapter.double_quant",
    "load_in_4bit": "set adapter.type to qlora",
    "load_in_8bit": "set adapter.type to qlora, which keeps the base in 4 bits",
    "quantization": "set adapter.type to qlora",
    "use_peft": "set adapter.type to lora, or to full for no adapter",
    "batch_size": "train.global_batch_size",
    "train_batch_size": "train.global_batch_size",
    "effective_batch_size": "train.global_batch_size",
    "micro_batch": "train.micro_batch_size",
    "per_device_batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "per_device_eval_batch_size": "train.micro_batch_size",
    "gradient_accumulation": _DERIVED,
    "gradient_accumulation_steps": _DERIVED,
    "grad_accum": _DERIVED,
    "lr": "train.learning_rate",
    "epochs": "train.num_epochs",
    "n_epochs": "train.num_epochs",
    "num_train_epochs": "train.num_epochs",
    "steps": "train.max_steps",
    "num_steps": "train.max_steps",
    "optimizer": "train.optim",
    "lr_schedule": "train.lr_scheduler_type",
    "lr_scheduler": "train.lr_scheduler_type",
    "scheduler": "train.lr_scheduler_type",
    "warmup": "train.warmup_steps",
    "warmup_ratio": "train.warmup_steps",
    "wd": "train.weight_decay",
    "clip_grad_norm": "train.max_grad_norm",
    "grad_clip": "train.max_grad_norm",
    "gradient_clipping": "train.max_grad_norm",
    "max_norm": "train.max_grad_norm",
    "activation_checkpointing": "train.gradient_checkpointing",
    "random_seed": "train.seed",
    "log_every": "train.logging_steps",
    "evals_per_epoch": "train.eval_steps",
    "saves_per_epoch": "train.save_steps",
    "checkpoint_steps": "train.save_steps",
    "output_dir": "output.dir",
    "run_name": "output.name",
    "stage": "method.type",
    "task": "method.type",
}
"""Names of other tools, and ours: a dotted key, or a sentence where there is no single one."""


def unknown_key(
    key: Key, sections: list[type[Section]], others: Iterable[type[Section]] = ()
) -> tuple[str, str | None]:
    """Return complaint and hint for a key that its section does not have.

    Args:
        key: The unknown key.
        sections: What its section is: one, or the variants if it is not known which.
        others: The other variants that the section could be.
    """
    name, above = str(key[-1]), key[:-1]
    with_it = [other for other in others if name in other.model_fields]
    if with_it and len(sections) == 1:
        owners = any_of([str(tag_of(other)) for other in with_it])
        return (
            f"{dotted(above)}.type={tag_of(sections[0])} has no '{name}'",
            f"it goes with {dotted(above)}.type={owners}",
        )
    here = [field_name for section in sections for field_name in section.model_fields]
    elsewhere = _elsewhere(name)
    if len(elsewhere) == 1:
        return "unknown key", f"it belongs in {elsewhere[0].rpartition('.')[0]}: {elsewhere[0]}"
    if elsewhere:
        return "unknown key", f"it belongs in another section: {any_of(elsewhere)}"
    familiar = FAMILIAR_NAMES.get(plain_word(name))
    if familiar is not None:
        return "unknown key", familiar if " " in familiar else f"it is called {familiar} here"
    likely = near(name, here)
    if likely is not None:
        return "unknown key", f"did you mean '{likely}'?"
    anywhere = {str(other[-1]): dotted(other) for other in reversed(_keys())}
    likely = near(name, anywhere, cutoff=0.8)
    if likely is not None:
        return "unknown key", f"did you mean '{anywhere[likely]}'?"
    if any(name in config_fields(method) and owner_hint(method, name) is None for method in CONFIGS):
        return "unknown key", f"it belongs in method.trainer_args: method.trainer_args.{name}"
    return "unknown key", f"{dotted(above) or 'a recipe'} has {', '.join(dict.fromkeys(here))}"


def _elsewhere(name: str) -> list[str]:
    """The keys of a name in all sections, less those that a section below has for itself alone: `data.train.format`."""
    keys = [other for other in _keys() if len(other) > 1 and other[-1] == name != TAG]
    always = [key for key in keys if not _goes_with_a_variant(key)] or keys
    return list(dict.fromkeys(dotted(key) for key in always if (*key[:-2], name) not in keys))


def _keys() -> list[Key]:
    return [key for key, _ in all_fields()]


def _goes_with_a_variant(key: Key) -> bool:
    """Return whether only some variants of the section above have the key's section: `method.rewards.path`."""
    return len(key) > 2 and len(holders_along(key[:1])[0][0].sections) > 1
