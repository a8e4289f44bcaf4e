"""Record anew what users see: `python -m tests.photographs.record [KIND ...]`.

The kinds are plans, losses, help, names, schema, shapes and messages; without any, all of them are recorded. The tests
themselves write, so what is recorded is what they compare.
"""

import os
import subprocess
import sys

from tests.photographs.recorded import FOLDER, LOSSES, RECORDING

ROOT = FOLDER.parents[1]
SMOKE = "tests/smoke/test_methods.py"
SHAPES = "tests/photographs/test_shapes.py"
KINDS = {
    "plans": ("plans.yaml", ["tests/photographs/test_plans.py"]),
    "losses": (LOSSES, [SMOKE, "tests/photographs/test_losses.py"]),
    "help": ("help.txt", ["tests/photographs/test_help.py"]),
    "names": ("names.txt", ["tests/photographs/test_names.py"]),
    "schema": ("schema.txt", ["tests/photographs/test_names.py"]),
    "shapes": ("shapes-*.yaml", [f"{SMOKE}::test_a_method_trains_and_saves_its_weights[sft-lora]", SHAPES]),
    "messages": ("messages-*.txt", ["tests/photographs/test_messages.py"]),
}
"""What each kind is recorded in, and the tests that record it."""


def main(kinds: list[str]) -> int:
    if unknown := set(kinds) - KINDS.keys():
        print(f"unknown: {', '.join(sorted(unknown))}; the kinds are {', '.join(KINDS)}", file=sys.stderr)
        return 2
    chosen = [KINDS[kind] for kind in kinds or KINDS]
    for name, _ in chosen:
        for file in FOLDER.glob(name):
            file.unlink()
    files = list(dict.fromkeys(file for _, files in chosen for file in files))
    environment = os.environ | {RECORDING: "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *files], cwd=ROOT, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
