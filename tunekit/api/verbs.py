"""The verbs: the single path that the command line, notebooks and every other door go through."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.api.chain import Chain
from tunekit.api.plan_inputs import Lookup, run_of
from tunekit.api.resume import resumed
from tunekit.api.traces import Tracing
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.prepare import Progress
from tunekit.data.reports.good_rows import CopiedRows, InvalidRow, copy_good_rows
from tunekit.data.reports.good_rows import invalid_rows as _invalid_rows
from tunekit.data.reports.preview import DataPreview
from tunekit.data.reports.report import DataReport
from tunekit.data.sources.in_memory import RowData
from tunekit.data.sources.load import LoadedData, load_data, load_rows
from tunekit.errors import PlanError, RunError, TunekitError
from tunekit.estimates.facts import Hardware
from tunekit.inference.preview import preview_data, source_of
from tunekit.launching.bandwidth import Exchange, measure
from tunekit.launching.local import turn, when_served
from tunekit.launching.ssh_hosts import for_hosts, launch_on
from tunekit.methods.rewards.load import check_rows
from tunekit.models.load import load_tokenizer
from tunekit.planner.decisions.reasons import check_disk
from tunekit.planner.plan import Plan
from tunekit.planner.ranking import WELL_KNOWN, ranked
from tunekit.planner.resolve import resolve
from tunekit.planner.variants import Largest, Variant, Variants, combinations
from tunekit.probe.hardware import probe_hardware
from tunekit.probe.model import probe_model
from tunekit.probe.nodes import with_started
from tunekit.process.garbage import collected_seldom
from tunekit.process.log_capture import library_words_to
from tunekit.recipe.load import AnyOverrides
from tunekit.recipe.methods import generates, has_teacher, is_rewarded, list_methods
from tunekit.recipe.methods.on_policy import RewardedMethod
from tunekit.recipe.reading.phrases import any_of
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.data import DataSection
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs import fingerprints
from tunekit.runs.available_actions import ENDED_EARLY, can_go_on
from tunekit.runs.events import FINAL_PHASES, Event
from tunekit.runs.fingerprints import continued, read_recipe, record_versions, write_code
from tunekit.runs.kept_inputs import keep_inputs
from tunekit.runs.prepared_data import (
    PreparedData,
    PreparedRows,
    answered_rows,
    prepare,
    prepare_rows,
    record,
    report_on_rows,
    save_sample_prompts,
    tokenizers_of,
)
from tunekit.runs.record import claimed, disk_errors, free_bytes, place_of_run
from tunekit.runs.run import Run, check_free, find_run, runs_named
from tunekit.runs.small_files import DIED, place_of, write_whole
from tunekit.tracking.trackers import check_trackers

if TYPE_CHECKING:
    from tunekit.inference.reward_pairs import PairTrial
    from tunekit.inference.reward_trial import RewardTrial
    from tunekit.models.fusion.fuse import Report

Source = str | Path | Mapping[str, Any] | Recipe
"""A recipe: a file's path, the name of a shipped one, a mapping of its sections, or a loaded one. In a mapping,
functions may stand where a recipe names them; their source is kept with the run."""


def plan(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    eval_dataset: RowData | None = None,
    on: str | None = None,
    trace: bool | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Plan:
    """Plan a recipe. Reads the rows and the model's headers; loads neither weights nor torch.

    A model without weights is planned for from its config.json, and where the hub cannot be reached, a well-known one
    from tunekit's own table; training needs the files.

    Example:
        >>> plan = tunekit.plan("sft/quickstart", {"train": {"max_steps": 5}}, on="h100")
        >>> plan.recipe.train.max_steps, plan.layout.num_processes
        (5, 1)

    Args:
        source: The recipe.
        overrides: Changes to it: `["train.max_steps=10"]`, `{"train.max_steps": 10}` or `{"train": {"max_steps": 10}}`.
        train_dataset: Rows to train on instead of `data.train`, as for `train`.
        eval_dataset: The same instead of `data.eval`.
        on: Another machine than this one: `h200`, `8xh100`, `2x8xrtx5090`, or a YAML file that describes one.
        trace: Trace a step of the model in a process of its own, without weights, and correct the memory formulas by
            it: True for any model, None for those whose type the formulas do not know, on accelerators, False to use
            stored traces alone. A trace takes seconds to minutes, once.
        on_event: Called before a trace is made.

    Raises:
        TunekitError: The recipe, the model or the data has a fault, there is no such machine, nothing fits it, or the
            model cannot be traced and `trace` is True.
    """
    recipe, _ = read_recipe(source, overrides, train_dataset=train_dataset, eval_dataset=eval_dataset)
    return Lookup([on], tracing=_tracing(trace), on_event=on_event).plan(recipe, on)


def plan_chain(
    sources: Sequence[Source],
    overrides: AnyOverrides = (),
    *,
    on: str | None = None,
    trace: bool | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Chain:
    """Plan recipes that run one after another, such as SFT, DPO and GRPO, with disk, time and cost in sum.

    A recipe starts from the result of one before it where its model is that recipe's name (`output.name`, else that of
    its file) or the folder of its run, which need not be there yet.

    Args:
        sources: The recipes, in their order.
        overrides: Changes to each of them.
        on: Another machine than this one, named as for `plan`.
        trace: Traces of the models, as for `plan`.
        on_event: Called before a trace is made.

    Raises:
        TunekitError: A recipe, a model or rows have a fault, or a recipe does not fit; the message names the recipe.
    """
    recipes = [read_recipe(source, overrides)[0] for source in sources]
    return Lookup([on], tracing=_tracing(trace), on_event=on_event).chain(recipes, on)


def _tracing(trace: bool | None) -> Tracing:
    """Return the models of which a trace is made."""
    return "unknown" if trace is None else "all" if trace else "stored"


def compare_plans(source: Source, overrides: AnyOverrides = (), *, on: Sequence[str]) -> dict[str, Plan | PlanError]:
    """Plan a recipe for each of several machines, with the error in place of the plan where it does not fit.

    Args:
        source: The recipe.
        overrides: Changes to it.
        on: The machines, named as for `plan`.

    Raises:
        TunekitError: The recipe, the model or the data has a fault, or there is no such machine.
    """
    recipe, _ = read_recipe(source, overrides)
    lookup = Lookup(on)
    return {name: lookup.plan_or_error(recipe, name) for name in on}


def _machines(on: str | Sequence[str] | None) -> list[str | None]:
    """Return the machines to plan for: those that are named, or this one."""
    return [on] if isinstance(on, str) or on is None else list(on)


def sweep_plans(
    source: Source,
    values: Mapping[str, Sequence[Any]],
    overrides: AnyOverrides = (),
    *,
    on: str | Sequence[str] | None = None,
) -> Variants:
    """Plan a recipe with every combination of some values, on one machine or on each of several.

        tunekit.sweep_plans("mine.yaml", {"adapter.type": ["lora", "qlora"], "data.max_length": [512, 8192]}, on="h100")

    Args:
        source: The recipe.
        values: The values to try, by the dotted keys of the recipe.
        overrides: Changes to it that hold for all.
        on: Other machines than this one, named as for `plan`.

    Raises:
        TunekitError: The recipe, a value to try, the model or the data has a fault, or there is no such machine.
    """
    recipe, _ = read_recipe(source, overrides)
    machines = _machines(on)
    combined = combinations(recipe, values, num_machines=len(machines))
    lookup = Lookup(machines)
    variants = (
        Variant(machine, changes, lookup.plan_or_error(changed, machine))
        for machine in machines
        for changes, changed in combined
    )
    return Variants(recipe, tuple(variants))


def fit(
    source: Source,
    largest: Largest,
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    eval_dataset: RowData | None = None,
    on: str | Sequence[str] | None = None,
) -> Variants:
    """The largest batch, length or model with which a recipe fits a machine.

    What fits is held on the devices: main memory and disk do not count, unless the recipe's own plan needs them.

    Args:
        source: The recipe.
        largest: `length`: the longest `data.max_length` at the recipe's batch. `batch`: the largest
            `train.micro_batch_size`, with one micro-batch a step on each device. Both come with the recipe as it is,
            and with the next value, which does not fit. `model`: the largest well-known models, one of each maker,
            and the next larger one, which does not fit.
        overrides: Changes to it.
        train_dataset: Rows to train on instead of `data.train`, as for `train`.
        eval_dataset: The same instead of `data.eval`.
        on: Other machines than this one, named as for `plan`.

    Raises:
        TunekitError: The recipe, the model or the data has a fault, or there is no such machine.
    """
    recipe, _ = read_recipe(source, overrides, train_dataset=train_dataset, eval_dataset=eval_dataset)
    machines = _machines(on)
    lookup = Lookup(machines)
    variants = (variant for machine in machines for variant in lookup.largest(recipe, machine, largest))
    return Variants(recipe, tuple(variants))


def advise(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    eval_dataset: RowData | None = None,
    on: str | Sequence[str] | None = None,
) -> Variants:
    """Rank a recipe among others: all weights, LoRA and QLoRA, half and twice the length, and machines.

    What fits comes first, the fastest at the top; notes say what is fastest, cheapest, and needs the least memory.
    Without `on`, the recipe as it is is planned for a few well-known machines too.

    Args:
        source: The recipe.
        overrides: Changes to it that hold for all.
        train_dataset: Rows to train on instead of `data.train`, as for `train`.
        eval_dataset: The same instead of `data.eval`.
        on: Other machines than this one, named as for `plan`.

    Raises:
        TunekitError: The recipe, the model or the data has a fault, or there is no such machine.
    """
    recipe, _ = read_recipe(source, overrides, train_dataset=train_dataset, eval_dataset=eval_dataset)
    machines = _machines(on)
    well_known = WELL_KNOWN if on is None else ()
    lookup = Lookup([*machines, *well_known])
    variants = [variant for machine in machines for variant in lookup.alternatives(recipe, machine)]
    variants += [Variant(machine, {}, lookup.plan_or_error(recipe, machine)) for machine in well_known]
    return Variants(recipe, ranked(variants))


def check(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    eval_dataset: RowData | None = None,
) -> list[str]:
    """Check a recipe, its model, its data and whether they fit this machine; return what is worth knowing.

    Args:
        source: The recipe.
        overrides: Changes to it.
        train_dataset: Rows to train on instead of `data.train`, as for `train`.
        eval_dataset: The same instead of `data.eval`.

    Raises:
        TunekitError: There is a fault.
    """
    recipe, _ = read_recipe(source, overrides, train_dataset=train_dataset, eval_dataset=eval_dataset)
    return check_recipe(recipe, Lookup([None], probe_model, tracing="unknown"))[1]


def check_recipe(recipe: Recipe, lookup: Lookup) -> tuple[Plan, list[str]]:
    """The plan of a recipe that can be trained on this machine, and what is worth knowing of its rows.

    Args:
        recipe: The recipe.
        lookup: What plans are made from, for however many recipes.

    Raises:
        TunekitError: There is a fault.
    """
    recipe = continued(recipe)
    _refuse_untrainable(recipe)
    check_trackers(recipe.output.report_to)
    planned = lookup.plan(recipe)
    _check_disk(planned)
    data = lookup.data(recipe)
    _check_rewards(recipe, data)
    with library_words_to(StringIO()):
        if has_teacher(recipe.method):
            tokenizers_of(recipe)
        if generates(recipe.method):
            answered_rows(recipe.method, data, partial(load_tokenizer, recipe.model))
    return planned, data.notes


def train(
    source: Source | Plan,
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    eval_dataset: RowData | None = None,
    resume: bool = False,
    queue: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> Run:
    """Train, in as many processes as the plan has, and return the finished run.

    Example:
        >>> rows = [{"prompt": f"What is {n} plus 1?", "completion": f"{n + 1}"} for n in range(32)]
        >>> run = tunekit.train({"model": "pico", "train": {"max_steps": 2}}, train_dataset=rows)
        >>> run.state
        'finished'

        A reward of a notebook's cell, or of the script that is run:

        >>> def is_short(completions, **columns):
        ...     return [1.0 if len(completion[0]["content"]) < 20 else 0.0 for completion in completions]
        >>> prompts = [{"prompt": [{"role": "user", "content": f"What is {n}?"}]} for n in range(32)]
        >>> recipe = {"model": "pico", "method": {"type": "grpo", "rewards": [is_short]}}
        >>> tunekit.plan(recipe, train_dataset=prompts).recipe.method.rewards[0].weight
        1.0

    Args:
        source: The recipe, or a plan of it.
        overrides: Changes to the recipe: `["train.max_steps=10"]`, `{"train.max_steps": 10}` or nested mappings.
        train_dataset: Rows to train on instead of `data.train`: a list of dicts, a `datasets.Dataset`, a DataFrame of
            pandas or polars, or an iterable of dicts. They are kept in the folder of the run. Relative paths of images
            need `data.image_folder`.
        eval_dataset: The same instead of `data.eval`.
        resume: Resume the unfinished run of this recipe, if there is one.
        queue: Wait until no other run on this machine uses the devices.
        on_event: Called with every event of the run as it happens; `tunekit.Progress()` shows them.

    Raises:
        TunekitError: An error that the user can correct. The run folder's status has it too.
    """

    def make() -> Run:
        recipe, notes = read_recipe(
            source.recipe if isinstance(source, Plan) else source,
            overrides,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
        )
        earlier = run_of(recipe)
        if earlier is not None and resume:
            return _going_on(earlier, recipe=recipe, on_event=on_event)
        if earlier is not None and recipe.output.dir is None:
            on = f"`tunekit resume {earlier.path}` resumes it"
            notes.append(f"a run of this recipe ended early: {on}")
        hardware = when_served(probe_hardware()) if queue else None
        return make_run(recipe, hardware=hardware, notes=notes, on_event=on_event)

    return _start(make, on_event, queue=queue)


def unfinished(source: Source, overrides: AnyOverrides = ()) -> Run | None:
    """Return the run of a recipe that has ended early and can be resumed; None where there is none.

    Args:
        source: The recipe.
        overrides: Changes to it.

    Raises:
        TunekitError: The recipe has a fault.
    """
    run = run_of(read_recipe(source, overrides)[0])
    return run if run is not None and run.state in ENDED_EARLY and can_go_on(run) else None


def resume(
    run: Run | str | Path,
    overrides: AnyOverrides = (),
    *,
    from_: str | None = None,
    weights_only: bool = False,
    nodes: Sequence[str] | None = None,
    queue: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> Run:
    """Resume a run that was interrupted, failed or died, or train a finished one longer, and return it.

    Args:
        run: The run, its folder, or its name in `runs/`.
        overrides: Edits of its recipe, such as `{"train.max_steps": 200}`; those in its `recipe.yaml` count too.
        from_: The checkpoint to resume from, by its step, name or path. Default: the newest complete one.
        weights_only: Start over with the weights of that checkpoint, and load nothing else of it.
        nodes: Machines, named as for `launch`. Default: this one.
        queue: Wait until no other run on this machine uses the devices.
        on_event: Called with every event as it happens.

    Raises:
        TunekitError: The run cannot be resumed, or not with these edits, or an error that the user can correct.
    """

    def make() -> Run:
        existing = run if isinstance(run, Run) else find_run(str(run), exact=True)
        return _going_on(existing, overrides, from_=from_, weights_only=weights_only, nodes=nodes, on_event=on_event)

    if not nodes:
        return _start(make, on_event, queue=queue)
    _refuse_queue(queue, "on other machines")
    new_run = make()
    launch_on(new_run, nodes, on_event)
    return new_run


def stop(run: Run | str | Path, *, now: bool = False, on_wait: Callable[[str], None] | None = None) -> str:
    """Stop a run from anywhere that sees its folder, and return when all its processes have exited.

    It stops after the current step, with a checkpoint to resume from, or at once where there are no steps.

    Args:
        run: The run, its folder, or its name in `runs/`.
        now: Whether to stop at once, without another checkpoint.
        on_wait: Called with a description of what is waited for.

    Returns:
        How it ended, in words.

    Raises:
        RunError: It did not exit in time. The message names what hangs; the request stands.
    """
    from tunekit.launching.stop import stop_run

    return stop_run(run if isinstance(run, Run) else _to_stop(str(run)), now=now, tell=on_wait or (lambda words: None))


def _to_stop(name: str) -> Run:
    """The run of a name that is under way, else the newest.

    Raises:
        RunError: There is none, or several are under way.
    """
    runs = runs_named(name, exact=True)
    live = [run for run in runs if run.state not in (*FINAL_PHASES, DIED)]
    if len(live) > 1:
        names = ", ".join(run.name for run in live)
        raise RunError(f"{len(live)} runs named {name!r} are active", hint=f"pass one of them: {names}")
    return (live or runs)[0]


def _going_on(run: Run, overrides: AnyOverrides = (), **how: Any) -> Run:
    """A run that is ready to go on and says so already, before another process may look whether it is over."""
    from tunekit.launching.local import begin

    with claimed(run), disk_errors(run, run.name):
        resumed(run, overrides, **how)
        begin(run)
    return run


def _start(make: Callable[[], Run], on_event: Callable[[Event], None] | None, *, queue: bool) -> Run:
    """Work on a run in processes of its own, or in those that somebody else's launcher has started."""
    if (place := place_of()).num_processes > 1:
        _refuse_queue(queue, "under a launcher")
        from tunekit.launching.external import train_joined

        return train_joined(place, make, on_event)
    with collected_seldom():
        run = make()
        from tunekit.launching.local import begin, launch

    begin(run)
    with turn(run, waits=queue, listener=on_event):
        launch(run, on_event)
    return run


