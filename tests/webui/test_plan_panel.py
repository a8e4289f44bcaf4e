"""The plan of a draft, on this machine and others, and the button that makes a run of it."""

import json
import re
from html import escape

import pytest

import tunekit
from tests.webui.conftest import fill, slow_down
from tunekit import frontend
from webui import launching, plan_panel, planning
from webui.app import build_pages
from webui.pages import PAGES
from webui.plan_notes import FIELDS, Seen, _css
from webui.plan_view import plan_html, refused_html
from webui.planning import HERE, planned, with_changes
from webui.site import LANGUAGES, Site
from webui.words import Words

DRAFT = """\
# mine
model: pico
data:
  train: chats.jsonl
  max_length: 128
train:
  max_steps: 2
  global_batch_size: 2
output:
  name: drafted
  sample_prompts: []
"""

LARGE = """\
model: Qwen/Qwen3-32B
data:
  train: chats.jsonl
adapter: lora
"""


@pytest.fixture
def site(workspace, monkeypatch):
    # The server's working directory is the workspace, and so is that of what it starts.
    monkeypatch.chdir(workspace)
    planning._kept.clear()
    return Site(root=workspace)


def plan_of(site, text, machine):
    recipe, faults = tunekit.check_text(text)
    assert recipe is not None, faults
    return planned(site, recipe, machine)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_plan_shows_its_choice_memory_figures_reasons_and_what_was_ruled_out(site, language):
    plan = plan_of(site, LARGE, "8xh100")
    words = Words(language)
    shown = plan_html(plan, words)
    assert (plan.headline in shown) == (language == "en") and "8 x H100" in shown
    widths = [float(width) for width in re.findall(r"<span title='[^']*' style='width:([0-9.]+)%", shown)]
    assert len(widths) == len(plan.memory.parts)
    assert sum(widths) == pytest.approx(100 * plan.memory.total_bytes / plan.device.memory_total_bytes, abs=0.1)
    for part, size in plan.memory.parts.items():
        assert f"{words.translated(part)} {frontend.gib(size)}" in shown
    assert all(escape(words.translated(one.topic)) in shown for one in plan.decisions)
    assert all(escape(word) in shown for one in plan.decisions for word in (one.choice, one.why))
    assert all(escape(one.layout.name) in shown and escape(one.why) in shown for one in plan.rejected)
    assert plan.speed.cost_usd is None or "USD" in shown


def test_a_draft_that_does_not_fit_says_by_how_much_and_what_would(site):
    text = LARGE + "train:\n  micro_batch_size: 8\n  gradient_checkpointing: false\nparallel:\n  num_processes: 1\n"
    error = plan_of(site, text, "h100")
    assert isinstance(error, tunekit.PlanError) and error.changes
    _, view, changes, mend, start, *_ = plan_panel.shown(site, Words("en"), text, "h100", "", Seen())
    assert frontend.gib(error.needed_bytes) in view and frontend.gib(error.limit_bytes) in view
    assert changes.splitlines() == list(error.changes) and mend.visible and not start.interactive
    mended = with_changes(text, changes)
    assert isinstance(plan_of(site, mended, "h100"), tunekit.Plan)
    assert refused_html(tunekit.TunekitError("<b>", hint="<i>"), Words("en")).count("<b>") == 0


def test_plans_are_shown_side_by_side_and_a_draft_that_fits_not_here_cannot_be_started(site):
    brief, view, _, _, start, reason, *_ = plan_panel.shown(site, Words("en"), LARGE, "h200", "rtx4090", Seen())
    assert view.count("<article") == 2 and view.index("<h3>h200") < view.index("<h3>rtx4090")
    assert not start.interactive and "runs start on this machine" in reason and "Fits: h200" in brief
    text = DRAFT.replace("max_length: 128", "max_length: 4096")
    brief, view, _, _, start, reason, *_ = plan_panel.shown(site, Words("en"), text, HERE, "", Seen())
    assert "1024 positions" in view and not start.interactive and reason
    assert "Does not fit: This machine" in brief and "1024 positions" in brief


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_plan_for_another_machine_starts_nothing_here(site, language):
    words = Words(language)
    _, _, _, _, start, reason, *_ = plan_panel.shown(site, words, DRAFT, "8xh100", "", Seen())
    assert not start.interactive and reason == f"<p>{words('plan.elsewhere', machine='8xh100')}</p>"
    # Neither where the page was asked to before it had heard so.
    with pytest.raises(tunekit.TunekitError, match="the plan shown is for 8xh100"):
        launching.begin(site, DRAFT, "", [], waits=False, machine="8xh100")
    assert not (site.root / "runs").exists()
    _, _, _, _, start, reason, *_ = plan_panel.shown(site, words, DRAFT, HERE, "8xh100", Seen())
    assert start.interactive and not reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Choose a recipe"),
        ("model: pico\ndata: {train: chats.jsonl}\nadapter: {type: lora, rnak: 2}", "has errors"),
        ("model: [", "has errors"),
        ("model: pico\ndata: {train: /etc/passwd}", "is outside the workspace"),
        ("model: {path: pico, trust_remote_code: true}\ndata: {train: chats.jsonl}", "trust_remote_code"),
    ],
)
def test_a_draft_with_mistakes_has_no_plan_and_cannot_be_started(site, text, words):
    _, view, changes, mend, start, reason, *_ = plan_panel.shown(site, Words("en"), text, HERE, "", Seen())
    assert not changes and not mend.visible and not start.interactive and reason
    assert words in view or words in reason
    with pytest.raises(tunekit.TunekitError):
        launching.begin(site, text, "", [], waits=False)
    assert not (site.root / "runs").exists()


