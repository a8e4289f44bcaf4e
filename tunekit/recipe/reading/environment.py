"""`${NAME}` in a recipe: expanded in the fields that say so, refused everywhere else.

Paths differ between machines, so path fields may name environment variables and begin with `~`. Anywhere else a
`${NAME}` would silently stand for itself or for who knows what, so it is refused; `$${` is a literal `${`.
"""

import os
import re
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from tunekit.recipe.fields import expands_env, sections_of, takes_list, variant
from tunekit.recipe.reading.source_locations import Key, Places, Problem
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.section import Section
from tunekit.redact import is_secret

_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
TRUSTED_HOSTS = "TUNEKIT_TRUSTED_HOSTS"
"""Variable with the hosts, by commas, that may be sent what a recipe's URL takes from the environment."""

SERVICES: dict[str, tuple[str, ...]] = {
    "HF_TOKEN": ("huggingface.co", "hf.co"),
    "HUGGING_FACE_HUB_TOKEN": ("huggingface.co", "hf.co"),
}
"""Variables of services, with the hosts that they are for."""

_HOST = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(?:[^/?#]*@)?(\[[^\]]*\]|[^/?#:@]*)")
_WHOLE = re.compile(r"\$\{[^}]*\}\Z")
_MAY_BE_SECRET = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#]*\Z|[^?#]*\?[^#]*\Z)")
"""What of a URL comes before its user and password, or in its query: no run writes these down."""


def expand_environment(values: dict[str, Any], places: Places) -> tuple[dict[str, Any], list[Problem]]:
    """The recipe's values with `${NAME}` and `~` replaced where they may stand, and what is wrong with the others."""
    expansion = _Expansion(places)
    return expansion.section(values, Recipe, ()), expansion.problems


def escape_environment(value: Any) -> Any:
    """A value in which every `${` is written so that it is read as itself."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, dict):
        return {name: escape_environment(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escape_environment(item) for item in value]
    return value


def _sent_to(text: str, name: str) -> str | None:
    """The host that a URL sends a variable to, and that is not trusted with it; None where there is none."""
    match = _HOST.match(text)
    if match is None:
        return None
    scheme, host = match[1].lower(), match[2].lower()
    if _WHOLE.match(match[2]) and not is_secret(match[2][2:-1]):
        # The user's own: the recipe does not know it.
        return None
    trusted = {trusted_host.strip().lower() for trusted_host in os.environ.get(TRUSTED_HOSTS, "").split(",")}
    of_service = scheme in ("https", "hf") and host in SERVICES.get(name, ())
    return None if host in trusted or of_service else host


class _Expansion:
    """One recipe being expanded: what was found wrong so far."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.problems: list[Problem] = []

    def section(self, values: dict[str, Any], section: type[Section], key: Key) -> dict[str, Any]:
        """A section's values, expanded."""
        result: dict[str, Any] = {}
        for name, value in values.items():
            field = section.model_fields.get(name)
            if field is not None and takes_list(field) and isinstance(value, list):
                result[name] = [self.value(item, field, (*key, name, i)) for i, item in enumerate(value)]
            else:
                result[name] = self.value(value, field, (*key, name))
        return result

    def value(self, value: Any, field: FieldInfo | None, key: Key) -> Any:
        """Expand the value of a field, or an item of its list."""
        below = variant(sections_of(field), value) if field is not None and isinstance(value, dict) else None
        if below is not None:
            return self.section(value, below, key)
        if isinstance(value, str) and field is not None and expands_env(field):
            return self.path(value, key)
        return self.plain(value, key)

    def path(self, text: str, key: Key) -> str:
        """A path with its variables and its home folder filled in."""
        if text == "~" or text.startswith("~/"):
            text = str(Path("~").expanduser()) + text[1:]

        def fill(reference: re.Match[str]) -> str:
            name = reference[1]
            if name is None:
                return "${"
            if not _NAME.match(name) or not reference[0].endswith("}"):
                self.refuse(key, f"{reference[0]} cannot be expanded", "write ${NAME} with a variable's name")
            elif name not in os.environ:
                self.refuse(key, f"the environment variable {name} is not set", f"export {name}=..., or write the path")
            elif is_secret(name) and not (key[0] == "data" and _MAY_BE_SECRET.match(text[: reference.start()])):
                self.refuse(key, f"{reference[0]} holds a secret by its name, and a run writes this down", "rename it")
            elif key[0] == "data" and (host := _sent_to(text, name)) is not None:
                hint = f"if {host} is yours, export {TRUSTED_HOSTS}={host}; else take ${{{name}}} out"
                self.refuse(key, f"{reference[0]} would be sent to {host}", hint)
            return os.environ.get(name, reference[0])

        return _REFERENCE.sub(fill, text)

    def plain(self, value: Any, key: Key) -> Any:
        """A value in which no variable may stand."""
        if isinstance(value, dict):
            return {name: self.plain(item, (*key, name)) for name, item in value.items()}
        if isinstance(value, list):
            return [self.plain(item, (*key, position)) for position, item in enumerate(value)]
        if not isinstance(value, str):
            return value

        def refuse(reference: re.Match[str]) -> str:
            if reference[1] is not None:
                hint = "write the value itself, or $${ for a literal ${"
                self.refuse(key, f"{reference[0]} is not expanded here", hint)
            return "${"

        return _REFERENCE.sub(refuse, value)

    def refuse(self, key: Key, what: str, hint: str) -> None:
        self.problems.append(Problem(self.places.of_value(key), what, key, hint))
