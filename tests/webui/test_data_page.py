"""The data page: what it offers and reads, what it makes of rows, and that nothing in them can hurt it."""

import json
import multiprocessing
import re
import shutil
import threading
import time

import pytest

import tunekit
from tests.waiting import LIMIT_SECONDS
from tests.webui.conftest import fill, slow_down
from tunekit import frontend
from webui import data_charts, data_page, data_view, trial_view, work
from webui.data_asked import Asked, address_of, asked_in, data_files, is_remote, recipe_of
from webui.site import Site
from webui.uploads import save_uploads
from webui.words import Words

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>&\"'"


@pytest.fixture
def site(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return Site(workspace)


@pytest.fixture(scope="module")
def words():
    return Words("en")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def text_of(html):
    return re.sub(r"<[^>]+>", "", html)


def test_the_files_of_rows_are_offered_and_no_others(site):
    for name in (
        "sub/more.csv",
        "sub/deep/x.parquet",
        ".hidden/a.jsonl",
        "runs/one/data/a.jsonl",
        "notes.md",
        ".a.jsonl",
    ):
        (site.root / name).parent.mkdir(parents=True, exist_ok=True)
        (site.root / name).write_text("x")
    (site.root / "elsewhere.jsonl").symlink_to("/etc/hostname")
    (site.root / "again.jsonl").symlink_to(site.root / "chats.jsonl")
    assert data_files(site) == [
        *("again.jsonl", "chats.jsonl", "pairs.jsonl", "sub/deep/x.parquet", "sub/more.csv", "sums.jsonl")
    ]


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x.jsonl", "~/x.jsonl", "file:///etc/x.jsonl", "link/x.jsonl", "link", "memory://a.jsonl"],
)
def test_data_outside_the_workspace_is_refused_before_it_is_read(site, path):
    (site.root / "link").symlink_to("/etc")
    with pytest.raises(tunekit.TunekitError):
        recipe_of(site, Asked(path=path))


def test_a_folder_is_refused_for_a_link_in_it_that_leads_out(site):
    (site.root / "rows").mkdir()
    (site.root / "rows/a.jsonl").symlink_to("/etc/hostname")
    with pytest.raises(tunekit.TunekitError, match="is outside the workspace"):
        recipe_of(site, Asked(path="rows"))


@pytest.mark.parametrize(
    "change", ["data.format=os:system", "model.trust_remote_code=true", "model={path: x, trust_remote_code: true}"]
)
def test_an_address_cannot_have_code_run(site, change):
    with pytest.raises(tunekit.TunekitError, match="a link cannot run code"):
        recipe_of(site, Asked(origin="recipe:sft/quickstart", changes=(change,)))


def test_nothing_is_asked_of_other_machines_before_somebody_wants_it(site):
    asked = {
        path: is_remote(site, path) for path in ("chats.jsonl", "example:tales.txt", "https://a/b.jsonl", "org/set")
    }
    assert asked == {"chats.jsonl": False, "example:tales.txt": False, "https://a/b.jsonl": True, "org/set": True}


def test_what_is_wrong_with_the_fields_is_said_as_of_a_recipe(site):
    with pytest.raises(tunekit.TunekitError, match=r"data\.max_length: must be at least 8, got 3"):
        recipe_of(site, Asked(path="chats.jsonl", max_length=3))
    with pytest.raises(tunekit.TunekitError, match="did you mean 'numeric_match'"):
        recipe_of(site, Asked(path="sums.jsonl", method="grpo", rewards="numeric_mach"))


@pytest.mark.parametrize(
    "asked",
    [
        Asked(),
        Asked(path="a b.csv", method="dpo", model="x/y", max_length=64, format="preference", rewards="length"),
        Asked(path="a.csv", columns=(("prompt", 'fra"ge, 1'), ("completion", "b"))),
        Asked(origin="run:one", changes=("data.max_length=64", "data.packing=true"), key="data.eval"),
    ],
)
def test_an_address_asks_for_what_the_fields_say(asked):
    query = {key.rstrip("_"): value for key, value in address_of(asked).items() if isinstance(value, str)}
    assert asked_in(query, address_of(asked).get("set") or ()) == asked


@pytest.mark.parametrize("query", [{"max_length": "x"}, {"max_length": "9" * 30}, {"columns": "{"}, {"method": "<b>"}])
def test_an_address_that_means_nothing_asks_for_nothing(query):
    assert asked_in(query, ()) == Asked()


