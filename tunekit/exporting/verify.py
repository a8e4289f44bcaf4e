"""Verification that an export answers as the model that it was made from: a fresh process loads both and compares them.

`python -m tunekit.exporting.verify` reads a `Subject` from its input and writes a `Check`, or what is wrong. What is
compared are logits at every position of the run's prompts and of the answers to them, greedy tokens, and how the
tokenizer renders conversations. Both compute in float32 where that fits, so that what remains is the rounding of the
exported weights to their type; the tolerances are for that.

A tolerance by itself would not notice an adapter that was never merged if it changes little. So the error is also held
against how much the adapter changes: merged weights that lose most of that are refused.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunekit.data.packing.sequences import common_prefix_length
from tunekit.errors import ModelError, TunekitError
from tunekit.estimates.memory.states import Dtype
from tunekit.inference.inference_model import Trained, find_trained, load_trained, tokenizer_of
from tunekit.probe.chat_template import template_in_time
from tunekit.process.log_capture import library_words_to, send_nothing_at_all
from tunekit.recipe.sections.adapters import PromptTuningAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.run import Run

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Kind = Literal["adapter", "merged", "quantized"]
"""An adapter, whole weights, or whole weights in few bits."""

TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest error of the logits of a position, as a share of their spread over the vocabulary (root mean squares)."""

LOST_SHARE = 0.5
"""Largest error as a share of what the adapter changes."""

ANSWER_TOKENS = 32
"""Tokens of each greedy answer."""

ADAPTER = "adapter"
"""Folder of an adapter beside the quantized weights that it belongs on."""

MAX_PROMPTS = 4

OTHER_PROMPTS = ("Hello! Who are you?", "Write a short list of three things.")
"""Prompts for runs that have none of their own."""

CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " <b>two</b>\n\nlines "}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi, you."},
        {"role": "user", "content": "日本語 🙂?"},
    ],
)
"""Conversations that both tokenizers render."""


@dataclass(frozen=True)
class Subject:
    """Subject of a verification.

    Attributes:
        run: Folder of the run.
        checkpoint: Name of the checkpoint, in the run; None for the result.
        kind: Whether it is an adapter or whole weights.
        dtype: Type of its weights.
        folder: Where the export is.
    """

    run: str
    checkpoint: str | None
    kind: Kind
    dtype: Dtype
    folder: str

    @classmethod
    def of(cls, found: Trained, kind: Kind, dtype: Dtype, folder: Path) -> "Subject":
        """The export of a model to a folder."""
        assert found.run is not None
        checkpoint = None if found.step is None else Path(found.folder).name
        return cls(str(found.run.path.resolve()), checkpoint, kind, dtype, str(folder))


@dataclass(frozen=True)
class Check:
    """Result of the comparison.

    Attributes:
        num_prompts: Prompts that both answered.
        num_tokens: Greedy tokens of the answers, as the run's model gives them.
        num_same_tokens: Of these, those that the export gives too, up to its first other one in each answer.
        logit_error: Largest error of the logits of a position, as a share of their spread.
        tolerance: The error that is allowed for the type of the weights.
        adapter_change: How much the adapter changes the logits, by the same measure; None where there is none.
        num_conversations: Conversations that both tokenizers render alike, text and tokens.
        computed_in: Type of the products in the comparison.
        device: Where it was computed.
    """

    num_prompts: int
    num_tokens: int
    num_same_tokens: int
    logit_error: float
    tolerance: float
    adapter_change: float | None
    num_conversations: int
    computed_in: str
    device: str


@dataclass(frozen=True)
class _Answer:
    """Token ids of a prompt with its greedy answer, and the logits at every position of both on the CPU."""

    ids: list[int]
    num_prompt: int
    logits: "Tensor"


