"""Public estimators of training memory on the planner's held-out steps, beside the peaks that were traced.

    python -m benchmarks.planner --public [--save]
    python -m benchmarks.estimators [--environment FOLDER] [--save]

The steps are those of one device and of FSDP2 in `tests/estimates/grid*.py` that were set aside before tunekit's
formulas were fitted to the others; the traced peaks are those of `benchmarks/results/planner.json`. They are peaks of
tensors, so that an estimate is compared without those bytes that it names apart for the device's context, for
fragmentation or for safety; the results have both.

Accelerate's and DeepSpeed's functions are called here. The other packages are on PyPI, and have functions that take
sizes of a model and return the memory of a training step. pip installs the versions of `REQUIREMENTS` into an
environment of their own, without dependencies: what else they import is found in the environment of tunekit. A process
there answers questions (`benchmarks/estimator_tools.py`, which says what each tool is given).

The steps are tunekit's: they have TRL's loss head, which computes logits for some tokens at a time. A tool that counts
the logits of all tokens, as the loss of transformers has them, overestimates by these; where it names them, a second
row is without them. The traces are of the modules that tunekit runs, and not a measurement on a device.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModel

from benchmarks.circumstances import circumstances
from benchmarks.estimator_tools import ALL, TOOLS, Answer, Question, answer, require
from tests.estimates import grid, grid_shards
from tests.estimates.oracle import Step, built, estimate_of, facts_of
from tunekit.data.sources.rows import cache_folder
from tunekit.estimates.facts import ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

RESULTS = Path(__file__).parent / "results" / "estimators.json"
TRACED = RESULTS.with_name("planner.json")
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed")
REQUIREMENTS = {
    "fitcheck-llm": "0.3.1",
    "canifinetune": "0.4.1",
    "ftuneai": "0.4.1",
    "mlsysim": "0.3.0",
    "llm-analysis": "0.2.2",
    "ml-memguard": "0.5.0",
    "gpu-estimator": "0.2.0",
    "hf-vram-calc": "1.0.9",
    "qmemcalc": "0.1.1",
}
IMPORTED = {"fire": "0.7.1", "termcolor": "3.3.0", "pint": "0.25.3", "flexparser": "0.4", "flexcache": "0.3"}
"""Packages that these import, and that tunekit's environment does not have."""

Kind = Literal["one", "many"]
KIND_WORDS: Mapping[Kind, str] = {"one": "one device", "many": "FSDP2"}
STATE_BYTES = 16
"""Of each trained parameter: weight, gradient and Adam's two moments in float32."""
CLOSE = 0.1


@dataclass(frozen=True)
class Case:
    """A held-out step with its traced peak, and the same as a question."""

    kind: Kind
    name: str
    step: Step
    layout: Layout
    facts: ModelFacts
    question: Question
    traced_bytes: int

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer states in full fine-tuning."""
        return STATE_BYTES * self.question.num_parameters // self.question.num_shards


@dataclass(frozen=True)
class Row:
    """An estimate of one step."""

    estimator: str
    kind: Kind
    step: str
    traced_bytes: int
    tensor_bytes: int | None
    total_bytes: int | None
    error: float | None
    """Of the tensors, as a share of the traced peak."""
    states_error: float | None
    """Of the tensors, as a share of weights, gradients and optimizer states; for estimators of these alone."""
    reason: str | None


def cases() -> list[Case]:
    """Return the held-out steps of both grids."""
    stored = json.loads(TRACED.read_text(encoding="utf-8"))["rows"]
    peaks = {(row["kind"], row["step"]): row["traced_bytes"] for row in stored if row["held_out"]}
    sharded = [grid_shards.STEPS[place] for place in grid_shards.HELD_OUT]
    steps: list[tuple[Kind, str, Step, Layout]] = [
        *(("one", str(step), step, Layout()) for step in (grid.STEPS[place] for place in grid.HELD_OUT)),
        *(("many", str(step), step.step, step.layout) for step in sharded),
    ]
    return [case(kind, name, step, layout, peaks[kind, name]) for kind, name, step, layout in steps]


def case(kind: Kind, name: str, step: Step, layout: Layout, traced_bytes: int) -> Case:
    """Return a step as a question, with the numbers of parameters of its real modules."""
    facts = facts_of(step)
    with torch.device("meta"):
        model, _ = built(step)
    adapter = step.adapter
    lora = adapter if isinstance(adapter, LoraAdapter) else None
    assert lora or isinstance(adapter, FullAdapter)
    targets = () if lora is None else ALL if lora.target_modules == "all-linear" else tuple(sorted(lora.target_modules))
    modules: Counter[str] = Counter()
    for tensor, shape in facts.tensors.items():
        modules[tensor.rpartition(".")[0]] += math.prod(shape)
    question = Question(
        config=json.loads(step.config().to_json_string(use_diff=False)),
        num_parameters=modules.total(),
        num_trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        largest_layer=max(modules.values()),
        method="full" if lora is None else "dora" if lora.use_dora else "lora",
        batch=step.batch,
        length=step.length,
        checkpointing=step.checkpointing,
        precision="float32" if step.dtype == "float32" else "bfloat16",
        rank=0 if lora is None else lora.rank,
        targets=targets,
        trains_tables=lora is not None and bool(lora.modules_to_save),
        strategy="single" if layout.strategy == "single" else "fsdp2",
        num_shards=layout.dp_shard_size,
        reshards=layout.reshard_after_forward,
    )
    return Case(kind, name, step, layout, facts, question, traced_bytes)


def accelerate_rule(question: Question) -> Answer:
    """Ask `accelerate estimate-memory` for training with Adam under the step's mixed precision."""
    return _accelerate(question, question.precision)


