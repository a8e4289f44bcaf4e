"""Trackers of a run: their settings and checks, and the process that reports to them.

The names of a run in a tracker (its project, its id) are decided once and stored in the folder `trackers` of the run
folder, so that a resumed run continues there. Addresses and secrets are not stored: the environment has them.

The main process of a run starts `tunekit.tracking.process`, which outlives it until the last metrics are sent, and
notices by its pipe when the main process is gone, whatever has ended it.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from tunekit.errors import DependencyError, RunError, Stopped
from tunekit.files import read_table
from tunekit.process.processes import LAUNCHERS_OWN
from tunekit.recipe.sections.section import Tracker
from tunekit.redact import redacted
from tunekit.runs.record import Record
from tunekit.runs.run import Run
from tunekit.runs.small_files import damaged, read_object, write_whole

TRACKERS = "trackers"
"""Folder of a run folder with the files of its trackers, and `log.txt`, what their libraries said."""

REACH_SECONDS = 10
"""Seconds for a server to answer before a run begins."""

INSTALL = "pip install 'tunekit[tracking]'"


def facts_of(tracker: Tracker) -> dict[str, Any]:
    """Return the facts about a tracker: `trackers.yaml`, beside this file."""
    facts: dict[str, Any] = read_table(Path(__file__).with_suffix(".yaml"))[tracker]
    return facts


def folder_of(run: Run) -> Path:
    """Return the folder of a run's tracker files."""
    return run.path / TRACKERS


