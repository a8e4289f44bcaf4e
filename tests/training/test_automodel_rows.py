"""Rows for NeMo Automodel: the order of the run's own trainer, labels shifted, steps filled with empty rows."""

from itertools import chain

import pytest
import torch

from tests.tiny import make_tokenizer, save_chats, save_tiny_model
from tunekit.api import verbs
from tunekit.data.prepare import read_dataset
from tunekit.methods.run_trainer import Order
from tunekit.training.automodel import rates_of, split_by_decay
from tunekit.training.automodel_rows import TokenRows, shifted
from tunekit.training.engines.automodel_patches import on_the_cpu

NUM_ROWS, BATCH, STEPS = 11, 4, 7


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    save_tiny_model(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * n) for n in range(NUM_ROWS)))
    save_chats(folder / "held_out.jsonl", ((f"double {n}", f"{2 * n}") for n in range(40, 46)))
    return verbs.make_run(
        {
            "model": str(folder / "model"),
            "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "held_out.jsonl"), "max_length": 64},
            "adapter": "full",
            "train": {"max_steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": 2, "warmup_steps": 2},
            "output": {"dir": str(folder / "run")},
        }
    )


def real(rows, number):
    """Return whether a row has a trained token."""
    return any(label != -100 for label in rows[number]["labels"])


def test_rows_come_in_the_order_of_each_epoch_and_empty_ones_fill_its_last_step(run):
    rows, stored = TokenRows(str(run.path), "train"), read_dataset(run.path / "data" / "train.arrow")
    assert len(rows) == STEPS * BATCH
    order = Order(NUM_ROWS, 0, repeats=False, shuffle=True, seed=run.recipe.train.seed)
    places = list(chain.from_iterable([*order.of_epoch(epoch), None] for epoch in range(3)))[: STEPS * BATCH]
    for number, place in enumerate(places):
        if place is None:
            assert not real(rows, number)
        else:
            assert rows[number]["input_ids"] == stored[place]["input_ids"][:-1]
            assert rows[number]["labels"] == stored[place]["labels"][1:]
    lengths = [0 if place is None else len(stored[place]["input_ids"]) for place in places]
    assert [rows.num_tokens(step) for step in range(STEPS)] == [
        sum(lengths[step * BATCH : (step + 1) * BATCH]) for step in range(STEPS)
    ]


def test_a_resumed_training_begins_behind_the_steps_that_were_taken(run):
    whole, rest = TokenRows(str(run.path), "train"), TokenRows(str(run.path), "train", first_step=3)
    assert [rest[number] for number in range(len(rest))] == [whole[number] for number in range(3 * BATCH, len(whole))]
    assert rest.num_tokens_before == sum(whole.num_tokens(step) for step in range(3))
    assert rest.num_tokens(0) == whole.num_tokens(3)


def test_evaluations_are_in_the_order_of_the_file_and_filled(run):
    rows = TokenRows(str(run.path), "eval")
    assert len(rows) == 6 and all(real(rows, number) for number in range(6))


def test_a_row_of_one_token_is_kept_without_a_label():
    row = shifted([7], [7])
    assert (row["input_ids"], row["labels"], row["attention_mask"]) == ([7], [-100], [1])


def test_norms_and_biases_have_no_weight_decay():
    model = torch.nn.ModuleDict({"proj": torch.nn.Linear(2, 2), "norm": torch.nn.RMSNorm(2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    split_by_decay(model, optimizer)
    with_decay, without = optimizer.param_groups
    assert [parameter.shape for parameter in with_decay["params"]] == [(2, 2)] and with_decay["weight_decay"] == 0.1
    assert [parameter.shape for parameter in without["params"]] == [(2,), (2,)] and without["weight_decay"] == 0.0


def test_learning_rates_are_those_of_the_schedule(run):
    rate_of = rates_of(run.plan, run.plan.schedule)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=run.plan.learning_rate)
    from transformers import get_cosine_schedule_with_warmup

    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
    for step in range(STEPS):
        assert rate_of(step) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


def test_a_replaced_function_that_lacks_the_argument_is_an_error():
    assert on_the_cpu(lambda device, more: (device, more), "device")(more=1) == (torch.device("cpu"), 1)
    with pytest.raises(AttributeError, match="takes no argument 'device'"):
        on_the_cpu(lambda: None, "device")
