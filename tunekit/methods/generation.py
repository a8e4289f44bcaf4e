"""Generation of the answers that a model learns from: arguments of TRL's on-policy trainers, and end-of-answer tokens.

TRL takes an answer for finished where its last token is an end token, and for cut off otherwise. One that ends with a
text of `method.generation.stop` does so without such a token. transformers pads it behind that text, so that padding
would be learned as a part of the answer, or as an end token that the model never gave where the two are the same; and
the longest of a batch would count as cut off (trl 1.16, `_generate_single_turn` and `_generate`). `end_at_stop_texts`
mends both on a trainer.

TRL's client asks a vLLM server up to six times within a minute, and then raises what the connection raised. Here that
becomes an error with the server's address and the remedy.
"""

import inspect
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tunekit.data.media.answers import with_pictures
from tunekit.errors import DataError, RunError
from tunekit.methods.arguments import Parts, loading_arguments
from tunekit.methods.run_trainer import GroupOrder, RunTrainer
from tunekit.planner.plan import Plan
from tunekit.recipe.methods.on_policy import VLLM_GROUP_PORT, VLLM_URL, OnPolicyMethod, RewardedMethod, ServerWords
from tunekit.recipe.sections.data import DataSection

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


def generation_arguments(method: OnPolicyMethod, data: DataSection, plan: Plan) -> dict[str, Any]:
    """Arguments of a TRL config: lengths, sampling, and what generates. They go before `method.trainer_args`.

    Args:
        method: Longest answer and sampling.
        data: Longest sequence, and whether prompts are shuffled.
        plan: What generates.
    """
    generation, vllm = method.generation, plan.vllm
    arguments: dict[str, Any] = {
        "shuffle_dataset": data.shuffle,
        "max_completion_length": method.max_completion_length,
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "top_k": generation.top_k,
        "min_p": generation.min_p,
        "repetition_penalty": generation.repetition_penalty,
        "use_vllm": vllm is not None,
    }
    if generation.stop:
        name = "stop_strings" if vllm is None else "stop"
        arguments["generation_kwargs"] = {**(method.trainer_args.get("generation_kwargs") or {}), name: generation.stop}
    if vllm is None:
        return arguments
    arguments |= {"vllm_mode": vllm.mode, "vllm_max_model_length": data.max_length}
    if vllm.mode == "server" and method.num_server_devices:
        # It is started together with this process.
        arguments |= {"vllm_server_base_url": os.environ[VLLM_URL], "vllm_group_port": int(os.environ[VLLM_GROUP_PORT])}
        return {**arguments, "vllm_server_timeout": plan.patience_seconds}
    if vllm.mode == "server":
        return {**arguments, "vllm_server_base_url": generation.vllm_server_base_url}
    return {
        **arguments,
        "vllm_gpu_memory_utilization": vllm.gpu_memory_utilization,
        "trust_remote_code": plan.base.trust_remote_code,
    }


def arguments_in_groups(method: RewardedMethod, parts: Parts) -> dict[str, Any]:
    """Arguments of a TRL config for rewarded groups of answers, and for evaluations of whole ones."""
    num_generations = method.trainer_args.get("num_generations_eval") or method.num_generations
    plan = parts.plan
    size = whole_groups(plan.micro_batch_size, num_generations, num_batches=plan.layout.num_batches)
    return {
        **parts.arguments(),
        "per_device_eval_batch_size": size,
        **method.own_arguments,
        "num_generations": method.num_generations,
        # All answers of a step at once, and so many steps on them.
        "steps_per_generation": plan.gradient_accumulation_steps,
        "beta": method.beta,
        "mask_truncated_completions": method.mask_truncated_completions,
        "reward_weights": method.reward_weights,
        # Of a second model, which TRL loads from where the first came from.
        "model_init_kwargs": loading_arguments(plan) if method.beta and method.trl_loads_reference else None,
    }


def generating_trainer(base: type, method: OnPolicyMethod, parts: Parts, **given: Any) -> RunTrainer:
    """A trainer of TRL's that learns from the model's own answers.

    Args:
        base: TRL's class.
        method: What ends answers.
        parts: All else. Rows have a column `prompt` of texts or messages.
        given: Arguments besides those of every trainer.
    """
    if parts.processor is not None:
        given["processing_class"] = parts.processor
        evaluated = None if parts.eval_dataset is None else with_pictures(parts.eval_dataset)
        parts = replace(parts, train_dataset=with_pictures(parts.train_dataset), eval_dataset=evaluated)
    served = parts.plan.vllm is not None and parts.plan.vllm.mode == "server"
    if served:
        server = method.generation.server_words
        with _answering(server):
            trainer = parts.trainer(base, **given)
        trainer.wrap("generate", partial(_generate_served, server))
    else:
        trainer = parts.trainer(base, **given)
    if parts.processor is not None:
        _keep_unpadded(trainer)
    trainer.prompt_order = GroupOrder(trainer, parts.train.seed)
    end_at_stop_texts(trainer, parts.tokenizer, method.generation.stop)
    return trainer


