"""Charts as they go to the browser: the specification holds what was logged."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from tunekit import frontend
from webui import charts
from webui.chart_layers import MAX_BANDS, bands_of
from webui.charts import Curve, Kind, View
from webui.words import LOCALES, Words

WORDS = Words("en")
LOSS = next(kind for kind in charts.KINDS if kind.key == "loss")
MEMORY = next(kind for kind in charts.KINDS if kind.key == "memory")


def reader_of(path: Path, entries) -> frontend.EventReader:
    lines = [{"event": kind, "time": 1000.0 + 60 * time, **fields} for time, (kind, fields) in enumerate(entries)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    reader = frontend.EventReader(path)
    reader.read()
    return reader


def log(step, **fields):
    return ("log", {"step": step, **fields})


def drawn(spec, layer=None, curve=None):
    rows = spec["data"]["values"]
    return {row["x"]: row["y"] for row in rows if layer in (None, row["k"]) and curve in (None, row["t"])}


def test_a_chart_holds_the_logged_values_of_training_and_evaluation(tmp_path):
    entries = [("eval", {"step": 0, "eval_loss": 3.0}), log(1, loss=2.5), log(2, loss=2.25)]
    reader = reader_of(tmp_path / "events.jsonl", entries)
    spec = charts.spec_of(LOSS, charts.curves_of("mine", reader, LOSS, View()), View(), WORDS)
    assert drawn(spec, curve="training") == {1: 2.5, 2: 2.25}
    assert drawn(spec, curve="evaluation") == {0: 3.0}
    assert spec["title"]["text"] == "Loss" and "training, evaluation" in spec["description"]
    assert json.loads(charts.to_text(spec)) == spec


def default_keys(names):
    return [kind.key for kind in charts.kinds_of(names) if kind.is_default]


def test_every_logged_metric_is_a_curve_of_exactly_one_chart(tmp_path):
    entries = [
        ("eval", {"step": 0, "eval_loss": 3.0, "eval_samples_per_second": 7.0, "eval_logps/chosen": -3.0}),
        log(1, **{"loss": 2.5, "logps/chosen": -2.0, "step_seconds": 0.5, "rewards/a/mean": 1.0, "rewards/a/std": 0.5}),
        log(2, **{"clip_ratio/region_mean[x]": 0.25, "grad_norm": 1.0}),
    ]
    reader = reader_of(tmp_path / "events.jsonl", entries)
    kinds = charts.kinds_of(reader.series)
    drawn_names = [curve.name for kind in kinds for curve in charts.curves_of("mine", reader, kind, View())]
    assert sorted(drawn_names) == sorted(reader.series)
    others = [kind.key for kind in kinds if not kind.is_default]
    assert others == [
        *("clip_ratio/region_mean[x]", "eval_samples_per_second", "logps/chosen", "rewards/a/std", "step_seconds"),
    ]
    kind = next(kind for kind in kinds if kind.key == "logps/chosen")
    spec = charts.spec_of(kind, charts.curves_of("mine", reader, kind, View()), View(), WORDS)
    assert spec["title"]["text"] == "logps/chosen"
    assert drawn(spec, curve="training") == {1: -2.0} and drawn(spec, curve="evaluation") == {0: -3.0}


def test_curves_by_tokens_lie_at_the_tokens_of_their_step(tmp_path):
    entries = [
        ("eval", {"step": 0, "eval_loss": 3.0}),
        *(log(step, loss=float(step), num_tokens=1000 * step) for step in (2, 4, 6)),
        ("eval", {"step": 5, "eval_loss": 2.0}),
    ]
    reader = reader_of(tmp_path / "events.jsonl", entries)
    view = View(by="tokens")
    spec = charts.spec_of(LOSS, charts.curves_of("mine", reader, LOSS, view), view, WORDS)
    assert drawn(spec, curve="training") == {2000: 2, 4000: 4, 6000: 6}
    assert drawn(spec, curve="evaluation") == {0: 3.0, 4000: 2.0}
    assert spec["encoding"]["x"]["title"] == "tokens"


def test_curves_by_epochs_lie_at_the_epoch_of_their_step(tmp_path):
    steps = [log(step, loss=float(step), epoch=step / 4) for step in (2, 4, 6)]
    reader = reader_of(tmp_path / "events.jsonl", [*steps, ("eval", {"step": 5, "eval_loss": 2.0})])
    view = View(by="epochs")
    spec = charts.spec_of(LOSS, charts.curves_of("mine", reader, LOSS, view), view, WORDS)
    assert drawn(spec, curve="training") == {0.5: 2, 1.0: 4, 1.5: 6} and drawn(spec, curve="evaluation") == {1.0: 2.0}
    assert spec["encoding"]["x"]["title"] == "epochs"


def test_a_resumed_run_has_a_line_where_it_was_resumed(tmp_path):
    steps = {step: log(step, loss=float(step), num_tokens=100 * step) for step in range(1, 9)}
    resumed = [("resume", {"step": step}) for step in (6, 4)]
    # The second resume took back the first one, and a restart is told of twice.
    entries = [*(steps[step] for step in range(1, 9)), resumed[0], steps[7], ("restart", {"step": 4}), resumed[1]]
    reader = reader_of(tmp_path / "events.jsonl", [*entries, *(steps[step] for step in range(5, 9))])

    def lines(view, name="mine", others=()):
        curves = [*charts.curves_of(name, reader, LOSS, view), *others]
        marks = charts.resumes_of(name, reader, view)
        spec = charts.spec_of(LOSS, curves, view, WORDS, resumed=marks)
        return spec["layer"][-1]["data"]["values"], spec["description"]

    assert lines(View()) == ([{"x": 4, "w": "resumed from step 4"}], "Loss: training, resumed from step 4")
    assert lines(View(by="tokens"))[0][0]["x"] == 400
    other = Curve("other", "loss", [(1.0, 2.0)])
    assert lines(View(), others=[other])[0] == [{"x": 4, "w": "mine: resumed from step 4"}]
    (by_time,) = charts.resumes_of("mine", reader, View(by="time"))
    assert by_time.place * 60 == pytest.approx(11), "it is the twelfth event, one a minute"
    reader = reader_of(tmp_path / "weights.jsonl", [steps[1], ("resume", {"step": 8, "weights_only": True}), steps[1]])
    assert charts.resumes_of("mine", reader, View()) == [charts.Resume("mine", 0, 8)]


def test_the_pointer_shows_the_values_of_all_curves_at_the_nearest_place():
    curves = [
        Curve("one", "loss", [(float(step), step / 8) for step in range(0, 101, 10)]),
        Curve("two", "loss", [(float(step), 2.0) for step in range(0, 51, 25)]),
    ]
    spec = charts.spec_of(LOSS, curves, View(), WORDS)
    bands = bands_of(spec["data"]["values"])
    assert [band["x"] for band in bands] == [0, 10, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100]
    assert bands[0]["a"] == 0 and bands[-1]["b"] == 100
    assert all(left["b"] == right["a"] == (left["x"] + right["x"]) / 2 for left, right in pairwise(bands))
    assert [band["v0"] for band in bands][2:5] == ["2.5", "2.5 (20)", "3.75"]
    assert [band["v1"] for band in bands] == ["2", "2 (0)", "2 (25)", "2", "2 (25)", "2 (50)", "2", *5 * "–"]
    titles = [field["title"] for layer in spec["layer"] for field in layer["encoding"].get("tooltip", ())]
    assert titles == ["step", "one · training", "two · training"]


def test_the_pointer_tells_as_many_places_apart_as_can_be_met():
    smooth = View(smoothing=0.5)
    curve = Curve("one", "loss", [(float(step), float(step % 2)) for step in range(5000)])
    bands = bands_of(charts.spec_of(LOSS, [curve], smooth, WORDS)["data"]["values"])
    assert MAX_BANDS / 2 <= len(bands) <= MAX_BANDS + 1 and (bands[0]["x"], bands[-1]["x"]) == (0, 4999)
    assert all(0 < float(band["v0"]) < 1 for band in bands[1:]), "the smoothed curve, and not the faint one"
    (only,) = bands_of([{"x": 3.0, "y": 1.0, "k": "plain", "g": 0, "t": "training"}])
    assert only["a"] < 3 < only["b"] and bands_of([]) == []


def test_a_method_has_the_charts_of_what_it_logs(tmp_path):
    sft = ["loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "epoch"]
    assert default_keys(sft) == ["loss", "learning_rate", "grad_norm", "speed"]
    dpo = ["loss", "rewards/margins", "rewards/accuracies", "rewards/chosen", "rewards/rejected"]
    assert default_keys(dpo) == ["margins", "accuracies", "preferred", "loss"]
    grpo = [
        *("loss", "reward", "rewards/numeric_match/mean", "rewards/regex/mean", "rewards/regex/std", "kl"),
        *("completions/mean_length", "frac_reward_zero_std", "learning_rate"),
    ]
    assert default_keys(grpo) == ["reward", "functions", "loss", "kl", "length", "signal", "learning_rate"]
    functions = next(kind for kind in charts.KINDS if kind.key == "functions")
    reader = reader_of(tmp_path / "events.jsonl", [log(1, **dict.fromkeys(grpo, 0.5))])
    curves = charts.curves_of("mine", reader, functions, View())
    labels = [charts.label_of(curve, WORDS, several=False) for curve in curves]
    assert labels == ["numeric_match", "regex"], "a spread is no reward"


def test_time_is_told_in_the_unit_that_it_takes(tmp_path):
    for apart, unit, last in ((1, "minutes", 60.0), (3, "hours", 3.0)):
        reader = reader_of(tmp_path / "events.jsonl", [log(step // apart, loss=1.0) for step in range(60 * apart + 1)])
        view = View(by="time")
        spec = charts.spec_of(LOSS, charts.curves_of("mine", reader, LOSS, view), view, WORDS)
        assert spec["encoding"]["x"]["title"] == unit
        assert max(drawn(spec)) == pytest.approx(last)


def test_smoothing_is_a_running_mean_that_begins_at_the_first_value():
    points = [(float(step), 1.0 if step % 2 else 3.0) for step in range(200)]
    assert charts.smoothed(points, 0) == points
    found = charts.smoothed(points, 0.9)
    assert found[0] == points[0] and [x for x, _ in found] == [x for x, _ in points]
    assert all(abs(y - 2.0) < 0.1 for _, y in found[100:])
    # By hand: weights 0.81, 0.9 and 1 of the first, the second and the third.
    third = (0.81 * 3.0 + 0.9 * 1.0 + 3.0) / (0.81 + 0.9 + 1)
    assert found[2][1] == pytest.approx(third)


def test_a_smoothed_curve_keeps_what_was_logged_behind_it(tmp_path):
    reader = reader_of(tmp_path / "events.jsonl", [log(step, loss=float(step % 5)) for step in range(50)])
    view = View(smoothing=0.8)
    spec = charts.spec_of(LOSS, charts.curves_of("mine", reader, LOSS, view), view, WORDS)
    assert drawn(spec, "faint") == {step: float(step % 5) for step in range(50)}
    assert drawn(spec, "plain") != drawn(spec, "faint")


def test_what_is_no_noisy_measure_is_drawn_as_it_was_logged(tmp_path):
    rates = {step: 1e-4 * (1 - step / 50) for step in range(50)}
    steps = [log(step, learning_rate=rate, peak_memory_bytes=2**30 * (1 + step)) for step, rate in rates.items()]
    reader = reader_of(tmp_path / "events.jsonl", steps)
    view = View(smoothing=0.9)
    for key, logged in (("learning_rate", rates), ("memory", {step: 1 + step for step in rates})):
        kind = next(kind for kind in charts.KINDS if kind.key == key)
        spec = charts.spec_of(kind, charts.curves_of("mine", reader, kind, view), view, WORDS)
        assert drawn(spec, "plain") == pytest.approx(logged) and not drawn(spec, "faint")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_less_is_said_to_be_better_only_of_a_loss_that_tells_how_good_a_model_is(tmp_path, language):
    words = Words(language)

    def subtitle(name, *entries):
        reader = reader_of(tmp_path / name, entries)
        return charts.spec_of(LOSS, charts.curves_of(name, reader, LOSS, View()), View(), words)["title"]["subtitle"]

    assert subtitle("sft", log(1, loss=2.5), ("eval", {"step": 1, "eval_loss": 2.6})) == words("charts.loss_help")
    assert subtitle("dpo", log(1, loss=0.6, **{"rewards/margins": 0.1})) == words("charts.loss_help")
    assert words("charts.loss_help") not in subtitle("grpo", log(1, loss=0.01, reward=0.5, kl=0.1, entropy=1.0))


def test_a_legend_is_as_strong_as_the_curve_that_it_names(tmp_path):
    curves = [Curve(run, "loss", [(float(step), 2.0) for step in range(9)]) for run in ("one", "two")]
    spec = charts.spec_of(LOSS, curves, View(smoothing=0.9), WORDS)
    assert spec["layer"][0]["mark"]["opacity"] < 1, "the first layer, which a legend would follow, is the faint one"
    assert spec["encoding"]["color"]["legend"]["symbolOpacity"] == 1


@pytest.mark.parametrize(("num", "has_points"), [(5, True), (100, False)])
def test_few_evaluations_are_marked_by_points_and_many_hide_no_other_curve(num, has_points):
    curve = Curve("one", "eval_loss", [(float(step), 2.0) for step in range(num)])
    layers = charts.spec_of(LOSS, [curve], View(), WORDS)["layer"]
    (dashed,) = [layer["mark"] for layer in layers if "strokeDash" in layer["mark"]]
    assert bool(dashed["point"]) == has_points


def test_a_long_curve_is_thinned_to_what_a_screen_shows_with_its_peaks():
    points = [(float(step), math.sin(step)) for step in range(1900)] + [(1900.0, 50.0), (1901.0, 0.0)]
    found = charts.thinned(points)
    assert len(found) <= charts.MAX_DRAWN and set(found) <= set(points) and found == sorted(found)
    assert (1900.0, 50.0) in found and found[-1] == points[-1]
    assert charts.thinned(points[:300]) == points[:300]


def test_a_logarithmic_axis_leaves_out_what_has_no_logarithm():
    curve = Curve("mine", "loss", [(1.0, 0.0), (2.0, -1.0), (3.0, 10.0)])
    spec = charts.spec_of(LOSS, [curve], View(is_log=True), WORDS)
    assert spec["encoding"]["y"]["scale"]["type"] == "log" and drawn(spec) == {3.0: 10.0}


def test_outliers_are_left_out_of_the_axis_and_kept_in_the_data():
    curve = Curve("mine", "loss", [(float(step), 1e6 if step == 50 else 1.0 + step / 100) for step in range(100)])
    spec = charts.spec_of(LOSS, [curve], View(clip=True), WORDS)
    least, most = spec["encoding"]["y"]["scale"]["domain"]
    assert 1.0 <= least < most <= 2.0 and drawn(spec)[50.0] == 1e6
    assert "domain" not in charts.spec_of(LOSS, [curve], View(), WORDS)["encoding"]["y"]["scale"]


def test_outliers_are_those_of_each_curve_as_it_is_drawn():
    noisy = Curve("mine", "loss", [(float(step), 1.0 + (step == 50) * 1e6) for step in range(100)])
    few = Curve("mine", "eval_loss", [(0.0, 5.0), (50.0, 4.0), (99.0, 3.0)])
    spec = charts.spec_of(LOSS, [noisy, few], View(clip=True), WORDS)
    assert spec["encoding"]["y"]["scale"]["domain"] == [1.0, 5.0]
    smooth = charts.spec_of(LOSS, [noisy], View(clip=True, smoothing=0.5), WORDS)
    faint = {row["x"] for row in smooth["data"]["values"] if row["k"] == "faint" and row["y"] == 1e6}
    assert faint == {50.0} and smooth["encoding"]["y"]["scale"]["domain"][1] < 1e6


def test_the_plot_of_a_chart_with_a_legend_is_as_high_as_that_of_one_without():
    one = charts.spec_of(LOSS, [Curve("mine", "loss", [(1.0, 2.0)])], View(), WORDS)
    several = charts.spec_of(LOSS, [Curve(run, "loss", [(1.0, 2.0)]) for run in ("a", "b")], View(), WORDS)
    assert one["encoding"]["color"]["legend"] is None and several["encoding"]["color"]["legend"] is not None
    assert one["height"] == several["height"] and one["autosize"]["type"] == several["autosize"]["type"] == "fit-x"


def test_several_runs_have_a_colour_each_and_keep_their_names():
    curves = [Curve(run, name, [(1.0, 2.0)]) for run in ("one", "two") for name in ("loss", "eval_loss")]
    spec = charts.spec_of(LOSS, curves, View(), WORDS)
    assert spec["encoding"]["color"]["scale"]["domain"] == ["one", "two"]
    assert [row["t"] for row in spec["data"]["values"]] == [
        "one · training", "one · evaluation", "two · training", "two · evaluation",
    ]  # fmt: skip


def test_a_curve_of_one_run_among_several_has_the_name_and_colour_that_the_run_has_elsewhere():
    curves = [Curve(run, "loss", [(1.0, 2.0), (2.0, 1.0)]) for run in ("one", "two")]
    both, alone = (charts.spec_of(LOSS, some, View(), WORDS, runs=["one", "two"]) for some in (curves, curves[1:]))
    assert {row["t"] for row in alone["data"]["values"]} == {"two · training"}
    colours = [dict(zip(*spec["encoding"]["color"]["scale"].values(), strict=True)) for spec in (both, alone)]
    assert colours[1] == {"two": colours[0]["two"]} and colours[0]["one"] != colours[0]["two"]
    assert alone["encoding"]["color"]["legend"] is not None


def test_a_legend_chooses_curves():
    curves = [Curve(run, name, [(1.0, 2.0), (2.0, 1.0)]) for run in ("one", "two") for name in ("loss", "eval_loss")]
    layers = charts.spec_of(LOSS, curves, View(smoothing=0.5), WORDS)["layer"]
    lines = [layer["encoding"]["opacity"] for layer in layers if "detail" in layer["encoding"]]
    assert [(line["condition"]["value"], line["value"]) for line in lines] == [(0.3, 0.03), (1, 0.1), (1, 0.1)]
    (chosen,) = [param for layer in layers for param in layer.get("params", ()) if param.get("bind") == "legend"]
    assert {line["condition"]["param"] for line in lines} == {chosen["name"]}
    alone = charts.spec_of(LOSS, curves[:1], View(), WORDS)
    assert '"shown"' not in charts.to_text(alone), "without a legend"


def test_memory_is_drawn_in_gib_beside_what_was_planned():
    reader_rows = [Curve("mine", "peak_memory_bytes", [(4.0, 1.5)])]
    spec = charts.spec_of(MEMORY, reader_rows, View(), WORDS, planned_bytes=2 * 2**30)
    planned = spec["layer"][-1]["data"]["values"]
    assert planned[0]["y"] == 2.0 and "2.00 GiB" in planned[0]["w"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_kind_of_chart_has_its_texts(language):
    assert (LOCALES / language / "charts.yaml").is_file()
    for kind in charts.KINDS:
        assert isinstance(kind, Kind)
        curve = Curve("mine", kind.names[0].replace("*", "some"), [(1.0, 1.0), (2.0, 2.0)])
        spec = charts.spec_of(kind, [curve], View(), Words(language))
        assert spec["title"]["text"] and spec["title"]["subtitle"] and spec["data"]["values"][0]["t"]
