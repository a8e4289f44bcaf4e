"""Plans and runs in a terminal or a notebook, drawn by rich and plotext.

Nothing here prints on its own: the command line and the notebook's user hand a `Progress` to `tunekit.train`, or
print what these functions return.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rich import progress
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text

from tunekit.api.doctor import Diagnosis
from tunekit.display.drawing import numbers, plain_table, plotted
from tunekit.display.evaluation import evaluations_table
from tunekit.display.plan import brief_plan_view, plan_view
from tunekit.errors import TunekitError
from tunekit.estimates.facts import Hardware
from tunekit.estimates.throughput.speed import Speed, duration
from tunekit.estimates.throughput.step import PERCENT, range_of
from tunekit.launching.bandwidth import Exchange
from tunekit.planner.plan import gib
from tunekit.recipe.methods import is_rewarded
from tunekit.redact import lasting, trimming
from tunekit.reporting.diagnosis import diagnose_run
from tunekit.runs.available_actions import begin_anew, prospects
from tunekit.runs.evaluation_result import evaluations_of
from tunekit.runs.events import Event, brief, judged_by, number, rows_of, words_of
from tunekit.runs.reader import last_events
from tunekit.runs.run import Run

if TYPE_CHECKING:
    from tunekit.models.fusion.fuse import Report

PIPE_WIDTH = 140
"""Columns of what is written to a pipe or a file, where neither a terminal nor COLUMNS tells its width."""

PLAIN_LINES = 20
"""Progress lines of a run whose output is not a terminal."""

MAX_RANKS = 8
"""Processes of which a summary tells one by one."""

NOTABLE_SHARE = 0.05
"""Share of a run's time from which on a summary tells what checkpoints cost."""

BAR_COLUMNS = 40
"""Columns of a live line that are not figures: the step, a short bar, and the time."""

LINES = {
    "fused": ("kernels  {message}", "dim"),
    "tracker": ("{name}  {message}", "dim"),
    "trace": ("tracing a step of {model}, once; the trace is stored", "dim"),
    "warning": ("warning: {message}", "yellow"),
    "stop": ("{message}", "yellow"),
    "early_stop": ("{message}", "yellow"),
}
"""Events that are shown as a line each: its words and its style."""

SHOWN_LETTERS = 300
"""Of a generated answer that a summary shows."""


def make_console(*, outlives_readers: bool = False) -> Console:
    """Return a console on standard output as it is now, whatever is redirected later.

    Brackets are text there, not markup: names, notes and errors contain `[INST]` or `tunekit[vllm]`.

    Args:
        outlives_readers: Whether what cannot be shown any more is left out, rather than an error.
    """
    out = lasting(sys.stdout) if outlives_readers else sys.stdout
    if out.isatty():
        return Console(file=out, highlight=False, markup=False)
    console = Console(highlight=False, markup=False)
    width = None if "COLUMNS" in os.environ else PIPE_WIDTH
    return console if console.is_jupyter else Console(file=trimming(out), highlight=False, markup=False, width=width)


def make_error_console() -> Console:
    """Return a console on standard error, for progress besides an output that programs read."""
    return Console(file=lasting(sys.stderr), markup=False)


