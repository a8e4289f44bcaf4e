"""What there is to learn from, seen before any training: counts, lengths, duplicates, leakage, and rows as tokens.

Everything is measured on what the model will get, in its own tokens. Lengths of rows are those before anything is
cut, so that what lies beyond `max_length` can be seen; all other counts are of the sequences that are trained on.

Three numbers have a definition worth knowing. A quantile is the smallest length that at least so large a part of the
rows does not exceed (nearest rank): it is always the length of a row. What padding costs is an expectation: the
longest of `batch_size` sequences drawn at random sets the width of their batch. And a row is a duplicate if an
earlier row of its split is equal to it in every field.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.cache import prepare_rows
from tunekit.data.formats import counted
from tunekit.data.load import LoadedData
from tunekit.data.pack import pack
from tunekit.data.rows import Rows, Skipped
from tunekit.data.tokenize import IGNORED, LossOn, TokenReport, tokenize

if TYPE_CHECKING:
    import datasets
    import numpy as np
    from transformers import PreTrainedTokenizerBase

NUM_BINS = 12
"""Bars of a histogram, about."""

UNCUT = 2**31 - 1
"""A `max_length` that cuts nothing."""

ROLES = ("bos", "eos", "pad", "unk")
"""Special tokens that are shown even where no row has them."""

_STEPS = (1, 2, 5)
_PIECE_TOKENS = 8


@dataclass(frozen=True)
class Bin:
    """A bar of a histogram: rows of `low` to `high` tokens, both included."""

    low: int
    high: int
    num_rows: int

    @property
    def label(self) -> str:
        """Its range as people write it."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}–{self.high:,}"


@dataclass(frozen=True)
class Quantiles:
    """Lengths of rows in tokens, by nearest rank."""

    min: int
    median: int
    p95: int
    max: int


@dataclass(frozen=True)
class Packing:
    """How much of the work is for tokens rather than for padding.

    Attributes:
        num_packed: Sequences of `max_length` tokens that hold all rows.
        packed_share: Tokens among the places of those sequences.
        batch_size: Sequences of an unpacked batch.
        padded_share: Tokens among the places of unpacked batches, padded to their longest sequence.
    """

    num_packed: int
    packed_share: float
    batch_size: int
    padded_share: float


@dataclass(frozen=True)
class SpecialToken:
    """A token that is no text, and how often it is there.

    Attributes:
        text: The token as the tokenizer writes it.
        id: Its number.
        roles: What the tokenizer uses it for, of `ROLES`.
        num_tokens: How often it occurs.
        num_trained: How often it counts in the loss.
        num_sequences_trained: Sequences in which it counts at least once.
    """

    text: str
    id: int
    roles: tuple[str, ...]
    num_tokens: int
    num_trained: int
    num_sequences_trained: int


@dataclass(frozen=True)
class Piece:
    """A token with its text; several tokens only where a character is spread over them.

    Attributes:
        text: What the tokens stand for.
        ids: Their numbers.
        trained: Whether they count in the loss.
        special: Whether it is a special token.
    """

    text: str
    ids: tuple[int, ...]
    trained: bool
    special: bool


@dataclass(frozen=True)
class Sample:
    """A sequence as the model sees it."""

    pieces: tuple[Piece, ...]

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def num_trained(self) -> int:
        """Tokens of it that count in the loss."""
        return sum(len(piece.ids) for piece in self.pieces if piece.trained)


@dataclass(frozen=True)
class Repeats:
    """Rows that are equal to others, and the first of them with what it is equal to."""

    num_rows: int
    first: tuple[str, str] | None = None


