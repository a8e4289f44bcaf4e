"""No secret stands in a recipe: a recipe is shared, and every run keeps a copy of it.

What looks like a key, or is the value of a variable that holds one, is refused without being repeated. Where a secret
is needed, the recipe names the variable that has it.

Files and folders that the fields of a recipe may name on the machine that it runs on.

Whoever lets others write recipes, such as a page in a browser, can say by these which are theirs to use. A name may
also be one of the hub, a URL or a shipped example: what it is depends on the disk, and is not asked here.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

from tunekit.recipe.fields import expands_env, is_free_mapping
from tunekit.recipe.reading.source_locations import Key, Places, Problem, dotted
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.section import Section
from tunekit.redact import secret_in

_NAME = re.compile(
    r"(?:^|_)(?:(?:hub|auth|api|access|bearer|private|secret)_?(?:token|key)"
    r"|(?<!(?:bos|eos|pad|unk|sep|cls)_)(?<!mask_)token|passw(?:or)?d|secret|credentials?)$",
    re.IGNORECASE,
)
"""Names of fields that can hold nothing else than a secret. A tokenizer's `eos_token` and its like are words."""

_LOG_IN = "take it out, and give it by an environment variable or the provider's login, such as `hf auth login`"
_IN_URL = "write ${NAME} in its place, and export NAME"


def find_secrets(values: Any, places: Places, commanded: Collection[Key] | None = None) -> list[Problem]:
    """The secrets that stand in a recipe.

    Args:
        values: What it says, with `${NAME}` as it is written.
        places: Where that stands.
        commanded: The keys to look at, with what is below them; all where left out.
    """
    return [
        bad for bad in _below(values, (), places) if commanded is None or any(bad.key[: len(k)] == k for k in commanded)
    ]


def _below(value: Any, key: Key, places: Places) -> Iterator[Problem]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _below(item, (*key, name), places)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _below(item, (*key, position), places)
    elif isinstance(value, str) and value:
        secret = secret_in(value)
        if secret is None and _NAME.search(str(key[-1])) and "trainer_args" in key:
            secret = "a secret by its name"
        if secret is not None:
            hint = _IN_URL if "URL" in secret else _LOG_IN
            yield Problem(places.of_value(key), f"holds {secret}, which no recipe may", key, hint)


def named_paths(recipe: Recipe) -> list[tuple[str, str]]:
    """Every text of a recipe that may name a file or a folder, with its dotted key."""
    return [(dotted(key), text) for key, text in _texts(recipe, ())]


def _texts(section: Section, key: Key) -> Iterator[tuple[Key, str]]:
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), (*key, name)
        if expands_env(field) or is_free_mapping(field):
            yield from _strings(value, here)
        for position, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(item, Section):
                yield from _texts(item, here if position is None else (*here, position))


def _strings(value: Any, key: Key) -> Iterator[tuple[Key, str]]:
    """The texts in a plain value, however deep."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, (*key, name))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _strings(item, (*key, position))