class Progress:
    """Shows a run as it goes: its plan in short, a live bar (plain lines without a terminal), and a summary.

    Args:
        console: Where to draw.
        whole_plan: Show every decision of the plan with its reason.
    """

    def __init__(self, console: Console | None = None, *, whole_plan: bool = False) -> None:
        self.console = console or make_console(outlives_readers=True)
        self._whole_plan = whole_plan
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._num_steps = 0
        self._shows_loss = True
        self._run: Run | None = None

    def __call__(self, event: Event) -> None:
        """Show one event of a run."""
        kind = event["event"]
        if kind == "rows":
            self._on_rows(event["source"], event["done"], event["total"])
        elif kind == "plan":
            self._run = event["run"]
            self._num_steps = event["plan"].schedule.num_steps
            # Where answers are rewarded, the loss is near zero whatever is learned.
            self._shows_loss = not is_rewarded(event["plan"].recipe.method)
            for note in event["notes"]:
                self.console.print(Text(f"note: {note}", style="dim"))
            view = plan_view if self._whole_plan else brief_plan_view
            self.console.print("", view(event["plan"]), "")
            if not self._whole_plan:
                self.console.print(Text(f"plan {self._run.path / 'plan.yaml'}", style="dim"))
            self.console.print(Text(f"run  {self._run.path}\n", style="bold"))
        elif kind == "queue":
            self.console.print(Text(queue_words(event), style="yellow"))
        elif kind == "hosts":
            self.console.print(Text(hosts_words(event["hosts"]), style="dim"))
        elif kind in LINES:
            words, style = LINES[kind]
            self.console.print(Text(words.format_map(event), style=style))
        elif kind == "phase":
            self._on_phase(event["phase"])
        elif kind == "log":
            self._on_log(event)
        elif kind == "eval":
            self._on_eval(event)
        elif kind == "restart":
            self._on_restart(event)
        elif kind == "resume":
            self._on_resume(event)
        elif kind == "result" and self._run is not None:
            self.console.print(summary(event, self._run))

    def _on_rows(self, source: str, done: int, total: int) -> None:
        if not self._is_live:
            return
        if self._bar is None:
            if done == total:  # it was quick
                return
            self._bar = self._begin_bar("preparing {task.description}", source, total, transient=True)
        self._bar.update(self._task, completed=done)
        if done == total:
            self.stop()

    def _begin_bar(self, title: str, task: str, total: int, *more: ProgressColumn, transient: bool) -> Bar:
        """Show a bar that counts to a total, with more columns before the time that is left."""
        counting = TextColumn(title, markup=False), MofNCompleteColumn(), BarColumn(bar_width=None)
        bar = Bar(
            *(*counting, *more, progress.TimeRemainingColumn()),
            console=self.console,
            expand=True,
            transient=transient,
            redirect_stdout=transient,
            redirect_stderr=transient,
        )
        self._task = bar.add_task(task, total=total, numbers="")
        bar.start()
        return bar

    def stop(self) -> None:
        """Take the bar away, if there is one."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def _is_live(self) -> bool:
        return self.console.is_terminal or self.console.is_jupyter

    def _on_phase(self, phase: str) -> None:
        if phase == "training" and self._is_live:
            more = TextColumn("{task.fields[numbers]}"), progress.TimeElapsedColumn(), TextColumn("left")
            self._bar = self._begin_bar("step", "", self._num_steps, *more, transient=False)
        else:
            self.stop()
        if phase == "loading":
            self.console.print(Text("loading the model", style="dim"))

    def _on_restart(self, event: Event) -> None:
        self.stop()
        words = f"{event['reason']}\nrestart {event['attempt']} from step {event['step']}"
        self.console.print(Text(words, style="yellow"))

    def _on_resume(self, event: Event) -> None:
        for words in event["skipped"]:
            self.console.print(Text(f"skipped {words}", style="yellow"))
        words = f"resuming from step {event['step']}"
        if event.get("weights_only"):
            words = f"starting from the weights of {event['path']}"
        self.console.print(Text(words, style="dim"))

    def _on_log(self, event: Event) -> None:
        figures = [f"loss {number(float(event['loss']), '.4f')}"] if self._shows_loss else []
        figures += [*brief(event), f"lr {event['learning_rate']:.2e}"]
        if event["tokens_per_second"]:
            figures.append(f"{event['tokens_per_second']:,.0f} tokens/s")
        step = event["step"]
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=_fitting(figures, self.console.width - BAR_COLUMNS))
        elif step in (1, self._num_steps) or step % max(1, self._num_steps // PLAIN_LINES) == 0:
            head = f"step {step}/{self._num_steps}  "
            self.console.print(head + _fitting(figures, self.console.width - len(head)))

    def _on_eval(self, event: Event) -> None:
        figures = [f"loss {number(float(event['eval_loss']), '.4f')}"] if self._shows_loss else []
        accuracy, measures = event.get("eval_mean_token_accuracy"), brief(event, "eval_")
        if not measures and accuracy is not None:
            measures = [f"token accuracy {accuracy:.1%}"]
        head = f"step {event['step']}/{self._num_steps}  eval "
        self.console.print(head + _fitting([*figures, *measures], self.console.width - len(head)))


def _fitting(told: Sequence[str], width: int) -> str:
    """As much of what is told as fits, the most important first."""
    line = told[0] if told else ""
    for more in told[1:]:
        if len(line) + 2 + len(more) > width:
            break
        line += f"  {more}"
    return line


def queue_words(event: Event) -> str:
    """Describe what a run waits for, and its position in the queue."""
    return f"queued for {', '.join(event['devices'])}, position {event['place']}, behind {', '.join(event['behind'])}"


def hosts_words(hosts: Sequence[Event]) -> str:
    """The hosts of a run, with the way by which each reaches the others."""
    ways = ((host["name"], [host["interface"] or "", *host["infiniband"]]) for host in hosts)
    return "hosts  " + ", ".join(f"{name} ({' '.join(filter(None, way)) or 'no interface'})" for name, way in ways)


def summary(result: Event, run: Run) -> RenderableType:
    """Render the result of a finished run: numbers, then answers before and after.

    Runs of earlier versions told less: no `measures`, `ranks` and `mfu`, and no time of any part.
    """
    table = plain_table(Column(style="bold", no_wrap=True), Column(), gap=2, shows_header=False)
    measures, ranks = result.get("measures", {}), result.get("ranks", [])
    # Where answers are rewarded, the loss is near zero whatever is learned.
    if result["first_loss"] is not None and "reward" not in measures:
        table.add_row("loss", f"{result['first_loss']:.4f} → {result['last_loss']:.4f}")
    if result["eval_loss"] is not None and "reward" not in measures:
        table.add_row("eval loss", f"{result['first_eval_loss']:.4f} → {result['eval_loss']:.4f}")
    evaluated = "eval " * (result["eval_loss"] is not None)
    for label, words in rows_of(measures):
        table.add_row(f"{evaluated}{label}", words)
    if result["tokens_per_second"]:
        together = f" over {len(ranks)} processes" if len(ranks) > 1 else ""
        mfu = "" if result.get("mfu") is None else f", MFU {result['mfu']:.1%}"
        tokens = f"{result['num_tokens']:,} tokens in {duration(result['step_seconds'])} of training steps"
        table.add_row("throughput", f"{result['tokens_per_second']:,.0f} tokens/s{together}{mfu} ({tokens})")
        table.add_row("time", _time_words(result))
    if result.get("generation_seconds") is not None:
        table.add_row("generation", _generation_words(result, run.plan.speed))
    # A run that resumed after its last step had none to wait in.
    if len(ranks) > 1 and all(rank["step_seconds"] for rank in ranks):
        shares = [rank["wait_seconds"] / rank["step_seconds"] for rank in ranks[:MAX_RANKS]]
        waited = ", ".join(f"rank {rank} {share:.0%}" for rank, share in enumerate(shares))
        more = f" ({len(ranks) - MAX_RANKS} more in events.jsonl)" if len(ranks) > MAX_RANKS else ""
        table.add_row("waiting", f"at least {waited} of the step time, for the slowest rank{more}")
        traced = [rank for rank in ranks if rank.get("communication_step") is not None]
        if traced:
            table.add_row("communication", _exchange_words(traced))
    if result.get("checkpoints") is not None:
        for label, words in _checkpoint_rows(result["checkpoints"], result["seconds"]):
            table.add_row(label, words)
    if result.get("stopped_early") is not None:
        table.add_row("end", result["stopped_early"])
    sizes = [rank["peak_memory_bytes"] for rank in ranks] or [result["peak_memory_bytes"]]
    peak = gib(max(sizes)) if len(sizes) == 1 else f"{gib(min(sizes))} to {gib(max(sizes))} per process"
    table.add_row("peak memory", f"{peak} (planned {gib(result['planned_memory_bytes'])})")
    table.add_row("model", f"{result['model']}{_of_step(result, run)}")
    return Group("", table, *samples_table(run), *contrast_table(run))


def _checkpoint_rows(found: Event, seconds: float) -> Iterator[tuple[str, str]]:
    """The best evaluation, and what checkpoints cost where that is a notable share of the run."""
    best = found["best"]
    if best is not None:
        yield "best", f"{best['metric']} {best['value']:.4f} at step {best['step']:,}"
    share = found["wait_seconds"] / seconds if seconds else 0.0
    if share >= NOTABLE_SHARE:
        each = gib(found["bytes"] / found["num"])
        waited = f"training waited {duration(found['wait_seconds'])}, {share:.0%} of the time"
        yield "checkpoints", f"{found['num']} of {each} each; {waited}"


def _of_step(result: Event, run: Run) -> str:
    """Tell the step of the result of a run that stopped early, and how to get the best model; empty of others."""
    step, best = run.status()["step"], (result.get("checkpoints") or {}).get("best")
    if result.get("stopped_early") is None or best is None or best["step"] == step:
        return ""
    command = shlex.join(["tunekit", "export", str(run.path), "--checkpoint", str(best["step"])])
    return f", of step {step:,}; for the best, of step {best['step']:,}: {command}"


def _time_words(result: Event) -> str:
    """Describe where the time of a run went; only its duration where nothing else was recorded."""
    whole = result["seconds"]
    if "ranks" not in result:
        return duration(whole)
    computing = "forward and backward" if len(result["ranks"]) == 1 else "forward, backward and communication"
    generation = result.get("generation_seconds") or 0.0
    parts = {
        computing: result["step_seconds"] - result["optimizer_seconds"] - generation,
        **({"generation": generation} if generation else {}),
        "optimizer": result["optimizer_seconds"],
        "data": result["data_seconds"],
        "evaluation": result["evaluation_seconds"],
        "saving": result["saving_seconds"],
    }
    parts["loading and other"] = whole - sum(parts.values())
    shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts.items())
    return f"{duration(whole)}: {shares}"


def _generation_words(result: Event, planned: Speed | None) -> str:
    """Describe the share of generation in the steps, beside the planned share if it is known."""
    words = f"{result['generation_seconds'] / result['step_seconds']:.0%} of the step time"
    if planned is None or planned.generation_share is None:
        return words
    return f"{words} (planned {planned.generation_share.words(PERCENT)})"


def _exchange_words(ranks: Sequence[Event]) -> str:
    """Describe the share of collectives in a step."""
    share = range_of([rank["communication_share"] for rank in ranks]).words(PERCENT)
    words = f"{share} of step {ranks[0]['communication_step']} per process, measured by torch's profiler; "
    if ranks[0]["exposed_share"] is None:
        return words + "part of it may overlap with compute"
    return words + range_of([rank["exposed_share"] for rank in ranks]).words(PERCENT) + " not overlapped with compute"


def samples_table(run: Run) -> list[RenderableType]:
    """Answers before and after training; nothing where there are none."""
    samples = run.samples()
    if not samples:
        return []
    table = Table("prompt", "before", "after", title="answers", title_justify="left", expand=False)
    for sample in samples:
        table.add_row(*(Text(sample.get(part, "")) for part in ("prompt", "before", "after")))
    return ["", table]


def contrast_table(run: Run) -> list[RenderableType]:
    """The best and the worst of the answers that were generated last; nothing where none were."""
    answered_event = next((event for event in reversed(run.events()) if event["event"] == "completions"), None)
    if answered_event is None:
        return []
    title = f"answers of step {answered_event['step']} to: {_short(answered_event['prompt'])}"
    table = Table("", title=title, title_justify="left", expand=False)
    for name in answered_event["best"]["rewards"]:
        table.add_column(name, justify="right")
    table.add_column("answer")
    for which in ("best", "worst"):
        values = answered_event[which]["rewards"].values()
        formatted = ("none" if value is None else number(value, ".3g") for value in values)
        table.add_row(which, *formatted, Text(_short(answered_event[which]["answer"])))
    return ["", table]


def _short(text: str) -> str:
    """A text on one line, cut."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_LETTERS else line[:SHOWN_LETTERS] + " [...]"


