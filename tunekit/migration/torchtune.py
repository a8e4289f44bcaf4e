"""torchtune's YAML -> a recipe: its components by their names, and their arguments."""

import re
from pathlib import Path
from typing import Any

from tunekit.errors import RecipeError
from tunekit.migration import optimizers
from tunekit.migration import training as hf
from tunekit.migration.draft import Draft, UnfitError, carried, is_off, names, number, reason, truth, whole
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.migration.table import tool_table

_INSTRUCT = {"meta-llama": "-Instruct", "Qwen": "-Instruct", "google": "-it"}
"""Suffixes that makers add to the names of chat models."""


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    draft.original.entries = tuple(_resolved(draft, entry) for entry in draft.original.entries)
    for key in ("policy_model", "reward_and_value_model"):
        if draft.get(key) is not None:
            where = f"{draft.original.path}:{draft.line_of(key)}: {key}"
            raise RecipeError(f"{where}: PPO is unsupported", hint="`tunekit explain method` lists the methods")
    hf.set_batch(draft, "batch_size")
    if _distils(draft):
        draft.put("method.type", "gkd", "teacher_model")
        draft.put("method.lmbda", 0, "teacher_model")
        _put_model(draft, "method.teacher.path", "teacher_model", "teacher_checkpointer")
        if draft.get("kd_loss._component_") is None:
            raise RecipeError(
                f"{draft.original.path}: no kd_loss", hint="required with teacher_model: add it to the file"
            )
    if "method.type" not in draft.values:
        loss_type = _words("losses").get(_last(draft.get("loss._component_", "")))
        if loss_type is not None:
            draft.put("method.type", "cpo" if loss_type == "simpo" else "dpo", "loss")
            if loss_type != "sigmoid":
                draft.put("method.loss_type", loss_type, "loss._component_")
    _model(draft)
    for target, key in (("data.train", "dataset"), ("data.eval", "dataset_val")):
        datasets = draft.get(key)
        datasets = datasets if isinstance(datasets, list) else [datasets]
        sources = [source for item in datasets if isinstance(item, dict) and (source := _source(item)) is not None]
        if target == "data.eval":
            for source in sources:
                source.pop("loss_on", None)
        hf.put_sources(draft, target, sources, key)


def _resolved(draft: Draft, entry: Entry) -> Entry:
    """An entry in which `${other.key}` is filled in."""
    if not isinstance(entry.value, str) or "${" not in entry.value:
        return entry
    value = re.sub(r"\$\{([\w.]+)\}", lambda found: str(draft.get(found[1], found[0])), entry.value)
    return Entry(entry.key, value, entry.line)


def _words(section: str) -> dict[str, Any]:
    return tool_table("torchtune").words[section]


def _last(component: Any) -> str:
    return str(component).rpartition(".")[2]


def _model(draft: Draft) -> None:
    """The model by its builder, and the adapter that the builder's name begins with."""
    builder = _last(draft.get("model._component_", ""))
    is_small = builder.startswith("qlora_") or draft.get("model.quantize_base") is True
    has_adapter = _plain(builder) != builder or draft.get("model.lora_rank") is not None
    draft.put("adapter.type", "qlora" if is_small else "lora" if has_adapter else "full", "model._component_")
    _put_model(draft, "model.path", "model", "checkpointer")


def _plain(builder: str) -> str:
    return builder.removeprefix("qlora_").removeprefix("lora_").removeprefix("dora_")


def _put_model(draft: Draft, target: str, model: str, checkpointer: str) -> None:
    """Name a model by the folder of its weights where that is one of transformers', else by its builder."""
    builder, folder = _last(draft.get(f"{model}._component_", "")), str(draft.get(f"{checkpointer}.checkpoint_dir", ""))
    plain = _plain(builder)
    if Path(folder).is_dir() and (Path(folder) / "config.json").is_file():
        draft.put(target, folder, f"{checkpointer}.checkpoint_dir")
        return
    chats = re.search(r"instruct|chat|-it\b", f"{folder} {builder}", re.IGNORECASE) is not None
    name = _words("models").get(plain.removesuffix("_instruct").removesuffix("_base"))
    if name is None:
        if folder and not _is_of_images(plain):
            draft.put(target, folder.rstrip("/"), f"{checkpointer}.checkpoint_dir")
        return
    if chats and not name.endswith(("-hf", "nstruct")):
        name += _INSTRUCT.get(name.partition("/")[0], "")
    draft.put(target, name, f"{model}._component_")


