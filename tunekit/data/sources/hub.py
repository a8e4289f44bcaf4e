"""Datasets of the Hugging Face hub, read through `datasets`.

The hub is asked once, with a short timeout, before `datasets` is let loose: without a network `datasets` would
retry for half a minute first. With HF_HUB_OFFLINE=1 that question is left out and `datasets` serves what was
downloaded earlier. Code that comes with a dataset is never run; `datasets` itself no longer can.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from tunekit.data.formats.messages import media_kind
from tunekit.data.formats.row_formats import listed
from tunekit.data.sources.files import Record, Table, without_nested_nulls
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSource

if TYPE_CHECKING:
    import datasets

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""A dataset's name on the hub: `owner/name`, or one word for the oldest ones."""

EVAL_SPLITS = ("validation", "test", "eval")
"""Splits that are evaluated on when a recipe names none."""

_TIMEOUT_SECONDS = 5.0


def open_hub(
    source: DataSource, *, key: str, default_split: Literal["train", "eval"], streaming: bool = False
) -> Table:
    """Download (or find in the cache) a dataset of the hub.

    Args:
        source: The dataset's name, configuration, split and revision.
        key: The recipe's key of the source, for messages.
        default_split: What is wanted where the source names no split.
        streaming: Read the rows as they come instead of downloading all of them first.

    Raises:
        DataError: No such dataset, configuration or split; no access; or no network.
    """
    import datasets

    if streaming and source.split is not None and "[" in source.split:
        raise DataError(
            f"{key}.split: slicing a split ('{source.split}') is unsupported with streaming",
            hint=f"use the whole split '{source.split.partition('[')[0]}', or unset data.streaming",
        )
    _ask_hub(source, key)
    try:
        split = source.split or ("train" if default_split == "train" else _eval_split(source, key))
        dataset = datasets.load_dataset(
            source.path, name=source.name, split=split, revision=source.revision, streaming=streaming
        )
    except (datasets.exceptions.DatasetsError, ValueError, RuntimeError, OSError) as error:
        # `datasets` tells of a wrong configuration or split by a ValueError, of a dataset script by a RuntimeError
        # and of files that are neither in the cache nor to be had by an OSError.
        message = " ".join(str(error).split())
        raise DataError(f"{key}: cannot load the Hub dataset '{source.path}': {message}") from error
    return open_stream(dataset, source.path) if streaming else open_dataset(dataset, source.path)


def open_dataset(dataset: "datasets.Dataset", name: str = "the dataset") -> Table:
    """A `datasets.Dataset` as a table of numbered rows."""
    return open_stream(dataset.to_iterable_dataset(), name)


def open_stream(dataset: "datasets.IterableDataset", name: str) -> Table:
    """A `datasets.IterableDataset` as a table of numbered rows; each reading asks for them anew.

    Args:
        dataset: The rows.
        name: What messages call it.

    Raises:
        DataError: There are no rows, or they stop coming.
    """
    import datasets

    def rows(wanted: Sequence[str] | None) -> Iterator[Record]:
        number = 0
        chosen = dataset.select_columns(list(wanted)) if wanted else dataset
        if chosen.features is not None and any(media_kind(column) for column in chosen.features):
            chosen = chosen.decode(False)
        try:
            for number, row in enumerate(chosen, start=1):
                yield Record(number, without_nested_nulls(row))
        except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
            message = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{name} row {number + 1}: cannot read the next row ({message})") from error

    # Only some datasets say their columns before the first row has come.
    columns: Sequence[str] | None = dataset.column_names
    if columns is None:
        first = next(rows(None), None)
        if first is None:
            raise DataError(f"{name}: no rows")
        assert isinstance(first.value, dict)
        columns = list(first.value)
    return Table(columns=tuple(columns), read=rows, unit="row")


def _ask_hub(source: DataSource, key: str) -> None:
    """Ask the hub whether the dataset is there, within a few seconds."""
    import httpx2
    from huggingface_hub import HfApi, constants, errors

    try:
        HfApi().dataset_info(source.path, revision=source.revision, timeout=_TIMEOUT_SECONDS)
    except errors.OfflineModeIsEnabled:
        return
    except (errors.HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        part, hint = "path", None
        match error:
            case errors.GatedRepoError():
                what = f"the Hub dataset '{source.path}' is gated"
                page = f"{constants.ENDPOINT}/datasets/{source.path}"
                hint = f"request access at {page}, then log in with `hf auth login`"
            case errors.RepositoryNotFoundError():
                what = f"no file and no Hub dataset '{source.path}'"
                hint = "check the name; for a private dataset log in with `hf auth login`"
            case errors.RevisionNotFoundError():
                part, what = "revision", f"the Hub dataset '{source.path}' has no revision '{source.revision}'"
            case errors.HfHubHTTPError():
                what = f"the Hub returned HTTP {error.response.status_code} for the dataset '{source.path}'"
            case _:
                what = f"no file '{source.path}', and the Hub is unreachable at {constants.ENDPOINT}"
                hint = "check the name and the network; to use a cached copy, set HF_HUB_OFFLINE=1"
        raise DataError(f"{key}.{part}: {what}", hint=hint) from error


def _eval_split(source: DataSource, key: str) -> str:
    """The one split made for evaluation."""
    import datasets

    splits: list[str] = datasets.get_dataset_split_names(source.path, source.name, revision=source.revision)
    available = [split for split in EVAL_SPLITS if split in splits]
    if len(available) != 1:
        why = f"has no evaluation split, only {listed(splits)}"
        if available:
            why = f"has several evaluation splits ({listed(available)})"
        raise DataError(f"{key}.split: the Hub dataset '{source.path}' {why}", hint="set the split to evaluate on")
    return available[0]
