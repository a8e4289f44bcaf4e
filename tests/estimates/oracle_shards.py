"""What a training step allocates on one of many devices, traced: real FSDP2 or DDP on a group of fake processes.

The model is built on `meta`, wrapped by Accelerate's own `fsdp2_prepare_model` for the mesh of the layout or by torch's
`DistributedDataParallel`, given fake CPU tensors and taken through one or three micro-batches as in
`tests.estimates.oracle`. Collectives of the `fake` backend move nothing, but their buffers are there. FSDP2 frees and
gathers weights by resizing storages: that is counted too.

What lies outside, besides what lies outside of a trace on one device: streams. On CUDA what one stream frees waits for
the others before it is used again.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from bitsandbytes.nn import Linear4bit
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.estimates.oracle import Step, Trace, built, drawn_deep, take
from tunekit.estimates.layout import Layout
from tunekit.models.quantization import SHARDED, Stack, expert_stacks
from tunekit.models.sharded_4bit import divide_bytes, scales_of_sharded
from tunekit.models.step_trace import LiveBytes, as_on_cuda, quantized, watch
from tunekit.recipe.sections.adapters import QloraAdapter
from tunekit.training.engines.fsdp2 import layer_types

NUM_BATCHES = 3
"""Micro-batches of a step that accumulates: one that leaves gradients, one that adds to them, and one that reduces."""


@dataclass(frozen=True)
class ShardedStep:
    """One training step of FSDP2 or DDP to trace."""

    step: Step
    layout: Layout

    def with_layers(self, num_layers: int) -> "ShardedStep":
        return ShardedStep(self.step.with_layers(num_layers), self.layout)

    def __str__(self) -> str:
        layout = self.layout
        replicas = f"{layout.dp_replicate_size}x" if layout.dp_replicate_size > 1 else ""
        kept = "" if layout.reshard_after_forward else " kept"
        synced = " synced" if layout.sync_each_batch else ""
        return f"{self.step} on {replicas}{layout.dp_shard_size}{kept}{synced}"


def trace(sharded: ShardedStep) -> Trace:
    """The live bytes of one step on one device."""
    step, layout = sharded.step, sharded.layout
    with fake_processes(layout) as mesh:
        with torch.device("meta"):
            model, base = built(step)
            if isinstance(step.adapter, QloraAdapter):
                for module, name, shape in in_4_bits(base):
                    divide_bytes(module, name, Stack(quantized(step.adapter, torch.bfloat16, *shape)), None)
        model.train()
        if layout.strategy == "fsdp2":
            model = fsdp2_prepare_model(fake_accelerator(sharded, mesh, layer_types(list(model.modules()))), model)
        with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda():
            model.to_empty(device="cpu")
            base.tie_weights()
            if isinstance(step.adapter, QloraAdapter):
                give_scales(base, step.adapter)
            trained = {id(p): local(p).nbytes for p in model.parameters() if p.requires_grad}
            tracker = LiveBytes(map(local, (*model.parameters(), *model.buffers(), *scales_of_sharded(model))))
            watch(base, tracker)
            if layout.strategy == "ddp":
                model = _copied(model, tracker)

            def reduce(is_last: bool) -> None:
                if isinstance(model, DistributedDataParallel):
                    # As its `no_sync` does.
                    model.require_backward_grad_sync = is_last
                else:
                    model.set_requires_gradient_sync(is_last or layout.sync_each_batch)

            num_batches = NUM_BATCHES if step.accumulates else 1
            take(step, model, base, tracker, num_batches=num_batches, before_batch=reduce)
            return Trace(tracker.own_bytes, 2 * sum(trained.values()), dict(tracker.peaks))


def in_4_bits(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, tuple[int, ...]]]:
    """The modules of a model that QLoRA has in 4 bits, with the names and shapes of these weights."""
    for module in list(model.modules()):
        if isinstance(module, Linear4bit):
            yield module, "weight", (module.out_features, module.in_features)
        for name in expert_stacks(module):
            yield module, name, tuple(module._parameters[name].shape)


def give_scales(model: torch.nn.Module, adapter: QloraAdapter) -> None:
    """Give modules scales with storage, in the place of those on `meta`."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            shape = module.out_features, module.in_features
            module.quant_state = quantized(adapter, torch.bfloat16, *shape).state
        for name, stack in vars(module).get(SHARDED, {}).items():
            vars(module)[SHARDED][name] = Stack(quantized(adapter, torch.bfloat16, *stack.shape))


def _copied(model: torch.nn.Module, tracker: LiveBytes) -> DistributedDataParallel:
    """The model in DDP, whose reducer makes its buckets here.

    The `fake` backend's all-reduce gives the reducer nothing to wait for, so a hook hands it the bucket, in which the
    sum would be.
    """

    def hook(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    with tracker:
        wrapped = DistributedDataParallel(model, init_sync=False)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def trace_deep(sharded: ShardedStep) -> Trace:
    """The live bytes of one step of a deep model, drawn through those of shallow ones."""
    return drawn_deep(sharded.step, lambda num_layers: trace(sharded.with_layers(num_layers)))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def fake_processes(layout: Layout) -> Iterator[DeviceMesh]:
    """A group of processes of which only this one is there, and the mesh that Accelerate would make of it."""
    dist.init_process_group("fake", rank=0, world_size=layout.num_processes, store=FakeStore())
    try:
        sizes = (layout.dp_replicate_size, layout.dp_shard_size)
        if sizes[0] == 1:
            yield init_device_mesh("cpu", sizes[1:], mesh_dim_names=("dp_shard",))
        else:
            yield init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard"))
    finally:
        dist.destroy_process_group()


def fake_accelerator(sharded: ShardedStep, mesh: DeviceMesh, layers: Collection[str] | None = None) -> SimpleNamespace:
    """What `fsdp2_prepare_model` reads of an Accelerator, which cannot be made without as many processes."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=None if layers is None else sorted(layers),
        reshard_after_forward=sharded.layout.reshard_after_forward,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    mixed = "bf16" if sharded.step.autocasts else "no"
    if mixed != "no":
        plugin.set_mixed_precision(mixed)
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision=mixed,
        is_main_process=False,
        device=torch.device("cpu"),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
    )
