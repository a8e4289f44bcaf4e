"""The measuring behind the data report: a pass over the tokens of each source, a few million at a time.

The measuring behind the report of rows of answers and of prompts, which TRL tokenises when a run begins.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, groupby
from typing import TYPE_CHECKING

from tunekit.data.media.answers import PictureAnswers
from tunekit.data.media.expand import MediaTokens, MediumTokens
from tunekit.data.packing.sequences import IGNORED, Sequences, best_fit
from tunekit.data.prepare import SourceShare, SourceTokens, Split
from tunekit.data.reports import report
from tunekit.data.reports.report import Bin, DataReport, Packing, Piece, Repeats, Sample, SourceReport
from tunekit.data.sources.rows import Rows, Skipped
from tunekit.data.tokenization.alignment import ANSWERS, AlignmentSplit, Measured, tokens_of
from tunekit.data.tokenization.classes import LabeledTokens
from tunekit.data.tokenization.encode import Encoder
from tunekit.data.tokenization.tokenize import TokenReport

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase


NUM_BINS = 12
"""Bars of a histogram, about."""

ROLES = ("bos", "eos", "pad", "unk")
"""Special tokens that are shown even where no row has them."""

_PIECE_TOKENS = 8
_RUN_TOKENS = 4
_PASS_SEQUENCES = 4096


def report_data(
    splits: Sequence[Split],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    packing: bool,
    batch_size: int,
    num_samples: int,
    notes: Sequence[str],
    skipped: tuple[Skipped, ...],
    media: MediaTokens | None = None,
) -> DataReport:
    """Look at the rows of a recipe as its model will see them.

    Args:
        splits: `train`, and `eval` if there is one.
        tokenizer: Tokenizer of the model.
        max_length: Longest sequence, in tokens.
        packing: Whether the recipe asks for packing; the rows are measured either way.
        batch_size: Sequences of a batch, for what padding costs.
        num_samples: Sequences of each source to take as samples.
        notes: What was found while the rows were read.
        skipped: Bad rows that were left out.
        media: The tokens of media, where rows have some.
    """
    reports = []
    for split in splits:
        for rows, tokens in zip(split.rows, split.tokens, strict=True):
            counts, sequences = tokens.report, tokens.sequences
            num_packed = len(best_fit(sequences.lengths, max_length)[1])
            per_batch = min(batch_size, counts.num_sequences)
            statistics = _source_report(split.name, len(split.rows), rows, counts, sequences.row_lengths, max_length)
            reports.append(
                replace(
                    statistics,
                    packing=Packing(
                        num_packed=num_packed,
                        packed_share=counts.num_tokens / (num_packed * max_length),
                        batch_size=per_batch,
                        padded_share=padded_share(sorted(sequences.lengths.tolist()), per_batch),
                    ),
                    special_tokens=tuple(_special_tokens(sequences, tokenizer)),
                    samples=tuple(_first_samples(rows, tokens, tokenizer, num_samples, media)),
                    num_media=counts.num_media,
                    num_media_tokens=counts.num_media_tokens,
                )
            )
    train = splits[0]
    num_available = [len(tokens.sequences) for tokens in train.tokens]
    return DataReport(
        max_length=max_length,
        is_packed=packing,
        sources=tuple(reports),
        mixture=_mixture(train.prepared.shares, train.weights, num_available),
        num_train=train.prepared.num_sequences,
        leaked=_leaked([split.rows for split in splits]),
        skipped=skipped,
        notes=tuple(dict.fromkeys([*notes, *(note for split in splits for note in split.prepared.notes)])),
    )


def _first_samples(
    rows: Rows,
    tokens: SourceTokens,
    tokenizer: "PreTrainedTokenizerBase",
    num_samples: int,
    media: MediaTokens | None,
) -> Iterator[Sample]:
    num, sequences = min(num_samples, len(tokens.sequences)), tokens.sequences
    encoder = Encoder(rows, tokenizer, media) if num and rows.media else None
    for i in range(num):
        of_row = [] if encoder is None else encoder.media_of(rows, int(sequences.rows[i]))
        yield sample(sequences[i]["input_ids"], sequences[i]["labels"], tokenizer, of_row)


def _mixture(
    shares: Sequence[SourceShare], weights: Sequence[float | None], num_available: Sequence[int]
) -> tuple[report.MixedSource, ...]:
    """The parts of the sources that are trained on; empty where there is one source."""
    whole = sum(share.num_tokens for share in shares)
    parts = zip(shares, weights, num_available, strict=True) if len(shares) > 1 else ()
    return tuple(
        report.MixedSource(
            source=share.source,
            weight=weight,
            num_available=available,
            num_taken=share.num_sequences,
            num_tokens=share.num_tokens,
            token_share=share.num_tokens / whole,
        )
        for share, weight, available in parts
    )


def _leaked(splits: Sequence[Sequence[Rows]]) -> Repeats:
    """Rows of later splits that stand in the first one too."""
    evaluated = [rows for sources in splits[1:] for rows in sources]
    return find_repeats(evaluated, within=splits[0]) if evaluated else Repeats(0)


def _source_report(
    split: str, num_sources: int, rows: Rows, counts: TokenReport, row_lengths: "np.ndarray", max_length: int
) -> SourceReport:
    """The report on a source but for what only tokens show: packing, special tokens and samples."""
    ordered = sorted(row_lengths.tolist())
    return SourceReport(
        split=split,
        is_alone=num_sources == 1,
        source=rows.source,
        format=rows.format,
        num_rows=counts.num_rows,
        num_truncated=counts.num_truncated,
        num_split=counts.num_split,
        num_dropped=counts.num_dropped,
        num_too_long=counts.num_too_long,
        num_sequences=counts.num_sequences,
        num_tokens=counts.num_tokens,
        num_trained=counts.num_trainable_tokens,
        lengths=report.Quantiles(ordered[0], quantile(ordered, 0.5), quantile(ordered, 0.95), ordered[-1]),
        histogram=histogram(ordered, max_length),
        packing=None,
        duplicates=find_repeats([rows]),
        special_tokens=(),
        samples=(),
    )


def quantile(ordered: Sequence[int], part: float) -> int:
    """The smallest of the ordered numbers that at least so large a part of them does not exceed."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def histogram(ordered: Sequence[int], max_length: int) -> tuple[Bin, ...]:
    """Ordered lengths in about a dozen bars of equal width; `max_length` is always the end of one.

    A few rows that are far longer than the others share the last bar: it would else leave one for all the rest.
    """
    longest, usual = ordered[-1], quantile(ordered, 0.95)
    top = longest if longest <= 3 * usual else 2 * usual
    scales = (step * 10**power for power in count() for step in (1, 2, 5))
    step = next(scale for scale in scales if scale * NUM_BINS >= top)
    edges = set(range(step, top + step, step)) | {max_length}
    edges = {edge for edge in edges if edge < longest} | {min(edge for edge in edges | {longest} if edge >= longest)}
    bins: list[Bin] = []
    low, start = 1, 0
    for high in sorted(edges):
        end = start
        while end < len(ordered) and ordered[end] <= high:
            end += 1
        if end or high >= max_length:  # empty bars before the shortest row say nothing
            bins.append(Bin(low, high, end - start))
        low, start = high + 1, end
    return tuple(bins)


