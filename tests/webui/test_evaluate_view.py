"""The evaluation tab: what it offers, what it refuses, and what it shows of the figures."""

import gradio as gr
import pytest

from tests.waiting import until
from tunekit import frontend
from webui import evaluate_view
from webui.evaluate_view import begin, evaluations_html, look
from webui.site import Site
from webui.words import Words

SEEN, SHOWN, CHECKPOINT, START, STATUS = range(5)
EN, ZH = Words("en"), Words("zh")


@pytest.fixture
def site(workspace, trained_run):
    return Site(root=workspace)


def wanted(**changes):
    return {"checkpoint": "", "data": "", "limit": "", "metrics": "", "tasks": "", "before": True, **changes}


def test_a_finished_run_offers_its_result_and_its_checkpoints(site, trained_run):
    found = look(site, EN, trained_run.name, "")
    assert [value for _, value in found[CHECKPOINT].choices] == ["", "8", "4"]
    assert found[START].interactive and found[STATUS] == "" and "Not evaluated yet" in found[SHOWN]
    assert look(site, EN, trained_run.name, found[SEEN]) == [gr.skip()] * 5, "nothing has changed"
    assert "role='alert'" in look(site, EN, "no-such", "")[SHOWN]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data": "../other.jsonl"}, "outside the workspace"),
        ({"limit": "many"}, "is not a number of rows"),
        ({"limit": "0"}, "is not a number of rows"),
        ({"metrics": "[exact_match"}, "cannot be read"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_at_once(site, trained_run, changes, problem):
    assert problem in begin(site, EN, trained_run.name, **wanted(**changes))


def test_figures_are_shown_with_their_intervals_and_verdicts_and_are_text(site):
    def estimate(value):
        return frontend.Estimate(value, value - 0.05, value + 0.05)

    score = frontend.Score(
        "loss", "<b>loss</b>", ".2f", "rows", 32, False, "bootstrap", estimate(1.0), estimate(2.0), estimate(-1.0)
    )
    alone = frontend.Score("loss", "loss", ".2f", "rows", 1, None, "bootstrap", frontend.Estimate(3.0))
    made = [
        frontend.Evaluation("old", 4, None, "rows.jsonl", (alone,)),
        frontend.Evaluation("<i>new</i>", None, "pico", "rows.jsonl", (score,), notes=("<u>note</u>",)),
    ]
    page = evaluations_html(made, EN)
    assert page.index("&lt;i&gt;new") < page.index("old on rows.jsonl") and "step 4" in page
    assert "1.00 [0.95, 1.05]" in page and "-1.00 [-1.05, -0.95] <span class='evaluate-better'>better" in page
    assert not any(tag in page for tag in ("<b>", "<i>", "<u>"))
    assert "evaluate-better'>" + ZH("evaluate.better") in evaluations_html(made, ZH)


@pytest.mark.slow
def test_an_evaluation_is_made_and_its_figures_are_shown_to_every_browser(site, trained_run):
    assert "Starting" in begin(site, EN, trained_run.name, **wanted(checkpoint="4", limit="3"))
    assert "is already being evaluated" in begin(site, EN, trained_run.name, **wanted())
    assert not look(site, EN, trained_run.name, "")[START].interactive

    def over():
        return until(lambda: found if (found := evaluate_view._jobs.progress_of(trained_run)).is_over else None)

    assert over().phase == "done"
    (made,) = frontend.evaluations_of(trained_run)
    assert made.step == 4 and made.scores[0].num_rows == 3
    for words in (EN, ZH):
        found = look(site, words, trained_run.name, "")
        assert made.scores[0].cells[1] in found[SHOWN] and words("evaluate.phase_done") in found[STATUS]
    begin(site, EN, trained_run.name, **wanted(data="sums.jsonl", metrics="no_such"))
    over()
    assert "no metric" in look(site, EN, trained_run.name, "")[STATUS]
