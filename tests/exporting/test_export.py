"""Exports: what others load answers as the run's model does, computed here by transformers and PEFT alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import tunekit
from tests.on_demand import OnDemand
from tests.tiny import save_chats, save_tiny_model
from tunekit.exporting.export import _write
from tunekit.inference.inference_model import find_trained
from tunekit.probe.model import PICO

QUESTION = [{"role": "user", "content": "What is double 3?"}]

LARGE = {"learning_rate": 2e-2, "max_steps": 4, "save_steps": 2, "global_batch_size": 4}
"""Steps after which a model is clearly another one."""


def train(workspace, name, *, model="pico", adapter="lora", **others):
    recipe = {
        "model": str(model),
        "data": {"train": str(workspace / "rows.jsonl"), "max_length": 64},
        "adapter": adapter,
        "train": LARGE,
        "output": {"dir": str(workspace / "runs" / name), "sample_prompts": ["What is double 3?"]},
        **others,
    }
    return tunekit.train(recipe)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    return folder


@pytest.fixture(scope="module")
def runs(workspace):
    return OnDemand(lambda kind: train(workspace, kind, adapter=kind))


def logits_of(model, folder) -> torch.Tensor:
    """Logits of a question, (seq, vocab), by the template in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        return model.eval()(**ids).logits[0].float()


def loaded(folder) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def trained_by(run, base=PICO) -> torch.nn.Module:
    """A run's result as PEFT loads it onto the base in float32, or as transformers does."""
    if not (run.model_path / "adapter_config.json").is_file():
        return loaded(run.model_path)
    return PeftModel.from_pretrained(loaded(base), run.model_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "qlora", "full"])
@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_merged_weights_answer_as_the_run_does(kind, dtype, off, runs, tmp_path):
    done = tunekit.export(runs[kind], tmp_path / "out", dtype=dtype)
    ours, theirs = logits_of(loaded(done.folder), done.folder), logits_of(trained_by(runs[kind]), runs[kind].model_path)
    bare = logits_of(loaded(PICO), PICO)
    spread = theirs.std(-1).max()
    assert (ours - theirs).pow(2).mean().sqrt() < off * spread
    assert (bare - theirs).pow(2).mean().sqrt() > 2 * off * spread, "the run has learned nothing that could be lost"
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype == getattr(torch, dtype)
    assert done.check.logit_error < off and done.check.num_same_tokens > 0
    assert not list(tmp_path.glob(".*"))


def test_merged_weights_end_an_answer_with_the_token_that_the_adapter_learned(tmp_path):
    folder = save_tiny_model(tmp_path / "model", hidden=32, layers=1)
    config = GenerationConfig.from_pretrained(folder)
    own, config.eos_token_id = config.eos_token_id, 5
    config.save_pretrained(folder)
    _write(find_trained(str(folder)), "merged", "float32", tmp_path / "merged", "1GB", lambda event: None, base="")
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == [5, own]


@pytest.mark.slow
def test_an_export_says_what_it_is_and_how_it_was_checked(runs, tmp_path):
    told = []
    done = tunekit.export(runs["lora"], tmp_path / "out", on_event=told.append)
    assert [event["phase"] for event in told] == ["loading", "writing", "checking", "done"]
    written = json.loads((tmp_path / "out" / "export.json").read_text())
    assert written["check"]["logit_error"] == done.check.logit_error and written["kind"] == "merged"
    assert written["dtype"] == "bfloat16", "pico is stored so"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "merged into the base model" in card and "library_name: transformers" in card
    template = AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert template == AutoTokenizer.from_pretrained(runs["lora"].model_path).chat_template
    assert (tmp_path / "out" / "generation_config.json").is_file()


@pytest.mark.slow
def test_an_adapter_is_exported_as_peft_loads_it(runs, tmp_path):
    done = tunekit.export(runs["lora"], tmp_path / "out", kind="adapter")
    ours = logits_of(PeftModel.from_pretrained(loaded(PICO), tmp_path / "out"), tmp_path / "out")
    assert torch.equal(ours, logits_of(trained_by(runs["lora"]), runs["lora"].model_path))
    assert done.check.logit_error == 0 and not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_without_a_destination_it_lies_with_the_run_and_a_checkpoint_has_its_own_place(runs):
    done = tunekit.export(runs["lora"], checkpoint="2", dtype="float32")
    assert Path(done.folder) == runs["lora"].path / "export" / "merged-2"
    of_step = PeftModel.from_pretrained(loaded(PICO), runs["lora"].path / "checkpoints" / "checkpoint-2")
    at_step, at_end = (logits_of(m, PICO) for m in (of_step, trained_by(runs["lora"])))
    ours = logits_of(loaded(done.folder), done.folder)
    assert (ours - at_step).abs().max() < 1e-3 < (ours - at_end).abs().max()
    assert "Checkpoint | of step 2" in Path(done.folder, "README.md").read_text()


