"""Choice of vLLM to generate the answers that a model learns from, and its share of the devices (TRL 1.16).

Colocated, every device has a vLLM of its own beside the trained model (trl/generation/vllm_generation.py): a copy of
all weights, which is given new values whenever answers are due, and a cache. It takes its share of a device's whole
memory when it starts, and keeps it. A server has devices of its own. No run stands behind these
figures: they are formulas.
"""

from math import ceil
from typing import Literal

from tunekit.estimates.facts import Device, Facts, Hardware, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.recipe.methods import generates
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import FullAdapter, QloraAdapter

BATCHED_TOKENS = 4096
"""Tokens that vLLM computes at once, as TRL starts it."""

VALUE_BYTES = 2
"""Of a weight and in its cache: what is stored in float32 becomes 16-bit there."""

USUAL_SHARE = 0.3
"""Share of a device's memory that TRL gives vLLM by default. More is taken only where the weights alone need it."""


class VLLM(Facts):
    """Use of vLLM."""

    mode: Literal["colocate", "server"]
    gpu_memory_utilization: float | None = None
    """Share of each device's whole memory; None for a server, which is started with a share of its own."""


def why_no_vllm(recipe: Recipe, hardware: Hardware) -> tuple[str, str] | None:
    """Return why vLLM cannot generate for a recipe on a machine in any layout, and the remedy; None where it can."""
    method = recipe.method
    assert generates(method)
    if hardware.vllm is False:
        return "vLLM is not installed", "pip install 'tunekit[vllm]'"
    if hardware.device.kind != "cuda" or hardware.device.gfx is not None:
        return f"tunekit uses vLLM on CUDA devices alone; this is {hardware.device.name}", "leave use_vllm out"
    if isinstance(recipe.adapter, QloraAdapter):
        why = (
            "TRL merges the adapter into the 4-bit weights for vLLM and takes it out again, which rounds them each time"
        )
        return why, "use adapter.type=lora, or leave use_vllm out"
    return method.why_no_vllm()


def why_not_in(recipe: Recipe, layout: Layout) -> str | None:
    """Return why TRL cannot keep vLLM's weights up to date in a layout; None where it can."""
    if layout.offload_param_device != "none":
        return "vLLM is not given weights that lie beside the device"
    if layout.strategy == "fsdp2" and not isinstance(recipe.adapter, FullAdapter):
        return "TRL merges no adapter into weights that FSDP2 divides, which vLLM would need"
    return None


def vllm_of(recipe: Recipe, model: ModelFacts, device: Device, layout: Layout) -> VLLM:
    """The vLLM of a layout: with the share that the recipe asks for, or else what its weights and the answers need."""
    method = recipe.method
    assert generates(method)
    generation = method.generation
    if generation.vllm_mode == "server":
        return VLLM(mode="server")
    if generation.vllm_gpu_memory_utilization is not None:
        return VLLM(mode="colocate", gpu_memory_utilization=generation.vllm_gpu_memory_utilization)
    num_sequences = -(-recipe.train.global_batch_size // layout.num_batches)
    fixed = _fixed_bytes(model, num_sequences)
    a_token = 2 * VALUE_BYTES * model.num_kv_heads * model.head_dim * model.num_layers
    sequence_bytes = a_token * recipe.data.max_length
    usual = USUAL_SHARE * device.memory_total_bytes
    needed = min(fixed + num_sequences * sequence_bytes, max(fixed + sequence_bytes, usual))
    return VLLM(mode="colocate", gpu_memory_utilization=ceil(100 * needed / device.memory_total_bytes) / 100)


def vllm_bytes(vllm: VLLM, device: Device) -> int:
    """Return the bytes that vLLM takes of each device that trains."""
    return int((vllm.gpu_memory_utilization or 0) * device.memory_total_bytes)


def _fixed_bytes(model: ModelFacts, num_sequences: int) -> int:
    """Its copy of the weights, a layer's activations of `BATCHED_TOKENS`, and logits of a token of each sequence."""
    layer = BATCHED_TOKENS * VALUE_BYTES * (3 * model.intermediate_size + 4 * model.hidden_size)
    return VALUE_BYTES * model.num_params + layer + 12 * model.vocab_size * num_sequences
