"""Tiny audio-language models of real architectures with their real processors, and rows of clips."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.omni import qwen2_5_omni
from tests.vision import COLOURS, byte_tokenizer, text_config, with_random_weights

TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 16,
}
SAMPLE_RATE = 16_000


def _whisper(seconds: int = 3) -> Any:
    """Return an extractor of features in windows of a few seconds."""
    import transformers as t

    return t.WhisperFeatureExtractor(feature_size=16, chunk_length=seconds)


def _whisper_tower(**changes: Any) -> dict[str, Any]:
    tower = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    return tower | {"num_mel_bins": 16, "max_source_positions": 150} | changes


def _qwen2_audio() -> tuple[Any, Any]:
    import transformers as t

    names = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    tokenizer = byte_tokenizer("<|audio_bos|><|AUDIO|><|audio_eos|>", *names)
    processor = t.Qwen2AudioProcessor(_whisper(), tokenizer, chat_template=tokenizer.chat_template)
    config = t.Qwen2AudioConfig(
        audio_config=_whisper_tower(),
        text_config={"model_type": "qwen2", **text_config(tokenizer)},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    return config, processor


def _audioflamingo3() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = byte_tokenizer("<sound>", "<sound>")
    processor = t.AudioFlamingo3Processor(_whisper(), tokenizer, chat_template=tokenizer.chat_template, max_audio_len=6)
    config = t.AudioFlamingo3Config(
        audio_config={**TOWER, "max_source_positions": 150},
        text_config={"model_type": "qwen2", **text_config(tokenizer)},
        audio_token_id=tokenizer.convert_tokens_to_ids("<sound>"),
    )
    return config, processor


def _glmasr() -> tuple[Any, Any]:
    import transformers as t

    names = ("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>")
    tokenizer = byte_tokenizer("<|begin_of_audio|><|pad|><|end_of_audio|>", *names)
    processor = t.GlmAsrProcessor(_whisper(4), tokenizer, chat_template=tokenizer.chat_template, max_audio_len=8)
    config = t.GlmAsrConfig(
        # The projector reads several of the tower's states as one.
        audio_config={
            **TOWER,
            "intermediate_size": 64,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 200,
        },
        text_config={"model_type": "llama", **text_config(tokenizer)},
        audio_token_id=tokenizer.convert_tokens_to_ids("<|pad|>"),
    )
    return config, processor


def _granite_speech() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = byte_tokenizer("<|audio|>", "<|audio|>")
    extractor = t.GraniteSpeechFeatureExtractor(projector_window_size=4, projector_downsample_rate=2)
    processor = t.GraniteSpeechProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template)
    config = t.GraniteSpeechConfig(
        encoder_config={
            "input_dim": 160,
            "num_layers": 2,
            "hidden_dim": 16,
            "feedforward_mult": 2,
            "num_heads": 2,
            "dim_head": 8,
            "output_dim": 8,
            "context_size": 20,
            "max_pos_emb": 32,
            "conv_kernel_size": 5,
            "dropout": 0.0,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "encoder_hidden_size": 16,
            "cross_attention_frequency": 1,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        text_config={"model_type": "granite", **text_config(tokenizer)},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|audio|>"),
        has_lora_adapter=False,
        downsample_rate=2,
        window_size=4,
        tie_word_embeddings=False,
    )
    return config, processor


_GEMMA = {
    "boi_token": "<start_of_image>",
    "boa_token": "<start_of_audio>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
    "eoa_token": "<end_of_audio>",
    "audio_token": "<audio_soft_token>",
}


def _gemma_tokenizer() -> Any:
    tokenizer = byte_tokenizer("", *_GEMMA.values(), **_GEMMA)
    either = "{% if part['type'] == 'image' %}<image_soft_token>{% elif part['type'] == 'audio' %}<audio_soft_token>"
    tokenizer.chat_template = tokenizer.chat_template.replace("{% if part['type'] != 'text' %}", either)
    return tokenizer


def _gemma_ids(tokenizer: Any) -> dict[str, int]:
    return {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in _GEMMA.items()}


def _gemma3n() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = _gemma_tokenizer()
    processor = t.Gemma3nProcessor(
        t.Gemma3nAudioFeatureExtractor(feature_size=16),
        t.SiglipImageProcessorPil(size={"height": 32, "width": 32}),
        tokenizer,
        chat_template=tokenizer.chat_template,
        audio_seq_length=12,
        image_seq_length=4,
    )
    # The last tokens are embedded by the towers' own tables, those of pictures before those of audio.
    num_text = tokenizer.eoi_token_id
    config = t.Gemma3nConfig(
        text_config=text_config(
            tokenizer,
            num_hidden_layers=4,
            vocab_size_per_layer_input=num_text,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            laurel_rank=4,
            altup_num_inputs=2,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
            activation_sparsity_pattern=[0.0] * 4,
        ),
        vision_config={
            "architecture": "test_vit",
            "hidden_size": 64,
            "vocab_size": 2,
            "vocab_offset": num_text,
        },
        audio_config={
            "hidden_size": 16,
            "input_feat_size": 16,
            "vocab_size": 2,
            "vocab_offset": tokenizer.eoa_token_id,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 2,
            "conf_conv_kernel_size": 3,
            "sscp_conv_channel_size": (8, 4),
        },
        audio_soft_tokens_per_image=12,
        vision_soft_tokens_per_image=4,
        **_gemma_ids(tokenizer),
    )
    return config, processor


def _gemma4() -> tuple[Any, Any]:
    import transformers as t

    tokenizer = _gemma_tokenizer()
    # The processor adds a token, too.
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video|>"]}, replace_extra_special_tokens=False)
    processor = t.Gemma4Processor(
        t.Gemma4AudioFeatureExtractor(feature_size=16),
        t.Gemma4ImageProcessor(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70),
        tokenizer,
        t.Gemma4VideoProcessor(patch_size=8, pooling_kernel_size=2),
        chat_template=tokenizer.chat_template,
    )
    config = t.Gemma4Config(
        text_config=text_config(
            tokenizer,
            vocab_size_per_layer_input=len(tokenizer),
            hidden_size_per_layer_input=8,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 256,
        },
        audio_config={
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "subsampling_conv_channels": (16, 4),
            "conv_kernel_size": 3,
            "output_proj_dims": 16,
            "use_clipped_linears": False,
        },
        **_gemma_ids(tokenizer) | {"video_token_id": tokenizer.convert_tokens_to_ids("<|video|>")},
    )
    return config, processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_audio": _qwen2_audio,
    "audioflamingo3": _audioflamingo3,
    "glmasr": _glmasr,
}
if find_spec("torchaudio") is not None:
    FAMILIES["granite_speech"] = _granite_speech
if find_spec("timm") is not None:
    FAMILIES["gemma3n"] = _gemma3n
if find_spec("torchvision") is not None:
    FAMILIES |= {"gemma4": _gemma4, "qwen2_5_omni": qwen2_5_omni}


def auto_class(config: Any) -> Any:
    """Return the auto class that builds the whole model of a configuration."""
    from transformers import AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if config.model_type == "audioflamingo3" else AutoModelForMultimodalLM


def tiny_audio_model(family: str) -> tuple[Any, Any]:
    """Return a model of random weights of a family, the same ones each time, and its processor."""
    config, processor = FAMILIES[family]()
    return with_random_weights(auto_class(config), config), processor


def save_tiny_audio_model(folder: Path, family: str) -> Path:
    """Save such a model with its processor, and return its folder."""
    model, processor = tiny_audio_model(family)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_clip(file: Path, seconds: float, *, rate: int = SAMPLE_RATE, channels: int = 1, seed: int = 0) -> None:
    """Write noise as an audio file of the format of its name."""
    import numpy as np
    import soundfile

    noise = np.random.default_rng(seed).standard_normal((round(seconds * rate), channels))
    soundfile.write(file, (0.1 * noise).astype(np.float32), rate)


def save_audio_rows(folder: Path, num: int = 8, *, without: int | None = 3, twice: bool = True) -> Path:
    """Write clips of several lengths and rates, and rows that ask what is heard; return the file.

    One row has no clip, and some have a second one behind the beginning of their question.
    """
    folder.mkdir(exist_ok=True)
    lines = []
    for number in range(num):
        parts: Any = "say hi"
        if number != without:
            rate = (16_000, 16_000, 22_050)[number % 3]
            save_clip(folder / f"{number}.wav", 0.3 + 0.21 * (number % 3), rate=rate, seed=number)
            parts = [{"type": "audio", "audio": f"{number}.wav"}, {"type": "text", "text": "what?"}]
            if number % 4 == 1 and twice:
                save_clip(folder / f"{number}-second.flac", 0.25, channels=2, seed=10 + number)
                parts[:0] = [{"type": "text", "text": "listen: "}, {"type": "audio", "path": f"{number}-second.flac"}]
        answer = {"role": "assistant", "content": COLOURS[number % len(COLOURS)]}
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}, answer]}) + "\n")
    file = folder / "rows.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    return file


ALONE = ("audioflamingo3", "glmasr")
"""Families whose processors take one clip for each text."""
