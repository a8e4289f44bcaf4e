"""Plans of recipes one after another: what each starts from, sums, and that a plan is that of the finished run."""

import json
from pathlib import Path

import pytest

import tunekit
from tests.runs.test_lineage import METHODS, recipe, workspace
from tests.training.engines import made, worked
from tunekit.errors import PlanError
from tunekit.runs.run import Run

workspace = workspace

SFT = {"model": "Qwen/Qwen3-8B", "data": {"train": "example:pirate.jsonl", "max_length": 1024}}
DPO = {"model": "sft", "method": "dpo", "data": {"train": "example:pairs.jsonl", "max_length": 1024}}
GRPO = {
    "model": "runs/dpo",
    "method": {"type": "grpo", "rewards": [{"type": "regex", "pattern": "x"}], "max_completion_length": 64},
    "data": {"train": "example:sums.jsonl", "max_length": 512},
    "train": {"max_steps": 50},
}


def named(name, section, **more):
    return {**section, **more, "output": {"name": name, **more.get("output", {})}}


def chain_of(*sections, on="h100", **more):
    names = ("sft", "dpo", "grpo")[: len(sections)]
    return tunekit.plan_chain([named(*pair, **more) for pair in zip(names, sections, strict=True)], on=on)


def test_recipes_start_from_results_that_are_not_there_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chain = chain_of(SFT, DPO, GRPO)
    assert [(link.name, link.start) for link in chain] == [("sft", "Qwen/Qwen3-8B"), ("dpo", "sft"), ("grpo", "dpo")]
    grpo = chain[2].plan
    assert grpo.origin.chain == "Qwen/Qwen3-8B > sft (sft, lora) > dpo (dpo, lora)"
    assert grpo.recipe.adapter == chain[0].plan.recipe.adapter
    assert grpo.origin.folder == str(tmp_path / "runs" / "dpo" / "model")
    assert grpo.origin.base.path == "Qwen/Qwen3-8B"


def test_sums_are_those_of_the_plans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chain = chain_of(SFT, DPO, GRPO)
    assert chain.disk_bytes == sum(plan.saving.run_bytes for plan in chain.plans)
    for figure in ("seconds", "cost_usd"):
        total, spans = getattr(chain, figure), [getattr(plan.speed, figure) for plan in chain.plans]
        assert total.low == pytest.approx(sum(span.low for span in spans))
        assert total.high == pytest.approx(sum(span.high for span in spans))
    # Speeds of a CPU without recorded runs are unknown.
    assert chain_of({**SFT, "model": "pico"}, DPO, on=None).seconds is None
    assert list(chain.to_frame()["starts from"]) == ["Qwen/Qwen3-8B", "sft", "dpo"]
    assert chain.to_dict()["seconds"] == chain.seconds.model_dump()


def test_a_recipe_that_names_another_model_is_planned_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = {**DPO, "model": "Qwen/Qwen3-0.6B"}
    assert chain_of(SFT, other)[1].plan == tunekit.plan(named("dpo", other), on="h100")


@pytest.mark.parametrize("path", ["sft", "runs/sft", "./runs/sft/model", "there", "there/model"])
def test_a_run_is_meant_by_its_name_or_its_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = {"dir": "there"} if path.startswith("there") else {}
    first = named("sft", SFT, output=output)
    chain = tunekit.plan_chain([first, named("dpo", {**DPO, "model": path})], on="h100")
    assert chain[1].start == "sft"


FULL = {"adapter": "full"}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"dpo": DPO, "sft": SFT}, r"dpo: model\.path: sft comes later in the chain; pass it before dpo"),
        (
            {
                "sft": {**SFT, "adapter": {"type": "lora", "relora": {"steps": 20}}, "train": {"max_steps": 60}},
                "dpo": DPO,
            },
            r"dpo: model\.path: the ranks of its adapter are known once sft has finished; plan this recipe then",
        ),
        (
            {"sft": {**SFT, "adapter": {"type": "full", "new_layers": 4}}, "dpo": {**DPO, **FULL}},
            r"dpo: model\.path: its new layers are known once sft has finished",
        ),
        (
            {"sft": SFT, "dpo": {**DPO, "method": "reward"}},
            r"dpo: model\.path: the adapter of sft is for a generative model",
        ),
        (
            {"sft": SFT, "dpo": {**DPO, "adapter": {"type": "lora", "rank": 4}}},
            r"dpo: adapter\.rank: 4 here, but 16 in the adapter",
        ),
    ],
)
def test_what_cannot_be_planned_names_the_recipe(sections, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=words):
        tunekit.plan_chain([named(*pair) for pair in sections.items()], on="8xh100")


def test_full_fine_tuning_goes_on_with_weights_of_the_trained_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = chain_of(SFT, DPO, on="8xh100", **FULL).plans
    assert second.origin.adapter is None and second.origin.base.path == str(tmp_path / "runs" / "sft" / "model")
    assert second.num_params == first.num_params == second.num_trainable_params
    assert second.reference == "second model"


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_plan_in_a_chain_is_the_one_that_the_finished_run_gets(adapter, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.syspath_prepend(str(workspace))
    monkeypatch.setattr("tunekit.api.plan_inputs.recorded_runs", lambda: ())
    output = {"output": {"dir": f"runs/first-{adapter}"}}
    first = recipe("sft", "model", adapter=adapter, **output)
    others = [recipe(method, f"runs/first-{adapter}", adapter=adapter) for method in METHODS]
    chained = [tunekit.plan_chain([first, other], on="h100")[1].plan for other in others]
    worked(Run(made(first)).path)
    for planned, other in zip(chained, others, strict=True):
        finished = tunekit.plan(other, on="h100")
        names = set(type(planned).model_fields) - {"origin", "reasons", "recipe"}
        assert planned.model_dump(include=names) == finished.model_dump(include=names)
        assert planned.origin == finished.origin
        assert planned.recipe.adapter == finished.recipe.adapter


def test_the_command_line_plans_recipes_that_follow(tmp_path, monkeypatch, capsys):
    from tunekit.cli.app import main

    monkeypatch.chdir(tmp_path)
    for name, section in (("sft", SFT), ("dpo", DPO)):
        Path(f"{name}.yaml").write_text(json.dumps(section))
    monkeypatch.setattr("sys.argv", ["tunekit", "plan", "sft.yaml", "dpo.yaml", "train.max_steps=7", "--on", "h100"])
    with pytest.raises(SystemExit, match="0"):
        main()
    shown = capsys.readouterr().out
    assert "starts from" in shown and "of training in total" in shown and "of disk for all runs" in shown
    monkeypatch.setattr("sys.argv", ["tunekit", "plan", "sft.yaml", "dpo.yaml", "--json", "--on", "h100"])
    with pytest.raises(SystemExit, match="0"):
        main()
    document = json.loads(capsys.readouterr().out)
    assert [one["start"] for one in document["plans"]] == ["Qwen/Qwen3-8B", "sft"]
