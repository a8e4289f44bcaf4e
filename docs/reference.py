"""Pages that MkDocs makes when it builds the site: every field of recipes, every command, every public name of Python.

A hook of `mkdocs.yml`. Texts are those that users see elsewhere: the strings under the fields, help texts, docstrings.
It also brings files of the repository into the site: shipped recipes, results of measurements, the changelog and
pictures of the web UI.
"""

import ast
import itertools
import json
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import click
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import tunekit
from tunekit import frontend
from tunekit.cli.app import app
from tunekit.estimates.hardware.catalogue import catalogue
from tunekit.estimates.models.model_config import known_models
from tunekit.files import list_recipes
from tunekit.planner.plan import count
from tunekit.recipe.chat_templates import named_templates
from tunekit.recipe.explain import FieldDocument, document_fields

ROOT = Path(__file__).parents[1]
COPIED = {
    "changelog.md": "CHANGELOG.md",
    "measured/accelerators.md": "benchmarks/results/LOG.md",
    "measured/speed.md": "benchmarks/results/speed.md",
    "measured/layouts.md": "benchmarks/results/equality.md",
    "measured/interruptions.md": "benchmarks/results/exact.md",
    **{f"images/{path.name}": f"tests/webui/screens/{path.name}" for path in (ROOT / "tests/webui/screens").iterdir()},
}
"""Files of the repository by their places in the site."""

