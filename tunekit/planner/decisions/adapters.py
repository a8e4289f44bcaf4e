"""Checks of an adapter section against a model: what it names must be there, and PEFT must be able to adapt it."""

import math
import re
from collections.abc import Iterator
from typing import get_args

from tunekit.estimates.facts import ModelFacts, is_embedding
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.experts import adapted_experts, last_part
from tunekit.estimates.models.model_config import model_types, read_past_of
from tunekit.estimates.models.towers import Part, part_of
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import (
    ALL_LINEAR,
    AdaloraAdapter,
    Adapter,
    FullAdapter,
    Ia3Adapter,
    LoraAdapter,
    MissAdapter,
    OftAdapter,
    PeftAdapter,
    PromptTuningAdapter,
    QloraAdapter,
    is_any_of,
    pattern_of,
)
from tunekit.recipe.sections.section import Optim

Faults = Iterator[tuple[str, str]]


def adapter_faults(adapter: Adapter, model: ModelFacts) -> Faults:
    """Yield what is wrong with an adapter section for this model, each with its remedy."""
    yield from _tower_faults(model, adapter)
    if isinstance(adapter, FullAdapter):
        yield from _part_faults(model, adapter)
        return
    if reason := model_types().without_adapters.get(model.model_type):
        yield f"adapter.type: adapters are unsupported for {model.model_type} models: {reason}", "set adapter.type=full"
    if isinstance(adapter, QloraAdapter) and (reason := model_types().not_quantized.get(model.model_type)):
        problem = f"adapter.type: quantized training is unsupported for {model.model_type} models: {reason}"
        yield problem, "set adapter.type=lora or full"
    if isinstance(adapter, QloraAdapter) and adapter.bits == 8 and model.published_as is None and model.expert_stacks:
        problem = f"adapter.quant_type: int8 is for linear layers, and the experts of {model.path} are none"
        yield problem, "use nf4, or set adapter.type=lora"
    if isinstance(adapter, LoraAdapter):
        yield from expert_faults(model, adapter)
        yield from _parameter_faults(model, adapter)
    if isinstance(adapter, PromptTuningAdapter):
        yield from _prompt_faults(model)
    else:
        yield from _target_faults(model, adapter)
        yield from _choice_faults(model, adapter)
    if isinstance(adapter, LoraAdapter):
        yield from _start_faults(model, adapter)
        tokens = adapter.trainable_token_indices or []
        beyond = [token for token in tokens if not 0 <= token < model.vocab_size]
        if beyond:
            problem = f"adapter.trainable_token_indices: {', '.join(map(str, beyond))} of {model.vocab_size:,} tokens"
            yield problem, f"ids are 0 to {model.vocab_size - 1}"
    if isinstance(adapter, OftAdapter | MissAdapter) and model.model_type in model_types().stored_transposed:
        problem = f"adapter.type: {adapter.type} is unsupported by PEFT for {model.model_type} models: their weights "
        yield f"{problem}are stored transposed", "set adapter.type=lora"
    if isinstance(adapter, OftAdapter):
        yield from _block_faults(model, adapter)
    if isinstance(adapter, MissAdapter):
        least = min((inputs for _, inputs in model.adapter_linears(adapter).values()), default=adapter.rank)
        if adapter.rank > least:
            problem = f"adapter.rank: {adapter.rank} exceeds the inputs of an adapted layer: {least}"
            yield problem, f"lower it to {least} at most"
    if model.new_tokens and not isinstance(adapter, LoraAdapter):
        problem = f"adapter.type: {adapter.type} does not train the rows of the tokens that the recipe adds"
        yield problem, "set adapter.type=lora or full"
    unknown = [name for name in adapter.modules_to_save or [] if model.num_params_in([name]) == 0]
    if unknown:
        hint = "a head tied to the embedding has no separate weights; name the embedding"
        yield f"adapter.modules_to_save: {model.path} has no weights of {', '.join(unknown)}", hint


