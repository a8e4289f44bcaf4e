"""Merged weights of every kind of adapter and architecture, beside PEFT's own; and merges that are wrong on purpose.

The equality check runs in this process here: that it runs in a fresh one is tested where whole exports are made.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import tunekit
from tests.runs.test_lineage import save_adapter
from tests.tiny import save_chats, save_tiny_model_like
from tunekit.exporting.export import merged
from tunekit.exporting.verify import Subject, check
from tunekit.inference.inference_model import Trained, find_trained, tokenizer_of
from tunekit.probe.model import PICO
from tunekit.recipe.sections.adapters import LoraAdapter
from tunekit.recipe.sections.model import ModelSection

LARGE = {"learning_rate": 2e-2, "max_steps": 2, "global_batch_size": 4}
"""Steps after which a model is clearly another one."""

DORA = {"type": "lora", "use_dora": True, "rank": 4}

KINDS = {"full": "full", "lora": "lora", "qlora": "qlora", "dora": DORA}

ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "mistral")

SPECIAL = {
    "pico, DoRA": ("pico", DORA),
    "4-bit DoRA": ("llama", {"type": "qlora", "use_dora": True, "rank": 4}),
    "LoRA of several ranks": (
        "llama",
        {"type": "lora", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 64}},
    ),
    "LoRA of a layer": ("gemma3_text", {"type": "lora", "layers_to_transform": [1], "exclude_modules": ["k_proj"]}),
    "rsLoRA": ("llama", {"type": "lora", "use_rslora": True}),
    # Input and output embeddings of this one are the same matrix.
    "tied, embeddings trained": ("gemma3_text", {"type": "lora", "modules_to_save": ["embed_tokens"]}),
    "both trained": ("mistral", {"type": "lora", "modules_to_save": ["embed_tokens", "lm_head"]}),
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(8)))
    for architecture in ARCHITECTURES:
        save_tiny_model_like(folder / architecture, architecture)
    return folder


def base_of(workspace: Path, model: str) -> Path:
    return PICO if model == "pico" else workspace / model


def train(workspace: Path, name: str, model: str, adapter: object) -> tunekit.Run:
    return tunekit.train(
        {
            "model": str(base_of(workspace, model)),
            "data": {"train": str(workspace / "rows.jsonl"), "max_length": 64},
            "adapter": adapter,
            "train": LARGE,
            "output": {"dir": str(workspace / "runs" / name), "sample_prompts": ["double 3"]},
        }
    )


def write(run: tunekit.Run, folder: Path) -> Subject:
    """Whole weights of a run, as they are before they are checked."""
    found = find_trained(run)
    merged(found, "float32").save_pretrained(folder)
    tokenizer_of(found).save_pretrained(folder)
    return Subject.of(found, "merged", "float32", folder)


def logits_of(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(folder)("What is double 3?", return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**ids).logits[0]


def loaded(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def is_exported_rightly(workspace: Path, name: str, model: str, adapter: object, tmp_path: Path) -> None:
    run = train(workspace, name, model, adapter)
    found = check(write(run, tmp_path / "out"))
    assert found.logit_error < 1e-4 and found.num_same_tokens == found.num_tokens
    base = loaded(base_of(workspace, model))
    bare = logits_of(base, run.model_path)
    theirs = base if adapter != "full" else loaded(run.model_path)
    if adapter != "full":
        theirs = PeftModel.from_pretrained(base, run.model_path)
    wanted = logits_of(theirs, run.model_path)
    assert (logits_of(loaded(tmp_path / "out"), tmp_path / "out") - wanted).abs().max() < 1e-4 * wanted.std()
    assert (bare - wanted).abs().max() > 0.1 * wanted.std(), "the run has learned nothing that could be lost"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_weights_answer_as_what_was_trained(kind, architecture, workspace, tmp_path):
    is_exported_rightly(workspace, f"{architecture}-{kind}", architecture, KINDS[kind], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SPECIAL)
def test_weights_that_are_trained_wholly_or_scaled_otherwise_are_merged_too(case, workspace, tmp_path):
    is_exported_rightly(workspace, case.replace(",", ""), *SPECIAL[case], tmp_path)


@pytest.mark.parametrize("trained", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"], []])
@pytest.mark.parametrize("architecture", ["gemma3_text", "mistral"])
def test_tables_that_were_trained_apart_are_apart_once_they_are_loaded(architecture, trained, workspace, tmp_path):
    base = workspace / architecture
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"], modules_to_save=trained or None)
    section = LoraAdapter(rank=4, alpha=6, target_modules=["q_proj"], modules_to_save=trained)
    found = Trained("tiny", ModelSection(path=str(base)), section, str(adapter))
    merged(found, "float32").save_pretrained(tmp_path / "out")
    wanted, exported = logits_of(PeftModel.from_pretrained(loaded(base), adapter), base), loaded(tmp_path / "out")
    assert (logits_of(exported, base) - wanted).abs().max() < 1e-4 * wanted.std()
    # By its config.json other programs decide to read one table for both.
    is_one = torch.equal(exported.get_input_embeddings().weight, exported.get_output_embeddings().weight)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.tie_word_embeddings == config.get_text_config().tie_word_embeddings == is_one


@pytest.fixture(scope="module")
def right(workspace) -> tuple[Subject, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A right merge, its weights, and those of the base."""
    subject = write(train(workspace, "right", "llama", "lora"), workspace / "right")
    after, before = (load_file(folder / "model.safetensors") for folder in (workspace / "right", workspace / "llama"))
    return subject, after, before


LAYER = "model.layers.1."


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda name, after, before: before + (after - before) / 2,
        lambda name, after, before: before + (after - before) * 1.1,
        lambda name, after, before: before if name.startswith(LAYER) else after,
        lambda name, after, before: before + (after - before).T if name == LAYER + "self_attn.q_proj.weight" else after,
    ],
    ids=["scaled by a half", "scaled by 1.1", "a layer missed", "an update transposed"],
)
def test_a_wrong_merge_is_refused(wrong, right, tmp_path):
    subject, after, before = right
    shutil.copytree(subject.folder, tmp_path / "out")
    weights = {name: wrong(name, after[name], before[name]).contiguous() for name in after}
    save_file(weights, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(tunekit.TunekitError, match="merged weights differ from the trained model: logits differ by"):
        check(replace(subject, folder=str(tmp_path / "out")))


def test_what_half_precision_may_have_lost_is_refused_with_another_type_to_try(right, tmp_path):
    subject, _, before = right
    shutil.copytree(subject.folder, tmp_path / "out")
    save_file(before, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(tunekit.TunekitError, match=r"the export was deleted: export with --dtype float32 if float16"):
        check(replace(subject, folder=str(tmp_path / "out"), dtype="float16"))


def test_another_tokenizer_is_refused(right, tmp_path):
    subject, _, _ = right
    shutil.copytree(subject.folder, tmp_path / "out")
    path = tmp_path / "out" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["H"], vocab["b"] = vocab["b"], vocab["H"]
    path.write_text(json.dumps(content))
    with pytest.raises(tunekit.TunekitError, match="the export renders conversation 1 as"):
        check(replace(subject, folder=str(tmp_path / "out")))
