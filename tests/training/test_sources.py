"""Several sources in one run, and rows that are read while training."""

import json

import pytest

import tunekit
from tests.tiny import make_tokenizer, save_chats, save_tiny_model
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.prepare import read_dataset
from tunekit.errors import DataError


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model", hidden=32)
    save_chats(folder / "doubles.jsonl", ((f"double {n}", f"{2 * n}") for n in range(30)))
    rows = [{"instruction": f"triple {n}", "output": str(3 * n)} for n in range(8)]
    (folder / "triples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "notes.txt").write_text("One note.\n\n\nAnother note.", encoding="utf-8")
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return workspace


def recipe(train, **data):
    return {
        "model": "model",
        "data": {"train": train, "max_length": 96, **data},
        "train": {"max_steps": 3, "global_batch_size": 4, "learning_rate": 1e-3},
        "output": {"sample_prompts": []},
    }


MIXED = [
    {"path": "doubles.jsonl", "weight": 2.0},
    {"path": "triples.jsonl", "weight": 1.0, "format": "alpaca", "loss_on": "all"},
]


def texts(dataset):
    """Each sequence with ⟦ ⟧ around what counts."""
    tokenizer = make_tokenizer()
    for row in dataset:
        text = ""
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            piece = tokenizer.decode([token])
            text += piece if label == -100 else f"⟦{piece}⟧"
        yield text.replace("⟧⟦", "")


@pytest.mark.slow
def test_sources_of_different_formats_and_masks_are_trained_on_by_weight(here):
    run = tunekit.train(recipe(MIXED))
    found = list(texts(read_dataset(run.path / "data" / "train.arrow")))
    # The eight triples are all there is of them, so sixteen doubles stand beside them.
    assert sum("double" in text for text in found) == 16
    assert sum("triple" in text for text in found) == 8
    assert [text for text in found if "triple 3" in text] == [
        "<|im_start|>⟦user\ntriple 3<|im_end|>\n<|im_start|>assistant\n9<|im_end|>\n⟧"
    ]
    assert all(text.count("⟦") == 1 and "assistant\n⟦" in text for text in found if "double" in text)
    (mixture,) = (reason for reason in run.plan.reasons if reason.topic == "mixture")
    assert mixture.why == "weights 2 : 1 by rows; no row repeated; 16, 8 rows"
    report = json.loads((run.path / "data" / "report.json").read_text(encoding="utf-8"))
    shares = [part["token_share"] for part in report["mixture"]]
    assert mixture.choice == "doubles.jsonl {:.1%}, triples.jsonl {:.1%} of the tokens".format(*shares)
    assert (run.path / "data" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_plan_estimates_the_shares_before_anything_is_tokenised(here):
    (mixture,) = (reason for reason in tunekit.plan(recipe(MIXED)).reasons if reason.topic == "mixture")
    assert mixture.choice.endswith("of the text, before tokenization")
    assert "16, 8 rows" in mixture.why


@pytest.mark.slow
def test_a_run_folder_names_all_of_its_sources_and_can_be_read_again(here):
    run = tunekit.train(recipe(MIXED))
    again = tunekit.load_recipe(run.path / "recipe.yaml")
    assert [source.path for source in again.data.sources] == [str(here / "doubles.jsonl"), str(here / "triples.jsonl")]
    assert [source.weight for source in again.data.sources] == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_is_trained_on_in_its_order_like_the_same_rows_prepared_before(here, packing):
    order = {} if packing else {"shuffle": False}
    streamed = tunekit.train(recipe("doubles.jsonl", streaming=True, packing=packing, **order))
    assert not (streamed.path / "data" / "train.arrow").exists()
    (data,) = (reason for reason in streamed.plan.reasons if reason.topic == "data")
    assert data.choice == "stream of rows"
    if not packing:
        prepared = tunekit.train(recipe("doubles.jsonl", shuffle=False))
        assert streamed.metrics()["loss"].tolist() == prepared.metrics()["loss"].tolist()
    else:
        assert streamed.metrics()["num_tokens"].tolist()[-1] > 3 * 4 * 60


@pytest.mark.slow
def test_a_stream_starts_again_where_it_is_shorter_than_the_run(here):
    run = tunekit.train(recipe("notes.txt", streaming=True), ["train.max_steps=4"])
    assert len(run.metrics()) == 4


@pytest.mark.slow
def test_a_bad_row_in_the_middle_of_a_stream_ends_the_run_with_its_place(here):
    rows = (here / "doubles.jsonl").read_text(encoding="utf-8")
    (here / "late.jsonl").write_text(rows * 50 + "{broken\n" + rows * 20, encoding="utf-8")
    long = ["train.max_steps=500", "train.global_batch_size=8"]
    with pytest.raises(DataError, match=r"late\.jsonl:1501:2: invalid JSON"):
        tunekit.train(recipe("late.jsonl", streaming=True), long)
    run = tunekit.train(
        recipe("late.jsonl", streaming=True, max_bad_rows=1), ["train.max_steps=230", "train.global_batch_size=8"]
    )
    skipped = (run.path / "data" / "stream_skipped.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["place"] for line in skipped] == [f"{here}/late.jsonl:1501:2"]


def test_streams_are_mixed_by_weight(here):
    from tunekit.data.packing.stream import stream

    section = tunekit.load_recipe(recipe(MIXED, streaming=True, shuffle=False)).data
    dataset = stream(section, make_tokenizer(), learner_of("sft"), seed=0, skipped=here / "skipped.jsonl")
    found = ["d" if "double" in text else "t" for text in texts(dataset)]
    # Twice as many doubles as triples, until a ninth triple would be due.
    assert "".join(found) == "dtd" * 8 + "d"
