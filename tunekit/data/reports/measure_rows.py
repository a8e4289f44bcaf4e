"""The measuring behind the report of rows of answers and of prompts, which TRL tokenises when a run begins."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tunekit.data.packing.sequences import IGNORED
from tunekit.data.reports.measure import find_repeats, histogram, quantile, sample
from tunekit.data.reports.report import DataReport, MixedSource, Quantiles, Repeats, Sample, SourceReport
from tunekit.data.sources.rows import Skipped
from tunekit.data.tokenization.alignment import ANSWERS, AlignmentSplit, Measured, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def report_rows(
    splits: Sequence[AlignmentSplit],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    num_samples: int,
    notes: Sequence[str],
    skipped: tuple[Skipped, ...],
) -> DataReport:
    """Look at rows as their trainer will read them. The length of a row is that of its longest answer with its prompt.

    Args:
        splits: `train`, and `eval` if there is one.
        tokenizer: Tokenizer of the model.
        max_length: Longest sequence, in tokens.
        num_samples: Rows of each source to take as samples, each with all its answers.
        notes: What was found while the rows were read.
        skipped: Bad rows that were left out.
    """
    train = splits[0]
    evaluated = [source.rows for split in splits[1:] for source in split.sources]
    return DataReport(
        max_length=max_length,
        is_packed=False,
        sources=tuple(
            _source_report(split, source, tokenizer, max_length, num_samples)
            for split in splits
            for source in split.sources
        ),
        mixture=tuple(_mixture(train)) if len(train.sources) > 1 else (),
        num_train=sum(share.num_sequences for share in train.shares),
        leaked=find_repeats(evaluated, within=[source.rows for source in train.sources]) if evaluated else Repeats(0),
        skipped=skipped,
        notes=tuple(dict.fromkeys(notes)),
    )


def _mixture(train: AlignmentSplit) -> Iterator[MixedSource]:
    shares = train.shares
    whole = sum(share.num_tokens for share in shares)
    weights = train.mixing.weights or (None,) * len(shares)
    for source, share, weight in zip(train.sources, shares, weights, strict=True):
        yield MixedSource(
            source=share.source,
            weight=weight,
            num_available=len(source.kept),
            num_taken=share.num_sequences,
            num_tokens=share.num_tokens,
            token_share=share.num_tokens / whole,
        )


def _source_report(
    split: AlignmentSplit,
    measured: Measured,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    num_samples: int,
) -> SourceReport:
    rows = measured.rows
    ordered = sorted(measured.lengths.tolist())
    return SourceReport(
        split=split.name,
        is_alone=len(split.sources) == 1,
        source=rows.source,
        format=rows.format,
        num_rows=len(rows),
        num_truncated=measured.num_truncated,
        num_split=0,
        num_dropped=measured.num_dropped,
        num_sequences=len(measured.kept),
        num_tokens=int(measured.num_tokens.sum()),
        num_trained=measured.num_trainable_tokens,
        lengths=Quantiles(ordered[0], quantile(ordered, 0.5), quantile(ordered, 0.95), ordered[-1]),
        histogram=histogram(ordered, max_length),
        packing=None,
        duplicates=find_repeats([rows]),
        special_tokens=(),
        samples=tuple(_samples(measured, tokenizer, max_length, num_samples)),
    )


def _samples(
    measured: Measured, tokenizer: "PreTrainedTokenizerBase", max_length: int, num_samples: int
) -> Iterator[Sample]:
    for index in measured.kept[:num_samples]:
        num_given, answered = tokens_of(measured.rows.rows[index], ANSWERS[measured.rows.format], tokenizer)
        for ids in answered:
            prefix = list(ids[:max_length])
            yield sample(prefix, [IGNORED] * num_given + prefix[num_given:], tokenizer)
