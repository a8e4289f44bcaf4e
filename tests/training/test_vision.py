"""Rows with pictures are trained on as plain Transformers and the model's own processor do."""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml

import tunekit
from tests.tiny import saved_weights
from tests.training.engines import made, work_in, worked
from tests.vision import FAMILIES, is_of_tower, save_rows, save_tiny_vision_model, tiny_vision_model
from tunekit.errors import DataError, ModelError, PlanError, RunError
from tunekit.models.load import attach_adapter
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter
from tunekit.runs.run import Run
from tunekit.training.engines.fsdp2 import name_layers

RATE = 0.01
RANK = 4


PACK = 128
"""Tokens of packed rows: there are three or four of them."""


QUICK = {"llava"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(FAMILIES)],
)
def saved(request, tmp_path_factory):
    """A folder with the model of a family and rows of pictures."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vision_model(folder / "model", request.param)
    # Llama 3.2 Vision reads texts otherwise beside pictures.
    save_rows(folder / "data", without=None if request.param == "mllama" else 3)
    return folder


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save_tiny_vision_model(folder / "model", "llava")
    save_rows(folder / "data")
    return folder


@pytest.fixture(scope="module", params=sorted(FAMILIES.keys() - {"mllama"}))
def several(request, tmp_path_factory):
    """The same of the families whose rows can be packed."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vision_model(folder / "model", request.param)
    save_rows(folder / "data")
    return folder


def recipe(saved, folder, *, packed=False, max_length=512, **sections):
    """One step of gradient descent over all rows, in micro-batches of two: of rows, or of a few rows in one each.

    `packed` may be the number of tokens of these.
    """
    train = {"max_steps": 1, "global_batch_size": 8, "micro_batch_size": 2, "optim": "sgd", "learning_rate": RATE}
    train |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 1e9}
    return {
        "model": str(saved / "model"),
        "data": {
            "train": str(saved / "data" / "rows.jsonl"),
            "max_length": PACK if packed is True else packed or max_length,
            "packing": bool(packed),
        },
        "train": train | sections.pop("train", {}),
        "output": {"dir": str(folder / "run"), "sample_prompts": []},
        **sections,
    }


def loss_of(model, processor, saved):
    """The mean over the answers' tokens, by the processor's own conversion of each row."""
    losses = []
    for inputs, labels in converted(processor, saved):
        logits = model(**inputs).logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="none"))
    kept = torch.cat(losses)
    return kept[kept != 0].mean()


