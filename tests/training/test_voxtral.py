"""Voxtral is trained on in Mistral's own chat format, as mistral-common and plain Transformers read it."""

import base64
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import tunekit
from tests.audio import save_audio_rows, save_clip
from tests.training.test_vision import compare_with_plain_transformers, recipe
from tests.voxtral import CHUNK_TOKENS, expected, save_tekken, save_tiny_voxtral
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.media.expand import MediaTokens, features_of
from tunekit.data.media.kinds import media_of
from tunekit.data.prepare import prepare_data
from tunekit.data.sources.load import load_data
from tunekit.data.tokenization.fast_bpe import word_encoder
from tunekit.errors import DataError, ModelError, PlanError
from tunekit.inference.conversations import inputs_of
from tunekit.inference.inference_model import find_trained, load
from tunekit.models.load import load_processor, load_tokenizer
from tunekit.recipe.sections.data import DataSection
from tunekit.recipe.sections.model import ModelSection

needs_mistral_common = pytest.mark.skipif(find_spec("mistral_common") is None, reason="needs mistral-common")


def turn(role, content):
    return {"role": role, "content": content}


CHATS = {
    "one turn": [turn("user", "what is the rain"), turn("assistant", "the water")],
    "several turns": [
        turn("system", "be nice "),
        turn("user", " hello  \n"),
        turn("assistant", "é 中文 😀"),
        turn("user", "and?\n\n2024"),
        turn("assistant", "so  "),
    ],
    "two system messages": [
        turn("system", "c"),
        turn("system", "d"),
        turn("user", "a"),
        turn("assistant", "b "),
        turn("user", ""),
        turn("assistant", " e\n"),
    ],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a tiny Voxtral and rows of clips, of which one is longer than a chunk."""
    folder = tmp_path_factory.mktemp("voxtral")
    save_tiny_voxtral(folder / "model")
    save_audio_rows(folder / "data")
    save_clip(folder / "data" / "2.wav", 30.5)
    return folder


def messages_of(folder):
    return [json.loads(line)["messages"] for line in (folder / "rows.jsonl").read_text().splitlines()]


def write_rows(folder, *chats):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"messages": messages}) + "\n" for messages in chats]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")


def sequences_of(model, data, **section):
    """Tokens and labels of rows, and the processor of their clips."""
    loaded = ModelSection(path=str(model))
    tokenizer = load_tokenizer(loaded)
    rows = load_data(DataSection(train=str(data / "rows.jsonl"), max_length=512), learner_of("sft"))
    media = MediaTokens(load_processor(loaded, tokenizer, ["audio"])) if rows.train[0].media else None
    split = prepare_data(DataSection(train=str(data / "rows.jsonl"), max_length=512), rows, tokenizer, media=media)[0]
    return split.tokens[0].sequences, rows.train[0].rows, media


def loss_of(model, _, saved):
    """The mean over the answers' tokens, with tokens, labels and features by the format."""
    losses = []
    for messages in messages_of(saved / "data"):
        ids, labels, features = expected(saved / "model", messages, saved / "data")
        logits = model(input_ids=ids, input_features=features).logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="none"))
    every = torch.cat(losses)
    return every[every != 0].mean()


@pytest.mark.parametrize("version", ["v7", "v11", "v13"])
def test_tokens_and_labels_of_chats_are_those_of_the_format(version, tmp_path):
    save_tiny_voxtral(tmp_path / "model", version)
    write_rows(tmp_path / "data", *CHATS.values())
    sequences, _, _ = sequences_of(tmp_path / "model", tmp_path / "data")
    for sequence, messages in zip(sequences, CHATS.values(), strict=True):
        ids, labels, _ = expected(tmp_path / "model", messages, tmp_path)
        assert list(sequence["input_ids"]) == ids[0].tolist()
        assert list(sequence["labels"]) == labels[0].tolist()


def test_tokens_and_features_of_clips_are_those_of_the_format(saved):
    sequences, rows, media = sequences_of(saved / "model", saved / "data")
    for sequence, row, messages in zip(sequences, rows, messages_of(saved / "data"), strict=True):
        ids, labels, features = expected(saved / "model", messages, saved / "data")
        assert list(sequence["input_ids"]) == ids[0].tolist()
        assert list(sequence["labels"]) == labels[0].tolist()
        if features is not None:
            own = features_of(media.processor, ["[AUDIO]" * len(media_of(row))], [media_of(row)])
            assert own["input_features"].equal(features)
            assert (ids == 24).sum() == CHUNK_TOKENS * len(features)


