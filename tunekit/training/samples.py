"""Answers to sample prompts before and after training, greedily, and to prompts with media."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tunekit.data.media.expand import features_of
from tunekit.data.media.in_rows import as_parts
from tunekit.models.load import load_processor
from tunekit.probe.chat_template import template_in_time
from tunekit.recipe.schema import Recipe
from tunekit.runs.run import Run
from tunekit.runs.sample_prompts import SamplePrompt, read
from tunekit.training.callbacks import Watch

SAMPLE_TOKENS = 64
"""Longest answer to a sample prompt, in tokens."""


def sample_prompts(run: Run, recipe: Recipe) -> list[SamplePrompt]:
    """Return the prompts that a run answers: those of its recipe, or those that were taken from rows with media."""
    texts = recipe.output.sample_prompts
    return read(run.path) if texts is None else [SamplePrompt(text) for text in texts]


class Sampler:
    """Answers prompts.

    Args:
        watch: Watch of the trainer, with the record.
        tokenizer: Tokenizer of the model.
        is_chat: Whether a prompt is a user's turn of a conversation, rather than a text to complete.
    """

    def __init__(self, watch: Watch, tokenizer: PreTrainedTokenizerBase, *, is_chat: bool) -> None:
        self._watch = watch
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._processor: Any = None

    def __call__(self, when: str, prompts: Sequence[SamplePrompt]) -> None:
        """Answer prompts greedily, and record the answers."""
        model = self._watch.trainer.model
        was_training = model.training
        model.eval()
        for prompt in prompts:
            inputs = self._inputs(prompt)
            with torch.no_grad():
                output = model.generate(
                    **inputs,
                    max_new_tokens=SAMPLE_TOKENS,
                    do_sample=False,
                    use_cache=True,
                    pad_token_id=self._tokenizer.pad_token_id,
                )
            answer = self._tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            pictures = {"pictures": prompt.shown} if prompt.pictures else {}
            self._watch.record.write("sample", when=when, prompt=prompt.words, answer=answer.strip(), **pictures)
        model.train(was_training)

    def _inputs(self, prompt: SamplePrompt) -> dict[str, Any]:
        """Return the inputs of the model for a prompt."""
        model, text = self._watch.trainer.model, prompt.content
        if self._is_chat:
            turn = [{"role": "user", "content": text}]
            with template_in_time("output.sample_prompts"):
                text = self._tokenizer.apply_chat_template(
                    as_parts(turn) if prompt.media else turn, add_generation_prompt=True, tokenize=False
                )
        if not prompt.media:
            features = self._tokenizer(text, return_tensors="pt", add_special_tokens=not self._is_chat).to(model.device)
            return {name: features[name] for name in ("input_ids", "attention_mask")}
        if self._processor is None:
            self._processor = load_processor(self._watch.plan.recipe.model, self._tokenizer)
        features = features_of(self._processor, [text], [prompt.media])
        return dict(features.to(device=model.device, dtype=model.dtype))
