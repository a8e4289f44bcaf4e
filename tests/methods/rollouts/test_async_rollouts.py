"""Requests for completions of later steps: when they are made, when they are waited for, and how old they may be.

The server here answers by the number of updates of its weights; `tests/training/test_async_rollouts.py` has a real one.
"""

from threading import Event, Timer
from types import SimpleNamespace

import pytest
import torch

from tests.waiting import LIMIT_SECONDS, until
from tunekit.methods.rollouts.async_rollouts import AsyncRollouts
from tunekit.methods.run_trainer import run_trainer


class Served:
    """TRL's trainer as far as it asks a server."""

    def __init__(self):
        self.model = torch.nn.Identity().train()
        self.state = SimpleNamespace(global_step=0, max_steps=5)
        self.accelerator = SimpleNamespace(is_main_process=True)
        self._metrics = {"train": {"sample/staleness_mean": []}}
        self.train_dataset = [{"prompt": number} for number in range(5)]
        self.prompt_order = SimpleNamespace(of_batch=lambda step: [step])
        self.num_updates, self.in_flight, self.happened = 0, set(), []
        self.held, self.is_updated = set(), Event()
        client = SimpleNamespace(generate=self.answer, base_url="", _post=lambda url, **_: self.happened.append(url))
        self.vllm_generation = SimpleNamespace(sync_weights=self.sync, vllm_client=client)

    def answer(self, prompts, **_):
        self.in_flight.add(prompts[0][0])
        updates = self.num_updates
        assert prompts[0][0] not in self.held or self.is_updated.wait(LIMIT_SECONDS)
        self.in_flight.remove(prompts[0][0])
        return {"prompt": prompts[0][0], "updates": updates}

    def sync(self):
        self.happened.append(f"in flight {sorted(self.in_flight)}")
        self.num_updates += 1
        if self.num_updates == 2:
            self.is_updated.set()

    def _tokenize_prompts(self, prompts):
        return [prompts], None, None

    def _generate_single_turn(self, prompts):
        self.vllm_generation.sync_weights()
        return self.vllm_generation.vllm_client.generate([prompts], n=2)


def steps_of(trainer, first=0, last=5):
    """Updates that the server had when it was asked for the completions of each step."""
    updates = []
    for step in range(first, last):
        trainer.state.global_step = step
        completions = trainer._generate_single_turn([step])
        assert completions["prompt"] == step
        updates.append(completions["updates"])
    return updates


@pytest.mark.parametrize(("lag", "updates"), [(1, [1, 1, 2, 3, 4]), (2, [1, 1, 1, 2, 3])])
def test_a_step_learns_from_completions_that_are_as_many_steps_old(lag, updates):
    trainer = run_trainer(Served)()
    AsyncRollouts(trainer, lag)
    assert steps_of(trainer) == updates
    assert trainer.metrics["train"]["sample/staleness_mean"] == [min(step, lag) for step in range(5)]


def test_nothing_is_in_flight_while_the_server_gets_weights_or_it_is_paused():
    trainer = run_trainer(Served)()
    AsyncRollouts(trainer, 1)
    steps_of(trainer)
    assert trainer.happened == ["in flight []"] * 5
    # The first of these is there only while it is waited for.
    trainer = run_trainer(Served)()
    AsyncRollouts(trainer, 1)
    trainer.held = {1}
    steps_of(trainer, last=1)
    Timer(0.3, trainer.is_updated.set).start()
    steps_of(trainer, 1, 2)
    assert trainer.happened == ["in flight []"] * 2
    trainer = run_trainer(Served)()
    AsyncRollouts(trainer, 2)
    trainer.held = {2}
    steps_of(trainer, last=1)
    until(lambda: trainer.in_flight == {2})
    steps_of(trainer, 1)
    assert trainer.happened[:4] == ["in flight []", "/pause", "in flight [2]", "/resume"]


def test_an_evaluation_waits_for_completions_and_asks_for_none():
    trainer = run_trainer(Served)()
    AsyncRollouts(trainer, 1)
    steps_of(trainer, last=1)
    trainer.model.eval()
    assert trainer._generate_single_turn([9])["prompt"] == 9
    trainer.model.train()
    assert trainer.happened == ["in flight []"] * 2
    assert steps_of(trainer, 1) == [1, 3, 4, 5]


def test_groups_that_are_drawn_again_are_of_the_model_as_it_is():
    trainer = run_trainer(Served)()
    AsyncRollouts(trainer, 1)
    steps_of(trainer, last=2)
    assert trainer._generate_single_turn([8]) == {"prompt": 8, "updates": 3}
    assert steps_of(trainer, 2) == [2, 4, 5]


@pytest.mark.parametrize(("lag", "ages"), [(2, [2, 2]), (1, [0, 1]), (3, [2, 2])])
def test_a_resumed_run_takes_the_completions_of_its_checkpoint_but_none_that_are_too_old(lag, ages):
    trainer, resumed = run_trainer(Served)(), run_trainer(Served)()
    AsyncRollouts(trainer, 2)
    steps_of(trainer, last=2)
    trainer.await_rollouts()
    saved = trainer.rollouts_ahead
    assert [(each["step"], each["asked_at"], each["completions"]["prompt"]) for each in saved] == [(2, 0, 2), (3, 1, 3)]
    AsyncRollouts(resumed, lag)
    resumed.rollouts_ahead = saved
    steps_of(resumed, 2, 4)
    assert resumed.metrics["train"]["sample/staleness_mean"] == ages
