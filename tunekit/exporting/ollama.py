"""Ollama's recipe for an export: where the weights are, how a conversation becomes text, and where an answer ends.

Ollama renders conversations with a template of its own kind (Go's), and cannot run the Jinja template of a model. So
the Jinja template is taken apart by rendering marked conversations with it: what stands before, between and after the
messages is what the Go template has to write. Then the parts are put together again for other conversations, and only
where that gives the very text of the Jinja template is a Go template written. A template that does more than to put
words around messages (that counts them, tells the date, keeps the system prompt for the last question) fails that.
White space around a message is the exception: some templates drop it, and Ollama keeps it.

The fields of Ollama's template: https://github.com/ollama/ollama/blob/main/docs/template.mdx. It joins the system
messages to `.System`, and messages of one role that follow each other to one, before the template sees them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.packing.sequences import common_prefix_length
from tunekit.files import read_table
from tunekit.probe.chat_template import template_in_time

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODELFILE = "Modelfile"

_TABLES = Path(__file__).with_name("ollama.yaml")

Conversation = Sequence[tuple[str, str]]
"""Messages as role and content."""

PROOFS: tuple[Conversation, ...] = (
    (("user", "Hello"),),
    (("user", "What is\n\n2 + 2?"), ("assistant", "4."), ("user", "日本語 🙂 <b>?</b>")),
    (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")),
    (("user", "a"), ("assistant", "b")) * 4 + (("user", "i"),),
)
"""Conversations, without a system prompt and with one, that both ways of rendering must render alike."""

SYSTEM = ("system", "Be brief.\nBe kind.")

MARKS = ("Quux", "Corge", "Grault", "Garply", "Waldo", "Plugh")
"""Messages that stand in no template."""


@dataclass(frozen=True)
class Parts:
    """Text that a chat template writes around messages.

    Attributes:
        start: Before the first turn, where there is no system prompt.
        user: Before and after a user's message.
        assistant: Before and after an answer.
        answer: Before the answer that is to come.
        system: Before and after the system prompt; None where the template takes none.
        is_inside: Whether the system prompt stands at the beginning of the user's first message.
    """

    start: str
    user: tuple[str, str]
    assistant: tuple[str, str]
    answer: str
    system: tuple[str, str] | None
    is_inside: bool = False

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation that ends with a question; a system prompt, where there is one, comes first."""
        has_system = conversation[0][0] == "system"
        turns = conversation[1:] if has_system else conversation
        text, inside = self.start, ""
        if has_system and self.system is not None:
            prompt = self.system[0] + conversation[0][1] + self.system[1]
            text, inside = (self.start, prompt) if self.is_inside else (prompt, "")
        for role, content in turns:
            before, after = self.user if role == "user" else self.assistant
            text += before + (inside if role == "user" else "") + content + after
            inside = "" if role == "user" else inside
        return text + self.answer

    def go(self, bos: str) -> str:
        """The same as a template of Ollama's, less the token that Ollama itself puts at the beginning."""
        start, user, system = self.start.removeprefix(bos), self.user[0], self.system
        head, inside = start, ""
        if system is not None and self.is_inside:
            head = f"{start}{{{{ $system := .System }}}}"
            inside = f'{{{{ if $system }}}}{system[0]}{{{{ $system }}}}{system[1]}{{{{ $system = "" }}}}{{{{ end }}}}'
        elif system is not None:
            before = system[0].removeprefix(bos)
            otherwise = f"{{{{ else }}}}{start}" if start else ""
            head = f"{{{{ if .System }}}}{before}{{{{ .System }}}}{system[1]}{otherwise}{{{{ end }}}}"
        return (
            f'{head}{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}'
            f"{user}{inside}{{{{ .Content }}}}{self.user[1]}"
            f'{{{{ else if eq .Role "assistant" }}}}'
            f"{self.assistant[0]}{{{{ .Content }}}}{self.assistant[1]}"
            f"{{{{ end }}}}{{{{ end }}}}{self.answer}"
        )


def modelfile(folder: Path, tokenizer: "PreTrainedTokenizerBase", weights: str) -> tuple[str, list[str]]:
    """The text of a Modelfile for whole weights, and what the user should know of it.

    Args:
        folder: Where the export is.
        tokenizer: Its tokenizer.
        weights: The file or folder of the weights, from there.
    """
    template, notes = _template(folder, tokenizer, is_gguf=weights != ".")
    lines = [f"# ollama create NAME -f {MODELFILE}", f"FROM {weights}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    else:
        lines += [f"# {note}" for note in notes]
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in _stops(folder, tokenizer)]
    architecture = _read(folder / "config.json").get("architectures", [""])[0]
    if weights == "." and architecture not in read_table(_TABLES)["imported"]:
        notes.append(f"Ollama does not import {architecture} from safetensors: pass --gguf too to use it in Ollama")
    return "\n".join(lines) + "\n", notes


