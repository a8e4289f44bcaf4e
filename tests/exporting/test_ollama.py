"""Modelfiles: Ollama's template writes what the chat template of training writes, or is not there.

Ollama's templates are Go's. Here each action that we write is put into Jinja's words, one by one, and rendered so;
where Go is installed, it renders them too.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from jinja2 import Environment

from tests.data.test_families import FAMILIES, trl_template
from tests.data.tokenizers import NO_SYSTEM, byte_tokenizer
from tunekit.exporting.ollama import modelfile, parts_of

LLAMA_3 = (
    "{{ if .System }}<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{{ .System }}<|eot_id|>"
    "{{ else }}<|begin_of_text|>{{ end }}"
    '{{ range .Messages }}{{ if eq .Role "user" }}'
    "<|start_header_id|>user<|end_header_id|>\n\n{{ .Content }}<|eot_id|>"
    '{{ else if eq .Role "assistant" }}'
    "<|start_header_id|>assistant<|end_header_id|>\n\n{{ .Content }}<|eot_id|>"
    "{{ end }}{{ end }}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA_3 = (
    "<bos>{{ $system := .System }}"
    '{{ range .Messages }}{{ if eq .Role "user" }}<start_of_turn>user\n'
    '{{ if $system }}{{ $system }}\n\n{{ $system = "" }}{{ end }}{{ .Content }}<end_of_turn>\n'
    '{{ else if eq .Role "assistant" }}<start_of_turn>model\n{{ .Content }}<end_of_turn>\n'
    "{{ end }}{{ end }}<start_of_turn>model\n"
)
GOLDENS = {"Llama 3": LLAMA_3, "Gemma 3": GEMMA_3}

NOT_SHOWN = ("GPT-OSS",)
"""Families whose template does more than to put words around messages: this one tells the date."""

JINJA = {
    "range .Messages": "{% for m in messages %}",
    "if .System": "{% if system %}",
    ".System": "{{ system }}",
    "$system := .System": "{% set kept = namespace(system=system) %}",
    "if $system": "{% if kept.system %}",
    "$system": "{{ kept.system }}",
    '$system = ""': "{% set kept.system = '' %}",
    'if eq .Role "user"': "{% if m.role == 'user' %}",
    'else if eq .Role "assistant"': "{% elif m.role == 'assistant' %}",
    "else": "{% else %}",
    ".Content": "{{ m.content }}",
}

CONVERSATIONS = [
    [("user", "hi")],
    [("user", "one"), ("assistant", "two"), ("user", "three\n\nfour")],
    [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"), ("user", "日本 🙂")],
]

GO = """
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
)

type Message struct{ Role, Content string }