def runs_table(runs: Sequence[Run]) -> RenderableType:
    """Runs with their state, step, and the last of what they are judged by."""
    table = plain_table("run", "state", "step", "last", "started", "tags")
    for run in runs:
        try:
            table.add_row(*_cells(run))
        except TunekitError as error:
            table.add_row(Text(run.name), Text("unreadable", style="red"), "", Text(error.problem))
    return table


def _cells(run: Run) -> list[RenderableType]:
    """Return a run's cells in the table."""
    status, state = run.status(), run.state
    logs = [event for event in last_events(run.path / "events.jsonl") if event["event"] == "log"]
    learned = judged_by([name for log in logs for name in log])
    values = [log[learned] for log in logs if isinstance(log.get(learned), int | float | str)]
    style = {"finished": "green", "failed": "red", "died": "red", "interrupted": "yellow"}.get(state, "cyan")
    return [
        Text(run.name),
        Text(state, style=style),
        f"{status['step']}/{status['num_steps']}",
        f"{words_of(learned)} {number(float(values[-1]), '.4f')}" if values else "",
        f"{datetime.fromtimestamp(status['started']):%Y-%m-%d %H:%M:%S}",
        Text(", ".join(run.tags)),
    ]


def run_report(run: Run, width: int) -> list[RenderableType]:
    """A run: how it stands, its loss curve, its summary."""
    status = run.status()
    head = Text.assemble((run.name, "bold"), f": {run.state}, step {status['step']} of {status['num_steps']}")
    if status.get("comes_from"):
        head.append(f"\n{status['comes_from']}", style="dim")
    if run.tags:
        head.append(f"\ntags: {', '.join(run.tags)}", style="dim")
    if run.note:
        head.append(f"\nnote: {run.note}", style="dim")
    head.append(_why_not_finished(run, status["exit_reason"]))
    next_words = prospects(run)
    if next_words is not None:
        head.append(f"\n{next_words}", style="dim")
    parts: list[RenderableType] = [head, ""]
    curve = loss_curve(run, width)
    if curve:
        parts.append(Text(curve))
    result = run.result()
    parts.append(summary(result, run) if result else "")
    return [*parts, *evaluations_table(evaluations_of(run))]


