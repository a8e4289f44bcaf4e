"""Tiny vision-language models of real architectures with their real processors, and rows of pictures."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.tiny import make_tokenizer

PARTS_TEMPLATE = (
    "{{% for message in messages %}}{{{{ '<|im_start|>' + message['role'] + '\n' }}}}"
    "{{% for part in message['content'] %}}{{% if part['type'] != 'text' %}}{mark}"
    "{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}{{{{ '<|im_end|>\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
)
"""ChatML whose contents are lists of parts, with the text that stands for a medium."""

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def byte_tokenizer(mark: str, *tokens: str, **named: str) -> Any:
    """The byte tokenizer with tokens for media, which `named` gives their names on it, and one text for a medium."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", *tokens]}, replace_extra_special_tokens=False
    )
    for name, token in named.items():
        tokenizer._set_model_specific_special_tokens({name: token})
    tokenizer.chat_template = PARTS_TEMPLATE.format(mark=mark)
    return tokenizer


def text_config(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    """Settings of a tiny text decoder for a tokenizer."""
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return TEXT | ids | changes


def _llava() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = byte_tokenizer("<image>", "<image>")
    processor = t.LlavaProcessor(
        t.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    config = t.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **TOWER, "projection_dim": 16},
        text_config={"model_type": "llama", **text_config(tokenizer)},
        image_token_id=processor.image_token_id,
        vision_feature_layer=-1,
    )
    return config, processor


def _llava_next() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = byte_tokenizer("<image>", "<image>")
    grid = [[28, 56], [56, 28], [56, 56]]
    processor = t.LlavaNextProcessor(
        t.LlavaNextImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=grid
        ),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    config = t.LlavaNextConfig(
        vision_config={"model_type": "clip_vision_model", **TOWER, "projection_dim": 16},
        text_config={"model_type": "mistral", **text_config(tokenizer)},
        image_token_id=processor.image_token_id,
        image_grid_pinpoints=grid,
        vision_feature_layer=-1,
    )
    return config, processor


def _idefics3() -> tuple[Any, Any]:
    import transformers as t

    names = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    places = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer = byte_tokenizer("<image>", *names, *places)
    processor = t.Idefics3Processor(
        t.Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
        tokenizer,
        image_seq_len=1,
        chat_template=tokenizer.chat_template,
    )
    config = t.Idefics3Config(
        vision_config=TOWER,
        text_config={"model_type": "llama", **text_config(tokenizer)},
        image_token_id=processor.image_token_id,
        scale_factor=2,
    )
    return config, processor


def _mllama() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = byte_tokenizer("<|image|>", "<|image|>", "<|begin_of_text|>", "<|python_tag|>")
    # Its processor begins a text with it, and the model's own template does too.
    tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    processor = t.MllamaProcessor(
        t.MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4),
        tokenizer,
        chat_template=tokenizer.chat_template,
    )
    vision = {name: value for name, value in TOWER.items() if name != "num_attention_heads"}
    config = t.MllamaConfig(
        vision_config={
            **vision,
            "attention_heads": 2,
            "num_global_layers": 1,
            "intermediate_layers_indices": [0, 1],
            "max_num_tiles": 4,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
            "vision_output_dim": 48,
        },
        text_config=text_config(
            tokenizer, num_hidden_layers=3, cross_attention_layers=[1], bos_token_id=tokenizer.bos_token_id
        ),
        image_token_index=processor.image_token_id,
    )
    return config, processor


def _gemma3() -> tuple[Any, Any]:
    import transformers as t

    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = byte_tokenizer("<start_of_image>", *names.values(), **names)
    processor = t.Gemma3Processor(
        t.Gemma3ImageProcessorPil(size={"height": 28, "width": 28}),
        tokenizer,
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    )
    config = t.Gemma3Config(
        vision_config={**TOWER, "vision_use_head": False},
        text_config=text_config(tokenizer, sliding_window=16),
        mm_tokens_per_image=4,
        image_token_id=tokenizer.image_token_id,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
    )
    return config, processor


