"""Of a Qwen2.5-Omni that speaks too, the part that reads and writes is trained, as plain Transformers trains it."""

import json
from importlib.util import find_spec

import pytest
import torch

import tunekit
from tests.audio import save_clip
from tests.omni import save_whole_omni
from tests.tiny import saved_weights
from tests.training.test_vision import compare_answers, compare_with_plain_transformers, converted, loss_of, recipe
from tests.video import SIZES, save_video
from tests.vision import COLOURS
from tunekit.data.media.collate import MediaCollator, in_one_row
from tunekit.data.media.kinds import COLUMN
from tunekit.errors import ModelError
from tunekit.models.documents import tell_documents_apart
from tunekit.models.load import load_model, load_processor, load_tokenizer
from tunekit.probe.model import probe_model, sketch_model
from tunekit.recipe.sections.model import ModelSection

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a whole model, and rows of text, pictures, clips and videos, some of several kinds."""
    folder = tmp_path_factory.mktemp("omni")
    save_whole_omni(folder / "model")
    save_mixed_rows(folder / "data")
    return folder


KINDS = [["image"], ["audio"], [], ["video"], ["image", "audio"], ["audio", "video"], ["video", "image", "audio"], []]
"""Kinds of the media of each row, in their order."""


def save_mixed_rows(folder):
    """Write rows with media of the kinds that are listed."""
    from PIL import Image

    folder.mkdir()
    lines = []
    for number, kinds in enumerate(KINDS):
        parts = []
        for kind in kinds:
            name = f"{number}.{({'image': 'png', 'audio': 'wav', 'video': 'mp4'})[kind]}"
            if kind == "image":
                Image.effect_noise((30 + 11 * number, 60), 60).convert("RGB").save(folder / name)
            elif kind == "audio":
                save_clip(folder / name, 0.3 + 0.1 * number, seed=number)
            else:
                save_video(folder / name, *SIZES[number % len(SIZES)], seed=number)
            parts += [{"type": kind, kind: name}, {"type": "text", "text": "and "}]
        asked = [*parts, {"type": "text", "text": "what?"}]
        answer = {"role": "assistant", "content": COLOURS[number % len(COLOURS)]}
        lines.append(json.dumps({"messages": [{"role": "user", "content": asked}, answer]}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")


class Thinker:
    """Loads the thinker of a whole model by its own class."""

    @staticmethod
    def from_pretrained(*args, **kwargs):
        from transformers import Qwen2_5OmniThinkerForConditionalGeneration

        return Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(*args, **kwargs)


@pytest.mark.parametrize("packed", [False, 512], ids=["rows", "packed"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_the_first_loss_and_all_gradients_are_those_of_the_thinker(adapter, packed, whole, tmp_path):
    run = compare_with_plain_transformers(adapter, whole, tmp_path, packed=packed, auto_class=Thinker)
    data = run.plan.data
    assert data.has_pictures and data.has_audio and data.has_videos


def test_only_the_thinker_is_loaded_and_counted(whole):
    section = ModelSection(path=str(whole / "model"))
    model = load_model(section, dtype="float32", device="cpu")
    num_params = sum(parameter.numel() for parameter in model.parameters())
    assert type(model).__name__ == "Qwen2_5OmniThinkerForConditionalGeneration"
    facts = probe_model(section)
    assert facts.architecture == type(model).__name__
    assert facts.num_params == num_params
    assert not any(name.startswith(("talker", "token2wav", "thinker")) for name in facts.tensors)


def test_a_config_alone_gives_the_tensors_of_the_thinker(whole, tmp_path):
    (tmp_path / "config.json").write_text((whole / "model" / "config.json").read_text())
    sketched, probed = (sketch_model(ModelSection(path=str(path))) for path in (tmp_path, whole / "model"))
    assert sketched.num_params == probed.num_params
    assert (sketched.architecture, sketched.rope) == (probed.architecture, probed.rope)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_result_loads_by_its_class_and_in_the_whole_model(kind, whole, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    run = tunekit.train(recipe(whole, tmp_path, adapter=kind))
    processor = AutoProcessor.from_pretrained(run.model_path)
    model = AutoModelForMultimodalLM.from_pretrained(whole / "model", dtype=torch.float32)
    if kind == "full":
        alone = AutoModelForMultimodalLM.from_pretrained(run.model_path, dtype=torch.float32)
        model.thinker.load_state_dict(alone.state_dict())
    else:
        base = Thinker.from_pretrained(whole / "model", dtype=torch.float32)
        alone = PeftModel.from_pretrained(base, run.model_path)
        model.thinker = PeftModel.from_pretrained(model.thinker, run.model_path).merge_and_unload()
        tunekit.export(run, tmp_path / "merged", kind="merged")
        merged = AutoModelForMultimodalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    expected = loss_of(alone, processor, whole).item()
    if kind == "lora":
        assert loss_of(merged, processor, whole).item() == pytest.approx(expected, rel=1e-5)
    assert loss_of(model.thinker, processor, whole).item() == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(loss_of(Thinker.from_pretrained(whole / "model"), processor, whole).item())
    (row,) = [line for line in (run.model_path / "README.md").read_text().splitlines() if line.startswith("| Part ")]
    assert "`Qwen2_5OmniThinkerForConditionalGeneration`" in row
    assert ("adapt the `thinker` of the whole model" in row) == (kind == "lora")


def test_answers_and_losses_are_those_of_the_thinker(whole, tmp_path):
    wanted = recipe(whole, tmp_path, adapter={"type": "lora", "rank": 4})
    wanted["data"]["eval"] = wanted["data"]["train"]
    run = tunekit.train(wanted)
    compare_answers(whole, run, tmp_path, Thinker)
    (scored,) = (score for score in tunekit.evaluate(run, before=False).scores if score.name == "loss")
    assert scored.after.value == pytest.approx(run.metrics()["eval_loss"].dropna().iloc[-1], rel=1e-5)


def test_losses_of_several_steps_are_those_of_a_plain_loop(whole, tmp_path):
    """Gradient descent on the whole thinker but for its towers, over all rows in each step."""
    from transformers import AutoProcessor

    train = {"max_steps": 4, "learning_rate": 0.1}
    run = tunekit.train(recipe(whole, tmp_path, adapter="full", train=train))
    processor = AutoProcessor.from_pretrained(whole / "model")
    model = Thinker.from_pretrained(whole / "model", dtype=torch.float32).train()
    trained = [p for name, p in model.named_parameters() if "audio_tower" not in name and "visual" not in name]
    optimizer, losses = torch.optim.SGD(trained, lr=0.1), []
    for _ in range(4):
        loss = loss_of(model, processor, whole)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert run.metrics()["loss"].tolist() == pytest.approx(losses, rel=1e-4)


def test_training_goes_on_from_a_result_as_from_the_whole_model(whole, tmp_path):
    first = tunekit.train(recipe(whole, tmp_path / "first", adapter="full"))
    wanted = recipe(whole, tmp_path / "next", adapter="lora")
    run = tunekit.train({**wanted, "model": str(first.model_path)})
    assert saved_weights(run.model_path)


def rows_of(folder, processor):
    """Rows as the collator takes them, one for each line."""
    from tunekit.data.formats.row_formats import learner_of
    from tunekit.data.media.expand import MediaTokens
    from tunekit.data.sources.load import load_data
    from tunekit.data.tokenization.encode import Encoder
    from tunekit.recipe.sections.data import DataSection

    section = DataSection(train=str(folder / "data" / "rows.jsonl"), max_length=512)
    rows = load_data(section, learner_of("sft")).train[0]
    encoder = Encoder(rows, processor.tokenizer, MediaTokens(processor))
    for row in rows.rows:
        media = [json.dumps(medium) for medium in row.get(COLUMN) or ()]
        yield {"media_text": encoder.text_of(row, "a row"), "media": media}


def batch_of(folder, processor):
    """Rows with their own tokens, and what the processor makes of each conversation by itself."""
    rows, alone = list(rows_of(folder, processor)), [inputs for inputs, _ in converted(processor, folder)]
    for row, inputs in zip(rows, alone, strict=True):
        ids = inputs["input_ids"][0].tolist()
        row |= {"input_ids": ids, "labels": ids}
    return rows, alone


@pytest.fixture(scope="module")
def loaded(whole):
    section = ModelSection(path=str(whole / "model"))
    model = load_model(section, dtype="float32", device="cpu")
    return model, load_processor(section, load_tokenizer(section))


def test_a_batch_has_the_tokens_and_the_features_of_the_processor(whole, loaded):
    rows, alone = batch_of(whole, loaded[1])
    batch = MediaCollator(loaded[1], scores_positions=False).texts(rows)
    for number, inputs in enumerate(alone):
        length = inputs["input_ids"].shape[1]
        assert batch["input_ids"][number, :length].equal(inputs["input_ids"][0])
        assert batch["attention_mask"][number].sum() == length
    names = {name for inputs in alone for name in inputs} - {"input_ids", "attention_mask"}
    assert {"pixel_values", "pixel_values_videos", "input_features", "video_second_per_grid"} <= names
    for name in names:
        torch.testing.assert_close(batch[name], torch.cat([inputs[name] for inputs in alone if name in inputs]))


def positions_of(model, inputs):
    """Positions that the model gives its decoder, `(kinds, rows, tokens)`."""
    given = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: given.append(kwargs["position_ids"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False)
    hook.remove()
    return given[0]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_positions_in_a_batch_are_those_of_each_row_alone(packed, whole, loaded):
    model, processor = loaded
    rows, alone = batch_of(whole, processor)
    batch = MediaCollator(processor, scores_positions=False).texts(rows)
    tell_documents_apart(model) if not model.model._forward_pre_hooks else None
    positions = positions_of(model, in_one_row(batch) if packed else batch)
    start = 0
    for number, inputs in enumerate(alone):
        length = inputs["input_ids"].shape[1]
        own = positions[-3:, 0, start : start + length] if packed else positions[:, number, :length]
        assert own.equal(positions_of(model, inputs)[:, 0])
        start += length


@pytest.mark.parametrize("name", ["use_audio_in_video", "load_audio_from_video"])
def test_audio_in_videos_is_refused(name, whole, tmp_path):
    wanted = recipe(whole, tmp_path)
    wanted["model"] = {"path": str(whole / "model"), "video_processor": {name: True}}
    with pytest.raises(ModelError, match=rf"video_processor\.{name}: \w+ has no such setting"):
        tunekit.train(wanted)


def test_limits_of_videos_that_the_processor_would_not_keep_are_refused(whole):
    """Its class sets the size of videos itself (transformers 5.24), whatever their processor has."""
    for settings in (
        {"max_pixels": 50176},
        {"min_pixels": 1568},
        {"size": {"shortest_edge": 1568, "longest_edge": 9999}},
    ):
        section = ModelSection(path=str(whole / "model"), video_processor=settings)
        with pytest.raises(ModelError, match="Qwen2_5OmniProcessor always sets"):
            load_processor(section, load_tokenizer(section))
    section = ModelSection(path=str(whole / "model"), video_processor={"do_sample_frames": True, "fps": 2})
    assert load_processor(section, load_tokenizer(section)).video_processor.fps == 2