def converted(processor, saved):
    """Inputs and labels of each row, `(seq,)`, by the processor's own conversion."""
    for line in (saved / "data" / "rows.jsonl").read_text().splitlines():
        asked, answered = json.loads(line)["messages"]
        parts = asked["content"] if isinstance(asked["content"], list) else [{"type": "text", "text": asked["content"]}]
        turns = [{"role": "user", "content": parts}]
        answer = [{"role": "assistant", "content": [{"type": "text", "text": answered["content"]}]}]
        start = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        text = processor.apply_chat_template(turns + answer, tokenize=False)
        assert text.startswith(start)
        inputs = processor(text=[text], **media_of(parts, saved / "data"), **TENSORS)
        # The answer with the token that ends it; the line break behind it is the template's.
        ids = inputs["input_ids"][0]
        labels = torch.full_like(ids, -100)
        num = len(processor.tokenizer(answered["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"])
        labels[-1 - num : -1] = ids[-1 - num : -1]
        yield inputs, labels


TENSORS = {"return_tensors": "pt", "text_kwargs": {"add_special_tokens": False}}


def media_of(parts, folder):
    """The arguments of a processor for the pictures and the clips of a message."""
    from PIL import Image

    given = {}
    images = [Image.open(folder / part["image"]).convert("RGB") for part in parts if "image" in part]
    clips = [part.get("audio") or part["path"] for part in parts if part["type"] == "audio"]
    if images:
        given["images"] = [images]
    videos = [decoded_video(folder / part["video"]) for part in parts if "video" in part]
    if videos:
        given["videos"] = [frames for frames, _ in videos]
        given["videos_kwargs"] = {"video_metadata": [about for _, about in videos]}
    if clips:
        given["audio"] = [samples_of(folder / name) for name in clips]
    return given


def decoded_video(file):
    """All frames of a video, with what transformers says of one; its processor chooses among them."""
    import av
    import numpy as np
    from transformers.video_utils import VideoMetadata

    with av.open(str(file)) as container:
        rate = float(container.streams.video[0].average_rate)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    num, height, width, _ = frames.shape
    return frames, VideoMetadata(num, fps=rate, width=width, height=height, duration=num / rate)


def samples_of(file):
    """One channel of a clip at the rate of the tiny models."""
    import soundfile
    import soxr

    samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    return soxr.resample(samples.mean(1), rate, 16_000)


@pytest.mark.parametrize("adapter", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_the_first_loss_and_all_gradients_are_those_of_plain_transformers(adapter, saved, tmp_path):
    compare_with_plain_transformers(adapter, saved, tmp_path)


@pytest.mark.parametrize("adapter", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_packed_rows_have_the_loss_and_the_gradients_of_plain_transformers_on_each(adapter, saved, tmp_path):
    if saved.name.startswith("mllama"):
        why = "the cross-attention of mllama_text_model reads the images of a whole row; unset it"
        with pytest.raises(PlanError, match=rf"^data\.packing: unsupported for rows with images: {why}$"):
            tunekit.plan(recipe(saved, tmp_path, packed=True))
        return
    run = compare_with_plain_transformers(adapter, saved, tmp_path, packed=True)
    plan = run.plan
    assert plan.padding_free and 1 < plan.data.num_train < 8


def compare_with_plain_transformers(
    adapter, saved, tmp_path, *, packed=False, max_length=512, auto_class=None, method="sft", loss_of=loss_of, **train
):
    """Compare the first loss and all gradients of a run with those of a loss, and return the run."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    auto_class = auto_class or AutoModelForImageTextToText

    sections = {"adapter": {"type": "lora", "rank": RANK, "alpha": RANK} if adapter == "lora" else "full"}
    sections |= {"train": train, "method": method}
    run = tunekit.train(recipe(saved, tmp_path, packed=packed, max_length=max_length, **sections))
    model = auto_class.from_pretrained(saved / "model", dtype=torch.float32)
    if adapter == "lora":
        model = PeftModel.from_pretrained(model, run.model_path, is_trainable=True)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.zero_()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            # Of a frozen tower.
            module.eval()
    loss = loss_of(model, AutoProcessor.from_pretrained(saved / "model"), saved)
    loss.backward()
    assert run.metrics()["loss"].iloc[0] == pytest.approx(loss.item(), rel=1e-5)
    if adapter == "lora":
        after = load_file(run.model_path / "adapter_model.safetensors")
        grads = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if "lora_B" in name}
        pairs = {name: (-after[name] / RATE, grad) for name, grad in grads.items() if grad is not None}
        assert not any(is_of_tower(name) for name in pairs)
    else:
        trained = dict(auto_class.from_pretrained(run.model_path).named_parameters())
        pairs = {
            name: ((before[name] - trained[name]).detach() / RATE, parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and not is_of_tower(name)
        }
        for name in before:
            if is_of_tower(name):
                assert torch.equal(before[name], trained[name]), name
    assert pairs
    largest = max(float(grad.abs().max()) for _, grad in pairs.values())
    for name, (ours, theirs) in pairs.items():
        assert float((ours - theirs).abs().max()) <= 1e-3 * largest, name
    return run


@pytest.mark.slow
def test_a_model_that_reads_texts_otherwise_beside_pictures_is_refused(tmp_path):
    save_tiny_vision_model(tmp_path / "model", "mllama")
    save_rows(tmp_path / "data")
    with pytest.raises(RunError, match="computes other logits for a row without images") as caught:
        tunekit.train(recipe(tmp_path, tmp_path))
    assert caught.value.hint == "set train.micro_batch_size=1, or add images to all rows or none"


PACKS = {"global_batch_size": 2, "micro_batch_size": 1}
"""Steps of a part of an epoch, of which the last one is filled in two processes."""


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(strategy, packed, several, tmp_path):
    # Plain gradient descent: AdamW divides by what is near zero for some values, and makes much of rounding.
    train = {"max_steps": 4, "learning_rate": 0.3} | (PACKS if packed else {})
    one = made(recipe(several, tmp_path / "one", packed=packed, train=train))
    worked(one)
    parallel = {"strategy": strategy, "num_processes": 2}
    two = made(recipe(several, tmp_path / "two", packed=packed, train=train, parallel=parallel))
    work_in(two, 2)
    losses = [[event["loss"] for event in Run(path).events() if event["event"] == "log"] for path in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    torch.testing.assert_close(
        saved_weights(Run(two).model_path), saved_weights(Run(one).model_path), atol=1e-5, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_a_resumed_run_ends_with_the_bits_of_one_that_went_through(packed, several, tmp_path):
    train = {"optim": "adamw_torch", "learning_rate": 1e-2} | (PACKS if packed else {})
    whole = tunekit.train(recipe(several, tmp_path / "whole", packed=packed, train=train | {"max_steps": 4}))
    part = tunekit.train(recipe(several, tmp_path / "part", packed=packed, train=train | {"max_steps": 3}))
    resumed = tunekit.resume(part, ["train.max_steps=4"])
    after, before = saved_weights(resumed.model_path), saved_weights(whole.model_path)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=RANK)], ids=["full", "lora"])
def test_a_tower_is_in_the_unit_of_the_whole_model_where_rows_have_pictures(adapter):
    """Of two processes only one may have a micro-batch with pictures, and both gather a unit."""
    model = attach_adapter(tiny_vision_model("llava")[0], adapter, seed=0)
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=None)
    trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    name_layers(trainer, reads_media=True)
    assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
    name_layers(trainer, reads_media=False)
    assert plugin.transformer_cls_names_to_wrap == ["CLIPEncoderLayer", "LlamaDecoderLayer"]


def test_zero_3_is_refused_as_it_gathers_a_tower_where_it_runs(llava, tmp_path):
    parallel = {"strategy": "zero3", "num_processes": 2}
    with pytest.raises(PlanError, match="the vision tower runs only where rows have images; use fsdp2"):
        tunekit.plan(recipe(llava, tmp_path, parallel=parallel))


@pytest.mark.slow
def test_packed_rows_are_evaluated_as_those_alone(several, tmp_path):
    losses = []
    for packed in (False, True):
        wanted = recipe(several, tmp_path / str(packed), packed=packed)
        wanted["data"] |= {"eval": wanted["data"]["train"]}
        run = tunekit.train(wanted)
        (scored,) = (score for score in tunekit.evaluate(run, before=False).scores if score.name == "loss")
        assert scored.num_rows == 8
        losses.append([run.metrics()["eval_loss"].dropna().iloc[-1], scored.after.value])
    assert losses[0] == pytest.approx([losses[1][0]] * 2, rel=1e-5)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_the_result_is_a_model_with_its_processor_that_transformers_loads(saved, tmp_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    run = tunekit.train(recipe(saved, tmp_path, adapter="lora"))
    tunekit.export(run, tmp_path / "merged", kind="merged")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    processor, own = (AutoProcessor.from_pretrained(path) for path in (tmp_path / "merged", saved / "model"))
    assert processor.image_processor.to_dict() == own.image_processor.to_dict()
    assert torch.isfinite(loss_of(model, processor, saved))


@pytest.mark.slow
def test_a_picture_that_changed_since_the_rows_were_prepared_ends_the_run(tmp_path):
    save_tiny_vision_model(tmp_path / "model", "llava")
    save_rows(tmp_path / "data")
    path = made(recipe(tmp_path, tmp_path, adapter="lora"))
    (tmp_path / "data" / "1.png").write_bytes((tmp_path / "data" / "0.png").read_bytes())
    with pytest.raises(DataError, match=r"1\.png: the image changed since the rows were prepared"):
        worked(path)


@pytest.mark.slow
def test_settings_of_the_image_processor_count_and_are_saved(llava, tmp_path):
    from transformers import AutoProcessor

    larger = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    wanted = recipe(llava, tmp_path, adapter="lora")
    path = made({**wanted, "model": {"path": str(llava / "model"), "image_processor": larger}})
    data = yaml.safe_load((path / "plan.yaml").read_text())["data"]
    assert data["num_picture_tokens"] == 16 * data["num_pictures"]
    assert data["num_pixel_values"] == 3 * 56 * 56 * data["num_pictures"]
    assert data["most_pixel_values"] == 3 * 56 * 56
    wanted = recipe(llava, tmp_path / "next", adapter="lora")
    with pytest.raises(ModelError, match=r"image_processor\.max_pixels: CLIPImageProcessorPil has no such setting"):
        made({**wanted, "model": {"path": str(llava / "model"), "image_processor": {"max_pixels": 5}}})
    mean = {"image_mean": [0.25, 0.5, 0.75]}
    run = tunekit.train({**wanted, "model": {"path": str(llava / "model"), "image_processor": mean}})
    assert AutoProcessor.from_pretrained(run.model_path).image_processor.image_mean == (0.25, 0.5, 0.75)


REGEX = r"model\.language_model\.layers\.\d+\.self_attn\.[qv]_proj"


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter",
    [
        {"type": "lora", "rank": RANK, "target_modules": REGEX},
        {"type": "full", "unfrozen_parameters": [r"^model\.language_model\.layers\.1\."]},
    ],
    ids=["lora", "full"],
)
def test_patterns_of_modules_match_names_that_an_older_checkpoint_has_otherwise(adapter, llava, tmp_path):
    from safetensors import safe_open

    with safe_open(llava / "model" / "model.safetensors", "pt") as stored:
        assert "language_model.model.layers.0.self_attn.q_proj.weight" in {*stored.keys()}
    path = made(recipe(llava, tmp_path, adapter=adapter))
    # A run compares the number of trained parameters with the planned one.
    worked(path)
    assert yaml.safe_load((path / "plan.yaml").read_text())["num_trainable_params"] > 0


@pytest.mark.slow
def test_a_setting_that_the_class_of_a_processor_goes_before_is_refused(tmp_path):
    save_tiny_vision_model(tmp_path / "model", "gemma3")
    save_rows(tmp_path / "data")
    model = {"path": str(tmp_path / "model"), "image_processor": {"do_pan_and_scan": True}}
    with pytest.raises(ModelError, match=r"image_processor\.do_pan_and_scan: Gemma3Processor always sets False"):
        made({**recipe(tmp_path, tmp_path, adapter="lora"), "model": model})


def test_pictures_are_refused_where_they_cannot_be_read_as_asked(llava, tmp_path):
    with pytest.raises(PlanError, match=r"data\.padding_free: unsupported for rows with images"):
        tunekit.plan({**recipe(llava, tmp_path), "data": {**recipe(llava, tmp_path)["data"], "padding_free": True}})
    with pytest.raises(PlanError, match="rows have images, but pico is a text-only model"):
        tunekit.plan({**recipe(llava, tmp_path), "model": "pico"})
    settings = {"path": str(llava / "model"), "image_processor": {"do_resize": False}}
    with pytest.raises(PlanError, match=r"model\.image_processor: no effect"):
        tunekit.plan({**recipe(llava, tmp_path), "model": settings, "data": {"train": "example:tales.txt"}})


def test_answers_to_pictures_are_those_of_transformers_on_each_row(saved, tmp_path):
    from transformers import AutoModelForImageTextToText

    run = tunekit.train(recipe(saved, tmp_path, adapter={"type": "lora", "rank": RANK}))
    answers = compare_answers(saved, run, tmp_path, AutoModelForImageTextToText)
    # A random Gemma 3, whose embeddings are scaled and tied, says what it read last.
    assert len(set(answers)) > 1 or saved.name.startswith("gemma3")


def compare_answers(saved, run, tmp_path, auto_class):
    """Compare the answers to all rows with those of transformers to each, and return them."""
    from peft import PeftModel
    from transformers import AutoProcessor

    rows = saved / "data" / "rows.jsonl"
    tunekit.generate(run, rows, tmp_path / "out.jsonl", max_new_tokens=6, batch_size=3)
    answers = [json.loads(line)["answer"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    base = auto_class.from_pretrained(saved / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, run.model_path).eval()
    processor = AutoProcessor.from_pretrained(run.model_path)
    expected = []
    for line in rows.read_text().splitlines():
        content = json.loads(line)["messages"][0]["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        text = AutoProcessor.from_pretrained(saved / "model").apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        inputs = processor(text=[text], **media_of(parts, saved / "data"), **TENSORS)
        ids = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=processor.tokenizer.eos_token_id)
        new = ids[0, inputs["input_ids"].shape[1] :]
        expected.append(processor.tokenizer.decode(new, skip_special_tokens=True))
    assert answers == expected
    return answers
