"""Rules of fusion, and the proof that a fused forward computes what the original does.

The proof that a fused forward computes what the original does: outputs and gradients on random input agree.

A proof is on a stand-in: a module of the same class and settings with fresh random weights of the same shapes, so that
it holds for weights that are on `meta`, or divided. It is in float32 on the CPU, where the kernels' formulas are
computed by torch, and in the model's own type on its accelerator, where there is one.

What is compared are rows, each against its own largest value: a kernel that forgets an epsilon differs only in rows
that are small. Allowed are `ROUNDING` steps of the type: both sides round, and sum in different orders.

Rules of fusion: how a module computes instead, and the exchange of its forward and back.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

ROUNDING = {torch.float64: 2**20, torch.float32: 256, torch.bfloat16: 8, torch.float16: 16}
"""Tolerance for outputs and gradients in steps of a type, as a share of a row's largest value.

In float32 sums over thousands of columns differ by some dozens. In 16 bits the original rounds between its operations,
where a kernel does not, and each of these roundings is half a step. In float64 sums may nearly cancel, which leaves 9
digits.
"""


SETTINGS = "fused_as"
"""Name of the attribute of a fused module that holds its fusion's settings."""

BEFORE = "forward_before"
"""Name of the attribute of a fused module that holds the forward of its own that it had, and not its class."""

FUSED = (SETTINGS, BEFORE, "forward")
"""Attributes of a fused module that its stand-in lacks."""


@dataclass(frozen=True)
class Trial:
    """A stand-in for a module, and what it is called with.

    Attributes:
        module: The stand-in; its parameters have gradients.
        args: Positional arguments.
        kwargs: Keywords.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


MakeTrial = Callable[[torch.Generator, torch.device, torch.dtype], Trial]
"""Makes a stand-in and its input, anew and equal for equal generators."""


@dataclass(frozen=True)
class Difference:
    """Distance of a fused forward from the original.

    Attributes:
        share: Of the largest value of a row; the largest over all rows of all that was compared.
        allowed: What rounding explains.
        where: What differs by that much.
        place: Device and type.
    """

    share: float
    allowed: float
    where: str
    place: str

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains it. A NaN is explained by nothing."""
        return self.share <= self.allowed

    def words(self) -> str:
        """The difference as a sentence has it."""
        differs = f"{self.where} differs by {self.share:.2g} of its largest value"
        return f"{differs} ({self.place}; rounding is {self.allowed:.2g})"


def random_rows(width: int, *, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Rows of different sizes, of shape `(2, 5, width)`, as a batch of sequences is."""
    sizes = torch.tensor([1.0, 1e-3, 0.1, 30.0, 1.0]).reshape(1, 5, 1)
    rows = torch.randn(2, 5, width, generator=generator) * sizes
    return rows.to(device=device, dtype=dtype).requires_grad_()


def stand_in(module: nn.Module, *, generator: torch.Generator, **submodules: nn.Module) -> nn.Module:
    """A module of the same class and settings, with random weights of its own and other submodules."""
    copy = type(module).__new__(type(module))
    nn.Module.__init__(copy)
    excluded = {*vars(copy), *FUSED}
    vars(copy).update({name: value for name, value in vars(module).items() if name not in excluded})
    for name, parameter in module.named_parameters(recurse=False):
        copy.register_parameter(name, nn.Parameter(torch.randn(whole_shape(parameter), generator=generator)))
    for name, submodule in submodules.items():
        copy.add_module(name, submodule)
    return copy.train()


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of a parameter, that which DeepSpeed has divided taken together."""
    divided = vars(parameter).get("ds_shape")
    return parameter.shape if divided is None else torch.Size(divided)


def differ(old: Trial, new: Trial, place: str, dtype: torch.dtype) -> Difference:
    """Compare two modules of equal weights on equal input."""
    allowed = ROUNDING[dtype] * torch.finfo(dtype).eps
    worst, where = 0.0, "nothing"
    for (name, expected), (_, actual) in zip(_results(old), _results(new), strict=True):
        share = _share(expected, actual)
        if not share <= worst:
            worst, where = share, name
    return Difference(worst, allowed, where, place)


def _results(trial: Trial) -> Iterator[tuple[str, torch.Tensor]]:
    """Outputs, then the gradients of inputs and weights by a random weighting of the outputs."""
    inputs = {f"the gradient of argument {i}": a for i, a in enumerate(trial.args) if _is_trained(a)}
    inputs |= {f"the gradient of {name}": a for name, a in trial.kwargs.items() if _is_trained(a)}
    inputs |= {f"the gradient of {name}": p for name, p in trial.module.named_parameters() if p.requires_grad}
    outputs = list(_tensors(trial.module(*trial.args, **trial.kwargs)))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, list(inputs.values()), weights, allow_unused=True)
    for index, output in enumerate(outputs):
        yield f"output {index}" if len(outputs) > 1 else "the output", output.detach()
    for (name, tensor), gradient in zip(inputs.items(), gradients, strict=True):
        yield name, torch.zeros_like(tensor) if gradient is None else gradient


