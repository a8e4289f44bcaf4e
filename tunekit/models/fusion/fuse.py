"""Fuse a loaded model by structure: modules whose forward computes what a kernel does are given that kernel.

A rule looks at a module: what its forward computes (`tunekit.models.fusion.structure`) and what it has. Where it knows
the form, it says how the module computes instead, and that is proved (`tunekit.models.fusion.proof`) before the
*instance* is given another forward. Its class stays as it is, and so do its weights, their names, its submodules and
its hooks. What is not known, or does not agree, stays and is named in the report.

The model is fused behind the injection of adapters, and before it is divided, wrapped or compiled. A deep copy of a
fused model is fused; a pickled one comes back with the original forwards.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tunekit.errors import ModelError, loading_errors
from tunekit.models.fusion.attention import attention_rule
from tunekit.models.fusion.experts import experts_rule
from tunekit.models.fusion.forms import gated_rule, layer_rule, norm_rule
from tunekit.models.fusion.lora_layers import linear_rule
from tunekit.models.fusion.proof import Difference, Fusion, Kept, Rule, prove, replace, unfuse
from tunekit.models.load import read_config
from tunekit.models.quantization import forward_4bit
from tunekit.probe.model import auto_class
from tunekit.recipe.sections.model import ModelSection

RULES: tuple[Rule, ...] = (experts_rule, linear_rule, norm_rule, gated_rule, attention_rule, layer_rule)
"""In the order in which they are applied: a layer is fused around a norm that is fused already."""


@dataclass(frozen=True)
class Line:
    """Outcome for the modules of one class and form.

    Attributes:
        module: Name of the class.
        num_modules: How many there are.
        example: Name of the first of them in the model.
        form: What they compute; None where no rule knows it.
        reason: Why they stayed as they are, also where their proof failed; None where they are fused.
        difference: What the proof found, as a share of a row's largest value; None where there was none.
    """

    module: str
    num_modules: int
    example: str
    form: str | None
    reason: str | None
    difference: float | None

    @property
    def is_fused(self) -> bool:
        """True if they are fused."""
        return self.reason is None


@dataclass(frozen=True)
class Report:
    """Fused and unfused modules, in the order of the model."""

    lines: tuple[Line, ...]

    @property
    def fused(self) -> tuple[Line, ...]:
        """Modules that are fused."""
        return tuple(line for line in self.lines if line.is_fused)

    @property
    def kept(self) -> tuple[Line, ...]:
        """Modules that stayed as they were."""
        return tuple(line for line in self.lines if not line.is_fused)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {"lines": [asdict(line) for line in self.lines]}

    def words(self) -> str:
        """The report in a line: how many of each form are fused, and the classes of what is not."""
        nums: Counter[str] = Counter()
        for line in self.fused:
            nums[str(line.form)] += line.num_modules
        fused = ", ".join(f"{num} {form}" for form, num in nums.items()) or "nothing"
        unfused = ", ".join(dict.fromkeys(line.module for line in self.kept))
        return f"tunekit for {fused}{f'; torch for {unfused}' if unfused else ''}"


def fuse(model: nn.Module, *, dtype: torch.dtype | None = None, rules: Sequence[Rule] = RULES) -> Report:
    """Fuse what can be proved to compute the same, and say what became of each kind of module.

    Args:
        model: The model, with its adapters, neither divided nor compiled. It may be on `meta`.
        dtype: The type that it computes in, which is tried on its device; that of its weights where left out.
        rules: What is looked for, one after the other: a rule may ask whether a submodule is fused already.
    """
    unfuse(model)
    first = next(model.parameters())
    named = dict(model.named_modules())
    proofs: _Proofs = {}
    outcomes: dict[str, _Outcome] = {}
    for rule in rules:
        for name, module in named.items():
            fusion = rule(module) if name not in outcomes else None
            if fusion is not None:
                outcomes[name] = _fuse_one(module, fusion, proofs, first.device, dtype or first.dtype)
    for name, module in named.items():
        if name not in outcomes and _is_of_a_model(module):
            outcomes[name] = (None, "no kernel for this computation", None)
    return _report(named, outcomes)


def coverage(section: ModelSection) -> Report:
    """Report which modules of a model would be fused, without its weights: it is built on `meta`.

    Raises:
        ModelError: Its configuration cannot be read, or is not one of a language model.
    """
    try:
        config = read_config(section)
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=section.trust_remote_code)
    except loading_errors() as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"the configuration of {section.path!r} cannot be read: {first_line}",
            hint="pass a folder with a config.json, or a model on the Hub",
        ) from error
    return fuse(model)


_Proofs = dict[Hashable, Difference | str]
_Outcome = tuple[str | None, str | None, float | None]
"""Form, reason and difference of one module, as a `Line` has them."""


def _fuse_one(
    module: nn.Module, fusion: Fusion | Kept, proofs: _Proofs, device: torch.device, dtype: torch.dtype
) -> _Outcome:
    """Fuse a module, if that is proved; one proof serves all that compute the same."""
    if isinstance(fusion, Kept):
        return None, fusion.reason, None
    obstacle = _obstacle(module)
    if obstacle is not None:
        return fusion.form, obstacle, None
    key = (type(module), fusion.forward, fusion.settings, fusion.sizes)
    if key not in proofs:
        proofs[key] = _try(fusion, device, dtype)
    proof = proofs[key]
    if isinstance(proof, str):
        return fusion.form, proof, None
    if not proof.is_rounding:
        return fusion.form, proof.words(), proof.share
    replace(module, fusion)
    return fusion.form, None, proof.share


def _try(fusion: Fusion, device: torch.device, dtype: torch.dtype) -> Difference | str:
    """Return the result of a fusion's proof, or why it could not be run."""
    try:
        return prove(fusion.trial, lambda new: replace(new, fusion), device=device, dtype=dtype)
    except Exception as error:  # noqa: BLE001  (a stand-in runs the model's own code, which may want another input)
        first = next(iter(str(error).splitlines()), "")
        return f"could not be tested: {type(error).__name__}{': ' * bool(first)}{first}"


def _obstacle(module: nn.Module) -> str | None:
    """Return what prevents a module of a known form from being fused."""
    own = vars(module).get("forward")
    if own is not None and not (isinstance(own, MethodType) and own.__func__ is forward_4bit):
        return "its forward was replaced"
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return "its weights are sharded over devices"
    return None


def _is_of_a_model(module: nn.Module) -> bool:
    """Return whether a module computes something of its own: no container, layer of torch's, or the model itself."""
    from transformers import PreTrainedModel

    own = type(module).__module__
    library_modules = ("torch.", "peft.", "bitsandbytes.", "transformers.activations")
    return not own.startswith(library_modules) and not isinstance(module, PreTrainedModel)


def _report(named: dict[str, nn.Module], found: dict[str, _Outcome]) -> Report:
    groups: dict[tuple[str, _Outcome], list[str]] = {}
    for name, module in named.items():
        if name in found:
            groups.setdefault((type(module).__name__, found[name]), []).append(name)
    return Report(tuple(Line(module, len(names), names[0], *outcome) for (module, outcome), names in groups.items()))
