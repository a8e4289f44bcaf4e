"""The table of runs, one run, its logs, and the comparison: what they show of real folders, and in a real browser."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import gradio as gr
import pytest
import yaml

import tunekit
from tests.training.folders import made_run
from tests.waiting import LIMIT_SECONDS
from tests.webui.conftest import fill
from tunekit import frontend
from tunekit.runs.small_files import identity_of
from webui import compare, devices_view, log_view, run_parts, run_view, runs_table
from webui.charts import View
from webui.history import history_of
from webui.listing import Line, Listing, seconds_left
from webui.parallel import plot_of
from webui.runs_chosen import ChosenRuns
from webui.site import Site
from webui.words import Words

WORDS = Words("en")
SKIP = gr.skip()


def site_of(run: tunekit.Run) -> Site:
    return Site(run.path.parent.parent)


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def written(run: tunekit.Run, *entries) -> None:
    with (run.path / "events.jsonl").open("a", encoding="utf-8") as stream:
        for kind, fields in entries:
            stream.write(json.dumps({"event": kind, "time": time.time(), **fields}) + "\n")


def looked(site: Site, name: str, seen: str = "", order: str = "newest", overlaid=(), **view):
    looks = {"smoothing": 0.0, "is_log": False, "by": "step", "clip": False, **view}
    return run_view.look(site, WORDS, name, seen, order, *looks.values(), list(overlaid))


def test_runs_are_sorted_by_a_column_the_best_first():
    lines = [
        Line("new", "training"),
        Line("dpo", "finished", measure="rewards/margins", value=0.5, held_out=0.1, tokens_per_second=10.0),
        Line("better", "finished", value=1.5, held_out=2.5, tokens_per_second=30.0),
        Line("worse", "finished", value=2.5, held_out=2.0, tokens_per_second=20.0),
        Line("dpo-better", "finished", measure="rewards/margins", value=0.75),
    ]

    def names(by):
        return [line.name for line in runs_table.ordered(lines, by)]

    assert names("started") == names(None) == [line.name for line in lines]
    assert names("name") == ["better", "dpo", "dpo-better", "new", "worse"]
    assert names("measure") == ["better", "worse", "dpo-better", "dpo", "new"]
    assert names("held_out") == ["worse", "better", "dpo", "new", "dpo-better"]
    assert names("tokens_per_second") == ["better", "worse", "dpo", "new", "dpo-better"]
    rates = {"new": "2e-4", "dpo": "1e-5", "better": "auto", "worse": "0.001"}
    fields = {name: {"train.learning_rate": rate} for name, rate in rates.items()}
    by_rate = runs_table.ordered(lines, "train.learning_rate", fields)
    assert [line.name for line in by_rate] == ["dpo", "new", "worse", "better", "dpo-better"]


def test_a_run_is_listed_with_what_its_folder_says(trained_run):
    (line,) = Listing(trained_run.path.parent).lines()
    last = [event for event in trained_run.events() if event["event"] == "log"][-1]
    assert (line.name, line.state, line.method, line.model) == (trained_run.name, "finished", "sft", "pico")
    assert (line.step, line.num_steps, line.measure, line.value) == (8, 8, "loss", last["loss"])
    evaluated = [event for event in trained_run.events() if event["event"] == "eval"]
    assert line.held_out == (evaluated[-1]["eval_loss"] if evaluated else None)
    assert line.tokens_per_second == last["tokens_per_second"] and line.seconds_left is None and line.is_over


def test_what_is_no_run_is_not_listed_and_what_is_damaged_says_so(trained_run, tmp_path):
    runs = trained_run.path.parent
    (runs / "empty").mkdir()
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(trained_run.path / "status.json", tmp_path / "elsewhere")
    (runs / "linked").symlink_to(tmp_path / "elsewhere")
    (runs / "broken").mkdir()
    (runs / "broken" / "status.json").write_text('{"phase": "trai', encoding="utf-8")
    lines = {line.name: line.state for line in Listing(runs).lines()}
    assert lines == {trained_run.name: "finished", "broken": "unreadable"}
    site = site_of(trained_run)
    assert "unreadable" in runs_table.table_of(Listing(runs).lines(), site, WORDS)


def test_tags_and_words_find_runs():
    lines = [
        Line("first", "finished", "sft", "pico", tags=("good", "keep")),
        Line("second", "failed", "dpo", "Qwen/Qwen3-8B", tags=("good",)),
    ]

    def names(search="", states=(), tags=()):
        return [line.name for line in runs_table.found(lines, search, states, tags)]

    assert names() == ["first", "second"] and names("qwen DPO") == ["second"] == names(states=["failed"])
    assert names(tags=["good"]) == ["first", "second"] and names(tags=["good", "keep"]) == ["first"] == names("keep")
    assert names("first", states=["failed"]) == []


def test_without_runs_the_table_says_where_to_begin(workspace):
    page = runs_table.table_of([], Site(workspace), WORDS)
    assert "No runs in this folder" in page and "/new?from=recipe%3Asft%2Fquickstart" in page and "/data'" in page
    shown = runs_table.table_of([], Site(workspace, read_only=True), WORDS)
    assert "/new?" not in shown and "/data" not in shown and "tunekit ui --root FOLDER" in shown
    lines = [Line("one", "finished")]
    assert "None of 1 runs" in runs_table.table_of(lines, Site(workspace), WORDS, search="other")


@pytest.mark.slow
def test_filters_come_with_the_first_run(workspace, serve, open_page):
    from playwright.sync_api import expect

    page = open_page(f"{serve(workspace).url}runs")
    expect(page.locator(".runs-cards")).to_be_visible()
    filters = page.locator("#runs-find, #runs-columns-fold")
    assert [one.is_visible() for one in filters.all()] == [False, False]
    made_run(workspace / "runs" / "first")
    expect(page.locator("#runs-list a[id^=run-]")).to_have_text("first")
    assert [one.is_visible() for one in filters.all()] == [True, True]


@pytest.mark.slow
def test_the_browser_notifies_of_the_end_of_a_run_where_that_is_ticked(workspace, serve, open_page):
    from playwright.sync_api import expect

    waits, other = (made_run(workspace / "runs" / name, phase="queued") for name in ("waits", "other"))
    url = serve(workspace).url
    page = open_page(f"{url}data")
    page.context.grant_permissions(["notifications"])
    record = "super(title); told.push(title)"
    page.add_init_script(
        f"window.told = []; Notification = class extends Notification {{ constructor(title) {{ {record} }} }}"
    )
    page.goto(f"{url}runs?run={waits.name}")
    notice = page.locator("#runs-notice")
    page.get_by_label("Notify me when it ends").check()
    waits.update_status(phase="finished")
    expect(page.locator("#runs-head .runs-state")).to_contain_text("finished")
    expect(notice).to_be_hidden()
    assert page.evaluate("told") == ["waits: ✓ finished"]
    page.goto(f"{url}runs?run={other.name}")
    expect(notice).to_be_visible()
    other.update_status(phase="interrupted")
    expect(notice).to_be_hidden()
    assert page.evaluate("told") == []


def with_seed(run: tunekit.Run, name: str, seed: int) -> tunekit.Run:
    """A copy of a run whose recipe has another seed."""
    copy = shutil.copytree(run.path, run.path.parent / name)
    recipe = (copy / "recipe.yaml").read_text(encoding="utf-8")
    (copy / "recipe.yaml").write_text(recipe.replace("seed: 42", f"seed: {seed}"), encoding="utf-8")
    return tunekit.Run(copy)


def test_recipe_fields_in_which_runs_differ_can_be_columns(trained_run):
    for seed in (7, 70):
        tunekit.set_note(with_seed(trained_run, f"seed-{seed}", seed), f"seed {seed}\nof two")
    listing = Listing(trained_run.path.parent)
    lines = listing.lines()
    fields = listing.fields(lines)
    assert fields == {
        trained_run.name: {"train.seed": "42"},
        "seed-7": {"train.seed": "7"},
        "seed-70": {"train.seed": "70"},
    }
    assert listing.fields(lines) is fields
    columns = runs_table.columns_in(["train.seed", "note", "method", 3])
    assert columns == ["method", "note", "train.seed"]
    assert runs_table.columns_in(None) == runs_table.columns_in("x") == list(runs_table.DEFAULT_COLUMNS)
    page = runs_table.table_of(lines, site_of(trained_run), WORDS, search="seed two", columns=columns, fields=fields)
    assert "data-label='train.seed'>70<" in page and ">seed 7<" in page and "of two" not in page
    assert "runs-state" not in page and trained_run.name + "<" not in page


def test_parallel_coordinates_have_an_axis_for_each_field_and_result(trained_run):
    lines = [
        Line("a", "finished", value=1.0, held_out=2.0),
        Line("b", "finished", value=3.0, held_out=2.5),
        Line("c", "finished", value=2.0),
        Line("dpo", "finished", measure="rewards/margins", value=0.5),
        Line("new", "training"),
    ]
    rates = {"a": "1e-4", "b": "3e-4", "c": "2e-4", "dpo": "1e-6"}
    adapters = {"a": "lora", "b": "'null'", "c": "qlora"}
    fields = {
        name: {"train.learning_rate": rate} | ({"adapter.type": adapters[name]} if name in adapters else {})
        for name, rate in rates.items()
    }
    spec = json.loads(plot_of(lines, ["train.learning_rate", "adapter.type"], fields, WORDS))
    points = {(point["run"], point["axis"]): point["y"] for point in spec["data"]["values"]}
    assert {run for run, _ in points} == {"a", "b", "c"}, "runs of another metric have no height on its axis"
    heights = {axis: [points.get((run, axis)) for run in "abc"] for axis in dict.fromkeys(axis for _, axis in points)}
    assert heights == {
        "train.learning_rate": [0.0, 1.0, pytest.approx(0.5)],
        "adapter.type": [0.5, 0.0, 1.0],
        "Metric (loss)": [0.0, 1.0, 0.5],
        "Evaluation": [0.0, 1.0, None],
    }
    assert spec["layer"][0]["encoding"]["color"]["scale"]["reverse"], "less loss is better"
    assert plot_of(lines, [], fields, WORDS) is None and plot_of(lines[:1], ["train.seed"], fields, WORDS) is None


def test_several_runs_are_tagged_and_deleted_at_once(workspace):
    runs = {name: made_run(workspace / "runs" / name, phase="finished") for name in ("base", "next", "busy", "other")}
    # What starts from another one's model is deleted first, in whichever order they were chosen.
    recipe = (runs["next"].path / "recipe.yaml").read_text(encoding="utf-8")
    model = runs["base"].path / "model"
    model.mkdir()
    (runs["next"].path / "recipe.yaml").write_text(recipe.replace("path: pico", f"path: {model}"), encoding="utf-8")
    runs["busy"].update_status(phase="training", pid=os.getpid(), identity=identity_of(os.getpid()))
    with gr.Blocks():
        panel = ChosenRuns(Site(workspace), WORDS)
    names = json.dumps(["base", "next", "busy"])
    panel._tag(names, ["old"])
    assert [run.tags for run in runs.values()] == [["old"], ["old"], ["old"], []]
    for typed, is_confirmed in (("", False), ("2", False), (" 3 ", True)):
        assert panel._confirm(names, typed).interactive == is_confirmed
    panel._delete_all(names, "2")
    assert all(run.path.exists() for run in runs.values())
    problem, typed = panel._delete_all(names, "3")
    assert problem.visible and "busy is training" in problem.value and problem.value.count("role='alert'") == 1
    assert [name for name, run in runs.items() if run.path.exists()] == ["busy", "other"] and typed == ""


def test_devices_name_the_runs_that_hold_them_and_those_that_wait(workspace):
    inside, outside = str(workspace / "runs" / "<b>mine"), "/elsewhere/runs/secret"
    gpus = [
        frontend.DeviceState(f"GPU-{n}", "H200", 100 * 2**30, 40 * 2**30, runs=(inside,), waiting=(outside, inside))
        for n in range(2)
    ]
    page = devices_view.table_of(gpus, Site(workspace), WORDS)
    assert page.count("href='/runs?run=%3Cb%3Emine'>&lt;b&gt;mine</a>") == 4 and "secret" not in page
    assert "1: H200" in page and "60.0 GiB of 100.0 GiB" in page
    assert text_of(page).count("a run of another folder, <b>mine".replace("<b>", "&lt;b&gt;")) == 2
    assert "GiB" in devices_view.devices_html(Site(workspace), WORDS)


def test_names_from_disk_are_words_in_the_page(workspace):
    bad = "<img src=x onerror=alert(1)>'\""
    page = runs_table.table_of([Line(bad, "finished", bad, bad, tags=(bad,))], Site(workspace), WORDS)
    assert "<img" not in page and "'\"" not in page


def test_the_time_left_is_told_by_the_clock_of_the_last_steps():
    logs = [{"step": step, "time": 100.0 + 3.0 * step} for step in range(10, 15)]
    assert seconds_left(logs, 24) == pytest.approx(30.0)
    assert seconds_left(logs[:1], 24) is None and seconds_left(logs, None) is None


def test_a_run_is_shown_whole_and_then_only_what_changed(trained_run):
    site = site_of(trained_run)
    answer = looked(site, trained_run.name)
    seen, head, _, _, *rest = answer
    assert "finished" in head and "step 8 of 8" in head
    plots = [plot for plot in rest[: run_view.NUM_CHARTS] if plot.value is not None]
    assert len(plots) >= 5 and '"title":{"text":"Loss"' in plots[0].value["plot"]
    samples, saved, result, recipe, plan = rest[-5:]
    assert "Before" in samples and "After" in samples
    assert "on disk" in saved and "Peak memory" in result and "model:" in recipe and "micro-batch" in plan
    again = looked(site, trained_run.name, seen)
    assert again[0] == seen and all(part == SKIP for part in again[1:])
    written(trained_run, ("warning", {"message": "it <b>wobbles</b>"}))
    _, head, warnings, *_ = looked(site, trained_run.name, seen)
    assert head == SKIP and "it &lt;b&gt;wobbles" in warnings.value
    smooth = looked(site, trained_run.name, seen, smoothing=0.5)
    assert '"faint"' in smooth[4].plot and smooth[1] == SKIP
    # The charts that are there stay, those that are not shown are told nothing of.
    unused = smooth[4 + len(plots) : 4 + run_view.NUM_CHARTS]
    assert smooth[3] == SKIP and unused and all(part == SKIP for part in unused)


def test_no_run_and_a_run_from_elsewhere_are_told_in_words(workspace):
    for name in ("nothing", "../../etc", "/etc"):
        page = looked(Site(workspace), name)[1]
        assert "role='alert'" in page
    assert all(part == SKIP for part in looked(Site(workspace), ""))


def test_a_damaged_plan_is_no_end_of_the_page(trained_run):
    (trained_run.path / "plan.yaml").write_text("layout: {", encoding="utf-8")
    *_, recipe, plan = looked(site_of(trained_run), trained_run.name)
    assert "model:" in recipe and "role='alert'" in plan


def test_answers_with_rewards_are_sorted_by_them(trained_run):
    def answer(text, reward):
        return {"answer": text, "rewards": {"mine": reward, "other": None}, "advantage": reward - 0.5}

    for step, best, worst in ((1, 0.5, 0.25), (2, 1.0, 0.0)):
        told = {"best": answer(f"good {step}", best), "worst": answer(f"bad {step}", worst)}
        # Runs of before have no others.
        told |= {"others": [answer("fair 2", 0.75), answer("fair 3", 0.6)]} if step == 2 else {}
        written(trained_run, ("completions", {"step": step, "prompt": "What?", **told}))
    with history_of(trained_run) as reader:
        pages = {order: text_of(run_parts.completions(reader, WORDS, order)) for order in ("newest", "best", "worst")}
    found = {order: re.findall(r"(?:good|fair|bad) \d", page) for order, page in pages.items()}
    assert found["best"] == ["good 2", "fair 2", "fair 3", "good 1", "bad 1", "bad 2"] == found["worst"][::-1]
    assert found["newest"] == ["good 2", "fair 2", "fair 3", "bad 2", "good 1", "bad 1"]
    assert pages["newest"].count("What?") == 2 and "Step 2: answers to one prompt" in pages["newest"]


def test_of_a_log_the_end_is_read_and_what_is_looked_for_is_shown(tmp_path, monkeypatch):
    run = made_run(tmp_path / "run")
    monkeypatch.setenv("SOME_TOKEN", "abcd-efgh-1234")
    log = run.path / "log.txt"
    lines = [f"line {place} " + "x" * 90 for place in range(20_000)]
    lines += [
        "\x1b[31mWARNING: hot\x1b[0m",
        "token abcd-efgh-1234",
        "<script>alert(1)</script>",
        " 10%\r 90%\rdone 100%",
    ]
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = log_view.lines_of(run, "log.txt")
    assert len(found) == log_view.MAX_LINES and found[-1] == "done 100%"
    assert found[-4] == "WARNING: hot" and "abcd" not in "".join(found)
    assert log_view.lines_of(run, "log.txt", text="LINE 19999 ")[0].startswith("line 19999")
    assert log_view.lines_of(run, "log.txt", only_serious=True) == ["WARNING: hot"]
    for other in ("status.json", "../../chats.jsonl", "nothing.txt"):
        with pytest.raises(tunekit.TunekitError, match="has no log"):
            log_view.lines_of(run, other)
    (run.path / "log-1.txt").write_text("rank 1\n", encoding="utf-8")
    (run.path / "log-2.txt").symlink_to("/etc/passwd")
    assert log_view.logs_of(run)[:2] == ["log.txt", "log-1.txt"]
    assert "log-2.txt" not in log_view.logs_of(run)


def test_runs_are_compared_by_curves_recipes_results_and_answers(trained_run):
    with_seed(trained_run, "other", 7)
    site, names = site_of(trained_run), [trained_run.name, "other"]
    message, _, kinds, base, *plots, recipes, results, answers, seen = compare.look(site, WORDS, names, View(), "")
    shown = [plot for plot in plots if plot.visible]
    assert (base["choices"], base["value"]) == (names, names[0])
    assert message == "" and kinds["value"][0] == "loss" and len(shown) == len(kinds["value"]) >= 5
    assert domain_of(shown[0]) == names
    assert "train.seed 42 7" in text_of(recipes) and "max_steps" not in recipes
    assert "Peak memory" in results and answers.count("<tr>") > 1 and "★" not in results
    assert all(part == SKIP for part in compare.look(site, WORDS, names, View(), seen)[:-1])
    only = {"charts": ["step_seconds"], "hidden": kinds["value"]}
    _, _, kinds, _, plot, *_ = compare.look(site, WORDS, names, View(), seen, only)
    assert kinds["value"] == ["step_seconds"] and "step_seconds" in plot.value["plot"]
    assert "Choose at least two runs" in compare.look(site, WORDS, names[:1], View(), seen)[0]
    assert "role='alert'" in compare.look(site, WORDS, ["other", "gone"], View(), seen)[0]
    bad = shutil.copytree(trained_run.path, trained_run.path.parent / "bad")
    (bad / "recipe.yaml").write_text("[" * 1000, encoding="utf-8")
    message, column, _, _, plot, *_ = compare.look(site, WORDS, [names[0], "bad", "gone", "other"], View(), "")
    assert message.count("role='alert'") == 2 and "bad/recipe.yaml" in message and "gone" in message
    assert column.visible and domain_of(plot) == names


def test_a_comparison_begins_with_the_charts_that_all_runs_have(trained_run):
    other = with_seed(trained_run, "other", 7)
    written(other, ("log", {"step": 8, "loss": 1.0, "reward": 0.5}))
    site, names = site_of(trained_run), [trained_run.name, "other"]
    _, _, kinds, _, *plots, _, _, _, _ = compare.look(site, WORDS, names, View(), "")
    assert kinds["value"][0] == "loss" and kinds["value"][-1] == "reward"
    assert domain_of(plots[len(kinds["value"]) - 1]) == ["other"]


def domain_of(plot):
    """The runs in a chart's legend."""
    return json.loads(plot.value["plot"])["encoding"]["color"]["scale"]["domain"]


