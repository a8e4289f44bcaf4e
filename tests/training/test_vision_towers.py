"""Vision towers and projectors are trained as plain Transformers and PEFT train them, where a recipe asks for it."""

import json
import os
import re

import pytest
import torch

import tunekit
from tests.tiny import saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.test_vision import RANK, RATE, loss_of, recipe
from tests.vision import FAMILIES, is_of_tower, save_rows, save_tiny_vision_model
from tunekit.errors import PlanError, RecipeError
from tunekit.estimates.models.towers import part_of
from tunekit.runs.run import Run

BOTH = {"vision_tower": "full", "projector": "full"}
FULL = {
    "all": {"type": "full", **BOTH},
    "tower": {"type": "full", "vision_tower": "full"},
    "projector alone": {"type": "full", "language_model": "frozen", "projector": "full"},
}
LORA = {"type": "lora", "rank": RANK, "alpha": RANK, "vision_tower": "lora", "projector": "lora"}
WITHOUT_LINEARS = ("gemma3", "ovis2")
"""Families whose projectors multiply by a parameter of their own, or are a table."""
QUICK = {"llava"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(FAMILIES)],
)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vision_model(folder / "model", request.param)
    save_rows(folder / "data", without=None if request.param == "mllama" else 3)
    return folder


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save_tiny_vision_model(folder / "model", "llava")
    save_rows(folder / "data")
    return folder


def lora_for(folder):
    return LORA | ({"projector": "frozen"} if folder.name.startswith(WITHOUT_LINEARS) else {})


def plain(saved):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(saved / "model", dtype=torch.float32)


def processor_of(saved):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(saved / "model")


def is_asked(name, adapter):
    if not is_of_tower(name):
        return adapter.get("language_model") != "frozen"
    return adapter.get(part_of(name), "frozen") == "full"


@pytest.mark.parametrize("asked", [pytest.param(name, marks=pytest.mark.slow) for name in FULL])
def test_all_weights_change_by_the_gradients_of_plain_transformers(asked, saved, tmp_path):
    adapter = FULL[asked]
    run = tunekit.train(recipe(saved, tmp_path, adapter=adapter))
    model = plain(saved)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model.train()
    loss = loss_of(model, processor_of(saved), saved)
    loss.backward()
    assert run.metrics()["loss"].iloc[0] == pytest.approx(loss.item(), rel=1e-5)
    after = dict(plain_result(run).named_parameters())
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and is_asked(name, adapter)}
    trained = {part_of(name) for name in grads if is_of_tower(name)}
    assert trained == {part for part in ("vision_tower", "projector") if adapter.get(part) == "full"}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name in before:
        if name in grads:
            change = (before[name] - after[name].detach()) / RATE
            assert float((change - grads[name]).abs().max()) <= 1e-3 * largest, name
        else:
            assert torch.equal(before[name], after[name]), name
    assert run.plan.num_trainable_params == sum(grad.numel() for grad in grads.values())


def plain_result(run):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(run.model_path)


def test_adapters_in_towers_get_the_gradients_of_plain_peft(saved, tmp_path):
    from peft import PeftModel
    from safetensors.torch import load_file

    adapter = lora_for(saved)
    run = tunekit.train(recipe(saved, tmp_path, adapter=adapter))
    model = PeftModel.from_pretrained(plain(saved), run.model_path, is_trainable=True)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.zero_()
    model.train()
    loss = loss_of(model, processor_of(saved), saved)
    loss.backward()
    assert run.metrics()["loss"].iloc[0] == pytest.approx(loss.item(), rel=1e-5)
    after = load_file(run.model_path / "adapter_model.safetensors")
    grads = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert all(grad is not None for grad in grads.values())
    wanted = {part for part in ("vision_tower", "projector") if adapter[part] == "lora"}
    assert {part_of(name) for name in grads if is_of_tower(name)} == wanted
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in grads.items():
        assert float((-after[name] / RATE - grad).abs().max()) <= 1e-3 * largest, name
    assert run.plan.num_trainable_params == sum(weight.numel() for weight in after.values())