def edited(site, before, text, machine="h100"):
    return plan_panel.shown(site, Words("en"), text, machine, "", before)


def test_the_effect_of_an_edit_is_told_in_the_plan_and_at_its_field(site):
    *_, notes, seen = edited(site, Seen(), LARGE)
    assert not seen.effect and "Last edit" not in notes
    brief, *_, notes, seen = edited(site, seen, f"{LARGE}train: {{micro_batch_size: 1}}\n")
    assert re.search(r"<code>train.micro_batch_size</code>: .*Memory [0-9.]+ GiB → [0-9.]+ GiB", brief)
    assert '#form-train-micro_batch_size::after{content:"Last edit: Memory' in notes
    commented = edited(site, seen, f"# a comment\n{LARGE}train: {{micro_batch_size: 1}}\n")
    assert commented[-1].effect == seen.effect
    on_another = edited(site, seen, f"{LARGE}train: {{micro_batch_size: 1}}\n", "h200")
    assert not on_another[-1].effect
    large = "train: {micro_batch_size: 8, gradient_checkpointing: false}\nparallel: {num_processes: 1}\n"
    *_, seen = edited(site, seen, f"{LARGE}{large}")
    assert seen.keys == ("train.micro_batch_size", "train.gradient_checkpointing", "parallel.num_processes")
    assert seen.effect == "no longer fits"
    *_, seen = edited(site, seen, f"{LARGE}train: {{micro_batch_size: 1}}\n")
    assert seen.effect == "fits now"
    *_, seen = edited(site, seen, DRAFT)
    assert not seen.effect


def test_the_plan_is_told_in_the_language_of_the_page(site):
    plan = plan_of(site, LARGE, "h100")
    english, chinese = (plan_html(plan, Words(language)) for language in ("en", "zh"))
    assert escape(plan.headline) in english and escape(plan.headline) not in chinese
    assert "放得下 Qwen/" in chinese and "单个设备" in chinese
    for topic, translation in (("layout", "布局"), ("optimizer", "优化器")):
        assert f"<th scope='row'>{topic}</th>" in english and f"<th scope='row'>{translation}</th>" in chinese
    assert " of " not in re.findall("<dd>(.*?)</dd>", chinese)[0]


def test_the_fields_of_the_choices_are_fields_of_a_recipe():
    keys = {entry.key for entry in frontend.recipe_entries(frontend.read_text(LARGE))}
    assert set(FIELDS.values()) <= keys


def test_choices_of_the_plan_stand_at_the_fields_that_leave_them_to_it(site):
    *_, notes, _ = edited(site, Seen(), LARGE)
    plan = plan_of(site, LARGE, "h100")
    chosen = {decision.topic: decision for decision in plan.decisions}
    note = f"Plan: {chosen['checkpointing'].choice} ({chosen['checkpointing'].why})"
    assert f"#form-train-gradient_checkpointing::after{{content:{_css(note)}}}" in notes
    *_, notes, _ = edited(site, Seen(), f"{LARGE}train: {{gradient_checkpointing: true}}\n")
    assert "#form-train-gradient_checkpointing::after" not in notes
    assert _css('</style>"\\') == '"\\3c /style\\3e \\22 \\5c "'


def test_an_unknown_machine_and_one_outside_the_workspace_are_told_in_words(site):
    for machine, words in (("h1000", "did you mean"), ("/etc/x.yaml", "is outside the workspace")):
        error = plan_of(site, DRAFT, machine)
        assert isinstance(error, tunekit.TunekitError) and words in str(error)


