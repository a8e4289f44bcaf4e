"""The reward model: a classifier that reads the prompt with the answer.

One for sequences, with one output, scores the whole. One for tokens, with two classes, scores each step of the answer.
"""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tunekit.data.tokenization.alignment import prompt_tokens
from tunekit.data.tokenization.steps import SEPARATOR_KEY, StepTokens
from tunekit.errors import ModelError, loading_errors
from tunekit.methods.rewards.answers import Answers, Judge, text_of
from tunekit.models.load import load_tokenizer, read_config
from tunekit.probe.chat_template import template_in_time
from tunekit.probe.model import model_folder
from tunekit.probe.model_files import read_settings
from tunekit.probe.origin import ADAPTER_CONFIG, origin_of
from tunekit.recipe.methods.spec import NUM_LABELS, Judged
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.rewards import ModelReward

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BATCH = 8
"""Answers that are judged at once."""

_AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "prod": prod,
    "mean": fmean,
    "last": lambda values: values[-1],
}


def reward_model(section: ModelReward) -> Judge:
    """The score of each prompt with its answer by a model, in the model's own chat template.

    Raises:
        ModelError: Its tokenizer cannot be loaded, or fields of the section do not go with it.
    """
    try:
        tokenizer = load_tokenizer(section.model)
    except ModelError as error:
        raise ModelError(f"method.rewards: reward_model: {error.problem}", hint=error.hint) from error
    judged = _judged(section.model)
    loaded: dict[str, PreTrainedModel] = {}

    def load(device: str) -> None:
        loaded[device] = _load(section.model, device, judged, pad_token_id=tokenizer.pad_token_id)

    def logits_of(rows: list[list[int]]) -> "list[Any]":
        """Logits of each row: of the whole `(1,)`, or of its tokens and padding `(seq, 2)`, float32."""
        import torch

        (model,) = loaded.values()
        logits: list[Any] = []
        for start in range(0, len(rows), _BATCH):
            batch = tokenizer.pad(
                {"input_ids": rows[start : start + _BATCH]}, padding_side="right", return_tensors="pt"
            ).to(model.device)
            with torch.no_grad():
                logits += model(**batch).logits.float()
        return logits

    if judged == "steps":
        return Judge(_score_by_steps(section, tokenizer, logits_of), load=load)
    for name, is_set in (("aggregation", section.aggregation != "min"), (SEPARATOR_KEY, section.step_separator)):
        if is_set:
            what = f"{name} has no effect: {section.model.path!r} scores whole answers, not their steps"
            raise ModelError(f"method.rewards: reward_model: {what}", hint="unset it")

    def tokens(prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            end = tokenizer.eos_token or ""  # TRL's RewardTrainer ends texts so
            return list(tokenizer((prompt + completion).removesuffix(end) + end)["input_ids"])
        with template_in_time("an answer"):
            encoded = tokenizer.apply_chat_template([*prompt, *completion], tokenize=True, return_dict=True)
        return list(encoded["input_ids"])

    def score(answers: Answers) -> list[float]:
        rows = [tokens(*pair) for pair in zip(answers.prompts, answers.completions, strict=True)]
        return [float(logits[0]) for logits in logits_of(rows)]

    return Judge(score, load=load)


def _score_by_steps(
    section: ModelReward, tokenizer: "PreTrainedTokenizerBase", logits_of: Callable[[list[list[int]]], list[Any]]
) -> Callable[[Answers], list[float]]:
    """Return a judgement of answers by the probabilities that their steps are good.

    Raises:
        ModelError: Nothing says what divides steps.
    """
    separator = section.step_separator or tokenizer.init_kwargs.get(SEPARATOR_KEY)
    if not isinstance(separator, str) or not separator:
        what = f"{section.model.path!r} scores steps, and does not say what divides them"
        raise ModelError(f"method.rewards: reward_model: {what}", hint=r'set step_separator, such as "\n"')
    steps, aggregate = StepTokens(tokenizer, separator), _AGGREGATIONS[section.aggregation]

    def tokens(prompt: Any, completion: Any) -> tuple[list[int], list[int]]:
        # What was written in earlier turns is the prompt of the last.
        whole_prompt = prompt if isinstance(prompt, str) else [*prompt, *completion[:-1]]
        text = text_of(completion).removesuffix(tokenizer.eos_token or "")
        return steps.encode(prompt_tokens({"prompt": whole_prompt}, tokenizer, "an answer"), steps.split(text))

    def score(answers: Answers) -> list[float]:
        rows = [tokens(*pair) for pair in zip(answers.prompts, answers.completions, strict=True)]
        scores = []
        for (_, places), logits in zip(rows, logits_of([ids for ids, _ in rows]), strict=True):
            good = logits[places].softmax(-1)[:, 1].tolist()
            scores.append(aggregate(good) if good else 0.0)
        return scores

    return score


def _judged(section: ModelSection) -> Judged:
    """Return what a model scores, by its configuration; whole texts where that does not say."""
    folder = Path(model_folder(section))
    if (folder / ADAPTER_CONFIG).is_file():
        task = read_settings(folder, ADAPTER_CONFIG, section.path).get("task_type")
        return "steps" if task == "TOKEN_CLS" else "text"
    try:
        architectures = read_config(section).architectures or []
    except (OSError, ValueError):
        return "text"  # What is wrong with it is told when it is loaded.
    return "steps" if any(name.endswith("ForTokenClassification") for name in architectures) else "text"


def _load(section: ModelSection, device: str, judged: Judged, *, pad_token_id: int | None) -> "PreTrainedModel":
    """The model on a device, in evaluation mode."""
    import peft
    import transformers

    of_steps = judged == "steps"
    kind = "TokenClassification" if of_steps else "SequenceClassification"
    folder = model_folder(section)
    how: dict[str, Any] = {
        "num_labels": NUM_LABELS[judged],
        "dtype": section.dtype,
        "use_safetensors": True,
        "trust_remote_code": section.trust_remote_code,
    }
    if section.attn_implementation != "auto":
        how["attn_implementation"] = section.attn_implementation
    try:
        if origin_of(section) is not None and (Path(folder) / ADAPTER_CONFIG).is_file():
            auto = vars(peft)[f"AutoPeftModelFor{kind}"]
            model = auto.from_pretrained(folder, revision=section.revision, **how)
        else:
            auto = getattr(transformers, f"AutoModelFor{kind}")
            model, loading_info = auto.from_pretrained(
                folder, revision=section.revision, output_loading_info=True, **how
            )
            _refuse_untrained(section, loading_info["missing_keys"])
    except loading_errors() as error:
        what = f"method.rewards: reward_model: {section.path!r} cannot be loaded: {str(error).strip().splitlines()[0]}"
        raise ModelError(what, hint="use a sequence classifier with one output, stored as safetensors") from error
    model.config.pad_token_id = pad_token_id
    model.requires_grad_(requires_grad=False)
    on_device: PreTrainedModel = model.eval().to(device)
    return on_device


def _refuse_untrained(section: ModelSection, missing: Any) -> None:
    """Refuse a language model, whose output as a judge would be random.

    Raises:
        ModelError: It lacks weights.
    """
    if missing:
        what = f"method.rewards: reward_model: {section.path!r} is not a reward model: it has no {sorted(missing)[0]}"
        raise ModelError(what, hint="train one with method reward, or use a sequence classifier with one output")
