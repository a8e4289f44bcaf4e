"""Plans as they are seen: what stands in them, and that they keep to the terminal."""

import io
import re

import pytest
from rich.console import Console

from tests.planner.golden import ROWS, known_facts, recipe
from tunekit.display.plan import LETTERS, LIMIT, OTHERS, comparison_table, plan_view, variants_table
from tunekit.errors import PlanError
from tunekit.estimates.facts import Hardware
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.layout import Layout
from tunekit.planner.plan import COLOURS, NO_TENSORS, Rejected, gib
from tunekit.planner.resolve import resolve
from tunekit.planner.variants import Variant, Variants

GIB = 2**30


def hardware(machine: str) -> Hardware:
    return find_machine(machine).hardware()


def planned(model: str, machine: str, **sections):
    sections.setdefault("train", {"global_batch_size": 64, "max_steps": 1000})
    asked = recipe(model=model, data={"max_length": 2048}, **sections)
    return resolve(asked, hardware(machine), known_facts(model), ROWS)


@pytest.fixture(scope="module")
def plans():
    return {
        "8xh100": planned("meta-llama/Llama-3.1-8B", "8xh100", adapter="full"),
        "4x8xh200": planned("Qwen/Qwen2.5-14B-Instruct", "4x8xh200", adapter="full"),
        "rtx4090": planned("Qwen/Qwen3-8B", "rtx4090", adapter="qlora"),
        "t4": planned("Qwen/Qwen3-0.6B", "t4"),
    }


def test_what_vllm_takes_is_drawn_without_colours():
    plan = planned("Qwen/Qwen3-0.6B", "h100", method={"type": "grpo", "generation": {"use_vllm": True}})
    assert "vllm" in plan.memory.parts
    drawn = io.StringIO()
    Console(file=drawn, width=120, color_system=None).print(plan_view(plan))
    assert f"v vllm {gib(plan.memory.parts['vllm'])}" in drawn.getvalue()


@pytest.fixture(scope="module")
def refused():
    """The refusals of a machine that is too small, and of one that cannot train at all."""
    with pytest.raises(PlanError) as too_small:
        planned("meta-llama/Llama-3.1-8B", "t4", adapter="full", parallel={"strategy": "single"})
    return {"t4": too_small.value, "tpu-v5p": PlanError("tunekit supports CUDA devices only", hint="plan for another")}


@pytest.fixture(scope="module")
def offloaded(plans):
    """A plan that needs main memory and a disk too, and has looked at a layout that something else ruled out."""
    plan = plans["8xh100"]
    memory = plan.memory.model_copy(
        update={"host_bytes": 480 * GIB, "nvme_bytes": 96 * GIB, "confidence": "closed form"}
    )
    other = Rejected(layout=Layout(strategy="zero3", dp_shard_size=8), why="no DeepSpeed here")
    return plan.model_copy(
        update={"memory": memory, "rejected": (*plan.rejected, other), "change_first": "less: 1 GiB"}
    )


def drawn(what, width=100, *, colour=False) -> str:
    out = io.StringIO()
    colours = "truecolor" if colour else None
    console = Console(file=out, width=width, force_terminal=colour, color_system=colours, highlight=False)
    console.print(what, crop=False)
    return out.getvalue()


def lines(what, width=100) -> list[str]:
    return drawn(what, width).splitlines()


def bar_of(plan, width=100) -> str:
    return next(line for line in lines(plan_view(plan), width) if LIMIT in line)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_nothing_is_wider_than_the_terminal(plans, refused, offloaded, width):
    variants = Variants(
        plans["t4"].recipe,
        tuple(
            Variant(machine, {"model.path": plan.recipe.model.path, "train.global_batch_size": 64}, plan, "largest")
            for machine, plan in plans.items()
        ),
    )
    views = [*map(plan_view, (*plans.values(), offloaded)), comparison_table(plans | refused), variants_table(variants)]
    for view in views:
        assert max(map(len, lines(view, width))) <= width


