"""Asynchronous roll-outs beside a server with a real model: whose completions are learned from, with which weights."""

import math

import pytest
import torch
from safetensors.torch import load_file

from tests.training.served import STEPS, Served
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow


def log_probs(model, completion):
    """Log-probabilities of a completion's tokens."""
    prompt, ids = completion["prompt"], completion["ids"]
    with torch.no_grad():
        scores = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return scores.gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    # The second step's completions are not there before the first step is over.
    return Served(tmp_path_factory.mktemp("ahead"), 1, "1:step:1").go()


def test_completions_of_the_next_step_are_drawn_by_the_model_before_the_last_update(ahead):
    assert [ahead.logs[step]["sample/staleness_mean"] for step in range(1, STEPS + 1)] == [0, 1, 1, 1, 1]
    assert {line["asked"] for line in ahead.asked if "asked" in line} == {"/update_weights"}
    of_request = ahead.completions()
    assert sorted(of_request) == list(range(1, STEPS + 1))
    for request, completions in of_request.items():
        asked_at = max(0, request - 2)
        model = ahead.model_of(asked_at)
        for completion in completions:
            assert set(completion["updates"]) == {asked_at + 1}
            torch.testing.assert_close(
                log_probs(model, completion), torch.tensor(completion["log_probs"]).double(), rtol=0, atol=1e-5
            )


def test_their_tokens_are_weighted_by_how_much_likelier_the_trained_model_gives_them(ahead):
    of_request = ahead.completions()
    for step in range(STEPS):
        model, ratios, differences = ahead.model_of(step), [], []
        for completion in of_request[step + 1]:
            difference = log_probs(model, completion) - torch.tensor(completion["log_probs"]).double()
            ratios.append(float(difference.sum().exp()))
            differences += difference.abs().tolist()
        log = ahead.logs[step + 1]
        unmasked = [ratio if ratio <= 3 else 0.0 for ratio in ratios]
        mean = log["sampling/importance_sampling_ratio/mean"]
        assert mean == pytest.approx(sum(unmasked) / len(unmasked), abs=1e-4)
        difference = log["sampling/sampling_logp_difference/mean"]
        assert difference == pytest.approx(sum(differences) / len(differences), abs=1e-5)
        assert (difference > 1e-3) == (step > 0)
    assert not math.isclose(mean, 1, abs_tol=1e-3)


def test_with_a_longer_lag_the_server_pauses_for_new_weights_and_goes_on_with_them(tmp_path):
    run = Served(tmp_path, 2, "2:update:2", save_steps=STEPS).go()
    assert [run.logs[step]["sample/staleness_mean"] for step in range(1, STEPS + 1)] == [0, 1, 2, 2, 2]
    paths = [line.get("asked") for line in run.asked]
    assert paths.count("/pause") == paths.count("/resume") >= 1
    models = {}
    for update in range(1, STEPS + 1):
        models[update] = run.model_of(0)
        models[update].load_state_dict(load_file(tmp_path / f"sent-{update}.safetensors"), strict=False)
    straddling = [
        each
        for completions in run.completions().values()
        for each in completions
        if each["updates"][-1] != each["updates"][0]
    ]
    assert straddling
    for completion in straddling:
        for place, update in enumerate(completion["updates"]):
            theirs = log_probs(models[update], completion)[place]
            assert float(theirs) == pytest.approx(completion["log_probs"][place], abs=1e-5)


def test_a_stopped_run_goes_on_with_the_completions_of_its_checkpoint(ahead, tmp_path):
    run = Served(tmp_path, 1).go_until(2).go("resume")
    assert any(event["event"] == "resume" for event in Run(tmp_path / "run").events())
    names = ("loss", "reward", "grad_norm", "sample/staleness_mean", "sampling/importance_sampling_ratio/mean")
    for step in range(1, STEPS + 1):
        assert {name: run.logs[step][name] for name in names} == {name: ahead.logs[step][name] for name in names}
    whole, resumed = (load_file(each.folder / "run" / "model" / "model.safetensors") for each in (ahead, run))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_two_processes_learn_from_the_completions_of_one(ahead, tmp_path):
    run = Served(tmp_path, 1, num_processes=2).go()
    assert [run.logs[step]["sample/staleness_mean"] for step in range(1, STEPS + 1)] == [0, 1, 1, 1, 1]
    for step in range(1, STEPS + 1):
        assert run.logs[step]["reward"] == pytest.approx(ahead.logs[step]["reward"])
    whole, divided = (load_file(each.folder / "run" / "model" / "model.safetensors") for each in (ahead, run))
    for name, value in whole.items():
        torch.testing.assert_close(divided[name], value, rtol=0, atol=2e-5)
