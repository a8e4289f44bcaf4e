"""Statistics of training data before a run: counts, lengths, duplicates, leakage, and rows as tokens.

Everything is measured on what the model will get, in its own tokens. Lengths of rows are those before anything is
cut, so that what lies beyond `max_length` can be seen; all other counts are of the sequences that are trained on.

Three numbers have a definition worth knowing. A quantile is the smallest length that at least so large a part of the
rows does not exceed (nearest rank): it is always the length of a row. What padding costs is an expectation: the
longest of `batch_size` sequences drawn at random sets the width of their batch. And a row is a duplicate if an
earlier row of its split is equal to it in every field.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunekit.data.formats.row_formats import counted
from tunekit.data.media.kinds import KINDS, Medium
from tunekit.data.media.pictures import thumbnail
from tunekit.data.sources.rows import Skipped
from tunekit.files import load_template
from tunekit.recipe.sections.data import MediaKind


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
    """Packing efficiency: the share of positions that hold tokens rather than padding.

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

    def facts(self, max_length: int, *, is_packed: bool, is_alone: bool) -> list[tuple[str, str]]:
        """Both ways to lay out sequences, as pairs of a name and words."""
        so = " (this recipe)"
        here, not_here = so if is_packed and is_alone else "", "" if is_packed else so
        packed = f"{self.packed_share:.1%} of positions hold tokens, in {counted(self.num_packed, 'sequence')}"
        padded = f"{self.padded_share:.1%} of positions hold tokens, in batches of {self.batch_size}"
        return [
            ("packed", f"{packed} of {max_length:,}{here}"),
            ("not packed", f"{padded} padded to their longest sequence{not_here}"),
        ]


@dataclass(frozen=True)
class SpecialToken:
    """A token that is no text, and how often it is there.

    Attributes:
        text: The token as the tokenizer writes it.
        id: Its number.
        roles: What the tokenizer uses it for: bos, eos, pad, unk.
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
    """A token with its text; several tokens only for a medium, or where a character is spread over them.

    Attributes:
        text: What the tokens stand for.
        ids: Their numbers.
        trained: Whether they count in the loss.
        special: Whether it is a special token.
        medium: The medium that its tokens stand for, if they do.
    """

    text: str
    ids: tuple[int, ...]
    trained: bool
    special: bool
    medium: Medium | None = None


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
class SourceReport:
    """Statistics of one source of a split.

    Attributes:
        split: `train` or `eval`.
        is_alone: Whether the split has no other source.
        source: Where the rows come from, as the recipe names it.
        format: The shape of the rows.
        num_rows: Rows read.
        num_truncated: Rows cut at `max_length`.
        num_split: Texts that go on in further sequences.
        num_dropped: Rows left out because no token of theirs would count, or because they are too long.
        num_too_long: Those that are too long.
        num_sequences: Sequences made of the others, before packing.
        num_tokens: Tokens of all sequences.
        num_trained: Those that count in the loss.
        lengths: Quantiles of the rows' lengths in tokens, before anything is cut.
        histogram: Rows by length, before anything is cut.
        packing: What packing saves; None for rows that TRL tokenises, which are never packed.
        duplicates: Rows that repeat an earlier row of the source.
        special_tokens: Special tokens, those with a role first.
        samples: The first sequences.
        num_media: Media of the rows, by kind.
        num_media_tokens: Tokens of those.
    """

    split: str
    is_alone: bool
    source: str
    format: str
    num_rows: int
    num_truncated: int
    num_split: int
    num_dropped: int
    num_too_long: int
    num_sequences: int
    num_tokens: int
    num_trained: int
    lengths: Quantiles
    histogram: tuple[Bin, ...]
    packing: Packing | None
    duplicates: Repeats
    special_tokens: tuple[SpecialToken, ...]
    samples: tuple[Sample, ...]
    num_media: Mapping[MediaKind, int] = field(default_factory=dict)
    num_media_tokens: Mapping[MediaKind, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Title of the source where there are several: `train`, or `train: chats.jsonl`."""
        return self.split if self.is_alone else f"{self.split}: {self.source}"

    @property
    def end_token(self) -> SpecialToken | None:
        """The token by which the model learns to stop: the tokenizer's own, or the special one trained most often."""
        trained = [token for token in self.special_tokens if token.num_trained]
        own = [token for token in trained if "eos" in token.roles]
        return max(own or trained, key=lambda token: token.num_trained, default=None)

    def facts(self, max_length: int, *, is_packed: bool) -> list[tuple[str, str]]:
        """Everything that is a number or a sentence, as pairs of a name and words; shown alike everywhere."""
        packing, repeats = self.packing, self.duplicates
        changed = [
            f"{number:,} {what}"
            for number, what in (
                (self.num_dropped - self.num_too_long, "skipped without a token in the loss"),
                (self.num_too_long, f"dropped, longer than {max_length:,} tokens"),
                (self.num_truncated, f"truncated at {max_length:,} tokens"),
                (self.num_split, "texts split into several sequences"),
            )
            if number
        ]
        counts = f"{self.num_rows:,} read, {self.num_rows - self.num_dropped:,} used"
        facts = [
            ("source", f"{self.source} ({self.format})"),
            ("rows", "; ".join([counts, *changed])),
            ("sequences", f"{self.num_sequences:,}"),
            ("tokens", self._tokens_words),
            ("row length", "min {min:,}, median {median:,}, p95 {p95:,}, max {max:,}".format(**asdict(self.lengths))),
        ]
        facts += self.media_facts
        if packing is not None:
            facts += packing.facts(max_length, is_packed=is_packed, is_alone=self.is_alone)
        equal = f"{counted(repeats.num_rows, 'row')}{_equal(repeats)}" if repeats.num_rows else "none"
        facts.append(("duplicates", equal))
        return facts if packing is None else [*facts, ("end token", self.end_token_words)]

    @property
    def _tokens_words(self) -> str:
        if self.num_trained == 0:
            return f"{self.num_tokens:,} in prompts"
        return f"{self.num_tokens:,}, {self.num_trained:,} in the loss ({self.trained_share:.1%})"

    @property
    def media_facts(self) -> list[tuple[str, str]]:
        """Titles of kinds of media, each with a sentence: `7, 28 tokens, 4 each on average`."""
        facts = []
        for kind, num in self.num_media.items():
            num_tokens = self.num_media_tokens.get(kind, 0)
            words = f"{num:,}, {counted(num_tokens, 'token')}, {num_tokens / num:,.0f} each on average"
            facts.append((KINDS[kind].title, words))
        return facts

    @property
    def end_token_words(self) -> str:
        """Sentence about the end-of-turn token: `<|im_end|> (id 2) trained in 30 of 30 sequences`."""
        end = self.end_token
        if end is None:
            return "none trained"
        where = f"in {end.num_sequences_trained:,} of {counted(self.num_sequences, 'sequence')}"
        return f"{end.text} (id {end.id}) trained {where}"

    @property
    def trained_share(self) -> float:
        """Part of the tokens that count in the loss."""
        return self.num_trained / self.num_tokens