def padded_share(ordered: Sequence[int], batch_size: int) -> float:
    """Tokens among the places of batches of random sequences, each padded to its longest.

    A batch is as wide as the longest of its sequences. Of n lengths in order, the k-th is the longest of b drawn
    without putting back with probability C(k-1, b-1) / C(n, b).
    """
    width, probability = 0.0, batch_size / len(ordered)
    for k in range(len(ordered), batch_size - 1, -1):
        width += probability * ordered[k - 1]
        probability *= (k - batch_size) / max(1, k - 1)
    return sum(ordered) / (len(ordered) * width)


def find_repeats(sources: Sequence[Rows], *, within: Sequence[Rows] = ()) -> Repeats:
    """Rows that are equal to an earlier one, or to any row of other sources."""
    import numpy as np

    digests = _digests(sources)
    if within:
        known_digests = _digests(within)
        order = np.argsort(known_digests, kind="stable")
        positions = np.minimum(np.searchsorted(known_digests[order], digests), len(known_digests) - 1)
        earlier = order[positions]
        repeated = np.flatnonzero(known_digests[earlier] == digests)
    else:
        _, firsts, which = np.unique(digests, return_index=True, return_inverse=True)
        earlier = firsts[which]
        repeated = np.flatnonzero(earlier != np.arange(len(digests)))
    if not len(repeated):
        return Repeats(0)
    first = int(repeated[0])
    return Repeats(len(repeated), (_place(sources, first), _place(within or sources, int(earlier[first]))))