def _refuse_queue(queue: bool, where: str) -> None:
    if queue:
        raise RunError(f"--queue is unsupported for runs {where}", hint="remove --queue")


def launch(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    nodes: Sequence[str],
    on_event: Callable[[Event], None] | None = None,
) -> Run:
    """Train on several machines that are reached by ssh, and return the finished run.

    They share a disk, on which the run's folder is, and have the same interpreter and working directory as this one.

    Args:
        source: The recipe.
        overrides: Changes to it.
        nodes: The machines, as ssh knows them: `host`, `user@host`, `host:port`. The plan is made for what they have.
        on_event: Called with every event of the run as it happens.

    Raises:
        TunekitError: An error that the user can correct, on any of them.
    """
    recipe, hardware = for_hosts(read_recipe(source, overrides)[0], nodes)
    run = make_run(recipe, hardware=hardware, on_event=on_event)
    launch_on(run, nodes, on_event)
    return run


def make_run(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    hardware: Hardware | None = None,
    shares_disk: bool = True,
    notes: Sequence[str] = (),
    on_event: Callable[[Event], None] | None = None,
) -> Run:
    """Plan, prepare the rows, and make the folder of a run that is yet to be started.

    Args:
        source: The recipe.
        overrides: Changes to it.
        hardware: Where it will run; by default this machine, and the nodes of its launcher.
        shares_disk: Whether what it writes there is on this machine's disk too.
        notes: What else the user should know.
        on_event: Called with the progress of reading rows, and the plan.

    Raises:
        TunekitError: The recipe, the model or the data has a fault, or does not fit.
    """
    recipe, of_overrides = read_recipe(source, overrides)
    check_free(recipe)
    check_trackers(recipe.output.report_to)
    if hardware is None:
        recipe = with_started(recipe, os.environ)
    recipe = continued(recipe)
    _refuse_untrainable(recipe)
    lookup = Lookup([None], probe_model, here=hardware, shares_disk=shares_disk, tracing="unknown", on_event=on_event)
    planned = lookup.plan(recipe)
    if shares_disk:
        _check_disk(planned)
    data = lookup.data(recipe)
    _check_rewards(recipe, data)
    words = StringIO()
    with library_words_to(words):
        # Sequences for supervised fine-tuning, rows for methods whose data TRL tokenizes.
        make = prepare if recipe.method.spec.trains_on == "tokens" else prepare_rows
        prepared: PreparedData | PreparedRows = make(recipe, data, _progress_to(on_event))
        hardware, teacher = lookup.hardware_for(recipe), lookup.teacher(recipe)
        model = lookup.traced_model(recipe, hardware)
        final = resolve(record(recipe, data), hardware, model, prepared.facts, lookup.records, teacher)
        if shares_disk:
            _check_disk(final)
        run = Run.create(final)
        keep_inputs(run)
        prepared.save(run.path / "data")
        save_sample_prompts(recipe, data, run.path)
        write_code(run)
        if final.layout.engine == "automodel":
            from tunekit.training.engines.automodel import write_configuration

            write_configuration(final, run.path.resolve(), model.model_type)
    fingerprints.record(run)
    record_versions(run)
    (run.path / "log.txt").write_text(words.getvalue(), encoding="utf-8")
    if on_event is not None:
        on_event({"event": "plan", "run": run, "plan": final, "notes": (*notes, *of_overrides, *prepared.notes)})
    return run


