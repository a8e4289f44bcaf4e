"""The incremental reader of events, against reading the whole file at once."""

import json
import math
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunekit.runs.events import EventLog, read_events
from tunekit.runs.reader import CHUNK_BYTES, HEAD_BYTES, MAX_POINTS, MAX_TOLD, EventReader, Series, last_events


def written(path: Path, entries, mode="w"):
    with path.open(mode, encoding="utf-8") as stream:
        for time, (kind, fields) in enumerate(entries):
            stream.write(json.dumps({"event": kind, "time": float(time), **fields}) + "\n")


def read(path: Path) -> EventReader:
    reader = EventReader(path)
    reader.read()
    return reader


def values_of(series: Series) -> dict[int, float]:
    return {point.step: point.value for point in series}


def plainly(events) -> dict[str, dict[int, float]]:
    """The curves of a whole list of events: every point, with what was taken back left out."""
    found: dict[str, dict[int, float]] = {}
    for event in events:
        if event["event"] in ("restart", "resume"):
            kept = -1 if event.get("weights_only") else event["step"]
            found = {name: {step: v for step, v in of.items() if step <= kept} for name, of in found.items()}
        if event["event"] not in ("log", "eval"):
            continue
        for name in event.keys() - {"event", "time", "step"}:
            of = {step: v for step, v in found.get(name, {}).items() if step < event["step"]}
            found[name] = {**of, event["step"]: event[name]}
    return {name: of for name, of in found.items() if of}


steps = st.integers(0, 40)
numbers = st.floats(-1e6, 1e6, allow_nan=False)
happenings = st.one_of(
    st.builds(lambda step, loss, rate: ("log", {"step": step, "loss": loss, "rate": rate}), steps, numbers, numbers),
    st.builds(lambda step, loss: ("eval", {"step": step, "eval_loss": loss}), steps, numbers),
    st.builds(lambda step: ("restart", {"step": step, "attempt": 1, "reason": "killed"}), steps),
    st.builds(lambda step, bare: ("resume", {"step": step, "weights_only": bare}), steps, st.booleans()),
    st.builds(lambda text: ("warning", {"message": text}), st.text(max_size=20)),
)


@settings(max_examples=60)
@given(st.lists(happenings, max_size=60), st.lists(st.integers(1, 200), max_size=20))
def test_read_in_any_pieces_it_tells_what_the_whole_file_does(tmp_path_factory, entries, cuts):
    whole, growing = (tmp_path_factory.mktemp("events") / "events.jsonl" for _ in range(2))
    written(whole, entries)
    reader, content, place = EventReader(growing), whole.read_bytes(), 0
    for size in (*cuts, len(content)):
        with growing.open("ab") as stream:
            stream.write(content[place : place + size])
        place += size
        reader.read()
    events = read_events(whole)[0]
    assert {name: values_of(series) for name, series in reader.series.items()} == plainly(events)
    assert reader.all("warning") == [event for event in events if event["event"] == "warning"]
    assert (reader.num_events, reader.read_bytes) == (len(events), len(content))


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(2, 4 * MAX_POINTS), st.integers(0))
def test_of_a_long_curve_the_extremes_of_every_stretch_and_the_last_point_are_kept(apart, length, seed):
    random = Random(seed)
    logged = {apart * step: random.random() for step in range(1, length)}
    series = Series()
    for step, value in logged.items():
        series.add(step, float(step), value)
    kept = values_of(series)
    assert len(series) <= MAX_POINTS and kept.items() <= logged.items()
    assert series.last == (step, float(step), value)
    stretches: dict[int, list[int]] = {}
    for step in logged:
        stretches.setdefault(step // series.width, []).append(step)
    for stretch in stretches.values():
        told = [kept[step] for step in stretch if step in kept]
        assert (min(told), max(told)) == (min(logged[s] for s in stretch), max(logged[s] for s in stretch))


@pytest.mark.parametrize("damage", [{"loss": 10**400}, {"time": 10**400}, {"time": math.nan}, {"step": 10**30}])
def test_numbers_that_no_float_holds_end_no_reading(tmp_path, damage):
    path = tmp_path / "events.jsonl"
    written(path, [("log", {"step": 1, "loss": 3.0}), ("log", {"step": 2, "loss": 2.0})])
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"event": "log", "time": 3.0, "step": 3, "loss": 1.5, **damage}) + "\n")
        stream.write(json.dumps({"event": "log", "time": 4.0, "step": 4, "loss": 1.0}) + "\n")
    reader = read(path)
    assert values_of(reader.series["loss"]) == {1: 3.0, 2: 2.0, 4: 1.0}
    assert reader.num_broken == ("loss" not in damage)


