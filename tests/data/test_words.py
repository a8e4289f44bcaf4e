import itertools
import json
import random
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CohereTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from tunekit.data.tokenization import fast_bpe
from tunekit.data.tokenization.fast_bpe import word_encoder
from tunekit.models.load import load_tokenizer
from tunekit.recipe.sections.model import ModelSection

TALES = Path(__file__).parents[2] / "examples" / "data" / "tales.txt"

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT_2 = BYTE_LEVEL | {"use_regex": True}
NFC = {"type": "NFC"}


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
DEEPSEEK = (  # with line breaks themselves in its classes
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
SPARK = DEEPSEEK.replace("[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+", "[\\p{P}\\p{S}]+|[\r\n]")
DIGITS = {"type": "Digits", "individual_digits": True}

FAMILIES = {
    "GPT-2": (None, [GPT_2]),
    "Llama 3": (None, [split(CL100K), BYTE_LEVEL]),
    "Granite 4": (None, [split(CL100K, "Removed", True), BYTE_LEVEL]),
    "Qwen 3": (NFC, [split(CL100K.replace("{1,3}", "")), BYTE_LEVEL]),
    "Qwen 3.5": (
        NFC,
        [
            split(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            BYTE_LEVEL,
        ],
    ),
    "DeepSeek V3": (
        {"type": "Sequence", "normalizers": []},
        [split(r"\p{N}{1,3}"), split(CJK), split(DEEPSEEK), BYTE_LEVEL],
    ),
    "Spark": (None, [split(r"\p{N}{1,3}"), split(CJK), split(SPARK), DIGITS, BYTE_LEVEL]),
    "GPT-OSS": (None, [split(O200K), BYTE_LEVEL]),
    "MiniMax": (None, [split(O200K, "Removed", True), BYTE_LEVEL]),
    "Mistral": (None, [split(TEKKEN), BYTE_LEVEL]),
    "Command R": (NFC, [DIGITS, GPT_2]),
    "Command A": (NFC, [split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(O200K), BYTE_LEVEL]),
    "LLaDA": (
        None,
        [
            split(
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
                r"|\s+(?!\S)|\s+"
            ),
            BYTE_LEVEL,
        ],
    ),
    "MiniCPM": (None, [split(r"\p{N}{1,3}"), split(CL100K.replace("{1,3}", "+")), BYTE_LEVEL]),
    "pico": (None, [split(r"\d"), GPT_2]),
}
"""The normaliser and the pre-tokenisers of families of models, as in their tokenizer.json."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜begin▁of▁sentence｜>")
PLAIN = ("<think>", "</think>", "<|tool|>")


def backend(model: dict, normalizer: dict | None, steps: list[dict]) -> Tokenizer:
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    pre_tokenizer = {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]
    made = Tokenizer.from_str(
        json.dumps(empty | {"model": model, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer})
    )
    made.decoder = decoders.ByteLevel()
    return made


@cache
def trained_model() -> dict:
    """A small BPE model, trained on whole lines: its tokens reach over words, so a word cut wrongly shows."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rng = random.Random(0)
    signs = "aaAtsSr  \n\n\r\t''..,!(123/é’"
    lines = [*TALES.read_text(encoding="utf-8").splitlines(keepends=True)[:150]]
    lines += ["".join(rng.choices(signs, k=30)) for _ in range(600)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    )
    return json.loads(made.to_str())["model"]


def model_of_words(characters: str, longest: int) -> dict:
    """A BPE model in which every short word is a token of its own, so that the tokens tell the words."""
    [(symbols, _)] = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(characters)
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet())
    for length in range(2, longest + 1):
        vocab += map("".join, itertools.product(symbols, repeat=length))
    fields = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    fields |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
    return fields | {"vocab": {token: i for i, token in enumerate(vocab)}, "merges": []}


@cache
def family(name: str) -> PreTrainedTokenizerFast:
    made = backend(trained_model(), *FAMILIES[name])
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens(list(PLAIN))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def with_steps(*steps: dict, normalizer: dict | None = None, **changes: object) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend(trained_model() | changes, normalizer, list(steps)))


