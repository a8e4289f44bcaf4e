"""The command line: arguments to verbs, and what comes back to the terminal. The only module that prints and exits.

Exit codes: 0 done, 1 a defect of tunekit (with its traceback), 2 something that the user can mend, 130 interrupted.
"""

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from tunekit.errors import PlanError, TunekitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from tunekit.display import Progress
    from tunekit.planner.facts import Hardware
    from tunekit.planner.plan import Plan
    from tunekit.recipe.schema import Recipe
    from tunekit.run.events import Listener
    from tunekit.run.run import Run


class Commands(TyperGroup):
    """Commands by name; a name may be two words, so that `data cache` stands beside `data RECIPE`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that the arguments begin with, and the other arguments."""
        two_words = " ".join(args[:2])
        if two_words in self.commands:
            return two_words, self.commands[two_words], args[2:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="tunekit",
    cls=Commands,
    help="Fine-tune and align open-weight language models: a short recipe, a plan with reasons, a run you can trust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
recipes_app = typer.Typer(help="List the shipped recipes, or copy one to edit.", invoke_without_command=True)
runs_app = typer.Typer(help="List the runs of this folder, or show one.", invoke_without_command=True)

TRAIN, RECIPES, RUNS = "Train", "Recipes", "Runs and the machine"

RecipeArgument = Annotated[
    str, typer.Argument(help="A recipe file, or the name of a shipped recipe.", metavar="RECIPE")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to the recipe, such as train.max_steps=10.", metavar="KEY=VALUE"),
]
NodesOption = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        metavar="HOST,HOST",
        help="Machines that are reached by ssh and share a disk with this one: host, user@host or host:port.",
    ),
]


def main() -> None:
    """Entry point of the `tunekit` command."""
    try:
        app()
    except TunekitError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


@app.callback()
def _tunekit() -> None:
    pass


