"""Where a recipe trains otherwise than the configuration that it came from, the report says so and how."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunekit.display.migration import migration_parts
from tunekit.errors import RecipeError
from tunekit.migration.migration import migrate
from tunekit.migration.report import Migration
from tunekit.migration.table import tool_table
from tunekit.recipe.chat_templates import named_templates

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
AFTER = "writes after the end token of an answer, and counts it where it truncates turns; the recipe does not"
CHAT = {"path": "chats.jsonl", "type": "chat_template"}


def made(config: dict[str, Any], **more: Any) -> Migration:
    Path("config.yaml").write_text(json.dumps(config | more))
    return migrate("config.yaml", tool="trl" if config is TRL else None)


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


DIFFERENT = [
    (
        AXOLOTL,
        {"datasets": [{"path": "a.jsonl", "type": "alpaca_chat.load_qa"}]},
        "datasets[0].type",
        "Axolotl writes prompts of alpaca_chat.load_qa",
    ),
    (
        AXOLOTL,
        {"datasets": [{"path": "a.jsonl", "type": "alpaca"}], "base_model": "mistralai/Mistral-7B-v0.1"},
        "datasets",
        "so this tokenizer starts them with a space",
    ),
    (
        AXOLOTL,
        {"datasets": [{"path": "a.jsonl", "type": "chat_template.default"}], "rl": "dpo"},
        "excess_length_strategy",
        "drops rows longer than data.max_length by default",
    ),
    (
        AXOLOTL,
        {"datasets": [{"path": "a.jsonl", "type": "chat_template.default"}], "rl": "dpo"},
        "datasets[0].type",
        "Axolotl strips line breaks that a template, such as ChatML, writes after an answer",
    ),
    (AXOLOTL, {"datasets": [CHAT], "chat_template": "phi_4"}, "chat_template", f"template phi_4; {OWN}"),
    (
        AXOLOTL,
        {"datasets": [{"path": "a.jsonl", "type": "completion"}], "chat_template": "chatml"},
        "chat_template",
        f"template chatml; {OWN}",
    ),
    (
        AXOLOTL,
        {"datasets": [CHAT], "chat_template": "chatml", "special_tokens": {"eos_token": "</s>"}},
        "chat_template",
        f"template chatml; {OWN}",
    ),
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
    (
        AXOLOTL,
        {"datasets": [{"path": "a.jsonl", "type": "completion"}]},
        "datasets",
        "which begins with the next token in Axolotl, and with the last one again in tunekit",
    ),
    (
        AXOLOTL,
        {"datasets": [CHAT], "train_on_inputs": True},
        "train_on_inputs",
        "data.loss_on: all; Axolotl trains on the contents and end tokens of all turns",
    ),
    (
        AXOLOTL,
        {"datasets": [{**CHAT, "roles_to_train": [], "message_field_training": "train"}]},
        "datasets[0].roles_to_train",
        "the recipe also on assistant turns without a mark",
    ),
    (
        AXOLOTL,
        {"datasets": [CHAT], "adapter": None, "bf16": "full", "optimizer": "ao_adamw_4bit"},
        "optimizer",
        "rounds bfloat16 weights to the nearest, tunekit rounds bfloat16 weights stochastically",
    ),
    (
        TORCHTUNE,
        {
            "dtype": "bf16",
            "model": {"_component_": "torchtune.models.qwen2_5.qwen2_5_3b"},
            "optimizer": {"_component_": "torchao.optim.AdamW4bit"},
            "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
        },
        "optimizer._component_",
        "rounds bfloat16 weights to the nearest",
    ),
    (AXOLOTL, {"pretraining_dataset": "me/web"}, "streaming", "Axolotl streams pretraining_dataset"),
    (
        AXOLOTL,
        {"rl": "dpo", "datasets": [{"path": "pairs.jsonl", "type": "chatml.intel"}]},
        "datasets[0].type",
        "data.columns: {'prompt': 'question'}; Axolotl formats prompts as turns of chatml's template",
    ),
    (LLAMA_FACTORY, {"dataset": "chats", "template": "glm4"}, "template", f"with its template glm4; {OWN}"),
    (
        LLAMA_FACTORY,
        {"dataset": "chats", "stage": "pt", "template": "qwen"},
        "template",
        f"with its template qwen; {OWN}",
    ),
    (
        LLAMA_FACTORY,
        {"dataset": "chats", "mask_history": True},
        "cutoff_len",
        "truncates all turns of a row longer than cutoff_len",
    ),
    (SWIFT, {"rlhf_type": "dpo"}, "truncation_strategy", "ms-swift drops rows longer than data.max_length by default"),
    (SWIFT, {"dataset": "swift/self-cognition:qwen3"}, "dataset", "empty thinking tags"),
    (SWIFT, {"dataset": "swift/self-cognition", "model_name": ["小明", "Ada"]}, "model_name", "in Chinese rows"),
    (
        SWIFT,
        {"truncation_strategy": "left"},
        "truncation_strategy",
        "are 'left' in ms-swift; tunekit truncates them at",
    ),
    (SWIFT, {"template": "qwen3"}, "template", f"with its template qwen3; {OWN}"),
    (
        SWIFT,
        {"template": "qwen2_5", "use_chat_template": False},
        "template",
        f"with its template qwen2_5; {OWN}",
    ),
    (SWIFT, {"use_chat_template": False}, "use_chat_template", "formats rows as plain text"),
    (SWIFT, {"loss_scale": "default+ignore_empty_think"}, "loss_scale", "tunekit does not"),
    (
        TORCHTUNE,
        {"dataset": {"_component_": "torchtune.datasets.alpaca_dataset"}},
        "tokenizer.prompt_template",
        "torchtune formats turns with its tokenizer qwen2_5_tokenizer",
    ),
    (TRL, {}, "assistant_only_loss", "TRL trains on every token of a chat"),
]


@pytest.mark.parametrize(("config", "more", "key", "words"), DIFFERENT)
def test_another_training_is_reported_as_different_and_how(config, more, key, words) -> None:
    (found,) = [line for line in made(config, **more).different if line.key == key]
    assert found.kind == "different"
    assert words in found.words


TEMPLATES = [
    (AXOLOTL, {"datasets": [CHAT], "chat_template": "chatml"}, "chat_template", "chatml"),
    (AXOLOTL, {"datasets": [CHAT], "chat_template": "mistral_v2v3"}, "chat_template", "mistral_v3"),
    (LLAMA_FACTORY, {"dataset": "chats", "template": "qwen3_nothink"}, "template", "qwen3_instruct_2507"),
    (LLAMA_FACTORY, {"dataset": "chats", "template": "yi"}, "template", "chatml"),
    (SWIFT, {"template": "qwen2_5"}, "template", "qwen2_5"),
]


@pytest.mark.parametrize(("config", "more", "key", "name"), TEMPLATES)
def test_a_template_that_writes_the_same_is_carried_over_by_its_name(config, more, key, name) -> None:
    report = made(config, **more)
    (line,) = [line for line in report.lines if line.key == key]
    assert (line.kind, line.words) == ("carried", f"model.chat_template: {name}")
    assert report.recipe.model.chat_template == name


@pytest.mark.parametrize("tool", ["axolotl", "llama-factory", "ms-swift"])
def test_templates_are_carried_over_to_names_that_recipes_take(tool) -> None:
    assert set(tool_table(tool).words["same_templates"].values()) <= set(named_templates())


SAME = [
    (AXOLOTL, {"datasets": [CHAT], "excess_length_strategy": "truncate"}),
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
    (TORCHTUNE, {"dataset": {"_component_": "torchtune.datasets.text_completion_dataset", "source": "me/texts"}}),
    (AXOLOTL, {"datasets": [{"path": "a.jsonl", "type": "alpaca"}]}),
    (AXOLOTL, {"datasets": [{"path": "a.jsonl", "type": "alpaca"}], "train_on_inputs": True}),
    (AXOLOTL, {"pretraining_dataset": "me/web", "max_steps": 9}),
    (SWIFT, {}),
    (SWIFT, {"truncation_strategy": "delete"}),
    (LLAMA_FACTORY, {"dataset": "chats"}),
]


def test_llama_3_writes_nothing_after_an_answer_that_axolotl_strips() -> None:
    pairs = {"datasets": [{"path": "a.jsonl", "type": "chat_template.default"}], "rl": "dpo"}
    report = made(AXOLOTL, **pairs, chat_template="llama3")
    assert [line.key for line in report.different] == ["excess_length_strategy"]


@pytest.mark.parametrize("name", ["chatml", "qwen", "llama3"])
def test_a_newline_that_llama_factory_trains_on_is_in_the_report(name) -> None:
    report = made(LLAMA_FACTORY, dataset="chats", template=name)
    words = [line.words for line in report.different if line.key == "train_on_prompt"]
    assert words == ([] if name == "llama3" else [f"LLaMA-Factory also trains on the newline that {name} {AFTER}"])


def test_kto_rows_that_are_whole_chats_are_named() -> None:
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "kto_tag": "label"}
    info = {"rated": {"file_name": "rated.json", "formatting": "sharegpt", "columns": columns, "tags": tags}}
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(info))
    report = made({**LLAMA_FACTORY, "stage": "kto", "dataset": "rated"})
    assert any("KTO does not read whole chats" in each.words for each in report.suspicious)


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
    report = made(SWIFT, rlhf_type="dpo", template="qwen")
    console = Console(width=300, record=True)
    console.print(*migration_parts(report), sep="\n")
    shown = console.export_text()
    assert "2 different, 0 unsupported" in shown
    section = shown.partition("different  the recipe behaves differently here")[2].partition("\n\n")[0]
    assert "template: qwen" in section and "truncation_strategy: delete" in section
    as_json = report.to_dict()
    assert [line["remedy"] for line in as_json["keys"] if line["kind"] == "different"] == ["model.chat_template"]
    assert [(line["key"], line["line"]) for line in as_json["unsaid"]] == [("truncation_strategy", 0)]


def test_a_configuration_is_the_same_where_a_field_makes_the_same_of_all_that_differs() -> None:
    report = made(AXOLOTL, datasets=[CHAT], chat_template="phi_4")
    assert report.is_whole and report.is_same and report.different
    assert not made(AXOLOTL, datasets=[CHAT], special_tokens={"cls_token": "<c>"}).is_same
    assert not made(AXOLOTL, datasets=[CHAT], qat={"weight_dtype": "int4"}).is_same


AUDIO = [
    (SWIFT, {"model": "Qwen/Qwen3-TTS-12Hz-1.7B-Base"}),
    (SWIFT, {"model": "Qwen/Qwen3-Omni-30B-A3B-Instruct"}),
    (AXOLOTL, {"datasets": [CHAT], "base_model": "mistralai/Voxtral-Mini-4B-Realtime-2602"}),
    (TRL, {"model_name_or_path": "openai/whisper-large-v3"}),
]


@pytest.mark.parametrize(("config", "more"), AUDIO)
def test_no_recipe_of_text_is_made_of_a_configuration_of_audio(config, more) -> None:
    with pytest.raises(RecipeError, match="processes audio, which is not migrated") as caught:
        made(config, **more)
    assert str(caught.value).startswith("config.yaml:1: the model ")


VOXTRAL = {
    "base_model": "mistralai/Voxtral-Mini-3B-2507", "tokenizer_use_mistral_common": True, "sequence_len": 2048,
    "load_in_4bit": True, "adapter": "qlora", "lora_r": 32, "micro_batch_size": 2,
    "lora_target_modules": r"language_model.model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj",
}  # fmt: skip


def test_a_configuration_of_voxtral_comes_over_for_chats_and_for_audio() -> None:
    text = made(VOXTRAL, datasets=[CHAT], sample_packing=True)
    assert text.is_whole and text.recipe.data.packing
    modules = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
    assert text.recipe.adapter.target_modules == modules
    assert not text.different
    processor = {"processor_type": "VoxtralProcessor", "skip_prepare_dataset": True, "sample_packing": False}
    audio = made(VOXTRAL, datasets=[CHAT], **processor)
    assert audio.is_whole and audio.recipe.adapter.target_modules == modules
    words = {line.key: line.words for line in audio.unsaid}
    assert words["train_on_inputs"].startswith("with audio, Axolotl masks user turns only for some models")
    assert words["excess_length_strategy"].startswith("Axolotl neither truncates nor drops rows with audio")
    assert not any("image" in said for said in words.values())
    (line,) = [line for line in audio.lines if line.key == "processor_type"]
    assert line.words == "the model's own processor is loaded for rows with audio"


def test_axolotl_trains_the_tower_of_voxtral_that_tunekit_freezes() -> None:
    processor = {"processor_type": "VoxtralProcessor", "lora_target_modules": ["q_proj"], "adapter": "lora"}
    report = made(VOXTRAL, datasets=[CHAT], **processor, load_in_4bit=False)
    (line,) = [line for line in report.unsaid if line.key == "freeze_mm_modules"]
    assert line.words.startswith("Axolotl trains the audio tower and the projector too; tunekit freezes them")


def save_info(**columns) -> None:
    Path("data").mkdir()
    info = {"cats": {"file_name": "cats.json", "columns": {"messages": "messages", **columns}}}
    Path("data/dataset_info.json").write_text(json.dumps(info))


def test_columns_of_videos_come_over_and_their_frames_differ() -> None:
    save_info(videos="clips")
    model = "Qwen/Qwen2.5-VL-7B-Instruct"
    report = made(LLAMA_FACTORY, dataset="cats", model_name_or_path=model, video_maxlen=64)
    assert report.recipe.data.columns == {"videos": "clips"}
    lines = {line.key: line for line in (*report.of_kind("different"), *report.unsaid)}
    assert lines["video_fps"].remedy == lines["video_maxlen"].remedy == "model.video_processor"
    silent = made(LLAMA_FACTORY, dataset="dogs", model_name_or_path=model, video_maxlen=64).of_kind("silent")
    assert "video_maxlen" in {line.key for line in silent}
    for name, kind in (("llava-video", "different"), ("coco", "silent")):
        lines = made(SWIFT, dataset=name, FPS=2).of_kind(kind)
        assert "FPS" in {line.key for line in lines}


def test_columns_of_audio_come_over_and_the_processor_has_the_sample_rate() -> None:
    save_info(audios="sounds")
    model = "Qwen/Qwen2-Audio-7B-Instruct"
    report = made(LLAMA_FACTORY, dataset="cats", model_name_or_path=model, audio_sampling_rate=16000)
    assert report.recipe.data.columns == {"audios": "sounds"}
    assert report.recipe.data.too_long == "truncate"
    (line,) = [line for line in report.lines if line.key == "audio_sampling_rate"]
    assert line.kind == "decided"
    swift = made(SWIFT, model=model, SAMPLING_RATE=16000)
    assert swift.recipe.model.path == model


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen3-4B", "allenai/OLMo-2-0425-1B", "microsoft/phi-4", "google/gemma-3-4b-it", "01-ai/Yi-1.5-6B"]
)
def test_models_of_text_and_gemma_3_are_not_taken_for_models_of_images(model) -> None:
    assert made(AXOLOTL, datasets=[CHAT], base_model=model).recipe.model.path == model


def test_alpaca_rows_are_written_as_each_tool_writes_them() -> None:
    rows = [{"path": "a.jsonl", "type": "alpaca"}, CHAT]
    first, second = made(AXOLOTL, datasets=rows).recipe.data.sources
    assert (first.prompt_style, second.prompt_style) == ("alpaca", "plain")
    torchtune = made(TORCHTUNE, dataset={"_component_": "torchtune.datasets.alpaca_cleaned_dataset"})
    assert torchtune.recipe.data.prompt_style == "alpaca_turn"
    assert torchtune.recipe.data.loss_on == "all"


def test_alpaca_rows_of_llama_factory_are_joined_with_a_line_break() -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps({"asks": {"file_name": "asks.json"}}))
    assert made(LLAMA_FACTORY, dataset="asks").recipe.data.prompt_style == "line"


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


def test_rows_that_are_too_long_are_dropped_where_the_tool_drops_them() -> None:
    assert made(AXOLOTL, datasets=[CHAT]).recipe.data.too_long == "drop"
    assert made(AXOLOTL, datasets=[CHAT], excess_length_strategy="raise").recipe.data.too_long == "refuse"
    assert made(AXOLOTL, datasets=[CHAT], excess_length_strategy="truncate").recipe.data.too_long == "truncate"
    assert made(SWIFT).recipe.data.too_long == "drop"
    assert made(LLAMA_FACTORY, dataset="chats").recipe.data.too_long == "truncate_turns"


def test_the_first_rows_of_each_data_set_are_used() -> None:
    Path("data").mkdir()
    info = {"asks": {"file_name": "asks.json"}, "hub": {"hf_hub_url": "me/rows"}}
    Path("data/dataset_info.json").write_text(json.dumps(info))
    report = made(LLAMA_FACTORY, dataset="asks, hub", max_samples=100, eval_dataset="asks")
    assert [source.max_samples for source in report.recipe.data.sources] == [100, 100]
    assert [source.sampling for source in report.recipe.data.sources] == ["first", "first"]
    assert report.recipe.data.eval_sources[0].max_samples == 100
    assert not report.of_kind("unsupported")


def test_ms_swift_draws_rows_at_random_unless_it_is_told_not_to() -> None:
    (source,) = made(SWIFT, dataset="chats.jsonl#50").recipe.data.sources
    assert (source.max_samples, source.sampling) == (50, "random")
    (source,) = made(SWIFT, dataset="chats.jsonl#50", dataset_shuffle=False).recipe.data.sources
    assert (source.max_samples, source.sampling) == (50, "first")


def test_a_system_message_comes_along_as_a_text_or_from_a_file() -> None:
    assert made(SWIFT, system="Be kind.").recipe.data.system == "Be kind."
    Path("prompt.txt").write_text("Think first.\n")
    assert made(SWIFT, system="prompt.txt").recipe.data.system == "Think first.\n"
    (line,) = made(SWIFT, system="elsewhere.txt").of_kind("unsupported")
    assert line.words == "no file 'elsewhere.txt': set data.system to its text"


def test_a_name_and_an_author_are_written_into_the_rows_that_have_their_marks() -> None:
    report = made(
        SWIFT, dataset=["swift/self-cognition#500", "chats.jsonl"], model_name="Ada", model_author=["us", "us"]
    )
    first, second = report.recipe.data.sources
    assert (first.path, first.format, first.max_samples) == ("modelscope/self-cognition", "alpaca", 500)
    assert first.columns == {"instruction": "query", "output": "response"}
    assert (first.replace, second.replace) == ({"{{NAME}}": "Ada", "{{AUTHOR}}": "us"}, {})
    assert report.is_same
    assert {line.key for line in made(SWIFT, model_name="Ada").of_kind("silent")} >= {"model_name"}


def test_a_loss_of_chosen_answers_beside_dpos_comes_along() -> None:
    method = made(SWIFT, rlhf_type="dpo", rpo_alpha=0.1).recipe.method
    assert (method.loss_type, method.loss_weights) == (["sigmoid", "sft"], [1.0, 0.1])
    (line,) = made(SWIFT, rlhf_type="dpo", rpo_alpha=0.1, loss_type="ipo").of_kind("unsupported")
    assert line.key == "rpo_alpha"


def test_dynamic_sampling_takes_as_many_attempts_as_ms_swift_does() -> None:
    grpo = {"rlhf_type": "grpo", "reward_funcs": ["accuracy"]}
    assert made(SWIFT, **grpo, dynamic_sample=True).recipe.method.max_resample_times == 3
    assert made(SWIFT, **grpo, dynamic_sample="true", max_resample_times=5).recipe.method.max_resample_times == 5
    report = made(SWIFT, **grpo, dynamic_sample=False, max_resample_times=5)
    assert report.recipe.method.max_resample_times == 0
    assert report.recipe.method.scale_rewards == "group"


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (AXOLOTL, {"datasets": [CHAT], "use_dynamic_finetuning": True}),
        (LLAMA_FACTORY, {"dataset": "rows", "use_dft_loss": True}),
        (SWIFT, {"enable_dft_loss": True}),
    ],
)
def test_the_loss_of_dynamic_fine_tuning_is_trls(config, more) -> None:
    report = made(config, **more)
    assert report.recipe.method.loss_type == "dft"
    assert not report.of_kind("unsupported")


@pytest.mark.parametrize(
    ("config", "more", "scale"),
    [
        (AXOLOTL, {"datasets": [CHAT], "use_eaft": True, "eaft_k": 10}, "does not divide entropies"),
        (LLAMA_FACTORY, {"dataset": "rows", "use_eaft_loss": True}, "divides entropies by 3"),
        (SWIFT, {"enable_eaft_loss": True}, "divides entropies by 3"),
    ],
)
def test_the_loss_of_entropy_adaptive_fine_tuning_comes_along_but_for_its_scale(config, more, scale) -> None:
    report = made(config, **more, eaft_alpha=0.5)
    method = report.recipe.method
    assert (method.loss_type, method.eaft_alpha, method.eaft_top_k) == ("eaft", 0.5, more.get("eaft_k", 20))
    assert not report.of_kind("unsupported")
    (switch,) = [key for key in more if key.startswith(("use", "enable"))]
    assert scale in next(line.words for line in report.of_kind("different") if line.key == switch)
    report = made(config, **more | {switch: False}, eaft_alpha=0.5)
    assert report.recipe.method.loss_type == "nll" and not report.of_kind("unsupported")


def test_oft_comes_along_but_for_a_number_of_blocks_and_a_base_in_few_bits() -> None:
    oft = {"finetuning_type": "oft", "dataset": "rows", "oft_block_size": 16, "oft_target": "all"}
    adapter = made(LLAMA_FACTORY, **oft).recipe.adapter
    assert (adapter.type, adapter.oft_block_size, adapter.target_modules) == ("oft", 16, "all-linear")
    words = {line.key: line.words for line in made(LLAMA_FACTORY, **oft, quantization_bit=4).of_kind("unsupported")}
    assert "oft is unsupported on a quantized base" in words["quantization_bit"]
    words = {line.key: line.words for line in made(LLAMA_FACTORY, **oft, oft_rank=4).of_kind("unsupported")}
    assert "set adapter.oft_block_size" in words["oft_rank"]


def test_experts_are_divided_among_devices_where_no_adapter_is_on_them() -> None:
    assert made(AXOLOTL, datasets=[CHAT], adapter=None, expert_parallel_size=2).recipe.parallel.ep_size == 2
    assert made(AXOLOTL, datasets=[CHAT], expert_parallel_size=1).is_same
    attention = {"datasets": [CHAT], "expert_parallel_size": 2, "lora_target_modules": ["q_proj", "o_proj"]}
    assert made(AXOLOTL, **attention).recipe.parallel.ep_size == 2
    refused = {
        "all": {**attention, "lora_target_modules": ["q_proj", "down_proj"]},
        "linear": {**attention, "lora_target_linear": True},
        "stacks": {**attention, "lora_target_parameters": ["experts.gate_up_proj"]},
        "few bits": {**attention, "adapter": "qlora", "load_in_4bit": True},
        "none named": {"datasets": [CHAT], "expert_parallel_size": 2},
    }
    for changes in refused.values():
        words = {line.key: line.words for line in made(AXOLOTL, **changes).of_kind("unsupported")}
        assert "parallel.ep_size" in words["expert_parallel_size"]


def test_experts_are_quantized_and_balanced_as_axolotl_does_it() -> None:
    quantized = {"datasets": [CHAT], "adapter": "qlora", "load_in_4bit": True, "quantize_moe_experts": True}
    assert made(AXOLOTL, **quantized).is_same
    (line,) = made(AXOLOTL, datasets=[CHAT], quantize_moe_experts=True).of_kind("unsupported")
    assert line.words == "adapter: qlora quantizes experts to 4 bits; 8 bits are unsupported"
    assert made(AXOLOTL, datasets=[CHAT], model_config={"output_router_logits": True}).is_same


FOUR_BITS = [
    (TRL, {"optim": "adamw_torch_4bit"}, "optim"),
    (AXOLOTL, {"datasets": [CHAT], "optimizer": "adamw_torch_4bit"}, "optimizer"),
    (LLAMA_FACTORY, {"dataset": "chats", "optim": "adamw_torch_4bit"}, "optim"),
    (SWIFT, {"optim": "adamw_torch_4bit"}, "optim"),
]


@pytest.mark.parametrize(("config", "more", "key"), FOUR_BITS)
def test_4_bit_states_come_along_in_the_blocks_that_transformers_gives_them(config, more, key) -> None:
    report = made(config, **more)
    assert report.recipe.train.optim == "tunekit_adamw_4bit"
    (line,) = [line for line in report.lines if line.key == key]
    assert (line.kind, line.words) == ("carried", "train.optim: tunekit_adamw_4bit")


def test_transformers_gives_4_bit_states_blocks_of_256_values(tmp_path) -> None:
    """By itself; another number, which `optim_args` gives, is passed as a text that torchao cannot compute with."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=str(tmp_path), optim="adamw_torch_4bit", use_cpu=True, report_to="none")
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    assert (kind.__name__, options["block_size"], options["bf16_stochastic_round"]) == ("AdamW4bit", 256, 0)
    arguments.optim_args = "block_size=128"
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    with pytest.raises(TypeError):
        _ = 4096 % options["block_size"]


