r"""Text to token ids by looking words up, for byte-level BPE tokenizers (GPT-2, Llama 3, Qwen, DeepSeek, GPT-OSS, ...).

Such a tokenizer cuts its added tokens out of the text, cuts what lies between them into words with a regular
expression, and merges the bytes of each word into tokens. No word knows of its neighbours, and text is made of few
different words: remembered once, most of them cost a look-up afterwards. What comes out is the same, id for id, for
these reasons:

- **The words are those of a known kind.** A pattern is taken only where each of its alternatives is in the list below.
  In all of these a space stands at the start of a word, or behind nothing but white space, and where they look
  ahead, a space counts as much as the end of the text and hides what is behind it. So text may be cut before every
  space that follows something else than white space, and each piece be encoded alone. Mostly that takes no regular
  expression, but `str.split`.
- **A piece that is not remembered** is cut into words by Python's `re` where it is ASCII, with the classes of
  characters written out, and by the tokenizer's own pre-tokenizer where it is not: which of all characters are letters
  is never decided here. The tokenizer's own model makes tokens of the words. Long ones the tokenizer encodes itself.
- **An added token is found as the tokenizer finds it**: the leftmost, and of those the longest. Tokens that swallow
  white space around them, or stand only as whole words, are left to the tokenizer.
- **Unicode normalisation** leaves normalised text as it is, and never reaches over a space. Text that the tokenizer's
  own normaliser changes is left to the tokenizer.

Last, the encoder is compared with its tokenizer on a handful of texts before it is handed out.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunekit.files import read_table

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_Form = Literal["NFC", "NFKC"]

_MOST_REMEMBERED = 2**17
"""A memory that holds so many texts is emptied: about 30 MB."""

_LONGEST_REMEMBERED = 40
"""Longer texts hardly come twice. In characters."""

_TABLES = read_table(Path(__file__).with_name("fast_bpe.yaml"))
_LETTERS, _NUMBERS, _SYMBOLS = _TABLES["letters"], _TABLES["numbers"], _TABLES["symbols"]
_SPACES = r"\s+"
"""With this alternative, a word begins at every space, if not before."""
_KNOWN = (*_LETTERS, *_NUMBERS, *_SYMBOLS, _SPACES, *_TABLES["others"])
"""The alternatives that the patterns of well-known models are made of."""

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern that the `ByteLevel` pre-tokenizer brings with it."""

_ASCII_MEMBERS: dict[str, str] = _TABLES["ascii"]

_ASCII_SYMBOLS = {byte: 256 + i for i, byte in enumerate((*range(33), 127))}
"""Symbols of these bytes in the alphabet of byte-level models; other ASCII stands for itself."""

_AFTER_A_WORD = re.compile(r" (?<=\S )")
"""A space that text may be cut before. Python takes a few more characters for white space than tokenizers do."""


