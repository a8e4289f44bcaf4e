"""Keys of other tools about distillation from a teacher -> method gkd.

ms-swift and TRL generate completions in a share of the steps, and have a temperature for them; in ms-swift it is that
of the divergence as well. Both switch dropout off.
"""

from tunekit.errors import RecipeError
from tunekit.migration import training as hf
from tunekit.migration.draft import Draft, Rule, UnfitError, carried, is_off, names, number, text, truth
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate


def _completes(draft: Draft) -> bool:
    """Return whether generalized knowledge distillation generates completions in some steps."""
    return not is_off(draft.get("lmbda", 0.5))


def _no_completions() -> Fate:
    """The fate of a key of completions that are not generated."""
    return Fate("silent", "no effect with lmbda 0: no completions")


def _note_teacher_in_few_bits(draft: Draft, key: str) -> None:
    """Note that a tool quantizes a teacher as it does the model."""
    if draft.values.get("adapter.type") == "qlora":
        words = f"{draft.tool} quantizes the teacher too; tunekit loads it in 16 bits"
        draft.differ(key, draft.get(key), words)


def _note_long_completions(draft: Draft, key: str, value: int) -> None:
    """Note that a tool does not count completions into the longest sequence.

    Args:
        draft: What is made.
        key: The tool's key of the longest completion.
        value: Its default.
    """
    words = f"{draft.tool} holds prompts alone to max_length; tunekit ends completions at data.max_length"
    draft.differ(key, draft.get(key, value), words, remedy="data.max_length")


# ms-swift


def need_teacher(draft: Draft) -> None:
    """Check that a distillation has a teacher that is loaded.

    Raises:
        RecipeError: The teacher is on a server, or the model itself as it is trained.
    """
    if draft.get("teacher_model") is not None:
        return
    key, what = "rlhf_type", "a model that is its own teacher"
    if draft.get("teacher_model_server") is not None:
        key, what = "teacher_model_server", "a teacher on a server"
    line = draft.line_of(key)
    where = f"{draft.original.path}:{line}" if line else draft.original.path
    raise RecipeError(f"{where}: {key}: {what} is unsupported", hint="set teacher_model to a model that is loaded")


def assume_of_swift(draft: Draft) -> None:
    """Record how ms-swift distils where the file does not say it."""
    if draft.get("loss_scale") is None:
        draft.assume({"data.loss_on": "last"})
    draft.assume({"method.temperature": 0.9})
    _note_teacher_in_few_bits(draft, "quant_bits")
    if _completes(draft):
        draft.assume({"method.generation.temperature": 0.9, "method.max_completion_length": 512})
        _note_long_completions(draft, "max_completion_length", 512)
    is_megatron = draft.original.program == "megatron"
    if not is_megatron:
        hf.leave_out_dropout(draft, Fate("silent", "ms-swift disables dropout in gkd"))
    if not is_megatron and draft.values.get("train.global_batch_size") != draft.get("per_device_train_batch_size", 1):
        words = "ms-swift averages the loss over the tokens of each micro-batch, tunekit over those of the whole step"
        draft.differ("per_device_train_batch_size", draft.get("per_device_train_batch_size", 1), words)


def teacher(draft: Draft, entry: Entry) -> Fate:
    """The teacher of a distillation, or its revision."""
    if draft.method == "grpo":
        raise UnfitError("a teacher with rewards is unsupported")
    if draft.method != "gkd":
        return Fate("silent", "only used with gkd")
    name = "revision" if entry.key.endswith("revision") else "path"
    return draft.carry(entry, f"method.teacher.{name}", text(entry.value))


def likelihood(draft: Draft, entry: Entry) -> Fate:
    """The weight of the likelihood of rows that is added to the divergence."""
    weight = number(entry.value)
    if draft.method != "gkd" or not weight:
        return Fate("silent", "is off" if draft.method == "gkd" else "only used with gkd")
    if _completes(draft):
        raise UnfitError("only supported with lmbda 0: method.kd_ratio mixes losses of rows alone")
    fate = draft.carry(entry, "method.kd_ratio", round(1 / (1 + weight), 6))
    words = f"ms-swift's loss is {1 + weight:g} times as large, and so are the gradients that are clipped"
    return Fate("different", f"{fate.words}; {words}")


_LENGTHS = ("response_length", "max_new_tokens", "max_completion_length")
"""Keys of the longest completion; the first that is set counts."""


def completion_length(draft: Draft, entry: Entry) -> Fate:
    """The longest completion, by one of several keys."""
    if draft.method not in ("grpo", "gkd"):
        return Fate("silent", "generation settings have no effect in training")
    first = next((key for key in _LENGTHS if draft.get(key)), entry.key)
    if first != entry.key:
        return Fate("silent", f"{first} takes precedence")
    if draft.method == "gkd" and not _completes(draft):
        return _no_completions()
    return draft.carry(entry, "method.max_completion_length", entry.value)