@pytest.mark.parametrize("module", ["torchao.optim", "torchao.prototype.low_bit_optim"])
def test_torchtunes_4_bit_states_of_256_values_are_the_same(module) -> None:
    optimizer = {"_component_": f"{module}.AdamW4bit", "lr": 1e-4, "block_size": 256}
    dataset = {"_component_": "torchtune.datasets.alpaca_dataset"}
    report = made(TORCHTUNE, optimizer=optimizer, dataset=dataset)
    train = report.recipe.train
    assert (train.optim, train.weight_decay, train.learning_rate) == ("tunekit_adamw_4bit", 0.01, 1e-4)
    assert not [line for line in (*report.different, *report.of_kind("unsupported")) if "optimizer" in line.key]


def test_torchao_gives_4_bit_states_blocks_of_128_values_by_itself() -> None:
    from torchao import optim

    assert inspect.signature(optim.AdamW4bit).parameters["block_size"].default == 128
    words = "train.optim: tunekit_adamw_4bit; the original's states have blocks of 128 values, tunekit's of 256"
    report = made(AXOLOTL, datasets=[CHAT], optimizer="ao_adamw_4bit")
    assert [line.words for line in report.different if line.key == "optimizer"] == [words]
    optimizer = {"_component_": "torchao.optim.AdamW4bit"}
    dataset = {"_component_": "torchtune.datasets.alpaca_dataset"}
    report = made(TORCHTUNE, optimizer=optimizer, dataset=dataset)
    assert [line.words for line in report.different if "optimizer" in line.key] == [words]
    report = made(TORCHTUNE, optimizer={**optimizer, "block_size": 64}, dataset=dataset)
    (line,) = [line for line in report.different if "optimizer" in line.key]
    assert line.key == "optimizer.block_size" and "blocks of 64 values" in line.words
    others = {"_component_": "torchao.optim.AdamW8bit", "block_size": 256}
    (line,) = made(TORCHTUNE, optimizer=others, dataset=dataset).of_kind("unsupported")
    assert line.key == "optimizer.block_size"


