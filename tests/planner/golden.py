"""Plans that are kept as files, so that a change of any decision or figure shows: shipped recipes and a few others.

    python -m tests.planner.golden

writes them anew; read the difference before you keep it.
"""

from collections.abc import Iterator
from pathlib import Path

from tests.planner.shapes import H100, LAPTOP, LLAMA_1B, LLAMA_8B, RTX_4090, T4
from tunekit.errors import PlanError
from tunekit.planner.facts import DataFacts, Hardware, ModelFacts
from tunekit.planner.known_models import known_models
from tunekit.planner.machines import find_machine
from tunekit.planner.resolve import resolve
from tunekit.probe.model import _from_config, probe_model
from tunekit.recipe.library import list_recipes
from tunekit.recipe.load import load_recipe
from tunekit.recipe.schema import Recipe

GOLDEN = Path(__file__).parent / "golden"
ROWS = DataFacts(num_train=1000, num_eval=100)
MACHINES = ("t4", "rtx4090", "h100", "8xl40s", "8xh100", "2x8xrtx5090", "4x8xh200")


def recipe(**sections) -> Recipe:
    data = {"train": "chats.jsonl", "eval": "held_out.jsonl", **sections.pop("data", {})}
    return Recipe.model_validate({"model": "some-model", "data": data, **sections})


CASES: dict[str, tuple[Recipe, Hardware, ModelFacts]] = {
    "lora-1b-on-a-laptop": (recipe(data={"max_length": 512}), LAPTOP, LLAMA_1B),
    "lora-8b-on-24-gib": (recipe(), RTX_4090, LLAMA_8B),
    "qlora-8b-on-16-gib-without-bfloat16": (
        recipe(adapter="qlora", model={"path": "m", "dtype": "float16"}),
        T4,
        LLAMA_8B,
    ),
    "full-1b-on-80-gib": (recipe(adapter="full", train={"num_epochs": 2.5, "global_batch_size": 64}), H100, LLAMA_1B),
    "full-8b-adafactor-on-80-gib": (recipe(adapter="full", train={"optim": "adafactor"}), H100, LLAMA_8B),
}


def known_facts(name: str) -> ModelFacts:
    """Facts of a well-known model from the table, without a look at any hub."""
    known = known_models()[name]
    return _from_config(known.config, name, known.has_chat_template).model_copy(update={"known_from": "table"})


def plans() -> Iterator[tuple[str, str]]:
    """Every golden plan as text, by name; a refusal is one line."""
    for name, (asked, hardware, model) in CASES.items():
        yield name, _text(asked, hardware, model)
    for shipped in list_recipes():
        asked = load_recipe(shipped.name)
        model = probe_model(asked.model) if asked.model.path == "pico" else known_facts(asked.model.path)
        for machine in MACHINES:
            name = f"{shipped.name.replace('/', '-')}-on-{machine}"
            yield name, _text(asked, find_machine(machine).hardware(), model)


def _text(asked: Recipe, hardware: Hardware, model: ModelFacts) -> str:
    try:
        return resolve(asked, hardware, model, ROWS).to_yaml().replace(model.path, Path(model.path).name)
    except PlanError as error:
        return f"refused: {error}\n"


def main() -> None:
    for old in GOLDEN.glob("*.yaml"):
        old.unlink()
    for name, text in plans():
        (GOLDEN / f"{name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