def _tower_faults(model: ModelFacts, adapter: Adapter) -> Faults:
    """Yield parts of towers to train that a model does not have, or none of whose layers is a target."""
    for part in get_args(Part):
        how = adapter.training_of(part)
        names = [name for name in model.tensors if model.is_tower(name) and part_of(name) == part]
        if how == "frozen":
            continue
        if not names:
            yield f"adapter.{part}: {model.path} has no module that is known as one", "unset it"
        elif how == "lora" and isinstance(adapter, LoraAdapter):
            adapted = (name for name in model.adapter_linears(adapter) if model.is_tower(name))
            if not any(part_of(name) == part for name in adapted):
                linears = [name for name in model.linears if model.is_tower(name) and part_of(name) == part]
                endings = ", ".join(sorted({last_part(name) for name in linears}))
                hint = f"available: {endings}" if endings else "unset it: there is none"
                yield f"adapter.{part}: target_modules names no linear layer of it", hint


def _prompt_faults(model: ModelFacts) -> Faults:
    """Yield why a model cannot be passed embeddings instead of token IDs, as PEFT does behind virtual tokens."""
    problem = f"adapter.type: prompt_tuning is unsupported for {model.path}: PEFT passes embeddings, and its "
    if model.is_multimodal:
        yield f"{problem}code places images by token IDs", "set adapter.type=lora"
    elif any("per_layer" in name for name in model.tensors if is_embedding(name)):
        yield f"{problem}layers look token IDs up", "set adapter.type=lora"


def _part_faults(model: ModelFacts, adapter: FullAdapter) -> Faults:
    """Yield layers and patterns of a part to train that a model does not have, and layers that it cannot be given."""
    if adapter.new_layers is not None:
        yield from _expansion_faults(model, adapter.new_layers)
    if adapter.last_layers is not None and adapter.last_layers > model.num_layers:
        problem = f"adapter.last_layers: {adapter.last_layers} exceeds the {model.num_layers} layers of {model.path}"
        yield problem, f"set it to {model.num_layers} or less"
    names = [name for name in model.tensors if not model.is_untrained(name)]
    for pattern in adapter.unfrozen_parameters or ():
        if not any(re.search(pattern, each) for name in names for each in (name, model.module_name(name))):
            endings = sorted({".".join(name.split(".")[-2:]) for name in names})
            hint = f"names end in: {', '.join(endings)}"
            if model.has_tied_head and "head" in pattern:
                hint = "a head tied to the embedding has no separate weights; name the embedding"
            yield f"adapter.unfrozen_parameters: {model.path} has no parameter that matches {pattern!r}", hint


def _expansion_faults(model: ModelFacts, num_new: int) -> Faults:
    """Yield why a model cannot be given so many new layers."""
    is_dense = not model.num_experts and not model.is_multimodal and model.published_as is None
    if model.model_type not in model_types().defaults or not is_dense:
        problem = f"adapter.new_layers: unknown whether the layers of {model.path} ({model.model_type}) end in products"
        yield f"{problem} that can begin at zero", "use a dense text model, of a type such as llama, mistral or qwen3"
    elif not model.num_new_layers:
        divisors = [str(number) for number in range(1, model.num_layers + 1) if model.num_layers % number == 0]
        problem = f"adapter.new_layers: {num_new} does not divide the {model.num_layers} layers of {model.path}"
        yield problem, f"set it to one of {', '.join(divisors)}"


