"""Common half of methods that learn from answers which the model generates.

TRL finds most of the conflicts below when it builds a trainer, after the model was loaded, or warns in its log, or goes
on with something else than was asked for.

Common half of methods that learn the probabilities of another model, the teacher.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from tunekit.recipe.methods.spec import (
    COMMON_CHECKS,
    Generation,
    MethodPasses,
    MethodSection,
    MethodSpec,
    OtherSections,
    PassInputs,
    ReferenceUse,
)
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.rewards import Reward
from tunekit.recipe.sections.section import Conflict, Section
from tunekit.recipe.sections.tools import Environment, Tool

AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
"""How TRL's GRPOTrainer brings several rewards together; any other word fails in the first step (trl 1.16)."""

ANSWER_CHECKS = (*COMMON_CHECKS, "answers_run_away")
"""Health checks of methods that generate; their loss tells little."""

REWARD_CHECKS = (*ANSWER_CHECKS, "reward_is_constant", "reward_falls", "no_signal", "kl_explodes", "entropy_collapses")
"""Health checks of methods whose answers are rewarded."""

REWARD_METRICS = ("loss", "reward", "rewards/*/mean", "kl", "completions/mean_length", "completions/clipped_ratio")
"""Metrics by which runs may be ranked whose answers are rewarded."""

rewarded_spec = partial(
    MethodSpec,
    row_formats=("prompts",),
    trains_on="prompts",
    metrics=REWARD_METRICS,
    health_checks=REWARD_CHECKS,
    settings_scale_loss=False,
)
"""Spec of a method whose answers are rewarded, of what it has for itself."""

VLLM_URL, VLLM_GROUP_PORT = "TUNEKIT_VLLM_URL", "TUNEKIT_VLLM_GROUP_PORT"
"""Variables with the URL of the run's vLLM server, and the port for sending it weights."""


@dataclass(frozen=True)
class ServerWords:
    """Words of errors of a vLLM server.

    Attributes:
        key: The field that it comes from.
        name: The server.
        hint: The remedy where it does not answer.
    """

    key: str
    name: str
    hint: str


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SamplingSection(Section):
    """Sampling of completions during training."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: probability mass to sample from. 1: all."""

    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of most likely tokens to sample from. 0: all."""

    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    """Minimum probability of a token relative to the most likely one."""

    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Penalty on repeated tokens; 1: none."""


class GenerationSection(SamplingSection):
    """Generation of completions during training."""

    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Stop strings, besides the end token of the model."""

    use_vllm: Literal["auto"] | bool = "auto"
    """Generate with vLLM instead of transformers. `auto`: if it is installed and there is a GPU."""

    vllm_mode: Literal["colocate", "server"] = "colocate"
    """Devices of vLLM: those that are trained on (`colocate`), or others (`server`)."""

    vllm_server_base_url: str | None = None
    """URL of a vLLM server that runs already, such as `http://host:8000`. Default: the run starts one on devices of
    this machine that it does not train on, and stops it at its end."""

    vllm_tensor_parallel_size: Annotated[int | None, Field(gt=0)] = None
    """Number of devices over which the server that the run starts splits a model. Default: 1."""

    vllm_data_parallel_size: Annotated[int | None, Field(gt=0)] = None
    """Number of models on the server that the run starts. Default: 1."""

    vllm_gpu_memory_utilization: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Share of device memory for vLLM: its copy of the weights and its KV cache. Default: chosen by the plan where vLLM
    is colocated, 0.9 of the devices of a server that the run starts."""

    @property
    def server_words(self) -> ServerWords:
        """Words of errors of the vLLM server."""
        key, url = "method.generation", self.vllm_server_base_url
        if url is None:
            return ServerWords(f"{key}.vllm_mode", "the run's vLLM server", "see vllm.log in the run's folder")
        hint = "see the server's log, start it again with `vllm serve`, and resume the run"
        return ServerWords(f"{key}.vllm_server_base_url", f"the vLLM server at {url}", hint)


