"""Chat templates that a recipe takes by name, and the tokens that they write.

Each is a row of `chat_templates.yaml`. Where TRL ships a family's template, that file is taken from the installed
TRL; the others are written there from the family's description. A template is only as good as the tokenizer below it:
markers that are no tokens are read as ordinary text, and an answer must end in a token, or a trained model goes on
until its length runs out.
"""

import difflib
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tunekit.errors import DependencyError
from tunekit.files import read_table

_NUM_NEAR = 3
_NUM_FITTING = 5


class NamedTemplate(NamedTuple):
    """A chat template that recipes take by name."""

    name: str
    source: str
    """Publication that it is described in."""
    end: str | None = None
    """Token that ends an answer; None where the template writes the tokenizer's end token."""
    tokens: tuple[str, ...] = ()
    """Other tokens that it writes."""
    tools: bool = False
    """True if it has calls of tools."""
    types: tuple[str, ...] = ()
    """Types of models, by transformers' names, that take it where they come without a chat template."""
    trl: str | None = None
    """Name of TRL's file with the template; None for one of tunekit's."""
    template: str = ""
    """The template, unless it is TRL's."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All tokens that it writes by themselves."""
        return self.tokens if self.end is None else (*self.tokens, self.end)

    def text(self) -> str:
        """Return the Jinja template.

        Raises:
            DependencyError: It is TRL's, and the installed TRL has none of this name.
        """
        if self.trl is None:
            return self.template
        spec = find_spec("trl")
        folders = [] if spec is None else list(spec.submodule_search_locations or [])
        file = next((Path(folder) / "chat_templates" / f"{self.trl}.jinja" for folder in folders), None)
        if file is None or not file.is_file():
            problem = f"model.chat_template: the installed TRL has no template {self.trl}"
            raise DependencyError(problem, hint="pip install -U 'trl>=1.16,<2', or set it to a Jinja file")
        return file.read_text(encoding="utf-8")


@cache
def named_templates() -> dict[str, NamedTemplate]:
    """Return the templates by name."""
    rows = read_table(Path(__file__).with_name("chat_templates.yaml"))
    lists = ("tokens", "types")
    return {
        name: NamedTemplate(name, **{**row, **{key: tuple(row.get(key, ())) for key in lists}})
        for name, row in rows.items()
    }


def named_template(template: str | None) -> NamedTemplate | None:
    """Return the template that `model.chat_template` names; None where it is a file, or not set."""
    return None if template is None else named_templates().get(template)


def template_of_type(model_type: str | None) -> NamedTemplate | None:
    """Return the template of models of a type that come without one; None where there is none for the type."""
    return next((template for template in named_templates().values() if model_type in template.types), None)


def is_unknown(template: str) -> bool:
    """Return whether `model.chat_template` can only be a name, and is none."""
    if "/" in template or "$" in template or template.endswith(".jinja") or template in named_templates():
        return False
    try:
        return not Path(template).is_file()
    except OSError:  # longer than the name of a file
        return True


def unknown_words(template: str) -> tuple[str, str]:
    """Return what is wrong with a name that is no template's, and a hint with those like it."""
    near = difflib.get_close_matches(template.lower().replace("-", "_"), named_templates(), n=_NUM_NEAR)
    names = ", ".join(near or named_templates())
    problem = f"{template!r} is neither a known chat template nor a file in {Path.cwd()} or the recipe's folder"
    return problem, f"did you mean {names}?" if near else f"set it to a Jinja file, or to one of {names}"


def missing_tokens(template: NamedTemplate, vocabulary: Collection[str]) -> list[str]:
    """Return the tokens of a template that a tokenizer lacks."""
    return [token for token in template.markers if token not in vocabulary]


def fitting(vocabulary: Collection[str]) -> list[str]:
    """Return the names of templates whose markers are tokens of a tokenizer; those with most markers first.

    Those that models of a type take automatically are left out: they are for these models.
    """
    fits = [
        template
        for template in named_templates().values()
        if template.tokens and not template.types and not missing_tokens(template, vocabulary)
    ]
    return [template.name for template in sorted(fits, key=lambda template: -len(template.markers))][:_NUM_FITTING]
