"""Migration of all configurations in a folder, and the counts of what became of them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunekit.errors import RecipeError
from tunekit.migration.migration import migrate
from tunekit.migration.original import NoConfigurationError
from tunekit.migration.report import Migration

Outcome = Literal["same", "different", "partly", "not at all", "no configuration"]
"""Result of a file: trains the same, perhaps with a field that the report names; trains otherwise in something; lacks a
key; no recipe; or read as no configuration of a known tool."""

_SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".bash")
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class FileResult:
    """A file of a folder, and what became of it."""

    path: Path
    """Relative to the folder."""
    outcome: Outcome
    made: Migration | None = None
    problem: str = ""
    """Why no recipe was made."""

    @property
    def tool(self) -> str:
        """Its tool; empty where no recipe was made."""
        return "" if self.made is None else self.made.tool

    @property
    def reasons(self) -> list[str]:
        """Keys that are unsupported, or different without a field that makes them the same; each once."""
        if self.made is None:
            return []
        lines = self.made.of_kind("unsupported") if not self.made.is_whole else ()
        lines = lines or tuple(line for line in self.made.different if not line.remedy)
        return list(dict.fromkeys(_INDEX.sub("[]", line.key) for line in lines))


@dataclass(frozen=True)
class FolderMigration:
    """The configurations of a folder, and what became of each."""

    folder: str
    results: tuple[FileResult, ...]

    @property
    def configurations(self) -> tuple[FileResult, ...]:
        """All files that are configurations of a known tool."""
        return tuple(result for result in self.results if result.outcome != "no configuration")

    @property
    def counts(self) -> Mapping[str, Mapping[Outcome, int]]:
        """For each tool the number of configurations by outcome; those without a recipe have no tool."""
        tools: dict[str, Counter[Outcome]] = {}
        for result in self.configurations:
            tools.setdefault(result.tool, Counter())[result.outcome] += 1
        return tools

    @property
    def reasons(self) -> list[tuple[str, str, int]]:
        """Keys by which configurations are not the same, with their tool and the number of files, the most first."""
        keys = Counter((result.tool, key) for result in self.results for key in result.reasons)
        return [(tool, key, number) for (tool, key), number in keys.most_common()]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "folder": self.folder,
            "files": [
                {
                    "file": str(result.path),
                    "tool": result.tool,
                    "outcome": result.outcome,
                    "reasons": result.reasons,
                    "problem": result.problem,
                }
                for result in self.results
            ],
            "counts": {tool: dict(counts) for tool, counts in self.counts.items()},
            "reasons": [{"tool": tool, "key": key, "files": number} for tool, key, number in self.reasons],
        }


def migrate_folder(folder: Path, *, tool: str | None = None, num_devices: int | None = None) -> FolderMigration:
    """Convert every configuration in a folder and in those below it; files of other kinds are left aside.

    Args:
        folder: The folder. Relative paths in its configurations are looked up in the working directory.
        tool: Source tool of all files. Default: detected for each.
        num_devices: Devices that they were written for.

    Raises:
        RecipeError: No file in it is a configuration of a known tool.
    """
    results = tuple(_result(folder, path, tool, num_devices) for path in _files(folder))
    migrated = FolderMigration(str(folder), results)
    if not migrated.configurations:
        problem = f"{folder}: no configuration of a known tool in it"
        raise RecipeError(problem, hint="pass a folder with configurations, or one file of them")
    return migrated


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix in _SUFFIXES and path.is_file() and not is_hidden:
            yield path


def _result(folder: Path, path: Path, tool: str | None, num_devices: int | None) -> FileResult:
    name = path.relative_to(folder)
    try:
        migration = migrate(path, tool=tool, num_devices=num_devices)
    except NoConfigurationError as error:
        return FileResult(name, "no configuration", problem=error.problem)
    except RecipeError as error:
        return FileResult(name, "not at all", problem=error.problem)
    return FileResult(
        name, "partly" if not migration.is_whole else "same" if migration.is_same else "different", migration
    )
