"""Tools and environments in training: what the model is shown, what is read out of its answers, what is learned."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl.chat_template_utils import add_response_schema

import tunekit
from tests.calling import save_calling_model
from tests.processes import in_processes
from tests.tiny import save_tiny_model
from tunekit.display.rewards import trial_parts
from tunekit.errors import DataError, RecipeError, RunError, TunekitError
from tunekit.inference.episode_trial import HeldOut, _trainer
from tunekit.methods.tool_use import _Turns, give_response_template, tool_schemas, tool_use
from tunekit.probe.model import PICO
from tunekit.recipe.methods.grpo import GRPOMethod
from tunekit.training.answers import transcript

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FAMILIES = (
    "gemma4",
    "glm4moe",
    "gptoss",
    "lfm2_2_5",
    "lfm2_v2",
    "llama3_1",
    "llama3_2",
    "nemotron",
    "qwen3",
    "qwen2_5",
)
READ = sorted(
    path.stem
    for path in TEMPLATES.glob("*.jinja")
    if path.stem.startswith(FAMILIES) and not path.stem.startswith("qwen2_5_vl")
)
WITHOUT_TOOLS = ("cohere", "gemma3", "idefics3", "llama3", "phi3", "smolvlm", "qwen2_5_vl")


def tokenizer_with(template):
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", READ)
def test_calls_are_read_as_trl_reads_them(name):
    """TRL knows the templates of some models by their text; of others, the same way is found by how a call looks."""
    text = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer, known = tokenizer_with(text), tokenizer_with(text)
    published = TEMPLATES / f"{name.removesuffix('_training')}.jinja"
    known.chat_template = published.read_text()
    add_response_schema(known)
    if name.startswith("nemotron") and name.endswith("_training"):
        with pytest.raises(DataError, match="cannot be parsed"):
            give_response_template(tokenizer)
        return
    give_response_template(tokenizer)
    assert tokenizer.response_template == known.response_template


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma4", "glm4moe", "qwen3_instruct_2507", "lfm2_v2"])
def test_a_template_of_somebody_elses_is_known_by_how_it_writes_a_call(name):
    text = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer, known = tokenizer_with("{# ours #}" + text), tokenizer_with(text)
    add_response_schema(known)
    give_response_template(tokenizer)
    assert tokenizer.response_template == known.response_template


def test_a_template_that_forgets_what_was_thought_is_refused():
    """TRL has another template to train Qwen3 with, by the text of the published one alone."""
    with pytest.raises(DataError, match="renders earlier messages differently after a tool result"):
        give_response_template(tokenizer_with("{# ours #}" + (TEMPLATES / "qwen3.jinja").read_text()))


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_a_template_without_tools_is_refused(name):
    with pytest.raises(DataError, match="does not render tool calls") as error:
        give_response_template(tokenizer_with((TEMPLATES / f"{name}.jinja").read_text()))
    assert "model.chat_template" in error.value.hint


def test_calls_that_nobody_reads_are_refused():
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", "CALL ").replace("</tool_call>", "")
    with pytest.raises(DataError, match="cannot be parsed"):
        give_response_template(tokenizer)


MODULE = '''
import json, random
from pathlib import Path

def lookup(place: str, day: int = 1) -> str:
    """Look up the weather.

    Args:
        place: Where.
        day: When.
    """
    return "sun"

def untyped(place):
    """Look up.

    Args:
        place: Where.
    """

def undescribed(place: str) -> str:
    return place

class Counting:
    """Counts calls, and scores them by the row."""

    def reset(self, start, seed):
        self.calls, self.start, self.seed = [], start, seed
        return f" Begin at {start}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        if number == 13:
            import time
            time.sleep(3600)
        self.calls.append(number)
        return "higher" if number < 8 else "lower"

    def get_reward(self):
        with Path(__file__).with_name("episodes.jsonl").open("a") as file:
            file.write(json.dumps({"start": self.start, "seed": self.seed, "calls": self.calls}) + "\\n")
        return sum(self.calls) / 100 + random.random() / 10

class Silent:
    def reset(self): pass
    def go(self) -> str:
        """Go."""
        return "went"

def judge(prompts, completions, completion_ids, **columns):
    with Path(__file__).with_name("judged.jsonl").open("a") as file:
        for prompt, completion, ids in zip(prompts, completions, completion_ids):
            file.write(json.dumps({"prompt": prompt, "completion": completion, "ids": list(map(int, ids))}) + "\\n")
    return [sum(ids) % 97 / 97 for ids in completion_ids]
'''


ROLLOUT = """
def answer(prompts, trainer):
    ids = trainer.processing_class.apply_chat_template(prompts, add_generation_prompt=True)['input_ids']
    ends = [[40 + place, 2] for place in range(len(prompts))]
    return {'prompt_ids': ids, 'completion_ids': ends, 'logprobs': [[0.0, 0.0] for _ in prompts]}


