"""Pieces of text that two tokenizers both spell with whole tokens, and the bytes of tokens."""

import itertools
import random

import pytest

from tests.tiny import make_tokenizer
from tests.two_tokenizers import make_other_tokenizer
from tunekit.data.tokenization.token_bytes import TokenBytes, answers_in, pieces_of
from tunekit.errors import ModelError

TEXTS = [
    "it is twice as much 答案是 🙂",
    "é🙂é",
    "",
    "yes yes of course 🙂🙂 forty-two\n\n  sure?",
    "\U0001f468‍\U0001f469 是的",
]


@pytest.fixture(scope="module")
def sides():
    return TokenBytes(make_tokenizer(), "model.path", "own"), TokenBytes(
        make_other_tokenizer(), "method.teacher", "its"
    )


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_those_of_the_text(sides, text):
    for tokenizer, side in zip((make_tokenizer(), make_other_tokenizer()), sides, strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(side.of(ids)) == text.encode()
        assert side.encode(text.encode()) == ids


def test_bytes_that_are_no_text_have_tokens_too(sides):
    draw = random.Random(0)
    for _ in range(50):
        content = bytes(draw.choices(range(256), k=12)) + "🙂是".encode()[: draw.randrange(8)]
        for side in sides:
            assert b"".join(side.of(side.encode(content))) == content


def cut(text, draw):
    """Any tokens of a text."""
    places = sorted({0, len(text), *(draw.randrange(len(text) + 1) for _ in range(6))})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def test_pieces_end_where_both_sides_have_spelled_the_same_bytes():
    draw = random.Random(1)
    for _ in range(200):
        text = bytes(draw.choices(b"abc", k=20))
        own, other = cut(text, draw), cut(text[: draw.randrange(1, 21)] + bytes(draw.choices(b"xyz", k=3)), draw)
        expected = [
            (a, b)
            for a in range(1, len(own) + 1)
            for b in range(1, len(other) + 1)
            if b"".join(own[:a]) == b"".join(other[:b])
        ]
        assert pieces_of(own, other) == expected
        assert [(b, a) for a, b in expected] == pieces_of(other, own)


def test_a_token_of_either_side_spans_several_of_the_other():
    assert pieces_of([b"a", b"b", b"cd", b"e"], [b"ab", b"c", b"d", b"e"]) == [(2, 1), (3, 3), (4, 4)]
    assert pieces_of([b"\xf0\x9f", b"\x99\x82"], ["🙂".encode()]) == [(2, 1)]
    assert pieces_of([b"abc"], [b"a", b"b"]) == []


def test_an_answer_ends_at_its_first_special_token():
    ids, labels = [5, 6, 7, 9, 1, 5, 9, 8], [-100, 6, 7, 9, -100, -100, 9, 8]
    assert answers_in(ids, labels, {9}) == [(1, 3), (6, 6)]
    assert answers_in(ids, [-100] * 8, {9}) == []


def test_tokenizers_that_change_texts_are_refused():
    from tokenizers import normalizers, pre_tokenizers

    for part, value, words in (
        ("normalizer", normalizers.Lowercase(), r"changes texts \(Lowercase\)"),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True), "puts a space before texts"),
        ("pre_tokenizer", pre_tokenizers.Whitespace(), "is no byte-level BPE"),
    ):
        tokenizer = make_other_tokenizer()
        setattr(tokenizer.backend_tokenizer, part, value)
        with pytest.raises(ModelError, match=rf"method\.teacher: the tokenizer of 'its' {words}"):
            TokenBytes(tokenizer, "method.teacher", "its")
