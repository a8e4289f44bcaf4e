"""What a run is held to: it is the model before training, it does not move, and whatever breaks that stops the run."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tunekit
from tests.runs.test_lineage import REWARDS, save_adapter
from tests.tiny import save_tiny_model, watching_models
from tests.training.engines import made, worked
from tests.training.test_dpo import logged, save_pairs
from tests.training.test_resume import cut_off
from tunekit.errors import RunError
from tunekit.training import train
from tunekit.training.callbacks import Watch


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("references")
    save_tiny_model(folder / "model")
    save_adapter(folder / "adapter", folder / "model", target_modules=["q_proj", "up_proj"])
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


def recipe(model, adapter="lora", *, method=None, rows="pairs"):
    return {
        "model": model,
        "data": {"train": f"{rows}.jsonl", "max_length": 64},
        "method": method or "dpo",
        "adapter": adapter,
        "train": {"max_steps": 4, "global_batch_size": 8, "learning_rate": 1e-2, "warmup_steps": 0, "save_steps": 2},
        "output": {"sample_prompts": []},
    }


GRPO = {
    "type": "grpo",
    "rewards": ["lineage_rewards:low"],
    "num_generations": 4,
    "max_completion_length": 8,
    "beta": 0.1,
}


def references_of(trainer):
    """Log-probabilities of all pairs by the reference, through the trainer's own way to it; and by the model."""
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(16)])
    scored = trainer.compute_ref_log_probs(trainer.ref_model or trainer.model, batch)
    with torch.no_grad():
        logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return torch.cat(scored), logits


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "adapter", "kind"),
    [
        ("model", "lora", "without adapter"),
        ("adapter", "lora", "copied adapter"),
        ("model", "full", "second model"),
        ("adapter", "full", "second model"),
    ],
)
def test_the_reference_is_the_model_before_training_and_does_not_move(model, adapter, kind, here, monkeypatch):
    look, seen = train.check_reference, []

    def looking(trainer, *given, **named):
        look(trainer, *given, **named)
        seen.extend([trainer, references_of(trainer)])

    monkeypatch.setattr(train, "check_reference", looking)
    run = tunekit.train(recipe(model, adapter))
    (looked,) = logged(run, "reference")
    assert (looked["kind"], looked["max_difference"]) == (kind, 0)
    assert looked["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert logged(run)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert logged(run)[0]["rewards/margins"] == 0
    trainer, (before, logits_before) = seen
    after, logits_after = references_of(trainer)
    assert torch.equal(after, before)
    assert (logits_after - logits_before).abs().max() > 0.01, "the model has moved"
    trained = {id(one) for group in trainer.optimizer.param_groups for one in group["params"]}
    copies = [one for name, one in trainer.model.named_parameters() if ".ref." in name]
    assert bool(copies) == (kind == "copied adapter")
    assert not any(one.requires_grad or id(one) in trained for one in copies)


def perturbed(name, by):
    """Change one tensor of the model once all is loaded."""

    def change(model):
        with torch.no_grad():
            next(one for key, one in model.named_parameters() if name in key).mul_(0).add_(by)

    return change


FAULTS = {
    "the new adapter is not nothing": ("model", "lora", "dpo", perturbed("lora_B.default", 0.02)),
    "another adapter is trained": ("adapter", "lora", "dpo", perturbed("lora_B.default", 0.02)),
    "the copy is of another adapter": ("adapter", "lora", "dpo", perturbed("lora_B.ref", 0.0)),
    "all weights but one were loaded": ("adapter", "full", "dpo", perturbed("q_proj.weight", 0.0)),
    "the copy is the base, of answers to come": ("adapter", "lora", GRPO, perturbed("lora_B.ref", 0.0)),
    "another model is trained on answers to come": ("model", "full", GRPO, perturbed("q_proj.weight", 0.0)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_is_not_its_reference_is_not_trained(fault, here, monkeypatch):
    model, adapter, method, change = FAULTS[fault]
    settle = train.settle_reference

    def with_fault(built, *given):
        settle(built, *given)
        change(built)

    monkeypatch.setattr(train, "settle_reference", with_fault)
    rows = "prompts" if method == GRPO else "pairs"
    loss = "" if method == GRPO else r", and the loss is 0\.\d+ instead of ln 2"
    with pytest.raises(
        RunError, match=rf"log-probabilities of an answer differ by [\d.]+ nats, [\d.e-]+ per token{loss}"
    ):
        tunekit.train(recipe(model, adapter, method=method, rows=rows))


def test_a_copy_is_merged_too_where_trl_loads_it(here):
    """Without, the reference is the bare base, and the divergence of the first step is not 0."""
    run = tunekit.train(recipe("adapter", "full", method=GRPO, rows="prompts"))
    assert logged(run)[0]["kl"] == 0
    assert logged(run, "reference")[0]["kind"] == "second model"


@pytest.mark.slow
def test_dropout_stops_a_run_that_is_held_to_a_reference(here):
    lora = {"type": "lora", "dropout": 0.3}
    with pytest.raises(RunError, match=r"dropout 0\.3 is on: set adapter\.dropout=0"):
        tunekit.train(recipe("adapter", lora, method=GRPO, rows="prompts"))
    run = tunekit.train(
        recipe("adapter", lora, method={**GRPO, "trainer_args": {"disable_dropout": True}}, rows="prompts")
    )
    assert logged(run)[0]["kl"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", GRPO], ids=["dpo", "grpo"])
def test_a_run_that_goes_on_is_held_to_what_it_was_held_to(method, here, tmp_path):
    folder = save_adapter(tmp_path / "adapter", here / "model", target_modules=["v_proj"])
    rows = "prompts" if method == GRPO else "pairs"
    path = made(recipe(str(folder), method=method, rows=rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "on_step_begin", Watch.on_step_begin)
        cut_off(path)
    forget_copies(path)
    weights = folder / "adapter_model.safetensors"
    original = weights.read_bytes()
    save_file({name: 0 * tensor for name, tensor in load_file(weights).items()}, weights)
    with pytest.raises(RunError, match=r"the reference has changed since training began: .* nats per token"):
        worked(path)
    weights.write_bytes(original)
    worked(path)


def forget_copies(run: Path) -> None:
    """Take the copy of the adapter out of the checkpoints, which those of FSDP2 and DeepSpeed do not hold."""
    for file in (run / "checkpoints").glob("checkpoint-*/ref/*"):
        file.unlink()
    for manifest in (run / "checkpoints").glob("checkpoint-*/manifest.json"):
        listed = json.loads(manifest.read_text())
        listed["files"] = {name: size for name, size in listed["files"].items() if not name.startswith("ref/")}
        manifest.write_text(json.dumps(listed))


BEFOREHAND = {"type": "dpo", "precompute_ref_log_probs": True}


def steps_and_passes(asked):
    """A run, and how often its model was called without gradients before the first step."""
    passes = []

    def watch(module, kwargs):
        if type(module).__name__ == "LlamaForCausalLM" and not torch.is_grad_enabled():
            passes.append(kwargs)

    with watching_models(watch):
        run = tunekit.train(asked)
    return run, len(passes)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "adapter"), [("adapter", "lora"), ("model", "full")])
def test_a_reference_is_asked_once_for_all_runs_on_the_same_model_and_rows(model, adapter, here, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = recipe(model, adapter, method=BEFOREHAND)
    # Step 0 is looked at in two passes, of two rows, the head in two more, and at the end two rows by what was trained
    # and by what was saved.
    first, computed = steps_and_passes(asked)
    again, found = steps_and_passes(asked)
    assert (computed, found) == (2 + 8, 8)
    losses = [[event["loss"] for event in logged(run)] for run in (first, again)]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(
        [event["loss"] for event in logged(tunekit.train(recipe(model, adapter)))], rel=1e-5, abs=1e-6
    )
    rows = (here / "pairs.jsonl").read_text()
    (here / "changed.jsonl").write_text(rows.replace("double 7", "double 9"))
    assert steps_and_passes({**asked, "data": {**asked["data"], "train": "changed.jsonl"}})[1] == 10
    save_tiny_model(tmp_path / "model", seed=1)
    others = str(tmp_path / "model") if model == "model" else str(changed(here / model, tmp_path / "adapter"))
    assert steps_and_passes({**asked, "model": others})[1] == 10


def changed(adapter: Path, to: Path) -> Path:
    """An adapter that differs in one number."""
    shutil.copytree(adapter, to)
    weights = load_file(to / "adapter_model.safetensors")
    next(iter(weights.values()))[0, 0] += 0.01
    save_file(weights, to / "adapter_model.safetensors")
    return to


@pytest.mark.slow
def test_log_probabilities_of_another_model_stop_a_run(here, tmp_path, monkeypatch):
    from datasets import Dataset

    from tunekit.data import prepare
    from tunekit.methods.pair_trainers import FILE

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tunekit.train(recipe("model", method=BEFOREHAND))
    (entry,) = (entry for entry in prepare.list_entries() if entry.kind == "log-probabilities")
    columns = Dataset.from_parquet(str(entry.path / FILE)).with_format("numpy")[:]
    Dataset.from_dict({name: values - 3 for name, values in columns.items()}).to_parquet(entry.path / FILE)
    with pytest.raises(RunError, match=r"\(beforehand\).*`tunekit data cache --clear`"):
        tunekit.train(recipe("model", method=BEFOREHAND))
