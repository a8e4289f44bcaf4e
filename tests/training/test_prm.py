"""Process reward models: the loss by plain transformers, what is saved, and that completions are scored by steps."""

import pytest
import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy
from transformers import AutoModelForTokenClassification, AutoTokenizer, set_seed

import tunekit
from tests.tiny import make_tokenizer, save_jsonl, save_tiny_model
from tests.training.watching import cut_off_and_resumed, last_words, logged, micro_batches_of
from tunekit.errors import DataError, ModelError, PlanError, RecipeError, RunError
from tunekit.methods.prm import PRMTrainer
from tunekit.methods.rewards.load import load_rewards, reward_arguments
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.rewards import ModelReward

RECIPE = """
model: model
data: {train: rows.jsonl, eval: held.jsonl, max_length: 96}
method: prm
adapter: full
train: {max_steps: 10, global_batch_size: 8, learning_rate: 1e-2, warmup_steps: 0, save_steps: 4, eval_steps: 10}
"""


def row_of(n):
    """Numbers doubled step by step, of which some are guessed, and so are those behind them."""
    wrong_from = n % 5
    steps = [f"{n * 2**i} {'is doubled' if i < wrong_from else '?'}" for i in range(1 + n % 4)]
    return {
        "prompt": [{"role": "user", "content": f"double {n}"}],
        "completions": steps,
        "labels": [i < wrong_from for i in range(len(steps))],
    }


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prm")
    save_tiny_model(folder / "model", hidden=64)
    save_jsonl(folder / "rows.jsonl", map(row_of, range(1, 23)))
    save_jsonl(folder / "held.jsonl", map(row_of, range(30, 37)))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


TOKENIZER = make_tokenizer()


def tokens_of(row, separator="\n"):
    """Tokens of a row and its labels: bytes are tokens, so that texts are tokenized alike however they are divided."""
    prompt = TOKENIZER.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    ids = TOKENIZER(prompt, add_special_tokens=False)["input_ids"]
    labels = [-100] * len(ids)
    for step, label in zip(row["completions"], row["labels"], strict=True):
        more = TOKENIZER(step + separator, add_special_tokens=False)["input_ids"]
        ids += more
        labels += [-100] * (len(more) - 1) + [int(label)]
    return ids, labels


def classifier(folder, **how):
    return AutoModelForTokenClassification.from_pretrained(folder, num_labels=2, **how).eval()


def losses_of(model, rows, separator="\n"):
    """Losses of the steps of each row, and whether each is classified right."""
    losses, right = [], []
    for row in rows:
        ids, labels = (torch.tensor(values) for values in tokens_of(row, separator))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        is_step = labels != -100
        losses.append(cross_entropy(logits[is_step], labels[is_step], reduction="none"))
        right.append(logits[is_step].argmax(-1) == labels[is_step])
    return torch.cat(losses), torch.cat(right)


