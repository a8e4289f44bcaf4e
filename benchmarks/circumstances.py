"""Where and on what something was measured."""

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tunekit.probe.hardware import probe_hardware

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """The commit that is checked out, in short; of files without their history, `TUNEKIT_COMMIT`."""
    if given := os.environ.get("TUNEKIT_COMMIT"):
        return given
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def circumstances(packages: Sequence[str]) -> dict[str, Any]:
    """Date, commit, machine, its load, and versions.

    Args:
        packages: Whose versions matter.
    """
    hardware = probe_hardware()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": {"system": platform.system(), "device": hardware.cpu.name, "num_cores": hardware.num_cores},
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def in_words(packages: Sequence[str]) -> str:
    """The same in a line."""
    found = circumstances(packages)
    machine, versions = found["machine"], ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    where = f"{machine['device']} ({machine['num_cores']} cores), {machine['system']}, Python {found['python']}"
    return f"{found['date']}, commit {found['commit']}, {where}, {versions}"