SIGNATURE_WIDTH = 88
SECTIONS = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$", re.MULTILINE)
Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and the files that are copied."""
    for uri, path in COPIED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    pages = {**recipe_pages(), "reference/recipes.md": shipped_page(), "reference/cli.md": cli_page()}
    pages |= {"reference/chat-templates.md": templates_page(), "reference/known.md": known_page()}
    pages |= {"reference/python.md": python_page(), "measured/planner.md": planner_page()}
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def recipe_pages() -> dict[str, str]:
    """Return a page for each section of recipes, and one that lists them."""
    fields = list(document_fields())
    top = {field.key: field for field in fields if "." not in field.key}
    index = [
        "# Recipe\n",
        "A recipe is a YAML file with these sections. `tunekit explain KEY` prints the same texts.\n",
    ]
    index += [
        f"- [`{key}`]({key}.md) ({'; '.join(field.facts[1:])}): {field.paragraphs[0]}" for key, field in top.items()
    ]
    pages = {"reference/recipe/index.md": "\n".join(index) + "\n"}
    homes: dict[tuple[type, ...], str] = {}
    skipped: tuple[str, ...] = ()
    for key in top:
        lines, previous = [f"# {key}\n"], ""
        for field in (field for field in fields if field.key.split(".")[0] == key):
            if field.key.startswith(skipped):
                continue
            if field.key != previous and field.key != key:
                lines.append(f"## {field.key} {{ #{field.key} }}\n")
            lines += [f"*{'; '.join(field.facts)}*\n", _paragraphs(field)]
            home = homes.setdefault(field.sections, field.key) if field.sections else field.key
            if home != field.key:
                lines.append(f"Its fields are those of [`{home}`]({home.split('.')[0]}.md#{home}).\n")
                skipped = (*skipped, f"{field.key}.")
            previous = field.key
        pages[f"reference/recipe/{key}.md"] = "\n".join(lines)
    return pages


def _paragraphs(field: FieldDocument) -> str:
    """Return the texts of a field; those of a tag as a list, a variant a line."""
    if not field.key.endswith(".type") or len(field.paragraphs) == 1:
        return "\n\n".join(field.paragraphs) + "\n"
    variants = (paragraph.partition(": ") for paragraph in field.paragraphs)
    return "\n".join(f"- `{name}`: {text}" for name, _, text in variants) + "\n"


def planner_page() -> str:
    """Return the page of errors of the planner's memory, beside traces of the real modules."""
    results = json.loads((ROOT / "benchmarks/results/planner.json").read_text(encoding="utf-8"))
    lines = [
        "# The planner beside traces\n",
        "`python -m benchmarks.planner --save`, on a CPU.\n",
    ]
    lines += [
        "Errors of the peak, tensors only. Held-out steps were set aside before the formulas were fitted;",
        "of types that the formulas do not know, plans are corrected by a trace of other rows.\n",
    ]
    lines += ["| steps | set | number | median | largest | traced |", "|:--|:--|--:|--:|--:|:--|"]
    words = {
        "one": "SFT, one device",
        "many": "SFT, FSDP2",
        "methods": "DPO and GRPO, one device",
        "families": "SFT of types that the formulas do not know, one device",
        "families-many": "the same, FSDP2 over 2 to 64 devices",
    }
    for kind, is_held_out in itertools.product(words, (False, True)):
        rows = [row for row in results["rows"] if (row["kind"], row["held_out"]) == (kind, is_held_out)]
        errors = [abs(row["error"]) for row in rows]
        if errors:
            cells = [words[kind], "held out" if is_held_out else "development", str(len(errors))]
            traced = results["traced"][kind]
            cells += [f"{statistics.median(errors):.2%}", f"{max(errors):.2%}"]
            cells.append(f"{traced['date']}, transformers {traced['versions']['transformers']}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + estimators_section()


def estimators_section() -> str:
    """Return the section of public estimators on the held-out steps."""
    results = json.loads((ROOT / "benchmarks/results/estimators.json").read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {results['versions'][name]}" for name in ("accelerate", "deepspeed", "transformers"))
    lines = [
        "\n## Public estimators\n",
        f"`python -m benchmarks.planner --public --save`: {results['date']}, commit {results['commit']}, {versions}.\n",
        "The same held-out steps with the same traced peaks of tensors, for functions of other packages. Each is given",
        "what it takes: sizes, rows and their length, precision, checkpointing, LoRA, devices. Bytes that it names",
        "apart for context, fragmentation or safety are left out. Those of Accelerate and DeepSpeed count weights,",
        "gradients and optimizer states only. The steps are tunekit's, with a loss that computes logits for some",
        "tokens at a time; where a tool names the logits of all tokens, a second row is without them. Errors are of",
        "the steps that it answers; the others have an adapter, a layout, a type of weights or experts that it does",
        "not take.\n",
    ]
    head = ("answered", "median", "worst", "within 10 %")
    lines += [f"| estimator | {' | '.join(f'{kind}: {name}' for kind in ('one device', 'FSDP2') for name in head)} |"]
    lines += ["|:--|" + "--:|" * 2 * len(head)]
    rows: dict[str, list[str]] = {}
    for entry in results["summary"]:
        cells = [f"{entry['num_answered']} of {entry['num_steps']}", "", "", ""]
        if entry["num_answered"]:
            cells[1:3] = f"{entry['median_error']:.2%}", f"{entry['worst_error']:+.1%}"
            cells[3] = f"{entry['share_within_10_percent']:.0%}"
        rows.setdefault(entry["estimator"], []).extend(cells)
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def templates_page() -> str:
    """Return the page of the chat templates that recipes take by name."""
    lines = [
        "# Chat templates\n",
        "`model.chat_template` takes these names: [choosing one](../guides/data.md#choosing-a-chat-template).",
        "The token at the end of answers becomes the tokenizer's end token; where none is named, answers end with the",
        "tokenizer's own. Models of some types come without a template, and one is taken automatically.\n",
        "| name | end of answers | calls of tools | taken by models of type | source |",
        "|:--|:--|:--|:--|:--|",
    ]
    for name, template in named_templates().items():
        end = "" if template.end is None else f"`{template.end}`"
        source = template.source.removeprefix("https://")
        tools, types = "yes" if template.tools else "", ", ".join(f"`{kind}`" for kind in template.types)
        lines.append(f"| `{name}` | {end} | {tools} | {types} | [{source}]({template.source}) |")
    return "\n".join(lines) + "\n"


def known_page() -> str:
    """Return the page of the machines and models that plans need no device and no network for, with their sources."""
    machines = sorted(catalogue(), key=lambda one: one.name)
    lines = [
        "# Known machines and models\n",
        "`--on` takes these names, also as `8xNAME` and `2x8xNAME`, or a YAML file that describes a machine. GB are of",
        "the sheet, 10^9 bytes; peaks are dense; links count one direction; prices are of an hour of one device.\n",
        "| name | device | memory, GiB | 16-bit, TFLOP/s | memory, GB/s | link, GB/s | network, GB/s | USD/h |",
        "|:--|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for one in machines:
        price = "" if one.price is None else f"{one.price.usd_per_hour:g}"
        figures = (one.tflops_16bit, one.memory_gb_per_second, one.link_gb_per_second, one.network_gb_per_second)
        cells = [f"`{one.name}`", one.label, f"{one.memory_mib / 1024:.1f}"]
        cells += ["" if figure is None else f"{figure:g}" for figure in figures]
        lines.append(f"| {' | '.join([*cells, price])} |")
    lines.append("\nSources:\n")
    for one in machines:
        price = "" if one.price is None else f"; price: {one.price.source}, {one.price.day}"
        lines.append(f"- `{one.name}`: {'; '.join(one.sources)}{price}")
    models = sorted(known_models().items())
    sources = list(dict.fromkeys(model.source for _, model in models))
    lines += [
        "\n## Models\n",
        "A plan for one of these needs no file of it. Of any other model its `config.json` is enough.\n",
        "| model | type | parameters | source |",
        "|:--|:--|--:|--:|",
    ]
    for name, model in models:
        cells = [f"`{name}`", model.config["model_type"], count(model.num_params), str(sources.index(model.source) + 1)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["\nSources of the number of parameters:\n", *(f"{i}. {text}" for i, text in enumerate(sources, start=1))]
    return "\n".join(lines) + "\n"


def shipped_page() -> str:
    """Return the page of the shipped recipes, each with its text."""
    lines = ["# Shipped recipes\n", "`tunekit recipes copy NAME mine.yaml` copies one to edit.\n"]
    for recipe in list_recipes():
        lines += [f"## {recipe.name}\n", f"{recipe.description}\n"]
        lines += [f"```yaml\n{recipe.path.read_text(encoding='utf-8').strip()}\n```\n"]
    return "\n".join(lines)


def cli_page() -> str:
    """Return the page of all commands, with their arguments and options."""
    lines = ["# Command line\n", "`tunekit COMMAND --help` prints the same texts.\n"]
    lines += _command_lines(typer.main.get_command(app), None, "tunekit")
    return "\n".join(lines)


def _command_lines(command: click.Command, above: click.Context | None, name: str) -> Iterator[str]:
    """Yield the Markdown of a command and of those below it."""
    context = click.Context(command, parent=above, info_name=name)
    if above is not None:
        yield f"## {context.command_path}\n"
    yield f"{_inline(command.help or '')}\n"
    yield f"```text\n{' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n```\n"
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    yield from [f"- `{record[0]}`: {_inline(record[1])}" for record in records if record and "--help" not in record[0]]
    yield ""
    for name_below, below in sorted(getattr(command, "commands", {}).items()):
        yield from _command_lines(below, context, name_below)


def python_page() -> str:
    """Return the page of the public names of the package, read from the sources without importing them."""
    lines = ["# Python\n", "`tunekit.plan`, `tunekit.train` and the other names for users are in the package itself.\n"]
    lines += _of_module("{}", tunekit._HOMES)
    lines += ["`tunekit.frontend` has the types of results, and what user interfaces build on.\n"]
    lines += _of_module("{} of `tunekit.frontend`", frontend._HOMES)
    return "\n".join(lines)


def _of_module(heading: str, homes: Mapping[str, str]) -> Iterator[str]:
    """Yield the public names of a module, by kind."""
    definitions = {name: _definition(home, name) for name, home in sorted(homes.items())}
    for title, kinds in {
        "Functions": ast.FunctionDef,
        "Classes": ast.ClassDef,
        "Constants": (ast.Assign, ast.AnnAssign),
    }.items():
        shown = {name: found for name, found in definitions.items() if isinstance(found[0], kinds)}
        if shown:
            yield f"## {heading.format(title)}\n"
        for name, (definition, text) in shown.items():
            yield f"### {name} {{ #{name} }}\n"
            yield from _function_lines(definition) if isinstance(definition, ast.FunctionDef) else []
            yield from _class_lines(definition) if isinstance(definition, ast.ClassDef) else []
            yield from [f"{text}\n"] if not isinstance(definition, ast.FunctionDef | ast.ClassDef) else []


def _definition(home: str, name: str) -> tuple[Definition, str]:
    """Return the statement that binds a name in a module, and the string under it."""
    path = ROOT / Path(*home.split(".")).with_suffix(".py")
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for position, statement in enumerate(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if name in (*names, getattr(statement, "name", None)) and isinstance(statement, Definition):
            return statement, _string(body, position + 1)
    raise LookupError(f"{home} binds no {name}")


def _string(body: list[ast.stmt], position: int) -> str:
    """Return the string that stands at a position of a body, on one line; empty where none does."""
    statement = body[position] if position < len(body) else None
    value = statement.value if isinstance(statement, ast.Expr) else None
    return " ".join(str(value.value).split()) if isinstance(value, ast.Constant) else ""


def _function_lines(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the signature of a function and its docstring."""
    yield f"```python\n{_signature(function)}\n```\n"
    yield _docstring(function)


def _class_lines(definition: ast.ClassDef) -> Iterator[str]:
    """Yield the docstring of a class, its fields, properties and methods."""
    yield _docstring(definition)
    body = definition.body
    for position, statement in enumerate(body):
        if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.target).startswith("_"):
            text = _string(body, position + 1)
            yield f"- `{ast.unparse(statement.target)}`: `{ast.unparse(statement.annotation)}`{'. ' * bool(text)}{text}"
    yield ""
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and not statement.name.startswith("_"):
            is_property = any("property" in ast.unparse(decorator) for decorator in statement.decorator_list)
            returns = _returns(statement)
            words = f"{statement.name}{returns}" if is_property else _signature(statement)
            yield f"```python\n{words}\n```\n"
            yield _docstring(statement)


def _signature(function: ast.FunctionDef) -> str:
    """Return the signature of a function, an argument a line where one line would be too long."""
    arguments = ast.unparse(function.args)
    returns = _returns(function)
    arguments = re.sub(r"^(self|cls)(, |$)", "", arguments)
    line = f"{function.name}({arguments}){returns}"
    if len(line) <= SIGNATURE_WIDTH:
        return line
    parts = re.split(r", (?![^\[(]*[\])])", arguments)
    return f"{function.name}(\n    " + ",\n    ".join(parts) + f",\n){returns}"


def _returns(function: ast.FunctionDef) -> str:
    """Return the arrow and the type that a function returns, without the quotes of a name that is bound later."""
    node = function.returns
    text = str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node) if node else ""
    return f" -> {text}" if text else ""


def _docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return a docstring of Google's form as Markdown."""
    parts = SECTIONS.split(ast.get_docstring(node) or "")
    lines = [parts[0]]
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        items = re.split(r"\n(?=\S)", dedent(text.strip("\n")))
        words = [" ".join(item.split()) for item in items]
        if title in ("Args", "Attributes", "Raises"):
            words = [re.sub(r"^([\w*]+): ", r"`\1`: ", item) for item in words]
        lines.append(f"{title}:\n\n" + "\n".join(f"- {item}" for item in words) + "\n")
    return "\n".join(lines) + "\n"


def _inline(text: str) -> str:
    """Return a help text as a line of Markdown."""
    return " ".join(text.split()).replace("<", "&lt;")
