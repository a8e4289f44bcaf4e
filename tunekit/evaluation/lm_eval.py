"""Tasks of lm-evaluation-harness: known by name before any model is loaded, and computed by it alone.

What it computes is taken as it is, with its standard errors. Where its figure is the mean of what it noted of each
document, the difference of two models is paired, document by document.
"""

import contextlib
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.errors import DataError, DependencyError
from tunekit.evaluation.bootstrap import normal
from tunekit.evaluation.losses import Told
from tunekit.inference.inference_model import Loaded
from tunekit.recipe.reading.phrases import near
from tunekit.runs.evaluation_result import Estimate, Score, sliced

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

_SEEDS = {"random_seed": 0, "numpy_random_seed": 1234, "torch_random_seed": 1234, "fewshot_random_seed": 1234}
"""lm-evaluation-harness's own."""


@dataclass(frozen=True)
class Figured:
    """A figure of a task, as lm-evaluation-harness has it.

    Attributes:
        value: The figure.
        error: Its standard error; None where none is known.
        higher_is_better: Whether more of it is better.
        num_rows: Documents.
        each: Of each document, where the figure is their mean; else None.
    """

    value: float
    error: float | None
    higher_is_better: bool | None
    num_rows: int
    each: tuple[float, ...] | None


@dataclass(frozen=True)
class Harness:
    """Tasks.

    Attributes:
        tasks: Their names, or the paths of their YAML files.
        manager: What knows them.
        num_fewshot: Examples before each question; None as the task has it.
        limit: Documents of each task, at most.
        chat: Whether questions go through the chat template.
        batch_size: Documents that are computed at once.
    """

    tasks: tuple[str, ...]
    manager: "TaskManager"
    num_fewshot: int | None
    limit: int | None
    chat: bool
    batch_size: int
    needs_before: bool = False

    @property
    def of(self) -> str:
        """The tasks."""
        return ", ".join(self.tasks)

    def measure(self, loaded: Loaded, tell: Told) -> dict[tuple[str, str], Figured]:
        """Return the harness's results for a model, by task and metric."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        with _quiet_processes():
            results: dict[str, Any] = simple_evaluate(
                model=HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=self.batch_size),
                tasks=list(self.tasks),
                task_manager=self.manager,
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                apply_chat_template=self.chat,
                log_samples=True,
                **_SEEDS,
            )
        tell(len(self.tasks), len(self.tasks))
        return {
            (task, metric): _figured(results, task, metric)
            for task, values in results["results"].items()
            for metric, value in values.items()
            if isinstance(value, int | float) and "," in metric and "_stderr," not in metric
        }

    def scores(
        self, after: dict[tuple[str, str], Figured], before: dict[tuple[str, str], Figured] | None
    ) -> list[Score]:
        """Every figure of every task, with the intervals of the harness's standard errors."""
        return [
            _score(sliced(task, self.limit), metric, ours, None if before is None else before[task, metric])
            for (task, metric), ours in after.items()
        ]


@contextlib.contextmanager
def _quiet_processes() -> Iterator[None]:
    """Within it, processes that are started say nothing: the harness asks git for a commit, which may not be there."""
    descriptor = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(descriptor, 2)
            os.close(descriptor)


def _figured(found: dict[str, Any], task: str, metric: str) -> Figured:
    name, _, filtered = metric.partition(",")
    value, error = found["results"][task][metric], found["results"][task].get(f"{name}_stderr,{filtered}")
    noted = [
        sample[name]
        for sample in found.get("samples", {}).get(task, ())
        if sample.get("filter") == filtered and isinstance(sample.get(name), int | float)
    ]
    is_mean = len(noted) > 1 and math.isclose(statistics.fmean(noted), value, rel_tol=1e-9, abs_tol=1e-12)
    counted = found.get("n-samples", {}).get(task, {}).get("effective")
    return Figured(
        value=float(value),
        error=error if isinstance(error, int | float) else None,
        higher_is_better=found.get("higher_is_better", {}).get(task, {}).get(name),
        num_rows=int(counted if counted is not None else len(noted)),
        each=tuple(map(float, noted)) if is_mean else None,
    )


def _score(task: str, metric: str, ours: Figured, theirs: Figured | None) -> Score:
    name, _, filtered = metric.partition(",")
    gap, interval = None, "normal"
    if theirs is not None:
        gap = Estimate(ours.value - theirs.value)
        if ours.each is not None and theirs.each is not None and len(ours.each) == len(theirs.each):
            apart = [before - other for before, other in zip(ours.each, theirs.each, strict=True)]
            gap = normal(gap.value, statistics.stdev(apart) / math.sqrt(len(apart)))
        elif ours.error is not None and theirs.error is not None:
            gap, interval = normal(gap.value, math.hypot(ours.error, theirs.error)), "normal; difference: unpaired"
    return Score(
        name=metric if filtered != "none" else name,
        words=name if filtered == "none" else f"{name} ({filtered})",
        digits=".1%" if name.startswith(("acc", "exact_match")) else ".4g",
        of=task,
        num_rows=ours.num_rows,
        higher_is_better=ours.higher_is_better,
        interval=interval,
        after=normal(ours.value, ours.error),
        before=None if theirs is None else normal(theirs.value, theirs.error),
        difference=gap,
    )


def find_tasks(tasks: Sequence[str], include_path: str | Path | None) -> "TaskManager":
    """Return a manager of tasks by name, with their documents loaded.

    Args:
        tasks: Names of tasks, groups or tags, or paths of YAML files.
        include_path: Folder with YAML files of more tasks.

    Raises:
        DependencyError: lm-evaluation-harness is not installed.
        DataError: There is no such task, or its documents are not available.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        problem = "tasks need lm-evaluation-harness"
        raise DependencyError(problem, hint="install it with: pip install 'tunekit[eval]'") from error
    if include_path is not None and not any(Path(include_path).rglob("*.yaml")):
        raise DataError(f"{include_path} has no YAML task files", hint="pass the folder that has them")
    # Its own thousands of tasks take seconds to be listed, and are only where they are asked for.
    own = TaskManager(include_path=None if include_path is None else str(include_path), include_defaults=False)
    all_known = all(_is_known(task, own) for task in tasks)
    manager = own if all_known else TaskManager(include_path=own.include_path)
    for task in tasks:
        if not _is_known(task, manager):
            suggestion = near(task, manager.all_tasks)
            hint = f"did you mean {suggestion!r}?" if suggestion else "`lm-eval ls tasks` lists the built-in ones"
            raise DataError(f"no task {task!r}", hint=hint)
    try:
        manager.load(list(tasks))
    except (OSError, ValueError, KeyError, TypeError, ModuleNotFoundError, RuntimeError) as error:
        message = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        problem = f"tasks {', '.join(tasks)}: cannot be loaded: {message[:200]}"
        raise DataError(problem, hint="check access to the Hub, and to the files named in their YAML") from error
    return manager


def _is_known(task: str, manager: "TaskManager") -> bool:
    return task in manager.task_index or (task.endswith((".yaml", ".yml")) and Path(task).is_file())