class WordEncoder:
    """Encodes text with one tokenizer, as the tokenizer is now, and remembers the words.

    Attributes:
        byte_lengths: By token id, how many bytes of UTF-8 text the token stands for; those of a text's tokens sum up
            to the text's.
    """

    def __init__(
        self,
        backend: "Tokenizer",
        form: _Form | None,
        steps: list[list[str]],
        added: dict[str, int],
        byte_lengths: "np.ndarray",
    ) -> None:
        """Take over the steps of a tokenizer that this module supports.

        Args:
            backend: The tokenizer, of the library `tokenizers`.
            form: Unicode normal form that text is brought into, if any.
            steps: Alternatives of the patterns by which text is cut into words, one pattern after the other.
            added: Ids of the added tokens.
            byte_lengths: By token id, the bytes that it stands for.
        """
        self.byte_lengths = byte_lengths
        self._form = form
        self._backend = backend
        self._normalize = str if form is None else backend.normalizer.normalize_str
        self._pre_tokenize = backend.pre_tokenizer.pre_tokenize_str
        self._model_tokenize = backend.model.tokenize
        self._splits = [_ascii_split(step) for step in steps]
        self.added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._cut_out_added = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})").split
        self._segments = _Memory(self._segment_ids)
        self._behind_space = _Memory(self._ids_behind_space)
        self._words = _Memory(self._word_ids)

    def encode(self, text: str) -> list[int] | None:
        """Token ids of a text, as `tokenizer(text, add_special_tokens=False)["input_ids"]`.

        None where the text is not in the tokenizer's Unicode normal form; the tokenizer itself has to encode it.
        """
        # A mark can belong to the added token before it. What Python's older tables do not know is seen in the pieces.
        if self._form is not None and not text.isascii() and not unicodedata.is_normalized(self._form, text):
            return None
        try:
            return list(chain.from_iterable(map(self._segments.__getitem__, self._cut_out_added(text))))
        except _NotNormal:
            return None

    def _segment_ids(self, segment: str) -> list[int]:
        """Ids of an added token, or of a text without added tokens."""
        if segment in self.added:
            return [self.added[segment]]
        try:
            return self._joined_ids(segment.split(" "))
        except _NoCut:
            if segment.isascii():
                return self._direct_ids(segment)
            return self._joined_ids(_AFTER_A_WORD.split(segment))

    def _joined_ids(self, pieces: list[str]) -> list[int]:
        """Ids of the text that these pieces are with a space between any two, each encoded alone.

        Raises:
            _NoCut: A space between them follows white space.
        """
        if len(pieces) < 3:
            return self._direct_ids(" ".join(pieces))
        if pieces[0][-1:].isspace():
            raise _NoCut
        return [
            *self._segments[pieces[0]],
            *chain.from_iterable(map(self._behind_space.__getitem__, pieces[1:-1])),
            *self._segments[f" {pieces[-1]}"],  # can end in white space: nothing is cut off behind it
        ]

    def _ids_behind_space(self, piece: str) -> tuple[int, ...]:
        """Ids of a piece and the space before it."""
        if not piece or piece[-1].isspace():
            raise _NoCut
        return tuple(self._direct_ids(f" {piece}"))

    def _direct_ids(self, text: str) -> list[int]:
        """Ids of a text without added tokens, word by word where words are short."""
        words: Iterable[str]
        if text.isascii():
            words = (text,)
            for split in self._splits:
                words = chain.from_iterable(map(split, words))
        elif self._normalize(text) != text:
            raise _NotNormal
        elif len(text) <= _LONGEST_REMEMBERED:
            words = (word for word, _ in self._pre_tokenize(text))
        else:
            # Its words hardly come twice: Chinese, for one, has few spaces.
            self._backend.no_truncation()
            self._backend.no_padding()
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return ids
        return list(chain.from_iterable(map(self._words.__getitem__, words)))

    def _word_ids(self, word: str) -> tuple[int, ...]:
        # The pre-tokenizer's words come in the byte-level alphabet, which the translation leaves as it is.
        return tuple(token.id for token in self._model_tokenize(word.translate(_ASCII_SYMBOLS)))


class _Memory(dict[str, Sequence[int]]):
    """Token ids by text, worked out when they are first asked for."""

    def __init__(self, ids_of: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._ids_of = ids_of

    def __missing__(self, text: str) -> Sequence[int]:
        ids = self._ids_of(text)
        if len(text) <= _LONGEST_REMEMBERED:
            if len(self) >= _MOST_REMEMBERED:
                self.clear()
            self[text] = ids
        return ids


class _NoCut(Exception):
    """A text was cut where a word can go on."""


class _NotNormal(Exception):
    """A text is not in the tokenizer's Unicode normal form."""


def word_encoder(tokenizer: "PreTrainedTokenizerBase") -> WordEncoder | None:
    """An encoder that gives exactly what the tokenizer gives; None where that is not proved for its kind."""
    encoder = _supported(tokenizer)
    if encoder is None:
        return None
    some = list(encoder.added)[:8]
    for text in (*_TABLES["tricky"], *(f"a{token}{token} b {token}\n{token} c" for token in some)):
        if encoder.encode(text) != tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]:
            return None
    return encoder


def _supported(tokenizer: "PreTrainedTokenizerBase") -> WordEncoder | None:
    import numpy as np
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        not isinstance(tokenizer, PreTrainedTokenizerFast)
        or kind.__call__ is not PreTrainedTokenizerBase.__call__
        or kind._encode_plus is not PreTrainedTokenizerFast._encode_plus
        or not isinstance(tokenizer.backend_tokenizer.model, BPE)
        or tokenizer.split_special_tokens
    ):
        return None
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    normalizers = [part["type"] for part in _sequence(parts["normalizer"], "normalizers")]
    if normalizers not in ([], ["NFC"], ["NFKC"]):
        return None
    form = normalizers[0] if normalizers else None
    steps = _steps(_sequence(parts["pre_tokenizer"], "pretokenizers"))
    added = [token for token in parts["added_tokens"] if token["content"]]
    if steps is None or not any(_SPACES in step for step in steps):
        return None
    if not _is_byte_level(parts["model"]) or not _are_plain(added, form):
        return None
    ids = {token["content"]: tokenizer.backend_tokenizer.token_to_id(token["content"]) for token in added}
    vocab: dict[str, int] = parts["model"]["vocab"]
    lengths = np.zeros(max((*vocab.values(), *ids.values())) + 1, dtype=np.int32)
    lengths[list(vocab.values())] = list(map(len, vocab))  # a character of the byte-level alphabet is a byte
    for content, token_id in ids.items():
        lengths[token_id] = len(content.encode())
    return WordEncoder(tokenizer.backend_tokenizer, form, steps, ids, lengths)


