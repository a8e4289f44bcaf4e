"""Preparation of rows for a trainer, and the cache of prepared rows.

From the rows of a recipe to what a trainer reads: tokenised, mixed, packed, and found again next time.

There are two stages, and each is kept in the cache. The tokens of a source depend on its rows, the tokenizer and two
settings; so they serve every mixture, packed or not, and the report. What the trainer reads is made of the tokens of
all sources: chosen by weight, put in order, packed where the recipe asks for it, and written as one Arrow file that is
memory-mapped in training.

Prepared rows, kept once and shared by all runs.

What an entry is made of decides its name: the rows themselves (not their file's name or date), the tokenizer with its
chat template, the settings, the code of the data path and the libraries beneath it. A changed row, template or
setting is another name, so nothing stale is ever found; an entry never changes once it is there.

An entry is written beside its place and moved there whole, so that a reader sees all of it or nothing, and of
several writers at once the first wins. Its account is written last, with the size of every file: what was cut short
by a full disk or a power cut is seen and made again.
"""

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import platformdirs

from tunekit.data.media.collate import MEDIA, TEXT, as_json
from tunekit.data.media.expand import MediaTokens
from tunekit.data.media.kinds import Medium, medium_of
from tunekit.data.packing.sequences import MIXING_SEED, Batch, Mixing, Mixture, Sequences, best_fit, mix, ordered
from tunekit.data.sources.load import LoadedData
from tunekit.data.sources.rows import Places, Rows, cache_folder, clear_folder
from tunekit.data.tokenization.encode import Encoder
from tunekit.data.tokenization.teacher_tokens import TEACHER_IDS, TEACHER_LABELS, TeacherRows, TeacherTokenizer
from tunekit.data.tokenization.tokenize import TokenReport, tokenize
from tunekit.errors import DataError
from tunekit.recipe.sections.data import CompleteSource, DataSection, TooLong

if TYPE_CHECKING:
    import datasets
    import numpy as np
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


ACCOUNT = "tunekit.json"
"""File of an entry that says what is in it; written last."""

LIBRARIES = ("datasets", "jinja2", "numpy", "pillow", "pyarrow", "tokenizers", "transformers", "trl")
"""Packages whose version can change how rows become tokens."""

Kind = Literal["tokens", "sequences", "log-probabilities"]
"""Contents of an entry: tokens of one source, rows for a trainer, or log-probabilities of a reference model."""


def cache_root() -> Path:
    """Folder of all entries: `tunekit/data` in the user's cache folder (XDG_CACHE_HOME on Linux)."""
    return platformdirs.user_cache_path("tunekit") / "data"


@dataclass(frozen=True)
class Entry:
    """Something prepared.

    Attributes:
        path: Its folder.
        kind: What it holds.
        source: Where the rows came from, as the recipe names it.
        account: What its maker had to say about it.
        size_bytes: What it takes on the disk.
    """

    path: Path
    kind: Kind
    source: str
    account: Mapping[str, Any]
    size_bytes: int


def key_of(kind: Kind, made_of: Mapping[str, Any]) -> str:
    """Name of the entry that is made of this by this code.

    Args:
        kind: What the entry holds.
        made_of: All that its content depends on, as values that JSON can hold.
    """
    whole = {
        "kind": kind,
        **made_of,
        "code": _digest_files(file for end in ("py", "yaml") for file in Path(__file__).parent.rglob(f"*.{end}")),
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:40]


def digest_of(processing: "PreTrainedTokenizerBase | ProcessorMixin") -> str:
    """Digest of all that a tokenizer or processor saves: vocabulary, special tokens, chat template, image settings."""
    with tempfile.TemporaryDirectory() as folder:
        processing.save_pretrained(folder)
        return _digest_files(_files(Path(folder)))


def cached(key: str, kind: Kind, source: str, make: Callable[[Path], dict[str, Any]]) -> Entry:
    """The entry of this name, made first if it is not there yet.

    Args:
        key: Name of the entry, from `key_of`.
        kind: What it holds.
        source: Where the rows came from.
        make: Fills a folder and returns its account, as values that JSON can hold; called only if it is needed.

    Raises:
        DataError: The cache cannot be written.
    """
    cache_folder()
    place = cache_root() / key
    entry = _read(place)
    if entry is None:
        _store(place, kind, source, make)
        entry = _read(place)
    if entry is None:
        raise DataError(f"cannot store prepared rows in {place}", hint="check the disk, or set XDG_CACHE_HOME")
    return entry


