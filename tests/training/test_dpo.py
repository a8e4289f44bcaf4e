"""DPO on a tiny model: its first loss, its reference, what it logs, writes and learns, alone and in two processes."""

import json
import math
from pathlib import Path

import pytest
import torch

import tunekit
from tests.processes import in_processes
from tests.tiny import make_tokenizer, save_tiny_model
from tunekit.api import verbs
from tunekit.errors import DataError, PlanError
from tunekit.runs.run import Run


def save_pairs(path: Path, numbers, *, chat: bool) -> None:
    def said(role, text):
        return [{"role": role, "content": text}] if chat else text

    rows = [
        {
            "prompt": said("user", f"double {n}"),
            "chosen": said("assistant", f"{2 * n}"),
            "rejected": said("assistant", f"{n} no"),
        }
        for n in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    save_tiny_model(folder / "model")
    for chat, name in ((True, "chats"), (False, "texts")):
        save_pairs(folder / f"{name}.jsonl", range(16), chat=chat)
        save_pairs(folder / f"held-{name}.jsonl", range(20, 24), chat=chat)
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return workspace


def recipe(rows="chats", **sections):
    return {
        "model": "model",
        "data": {"train": f"{rows}.jsonl", "eval": f"held-{rows}.jsonl", "max_length": 64},
        "method": {"type": "dpo", **sections.pop("method", {})},
        "train": {"max_steps": 4, "global_batch_size": 8, "learning_rate": 2e-3, **sections.pop("train", {})},
        "output": {"sample_prompts": []},
        **sections,
    }


def logged(run, kind="log"):
    return [event for event in run.events() if event["event"] == kind]


@pytest.fixture(scope="module")
def finished(workspace):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        run = tunekit.train(recipe(output={}))
        return Run(run.path.resolve())


@pytest.mark.slow
def test_the_first_loss_is_ln_2_and_the_held_out_pairs_are_learned(finished):
    losses = [event["loss"] for event in logged(finished)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < 0.5
    first, *_, last = logged(finished, "eval")
    assert first["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["eval_rewards/margins"] > 0.3 > first["eval_rewards/margins"] == 0


def test_what_trl_logs_is_in_the_events_and_at_the_end(finished):
    last = logged(finished)[-1]
    assert {"rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"} <= set(last)
    assert last["num_tokens"] > 0 and last["tokens_per_second"] > 0
    result = finished.result()
    margins = [event["eval_rewards/margins"] for event in logged(finished, "eval")]
    assert result["measures"]["rewards/margins"] == [margins[0], margins[-1]]
    assert "rewards/margins" in (finished.model_path / "README.md").read_text()
    assert [sample["prompt"] for sample in finished.samples()] == ["double 20", "double 21", "double 22"]


def test_the_adapter_is_saved_alone_and_no_copy_of_it_was_kept(finished):
    from safetensors.torch import load_file

    saved = load_file(finished.model_path / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == finished.plan.num_trainable_params
    assert not (finished.model_path / "ref").exists()
    assert finished.result()["held_bytes"]["adapters"] == 4 * finished.plan.num_trainable_params


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("rows", "before", "behind"),
    [
        ("chats", "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"),
        ("texts", "{}", "<|im_end|>"),
    ],
)
def test_the_held_out_loss_is_that_of_the_paper_on_tokens_laid_out_by_hand(here, rows, before, behind):
    """Summed log-probabilities of the answers with their end token, as Hugging Face and PEFT compute them alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = tunekit.train(recipe(rows, train={"max_steps": 2, "global_batch_size": 16, "warmup_steps": 0}))
    saved = AutoModelForCausalLM.from_pretrained(here / "model")
    trained = PeftModel.from_pretrained(saved, run.model_path)
    tokenizer = make_tokenizer()

    def log_prob(prompt, answer):
        given = tokenizer.encode(prompt)
        ids = torch.tensor([given + tokenizer.encode(answer)])
        with torch.no_grad():
            scores = trained(input_ids=ids).logits.double().log_softmax(-1)
        return sum(scores[0, at - 1, ids[0, at]].item() for at in range(len(given), ids.shape[1]))

    losses = []
    for n in range(20, 24):
        prompt = before.format(f"double {n}")
        answers = [f"{2 * n}{behind}", f"{n} no{behind}"]
        better, worse = (log_prob(prompt, answer) for answer in answers)
        with trained.disable_adapter():
            base_better, base_worse = (log_prob(prompt, answer) for answer in answers)
        margin = 0.1 * ((better - base_better) - (worse - base_worse))
        losses.append(math.log(1 + math.exp(-margin)))
    assert logged(run, "eval")[-1]["eval_loss"] == pytest.approx(sum(losses) / 4, rel=1e-4)


def all_weights(**sections):
    return recipe(adapter="full", train={"max_steps": 3, "learning_rate": 1e-3}, **sections)


@pytest.fixture(scope="module")
def whole(workspace):
    """A run that trains all weights beside a second model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        return Run(tunekit.train(all_weights()).path.resolve())


@pytest.mark.slow
def test_all_weights_are_held_to_those_before_training(whole):
    losses = [event["loss"] for event in logged(whole)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < 0.6


BEFOREHAND = {"precompute_ref_log_probs": True}


@pytest.mark.slow
def test_log_probabilities_computed_beforehand_give_the_same_losses(here, finished, whole):
    for asked, expected in ((recipe(method=BEFOREHAND), finished), (all_weights(method=BEFOREHAND), whole)):
        same_steps(tunekit.train(asked), expected)


def same_steps(run, expected):
    for kind, name in (("log", "loss"), ("log", "rewards/margins"), ("eval", "eval_loss")):
        values = [event[name] for event in logged(expected, kind)]
        assert [event[name] for event in logged(run, kind)] == pytest.approx(values, rel=1e-5, abs=1e-6)


def test_a_pair_whose_prompt_leaves_no_room_is_left_out_and_longer_answers_are_cut(here):
    save_pairs(here / "long.jsonl", [*range(8), 10**60], chat=False)
    rows = (here / "long.jsonl").read_text().splitlines()
    pair = {"prompt": "more", "chosen": "x" * 100, "rejected": "y"}
    (here / "long.jsonl").write_text("\n".join([*rows, json.dumps(pair)]))
    notes = []
    run = tunekit.train(
        recipe(data={"train": "long.jsonl", "max_length": 64}, train={"max_steps": 1}),
        on_event=lambda event: notes.extend(event["notes"]) if event["event"] == "plan" else None,
    )
    data = run.plan.data
    assert (data.num_rows, data.num_train, data.num_dropped, data.num_truncated) == (10, 9, 1, 1)
    assert any("1 row skipped: prompt longer than 63 tokens" in note for note in notes)
    assert any(note.startswith("long.jsonl: prompts are plain text and bypass the chat template") for note in notes)
    assert data.longest_tokens == len(f"double {10**60}{10**60} no") + 1, "the worse answer, and an end token"
    with pytest.raises(DataError, match="none of 16 prompts leaves room for a completion"):
        tunekit.train(recipe(data={"train": "chats.jsonl", "max_length": 16}))


def test_log_probabilities_of_weights_that_are_not_there_yet_are_refused(here):
    spread = {"num_processes": 2, "strategy": "fsdp2"}
    with pytest.raises(PlanError, match="TRL precomputes log-probabilities before FSDP2 has loaded") as error:
        verbs.plan(recipe(method={"precompute_ref_log_probs": True}, parallel=spread))
    assert "unset method.precompute_ref_log_probs" in str(error.value.hint)
    for method in ({}, {"precompute_ref_log_probs": True}):
        verbs.plan(recipe(adapter="full", method=method, parallel=spread))


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(here, finished):
    in_two_processes(recipe(parallel={"num_processes": 2, "strategy": "ddp"}), finished)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "method"), [("zero3", {}), ("fsdp2", BEFOREHAND)])
def test_a_reference_in_parts_gives_the_losses_of_a_whole_one(here, whole, strategy, method):
    spread = {"num_processes": 2, "strategy": strategy}
    in_two_processes(all_weights(method=method, parallel=spread), whole)


def in_two_processes(asked, alone):
    run = verbs.make_run(asked)
    in_processes(2, work_in, str(run.path.resolve()))
    assert run.state == "finished"
    same_steps(run, alone)


def work_in(folder: str) -> None:
    """Work in a run as one of its processes."""
    from tunekit.runs.small_files import place_of
    from tunekit.training.worker import work

    work(Run(folder), place=place_of())
