"""Facts from a model's files, and what is said where they are not right."""

import json
import os
import struct
import subprocess
import sys

import pytest

from tests.tiny import save_tiny_model, save_tiny_model_with_vision
from tests.waiting import LIMIT_SECONDS
from tunekit.errors import ModelError
from tunekit.probe.model import probe_model, sketch_model
from tunekit.recipe.sections.model import ModelSection


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def model(saved, tmp_path):
    """A copy of the tiny model that a test may damage."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_counts_are_those_of_the_loaded_model(saved):
    from transformers import AutoModelForCausalLM

    facts = probe_model(ModelSection(path=str(saved)))
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert facts.num_params == loaded.num_parameters()
    assert facts.architecture == type(loaded).__name__
    assert (facts.model_type, facts.layer_types) == ("llama", ())
    assert (facts.num_layers, facts.hidden_size, facts.num_heads) == (2, 48, 4)
    assert (facts.num_kv_heads, facts.head_dim, facts.dtype) == (2, 12, "float32")
    assert facts.has_chat_template


def test_pico_ships_with_the_package():
    facts = probe_model(ModelSection(path="pico"))
    assert 2_000_000 < facts.num_params < 4_000_000
    assert facts.has_chat_template
    assert facts.architecture == "LlamaForCausalLM"


def test_sharded_models_are_counted_over_all_files(saved, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "tokenizer.json").write_bytes((saved / "tokenizer.json").read_bytes())
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert probe_model(ModelSection(path=str(tmp_path))).num_params == model.num_parameters()


def test_layers_are_named_as_config_json_names_them(model):
    change_config(layer_types=["full_attention", "mamba"])(model)
    assert probe_model(ModelSection(path=str(model))).layer_types == ("full_attention", "mamba")


def test_a_model_that_sees_is_counted_tower_and_all(tmp_path):
    from transformers import AutoModelForCausalLM

    facts = probe_model(ModelSection(path=str(save_tiny_model_with_vision(tmp_path))))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert facts.num_params == loaded.num_parameters()
    assert facts.num_tower_params == sum(
        parameter.numel() for name, parameter in loaded.named_parameters() if "language_model" not in name
    )
    assert (facts.model_type, facts.num_layers, facts.has_tied_head) == ("gemma3_text", 2, True)
    (tmp_path / "model.safetensors").unlink()
    sketched = sketch_model(ModelSection(path=str(tmp_path)))
    assert sketched.num_params == facts.num_params
    assert sorted(sketched.linears.values()) == sorted(facts.linears.values())


def drop(name):
    return lambda folder: (folder / name).unlink()


def rewrite(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def change_config(**changes):
    def apply(folder):
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) | changes
        file.write_text(json.dumps(config), encoding="utf-8")

    return apply


def truncate_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BROKEN = {
    "no-config": (drop("config.json"), "{path!r} has no config.json; set it to a folder saved by save_pretrained"),
    "broken-config": (
        rewrite("config.json", b"{"),
        "{path!r} has a broken config.json: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1); save it again",
    ),
    "no-weights": (drop("model.safetensors"), "{path!r} lacks model.safetensors; the folder is incomplete"),
    "pickled": (
        pickled_weights,
        "{path!r} has no safetensors weights, only pytorch_model.bin; pickled weights can run code when opened "
        "and are not loaded; convert them to safetensors",
    ),
    "truncated": (truncate_weights, "{path!r}: model.safetensors is damaged; copy or download it again"),
    "short-header": (
        rewrite("model.safetensors", struct.pack("<Q", 10**6)),
        "{path!r}: model.safetensors is damaged; copy or download it again",
    ),
    "empty-weights": (
        rewrite("model.safetensors", b""),
        "{path!r}: model.safetensors is damaged; copy or download it again",
    ),
    "no-tokenizer": (
        drop("tokenizer.json"),
        "{path!r} has no tokenizer; the folder is incomplete: save the tokenizer with the model",
    ),
    "encoder": (
        change_config(architectures=["BertForMaskedLM"]),
        "{path!r} is not a causal language model (architectures: BertForMaskedLM); "
        "use a model with a ...ForCausalLM architecture, or a ...ForConditionalGeneration with a text_config",
    ),
    "no-layers": (
        change_config(num_hidden_layers=None),
        "the config.json of {path!r} has no num_hidden_layers; the folder may be incomplete",
    ),
    "adapter": (
        rewrite("adapter_config.json", b"{}"),
        "{path!r} has no adapter_model.safetensors; save the adapter again with PEFT, as safetensors",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_folder_is_one_clear_line(name, model):
    damage, message = BROKEN[name]
    damage(model)
    with pytest.raises(ModelError) as caught:
        probe_model(ModelSection(path=str(model)))
    assert str(caught.value) == "model.path: " + message.format(path=str(model))


OTHERS = {
    "bart": (
        {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 71},
        "{path!r} is of an encoder-decoder type (bart), which tunekit does not train; use a decoder-only model",
    ),
    "prophetnet": (
        {"hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2, "vocab_size": 71},
        "{path!r} is of an encoder-decoder type (prophetnet), which tunekit does not train; use a decoder-only model",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_of_another_build_is_refused_for_what_it_is_and_not_as_incomplete(kind, model):
    fields, message = OTHERS[kind]
    config = {"architectures": [f"{kind.title()}ForCausalLM"], "model_type": kind, **fields}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        probe_model(ModelSection(path=str(model)))
    assert str(caught.value) == "model.path: " + message.format(path=str(model))


NAMED_OTHERWISE = {
    "gpt_neo": {"num_layers": 3, "num_heads": 2, "attention_types": [[["global", "local", "global"], 1]]},
    "xglm": {"d_model": 32, "num_layers": 3, "attention_heads": 2},
    "xlm": {"emb_dim": 32, "n_layers": 3, "n_heads": 2},
    "nemotron_h": {"num_attention_heads": 2, "layers_block_type": ["mamba", "attention", "moe"]},
}


@pytest.mark.parametrize("kind", NAMED_OTHERWISE)
def test_sizes_are_read_by_the_names_that_a_family_has_for_them(kind, model):
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **{"hidden_size": 32} | NAMED_OTHERWISE[kind])
    config.architectures = ["SomeForCausalLM"]
    config.save_pretrained(model)
    facts = probe_model(ModelSection(path=str(model)))
    assert (facts.num_layers, facts.num_heads, facts.hidden_size) == (3, 2, 32)


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "rwkv"])
def test_a_model_without_attention_counts_as_one_head(kind, model):
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, hidden_size=32, num_hidden_layers=3)
    config.architectures = ["SomeForCausalLM"]
    config.save_pretrained(model)
    facts = probe_model(ModelSection(path=str(model)))
    assert (facts.num_layers, facts.num_heads, facts.head_dim) == (3, 1, 32)


def test_a_causal_model_by_transformers_own_table_is_known_whatever_its_name(model):
    fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 71}
    config = {"architectures": ["BertGenerationDecoder"], "model_type": "bert-generation", **fields}
    (model / "config.json").write_text(json.dumps(config))
    assert probe_model(ModelSection(path=str(model))).architecture == "BertGenerationDecoder"


def test_a_width_for_each_layer_is_the_widest(model):
    config = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config |= {"model_type": "gemma3n_text", "intermediate_size": [64] * (layers - 1) + [96]}
    (model / "config.json").write_text(json.dumps(config))
    assert probe_model(ModelSection(path=str(model))).intermediate_size == 96


def test_a_missing_folder_suggests_a_near_one(model):
    with pytest.raises(ModelError) as caught:
        probe_model(ModelSection(path=str(model.with_name("modle"))))
    assert str(caught.value) == f"model.path: no folder {str(model.with_name('modle'))!r}; did you mean {str(model)!r}?"


def test_a_file_is_not_a_model(model):
    with pytest.raises(ModelError, match=r"is a file; set it to the folder with config\.json"):
        probe_model(ModelSection(path=str(model / "config.json")))


def without_network(cache, code):
    """Output of a program in a process of its own, whose hub is a closed port of this machine."""
    imports = (
        "from tunekit.errors import ModelError; from tunekit.probe.model import probe_model, sketch_model\n"
        "from tunekit.recipe.schema import ModelSection\n"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(cache)}
    command = [sys.executable, "-c", imports + code]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_SECONDS, check=True)
    assert answer.stderr == ""
    return answer.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["probe_model", "sketch_model"])
def test_a_hub_name_without_network_is_one_line_and_no_retry(probe, tmp_path):
    code = f"try: {probe}(ModelSection(path='some-org/some-model'))\nexcept ModelError as error: print(error)"
    assert without_network(tmp_path, code) == (
        "model.path: 'some-org/some-model' is not a folder here, and the Hub cannot be reached; "
        "set it to a folder of the working directory or the recipe's folder, or connect to the network"
    )


@pytest.mark.slow
def test_a_well_known_model_is_planned_for_without_network_but_not_trained(tmp_path):
    code = (
        "section = ModelSection(path='meta-llama/Llama-3.1-8B-Instruct')\n"
        "facts = sketch_model(section)\n"
        "print(facts.known_from, facts.num_params, facts.has_chat_template)\n"
        "try: probe_model(section)\nexcept ModelError as error: print(error)"
    )
    planned, refused = without_network(tmp_path, code).splitlines()
    assert planned == "table 8030261248 True"
    assert "the Hub cannot be reached" in refused


def test_a_folder_without_weights_is_planned_for_but_not_trained(model):
    section = ModelSection(path=str(model))
    stored = probe_model(section)
    (model / "model.safetensors").unlink()
    sketched = sketch_model(section)
    assert sketched == stored.model_copy(update={"known_from": "config"})
    with pytest.raises(ModelError, match=r"lacks model\.safetensors"):
        probe_model(section)


def test_a_folder_with_weights_is_planned_for_as_they_are(saved):
    assert sketch_model(ModelSection(path=str(saved))) == probe_model(ModelSection(path=str(saved)))


def test_what_was_fetched_of_a_hub_model_comes_before_the_table(saved, tmp_path, monkeypatch):
    snapshot = hub_snapshot(tmp_path, "Qwen/Qwen3-8B")
    (snapshot / "config.json").write_bytes((saved / "config.json").read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    facts = sketch_model(ModelSection(path="Qwen/Qwen3-8B"))
    assert (facts.known_from, facts.hidden_size) == ("config", 48)


UNKNOWN = {
    "unknown-type": (
        {"model_type": "quasi_llama"},
        "cannot derive the tensors of a 'quasi_llama' model from config.json alone; "
        "provide its safetensors files; supported without them: llama, ",
    ),
    "encoder": ({"architectures": ["BertForMaskedLM"]}, "is not a causal language model"),
    "bidirectional": ({"use_bidirectional_attention": True}, "its attention is bidirectional"),
    "no-layers": (
        {"num_hidden_layers": None},
        "num_hidden_layers of a 'llama' model must be a positive integer, got None; fix config.json",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_config_that_does_not_say_the_tensors_is_one_clear_line(name, model):
    changes, message = UNKNOWN[name]
    change_config(**changes)(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        sketch_model(ModelSection(path=str(model)))
    assert str(caught.value).startswith(f"model.path: {str(model)!r}")
    assert message in str(caught.value)


def test_quantised_files_are_counted_as_the_weights_that_they_stand_for(model):
    """What such files store are packed blocks and scales."""
    plain = probe_model(ModelSection(path=str(model)))
    change_config(quantization_config={"quant_method": "mxfp4"}, dtype="bfloat16")(model)
    (model / "model.safetensors").write_bytes(packed({"model.layers.0.mlp.down_proj_blocks": (2, 3)}))
    facts = probe_model(ModelSection(path=str(model)))
    assert (facts.tensors, facts.dtype) == (plain.tensors, "bfloat16")


def packed(tensors):
    """A safetensors file of bytes that are all zero."""
    header, end = {}, 0
    for name, (rows, columns) in tensors.items():
        header[name] = {"dtype": "U8", "shape": [rows, columns], "data_offsets": [end, end + rows * columns]}
        end += rows * columns
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def hub_snapshot(cache, name):
    """An empty folder where the hub's cache looks for the files of a model."""
    commit = "0" * 40
    repository = cache / ("models--" + name.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def test_a_downloaded_hub_model_needs_no_network(saved, tmp_path, monkeypatch):
    snapshot = hub_snapshot(tmp_path, "some-org/some-model")
    for file in saved.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    facts = probe_model(ModelSection(path="some-org/some-model"))
    assert facts.num_params == probe_model(ModelSection(path=str(saved))).num_params
    assert facts.path == "some-org/some-model"


def test_a_hub_model_with_code_of_another_repository_is_refused(saved, tmp_path, monkeypatch):
    snapshot = hub_snapshot(tmp_path, "some-org/some-model")
    for file in saved.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    config = json.loads((saved / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "other-org/other--own.OwnForCausalLM"}
    (snapshot / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"'some-org/some-model' runs code of another repository, other-org/other"):
        probe_model(ModelSection(path="some-org/some-model", revision="0" * 40, trust_remote_code=True))


def test_a_name_that_cannot_be_is_said_to_be_so():
    with pytest.raises(ModelError, match="is neither a folder here nor a valid name on the Hub"):
        probe_model(ModelSection(path="some model!"))


@pytest.mark.slow
def test_a_model_that_transformers_builds_is_known_without_words_of_libraries():
    """In a process of its own, where nothing is imported yet."""
    name = "HuggingFaceTB/SmolVLM2-2.2B-Instruct"
    words = f"from tunekit.probe.model import known_model\nprint(known_model({name!r}).num_params)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("2246784880", "")