def test_a_comparison_sends_what_changes_as_plain_values_and_draws_once_for_all(trained_run, monkeypatch):
    other = with_seed(trained_run, "other", 7)
    site, names = site_of(trained_run), [trained_run.name, "other"]
    *_, seen = compare.look(site, WORDS, names, View(), "")
    smooth = View(smoothing=0.5)
    parts = compare.look(site, WORDS, names, smooth, seen)
    changed = [part for part in parts[:-1] if part != SKIP]
    assert changed and all(type(part).__name__ == "PlotData" for part in changed)
    monkeypatch.setattr(run_view.charts, "spec_of", None)
    assert compare.look(site, WORDS, names, smooth, "")[4].value["plot"] == changed[0].plot, "another browser"
    # The choice of another base changes the results alone.
    message, column, kinds, base, *_, results, _, again = compare.look(
        site, WORDS, names, smooth, parts[-1], base="other"
    )
    assert [message, column, kinds, base] == [SKIP] * 4 and "Peak memory" in results and again != parts[-1]
    written(other, ("warning", {"message": "it wobbles"}))
    monkeypatch.undo()
    assert SKIP not in compare.look(site, WORDS, names, smooth, again, base="other")[-4:-1]


def test_the_best_result_is_marked_where_runs_can_be_compared(trained_run):
    other = with_seed(trained_run, "other", 7)
    result = next(event for event in reversed(other.events()) if event["event"] == "result")
    written(other, ("result", {**result, "last_loss": result["last_loss"] / 2, "eval_loss": result["eval_loss"] * 2}))

    def cells(page, label):
        row = next(row for row in page.split("<tr>") if f">{label}<" in row)
        return [text_of("<td" + cell) for cell in row.split("<td")[2:]]

    page = compare.results([trained_run, other], None, WORDS)
    loss, eval_loss, speed = (cells(page, label) for label in ("Loss", "Evaluation loss", "Tokens/s"))
    assert ["★" in cell for cell in loss] == [False, True] and ["★" in cell for cell in eval_loss] == [True, False]
    less = f"{result['last_loss'] / 2:.4g}"
    assert f" −{less} " in loss[1] and "−" not in loss[0] and f" +{result['eval_loss']:.4g} " in eval_loss[1]
    assert not any("★" in cell or "%" in cell for cell in speed), "both are as fast"
    page = compare.results([trained_run, other], "other", WORDS)
    assert f" +{less} " in cells(page, "Loss")[0] and "+" not in cells(page, "Loss")[1]
    for run, tokens in ((trained_run, 100.0), (other, 150.0)):
        written(run, ("result", {**result, "tokens_per_second": tokens}))
    speed = cells(compare.results([trained_run, other], None, WORDS), "Tokens/s")
    assert "★" in speed[1] and "+50.0%" in speed[1] and "★" not in speed[0]
    # A loss of one method or kind is no better than that of another.
    written(other, ("result", {**result, "last_loss": result["last_loss"] / 2}))
    for method in ("dpo", {"type": "sft", "loss_type": "eaft"}):
        recipe = yaml.safe_load((other.path / "recipe.yaml").read_text(encoding="utf-8")) | {"method": method}
        (other.path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        page = compare.results([trained_run, tunekit.Run(other.path)], None, WORDS)
        assert not any("★" in cell or "−" in cell for cell in cells(page, "Loss"))


@pytest.fixture(scope="module")
def trained_server(trained_workspace: Path, serve, tmp_path_factory):
    """A server over a copy of the trained workspace, with a second run."""
    root = tmp_path_factory.mktemp("served") / "workspace"
    shutil.copytree(trained_workspace, root)
    (run,) = (root / "runs").iterdir()
    shutil.copytree(run, root / "runs" / "second")
    return serve(root), run.name


@pytest.mark.slow
def test_until_the_server_answers_the_page_of_a_run_has_its_name(trained_server, open_page):
    from playwright.sync_api import expect

    server, name = trained_server
    page = open_page(f"{server.url}runs")
    page.route("**/queue/**", lambda request: None)
    page.goto(f"{server.url}runs?run={name}")
    expect(page.get_by_role("heading", name=name)).to_be_visible()
    expect(page.get_by_text("Devices and queue")).to_be_hidden()


@pytest.mark.slow
def test_from_the_table_to_a_run_with_its_curves_its_log_and_its_recipe(trained_server, open_page):
    server, name = trained_server
    page = open_page(f"{server.url}runs")
    page.get_by_label("Search").fill("second")
    page.locator(f"#runs-list a:text-is('{name}')").wait_for(state="detached")
    page.get_by_label("Search").fill("")
    page.get_by_label(f"Compare {name}").check()
    button = page.get_by_role("button", name="Compare selected runs")
    assert button.is_disabled()
    page.get_by_label("Compare second").check()
    button.click()
    page.locator("#compare-charts svg.marks .mark-line path").first.wait_for()
    assert "run=second" in page.url

    page.goto(f"{server.url}runs")
    page.locator(f"#runs-list a:text-is('{name}')").click()
    page.locator("#runs-head h1").get_by_text(name).wait_for()
    page.locator("#runs-charts svg.marks").first.wait_for()
    curve = page.locator("#runs-charts svg.marks .mark-line path").first.get_attribute("d")
    assert curve is not None and curve.count("L") == 7, "eight steps are eight points"
    page.get_by_role("tab", name="Log").click()
    page.locator("#log-lines .log-text").wait_for()
    page.get_by_label("Filter").fill("no line is like this")
    page.get_by_text("No recent line matches.").wait_for()
    page.get_by_role("tab", name="Recipe and plan").click()
    page.locator("#runs-recipe").get_by_text("chats.jsonl").first.wait_for()


@pytest.mark.slow
def test_a_long_table_is_shown_in_parts_and_compare_stays_in_sight(workspace, serve, open_page):
    from playwright.sync_api import expect

    for number in range(runs_table.PAGE_RUNS + 3):
        made_run(workspace / "runs" / f"run-{number}", phase="finished")
    page = open_page(f"{serve(workspace).url}runs")
    rows, button = page.locator("#runs-list tbody tr"), page.get_by_role("button", name="Compare selected runs")
    expect(rows).to_have_count(runs_table.PAGE_RUNS)
    for place in (0, 1):
        page.locator("#runs-list input[name=run]").nth(place).check()
    expect(button).to_be_enabled()
    expect(button).to_be_in_viewport()
    assert page.evaluate("scrollY") == 0
    expect(page.locator(".runs-more-line")).to_contain_text(
        f"{runs_table.PAGE_RUNS} of {runs_table.PAGE_RUNS + 3} runs"
    )
    page.get_by_role("button", name="Show more").click()
    expect(rows).to_have_count(runs_table.PAGE_RUNS + 3)
    expect(page.locator("#runs-list input:checked")).to_have_count(2)
    expect(page.locator(".runs-more-line")).to_have_count(0)
    # A search looks in all runs.
    page.get_by_label("Search").fill("run-1")
    expect(rows).to_have_count(11)


@pytest.mark.slow
def test_runs_are_grouped_by_a_tag_compared_by_fields_and_deleted_together(
    trained_workspace, tmp_path, serve, open_page
):
    from playwright.sync_api import expect

    root = tmp_path / "served"
    shutil.copytree(trained_workspace, root)
    (folder,) = (root / "runs").iterdir()
    for seed in (1, 2, 3):
        run = with_seed(tunekit.Run(folder), f"seed-{seed}", seed)
        tunekit.set_tags(run, ["seeds"])
    page = open_page(f"{serve(root).url}runs")
    page.locator("#runs-list .runs-tag").first.click()
    expect(page.locator("#runs-list tbody tr")).to_have_count(3)
    page.locator("#runs-columns-fold > button").click()
    page.locator("#runs-columns input").fill("seed")
    page.get_by_role("option", name="train.seed").click()
    page.keyboard.press("Escape")
    expect(page.locator("#runs-list td.runs-field")).to_have_text(["3", "2", "1"])
    page.locator("#runs-parallel svg.marks").get_by_text("train.seed").wait_for()
    page.locator("#runs-sort input").click()
    page.get_by_role("option", name="train.seed").click()
    expect(page.locator("#runs-list td.runs-field")).to_have_text(["1", "2", "3"])

    page.reload()
    expect(page.locator("#runs-list td.runs-field")).to_have_count(4)
    for seed in (1, 2):
        page.locator(f"#pick-seed-{seed}").check()
    expect(page.locator("#chosen-line")).to_contain_text("2 selected: seed")
    page.locator("#chosen-tags input").fill("worse")
    page.locator("#chosen-tags input").press("Enter")
    page.locator("#chosen-add").click()
    expect(page.locator("#runs-list .runs-tag").filter(has_text="worse")).to_have_count(2)
    # What a search hides is no longer chosen.
    page.get_by_label("Search").fill("seed-2")
    expect(page.locator("#chosen-line")).to_contain_text("1 selected: seed-2")
    page.get_by_label("Search").fill("")
    expect(page.locator("#chosen-line")).to_contain_text("2 selected")
    sure = page.locator("#chosen-delete")
    expect(sure).to_be_disabled()
    page.locator("#chosen-confirm").get_by_role("textbox").fill("2")
    expect(sure).to_be_enabled()
    sure.click()
    expect(page.locator("#runs-list tbody tr")).to_have_count(2)
    assert sorted(path.name for path in (root / "runs").iterdir()) == sorted([folder.name, "seed-3"])


@pytest.mark.slow
def test_a_run_from_a_terminal_appears_moves_and_is_there_after_a_reload(tmp_path, serve, open_page):
    root = fill(tmp_path / "workspace")
    server = serve(root)
    page = open_page(f"{server.url}runs")
    page.get_by_text("No runs in this folder").wait_for()
    command = [
        sys.executable,
        "-m",
        "tunekit",
        "train",
        "trained.yaml",
        "train.max_steps=90000",
        "output.dir=runs/live",
    ]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    try:
        page.locator("#runs-list a:text-is('live')").click()
        first_curve = page.locator("#runs-charts svg.marks .mark-line path").first
        first_curve.wait_for()
        page.locator(".runs-usage li").filter(has_text=re.compile(r"CPU: \d+\.\d of \d+ cores")).wait_for()
        label = page.locator(".runs-progress span")
        step = int(label.inner_text().split()[1])
        page.wait_for_function(
            f"parseInt(document.querySelector('.runs-progress span').innerText.split(' ')[1]) > {step}"
        )
        drawn = "document.querySelector('#runs-charts svg.marks .mark-line path')?.getAttribute('d')"
        before = page.evaluate(drawn)
        page.wait_for_function(f"{drawn} && {drawn} !== {json.dumps(before)}")
        page.reload()
        first_curve.wait_for()
        assert int(label.inner_text().split()[1]) > step
    finally:
        process.terminate()
        process.wait(timeout=LIMIT_SECONDS)
    page.locator("#runs-head .runs-interrupted").wait_for()


def test_charts_of_a_long_run_that_goes_on_are_drawn_anew_by_its_share_and_not_by_its_steps(trained_run):
    def mark(*, is_over=False):
        with history_of(trained_run) as reader:
            return run_view.charts_mark(reader, is_over=is_over)

    def log(step, seconds, **values):
        written(trained_run, ("log", {"step": step, "loss": 1.0, "time": 4e9 + seconds, **values}))

    log(9, 0)
    short = mark()
    log(10, 0)
    assert mark() != short
    for step in range(11, 4 * run_view.MANY_EVENTS):
        log(step, 0)
    long = mark()
    log(4 * run_view.MANY_EVENTS, 1)
    assert mark() == long and mark(is_over=True) != long
    log(4 * run_view.MANY_EVENTS + 1, run_view.REDRAW_SECONDS)
    by_time = mark()
    assert by_time != long
    written(trained_run, ("eval", {"step": 4 * run_view.MANY_EVENTS + 1, "eval_loss": 2.0, "time": 4e9 + 11}))
    assert mark() != by_time
    for step in range(4 * run_view.MANY_EVENTS + 2, 4 * run_view.MANY_EVENTS + 12):
        log(step, 11)
    assert mark()[1] > long[1]