def test_a_new_run_gets_the_file_its_columns_and_its_method(site):
    (site.root / "odd.csv").write_text("frage,besser,schlechter\na,b,c\n")
    columns = (("prompt", "frage"), ("chosen", "besser"), ("rejected", "schlechter"))
    asked = Asked(path="odd.csv", method="dpo", max_length=64, columns=columns)
    recipe, faults = tunekit.check_text(frontend.recipe_text("sft/quickstart"), asked.overrides())
    assert faults == []
    assert (recipe.data.train.path, recipe.data.eval, recipe.data.max_length) == ("odd.csv", None, 64)
    assert (recipe.data.columns, recipe.method.type, recipe.model.path) == (dict(columns), "dpo", "pico")


def test_a_recipe_of_the_workspace_and_a_run_are_looked_at_as_they_are(site):
    (site.root / "runs/one").mkdir(parents=True)
    (site.root / "runs/one/status.json").write_text("{}")
    shutil.copy(site.root / "trained.yaml", site.root / "runs/one/recipe.yaml")
    assert recipe_of(site, Asked(origin="file:trained.yaml")).data.max_length == 128
    assert recipe_of(site, Asked(origin="run:one", changes=("data.max_length=64",))).data.max_length == 64
    for origin in ("file:../x.yaml", "run:../x", "nothing", "recipe:no/such"):
        with pytest.raises(tunekit.TunekitError):
            recipe_of(site, Asked(origin=origin))


def test_rows_show_what_counts_and_whatever_stands_in_them_stays_text(site, words):
    chat = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": f"ok {HOSTILE}\n\x07"}]
    write(site.root / "hostile.jsonl", [{"messages": chat, HOSTILE: HOSTILE}, {"messages": HOSTILE}])
    preview = work.call("preview", recipe_of(site, Asked(path="hostile.jsonl")))
    parts = (data_view.preview_status, data_view.columns_table, data_view.bad_rows, data_view.rows_html)
    html = "".join(part(words, preview) for part in parts)
    assert "<img" not in html and "<script" not in html
    assert "&lt;script&gt;" in html
    trained = "".join(re.findall(r"class='data-trained(?: data-special)?' title[^>]*>([^<]*)<", html))
    assert trained.startswith("ok &lt;img src=x onerror") and trained.endswith("↵\n␇&lt;|im_end|&gt;")
    assert re.search(r"class='data-read data-special' title='1'>&lt;\|im_start\|&gt;<", html)
    assert "hostile.jsonl:2" in text_of(data_view.bad_rows(words, preview))


def test_both_answers_stand_side_by_side(site, words):
    preview = work.call("preview", recipe_of(site, Asked(path="pairs.jsonl", method="dpo", max_length=16)), num_rows=1)
    html = data_view.rows_html(words, preview)
    assert html.index("class='data-sequences data-sides'") < html.index("data-chosen") < html.index("data-rejected")


def test_all_rows_are_counted_with_the_line_at_which_they_are_cut(site, words):
    report = work.call("data_report", recipe_of(site, Asked(path="example:pirate.jsonl", max_length=64)), num_samples=0)
    (source,) = report.sources
    spec = json.loads(data_charts.length_chart(words, source, 64).plot)
    bars, line = (layer["data"]["values"] for layer in spec["layer"][:2])
    assert sum(bar["rows"] for bar in bars) == source.num_rows
    assert sum(bar["rows"] for bar in bars if bar["kind"] == "cut") == source.num_truncated > 0
    assert line[0]["range"].endswith("–64")
    said = text_of(data_charts.numbers(words, report, source))
    assert f"Truncated{source.num_truncated:,} ({source.num_truncated / source.num_rows:.1%})" in said
    assert f"{source.packing.packed_share:.1%}" in said


def test_a_mixture_shows_the_share_of_tokens_of_each_source(site, words):
    (site.root / "mixed.yaml").write_text(
        "model: pico\ndata:\n  max_length: 64\n  train:\n    - {path: chats.jsonl, weight: 3}\n"
        "    - {path: 'example:tales.txt', weight: 1}\ntrain: {max_steps: 1}\n"
    )
    report = work.call("data_report", recipe_of(site, Asked(origin="file:mixed.yaml")), num_samples=0)
    said = text_of(data_charts.mixture_table(words, report))
    for part in report.mixture:
        assert f"{part.source}{part.weight:g}" in said
        assert f"{part.token_share:.1%}" in said


@pytest.mark.slow
def test_rewards_are_tried_on_real_rows_with_the_models_answers(site, words):
    asked = Asked(path="sums.jsonl", method="grpo", rewards="numeric_match, repetition", max_length=48)
    trial = work.call("try_rewards", recipe_of(site, asked), num_prompts=2)
    html = trial_view.trial_html(words, trial)
    assert [one.name for one in trial.rewards] == ["numeric_match", "repetition"]
    for shown in ("numeric_match", "repetition", "sums.jsonl:1", "sums.jsonl:2", "What is 1 + 1?"):
        assert shown in html


