"""Rows looked at before training: their tokens are those that training has, and every fault has its place."""

import gzip
import json
import pickle
import subprocess
import sys

import pytest
from trl.trainer.dpo_trainer import DataCollatorForPreference

import tunekit
from tests.data.memory import STATUS
from tests.tiny import save_chats
from tests.waiting import LIMIT_SECONDS
from tunekit.api import verbs
from tunekit.data.reports.look import LINE_BYTES, LOOK_BYTES
from tunekit.errors import DataError
from tunekit.models.load import load_tokenizer
from tunekit.recipe.sections.model import ModelSection


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(train, method="sft", **section):
    return {"model": "pico", "data": {"train": train, **section}, "method": method}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path.name


def ids_of(sequence):
    assert sequence.num_hidden == 0
    return [token for piece in sequence.head.pieces for token in piece.ids]


def labels_of(sequence):
    return [token if piece.trained else -100 for piece in sequence.head.pieces for token in piece.ids]


def text_of(sample):
    return "".join(piece.text for piece in sample.pieces)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("train", "section"),
    [
        ("example:pirate.jsonl", {}),
        ("example:pirate.jsonl", {"loss_on": "all", "max_length": 24}),
        ("example:manners.jsonl", {"loss_on": "last"}),
        ("example:reviews.csv", {"max_length": 40}),
    ],
)
def test_tokens_and_marks_are_those_that_a_run_trains_on(train, section, folder):
    given = recipe(train, **section, shuffle=False)
    run = verbs.make_run(given | {"output": {"dir": str(folder / "run")}, "train": {"max_steps": 1}})
    from tunekit.data.prepare import read_dataset

    trained = read_dataset(run.path / "data" / "train.arrow")
    seen = [row.sequences[0] for row in tunekit.preview(given, num_rows=12).rows if row.left_out is None]
    assert len(seen) == 12
    for sequence, row in zip(seen, trained, strict=False):
        assert (ids_of(sequence), labels_of(sequence)) == (row["input_ids"], row["labels"])
        assert sequence.num_trained == sum(label != -100 for label in row["labels"])


def test_a_long_text_is_shown_as_the_sequences_that_it_becomes(folder):
    write(folder / "texts.jsonl", [{"text": "The boat is small. " * 40}])
    (row,) = tunekit.preview(recipe("texts.jsonl", max_length=32)).rows
    assert [len(ids_of(sequence)) for sequence in row.sequences] == [32, 32, 32]
    assert row.num_more > 0
    assert ids_of(row.sequences[0])[-1] == ids_of(row.sequences[1])[0]
    assert [labels_of(sequence)[0] for sequence in row.sequences] == [-100] * 3