def _target_faults(model: ModelFacts, adapter: PeftAdapter) -> Faults:
    """Yield what `target_modules` names and this model does not have, or PEFT does not adapt."""
    endings = ", ".join(sorted({last_part(name) for name in model.linears}))
    regex = adapter.target_regex
    if regex is not None and not model.adapter_linears(regex):
        problem = f"adapter.target_modules: no linear layer of {model.path} matches the regular expression {regex!r}"
        example = model.module_name(next(iter(model.adapter_linears(ALL_LINEAR)), ""))
        hint = f"it must match full names such as {example}; for name suffixes write a list of: {endings}"
        yield problem, hint
    targets = adapter.target_modules if isinstance(adapter.target_modules, list) else []
    refused = [target for target in targets if last_part(target) in read_past_of(model.model_type)]
    if refused:
        problem = f"adapter.target_modules: the code of {model.model_type} models reads the weights of "
        problem += f"{', '.join(refused)} directly, so an adapter on these modules would have no effect"
        yield problem, "remove them, or set adapter.target_modules=all-linear, which excludes them"
    missing = [target for target in targets if target not in refused and not model.adapter_linears([target])]
    adapts_others = isinstance(adapter, LoraAdapter) and targets == [] and adapter.target_parameters
    if missing or not (refused or regex or adapts_others or model.adapter_linears(adapter.target_modules)):
        named = ", ".join(missing) or adapter.target_modules
        yield f"adapter.target_modules: {model.path} has no linear layer named {named}", f"available: {endings}"


def _choice_faults(model: ModelFacts, adapter: PeftAdapter) -> Faults:
    """Yield what the fields that narrow the targets down, or set something else for some, name in vain."""
    everywhere = adapter.model_copy(update={"exclude_modules": None, "layers_to_transform": None})
    targeted = model.adapter_linears(everywhere)
    endings = ", ".join(sorted({last_part(name) for name in targeted}))
    unknown = [ending for ending in adapter.exclude_modules or [] if not any(is_any_of(n, [ending]) for n in targeted)]
    if unknown:
        yield f"adapter.exclude_modules: no adapted module is named {', '.join(unknown)}", f"available: {endings}"
    beyond = [layer for layer in adapter.layers_to_transform or [] if not 0 <= layer < model.num_layers]
    if beyond:
        problem = f"adapter.layers_to_transform: {model.path} has no layer {', '.join(map(str, beyond))}"
        yield problem, f"its layers are 0 to {model.num_layers - 1}"
    adapted = model.adapter_linears(adapter)
    if targeted and not adapted:
        fields = [field for field in ("exclude_modules", "layers_to_transform") if dict(adapter)[field]]
        yield f"adapter.{fields[-1]}: no module is left to adapt", f"unset {' or '.join(fields)}, or adapt more modules"
    if isinstance(adapter, Ia3Adapter) and adapted:
        unknown = [
            ending for ending in adapter.feedforward_modules or [] if not any(is_any_of(n, [ending]) for n in adapted)
        ]
        if unknown:
            yield (
                f"adapter.feedforward_modules: no adapted module is named {', '.join(unknown)}",
                f"available: {endings}",
            )
    for field in ("rank_pattern", "alpha_pattern"):
        unused = [
            pattern for pattern in dict(adapter).get(field) or {} if not any(pattern_of([pattern], n) for n in adapted)
        ]
        if unused and adapted:
            problem = f"adapter.{field}: no adapted module has the name suffix {', '.join(unused)}"
            yield problem, f"available: {', '.join(sorted({last_part(name) for name in adapted}))}"


def _start_faults(model: ModelFacts, adapter: LoraAdapter) -> Faults:
    """Yield why an adapter cannot begin as `init_lora_weights` says, or restart."""
    start = adapter.init_lora_weights
    if adapter.relora is not None and any(name not in model.linears for name in model.adapted(adapter).ranks):
        what = "adapter.relora is for linear layers, and the adapters of "
        yield f"{what}{model.path} reach experts and routers", "limit adapter.target_modules to attention"
    if start is True:
        return
    problem = f"adapter.init_lora_weights: {start}"
    adapted = model.adapted(adapter)
    if start == "eva":
        yield from _eva_faults(model, adapter)
    elif start == "loftq":
        yield from _loftq_faults(model, adapter)
    if start != "gaussian":
        if isinstance(adapter, QloraAdapter) and start not in ("eva", "loftq"):
            yield f"{problem} needs base weights that are not quantized", "set adapter.type=lora, or use gaussian"
        if any(name not in model.linears for name in adapted.ranks):
            what = f"{problem} is for linear layers, and the adapters of {model.path} reach experts and routers"
            yield what, "limit adapter.target_modules to attention, or use gaussian"
    if start == "olora" and model.model_type in model_types().stored_transposed:
        what = f"{problem}: PEFT factorizes the weights of {model.model_type} models as they are stored, transposed"
        yield what, "use pissa or gaussian"
    odd = sorted({rank for rank in adapted.ranks.values() if rank % 2})
    if start == "orthogonal" and odd:
        yield f"{problem} needs even ranks, got {', '.join(map(str, odd))}", "change adapter.rank or rank_pattern"
    if not adapter.splits_base:
        return
    largest = min((min(sizes) // adapted.ranks[name] for name, sizes in adapted.sizes.items()), default=1)
    if largest < 1:
        yield f"{problem}: a rank exceeds the smaller size of its weight", "lower adapter.rank or rank_pattern"
    if adapter.use_dora:
        why = "the saved adapter subtracts its initial values, but DoRA normalizes the sum"
        yield f"{problem} is unsupported with use_dora: {why}", "unset one of them"
    if adapter.use_rslora and (adapter.rank_pattern or adapter.alpha_pattern):
        yield f"{problem} with use_rslora needs one rank and alpha", "unset rank_pattern and alpha_pattern"


def _parameter_faults(model: ModelFacts, adapter: LoraAdapter) -> Faults:
    """Yield parameters that this model does not have, or that are no matrices of experts, or adapted anyway."""
    former = model.former_linears
    by_module = adapted_experts(model.tensors, former, adapter.target_modules) if former else {}
    stacks = [name for name, shape in model.tensors.items() if len(shape) == 3 and not model.is_untrained(name)]
    endings = sorted({".".join(name.split(".")[-2:]) for name in stacks})
    hint = f"available: {', '.join(endings)}" if endings else "unset it: the model has no fused experts"
    for ending in adapter.target_parameters or ():
        named = [name for name in model.tensors if is_any_of(name, [ending])]
        stacked = [name for name in named if name in stacks]
        problem = f"adapter.target_parameters: {ending}"
        if not named:
            yield f"adapter.target_parameters: {model.path} has no parameter named {ending}", hint
        elif len(stacked) < len(named):
            odd = next(name for name in named if name not in stacked)
            shape = " x ".join(map(str, model.tensors[odd]))
            yield f"{problem}: {odd} ({shape}) is not a stack of expert matrices", hint
        elif any(name in by_module for name in stacked):
            yield f"{problem} is adapted by adapter.target_modules already", "remove it from one of them"
    if adapter.target_parameters and isinstance(adapter, QloraAdapter) and model.published_as == "mxfp4":
        yield "adapter.target_parameters: experts in MXFP4 are frozen", "set adapter.type=lora, or unset it"


def _eva_faults(model: ModelFacts, adapter: LoraAdapter) -> Faults:
    """Yield why inputs cannot decide on ranks, or have too few directions for them."""
    if adapter.rank_pattern and adapter.distributes_ranks:
        yield "adapter.rank_pattern: init_lora_weights=eva distributes ranks itself", "unset it, or set adapter.rho=1"
    least = min((inputs for _, inputs in model.adapter_linears(adapter).values()), default=0)
    ranks = [adapter.rank, *(adapter.rank_pattern or {}).values()]
    if round(max(ranks) * adapter.rho) > least > 0:
        problem = f"adapter.rho: {adapter.rho:g} times a rank of {max(ranks)} exceeds the {least} inputs of a module"
        yield problem, "lower adapter.rho or adapter.rank"


def _loftq_faults(model: ModelFacts, adapter: LoraAdapter) -> Faults:
    """Yield why an adapter cannot begin with what 4 bits lose."""
    problem = "adapter.init_lora_weights: loftq"
    if not isinstance(adapter, QloraAdapter):
        yield f"{problem} requires a 4-bit base", "set adapter.type=qlora, or use pissa"
    elif model.published_as is not None:
        yield f"{problem} needs weights before quantization, and {model.path} has none", "use gaussian, or unset it"
    if adapter.use_dora:
        yield (
            f"{problem} is unsupported with use_dora, whose magnitudes are those of the base",
            "unset one of them",
        )


def _block_faults(model: ModelFacts, adapter: OftAdapter) -> Faults:
    """Yield inputs that blocks do not divide: PEFT would take blocks of another size for them."""
    size, sizes = adapter.oft_block_size, {inputs for _, inputs in model.adapter_linears(adapter).values()}
    undivided = sorted(inputs for inputs in sizes if inputs % size)
    if undivided:
        common = math.gcd(*sizes)
        fitting = [number for number in range(2, common + 1) if common % number == 0 and number <= MAX_BLOCK]
        words = ", ".join(map(str, undivided))
        problem = f"adapter.oft_block_size: {size} does not divide the inputs of all adapted layers: {words}"
        yield problem, f"set one of {', '.join(map(str, fitting))}" if fitting else "adapt fewer modules"


MAX_BLOCK = 256
"""Largest block that a remedy names."""


def start_refusal(recipe: Recipe, layout: Layout, *, continues: bool) -> Iterator[tuple[str, str]]:
    """Yield why an adapter cannot begin as asked beside this method and these rows, or in this layout."""
    adapter, method = recipe.adapter, recipe.method
    if isinstance(adapter, AdaloraAdapter):
        if layout.strategy not in ("single", "ddp"):
            yield "adapter.type=adalora needs unsharded gradients to reallocate ranks", "use ddp, or adapter.type=lora"
        if recipe.train.optimizer == "schedule_free_adamw":
            why = "adapter.type=adalora sets values to 0, which an average of weights does not keep"
            yield why, "use another train.optim"
        if continues:
            yield (
                "a trained AdaLoRA adapter has lost the ranks that further training would reallocate",
                "use adapter.type=full",
            )
    if isinstance(adapter, LoraAdapter) and adapter.relora is not None:
        yield from _restart_refusal(recipe, layout)
    if isinstance(adapter, PromptTuningAdapter):
        if layout.cp_size * layout.sp_size > 1:
            yield "virtual tokens would be put before each part of a split row", "use ddp without cp_size and sp_size"
        if layout.strategy in ("fsdp2", "zero3"):
            yield (
                f"PEFT saves virtual tokens by a lookup in their table, which {layout.strategy} shards",
                "use ddp or zero2",
            )
    if not isinstance(adapter, LoraAdapter) or not (adapter.splits_base or adapter.needs_sources):
        return
    name, hint = f"adapter.init_lora_weights={adapter.init_lora_weights}", "use gaussian, or unset it"
    if method.reference_use != "none" and (adapter.splits_base or adapter.is_of_4bit_base):
        yield f"with {name} the model without its adapter is not the reference of {method.type}", hint
    if adapter.sees_rows and method.spec.trains_on != "tokens":
        yield (
            f"{name} needs tokenized rows before training, but TRL tokenizes those of {method.type} during training",
            hint,
        )
    if adapter.sees_rows and recipe.data.streaming:
        yield f"{name} samples rows at random, which a stream does not allow", "unset data.streaming, or use gaussian"
    if layout.strategy not in ("single", "ddp"):
        what = "decomposes unsharded weights" if adapter.splits_base else "needs unsharded weights in each process"
        yield f"{name} {what}", "use ddp, or gaussian"


def _restart_refusal(recipe: Recipe, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield why an adapter cannot be merged into the base weights during training."""
    train, method = recipe.train, recipe.method
    if layout.strategy not in ("single", "ddp"):
        yield "adapter.relora merges into unsharded weights", "use ddp, or unset it"
    if method.reference_use != "none":
        why = f"after a restart of adapter.relora the base weights are not the reference of {method.type}"
        yield why, "unset it"
    if train.optimizer not in RESET_OPTIMS:
        what = f"adapter.relora resets AdamW's unquantized states, which {train.optimizer} does not have"
        yield what, f"set train.optim to one of {', '.join(RESET_OPTIMS)}"
    if train.ema_decay is not None:
        yield "train.ema_decay averages matrices that adapter.relora restarts", "unset one of them"


RESET_OPTIMS: tuple[Optim, ...] = ("adamw_torch_fused", "adamw_torch", "tunekit_adamw")
"""Optimizers with the states that a restart of an adapter sets to 0."""


def expert_faults(model: ModelFacts, adapter: LoraAdapter) -> Faults:
    """Yield what PEFT refuses to put on fused experts and routers, or puts on all of them alike.

    That is a part of a fused matrix without the others, dropout, and DoRA. It finds experts by the last names of their
    former modules, in all layers, and sets their ranks itself.
    """
    former = model.former_linears
    if former is None:
        return
    if adapter.target_regex is not None:
        if any(adapter.targets(name) for name in _former_names(model)):
            problem = (
                "adapter.target_modules: PEFT keeps only the last part of the names that a regular expression "
                "matches in "
            )
            yield f"{problem}{model.path}", "list the modules, such as [q_proj, v_proj]"
        return
    targets = set(map(last_part, adapter.target_modules)) if isinstance(adapter.target_modules, list) else set()
    for fused in sorted(set(former.values())):
        parts = [old for old, new in former.items() if new == fused]
        missing = ", ".join(part for part in parts if part not in targets)
        named = ", ".join(part for part in parts if part in targets)
        if missing and named:
            problem = f"adapter.target_modules: {named} without {missing}; the experts of {model.path} hold them "
            yield f"{problem}in one matrix, {fused}", f"add {missing}, or remove {named}"
    experts = adapted_experts(model.tensors, former, adapter.target_modules)
    if not experts:
        return
    unfused = ", ".join(_unfused(model))
    hint = f"unset it, or limit adapter.target_modules to {unfused}"
    settings = {"dropout": adapter.dropout > 0, "use_dora": adapter.use_dora, "lora_bias": adapter.lora_bias}
    for setting, is_set in settings.items():
        if is_set:
            problem = f"adapter.{setting}: PEFT does not support it on the fused expert matrices and routers of "
            yield f"{problem}{model.path}", hint
    if adapter.layers_to_transform is not None:
        problem = f"adapter.layers_to_transform: PEFT adapts the experts and routers of {model.path} in all layers"
        yield problem, f"limit adapter.target_modules to {unfused}"
    names = [*_former_names(model), *experts]
    excluded = [ending for ending in adapter.exclude_modules or [] if any(is_any_of(name, [ending]) for name in names)]
    if excluded:
        problem = f"adapter.exclude_modules: PEFT ignores it for the experts and routers of {model.path}: "
        yield f"{problem}{', '.join(excluded)}", "list other modules in adapter.target_modules"
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = [pattern for pattern in dict(adapter)[field] or {} if any(pattern_of([pattern], n) for n in names)]
        if patterns:
            problem = f"adapter.{field}: PEFT overrides it for the experts and routers of {model.path}: "
            yield f"{problem}{', '.join(patterns)}", f"limit it to {unfused}"


def linears_beside_experts(model: ModelFacts, adapter: Adapter) -> tuple[str, ...]:
    """Return the names of linear layers that are left to adapt where PEFT adapts each expert; none where it does not.

    Adapters of experts are as many as there are experts, of which a token goes through few.
    """
    former = model.former_linears
    if former is None or isinstance(adapter, FullAdapter) or adapter.target_regex is not None:
        return ()
    return _unfused(model) if adapted_experts(model.tensors, former, adapter.target_modules) else ()


def _unfused(model: ModelFacts) -> tuple[str, ...]:
    """Return the last names of linear layers that have nothing to do with experts."""
    return tuple(sorted({last_part(name) for name in model.linears} - set(model.former_linears or ())))


def _former_names(model: ModelFacts) -> Iterator[str]:
    """Yield names of what PEFT takes for experts, routers or their former modules."""
    former = model.former_linears or {}
    for name in model.tensors:
        module = name.removesuffix(".weight")
        above, _, leaf = module.rpartition(".")
        if leaf in former or leaf in former.values():
            yield module
            yield from (f"{above}.{old}" for old, new in former.items() if new == leaf)