def check_network(
    source: Source | None = None, overrides: AnyOverrides = (), *, nodes: Sequence[str] | None = None
) -> Exchange:
    """Measure how fast ranks exchange data: those of a recipe's plan, or those that the machines have room for.

    Args:
        source: The recipe.
        overrides: Changes to it.
        nodes: Machines, named as for `launch`. Default: this one.

    Raises:
        TunekitError: The recipe cannot be planned, or a machine or a rank does not answer. It is named.
    """
    if source is None:
        return measure(nodes or [None], of_a_node=None, environment={})
    (recipe, _), hardware = read_recipe(source, overrides), None
    if nodes:
        recipe, hardware = for_hosts(recipe, nodes)
    planned = Lookup([None], here=hardware).plan(recipe)
    of_a_node = planned.layout.num_processes // planned.num_nodes
    return measure(nodes or [None], of_a_node=of_a_node, environment=planned.environment)


def try_rewards(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    num_prompts: int = 20,
    out: str | Path | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> "RewardTrial":
    """Score the answers that a recipe's model gives now with its rewards, before any training.

    Args:
        source: The recipe.
        overrides: Changes to it.
        train_dataset: Rows instead of `data.train`, as for `train`.
        num_prompts: Prompts to try, the first of the training rows.
        out: A file to write, a line of JSON for each tried row with its `mean_reward`, `reward_std` and `difficulty`.
            With `data.curriculum_column=difficulty` a run on it begins with the easiest prompts.
        on_event: Called with the progress of generation; `tunekit.Progress()` shows it.

    Raises:
        TunekitError: The recipe, the model or the data has a fault, or a reward fails: it is named with the row.
    """
    recipe = continued(read_recipe(source, overrides, train_dataset=train_dataset)[0])
    method = _rewarded(recipe)
    if out is not None and Path(out).exists():
        raise TunekitError(f"{out} already exists", hint="pass another file, or delete it")
    _refuse_untrainable(recipe)
    lookup = Lookup([None], probe_model)
    data, planned = lookup.data(recipe), lookup.plan(recipe)
    _check_rewards(recipe, data)
    with library_words_to(StringIO()):
        data = answered_rows(method, data, partial(load_tokenizer, recipe.model))
        from tunekit.inference.reward_trial import run_trial

        trial = run_trial(planned, method, data.train, num_prompts=num_prompts, on_progress=_progress_to(on_event))
    if out is not None:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in trial.scored_rows())
        write_whole(Path(out), "".join(lines))
    return trial


