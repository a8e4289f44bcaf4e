"""The command line: arguments to verbs, and what comes back to the terminal. It alone prints and exits.

What starts runs is in `tunekit.cli.train` and `tunekit.cli.sweep`, what is done with them later in `tunekit.cli.runs`,
and with their models in `tunekit.cli.export`.

Exit codes: 0 done, 1 a defect of tunekit (with its traceback), 2 an error that the user can correct, 3 a rerun that
did not reproduce its run; of a run that was stopped 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, and 0 after
`tunekit stop` and SIGUSR1.
"""

import atexit
import copy
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from tunekit.cli import completion
from tunekit.cli import options as cli
from tunekit.cli.evaluate import evaluate
from tunekit.cli.export import export, report
from tunekit.cli.generate import chat, generate, serve
from tunekit.cli.runs import compare, rerun, runs_app
from tunekit.cli.sweep import show_sweep, sweep
from tunekit.cli.train import launch, resume, stop, train
from tunekit.errors import DependencyError, PlanError, TunekitError, writing
from tunekit.process.garbage import leave_to_the_system
from tunekit.process.log_capture import send_nothing
from tunekit.redact import Redacting, open_standard_streams

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tunekit.inference.reward_pairs import PairTrial
    from tunekit.inference.reward_trial import RewardTrial
    from tunekit.planner.plan import Plan
    from tunekit.recipe.schema import Recipe


DAILY = ("check", "data", "plan", "train", "stop", "resume", "runs", "eval", "chat", "export")
"""Commands of daily use, in the order of work: `tunekit --help` describes them, and lists the others by panel."""
RECIPES, DATA, MODELS, RUNS, MACHINES = "Recipes", "Data", "Models", "Runs", "Machines"
MORE = "More commands: tunekit COMMAND --help"


