"""A recipe that starts from a run or an adapter: which is meant, what is taken over, and that nothing is lost of it."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import tunekit
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model
from tests.training.engines import made, worked
from tests.training.test_dpo import in_two_processes, logged, save_pairs
from tests.training.test_resume import cut_off
from tunekit.api import verbs
from tunekit.errors import ModelError, PlanError, RecipeError
from tunekit.runs.run import Run
from tunekit.training.callbacks import Watch

REWARDS = """
def low(completions, **columns):
    return [sum(letter < "@" for letter in one[0]["content"]) / 16 for one in completions]
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lineage")
    save_tiny_model(folder / "model")
    save_chats(folder / "chats.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    save_pairs(folder / "pairs.jsonl", range(16), chat=True)
    rows = [json.dumps({"prompt": [{"role": "user", "content": f"double {n}"}]}) for n in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "lineage_rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.syspath_prepend(str(workspace))
    return workspace


METHODS = {
    "sft": ({"type": "sft"}, "chats"),
    "dpo": ({"type": "dpo"}, "pairs"),
    "grpo": (
        {
            "type": "grpo",
            "rewards": ["lineage_rewards:low"],
            "num_generations": 4,
            "max_completion_length": 8,
            "beta": 0.1,
        },
        "prompts",
    ),
}


def recipe(method, model, **sections):
    settings, rows = METHODS[method]
    return {
        "model": model,
        "data": {"train": f"{rows}.jsonl", "max_length": 64, **sections.pop("data", {})},
        "method": {**settings, **sections.pop("method", {})},
        "train": {"max_steps": 2, "global_batch_size": 8, "learning_rate": 1e-2, **sections.pop("train", {})},
        "output": {"name": f"my-{method}", "sample_prompts": [], **sections.pop("output", {})},
        **sections,
    }


QUIET = {"max_steps": 1, "warmup_steps": 1, "learning_rate": 1e-2, "global_batch_size": 4}
"""One step, whose learning rate is still 0: what comes out is what training started from."""

OTHER = {"name": "other"}
"""For runs that are not to be the newest of the name `my-sft`."""


@pytest.fixture(scope="module")
def sft(workspace):
    """A run that trained an adapter, of settings that are not the defaults."""
    adapter = {"type": "lora", "rank": 4, "alpha": 12, "target_modules": ["q_proj", "down_proj"], "use_rslora": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        return Run(tunekit.train(recipe("sft", "model", adapter=adapter)).path.resolve())


@pytest.fixture(scope="module")
def whole(workspace):
    """A run that trained all weights, with a template of its own."""
    template = Path(workspace, "own.jinja")
    template.write_text("{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        model = {"path": "model", "chat_template": "own.jinja"}
        data = {"loss_on": "all"}
        asked = recipe("sft", model, adapter="full", data=data, output={"name": "my-whole"})
        return Run(tunekit.train(asked).path.resolve())


def test_a_run_is_meant_by_its_name_its_folder_or_its_result(here, sft):
    named = [f"runs/{sft.name}", sft.name, "my-sft", str(sft.path), f"runs/{sft.name}/model"]
    plans = [verbs.plan(recipe("dpo", name)) for name in named]
    assert {plan.recipe.model.path for plan in plans} == {str(sft.model_path)}
    assert {plan.origin.name for plan in plans} == {sft.name}
    with pytest.raises(ModelError, match=r"is not a folder here|no 'my'"):
        verbs.plan(recipe("dpo", "my"))
    (here / "my-sft").symlink_to(here / "model")
    try:
        assert verbs.plan(recipe("dpo", "my-sft")).origin is None, "a folder comes first"
    finally:
        (here / "my-sft").unlink()


def test_what_a_recipe_leaves_out_of_the_adapter_is_the_runs(here, sft):
    plan = verbs.plan(recipe("dpo", "my-sft", adapter={"type": "lora", "rank": 4}))
    adapter = plan.recipe.adapter
    assert (adapter.rank, adapter.alpha, adapter.use_rslora) == (4, 12, True)
    assert adapter.target_modules == ["q_proj", "down_proj"]
    assert plan.num_trainable_params == sft.plan.num_trainable_params
    assert plan.memory.parts["reference"] == 4 * plan.num_trainable_params
    words = plan.explain()
    assert f"a frozen copy of the adapter of {sft.name}" in words
    assert f"adapter of {sft.name} trained further, on {here / 'model'}" in words


def test_what_contradicts_the_adapter_is_refused_with_its_place(here, sft):
    Path("next.yaml").write_text(
        "model: my-sft\ndata: {train: pairs.jsonl, max_length: 64}\nmethod: dpo\n"
        "adapter:\n  type: lora\n  rank: 16\n  alpha: 32\n"
    )
    with pytest.raises(RecipeError) as error:
        verbs.plan("next.yaml")
    first, second = str(error.value).splitlines()
    assert first.startswith("next.yaml:6:3: adapter.rank: 16 here, but 4 in the adapter of my-sft-")
    assert second.startswith("next.yaml:7:3: adapter.alpha: 32.0 here, but 12.0 in")
    with pytest.raises(RecipeError, match=r"command line: adapter.use_dora: true here, but false in the adapter"):
        verbs.plan("next.yaml", ["adapter.rank=4", "adapter.alpha=12", "adapter.use_dora=true"])
    plans = verbs.sweep_plans(recipe("dpo", "my-sft"), {"adapter.rank": [4, 16]}).variants
    assert plans[0].plan.recipe.adapter.rank == 4
    assert isinstance(plans[1].plan, PlanError) and "adapter.rank: 16 here, but 4 in" in str(plans[1].plan)
    assert verbs.plan("next.yaml", ["adapter=full"]).reference == "second model"


def test_a_run_that_has_no_model_or_one_that_judges_is_refused(here, sft):
    unfinished = here / "runs" / "unfinished"
    shutil.copytree(sft.path, unfinished)
    for changes, match in (
        ({"phase": "failed", "step": 1}, r"is failed, after step 1 of 2: no model yet; `tunekit resume"),
        ({"phase": "training", "pid": 2**22, "step": 1}, r"is died, after step 1 of 2.*`tunekit resume"),
    ):
        Run(unfinished).update_status(**changes)
        with pytest.raises(RecipeError, match=rf"recipe: model.path: unfinished {match}"):
            verbs.plan(recipe("dpo", "unfinished"))
    text = (unfinished / "recipe.yaml").read_text()
    Run(unfinished).update_status(phase="finished")
    start, end = text.index("method:"), text.index("adapter:")
    (unfinished / "recipe.yaml").write_text(f"{text[:start]}method: reward\n{text[end:]}")
    with pytest.raises(RecipeError, match="unfinished is a reward model: it scores answers and generates none"):
        verbs.plan(recipe("dpo", "unfinished"))
    shutil.rmtree(unfinished)


@pytest.mark.slow
def test_three_methods_in_a_row_train_one_adapter(here, sft):
    dpo = tunekit.train(recipe("dpo", "my-sft"))
    grpo = tunekit.train(recipe("grpo", "my-dpo"))
    for run in (dpo, grpo):
        (looked,) = logged(run, "reference")
        assert (looked["kind"], looked["max_difference"]) == ("copied adapter", 0)
    assert logged(dpo)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert logged(grpo)[0]["kl"] == 0
    chain = f"{here / 'model'} > {sft.name} (sft, lora) > {dpo.name} (dpo, lora)"
    assert grpo.plan.origin.chain == grpo.status()["comes_from"] == grpo.result()["comes_from"] == chain
    assert chain in (grpo.model_path / "README.md").read_text()
    from tunekit.display.console import run_report

    assert chain in str(run_report(grpo, 100)[0])
    assert grpo.recipe.model.path == str(dpo.model_path.resolve())
    assert not (grpo.model_path / "ref").exists()
    assert grpo.plan.recipe.adapter.rank == 4


def test_the_data_are_laid_out_by_the_template_of_the_run(here, whole):
    report = verbs.data_report(recipe("sft", "my-whole", data={"loss_on": "all"}))
    assert "<|im_start|>" not in json.dumps(report.to_dict())
    run = tunekit.train(recipe("sft", "my-whole", data={"loss_on": "all"}, train=QUIET, output=OTHER))
    assert run.plan.base.path == str(whole.model_path)
    assert (run.model_path / "chat_template.jinja").read_text() == (here / "own.jinja").read_text()


def save_adapter(folder: Path, base: Path, **settings) -> Path:
    """An adapter of random weights, saved by PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **settings)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def logits_of(base: Path, adapter: Path | None = None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    ids = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


KINDS = {
    "lora": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
    "rslora": {"target_modules": "all-linear", "use_rslora": True},
    "dora": {"target_modules": ["k_proj", "down_proj"], "use_dora": True},
    "chosen": {"target_modules": r".*[qk]_proj", "exclude_modules": ["k_proj"], "alpha_pattern": {"1.*": 5}},
    "ranks": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1, "rank_pattern": {"up_proj": 3}},
    "tables": {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_starts_from_what_the_adapter_computes(kind, here):
    adapter = save_adapter(here / f"adapter-{kind}", here / "model", **KINDS[kind])
    expected = logits_of(here / "model", adapter)
    assert (expected - logits_of(here / "model")).abs().max() > 0.01
    further = tunekit.train(recipe("sft", str(adapter), train=QUIET, output=OTHER))
    assert torch.equal(logits_of(here / "model", further.model_path), expected)
    merged = tunekit.train(recipe("sft", str(adapter), adapter="full", train=QUIET, output=OTHER))
    torch.testing.assert_close(logits_of(merged.model_path), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_trained_embedding_that_the_head_shares_stays_one_of_an_adapter(here):
    tied = save_tied_model(here / "tied")
    adapter = save_adapter(here / "adapter-tied", tied, target_modules=["o_proj"], modules_to_save=["embed_tokens"])
    further = tunekit.train(recipe("sft", str(adapter), train=QUIET, output=OTHER))
    assert torch.equal(logits_of(tied, further.model_path), logits_of(tied, adapter))
    with pytest.raises(PlanError, match=r"so merging it would change the head; use adapter.type=lora"):
        verbs.plan(recipe("sft", str(adapter), adapter="full"))


def save_tied_model(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    here = folder.parent / "model"
    model = AutoModelForCausalLM.from_pretrained(here)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(here).save_pretrained(folder)
    return folder


def test_an_adapter_that_no_recipe_describes_is_refused(here):
    adapter = save_adapter(here / "adapter-odd", here / "model", target_modules=["q_proj"], bias="all")
    with pytest.raises(RecipeError, match=r"is an adapter with bias: all, which recipes do not support"):
        verbs.plan(recipe("sft", str(adapter)))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(RecipeError, match=r"has no adapter_model.safetensors"):
        verbs.plan(recipe("sft", str(adapter)))


@pytest.mark.slow
def test_an_adapter_goes_on_over_a_quantised_base_and_the_plan_says_so(here, sft):
    run = tunekit.train(recipe("dpo", "my-sft", adapter="qlora"))
    assert run.plan.recipe.adapter.rank == 4
    assert "trained on an unquantized one, continues on a 4-bit base" in run.plan.explain()
    (looked,) = logged(run, "reference")
    assert looked["max_difference"] == 0
    back = verbs.plan(recipe("dpo", run.name))
    assert back.recipe.adapter.type == "qlora", "as the run had it"
    assert (
        "trained on a 4-bit base, continues on an unquantized one"
        in verbs.plan(recipe("dpo", run.name, adapter="lora")).explain()
    )


def continued_dpo(**sections):
    train = {"max_steps": 4, "learning_rate": 2e-3, "save_steps": 2, "eval_steps": 2, "warmup_steps": 0}
    return recipe("dpo", "my-sft", data={"eval": "pairs.jsonl"}, train=train, **sections)


@pytest.fixture(scope="module")
def further(workspace, sft):
    """A run that trains the adapter further, in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        return Run(tunekit.train(continued_dpo()).path.resolve())


@pytest.mark.slow
def test_an_adapter_is_trained_further_alike_in_parts(here, further):
    in_two_processes(continued_dpo(parallel={"num_processes": 2, "strategy": "zero3"}), further)


@pytest.mark.slow
def test_after_a_break_two_processes_are_held_to_the_adapter_of_the_first_run(here, further):
    run = Run(made(continued_dpo(parallel={"num_processes": 2, "strategy": "fsdp2"})))
    in_processes(2, cut_off, run.path)
    in_processes(2, worked, run.path)
    goes_on_as(run, further)


@pytest.mark.slow
def test_after_a_break_one_process_is_held_to_the_adapter_of_the_first_run(here, further):
    run = Run(made(continued_dpo()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "on_step_begin", Watch.on_step_begin)
        cut_off(run.path)
    worked(run.path)
    goes_on_as(run, further)


def goes_on_as(run, expected):
    """A run that was cut off after a checkpoint of its second step has the losses of one that was not."""
    assert [event["step"] for event in logged(run, "resume")] == [2]
    for kind, name in (("log", "loss"), ("log", "rewards/margins"), ("eval", "eval_loss")):
        values = [event[name] for event in logged(expected, kind)]
        assert [event[name] for event in logged(run, kind)][-2:] == pytest.approx(values[-2:], rel=1e-5)