def found(key: str) -> Entry | None:
    """The entry of this name, if it is there."""
    return _read(cache_root() / key)


def list_entries() -> list[Entry]:
    """All whole entries, the largest first."""
    root = cache_root()
    entries = [_read(place) for place in (root.iterdir() if root.is_dir() else ())]
    return sorted((entry for entry in entries if entry is not None), key=lambda entry: -entry.size_bytes)


def clear() -> int:
    """Remove every entry, and what writers left behind; return the bytes that were freed."""
    return clear_folder(cache_root())


def _read(place: Path) -> Entry | None:
    """The entry at a place, if it is whole: all its files have the size that it says."""
    file = place / ACCOUNT
    if not file.is_file():
        return None
    manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for name, size in manifest["files"].items():
        if not (place / name).is_file() or (place / name).stat().st_size != size:
            return None
    return Entry(place, manifest["kind"], manifest["source"], manifest["account"], sum(manifest["files"].values()))


def _store(place: Path, kind: Kind, source: str, make: Callable[[Path], dict[str, Any]]) -> None:
    """Write an entry beside its place and move it there, unless another writer was faster."""
    draft = place.parent / f".{place.name}-{uuid.uuid4().hex}"
    try:
        draft.mkdir(parents=True)
        account = make(draft)
        files = {file.relative_to(draft).as_posix(): file.stat().st_size for file in _files(draft)}
        whole = {"kind": kind, "source": source, "account": account, "files": files}
        (draft / ACCOUNT).write_text(json.dumps(whole), encoding="utf-8")
        # Whole, another writer's entry is as good; only one that is damaged makes way.
        if place.is_dir() and _read(place) is None:
            shutil.rmtree(place, ignore_errors=True)
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    except OSError as error:
        raise DataError(
            f"cannot store prepared rows in {place.parent}: {error.strerror}",
            hint="free some space (`tunekit data cache` lists the cache), or set XDG_CACHE_HOME",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _digest_files(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()


ROWS = "rows.arrow"
"""File of what a trainer reads."""

ORIGINS = "origins.npy"
"""File beside it that says of each sequence, those in packs too, from which source it is and which of its sequences:
int32, `(2, sequences)`."""

_BATCH_TOKENS = 2**20
_UNCUT = 2**31 - 1
"""Longest sequence of which nothing is cut, in tokens."""

Progress = Callable[[str, int, int], None]
"""Called with a source, how many of its rows are done, and how many there are."""


@dataclass(frozen=True)
class SourceShare:
    """Share of a source in a mixture.

    Attributes:
        source: The source as the recipe names it.
        num_sequences: Sequences taken, each as often as it is taken.
        num_tokens: Their tokens.
    """

    source: str
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True)
class Prepared:
    """Prepared rows for a trainer, and their provenance.

    Attributes:
        path: The Arrow file: columns `input_ids` and `labels`, `seq_lengths` where packed; and where rows have media
            `media_text` and `media`, of which a processor makes the same tokens, and features; where packed, a list
            of those of each document. For a teacher with another tokenizer `teacher_input_ids` and `teacher_labels`.
        reports: What became of the rows of each source.
        shares: What was taken of each source.
        num_sequences: Sequences to train on, packed where the recipe asks for it.
        num_tokens: Their tokens.
        num_trainable_tokens: Those that count in the loss.
        most_pixel_values: Values of the pixels of the sequence with the most.
        notes_of_teacher: Notes on the tokens of a teacher, a sentence each.
    """

    path: Path
    reports: tuple[TokenReport, ...]
    shares: tuple[SourceShare, ...]
    num_sequences: int
    num_tokens: int
    num_trainable_tokens: int
    most_pixel_values: int
    notes_of_teacher: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, a sentence each."""
        return (*dict.fromkeys(note for report in self.reports for note in report.notes), *self.notes_of_teacher)

    def dataset(self) -> "datasets.Dataset":
        """The sequences, memory-mapped."""
        return read_dataset(self.path)

    def link_to(self, path: Path) -> None:
        """Give a run its own name for the sequences: no second copy, and still there when the cache is cleared."""
        try:
            os.link(self.path, path)
        except OSError:  # on another disk
            shutil.copy2(self.path, path)


def read_dataset(path: Path) -> "datasets.Dataset":
    """Open the dataset that a trainer reads, memory-mapped."""
    from datasets import Dataset

    return Dataset.from_file(str(path))


@dataclass(frozen=True)
class SourceTokens:
    """The tokens of one source.

    Attributes:
        source: The source as the recipe names it.
        sequences: The sequences, neither mixed nor packed.
        report: What became of the rows.
        key: Their name in the cache.
        ranks: The number of each sequence's row in the column of a curriculum, where there is one.
    """

    source: str
    sequences: Sequences
    report: TokenReport
    key: str
    ranks: "np.ndarray | None" = None

    @property
    def order(self) -> "np.ndarray":
        """Numbers by which a curriculum orders the sequences: those of its column, or else their lengths."""
        return self.sequences.lengths if self.ranks is None else self.ranks


@dataclass(frozen=True)
class Split:
    """The rows of one split, their tokens, and what a trainer reads.

    Attributes:
        name: `train` or `eval`.
        rows: The rows of each source.
        tokens: The tokens of each source.
        weights: The weight of each source, or None where the recipe gives none.
        prepared: What a trainer reads.
    """

    name: str
    rows: tuple[Rows, ...]
    tokens: tuple[SourceTokens, ...]
    weights: tuple[float | None, ...]
    prepared: Prepared

    @property
    def places(self) -> Places:
        """Location of the row of each sequence, in the order in which a trainer reads them."""
        import numpy as np

        source, index = np.load(self.prepared.path.with_name(ORIGINS))
        return Places.of(self.rows, [tokens.sequences.rows for tokens in self.tokens], source, index)


def prepare_data(
    section: DataSection,
    data: LoadedData,
    tokenizer: "PreTrainedTokenizerBase",
    on_progress: Progress | None = None,
    *,
    media: MediaTokens | None = None,
    teacher: TeacherTokenizer | None = None,
) -> tuple[Split, ...]:
    """Tokenise, mask, mix and pack the rows of a recipe, or find them in the cache.

    Args:
        section: The data section.
        data: The rows.
        tokenizer: Tokenizer of the model.
        on_progress: Told how far the rows of a source are.
        media: The tokens of media, where rows have some.
        teacher: The tokenizer of a teacher that reads rows in its own tokens.

    Returns:
        `train`, and `eval` if the recipe has one.

    Raises:
        DataError: No token would be trained on, the rows do not fit the chat template, or a teacher reads another
            answer.
    """
    splits = []
    for name, sources, mixing in splits_of(section, data):
        tokens = tuple(
            tokens_of(
                rows,
                tokenizer,
                max_length=section.max_length,
                too_long=section.too_long,
                media=media,
                on_progress=on_progress,
            )
            for rows in sources
        )
        inputs = None
        if media is not None:
            inputs = [MediaInputs(rows, tokenizer, media) for rows in sources]
        its = None
        if teacher is not None:
            # Whole answers are compared with those of the model; what is too long is cut behind that.
            its = [tokens_of(rows, teacher.tokenizer, max_length=_UNCUT, on_progress=on_progress) for rows in sources]
        prepared = prepare_rows(
            tokens,
            mixing,
            max_length=section.max_length,
            packing=section.packing,
            inputs=inputs,
            taught=None if teacher is None or its is None else Taught(teacher, sources, its),
        )
        splits.append(Split(name, sources, tokens, mixing.weights or (None,) * len(sources), prepared))
    return tuple(splits)


def splits_of(section: DataSection, data: LoadedData) -> Iterator[tuple[str, tuple[Rows, ...], Mixing]]:
    """The name, the sources and the mixture of each split that has rows."""
    if data.train:
        yield "train", data.train, mixing_of(section)
    if data.eval:
        yield "eval", data.eval, Mixing(mixing="concatenate")


def mixing_of(section: DataSection) -> Mixing:
    """Return the mixture settings of a recipe's data section."""
    sources: Sequence[CompleteSource] = section.sources
    weights = tuple(source.weight for source in sources if source.weight is not None)
    curriculum = section.curriculum if section.curriculum_column is None else "column"
    return Mixing(weights or None, section.weight_by, section.stopping_strategy, section.mixing, curriculum)


def tokens_of(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    too_long: TooLong = "truncate",
    media: MediaTokens | None = None,
    on_progress: Progress | None = None,
) -> SourceTokens:
    """The tokens of one source: found in the cache, or made.

    Raises:
        DataError: No token would be trained on, or the rows do not fit the chat template.
    """
    import numpy as np

    def make(folder: Path) -> dict[str, Any]:
        report_progress = None if on_progress is None else (lambda done, total: on_progress(rows.source, done, total))
        report = tokenize(
            rows,
            tokenizer,
            folder,
            max_length=max_length,
            too_long=too_long,
            media=media,
            on_progress=report_progress,
        )
        return asdict(report)

    made_of = {
        "source": rows.source,
        "format": rows.format,
        "rows": rows.rows.digest,
        "tokenizer": digest_of(tokenizer),
        "max_length": max_length,
        "too_long": too_long,
        "loss_on": rows.loss_on,
        "processor": digest_of(media.processor) if media is not None and rows.media else None,
    }
    key = key_of("tokens", made_of)
    entry = cached(key, "tokens", rows.source, make)
    report = TokenReport(**{**entry.account, "notes": tuple(entry.account["notes"])})
    sequences = Sequences(entry.path)
    ranks = None if rows.ranks is None else np.array(rows.ranks)[sequences.rows]
    return SourceTokens(rows.source, sequences, report, key, ranks)


class MediaInputs:
    """Inputs of a processor for the rows of a source: texts and media.

    Args:
        rows: The rows.
        tokenizer: Tokenizer of the model.
        media: The tokens of media.
    """

    def __init__(self, rows: Rows, tokenizer: "PreTrainedTokenizerBase", media: MediaTokens) -> None:
        self._rows, self._tokenizer, self._media = rows, tokenizer, media

    @cached_property
    def _encoder(self) -> Encoder:
        """Made when the first row is asked for: nothing is where the cache has them all."""
        return Encoder(self._rows, self._tokenizer, self._media)

    def num_values(self, media: Sequence[str]) -> int:
        """Return the number of values of the pixels of media."""
        return sum(self._media.of(medium).num_values for medium in _decoded(media))

    def num_values_of_pack(self, documents: Sequence[Sequence[str]]) -> int:
        """Return the same of the media of documents that a processor reads together, with its padding."""
        return self._media.num_values([_decoded(media) for media in documents])

    def of_row(self, index: int) -> tuple[str | None, list[str]]:
        """Return the text of a row, None where it is tokens, and its media as JSON."""
        if not self._rows.media:
            return None, []
        row = self._rows.rows[index]
        return self._encoder.text_of(row, self._rows.place(index)), as_json(row)


@dataclass(frozen=True)
class Taught:
    """Rows in the tokens of a teacher.

    Attributes:
        tokenizers: Tokenizers of both models.
        rows: The rows of each source.
        tokens: The tokens of each source, of which nothing is cut.
    """

    tokenizers: TeacherTokenizer
    rows: tuple[Rows, ...]
    tokens: Sequence[SourceTokens]

    def readers(self, own: Sequence[SourceTokens], max_length: int) -> list[TeacherRows]:
        """Return the rows of each source beside their sequences in tokens of the model."""
        return [
            TeacherRows(rows, mine.sequences, its.sequences, self.tokenizers, max_length)
            for rows, mine, its in zip(self.rows, own, self.tokens, strict=True)
        ]

    def notes(self, own: Sequence[SourceTokens]) -> Iterator[str]:
        """Yield how many tokens the rows of each source take on both sides."""
        for mine, its in zip(own, self.tokens, strict=True):
            counts = f"{mine.report.num_tokens:,} tokens to the model, {its.report.num_tokens:,} to the teacher"
            yield f"{mine.source}: {counts}, before its rows are truncated"


def _decoded(media: Sequence[str]) -> list[Medium]:
    return [medium_of(json.loads(medium)) for medium in media]


def prepare_rows(
    sources: Sequence[SourceTokens],
    mixing: Mixing,
    *,
    max_length: int,
    packing: bool,
    inputs: Sequence[MediaInputs] | None = None,
    taught: Taught | None = None,
) -> Prepared:
    """Prepare rows for a trainer: read from the cache, or mixed and packed.

    Args:
        sources: The tokens of each source.
        mixing: How much of each, and in which order.
        max_length: Longest sequence, in tokens.
        packing: Put several sequences into one of `max_length` tokens.
        inputs: For each source the texts and media of its rows, where some have media.
        taught: The rows in the tokens of a teacher with another tokenizer.

    Raises:
        DataError: The teacher reads other answers.
    """

    def make(folder: Path) -> dict[str, Any]:
        readers = None if taught is None else taught.readers(sources, max_length)
        packs = max_length if packing else None
        return _write(folder / ROWS, sources, mixing, max_length=packs, inputs=inputs, readers=readers)

    made_of = {
        "tokens": [source.key for source in sources],
        "mixing": asdict(mixing),
        "seed": MIXING_SEED,
        "packed": max_length if packing else None,
        "media": inputs is not None,
        "teacher": None if taught is None else [max_length, *(its.key for its in taught.tokens)],
        "ranks": [hashlib.sha256(source.order.tobytes()).hexdigest() for source in sources if mixing.curriculum],
    }
    name = " + ".join(source.source for source in sources)
    entry: Entry = cached(key_of("sequences", made_of), "sequences", name, make)
    account = entry.account
    return Prepared(
        path=entry.path / ROWS,
        reports=tuple(source.report for source in sources),
        shares=tuple(SourceShare(**share) for share in account["shares"]),
        num_sequences=account["num_sequences"],
        num_tokens=account["num_tokens"],
        num_trainable_tokens=account["num_trainable_tokens"],
        most_pixel_values=account["most_pixel_values"],
        notes_of_teacher=() if taught is None else tuple(taught.notes(sources)),
    )


def _write(
    path: Path,
    sources: Sequence[SourceTokens],
    mixing: Mixing,
    *,
    max_length: int | None,
    inputs: Sequence[MediaInputs] | None,
    readers: Sequence[TeacherRows] | None,
) -> dict[str, Any]:
    """Write the Arrow file, packed if a length of packs is given; return its account."""
    import numpy as np
    import pyarrow as pa  # type: ignore[import-untyped]

    chosen = mix([source.sequences.lengths for source in sources], mixing)
    if mixing.curriculum is not None:
        chosen = ordered(chosen, [source.order for source in sources])
    lengths = np.empty(len(chosen.index), dtype=np.int32)
    shares = []
    for number, source in enumerate(sources):
        of_source = chosen.source == number
        lengths[of_source] = source.sequences.lengths[chosen.index[of_source]]
        share = SourceShare(source.source, int(of_source.sum()), int(lengths[of_source].sum(dtype=np.int64)))
        shares.append(asdict(share))
    sizes = None
    if max_length is not None:
        order, sizes = best_fit(lengths, max_length)
        chosen, lengths = Mixture(chosen.source[order], chosen.index[order]), lengths[order]
    np.save(path.with_name(ORIGINS), np.stack([chosen.source, chosen.index]).astype(np.int32))
    columns = ("input_ids", "labels", "seq_lengths")[: 2 if sizes is None else 3]
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in columns])
    if inputs is not None:
        types = [pa.string(), pa.list_(pa.string())]
        for name, type_ in zip((TEXT, MEDIA), types if sizes is None else map(pa.list_, types), strict=True):
            schema = schema.append(pa.field(name, type_))
    for name in (TEACHER_IDS, TEACHER_LABELS) if readers is not None else ():
        schema = schema.append(pa.field(name, pa.list_(pa.int32())))
    num_trainable = most_pixel_values = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for start, stop, packs in _batches(lengths, sizes):
            batch = _gather(sources, chosen.source[start:stop], chosen.index[start:stop])
            num_trainable += int(batch.counted.sum())
            id_arrays = [batch.ids, batch.labels]
            if packs is None:
                arrays = [_lists(column, batch.lengths) for column in id_arrays]
            else:
                totals = np.add.reduceat(batch.lengths, np.cumsum(packs) - packs)
                arrays = [*(_lists(column, totals) for column in id_arrays), _lists(batch.lengths, packs)]
            if inputs is not None:
                chosen_rows = zip(chosen.source[start:stop], chosen.index[start:stop], strict=True)
                pairs = [inputs[s].of_row(int(sources[s].sequences.rows[i])) for s, i in chosen_rows]
                values = np.array([inputs[0].num_values(of_row) for _, of_row in pairs])
                columns_of_media = [list(column) for column in zip(*pairs, strict=True)]
                if packs is not None:
                    spans = list(zip((np.cumsum(packs) - packs).tolist(), np.cumsum(packs).tolist(), strict=True))
                    columns_of_media = [[column[a:b] for a, b in spans] for column in columns_of_media]
                    values = _values_of_packs(values, spans, columns_of_media[1], inputs[0])
                most_pixel_values = max(most_pixel_values, int(values.max()))
                arrays += [
                    pa.array(column, schema.field(name).type)
                    for name, column in zip((TEXT, MEDIA), columns_of_media, strict=True)
                ]
            if readers is not None:
                chosen_rows = zip(chosen.source[start:stop].tolist(), chosen.index[start:stop].tolist(), strict=True)
                of_teacher = [readers[source].of_sequence(index) for source, index in chosen_rows]
                arrays += [pa.array(column, pa.list_(pa.int32())) for column in zip(*of_teacher, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    return {
        "shares": shares,
        "num_sequences": len(lengths) if sizes is None else len(sizes),
        "num_tokens": int(lengths.sum(dtype=np.int64)),
        "num_trainable_tokens": num_trainable,
        "most_pixel_values": most_pixel_values,
    }


def _values_of_packs(
    values: "np.ndarray",
    spans: Sequence[tuple[int, int]],
    media: Sequence[Sequence[Sequence[str]]],
    inputs: MediaInputs,
) -> "np.ndarray":
    """Return the numbers of values of the pixels of packs, of which the largest has all padding of its processor.

    Args:
        values: Those of each document.
        spans: Documents `[start, end)` of each pack.
        media: Media of each document of each pack.
        inputs: The processor.
    """
    import numpy as np

    sums = np.array([values[start:end].sum() for start, end in spans])
    # Where each document is padded to the one with the most.
    padded = [(end - start) * values[start:end].max() for start, end in spans]
    heaviest = {int(np.argmax(sums)), int(np.argmax(padded))}
    return np.append(sums, [inputs.num_values_of_pack(media[pack]) for pack in heaviest])


def _batches(lengths: "np.ndarray", sizes: "np.ndarray | None") -> "Iterator[tuple[int, int, np.ndarray | None]]":
    """Ranges of sequences of about a million tokens, with the sizes of the packs in each; no pack is parted."""
    import numpy as np

    of_row = np.ones(len(lengths), dtype=np.int64) if sizes is None else sizes
    ends = np.cumsum(of_row)
    num_tokens = np.cumsum(lengths, dtype=np.int64)[ends - 1]
    row = 0
    while row < len(ends):
        before = num_tokens[row - 1] if row else 0
        next_row = max(row + 1, int(np.searchsorted(num_tokens, before + _BATCH_TOKENS, side="right")))
        start = int(ends[row - 1]) if row else 0
        yield start, int(ends[next_row - 1]), None if sizes is None else sizes[row:next_row]
        row = next_row


def _gather(sources: Sequence[SourceTokens], source: "np.ndarray", index: "np.ndarray") -> Batch:
    """Sequences of several sources in the order in which they are asked for."""
    import numpy as np

    if len(sources) == 1:
        return sources[0].sequences.take(index)
    places = [np.flatnonzero(source == number) for number in range(len(sources))]
    parts = [of.sequences.take(index[at]) for of, at in zip(sources, places, strict=True)]
    ids = np.concatenate([part.ids for part in parts])
    counted = np.concatenate([part.counted for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    # Where each sequence stands among the parts, and from there each of its tokens.
    order = np.argsort(np.concatenate(places), kind="stable")
    starts = (np.cumsum(lengths) - lengths)[order]
    lengths = lengths[order]
    tokens = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return Batch(ids[tokens], counted[tokens], lengths)


def _lists(values: "np.ndarray", lengths: "np.ndarray") -> Any:
    import numpy as np
    import pyarrow as pa

    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.ascontiguousarray(values, dtype=np.int32)))
