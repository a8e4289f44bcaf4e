"""Output section of recipes: where a run is written, and which trackers get its figures."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tunekit.recipe.sections.section import EXPANDS_ENV, Section

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What a run's name may look like: it becomes a folder's name on every system."""

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""What shows figures of many runs: TensorBoard, Weights & Biases, MLflow or trackio."""


class OutputSection(Section):
    """What is written, and where."""

    dir: Annotated[str | None, Field(min_length=1, json_schema_extra=EXPANDS_ENV)] = None
    """Run folder, new or empty. Left out: `runs/<name>-<time>`."""

    name: Annotated[str | None, Field(pattern=NAME_PATTERN, max_length=100)] = None
    """Name of the run, used for its folder. Left out: the name of the recipe file."""

    sample_prompts: list[str] | None = None
    """Prompts answered before and after training. Left out: the first three prompts of the evaluation rows, or of
    the training rows. An empty list: none."""

    report_to: Annotated[
        list[Tracker],
        BeforeValidator(
            lambda given: [given] if isinstance(given, str) else given,
            json_schema_input_type=Tracker | list[Tracker],
        ),
    ] = []
    """Trackers that the run's figures are handed to as it goes, with the recipe as their configuration; one name or a
    list. They come with `pip install 'tunekit[tracking]'`. The run has its own name there. The project is what the
    tracker's own variable says (`WANDB_PROJECT`, `MLFLOW_EXPERIMENT_NAME`, `TRACKIO_PROJECT`), else `tunekit`. Where
    nothing names a server (`MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`; wandb has one unless `WANDB_MODE=offline`), all
    stays in the folder `trackers` of the run. A tracker that fails while the run trains neither ends it nor delays it:
    the run folder is the record."""
