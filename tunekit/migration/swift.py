"""ms-swift's arguments, in YAML, JSON or a script that calls `swift sft` -> a recipe."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunekit.errors import RecipeError
from tunekit.migration import distillation, images, optimizers
from tunekit.migration import training as hf
from tunekit.migration.draft import Draft, UnfitError, carried, names, number, reason, text, truth, whole
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate, Kind
from tunekit.migration.swift_plugins import Plugin, module_name, read_plugin
from tunekit.migration.table import tool_rules, tool_table
from tunekit.migration.vocabulary import same_template
from tunekit.recipe.reading.parse import plain_scalar
from tunekit.recipe.sections.adapters import AdaloraAdapter, MissAdapter, PeftAdapter, VeraAdapter

_METHODS = {
    "dpo": "dpo",
    "orpo": "orpo",
    "simpo": "cpo",
    "cpo": "cpo",
    "kto": "kto",
    "rm": "reward",
    "grpo": "grpo",
    "gkd": "gkd",
}
_BETAS = {"simpo": 2.0, "grpo": 0.04}
_FILES = (".json", ".jsonl", ".csv", ".txt", ".parquet", ".arrow")
_SAME_COLUMNS = ("messages", "images", "audios", "tools", "instruction", "input", "output", "system", "prompt", "label")
_BATCH = 16
"""The batch of a step that ms-swift accumulates to where nothing says how far."""


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    read_environment(draft)
    micro = draft.get("per_device_train_batch_size", 1)
    times = math.ceil(_BATCH / (micro if isinstance(micro, int) and micro > 0 else 1) / (draft.num_devices or 1))
    hf.set_batch(draft, "per_device_train_batch_size", default_accumulation=times)
    prepare_training(draft, default_tuner="lora")


def read_environment(draft: Draft) -> None:
    """Take the variables of a script that ms-swift reads as keys, and the devices that it starts on."""
    variables = draft.original.environment
    rules = tool_rules("ms-swift")
    draft.original.entries += tuple(
        Entry(name, plain_scalar(value), draft.original.variable_lines[name])
        for name, value in variables.items()
        if name.isupper() and name in rules
    )
    if draft.num_devices is None and draft.original.task is not None:
        of_node, nodes = variables.get("NPROC_PER_NODE", "1"), variables.get("NNODES", "1")
        if of_node.isdigit() and nodes.isdigit():
            draft.num_devices = int(of_node) * int(nodes)


def prepare_training(draft: Draft, *, default_tuner: str) -> None:
    """Lay in method, adapter and rows.

    Args:
        draft: What is made.
        default_tuner: The kind of training where the file says nothing.
    """
    kind = draft.get("rlhf_type", "dpo" if draft.original.task == "rlhf" else None)
    if kind is not None and kind not in _METHODS:
        raise draft.no_method("rlhf_type", kind)
    draft.put("method.type", _METHODS[kind] if kind else "sft", "rlhf_type")
    if kind is None and _is_classifier(draft):
        draft.put("method.type", "classification", "task_type")
        labels = draft.get("num_labels")
        if not isinstance(labels, int) or labels < 2:
            where = f"{draft.original.path}:{draft.line_of('num_labels') or draft.line_of('task_type')}"
            problem = f"{where}: num_labels: must be a number of labels, at least 2, got {labels}"
            raise RecipeError(problem, hint="set it; regression is unsupported")
        draft.put("method.num_labels", labels, "num_labels")
        if draft.get("problem_type") is not None:
            draft.put("method.problem_type", draft.get("problem_type"), "problem_type")
    if kind == "simpo":
        draft.put("method.loss_type", "simpo", "rlhf_type")
    if kind == "gkd":
        distillation.need_teacher(draft)
    tuner = draft.get("tuner_type", draft.get("train_type", draft.get("sft_type", default_tuner)))
    is_by_bitsandbytes = draft.get("quant_method", "bnb") == "bnb"
    bits = draft.get("quant_bits", draft.get("quantization_bit")) if is_by_bitsandbytes else None
    keys, kinds = ("tuner_type", "train_type", "sft_type"), {"full": "full", "llamapro": "full"}
    kinds |= {name: name for name in _TUNERS} | _OLD_NAMES
    if tuner in kinds and (kinds[tuner] == "full" or bits not in (4, 8)):
        draft.put("adapter.type", kinds[tuner], *keys)
    else:
        hf.put_quantized(draft, bits, *keys)
    if tuner == "llamapro":
        draft.put("adapter.new_layers", draft.get("llamapro_num_new_blocks", 4), "llamapro_num_new_blocks")
    for target, key in (("data.train", "dataset"), ("data.eval", "val_dataset")):
        hf.put_sources(draft, target, list(_sources(draft, key)), key)


def _is_classifier(draft: Draft) -> bool:
    """Return whether a classifier is trained; ms-swift takes labels for one too (swift/model/model_meta.py)."""
    task = draft.get("task_type")
    return bool(task == "seq_cls" or (task is None and draft.get("num_labels") is not None))


def task(draft: Draft, entry: Entry) -> Fate:
    """Task that the model is trained for."""
    if draft.method == "classification":
        if images.family(draft) is not None:
            raise UnfitError("classification reads texts: a model of images is unsupported")
        return carried("method.type", "classification")
    if entry.value == "causal_lm":
        return Fate("silent", "is the default")
    raise UnfitError(f"{entry.value} is unsupported")


def labels(draft: Draft, entry: Entry) -> Fate:
    """The number of labels, or whether a text has several of them."""
    if draft.method != "classification":
        raise UnfitError("method: reward has one output")
    return carried(f"method.{entry.key}", draft.values[f"method.{entry.key}"])


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
            source_values = hf.source(name, name=subset or None)
            if _is_self_cognition(name):
                source_values = {"path": _SELF_COGNITION, "format": "alpaca", "columns": dict(_QUERIES)}
                source_values |= {"replace": texts} if (texts := _own_names(draft)) else {}
                if subset:
                    words = f"ms-swift adds empty thinking tags to rows of {word}; the recipe does not"
                    draft.differ(key, word, words)
        if rows.isdigit():
            source_values["max_samples"] = int(rows)
            # Of a stream the first rows are taken.
            if not truth(draft.get("streaming", False)) and truth(draft.get("dataset_shuffle", True)):
                source_values["sampling"] = "random"
        if draft.original.task == "pt":
            source_values["loss_on"] = "all"
        if place < len(shares):
            source_values["weight"] = number(shares[place])
        yield source_values


_SELF_COGNITION = "modelscope/self-cognition"
_QUERIES = {"instruction": "query", "output": "response"}


def _is_self_cognition(name: str) -> bool:
    return name.rpartition("/")[2] == "self-cognition"


def _own_names(draft: Draft) -> dict[str, str]:
    """The texts that stand for a model and its author in the self-cognition dataset, and what they become."""
    texts = {}
    for key, mark in (("model_name", "{{NAME}}"), ("model_author", "{{AUTHOR}}")):
        value = draft.get(key)
        value = value[-1] if isinstance(value, list) and value else value
        if value is not None:
            texts[mark] = text(value)
    return texts


def own_name(draft: Draft, entry: Entry) -> Fate:
    """The name of a model or its author: one in Chinese and one in English, or one for both."""
    sources = draft.values.get("data.train")
    listed = sources if isinstance(sources, list) else [draft.values.get("data.replace") and {"replace": True}]
    if not any(isinstance(source, dict) and "replace" in source for source in listed):
        return Fate("silent", "only used with the self-cognition dataset")
    if isinstance(entry.value, list) and len(set(map(str, entry.value))) > 1:
        words = f"ms-swift writes {entry.value[0]} in Chinese rows; the recipe writes {entry.value[-1]} in all"
        return Fate("different", words)
    return carried("data.replace", text(entry.value[0] if isinstance(entry.value, list) else entry.value))


def system(draft: Draft, entry: Entry) -> Fate:
    """The system message of rows without one: a text, or a file that holds it."""
    value = text(entry.value)
    if value.endswith(".txt"):
        if not Path(value).is_file():
            raise UnfitError(f"no file '{value}': set data.system to its text")
        value = Path(value).read_text(encoding="utf-8")
    return draft.carry(entry, "data.system", value)


def rpo(draft: Draft, entry: Entry) -> Fate:
    """The weight of the loss of supervised fine-tuning beside that over pairs."""
    weight = number(entry.value)
    if draft.method != "dpo" or not weight:
        return Fate("silent", "only used with dpo")
    if draft.get("loss_type") not in (None, "sigmoid") or draft.get("loss_weights") is not None:
        raise UnfitError(
            "with loss_type: list the losses in method.loss_type, and their weights in method.loss_weights"
        )
    draft.put("method.loss_type", ["sigmoid", "sft"], entry.key)
    return draft.carry(entry, "method.loss_weights", [1.0, float(weight)])


def loss_type(draft: Draft, entry: Entry) -> Fate:
    """The loss of a method, or of supervised fine-tuning, whose own names ms-swift has."""
    if draft.method == "dpo" and isinstance(draft.values.get("method.loss_type"), list):
        # A key before it adds the loss of supervised fine-tuning: `rpo`.
        return carried("method.loss_type", draft.values["method.loss_type"])
    if draft.method in ("dpo", "kto", "cpo", "grpo"):
        return draft.carry(entry, "method.loss_type", entry.value)
    if draft.method == "sft" and entry.value in ("cross_entropy", "loss_scale"):
        return Fate("silent", "the loss of all tokens that count")
    raise UnfitError(f"unsupported loss: {entry.value}")


def resampling(draft: Draft, entry: Entry) -> Fate:
    """The times that groups without signal are drawn again, three by default, where that is switched on."""
    if not truth(draft.get("dynamic_sample", False)):
        return Fate("silent", "dynamic_sample is off")
    if draft.method != "grpo":
        return Fate("silent", "only used with grpo")
    return draft.carry(entry, "method.max_resample_times", whole(draft.get("max_resample_times", 3)))


def _is_file(path: str) -> bool:
    return path.endswith(_FILES) or path.startswith(("/", "./", "../")) or Path(path).exists()


_TUNERS: dict[str, type[PeftAdapter]] = {"adalora": AdaloraAdapter, "vera": VeraAdapter, "miss": MissAdapter}
"""Adapters other than LoRA, whose settings ms-swift has by PEFT's names behind the name of the adapter."""