def test_the_first_lines_say_what_fits_where_how_fast_and_for_how_much(plans):
    first, second, basis = lines(plan_view(plans["8xh100"]))[:3]
    assert (
        first.rstrip() == "full on meta-llama/Llama-3.1-8B fits on 8 x H100 SXM 80 GB: " + plans["8xh100"].layout.name
    )
    assert re.match(r"[\d.]+ of 73\.3 GiB per device; [\d,]+ to [\d,]+ tokens/s, .* USD", second)
    assert "estimate: " in basis
    nodes = lines(plan_view(plans["4x8xh200"]), 200)[0]
    assert "32 x H200" in nodes and "in 4 nodes" in nodes


def test_without_colour_each_part_of_memory_is_as_long_as_its_share_of_the_card(plans):
    for plan in plans.values():
        bar = bar_of(plan)
        for part, size in plan.memory.parts.items():
            share = size / plan.device.memory_total_bytes * len(bar)
            assert abs(bar.count(LETTERS[part]) - share) <= 1, part
        limit = plan.memory_limit_bytes / plan.device.memory_total_bytes * len(bar)
        assert abs(bar.index(LIMIT) - limit) <= 1


def test_the_mark_below_the_bar_stands_under_the_limit(plans):
    found = lines(plan_view(plans["rtx4090"]))
    at = found.index(bar_of(plans["rtx4090"]))
    assert found[at + 1].index("▲") == found[at].index(LIMIT)
    assert "free of the 22.1 GiB limit (device: 24.0 GiB)" in found[at + 1]


def test_in_colour_the_bar_has_the_colours_of_its_legend(plans):
    plan = plans["8xh100"]
    picture = drawn(plan_view(plan), colour=True)
    for part, size in plan.memory.parts.items():
        red, green, blue = (int(COLOURS[part][at : at + 2], 16) for at in (1, 3, 5))
        if size > plan.device.memory_total_bytes / 100:  # a column
            assert re.search(rf"\x1b\[38;2;{red};{green};{blue}m█+", picture), part
        assert f"\x1b[38;2;{red};{green};{blue}m■\x1b[0m {part} " in picture


def test_tensors_and_what_is_no_tensor_are_told_apart(plans):
    plan = plans["8xh100"]
    text = drawn(plan_view(plan))
    tensors, _, others = text.partition("\nother")
    for part, size in plan.memory.parts.items():
        assert f"{LETTERS[part]} {part} {gib(size)}" in (others if part in NO_TENSORS else tensors)
    assert f"{gib(plan.memory.tensor_bytes)} of tensors, {plan.memory.peak_words} ({plan.memory.confidence})" in tensors


def test_memory_of_other_programs_is_not_free():
    whole = hardware("rtx4090")
    device = whole.device.model_copy(update={"memory_free_bytes": 12 * GIB})
    busy = whole.model_copy(update={"accelerators": (device,)})
    asked = recipe(model="Qwen/Qwen3-0.6B", data={"max_length": 512})
    bar = bar_of(resolve(asked, busy, known_facts("Qwen/Qwen3-0.6B"), ROWS))
    assert abs(bar.count(OTHERS) - 50) <= 1
    assert bar.endswith(OTHERS)


def test_what_was_ruled_out_is_told_with_its_number_and_what_to_change_first(offloaded):
    text = drawn(plan_view(offloaded))
    for one in offloaded.rejected:
        assert re.search(rf"^{re.escape(one.layout.name)} +{re.escape(one.why)}", text, re.MULTILINE)
    assert gib(offloaded.rejected[0].needed_bytes) in text
    assert "if memory runs out  less: 1 GiB" in text
    assert re.search(r"^host memory +480\.0 GiB per node", text, re.MULTILINE)
    assert re.search(r"^disk +96\.0 GiB per node", text, re.MULTILINE)


def test_every_decision_has_a_row_with_its_reason(plans):
    for plan in plans.values():
        text = " ".join(drawn(plan_view(plan), 200).split())
        for reason in (*plan.decisions, *plan.given):
            assert " ".join(f"{reason.topic} {reason.choice}".split()) in text
        shown = {reason.topic for reason in (*plan.decisions, *plan.given)} | {"speed"}
        assert shown == {reason.topic for reason in plan.reasons}


