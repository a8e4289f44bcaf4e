"""Distillation on prompts with pictures: both models see them, and the step is that of plain Transformers."""

import json

import pytest
import torch

import tunekit
from tests.tiny import saved_weights
from tests.training.engines import made, work_in
from tests.training.test_distillation import divergence
from tests.training.watching import seeing
from tests.vision import FAMILIES, is_of_tower, save_rows, save_tiny_vision_model
from tunekit.errors import DataError, ModelError, RecipeError, RunError
from tunekit.runs.run import Run

RATE, TEMPERATURE, NUM_TOKENS = 0.05, 0.7, 6
BY_OWN_LOGITS = ("aya_vision",)
"""Families whose logits are not those that TRL's divergence computes."""


def save_prompts(folder, num):
    """Write prompts with pictures, each with words of its own."""
    lines = []
    for number, line in enumerate(save_rows(folder, num, without=None).read_text().splitlines()):
        (prompt, _) = json.loads(line)["messages"]
        prompt["content"].append({"type": "text", "text": f" of {number}"})
        lines.append(json.dumps({"prompt": [prompt]}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))


def save_models(folder, family):
    """Save a model and a teacher of other weights, which both read prompts with pictures."""
    from transformers import AutoModelForImageTextToText

    for name in ("model", "teacher"):
        save_tiny_vision_model(folder / name, family)
    teacher = AutoModelForImageTextToText.from_pretrained(folder / "teacher")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std(correction=0) / 2)
    teacher.save_pretrained(folder / "teacher")
    save_prompts(folder / "data", 4)


@pytest.fixture(scope="module", params=sorted(FAMILIES.keys() - {"mllama", "ovis2"}))
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_models(folder, request.param)
    return folder, request.param


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save_models(folder, "llava")
    return folder


def recipe(folder, run, **sections):
    train = {"max_steps": 1, "global_batch_size": 4, "micro_batch_size": 4, "optim": "sgd"}
    train |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 1e9, "learning_rate": RATE}
    method = {"type": "distillation", "teacher": str(folder / "teacher"), "max_completion_length": NUM_TOKENS}
    method |= {"generation": {"temperature": TEMPERATURE}}
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "data" / "prompts.jsonl"), "max_length": 256} | sections.pop("data", {}),
        "method": method | sections.pop("method", {}),
        "adapter": "full",
        "train": train | sections.pop("train", {}),
        "output": {"dir": str(run), "sample_prompts": []},
        **sections,
    }