@pytest.mark.slow
def test_a_projector_is_trained_in_full_beside_an_adapter(llava, tmp_path):
    from peft import PeftModel

    whole = {"type": "lora", "rank": RANK, "alpha": RANK, "modules_to_save": ["multi_modal_projector"]}
    run = tunekit.train(recipe(llava, tmp_path, adapter=whole))
    model = PeftModel.from_pretrained(plain(llava), run.model_path, is_trainable=True)
    after, grads = {}, {}
    for name, weight in model.named_parameters():
        if ".modules_to_save." in name:
            after[name] = weight.detach().clone()
            original = name.replace(".modules_to_save.default.", ".original_module.")
            weight.data.copy_(model.get_parameter(original))
        elif "lora_B" in name:
            weight.data.zero_()
    loss_of(model.train(), processor_of(llava), llava).backward()
    for name, weight in model.named_parameters():
        if name in after:
            grads[name] = ((weight.detach() - after[name]) / RATE, weight.grad)
    assert {name.split(".")[-2] for name in grads} == {"linear_1", "linear_2"}
    for name, (change, grad) in grads.items():
        torch.testing.assert_close(change, grad, atol=1e-3 * float(grad.abs().max()), rtol=1e-3, msg=name)
    assert run.plan.num_trainable_params == sum(p.numel() for p in saved_weights(run.model_path).values())


