"""What happens in a run, one JSON line an event, written as it happens and read while it grows.

Every event has `event` (its kind), `time` (seconds since the epoch) and the fields of its kind:

- `phase`: `phase`, one of PHASES
- `engine`: what trains, as it was found when training began (see `tunekit.run.verify`)
- `log`: `step`, `loss`, `learning_rate`, `grad_norm`, `epoch`, `num_tokens`, `tokens_per_second`
- `eval`: `step`, `eval_loss` and the method's own measures
- `sample`: `when` (`before` or `after`), `prompt`, `answer`
- `checkpoint`: `step`, `path`
- `restart`: `attempt`, `step` of the checkpoint that is gone on from (0: from the beginning), `reason`
- `resume`: `step`, `path` of the checkpoint, and `skipped`, newer ones with what is wrong with them
- `warning`: `message`
- `result`: the summary of a finished run; memory as planned and as used at the peak, in all and of tensors alone, and
  `held_bytes`, what weights, adapters, gradients and optimizer states took in the first step
- `error`: `message`

A step is told of twice where a run went on from a checkpoint before it: the later word counts.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], None]

PHASES = ("queued", "starting", "loading", "training", "saving", "finished", "failed", "interrupted")
"""What a run can be at: `queued` where a cluster is to start it, at first or again; the last three are final."""

FINAL_PHASES = PHASES[-3:]


class EventLog:
    """Appends events to a file and hands each to a listener.

    Args:
        path: The file, `events.jsonl` of a run folder.
        listener: Called with each event after it is written.
    """

    def __init__(self, path: Path, listener: Listener | None = None) -> None:
        self.path = path
        self.listener = listener

    def write(self, event: str, **fields: Any) -> None:
        """Write one event. Numbers that JSON has no word for (NaN, infinities) are written as text."""
        entry: Event = {"event": event, "time": round(time.time(), 3), **fields}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({key: _plain(value) for key, value in entry.items()}, ensure_ascii=False) + "\n")
        if self.listener is not None:
            self.listener(entry)


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Events written since a byte offset, and the offset to read on from. A line still being written is left."""
    if not path.exists():
        return [], offset
    with path.open("rb") as stream:
        stream.seek(offset)
        whole, newline, _ = stream.read().rpartition(b"\n")
    events = [json.loads(line) for line in whole.splitlines()]
    return events, offset + len(whole) + len(newline)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
