"""Vision configurations of Axolotl, LLaMA-Factory and ms-swift become recipes that read the same images."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tunekit.errors import RecipeError
from tunekit.estimates.learning_rates import rate_of
from tunekit.migration.images import families
from tunekit.migration.migration import migrate
from tunekit.migration.report import Migration

REGEX = r"language_model.model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
AXOLOTL = {
    "base_model": "Qwen/Qwen2.5-VL-7B-Instruct", "processor_type": "AutoProcessor", "skip_prepare_dataset": True,
    "remove_unused_columns": False, "sample_packing": False, "chat_template": "qwen2_vl", "sequence_len": 2048,
    "datasets": [{"path": "me/photos", "type": "chat_template", "split": "train[:1%]", "field_messages": "messages"}],
    "adapter": "lora", "lora_r": 32, "lora_alpha": 16,
    "lora_target_modules": REGEX.replace("language_model.model", "model.language_model"), "micro_batch_size": 1,
    "ddp_find_unused_parameters": True, "freeze_mm_modules": True,
}  # fmt: skip
FACTORY = {
    "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "stage": "sft", "finetuning_type": "lora",
    "lora_target": "all", "image_max_pixels": 262144, "video_max_pixels": 16384, "freeze_vision_tower": True,
    "freeze_multi_modal_projector": True, "freeze_language_model": False, "dataset": "photos", "template": "qwen2_vl",
    "cutoff_len": 2048, "trust_remote_code": True,
}  # fmt: skip
SWIFT = """\
nproc_per_node=2
NPROC_PER_NODE=$nproc_per_node \\
MAX_PIXELS=1003520 \\
VIDEO_MAX_PIXELS=50176 \\
swift sft \\
    --model Qwen/Qwen2.5-VL-7B-Instruct \\
    --dataset data/rows.jsonl \\
    --tuner_type lora \\
    --target_modules all-linear \\
    --freeze_vit true \\
    --freeze_aligner true \\
    --freeze_llm false \\
    --vit_gradient_checkpointing false \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --max_length 4096
