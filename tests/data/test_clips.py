"""Audio clips of rows: every way to write them, every way in which they are broken, and their tokens."""

import base64
import io
import json

import numpy as np
import pytest
import soundfile

from tests.audio import ALONE, FAMILIES, save_audio_rows, save_clip
from tests.vision import byte_tokenizer, save_rows
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.media import clips
from tunekit.data.media.clips import Clip, read_clip
from tunekit.data.media.expand import MediaTokens
from tunekit.data.media.kinds import KINDS
from tunekit.data.prepare import prepare_data
from tunekit.data.reports.preview import show_rows, trained_sequences
from tunekit.data.sources.in_memory import write_rows
from tunekit.data.sources.load import load_data
from tunekit.data.tokenization.encode import Encoder
from tunekit.errors import DataError
from tunekit.probe.processors import kinds_of
from tunekit.recipe.sections.data import DataSection

MARK = KINDS["audio"].mark
ANSWER = {"role": "assistant", "content": "rain"}
TEXT = {"type": "text", "text": "what?"}


def audio(seconds=0.5, rate=16_000, format="WAV", **options):
    file = io.BytesIO()
    noise = np.random.default_rng(0).standard_normal(round(seconds * rate)) * 0.1
    soundfile.write(file, noise.astype(np.float32), rate, format=format, **options)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.wav").write_bytes(audio())
    (tmp_path / "outside.wav").write_bytes(audio())
    return tmp_path / "data"


def load(folder, *rows, method="sft", **section):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_data(DataSection(train=str(file), **section), learner_of(method)).train[0]


