"""A tiny Voxtral in the files of the real ones: Mistral's own tokenizer file, and the processor's settings alone."""

import base64
import json
from pathlib import Path
from typing import Any

from tests.audio import with_random_weights
from tests.vision import TEXT

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words of Mistral's tokenizers of this format."""

SPECIAL = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    3: "[INST]",
    4: "[/INST]",
    5: "[AVAILABLE_TOOLS]",
    6: "[/AVAILABLE_TOOLS]",
    7: "[TOOL_RESULTS]",
    8: "[/TOOL_RESULTS]",
    9: "[TOOL_CALLS]",
    10: "[IMG]",
    11: "<pad>",
    12: "[IMG_BREAK]",
    13: "[IMG_END]",
    14: "[PREFIX]",
    15: "[MIDDLE]",
    16: "[SUFFIX]",
    17: "[SYSTEM_PROMPT]",
    18: "[/SYSTEM_PROMPT]",
    19: "[TOOL_CONTENT]",
    24: "[AUDIO]",
    25: "[BEGIN_AUDIO]",
    32: "[ARGS]",
    33: "[CALL_ID]",
    34: "[TRANSCRIBE]",
}
"""Tokens by their ids; the processor knows that of a clip by its id."""

NUM_SPECIAL = 40
PIECES = [" t", "he", " the", "in", "er", " a", "an", "re", "on", " w", " what", "ing", "at", "wh", "hat", " r", "ed"]

CHUNK_TOKENS = 30
"""Tokens of a chunk of 30 seconds; 375 in the real ones."""

AUDIO: dict[str, Any] = {
    "hidden_size": 16,
    # The projector reads so many of the tower's values as one token.
    "intermediate_size": 1500 * 16 // CHUNK_TOKENS,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 16,
    "max_source_positions": 1500,
}


def save_tekken(folder: Path, version: str = "v7") -> Path:
    """Write a tokenizer of bytes and a few pieces in Mistral's format, and return its file."""
    words = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode(errors="replace")}
        for rank, word in enumerate(words)
    ]
    special = [
        {"rank": rank, "token_str": SPECIAL.get(rank, f"<SPECIAL_{rank}>"), "is_control": True}
        for rank in range(NUM_SPECIAL)
    ]
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(words),
            "default_vocab_size": len(words) + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": version,
        },
        "vocab": vocabulary,
        "special_tokens": special,
        "audio": {
            "sampling_rate": 16_000,
            "frame_rate": CHUNK_TOKENS / 30,
            "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
            "chunk_length_s": 30.0,
        },
        "version": 1,
        "type": "Tekken",
    }
    file = folder / "tekken.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def save_tiny_voxtral(folder: Path, version: str = "v7") -> Path:
    """Save a Voxtral of random weights, the same ones each time, as the hub has them, and return its folder."""
    import transformers as t

    vocab_size = 256 + len(PIECES) + NUM_SPECIAL
    ids = {"vocab_size": vocab_size, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11}
    config = t.VoxtralConfig(audio_config=AUDIO, text_config={"model_type": "llama", **TEXT, **ids}, audio_token_id=24)
    with_random_weights(t.AutoModelForMultimodalLM, config).save_pretrained(folder)
    t.WhisperFeatureExtractor(feature_size=16).save_pretrained(folder)
    settings = folder / "preprocessor_config.json"
    values = json.loads(settings.read_text()) | {"processor_class": "VoxtralProcessor"}
    settings.write_text(json.dumps(values), encoding="utf-8")
    save_tekken(folder, version)
    return folder


def expected(model: Path, messages: list[dict[str, Any]], clips: Path) -> tuple[Any, Any, Any]:
    """Return tokens `(1, seq)`, labels `(1, seq)` and features `(chunks, mel bins, frames)` of a chat, by the format.

    Each text is tokenized by itself between the format's tokens, and blanks at the end of answers are dropped.

    Args:
        model: Folder of the model.
        messages: The chat.
        clips: Folder of its clips.
    """
    import torch
    from transformers import VoxtralProcessor, WhisperFeatureExtractor
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    from tests.training.test_vision import samples_of

    tokenizer = convert_tekken_tokenizer(str(model / "tekken.json"), chat_template="")
    processor = VoxtralProcessor(WhisperFeatureExtractor.from_pretrained(model), tokenizer)
    settings = dict(VoxtralProcessor.audio_kwargs)

    def encoded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids, labels, features = [1], [-100], []
    for message in messages:
        content = message["content"]
        piece: list[int] = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                answers = message["role"] == "assistant"
                piece += encoded(part["text"].rstrip(" ") if answers else part["text"])
            else:
                samples = samples_of(clips / (part.get("audio") or part["path"]))
                features.append(processor._retrieve_input_features([samples], **settings))
                piece += [25] + [24] * CHUNK_TOKENS * (-(-len(samples) // 480_000))
        before, behind = {"system": ([17], [18]), "user": ([3], [4]), "assistant": ([], [2])}[message["role"]]
        piece = before + piece + behind
        ids += piece
        labels += piece if message["role"] == "assistant" else [-100] * len(piece)
    return torch.tensor([ids]), torch.tensor([labels]), torch.cat(features) if features else None
