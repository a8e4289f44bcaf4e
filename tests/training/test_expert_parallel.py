"""Experts divided among processes: the losses and weights of one process, whichever family, saved and resumed."""

import shutil

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from benchmarks.tiny_models import tiny_model
from tests.tiny import make_tokenizer, save_chats, saved_weights
from tests.training.engines import made, work_in
from tunekit.api.resume import resumed
from tunekit.planner.decisions.backends import families
from tunekit.runs.run import Run

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "granitemoe")
STEPS = 10

LAYOUTS = {
    "one process": {"strategy": "single"},
    "FSDP2": {"strategy": "fsdp2", "num_processes": 2},
    "experts": {"num_processes": 2, "ep_size": 2},
    "experts, divided": {"num_processes": 4, "ep_size": 2},
    "experts of four": {"num_processes": 4, "ep_size": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    for family in FAMILIES:
        changes = {"first_k_dense_replace": 1} if family == "deepseek_v3" else {}
        tiny_model(family, **changes).save_pretrained(folder / family)
        make_tokenizer().save_pretrained(folder / family)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(40)))
    save_chats(folder / "held_out.jsonl", ((f"double {n}", f"{2 * n} it is") for n in range(40, 49)))
    return folder


def adapter_of(family):
    """LoRA on attention."""
    latent = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    targets = latent if family == "deepseek_v3" else ["q_proj", "k_proj", "v_proj", "o_proj"]
    return {"type": "lora", "rank": 4, "target_modules": targets}


def recipe_for(folder, family, name, layout, *, train=None, **sections):
    """A recipe with torch's kernels: what is compared is the layout."""
    return {
        "model": {"path": str(folder / family), "kernels": "torch"},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": adapter_of(family) if name.startswith("lora") else "full",
        "method": {"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.0}},
        "train": {
            "max_steps": STEPS,
            "global_batch_size": 8,
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
            "save_steps": STEPS // 2,
            **(train or {}),
        },
        "parallel": LAYOUTS[layout],
        "output": {"sample_prompts": [], "dir": str(folder / "runs" / family / name)},
        **sections,
    }


def work(path):
    """Do what is left of a run, and return it."""
    run = Run(path)
    work_in(run.path, run.plan.layout.num_processes)
    return run


def trained(folder, family, layout, adapter="full", **changes):
    """A finished run, trained once for all that ask for it."""
    name = f"{adapter}-{layout.replace(' ', '-')}"
    path = folder / "runs" / family / name
    return Run(path) if path.exists() else work(made(recipe_for(folder, family, name, layout, **changes)))


def losses(run):
    return {event["step"]: event["loss"] for event in run.events() if event["event"] == "log"}


def norms(run):
    return {event["step"]: event["grad_norm"] for event in run.events() if event["event"] == "log"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["experts", "experts, divided", "experts of four"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_losses_and_weights_are_those_of_one_process(folder, adapter, family, layout):
    one, many = trained(folder, family, "one process", adapter), trained(folder, family, layout, adapter)
    (event,) = [event for event in many.events() if event["event"] == "engine"]
    assert event["mesh"] == {"dp_shard": many.plan.layout.num_processes, "ep": LAYOUTS[layout]["ep_size"]}
    assert len(losses(one)) == STEPS
    assert losses(many) == pytest.approx(losses(one), abs=1e-5)
    assert norms(many) == pytest.approx(norms(one), rel=1e-4)
    torch.testing.assert_close(saved_weights(many.model_path), saved_weights(one.model_path), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_run_resumes_in_any_layout(folder, adapter, to):
    """From the checkpoint in its middle."""
    whole = trained(folder, "qwen3_moe", "experts, divided", adapter)
    run = Run(shutil.copytree(whole.path, folder / f"{adapter} to {to}"))
    shutil.rmtree(run.model_path)
    edits = ["parallel.num_processes=null", "parallel.ep_size=null", "parallel.strategy=auto"]
    edits += [f"parallel.{name}={value}" for name, value in LAYOUTS[to].items()]
    work(resumed(run, edits, from_=str(STEPS // 2)).path)
    assert run.state == "finished"
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    tolerance = 0 if to == "experts, divided" else 1e-4
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(whole.model_path), rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_run_of_one_process_resumes_with_experts_divided(folder, adapter):
    whole = trained(folder, "qwen3_moe", "one process", adapter)
    run = Run(shutil.copytree(whole.path, folder / f"{adapter} from one"))
    shutil.rmtree(run.model_path)
    edits = ["parallel.strategy=auto", "parallel.num_processes=2", "parallel.ep_size=2"]
    work(resumed(run, edits, from_=str(STEPS // 2)).path)
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(whole.model_path), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputation_and_bfloat16_change_nothing_beside_lora_that_they_do_not_in_fsdp2(folder, dtype):
    runs = []
    for layout in ("FSDP2", "experts, divided"):
        train = {"gradient_checkpointing": True, "max_steps": 4}
        recipe = recipe_for(folder, "qwen3_moe", f"lora {dtype} {layout}", layout, train=train)
        recipe["model"]["dtype"] = dtype
        runs.append(work(made(recipe)))
    assert runs[1].plan.gradient_checkpointing and runs[1].plan.dtype == dtype
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), abs=1e-5 if dtype == "float32" else 1e-2)
    assert norms(runs[1]) == pytest.approx(norms(runs[0]), rel=1e-4 if dtype == "float32" else 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_evaluations_answers_and_balance_are_those_of_fsdp2(folder, adapter):
    """With the routers' auxiliary loss, which is a mean over a micro-batch: those of both layouts are the same."""
    changes = {
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64, "eval": str(folder / "held_out.jsonl")},
        "train": {"max_steps": 4, "eval_steps": 2},
        "method": {"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.1}},
    }
    runs = []
    for layout in ("FSDP2", "experts"):
        recipe = recipe_for(folder, "mixtral", f"{adapter} evaluated {layout}", layout, **changes)
        recipe["output"]["sample_prompts"] = ["double 3"]
        runs.append(work(made(recipe)))
    plain, divided = ([event for event in run.events() if event["event"] in ("eval", "samples")] for run in runs)
    assert [event["event"] for event in plain] == [event["event"] for event in divided] != []
    for expected, seen in zip(plain, divided, strict=True):
        if expected["event"] == "eval":
            assert seen["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-5)
        else:
            assert seen["samples"] == expected["samples"]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), abs=1e-5)


@pytest.mark.slow
def test_families_are_those_that_transformers_has_a_plan_for():
    parts = {
        "deepseek_ocr2_text", "diffusion_gemma_text", "dots3_note_vision_encoder", "openai_privacy_filter",
        "qwen3_omni_moe_talker_text", "unlimited_ocr_text",
    }  # fmt: skip
    plans = {name: CONFIG_MAPPING[name].base_model_ep_plan or {} for name in CONFIG_MAPPING_NAMES}
    divided = {name for name, plan in plans.items() if "ep_dispatch_experts" in plan.values()}
    # What is no decoder by itself is none that a recipe names.
    assert divided == families()["expert_parallel"] | parts
