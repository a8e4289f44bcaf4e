"""Chat templates that recipes take by name: the table, what is refused, and which fit a tokenizer."""

import re
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

import tunekit
from tunekit import frontend
from tunekit.errors import DependencyError, RecipeError
from tunekit.recipe import chat_templates
from tunekit.recipe.chat_templates import NamedTemplate, fitting, named_template, named_templates


def recipe(**model):
    return tunekit.load_recipe({"model": {"path": "pico", **model}, "data": {"train": "rows.jsonl"}})


@pytest.mark.parametrize("name", named_templates())
def test_a_template_has_a_source_and_is_jinja(name):
    template = named_templates()[name]
    assert template.source.startswith("https://")
    assert (template.trl is None) != (template.template == "")
    # Programs that read a saved model know no markers of transformers.
    assert "generation %}" not in template.template
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    environment.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template.text()))
    assert recipe(chat_template=name).model.chat_template == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("chatlm", "'chatlm' is neither a known chat template nor a file HERE; did you mean chatml?"),
        ("Qwen2.5", "'Qwen2.5' is neither a known chat template nor a file HERE; did you mean qwen2_5, qwen3?"),
        ("gpt-oss", "'gpt-oss' is neither a known chat template nor a file HERE; did you mean gptoss?"),
        (
            "xyz",
            "'xyz' is neither a known chat template nor a file HERE; set it to a Jinja file, or to one of chatml,",
        ),
    ],
)
def test_a_name_that_is_no_template_is_refused_with_those_like_it(name, words):
    with pytest.raises(RecipeError) as error:
        recipe(chat_template=name)
    assert words.replace("HERE", f"in {Path.cwd()} or the recipe's folder") in str(error.value)


def test_a_file_is_told_from_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chatml").write_text("mine", encoding="utf-8")
    Path("mine").write_text("mine", encoding="utf-8")
    assert named_template(recipe(chat_template="chatml").model.chat_template) is not None
    assert chat_templates.is_unknown("x" * 1000)
    for path in ("./chatml", "mine", "not-there.jinja", "not/there"):
        assert named_template(recipe(chat_template=path).model.chat_template) is None
    assert ("model.chat_template", "mine") in frontend.named_paths(recipe(chat_template="mine"))
    assert "model.chat_template" not in dict(frontend.named_paths(recipe(chat_template="chatml")))


def test_another_end_token_than_the_templates_is_refused():
    assert recipe(chat_template="chatml", special_tokens={"eos_token": "<|im_end|>"})
    assert recipe(chat_template="zephyr", special_tokens={"eos_token": "<end>"})
    words = "model.special_tokens.eos_token: </s> never ends an answer: chat_template chatml ends them with <|im_end|>"
    with pytest.raises(RecipeError, match=re.escape(words)):
        recipe(chat_template="chatml", special_tokens={"eos_token": "</s>"})


def test_templates_fit_a_tokenizer_that_has_all_their_tokens():
    assert fitting({"<|im_start|>", "<|im_end|>"})[:2] == ["chatml", "qwen2_5"]
    assert fitting({"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}) == ["llama3", "llama3_1", "llama3_2"]
    assert fitting({"[INST]", "[/INST]", "</s>"}) == ["mistral_v3", "mistral_v3_tekken"]
    assert fitting({"<|im_start|>", "a", "b"}) == []


def test_a_template_that_the_installed_trl_lacks_is_an_error():
    missing = NamedTemplate("new", "https://example.org", trl="of_tomorrow")
    with pytest.raises(DependencyError, match="the installed TRL has no template of_tomorrow"):
        missing.text()
    assert chat_templates.named_template(None) is None
