"""Rows with audio are trained on as plain Transformers and the model's own processor do."""

import base64
import json

import pytest
import torch

import tunekit
from tests.audio import ALONE, FAMILIES, auto_class, save_audio_rows, save_tiny_audio_model
from tests.tiny import saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.test_vision import (
    TENSORS,
    compare_answers,
    compare_with_plain_transformers,
    loss_of,
    media_of,
    recipe,
)
from tunekit.errors import DataError, PlanError, RunError
from tunekit.inference.conversations import inputs_of
from tunekit.inference.inference_model import find_trained, load
from tunekit.runs.run import Run

PACKED = ("gemma4", "qwen2_5_omni", "qwen2_audio")
"""Families whose rows can be packed."""
BY_ONE = ("gemma3n", "granite_speech")
"""Families whose code does not leave out the padding of clips beside longer ones."""
QUICK = {"qwen2_audio"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(FAMILIES)],
)
def saved(request, tmp_path_factory):
    """A folder with the model of a family and rows of clips."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_audio_model(folder / "model", request.param)
    is_alone = request.param in ALONE
    save_audio_rows(folder / "data", without=None if is_alone else 3, twice=not is_alone)
    return folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2_audio")
    save_tiny_audio_model(folder / "model", "qwen2_audio")
    save_audio_rows(folder / "data")
    return folder


def family_of(saved):
    return saved.name[:-1]


def auto_class_of(saved):
    from transformers import AutoConfig

    return auto_class(AutoConfig.from_pretrained(saved / "model"))


@pytest.mark.parametrize("adapter", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_the_first_loss_and_all_gradients_are_those_of_plain_transformers(adapter, saved, tmp_path):
    sizes = {"micro_batch_size": 1 if family_of(saved) in BY_ONE else 2}
    compare_with_plain_transformers(adapter, saved, tmp_path, auto_class=auto_class_of(saved), **sizes)


@pytest.mark.parametrize("adapter", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_packed_rows_have_the_loss_and_the_gradients_of_plain_transformers_on_each(adapter, saved, tmp_path):
    if family_of(saved) not in PACKED:
        with pytest.raises((PlanError, RunError)) as caught:
            tunekit.train(recipe(saved, tmp_path, packed=True, adapter="lora"))
        assert "pack" in str(caught.value)
        return
    run = compare_with_plain_transformers(adapter, saved, tmp_path, packed=True, auto_class=auto_class_of(saved))
    assert run.plan.padding_free and 1 < run.plan.data.num_train < 8


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({"gemma4", "qwen2_5_omni"} & FAMILIES.keys()))
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_rows_of_clips_and_pictures_have_the_loss_and_the_gradients_of_plain_transformers(packed, family, tmp_path):
    from PIL import Image

    save_tiny_audio_model(tmp_path / "model", family)
    rows = save_audio_rows(tmp_path / "data")
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    for number, line in enumerate(lines):
        content = line["messages"][0]["content"]
        if number % 3 < 2 and isinstance(content, list):
            Image.effect_noise((40 + 20 * number, 60), 60).convert("RGB").save(tmp_path / "data" / f"{number}.png")
            content.insert(number % 2, {"type": "image", "image": f"{number}.png"})
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    compare_with_plain_transformers("lora", tmp_path, tmp_path, packed=packed, auto_class=auto_class_of(tmp_path))


@pytest.mark.slow
def test_clips_that_padding_changes_are_refused_beside_others(saved, tmp_path):
    if family_of(saved) in BY_ONE:
        words = "computes other logits for a row with audio in a batch with longer clips than alone"
        with pytest.raises(RunError, match=words) as caught:
            tunekit.train(recipe(saved, tmp_path, adapter="lora"))
        assert caught.value.hint == "set train.micro_batch_size=1"


@pytest.mark.slow
def test_a_processor_that_takes_a_clip_for_each_text_refuses_rows_without_some(tmp_path):
    save_tiny_audio_model(tmp_path / "model", "glmasr")
    save_audio_rows(tmp_path / "data", twice=False)
    with pytest.raises(RunError, match="GlmAsrProcessor refuses a batch of rows with different media") as caught:
        tunekit.train(recipe(tmp_path, tmp_path, adapter="lora"))
    assert caught.value.hint == "set train.micro_batch_size=1, or add audio clips to all rows or none"


@pytest.mark.slow
def test_two_processes_train_as_one(qwen2, tmp_path):
    train = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-2}
    one = made(recipe(qwen2, tmp_path / "one", train=train))
    worked(one)
    two = made(recipe(qwen2, tmp_path / "two", train=train, parallel={"strategy": "ddp", "num_processes": 2}))
    work_in(two, 2)
    losses = [[event["loss"] for event in Run(path).events() if event["event"] == "log"] for path in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    torch.testing.assert_close(
        saved_weights(Run(two).model_path), saved_weights(Run(one).model_path), atol=1e-4, rtol=0
    )


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_bits_of_one_that_went_through(qwen2, tmp_path):
    train = {"optim": "adamw_torch", "learning_rate": 1e-2, "global_batch_size": 2}
    whole = tunekit.train(recipe(qwen2, tmp_path / "whole", train=train | {"max_steps": 4}))
    part = tunekit.train(recipe(qwen2, tmp_path / "part", train=train | {"max_steps": 3}))
    resumed = tunekit.resume(part, ["train.max_steps=4"])
    after, before = saved_weights(resumed.model_path), saved_weights(whole.model_path)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_the_result_is_a_model_with_its_processor_that_transformers_loads(kind, qwen2, tmp_path):
    from peft import PeftModel
    from transformers import AutoProcessor

    run = tunekit.train(recipe(qwen2, tmp_path, adapter="lora"))
    base = auto_class_of(qwen2).from_pretrained(qwen2 / "model", dtype=torch.float32)
    expected = loss_of(
        PeftModel.from_pretrained(base, run.model_path), AutoProcessor.from_pretrained(run.model_path), qwen2
    )
    folder = run.model_path
    if kind == "merged":
        tunekit.export(run, tmp_path / "merged", kind="merged")
        folder = tmp_path / "merged"
        model = auto_class_of(qwen2).from_pretrained(folder, dtype=torch.float32)
        loss = loss_of(model, AutoProcessor.from_pretrained(folder), qwen2)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    processor, own = (AutoProcessor.from_pretrained(path) for path in (folder, qwen2 / "model"))
    assert processor.feature_extractor.to_dict() == own.feature_extractor.to_dict()


@pytest.mark.slow
def test_answers_and_losses_of_rows_with_audio_are_those_of_transformers(qwen2, tmp_path):
    from transformers import AutoProcessor

    wanted = recipe(qwen2, tmp_path, adapter={"type": "lora", "rank": 4})
    wanted["data"]["eval"] = wanted["data"]["train"]
    # Those of the rows: the first ones have clips.
    wanted["output"] = {"dir": str(tmp_path / "run")}
    run = tunekit.train(wanted)
    compare_answers(qwen2, run, tmp_path, auto_class_of(qwen2))
    assert next(sample["prompt"] for sample in run.samples()) == "[audio 0.wav] what?"
    (scored,) = (score for score in tunekit.evaluate(run, before=False).scores if score.name == "loss")
    assert scored.after.value == pytest.approx(run.metrics()["eval_loss"].dropna().iloc[-1], rel=1e-5)
    loaded = load(find_trained(run.path), device="cpu")
    data = base64.b64encode((qwen2 / "data" / "2.wav").read_bytes()).decode()
    parts = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, {"type": "text", "text": "what?"}]
    inputs = inputs_of(loaded, [{"role": "user", "content": parts}])
    processor = AutoProcessor.from_pretrained(run.model_path)
    own = [{"type": "audio", "audio": "2.wav"}, parts[1]]
    template = {"add_generation_prompt": True, "tokenize": False}
    text = processor.tokenizer.apply_chat_template([{"role": "user", "content": own}], **template)
    expected = processor(text=[text], **media_of(own, qwen2 / "data"), **TENSORS)
    assert inputs["input_ids"].equal(expected["input_ids"])
    torch.testing.assert_close(inputs["input_features"], expected["input_features"])


@pytest.mark.slow
def test_a_clip_that_changed_since_the_rows_were_prepared_ends_the_run(tmp_path):
    save_tiny_audio_model(tmp_path / "model", "qwen2_audio")
    save_audio_rows(tmp_path / "data")
    path = made(recipe(tmp_path, tmp_path, adapter="lora"))
    (tmp_path / "data" / "1.wav").write_bytes((tmp_path / "data" / "0.wav").read_bytes())
    with pytest.raises(DataError, match=r"1\.wav: the audio clip changed since the rows were prepared"):
        worked(path)


def test_audio_is_refused_where_it_cannot_be_read_as_asked(qwen2, tmp_path):
    wanted = recipe(qwen2, tmp_path)
    with pytest.raises(PlanError, match="rows have audio, but pico is a text-only model"):
        tunekit.plan({**wanted, "model": "pico"})
    with pytest.raises(PlanError, match=r"adapter\.projector: towers are only trained on images"):
        tunekit.plan({**wanted, "adapter": {"type": "full", "projector": "full"}})
    with pytest.raises(PlanError, match=r"model\.image_processor: no effect, the rows have no images"):
        tunekit.plan({**wanted, "model": {"path": str(qwen2 / "model"), "image_processor": {"do_resize": False}}})
    with pytest.raises(PlanError, match="the audio tower runs only where rows have audio; use fsdp2"):
        tunekit.plan({**wanted, "parallel": {"strategy": "zero3", "num_processes": 2}})


def test_the_plan_counts_the_weights_of_the_tower_and_says_that_its_activations_are_not(qwen2, tmp_path):
    plan = tunekit.plan(recipe(qwen2, tmp_path, adapter="lora"))
    (reason,) = [reason for reason in plan.reasons if reason.topic == "audio"]
    assert reason.choice == "in the rows"
    assert reason.why.endswith("its activations are not in the estimate")
    model = auto_class_of(qwen2).from_pretrained(qwen2 / "model")
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    assert plan.memory.parts["weights"] == 4 * num_weights
