"""Small tokenizers for the tests: one token a byte, and a few special tokens.

One character is one token, so a test can write the text that it expects and read the loss mask from it.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
)
FORGETFUL = (  # writes earlier answers shorter than the last one, as templates for reasoning models do
    "{% for m in messages %}{{ m.role[0] }}:"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('#')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
END_LEFT_OUT = CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)


def byte_tokenizer(
    template: str | None = None,
    *,
    adds_bos: bool = False,
    adds_eos: bool = False,
    eos: str | None = "<|im_end|>",
    pad: str | None = None,
    merges: tuple[tuple[str, str], ...] = (),
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer; `merges` are pairs of characters that make one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    backend.add_special_tokens(special)
    if adds_bos or adds_eos:
        single = ("<|bos|> " if adds_bos else "") + "$A" + (" <|im_end|>" if adds_eos else "")
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(token, backend.token_to_id(token)) for token in special]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token=eos, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer
