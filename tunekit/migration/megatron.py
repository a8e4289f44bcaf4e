"""Settings of Megatron-Core -> a recipe: the layout, and what Megatron computes otherwise.

A layout changes no result, so the recipe has what an engine of tunekit can have of it, and the plan decides the rest:
pipelines are NeMo Automodel's, experts and sequences are divided by Accelerate as well.
"""

from dataclasses import replace
from math import prod

from tunekit.estimates.models.model_config import known_models, num_experts_of, text_config
from tunekit.migration import images, optimizers
from tunekit.migration.draft import Draft, UnfitError, carried, is_off, lower, number, reason, text, truth, whole
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.recipe.methods import METHODS

_TENSOR, _PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_EXPERT, _CONTEXT = "expert_model_parallel_size", "context_parallel_size"
SIZES = (_TENSOR, _PIPELINE, _EXPERT, _CONTEXT)
"""Keys of a layout."""

_ADAMW = ("adamw_torch_fused", "adamw_torch")
"""Optimizers that NeMo Automodel runs as tunekit does."""

_OF_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
"""Names of linear layers that experts do not have."""


def is_of_llama_factory(draft: Draft) -> bool:
    """Return whether LLaMA-Factory trains with Megatron: a variable says it, or keys that it has only then."""
    switches = (draft.get("use_mca", False), draft.original.environment.get("USE_MCA", False))
    return any(str(switch).lower() in ("true", "1", "y") for switch in switches) or any(map(draft.get, SIZES))


def devices_per_row(draft: Draft) -> int:
    """Return the devices that share a row, and so count once in the batch of a step."""
    return prod(_size(draft, key) for key in (_TENSOR, _PIPELINE, _CONTEXT))


def _size(draft: Draft, key: str) -> int:
    value = draft.get(key)
    return max(1, value) if isinstance(value, int) else 1


def size(draft: Draft, entry: Entry) -> Fate:
    """A size of the layout, of which `settle_layout` says more."""
    return Fate("silent", "is off") if whole(entry.value) == 1 else Fate("decided", reason("devices"))


def settle_layout(draft: Draft) -> None:
    """Let the recipe have what tunekit's engines can have of a layout, and leave the rest to the plan."""
    sizes = {key: _size(draft, key) for key in SIZES if _size(draft, key) > 1}
    for key in sizes:
        obstacle = _obstacle(draft, key, sizes)
        if obstacle is not None:
            draft.fates[key] = Fate("decided", f"{obstacle}; {reason('devices')}")
            continue
        if key == _PIPELINE:
            draft.put("parallel.engine", "automodel", key)
        target = f"parallel.{_FIELDS[key]}"
        draft.put(target, sizes[key], key)
        draft.fates[key] = carried(target, sizes[key])
    if "parallel.engine" in draft.values:
        words = carried("parallel.engine", "automodel").words
        draft.fates[_PIPELINE] = Fate("carried", f"{draft.fates[_PIPELINE].words}, {words}")


_FIELDS = {_PIPELINE: "pp_size", _EXPERT: "ep_size", _CONTEXT: "cp_size"}
"""Sizes that a recipe takes over, with their fields. Tensors it leaves to fsdp2, which shards them where needed."""


def _obstacle(draft: Draft, key: str, sizes: dict[str, int]) -> str | None:
    """Return why a size is not the recipe's: no engine has it with the method, the adapter, the rows or other sizes."""
    has_pipeline = _PIPELINE in sizes and _why_no_pipeline(draft) is None
    if key == _TENSOR:
        return "fsdp2 shards the weights of each layer, which parallel.tp_size splits"
    if key == _PIPELINE:
        return _why_no_pipeline(draft)
    if _has_media(draft):
        return "not with rows that have images, videos or audio"
    if draft.method != "sft":
        return f"only sft divides experts and rows, not {draft.method}"
    if key == _EXPERT:
        return _why_no_experts(draft)
    if has_pipeline or _EXPERT in sizes:
        return "parallel.cp_size is on its own"
    return "parallel.cp_size trains without packing" if draft.values.get("data.packing") else None


def _why_no_pipeline(draft: Draft) -> str | None:
    """Return why a run cannot be a pipeline of NeMo Automodel's; None if it can."""
    if draft.method != "sft" or draft.has_adapter:
        return "parallel.engine=automodel, which has pipelines, trains in full by sft"
    if draft.values.get("data.packing"):
        return "parallel.engine=automodel, which has pipelines, trains without packing"
    if draft.values.get(ROUTER_ARG):
        return "parallel.engine=automodel, which has pipelines, trains without the routers' auxiliary loss"
    if draft.values.get("train.fp8") or draft.values.get("train.optim", _ADAMW[0]) not in _ADAMW:
        return "parallel.engine=automodel, which has pipelines, trains by AdamW and without float8"
    return "parallel.engine=automodel, which has pipelines, trains on text" if _has_media(draft) else None


