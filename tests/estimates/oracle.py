"""What a training step allocates, traced: the real model, the real head and real autograd on tensors without storage.

A Hugging Face model is built on `meta`, given fake CPU tensors, and taken through one forward and one backward pass
under the types that a run uses. Every live byte is counted. On fake CPU tensors SDPA saves what its flash kernel saves
on CUDA. Three functions of TRL's head are replaced by what they allocate on CUDA: its kernels work in place there.

Optimizer states are added, since they are known: two float32 values for each trained one. What lies outside: the
allocator's rounding and fragmentation, workspaces of cuBLAS and of the attention kernels, and bitsandbytes' kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import trl.trainer.utils as trl_head
from torch._subclasses.fake_tensor import FakeTensorMode
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
from tunekit.estimates.memory.memory import MemoryEstimate, estimate, with_trace
from tunekit.estimates.memory.states import Dtype
from tunekit.estimates.models.model_config import (
    head_dim_of,
    layer_types_of,
    mlp_width_of,
    model_types,
    num_experts_of,
    num_experts_per_token_of,
)
from tunekit.estimates.traces import TraceRequest
from tunekit.models import step_trace
from tunekit.models.fusion.tiling import _tile
from tunekit.models.load import freeze_ranks, keep_trained, peft_config, task_of
from tunekit.models.quantization import quantization_config, stored_tensors
from tunekit.models.step_trace import LiveBytes, as_on_cuda, materialise, quantize, watch
from tunekit.planner.decisions.backends import families
from tunekit.probe.model import sketch_model, stored_config
from tunekit.recipe.methods.spec import ScoreHead
from tunekit.recipe.sections.adapters import (
    Adapter,
    FullAdapter,
    LoraAdapter,
    PeftAdapter,
    PromptTuningAdapter,
    QloraAdapter,
    num_virtual_tokens,
)
from tunekit.recipe.sections.model import ModelSection


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
        config = self.config()
        tied = " tied" if config.tie_word_embeddings else ""
        how = f"{'ckpt' if self.checkpointing else ''}{' accum' if self.accumulates else ''}"
        if isinstance(self.adapter, FullAdapter):
            trained = "full" if self.trained_dtype == "float32" else "full pure"
        else:
            trained = _words(self.adapter)
        shape = f"{config.num_hidden_layers}x{config.hidden_size} V{config.vocab_size // 1000}k{tied}"
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
    """Take a model through the micro-batches of a step; `before_batch` is called with whether it is the last."""
    ids = torch.zeros(step.batch, step.length, dtype=torch.long)
    step_trace.take(
        model,
        base,
        tracker,
        ids,
        attention_mask=torch.ones_like(ids) if step.rows == "padded" else None,
        autocast_dtype=getattr(torch, step.dtype) if step.autocasts else None,
        num_batches=num_batches,
        before_batch=before_batch,
    )


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


def built(step: Step, *, head: ScoreHead | None = None) -> tuple[torch.nn.Module, PreTrainedModel]:
    """The model and, where it has an adapter, the model below it; one that judges has a score for a head."""
    full = isinstance(step.adapter, FullAdapter)
    weights = getattr(torch, step.trained_dtype if full else step.dtype)
    # What has no sdpa in transformers is run with its own code where flash-attn is not installed.
    attention = "eager" if step.family in families()["without_sdpa"] else "sdpa"
    config = step.config()
    kind: Any = AutoModelForCausalLM
    if head is not None:
        kind, config.num_labels, config.pad_token_id = AutoModelForSequenceClassification, head.num_labels, 0
    if head is not None and head.scores == "steps":
        kind, config.classifier_dropout = AutoModelForTokenClassification, 0.0
    base = kind.from_config(config, dtype=weights, attn_implementation=attention)
    if head is None:
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
                task_type=task_of(head), exclude_modules=["score"] if head else None,
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


def traced_facts_of(step: Step, *, is_sharded: bool = False) -> ModelFacts:
    """Facts as a plan with a trace has them: from a config.json, and from traces of rows of the same length."""
    with TemporaryDirectory() as folder:
        config = step.config()
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.save_pretrained(folder)
        section = ModelSection(path=folder)
        request = TraceRequest(
            config=stored_config(section),
            adapter=step.adapter,
            dtype=step.dtype,
            trained_dtype=step.trained_dtype,
            length=step.length,
            attention="eager" if step.family in families()["without_sdpa"] else "sdpa",
        )
        facts = with_trace(sketch_model(section), request, step_trace.trace_step(request))
        if is_sharded:
            request = request.model_copy(update={"casts_weights": False})
            facts = with_trace(facts, request, step_trace.trace_step(request))
        return facts


def estimate_of(
    step: Step,
    layout: Layout = Layout(),  # noqa: B008 (frozen)
    facts: ModelFacts | None = None,
) -> MemoryEstimate:
    """The planner's estimate of a step on accelerators, by default from facts of its configuration."""
    facts = facts or facts_of(step)
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