"""
INFO = {
    "photos": {
        "file_name": "photos.json", "formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "others": {"file_name": "more/others.json", "columns": {"prompt": "ask", "response": "say", "images": "pics"}},
    "pairs": {
        "hf_hub_url": "me/pairs", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected", "images": "images"},
    },
    "plain": {"file_name": "plain.json"},
    "rated": {
        "file_name": "rated.json",
        "columns": {"prompt": "ask", "response": "say", "kto_tag": "good", "images": "pics"},
    },
}  # fmt: skip


def of_values(base: dict[str, Any], **more: Any) -> Migration:
    values = {key: value for key, value in (base | more).items() if value is not None}
    Path("config.yaml").write_text(json.dumps(values))
    return migrate("config.yaml")


def of_script(text: str = SWIFT, *, head: str = "", model: str = "", **more: str) -> Migration:
    text = text.replace("swift sft \\\n", "".join(f"{line} \\\n" for line in head.split()) + "swift sft \\\n")
    text = text.replace("Qwen/Qwen2.5-VL-7B-Instruct", model) if model else text
    Path("train.sh").write_text(text.rstrip() + "".join(f" \\\n    --{key} {value}" for key, value in more.items()))
    return migrate("train.sh")


def line_of(made: Migration, key: str) -> Any:
    (line,) = [line for line in made.lines if line.key == key]
    return line


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    monkeypatch.chdir(tmp_path)


def test_a_vision_configuration_of_axolotl_is_carried_over_whole() -> None:
    made = of_values(AXOLOTL)
    assert made.is_whole
    assert made.recipe.adapter.target_modules == AXOLOTL["lora_target_modules"]
    assert made.recipe.data.train.split == "train[:1%]" and made.recipe.data.format == "messages"
    assert made.recipe.data.image_folder is None
    assert line_of(made, "freeze_mm_modules").kind == "decided"
    assert {line.key for line in made.different} == {
        *("chat_template", "excess_length_strategy", "train_on_inputs", "datasets")
    }


def test_a_vision_configuration_of_llama_factory_is_carried_over_whole() -> None:
    made = of_values(FACTORY)
    assert made.is_whole
    assert made.recipe.model.image_processor == {"max_pixels": 262144}
    assert made.recipe.data.train.path == "data/photos.json"
    assert (made.recipe.data.columns, made.recipe.data.image_folder) == ({}, None)
    assert made.recipe.adapter.target_modules == "all-linear"
    assert "each may differ by one token" in line_of(made, "image_max_pixels").words
    assert line_of(made, "video_max_pixels").kind == "silent"


def test_a_vision_script_of_ms_swift_is_carried_over_whole() -> None:
    made = of_script()
    assert made.is_whole
    assert made.recipe.model.image_processor == {"max_pixels": 1003520}
    # ms-swift looks for images in the working directory, not beside the rows.
    assert made.recipe.data.image_folder == "."
    limit = line_of(made, "MAX_PIXELS")
    assert (limit.kind, limit.line, limit.value) == ("carried", 3, 1003520)
    assert line_of(made, "VIDEO_MAX_PIXELS").kind == "silent"
    assert made.recipe.train.global_batch_size == 16


def test_a_script_of_ms_swift_with_qwen2_5_omni_is_carried_over_whole() -> None:
    made = of_script(model="Qwen/Qwen2.5-Omni-7B", head="ENABLE_AUDIO_OUTPUT=1 USE_AUDIO_IN_VIDEO=False ")
    assert made.is_whole
    assert made.recipe.model.path == "Qwen/Qwen2.5-Omni-7B"
    assert made.recipe.model.image_processor == {"max_pixels": 1003520}
    assert made.recipe.data.image_folder == "."
    # The talker is loaded, and not trained; here it is not loaded.
    assert line_of(made, "ENABLE_AUDIO_OUTPUT").kind == line_of(made, "USE_AUDIO_IN_VIDEO").kind == "silent"
    made = of_script(model="Qwen/Qwen2.5-Omni-7B", head="USE_AUDIO_IN_VIDEO=True ")
    line = line_of(made, "USE_AUDIO_IN_VIDEO")
    assert (line.kind, line.words) == ("unsupported", "the audio of videos is not read")


def test_a_configuration_of_llama_factory_with_qwen2_5_omni_is_carried_over_whole() -> None:
    omni = {"model_name_or_path": "Qwen/Qwen2.5-Omni-7B", "template": "qwen2_omni", "use_audio_in_video": False}
    made = of_values(FACTORY, **omni)
    assert made.is_whole
    assert made.recipe.model.image_processor == {"max_pixels": 262144}
    assert (
        line_of(of_values(FACTORY, **omni | {"use_audio_in_video": True}), "use_audio_in_video").kind == "unsupported"
    )


@pytest.mark.parametrize("kind", ["axolotl", "llama-factory", "ms-swift"])
def test_full_fine_tuning_with_frozen_towers_is_carried_over_whole(kind) -> None:
    if kind == "axolotl":
        made = of_values(AXOLOTL, adapter=None, lora_r=None, lora_alpha=None, lora_target_modules=None)
    else:
        made = of_values(FACTORY, finetuning_type="full") if kind == "llama-factory" else of_script(tuner_type="full")
    assert made.is_whole and made.recipe.adapter.type == "full"


ROWS = [
    ("photos", {}, ({}, None)),
    ("photos", {"media_dir": "shots"}, ({}, "shots")),
    ("others", {}, ({"instruction": "ask", "output": "say", "images": "pics"}, "data")),
    ("pairs", {"stage": "dpo"}, ({}, None)),
    ("rated", {"stage": "kto"}, ({"prompt": "ask", "completion": "say", "label": "good", "images": "pics"}, None)),
    ("plain", {"media_dir": "shots", "image_max_pixels": None}, ({}, None)),
    ("unknown", {"media_dir": "shots"}, ({}, "shots")),
]


@pytest.mark.parametrize(("name", "more", "expected"), ROWS)
def test_columns_and_folders_of_llama_factory_s_images_come_along(name, more, expected) -> None:
    made = of_values(FACTORY, dataset=name, **more)
    assert (made.recipe.data.columns, made.recipe.data.image_folder) == expected
    assert made.is_whole
    if name == "plain":
        assert line_of(made, "media_dir").kind == "silent"


def test_of_several_sources_those_with_images_name_their_folder() -> None:
    photos, plain = of_values(FACTORY, dataset="photos,plain", media_dir="shots").recipe.data.train
    assert (photos.image_folder, photos.format) == ("shots", "messages")
    assert (plain.image_folder, plain.format) == (None, "alpaca")


def test_llama_factory_s_own_limit_of_pixels_is_said() -> None:
    made = of_values(FACTORY, image_max_pixels=None)
    assert made.recipe.model.image_processor == {"max_pixels": 768 * 768}
    assert [one.key for one in made.assumed if "image" in one.key] == ["model.image_processor.max_pixels"]
    made = of_values(FACTORY, image_max_pixels=None, dataset="plain")
    assert made.recipe.model.image_processor is None
    made = of_values(FACTORY, image_max_pixels=None, model_name_or_path="mistralai/Pixtral-12B-2409")
    (line,) = [line for line in made.different if line.key == "image_max_pixels"]
    assert line.words == "LLaMA-Factory shrinks images to 589,824 pixels before the processor; tunekit does not"


FACTORY_LIMITS = [
    ("Qwen/Qwen2-VL-2B-Instruct", {"image_min_pixels": 1024}, {"max_pixels": 262144}, "silent"),
    (
        "Qwen/Qwen2-VL-2B-Instruct",
        {"image_min_pixels": 50176},
        {"min_pixels": 50176, "max_pixels": 262144},
        "different",
    ),
    ("Qwen/Qwen3-VL-4B-Instruct", {"image_min_pixels": 50176}, {"max_pixels": 262144}, "silent"),
    ("Qwen/Qwen3.5-4B", {"image_max_pixels": 262144}, {"max_pixels": 262144}, "different"),
    ("Qwen/Qwen3-VL-4B-Instruct", {"image_max_pixels": 20_000_000}, None, "silent"),
    (
        "zai-org/GLM-4.1V-9B-Thinking",
        {"image_max_pixels": 262144},
        {"size": {"shortest_edge": 12544, "longest_edge": 524288}},
        "different",
    ),
    ("llava-hf/llava-1.5-7b-hf", {"image_max_pixels": 262144}, None, "different"),
    ("google/gemma-3-4b-it", {"image_max_pixels": 262144}, None, "different"),
    ("OpenGVLab/InternVL3-2B-hf", {"image_max_pixels": 262144}, None, "unsupported"),
    ("mistral-community/pixtral-12b", {"image_max_pixels": 262144}, None, "unsupported"),
    ("me/own-model", {"image_max_pixels": 262144}, None, "unsupported"),
]


@pytest.mark.parametrize(("model", "limit", "expected", "kind"), FACTORY_LIMITS)
def test_limits_of_pixels_are_settings_of_each_family_s_processor(model, limit, expected, kind) -> None:
    made = of_values(FACTORY, model_name_or_path=model, template="x", **limit)
    assert made.recipe.model.image_processor == expected
    line = line_of(made, next(iter(limit)))
    assert line.kind == kind
    if kind == "unsupported":
        assert "model.image_processor" in line.words


@pytest.mark.parametrize(
    ("model_type", "vision", "kind"),
    [("qwen2_5_vl", {}, "different"), ("llava", {}, "different"), ("llava", {"model_type": "pixtral"}, "unsupported")],
)
def test_a_local_model_says_its_family_in_its_config(model_type, vision, kind) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"model_type": model_type, "vision_config": vision}))
    assert line_of(of_values(FACTORY, model_name_or_path="model"), "image_max_pixels").kind == kind


SWIFT_LIMITS = [
    ("", {"head": "MIN_PIXELS=50176"}, {"min_pixels": 50176, "max_pixels": 1003520}),
    ("Qwen/Qwen3-VL-4B-Instruct", {"head": "IMAGE_MAX_TOKEN_NUM=1024"}, {"min_pixels": 4096, "max_pixels": 1048576}),
    ("Qwen/Qwen3-VL-4B-Instruct", {"head": "IMAGE_MIN_TOKEN_NUM=64"}, {"min_pixels": 65536}),
    ("", {"head": "IMAGE_MAX_TOKEN_NUM=1024"}, {"max_pixels": 1003520}),
    ("", {"max_pixels": "500000"}, {"max_pixels": 500000}),
    ("", {"model_kwargs": "'{\"max_pixels\": 602112}'"}, {"max_pixels": 602112}),
    ("llava-hf/llava-1.5-7b-hf", {}, None),
]


@pytest.mark.parametrize(("model", "more", "expected"), SWIFT_LIMITS)
def test_limits_of_ms_swift_are_those_of_the_model_s_own_processor(model, more, expected) -> None:
    made = of_script(model=model, **more)
    assert made.recipe.model.image_processor == expected
    assert made.is_whole


def test_a_size_that_axolotl_pads_images_to_is_a_limit_and_said_to_differ() -> None:
    made = of_values(AXOLOTL, image_size=512, image_resize_algorithm="bilinear")
    assert made.recipe.model.image_processor == {"max_pixels": 512 * 512}
    assert "tunekit keeps their shape" in line_of(made, "image_size").words
    assert line_of(made, "image_resize_algorithm").kind == "different"
    made = of_values(AXOLOTL, image_size=512, base_model="HuggingFaceTB/SmolVLM2-2.2B-Instruct")
    assert "set size and do_image_splitting in model.image_processor" in line_of(made, "image_size").words
    made = of_values(AXOLOTL, processor_kwargs={"max_pixels": 200704, "image_seq_length": 5})
    assert made.recipe.model.image_processor == {"max_pixels": 200704}
    assert [line.key for line in made.of_kind("unsupported")] == ["processor_kwargs.image_seq_length"]


FULL_FACTORY = {"finetuning_type": "full", "lora_target": None}
TRAINS_TOWERS = [
    ("axolotl", {"adapter": None, "lora_target_modules": None, "freeze_mm_modules": False}, ("full", "full")),
    ("axolotl", {"lora_target_modules": None, "lora_target_linear": True, "freeze_mm_modules": None}, ("lora", "lora")),
    ("llama-factory", {"freeze_vision_tower": False}, ("lora", "frozen")),
    ("llama-factory", {"freeze_multi_modal_projector": False}, ("frozen", "frozen")),
    ("llama-factory", FULL_FACTORY | {"freeze_vision_tower": False}, ("full", "frozen")),
    ("llama-factory", FULL_FACTORY | {"freeze_multi_modal_projector": False}, ("frozen", "full")),
    ("ms-swift", {"freeze_vit": "false"}, ("lora", "frozen")),
    ("ms-swift", {"freeze_aligner": "false"}, ("frozen", "lora")),
    ("ms-swift", {"freeze_vit": "false", "freeze_aligner": "false", "tuner_type": "full"}, ("full", "full")),
]


@pytest.mark.parametrize(("tool", "more", "parts"), TRAINS_TOWERS)
def test_towers_and_projectors_are_trained_as_the_tool_trains_them(tool, more, parts) -> None:
    """Read in the code of LLaMA-Factory 0.9.5 and ms-swift 4.6: LLaMA-Factory's LoRA never reaches a projector."""
    made = of_tool(tool, more)
    adapter = made.recipe.adapter
    assert (adapter.vision_tower, adapter.projector) == parts
    assert made.is_whole


