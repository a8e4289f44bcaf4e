"""The commands for what comes after a run: taking its model elsewhere, and telling of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from typer import Argument, Option

from tunekit.cli import options as cli
from tunekit.errors import TunekitError

if TYPE_CHECKING:
    from rich.console import Console

    from tunekit.exporting.export import Export
    from tunekit.exporting.verify import Kind


def export(
    run: cli.RunArgument,
    dest: Annotated[
        Path | None, Argument(help="New folder. Default: export/ in the run folder.", metavar="DEST")
    ] = None,
    merged: Annotated[bool, Option("--merged", help="Merge the adapter into the weights.")] = False,
    adapter: Annotated[bool, Option("--adapter", help="Export the adapter only.")] = False,
    quantized: Annotated[
        bool, Option("--quantized", help="Quantize the weights as train.qat trained them (torchao).")
    ] = False,
    dtype: Annotated[
        cli.DtypeName,
        Option(metavar="TYPE", help="Merged weights: auto, float32, bfloat16 or float16; auto: as the base model."),
    ] = "auto",
    checkpoint: cli.CheckpointOption = None,
    max_shard_size: Annotated[str, Option(help="Maximum size of a weight file.", metavar="SIZE")] = "5GB",
    gguf: Annotated[
        Literal["f16", "bf16", "q8_0"] | None,
        Option(
            metavar="TYPE",
            help="Also write GGUF as f16, bf16 or q8_0; needs llama.cpp's converter (LLAMA_CPP or PATH).",
        ),
    ] = None,
    push: Annotated[str | None, Option(help="Upload to this Hub repository.", metavar="OWNER/NAME")] = None,
    private: Annotated[bool, Option("--private", help="Make the new repository private.")] = False,
    replace: Annotated[bool, Option("--replace", help="Replace the contents of the repository.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the export report as JSON.")] = False,
) -> None:
    """Export a run's model for other tools and verify it by reloading."""
    options = cli.passed_on(locals(), "merged", "adapter", "quantized", "as_json")
    from tunekit.display.console import make_console
    from tunekit.exporting import export as exporting

    kinds = {"merged": merged, "adapter": adapter, "quantized": quantized}
    chosen = [name for name, is_set in kinds.items() if is_set]
    if len(chosen) > 1:
        raise TunekitError(f"--{chosen[0]} and --{chosen[1]} exclude each other", hint="pass one of them")
    console = make_console(outlives_readers=True)
    words = {
        "loading": "loading the model",
        "writing": "writing the export",
        "checking": "verifying it in a separate process",
        "converting": "converting it to GGUF",
        "pushing": f"uploading it to {push}",
    }
    exported = exporting.export(
        **options,
        kind=cast("Literal['auto'] | Kind", chosen[0] if chosen else "auto"),
        on_event=lambda event: (
            None if as_json or event["phase"] not in words else console.print(words[event["phase"]], style="dim")
        ),
    )
    if as_json:
        cli.print_json(exported.to_dict())
        return
    _show(exported, console)


def _show(done: "Export", console: "Console") -> None:
    check = done.check
    rows = [
        ("exported", f"{done.kind}, {done.dtype}, {done.total_bytes:,} bytes"),
        ("to", done.folder),
        *([] if done.pushed is None else [("on the Hub", done.pushed)]),
        ("logits", f"differ by {check.logit_error:.2g} of their spread; tolerance {check.tolerance:.2g}"),
    ]
    if check.adapter_change is not None:
        rows.append(("", f"the adapter changes them by {check.adapter_change:.2g}"))
    if check.num_tokens:
        rows.append(("tokens", f"{check.num_same_tokens} of {check.num_tokens} greedy tokens match"))
    rows.append(("template", f"{check.num_conversations} conversations render identically"))
    console.print(cli.facts_table(rows))
    for note in done.notes:
        console.print(f"note: {note}")


def report(
    run: cli.RunArgument,
    out: Annotated[Path | None, Option(help="File to write. Default: report.html in the run folder.")] = None,
) -> None:
    """Write a self-contained HTML report of a run."""
    from tunekit.reporting import report as reporting
    from tunekit.runs.run import find_run

    existing = find_run(run)
    to = out if out is not None else existing.path / "report.html"
    cli.write_page(to, reporting.report(existing))
    print(to)