def _template(folder: Path, tokenizer: "PreTrainedTokenizerBase", *, is_gguf: bool) -> tuple[str | None, list[str]]:
    """The template for Ollama, or None; and what there is to say of it."""
    parts = parts_of(tokenizer)
    if parts is None:
        return None, ["Modelfile: no TEMPLATE, since this chat template could not be reproduced in Ollama"]
    bos = tokenizer.bos_token or ""
    adds_bos = _read(folder / "tokenizer_config.json").get("add_bos_token")
    adds = bool(bos) and adds_bos is True
    texts = [parts.start, *(parts.system or ())[:1]] if not parts.is_inside else [parts.start]
    if adds and not all(text.startswith(bos) for text in texts):
        return None, [f"Modelfile: no TEMPLATE, since Ollama would add {bos} before each conversation, unlike training"]
    notes = ["Modelfile: this chat template does not support a system prompt"] if parts.system is None else []
    if is_gguf and adds_bos is None and bos and texts[0].startswith(bos):
        notes.append(f"Modelfile: the GGUF file does not say if {bos} is added before a conversation; TEMPLATE adds it")
    return parts.go(bos if adds else ""), notes


def parts_of(tokenizer: "PreTrainedTokenizerBase") -> Parts | None:
    """Return the text that a tokenizer's chat template writes around messages; None where it does more than that."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or "strftime_now" in template:
        return None
    parts = _taken_apart(tokenizer)
    if parts is None:
        return None
    proofs = [*PROOFS, *((SYSTEM, *turns) for turns in PROOFS if parts.system is not None)]
    if any(_rendered(tokenizer, proof) != parts.render(proof) for proof in proofs):
        return None
    words = parts.go("")
    literal = (parts.start, *parts.user, *parts.assistant, parts.answer, *(parts.system or ()))
    # What would be an action in Go's templates, or end the text in a Modelfile.
    if '"""' in words or any("{{" in text or "}}" in text for text in literal):
        return None
    return parts


def _taken_apart(tokenizer: "PreTrainedTokenizerBase") -> Parts | None:
    roles = ("user", "assistant", "user")
    between = _between(tokenizer, list(zip(roles, MARKS, strict=False)))
    ended = _between(tokenizer, [("user", MARKS[0])], answers=False)
    if between is None or ended is None:
        return None
    first, question, answered, last = between
    after_user = (
        ended[1]
        if question.startswith(ended[1]) and last.startswith(ended[1])
        else question[: common_prefix_length(question, last)]
    )
    ended = _between(tokenizer, list(zip(roles, MARKS[:2], strict=False)), answers=False)
    before_user = first[len(first) - common_prefix_length(first[::-1], answered[::-1]) :]
    if ended is not None and answered.startswith(ended[2]) and first.endswith(answered.removeprefix(ended[2])):
        before_user = answered.removeprefix(ended[2])
    start = first[: len(first) - len(before_user)]
    parts = Parts(
        start=start,
        user=(before_user, after_user),
        assistant=(question[len(after_user) :], answered[: len(answered) - len(before_user)]),
        answer=last[len(after_user) :],
        system=None,
    )
    system = _between(tokenizer, [("system", MARKS[3]), *zip(roles, MARKS, strict=False)])
    if system is None:
        # Refused, or left out; where it stands elsewhere, Ollama could not put it there.
        asked_so = _rendered(tokenizer, [("system", MARKS[3]), ("user", MARKS[0])])
        return parts if asked_so is None or MARKS[3] not in asked_so else None
    before, after = system[0], system[1]
    if after.endswith(before_user) and before_user:
        around = (before, after[: len(after) - len(before_user)])
        return Parts(start, parts.user, parts.assistant, parts.answer, around)
    if before.startswith(first):
        around = (before[len(first) :], after)
        return Parts(start, parts.user, parts.assistant, parts.answer, around, is_inside=True)
    return None


def _between(tokenizer: "PreTrainedTokenizerBase", turns: Conversation, *, answers: bool = True) -> list[str] | None:
    """Return the text before, between and after messages; None where a template does not render each once, in order."""
    text = _rendered(tokenizer, turns, answers=answers)
    separators = []
    for _, content in turns:
        if text is None or text.count(content) != 1:
            return None
        before, _, text = text.partition(content)
        separators.append(before)
    return None if text is None else [*separators, text]


def _rendered(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, *, answers: bool = True) -> str | None:
    """A conversation by the Jinja template; None where that refuses it."""
    from jinja2 import TemplateError

    messages = [{"role": role, "content": content} for role, content in conversation]
    try:
        with template_in_time("a conversation"):
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answers)
    except TemplateError:
        return None
    return text


def _stops(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """The tokens that end an answer."""
    ids = _read(folder / "generation_config.json").get("eos_token_id", tokenizer.eos_token_id)
    for number in dict.fromkeys([*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]):
        if number is not None:
            yield str(tokenizer.convert_ids_to_tokens(number))


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content
