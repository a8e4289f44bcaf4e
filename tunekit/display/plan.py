"""Plans in a terminal, drawn by rich: one plan, or many of them as rows of a table.

A plan begins with the choice, then shows memory as a bar of its parts against the card. Where there is no color, the
bar is drawn in letters, one for each part.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from tunekit.api.chain import Chain
from tunekit.errors import PlanError
from tunekit.estimates.memory.memory import Part
from tunekit.estimates.throughput.speed import duration
from tunekit.estimates.throughput.step import Range
from tunekit.planner.plan import COLOURS, NO_TENSORS, Plan, Reason, gib
from tunekit.planner.variants import NEXT, Variants, to_words
from tunekit.recipe.reading.parse import to_inline_yaml

MAX_WIDTH = 120
"""Columns that a plan takes at most: longer lines are hard to read."""

GAP = 2
"""Columns between those of a table."""

TOPIC_WIDTH = len("checkpointing")
"""Columns of the names of rows, so that tables below each other stand in line."""

CHOICE_WIDTH = 40
"""Columns that what was chosen takes at most; the reason has the rest."""

FIGURES = ("GiB", "host GiB", "batch", "tokens/s", "time", "USD", "USD/h")
"""Columns of the figures of plans that are rows: what a device and what its node need, the batch, speed, time, cost and
price. Those that no plan has are left out."""

RANKED = ("GiB", "host GiB", "tokens/s", "time", "USD", "USD/1M")
"""The same of ranked recipes, with the price of a million tokens where that of the run is not known."""

LAYOUT_WIDTH = len("checkpointing")
"""Columns that layouts keep: their longest word."""

NAME_WIDTHS = (60, 24, 16, 12)
"""Columns that a long name of a row takes, the fewer the narrower the terminal."""

BELOW_WIDTH = 32
"""Columns of the name of what more is said of below a table."""

HEADING_WIDTH = 12
"""Columns that the name of a field takes in a heading."""

LITTLE = "<0.01"
"""Text for figures below this threshold."""

BRIEF = ("starts from", "batch", "optimizer", "steps", "data")
"""Topics of a plan in short, which is printed before a run."""

LETTERS: Mapping[Part, str] = dict(zip(COLOURS, "wmdogbalprkvcx", strict=True))
"""Letter for each part of memory where there is no color, in the order of COLOURS."""

FREE, OTHERS, LIMIT = "·", "░", "│"
"""Symbols for free memory, for memory of other programs, and for the limit."""


def plan_view(plan: Plan) -> RenderableType:
    """A plan: the choice, memory by part, each decision with its reason, what was ruled out, what to change first."""
    parts: list[RenderableType] = [Text(plan.headline, style="bold"), Text(plan.figures, style="bold cyan")]
    parts += [Text(plan.speed_basis, style="dim"), *_advice(plan), "", MemoryBar(plan), ""]
    parts.append(_decisions(plan.decisions))
    if plan.rejected:
        parts += ["", Text("ruled out, in the order tried", style="bold"), _rejected(plan)]
    if plan.change_first:
        parts += ["", Text.assemble(("if memory runs out  ", "bold"), (plan.change_first, "cyan"))]
    return Constrain(Group(*parts, "", _given(plan.given), ""), MAX_WIDTH)


def brief_plan_view(plan: Plan) -> RenderableType:
    """The choice, and the decisions that users change most; `plan_view` has all of them."""
    parts: list[RenderableType] = [Text(plan.headline, style="bold"), Text(plan.figures, style="bold cyan")]
    parts += [Text(plan.speed_basis, style="dim"), *_advice(plan)]
    brief = _decisions(reason for reason in plan.decisions if reason.topic in BRIEF)
    return Constrain(
        Group(*parts, "", brief, _given(reason for reason in plan.given if reason.topic in BRIEF)), MAX_WIDTH
    )


def _advice(plan: Plan) -> Iterator[RenderableType]:
    """Yield the better recipes for the machine, where there are any."""
    for reason in plan.advice:
        yield Text.assemble((f"advice  {reason.choice}", "bold yellow"), f": {reason.why}")


class MemoryBar:
    """The memory of one device as a bar of parts, with what may be used of it, and a legend."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scale_bytes = max(plan.device.memory_total_bytes, plan.memory.total_bytes)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        in_colour = console.color_system is not None and not console.no_color
        width = options.max_width
        yield self._bar(width, in_colour=in_colour)
        yield self._limit(width)
        yield self._legend(in_colour=in_colour)

    def _bar(self, width: int, *, in_colour: bool) -> Text:
        """Parts one behind the other, free memory, and what other programs hold."""
        cells = [(FREE, "dim")] * width
        free = self._cell(self.plan.device.memory_free_bytes, width)
        cells[free:] = [(OTHERS, "dim")] * (width - free)
        begin = end = 0
        for part, size in self._parts():
            end += size
            first, last = self._cell(begin, width), self._cell(end, width)
            drawn = ("█", COLOURS[part]) if in_colour else (LETTERS[part], "")
            cells[first:last] = [drawn] * (last - first)
            begin = end
        cells[self._limit_cell(width)] = (LIMIT, "bold")
        return Text.assemble(*cells)

    def _limit(self, width: int) -> Text:
        """Render the usable limit below its position in the bar, on the side that has room."""
        limit, total = self.plan.memory_limit_bytes, self.plan.device.memory_total_bytes
        free = gib(max(0, limit - self.plan.memory.total_bytes))
        words = f"{free} free of the {gib(limit)} limit (device: {gib(total)})"
        place = self._limit_cell(width)
        line = f"{words} ▲" if len(words) + 1 <= place else f"{' ' * place}▲ {words}"
        return Text(line.rjust(place + 1), style="dim")

    def _legend(self, *, in_colour: bool) -> Table:
        memory = self.plan.memory
        tensors = [entry for entry in self._parts() if entry[0] not in NO_TENSORS]
        others = [entry for entry in self._parts() if entry[0] in NO_TENSORS]
        table = _grid(2)
        where = f"{gib(memory.tensor_bytes)} of tensors, {memory.peak_words}"
        table.add_row("memory", Text.assemble(where, (f" ({memory.confidence})", "dim")))
        table.add_row("", Text(self.plan.memory_basis, style="dim"))
        table.add_row("", _key(tensors, in_colour=in_colour))
        table.add_row("other", _key(others, in_colour=in_colour))
        for line in self.plan.elsewhere_lines():
            name, _, size = line.partition(": ")
            table.add_row(name, size)
        return table

    def _parts(self) -> Iterator[tuple[Part, int]]:
        """Parts in the order in which they are drawn."""
        return ((part, size) for part, size, _ in self.plan.drawn_parts())

    def _cell(self, size_bytes: int, width: int) -> int:
        return round(size_bytes / self.scale_bytes * width)

    def _limit_cell(self, width: int) -> int:
        return min(self._cell(self.plan.memory_limit_bytes, width), width - 1)