def sampling(draft: Draft, entry: Entry) -> Fate:
    """A setting of the sampling of completions; in gkd the temperature is that of the divergence too."""
    if draft.method not in ("grpo", "gkd"):
        return Fate("silent", "only used with grpo gkd")
    value = 0 if (entry.key, entry.value) == ("top_k", -1) else entry.value
    is_of_divergence = draft.method == "gkd" and entry.key == "temperature"
    if is_of_divergence:
        draft.put("method.temperature", value, entry.key)
    if draft.method == "gkd" and not _completes(draft):
        return carried("method.temperature", value) if is_of_divergence else _no_completions()
    fate = draft.carry(entry, f"method.generation.{entry.key}", value)
    return Fate("carried", f"{fate.words}, method.temperature: {value}") if is_of_divergence else fate


def stop_words(draft: Draft, entry: Entry) -> Fate:
    """Texts at which completions end."""
    if draft.method == "grpo":
        return draft.carry(entry, "method.generation.stop", names(entry.value))
    if draft.method != "gkd":
        return Fate("silent", "only used with grpo gkd")
    if not _completes(draft):
        return _no_completions()
    raise UnfitError("completions end only at the end tokens of the model")


def vllm(draft: Draft, entry: Entry) -> Fate:
    """A setting of vLLM, which completions are generated with in grpo."""
    if draft.method == "grpo":
        if entry.key.startswith("vllm_server_") and entry.key != "vllm_server_base_url":
            return hf.server(draft, entry)
        return draft.carry(entry, f"method.generation.{entry.key}", entry.value)
    if draft.method != "gkd":
        return Fate("silent", "only used with grpo gkd")
    if not _completes(draft):
        return _no_completions()
    return Fate("decided", "transformers generates the completions of gkd")


# TRL


def assume_of_trl(draft: Draft) -> None:
    """Record how GKDTrainer distils where the file does not say it, and where tunekit does otherwise."""
    draft.assume({"data.loss_on": "last"}, "TRL trains on the last turn in gkd")
    # Also by `--no_disable_dropout`, of which an entry is made.
    if not any(entry.key == "disable_dropout" and entry.value is False for entry in draft.original.entries):
        hf.leave_out_dropout(draft, Fate("silent", "TRL disables dropout in gkd"))
    _note_teacher_in_few_bits(draft, "load_in_4bit" if draft.get("load_in_4bit") else "load_in_8bit")
    if (draft.num_devices or 1) > 1:
        words = "TRL's gradients are divided by the number of devices once more, before they are clipped"
        draft.differ("num_processes", draft.num_devices, words)
    words = "rows longer than max_length lose their start in TRL's gkd, their end in tunekit"
    draft.differ("max_length", draft.get("max_length", 1024), words, remedy="data.max_length")
    words = "TRL's gkd also trains on what the template writes after the end token, such as a line break"
    draft.differ("dataset_name", draft.get("dataset_name"), words)
    if not _completes(draft):
        return
    draft.assume({"method.generation.temperature": 0.9})
    _note_long_completions(draft, "max_new_tokens", 128)
    if draft.get("lmbda", 0.5) != 1:
        words = "TRL draws for each micro-batch whether completions are trained on, tunekit for each step"
        draft.differ("lmbda", draft.get("lmbda", 0.5), words)
    words = "TRL divides the loss of completions by the tokens of the answers that they replace, tunekit by their own"
    draft.differ("per_device_train_batch_size", draft.get("per_device_train_batch_size", 8), words)


def _completion(draft: Draft, entry: Entry) -> Fate:
    """A setting of completions in gkd, whose temperature is not that of the divergence."""
    if not _completes(draft):
        return _no_completions()
    target = {"temperature": "method.generation.temperature", "max_new_tokens": "method.max_completion_length"}
    return draft.carry(entry, target[entry.key], number(entry.value))


def _sequences(draft: Draft, entry: Entry) -> Fate:
    """The wish to train on answers that the teacher generates."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.get("lmbda") == 1:
        return Fate("silent", "no effect with lmbda 1")
    raise UnfitError("put the teacher's answers into the rows")


def _dropout(draft: Draft, entry: Entry) -> Fate:
    """The dropout of an adapter, which GKDTrainer switches off by itself."""
    words = "adapter.dropout is 0" if truth(entry.value) else "adapter.dropout is kept"
    return Fate("silent", words)


def _unread(draft: Draft, entry: Entry) -> Fate:
    """A setting of rows or their loss that GKDTrainer does not read."""
    return Fate("silent", "no effect in TRL's gkd, which lays out rows itself")


OF_TRL: dict[str, Rule] = {
    "temperature": _completion,
    "max_new_tokens": _completion,
    "seq_kd": _sequences,
    "disable_dropout": _dropout,
    "teacher_model_init_kwargs": lambda draft, entry: Fate("silent", "TRL's script sets it"),
    **dict.fromkeys(
        (
            "assistant_only_loss",
            "completion_only_loss",
            "dataset_text_field",
            "eval_packing",
            "loss_type",
            "packing",
            "packing_strategy",
            "padding_free",
            "truncation_mode",
        ),
        _unread,
    ),
}
"""Arguments of GKDTrainer, which is experimental in TRL, and of its base class."""