class Commands(TyperGroup):
    """Commands by name; a name may be two words, so that `data cache` stands beside `data RECIPE`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the commands of daily use, and the names of the others by panel, so that all fits one screen."""
        view = copy.copy(self)
        view.commands = {name: self.commands[name] for name in DAILY}
        view.params = [param for param in self.params if not str(param.name).endswith("_completion")]
        for panel in (RECIPES, DATA, MODELS, RUNS, MACHINES):
            names = [
                name for name, command in self.commands.items() if getattr(command, "rich_help_panel", "") == panel
            ]
            view.commands[panel] = TyperCommand(panel, help=", ".join(names), rich_help_panel=MORE)
        TyperGroup.format_help(view, ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that the arguments begin with, and the other arguments."""
        two_words = " ".join(args[:2])
        if two_words in self.commands:
            return two_words, self.commands[two_words], args[2:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="tunekit",
    cls=Commands,
    help="Fine-tune and align open-weight language models: a short recipe, an explained plan, a reproducible run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
recipes_app = typer.Typer(help="List the shipped recipes or copy one.", invoke_without_command=True)

PASSWORD_VARIABLE = "TUNEKIT_UI_PASSWORD"


def main() -> None:
    """Entry point of the `tunekit` command."""
    open_standard_streams()
    # Not even a defect's traceback shows a secret.
    sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)
    send_nothing()
    atexit.register(leave_to_the_system)
    try:
        _check_no_dashes(sys.argv[1:])
        app()
    except TunekitError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _check_no_dashes(arguments: Sequence[str]) -> None:
    """Refuse overrides that are written as options, such as `--train.max_steps=3`."""
    for argument in arguments[: arguments.index("--")] if "--" in arguments else arguments:
        key, _, value = argument.partition("=")
        if re.fullmatch(r"--[a-z_]+(\.[a-z_0-9]+)+", key):
            hint = f"overrides have no dashes: {key.removeprefix('--')}={value or 'VALUE'}"
            raise TunekitError(f"no such option: {key}", hint=hint)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from tunekit import __version__

        print(f"tunekit {__version__}")
        raise typer.Exit


@app.callback()
def _tunekit(
    version: Annotated[
        bool, Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    recipe: cli.RecipeArgument,
    overrides: Annotated[
        list[str] | None,
        Argument(
            help="Overrides, such as train.max_steps=10, or further recipes, planned as a chain.",
            metavar="KEY=VALUE|RECIPE",
        ),
    ] = None,
    on: Annotated[
        list[str] | None,
        Option(
            metavar="MACHINE",
            help="Plan for another machine: h200, 8xh100, 2x8xrtx5090, or a YAML file. Repeat to compare.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=VALUE,VALUE",
            help="Plan for each value, such as adapter.type=lora,qlora. Repeat for all combinations.",
        ),
    ] = None,
    fit: Annotated[
        Literal["length", "batch", "model"] | None,
        Option(help="Find the largest micro-batch, data.max_length or well-known models that fit."),
    ] = None,
    advise: Annotated[
        bool, Option("--advise", help="Rank full fine-tuning, LoRA, QLoRA, lengths and machines by time.")
    ] = False,
    trace: Annotated[
        bool, Option("--trace", help="Trace a step of the model on tensors without storage, and correct the formulas.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print recipe and plan as JSON.")] = False,
) -> None:
    """Show how a recipe would run, on this or another machine, and why."""
    from tunekit.api import verbs
    from tunekit.display import plan as display_plan
    from tunekit.display.console import Progress, make_console, make_error_console
    from tunekit.planner.variants import read_values

    if bool(sweep) + bool(fit) + advise > 1:
        raise TunekitError("--sweep, --fit and --advise exclude each other", hint="pass one of them")
    if trace and (sweep or fit or advise or (on and len(on) > 1)):
        raise TunekitError("--trace is for one plan", hint="trace the recipe on one machine; the trace is stored")
    further = [word for word in overrides or () if _is_recipe(word)]
    if further and (sweep or fit or advise):
        raise TunekitError("--sweep, --fit and --advise take one recipe", hint=f"remove {further[0]!r}")
    if further:
        _plan_chain([recipe, *further], overrides or (), on, trace=trace, as_json=as_json)
        return
    source, notes = _load(recipe, overrides)
    document: dict[str, Any]
    drawn: RenderableType
    if advise:
        variants = verbs.advise(source, on=on)
        document, drawn = variants.to_dict(), display_plan.ranking_table(variants)
    elif sweep or fit:
        variants = verbs.fit(source, fit, on=on) if fit else verbs.sweep_plans(source, read_values(sweep or ()), on=on)
        document, drawn = variants.to_dict(), display_plan.variants_table(variants)
    elif on and len(on) > 1:
        plans = verbs.compare_plans(source, on=on)
        document = {"recipe": source.model_dump(mode="json"), "plans": {name: _plain(p) for name, p in plans.items()}}
        drawn = display_plan.comparison_table(plans)
    else:
        progress = Progress(make_error_console())
        resolved = verbs.plan(source, on=on[0] if on else None, trace=trace or None, on_event=progress)
        document, drawn = resolved.to_dict(), display_plan.plan_view(resolved)
    if as_json:
        cli.print_json(document)
        return
    console = make_console()
    for note in notes:
        console.print(f"note: {note}")
    console.print(drawn)


@app.command()
def check(recipe: cli.RecipeArgument, overrides: cli.OverridesArgument = None) -> None:
    """Validate a recipe, its model and its data without training."""
    from tunekit.api import verbs

    source, notes = _load(recipe, overrides)
    for note in [*notes, *verbs.check(source)]:
        print(f"note: {note}")
    print(f"{recipe}: ok")


@app.command()
def data(
    recipe: cli.RecipeArgument,
    overrides: cli.OverridesArgument = None,
    rows: Annotated[int, Option(metavar="N", help="Sample rows to show per split.", min=0)] = 3,
    html: Annotated[Path | None, Option(help="Write the report as an HTML page to this file.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the report as JSON.")] = False,
    good_rows: Annotated[
        Path | None,
        Option(metavar="FILE", help="Instead: copy the rows of data.train without the invalid ones to a new file."),
    ] = None,
) -> None:
    """Preview the data: tokenized rows, loss masks, lengths."""
    from tunekit.api import verbs
    from tunekit.display.console import Progress, make_console, make_error_console
    from tunekit.display.data import data_report_parts

    source, notes = _load(recipe, overrides)
    if good_rows is not None:
        copied = verbs.save_good_rows(source, path=good_rows)
        print(f"{copied.path}: {copied.num_rows:,} rows; {copied.num_bad:,} invalid rows skipped")
        return
    if html is not None and not html.parent.is_dir():
        with writing(html):  # What cannot be written is said before the rows are read.
            html.touch()
    console = make_console()
    progress = Progress(make_error_console())
    try:
        report = verbs.data_report(source, num_samples=rows, on_event=progress)
    finally:
        progress.stop()
    if html is not None:
        cli.write_page(html, report.to_html())
    if as_json:
        cli.print_json(report.to_dict())
        return
    if html is not None:
        print(html)
        return
    for note in notes:
        console.print(f"note: {note}")
    console.print(*data_report_parts(report, console), sep="\n")


@app.command(rich_help_panel=DATA)
def rewards(
    recipe: cli.RecipeArgument,
    overrides: cli.OverridesArgument = None,
    prompts: Annotated[
        int | None,
        Option("-n", "--prompts", help="Prompts (default 20) or pairs (200) to try, from the first row.", min=1),
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Output file: the prompts with mean_reward, reward_std, difficulty.")
    ] = None,
    pairs: Annotated[
        Path | None,
        Option(metavar="FILE", help="Rank these preference pairs instead, such as --pairs pairs.jsonl."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print all answers with their rewards as JSON.")] = False,
) -> None:
    """Score the untrained model's answers with each reward, or the answers of preference pairs."""
    from tunekit.api import verbs
    from tunekit.display.console import Progress, make_console, make_error_console

    if pairs is not None and out is not None:
        raise TunekitError("--out does not apply to --pairs: it saves tried prompts", hint="unset one of them")
    source, notes = _load(recipe, overrides)
    progress = Progress(make_error_console())
    trial: RewardTrial | PairTrial
    try:
        if pairs is None:
            trial = verbs.try_rewards(source, num_prompts=prompts or 20, out=out, on_event=progress)
        else:
            trial = verbs.rank_pairs(source, pairs=pairs, num_pairs=prompts or 200, on_event=progress)
    finally:
        progress.stop()
    if as_json:
        cli.print_json(trial.to_dict())
        return
    from tunekit.display.rewards import trial_parts

    console = make_console()
    for note in notes:
        console.print(f"note: {note}")
    console.print(*trial_parts(trial), sep="\n")


@app.command("data cache", rich_help_panel=DATA)
def data_cache(
    clear: Annotated[bool, Option("--clear", help="Delete the cache. Runs keep their own rows.")] = False,
) -> None:
    """Show or clear the cache of tokenized rows and downloaded files.

    To preview a recipe named cache, use `tunekit data ./cache`.
    """
    from tunekit.data import prepare
    from tunekit.data.sources import in_memory, remote
    from tunekit.display.console import make_console
    from tunekit.display.data import cache_table

    if clear:
        print(f"{prepare.clear() + remote.clear_downloads() + in_memory.clear_rows():,} bytes freed")
        return
    entries, downloads, rows = prepare.list_entries(), remote.list_downloads(), in_memory.list_rows()
    if not entries and not downloads and not rows:
        print(f"the cache in {prepare.cache_root().parent} is empty")
        return
    make_console().print(cache_table(entries, downloads, rows))


@app.command(rich_help_panel=RECIPES)
def explain(
    key: Annotated[str | None, Argument(help="A dotted key, such as adapter.rank.", metavar="KEY")] = None,
) -> None:
    """Document a recipe field, a section, or all fields."""
    from tunekit.recipe.explain import explain as describe

    print(describe(key))


@app.command(rich_help_panel=RECIPES)
def schema() -> None:
    """Print the JSON schema of recipes for editors."""
    from tunekit.recipe.explain import json_schema

    print(json.dumps(json_schema(), indent=2))


@recipes_app.callback()
def _recipes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        from rich.table import Table

        from tunekit.display.console import make_console
        from tunekit.files import list_recipes

        table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
        for shipped in list_recipes():
            table.add_row(shipped.name, shipped.memory, shipped.description)
        make_console().print(table)


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[
        str, Argument(help="Name of a shipped recipe.", metavar="NAME", autocompletion=completion.recipe_names)
    ],
    dest: Annotated[Path | None, Argument(help="Destination file or folder.", metavar="DEST")] = None,
) -> None:
    """Copy a shipped recipe to edit, with the JSON schema that editors complete and check it by."""
    from tunekit import files
    from tunekit.recipe.explain import link_schema

    copied = files.copy_recipe(name, dest)
    link_schema(copied)
    print(copied)


