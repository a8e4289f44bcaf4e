"""What holds for every recipe, model and machine, tried on ones that are drawn."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.estimates.shapes import llama_facts
from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import MemoryEstimate
from tunekit.planner.decisions.candidates import Setting
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve, setting_of

NODE = 8

models = st.builds(
    lambda heads, groups, head_dim, wide, layers, vocab, tied: llama_facts(
        path="drawn",
        hidden=heads * head_dim,
        intermediate=int(heads * head_dim * wide) // 256 * 256,
        layers=layers,
        heads=heads,
        kv_heads=max(1, heads // groups),
        vocab=vocab,
        tied=tied,
    ),
    heads=st.sampled_from([16, 32, 64]),
    groups=st.sampled_from([1, 4, 8]),
    head_dim=st.sampled_from([64, 128]),
    wide=st.sampled_from([2.5, 3.5, 4.0]),
    layers=st.integers(8, 100),
    vocab=st.sampled_from([32_000, 128_256, 262_144]),
    tied=st.booleans(),
)

UNTIED = llama_facts(
    path="drawn", hidden=2048, intermediate=8192, layers=59, heads=16, kv_heads=16, vocab=262_144, tied=False
)

WIDE_TABLE = llama_facts(
    path="drawn", hidden=8192, intermediate=20480, layers=8, heads=64, kv_heads=64, vocab=262_144, tied=True
)

SHARDED = ("fsdp2", "zero1", "zero2", "zero3")


@st.composite
def recipes(draw, *, adapters=("full", "lora", "qlora")):
    return recipe(
        adapter=draw(st.sampled_from(adapters)),
        data={"max_length": draw(st.sampled_from([512, 1024, 2048, 4096, 8192])), "packing": draw(st.booleans())},
        train={"global_batch_size": draw(st.sampled_from([8, 16, 24, 64, 96]))},
    )


machines = st.sampled_from(["h100", "4xl40s", "8xh100", "8xrtx4090", "2x8xa100-40gb", "4x8xh200", "8x8xb200"])


def memory(setting: Setting, layout: Layout, size: int, *, checkpointing: bool) -> MemoryEstimate:
    nodes = -(-layout.num_processes // NODE)
    return setting.memory(layout, nodes, size, checkpointing=checkpointing)


def with_recipe(asked, model) -> Setting:
    """A setting in which every batch is so large that gradients are accumulated."""
    train = asked.train.model_copy(update={"global_batch_size": 2**20})
    return setting_of(asked.model_copy(update={"train": train}), find_machine("8xh100").hardware(), model)


@given(recipes(adapters=("full", "lora")), models, st.sampled_from(SHARDED), st.integers(1, 4), st.booleans())
def test_more_devices_never_need_more_memory_each(asked, model, strategy, size, checkpointing):
    setting = with_recipe(asked, model)
    needed = [
        memory(setting, Layout(strategy=strategy, dp_shard_size=shards), size, checkpointing=checkpointing).total_bytes
        # A tensor with fewer rows than there are devices is padded: an adapter of rank 16 on more than 16 of them.
        for shards in (2, 4, 8, 16, *((64, 512) if asked.adapter.type == "full" else ()))
    ]
    assert needed == sorted(needed, reverse=True)


@given(recipes(adapters=("full", "lora")), models, st.integers(1, 4), st.booleans())
def test_copies_of_a_shard_group_need_what_one_group_needs(asked, model, size, checkpointing):
    setting = with_recipe(asked, model)
    one, four = (
        memory(
            setting,
            Layout(strategy="fsdp2", dp_shard_size=8, dp_replicate_size=copies, sync_each_batch=True),
            size,
            checkpointing=checkpointing,
        )
        for copies in (1, 4)
    )
    # Copies sum their gradients: that may need a buffer, and never less than one group alone.
    assert one.total_bytes <= four.total_bytes
    assert one.parts["weights"] == four.parts["weights"]
    if "load" not in (one.phase, four.phase):  # where most is held as a model is loaded, there is no optimizer yet
        assert one.parts["optimizer"] == four.parts["optimizer"]


@given(recipes(), models, st.sampled_from(["single", "ddp", "fsdp2", "zero2", "zero3"]), st.booleans())
@example(recipe(adapter="lora", data={"max_length": 256}), UNTIED, "fsdp2", True)  # most is held as it is loaded
def test_the_parts_are_those_of_the_phase_that_needs_most(asked, model, strategy, checkpointing):
    assume(not (asked.adapter.type == "qlora" and strategy == "zero3"))
    layout = Layout(strategy=strategy, dp_shard_size=8 if strategy not in ("single", "ddp") else 1)
    estimate = memory(with_recipe(asked, model), layout, 2, checkpointing=checkpointing)
    tensors = sum(size for part, size in estimate.parts.items() if part not in ("context", "reserve"))
    assert tensors == estimate.phases[estimate.phase] == max(estimate.phases.values())


@given(recipes(), models, st.sampled_from(["single", "ddp", "fsdp2", "zero2", "zero3"]), st.booleans())
@example(recipe(adapter="lora"), UNTIED, "fsdp2", True)
@example(recipe(adapter="qlora"), WIDE_TABLE, "fsdp2", False)
def test_longer_sequences_never_need_less(asked, model, strategy, checkpointing):
    assume(not (asked.adapter.type == "qlora" and strategy == "zero3"))
    layout = Layout(strategy=strategy, dp_shard_size=8 if strategy not in ("single", "ddp") else 1)
    needed = []
    for length in (256, 512, 1024, 2048, 4096, 16384, 65536):
        data = asked.data.model_copy(update={"max_length": length})
        setting = with_recipe(asked.model_copy(update={"data": data}), model)
        needed.append(memory(setting, layout, 2, checkpointing=checkpointing).total_bytes)
    assert needed == sorted(needed)


@given(recipes(), models, st.booleans(), st.sampled_from(["single", "ddp", "fsdp2"]))
def test_adapters_never_need_more_than_all_weights(asked, model, checkpointing, strategy):
    layout = Layout(strategy=strategy, dp_shard_size=8 if strategy == "fsdp2" else 1)
    needed = [
        memory(
            with_recipe(recipe(adapter=kind, data=asked.data.model_dump(include={"max_length"})), model),
            layout,
            1,
            checkpointing=checkpointing,
        ).total_bytes
        for kind in ("full", "lora", "qlora")
    ]
    assert needed == sorted(needed, reverse=True)


@given(recipes(), models, st.sampled_from(["single", "fsdp2"]))
def test_recomputing_never_needs_more(asked, model, strategy):
    setting = with_recipe(asked, model)
    layout = Layout(strategy=strategy, dp_shard_size=8 if strategy == "fsdp2" else 1)
    kept, recomputed = (memory(setting, layout, 2, checkpointing=again).total_bytes for again in (False, True))
    assert recomputed <= kept * 1.001  # of small models whose peak is the optimizer's step both are the same


@given(recipes(), models, machines)
def test_a_plan_fits_and_comes_out_even_and_is_the_same_again(asked, model, machine):
    hardware = find_machine(machine).hardware()
    before = (asked.model_dump(), hardware.model_dump(), model.model_dump())
    try:
        plan = resolve(asked, hardware, model, ROWS)
    except PlanError as error:
        assert "does not fit" in str(error)
        return
    assert plan.memory.total_bytes <= plan.memory_limit_bytes
    assert plan.memory.total_bytes == sum(plan.memory.parts.values())
    batch = plan.micro_batch_size * plan.gradient_accumulation_steps * plan.layout.num_batches
    assert batch == asked.train.global_batch_size
    assert all(one.needed_bytes is None or one.needed_bytes > 0 for one in plan.rejected)
    assert resolve(asked, hardware, model, ROWS) == plan
    assert Plan.from_yaml(plan.to_yaml(), plan.recipe) == plan
    assert (asked.model_dump(), hardware.model_dump(), model.model_dump()) == before


@pytest.mark.slow
@given(recipes(), models, st.sampled_from(["", "8x", "2x8x"]))
def test_what_fits_a_small_card_fits_a_large_one_no_later_in_the_list(asked, model, number):
    tried = []
    for card in ("a100-40gb", "a100-80gb", "h200"):
        try:
            tried.append(len(resolve(asked, find_machine(number + card).hardware(), model, ROWS).rejected))
        except PlanError:
            tried.append(1000)
    assert tried == sorted(tried, reverse=True)
