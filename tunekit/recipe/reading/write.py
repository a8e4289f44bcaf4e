"""Plain values -> YAML text that reads back to the same values, here and in readers of YAML 1.1.

The two versions of YAML disagree about what an unquoted word means: `no` is false in one, `1e-4` a number in the
other. So a text that either of them would take for something else is written in quotes.
"""

import re
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper that also quotes what YAML 1.2 would read as a number, and never writes aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists below their key."""
        super().increase_indent(flow, False)


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z"),
    list("-+.0123456789"),
)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"0o[0-7]+\Z"), ["0"])


_LINE_BREAKS = re.compile("[\r\x85\u2028\u2029]")
"""Characters that some readers take for the end of a line, and others not: written as escapes."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _LINE_BREAKS.search(text) else None)


_Dumper.add_representer(str, _represent_text)


def to_yaml(value: Any) -> str:
    """A value as YAML text of several lines, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def to_inline_yaml(value: Any) -> str:
    """A value as YAML on one line, as it may stand behind `key=`."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")
