"""Which rows each step takes: the same for any number of processes, each epoch and after resuming."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, prepare_data_loader, skip_first_batches
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader
from transformers import TrainerControl, TrainerState
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from tunekit.methods.arguments import even_size
from tunekit.methods.run_trainer import (
    GroupOrder,
    Order,
    filled,
    filled_stream,
    filled_with_first,
    num_missing,
    run_trainer,
)


def order_of(num_rows, multiple, *, repeats=False, shuffle=True, seed=3, epoch=0):
    order = Order(num_rows, num_missing(num_rows, multiple), repeats=repeats, shuffle=shuffle, seed=seed)
    order.on_epoch_begin(None, TrainerState(epoch=float(epoch)), TrainerControl())
    return order


def batches_of(order, micro_batch_size, num_processes):
    """Micro-batches of each process."""
    samplers = [
        BatchSamplerShard(BatchSampler(order, micro_batch_size, drop_last=False), num_processes, rank)
        for rank in range(num_processes)
    ]
    return [list(sampler) for sampler in samplers]


@given(
    num_rows=st.integers(1, 60),
    num_processes=st.integers(1, 5),
    micro_batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_each_step_has_the_rows_that_it_has_in_one_process(
    num_rows, num_processes, micro_batch_size, accumulation, epoch, shuffle
):
    at_once = micro_batch_size * num_processes
    batch = at_once * accumulation
    spread = batches_of(order_of(num_rows, at_once, shuffle=shuffle, epoch=epoch), micro_batch_size, num_processes)
    alone = list(order_of(num_rows, 1, shuffle=shuffle, epoch=epoch))
    assert sorted(alone) == list(range(num_rows))
    assert len({len(batches) for batches in spread}) == 1
    steps = range(0, len(spread[0]), accumulation)
    found = [
        {row for batches in spread for one in batches[step : step + accumulation] for row in one if row < num_rows}
        for step in steps
    ]
    assert found == [set(alone[start : start + batch]) for start in range(0, num_rows, batch)]
    rows = [row for batches in spread for one in batches for row in one]
    assert len(rows) == len(set(rows)), "no row comes twice"


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_the_order_is_that_of_accelerates_own_sampler(epoch):
    theirs = SeedableRandomSampler(range(40), data_seed=3)
    theirs.set_epoch(epoch)
    assert list(order_of(40, 1, epoch=epoch)) == list(theirs)


@given(num_pairs=st.integers(1, 40), batch=st.integers(1, 16))
def test_pairs_of_its_beginning_fill_the_last_step_of_an_epoch(num_pairs, batch):
    order = list(order_of(num_pairs, batch, repeats=True))
    assert len(order) % batch == 0
    assert sorted(order[:num_pairs]) == list(range(num_pairs))
    assert all(row == order[place % num_pairs] for place, row in enumerate(order))


def test_epochs_have_orders_of_their_own_and_a_seed_gives_them_again():
    orders = [list(order_of(30, 4, epoch=epoch)) for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert list(order_of(30, 4, seed=4)) != orders[0]


def rows_of(num_rows, *, packed):
    columns = {"input_ids": [[5, 6, 7]] * num_rows, "labels": [[-100, 6, 7]] * num_rows}
    return Dataset.from_dict({**columns, "seq_lengths": [[1, 2]] * num_rows} if packed else columns)


@pytest.mark.parametrize("packed", [True, False])
def test_rows_that_fill_have_one_token_that_is_not_trained_on(packed):
    rows = filled(rows_of(5, packed=packed), 4, pad_token_id=9)
    assert len(rows) == 8
    assert rows.features == rows_of(5, packed=packed).features
    empty = {"input_ids": [9], "labels": [-100], **({"seq_lengths": [1]} if packed else {})}
    assert rows[4] == rows_of(5, packed=packed)[4]
    assert [rows[place] for place in (5, 6, 7)] == [empty] * 3


def test_rows_that_need_no_filling_are_left_as_they_are():
    rows = rows_of(8, packed=False)
    assert filled(rows, 4, pad_token_id=9) is rows
    assert filled_with_first(rows, 4) is rows


def test_pairs_behind_the_others_are_the_first_again():
    assert filled_with_first(Dataset.from_dict({"prompt": ["a", "b", "c"]}), 8)["prompt"][:] == list("abcabcab")


@pytest.mark.parametrize("packed", [True, False])
def test_a_stream_ends_with_a_whole_step_in_every_epoch(packed):
    rows = rows_of(5, packed=packed)
    stream = filled_stream(rows.to_iterable_dataset().shuffle(seed=0, buffer_size=3), 4, pad_token_id=9)
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        found = list(stream)
        assert [row["input_ids"] for row in found] == [[5, 6, 7]] * 5 + [[9]] * 3
    assert isinstance(stream, IterableDataset)
    assert stream.n_shards == 1, "each process is to read all of it and take its own part"


@given(micro_batch_size=st.integers(1, 8), num_pairs=st.integers(1, 50), num_batches=st.integers(1, 4))
def test_evaluated_pairs_count_the_same(micro_batch_size, num_pairs, num_batches):
    size = even_size(micro_batch_size, num_pairs, num_batches=num_batches)
    assert 1 <= size <= micro_batch_size
    assert size == 1 or num_pairs % (size * num_batches) == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("epoch", [0, 2])
def test_each_of_two_processes_resumes_within_an_epoch_where_it_was(epoch, rank):
    order = order_of(13, 4, epoch=epoch)
    loader = DataLoader(torch.arange(len(order)), batch_size=2, sampler=order)
    prepared = prepare_data_loader(loader, num_processes=2, process_index=rank)
    resumed = skip_first_batches(prepared, 2)
    resumed.set_epoch(epoch)
    found = [batch.tolist() for batch in resumed]
    assert found == batches_of(order_of(13, 4, epoch=epoch), 2, 2)[rank][2:]
    assert found != batches_of(order_of(13, 4, epoch=epoch + 1), 2, 2)[rank][2:]


class NumberedAnswers(GRPOTrainer):
    """TRL's trainer without a model: answers are the number of times that some were generated."""

    def __init__(self):
        self.model = torch.nn.Identity().train()
        self.args = SimpleNamespace(gradient_accumulation_steps=2, steps_per_generation=2, report_to=[])
        self.num_iterations, self.num_generated = 1, 0
        self._step, self._buffered_inputs = 0, None

    def add_callback(self, callback):
        pass

    def _generate_and_score_completions(self, rows):
        self.num_generated += 1
        return {"answers": torch.full((2,), self.num_generated)}


