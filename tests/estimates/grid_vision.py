"""Training steps on pictures, of well-known models by their config.json on the hub, cut to a few layers.

None of them fitted a formula: those were derived on other sizes and other pictures. Each layer more adds the same to
weights and to what is kept, as `oracle.drawn_deep` says.
"""

from typing import Any

from tests.estimates.oracle_vision import VisionStep
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

QWEN_2_5_VL_7B: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 3, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "fullatt_block_indexes": [2],
    },
    "text_config": {
        "model_type": "qwen2_5_vl_text", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 5,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    },
}  # fmt: skip

QWEN_2_5_OMNI_7B: dict[str, Any] = {
    "model_type": "qwen2_5_omni_thinker",
    "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
    "audio_token_index": 151646,
    "image_token_index": 151655,
    "video_token_index": 151656,
    "vision_start_token_id": 151652,
    "audio_config": {"encoder_layers": 3, "output_dim": 3584},
    "vision_config": {**QWEN_2_5_VL_7B["vision_config"], "model_type": "qwen2_5_omni_vision_encoder"},
    "text_config": {
        **QWEN_2_5_VL_7B["text_config"], "model_type": "qwen2_5_omni_text", "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}  # fmt: skip

GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "image_token_id": 262144,
    "boi_token_id": 255999,
    "eoi_token_id": 256000,
    "mm_tokens_per_image": 256,
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
        "num_attention_heads": 16, "num_hidden_layers": 3, "patch_size": 14, "vision_use_head": False,
    },
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "sliding_window": 1024,
    },
}  # fmt: skip

SMOLVLM_2B: dict[str, Any] = {
    "model_type": "smolvlm",
    "architectures": ["SmolVLMForConditionalGeneration"],
    "image_token_id": 49190,
    "scale_factor": 3,
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "smolvlm_vision", "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
        "num_attention_heads": 16, "num_hidden_layers": 3, "patch_size": 14,
    },
    "text_config": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 5,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 64, "vocab_size": 49280, "pad_token_id": 2,
    },
}  # fmt: skip

LLAMA_3_2_11B: dict[str, Any] = {
    "model_type": "mllama",
    "architectures": ["MllamaForConditionalGeneration"],
    "image_token_index": 128256,
    "vision_config": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 4, "num_global_layers": 1,
        "attention_heads": 16, "patch_size": 14, "image_size": 560, "max_num_tiles": 4,
        "intermediate_layers_indices": [0, 1, 2, 3], "vision_output_dim": 6400,
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    },
    "text_config": {
        "model_type": "mllama_text_model", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 6,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "cross_attention_layers": [1, 4],
        "pad_token_id": 128004,
    },
}  # fmt: skip

LORA = LoraAdapter(rank=16)
TOWER_LORA = LoraAdapter(rank=16, vision_tower="lora", projector="lora")
WHOLE = FullAdapter(vision_tower="full", projector="full")