def of_step(prompts, trainer):
    first = trainer.accelerator.process_index * len(prompts) + 5 * trainer.state.global_step
    answers = answer(prompts, trainer)
    ends = [[40 + (first + place) % 40, 2] for place in range(len(prompts))]
    return {**answers, 'completion_ids': ends}
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a module of tools."""
    (tmp_path / "own_tools.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("own_tools", None)


def method(**settings):
    return GRPOMethod(**{"rewards": ["exact_match"], **settings})


def test_the_model_is_shown_signature_and_docstring(home):
    (schema,) = tool_schemas(method(tools=["own_tools:lookup"]))
    parameters = schema["function"]["parameters"]
    assert schema["function"]["name"] == "lookup" and schema["function"]["description"] == "Look up the weather."
    assert parameters["properties"]["place"] == {"type": "string", "description": "Where."}
    assert parameters["required"] == ["place"]
    names = [each["function"]["name"] for each in tool_schemas(method(environment="adventure", tools=["calculator"]))]
    assert names == ["calculator", "go", "open_door", "take_key"]


@pytest.mark.parametrize("name", ["untyped", "undescribed"])
def test_a_tool_that_does_not_say_what_it_takes_is_refused(name, home):
    with pytest.raises(RecipeError, match=f"method.tools: {name}: ") as error:
        tool_schemas(method(tools=[f"own_tools:{name}"]))
    assert "Args:" in error.value.hint


def recipe(home, prompts=None, **settings):
    own = settings.pop("method", {})
    rows = prompts or 2 * [{"prompt": [{"role": "user", "content": "Guess my number."}], "answer": "8", "start": 1}]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": "pico",
        "data": {"train": str(home / "prompts.jsonl"), "max_length": 200},
        "method": {"type": "grpo", "max_completion_length": 96, "num_generations": 4, **own},
        "adapter": "full",
        "train": {"max_steps": 1, "global_batch_size": 8, "learning_rate": 1e-3},
        "output": {"dir": str(home / "run"), "sample_prompts": []},
        **settings,
    }


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tools": ["calculator", "calculator"]}, "two tools are named calculator"),
        ({"rewards": ["exact_match"], "tool_timeout_seconds": 3}, "has no effect without method.tools"),
        ({"tools": ["calculater"]}, "did you mean 'calculator'"),
        ({"tools": ["own_tools:lokup"]}, "did you mean 'lookup'"),
        ({"environment": "guess_numbers"}, "did you mean 'guess_number'"),
        ({"environment": {"type": "guess_number", "higest": 3}}, "did you mean 'highest'"),
        ({"environment": "own_tools:lookup"}, "own_tools:lookup is not a class"),
        ({"environment": "own_tools:Path"}, "has no method `reset`"),
        ({"environment": "own_tools:Silent"}, "method.rewards: empty"),
        ({"tools": ["own_tools:untyped"], "rewards": ["exact_match"]}, "method.tools: untyped: "),
        ({"tools": ["calculator"], "rollout": "own_tools:judge"}, "mutually exclusive with method.tools"),
        ({"tools": ["calculator"]}, "method.rewards: empty"),
        ({"tools": [{"type": "search", "path": "nowhere"}], "rewards": ["exact_match"]}, "nowhere has no .txt or .md"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_it_begins(settings, problem, home):
    with pytest.raises(TunekitError) as error:
        tunekit.check(recipe(home, method=settings))
    assert problem in f"{error.value} {error.value.hint}"


@pytest.mark.parametrize(
    ("row", "own", "problem"),
    [
        ({"prompt": "2 + 2", "answer": "4"}, {"tools": ["calculator"]}, "prompts.jsonl:1: prompt is plain text"),
        (
            {"prompt": [{"role": "user", "content": "x"}], "answer": "4", "tools": [{"name": "f", "parameters": {}}]},
            {},
            "prompts.jsonl:1: the row has tools",
        ),
    ],
)
def test_rows_that_cannot_show_tools_are_refused(row, own, problem, home):
    with pytest.raises(DataError, match=problem):
        tunekit.data_report(recipe(home, [row, row], method={"rewards": ["exact_match"], **own}))


def test_other_models_without_tools_are_refused_by_check(home):
    save_tiny_model(home / "model")
    wanted = recipe(home, model=str(home / "model"), method={"environment": "guess_number"})
    with pytest.raises(DataError, match="does not render tool calls"):
        tunekit.check(wanted)


def test_the_rows_show_the_tools(home):
    wanted = recipe(home, method={"environment": "guess_number"})
    row, *_ = tunekit.preview(wanted).rows
    text = "".join(piece.text for piece in row.sequences[0].head.pieces)
    assert "guess(number: integer) Guess the number." in text
    tokens = AutoTokenizer.from_pretrained(PICO)(text, add_special_tokens=False)["input_ids"]
    assert row.sequences[0].num_tokens == len(tokens)
    assert tunekit.data_report(wanted).sources[0].num_tokens == 2 * len(tokens)


def test_an_answer_of_several_turns_is_a_transcript():
    call = {"type": "function", "function": {"name": "guess", "arguments": {"number": 3}}}
    turns = [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call, call]},
        {"role": "tool", "name": "guess", "content": "higher"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 4."}]},
    ]
    assert transcript(turns) == "Let me see.\n→ guess(number=3)\n→ guess(number=3)\n← higher\nIt is 4."
    assert transcript("a text") == "a text"


STARTS = [{"prompt": [{"role": "user", "content": "Guess my number."}], "start": start} for start in (1, 2)]


@pytest.mark.parametrize("held_out", [None, HeldOut(batch_size=3, is_greedy=True), HeldOut(3, is_greedy=False)])
def test_episodes_of_an_evaluation_are_played_one_a_prompt_without_dropout(home, held_out):
    wanted = tunekit.plan(recipe(home, STARTS, method={"rewards": ["own_tools:judge"]}))
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(PICO), AutoTokenizer.from_pretrained(PICO)
    size = 4 if held_out is None else held_out.batch_size
    trainer = _trainer(wanted, wanted.recipe.method, loaded, tokenizer, STARTS, size, home, held_out)
    assert trainer.model.training == (held_out is None)
    assert trainer.num_generations_eval == (4 if held_out is None else 1)
    assert trainer.generation_config.do_sample == (held_out is None or not held_out.is_greedy)


@pytest.fixture(scope="module")
def calling_model(tmp_path_factory):
    """A tiny model with pico's tokenizer that has learned to call `guess`, and nothing else."""
    folder = tmp_path_factory.mktemp("calling")
    save_calling_model(folder)
    return folder


