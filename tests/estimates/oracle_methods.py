"""What a step of an alignment method allocates, traced: TRL's own loss on tensors without storage.

The technique is `oracle`'s. The trainer is TRL's, made without its constructor, which would want data and weights:
only what its loss looks at is set. Models are wrapped by Accelerate as the trainer would wrap them, since what autocast
keeps depends on where it ends. As on CUDA, only the tokens that are scored reach the head; where code selects them by a
mask, which has no values here, the tracer makes a tensor of their number.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import trl.kernels.chunked_divergence
import trl.trainer.distillation_trainer
import trl.trainer.grpo_trainer
import trl.trainer.utils as trl_head
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, GenerationConfig
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
)
from trl.distributed import DistributedBackend
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.models.utils import prepare_fsdp

import tunekit.methods.logit_distance
from tests.estimates.oracle import Step, Trace, built, drawn_deep, facts_of
from tests.estimates.oracle_shards import ShardedStep, fake_accelerator, fake_processes, local
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import MemoryEstimate, estimate
from tunekit.estimates.passes import passes_of
from tunekit.methods.classification import ClassificationTrainer
from tunekit.methods.distillation import compute_under_autocast
from tunekit.methods.gold import GOLDTrainer
from tunekit.methods.head import HEAD
from tunekit.methods.logit_distance import TILE_PIECES
from tunekit.methods.prm import PRMTrainer
from tunekit.methods.run_trainer import run_trainer
from tunekit.methods.sdft import SDFTTrainer
from tunekit.models.step_trace import LiveBytes, as_on_cuda, watch
from tunekit.recipe.methods import Method
from tunekit.recipe.methods.classification import ClassificationMethod
from tunekit.recipe.methods.distillation import DistillationMethod
from tunekit.recipe.methods.dpo import DPOMethod
from tunekit.recipe.methods.gold import GOLDMethod
from tunekit.recipe.methods.grpo import GRPOMethod
from tunekit.recipe.methods.kto import KTOMethod
from tunekit.recipe.methods.on_policy import OnPolicyMethod
from tunekit.recipe.methods.orpo import ORPOMethod
from tunekit.recipe.methods.prm import PRMMethod
from tunekit.recipe.methods.reward import RewardMethod
from tunekit.recipe.methods.rloo import RLOOMethod
from tunekit.recipe.methods.sdft import SDFTMethod
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.recipe.sections.data import DataSection


@dataclass(frozen=True)
class MethodStep:
    """A training step of a method; the batch of `step` counts pairs, and answers of KTO and GRPO."""

    step: Step
    method: Method
    num_accumulated: int = 1
    teacher: Step | None = None
    """The shape of the model to learn from."""

    @property
    def scored_tokens(self) -> int:
        """Tokens of a sequence that count in the loss: at most all but the first."""
        if isinstance(self.method, OnPolicyMethod):
            return self.method.max_completion_length
        return self.step.length - 1

    def with_layers(self, num_layers: int) -> "MethodStep":
        return MethodStep(self.step.with_layers(num_layers), self.method, self.num_accumulated, self.teacher)

    def __str__(self) -> str:
        how = self.method.model_dump(exclude_defaults=True, exclude={"type", "trainer_args"})
        return f"{self.method.type:4} {self.step} {' '.join(f'{name}={value}' for name, value in how.items())}".rstrip()


class MaskedBytes(LiveBytes):
    """Counts as `LiveBytes`, and gives what a mask selects the shape that it has where `share` of it is true.

    Of a tensor whose places are asked for, `found` is true.
    """

    def __init__(self, own: Iterable[torch.Tensor], share: float, found: float) -> None:
        super().__init__(own)
        self.share, self.found = share, found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func is aten.nonzero.default:
            shape = (round(self.found * args[0].numel()), args[0].dim())
            return super().__torch_dispatch__(aten.new_empty.default, types, (args[0], shape), {"dtype": torch.long})
        mask = args[1] if func is aten.masked_select.default else None
        if func is aten.index.Tensor and args[1][0] is not None and args[1][0].dtype == torch.bool:
            mask = args[1][0]
        if mask is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        values = args[0]
        num_chosen = round(self.share * mask.numel())
        chosen = (num_chosen, *values.shape[mask.dim() :])
        return super().__torch_dispatch__(aten.new_empty.default, types, (values, chosen))


class OneProcess(Accelerator):
    """An accelerator whose metrics have values."""

    def gather(self, tensor):
        return torch.tensor(1.0)

    def gather_for_metrics(self, input_data, use_gather_object=False):
        return torch.tensor(1.0)

    def reduce(self, tensor, reduction="sum", scale=1.0):
        return [torch.tensor(1.0), torch.tensor(1.0)]


def _accelerator(step: Step) -> OneProcess:
    AcceleratorState._reset_state()
    words = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
    return OneProcess(cpu=True, mixed_precision=words[step.dtype])


@contextmanager
def _only_scored() -> Iterator[None]:
    divergence = trl.kernels.chunked_divergence
    kernels = {name: lambda *_args, **_kwargs: None for name in ("_stats_tile", "_jsd_tile", "_backward_tile")}
    with (
        as_on_cuda(),
        mock.patch.object(trl_head, "_use_triton", lambda _device: True),
        mock.patch.object(trl_head, "is_triton_available", lambda: True),
        mock.patch.object(trl_head, "_supports_trl_loss_kernel", lambda *_: True),
        mock.patch.object(trl_head, "_fused_logprob_entropy", _FusedLogProbs.of, create=True),
        mock.patch.object(trl.trainer.distillation_trainer, "_use_triton", lambda _device: True),
        # As for the head of other methods: kernels fold a tile in place, and cuBLAS gives float32 without casts.
        mock.patch.object(tunekit.methods.logit_distance, "add_product", lambda *_args, **_kwargs: None),
        mock.patch.multiple(divergence, _addmm_fp32=lambda *_args: None, _project=_project, **kernels),
    ):
        yield


class _FusedLogProbs(torch.autograd.Function):
    """TRL's kernel for log-probabilities of whole logits on CUDA: what it makes and saves, not what it computes."""

    @staticmethod
    def of(logits, index, *, temperature, row_mask):
        return _FusedLogProbs.apply(logits, index), None

    @staticmethod
    def forward(ctx, logits, index):
        log_probs, _entropy, log_z, expected = (logits.new_empty(index.shape, dtype=torch.float32) for _ in range(4))
        ctx.save_for_backward(logits, index, log_z, expected)
        return log_probs

    @staticmethod
    def backward(ctx, _gradient):
        return torch.empty_like(ctx.saved_tensors[0], memory_format=torch.contiguous_format), None


