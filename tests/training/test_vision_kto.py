"""Rated answers about pictures are trained on as TRL's own trainer does with the model's processor."""

import json

import pytest
import torch

import tunekit
from tests.tiny import saved_weights
from tests.training.by_trl import PLAIN
from tests.training.engines import made, work_in, worked
from tests.vision import FAMILIES, as_trl, is_of_tower, save_rated, save_tiny_vision_model
from tunekit.errors import DataError
from tunekit.runs.run import Run

RATE, NUM_STEPS, BETA, TOGETHER, GOOD = 0.05, 3, 0.5, 4, 1.5
BY_FORMULA = ("mllama", "aya_vision")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def saved(request, tmp_path_factory):
    """A folder with the model of a family and rated answers about pictures."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vision_model(folder / "model", request.param)
    # Llama 3.2 Vision reads texts otherwise beside pictures, and TRL's collator wants a picture in every row of most.
    save_rated(folder / "data", without=None)
    return folder


def recipe(saved, folder, **sections):
    train = {"max_steps": NUM_STEPS, "global_batch_size": 8, "micro_batch_size": TOGETHER, "optim": "sgd"}
    train |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 1e9, "learning_rate": RATE}
    own = {"type": "kto", "beta": BETA, "desirable_weight": GOOD}
    data = {"train": str(saved / "data" / "rated.jsonl"), "max_length": 512, "shuffle": False}
    return {
        "model": str(saved / "model"),
        "data": data | sections.pop("data", {}),
        "method": own | sections.pop("method", {}),
        "train": train | sections.pop("train", {}),
        "output": {"dir": str(folder / "run"), "sample_prompts": []},
        **sections,
    }


def rows_of(saved):
    return [json.loads(line) for line in (saved / "data" / "rated.jsonl").read_text().splitlines()]


def loaded(saved):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(saved / "model", dtype=torch.float32)


def trained_by_trl(saved, folder):
    """Losses and divergences of the steps and of evaluations, and the model, by TRL alone."""
    from datasets import Dataset
    from transformers import AutoProcessor
    from trl import KTOConfig, KTOTrainer

    model = loaded(saved)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_of_tower(name))
    rows = Dataset.from_list(as_trl(rows_of(saved), saved / "data", "completion"))
    trainer = KTOTrainer(
        model,
        loaded(saved),
        args=KTOConfig(
            str(folder),
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            train_sampling_strategy="sequential",
            max_steps=NUM_STEPS,
            eval_strategy="steps",
            eval_steps=NUM_STEPS,
            learning_rate=RATE,
            max_length=None,
            beta=BETA,
            desirable_weight=GOOD,
            **PLAIN,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=AutoProcessor.from_pretrained(saved / "model"),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    (evaluated,) = (entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    return [step["loss"] for step in steps], [step["kl"] for step in steps], evaluated, model


def trained_by_formula(saved):
    """The same by plain Transformers and the loss of arXiv 2402.01306, equation 7, row by row.

    The divergence is one of all rows of a step.
    """
    from transformers import AutoProcessor

    processor, (model, reference) = AutoProcessor.from_pretrained(saved / "model"), (loaded(saved), loaded(saved))
    trained = [parameter for name, parameter in model.named_parameters() if not is_of_tower(name)]
    optimizer, rows = torch.optim.SGD(trained, lr=RATE), rows_of(saved)

    def log_probability(model, row, other):
        inputs, num_asked = inputs_of(saved, processor, row["prompt"], other["completion"])
        scores = model(**inputs).logits[0, num_asked - 1 : -1].log_softmax(-1)
        return scores.gather(1, inputs["input_ids"][0, num_asked:, None]).sum()

    def losses_of(rows):
        def ratio(row, other):
            with torch.no_grad():
                expected = log_probability(reference, row, other)
            return log_probability(model, row, other) - expected

        others = [rows[-1], *rows[:-1]]
        with torch.no_grad():
            far = sum(ratio(row, other) for row, other in zip(rows, others, strict=True)) / len(rows)
        far = far.clamp(min=0)
        signs = [1 if row["label"] else -1 for row in rows]
        losses = [
            (GOOD if sign > 0 else 1) * (1 - torch.sigmoid(BETA * sign * (ratio(row, row) - far)))
            for row, sign in zip(rows, signs, strict=True)
        ]
        return torch.stack(losses).mean(), far

    losses, divergences = [], []
    for _ in range(NUM_STEPS):
        loss, far = losses_of(rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        divergences.append(far.item())
    return losses, divergences, losses_of(rows)[0].item(), model


def inputs_of(saved, processor, prompt, completion):
    """Inputs of a prompt with an answer, and the number of tokens of the prompt."""
    from PIL import Image

    content = prompt[0]["content"]
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    asked = [{"role": "user", "content": [{"type": "image"} if "image" in part else part for part in content]}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": completion[0]["content"]}]}
    images = [Image.open(saved / "data" / part["image"]).convert("RGB") for part in content if "image" in part]
    given = {"images": [images] if images else None, "return_tensors": "pt", "add_special_tokens": False}
    start = processor(text=[processor.apply_chat_template(asked, add_generation_prompt=True)], **given)
    return processor(text=[processor.apply_chat_template([*asked, answer])], **given), start["input_ids"].shape[1]


def of_steps(run, name="loss"):
    """The values of a metric in the steps of a run."""
    return [event[name] for event in run.events() if event["event"] == "log"]


def check_weights(saved, run, model):
    """The weights of a run have moved as those of a model."""
    from transformers import AutoModelForImageTextToText

    before = dict(loaded(saved).named_parameters())
    ours = dict(AutoModelForImageTextToText.from_pretrained(run.model_path).named_parameters())
    moved = {name: (weight - before[name]).detach() for name, weight in model.named_parameters()}
    largest = max(float(change.abs().max()) for change in moved.values())
    assert largest > 0
    for name, change in moved.items():
        torch.testing.assert_close((ours[name] - before[name]).detach(), change, rtol=0, atol=2e-3 * largest, msg=name)


@pytest.mark.slow
def test_losses_and_weights_are_those_of_trl(saved, tmp_path):
    """Two families are held to the formula: of Llama 3.2 Vision TRL's collator fails, and of Aya Vision TRL's head
    scales logits, as its language model by itself would (trl 1.16)."""
    data = {"eval": str(saved / "data" / "rated.jsonl")}
    run = tunekit.train(recipe(saved, tmp_path, adapter="full", data=data))
    family = json.loads((saved / "model" / "config.json").read_text())["model_type"]
    by_other = trained_by_formula(saved) if family in BY_FORMULA else trained_by_trl(saved, tmp_path / "trl")
    losses, divergences, evaluated, model = by_other
    assert of_steps(run) == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
    assert max(divergences) > 0.01
    assert of_steps(run, "kl") == pytest.approx(divergences, rel=1e-3, abs=1e-5)
    evaluations = [event["eval_loss"] for event in run.events() if event["event"] == "eval"]
    assert evaluations[-1] == pytest.approx(evaluated, rel=1e-4)
    check_weights(saved, run, model)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save_tiny_vision_model(folder / "model", "llava")
    save_rated(folder / "data")
    return folder


@pytest.mark.slow
def test_rows_without_pictures_mix_with_them(llava, tmp_path):
    run = tunekit.train(recipe(llava, tmp_path, adapter="full"))
    losses, divergences, _, model = trained_by_formula(llava)
    assert of_steps(run) == pytest.approx(losses, rel=1e-4)
    assert of_steps(run, "kl") == pytest.approx(divergences, rel=1e-3, abs=1e-5)
    assert max(divergences) > 0.01
    check_weights(llava, run, model)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_a_precomputed_reference_gives_the_same_losses(loss_type, llava, tmp_path):
    sections = {"adapter": {"type": "lora", "rank": 4}, "train": {"learning_rate": 0.1}}
    methods = [{"loss_type": loss_type, "precompute_ref_log_probs": early} for early in (False, True)]
    runs = [
        tunekit.train(recipe(llava, tmp_path / str(i), method=method, **sections)) for i, method in enumerate(methods)
    ]
    losses, early = (of_steps(run) for run in runs)
    assert losses[-1] < losses[0] - 1e-3
    assert early == pytest.approx(losses, rel=1e-5)
    assert of_steps(runs[1], "kl") == pytest.approx(of_steps(runs[0], "kl"), rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_rows_too_long_are_left_out_whole(llava, tmp_path):
    with pytest.raises(DataError, match="none of 8 rows is short enough: limit 20 tokens"):
        tunekit.train(recipe(llava, tmp_path, adapter="full", data={"max_length": 20}))


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(strategy, loss_type, llava, tmp_path):
    sections = {"adapter": "full", "method": {"loss_type": loss_type}}
    train = {"optim": "adamw_torch", "learning_rate": 1e-2, "micro_batch_size": 2}
    one = made(recipe(llava, tmp_path / "one", train=train, **sections))
    worked(one)
    parallel = {"strategy": strategy, "num_processes": 2}
    two = made(recipe(llava, tmp_path / "two", train=train, parallel=parallel, **sections))
    work_in(two, 2)
    assert of_steps(Run(two)) == pytest.approx(of_steps(Run(one)), abs=1e-5)
    torch.testing.assert_close(
        saved_weights(Run(two).model_path), saved_weights(Run(one).model_path), atol=1e-4, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_divergence_is_one_of_the_step_of_two_processes(strategy, llava, tmp_path):
    parallel = {"strategy": strategy, "num_processes": 2}
    train = {"micro_batch_size": TOGETHER // 2}
    run = Run(made(recipe(llava, tmp_path, train=train, parallel=parallel, adapter="full")))
    work_in(run.path, 2)
    losses, divergences, _, model = trained_by_formula(llava)
    assert of_steps(run) == pytest.approx(losses, abs=1e-5)
    assert of_steps(run, "kl") == pytest.approx(divergences, rel=1e-3, abs=1e-5)
    assert max(divergences) > 0.01
    check_weights(llava, run, model)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_bits_of_one_that_went_through(llava, tmp_path):
    sections = {"adapter": {"type": "lora", "rank": 4}}
    whole = tunekit.train(recipe(llava, tmp_path / "whole", train={"max_steps": 4}, **sections))
    part = tunekit.train(recipe(llava, tmp_path / "part", train={"max_steps": 2}, **sections))
    resumed = tunekit.resume(part, ["train.max_steps=4"])
    after, before = saved_weights(resumed.model_path), saved_weights(whole.model_path)
    assert all(torch.equal(after[name], before[name]) for name in before)
