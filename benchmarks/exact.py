"""Is a run that was cut off and gone on with the same as one that was not, bit for bit? For every method, in any place.

    python -m benchmarks.exact [--only WORDS ...] [--save]

Each case is trained twice from the same recipe, with the same checkpoints: once in one go, and once cut off at each of
its places, from where it goes on in fresh processes. Compared are the weights that are saved, every file of the last
checkpoint (optimizer, schedule, random numbers of each process, what the trainer keeps besides), the losses and all
else that is logged of each step but times, and the evaluations. Nothing may differ, not by a bit.

A case is cut `at 3` when step 4 is about to begin, and `in 3` within it, behind its first micro-batch.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.circumstances import in_words
from tests.processes import in_processes
from tests.tiny import save_tiny_model
from tests.training.engines import made
from tunekit.errors import Stopped, TunekitError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "exact.md"
PACKAGES = ("tunekit", "torch", "transformers", "trl", "accelerate", "deepspeed")

NUM_ROWS = 22
BATCH = 8
"""Two steps of 8 rows and one of 6 are an epoch."""

TIMES = ("seconds", "_per_second", "time", "mfu")
"""How names of what is measured, and not computed, end."""


@dataclass(frozen=True)
class Cut:
    """Where a run is cut off after so many steps, and how.

    Attributes:
        step: Steps before.
        where: At the beginning of the next one, within it, or while its checkpoint is saved.
        by: Losing its power, or SIGTERM: to one process, to all, or twice, which leaves no time for a checkpoint.
    """

    step: int
    where: Literal["at", "in", "saving"] = "at"
    by: Literal["power", "one", "all", "twice"] = "power"

    def __str__(self) -> str:
        sent = {"power": "", "one": "SIGTERM to one ", "all": "SIGTERM ", "twice": "SIGTERM twice "}
        return f"{sent[self.by]}{self.where} {self.step}"


@dataclass(frozen=True, eq=False)
class Case:
    """What is trained, and where it is cut off.

    Attributes:
        name: What it is called.
        method: Section of the recipe, as the following.
        adapter: ...
        data: What is changed in it.
        train: What is changed in it.
        parallel: ...
        plan: What is changed in the plan.
        cuts: One after the other.
        steps: Of the whole run.
        num_sources: Files that the rows are divided among.
        apart: Whether it is done in processes of their own; otherwise in this one, whose processes may have others.
    """

    name: str
    method: Mapping[str, Any] = field(default_factory=lambda: {"type": "sft"})
    adapter: Any = "full"
    data: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = (Cut(2),)
    steps: int = 5
    num_sources: int = 1
    apart: bool = True

    @property
    def num_processes(self) -> int:
        """Processes that it takes."""
        return int(self.parallel.get("num_processes", 1))


def rows_of(kind: str, num_rows: int, first: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of very different lengths."""
    for n in range(first, first + num_rows):
        question, answer = "?" * (1 + n * 7 % 23), f"{n * n} is " + "ok " * (n * n * 5 % 19)
        match kind:
            case "sft":
                turns = (("user", question), ("assistant", answer))
                yield {"messages": [{"role": role, "content": content} for role, content in turns]}
            case "kto":
                yield {"prompt": question, "completion": answer, "label": n % 3 > 0}
            case "dpo" | "orpo" | "cpo" | "reward":
                yield {"prompt": question, "chosen": answer, "rejected": "no " * (1 + n * 3 % 7)}
            case _:
                yield {"prompt": question}


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def recipe_of(case: Case, folder: Path, name: str) -> dict[str, Any]:
    """The recipe of a case, whose files are made in a folder where they are not there yet."""
    if not (folder / "model").exists():
        save_tiny_model(folder / "model", hidden=32)
    kind, num = str(case.method["type"]), case.num_sources
    files = [
        _write(folder / f"{kind}-{part}-of-{num}.jsonl", rows_of(kind, NUM_ROWS // num, part * 100))
        for part in range(num)
    ]
    data = {"train": files[0] if num == 1 else [{"path": file} for file in files], "max_length": 96, **case.data}
    if "sources" in data:
        data["train"] = [{"path": file, **more} for file, more in zip(files, data.pop("sources"), strict=True)]
    if data.get("eval") is True:
        data["eval"] = _write(folder / f"{kind}-eval.jsonl", rows_of(kind, 6, 1000))
    method = dict(case.method)
    if kind == "distillation":
        method["teacher"] = str(folder / "model")
    return {
        "model": str(folder / "model"),
        "data": data,
        "method": method,
        "adapter": case.adapter,
        "train": {
            "max_steps": case.steps,
            "global_batch_size": BATCH,
            "micro_batch_size": 2,
            "learning_rate": 3e-3,
            "save_steps": 1,
            **case.train,
        },
        "parallel": dict(case.parallel),
        "output": {"sample_prompts": [] if kind == "reward" else ["hi"], "dir": str(folder / name)},
    }


def force(plan: Path, changes: Mapping[str, Any]) -> None:
    """Change a plan, and in its sections what is given of them."""
    values = yaml.safe_load(plan.read_text(encoding="utf-8"))
    for name, value in changes.items():
        values[name] = {**values[name], **value} if isinstance(value, Mapping) else value
    plan.write_text(yaml.safe_dump(values), encoding="utf-8")


class PowerCut(Exception):
    """What ends a run that nothing else ends."""


def attempt(folder: str, cut: Cut | None) -> None:
    """Work on a run as one of its processes, up to a cut if there is one."""
    if os.environ.get("WORLD_SIZE") == "1":
        # It is started by nobody, as a run in one process is.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    from tests.training.engines import worked
    from tunekit.process.signals import SAME_SECONDS
    from tunekit.training.callbacks import Watch
    from tunekit.training.checkpointing.restore import Carried

    begin, save = Watch.on_step_begin, Carried._save
    rank = int(os.environ.get("RANK", "0"))

    def end_there(step: int, where: str) -> None:
        if cut is None or (cut.step, cut.where) != (step, where):
            return
        if cut.by == "power":
            raise PowerCut
        if cut.by == "all" or rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if cut.by == "twice":
            time.sleep(2 * SAME_SECONDS)
            os.kill(os.getpid(), signal.SIGTERM)

    def at_begin(self: Watch, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        end_there(state.global_step, "at")
        begin(self, args, state, *others, **kwargs)

    def within(self: Watch, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        end_there(state.global_step, "in")

    def saving(self: Carried, save_random: Callable[..., Any], folder: str) -> None:
        end_there(self.trainer.state.global_step, "saving")
        save(self, save_random, folder)

    Watch.on_step_begin = at_begin  # type: ignore[method-assign]
    Watch.on_substep_end = within  # type: ignore[method-assign]
    Carried._save = saving  # type: ignore[method-assign]
    try:
        # Behind the last step nothing begins but saving.
        worked(Path(folder), lambda trainer: end_there(trainer.state.global_step, "at"))
    except (PowerCut, Stopped):
        assert cut is not None
        return
    finally:
        Watch.on_step_begin, Carried._save = begin, save  # type: ignore[method-assign]
        del Watch.on_substep_end
    assert cut is None, f"it was not cut off {cut}"


def played(case: Case, folder: Path) -> list[str]:
    """Train a case in one go and in several; what differs between the two, in words."""
    from tunekit.runs.run import Run
    from tunekit.runs.small_files import forget_request

    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "-" for letter in case.name)
    runs = []
    for kind, cuts in (("calm", ()), ("cut", case.cuts)):
        run = Run(made(recipe_of(case, folder, f"{name}-{kind}-{os.getpid()}")))
        force(run.path / "plan.yaml", case.plan)
        for cut in (*cuts, None):
            forget_request(run.path)
            if case.apart:
                in_processes(case.num_processes, attempt, str(run.path), cut)
            else:
                attempt(str(run.path), cut)
        runs.append(run)
    return list(differences(*runs))


def differences(calm: Any, cut: Any) -> Iterator[str]:
    """What is not the same in two runs, in words."""
    for (name, one), (_, other) in zip(_logged(calm).items(), _logged(cut).items(), strict=False):
        if one != other:
            first = next((step for step in one if one[step] != other.get(step)), "another number of steps")
            yield f"{name} at step {first}: {one.get(first)} and {other.get(first)}"
    if calm.result()["num_tokens"] != cut.result()["num_tokens"]:
        yield f"num_tokens: {calm.result()['num_tokens']} and {cut.result()['num_tokens']}"
    yield from _differing_files(calm.path / "model", cut.path / "model")
    folders = [max((run.path / "checkpoints").glob("checkpoint-*"), key=_step) for run in (calm, cut)]
    if folders[0].name != folders[1].name:
        yield f"the last are {folders[0].name} and {folders[1].name}"
    yield from _differing_files(*folders)


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _logged(run: Any) -> dict[str, dict[int, Any]]:
    """What is logged under each name by step, but times."""
    found: dict[str, dict[int, Any]] = {}
    for event in run.events():
        if event["event"] in ("log", "eval"):
            for name, value in event.items():
                if not name.endswith(TIMES):
                    found.setdefault(f"{event['event']} {name}", {})[event["step"]] = value
    return dict(sorted(found.items()))


IGNORED = (
    "training_args.bin",
    "manifest.json",
    "README.md",
    "trainer_state.json",
    "recipe.yaml",
    "plan.yaml",
    ".metadata",
)
"""Files of a checkpoint or a result that hold paths and times besides; what is logged is compared elsewhere."""


def _differing_files(one: Path, other: Path) -> Iterator[str]:
    import torch

    names = [
        {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} for folder in (one, other)
    ]
    if names[0] != names[1]:
        yield f"files {sorted(names[0] ^ names[1])} are in one of them"
    for name in sorted(names[0] & names[1]):
        if Path(name).name in IGNORED or (one / name).read_bytes() == (other / name).read_bytes():
            continue
        if Path(name).name == "adapter_config.json":
            # PEFT writes names out of a set, in another order in each interpreter.
            configs = [json.loads((folder / name).read_text(encoding="utf-8")) for folder in (one, other)]
            yield from (
                f"{name}: {key} differs" for key in configs[0] if _sorted(configs[0][key]) != _sorted(configs[1][key])
            )
            continue
        if not name.endswith((".pt", ".pth")):
            yield f"{name} differs"
            continue
        # Of the same content there are several files: what is the same object is written once.
        loaded = [torch.load(folder / name, weights_only=False, map_location="cpu") for folder in (one, other)]
        yield from (f"{name}: {where} differs" for where in _unlike(*loaded, ""))


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _unlike(one: Any, other: Any, where: str) -> Iterator[str]:
    """Where two nested things differ."""
    import numpy as np
    import torch

    if type(one) is not type(other):
        yield where
    elif isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield where
    elif isinstance(one, np.ndarray):
        if not np.array_equal(one, other):
            yield where
    elif isinstance(one, Mapping):
        if list(one) != list(other):
            yield where
        else:
            for key in one:
                yield from _unlike(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield where
        for place, (this, that) in enumerate(zip(one, other, strict=False)):
            yield from _unlike(this, that, f"{where}/{place}")
    elif one != other:
        yield f"{where} ({one} and {other})"


LORA = {"type": "lora", "rank": 4, "dropout": 0.2}
REWARDED: dict[str, Any] = {
    "rewards": ["tests.training.answers:reward"],
    "num_generations": 4,
    "max_completion_length": 8,
}
GRPO = {"type": "grpo", **REWARDED}
DYNAMIC = {**GRPO, "rewards": ["tests.training.answers:reward_of_some"], "max_resample_times": 2}
REPLAY = {**GRPO, "rewards": ["tests.training.answers:reward_of_some"], "replay_buffer_size": 8}
RLOO = {"type": "rloo", **REWARDED}
DPO = {"type": "dpo"}
BEFOREHAND = {"precompute_ref_log_probs": True}
DISTILLATION = {"type": "distillation", "max_completion_length": 8}
FOLLOWING = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
DDP = {"num_processes": 2, "strategy": "ddp"}
STREAM = {"streaming": True}
EVERYWHERE = (Cut(1, "in"), Cut(3), Cut(4, "in"))
"""Within an accumulation, at the end of the first epoch, and in the middle of the second."""
TWICE = (Cut(1, "in"), Cut(3))
"""The first two of them."""

WITHIN: dict[str, Any] = {
    "train": {"save_steps": 2},
    "plan": {"schedule": {"save_steps": 1}},
    "cuts": (Cut(1), Cut(3, "in")),
    "steps": 4,
}
"""A run that is cut off between the steps that are taken on the same answers."""

SELDOM: dict[str, Any] = {"train": {"save_steps": 4}}
"""So that it is the wish to stop that has a checkpoint made."""

CASES: tuple[Case, ...] = (
    Case("SFT full", cuts=TWICE, data={"eval": True}, train={"eval_steps": 2}),
    Case("SFT LoRA", adapter="lora", cuts=TWICE),
    Case("SFT LoRA, dropout, padded", adapter=LORA, cuts=TWICE, data={"padding_free": False}),
    Case("SFT full, packed", cuts=TWICE, data={"packing": True}, train={"global_batch_size": 4}),
    Case("SFT LoRA, packed, dropout", adapter=LORA, data={"packing": True}, train={"global_batch_size": 4}),
    Case("SFT full, padding-free", cuts=TWICE, data={"padding_free": True}),
    Case("SFT full, padded", cuts=TWICE, data={"padding_free": False}),
    Case("SFT full, one micro-batch a step", train={"micro_batch_size": 8}, cuts=(Cut(2), Cut(3), Cut(4))),
    Case("SFT full, logged every third step", train={"logging_steps": 3, "save_steps": 2}, cuts=(Cut(2, "in"), Cut(4))),
    Case("SFT full, cut while saving", cuts=(Cut(5),), data={"eval": True}),
    Case("SFT full, not shuffled", data={"shuffle": False}, cuts=TWICE),
    Case("SFT full, gradient checkpointing", adapter=LORA, train={"gradient_checkpointing": True}),
    Case("SFT full, NEFTune", {"type": "sft", "trainer_args": {"neftune_noise_alpha": 5.0}}),
    *(
        Case(f"SFT full, {optim}", train={"optim": optim})
        for optim in ("adafactor", "adamw_torch", "sgd", "ademamix", "adamw_8bit", "tunekit_adamw")
    ),
    Case("SFT full, pure bf16", train={"pure_bf16": True}, cuts=EVERYWHERE),
    Case("SFT full, pure bf16, 8 bits", train={"pure_bf16": True, "optim": "tunekit_adamw_8bit"}, cuts=TWICE),
    *(
        Case(f"SFT full, pure bf16, {strategy}", train={"pure_bf16": True}, parallel=parallel, cuts=TWICE)
        for strategy, parallel in (("DDP", DDP), ("fsdp2", {"num_processes": 2, "strategy": "fsdp2"}))
    ),
    *(
        Case(f"SFT full, {kind}", train={"lr_scheduler_type": kind, "warmup_steps": 2})
        for kind in ("linear", "cosine_with_restarts", "inverse_sqrt", "polynomial")
    ),
    Case("SFT full, workers", plan={"dataloader_num_workers": 2}, cuts=TWICE, apart=False),
    Case("SFT full, stream", data=STREAM, cuts=TWICE),
    Case("SFT LoRA, stream, dropout", adapter=LORA, data=STREAM, cuts=TWICE),
    Case("SFT full, stream, packed", data={**STREAM, "packing": True}, cuts=TWICE, train={"global_batch_size": 4}),
    Case("SFT full, stream, second passage", data=STREAM, steps=7, cuts=(Cut(4), Cut(6))),
    Case("SFT full, stream, not shuffled", data={**STREAM, "shuffle": False}, cuts=TWICE),
    Case("SFT full, stream of two", data={**STREAM, "sources": [{}, {}]}, num_sources=2, cuts=TWICE),
    Case(
        "SFT full, stream of two, weights",
        data={**STREAM, "sources": [{"weight": 2.0}, {"weight": 1.0}]},
        num_sources=2,
        cuts=TWICE,
    ),
    Case("SFT full, stream, workers", plan={"dataloader_num_workers": 2}, data=STREAM, cuts=TWICE, apart=False),
    Case(
        "SFT full, weights",
        data={"sources": [{"weight": 2.0}, {"weight": 1.0}]},
        num_sources=2,
        cuts=TWICE,
    ),
    Case("DPO full", DPO, cuts=TWICE, data={"eval": True}),
    Case("DPO LoRA", DPO, adapter="lora", cuts=TWICE),
    Case("DPO full, beforehand", {**DPO, **BEFOREHAND}, cuts=TWICE),
    Case("DPO LoRA, beforehand", {**DPO, **BEFOREHAND}, adapter="lora"),
    Case("DPO full, reference follows", {**DPO, "trainer_args": FOLLOWING}, cuts=TWICE),
    Case("KTO full", {"type": "kto"}, cuts=TWICE),
    Case("KTO LoRA, apo", {"type": "kto", "loss_type": "apo_zero_unpaired"}, adapter="lora"),
    Case("ORPO LoRA", {"type": "orpo"}, adapter="lora", cuts=TWICE),
    Case("CPO full", {"type": "cpo"}, cuts=TWICE, train={"logging_steps": 2}),
    Case("reward full", {"type": "reward"}, cuts=TWICE, data={"eval": True}),
    Case("reward LoRA", {"type": "reward"}, adapter="lora"),
    Case("GRPO full", GRPO, cuts=TWICE),
    Case(
        "GRPO LoRA, evaluated",
        GRPO,
        adapter="lora",
        cuts=(*EVERYWHERE, Cut(5)),
        data={"eval": True},
        train={"eval_steps": 2},
    ),
    Case("GRPO full, beta", {**GRPO, "beta": 0.1}),
    Case(
        "GRPO LoRA, two iterations",
        {**GRPO, "num_iterations": 2},
        adapter="lora",
        **WITHIN,
    ),
    Case("GRPO full, dynamic sampling", DYNAMIC, cuts=TWICE),
    Case("GRPO LoRA, DDP, replay", REPLAY, adapter="lora", parallel=DDP, cuts=TWICE),
    Case("GRPO full, reference follows", {**GRPO, "beta": 0.1, "trainer_args": FOLLOWING}),
    Case("RLOO LoRA", RLOO, adapter="lora", cuts=TWICE),
    Case("RLOO full, two iterations", {**RLOO, "num_iterations": 2}, **WITHIN),
    Case("distillation full", DISTILLATION, cuts=TWICE),
    Case("distillation LoRA", DISTILLATION, adapter=LORA, cuts=TWICE),
    Case("SFT full, DDP", parallel=DDP, cuts=TWICE, data={"eval": True}),
    Case("SFT LoRA, DDP, dropout", adapter=LORA, parallel=DDP, cuts=TWICE, data={"padding_free": False}),
    Case(
        "SFT full, DDP, packed",
        data={"packing": True},
        train={"global_batch_size": 4, "micro_batch_size": 1},
        parallel=DDP,
        cuts=TWICE,
    ),
    Case("SFT full, DDP, stream", data=STREAM, parallel=DDP, cuts=TWICE),
    Case("SFT full, DDP x4", parallel={"num_processes": 4, "strategy": "ddp"}, cuts=(Cut(2), Cut(3))),
    Case("DPO LoRA, DDP", DPO, adapter="lora", parallel=DDP, cuts=TWICE),
    Case("DPO full, DDP", DPO, parallel=DDP),
    Case("KTO LoRA, DDP", {"type": "kto"}, adapter="lora", parallel=DDP),
    Case("ORPO LoRA, DDP", {"type": "orpo"}, adapter="lora", parallel=DDP),
    Case("CPO LoRA, DDP", {"type": "cpo"}, adapter="lora", parallel=DDP),
    Case("reward full, DDP", {"type": "reward"}, parallel=DDP, cuts=TWICE),
    Case("GRPO LoRA, DDP", GRPO, adapter="lora", parallel=DDP, cuts=TWICE),
    Case(
        "GRPO LoRA, DDP, two iterations",
        {**GRPO, "num_iterations": 2},
        adapter="lora",
        parallel=DDP,
        **WITHIN,
    ),
    Case("RLOO LoRA, DDP", RLOO, adapter="lora", parallel=DDP),
    Case("distillation LoRA, DDP", DISTILLATION, adapter="lora", parallel=DDP),
    Case("SFT full, SIGTERM", cuts=(Cut(1, "in", "one"), Cut(3, "at", "twice"), Cut(4, "saving", "one")), **SELDOM),
    Case(
        "SFT full, DDP, SIGTERM",
        parallel=DDP,
        cuts=(Cut(1, "in", "one"), Cut(2, "at", "all"), Cut(4, "saving", "all")),
        **SELDOM,
    ),
    Case("GRPO LoRA, DDP, SIGTERM", GRPO, adapter="lora", parallel=DDP, cuts=(Cut(1, "in", "one"),), **SELDOM),
    *(
        Case(
            f"SFT {adapter}, {strategy}",
            adapter=adapter,
            parallel={"num_processes": 2, "strategy": strategy},
            cuts=TWICE,
        )
        for strategy in ("fsdp2", "zero1", "zero2", "zero3")
        for adapter in ("full", "lora")
    ),
    Case("SFT LoRA, fsdp2, dropout", adapter=LORA, parallel={"num_processes": 2, "strategy": "fsdp2"}),
    Case("SFT LoRA, zero3, dropout", adapter=LORA, parallel={"num_processes": 2, "strategy": "zero3"}),
)


def main() -> None:
    """Play the cases, and print and with `--save` keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these words in it")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    lines, num_unlike = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for case in dict.fromkeys(case for words in args.only for case in CASES if words in case.name):
            began = time.perf_counter()
            try:
                found = played(case, Path(folder))
            except (AssertionError, TunekitError) as error:
                found = [str(error)[-1500:]]
            num_unlike += bool(found)
            said = "; ".join(found[:6]) or "the same"
            lines.append(f"| {case.name} | {case.num_processes} | {', '.join(map(str, case.cuts))} | {said} |")
            print(lines[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    if args.save:
        head = "| run | processes | cut off | weights, checkpoint and log |\n|---|---|---|---|\n"
        text = f"# Runs that were cut off\n\n`python -m benchmarks.exact --save`: {in_words(PACKAGES)}\n\n{head}"
        RESULTS.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(num_unlike > 0)


if __name__ == "__main__":
    main()