def _why_not_finished(run: Run, reason: str | None) -> Text:
    """Render why a run ended early and the remedy; empty where neither is known."""
    diagnosis = diagnose_run(run)
    if diagnosis is None:
        return Text(f"\n{reason}" if reason and run.state != "finished" else "", style="red")
    words = Text(f"\n{diagnosis.what}", style="red")
    if diagnosis.hint is not None:
        words.append(f"\n{diagnosis.hint}")
    if diagnosis.changes:
        again = begin_anew(run, diagnosis.changes)
        if diagnosis.can_go_on:
            again = shlex.join(["tunekit", "resume", str(run.path), *diagnosis.changes])
        words.append(f"\ntry: {again}", style="bold not red")
    return words


def loss_curve(run: Run, width: int) -> str:
    """Draw the metric that a run is judged by over its steps as terminal text; empty while nothing was logged."""
    metrics = run.metrics()
    if metrics.empty:
        return ""
    learned = judged_by(metrics.columns.tolist())
    held_out, words = f"eval_{learned}", words_of(learned)
    title = f"training {words}" + (f" (line), eval {words} (o)" if held_out in metrics else "")
    markers = {learned: "braille", held_out: "o"}
    drawn = [(metrics[name].dropna(), marker) for name, marker in markers.items() if name in metrics]
    return plotted(
        title, min(width, 100), 18, [(list(zip(series.index, series, strict=True)), marker) for series, marker in drawn]
    )