def test_measuring_ends_when_it_is_cancelled(site):
    write(site.root / "many.jsonl", [{"text": f"text {n} " * 20} for n in range(40_000)])
    recipe = recipe_of(site, Asked(path="many.jsonl"))
    with pytest.raises(work.Cancelled):
        for _ in data_page.events_of("one", "data_report", recipe):
            data_page.cancel("one")
    # Another session's is left alone.
    data_page.cancel("one")


def test_a_call_that_is_cancelled_ends_also_where_all_that_it_says_has_come(monkeypatch):
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=time.sleep, args=(LIMIT_SECONDS,), daemon=True)
    process.start()
    ours, theirs = context.Pipe()
    for message in (("event", 1), ("event", 2), ("result", 3), True):
        theirs.send(message)
    monkeypatch.setattr(work, "_idle", [work._Worker(process, ours)])
    until, told = threading.Event(), []

    def tell(event):
        told.append(event)
        until.set()

    with pytest.raises(work.Cancelled):
        work.call("data_report", on_event=tell, until=until)
    assert told == [1]
    process.join(LIMIT_SECONDS)
    assert not process.is_alive()


def test_an_upload_is_kept_under_a_safe_name_and_never_over_another(site, tmp_path):
    given = tmp_path / "a <b> ü.jsonl"
    given.write_text("1")
    kept = [save_uploads(site, [given]) for _ in range(2)]
    assert [path.relative_to(site.root).as_posix() for path in kept] == [
        "uploads/a _b_ ü.jsonl",
        "uploads/a _b_ ü-2.jsonl",
    ]
    assert [path.read_text() for path in kept] == ["1", "1"]


@pytest.mark.parametrize("name", ["x.py", "x.yaml", "x.jsonl.exe", "x", ".jsonl.sh"])
def test_what_is_no_file_of_rows_is_not_kept(site, tmp_path, name):
    (tmp_path / name).write_text("1")
    with pytest.raises(tunekit.TunekitError, match="unsupported file type"):
        save_uploads(site, [tmp_path / name])
    assert not (site.root / "uploads").exists()


def test_an_upload_is_refused_where_pages_only_show_or_it_is_too_large(workspace, tmp_path):
    (tmp_path / "x.jsonl").write_text("123")
    with pytest.raises(tunekit.TunekitError, match="read-only"):
        save_uploads(Site(workspace, read_only=True), [tmp_path / "x.jsonl"])
    with pytest.raises(tunekit.TunekitError, match="exceeds the upload limit"):
        save_uploads(Site(workspace, max_upload_bytes=2), [tmp_path / "x.jsonl"])
    (workspace / "uploads").symlink_to("/tmp")
    with pytest.raises(tunekit.TunekitError, match="outside the workspace"):
        save_uploads(Site(workspace), [tmp_path / "x.jsonl"])


@pytest.mark.slow
def test_a_file_with_odd_columns_is_uploaded_mapped_and_measured_in_a_browser(tmp_path_factory, serve, open_page):
    folder = fill(tmp_path_factory.mktemp("data") / "workspace")
    rows = "".join(f"Who are you{'?' * (n % 7)},I am {'so ' * n}pico.\n" for n in range(30))
    given = tmp_path_factory.mktemp("given") / "odd.csv"
    given.write_text("frage,antwort\n" + rows)
    server = serve(folder)
    page = open_page(f"{server.url}data")
    page.locator("#data-upload input, input[type=file]").first.set_input_files(given)
    page.get_by_text("no format matches the columns frage, antwort").wait_for()

    def choose(field, option):
        page.locator(f"{field} input").click()
        page.locator(field).get_by_role("option", name=option).click()

    page.locator("#data-length input").fill("32")
    choose("#data-format", "prompt_completion: prompt, completion")
    page.get_by_label("Column for prompt").wait_for()
    choose("#data-column-0", "frage")
    page.wait_for_url(re.compile("columns=.*frage"))
    choose("#data-column-1", "antwort")
    row = page.locator(".data-row").nth(1)
    row.wait_for()
    assert row.locator(".data-trained").all_text_contents()[-1] == "<|im_end|>"
    assert "".join(row.locator(".data-read").all_text_contents()) == "Who are you?"
    green = row.locator(".data-trained").first.evaluate("one => getComputedStyle(one).backgroundColor")
    assert green != row.locator(".data-read").first.evaluate("one => getComputedStyle(one).backgroundColor")
    page.locator("#data-measure").click()
    page.locator(".data-numbers").wait_for()
    page.locator("#data-chart svg .role-frame").first.wait_for(state="attached")
    page.locator("#data-chart").get_by_text("max_length 32").first.wait_for(state="attached")

    page.goto(f"{server.url}data?path=pairs.jsonl&method=dpo")
    sides = page.locator(".data-sides").first
    sides.wait_for()
    # Both at the same moment: what is still loaded may move them.
    places = "one => ['.data-chosen', '.data-rejected'].map(side => one.querySelector(side).getBoundingClientRect())"
    left, right = sides.evaluate(f"one => ({places})(one).map(place => place.toJSON())")
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    assert "sea!" in "".join(sides.locator(".data-chosen .data-trained").all_text_contents())
    page.reload()
    page.locator(".data-sides").first.wait_for()