def check(subject: Subject) -> Check:
    """Compare an export with what it was made from.

    Raises:
        ModelError: They differ, or the export cannot be loaded.
    """
    trained = find_trained(Run(subject.run), subject.checkpoint)
    theirs, ours = tokenizer_of(trained), tokenizer_of(trained, subject.folder)
    num_conversations = _compare_templates(theirs, ours)
    device, dtype = _where(trained, subject.dtype)
    prompts = [_ids(theirs, prompt, chat=trained.is_chat) for prompt in _prompts(trained)]
    is_quantized = subject.kind == "quantized"
    model: Any = load_trained(trained, dtype=dtype, device=device, as_trained=is_quantized)
    scores = trained.judges
    answers = [_answer(model, ids, judges=scores) for ids in prompts]
    changes = None
    if trained.adapter is not None:
        with model.disable_adapter():
            changes = [_error(_logits(model, answer.ids), answer.logits, scores) for answer in answers]
    del model
    exported: Any = load_exported(subject, trained, dtype=dtype, device=device)
    tolerance = TOLERANCES[subject.dtype if dtype == "float32" else dtype]
    error = max(_error(_logits(exported, answer.ids), answer.logits, scores) for answer in answers)
    change = None if changes is None else max(changes)
    if not error <= tolerance:  # Not a number is none that is small.
        raise _differs(f"logits differ by {error:.2%} of their spread; tolerance {tolerance:.2%}", subject)
    if change and error > LOST_SHARE * change:
        raise ModelError(
            f"merged weights in {subject.dtype} lose the adapter's changes: logits differ by {error:.2%} of their "
            f"spread; the adapter changes them by {change:.2%}",
            hint="export with --dtype float32, or the adapter only with --adapter",
        )
    num_same = 0 if scores else sum(_num_same(exported, answer, tolerance) for answer in answers)
    num_tokens = sum(len(answer.ids) - answer.num_prompt for answer in answers)
    return Check(
        num_prompts=len(answers),
        num_tokens=num_tokens,
        num_same_tokens=num_same,
        logit_error=error,
        tolerance=tolerance,
        adapter_change=change,
        num_conversations=num_conversations,
        computed_in=dtype,
        device=device,
    )


def load_exported(subject: Subject, found: Trained, *, dtype: Dtype, device: str) -> Any:
    """An export as others load it: whole weights by transformers, an adapter by PEFT on its base."""
    from tunekit.models.load import load_model
    from tunekit.models.virtual_tokens import hide_virtual_tokens

    is_adapter = subject.kind == "adapter"
    trust = found.base.trust_remote_code
    section = found.base if is_adapter else ModelSection(path=subject.folder, trust_remote_code=trust)
    model: Any = load_model(section, dtype=dtype, device=device, score_head=found.score_head)
    if is_adapter or has_adapter_beside(subject.kind, found):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, Path(subject.folder) / ("." if is_adapter else ADAPTER))
        if isinstance(found.adapter, PromptTuningAdapter):
            hide_virtual_tokens(model)
    return model.eval()


def has_adapter_beside(kind: Kind, found: Trained) -> bool:
    """Return whether an export has quantized weights and beside them the adapter that was trained on them."""
    return kind == "quantized" and found.adapter is not None


def _where(found: Trained, dtype: Dtype) -> tuple[str, Dtype]:
    """Return the device and dtype to compute in: float32 where that fits, on an accelerator if it has room."""
    import psutil
    import torch

    assert found.run is not None
    num_params = found.run.plan.num_params
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
        if free > 5 * num_params:
            return "cuda", "float32"
        if free > 2.6 * num_params and dtype != "float32":
            return "cuda", dtype
    free = psutil.virtual_memory().available
    return "cpu", "float32" if free > 5 * num_params or dtype == "float32" else dtype


def _prompts(found: Trained) -> list[str]:
    assert found.run is not None
    own = found.run.recipe.output.sample_prompts or list(
        dict.fromkeys(sample["prompt"] for sample in found.run.samples())
    )
    return list(own or OTHER_PROMPTS)[:MAX_PROMPTS]


def _ids(tokenizer: "PreTrainedTokenizerBase", prompt: str, *, chat: bool) -> list[int]:
    """Token ids of a prompt, as a turn of a conversation where the model has them."""
    chat = chat and tokenizer.chat_template is not None
    if chat:
        turn = [{"role": "user", "content": prompt}]
        with template_in_time("a prompt"):
            prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(prompt, add_special_tokens=not chat)["input_ids"]
    return ids


def _answer(model: Any, ids: list[int], *, judges: bool) -> _Answer:
    whole = ids if judges else _greedy(model, ids, ANSWER_TOKENS)
    return _Answer(whole, len(ids), _logits(model, whole))