_OLD_NAMES = {"bone": "miss"}
"""Adapters that PEFT has renamed since, by ms-swift's names."""

_RANKS = {"vera": ("vera_rank", 256), "miss": ("reft_rank", 4)}
"""Keys of their ranks besides LoRA's, with ms-swift's defaults."""


def tuner_setting(draft: Draft, entry: Entry) -> Fate:
    """A setting of an adapter other than LoRA, by PEFT's name behind the tool's prefix."""
    tuner, _, name = entry.key.partition("_")
    tuner = "miss" if tuner == "reft" else tuner
    if draft.values["adapter.type"] != tuner:
        return Fate("silent", f"only used with tuner_type {'bone' if tuner == 'miss' else tuner}")
    return draft.carry(entry, f"adapter.{name}", entry.value)


def _leave_out_lora(draft: Draft) -> None:
    """Leave out what an adapter does not read of LoRA's settings."""
    tuner = draft.values["adapter.type"]
    read = _TUNERS[tuner].model_fields
    if tuner in _RANKS and "lora_rank" in draft.fates:
        # Both ranks have one field.
        draft.fates["lora_rank"] = Fate("silent", f"not used with tuner_type {tuner}")
        draft.values["adapter.rank"] = whole(draft.get(*_RANKS[tuner]))
    for target in [key for key in draft.values if key.startswith("adapter.") and key.split(".")[1] not in read]:
        del draft.values[target]
        draft.assumed = [assumed for assumed in draft.assumed if assumed.key != target]
        for key in draft.origins.pop(target, []):
            draft.fates[key] = Fate("silent", f"not used with tuner_type {tuner}")