@pytest.mark.slow
def test_a_link_to_rows_says_that_they_are_read(tmp_path, serve, open_page):
    from playwright.sync_api import expect

    page = open_page(f"{serve(fill(tmp_path / 'workspace')).url}data")
    expect(page.locator("#data-status")).to_contain_text("Nothing to show yet")
    slow_down(page)
    page.goto(f"{page.url.partition('?')[0]}?path=chats.jsonl")
    expect(page.locator("#data-status progress")).to_be_visible()
    expect(page.locator("#data-status")).to_contain_text("16 rows")


@pytest.mark.slow
def test_an_error_does_not_outlast_the_rows_that_it_was_about(tmp_path, serve, open_page):
    from playwright.sync_api import expect

    page = open_page(f"{serve(fill(tmp_path / 'workspace')).url}data")
    wrong, right = tmp_path / "wrong.jsonl", tmp_path / "right.jsonl"
    wrong.write_text('{"x": 1}\n')
    right.write_text('{"prompt": "Who are you?", "completion": "pico"}\n')
    field, status = page.locator("input[type=file]").first, page.locator("#data-status")
    field.set_input_files(wrong)
    expect(status).to_contain_text("no format matches the columns x")
    held = []
    page.route("**/upload?*", lambda route: held.append(route))
    with page.expect_request("**/upload?*"):
        field.set_input_files(right)
    expect(status).to_have_text("Reading…")
    held[0].continue_()
    expect(status).to_contain_text("1 row")
    # What gradio refuses itself is not waited for.
    page.locator("input[type=file]").first.set_input_files(tmp_path / "workspace" / "trained.yaml")
    expect(page.get_by_test_id("toast-body")).to_be_visible()
    expect(status).to_contain_text("1 row")


@pytest.mark.slow
def test_invalid_rows_are_corrected_in_the_page_and_saved_with_the_others(tmp_path, serve, open_page):
    from playwright.sync_api import expect

    root = fill(tmp_path / "workspace")
    chats = (root / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    broken, wrong = chats[1][:-1], json.dumps({"messages": 3})
    (root / "bad.jsonl").write_text("\n".join([chats[0], broken, wrong, chats[2]]), encoding="utf-8")
    page = open_page(f"{serve(root).url}data?path=bad.jsonl")
    page.locator("#data-correct").click()
    editor, status = page.locator("#data-corrected .cm-content"), page.locator("#data-status")
    expect(editor.locator(".cm-line")).to_have_text([broken, wrong])
    editor.fill("no line for the second")
    page.locator("#data-save-corrected").click()
    expect(status).to_contain_text("1 lines for 2 invalid rows")
    expect(editor).to_have_text("no line for the second")
    editor.fill(f"{chats[1]}\n")
    page.locator("#data-save-corrected").click()
    page.wait_for_url(re.compile("path=bad-good.jsonl"))
    expect(status).to_contain_text("3 valid, 0 invalid")
    expect(editor).to_be_hidden()
    saved = (root / "bad-good.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in saved] == [json.loads(line) for line in chats[:3]]


@pytest.mark.slow
def test_rewards_are_tried_on_pairs_in_the_page(tmp_path, serve, open_page):
    from playwright.sync_api import expect

    root = fill(tmp_path / "workspace")
    (root / "grpo.yaml").write_text(
        "model: pico\ndata: {train: sums.jsonl, max_length: 64}\nmethod:\n  type: grpo\n"
        "  rewards: [{type: length, max_tokens: 8, free_tokens: 1}]\n  max_completion_length: 16\n"
    )
    page = open_page(f"{serve(root).url}data?from=file:grpo.yaml")
    page.locator("#data-pairs input").click()
    page.locator("#data-pairs").get_by_role("option", name="pairs.jsonl", exact=True).click()
    page.locator("#data-try").click()
    result = page.locator("#data-trial-result")
    expect(result.locator("table").first).to_contain_text("length")
    expect(result).to_contain_text("in 3 of 4 pairs")
    expect(result.locator("article").first).to_contain_text("boat!")
    page.locator("#data-pairs input").fill("/etc/passwd")
    page.locator("#data-pairs input").press("Enter")
    page.locator("#data-try").click()
    expect(page.locator("#data-trial-result")).to_contain_text("is outside the workspace")