@app.command(rich_help_panel=TRAIN)
def train(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Train: plan, run, and say what came out."""
    from tunekit import api

    _watch(lambda on_event: api.train(recipe, overrides or [], on_event=on_event), "the data and the model's files")


@app.command(rich_help_panel=RUNS)
def resume(
    run: Annotated[str, typer.Argument(help="A run's name, the beginning of it, or its folder.")],
    nodes: NodesOption = None,
) -> None:
    """Go on with a run that was interrupted, failed or died, from its last complete checkpoint."""
    from tunekit import api

    _watch(lambda on_event: api.resume(run, nodes=nodes.split(",") if nodes else None, on_event=on_event), "the run")


def _watch(start: "Callable[[Listener | None], object]", what: str) -> None:
    """Show a run as it goes, in the one process that does so.

    Args:
        start: Starts it, with what is to be told of its events.
        what: What is read first, in words.
    """
    from tunekit.display import Progress, make_console
    from tunekit.run.place import place_of

    progress = Progress(make_console()) if place_of().is_main else None
    if progress is not None:
        progress.console.print(f"[dim]reading {what}[/dim]")
    try:
        # What ends this program otherwise is to end a run as Ctrl-C does, from its first moment.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        start(progress)
    except KeyboardInterrupt:
        if progress is not None:
            progress.stop()
            print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    except BaseException:
        if progress is not None:
            progress.stop()
        raise


@app.command(rich_help_panel=TRAIN)
def launch(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nodes: NodesOption = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit it to Slurm.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Train on a cluster of Ray's.")] = False,
    sky: Annotated[bool, typer.Option("--sky", help="Have SkyPilot find nodes in a cloud.")] = False,
    on: Annotated[
        str | None, typer.Option("--on", metavar="MACHINE", help="The nodes, where unlike this one: 2x8xh100.")
    ] = None,
    num_nodes: Annotated[int | None, typer.Option("--num-nodes", help="Nodes; one where left out.", min=1)] = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print what would be submitted, and do not submit it.")
    ] = False,
    address: Annotated[
        str | None, typer.Option("--address", help="Ray: of the cluster. Left out: RAY_ADDRESS, or this machine's.")
    ] = None,
    time: Annotated[str | None, typer.Option("--time", help="Slurm: limit, such as 01:00:00.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm: partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Slurm: account.")] = None,
    sbatch_arg: Annotated[
        list[str] | None, typer.Option("--sbatch-arg", help="Slurm: another option of sbatch, such as --qos=high.")
    ] = None,
) -> None:
    """Train on other machines. But for --sky, the run folder lies on storage that they share."""
    if (nodes is not None) + slurm + ray + sky != 1:
        raise TunekitError("it is to be said where to launch", hint="give one of --nodes, --slurm, --ray and --sky")
    if nodes is not None:
        _launch_hosts(recipe, overrides, nodes.split(","))
    elif slurm:
        _launch_slurm(
            recipe,
            overrides,
            on,
            num_nodes,
            print_only=print_only,
            time=time,
            partition=partition,
            account=account,
            sbatch_args=tuple(sbatch_arg or ()),
        )
    elif ray:
        _launch_ray(recipe, overrides, on, num_nodes, address)
    else:
        _launch_sky(recipe, overrides, on, num_nodes, print_only=print_only)


def _launch_hosts(recipe: str, overrides: list[str] | None, nodes: list[str]) -> None:
    from tunekit import api

    _watch(
        lambda on_event: api.launch(recipe, overrides or [], nodes=nodes, on_event=on_event), "the hosts and the data"
    )


def _launch_slurm(
    recipe: str,
    overrides: list[str] | None,
    on: str | None,
    num_nodes: int | None,
    *,
    print_only: bool,
    **wishes: Any,
) -> None:
    from tunekit.display import make_console
    from tunekit.run.slurm import Wishes, submit, write_script

    run, hardware, _ = _make_run(recipe, overrides, on, num_nodes)
    script = write_script(run, hardware, Wishes(**wishes))
    if print_only:
        print(script.read_text(encoding="utf-8"), end="")
    else:
        make_console().print(f"job {submit(run, script)}; `tunekit runs` shows it")


def _launch_ray(
    recipe: str, overrides: list[str] | None, on: str | None, num_nodes: int | None, address: str | None
) -> None:
    from tunekit.run.ray_train import train_on_ray

    run, _, progress = _make_run(recipe, overrides, on, num_nodes)
    try:
        train_on_ray(run, address, progress)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        progress.stop()


def _launch_sky(
    recipe: str, overrides: list[str] | None, on: str | None, num_nodes: int | None, *, print_only: bool
) -> None:
    from tunekit.display import make_console
    from tunekit.run.sky import launch_task, write_task

    if on is None:
        raise TunekitError("--sky: a cloud has many machines", hint="name one: --on 8xh100")
    run, _, _ = _make_run(recipe, overrides, on, num_nodes)
    task = write_task(run, on)
    if print_only:
        print(task.read_text(encoding="utf-8"), end="")
    else:
        make_console().print(f"started; when it is done, its results are fetched by: {launch_task(run, task)}")


@app.command(rich_help_panel=TRAIN)
def plan(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="MACHINE",
            help="Plan for another machine: h200, 8xh100, 2x8xrtx5090, or a YAML file. Give it again to compare.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUE,VALUE",
            help="Plan with each of these values, such as adapter.type=lora,qlora. Given again: every combination.",
        ),
    ] = None,
    fit: Annotated[
        Literal["length", "batch", "model"] | None,
        typer.Option(
            "--fit", help="Look for the largest that fits: micro-batch, data.max_length, or well-known models."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print recipe and plan as JSON.")] = False,
) -> None:
    """Say how a recipe would run, here or on a machine that is named, and why, without starting it."""
    from tunekit import api, display_plan
    from tunekit.display import make_console
    from tunekit.planner.variants import read_values

    if sweep and fit:
        raise TunekitError("--sweep and --fit are both given", hint="give one of them")
    source, notes = _load(recipe, overrides)
    shown: dict[str, Any]
    drawn: RenderableType
    if sweep or fit:
        variants = api.fit(source, fit, on=on) if fit else api.sweep(source, read_values(sweep or ()), on=on)
        shown, drawn = variants.to_dict(), display_plan.variants_table(variants)
    elif on and len(on) > 1:
        plans = api.compare(source, on=on)
        shown = {"recipe": source.model_dump(mode="json"), "plans": {name: _plain(p) for name, p in plans.items()}}
        drawn = display_plan.comparison_table(plans)
    else:
        resolved = api.plan(source, on=on[0] if on else None)
        shown, drawn = resolved.to_dict(), display_plan.plan_view(resolved)
    if as_json:
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    console = make_console()
    for note in notes:
        console.print(f"note: {note}")
    console.print(drawn)


@app.command(rich_help_panel=TRAIN)
def check(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Check a recipe, its model and its data, without training."""
    from tunekit import api

    source, notes = _load(recipe, overrides)
    for note in [*notes, *api.check(source)]:
        print(f"note: {note}")
    print(f"{recipe}: ok")


@app.command(rich_help_panel=TRAIN)
def data(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[int, typer.Option("--rows", help="Sample rows to show of each split.", min=0)] = 3,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as a page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Look at the data as the model will see it, before any training."""
    from rich.console import Console

    from tunekit import api
    from tunekit.display import Progress, make_console
    from tunekit.display_data import data_report_parts

    source, notes = _load(recipe, overrides)
    console = make_console()
    progress = Progress(Console(stderr=True))
    try:
        report = api.data_report(source, num_samples=rows, on_event=progress)
    finally:
        progress.stop()
    if html is not None:
        _write(html, report.to_html())
    if as_json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return
    if html is not None:
        print(html)
        return
    for note in notes:
        console.print(f"note: {note}")
    console.print(*data_report_parts(report, console), sep="\n")


@app.command("data cache", rich_help_panel=TRAIN)
def data_cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove all of it. Runs keep the rows that they have.")
    ] = False,
) -> None:
    """Show what is kept of prepared rows and fetched files, or remove it.

    A recipe that is called cache is looked at with `tunekit data ./cache`.
    """
    from tunekit.data import cache, remote
    from tunekit.display import make_console
    from tunekit.display_data import cache_table

    if clear:
        print(f"{cache.clear() + remote.clear_downloads():,} bytes freed")
        return
    entries, downloads = cache.list_entries(), remote.list_downloads()
    if not entries and not downloads:
        print(f"nothing is kept in {cache.cache_root().parent}")
        return
    make_console().print(cache_table(entries, downloads))


@app.command(rich_help_panel=RECIPES)
def explain(
    key: Annotated[str | None, typer.Argument(help="A dotted key such as adapter.rank.", metavar="KEY")] = None,
) -> None:
    """Document a field or a section of recipes, or all of them."""
    from tunekit.recipe.explain import explain as describe

    print(describe(key))


@app.command(rich_help_panel=RECIPES)
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from tunekit.recipe.explain import json_schema

    print(json.dumps(json_schema(), indent=2))


@recipes_app.callback()
def _recipes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        from rich.table import Table

        from tunekit.display import make_console
        from tunekit.recipe.library import list_recipes

        table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
        for shipped in list_recipes():
            table.add_row(shipped.name, shipped.description)
        make_console().print(table)


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe.")],
    dest: Annotated[Path | None, typer.Argument(help="File or folder to copy it to.")] = None,
) -> None:
    """Copy a shipped recipe to edit."""
    from tunekit.recipe import library

    print(library.copy_recipe(name, dest))


@runs_app.callback()
def _runs(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        from tunekit.display import make_console, runs_table
        from tunekit.run.run import list_runs

        runs = list_runs()
        if not runs:
            print("no runs here; `tunekit train sft/quickstart` makes one")
            return
        make_console().print(runs_table(runs))


@runs_app.command("show")
def show_run(
    run: Annotated[str, typer.Argument(help="A run's name, the beginning of it, or its folder.")],
    plot: Annotated[Path | None, typer.Option(help="Write the loss curve as a PNG file.")] = None,
) -> None:
    """Show a run with its loss curve."""
    from tunekit.display import make_console, run_report
    from tunekit.run.run import find_run

    found = find_run(run)
    if plot is not None:
        found.plot().savefig(plot, dpi=150)
        print(plot)
        return
    console = make_console()
    console.print(*run_report(found, console.width), sep="\n")


@app.command(rich_help_panel=RUNS)
def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(help="With --network: a recipe, whose plan's ranks exchange data.", metavar="RECIPE"),
    ] = None,
    overrides: OverridesArgument = None,
    network: Annotated[
        bool, typer.Option("--network", help="Measure how fast ranks exchange data, here or on --nodes.")
    ] = False,
    nodes: NodesOption = None,
) -> None:
    """Say what is installed, what the machine has, and what is missing for which feature."""
    from tunekit.display import diagnosis_table, exchange_table, make_console

    if network:
        from tunekit import api

        exchange = api.check_network(recipe, overrides or [], nodes=nodes.split(",") if nodes else None)
        make_console().print(exchange_table(exchange))
        return
    if recipe is not None or nodes is not None:
        raise TunekitError("a recipe and --nodes go with --network", hint="add --network")
    from tunekit.doctor import diagnose

    make_console().print(diagnosis_table(diagnose()))


app.add_typer(recipes_app, name="recipes", rich_help_panel=RECIPES)
app.add_typer(runs_app, name="runs", rich_help_panel=RUNS)


def _load(recipe: str, overrides: list[str] | None) -> tuple["Recipe", list[str]]:
    from tunekit.recipe.load import load_recipe_with_notes

    return load_recipe_with_notes(recipe, overrides or [])


def _make_run(
    recipe: str, overrides: list[str] | None, on: str | None, num_nodes: int | None
) -> "tuple[Run, Hardware, Progress]":
    """A run that is made here and will be started on nodes, these, and what shows it."""
    from rich.console import Console

    from tunekit import api
    from tunekit.display import Progress
    from tunekit.run.cluster import nodes_of, with_all_nodes

    source, notes = _load(recipe, overrides)
    console = Console(stderr=True)
    for note in notes:
        console.print(f"note: {note}")
    hardware, progress = nodes_of(on, num_nodes), Progress(console)
    run = api.make_run(with_all_nodes(source, hardware), hardware=hardware, on_event=progress)
    return run, hardware, progress


def _plain(plan: "Plan | PlanError") -> dict[str, Any]:
    """A plan as plain data, or why there is none."""
    return {"refused": str(plan)} if isinstance(plan, PlanError) else plan.model_dump(mode="json")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TunekitError(
            f"cannot write '{path}': {error.strerror}", hint="name a file in a folder that exists"
        ) from error
