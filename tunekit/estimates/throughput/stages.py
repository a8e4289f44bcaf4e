"""Transfers of a device under NeMo Automodel, and the pace of a pipeline: that of its slowest stage.

Read from nemo_automodel 0.7.0, as `tunekit.estimates.memory.stages` says; nothing of it was compared with a run.

Devices of a stage are consecutive, and so are those that have different experts (`distributed/mesh_utils.py`): a
neighbour in the pipeline is as many devices away as a stage has. Weights are gathered once a step where they stay from
micro-batch to micro-batch, and gradients are reduced behind the last backward pass.

Of experts a device gathers the tokens of all that have others, in the compute type, and has what they give summed in
float32 over all of them; the backward pass does both the other way round (`moe/experts.py`, `GroupedExperts`). That is
(ep - 1) T h (e + 8) bytes in a layer, of T tokens of h values of e bytes, however many experts a token goes through.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tunekit.estimates.facts import ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.stages import layers_per_stage, stages_of
from tunekit.estimates.memory.states import BYTES, Dtype
from tunekit.estimates.throughput.step import Hides, Transfer


def staged_transfers(
    model: ModelFacts,
    dtype: Dtype,
    layout: Layout,
    num_nodes: int,
    num_tokens: float,
    *,
    gradient_checkpointing: bool,
    trained_dtype: Dtype = "float32",
    update_bytes: int = 0,
) -> tuple[Transfer, ...]:
    """Return all that a device of the largest stage sends in a step; the arguments are as in `transfers_of`."""
    sender = _Sender(model, dtype, layout, num_nodes, num_tokens, trained_dtype)
    everything = [
        *sender.of_states(),
        *sender.of_experts(again=gradient_checkpointing),
        *sender.of_neighbours(),
        sender.ring(layout.num_shards, 1, "gathering updates", update_bytes / layout.pp_size, "nothing", per_step=True),
    ]
    return tuple(transfer for transfer in everything if transfer.sent_bytes > 0)


@dataclass(frozen=True)
class _Sender:
    """A device of the stage with the most parameters, and what it sends."""

    model: ModelFacts
    dtype: Dtype
    layout: Layout
    num_nodes: int
    num_tokens: float
    trained_dtype: Dtype

    def ring(
        self, size: int, stride: int, what: str, size_bytes: float, hides: Hides, *, per_step: bool = False
    ) -> Transfer:
        """A ring of `size` devices, every `stride`-th of a stage, in which `size_bytes` are gathered or reduced."""
        per_node = self.layout.num_processes // self.num_nodes
        num_in_node = min(size, max(1, per_node // stride))
        return Transfer(what, (size - 1) / size * size_bytes, "devices", hides, per_step, num_in_node, size)

    def of_states(self) -> Iterator[Transfer]:
        """Yield the transfers of weights and gradients among the devices of a stage, and of experts among those that
        have the same.
        """
        layout, is_piped = self.layout, self.layout.pp_size > 1
        stages = stages_of(self.model, layout)
        unit = max((stage.all for stage in stages), key=lambda unit: unit.whole)
        once = is_piped and not layout.sync_each_batch
        times = 1 if once or not layout.reshard_after_forward else 2
        weight, gradient = BYTES[self.dtype], BYTES[layout.reduces_in(self.dtype, self.trained_dtype)]
        groups = [("", unit.whole - unit.experts, layout.num_shards, 1)]
        if layout.ep_size > 1:
            groups.append((" of experts", unit.experts, layout.num_shards // layout.ep_size, layout.ep_size))
        for kind, whole, size, stride in groups:
            yield self.ring(size, stride, f"gathering weights{kind}", times * weight * whole, "compute", per_step=once)
            # A pipeline reduces them when its last backward pass is over.
            hides: Hides = "nothing" if once else "compute"
            reduced = gradient * whole
            often = not layout.sync_each_batch
            yield self.ring(size, stride, f"reducing gradients{kind}", reduced, hides, per_step=often)

    def of_experts(self, *, again: bool) -> Iterator[Transfer]:
        """Yield the tokens that devices with different experts exchange in the layers of a mean stage."""
        mixture, size = self.model.mixture, self.layout.ep_size
        if mixture is None or size == 1:
            return
        # An all-reduce sends twice what a ring gathers.
        layer = size * self.num_tokens * self.model.hidden_size * (BYTES[self.dtype] + 2 * 4)
        times = (3 if again else 2) * mixture.num_layers / self.layout.pp_size
        yield self.ring(size, 1, "exchanging tokens of experts", times * layer, "nothing")

    def of_neighbours(self) -> Iterator[Transfer]:
        """Yield the activations and gradients that stages send each other: to one neighbour, or one each to two."""
        if self.layout.pp_size == 1:
            return
        stream = BYTES[self.dtype] * self.num_tokens * self.model.hidden_size
        # The slowest of the borders sets the pace: one lies between nodes where there are several.
        num_in_node = 1 if self.num_nodes > 1 else 2
        yield Transfer("passing activations on", 2 * stream, "devices", "neighbours", False, num_in_node, 2)


def slowest_stage(model: ModelFacts, pp_size: int, again: bool) -> float:
    """Return the operations of the stage that has most, over those of a mean one, attention's own scores aside.

    Args:
        model: The model.
        pp_size: Number of stages.
        again: Whether layers are computed again in the backward pass.
    """
    active = model.num_experts_per_token / model.num_experts if model.num_experts else 1.0
    layers = [
        sum(
            times * math.prod(shape) * (active if shape in model.expert_shapes else 1)
            for shape, times in shapes.items()
            if len(shape) > 1
        )
        for shapes in model.layer_shapes
    ]
    work, start, passes = [], 0, 4 if again else 3
    for number in layers_per_stage(model.num_layers, pp_size):
        work.append(passes * sum(layers[start : start + number]))
        start += number
    work[-1] += 3 * model.vocab_size * model.hidden_size
    return max(work) * pp_size / sum(work)
