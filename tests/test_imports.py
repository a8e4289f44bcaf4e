"""What is imported when, who may import whom, and that every field of the recipe is read by somebody."""

import ast
import json
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType

import pytest

from tunekit.recipe import schema
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections import rewards
from tunekit.recipe.sections.data import HANDED_DOWN, CompleteSource, DataSection
from tunekit.recipe.sections.section import Section

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tunekit"
HEAVY = {"torch", "transformers", "trl", "datasets", "peft", "accelerate", "bitsandbytes", "pandas", "numpy"}
BROKEN = "model: pico\ndata: {trian: my.jsonl}\nadapter: {type: lora, rnak: 8}\ntrain: {learning_rate: -1}\n"

RUN = """
import json, sys
sys.argv[0] = "tunekit"
status = None
try:
    from tunekit.cli.app import main
    main()
except SystemExit as end:
    status = end.code
print("\\n" + json.dumps({"status": status or 0, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""
"""Runs the command line in-process, then prints its exit status and the top-level packages that it loaded."""


def tunekit(cwd: Path, *args: str) -> tuple[int, set[str], str]:
    """Exit status, loaded packages and all output of a tunekit command in a new process."""
    command = [sys.executable, "-c", RUN, *args]
    # One of the commands clears the cache: it is not the one that other tests prepare their rows in.
    own = os.environ | {"XDG_CACHE_HOME": str(cwd / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=own)
    shown, _, last = done.stdout.rstrip().rpartition("\n")
    assert last.startswith("{"), done.stdout + done.stderr
    result = json.loads(last)
    return result["status"], set(result["modules"]), shown + done.stderr


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("--help", 0),
        ("train --help", 0),
        ("check sft/quickstart", 0),
        ("check broken.yaml", 2),
        ("check no/such-recipe", 2),
        ("check sft/quickstart train.learning_rte=1", 2),
        ("train broken.yaml", 2),
        ("plan broken.yaml", 2),
        ("recipes", 0),
        ("recipes copy sft/quickstart mine.yaml", 0),
        ("schema", 0),
        ("explain", 0),
        ("explain adapter.rank", 0),
        ("rewards broken.yaml", 2),
        ("explain adapter.rnak", 2),
        ("data cache", 0),
        ("data cache --clear", 0),
        ("data --help", 0),
        ("runs", 0),
        ("runs show nothing", 2),
    ],
)
def test_quick_commands_load_nothing_heavy(tmp_path: Path, command: str, status: int) -> None:
    (tmp_path / "broken.yaml").write_text(BROKEN)
    found, modules, shown = tunekit(tmp_path, *command.split())
    assert found == status, shown
    assert "Traceback" not in shown
    assert not modules & HEAVY


def test_doctor_and_plan_load_no_torch(tmp_path: Path) -> None:
    commands = (
        "doctor",
        "plan sft/quickstart",
        "plan sft/quickstart --on 8xh100",
        "plan sft/quickstart --on t4 --on h200",
    )
    for command in commands:
        status, modules, shown = tunekit(tmp_path, *command.split())
        assert status == 0, shown
        assert not modules & {"torch", "transformers", "trl", "peft", "accelerate"}


def test_importing_tunekit_loads_nothing_heavy() -> None:
    code = "import sys, tunekit; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & HEAVY


@pytest.mark.parametrize("module", ["tunekit.training.worker", "tunekit.tracking.process"])
def test_a_process_of_a_run_sets_its_environment_before_libraries_read_it(module: str) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "transformers", "trl", "peft", "accelerate", "datasets"}


def test_importing_tunekit_leaves_the_environment_and_logging_alone() -> None:
    code = (
        "import logging, os, warnings\n"
        "before = dict(os.environ), list(logging.root.handlers), list(warnings.filters)\n"
        "import tunekit, tunekit.cli.app\n"
        "assert before == (dict(os.environ), list(logging.root.handlers), list(warnings.filters))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_contracts_are_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def sections(model: type[Section], key: str) -> Iterator[tuple[str, type[Section]]]:
    """The sections under `model` with the key at which each stands, `model` itself first."""
    yield key, model
    for name, field in model.model_fields.items():
        for member in members(field.annotation):
            yield from sections(member, name)


def members(annotation: object) -> list[type[Section]]:
    """The sections in an annotation, looked for in unions and the like."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in members(part)]