def _distils(draft: Draft) -> bool:
    """Return whether a teacher's probabilities count in the loss."""
    return draft.get("teacher_model") is not None and not is_off(draft.get("kd_ratio", 0.5))


def _is_of_images(builder: str) -> bool:
    return "vision" in builder or "clip" in builder or "flux" in builder


def _source(given: dict[str, Any]) -> dict[str, Any] | None:
    """A data set as a source of rows; None where its builder is not known."""
    defaults = _words("datasets").get(_last(given.get("_component_")))
    if defaults is None:
        return None
    source_values = {name: value for name, value in defaults.items() if value is not None}
    if isinstance(given.get("source"), str):
        files = given.get("data_files")
        file = files if isinstance(files, str) else files[0] if isinstance(files, list) and files else None
        is_kind = given["source"] in ("json", "csv", "text", "parquet")
        source_values["path"] = file if is_kind and file else given["source"]
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
    if _last(given.get("_component_")) == "chat_dataset":
        is_sharegpt = given.get("conversation_style") == "sharegpt"
        kind, column = ("sharegpt", "conversations") if is_sharegpt else ("messages", "messages")
        source_values["format"] = kind
        named = given.get("conversation_column", column)
        source_values["columns"] = {} if named == column else {column: named}
    if given.get("column") and source_values.get("format") == "text":
        source_values["columns"] = {"text": given["column"]} if given["column"] != "text" else {}
    return hf.source(**source_values) if "path" in source_values else None


def _is_file(path: Any) -> bool:
    return isinstance(path, str) and Path(path).suffix in (".json", ".jsonl", ".csv", ".txt", ".parquet")


