"""The reward for structured answers: JSON that a schema allows.

The whole answer must be JSON, but for the space around it: a fence or a word beside it is none. What JSON does not
have (`NaN`, `Infinity`) or what is nested too deep to be read is none either.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.errors import DependencyError, RecipeError
from tunekit.methods.rewards.answers import Judge, each
from tunekit.recipe.sections.rewards import JsonSchemaReward

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_ANY_JSON = 0.25


def json_schema(section: JsonSchemaReward) -> Judge:
    """1 where an answer is JSON that a schema allows, a quarter where it is JSON at all, else 0.

    Raises:
        DependencyError: jsonschema is not installed.
        RecipeError: The file is not there, or holds no schema.
    """
    try:
        import jsonschema  # noqa: F401  (so that it is missed before training)
    except ImportError as error:
        raise DependencyError(
            "method.rewards: json_schema needs jsonschema", hint="pip install 'tunekit[rewards]'"
        ) from error
    of_all = _read_file(section.path) if section.path is not None else None

    def allowed(text: str, of_row: "Validator | None") -> float:
        validator = of_all or of_row
        assert validator is not None, "the schema stands in a file or in the row"
        try:
            value = json.loads(text, parse_constant=_refuse)
            return 1.0 if validator.is_valid(value) else _ANY_JSON
        except (ValueError, RecursionError):
            return 0.0

    return Judge(each(allowed), section.column, _validator)


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")


def _read_file(path: str) -> "Validator":
    try:
        return _validator(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"method.rewards: json_schema: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecipeError(f"method.rewards: json_schema: {path}: {error}") from None


def _validator(value: Any) -> "Validator":
    """Return a validator for a schema, given as JSON or as its parsed value. It fetches no schemas from elsewhere."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("is no JSON schema")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"is no JSON schema: {error.message}") from None
    validator: Validator = kind(schema, registry=Registry())
    return validator