def rank_pairs(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    pairs: str | Path,
    num_pairs: int = 200,
    on_event: Callable[[Event], None] | None = None,
) -> "PairTrial":
    """Score both answers of preference pairs with a recipe's rewards: which pairs do they rank otherwise than people?

    Args:
        source: The recipe. Its own rows are not read.
        overrides: Changes to it.
        pairs: A file of preference pairs, as DPO takes them.
        num_pairs: The first pairs, at most.
        on_event: Called with the progress.

    Raises:
        TunekitError: The recipe or the file has a fault, or a reward fails: it is named with the row.
    """
    recipe, _ = read_recipe(source, overrides)
    method = _rewarded(recipe)
    if not method.rewards:
        raise TunekitError("method.rewards: empty", hint="set the rewards to try on the pairs")
    (file,) = DataSection.model_validate({"train": str(pairs)}).sources
    rows = load_rows(file.model_copy(update={"key": "pairs"}), learner_of("dpo"), default_split="train")
    devices = probe_hardware().accelerators
    with library_words_to(StringIO()):
        from tunekit.inference import reward_pairs

        return reward_pairs.rank_pairs(
            method.rewards,
            [rows],
            load_tokenizer(continued(recipe).model),
            device=devices[0].kind if devices else "cpu",
            num_pairs=num_pairs,
            on_progress=_progress_to(on_event),
        )