def _columns(given: dict[str, Any], known: dict[str, str]) -> dict[str, str]:
    """A column map of torchtune's in our names."""
    ours = {"input": "prompt", "output": "completion", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    columns = dict(known) | {ours[name]: str(theirs) for name, theirs in given.items() if name in ours}
    return {name: theirs for name, theirs in columns.items() if name != theirs}


def finish(draft: Draft) -> None:
    """Record torchtune's defaults for what the file does not set, and what looks wrong."""
    own = "torchtune's default; not set in the file"
    if draft.get("tokenizer.max_seq_len") is None:
        what = "max_seq_len is null: torchtune truncates nothing; the recipe has tunekit's default data.max_length"
        draft.suspect("tokenizer", what)
    if draft.get("lr_scheduler._component_") is None:
        draft.assume({"train.lr_scheduler_type": "constant", "train.warmup_steps": 0}, own)
    optimizer_name = draft.get("optimizer._component_")
    if optimizer_name and draft.get("optimizer.weight_decay") is None:
        decay = _words("optimizers").get(str(optimizer_name), ("", 0.0))[1]
        draft.assume({"train.weight_decay": decay}, f"the default of {_last(optimizer_name)}")
    if draft.get("clip_grad_norm") is None:
        words = "torchtune does not clip gradients here, tunekit does: set a large value to disable it"
        draft.assume({"train.max_grad_norm": 1.0}, words)
    if draft.has_adapter:
        draft.assume({"adapter.target_modules": "all-linear"}, own)
    if draft.values.get("data.loss_on") == "all":
        draft.suspect("dataset", "train_on_input is on (the default of alpaca_dataset): the loss includes prompts")
    if draft.method in ("dpo", "cpo"):
        draft.values.pop("data.loss_on", None)
    if draft.method == "gkd":
        draft.assume({"method.kd_ratio": 0.5}, own)
        draft.differ("kd_loss", draft.get("kd_loss._component_"), _SCALED)
    if draft.get("tokenizer.prompt_template") is None and not all(kind == "text" for kind in hf.source_formats(draft)):
        words = f"torchtune formats turns with its tokenizer {_last(draft.get('tokenizer._component_'))}"
        draft.differ(
            "tokenizer.prompt_template", None, f"{words}; {reason('other_template')}", remedy="model.chat_template"
        )


_SCALED = (
    "torchtune adds up the mean losses of micro-batches and divides the gradients by the tokens of the step, so that "
    "an optimizer's epsilon damps its updates and clip_grad_norm hardly clips; tunekit takes the mean over these tokens"
)
"""The scale of a loss that torchtune 0.6 has in its recipes of distillation alone."""


# Single keys


def component(draft: Draft, entry: Entry) -> Fate:
    """The builder of the model."""
    if "model.path" not in draft.values:
        why = reason("multimodal") if _is_of_images(str(entry.value)) else "unknown model"
        raise UnfitError(f"{_last(entry.value)}: {why}")
    return Fate("carried", f"model.path: {draft.values['model.path']}, adapter.type: {draft.values['adapter.type']}")


def quantizer(draft: Draft, entry: Entry) -> Fate:
    """Quantization-aware training, by torchao's quantizer for int4 weights and int8 inputs."""
    kind = _last(draft.get("quantizer._component_", ""))
    if kind != "Int8DynActInt4WeightQATQuantizer":
        raise UnfitError(f"quantization-aware training by {kind} is unsupported")
    if entry.key == "quantizer._component_":
        draft.put(
            "train.qat", {"activation_dtype": "int8", "group_size": draft.get("quantizer.groupsize", 256)}, entry.key
        )
        words = "torchtune rounds the head too, unless it is tied to the embedding; the recipe leaves it unrounded"
        return Fate("different", f"train.qat.activation_dtype: int8; {words}")
    if entry.key == "quantizer.groupsize":
        return carried("train.qat.group_size", entry.value)
    raise UnfitError("unsupported")


def folder(draft: Draft, entry: Entry) -> Fate:
    """The folder that the model, or a teacher, is read from."""
    target = "method.teacher.path" if entry.key.startswith("teacher") else "model.path"
    if target != "model.path" and not _distils(draft):
        return _without_teacher(draft)
    if draft.values.get(target) in (str(entry.value), str(entry.value).rstrip("/")):
        return carried(target, draft.values[target])
    return Fate("decided", f"the model is loaded from the Hub; {target} may be a folder with a config.json")


def teacher(draft: Draft, entry: Entry) -> Fate:
    """The builder of a teacher."""
    if not _distils(draft):
        return _without_teacher(draft)
    if "method.teacher.path" not in draft.values:
        raise UnfitError(f"{_last(entry.value)}: unknown model")
    return carried("method.teacher.path", draft.values["method.teacher.path"])


def _without_teacher(draft: Draft) -> Fate:
    is_there = draft.get("teacher_model") is not None
    return Fate("silent", "no effect with kd_ratio 0" if is_there else "only used with teacher_model")


def divergence(draft: Draft, entry: Entry) -> Fate:
    """The loss of a distillation: a divergence from the teacher, to either side."""
    if not _distils(draft):
        return _without_teacher(draft)
    name = _last(draft.get("kd_loss._component_"))
    beta = _words("divergences").get(name)
    if name.startswith("SymmetricKL"):
        share = number(draft.get("kd_loss.sym_kd_ratio", 0.5))
        if share not in (0, 1):
            raise UnfitError(f"a sum of both divergences is no method.beta: {name} with sym_kd_ratio {share:g}")
        beta = 1 - share
    if beta is None:
        raise UnfitError(f"{name}: method.beta is 0 for the forward and 1 for the reverse divergence")
    fate = draft.carry(entry, "method.beta", beta)
    return fate if beta else Fate("carried", f"{fate.words}  (the loss is smaller by the teacher's entropy)")


def ratio(draft: Draft, entry: Entry) -> Fate:
    """The weight of the divergence beside the likelihood of the rows."""
    if draft.get("teacher_model") is None:
        return _without_teacher(draft)
    value = number(entry.value)
    return draft.carry(entry, "method.kd_ratio", value) if value else Fate("silent", "0: method sft, without teacher")


def attention_modules(draft: Draft, entry: Entry) -> Fate:
    """The modules of attention that are adapted."""
    return draft.carry(entry, "adapter.target_modules", _targets(draft))


def other_modules(draft: Draft, entry: Entry) -> Fate:
    """Further modules that are adapted."""
    return carried("adapter.target_modules", _targets(draft))


def _targets(draft: Draft) -> Any:
    """Modules by their names in transformers; all linear ones where torchtune names all of them."""
    chosen = names(draft.get("model.lora_attn_modules", []))
    mlp, head = (draft.get(f"model.apply_lora_to_{part}") is True for part in ("mlp", "output"))
    if {"q_proj", "k_proj", "v_proj", "output_proj"} <= set(chosen) and mlp and not head:
        return "all-linear"
    is_phi = "phi" in str(draft.get("model._component_"))
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} if is_phi else {}
    modules = [fused.get(name, "o_proj" if name == "output_proj" else name) for name in chosen]
    modules += (["gate_up_proj", "down_proj"] if is_phi else ["gate_proj", "up_proj", "down_proj"]) if mlp else []
    return list(dict.fromkeys(modules + (["lm_head"] if head else [])))


