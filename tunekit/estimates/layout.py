"""Distribution of a run over devices, in the terms of Accelerate's plugins and `ParallelismConfig`."""

from tunekit.estimates.facts import Device, Facts
from tunekit.estimates.memory.states import Dtype
from tunekit.recipe.sections.section import Engine, OffloadDevice, Strategy


class Layout(Facts):
    """A way to spread a run: how many processes there are, what they share, and what leaves the device."""

    engine: Engine = "accelerate"
    strategy: Strategy = "single"
    dp_replicate_size: int = 1
    """Groups of devices that hold a copy of everything each, and sum their gradients."""
    dp_shard_size: int = 1
    """Devices in such a group that see different rows and divide weights, gradients or optimizer states."""
    tp_size: int = 1
    """Devices that divide each layer's products (tensor parallel). Norms and residual stream are whole on each."""
    ep_size: int = 1
    """Devices of a shard group that keep different experts whole and exchange tokens (expert parallel). Those that keep
    the same ones divide them."""
    pp_size: int = 1
    """Groups of devices that each hold some of the layers and pass micro-batches on (pipeline parallel)."""
    cp_size: int = 1
    """Devices that divide one sequence and pass keys and values around a ring (context parallel)."""
    sp_size: int = 1
    """Devices that divide one sequence and exchange heads for it (DeepSpeed's Ulysses sequence parallel)."""
    reshard_after_forward: bool = True
    """FSDP2: whether a layer's weights are freed after its forward pass and gathered again for the backward pass."""
    sync_each_batch: bool = False
    """FSDP2: whether gradients are reduced in every micro-batch, so that they are never there whole."""
    offload_param_device: OffloadDevice = "none"
    offload_optimizer_device: OffloadDevice = "none"

    @property
    def num_processes(self) -> int:
        """Devices in use, one process each."""
        return self.num_batches * self.devices_per_sequence * self.pp_size

    @property
    def is_divided_at_load(self) -> bool:
        """True if transformers divides the model when it loads it, rather than Accelerate once it is there."""
        return self.engine == "accelerate" and (self.tp_size > 1 or self.ep_size > 1)

    @property
    def saved_as(self) -> str:
        """Kind of the checkpoints: Accelerate's by strategy, or those of another engine."""
        return self.strategy if self.engine == "accelerate" else self.engine

    @property
    def why_not_resumed(self) -> str | None:
        """Reason that a run in this layout cannot resume, so that it writes no checkpoints; None where it can."""
        if self.tp_size > 1:
            return "transformers cannot resume tensor parallel models"
        if self.sp_size > 1:
            return "transformers cannot skip rows that Ulysses splits"
        return None

    @property
    def num_batches(self) -> int:
        """Micro-batches that are computed at the same time, of different rows each."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def devices_per_sequence(self) -> int:
        """Devices that compute one micro-batch together."""
        return self.tp_size * self.cp_size * self.sp_size

    @property
    def num_shards(self) -> int:
        """Parts into which weights, gradients and optimizer states are divided, tensor parallel aside.

        Accelerate shards over the context-parallel devices too, DeepSpeed over those of Ulysses.
        """
        return self.dp_shard_size * self.cp_size * self.sp_size

    @property
    def divides_weights(self) -> bool:
        """True if no process has all weights, so that all of them compute a forward pass together."""
        return self.strategy in ("fsdp2", "zero3") or self.tp_size > 1

    @property
    def offloads(self) -> bool:
        """True if anything is offloaded from the devices."""
        return self.offload_param_device != "none" or self.offload_optimizer_device != "none"

    @property
    def autocasts(self) -> bool:
        """True if trained weights are float32 and autocast casts them; FSDP2 and DeepSpeed hand them over cast."""
        return self.strategy in ("single", "ddp")

    def reduces_in(self, dtype: Dtype, trained_dtype: Dtype = "float32") -> Dtype:
        """Type in which gradients are summed over devices, where products are computed in `dtype`.

        DDP sums what the optimizer takes, in the type of the trained weights. FSDP2 through Accelerate and DeepSpeed
        sum what the backward pass gives; the first keeps the sums as weights are trained. Through transformers, which
        divides layers or experts besides, and through Automodel, FSDP2 sums in float32.
        """
        in_trained = self.autocasts or self.is_divided_at_load or self.engine != "accelerate"
        return trained_dtype if in_trained else dtype

    def pad_to_multiple_of(self, max_length: int, device: Device) -> int | None:
        """Return the multiple that rows are padded to where Ulysses divides them: one equal part per device.

        The devices show each other their micro-batches, which gloo can only where they are of one length.
        """
        parts = self.sp_size
        if parts == 1:
            return None
        return parts * -(-max_length // parts) if device.kind == "cpu" else parts

    @property
    def name(self) -> str:
        """The layout in words: `FSDP2, hybrid shard`."""
        words = [_STRATEGIES[self.strategy]]
        if self.engine != "accelerate":
            words.insert(0, _ENGINES[self.engine])
        if self.strategy == "fsdp2":
            words.append(f"hybrid shard of {self.num_shards}" if self.dp_replicate_size > 1 else "full shard")
            if not self.reshard_after_forward:
                words.append("no reshard")
            if self.engine != "accelerate" and self.sync_each_batch:
                words.append("reduced per micro-batch")
        sizes = {
            "tensor parallel": self.tp_size,
            "expert parallel": self.ep_size,
            "pipeline parallel": self.pp_size,
            "context parallel": self.cp_size,
            "Ulysses": self.sp_size,
        }
        words += [f"{name} {size}" for name, size in sizes.items() if size > 1]
        weights, states = self.offload_param_device, self.offload_optimizer_device
        if weights == states != "none":
            return ", ".join([*words, f"{'CPU' if weights == 'cpu' else 'NVMe'} offload"])
        places = {"cpu": "the CPU", "nvme": "NVMe"}
        words += [
            f"{what} on {places[at]}" for what, at in (("weights", weights), ("optimizer", states)) if at != "none"
        ]
        return ", ".join(words)


_ENGINES: dict[Engine, str] = {"accelerate": "Accelerate", "automodel": "NeMo Automodel"}

_STRATEGIES: dict[Strategy, str] = {
    "single": "single device",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}