@app.command(rich_help_panel=MACHINES)
def doctor(
    recipe: Annotated[
        str | None, Argument(help="With --network: a recipe whose planned ranks communicate.", metavar="RECIPE")
    ] = None,
    overrides: cli.OverridesArgument = None,
    network: Annotated[
        bool, Option("--network", help="Measure the bandwidth between ranks, on this machine or --nodes.")
    ] = False,
    nodes: cli.NodesOption = None,
    fix: Annotated[
        bool,
        Option("--fix", help="Print the commands that install what is missing, such as tunekit doctor --fix | sh."),
    ] = False,
) -> None:
    """Show installed packages, devices, and what is missing for which feature."""
    from tunekit.display.console import diagnosis_table, exchange_table, make_console

    if network and fix:
        raise TunekitError("--network and --fix exclude each other", hint="pass one of them")
    if network:
        from tunekit.api import verbs

        exchange = verbs.check_network(recipe, overrides or [], nodes=nodes.split(",") if nodes else None)
        make_console().print(exchange_table(exchange))
        return
    if recipe is not None or nodes is not None:
        raise TunekitError("a recipe and --nodes need --network", hint="add --network")
    from tunekit.api.doctor import diagnose

    if fix:
        print(diagnose().fixes())
        return
    make_console().print(diagnosis_table(diagnose()))


