"""The commands in which a model answers others than a person: many prompts of a file, and programs."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tunekit.errors import TunekitError

if TYPE_CHECKING:
    from rich.console import Console

    from tunekit.inference.generate import Generated

ModelArgument = Annotated[
    str, typer.Argument(help="A run's name or folder; or a model's folder or name on the hub.", metavar="RUN|MODEL")
]
CheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint", metavar="STEP", help="The checkpoint of this step, not the result.")
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where the model is; auto: a GPU if there is one.")
]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Type of its weights; auto: as it was trained, or as it is stored."),
]

BackendOption = Annotated[
    Literal["auto", "transformers", "vllm"],
    typer.Option("--backend", help="What generates; auto: vLLM where it is installed and takes the model."),
]


def generate(
    model: ModelArgument,
    prompts: Annotated[
        Path, typer.Option("--prompts", help="Rows with messages, prompt, instruction, conversations or text.")
    ],
    out: Annotated[Path, typer.Option("--out", help="File to write: the rows with their answers, as JSON lines.")],
    checkpoint: CheckpointOption = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System prompt of the conversations that have none.")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="How freely it answers; 0: always the likeliest token.", min=0)
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Share of the probability that is drawn from.", max=1)] = 1.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Longest answer, in tokens.", min=1)] = 256,
    num_samples: Annotated[int, typer.Option("--num-samples", help="Answers to each prompt.", min=1)] = 1,
    seed: Annotated[int | None, typer.Option("--seed", help="For the draws.")] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Answers given at once; halved where memory runs out.", min=1)
    ] = 16,
    column: Annotated[
        str | None, typer.Option("--column", help="Name of the column of answers, instead of answer or answers.")
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    backend: BackendOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Answer the prompts of a file with what a run made, or with any model."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tunekit.display.console import make_console
    from tunekit.inference import generate as generating
    from tunekit.redact import lasting
    from tunekit.runs.events import Event

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(file=lasting(sys.stderr)),
        transient=True,
        disable=not sys.stderr.isatty(),
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task("reading the prompts", total=None)

    def show(event: Event) -> None:
        if event["phase"] == "loading":
            bar.update(task, description=f"loading {event['name']}")
        elif event["phase"] == "answers":
            bar.update(task, description="answers", completed=event["done"], total=event["total"])

    try:
        with bar:
            result = generating.generate(
                model,
                prompts,
                out,
                checkpoint=checkpoint,
                system=system,
                temperature=temperature,
                top_p=top_p,
                max_new_tokens=max_new_tokens,
                num_samples=num_samples,
                seed=seed,
                batch_size=batch_size,
                column=column,
                device=device,
                dtype=dtype,
                backend=backend,
                on_event=show,
            )
    except KeyboardInterrupt:
        part = out.with_name(out.name + ".part")
        print(f"stopped; {part} holds what was answered" if part.exists() else "stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False))
        return
    _show(result, make_console())


def _show(done: "Generated", console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    ended = done.num_answers - done.num_cut
    rate = done.num_tokens / done.seconds if done.seconds > 0 else 0.0
    for name, value in (
        ("answered", f"{done.num_prompts:,} prompts with {done.num_answers:,} answers, by {done.name}"),
        ("to", done.out),
        ("ended", f"{ended:,} by themselves, {done.num_cut:,} at the longest length"),
        ("speed", f"{done.num_tokens:,} tokens in {done.seconds:.1f} s, {rate:,.0f} tokens/s on {done.device}"),
    ):
        table.add_row(name, Text(value))
    console.print(table)


def serve(
    model: ModelArgument,
    checkpoint: CheckpointOption = None,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen at. Any but this machine's own needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="A file that holds the key of clients; TUNEKIT_API_KEY may hold it too."),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    backend: BackendOption = "transformers",
) -> None:
    """Serve what a run made, or any model, to OpenAI's clients. Ctrl-C ends it."""
    from tunekit.inference import serve as serving
    from tunekit.runs.events import Event

    key = os.environ.get(serving.KEY_VARIABLE) or None
    if api_key_file is not None:
        key = _key_in(api_key_file)

    def show(event: Event) -> None:
        if event["phase"] == "loading":
            print(f"loading {event['name']}", flush=True)
            return
        url, name = event["url"], event["name"]
        body: dict[str, object] = {"prompt": "Once upon a time"}
        if event["path"].endswith("chat/completions"):
            body = {"messages": [{"role": "user", "content": "Hello"}]}
        request = json.dumps({"model": name, **body, "temperature": 0}, ensure_ascii=False)
        header = "" if key is None else f' -H "Authorization: Bearer ${serving.KEY_VARIABLE}"'
        print(f"{url}/v1 serves {name} on {event['device']}; Ctrl-C ends it\n")
        print(f"curl {url}{event['path']} -H 'Content-Type: application/json'{header} \\\n  -d '{request}'", flush=True)

    serving.serve(
        model,
        checkpoint=checkpoint,
        host=host,
        port=port,
        api_key=key,
        device=device,
        dtype=dtype,
        backend=backend,
        on_event=show,
    )


def _key_in(file: Path) -> str:
    """The key that a file holds.

    Raises:
        TunekitError: It cannot be read, or holds none.
    """
    hint = "name a text file that holds nothing but the key"
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TunekitError(f"--api-key-file {file}: it cannot be read: {error}", hint=hint) from error
    if not key:
        raise TunekitError(f"--api-key-file {file}: there is nothing in it", hint=hint)
    return key
