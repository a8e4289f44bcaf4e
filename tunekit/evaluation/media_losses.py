"""Losses on rows with media, in batches that the model's own processor makes, as in training."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from transformers import BatchFeature

from tunekit.data.media.collate import MediaCollator
from tunekit.data.media.expand import MediaTokens
from tunekit.data.media.kinds import medium_of
from tunekit.data.packing.sequences import IGNORED
from tunekit.data.prepare import MediaInputs, tokens_of
from tunekit.data.sources.rows import Rows
from tunekit.errors import DataError
from tunekit.evaluation.losses import Ids, Texts, Told, Values, sums_of, through
from tunekit.inference.inference_model import Loaded

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


@dataclass(frozen=True)
class MediaRow:
    """A prepared row: see `tunekit.data.media.collate`."""

    input_ids: Sequence[int]
    labels: Sequence[int]
    media_text: str | None
    media: Sequence[str]


def prepared_rows(
    rows: Rows, tokenizer: "PreTrainedTokenizerBase", media: MediaTokens, max_length: int
) -> list[MediaRow]:
    """Return rows as they are prepared for training.

    Args:
        rows: The rows.
        tokenizer: Tokenizer of the model.
        media: The tokens of media.
        max_length: Longest sequence, in tokens.
    """
    sequences = tokens_of(rows, tokenizer, max_length=max_length, media=media).sequences
    inputs = MediaInputs(rows, tokenizer, media)
    return [
        MediaRow(sequences[i]["input_ids"], sequences[i]["labels"], *inputs.of_row(int(sequences.rows[i])))
        for i in range(len(sequences))
    ]


@dataclass(frozen=True)
class MediaTexts(Texts):
    """Sequences of which some have media.

    Attributes:
        rows: The prepared rows.
        processor: Processor of the model.
    """

    rows: Sequence[MediaRow] = ()
    processor: "ProcessorMixin | None" = None

    @classmethod
    def of_rows(cls, of: str, rows: Sequence[MediaRow], processor: "ProcessorMixin") -> "MediaTexts":
        """Return the part of an evaluation that measures rows.

        Args:
            of: The rows, by name.
            rows: The rows as they are prepared for training.
            processor: Processor of the model.
        """
        ids = [np.array(row.input_ids, dtype=np.int64) for row in rows]
        counted = [np.array(row.labels) != IGNORED for row in rows]
        if not any(counts[1:].any() for counts in counted):
            raise DataError(f"{of}: no token counts in the loss", hint="add answers to the rows")
        return cls(of, ids, counted, rows=rows, processor=processor)

    def measure(self, loaded: Loaded, tell: Told) -> Values:
        """The log-probability of each; those with media apart, which some models read otherwise."""
        logps = np.full(len(self.rows), np.nan)
        with_media = [number for number, row in enumerate(self.rows) if row.media]
        without = [number for number, row in enumerate(self.rows) if not row.media]
        num_before = 0
        for numbers in (with_media, without):
            if not numbers:
                continue

            def report(num_done: int, _: int, offset: int = num_before) -> None:
                tell(offset + num_done, len(self.rows))

            logps[numbers] = self._of(loaded, numbers, report)
            num_before += len(numbers)
        return {"logps": logps}

    def _of(self, loaded: Loaded, numbers: Sequence[int], tell: Told) -> np.ndarray:
        assert self.processor is not None
        collate = MediaCollator(self.processor, scores_positions=False)
        media = (medium_of(json.loads(medium)) for number in numbers for medium in self.rows[number].media)
        # Some models do not leave the padding of clips beside longer ones out: a row at a time.
        pad = None if any(medium.kind == "audio" for medium in media) else 0

        def sums(batch: list[int], given: "torch.Tensor", mask: "torch.Tensor") -> list[float]:
            chosen = [numbers[place] for place in batch]
            features = BatchFeature(collate([asdict(self.rows[number]) for number in chosen]))
            del features["labels"]
            inputs = features.to(device=given.device, dtype=loaded.model.dtype)
            logits = loaded.model(**inputs, use_cache=False).logits
            counted: list[Ids] = [self.counted[number] for number in chosen]
            return sums_of(logits, inputs["input_ids"], counted)

        return through(loaded.model, [self.ids[number] for number in numbers], sums, tell, pad)
