"""What `benchmarks.kernels` compares: each operation in tunekit's form and in those of others, on the same inputs.

A case makes its inputs anew for each form, from the same seed: some overwrite what they are given. Shapes are those
of Llama 3.1 8B with 8192 tokens, and for a test small ones. Bytes and operations are those that the mathematics asks
for, each tensor read or written once; what a form does beyond these makes its share of the ceiling smaller.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["REAL", "TINY", "Case", "Sizes", "cases"]

Form = Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens, columns and heads."""

    tokens: int
    hidden: int
    inner: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    """That an optimizer updates in one step."""


REAL = Sizes(8192, 4096, 14336, 128256, 32, 8, 128, 2**28)
TINY = Sizes(24, 64, 128, 320, 4, 2, 32, 4096)


@dataclass(frozen=True)
class Case:
    """An operation, and who computes it."""

    name: str
    make: Callable[[Sizes, str], Sequence[Any]]
    """Inputs of sizes, on a device; those that require a gradient get one."""
    forms: dict[str, Callable[[], Form]]
    """By whose they are: what imports a form and returns it. It takes the inputs and returns a tensor, or several."""
    work: Callable[[Sizes], tuple[int, int]]
    """Bytes or operations of the forward pass, and of it with the backward pass."""
    unit: str = "B"
    """`B` or `FLOP`."""
    exact: Form | None = None
    """The formula, for inputs in float64; without it there is no error to tell."""
    backward: bool = field(default=True)