def dataset(draft: Draft, entry: Entry) -> Fate:
    """The builder of a data set."""
    name = _last(entry.value)
    if name not in _words("datasets"):
        raise UnfitError(f"{name}: unknown dataset: set data.train, and data.format to a function if needed")
    fate, how = of_rows(draft, entry), _words("prompts").get(name)
    if name.startswith("alpaca"):
        return Fate("carried", f"{fate.words}, data.prompt_style: alpaca_turn")
    return fate if how is None else Fate("different", f"{fate.words}; {how}")


def of_rows(draft: Draft, entry: Entry) -> Fate:
    """A setting of a data set."""
    target = "data.eval" if entry.key.startswith("dataset_val") else "data.train"
    if entry.key.endswith(".split") and entry.value == "train":
        return Fate("silent", "train is the default")
    return carried(target, draft.values.get(target))


def train_on_input(draft: Draft, entry: Entry) -> Fate:
    """The tokens that count, which the data set has told."""
    if draft.values.get("data.loss_on") == "all":
        return carried("data.loss_on", "all")
    return Fate("silent", reason("loss_default"))


def packed(draft: Draft, entry: Entry) -> Fate:
    """Packing, of rows to train on."""
    if not truth(entry.value) or entry.key.startswith("dataset_val"):
        return Fate("silent", "is off")
    return draft.carry(entry, "data.packing", True)


def optimizer(draft: Draft, entry: Entry) -> Fate:
    """An optimizer by its class."""
    counterpart = _words("optimizers").get(str(entry.value))
    if counterpart is None:
        raise UnfitError(f"{entry.value}: `tunekit explain train.optim` lists the supported ones")
    fate = draft.carry(entry, "train.optim", counterpart[0])
    if not _is_in_4_bits(draft):
        return fate
    words = [fate.words]
    if draft.get("optimizer.block_size") is None:
        words.append(optimizers.block_words())
    is_nearest = not truth(draft.get("optimizer.bf16_stochastic_round") or False)
    is_pure = draft.values["adapter.type"] == "full" and str(draft.get("dtype")) in ("bf16", "bfloat16")
    if is_pure and is_nearest:
        words.append(optimizers.TO_THE_NEAREST)
    return fate if len(words) == 1 else Fate("different", "; ".join(words))