def asked(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def clip(value):
    return {"type": "audio", "audio": value}


BASE64 = base64.b64encode(audio()).decode()
WAYS = {
    "a part with a path": asked(clip("a.wav"), TEXT),
    "a part with a path of its own name": asked({"type": "audio", "path": "a.wav"}, TEXT),
    "a part with base64": asked({"type": "audio", "base64": BASE64}, TEXT),
    "a data URL": asked({"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{BASE64}"}}, TEXT),
    "Qwen's audio_url": asked({"type": "audio", "audio_url": "a.wav"}, TEXT),
    "OpenAI's input_audio": asked({"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}, TEXT),
    "LLaMA-Factory": {"audios": ["a.wav"], "instruction": "<audio>what?", "output": "rain"},
    "ms-swift": {"audios": ["a.wav"], "messages": [{"role": "user", "content": "<audio>what?"}, ANSWER]},
    "without a mark": {"audio": "a.wav", "messages": [{"role": "user", "content": "what?"}, ANSWER]},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_clip_is_read_alike(way, folder):
    rows = load(folder, WAYS[way])
    (row,) = rows.rows
    assert rows.media == ("audio",)
    assert row["messages"] == [{"role": "user", "content": f"{MARK}what?"}, ANSWER]
    (found,) = map(Clip.of_row, row["__media__"])
    assert (found.num_frames, found.sample_rate) == (8000, 16_000)
    assert "; 1 audio clip" in rows.notes[0]


def test_columns_of_audio_of_datasets_are_never_decoded(folder):
    import datasets

    turns = [{"role": "user", "content": "<audio>what?"}, ANSWER]
    rows = {"messages": [turns], "audio": [{"bytes": audio(), "path": "lost.wav"}]}
    # Encoding it would need a package that decodes.
    held = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio())
    held.to_parquet(folder / "rows.parquet")
    section = DataSection(train=str(folder / "rows.parquet"))
    (row,) = load_data(section, learner_of("sft")).train[0].rows
    assert [one["frames"] for one in row["__media__"]] == [8000]
    # The same rows as a caller holds them.
    section = DataSection(train=str(write_rows(held, "train_dataset")))
    assert load_data(section, learner_of("sft")).train[0].rows[0]["__media__"] == row["__media__"]


def test_clips_and_pictures_of_a_row_keep_the_order_of_its_text(folder):
    save_rows(folder, num=1, without=None)
    turns = [{"role": "user", "content": "<audio>a<image>b<audio>"}, ANSWER]
    (row,) = load(folder, {"messages": turns, "images": ["0.png"], "audios": ["a.wav", "a.wav"]}).rows
    assert [one["kind"] for one in row["__media__"]] == ["audio", "image", "audio"]
    assert row["messages"][0]["content"] == f"{MARK}a{KINDS['image'].mark}b{MARK}"


@pytest.mark.parametrize(("format", "subtype"), [("WAV", None), ("FLAC", None), ("OGG", "VORBIS"), ("MP3", None)])
def test_the_length_in_a_header_is_that_of_the_samples(format, subtype, folder):
    file = folder / f"b.{format.lower()}"
    file.write_bytes(audio(0.71, 22_050, format, subtype=subtype))
    (row,) = load(folder, asked(clip(file.name), TEXT)).rows
    looked_at = Clip.of_row(row["__media__"][0])
    samples = read_clip(looked_at, 16_000)
    assert samples.dtype == np.float32
    assert samples.shape == (looked_at.num_samples(16_000),) == (round(0.71 * 16_000),)


def test_channels_become_their_mean(folder):
    left, right = np.full(1600, 0.5, np.float32), np.full(1600, -0.25, np.float32)
    soundfile.write(folder / "b.wav", np.stack([left, right], axis=1), 16_000, subtype="FLOAT")
    (row,) = load(folder, asked(clip("b.wav"), TEXT)).rows
    assert np.allclose(read_clip(Clip.of_row(row["__media__"][0]), 16_000), 0.125)


def nan():
    file = io.BytesIO()
    soundfile.write(file, np.array([0.0, np.nan] * 800), 16_000, format="WAV", subtype="FLOAT")
    return file.getvalue()


FILES = {
    "empty.wav": b"",
    "text.wav": b"not audio",
    "silent.wav": audio(0),
    "cut.wav": audio()[:5000],
    "cut.flac": audio(format="FLAC")[:5000],
    "cut.ogg": audio(3, format="OGG", subtype="VORBIS")[:-2000],
    "cut.mp3": audio(3, format="MP3")[:5000],
    "nan.wav": nan(),
    "long.wav": audio(3),
    "clip.m4a": b"\0\0\0\x20ftypM4A " + bytes(40),
}
AT = "messages[0].content[0]"
BROKEN = {
    "missing": (asked(clip("no.wav")), f"{AT}: no audio clip 'no.wav' in"),
    "a number": (asked(clip(5)), f"{AT} must be a path, a data URL or an audio clip, got the number 5"),
    "decoded": (asked(clip({"array": [0.5], "sampling_rate": 1})), f"{AT} must be a path, a data URL or an audio clip"),
    "outside": (asked(clip("../outside.wav")), f"{AT}: '../outside.wav' is outside of"),
    "a URL": (asked(clip("https://example.com/a.wav")), "is a URL; download the audio clip and name its file"),
    "empty": (asked(clip("empty.wav")), f"{AT}: 'empty.wav' is empty"),
    "no samples": (asked(clip("silent.wav")), f"{AT}: 'silent.wav' has no samples"),
    "text": (asked(clip("text.wav")), f"{AT}: 'text.wav' is not audio that can be read (WAV, FLAC, MP3, Ogg, AIFF)"),
    "another format": (asked(clip("clip.m4a")), f"{AT}: 'clip.m4a' is not audio that can be read"),
    "a WAV that ends early": (asked(clip("cut.wav")), f"{AT}: 'cut.wav' is damaged: the file ends within the audio"),
    "a FLAC that ends early": (asked(clip("cut.flac")), f"{AT}: 'cut.flac' is damaged"),
    "an Ogg that ends early": (asked(clip("cut.ogg")), f"{AT}: 'cut.ogg' is damaged: the file ends within the audio"),
    "an MP3 that ends early": (asked(clip("cut.mp3")), f"{AT}: 'cut.mp3' is damaged: the file ends within the audio"),
    "no numbers": (asked(clip("nan.wav")), f"{AT}: 'nan.wav' has samples that are NaN or infinite"),
    "too long": (asked(clip("long.wav")), f"{AT}: 'long.wav' has 3 s of audio, more than 2 s; split it"),
    "a mark too many": (
        {"audios": ["a.wav"], "messages": [{"role": "user", "content": "<audio><audio>"}, ANSWER]},
        "2 <audio> marks in the texts, but 1 audio clip in column audios",
    ),
    "a clip too many": (
        {"audios": ["a.wav", "a.wav"], "messages": [{"role": "user", "content": "<audio>"}, ANSWER]},
        "1 <audio> mark in the texts, but 2 audio clips in column audios",
    ),
    "two columns": (
        {"audios": ["a.wav"], "audio": "a.wav", "messages": [{"role": "user", "content": "<audio>"}, ANSWER]},
        "columns audios and audio both contain audio clips; keep one of them",
    ),
    "an answer with a clip": (
        {"messages": [{"role": "user", "content": "speak"}, {"role": "assistant", "content": [clip("a.wav")]}]},
        "messages[1] is an assistant message with an audio clip; models answer in text",
    ),
    "the character that stands for a clip": (
        {"audios": ["a.wav"], "messages": [{"role": "user", "content": f"<audio>{MARK}"}, ANSWER]},
        "the text contains U+FFFB, which marks audio clips here; remove it",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_row_is_told_with_its_line_and_its_clip(kind, folder, monkeypatch):
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    monkeypatch.setattr(clips, "MAX_SECONDS", 2 if kind == "too long" else 60)
    row, message = BROKEN[kind]
    with pytest.raises(DataError) as caught:
        load(folder, asked(clip("a.wav"), TEXT), row)
    assert str(caught.value).startswith(f"{folder / 'rows.jsonl'}:2: ")
    assert message in str(caught.value)
    assert len(load(folder, asked(clip("a.wav"), TEXT), row, max_bad_rows=1)) == 1


def test_other_methods_refuse_clips(folder):
    row = {"prompt": asked(clip("a.wav"))["messages"][:1], "chosen": [ANSWER], "rejected": [ANSWER]}
    with pytest.raises(DataError, match=r"is of type audio, but only text and images are supported"):
        load(folder, row, method="dpo")


def test_a_clip_that_changed_is_told(folder):
    looked_at = Clip.of_row(load(folder, asked(clip("a.wav"), TEXT)).rows[0]["__media__"][0])
    (folder / "a.wav").write_bytes(audio(0.6))
    with pytest.raises(DataError, match="the audio clip changed since the rows were prepared"):
        read_clip(looked_at, 16_000)


def prepared(folder, family, *rows, max_length=512):
    _, processor = FAMILIES[family]()
    tokens = MediaTokens(processor)
    section = DataSection(train=str(folder / "rows.jsonl"), max_length=max_length)
    data = load_data(section, learner_of("sft"))
    return prepare_data(section, data, processor.tokenizer, media=tokens)[0], tokens


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_tokens_of_a_row_are_those_of_the_processor_and_none_of_a_clip_counts(family, folder):
    is_alone = family in ALONE
    save_audio_rows(folder, without=None if is_alone else 3, twice=not is_alone)
    split, tokens = prepared(folder, family)
    processor = tokens.processor
    (source,) = split.tokens
    rows = split.rows[0]
    encoder = Encoder(rows, processor.tokenizer, tokens)
    for number, row in enumerate(rows.rows):
        samples = [read_clip(Clip.of_row(one), 16_000) for one in row.get("__media__", ())]
        text = encoder.text_of(row, "a row")
        given = {"audio": samples} if samples else {}
        own = processor(text=[text], **given, text_kwargs={"add_special_tokens": False}, return_tensors="pt")
        sequence = source.sequences[number]
        assert sequence["input_ids"] == own["input_ids"][0].tolist()
        placed = encoder.media_of(rows, number)
        assert [one.medium.kind for one in placed] == ["audio"] * len(samples)
        labels = sequence["labels"]
        assert all(labels[at] == -100 for one in placed for at in range(one.start, one.stop))
        assert any(label != -100 for label in labels)


def test_lengths_between_two_of_the_same_tokens_are_not_asked(folder):
    _, processor = FAMILIES["qwen2_audio"]()
    tokens = MediaTokens(processor)
    asked_for = []
    ask = tokens._ask
    tokens._ask = lambda clip: asked_for.append(clip.num_frames) or ask(clip)
    silences = [Clip("", frames, 16_000, "") for frames in (8200, 8600, 8400, 16_000, 12_000)]
    nums = [tokens.of(silence).num_tokens for silence in silences]
    assert nums == [MediaTokens(processor).of(silence).num_tokens for silence in silences]
    assert 8400 not in asked_for


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3.5, r"too long: Qwen2AudioProcessor reads the first 3\.0 s of a clip"), (0.005, "too short")],
)
def test_a_clip_of_which_the_processor_reads_a_part_is_refused(seconds, words, folder):
    save_clip(folder / "b.wav", seconds)
    load(folder, asked(clip("a.wav"), TEXT), asked(clip("b.wav"), TEXT))
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: audio b\.wav {seconds:.1f} s is {words}"):
        prepared(folder, "qwen2_audio")


def test_a_row_of_more_clips_than_the_processor_takes_is_refused(folder):
    load(folder, asked(clip("a.wav"), TEXT), asked(clip("a.wav"), clip("a.wav"), TEXT))
    with pytest.raises(DataError, match=r"rows\.jsonl:2: AudioFlamingo3Processor refuses a row with 2 audio clips"):
        prepared(folder, "audioflamingo3")


def test_a_processor_that_takes_audio_only_in_chats_of_its_own_is_refused():
    from transformers import VoxtralProcessor, WhisperFeatureExtractor

    processor = VoxtralProcessor(WhisperFeatureExtractor(), byte_tokenizer("[AUDIO]", "[AUDIO]"))
    assert kinds_of(processor) == ()
    assert kinds_of(FAMILIES["qwen2_audio"]()[1]) == ("audio",)


def test_a_preview_names_clips_and_says_that_they_are_never_cut(folder):
    save_clip(folder / "b.wav", 1.0)
    rows = load(folder, asked(clip("b.wav"), TEXT))
    _, processor = FAMILIES["qwen2_audio"]()
    show, _ = trained_sequences(rows, processor.tokenizer, 512, MediaTokens(processor))
    (row,) = show_rows(rows, range(1), show)
    (piece,) = [piece for piece in row.sequences[0].head.pieces if piece.medium]
    assert piece.text == "[audio b.wav 1.0 s: 25 tokens]"
    assert not piece.trained
    played = io.BytesIO(base64.b64decode(row.thumbnails[piece.medium.digest].removeprefix("data:audio/wav;base64,")))
    assert soundfile.info(played).frames == 16_000
    show, _ = trained_sequences(rows, processor.tokenizer, 20, MediaTokens(processor))
    (row,) = show_rows(rows, range(1), show)
    assert row.left_out == "longer than data.max_length=20, and audio clips are never truncated"
