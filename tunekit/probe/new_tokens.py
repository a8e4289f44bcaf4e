"""Tokens that a recipe adds to a model's tokenizer, and the ids that they get there.

A new token takes the id behind the last one. Many models have more rows in their embedding than their tokenizer has
tokens: the first new tokens take these spare rows, which exist already, and only the others need rows of their own.
"""

from typing import TYPE_CHECKING, NamedTuple

from tunekit.recipe.sections.model import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NewTokens(NamedTuple):
    """Tokens that were added to a tokenizer."""

    ids: tuple[int, ...]
    """Their ids, in the order of the recipe."""
    known: tuple[str, ...]
    """Tokens of `add_tokens` and `add_special_tokens` that the tokenizer had before."""


def add_new_tokens(tokenizer: "PreTrainedTokenizerBase", section: ModelSection) -> NewTokens:
    """Add the tokens of a model section to its tokenizer; those that are there already change nothing."""
    roles = section.special_tokens.by_role if section.special_tokens is not None else {}
    plain, special = section.add_tokens or [], section.add_special_tokens or []
    vocabulary = tokenizer.get_vocab()
    tokenizer.add_tokens(plain)
    if special:
        tokenizer.add_special_tokens({"extra_special_tokens": special}, replace_extra_special_tokens=False)
    if roles:
        tokenizer.add_special_tokens(dict(roles))
    new = [token for token in section.all_tokens if token not in vocabulary]
    ids = tuple(int(tokenizer.get_vocab()[token]) for token in new)
    return NewTokens(ids, tuple(token for token in (*plain, *special) if token in vocabulary))
