"""A tiny Llama with a byte-level tokenizer and rows to train it on, made on the spot: real files for real runs."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer():
    """One token per byte, and ChatML's three."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny_model(folder: Path, *, hidden=48, intermediate=0, layers=2, positions=256, seed=0) -> Path:
    """Save a Llama of random weights with its tokenizer, and return its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden + 16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_tiny_model_like(folder: Path, model_type: str) -> Path:
    """Save a model of random weights of an architecture, by its `model_type`, and return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if model_type == "gemma3":
        return save_tiny_model_with_vision(folder)
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_tiny_model_with_vision(folder: Path) -> Path:
    """Save a Gemma 3 of random weights, vision tower and all, with the same tokenizer, and return its folder."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3Config

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_use_head": False,
    }
    images = {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
    config = Gemma3Config(text_config=text, vision_config=vision, **images)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def plain_accelerator():
    """Return an accelerator of one process in float32, whatever precision an earlier run of this process had."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    return Accelerator(cpu=True, mixed_precision="no")


def save_jsonl(path: Path, rows: Iterable[object]) -> None:
    """Save rows, a line each."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_chats(path: Path, exchanges: Iterable[tuple[str, str]]) -> None:
    """Write one conversation a line, each a question and its answer."""
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in exchanges
    ]
    save_jsonl(path, rows)


@contextlib.contextmanager
def watching_models(watch: Callable) -> Iterator[None]:
    """Call `watch(model, kwargs)` before every call of a Llama or of a PEFT model around it; nothing is replaced."""
    from torch.nn import Module

    original = Module.__call__

    def watched(module, *args, **kwargs):
        if type(module).__name__ in ("LlamaForCausalLM", "PeftModelForCausalLM"):
            watch(module, kwargs)
        return original(module, *args, **kwargs)

    Module.__call__ = watched
    try:
        yield
    finally:
        Module.__call__ = original


def save_in_mxfp4(model, folder: Path) -> None:
    """Save a gpt-oss as it is published: experts as blocks and scales, here random ones."""
    import torch
    from safetensors.torch import save_file

    state, generator = model.state_dict(), torch.Generator().manual_seed(3)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = state.pop(name).shape
        groups = (experts, rows, columns // 32)
        state[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(121, 126, groups, generator=generator, dtype=torch.uint8)
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quantization_config": {"quant_method": "mxfp4"}, "architectures": ["GptOssForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | settings), encoding="utf-8")


def saved_weights(folder: Path):
    """The tensors of a model or adapter in a folder, which is one file."""
    from safetensors.torch import load_file

    (file,) = folder.glob("*.safetensors")
    return load_file(file)
