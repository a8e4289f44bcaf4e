"""A model that can be loaded: what a run made, one of its checkpoints, or a model that no run made.

`find_trained` reads small files only; what loads weights is in `load_trained`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from tunekit.errors import ModelError, RunError, TunekitError
from tunekit.estimates.memory.states import Dtype
from tunekit.files import is_name
from tunekit.planner.plan import Plan
from tunekit.probe.model import model_folder
from tunekit.probe.origin import ADAPTER_WEIGHTS, origin_of
from tunekit.recipe.load import reload_recipe
from tunekit.recipe.sections.model import FullAdapter, LoraAdapter, ModelSection, QloraAdapter
from tunekit.runs.available_actions import prospects
from tunekit.runs.checkpoints.complete import fault_of
from tunekit.runs.checkpoints.listing import named, steps_of
from tunekit.runs.fingerprints import check_run_code
from tunekit.runs.requests import check_readable
from tunekit.runs.run import Run, find_run
from tunekit.runs.small_files import read_plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

IN_PARTS = "pytorch_model_fsdp_0"
"""Folder of a checkpoint whose weights lie in parts."""


@dataclass(frozen=True)
class Trained:
    """A model that can be loaded.

    Attributes:
        name: What it is called.
        base: What transformers loads: the model below the adapter, or the model itself.
        adapter: How its adapter was trained; None where it has none.
        folder: Where the adapter is, or the model, and the tokenizer that belongs to it.
        run: The run that made it; None where none did.
        step: The step of the checkpoint; None where it is no checkpoint.
        before: The model from which all weights were trained; None where an adapter can be switched off, or no run
            made it.
    """

    name: str
    base: ModelSection
    adapter: LoraAdapter | QloraAdapter | None
    folder: str
    run: Run | None = None
    step: int | None = None
    before: "Trained | None" = None

    @property
    def judges(self) -> bool:
        """True if it scores texts and generates none."""
        return self.run is not None and self.run.recipe.method.spec.classifies

    @property
    def is_chat(self) -> bool:
        """True if it was trained on conversations, as far as a run tells; without a run the tokenizer decides."""
        return self.run is None or self.run.plan.data.format not in ("text", "tokens", "prompt_completion")

    @property
    def can_compare(self) -> bool:
        """True if there is another model to compare it with."""
        return self.adapter is not None or self.before is not None


def find_trained(name: str | Path | Run, checkpoint: str | None = None) -> Trained:
    """The model that is meant by a run, its name or folder, or by a model's name or folder.

    Args:
        name: Which.
        checkpoint: Of a run: the step of the checkpoint that is meant, rather than the result.

    Raises:
        TunekitError: There is none, the run has not finished, or the checkpoint is damaged.
    """
    run = name if isinstance(name, Run) else _run_named(str(name))
    if run is None:
        if checkpoint is not None:
            raise RunError(f"{name} is a model and no run, and has no checkpoints", hint="leave the checkpoint out")
        return _model(str(name))
    check_readable(run)
    check_run_code(run)
    return _result(run) if checkpoint is None else _checkpoint(run, checkpoint)


def _run_named(name: str) -> Run | None:
    """The run that is meant by a name or a folder; None where a model is.

    Raises:
        RunError: It is neither.
    """
    if not is_name(name):
        raise RunError(f"{name!r} is no name of a run", hint="`tunekit runs` lists them; a folder's path works too")
    if name == "pico":
        return None
    if not (Path(name).is_dir() and not (Path(name) / "status.json").is_file()):
        try:
            return find_run(name)
        except RunError:
            if "/" not in name or not _is_model_name(name):
                raise
    folder = Path(name).resolve()
    if folder.name == "model" and (folder.parent / "status.json").is_file():
        return Run(folder.parent)
    return None


def _is_model_name(name: str) -> bool:
    """Return whether a text may be a model's name on the hub: `owner/name`."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~", "runs/")) and not name.endswith("/")


def _model(name: str) -> Trained:
    section = ModelSection(path=name)
    origin = origin_of(section)
    if origin is None:
        folder = Path(model_folder(section))
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise ModelError(f"{name} holds no config.json: it is no model", hint="name a model's folder, or a run")
        return Trained(name=name, base=section, adapter=None, folder=model_folder(section))
    return Trained(name=origin.name, base=origin.base, adapter=origin.adapter, folder=origin.folder)


def _result(run: Run) -> Trained:
    state = run.state
    if state != "finished" or not run.model_path.is_dir():
        status = run.status()
        where = f"{run.name} is {state}, after step {status['step']} of {status['num_steps']}: it has no model yet"
        steps, hint = checkpoints_of(run), prospects(run) or "wait for its end"
        if state == "finished":
            where = f"{run.name} is finished, and {run.model_path} is gone"
            hint = f"put it back, or `tunekit rerun {run.path}` makes it again"
        if steps:
            hint = f"name one of its checkpoints, such as --checkpoint {steps[-1]}; or {hint}"
        raise RunError(where, hint=hint)
    return _of_run(run, run.model_path, run.plan, None)