func main() {
	var cases []struct {
		Template, System string
		Messages         []*Message
	}
	json.NewDecoder(os.Stdin).Decode(&cases)
	texts := []string{}
	for _, c := range cases {
		var text strings.Builder
		values := map[string]any{"System": c.System, "Messages": c.Messages, "Response": ""}
		if err := template.Must(template.New("").Parse(c.Template)).Execute(&text, values); err != nil {
			panic(err)
		}
		texts = append(texts, text.String())
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
"""
"""Renders as Ollama does: https://github.com/ollama/ollama/blob/main/template/template.go, `Execute`."""


def in_jinja(template: str, system: str, messages: list[dict[str, str]]) -> str:
    """What a template of Ollama's writes."""
    ends: list[str] = []

    def put(action: str) -> str:
        if action == "end":
            return ends.pop()
        if action.startswith(("range", "if")):
            ends.append("{% endfor %}" if action.startswith("range") else "{% endif %}")
        return JINJA[action]

    pieces = re.split(r"\{\{ (.*?) \}\}", template)
    words = "".join("{% raw %}" + text + "{% endraw %}" if n % 2 == 0 else put(text) for n, text in enumerate(pieces))
    # Jinja would drop the last line's end, and a line's end behind `raw`.
    return Environment(keep_trailing_newline=True).from_string(words).render(system=system, messages=messages)


def cases():
    """Templates of Ollama's, with conversations and what training writes of them."""
    for family in FAMILIES:
        tokenizer = FAMILIES[family].tokenizer()
        parts = parts_of(tokenizer)
        if family in NOT_SHOWN:
            assert parts is None, family
            continue
        assert parts is not None, family
        for turns in CONVERSATIONS:
            for system in ("", "Be brief."):
                messages = [{"role": role, "content": content} for role, content in turns]
                given = [{"role": "system", "content": system}, *messages] if system else messages
                wanted = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
                yield parts.go(""), system, given, wanted


def test_the_template_for_ollama_writes_what_training_writes_in_every_family():
    for template, system, messages, wanted in cases():
        assert in_jinja(template, system, messages) == wanted


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed")
def test_go_itself_renders_the_templates_so(tmp_path):
    (tmp_path / "main.go").write_text(GO)
    given = [
        {"Template": template, "System": system, "Messages": messages} for template, system, messages, _ in cases()
    ]
    command = ["go", "run", str(tmp_path / "main.go")]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [wanted for *_, wanted in cases()]


@pytest.mark.parametrize("family", GOLDENS)
def test_the_template_for_ollama_is_the_one_that_a_person_would_write(family):
    assert parts_of(FAMILIES[family].tokenizer()).go("") == GOLDENS[family]


def saved(folder: Path, tokenizer, architecture="LlamaForCausalLM", *, adds_bos=False, **others) -> str:
    """The Modelfile of a folder with such a tokenizer."""
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": adds_bos}))
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "generation_config.json").write_text(json.dumps(others))
    text, notes = modelfile(folder, tokenizer, ".")
    return text + "".join(f"note: {note}\n" for note in notes)


def test_a_token_that_ollama_puts_before_a_conversation_is_not_written_twice(tmp_path):
    assert "<|begin_of_text|>" not in saved(tmp_path, FAMILIES["Llama 3"].tokenizer(), adds_bos=True)
    told = saved(tmp_path, FAMILIES["ChatML"].tokenizer(), adds_bos=True)
    assert "TEMPLATE" not in told.replace("no TEMPLATE", "") and "would add <s> before each conversation" in told


def test_an_answer_ends_at_every_token_that_ends_one(tmp_path):
    tokenizer = FAMILIES["Llama 3"].tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|end_header_id|>", "<|eot_id|>"])
    lines = saved(tmp_path, tokenizer, eos_token_id=ends).splitlines()
    assert [line for line in lines if line.startswith("PARAMETER")] == [
        'PARAMETER stop "<|end_header_id|>"',
        'PARAMETER stop "<|eot_id|>"',
    ]


@pytest.mark.parametrize(
    "template",
    [
        trl_template("llama3_2"),  # tells the date
        "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{% if m.role != 'system' %}{{ m.role }}:{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
        "{% for m in messages %}<{{ '{{' }}{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}",
        None,
    ],
    ids=["date", "counts", "system last", "braces", "none"],
)
def test_a_template_that_cannot_be_shown_right_is_left_out_with_a_note(template, tmp_path):
    text = saved(tmp_path, byte_tokenizer(template))
    assert "\nTEMPLATE" not in text and "note: Modelfile: no TEMPLATE" in text
    assert "FROM .\n" in text and 'PARAMETER stop "<|im_end|>"' in text


def test_what_ollama_cannot_do_with_a_model_is_said(tmp_path):
    assert "note: Modelfile: this chat template does not support a system prompt" in saved(
        tmp_path, byte_tokenizer(NO_SYSTEM)
    )
    told = saved(tmp_path, byte_tokenizer(NO_SYSTEM), architecture="Qwen3ForCausalLM")
    assert "note: Ollama does not import Qwen3ForCausalLM from safetensors: pass --gguf too" in told
