"""The command that evaluates: what a model scores, beside what it scored before it was trained."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer


def evaluate(
    model: Annotated[
        str, typer.Argument(help="A run's name or folder; or a model's folder or name on the hub.", metavar="RUN|MODEL")
    ],
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Rows to evaluate on; left out: those that the run has set aside."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="What judges answers: exact_match, numeric_match, ..., module:function, or '{type: regex, ...}'.",
        ),
    ] = None,
    tasks: Annotated[str | None, typer.Option("--tasks", metavar="A,B", help="Tasks of lm-evaluation-harness.")] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", metavar="DIR", help="Folder with YAML files of more tasks.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="STEP", help="The checkpoint of this step, not the result.")
    ] = None,
    before: Annotated[bool, typer.Option("--before/--no-before", help="Beside the model before training.")] = True,
    limit: Annotated[int | None, typer.Option("--limit", help="Rows of each, at most; the first ones.", min=1)] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", help="Examples before each question of a task.", min=0)
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Questions of tasks go through the chat template.")
    ] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", help="Longest answer; left out: as in training, or 256.", min=1)
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="How freely it answers; 0: always the likeliest token.", min=0)
    ] = 0.0,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts that are answered at once.", min=1)] = 16,
    seed: Annotated[int, typer.Option("--seed", help="For the draws of answers.")] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option("--device", help="Where the model is; auto: a GPU if there is one."),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Type of its weights; auto: as in training."),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Measure a model on held-out rows, by metrics or on tasks, before and after training, with intervals."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    from tunekit.display.console import make_console
    from tunekit.display.evaluation import evaluation_view
    from tunekit.evaluation import evaluate as evaluating
    from tunekit.redact import lasting
    from tunekit.runs.events import Event

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=None))
    console = Console(file=lasting(sys.stderr))
    with Bar(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)

        def show(event: Event) -> None:
            words = f"{event['of']}, {event['side']} training"
            bar.update(task, description=words, completed=event["done"], total=event["total"])

        evaluation = evaluating.evaluate(
            model,
            checkpoint=checkpoint,
            data=data,
            metrics=metric or (),
            tasks=[name.strip() for name in tasks.split(",") if name.strip()] if tasks else (),
            include_path=include_path,
            before=before,
            limit=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=apply_chat_template,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            batch_size=batch_size,
            seed=seed,
            device=device,
            dtype=dtype,
            on_event=show,
        )
    if as_json:
        print(json.dumps(evaluation.to_dict(), indent=2, ensure_ascii=False))
        return
    make_console().print(evaluation_view(evaluation))
