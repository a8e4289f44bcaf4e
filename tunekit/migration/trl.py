"""A YAML file or command line of TRL's commands (`trl sft --config FILE`) -> a recipe.

What the trainers take is read off the installed TRL, so every argument of theirs is known; what tunekit does not set
itself is passed on under its name.
"""

import contextlib

from tunekit.errors import RecipeError
from tunekit.migration import distillation
from tunekit.migration import training as hf
from tunekit.migration.draft import Draft, Rule, UnfitError, carried, is_off, number, text, trainer_arg
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.migration.table import tool_table
from tunekit.recipe.methods import METHODS
from tunekit.recipe.trainer_args import config_fields, owner_hint

_ON_POLICY = ("grpo", "rloo", "gmpo", "distillation")
_COMMANDS = ("sft", "dpo", "kto", "orpo", "cpo", "reward", *_ON_POLICY)
"""Methods whose fields are arguments of TRL's by the same name."""
_READ = (*_COMMANDS, "gkd", "prm")
"""Methods whose scripts are read: those of others have arguments that mean something else than a recipe's fields."""
_OF_PRM = ("step_separator", "train_on_last_step_only")
"""Arguments of PRMTrainer, which TRL had until its version 1."""
_GENERATION = "temperature top_p top_k min_p repetition_penalty use_vllm vllm_mode"
_RATES = {"sft": 2e-5, "gkd": 2e-5, "reward": 1e-4, "prm": 1e-5}


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    draft.original.entries = tuple(map(_switched_off, draft.original.entries))
    hf.set_batch(draft, "per_device_train_batch_size", devices="num_processes", default_micro=8)
    draft.put("method.type", _method(draft), "task")
    if draft.get("use_peft"):
        bits = 4 if draft.get("load_in_4bit") is True else 8 if draft.get("load_in_8bit") is True else 16
        hf.put_quantized(draft, bits, "use_peft")
    else:
        draft.put("adapter.type", "full", "use_peft")
    _sources(draft)


def _switched_off(entry: Entry) -> Entry:
    """A switch that is on by default and off by its name with `no_`."""
    is_negative = entry.key.startswith("no_") and entry.value is True and "." not in entry.key
    return Entry(entry.key.removeprefix("no_"), False, entry.line) if is_negative else entry


def _method(draft: Draft) -> str:
    """Return the command's method: named in the script or beside the file, or inferred from keys that only one of them
    takes.
    """
    task = draft.original.task
    if task in _READ:
        return task
    if task in METHODS:
        problem = f"{draft.original.path}: {task}: arguments of TRL's trainer for {task} cannot be carried over"
        raise RecipeError(problem, hint="write the recipe by hand: `tunekit explain method` lists its fields")
    if task is not None:
        raise draft.no_method(task, task)
    keys = set(draft.original.values)
    for method, telling in tool_table("trl").words["telling"].items():
        if keys & {*telling.split()}:
            return str(method)
    draft.suspect("", "the file does not name the command: `trl sft` assumed; pass another, such as `-- trl dpo`")
    return "sft"


def _sources(draft: Draft) -> None:
    name = draft.get("dataset_name")
    if name is not None:
        train, test = draft.get("dataset_train_split", "train"), draft.get("dataset_test_split")
        field = draft.get("dataset_text_field", "text")
        columns = {"text": field} if field != "text" and draft.method == "sft" else None
        config = draft.get("dataset_config")
        source_values = hf.source(text(name), name=config, split=None if train == "train" else train, columns=columns)
        keys = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_text_field")
        hf.put_sources(draft, "data.train", [source_values], *keys)
        strategy = draft.get("eval_strategy", "no")
        if test is not None and not is_off(strategy):
            hf.put_sources(draft, "data.eval", [hf.source(text(name), name=config, split=test)], "dataset_test_split")
        return
    mixture, sources = draft.get("datasets"), []
    for entry in mixture if isinstance(mixture, list) else []:
        if isinstance(entry, dict) and entry.get("path"):
            file, split = entry.get("data_files"), entry.get("split")
            path = file if entry["path"] in ("json", "csv", "parquet") and isinstance(file, str) else entry["path"]
            sources.append(hf.source(text(path), name=entry.get("name"), split=None if split == "train" else split))
    hf.put_sources(draft, "data.train", sources, "datasets")


