"""What a training step allocates, traced: the real model, the real head and real autograd on tensors without storage.

A Hugging Face model is built on `meta`, given fake CPU tensors, and taken through one forward and one backward pass
under the types that a run uses. Every live byte is counted. On fake CPU tensors SDPA saves what its flash kernel saves
on CUDA. Three functions of TRL's head are replaced by what they allocate on CUDA: its kernels work in place there.

Optimizer states are added, since they are known: two float32 values for each trained one. What lies outside: the
allocator's rounding and fragmentation, workspaces of cuBLAS and of the attention kernels, and bitsandbytes' kernels.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
import transformers.integrations.moe
import transformers.masking_utils
import trl.kernels.chunked_logprob as chunked_logprob
import trl.trainer.utils as trl_head
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.functional import layer_norm, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import replace_with_bnb_linear

from tunekit.estimates.facts import ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import MemoryEstimate, estimate
from tunekit.estimates.memory.states import Dtype
from tunekit.estimates.models.model_config import (
    head_dim_of,
    layer_types_of,
    mlp_width_of,
    model_types,
    num_experts_of,
    num_experts_per_token_of,
)
from tunekit.models.fusion.tiling import _tile
from tunekit.models.load import freeze_ranks, keep_trained, peft_config, task_of
from tunekit.models.quantization import Nf4, Stack, expert_stacks, quantization_config, stored_tensors
from tunekit.planner.decisions.backends import families
from tunekit.recipe.methods.spec import Judged
from tunekit.recipe.sections.adapters import (
    Adapter,
    FullAdapter,
    LoraAdapter,
    PeftAdapter,
    PromptTuningAdapter,
    QloraAdapter,
    num_virtual_tokens,
)


@dataclass(frozen=True)
class Step:
    """One training step to trace: a model by its family and sizes, and how it is trained."""

    family: str
    sizes: tuple[tuple[str, int | bool], ...]
    adapter: Adapter
    batch: int
    length: int
    checkpointing: bool
    dtype: Dtype = "bfloat16"
    accumulates: bool = False
    rows: Literal["even", "padded"] = "even"
    trained_dtype: Dtype = "float32"
    mlp_tile_tokens: int | None = None

    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(self.family, **dict(self.sizes))

    @property
    def autocasts(self) -> bool:
        return self.dtype != "float32" and self.trained_dtype == "float32"

    @property
    def turn(self) -> int:
        """Layers until their kinds repeat."""
        return model_types().full_attention_every.get(self.family, 1)

    def with_layers(self, num_layers: int) -> "Step":
        sizes = {**dict(self.sizes), "num_hidden_layers": num_layers}
        return Step(**{**self.__dict__, "sizes": tuple(sizes.items())})

    def __str__(self) -> str:
        sizes = dict(self.sizes)
        tied = " tied" if sizes.get("tie_word_embeddings") else ""
        how = f"{'ckpt' if self.checkpointing else ''}{' accum' if self.accumulates else ''}"
        if isinstance(self.adapter, FullAdapter):
            trained = "full" if self.trained_dtype == "float32" else "full pure"
        else:
            trained = _words(self.adapter)
        shape = f"{sizes['num_hidden_layers']}x{sizes['hidden_size']} V{sizes['vocab_size'] // 1000}k{tied}"
        kind = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}[self.dtype]
        return f"{self.family:11} {shape:18} {trained:11} {kind} {self.batch}x{self.length} {self.rows} {how}".rstrip()


def _words(adapter: PeftAdapter) -> str:
    if not isinstance(adapter, LoraAdapter):
        return adapter.type
    names = adapter.target_modules
    on = "" if names == "all-linear" else " " + "".join(name[0] for name in names)
    more = f" drop{adapter.dropout:g}" if adapter.dropout else ""
    more += "".join(f" +{name.partition('_')[0]}" for name in adapter.modules_to_save or [])
    kind = "dora" if adapter.use_dora else adapter.type
    return f"{kind}{adapter.rank}{on}{more}"


@dataclass
class Trace:
    """Bytes that were live, tensors only."""

    weights_bytes: int
    optimizer_bytes: int
    step_bytes: dict[str, int]
    """Most bytes besides weights and optimizer states, by phase."""

    @property
    def peak_bytes(self) -> int:
        return self.weights_bytes + self.optimizer_bytes + max(self.step_bytes.values())

    @property
    def phase(self) -> str:
        return max(self.step_bytes, key=self.step_bytes.__getitem__)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that operations make, from then until it is freed or resized to nothing.

    Args:
        own: Tensors whose storages are not counted.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        super().__init__()
        # Kept, since a module may get other storage (bitsandbytes casts a bias in place), and a later one would be
        # taken for it by its address.
        self._own = {tensor.untyped_storage()._cdata: (tensor.untyped_storage(), tensor.nbytes) for tensor in own}
        self.own_bytes = sum(nbytes for _, nbytes in self._own.values())
        self.live = 0
        self.peaks: dict[str, int] = {}
        self.phase = "forward"
        self._sizes: dict[int, int] = {}
        self._resizes = mock.patch.object(torch.UntypedStorage, "resize_", self._resized(torch.UntypedStorage.resize_))

    def __enter__(self):
        self._resizes.start()
        return super().__enter__()

    def __exit__(self, *problem):
        self._resizes.stop()
        return super().__exit__(*problem)

    def enter(self, phase: str) -> None:
        self.phase = phase

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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

    def _resized(self, resize):
        """`resize_` of storages, by which FSDP2 frees weights and makes room for them again."""

        def resized(storage: torch.UntypedStorage, size: int):
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self.live += size - self._sizes[storage._cdata]
                self._sizes[storage._cdata] = size
                self._note()
            return result

        return resized


def trace(step: Step) -> Trace:
    """The live bytes of one step. Weights are counted by what they hold, the rest as it comes and goes."""
    with torch.device("meta"):
        model, base = built(step)
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda():
        materialise(model)
        if isinstance(step.adapter, QloraAdapter):
            quantize(base, step.adapter, getattr(torch, step.dtype))
        model.train()
        parts = [part for tensor in (*model.parameters(), *model.buffers()) for part in stored_tensors(tensor)]
        trained = {id(p): p.nbytes for p in model.parameters() if p.requires_grad}
        tracker = LiveBytes(parts)
        watch(base, tracker)
        take(step, model, base, tracker, num_batches=2 if step.accumulates else 1)
        return Trace(tracker.own_bytes, 2 * sum(trained.values()), dict(tracker.peaks))


def take(
    step: Step,
    model: torch.nn.Module,
    base: PreTrainedModel,
    tracker: LiveBytes,
    *,
    num_batches: int,
    before_batch: Callable[[bool], None] | None = None,
) -> None:
    """Take a model through the micro-batches of an optimizer step, phase by phase.

    Args:
        step: The step.
        model: The model as it is trained.
        base: The model below its adapter and its wrapping.
        tracker: Counts what is live.
        num_batches: How many there are.
        before_batch: What is called before each, with whether it is the last.
    """
    ids = torch.zeros(step.batch, step.length, dtype=torch.long)
    options = {"attention_mask": torch.ones_like(ids)} if step.rows == "padded" else {}
    if base.config.to_dict().get("router_aux_loss_coef"):
        # As TRL asks for the loss that balances experts.
        options["output_router_logits"] = True
    with tracker:
        for batch in range(num_batches):
            if before_batch is not None:
                before_batch(batch == num_batches - 1)
            tracker.enter("forward")
            with torch.autocast("cpu", getattr(torch, step.dtype), enabled=step.autocasts):
                output = model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False, **options)
            loss = output.loss
            del output
            tracker.enter("head")
            loss.backward()
            del loss
        tracker.enter("optimizer")
        tracker.peaks["optimizer"] = tracker.live


def trace_deep(step: Step) -> Trace:
    """The live bytes of one step of a deep model, drawn through those of shallow ones."""
    return drawn_deep(step, lambda num_layers: trace(step.with_layers(num_layers)))


def drawn_deep(step: Step, traced: Callable[[int], Trace]) -> Trace:
    """The trace of a deep model, drawn through those of three and four layers.

    From three layers on each further one adds the same to each phase, as it has the same tensors and gradients. Where
    kinds of layers alternate, the same holds for whole turns; where the first ones are dense, for those behind them.
    """
    turns = -(-(3 + dict(step.sizes).get("first_k_dense_replace", 0)) // step.turn)
    short, long = turns * step.turn, (turns + 1) * step.turn
    few, more = traced(short), traced(long)
    times = (dict(step.sizes)["num_hidden_layers"] - short) / (long - short)

    def drawn(less: int, most: int) -> int:
        return round(less + times * (most - less))

    return Trace(
        drawn(few.weights_bytes, more.weights_bytes),
        drawn(few.optimizer_bytes, more.optimizer_bytes),
        {phase: drawn(few.step_bytes[phase], more.step_bytes[phase]) for phase in few.step_bytes},
    )


def built(step: Step, *, judged: Judged | None = None) -> tuple[torch.nn.Module, PreTrainedModel]:
    """The model and, where it has an adapter, the model below it; one that judges has a score for a head."""
    full = isinstance(step.adapter, FullAdapter)
    weights = getattr(torch, step.trained_dtype if full else step.dtype)
    # What has no sdpa in transformers is run with its own code where flash-attn is not installed.
    attention = "eager" if step.family in families()["without_sdpa"] else "sdpa"
    config = step.config()
    kind: Any = AutoModelForCausalLM
    if judged == "text":
        kind, config.num_labels, config.pad_token_id = AutoModelForSequenceClassification, 1, 0
    if judged == "steps":
        kind, config.num_labels, config.classifier_dropout = AutoModelForTokenClassification, 2, 0.0
    base = kind.from_config(config, dtype=weights, attn_implementation=attention)
    if judged is None:
        trl_head.add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
    model: torch.nn.Module = base
    if isinstance(step.adapter, QloraAdapter):
        replace_with_bnb_linear(base, ["lm_head"], quantization_config(step.adapter, weights))
        base.is_loaded_in_4bit = True
    if not full:
        from peft import LoraConfig, get_peft_model

        adapter = step.adapter
        if isinstance(adapter, LoraAdapter):
            config = LoraConfig(
                task_type=task_of(judged), exclude_modules=["score"] if judged else None,
                r=adapter.rank, target_modules=adapter.target_modules, lora_dropout=adapter.dropout,
                use_dora=adapter.use_dora, modules_to_save=adapter.modules_to_save,
            )  # fmt: skip
        else:
            config = peft_config(adapter, base)
        model = get_peft_model(base, config)
        if isinstance(adapter, PromptTuningAdapter):
            model.prompt_tokens["default"] = torch.arange(adapter.num_virtual_tokens, device="cpu")
            # A module in two places would get its tensors twice.
            vars(model)["word_embeddings"] = model._modules.pop("word_embeddings")
        freeze_ranks(model)
        keep_trained(model)
    if step.mlp_tile_tokens is not None:
        for layer in base.get_decoder().layers:
            _tile(layer.mlp, step.mlp_tile_tokens)
    if step.checkpointing:
        base.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        if not full:
            base.enable_input_require_grads()
    return model, base


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
            stack = Stack(quantized(adapter, dtype, *module._parameters[name].shape))
            setattr(module, name, torch.nn.Parameter(stack, False))


def watch(base: PreTrainedModel, tracker: LiveBytes) -> None:
    """Enter a phase where the gradient of what a layer gave arrives: from there on, that layer's backward runs."""

    def enter_on_gradient(phase: str):
        def hook(_module, _inputs, output):
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _gradient: tracker.enter(phase))

        return hook

    decoder = base.get_decoder()
    layers = decoder.layers
    for place, layer in enumerate(layers):
        name = "last layer" if place == len(layers) - 1 else "first layer" if place == 0 else "middle layers"
        layer.register_forward_hook(enter_on_gradient(name))
    decoder.embed_tokens.register_forward_hook(enter_on_gradient("embedding"))
    decoder.norm.register_forward_hook(enter_on_gradient("norm"))


