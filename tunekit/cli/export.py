"""The commands for what comes after a run: taking its model elsewhere, talking with it, and telling of it."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tunekit.errors import TunekitError, writing

if TYPE_CHECKING:
    from rich.console import Console

    from tunekit.exporting.export import Export
    from tunekit.inference.chat import Talk

RunArgument = Annotated[str, typer.Argument(help="A run's name, the beginning of it, or its folder.", metavar="RUN")]
CheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint", metavar="STEP", help="The checkpoint of this step, not the result.")
]


def export(
    run: RunArgument,
    dest: Annotated[
        Path | None, typer.Argument(help="A new folder; left out: export/ in the run's own.", metavar="DEST")
    ] = None,
    merged: Annotated[bool, typer.Option("--merged", help="Whole weights; the adapter becomes part of them.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone.")] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Type of whole weights; auto: that of the base model."),
    ] = "auto",
    checkpoint: CheckpointOption = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Largest file of whole weights.", metavar="SIZE")
    ] = "5GB",
    gguf: Annotated[
        Literal["f16", "bf16", "q8_0"] | None,
        typer.Option("--gguf", help="A GGUF file too; needs llama.cpp's converter (LLAMA_CPP or PATH)."),
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", help="Send it to this repository of the hub.", metavar="OWNER/NAME")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Only its owners see the new repository.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace what the repository holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was exported as JSON.")] = False,
) -> None:
    """Write a run's model as a folder that others load, and check by loading it that it answers alike."""
    from tunekit.display.console import make_console
    from tunekit.exporting import export as exporting

    if merged and adapter:
        raise TunekitError("--merged and --adapter are both given", hint="give one of them")
    console = make_console(outlives_readers=True)
    words = {
        "loading": "loading the model",
        "writing": "writing it",
        "checking": "checking it in a process of its own",
        "converting": "converting it to GGUF",
        "pushing": f"sending it to {push}",
    }
    kind: Literal["auto", "adapter", "merged"] = "merged" if merged else "adapter" if adapter else "auto"
    exported = exporting.export(
        run,
        dest,
        kind=kind,
        dtype=dtype,
        checkpoint=checkpoint,
        max_shard_size=max_shard_size,
        gguf=gguf,
        push=push,
        private=private,
        replace=replace,
        on_event=lambda event: (
            None if as_json or event["phase"] not in words else console.print(words[event["phase"]], style="dim")
        ),
    )
    if as_json:
        print(json.dumps(exported.to_dict(), indent=2, ensure_ascii=False))
        return
    _show(exported, console)


def _show(done: "Export", console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    check = done.check
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = [
        ("exported", f"{done.kind}, {done.dtype}, {done.total_bytes:,} bytes"),
        ("to", done.folder),
        *([] if done.pushed is None else [("on the hub", done.pushed)]),
        ("logits", f"differ by {check.logit_error:.2g} of their spread; {check.tolerance:.2g} is allowed"),
    ]
    if check.adapter_change is not None:
        rows.append(("", f"the adapter changes them by {check.adapter_change:.2g}"))
    if check.num_tokens:
        rows.append(("tokens", f"{check.num_same_tokens} of {check.num_tokens} greedy ones are the same"))
    rows.append(("template", f"{check.num_conversations} conversations are rendered alike"))
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(table)
    for note in done.notes:
        console.print(f"note: {note}", markup=False)


def report(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; left out: report.html in the run's folder.")
    ] = None,
) -> None:
    """Write what is known of a run as one page that needs nothing else."""
    from tunekit.reporting import report as reporting
    from tunekit.runs.run import find_run

    existing = find_run(run)
    to = out if out is not None else existing.path / "report.html"
    page = reporting.report(existing)
    with writing(to):
        to.write_text(page, encoding="utf-8")
    print(to)


def chat(
    model: Annotated[
        str, typer.Argument(help="A run's name or folder; or a model's folder or name on the hub.", metavar="RUN|MODEL")
    ],
    compare: Annotated[bool, typer.Option("--compare", help="What it was before training answers too.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    checkpoint: CheckpointOption = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="How freely it answers; 0: always the likeliest token.", min=0)
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Share of the probability that is drawn from.", max=1)] = 1.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Longest answer, in tokens.", min=1)] = 256,
    seed: Annotated[int | None, typer.Option("--seed", help="For the draws.")] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option("--device", help="Where the model is; auto: a GPU if there is one."),
    ] = "auto",
    backend: Annotated[
        Literal["auto", "transformers", "vllm"],
        typer.Option("--backend", help="What generates; auto: vLLM where it is installed and takes the model."),
    ] = "transformers",
) -> None:
    """Talk with what a run made, or with any model. A line is a message; /clear forgets, /exit or Ctrl-D ends."""
    from tunekit.inference import chat as talking

    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print(f"loading {model}", file=sys.stderr)
    with talking.chat(model, checkpoint, compare=compare, device=device, backend=backend) as talk:
        if at_terminal:
            where = f"{talk.device}, {talk.memory_bytes / 2**30:.1f} GiB"
            print(f"{talk.name} on {where}; /clear forgets what was said, Ctrl-D ends", file=sys.stderr)
        first = [] if system is None else [{"role": "system", "content": system}]
        sides = (False, True) if compare else (False,)
        histories = {base: list(first) for base in sides}
        while (line := _line(at_terminal)) is not None:
            if line.strip() in ("", "/clear"):
                histories = {base: list(first) for base in sides} if line.strip() else histories
                continue
            if line.strip() == "/exit":
                return
            for base in sides:
                histories[base].append({"role": "user", "content": line})
                name = "" if not compare else "before: " if base else "after:  "
                words = _answer(
                    talk,
                    histories[base],
                    name,
                    base=base,
                    temperature=temperature,
                    top_p=top_p,
                    max_new_tokens=max_new_tokens,
                    seed=seed,
                )
                histories[base].append({"role": "assistant", "content": words})


def _line(at_terminal: bool) -> str | None:
    """The next line that is typed or piped in; None at the end."""
    try:
        return input("> " if at_terminal else "")
    except (EOFError, KeyboardInterrupt):
        if at_terminal:
            print()
        return None


def _answer(
    talk: "Talk",
    messages: list[dict[str, str]],
    name: str,
    *,
    base: bool,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    seed: int | None,
) -> str:
    """Print an answer as it comes, and return it. Ctrl-C ends it where it is."""
    pieces: list[str] = []
    print(name, end="", flush=True)
    answer = talk.say(
        messages, base=base, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed
    )
    try:
        for piece in answer:
            pieces.append(piece)
            print(_plain(piece), end="", flush=True)
    except KeyboardInterrupt:
        talk.stop()
        pieces += answer
    print()
    return "".join(pieces)


def _plain(text: str) -> str:
    """Remove characters from a model's text that a terminal would take for commands."""
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")