@dataclass(frozen=True)
class SplitReport:
    """What there is in one split.

    Attributes:
        split: `train` or `eval`.
        source: Where the rows come from, as the recipe names it.
        format: The shape of the rows.
        num_rows: Rows read.
        num_truncated: Rows cut at `max_length`.
        num_split: Texts that go on in further sequences.
        num_dropped: Rows left out because no token of theirs would count.
        num_sequences: Sequences made of the others, before packing.
        num_tokens: Tokens of all sequences.
        num_trained: Those that count in the loss.
        lengths: Quantiles of the rows' lengths in tokens, before anything is cut.
        histogram: Rows by length, before anything is cut.
        packing: What packing saves.
        duplicates: Rows that repeat an earlier row of the split.
        special_tokens: Special tokens, those with a role first.
        samples: The first sequences.
    """

    split: str
    source: str
    format: str
    num_rows: int
    num_truncated: int
    num_split: int
    num_dropped: int
    num_sequences: int
    num_tokens: int
    num_trained: int
    lengths: Quantiles
    histogram: tuple[Bin, ...]
    packing: Packing
    duplicates: Repeats
    special_tokens: tuple[SpecialToken, ...]
    samples: tuple[Sample, ...]

    @property
    def end_token(self) -> SpecialToken | None:
        """The token by which the model learns to stop: the tokenizer's own, or the special one trained most often."""
        trained = [token for token in self.special_tokens if token.num_trained]
        own = [token for token in trained if "eos" in token.roles]
        return max(own or trained, key=lambda token: token.num_trained, default=None)

    def facts(self, max_length: int, *, is_packed: bool) -> list[tuple[str, str]]:
        """Everything that is a number or a sentence, as pairs of a name and words; shown alike everywhere."""
        end, packing, repeats = self.end_token, self.packing, self.duplicates
        changed = [
            f"{number:,} {what}"
            for number, what in (
                (self.num_dropped, "left out without a token that counts"),
                (self.num_truncated, f"cut at {max_length:,} tokens"),
                (self.num_split, "texts go on in further sequences"),
            )
            if number
        ]
        kept = f"{self.num_rows:,} in, {self.num_rows - self.num_dropped:,} out"
        facts = [
            ("source", f"{self.source} ({self.format})"),
            ("rows", "; ".join([kept, *changed])),
            ("sequences", f"{self.num_sequences:,}"),
            (
                "tokens",
                f"{self.num_tokens:,}, of which {self.num_trained:,} count in the loss ({self.trained_share:.1%})",
            ),
            (
                "row length",
                "min {min:,}, median {median:,}, 95% up to {p95:,}, max {max:,}".format(**asdict(self.lengths)),
            ),
            (
                "packed",
                f"{packing.packed_share:.1%} of the places hold tokens, in {counted(packing.num_packed, 'sequence')} "
                f"of {max_length:,}{' (as in this recipe)' if is_packed else ''}",
            ),
            (
                "not packed",
                f"{packing.padded_share:.1%} of the places hold tokens, in batches of {packing.batch_size} padded to "
                f"their longest sequence{'' if is_packed else ' (as in this recipe)'}",
            ),
            ("duplicates", f"{counted(repeats.num_rows, 'row')}{_equal(repeats)}" if repeats.num_rows else "none"),
        ]
        if end is None:
            return [*facts, ("end token", "none is trained")]
        where = f"in {end.num_sequences_trained:,} of {counted(self.num_sequences, 'sequence')}"
        return [*facts, ("end token", f"{end.text} (id {end.id}) is trained {where}")]

    @property
    def trained_share(self) -> float:
        """Part of the tokens that count in the loss."""
        return self.num_trained / self.num_tokens


