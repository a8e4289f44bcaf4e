"""Bytes of tokens, and the pieces of text that two tokenizers both spell with whole tokens.

Two byte-level BPE tokenizers cut the same text in other places. A piece reaches from one place where both cut to the
next such place: each has one token or several of each side, and both sides stand for the same bytes.
"""

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tunekit.data.packing.sequences import IGNORED, common_prefix_length
from tunekit.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that stand for themselves in the alphabet of byte-level models; the others have symbols from 256 on."""

_ALPHABET = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)
}

_NORMAL_FORMS = ("NFC", "NFKC")
_SEGMENTS = re.compile("[^\udc80-\udcff]+|[\udc80-\udcff]")
"""Text, or one byte that is no part of UTF-8, as Python's `surrogateescape` writes it."""


class TokenBytes:
    """Bytes of the tokens of a byte-level BPE tokenizer.

    Args:
        tokenizer: The tokenizer.
        field: Field of the recipe that names its model.
        path: Where the model comes from.

    Attributes:
        special: Ids of special tokens, at which an answer ends.

    Raises:
        ModelError: It is of another kind, whose tokens stand for no certain bytes.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", field: str, path: str) -> None:
        why = _why_no_bytes(tokenizer)
        if why is not None:
            problem = f"{field}: the tokenizer of {path!r} {why}; gold aligns both tokenizers by the bytes of tokens"
            hint = "use a model with a byte-level BPE tokenizer (GPT-2, Llama 3, Qwen), or train on the teacher's "
            raise ModelError(problem, hint=f"{hint}answers with method sft")
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        ends = [number for number, token in added.items() if token.special]
        self.special: frozenset[int] = frozenset([*tokenizer.all_special_ids, *ends])

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        added = self._tokenizer.get_added_vocab()
        spelled = {number: _bytes_of(token) for token, number in self._tokenizer.get_vocab().items()}
        return spelled | {number: content.encode() for content, number in added.items()}

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; none of an id without a token, which a padded vocabulary has."""
        return [self._bytes.get(number, b"") for number in ids]

    def encode(self, content: bytes) -> list[int]:
        """Return the tokens of bytes, which need not be UTF-8: what a model generates can end within a character."""
        ids: list[int] = []
        for segment in _SEGMENTS.findall(content.decode("utf-8", "surrogateescape")):
            if "\udc80" <= segment[0] <= "\udcff":
                (byte,) = segment.encode("utf-8", "surrogateescape")
                ids.append(self._single[byte])
            else:
                ids += self._tokenizer(segment, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @cached_property
    def _single(self) -> dict[int, int]:
        vocabulary = self._tokenizer.get_vocab()
        return {byte: vocabulary[letter] for letter, byte in _ALPHABET.items()}


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[letter] for letter in token)
    except KeyError:
        return token.encode()


def _why_no_bytes(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return why the bytes of tokens are not known; None where they are."""
    if not tokenizer.is_fast:
        return "has no tokenizer.json"
    backend: Tokenizer = vars(tokenizer)["_tokenizer"]
    parts: dict[str, Any] = json.loads(backend.to_str())
    model = parts["model"]
    if model["type"] != "BPE" or not set(model["vocab"]) >= set(_ALPHABET):
        return "is no byte-level BPE"
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return "marks where words begin or end"
    normalizers = _kinds(parts["normalizer"], "normalizers")
    if not set(normalizers) <= set(_NORMAL_FORMS):
        return f"changes texts ({', '.join(normalizers)})"
    pre_tokenizer = parts["pre_tokenizer"]
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    levels = [step for step in steps if step["type"] == "ByteLevel"]
    if not levels:
        return "is no byte-level BPE"
    if any(step["add_prefix_space"] for step in levels):
        return "puts a space before texts"
    return None


def _kinds(component: dict[str, Any] | None, key: str) -> list[str]:
    if component is None:
        return []
    return [part["type"] for part in component.get(key, [component])]


def answers_in(ids: Sequence[int], labels: Sequence[int], special: Collection[int]) -> list[tuple[int, int]]:
    """Return where the texts of a row's answers stand, `[start, end)`: runs of trained tokens up to a special one.

    Args:
        ids: Token ids.
        labels: The trained ones of them, -100 for others.
        special: Ids of special tokens, such as those that end a turn, which the other tokenizer lacks.
    """
    answers, place = [], 0
    while place < len(ids):
        if labels[place] == IGNORED:
            place += 1
            continue
        start = place
        while place < len(ids) and labels[place] != IGNORED:
            place += 1
        end = next((at for at in range(start, place) if ids[at] in special), place)
        answers.append((start, end))
    return answers


def pieces_of(own: Sequence[bytes], other: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return the ends of the pieces of a text, in tokens of both sides: numbers of tokens up to there.

    Args:
        own: Bytes of the tokens of one side.
        other: Those of the other side. Where the texts differ, or one is shorter, the pieces end.
    """
    num_common = common_prefix_length(b"".join(own), b"".join(other))
    ends = {end: number for number, end in enumerate(accumulate(map(len, own)), start=1) if 0 < end <= num_common}
    others = {end: number for number, end in enumerate(accumulate(map(len, other)), start=1)}
    return [(number, others[end]) for end, number in ends.items() if end in others]
