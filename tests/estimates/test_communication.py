"""Bytes that devices send, against those that torch's collectives are asked for, and worked out by hand."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.estimates.shapes import LLAMA_8B
from tests.estimates.test_memory import build, facts_of, with_adapter
from tunekit.estimates.facts import Figures
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.states import num_trainable_params
from tunekit.estimates.throughput.step import (
    HOST_SHARE,
    NETWORK_SHARE,
    NVLINK_SHARE,
    PCIE_SHARE,
    Range,
    Transfer,
    gathered_bytes,
    transfers_of,
)
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter

RANKS = 4


class Collectives(TorchDispatchMode):
    """Bytes that collectives gather or reduce in all, by their kind."""

    def __init__(self):
        super().__init__()
        self.sizes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if "allgather_base" in name:
            self.sizes["gathered"] += args[0].nbytes
        elif "reduce_scatter_base" in name:
            self.sizes["reduced"] += args[1].nbytes
        elif "all_reduce" in name:
            self.sizes["summed"] += args[0].nbytes
        return function(*args, **(kwargs or {}))


@pytest.fixture
def ranks():
    """One process that takes itself for the first of several; what the others would send is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def sharded_collectives(adapter, *, micro_batches, sync_each_batch, reshard) -> Counter:
    """What FSDP2 gathers and reduces in a step of a small model, wrapped layer by layer."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _, base = with_adapter(build(3, tied=False), adapter)
    types = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in (*base.model.layers, base.model.embed_tokens, base.lm_head):
        fully_shard(part, mp_policy=types, reshard_after_forward=reshard)
    sharded = fully_shard(base, mp_policy=types, reshard_after_forward=reshard)
    with Collectives() as counted:
        for place in range(micro_batches):
            sharded.set_requires_gradient_sync(sync_each_batch or place == micro_batches - 1)
            ids = torch.randint(0, 160, (2, 16))
            base(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counted.sizes


def sent_bytes(adapter, layout, *, micro_batches, facts=None, **changes) -> dict[str, float]:
    arguments = {"num_nodes": 1, "num_tokens": 32, "gradient_checkpointing": False, **changes}
    sent = {}
    for one in transfers_of(facts or facts_of(build(3, tied=False)), adapter, "bfloat16", layout, **arguments):
        sent[one.what] = sent.get(one.what, 0) + one.sent_bytes * (1 if one.per_step else micro_batches)
    return sent


@pytest.mark.sample(3)
@pytest.mark.parametrize("sync_each_batch", [False, True], ids=["reduced once", "reduced each time"])
@pytest.mark.parametrize("reshard", [False, True], ids=["kept", "resharded"])
@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=8)], ids=["full", "lora"])
def test_fsdp2_sends_what_its_collectives_are_asked_for(ranks, adapter, reshard, sync_each_batch):
    asked = sharded_collectives(adapter, micro_batches=3, sync_each_batch=sync_each_batch, reshard=reshard)
    layout = Layout(
        strategy="fsdp2", dp_shard_size=RANKS, reshard_after_forward=reshard, sync_each_batch=sync_each_batch
    )
    sent = sent_bytes(adapter, layout, micro_batches=3)
    part = (RANKS - 1) / RANKS
    # Collectives pad what does not divide evenly. The frozen embedding needs no second gathering.
    assert sent["gathering weights"] == pytest.approx(part * asked["gathered"], rel=0.05)
    assert sent["reducing gradients"] == pytest.approx(part * asked["reduced"], rel=0.02)


@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=8)], ids=["full", "lora"])
def test_ddp_sums_gradients_once_a_step_in_float32(ranks, adapter):
    model, _ = with_adapter(build(3, tied=False), adapter)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    summed = []

    def take(_, bucket):
        summed.append(bucket.buffer().nbytes)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    replica.register_comm_hook(None, take)
    ids = torch.randint(0, 160, (2, 16))
    for syncs in (replica.no_sync(), nullcontext()):
        with syncs, torch.autocast("cpu", torch.bfloat16):
            replica(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    sent = sent_bytes(adapter, Layout(strategy="ddp", dp_replicate_size=RANKS), micro_batches=2)
    assert sent == {"summing gradients": 2 * (RANKS - 1) / RANKS * sum(summed)}


def test_weights_of_four_bits_are_gathered_packed():
    # Of 8,030 M parameters 6,979 M are in linear layers: half a byte each; the others two.
    assert gathered_bytes(LLAMA_8B, QloraAdapter(rank=16), "bfloat16") == pytest.approx(
        0.5 * 6.979e9 + 2 * (8.030e9 - 6.979e9) + 2 * num_trainable_params(LLAMA_8B, QloraAdapter(rank=16)), rel=0.001
    )


def test_an_8b_model_moves_as_many_gigabytes_as_the_guides_say():
    """8B: 16 GB of bfloat16 gradients; in hybrid shards only an eighth of them crosses the network, twice."""
    layout = Layout(strategy="fsdp2", dp_replicate_size=4, dp_shard_size=8)
    found = {one.what: one for one in transfers_of(
        LLAMA_8B, FullAdapter(), "bfloat16", layout, num_nodes=4, num_tokens=4096, gradient_checkpointing=True
    )}  # fmt: skip
    assert found["gathering weights"].sent_bytes == pytest.approx(2 * 7 / 8 * 16.06e9, rel=0.001)
    assert found["reducing gradients"].sent_bytes == pytest.approx(7 / 8 * 16.06e9, rel=0.001)
    assert found["summing gradients"].sent_bytes == pytest.approx(2 * 3 / 4 * 16.06e9 / 8, rel=0.001)
    assert not found["gathering weights"].crosses_nodes
    assert found["summing gradients"].crosses_nodes
    assert found["summing gradients"].num_in_node == 1


@pytest.mark.parametrize(
    ("strategy", "sent"),
    [
        # Parameters, times bytes, times 7/8: reduced in each of 4 micro-batches or once, updated weights once.
        ("zero1", {"reducing gradients": 2, "gathering updated weights": 2}),
        ("zero2", {"reducing gradients": 4 * 2, "gathering updated weights": 2}),
        ("zero3", {"reducing gradients": 4 * 2, "gathering weights": 4 * 2 * 2}),
    ],
)
def test_zero_sends_more_the_more_it_divides(strategy, sent):
    layout = Layout(strategy=strategy, dp_shard_size=8)
    found = sent_bytes(FullAdapter(), layout, micro_batches=4, facts=LLAMA_8B)
    params = LLAMA_8B.num_params * 7 / 8
    assert found == {what: pytest.approx(size * params) for what, size in sent.items()}


def activations(layout, *, again=False):
    return sent_bytes(
        LoraAdapter(rank=1), layout, micro_batches=1, facts=LLAMA_8B, num_tokens=8192, gradient_checkpointing=again
    )


def test_tensor_parallel_sums_activations_eight_times_a_layer_where_it_computes_again():
    # 32 layers, sums of 8192 x 4096 bfloat16 values, a ring of 4 both ways: 2 x 3/4. Two forward, and one for each of
    # queries, keys, values, gate and up in the backward pass.
    one = 32 * 8192 * 4096 * 2 * 2 * 3 / 4
    layout = Layout(strategy="fsdp2", tp_size=4)
    assert activations(layout) == {"summing activations": 7 * one}
    assert activations(layout, again=True) == {"summing activations": 8 * one}


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_tensor_parallel_sends_what_transformers_sums(ranks, recomputed):
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = build(3, tied=False, heads=8, kv_heads=4)
    plan = {
        f"model.{name.replace('*', str(layer))}{ending}": style
        for ending in (".weight", "")
        for name, style in model.config.base_model_tp_plan.items()
        for layer in range(3)
    }
    apply_tensor_parallelism(model, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)), plan)
    model.train()
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, 160, (2, 16))
    with Collectives() as counted:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    (sent,) = transfers_of(
        facts_of(build(3, tied=False)),
        FullAdapter(),
        "float32",
        Layout(strategy="fsdp2", tp_size=RANKS),
        num_nodes=1,
        num_tokens=32,
        gradient_checkpointing=recomputed,
    )
    assert sent.sent_bytes == 2 * (RANKS - 1) / RANKS * counted.sizes["summed"]


def test_context_parallel_passes_keys_and_values_and_ulysses_exchanges_heads():
    # Keys and values of 1024 values a token, forward once and backward with their gradients: 3 rings of 3/4.
    keys = 32 * 3 * 8192 * 2 * 1024 * 2 * 3 / 4
    ring = activations(Layout(strategy="fsdp2", cp_size=4))
    assert ring["passing keys and values"] == keys
    # A quarter of the tokens: queries and outputs of 4096, keys and values of 1024, in two passes.
    heads = 32 * 2 * 2048 * (2 * 4096 + 2 * 1024) * 2 * 3 / 4
    exchanged = activations(Layout(strategy="zero3", sp_size=4))
    assert exchanged["exchanging heads"] == heads


def test_what_is_offloaded_goes_over_the_host_and_what_is_on_disk_is_shared():
    fsdp = Layout(strategy="fsdp2", dp_shard_size=8, offload_param_device="cpu", offload_optimizer_device="cpu")
    found = sent_bytes(FullAdapter(), fsdp, micro_batches=1, facts=LLAMA_8B)
    # Float32 weights for both passes, float32 gradients down; an eighth each.
    assert found["fetching weights"] == pytest.approx(2 * 4 * LLAMA_8B.num_params / 8)
    assert found["sending gradients down"] == pytest.approx(4 * LLAMA_8B.num_params / 8)
    zero = Layout(strategy="zero3", dp_shard_size=8, offload_param_device="nvme", offload_optimizer_device="nvme")
    disk = [
        one
        for one in transfers_of(
            LLAMA_8B, FullAdapter(), "bfloat16", zero, num_nodes=1, num_tokens=1, gradient_checkpointing=True
        )
        if one.link == "disk"
    ]
    assert {one.what: one.sent_bytes * 8 / LLAMA_8B.num_params for one in disk} == {
        "fetching weights": 2 * 2,
        "optimizer states": 28,
    }
    # Eight devices on a disk of 7 GB/s.
    assert disk[1].seconds(Figures(disk_bytes_per_second=7e9)).low == pytest.approx(28 * LLAMA_8B.num_params / 7e9)


def test_one_device_sends_nothing():
    assert not sent_bytes(FullAdapter(), Layout(), micro_batches=4)
    assert not sent_bytes(FullAdapter(), Layout(strategy="fsdp2"), micro_batches=4)


NODE = Figures(link_bytes_per_second=450e9, host_bytes_per_second=63e9, network_bytes_per_second=50e9)


def seconds(figures=NODE, **how) -> Range | None:
    """Of a gigabyte."""
    span = Transfer("x", 1e9, **{"link": "devices", "hides_behind": "nothing", **how}).seconds(figures)
    return span and Range(low=round(span.low, 6), high=round(span.high, 6))


def near(peak, share) -> Range:
    return Range(low=round(1 / (peak * share.high), 6), high=round(1 / (peak * share.low), 6))


def test_time_is_bytes_over_a_share_of_the_slowest_link():
    inside = seconds(num_in_node=8, num_devices=8)
    assert inside == near(450, NVLINK_SHARE)
    # One of each node: its own adapter.
    across = seconds(num_in_node=1, num_devices=4)
    assert across == near(50, NETWORK_SHARE)
    # All of two nodes: eight adapters a node, as fast as the links inside.
    both = seconds(num_in_node=8, num_devices=16)
    assert both.low == pytest.approx(1 / min(450 * NVLINK_SHARE.high, 400 * NETWORK_SHARE.high), abs=1e-6)
    assert both.high == pytest.approx(1 / min(450 * NVLINK_SHARE.low, 400 * NETWORK_SHARE.low), abs=1e-6)
    assert seconds(link="host") == near(63, HOST_SHARE)


def test_devices_with_nothing_but_pcie_reach_less_of_it():
    pcie = NODE.model_copy(update={"link_bytes_per_second": 63e9})
    assert seconds(pcie, num_in_node=8, num_devices=8) == near(63, PCIE_SHARE)


@pytest.mark.parametrize(
    ("unknown", "how"),
    [
        ("link_bytes_per_second", {"num_in_node": 8, "num_devices": 8}),
        ("link_bytes_per_second", {"num_in_node": 8, "num_devices": 16}),
        ("network_bytes_per_second", {"num_in_node": 8, "num_devices": 16}),
        ("host_bytes_per_second", {"link": "host"}),
        ("disk_bytes_per_second", {"link": "disk"}),
    ],
)
def test_over_a_link_of_unknown_speed_nothing_is_guessed(unknown, how):
    assert seconds(NODE.model_copy(update={unknown: None}), **how) is None