def _generate_served(server: ServerWords, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _answering(server):
        return generate(*args, **kwargs)


@contextmanager
def _answering(server: ServerWords) -> Iterator[None]:
    """Around requests to a vLLM server.

    Raises:
        RunError: The server cannot be reached, ends during an answer, or answers with an error.
    """
    from requests import RequestException

    try:
        yield
    except RequestException as error:
        raise _no_answer(server, _innermost(error)) from error
    except RuntimeError as error:
        # One that was started without what TRL needs, which TRL names with the server (trl 1.16, `VLLMClient`).
        if not str(error).startswith("The vLLM server at "):
            raise
        problem, _, hint = str(error).rstrip(".").rpartition(". ")
        problem = f"{server.key}: {problem[0].lower()}{problem[1:]}"
        raise RunError(problem, hint=f"{hint[0].lower()}{hint[1:]}") from error
    except Exception as error:
        # TRL has no other class for an answer with an error's status (trl 1.16, `VLLMClient._post`).
        if type(error) is not Exception or not str(error).startswith("Request failed: "):
            raise
        raise _no_answer(server, str(error).removeprefix("Request failed: ")) from error


def _no_answer(server: ServerWords, reason: str) -> RunError:
    return RunError(f"{server.key}: no answer from {server.name}: {reason[:300]}", hint=server.hint)


def _innermost(error: BaseException) -> str:
    """Return the message of the error that another one was raised for, without the objects in it."""
    while (cause := error.__cause__ or error.__context__) is not None and str(cause):
        error = cause
    return str(error).rpartition(">: ")[2]


def rewarded_trainer(
    base: type,
    config: Any,
    method: RewardedMethod,
    parts: Parts,
    given: Mapping[str, Any] = MappingProxyType({}),
    **own: Any,
) -> RunTrainer:
    """A trainer of TRL's, with our head, that learns from rewarded groups of the model's own answers.

    Args:
        base: TRL's class.
        config: The class of its arguments.
        method: The groups, their rewards, and what else goes to the config.
        parts: All else. Rows have a column `prompt` of texts or messages, and others for the rewards.
        given: Arguments of the trainer that only this method has.
        own: Arguments of the config that only this method has.
    """
    from tunekit.methods.head import replace_heads
    from tunekit.methods.rewards.load import load_rewards

    generation = generation_arguments(method, parts.data, parts.plan)
    arguments = config(**arguments_in_groups(method, parts), **own, **{**method.trainer_args, **generation})
    functions = load_rewards(method.rewards, device=parts.plan.device.kind)
    trainer = generating_trainer(base, method, parts, reward_funcs=functions, args=arguments, **given)
    # GRPO's loss alone takes a gradient of the entropy (trl 1.16, `GMPOTrainer._compute_loss`).
    learns_entropy = method.type in ("grpo", "ebft") and trainer._entropy_bonus_enabled
    replace_heads(trainer, entropy_gradient=learns_entropy, keeps_trls=parts.head == "tiles")
    return trainer


def whole_sequences(scored: Mapping[str, Any]) -> "tuple[Tensor, Tensor, int]":
    """Return token IDs and attention mask of prompts with their completions, and the latter's tokens.

    Args:
        scored: Tensors by TRL's names, prompts padded on the left and completions on the right.
    """
    import torch

    ids, mask = (torch.cat([scored[f"prompt_{name}"], scored[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    return ids, mask, scored["completion_ids"].size(1)


def group_rewards(rewards: "Tensor", weights: "Tensor", num_generations: int) -> "Tensor":
    """Return the weighted sums of rewards, `(groups, completions)`; NaN where a completion has none.

    Args:
        rewards: Of each reward, `(completions, rewards)`, NaN where it had nothing to say.
        weights: Of each reward, `(rewards,)`.
        num_generations: Completions of a group, which stand one behind the other.
    """
    total = (rewards * weights.to(rewards.device)).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), float("nan")).view(-1, num_generations)


def _keep_unpadded(trainer: RunTrainer) -> None:
    """Have a processor leave prompts unpadded, whose tokens TRL pads itself.

    Some processors pad unless they are told not to (Aya Vision, Gemma 4), and TRL takes all token ids that it is given
    for a prompt (trl 1.16, `_tokenize_prompts`): the model would read padding as text.
    """
    given = trainer.chat_template_kwargs
    options = {**given.get("processor_kwargs", {}), "padding": False}
    trainer.chat_template_kwargs = {**given, "processor_kwargs": options}


def check_pictures(method: OnPolicyMethod, input_names: set[str], why_no_lists: str | None, model: str) -> None:
    """Check that TRL reads prompts with pictures, and scores answers with all that a processor makes of these.

    TRL passes inputs that it knows by name (trl 1.16, `_get_per_token_logps_and_entropies` and, of distillation,
    `_get_last_hidden_state`).

    Args:
        method: GRPO or another method with its trainer.
        input_names: Names of the processor's results for a text with a picture.
        why_no_lists: Why the processor cannot return lists, which TRL takes tokens of prompts from; None where it can.
        model: Path of the model, for messages.

    Raises:
        DataError: It would leave out some, or cannot read prompts.
    """
    from trl import DistillationTrainer, GRPOTrainer, RLOOTrainer

    trainer, score = GRPOTrainer, GRPOTrainer._get_per_token_logps_and_entropies
    if method.type == "rloo":
        trainer, score = RLOOTrainer, RLOOTrainer._get_per_token_logps_and_entropies
    elif method.type == "distillation":
        trainer, score = DistillationTrainer, DistillationTrainer._get_last_hidden_state
    if why_no_lists is not None:
        problem = f"method.type: TRL's {trainer.__name__} needs lists of tokens, which the processor of {model} does "
        problem += f"not return: {why_no_lists}"
        raise DataError(problem, hint="use method sft, dpo or kto, or remove the images from the prompts")
    unknown = sorted(input_names - set(inspect.signature(score).parameters))
    if unknown:
        raise DataError(
            f"method.type: TRL's {trainer.__name__} does not pass {', '.join(unknown)} to the model, which {model} "
            "needs for images",
            hint="use method sft, dpo or kto, or remove the images from the prompts",
        )


def whole_groups(micro_batch_size: int, num_generations: int, *, num_batches: int) -> int:
    """Answers that each process evaluates at once: micro-batches until all processes together have whole groups."""
    size = micro_batch_size
    while size * num_batches % num_generations:
        size += micro_batch_size
    return size


class Stopped(list[int]):
    """Tokens of an answer that a stop text has ended. Its last one is an end token to whoever asks for it by its place.

    TRL asks for nothing else where it tells finished answers from those that were cut off.
    """

    def __init__(self, tokens: Sequence[int], end_token: int) -> None:
        super().__init__(tokens)
        self.end_token = end_token

    def __getitem__(self, place: Any) -> Any:
        return self.end_token if place == -1 else super().__getitem__(place)


def end_at_stop_texts(trainer: RunTrainer, tokenizer: "PreTrainedTokenizerBase", stop: Sequence[str]) -> None:
    """Let a trainer's answers end with their stop texts, and count as finished; without such texts do nothing."""
    if not stop:
        return
    # transformers looks for texts in tokens by their letters, and TRL gives it no tokenizer.
    trainer.model.generate = partial(trainer.model.generate, tokenizer=tokenizer)
    end_token = trainer.eos_token_ids[0]

    def generate_to_the_stop(generate: Callable[..., Any], prompts: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        generated = generate(prompts, *args, **kwargs)
        # GRPO's answers come with the log-probabilities that vLLM drew them with.
        answers, *extra = generated if isinstance(generated, tuple) else (generated,)
        ends = [_end(tokenizer, prompt, answer, stop) for prompt, answer in zip(prompts, answers, strict=True)]
        cut = [
            answer if end is None else Stopped(answer[:end], end_token)
            for answer, end in zip(answers, ends, strict=True)
        ]
        if not extra:
            return cut
        (log_probs,) = extra
        return cut, None if log_probs is None else [
            values[: len(answer)] for values, answer in zip(log_probs, cut, strict=True)
        ]

    trainer.wrap("generate", generate_to_the_stop)


def _end(
    tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], answer: Sequence[int], stop: Sequence[str]
) -> int | None:
    """Tokens of an answer up to the one with which the first stop text is complete; None where there is none.

    A text may begin in the prompt, as transformers sees it.
    """
    before = list(prompt[-max(len(text.encode()) for text in stop) :])
    tail_text = tokenizer.decode(before, clean_up_tokenization_spaces=False)

    def is_complete(num_tokens: int) -> bool:
        text = tokenizer.decode([*before, *answer[:num_tokens]], clean_up_tokenization_spaces=False)
        return any(text.find(token, max(0, len(tail_text) - len(token) + 1)) >= 0 for token in stop)

    if not is_complete(len(answer)):
        return None
    return bisect_left(range(len(answer) + 1), True, key=is_complete)