def of_tool(tool, more) -> Migration:
    if tool == "axolotl":
        return of_values(AXOLOTL, **more)
    return of_values(FACTORY, **more) if tool == "llama-factory" else of_script(**more)


ALONE = {
    "llama-factory": FULL_FACTORY | {"freeze_language_model": True, "freeze_multi_modal_projector": False},
    "ms-swift": {"tuner_type": "full", "freeze_llm": "true", "freeze_aligner": "false"},
}


@pytest.mark.parametrize("tool", ALONE)
def test_a_projector_alone_is_trained_where_the_language_model_is_frozen(tool) -> None:
    adapter = of_tool(tool, ALONE[tool]).recipe.adapter
    assert (adapter.language_model, adapter.vision_tower, adapter.projector) == ("frozen", "frozen", "full")


@pytest.mark.parametrize(
    ("tool", "more", "key", "words"),
    [
        (
            "llama-factory",
            {"freeze_language_model": True},
            "freeze_language_model",
            "adapters only in the vision tower",
        ),
        ("llama-factory", FULL_FACTORY | {"freeze_language_model": True}, "freeze_language_model", "nothing would be"),
        ("ms-swift", {"freeze_llm": "true"}, "freeze_llm", "adapters only in the vision tower"),
        ("ms-swift", {"tuner_type": "adalora", "freeze_vit": "false"}, "freeze_vit", "adapters of type adalora"),
        (
            "axolotl",
            {
                "adapter": None,
                "lora_target_modules": None,
                "unfrozen_parameters": ["model.language_model.*", "model.vision_tower.*"],
            },
            "unfrozen_parameters",
            "for the language model: adapter.vision_tower and adapter.projector train those parts",
        ),
    ],
)
def test_parts_that_cannot_be_trained_so_are_named_as_unsupported(tool, more, key, words) -> None:
    line = line_of(of_tool(tool, more), key)
    assert line.kind == "unsupported"
    assert line.words.startswith(words)