def finish(draft: Draft) -> None:
    """Record ms-swift's defaults for what the file does not set, and what looks wrong."""
    if "train.max_steps" not in draft.values:
        draft.assume({"train.num_epochs": 3})
    if draft.get("packing") and draft.method != "gkd" and "flash" not in str(draft.get("attn_impl", "")):
        hf.suspect_packing(draft, "packing", "flash attention")
    assume_defaults(draft)


def assume_defaults(draft: Draft) -> None:
    """Record the defaults that ms-swift has with Megatron too."""
    is_full = not draft.has_adapter
    draft.assume(
        {
            "train.learning_rate": 1e-5 if is_full else 1e-4,
            "train.warmup_steps": 0,
            "train.weight_decay": 0.1,
            "method.trainer_args.adam_beta2": 0.95,
        }
    )
    if not is_full:
        if draft.get("target_regex"):
            draft.values["adapter.target_modules"] = text(draft.get("target_regex"))
        tuner, defaults = draft.values["adapter.type"], {"rank": 8, "alpha": 32, "dropout": 0.05}
        if tuner in _TUNERS:
            _leave_out_lora(draft)
            defaults = {name: value for name, value in defaults.items() if name in _TUNERS[tuner].model_fields}
            defaults |= {"rank": _RANKS[tuner][1]} if tuner in _RANKS else {}
        draft.assume({f"adapter.{name}": value for name, value in defaults.items()})
    optimizers.assume_defaults(draft)
    if draft.method == "gkd":
        distillation.assume_of_swift(draft)
    _assume_images(draft)
    hf.drops_too_long(draft, "truncation_strategy", "delete")
    if draft.original.task == "pt" and draft.get("use_chat_template") is None:
        draft.differ("use_chat_template", False, f"the default in swift pt: {reason('plain_text')}")
    kind = str(draft.get("rlhf_type", ""))
    if kind in _BETAS:
        draft.assume({"method.beta": _BETAS[kind]})
    if kind == "simpo":
        draft.assume({"method.simpo_gamma": 1.0})
    if draft.method == "grpo":
        draft.assume({"method.generation.temperature": 0.9, "method.loss_type": "grpo"})
        hf.room_for_answers(draft, prompt=draft.values.get("data.max_length", 1024))
    elif draft.get("max_length") is None and draft.get("max_model_len") is None:
        draft.suspect(
            "",
            "max_length is not set: ms-swift uses the model's limit; the recipe has tunekit's default data.max_length",
        )
    hf.suspect_beta(draft)
    if is_full and draft.get("quant_bits"):
        draft.suspect("quant_bits", "quant_bits with full fine-tuning: quantized weights cannot be trained")
    if not draft.get("use_hf") and "data.train" in draft.values and "/" in str(draft.get("model", "")):
        draft.suspect("model", "names refer to the ModelScope hub; tunekit looks them up on Hugging Face")


