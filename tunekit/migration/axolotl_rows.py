"""Axolotl's lists of rows: types, fields and files -> sources."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunekit.migration import axolotl_ebft
from tunekit.migration import training as hf
from tunekit.migration.draft import Draft, UnfitError, carried, names, reason, text, truth
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.migration.vocabulary import same_template

_TRAINING_FIELDS = ("train", "training", "loss")
"""Keys of a turn that `data` reads as marks of what is learned."""

_WRAPPED = ("chatml", "llama3", "zephyr")
"""First words of types that write a prompt as a turn of this template."""

_ENDS_WITH_ANSWER = ("llama3", "cohere", "mistral_v1", "mistral_v2v3", "mistral_v3_tekken")
"""Templates that write nothing after the end token of an answer."""

PREFIXED = re.compile(r"llama-?[12](?![.\d])|tiny-?llama|open_?llama|mistral-7b|mixtral|phi-?3|vicuna", re.IGNORECASE)
"""Names of models whose SentencePiece tokenizers begin a text with a space (the default `add_dummy_prefix`)."""

_COLUMNS = ("prompt", "chosen", "rejected", "completion", "label")
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
    kind, split = given.get("type"), given.get("split")
    format_, columns = _format(kind, given, method) if isinstance(kind, str) else _of_mapping(kind)
    return hf.source(
        path,
        name=given.get("name"),
        split=None if split == "train" else split,
        revision=given.get("revision"),
        format=format_,
        columns=columns,
        prompt_style="alpaca" if kind == "alpaca" else None,
    )


def is_plain_alpaca(draft: Draft) -> bool:
    """Return whether rows become plain text under the headings of Stanford Alpaca."""
    sources = draft.values.get("data.train")
    listed = [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    return "alpaca" in (draft.values.get("data.prompt_style"), *(source.get("prompt_style") for source in listed))


def _format(kind: str, given: dict[str, Any], method: str) -> tuple[str | None, dict[str, str]]:
    first, _, last = kind.replace(":", ".").partition(".")
    if method in ("dpo", "orpo", "cpo", "reward"):
        columns = dict(_PAIRS.get(last, {})) if "chat_template" not in kind else {}
        columns |= {ours: given[f"field_{ours}"] for ours in ("chosen", "rejected") if given.get(f"field_{ours}")}
        if given.get("field_messages") and "chat_template" in kind:
            columns["prompt"] = given["field_messages"]
        elif last == "default" and "chat_template" in kind and method == "dpo":
            columns["prompt"] = "messages"
        return None, {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if method == "kto":
        return None, {"argilla": {"prompt": "instruction"}, "intel": {"prompt": "question"}}.get(last, {})
    if method == "grpo":
        return None, {}
    if method == "ebft":
        return axolotl_ebft.format_of(kind)
    if first == "chat_template":
        return _conversation(given)
    if first in ("completion", "pretrain"):
        field = given.get("field") or given.get("text_column") or "text"
        return "text", {} if field == "text" else {"text": field}
    return _PLAIN.get(first), {}


def _conversation(given: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """A chat by its fields: `messages` with role and content, or ShareGPT's `conversations` with from and value."""
    properties = given.get("message_property_mappings")
    role = (properties.get("role") if isinstance(properties, dict) else None) or given.get("message_field_role")
    column = given.get("field_messages") or "messages"
    ours, expected = ("sharegpt", "conversations") if role == "from" else ("messages", "messages")
    return ours, {} if column == expected else {expected: column}


