"""Conversations with pictures: in a talk, at a terminal and as a client of OpenAI sees them, as plain Transformers."""

import base64
import re
import subprocess
import sys
from threading import Event

import openai
import pytest
import torch
from PIL import Image

import tunekit
from tests.tiny import save_tiny_model
from tests.vision import save_rows, save_tiny_vision_model
from tests.waiting import LIMIT_SECONDS
from tunekit.errors import RunError
from tunekit.inference import conversations
from tunekit.inference.inference_model import find_trained, load


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a tiny LLaVA, whose pictures are in `data`."""
    folder = tmp_path_factory.mktemp("pictures")
    save_tiny_vision_model(folder / "model", "llava")
    save_rows(folder / "data")
    return tunekit.train(
        {
            "model": str(folder / "model"),
            "data": {"train": str(folder / "data" / "rows.jsonl"), "max_length": 512},
            "adapter": {"type": "lora", "rank": 4},
            "train": {"max_steps": 2, "global_batch_size": 4, "learning_rate": 1e-2},
            "output": {"dir": str(folder / "run"), "sample_prompts": []},
        }
    )


@pytest.fixture(scope="module")
def pictures(run):
    return run.path.parent / "data"


def asked(pictures, number=0, text="what colour?"):
    picture = tunekit.picture_part(pictures / f"{number}.png")
    return {"role": "user", "content": [picture, {"type": "text", "text": text}]}


def greedy(run, pictures, messages, numbers):
    """Return what transformers generates of a conversation with the model's own processor."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, AutoProcessor

    base = AutoModelForImageTextToText.from_pretrained(pictures.parent / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, run.model_path).eval()
    processor = AutoProcessor.from_pretrained(pictures.parent / "model")
    parts = [
        {
            **turn,
            "content": turn["content"]
            if isinstance(turn["content"], list)
            else [{"type": "text", "text": turn["content"]}],
        }
        for turn in messages
    ]
    text = processor.apply_chat_template(parts, add_generation_prompt=True, tokenize=False)
    images = [Image.open(pictures / f"{number}.png").convert("RGB") for number in numbers]
    inputs = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=processor.tokenizer.eos_token_id)
    return processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def talk(run):
    with tunekit.chat(run, device="cpu") as opened:
        yield opened


def said(talk, messages, **options):
    return "".join(talk.say(messages, max_new_tokens=8, **options))


@pytest.mark.slow
def test_an_answer_to_pictures_is_what_transformers_generates(talk, run, pictures):
    assert talk.reads_pictures
    first = said(talk, [asked(pictures)])
    assert first == greedy(run, pictures, [asked(pictures)], [0])
    history = [asked(pictures), {"role": "assistant", "content": "red"}, asked(pictures, 1, "and this?")]
    assert said(talk, history) == greedy(run, pictures, history, [0, 1])
    assert talk.last.num_tokens > 0
    texts = [{"role": "user", "content": [{"type": "text", "text": "say hi"}]}]
    assert said(talk, texts) == said(talk, [{"role": "user", "content": "say hi"}])