def _assume_images(draft: Draft) -> None:
    """Record how ms-swift reads images where the file does not say it."""
    images.paths_from_here(draft)
    kind = images.family(draft)
    if draft.has_images and kind is not None and kind.variable == "IMAGE_MAX_TOKEN_NUM":
        # Of four tokens: IMAGE_MIN_TOKEN_NUM.
        draft.assume({"model.image_processor.min_pixels": 4 * kind.side**2})


# Single keys


def columns(draft: Draft, entry: Entry) -> Fate:
    """Columns by their names in the file, and those that ms-swift reads, many of which tunekit has as well.

    Rewards read theirs by the names in the file.
    """
    mapping = _mapping(draft, entry)
    unknown = [theirs for theirs in mapping.values() if theirs not in _SAME_COLUMNS]
    unread = [theirs for theirs in unknown if theirs not in _columns_of_rewards(draft)]
    if unread:
        raise UnfitError(f"no column of tunekit's: {', '.join(map(str, unread))}; map it with data.columns")
    of_rows = {str(theirs): str(name) for name, theirs in mapping.items() if theirs not in unknown}
    if not of_rows:
        return Fate("carried", "method.rewards: columns by their names in the file")
    return draft.carry(entry, "data.columns", of_rows)


def _reward_names(draft: Draft) -> list[str]:
    return names(draft.get("reward_funcs") or [])