@pytest.mark.parametrize("tool", ["axolotl", "llama-factory", "ms-swift"])
def test_modules_beside_an_adapter_are_not_those_of_the_vision_tower(tool) -> None:
    key = {"axolotl": "lora_modules_to_save", "llama-factory": "additional_target"}.get(tool, "modules_to_save")
    modules = {"lm_head": "carried", "multi_modal_projector": "carried", "vision_tower": "unsupported"}
    for module, kind in modules.items():
        if tool == "ms-swift":
            made = of_script(**{key: module})
        else:
            made = of_values(AXOLOTL if tool == "axolotl" else FACTORY, **{key: [module]})
        assert line_of(made, key).kind == kind
        assert made.recipe.adapter.modules_to_save == ([module] if kind == "carried" else None)


def test_rates_of_frozen_towers_have_no_effect() -> None:
    made = of_script(vit_lr="1e-5", aligner_lr="1e-5")
    assert made.is_whole
    assert line_of(made, "vit_lr").words.startswith("no effect: the vision tower and the projector are frozen")
    assert made.recipe.train.learning_rates is None


def test_rates_of_trained_towers_are_those_of_parameters_by_their_names() -> None:
    made = of_script(vit_lr="1e-5", aligner_lr="2e-5", freeze_vit="false", freeze_aligner="false")
    assert made.is_whole
    rates = {
        "model.visual.blocks.0.attn.qkv.weight": 1e-5,
        "model.vision_tower.encoder.layers.0.mlp.fc1.weight": 1e-5,
        "model.visual.merger.mlp.0.weight": 2e-5,
        "model.multi_modal_projector.linear_1.weight": 2e-5,
        "model.language_model.layers.0.mlp.up_proj.weight": made.recipe.learning_rate,
    }
    assert {name: rate_of(made.recipe, name, 2, 28) for name in rates} == rates


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ({"freeze_mm_modules": None}, None),
        ({"freeze_mm_modules": False}, None),
        (
            {"freeze_mm_modules": None, "lora_target_modules": ["q_proj"]},
            "Axolotl also adapts layers of the vision tower",
        ),
        ({"freeze_mm_modules": None, "lora_target_modules": None, "adapter": None}, None),
    ],
)
def test_towers_that_axolotl_trains_by_itself_are_said_to_differ(more, note) -> None:
    lines = [line for line in of_values(AXOLOTL, **more).different if line.key == "freeze_mm_modules"]
    assert [line.words.startswith(note) for line in lines] == ([True] if note else [])


