r"""Numbers as people and models write them in a text, as exact fractions.

`1,234.50`, `-3`, `1/2`, `3 1/2`, `\frac{1}{2}`, `50%`, `1.5e3`, `1.5 × 10^3`, `$5` and `3 km` are numbers. The comma
parts thousands and the point decimals, as in English; a currency sign is ignored. Text without a digit, such as `nan`
or `inf`, is none, and neither is a division by zero or a number of more digits than anybody writes.

What is equal: `-0` is 0. `50%` is 0.5, and also 50, since whether per cent were asked for stands in the question.
Units are compared as text: `3000 m` is not `3 km`. An answer without a unit is not `3 km` either, but any unit will do
where none is expected.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,100}(?!\d)|\d{1,400}(?:_\d{1,400}){0,100})"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d{{1,400}})?|\.\d{{1,400}})"
_POWER = r"(?:[eE][+-]?\d{1,3}(?!\d|\.\d)| ?[×x*·] ?10(?:\^|\*\*)\(?[+-]?\d{1,3}\)?)"

NUMBER = re.compile(
    r"(?:(?<![\w)\].])[+-])?"
    rf"(?:(?P<whole>\d{{1,400}}) {{1,3}}(?P<top>\d{{1,400}})/(?P<bottom>\d{{1,400}})(?![\d/])"
    rf"|(?P<value>{_DECIMAL})(?P<power>{_POWER})?(?: ?/ ?(?P<divisor>{_DECIMAL})(?P<divisor_power>{_POWER})?(?! ?/))?)"
    r"(?P<percent> ?%)?"
)
"""A number in a text that `plain` has gone over."""

_UNIT = re.compile(r" ?(?P<unit>[^\W\d_°]*°?[^\W\d_]+(?:[/^*·][^\s,;.!?]+)*[²³]?|°|[\"'′″])")
"""Unit behind a number."""

_LATEX = [
    (re.compile(r"\\[dtc]?frac\s*\{([^{}]{1,400})\}\s*\{([^{}]{1,400})\}"), r" \1/\2"),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)"), r" \1/\2"),
    (re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname)\s*\{([^{}]{0,400})\}"), r"\1"),
    (re.compile(r"\\(?:times|cdot)\s*"), "×"),
    (re.compile(r"\^\s*\{([^{}]{1,40})\}"), r"^\1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,;:! ]|\\(?:left|right)\b|[$€£¥]|\\(?=[$%])"), ""),
    (re.compile("(?<=\\d)[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))"), ""),
    (re.compile("[\u00a0\u2009\u202f]"), " "),
    (re.compile("[\u2212\u2013\uff0d]"), "-"),
    (re.compile(r"\*\*(?!\d)"), ""),
]
"""Spellings of LaTeX, Markdown or typography, and their replacements."""


@dataclass(frozen=True)
class Number:
    """A number with what stands behind it."""

    value: Fraction
    """As written: 50 for `50%`."""
    is_percentage: bool
    unit: str | None

    def is_near(self, expected: "Number", tolerance: float) -> bool:
        """Return whether it equals the expected number, up to a relative tolerance."""
        ones, other_readings = [self.value], [expected.value]
        if self.is_percentage != expected.is_percentage:
            ones += [self.value / 100] if self.is_percentage else []
            other_readings += [expected.value / 100] if expected.is_percentage else []
        allowed = Fraction(tolerance)
        return any(abs(reading - other) <= allowed * abs(other) for reading in ones for other in other_readings)


def last_number(text: str) -> Number | None:
    """The last number in a text; None where it has none, or one that has no value."""
    text = plain(text)
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return None
    match = numbers[-1]
    if match["divisor"] is not None and text[: match.start()].endswith("/"):
        return None  # 1/2/3, such as a date
    try:
        value = _value(match)
    except ZeroDivisionError:
        return None
    unit = _UNIT.match(text, match.end())
    return Number(value, match["percent"] is not None, unit["unit"] if unit else None)


def read_number(value: Any) -> Number:
    """The expected number that stands in a row.

    Raises:
        ValueError: There is none, or something stands behind it that is not a unit.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("is neither a number nor text that ends with one")
    if not isinstance(value, str):
        if not math.isfinite(value):
            raise ValueError("is not a finite number")
        return Number(Fraction(str(value)), is_percentage=False, unit=None)
    text = plain(value).rstrip(" .\n")
    number = last_number(text)
    if number is None or not text.endswith(number.unit or tuple("0123456789%.)")):
        raise ValueError("does not end with a number")
    return number


def plain(text: str) -> str:
    """A text in which numbers are written in plain letters."""
    for pattern, instead in _LATEX:
        text = pattern.sub(instead, text)
    return text


def _value(found: re.Match[str]) -> Fraction:
    sign = -1 if found[0].startswith("-") else 1
    if found["whole"] is not None:
        return sign * (int(found["whole"]) + Fraction(int(found["top"]), int(found["bottom"])))
    value = _decimal(found["value"], found["power"])
    if found["divisor"] is not None:
        value /= _decimal(found["divisor"], found["divisor_power"])
    return sign * value


def _decimal(digits: str, power: str | None) -> Fraction:
    value = Fraction(digits.replace(",", "").replace("_", ""))
    if power is None:
        return value
    exponent = re.search(r"[+-]?\d+\)?$", power)
    assert exponent is not None, "a power ends in its exponent"
    return value * Fraction(10) ** int(exponent[0].rstrip(")"))