@needs_mistral_common
@pytest.mark.parametrize("version", ["v7", "v11", "v13"])
@pytest.mark.parametrize("name", CHATS)
def test_the_format_of_chats_is_that_of_mistral_common(name, version, tmp_path):
    from transformers import MistralCommonBackend

    save_tekken(tmp_path, version)
    ids, _, _ = expected_of_text(tmp_path, CHATS[name])
    assert (
        MistralCommonBackend.from_pretrained(tmp_path, mode="finetuning").apply_chat_template(
            CHATS[name], return_dict=False
        )
        == ids[0].tolist()
    )


def expected_of_text(folder, messages):
    from transformers import WhisperFeatureExtractor

    WhisperFeatureExtractor(feature_size=16).save_pretrained(folder)
    return expected(folder, messages, folder)


@needs_mistral_common
def test_the_format_of_clips_is_that_of_the_processor_in_transformers(saved):
    from transformers import AutoProcessor, MistralCommonBackend

    processor = AutoProcessor.from_pretrained(saved / "model")
    assert isinstance(processor.tokenizer, MistralCommonBackend)
    for messages in messages_of(saved / "data"):
        question, answer = messages
        asked = [{**question, "content": with_bytes(question["content"], saved / "data")}]
        own = processor.apply_chat_template(asked)
        ids, labels, features = expected(saved / "model", messages, saved / "data")
        num_answer = int((labels != -100).sum())
        assert own["input_ids"].equal(ids[:, :-num_answer])
        spoken = processor.tokenizer(answer["content"], add_special_tokens=False)["input_ids"]
        assert ids[0, -num_answer:].tolist() == [*spoken, processor.tokenizer.eos_token_id]
        if features is None:
            assert "input_features" not in own
        else:
            torch.testing.assert_close(own["input_features"], features, atol=0, rtol=0)


def with_bytes(content, folder):
    """A content whose clips are in it as WAV of one channel, which mistral-common reads."""
    if isinstance(content, str):
        return content
    import io

    import soundfile

    parts = []
    for part in content:
        if part["type"] == "audio":
            samples, rate = soundfile.read(
                folder / (part.get("audio") or part["path"]), dtype="float32", always_2d=True
            )
            file = io.BytesIO()
            soundfile.write(file, samples.mean(1), rate, format="WAV", subtype="FLOAT")
            part = {"type": "audio", "base64": base64.b64encode(file.getvalue()).decode()}
        parts.append(part)
    return parts


@pytest.mark.parametrize("adapter", [pytest.param("full", marks=pytest.mark.slow), "lora"])
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["rows", "packed"])
def test_loss_and_gradients_of_chats_are_those_of_plain_transformers(packed, adapter, saved, tmp_path):
    from transformers import AutoModelForMultimodalLM

    (tmp_path / "model").symlink_to(saved / "model")
    write_rows(tmp_path / "data", *(list(CHATS.values()) * 3)[:8])
    compare_with_plain_transformers(
        adapter,
        tmp_path,
        tmp_path,
        packed=packed,
        auto_class=AutoModelForMultimodalLM,
        loss_of=loss_of,
    )


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_loss_and_gradients_of_clips_are_those_of_plain_transformers(packed, adapter, saved, tmp_path):
    from transformers import AutoModelForMultimodalLM

    compare_with_plain_transformers(
        adapter, saved, tmp_path, packed=packed, auto_class=AutoModelForMultimodalLM, loss_of=loss_of
    )