def damage(folder, change) -> None:
    """Change what lies in the export's folder before it has its name."""
    (draft,) = folder.glob(".exporting-*")
    change(draft)


def negate_one(draft) -> None:
    weights = load_file(draft / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**weights, name: -weights[name]}, draft / "model.safetensors", metadata={"format": "pt"})


def forget_the_adapter(draft) -> None:
    shutil.copyfile(PICO / "model.safetensors", draft / "model.safetensors")


def other_template(draft) -> None:
    (draft / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def cut_off(draft) -> None:
    content = (draft / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(content[: len(content) // 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (negate_one, "from the trained model: logits differ"),
        (forget_the_adapter, "from the trained model: logits differ"),
        (other_template, "the chat template of the export renders"),
        (cut_off, "are damaged: .*not fully covered"),
    ],
)
def test_a_wrong_export_is_refused_and_nothing_is_left_of_it(change, words, runs, tmp_path):
    def damages(event):
        if event["phase"] == "checking":
            damage(tmp_path, change)

    with pytest.raises(tunekit.TunekitError, match=words):
        tunekit.export(runs["lora"], tmp_path / "out", on_event=damages)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_adapter_that_changes_less_than_its_type_can_hold_is_not_lost_in_silence(workspace, tmp_path):
    small = {**LARGE, "learning_rate": 1e-7, "lr_scheduler_type": "constant", "warmup_steps": 0}
    run = train(workspace, "small", train=small)
    with pytest.raises(tunekit.TunekitError, match=r"lose the adapter's changes.*--dtype float32"):
        tunekit.export(run, tmp_path / "out", dtype="bfloat16")
    assert tunekit.export(run, tmp_path / "out", dtype="float32").check.adapter_change > 0


def test_what_cannot_be_exported_is_refused_in_words(runs, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    cases = [
        (tmp_path / "full", {}, "exists and is not empty"),
        (tmp_path / "link", {}, "is a symbolic link to"),
        (tmp_path / "a\nb", {}, "is not a valid export folder"),
        (tmp_path / "full" / "mine" / "below", {}, "cannot be created"),
        (tmp_path / "out", {"kind": "adapter", "dtype": "bfloat16"}, "stays in float32"),
        (tmp_path / "out", {"checkpoint": "3"}, "no such checkpoint; available: checkpoint-2, checkpoint-4"),
        (tmp_path / "out", {"checkpoint": "../../full"}, "no such checkpoint"),
    ]
    for dest, options, words in cases:
        with pytest.raises(tunekit.TunekitError, match=words):
            tunekit.export(runs["lora"], dest, **options)
    with pytest.raises(tunekit.TunekitError, match="is not a run"):
        tunekit.export("pico", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "link"]


@pytest.mark.slow
def test_all_weights_are_exported_as_no_adapter(runs, tmp_path):
    with pytest.raises(tunekit.TunekitError, match="has no adapter"):
        tunekit.export(runs["full"], tmp_path / "out", kind="adapter")


@pytest.fixture
def interrupted(runs, tmp_path):
    """A run that ended with checkpoints and without a result."""
    folder = shutil.copytree(runs["lora"].path, tmp_path / "copy")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "phase": "interrupted"}))
    return tunekit.Run(folder)


def test_a_run_that_has_not_finished_is_not_exported_and_names_its_checkpoint(interrupted, tmp_path):
    with pytest.raises(tunekit.TunekitError, match=r"is interrupted.*--checkpoint 4"):
        tunekit.export(interrupted, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_has_not_finished_is_exported_by_a_checkpoint(interrupted, tmp_path):
    assert tunekit.export(interrupted, tmp_path / "out", checkpoint="4").step == 4


def test_a_damaged_checkpoint_is_not_exported(runs, tmp_path):
    folder = shutil.copytree(runs["lora"].path, tmp_path / "copy")
    weights = folder / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(tunekit.TunekitError, match=r"adapter_model\.safetensors is damaged"):
        tunekit.export(tunekit.Run(folder), tmp_path / "out", checkpoint="2")