def test_older_names_of_a_language_model_become_those_of_transformers_5() -> None:
    made = of_values(AXOLOTL, lora_target_modules=REGEX)
    pattern = made.recipe.adapter.target_modules
    assert re.fullmatch(pattern, "model.language_model.layers.11.self_attn.q_proj")
    assert not re.fullmatch(pattern, "model.vision_tower.encoder.layers.1.self_attn.q_proj")


def test_rows_with_images_are_packed() -> None:
    made = of_script(packing="true", attn_impl="flash_attn")
    assert made.recipe.data.packing and line_of(made, "packing").kind == "carried"
    made = of_values(FACTORY, neat_packing=True)
    assert made.recipe.data.packing and line_of(made, "neat_packing").kind == "carried"


def test_rows_with_images_are_not_streamed() -> None:
    made = of_script(streaming="true")
    assert not made.recipe.data.streaming
    assert line_of(made, "streaming").words == "data.streaming: unsupported for rows with images"


def test_columns_of_ms_swift_are_renamed_where_tunekit_has_them() -> None:
    made = of_script(columns='\'{"pics": "images", "chat": "messages"}\'')
    assert made.recipe.data.columns == {"images": "pics", "messages": "chat"}
    made = of_script(columns='\'{"text1": "query"}\'')
    assert line_of(made, "columns").kind == "unsupported"