def coverage(model: str) -> "Report":
    """List the modules of a model that tunekit's kernels serve, from its configuration alone: no weights are read.

    Args:
        model: Its folder, or its name on the hub.

    Raises:
        ModelError: Its configuration cannot be read.
    """
    with library_words_to(StringIO()):
        from tunekit.models.fusion.fuse import coverage

        return coverage(ModelSection(path=model))


def data_report(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    eval_dataset: RowData | None = None,
    num_samples: int = 3,
    on_event: Callable[[Event], None] | None = None,
) -> DataReport:
    """Report the rows of a recipe as its model will see them. Loads the tokenizer and no weights.

    Args:
        source: The recipe.
        overrides: Changes to it, such as `data.max_length=512`.
        train_dataset: Rows to train on instead of `data.train`, as for `train`.
        eval_dataset: The same instead of `data.eval`.
        num_samples: Sequences of each source to take as samples; of rows that are compared, both answers of as many.
        on_event: Called with the progress of reading rows; `tunekit.Progress()` shows it.

    Raises:
        TunekitError: The recipe, the tokenizer or the data has a fault.
    """
    recipe, _ = read_recipe(source, overrides, train_dataset=train_dataset, eval_dataset=eval_dataset)
    data = load_data(recipe.data, learner_of(recipe.method.type))
    make = prepare if recipe.method.spec.trains_on == "tokens" else report_on_rows
    with library_words_to(StringIO()):
        report = make(continued(recipe), data, _progress_to(on_event), num_samples=num_samples)
        return report if isinstance(report, DataReport) else report.report