def test_both_sides_of_a_pair_are_those_that_trl_makes():
    given = recipe("example:pairs.jsonl", "dpo", max_length=28)
    tokenizer = load_tokenizer(ModelSection(path="pico"))
    shown = tunekit.preview(given, num_rows=6).rows
    for row in shown:
        pair = json.loads(row.source)
        prompt, *answers = (
            tokenizer.apply_chat_template(messages, add_generation_prompt=asks, return_dict=True)["input_ids"]
            for messages, asks in (
                (pair["prompt"], True),
                (pair["prompt"] + pair["chosen"], False),
                (pair["prompt"] + pair["rejected"], False),
            )
        )
        chosen, rejected = (answer[len(prompt) :] for answer in answers)
        collate = DataCollatorForPreference(pad_token_id=0, max_length=28)
        batch = collate([{"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}])
        for side, ids, is_there, counts in zip(
            row.sequences, batch["input_ids"], batch["attention_mask"], batch["completion_mask"], strict=True
        ):
            assert ids_of(side) == ids[is_there.bool()].tolist()
            assert [label != -100 for label in labels_of(side)] == counts[is_there.bool()].bool().tolist()
    assert [side.name for side in shown[0].sequences] == ["chosen", "rejected"]
    assert any(side.num_cut and text_of(side.cut) for row in shown for side in row.sequences)


def test_a_pair_whose_prompt_leaves_no_room_says_that_it_is_left_out():
    (row,) = tunekit.preview(recipe("example:pairs.jsonl", "dpo", max_length=8), num_rows=1).rows
    assert row.left_out == "prompt longer than 7 tokens"
    assert len(row.sequences) == 2


def test_an_answer_that_is_good_or_bad_shows_its_label(folder):
    rows = [{"prompt": "a", "completion": " b", "label": True}, {"prompt": "a", "completion": " c", "label": False}]
    seen = tunekit.preview(recipe(write(folder / "rated.jsonl", rows), "kto")).rows
    assert [row.label for row in seen] == [True, False]
    assert [text_of(row.sequences[0].head) for row in seen] == ["a b<|im_end|>", "a c<|im_end|>"]


def test_a_prompt_shows_what_rewards_read_in_its_row_and_what_they_cannot_use(folder):
    rows = [{"prompt": "1+1", "answer": "2", "note": {"a": [1]}}, {"prompt": "1+2", "answer": "three", "note": None}]
    method = {"type": "grpo", "rewards": ["numeric_match"], "max_completion_length": 8}
    seen = tunekit.preview(recipe(write(folder / "sums.jsonl", rows), method))
    assert seen.reads == {"numeric_match": "answer"}
    assert [row.fields for row in seen.rows] == [
        {"answer": "2", "note": '{"a": [1]}'},
        {"answer": "three", "note": ""},
    ]
    assert seen.rows[0].left_out is None
    assert "numeric_match cannot use the column 'answer'" in seen.rows[1].left_out
    assert [sequence.name for row in seen.rows for sequence in row.sequences] == ["prompt", "prompt"]
    assert any(
        note.startswith("sums.jsonl: prompts are plain text and bypass the chat template") for note in seen.notes
    )


def test_pages_of_rows_follow_one_another_with_their_places(folder):
    save_chats(folder / "chats.jsonl", [(f"question {n}", f"answer {n}") for n in range(25)])
    pages = [tunekit.preview(recipe("chats.jsonl"), start=start, num_rows=10) for start in (0, 10, 20, 30)]
    assert [[row.place for row in page.rows] for page in pages] == [
        [f"chats.jsonl:{n + 1}" for n in range(start, min(start + 10, 25))] for start in (0, 10, 20, 30)
    ]
    assert all(page.num_rows == 25 and page.is_whole for page in pages)


def test_rows_behind_the_first_thousand_are_read_when_they_are_asked_for(folder):
    write(folder / "texts.jsonl", [{"text": f"text {n}"} for n in range(3000)])
    first = tunekit.preview(recipe("texts.jsonl"), num_rows=1)
    assert (first.num_records, first.is_whole) == (1000, False)
    later = tunekit.preview(recipe("texts.jsonl"), start=2999, num_rows=5)
    assert ([row.place for row in later.rows], later.is_whole) == (["texts.jsonl:3000"], True)


def test_bad_rows_are_listed_with_their_lines_beside_the_good_ones(folder):
    lines = ['{"text": "good"}', "{broken", '{"text": 3}', '{"text": "good too"}', '{"txt": "x"}']
    (folder / "rows.jsonl").write_text("\n".join(lines))
    seen = tunekit.preview(recipe("rows.jsonl"))
    assert [row.place for row in seen.rows] == ["rows.jsonl:1", "rows.jsonl:4"]
    assert [bad.place for bad in seen.bad] == ["rows.jsonl:2:2", "rows.jsonl:3", "rows.jsonl:5"]
    assert seen.bad[1].reason == "text must be a string, got the number 3"
    assert (seen.max_bad_rows, seen.problem, seen.num_records) == (0, None, 5)


def test_columns_that_no_format_has_are_shown_with_what_they_hold_and_can_be_mapped(folder):
    (folder / "odd.csv").write_text("frage,antwort,id\nWho are you?,I am pico.,7\nAnd you?,Me too.,8\n")
    seen = tunekit.preview(recipe("odd.csv"))
    assert (seen.format, seen.rows) == (None, ())
    assert "no format matches the columns frage, antwort, id" in seen.problem.what
    assert [(column.name, column.read_as, column.example) for column in seen.columns] == [
        ("frage", None, "Who are you?"),
        ("antwort", None, "I am pico."),
        ("id", None, "7"),
    ]
    assert ("prompt_completion", ("prompt", "completion")) in [(one.format, one.needed) for one in seen.formats]
    mapped = tunekit.preview(recipe("odd.csv"), ['data.columns={"prompt": "frage", "completion": "antwort"}'])
    assert (mapped.format, mapped.problem, len(mapped.rows)) == ("prompt_completion", None, 2)
    assert [column.read_as for column in mapped.columns] == ["prompt", "completion", None]


def test_rows_that_the_method_does_not_learn_from_are_told_with_their_columns():
    seen = tunekit.preview(recipe("example:sums.jsonl"))
    assert "method sft trains on" in seen.problem.what
    assert seen.problem.hint == "to train on column answer, set data.columns={completion: answer}"
    assert [column.name for column in seen.columns] == ["prompt", "answer"]


def test_each_source_is_looked_at_by_its_key(folder):
    given = recipe(["example:pirate.jsonl", "example:manners.jsonl"])
    seen = tunekit.preview(given, key="data.train[1]", num_rows=1)
    assert seen.sources == (("data.train[0]", "example:pirate.jsonl"), ("data.train[1]", "example:manners.jsonl"))
    assert seen.rows[0].place == "example:manners.jsonl:1"
    with pytest.raises(DataError, match=r"no source data\.eval; available: data\.train\[0\], data\.train\[1\]"):
        tunekit.preview(given, key="data.eval")


def test_without_a_model_the_rows_are_shown_as_they_stand(folder):
    seen = tunekit.preview(recipe("example:pirate.jsonl") | {"model": str(folder)}, num_rows=1)
    assert "the tokenizer" in seen.model_problem.what or "config.json" in seen.model_problem.what
    assert json.loads(seen.rows[0].source)["messages"][0]["content"] == "What is your name?"


def test_a_row_that_the_template_refuses_stands_among_the_others_with_its_reason(folder):
    (folder / "template.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('never no') }}{% endif %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    save_chats(folder / "chats.jsonl", [("a", "b"), ("no", "c"), ("d", "e")])
    given = recipe("chats.jsonl") | {"model": {"path": "pico", "chat_template": "template.jinja"}}
    seen = tunekit.preview(given).rows
    assert [row.left_out is None for row in seen] == [True, False, True]
    assert "never no" in seen[1].left_out


HOSTILE = {
    "a long line": ("a.jsonl", lambda: b'{"text":"a"}\n{"text":"' + b"x" * LINE_BYTES + b'"}\n', "too long to preview"),
    "a long cell": ("a.csv", lambda: b'text\na\n"' + b"x\n" * LOOK_BYTES, None),
    "a large list": ("a.json", lambda: b"[" + b'{"text": "aaaaaaa"},\n' * (LOOK_BYTES // 20), "too large to preview"),
    "brackets": ("a.jsonl", lambda: b'{"text":"a"}\n' + b"[" * (LINE_BYTES // 2) + b"\n", None),
    "no text": ("a.jsonl", lambda: b'{"text":"a"}\n\0\0\0\n', "NUL byte"),
    "another encoding": ("a.csv", lambda: b"text\na\nna\xefve\n", "not UTF-8"),
    "a bomb": ("a.jsonl.gz", lambda: gzip.compress(b'{"text":"a"}\n' + b"x" * (8 * LOOK_BYTES), 1), "too long"),
    "a damaged table": ("a.parquet", lambda: b"PAR1" + b"\xff" * 999 + b"PAR1", "not a Parquet file"),
    "one huge document": ("a.txt", lambda: b"A word and another one.\n" * (4 * LOOK_BYTES // 24), None),
}
READ = """
import json, sys, tunekit
from tests.data.memory import STATUS, peak_mib
given = {"model": "pico", "data": {"train": sys.argv[1]}}
tunekit.preview(given | {"data": {"train": "example:tales.txt"}}, num_rows=1)
before = peak_mib() if STATUS.exists() else 0
try:
    seen = tunekit.preview(given, num_rows=3)
    said = [len(seen.rows), seen.problem and seen.problem.what, [bad.reason for bad in seen.bad]]
except tunekit.TunekitError as error:
    said = [0, error.problem, []]
print(json.dumps([*said, peak_mib() - before if STATUS.exists() else 0]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_made_to_hurt_is_looked_at_in_bounded_memory(name, folder):
    file, content, problem = HOSTILE[name]
    (folder / file).write_bytes(content())
    command = [sys.executable, "-c", READ, file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    (folder / file).unlink()
    assert done.returncode == 0, done.stderr
    num_rows, what, bad, grown_mib = json.loads(done.stdout)
    assert problem is None or problem in what
    assert num_rows == (0 if file in ("a.json", "a.parquet") else 1)
    assert len(bad) <= 1
    assert grown_mib < 900 or not STATUS.exists()


def test_a_file_that_is_not_there_is_told_as_everywhere():
    with pytest.raises(DataError, match=r"data\.train\.path: no file 'nowhere\.jsonl' in the working directory"):
        tunekit.preview(recipe("nowhere.jsonl"))


def test_a_preview_is_plain_data_that_goes_from_one_process_to_another():
    seen = tunekit.preview(recipe("example:pairs.jsonl", "dpo"), num_rows=2)
    assert pickle.loads(pickle.dumps(seen)) == seen
    assert json.loads(json.dumps(seen.to_dict()))["rows"][0]["sequences"][0]["name"] == "chosen"
    assert not any("plain text" in note for note in seen.notes), "its prompts are messages"
