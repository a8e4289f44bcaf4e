"""The commands in which a model answers: a person, many prompts of a file, and programs."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from tunekit.cli import options as cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunekit.inference.chat import Talk


DtypeOption = Annotated[
    cli.DtypeName, Option(metavar="TYPE", help="auto, float32, bfloat16 or float16; auto: as trained or stored.")
]
BackendOption = Annotated[
    Literal["auto", "transformers", "vllm"],
    Option(metavar="NAME", help="auto, transformers or vllm; auto: vLLM if it is installed and supports the model."),
]
TopPOption = Annotated[float, Option(metavar="X", help="Nucleus sampling: probability mass to sample from.", max=1)]
LengthOption = Annotated[int, Option(metavar="N", help="Maximum new tokens.", min=1)]
SeedOption = Annotated[int | None, Option(metavar="N", help="Random seed.")]


def generate(
    model: cli.ModelArgument,
    prompts: Annotated[
        Path, Option(metavar="FILE", help="Rows with messages, prompt, instruction, conversations or text.")
    ],
    out: Annotated[Path, Option(metavar="FILE", help="Output file: the rows with their answers, as JSON Lines.")],
    checkpoint: cli.CheckpointOption = None,
    system: Annotated[str | None, Option(metavar="TEXT", help="System prompt for conversations without one.")] = None,
    temperature: cli.TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    max_new_tokens: LengthOption = 256,
    num_samples: Annotated[int, Option(metavar="N", help="Answers per prompt.", min=1)] = 1,
    seed: SeedOption = None,
    batch_size: Annotated[int, Option(metavar="N", help="Answers per batch; halved when memory runs out.", min=1)] = 16,
    column: Annotated[str | None, Option(metavar="NAME", help="Output column. Default: answer or answers.")] = None,
    device: cli.DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    backend: BackendOption = "auto",
    as_json: Annotated[bool, Option("--json", help="Print a summary as JSON.")] = False,
) -> None:
    """Answer the prompts of a file with a trained or any other model."""
    options = cli.passed_on(locals(), "model", "as_json")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tunekit.display.console import make_console, make_error_console
    from tunekit.inference import generate as generating
    from tunekit.runs.events import Event

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console, is_hidden = make_error_console(), not sys.stderr.isatty()
    bar = Progress(
        *columns, console=console, transient=True, disable=is_hidden, redirect_stdout=False, redirect_stderr=False
    )
    task = bar.add_task("reading the prompts", total=None)

    def show(event: Event) -> None:
        if event["phase"] == "loading":
            bar.update(task, description=f"loading {event['name']}")
        elif event["phase"] == "answers":
            bar.update(task, description="answers", completed=event["done"], total=event["total"])

    try:
        with bar:
            result = generating.generate(model, **options, on_event=show)
    except KeyboardInterrupt:
        part = out.with_name(out.name + ".part")
        print(f"stopped; answers so far are in {part}" if part.exists() else "stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        cli.print_json(result.to_dict())
        return
    ended = result.num_answers - result.num_cut
    rate = result.num_tokens / result.seconds if result.seconds > 0 else 0.0
    rows = [
        ("answered", f"{result.num_prompts:,} prompts with {result.num_answers:,} answers, by {result.name}"),
        ("to", result.out),
        ("finish reason", f"{ended:,} stop, {result.num_cut:,} length"),
        ("speed", f"{result.num_tokens:,} tokens in {result.seconds:.1f} s, {rate:,.0f} tokens/s on {result.device}"),
    ]
    make_console().print(cli.facts_table(rows))


def serve(
    model: cli.ModelArgument,
    checkpoint: cli.CheckpointOption = None,
    host: Annotated[
        str,
        Option(metavar="HOST", help="Address to listen on. Any but localhost requires an API key."),
    ] = "127.0.0.1",
    port: cli.PortOption = 8000,
    api_key_file: Annotated[
        Path | None, Option(metavar="FILE", help="File with the API key; TUNEKIT_API_KEY works too.")
    ] = None,
    device: cli.DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    backend: BackendOption = "transformers",
) -> None:
    """Serve a trained or any other model over an OpenAI-compatible API."""
    options = cli.passed_on(locals(), "model", "api_key_file")
    from tunekit.inference import serve as serving
    from tunekit.runs.events import Event

    key = os.environ.get(serving.KEY_VARIABLE) or None
    if api_key_file is not None:
        key = cli.secret_in(api_key_file, "--api-key-file", "key")

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
        print(f"{url}/v1 serves {name} on {event['device']}; Ctrl-C stops it\n")
        print(f"curl {url}{event['path']} -H 'Content-Type: application/json'{header} \\\n  -d '{request}'", flush=True)

    serving.serve(model, **options, api_key=key, on_event=show)


def chat(
    model: cli.ModelArgument,
    compare: Annotated[bool, Option("--compare", help="Also show the answers of the model before training.")] = False,
    system: Annotated[str | None, Option(metavar="TEXT", help="System prompt.")] = None,
    checkpoint: cli.CheckpointOption = None,
    temperature: cli.TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    max_new_tokens: LengthOption = 256,
    seed: SeedOption = None,
    device: cli.DeviceOption = "auto",
    backend: BackendOption = "transformers",
) -> None:
    """Chat with a trained or any other model.

    /clear starts over, /image FILE adds an image (/audio, /video), /help lists commands, /exit quits.
    """
    sampling = cli.passed_on(locals(), "model", "compare", "system", "checkpoint", "device", "backend")
    from tunekit.data.media.kinds import KINDS
    from tunekit.inference import chat as talking

    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print(f"loading {model}", file=sys.stderr)
    with talking.chat(model, checkpoint, compare=compare, device=device, backend=backend) as talk:
        kinds = [f"/{kind}" for kind in talk.media]
        commands = f"{'|'.join(kinds)} FILE adds one, " * bool(kinds) + "/clear starts over"
        if at_terminal:
            where = f"{talk.device}, {talk.memory_bytes / 2**30:.1f} GiB"
            print(f"{talk.name} on {where}; {commands}, Ctrl-D quits", file=sys.stderr)
        first = [] if system is None else [{"role": "system", "content": system}]
        sides = (False, True) if compare else (False,)
        histories: dict[bool, list[dict[str, Any]]] = {base: list(first) for base in sides}
        media: list[dict[str, str]] = []
        while (line := _line(at_terminal)) is not None:
            if line.strip() in ("", "/clear"):
                if line.strip():
                    histories, media = {base: list(first) for base in sides}, []
                continue
            if line.split()[0].removeprefix("/") in KINDS and line.startswith("/"):
                media += _medium(talk, line, at_terminal)
                continue
            if line.strip() == "/exit":
                return
            if line.strip() == "/help":
                print(f"{commands}, /exit or Ctrl-D quits", file=sys.stderr)
                continue
            content = [*media, {"type": "text", "text": line}] if media else line
            media = []
            for base in sides:
                histories[base].append({"role": "user", "content": content})
                name = "" if not compare else "before: " if base else "after:  "
                words = _answer(talk, talk.say(histories[base], base=base, **sampling), name)
                histories[base].append({"role": "assistant", "content": words})


def _medium(talk: "Talk", line: str, at_terminal: bool) -> list[dict[str, str]]:
    """The file of a command such as `/image FILE` for the next message; at a terminal nothing where it cannot be had,
    with the reason.
    """
    from tunekit.data.media.kinds import KINDS
    from tunekit.errors import RunError
    from tunekit.inference.chat import media_part

    command, _, name = line.strip().partition(" ")
    kind = next(kind for kind in KINDS if command == f"/{kind}")
    name = name.strip()
    try:
        if not talk.media:
            raise RunError(f"{talk.name} is a text-only model", hint="chat with a vision-language model")
        if kind not in talk.media:
            raise RunError(f"{talk.name} reads no {KINDS[kind].noun}", hint=f"it reads: {', '.join(talk.media)}")
        if not name:
            raise RunError(f"{command} without a file", hint=f"write {command} FILE")
        part = media_part(kind, name)
    except RunError as error:
        if not at_terminal:
            raise
        print(error, file=sys.stderr)
        return []
    if at_terminal:
        print(f"{name} will be sent with your next message", file=sys.stderr)
    return [part]


def _line(at_terminal: bool) -> str | None:
    """The next line that is typed or piped in; None at the end."""
    try:
        return input("> " if at_terminal else "")
    except (EOFError, KeyboardInterrupt):
        if at_terminal:
            print()
        return None


def _answer(talk: "Talk", pieces: "Iterator[str]", name: str) -> str:
    """Print an answer as it comes, and return it. Ctrl-C ends it where it is."""
    answer: list[str] = []
    print(name, end="", flush=True)
    try:
        for piece in pieces:
            answer.append(piece)
            # Without characters that a terminal would take for commands.
            plain = "".join(letter for letter in piece if letter.isprintable() or letter in "\n\t")
            print(plain, end="", flush=True)
    except KeyboardInterrupt:
        talk.stop()
        answer += pieces
    print()
    return "".join(answer)