def coverage_table(report: "Report") -> RenderableType:
    """Render the modules of a model that are fused, and those that are not with the reason."""
    table = plain_table("module", *numbers("number"), "kernel", "difference from the original, or why there is none")
    for line in report.lines:
        kernel = Text(line.form or "none", style="green" if line.is_fused else "yellow")
        remark = line.reason or (f"rounding, {line.difference:.1g} of a row" if line.difference else "nothing")
        table.add_row(line.module, str(line.num_modules), kernel, remark)
    return table


def diagnosis_table(diagnosis: Diagnosis) -> RenderableType:
    """Versions, devices, and what is missing for which feature."""
    machine = plain_table(shows_header=False)
    machine.add_row("tunekit", diagnosis.tunekit)
    machine.add_row("python", f"{diagnosis.python}, {diagnosis.system}")
    hardware = diagnosis.hardware
    if hardware is not None and hardware.cpu is not None:
        free, total = gib(hardware.cpu.memory_free_bytes), gib(hardware.cpu.memory_total_bytes)
        cores = "1 core" if hardware.num_cores == 1 else f"{hardware.num_cores} cores"
        machine.add_row("CPU", f"{hardware.cpu.name}, {cores}")
        machine.add_row("memory", f"{free} of {total} free")
        machine.add_row("nodes", str(hardware.num_nodes))
        if hardware.note:
            machine.add_row("note", hardware.note)
    if diagnosis.problem:
        machine.add_row("problem", Text(diagnosis.problem, style="red"))
    packages = plain_table("package", "installed", "wanted", "")
    for package in diagnosis.packages:
        style = {"ok": "green", "absent": "dim"}.get(package.state, "red")
        bounds = package.bounds or "any"
        packages.add_row(package.name, Text(package.version or package.state, style=style), bounds, package.hint or "")
    features = plain_table("feature", "", "", "how to install")
    for feature in diagnosis.features:
        mark = Text("yes", style="green") if feature.available else Text("no", style="yellow")
        features.add_row(feature.name, mark, feature.detail, feature.hint or "")
    parts: list[RenderableType] = [machine, "", packages, "", features]
    if hardware is not None and (hardware.accelerators or hardware.unused):
        parts[1:1] = ["", _accelerator_table(hardware)]
    return Group(*parts)