def _checkpoint(run: Run, name: str) -> Trained:
    try:
        checkpoint = named(run, name, weights_only=True)
    except RunError as error:
        raise RunError(error.problem.replace("--from", "checkpoint", 1), hint=error.hint) from error
    recipe = run.recipe
    if (checkpoint.path / "recipe.yaml").is_file():
        recipe = reload_recipe(checkpoint.path / "recipe.yaml")
    text = run.path if not (checkpoint.path / "plan.yaml").is_file() else checkpoint.path
    plan = read_plan(text / "plan.yaml", recipe)
    if not any(checkpoint.path.glob("*.safetensors")):
        raise RunError(
            f"{checkpoint.path.name} of {run.name} holds its weights in the parts of {plan.layout.name}",
            hint="resume the run to its end: its result is whole",
        )
    return _of_run(run, checkpoint.path, plan, checkpoint.step)


def _of_run(run: Run, folder: Path, plan: Plan, step: int | None) -> Trained:
    """The result of a run, or a checkpoint of it."""
    name = run.name if step is None else f"{run.name}, step {step}"
    where, adapter = str(folder.resolve()), plan.recipe.adapter
    if not isinstance(adapter, FullAdapter):
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise ModelError(f"{folder} has no {ADAPTER_WEIGHTS}", hint="name another checkpoint, or train again")
        return Trained(name, plan.base, adapter, where, run, step)
    trust = plan.base.trust_remote_code
    own = ModelSection(path=where, trust_remote_code=trust)
    origin = plan.origin
    before = Trained(plan.base.path, plan.base, None, model_folder(plan.base))
    if origin is not None:
        before = Trained(origin.name, origin.base, origin.adapter, origin.folder)
    return Trained(name, own, None, where, run, step, before)


def checkpoints_of(run: Run) -> list[int]:
    """Steps of the checkpoints of a run that are there in full, by the sizes of their files."""
    folders = (run.path / "checkpoints").glob("checkpoint-*")
    return sorted(
        steps_of(folder)
        for folder in folders
        if folder.suffix == "" and steps_of(folder) >= 0 and fault_of(folder, contents=False) is None
    )


def load_trained(
    found: Trained,
    *,
    dtype: Dtype | Literal["auto"],
    device: str,
    as_trained: bool = True,
) -> "PreTrainedModel":
    """A model on a device, in evaluation mode; its adapter beside its weights, in float32.

    Args:
        found: Which.
        dtype: Type of its weights; `auto`: as they are stored.
        device: Where they go.
        as_trained: Whether the base of a QLoRA adapter is quantised as it was in training, rather than whole.

    Raises:
        ModelError: It cannot be loaded.
    """
    from tunekit.models.load import load_model, lora_config, read_adapter

    adapter = found.adapter
    model = load_model(
        found.base,
        dtype=stored_dtype(found) if dtype == "auto" else dtype,
        device=device,
        quantization=adapter if as_trained and isinstance(adapter, QloraAdapter) else None,
        head_seed=0 if found.judges else None,
    )
    if adapter is not None:
        from peft import get_peft_model

        adapted = get_peft_model(model, lora_config(adapter, model, task="SEQ_CLS" if found.judges else "CAUSAL_LM"))
        read_adapter(adapted, Path(found.folder))
        model = cast("PreTrainedModel", adapted)
    return cast("PreTrainedModel", model.eval())


def tokenizer_of(found: Trained, folder: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model, or of another folder that is to have the same.

    Raises:
        ModelError: It cannot be loaded.
    """
    from transformers import AutoTokenizer

    where, revision = (folder or found.folder), None if found.run is not None else found.base.revision
    try:
        return AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=found.base.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if Path(where).is_dir() and not any(Path(where).glob("tokenizer*")):
            raise ModelError(f"{where} holds no tokenizer", hint="put back its tokenizer.json") from error
        first = str(error).partition("\n")[0]
        raise ModelError(f"the tokenizer in {where} cannot be loaded: {first}", hint="it may be damaged") from error


def config_of(found: Trained) -> "PretrainedConfig":
    """The configuration of a model, or of the one below its adapter.

    Raises:
        ModelError: It cannot be read.
    """
    from transformers import AutoConfig

    where = model_folder(found.base)
    try:
        return AutoConfig.from_pretrained(
            where, revision=found.base.revision, trust_remote_code=found.base.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        if Path(where).is_dir() and not (Path(where) / "config.json").is_file():
            raise ModelError(f"{where} holds no config.json", hint="put it back from a copy") from error
        first = str(error).partition("\n")[0]
        raise ModelError(f"{where}: its config.json cannot be read: {first}", hint="it may be damaged") from error


def stored_dtype(found: Trained) -> Dtype:
    """The type in which the weights of a model, or of the one below its adapter, are stored.

    Raises:
        TunekitError: They are stored in a type that is none of a model's own.
    """
    config = config_of(found)
    text = config.get_text_config()
    name = str(config.dtype or text.dtype or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise TunekitError(
            f"{model_folder(found.base)}: its weights are stored as {name}", hint="name a type with --dtype"
        )
    return cast(Dtype, name)
