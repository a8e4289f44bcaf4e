"""Plans that are kept as files, so that a change of any decision or figure shows: shipped recipes and a few others.

    python -m tests.planner.golden

writes them anew; read the difference before you keep it. What is decided for each shipped recipe on each machine is a
line of `shipped.jsonl`; some plans are kept whole.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.estimates.shapes import H100, LAPTOP, LLAMA_1B, LLAMA_8B, RTX_4090, T4, with_gpu
from tests.shipped import first_model
from tunekit.errors import PlanError
from tunekit.estimates.facts import DataFacts, Hardware, ModelFacts
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.models.model_config import known_models
from tunekit.files import GPU_SIZES, PLANNED, list_recipes, recipe_root
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve
from tunekit.probe.model import _from_config, probe_model
from tunekit.recipe.load import load_recipe
from tunekit.recipe.methods.distillation import DistillationMethod
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import ModelSection

GOLDEN = Path(__file__).parent / "golden"
ROWS = DataFacts(num_train=1000, num_eval=100)
DECIDED: Any = {
    **dict.fromkeys(
        (
            "layout",
            "micro_batch_size",
            "gradient_accumulation_steps",
            "gradient_checkpointing",
            "activation_offloading",
            "mlp_tile_tokens",
            "dtype",
            "attn_implementation",
            "padding_free",
            "reference",
            "vllm",
        ),
        True,
    ),
    "speed": {"tokens_per_second": True},
}
"""What a line has of a plan."""
METHODS = "qwen3-8b/"
"""The folder of recipes whose plans show each method, kept whole on one machine."""
SMALL_MODEL = 100_000_000
"""Parameters below which a model is trained on a CPU."""
SHIPPED = GOLDEN / "shipped.jsonl"
MACHINES = ("t4", "rtx4090", "h100", "8xl40s", "8xh100", "2x8xrtx5090", "4x8xh200")


def recipe(**sections) -> Recipe:
    data = {"train": "chats.jsonl", "eval": "held_out.jsonl", **sections.pop("data", {})}
    return Recipe.model_validate({"model": "some-model", "data": data, **sections})


@cache
def known_facts(name: str) -> ModelFacts:
    """Facts of a well-known model from the table, without a look at any hub."""
    known = known_models()[name]
    return _from_config(known.config, name, known.has_chat_template).model_copy(update={"known_from": "table"})


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
    "full-8b-pure-bf16-on-80-gib": (
        recipe(adapter="full", train={"pure_bf16": True}),
        find_machine("h100").hardware(),
        known_facts("meta-llama/Llama-3.1-8B"),
    ),
    "full-8b-on-80-gib": (
        recipe(adapter="full"),
        find_machine("h100").hardware(),
        known_facts("meta-llama/Llama-3.1-8B"),
    ),
    "qlora-30b-a3b-attention-on-24-gib": (
        recipe(adapter={"type": "qlora", "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
        find_machine("rtx4090").hardware(),
        known_facts("Qwen/Qwen3-30B-A3B"),
    ),
    **{
        f"lora-8b-{length // 1024}k-on-80-gib": (
            recipe(data={"max_length": length}),
            find_machine("h100").hardware(),
            known_facts("meta-llama/Llama-3.1-8B"),
        )
        for length in (32_768, 131_072)
    },
}

NOT_FITTING: dict[str, tuple[Recipe, Hardware, ModelFacts]] = {
    "qlora-70b-on-2x24-gib": (
        recipe(adapter="qlora"),
        find_machine("2xrtx4090").hardware(),
        known_facts("meta-llama/Llama-3.1-70B"),
    ),
    "qlora-30b-a3b-on-24-gib": (
        recipe(adapter="qlora"),
        find_machine("rtx4090").hardware(),
        known_facts("Qwen/Qwen3-30B-A3B"),
    ),
}


def facts(asked: Recipe) -> ModelFacts:
    """Facts of a shipped recipe's model, or of the one that its chain of recipes starts from."""
    name = first_model(asked)
    if name in ("pico", "pico-vision"):
        return probe_model(ModelSection(path=name))
    return known_facts(name)


def plan_of(asked: Recipe, hardware: Hardware, model: ModelFacts) -> Plan | PlanError:
    """A plan, or why there is none."""
    teacher = known_facts(asked.method.teacher.path) if isinstance(asked.method, DistillationMethod) else None
    try:
        return resolve(asked, hardware, model, ROWS, teacher=teacher)
    except PlanError as error:
        return error


def plans() -> Iterator[tuple[str, str]]:
    """Every plan that is kept whole as text, by name; a refusal is one line."""
    for name, (asked, hardware, model) in (CASES | NOT_FITTING).items():
        yield name, _text(asked, hardware, model)
    for shipped in list_recipes():
        if shipped.name.startswith(("sft/", METHODS)):
            asked = load_recipe(shipped.name)
            for machine in ("h100",) if shipped.name.startswith(METHODS) else MACHINES:
                name = f"{shipped.name.replace('/', '-')}-on-{machine}"
                yield name, _text(asked, find_machine(machine).hardware(), facts(asked))


def decisions() -> Iterator[str]:
    """What is decided for each shipped recipe on each machine, a line of JSON each."""
    for shipped in list_recipes():
        asked = load_recipe(shipped.name)
        for machine in MACHINES:
            plan = plan_of(asked, find_machine(machine).hardware(), facts(asked))
            yield json.dumps({"recipe": shipped.name, "machine": machine, **_decided(plan)})


def memory() -> dict[str, dict[str, object]]:
    """Return the method of each shipped recipe and the smallest GPU that it fits on, as `tunekit.files` reads them."""
    root = recipe_root()
    recipes: dict[str, dict[str, object]] = {}
    for path in sorted(root.rglob("*.yaml")):
        name = path.relative_to(root).with_suffix("").as_posix()
        shipped = load_recipe(path)
        is_small = facts(shipped).num_params < SMALL_MODEL
        smallest = next((size for size in GPU_SIZES if fits(shipped, size)), None)
        recipes[name] = {"method": shipped.method.type, "gpu_gb": 0 if is_small else smallest}
    return recipes


def fits(asked: Recipe, size: int) -> bool:
    """Return whether a shipped recipe has a plan on one GPU of a size in GB."""
    return isinstance(plan_of(asked, with_gpu(f"{size} GB", size, (8, 9)), facts(asked)), Plan)


def _decided(plan: Plan | PlanError) -> dict[str, object]:
    if isinstance(plan, PlanError):
        return {"refused": str(plan)}
    return {**plan.model_dump(mode="json", include=DECIDED), "memory_bytes": plan.memory.total_bytes}


def _text(asked: Recipe, hardware: Hardware, model: ModelFacts) -> str:
    plan = plan_of(asked, hardware, model)
    if isinstance(plan, PlanError):
        return f"refused: {plan}\n"
    return plan.to_yaml().replace(model.path, Path(model.path).name)


def main() -> None:
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(planned)}" for name, planned in memory().items())
    (recipe_root() / PLANNED).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    for old in GOLDEN.glob("*.yaml"):
        old.unlink()
    for name, text in plans():
        (GOLDEN / f"{name}.yaml").write_text(text, encoding="utf-8")
    from tests.planner import advice

    (GOLDEN / "advice.txt").write_text(advice.text(), encoding="utf-8")
    SHIPPED.write_text("".join(f"{line}\n" for line in decisions()), encoding="utf-8")


if __name__ == "__main__":
    main()