STEPS = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-2}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [FULL["all"], LORA], ids=["full", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_two_processes_train_as_one_though_one_may_have_no_picture(strategy, adapter, saved, tmp_path):
    """A row in four has no picture, and micro-batches are one row each."""
    adapter = lora_for(saved) if adapter is LORA else adapter
    train = STEPS | {"micro_batch_size": 1, "global_batch_size": 2}
    one = made(recipe(saved, tmp_path / "one", train=train, adapter=adapter))
    worked(one)
    parallel = {"strategy": strategy, "num_processes": 2}
    two = made(recipe(saved, tmp_path / "two", train=train, adapter=adapter, parallel=parallel))
    work_in(two, 2)
    losses = [[event["loss"] for event in Run(path).events() if event["event"] == "log"] for path in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    torch.testing.assert_close(
        saved_weights(Run(two).model_path), saved_weights(Run(one).model_path), atol=1e-4, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [*FULL.values(), LORA], ids=[*FULL, "lora"])
def test_a_resumed_run_ends_with_the_bits_of_one_that_went_through(adapter, saved, tmp_path):
    adapter = lora_for(saved) if adapter is LORA else adapter
    whole = tunekit.train(recipe(saved, tmp_path / "whole", train=STEPS, adapter=adapter))
    part = tunekit.train(recipe(saved, tmp_path / "part", train=STEPS | {"max_steps": 3}, adapter=adapter))
    resumed = tunekit.resume(part, ["train.max_steps=4"])
    after, before = saved_weights(resumed.model_path), saved_weights(whole.model_path)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.slow
def test_a_merged_export_has_the_logits_of_the_adapter(saved, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    run = tunekit.train(recipe(saved, tmp_path, adapter=lora_for(saved)))
    tunekit.export(run, tmp_path / "merged", kind="merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain(saved), run.model_path)
    losses = [loss_of(model, processor_of(saved), saved).item() for model in (merged, adapted, plain(saved))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != pytest.approx(losses[2], rel=1e-5)


@pytest.mark.slow
def test_an_adapter_in_towers_is_trained_further_from_its_run_and_from_its_folder(llava, tmp_path):
    first = tunekit.train(recipe(llava, tmp_path / "first", adapter=LORA))
    ends = []
    for start in (first.path, first.model_path):
        wanted = recipe(llava, tmp_path / os.urandom(4).hex(), adapter="lora")
        ends.append(tunekit.train({**wanted, "model": str(start)}))
    one, other = (saved_weights(run.model_path) for run in ends)
    assert one.keys() == saved_weights(first.model_path).keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_rates_of_their_own_reach_towers_and_projectors(llava, tmp_path):
    rates = {r"vision_tower\.": 0.5, "multi_modal_projector": 0.25}
    wanted = recipe(llava, tmp_path, adapter=FULL["all"], train={"learning_rates": rates})
    run = tunekit.train(wanted)
    model = plain(llava)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    loss_of(model.train(), processor_of(llava), llava).backward()
    after = dict(plain_result(run).named_parameters())
    for part, rate in (("vision_tower", 0.5), ("multi_modal_projector", 0.25)):
        names = [name for name, p in model.named_parameters() if part in name and p.grad is not None]
        assert names
        for name in names:
            change = before[name] - after[name].detach()
            torch.testing.assert_close(change, rate * dict(model.named_parameters())[name].grad, atol=2e-4, rtol=1e-3)


def test_layers_that_nothing_reads_are_not_trained(tmp_path):
    """LLaVA reads the states before the last layer of its tower."""
    save_tiny_vision_model(tmp_path / "model", "llava")
    save_rows(tmp_path / "data")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vision_feature_layer": -2}))
    run = tunekit.train(recipe(tmp_path, tmp_path, adapter=FULL["tower"]))
    model = plain(tmp_path)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    loss_of(model.train(), processor_of(tmp_path), tmp_path).backward()
    after = dict(plain_result(run).named_parameters())
    unread = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert any(".layers.1." in name for name in unread)
    assert all(torch.equal(before[name], after[name]) for name in unread)
    tower = [name for name in before if "vision_tower" in name and name not in unread]
    assert all(not torch.equal(before[name], after[name]) for name in tower if "weight" in name)


REFUSED = {
    "no images": (
        {"type": "full", "vision_tower": "full"},
        {},
        "adapter.vision_tower: no effect, the rows have no images",
    ),
    "fp8": (
        {"type": "full", "projector": "full"},
        {"fp8": True},
        "train.fp8: unsupported where a vision tower or projector is trained",
    ),
    "decay by layer": (
        {"type": "full", "vision_tower": "full"},
        {"layerwise_lr_decay": 0.9},
        "train.layerwise_lr_decay: unsupported where a vision tower or projector is trained",
    ),
    "no target": (
        {"type": "lora", "vision_tower": "lora", "target_modules": ["gate_proj"]},
        {},
        "adapter.vision_tower: target_modules names no linear layer of it",
    ),
    "no projector": (
        {"type": "lora", "projector": "lora"},
        {},
        "adapter.projector: {} has no module that is known as one",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused_before_anything_is_loaded(case, llava, tmp_path):
    adapter, train, problem = REFUSED[case]
    wanted = recipe(llava, tmp_path, adapter=adapter, train=train)
    if case == "no images":
        wanted["data"] = {"train": "example:tales.txt"}
    if case == "no projector":
        wanted |= {"model": "pico"}
        problem = problem.format("pico")
    with pytest.raises(PlanError, match=f"^{re.escape(problem)}"):
        tunekit.plan(wanted, on="1xh100")


@pytest.mark.parametrize(
    "adapter",
    [
        {"type": "full", "language_model": "frozen"},
        {"type": "full", "language_model": "frozen", "projector": "full", "last_layers": 1},
        {"type": "lora", "vision_tower": "lora", "init_lora_weights": "pissa"},
        {"type": "lora", "vision_tower": "lora", "layers_to_transform": [0]},
        {"type": "lora", "vision_tower": "full"},
        {"type": "vera", "vision_tower": "lora"},
    ],
    ids=str,
)
def test_contradictions_are_found_in_the_recipe(adapter, llava, tmp_path):
    with pytest.raises(RecipeError, match=r"adapter\."):
        tunekit.plan(recipe(llava, tmp_path, adapter=adapter))
