"""The benchmarks that need an accelerator say so without one, and what they would run is known to work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, kernels, models, peers, tables, train, webui
from tests.kernels.interpreter import interpreted

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("benchmark", [kernels, train, gpu])
def test_without_an_accelerator_it_says_what_it_would_measure(benchmark, capsys):
    assert benchmark.main([]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("There is no accelerator here")
    assert len(printed.splitlines()) > 8


@pytest.mark.slow
def test_every_form_of_a_kernel_runs_and_agrees_with_the_formula(capsys):
    from liger_kernel.ops import cross_entropy, fused_add_rms_norm, fused_linear_cross_entropy, rms_norm, rope, swiglu

    with interpreted(cross_entropy, fused_add_rms_norm, fused_linear_cross_entropy, rms_norm, rope, swiglu):
        assert kernels.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    errors = [float(line.rpartition("error ")[2]) for line in printed.splitlines() if " error " in line]
    # bfloat16 has a relative rounding of 2^-9, and results go through a few of these.
    assert len(errors) > 30
    assert max(errors) < 2e-2
    for rival in ("torch.compile", "liger", "trl", "peft", "bitsandbytes"):
        assert rival in printed


@pytest.mark.slow
def test_every_runner_trains(capsys):
    assert train.main(["--dry-run", "--only", "lora"]) == 0
    # DeepSpeed's logger writes to where results go.
    lines = [line for line in capsys.readouterr().out.splitlines() if "[WARNING]" not in line]
    by_runner = {line.split()[4]: line for line in lines}
    assert by_runner.keys() == set(train.RUNNERS)
    for runner in ("auto", "torch", "trl"):
        assert "tokens/s" in by_runner[runner], by_runner[runner]
    assert "left out" in by_runner["liger"]  # it is for CUDA


@pytest.mark.slow
def test_all_that_is_measured_on_a_gpu_runs_tiny_on_a_cpu_and_goes_on(tmp_path, capfd):
    assert gpu.main(["--cpu-dry-run", "--results", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    rows = json.loads((tmp_path / "train-dry-run.json").read_text(encoding="utf-8"))["rows"]
    assert {train.case_of(row).name for row in rows} == {case.name for case in gpu.DRY_CASES}
    assert all(row["tokens_per_second"] > 0 and row["planned"]["tensor_bytes"] > 0 for row in rows)
    assert "nf4 dequantisation" in printed and "tests: " in printed
    # What is measured is not measured again.
    assert gpu.main(["--cpu-dry-run", "--results", str(tmp_path), "--only", "device", "tests", "train"]) == 0
    assert "tokens/s" not in capfd.readouterr().out


@pytest.mark.slow
def test_runs_are_timed_from_outside(capfd, tmp_path):
    (tmp_path / "tunekit").symlink_to(sys.prefix)
    words = ["--tools", "--cases", "packed", "--runs", "1", "--busy", "--environments", str(tmp_path)]
    assert peers.main(words) == 0
    printed = capfd.readouterr().out.splitlines()
    (row,) = {line for line in printed if line.startswith("| packed | tunekit ")}
    first, whole, step, cpu, memory, speed = (
        float(cell.split()[0].replace(",", "")) for cell in row.strip("| ").split(" | ")[2:]
    )
    assert 0 < first < whole and step * (peers.NUM_STEPS - 1) < whole and cpu > 1
    assert memory > 200 and speed == pytest.approx(peers.BATCH * peers.LENGTH / step, rel=0.1)
    assert sum(line.startswith(("| misspelt key | tunekit", "| missing file | tunekit")) for line in printed) == 2
    assert all(line.endswith("| yes |") for line in printed if line.startswith(("| misspelt", "| missing")))


@pytest.mark.slow
def test_the_web_ui_reads_the_events_of_a_run_once(capsys):
    webui.main(["--dry-run"])
    result = json.loads(capsys.readouterr().out)
    reading, visitors = result["reading"], result["visitors"]
    assert reading["file_bytes"] > 10_000_000
    # The file, and a process that reads it.
    assert 1 <= reading["first_ratio"] < 1.15 and reading["five_later_ratio"] < 0.1
    assert 0 < visitors["server_mib"] <= visitors["peak_mib"] < webui.LIMIT_MIB
    assert visitors["num_answers"] > 0


def test_the_readme_has_the_tables_that_the_results_make():
    assert tables.block() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_of_models_is_made_of_the_results():
    saved = json.loads(models.RESULTS.read_text(encoding="utf-8"))
    assert models.PAGE.read_text(encoding="utf-8") == models.page(saved)


def test_the_page_of_models_tells_what_failed():
    same = {"verdict": "same", "detail": "loss 1, 0e+00"}
    why = "PlanError: TYPE is refused; use ddp (checks.py:84)"
    types = {
        "bert": {"lora": same, "fsdp2": {"verdict": "refused", "detail": why.replace("TYPE", "bert")}},
        "ernie": {"lora": same, "fsdp2": {"verdict": "refused", "detail": why.replace("TYPE", "ernie")}},
        "llama": {"lora": same, "fsdp2": {"verdict": "crash", "detail": "KeyError: 'x' (train.py:1)"}},
        "blt": {"lora": {"verdict": "not built", "detail": "AttributeError: (x.py:1)"}},
    }
    page = models.page({"date": "2026-01-02", "machine": {"device": "X"}, "versions": {"torch": "2"}, "types": types})
    assert "Of 3 causal types, 3 train LoRA" in page and "fsdp2 0 of 3" in page
    assert "| llama | yes |  |  |  |  |  |  | crash |  |" in page
    assert "- TYPE is refused; use ddp: bert, ernie (fsdp2)" in page
    assert "these 1 types at the sizes tried: blt." in page


def test_without_results_nothing_is_claimed(tmp_path):
    assert (
        tables.block(tmp_path) == "Nothing was measured on an accelerator yet: `python -m benchmarks.kernels --save`.\n"
    )


def test_results_become_a_table(tmp_path):
    row = {"case": "swiglu", "pass": "both", "milliseconds": 0.5, "share_of_ceiling": 0.91}
    report = {"device": "NVIDIA X", "commit": "abc", "date": "2026-01-02"}
    rows = [{**row, "form": "tunekit"}, {**row, "form": "liger", "milliseconds": 0.75, "share_of_ceiling": 0.6}]
    (tmp_path / "kernels-x.json").write_text(json.dumps({**report, "rows": rows}))
    run = {"shape": "8b", "adapter": "lora", "max_length": 2048, "mfu": 0.5, "peak_bytes": 2**34}
    runs = [{**run, "runner": "auto", "tokens_per_second": 12000.0}, {**run, "runner": "trl", "left_out": "no room"}]
    (tmp_path / "train-x.json").write_text(json.dumps({**report, "rows": runs}))
    block = tables.block(tmp_path)
    assert "NVIDIA X, commit abc, 2026-01-02" in block
    assert "| swiglu | 0.50 ms (91%) | 0.75 ms (60%) |" in block
    assert "| 8b lora 2048 | 12,000 (50%, 16 GiB) | - |" in block


@pytest.mark.slow
def test_the_tables_are_printed_by_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tables"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == tables.block()
