"""Models with scaled rotary embeddings against transformers' own of a config.json that says the same."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.tiny_models import tiny_model
from tests.tiny import make_tokenizer
from tunekit.errors import ModelError
from tunekit.models.fusion.fuse import fuse
from tunekit.models.load import load_model
from tunekit.probe.model import probe_model
from tunekit.recipe.sections.model import ModelSection

LENGTH = 600
"""More than the 256 positions of the tiny models."""

BY_LAYER = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
HALVES = {"short_factor": [1.0] * 4, "long_factor": [1.0 + n / 2 for n in range(4)]}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
OF_256 = {"original_max_position_embeddings": 256}

CASES = {
    "llama-yarn": ("llama", {}, {"factor": 3}, {"rope_type": "yarn", "factor": 3.0, **OF_256}),
    "llama-linear": (
        "llama",
        {},
        {"rope_type": "linear", "factor": 3},
        {"rope_type": "linear", "factor": 3.0},
    ),
    "llama-llama3": (
        "llama",
        {},
        {"rope_type": "llama3", "factor": 3, **LLAMA3},
        {"rope_type": "llama3", "factor": 3.0, **LLAMA3, **OF_256},
    ),
    "qwen3-yarn": (
        "qwen3",
        {},
        {"factor": 3, "beta_fast": 16, "attention_factor": 1.2},
        {"rope_type": "yarn", "factor": 3.0, "beta_fast": 16.0, "attention_factor": 1.2, **OF_256},
    ),
    "gemma3-by-layer": ("gemma3_text", BY_LAYER, {"factor": 3}, {"rope_type": "yarn", "factor": 3.0, **OF_256}),
    "olmo3-by-layer": ("olmo3", BY_LAYER, {"factor": 3}, {"rope_type": "yarn", "factor": 3.0, **OF_256}),
    "glm4-partial": ("glm4", {}, {"factor": 3}, {"rope_type": "yarn", "factor": 3.0, **OF_256}),
    "phi3-longrope": (
        "phi3",
        {"original_max_position_embeddings": 256},
        {"rope_type": "longrope", "factor": 3, **HALVES},
        {"rope_type": "longrope", "factor": 3.0, **HALVES, **OF_256},
    ),
}


def saved(folder, kind, changes):
    """A tiny model in a folder, with a tokenizer."""
    folder.mkdir()
    model = tiny_model(kind, **changes)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def written(folder, to, parameters):
    """The same model in another folder, whose config.json was written by hand."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    own = config["rope_parameters"]
    kept = ("rope_theta", "partial_rotary_factor")
    if "full_attention" in own:
        own["full_attention"] = {"rope_theta": own["full_attention"]["rope_theta"], **parameters}
    else:
        config["rope_parameters"] = {name: own[name] for name in kept if name in own} | parameters
    config["max_position_embeddings"] = 768
    (to / "config.json").write_text(json.dumps(config))
    return to


def loss_and_logits(model):
    ids = torch.randint(0, 250, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    output = model.train()(input_ids=ids, labels=ids, use_cache=False)
    return float(output.loss.detach()), output.logits.detach()


def plain_and_scaled(name, tmp_path):
    """Sections of a model and of its scaled one, and the latter by transformers from a config.json written by hand."""
    kind, changes, section, parameters = CASES[name]
    folder = saved(tmp_path / "plain", kind, changes)
    by_hand = written(folder, tmp_path / "scaled", parameters)
    truth = AutoModelForCausalLM.from_pretrained(by_hand, dtype=torch.float32, attn_implementation="sdpa")
    chosen = ModelSection.model_validate({"path": str(folder), "rope_scaling": section})
    return ModelSection(path=str(folder)), chosen, truth


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_a_scaled_model_computes_what_transformers_computes_of_the_same_config(name, tmp_path):
    unscaled, chosen, truth = plain_and_scaled(name, tmp_path)
    assert probe_model(chosen).positions_for(chosen) == 768
    model = load_model(chosen, dtype="float32", attn_implementation="sdpa", device="cpu")
    loss, logits = loss_and_logits(model)
    expected, reference = loss_and_logits(truth)
    assert loss == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-5)
    plain = load_model(unscaled, dtype="float32", attn_implementation="sdpa", device="cpu")
    assert float((loss_and_logits(plain)[1] - reference).abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fused_rotary_embeddings_are_scaled_too(name, tmp_path):
    _, chosen, truth = plain_and_scaled(name, tmp_path)
    model = load_model(chosen, dtype="float32", attn_implementation="sdpa", device="cpu")
    assert fuse(model, dtype=torch.float32).fused
    (loss, logits), (expected, reference) = loss_and_logits(model), loss_and_logits(truth)
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4)


def test_a_saved_scaled_model_has_the_scaling_in_its_config(tmp_path):
    folder = saved(tmp_path / "plain", "llama", {})
    section = ModelSection.model_validate({"path": str(folder), "rope_scaling": {"factor": 3}})
    load_model(section, dtype="float32", device="cpu").save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    expected = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 3.0, **OF_256}
    assert (config["rope_parameters"], config["max_position_embeddings"]) == (expected, 768)


def test_full_attention_without_rotary_embeddings_is_known_and_not_scaled(tmp_path):
    folder = saved(tmp_path / "plain", "beam", {})
    facts = probe_model(ModelSection(path=str(folder)))
    assert facts.rope is None
    chosen = ModelSection.model_validate({"path": str(folder), "rope_scaling": {"factor": 3}})
    with pytest.raises(ModelError, match=r"model\.rope_scaling: the code of .* does not scale its rotary embeddings"):
        load_model(chosen, dtype="float32", device="cpu")
