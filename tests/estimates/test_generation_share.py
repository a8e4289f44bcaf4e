"""What the plan says of generating, against real runs of GRPO on a processor: work and memory counted, time compared.

The runs' trainers are those that runs build. Their work is counted by torch, their cache by the tensors in it. How long
things take is the processor's own time, which others on the machine do not add to; one setting tells how fast this
processor computes and reads, and the planner's formulas must then tell the others.
"""

import json
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tests.methods.exact import build
from tests.tiny import make_tokenizer, save_tiny_model
from tunekit.api import verbs
from tunekit.estimates.facts import Figures
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.activations import products_of
from tunekit.estimates.passes import kv_cache_bytes, passes_of
from tunekit.estimates.throughput.speed import step_of
from tunekit.estimates.throughput.step import Range, Step, generating
from tunekit.kernels import linear_ce
from tunekit.planner.decisions.backends import head_kind
from tunekit.probe.model import probe_model
from tunekit.recipe.load import load_recipe
from tunekit.recipe.schema import Recipe

LENGTH, BATCH, SIZE = 96, 8, 4
"""Tokens of prompt and answer, answers of a step, and of a micro-batch."""

SETTINGS = {"long": (64, 1), "short": (16, 1), "long, twice": (64, 2), "short, twice": (16, 2)}
"""Tokens of an answer, and optimizer steps on the same answers."""


@dataclass
class Spent:
    """What a run took for one optimizer step."""

    given: dict[str, Any]
    generating_seconds: float = 0.0
    step_seconds: float = 0.0
    num_steps: int = 0
    num_forwards: int = 0
    cache_bytes: int = 0
    generating_flops: int = 0
    training_flops: int = 0
    asked: list[Any] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.given)

    @property
    def share(self) -> float:
        return self.generating_seconds / self.step_seconds

    @property
    def training_seconds(self) -> float:
        return (self.step_seconds - self.generating_seconds) / self.num_steps


def recipe_of(folder, name, num_tokens, num_iterations):
    rows = [{"prompt": "x" * (LENGTH - num_tokens)} for _ in range(BATCH)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": str(folder / "model"),
        "data": {"train": str(path), "max_length": LENGTH},
        "adapter": "full",
        "method": {
            "type": "grpo",
            "num_generations": BATCH,
            "max_completion_length": num_tokens,
            "num_iterations": num_iterations,
            "rewards": ["tests.training.answers:reward"],
        },
        "train": {
            "max_steps": num_iterations,
            "global_batch_size": BATCH,
            "micro_batch_size": SIZE,
            "gradient_checkpointing": False,
        },
        "output": {"dir": str(folder / f"run {name}"), "sample_prompts": []},
    }


def spend(recipe) -> Spent:
    """Train for the steps of one generation; then once more, counted by torch."""
    trainer, spent = build(recipe), Spent(recipe)
    generate, take, compute = trainer._generate_single_turn, trainer.training_step, trainer.compute_loss

    def generated(*args):
        began = time.process_time()
        given = generate(*args)
        spent.generating_seconds += time.process_time() - began
        spent.asked = [args]
        return given

    def taken(*args):
        began = time.process_time()
        loss = take(*args)
        spent.step_seconds += time.process_time() - began
        return loss

    inputs = []

    def computed(model, given, *args, **how):
        inputs.append(given)
        return compute(model, given, *args, **how)

    trainer._generate_single_turn, trainer.training_step, trainer.compute_loss = generated, taken, computed
    trainer.train()
    spent.num_steps = trainer.state.global_step

    def look(_module, _inputs, options, _output):
        layers = options["cache"].layers
        spent.num_forwards += 1
        spent.cache_bytes = sum(kept.untyped_storage().nbytes() for one in layers for kept in (one.keys, one.values))

    hook = trainer.model.model.register_forward_hook(look, with_kwargs=True)
    with counter() as counted:
        generate(*spent.asked[0])
    spent.generating_flops = counted.get_total_flops()
    hook.remove()
    with counter() as counted:
        compute(trainer.model, inputs[-1]).backward()
    spent.training_flops = counted.get_total_flops() * BATCH // SIZE
    return spent