def _is_trained(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.requires_grad


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from _tensors(part)


def _share(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference of a row as a share of its largest value; infinite where shape or type differ."""
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return float("inf")
    wanted, found = wanted.double(), found.double()
    scale = wanted.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
    share = float(((wanted - found).abs().amax(-1) / scale).max())
    return float("inf") if share != share else share


def prove(
    trial: MakeTrial, replace: Callable[[nn.Module], None], *, device: torch.device, dtype: torch.dtype
) -> Difference:
    """Compare a module with itself after `replace`; return the worst of the devices and types tried.

    Args:
        trial: Makes the stand-in and its input, anew and equal for equal generators.
        replace: Gives a stand-in the fused forward.
        device: Where the model is.
        dtype: The type that it computes in.
    """
    places = [(torch.device("cpu"), torch.float32)]
    if device.type not in ("cpu", "meta"):
        places.append((device, dtype))
    differences = []
    for there, type_there in places:
        # Layers are made with weights of torch's own, which are replaced: the run's random numbers are not touched.
        with torch.random.fork_rng(devices=[]):
            old, new = (trial(torch.Generator().manual_seed(0), there, type_there) for _ in range(2))
        replace(new.module)
        with torch.enable_grad(), torch.autocast(there.type, enabled=False):
            name = f"{str(type_there).removeprefix('torch.')} on {there.type}"
            differences.append(differ(old, new, name, type_there))
    return next((difference for difference in differences if not difference.is_rounding), differences[-1])


@dataclass(frozen=True)
class Fusion:
    """Replacement of a module's forward.

    Attributes:
        form: What it computes, in words.
        forward: The new forward, whose first parameter is the module. It finds `settings` as `module.fused_as`. It is
            called `forward` too, and is the same function for all modules of a form, so that they share compiled code.
        settings: What the forward has to know; frozen, compared by value.
        trial: Makes a stand-in for the module, and what to call it with, on a device in a type.
        sizes: Whatever else makes a proof another one, such as shapes.
        parts: Submodules by name that the forward needs fused, and how they are.
    """

    form: str
    forward: Callable[..., Any]
    settings: Hashable
    trial: MakeTrial
    sizes: Hashable = ()
    parts: "tuple[tuple[str, Fusion], ...]" = ()


@dataclass(frozen=True)
class Kept:
    """Reason that a module stays as it is."""

    reason: str


Rule = Callable[[nn.Module], Fusion | Kept | None]
"""Function that returns how to fuse a module, why not to, or None for one that it does not apply to."""


def replace(module: nn.Module, fusion: Fusion) -> None:
    """Give a module another forward; nothing else of it changes."""
    if "forward" in vars(module) and not is_fused(module):
        vars(module)[BEFORE] = module.forward
    vars(module)[SETTINGS] = fusion.settings
    vars(module)["forward"] = MethodType(fusion.forward, module)
    for name, part in fusion.parts:
        replace(module.get_submodule(name), part)


def is_fused(module: nn.Module) -> bool:
    """Return whether a module has one of tunekit's forwards."""
    return SETTINGS in vars(module)


def before_fusion(module: nn.Module) -> Callable[..., Any]:
    """Return the forward that a fused module had."""
    return vars(module).get(BEFORE) or MethodType(type(module).forward, module)


def unfuse(model: nn.Module) -> None:
    """Give all modules of a model their own forwards back."""
    for module in model.modules():
        if is_fused(module):
            before = vars(module).get(BEFORE)
            for name in FUSED:
                vars(module).pop(name, None)
            if before is not None:
                vars(module)["forward"] = before