def preview(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    eval_dataset: RowData | None = None,
    key: str | None = None,
    start: int = 0,
    num_rows: int = 10,
) -> DataPreview:
    """Some of the first rows of a recipe, at once, as its model will see them. Loads the tokenizer and no weights.

    Problems of rows and their format are reported beside what can be read, and nothing is read that is not
    needed. Rows up to the thousandth are looked at for what is wrong with them, and as many more as are asked for.

    Args:
        source: The recipe.
        overrides: Changes to it, such as `data.columns={prompt: question, completion: answer}`.
        train_dataset: Rows to train on instead of `data.train`, as for `train`.
        eval_dataset: The same instead of `data.eval`.
        key: Which of its sources: `data.train`, `data.train[1]`, `data.eval`. Default: the first.
        start: The first row to show, counted from 0.
        num_rows: Rows to show.

    Raises:
        TunekitError: The recipe has a fault, or the source is not there.
    """
    recipe, _ = read_recipe(source, overrides, train_dataset=train_dataset, eval_dataset=eval_dataset)
    with library_words_to(StringIO()):
        return preview_data(recipe, learner_of(recipe.method.type), key=key, start=start, num_rows=num_rows)


def save_good_rows(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    path: str | Path,
    key: str | None = None,
    corrected: Mapping[int, Any] | None = None,
) -> CopiedRows:
    """Copy the rows of a file that a recipe's method can learn from into a new file, with all their columns.

    Args:
        source: The recipe.
        overrides: Changes to it.
        path: The new file, of JSON lines.
        key: Which of its sources: `data.train`, `data.train[1]`, `data.eval`. Default: the first.
        corrected: Rows in place of invalid ones, by their `InvalidRow.number`.

    Raises:
        TunekitError: The recipe has a fault, the source is not one file, no row of it is good, or the new file exists.
    """
    recipe, _ = read_recipe(source, overrides)
    return copy_good_rows(source_of(recipe, key), learner_of(recipe.method.type), Path(path), corrected)