def counter() -> FlopCounterMode:
    """Torch's counter, which does not know the attention of a processor, nor look into tunekit's head."""

    def attention(query, key, value, *args, out_shape=None, **how):
        return sdpa_flop_count(query, key, value)

    def backward(_gradient, query, key, value, *args, out_shape=None, **how):
        return 2 * sdpa_flop_count(query, key, value)

    def head(*args, out_val=None):
        with counter() as inner:
            linear_ce._linear_cross_entropy._init_fn(*args)
        return inner.get_total_flops()

    # It is to be given tensors, and not their shapes.
    head._get_raw = True
    aten = torch.ops.aten
    known = {
        torch.ops.tunekit.linear_cross_entropy: head,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    return FlopCounterMode(display=False, custom_mapping=known)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Spent]:
    """A run of each setting, in one thread and with answers of full length."""
    folder = tmp_path_factory.mktemp("share")
    save_tiny_model(folder / "model", hidden=512, layers=2)
    num_threads, drawn, end = torch.get_num_threads(), torch.multinomial, make_tokenizer().eos_token_id

    def draw(probabilities, num_samples, **how):
        probabilities[:, end] = 0
        return drawn(probabilities, num_samples, **how)

    torch.set_num_threads(1)
    torch.multinomial = draw
    try:
        spend(recipe_of(folder, "warm", 16, 1))
        return {name: spend(recipe_of(folder, name, *setting)) for name, setting in SETTINGS.items()}
    finally:
        torch.multinomial = drawn
        torch.set_num_threads(num_threads)


def planned(spent: Spent) -> Step:
    plan, recipe = verbs.plan(spent.given), spent.recipe
    passes = passes_of(recipe.method, recipe.adapter, recipe.data, global_batch_size=BATCH)
    found = step_of(
        recipe,
        probe_model(recipe.model),
        plan.data,
        plan.device,
        dtype="float32",
        mask_length=None,
        padding_free=False,
        micro_batch_size=SIZE,
        gradient_checkpointing=False,
        layout=Layout(),
        num_nodes=1,
        passes=replace(passes, head=head_kind(passes.head, recipe.method, "tunekit", Layout())),
    )
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_work_of_a_step_is_what_torch_counts(runs, name):
    spent, step = runs[name], planned(runs[name])
    num_tokens, num_iterations = SETTINGS[name]
    # The prompt is read in the pass that gives the first token.
    assert step.generating.num_tokens * num_iterations == spent.num_forwards == num_tokens
    # The planner lets every token look back at a whole row; those of generating look back at what is there.
    assert step.generating.flops * num_iterations == pytest.approx(spent.generating_flops, rel=0.05)
    old = (num_iterations > 1) / num_iterations * step.generating.flops * num_iterations
    assert step.flops_per_token * step.num_tokens - old == pytest.approx(spent.training_flops, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_cache_is_as_large_as_the_tensors_in_it(runs, name):
    facts = probe_model(runs[name].recipe.model)
    how = {"num_sequences": BATCH, "num_tokens": LENGTH - 1}
    found = kv_cache_bytes(products_of(facts, runs[name].recipe.adapter, "float32"), **how)
    assert found == runs[name].cache_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SETTINGS)[1:])
def test_the_share_of_generating_is_as_planned_with_the_speed_of_another_setting(runs, name):
    """Within a third: twice the tokens, or answers that are generated for each step, would be farther off."""
    known, step = planned(runs["long"]), planned(runs[name])
    rate = known.num_tokens * known.flops_per_token / runs["long"].training_seconds
    bandwidth = known.generating.read_bytes / runs["long"].generating_seconds
    seconds = generating(step, Range(low=rate, high=rate), Figures(memory_bytes_per_second=bandwidth))
    training = step.num_tokens * step.flops_per_token / rate
    shares = [made / (made + training) for made in (seconds.low, seconds.high)]
    assert shares[0] / 1.33 < runs[name].share < 1.33 * shares[1]