@pytest.mark.slow
def test_an_episode_is_learned_from_as_plain_transformers_would(calling_model, home):
    """Results of tools are in the context and not in the loss; reset, calls and rewards are those of the episode."""
    from transformers import AutoModelForCausalLM

    rate = 0.05
    train = {"max_steps": 1, "global_batch_size": 8, "micro_batch_size": 8, "optim": "sgd", "learning_rate": rate}
    train |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 1e9, "logging_steps": 1}
    own = {"environment": "own_tools:Counting", "rewards": ["own_tools:judge"], "loss_type": "grpo"}
    run = tunekit.train(recipe(home, STARTS, model=str(calling_model), method=own, train=train))
    judged = [json.loads(line) for line in (home / "judged.jsonl").read_text().splitlines()]
    episodes = [json.loads(line) for line in (home / "episodes.jsonl").read_text().splitlines()]
    assert len(judged) == len(episodes) == 8
    tokenizer = AutoTokenizer.from_pretrained(calling_model)
    (schema,) = tool_schemas(method(environment="own_tools:Counting"))
    model = AutoModelForCausalLM.from_pretrained(calling_model, dtype=torch.float32)
    logged = next(event for event in run.events() if event["event"] == "log")
    totals, losses, num_results = [], [], 0
    generator = {}
    for line, episode in zip(judged, episodes, strict=True):
        calls = [
            call["function"]["arguments"]["number"]
            for message in line["completion"]
            for call in message.get("tool_calls") or ()
        ]
        results = [message["content"] for message in line["completion"] if message["role"] == "tool"]
        assert episode["calls"] == calls[: len(results)]
        assert results == ["higher" if number < 8 else "lower" for number in episode["calls"]]
        assert line["prompt"][-1]["content"] == f"Guess my number. Begin at {episode['start']}."
        num_results += len(results)
        # The generator that an environment draws from is seeded with the episode, alike for all of a group.
        import random

        totals.append(
            sum(line["ids"]) % 97 / 97 + sum(episode["calls"]) / 100 + random.Random(episode["seed"]).random() / 10
        )
        generator.setdefault(episode["start"], set()).add(episode["seed"])
        prompt = tokenizer.apply_chat_template(
            line["prompt"], tools=[schema], add_generation_prompt=True, return_dict=False
        )
        text = "".join(tokenizer.decode(ids) for ids in _turns(tokenizer, line["ids"]))
        assert text == tokenizer.decode(line["ids"])
        mask = [own for ids, own in _parts(tokenizer, line["ids"]) for _ in ids]
        logits = model(torch.tensor([prompt + line["ids"]])).logits[0, len(prompt) - 1 : -1]
        scores = logits.log_softmax(-1).gather(1, torch.tensor(line["ids"])[:, None])[:, 0]
        weights = torch.tensor(mask, dtype=torch.float32)
        losses.append((scores * weights).sum() / weights.sum())
    assert num_results >= 6
    assert {start: len(seeds) for start, seeds in generator.items()} == {1: 1, 2: 1}
    rewards = torch.tensor(totals).view(2, 4)
    assert logged["reward"] == pytest.approx(float(rewards.mean()), abs=1e-5)
    assert logged["rewards/Counting/mean"] > 0
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    loss = -(advantages * torch.stack(losses)).mean()
    loss.backward()
    after = dict(AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32).named_parameters())
    largest = max(float(weight.grad.abs().max()) for weight in model.parameters())
    for name, weight in model.named_parameters():
        moved = (after[name] - weight).detach()
        torch.testing.assert_close(moved, -rate * weight.grad, rtol=0, atol=2e-3 * rate * largest, msg=name)