def test_machines_stand_below_each_other_with_their_price_an_hour(plans):
    text = drawn(comparison_table(plans), 140)
    assert text.split("\n")[0].split()[-5:] == ["batch", "tokens/s", "time", "USD", "USD/h"]
    row = next(line for line in text.splitlines() if line.startswith("8xh100"))
    assert re.search(r"[\d.]+ of 73\.3 .*\d+ x \d+ x 8 +[\d.,k]+–[\d.,k]+ ", row)
    assert "ruled out: DDP (" in text


def test_a_machine_that_is_too_small_says_by_how_much_and_what_would_fit(plans, refused):
    text = drawn(comparison_table({"8xh100": plans["8xh100"], **refused}))
    error = refused["t4"]
    needed, limit = error.needed_bytes / GIB, error.limit_bytes / GIB
    assert re.search(rf"^t4 +does not fit +{needed:.0f} of {limit:.1f}", text, re.MULTILINE)
    assert re.search(rf"^t4 +{re.escape(error.hint.splitlines()[0])}", text, re.MULTILINE)
    assert re.search(r"^tpu-v5p +none, see below", text, re.MULTILINE)
    assert re.search(r"^tpu-v5p +tunekit supports CUDA devices only; plan for another", text, re.MULTILINE)


def test_main_memory_is_a_figure_where_a_plan_needs_it(plans, offloaded):
    assert "host" not in drawn(comparison_table({"rtx4090": plans["rtx4090"]}), 140)
    text = drawn(comparison_table({"big": offloaded, "rtx4090": plans["rtx4090"]}), 140)
    assert text.split("\n")[0].split()[2:5] == ["GiB", "host", "GiB"]
    assert re.search(r"^big .* of 73\.3 +480 +\d", text, re.MULTILINE)


def test_figures_that_have_no_room_are_named(plans):
    changes = {f"train.{name}": 1 for name in ("seed", "logging_steps", "eval_steps", "save_steps")}
    variants = Variants(plans["t4"].recipe, (Variant("rtx4090", changes, plans["8xh100"]),))
    assert "widen the terminal to show" in drawn(variants_table(variants), 60)
    assert "widen the terminal" not in drawn(variants_table(variants), 140)


def test_what_holds_for_several_variants_is_said_once(plans):
    error = PlanError("too much", hint="take less", needed_bytes=2 * GIB, limit_bytes=GIB)
    rows = tuple(Variant(None, {"data.max_length": length}, error) for length in (1024, 2048))
    text = drawn(variants_table(Variants(plans["t4"].recipe, rows)))
    assert text.count("take less") == 1
    assert re.search(r"^1024 +take less *\n2048 *$", text, re.MULTILINE)


def test_a_notebook_draws_the_same_and_escapes_names(offloaded):
    odd = offloaded.recipe.model_copy(update={"model": offloaded.recipe.model.model_copy(update={"path": "<b>odd"})})
    page = offloaded.model_copy(update={"recipe": odd})._repr_html_()
    assert "full on &lt;b&gt;odd fits on 8 x H100 SXM 80 GB" in page and "<b>odd" not in page
    for part, size in offloaded.memory.parts.items():
        assert f"{part} {gib(size)}" in page and COLOURS[part] in page
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", page)]
    assert sum(widths) == pytest.approx(
        100 * offloaded.memory.total_bytes / offloaded.device.memory_total_bytes, abs=0.1
    )
    for words in ("host memory: 480.0 GiB per node", "no DeepSpeed here", "less: 1 GiB", offloaded.figures):
        assert words in page


def test_a_plan_as_text_has_all_of_it(offloaded):
    text = str(offloaded)
    assert text.startswith(offloaded.headline + "\n" + offloaded.figures)
    for words in (
        offloaded.memory_line(),
        "disk: 96.0 GiB per node",
        "no DeepSpeed here",
        "if memory runs out: less",
    ):
        assert words in text
    for reason in offloaded.reasons:
        assert reason.why in text


def test_completion_lists_a_plans_own_names(plans):
    names = [name for name in dir(plans["rtx4090"]) if not name.startswith("_")]
    assert {"headline", "memory", "decisions", "to_yaml"} <= set(names)
    assert not {"parse_obj", "model_dump", "from_orm", "dict"} & set(names)