def with_tokens(*tokens: AddedToken) -> PreTrainedTokenizerFast:
    made = backend(trained_model(), None, [GPT_2])
    made.add_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def expected(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def check_all(tokenizer: PreTrainedTokenizerFast, texts: list[str], separator: str) -> None:
    """Compare many texts at once: an added token between two is a wall that nothing reaches over."""
    encoder = word_encoder(tokenizer)
    assert encoder is not None
    whole = separator.join(texts)
    if encoder.encode(whole) != expected(tokenizer, whole):
        assert [text for text in texts if encoder.encode(text) != expected(tokenizer, text)] == []
        raise AssertionError("the texts together, though none of them alone")


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("characters", "longest"), [("stA1 \n\r\t'./", 4), ("sA1 \né.", 5), ("a \n.", 6)])
def test_all_short_texts_are_cut_into_the_words_of_the_family(name, characters, longest):
    made = backend(model_of_words(characters, 4), *FAMILIES[name])
    made.add_special_tokens(["<|wall|>"])
    texts = ["".join(text) for length in range(longest + 1) for text in itertools.product(characters, repeat=length)]
    check_all(PreTrainedTokenizerFast(tokenizer_object=made), texts, "<|wall|>")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_all_of_ascii_is_cut_into_the_words_of_the_family(name):
    ascii_ = "".join(map(chr, range(128)))
    made = backend(model_of_words(ascii_, 2), *FAMILIES[name])
    made.add_special_tokens(["<|wall|>"])
    texts = [f"{a}{b}" for a, b in itertools.product(ascii_, repeat=2)]
    texts += [f"{a}{b}{c}" for a in "s1 '.\n" for b in ascii_ for c in (*"s1 '.\n\r\t", " s x", " \n x", "  ss")]
    check_all(PreTrainedTokenizerFast(tokenizer_object=made), texts, "<|wall|>")


PAGES = (range(0x80, 0x3100), range(0xFB00, 0x10000), range(0x1F300, 0x1F700), range(0x3100, 0x110000, 997))
CHARACTERS = [
    chr(code)
    for code in itertools.chain(*PAGES)
    if unicodedata.category(chr(code))[0] in "ZP"
    or unicodedata.category(chr(code)) in ("Cc", "Cf")
    or (code % 8 == 0 and unicodedata.category(chr(code)) != "Cs")
]
"""Everything that could be taken for white space, and some of all the rest."""


@pytest.mark.parametrize("name", ["GPT-2", "Llama 3", "DeepSeek V3", "GPT-OSS"])
def test_a_character_changes_nothing_at_the_spaces_around_it(name):
    tokenizer = family(name)
    texts = [f"a {c} b c{c} {c}d\n{c} e{c}\n f  {c} {c}" for c in CHARACTERS]
    check_all(tokenizer, texts, "<|im_end|>")


@pytest.mark.parametrize("name", ["Qwen 3", "Command R"])
def test_text_that_is_not_in_the_normal_form_is_left_to_the_tokenizer(name):
    tokenizer = family(name)
    encoder = word_encoder(tokenizer)
    for c in CHARACTERS:
        text = f"a {c} b c{c} {c}d <think>{c} e"
        changes = tokenizer.backend_tokenizer.normalizer.normalize_str(text) != text
        assert encoder.encode(text) == (None if changes else expected(tokenizer, text))
    assert encoder.encode("cafe\u0301") is None
    assert encoder.encode("caf\u00e9 <think>") == expected(tokenizer, "caf\u00e9 <think>")
    assert encoder.encode("<think>\u0338") is None  # the sign before it becomes another one


def test_the_normal_form_is_that_of_the_tokenizer_where_python_knows_less(monkeypatch):
    encoder = word_encoder(family("Qwen 3"))
    monkeypatch.setattr(unicodedata, "is_normalized", lambda form, text: True)
    assert encoder.encode("<think>a cafe\u0301 b") is None
    assert encoder.encode("<think>a caf\u00e9 b") is not None


