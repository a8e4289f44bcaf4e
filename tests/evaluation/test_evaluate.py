"""Evaluations: figures that are computed here a second time, by transformers and PEFT alone or by hand."""

import json
import math
import shutil
import sys

import numpy as np
import pytest
import scipy.stats
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import tunekit
from tests.tiny import save_chats, save_tiny_model
from tunekit import frontend
from tunekit.cli import app
from tunekit.evaluation.bootstrap import Figure, Sample, scored, wilson
from tunekit.evaluation.losses import log_likelihoods
from tunekit.probe.model import PICO
from tunekit.runs.evaluation_result import Estimate, Score

TRAIN = {"learning_rate": 2e-2, "max_steps": 4, "global_batch_size": 4, "save_steps": 2, "logging_steps": 1}
CHATS = [(f"double {n}", "it is " * (n % 5) + str(2 * n)) for n in range(20, 32)]
PAIRS = [{"prompt": f"double {n} ", "chosen": f"{2 * n}", "rejected": "no idea" * (n % 3 + 1)} for n in range(24)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "llama")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    save_chats(folder / "eval.jsonl", CHATS)
    for name, rows in (("pairs", PAIRS[:16]), ("pairs_eval", PAIRS[16:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def train(workspace, name, rows="rows", held_out="eval", **others):
    recipe = {
        "model": str(workspace / "llama"),
        "data": {
            "train": str(workspace / f"{rows}.jsonl"),
            "eval": str(workspace / f"{held_out}.jsonl"),
            "max_length": 128,
        },
        "adapter": "lora",
        "train": TRAIN,
        "output": {"dir": str(workspace / "runs" / name), "sample_prompts": []},
        **others,
    }
    return tunekit.train(recipe)


@pytest.fixture(scope="module")
def sft(workspace):
    return train(workspace, "sft")


@pytest.fixture(scope="module")
def dpo(workspace):
    return train(workspace, "dpo", "pairs", "pairs_eval", method={"type": "dpo", "beta": 0.3}, adapter="full")


@pytest.fixture(scope="module")
def held_out(sft):
    return tunekit.evaluate(sft)


def by_name(made) -> dict[str, Score]:
    return {score.name: score for score in made.scores}


def bare(workspace, dtype=torch.float64):
    return AutoModelForCausalLM.from_pretrained(workspace / "llama", dtype=dtype).eval()


def nats(model, ids: list[int], first: int) -> float:
    """What the tokens from one on cost a model, one sequence alone, in nats."""
    with torch.no_grad():
        likely = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return -sum(float(likely[place - 1, ids[place]]) for place in range(first, len(ids)))


def of_chats(model, tokenizer) -> list[tuple[float, int]]:
    """Nats and tokens of each answer of the held-out chats, written out by hand in ChatML."""
    found = []
    for question, answer in CHATS:
        asked = tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        said = tokenizer(f"{answer}<|im_end|>")["input_ids"]
        found.append((nats(model, asked + said, len(asked)), len(said)))
    return found


def test_loss_and_perplexity_weigh_every_token_alike_before_and_after(sft, held_out, workspace):
    tokenizer, model = AutoTokenizer.from_pretrained(workspace / "llama"), bare(workspace)
    before = of_chats(model, tokenizer)
    after = of_chats(PeftModel.from_pretrained(model, sft.model_path).double().eval(), tokenizer)
    assert len({num for _, num in after}) > 2, "the answers are of unequal lengths"
    loss = by_name(held_out)["loss"]
    for rows, estimate in ((before, loss.before), (after, loss.after)):
        mean = sum(cost for cost, _ in rows) / sum(num for _, num in rows)
        assert estimate.value == pytest.approx(mean, rel=1e-5)
        of_rows = sum(cost / num for cost, num in rows) / len(rows)
        assert abs(of_rows - mean) > 1e-3, "a mean over rows would be another figure"
    assert by_name(held_out)["perplexity"].after.value == pytest.approx(math.exp(loss.after.value))
    assert loss.num_rows == len(CHATS) and held_out.before == str(workspace / "llama")
    events = [event for event in sft.events() if event["event"] == "eval"]
    assert loss.before.value == pytest.approx(events[0]["eval_loss"], rel=1e-4)
    assert loss.after.value == pytest.approx(events[-1]["eval_loss"], rel=1e-4)


def test_rows_of_a_file_are_read_as_in_training_and_limited(sft, held_out, workspace):
    told = []
    made = tunekit.evaluate(sft, data=workspace / "eval.jsonl", before=False, on_event=told.append)
    ours, theirs = by_name(made)["loss"], by_name(held_out)["loss"]
    assert ours.after == theirs.after and ours.of == str(workspace / "eval.jsonl")
    assert ours.before is None and ours.difference is None and made.before is None
    assert {event["side"] for event in told} == {"after"} and told[-1]["done"] == told[-1]["total"] == len(CHATS)
    assert by_name(tunekit.evaluate(sft, limit=3, before=False))["loss"].num_rows == 3, "of rows of their own name"


def test_a_checkpoint_and_a_model_without_a_run_are_evaluated_too(sft, held_out, workspace):
    at_step = tunekit.evaluate(sft, checkpoint="2")
    assert at_step.step == 2
    assert by_name(at_step)["loss"].before.value == pytest.approx(by_name(held_out)["loss"].before.value, rel=1e-6)
    folder = sft.path / "checkpoints" / "checkpoint-2"
    rows = of_chats(
        PeftModel.from_pretrained(bare(workspace), folder).double().eval(), AutoTokenizer.from_pretrained(folder)
    )
    mean = sum(cost for cost, _ in rows) / sum(num for _, num in rows)
    assert by_name(at_step)["loss"].after.value == pytest.approx(mean, rel=1e-5)
    alone = tunekit.evaluate(workspace / "llama", data=workspace / "eval.jsonl")
    assert by_name(alone)["loss"].after.value == pytest.approx(by_name(held_out)["loss"].before.value, rel=1e-5)
    assert alone.before is None and alone.path is None and by_name(alone)["loss"].difference is None


def test_texts_are_measured_wholly(workspace, tmp_path):
    texts = ["a text", "another one that is longer", "and a third"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer, model = AutoTokenizer.from_pretrained(workspace / "llama"), bare(workspace)
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    costs, num = sum(nats(model, one, 1) for one in ids), sum(len(one) - 1 for one in ids)
    made = tunekit.evaluate(workspace / "llama", data=tmp_path / "texts.jsonl", dtype="float32")
    assert by_name(made)["loss"].after.value == pytest.approx(costs / num, rel=1e-5)


def test_of_sequences_of_all_lengths_each_token_but_the_first_is_weighed(workspace):
    ids = [[5, 6, 7, 8, 9], [11, 12], [3], [20, 21, 22, 23], [7, 7, 7]]
    found = log_likelihoods(bare(workspace), ids, [[1] * len(sequence) for sequence in ids])
    assert found == pytest.approx([-nats(bare(workspace), sequence, 1) for sequence in ids], rel=1e-5)
    last = log_likelihoods(bare(workspace), ids, [[0] * (len(sequence) - 1) + [1] for sequence in ids])
    wanted = [-nats(bare(workspace), sequence, max(1, len(sequence) - 1)) for sequence in ids]
    assert last == pytest.approx(wanted, rel=1e-5)


def test_packed_sequences_are_measured_one_by_one():
    from datasets import Dataset

    from tunekit.evaluation.tasks import _sequences

    row = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, -100, 5], "seq_lengths": [3, 2]}
    found = [(ids.tolist(), counted.tolist()) for ids, counted in _sequences(Dataset.from_list([row]))]
    assert found == [([1, 2, 3], [False, True, True]), ([4, 5], [False, True])]


@pytest.mark.slow
def test_pairs_have_the_rewards_of_dpo_against_the_model_before(dpo, workspace):
    tokenizer, model = AutoTokenizer.from_pretrained(workspace / "llama"), bare(workspace)
    trained = AutoModelForCausalLM.from_pretrained(dpo.model_path, dtype=torch.float64).eval()

    def costs(of, name):
        found = []
        for row in PAIRS[16:]:
            asked = tokenizer(row["prompt"])["input_ids"]
            said = tokenizer(row[name] + "<|im_end|>")["input_ids"]
            found.append(-nats(of, asked + said, len(asked)))
        return np.array(found)

    gained = {name: 0.3 * (costs(trained, name) - costs(model, name)) for name in ("chosen", "rejected")}
    margins = gained["chosen"] - gained["rejected"]
    made = by_name(tunekit.evaluate(dpo))
    assert made["rewards/margins"].after.value == pytest.approx(margins.mean(), rel=1e-4)
    assert made["rewards/accuracies"].after.value == pytest.approx((margins > 0).mean())
    assert made["rewards/accuracies"].before is None, "before training no answer has a reward"
    assert made["loss"].after.value == pytest.approx(np.log1p(np.exp(-margins)).mean(), rel=1e-4)
    assert made["loss"].before.value == pytest.approx(math.log(2))
    assert made["logps/chosen"].before.value == pytest.approx(costs(model, "chosen").mean(), rel=1e-5)
    last = [event for event in dpo.events() if event["event"] == "eval"][-1]
    for name in ("loss", "rewards/margins", "rewards/accuracies", "logps/rejected"):
        assert made[name].after.value == pytest.approx(last[f"eval_{name}"], rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("orpo", ("rewards/accuracies", "rewards/margins")),
        ("kto", ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")),
    ],
)
def test_other_methods_are_measured_as_their_trainers_do(method, names, workspace):
    rows = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in PAIRS
        for name in ("chosen", "rejected")
    ]
    for name, part in (("rated", rows[:32]), ("rated_eval", rows[32:])):
        (workspace / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    files = ("rated", "rated_eval") if method == "kto" else ("pairs", "pairs_eval")
    run = train(workspace, method, *files, method=method)
    made = by_name(tunekit.evaluate(run))
    first, *_, last = (event for event in run.events() if event["event"] == "eval")
    for name in names:
        assert made[name].before.value == pytest.approx(first[f"eval_{name}"], rel=1e-3, abs=1e-6), name
        assert made[name].after.value == pytest.approx(last[f"eval_{name}"], rel=1e-3), name


@pytest.mark.slow
def test_a_run_that_learned_from_rewards_is_judged_by_them(workspace):
    rows = [{"prompt": f"double {n} is ", "answer": str(2 * n)} for n in range(12)]
    for name, part in (("sums", rows[:8]), ("sums_eval", rows[8:])):
        (workspace / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    rewards = ["exact_match", {"type": "length", "max_tokens": 9, "free_tokens": 3, "weight": 0.5}]
    method = {"type": "grpo", "rewards": rewards, "max_completion_length": 8, "num_generations": 2}
    run = train(workspace, "grpo", "sums", "sums_eval", method=method, train={**TRAIN, "max_steps": 1})
    made = by_name(tunekit.evaluate(run))
    tokenizer, model = AutoTokenizer.from_pretrained(workspace / "llama"), bare(workspace, torch.float32)
    lengths = []
    for row in rows[8:]:
        given = tokenizer(row["prompt"], return_tensors="pt")
        output = model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        lengths.append(output.shape[1] - given["input_ids"].shape[1])
    assert made["completions/mean_length"].before.value == np.mean(lengths)
    punished = np.mean([min(0, (3 - length) / 6) for length in lengths])
    assert made["rewards/length/mean"].before.value == pytest.approx(punished)
    with pytest.raises(tunekit.TunekitError, match="held-out row 1: numeric_match reads the column 'sum'"):
        tunekit.evaluate(run, metrics=[{"type": "numeric_match", "column": "sum"}])
    sums = made["rewards/exact_match/mean"].before.value + 0.5 * punished
    assert made["reward"].before.value == pytest.approx(sums)


@pytest.mark.slow
def test_a_reward_model_is_judged_by_the_pairs_it_tells_apart(workspace):
    run = train(workspace, "judge", "pairs", "pairs_eval", method="reward")
    made = by_name(tunekit.evaluate(run))
    last = [event for event in run.events() if event["event"] == "eval"][-1]
    for name, theirs in (("loss", "eval_loss"), ("accuracy", "eval_accuracy"), ("margin", "eval_margin")):
        assert made[name].after.value == pytest.approx(last[theirs], rel=1e-3), name
        assert made[name].before is None, "before training its score is random"
    with pytest.raises(tunekit.TunekitError, match="is a reward model"):
        tunekit.evaluate(run, tasks=["hellaswag"])


QUESTIONS = [
    ("What is 12 plus 30?", "42"),
    ("What is 23 plus 45?", "67"),
    ("What is 7 plus 8?", "15"),
    ("What is 11 plus 5?", "the number is 16"),
]


def test_metrics_judge_the_answers_that_the_model_gives(tmp_path, monkeypatch):
    path = tmp_path / "qa.jsonl"
    path.write_text("".join(json.dumps({"prompt": q, "answer": a}) + "\n" for q, a in QUESTIONS))
    (tmp_path / "my_metrics.py").write_text(
        "def letters(completions, **columns):\n    return [len(c) for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(PICO), AutoModelForCausalLM.from_pretrained(PICO, dtype="float32")
    answers = []
    for question, _ in QUESTIONS:
        turn = [{"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**given, max_new_tokens=32, do_sample=False)
        answers.append(tokenizer.decode(output[0, given["input_ids"].shape[1] :], skip_special_tokens=True))
    numbers = [answer.rstrip(".").split()[-1] for answer in answers]
    assert numbers == ["42", "68", "15", "16"], "pico can add such numbers"
    metrics = ["numeric_match", "exact_match", {"type": "regex", "pattern": r".*= 42\."}, "my_metrics:letters"]
    made = by_name(
        tunekit.evaluate("pico", data=path, metrics=metrics, max_new_tokens=32, batch_size=3, dtype="float32")
    )
    assert made["rewards/numeric_match/mean"].after.value == 3 / 4, "one expected answer is wrong"
    assert made["rewards/exact_match/mean"].after.value == 0
    assert made["rewards/regex/mean"].after.value == 1 / 4
    assert made["rewards/letters/mean"].after.value == sum(map(len, answers)) / 4
    assert made["reward"].after.value == pytest.approx(3 / 4 + 1 / 4 + sum(map(len, answers)) / 4)
    assert made["completions/clipped_ratio"].after.value == 0


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A task of four questions with two choices each, and its documents."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": f"double {n}", "choices": [str(2 * n), "no idea"], "label": n % 2} for n in range(8)]
    (folder / "doubles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "doubles",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "doubles.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}} is",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        ],
    }
    (folder / "doubles.yaml").write_text(yaml.safe_dump(task))
    return folder


def width(estimate: Estimate) -> float:
    return 0.0 if estimate.low is None else estimate.high - estimate.low


@pytest.mark.slow
def test_tasks_score_as_lm_evaluation_harness_does_by_itself(sft, tasks, workspace):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    made = {score.name: score for score in tunekit.evaluate(sft, tasks=["doubles"], include_path=tasks).scores}
    tokenizer, model = AutoTokenizer.from_pretrained(workspace / "llama"), bare(workspace, torch.float32)
    results = []
    for one in (lambda: model, lambda: PeftModel.from_pretrained(model, sft.model_path).eval()):
        results.append(
            simple_evaluate(
                HFLM(pretrained=one(), tokenizer=tokenizer),
                tasks=["doubles"],
                task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            )
        )
    for name in ("acc", "acc_norm"):
        score = made[name]
        for estimate, result in zip((score.before, score.after), results, strict=True):
            value, error = (result["results"]["doubles"][f"{name}{more},none"] for more in ("", "_stderr"))
            assert estimate.value == value
            assert width(estimate) == pytest.approx(2 * 1.959964 * error, abs=1e-6)
        each = [[doc[name] for doc in result["samples"]["doubles"]] for result in results]
        apart = np.array(each[1]) - np.array(each[0])
        assert score.difference.value == pytest.approx(apart.mean())
        assert width(score.difference) == pytest.approx(2 * 1.959964 * apart.std(ddof=1) / math.sqrt(8), abs=1e-6)
        assert score.num_rows == 8


def test_intervals_are_those_of_scipy():
    draw = np.random.default_rng(7)
    values, weights = draw.normal(2.0, 0.7, 200), draw.integers(1, 40, 200).astype(float)
    score = scored(Figure("loss", "loss", ".4f", higher_is_better=False), "rows", Sample(values, weights), None)

    def mean(values, weights, axis):
        return (values * weights).sum(axis) / weights.sum(axis)

    theirs = scipy.stats.bootstrap(
        (values, weights), mean, paired=True, n_resamples=20000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    width = theirs.high - theirs.low
    assert score.after.value == pytest.approx(mean(values, weights, -1))
    assert score.after.low == pytest.approx(theirs.low, abs=width / 20)
    assert score.after.high == pytest.approx(theirs.high, abs=width / 20)
    for right, rows in ((0, 12), (7, 12), (12, 12), (1, 1)):
        ours = scipy.stats.binomtest(right, rows).proportion_ci(method="wilson")
        assert wilson(right, rows) == pytest.approx((ours.low, ours.high), abs=1e-9)


def test_differences_are_paired_row_by_row():
    draw = np.random.default_rng(3)
    hard, ones = draw.normal(3.0, 2.0, 300), np.ones(300)
    after, before = Sample(hard - 0.1 + draw.normal(0, 0.05, 300), ones), Sample(hard, ones)
    score = scored(Figure("loss", "loss", ".4f", higher_is_better=False), "rows", after, before)
    exact = 2 * 1.959964 * (after.values - before.values).std(ddof=1) / math.sqrt(300)
    assert score.difference.high - score.difference.low == pytest.approx(exact, rel=0.08)
    assert score.verdict == "better" and score.after.high - score.after.low > 10 * exact


def test_rows_of_which_nothing_is_said_do_not_count_and_one_row_has_no_interval():
    figure = Figure("reward", "reward", ".3f", higher_is_better=True)
    one = scored(figure, "rows", Sample(np.array([2.0, 5.0]), np.array([1.0, 0.0])), None)
    assert one.after == Estimate(2.0) and one.num_rows == 1
    same = Sample(np.array([2.0, 2.0]), np.ones(2))
    assert scored(figure, "rows", same, same).verdict == "no difference"


def test_evaluations_stand_in_the_folder_the_report_the_card_and_what_is_shown(sft, held_out, capsys, monkeypatch):
    kept = frontend.evaluations_of(sft)
    assert held_out in kept and [one.began for one in kept] == sorted(one.began for one in kept)
    assert not list((sft.path / "evaluations").glob(".*"))
    loss = by_name(held_out)["loss"]
    page = tunekit.report(sft)
    assert "held-out, 12 rows" in page and f"{loss.after.value:.4f}" in page
    card = ModelCard.load(sft.model_path / "README.md")
    results = {(one.dataset_name, one.metric_type): one.metric_value for one in card.data.eval_results}
    assert results["held-out", "loss"] == pytest.approx(loss.after.value, abs=1e-6)
    assert "95%" in card.text and f"{loss.before.value:.4f}" in card.text
    out = run_command(["runs", "show", str(sft.path)], capsys, monkeypatch)
    assert "evaluated" in out and "perplexity" in out


def run_command(arguments, capsys, monkeypatch, code=None) -> str:
    """What a command prints; with the exit code of a fault, what it says of that."""
    monkeypatch.setattr(sys, "argv", ["tunekit", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        app.main()
    said = capsys.readouterr()
    assert exited.value.code == (code or 0), said.err
    return said.err if code else said.out


def test_the_command_prints_a_table_or_json(sft, workspace, capsys, monkeypatch):
    arguments = ["eval", sft.path, "--data", workspace / "eval.jsonl", "--limit", "4"]
    out = run_command(arguments, capsys, monkeypatch)
    for words in ("before", "after", "difference", "perplexity", "4 rows", "bootstrap", "paired", "saved to"):
        assert words in out, words
    made = json.loads(run_command([*arguments, "--no-before", "--json"], capsys, monkeypatch))
    assert made["scores"][0]["name"] == "loss" and made["scores"][0]["before"] is None


@pytest.mark.slow
def test_what_cannot_be_evaluated_is_said_in_a_line_before_a_model_is_loaded(
    sft, workspace, tasks, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run, pairs, chats = sft.path, workspace / "pairs.jsonl", workspace / "eval.jsonl"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n')
    (tmp_path / "damaged").mkdir()
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    status = {**sft.status(), "phase": "interrupted"}
    (unfinished / "status.json").write_text(json.dumps(status))
    cut_off = shutil.copytree(run, tmp_path / "cut-off")
    for folder in (shutil.copytree(workspace / "llama", tmp_path / "cut"), cut_off / "model"):
        (weights,) = folder.glob("*.safetensors")
        weights.write_bytes(weights.read_bytes()[:1000])
    for words, arguments in (
        ("no run 'nothing'", ["nothing"]),
        ("the weights of 'cut' are damaged", ["cut", "--data", chats]),
        ("adapter_model.safetensors is damaged", ["cut-off"]),
        ("no model yet", [unfinished]),
        ("has no config.json", ["damaged", "--data", chats]),
        ("no metric 'exact_mach'; did you mean 'exact_match'?", [run, "--metric", "exact_mach"]),
        ("metric regex: pattern", [run, "--metric", "regex", "--data", "prompts.jsonl"]),
        ("no module 'my_rewards'", [run, "--metric", "my_rewards:score", "--data", "prompts.jsonl"]),
        ("prompts.jsonl:2: exact_match reads", [run, "--metric", "exact_match", "--data", "prompts.jsonl"]),
        ("no metric to score the answers", [run, "--data", "prompts.jsonl"]),
        ("a metric needs prompts", [run, "--metric", "exact_match"]),
        ("have no prompts", [run, "--metric", "exact_match", "--data", pairs]),
        ("no task 'double'; did you mean 'doubles'?", [run, "--tasks", "double", "--include-path", tasks]),
        ("has no YAML task files", [run, "--tasks", "doubles", "--include-path", "damaged"]),
        ("no held-out rows to evaluate on", [workspace / "llama"]),
        ("no file 'missing.jsonl'", [run, "--data", "missing.jsonl"]),
        ("sft has no such checkpoint", [run, "--checkpoint", "3"]),
    ):  # fmt: skip
        said = run_command(["eval", *arguments], capsys, monkeypatch, code=2)
        assert words in said and said.count("\n") == 1, said


def test_a_damaged_evaluation_is_named(sft, tmp_path):
    folder = shutil.copytree(sft.path, tmp_path / "copy")
    (folder / "evaluations").mkdir(exist_ok=True)
    (folder / "evaluations" / "x.json").write_text('{"model": 1}')
    with pytest.raises(tunekit.TunekitError, match=r"x\.json is not an evaluation"):
        frontend.evaluations_of(folder)
