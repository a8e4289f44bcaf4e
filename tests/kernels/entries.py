"""What the compile gate compiles: each kernel through the function that users of it call, at shapes of real training.

An entry is a name and a call. Tensors are on `meta`, and `offline.compiled_for` has the operations compile what they
would launch on them; `trained` goes through the backward pass as well. Add a line where a kernel is added, or where
another constant, type or shape makes another kernel of it. The shapes are those of Llama 3.1 8B where nothing is said.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tunekit.kernels.adamw import adamw_step
from tunekit.kernels.cross_entropy import Shape
from tunekit.kernels.glu import glu, glu_lora, glu_packed
from tunekit.kernels.linear_ce import linear_ce, linear_logprob
from tunekit.kernels.lora import Linear, Low, lora_linears
from tunekit.kernels.nf4 import Quantized, dequantize
from tunekit.kernels.rms_norm import rms_norm
from tunekit.kernels.rope import qk_norm_rope

TOKENS, HIDDEN, INNER, VOCABULARY = 8192, 4096, 14336, 128256
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def new(*shape: int, dtype: torch.dtype = torch.bfloat16, learns: bool = False) -> Tensor:
    """A tensor of which there is only the shape."""
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=learns)


def trained(outputs: Tensor | Iterable[Tensor]) -> None:
    """The backward pass of outputs, each with a gradient of its own."""
    outputs = [outputs] if isinstance(outputs, Tensor) else [output for output in outputs if output.requires_grad]
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def rows() -> Tensor:
    return new(TOKENS, HIDDEN, learns=True)


def heads(num_heads: int = HEADS, dim: int = HEAD_DIM) -> Tensor:
    return new(1, TOKENS, num_heads, dim, learns=True)


def turns(dim: int) -> tuple[Tensor, Tensor]:
    return new(1, TOKENS, dim), new(1, TOKENS, dim)


def head(learns: bool, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the weight of a head, and labels."""
    return rows(), new(vocabulary, HIDDEN, learns=learns), new(TOKENS, dtype=torch.int64)


def scored(learns: bool = False, vocabulary: int = VOCABULARY, **kwargs: object) -> Tensor:
    """The loss of tokens that all have one. Their places are given, as they cannot be looked for without values."""
    return linear_ce(*head(learns, vocabulary), index=new(TOKENS, dtype=torch.int64), **kwargs).loss


def log_probs(learns: bool = False, **kwargs: object) -> Tensor:
    return linear_logprob(*head(learns), index=new(TOKENS, dtype=torch.int64), **kwargs).log_probs


def low(num_inputs: int, num_outputs: int, rank: int = 16, dropout: float = 0.0) -> Low:
    return Low(new(rank, num_inputs, learns=True), new(num_outputs, rank, learns=True), 2.0, dropout)


def adapted(num_inputs: int, *num_outputs: int, **kwargs: object) -> tuple[Tensor, ...]:
    """The outputs of linear layers with updates of rank 16."""
    layers = [Linear(new(size, num_inputs), low=low(num_inputs, size, **kwargs)) for size in num_outputs]
    return lora_linears(new(1, TOKENS, num_inputs, learns=True), layers)


