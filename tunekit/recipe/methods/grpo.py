"""Recipe section and spec of group relative policy optimization."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.on_policy import AGGREGATIONS, GenerationSection, PolicyGradientMethod, rewarded_spec
from tunekit.recipe.methods.spec import LearningRate, OtherSections
from tunekit.recipe.sections.section import FUNCTION_PATTERN, Conflict, FunctionPath
from tunekit.recipe.sections.tools import Environment, Tool

GRPOLoss = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
"""Losses of GRPO by TRL's names."""

WITHOUT_EPSILON = ("cispo", "sapo", "vespo")
"""Losses of GRPO that do not read `epsilon`; of them cispo alone reads `epsilon_high`."""

UNLIKE_ANSWERS = ("bnpo", "cispo", "dapo", "dr_grpo")
"""Losses of GRPO that are sums over tokens: a ratio of whole answers would weigh each by its length."""

_OF_TOOLS = ("max_tool_calling_iterations", "tool_timeout_seconds", "max_tool_result_chars")
"""Settings of tools and environments."""


class GRPOMethod(PolicyGradientMethod):
    """Group relative policy optimization: generate answers, reinforce those with higher rewards (TRL's GRPOTrainer)."""

    spec = rewarded_spec(
        config=("trl", "trainer/grpo_config.py", "GRPOConfig"),
        learning_rate=LearningRate(1e-6, 1e-5, "DeepSeekMath, arXiv 2402.03300"),
        loss_description="The loss of GRPO stays near zero; progress shows in the reward.",
        upstream_names=("_entropy_bonus_enabled", "_tokenize_prompts", "_tool_call_loop"),
        adds_router_loss=True,
        media=("image",),
    )

    type: Literal["grpo"] = "grpo"
    """Group relative policy optimization, on prompts (arXiv 2402.03300)."""

    loss_type: GRPOLoss = "dapo"
    """Loss by its TRL name: `dapo`, `grpo`, `dr_grpo` and `bnpo` differ in normalization; `cispo`, `sapo`, `luspo` and
    `vespo` in how they limit the policy ratio."""

    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Level of the importance-sampling ratio: token, or sequence (GSPO, arXiv 2507.18071)."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Normalization of advantages after subtracting the group mean: by the standard deviation of the group, of the
    batch, or none."""

    epsilon: Annotated[float, Field(gt=0)] = 0.2
    """PPO clip range."""

    epsilon_high: Annotated[float | None, Field(gt=0)] = None
    """Upper PPO clip range. Default: `epsilon`. For `cispo`, the maximum ratio itself, such as 5."""

    mask_truncated_completions: bool = False
    """Exclude completions that reach `max_completion_length` from the loss."""

    max_resample_times: Annotated[int, Field(ge=0)] = 0
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups whose completions all have the same reward teach nothing, and
    are replaced by groups of other prompts, drawn up to this many times per generated batch. 0: they stay."""

    replay_buffer_size: Annotated[int, Field(ge=0)] = 0
    """Replay (RePO, arXiv 2506.09340): number of latest groups with signal to keep. Groups without signal are replaced
    by some of them, drawn at random, with their log-probabilities of the time. 0: no replay."""

    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Asynchronous roll-outs with a vLLM server: number of steps by which the model that generates completions may be
    older than the trained one. 1: the completions of the next step are generated while this one is trained. Their
    tokens are weighted by importance sampling (TRL's `vllm_importance_sampling_correction`). 0: each step waits for
    its completions."""

    generation: GenerationSection = GenerationSection()
    """Generation settings."""

    tools: list[Tool] = []
    """Tools that the model may call while it answers: `calculator`, `python`, `search`, and your own functions
    (`my_module:my_function`). Their results are not trained on."""

    environment: Environment | None = None
    """Environment that the model acts in, one per completion: `guess_number`, `priced_sums`, `adventure`, or your own
    class (`my_module:MyEnvironment`)."""

    max_tool_calling_iterations: Annotated[int, Field(gt=0)] = 8
    """Maximum number of turns with tool calls in a completion. All turns share `max_completion_length` tokens."""

    tool_timeout_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Time limit per call of a tool or environment. After a timeout, its process is restarted."""

    max_tool_result_chars: Annotated[int, Field(gt=0)] = 4000
    """Maximum length of a tool's result in characters; longer results are truncated."""

    rollout: Annotated[FunctionPath | None, Field(pattern=FUNCTION_PATTERN)] = None
    """Your own generation, `module:function`, called with the prompts and the trainer (TRL's `rollout_func`)."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's GRPOConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""

    @property
    def acting(self) -> "GRPOMethod | None":
        """The method itself if the model calls tools or acts in an environment; else None."""
        return self if self.tools or self.environment is not None else None

    @property
    def has_own_loop(self) -> bool:
        """True if completions are more than one call of `generate`: tools, an environment or a roll-out function."""
        return self.uses_tools or self.rollout is not None

    @property
    def resamples(self) -> bool:
        """True if groups without signal are replaced by those of other prompts."""
        return self.max_resample_times > 0

    @property
    def replays(self) -> bool:
        """True if groups without signal are replaced by those of earlier steps."""
        return self.replay_buffer_size > 0

    @property
    def max_lag(self) -> int:
        """Steps by which the model that generates answers may lag behind the trained one."""
        return self.max_staleness

    @property
    def tool_seconds(self) -> float:
        """Longest time of a call of a tool or an environment."""
        return self.tool_timeout_seconds if self.uses_tools else 0.0

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        choice, why = super().summary(reference)
        if self.resamples:
            times = "once" if self.max_resample_times == 1 else f"up to {self.max_resample_times} times"
            why += f"; groups without signal are drawn again {times}, each time with the whole batch"
        if self.replays:
            size = f"{self.replay_buffer_size:,}"
            if self.resamples:
                why += f"; the rest of them are replaced by up to {size} groups of earlier steps"
            else:
                why += f"; groups without signal are replaced by the latest {size} that had some"
        if self.max_staleness:
            steps = "1 step" if self.max_staleness == 1 else f"{self.max_staleness} steps"
            why += f"; completions are generated {steps} ahead, while others are trained on"
        if self.rollout is not None:
            choice += f", generated by {self.rollout}"
        if not self.uses_tools:
            return choice, why
        names = [*(tool.name for tool in self.tools), *([] if self.environment is None else [_name(self.environment)])]
        choice += f" over up to {self.max_tool_calling_iterations + 1} turns, with {', '.join(names)}"
        return choice, f"{why}; tool results count towards the length and are not trained on"

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and between settings of the method."""
        yield from super().conflicts(others)
        if self.rollout is not None and self.uses_tools:
            what = "mutually exclusive with method.tools and method.environment"
            yield Conflict(("method", "rollout"), what, "call them in the function, or unset it")
        if self.resamples and self.scale_rewards == "batch":
            what = "not supported with scale_rewards batch, which compares all groups that were generated together"
            yield Conflict(("method", "max_resample_times"), what, "set scale_rewards=group, or unset it")
        if self.resamples and self.trainer_args.get("multi_objective_aggregation") == AGGREGATIONS[1]:
            what = f"not supported with multi_objective_aggregation {AGGREGATIONS[1]}, which compares all groups"
            yield Conflict(("method", "max_resample_times"), what, "unset one of them")
        if self.replays and self.trainer_args.get("sync_ref_model"):
            what = "not supported with trainer_args.sync_ref_model: the reference of earlier steps was another one"
            yield Conflict(("method", "replay_buffer_size"), what, "unset one of them")
        yield from self._conflicts_of_async_rollouts()
        names = [tool.name for tool in self.tools]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield Conflict(("method", "tools"), f"two tools are named {name}", "rename one, or remove it")
        for name in () if self.uses_tools else _OF_TOOLS:
            if dict(self)[name] != type(self).model_fields[name].default:
                yield Conflict(("method", name), "has no effect without method.tools or method.environment", "unset it")

    def _conflicts_of_async_rollouts(self) -> Iterator[Conflict]:
        """Yield what does not go with completions of an older model."""
        if not self.max_staleness:
            return
        key = ("method", "max_staleness")
        if self.generation.vllm_mode != "server":
            what = "needs a vLLM server, which generates on other devices than those that train"
            yield Conflict(key, what, "set method.generation.vllm_mode=server, or unset it")
        if self.num_iterations > 1:
            what = "not supported with num_iterations above 1, whose steps use their completions while these get older"
            yield Conflict(key, what, "unset one of them")
        if self.has_own_loop:
            what = "not supported with method.tools, method.environment and method.rollout"
            yield Conflict(key, what, "unset it")
        if self.trainer_args.get("vllm_importance_sampling_correction") is False:
            what = "needs trainer_args.vllm_importance_sampling_correction: completions are of an older model"
            yield Conflict(key, what, "unset one of them")

    def why_no_vllm(self) -> tuple[str, str] | None:
        """Return why the method cannot learn from answers of vLLM's, and the remedy; None where it can."""
        if self.loss_type != "vespo":
            return None
        why = "vespo needs a different importance-sampling correction for vLLM than TRL's default"
        return why, "use another method.loss_type, or unset use_vllm"

    def conflicts_of_loss(self) -> Iterator[Conflict]:
        """Yield the fields that a loss of GRPO does not support."""
        loss, level = self.loss_type, self.importance_sampling_level
        key = ("method", "importance_sampling_level")
        if loss == "luspo" and level != "sequence":
            yield Conflict(key, "must be sequence for loss_type luspo", "set method.importance_sampling_level=sequence")
        if loss == "vespo" and level != "token":
            what = "must be token for loss_type vespo, which compares whole answers itself"
            yield Conflict(key, what, "unset it")
        if loss in UNLIKE_ANSWERS and level == "sequence":
            what = f"cannot be sequence for loss_type {loss}, a sum over tokens: long answers would weigh more"
            yield Conflict(key, what, "set method.loss_type=grpo, as in GSPO")
        if loss in WITHOUT_EPSILON and self.epsilon != type(self).model_fields["epsilon"].default:
            yield Conflict(("method", "epsilon"), f"has no effect for loss_type {loss}", "unset it")
        high = self.epsilon_high
        if loss in ("sapo", "vespo") and high is not None:
            yield Conflict(("method", "epsilon_high"), f"has no effect for loss_type {loss}", "unset it")
        if loss == "cispo" and (high is None or high < 1):
            what = "must be at least 1 for loss_type cispo: it is the maximum policy ratio"
            yield Conflict(("method", "epsilon_high"), what, "set method.epsilon_high=5.0, as in ScaleRL")


def _name(environment: Environment) -> str:
    """Return the name of an environment, of your own that of its class."""
    return environment.path.rpartition(":")[2] if environment.type == "class" else environment.type