def exchange_table(exchange: Exchange) -> RenderableType:
    """Render the measured bandwidth between ranks beside the rate of their slowest link."""
    link = exchange.expected
    expected = "unknown" if link is None else f"{link.low / 1e9:.3g} to {link.high / 1e9:.3g} GB/s"
    table = plain_table("collective", *numbers("size", "time", "bus bandwidth", "expected"))
    for measurement in exchange.measured:
        kib = measurement.size_bytes / 2**10
        size = f"{kib / 2**10:g} MiB" if kib >= 2**10 else f"{kib:g} KiB"
        speed = f"{measurement.bus_bytes_per_second / 1e9:.3g} GB/s"
        table.add_row(measurement.collective, size, f"{measurement.seconds * 1e3:.3g} ms", speed, expected)
    ranks = Text(f"{exchange.num_ranks} ranks, {exchange.backend}", style="bold")
    return Group(ranks, hosts_words(exchange.hosts), "", table)


def _accelerator_table(hardware: Hardware) -> Table:
    """The accelerators of this node."""
    table = plain_table("accelerator", *numbers("free memory", "total"), "capability", "link", "used")
    for device in (*hardware.accelerators, *hardware.unused):
        capability = device.gfx or ".".join(map(str, device.compute_capability or ()))
        table.add_row(
            device.name,
            gib(device.memory_free_bytes),
            gib(device.memory_total_bytes),
            capability,
            device.link or "",
            "yes" if device in hardware.accelerators else "no",
        )
    return table
