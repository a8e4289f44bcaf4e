"""Voxtral's processor with texts in which a token stands for each clip, as processors of other models take them.

Transformers' own takes clips only within a chat that mistral-common formats and tokenizes (5.24). The model reads
samples padded with silence to whole chunks of 30 seconds. Each chunk is as many tokens as the projector makes of the
encoder's states, and one token stands before those of a clip. Chunks of all clips of a batch are one list, which the
model fills into the places of their tokens, in order.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import ProcessorMixin
from transformers import VoxtralProcessor as _VoxtralProcessor

from tunekit.errors import ModelError
from tunekit.probe.chat_template import written

if TYPE_CHECKING:
    import numpy as np
    from transformers import BatchFeature, PretrainedConfig, PreTrainedTokenizerBase

BEGIN_AUDIO = "[BEGIN_AUDIO]"
"""Token before the tokens of a clip."""


class VoxtralProcessor(_VoxtralProcessor):  # type: ignore[misc]
    """Voxtral's processor, of texts with one token `[AUDIO]` for each clip.

    Args:
        feature_extractor: What makes mel spectrograms of samples.
        tokenizer: Tokenizer with the tokens of Mistral's format.
        chunk_tokens: Tokens of a chunk of 30 seconds.
    """

    # Arguments for mistral-common's tokenizer, which a plain one does not take.
    text_kwargs: Mapping[str, Any] = {}
    __call__ = ProcessorMixin.__call__

    def __init__(self, feature_extractor: Any, tokenizer: "PreTrainedTokenizerBase", chunk_tokens: int) -> None:
        super().__init__(feature_extractor, tokenizer)
        self.chunk_tokens = chunk_tokens

    def _merge_kwargs(self, *classes: Any, tokenizer_init_kwargs: Any = None, **options: Any) -> dict[str, Any]:
        """Return the arguments of each part, without those that a tokenizer was saved with, such as its padding."""
        merged: dict[str, Any] = super()._merge_kwargs(*classes, **options)
        return merged

    def _process_audio(
        self, audio: "Sequence[np.ndarray]", max_source_positions: int, **options: Any
    ) -> "tuple[BatchFeature, list[str]]":
        """Return the features of clips, `(chunks, mel bins, frames)`, and the text of each."""
        from transformers import BatchFeature

        chunks = [self._retrieve_input_features([clip], max_source_positions, **options) for clip in audio]
        texts = [BEGIN_AUDIO + self.audio_token * (self.chunk_tokens * len(of_clip)) for of_clip in chunks]
        return BatchFeature({"input_features": torch.cat(chunks)}), texts


def with_clips_in_texts(
    processor: ProcessorMixin, tokenizer: "PreTrainedTokenizerBase", config: "PretrainedConfig", path: str
) -> VoxtralProcessor:
    """Return a processor of Voxtral that takes clips with texts.

    Args:
        processor: The processor as transformers loads it.
        tokenizer: Tokenizer of the model.
        config: The model's configuration.
        path: Name of the model, for messages.

    Raises:
        ModelError: The tokenizer lacks the tokens of clips, or its chat template writes what begins a clip itself.
    """
    audio = config.audio_config
    chunk_tokens = audio.max_source_positions * audio.hidden_size // audio.intermediate_size
    if tokenizer.convert_ids_to_tokens(config.audio_token_id) != "[AUDIO]" or BEGIN_AUDIO not in tokenizer.get_vocab():
        problem = f"model.path: the tokenizer of {path!r} lacks the tokens [AUDIO] and {BEGIN_AUDIO} of the model"
        raise ModelError(problem, hint="restore its tekken.json")
    if tokenizer.chat_template is not None and BEGIN_AUDIO in written(tokenizer, [{"type": "audio"}]):
        problem = f"model.chat_template: that of {path!r} writes {BEGIN_AUDIO}, which is put before each clip anyway"
        raise ModelError(problem, hint="set model.chat_template=voxtral")
    return VoxtralProcessor(processor.feature_extractor, tokenizer, chunk_tokens)
