"""The peak of a training step on pictures, towers and all, against a trace of the real modules."""

from dataclasses import replace

import pytest

from tests.estimates.grid_vision import LORA, SMOLVLM_2B, STEPS, TOWER_LORA
from tests.estimates.oracle_vision import estimate_of, facts_of, trace
from tunekit.estimates.memory.pictures import counts
from tunekit.estimates.models.model_config import complete
from tunekit.estimates.models.towers import tower_of

SMALL = STEPS["smolvlm2-2.2b lora"]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_peak_is_within_3_percent_of_a_trace(name):
    traced, estimated = trace(STEPS[name]), estimate_of(STEPS[name])
    assert estimated.tensor_bytes == pytest.approx(traced.peak_bytes, rel=0.03)


def test_a_tower_of_cross_attention_is_counted_only_where_it_is_frozen():
    tower = facts_of(STEPS["llama-3.2-11b-vision lora"]).tower
    assert counts(tower, LORA)
    assert not counts(tower, TOWER_LORA)
    assert counts(facts_of(SMALL).tower, TOWER_LORA)


def test_pixels_of_all_micro_batches_are_there_from_the_begin_to_the_end():
    more = estimate_of(SMALL).phases["optimizer"] - estimate_of(replace(SMALL, accumulates=False)).phases["optimizer"]
    # Pixels in float32, and for each three of them whether they are padding.
    assert more == 13 * 384 * 384 * (3 * 4 + 1)


def test_a_tower_that_encodes_more_than_a_layer_of_text_needs_is_the_peak():
    estimated = estimate_of(STEPS["smolvlm2-2.2b lora, 17 tiles"])
    assert estimated.phase == "pictures"
    assert estimated.peak_words == "peak while the vision tower encodes images"
    assert sum(estimated.parts.values()) == estimated.total_bytes


def test_norms_of_a_tower_as_wide_as_the_text_are_no_norms_of_the_text():
    vision = {**SMOLVLM_2B["vision_config"], "hidden_size": 2048}
    wide = replace(SMALL, config={**SMOLVLM_2B, "vision_config": vision})
    assert facts_of(wide).num_stream_norms == facts_of(SMALL).num_stream_norms == 2


def test_a_config_with_the_text_decoder_beside_the_tower_is_read_as_one_with_two_parts():
    """Qwen2.5-VL's on the hub are written so."""
    config = STEPS["qwen2.5-vl-7b lora, two pictures"].config
    nested = {**config, "text_config": {"model_type": "qwen2_5_vl_text", **config["text_config"]}}
    text = {**config["text_config"], "model_type": "qwen2_5_vl"}
    flat = {**{key: value for key, value in config.items() if key != "text_config"}, **text}
    small = STEPS["qwen2.5-vl-7b lora, two pictures"]
    ours, theirs = facts_of(replace(small, config=flat)), facts_of(replace(small, config=nested))
    assert (ours.tensors, ours.tower, ours.rope) == (theirs.tensors, theirs.tower, theirs.rope)
    assert ours.is_multimodal


def test_a_config_that_leaves_out_defaults_describes_the_same_tower():
    from transformers import CONFIG_MAPPING

    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {}}
    assert tower_of(complete(config)) == tower_of(CONFIG_MAPPING["gemma3"]().to_dict())
