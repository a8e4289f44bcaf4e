"""Starting layouts for what tunekit cannot run, against the guides' and Meta's, and formulas by hand."""

import pytest

from tests.estimates.test_architectures import facts_of
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.models.model_config import known_models
from tunekit.planner.decisions.beyond import beyond, bubble
from tunekit.planner.decisions.candidates import MEMORY_SHARE

LLAMA_70B, LLAMA_405B = (facts_of(known_models()[f"meta-llama/Llama-3.1-{size}"].config) for size in ("70B", "405B"))


def start(model, on, *, batch=256, length=8192):
    return beyond(model, find_machine(on).hardware(), batch=batch, length=length)


@pytest.mark.parametrize(
    ("model", "on", "length", "layout"),
    [
        # The guides: TP 8, PP 8, DP 4.
        (LLAMA_405B, "32x8xh100", 8192, "TP 8 x PP 8 x DP 4"),
        # The guides: CP 2, DP 2 above 32k tokens.
        (LLAMA_405B, "32x8xh100", 65536, "TP 8 x PP 8 x CP 2 x DP 2"),
        # The guides: TP 8, PP 4, DP 2. Half as many stages fit too, with 57 of 73 GiB, and wait less for each other.
        (LLAMA_70B, "8x8xh100", 8192, "TP 8 x PP 2 x DP 4"),
    ],
)
def test_layouts_are_those_of_the_guides(model, on, length, layout):
    assert start(model, on, length=length).layout == layout


def test_metas_run_on_16384_needs_fewer_stages_with_recomputation_and_more_without():
    """Llama 3 405B: TP 8, PP 16, DP 128, without recomputing (arXiv 2407.21783, table 4).

    By the published formula 16 stages keep 66 GB of activations beside 19 GB of states, more than 80 GB; Meta frees
    tensors early, which the formula does not know. So here it is 32 stages.
    """
    found = start(LLAMA_405B, "2048x8xh100", batch=2048)
    assert (found.tp, found.pp, found.dp, found.recomputes) == (8, 32, 64, False)
    assert found.dp * found.num_micro_batches == 2048
    # 16 stages: 405.9e9 / 128 x (6 + 12/128) bytes of states; 126 layers of (18 h + 4 i) s bytes, an eighth each.
    states = 405.9e9 / 128 * (6 + 12 / 128)
    activations = 126 * 8192 * (18 * 16384 + 4 * 53248) / 8
    assert states + activations > 80e9


def test_405b_does_not_fit_32_devices_whatever_a_guide_says():
    """A guide trains 405B on 32 H100 with TP 8, PP 4: 18 bytes a parameter are 228 GB a device."""
    found = start(LLAMA_405B, "4x8xh100")
    assert (found.num_devices, found.hardware.num_nodes) == (128, 4)
    assert found.words()[0].startswith(
        "Megatron-Core or TorchTitan can, but not on 32 devices; starting point on 128 x "
    )


def test_memory_is_worked_out_as_by_hand():
    found = start(LLAMA_405B, "32x8xh100")
    h, i, s, table = 16384, 53248, 8192, 128256 * 16384
    states = ((405.85e9 - 2 * table) / 64 + table / 8) * (6 + 12 / 4)
    # Inputs of 126 / 8 layers of 8 micro-batches, and one layer whole; an eighth each.
    activations = (126 * 2 * s * h + s * (18 * h + 4 * i)) / 8
    assert found.recomputes
    assert found.memory_bytes == pytest.approx(states + activations, rel=0.001)
    assert found.memory_bytes < MEMORY_SHARE["cuda"] * found.hardware.device.memory_free_bytes


def test_the_bubble_is_that_of_the_guides():
    assert bubble(8, 64) == pytest.approx(7 / 71)
    assert bubble(1, 64) == 0
    # Parts of a stage divide the wait, not the work: 7 / 8 beside 64.
    assert bubble(8, 64, 8) == pytest.approx((7 / 8) / (64 + 7 / 8))


def test_metas_speed_lies_in_the_range():
    """380 to 430 TFLOP/s a device (arXiv 2407.21783, section 3.3.2), of 6 operations a parameter and attention."""
    found = start(LLAMA_405B, "32x8xh100")
    # Of attention the half that is not masked.
    operations = 6 * 405.85e9 + 6 * 126 * 16384 * 8192
    fastest = found.tokens_per_second.high * operations / 256
    slowest = found.tokens_per_second.low * operations / 256
    # Meta did not recompute; this layout does, a third more.
    assert slowest < 380e12 * 3 / 4
    assert fastest > 430e12 * 3 / 4


def test_tensor_parallel_sends_six_sums_of_activations_a_layer_where_it_recomputes():
    sent = dict(start(LLAMA_405B, "32x8xh100").sent)
    # 64 micro-batches x 15.75 layers x 6 all-reduces of 8192 x 16384 bfloat16 values among 8.
    assert sent["TP"] == pytest.approx(64 * 126 / 8 * 6 * 2 * 7 / 8 * 8192 * 16384 * 2)
    # Two bytes a value to the next stage and back, an eighth each, for each of 8 parts.
    assert sent["PP"] == pytest.approx(64 * 8 * 2 * 8192 * 16384 * 2 / 8)


def test_experts_are_divided_and_tokens_sent_to_them():
    found = start(facts_of(known_models()["mistralai/Mixtral-8x7B-v0.1"].config), "8x8xh100", length=4096)
    assert found.ep > 1
    assert 8 % found.ep == 0
    assert dict(found.sent)["EP"] > 0
    assert f"EP {found.ep}" in found.layout


def test_every_layout_uses_all_devices_and_the_whole_batch():
    for name in ("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3"):
        found = start(facts_of(known_models()[name].config), "16x8xh200", batch=512, length=4096)
        assert found.tp * found.pp * found.cp * found.dp == found.num_devices
        assert found.dp * found.num_micro_batches == 512
        assert found.memory_bytes <= MEMORY_SHARE["cuda"] * found.hardware.device.memory_free_bytes


def test_words_fit_a_terminal_and_leave_out_what_is_not_known():
    for on in ("4x8xh100", "32x8xh100", "8xrtx4090"):
        assert max(map(len, start(LLAMA_405B, on).words())) <= 100
    known, unknown = start(LLAMA_405B, "32x8xh100"), start(LLAMA_405B, "8xrtx4090")
    assert known.words()[-1].startswith("throughput (estimate): ")
    assert known.words()[-1].endswith(" USD per billion tokens")
    # Nothing is known of a network between such cards.
    assert unknown.tokens_per_second is None
    assert not any(line.startswith("throughput") for line in unknown.words())