def _parts(tokenizer, ids):
    """Yield the tokens of an answer in parts, with True for what the model wrote: each turn ends with its end token.

    What follows it, up to the next head of an answer, is the chat template's and the tool's.
    """
    head = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    start, is_own = 0, True
    for place in range(len(ids)):
        ends = ids[place] == tokenizer.eos_token_id if is_own else ids[place + 1 - len(head) : place + 1] == head
        if ends:
            yield ids[start : place + 1], is_own
            start, is_own = place + 1, not is_own
    if start < len(ids):
        yield ids[start:], is_own


def _turns(tokenizer, ids):
    return [part for part, _ in _parts(tokenizer, ids)]


@pytest.mark.slow
def test_the_turns_are_in_the_samples_and_the_metrics(calling_model, home):
    own = {"environment": "own_tools:Counting"}
    run = tunekit.train(recipe(home, STARTS, model=str(calling_model), method=own))
    assert not [child for child in psutil.Process().children() if "environments.host" in " ".join(child.cmdline())]
    events = run.events()
    sample = next(event for event in events if event["event"] == "completions")
    shown = sample["best"]["answer"] + sample["worst"]["answer"]
    assert "→ guess(number=" in shown and "← " in shown
    logged = next(event for event in events if event["event"] == "log")
    assert logged["tools/call_frequency"] > 0 and logged["tools/lost"] == 0
    (reason,) = (reason for reason in run.plan.reasons if reason.topic == "method")
    assert reason.choice.endswith("over up to 9 turns, with Counting")


