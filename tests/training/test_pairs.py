"""Methods that learn from fixed answers, on a tiny model: first losses by hand, that they learn, save and resume."""

import itertools
import json
import math
import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, set_seed

import tunekit
from tests.tiny import make_tokenizer, save_tiny_model
from tests.training.by_trl import PLAIN
from tunekit.api import verbs
from tunekit.errors import DataError, RecipeError
from tunekit.runs.run import Run
from tunekit.training.callbacks import Watch

STEPS, SAVED, CUT = 10, 4, 6
NUM_ROWS = 8
"""All rows are a step, so that what is computed over one is known."""

METHODS = {
    "dpo with sft": {"type": "dpo", "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "dpo ipo": {"type": "dpo", "loss_type": "ipo"},
    "dpo sigmoid_norm": {"type": "dpo", "loss_type": "sigmoid_norm"},
    "kto": {"type": "kto"},
    "kto apo": {"type": "kto", "loss_type": "apo_zero_unpaired", "desirable_weight": 0.5},
    "orpo": {"type": "orpo", "beta": 0.2},
    "cpo": {"type": "cpo"},
    "simpo": {"type": "cpo", "loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0},
    "reward": {"type": "reward", "center_rewards_coefficient": 0.01},
}


def said(role, text):
    return [{"role": role, "content": text}]


def pair(n):
    return {"prompt": said("user", f"double {n}"), "chosen": f"{2 * n}" + "!" * (n % 3), "rejected": f"{n} no"}


def rows_of(numbers):
    """Pairs, and the same questions with one answer each, good or bad; answers as messages."""
    pairs = [pair(n) for n in numbers]
    rated = [
        {"prompt": row["prompt"], "completion": row["chosen" if n % 2 else "rejected"], "label": bool(n % 2)}
        for n, row in zip(numbers, pairs, strict=True)
    ]
    for row in (*pairs, *rated):
        row |= {name: said("assistant", row[name]) for name in ("chosen", "rejected", "completion") if name in row}
    return pairs, rated


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


TYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    save_tiny_model(folder / "model", hidden=64)
    for name, numbers in (("", range(NUM_ROWS)), ("held-", range(20, 24))):
        pairs, rated = rows_of(numbers)
        write(folder / f"{name}pairs.jsonl", pairs)
        write(folder / f"{name}rated.jsonl", rated)
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return workspace


NUMBERS = itertools.count()


def recipe(method, adapter="lora", **sections):
    """A recipe whose run lies by itself: a plan reads all earlier ones in `runs`."""
    rows = "rated" if method["type"] == "kto" else "pairs"
    return {
        "model": "model",
        "data": {"train": f"{rows}.jsonl", "eval": f"held-{rows}.jsonl", "max_length": 64, **sections.pop("data", {})},
        "method": method,
        "adapter": adapter,
        "train": {
            "max_steps": STEPS,
            "global_batch_size": NUM_ROWS,
            "learning_rate": 2e-3,
            "warmup_steps": 0,
            "save_steps": SAVED,
            "eval_steps": STEPS,
            **sections.pop("train", {}),
        },
        "output": {"dir": f"trained-{next(NUMBERS)}"},
        **sections,
    }


def logged(run, kind="log"):
    return [event for event in run.events() if event["event"] == kind]


def losses_of(run):
    """The loss of each step, the last one where a step was trained twice."""
    return {event["step"]: event["loss"] for event in logged(run)}


@pytest.fixture(scope="module")
def trained(workspace):
    """Every method with an adapter, ten steps."""
    runs = {}

    def of(name):
        if name not in runs:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(workspace)
                runs[name] = Run(tunekit.train(recipe(METHODS[name])).path.resolve())
        return runs[name]

    return of


class Exact:
    """Log-probabilities of answers in float64, on tokens laid out by hand, a sequence after the other."""

    def __init__(self, model):
        self.model = model.double().eval()
        self.tokenizer = make_tokenizer()

    def tokens(self, row, answer):
        """The tokens of a row with an answer, and how many of them are the prompt."""
        asked = f"<|im_start|>user\n{row['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        given = self.tokenizer.encode(asked)
        return given + self.tokenizer.encode(f"{row[answer][0]['content']}<|im_end|>\n"), len(given)

    def of_each(self, ids):
        """Log-probability of every token but the first."""
        ids = torch.tensor([ids])
        with torch.no_grad():
            scores = self.model(input_ids=ids).logits.log_softmax(-1)
        return scores[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]

    def answers(self, rows, answer, base=False):
        """Log-probabilities of the tokens of each row's answer, by the model without its adapter where it is asked."""
        found = []
        for row in rows:
            ids, prompt = self.tokens(row, answer)
            with self.model.disable_adapter() if base else torch.no_grad():
                found.append(self.of_each(ids)[prompt - 1 :])
        return found

    def sums(self, rows, answer, base=False):
        return torch.stack([one.sum() for one in self.answers(rows, answer, base)])

    def means(self, rows, answer):
        return torch.stack([one.mean() for one in self.answers(rows, answer)])


def causal(folder):
    return Exact(AutoModelForCausalLM.from_pretrained(folder / "model"))


def likelihood(exact, rows):
    """Mean negative log-likelihood of the tokens of the better answers."""
    return -torch.cat(exact.answers(rows, "chosen")).mean()


def orpo_by_hand(exact, rows, beta=0.2):
    """Equation 6 of arXiv 2403.07691: the likelihood of prompt and answer, and the odds of mean probabilities."""
    likelihoods = -torch.cat([exact.of_each(exact.tokens(row, "chosen")[0]) for row in rows]).mean()
    better, worse = exact.means(rows, "chosen").exp(), exact.means(rows, "rejected").exp()
    log_odds = (better / (1 - better)).log() - (worse / (1 - worse)).log()
    return likelihoods - beta * logsigmoid(log_odds).mean()


BY_HAND = {
    "dpo with sft": lambda exact, rows: math.log(2) + 0.5 * likelihood(exact, rows),
    "dpo ipo": lambda exact, rows: (1 / (2 * 0.1)) ** 2,
    "dpo sigmoid_norm": lambda exact, rows: math.log(2),
    "kto": lambda exact, rows: 0.5,
    # Half of the answers are good, and weigh half.
    "kto apo": lambda exact, rows: 0.5 * (0.5 + 1) / 2,
    "orpo": orpo_by_hand,
    "cpo": lambda exact, rows: (
        likelihood(exact, rows) - logsigmoid(0.1 * (exact.sums(rows, "chosen") - exact.sums(rows, "rejected"))).mean()
    ),
    "simpo": lambda exact, rows: (
        -logsigmoid(2.0 * (exact.means(rows, "chosen") - exact.means(rows, "rejected")) - 1.0).mean()
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BY_HAND)
def test_the_first_losses_are_those_of_the_paper_in_float64(workspace, trained, name):
    exact, run = causal(workspace), trained(name)
    first = {"log": "loss", "eval": "eval_loss"}
    for kind, numbers in (("log", range(NUM_ROWS)), ("eval", range(20, 24))):
        expected = float(BY_HAND[name](exact, rows_of(numbers)[0]))
        assert logged(run, kind)[0][first[kind]] == pytest.approx(expected, rel=2e-6), kind


@pytest.mark.slow
def test_nothing_has_moved_from_the_reference_of_kto_in_the_first_step(trained):
    first, second = logged(trained("kto"))[:2]
    assert (first["kl"], first["rewards/chosen"], first["rewards/rejected"]) == (0, 0, 0)
    assert second["rewards/margins"] > 0


@pytest.mark.slow
def test_the_last_loss_of_kto_is_that_of_the_paper_with_each_prompt_beside_the_answer_before_it(workspace, trained):
    """Equations 7 and 8 of arXiv 2402.01306, the divergence from mismatched answers, in float64 of the saved model."""
    run, rows = trained("kto"), rows_of(range(20, 24))[1]
    exact = Exact(PeftModel.from_pretrained(causal(workspace).model, run.model_path))
    ratios = exact.sums(rows, "completion") - exact.sums(rows, "completion", base=True)
    others = [{**row, "completion": rows[n - 1]["completion"]} for n, row in enumerate(rows)]
    gone = (exact.sums(others, "completion") - exact.sums(others, "completion", base=True)).mean().clamp(min=0)
    signs = torch.tensor([1.0 if row["label"] else -1.0 for row in rows])
    expected = (1 - torch.sigmoid(0.1 * signs * (ratios - gone))).mean()
    assert logged(run, "eval")[-1]["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


def scores(model, rows, answer):
    """Scores of texts, each by itself, so that nothing is padded."""
    tokenizer = Exact(model)
    with torch.no_grad():
        found = [model(input_ids=torch.tensor([tokenizer.tokens(row, answer)[0]])).logits for row in rows]
    return torch.cat(found)[:, 0]


def judging_loss(model, rows):
    better, worse = (scores(model, rows, answer) for answer in ("chosen", "rejected"))
    return float(-logsigmoid(better - worse).mean() + 0.01 * ((better + worse) ** 2).mean())


def judge(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_a_reward_model_begins_with_a_seeded_score_and_is_saved_with_the_trained_one(here, trained, adapter):
    run = trained("reward") if adapter == "lora" else tunekit.train(recipe(METHODS["reward"], adapter))
    rows = rows_of(range(20, 24))[0]
    first, last = (logged(run, "eval")[place]["eval_loss"] for place in (0, -1))
    if adapter != "qlora":
        # 4-bit weights are others than those that were read.
        set_seed(42)
        assert first == pytest.approx(judging_loss(judge(here / "model"), rows), rel=1e-5)
    assert last < 0.9 * first
    if adapter == "full":
        saved = judge(run.model_path)
    elif adapter == "lora":
        saved = PeftModel.from_pretrained(judge(here / "model"), run.model_path)
    else:
        weights = load_file(run.model_path / "adapter_model.safetensors")
        assert weights["base_model.model.score.weight"].dtype == torch.float32
        assert [name for name in weights if "score" in name] == ["base_model.model.score.weight"], "it has no adapter"
        return
    assert last == pytest.approx(judging_loss(saved, rows), rel=1e-5)
    assert run.plan.num_params == saved.num_parameters() - (0 if adapter == "full" else trained_beside(saved))


def trained_beside(model):
    """Parameters of an adapter, and of the score that is trained in the place of the one that is not."""
    return sum(p.numel() for name, p in model.named_parameters() if "lora_" in name or "modules_to_save" in name)


def test_a_reward_model_says_that_it_judges_and_answers_no_prompts(trained):
    run = trained("reward")
    assert run.samples() == [] and not logged(run, "sample")
    card = (run.model_path / "README.md").read_text()
    assert "This is a reward model" in card and "pipeline_tag: text-classification" in card
    assert {"accuracy", "margin"} == set(run.result()["measures"])


MANY = [name for name in METHODS if name not in ("kto apo", "simpo")]
"""Those that are not mere variants of another one's loss."""


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "full", "qlora"])
@pytest.mark.parametrize("name", [name for name in MANY if name != "reward"])
def test_ten_steps_lower_the_loss_with_every_adapter(here, trained, name, adapter):
    run = trained(name) if adapter == "lora" else tunekit.train(recipe(METHODS[name], adapter, data={"eval": None}))
    losses = losses_of(run)
    assert len(losses) == STEPS
    assert losses[STEPS] < losses[1]
    assert all(event["grad_norm"] > 0 and event["num_tokens"] > 0 for event in logged(run))
    assert not logged(run, "warning"), "as many parameters are trained as were planned"
    assert run.result()["measures"]
    assert {file.name for file in run.model_path.glob("*.safetensors")} == {
        "model.safetensors" if adapter == "full" else "adapter_model.safetensors"
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_an_interrupted_run_goes_on_with_the_losses_of_one_that_was_not(here, trained, monkeypatch, name):
    folder = here / f"cut {name}"
    begin = Watch.on_step_begin

    def stop(self, args, state, *others, **kwargs):
        if state.global_step == CUT:
            raise KeyboardInterrupt
        begin(self, args, state, *others, **kwargs)

    monkeypatch.setattr(Watch, "on_step_begin", stop)
    with pytest.raises(KeyboardInterrupt):
        tunekit.train(recipe(METHODS[name], output={"dir": str(folder)}))
    monkeypatch.setattr(Watch, "on_step_begin", begin)
    run = tunekit.resume(folder)
    assert [event["step"] for event in logged(run, "resume")] == [SAVED]
    assert losses_of(run) == pytest.approx(losses_of(trained(name)), rel=1e-6)
    assert run.state == "finished"


@pytest.mark.slow
def test_the_losses_of_kto_do_not_depend_on_the_micro_batch_and_are_those_of_trl_for_a_whole_step(here):
    """By steps and by evaluations, with a reference that is computed beforehand too."""
    from datasets import load_dataset
    from trl import KTOConfig, KTOTrainer

    def of(size, **method):
        train = {"micro_batch_size": size, "lr_scheduler_type": "constant", "weight_decay": 0.0, "optim": "sgd"}
        data = {"shuffle": False}
        sections = {"data": data, "train": {**train, "learning_rate": 0.5, "max_grad_norm": 1e9}}
        run = tunekit.train(recipe({"type": "kto", "beta": 0.5, **method}, "full", **sections))
        assert run.plan.micro_batch_size == size
        return run

    rows = load_dataset("json", data_files={"train": "rated.jsonl", "held": "held-rated.jsonl"})
    trainer = KTOTrainer(
        str(here / "model"),
        args=KTOConfig(
            str(here / "by trl"),
            per_device_train_batch_size=NUM_ROWS,
            per_device_eval_batch_size=4,
            train_sampling_strategy="sequential",
            max_steps=STEPS,
            eval_strategy="steps",
            eval_steps=STEPS,
            learning_rate=0.5,
            max_length=64,
            beta=0.5,
            model_init_kwargs={"dtype": "float32"},
            **PLAIN,
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["held"],
        processing_class=make_tokenizer(),
    )
    trainer.train()
    history = trainer.state.log_history
    theirs = {name: [entry[name] for entry in history if name in entry] for name in ("loss", "kl", "eval_loss")}
    assert max(theirs["kl"]) > 0.1
    for run in (of(8), of(2), of(1), of(2, precompute_ref_log_probs=True)):
        for name in ("loss", "kl"):
            ours = [event[name] for event in logged(run)]
            assert ours == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
        assert logged(run, "eval")[-1]["eval_loss"] == pytest.approx(theirs["eval_loss"][-1], rel=1e-4)


@pytest.mark.slow
def test_kto_goes_on_with_another_micro_batch(here):
    """Of five rows, four a step: the second step of each epoch is filled."""
    write(here / "odd.jsonl", rows_of(range(5))[1])

    def of(num_steps, size):
        train = {
            "max_steps": num_steps,
            "micro_batch_size": size,
            "global_batch_size": 4,
            "lr_scheduler_type": "constant",
        }
        return recipe({"type": "kto"}, data={"train": "odd.jsonl", "eval": None}, train=train)

    whole, part = tunekit.train(of(6, 4)), tunekit.train(of(3, 4))
    resumed = tunekit.resume(part, ["train.max_steps=6", "train.micro_batch_size=1"])
    assert losses_of(resumed) == pytest.approx(losses_of(whole), rel=1e-4)
    assert [event["kl"] for event in logged(resumed)] == pytest.approx(
        [event["kl"] for event in logged(whole)], rel=1e-3, abs=1e-6
    )


@pytest.mark.slow
def test_kto_keeps_rows_that_share_a_step_together_in_every_epoch(here, monkeypatch):
    """Each prompt's other answer is that of the row before it in its own step, the last one's too."""
    from trl import KTOTrainer

    seen = []
    compute = KTOTrainer.compute_loss

    def look(self, model, inputs, *args, **kwargs):
        # Looks at the model before and beside training take no gradients.
        if model.training and torch.is_grad_enabled():
            ids = [inputs[name][:, -4:].tolist() for name in ("input_ids", "KL_input_ids")]
            seen.append(ids)
        return compute(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(KTOTrainer, "compute_loss", look)
    rows = [
        {"prompt": f"ask {n}", "completion": f" {n:04d}", "label": n % 2 == 0} for n in (1111, 2222, 3333, 4444, 5555)
    ]
    write(here / "five.jsonl", rows)
    train = {"max_steps": 4, "global_batch_size": 4, "micro_batch_size": 2}
    tunekit.train(recipe({"type": "kto"}, data={"train": "five.jsonl", "eval": None}, train=train))
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        own, other = (first[of] + second[of] for of in (0, 1))
        assert other == [own[-1], *own[:-1]]
    # Two steps are an epoch: five rows, and the first three of its order again.
    assert len(seen) == 8 and seen[:4] == seen[4:]
    order = [answer for own, _ in seen[:4] for answer in own]
    assert len(order) == 8 and order[5:] == order[:3]
    assert len({tuple(answer) for answer in order}) == 5


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (
            [{"prompt": "a", "completion": "b", "label": "good"}] * 3,
            r"bad.jsonl:1: label must be true .good completion.",
        ),
        ([{"prompt": "a", "completion": "b", "label": 2}], "bad.jsonl:1: label must be true"),
        ([{"prompt": "a", "completion": "b", "label": True}] * 9, "bad.jsonl:1: label is true, as in all 9"),
        ([{"prompt": "a", "completion": "b", "label": False}] * 9, "bad.jsonl:1: label is false, .* all are bad"),
        ([{"prompt": "a", "completion": "b"}], "trains on rated completions; add a column label"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "trains on rated completions; for pairs use method dpo"),
    ],
)
def test_rows_that_kto_cannot_learn_from_are_told_with_their_place(here, rows, problem):
    write(here / "bad.jsonl", rows)
    with pytest.raises(DataError) as error:
        tunekit.train(recipe({"type": "kto"}, data={"train": "bad.jsonl"}))
    assert re.search(problem, f"{error.value.problem}; {error.value.hint}", re.DOTALL)


@pytest.mark.parametrize("method", ["orpo", "cpo", "reward"])
def test_rows_without_a_worse_answer_are_told_with_what_the_method_wants(here, method):
    with pytest.raises(DataError, match=f"method {method} trains on preference pairs") as error:
        tunekit.train(recipe({"type": method}, data={"train": "rated.jsonl"}))
    assert "use method kto" in str(error.value.hint)


@pytest.mark.slow
def test_half_an_answer_is_not_judged(here):
    long = {"prompt": "more", "chosen": "x" * 100, "rejected": "y"}
    texts = [{"prompt": "double ", "chosen": str(n), "rejected": f"{n} no"} for n in range(8)]
    write(here / "long.jsonl", [*texts, long])
    data = {"train": "long.jsonl", "eval": None}
    plans = {}
    for method in ("reward", "orpo"):
        run = tunekit.train(recipe({"type": method}, data=data, train={"max_steps": 1}))
        plans[method] = run.plan.data
    assert (plans["reward"].num_train, plans["reward"].num_dropped) == (8, 1)
    assert (plans["orpo"].num_train, plans["orpo"].num_truncated) == (9, 1)
    write(here / "long.jsonl", [long])
    with pytest.raises(
        DataError, match="none of 1 row is short enough: limit 64 tokens for a prompt with its completion"
    ):
        tunekit.train(recipe({"type": "reward"}, data=data))


def test_a_plan_says_what_these_methods_do(here):
    rated = [{"prompt": f"q{n}", "completion": "a", "label": n < 3} for n in range(12)]
    write(here / "few-good.jsonl", rated)
    run = verbs.make_run(recipe({"type": "kto"}, data={"train": "few-good.jsonl", "eval": None}))
    said = {reason.topic: reason for reason in run.plan.reasons}
    assert said["balance"].choice == "3 desirable, 9 undesirable answers"
    assert "method.desirable_weight from 3 to 4" in said["balance"].why
    assert "every epoch has the same order" in said["method"].why
    orpo = {reason.topic: reason for reason in verbs.plan(recipe({"type": "orpo"})).reasons}
    assert orpo["method"].why.startswith("experimental in TRL")
    assert "TRL_EXPERIMENTAL_SILENCE=1" in orpo["environment"].why
    assert orpo["head"].choice.startswith("full logits")


def test_kto_needs_another_row_in_its_step(here):
    with pytest.raises(RecipeError, match=r"train\.global_batch_size: must be at least 2 with method kto"):
        tunekit.train(recipe({"type": "kto"}, train={"global_batch_size": 1}))
    for name in ("kto", "kto apo"):
        plan = verbs.plan(recipe(METHODS[name]), on="8xh100")
        assert (plan.layout.num_processes, plan.micro_batch_size) == (8, 1)


@pytest.mark.slow
def test_gradients_of_bfloat16_weights_are_not_lost_behind_passes_without_them(here):
    """KTO goes through the model without gradients first; what autocast remembers of that must not be used again."""
    runs = [tunekit.train(recipe({"type": "kto"}, "full", model={"path": "model", "dtype": dtype})) for dtype in TYPES]
    norms = [[event["grad_norm"] for event in logged(run)] for run in runs]
    for exact, rounded in zip(*norms, strict=True):
        assert rounded == pytest.approx(exact, rel=0.2)
