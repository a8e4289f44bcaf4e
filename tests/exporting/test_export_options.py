"""What an export has besides weights: parts, a Modelfile, a GGUF file; and what is said of runs that are damaged."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

import tunekit
from tests.on_demand import OnDemand
from tests.tiny import save_chats, save_tiny_model
from tunekit.cli.app import app
from tunekit.exporting.gguf import PLACE

STAND_IN = """
import json, struct, sys
folder, *options = sys.argv[1:]
out = options[options.index("--outfile") + 1]
with open({log!r}, "a") as log:
    log.write(json.dumps(options) + "\\n")
if "--vocab-only" not in options:
    assert json.load(open(folder + "/config.json"))["architectures"] == ["LlamaForCausalLM"]
    open(out, "wb").write(struct.pack("<4sIQQ", b"GGUF", 3, {tensors}, 0) + bytes(64))
"""
"""A program that is called as llama.cpp's converter is; what it writes has a GGUF file's head."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> OnDemand:
    folder = tmp_path_factory.mktemp("workspace")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(8)))
    save_tiny_model(folder / "model")
    return OnDemand(
        lambda adapter: tunekit.train(
            {
                "model": str(folder / "model"),
                "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
                "adapter": adapter,
                "train": {"max_steps": 2, "save_steps": 1, "global_batch_size": 4},
                "output": {"dir": str(folder / "runs" / adapter), "sample_prompts": ["double 3"]},
            }
        )
    )


def converter(folder: Path, *, tensors: int = 21) -> Path:
    path = folder / "convert_hf_to_gguf.py"
    path.write_text(STAND_IN.format(log=str(folder / "calls"), tensors=tensors))
    return path