class Reads(ast.NodeVisitor):
    """Collects `(what, field)` for every attribute that a module reads.

    `what` is the annotation of the receiver where there is one in the function (`adapter: LoraAdapter` gives
    `LoraAdapter`), what it was assigned from (`section = recipe.data` gives `data`), or else its last name
    (`recipe.train.seed` and `train.seed` give `train`). What a loop goes over gives its annotation to the variable.
    """

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self.names: set[str] = set()
        self.annotated: list[dict[str, set[str]]] = [{}]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.annotated.append({**self.annotated[-1], "self": {node.name}})
        self.generic_visit(node)
        self.annotated.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name.lstrip("_").startswith("conflicts"):
            return  # A field that is only checked does nothing.
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        known = {each.arg: words(each.annotation) for each in arguments if each.annotation is not None}
        self.annotated.append({**self.annotated[-1], **known})
        self.generic_visit(node)
        self.annotated.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.annotated[-1][node.target.id] = words(node.annotation)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.note_items(node.target, node.iter)
        self.generic_visit(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        for part in node.generators:
            self.note_items(part.target, part.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        for part in node.generators:
            self.note_items(part.target, part.iter)
        self.generic_visit(node)

    def note_items(self, target: ast.expr, iterable: ast.expr) -> None:
        if isinstance(target, ast.Name) and isinstance(iterable, ast.Name):
            self.annotated[-1][target.id] = self.annotated[-1].get(iterable.id, set())
        elif isinstance(target, ast.Name) and isinstance(iterable, ast.Attribute):
            self.annotated[-1][target.id] = {iterable.attr}

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Attribute):
            self.annotated[-1][target.id] = {node.value.attr}
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = node.value
        if isinstance(owner, ast.Attribute):
            self.found.add((owner.attr, node.attr))
        elif isinstance(owner, ast.Name):
            for what in self.annotated[-1].get(owner.id, {owner.id}):
                self.found.add((what, node.attr))
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.found |= {(ast.unparse(node.cls), name) for name in node.kwd_attrs}
        self.generic_visit(node)


def words(annotation: ast.expr) -> set[str]:
    """The names in an annotation."""
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}


def reads() -> Reads:
    """All that the package reads, the schema itself aside."""
    visitor = Reads()
    for file in PACKAGE.rglob("*.py"):
        if file != Path(schema.__file__):
            visitor.visit(ast.parse(file.read_text(encoding="utf-8")))
    return visitor


def aliases(section: type[Section]) -> set[str]:
    """Names that stand for the section in annotations: its own, its bases', its children's and unions with it."""
    family = {kind.__name__ for kind in (*section.__mro__, *section.__subclasses__())}
    named = {**vars(schema), **vars(rewards)}
    unions = {name for name, value in named.items() if is_union(value) and section in members(value)}
    return (family | unions) - {"Section", "BaseModel", "object"}


def is_union(value: object) -> bool:
    return isinstance(value, UnionType) or typing.get_origin(value) is not None


def test_every_field_of_the_recipe_is_read_somewhere() -> None:
    seen = reads()
    unread = []
    for key, section in sections(Recipe, "recipe"):
        for name, field in section.model_fields.items():
            receivers = {key, *aliases(section)}
            is_tag = (
                typing.get_origin(field.annotation) is typing.Literal and len(typing.get_args(field.annotation)) == 1
            )
            if section is DataSection and name in HANDED_DOWN:
                receivers |= {CompleteSource.__name__}
            read = any((receiver, name) in seen.found for receiver in receivers)
            if not read and not (is_tag and section.__name__ in seen.names):
                unread.append(f"{key}.{name} ({section.__name__})")
    assert not unread, (
        "accepted in a recipe, but read nowhere in tunekit/: "
        + ", ".join(unread)
        + "\nRead it as `section.field` from a value that is annotated with the section or named like its key,"
        + "\nor take it out of tunekit/recipe/schema.py: a key that does nothing is a defect."
    )


def test_field_check_notices_a_field_that_nobody_reads() -> None:
    visitor = Reads()
    visitor.visit(ast.parse("class Way:\n def use(self): return self.beta\n def conflicts(self): return self.gamma"))
    assert ("Way", "beta") in visitor.found and ("Way", "gamma") not in visitor.found
    visitor.visit(ast.parse("def build(adapter: LoraAdapter, other: Thing): return adapter.rank + other.alpha"))
    visitor.visit(ast.parse("section = recipe.data; section.packing"))
    assert {("LoraAdapter", "rank"), ("data", "packing")} <= visitor.found
    assert not {("LoraAdapter", "alpha"), ("adapter", "alpha")} & visitor.found