def _is_byte_level(model: dict[str, Any]) -> bool:
    """Return whether a BPE model builds every text from byte symbols, without dropout and without position markers."""
    from tokenizers.pre_tokenizers import ByteLevel

    return (
        not model["dropout"]
        and not model["continuing_subword_prefix"]
        and not model["end_of_word_suffix"]
        and model["vocab"].keys() >= set(ByteLevel.alphabet())
    )


def _sequence(component: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    return list(component[key]) if component["type"] == "Sequence" else [component]


def _steps(pre_tokenizers: list[dict[str, Any]]) -> list[list[str]] | None:
    """The alternatives of the patterns that pre-tokenizers cut by, in turn; None for a kind that is not known."""
    if not pre_tokenizers:
        return None
    *before, last = pre_tokenizers
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    steps = [_step(part) for part in before]
    if last["use_regex"]:
        steps.append(_alternatives(_GPT_2))
    return None if None in steps else [step for step in steps if step is not None]


def _step(part: dict[str, Any]) -> list[str] | None:
    if part["type"] == "Digits":
        return [r"\p{N}" if part["individual_digits"] else r"\p{N}+"]
    if part["type"] != "Split" or "Regex" not in part["pattern"]:
        return None
    step = _alternatives(part["pattern"]["Regex"])
    way = (part["behavior"], part["invert"])
    if step is None or way == ("Isolated", False):
        return step
    # Removing what lies between the words removes nothing where every character is in one.
    is_complete = _SPACES in step and all(set(step) & set(kind) for kind in (_LETTERS, _NUMBERS, _SYMBOLS))
    return step if way == ("Removed", True) and is_complete else None


def _alternatives(pattern: str) -> list[str] | None:
    """The known alternatives that a pattern is made of; None where it has others."""
    remainder = pattern.replace("\r", r"\r").replace("\n", r"\n") + "|"
    alternatives = []
    while remainder:
        alternative = max(
            (known_alternative for known_alternative in _KNOWN if remainder.startswith(f"{known_alternative}|")),
            key=len,
            default=None,
        )
        if alternative is None:
            return None
        alternatives.append(alternative)
        remainder = remainder[len(alternative) + 1 :]
    return alternatives


def _ascii_split(step: list[str]) -> Callable[[str], list[str]]:
    """A function that cuts ASCII text as a step does: into its matches, and what lies between them."""
    pattern = re.sub(r"\[(?:\\.|[^\]\\])*\]|\\p\{\w+\}", _ascii_class, "|".join(step))
    if _SPACES in step:  # next to nothing lies between the matches
        return re.compile(rf"{pattern}|(?:(?!{pattern})(?s:.))+", re.ASCII).findall
    return re.compile(f"({pattern})", re.ASCII).split


def _ascii_class(found: re.Match[str]) -> str:
    written = re.sub(r"\\p\{(\w+)\}", lambda category: _ASCII_MEMBERS[category[1]], found[0])
    return written if found[0].startswith("[") else f"[{written}]"


def _are_plain(added: list[dict[str, Any]], form: _Form | None) -> bool:
    """Return whether added tokens are matched by their characters alone, in any order."""
    if any(token["single_word"] or token["lstrip"] or token["rstrip"] for token in added):
        return False
    contents = {token["content"] for token in added}
    if form is not None and not all(unicodedata.is_normalized(form, content) for content in contents):
        return False
    # Tokenizers look for tokens that are to be normalised after all others, and keep the flag with which a special
    # token was first added, which cannot be seen. Neither matters to tokens that no other can share characters with.
    sharing = _sharing(contents)
    flags = [token for token in added if token["content"] in sharing]
    return not any(token["special"] for token in flags) and len({token["normalized"] for token in flags}) < 2


def _sharing(contents: set[str]) -> set[str]:
    """Those of some tokens that can share characters with another occurrence of a token in a text."""
    beginnings = {content[:end] for content in contents for end in range(1, len(content))}
    endings = {content[start:] for content in contents for start in range(1, len(content))}
    inside = {ending[:end] for ending in endings for end in range(1, len(ending) + 1)} | beginnings
    shared_members = contents & inside
    return {
        content
        for content in contents
        if content in shared_members
        or any(other in content for other in shared_members - {content})
        or not endings.isdisjoint(content[:end] for end in range(1, len(content)))
        or not beginnings.isdisjoint(content[start:] for start in range(1, len(content)))
    }
