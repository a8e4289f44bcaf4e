"""Export of a run's result as a folder that others load: its adapter, or whole weights with the adapter merged.

It is written beside its destination, checked there by a process of its own that loads it anew, and gets its name only
then. So what is there under that name was seen to answer as the run's model does; the figures stand in `export.json`.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tunekit.errors import ModelError, RunError, TunekitError
from tunekit.estimates.memory.states import Dtype
from tunekit.exporting.gguf import BYTES_PER_PARAM, GgufType, check_convertible, find_converter, write_gguf
from tunekit.exporting.hub import check_target
from tunekit.exporting.hub import push as send
from tunekit.exporting.ollama import MODELFILE, modelfile
from tunekit.exporting.verify import ADAPTER, Check, Kind, Subject, has_adapter_beside
from tunekit.files import has_controls
from tunekit.inference.inference_model import (
    Trained,
    config_of,
    end_tokens,
    find_trained,
    load_trained,
    stored_dtype,
    tokenizer_of,
)
from tunekit.models.virtual_tokens import WITHOUT_CACHE
from tunekit.planner.plan import gib
from tunekit.process.log_capture import library_words_to, send_nothing_at_all
from tunekit.recipe.sections.adapters import PromptTuningAdapter, QloraAdapter
from tunekit.runs.checkpoints.complete import to_disk
from tunekit.runs.events import Event
from tunekit.runs.record import free_bytes, tokenizers_errors, words_of
from tunekit.runs.run import Run
from tunekit.training.model_card import write_card

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXPORT = "export.json"
"""File of an export that says what it is and how it was checked."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

SHARD = "5GB"
"""Size of the largest file of weights, as transformers has it."""

_SIZE = re.compile(r"[1-9]\d*(\.\d+)?\s*[KMGT]B", re.IGNORECASE)

OWN_BYTES = 64 * 2**20
"""Room for tokenizer, card and configuration, generously."""


@dataclass(frozen=True)
class Export:
    """An export, with the result of its verification.

    Attributes:
        run: Name of the run.
        step: Step of the checkpoint; None for the result.
        kind: Whether it is an adapter or whole weights.
        dtype: Type of its weights.
        folder: Where it is.
        total_bytes: Of all files.
        files: Their names.
        notes: What the user should know, a sentence each.
        check: What the process that loaded it anew has seen.
        pushed: Where it is on the hub; None where it was not sent there.
    """

    run: str
    step: int | None
    kind: Kind
    dtype: str
    folder: str
    total_bytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...]
    check: Check
    pushed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)