class _GroupedMm(torch.autograd.Function):
    """The product of experts as `torch.nn.functional.grouped_mm` has it: what it makes and saves, not what it computes.

    On tensors without storage torch knows it for bfloat16 only, and the one that transformers has for compilers saves
    and makes the gradient of a frozen weight too.
    """

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(
            *(t if n else None for t, n in zip((rows, weight), ctx.needs_input_grad[::-1], strict=True))
        )
        ctx.sizes = rows.shape, weight.shape, weight.transpose(1, 2).is_contiguous()
        ctx.stack = weight if isinstance(weight, Stack) else None
        with _made_dense(ctx.stack):
            return rows.new_empty(rows.shape[0], weight.shape[2])

    @staticmethod
    def backward(ctx, gradient):
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
    """What transformers calls for the product of experts, which autocast leaves in the type of the weight."""
    return _GroupedMm.apply(rows.to(weight.dtype), weight)


class _Attention(torch.autograd.Function):
    """Attention whose values are narrower than its keys: on a CPU torch has no fused kernel for it, on CUDA it does."""

    @staticmethod
    def forward(ctx, query, key, value, mask):
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(batch, heads, length, dtype=torch.float))
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, *_ = ctx.saved_tensors
        return *(gradient.new_empty(t.shape, dtype=t.dtype) for t in (query, key, value)), None