def _digests(sources: Sequence[Rows]) -> "np.ndarray":
    """A digest of every row, `(rows,)`."""
    import numpy as np

    whole = bytearray()
    for rows in sources:
        for i in range(len(rows)):
            whole += rows.rows.digest_of(i)
    return np.frombuffer(whole, dtype="S16")


def _place(sources: Sequence[Rows], index: int) -> str:
    """Return the location of a row, counted over all sources."""
    for rows in sources:
        if index < len(rows):
            return rows.place(index)
        index -= len(rows)
    raise IndexError(index)


def _special_tokens(sequences: Sequences, tokenizer: "PreTrainedTokenizerBase") -> Iterator[report.SpecialToken]:
    """The special tokens that have a role or occur."""
    import numpy as np

    roles: dict[int, list[str]] = {}
    own = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    for role, token_id in zip(ROLES, own, strict=True):
        if token_id is not None:
            roles.setdefault(token_id, []).append(role)
    token_ids = list(dict.fromkeys([*roles, *_special_ids(tokenizer)]))
    num_tokens, num_trained, num_sequences = (np.zeros(len(token_ids), np.int64) for _ in range(3))
    slots = np.full(max(token_ids, default=0) + 1, -1)
    slots[token_ids] = np.arange(len(token_ids))
    for start in range(0, len(sequences), _PASS_SEQUENCES):
        batch = sequences.take(range(start, min(start + _PASS_SEQUENCES, len(sequences))))
        places = np.flatnonzero(batch.ids < len(slots))
        places = places[slots[batch.ids[places]] >= 0]
        special_ids, trained = slots[batch.ids[places]], batch.counted[places]
        of_sequence = np.searchsorted(np.cumsum(batch.lengths), places, side="right")
        once = np.unique(of_sequence[trained] * len(token_ids) + special_ids[trained])
        num_tokens += np.bincount(special_ids, minlength=len(token_ids))
        num_trained += np.bincount(special_ids[trained], minlength=len(token_ids))
        num_sequences += np.bincount(once % len(token_ids), minlength=len(token_ids))
    for slot, token_id in enumerate(token_ids):
        if token_id in roles or num_tokens[slot]:
            yield report.SpecialToken(
                text=tokenizer.convert_ids_to_tokens(token_id),
                id=token_id,
                roles=tuple(roles.get(token_id, ())),
                num_tokens=int(num_tokens[slot]),
                num_trained=int(num_trained[slot]),
                num_sequences_trained=int(num_sequences[slot]),
            )


def _special_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return sorted({*tokenizer.all_special_ids, *added})


def sample(
    ids: Sequence[int],
    labels: Sequence[int],
    tokenizer: "PreTrainedTokenizerBase",
    media: Sequence[MediumTokens] = (),
) -> Sample:
    """Tokens with the text of each, as it reads behind the one before it, and the tokens of each medium as one."""
    pieces: list[Piece] = []
    start = 0
    for tokens in media:
        pieces += _pieces(ids[start : tokens.start], labels[start : tokens.start], tokenizer)
        of_medium = tuple(ids[tokens.start : tokens.stop])
        pieces.append(Piece(tokens.words, of_medium, trained=False, special=True, medium=tokens.medium))
        start = tokens.stop
    return Sample((*pieces, *_pieces(ids[start:], labels[start:], tokenizer)))


