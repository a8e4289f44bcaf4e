"""Check at the end of a run that the saved model equals the trained one.

A few rows are scored twice: by the trained model, on every device that it is sharded over, and by the saved one, loaded
as users load it: weights by Transformers, an adapter by PEFT on its base. Weights that were not saved, saved under
another name, tied on loading or tied only in training show here, and nowhere else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from tunekit.errors import ModelError, RunError
from tunekit.estimates.memory.states import BYTES
from tunekit.models.load import load_model
from tunekit.planner.plan import Plan
from tunekit.probe.host import host_cpu
from tunekit.process.watchdog import same_everywhere
from tunekit.recipe.sections.adapters import FullAdapter, QloraAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.record import Record
from tunekit.training.check_head import in_evaluation, probe_rows
from tunekit.training.measured_memory import is_out_of_memory

TOLERANCES = {"float32": 1e-4, "float16": 5e-2, "bfloat16": 5e-2}
"""Largest error of the logits as a share of their spread over the vocabulary (root mean squares), by the type of the
products. Kernels and attention differ between the two models, and in 16 bits so does the rounding of each layer."""

ROUNDINGS = 3.0
"""The same in 16 bits as a multiple of the saved model's own rounding, which its logits in float32 show: two models
that round independently are twice as far apart as each is from exact ones, at most. Random and deep ones round most."""

FLOAT8_TOLERANCE = 0.25
"""The same where the trained model multiplies in 8 bits, three of them of mantissa, and the saved one does not."""

SPARE_SHARE, SPARE_BYTES = 1.5, 2**30
"""Free memory that loading a model takes, by the bytes of its weights, and besides."""


def check_saved(trainer: Any, plan: Plan, record: Record, folder: Path, *, vocabulary: int) -> None:
    """Compare the logits of a saved model with those of the trained one. Called by all processes together.

    Args:
        trainer: After training.
        plan: Its layout and types.
        record: Where the result goes.
        folder: The saved model or adapter.
        vocabulary: Number of tokens to make rows of, where the data has none.

    Raises:
        RunError: They differ by more than rounding, or the saved model cannot be loaded.
    """
    if plan.layout.sp_size > 1:
        _skip(record, "the trained model uses sequence parallelism")
        return
    rows = probe_rows(trainer, vocabulary)
    with in_evaluation(trainer, trainer.model):
        trained = [_logits(trainer.model, row, trainer.accelerator.device) for row in rows]
    problem = None
    if record.place.is_main:
        device = _device(plan)
        if any(row.isnan().any() for row in trained):
            _skip(record, "the trained model's logits are NaN")
        elif device is None:
            _skip(record, "too little free memory to load it in addition to the trained one")
        else:
            with _outside_of_engines(trainer, plan):
                problem = _problem(plan, record, folder, device, rows, trained)
    _raise(same_everywhere(problem, record.place), folder)


def check_losses(plan: Plan, record: Record, rows: list[list[int]], losses: list[float], saved: Path | None) -> None:
    """Compare losses of another engine, in which no process has all logits, with those of Transformers.

    Called by all processes together.

    Args:
        plan: Its layout and types.
        record: Where the result goes.
        rows: Token ids of a few rows.
        losses: Mean loss of each over all of its tokens, by the engine, in nats per token.
        saved: The saved model after training; None before, for the base model.

    Raises:
        RunError: They differ by more than rounding, or the saved model cannot be loaded.
    """
    problem, device = None, _device(plan) if record.place.is_main else None
    if record.place.is_main and device is None:
        _skip(record, "too little free memory to load it in addition to the trained one")
    elif device is not None:
        model = _load(plan, saved, device)
        error = max(abs(_loss(model, row, device) / loss - 1) for row, loss in zip(rows, losses, strict=True))
        tolerance = TOLERANCES[plan.dtype]
        if saved is not None:
            record.write("saved", loss_error=error, tolerance=tolerance, device=device)
        if not error <= tolerance:
            problem = f"on {len(rows)} rows its loss is off by {error:.2%} (rounding: up to {tolerance:.2%})"
    problem = same_everywhere(problem, record.place)
    if saved is not None:
        _raise(problem, saved)
    elif problem is not None:
        what = f"{plan.layout.name} computes {plan.base.path} in another way than Transformers: {problem}"
        raise RunError(what, hint="use parallel.engine=accelerate; please report this with the model's config.json")


def _raise(problem: str | None, folder: Path) -> None:
    if problem is not None:
        what = f"the saved model differs from the trained one: {problem}"
        raise RunError(
            what, hint=f"the model is in {folder}; please report this with recipe.yaml and plan.yaml of the run"
        )


def _loss(model: Any, ids: list[int], device: str) -> float:
    """Return the mean loss of a row over all of its tokens but the first, in nats per token."""
    with torch.no_grad():
        logits = _logits(model, ids, device)
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])))


def _problem(
    plan: Plan, record: Record, folder: Path, device: str, rows: list[list[int]], trained: "list[torch.Tensor]"
) -> str | None:
    """Return how the saved model differs from the trained one; None where by rounding alone."""
    tolerance = FLOAT8_TOLERANCE if plan.fp8 else TOLERANCES[plan.dtype]
    try:
        model = _load(plan, folder, device)
        with torch.no_grad(), torch.autocast(device, getattr(torch, plan.dtype), enabled=plan.autocast):
            saved = [_logits(model, row, device) for row in rows]
    except ModelError as error:
        return f"cannot be loaded: {error.problem}"
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _skip(record, f"{device} has too little free memory to load it in addition to the trained one")
        return None
    scores = plan.recipe.method.spec.classifies is not None
    share = logit_error(torch.cat(saved), torch.cat(trained), scores=scores)
    if share > tolerance and plan.dtype != "float32" and not isinstance(plan.recipe.adapter, QloraAdapter):
        try:
            with torch.no_grad():
                exact = [_logits(model.float(), row, device) for row in rows]
            tolerance = max(tolerance, ROUNDINGS * logit_error(torch.cat(saved), torch.cat(exact), scores=scores))
        except (RuntimeError, MemoryError) as error:
            # Without room for it in float32, the tolerance is the usual one.
            if not is_out_of_memory(error):
                raise
    record.write("saved", logit_error=share, tolerance=tolerance, device=device)
    # Written so that what is not a number does not pass.
    if share <= tolerance:
        return None
    return f"on {len(rows)} rows its logits are off by {share:.2%} of their spread (rounding: up to {tolerance:.2%})"


def logit_error(logits: torch.Tensor, reference: torch.Tensor, *, scores: bool = False) -> float:
    """Return the root mean square of the difference of logits as a share of their spread over the vocabulary.

    Args:
        logits: `(tokens, vocabulary)`, or scores, `(rows, labels)` or `(tokens, labels)`.
        reference: What they should be.
        scores: True for scores, whose largest difference is a share of the largest score or of 1.
    """
    if scores:
        return float((logits - reference).abs().max() / reference.abs().max().clamp_min(1.0))
    # Tokens that a model rules out have a logit of minus infinity.
    same = logits == reference
    difference = (logits - reference).masked_fill(same, 0)
    spread = (reference - reference.mean(-1, keepdim=True)).masked_fill(~reference.isfinite(), 0)
    return float(difference.square().mean().sqrt() / spread.square().mean().sqrt().clamp_min(1e-12))


def _load(plan: Plan, folder: Path | None, device: str) -> Any:
    """Load a saved model as others do: whole weights by Transformers, an adapter by PEFT on its base.

    Args:
        plan: Its types.
        folder: The saved model or adapter; None for the model as it was before training.
        device: Where it goes.
    """
    adapter, is_full = plan.recipe.adapter, isinstance(plan.recipe.adapter, FullAdapter)
    saved = plan.base
    if folder is not None and is_full:
        saved = ModelSection(path=str(folder), trust_remote_code=plan.base.trust_remote_code)
    model: Any = load_model(
        saved,
        dtype=plan.trained_dtype if is_full else plan.dtype,
        device=device,
        quantization=adapter if isinstance(adapter, QloraAdapter) else None,
        score_head=plan.recipe.method.score_head,
    )
    if plan.recipe.train.qat is not None:
        from tunekit.models.fake_quantization import to_fake_quantized

        to_fake_quantized(model, plan.recipe.train.qat)
    return (model if is_full or folder is None else PeftModel.from_pretrained(model, folder)).eval()


def _logits(model: Any, ids: list[int], device: torch.device | str) -> torch.Tensor:
    """Return the logits of a row, `(tokens, vocabulary)` or `(tokens, labels)`, or its scores, `(1, labels)`, in
    float32 on the CPU.
    """
    tokens = torch.tensor([ids], device=device)
    output: torch.Tensor = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    # PEFT alone gives virtual tokens logits too.
    return output.reshape(-1, output.shape[-1])[-len(ids) :].float().cpu()


def _device(plan: Plan) -> str | None:
    """Return where the saved model can be loaded beside the trained one; None where there is no room."""
    size = BYTES[plan.trained_dtype if isinstance(plan.recipe.adapter, FullAdapter) else plan.dtype]
    needed = SPARE_SHARE * size * plan.num_params + SPARE_BYTES
    if plan.device.kind == "cuda":
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] > needed:
            return "cuda"
    return "cpu" if host_cpu().memory_free_bytes > needed else None


@contextmanager
def _outside_of_engines(trainer: Any, plan: Plan) -> Iterator[None]:
    """Within it, Transformers loads whole models in this process: ZeRO-3 would divide them as they are read."""
    if plan.layout.strategy != "zero3":
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(trainer.args.hf_deepspeed_config)


def _skip(record: Record, why: str) -> None:
    if record.place.is_main:
        record.write("warning", message=f"the saved model was not compared with the trained one: {why}")