def export(
    run: Run | str | Path,
    dest: str | Path | None = None,
    *,
    kind: Literal["auto"] | Kind = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    checkpoint: str | None = None,
    max_shard_size: str = SHARD,
    gguf: GgufType | None = None,
    push: str | None = None,
    private: bool = False,
    replace: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> Export:
    """Export a run's model as a folder for other tools, and verify it by reloading.

    Args:
        run: The run, its folder, or its name in `runs/`.
        dest: New or empty folder. Default: `export/` in the run folder.
        kind: `adapter`, or `merged`: whole weights, or `quantized`: those of a run with `train.qat` in the types that
            it was trained for, as torchao stores them, with a LoRA adapter in a folder beside. `auto` is `merged`.
        dtype: Type of whole weights; `auto`: as the base model, or a run that trained all weights, has them.
        checkpoint: The step of the checkpoint to export, rather than the result.
        max_shard_size: Largest file of whole weights, such as `5GB`.
        gguf: Whole weights as a GGUF file of this type too, by the converter of llama.cpp.
        push: A repository of the hub, `owner/name`, to which the export is sent once it was checked.
        private: Only its owners see the repository.
        replace: What the repository holds may be replaced; its history keeps it.
        on_event: Called with events `export` with `phase`: `loading`, `writing`, `checking`, `converting`,
            `pushing`, `done`.

    Raises:
        TunekitError: There is nothing to export, no room for it, or what was written does not answer alike. Nothing is
            left then, unless only the hub did not take it.
    """
    tell = on_event or (lambda event: None)
    trained = find_trained(run, checkpoint)
    kind = _kind(trained, kind, dtype)
    if trained.run is not None and trained.step is None and not trained.run.result():
        raise RunError(f"{trained.run.path / 'events.jsonl'} has no result", hint="the run's folder is damaged")
    _check_options(trained, kind, max_shard_size, gguf, push, hub_only=private or replace)
    to = _destination(trained, kind, dest)
    send_nothing_at_all()
    converter = None if gguf is None else find_converter()
    log = StringIO()
    with library_words_to(log):
        # Without one nothing can be exported, and nothing need be loaded to see that.
        tokenizer_of(trained)
        target = None if push is None else check_target(push, private=private, replace=replace)
        if converter is not None:
            check_convertible(converter, trained)
    with _draft_of(to) as draft:
        with library_words_to(log):
            tell({"event": "export", "phase": "loading", "run": trained.name})
            written = _dtype_of(trained, kind, dtype)
            _check_room(trained, kind, BYTES[written] + (BYTES_PER_PARAM[gguf] if gguf is not None else 0), draft)
            base = str(to.absolute()) if target is None else target.repo
            _write(trained, kind, written, draft, max_shard_size, tell, base=base)
        tell({"event": "export", "phase": "checking"})
        check = _checked(Subject.of(trained, kind, written, draft))
        assert trained.run is not None
        weights, notes = ".", list(_notes(trained, kind))
        if gguf is not None and converter is not None:
            tell({"event": "export", "phase": "converting"})
            weights = f"./{write_gguf(converter, draft, gguf, trained.name)}"
        with library_words_to(log):
            if kind == "merged" and not trained.judges:
                text, more = modelfile(draft, tokenizer_of(trained), weights)
                (draft / MODELFILE).write_text(text, encoding="utf-8")
                notes += more
            write_card(trained.run, trained.run.result(), draft, kind=kind, step=trained.step)
        exported = _described(trained, kind, written, draft, to, notes, check)
        (draft / EXPORT).write_text(json.dumps({**exported.to_dict(), "folder": to.name}, indent=2), encoding="utf-8")
        _publish(draft, to)
    if target is not None:
        tell({"event": "export", "phase": "pushing", "repo": target.repo})
        with library_words_to(log):
            exported = dataclasses.replace(
                exported, pushed=send(target, to, message=f"{kind} weights of {trained.name}")
            )
    tell({"event": "export", "phase": "done", "folder": str(to)})
    return exported


def _described(found: Trained, kind: Kind, dtype: str, draft: Path, to: Path, notes: list[str], check: Check) -> Export:
    """Describe a draft that will be moved to its destination."""
    assert found.run is not None
    files = [file for file in draft.rglob("*") if file.is_file()]
    return Export(
        run=found.run.name,
        step=found.step,
        kind=kind,
        dtype=dtype,
        folder=str(to),
        total_bytes=sum(file.stat().st_size for file in files),
        files=tuple(sorted(file.relative_to(draft).as_posix() for file in files)),
        notes=tuple(notes),
        check=check,
    )


def _check_options(
    found: Trained, kind: Kind, max_shard_size: str, gguf: str | None, push: str | None, *, hub_only: bool
) -> None:
    """See that the options go with each other and with the model.

    Raises:
        RunError: They do not.
    """
    if not _SIZE.fullmatch(max_shard_size):
        raise RunError(f"--max-shard-size {max_shard_size}: invalid file size", hint="write it as 5GB or 500MB")
    if kind == "adapter" and gguf is not None:
        raise RunError("--gguf: an adapter alone cannot be converted", hint="remove --adapter")
    if kind == "adapter" and max_shard_size != SHARD:
        raise RunError("--max-shard-size: an adapter is one file", hint="remove it")
    if kind == "quantized" and gguf is not None:
        raise RunError("--gguf: llama.cpp quantizes unquantized weights itself", hint="remove --quantized")
    if found.judges and gguf is not None:
        raise RunError(f"--gguf: {found.name} is a reward model, which llama.cpp does not support", hint="remove it")
    if push is None and hub_only:
        raise RunError("--private and --replace need --push", hint="add --push OWNER/NAME")


def _kind(found: Trained, kind: str, dtype: str) -> Kind:
    if found.run is None:
        raise RunError(f"{found.name} is not a run: nothing to export", hint="`tunekit runs` lists the runs")
    if kind == "adapter" and found.adapter is None:
        raise RunError(f"{found.name} was fully fine-tuned and has no adapter", hint="remove --adapter")
    if kind != "adapter" and isinstance(found.adapter, PromptTuningAdapter):
        problem = f"the virtual tokens of {found.name} are no part of weights to be merged into"
        raise RunError(problem, hint="export the adapter itself with --adapter")
    if kind == "adapter" and dtype != "auto":
        raise RunError(f"--dtype {dtype}: an adapter stays in float32, its training dtype", hint="remove it")
    if kind == "quantized" and found.qat is None:
        raise RunError(f"{found.name} was not trained for quantized weights", hint="set train.qat, and train again")
    if kind == "quantized":
        return "quantized"
    return "adapter" if kind == "adapter" else "merged"


def _dtype_of(found: Trained, kind: Kind, dtype: str) -> Dtype:
    if kind == "adapter":
        return "float32"
    return stored_dtype(found) if dtype == "auto" else cast(Dtype, dtype)


def _destination(found: Trained, kind: Kind, dest: str | Path | None) -> Path:
    """Return the destination; nothing exists there yet.

    Raises:
        RunError: It holds something, or cannot be used.
    """
    assert found.run is not None
    of_step = "" if found.step is None else f"-{found.step}"
    to = found.run.path / "export" / f"{kind}{of_step}" if dest is None else Path(dest)
    again = "pass another folder" if dest is not None else "delete it, or pass another folder"
    if has_controls(str(to)) or not str(dest if dest is not None else "x").strip():
        raise RunError(f"{str(to)!r} is not a valid export folder", hint="pass another folder")
    if to.is_symlink():
        raise RunError(f"{to} is a symbolic link to {to.readlink()}", hint="pass the folder itself")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunError(f"{to} exists and is not empty", hint=again)
    return to


@contextlib.contextmanager
def _draft_of(to: Path) -> Iterator[Path]:
    """A folder beside the destination, of which nothing is left unless it was renamed."""
    draft = to.absolute().parent / f".exporting-{to.name}-{os.getpid()}"
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise RunError(f"{to} cannot be created: {error.strerror}", hint="pass another folder") from error
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _check_room(found: Trained, kind: Kind, bytes_per_param: float, draft: Path) -> None:
    """See that there is room for what is to be written."""
    if kind == "adapter":
        needed = sum(file.stat().st_size for file in Path(found.folder).glob("*.safetensors"))
    else:
        assert found.run is not None
        needed = int(found.run.plan.num_params * bytes_per_param)
    needed, free = needed + OWN_BYTES, free_bytes(draft)
    if needed > free:
        problem = f"not enough disk space for the export in {draft.parent}: {gib(needed)} needed, {gib(free)} free"
        raise RunError(problem, hint=f"free {gib(needed - free)} there, or pass a folder on another disk")


def _write(
    found: Trained,
    kind: Kind,
    dtype: Dtype,
    draft: Path,
    shard: str,
    tell: Callable[[Event], None],
    *,
    base: str,
) -> None:
    """Write weights, configuration and tokenizer.

    `base` is what an adapter beside quantized weights calls them.

    Raises:
        RunError: The disk does not take them.
    """
    from safetensors import SafetensorError

    from tunekit.models.load import copy_processor, copy_tekken

    model, tokenizer = None, tokenizer_of(found)
    beside = has_adapter_beside(kind, found)
    if kind != "adapter":
        model = _base(found, dtype) if beside else merged(found, dtype)
        if not found.judges:
            _end_answers(model, tokenizer)
    if kind == "quantized":
        model = _quantized(model, found, dtype, draft)
    tell({"event": "export", "phase": "writing"})
    try:
        with tokenizers_errors():
            if model is not None:
                model.save_pretrained(draft, max_shard_size=shard)
            if beside:
                _copy_adapter(found, draft / ADAPTER, base=base)
            if model is None:
                _copy_adapter(found, draft)
                if found.base.rope_scaling is not None:
                    config_of(found).save_pretrained(draft)
            tokenizer.save_pretrained(draft)
            copy_processor(found.folder, found.base.revision, draft)
            if found.run is not None or not found.base.all_tokens:
                copy_tekken(found.folder, found.base.revision, draft, tokenizer)
    except (OSError, SafetensorError) as error:
        problem = f"the export of {found.name} could not be written to {draft.parent}: {words_of(error)}"
        raise RunError(problem, hint="free some space there, or pass a folder on another disk") from error


def _copy_adapter(found: Trained, to: Path, *, base: str | None = None) -> None:
    """Copy an adapter as PEFT reads it, with the name of the model that it belongs on where that is another one."""
    to.mkdir(exist_ok=True)
    for file in (*Path(found.folder).glob("adapter_*.safetensors"), *Path(found.folder).glob("*.json")):
        if file.name.startswith("adapter_"):
            shutil.copyfile(file, to / file.name)
    if base is not None:
        config = json.loads((to / "adapter_config.json").read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = base
        (to / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _base(found: Trained, dtype: Dtype) -> Any:
    """Return the model below an adapter, on the CPU."""
    from tunekit.models.load import load_model

    return load_model(found.base, dtype=dtype, device="cpu", score_head=found.score_head)


def _quantized(model: Any, found: Trained, dtype: Dtype, draft: Path) -> Any:
    """Return a model with its linear layers in the types that it was trained for.

    Transformers quantizes weights as it reads them, so they are written first.
    """
    from transformers import AutoModelForCausalLM

    from tunekit.models.fake_quantization import export_config

    assert found.qat is not None
    whole = draft / "unquantized"
    model.save_pretrained(whole)
    quantized = AutoModelForCausalLM.from_pretrained(
        whole, dtype=dtype, quantization_config=export_config(found.qat), trust_remote_code=found.base.trust_remote_code
    )
    shutil.rmtree(whole)
    return quantized


def _end_answers(model: Any, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Add the end token of the tokenizer to those of the model's generation_config.json.

    An adapter may have learned to end answers with another token than the model below it, which transformers would
    not stop at.
    """
    ends = end_tokens(model, tokenizer)
    own = model.generation_config.eos_token_id
    if ends != (own if isinstance(own, list) else [own]):
        model.generation_config.eos_token_id = ends


def merged(found: Trained, dtype: Dtype) -> Any:
    """A model as a whole on the CPU, with its adapter made part of its weights in their type.

    An adapter that was trained over a quantized base is merged into the unquantized one.
    """
    from tunekit.models.load import check_mergeable

    model: Any = load_trained(found, dtype=dtype, device="cpu", as_trained=False)
    if found.adapter is None:
        return model
    check_mergeable(model, found.adapter)
    model = model.merge_and_unload()
    into, out = model.get_input_embeddings(), model.get_output_embeddings()
    if out is not None and out.weight.data_ptr() != into.weight.data_ptr():
        # One of the two may have been trained wholly, though they were one.
        model.config.get_text_config().tie_word_embeddings = False
        model.config.tie_word_embeddings = False
    return model


def _checked(subject: Subject) -> Check:
    """Verify an export in a fresh process and return the result.

    Raises:
        ModelError: It does not answer as the model that it was made from.
    """
    command = [sys.executable, "-m", "tunekit.exporting.verify"]
    words = json.dumps(asdict(subject))
    completed = subprocess.run(command, input=words, capture_output=True, text=True, check=False)
    lines = completed.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        last = (completed.stderr.strip().splitlines() or [f"it exited with code {completed.returncode}"])[-1]
        raise ModelError(f"the export could not be verified: {last}", hint="the export was deleted")
    report: dict[str, Any] = json.loads(lines[-1])
    if "problem" in report:
        raise ModelError(report["problem"], hint=report["hint"])
    return Check(**report)


def _notes(found: Trained, kind: Kind) -> Iterator[str]:
    from tunekit.models.load import is_quantized

    if kind == "merged" and found.adapter is not None and is_quantized(config_of(found)):
        yield f"merged into the weights of {found.base.path}, dequantized"
    elif isinstance(found.adapter, QloraAdapter) and kind == "merged":
        if found.adapter.is_of_4bit_base:
            yield "adapted weights merged into their dequantized 4-bit values"
        else:
            yield "trained on a quantized base, but merged into the unquantized one: answers differ slightly"
    if kind == "adapter":
        yield f"load it on top of {found.base.path} with PEFT"
        if isinstance(found.adapter, PromptTuningAdapter):
            yield WITHOUT_CACHE
    if kind == "merged" and found.qat is not None:
        yield f"unrounded weights: training computed with {found.qat.words}, which --quantized exports"
    if kind == "quantized" and found.qat is not None:
        yield f"{found.qat.words}, stored by torchao; others need torchao to load it"
        if has_adapter_beside(kind, found):
            yield f"the adapter is unrounded, in {ADAPTER}/: load it on top of the quantized model with PEFT"
        if found.qat.weight_dtype == "int4":
            yield "torchao stores each int4 weight in a byte"


def _publish(draft: Path, to: Path) -> None:
    """Give an export its name, once all of it is on the disk.

    Raises:
        TunekitError: Something else took that name meanwhile.
    """
    for path in (*draft.rglob("*"), draft):
        to_disk(path)
    try:
        draft.rename(to)
    except OSError as error:
        raise TunekitError(f"cannot move the export to {to}: {error.strerror}", hint="pass another folder") from error
    to_disk(to.absolute().parent)