def test_of_a_hundred_thousand_steps_a_single_peak_is_seen_and_little_is_kept(tmp_path):
    path = tmp_path / "events.jsonl"
    loss = {step: 2 + math.sin(step / 1000) for step in range(1, 100_001)} | {54_321: 99.0}
    written(path, (("log", {"step": step, "loss": value, "grad_norm": 1.0}) for step, value in loss.items()))
    reader = read(path)
    assert max(reader.series["loss"], key=lambda point: point.value)[::2] == (54_321, 99.0)
    assert MAX_POINTS / 4 < len(reader.series["loss"]) <= MAX_POINTS
    assert len(reader.series["grad_norm"]) <= MAX_POINTS
    assert reader.series["loss"].last[::2] == (100_000, loss[100_000])
    assert reader.read_bytes == path.stat().st_size > 2 * CHUNK_BYTES


@settings(max_examples=30)
@given(st.lists(st.integers(1, 3 * MAX_POINTS), min_size=1, max_size=6), st.integers(1, 5), st.integers(0))
def test_points_that_are_added_together_keep_the_extremes_of_every_stretch(sizes, apart, seed):
    random, series, logged, step = Random(seed), Series(), {}, 0
    for size in sizes:
        steps = [step + apart * place for place in range(1, size + 1)]
        values = [random.choice((random.random(), 0.5)) for _ in steps]
        series.extend(steps, [float(one) for one in steps], values)
        logged |= zip(steps, values, strict=True)
        # The next ones take some back.
        step = steps[-1] - random.randrange(3)
        logged = {at: value for at, value in logged.items() if at <= step}
        series.cut(step + 1)
    kept = values_of(series)
    assert len(series) <= MAX_POINTS and kept.items() <= logged.items()
    stretches: dict[int, list[int]] = {}
    for one in logged:
        stretches.setdefault(one // series.width, []).append(one)
    # Of a stretch that was cut, what is left is what was an extreme of the whole.
    for stretch in list(stretches.values())[:-1] if len(sizes) == 1 else []:
        told = [kept[one] for one in stretch if one in kept]
        assert (min(told), max(told)) == (min(logged[s] for s in stretch), max(logged[s] for s in stretch))


def test_a_checkpoint_that_is_told_of_late_has_the_loss_of_its_own_step(tmp_path):
    path, saved = tmp_path / "events.jsonl", {4_000: 4_030, 9_001: 9_001}
    entries: list = []
    for step in range(1, 20_001):
        entries.append(("log", {"step": step, "loss": math.sin(step)}))
        entries += [("eval", {"step": step, "eval_loss": 1 / step})] * (step % 1000 == 0)
        entries += [("checkpoint", {"step": at}) for at, told in saved.items() if told == step]
    written(path, entries)
    reader = read(path)
    assert reader.losses_at(4_000) == (math.sin(4_000), 1 / 4_000)
    assert reader.losses_at(9_001) == (math.sin(9_001), 1 / 9_000)
    assert read(tmp_path / "none.jsonl").losses_at(4) == (None, None)


def test_what_was_read_is_not_read_again(tmp_path):
    path = tmp_path / "events.jsonl"
    written(path, [("log", {"step": 1, "loss": 2.0})])
    reader = EventReader(path)
    assert reader.read() and not reader.read()
    before = path.stat().st_size
    written(path, [("log", {"step": 2, "loss": 1.0})], "a")
    assert reader.read() and values_of(reader.series["loss"]) == {1: 2.0, 2: 1.0}
    assert reader.read_bytes == path.stat().st_size > before


def test_a_long_file_can_be_read_in_parts(tmp_path):
    path = tmp_path / "events.jsonl"
    written(path, [("log", {"step": step, "loss": 1.0}) for step in range(100)])
    reader, size = EventReader(path), path.stat().st_size
    told = []
    while reader.read(size // 4) or reader.is_behind:
        told.append(reader.read_bytes)
    assert len(told) >= 4 and told[-1] == size and not reader.is_behind
    assert len(reader.series["loss"]) == 100 and not reader.read()


def test_a_line_still_being_written_waits_for_its_end(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "log", "time": 1.0, "step": 1, "lo', encoding="utf-8")
    reader = EventReader(path)
    assert not reader.read() and reader.num_events == 0
    with path.open("a", encoding="utf-8") as stream:
        stream.write('ss": 3.0}\n')
    assert reader.read() and reader.series["loss"].last.value == 3.0


@pytest.mark.parametrize("how", ["replaced", "cut short", "written over", "taken away"])
def test_another_file_in_its_place_is_noticed(tmp_path, how):
    path = tmp_path / "events.jsonl"
    written(path, [("log", {"step": step, "loss": 1.0}) for step in range(1, 20)])
    reader = read(path)
    anew = [("log", {"step": step, "loss": 5.0}) for step in range(1, 3 if how == "cut short" else 30)]
    if how == "replaced":
        written(tmp_path / "other", anew)
        (tmp_path / "other").replace(path)
    elif how == "taken away":
        path.unlink()
    else:
        written(path, anew)
    assert reader.read()
    told = values_of(reader.series["loss"]) if reader.series else {}
    assert told == ({} if how == "taken away" else {fields["step"]: 5.0 for _, fields in anew})


def test_lines_that_are_no_events_are_counted_and_passed_over(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "log"\n[1]\n\n\xff\xfe\n{"event": "log", "time": 1.0, "step": 1, "loss": 2.0}\n')
    reader = read(path)
    assert (reader.num_events, reader.num_broken) == (1, 3)
    assert reader.series["loss"].last.value == 2.0


def test_numbers_that_are_none_are_left_out_of_the_curves(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("log", step=1, loss=1.5, mfu=None)
    log.write("log", step=2, loss=float("nan"), grad_norm=float("inf"))
    reader = read(log.path)
    assert {name: values_of(series) for name, series in reader.series.items()} == {"loss": {1: 1.5}}


def test_what_a_run_says_often_is_kept_in_bounds(tmp_path):
    path = tmp_path / "events.jsonl"
    told = [("warning", {"message": f"{place} {'x' * HEAD_BYTES}"}) for place in range(3 * MAX_TOLD)]
    asked = [("sample", {"when": "before", "prompt": f"{place}", "answer": "a"}) for place in range(2 * MAX_TOLD)]
    written(path, told + asked)
    reader = read(path)
    assert [event["message"].split()[0] for event in reader.all("warning")][::199] == ["400", "599"]
    assert len(reader.answers) == MAX_TOLD and f"{2 * MAX_TOLD - 1}" in reader.answers


def test_samples_memory_and_results_are_told(tmp_path):
    path = tmp_path / "events.jsonl"
    answers = [("sample", {"when": when, "prompt": "Hi", "answer": when.upper()}) for when in ("before", "after")]
    ranks = [{"peak_memory_bytes": 10}, {"peak_memory_bytes": 30}]
    written(path, [*answers, ("ranks", {"step": 4, "ranks": ranks}), ("result", {"last_loss": 1.0})])
    reader = read(path)
    assert reader.answers == {"Hi": {"before": "BEFORE", "after": "AFTER"}}
    assert values_of(reader.series["peak_memory_bytes"]) == {4: 30}
    result = reader.newest("result")
    assert result is not None and result["last_loss"] == 1.0 and reader.newest("error") is None


def test_the_last_events_are_read_without_the_rest_of_the_file(tmp_path):
    path = tmp_path / "events.jsonl"
    assert last_events(path) == []
    written(path, [("log", {"step": step, "loss": 1.0, "words": "x" * 100}) for step in range(5000)])
    found = [event["step"] for event in last_events(path)]
    assert found == list(range(found[0], 5000)) and 100 < len(found) < 2000