@pytest.mark.parametrize(
    ("tool", "more", "key", "kind"),
    [
        ("llama-factory", {"crop_to_patches": True}, "crop_to_patches", "silent"),
        ("llama-factory", {"image_do_pan_and_scan": False}, "image_do_pan_and_scan", "silent"),
        ("llama-factory", {"image_resolution": 512}, "image_resolution", "unsupported"),
        ("llama-factory", {"video_fps": 2.0}, "video_fps", "silent"),
        ("ms-swift", {"head": "MAX_NUM=6"}, "MAX_NUM", "unsupported"),
        ("ms-swift", {"head": "SIZE_FACTOR=28"}, "SIZE_FACTOR", "silent"),
        ("ms-swift", {"head": "SIZE_FACTOR=14"}, "SIZE_FACTOR", "unsupported"),
        ("ms-swift", {"head": "ROOT_IMAGE_DIR=shots"}, "ROOT_IMAGE_DIR", "carried"),
        ("ms-swift", {"norm_bbox": "norm1000"}, "norm_bbox", "silent"),
        ("ms-swift", {"model_kwargs": "'{\"depth\": 3}'"}, "model_kwargs", "unsupported"),
    ],
)
def test_each_other_key_of_images_has_its_fate(tool, more, key, kind) -> None:
    made = of_values(FACTORY, **more) if tool == "llama-factory" else of_script(**more)
    assert line_of(made, key).kind == kind
    if kind == "carried":
        assert made.recipe.data.image_folder == "shots"


@pytest.mark.parametrize(
    ("model", "key", "value", "kind"),
    [
        ("OpenGVLab/InternVL3-2B-hf", "crop_to_patches", True, "decided"),
        ("OpenGVLab/InternVL3-2B-hf", "crop_to_patches", False, "unsupported"),
        ("google/gemma-3-4b-it", "image_do_pan_and_scan", True, "unsupported"),
        ("google/gemma-3-4b-it", "image_do_pan_and_scan", False, "decided"),
    ],
)
def test_parts_of_images_that_a_processor_settles_by_itself_are_named(model, key, value, kind) -> None:
    made = of_values(FACTORY, model_name_or_path=model, **{key: value})
    assert line_of(made, key).kind == kind
    own = [line for line in of_values(FACTORY, model_name_or_path=model).different if line.key == "crop_to_patches"]
    assert bool(own) == ("InternVL" in model)


def test_images_of_other_tools_are_read_and_their_towers_said_to_differ() -> None:
    trl = {"model_name_or_path": "HuggingFaceTB/SmolVLM-Instruct", "dataset_name": "me/photos", "use_peft": True}
    Path("trl.yaml").write_text(json.dumps(trl | {"max_length": 512}))
    made = migrate("trl.yaml", tool="trl")
    assert any(line.words.startswith("TRL also adapts layers of the vision tower") for line in made.different)
    torchtune = {"model": {"_component_": "torchtune.models.llama3_2_vision.llama3_2_vision_11b"}, "batch_size": 1}
    Path("tune.yaml").write_text(json.dumps(torchtune))
    with pytest.raises(RecipeError, match="images are not migrated"):
        migrate("tune.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("family", families(), ids=lambda family: family.processor + family.types.split()[0])
def test_families_have_the_processors_and_settings_that_the_table_says(family) -> None:
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as BY_TYPE

    # LLaVA's own class differs from CLIP's, which its checkpoints name, by padding alone; types without an entry take
    # what their checkpoint names.
    theirs = {type_: str(BY_TYPE[type_]) for type_ in family.types.split() if type_ in BY_TYPE and type_ != "llava"}
    assert all(family.processor in classes for classes in theirs.values()), theirs
    name = family.processor if hasattr(transformers, family.processor) else f"{family.processor}Pil"
    own = getattr(transformers, name)
    names = set(own.valid_kwargs.__annotations__)
    needed = {"pixels": {"min_pixels", "max_pixels"}, "frames": {"size"}, "fixed": set(), None: set()}[family.limits]
    assert needed | set(family.settings.split(" and ")) - {""} <= names
    if family.limits == "fixed":
        assert "longest_edge" not in own.size
    if family.limits == "frames":
        assert own.temporal_patch_size == 2
    if family.side == 28:
        assert own.patch_size * own.merge_size == 28