def invalid_rows(
    source: Source, overrides: AnyOverrides = (), *, key: str | None = None, most: int = 20
) -> list[InvalidRow]:
    """Return the first rows of a file that a recipe's method cannot learn from, to be corrected.

    Args:
        source: The recipe.
        overrides: Changes to it.
        key: Which of its sources: `data.train`, `data.train[1]`, `data.eval`. Default: the first.
        most: So many rows at most.

    Raises:
        TunekitError: The recipe has a fault, or the source is not one file or cannot be read.
    """
    recipe, _ = read_recipe(source, overrides)
    return _invalid_rows(source_of(recipe, key), learner_of(recipe.method.type), most)


def _rewarded(recipe: Recipe) -> RewardedMethod:
    """Return the method of a recipe that learns from rewards.

    Raises:
        TunekitError: It does not.
    """
    if is_rewarded(recipe.method):
        return recipe.method
    rewarded = any_of([info.name for info in list_methods() if info.is_rewarded])
    raise TunekitError(f"method.type: {recipe.method.type} does not use rewards", hint=f"use {rewarded}")


def _check_rewards(recipe: Recipe, data: LoadedData) -> None:
    """Check that the rewards of a recipe can be had, and find in each row what they read there."""
    if is_rewarded(recipe.method):
        check_rows(recipe.method.rewards, (*data.train, *data.eval))