OUTPUTS = {
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "kto": ("log_probs", "entropy", "mean_logits"),
    **dict.fromkeys(("grpo", "rloo", "distillation", "sdft"), ("log_probs", "entropy")),
}
"""What TRL's trainers have their head in tiles give; the others call the model's own."""


def _project(tile, hidden, weight, bias, start, end, dtype):
    """What is allocated for a tile of logits: a cast of the weights, where they have another type."""
    weight[start:end].to(dtype)


def trace(method_step: MethodStep, device: Literal["cpu", "cuda"] = "cuda") -> Trace:
    """The live bytes of one step, by phase; those of a reference model count among the weights."""
    step, method = method_step.step, method_step.method
    with torch.device("meta"):
        model, base = built(step, head=method.score_head)
        full = isinstance(step.adapter, FullAdapter)
        reference = None
        if passes_of(method, step.adapter, _data(method_step), global_batch_size=1).keeps_reference:
            reference = AutoModelForCausalLM.from_config(
                step.config(), dtype=base.dtype, attn_implementation=base.config._attn_implementation
            )
        if method_step.teacher is not None:
            reference = AutoModelForCausalLM.from_config(
                method_step.teacher.config(),
                dtype=getattr(torch, step.dtype),
                attn_implementation=base.config._attn_implementation,
            )
    trainer = _trainer(method)
    # Making the configuration of a trainer forgets an earlier accelerator's state.
    trainer.accelerator = accelerator = _accelerator(step)
    if method.type in OUTPUTS:
        trl_head.add_fused_lm_head(base, outputs=OUTPUTS[method.type])
    with FakeTensorMode(allow_non_fake_inputs=True), _only_scored() if device == "cuda" else nullcontext():
        model.to_empty(device="cpu")
        base.tie_weights()
        model.train()
        own = [*model.parameters(), *model.buffers()]
        trained = {id(p): p.nbytes for p in model.parameters() if p.requires_grad}
        if reference is not None:
            trl_head.add_fused_lm_head(reference)
            reference.to_empty(device="cpu")
            reference.tie_weights()
            reference.eval()
            own += [*reference.parameters(), *reference.buffers()]
            reference = accelerator.prepare_model(reference, device_placement=False, evaluation_mode=True)
        model = accelerator.prepare_model(model, device_placement=False)
        trainer.model, trainer.ref_model = model, reference
        trainer.teacher_model = reference
        if method.spec.teacher_reads_own_tokens:
            vars(base)[HEAD] = SimpleNamespace(bound=trainer._bound)
        is_pair = method.type in ("dpo", "orpo", "cpo", "reward")
        shape = (step.batch * (2 if is_pair else 1), step.length)
        # The mask of distillation is one of the answers alone.
        is_answers = method.type in ("distillation", "sdft", "gold")
        share = 1.0 if is_answers else method_step.scored_tokens / (step.length - 1)
        # Half of KTO's answers are good.
        tracker = MaskedBytes(own, share, found=1.0 if method.type == "sdft" else 0.5)
        watch(base, tracker)
        _watch_reference(reference or base, tracker)
        with tracker:
            for _ in range(2 if step.accumulates else 1):
                inputs = _inputs(method_step, shape)
                tracker.enter("forward")
                loss = trainer.compute_loss(model, inputs)
                tracker.enter("head")
                loss.backward()
                del loss
            tracker.enter("optimizer")
            tracker.peaks["optimizer"] = tracker.live
        assert full or reference is None or method_step.teacher is not None
        return Trace(tracker.own_bytes, 2 * sum(trained.values()), dict(tracker.peaks))