def _aya_vision() -> tuple[Any, Any]:
    import transformers as t

    marks = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>")
    tiles = ("TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 5)))
    tokenizer = byte_tokenizer("<image>", "<image>", *marks, *tiles)
    processor = t.AyaVisionProcessor(
        t.GotOcr2ImageProcessorPil(
            size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4
        ),
        tokenizer,
        patch_size=14,
        img_size=28,
        chat_template=tokenizer.chat_template,
    )
    config = t.AyaVisionConfig(
        vision_config={"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False},
        text_config={"model_type": "cohere2", **text_config(tokenizer, sliding_window=16), "sliding_window_pattern": 2},
        downsample_factor=1,
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
    )
    return config, processor


def _ovis2() -> tuple[Any, Any]:
    import transformers as t

    marks = ("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    tokenizer = byte_tokenizer("<image>", "<image>", *marks)
    processor = t.Ovis2Processor(
        t.Ovis2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4),
        tokenizer,
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    )
    ids = tokenizer.convert_tokens_to_ids(list(marks))
    config = t.Ovis2Config(
        vision_config={**TOWER, "vocab_size": 12, "num_visual_indicator_tokens": 5},
        text_config={"model_type": "qwen2", **text_config(tokenizer)},
        image_token_id=ids[0],
        visual_indicator_token_ids=ids[1:],
        vocab_size=len(tokenizer),
        hidden_size=TEXT["hidden_size"],
    )
    return config, processor


def _qwen_processor(cls: Any, video: Any, **settings: Any) -> Any:
    """Return a processor of Qwen-VL's kind: its class, the class of its videos, and settings of its images."""
    import transformers as t

    pixels, tokenizer = QWEN_PIXELS | settings, _qwen_tokenizer()
    return cls(t.Qwen2VLImageProcessor(**pixels), tokenizer, video(**pixels), chat_template=tokenizer.chat_template)


def _qwen2_vl() -> tuple[Any, Any]:
    import transformers as t

    processor = _qwen_processor(t.Qwen2VLProcessor, t.Qwen2VLVideoProcessor)
    tokenizer = processor.tokenizer
    config = t.Qwen2VLConfig(
        vision_config={"embed_dim": 16, "hidden_size": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2},
        text_config=text_config(tokenizer, rope_parameters=QWEN_ROPE),
        **_qwen_ids(processor),
    )
    return config, processor


def _qwen3_5() -> tuple[Any, Any]:
    import transformers as t

    processor = _qwen_processor(t.Qwen3VLProcessor, t.Qwen3VLVideoProcessor, patch_size=16)
    tokenizer = processor.tokenizer
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    rope = QWEN_ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    config = t.Qwen3_5Config(
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32},
            "num_position_embeddings": 64,
        },
        text_config=text_config(
            tokenizer,
            **linear,
            linear_num_value_heads=2,
            layer_types=["linear_attention", "full_attention"],
            rope_parameters=rope,
        ),
        **_qwen_ids(processor),
    )
    return config, processor