def finish(draft: Draft) -> None:
    """Record TRL's defaults for what the file does not set, and what looks wrong."""
    method = draft.method
    if method in _ON_POLICY:
        prompt = draft.get("max_prompt_length", 512)
        hf.room_for_answers(draft, prompt=prompt if isinstance(prompt, int) else 512)
    hf.trainer_defaults(draft, _RATES.get(method, 1e-6))
    if draft.has_adapter:
        draft.assume({"adapter.rank": 16, "adapter.alpha": 32, "adapter.dropout": 0.05})
        if "adapter.target_modules" not in draft.values:
            words = "lora_target_modules is not set: PEFT adapts few modules by default, the recipe all linear layers"
            draft.suspect("use_peft", words)
    elif any(key.startswith("lora_") for key in draft.original.values):
        draft.suspect("lora_r", "lora settings without use_peft: full fine-tuning")
    if method == "gkd":
        distillation.assume_of_trl(draft)
    attention = str(draft.get("attn_implementation", ""))
    if draft.get("packing") is True and method != "gkd" and "flash" not in attention and "varlen" not in attention:
        hf.suspect_packing(draft, "packing", "flash attention")
    if method == "sft":
        _differences_of_sft(draft)
    if method == "kto" and draft.get("train_sampling_strategy") is None:
        draft.assume({"data.shuffle": False})
        what = "estimates the KL term from unrelated completions of each micro-batch, tunekit from those of a whole "
        what += "optimizer step, in any layout"
        draft.differ("per_device_train_batch_size", draft.get("per_device_train_batch_size", 8), what)
    hf.suspect_beta(draft)
    for key in ("load_in_4bit", "load_in_8bit"):
        if draft.get(key) and not draft.get("use_peft"):
            draft.suspect(key, f"{key} without use_peft: quantized weights cannot be trained")


def _differences_of_sft(draft: Draft) -> None:
    if draft.get("assistant_only_loss") is None and draft.get("completion_only_loss") is None:
        what = "TRL trains on every token of a chat unless assistant_only_loss is on; the recipe on the assistant's"
        draft.differ("assistant_only_loss", False, f"{what} (data.loss_on: all does the same)", remedy="data.loss_on")
    if not draft.get("assistant_only_loss") and draft.get("completion_only_loss") is not False:
        what = "of chats as prompt and completion, TRL also trains on what the template writes after the last answer"
        draft.differ("completion_only_loss", True, what)
    if draft.get("dataset_text_field") is not None and not draft.get("packing"):
        what = "TRL truncates texts longer than max_length; the recipe continues them in the next sequence"
        draft.differ("max_length", draft.get("max_length", 1024), what)


# Single keys


def test_split(draft: Draft, entry: Entry) -> Fate:
    """The split to evaluate on."""
    if "data.eval" not in draft.values:
        return Fate("silent", "eval_strategy is off")
    return carried("data.eval", draft.values["data.eval"])


def text_field(draft: Draft, entry: Entry) -> Fate:
    """The column of texts."""
    if draft.method != "sft":
        return Fate("silent", "only used with sft")
    if "data.columns" in draft.values:
        return carried("data.columns", draft.values["data.columns"])
    return Fate("silent", "text is the default")


def reward_model(draft: Draft, entry: Entry) -> Fate:
    """A model that gives rewards."""
    return draft.carry(entry, "method.rewards", [{"type": "reward_model", "model": text(entry.value)}])


def teacher(draft: Draft, entry: Entry) -> Fate:
    """The teacher of a distillation, or the model that it learns from by another name."""
    if draft.method not in ("distillation", "gkd"):
        return Fate("silent", "only used with distillation and gkd")
    return draft.carry(entry, "method.teacher.path", text(entry.value))


def _field(draft: Draft, entry: Entry) -> Fate:
    """An argument that is a field of the method, by the same name."""
    name, value = entry.key.partition(".")[0], entry.value
    if isinstance(value, str):
        with contextlib.suppress(UnfitError):
            value = number(value)
    if name == "scale_rewards" and isinstance(value, bool):
        value = "group" if value else "none"
    return draft.carry(entry, f"method.{name}", value)


def _generation(draft: Draft, entry: Entry) -> Fate:
    return draft.carry(entry, f"method.generation.{entry.key.partition('.')[0]}", entry.value)


def _pass_on(draft: Draft, entry: Entry) -> Fate:
    """An argument of TRL's trainer that tunekit does not set itself."""
    name = entry.key.partition(".")[0]
    hint = owner_hint(draft.method, name)
    return Fate("decided", hint) if hint is not None else trainer_arg(name)(draft, entry)


def rules(draft: Draft) -> dict[str, Rule]:
    """TRL's arguments, for the command that it is."""
    method, arguments = draft.method, config_fields(draft.method)
    fields = METHODS[method].model_fields.keys() & arguments if method in _COMMANDS else ()
    generation = _GENERATION.split() if method in _ON_POLICY else ()
    return {
        **dict.fromkeys(arguments, _pass_on),
        **tool_table("trl").rules(),
        **dict.fromkeys(fields, _field),
        **dict.fromkeys(generation, _generation),
        **(dict.fromkeys(_OF_PRM, _field) if method == "prm" else {}),
        **(distillation.OF_TRL | dict.fromkeys(("lmbda", "beta"), _field) if method == "gkd" else {}),
    }