def accelerate_float32_rule(question: Question) -> Answer:
    """Ask it for training in float32: four times the model."""
    return _accelerate(question, "float32")


def _accelerate(question: Question, precision: str) -> Answer:
    require(question, "full")
    config = AutoConfig.for_model(**question.config)
    # As its command makes it: without the head of a language model, in float32.
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.float32)
    model_bytes, _ = calculate_maximum_sizes(model)
    size = max(estimate_training_usage(model_bytes, precision).values())
    return Answer(size, size)


def zero2_rule(question: Question) -> Answer:
    """Ask DeepSpeed for ZeRO-2: one device, or weights that stay whole from forward to backward pass."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    require(question, "full", devices=not question.reshards)
    _, size = estimate_zero2_model_states_mem_needs(
        question.num_parameters, num_gpus_per_node=question.num_shards, cpu_offload=False
    )
    return Answer(size, size)


def zero3_rule(question: Question) -> Answer:
    """Ask DeepSpeed for ZeRO-3: weights are divided whenever they are not in use."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    require(question, "full", devices=True)
    if question.strategy == "single":
        return Answer(reason="one device")
    _, size, _ = estimate_zero3_model_states_mem_needs(
        question.num_parameters, question.largest_layer, num_gpus_per_node=question.num_shards, cpu_offload=False
    )
    return Answer(size, size)


RULES: Mapping[str, Callable[[Question], Answer]] = {
    "accelerate estimate-memory": accelerate_rule,
    "accelerate estimate-memory, float32": accelerate_float32_rule,
    "DeepSpeed ZeRO-2": zero2_rule,
    "DeepSpeed ZeRO-3": zero3_rule,
}
"""Functions that tunekit's environment has. They are of weights, gradients and optimizer states alone."""


def planned(case: Case) -> Answer:
    """Return tunekit's own estimate."""
    memory = estimate_of(case.step, case.layout, case.facts)
    return Answer(memory.tensor_bytes, memory.total_bytes)


def environment(folder: Path) -> Path:
    """Return the Python of an environment with the packages of `REQUIREMENTS`, made where there is none."""
    pins = [f"{name}=={version}" for name, version in {**REQUIREMENTS, **IMPORTED}.items()]
    key = hashlib.sha256("\n".join([sys.executable, *pins]).encode()).hexdigest()[:12]
    place = folder / key
    scripts = "Scripts" if os.name == "nt" else "bin"
    python, complete = place / scripts / Path(sys.executable).name, place / "complete"
    if not complete.exists():
        venv.create(place, clear=True, symlinks=os.name != "nt")
        [packages] = place.glob("Lib/site-packages" if os.name == "nt" else "lib/*/site-packages")
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", *pins]
        subprocess.run(install, check=True)
        # After their own ones: what they import of tunekit's environment.
        (packages / "tunekit.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
        complete.touch()
    return python


def ask(python: Path, tool: str, questions: Sequence[Question]) -> list[Answer]:
    """Ask one tool in a process of its environment, without network."""
    script = Path(__file__).with_name("estimator_tools.py")
    with tempfile.TemporaryDirectory() as cache:
        # Nothing of the user's environment, such as tokens.
        variables = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "TMPDIR") if name in os.environ}
        variables |= {"HOME": cache, "HF_HUB_CACHE": cache, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            [str(python), "-I", str(script), tool],
            input=json.dumps([asdict(question) for question in questions]),
            capture_output=True,
            env=variables,
            encoding="utf-8",
            check=False,
        )
    if process.returncode:
        raise RuntimeError(f"{tool}: {process.stderr.strip()[-2000:]}")
    return [Answer(**entry) for entry in json.loads(process.stdout)]