HELD = [row_of(n) for n in range(30, 37)]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_the_score_is_seeded_learned_and_saved_for_plain_transformers(recipe, workspace, adapter):
    run = tunekit.train(recipe, [f"adapter={adapter}", "train.max_steps=30"])
    first, last = (logged(run, "eval")[place] for place in (0, -1))
    assert last["eval_loss"] < 0.9 * first["eval_loss"]
    assert not logged(run, "warning"), "as many parameters are trained as were planned"
    card = (run.model_path / "README.md").read_text()
    assert "This is a process reward model" in card and "pipeline_tag: token-classification" in card
    assert AutoTokenizer.from_pretrained(run.model_path).init_kwargs["step_separator"] == "\n"
    if adapter == "qlora":
        return  # 4-bit weights are others than those that were read.
    set_seed(42)
    untrained, _ = losses_of(classifier(workspace / "model"), HELD)
    assert first["eval_loss"] == pytest.approx(float(untrained.mean()), rel=1e-5)
    if adapter == "full":
        saved = AutoModelForTokenClassification.from_pretrained(run.model_path).eval()
    else:
        saved = PeftModel.from_pretrained(classifier(workspace / "model"), run.model_path).eval()
    losses, right = losses_of(saved, HELD)
    assert last["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert last["eval_accuracy"] == pytest.approx(float(right.float().mean()), rel=1e-5)
    evaluated = {score.name: score.after.value for score in tunekit.evaluate(run, device="cpu").scores}
    assert evaluated["loss"] == pytest.approx(float(losses.mean()), rel=1e-4)
    assert evaluated["accuracy"] == pytest.approx(float(right.float().mean()), rel=1e-5)
    with pytest.raises(RunError, match="is a reward model and generates no text"):
        tunekit.generate(run, ["Hello"])


@pytest.fixture
def batches_of(recipe, monkeypatch):
    """Trains two steps, and returns their micro-batches."""
    batches = micro_batches_of(PRMTrainer, monkeypatch)

    def train(*changes):
        tunekit.train(recipe, ["train.max_steps=2", "data.eval=null", *changes])
        return batches

    return train


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), ("train.micro_batch_size=2",), ("method.train_on_last_step_only=true",)])
def test_loss_and_gradients_are_those_of_plain_transformers_in_float64(recipe, batches_of, changes):
    rows = {tuple(ids): labels for ids, labels in map(tokens_of, map(row_of, range(1, 23)))}
    if "method.train_on_last_step_only=true" in changes:
        rows = {ids: [-100] * (len(ids) - 1) + labels[-1:] for ids, labels in rows.items()}
    batches = batches_of(*changes)
    assert len(batches) == (8 if "train.micro_batch_size=2" in changes else 2)
    model = classifier("model", dtype=torch.float64)
    num_steps = {step: 0 for step, *_ in batches}
    for step, _, ids, *_ in batches:
        num_steps[step] += sum(label != -100 for row in ids for label in rows[tuple(row)])
    for step, weights, ids, loss, grads in batches:
        model.load_state_dict(weights)
        model.zero_grad()
        expected = torch.tensor(0.0, dtype=torch.float64)
        for row in ids:
            logits = model(input_ids=torch.tensor([row])).logits[0]
            expected = expected + cross_entropy(logits, torch.tensor(rows[tuple(row)]), reduction="sum")
        expected = expected / num_steps[step]
        expected.backward()
        assert loss == pytest.approx(expected.item(), abs=2e-6)
        for name, parameter in model.named_parameters():
            assert torch.allclose(grads[name], parameter.grad, atol=2e-6, rtol=1e-4), name


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_to_the_bit(recipe):
    whole = last_words(tunekit.train(recipe))
    resumed = last_words(cut_off_and_resumed(recipe, after=9))
    for name in ("loss", "grad_norm", "accuracy", "num_tokens"):
        assert [resumed[step][name] for step in range(1, 11)] == [whole[step][name] for step in range(1, 11)], name


@pytest.mark.slow
def test_an_adapter_is_trained_further_from_where_it_ended_and_by_prm_alone(recipe):
    before = tunekit.train(recipe, ["adapter=lora", "output.name=first"])
    after = tunekit.train(recipe, ["adapter=lora", f"model={before.name}"])
    assert logged(after, "eval")[0]["eval_loss"] == pytest.approx(logged(before, "eval")[-1]["eval_loss"], rel=1e-5)
    for method in ("sft", "reward"):
        with pytest.raises(RecipeError, match="is a process reward model: it scores steps and generates none"):
            tunekit.plan(recipe, [f"model={before.name}", f"method={method}"])


