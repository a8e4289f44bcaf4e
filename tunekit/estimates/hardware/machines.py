"""Machines by name, to plan for what is not here: `h200`, `8xh100`, `2x8xrtx5090`, or a YAML file that describes one.

A name says nodes, accelerators in each, and the kind of accelerator, which stands in the catalogue. What hosts them
is not known from a name, and nothing is assumed of it; a file can say.
"""

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from tunekit.errors import PlanError
from tunekit.estimates.facts import Device, Facts, Figures, Hardware
from tunekit.estimates.hardware.catalogue import GIGA, NOT_TRAINED_ON, NOTES, Accelerator, catalogue
from tunekit.recipe.reading.parse import Key, Place, Places, Problem, YAMLProblem, read_yaml
from tunekit.recipe.reading.phrases import show

_NAME = re.compile(r"(?:(?:([0-9]{1,6})x)?([0-9]{1,6})x)?(.*)", re.DOTALL)
"""Nodes, accelerators in each, and what they are."""

_MAKERS = re.compile(r"^(?:nvidia|amd|intel|aws|google|geforce|tesla|instinct)+")

_FORMS = "write h100, 8xh100 or 2x8xh100, or pass a YAML file"

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Machine(Facts):
    """A machine that was named or described, before it is asked whether tunekit trains on it."""

    name: str
    """As the user wrote it."""
    accelerator: Accelerator
    figures: Figures
    num_accelerators: int = 1
    """In each node."""
    num_nodes: int = 1
    free_mib: int
    cpu: Device | None = None
    num_cores: int | None = None
    flash_attn: bool | None = None

    def hardware(self) -> Hardware:
        """Return the machine that a plan is made for.

        Raises:
            PlanError: There is no plan for its platform.
        """
        kind = self.accelerator
        if kind.platform in NOT_TRAINED_ON:
            raise PlanError(
                f"{self.name}: tunekit supports CUDA devices only; {NOT_TRAINED_ON[kind.platform]}",
                hint="plan for another accelerator",
            )
        device = kind.device.model_copy(update={"memory_free_bytes": self.free_mib * 2**20})
        return Hardware(
            cpu=self.cpu,
            accelerators=(device,) * self.num_accelerators,
            num_cores=self.num_cores,
            flash_attn=self.flash_attn,
            num_nodes=self.num_nodes,
            figures=self.figures,
            note=NOTES.get(kind.platform),
        )


class MachineFile(Facts):
    """A machine in YAML. What it leaves out is taken from the catalogue where `accelerator` is one of its names."""

    accelerator: str
    """A name of the catalogue, or any other with `memory_gib` and `compute_capability`."""
    num_accelerators: Count = 1
    """In each node."""
    num_nodes: Count = 1
    memory_gib: Amount | None = None
    free_memory_gib: Amount | None = None
    """Free memory, where other programs hold some of it."""
    compute_capability: tuple[int, int] | None = None
    tflops_16bit: Amount | None = None
    tflops_fp8: Amount | None = None
    memory_gb_per_second: Amount | None = None
    link_gb_per_second: Amount | None = None
    """Between the accelerators of a node, in one direction."""
    pcie_generation: Annotated[int, Field(ge=1, le=6)] | None = None
    network_gb_per_second: Amount | None = None
    """Each accelerator's share of the network between nodes, in one direction."""
    disk_gb_per_second: Amount | None = None
    """Of a node's local disk."""
    usd_per_hour: Amount | None = None
    """Of one accelerator."""
    host_memory_gib: Amount | None = None
    """Host memory of a node."""
    num_cores: Count | None = None
    """Of a node's CPUs."""
    flash_attn: bool | None = None
    """True if the flash-attn package is installed there."""