def nf4(nested: bool) -> Quantized:
    num_blocks = INNER * HIDDEN // 64
    return Quantized(
        packed=new(INNER * HIDDEN // 2, 1, dtype=torch.uint8),
        absmax=new(num_blocks, dtype=torch.uint8 if nested else torch.float32),
        code=new(16, dtype=torch.float32),
        block_size=64,
        shape=(INNER, HIDDEN),
        dtype=torch.bfloat16,
        nested_absmax=new(num_blocks // 256, dtype=torch.float32) if nested else None,
        nested_code=new(256, dtype=torch.float32) if nested else None,
        nested_offset=new(1, dtype=torch.float32) if nested else None,
    )


def norm(num_columns: int = HIDDEN, learns: bool = True, **kwargs: object) -> Tensor | tuple[Tensor, Tensor]:
    x, weight = new(TOKENS, num_columns, learns=True), new(num_columns, learns=learns)
    return rms_norm(x, weight, eps=1e-5, **kwargs)


def turned(dim: int = HEAD_DIM, rotary_dim: int | None = None, **kwargs: object) -> tuple[Tensor, Tensor]:
    return qk_norm_rope(heads(dim=dim), heads(KV_HEADS, dim), *turns(rotary_dim or dim), **kwargs)


def inner() -> Tensor:
    return new(TOKENS, INNER, learns=True)


def hidden_low(rank: int) -> tuple[Tensor, Tensor, float]:
    """What a LoRA of gate or up adds: h and B."""
    return new(TOKENS, rank, learns=True), new(INNER, rank, learns=True), 2.0


def stepped(states: torch.dtype, blocks: int | None = None, scaled: bool = False, in_byte: int = 1) -> None:
    """A step of an optimizer over a matrix of an MLP."""
    size = INNER * HIDDEN
    scales = (None, None) if blocks is None else (new(size // blocks, dtype=torch.float32),) * 2
    adamw_step(
        *(new(size), new(size), *(new(size // in_byte, dtype=states) for _ in range(2)), *scales),
        key=2**62 + 3,
        gradient_scale=new(1, dtype=torch.float32) if scaled else None,
        **{"decay": 0.999, "step_size": 2e-5, "rate1": 0.1, "beta2": 0.999, "rate2": 0.001, "root": 0.5, "eps": 1e-8},
    )


ENTRIES: dict[str, dict[str, Callable[[], object]]] = {
    "cross_entropy": {
        "full": lambda: trained(scored(learns=True)),
        "frozen head, 151936": lambda: trained(scored(vocabulary=151936)),
        "softcap, smoothing, z-loss": lambda: trained(scored(shape=Shape(1.0, 30.0, 1.0, 0.1, 1e-4))),
        "log-probabilities, frozen head": lambda: trained(log_probs()),
        "log-probabilities, entropy": lambda: trained(log_probs(statistics=("entropy", "is_top1"))),
    },
    "adamw": {
        "bfloat16 states": lambda: stepped(torch.bfloat16),
        "float32 states, scaled": lambda: stepped(torch.float32, scaled=True),
        "8-bit states": lambda: stepped(torch.uint8, blocks=256),
        "4-bit states": lambda: stepped(torch.uint8, blocks=256, in_byte=2),
    },
    "dropout": {
        "lora": lambda: trained(adapted(HIDDEN, HIDDEN, dropout=0.05)),
    },
    "glu": {
        "silu": lambda: trained(glu(inner(), inner(), activation="silu")),
        "gelu_tanh": lambda: trained(glu(inner(), inner(), activation="gelu_tanh")),
        "silu, packed": lambda: trained(glu_packed(new(TOKENS, 2 * INNER, learns=True), activation="silu")),
        "silu, rank 16": lambda: trained(glu_lora(inner(), inner(), hidden_low(16), hidden_low(16), activation="silu")),
        "silu, rank 64": lambda: trained(glu_lora(inner(), inner(), hidden_low(64), hidden_low(64), activation="silu")),
    },
    "nf4": {
        "double": lambda: dequantize(nf4(nested=True)),
        "single": lambda: dequantize(nf4(nested=False)),
    },
    "rms_norm": {
        "llama": lambda: trained(norm()),
        "frozen, with residual": lambda: trained(norm(learns=False, residual=rows())),
        "gemma": lambda: trained(norm(3584, offset=1.0, casting="gemma")),
    },
    "skinny": {
        f"rank {rank}": lambda rank=rank: trained(adapted(HIDDEN, INNER, rank=rank)) for rank in (8, 16, 32, 64)
    },
    "rope": {
        "llama": lambda: trained(turned()),
        "half of the head": lambda: trained(turned(rotary_dim=64)),
        "qwen3": lambda: trained(
            turned(q_weight=new(HEAD_DIM, learns=True), k_weight=new(HEAD_DIM, learns=True), eps=1e-6)
        ),
        "gemma3": lambda: trained(
            turned(256, q_weight=new(256), k_weight=new(256), eps=1e-6, offset=1.0, casting="gemma")
        ),
    },
}
"""By file in `tunekit/kernels`, and there by name."""
