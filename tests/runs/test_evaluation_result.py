"""Scores of an evaluation as a notebook shows them."""

from dataclasses import replace

from tunekit.runs.evaluation_result import Estimate, Evaluation, Score

GAP = Score(
    name="loss",
    words="loss <x>",
    digits=".2f",
    of="rows.jsonl",
    num_rows=1200,
    higher_is_better=False,
    interval="bootstrap",
    after=Estimate(1.0),
    before=Estimate(1.5),
    difference=Estimate(-0.5, -0.6, -0.4),
)


def test_a_notebook_shows_the_scores_of_an_evaluation():
    cell = Evaluation("mine", 7, "pico", "rows.jsonl", (GAP,), notes=("a note",))._repr_html_()
    assert "mine, step 7" in cell and "compared with pico before training" in cell
    for words in ("loss &lt;x&gt;", "1.50", "1.00", "-0.50 [-0.60, -0.40]", "better", "1,200", "a note"):
        assert words in cell
    alone = Evaluation("mine", None, None, "rows.jsonl", (replace(GAP, before=None, difference=None),))._repr_html_()
    assert "before" not in alone and "1.00" in alone