def _pieces(ids: Sequence[int], labels: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> Iterator[Piece]:
    special = set(_special_ids(tokenizer))
    pieces: list[Piece] = []
    current: list[int] = []
    for i, (token_id, label) in enumerate(zip(ids, labels, strict=True)):
        current.append(token_id)
        before = list(pieces[-1].ids) if pieces else []
        text = _text_behind(before, current, tokenizer)
        is_last = i + 1 == len(ids)
        goes_on = not is_last and (labels[i + 1] == IGNORED) == (label == IGNORED) and ids[i + 1] not in special
        if text.endswith("\ufffd") and goes_on and len(current) < _PIECE_TOKENS:
            continue  # a character that the next token completes
        pieces.append(Piece(text, tuple(current), trained=label != IGNORED, special=token_id in special))
        current = []
    return _together(pieces)


def _together(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces, of which many equal special tokens behind each other are one."""
    for _, group in groupby(pieces, key=lambda piece: (piece.ids, piece.trained)):
        run = list(group)
        if run[0].special and len(run) >= _RUN_TOKENS:
            yield replace(run[0], text=f"{run[0].text} x {len(run)}", ids=run[0].ids * len(run))
        else:
            yield from run


def _text_behind(before: list[int], ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the text that tokens add; some tokenizers strip the space from a text's first token."""
    head, whole = _decode(before, tokenizer), _decode([*before, *ids], tokenizer)
    return whole[len(head) :] if whole.startswith(head) else _decode(ids, tokenizer)


def _decode(ids: Iterable[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def report_rows(
    splits: Sequence[AlignmentSplit],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    num_samples: int,
    notes: Sequence[str],
    skipped: tuple[Skipped, ...],
    pictures: PictureAnswers | None = None,
    labeled: LabeledTokens | None = None,
) -> DataReport:
    """Look at rows as their trainer will read them. The length of a row is that of its longest answer with its prompt.

    Args:
        splits: `train`, and `eval` if there is one.
        tokenizer: Tokenizer of the model.
        max_length: Longest sequence, in tokens.
        num_samples: Rows of each source to take as samples, each with all its answers.
        notes: What was found while the rows were read.
        skipped: Bad rows that were left out.
        pictures: Tokenizes rows, where some have pictures.
        labeled: Tokenizes rows, where they have labels.
    """
    reports = []
    for split in splits:
        for source in split.sources:
            statistics = _source_report(
                split.name, len(split.sources), source.rows, source.counts, source.lengths, max_length
            )
            if labeled is not None:
                of_split = labeled if split.name == "train" else labeled.of_all
                samples = tuple(_labeled_samples(source, of_split, num_samples))
            else:
                samples = tuple(_samples(source, tokenizer, max_length, num_samples, pictures))
            reports.append(replace(statistics, samples=samples))
    train, shares = splits[0], splits[0].shares
    return DataReport(
        max_length=max_length,
        is_packed=False,
        sources=tuple(reports),
        mixture=_mixture(
            shares, train.mixing.weights or (None,) * len(shares), [len(source.kept) for source in train.sources]
        ),
        num_train=sum(share.num_sequences for share in shares),
        leaked=_leaked([[source.rows for source in split.sources] for split in splits]),
        skipped=skipped,
        notes=tuple(dict.fromkeys(notes)),
    )


def _labeled_samples(measured: Measured, labeled: LabeledTokens, num_samples: int) -> Iterator[Sample]:
    """Yield the first rows with labels, of which only those tokens are trained on that are scored."""
    for index in measured.kept[:num_samples]:
        _, ids, labels = labeled.of_row(measured.rows.rows[index])
        yield sample(ids, labels, labeled.tokenizer)


def _samples(
    measured: Measured,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    num_samples: int,
    pictures: PictureAnswers | None,
) -> Iterator[Sample]:
    columns = ANSWERS[measured.rows.format]
    for index in measured.kept[:num_samples]:
        row, place = measured.rows.rows[index], measured.rows.place(index)
        if pictures is None:
            num_given, answered = tokens_of(row, columns, tokenizer)
            places: list[list[MediumTokens]] = [[] for _ in columns]
        else:
            num_given, answered, _ = pictures.tokens(row, columns, place)
            places = pictures.places(row, columns, place) if columns else []
        for ids, parts in zip(answered, places, strict=True):
            prefix = list(ids[:max_length])
            yield sample(prefix, [IGNORED] * num_given + prefix[num_given:], tokenizer, parts)
