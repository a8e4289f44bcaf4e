"""Fingerprints, versions and lineage of a run: the inputs that it was made from.

Fingerprints: of the files of the model and its tokenizer, the prepared rows, and the files that they came from. A run
that resumes with other inputs would be another run, which no checkpoint shows.

A file of up to 64 MiB is read completely, so that any change is seen. Of a larger one the size, the start, where
safetensors have all names and shapes, and 32 evenly spaced pieces of 64 KiB are read: weights that were trained since
differ in each of these. Smaller changes of the same size are missed; so are rows at a URL or in a Hub dataset, which
are not checked again.

Versions: Python, the libraries, tunekit's commit, and the machine's threads, written when the folder is made, so that a
rerun can report differences. The digests of recipe and plan show whether they were edited in the folder.

Lineage: a recipe that starts from a run, checks of it, and what the recipe inherits. `read_recipe` is how the verbs
load recipes: it also finds contradictions with that run. `continued` fills in what the recipe inherits; it comes before
a plan, and is idempotent.
"""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunekit.data.sources.files import LocalFile
from tunekit.data.sources.in_memory import RowData
from tunekit.data.sources.load import find_files
from tunekit.errors import DataError, ModelError, PlanError, RunError, TunekitError
from tunekit.estimates.facts import Facts, Origin, contradictions, taken_over
from tunekit.files import SHIPPED_MODELS
from tunekit.probe.host import num_cores
from tunekit.probe.model import TOKENIZER_FILES, default_template, fetched_folder, model_folder, with_tokenizer
from tunekit.probe.origin import ADAPTER_CONFIG, COMMIT, check_code, code_of, is_folder, is_result, origin_of
from tunekit.recipe import load
from tunekit.recipe.chat_templates import named_template
from tunekit.recipe.load import AnyOverrides, load_recipe_with_notes, override_words, reload_recipe
from tunekit.recipe.methods import METHODS, has_teacher, is_rewarded
from tunekit.recipe.methods.spec import Judged
from tunekit.recipe.reading.parse import Fault, Key, dotted
from tunekit.recipe.reading.phrases import show
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.recipe.sections.data import CompleteSource, DataSection
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.rewards import ModelReward
from tunekit.recipe.sections.section import Conflict
from tunekit.runs.available_actions import prospects
from tunekit.runs.kept_inputs import rows_as_overrides
from tunekit.runs.prepared_data import FILES, with_models
from tunekit.runs.run import INPUTS, Run, called, list_runs
from tunekit.runs.small_files import damaged, read_list, read_object, read_text

FINGERPRINTS = "fingerprints.json"
"""File of a run folder that holds them."""

WHOLE_BYTES = 64 * 2**20
"""Largest file that is read wholly."""

HEAD_BYTES, PIECE_BYTES, NUM_PIECES = 2**20, 2**16, 32
"""Parts of a larger one that are read: its beginning, and pieces of it."""

MODEL_FILES = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
)
"""Files of a model or an adapter that training starts from."""