def test_stochastic_rounding_of_weights_is_the_same() -> None:
    axolotl = {"datasets": [CHAT], "adapter": None, "bf16": "full", "optimizer": "ao_adamw_4bit"}
    report = made(AXOLOTL, **axolotl, optim_args="bf16_stochastic_round=True")
    assert report.recipe.train.pure_bf16 and report.recipe.train.optim == "tunekit_adamw_4bit"
    (line,) = [line for line in report.different if line.key == "optimizer"]
    assert "stochastically" not in line.words
    (line,) = made(AXOLOTL, **axolotl, optim_args="block_size=64").of_kind("unsupported")
    assert line.words == "block_size: unsupported with tunekit_adamw_4bit"
    whole = {"dtype": "bf16", "model": {"_component_": "torchtune.models.qwen2_5.qwen2_5_3b"}}
    whole["dataset"] = {"_component_": "torchtune.datasets.alpaca_dataset"}
    rounds = {"_component_": "torchao.optim.AdamW4bit", "bf16_stochastic_round": True, "block_size": 256}
    report = made(TORCHTUNE, **whole, optimizer=rounds)
    assert report.recipe.train.pure_bf16 and not [line for line in report.different if "optimizer" in line.key]


def test_reasoning_is_read_by_the_key_that_the_template_has() -> None:
    rows = {**CHAT, "field_thinking": "thinking", "template_thinking_key": "thinking"}
    assert made(AXOLOTL, datasets=[rows]).is_same
    report = made(AXOLOTL, datasets=[{**CHAT, "field_thinking": "thinking"}])
    assert "rename it with a function" in report.of_kind("unsupported")[0].words