class ActingMethod(Protocol):
    """A method whose model calls tools while it answers, or acts in an environment."""

    @property
    def rewards(self) -> list[Reward]:
        """Reward functions."""

    @property
    def tools(self) -> list[Tool]:
        """Tools that the model may call."""

    @property
    def environment(self) -> Environment | None:
        """Environment that the model acts in."""

    @property
    def tool_timeout_seconds(self) -> float:
        """Time limit per call."""


class OnPolicyMethod(MethodSection):
    """A method that learns from answers which the model gives while it is trained."""

    if TYPE_CHECKING:
        max_completion_length: int
        beta: float
        generation: GenerationSection

    @property
    def answers_per_prompt(self) -> int:
        """Answers that are generated to each prompt."""
        return 1

    @property
    def steps_per_generation(self) -> int:
        """Optimizer steps on the same answers."""
        return 1

    @property
    def acting(self) -> ActingMethod | None:
        """The method itself if the model calls tools or acts in an environment; else None."""
        return None

    @property
    def uses_tools(self) -> bool:
        """True if completions may have several turns."""
        return self.acting is not None

    @property
    def teacher_template(self) -> str | None:
        """Template of the prompts that the model reads as its own teacher; None where it is not."""
        return None

    @property
    def has_own_loop(self) -> bool:
        """True if completions are more than one call of `generate`: tools, an environment or a roll-out function."""
        return self.uses_tools

    @property
    def num_server_devices(self) -> int:
        """Devices of the vLLM server that the run starts; 0 where it starts none."""
        generation = self.generation
        starts = generation.use_vllm is True and generation.vllm_mode == "server"
        if not starts or generation.vllm_server_base_url is not None:
            return 0
        return (generation.vllm_tensor_parallel_size or 1) * (generation.vllm_data_parallel_size or 1)

    @property
    def resamples(self) -> bool:
        """True if groups without signal are replaced by those of other prompts."""
        return False

    @property
    def prompt_columns(self) -> tuple[str, ...]:
        """Columns of prompts of a prepared row, each of which has to leave room for a completion."""
        return ("prompt",)

    @property
    def matches_answers(self) -> bool:
        """True if completions are compared with the answers of the rows."""
        return False

    @property
    def replays(self) -> bool:
        """True if groups without signal are replaced by those of earlier steps."""
        return False

    @property
    def max_lag(self) -> int:
        """Steps by which the model that generates answers may lag behind the trained one."""
        return 0

    def why_no_vllm(self) -> tuple[str, str] | None:
        """Return why the method cannot learn from answers of vLLM's, and the remedy; None where it can."""
        return None

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        prompt_tokens = inputs.max_length - self.max_completion_length
        return MethodPasses(
            self.type,
            max_scored_share=self.max_completion_length / inputs.max_length,
            generation=Generation(
                inputs.global_batch_size,
                # What was written in earlier turns is the prompt of the last.
                prompt_tokens + (self.max_completion_length if self.uses_tools else 0),
                self.max_completion_length,
                self.steps_per_generation,
                by_vllm=inputs.by_vllm,
                is_ahead=self.max_lag > 0,
            ),
        )

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and between settings of the generation."""
        yield from super().conflicts(others)
        if self.max_completion_length >= others.data.max_length:
            room = f"data.max_length {others.data.max_length}"
            what = f"{self.max_completion_length} leaves no room for a prompt in {room}"
            yield Conflict(("method", "max_completion_length"), what, "lower it, or raise data.max_length")
        yield from _conflicts_of_generation(self)


class RewardedMethod(OnPolicyMethod):
    """A method whose answers are judged by rewards, several to a prompt."""

    type: str
    """Name of the method."""

    rewards: list[Reward] = []
    """Reward functions: built-in ones (`exact_match`, or with settings `{type: numeric_match, tolerance: 0.01, weight:
    2}`) and your own (`my_module:my_function`), combined as a weighted sum. Training needs at least one, except
    with ebft, to whose own reward they are added; a plan none."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt, compared with each other. Must divide `train.global_batch_size`."""

    max_completion_length: Annotated[int, Field(gt=0)] = 512
    """Maximum completion length in tokens. Prompts get the rest of `data.max_length`."""

    if TYPE_CHECKING:
        mask_truncated_completions: bool

    always_scores_answers: ClassVar[bool] = False
    """True if answers are scored by the model that gave them before each first step on them. GRPO takes the first pass
    of training for that, unless the model has changed since or vLLM sampled with its own probabilities."""

    trl_loads_reference: ClassVar[bool] = True
    """True if TRL loads a second model as the reference, from where the first came from."""

    @property
    def answers_per_prompt(self) -> int:
        """Answers that are generated to each prompt."""
        return self.num_generations

    @property
    def best_metric(self) -> str:
        """Metric of evaluations that tells the best checkpoint, without their prefix."""
        return "reward"

    @property
    def own_rewards(self) -> tuple[str, ...]:
        """Names of rewards that the method itself gives, each with weight 1."""
        return ()

    @property
    def reward_weights(self) -> list[float]:
        """Weights of all rewards, those of the method itself first."""
        return [*(1.0 for _ in self.own_rewards), *(reward.weight for reward in self.rewards)]

    @property
    def own_arguments(self) -> dict[str, Any]:
        """Arguments of the loss, by TRL's names."""
        return {}

    @property
    def tool_seconds(self) -> float:
        """Longest time of a call of a tool or an environment."""
        return 0.0

    @property
    def reference_use(self) -> ReferenceUse:
        """Use of a reference model."""
        return "model" if self.beta else "none"

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        # Once for all steps on the same answers: the reference, and the model that gave them.
        scores_answers = self.always_scores_answers or self.replays or self.steps_per_generation > 1 or inputs.by_vllm
        return replace(
            super().passes(inputs),
            keeps_reference=inputs.is_full and self.beta > 0,
            num_forwards=((self.beta > 0) + scores_answers) / self.steps_per_generation,
        )

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        choice = f"{self.type}, {self.num_generations} completions of up to {self.max_completion_length} tokens"
        times = self.steps_per_generation
        used = "" if times == 1 else f"; used for {times} optimizer steps"
        return choice, (f"beta {self.beta:g}: {reference}" if self.beta else "beta 0: no reference") + used

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and between settings of the method."""
        yield from super().conflicts(others)
        train = others.train
        if train.global_batch_size % self.num_generations:
            what = f"{self.num_generations} does not divide train.global_batch_size {train.global_batch_size}"
            yield Conflict(
                ("method", "num_generations"), what, "set a divisor: a step uses all completions of a prompt"
            )
        yield from _conflicts_of_trainer_args(self, full=isinstance(others.adapter, FullAdapter))


class PolicyGradientMethod(RewardedMethod):
    """A method that raises the likelihood of answers by how much better than others of the prompt they are."""

    num_iterations: Annotated[int, Field(gt=0)] = 1
    """Optimizer steps per generated batch."""

    beta: Annotated[float, Field(ge=0)] = 0.0
    """KL coefficient: how strongly the model is kept close to the reference. 0: no reference model."""

    if TYPE_CHECKING:
        epsilon: float
        epsilon_high: float | None

    @property
    def steps_per_generation(self) -> int:
        """Optimizer steps on the same answers."""
        return self.num_iterations

    @property
    def own_arguments(self) -> dict[str, Any]:
        """Arguments of the loss, by TRL's names."""
        return {
            "num_iterations": self.num_iterations,
            "epsilon": self.epsilon,
            "epsilon_high": self.epsilon_high,
        }

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and between settings of the method."""
        yield from super().conflicts(others)
        save_steps = others.train.save_steps
        if save_steps is not None and save_steps % self.num_iterations:
            what = f"{save_steps} is not a multiple of method.num_iterations {self.num_iterations}"
            hint = "save where new completions are due; checkpoints do not store them"
            yield Conflict(("train", "save_steps"), what, hint)
        yield from self.conflicts_of_loss()
        if self.epsilon_high is not None and self.epsilon_high < self.epsilon:
            what = f"{self.epsilon_high:g} is less than method.epsilon {self.epsilon:g}"
            yield Conflict(
                ("method", "epsilon_high"), what, "raise it: the upper clip range must not be below the lower"
            )

    def conflicts_of_loss(self) -> Iterator[Conflict]:
        """Yield the fields that the loss does not support."""
        yield from ()


def _conflicts_of_generation(method: OnPolicyMethod) -> Iterator[Conflict]:
    """Yield vLLM settings that belong to another mode, and arguments that set the same twice."""
    generation, section = method.generation, ("method", "generation")
    url, share = "vllm_server_base_url", "vllm_gpu_memory_utilization"
    sizes = ("vllm_tensor_parallel_size", "vllm_data_parallel_size")
    unread: tuple[str, ...] = ()
    if generation.use_vllm is False:
        unread, why = (url, *sizes, share), "use_vllm false"
    elif generation.vllm_mode == "colocate":
        unread, why = (url, *sizes), "vllm_mode colocate"
    elif generation.vllm_server_base_url is not None:
        unread, why = (*sizes, share), "vllm_server_base_url"
    for name in unread:
        if dict(generation)[name] is not None:
            yield Conflict((*section, name), f"has no effect with {why}", "unset one of them")
    if generation.vllm_mode == "server" and generation.use_vllm is not True:
        what = "has no effect unless use_vllm is true"
        yield Conflict((*section, "vllm_mode"), what, "set method.generation.use_vllm=true")
    kwargs = method.trainer_args.get("generation_kwargs")
    for name in kwargs if isinstance(kwargs, dict) else {}:
        if name in _OWNERS:
            key = ("method", "trainer_args", "generation_kwargs")
            yield Conflict(key, f"must not contain {name}, which tunekit sets", f"use {_OWNERS[name]}")


_OWNERS = {
    **{name: f"method.generation.{name}" for name in (*_SAMPLING, "stop")},
    "stop_strings": "method.generation.stop",
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "method.max_completion_length"),
    **dict.fromkeys(("n", "num_return_sequences"), "method.num_generations"),
}
"""What generation is told by other fields, by its names in transformers and in vLLM."""


def _conflicts_of_trainer_args(method: RewardedMethod, *, full: bool) -> Iterator[Conflict]:
    """Arguments that TRL refuses once the model is there, or in the first step."""
    arguments = method.trainer_args

    def conflict(name: str, what: str, hint: str) -> Conflict:
        return Conflict(("method", "trainer_args", name), what, hint)

    if arguments.get("sync_ref_model") and not method.beta:
        yield conflict("sync_ref_model", "has no effect with method.beta 0: no reference model", "unset it")
    elif arguments.get("sync_ref_model") and not full:
        what = "unsupported with an adapter: the reference is the frozen base model"
        yield conflict("sync_ref_model", what, "unset it")
    num_eval = arguments.get("num_generations_eval")
    if isinstance(num_eval, int) and num_eval < 1:
        yield conflict("num_generations_eval", f"must be at least 1, got {num_eval}", "unset it")
    how = arguments.get("multi_objective_aggregation", AGGREGATIONS[0])
    if isinstance(how, str) and how not in AGGREGATIONS:
        yield conflict("multi_objective_aggregation", f"must be one of {', '.join(AGGREGATIONS)}", "unset it")


AS_THE_MODEL = ("dtype", "attn_implementation", "kernels", "image_processor", "video_processor")
"""Settings of a teacher that are those of the model that learns from it."""


class TeacherMethod(MethodSection):
    """A method that learns the probabilities of a teacher, token by token."""

    if TYPE_CHECKING:
        teacher: ModelSection

    @property
    def is_single_pass(self) -> bool:
        """True if a step takes each row through the trained model once, and through no other."""
        return False

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and settings of the teacher that are the model's."""
        yield from super().conflicts(others)
        for name, value in zip(AS_THE_MODEL, _as_the_model(self.teacher), strict=True):
            if value not in ("auto", None):
                what = "not configurable: the teacher uses the model's setting"
                yield Conflict(("method", "teacher", name), what, f"use model.{name}")

    @classmethod
    def offers(cls, key: tuple[str, ...]) -> bool:
        """Return whether a field of the recipe may differ from its default with the method."""
        return super().offers(key) and not (key[:2] == ("method", "teacher") and key[-1] in AS_THE_MODEL)


def _as_the_model(teacher: ModelSection) -> tuple[object, ...]:
    return teacher.dtype, teacher.attn_implementation, teacher.kernels, teacher.image_processor, teacher.video_processor
