"""Rows that are token ids already.

The ids are taken as they are, so a mistake in them cannot be seen later. Labels follow the Hugging Face convention:
one for each token, equal to it where it counts and -100 where it does not; the model itself compares each label with
what it predicts one place before. Labels that were shifted by hand, or masked with another number, would train on
wrong words without an error, and are refused.
"""

from tunekit.data.formats.row_formats import BadRow, Row, described, listed, of_type
from tunekit.data.packing.sequences import IGNORED

_MASKS = ("completion_mask", "assistant_masks")


def check_tokens(row: Row) -> Row:
    """A row as `input_ids` with `labels`; all tokens count where nothing says which."""
    ids = _integers(row["input_ids"], "input_ids")
    if not ids:
        raise BadRow("input_ids is empty")
    low = next((i for i, token in enumerate(ids) if token < 0), None)
    if low is not None:
        raise BadRow(f"input_ids[{low}] must be at least 0, got the number {ids[low]}")
    if row.get("attention_mask") is not None:
        mask = _bits(row["attention_mask"], "attention_mask", len(ids))
        if 0 in mask:
            raise BadRow(
                f"attention_mask[{mask.index(0)}] is 0: the row is padded; leave the padding out of every column"
            )
    present = [column for column in ("labels", *_MASKS) if row.get(column) is not None]
    if len(present) > 1:
        raise BadRow(f"{listed(present)} each say which tokens count; keep one of them")
    if not present:
        return {"input_ids": ids, "labels": list(ids)}
    if present == ["labels"]:
        return {"input_ids": ids, "labels": _labels(row["labels"], ids)}
    mask = _bits(row[present[0]], present[0], len(ids))
    return {"input_ids": ids, "labels": [token if bit else IGNORED for token, bit in zip(ids, mask, strict=True)]}


def _labels(value: object, ids: list[int]) -> list[int]:
    labels = _integers(value, "labels")
    _check_length(labels, "labels", len(ids))
    for i, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (token, IGNORED):
            raise BadRow(
                f"labels[{i}] is {label}, but input_ids[{i}] is {token}: a label is the token at its own place (they "
                f"are not shifted; the model does that) or {IGNORED} (no other number leaves a token out)"
            )
    return labels


def _bits(value: object, where: str, length: int) -> list[int]:
    bits = _integers(value, where)
    _check_length(bits, where, length)
    other = next((i for i, bit in enumerate(bits) if bit not in (0, 1)), None)
    if other is not None:
        raise BadRow(f"{where}[{other}] must be 0 or 1, got the number {bits[other]}")
    return bits


def _check_length(values: list[int], where: str, length: int) -> None:
    if len(values) != length:
        raise BadRow(f"{where} must be as long as input_ids ({length:,}), got {len(values):,}")


def _integers(value: object, where: str) -> list[int]:
    if isinstance(value, str):
        raise BadRow(
            f"{where} must be a list of whole numbers, got a string; "
            "lists belong in .jsonl or .parquet, where a column can hold one"
        )
    numbers = of_type(value, list, f"{where} must be a list of whole numbers")
    for i, number in enumerate(numbers):
        if type(number) is not int:
            raise BadRow(f"{where}[{i}] must be a whole number, got {described(number)}")
    return numbers
