"""Training methods of recipes: a file for each, with its section and its spec, and the table of them all.

Each is carried out by a trainer of TRL's, which `tunekit.methods.NAME` builds. Whatever else that trainer can do stands
in `trainer_args`, by TRL's names.
"""

from typing import Annotated, NamedTuple, get_args

from pydantic import BeforeValidator, Field
from typing_extensions import TypeIs

from tunekit.recipe.methods.classification import ClassificationMethod
from tunekit.recipe.methods.comparing import MarginMethod, ReferenceMethod
from tunekit.recipe.methods.cpo import CPOMethod
from tunekit.recipe.methods.distillation import DistillationMethod
from tunekit.recipe.methods.dpo import DPOMethod
from tunekit.recipe.methods.ebft import EBFTMethod
from tunekit.recipe.methods.gkd import GKDMethod
from tunekit.recipe.methods.gmpo import GMPOMethod
from tunekit.recipe.methods.gold import GOLDMethod
from tunekit.recipe.methods.grpo import GRPOMethod
from tunekit.recipe.methods.kto import KTOMethod
from tunekit.recipe.methods.on_policy import OnPolicyMethod, RewardedMethod, TeacherMethod
from tunekit.recipe.methods.online_dpo import OnlineDPOMethod
from tunekit.recipe.methods.orpo import ORPOMethod
from tunekit.recipe.methods.prm import PRMMethod
from tunekit.recipe.methods.reward import RewardMethod
from tunekit.recipe.methods.rloo import RLOOMethod
from tunekit.recipe.methods.sdft import SDFTMethod
from tunekit.recipe.methods.sft import SFTMethod
from tunekit.recipe.methods.spec import MethodSection
from tunekit.recipe.sections.section import type_alone

_Offline = SFTMethod | DPOMethod | KTOMethod | ORPOMethod | CPOMethod | RewardMethod | PRMMethod | ClassificationMethod
_Taught = GKDMethod | GOLDMethod
_OnPolicy = GRPOMethod | RLOOMethod | GMPOMethod | EBFTMethod | OnlineDPOMethod | DistillationMethod | SDFTMethod
Table = _Offline | _Taught | _OnPolicy
"""The table of methods: a new one is added above."""

Method = Annotated[Table, Field(discriminator="type"), BeforeValidator(type_alone)]
"""How it is trained, told apart by `method.type`. `method: sft` is short for `method: {type: sft}`."""

METHODS: dict[str, type[MethodSection]] = {method.model_fields["type"].default: method for method in get_args(Table)}
"""Sections by `method.type`."""


def generates(method: MethodSection) -> TypeIs[OnPolicyMethod]:
    """Return whether the model gives answers while it is trained."""
    return isinstance(method, OnPolicyMethod)


def is_rewarded(method: MethodSection) -> TypeIs[RewardedMethod]:
    """Return whether rewards judge the answers that the model gives while it is trained."""
    return isinstance(method, RewardedMethod)


def has_teacher(method: MethodSection) -> TypeIs[TeacherMethod]:
    """Return whether the model learns the probabilities of another one."""
    return isinstance(method, TeacherMethod)


def compares_with_reference(method: MethodSection) -> TypeIs[ReferenceMethod]:
    """Return whether rewards are how much likelier an answer is than to a reference."""
    return isinstance(method, ReferenceMethod)


def has_margins(method: MethodSection) -> TypeIs[MarginMethod]:
    """Return whether the loss compares log-probabilities of two answers without a reference."""
    return isinstance(method, MarginMethod)


class MethodInfo(NamedTuple):
    """A training method, as a form offers it."""

    name: str
    """`method.type`."""
    title: str
    """Name in words, such as `Direct preference optimization`."""
    generates: bool
    """True if the model gives answers while it is trained."""
    is_rewarded: bool
    """True if rewards judge these answers."""
    has_teacher: bool
    """True if it learns the probabilities of another model."""


def list_methods() -> list[MethodInfo]:
    """Return the training methods, in the order of their table."""
    return [
        MethodInfo(
            name,
            (section.__doc__ or "").partition(":")[0],
            generates=issubclass(section, OnPolicyMethod),
            is_rewarded=issubclass(section, RewardedMethod),
            has_teacher=issubclass(section, TeacherMethod),
        )
        for name, section in METHODS.items()
    ]