STEPS = {
    "qwen2.5-vl-7b lora, one large picture": VisionStep(
        QWEN_2_5_VL_7B, LORA, (((60, 80),),), 1300, checkpointing=True
    ),
    "qwen2.5-vl-7b lora, two pictures": VisionStep(QWEN_2_5_VL_7B, LORA, (((36, 54), (20, 20)),), 1024),
    "qwen2.5-vl-7b full, two rows": VisionStep(
        QWEN_2_5_VL_7B, FullAdapter(), (((40, 60),), ((28, 38),)), 768, checkpointing=True, accumulates=True
    ),
    "qwen2.5-vl-7b lora, packed": VisionStep(
        QWEN_2_5_VL_7B, LORA, (((36, 54), (20, 20)),), 2048, checkpointing=True, documents=2
    ),
    "qwen2.5-omni-7b lora, one large picture": VisionStep(
        QWEN_2_5_OMNI_7B, LORA, (((60, 80),),), 1300, checkpointing=True
    ),
    "qwen2.5-omni-7b lora, two pictures": VisionStep(QWEN_2_5_OMNI_7B, LORA, (((36, 54), (20, 20)),), 1024),
    "qwen2.5-omni-7b full, two rows": VisionStep(
        QWEN_2_5_OMNI_7B, FullAdapter(), (((40, 60),), ((28, 38),)), 768, checkpointing=True, accumulates=True
    ),
    "qwen2.5-omni-7b lora, packed": VisionStep(
        QWEN_2_5_OMNI_7B, LORA, (((36, 54), (20, 20)),), 2048, checkpointing=True, documents=2
    ),
    "qwen2.5-omni-7b lora and tower": VisionStep(QWEN_2_5_OMNI_7B, TOWER_LORA, (((44, 62), (18, 30)),), 1100),
    "gemma-3-4b lora, packed": VisionStep(GEMMA_3_4B, LORA, ((3,),), 2048, checkpointing=True, documents=2),
    "smolvlm2-2.2b lora, packed": VisionStep(SMOLVLM_2B, LORA, ((13,),), 2400, documents=3),
    "gemma-3-4b lora, three pictures": VisionStep(GEMMA_3_4B, LORA, ((3,),), 1024, checkpointing=True),
    "gemma-3-4b lora, one row": VisionStep(GEMMA_3_4B, LORA, ((1,),), 700),
    "gemma-3-4b lora": VisionStep(GEMMA_3_4B, LORA, ((1,), (1,)), 640),
    "gemma-3-4b full": VisionStep(
        GEMMA_3_4B, FullAdapter(), ((1,), (2,)), 768, checkpointing=True, trained_dtype="bfloat16"
    ),
    "llama-3.2-11b-vision lora": VisionStep(LLAMA_3_2_11B, LORA, ((1,),), 512),
    "llama-3.2-11b-vision lora, two rows": VisionStep(LLAMA_3_2_11B, LORA, ((1,), (1,)), 400, checkpointing=True),
    "llama-3.2-11b-vision full": VisionStep(LLAMA_3_2_11B, FullAdapter(), ((1,),), 512, checkpointing=True),
    "smolvlm2-2.2b lora, 17 tiles": VisionStep(SMOLVLM_2B, LORA, ((17,), (17,)), 1600, checkpointing=True),
    "smolvlm2-2.2b lora": VisionStep(SMOLVLM_2B, LORA, ((13,),), 1200, accumulates=True),
    "smolvlm2-2.2b full": VisionStep(SMOLVLM_2B, FullAdapter(), ((5,),), 700),
    "qwen2.5-vl-7b lora and tower": VisionStep(QWEN_2_5_VL_7B, TOWER_LORA, (((44, 62), (18, 30)),), 1100),
    "qwen2.5-vl-7b lora and tower, recomputed": VisionStep(
        QWEN_2_5_VL_7B, TOWER_LORA, (((50, 90),),), 1200, checkpointing=True
    ),
    "qwen2.5-vl-7b lora, tower's products": VisionStep(
        QWEN_2_5_VL_7B, LoraAdapter(rank=32, vision_tower="lora", target_modules=["qkv", "q_proj"]), (((48, 48),),), 700
    ),
    "gemma-3-4b lora and tower": VisionStep(GEMMA_3_4B, LoraAdapter(rank=8, vision_tower="lora"), ((2,),), 900),
    "gemma-3-4b full and tower": VisionStep(GEMMA_3_4B, WHOLE, ((1,), (1,)), 512, checkpointing=True),
    "smolvlm2-2.2b lora and tower": VisionStep(SMOLVLM_2B, TOWER_LORA, ((5,), (5,)), 600, accumulates=True),
    "smolvlm2-2.2b full and tower": VisionStep(SMOLVLM_2B, WHOLE, ((9,),), 1000, trained_dtype="bfloat16"),
}  # fmt: skip
