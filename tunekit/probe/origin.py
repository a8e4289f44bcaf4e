"""Folder that training starts from: the result of a run, or an adapter; read from its small files.

The result of a run lies in `model/` of the run's folder, whose recipe and plan tell the base and what came before.
An adapter by itself says in its `adapter_config.json` what it is; only what a recipe can say is taken.

The code that comes with a model: at which commit it is, and whether it is still what it was.

transformers runs it where `trust_remote_code` allows that. On the hub it can change under a name, so it must be named
by its commit; in a folder its files are remembered by what is in them.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from tunekit.errors import ModelError
from tunekit.estimates.facts import Ancestor, Origin, is_beside_text
from tunekit.estimates.models.rope import section_of
from tunekit.estimates.models.towers import part_of
from tunekit.files import SHIPPED_MODELS, read_table
from tunekit.probe.model_files import broken, check_links, read_settings
from tunekit.recipe.load import reload_recipe
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import AnyPeftAdapter, FullAdapter, LoraAdapter, PeftAdapter
from tunekit.recipe.sections.model import ModelSection

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter."""

_Adapter = TypeVar("_Adapter", bound=PeftAdapter)

PLAIN_ADAPTER = Path(__file__).with_name("plain_adapter.yaml")
"""Values in `adapter_config.json` of adapters that a recipe can describe."""


def origin_of(section: ModelSection) -> Origin | None:
    """Return the origin of a model section; None where that is a model which no run made.

    Raises:
        ModelError: It is an adapter that lacks a part, or that a recipe has no words for.
    """
    folder = Path(section.path)
    if section.path in SHIPPED_MODELS or not folder.is_dir():
        return None
    folder = folder.resolve()
    if is_result(folder):
        return _of_run(folder, section.path)
    return _of_adapter(folder, section) if (folder / ADAPTER_CONFIG).is_file() else None


def is_result(folder: Path) -> bool:
    """Return whether a folder is the result of a run."""
    return folder.name == "model" and (folder.parent / "status.json").is_file()


def _of_run(folder: Path, path: str) -> Origin:
    run = folder.parent
    recipe = reload_recipe(run / "recipe.yaml")
    adapter = None
    if not isinstance(recipe.adapter, FullAdapter):
        _check_weights(folder, path)
        adapter = in_folder(recipe.adapter, folder)
    return origin_in(folder, recipe, adapter, _origin_in(run / "plan.yaml"))


def origin_in(folder: Path, recipe: Recipe, adapter: AnyPeftAdapter | None, earlier: Origin | None) -> Origin:
    """Return the result of a run as what training starts from; it need not be there yet.

    Args:
        folder: The result's folder, in the folder of the run.
        recipe: The recipe of the run.
        adapter: Section of the adapter that is saved; None where all weights are.
        earlier: What the run itself started from.
    """
    run = folder.parent
    base = earlier.loaded_for(recipe.model) if earlier else recipe.model
    if adapter is None:
        base = ModelSection(path=str(folder), trust_remote_code=base.trust_remote_code)
    this = Ancestor(name=run.name, path=str(run), method=recipe.method.type, adapter=recipe.adapter.type)
    return Origin(
        folder=str(folder),
        base=base,
        adapter=adapter,
        start=earlier.start if earlier else recipe.model.path,
        runs=(*(earlier.runs if earlier else ()), this),
    )


def in_folder(adapter: _Adapter, folder: Path) -> _Adapter:
    """Return the section of an adapter as a run saved it in a folder, with the ranks there if rows decided on them."""
    if not isinstance(adapter, LoraAdapter) or not (adapter.distributes_ranks or adapter.relora):
        return adapter.as_saved
    config = read_settings(folder, ADAPTER_CONFIG, str(folder))
    if adapter.relora:
        return adapter.of_times_the_rank(config["r"] // adapter.rank)
    patterns = {name: config[name] or None for name in ("rank_pattern", "alpha_pattern")}
    update = {"target_modules": sorted(config["target_modules"]), **patterns, "rho": 1.0}
    return adapter.model_copy(update=update).as_saved


def _origin_in(plan: Path) -> Origin | None:
    """Return the origin of a run, from its plan."""
    origin = yaml.safe_load(plan.read_text(encoding="utf-8")).get("origin")
    return None if origin is None else Origin.model_validate(origin)


def _of_adapter(folder: Path, section: ModelSection) -> Origin:
    check_links(folder, section.path)
    config = read_settings(folder, ADAPTER_CONFIG, section.path)
    _check_weights(folder, section.path)
    values: dict[str, Any] = read_table(PLAIN_ADAPTER)
    unsupported = [name for name, plain in values.items() if config.get(name, plain) not in (plain, None)]
    unsupported += [name for name in ("exclude_modules",) if isinstance(config.get(name), str)]
    targets = config.get("target_modules")
    if unsupported or not targets:
        what = f"{unsupported[0]}: {config[unsupported[0]]}" if unsupported else f"target_modules: {targets}"
        is_prompt = config.get("peft_type") == "PROMPT_TUNING"
        raise ModelError(
            f"model.path: {section.path!r} is an adapter with {what}, which recipes do not support",
            hint="pass the run that trained it" if is_prompt else "merge it into its base model first",
        )
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"model.path: {section.path!r} is an adapter without its base model",
            hint=f"set base_model_name_or_path in its {ADAPTER_CONFIG}",
        )
    _check_base(folder, base, section.path)
    try:
        adapter = _lora(config)
    except (KeyError, TypeError, ValidationError) as error:
        why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else _first_of(error)
        raise broken(section.path, ADAPTER_CONFIG, why) from error
    revision, changed = config.get("revision"), folder / "config.json"
    scaling = section_of(read_settings(folder, "config.json", section.path)) if changed.is_file() else None
    of_base = ModelSection(
        path=base, revision=revision, rope_scaling=scaling, trust_remote_code=section.trust_remote_code
    )
    return Origin(folder=str(folder), base=of_base, adapter=adapter, start=base, runs=())