def _key(parts: Iterable[tuple[Part, int]], *, in_colour: bool) -> Columns:
    """Render the legend: each part's symbol and its size."""
    entries = (
        Text.assemble(("■", COLOURS[part]) if in_colour else (LETTERS[part], "bold"), f" {part} {gib(size)}")
        for part, size in parts
    )
    return Columns(entries, padding=(0, 3, 0, 0))


def _grid(num_columns: int) -> Table:
    """A table without lines, its first column the name of the row."""
    table = Table(box=None, show_header=False, padding=(0, GAP, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True, min_width=TOPIC_WIDTH)
    for _ in range(num_columns - 1):
        table.add_column(overflow="fold")
    return table


def _given(reasons: Iterable[Reason]) -> Table:
    """Render given facts: they involve no choice, so value and comment share a line."""
    table = _grid(2)
    for reason in reasons:
        table.add_row(Text(reason.topic), Text.assemble(reason.choice, (f"; {reason.why}", "dim")))
    return table


def _decisions(reasons: Iterable[Reason]) -> Table:
    table = _grid(3)
    table.columns[1].max_width = CHOICE_WIDTH
    for reason in reasons:
        table.add_row(Text(reason.topic), Text(reason.choice, style="cyan"), Text(reason.why, style="dim"))
    return table


def _rejected(plan: Plan) -> Table:
    table = _grid(2)
    for rejected in plan.rejected:
        table.add_row(
            Text(rejected.layout.name), Text(rejected.why, style="dim" if rejected.needed_bytes is None else "red")
        )
    return table


def comparison_table(plans: Mapping[str, Plan | PlanError]) -> RenderableType:
    """Plans for several machines as rows; below them what was ruled out on each, or why nothing fits."""
    rows = [((name,), plan) for name, plan in plans.items()]
    return Group(PlanRows(("machine",), rows, FIGURES), *_below(plans.items()), "")


def chain_table(chain: Chain) -> RenderableType:
    """Plans of recipes that run one after another as rows; below them disk, time and cost in sum."""
    rows = [((link.name, link.start), link.plan) for link in chain]
    words = total_words(chain.seconds, chain.cost_usd, at_most=any(map(_are_bounds, chain.plans)))
    if chain.disk_bytes is not None:
        words += f", at most {gib(chain.disk_bytes)} of disk for all runs"
    return Group(PlanRows(("recipe", "starts from"), rows, FIGURES), "", Text(words, style="bold"), "")


def total_words(seconds: Range | None, cost: Range | None, *, at_most: bool = False) -> str:
    """Time and cost of several runs in words; their upper ends alone where they are upper bounds."""
    if seconds is None:
        return "time unknown"
    time = f"at most {duration(seconds.high)}" if at_most else seconds.words(duration)
    words = f"{time} of training in total"
    if cost is None:
        return words
    least = "at most " if at_most else f"{cost.low:,.2f} to "
    return f"{words}, {least}{cost.high:,.2f} USD"


def variants_table(variants: Variants) -> RenderableType:
    """Plans of one recipe with changes as rows; below them what is to be said of those that have none."""
    keys = list(dict.fromkeys(key for variant in variants for key in variant.changes))
    columns = {
        "": [variant.note for variant in variants],
        "machine": [variant.machine or "here" for variant in variants],
        **{_heading(key): [_word(variant.changes.get(key)) for variant in variants] for key in keys},
    }
    if not any(columns[""]):
        del columns[""]
    if len(set(columns["machine"])) == 1:
        del columns["machine"]
    rows = list(zip(zip(*columns.values(), strict=True), (variant.plan for variant in variants), strict=True))
    refused = [
        (", ".join(filter(None, names)), variant.plan)
        for (names, _), variant in zip(rows, variants, strict=True)
        # That the next larger value does not fit is what it was looked for.
        if isinstance(variant.plan, PlanError) and not (variant.note == NEXT and variant.plan.needed_bytes)
    ]
    return Group(PlanRows(tuple(columns), rows, FIGURES[:-1]), *_below(refused), "")


def ranking_table(variants: Variants) -> RenderableType:
    """Plans of one recipe with changes as ranked rows, each with its change in words; below them why some have none."""
    rows = [
        ((variant.note, variant.machine or "here", "\n".join(to_words(variant.changes)) or "-"), variant.plan)
        for variant in variants
    ]
    # Of what does not fit the row has the figures, and other rows what would.
    refused = [
        (f"{machine}, {change}", plan)
        for (_, machine, change), plan in rows
        if isinstance(plan, PlanError) and plan.needed_bytes is None
    ]
    return Group(PlanRows(("", "machine", "change"), rows, RANKED), *_below(refused), "")


def _heading(key: str) -> str:
    """A dotted key on several short lines."""
    section, _, name = key.rpartition(".")
    lines = wrap(name.replace("_", "_ "), HEADING_WIDTH)
    return "\n".join([f"{section}.", *(line.replace(" ", "") for line in lines)])


def _word(value: object) -> str:
    return "" if value is None else to_inline_yaml(value)


class PlanRows:
    """Plans as the rows of a table, so that their figures stand one below the other."""

    def __init__(
        self, names: Sequence[str], rows: Sequence[tuple[Sequence[str], Plan | PlanError]], figures: Sequence[str]
    ) -> None:
        """Give the names of the first columns, what each row has in them, and the figures to show if there are any."""
        self.names = names
        self.rows = [(words, _layout(plan), plan_figures(plan)) for words, plan in rows]
        self.figures = [name for name in figures if any(name in row for *_, row in self.rows)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        wide, *narrower = NAME_WIDTHS
        for name_width, layout_width, settings, in_one_line in (
            (wide, 2 * LAYOUT_WIDTH, self.figures, True),
            (narrower[0], LAYOUT_WIDTH, self.figures, True),
            *((name_width, LAYOUT_WIDTH, self.figures, False) for name_width in narrower),
            *((narrower[-1], LAYOUT_WIDTH, self.figures[:num], False) for num in range(len(self.figures) - 1, 0, -1)),
        ):
            table = self._table(name_width, settings, in_one_line=in_one_line)
            if sum((column.width or layout_width) + GAP for column in table.columns) - GAP <= options.max_width:
                break
        yield table
        if len(settings) < len(self.figures):
            yield Text(f"widen the terminal to show {', '.join(self.figures[len(settings) :])}", style="dim")

    def _table(self, name_width: int, shown: Sequence[str], *, in_one_line: bool) -> Table:
        """The table with names of some columns at most, some of the figures, and ranges on one line or on two."""
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        for position, name in enumerate(self.names):
            lines = [*name.split("\n"), *(words[position] for words, *_ in self.rows)]
            table.add_column(name, overflow="fold", width=min(max(map(len, lines)), name_width))
        table.add_column("layout", overflow="fold")
        rows = [[row.get(name, "") for name in shown] for *_, row in self.rows]
        if not in_one_line:
            rows = [[_broken(cell) for cell in row] for row in rows]
        for name, *cells in zip(shown, *rows, strict=True):
            lines = [line for cell in (name, *cells) for line in cell.split("\n")]
            table.add_column(name, justify="right", width=max(map(len, lines)))
        for (words, layout, _), figures in zip(self.rows, rows, strict=True):
            table.add_row(*(Text(name, style="bold") for name in words), layout, *map(Text, figures))
        return table


def _broken(figures: str) -> str:
    """Figures on two lines."""
    return figures.replace("–", "–\n").replace(" of ", " of\n")


def _layout(plan: Plan | PlanError) -> Text:
    """Render how the work is distributed, or that it is not."""
    if isinstance(plan, PlanError):
        return Text("none, see below" if plan.needed_bytes is None else "does not fit", style="red")
    return Text(plan.layout_words, style="green")


def _are_bounds(plan: Plan) -> bool:
    """Return whether the time and the cost of a plan are upper bounds, since its rows are not tokenized."""
    return not plan.data.has_lengths and not plan.recipe.data.packing


def plan_figures(plan: Plan | PlanError) -> dict[str, str]:
    """Return the known FIGURES of a plan in short form: memory and speed, or what did not fit."""
    if isinstance(plan, PlanError):
        needed, limit = plan.needed_bytes, plan.limit_bytes
        return {} if needed is None or limit is None else {"GiB": _memory(needed, limit)}
    figures = {"GiB": _memory(plan.memory.total_bytes, plan.memory_limit_bytes), "batch": plan.batch_words}
    if plan.memory.host_bytes:
        figures["host GiB"] = _figure(plan.memory.host_bytes / 2**30)
    speed, at_most = plan.speed, _are_bounds(plan)
    if speed is None or speed.tokens_per_second is None:
        return figures | {"tokens/s": "unknown"}
    figures["tokens/s"] = _span(speed.tokens_per_second)
    if speed.seconds is not None:
        unit, unit_seconds = _unit_of(speed.seconds.high)
        figures["time"] = f"{_span(speed.seconds, 1 / unit_seconds, at_most=at_most)} {unit}"
    if speed.seconds is None and speed.usd_per_million_tokens is not None:
        figures["USD/1M"] = _span(speed.usd_per_million_tokens)
    if speed.seconds is not None and speed.cost_usd is not None:
        figures["USD"] = _span(speed.cost_usd, at_most=at_most)
        figures["USD/h"] = f"{speed.cost_usd.high / speed.seconds.high * 3600:,.2f}"
    return figures


def _memory(needed_bytes: int, limit_bytes: int) -> str:
    return f"{_figure(needed_bytes / 2**30)} of {_figure(limit_bytes / 2**30)}"


def _span(span: Range, factor: float = 1, *, at_most: bool = False) -> str:
    """A range in few columns."""
    low, high = _figure(span.low * factor), _figure(span.high * factor)
    if low == high or high == LITTLE:
        return high
    return f"≤{high}" if at_most else f"{low}–{high}"


def _figure(number: float) -> str:
    """A number in few columns: `0.042`, `7.3`, `73.3`, `4,210`, `42.1k`."""
    if number >= 1e6:
        return f"{_figure(number / 1e6)}M"
    if number >= 1e4:
        return f"{_figure(number / 1e3)}k"
    if number < 0.01:
        return LITTLE
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2g}"


def _unit_of(seconds: float) -> tuple[str, float]:
    """The unit in which a time is told, and its seconds."""
    units = (("s", 1.0), ("min", 60.0), ("h", 3600.0))
    return next((unit for unit in units if seconds < 100 * unit[1]), ("days", 86400.0))


def _below(plans: Iterable[tuple[str, Plan | PlanError]]) -> Iterator[RenderableType]:
    """Yield notes on plans that are too long for a cell; a note that holds for several appears once."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, plan in plans:
        words = _words_below(plan)
        if words:
            names.setdefault((words, "red" if isinstance(plan, PlanError) else "dim"), []).append(name)
    table = _grid(2)
    table.columns[0].no_wrap, table.columns[0].max_width = False, BELOW_WIDTH
    for (words, style), alike in names.items():
        table.add_row(Text("\n".join(alike)), Text(words, style=style))
    if table.row_count:
        yield ""
        yield table


def _words_below(plan: Plan | PlanError) -> str:
    if isinstance(plan, Plan):
        ruled_out = (
            f"{rejected.layout.name} ({rejected.why if rejected.needed_bytes is None else gib(rejected.needed_bytes)})"
            for rejected in plan.rejected
        )
        return f"ruled out: {', '.join(ruled_out)}" if plan.rejected else ""
    # Where the row has the figures, what would fit is what is left to say.
    return str(plan) if plan.needed_bytes is None or plan.hint is None else plan.hint.partition("\n")[0]
