"""Traces for plans: of which models they are made, how they are stored, and what is said where there is none."""

import json
import subprocess

import pytest
from transformers import AutoConfig

from tests.commands import run_command
from tunekit.api import traces, verbs
from tunekit.errors import PlanError

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Return a function that gives a recipe of a model of a type, of which there is a config.json alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")

    def of(model_type: str, **more):
        config = AutoConfig.for_model(model_type, **SIZES | more)
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(tmp_path / model_type)
        data = {"train": str(rows), "max_length": 128}
        return {"model": str(tmp_path / model_type), "data": data, "adapter": "lora"}

    return of


def reason(plan, topic):
    return next((reason for reason in plan.reasons if reason.topic == topic), None)


@pytest.mark.slow
def test_a_type_that_formulas_do_not_know_is_traced_once(recipe, monkeypatch):
    source, events = recipe("nemotron"), []
    plan = verbs.plan(source, on="h100", on_event=events.append)
    assert [event["event"] for event in events] == ["trace"]
    assert plan.memory.confidence == "model traced"
    assert plan.unchecked is None
    assert reason(plan, "trace").choice == "a step of 4,096 tokens"

    monkeypatch.setattr(traces, "_make", None)
    assert verbs.plan(source, on="h100", trace=False, on_event=events.append) == plan
    assert len(events) == 1


@pytest.mark.slow
def test_layouts_that_shard_have_a_trace_of_the_weights_that_they_hand_over(recipe, monkeypatch):
    source, requests = {**recipe("nemotron"), "parallel": {"strategy": "fsdp2"}}, []
    make = traces._make
    monkeypatch.setattr(traces, "_make", lambda request: requests.append(request) or make(request))
    plan = verbs.plan(source, on="2xh100")
    assert [request.weights_dtype for request in requests] == ["float32", "bfloat16"]
    assert (plan.layout.strategy, plan.memory.confidence) == ("fsdp2", "model traced")


def test_without_a_stored_trace_a_plan_says_so(recipe):
    plan = verbs.plan(recipe("nemotron"), on="h100", trace=False)
    assert plan.memory.confidence == "outside the model"
    assert reason(plan, "trace").why == "not yet; `tunekit plan --trace` traces a step"


def test_neither_a_known_type_nor_a_cpu_has_a_trace_by_itself(recipe, monkeypatch):
    monkeypatch.setattr(traces, "_make", None)
    for model_type, machine in (("llama", "h100"), ("nemotron", None)):
        assert reason(verbs.plan(recipe(model_type), on=machine), "trace") is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"adapter": "prompt_tuning"}, "virtual tokens are not traced"),
        ({"adapter": {"type": "full", "new_layers": 1}}, "models with new layers are not traced"),
    ],
)
def test_a_trace_that_cannot_be_had_is_refused_where_it_is_required(recipe, changes, why):
    with pytest.raises(PlanError, match=f"cannot trace a step of .*: .*{why}"):
        verbs.plan({**recipe("llama"), **changes}, on="h100", trace=True)


@pytest.mark.slow
def test_what_cannot_be_traced_is_planned_by_formulas_and_refused_where_a_trace_is_required(recipe):
    source = recipe("jetmoe", kv_channels=16)
    plan = verbs.plan(source, on="h100")
    assert plan.memory.confidence == "outside the model"
    why = reason(plan, "trace").why
    assert why.startswith("its code depends on values, which a trace does not have")
    with pytest.raises(PlanError, match="cannot trace a step of"):
        verbs.plan(source, on="h100", trace=True)


def test_a_trace_that_takes_too_long_is_not_stored(recipe, monkeypatch, tmp_path):
    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(traces.subprocess, "run", hang)
    plan = verbs.plan(recipe("nemotron"), on="h100")
    assert reason(plan, "trace").why == "the trace took longer than 300 s"
    assert list((tmp_path / "cache").rglob("*.json")) == []


@pytest.mark.parametrize("option", [["--sweep", "adapter.rank=8,16"], ["--fit", "batch"], ["--on", "a100"]])
def test_one_plan_is_traced(recipe, option, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe("llama")))
    result = run_command("plan", path, "--on", "h100", "--trace", *option)
    assert result.returncode == 2
    assert "--trace is for one plan" in result.stderr