WALK = """
import json
from pathlib import Path

class Walk:
    def reset(self, start):
        self.rewards = []
        return f" Begin at {start}."

    def step(self, number: int):
        '''Guess the number.

        Args:
            number: The guess.
        '''
        self.rewards.append(number / 8)
        with Path(__file__).with_name("walks.jsonl").open("a") as file:
            file.write(json.dumps(self.rewards) + "\\n")
        return "higher", number / 8, len(self.rewards) == 2, False, {}
"""


@pytest.mark.slow
def test_rewards_of_steps_are_shown_by_turn(home):
    """Of an environment in the way of Gymnasium: in the metrics, and for each answer of a trial."""
    save_calling_model(home / "stepping", "step")
    (home / "own_walk.py").write_text(WALK)
    own = {"environment": "own_walk:Walk", "max_completion_length": 140}
    wanted = recipe(home, STARTS, model=str(home / "stepping"), method=own)
    trial = tunekit.try_rewards(wanted, num_prompts=2)
    walks = [answer.step_rewards for answer in trial.answers]
    assert [sum(walk) for walk in walks] == pytest.approx([answer.total for answer in trial.answers])
    written = lines_of(home / "walks.jsonl")
    assert max(map(len, written)) == 2
    for turn in (1, 2):
        shown = [walk[turn - 1] for walk in walks if len(walk) >= turn]
        assert sorted(shown) == sorted(line[-1] for line in written if len(line) == turn)
    assert ", by turn " in "\n".join(map(str, trial_parts(trial)))
    (home / "walks.jsonl").unlink()
    run = tunekit.train(wanted, ["train.max_steps=1"])
    written = lines_of(home / "walks.jsonl")
    (logged,) = (event for event in run.events() if event["event"] == "log")
    for turn in (1, 2):
        rewards = [line[-1] for line in written if len(line) == turn]
        assert logged[f"rewards/turn_{turn}/mean"] == pytest.approx(sum(rewards) / len(rewards))


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_trial_plays_the_episodes_of_the_first_step(calling_model, home):
    """The same seeds as in training, one for each group; calls, rewards and texts are those that were played."""
    own = {"environment": "own_tools:Counting", "rewards": ["own_tools:judge"]}
    wanted = recipe(home, STARTS, model=str(calling_model), method=own)
    trial = tunekit.try_rewards(wanted, num_prompts=2)
    judged, episodes = lines_of(home / "judged.jsonl"), lines_of(home / "episodes.jsonl")
    assert [group.prompt for group in trial.groups] == [f"Guess my number. Begin at {start}." for start in (1, 2)]
    assert [(reward.name, reward.weight) for reward in trial.rewards] == [("judge", 1.0), ("Counting", 1.0)]
    for answer, line, episode in zip(trial.answers, judged, episodes, strict=True):
        assert answer.values[0] == pytest.approx(sum(line["ids"]) % 97 / 97)
        assert answer.total == pytest.approx(sum(answer.values)) and answer.num_tokens == len(line["ids"])
        assert answer.num_calls == len(episode["calls"])
        assert answer.text == transcript(line["completion"])
    assert trial.calls.num_calls == sum(len(episode["calls"]) for episode in episodes) > 0
    assert trial.calls.per_episode == trial.calls.num_calls / 8
    text = "\n".join(map(str, trial_parts(trial)))
    assert "→ guess(number=" in text and "← " in text
    (home / "episodes.jsonl").unlink()
    tunekit.train(wanted)
    trained = lines_of(home / "episodes.jsonl")
    assert {e["start"]: e["seed"] for e in trained} == {e["start"]: e["seed"] for e in episodes}


