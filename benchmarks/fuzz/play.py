"""Train a drawn recipe with tunekit, and hold what came of it against the reference."""

import contextlib
import json
import math
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from benchmarks.exact import Cut
from benchmarks.fuzz.models import save_adapter, save_model
from benchmarks.fuzz.recipes import Case, drawn
from benchmarks.fuzz.reference import Expected, Given, Reference, loaded, plain, round_to_nf4
from tests.processes import in_processes
from tunekit.errors import TunekitError


class Tolerance(NamedTuple):
    """Largest differences that count as none, each relative to the value, or to 1 where that is larger.

    Attributes:
        loss: Of a step's loss, and of an evaluation.
        norm: Of the norm of the gradients.
        gradient: Of a gradient of the first step, as a share of the largest of its tensor or, where that is more, of a
            thousandth of the largest of all (in bfloat16 of its rounding, 2**-8).
        weights: Of the saved weights that have gradients, as a share of how far training moved them.
        probe: Of the loss of the saved model on the first rows.
    """

    loss: float
    norm: float
    gradient: float
    weights: float
    probe: float


TOLERANCES = {
    "float32": Tolerance(loss=2e-5, norm=2e-4, gradient=1e-3, weights=2e-2, probe=2e-5),
    "bfloat16": Tolerance(loss=3e-2, norm=0.3, gradient=0.5, weights=math.inf, probe=5e-2),
}
"""By the type that a model computes in."""

NOISE = 1e-6
"""Largest gradient that is rounding, as a share of the largest of all."""

STEP = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
"""Largest rounding of a weight, as a share of it, by type."""

AMPLIFIED = 16
"""Number of such roundings that a difference may be: training rounds in each operation, not once."""

NUM_NOISY = 3
"""References with rounded weights, of which the largest difference counts."""

RATE = 1e-9
"""Largest difference of a learning rate, as a share of the peak."""


@dataclass
class Seen:
    """Inputs, gradients and steps that a process saw from outside of a training.

    Attributes:
        start: Trained parameters at the first step by plain name.
        gradients: Their gradients when the optimizer takes the first step.
        steps: Token ids of the sequences of each step, by steps before it.
    """

    start: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextlib.contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Note what models are trained on within it; nothing is replaced but calls by themselves."""
    from torch.nn import Module

    from tunekit.training.callbacks import Watch

    call, begin = Module.__call__, Watch.on_step_begin
    at: list[int] = []
    inside: list[Any] = []
    model: list[Any] = []

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, PreTrainedModel) or inside:
            return call(module, *args, **kwargs)
        if at and module.training and torch.is_grad_enabled():
            if not model:
                model.append(module)
            if not seen.start and at[-1] == 0:
                seen.start = {plain(name): _whole(p) for name, p in module.named_parameters() if p.requires_grad}
            seen.steps.setdefault(at[-1], []).extend(documents(*args, **kwargs))
        inside.append(module)
        try:
            return call(module, *args, **kwargs)
        finally:
            inside.pop()

    def at_begin(self: Any, args: Any, state: Any, *others: Any, **kwargs: Any) -> Any:
        at[:] = [state.global_step]
        seen.steps.pop(state.global_step, None)
        return begin(self, args, state, *others, **kwargs)

    def before_step(optimizer: Any, *_: Any) -> None:
        if at and at[-1] == 0 and not seen.gradients and model:
            parameters = [(name, p) for name, p in model[0].named_parameters() if p.requires_grad]
            seen.gradients = {plain(name): _whole(p.grad) for name, p in parameters if p.grad is not None}

    Module.__call__, Watch.on_step_begin = called, at_begin  # type: ignore[method-assign,assignment]
    hook = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        hook.remove()
        Module.__call__, Watch.on_step_begin = call, begin  # type: ignore[method-assign]


def documents(input_ids: Any = None, **inputs: Any) -> Iterator[tuple[int, ...]]:
    """The sequences of a micro-batch."""
    if input_ids is None:
        return
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is None and positions is not None:
        ids, starts = input_ids.flatten(), (positions.flatten() == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            yield tuple(ids[start:end].tolist())
        return
    for i, row in enumerate(input_ids):
        yield tuple((row if mask is None else row[mask[i].bool()]).tolist())


def attempt(folder: str, cut: int | None) -> Seen:
    """Work on a run as one of its processes, up to a cut if there is one."""
    from benchmarks import exact

    record = Seen()
    with watched(record):
        exact.attempt(folder, None if cut is None else Cut(cut))
    return record


def attempt_apart(folder: str, cut: int | None) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Do the same in a process of its own, and return what it saw as arrays, which outlive it."""
    record = attempt(folder, cut)
    parts = (record.start, record.gradients)
    # NumPy has no bfloat16.
    start, gradients = ({name: value.float().numpy() for name, value in part.items()} for part in parts)
    return start, gradients, record.steps