def dropout(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout by one kernel and a mask of bytes, as on CUDA; on a CPU torch draws a mask in the type of the values.

    None at all returns the values themselves on both (aten/src/ATen/native/Dropout.cpp).
    """
    return torch.native_dropout(values, p, training)[0] if p else values


def _attention(query, key, value, attn_mask=None, **options):
    if query.shape[-1] == value.shape[-1]:
        return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.new_zeros(attn_mask.shape, dtype=query.dtype)
    return _Attention.apply(query, key, value, attn_mask)


def _layer_norm(values, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Autocast computes it in float32 on CUDA, and on a CPU in the type of its input."""
    if torch.is_autocast_enabled("cpu"):
        values, weight, bias = (None if t is None else t.float() for t in (values, weight, bias))
    return layer_norm(values, normalized_shape, weight, bias, eps)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Where code looks at the device or at values, make it do what it does on CUDA with real tensors."""
    apply, is_autocast_enabled = chunked_logprob.ChunkedLogProbFunction.apply, torch.is_autocast_enabled

    def compacted(hidden, *rest):
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


def facts_of(step: Step) -> ModelFacts:
    """Facts as a probe reads them from the model's files."""
    config = step.config()
    entries = config.to_dict()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return ModelFacts(
        path=step.family,
        architecture=type(model).__name__,
        model_type=config.model_type,
        layer_types=layer_types_of(entries),
        tensors={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        dtype="bfloat16",
        hidden_size=config.hidden_size,
        intermediate_size=mlp_width_of(entries),
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim_of(entries),
        num_experts=num_experts_of(entries),
        num_experts_per_token=num_experts_per_token_of(entries),
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        has_chat_template=True,
        sliding_window=config.sliding_window if "sliding_window" in dict(step.sizes) else None,
    )


def estimate_of(step: Step, layout: Layout = Layout()) -> MemoryEstimate:  # noqa: B008 (frozen)
    """What the planner says of a step on accelerators."""
    facts = facts_of(step)
    length = step.length + num_virtual_tokens(step.adapter)
    mask_length = length if step.rows == "padded" else None
    slides = facts.sliding_window is not None and length >= facts.sliding_window
    return estimate(
        facts,
        step.adapter,
        device="cuda",
        dtype=step.dtype,
        optim="adamw_torch_fused",
        trained_dtype=step.trained_dtype,
        num_tokens=step.batch * length,
        mask_length=mask_length,
        sliding_mask_length=mask_length or (length if slides else None),
        gradient_checkpointing=step.checkpointing,
        accumulates=step.accumulates,
        layout=layout,
        devices_per_node=min(8, layout.num_processes),
        reserve_share=0.0,
        scores_length=length if step.family in families()["without_sdpa"] else None,
        mlp_tile_tokens=step.mlp_tile_tokens,
    )
