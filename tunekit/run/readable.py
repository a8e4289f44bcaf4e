"""Whether the small files of a run can be read, before anything expensive relies on them."""

from yaml import YAMLError

from tunekit.errors import RunError
from tunekit.run.run import Run


def check_readable(run: Run) -> None:
    """See that status, recipe and plan of a run can be read.

    Raises:
        RunError: One of them is gone or damaged.
    """
    name = "status.json"
    try:
        run.status()["phase"]
        name = "recipe.yaml"
        (run.path / name).read_bytes()
        name = "plan.yaml"
        _ = run.plan
    except OSError as error:
        raise RunError(
            f"{run.path / name} cannot be read: {error.strerror}", hint="the run's folder is damaged"
        ) from error
    except (YAMLError, ValueError, TypeError, KeyError) as error:
        why = str(error).strip().replace("\n", " ")
        raise RunError(f"{run.path / name} is damaged: {why[:200]}", hint="put it back from a copy") from error