def recipe_of(case: Case, folder: Path) -> dict[str, Any]:
    """The recipe of a case, with its files in a folder."""
    recipe = json.loads(json.dumps(case.recipe))
    recipe["model"]["path"] = str(save_model(folder / "model", case.model))
    if "continues" in case.model:
        seed = case.model["continues"]
        adapter = save_adapter(folder / "adapter", folder / "model", recipe["adapter"], seed)
        recipe["model"]["path"] = str(adapter)
    files = [_write(folder / f"train-{i}", rows, case.shape) for i, rows in enumerate(case.train_rows)]
    recipe["data"]["train"] = files[0] if len(files) == 1 else [{"path": file} for file in files]
    if case.eval_rows:
        recipe["data"]["eval"] = _write(folder / "eval", case.eval_rows, case.shape)
    recipe["output"] = {"dir": str(folder / "run"), "sample_prompts": []}
    return recipe


ROLES = {"user": "human", "assistant": "gpt", "system": "system"}
"""Roles of messages by the names that ShareGPT has for them."""


def _write(path: Path, rows: Sequence[Mapping[str, Any]], shape: str) -> str:
    if shape == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path.with_suffix(".parquet"))
        return str(path.with_suffix(".parquet"))
    if shape == "json":
        path.with_suffix(".json").write_text(json.dumps(rows), encoding="utf-8")
        return str(path.with_suffix(".json"))
    if shape == "sharegpt":
        conversations = ([dict(turn) for turn in row["messages"]] for row in rows)
        rows = [
            {
                "conversations": [
                    {"from": ROLES[turn.pop("role")], "value": turn.pop("content"), **turn} for turn in turns
                ]
            }
            for turns in conversations
        ]
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")
    return str(path.with_suffix(".jsonl"))