def _qwen2_5_vl() -> tuple[Any, Any]:
    import transformers as t

    processor = _qwen_processor(t.Qwen2_5_VLProcessor, t.Qwen2VLVideoProcessor)
    tokenizer = processor.tokenizer
    tower = {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
    config = t.Qwen2_5_VLConfig(
        vision_config=tower | {"window_size": 56, "fullatt_block_indexes": [1]},
        text_config=text_config(tokenizer, rope_parameters=QWEN_ROPE, num_key_value_heads=2),
        **_qwen_ids(processor),
    )
    return config, processor


def _qwen3_vl() -> tuple[Any, Any]:
    import transformers as t

    processor = _qwen_processor(t.Qwen3VLProcessor, t.Qwen3VLVideoProcessor, patch_size=16)
    tokenizer = processor.tokenizer
    tower = {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
    config = t.Qwen3VLConfig(
        vision_config=tower | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        text_config=text_config(tokenizer, rope_parameters=QWEN_ROPE | {"mrope_interleaved": True}),
        **_qwen_ids(processor),
    )
    return config, processor


QWEN_PIXELS: dict[str, Any] = {"patch_size": 14, "merge_size": 2, "min_pixels": 56 * 56, "max_pixels": 4 * 56 * 56}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def _qwen_tokenizer() -> Any:
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    return byte_tokenizer("<|vision_start|><|image_pad|><|vision_end|>", *names)


def _qwen_ids(processor: Any) -> dict[str, int]:
    tokenizer = processor.tokenizer
    return {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }


def _mistral3() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = byte_tokenizer("[IMG]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    processor = t.PixtralProcessor(
        t.PixtralImageProcessor(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14}),
        tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
    )
    config = t.Mistral3Config(
        vision_config={"model_type": "pixtral", **TOWER, "head_dim": 8},
        text_config={"model_type": "mistral", **text_config(tokenizer)},
        image_token_id=processor.image_token_id,
        vision_feature_layer=-1,
        spatial_merge_size=2,
    )
    return config, processor


def _internvl() -> tuple[Any, Any]:
    import transformers as t

    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = byte_tokenizer("<IMG_CONTEXT>", *names.values(), "<video>", video_token="<video>", **names)
    processor = t.InternVLProcessor(
        t.GotOcr2ImageProcessor(size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4),
        tokenizer,
        t.InternVLVideoProcessor(size={"height": 28, "width": 28}),
        image_seq_length=1,
        chat_template=tokenizer.chat_template,
    )
    sizes = {name: [value, value] if name in ("image_size", "patch_size") else value for name, value in TOWER.items()}
    config = t.InternVLConfig(
        vision_config=sizes,
        text_config={"model_type": "qwen2", **text_config(tokenizer)},
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=1,
    )
    return config, processor


def _glm4v() -> tuple[Any, Any]:
    import transformers as t

    names = (
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|image|>",
        "<|video|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
    )
    tokenizer = byte_tokenizer("<|begin_of_image|><|image|><|end_of_image|>", *names)
    tokenizer._set_model_specific_special_tokens({"image_token": "<|image|>", "video_token": "<|video|>"})
    edges = {"size": {"shortest_edge": 56 * 56, "longest_edge": 4 * 56 * 56}}
    processor = t.Glm4vProcessor(
        t.Glm4vImageProcessor(patch_size=14, merge_size=2, **edges),
        tokenizer,
        t.Glm4vVideoProcessor(patch_size=14, merge_size=2),
        chat_template=tokenizer.chat_template,
    )
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(names)), strict=True))
    config = t.Glm4vConfig(
        vision_config={"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32},
        text_config=text_config(tokenizer, rope_parameters=QWEN_ROPE),
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
    )
    return config, processor


def _qwen2_5_omni() -> tuple[Any, Any]:
    from tests.omni import qwen2_5_omni

    return qwen2_5_omni()


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "idefics3": _idefics3,
    "mllama": _mllama,
    "gemma3": _gemma3,
    "aya_vision": _aya_vision,
    "ovis2": _ovis2,
}
if find_spec("torchvision") is not None:
    FAMILIES |= {
        "qwen2_5_vl": _qwen2_5_vl,
        "qwen3_vl": _qwen3_vl,
        "qwen2_vl": _qwen2_vl,
        "qwen2_5_omni": _qwen2_5_omni,
        "qwen3_5": _qwen3_5,
        "mistral3": _mistral3,
        "internvl": _internvl,
        "glm4v": _glm4v,
    }


def tiny_vision_model(family: str) -> tuple[Any, Any]:
    """Return a model of random weights of a family, the same ones each time, and its processor."""
    from transformers import AutoModelForImageTextToText

    config, processor = FAMILIES[family]()
    return with_random_weights(AutoModelForImageTextToText, config), processor


