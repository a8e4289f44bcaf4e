"""Chat templates by name: what is trained with each, and that it ends where generation stops."""

import pytest
import yaml

from tests.data import test_families as families
from tests.data.chat_templates import GOLDEN, recorded, tokenizer_for, trained_text
from tunekit.recipe.chat_templates import named_templates

TEMPLATES = named_templates()
RECORDED = yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))
RENDERED = {
    name: [text for text in texts.values() if not text.startswith("refused")] for name, texts in RECORDED.items()
}

BY_HAND = {
    "chatml": "ChatML",
    "llama2": "Llama 2",
    "llama3": "Llama 3",
    "llama3_1": "Llama 3.1",
    "mistral_v7_tekken": "Mistral",
    "qwen2_5": "Qwen 2.5",
    "qwen3": "Qwen 3",
    "gemma3": "Gemma 3",
    "phi3": "Phi-3",
    "phi4": "Phi-4",
    "deepseekv3": "DeepSeek V3",
    "zephyr": "Zephyr",
    "cohere": "Command R",
    "granite3_0": "Granite 3",
    "tulu3": "Tulu 3",
}
"""Families of which renderings were worked out by hand."""


def test_all_templates_are_recorded_and_no_others():
    assert list(RECORDED) == list(TEMPLATES)
    assert len(TEMPLATES) >= 25


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_trained_with_a_template_is_as_recorded(name):
    assert recorded(TEMPLATES[name]) == RECORDED[name]


@pytest.mark.parametrize(("name", "family"), BY_HAND.items())
def test_a_template_writes_and_trains_what_was_worked_out_by_hand(name, family):
    tokenizer = families.FAMILIES[family].tokenizer()
    tokenizer.chat_template = TEMPLATES[name].text()
    golden = next(text for known, row, text in families.GOLDENS if known == family and row is families.TWO_TURNS)
    # Tulu's published template writes no line break behind the last answer.
    assert trained_text(families.TWO_TURNS, tokenizer).rstrip("\n") == golden.rstrip("\n")


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_end_with_the_end_token_that_the_tokenizer_gets(name):
    end = tokenizer_for(TEMPLATES[name]).eos_token
    assert end == (TEMPLATES[name].end or "</s>")
    assert RENDERED[name]
    for text in RENDERED[name]:
        assert text[text.rindex("⟦") : text.rindex("⟧")].rstrip().endswith(end)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_each_token_that_it_is_said_to_write(name):
    assert [token for token in TEMPLATES[name].markers if token not in "".join(RENDERED[name])] == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_calls_of_tools_if_it_is_said_to(name):
    text = RECORDED[name]["a call of a tool"]
    assert text.startswith("refused") != TEMPLATES[name].tools
    if TEMPLATES[name].tools:
        assert "add" in text.split("⟦")[1].split("⟧")[0]


def test_a_system_message_is_written_or_the_row_refused():
    without = {name for name, texts in RECORDED.items() if texts["two turns"].startswith("refused")}
    # Gemma has none; Mistral's third format has it before the last question, where earlier answers did not follow it.
    assert without == {"gemma", "mistral_v3", "mistral_v3_tekken"}
    for name in RECORDED.keys() - without:
        assert "be" in RECORDED[name]["two turns"].partition("⟦")[0]
