"""Talks: what a model says in its process is what transformers generates here, and the process goes with the talk."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import tunekit
from tests.on_demand import OnDemand
from tests.tiny import save_chats
from tests.waiting import LIMIT_SECONDS
from tunekit.probe.model import PICO

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where are you from?"}]

LARGE = {"learning_rate": 2e-2, "max_steps": 4, "save_steps": 2, "global_batch_size": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    return OnDemand(
        lambda kind: tunekit.train(
            {
                "model": "pico",
                "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
                "adapter": kind,
                "train": LARGE,
                "output": {"dir": str(folder / "runs" / kind), "sample_prompts": []},
            }
        )
    )


def greedy(model, messages=QUESTION) -> str:
    """What transformers generates of a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.eval().generate(**ids, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def pico() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)


def said(talk, messages=QUESTION, **options) -> str:
    return "".join(talk.say(messages, max_new_tokens=24, **options))


@pytest.fixture(scope="module")
def talk(runs):
    with tunekit.chat(runs["lora"], compare=True, device="cpu") as opened:
        yield opened


@pytest.mark.slow
def test_a_greedy_answer_is_what_transformers_generates(talk, runs):
    expected = greedy(PeftModel.from_pretrained(pico(), runs["lora"].model_path))
    assert said(talk) == expected != greedy(pico())
    assert talk.last.reason in ("end", "length") and talk.last.num_tokens > 0


@pytest.mark.slow
def test_beside_it_the_base_answers_with_the_adapter_switched_off(talk):
    assert said(talk, base=True) == greedy(pico())
    assert said(talk) != greedy(pico()), "the adapter is on again"


@pytest.mark.slow
def test_an_answer_depends_on_what_was_said_before(talk):
    history = [*QUESTION, {"role": "assistant", "content": "From afar."}, {"role": "user", "content": "And you?"}]
    assert said(talk, history, base=True) == greedy(pico(), history)


def test_drawn_answers_follow_their_seed(talk):
    first, again, other = (said(talk, temperature=1.5, top_p=0.95, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_an_answer_comes_in_pieces_and_can_be_left(talk):
    long = [{"role": "user", "content": "Count."}]
    answer = talk.say(long, temperature=100.0, seed=1, max_new_tokens=512)
    assert next(answer)
    talk.stop()
    list(answer)
    assert talk.last.reason == "stopped" and talk.last.num_tokens < 512
    for _ in talk.say(long, temperature=100.0, seed=1, max_new_tokens=512):
        break
    assert said(talk, base=True) == greedy(pico()), "what was left does not stand in the way of the next answer"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "the conversation is empty"),
        (QUESTION, {"temperature": -1.0}, "temperature >= 0"),
        (QUESTION, {"top_p": 0.0}, "0 < top_p"),
        ([{"role": "user", "content": "long " * 2000}], {}, "accepts 1,024"),
    ],
)
def test_what_cannot_be_answered_is_told_in_words_and_the_talk_goes_on(messages, options, words, talk):
    with pytest.raises(tunekit.TunekitError, match=words):
        said(talk, messages, **options)
    assert said(talk, base=True) == greedy(pico())


@pytest.mark.slow
def test_of_a_run_that_trained_all_weights_the_model_before_is_a_second_one(runs):
    with tunekit.chat(runs["full"], compare=True, device="cpu") as both:
        expected = AutoModelForCausalLM.from_pretrained(runs["full"].model_path, dtype=torch.float32)
        assert said(both) == greedy(expected)
        assert said(both, base=True) == greedy(pico())


@pytest.mark.slow
def test_a_checkpoint_answers_as_it_did_then(runs):
    with tunekit.chat(runs["lora"], "2", device="cpu") as early:
        folder = runs["lora"].path / "checkpoints" / "checkpoint-2"
        assert said(early) == greedy(PeftModel.from_pretrained(pico(), folder))


@pytest.mark.slow
def test_a_closed_talk_leaves_no_process_and_no_memory(runs):
    with tunekit.chat(runs["lora"], device="cpu") as opened:
        process = psutil.Process(opened.pid)
        assert opened.is_open and opened.memory_bytes > 100e6
        assert process.memory_info().rss > 100e6
    assert not opened.is_open and not psutil.pid_exists(process.pid)
    with pytest.raises(tunekit.TunekitError, match="is closed"):
        said(opened)


HOLDER = """
import sys, tunekit
talk = tunekit.chat(sys.argv[1], device="cpu")
print(talk.pid, "torch" in sys.modules, flush=True)
input()
"""


@pytest.mark.slow
def test_the_process_goes_with_the_one_that_talks_however_that_ends(runs):
    folder = str(runs["lora"].path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, folder], text=True, **pipes) as holder:
        pid, loaded_torch = holder.stdout.readline().split()
        worker = psutil.Process(int(pid))
        assert loaded_torch == "False", "only the process that holds the model needs torch"
        holder.kill()
    worker.wait(LIMIT_SECONDS)


@pytest.mark.slow
def test_a_process_that_dies_is_told_of(runs):
    with tunekit.chat(runs["lora"], device="cpu") as opened:
        psutil.Process(opened.pid).kill()
        with pytest.raises(tunekit.TunekitError, match="exited with code -9"):
            said(opened)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nothing", {}, "no run 'nothing'"),
        ("", {}, "invalid run name"),
        ("a\0b", {}, "invalid run name"),
        ("/", {}, "has no config.json"),
        ("pico", {"compare": True}, "no model before training"),
        ("pico", {"checkpoint": "2"}, "is a model, not a run"),
        ("pico", {"backend": "vllm"}, "vLLM"),
    ],
)
def test_what_cannot_be_talked_with_is_refused_in_words(name, options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tunekit.TunekitError, match=words):
        tunekit.chat(name, **options)


@pytest.mark.slow
def test_the_command_answers_each_line_that_is_piped_to_it(runs):
    lines = "Where are you from?\n/clear\n\n/help\nWhere are you from?\n/exit\nnever\n"
    command = [sys.executable, "-m", "tunekit", "chat", str(runs["lora"].path), "--compare", "--system", "Be brief."]
    done = subprocess.run(
        [*command, "--device", "cpu", "--max-new-tokens", "24"], input=lines, capture_output=True, text=True, check=True
    )
    tuned = greedy(PeftModel.from_pretrained(pico(), runs["lora"].model_path))
    both = [f"after:  {tuned}", f"before: {greedy(pico())}"]
    assert [line.rstrip() for line in done.stdout.splitlines()] == [line.rstrip() for line in both * 2]
    assert "/clear starts over, /exit or Ctrl-D quits\n" in done.stderr


@pytest.mark.slow
def test_a_talk_needs_only_the_folder_of_the_run(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to(os.path.relpath(runs["lora"].path.parent, tmp_path))
    with tunekit.chat("lora", device="cpu") as opened:
        assert said(opened)
