"""Model folders of somebody else: what is no model is refused in a line, and nothing leads out of them."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from tests.tiny import save_tiny_model
from tunekit.errors import ModelError
from tunekit.models.load import load_tokenizer
from tunekit.probe.model import chat_template_of, probe_model
from tunekit.probe.model_files import MAX_HEADER_BYTES, check_normalizer
from tunekit.recipe.sections.model import ModelSection

DEEP = "[" * 100_000
DEEPER_THAN_COPIES = '{"x": ' + "[" * 60 + "]" * 60 + "}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("files") / "model", hidden=16, layers=1)


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


def words(name, text):
    return lambda folder: (folder / name).write_text(text)


def fifo(name):
    def put(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return put


def link(name, target):
    def put(folder):
        outside = folder.parent / target
        outside.parent.mkdir(parents=True, exist_ok=True)
        (folder / name).replace(outside)
        (folder / name).symlink_to(outside)

    return put


def config(**changes):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def header(raw, length=None):
    prefix = struct.pack("<Q", len(raw) if length is None else length)
    return lambda folder: (folder / "model.safetensors").write_bytes(prefix + raw)


def huge_header(folder):
    """A file without blocks whose header would be all of it."""
    header(b"", MAX_HEADER_BYTES + 1)(folder)
    os.truncate(folder / "model.safetensors", MAX_HEADER_BYTES + 9)


def index(**files):
    return words("model.safetensors.index.json", json.dumps({"weight_map": files}))


def adapter(**settings):
    def put(folder):
        (folder / "adapter_model.safetensors").touch()
        plain = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "pico"}
        (folder / "adapter_config.json").write_text(json.dumps(plain | settings))

    return put


def adapter_of_itself(folder):
    adapter(base_model_name_or_path=str(folder.parent / "other"))(folder)
    (folder.parent / "other").mkdir()
    adapter(base_model_name_or_path=str(folder))(folder.parent / "other")


DAMAGED = "'model': model.safetensors is damaged; copy or download it again"
NO_MAP = "a broken model.safetensors.index.json: weight_map does not name a file for each tensor"
OUT = "a broken model.safetensors.index.json: {!r} is no file of the folder"
PROBED = {
    "deep-config": (words("config.json", DEEP), "a broken config.json: nested too deep"),
    "deeper-config": (words("config.json", DEEPER_THAN_COPIES), "a broken config.json: nested too deep"),
    "list": (words("config.json", "[1]"), "a broken config.json: not a JSON object"),
    "large": (lambda folder: os.truncate(folder / "config.json", 2**27), "config.json: larger than 67,108,864"),
    "model-type": (config(model_type=["llama"]), "a broken config.json: model_type is not a name"),
    "architectures": (config(architectures="LlamaForCausalLM"), "config.json: architectures is not a list of names"),
    "rope": (config(rope_parameters=3), "a broken config.json: rope_parameters is not an object"),
    "quantization": (config(quantization_config=[1]), "a broken config.json: quantization_config is not an object"),
    "no-heads": (config(num_attention_heads=0), "a broken config.json: num_attention_heads must be positive, got 0"),
    "negative": (config(hidden_size=-4), "a broken config.json: hidden_size must be positive, got -4"),
    "header-deep": (header(b'{"a":' + b"[" * 10**6), DAMAGED),
    "header-list": (header(b"[1, 2]"), DAMAGED),
    "header-number": (header(b'{"a": 1}'), DAMAGED),
    "header-shapeless": (header(b'{"a": {"dtype": "F32", "data_offsets": [0, 0]}}'), DAMAGED),
    "header-negative": (header(b'{"a": {"dtype": "F32", "shape": [-5], "data_offsets": [0, 0]}}'), DAMAGED),
    "header-huge": (huge_header, DAMAGED),
    "index-deep": (words("model.safetensors.index.json", DEEP), "index.json: nested too deep"),
    "index-empty": (words("model.safetensors.index.json", "{}"), NO_MAP),
    "index-list": (words("model.safetensors.index.json", '{"weight_map": [1]}'), NO_MAP),
    "index-number": (index(a=1), NO_MAP),
    "index-above": (index(a="../outside.safetensors"), OUT.format("../outside.safetensors")),
    "index-absolute": (index(a="/etc/passwd"), OUT.format("/etc/passwd")),
    "index-nul": (index(a="a\0b"), OUT.format("a\0b")),
    "adapter-deep": (lambda folder: (adapter()(folder), words("adapter_config.json", DEEP)(folder)), "nested too deep"),
    "adapter-rank": (lambda folder: (adapter()(folder), words("adapter_config.json", '{"target_modules": ["q"], '
        '"base_model_name_or_path": "pico"}')(folder)), "a broken adapter_config.json: r is missing"),
    "adapter-type": (adapter(r="x"), "a broken adapter_config.json: "),
    "adapter-of-itself": (adapter_of_itself, "is an adapter on itself"),
    "template": (link("chat_template.jinja", "passwd"), "chat_template.jinja of 'model' is a link out of the folder"),
    "settings-link": (link("tokenizer_config.json", "key.json"), "tokenizer_config.json of 'model' is a link out of"),
}  # fmt: skip


def refusal(damage, folder, read):
    """Return the words in which a folder is refused once it is damaged."""
    damage(folder)
    with pytest.raises(ModelError) as refused:
        read(ModelSection(path="model"))
    return str(refused.value)


@pytest.mark.parametrize("name", PROBED)
def test_a_folder_that_is_no_model_is_one_line(name, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    damage, message = PROBED[name]
    words = refusal(damage, folder, probe_model)
    assert words.startswith("model.path: ") and message in words


TOKENIZERS = {
    "settings": (words("tokenizer_config.json", DEEP), "a broken tokenizer_config.json: nested too deep"),
    "list": (words("tokenizer_config.json", "[1]"), "a broken tokenizer_config.json: not a JSON object"),
    "fifo": (fifo("tokenizer_config.json"), "a broken tokenizer_config.json: not a regular file"),
    "config-fifo": (fifo("config.json"), "a broken config.json: not a regular file"),
    "config-heads": (config(num_attention_heads=0), "the tokenizer of 'model' cannot be loaded: "),
    "config-text": (config(num_attention_heads="4"), "the tokenizer of 'model' cannot be loaded: "),
    "deep": (words("tokenizer.json", DEEP), "the tokenizer of 'model' cannot be loaded: maximum recursion depth"),
    "vocabulary": (words("tokenizer.json", "[1]"), "the tokenizer of 'model' cannot be loaded: "),
    "template": (link("chat_template.jinja", "passwd"), "chat_template.jinja of 'model' is a link out of the folder"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_is_none_is_one_line(name, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    damage, message = TOKENIZERS[name]
    assert message in refusal(damage, folder, load_tokenizer)


def test_links_within_a_folder_to_weights_and_to_what_the_hubs_library_keeps_are_followed(folder):
    link("model.safetensors", "elsewhere/weights")(folder)
    link("tokenizer_config.json", "models--a--b/blobs/0123")(folder)
    (folder / "chat_template.jinja").rename(folder / "own.jinja")
    (folder / "chat_template.jinja").symlink_to("own.jinja")
    (folder.parent / "alias").symlink_to(folder)
    for path in (folder, folder.parent / "alias"):
        assert probe_model(ModelSection(path=str(path))).has_chat_template
        assert load_tokenizer(ModelSection(path=str(path))).chat_template


def test_a_template_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"has a broken chat_template\.jinja: 'utf-8' codec"):
        chat_template_of(ModelSection(path=str(folder)))


@pytest.mark.parametrize(("factor", "steps", "is_bomb"), [(100, 2, True), (3, 2, False), (30, 2, False)])
def test_a_normalizer_that_fills_the_memory_is_refused_before_it_does(factor, steps, is_bomb, folder):
    from tokenizers import normalizers

    bomb = normalizers.Sequence([normalizers.Replace("a", "a" * factor)] * steps + [normalizers.NFC()])
    tokenizer = load_tokenizer(ModelSection(path=str(folder)))
    tokenizer.backend_tokenizer.normalizer = bomb
    tokenizer.save_pretrained(folder)
    if is_bomb:
        with pytest.raises(ModelError, match=r"replaces one character by up to 1e\+04; fix the normalizer"):
            load_tokenizer(ModelSection(path=str(folder)))
    else:
        check_normalizer(load_tokenizer(ModelSection(path=str(folder))), "model")