@pytest.mark.slow
def test_a_draft_is_checked_and_becomes_a_run_of_the_name_that_it_is_given(site):
    assert isinstance(launching.checked(site, DRAFT, ""), list)
    run = launching.begin(site, DRAFT, "mine", ["cpu"], waits=True)
    assert re.fullmatch(r"mine-\d{8}-\d{6}", run.name)
    assert site.run(run.name).recipe.train.max_steps == 2
    assert "finished" in tunekit.stop(run) or run.state == "interrupted"
    with pytest.raises(tunekit.TunekitError, match=r"output\.name"):
        launching.begin(site, DRAFT, "../mine", [], waits=False)
    with pytest.raises(tunekit.TunekitError, match="GPU-1"):
        launching.begin(site, DRAFT, "", ["GPU-1"], waits=False)


def test_after_a_run_that_could_not_be_started_the_next_one_can(site, monkeypatch):
    monkeypatch.setattr("webui.app.PAGES", {"new": PAGES["new"]})
    functions = build_pages(site, Words("en")).fns.values()
    begin = next(function.fn for function in functions if "_attach_start.<locals>.begin" in str(function.fn))
    first, last = begin("model: nowhere", HERE, "", [], False)
    assert not first[2].interactive
    assert "missing required key" in last[0] and last[2].interactive


def test_devices_are_offered_with_the_end_of_their_uuid_their_free_memory_and_who_has_them():
    gpu = frontend.DeviceState("GPU-0123-456789ab", "H100", 80 * 2**30, 40 * 2**30, ("/w/runs/a",), ("/w/runs/b",))
    ((label, value),) = launching.choices([gpu], Words("en"))
    assert value == gpu.uuid
    assert label == "H100 · …456789ab · 40.0 GiB of 80.0 GiB free · used by a · 1 waiting"


@pytest.fixture(scope="module")
def server(serve, tmp_path_factory):
    root = fill(tmp_path_factory.mktemp("plan") / "workspace")
    (root / "drafted.yaml").write_text(DRAFT, encoding="utf-8")
    (root / "large.yaml").write_text(LARGE, encoding="utf-8")
    return root, serve(root)


def choose(page, label, value):
    """Choose a machine as a user does who types its name."""
    page.get_by_label(label, exact=True).fill(value)
    page.get_by_role("option", name=value, exact=True).click()


@pytest.mark.slow
def test_a_visitor_sees_plans_mends_what_does_not_fit_and_starts_a_run(server, open_page):
    root, served = server
    forced = "&set=train.micro_batch_size=8&set=train.gradient_checkpointing=false&set=parallel.num_processes=1"
    page = open_page(f"{served.url}new?from=file:large.yaml{forced}")
    plan = page.locator("#plan-plan")
    choose(page, "Machine", "h100")
    plan.get_by_text("does not fit", exact=False).first.wait_for()
    mend = page.locator("#plan-mend")
    mend.wait_for()
    mend.click()
    plan.get_by_text("fits on H100", exact=False).first.wait_for()
    bar = plan.locator(".plan-bar").get_attribute("aria-label")
    assert "weights" in bar and "limit" in bar

    page = open_page(f"{served.url}new?from=file:drafted.yaml")
    page.locator("#plan-plan").get_by_text("lora on pico fits", exact=False).wait_for()
    page.locator("#plan-brief").get_by_text("Fits: This machine").wait_for()
    page.locator("#plan-start:enabled").wait_for()
    # The verdict and the button stay in sight wherever on the page one is.
    for seen in ("#form-section-model", "#form-section-output", "#plan-plan table >> nth=-1"):
        page.locator(seen).scroll_into_view_if_needed()
        place = page.locator("#plan-start").bounding_box()
        assert 0 <= place["y"] < 900 and place["x"] > 640
    page.locator("#plan-options > button").click()
    page.locator("#plan-name").get_by_role("textbox").fill("seen")
    # What is typed last is started, although the server has not heard of it yet.
    slow_down(page)
    page.locator("#form-train-max_steps input").fill("1")
    page.locator("#plan-start").dblclick()
    page.wait_for_url("**/runs?run=seen-*")
    (run,) = tunekit.list_runs(root / "runs")
    assert run.name in page.url and run.recipe.train.max_steps == 1


@pytest.mark.slow
def test_until_there_is_a_plan_the_page_says_that_it_is_made(server, open_page):
    from playwright.sync_api import expect

    _, served = server
    page = open_page(f"{served.url}data")
    slow_down(page)
    page.goto(f"{served.url}new?from=run:deleted")
    # A link that leads nowhere says so, and the first draft is planned.
    launch = page.locator("#plan-launch")
    expect(launch).to_contain_text("Planning…")
    expect(page.locator("#form-notice")).to_contain_text("no run 'deleted' in runs")
    expect(page.locator("#form-problems")).to_contain_text("The recipe is valid.")
    expect(launch).not_to_contain_text("No draft")
    expect(launch).to_contain_text("Fits: This machine")
    expect(page.locator("#plan-start")).to_be_enabled()