def find_machine(on: str) -> Machine:
    """The machine that a user names: `h200`, `8xh100`, `2x8xrtx5090`, or a YAML file's path.

    Upper and lower case, spaces and hyphens do not count, nor does the maker's name.

    Raises:
        PlanError: There is no such accelerator or file, or the file has a fault.
    """
    if Path(on).suffix.lower() in (".yaml", ".yml"):
        return _read(Path(on))
    nodes, accelerators, name = _split(on)
    kind = _by_name().get(_plain(name))
    if kind is None:
        _refuse_name(on, nodes, accelerators, name)
    if accelerators > kind.max_per_node:
        whole = accelerators % kind.max_per_node == 0
        better = _written(nodes * accelerators // kind.max_per_node, kind.max_per_node, kind.name)
        raise PlanError(
            f"'{on}': {accelerators} {kind.label} in one node; nodes have at most {kind.max_per_node}",
            hint=f"did you mean '{better}'?" if whole else "write how many nodes, or pass a YAML file",
        )
    return Machine(
        name=on,
        accelerator=kind,
        figures=kind.figures,
        num_accelerators=accelerators,
        num_nodes=nodes,
        free_mib=kind.memory_mib,
    )


def machines() -> list[str]:
    """Names of machines to plan for: each accelerator that tunekit trains on, alone and as many as a node has."""
    kinds = sorted((kind for kind in catalogue() if kind.platform not in NOT_TRAINED_ON), key=lambda kind: kind.name)
    return [_written(1, number, kind.name) for kind in kinds for number in sorted({1, kind.max_per_node})]


def _split(on: str) -> tuple[int, int, str]:
    """Nodes, accelerators in each and the accelerator's name, from a machine's name."""
    text = re.sub(r"\s", "", on).lower().replace("×", "x").replace("*", "x")
    match = _NAME.fullmatch(text)
    assert match is not None, "the pattern matches any text"
    nodes, accelerators, name = int(match[1] or 1), int(match[2] or 1), match[3]
    if not nodes or not accelerators:
        raise PlanError(f"'{on}': a machine needs at least one node and one accelerator", hint=_FORMS)
    if not name or re.match("[0-9]+x", name):
        raise PlanError(f"'{on}': invalid machine name", hint=_FORMS)
    return nodes, accelerators, name


def _plain(name: str) -> str:
    """A name without what does not count in it."""
    return _MAKERS.sub("", re.sub(r"[\s_-]", "", name.lower()))


@cache
def _by_name() -> dict[str, Accelerator]:
    return {_plain(name): kind for kind in catalogue() for name in (kind.name, *kind.aliases, *kind.reported)}


def _written(nodes: int, accelerators: int, name: str) -> str:
    """A machine's name, as short as it can be."""
    return f"{nodes}x{accelerators}x{name}" if nodes > 1 else f"{accelerators}x{name}" if accelerators > 1 else name


def _refuse_name(on: str, nodes: int, accelerators: int, name: str) -> NoReturn:
    """Say which accelerators there are, the nearest first."""
    near = difflib.get_close_matches(_plain(name), _by_name(), n=3, cutoff=0.7)
    names = (f"'{_written(nodes, accelerators, _by_name()[other].name)}'" for other in near)
    suggestion = " or ".join(dict.fromkeys(names))
    available = f"available: {', '.join(kind.name for kind in catalogue())}; or pass a YAML file"
    raise PlanError(
        f"'{on}': unknown accelerator '{name}'",
        hint=f"did you mean {suggestion}? {available}" if suggestion else available,
    )


def _read(path: Path) -> Machine:
    """The machine that a file describes."""
    start = Place(0, 1, 1, str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
        values, places, problems = read_yaml(text, start)
    except FileNotFoundError:
        raise PlanError(f"{path}: file not found", hint=_FORMS) from None
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: is not UTF-8 text", hint="pass a YAML file") from None
    except YAMLProblem as error:
        raise PlanError(str(error.problem)) from None
    if not problems and not isinstance(values, dict):
        what = f"must be a mapping with accelerator, num_accelerators and so on, got {show(values)}"
        problems = [Problem(start, what)]
    _raise(problems)
    try:
        described = MachineFile.model_validate(values)
    except ValidationError as error:
        _raise([_problem(error_details, places) for error_details in error.errors(include_url=False)])
    return _described(path, described, places)


def _raise(problems: list[Problem]) -> None:
    if problems:
        raise PlanError("\n".join(str(problem) for problem in sorted(problems, key=lambda bad: bad.place)))


def _problem(error: ErrorDetails, places: Places) -> Problem:
    """One of pydantic's complaints, at its place in the file."""
    key: Key = error["loc"]
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(key[0]), MachineFile.model_fields, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"available: {', '.join(MachineFile.model_fields)}"
        return Problem(places.of_key(key), "unknown key", key, hint)
    if error["type"] == "missing":
        return Problem(places.of_key(key), "missing required key", key)
    message = error["msg"]
    return Problem(places.of_value(key), f"{message[0].lower()}{message[1:]}, got {show(error['input'])}", key)


def _described(path: Path, file: MachineFile, places: Places) -> Machine:
    """The machine of a file, over what the catalogue knows of its accelerator."""
    known_figures = _by_name().get(_plain(file.accelerator))
    if known_figures is None and (file.memory_gib is None or file.compute_capability is None):
        what = f"'{file.accelerator}' is not in the catalogue; memory_gib and compute_capability are required"
        names = ", ".join(kind.name for kind in catalogue())
        _raise([Problem(places.of_value(("accelerator",)), what, ("accelerator",), f"add them, or use one of {names}")])
    name, most = file.accelerator, file.num_accelerators
    base = known_figures or Accelerator(name=name, label=name, memory_mib=0, max_per_node=most)
    sheet = {name: value for name, value in file if name in Accelerator.model_fields and value is not None}
    if file.memory_gib is not None:
        sheet["memory_mib"] = int(file.memory_gib * 1024)
    kind = base.model_copy(update=sheet)
    free_mib = kind.memory_mib if file.free_memory_gib is None else int(file.free_memory_gib * 1024)
    if free_mib > kind.memory_mib:
        key = ("free_memory_gib",)
        _raise([Problem(places.of_value(key), f"exceeds its memory of {kind.memory_mib / 1024:g} GiB", key)])
    figures = kind.figures
    if file.usd_per_hour is not None:
        figures = figures.model_copy(update={"usd_per_hour": file.usd_per_hour, "price_source": str(path)})
    if file.disk_gb_per_second is not None:
        figures = figures.model_copy(update={"disk_bytes_per_second": file.disk_gb_per_second * GIGA})
    host = None
    if file.host_memory_gib is not None:
        size, name = int(file.host_memory_gib * 2**30), f"CPU ({path.stem})"
        host = Device(kind="cpu", name=name, memory_total_bytes=size, memory_free_bytes=size, native_bfloat16=False)
    return Machine(
        name=str(path),
        accelerator=kind,
        figures=figures,
        num_accelerators=file.num_accelerators,
        num_nodes=file.num_nodes,
        free_mib=free_mib,
        cpu=host,
        num_cores=file.num_cores,
        flash_attn=file.flash_attn,
    )
