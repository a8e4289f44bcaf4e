"""Conflicts within methods that learn from answers which the model generates.

TRL finds most of this when it builds a trainer, after the model was loaded, or warns in its log, or goes on with
something else than was asked for.
"""

from collections.abc import Iterator

from tunekit.recipe.methods import DistillationMethod, GRPOMethod, OnPolicyMethod, RewardedMethod
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.section import Conflict

AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
"""How TRL's GRPOTrainer brings several rewards together; any other word fails in the first step (trl 1.16)."""

WITHOUT_EPSILON = ("cispo", "sapo", "vespo")
"""Losses of GRPO that do not read `epsilon`; of them cispo alone reads `epsilon_high`."""

UNLIKE_ANSWERS = ("bnpo", "cispo", "dapo", "dr_grpo")
"""Losses of GRPO that are sums over tokens: a ratio of whole answers would weigh each by its length."""


def conflicts_of_answers(
    method: OnPolicyMethod, *, max_length: int, global_batch_size: int, save_steps: int | None, full: bool
) -> Iterator[Conflict]:
    """Yield conflicts of a method with the rows, the batch and the adapter.

    Args:
        method: The method.
        max_length: Longest sequence.
        global_batch_size: Answers of an optimizer step.
        save_steps: Steps between two checkpoints, where the recipe says so.
        full: Whether the weights themselves are trained, and no adapter.
    """
    if method.max_completion_length >= max_length:
        what = f"{method.max_completion_length} leaves no place for a prompt in data.max_length {max_length}"
        yield Conflict(("method", "max_completion_length"), what, "lower it, or raise data.max_length")
    yield from _conflicts_of_generation(method)
    if isinstance(method, DistillationMethod):
        yield from _conflicts_of_teacher(method.teacher)
        return
    if global_batch_size % method.num_generations:
        what = f"{method.num_generations} does not divide train.global_batch_size {global_batch_size}"
        yield Conflict(("method", "num_generations"), what, "a step takes all answers to a prompt")
    if save_steps is not None and save_steps % method.num_iterations:
        what = f"{save_steps} is no multiple of method.num_iterations {method.num_iterations}"
        hint = "a checkpoint holds no answers, so it is made where new ones are due"
        yield Conflict(("train", "save_steps"), what, hint)
    yield from _conflicts_of_trainer_args(method, full=full)
    if isinstance(method, GRPOMethod):
        yield from _conflicts_of_loss(method)
    if method.epsilon_high is not None and method.epsilon_high < method.epsilon:
        what = f"{method.epsilon_high:g} is less than method.epsilon {method.epsilon:g}"
        yield Conflict(("method", "epsilon_high"), what, "steps upwards go as far as those downwards at least")


AS_THE_MODEL = ("dtype", "attn_implementation", "kernels")
"""What is computed of a teacher as of the model that learns from it."""


def _conflicts_of_teacher(teacher: ModelSection) -> Iterator[Conflict]:
    for name, value in zip(AS_THE_MODEL, (teacher.dtype, teacher.attn_implementation, teacher.kernels), strict=True):
        if value != "auto":
            what = "cannot be given: the teacher is computed like the model"
            yield Conflict(("method", "teacher", name), what, f"use model.{name}")


