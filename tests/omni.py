"""A tiny Qwen2.5-Omni: the model that writes alone, its processor, and checkpoints with the model that speaks too."""

import json
from pathlib import Path
from typing import Any

from tests.vision import QWEN_PIXELS, QWEN_ROPE, byte_tokenizer, text_config, with_random_weights

TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
"""Special tokens by their names on the tokenizer."""

_PARTS = (
    "{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif part['type'] != 'text' %}"
)


def qwen2_5_omni() -> tuple[Any, Any]:
    """Return the configuration of the model that writes, which Qwen calls its thinker, and the processor."""
    import transformers as t

    tokenizer = byte_tokenizer("<|vision_bos|><|IMAGE|><|vision_eos|>", *TOKENS.values(), **TOKENS)
    tokenizer.chat_template = tokenizer.chat_template.replace("{% if part['type'] != 'text' %}", _PARTS)
    processor = t.Qwen2_5OmniProcessor(
        t.Qwen2VLImageProcessor(**QWEN_PIXELS),
        t.Qwen2VLVideoProcessor(**QWEN_PIXELS),
        t.WhisperFeatureExtractor(feature_size=16, chunk_length=3),
        tokenizer,
        chat_template=tokenizer.chat_template,
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    tower = {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
    config = t.Qwen2_5OmniThinkerConfig(
        audio_config={
            "d_model": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "num_mel_bins": 16,
            "max_source_positions": 150,
            # Half the frames that the tower sees at once, so that clips have several.
            "n_window": 10,
            "output_dim": 32,
        },
        vision_config=tower | {"window_size": 56, "fullatt_block_indexes": [1]},
        text_config=text_config(tokenizer, rope_parameters=QWEN_ROPE),
        audio_token_index=ids["audio_token"],
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
    )
    return config, processor


def save_whole_omni(folder: Path) -> Path:
    """Save a model that writes and speaks with its processor, in the files of published ones, and return its folder."""
    import torch
    import transformers as t

    thinker, processor = qwen2_5_omni()
    talker = {
        "vocab_size": 40,
        "embedding_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": QWEN_ROPE,
    }
    dit = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "emb_dim": 8,
        "num_embeds": 41,
        "mel_dim": 8,
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_channels": [16, 16, 16, 16, 32],
        "enc_attention_channels": 8,
        "enc_res2net_scale": 2,
        "enc_se_channels": 8,
        "look_ahead_layers": [0],
        "look_backward_layers": [0],
    }
    vocoder = {
        "mel_dim": 8,
        "upsample_initial_channel": 16,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
        "upsample_rates": [5, 3],
        "upsample_kernel_sizes": [11, 7],
    }
    config = t.Qwen2_5OmniConfig(
        thinker_config=thinker.to_dict(),
        talker_config=talker,
        token2wav_config={"dit_config": dit, "bigvgan_config": vocoder},
    )
    with_random_weights(t.AutoModelForMultimodalLM, config).save_pretrained(folder)
    torch.save({"Chelsie": {"cond": torch.zeros(1, 8)}}, folder / "spk_dict.pt")
    processor.save_pretrained(folder)
    own = json.loads((folder / "config.json").read_text())
    own["architectures"] = ["Qwen2_5OmniModel"]
    own["thinker_config"]["architectures"] = ["Qwen2OmniNaViTThinkerForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(own))
    # Written by older versions of Transformers: settings of all parts in one file, and none of videos.
    (folder / "processor_config.json").unlink()
    parts = {**processor.image_processor.to_dict(), **processor.feature_extractor.to_dict()}
    names = {"image_processor_type": "Qwen2VLImageProcessor", "feature_extractor_type": "WhisperFeatureExtractor"}
    whole = {**parts, **names, "processor_class": type(processor).__name__}
    (folder / "preprocessor_config.json").write_text(json.dumps(whole))
    return folder
