"""Summary of a run's folder: recipe and plan, progress, data and environment.

It is the same of a run that trains, has ended early, or came from another machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunekit.data.sources.rows import shown
from tunekit.inference.inference_model import checkpoints_of
from tunekit.planner.plan import Plan
from tunekit.recipe.schema import Recipe
from tunekit.runs.available_actions import check_readable
from tunekit.runs.checkpoints.complete import manifest_of
from tunekit.runs.fingerprints import MadeWith, fingerprints_of, made_with
from tunekit.runs.run import Run, find_run


@dataclass(frozen=True)
class Story:
    """A run by what its folder says.

    Attributes:
        run: The run.
        state: Its state.
        status: Its status, as last written.
        recipe: What was asked for.
        plan: How it was to be done.
        made_with: What it was made with; None of a run of an earlier version.
    """

    run: Run
    state: str
    status: dict[str, Any]
    recipe: Recipe
    plan: Plan
    made_with: MadeWith | None

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.run.name

    @property
    def step_words(self) -> str:
        """Progress in steps: `4 of 24`."""
        of = f" of {self.status['num_steps']:,}" if self.status["num_steps"] else ""
        return f"{self.status['step']:,}{of}"

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the facts about model and data."""
        recipe, plan = self.recipe, self.plan
        if plan.origin is not None:
            yield "Starts from", plan.origin.chain
        yield "Model", f"{plan.base.path}, {plan.num_params:,} parameters"
        yield "Trained", f"{recipe.adapter.type}, {plan.num_trainable_params:,} parameters"
        yield "Method", recipe.method.type
        rows = ", ".join(shown(source.path) for source in recipe.data.sources)
        tokens = f", {plan.data.num_train_tokens:,} tokens" if plan.data.num_train_tokens else ""
        yield "Training data", f"{rows}: {plan.data.num_train:,} sequences{tokens}"
        if plan.data.num_eval:
            yield "Evaluation data", f"{plan.data.num_eval:,} sequences"
        if plan.schedule is not None:
            yield "Steps", f"{plan.schedule.num_steps:,}, {recipe.train.global_batch_size:,} sequences each"
        yield "Devices", f"{plan.devices_words}; {plan.layout.name}"
        yield "Started", datetime.fromtimestamp(self.status["started"], UTC).strftime("%Y-%m-%d %H:%M UTC")

    def environment(self) -> Iterator[tuple[str, str]]:
        """Yield the facts about the environment."""
        plan = self.plan
        yield "Host", f"{self.status['host']}, {plan.devices_words}"
        weights = ", with float32 weights" if plan.autocast else ""
        yield "Precision", f"{plan.dtype}{weights}; {plan.attn_implementation}"
        yield "Kernels", plan.kernels
        versions = self._versions()
        if versions:
            yield "Versions", versions
        if self.made_with is not None and self.made_with.commit is not None:
            changed = ", modified" if self.made_with.commit.endswith("+") else ""
            yield "Commit", f"tunekit {self.made_with.commit.removesuffix('+')}{changed}"
        if plan.environment:
            yield "Variables", " ".join(f"{name}={value}" for name, value in plan.environment.items())

    def _versions(self) -> str:
        if self.made_with is not None:
            return self.made_with.words()
        steps = checkpoints_of(self.run)
        if not steps:
            return ""
        versions = manifest_of(self.run.path / "checkpoints" / f"checkpoint-{steps[-1]}").versions
        return ", ".join(f"{name} {version}" for name, version in versions.items())

    def digests(self) -> dict[str, str]:
        """Return one digest for all files of each kind of input, such as `data.train` and `rows`."""
        digests_by_kind: dict[str, list[str]] = {}
        for fingerprint in fingerprints_of(self.run):
            what = fingerprint.path if fingerprint.what == "rows" else fingerprint.what
            digests_by_kind.setdefault(what, []).append(fingerprint.digest)
        return {what: "+".join(digests) for what, digests in digests_by_kind.items()}


def story_of(run: Run | str | Path) -> Story:
    """Summarize a run's folder.

    Args:
        run: The run, its folder, or its name in `runs/`.

    Raises:
        RunError: There is no such run, or a file of it is missing or damaged.
    """
    run_found = run if isinstance(run, Run) else find_run(str(run))
    check_readable(run_found)
    return Story(run_found, run_found.state, run_found.status(), run_found.recipe, run_found.plan, made_with(run_found))