def _of_mapping(kind: Any) -> tuple[str | None, dict[str, str]]:
    """A type that is written out: fields and a format. A plain question with its answer is known here."""
    if not isinstance(kind, dict):
        return None, {}
    question, answer = kind.get("field_instruction"), kind.get("field_output")
    if kind.get("field_chosen") or kind.get("field_prompt"):
        columns = {ours: kind[f"field_{ours}"] for ours in _COLUMNS if kind.get(f"field_{ours}")}
        return None, {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if question and answer and kind.get("format", "{instruction}") in ("{instruction}", "{instruction} "):
        return "prompt_completion", {"prompt": question, "completion": answer}
    return None, {}


def dataset(draft: Draft, entry: Entry) -> Fate:
    """The path of a data set."""
    target = "data.eval" if entry.key.startswith("test_") else "data.train"
    return carried(target, entry.value)


def row_type(draft: Draft, entry: Entry) -> Fate:
    """The type of the rows: a prompt strategy of Axolotl's."""
    kind = text(entry.value)
    first, _, last = kind.replace(":", ".").partition(".")
    method = draft.method
    if method == "sft":
        if first not in (*_PLAIN, "chat_template"):
            raise UnfitError(f"rows of {kind} are unsupported: data.format is detected, or set to a function")
        section, _, index = entry.key.rpartition(".")[0].removesuffix("]").partition("[")
        value = draft.get(section)
        rows = value[int(index or 0)] if isinstance(value, list) else value
        format_, columns = _format(kind, rows if isinstance(rows, dict) else {}, method)
        words = f"data.format: {format_}" + (f", data.columns: {columns}" if columns else "")
        if kind == "alpaca":
            return Fate("carried", f"{words}, data.prompt_style: alpaca")
        if format_ == "alpaca":
            how = f"Axolotl writes prompts of {kind}; tunekit formats prompt and answer with the model's chat template"
            return Fate("different", f"{words}; {how}")
        return Fate("carried", words)
    if method == "ebft":
        return axolotl_ebft.row_type(kind)
    if first in _WRAPPED:
        columns = _format(kind, {}, method)[1]
        words = f"data.columns: {columns}; " if columns else ""
        how = f"Axolotl formats prompts as turns of {first}'s template; the recipe joins texts unchanged"
        return Fate("different", f"{words}{how}")
    if last in _PAIRS and "chat_template" not in kind:
        return Fate("carried", f"data.columns: {_PAIRS[last]}")
    if method in ("dpo", "cpo") and "chat_template" in kind and draft.get("chat_template") not in _ENDS_WITH_ANSWER:
        words = "Axolotl strips line breaks that a template, such as ChatML, writes after an answer; tunekit keeps them"
        return Fate("different", words)
    if last in ("ultra", "default", "chat_template") or first in ("chat_template", "bradley_terry"):
        return Fate("decided", "the format of preference rows is detected from their columns")
    return Fate("unsupported", f"{kind} is a function of Axolotl or your own: set data.format to module:function")


def type_part(draft: Draft, entry: Entry) -> Fate:
    """A part of a type that is written out."""
    name = entry.key.rpartition(".")[2]
    above = entry.key.removesuffix(name)
    parts = {part.key.rpartition(".")[2]: part.value for part in draft.original.entries if part.key.startswith(above)}
    _, columns = _of_mapping(parts)
    if name.startswith("field_") and entry.value in columns.values():
        return Fate("carried", f"data.columns: {columns}")
    if name.startswith("field_") and entry.value in _COLUMNS:
        return Fate("silent", "the column has the same name in tunekit")
    if name in ("format", "no_input_format", "system_format") and columns:
        return Fate("decided", reason("template"))
    return Fate("unsupported", reason("fields"))


def column(draft: Draft, entry: Entry) -> Fate:
    """A column by its name."""
    defaults = {"text", "messages", "conversations", "chosen", "rejected", "role", "content", "from", "value"}
    if entry.value in defaults:
        return Fate("carried", "data.format, by the columns of a chat")
    sources = draft.values.get("data.train")
    sources = [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    for columns in (draft.values.get("data.columns", {}), *(source.get("columns", {}) for source in sources)):
        if entry.value in columns.values():
            return Fate("carried", f"data.columns: {columns}")
    return Fate("unsupported", reason("fields"))


def roles_to_train(draft: Draft, entry: Entry) -> Fate:
    """The roles whose turns are learned."""
    roles = names(entry.value)
    if set(roles) <= {"assistant", "gpt", "model"}:
        return Fate("silent", "data.loss_on assistant is the default")
    return Fate("unsupported", "data.loss_on trains on all assistant turns, the last one, or every token")


def note_untrained_roles(draft: Draft) -> None:
    """Note lists of no roles, with which Axolotl trains on marked turns only."""
    for entry in draft.original.entries:
        if entry.pattern in ("datasets[].roles_to_train", "datasets.roles_to_train") and entry.value == []:
            words = "Axolotl trains only on turns that are marked; the recipe also on assistant turns without a mark"
            draft.fates[entry.key] = Fate("different", words)


def train_on_inputs(draft: Draft, entry: Entry) -> Fate:
    """Training on prompts; of chats Axolotl trains on contents and end tokens, not on the headers of turns."""
    if not truth(entry.value):
        return Fate("silent", reason("loss_default"))
    draft.suspect(entry.key, f"{entry.key}: the loss includes user turns")
    fate = draft.carry(entry, "data.loss_on", "all")
    datasets = draft.get("datasets", [])
    kinds = [str(rows.get("type")) for rows in datasets if isinstance(rows, Mapping)]
    if draft.method == "sft" and any(kind.startswith("chat_template") for kind in kinds):
        words = "Axolotl trains on the contents and end tokens of all turns; the recipe also on their headers"
        return Fate("different", f"{fate.words}; {words}")
    return fate


def end_tokens(draft: Draft, entry: Entry) -> Fate:
    """The end tokens that are learned."""
    if entry.value == "turn":
        return Fate("decided", reason("masking"))
    return Fate("different", f"{entry.value}: the recipe trains on the end tokens of trained turns only")


def training_field(draft: Draft, entry: Entry) -> Fate:
    """The key of a turn that says whether it is learned."""
    if entry.value in _TRAINING_FIELDS:
        words = f"{entry.value} of a turn is supported: false masks it from the loss; true trains on no other role"
        return Fate("silent", words)
    words = f"supported keys: {', '.join(_TRAINING_FIELDS)}; rename it with a function (data.format: module:function)"
    raise UnfitError(words)


def thinking(draft: Draft, entry: Entry) -> Fate:
    """The key of a turn with its reasoning, and the one that the template reads."""
    above = entry.key.rpartition(".")[0]
    section, _, index = above.removesuffix("]").partition("[")
    value = draft.get(section)
    rows = value[int(index or 0)] if isinstance(value, list) else value
    pair = {rows.get(name, "reasoning_content") for name in ("field_thinking", "template_thinking_key")}
    if len(pair) > 1:
        raise UnfitError("reasoning is read from the template's key: rename it with a function in data.format")
    return Fate("silent", f"{entry.value} of a message is passed to the chat template")


def split(draft: Draft, entry: Entry) -> Fate:
    """The split of a data set."""
    if entry.value == "train" and not entry.key.startswith("test_"):
        return Fate("silent", "train is the default")
    return carried("split", entry.value)


def to_source(draft: Draft, entry: Entry) -> Fate:
    """A field of a source by the same name."""
    return carried(entry.key.rpartition(".")[2], entry.value)


def tools(draft: Draft, entry: Entry) -> Fate:
    """The column of tools, which has its own name here."""
    if entry.value == "tools":
        return Fate("silent", "the column is named tools in tunekit too")
    return Fate("unsupported", reason("fields"))


def data_files(draft: Draft, entry: Entry) -> Fate:
    """The files of a data set."""
    files = entry.value if isinstance(entry.value, list) else [entry.value]
    if len(files) > 1:
        words = "only the first of several files is used: add a source for each, or a pattern such as data/*.jsonl"
        raise UnfitError(words)
    return carried("data.train", files[0])


def template(draft: Draft, entry: Entry) -> Fate:
    """A template by name: tunekit's where that writes the same, else the model's own is taken."""
    name = text(entry.value)
    if name.startswith("tokenizer_default"):
        return Fate("decided", reason("template"))
    if name == "jinja":
        return Fate("silent", "chat_template_jinja sets it")
    draft.suspect(entry.key, f"chat_template {name} replaces the model's own: the chat format may change")
    datasets = draft.get("datasets", [])
    kinds = [source.get("type") for source in datasets if isinstance(source, Mapping)]
    if entry.key == "chat_template" and kinds and all(str(kind).startswith("chat_template") for kind in kinds):
        fate = same_template(draft, entry, "axolotl")
        if fate is not None:
            return fate
    words = f"Axolotl formats rows with its template {name}; {reason('other_template')}"
    return Fate("different", words, "model.chat_template")


def jinja(draft: Draft, entry: Entry) -> Fate:
    """A template: a file, or its text."""
    value = text(entry.value)
    if "{" in value or "\n" in value:
        raise UnfitError("write the template to a file, and set model.chat_template to its path")
    return draft.carry(entry, "model.chat_template", value)