def _conflicts_of_generation(method: OnPolicyMethod) -> Iterator[Conflict]:
    """Yield vLLM settings that belong to another mode, and arguments that set the same twice."""
    generation, section = method.generation, ("method", "generation")
    colocated: dict[str, object] = {"vllm_gpu_memory_utilization": generation.vllm_gpu_memory_utilization}
    of_server: dict[str, object] = {"vllm_server_base_url": generation.vllm_server_base_url}
    unread, why = (
        (of_server, "vllm_mode colocate") if generation.vllm_mode == "colocate" else (colocated, "vllm_mode server")
    )
    if generation.use_vllm is False:
        unread, why = {**colocated, **of_server}, "use_vllm false"
    for name, value in unread.items():
        if value is not None:
            yield Conflict((*section, name), f"means nothing with {why}", "leave one of them out")
    if generation.vllm_mode == "server":
        if generation.use_vllm is not True:
            what = "means nothing without use_vllm: true: a server is not looked for"
            yield Conflict((*section, "vllm_mode"), what, "set method.generation.use_vllm=true")
        elif generation.vllm_server_base_url is None:
            what = "is missing, and vllm_mode is server"
            yield Conflict((*section, "vllm_server_base_url"), what, "name its address, such as http://host:8000")
    kwargs = method.trainer_args.get("generation_kwargs")
    for name in kwargs if isinstance(kwargs, dict) else {}:
        owner = _OWNERS.get(name)
        if owner is not None:
            key = ("method", "trainer_args", "generation_kwargs")
            yield Conflict(key, f"cannot hold {name}, which tunekit sets itself", f"use {owner}")


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
_OWNERS = {
    **{name: f"method.generation.{name}" for name in _SAMPLING},
    "stop_strings": "method.generation.stop",
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "method.max_completion_length"),
    **dict.fromkeys(("n", "num_return_sequences"), "method.num_generations"),
}
"""What generation is told by other fields, by its names in transformers and in vLLM."""


def _conflicts_of_loss(method: GRPOMethod) -> Iterator[Conflict]:
    """Yield the fields that a loss of GRPO does not support."""
    loss, level = method.loss_type, method.importance_sampling_level
    key = ("method", "importance_sampling_level")
    if loss == "luspo" and level != "sequence":
        yield Conflict(key, "must be sequence for loss_type luspo", "set method.importance_sampling_level=sequence")
    if loss == "vespo" and level != "token":
        what = "must be token for loss_type vespo, which compares whole answers itself"
        yield Conflict(key, what, "leave it out")
    if loss in UNLIKE_ANSWERS and level == "sequence":
        what = f"cannot be sequence for loss_type {loss}, a sum over tokens: long answers would count for more"
        yield Conflict(key, what, "set method.loss_type=grpo, as in GSPO")
    if loss in WITHOUT_EPSILON and method.epsilon != type(method).model_fields["epsilon"].default:
        yield Conflict(("method", "epsilon"), f"means nothing for loss_type {loss}", "leave it out")
    high = method.epsilon_high
    if loss in ("sapo", "vespo") and high is not None:
        yield Conflict(("method", "epsilon_high"), f"means nothing for loss_type {loss}", "leave it out")
    if loss == "cispo" and (high is None or high < 1):
        what = "is for loss_type cispo the ratio itself at which tokens count no more, and so 1 at least"
        yield Conflict(("method", "epsilon_high"), what, "set method.epsilon_high=5.0, as in ScaleRL")


def _conflicts_of_trainer_args(method: RewardedMethod, *, full: bool) -> Iterator[Conflict]:
    """Arguments that TRL refuses once the model is there, or in the first step."""
    arguments = method.trainer_args

    def conflict(name: str, what: str, hint: str) -> Conflict:
        return Conflict(("method", "trainer_args", name), what, hint)

    if arguments.get("sync_ref_model") and not method.beta:
        yield conflict("sync_ref_model", "means nothing with method.beta 0: there is no reference", "leave it out")
    elif arguments.get("sync_ref_model") and not full:
        what = "cannot be true with an adapter: the reference is the model without it, which stays"
        yield conflict("sync_ref_model", what, "leave it out")
    num_eval = arguments.get("num_generations_eval")
    if isinstance(num_eval, int) and num_eval < 1:
        yield conflict("num_generations_eval", f"must be 1 at least, got {num_eval}", "leave it out")
    how = arguments.get("multi_objective_aggregation", AGGREGATIONS[0])
    if isinstance(how, str) and how not in AGGREGATIONS:
        yield conflict("multi_objective_aggregation", f"must be one of {', '.join(AGGREGATIONS)}", "leave it out")
