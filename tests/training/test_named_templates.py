"""Runs with a chat template by its name: what they train on, where the trained model stops, and what they keep."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import tunekit
from tests.on_demand import OnDemand
from tests.tiny import make_tokenizer, save_chats, save_tiny_model
from tests.training.test_resume import whole_and_resumed
from tunekit.api import verbs
from tunekit.data.prepare import read_dataset
from tunekit.errors import ModelError
from tunekit.recipe.chat_templates import NamedTemplate, named_templates
from tunekit.runs import fingerprints

CHATML = {"chat_template": "chatml", "add_special_tokens": ["<|im_start|>", "<|im_end|>"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base model: no chat template, and no tokens of one."""
    folder = tmp_path_factory.mktemp("base")
    save_tiny_model(folder / "model", hidden=64)
    for file in (folder / "model").glob("*token*"):
        file.unlink()
    (folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
    backend = make_tokenizer().backend_tokenizer
    content = json.loads(backend.to_str())
    content["added_tokens"] = []
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=type(backend).from_str(json.dumps(content)), eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, values in (("config", config), ("generation_config", {"eos_token_id": tokenizer.eos_token_id})):
        (folder / "model" / f"{name}.json").write_text(json.dumps(values))
    save_chats(folder / "rows.jsonl", ((f"double {n}", "it is done") for n in range(16)))
    return folder


def recipe_in(folder, name, model=CHATML, **others):
    return {
        "model": {"path": str(folder / "model"), **model},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "train": {"max_steps": 60, "learning_rate": 1e-2, "global_batch_size": 8},
        "output": {"dir": str(folder / "runs" / name), "sample_prompts": []},
        **others,
    }


@pytest.fixture(scope="module")
def runs(folder):
    return OnDemand(lambda kind: tunekit.train(recipe_in(folder, kind, adapter=kind)))


def answer_of(model_folder, num_tokens=40):
    """Return what transformers generates by the files of a folder alone, and the last token of it."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    question = [{"role": "user", "content": "double 3"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**ids, max_new_tokens=num_tokens, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(output, skip_special_tokens=True), tokenizer.convert_ids_to_tokens(int(output[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_base_model_learns_a_named_template_and_stops_at_its_end(kind, folder, runs, tmp_path):
    run = runs[kind]
    text = (run.model_path / "chat_template.jinja").read_text(encoding="utf-8")
    assert text == named_templates()["chatml"].template
    tokenizer = AutoTokenizer.from_pretrained(run.model_path)
    assert tokenizer.eos_token == "<|im_end|>"
    ids = read_dataset(run.path / "data" / "train.arrow")[0]["input_ids"]
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\ndouble 0<|im_end|>\n<|im_start|>assistant\nit is done<|im_end|>\n"
    )
    saved = run.model_path if kind == "full" else tunekit.export(run, tmp_path / "merged").folder
    ends = json.loads((tmp_path / "merged" / "generation_config.json").read_text()) if kind == "lora" else None
    ends = ends or json.loads((run.model_path / "generation_config.json").read_text())
    assert tokenizer.eos_token_id in ends["eos_token_id"]
    assert AutoTokenizer.from_pretrained(folder / "model").eos_token_id in ends["eos_token_id"]
    assert answer_of(saved) == ("it is done", "<|im_end|>")
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("double 3\n", encoding="utf-8")
    tunekit.generate(run, prompts, out, max_new_tokens=40, device="cpu", dtype="float32")
    answer = json.loads(out.read_text())
    assert (answer["answer"], answer["num_tokens"]) == ("it is done", len("it is done") + 1)


@pytest.mark.slow
def test_a_base_without_a_template_is_compared_by_that_of_the_run(folder, runs):
    result = tunekit.evaluate(runs["lora"], data=str(folder / "rows.jsonl"), device="cpu", dtype="float32")
    (loss,) = [score for score in result.scores if score.name == "loss"]
    assert loss.after.value < 1 < 5 < loss.before.value


@pytest.mark.slow
def test_a_run_that_continues_has_the_template_and_the_end_of_the_first(folder, runs):
    recipe = recipe_in(folder, "second", {}, adapter="lora")
    recipe |= {"model": str(runs["lora"].path), "train": {**recipe["train"], "max_steps": 1}}
    second = tunekit.train(recipe)
    assert AutoTokenizer.from_pretrained(second.model_path).eos_token == "<|im_end|>"
    ids = [read_dataset(run.path / "data" / "train.arrow")[0]["input_ids"] for run in (runs["lora"], second)]
    assert ids[0] == ids[1]


@pytest.mark.slow
def test_a_run_with_a_named_template_resumes_exactly(folder, tmp_path):
    recipe = recipe_in(folder, "x", adapter="lora")
    recipe["train"] = {"max_steps": 6, "save_steps": 2, "global_batch_size": 8}
    runs = whole_and_resumed(recipe, tmp_path)
    weights = [load_file(run.model_path / "adapter_model.safetensors") for run in runs]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_a_run_keeps_the_name_and_compares_its_text_before_it_resumes(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chatml").write_text("a file of that name", encoding="utf-8")
    run = verbs.make_run({**recipe_in(folder, "x"), "output": {"dir": str(tmp_path / "run"), "sample_prompts": []}})
    assert run.recipe.model.chat_template == "chatml"
    assert fingerprints.changes(run, run.recipe) == []
    monkeypatch.setattr(NamedTemplate, "text", lambda self: "another text")
    assert fingerprints.changes(run, run.recipe) == [
        "chat template: chatml has another text in this version of tunekit or TRL"
    ]


@pytest.mark.parametrize("call", [verbs.plan, verbs.check, verbs.train], ids=["plan", "check", "train"])
def test_a_template_whose_end_the_tokenizer_lacks_is_refused_with_the_tokens_to_add(call, folder):
    words = (
        "model.chat_template: chatml ends answers with <|im_end|>, which the tokenizer of "
        f"'{folder / 'model'}' lacks: a trained model would never stop; "
        "set model.add_special_tokens=[<|im_start|>, <|im_end|>]"
    )
    with pytest.raises(ModelError, match=re.escape(words)):
        call(recipe_in(folder, "refused", {"chat_template": "chatml"}))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (CHATML, "answers end with <|im_end|>, the end token in place of </s>"),
        ({"chat_template": "zephyr"}, "answers end with </s>, the tokenizer's end token"),
        (
            {"chat_template": "chatml", "special_tokens": {"eos_token": "<|im_end|>"}},
            "answers end with <|im_end|>, the end token in place of </s>; <|im_start|> read as ordinary text, "
            "unless model.add_special_tokens=[<|im_start|>]",
        ),
    ],
)
def test_the_plan_says_how_answers_end_and_which_tokens_are_ordinary_text(model, why, folder):
    plan = verbs.plan(recipe_in(folder, "planned", model))
    (reason,) = [reason for reason in plan.reasons if reason.topic == "chat template"]
    assert (reason.choice, reason.why) == (model["chat_template"], why)


@pytest.mark.parametrize("call", [verbs.plan, verbs.check, verbs.train], ids=["plan", "check", "train"])
@pytest.mark.parametrize(
    ("tokens", "remedy"),
    [
        (None, "set model.chat_template=chatml and model.add_special_tokens=[<|im_start|>, <|im_end|>], set it"),
        (["[INST]", "[/INST]"], "one that its tokens fit, such as mistral_v3, mistral_v3_tekken, set it"),
        (["<|im_start|>", "<|im_end|>"], "one that its tokens fit, such as chatml, qwen2_5, "),
    ],
)
def test_without_a_template_those_that_fit_the_tokenizer_are_named(tokens, remedy, call, folder):
    from tunekit.errors import DataError

    with pytest.raises(DataError, match=re.escape(remedy)):
        call(recipe_in(folder, "refused", {} if tokens is None else {"add_special_tokens": tokens}))