def _check_disk(planned: Plan) -> None:
    """Refuse a run for which there is no room where it would lie."""
    place = place_of_run(planned.recipe)
    check_disk(planned, free_bytes(place), str(place.absolute()))


def _refuse_untrainable(recipe: Recipe) -> None:
    """Refuse what can be planned but not trained.

    Raises:
        TunekitError: Something that training needs is missing, or not there yet.
    """
    method = recipe.method
    if is_rewarded(method) and not method.reward_weights and not _owns_reward(method):
        problem = f"method.rewards: empty, but {method.type} learns only from rewards"
        raise TunekitError(problem, hint="set one, such as exact_match, or your own function: my_rewards:score")
    if recipe.data.streaming and method.spec.trains_on != "tokens":
        problem = f"data.streaming: unsupported in training with {method.type}; only its plan supports it"
        raise TunekitError(problem, hint="unset it: rows are stored on disk, not in memory")


def _owns_reward(method: RewardedMethod) -> bool:
    """Return whether an environment of the method scores its episodes."""
    if method.acting is None:
        return False
    from tunekit.methods.tool_use import owns_reward

    return owns_reward(method.acting)


def _progress_to(on_event: Callable[[Event], None] | None) -> Progress | None:
    """Return a callback that reports progress of reading a source to a listener, or None without a listener."""
    if on_event is None:
        return None
    return lambda source, done, total: on_event({"event": "rows", "source": source, "done": done, "total": total})
