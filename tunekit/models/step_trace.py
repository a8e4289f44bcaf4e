"""Bytes of a training step, traced: the real modules and autograd on tensors without storage.

A Hugging Face model is built on `meta`, given fake CPU tensors, and taken through one forward and one backward pass
under the types that a run uses. Every live byte is counted. On fake CPU tensors SDPA saves what its flash kernel saves
on CUDA; where code looks at a device or at values, it is made to do what it does on CUDA (`as_on_cuda`), which replaces
functions of torch, transformers and TRL while it lasts. So a plan has a trace made in a process that does nothing else:

    python -m tunekit.models.step_trace < request.json

What lies outside: the allocator's rounding and fragmentation, workspaces of cuBLAS and of the attention kernels, and
kernels that a CPU does not have, in whose place those of torch run.
"""

import contextlib
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, cast
from unittest import mock

import torch
import transformers.integrations.moe
import transformers.masking_utils
import trl.kernels.chunked_logprob as chunked_logprob
import trl.trainer.utils as trl_head
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor
from torch.nn import ModuleList
from torch.nn.functional import layer_norm, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.integrations import replace_with_bnb_linear

from tunekit.errors import ModelError, TunekitError, loading_errors
from tunekit.estimates.traces import PhaseBytes, StepTrace, TraceRequest
from tunekit.models.load import attach_adapter, keep_trained
from tunekit.models.quantization import Nf4, Stack, expert_stacks, quantization_config, stored_tensors
from tunekit.probe.model import auto_class, config_class
from tunekit.recipe.sections.adapters import FullAdapter, QloraAdapter


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every storage that operations make, from then until it is freed or resized to nothing.

    Args:
        own: Tensors whose storages are not counted.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Kept, since a module may get other storage (bitsandbytes casts a bias in place), and a later one would be
        # taken for it by its address.
        self._own = {tensor.untyped_storage()._cdata: (tensor.untyped_storage(), tensor.nbytes) for tensor in own}
        self.own_bytes = sum(nbytes for _, nbytes in self._own.values())
        self.live = 0
        self.peaks: dict[str, int] = {}
        self.rises: dict[str, int] = {}
        """Most bytes that came on top of what was live when a phase was entered, by phase."""
        self.phase = "forward"
        self._entered = 0
        self._sizes: dict[int, int] = {}
        self._resizes = mock.patch.object(torch.UntypedStorage, "resize_", self._resized(torch.UntypedStorage.resize_))

    def __enter__(self) -> Self:
        self._resizes.start()
        return cast(Self, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *problem: Any) -> None:
        self._resizes.stop()
        super().__exit__(*problem)  # type: ignore[no-untyped-call]

    def enter(self, phase: str) -> None:
        """Count what is live from here on as that of a phase."""
        self.phase, self._entered = phase, self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types or Stack in types:
            # It computes by operations on what is local, which come here again.
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default:
            # It returns what it waited for; its fake returns a new tensor.
            return args[0]
        if func is torch.ops.aten.index_put.default:
            # The backward pass of indexing adds to new zeros in place, but not where anything looks on as this does.
            func = torch.ops.aten.index_put_.default
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                self._count(leaf.untyped_storage())
        self._note()
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._own or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.live += self._sizes[key]
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def _note(self) -> None:
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live)
        self.rises[self.phase] = max(self.rises.get(self.phase, 0), self.live - self._entered)

    def _resized(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """`resize_` of storages, by which FSDP2 frees weights and makes room for them again."""

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self.live += size - self._sizes[storage._cdata]
                self._sizes[storage._cdata] = size
                self._note()
            return result

        return resized


def trace_step(request: TraceRequest) -> StepTrace:
    """Trace a step, with and without gradient checkpointing.

    Raises:
        ModelError: The model cannot be built, or has no list of layers.
        RuntimeError: Its code looks at values, which tensors without storage do not have.
    """
    with torch.device("meta"):
        recomputes = _built(request).supports_gradient_checkpointing

    def traced(*, checkpointing: bool) -> tuple[PhaseBytes, PhaseBytes]:
        few, more = request.num_rows
        return (
            trace_phases(request, few, checkpointing=checkpointing),
            trace_phases(request, more, checkpointing=checkpointing),
        )

    return StepTrace(kept=traced(checkpointing=False), recomputed=traced(checkpointing=True) if recomputes else None)


def trace_phases(request: TraceRequest, num_rows: int, *, checkpointing: bool) -> PhaseBytes:
    """Trace a step, and return the most bytes that were live in each of its phases."""
    dtype = getattr(torch, request.dtype)
    with torch.device("meta"):
        base = _built(request)
        model = _adapted(base, request)
    if checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if not isinstance(request.adapter, FullAdapter):
            base.enable_input_require_grads()
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda():
        materialise(model)
        if isinstance(request.adapter, QloraAdapter):
            quantize(base, request.adapter, dtype)
        model.train()
        parts = [part for tensor in (*model.parameters(), *model.buffers()) for part in stored_tensors(tensor)]
        states = 2 * sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        tracker = LiveBytes(parts)
        watch(base, tracker)
        _watch_forward(base, tracker)
        ids = torch.zeros(num_rows, request.length, dtype=torch.long)
        autocasts = request.dtype != "float32" and request.trained_dtype == "float32"
        take(model, base, tracker, ids, autocast_dtype=dtype if autocasts else None)
    peaks, rises, constant = tracker.peaks, tracker.rises, tracker.own_bytes + states
    # A layer of another kind may need more than the last one.
    rise = max(rises.get("middle layers", 0), rises["last layer"]) - rises["last layer"]
    return PhaseBytes(
        layers=constant + peaks["layers"],
        forward=constant + peaks["forward"],
        head=constant + peaks["head"],
        last=constant + peaks["last layer"] + rise,
        # No gradient comes so far where the first layers are frozen, or where there is one layer.
        first=constant + peaks.get("first layer", 0),
    )


def _watch_forward(base: PreTrainedModel, tracker: LiveBytes) -> None:
    """Tell the layers' forward pass from that of norm and head."""

    def end(_module: Any, _inputs: Any, _output: Any) -> None:
        if tracker.phase == "layers":  # and not in the backward pass, where the layer is computed again
            tracker.enter("forward")

    base.get_decoder().register_forward_pre_hook(lambda _module, _inputs: tracker.enter("layers"))
    decoder_layers(base)[-1].register_forward_hook(end)


def _built(request: TraceRequest) -> PreTrainedModel:
    """Return the model of a request, with TRL's fused head."""
    config = config_class(request.config)
    if config is None:
        raise ModelError(
            f"transformers does not know the type {request.config.get('model_type')!r}", hint="plan without a trace"
        )
    stored = request.weights_dtype if isinstance(request.adapter, FullAdapter) else request.dtype
    model: PreTrainedModel = auto_class(config).from_config(
        config, dtype=getattr(torch, stored), attn_implementation=request.attention
    )
    trl_head.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return model


def _adapted(base: PreTrainedModel, request: TraceRequest) -> torch.nn.Module:
    """Return a model with what is trained of it."""
    adapter = request.adapter
    if isinstance(adapter, QloraAdapter):
        replace_with_bnb_linear(base, ["lm_head"], quantization_config(adapter, getattr(torch, request.dtype)))
        base.is_loaded_in_4bit = True
    model = attach_adapter(base, adapter, seed=0)
    if not isinstance(adapter, FullAdapter):
        keep_trained(model, request.weights_dtype)
    return model


def take(
    model: torch.nn.Module,
    base: PreTrainedModel,
    tracker: LiveBytes,
    ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    autocast_dtype: torch.dtype | None = None,
    num_batches: int = 1,
    before_batch: Callable[[bool], None] | None = None,
) -> None:
    """Take a model through the micro-batches of an optimizer step, phase by phase.

    Args:
        model: The model as it is trained.
        base: The model below its adapter and its wrapping.
        tracker: Counts what is live.
        ids: Token ids of a micro-batch, (rows, length).
        attention_mask: Its mask, where it has one.
        autocast_dtype: Type that autocast computes in; None without autocast.
        num_batches: Number of micro-batches.
        before_batch: Called before each, with true for the last one.
    """
    options: dict[str, Any] = {} if attention_mask is None else {"attention_mask": attention_mask}
    entries = base.config.to_dict()
    if entries.get("router_aux_loss_coef") and ("num_experts" in entries or "num_experts" in base.config.attribute_map):
        # As TRL asks for the loss that balances experts, of models whose number it finds.
        options["output_router_logits"] = True
    with tracker:
        for batch in range(num_batches):
            if before_batch is not None:
                before_batch(batch == num_batches - 1)
            take_batch(model, tracker, {"input_ids": ids, **options}, autocast_dtype)
        tracker.enter("optimizer")
        tracker.peaks["optimizer"] = tracker.live


def take_batch(
    model: torch.nn.Module, tracker: LiveBytes, batch: Mapping[str, Any], autocast_dtype: torch.dtype | None
) -> None:
    """Take a model through the forward and the backward pass of a micro-batch."""
    tracker.enter("forward")
    with torch.autocast("cpu", autocast_dtype, enabled=autocast_dtype is not None):
        output = model(**batch, labels=batch["input_ids"], fused_lm_head=True, use_cache=False)
    loss = output.loss
    del output
    tracker.enter("head")
    loss.backward()


def materialise(model: torch.nn.Module) -> None:
    """Give a model on `meta` tensors on a CPU. What was one parameter under two names is one again."""
    names: dict[int, str] = {}
    aliases = {
        name: names.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    model.to_empty(device="cpu")
    for name, first in aliases.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(first))


def quantized(adapter: QloraAdapter, dtype: torch.dtype, *shape: int) -> Nf4:
    """A weight in 4 bits."""
    size = math.prod(shape)
    blocks, code = math.ceil(size / 64), torch.empty(16)
    absmax, nested = torch.empty(blocks), None
    if adapter.double_quant:
        absmax = torch.empty(blocks, dtype=torch.uint8)
        nested = QuantState(
            torch.empty(math.ceil(blocks / 256)), code=torch.empty(256), blocksize=256, dtype=torch.float
        )
    state = QuantState(
        absmax, torch.Size(shape), code, blocksize=64, quant_type=adapter.quant_type, dtype=dtype,
        offset=torch.empty(()) if nested else None, state2=nested,
    )  # fmt: skip
    return Nf4(torch.empty(math.ceil(size / 2), 1, dtype=torch.uint8), state)


def quantize(model: torch.nn.Module, adapter: QloraAdapter, dtype: torch.dtype) -> None:
    """Give a model weights in 4 bits where QLoRA has them."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            weight = quantized(adapter, dtype, module.out_features, module.in_features)
            # Its own type of parameter cannot be made of a tensor without storage.
            module.weight = torch.nn.Parameter(weight.packed, requires_grad=False)
            module.weight.quant_state = module.quant_state = weight.state
        for name in expert_stacks(module):
            stack = Stack(quantized(adapter, dtype, *module.get_parameter(name).shape))
            setattr(module, name, torch.nn.Parameter(stack, False))


def watch(base: PreTrainedModel, tracker: LiveBytes) -> None:
    """Enter a phase where the gradient of what a layer gave arrives: from there on, that layer's backward runs."""

    def enter_on_gradient(phase: str) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            if hidden.requires_grad:
                hidden.register_hook(lambda _gradient: tracker.enter(phase))

        return hook

    decoder = base.get_decoder()
    layers = decoder_layers(base)
    for place, layer in enumerate(layers):
        name = "last layer" if place == len(layers) - 1 else "first layer" if place == 0 else "middle layers"
        layer.register_forward_hook(enter_on_gradient(name))
    base.get_input_embeddings().register_forward_hook(enter_on_gradient("embedding"))
    # The final norm's, where there is one.
    decoder.register_forward_hook(enter_on_gradient("norm"))


def decoder_layers(base: PreTrainedModel) -> ModuleList:
    """Return the list of a decoder's layers.

    Raises:
        ModelError: There is none.
    """
    num_layers = base.config.get_text_config(decoder=True).num_hidden_layers
    for module in base.get_decoder().modules():
        if isinstance(module, ModuleList) and len(module) == num_layers:
            return module
    raise ModelError(f"{type(base).__name__} has no list of decoder layers", hint="plan without a trace")


class _GroupedMm(torch.autograd.Function):
    """The product of experts as `torch.nn.functional.grouped_mm` has it: what it makes and saves, not what it computes.

    On tensors without storage torch knows it for bfloat16 only, and the one that transformers has for compilers saves
    and makes the gradient of a frozen weight too.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(
            *(t if n else None for t, n in zip((rows, weight), ctx.needs_input_grad[::-1], strict=True))
        )
        ctx.sizes = rows.shape, weight.shape, weight.transpose(1, 2).is_contiguous()
        ctx.stack = weight if isinstance(weight, Stack) else None
        with _made_dense(ctx.stack):
            return rows.new_empty(rows.shape[0], weight.shape[2])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (num_rows, inputs), (experts, _, outputs), transposed = ctx.sizes
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            with _made_dense(ctx.stack):
                of_rows = gradient.new_empty(num_rows, inputs)
        if ctx.needs_input_grad[1]:
            shape = (experts, outputs, inputs) if transposed else (experts, inputs, outputs)
            of_weight = gradient.new_empty(shape)
            of_weight = of_weight.transpose(1, 2) if transposed else of_weight
        return of_rows, of_weight


@contextlib.contextmanager
def _made_dense(stack: Stack | None) -> Iterator[None]:
    """Within it the values of experts in 4 bits are there, as while their product is computed."""
    values = None if stack is None else stack.dense()
    yield
    del values


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return the product of experts as transformers calls for it, which autocast leaves in the type of the weight."""
    return cast(torch.Tensor, _GroupedMm.apply(rows.to(weight.dtype), weight))  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """Attention whose values are narrower than its keys: on a CPU torch has no fused kernel for it, on CUDA it does."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(batch, heads, length, dtype=torch.float))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return *(gradient.new_empty(t.shape, dtype=t.dtype) for t in (query, key, value)), None


def dropout(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout by one kernel and a mask of bytes, as on CUDA; on a CPU torch draws a mask in the type of the values.

    None at all returns the values themselves on both (aten/src/ATen/native/Dropout.cpp).
    """
    return torch.native_dropout(values, p, training)[0] if p else values


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """Return what SDPA does, by a kernel where CUDA has one."""
    if query.shape[-1] == value.shape[-1]:
        return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.new_zeros(attn_mask.shape, dtype=query.dtype)
    return cast(torch.Tensor, _Attention.apply(query, key, value, attn_mask))  # type: ignore[no-untyped-call]


def _layer_norm(
    values: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Autocast computes it in float32 on CUDA, and on a CPU in the type of its input."""
    if torch.is_autocast_enabled("cpu"):
        values, weight, bias = values.float(), *(None if t is None else t.float() for t in (weight, bias))
    return layer_norm(values, normalized_shape, weight, bias, eps)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Where code looks at the device or at values, make it do what it does on CUDA with real tensors."""
    apply, is_autocast_enabled = chunked_logprob.ChunkedLogProbFunction.apply, torch.is_autocast_enabled

    def compacted(hidden: torch.Tensor, *rest: Any) -> Any:
        # Indexing by the mask copies, also where taking a view would do.
        return apply(hidden.clone() if hidden._base is not None else hidden, *rest)

    with (
        # A fake tensor has no values to find documents in; even rows hold one each.
        mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices", lambda *_args, **_kwargs: None),
        mock.patch.object(transformers.integrations.moe, "_grouped_mm", grouped_mm),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention),
        mock.patch.object(torch.nn.functional, "dropout", dropout),
        mock.patch.object(torch.nn.functional, "layer_norm", _layer_norm),
        # Without a device it asks of CUDA.
        mock.patch.object(torch, "is_autocast_enabled", lambda device="cpu": is_autocast_enabled(device)),
        # Triton's kernels fold a tile in place, and cuBLAS adds to float32 without casts.
        mock.patch.object(chunked_logprob, "_forward_tile", lambda *_args, **_kwargs: None),
        mock.patch.object(chunked_logprob, "_backward_tile", lambda *_args, **_kwargs: None),
        mock.patch.object(chunked_logprob, "_addmm_fp32", lambda *_args: None),
        mock.patch.object(trl_head, "_ChunkedLogProbFunction", mock.Mock(apply=compacted)),
    ):
        yield


def main() -> None:
    """Trace the step of the request on the standard input; print the trace, or what prevents it, as JSON."""
    request = TraceRequest.model_validate_json(sys.stdin.read())
    unbuilt: tuple[type[Exception], ...] = (*loading_errors(), RuntimeError)
    try:
        result = trace_step(request).model_dump()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        result = {"problem": f"its code depends on values, which a trace does not have ({error})"}
    except TunekitError as error:
        result = {"problem": error.problem}
    except unbuilt as error:
        result = {"problem": f"{type(error).__name__}: {error}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