def with_random_weights(auto_class: Any, config: Any) -> Any:
    """Return a model of random weights, the same ones each time, none of which is so small that nothing comes of it."""
    import torch

    torch.manual_seed(0)
    model = auto_class.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5) if parameter.ndim > 1 else parameter.add_(0.1 * noise)
    return model


def save_tiny_vision_model(folder: Path, family: str) -> Path:
    """Save such a model with its processor, and return its folder."""
    model, processor = tiny_vision_model(family)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


COLOURS = ("red", "green", "blue", "yellow")


def save_rows(folder: Path, num: int = 8, *, without: int | None = 3) -> Path:
    """Write pictures of several sizes and rows that ask for their colour, one of them without; return the file.

    Some pictures stand before the question, and others behind its beginning.
    """
    from PIL import Image

    folder.mkdir(exist_ok=True)
    lines = []
    for number in range(num):
        colour = COLOURS[number % len(COLOURS)]
        asked: Any = "say hi"
        if number != without:
            size = (20 + 7 * (number % 3), 30 + 11 * (number % 2))
            Image.effect_noise(size, 60).convert("RGB").save(folder / f"{number}.png")
            asked = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "what colour?"}]
            if number % 4 == 1:
                asked.insert(0, {"type": "text", "text": "look: "})
        answer = {"role": "assistant", "content": colour}
        lines.append(json.dumps({"messages": [{"role": "user", "content": asked}, answer]}) + "\n")
    file = folder / "rows.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    return file


def save_pairs(folder: Path, num: int = 8, *, without: int | None = 3) -> Path:
    """Write pictures of several sizes and pairs of answers about them, one pair without; return the file."""
    rows = [json.loads(line) for line in save_rows(folder, num, without=without).read_text().splitlines()]
    lines = []
    for number, row in enumerate(rows):
        asked, answered = row["messages"]
        worse = COLOURS[(number + 1) % len(COLOURS)] + "ish"
        pair = {"prompt": [asked], "chosen": [answered], "rejected": [{"role": "assistant", "content": worse}]}
        lines.append(json.dumps(pair) + "\n")
    file = folder / "pairs.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    return file


def save_rated(folder: Path, num: int = 8, *, without: int | None = 3) -> Path:
    """Write pictures of several sizes and answers about them that are good or bad, one without; return the file."""
    pairs = [json.loads(line) for line in save_pairs(folder, num, without=without).read_text().splitlines()]
    lines = []
    for number, pair in enumerate(pairs):
        is_good = number % 3 > 0
        completion = pair["chosen" if is_good else "rejected"]
        lines.append(json.dumps({"prompt": pair["prompt"], "completion": completion, "label": is_good}) + "\n")
    file = folder / "rated.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    return file


def is_of_tower(name: str) -> bool:
    """Return whether a parameter or module of any of the families is in its towers or projectors."""
    return any(
        part in name for part in ("vision", "visual", "audio", "encoder", "projector", "connector", "image_newline")
    )


def as_trl(rows: list[dict[str, Any]], folder: Path, *columns: str) -> list[dict[str, Any]]:
    """Return rows as TRL reads them: decoded pictures in a column, and contents in parts.

    Args:
        rows: Rows with a `prompt` of one message, whose pictures are files.
        folder: Where the pictures are.
        columns: Columns of answers.
    """
    from PIL import Image

    made = []
    for row in rows:
        content = row["prompt"][0]["content"]
        files = [folder / part["image"] for part in content if "image" in part]
        parts = [{name: value for name, value in part.items() if name != "image"} for part in content]
        answers = {
            name: [{"role": "assistant", "content": [{"type": "text", "text": row[name][0]["content"]}]}]
            for name in columns
        }
        images = [Image.open(file).convert("RGB") for file in files]
        made.append(row | {"images": images, "prompt": [{"role": "user", "content": parts}]} | answers)
    return made
