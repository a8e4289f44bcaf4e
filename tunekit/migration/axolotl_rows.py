"""Axolotl's lists of rows: types, fields and files -> sources."""

from pathlib import Path
from typing import Any

from tunekit.migration import training as hf
from tunekit.migration.draft import (
    Draft,
    Rule,
    UnfitError,
    both,
    carried,
    decided,
    different,
    each,
    names,
    refused,
    silent,
    text,
)
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate

SHARDED = "shards of a data set: data.train.split takes slices, such as train[:10%]"
_MASKING = "masked by data.loss_on: assistant turns with their end tokens, the last one, or all"
_FIELDS = "rows of other columns: data.columns names them, or a function makes the rows (data.format: module:function)"

_TRAINING_FIELDS = ("train", "training", "loss")
"""Keys of a turn that `data` reads as marks of what is learned."""

_ALPACA = (
    "Axolotl writes 'Below is an instruction ... ### Instruction: ... ### Response:'; here the model's chat template "
    "writes a question and its answer"
)
_WRAPPED = ("chatml", "llama3", "zephyr")
"""First words of types that write a prompt as a turn of this template."""

_PLAIN = {"alpaca": "alpaca", "alpaca_chat": "alpaca", "sharegpt": "sharegpt", "completion": "text", "pretrain": "text"}
_PAIRS: dict[str, dict[str, str]] = {
    "intel": {"prompt": "question"},
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    "icr": {"prompt": "input"},
}
"""Columns of preference pairs by the last word of a type: `chatml.intel`."""


def source(given: dict[str, Any], method: str) -> dict[str, Any]:
    """One of `datasets`, as a source of rows."""
    files = given.get("data_files")
    file = files[0] if isinstance(files, list) and files else files
    path = text(given["path"])
    if isinstance(file, str) and (path in ("json", "csv", "parquet", "text") or not path):
        path = file
    elif isinstance(file, str) and Path(path).is_dir():
        path = f"{path}/{file}"
    source_draft = hf.source(path, name=given.get("name"), split=given.get("split"), revision=given.get("revision"))
    if source_draft.get("split") == "train":
        del source_draft["split"]
    kind = given.get("type")
    format_, columns = _format(kind, given, method) if isinstance(kind, str) else _of_mapping(kind)
    return source_draft | {name: value for name, value in (("format", format_), ("columns", columns)) if value}