def _why_no_experts(draft: Draft) -> str | None:
    """Return why experts cannot be divided; None if they can."""
    if not draft.has_adapter:
        return None
    modules = draft.values.get("adapter.target_modules", "all-linear")
    if draft.values["adapter.type"] == "lora" and isinstance(modules, list) and {*modules} <= _OF_ATTENTION:
        return None
    return "parallel.ep_size takes LoRA on attention alone"


def _has_media(draft: Draft) -> bool:
    """Return whether rows have more than text, as far as a configuration says it."""
    return draft.has_images or draft.has_audio or draft.has_videos or images.family(draft) is not None


def router_loss(draft: Draft, entry: Entry) -> Fate:
    """The loss that balances the load of experts, of each layer in Megatron and of all together in transformers."""
    value = entry.value[0] if isinstance(entry.value, list) and len(entry.value) == 1 else entry.value
    coefficient = number(value)
    if not coefficient or draft.get("moe_router_load_balancing_type") == "none":
        return Fate("silent", "is off")
    if not METHODS[draft.method].spec.adds_router_loss:
        raise UnfitError(f"unsupported for {draft.method}")
    fate = draft.carry(entry, ROUTER_ARG, coefficient)
    return Fate("different", f"{fate.words}; {_ROUTER_LOSS}")


def assume_router_loss(draft: Draft) -> None:
    """Record the coefficient of that loss that LLaMA-Factory's trainer takes from the model's configuration."""
    facts = known_models().get(str(draft.values.get("model.path")))
    config = {} if facts is None else text_config(facts.config)
    if draft.get("moe_aux_loss_coeff") is not None or not num_experts_of(config):
        return
    coefficient = config.get("router_aux_loss_coef")
    if coefficient is not None and METHODS[draft.method].spec.adds_router_loss:
        draft.assume({ROUTER_ARG: coefficient}, "Megatron takes it from the model's configuration")
    words = f"the default is the model's router_aux_loss_coef; {_ROUTER_LOSS}"
    draft.differ("moe_aux_loss_coeff", coefficient, words)


ROUTER_ARG = "method.trainer_args.router_aux_loss_coef"
_ROUTER_LOSS = "Megatron adds the loss of every layer, divided by the experts per token; transformers one of all layers"


def balancing(draft: Draft, entry: Entry) -> Fate:
    """The kind of that loss."""
    if is_off(draft.get("moe_aux_loss_coeff", 0)) or text(entry.value) in ("aux_loss", "none"):
        return Fate("silent", "sets moe_aux_loss_coeff's loss")
    raise UnfitError(f"{entry.value}: transformers has aux_loss")


def capacity(draft: Draft, entry: Entry) -> Fate:
    """The tokens that an expert takes at most."""
    if number(entry.value) <= 0:
        return Fate("silent", "is off")
    return Fate("different", "Megatron drops tokens beyond the capacity of an expert; tunekit drops none")


def fp8(draft: Draft, entry: Entry) -> Fate:
    """Linear layers in 8-bit floating point, with a scale of Megatron's kind."""
    if is_off(entry.value):
        return Fate("silent", "is off")
    kind = text(draft.get("fp8_recipe", "delayed"))
    if draft.has_adapter:
        return Fate("different", f"Megatron computes in FP8 ({kind}); the recipe in bfloat16: adapters train in it")
    fate = draft.carry(entry, "train.fp8", True)
    return Fate("different", f"{fate.words}; Megatron scales by {kind}, tunekit as torchao")


def token_loss(draft: Draft, entry: Entry) -> Fate:
    """The average over the tokens of a step, or of those of each micro-batch."""
    if draft.method != "sft" or truth(entry.value):
        words = "the loss is averaged over the tokens of a step" if draft.method == "sft" else "only used with sft"
        return Fate("silent", words)
    return Fate("different", MICRO_BATCHES)


MICRO_BATCHES = "Megatron averages the loss of each micro-batch, then these; tunekit averages over the tokens of a step"
"""The loss of Megatron without `calculate_per_token_loss`."""


def state_dtype(draft: Draft, entry: Entry) -> Fate:
    """The type of gradients or of a state of the optimizer."""
    if lower(entry.value) == "fp32":
        return Fate("silent", "is the default")
    what = {"main_grads_dtype": "gradients", "main_params_dtype": "trained weights"}.get(entry.key, "optimizer states")
    return Fate("different", f"{what} are {lower(entry.value)} in Megatron; float32 in tunekit", "train.optim")


def optimizer(draft: Draft, entry: Entry) -> Fate:
    """An optimizer of Megatron."""
    name = lower(entry.value)
    if name == "adam":
        return Fate("silent", "AdamW is the default")
    if name not in ("muon", "dist_muon"):
        raise UnfitError(f"{name}: see `tunekit explain train.optim`")
    if draft.get("muon_lr") is not None:
        raise UnfitError("muon_lr: in tunekit Muon has AdamW's learning rate")
    fate = optimizers.named(draft, replace(entry, value="muon"))
    own = "Megatron scales Muon's updates by sqrt(max(rows, columns)), tunekit by 0.2 of it"
    return Fate("different", f"{fate.words}; {own}", "train.learning_rate")
