"""In which layouts a checkpoint of another one can be gone on from."""

import pytest

from tunekit.estimates.layout import Layout
from tunekit.planner.resume import obstacle

ALONE = Layout()
DDP, DDP_OF_4 = (Layout(strategy="ddp", dp_replicate_size=num) for num in (2, 4))
FSDP2, FSDP2_OF_4 = (Layout(strategy="fsdp2", dp_shard_size=num) for num in (2, 4))
HYBRID = Layout(strategy="fsdp2", dp_replicate_size=2, dp_shard_size=2)
ZERO2, ZERO2_OF_4 = (Layout(strategy="zero2", dp_shard_size=num) for num in (2, 4))
ZERO3, ZERO3_OFFLOADED = (
    Layout(strategy="zero3", dp_shard_size=2, offload_optimizer_device=where) for where in ("none", "cpu")
)
TENSOR = Layout(strategy="fsdp2", dp_shard_size=2, tp_size=2)


@pytest.mark.parametrize("saved", [ALONE, DDP, DDP_OF_4, FSDP2, FSDP2_OF_4, HYBRID])
@pytest.mark.parametrize("layout", [ALONE, DDP, DDP_OF_4, FSDP2, FSDP2_OF_4, HYBRID])
def test_whole_and_sharded_states_are_taken_in_any_number_of_processes(saved, layout):
    assert obstacle(saved, layout) is None


@pytest.mark.parametrize("layout", [ZERO2, ZERO3, ZERO3_OFFLOADED])
def test_what_deepspeed_divided_it_takes_back_as_it_was(layout):
    assert obstacle(layout, layout) is None


@pytest.mark.parametrize(
    ("saved", "layout"),
    [(ZERO2, ZERO2_OF_4), (ZERO2, ZERO3), (ZERO3, ZERO3_OFFLOADED), (ZERO2, DDP), (FSDP2, ZERO3), (ALONE, ZERO2)],
)
def test_what_deepspeed_does_not_take_says_what_would_do(saved, layout):
    found = obstacle(saved, layout)
    assert "DeepSpeed" in found.why
    assert f"parallel.strategy={saved.strategy} parallel.num_processes={saved.num_processes}" in found.hint


@pytest.mark.parametrize("layout", [DDP, FSDP2, FSDP2_OF_4, HYBRID])
@pytest.mark.parametrize("bits", [8, 4])
def test_states_in_blocks_are_taken_in_as_many_parts_as_they_were(bits, layout):
    optim = f"tunekit_adamw_{bits}bit"
    found = obstacle(FSDP2, layout, optim)
    if layout.num_shards == 2:
        assert found is None
    else:
        assert found.why == f"the {bits}-bit states of {optim} are in blocks of 2 parts of each weight"
        assert found.hint == "resume with parallel.strategy=fsdp2 parallel.num_processes=2"
    assert obstacle(ALONE, DDP, optim) is None


def test_layers_that_are_divided_go_on_from_nothing():
    assert "tensor parallel" in obstacle(FSDP2, TENSOR).why