@pytest.mark.slow
def test_on_a_phone_the_verdict_and_start_are_in_sight_and_cover_no_field(server, open_page):
    from playwright.sync_api import expect

    _, served = server
    page = open_page(f"{served.url}new?from=file:drafted.yaml", width=390, height=844)
    page.locator("#plan-start:enabled").wait_for()
    bar = page.locator("#plan-bar")
    expect(bar).to_contain_text("Fits: This machine")
    for field in ("#form-model-path", "#form-train-learning_rate", "#form-file"):
        page.locator(f"{field} :is(input, textarea)").first.focus()
        place, covered = page.locator(field).bounding_box(), bar.bounding_box()
        assert place["y"] + place["height"] <= covered["y"] and covered["y"] + covered["height"] <= 844.5
        assert covered["height"] < 844 / 4
        start = page.locator("#plan-start").bounding_box()
        assert covered["y"] <= start["y"] and start["y"] + start["height"] <= 844
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.slow
def test_a_server_that_only_shows_says_so_and_offers_the_command_in_place_of_start(server, serve, open_page):
    from playwright.sync_api import expect

    root, _ = server
    page = open_page(f"{serve(root, '--read-only').url}new?from=recipe:sft/quickstart&set=adapter.rank=8")
    expect(page.locator("#form-read-only")).to_contain_text("it starts nothing")
    expect(page.locator("#plan-brief")).to_contain_text("Fits: This machine")
    expect(page.locator("#form-command")).to_contain_text("tunekit train sft/quickstart adapter.rank=8")
    for absent in ("#plan-start", "#form-save", "#sweep-panel", "#form-hub", "#plan-options"):
        expect(page.locator(absent)).to_be_hidden()


def watch_texts(page, place):
    """Keep each text that a place of a page shows from now on, in `window.texts`."""
    page.evaluate(
        """(place) => {
            const shown = document.querySelector(place);
            window.texts = [];
            new MutationObserver(() => window.texts.push(shown.innerText))
                .observe(shown, {subtree: true, childList: true, characterData: true});
        }""",
        place,
    )


@pytest.mark.slow
def test_a_plan_that_arrives_late_does_not_take_the_place_of_a_later_one(server, open_page):
    """The plan of a large draft on this machine took longer than that on the machine which was chosen meanwhile."""
    _, served = server
    page, held = open_page(f"{served.url}new"), []

    def is_of_this_machine(request):
        values = json.loads(request.post_data or "{}").get("data") or [] if "/queue/join" in request.url else []
        return len(values) >= 4 and values[1:3] == [HERE, plan_panel.NOWHERE]

    def hold(route):
        held.append(route) if is_of_this_machine(route.request) else route.continue_()

    page.route("**/queue/join*", hold)
    forced = "&set=train.micro_batch_size=8&set=train.gradient_checkpointing=false&set=parallel.num_processes=1"
    with page.expect_request(is_of_this_machine):
        page.goto(f"{served.url}new?from=file:large.yaml{forced}")
    choose(page, "Machine", "h100")
    mend = page.locator("#plan-mend")
    mend.wait_for()
    watch_texts(page, "#plan-brief")
    with page.expect_response("**/queue/join*"):
        held[0].continue_()
    mend.click()
    page.locator("#plan-plan").get_by_text("fits on H100", exact=False).first.wait_for()
    assert not [text for text in page.evaluate("window.texts") if "This machine" in text]


@pytest.mark.slow
def test_a_check_that_arrives_late_does_not_take_the_place_of_a_later_one(server, serve, open_page):
    """The text of a draft and its source come into the page one by one, and what is sent first may arrive last."""
    from playwright.sync_api import expect

    root, _ = server
    url = serve(root, "--read-only").url
    page, held = open_page(f"{url}new"), []

    def hold_the_first(route):
        values = json.loads(route.request.post_data or "{}").get("data") or []
        is_check = len(values) == 5 and values[2] == "mine.yaml"
        if is_check and not values[1] and not held:
            held.append(route)
        else:
            route.continue_()

    page.route("**/queue/join*", hold_the_first)
    page.goto(f"{url}new?from=recipe:sft/quickstart&set=adapter.rank=8")
    command = page.locator("#form-command")
    expect(command).to_contain_text("tunekit train sft/quickstart adapter.rank=8")
    watch_texts(page, "#form-command")
    with page.expect_response("**/queue/join*"):
        held[0].continue_()
    page.locator("#form-adapter-rank input").fill("16")
    expect(command).to_contain_text("tunekit train sft/quickstart adapter.rank=16")
    assert not [text for text in page.evaluate("window.texts") if "mine.yaml" in text]