@dataclass(frozen=True)
class DataReport:
    """What a recipe trains and evaluates on.

    Attributes:
        max_length: Longest sequence, in tokens.
        is_packed: Whether the recipe asks for packing.
        splits: `train`, and `eval` where the recipe has one.
        leaked: Rows of `eval` that stand in `train` too.
        skipped: Bad rows that were left out, as the recipe allows; no split counts them.
        notes: What was found and decided while reading, a sentence each.
    """

    max_length: int
    is_packed: bool
    splits: tuple[SplitReport, ...]
    leaked: Repeats
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]

    def warnings(self) -> list[str]:
        """What should be looked at before training, a sentence each."""
        found = []
        if self.leaked.num_rows:
            found.append(
                f"{counted(self.leaked.num_rows, 'row')} of eval also in train{_equal(self.leaked)}: the eval loss "
                "will look better than the model is"
            )
        for split in self.splits:
            if split.split == "train" and split.end_token is None:
                found.append("no special token is trained: the model does not learn where its answers end")
            if split.num_truncated:
                share = split.num_truncated / split.num_rows
                found.append(
                    f"{split.split}: {share:.1%} of the rows are cut at data.max_length={self.max_length}, and their "
                    "ends are never trained"
                )
            if split.duplicates.num_rows:
                found.append(f"{split.split}: {counted(split.duplicates.num_rows, 'row')} repeated exactly")
            found += (
                f"{split.split}: {token.text} stands in {counted(token.num_tokens, 'place')} for what the "
                "tokenizer does not know"
                for token in split.special_tokens
                if token.roles == ("unk",) and token.num_tokens
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {**asdict(self), "warnings": self.warnings()}

    def to_html(self) -> str:
        """The report as one page that needs nothing else."""
        return self._render(page=True)

    def _repr_html_(self) -> str:
        return self._render(page=False)

    def _render(self, *, page: bool) -> str:
        import jinja2

        environment = jinja2.Environment(
            autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
        )
        environment.filters["visible"] = visible
        template = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
        return environment.from_string(template).render(report=self, page=page)

    def __str__(self) -> str:
        lines = [f"warning: {warning}" for warning in self.warnings()]
        for split in self.splits:
            lines += [
                "",
                split.split,
                *(f"  {name:<12} {words}" for name, words in split.facts(self.max_length, is_packed=self.is_packed)),
            ]
        return "\n".join(lines).lstrip()


def report_data(
    data: LoadedData,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    loss_on: LossOn,
    packing: bool,
    batch_size: int,
    num_samples: int,
) -> DataReport:
    """Look at the rows of a recipe as its model will see them.

    Args:
        data: The rows.
        tokenizer: Tokenizer of the model.
        max_length: Longest sequence, in tokens.
        loss_on: Which tokens count in the loss.
        packing: Whether the recipe asks for packing; the rows are measured either way.
        batch_size: Sequences of a batch, for what padding costs.
        num_samples: Sequences of each split to take as samples.

    Raises:
        DataError: No token would be trained on, or the rows do not fit the chat template.
    """
    notes, splits = list(data.notes), []
    for name, rows in (("train", data.train), ("eval", data.eval)):
        if rows is None:
            continue
        # As a run without packing has them, and kept for that run.
        entry = prepare_rows(rows, tokenizer, max_length=max_length, loss_on=loss_on, packing=False)
        sequences = _Sequences(entry.dataset())
        lengths = sequences.lengths
        if entry.report.longest_tokens > max_length:
            uncut = tokenize(rows, tokenizer, max_length=UNCUT, loss_on=loss_on)
            lengths = _Sequences(uncut.dataset).lengths
        notes += entry.report.notes
        splits.append(
            _split_report(name, rows, entry.report, sequences, lengths, tokenizer, max_length, batch_size, num_samples)
        )
    return DataReport(
        max_length=max_length,
        is_packed=packing,
        splits=tuple(splits),
        leaked=Repeats(0) if data.eval is None else find_repeats(data.eval, within=data.train),
        skipped=data.skipped,
        notes=tuple(dict.fromkeys(notes)),
    )


def _split_report(
    name: str,
    rows: Rows,
    counts: TokenReport,
    sequences: "_Sequences",
    row_lengths: "np.ndarray",
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    batch_size: int,
    num_samples: int,
) -> SplitReport:
    ordered = sorted(row_lengths.tolist())
    num_packed = len(pack(sequences.dataset, max_length))
    batch_size = min(batch_size, counts.num_sequences)
    return SplitReport(
        split=name,
        source=rows.source,
        format=rows.format,
        num_rows=counts.num_rows,
        num_truncated=counts.num_truncated,
        num_split=counts.num_split,
        num_dropped=counts.num_dropped,
        num_sequences=counts.num_sequences,
        num_tokens=counts.num_tokens,
        num_trained=counts.num_trainable_tokens,
        lengths=Quantiles(ordered[0], quantile(ordered, 0.5), quantile(ordered, 0.95), ordered[-1]),
        histogram=histogram(ordered, max_length),
        packing=Packing(
            num_packed=num_packed,
            packed_share=counts.num_tokens / (num_packed * max_length),
            batch_size=batch_size,
            padded_share=padded_share(sorted(sequences.lengths.tolist()), batch_size),
        ),
        duplicates=find_repeats(rows),
        special_tokens=tuple(_special_tokens(sequences, tokenizer)),
        samples=tuple(_sample(ids, labels, tokenizer) for ids, labels in sequences.first(num_samples)),
    )


class _Sequences:
    """The columns of tokenised rows as flat arrays."""

    def __init__(self, dataset: "datasets.Dataset") -> None:
        import numpy as np

        self.dataset = dataset
        ids, labels = (dataset.data.column(name).chunks for name in ("input_ids", "labels"))
        self.lengths: np.ndarray = np.concatenate([chunk.value_lengths().to_numpy() for chunk in ids])
        self.ids: np.ndarray = np.concatenate([chunk.flatten().to_numpy() for chunk in ids])
        self.labels: np.ndarray = np.concatenate([chunk.flatten().to_numpy() for chunk in labels])

    def first(self, number: int) -> Iterator[tuple[list[int], list[int]]]:
        """Token ids and labels of the first sequences."""
        start = 0
        for length in self.lengths[:number].tolist():
            yield self.ids[start : start + length].tolist(), self.labels[start : start + length].tolist()
            start += length


def quantile(ordered: Sequence[int], part: float) -> int:
    """The smallest of the ordered numbers that at least so large a part of them does not exceed."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def histogram(ordered: Sequence[int], max_length: int) -> tuple[Bin, ...]:
    """Ordered lengths in about a dozen bars of equal width; `max_length` is always the end of one.

    A few rows that are far longer than the others share the last bar: it would else leave one for all the rest.
    """
    longest, usual = ordered[-1], quantile(ordered, 0.95)
    top = longest if longest <= 3 * usual else 2 * usual
    step = next(s for s in _steps() if s * NUM_BINS >= top)
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


def find_repeats(rows: Rows, *, within: Rows | None = None) -> Repeats:
    """Rows that are equal to an earlier one, or to any row of another source."""
    places: dict[bytes, int] = {}
    for i, digest in enumerate(_digests(within) if within is not None else ()):
        places.setdefault(digest, i)
    number, first = 0, None
    for i, digest in enumerate(_digests(rows)):
        if digest in places:
            number += 1
            first = first or (rows.place(i), (within or rows).place(places[digest]))
        elif within is None:
            places[digest] = i
    return Repeats(number, first)


def visible(text: str) -> str:
    """Text with a mark at every line break, and control characters as the pictures that stand for them."""
    return "".join(
        "↵\n" if letter == "\n" else chr(0x2400 + ord(letter)) if ord(letter) < 32 and letter != "\t" else letter
        for letter in text.replace("\x7f", "\u2421")
    )


def _digests(rows: Rows) -> Iterator[bytes]:
    for row in rows.rows:
        yield hashlib.blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=16).digest()


def _equal(repeats: Repeats) -> str:
    return (
        "" if repeats.first is None else " ({} = {}{})".format(*repeats.first, ", ..." if repeats.num_rows > 1 else "")
    )


def _steps() -> Iterator[int]:
    scale = 1
    while True:
        yield from (scale * step for step in _STEPS)
        scale *= 10


def _special_tokens(sequences: _Sequences, tokenizer: "PreTrainedTokenizerBase") -> Iterator[SpecialToken]:
    """The special tokens that have a role or occur."""
    import numpy as np

    roles: dict[int, list[str]] = {}
    for role, token_id in (
        ("bos", tokenizer.bos_token_id),
        ("eos", tokenizer.eos_token_id),
        ("pad", tokenizer.pad_token_id),
        ("unk", tokenizer.unk_token_id),
    ):
        if token_id is not None:
            roles.setdefault(token_id, []).append(role)
    ends = np.cumsum(sequences.lengths)
    for token_id in dict.fromkeys([*roles, *_special_ids(tokenizer)]):
        trained = np.flatnonzero(sequences.labels == token_id)
        num_tokens = int((sequences.ids == token_id).sum())
        if token_id in roles or num_tokens:
            yield SpecialToken(
                text=tokenizer.convert_ids_to_tokens(token_id),
                id=token_id,
                roles=tuple(roles.get(token_id, ())),
                num_tokens=num_tokens,
                num_trained=len(trained),
                num_sequences_trained=len(np.unique(np.searchsorted(ends, trained, side="right"))),
            )


def _special_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return sorted({*tokenizer.all_special_ids, *added})


def _sample(ids: Sequence[int], labels: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> Sample:
    """Tokens with the text of each, as it reads behind the one before it."""
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
    return Sample(tuple(pieces))


def _text_behind(before: list[int], ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    """What tokens add to the text; some tokenizers take the space from a text's first token."""
    head, whole = _decode(before, tokenizer), _decode([*before, *ids], tokenizer)
    return whole[len(head) :] if whole.startswith(head) else _decode(ids, tokenizer)


def _decode(ids: Iterable[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
