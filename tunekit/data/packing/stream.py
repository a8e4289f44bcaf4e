"""Rows that are read, tokenised and packed while training, for data that does not fit on the disk.

A stream goes through the same steps as rows that are prepared before: they are checked, masked, cut and packed alike,
a few hundred at a time. What needs all rows at once works on a window: rows are shuffled within a buffer, and packs
filled from as many sequences as are at hand. A run that goes on reads the passage that it is in from its beginning, and
leaves out what it had: the same rows come in the same order, and making those again takes as long as the first time.
"""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.row_formats import Learner
from tunekit.data.packing.sequences import best_fit
from tunekit.data.sources.load import stream_rows
from tunekit.data.sources.rows import Skipped
from tunekit.data.tokenization.encode import Encoder
from tunekit.data.tokenization.tokenize import TokenReport
from tunekit.recipe.sections.data import CompleteSource, DataSection

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS = 200
"""Rows that are read at once."""

WINDOW_SEQUENCES = 2000
"""Sequences from which packs are filled, or among which the next one is drawn."""

_Sequence = dict[str, list[int]]


def stream(
    section: DataSection, tokenizer: "PreTrainedTokenizerBase", learner: Learner, *, seed: int, skipped: Path
) -> "datasets.IterableDataset":
    """The training rows of a recipe as a trainer reads them, made as it asks for them.

    Args:
        section: The sources, and how they become sequences.
        tokenizer: Tokenizer of the model.
        learner: The method that learns from them.
        seed: Seed of the order of the rows.
        skipped: File for the bad rows that are left out.
    """
    from datasets import Features, IterableDataset, List, Value

    columns = ("input_ids", "labels", "seq_lengths")[: 3 if section.packing else 2]
    features = Features({name: List(Value("int32")) for name in columns})

    def sequences_of(source: CompleteSource, reported: dict[Skipped, None]) -> Iterator[_Sequence]:
        """The sequences of one source."""
        encoder = None
        report = TokenReport()
        for rows in stream_rows(source, learner, max_bad_rows=section.max_bad_rows, num_rows=BATCH_ROWS):
            if encoder is None:
                encoder = Encoder(rows, tokenizer)
            with skipped.open("a", encoding="utf-8") as file:
                for bad in rows.skipped:
                    if bad not in reported:
                        reported[bad] = None
                        file.write(json.dumps(asdict(bad), ensure_ascii=False) + "\n")
            encoded = encoder.encode(rows, range(len(rows)))
            splits = rows.format == "text"
            batch, _ = report.cut(encoded, section.max_length, splits=splits, too_long=section.too_long)
            if section.too_long == "refuse":
                report.check_none_too_long(rows.source, section.max_length)
            labels, start = batch.labels, 0
            for length in batch.lengths.tolist():
                part = slice(start, start + length)
                yield {"input_ids": batch.ids[part].tolist(), "labels": labels[part].tolist()}
                start += length

    def generate() -> Iterator[_Sequence]:
        sources: Sequence[CompleteSource] = section.sources
        reported: dict[Skipped, None] = {}
        skipped.write_text("", encoding="utf-8")
        streams = [sequences_of(source, reported) for source in sources]
        weights = [source.weight for source in sources if source.weight is not None]
        sequences = _taking_turns(streams, weights) if section.mixing == "interleave" else chain.from_iterable(streams)
        yield from _packs(sequences, section.max_length) if section.packing else sequences

    endless: Any = IterableDataset.from_generator(generate, features=features)
    return endless.shuffle(seed=seed, buffer_size=WINDOW_SEQUENCES) if section.shuffle else endless


def _taking_turns(streams: list[Iterator[_Sequence]], weights: list[float]) -> Iterator[_Sequence]:
    """Sequences of all streams in turns; with weights in their proportion, until one ends that is due."""
    if not weights:
        turns = deque(streams)
        while turns:
            sequence = next(turns[0], None)
            if sequence is None:
                turns.popleft()
            else:
                turns.rotate(-1)
                yield sequence
        return
    num_taken = [0] * len(streams)
    while True:
        due = min(range(len(streams)), key=lambda i: (num_taken[i] + 0.5) / weights[i])
        sequence = next(streams[due], None)
        if sequence is None:
            return
        num_taken[due] += 1
        yield sequence


def _packs(sequences: Iterator[_Sequence], max_length: int) -> Iterator[_Sequence]:
    """Packs of sequences, a window after the other."""
    import numpy as np

    while window := list(islice(sequences, WINDOW_SEQUENCES)):
        order, sizes = best_fit(np.array([len(sequence["input_ids"]) for sequence in window]), max_length)
        places = iter(order.tolist())
        for size in sizes.tolist():
            pack = [window[next(places)] for _ in range(size)]
            yield {
                "input_ids": [token for sequence in pack for token in sequence["input_ids"]],
                "labels": [label for sequence in pack for label in sequence["labels"]],
                "seq_lengths": [len(sequence["input_ids"]) for sequence in pack],
            }