def _check_base(folder: Path, base: str, path: str) -> None:
    """Refuse adapters whose base is themselves, also by way of others."""
    folders = {folder}
    while (Path(base) / ADAPTER_CONFIG).is_file():
        if (folder := Path(base).resolve()) in folders:
            raise broken(path, ADAPTER_CONFIG, f"its base {base!r} is an adapter on itself")
        folders.add(folder)
        base = str(read_settings(folder, ADAPTER_CONFIG, base).get("base_model_name_or_path"))


def _lora(config: Mapping[str, Any]) -> LoraAdapter:
    """Return the section of an adapter by PEFT's configuration of it."""
    targets, layers = config["target_modules"], config.get("layers_to_transform")
    named = [] if isinstance(targets, str) else [f"{name}." for name in targets if name.count(".") > 1]
    parts = {part_of(name) for name in named if is_beside_text(name)}
    in_towers: Any = dict.fromkeys(parts - {"audio_tower"}, "lora")
    return LoraAdapter(
        **in_towers,
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout") or 0.0,
        rank_pattern=config.get("rank_pattern") or None,
        alpha_pattern=config.get("alpha_pattern") or None,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        exclude_modules=sorted(config.get("exclude_modules") or []) or None,
        layers_to_transform=[layers] if isinstance(layers, int) else layers or None,
        use_rslora=config.get("use_rslora") or False,
        lora_bias=config.get("lora_bias") or False,
        use_dora=config.get("use_dora") or False,
        modules_to_save=sorted(config.get("modules_to_save") or []) or None,
    )


def _first_of(error: TypeError | ValidationError) -> str:
    if isinstance(error, TypeError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _check_weights(folder: Path, path: str) -> None:
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = ", only pickled ones, which can run code when opened"
        raise ModelError(
            f"model.path: {path!r} has no {ADAPTER_WEIGHTS}" + pickled * (folder / "adapter_model.bin").is_file(),
            hint="save the adapter again with PEFT, as safetensors",
        )


COMMIT = re.compile(r"[0-9a-f]{40}")
"""A commit of the hub in full."""

_NAMING = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json")
"""Files that name classes of a model's own."""


def is_folder(section: ModelSection) -> bool:
    """Return whether a model is a local folder, or should be by its name, rather than one of the hub."""
    path = section.path
    return path in SHIPPED_MODELS or Path(path).is_dir() or path.startswith((".", "/", "~")) or path.count("/") > 1


def code_of(section: ModelSection) -> dict[str, str]:
    """The code that may be run of a model's folder: SHA-256 of each file by its path there.

    Raises:
        ModelError: A part of the code lies in another repository, of which nobody knows the commit.
    """
    folder = Path(section.path)
    if not section.trust_remote_code or not folder.is_dir():
        return {}
    refuse_others_code(folder, section.path)
    files = sorted(folder.rglob("*.py"))
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def refuse_others_code(folder: Path, path: str) -> None:
    """Refuse a model that runs code of which the commit is not the model's.

    Args:
        folder: Its small files.
        path: What the recipe calls it.

    Raises:
        ModelError: It does.
    """
    for name in _NAMING:
        if (folder / name).is_file():
            _check_classes(read_settings(folder, name, path).get("auto_map"), path)


def _check_classes(classes: Any, path: str) -> None:
    named = classes.values() if isinstance(classes, dict) else [classes]
    for name in (class_name for item in named for class_name in (item if isinstance(item, list) else [item])):
        if isinstance(name, str) and "--" in name:
            raise ModelError(
                f"model.path: {path!r} runs code of another repository, {name.partition('--')[0]}, not at a commit",
                hint="copy that code into the model folder, and refer to it in auto_map without the repository",
            )


def check_code(section: ModelSection, known: dict[str, str]) -> None:
    """See that the code of a model's folder is what it was when a run was made.

    Raises:
        ModelError: A file is another, is gone, or is new. It is named.
    """
    code = code_of(section)
    changed = sorted(name for name in {*known, *code} if known.get(name) != code.get(name))
    if changed:
        raise ModelError(
            f"{Path(section.path) / changed[0]}: the code that comes with the model changed since the run was made",
            hint="read it; a new run uses it as it is: tunekit train",
        )