@dataclass
class Result:
    """Verdict on a case, with its figures.

    Attributes:
        seed: The integer that it was drawn from.
        verdict: `same`, `different`, `refused`, or `crash`.
        detail: Differences, the message of a refusal, or the error.
        figures: Largest differences by what they are of.
        recipe: The drawn recipe, and the model.
        seconds: Time of the run and of all.
    """

    seed: int
    verdict: str
    detail: str
    figures: dict[str, float]
    recipe: dict[str, Any]
    seconds: float

    def line(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps(vars(self), ensure_ascii=False)


def played(seed: int, folder: Path) -> Result:
    """Train the case of a seed, compare, and say what came of it."""
    case, began = drawn(seed), time.perf_counter()
    sections = {**case.recipe, "model": {**case.recipe["model"], **case.model}, "cuts": list(case.cuts)}
    try:
        verdict, detail, figures = _verdict(case, folder)
    except Exception:  # noqa: BLE001 - whatever it is, it is what the fuzzer looks for
        verdict, detail, figures = "crash", traceback.format_exc()[-3000:], {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Result(seed, verdict, detail, figures, sections, round(time.perf_counter() - began, 2))


def _verdict(case: Case, folder: Path) -> tuple[str, str, dict[str, float]]:
    from tunekit.api import verbs

    folder.mkdir(parents=True, exist_ok=True)
    recipe = recipe_of(case, folder)
    try:
        run = verbs.make_run(recipe)
    except TunekitError as error:
        return "refused", str(error).replace(str(folder), ""), {}
    seen = train(case, run)
    inputs = given_of(case, folder, recipe, run, seen)
    expected = Reference(inputs).run()
    figures = dict(differences(recipe, folder / "model", run, seen, expected))
    shown = {name: value for name, (value, _, _) in figures.items()}
    worst = {name: figure for name, figure in figures.items() if not figure[0] <= figure[2]}
    if not worst:
        return "same", "", shown
    # A recipe may amplify rounding: steps that are too large, a loss in the millions.
    spread = {name: AMPLIFIED * value for name, value in spread_of(inputs, expected).items()}
    words = [
        f"{name} {value:.3g} (step or name: {where}; rounding up to {spread.get(name, 0):.2g})"
        for name, (value, where, _) in worst.items()
    ]
    is_rounding = all(value <= spread.get(name, 0.0) for name, (value, _, _) in worst.items())
    return ("same" if is_rounding else "different"), "; ".join(words), shown


def spread_of(given: Given, expected: Expected) -> dict[str, float]:
    """Return how far the reference's own figures move where its weights are rounded before the first step."""
    spread: Counter[str] = Counter()
    for seed in range(NUM_NOISY):
        noisy = Reference(given, noise=STEP[given.recipe["model"]["dtype"]], seed=seed).run()
        steps = range(1, len(expected.losses) + 1)
        moved = {
            "loss": _worst(zip(noisy.losses, expected.losses, steps, strict=True)),
            "grad_norm": _worst(zip(noisy.grad_norms, expected.grad_norms, steps, strict=True), least=1e-2),
            "eval_loss": _worst((noisy.evaluated[step], loss, step) for step, loss in expected.evaluated.items()),
            "weights": _weights_apart(noisy.after, expected),
            "saved loss": _worst([(noisy.probe, expected.probe, "saved")]),
        }
        spread |= Counter({name: value for name, (value, _) in moved.items()})
    return dict(spread)


def train(case: Case, run: Any) -> Seen:
    """Train a run, in one go or with its cuts, and return what its first process saw, with the rows of all."""
    from tunekit.launching.local import launch
    from tunekit.runs.small_files import forget_request

    whole = Seen()
    for cut in (*case.cuts, None):
        forget_request(run.path)
        if case.num_processes > 1:
            parts = [
                Seen(*({name: torch.from_numpy(value) for name, value in part.items()} for part in tensors), steps)
                for *tensors, steps in in_processes(case.num_processes, attempt_apart, str(run.path.resolve()), cut)
            ]
        elif case.cuts:
            parts = [attempt(str(run.path), cut)]
        else:
            parts = [Seen()]
            with watched(parts[0]):
                launch(run, None)
        whole.start, whole.gradients = whole.start or parts[0].start, whole.gradients or parts[0].gradients
        for step in parts[0].steps:
            whole.steps[step] = [ids for part in parts for ids in part.steps[step]]
    return whole


def given_of(case: Case, folder: Path, recipe: Mapping[str, Any], run: Any, seen: Seen) -> Given:
    """The inputs of the reference."""
    from transformers import AutoTokenizer

    borrows = bool(recipe["data"].get("packing")) or len(case.train_rows) > 1
    steps = None
    if borrows:
        pad = AutoTokenizer.from_pretrained(folder / "model").pad_token_id
        steps = {step: [ids for ids in rows if ids != (pad,)] for step, rows in seen.steps.items()}
    return Given(
        recipe=recipe,
        model=folder / "model",
        adapter=folder / "adapter" if "continues" in case.model else None,
        train_rows=case.train_rows,
        eval_rows=case.eval_rows,
        start=seen.start,
        steps=steps,
        num_steps=run.plan.schedule.num_steps if borrows and "max_steps" not in recipe["train"] else None,
    )


Figures = Iterator[tuple[str, tuple[float, Any, float]]]
"""Largest difference by what it is of, with where it is and how large it may be."""


def differences(recipe: Mapping[str, Any], model: Path, run: Any, seen: Seen, expected: Expected) -> Figures:
    """Compare a run with the reference."""
    tolerance = TOLERANCES[recipe["model"]["dtype"]]
    logs = {event["step"]: event for event in run.events() if event["event"] == "log" and "loss" in event}
    evals = {event["step"]: event["eval_loss"] for event in run.events() if event["event"] == "eval"}
    often, num = recipe["train"].get("logging_steps", 1), len(expected.losses)
    due = [step for step in range(1, num + 1) if step % often == 0]
    yield "logged steps", (float(sorted(logs) != due), [sorted(logs), due], 0.0)
    yield "evaluated steps", (float(set(evals) != set(expected.evaluated)), [sorted(evals)], 0.0)
    due = [step for step in due if step in logs]
    means = {step: sum(expected.losses[step - often : step]) / often for step in due}
    yield "loss", (*_worst((logs[step]["loss"], means[step], step) for step in due), tolerance.loss)
    norms = ((logs[step]["grad_norm"], expected.grad_norms[step - 1], step) for step in due)
    yield "grad_norm", (*_worst(norms, least=1e-2), tolerance.norm)
    rates = ((logs[step]["learning_rate"], expected.rates[step - 1], step) for step in due)
    yield "learning_rate", (*_worst(rates, least=recipe["train"]["learning_rate"]), RATE)
    # What fills an epoch's last micro-batches is counted as a token each (`tests/training/test_equality.py`).
    fill = [sum(len(ids) == 1 for ids in seen.steps.get(step, ())) for step in range(num)]
    counts = ((logs[step]["num_tokens"], expected.tokens[step - 1] + sum(fill[:step]), step) for step in due)
    yield "num_tokens", (*_worst(counts), 0.0)
    at_once = recipe["train"]["micro_batch_size"] * recipe.get("parallel", {}).get("num_processes", 0)
    yield "filled", (float(max(fill, default=0)), "rows", float(max(0, at_once - 1)))
    both = set(evals) & set(expected.evaluated)
    yield "eval_loss", (*_worst((evals[step], expected.evaluated[step], step) for step in sorted(both)), tolerance.loss)
    yield "rows", _other_rows(seen, expected)
    floor = max(1e-3, STEP[recipe["model"]["dtype"]] * 2)
    yield "gradient", (*_tensors(seen.gradients, expected.gradients, floor), tolerance.gradient)
    yield from _of_saved(recipe, reloaded(recipe, model, run.path / "model"), expected, tolerance)


def _of_saved(recipe: Mapping[str, Any], model: Any, expected: Expected, tolerance: Tolerance) -> Figures:
    """Compare the saved model, read by transformers and PEFT alone."""
    if recipe["adapter"].get("init_lora_weights") in ("pissa", "olora"):
        # What is saved is another adapter that computes the same.
        yield "saved loss", (*_worst([(expected.probe_of(model), expected.probe, "saved")]), tolerance.probe)
        return
    state = {plain(name): value for name, value in model.named_parameters() if "original_module" not in name}
    missing = sorted(set(expected.after) - set(state))
    yield "saved names", (float(len(missing)), missing[:3], 0.0)
    yield "weights", (*_weights_apart(state, expected), tolerance.weights)
    yield "saved loss", (*_worst([(expected.probe_of(model), expected.probe, "saved")]), tolerance.probe)


def _weights_apart(state: Mapping[str, torch.Tensor], expected: Expected) -> tuple[float, str]:
    """Return the difference of trained weights as a share of how far training moved them, and where it is largest."""
    largest = max((float(value.max()) for value in expected.largest.values()), default=0.0)
    moved, apart = {}, {}
    for name, after in expected.after.items():
        if name in state and name in expected.largest:
            # Adam moves a value by the sign of its gradient, also where that is rounding: a bias of keys has none.
            counts = expected.largest[name] > NOISE * largest
            moved[name] = float((after - expected.before[name])[counts].square().sum())
            apart[name] = float((state[name].detach().float() - after)[counts].square().sum())
    share = math.sqrt(sum(apart.values()) / total) if (total := sum(moved.values())) else float(sum(apart.values()))
    return share, max(apart, key=lambda name: apart[name], default="")


def reloaded(recipe: Mapping[str, Any], model: Path, folder: Path) -> Any:
    """The model that a run saved, as transformers and PEFT read it."""
    from peft import PeftModel

    kind = recipe["method"]["type"]
    if recipe["adapter"]["type"] == "full":
        return loaded(folder, kind).eval()
    base = loaded(model, kind, recipe["model"].get("rope_scaling"))
    if recipe["adapter"]["type"] == "qlora":
        round_to_nf4(base)
    if recipe["model"]["dtype"] == "bfloat16":
        for parameter in base.parameters():
            parameter.data = parameter.data.bfloat16().float()
    return PeftModel.from_pretrained(base, folder).eval()


def _worst(values: Any, least: float = 1.0) -> tuple[float, Any]:
    """The largest relative difference of pairs of numbers, and where it is."""
    worst, where = 0.0, None
    for one, other, at in values:
        apart = abs(one - other) / max(least, abs(other))
        if not apart <= worst:
            worst, where = apart, f"{at}: {one!r} and {other!r}"
    return worst, where


def _other_rows(seen: Seen, expected: Expected) -> tuple[float, Any, float]:
    """The number of steps that were trained on other sequences, and the first of them."""
    other = [
        step for step, rows in enumerate(expected.rows)
        if sorted(rows) != sorted(ids for ids in seen.steps.get(step, []) if len(ids) > 1)
    ]  # fmt: skip
    return float(len(other)), other[:3], 0.0


def _tensors(these: Mapping[str, torch.Tensor], those: Mapping[str, torch.Tensor], floor: float) -> tuple[float, Any]:
    if set(these) != set(those):
        return math.inf, sorted(set(these) ^ set(those))[:4]
    largest = max((float(value.abs().max()) for value in those.values()), default=0.0)
    worst, where = 0.0, ""
    for name, value in those.items():
        scale = max(float(value.abs().max()), floor * largest)
        share = float((these[name].float() - value).abs().max()) / scale if scale else 0.0
        if not share <= worst:
            worst, where = share, name
    return worst, where