def _columns_of_rewards(draft: Draft) -> set[str]:
    """Columns that rewards read, by ms-swift's names."""
    columns = set()
    plugins, built_in = _plugins(draft), tool_table("trainer").words["rewards"]
    for name in _reward_names(draft):
        plugin = next((plugin for plugin in plugins if name in plugin.rewards), None)
        if plugin is None:
            columns.add(built_in.get(name, {}).get("column"))
        else:
            with suppress(UnfitError):
                columns |= plugin.columns_of(name)
    return columns - {None}


def _plugins(draft: Draft) -> list[Plugin]:
    """The plugins that can be read; the others are reported at their own key."""
    plugins = []
    for path in names(draft.get("external_plugins") or []):
        with suppress(UnfitError):
            plugins.append(read_plugin(path))
    return plugins


def plugins(draft: Draft, entry: Entry) -> Fate:
    """Files with code of the user's own, of which rewards are carried over."""
    fate = Fate("silent", "registers rewards that are not in reward_funcs")
    for path in names(entry.value):
        plugin = read_plugin(path)
        if {*plugin.rewards} & {*_reward_names(draft)}:
            fate = Fate("carried", "method.rewards")
        elif not plugin.only_registers:
            where = "data.format or method.rewards"
            raise UnfitError(f"{path} registers none of reward_funcs; set your function as module:function in {where}")
    return fate


def rewards(draft: Draft, entry: Entry) -> Fate:
    """The rewards by their names: those of plugins are copied to a file of functions."""
    all_plugins, by_column, copied = _plugins(draft), _renamed(draft), dict[int, list[str]]()

    def reward_of(name: str) -> dict[str, Any] | None:
        place = next((place for place, plugin in enumerate(all_plugins) if name in plugin.rewards), None)
        if place is None:
            return _own_reward(draft, name, by_column)
        module, of_plugin = module_name(draft.original.path, place), copied.setdefault(place, [])
        draft.files[f"{module}.py"] = all_plugins[place].module([*of_plugin, name], by_column)
        of_plugin.append(name)
        return {"type": "function", "path": f"{module}:{name}"}

    return hf.rewards(draft, entry, reward_of)


def _renamed(draft: Draft) -> dict[str, str]:
    """Columns by ms-swift's names, with those in the file; a mapping that cannot be read is reported at its own key."""
    value = draft.get("columns", {})
    with suppress(UnfitError):
        mapping = value if isinstance(value, dict) else _mapping(draft, Entry("columns", value, 0))
        return {str(theirs): str(name) for name, theirs in mapping.items()}
    return {}


def _own_reward(draft: Draft, name: str, by_column: Mapping[str, str]) -> dict[str, Any] | None:
    """A reward that comes with ms-swift, or is a function of the user's."""
    if name == "soft_overlong":
        longest = whole(draft.get("soft_max_length", draft.get("max_completion_length", 512)))
        return {"type": "length", "max_tokens": longest, "free_tokens": longest - whole(draft.get("soft_cache_length"))}
    reward = hf.named_reward(name)
    if reward is None:
        return None
    if name == "repetition":
        reward |= {"ngram_size": whole(draft.get("repetition_n_grams", 3))}
    if "column" in reward:
        reward["column"] = by_column.get(reward["column"], reward["column"])
    return reward


def of_reward(draft: Draft, entry: Entry) -> Fate:
    """A setting of a reward that ms-swift brings."""
    name = {"repetition_n_grams": "repetition"}.get(entry.key, "soft_overlong")
    if name not in _reward_names(draft):
        return Fate("silent", f"only used with the reward {name}")
    return Fate("carried", "method.rewards")


def model_kwargs(draft: Draft, entry: Entry) -> Fate:
    """Arguments of a model's templates, which may be variables as well."""
    rules, fates = tool_rules("ms-swift"), []
    for name, value in _mapping(draft, entry).items():
        rule = rules.get(str(name).upper())
        if rule is None:
            raise UnfitError(f"{name}: unknown argument of a model")
        fates.append(rule(draft, replace(entry, key=f"{entry.key}.{name}", value=value)))
    order: tuple[Kind, ...] = ("unsupported", "different", "carried", "silent")
    kind = min((fate.kind for fate in fates), key=order.index)
    return Fate(kind, "; ".join(fate.words for fate in fates))


