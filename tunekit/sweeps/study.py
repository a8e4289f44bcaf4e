"""Combinations that Optuna chooses: each from the results of those before; runs that fall behind are pruned.

The combinations and their runs are the record, and the study in `study.db` a copy of those that have ended, for Optuna
and its dashboard. The next sample depends on them and on the seed, not on whether the sweep was stopped in between.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tunekit.errors import DependencyError
from tunekit.recipe.reading.parse import to_inline_yaml
from tunekit.runs.run import Run
from tunekit.sweeps.folder import FINISHED, PRUNED, Outcome, Sweep
from tunekit.sweeps.values import Axis, Changes, Span, words_of

if TYPE_CHECKING:
    import optuna

STUDY = "study.db"

NUMBER = "number"
"""Attribute of a trial of the study: its number in the sweep."""

FIRST_SHARE = 3
"""One of so many combinations is drawn by chance, before what they came to counts; Optuna's own ten at most."""

MAX_DRAWS = 50
"""Draws until one is another combination than those before."""


def check_installed() -> None:
    """Refuse to go on without Optuna.

    Raises:
        DependencyError: It is not installed.
    """
    if find_spec("optuna") is None:
        raise DependencyError("--optuna needs Optuna", hint="install it with: pip install 'tunekit[sweep]'")


class Study:
    """Optuna's study of a sweep.

    Args:
        sweep: The sweep.
    """

    def __init__(self, sweep: Sweep) -> None:
        import optuna

        check_installed()
        self._sweep, self._spec = sweep, sweep.spec
        greater = self._spec.measure.greater_is_better
        self._direction = optuna.study.StudyDirection.MAXIMIZE if greater else optuna.study.StudyDirection.MINIMIZE
        self._distributions = {key: _distribution(axis) for key, axis in self._spec.axes.items()}
        with _quiet():
            self._study = optuna.create_study(
                storage=f"sqlite:///{sweep.path.absolute() / STUDY}",
                study_name=sweep.name,
                direction=self._direction,
                load_if_exists=True,
            )

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """Take in those that have ended, as far as that was not done."""
        import optuna

        reported = {trial.user_attrs[NUMBER] for trial in self._study.get_trials(deepcopy=False)}
        states = {FINISHED: optuna.trial.TrialState.COMPLETE, PRUNED: optuna.trial.TrialState.PRUNED}
        for outcome in outcomes:
            if outcome.trial.number in reported or outcome.state not in (*states, "failed"):
                continue
            state = states.get(outcome.state, optuna.trial.TrialState.FAIL)
            if outcome.value is None:
                state = optuna.trial.TrialState.FAIL
            self._study.add_trial(self._frozen(outcome, state))

    def ask(self, outcomes: Sequence[Outcome]) -> Changes:
        """The next combination, after those that there are."""
        import optuna

        self.tell(outcomes)
        number = len(outcomes) + 1
        going = [outcome for outcome in outcomes if outcome.state not in (FINISHED, PRUNED, "failed")]
        tried = {words_of(outcome.trial.changes) for outcome in outcomes}
        with _quiet():
            for draw in range(MAX_DRAWS):
                sampler = optuna.samplers.TPESampler(
                    seed=self._spec.seed + MAX_DRAWS * number + draw,
                    n_startup_trials=min(10, -(-self._spec.num_runs // FIRST_SHARE)),
                    constant_liar=True,
                )
                study = optuna.create_study(direction=self._direction, sampler=sampler)
                study.add_trials(self._study.get_trials(deepcopy=False))
                study.add_trials([self._frozen(outcome, optuna.trial.TrialState.RUNNING) for outcome in going])
                drawn = self._changes(study.ask(self._distributions).params)
                if words_of(drawn) not in tried:
                    break
        return drawn

    def falls_behind(self, one: Outcome) -> bool:
        """Return whether the evaluations of a running run are worse than the median of others at the same step."""
        import optuna

        if not self._spec.measure.is_held_out or one.run is None:
            return False
        self.tell(self._sweep.outcomes())
        # The first evaluation is before any training.
        pruner = optuna.pruners.MedianPruner(n_warmup_steps=1)
        return pruner.prune(self._study, self._frozen(one, optuna.trial.TrialState.RUNNING))

    def _frozen(self, one: Outcome, state: "optuna.trial.TrialState") -> "optuna.trial.FrozenTrial":
        import optuna

        is_complete = state == optuna.trial.TrialState.COMPLETE
        return optuna.trial.create_trial(
            state=state,
            value=one.value if is_complete else None,
            params=self._params(one.trial.changes),
            distributions=self._distributions,
            user_attrs={NUMBER: one.trial.number, "run": str(self._sweep.run_path(one.trial))},
            intermediate_values=self._reports(one.run),
        )

    def _reports(self, run: Run | None) -> dict[int, float]:
        """Return the evaluations of a run, by step."""
        measure = self._spec.measure
        return dict(measure.points(run.events())) if run is not None and measure.is_held_out else {}

    def _params(self, changes: Changes) -> dict[str, Any]:
        return {
            key: changes[key] if isinstance(axis, Span) else to_inline_yaml(changes[key])
            for key, axis in self._spec.axes.items()
        }

    def _changes(self, params: Mapping[str, Any]) -> Changes:
        return {
            key: axis.rounded(params[key])
            if isinstance(axis, Span)
            else next(value for value in axis if to_inline_yaml(value) == params[key])
            for key, axis in self._spec.axes.items()
        }


def _distribution(axis: Axis) -> "optuna.distributions.BaseDistribution":
    """An axis in Optuna's words; the values of a list are choices by how they are written."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(axis, Span):
        return CategoricalDistribution([to_inline_yaml(value) for value in axis])
    if axis.is_whole:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(float(axis.low), float(axis.high), log=axis.log)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within it, Optuna tells of nothing that is no warning."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