def environment_of(run: Run, tracker: Tracker, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of a tracker for a run: those stored with it, else as they are set, else the defaults.

    Args:
        run: The run.
        tracker: The tracker.
        environment: The user's variables.
    """
    texts, folder = facts_of(tracker)["defaults"], folder_of(run).resolve()
    defaults = {name: text.format(folder=folder, id=secrets.token_hex(4)) for name, text in texts.items()}
    explicit = {name: environment[name] for name in defaults.keys() & environment.keys()}
    if tracker == "tensorboard":
        explicit = {name: str(Path(elsewhere, run.name)) for name, elsewhere in explicit.items() if elsewhere}
    return {**defaults, **explicit, **kept_of(run, tracker).names}


@dataclass(frozen=True)
class Kept:
    """State of a run for one of its trackers.

    Attributes:
        names: Variables that name it there.
        num_sent: Events with figures that were handed on so far, from the first one on.
    """

    names: dict[str, str] = field(default_factory=dict)
    num_sent: int = 0

    def save(self, run: Run, tracker: Tracker) -> None:
        """Put it into the run folder."""
        write_whole(_path_of(run, tracker), json.dumps(asdict(self), indent=2))


def kept_of(run: Run, tracker: Tracker) -> Kept:
    """Return the state of a run for a tracker; empty if it was not reported there yet."""
    path = _path_of(run, tracker)
    try:
        return Kept(**read_object(path))
    except FileNotFoundError:
        return Kept()
    except TypeError as error:
        raise damaged(path, error) from error


def _path_of(run: Run, tracker: Tracker) -> Path:
    return folder_of(run) / f"{tracker}.json"


def names_of(tracker: Tracker, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that name a run for a tracker, as they are set."""
    return {name: environment[name] for name in facts_of(tracker)["names"] if name in environment}


def check_trackers(trackers: Sequence[Tracker], environment: Mapping[str, str] = os.environ) -> None:
    """Refuse trackers that are not available, before anything expensive.

    Args:
        trackers: Which.
        environment: Where their own variables are.

    Raises:
        DependencyError: The library of one is not installed.
        RunError: There is no login, or no answer from its server.
    """
    for tracker in trackers:
        if importlib.util.find_spec(tracker) is None:
            raise DependencyError(f"output.report_to: {tracker} is not installed", hint=INSTALL)
    for tracker in trackers:
        if tracker == "wandb":
            _check_wandb()
        elif tracker == "mlflow":
            _check_mlflow(environment.get("MLFLOW_TRACKING_URI", ""))
        elif tracker == "trackio":
            _check_trackio(environment)


def _check_wandb() -> None:
    # wandb's settings start a service of its own, which is not to stay in this process.
    command = [sys.executable, "-m", "tunekit.tracking.wandb_account"]
    completed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if completed.returncode:
        words = redacted(completed.stderr.strip().rpartition("\n")[2])
        raise RunError(f"output.report_to: wandb failed to start: {words}", hint=f"fix or reinstall it: {INSTALL}")
    account = json.loads(completed.stdout.strip().rpartition("\n")[2])
    if "problem" in account:
        raise RunError(f"output.report_to: wandb's settings: {account['problem']}", hint="fix its WANDB_ variables")
    if account["mode"] != "online":
        return
    if not account["has_login"]:
        hint = "run `wandb login`, set WANDB_API_KEY, or log to the run folder only with WANDB_MODE=offline"
        raise RunError(f"output.report_to: wandb is not logged in to {account['server']}", hint=hint)
    _reach("wandb", account["server"], hint="set WANDB_MODE=offline, and upload the run later with `wandb sync`")


def _check_mlflow(uri: str) -> None:
    if uri.startswith(("http://", "https://")):
        hint = "fix MLFLOW_TRACKING_URI, or unset it to log to the run folder"
        _reach("mlflow", f"{uri.rstrip('/')}/health", hint=hint)


def _check_trackio(environment: Mapping[str, str]) -> None:
    server, space = environment.get("TRACKIO_SERVER_URL"), environment.get("TRACKIO_SPACE_ID")
    if server:
        _reach("trackio", server, hint="fix TRACKIO_SERVER_URL, or unset it to log to the run folder")
    elif space:
        from huggingface_hub import constants, get_token

        hint = "unset TRACKIO_SPACE_ID to log to the run folder"
        where = f"output.report_to: trackio's space {space}"
        if constants.HF_HUB_OFFLINE:
            raise RunError(f"{where} cannot be reached: HF_HUB_OFFLINE is set", hint=hint)
        if get_token() is None:
            raise RunError(f"{where} needs a login to the Hub", hint=f"run `hf auth login`, or {hint}")
        _reach("trackio", constants.ENDPOINT, hint=hint)


def _reach(tracker: Tracker, url: str, *, hint: str) -> None:
    """Refuse a server that does not answer; a request to log in is an answer."""
    parts = urlsplit(url)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
    try:
        urlopen(plain, timeout=REACH_SECONDS).close()
        return
    except HTTPError as error:
        if error.code < 500:
            return
        why = f"HTTP {error.code} {error.reason}"
    except URLError as error:
        why = str(error.reason)
    except (OSError, HTTPException, ValueError) as error:
        why = str(error)
    raise RunError(f"output.report_to: {tracker} cannot be reached at {plain}: {why}", hint=hint)


WAIT_SECONDS = {"finished": 60.0, "failed": 5.0, "interrupted": 5.0}
"""Seconds to wait for the last figures, where others may end what is left once this process is gone."""

PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_")
"""Beginnings of variables that tell a process of its place among those that train, which the reporter is none of."""


class Reporting:
    """Reports on a run to trackers during a `with` block; does nothing without trackers.

    Args:
        record: Record of the run, for messages of trackers.
        trackers: The trackers.
    """

    def __init__(self, record: Record, trackers: Sequence[Tracker]) -> None:
        self._record = record
        self._trackers = list(dict.fromkeys(trackers)) if record.place.is_main else []
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._hand_on, name="trackers", daemon=True)
        self._is_over = False

    def __enter__(self) -> Self:
        if self._trackers:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        phase = "failed"
        if error is None or isinstance(error, Stopped):
            phase = "finished" if self._record.run.status()["phase"] == "finished" else "interrupted"
        self._end(self._process, phase)

    def _start(self) -> None:
        run = self._record.run
        folder_of(run).mkdir(exist_ok=True)
        mine = (*LAUNCHERS_OWN, *PLACES)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tunekit.tracking.process", str(run.path), *self._trackers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            # It holds no memory of a device.
            env={**inherited, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
        self._reader.start()

    def _hand_on(self) -> None:
        """Write what the reporter says into the events of the run."""
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._record.write(**json.loads(line))
        if not self._is_over:
            log = folder_of(self._record.run) / "log.txt"
            self._record.write("warning", message=f"trackers receive no more metrics, training continues: see {log}")

    def _end(self, process: "subprocess.Popen[str]", phase: str) -> None:
        self._is_over = True
        assert process.stdin is not None
        # It may be gone; the run does without.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(f"{phase}\n")
        try:
            process.wait(WAIT_SECONDS[phase])
        except subprocess.TimeoutExpired:
            names = ", ".join(facts_of(tracker)["title"] for tracker in self._trackers)
            self._record.write("warning", message=f"{names}: the last metrics are still uploading")
        self._reader.join(1)