@dataclass
class Generated:
    """Bytes that were live while answers were generated, besides weights; and those of the cache at its end."""

    peak_bytes: int
    cache_bytes: int


def generate(step: Step, num_completion_tokens: int) -> Generated:
    """TRL generates the answers to `step.batch` prompts, with a real model on real tensors: loops look at values."""
    model, base = built(step)
    trainer = _grpo_trainer(GRPOMethod(max_completion_length=num_completion_tokens))
    trainer.accelerator = accelerator = _accelerator(step)
    trl_head.add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    model = accelerator.prepare_model(model, device_placement=False).train()
    trainer.model = trainer.model_wrapped = model
    trainer._dist = DistributedBackend(accelerator)
    trainer._tokenizer = SimpleNamespace(pad_token_id=0)
    trainer.use_transformers_continuous_batching = trainer._is_vlm = trainer.is_deepspeed_enabled = False
    trainer.pad_to_multiple_of, trainer.eos_token_ids = None, [base.config.vocab_size + 1]
    trainer.generation_kwargs = {
        "max_new_tokens": num_completion_tokens,
        "do_sample": True,
        "pad_token_id": 0,
        "eos_token_id": trainer.eos_token_ids,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
    }
    trainer.generation_config = GenerationConfig(**trainer.generation_kwargs, disable_compile=True)
    caches: list[int] = []

    def look(_module, _inputs, options, _output):
        layers = options["cache"].layers
        caches.append(sum(kept.untyped_storage().nbytes() for layer in layers for kept in (layer.keys, layer.values)))

    base.model.register_forward_hook(look, with_kwargs=True)
    tracker = LiveBytes([*model.parameters(), *model.buffers()])
    # One prompt is shorter than the others, so that there is a mask.
    prompts = [[1] * (step.length - (row == 0)) for row in range(step.batch)]
    without_metrics = mock.patch.object(trl.trainer.grpo_trainer, "profiling_context", lambda *_args: nullcontext())
    with without_metrics, tracker:
        trainer._generate_single_turn(prompts, None, {}, num_generations=step.batch)
    return Generated(max(tracker.peaks.values()), caches[-1])


def trace_deep(method_step: MethodStep) -> Trace:
    """The live bytes of one step of a deep model, drawn through those of shallow ones."""
    return drawn_deep(method_step.step, lambda num_layers: trace(method_step.with_layers(num_layers)))