REFUSED = {
    "a mark of the format": (
        [turn("user", "say [INST]"), turn("assistant", "a")],
        r"a text has \[INST\], which is a token",
    ),
    "the end token in an answer": (
        [turn("user", "a"), turn("assistant", "b</s>")],
        "a text has </s>, which is a token",
    ),
    "two questions": (
        [turn("user", "a"), turn("user", "b"), turn("assistant", "c")],
        "user and assistant must alternate",
    ),
    "a late system message": (
        [turn("user", "a"), turn("assistant", "b"), turn("system", "c"), turn("user", "d"), turn("assistant", "e")],
        "system messages must come before all others",
    ),
    "a system message beside a clip": (
        [
            turn("system", "be nice"),
            turn("user", [{"type": "audio", "audio": "0.wav"}, {"type": "text", "text": "what?"}]),
            turn("assistant", "a"),
        ],
        "a conversation with audio has no system message",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_chat_that_mistral_common_reads_otherwise_is_refused(kind, saved, tmp_path):
    messages, words = REFUSED[kind]
    write_rows(tmp_path / "data", CHATS["one turn"], messages)
    save_clip(tmp_path / "data" / "0.wav", 0.5)
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: the chat template rejects the row: .*{words}"):
        sequences_of(saved / "model", tmp_path / "data")


def test_the_plan_names_the_format_and_counts_the_weights_of_the_tower(saved, tmp_path):
    from transformers import AutoModelForMultimodalLM

    plan = tunekit.plan(recipe(saved, tmp_path, adapter="lora"))
    (reason,) = [reason for reason in plan.reasons if reason.topic == "chat template"]
    assert reason.choice == "voxtral"
    assert reason.why == "answers end with </s>, the tokenizer's end token; the model comes without a chat template"
    (audio,) = [reason for reason in plan.reasons if reason.topic == "audio"]
    assert audio.why.endswith("its activations are not in the estimate")
    model = AutoModelForMultimodalLM.from_pretrained(saved / "model")
    assert plan.memory.parts["weights"] == 4 * sum(parameter.numel() for parameter in model.parameters())


def test_the_plan_refuses_the_first_row_that_the_format_has_no_place_for(saved, tmp_path):
    (tmp_path / "model").symlink_to(saved / "model")
    write_rows(tmp_path / "data", CHATS["one turn"], REFUSED["two questions"][0])
    with pytest.raises(DataError, match="must alternate"):
        tunekit.plan(recipe(tmp_path, tmp_path))


def test_plain_texts_begin_with_the_token_that_mistral_common_puts_there(saved, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text(json.dumps({"text": "what is the rain"}) + "\n")
    sequences, _, _ = sequences_of(saved / "model", tmp_path / "data")
    tokenizer = load_tokenizer(ModelSection(path=str(saved / "model")))
    spoken = tokenizer("what is the rain", add_special_tokens=False)["input_ids"]
    assert list(sequences[0]["input_ids"]) == [1, *spoken, 2]


@needs_mistral_common
@pytest.mark.parametrize("text", ["what is the rain", "", "é 中文 😀 </s>"])
def test_the_tokens_of_a_text_are_those_of_mistral_common(text, saved):
    from transformers import MistralCommonBackend

    own = MistralCommonBackend.from_pretrained(saved / "model")
    tokenizer = load_tokenizer(ModelSection(path=str(saved / "model")))
    if "</s>" not in text:
        assert tokenizer(text)["input_ids"] == own(text)["input_ids"]
    for role in ("bos", "eos", "pad", "unk"):
        assert getattr(tokenizer, f"{role}_token_id") == getattr(own, f"{role}_token_id")
    assert len(tokenizer) == len(own)


@needs_mistral_common
@pytest.mark.slow
def test_a_whole_vocabulary_has_the_tokens_of_mistral_common(saved, tmp_path):
    import mistral_common
    from transformers import MistralCommonBackend

    from tests.voxtral import SPECIAL

    content = json.loads((Path(mistral_common.__file__).parent / "data" / "tekken_240911.json").read_text())
    content["config"]["version"] = "v7"
    num_special = content["config"]["default_num_special_tokens"]
    content["special_tokens"] = [
        {"rank": rank, "token_str": SPECIAL.get(rank, f"<SPECIAL_{rank}>"), "is_control": True}
        for rank in range(num_special)
    ]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_bytes((saved / "model" / "config.json").read_bytes())
    own = MistralCommonBackend.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelSection(path=str(tmp_path)))
    words = word_encoder(tokenizer)
    root = Path(__file__).parents[2]
    texts = [file.read_text() for file in (*root.glob("docs/guides/*.md"), *root.glob("webui/locales/zh/*.yaml"))]
    pieces = [text[start : start + 200] for text in texts for start in range(0, len(text), 200)]
    pieces = [piece for piece in pieces if not any(mark in piece for mark in SPECIAL.values())]
    assert len(pieces) > 300
    for piece in pieces:
        ids = own(piece, add_special_tokens=False)["input_ids"]
        assert tokenizer(piece, add_special_tokens=False)["input_ids"] == ids
        assert list(words.encode(piece)) == ids


def test_a_template_that_begins_clips_itself_is_refused(saved, tmp_path):
    template = "{{ bos_token }}{% for message in messages %}[INST][BEGIN_AUDIO][AUDIO][/INST]{% endfor %}"
    (tmp_path / "own.jinja").write_text(template)
    section = ModelSection(path=str(saved / "model"), chat_template=str(tmp_path / "own.jinja"))
    with pytest.raises(ModelError, match=r"writes \[BEGIN_AUDIO\]") as caught:
        load_processor(section, load_tokenizer(section))
    assert caught.value.hint == "set model.chat_template=voxtral"


def test_other_methods_and_towers_are_refused_as_for_other_models_that_hear(saved, tmp_path):
    with pytest.raises(PlanError, match=r"adapter\.projector: towers are only trained on images"):
        tunekit.plan(recipe(saved, tmp_path, adapter={"type": "full", "projector": "full"}))


@pytest.mark.slow
def test_qlora_begins_near_the_loss_of_the_model(saved, tmp_path):
    from transformers import AutoModelForMultimodalLM

    run = tunekit.train(recipe(saved, tmp_path, adapter="qlora"))
    with torch.no_grad():
        loss = loss_of(AutoModelForMultimodalLM.from_pretrained(saved / "model"), None, saved).item()
    assert run.metrics()["loss"].iloc[0] == pytest.approx(loss, rel=0.05)


@pytest.fixture(scope="module")
def trained(saved, tmp_path_factory):
    """A run on clips, and its merged model."""
    folder = tmp_path_factory.mktemp("trained")
    wanted = recipe(saved, folder, adapter={"type": "lora", "rank": 4})
    wanted["data"]["eval"] = wanted["data"]["train"]
    wanted["output"] = {"dir": str(folder / "run")}
    run = tunekit.train(wanted)
    tunekit.export(run, folder / "merged", kind="merged")
    return run, folder / "merged"


@pytest.mark.slow
def test_the_result_has_both_forms_of_the_tokenizer_and_computes_the_losses_of_the_run(saved, trained):
    from transformers import AutoModelForMultimodalLM

    run, merged = trained
    for folder in (run.model_path, merged):
        assert (folder / "tekken.json").read_bytes() == (saved / "model" / "tekken.json").read_bytes()
        assert json.loads((folder / "preprocessor_config.json").read_text())["processor_class"] == "VoxtralProcessor"
        again, own = (load_tokenizer(ModelSection(path=str(path))) for path in (folder, saved / "model"))
        assert again.chat_template == own.chat_template
        assert again("what </s>")["input_ids"] == own("what </s>")["input_ids"]
    model = AutoModelForMultimodalLM.from_pretrained(merged, dtype=torch.float32)
    with torch.no_grad():
        loss = loss_of(model, None, saved).item()
    assert run.metrics()["eval_loss"].dropna().iloc[-1] == pytest.approx(loss, rel=1e-4)
    (scored,) = (score for score in tunekit.evaluate(run, before=False).scores if score.name == "loss")
    assert scored.after.value == pytest.approx(loss, rel=1e-4)


@pytest.mark.slow
def test_chats_ask_in_the_format_with_their_clips(saved, trained):
    run, _ = trained
    assert next(sample["prompt"] for sample in run.samples()) == "[audio 0.wav] what?"
    loaded = load(find_trained(run.path), device="cpu")
    data = base64.b64encode((saved / "data" / "4.wav").read_bytes()).decode()
    parts = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, {"type": "text", "text": "what?"}]
    inputs = inputs_of(loaded, [turn("user", parts)])
    own = [turn("user", [{"type": "audio", "audio": "4.wav"}, parts[1]])]
    ids, _, features = expected(saved / "model", own, saved / "data")
    assert inputs["input_ids"].equal(ids)
    assert inputs["input_features"].equal(features)


@pytest.mark.slow
def test_a_run_starts_from_the_result_of_another_one(saved, trained, tmp_path):
    from transformers import AutoModelForMultimodalLM

    run, _ = trained
    wanted = recipe(saved, tmp_path, adapter="lora")
    after = tunekit.train({**wanted, "model": str(run.model_path)})
    assert (after.model_path / "tekken.json").is_file()
    whole = tunekit.train(recipe(saved, tmp_path / "whole"))
    after = tunekit.train({**recipe(saved, tmp_path / "after", adapter="lora"), "model": str(whole.model_path)})
    with torch.no_grad():
        loss = loss_of(AutoModelForMultimodalLM.from_pretrained(whole.model_path), None, saved).item()
    assert after.metrics()["loss"].iloc[0] == pytest.approx(loss, rel=1e-5)
    added = recipe(saved, tmp_path / "added", adapter="lora")
    added["model"] = {"path": str(saved / "model"), "add_special_tokens": ["<note>"]}
    assert not (tunekit.train(added).model_path / "tekken.json").exists()


@needs_mistral_common
@pytest.mark.slow
def test_transformers_reads_the_result_by_mistral_common(trained):
    from transformers import AutoProcessor, MistralCommonBackend

    _, merged = trained
    processor = AutoProcessor.from_pretrained(merged)
    assert isinstance(processor.tokenizer, MistralCommonBackend)
    assert processor.apply_chat_template([turn("user", "what?")])["input_ids"].shape[0] == 1