@app.command(rich_help_panel=MODELS)
def kernels(
    model: Annotated[
        str,
        Argument(
            help="A model folder, or a model name on the Hub.", metavar="MODEL", autocompletion=completion.model_names
        ),
    ],
    as_json: Annotated[bool, Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show which modules of a model have fused kernels, and why others do not.

    Reads no weights.
    """
    from tunekit.api import verbs
    from tunekit.display.console import coverage_table, make_console

    report = verbs.coverage(model)
    if as_json:
        cli.print_json(report.to_dict())
        return
    make_console().print(coverage_table(report))


for daily in (train, stop, resume, chat, export):
    app.command()(daily)
app.command("eval")(evaluate)
for of_runs in (compare, report, rerun, sweep):
    app.command(rich_help_panel=RUNS)(of_runs)
app.command("sweep show", rich_help_panel=RUNS)(show_sweep)
for of_models in (generate, serve):
    app.command(rich_help_panel=MODELS)(of_models)
app.command(rich_help_panel=MACHINES)(launch)


@app.command(rich_help_panel=RECIPES)
def migrate(
    file: Annotated[
        Path,
        Argument(
            help="A configuration of Axolotl, LLaMA-Factory, TRL, torchtune or ms-swift (YAML, JSON, or a script that "
            "calls the tool), or a folder of such files.",
            metavar="FILE|FOLDER",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        Argument(
            help="After --: the other tool's command line, such as -- trl dpo --beta 0.1", metavar="[-- ARGUMENTS]"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="PATH", help="New file for the recipe, or new folder for those of a folder."),
    ] = None,
    tool: Annotated[
        str | None,
        Option(
            "--from",
            metavar="TOOL",
            help="Source tool: axolotl, llama-factory, trl, torchtune or ms-swift. Detected from the keys by default.",
        ),
    ] = None,
    num_devices: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Devices that it was written for; multiplies the global batch size."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print recipe and report as JSON.")] = False,
) -> None:
    """Convert another tool's configuration into a recipe, and report on each key."""
    from tunekit.display.console import make_console
    from tunekit.display.migration import migration_parts
    from tunekit.migration.migration import migrate as make

    if file.is_dir():
        if arguments:
            raise TunekitError("a folder takes no further arguments", hint="pass one file of it with them")
        _migrate_folder(file, output, tool, num_devices, as_json=as_json)
        return
    migration = make(file, tool=tool, num_devices=num_devices, arguments=arguments or ())
    files = {} if output is None else {output.with_name(name): text for name, text in migration.files.items()}
    if output is not None:
        _write_new({**files, output: migration.text})
    if as_json:
        cli.print_json(migration.to_dict())
        return
    console = make_console()
    console.print(*migration_parts(migration), sep="\n")
    for path in files:
        print(f"{path}: written; run tunekit in its folder, where functions of recipes are looked up")
    if output is not None:
        print(f"{output}: written; `tunekit plan {output}` shows how it would run")


@app.command(rich_help_panel=MACHINES)
def ui(
    host: Annotated[
        str, Option(metavar="HOST", help="Address to listen on. Any but localhost requires a password.")
    ] = "127.0.0.1",
    port: cli.PortOption = 7860,
    root: Annotated[
        Path, Option(metavar="FOLDER", help="Workspace folder: nothing outside it is shown or changed.")
    ] = Path(),
    password_file: Annotated[
        Path | None, Option(metavar="FILE", help=f"File with the password; {PASSWORD_VARIABLE} works too.")
    ] = None,
    read_only: Annotated[bool, Option("--read-only", help="Read-only: start, change and delete nothing.")] = False,
    open_browser: Annotated[bool, Option("--open/--no-open", help="Open it in the browser.")] = True,
) -> None:
    """Open the web UI for this folder: data, plans, runs, comparisons, chat."""
    if importlib.util.find_spec("gradio") is None:
        raise DependencyError("the web UI needs gradio", hint="install it with: pip install 'tunekit[webui]'")
    from webui.server import serve, workspace
    from webui.site import Site

    password = os.environ.get(PASSWORD_VARIABLE) or None
    if password_file is not None:
        password = cli.secret_in(password_file, "--password-file", "password")
    site = Site(workspace(root), read_only=read_only, has_password=password is not None)
    serve(site, host=host, port=port, password=password, open_browser=open_browser)


app.add_typer(recipes_app, name="recipes", rich_help_panel=RECIPES)
app.add_typer(runs_app, name="runs")


def _is_recipe(word: str) -> bool:
    """Return whether a word names a recipe, rather than an override."""
    from tunekit.files import list_recipes

    if "=" in word:
        return False
    return word.endswith((".yaml", ".yml")) or Path(word).is_file() or word in [one.name for one in list_recipes()]


def _plan_chain(
    recipes: Sequence[str], words: Sequence[str], on: Sequence[str] | None, *, trace: bool, as_json: bool
) -> None:
    """Print the plans of recipes that run one after another."""
    from tunekit.api import verbs
    from tunekit.display import plan as display_plan
    from tunekit.display.console import Progress, make_console, make_error_console

    if on and len(on) > 1:
        raise TunekitError("--on: recipes in a chain are planned for one machine", hint="pass it once")
    chain = verbs.plan_chain(
        recipes,
        [word for word in words if word not in recipes],
        on=on[0] if on else None,
        trace=trace or None,
        on_event=Progress(make_error_console()),
    )
    if as_json:
        cli.print_json(chain.to_dict())
        return
    make_console().print(display_plan.chain_table(chain))


def _load(recipe: str, overrides: list[str] | None) -> tuple["Recipe", list[str]]:
    from tunekit.runs.fingerprints import read_recipe

    return read_recipe(recipe, overrides or [])


def _plain(plan: "Plan | PlanError") -> dict[str, Any]:
    """A plan as plain data, or why there is none."""
    return {"refused": str(plan)} if isinstance(plan, PlanError) else plan.model_dump(mode="json")


def _migrate_folder(
    folder: Path, output: Path | None, tool: str | None, num_devices: int | None, *, as_json: bool
) -> None:
    """Print one table of the configurations in a folder, and write their recipes."""
    from tunekit.display.console import make_console
    from tunekit.display.migration import folder_parts
    from tunekit.migration.folder import migrate_folder

    migrations = migrate_folder(folder, tool=tool, num_devices=num_devices)
    migrated = [(result.path, result.made) for result in migrations.results if result.made is not None]
    if output is not None:
        if output.exists():
            raise TunekitError(f"'{output}' already exists", hint="pass a new folder, or delete it")
        for path, migration in migrated:
            target = output / f"{path}.yaml" if path.suffix not in (".yaml", ".yml") else output / path
            target.parent.mkdir(parents=True, exist_ok=True)
            files = {target.with_name(name): text for name, text in migration.files.items()}
            _write_new({**files, target: migration.text})
    if as_json:
        cli.print_json(migrations.to_dict())
        return
    console = make_console()
    console.print(*folder_parts(migrations), sep="\n")
    if output is not None:
        print(f"{output}: {len(migrated)} recipes written")


def _write_new(files: Mapping[Path, str]) -> None:
    """Write files, or none if one of them is there already."""
    for path in files:
        if path.exists():
            raise TunekitError(f"'{path}' already exists", hint="pass another file, or delete it")
    for path, text in files.items():
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            problem = f"cannot write '{path}': {error.strerror}"
            raise TunekitError(problem, hint="pass a file in an existing folder") from error