PIECES = st.one_of(
    st.sampled_from([*SPECIAL, *PLAIN, *(token[:-1] for token in (*SPECIAL, *PLAIN)), "<", "|>"]),
    st.sampled_from([*"stmdSTrv", "re", "ve", "ll", "LL", "'", "’", " ", " ", " ", "  ", "\n", "\r\n", "\t", "    "]),
    st.sampled_from(TALES.read_text(encoding="utf-8")[:3000].split(" ")),
    st.sampled_from(
        ["É", "ß", "ſ", "да", "你好", "。", "한국", "😀", "👍🏽", "½", "٣", "\u00a0", "\u3000", "\u200d", "ǅ"]
    ),
    st.integers(0, 10**9).map(str),
    st.text(st.characters(codec="utf-8"), max_size=4),
)
TEXTS = st.lists(PIECES, max_size=40).map("".join) | st.lists(PIECES, max_size=40).map(" ".join)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=100, derandomize=True)
@given(text=TEXTS)
def test_any_text_has_the_tokens_and_the_bytes_that_the_tokenizer_gives(name, text):
    encoder, tokenizer = made_encoder(name), family(name)
    ids = encoder.encode(text)
    if ids is None:
        assert tokenizer.backend_tokenizer.normalizer.normalize_str(text) != text
        return
    assert ids == expected(tokenizer, text)
    assert encoder.byte_lengths[ids].sum() == len(text.encode())


@cache
def made_encoder(name: str) -> fast_bpe.WordEncoder:
    encoder = word_encoder(family(name))
    assert encoder is not None
    return encoder


def test_pico_and_the_classes_of_transformers_are_known():
    model = trained_model()
    vocab, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    tokenizers = [load_tokenizer(ModelSection(path="pico"))]
    tokenizers += [kind(vocab=vocab, merges=merges) for kind in (GPT2Tokenizer, Qwen2Tokenizer, CohereTokenizer)]
    for tokenizer in tokenizers:
        encoder = word_encoder(tokenizer)
        assert encoder is not None
        text = TALES.read_text(encoding="utf-8") + "".join(f" {token}x" for token in tokenizer.all_special_tokens)
        assert encoder.encode(text) == expected(tokenizer, text)
        assert encoder.encode(text) == encoder.encode(text)


def test_a_token_stands_for_the_bytes_of_its_text():
    tokenizer = family("DeepSeek V3")
    encoder = made_encoder("DeepSeek V3")
    for token in (*SPECIAL, *PLAIN):
        assert encoder.byte_lengths[tokenizer.convert_tokens_to_ids(token)] == len(token.encode())
    assert len(encoder.byte_lengths) == len(tokenizer)
    ids = encoder.encode("é 👍")
    assert [len(tokenizer.backend_tokenizer.id_to_token(i)) for i in ids] == encoder.byte_lengths[ids].tolist()


def test_of_added_tokens_the_leftmost_and_then_the_longest_is_found():
    runs = [AddedToken(" " * n, normalized=True) for n in range(2, 8)]  # as GPT-NeoX has them
    tokenizer = with_tokens(*runs, AddedToken("<|end|>", special=True), AddedToken("x--", normalized=True))
    tokenizer.add_tokens([AddedToken("--y", normalized=True)])
    texts = [f"a{' ' * n}b x{'-' * n}y<|end|>{' ' * n}<|end|><|end|>" for n in range(20)]
    check_all(tokenizer, texts, "\n")


def test_what_the_tokenizer_was_last_told_to_cut_and_to_fill_changes_nothing():
    tokenizer = load_tokenizer(ModelSection(path="pico"))
    encoder = word_encoder(tokenizer)
    for text in ("one two three", "одно слово " + "раз" * 20, "字" * 50):
        ids = expected(tokenizer, text)
        for length in (2, 500):
            tokenizer(text, truncation=True, max_length=length, padding="max_length")
            assert encoder.encode(text) == ids


class Lowercase(PreTrainedTokenizerFast):
    def _encode_plus(self, text, **kwargs):
        return super()._encode_plus(text.lower(), **kwargs)


def sentencepiece_like() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1}, merges=[], unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def overlapping(special: str, plain: str) -> list[AddedToken]:
    return [AddedToken(special, special=True, normalized=False), AddedToken(plain, normalized=False)]


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
PREFIXED = {symbol: i for i, symbol in enumerate([*BYTES, *(f"#{symbol}" for symbol in BYTES)])}
WITHOUT_X = {symbol: i for i, symbol in enumerate(BYTES) if symbol != "x"}