def step_of(folder, inputs, beta):
    """The loss of the answers that a run has generated, and the changes of weights of one step on it."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder / "model")
    model, teacher = (
        AutoModelForImageTextToText.from_pretrained(folder / name, dtype=torch.float32) for name in ("model", "teacher")
    )
    asked = {}
    for number, line in enumerate((folder / "data" / "prompts.jsonl").read_text().splitlines()):
        parts = json.loads(line)["prompt"][0]["content"]
        content = [{"type": "image"} if "image" in part else part for part in parts]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        image = Image.open(folder / "data" / f"{number}.png").convert("RGB")
        features = processor(text=[text], images=[[image]], return_tensors="pt", add_special_tokens=False)
        asked[tuple(features["input_ids"][0].tolist())] = features
    total, num_tokens = torch.zeros(()), 0
    for row in range(len(inputs["prompt_ids"])):
        prompt, answer = (
            inputs[f"{part}_ids"][row][inputs[f"{part}_mask"][row].bool()] for part in ("prompt", "completion")
        )
        features = dict(asked.pop(tuple(prompt.tolist())))
        ids = torch.cat([features.pop("input_ids"), answer[None]], 1)
        features |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for kind in ("token_type_ids", "mm_token_type_ids"):
            if kind in features:
                features[kind] = torch.nn.functional.pad(features[kind], (0, len(answer)))
        with torch.no_grad():
            its = teacher(**features).logits
        scores = (
            (logits[0, len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
            for logits in (model(**features).logits, its)
        )
        total, num_tokens = total + divergence(*scores, beta), num_tokens + len(answer)
    loss = total / num_tokens
    loss.backward()
    return loss.item(), {name: -RATE * p.grad for name, p in model.named_parameters() if p.grad is not None}, model


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_step_is_that_of_plain_transformers(beta, saved, tmp_path):
    """The divergence is one of mixtures (arXiv 2306.13649), a mean over all tokens of answers."""
    from transformers import AutoModelForImageTextToText
    from trl import DistillationTrainer

    (folder, family), batches = saved, []
    wanted = recipe(folder, tmp_path / "run", method={"beta": beta})
    if family in BY_OWN_LOGITS:
        with pytest.raises(RunError, match="TRL's distillation only compares logits of a fused head"):
            tunekit.train(wanted)
        return
    with seeing(DistillationTrainer, "training_step", lambda self, _: batches.append(dict(self._buffered_inputs[0]))):
        run = tunekit.train(wanted)
    (inputs,) = batches
    loss, changes, before = step_of(folder, inputs, beta)
    (logged,) = (event for event in run.events() if event["event"] == "log")
    assert logged["loss"] == pytest.approx(loss, rel=1e-4)
    assert loss > 0.01
    after = dict(AutoModelForImageTextToText.from_pretrained(run.model_path).named_parameters())
    largest = max(float(change.abs().max()) for change in changes.values())
    for name, weight in before.named_parameters():
        moved = (after[name] - weight).detach()
        if is_of_tower(name):
            assert not moved.any(), name
        else:
            torch.testing.assert_close(moved, changes[name], rtol=0, atol=2e-3 * largest, msg=name)


@pytest.mark.slow
def test_models_that_trl_does_not_give_all_of_their_pictures_are_refused(tmp_path):
    save_models(tmp_path, "mllama")
    what = "DistillationTrainer does not pass aspect_ratio_ids, aspect_ratio_mask, cross_attention_mask to the model"
    with pytest.raises(DataError, match=what):
        tunekit.train(recipe(tmp_path, tmp_path / "run"))


def refused(llava, tmp_path, change):
    """The message that refuses a teacher of LLaVA whose processor was changed."""
    from transformers import AutoProcessor

    for file in (llava / "model").iterdir():
        (tmp_path / "teacher").mkdir(exist_ok=True)
        (tmp_path / "teacher" / file.name).write_bytes(file.read_bytes())
    processor = AutoProcessor.from_pretrained(tmp_path / "teacher")
    change(processor)
    processor.save_pretrained(tmp_path / "teacher")
    wanted = recipe(llava, tmp_path / "run", method={"teacher": str(tmp_path / "teacher")})
    with pytest.raises(ModelError) as error:
        tunekit.train(wanted)
    assert not (tmp_path / "run").exists()
    return str(error.value)


def test_a_teacher_with_other_tokens_of_a_picture_is_refused(llava, tmp_path):
    message = refused(llava, tmp_path, lambda processor: setattr(processor, "num_additional_image_tokens", 2))
    assert "method.teacher: the processor of " in message
    assert "makes an image of 20 x 30 pixels 5 tokens, the model's 4 tokens; both models read" in message
    assert message.endswith("use a teacher of the same family whose image processor has the same settings")


def test_a_teacher_with_other_pixels_of_a_picture_is_refused(llava, tmp_path):
    def change(processor):
        processor.image_processor.image_mean = [0.1, 0.2, 0.3]

    assert "makes other pixel_values of " in refused(llava, tmp_path, change)


def test_settings_of_a_teachers_pictures_are_the_models(llava, tmp_path):
    teacher = {"path": str(llava / "teacher"), "image_processor": {"do_center_crop": False}}
    what = r"method\.teacher\.image_processor: not configurable: the teacher uses the model's setting"
    with pytest.raises(RecipeError, match=what):
        tunekit.plan(recipe(llava, tmp_path / "run", method={"teacher": teacher}))


@pytest.mark.slow
def test_prompts_without_pictures_beside_others_are_refused(llava, tmp_path):
    rows = (llava / "data" / "prompts.jsonl").read_text()
    bare = json.dumps({"prompt": [{"role": "user", "content": "say hi"}]}) + "\n"
    (llava / "data" / "mixed.jsonl").write_text(rows + bare)
    wanted = recipe(llava, tmp_path / "run", data={"train": str(llava / "data" / "mixed.jsonl")})
    with pytest.raises(DataError, match=r"mixed\.jsonl:5: a prompt without images, but other prompts have images"):
        tunekit.train(wanted)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_bits_of_one_that_went_through(llava, tmp_path):
    data = {"eval": str(llava / "data" / "prompts.jsonl")}
    whole = tunekit.train(recipe(llava, tmp_path / "whole", data=data, train={"max_steps": 4, "eval_steps": 2}))
    part = tunekit.train(recipe(llava, tmp_path / "part", data=data, train={"max_steps": 2, "eval_steps": 2}))
    resumed = tunekit.resume(part, ["train.max_steps=4"])
    after, before = saved_weights(resumed.model_path), saved_weights(whole.model_path)
    assert all(torch.equal(after[name], before[name]) for name in before)
    first, *_, last = (event["eval_loss"] for event in whole.events() if event["event"] == "eval")
    assert last < first


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_generate_from_pictures_and_learn(strategy, llava, tmp_path):
    parallel = {"strategy": strategy, "num_processes": 2}
    train = {"max_steps": 4, "micro_batch_size": 2}
    run = Run(made(recipe(llava, tmp_path / "run", train=train, parallel=parallel)))
    work_in(run.path, 2)
    losses = [event["loss"] for event in run.events() if event["event"] == "log"]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
