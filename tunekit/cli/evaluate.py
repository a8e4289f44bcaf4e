"""The command that evaluates: what a model scores, beside what it scored before it was trained."""

from pathlib import Path
from typing import Annotated

from typer import Option

from tunekit.cli import options as cli


def evaluate(
    model: cli.ModelArgument,
    data: Annotated[
        str | None, Option(metavar="FILE", help="Rows to evaluate on. Default: the run's held-out rows.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Scoring function: a built-in one or module:function, such as exact_match.",
        ),
    ] = None,
    tasks: Annotated[
        str | None, Option(metavar="TASK,TASK", help="lm-evaluation-harness tasks, such as gsm8k,arc_easy.")
    ] = None,
    include_path: Annotated[
        Path | None, Option(metavar="DIR", help="Folder with YAML files of additional tasks.")
    ] = None,
    checkpoint: cli.CheckpointOption = None,
    before: Annotated[bool, Option("--before/--no-before", help="Also evaluate the model before training.")] = True,
    limit: Annotated[int | None, Option(metavar="N", help="Maximum number of rows, from the first.", min=1)] = None,
    num_fewshot: Annotated[
        int | None, Option(metavar="N", help="Few-shot examples per question of a task.", min=0)
    ] = None,
    apply_chat_template: Annotated[
        bool, Option("--apply-chat-template", help="Apply the chat template to task questions.")
    ] = False,
    max_new_tokens: Annotated[
        int | None, Option(metavar="N", help="Maximum new tokens. Default: as in training, or 256.", min=1)
    ] = None,
    temperature: cli.TemperatureOption = 0.0,
    batch_size: Annotated[int, Option(metavar="N", help="Prompts per batch.", min=1)] = 16,
    seed: Annotated[int, Option(metavar="N", help="Random seed for sampling.")] = 0,
    device: cli.DeviceOption = "auto",
    dtype: Annotated[
        cli.DtypeName, Option(metavar="TYPE", help="auto, float32, bfloat16 or float16; auto: as in training.")
    ] = "auto",
    as_json: Annotated[bool, Option("--json", help="Print all metrics as JSON.")] = False,
) -> None:
    """Evaluate a model on held-out rows, rewards or tasks.

    Metrics are shown before and after training, with confidence intervals.
    """
    options = cli.passed_on(locals(), "metric", "tasks", "as_json")
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    from tunekit.display.console import make_console, make_error_console
    from tunekit.display.evaluation import evaluation_view
    from tunekit.evaluation import evaluate as evaluating
    from tunekit.runs.events import Event

    columns = (TextColumn("{task.description}", markup=False), MofNCompleteColumn(), BarColumn(bar_width=None))
    console = make_error_console()
    with Bar(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)

        def show(event: Event) -> None:
            words = f"{event['of']}, {event['side']} training"
            bar.update(task, description=words, completed=event["done"], total=event["total"])

        evaluation = evaluating.evaluate(
            **options,
            metrics=metric or (),
            tasks=[name.strip() for name in tasks.split(",") if name.strip()] if tasks else (),
            on_event=show,
        )
    if as_json:
        cli.print_json(evaluation.to_dict())
        return
    make_console().print(evaluation_view(evaluation))