REFUSED = {
    "pieces with a mark of place": lambda: PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like()),
    "Unigram": lambda: PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("a", 0.0)], 0))),
    "WordPiece": lambda: PreTrainedTokenizerFast(tokenizer_object=wordpiece()),
    "chance": lambda: with_steps(GPT_2, dropout=0.1),
    "a prefix for tokens within a word": lambda: with_steps(
        GPT_2, vocab=PREFIXED, merges=[], continuing_subword_prefix="#"
    ),
    "a suffix for tokens at the end of a word": lambda: with_steps(GPT_2, end_of_word_suffix="</w>"),
    "a byte without a symbol": lambda: with_steps(GPT_2, vocab=WITHOUT_X, merges=[]),
    "a space before the text": lambda: with_steps(GPT_2 | {"add_prefix_space": True}),
    "no words": lambda: with_steps(BYTE_LEVEL),
    "numbers and nothing else": lambda: with_steps(DIGITS, BYTE_LEVEL),
    "a pattern that is not known": lambda: with_steps(split(CL100K + "|x"), BYTE_LEVEL),
    "a pattern that ends in nothing": lambda: with_steps(split(CL100K + "|"), BYTE_LEVEL),
    "words that begin behind a space": lambda: with_steps(split(CL100K, "MergedWithPrevious"), BYTE_LEVEL),
    "lost characters": lambda: with_steps(split(DEEPSEEK, "Removed", True), BYTE_LEVEL),
    "a text to split by": lambda: with_steps(split(CL100K) | {"pattern": {"String": " "}}, BYTE_LEVEL),
    "bytes before words": lambda: with_steps(BYTE_LEVEL, split(CL100K)),
    "punctuation": lambda: with_steps({"type": "Punctuation", "behavior": "Contiguous"}, GPT_2),
    "lower case": lambda: with_steps(GPT_2, normalizer={"type": "Lowercase"}),
    "a token that takes the space before it": lambda: with_tokens(AddedToken("<a>", lstrip=True)),
    "a token that takes the space behind it": lambda: with_tokens(AddedToken("<a>", rstrip=True)),
    "a token that is a whole word": lambda: with_tokens(AddedToken("<a>", single_word=True)),
    "a special token that ends as another begins": lambda: with_tokens(*overlapping("<a>", ">b")),
    "a special token that begins as another ends": lambda: with_tokens(*overlapping(">b", "<a>")),
    "a special token in another one": lambda: with_tokens(*overlapping("a", "<a>")),
    "a special token around another one": lambda: with_tokens(*overlapping("<a>", "a")),
    "tokens that overlap and are looked for one after the other": lambda: with_tokens(
        AddedToken("<a>", normalized=True), AddedToken(">b", normalized=False)
    ),
    "another class": lambda: Lowercase(tokenizer_object=family("GPT-2").backend_tokenizer),
    "special tokens as text": lambda: PreTrainedTokenizerFast(
        tokenizer_object=family("GPT-2").backend_tokenizer, split_special_tokens=True
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tokenizer_of_another_kind_has_no_encoder(kind):
    assert word_encoder(REFUSED[kind]()) is None


def test_an_encoder_that_differs_from_its_tokenizer_is_not_handed_out(monkeypatch):
    assert word_encoder(family("GPT-2")) is not None
    monkeypatch.setattr(fast_bpe, "_ASCII_MEMBERS", fast_bpe._ASCII_MEMBERS | {"L": "b-z"})
    assert word_encoder(family("GPT-2")) is None


def test_what_is_remembered_is_bounded(monkeypatch):
    tokenizer = family("Llama 3")
    monkeypatch.setattr(fast_bpe, "_MOST_REMEMBERED", 50)
    encoder = word_encoder(tokenizer)
    text = TALES.read_text(encoding="utf-8")
    for line in text.splitlines():
        assert encoder.encode(line) == expected(tokenizer, line)
        memories = [memory for memory in vars(encoder).values() if isinstance(memory, dict)]
        assert sum(map(len, memories)) <= 3 * 50 + len(SPECIAL) + len(PLAIN)
    long = "x" * 1000 + " " + "é" * 1000
    assert encoder.encode(long) == expected(tokenizer, long)
    assert max(map(len, itertools.chain.from_iterable(memories))) < 1000