def test_layers_that_galore_updates_in_the_backward_pass_are_not_clipped() -> None:
    galore = {"finetuning_type": "full", "dataset": "rows", "use_galore": True, "galore_layerwise": True}
    (line,) = [line for line in made(LLAMA_FACTORY, **galore).different if line.key == "galore_layerwise"]
    assert line.remedy == "train.max_grad_norm"
    report = made(LLAMA_FACTORY, **galore, gradient_accumulation_steps=2)
    assert [line.key for line in report.of_kind("unsupported")] == ["galore_layerwise"]


def test_devices_that_share_a_row_add_none_to_the_batch() -> None:
    config = {**LLAMA_FACTORY, "dataset": "rows", "use_mca": True, "tensor_model_parallel_size": 2}
    Path("config.yaml").write_text(json.dumps({**config, "per_device_train_batch_size": 1}))
    assert migrate("config.yaml", num_devices=8).recipe.train.global_batch_size == 4


V1 = {
    "model": "Qwen/Qwen3-0.6B",
    "model_class": "llm",
    "template": "qwen3_nothink",
    "kernel_config": {"name": "auto"},
    "train_dataset": "data/sets.yaml",
    "micro_batch_size": 2,
    "cutoff_len": 512,
    "max_steps": 10,
}


def v1(**more: Any) -> Migration:
    Path("data").mkdir(exist_ok=True)
    sets = {"asks": {"path": "data/asks.json", "source": "local", "converter": "alpaca"}}
    Path("data/sets.yaml").write_text(json.dumps(sets))
    Path("config.yaml").write_text(json.dumps(V1 | more))
    return migrate("config.yaml")


