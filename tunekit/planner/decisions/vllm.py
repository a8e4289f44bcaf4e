"""vLLM in a run (TRL 1.16): whether it can generate, the devices of its server, and its memory.

Colocated, every device has its own vLLM besides the trained model (trl/generation/vllm_generation.py): a copy of all
weights, which is updated before each generation, and a cache. It takes its share of a device's whole memory when it
starts, and keeps it. A server has its own devices. The figures are formulas, not yet compared with a run.
"""

from collections.abc import Sequence
from math import ceil

from tunekit.errors import PlanError
from tunekit.estimates.facts import Device, Hardware, ModelFacts, is_thinker
from tunekit.estimates.layout import Layout
from tunekit.planner.plan import VLLM, gib
from tunekit.recipe.methods import generates
from tunekit.recipe.methods.on_policy import GenerationSection
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter, QloraAdapter

BATCHED_TOKENS = 4096
"""Tokens that vLLM computes at once, as TRL starts it."""

VALUE_BYTES = 2
"""Of a weight and in its cache: what is stored in float32 becomes 16-bit there."""

USUAL_SHARE = 0.3
"""Share of a device's memory that TRL gives vLLM by default. More is taken only where the weights alone need it."""


def why_no_vllm(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> tuple[str, str] | None:
    """Return why vLLM cannot generate for a recipe on a machine in any layout, and the remedy; None where it can."""
    method = recipe.method
    assert generates(method)
    if hardware.vllm is False:
        return "vLLM 0.24 or newer is not installed", "pip install 'tunekit[vllm]'"
    if hardware.device.kind != "cuda" or hardware.device.gfx is not None:
        return f"vLLM is supported on CUDA devices only; this is {hardware.device.name}", "unset use_vllm"
    if isinstance(recipe.adapter, QloraAdapter):
        why = "TRL merges the adapter into the quantized weights for vLLM and unmerges it, which rounds them each "
        return f"{why}time", "use adapter.type=lora, or unset use_vllm"
    if model.loaded_for(recipe.model).rope_scaling is not None:
        return "vLLM loads the model without model.rope_scaling", "unset use_vllm"
    if model.new_tokens:
        return "vLLM loads the model without the tokens that the recipe adds", "unset use_vllm"
    if is_thinker(model.architecture):
        return "vLLM loads the talker too, and names the weights of the thinker otherwise", "unset use_vllm"
    if recipe.train.averages and (recipe.data.eval is not None or recipe.data.eval_size is not None):
        # It notes the step of the weights (trl 1.16, `_last_loaded_step`), of which there are two then.
        return "after an evaluation, vLLM would keep generating with the averaged weights", "unset use_vllm"
    return method.why_no_vllm()


def why_no_vllm_in(recipe: Recipe, layout: Layout) -> str | None:
    """Return why TRL cannot keep vLLM's weights up to date in a layout; None where it can."""
    if layout.offload_param_device != "none":
        return "vLLM cannot be updated from offloaded weights"
    if layout.strategy == "fsdp2" and not isinstance(recipe.adapter, FullAdapter):
        return "TRL cannot merge an adapter into FSDP2-sharded weights, as vLLM needs"
    return None


SERVER_SHARE = 0.9
"""Share of the memory of its devices that a vLLM server takes by default, as vLLM has it."""

SERVED_AT_ONCE = 256
"""Sequences that a vLLM server computes at once, at the least (vLLM 0.31, `max_num_seqs`)."""


def split_for_server(recipe: Recipe, hardware: Hardware) -> tuple[Hardware, tuple[Device, ...]]:
    """Return the hardware that is left to train on, and the devices of the vLLM server that the run starts.

    The server gets the last accelerators.

    Raises:
        PlanError: None would be left, or there are several nodes.
    """
    num = recipe.method.num_server_devices
    if not num or hardware.device.kind != "cuda":
        return hardware, ()
    key, there_are = "method.generation.vllm_mode", len(hardware.accelerators)
    if hardware.num_nodes > 1:
        problem = f"{key}: a vLLM server is started on a single node; there are {hardware.num_nodes}"
        hint = "start `vllm serve` on one of them, and set method.generation.vllm_server_base_url"
        raise PlanError(problem, hint=hint)
    if num >= there_are:
        problem = f"{key}: a vLLM server on {num} of {there_are} {hardware.device.name} leaves none to train on"
        raise PlanError(problem, hint="set method.generation.vllm_mode=colocate, or use more devices")
    left = hardware.model_copy(update={"accelerators": hardware.accelerators[:-num]})
    return left, hardware.accelerators[-num:]


def check_server(recipe: Recipe, model: ModelFacts, devices: Sequence[Device]) -> None:
    """Check that a vLLM server of the run's own has room for the model.

    Args:
        recipe: What is asked for.
        model: The model.
        devices: The server's; none where the run starts none.

    Raises:
        PlanError: It cannot be split over them, or does not fit, or others use them.
    """
    if not devices:
        return
    assert generates(recipe.method)
    generation = recipe.method.generation
    parts, share = generation.vllm_tensor_parallel_size or 1, _server_share(generation)
    if model.num_heads % parts:
        problem = f"method.generation.vllm_tensor_parallel_size: {parts} does not divide the {model.num_heads} heads"
        raise PlanError(f"{problem} of {model.path}", hint="set a divisor")
    device = min(devices, key=lambda device: device.memory_free_bytes)
    room = int(share * device.memory_total_bytes)
    needed = _fixed_bytes(model, SERVED_AT_ONCE) // parts + _cached_token_bytes(model) * recipe.data.max_length // parts
    if needed > room:
        problem = f"method.generation.vllm_mode: a vLLM server needs {gib(needed)} of each device for {model.path}; "
        problem += f"{share:.0%} of a {device.name} is {gib(room)}"
        raise PlanError(problem, hint="raise method.generation.vllm_tensor_parallel_size")
    if room > device.memory_free_bytes:
        problem = f"method.generation.vllm_gpu_memory_utilization: {share:.0%} of a {device.name} is {gib(room)}, but "
        problem += f"{gib(device.memory_free_bytes)} are free"
        raise PlanError(problem, hint="lower it, or end what uses the device")


def _server_share(generation: GenerationSection) -> float:
    return generation.vllm_gpu_memory_utilization or SERVER_SHARE


def vllm_of(
    recipe: Recipe, model: ModelFacts, device: Device, layout: Layout, server_devices: Sequence[Device]
) -> VLLM:
    """The vLLM of a layout: with the share that the recipe asks for, or else what its weights and the answers need.

    Args:
        recipe: What is asked for.
        model: The model.
        device: One that is trained on.
        layout: How the run is spread.
        server_devices: Those of the vLLM server that the run starts.
    """
    method = recipe.method
    assert generates(method)
    generation = method.generation
    if generation.vllm_mode == "server":
        if not method.num_server_devices:
            return VLLM(mode="server")
        names = tuple(device.visible_as for device in server_devices if device.visible_as is not None)
        return VLLM(mode="server", gpu_memory_utilization=_server_share(generation), devices=names)
    if generation.vllm_gpu_memory_utilization is not None:
        return VLLM(mode="colocate", gpu_memory_utilization=generation.vllm_gpu_memory_utilization)
    num_sequences = -(-recipe.train.global_batch_size // layout.num_batches)
    fixed = _fixed_bytes(model, num_sequences)
    sequence_bytes = _cached_token_bytes(model) * recipe.data.max_length
    usual = USUAL_SHARE * device.memory_total_bytes
    needed = min(fixed + num_sequences * sequence_bytes, max(fixed + sequence_bytes, usual))
    return VLLM(mode="colocate", gpu_memory_utilization=ceil(100 * needed / device.memory_total_bytes) / 100)


def vllm_bytes(vllm: VLLM, device: Device) -> int:
    """Return the bytes that vLLM takes of each device that trains."""
    share = vllm.gpu_memory_utilization if vllm.mode == "colocate" else None
    return int((share or 0) * device.memory_total_bytes)


def _cached_token_bytes(model: ModelFacts) -> int:
    return 2 * VALUE_BYTES * model.num_kv_heads * model.head_dim * model.num_layers


def _fixed_bytes(model: ModelFacts, num_sequences: int) -> int:
    """Its copy of the weights, a layer's activations of `BATCHED_TOKENS`, and logits of a token of each sequence."""
    layer = BATCHED_TOKENS * VALUE_BYTES * (3 * model.intermediate_size + 4 * model.hidden_size)
    return VALUE_BYTES * model.num_params + layer + 12 * model.vocab_size * num_sequences
