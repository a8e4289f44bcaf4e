"""Runs that outlive whoever starts them: each is a command line of its own, in a session of its own.

The process is the same `python -m tunekit train ...` that a user would type. It tells its starter over a pipe when all
can see the run, or why there is none; whether anybody still listens does not matter to it. What it prints is kept in
the run folder.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from tunekit.api.devices import visible_to
from tunekit.data.sources.in_memory import RowData
from tunekit.errors import RunError, Stopped, TunekitError, from_words
from tunekit.recipe.load import AnyOverrides, as_plain, override_words
from tunekit.recipe.reading.rewrite import short_recipe
from tunekit.recipe.schema import Recipe
from tunekit.runs.events import Event, Listener
from tunekit.runs.kept_inputs import rows_as_overrides
from tunekit.runs.run import Run, find_run

CONSOLE = "console.log"
"""File of a run folder with what a detached run printed."""

TOLD_LINES = 20
"""Of what a process printed that ended without a word of why."""

Source = str | Path | Mapping[str, Any] | Recipe


def start(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    eval_dataset: RowData | None = None,
    resume: bool = False,
    devices: Sequence[str] | None = None,
    queue: bool = False,
) -> Run:
    """Start a run in a process of its own, which outlives this one, and return it once its folder exists.

    Args:
        source: The recipe: a file's path, the name of a shipped one, a mapping of its sections, or a loaded one.
        overrides: Changes to it, such as `train.max_steps=10`.
        train_dataset: Rows to train on instead of `data.train`, as for `train`.
        eval_dataset: The same instead of `data.eval`.
        resume: Resume the unfinished run of this recipe, if there is one.
        devices: The accelerators to use, by index or UUID; by default those that the plan chooses.
        queue: Wait until no other run on this machine uses the devices.

    Raises:
        TunekitError: There is no run, for the same reasons as with `train`.
    """
    words = override_words(overrides)
    words += rows_as_overrides(source, words, train_dataset=train_dataset, eval_dataset=eval_dataset)
    with tempfile.TemporaryDirectory(prefix="tunekit-") as folder:
        recipe = _written(source, Path(folder)) if isinstance(source, Recipe | Mapping) else source
        options = [*(["--resume"] if resume else []), *(["--queue"] if queue else [])]
        return Run(_start(["train", str(recipe), *words, *options], devices))


def start_resume(
    run: Run | str | Path,
    overrides: AnyOverrides = (),
    *,
    from_: str | None = None,
    weights_only: bool = False,
    devices: Sequence[str] | None = None,
    queue: bool = False,
) -> Run:
    """Resume a run in a process of its own, which outlives this one, and return it once it has started.

    Args:
        run: The run, its folder, or its name in `runs/`.
        overrides: Edits of its recipe.
        from_: The checkpoint to resume from, by its step, name or path. Default: the newest complete one.
        weights_only: Start over with the weights of that checkpoint, and load nothing else of it.
        devices: The accelerators to use, by index or UUID.
        queue: Wait until no other run on this machine uses the devices.

    Raises:
        TunekitError: It cannot be resumed, for the same reasons as with `resume`.
    """
    existing = run if isinstance(run, Run) else find_run(str(run), exact=True)
    options = [*([] if from_ is None else ["--from", from_]), *(["--weights-only"] if weights_only else [])]
    options += ["--queue"] if queue else []
    return Run(_start(["resume", str(existing.path), *override_words(overrides), *options], devices))


def start_sweep(
    source: Source,
    values: Sequence[str],
    *,
    random: int | None = None,
    optuna: int | None = None,
    by: str | None = None,
) -> Path:
    """Start a sweep in a process of its own, which outlives this one, and return its folder once that exists.

    Args:
        source: The recipe.
        values: Values to try, as for `tunekit sweep`: `train.learning_rate=1e-5,1e-4` or `=1e-5..1e-3`; those with one
            value apply to all runs.
        random: Number of combinations to sample; by default every one is tried.
        optuna: Number of combinations for Optuna to choose.
        by: Metric to compare runs by.

    Raises:
        TunekitError: There is no sweep, for the same reasons as with `sweep`.
    """
    by_option = {"--random": random, "--optuna": optuna, "--by": by}
    options = [str(word) for option, value in by_option.items() if value is not None for word in (option, value)]
    with tempfile.TemporaryDirectory(prefix="tunekit-") as folder:
        recipe = _written(source, Path(folder)) if isinstance(source, Recipe | Mapping) else source
        return Path(_start(["sweep", str(recipe), *values, *options], None))


def _start(words: Sequence[str], devices: Sequence[str] | None) -> str:
    """Start a command, and wait until it has a folder, which is returned, or says why it has none."""
    environment = {**os.environ, **(visible_to(devices) if devices else {})}
    listening, telling = os.pipe()
    command = [sys.executable, "-m", "tunekit", words[0], "--announce-to", str(telling), *words[1:]]
    with os.fdopen(listening, encoding="utf-8") as reader, tempfile.TemporaryFile() as console:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=environment,
                pass_fds=(telling,),
                start_new_session=True,
            )
        finally:
            os.close(telling)
        # Somebody has to take note of its end, or its number stays in use for as long as this process lives.
        threading.Thread(target=process.wait, name=f"end of {process.pid}", daemon=True).start()
        return _folder_of(reader.readline(), console)


def _folder_of(line: str, console: IO[bytes]) -> str:
    """The folder that a process told of, or the error that it raised."""
    if not line:
        console.seek(0)
        lines = console.read().decode("utf-8", errors="replace").strip().splitlines()[-TOLD_LINES:]
        raise RunError("the process exited before it created a folder:\n" + "\n".join(lines))
    message = json.loads(line)
    if "folder" in message:
        return str(message["folder"])
    raise from_words(message)


def _written(source: Mapping[str, Any] | Recipe, folder: Path) -> Path:
    """A recipe as a file, of a name that runs of it may have."""
    if isinstance(source, Recipe):
        name, text = source.output.name or "recipe", short_recipe(source)
    else:
        name, text = "recipe", yaml.safe_dump(as_plain(source), sort_keys=False, allow_unicode=True)
    path = folder / f"{Path(name).name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


class Announcer:
    """Tells whoever started this process what becomes of it, and takes what it prints into the folder of its run.

    Args:
        descriptor: The end of the pipe to write to.
    """

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8")
        # Workers are not to hold it open.
        os.set_inheritable(descriptor, False)

    def heard_by(self, listener: Listener) -> Listener:
        """A listener that hears the same, and tells the starter when the run or the sweep has begun."""

        def hear(event: Event) -> None:
            listener(event)
            if event["event"] == "plan":
                _print_into(event["run"].path / CONSOLE)
            elif event["event"] == "begun":
                self._tell({"folder": str(event["run"].path)})
            elif event["event"] == "sweep":
                _print_into(event["sweep"].path / CONSOLE)
                self._tell({"folder": str(event["sweep"].path)})

        return hear

    def refuse(self, error: TunekitError) -> None:
        """Tell that there is no run."""
        self._tell(error.to_words())

    def stopped(self, stopped: Stopped) -> None:
        """Tell that it ended before there was one."""
        self.refuse(RunError(stopped.reason, hint=stopped.hint))

    def _tell(self, words: Mapping[str, Any]) -> None:
        """Write a line, the first time; where the starter is gone, nobody is told."""
        if self._pipe.closed:
            return
        with contextlib.suppress(BrokenPipeError), self._pipe:
            self._pipe.write(json.dumps(words) + "\n")


def _print_into(path: Path) -> None:
    """Have this process print into a file of its run from now on, after what it printed before."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.pread(1, os.fstat(1).st_size, 0)
    with path.open("ab") as file:
        file.write(before)
        file.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
