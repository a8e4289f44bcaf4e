"""Where a recipe trains otherwise than the configuration that it came from, the report says so and how."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunekit.display.migration import migration_parts
from tunekit.errors import RecipeError
from tunekit.migration.migration import migrate
from tunekit.migration.report import Migration

AXOLOTL = {"base_model": "Qwen/Qwen3-4B", "sequence_len": 512, "micro_batch_size": 1, "adapter": "lora"}
LLAMA_FACTORY = {"model_name_or_path": "Qwen/Qwen3-4B", "stage": "sft", "finetuning_type": "lora", "cutoff_len": 512}
SWIFT = {"model": "Qwen/Qwen3-4B", "train_type": "lora", "dataset": "chats.jsonl", "max_length": 512, "use_hf": True}
TRL = {"model_name_or_path": "Qwen/Qwen3-4B", "dataset_name": "me/chats", "max_length": 512, "use_peft": True}
TORCHTUNE = {
    "tokenizer": {"_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer", "max_seq_len": 512},
    "model": {"_component_": "torchtune.models.qwen2_5.lora_qwen2_5_3b"},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer"},
    "batch_size": 1,
}
OWN = "the recipe uses the model's own chat template, which may format rows differently"
CHAT = {"path": "chats.jsonl", "type": "chat_template"}


def made(config: dict[str, Any], **more: Any) -> Migration:
    Path("config.yaml").write_text(json.dumps(config | more))
    return migrate("config.yaml", tool="trl" if config is TRL else None)


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


DIFFERENT = [
    (AXOLOTL, {"datasets": [{"path": "a.jsonl", "type": "alpaca"}]}, "datasets[0].type", "### Instruction"),
    (
        AXOLOTL,
        {"datasets": [CHAT]},
        "excess_length_strategy",
        "drops rows longer than data.max_length by default",
    ),
    (
        AXOLOTL,
        {"datasets": [CHAT], "excess_length_strategy": "drop"},
        "excess_length_strategy",
        "are dropped in Axolotl",
    ),
    (AXOLOTL, {"datasets": [CHAT], "chat_template": "chatml"}, "chat_template", f"template chatml; {OWN}"),
    (AXOLOTL, {"datasets": [{**CHAT, "chat_template": "gemma"}]}, "datasets[0].chat_template", f"gemma; {OWN}"),
    (
        AXOLOTL,
        {"datasets": [CHAT], "special_tokens": {"cls_token": "<end>"}},
        "special_tokens.cls_token",
        "the tokenizer's own special tokens are used",
    ),
    (
        AXOLOTL,
        {"datasets": [{**CHAT, "train_on_eos": "all"}]},
        "datasets[0].train_on_eos",
        "end tokens of trained turns only",
    ),
    (AXOLOTL, {"pretraining_dataset": "me/web", "max_steps": 9}, "streaming", "Axolotl streams pretraining_dataset"),
    (
        AXOLOTL,
        {"rl": "dpo", "datasets": [{"path": "pairs.jsonl", "type": "chatml.intel"}]},
        "datasets[0].type",
        "data.columns: {'prompt': 'question'}; Axolotl formats prompts as turns of chatml's template",
    ),
    (LLAMA_FACTORY, {"dataset": "chats", "template": "qwen"}, "template", f"with its template qwen; {OWN}"),
    (LLAMA_FACTORY, {"dataset": "chats"}, "cutoff_len", "truncates all turns of a row longer than cutoff_len"),
    (SWIFT, {}, "truncation_strategy", "ms-swift drops rows longer than data.max_length by default"),
    (
        SWIFT,
        {"truncation_strategy": "left"},
        "truncation_strategy",
        "are 'left' in ms-swift; tunekit truncates them at",
    ),
    (SWIFT, {"template": "qwen2_5"}, "template", f"with its template qwen2_5; {OWN}"),
    (SWIFT, {"use_chat_template": False}, "use_chat_template", "formats rows as plain text"),
    (SWIFT, {"loss_scale": "default+ignore_empty_think"}, "loss_scale", "tunekit does not"),
    (
        TORCHTUNE,
        {"dataset": {"_component_": "torchtune.datasets.alpaca_dataset"}},
        "dataset._component_",
        "into the user turn",
    ),
    (TRL, {}, "assistant_only_loss", "TRL trains on every token of a chat"),
    (TRL, {"eos_token": "<end>"}, "eos_token", "tokenizer's own end token"),
]


@pytest.mark.parametrize(("config", "more", "key", "words"), DIFFERENT)
def test_another_training_is_reported_as_different_and_how(config, more, key, words) -> None:
    (found,) = [line for line in made(config, **more).different if line.key == key]
    assert found.kind == "different"
    assert words in found.words


SAME = [
    (AXOLOTL, {"datasets": [CHAT], "excess_length_strategy": "truncate"}),
    (AXOLOTL, {"datasets": [{"path": "a.jsonl", "type": "completion"}]}),
    (
        AXOLOTL,
        {
            "datasets": [{**CHAT, "train_on_eos": "turn"}],
            "excess_length_strategy": "truncate",
            "chat_template": "tokenizer_default",
            "special_tokens": {"pad_token": "<pad>"},
        },
    ),
    (SWIFT, {"truncation_strategy": "right", "use_chat_template": True}),
    (TRL, {"assistant_only_loss": True, "pad_token": "<pad>"}),
    (TORCHTUNE, {"dataset": {"_component_": "torchtune.datasets.chat_dataset", "source": "me/chats"}}),
]


@pytest.mark.parametrize(("config", "more"), SAME)
def test_what_is_trained_alike_is_not_different(config, more) -> None:
    assert made(config, **more).different == ()


@pytest.mark.parametrize(
    ("size", "share", "words"),
    [
        (0.1, 0.1, ""),
        (1, None, "1 rows: tunekit holds out a fraction"),
        (200, None, "200 rows: tunekit holds out a fraction"),
    ],
)
def test_a_share_of_the_rows_is_held_out_and_a_number_of_them_is_named(size, share, words) -> None:
    report = made(AXOLOTL, datasets=[CHAT], val_set_size=size)
    (line,) = [line for line in report.lines if line.key == "val_set_size"]
    assert line.kind == ("carried" if share else "unsupported") and words in line.words
    assert report.recipe.data.eval_size == share


def test_the_report_counts_and_shows_what_is_different_and_json_has_it() -> None:
    report = made(AXOLOTL, datasets=[{"path": "a.jsonl", "type": "alpaca"}])
    console = Console(width=300, record=True)
    console.print(*migration_parts(report), sep="\n")
    shown = console.export_text()
    assert "2 different, 0 unsupported" in shown
    section = shown.partition("different  the recipe behaves differently here")[2].partition("\n\n")[0]
    assert "datasets[0].type: alpaca" in section and "excess_length_strategy: drop" in section
    as_json = report.to_dict()
    assert [line["key"] for line in as_json["keys"] if line["kind"] == "different"] == ["datasets[0].type"]
    assert [(line["key"], line["line"]) for line in as_json["unsaid"]] == [("excess_length_strategy", 0)]


AUDIO = [
    (SWIFT, {"model": "Qwen/Qwen3-TTS-12Hz-1.7B-Base"}),
    (SWIFT, {"model": "Qwen/Qwen2.5-Omni-7B"}),
    (AXOLOTL, {"datasets": [CHAT], "base_model": "mistralai/Voxtral-Mini-3B-2507"}),
    (TRL, {"model_name_or_path": "openai/whisper-large-v3"}),
]


@pytest.mark.parametrize(("config", "more"), AUDIO)
def test_no_recipe_of_text_is_made_of_a_configuration_of_audio(config, more) -> None:
    with pytest.raises(RecipeError, match="processes audio, which is not migrated") as caught:
        made(config, **more)
    assert str(caught.value).startswith("config.yaml:1: the model ")


@pytest.mark.parametrize("column", ["videos", "audios"])
def test_a_data_set_with_video_or_audio_is_refused(column) -> None:
    info = {"cats": {"file_name": "cats.json", "columns": {"messages": "messages", "images": "images", column: column}}}
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(RecipeError, match=rf"the dataset cats\.json has {column}, which is not migrated"):
        made(LLAMA_FACTORY, dataset="cats")


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen3-4B", "allenai/OLMo-2-0425-1B", "microsoft/phi-4", "google/gemma-3-4b-it", "01-ai/Yi-1.5-6B"]
)
def test_models_of_text_and_gemma_3_are_not_taken_for_models_of_images(model) -> None:
    assert made(AXOLOTL, datasets=[CHAT], base_model=model).recipe.model.path == model


def test_alpaca_rows_of_llama_factory_are_joined_otherwise() -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps({"asks": {"file_name": "asks.json"}}))
    words = [line.words for line in made(LLAMA_FACTORY, dataset="asks").different if line.key == "dataset"]
    assert words == ["LLaMA-Factory joins instruction and input with a line break; tunekit with a blank line"]


@pytest.mark.parametrize(("field", "kind"), [("train", "silent"), ("training", "silent"), ("learn", "unsupported")])
def test_the_key_that_marks_turns_is_read_from_the_rows_or_named(field, kind) -> None:
    report = made(AXOLOTL, datasets=[{**CHAT, "message_field_training": field}])
    assert [line.kind for line in report.lines if line.key == "datasets[0].message_field_training"] == [kind]


def test_tokens_and_scaled_embeddings_come_along():
    """By each tool's own keys: a list, a text with commas, and a kind whose factor follows from the length."""
    axolotl = {
        "datasets": [CHAT],
        "tokens": ["<a>", "<b>"],
        "special_tokens": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<c>"]},
        "overrides_of_model_config": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    }
    model = made(AXOLOTL, **axolotl).recipe.model
    assert (model.add_tokens, model.add_special_tokens) == (["<a>", "<b>"], ["<c>"])
    assert model.special_tokens.eos_token == "<|im_end|>"
    assert (model.rope_scaling.rope_type, model.rope_scaling.factor) == ("yarn", 4)
    factory = {
        "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
        "stage": "sft",
        "dataset": "rows",
        "cutoff_len": 65536,
        "add_tokens": "<a>,<b>",
        "new_special_tokens": "<c>",
        "resize_vocab": True,
        "rope_scaling": "yarn",
    }
    Path("factory.yaml").write_text(json.dumps(factory))
    model = migrate("factory.yaml").recipe.model
    assert (model.add_tokens, model.add_special_tokens) == (["<a>", "<b>"], ["<c>"])
    # 65,536 tokens by the 32,768 positions of Qwen 2.5 Instruct.
    assert (model.rope_scaling.rope_type, model.rope_scaling.factor) == ("yarn", 2)


def test_scaling_that_depends_on_earlier_rows_is_named():
    config = {"datasets": [CHAT], "overrides_of_model_config": {"rope_scaling": {"type": "dynamic", "factor": 2.0}}}
    lines = {line.key: line for line in made(AXOLOTL, **config).of_kind("unsupported")}
    assert "depend on the rows seen before" in lines["overrides_of_model_config.rope_scaling.type"].words