URL = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
WRONG = {
    "a URL": (URL, "'https://example.com/a.png' is not a data URL"),
    "a path": ({"type": "image", "image": "/etc/hostname"}, "'/etc/hostname' is not a data URL"),
    "a text": ({"type": "image", "image": "data:image/png;base64,aGk="}, "is not an image that can be read"),
    "nothing": ({"type": "image"}, "must be a path, a data URL or an image|0 images"),
    "a video": ({"type": "video", "video": "a.mp4"}, "is of type video, but only text and images are supported"),
    "a part that is a number": (5, "must be an object"),
    "a token of a picture": ({"type": "text", "text": "<image>"}, "2 tokens <image> for 1 image"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_picture_is_told_and_the_talk_goes_on(kind, talk, pictures):
    part, problem = WRONG[kind]
    question = asked(pictures)
    with pytest.raises(RunError, match=problem):
        said(talk, [{**question, "content": [*question["content"], part]}])
    assert said(talk, [question])


def test_what_is_no_picture_is_refused_before_it_is_sent(tmp_path):
    (tmp_path / "a.txt").write_text("hi")
    for name, problem in (("a.txt", "'a.txt' is not an image"), ("b.png", "no image 'b.png'")):
        with pytest.raises(RunError, match=problem):
            tunekit.picture_part(tmp_path / name)


def test_clips_and_videos_are_parts_too_and_are_looked_at_before(tmp_path):
    from tests.audio import save_clip
    from tests.video import save_video
    from tunekit.inference.chat import media_part

    save_clip(tmp_path / "a.wav", 0.2)
    save_video(tmp_path / "a.mp4", 64, 48, 2, 2)
    for kind, name in (("audio", "a.wav"), ("video", "a.mp4")):
        part = media_part(kind, tmp_path / name)
        assert part["type"] == kind and part[kind].startswith(f"data:{kind}/")
        other = {"audio": "a.mp4", "video": "a.wav"}[kind]
        with pytest.raises(RunError, match=rf"'{other}' (is not audio|has no video)") as caught:
            media_part(kind, tmp_path / other)
        assert caught.value.hint.startswith("pass ")


def test_a_model_of_texts_says_that_it_reads_no_pictures(tmp_path):
    found = find_trained("pico")
    assert not conversations.media_read(found)
    loaded = type("Loaded", (), {"found": found})()
    with pytest.raises(RunError, match="pico is a text-only model"):
        conversations.inputs_of(loaded, [{"role": "user", "content": [URL]}])


@pytest.mark.slow
def test_the_command_adds_pictures_to_the_next_message(run, pictures):
    lines = f"/image {pictures}/0.png\nwhat colour?\n/clear\n/image {pictures}/1.png\nwhat colour?\n"
    command = [sys.executable, "-m", "tunekit", "chat", str(run.path), "--device", "cpu", "--max-new-tokens", "8"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    expected = [greedy(run, pictures, [asked(pictures, number)], [number]) for number in (0, 1)]
    plain = ["".join(letter for letter in answer if letter.isprintable()) for answer in expected]
    assert [line.rstrip() for line in done.stdout.splitlines()] == [answer.rstrip() for answer in plain]
    done = subprocess.run(command, input="/image nothing.png\n", capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no image 'nothing.png'" in done.stderr


def serving(path):
    words = [sys.executable, "-m", "tunekit", "serve", str(path), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    told = ""
    while "-d '" not in told:
        line = process.stdout.readline()
        assert line, f"it ended with {process.wait()}"
        told += line
    return process, openai.OpenAI(
        base_url=re.search(r"http://127\.0\.0\.1:\d+/v1", told)[0], api_key="none", max_retries=0, timeout=LIMIT_SECONDS
    )


@pytest.fixture(scope="module")
def client(run):
    process, client = serving(run.path)
    with client:
        yield client
    process.kill()
    process.wait()
    process.stdout.close()


def of_openai(pictures, number=0):
    raw = base64.b64encode((pictures / f"{number}.png").read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{raw}"}}
    return {"role": "user", "content": [image, {"type": "text", "text": "what colour?"}]}


@pytest.mark.slow
def test_a_client_of_openai_sends_pictures_and_gets_the_same_answer_whole_and_in_pieces(client, run, pictures):
    expected = greedy(run, pictures, [asked(pictures)], [0])
    options = {"model": run.name, "messages": [of_openai(pictures)], "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.content == expected
    chunks = list(client.chat.completions.create(**options, stream=True))
    # Transformers' server leaves out of a stream what is not a whole character yet when the answer is cut off.
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.rstrip(
        "\N{REPLACEMENT CHARACTER}"
    )
    texts = client.chat.completions.create(**options | {"messages": [{"role": "user", "content": "say hi"}]})
    assert texts.choices[0].message.content


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in WRONG if kind != "nothing"])
def test_a_client_is_told_what_is_wrong_with_a_picture(kind, client, run, pictures):
    part, problem = WRONG[kind]
    question = of_openai(pictures)
    messages = [{**question, "content": [*question["content"], part]}]
    with pytest.raises(openai.BadRequestError, match=problem):
        client.chat.completions.create(model=run.name, messages=messages, temperature=0, max_tokens=8)
    with pytest.raises(openai.BadRequestError, match="accepts 1,024 including the answer"):
        client.chat.completions.create(
            model=run.name,
            messages=[{**question, "content": [*question["content"], {"type": "text", "text": "long " * 500}]}],
        )


def test_a_question_with_a_picture_is_not_answered_without_it():
    from starlette.testclient import TestClient

    from tunekit.inference.endpoint import make_app

    app = make_app(load(find_trained("pico"), device="cpu"), "pico", Event())
    messages = [{"role": "user", "content": [URL, {"type": "text", "text": "what colour?"}]}]
    with TestClient(app) as client:
        answer = client.post("/v1/chat/completions", json={"model": "pico", "messages": messages, "max_tokens": 1})
    assert answer.status_code == 400 and "pico is a text-only model" in answer.text


@pytest.mark.slow
def test_a_model_of_texts_refuses_pictures_and_sounds_of_a_client(tmp_path):
    save_tiny_model(tmp_path / "text")
    process, client = serving(tmp_path / "text")
    with client:
        for part in (URL, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}):
            with pytest.raises(openai.BadRequestError, match="text is a text-only model"):
                client.chat.completions.create(model="text", messages=[{"role": "user", "content": [part]}])
    process.kill()
    process.wait()
    process.stdout.close()