def trace_reference(step: Step, layout: Layout) -> int:
    """Most bytes besides its shards that a reference model takes under FSDP2, wrapped by TRL, on one device."""
    with fake_processes(layout) as mesh:
        with torch.device("meta"):
            model, _ = built(step)
        model = prepare_fsdp(model, fake_accelerator(ShardedStep(step, layout), mesh))
        with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda():
            model.to_empty(device="cpu")
            tracker = LiveBytes(map(local, (*model.parameters(), *model.buffers())))
            ids = torch.zeros(step.batch, step.length, dtype=torch.long)
            with tracker, torch.no_grad():
                model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False)
        return max(tracker.peaks.values())


def _data(method_step: MethodStep) -> DataSection:
    return DataSection(train="rows.jsonl", max_length=method_step.step.length)


def _watch_reference(model: Any, tracker: LiveBytes) -> None:
    """Enter a phase where a forward pass without gradients begins, and another where one with them does."""

    def hook(_module, _inputs):
        tracker.enter("forward" if torch.is_grad_enabled() else "reference")

    model.get_input_embeddings().register_forward_pre_hook(hook)


def _inputs(method_step: MethodStep, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    ids = torch.zeros(shape, dtype=torch.long)
    ones = torch.ones_like(ids)
    if method_step.method.type == "reward":
        return {"input_ids": ids, "attention_mask": ones}
    if method_step.method.type == "prm":
        return {"input_ids": ids, "attention_mask": ones, "labels": ids}
    if method_step.method.type == "classification":
        labels = torch.zeros(shape[0], dtype=torch.long)
        if method_step.method.score_head.is_multi_label:
            labels = torch.zeros(shape[0], method_step.method.score_head.num_labels)
        return {"input_ids": ids, "attention_mask": ones, "labels": labels}
    if method_step.method.type == "orpo":
        pair = ("chosen", "rejected")
        half = ids.chunk(2)[0]
        return {f"{one}_{name}": half.clone() for one in pair for name in ("input_ids", "attention_mask", "labels")}
    if method_step.method.type == "kto":
        inputs = {"input_ids": ids, "attention_mask": ones, "completion_mask": ones}
        inputs |= {f"KL_{name}": value.clone() for name, value in inputs.items()}
        inputs["label"] = torch.zeros(shape[0], dtype=torch.bool)
        if method_step.method.precompute_ref_log_probs:
            inputs |= {"ref_logps": torch.zeros(shape[0]), "ref_KL_logps": torch.zeros(shape[0])}
        return inputs
    if method_step.method.type == "dpo":
        inputs = {"input_ids": ids, "attention_mask": ones, "completion_mask": ones}
        if method_step.method.precompute_ref_log_probs:
            inputs |= {"ref_chosen_logps": torch.zeros(shape[0] // 2), "ref_rejected_logps": torch.zeros(shape[0] // 2)}
        return inputs
    if method_step.method.type == "gold":
        # Two tiles of pieces, of many tokens: those before the last one of each are scored at once.
        places = torch.arange(shape[0] * (shape[1] - 1))
        parts = {"last": places[: 2 * TILE_PIECES], "before": places[2 * TILE_PIECES :]}
        parts |= {name: torch.zeros_like(parts["before"]) for name in ("before_tokens", "before_pieces")}
        sides = {f"{side}_{name}": part.clone() for side in ("own", "its") for name, part in parts.items()}
        its = {f"teacher_{name}": value.clone() for name, value in (("input_ids", ids), ("attention_mask", ones))}
        return {"input_ids": ids, "attention_mask": ones, "labels": ids.clone(), **its, **sides}
    prompt = method_step.step.length - method_step.method.max_completion_length
    inputs = {
        "prompt_ids": ids[:, :prompt].clone(),
        "prompt_mask": ones[:, :prompt].clone(),
        "completion_ids": ids[:, prompt:].clone(),
        "completion_mask": ones[:, prompt:].clone(),
        "teacher_ids": ids[:, :prompt].clone(),
        "teacher_mask": ones[:, :prompt].clone(),
        "advantages": torch.zeros(shape[0]),
        "num_items_in_batch": torch.tensor(1.0),
    }
    if isinstance(method_step.method, RLOOMethod):
        inputs["old_logps"] = torch.zeros(shape[0])
    elif isinstance(method_step.method, GRPOMethod) and method_step.method.beta:
        inputs["ref_per_token_logps"] = torch.zeros(shape[0], method_step.method.max_completion_length)
    return inputs


def _trainer(method: Method) -> Any:
    match method:
        case DPOMethod():
            return _dpo_trainer(method)
        case KTOMethod():
            return _kto_trainer(method)
        case ORPOMethod():
            return _orpo_trainer(method)
        case RewardMethod():
            return _reward_trainer()
        case PRMMethod():
            return _scoring_trainer(PRMTrainer)
        case ClassificationMethod():
            return _scoring_trainer(ClassificationTrainer)
        case GRPOMethod():
            return _grpo_trainer(method)
        case RLOOMethod():
            return _rloo_trainer(method)
        case DistillationMethod():
            return _distillation_trainer(method)
        case SDFTMethod():
            return _sdft_trainer(method)
        case GOLDMethod():
            return _gold_trainer(method)
    raise AssertionError(method.type)


def _kto_trainer(method: KTOMethod) -> KTOTrainer:
    """A trainer with what its loss looks at, as its constructor sets it."""
    trainer = KTOTrainer.__new__(KTOTrainer)
    args = KTOConfig(output_dir="unused", use_cpu=True, bf16=False, beta=method.beta)
    trainer.args = args
    trainer.beta, trainer.loss_type, trainer.calculate_KL = args.beta, method.loss_type, method.loss_type == "kto"
    trainer.desirable_weight = trainer.undesirable_weight = 1.0
    trainer.precompute_ref_logps, trainer.aux_loss_enabled = method.precompute_ref_log_probs, False
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = {"train": defaultdict(list)}, 0, 1
    return trainer


def _orpo_trainer(method: ORPOMethod) -> ORPOTrainer:
    """A trainer with what its loss looks at, as its constructor sets it."""
    trainer = ORPOTrainer.__new__(ORPOTrainer)
    trainer.args = ORPOConfig(output_dir="unused", use_cpu=True, bf16=False, beta=method.beta)
    trainer.beta, trainer.padding_value, trainer.is_encoder_decoder = method.beta, 0, False
    trainer.aux_loss_enabled = trainer._peft_has_been_casted_to_bf16 = False
    trainer._stored_metrics = defaultdict(lambda: defaultdict(list))
    return trainer


def _reward_trainer() -> RewardTrainer:
    """A trainer with what its loss looks at, as its constructor sets it."""
    trainer = RewardTrainer.__new__(RewardTrainer)
    trainer.args = RewardConfig(output_dir="unused", use_cpu=True, bf16=False)
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = {"train": defaultdict(list)}, 0, 1
    return trainer


def _scoring_trainer(kind: type[ClassificationTrainer]) -> ClassificationTrainer:
    """A trainer with what its loss looks at, as its constructor sets it."""
    trainer = kind.__new__(kind)
    trainer._noted = []
    return trainer


def _dpo_trainer(method: DPOMethod) -> DPOTrainer:
    """A trainer with what its loss looks at, as its constructor sets it."""
    trainer = DPOTrainer.__new__(DPOTrainer)
    args = DPOConfig(output_dir="unused", use_cpu=True, bf16=False, beta=method.beta)
    trainer.args = args
    trainer.beta, trainer.loss_types, trainer.loss_weights = args.beta, args.loss_type, [1.0]
    trainer.f_divergence_type, trainer.ld_alpha, trainer.use_weighting = args.f_divergence_type, None, False
    trainer.precompute_ref_logps, trainer.aux_loss_enabled = method.precompute_ref_log_probs, False
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = {"train": defaultdict(list)}, 0, 1
    return trainer


def _rloo_trainer(method: RLOOMethod) -> RLOOTrainer:
    """A trainer with what its loss looks at, as its constructor sets it."""
    trainer = RLOOTrainer.__new__(RLOOTrainer)
    args = RLOOConfig(output_dir="unused", use_cpu=True, bf16=False, beta=method.beta, per_device_train_batch_size=8)
    trainer.args = args
    trainer.epsilon_low = trainer.epsilon_high = args.epsilon
    trainer.aux_loss_enabled, trainer._metrics = False, {"train": defaultdict(list)}
    return trainer


def _distillation_trainer(method: DistillationMethod) -> DistillationTrainer:
    """A trainer with what its loss looks at, as its constructor sets it."""
    kind = run_trainer(DistillationTrainer)
    trainer: DistillationTrainer = kind.__new__(kind)
    trainer.args = DistillationConfig(output_dir="unused", use_cpu=True, bf16=False, beta=method.beta)
    trainer.beta, trainer.temperature, trainer._is_vlm = method.beta, 1.0, False
    trainer.model_kwarg_keys, trainer._metrics = (), {"train": defaultdict(list)}
    trainer._forward_redirection = trl.trainer.distillation_trainer._ForwardRedirection()
    compute_under_autocast(trainer)
    return trainer


def _sdft_trainer(method: SDFTMethod) -> SDFTTrainer:
    """A trainer with what its loss looks at, as its constructor sets it."""
    kind = run_trainer(SDFTTrainer)
    trainer: SDFTTrainer = kind.__new__(kind)
    trainer.args = DistillationConfig(output_dir="unused", use_cpu=True, bf16=False, beta=method.beta)
    trainer.beta, trainer.temperature, trainer._metrics = method.beta, 1.0, {"train": defaultdict(list)}
    trainer._num_skipped, trainer._without_adapter = 0, method.teacher_model_kind == "base"
    trainer._bound = {"logit_scale": 1.0, "final_logit_softcapping": None}
    trainer._forward_redirection = trl.trainer.distillation_trainer._ForwardRedirection()
    compute_under_autocast(trainer)
    return trainer


def _gold_trainer(method: GOLDMethod) -> GOLDTrainer:
    """A trainer with what its loss looks at, as its constructor sets it."""
    kind = run_trainer(GOLDTrainer)
    trainer: GOLDTrainer = kind.__new__(kind)
    trainer.args = SFTConfig(output_dir="unused", use_cpu=True, bf16=False)
    trainer.beta, trainer.temperature, trainer.kd_ratio = method.beta, method.temperature, method.kd_ratio
    trainer._hybrid, trainer._noted = None, []
    trainer._bound = {"logit_scale": 1.0, "final_logit_softcapping": None}
    trainer._redirected = trl.trainer.distillation_trainer._ForwardRedirection()
    return trainer


def _grpo_trainer(method: GRPOMethod) -> GRPOTrainer:
    """A trainer with what its loss looks at, as its constructor sets it."""
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, beta=method.beta, per_device_train_batch_size=8)
    trainer.args = args
    trainer.beta, trainer.loss_type, trainer.importance_sampling_level = args.beta, args.loss_type, "token"
    trainer.epsilon_low = trainer.epsilon_high = args.epsilon
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = args.top_entropy_quantile, None
    trainer.use_vllm, trainer.aux_loss_enabled, trainer._entropy_bonus_enabled = False, False, False
    trainer.max_completion_length, trainer.current_gradient_accumulation_steps = method.max_completion_length, 1
    trainer._metrics = {"train": defaultdict(list)}
    return trainer


def estimate_of(method_step: MethodStep, device: Literal["cpu", "cuda"] = "cuda") -> MemoryEstimate:
    """What the planner says of a step."""
    step, method = method_step.step, method_step.method
    data = _data(method_step)
    teacher = None if method_step.teacher is None else facts_of(method_step.teacher)
    batch = step.batch * method_step.num_accumulated
    passes = passes_of(method, step.adapter, data, global_batch_size=batch, teacher=teacher)
    facts = facts_of(step)
    return estimate(
        facts if method.score_head is None else facts.as_judge(method.score_head),
        step.adapter,
        device=device,
        dtype=step.dtype,
        optim="adamw_torch_fused",
        num_tokens=passes.sequences_per_row * step.batch * step.length,
        mask_length=step.length,
        sliding_mask_length=step.length,
        gradient_checkpointing=step.checkpointing,
        accumulates=step.accumulates,
        layout=Layout(),
        devices_per_node=1,
        reserve_share=0.0,
        passes=passes,
    )
