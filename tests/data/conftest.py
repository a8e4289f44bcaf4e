"""Fixtures of the tests of data."""

import pytest

from tunekit.data.tokenization import encode


@pytest.fixture(params=["by words", "by the tokenizer"])
def both_ways(request, monkeypatch):
    """Texts become tokens from the memory of words, and again through the tokenizer itself."""
    if request.param == "by the tokenizer":
        monkeypatch.setattr(encode, "word_encoder", lambda tokenizer: None)
        return
    real = encode.word_encoder

    def known(tokenizer):
        found = real(tokenizer)
        assert found is not None
        return found

    monkeypatch.setattr(encode, "word_encoder", known)