def test_llama_factorys_new_trainer_is_read_with_its_data_sets_and_defaults() -> None:
    report = v1(dist_config={"name": "fsdp2", "cp_mode": "ulysses", "cp_size": 2})
    assert (report.tool, report.is_same) == ("llama-factory", True)
    recipe = report.recipe
    (source,) = recipe.data.sources
    assert (source.path, source.format, source.prompt_style) == ("data/asks.json", "alpaca", "joined")
    assert (recipe.train.global_batch_size, recipe.train.max_steps, recipe.data.max_length) == (2, 10, 512)
    assert (recipe.learning_rate, recipe.train.lr_scheduler_type, recipe.train.weight_decay) == (1e-4, "constant", 0.01)
    assert (recipe.adapter.type, recipe.parallel.sp_size) == ("full", 2)


def test_adapters_of_llama_factorys_new_trainer() -> None:
    lora = {"name": "lora", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all"}
    adapter = v1(peft_config=lora, quant_config={"name": "bnb", "quantization_bit": 4}).recipe.adapter
    assert (adapter.type, adapter.rank, adapter.alpha, adapter.target_modules) == ("qlora", 16, 32, "all-linear")
    assert v1(peft_config={"name": "freeze", "freeze_trainable_layers": 3}).recipe.adapter.last_layers == 3
    report = v1(peft_config=lora, quant_config={"name": "bnb", "quantization_bit": 8})
    assert (report.recipe.adapter.type, report.recipe.adapter.quant_type) == ("qlora", "int8")
    report = v1(peft_config=lora, quant_config={"name": "bnb", "quantization_bit": 2})
    assert [line.key for line in report.of_kind("unsupported")] == [
        "quant_config.name",
        "quant_config.quantization_bit",
    ]


def test_batches_of_a_number_of_tokens_are_named() -> None:
    (line,) = v1(batching_strategy="dynamic_batching").of_kind("unsupported")
    assert line.words == "dynamic_batching: a step has train.global_batch_size rows, however long they are"
    assert v1(batching_strategy="padding_free").is_same


def test_samples_with_repetition_are_different() -> None:
    Path("data").mkdir()
    report = v1()
    sets = {"asks": {"path": "data/asks.json", "converter": "alpaca", "size": 500}}
    Path("data/sets.yaml").write_text(json.dumps(sets))
    report = migrate("config.yaml")
    assert report.recipe.data.sources[0].max_samples == 500
    assert [line.words for line in report.different if line.key == "train_dataset"] == [
        "LLaMA-Factory samples 500 rows of asks with replacement; the recipe without replacement"
    ]
    Path("data/sets.yaml").unlink()
    with pytest.raises(RecipeError, match=r"config\.yaml:1: train_dataset: no file 'data/sets\.yaml'"):
        migrate("config.yaml")


@pytest.mark.parametrize(
    ("launch", "method", "batch"),
    [
        ("python trl/scripts/sft.py", "sft", 8),
        ("accelerate launch --config_file z3.yaml --num_processes 4 examples/scripts/dpo.py", "dpo", 32),
        ("torchrun --nproc_per_node=2 examples/scripts/sft_vlm.py", "sft", 16),
        ("accelerate launch \\\n  examples/scripts/reward_modeling.py", "reward", 8),
    ],
)
def test_scripts_of_trl_are_read_as_its_commands(launch, method, batch) -> None:
    arguments = "--model_name_or_path Qwen/Qwen3-0.6B --dataset_name me/rows --no_remove_unused_columns --push_to_hub"
    Path("run.sh").write_text(f"{launch} \\\n    {arguments}\n")
    report = migrate("run.sh")
    assert (report.tool, report.recipe.method.type) == ("trl", method)
    assert report.recipe.train.global_batch_size == batch
    assert not report.of_kind("unsupported")


def test_a_script_of_trl_that_is_no_method_is_named() -> None:
    Path("run.sh").write_text("python examples/scripts/ppo_tldr.py --model_name_or_path m --dataset_name d\n")
    with pytest.raises(RecipeError, match="method ppo_tldr is unsupported"):
        migrate("run.sh")


def test_the_teacher_of_a_distillation_comes_along() -> None:
    words = "--model_name_or_path Qwen/Qwen3-0.6B --teacher_model_name_or_path Qwen/Qwen3-4B --dataset_name me/prompts"
    Path("run.sh").write_text(f"python trl/scripts/distillation.py {words}\n")
    method = migrate("run.sh").recipe.method
    assert (method.type, method.teacher.path) == ("distillation", "Qwen/Qwen3-4B")
    Path("run.sh").write_text(f"trl distillation {words} --beta 0.3 --max_completion_length 700\n")
    recipe = migrate("run.sh").recipe
    assert (recipe.method.beta, recipe.method.max_completion_length) == (0.3, 700)
    assert recipe.data.max_length == 1212


def test_an_end_token_of_trl_comes_along() -> None:
    report = made(TRL, eos_token="<end>", assistant_only_loss=True)
    assert report.recipe.model.special_tokens.eos_token == "<end>"
    assert report.is_same


def test_limits_of_images_say_nothing_for_a_model_of_text() -> None:
    script = "MAX_PIXELS=1000 swift sft --model Qwen/Qwen3-0.6B --dataset rows.jsonl --max_length 64\n"
    Path("run.sh").write_text(script)
    report = migrate("run.sh")
    assert [line.words for line in report.lines if line.key == "MAX_PIXELS"] == ["only used with images"]


@pytest.mark.parametrize(
    ("config", "more", "coefficient"),
    [
        (AXOLOTL, {"datasets": [CHAT], "base_model": "Qwen/Qwen3-30B-A3B"}, 0.0),
        (
            AXOLOTL,
            {
                "datasets": [CHAT],
                "base_model": "Qwen/Qwen3-30B-A3B",
                "model_config": {"output_router_logits": True},
            },
            None,
        ),
        (LLAMA_FACTORY, {"dataset": "rows", "model_name_or_path": "mistralai/Mixtral-8x7B-v0.1"}, 0.0),
        (SWIFT, {"model": "Qwen/Qwen3-30B-A3B", "router_aux_loss_coef": 0.01}, 0.01),
        (SWIFT, {"model": "Qwen/Qwen3-4B"}, None),
        (TRL, {"model_name_or_path": "Qwen/Qwen3-30B-A3B"}, None),
    ],
)
def test_experts_are_balanced_only_where_the_tool_balances_them(config, more, coefficient) -> None:
    assert made(config, **more).recipe.method.trainer_args.get("router_aux_loss_coef") == coefficient
