"""A run folder: recipe, plan, events and result of a run.

    recipe.yaml    the complete recipe, defaults filled in and paths absolute
    plan.yaml      the plan with its reasons
    recipe-1.yaml  earlier versions, with plan-1.yaml, if the run was resumed with edits; resume.json has these
    status.json    phase, step, process, and exit reason
    tags.json      tags by the user
    note.txt       note by the user
    job.json       its cluster job, if it is one
    events.jsonl   all events (see `tunekit.runs.events`)
    log.txt        output of the libraries
    log-1.txt ...  the same of the other processes
    console.log    output of a detached run
    launcher.log   other output of the processes; errors/ has the errors of those that failed
    data/          the token ids and labels that are trained on, and skipped.jsonl if rows were skipped
    inputs/        rows and functions that its caller held in memory, which its recipe names
    ranks/         heartbeats of the processes
    stacks/        stacks of all processes when one made no progress
    made_with.json versions, commit and threads that it was made with
    code.json      custom code of its models, if the recipe allows it, by SHA-256
    trackers/      files of its trackers, the run's names there, log.txt
    left_out.json  non-finite steps, which are skipped whenever they come again
    checkpoints/   the last two, each with a manifest once it is complete
    model/         the result with tokenizer, chat template and model card

A `Run` only reads and writes this folder: it is the same from the training process and from any other. Its result is
loaded by `tunekit.inference`.

A folder is named NAME-YYYYMMDD-HHMMSS, with -2, -3, ... if several started at once; so are those of sweeps. A name
matches, in this order: the folder of exactly that name; the folders with that NAME; and, for commands that only read,
the one folder with that prefix.
"""

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunekit.errors import DependencyError, RunError
from tunekit.files import has_controls, is_inside, is_name, load_template
from tunekit.planner.plan import Plan
from tunekit.recipe.load import dump_recipe, reload_recipe
from tunekit.recipe.reading.phrases import near, plain_word
from tunekit.recipe.schema import Recipe
from tunekit.redact import without_secrets
from tunekit.runs import small_files
from tunekit.runs.checkpoints.complete import CHECKPOINTS, newest_complete
from tunekit.runs.events import FINAL_PHASES, Event, judged_by, read_events, rows_of, words_of
from tunekit.runs.thumbnails import digests_of, thumbnails

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_TIME = re.compile(r"-\d{8}-\d{6}(-\d+)?$")
"""Time at the end of a folder's name."""

MAX_CANDIDATES = 5
"""Most names that an error lists."""


def stem_of(name: str) -> str:
    """Return the name of a folder without the time at its end."""
    return _TIME.sub("", name)


def called(name: str, names: Sequence[str]) -> list[str]:
    """Return the folder that is wholly so called, else those that are so without the time."""
    return [candidate for candidate in names if candidate == name] or [
        candidate for candidate in names if stem_of(candidate) == name
    ]


def matching(name: str, names: Sequence[str], *, noun: str, exact: bool) -> list[str]:
    """Return the folders that a name means, in their order; none where there is none.

    Args:
        name: A folder's name, its name without the time, or the beginning of it.
        names: Names of the folders that there are.
        noun: `run` or `sweep`, for errors.
        exact: Whether the beginning of a name is not enough.

    Raises:
        RunError: It is the beginning of several names, or of one where that is not enough.
    """
    matches = called(name, names)
    beginning = [candidate for candidate in names if candidate.startswith(name)] if name else []
    if matches or not beginning:
        return matches
    if exact:
        raise RunError(f"no {noun} named {name!r}", hint=f"use the full name: {_listed(beginning)}")
    if len(beginning) > 1:
        raise RunError(f"{name!r} matches {len(beginning)} {noun}s", hint=f"use one of: {_listed(beginning)}")
    return beginning


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_CANDIDATES
    return ", ".join(names[:MAX_CANDIDATES]) + (f" and {more} more" if more > 0 else "")


RUNS = Path("runs")
"""Folder of runs, in the working directory."""

INPUTS = "inputs"
"""Folder of a run folder with inputs that its caller held in memory."""

LOADING = "tunekit.inference.inference_model"
"""Module that loads results. A run imports it only when asked to: its methods are one more door to it, for users."""

TAGS = "tags.json"
"""File of a run folder with the user's own words for it."""

MAX_TAG_LETTERS = 40