def block_size(draft: Draft, entry: Entry) -> Fate:
    """Values that share a scale in states of few bits."""
    if not _is_in_4_bits(draft):
        raise UnfitError("only supported with torchao.optim.AdamW4bit")
    num_values = whole(entry.value)
    if num_values != 256:
        return Fate("different", optimizers.block_words(num_values))
    return Fate("silent", "tunekit's states have the same blocks")


def stochastic_rounding(draft: Draft, entry: Entry) -> Fate:
    """The rounding of weights in bfloat16 by an optimizer of torchao."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    if not _is_in_4_bits(draft):
        raise UnfitError("only supported with torchao.optim.AdamW4bit; set train.optim=tunekit_adamw")
    return Fate("silent", optimizers.STOCHASTIC)


def _is_in_4_bits(draft: Draft) -> bool:
    return str(draft.get("optimizer._component_")).endswith(".AdamW4bit")


def betas(draft: Draft, entry: Entry) -> Fate:
    """The two betas of Adam."""
    if not isinstance(entry.value, list) or len(entry.value) != 2:
        raise UnfitError("must be two numbers")
    for name, value in zip(("adam_beta1", "adam_beta2"), entry.value, strict=True):
        draft.put(f"method.trainer_args.{name}", number(value), entry.key)
    return Fate("carried", f"method.trainer_args.adam_beta1 and adam_beta2: {entry.value}")


def schedule(draft: Draft, entry: Entry) -> Fate:
    """A schedule by its function."""
    if _last(entry.value) != "get_cosine_schedule_with_warmup":
        raise UnfitError(f"{_last(entry.value)}: `tunekit explain train.lr_scheduler_type` lists the supported ones")
    if draft.get("lr_scheduler.num_warmup_steps") is None:
        draft.put("train.warmup_steps", 0, entry.key)
    return draft.carry(entry, "train.lr_scheduler_type", "cosine")


def epochs(draft: Draft, entry: Entry) -> Fate:
    """Epochs, which may be shortened."""
    if draft.get("max_steps_per_epoch"):
        return Fate("carried", "train.max_steps, with max_steps_per_epoch")
    return draft.carry(entry, "train.num_epochs", number(entry.value))


def steps(draft: Draft, entry: Entry) -> Fate:
    """Steps of an epoch at most."""
    num_steps, times = whole(entry.value), whole(draft.get("epochs", 1))
    draft.put("train.max_steps", num_steps * times, entry.key, "epochs")
    draft.comments["train.max_steps"] = f"was {times} epochs of at most {num_steps} steps"
    return carried("train.max_steps", num_steps * times)


def loss(draft: Draft, entry: Entry) -> Fate:
    """The loss, which tells the method."""
    if draft.values.get("method.type") not in (None, "gkd"):
        return carried("method.type", draft.method)
    return Fate("decided", reason("kernels"))


def of_loss(draft: Draft, entry: Entry) -> Fate:
    """A setting of the loss of a method."""
    if draft.values.get("method.type") in (None, "gkd"):
        return Fate("decided", reason("kernels"))
    name, value = entry.key.removeprefix("loss."), number(entry.value)
    if name == "beta":
        return hf.beta(draft, entry)
    if value == 0:
        return Fate("silent", "is off")
    return draft.carry(entry, f"method.{'simpo_gamma' if name == 'gamma' else name}", value)


def prompt_template(draft: Draft, entry: Entry) -> Fate:
    """A template of the rows: the model's own is taken."""
    draft.suspect(entry.key, f"prompt_template {entry.value} is not the model's own, which the recipe uses")
    words = f"torchtune formats rows with {_last(entry.value)}; {reason('other_template')}"
    return Fate("different", words, "model.chat_template")


def logger(draft: Draft, entry: Entry) -> Fate:
    """The logger, which may be a tracker."""
    name = _last(entry.value)
    if name in ("DiskLogger", "StdoutLogger"):
        return Fate("silent", "losses are logged in the run folder")
    tracker = _words("loggers").get(name)
    return Fate("unsupported", reason("no_tracker")) if tracker is None else draft.track(entry, tracker)