@pytest.mark.parametrize("num_steps", [0, 3])
def test_each_step_of_a_resumed_run_learns_from_new_answers_and_from_them_alone(num_steps):
    trainer = run_trainer(NumberedAnswers)()
    GroupOrder(trainer, seed=0).on_train_begin(trainer.args, TrainerState(global_step=num_steps))
    answers = []
    for _ in range(6):
        answers += trainer._prepare_inputs({})["answers"].tolist()
        trainer._step += 1
    assert answers == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_prompts_of_a_batch_are_known_before_the_sampler_comes_to_it(shuffle):
    """TRL's sampler gives them, epoch by epoch; the last prompt of 7 fills no batch."""
    trainer, made = (
        run_trainer(NumberedAnswers)(),
        RepeatSampler(range(7), 4, batch_size=2, repeat_count=3, shuffle=shuffle),
    )
    order = GroupOrder(trainer, seed=5)
    order._keep_sampler(lambda rows: made, None)
    batches = []
    for epoch in range(3):
        order.on_epoch_begin(trainer.args, TrainerState(epoch=float(epoch)))
        drawn = list(made)
        batches += [drawn[start : start + 8 : 4] for start in range(0, len(drawn), 8 * 3)]
    assert [order.of_batch(number) for number in range(9)] == batches
    assert (batches[0] == batches[3]) != shuffle