def _format(kind: str, given: dict[str, Any], method: str) -> tuple[str | None, dict[str, str]]:
    first, _, last = kind.replace(":", ".").partition(".")
    if method in ("dpo", "orpo", "cpo", "reward"):
        columns = dict(_PAIRS.get(last, {})) if "chat_template" not in kind else {}
        columns |= {
            ours: given[theirs]
            for ours, theirs in (("chosen", "field_chosen"), ("rejected", "field_rejected"))
            if given.get(theirs)
        }
        if given.get("field_messages") and "chat_template" in kind:
            columns["prompt"] = given["field_messages"]
        elif last == "default" and "chat_template" in kind and method == "dpo":
            columns["prompt"] = "messages"
        return None, {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if method == "kto":
        return None, {"argilla": {"prompt": "instruction"}, "intel": {"prompt": "question"}}.get(last, {})
    if method == "grpo":
        return None, {}
    if first == "chat_template":
        return _conversation(given)
    if first in ("completion", "pretrain"):
        field = given.get("field") or given.get("text_column") or "text"
        return "text", {} if field == "text" else {"text": field}
    return _PLAIN.get(first), {}


def _conversation(given: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """A chat by its fields: `messages` with role and content, or ShareGPT's `conversations` with from and value."""
    properties = given.get("message_property_mappings")
    role = (
        (properties.get("role") if isinstance(properties, dict) else None) or given.get("message_field_role") or "role"
    )
    column = given.get("field_messages") or "messages"
    ours = "sharegpt" if role == "from" else "messages"
    expected = "conversations" if ours == "sharegpt" else "messages"
    return ours, {} if column == expected else {expected: column}


def _of_mapping(kind: Any) -> tuple[str | None, dict[str, str]]:
    """A type that is written out: fields and a format. A plain question with its answer is known here."""
    if not isinstance(kind, dict):
        return None, {}
    question, answer = kind.get("field_instruction"), kind.get("field_output")
    if kind.get("field_chosen") or kind.get("field_prompt"):
        fields = (
            ("prompt", "field_prompt"),
            ("chosen", "field_chosen"),
            ("rejected", "field_rejected"),
            ("completion", "field_completion"),
            ("label", "field_label"),
        )
        columns = {ours: kind[theirs] for ours, theirs in fields if kind.get(theirs)}
        return None, {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if question and answer and kind.get("format", "{instruction}") in ("{instruction}", "{instruction} "):
        return "prompt_completion", {"prompt": question, "completion": answer}
    return None, {}


def _path(draft: Draft, entry: Entry) -> Fate:
    target = "data.eval" if entry.key.startswith("test_") else "data.train"
    return carried(target, entry.value)


def _type(draft: Draft, entry: Entry) -> Fate:
    kind = text(entry.value)
    first, _, last = kind.replace(":", ".").partition(".")
    method = draft.values.get("method.type", "sft")
    if method == "sft":
        if first not in (*_PLAIN, "chat_template"):
            raise UnfitError(
                f"rows of {kind} are not read as such: data.format is left to be recognised, or names a function"
            )
        where = entry.key.rpartition(".")[0]
        index = int(where.rpartition("[")[2].rstrip("]")) if where.endswith("]") else 0
        value = draft.get(where.partition("[")[0])
        dataset = value[index] if isinstance(value, list) else value
        format_, columns = _format(kind, dataset if isinstance(dataset, dict) else {}, method)
        words = f"data.format: {format_}" + (f", data.columns: {columns}" if columns else "")
        return Fate("different", f"{words}; {_ALPACA}") if format_ == "alpaca" else Fate("carried", words)
    if first in _WRAPPED:
        columns = _format(kind, {}, method)[1]
        words = f"data.columns: {columns}; " if columns else ""
        how = f"Axolotl writes prompts as turns of {first}'s template; here texts are joined as they stand"
        return Fate("different", f"{words}{how}")
    if last in _PAIRS and "chat_template" not in kind:
        return Fate("carried", f"data.columns: {_PAIRS.get(last, {}) or _format(kind, {}, method)[1]}")
    if last in ("ultra", "default", "chat_template") or first in (
        "chat_template",
        "bradley_terry",
    ):
        return Fate("decided", "the shape of preference rows is recognised from their columns")
    return Fate(
        "unsupported", f"{kind} is a function of Axolotl's or of yours: data.format names one as module:function"
    )


def _type_field(draft: Draft, entry: Entry) -> Fate:
    name = entry.key.rpartition(".")[2]
    kind = {
        k.rpartition(".")[2]: v
        for k, v in ((e.key, e.value) for e in draft.original.entries)
        if k.startswith(entry.key.rpartition(".")[0] + ".")
    }
    _, columns = _of_mapping(kind)
    if name.startswith("field_") and entry.value in columns.values():
        return Fate("carried", f"data.columns: {columns}")
    if name.startswith("field_") and any(
        entry.value == ours for ours in ("prompt", "chosen", "rejected", "completion", "label")
    ):
        return Fate("silent", "the column has this name here too")
    if name in ("format", "no_input_format", "system_format") and columns:
        return Fate("decided", hf.TEMPLATE)
    return Fate("unsupported", _FIELDS)


def _field(draft: Draft, entry: Entry) -> Fate:
    defaults = {"text", "messages", "conversations", "chosen", "rejected", "role", "content", "from", "value"}
    if entry.value in defaults:
        return Fate("carried", "data.format, by the columns of a chat")
    columns = draft.values.get("data.columns", {})
    sources = draft.values.get("data.train")
    every = (
        [columns, *(source_values.get("columns", {}) for source_values in sources if isinstance(source_values, dict))]
        if isinstance(sources, list)
        else [columns]
    )
    if any(entry.value in some.values() for some in every):
        return Fate("carried", f"data.columns: {next(some for some in every if entry.value in some.values())}")
    return Fate("unsupported", _FIELDS)


def _roles_to_train(draft: Draft, entry: Entry) -> Fate:
    roles = names(entry.value)
    if set(roles) <= {"assistant", "gpt", "model"}:
        return Fate("silent", "data.loss_on assistant is the default")
    return Fate(
        "unsupported", "only turns of the assistant are trained on, the last of them, or every token (data.loss_on)"
    )


def _end_tokens(draft: Draft, entry: Entry) -> Fate:
    if entry.value == "turn":
        return Fate("decided", _MASKING)
    return Fate("different", f"{entry.value}: here the end token of each turn that counts does, and of no other")


def are_texts(draft: Draft) -> bool:
    """Return whether all rows are plain texts, of which the longer ones continue in the next sequence."""
    sources = draft.values.get("data.train")
    formats = (
        [source_values.get("format") if isinstance(source_values, dict) else None for source_values in sources]
        if isinstance(sources, list)
        else []
    )
    return all(format == "text" for format in formats or [draft.values.get("data.format")])


def _training_field(draft: Draft, entry: Entry) -> Fate:
    if entry.value in _TRAINING_FIELDS:
        return Fate("silent", f"{entry.value} of a turn is read here too: false leaves it out of the loss")
    raise UnfitError(
        f"turns are marked by {', '.join(_TRAINING_FIELDS)}: a function renames the key (data.format: module:function)"
    )


def _split(draft: Draft, entry: Entry) -> Fate:
    if entry.value == "train" and not entry.key.startswith("test_"):
        return Fate("silent", "train is the default")
    return carried("split", entry.value)


def rules(prefix: str) -> dict[str, Rule]:
    """Rules of a list of sources."""
    handlers: dict[str, Rule] = {
        "path": _path,
        "name": to_source("name"),
        "split": _split,
        "revision": to_source("revision"),
        "data_files": _files,
        "ds_type": decided("files are told apart by their names"),
        "type": _type,
        **each(
            _type_field,
            "type.field_instruction type.field_input type.field_output type.field_system type.field "
            "type.format type.no_input_format type.system_prompt type.system_format type.field_prompt "
            "type.field_chosen type.field_rejected type.field_completion type.field_label type.prompt_format "
            "type.chosen_format type.rejected_format type.completion_format",
        ),
        **each(
            _field,
            "field field_messages field_chosen field_rejected message_field_role message_field_content "
            "message_property_mappings text_column",
        ),
        "field_tools": flag_field("tools"),
        "field_human": refused("only the names of roles are known, not of columns"),
        "field_model": refused("only the names of roles are known, not of columns"),
        "roles_to_train": _roles_to_train,
        "message_field_training": _training_field,
        "train_on_eos": _end_tokens,
        "train_on_eot": _end_tokens,
        "roles": _roles,
        "conversation": both(different(hf.OTHER_TEMPLATE), "is deprecated in Axolotl: chat_template is its successor"),
        "chat_template": template,
        "chat_template_jinja": jinja,
        "drop_system_message": refused("system messages are kept"),
        "input_transform": refused("a function makes rows: data.format: module:function"),
        "shards": refused(SHARDED),
        "shards_idx": refused(SHARDED),
        "preprocess_shards": silent(hf.LOADING),
        "trust_remote_code": refused("data sets that run code of their own are not loaded"),
        "skip": refused("rows are not skipped: split takes slices, such as train[1000:]"),
        **each(
            refused("masks of single characters are not read; data.format: tokens takes labels"),
            "message_field_training_detail",
        ),
        **each(
            refused("reasoning stands in the content of a message, as the template writes it"),
            "field_thinking template_thinking_key split_thinking",
        ),
        **each(
            refused("not read from rows"),
            "logprobs_field temperature step_separator max_completion_length train_on_last_step_only "
            "input_format bos_token eos_token sequence_length length min_input_id max_input_id seed "
            "field_system field_instruction field_input field_output format",
        ),
    }
    return {f"{prefix}.{name}": rule for name, rule in handlers.items()}


def to_source(name: str) -> Rule:
    """A field of a source."""
    return lambda draft, entry: carried(name, entry.value)


def flag_field(name: str) -> Rule:
    """A column that has its own name here."""

    def rule(draft: Draft, entry: Entry) -> Fate:
        if entry.value == name:
            return Fate("silent", f"the column is called {name} here too")
        return Fate("unsupported", _FIELDS)

    return rule


def _files(draft: Draft, entry: Entry) -> Fate:
    files = entry.value if isinstance(entry.value, list) else [entry.value]
    if len(files) > 1:
        raise UnfitError(
            "only the first of several files: give each a source of its own, or a pattern such as data/*.jsonl"
        )
    return carried("data.train", files[0])


def _roles(draft: Draft, entry: Entry) -> Fate:
    return Fate("decided", "names of speakers are known: human, gpt, user, assistant, model, system, tool")


def template(draft: Draft, entry: Entry) -> Fate:
    """A template by name: the model's own is taken."""
    name = text(entry.value)
    if name.startswith("tokenizer_default"):
        return Fate("decided", hf.TEMPLATE)
    if name == "jinja":
        return Fate("silent", "chat_template_jinja has it")
    draft.suspect(
        entry.key, f"chat_template {name} replaces the model's own: the model may know another form of dialogue"
    )
    return Fate("different", f"Axolotl writes rows by its template {name}; {hf.OTHER_TEMPLATE}")


def jinja(draft: Draft, entry: Entry) -> Fate:
    """A template: a file, or its text."""
    template = text(entry.value)
    if "{" in template or "\n" in template:
        raise UnfitError("write the template to a file and name it in model.chat_template")
    draft.put("model.chat_template", template, entry.key)
    return carried("model.chat_template", template)
