"""Classifiers: the loss by plain transformers, what is saved, and the labels that rows may have."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import AutoModelForSequenceClassification, pipeline, set_seed

import tunekit
from tests.tiny import make_tokenizer, save_jsonl, save_tiny_model
from tests.training.watching import cut_off_and_resumed, last_words, logged, micro_batches_of
from tunekit.errors import DataError, ModelError, PlanError, RecipeError, RunError
from tunekit.methods.classification import ClassificationTrainer

LABELS = ["two", "three", "five"]
RECIPE = """
model: model
data: {train: rows.jsonl, eval: held.jsonl, max_length: 96}
method: {type: classification, labels: [two, three, five]}
adapter: full
train: {max_steps: 10, global_batch_size: 8, learning_rate: 1e-2, warmup_steps: 0, save_steps: 4, eval_steps: 10}
"""
SEVERAL = ["data.train=several.jsonl", "method.problem_type=multi_label_classification"]


def question(n):
    return [{"role": "user", "content": f"divides {n}: {n % 2}{n % 3}{n % 5}" + "?" * (n * 7 % 13)}]


def factor_of(n):
    return next((label for label, factor in zip(LABELS, (2, 3, 5), strict=True) if n % factor == 0), "five")


def factors_of(n):
    return [label for label, factor in zip(LABELS, (2, 3, 5), strict=True) if n % factor == 0]


HELD = range(30, 37)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classification")
    save_tiny_model(folder / "model", hidden=64)
    for name, numbers, label in (
        ("rows", range(1, 23), factor_of),
        ("held", HELD, factor_of),
        ("several", range(1, 23), factors_of),
        ("several_held", HELD, factors_of),
    ):
        save_jsonl(folder / f"{name}.jsonl", [{"messages": question(n), "label": label(n)} for n in numbers])
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


TOKENIZER = make_tokenizer()


def ids_of(n):
    text = TOKENIZER.apply_chat_template(question(n), add_generation_prompt=True, tokenize=False)
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def classifier(folder, **how):
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, **how).eval()
    model.config.pad_token_id = TOKENIZER.pad_token_id
    return model


def target(n, *, several):
    if several:
        return torch.tensor([[float(label in factors_of(n)) for label in LABELS]])
    return torch.tensor([LABELS.index(factor_of(n))])


def summed_loss(logits, n, *, several):
    if several:
        return binary_cross_entropy_with_logits(logits, target(n, several=True).to(logits.dtype), reduction="sum")
    return cross_entropy(logits, target(n, several=False), reduction="sum")


def losses_of(model, *, several):
    """Losses of the held-out rows, one by one, their predicted labels, and whether these are right."""
    losses, predicted = [], []
    for n in HELD:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids_of(n)])).logits
        losses.append(summed_loss(logits, n, several=several) / (3 if several else 1))
        predicted.append((logits > 0).int()[0] if several else logits.argmax(-1))
    expected = torch.cat([target(n, several=several) for n in HELD])
    predicted = torch.stack(predicted) if several else torch.cat(predicted)
    right = (predicted == expected).all(-1) if several else predicted == expected
    return torch.stack(losses), predicted, expected, right


def mean_f1(predicted, expected):
    """The mean F1 of labels that occur or are predicted, by its definition, label by label."""
    if predicted.dim() == 1:
        predicted, expected = (torch.nn.functional.one_hot(each, 3) for each in (predicted, expected))
    scores = []
    for mine, theirs in zip(predicted.T.bool(), expected.T.bool(), strict=True):
        if (mine | theirs).any():
            scores.append(2 * float((mine & theirs).sum()) / float(mine.sum() + theirs.sum()))
    return sum(scores) / len(scores)


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_the_head_is_seeded_learned_and_saved_for_plain_transformers(recipe, workspace, adapter, several):
    changes = [*SEVERAL, "data.eval=several_held.jsonl"] if several else []
    run = tunekit.train(recipe, [f"adapter={adapter}", "train.max_steps=30", *changes])
    first, last = (logged(run, "eval")[place] for place in (0, -1))
    assert last["eval_loss"] < first["eval_loss"]
    assert not logged(run, "warning"), "as many parameters are trained as were planned"
    card = (run.model_path / "README.md").read_text()
    assert "| Labels | 0 two, 1 three, 2 five |" in card
    assert "This is a classifier" in card and "pipeline_tag: text-classification" in card
    if adapter == "qlora":
        return  # 4-bit weights are others than those that were read.
    set_seed(42)
    untrained, *_ = losses_of(classifier(workspace / "model"), several=several)
    assert first["eval_loss"] == pytest.approx(float(untrained.mean()), rel=1e-5)
    if adapter == "full":
        saved = AutoModelForSequenceClassification.from_pretrained(run.model_path).eval()
        assert saved.config.id2label == dict(enumerate(LABELS))
        assert saved.config.problem_type == run.recipe.method.problem_type
        assert saved.config.pad_token_id == TOKENIZER.pad_token_id
    else:
        saved = PeftModel.from_pretrained(classifier(workspace / "model"), run.model_path).eval()
    losses, predicted, expected, right = losses_of(saved, several=several)
    assert last["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert last["eval_accuracy"] == pytest.approx(float(right.float().mean()), rel=1e-5)
    assert last["eval_f1"] == pytest.approx(mean_f1(predicted, expected), rel=1e-5)
    of_file = {"data": f"{'several_' * several}held.jsonl"}
    for how in ({}, of_file):
        evaluated = {score.name: score.after.value for score in tunekit.evaluate(run, device="cpu", **how).scores}
        assert evaluated["loss"] == pytest.approx(float(losses.mean()), rel=1e-4)
        assert evaluated["accuracy"] == pytest.approx(float(right.float().mean()), rel=1e-5)
    with pytest.raises(RunError, match="is a classifier and generates no text"):
        tunekit.generate(run, ["Hello"])


@pytest.mark.slow
def test_an_export_answers_in_a_pipeline_by_the_names_of_labels(recipe, tmp_path):
    run = tunekit.train(recipe, ["adapter=lora"])
    folder = tunekit.export(run, tmp_path / "merged").folder
    classify = pipeline("text-classification", model=str(folder), top_k=None)
    text = TOKENIZER.apply_chat_template(question(7), add_generation_prompt=True, tokenize=False)
    scores = {answer["label"]: answer["score"] for answer in classify([text])[0]}
    saved = PeftModel.from_pretrained(classifier("model"), run.model_path).eval()
    with torch.no_grad():
        expected = saved(input_ids=torch.tensor([ids_of(7)])).logits[0].softmax(-1).tolist()
    assert scores == pytest.approx(dict(zip(LABELS, expected, strict=True)), abs=1e-5)


@pytest.fixture
def batches_of(recipe, monkeypatch):
    """Trains two steps, and returns their micro-batches."""
    batches = micro_batches_of(ClassificationTrainer, monkeypatch)

    def train(*changes):
        tunekit.train(recipe, ["train.max_steps=2", "data.eval=null", *changes])
        return batches

    return train


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("size", [8, 3])
def test_loss_and_gradients_are_those_of_plain_transformers_in_float64(recipe, batches_of, several, size):
    numbers = {tuple(ids_of(n)): n for n in range(1, 23)}
    changes = [f"train.micro_batch_size={size}", f"train.global_batch_size={9 if size == 3 else 8}"]
    batches = batches_of(*changes, *(SEVERAL if several else ()))
    assert len(batches) == (6 if size == 3 else 2)
    model = classifier("model", dtype=torch.float64)
    num_losses = {step: 0 for step, *_ in batches}
    for step, _, ids, *_ in batches:
        num_losses[step] += len(ids) * (3 if several else 1)
    for step, weights, ids, loss, grads in batches:
        model.load_state_dict(weights)
        model.zero_grad()
        expected = torch.tensor(0.0, dtype=torch.float64)
        for row in ids:
            logits = model(input_ids=torch.tensor([row])).logits
            expected = expected + summed_loss(logits, numbers[tuple(row)], several=several)
        expected = expected / num_losses[step]
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
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_classifier_is_trained_further_on_its_own_labels_alone(recipe, adapter):
    before = tunekit.train(recipe, [f"adapter={adapter}", "output.name=first"])
    after = tunekit.train(recipe, [f"adapter={adapter}", f"model={before.name}"])
    assert logged(after, "eval")[0]["eval_loss"] == pytest.approx(logged(before, "eval")[-1]["eval_loss"], rel=1e-5)
    for method in ("sft", "reward"):
        with pytest.raises(RecipeError, match="is a classifier: it scores texts and generates none"):
            tunekit.plan(recipe, [f"model={before.name}", f"method={method}"])
    with pytest.raises(RecipeError, match=r"method.labels: .* was trained on other labels"):
        tunekit.plan(recipe, [f"model={before.name}", "method.labels=[three, two, five]"])


@pytest.mark.slow
def test_a_classifier_that_another_tool_saved_keeps_its_head_and_its_labels(recipe, workspace, tmp_path):
    set_seed(1)
    other = classifier(workspace / "model")
    other.config.id2label = dict(enumerate(LABELS))
    other.save_pretrained(tmp_path / "other")
    TOKENIZER.save_pretrained(tmp_path / "other")
    run = tunekit.train(recipe, [f"model={tmp_path / 'other'}", "train.max_steps=1"])
    losses, *_ = losses_of(other, several=False)
    assert logged(run, "eval")[0]["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    with pytest.raises(ModelError, match="is a classifier of 3 labels: two, three, five; set the same labels"):
        tunekit.train(recipe, [f"model={tmp_path / 'other'}", "method.labels=[three, two, five]"])
    save_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    for method, rows in (("{type: classification, num_labels: 4}", "rows.jsonl"), ("reward", tmp_path / "pairs.jsonl")):
        changes = [f"method={method}", f"data.train={rows}", "data.eval=null"]
        with pytest.raises(PlanError, match=r"the head of .* has 3 labels, but that of the method"):
            tunekit.plan(recipe, [f"model={tmp_path / 'other'}", *changes])
    with pytest.raises(PlanError, match="scores texts and generates none"):
        tunekit.plan(recipe, [f"model={tmp_path / 'other'}", "method=orpo", *changes[1:]])


# Rows


def report_on(recipe, tmp_path, rows, *changes):
    save_jsonl(tmp_path / "own.jsonl", rows)
    return tunekit.data_report(recipe, [f"data.train={tmp_path / 'own.jsonl'}", "data.eval=null", *changes])


def test_texts_stay_as_they_are_and_are_cut_or_left_out_by_the_recipe(recipe, tmp_path):
    rows = [{"text": "a" * 20, "label": "two"}, {"text": "b" * 200, "label": "five"}]
    report = report_on(recipe, tmp_path, rows)
    (source,) = report.sources
    assert (source.num_sequences, source.num_truncated, source.num_trained) == (2, 1, 2)
    first = source.samples[0]
    assert "".join(piece.text for piece in first.pieces).endswith("a" * 20)
    assert [piece.text for piece in first.pieces if piece.trained] == ["a"]
    assert any("labels: two 1, five 1" in note for note in report.notes)
    assert any("no training row has the label three" in note for note in report.notes)
    (source,) = report_on(recipe, tmp_path, rows, "data.too_long=drop").sources
    assert (source.num_sequences, source.num_truncated) == (1, 0)


def test_a_conversation_that_the_assistant_ends_is_scored_as_it_is(recipe, tmp_path):
    turns = [*question(4), {"role": "assistant", "content": "two"}]
    report = report_on(recipe, tmp_path, [{"messages": turns, "label": 0}, {"messages": question(4), "label": 1}])
    texts = ["".join(piece.text for piece in sample.pieces) for sample in report.sources[0].samples]
    assert texts[0] == TOKENIZER.apply_chat_template(turns, tokenize=False)
    assert texts[1] == TOKENIZER.apply_chat_template(question(4), add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize(
    ("labels", "given", "expected"),
    [
        ("[negative, positive]", ["positive", "negative"], "positive 1, negative 1"),
        ("[negative, positive]", [1, 0], "positive 1, negative 1"),
        ("[negative, positive]", [True, "0"], None),
        ("['1', '2', '3']", [1, "3"], "1 1, 3 1"),
        ("[1, 2, 3]", [1, 3], "1 1, 3 1"),
        ("['true', 'false']", [True, "false"], "true 1, false 1"),
    ],
)
def test_a_label_is_a_name_or_a_position(recipe, tmp_path, labels, given, expected):
    rows = [{"text": "a", "label": label} for label in given]
    if expected is None:
        with pytest.raises(DataError, match=r"own.jsonl:2: label must be negative or positive, got 0"):
            report_on(recipe, tmp_path, rows, f"method.labels={labels}")
        return
    report = report_on(recipe, tmp_path, rows, f"method.labels={labels}")
    assert any(f"labels: {expected}" in note for note in report.notes), report.notes


@pytest.mark.parametrize(
    ("label", "changes", "problem"),
    [
        ("tow", [], "own.jsonl:2: label must be two, three or five, got tow; did you mean 'two'"),
        (3, [], "own.jsonl:2: label must be two, three or five, got 3"),
        (-1, [], "own.jsonl:2: label must be two, three or five, got -1"),
        (None, [], "own.jsonl:2: label must be the name of a label or its position, got null"),
        (0.5, [], "own.jsonl:2: label must be the name of a label or its position, got the number 0.5"),
        (["two"], [], "own.jsonl:2: label is a list of 1 label; set method.problem_type=multi_label_classification"),
        (2, ["method={type: classification, num_labels: 2}"], "own.jsonl:2: label must be 0 to 1, got 2"),
    ],
)
def test_a_wrong_label_is_named(recipe, tmp_path, label, changes, problem):
    first = {"text": "a", "label": 0}
    with pytest.raises(DataError, match=problem):
        report_on(recipe, tmp_path, [first, {"text": "b", "label": label}], *changes)


def test_where_rows_have_several_labels_each_has_a_list(recipe, tmp_path):
    changes = ["method.problem_type=multi_label_classification"]
    rows = [{"text": "a", "label": ["two", 2]}, {"text": "b", "label": []}]
    report = report_on(recipe, tmp_path, rows, *changes)
    assert any("labels: two 1, five 1" in note for note in report.notes)
    with pytest.raises(DataError, match=r"own.jsonl:2: label names two twice; list the labels that a row has"):
        report_on(recipe, tmp_path, [rows[0], {"text": "b", "label": [1, 0, 0]}], *changes)
    with pytest.raises(DataError, match=r"own.jsonl:1: label must be a list of labels .*, got a string"):
        report_on(recipe, tmp_path, [{"text": "a", "label": "two"}], *changes)


def test_labels_beside_the_rows_of_other_methods_are_read_as_before(recipe, tmp_path):
    save_jsonl(tmp_path / "own.jsonl", [{"text": "abc", "label": "two"}])
    report = tunekit.data_report(recipe, [f"data.train={tmp_path / 'own.jsonl'}", "data.eval=null", "method=sft"])
    assert report.sources[0].num_trained > 1
    save_jsonl(tmp_path / "own.jsonl", [{"sentence": "abc", "label": "two"}])
    with pytest.raises(DataError, match=r"set data.columns=\{prompt: sentence\}"):
        tunekit.data_report(recipe, [f"data.train={tmp_path / 'own.jsonl'}", "data.eval=null"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["method.labels=null"], "method.labels: missing; list them"),
        (["method.num_labels=3"], "method.num_labels: method.labels already gives the number of labels"),
        (["method.labels=[a, a]"], "method.labels: 'a' is listed twice"),
        (["method.labels=[a]"], "method.labels: "),
        (["data.packing=true"], "data.packing: unsupported with method classification"),
        (["data.too_long=refuse"], "data.too_long: refuse is unsupported with method classification; use truncate"),
        (["output.sample_prompts=[Hi]"], "output.sample_prompts: has no effect with method classification"),
        (["adapter=prompt_tuning"], "adapter.type: prompt_tuning is unsupported with method classification"),
        (["method.trainer_args.label_smoothing_factor=0.1"], "not used by the loss of labels"),
    ],
)
def test_what_a_recipe_asks_for_in_vain_is_refused(recipe, changes, problem):
    with pytest.raises((RecipeError, PlanError), match=problem):
        tunekit.plan(recipe, changes)


def test_a_family_without_such_a_head_is_refused_before_rows_are_prepared(recipe, tmp_path):
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    OlmoeForCausalLM(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="transformers has no model for sequence classification of type olmoe"):
        tunekit.train(recipe, [f"model={tmp_path}"])


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_padding_token_that_also_ends_answers_is_no_part_of_what_is_scored(recipe, workspace, tmp_path, adapter):
    """As transformers has it: the score is read at the last token that is not the padding token."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    shutil.copytree(workspace / "model", tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    turns = [[*question(n), {"role": "assistant", "content": "?" * (n % 4)}] for n in range(1, 12)]
    save_jsonl(tmp_path / "rows.jsonl", [{"messages": rows, "label": n % 3} for n, rows in enumerate(turns)])
    rows = tmp_path / "rows.jsonl"
    run = tunekit.train(recipe, [f"model={tmp_path / 'model'}", f"data.train={rows}", f"data.eval={rows}",
                                 f"adapter={adapter}", "train.max_steps=4"])  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(
        run.model_path if adapter == "full" else tmp_path / "model", num_labels=3
    )
    model = model if adapter == "full" else PeftModel.from_pretrained(model, run.model_path)
    model.config.pad_token_id = tokenizer.eos_token_id
    losses = []
    for n, messages in enumerate(turns):
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
        assert ids[-1] == tokenizer.pad_token_id
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([ids])).logits
        losses.append(cross_entropy(logits, torch.tensor([n % 3])))
    expected = float(torch.stack(losses).mean())
    assert logged(run, "eval")[-1]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert tunekit.evaluate(run, device="cpu").scores[0].after.value == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["reward", "classification"])
def test_where_a_model_names_no_padding_token_what_is_saved_scores_as_it_was_trained(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "model")
    texts = ["b" * (n % 3) for n in range(1, 17)]
    rows = {"reward": [{"prompt": "a", "chosen": text, "rejected": f"{text}c"} for text in texts if text],
            "classification": [{"text": f"{text}<|im_end|>", "label": len(text) % 2} for text in texts]}  # fmt: skip
    save_jsonl(tmp_path / "rows.jsonl", rows[method])
    recipe = {
        "model": "model", "data": {"train": "rows.jsonl", "max_length": 64}, "adapter": "lora",
        "method": {"type": method, **({"num_labels": 2} if method == "classification" else {})},
        "train": {"max_steps": 3, "global_batch_size": 4, "learning_rate": 1e-2},
    }  # fmt: skip
    run = tunekit.train(recipe)
    (saved,) = logged(run, "saved")
    assert saved["logit_error"] < 1e-4
    tunekit.export(run, tmp_path / "merged")
    assert json.loads((tmp_path / "merged/config.json").read_text())["pad_token_id"] == tokenizer.pad_token_id