@pytest.mark.slow
def test_an_evaluation_plays_the_held_out_episodes_of_the_training(calling_model, home):
    """The likeliest tokens are sampled in training too, so that both evaluations of the run are told exactly."""
    own = {"environment": "own_tools:Counting", "rewards": ["own_tools:judge"], "generation": {"top_k": 1}}
    own["trainer_args"] = {"num_generations_eval": 1}
    wanted = recipe(home, [{**row, "start": start} for row in STARTS for start in range(3)], method=own)
    wanted |= {"model": str(calling_model), "data": {**wanted["data"], "eval": str(home / "prompts.jsonl")}}
    run = tunekit.train(wanted)
    first, last = (e for e in run.events() if e["event"] == "eval")
    held_out = tunekit.evaluate(run)
    of_file = tunekit.evaluate(run, data=str(home / "prompts.jsonl"), before=False)
    scores = {score.name: score for score in held_out.scores}
    for name in ("judge", "Counting"):
        score = scores[f"rewards/{name}/mean"]
        assert score.before.value == pytest.approx(first[f"eval_rewards/{name}/mean"], abs=1e-6)
        assert score.after.value == pytest.approx(last[f"eval_rewards/{name}/mean"], abs=1e-6)
    assert scores["tools/call_frequency"].after.value == pytest.approx(last["eval_tools/call_frequency"])
    assert [score.after for score in of_file.scores] == [score.after for score in held_out.scores]


@pytest.mark.slow
def test_a_trial_of_a_rollout_function_uses_it(calling_model, home):
    (home / "own_rollout.py").write_text(ROLLOUT)
    own = {"rollout": "own_rollout:answer", "rewards": ["own_tools:judge"]}
    trial = tunekit.try_rewards(recipe(home, STARTS, model=str(calling_model), method=own), num_prompts=2)
    assert [line["ids"] for line in lines_of(home / "judged.jsonl")] == [[40 + place, 2] for place in range(8)]
    assert trial.calls is None and [answer.num_tokens for answer in trial.answers] == [2] * 8


@pytest.mark.slow
def test_an_answer_is_no_longer_than_it_may_be(calling_model, home):
    own = {"environment": "own_tools:Counting", "rewards": ["own_tools:judge"], "max_completion_length": 70}
    tunekit.train(recipe(home, STARTS, model=str(calling_model), method=own))
    lengths = [len(json.loads(line)["ids"]) for line in (home / "judged.jsonl").read_text().splitlines()]
    assert max(lengths) <= 70
    assert max(lengths) > 45, "no answer had a second turn"


@pytest.mark.slow
def test_an_episode_whose_environment_hangs_teaches_nothing(calling_model, home, capfd):
    """Numbers from 13 on hang for an hour; here all guesses do, so that no weight changes."""
    text = (home / "own_tools.py").read_text()
    (home / "own_tools.py").write_text(text.replace("if number == 13:", "if True:"))
    own = {"environment": "own_tools:Counting", "tool_timeout_seconds": 0.5, "max_completion_length": 60}
    run = tunekit.train(recipe(home, STARTS, model=str(calling_model), method=own))
    logged = next(event for event in run.events() if event["event"] == "log")
    assert logged["tools/lost"] >= 5
    assert logged["loss"] == 0 and logged["frac_reward_zero_std"] == 1
    (message,) = (event["message"] for event in run.events() if event["event"] == "warning")
    lost = "method.environment: guess did not return within 0.5 s: the episode takes the mean reward of its group"
    assert message == f"step 1: {lost}; if it only takes long, raise method.tool_timeout_seconds"
    assert message in (run.path / "log.txt").read_text()


