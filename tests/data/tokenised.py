"""Rows tokenised into a folder of their own, as the tests look at them."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from tunekit.data.packing.sequences import Sequences
from tunekit.data.sources.rows import Rows
from tunekit.data.tokenization.tokenize import TokenReport, tokenize


@dataclass(frozen=True)
class Tokenised:
    sequences: Sequences
    report: TokenReport


def tokenised(rows: Rows, tokenizer, *, max_length: int, loss_on="assistant") -> Tokenised:
    with tempfile.TemporaryDirectory() as folder:
        report = tokenize(replace(rows, loss_on=loss_on), tokenizer, Path(folder), max_length=max_length)
        return Tokenised(Sequences(Path(folder)), report)