def rows_of(estimator: str, steps: Sequence[Case], answers: Sequence[Answer], *, states: bool = False) -> list[Row]:
    """Return what an estimator answered beside the traces.

    Args:
        estimator: Its name.
        steps: What it was asked.
        answers: In the order of the steps.
        states: True if it counts weights, gradients and optimizer states alone.
    """
    rows = []
    for case, reply in zip(steps, answers, strict=True):
        size = reply.tensor_bytes
        rows.append(
            Row(
                estimator=estimator,
                kind=case.kind,
                step=case.name,
                traced_bytes=case.traced_bytes,
                tensor_bytes=size,
                total_bytes=reply.total_bytes,
                error=None if size is None else size / case.traced_bytes - 1,
                states_error=size / case.state_bytes - 1 if states and size is not None else None,
                reason=reply.reason,
            )
        )
    return rows


def summaries(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return what the rows of each estimator come to, by kind of steps."""
    groups: dict[tuple[str, Kind], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.estimator, row.kind].append(row)
    return [_summary(estimator, kind, members) for (estimator, kind), members in groups.items()]


def _summary(estimator: str, kind: Kind, rows: Sequence[Row]) -> dict[str, Any]:
    errors = [row.error for row in rows if row.error is not None]
    return {
        "estimator": estimator,
        "kind": kind,
        "num_steps": len(rows),
        "num_answered": len(errors),
        "median_error": _median(errors),
        "worst_error": max(errors, key=abs, default=None),
        "share_within_10_percent": sum(abs(error) <= CLOSE for error in errors) / len(errors) if errors else None,
        "median_error_of_states": _median([row.states_error for row in rows if row.states_error is not None]),
        "not_answered": dict(Counter(row.reason for row in rows if row.reason).most_common()),
    }


def _median(errors: Sequence[float]) -> float | None:
    return statistics.median(map(abs, errors)) if errors else None


def show(summary: Sequence[dict[str, Any]]) -> None:
    """Print one table, then what the numbers leave out, a line for each estimator."""
    table = Table(box=None)
    table.add_column("estimator", no_wrap=True)
    for kind in KIND_WORDS.values():
        for name in (kind, "median", "worst", "within 10 %"):
            table.add_column(name, no_wrap=True, justify="right")
    entries: dict[str, dict[Kind, dict[str, Any]]] = defaultdict(dict)
    for entry in summary:
        entries[entry["estimator"]][entry["kind"]] = entry
    for estimator, by_kind in entries.items():
        table.add_row(estimator, *(cell for kind in KIND_WORDS for cell in _cells(by_kind[kind])))
    Console(width=160).print(table)
    for estimator, by_kind in entries.items():
        if notes := [note for kind, entry in by_kind.items() for note in _notes(KIND_WORDS[kind], entry)]:
            print(f"{estimator}: {'; '.join(notes)}")


def _notes(words: str, entry: Mapping[str, Any]) -> list[str]:
    notes = []
    if entry["median_error_of_states"] is not None:
        notes.append(f"{words}, beside the states alone: median {entry['median_error_of_states']:.1%}")
    return notes + [f"{words}, {number} not answered: {reason}" for reason, number in entry["not_answered"].items()]


def _cells(entry: Mapping[str, Any]) -> list[str]:
    answered = f"{entry['num_answered']} of {entry['num_steps']}"
    if not entry["num_answered"]:
        return [answered, "", "", ""]
    share = f"{entry['share_within_10_percent']:.0%}"
    return [answered, f"{entry['median_error']:.2%}", f"{entry['worst_error']:+.1%}", share]


def compare(folder: Path | None = None, *, save: bool = False) -> None:
    """Ask every estimator, show and, where wanted, save.

    Args:
        folder: Where environments of the packages are; by default in tunekit's cache folder.
        save: True to write `RESULTS`.
    """
    warnings.simplefilter("ignore")
    python = environment(folder or cache_folder() / "estimators")
    steps = cases()
    questions = [case.question for case in steps]
    rows = rows_of("tunekit", steps, [planned(case) for case in steps])
    for name, rule in RULES.items():
        rows += rows_of(name, steps, [answer(rule, question) for question in questions], states=True)
    for name in TOOLS:
        answers = ask(python, name, questions)
        rows += rows_of(f"{name} {REQUIREMENTS[name]}", steps, answers)
        if any(reply.no_logits_bytes for reply in answers):
            without = [replace(reply, tensor_bytes=reply.no_logits_bytes, total_bytes=None) for reply in answers]
            rows += rows_of(f"{name} {REQUIREMENTS[name]}, without logits", steps, without)
    summary = summaries(rows)
    show(summary)
    if save:
        traced = json.loads(TRACED.read_text(encoding="utf-8"))["traced"]
        report = {**circumstances(PACKAGES), "estimators": REQUIREMENTS}
        report |= {"traced": {kind: traced[kind] for kind in KIND_WORDS}}
        report |= {"summary": summary, "rows": [asdict(row) for row in rows]}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, metavar="FOLDER", help="where the packages are installed")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    compare(arguments.environment, save=arguments.save)


if __name__ == "__main__":
    main()