@pytest.mark.slow
def test_a_rollout_function_generates_in_place_of_the_trainer(calling_model, home):
    (home / "own_rollout.py").write_text(ROLLOUT)
    own = {"rollout": "own_rollout:answer", "rewards": ["own_tools:judge"]}
    tunekit.train(recipe(home, STARTS, model=str(calling_model), method=own))
    judged = [json.loads(line) for line in (home / "judged.jsonl").read_text().splitlines()]
    assert [line["ids"] for line in judged] == [[40 + place, 2] for place in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_two_processes_learn_from_a_rollout_function_as_one(strategy, calling_model, home):
    (home / "own_rollout.py").write_text(ROLLOUT)
    own = {"rollout": "own_rollout:of_step", "rewards": ["own_tools:judge"]}
    # Its gradients are those of all answers; a step of Adam would be one of their signs.
    train = {"max_steps": 3, "global_batch_size": 8, "learning_rate": 1e-2, "optim": "sgd"}
    logs, answers = [], []
    for name, layout in (("one", {}), ("two", {"strategy": strategy, "num_processes": 2})):
        grpo = recipe(home, STARTS, model=str(calling_model), method=own, train=train, parallel=layout)
        run = tunekit.train({**grpo, "output": {"dir": str(home / name), "sample_prompts": []}})
        logs.append([event for event in run.events() if event["event"] == "log"])
        answers.append(sorted(json.loads(line)["ids"] for line in (home / "judged.jsonl").read_text().splitlines()))
        (home / "judged.jsonl").unlink()
    assert answers[0] == answers[1] and len(answers[0]) == 24
    for key in ("reward", "grad_norm", "loss"):
        one, two = ([event[key] for event in log] for log in logs)
        assert len(one) == 3 and two == pytest.approx(one, rel=1e-4, abs=1e-6), key
    assert min(event["grad_norm"] for event in logs[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_processes_with_turns_of_their_own_wait_for_each_other(strategy, calling_model, home):
    """The tiny model leaves its answers after any number of turns; all processes end with one and the same model."""
    layout = {"strategy": strategy, "num_processes": 2}
    own = {"environment": "own_tools:Counting", "rewards": ["own_tools:judge"]}
    train = {"max_steps": 3, "global_batch_size": 8, "learning_rate": 1e-3}
    wanted = recipe(home, STARTS, model=str(calling_model), method=own, train=train, parallel=layout)
    run = tunekit.train(wanted)
    assert run.status()["phase"] == "finished"
    judged = [json.loads(line) for line in (home / "judged.jsonl").read_text().splitlines()]
    turns = [sum(message["role"] == "assistant" for message in line["completion"]) for line in judged]
    assert len(turns) == 24 and len(set(turns)) > 1
    episodes = [json.loads(line) for line in (home / "episodes.jsonl").read_text().splitlines()]
    seeds = {start: {each["seed"] for each in episodes if each["start"] == start} for start in (1, 2)}
    assert {start: len(each) for start, each in seeds.items()} == {1: 3, 2: 3}, "one episode for a prompt and a step"


def _tokens_of_turns(folder, num_turns):
    """Return the tokens that this process generates while rank 0 has so many turns, of six tokens each."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    model, tokens = AutoModelForCausalLM.from_pretrained(folder), []
    config = GenerationConfig(max_new_tokens=6, min_new_tokens=1, do_sample=False, eos_token_id=None, pad_token_id=0)
    trainer = SimpleNamespace(accelerator=Accelerator(cpu=True), generation_config=config, tool_hosts=())
    turns = _Turns(trainer, 100, takes_part=True)

    def generate(prompt_ids, *_):
        output = model.generate(torch.tensor(prompt_ids), generation_config=config)
        tokens.append(output.shape[1] - len(prompt_ids[0]))

    def loop(prompts, prompt_ids):
        for _ in range(num_turns if trainer.accelerator.is_main_process else 0):
            trainer.generate_turn(prompt_ids, None, {}, 1)

    trainer.generate_turn = lambda *args: turns.generate(generate, *args)
    turns.follow(loop, [], [[5]])
    assert config.max_new_tokens == 6
    return tokens


@pytest.mark.slow
def test_a_process_without_turns_generates_one_token_in_those_of_others(calling_model):
    """Also where the others' prompts are one token long, as what it generates from is."""
    assert in_processes(2, _tokens_of_turns, calling_model, 3) == [[6, 6, 6], [1, 1, 1]]


def test_a_process_without_turns_takes_part_in_two_of_another_with_a_token_each():
    answers, lengths = iter([1.0, 1.0, 0.0]), []
    config = GenerationConfig(max_new_tokens=6)
    accelerator = SimpleNamespace(num_processes=2, device="cpu", reduce=lambda own: own + next(answers))
    trainer = SimpleNamespace(accelerator=accelerator, generation_config=config, tool_hosts=())
    turns = _Turns(trainer, 100, takes_part=True)
    trainer.generate_turn = lambda *args: turns.generate(lambda *_: lengths.append(config.max_new_tokens), *args)
    turns.follow(lambda *_: None, [], [[5, 6, 7]])
    assert lengths == [1, 1] and config.max_new_tokens == 6


def test_an_error_that_the_loop_takes_for_a_result_ends_the_run():
    failure = RunError("method.tools: gone", hint="resume")
    config, accelerator = GenerationConfig(max_new_tokens=6), SimpleNamespace(num_processes=1)
    hosts = [SimpleNamespace(failure=None), SimpleNamespace(failure=failure)]
    trainer = SimpleNamespace(accelerator=accelerator, generation_config=config, tool_hosts=hosts)
    with pytest.raises(RunError, match=r"method.tools: gone"):
        _Turns(trainer, 100, takes_part=False).follow(lambda *_: None, [], [[5, 6, 7]])


def test_tools_whose_environment_cannot_start_leave_no_process(home):
    (home / "own_game.py").write_text("1 / 0")
    wanted = method(tools=["own_tools:lookup"], environment="own_game:Game")
    parts = SimpleNamespace(train=SimpleNamespace(seed=0), tokenizer=None)
    # Other tests of this process may have left children that nobody has waited for.
    before = set(psutil.Process().children())
    with pytest.raises(RunError, match=r"method.environment: .*ZeroDivisionError"):
        tool_use(wanted, parts)
    assert set(psutil.Process().children()) <= before


@pytest.mark.slow
@pytest.mark.parametrize("generation", [{"environment": "own_tools:Counting"}, {"rollout": "own_rollout:of_step"}])
def test_a_run_with_episodes_or_a_rollout_function_resumes_to_the_same_weights(generation, calling_model, home):
    (home / "own_rollout.py").write_text(ROLLOUT)
    own = {**generation, "rewards": ["own_tools:judge"]}
    train = {"max_steps": 4, "global_batch_size": 8, "learning_rate": 1e-3, "save_steps": 2}
    wanted = recipe(home, STARTS, model=str(calling_model), method=own, train=train)
    whole = tunekit.train({**wanted, "output": {"dir": str(home / "whole"), "sample_prompts": []}})
    half = tunekit.train({**wanted, "output": {"dir": str(home / "half"), "sample_prompts": []}})
    import shutil

    from tunekit.runs.run import Run

    for step in (4,):
        shutil.rmtree(half.path / "checkpoints" / f"checkpoint-{step}")
    shutil.rmtree(half.path / "model")
    again = tunekit.resume(Run(half.path))
    first, second = (each.model_path / "model.safetensors" for each in (whole, again))
    assert first.read_bytes() == second.read_bytes()
