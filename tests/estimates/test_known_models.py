"""The table of well-known models: their published counts, and some of their facts."""

from importlib.util import find_spec

import pytest

from tests.estimates.test_architectures import built, facts_of, shapes
from tunekit.errors import ModelError
from tunekit.estimates.models.architectures import tensors_of
from tunekit.estimates.models.model_config import is_known, known_models

BUILT_QUICKLY = {"Qwen/Qwen3.5-0.8B", "google/gemma-4-E2B-it"}


def _marks(name, config):
    """Those that transformers has to build take seconds each; some of them are built with another package."""
    marks = () if is_known(config) or name in BUILT_QUICKLY else (pytest.mark.slow,)
    if config["model_type"] == "gemma3n":
        marks += (pytest.mark.skipif(find_spec("timm") is None, reason="Gemma 3n's vision tower is of timm"),)
    return marks


NAMES = [pytest.param(name, marks=_marks(name, known.config)) for name, known in known_models().items()]


@pytest.mark.parametrize("name", NAMES)
def test_the_tensors_add_up_to_the_published_number(name):
    known = known_models()[name]
    assert facts_of(known.config).num_params == known.num_params
    assert known.source


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_a_missing_package_of_a_model_is_named_with_the_command_that_installs_it():
    with pytest.raises(ModelError) as caught:
        facts_of(known_models()["google/gemma-3n-E2B"].config)
    assert "TimmWrapperModel requires the timm library" in caught.value.problem
    assert caught.value.hint == "pip install timm"


BUILT = [
    "meta-llama/Llama-3.1-405B",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen3-235B-A22B",
    "google/gemma-2-9b",
    "google/gemma-3-4b-it",
    "google/gemma-3-27b-it",
    "mistralai/Mistral-Nemo-Base-2407",
    "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "microsoft/phi-4",
    "microsoft/Phi-4-mini-instruct",
    "allenai/OLMo-2-1124-13B",
    "HuggingFaceTB/SmolLM3-3B",
    "openai/gpt-oss-120b",
    "deepseek-ai/DeepSeek-V3",
]
"""One of each family, in its real size."""


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", BUILT)
def test_every_tensor_is_that_of_the_model_in_its_real_size(name):
    config = known_models()[name].config
    assert tensors_of(config) == shapes(built(config))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-30B-A3B", 3.3),  # model card: 3.3B activated
        ("Qwen/Qwen3-235B-A22B", 22),  # model card: 22B activated
        ("mistralai/Mixtral-8x7B-v0.1", 12.9),  # mistral.ai/news/mixtral-of-experts: 12.9B per token
        ("mistral-community/Mixtral-8x22B-v0.1", 39),  # mistral.ai/news/mixtral-8x22b: 39B active
        ("deepseek-ai/DeepSeek-V3", 37),  # model card: 37B activated
    ],
)
def test_active_parameters_are_those_that_model_cards_say(name, billions):
    facts = facts_of(known_models()[name].config)
    assert facts.num_active_params / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3.5-35B-A3B", 3),  # its name: 3B activated, without the tower
        ("meta-llama/Llama-4-Scout-17B-16E", 17),  # its name: 17B activated, without the tower
        ("zai-org/GLM-4.5-Air", 12),  # model card: 12B active
        ("moonshotai/Kimi-K2-Instruct", 32),  # model card: 32B activated
        ("MiniMaxAI/MiniMax-M2", 10),  # model card: 10B active
    ],
)
def test_active_parameters_of_newer_mixtures_are_those_of_their_cards(name, billions):
    facts = facts_of(known_models()[name].config)
    # Cards leave out the embedding, some of them the head too.
    tables = 2 * facts.vocab_size * facts.hidden_size
    active = (facts.num_active_params - facts.num_tower_params) / 1e9
    assert billions - 0.5 < active < billions + 0.5 + tables / 1e9


def test_the_vision_tower_is_counted_apart():
    facts = facts_of(known_models()["google/gemma-3-4b-it"].config)
    # keras-hub's gemma3_4b_text, whose vocabulary is 262144; Gemma's own has 64 more places.
    assert facts.num_params - facts.num_tower_params == 3_880_099_328 + 64 * 2560
    assert facts.model_type == "gemma3_text"
    assert facts.layer_types[4:7] == ("sliding_attention", "full_attention", "sliding_attention")


def test_a_model_of_experts_is_as_wide_as_the_experts_of_a_token():
    facts = facts_of(known_models()["openai/gpt-oss-20b"].config)
    assert facts.intermediate_size == 4 * 2880
    assert (facts.sliding_window, facts.num_experts, facts.num_experts_per_token) == (128, 32, 4)
    # The model card says 3.6 B active parameters, which leaves out the embedding.
    embedding = 201_088 * 2880
    assert (facts.num_active_params - embedding) / 1e9 == pytest.approx(3.6, abs=0.05)