def randn(
    *shape: int, device: str, learns: bool = True, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Random numbers that do not depend on the device."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.empty(shape, dtype=torch.float32)
    if values.numel() < 2**22:
        values.normal_(generator=generator)
    else:
        # Where there are many, the same row again and again, turned, is as good and is made in no time.
        row = torch.randn(2**20 + 7, generator=generator)
        values = row.repeat(-(-values.numel() // row.numel()))[: values.numel()].view(shape)
    return (values * scale).to(device, torch.bfloat16).requires_grad_(learns)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's norm, as transformers writes it."""
    wide = x.float() if x.dtype != torch.float64 else x
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def added_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of a residual stream that x is added to, and the stream."""
    total = x + residual
    return rms(total, weight), total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Llama's gate."""
    return F.silu(gate) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `(batch, seq, heads, head_dim)`, turned as transformers turns them."""
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(2) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(2)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions of queries and keys."""
    return rotated(q, cos, sin), rotated(k, cos, sin)


def normed_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Qwen 3's: each head is normalised first."""
    return rope(rms(q, q_weight), rms(k, k_weight), cos, sin)


def loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss with all logits at once, in float32."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels, reduction="sum")


def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Each token's log-probability with all logits at once."""
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits, -1).gather(1, labels[:, None]).squeeze(1)


def lora(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Linear layers with updates, as PEFT computes them: weights are (base, A, B) of each."""
    groups = zip(weights[::3], weights[1::3], weights[2::3], strict=True)
    return tuple(F.linear(x, base) + F.linear(F.linear(x, a), b) * 2.0 for base, a, b in groups)


def compiled(function: Form) -> Callable[[], Form]:
    """torch.compile of a formula; on a CPU only its graph is taken, as code for it is compiled slowly."""
    return lambda: torch.compile(
        function, fullgraph=True, dynamic=False, backend="inductor" if torch.cuda.is_available() else "aot_eager"
    )


def plain(function: Form) -> Callable[[], Form]:
    """The formula as torch computes it."""
    return lambda: function


def found(module: str, name: str) -> Callable[[], Any]:
    """A name of a module that may not be installed."""
    return lambda: vars(importlib.import_module(module))[name]


def liger(module: str, name: str, *constants: Any) -> Callable[[], Form]:
    """An autograd function of liger-kernel, given constants behind the inputs."""

    def form() -> Form:
        function = vars(importlib.import_module(f"liger_kernel.ops.{module}"))[name]
        return lambda *inputs: function.apply(*inputs, *constants)

    return form


def _norms() -> list[Case]:
    def ours() -> Form:
        from tunekit.kernels.rms_norm import rms_norm

        return lambda x, weight: rms_norm(x, weight, eps=1e-5)

    def ours_added() -> Form:
        from tunekit.kernels.rms_norm import rms_norm

        return lambda x, residual, weight: rms_norm(x, weight, eps=1e-5, residual=residual)

    return [
        Case(
            "rms_norm",
            lambda sizes, device: (
                randn(sizes.tokens, sizes.hidden, device=device),
                randn(sizes.hidden, device=device),
            ),
            {
                "tunekit": ours,
                "torch": plain(rms),
                "torch.compile": compiled(rms),
                "F.rms_norm": plain(lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5)),
                "liger": liger("rms_norm", "LigerRMSNormFunction", 1e-5),
            },
            lambda sizes: (4 * sizes.tokens * sizes.hidden, 10 * sizes.tokens * sizes.hidden),
            exact=rms,
        ),
        Case(
            "add + rms_norm",
            lambda sizes, device: (
                randn(sizes.tokens, sizes.hidden, device=device),
                randn(sizes.tokens, sizes.hidden, device=device, scale=2.0),
                randn(sizes.hidden, device=device),
            ),
            {
                "tunekit": ours_added,
                "torch": plain(added_rms),
                "torch.compile": compiled(added_rms),
                "liger": liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", 1e-5),
            },
            lambda sizes: (8 * sizes.tokens * sizes.hidden, 16 * sizes.tokens * sizes.hidden),
            exact=added_rms,
        ),
    ]


def _glu() -> Case:
    def ours() -> Form:
        from tunekit.kernels.glu import glu

        return lambda gate, up: glu(gate, up, activation="silu")

    return Case(
        "swiglu",
        lambda sizes, device: (
            randn(sizes.tokens, sizes.inner, device=device),
            randn(sizes.tokens, sizes.inner, device=device, scale=2.0),
        ),
        {
            "tunekit": ours,
            "torch": plain(swiglu),
            "torch.compile": compiled(swiglu),
            "liger": liger("swiglu", "LigerSiLUMulFunction"),
        },
        lambda sizes: (6 * sizes.tokens * sizes.inner, 16 * sizes.tokens * sizes.inner),
        exact=swiglu,
    )


def _ropes() -> list[Case]:
    def ours() -> Form:
        from tunekit.kernels.rope import qk_norm_rope

        return lambda q, k, cos, sin: qk_norm_rope(q, k, cos, sin)

    def ours_normed() -> Form:
        from tunekit.kernels.rope import qk_norm_rope

        return lambda q, k, cos, sin, q_weight, k_weight: qk_norm_rope(
            q, k, cos, sin, q_weight=q_weight, k_weight=k_weight, eps=1e-5
        )

    def ligers() -> Form:
        turn = liger("rope", "LigerRopeFunction")()

        def form(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            turned = turn(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            return tuple(heads.transpose(1, 2) for heads in turned)

        return form

    def ligers_normed() -> Form:
        norm, turn = liger("rms_norm", "LigerRMSNormFunction", 1e-5, 0.0, "llama", False)(), ligers()
        return lambda q, k, cos, sin, q_weight, k_weight: turn(norm(q, q_weight), norm(k, k_weight), cos, sin)

    def heads(sizes: Sizes, device: str) -> tuple[Tensor, ...]:
        # Half of the columns again, as transformers makes them.
        angles = randn(1, sizes.tokens, sizes.head_dim // 2, device=device, learns=False).repeat(1, 1, 2)
        return (
            randn(1, sizes.tokens, sizes.heads, sizes.head_dim, device=device),
            randn(1, sizes.tokens, sizes.kv_heads, sizes.head_dim, device=device),
            angles.cos(),
            angles.sin(),
        )

    def size(sizes: Sizes) -> int:
        return 2 * sizes.tokens * (sizes.heads + sizes.kv_heads) * sizes.head_dim

    return [
        Case(
            "rope",
            heads,
            {"tunekit": ours, "torch": plain(rope), "torch.compile": compiled(rope), "liger": ligers},
            lambda sizes: (2 * size(sizes), 4 * size(sizes)),
            exact=rope,
        ),
        Case(
            "qk norm + rope",
            lambda sizes, device: (
                *heads(sizes, device),
                randn(sizes.head_dim, device=device),
                randn(sizes.head_dim, device=device),
            ),
            {
                "tunekit": ours_normed,
                "torch": plain(normed_rope),
                "torch.compile": compiled(normed_rope),
                "liger": ligers_normed,
            },
            lambda sizes: (2 * size(sizes), 5 * size(sizes)),
            exact=normed_rope,
        ),
    ]


def _heads() -> list[Case]:
    def inputs(learns: bool) -> Callable[[Sizes, str], Sequence[Tensor]]:
        return lambda sizes, device: (
            randn(sizes.tokens, sizes.hidden, device=device),
            randn(sizes.vocabulary, sizes.hidden, device=device, scale=sizes.hidden**-0.5, learns=learns),
            torch.randint(sizes.vocabulary, (sizes.tokens,), generator=torch.Generator().manual_seed(0)).to(device),
        )

    def product(sizes: Sizes) -> int:
        return 2 * sizes.tokens * sizes.hidden * sizes.vocabulary

    def ours() -> Form:
        from tunekit.kernels.linear_ce import linear_ce

        def form(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return linear_ce(hidden, weight, labels, index=torch.arange(len(labels), device=labels.device)).loss

        return form

    def our_log_probs() -> Form:
        from tunekit.kernels.linear_ce import linear_logprob

        def form(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            index = torch.arange(len(labels), device=labels.device)
            return linear_logprob(hidden, weight, labels, index=index).log_probs

        return form

    def ligers() -> Form:
        function = found("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")()
        constants = (None, None, -100, 0.0, 0.0, "sum")
        return lambda hidden, weight, labels: function.apply(hidden, weight, labels, *constants)[0]

    def trls() -> Form:
        function = found("trl.kernels.chunked_logprob", "ChunkedLogProbFunction")()
        # The width of a chunk that TRL's trainers take.
        return lambda hidden, weight, labels: function.apply(hidden, weight, None, labels, 1.0, 32768, None, 1.0, ())[0]

    def trls_loss() -> Form:
        form = trls()
        return lambda *inputs: -form(*inputs).sum()

    losses = {
        "tunekit": ours,
        "torch": plain(loss_sum),
        "torch.compile": compiled(loss_sum),
        "liger": ligers,
        "trl": trls_loss,
    }
    return [
        Case(
            "head + loss",
            inputs(learns=True),
            losses,
            lambda sizes: (product(sizes), 3 * product(sizes)),
            "FLOP",
            exact=loss_sum,
        ),
        Case(
            "head + loss, frozen head",
            inputs(learns=False),
            losses,
            lambda sizes: (product(sizes), 2 * product(sizes)),
            "FLOP",
            exact=loss_sum,
        ),
        Case(
            "log-probabilities, frozen head",
            inputs(learns=False),
            {
                "tunekit": our_log_probs,
                "torch": plain(log_probs),
                "torch.compile": compiled(log_probs),
                "trl": trls,
            },
            lambda sizes: (product(sizes), 2 * product(sizes)),
            "FLOP",
            exact=log_probs,
        ),
    ]


def _lora() -> list[Case]:
    def inputs(*names: str, rank: int = 16) -> Callable[[Sizes, str], Sequence[Tensor]]:
        def make(sizes: Sizes, device: str) -> Sequence[Tensor]:
            tensors = [randn(sizes.tokens, sizes.hidden, device=device)]
            for size in _outputs(sizes, names):
                tensors += [
                    randn(size, sizes.hidden, device=device, scale=sizes.hidden**-0.5, learns=False),
                    randn(rank, sizes.hidden, device=device, scale=sizes.hidden**-0.5),
                    randn(size, rank, device=device, scale=0.1),
                ]
            return tensors

        return make

    def ours() -> Form:
        from tunekit.kernels.lora import Linear, Low, lora_linears

        def form(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            groups = zip(weights[::3], weights[1::3], weights[2::3], strict=True)
            return lora_linears(x, [Linear(base, low=Low(a, b, 2.0)) for base, a, b in groups])

        return form

    def pefts() -> Form:
        tuner = found("peft.tuners.lora.layer", "Linear")()
        config = found("peft", "LoraConfig")()(r=16, lora_alpha=32, lora_dropout=0.0)

        def layer(base: Tensor, a: Tensor, b: Tensor) -> nn.Module:
            linear = nn.Linear(base.shape[1], base.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(base, requires_grad=False)
            adapted: nn.Module = tuner(linear, "default", config, r=16, lora_alpha=32)
            # PEFT's own modules, with the tensors that gradients are asked for.
            del adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
            adapted.lora_A["default"].weight, adapted.lora_B["default"].weight = a, b
            return adapted

        held: dict[int, list[nn.Module]] = {}

        def form(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            if id(weights[1]) not in held:
                groups = zip(weights[::3], weights[1::3], weights[2::3], strict=True)
                held.clear()
                held[id(weights[1])] = [layer(*group) for group in groups]
            return tuple(module(x) for module in held[id(weights[1])])

        return form

    def case(name: str, *names: str) -> Case:
        def work(sizes: Sizes) -> tuple[int, int]:
            product = 2 * sizes.tokens * sizes.hidden * sum(_outputs(sizes, names))
            return product, 2 * product

        forms = {"tunekit": ours, "torch": plain(lora), "torch.compile": compiled(lora), "peft": pefts}
        return Case(name, inputs(*names), forms, work, "FLOP", exact=lora)

    return [case("lora q, k, v", "heads", "kv_heads", "kv_heads"), case("lora gate, up", "inner", "inner")]


def _outputs(sizes: Sizes, names: Sequence[str]) -> list[int]:
    """The widths of layers: of the inner layer, or of heads."""
    widths = {"inner": sizes.inner, "heads": sizes.heads * sizes.head_dim, "kv_heads": sizes.kv_heads * sizes.head_dim}
    return [widths[name] for name in names]


def _nf4() -> Case:
    def make(sizes: Sizes, device: str) -> Sequence[Any]:
        quantize = found("bitsandbytes.functional", "quantize_4bit")()
        matrix = randn(sizes.inner, sizes.hidden, device=device, learns=False)
        return quantize(matrix, blocksize=64, compress_statistics=True, quant_type="nf4")  # type: ignore[no-any-return]

    def ours() -> Form:
        from tunekit.kernels.nf4 import Quantized, dequantize

        def form(packed: Tensor, state: Any) -> Tensor:
            nested = {
                "nested_absmax": state.state2.absmax,
                "nested_code": state.state2.code,
                "nested_offset": state.offset,
                "nested_block_size": state.state2.blocksize,
            }
            plain = (packed, state.absmax, state.code, state.blocksize, tuple(state.shape), state.dtype)
            return dequantize(Quantized(*plain, **nested))

        return form

    return Case(
        "nf4 dequantisation",
        make,
        {"tunekit": ours, "bitsandbytes": found("bitsandbytes.functional", "dequantize_4bit")},
        lambda sizes: (int(sizes.inner * sizes.hidden * (2 + 0.5 + 1 / 64)), 0),
        backward=False,
    )


def _adamw() -> list[Case]:
    def make(sizes: Sizes, device: str) -> Sequence[Any]:
        parameter = randn(sizes.parameters, device=device)
        parameter.grad = randn(sizes.parameters, device=device, learns=False, scale=1e-3)
        return (parameter,)

    def stepping(module: str, name: str, **kwargs: Any) -> Callable[[], Form]:
        def form() -> Form:
            optimizer = found(module, name)()
            held: dict[int, Any] = {}

            def step(parameter: Tensor) -> None:
                if id(parameter) not in held:
                    held.clear()
                    held[id(parameter)] = optimizer([parameter], lr=1e-5, **kwargs)
                held[id(parameter)].step()

            return step

        return form

    bfloat16 = Case(
        "adamw, bfloat16 states",
        make,
        {
            "tunekit": stepping("tunekit.kernels.adamw", "AdamW", states="bfloat16"),
            "torch": stepping("torch.optim", "AdamW", foreach=True),
            "torch fused": stepping("torch.optim", "AdamW", fused=True),
        },
        lambda sizes: (14 * sizes.parameters, 0),
        backward=False,
    )
    eight_bits = replace(
        bfloat16,
        name="adamw, 8-bit states",
        forms={
            "tunekit": stepping("tunekit.kernels.adamw", "AdamW", states="8bit"),
            "bitsandbytes": stepping("bitsandbytes.optim", "AdamW8bit"),
        },
        work=lambda sizes: (10 * sizes.parameters, 0),
    )
    four_bits = replace(
        bfloat16,
        name="adamw, 4-bit states",
        forms={
            "tunekit": stepping("tunekit.kernels.adamw", "AdamW", states="4bit"),
            "torchao": stepping("torchao.optim", "AdamW4bit", block_size=256, bf16_stochastic_round=True),
        },
        work=lambda sizes: (8 * sizes.parameters, 0),
    )
    return [bfloat16, eight_bits, four_bits]


def cases() -> list[Case]:
    """All that is compared."""
    return [*_norms(), _glu(), *_ropes(), *_heads(), *_lora(), _nf4(), *_adamw()]