@pytest.mark.slow
def test_an_export_in_parts_has_a_modelfile_and_a_gguf_file_of_them(runs, tmp_path, monkeypatch):
    monkeypatch.setenv(PLACE, str(converter(tmp_path).parent))
    words = ["export", str(runs["lora"].path), str(tmp_path / "out"), "--max-shard-size", "50KB", "--gguf", "q8_0"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors.index.json", "model-q8_0.gguf", "Modelfile", "generation_config.json"} <= files
    parts = sorted((tmp_path / "out").glob("model-*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(parts) > 1
    assert {name: part.name for part in parts for name in safe_open(part, "pt").keys()} == index  # noqa: SIM118
    asked, made = (json.loads(line) for line in (tmp_path / "calls").read_text().splitlines())
    assert "--vocab-only" in asked, "it is asked what it knows before weights are merged"
    assert made[made.index("--outtype") + 1] == "q8_0"
    modelfile = (tmp_path / "out" / "Modelfile").read_text()
    assert "FROM ./model-q8_0.gguf\n" in modelfile and 'PARAMETER stop "<|im_end|>"\n' in modelfile
    assert 'TEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n' in modelfile


def test_what_a_converter_cannot_do_is_told_before_weights_are_read(runs, tmp_path, monkeypatch):
    told = []

    def exports(words, **environment):
        for name in (PLACE, "PATH"):
            monkeypatch.setenv(name, environment.get(name, os.environ["PATH"] if name == "PATH" else ""))
        with pytest.raises(tunekit.TunekitError, match=words):
            tunekit.export(runs["lora"], tmp_path / "out", gguf="f16", on_event=told.append)

    exports(r"needs llama\.cpp's convert_hf_to_gguf\.py, which is not on the PATH; git clone", PATH=str(tmp_path))
    exports("which has no convert_hf_to_gguf.py; git clone", LLAMA_CPP=str(tmp_path))
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text("raise NotImplementedError('no such tokenizer')")
    exports("cannot convert lora: NotImplementedError: no such tokenizer", LLAMA_CPP=str(tmp_path))
    script.write_text("import not_there")
    exports("convert_hf_to_gguf.py needs not_there; pip install not_there", LLAMA_CPP=str(script))
    script.write_text(f"#!{sys.executable}\nraise SystemExit(3)")
    script.chmod(0o755)
    exports("cannot convert lora: it exited with code 3", PATH=str(tmp_path))
    assert told == [] and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_file_without_tensors_is_no_export(runs, tmp_path, monkeypatch):
    monkeypatch.setenv(PLACE, str(converter(tmp_path, tensors=0)))
    with pytest.raises(tunekit.TunekitError, match="wrote no GGUF file with tensors"):
        tunekit.export(runs["lora"], tmp_path / "out", gguf="f16")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_a_model_that_judges_is_exported_as_one_and_scores_alike(tmp_path):
    save_tiny_model(tmp_path / "model")
    pairs = [(f"{n} and {n}?", f"{2 * n}", "no") for n in range(8)]
    rows = [
        {
            "prompt": [{"role": "user", "content": question}],
            "chosen": [{"role": "assistant", "content": good}],
            "rejected": [{"role": "assistant", "content": bad}],
        }
        for question, good, bad in pairs
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tunekit.train(
        {
            "model": str(tmp_path / "model"),
            "data": {"train": str(tmp_path / "pairs.jsonl"), "max_length": 64},
            "method": "reward",
            "adapter": "lora",
            "train": {"max_steps": 3, "global_batch_size": 4, "learning_rate": 2e-2},
            "output": {"dir": str(tmp_path / "runs" / "judge")},
        }
    )
    done = tunekit.export(run, tmp_path / "out", dtype="float32")
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("2 and 2? 4", return_tensors="pt")
    load = AutoModelForSequenceClassification.from_pretrained
    base = load(tmp_path / "model", num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        ours = load(tmp_path / "out", dtype=torch.float32).eval()(**ids).logits
        theirs = PeftModel.from_pretrained(base, run.model_path).eval()(**ids).logits
    assert ours.shape == (1, 1) and abs(ours - theirs) < 1e-4 * max(1, abs(theirs))
    assert done.check.num_tokens == 0 and "Modelfile" not in done.files
    with pytest.raises(tunekit.TunekitError, match=r"is a reward model, which llama\.cpp does not support"):
        tunekit.export(run, tmp_path / "other", gguf="f16")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def interrupted(folder: Path) -> None:
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "phase": "interrupted"}))


ALONE, BOTH, ALL = ("export",), ("export", "chat"), ("export", "chat", "report")

DAMAGES = [
    ("lora", BOTH, interrupted, r"is interrupted, after step 2 of 2: no model yet; .*--checkpoint 2"),
    ("lora", BOTH, lambda run: cut(run / "model/adapter_model.safetensors"), "adapter_model.safetensors is damaged"),
    ("full", ALONE, lambda run: cut(run / "model/model.safetensors"), "the weights of .* are damaged"),
    ("full", BOTH, lambda run: cut(run / "model/config.json"), r"is not a valid JSON file|has a broken config\.json"),
    ("full", ALONE, lambda run: (run / "model/config.json").unlink(), "has no config.json; restore it"),
    (
        "full",
        BOTH,
        lambda run: (run / "model/model.safetensors").unlink(),
        r"is not a complete model: no \*\.safetensors; restore it",
    ),
    (
        "full",
        ALONE,
        lambda run: [one.unlink() for one in (run / "model").glob("tokenizer*")],
        "has no tokenizer; restore its",
    ),
    ("lora", ALONE, lambda run: cut(run / "model/tokenizer.json"), "the tokenizer in .* cannot be loaded"),
    ("lora", BOTH, lambda run: shutil.rmtree(run / "model"), "is finished, but .*model is missing; .*restore it, or"),
    ("lora", ALL, lambda run: cut(run / "status.json"), "status.json is damaged"),
    ("lora", ALL, lambda run: (run / "plan.yaml").unlink(), "plan.yaml cannot be read: No such file"),
    ("lora", ALL, lambda run: (run / "plan.yaml").write_text("a: ["), "plan.yaml is damaged"),
    ("lora", ALL, lambda run: (run / "recipe.yaml").unlink(), "recipe.yaml cannot be read: No such file"),
    ("lora", ALONE, lambda run: (run / "events.jsonl").unlink(), "events.jsonl has no result"),
]


def refusal(*words: str) -> str:
    """The one line that a command ends with."""
    told = CliRunner().invoke(app, list(words), input="hi\n")
    assert isinstance(told.exception, tunekit.TunekitError), (words, told.exception, told.output)
    assert "\n" not in str(told.exception)
    return str(told.exception)


@pytest.mark.slow
def test_each_command_says_of_a_damaged_run_what_is_wrong_with_it_in_one_line(runs, tmp_path):
    others = []
    for number, (adapter, commands, damage, words) in enumerate(DAMAGES):
        run = shutil.copytree(runs[adapter].path, tmp_path / f"run-{number}")
        damage(run)
        for command in commands:
            more = {"export": [str(tmp_path / "out")], "chat": ["--device", "cpu"], "report": []}[command]
            said = refusal(command, str(run), *more)
            if not re.search(words, said):
                others.append((command, words, said))
    assert not others
    assert not (tmp_path / "out").exists()


def test_each_command_says_which_run_or_checkpoint_is_not_there(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in ALL:
        assert "no run 'nosuch' in runs; `tunekit runs` lists them" in refusal(command, "nosuch")
        assert "no run" in refusal(command, str(tmp_path / "nosuch"))
        assert "invalid run name" in refusal(command, "")
    for command in BOTH:
        for step in ("7", "x"):
            said = refusal(command, str(runs["lora"].path), "--checkpoint", step)
            assert f"checkpoint {step}: lora has no such checkpoint; available: checkpoint-1, checkpoint-2" in said
    said = refusal("report", str(runs["lora"].path), "--out", "no/report.html")
    assert "cannot write 'no/report.html'" in said


def test_options_that_do_not_go_together_are_refused(runs, tmp_path):
    run, out = str(runs["lora"].path), str(tmp_path / "out")
    for size in ("5", "0GB", "-1GB", "big"):
        assert "invalid file size; write it as 5GB" in refusal("export", run, out, f"--max-shard-size={size}")
    assert "an adapter alone cannot be converted" in refusal("export", run, out, "--adapter", "--gguf", "f16")
    assert "an adapter is one file" in refusal("export", run, out, "--adapter", "--max-shard-size", "1GB")
    assert "need --push" in refusal("export", run, out, "--replace")