NOTE = "note.txt"
"""File of a run folder with the user's note on it."""

MAX_NOTE_LETTERS = 10_000

STATUS: dict[str, tuple[type, ...]] = {
    "phase": (str,),
    "step": (int,),
    "num_steps": (int, type(None)),
    "started": (int, float),
    "pid": (int,),
    "identity": (str, type(None)),
    "host": (str,),
    "exit_reason": (str, type(None)),
}
"""Fields of every status, by type."""

NO_PROCESS = 2**22 + 1
"""Number that no process has: Linux has none above 2**22."""

SEEN_SECONDS = 30
"""Seconds for another machine to see a new file of a run, which a network file system may show late."""


class Run:
    """A run, by its folder.

    Args:
        path: The folder.

    Raises:
        RunError: It is not a run folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "status.json").is_file():
            raise RunError(f"{self.path} is not a run folder", hint="`tunekit runs` lists the runs")

    @classmethod
    def create(cls, plan: Plan) -> "Run":
        """Create a run folder with the recipe and the plan.

        Raises:
            RunError: `output.dir` exists and is not empty, or cannot be made.
        """
        output, hint = plan.recipe.output, "set output.dir to another folder"
        if output.dir is None:
            path = new_folder(RUNS, output.name, hint=hint)
        else:
            check_free(plan.recipe)
            path = make_folder(Path(output.dir), hint=hint, exist_ok=True)
        (path / "recipe.yaml").write_text(dump_recipe(plan.recipe), encoding="utf-8")
        (path / "plan.yaml").write_text(plan.to_yaml(), encoding="utf-8")
        status = {
            "phase": "starting",
            "step": 0,
            "num_steps": plan.schedule.num_steps if plan.schedule else None,
            "started": time.time(),
            **_this_process(),
            "exit_reason": None,
            "comes_from": None if plan.origin is None else plan.origin.chain,
        }
        _write_status(path, status, durable=True)
        return cls(path)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def recipe(self) -> Recipe:
        """Recipe of the run."""
        return reload_recipe(self.path / "recipe.yaml")

    @property
    def plan(self) -> Plan:
        """Plan of the run."""
        return small_files.read_plan(self.path / "plan.yaml", self.recipe)

    @property
    def model_path(self) -> Path:
        """Folder of the trained model or adapter."""
        return self.path / "model"

    def model(
        self,
        *,
        checkpoint: str | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    ) -> "PreTrainedModel":
        """Load the trained model in evaluation mode: Transformers' class, or PEFT's around it for an adapter.

        Args:
            checkpoint: Step of a checkpoint, instead of the result.
            device: Device of the model; `auto`: an accelerator if available.
            dtype: Data type of the weights; `auto`: as trained, or as stored.

        Raises:
            TunekitError: The run has no result yet, it cannot be loaded, or it does not fit in free memory.
        """
        loading = import_module(LOADING)
        model: PreTrainedModel = loading.load_any(
            loading.find_trained(self, checkpoint), device=device, dtype=dtype
        ).model
        return model

    def tokenizer(self, *, checkpoint: str | None = None) -> "PreTrainedTokenizerBase":
        """Load the tokenizer of the trained model, with its chat template.

        Args:
            checkpoint: Step of a checkpoint, instead of the result.

        Raises:
            TunekitError: The run has no result yet, or it cannot be loaded.
        """
        loading = import_module(LOADING)
        tokenizer: PreTrainedTokenizerBase = loading.tokenizer_of(loading.find_trained(self, checkpoint))
        return tokenizer

    def status(self) -> dict[str, Any]:
        """Return phase, step, process and exit reason, as last written.

        Of a run that lost them with the power, they are those of one that died. Only steps are written without being
        synced.

        Raises:
            RunError: The status file is damaged.
        """
        file = self.path / "status.json"
        try:
            status = small_files.read_object(file)
        except RunError:
            if not small_files.is_blank(file):
                raise
            this = {"pid": NO_PROCESS, "identity": "", "host": os.uname().nodename}
            step, started = newest_complete(self.path).step, file.stat().st_mtime
            return {
                "phase": "training",
                "step": step,
                "num_steps": None,
                "started": started,
                **this,
                "exit_reason": None,
            }
        for key, kinds in STATUS.items():
            if not isinstance(status.get(key), kinds):
                raise small_files.damaged(file, f"{key} is {status[key]!r}" if key in status else f"{key} is missing")
        return status

    def update_status(self, **changes: Any) -> None:
        """Change the status atomically; a phase is synced."""
        _write_status(self.path, {**self.status(), **changes}, durable="phase" in changes)

    @property
    def tags(self) -> list[str]:
        """Tags of the run, in order."""
        try:
            return [str(tag) for tag in small_files.read_list(self.path / TAGS)]
        except FileNotFoundError:
            return []

    @property
    def note(self) -> str:
        """Note on the run; empty if there is none."""
        try:
            return (self.path / NOTE).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def begin(self) -> None:
        """Record that the run starts or resumes in this process."""
        self.update_status(phase="starting", exit_reason=None, place_in_line=None, **_this_process())

    @property
    def is_begun(self) -> bool:
        """True if this process has made or resumed the run, and has recorded that."""
        status, this = self.status(), _this_process()
        return status["phase"] == "starting" and all(status[key] == this[key] for key in this)

    @property
    def state(self) -> str:
        """The phase; `died` if its processes or cluster job are gone without an end on record.

        `stuck` if the process that should record the end is alive and does not.
        """
        status = self.status()
        state = self._state_by(status)
        if state == small_files.DIED and (later := self.status()) != status:
            # It said how it ended, and was gone, between the look at its status and that at its processes.
            state = self._state_by(later)
        return state

    def _state_by(self, status: dict[str, Any]) -> str:
        """Return the run's state by a status that was read."""
        phase = str(status["phase"])
        job = small_files.read_job(self.path)
        if job is not None and phase != "finished":
            return small_files.state_of(job, phase)
        # A job that was printed waits until somebody submits it; in the line for devices a process does.
        if phase in FINAL_PHASES or (phase == "queued" and status.get("place_in_line") is None):
            return phase
        return small_files.state_of_processes(self.path, status)

    @property
    def doing(self) -> str | None:
        """Last activity of rank 0: `loading`, `data`, `forward`, `evaluation`, `saving`, ...

        None if there is no heartbeat yet.
        """
        return next((beat["at"] for beat in small_files.beats_in(self.path) if beat["rank"] == 0), None)

    def events(self) -> list[Event]:
        """Return all events so far."""
        return read_events(self.path / "events.jsonl")[0]

    def result(self) -> dict[str, Any]:
        """Return the summary of a finished run; empty before."""
        return next((event for event in reversed(self.events()) if event["event"] == "result"), {})

    def samples(self) -> list[dict[str, Any]]:
        """Return the sample prompts with the answers before and after training.

        Prompts with images name them in their text, and have their digests as `pictures`.
        """
        answers: dict[str, dict[str, Any]] = {}
        for event in self.events():
            if event["event"] == "sample":
                sample = answers.setdefault(event["prompt"], {"prompt": event["prompt"]})
                sample[event["when"]] = event["answer"]
                if digests := digests_of(event):
                    sample["pictures"] = list(digests)
        return list(answers.values())

    def thumbnails(self, digests: Iterable[str]) -> dict[str, str]:
        """Return small copies of images of the sample prompts, as data URLs by their digests.

        Only files of the run folder are read; an image without one is left out.

        Args:
            digests: Digests, `pictures` of samples.
        """
        return thumbnails(self.path, digests)

    def metrics(self) -> "pandas.DataFrame":
        """Return the logged values, one row per step; evaluation columns are empty where there was none."""
        import pandas

        rows: dict[int, Event] = {}
        for event in self.events():
            if event["event"] in ("log", "eval"):
                fields = {key: value for key, value in event.items() if key not in ("event", "time")}
                rows.setdefault(event["step"], {}).update(fields)
        frame = pandas.DataFrame([rows[step] for step in sorted(rows)])
        if frame.empty:
            return pandas.DataFrame({"loss": []}, index=pandas.Index([], name="step"))
        numbers: pandas.DataFrame = frame.set_index("step").apply(pandas.to_numeric, errors="coerce")
        return numbers

    def plot(self) -> "Figure":
        """Plot the training and evaluation loss by step, or the method's reward or margin.

        Raises:
            DependencyError: matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ModuleNotFoundError as error:
            hint = "install it with: pip install 'tunekit[notebook]'"
            raise DependencyError("plotting needs matplotlib", hint=hint) from error

        metrics = self.metrics()
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        learned = judged_by(metrics.columns.tolist())
        for column, label, style in ((learned, "training", "-"), (f"eval_{learned}", "evaluation", "o-")):
            if column in metrics:
                axes.plot(metrics[column].dropna(), style, label=label)
        per_token = " (nats per token)" if learned == "loss" else ""
        axes.set(title=self.name, xlabel="step", ylabel=f"{words_of(learned)}{per_token}")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        # Closed, pyplot does not draw it a second time behind a notebook's cell; it can still be shown and saved.
        pyplot.close(figure)
        return figure

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __str__(self) -> str:
        status = self.status()
        return f"{self.name}: {self.state}, step {status['step']} of {status['num_steps']}, in {self.path}"

    def _repr_html_(self) -> str:
        result = self.result()
        measures = result.get("measures", {})
        losses = [
            (label, f"{result[key]:.4f}")
            for key, label in (("first_loss", "first loss"), ("last_loss", "last loss"), ("eval_loss", "eval loss"))
            if result.get(key) is not None and "reward" not in measures
        ]
        rows = [("state", self.state), ("folder", str(self.path)), *losses, *rows_of(measures)]
        template = load_template(Path(__file__).with_name("run.html.jinja"))
        return template.render(rows=rows, samples=self.samples())


def list_runs(root: Path = RUNS) -> list[Run]:
    """List the runs in a folder, newest first, without links and runs being deleted.

    Runs with a damaged status are skipped.
    """
    started = {run: since for run in _runs_in(root) if (since := _started(run)) is not None}
    return sorted(started, key=lambda run: started[run], reverse=True)


def damaged_runs(root: Path = RUNS) -> list[Run]:
    """The runs in a folder whose status cannot be read."""
    return [run for run in _runs_in(root) if _started(run) is None]


def _runs_in(root: Path) -> list[Run]:
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if not path.name.startswith(".") and is_inside(path, root)]
    return [Run(path) for path in folders if (path / "status.json").is_file()]


def _started(run: Run) -> float | None:
    """Return when a run was started; None where its status lacks it, or is gone by now."""
    try:
        return float(run.status()["started"])
    except (RunError, FileNotFoundError, KeyError, TypeError, ValueError):
        return None


def find_run(name: str, *, exact: bool = False) -> Run:
    """Find a run by its folder or its name in `runs/`: the newest of that name, else the only one with that prefix.

    Args:
        name: Its folder, its name with or without the time, or a prefix of it.
        exact: Whether a prefix is refused, as for commands that change a run.

    Raises:
        RunError: There is none, or the prefix is ambiguous.
    """
    return runs_named(name, exact=exact)[0]


def runs_named(name: str, *, exact: bool = False) -> list[Run]:
    """Return all runs that match a name as in `find_run`, newest first.

    Raises:
        RunError: There is none, or the prefix is ambiguous.
    """
    if not is_name(name):
        raise RunError(f"invalid run name {name!r}", hint="`tunekit runs` lists them; you can also pass a run folder")
    if (Path(name) / "status.json").is_file():
        return [Run(name)]
    if (RUNS / name / "status.json").is_file() and Path(name).name == name:
        if not is_inside(RUNS / name, RUNS):
            where = (RUNS / name).resolve()
            raise RunError(f"{RUNS / name} is a link out of {RUNS}", hint=f"pass its target: {where}")
        return [Run(RUNS / name)]
    runs = {run.name: run for run in list_runs()}
    matches = matching(name, list(runs), noun="run", exact=exact)
    if not matches:
        hint = "`tunekit runs` lists them; you can also pass a run folder"
        likely = _likely(name, runs)
        raise RunError(f"no run {name!r} in {RUNS}", hint=f"did you mean {likely!r}? {hint}" if likely else hint)
    return [runs[match] for match in matches]


def _likely(name: str, runs: Iterable[str]) -> str | None:
    """The name most like one that no run has, without the time behind it: what holds it, else what is written alike."""
    stems = list(dict.fromkeys(map(stem_of, runs)))
    holding = (stem for stem in stems if plain_word(name) in plain_word(stem))
    return next(holding, None) or near(name, stems)


def set_tags(run: Run, tags: Iterable[str]) -> list[str]:
    """Replace the tags of a run, and return them.

    Args:
        run: The run.
        tags: The tags. Surrounding spaces and duplicates are removed.

    Raises:
        RunError: A tag is empty, too long or has control characters, or the folder cannot be written.
    """
    words = list(dict.fromkeys(tag.strip() for tag in tags))
    for word in words:
        if not word or len(word) > MAX_TAG_LETTERS or has_controls(word):
            hint = f"use 1 to {MAX_TAG_LETTERS} characters on one line"
            raise RunError(f"invalid tag {word[:MAX_TAG_LETTERS]!r}", hint=hint)
    _write(run.path / TAGS, json.dumps(words, ensure_ascii=False))
    return words


def set_note(run: Run, note: str) -> str:
    """Replace the note on a run, and return it.

    Args:
        run: The run.
        note: Any text, without surrounding spaces; empty: no note.

    Raises:
        RunError: The note is too long or has control characters, or the folder cannot be written.
    """
    text = "\n".join(note.strip().splitlines())
    if len(text) > MAX_NOTE_LETTERS:
        hint = f"use at most {MAX_NOTE_LETTERS:,} characters"
        raise RunError(f"the note on {run.name} has {len(text):,} characters", hint=hint)
    if has_controls(text.replace("\n", "").replace("\t", "")):
        raise RunError(f"the note on {run.name} has control characters", hint="use printable characters")
    _write(run.path / NOTE, text)
    return text


def _write(path: Path, text: str) -> None:
    try:
        small_files.write_whole(path, text)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}", hint="make the folder writable") from error


def check_free(recipe: Recipe) -> None:
    """Refuse a recipe whose run folder holds something, or is none of a run's own.

    Raises:
        RunError: It does, or is not.
    """
    if recipe.output.dir is None:
        return
    path = Path(recipe.output.dir)
    _check_own(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if (path / "status.json").is_file():
        state = Run(path).state
        hint = f"{_use_of(path, state)}; or set a new folder"
        raise RunError(f"output.dir: {path} contains a run, which is {state}", hint=hint)
    raise RunError(f"output.dir: {path} exists and is not empty", hint="set a new folder, or unset it")


def _use_of(path: Path, state: str) -> str:
    """Describe what can be done with the run of a folder."""
    folder = shlex.quote(str(path))
    if state not in (*FINAL_PHASES, small_files.DIED):
        return f"wait until it ends, or stop it first: tunekit stop {folder}"
    if state != "finished" and not any((path / CHECKPOINTS).glob("checkpoint-*")):
        return "--resume here starts it over"
    if newest_complete(path).path is None:
        return f"`tunekit runs show {folder}` shows its status"
    if state == "finished":
        return f"`tunekit resume {folder} train.max_steps=...` trains further"
    return f"`tunekit resume {folder}`, or --resume here, resumes it"


def new_folder(root: Path, name: str | None, *, hint: str) -> Path:
    """Make a folder that is called by a name and the time."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in range(1, 1000):
        with contextlib.suppress(FileExistsError):
            return make_folder(root / (stem if attempt == 1 else f"{stem}-{attempt}"), hint=hint)
    raise RunError(f"{root / stem} and a thousand more already exist", hint="retry in a second")


def make_folder(path: Path, *, hint: str, exist_ok: bool = False) -> Path:
    """Make a folder.

    Raises:
        FileExistsError: It exists.
        RunError: It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as error:
        raise RunError(f"cannot create {path}: {error.strerror}", hint=hint) from error
    return path


def _check_own(path: Path) -> None:
    """Refuse a run folder that is none of a run's own, whatever is in it."""
    if has_controls(str(path)):
        raise RunError(f"output.dir: {str(path)!r} contains control characters", hint="set another folder")
    if path.is_symlink():
        raise RunError(f"output.dir: {path} is a link to {path.readlink()}", hint="set its target")
    if path.resolve() in (Path(path.resolve().anchor), Path.home().resolve()):
        raise RunError(f"output.dir: {path} is the root or home folder", hint="set a new folder in it")


def _write_status(path: Path, status: dict[str, Any], *, durable: bool) -> None:
    text = json.dumps({**without_secrets(status), "updated": time.time()}, indent=2)
    small_files.write_whole(path / "status.json", text, durable=durable)


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "identity": small_files.identity_of(os.getpid()), "host": os.uname().nodename}