@dataclass(frozen=True)
class MixedSource:
    """Part of one of several sources that is trained on.

    Attributes:
        source: The source as the recipe names it.
        weight: Its weight, where the recipe gives weights.
        num_available: Sequences that it has.
        num_taken: Sequences that are trained on in an epoch, each as often as it is.
        num_tokens: Their tokens.
        token_share: Part of all tokens that are trained on.
    """

    source: str
    weight: float | None
    num_available: int
    num_taken: int
    num_tokens: int
    token_share: float


@dataclass(frozen=True)
class DataReport:
    """Statistics of the training and evaluation data of a recipe.

    Attributes:
        max_length: Longest sequence, in tokens.
        is_packed: Whether the recipe asks for packing.
        sources: Each source of `train`, then of `eval` where the recipe has one.
        mixture: What is trained on of each source, where `train` has several.
        num_train: Sequences that are trained on in an epoch, packed where the recipe asks for it.
        leaked: Rows of `eval` that stand in `train` too.
        skipped: Bad rows that were left out, as the recipe allows; no split counts them.
        notes: What was found and decided while reading, a sentence each.
    """

    max_length: int
    is_packed: bool
    sources: tuple[SourceReport, ...]
    mixture: tuple[MixedSource, ...]
    num_train: int
    leaked: Repeats
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]

    @property
    def mixture_words(self) -> str:
        """Sentence about an epoch of the mixture: `48 packed sequences per epoch, 98.7% of positions hold tokens`."""
        if not self.is_packed:
            return f"{counted(self.num_train, 'sequence')} per epoch"
        filled = sum(part.num_tokens for part in self.mixture) / (self.num_train * self.max_length)
        return f"{counted(self.num_train, 'packed sequence')} per epoch, {filled:.1%} of positions hold tokens"

    def warnings(self) -> list[str]:
        """Return warnings to look at before training, a sentence each."""
        messages = []
        if self.leaked.num_rows:
            messages.append(
                f"{counted(self.leaked.num_rows, 'row')} of eval also in train{_equal(self.leaked)}; "
                "the eval loss will be too low"
            )
        for split in self.sources:
            if split.split == "train" and split.packing is not None and split.end_token is None:
                messages.append("no special token is trained; the model does not learn to stop")
            if split.num_truncated:
                share = split.num_truncated / split.num_rows
                messages.append(
                    f"{split.title}: {share:.1%} of rows truncated at data.max_length={self.max_length}; "
                    "their ends are not trained on"
                )
            if split.duplicates.num_rows:
                messages.append(f"{split.title}: {counted(split.duplicates.num_rows, 'row')} repeated exactly")
            messages += (
                f"{split.title}: {counted(token.num_tokens, 'unknown token')} ({token.text}), "
                "text outside the tokenizer's vocabulary"
                for token in split.special_tokens
                if token.roles == ("unk",) and token.num_tokens
            )
        return messages

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {**asdict(self), "warnings": self.warnings()}

    def to_html(self) -> str:
        """The report as one page that needs nothing else."""
        return self._render(page=True)

    def _repr_html_(self) -> str:
        return self._render(page=False)

    def _render(self, *, page: bool) -> str:
        template = load_template(Path(__file__).with_name("report.html.jinja"), visible=visible, thumbnail=thumbnail)
        return template.render(report=self, page=page)

    def __str__(self) -> str:
        lines = [f"warning: {warning}" for warning in self.warnings()]
        for split in self.sources:
            lines += [
                "",
                split.title,
                *(f"  {name:<12} {words}" for name, words in split.facts(self.max_length, is_packed=self.is_packed)),
            ]
        return "\n".join(lines).lstrip()


def visible(text: str) -> str:
    """Text with a mark at every line break, and control characters as the pictures that stand for them."""
    return "".join(
        "↵\n" if letter == "\n" else chr(0x2400 + ord(letter)) if ord(letter) < 32 and letter != "\t" else letter
        for letter in text.replace("\x7f", "\u2421")
    )


def _equal(repeats: Repeats) -> str:
    more = ", ..." if repeats.num_rows > 1 else ""
    return "" if repeats.first is None else " ({} = {}{})".format(*repeats.first, more)
