"""Every text of the pages, by key and language.

`locales/LANGUAGE/PANEL.yaml` holds a panel's texts by flat keys, `words("runs.title")` is the text `title` of the panel
`runs`, and `{name}` in a text is filled in. A test compares the languages, and the keys with those that code asks for.

tunekit itself speaks English: fields have their help in the schema. `locales/tunekit/LANGUAGE.yaml` translates such
texts by the English ones, so that a help that was changed stands in English until its translation is changed, too.
"""

from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import yaml

import tunekit

LOCALES = Path(__file__).parent / "locales"


@cache
def texts_of(language: str) -> dict[str, str]:
    """All texts of a language by `panel.key`."""
    return {
        f"{path.stem}.{key}": text
        for path in sorted((LOCALES / language).glob("*.yaml"))
        for key, text in yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader).items()
    }


@cache
def translations(language: str) -> dict[str, str]:
    """Texts of tunekit itself in a language, by the English ones; empty for English."""
    file = LOCALES / "tunekit" / f"{language}.yaml"
    return yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader) if file.exists() else {}


class Words:
    """The texts of one language.

    Args:
        language: `en` or `zh`.
    """

    def __init__(self, language: str) -> None:
        self.language = language

    def __call__(self, key: str, **values: Any) -> str:
        """The text of a key, such as `runs.title`, with values for its placeholders."""
        text = texts_of(self.language)[key]
        return text.format(**values) if values else text

    def label(self, key: str, otherwise: str) -> str:
        """Return the text of a key, or another where no language has one."""
        return texts_of(self.language).get(key, otherwise)

    def translated(self, text: str) -> str:
        """Return a text of tunekit in this language; the text itself where there is no translation."""
        return translations(self.language).get(text, text)


def told(error: tunekit.TunekitError) -> str:
    """An error as a card of HTML: what is wrong, and what to do about it."""
    hint = f"<p class='told-hint'>{escape(error.hint)}</p>" if error.hint else ""
    return f"<div class='told' role='alert'><p class='told-problem'>{escape(error.problem)}</p>{hint}</div>"


def next_step(address: str, text: str, *, kind: str = "") -> str:
    """A link to what comes next, which looks like a button."""
    return f"<p><a class='shell-button shell-next {kind}' href='{escape(address)}'>{escape(text)}</a></p>"
