"""How long a step takes where devices send meanwhile, worked out by hand, and what holds for every layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.estimates.shapes import LLAMA_1B, LLAMA_8B
from tests.estimates.test_speed import DEVICE, STEP
from tunekit.estimates.facts import DataFacts, Figures
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.layout import Layout
from tunekit.estimates.throughput.speed import speed_of, step_of
from tunekit.estimates.throughput.step import (
    COLLATED_TOKENS_PER_SECOND,
    CPU_PARAMS_PER_SECOND,
    FORWARD_SECONDS,
    NETWORK_SHARE,
    NVLINK_SHARE,
    Range,
    Step,
    Transfer,
    communication_words,
    rate_of,
    seconds_of,
    transfers_of,
)
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter

FIGURES = Figures(
    flops_16bit=100e12,
    memory_bytes_per_second=1e12,
    link_bytes_per_second=100e9,
    network_bytes_per_second=10e9,
    host_bytes_per_second=10e9,
)
RATE = Range(low=35e12, high=70e12)
"""STEP computes in 0.2 to 0.4 s and updates in 0.5 s."""
SLOWEST = 0.4 + 0.5 + 10_000 / COLLATED_TOKENS_PER_SECOND
"""Where nobody collates its 10,000 tokens meanwhile: 0.905 s."""


def sends(size_bytes, hides_behind, **how) -> Transfer:
    return Transfer("x", size_bytes, **{"link": "devices", "num_in_node": 2, "num_devices": 2, **how}, hides_behind=hides_behind)  # fmt: skip # noqa: E501


def step(*transfers, **changes) -> Step:
    return Step(**{**vars(STEP), "transfers": transfers, **changes})


def seconds(*transfers, **changes) -> Range:
    span = seconds_of(step(*transfers, **changes), RATE, FIGURES)
    return Range(low=round(span.low, 4), high=round(span.high, 4))


def test_a_micro_batch_takes_the_longer_of_computing_and_sending():
    assert seconds() == Range(low=0.7, high=SLOWEST)
    # 8.4 GB in 0.1 to 0.2 s are hidden.
    assert seconds(sends(8.4e9, "compute")) == Range(low=0.7, high=SLOWEST)
    # 33.6 GB take 0.4 to 0.8 s.
    slow = 33.6 / (100 * NVLINK_SHARE.low)
    assert seconds(sends(33.6e9, "compute")) == Range(low=0.9, high=round(slow + 0.505, 4))
    # Four micro-batches send four times, and compute a quarter each: 0.1 s in 0.05 is not hidden.
    each = 8.4 / (100 * NVLINK_SHARE.low)
    assert seconds(sends(8.4e9, "compute"), num_micro_batches=4) == Range(low=0.9, high=round(4 * each + 0.505, 4))


def test_what_hides_behind_nothing_comes_on_top():
    each = 8.4 / (100 * NVLINK_SHARE.low)
    assert seconds(sends(8.4e9, "nothing")) == Range(low=0.8, high=round(SLOWEST + each, 4))
    # A ring of keys and values hides behind attention in the better end alone.
    assert seconds(sends(8.4e9, "attention")) == Range(low=0.7, high=round(SLOWEST + each, 4))


def test_what_is_sent_once_a_step_hides_behind_the_last_backward_pass():
    once = 8.4 / (100 * NVLINK_SHARE.low)
    sent = sends(8.4e9, "compute", per_step=True)
    # All of 0.1 s behind half of 0.2 s, and all of 0.2 s behind half of 0.4 s.
    assert seconds(sent) == Range(low=0.7, high=SLOWEST)
    # With four micro-batches there are 0.025 s of backward pass, or 0.05 s.
    assert seconds(sent, num_micro_batches=4) == Range(low=0.775, high=round(SLOWEST + once - 0.05, 4))


def test_links_of_another_kind_work_at_the_same_time():
    down = sends(0.86e9, "compute", link="host")
    # 0.1 s to the host beside 0.1 s between devices.
    assert seconds(down, sends(8.4e9, "compute"), num_micro_batches=4).low == 0.9


def test_an_optimizer_on_the_processors_takes_their_time_instead():
    layout = Layout(strategy="zero2", dp_shard_size=1, offload_optimizer_device="cpu")
    span = seconds_of(step(layout=layout), RATE, FIGURES)
    assert span.low == pytest.approx(0.2 + 1e9 / CPU_PARAMS_PER_SECOND.high)
    assert span.high == pytest.approx(SLOWEST - 0.5 + 1e9 / CPU_PARAMS_PER_SECOND.low)


def test_no_device_is_faster_than_its_rows_are_collated():
    # A million tokens of a tiny model: computed in 0.02 s, collated in half a second by one process, by 25 in as long.
    tiny = {"flops_per_token": 1.4e6, "num_tokens": 10**6, "max_computed_tokens": 10**6, "num_layers": 1}
    assert seconds(**tiny, max_workers=0).low == 0.5 + 10**6 / COLLATED_TOKENS_PER_SECOND
    assert seconds(**tiny).low == 0.5 + 0.02


def test_a_few_tokens_take_as_long_as_launching_their_kernels():
    few = seconds(num_tokens=10, max_computed_tokens=10)
    # A forward and a backward pass of ten layers, the latter worth two.
    assert few == Range(low=round(30 * FORWARD_SECONDS.low + 0.5, 4), high=round(30 * FORWARD_SECONDS.high + 0.5, 4))


def planned(layout, *, on="8xh100", length=4096, rows=1, batch=128, checkpointing=True, adapter="full", model=LLAMA_8B):
    hardware = find_machine(on).hardware()
    recipe = Recipe.model_validate(
        {
            "model": "m",
            "data": {"train": "rows.jsonl", "max_length": length},
            "train": {"global_batch_size": batch},
            "adapter": {"type": adapter},
        }
    )
    made = step_of(
        recipe,
        model,
        DataFacts(num_train=1000),
        hardware.device,
        dtype="bfloat16",
        mask_length=None,
        padding_free=False,
        micro_batch_size=rows,
        gradient_checkpointing=checkpointing,
        layout=layout,
        num_nodes=hardware.num_nodes,
    )
    return made, hardware


def words(layout, **how):
    made, hardware = planned(layout, **how)
    return communication_words(made, rate_of(made, hardware.device, hardware.figures)[0], hardware.figures)


def spans(*, model=LLAMA_8B, on, **how):
    made, hardware = planned(Layout(), on=on, model=model, **how)
    return speed_of(made, hardware.device, hardware.figures, [], num_steps=None).tokens_per_second


@pytest.mark.parametrize("on", ["a100", "h100", "h200", "b200", "l40s", "rtx4090", "rtx3090", "mi300x"])
@pytest.mark.parametrize("model", [LLAMA_1B, LLAMA_8B], ids=["1B", "8B"])
def test_speeds_are_in_order(on, model):
    """Of full training, LoRA and QLoRA; of more tokens in a micro-batch; and of longer rows."""

    def ends(*found):
        return [span.low for span in found], [span.high for span in found]

    for rows in (2, 8):
        for order in ends(*(spans(on=on, model=model, rows=rows, adapter=kind) for kind in ("full", "qlora", "lora"))):
            full, qlora, lora = order
            assert full <= lora
            assert qlora <= lora
    for adapter in ("full", "lora", "qlora"):
        for order in ends(*(spans(on=on, model=model, rows=rows, adapter=adapter) for rows in (1, 2, 4, 8, 16))):
            assert order == sorted(order)
        longer = ends(
            *(spans(on=on, model=model, length=2**k, rows=2**16 // 2**k, adapter=adapter) for k in range(9, 17))
        )
        for order in longer:
            assert order == sorted(order, reverse=True)


def test_words_say_how_many_tokens_hide_the_gathering():
    """The overlap rule: for 8 operations a parameter and 2 gathers of 2 bytes, tokens x 8 / rate >= 4 x 7/8 / speed."""
    fsdp = Layout(strategy="fsdp2", dp_shard_size=8, sync_each_batch=False)
    said = words(fsdp, rows=2)
    made, hardware = planned(fsdp, rows=2)
    fastest = rate_of(made, hardware.device, hardware.figures)[0].high
    assert 0.5 < fastest / 989e12 < 0.8
    enough = 4 * 7 / 8 / (NVLINK_SHARE.low * 450e9) * fastest / 8
    assert said.startswith("28.1 GB per micro-batch between the devices of a node, hidden by its 8,192 tokens (")
    assert said.endswith(" needed); 14.1 GB per step between the devices of a node")
    assert float(said.split(" needed")[0].split()[-1].replace(",", "")) == pytest.approx(enough, rel=0.15)
    assert "possibly hidden by its 512 tokens" in words(fsdp, length=512)
    assert "not hidden by its 1,024 tokens" in words(fsdp, on="8xrtx4090", length=1024)


def test_words_say_what_tensor_parallel_waits_for_and_what_is_not_known():
    layout = Layout(strategy="fsdp2", dp_shard_size=2, tp_size=4)
    assert "of a micro-batch spent waiting for other devices" in words(layout)
    assert words(Layout()) is None
    made, hardware = planned(layout)
    nothing = hardware.figures.model_copy(update={"link_bytes_per_second": None})
    said = communication_words(made, RATE, nothing)
    assert said == "bandwidth between the devices of a node unknown, so the time spent waiting is unknown too"


def test_torchtitans_128_gpus_keep_97_percent_as_predicted():
    """5,762 tokens/s a GPU on 8, 5,605 on 128 (benchmarks/llama3_h100_202412_torchtitan.md): sending stays hidden."""

    def each(num_devices, on):
        made, hardware = planned(
            Layout(strategy="fsdp2", dp_shard_size=num_devices, sync_each_batch=True),
            on=on,
            length=8192,
            rows=2,
            batch=2 * num_devices,
            checkpointing=False,
        )
        return speed_of(made, hardware.device, hardware.figures, [], num_steps=None).tokens_per_second.low / num_devices

    assert each(128, "16x8xh100") / each(8, "8xh100") == pytest.approx(5605 / 5762, abs=0.05)


LAYOUTS = st.builds(
    Layout,
    strategy=st.just("fsdp2"),
    dp_replicate_size=st.sampled_from([1, 2, 4]),
    dp_shard_size=st.sampled_from([1, 2, 8]),
    tp_size=st.sampled_from([1, 2]),
    reshard_after_forward=st.booleans(),
    sync_each_batch=st.booleans(),
)


@given(layout=LAYOUTS, tokens=st.integers(1, 10**6))
def test_more_of_anything_never_sends_less(layout, tokens):
    def sent(**changes):
        changed = layout.model_copy(update=changes)
        return sum(
            one.sent_bytes
            for one in transfers_of(
                LLAMA_8B,
                FullAdapter(),
                "bfloat16",
                changed,
                num_nodes=1,
                num_tokens=tokens,
                gradient_checkpointing=True,
            )
        )

    assert sent(reshard_after_forward=True) >= sent(reshard_after_forward=False)
    assert sent(dp_replicate_size=2 * layout.dp_replicate_size) >= sent()


@given(layout=LAYOUTS, link=st.floats(1e9, 1e12), factor=st.floats(1, 100))
def test_a_faster_link_never_makes_a_step_slower(layout, link, factor):
    made = step(
        *transfers_of(
            LLAMA_8B, FullAdapter(), "bfloat16", layout, num_nodes=1, num_tokens=4096, gradient_checkpointing=True
        ),
        layout=layout,
    )
    figures = FIGURES.model_copy(update={"host_bytes_per_second": None})
    slow, fast = (
        seconds_of(made, RATE, figures.model_copy(update={"link_bytes_per_second": speed}))
        for speed in (link, link * factor)
    )
    assert fast.low <= slow.low
    assert fast.high <= slow.high
    assert slow.low <= slow.high


def test_a_checkpoint_is_written_by_the_machines_of_one_replica():
    assert step(num_nodes=4, layout=Layout(strategy="ddp", dp_replicate_size=32)).num_writers == 1
    assert step(num_nodes=4, layout=Layout(strategy="fsdp2", dp_shard_size=32)).num_writers == 4
    assert step(num_nodes=4, layout=Layout(strategy="fsdp2", dp_replicate_size=2, dp_shard_size=16)).num_writers == 2


def test_one_device_and_shared_weights_agree_where_nothing_is_shared():
    alone = speed_of(step(), DEVICE, FIGURES, [], num_steps=10)
    same = speed_of(step(layout=Layout(strategy="fsdp2")), DEVICE, FIGURES, [], num_steps=10)
    assert same == alone


def test_hybrid_shards_beat_full_shards_over_a_slow_network():
    slow = Figures(**{**FIGURES.model_dump(), "network_bytes_per_second": 1.5e9})

    def time(**sizes):
        layout = Layout(strategy="fsdp2", sync_each_batch=True, **sizes)
        sent = transfers_of(
            LLAMA_8B, FullAdapter(), "bfloat16", layout, num_nodes=2, num_tokens=4096, gradient_checkpointing=True
        )
        return seconds_of(step(*sent, layout=layout, num_nodes=2), RATE, slow)

    hybrid, full = time(dp_replicate_size=2, dp_shard_size=8), time(dp_shard_size=16)
    # Hybrid: 3 x 7/8 x 16 GB inside, and an all-reduce of an eighth over one adapter each.
    inside, across = 3 * 7 / 8 * 16.06 / (100 * NVLINK_SHARE.high), 2 * 1 / 2 * 16.06 / 8 / (1.5 * NETWORK_SHARE.high)
    assert hybrid.low == pytest.approx(inside + across + 0.5, rel=0.01)
    # Full shards: 3 x 15/16 x 16 GB over 8 adapters of 1.5 GB/s.
    assert full.low == pytest.approx(3 * 15 / 16 * 16.06e9 / (12e9 * NETWORK_SHARE.high) + 0.5, rel=0.01)
