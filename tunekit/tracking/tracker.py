"""The events of a run, handed to one tracker through transformers' own callback for it, in a thread of its own.

See `tunekit.tracking.process`, whose process this is part of.
"""

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, assert_never

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import get_reporting_integration_callbacks

from tunekit.recipe.sections.section import Tracker
from tunekit.redact import redacted, without_secrets
from tunekit.runs.events import Event, read_events
from tunekit.runs.run import Run
from tunekit.tracking.trackers import Kept, facts_of, kept_of, names_of

POLL_SECONDS = 1.0
"""Seconds between two looks for new events."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 5.0, 60.0
"""Seconds until a tracker that failed is tried again: at first, and at most."""

EXIT_CODES = {"finished": 0, "interrupted": 130}
"""Exit codes for Weights & Biases by the end of a run; 1 of any other."""

MLFLOW_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}
"""The same for MLflow; FAILED of any other."""


class Tell(Protocol):
    """Makes an event of the run."""

    def __call__(self, event: str, **fields: str) -> None:
        """Make one."""


class Settings:
    """Training arguments as transformers' callbacks expect them: names, and the values that the tracker stores.

    Args:
        run: The run, whose recipe is kept.
    """

    trackio_space_id = None
    trackio_bucket_id = None
    trackio_static_space_id = False
    hub_private_repo = None

    def __init__(self, run: Run) -> None:
        self.run_name = run.name
        self.output_dir = str(run.path.resolve())
        self.project = os.environ.get("TRACKIO_PROJECT")
        self._recipe = dict(flat(without_secrets(run.recipe.model_dump(mode="json"))))

    def to_dict(self) -> dict[str, Any]:
        """The recipe by its dotted keys."""
        return dict(self._recipe)

    def to_json_string(self) -> str:
        """The same as text."""
        return json.dumps(self._recipe, indent=2, ensure_ascii=False)


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted keys; what is not given is left out, and lists are text."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{name}.")
        elif isinstance(value, list):
            yield f"{above}{name}", json.dumps(value, ensure_ascii=False)
        elif value is not None:
            yield f"{above}{name}", value


def figures_of(event: Event) -> dict[str, float]:
    """The numbers of a `log` or `eval` event; those for which JSON has no word stand in it as text."""
    logs = {}
    for name, value in event.items():
        if name in ("event", "time", "step"):
            continue
        if value in ("nan", "inf", "-inf") or (isinstance(value, int | float) and not isinstance(value, bool)):
            logs[name] = float(value)
    return logs


class Pump(threading.Thread):
    """Hands the events of a run to one tracker, until the run is over.

    Args:
        run: The run.
        tracker: The tracker.
        tell: Makes an event of the run.
    """

    def __init__(self, run: Run, tracker: Tracker, tell: Tell) -> None:
        super().__init__(name=tracker, daemon=True)
        self._run, self._tracker, self._tell = run, tracker, tell
        self._offset = self._num_read = 0
        self._num_sent = kept_of(run, tracker).num_sent
        self._waiting: deque[Event] = deque()
        self._over = threading.Event()
        self._phase = ""
        self._has_failed = False
        self._args, self._state, self._control = Settings(run), TrainerState(), TrainerControl()
        self._callback: TrainerCallback | None = None

    def end(self, phase: str) -> None:
        """Hand on what is left, and say how the run ended."""
        self._phase = phase
        self._over.set()

    def run(self) -> None:
        """Hand on events; what fails is tried again, after the end of the run once."""
        wait = FIRST_WAIT_SECONDS
        while True:
            is_last = self._over.is_set()
            try:
                self._report()
                return
            except Exception as error:  # noqa: BLE001  (a tracker may raise anything)
                self._has_failed = True
                self._say_what_failed(error, is_last=is_last)
            if is_last:
                return
            self._over.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _report(self) -> None:
        callback = self._callback or self._begin()
        is_over = False
        while not is_over:
            is_over = self._over.is_set()
            self._read()
            if self._waiting:
                self._hand_on(callback)
            if not is_over:
                self._over.wait(POLL_SECONDS)
        self._close(callback)

    def _hand_on(self, callback: TrainerCallback) -> None:
        """Hand on what waits, and keep how far that went."""
        try:
            while self._waiting:
                self._state.global_step = self._waiting[0]["step"]
                callback.on_log(self._args, self._state, self._control, logs=figures_of(self._waiting[0]))
                self._waiting.popleft()
                self._num_sent += 1
        finally:
            self._keep()

    def _read(self) -> None:
        """Take in what was written since, but for what was handed on before this process was there."""
        events, self._offset = read_events(self._run.path / "events.jsonl", self._offset)
        figures = [event for event in events if event["event"] in ("log", "eval")]
        self._waiting += figures[max(0, self._num_sent - self._num_read) :]
        self._num_read += len(figures)

    def _keep(self) -> None:
        Kept(names_of(self._tracker, os.environ), self._num_sent).save(self._run, self._tracker)

    def _begin(self) -> TrainerCallback:
        """Make the run known to the tracker, or go on with it there."""
        if self._has_failed and self._tracker == "wandb":
            import wandb

            # It holds the run of the try that failed to be in use.
            wandb.teardown()
        (kind,) = get_reporting_integration_callbacks([self._tracker])
        callback = kind()
        callback.on_train_begin(self._args, self._state, self._control)
        if self._tracker == "mlflow":
            import mlflow

            assert "_async_log" in vars(callback)
            # In its own thread an error would be dropped, and here it would not be known what is to be sent again.
            callback._async_log = False
            active = mlflow.active_run()
            assert active is not None
            os.environ["MLFLOW_RUN_ID"] = active.info.run_id
        self._keep()
        self._tell("tracker", name=self._tracker, message=place_words(self._tracker))
        self._callback = callback
        return callback

    def _close(self, callback: TrainerCallback) -> None:
        """Tell the tracker how the run ended, where it has a word for that."""
        if self._tracker == "wandb":
            import wandb

            wandb.finish(exit_code=EXIT_CODES.get(self._phase, 1))
        elif self._tracker == "mlflow":
            import mlflow

            mlflow.end_run(MLFLOW_STATUS.get(self._phase, "FAILED"))
        callback.on_train_end(self._args, self._state, self._control)

    def _say_what_failed(self, error: Exception, *, is_last: bool) -> None:
        words = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        words = redacted(words)[:200].rstrip(". ")
        what = "its last metrics are missing" if is_last else "retrying, training continues"
        title = facts_of(self._tracker)["title"]
        self._tell("warning", tracker=self._tracker, message=f"{title}: {words}; {what}")
        print(f"{self._tracker}: {type(error).__name__}: {error}", file=sys.stderr)


def place_words(tracker: Tracker) -> str:
    """Describe where the run is shown, or by what command."""
    match tracker:
        case "tensorboard":
            return f"tensorboard --logdir {os.environ['TENSORBOARD_LOGGING_DIR']}"
        case "wandb":
            import wandb

            assert wandb.run is not None
            return wandb.run.url or f"wandb sync {Path(wandb.run.dir).parent}"
        case "mlflow":
            import mlflow

            active = mlflow.active_run()
            assert active is not None
            uri, ids = mlflow.get_tracking_uri(), active.info
            if uri.startswith("http"):
                return redacted(f"{uri}/#/experiments/{ids.experiment_id}/runs/{ids.run_id}")
            return redacted(f"mlflow server --backend-store-uri {uri}")
        case "trackio":
            elsewhere = os.environ.get("TRACKIO_SERVER_URL") or os.environ.get("TRACKIO_SPACE_ID")
            show = f"trackio show --project {os.environ['TRACKIO_PROJECT']}"
            return redacted(elsewhere or f"TRACKIO_DIR={os.environ['TRACKIO_DIR']} {show}")
        case _:
            assert_never(tracker)
