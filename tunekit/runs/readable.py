"""Check that the small files of a run can be read, before anything expensive relies on them."""

from tunekit.errors import RunError
from tunekit.runs.run import Run
from tunekit.runs.small_files import read_text


def check_readable(run: Run) -> None:
    """See that status, recipe and plan of a run can be read.

    Raises:
        RunError: One of them is gone or damaged.
    """
    name = "status.json"
    try:
        run.status()
        name = "recipe.yaml"
        read_text(run.path / name)
        name = "plan.yaml"
        _ = run.plan
    except OSError as error:
        raise RunError(
            f"{run.path / name} cannot be read: {error.strerror}", hint="the run's folder is damaged"
        ) from error