TOKENIZER = (*TOKENIZER_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""Files of a tokenizer, and its chat template where that has a file of its own."""


class Fingerprint(Facts):
    """Fingerprint of an input when the run was made."""

    what: str
    """`model`, `tokenizer`, `chat template`, `rows`, `function`, or the recipe's key of a source."""
    path: str
    """The file; below the run folder for the prepared rows and for functions. A source's pattern for the names of its
    files, a model's name on the hub for its commit, and a chat template's name for its text."""
    digest: str


def record(run: Run) -> None:
    """Write down what a run is made of."""
    prints = [fingerprint.model_dump() for fingerprint in _found(run)]
    (run.path / FINGERPRINTS).write_text(json.dumps(prints, indent=2), encoding="utf-8")


def fingerprints_of(run: Run) -> list[Fingerprint]:
    """Return the fingerprints of a run; none for a run that has no file of them.

    Raises:
        RunError: The file is damaged.
    """
    file = run.path / FINGERPRINTS
    try:
        return [Fingerprint.model_validate(item) for item in read_list(file)]
    except FileNotFoundError:
        return []
    except (RunError, ValidationError) as error:
        raise RunError(f"{file} is damaged", hint="restore it, or delete it to skip the comparison") from error


def changes(run: Run, recipe: Recipe) -> list[str]:
    """Return the changes since a run was made by this recipe, a line each; none for a run without fingerprints."""
    recorded = fingerprints_of(run)
    prints = (*_of_hub(recipe), *_of_listings(recipe.data), *_of_template(recipe)) if recorded else ()
    now = {(fingerprint.what, fingerprint.path): fingerprint.digest for fingerprint in prints}
    return [words for fingerprint in recorded if (words := _change(run, fingerprint, now)) is not None]


def _change(run: Run, recorded: Fingerprint, now: dict[tuple[str, str], str]) -> str | None:
    what, path, kind = recorded.what, recorded.path, recorded.digest.partition(" ")[0]
    if kind in ("commit", "names", "text"):
        digest = now.get((what, path), recorded.digest)
        if digest == recorded.digest:
            return None
        if kind == "text":
            return f"{what}: {path} has another text in this version of tunekit or TRL"
        news = f"was {recorded.digest}, now {digest}" if kind == "commit" else "matches other files than before"
        return f"{what}: {path} {news}"
    file = run.path / path
    if not file.is_file():
        # The run has its own copy of the rows, but for a stream, which says itself what it does not find.
        return None if what.startswith("data.") else f"{what}: {path} no longer exists"
    return None if digest_of(file) == recorded.digest else f"{what}: {path} has changed"


def digest_of(file: Path) -> str:
    """Return a digest that changes with the file."""
    size = file.stat().st_size
    if size <= WHOLE_BYTES:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(HEAD_BYTES))
        for piece in range(1, NUM_PIECES + 1):
            stream.seek((size - PIECE_BYTES) * piece // NUM_PIECES)
            digest.update(stream.read(PIECE_BYTES))
    return digest.hexdigest()


def _found(run: Run) -> Iterator[Fingerprint]:
    recipe = run.recipe
    yield from _of_hub(recipe)
    for what, section in _models(recipe):
        folder = Path(model_folder(section))
        patterns = MODEL_FILES if folder.is_dir() else ()
        yield from _of_files(what, (file for pattern in patterns for file in sorted(folder.glob(pattern))))
    folder, template = Path(model_folder(with_tokenizer(recipe.model))), recipe.model.chat_template
    files = [folder / name for name in (*TOKENIZER, *TEMPLATES) if (folder / name).is_file()]
    if template is not None and named_template(template) is None:
        files.append(Path(template))
    yield from _of_files("tokenizer", files)
    yield from _of_template(recipe)
    for name in FILES.values():
        if (run.path / "data" / name).is_file():
            path = f"data/{name}"
            yield Fingerprint(what="rows", path=path, digest=digest_of(run.path / path))
    for file in sorted((run.path / INPUTS).glob("*.py")):
        yield Fingerprint(what="function", path=f"{INPUTS}/{file.name}", digest=digest_of(file))
    yield from _of_listings(recipe.data)
    for source in (*recipe.data.sources, *recipe.data.eval_sources):
        yield from _of_files(source.key, _files_of_source(source))


def _of_template(recipe: Recipe) -> Iterator[Fingerprint]:
    """Yield the chat template that the recipe names, or that of the model's type, by its text."""
    template = named_template(recipe.model.chat_template)
    # A config.json that is broken is reported by its own fingerprint.
    with contextlib.suppress(ModelError):
        template = template or default_template(recipe.model)
    if template is not None:
        digest = hashlib.sha256(template.text().encode()).hexdigest()
        yield Fingerprint(what="chat template", path=template.name, digest=f"text {digest}")


def _of_files(what: str, files: Iterable[Path]) -> Iterator[Fingerprint]:
    for file in dict.fromkeys(files):
        yield Fingerprint(what=what, path=str(Path.cwd() / file), digest=digest_of(file))


def _models(recipe: Recipe) -> Iterator[tuple[str, ModelSection]]:
    """The models that a run loads, with what is below an adapter."""
    sections = [("model", recipe.model)]
    if has_teacher(recipe.method):
        sections.append(("teacher", recipe.method.teacher))
    for what, section in sections:
        yield what, section
        origin = origin_of(section)
        if origin is not None and origin.adapter is not None:
            yield what, origin.base


def _of_hub(recipe: Recipe) -> Iterator[Fingerprint]:
    """The commits of models of the hub, by what was fetched of them."""
    for what, section in _models(recipe):
        if not Path(model_folder(section)).is_dir() and (fetched := fetched_folder(section)) is not None:
            yield Fingerprint(what=what, path=section.path, digest=f"commit {fetched.name}")


def _files_of_source(source: CompleteSource) -> list[Path]:
    """The files of a source on this machine."""
    if "://" in source.path:
        return []
    try:
        files = find_files(source, key=source.key)
    except DataError:
        return []
    return [] if files is None else [file.path for file in files.found if isinstance(file, LocalFile)]


def _of_listings(section: DataSection) -> Iterator[Fingerprint]:
    """Yield the files that folders and patterns name."""
    for source in (*section.sources, *section.eval_sources):
        if not Path(source.path).is_dir() and not any(sign in source.path for sign in "*?["):
            continue
        names = sorted(file.name for file in _files_of_source(source))
        if names:
            digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
            yield Fingerprint(what=source.key, path=source.path, digest=f"names {digest}")


MADE_WITH = "made_with.json"
"""File of a run folder that says it."""

LIBRARIES = ("tunekit", "torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "nemo-automodel")
"""Libraries that train and write checkpoints."""

TEXTS = ("recipe.yaml", "plan.yaml")
"""Files that decide what happens in a run."""


class MadeWith(Facts):
    """Versions that a run was made with."""

    versions: Mapping[str, str]
    """Of Python, of tunekit and of the libraries that train."""
    commit: str | None
    """Commit of tunekit's own source where that is a checkout; with `+` behind it where files differ from it."""
    num_threads: int
    """Threads that a process computes with on the processor, where the plan says nothing else."""
    digests: Mapping[str, str]
    """SHA-256 of recipe and plan as the run was made."""

    def words(self) -> str:
        """Versions as people read them."""
        return ", ".join(f"{name} {number}" for name, number in self.versions.items())


def record_versions(run: Run) -> None:
    """Write down what a run is made with."""
    num_threads = run.plan.environment.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    made_with_now = MadeWith(
        versions={"python": platform.python_version(), **versions()},
        commit=_commit(),
        num_threads=int(num_threads) if num_threads.isdecimal() else num_cores(),
        digests={name: _digest(run.path / name) for name in TEXTS},
    )
    (run.path / MADE_WITH).write_text(json.dumps(made_with_now.model_dump(mode="json"), indent=2), encoding="utf-8")


def made_with(run: Run) -> MadeWith | None:
    """Return the versions that a run was made with; None of a run of an earlier version, which did not record them.

    Raises:
        RunError: What was written down cannot be read.
    """
    file = run.path / MADE_WITH
    if not file.is_file():
        return None
    try:
        return MadeWith.model_validate_json(read_text(file))
    except (OSError, RunError, ValidationError) as error:
        raise RunError(f"{file} is damaged", hint="delete it, or restore the folder") from error


def changed_texts(run: Run, known: MadeWith) -> list[str]:
    """Return which of recipe and plan have changed since the run was made."""
    return [name for name, digest in known.digests.items() if _digest(run.path / name) != digest]


def versions() -> dict[str, str]:
    """Versions of tunekit and of the libraries that train, as far as they are there."""
    known_versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            known_versions[name] = version(name)
    return known_versions


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _commit() -> str | None:
    """The commit that this code was taken from; None where it is no checkout, or there is no git."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", "tunekit"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + "+" * bool(changes)


CODE = "code.json"
"""File of a run folder with the SHA-256 of code that comes with its models, where they lie in folders."""


def read_recipe(
    source: str | Path | Mapping[str, Any] | Recipe,
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    eval_dataset: RowData | None = None,
) -> tuple[Recipe, list[str]]:
    """Return the recipe, checked also against the run that it starts from, and notes of its overrides.

    Args:
        source: The recipe.
        overrides: Changes to it.
        train_dataset: Rows to train on, which are written to a file that the recipe names.
        eval_dataset: Rows to evaluate on.

    Raises:
        TunekitError: The recipe is invalid, the message has a line per fault, each with its place; or rows are.
    """
    words = override_words(overrides)
    words += rows_as_overrides(source, words, train_dataset=train_dataset, eval_dataset=eval_dataset)
    return load_recipe_with_notes(source, words, conflicts_of=_conflicts)


def check_text(
    text: str, overrides: AnyOverrides = (), *, find_functions: bool = True
) -> tuple[Recipe | None, list[Fault]]:
    """Check a recipe's YAML text, as the command line checks a file.

    Args:
        text: The text, such as a draft in an editor.
        overrides: `dotted.key=value` overrides.
        find_functions: Whether the user's own functions are looked up, which imports their modules.

    Returns:
        The recipe and no faults, or None and at least one fault, in the order of the text.
    """
    return load.check_text(text, overrides, find_functions=find_functions, conflicts_of=_conflicts)


def _conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Yield conflicts of a recipe with the run that it starts from, or with the code of its models."""
    yield from _conflicts_of_code(recipe)
    try:
        origin = origin_of(settled(recipe.model))
    except TunekitError as error:
        yield Conflict(("model", "path"), error.problem.removeprefix("model.path: "), error.hint or "")
        return
    if origin is not None:
        yield from _conflicts_with(origin, recipe)


_SCORED: dict[Judged, str] = {
    "text": "a reward model: it scores answers",
    "steps": "a process reward model: it scores steps",
    "classes": "a classifier: it scores texts",
}


def _conflicts_with(origin: Origin, recipe: Recipe) -> Iterator[Conflict]:
    """Yield conflicts of a recipe with the run or the adapter that it starts from."""
    if recipe.model.revision is not None:
        what = f"{recipe.model.revision!r} does not apply to a run: {origin.name} records its base model"
        yield Conflict(("model", "revision"), what, "unset it")
    judged = METHODS[origin.runs[-1].method].spec.classifies if origin.runs else None
    wanted = recipe.method.spec.classifies
    if judged is not None and wanted != judged:
        what = f"{origin.name} is {_SCORED[judged]} and generates none"
        yield Conflict(("model", "path"), what, "set a run that trained a generative model")
    if judged is None and wanted is not None and origin.adapter is not None:
        aim = "classifier" if wanted == "classes" else "reward model"
        what = f"the adapter of {origin.name} is for a generative model and cannot be trained as a {aim}"
        yield Conflict(("model", "path"), what, "start from its base model, or from a full fine-tuning run")
    if judged == wanted == "classes":
        earlier = reload_recipe(Path(origin.folder).parent / "recipe.yaml")
        if earlier.method.score_head != recipe.method.score_head:
            what = f"{origin.name} was trained on other labels, or on another problem_type"
            hint = "set the same ones in the same order, or start from its base model"
            yield Conflict(("method", "labels"), what, hint)
    for field, requested, has in contradictions(origin, recipe.adapter):
        what = f"{show(requested)} here, but {show(has)} in the adapter of {origin.name}, which is trained further"
        hint = "unset it, or set adapter.type=full to merge that adapter and train all parameters"
        yield Conflict(("adapter", field), what, hint)


def _conflicts_of_code(recipe: Recipe) -> Iterator[Conflict]:
    """Code that comes with a model and is not asked for, or whose commit is not known."""
    method = recipe.method
    by_trl = is_rewarded(method) and method.trl_loads_reference and method.beta > 0
    second = by_trl and isinstance(recipe.adapter, FullAdapter)
    for key, section in models_of(recipe):
        try:
            origin = origin_of(settled(section))
        except TunekitError:
            continue  # It is told elsewhere.
        base = section if origin is None else origin.base
        where = (*key, "trust_remote_code")
        if origin is not None and base.trust_remote_code and not section.trust_remote_code:
            what = f"is false, but the base model of {origin.name}, {base.path!r}, comes with its own code"
            yield Conflict(where, what, "review that code, then set it to true")
        if not section.trust_remote_code:
            continue
        if is_folder(base):
            try:
                code_of(base)
            except ModelError as error:
                yield Conflict(where, error.problem, error.hint or "")
            continue
        if not COMMIT.fullmatch(base.revision or ""):
            what = f"cannot be true for {base.path!r} from the Hub without a commit: its code could change"
            of_adapter = f"set revision in the {ADAPTER_CONFIG} of {section.path}" if origin else "set model.revision"
            commit = f"`git ls-remote https://huggingface.co/{base.path} HEAD` prints it"
            yield Conflict(where, what, f"review the code, then {of_adapter} to the full commit, 40 digits: {commit}")
        elif second and key == ("model",):
            what = f"cannot be true for {base.path!r} from the Hub with a second model: TRL pins no commit of its code"
            yield Conflict(where, what, "download the model and set its folder, or train an adapter")


def models_of(recipe: Recipe) -> Iterator[tuple[Key, ModelSection]]:
    """Every model that a recipe names, with its key."""
    yield ("model",), recipe.model
    if has_teacher(recipe.method):
        yield ("method", "teacher"), recipe.method.teacher
    if is_rewarded(recipe.method):
        for position, reward in enumerate(recipe.method.rewards):
            if isinstance(reward, ModelReward):
                yield ("method", "rewards", position, "model"), reward.model


def write_code(run: Run) -> None:
    """Write down what the code of a run's models is, where they bring any."""
    code = {key: code_found for key, section in _trusted(run) if (code_found := code_of(section))}
    if code:
        (run.path / CODE).write_text(json.dumps(code, indent=2), encoding="utf-8")


def check_run_code(run: Run) -> None:
    """See that the code of a run's models is what it was.

    Raises:
        PlanError: The recipe of the run does not allow it.
        ModelError: It is not.
    """
    _refuse(_conflicts_of_code(run.recipe))
    origin, base = origin_of(run.recipe.model), run.plan.base
    base_section = run.recipe.model if origin is None else origin.base
    if base.trust_remote_code and (base.path, base.revision) != (base_section.path, base_section.revision):
        raise PlanError(f"the plan of {run.path} trusts the code of {base.path!r}, which is not in its recipe")
    file = run.path / CODE
    recorded = read_object(file) if file.exists() else {}
    for key, section in _trusted(run):
        digests = recorded.get(key, {})
        if not isinstance(digests, dict):
            raise damaged(file, f"{key} is {digests!r}")
        check_code(section, digests)


def _refuse(conflicts: Iterable[Conflict]) -> None:
    problems = [f"{dotted(conflict.key)}: {conflict.what}; {conflict.hint}" for conflict in conflicts]
    if problems:
        raise PlanError("\n".join(problems))


def _trusted(run: Run) -> Iterator[tuple[str, ModelSection]]:
    """The models of a run whose code may be run, by their keys; of one with an adapter it is the base."""
    for key, section in models_of(run.recipe):
        if section.trust_remote_code:
            origin = origin_of(section)
            yield dotted(key), section if origin is None else origin.base


def continued(recipe: Recipe) -> Recipe:
    """Return the recipe with the run that it starts from resolved, and with what it inherits from it.

    Raises:
        PlanError: It contradicts the run.
        TunekitError: A recipe cannot start from this run.
    """
    recipe = recipe.model_copy(update={"method": with_models(recipe.method, settled)})
    section = settled(recipe.model)
    origin = origin_of(section)
    if origin is None:
        return recipe
    _refuse(_conflicts_of_code(recipe))
    return inherited(recipe.model_copy(update={"model": section}), origin)


def inherited(recipe: Recipe, origin: Origin) -> Recipe:
    """Return the recipe with what it inherits from the run or the adapter that it starts from.

    Raises:
        PlanError: It contradicts that.
    """
    _refuse(_conflicts_with(origin, recipe))
    is_type_asked = "type" in recipe.adapter.model_fields_set
    adapter = taken_over(origin, recipe.adapter, is_type_asked=is_type_asked)
    section = recipe.model.model_copy(update={"trust_remote_code": origin.base.trust_remote_code})
    return recipe.model_copy(update={"model": section, "adapter": adapter})


def settled(section: ModelSection) -> ModelSection:
    """A model section in which a run's name or folder is the folder of its result.

    Folders come first, and names of the hub, which have a slash.

    Raises:
        RunError: The run has not finished.
    """
    run = _run_of(section.path)
    if run is None:
        return section
    state, status = run.state, run.status()
    if state != "finished":
        where = f"{run.name} is {state}, after step {status['step']} of {status['num_steps']}: no model yet"
        raise RunError(f"model.path: {where}", hint=prospects(run) or "wait until it finishes")
    return section.model_copy(update={"path": str(run.model_path.resolve())})


def _run_of(path: str) -> Run | None:
    """The run that is meant by a path, if it is one."""
    folder = Path(path)
    if path in SHIPPED_MODELS:
        return None
    if folder.is_dir():
        if (folder / "status.json").is_file():
            return Run(folder)
        return Run(folder.resolve().parent) if is_result(folder.resolve()) else None
    runs = {run.name: run for run in list_runs()}
    return None if "/" in path else next((runs[candidate] for candidate in called(path, list(runs))), None)