def _greedy(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    """The prompt with what follows it greedily."""
    import torch

    inputs = torch.tensor([ids], device=model.device)
    limit = model.config.get_text_config().to_dict().get("max_position_embeddings") or len(ids) + num_tokens
    room = max(1, min(num_tokens, limit - len(ids)))
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=room, do_sample=False
        )
    whole: list[int] = output[0].tolist()
    return whole


def _logits(model: Any, ids: list[int]) -> "Tensor":
    """Logits at every position, (seq, vocab) or (seq, labels), or the scores, (1, labels), in float32 on the CPU."""
    import torch

    inputs = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        logits: Tensor = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits
    # PEFT alone gives virtual tokens logits too.
    return logits.reshape(-1, logits.shape[-1])[-len(ids) :].float().cpu()


def _error(logits: "Tensor", reference: "Tensor", scores: bool) -> float:
    """Largest difference of a position's logits as a share of their spread, by root mean squares.

    Args:
        logits: Of each position.
        reference: What they should be.
        scores: True for scores, whose differences are shares of the largest or of 1.
    """
    if scores:
        return float((logits - reference).abs().max() / reference.abs().max().clamp_min(1.0))
    spread = (reference - reference.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    error = (logits - reference).square().mean(-1).sqrt() / spread.clamp_min(1e-12)
    return float(error.max())


def _num_same(model: Any, answer: _Answer, tolerance: float) -> int:
    """Tokens of an answer that the export gives too.

    Where it gives another one first, the run's model must have been undecided between the two.

    Raises:
        ModelError: It was not.
    """
    num_tokens = len(answer.ids) - answer.num_prompt
    generated = _greedy(model, answer.ids[: answer.num_prompt], num_tokens)[answer.num_prompt :]
    expected = answer.ids[answer.num_prompt :]
    same = common_prefix_length(expected, generated)
    if same < min(len(expected), len(generated)):
        logits = answer.logits[answer.num_prompt + same - 1]
        gap = float((logits[expected[same]] - logits[generated[same]]) / logits.std())
        # Each of the two may be off by several times the root mean square.
        if gap > 8 * tolerance:
            raise ModelError(
                f"the export generates another token at position {same + 1}: their logits differ by {gap:.2f} of "
                f"the spread; tolerance {8 * tolerance:.2f}",
                hint="the export was deleted",
            )
    return same


def _compare_templates(theirs: "PreTrainedTokenizerBase", ours: "PreTrainedTokenizerBase") -> int:
    """See that both tokenizers render conversations alike, and return how many.

    Raises:
        ModelError: They do not.
    """
    if (theirs.chat_template is None) != (ours.chat_template is None):
        raise ModelError("the export lacks the chat template of training", hint="the export was deleted")
    for number, conversation in enumerate(CONVERSATIONS, 1):
        for pair in zip(_rendered(theirs, conversation), _rendered(ours, conversation), strict=True):
            if pair[0] != pair[1]:
                raise ModelError(
                    f"the chat template of the export renders conversation {number} as {pair[1]!r}, but training "
                    f"has {pair[0]!r}",
                    hint="the export was deleted",
                )
    return len(CONVERSATIONS)


def _rendered(tokenizer: "PreTrainedTokenizerBase", conversation: list[dict[str, str]]) -> Iterator[Any]:
    """A conversation as text and as token ids, or why its template refuses it."""
    from jinja2 import TemplateError

    texts = [turn["content"] for turn in conversation]
    if tokenizer.chat_template is not None:
        try:
            with template_in_time("a conversation"):
                texts = [
                    tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generates)
                    for generates in (True, False)
                ]
        except TemplateError as error:
            yield str(error)
    yield texts
    yield [tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"] for text in texts]


def _differs(what: str, subject: Subject) -> ModelError:
    what_differs = "the merged weights differ" if subject.kind == "merged" else "the export differs"
    hint = "the export was deleted"
    if subject.kind == "merged" and subject.dtype != "float32":
        hint = f"{hint}: export with --dtype float32 if {subject.dtype} rounds too coarsely"
    return ModelError(f"{what_differs} from the trained model: {what}", hint=hint)


def main() -> None:
    """Verify the export described on standard input, and print the result."""
    send_nothing_at_all()
    subject = Subject(**json.load(sys.stdin))
    report: dict[str, Any]
    with library_words_to(StringIO()):
        try:
            report = asdict(check(subject))
        except TunekitError as error:
            report = {"problem": error.problem, "hint": error.hint}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