# As a reward


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A token classifier of random weights, as another tool saves it, without a separator."""
    from transformers import LlamaConfig, LlamaForTokenClassification

    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_labels=2, pad_token_id=TOKENIZER.pad_token_id, initializer_range=0.5,
    )  # fmt: skip
    LlamaForTokenClassification(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def judged(rows, texts, **reward):
    section = ModelReward(model=ModelSection(path=str(reward.pop("model")), dtype="float32"), **reward)
    (function,) = load_rewards([section], device="cpu")
    return function(**reward_arguments(rows, texts, [[]] * len(texts)))


def probabilities(model, prompt, steps, separator):
    row = {"prompt": prompt, "completions": steps, "labels": [True] * len(steps)}
    ids, labels = (torch.tensor(values) for values in tokens_of(row, separator))
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0].softmax(-1)[labels == 1, 1]


STEPS = [["one"], ["one", "two " * 9, "three"], ["a", "b"], []]
AGGREGATED = {"min": torch.min, "prod": torch.prod, "mean": torch.mean, "last": lambda values: values[-1]}


@pytest.mark.parametrize("aggregation", AGGREGATED)
def test_an_answer_is_scored_by_the_probabilities_that_its_steps_are_good(judge, aggregation):
    model, separator = classifier(judge), " ; "
    prompts = [[{"role": "user", "content": f"question {n}" * (n + 1)}] for n in range(len(STEPS))]
    texts = [separator.join(steps) for steps in STEPS]
    texts[2] = "a ;  ; b ; "
    scores = judged(
        [{"prompt": prompt} for prompt in prompts],
        texts,
        model=judge,
        aggregation=aggregation,
        step_separator=separator,
    )
    wanted = [
        float(AGGREGATED[aggregation](probabilities(model, prompt, steps, separator))) if steps else 0.0
        for prompt, steps in zip(prompts, STEPS, strict=True)
    ]
    assert scores == pytest.approx(wanted, abs=1e-6)
    assert max(wanted[:3]) - min(wanted[:3]) > 0.05


def test_steps_of_the_last_turn_are_scored_behind_the_earlier_ones(judge):
    asked = [{"role": "user", "content": "q"}]
    turns = [
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "x\ny"},
    ]
    section = ModelReward(model=ModelSection(path=str(judge), dtype="float32"), step_separator="\n")
    (function,) = load_rewards([section], device="cpu")
    (score,) = function(prompts=[asked], completions=[turns], completion_ids=[[]])
    wanted = probabilities(classifier(judge), asked + turns[:-1], ["x", "y"], "\n").min()
    assert score == pytest.approx(float(wanted), abs=1e-6)


def test_what_does_not_go_with_a_model_of_steps_is_refused(judge, tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    with pytest.raises(ModelError, match="does not say what divides them; set step_separator"):
        judged([{"prompt": "a"}], ["b"], model=judge)
    config = LlamaConfig(vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    for field in ({"aggregation": "mean"}, {"step_separator": "\n"}):
        with pytest.raises(ModelError, match=r"has no effect: .* scores whole answers, not their steps; unset it"):
            judged([{"prompt": "a"}], ["b"], model=tmp_path, **field)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("method", ["grpo", "online_dpo"])
def test_a_trained_one_rewards_completions(recipe, workspace, adapter, method):
    judge = tunekit.train(recipe, [f"adapter={adapter}", "method.step_separator=' ; '"])
    reward = {"type": "reward_model", "model": judge.name, "aggregation": "mean"}
    run = tunekit.train(
        {
            "model": "model",
            "data": {"train": "rows.jsonl", "format": "prompts", "max_length": 64},
            "method": {"type": method, "num_generations": 4, "max_completion_length": 12, "rewards": [reward]},
            "adapter": "lora",
            "train": {"max_steps": 3, "global_batch_size": 8},
        }
    )
    assert len(logged(run)) == 3
    assert all(0 < event["rewards/reward_model/mean"] < 1 for event in logged(run))
    model = AutoModelForTokenClassification.from_pretrained(judge.model_path) if adapter == "full" else None
    model = model or PeftModel.from_pretrained(classifier("model"), judge.model_path)
    row = row_of(7)
    (score,) = judged([{"prompt": row["prompt"]}], [" ; ".join(row["completions"])], model=judge.model_path)
    wanted = probabilities(model.eval(), row["prompt"], row["completions"], " ; ").min()
    assert score == pytest.approx(float(wanted), abs=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"labels": [True]}, "rows.jsonl:2: 4 steps in completions, but 1 label"),
        ({"labels": [1, 0, 1, 2]}, r"rows.jsonl:2: labels\[3\] must be true .* or false .*, got the number 2"),
        ({"labels": [1, 0, "true", 0]}, r"rows.jsonl:2: labels\[2\] must be true .*, got a string"),
        ({"labels": None}, "rows.jsonl:2: labels must be a list with true or false for each step, got null"),
        ({"completions": "a"}, "rows.jsonl:2: completions must be a list of steps, got a string"),
        ({"completions": [], "labels": []}, "rows.jsonl:2: completions is empty"),
        ({"completions": ["a", " ", "c", "d"]}, r"rows.jsonl:2: completions\[1\] is empty"),
        ({"completions": ["a", 3, "c", "d"]}, r"rows.jsonl:2: completions\[1\] must be a string, got the number 3"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(tmp_path, workspace, monkeypatch, change, problem):
    monkeypatch.chdir(tmp_path)
    save_jsonl(tmp_path / "rows.jsonl", [row_of(1), {**row_of(3), **change}])
    with pytest.raises(DataError, match=problem):
        tunekit.plan({"model": str(workspace / "model"), "data": {"train": "rows.jsonl"}, "method": "prm"})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["data.packing=true"], "data.packing: unsupported with method prm"),
        (["data.padding_free=true"], "data.padding_free: unsupported with method prm"),
        (["data.curriculum=length", "data.shuffle=false"], "data.curriculum: unsupported with method prm"),
        (["data.loss_on=all"], "data.loss_on: cannot be all with method prm"),
        (["output.sample_prompts=[Hi]"], "output.sample_prompts: has no effect with method prm"),
        (["adapter=prompt_tuning"], "adapter.type: prompt_tuning is unsupported with method prm"),
        (["method.step_separator=''"], "method.step_separator: must "),
        (["method.trainer_args.label_smoothing_factor=0.1"], "not used by the loss of steps"),
        (["method.trainer_args.pad_to_multiple_of=8"], "rows are padded to the longest"),
    ],
)
def test_what_a_recipe_asks_for_in_vain_is_refused(recipe, changes, problem):
    with pytest.raises((RecipeError, PlanError), match=problem):
        tunekit.plan(recipe, changes)


def test_a_family_without_a_score_of_tokens_is_refused_before_rows_are_prepared(recipe, tmp_path):
    from transformers import Olmo2Config, Olmo2ForCausalLM

    config = Olmo2Config(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    Olmo2ForCausalLM(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="transformers has no model for token classification of type olmo2"):
        tunekit.train(recipe, [f"model={tmp_path}"])


def test_the_report_marks_the_tokens_at_which_steps_are_scored(recipe):
    train, held = tunekit.data_report(recipe, ["method.train_on_last_step_only=true"]).sources
    assert (train.num_trained, held.num_trained) == (22, sum(len(row["labels"]) for row in HELD))
    for sample, row in zip(held.samples, HELD, strict=False):
        assert [piece.text for piece in sample.pieces if piece.trained] == ["\n"] * len(row["labels"])
        assert sum((piece.ids for piece in sample.pieces), ()) == tuple(tokens_of(row)[0])


def test_steps_with_the_separator_within_are_told(recipe, tmp_path):
    save_jsonl(tmp_path / "rows.jsonl", [row_of(1), {**row_of(2), "completions": ["a\nb", "c", "d"]}])
    report = tunekit.data_report(recipe, [f"data.train={tmp_path / 'rows.jsonl'}", "data.eval=null"])
    assert any("1 row with the separator '\\n' within a step" in note for note in report.notes)


def test_steps_of_rows_that_are_read_as_prompts_do_not_reach_rewards(recipe):
    method = "method={type: grpo, rewards: [{type: numeric_match, column: labels}], max_completion_length: 8}"
    report = tunekit.data_report(recipe, [method, "data.format=prompts"])
    assert any("passed to rewards: labels; ignored: completions" in note for note in report.notes)