def _mapping(draft: Draft, entry: Entry) -> Mapping[str, Any]:
    """A mapping in JSON, or a key of one in YAML."""
    name = entry.key.partition(".")[2]
    if name:
        return {name: entry.value}
    try:
        value = json.loads(text(entry.value))
    except json.JSONDecodeError as error:
        raise UnfitError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnfitError("must be a mapping")
    return value


def tuner(draft: Draft, entry: Entry) -> Fate:
    """The kind of training: new layers, an adapter by its former name, or as elsewhere."""
    name = _OLD_NAMES.get(entry.value)
    if entry.value == "llamapro" or name == draft.values["adapter.type"]:
        return carried("adapter.type", draft.values["adapter.type"])
    return hf.tuner(draft, entry)


def new_blocks(draft: Draft, entry: Entry) -> Fate:
    """The new layers of LLaMA Pro: as many, each behind a group of its own."""
    if "adapter.new_layers" not in draft.values:
        return Fate("silent", "only used with train_type llamapro")
    if entry.key == "llamapro_num_groups" and entry.value != draft.values["adapter.new_layers"]:
        raise UnfitError("adapter.new_layers inserts one layer after each group")
    return carried("adapter.new_layers", draft.values["adapter.new_layers"])


def dataset(draft: Draft, entry: Entry) -> Fate:
    """The data sets, of which files are taken whole."""
    target = "data.train" if entry.key == "dataset" else "data.eval"
    return carried(target, draft.values.get(target))


def loss_scale(draft: Draft, entry: Entry) -> Fate:
    """The turns that are learned."""
    base, _, more = text(entry.value).partition("+")
    if base == "ignore_empty_think":  # the name of ms-swift 3 for default+ignore_empty_think
        base, more = "default", base
    if not draft.has_own_rows:
        return Fate("decided", "methods other than sft train on full answers")
    if base not in ("default", "last_round", "all") or (more and more != "ignore_empty_think"):
        raise UnfitError(f"{entry.value}: data.loss_on accepts assistant, last and all, without weights")
    if more:
        draft.differ(entry.key, entry.value, "ms-swift masks empty <think> blocks from the loss; tunekit does not")
    if base == "default":
        return Fate("silent", reason("loss_default"))
    return draft.carry(entry, "data.loss_on", "last" if base == "last_round" else "all")


def template(draft: Draft, entry: Entry) -> Fate:
    """A template by name: tunekit's where that writes the same, else the model's own is taken."""
    if entry.value in ("default", "dummy"):
        draft.suspect(entry.key, f"template {entry.value} is not the model's own, which the recipe uses")
    is_chat = draft.original.task != "pt" and truth(draft.get("use_chat_template", True))
    fate = same_template(draft, entry, "ms-swift") if is_chat else None
    if fate is not None:
        return fate
    words = f"ms-swift formats rows with its template {entry.value}; {reason('other_template')}"
    return Fate("different", words, "model.chat_template")


def packing(draft: Draft, entry: Entry) -> Fate:
    """Packing, of which ms-swift takes no notice where it lays out rows step by step."""
    if draft.method != "gkd":
        return hf.packing(draft, entry)
    return Fate("silent", "ms-swift does not pack rows in gkd" if truth(entry.value) else "is off")


def utilization(draft: Draft, entry: Entry) -> Fate:
    """The share of a device's memory that vLLM takes."""
    if draft.method == "gkd":
        return distillation.vllm(draft, entry)
    if draft.method != "grpo":
        return Fate("silent", "only used with colocated vLLM")
    return hf.utilization(draft, entry)


def stopping(draft: Draft, entry: Entry) -> Fate:
    """The end of a mixture of data sets."""
    if draft.get("interleave_prob") is None:
        return Fate("silent", "only used with interleave_prob")
    return draft.carry(entry, "data.stopping_strategy", text(entry.value))
