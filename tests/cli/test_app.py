"""The commands as a user runs them: their output and their exit codes; what a process alone shows is slow."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer.main

from tests.commands import run_command
from tests.tiny import save_chats, save_tiny_model
from tests.waiting import LIMIT_SECONDS
from tunekit.cli.app import DAILY, app
from tunekit.recipe.explain import json_schema
from tunekit.runs.run import Run, list_runs

RECIPE = """\
# Doubling numbers
model: model
data:
  train: rows.jsonl
  eval: rows.jsonl
  max_length: 64
train:
  max_steps: 6
  global_batch_size: 4
  learning_rate: 1e-3
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    (folder / "double.yaml").write_text(RECIPE, encoding="utf-8")
    return folder


def command(*arguments):
    return [sys.executable, "-m", "tunekit", *map(str, arguments)]


def tunekit(folder, *arguments):
    return run_command(*arguments, cwd=folder)


def test_the_version_is_told(tmp_path):
    answer = tunekit(tmp_path, "--version")
    assert tunekit(tmp_path, "-V").stdout == answer.stdout
    assert (answer.returncode, answer.stdout) == (0, f"tunekit {version('tunekit')}\n")


def in_process(folder, *arguments, **environment):
    """Run a command in a process of its own."""
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, check=False, env=os.environ | environment
    )


@pytest.fixture(scope="module")
def trained(workspace):
    answer = tunekit(workspace, "train", "double.yaml")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_kernels_says_which_modules_of_a_model_are_served(workspace):
    answer = tunekit(workspace, "kernels", "model")
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"LlamaRMSNorm +5 +RMSNorm", answer.stdout)
    assert re.search(r"LlamaRotaryEmbedding +1 +none +no kernel for this computation", answer.stdout)
    answer = tunekit(workspace, "kernels", ".")
    assert answer.returncode == 2
    assert "config.json" in answer.stderr


def test_help_fits_one_screen_and_describes_the_commands_of_daily_use_first():
    answer = run_command("--help", env={"COLUMNS": "80"})
    assert answer.returncode == 0
    lines = answer.stdout.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 80
    described = [found[1] for line in lines if (found := re.match(r"│ ([a-z]+) +[A-Z].*\. +│$", line))]
    assert described == list(DAILY)
    more = " ".join(lines[next(at for at, line in enumerate(lines) if "More commands" in line) :])
    others = sorted(set(typer.main.get_command(app).commands) - set(DAILY))
    assert len(others) > 15
    assert [name for name in others if not re.search(rf"[ ,]{name}[ ,]", more)] == []


@pytest.mark.slow
def test_a_well_known_model_is_planned_for_without_a_network_and_not_trained(workspace, tmp_path):
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    arguments = ("double.yaml", "model.path=google/gemma-3-270m-it", "adapter.type=lora", "train.global_batch_size=1")
    planned, refused = (in_process(workspace, verb, *arguments, **offline) for verb in ("plan", "train"))
    assert planned.returncode == 0, planned.stderr
    assert "268 M parameters" in planned.stdout
    assert "from the built-in table" in " ".join(planned.stdout.split())
    assert refused.returncode == 2
    assert "the Hub cannot be reached" in refused.stderr


def test_train_prints_plan_progress_summary_and_answers(trained):
    in_short = ("batch", "optimizer", "data", "steps")
    for topic in in_short:
        assert re.search(rf"^{topic} +\S", trained, re.MULTILINE), topic
    whole = ("device", "model", "precision", "adapter", "memory")
    assert not [topic for topic in whole if re.search(rf"^{topic} +\S.*  \S", trained, re.MULTILINE)]
    plan = trained[trained.index(" fits on CPU") : trained.index("plan runs/")]
    assert len(plan.strip().splitlines()) <= 10
    assert not [line for line in trained.splitlines() if line.endswith(" ")]
    assert re.search(r"^step 6/6  loss \d+\.\d{4}  lr \S+  [\d,]+ tokens/s$", trained, re.MULTILINE)
    assert len(re.findall(r"eval loss", trained)) >= 4
    assert re.search(r"^loss +\d\.\d{4} → \d\.\d{4}", trained, re.MULTILINE)
    assert re.search(r"^peak memory +[\d.]+ [MG]iB \(planned [\d.]+ [MG]iB\)", trained, re.MULTILINE)
    assert re.search(r"^model +runs/double-\d{8}-\d{6}/model", trained, re.MULTILINE)
    assert "before" in trained and "after" in trained and "double 0" in trained


@pytest.mark.slow
def test_train_keeps_the_libraries_words_out_of_the_terminal(workspace):
    answer = in_process(workspace, "train", "double.yaml")
    assert answer.returncode == 0, answer.stderr
    for noise in ("Warning", "warn(", "it/s", "kernels-community"):
        assert noise not in answer.stdout


@pytest.mark.slow
def test_training_again_makes_another_run_and_prints_the_whole_plan_where_it_is_told_to(trained, workspace):
    answer = tunekit(workspace, "train", "double.yaml", "train.max_steps=1", "--plan")
    assert answer.returncode == 0, answer.stderr
    for topic in ("device", "model", "precision", "adapter", "batch", "optimizer", "data", "steps", "memory"):
        assert re.search(rf"^{topic} +\S", answer.stdout, re.MULTILINE), topic
    runs = [run for run in list_runs(workspace / "runs") if run.name.startswith("double")]
    assert len(runs) >= 2
    assert runs[0].recipe.train.max_steps == 1


def test_overrides_that_supersede_are_announced(workspace):
    answer = tunekit(workspace, "plan", "double.yaml", "train.num_epochs=2")
    assert answer.returncode == 0, answer.stderr
    assert "note: train.max_steps=6 ignored" in answer.stdout


def test_plan_as_json_is_complete(workspace):
    answer = tunekit(workspace, "plan", "double.yaml", "--json")
    found = json.loads(answer.stdout)
    assert found["plan"]["schedule"]["num_steps"] == 6
    assert found["recipe"]["train"]["global_batch_size"] == 4
    assert found["plan"]["memory"]["parts"]["weights"] > 0


def test_plan_says_what_fits_where_before_all_else(workspace):
    answer = tunekit(workspace, "plan", "double.yaml", "--on", "8xH100", "train.global_batch_size=16")
    assert answer.returncode == 0, answer.stderr
    first, second, *_ = answer.stdout.splitlines()
    assert first.rstrip() == "lora on model fits on 8 x H100 SXM 80 GB: DDP"
    assert re.match(r"[\d.]+ of 73\.3 GiB per device; [\d.,]+ to [\d.,]+ tokens/s, ", second)
    assert re.search(r"^[a-z]+·+│·+ *$", answer.stdout, re.MULTILINE)
    assert re.search(r"^layout +DDP +\S", answer.stdout, re.MULTILINE)
    assert re.search(r"^precision +bfloat16 compute", answer.stdout, re.MULTILINE)


@pytest.mark.slow
def test_plan_in_a_terminal_draws_memory_in_colours(workspace):
    output = in_terminal(workspace, "plan", "double.yaml", "--on", "8xh100")
    assert re.search(r"\x1b\[38;[\d;]+m█+", output)
    assert re.search(r"\x1b\[38;[\d;]+m■\x1b\[0m context", output)


def test_plan_for_a_machine_of_a_file(workspace):
    (workspace / "lab.yaml").write_text("accelerator: rtx4090\nfree_memory_gib: 20\n", encoding="utf-8")
    answer = tunekit(workspace, "plan", "double.yaml", "--on", "lab.yaml")
    assert re.search(r"^device +RTX 4090 24 GB; 20\.0 of 24\.0 GiB free", answer.stdout, re.MULTILINE)


def test_plans_for_several_machines_stand_side_by_side(workspace):
    machines = ("--on", "t4", "--on", "4xrtx5090", "--on", "tpu-v5p")
    answer = tunekit(workspace, "plan", "double.yaml", *machines)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[0].split()[:4] == ["machine", "layout", "GiB", "batch"]
    assert re.search(r"^t4 +single device +[\d.]+ of 13\.8 +4 x 1 +unknown", answer.stdout, re.MULTILINE)
    assert re.search(r"^4xrtx5090 +DDP +[\d.]+ of 29\.3 +1 x 1 x 4 +\S+–\S+ ", answer.stdout, re.MULTILINE)
    assert re.search(r"^tpu-v5p +none, see below", answer.stdout, re.MULTILINE)
    assert re.search(r"^tpu-v5p +tpu-v5p: tunekit supports CUDA devices only", answer.stdout, re.MULTILINE)
    found = json.loads(tunekit(workspace, "plan", "double.yaml", *machines, "--json").stdout)
    assert found["plans"]["t4"]["dtype"] == "float32"
    assert "CUDA devices only" in found["plans"]["tpu-v5p"]["refused"]
    assert found["recipe"]["train"]["global_batch_size"] == 4


def test_a_sweep_plans_every_combination(workspace):
    swept = ("--sweep", "adapter.type=lora,full", "--sweep", "data.max_length=32,64", "--on", "h100")
    answer = tunekit(workspace, "plan", "double.yaml", *swept)
    assert answer.returncode == 0, answer.stderr
    rows = re.findall(r"^(lora|full) +(32|64) +single device +[\d.]+ of 73\.3", answer.stdout, re.MULTILINE)
    assert rows == [("lora", "32"), ("lora", "64"), ("full", "32"), ("full", "64")]
    found = json.loads(tunekit(workspace, "plan", "double.yaml", *swept, "--json").stdout)
    assert [variant["changes"]["data.max_length"] for variant in found["variants"]] == [32, 64, 32, 64]
    assert found["variants"][3]["plan"]["num_trainable_params"] > found["variants"][1]["plan"]["num_trainable_params"]


def test_advice_ranks_adapters_and_lengths_on_each_machine(workspace):
    answer = tunekit(workspace, "plan", "double.yaml", "--advise", "--on", "h100", "--on", "t4")
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"^[\w, ]*fastest.* +single device +[\d.]+ of 73\.3", answer.stdout, re.MULTILINE)
    for change in ("adapter.type=qlora", "adapter.type=full", "data.max_length=32"):
        assert re.search(rf"(h100|t4) +{change}", answer.stdout)
    refused = tunekit(workspace, "plan", "double.yaml", "--advise", "--fit", "length")
    assert refused.returncode == 2 and "exclude each other" in refused.stderr


def test_a_sweep_on_several_machines_names_them(workspace):
    machines = ("--on", "h100", "--on", "t4")
    answer = tunekit(workspace, "plan", "double.yaml", "--sweep", "train.global_batch_size=8,16", *machines)
    rows = re.findall(r"^(h100|t4) +(8|16) +single device", answer.stdout, re.MULTILINE)
    assert rows == [("h100", "8"), ("h100", "16"), ("t4", "8"), ("t4", "16")]


def test_fit_finds_the_largest_and_says_what_stops_it(workspace):
    length = tunekit(workspace, "plan", "double.yaml", "--fit", "length", "--on", "h100")
    assert length.returncode == 0, length.stderr
    assert re.search(r"^unchanged +64 +single device", length.stdout, re.MULTILINE)
    assert re.search(r"^largest +256 +single device", length.stdout, re.MULTILINE)
    assert "exceeds the 256 positions of model" in " ".join(length.stdout.split())
    batch = tunekit(workspace, "plan", "double.yaml", "--fit", "batch", "--on", "h100")
    assert re.search(r"^largest +16 +16 +single device", batch.stdout, re.MULTILINE)
    assert "there are only 16 training rows" in batch.stdout


@pytest.mark.slow
def test_fit_finds_well_known_models_without_a_network(workspace, tmp_path):
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    answer = in_process(workspace, "plan", "double.yaml", "--fit", "model", "--on", "t4", "--json", **offline)
    assert answer.returncode == 0, answer.stderr
    beyond, largest, *others = json.loads(answer.stdout)["variants"]
    assert "does not fit on T4 16 GB" in beyond["refused"] and beyond["note"] == "next"
    assert largest["note"] == "largest"
    sizes = [variant["plan"]["num_params"] for variant in (largest, *others)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 10**9


@pytest.mark.parametrize(
    ("words", "readers"),
    [
        ("--ray --print", "--sky or --slurm"),
        ("--nodes a,b --time 01:00:00", "--slurm"),
        ("--sky --on 8xh100 --address auto", "--ray"),
    ],
)
def test_launch_refuses_what_its_target_does_not_read(words, readers, workspace):
    refused = run_command("launch", "sft/quickstart", *words.split(), cwd=workspace)
    assert refused.returncode == 2
    assert refused.stderr.rstrip().endswith(f"; {readers} reads it")


def test_check_says_ok_and_what_it_found(workspace):
    answer = tunekit(workspace, "check", "double.yaml")
    assert answer.returncode == 0
    assert answer.stdout.splitlines()[-1] == "double.yaml: ok"
    assert "16 rows" in answer.stdout
    assert not (workspace / "nothing").exists()


def test_data_shows_counts_lengths_and_samples_in_which_trained_text_is_marked(workspace):
    answer = tunekit(workspace, "data", "double.yaml", "--rows", "1")
    assert answer.returncode == 0, answer.stderr
    assert "warning: 16 rows of eval also in train (rows.jsonl:1 = rows.jsonl:1, ...)" in answer.stdout
    assert re.search(r"^rows +16 read, 16 used *$", answer.stdout, re.MULTILINE)
    assert re.search(r"^max_length +╌+ +64", answer.stdout, re.MULTILINE)
    sample = "<|im_start|>user↵\ndouble 0<|im_end|>↵\n<|im_start|>assistant↵\n⟦0<|im_end|>⟧↵\n"
    assert answer.stdout.count(sample) == 2
    assert "double 1<" not in answer.stdout


@pytest.mark.slow
def test_data_in_a_terminal_colours_what_is_trained(workspace):
    output = in_terminal(workspace, "data", "double.yaml", "--rows", "1")
    assert re.search(r"\x1b\[32m0\x1b\[0m\x1b\[1;32m<\|im_end\|>", output)
    assert "⟦" not in output


def test_data_as_json_and_as_a_page(workspace):
    answer = tunekit(workspace, "data", "double.yaml", "--json", "--html", "data.html")
    found = json.loads(answer.stdout)
    assert [source["num_rows"] for source in found["sources"]] == [16, 16]
    assert found["leaked"]["num_rows"] == 16
    assert "double 0" in re.sub("<[^>]*>", "", (workspace / "data.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "dubble.yaml"], "dubble.yaml"),
        (["train", "double.yaml", "train.max_stps=3"], "command line: train.max_stps: unknown key; did you mean"),
        (["train", "double.yaml", "data.train=row.jsonl"], "data.train.path: no file 'row.jsonl'"),
        (["train", "double.yaml", "model=./modle"], "model.path: no folder './modle'; did you mean 'model'?"),
        (["train", "double.yaml", "data.max_length=9999"], "data.max_length: 9999 exceeds the 256 positions"),
        (["train", "double.yaml", "data.max_length=8"], "trainable"),
        (
            ["check", "double.yaml", "train.learning_rate=-1"],
            "command line: train.learning_rate: must be greater than 0",
        ),
        (["plan", "double.yaml", "--on", "8xh1000"], "unknown accelerator 'h1000'; did you mean '8xh100'"),
        (["plan", "double.yaml", "--on", "h100", "--on", "none.yaml"], "none.yaml: file not found"),
        (["plan", "double.yaml", "--on", "trn2"], "trn2: tunekit supports CUDA devices only"),
        (["data", "double.yaml", "data.train=row.jsonl"], "data.train.path: no file 'row.jsonl'"),
        (["data", "double.yaml", "--html", "nowhere/data.html"], "cannot write 'nowhere/data.html'"),
        (["runs", "show", "nothing"], "no run 'nothing' in runs"),
        (["explain", "adapter.rnak"], "did you mean"),
        (["plan", "double.yaml", "--sweep", "adapter.type=lora,qlorra"], "with adapter.type=qlorra: "),
        (["plan", "double.yaml", "--sweep", "adapter.rank"], "write key=value,value"),
        (["plan", "double.yaml", "--sweep", "adapter.rank=4", "--fit", "batch"], "pass one of them"),
        (["recipes", "copy", "sft/quikstart"], "sft/quickstart"),
        (["train", "double.yaml", "--train.max_steps=3"], "overrides have no dashes: train.max_steps=3"),
        (["plan", "double.yaml", "--adapter.rank", "8"], "overrides have no dashes: adapter.rank=VALUE"),
    ],
)
def test_mistakes_are_one_clear_line_without_a_traceback(arguments, message, workspace):
    runs = len(list_runs(workspace / "runs"))
    answer = tunekit(workspace, *arguments)
    assert answer.returncode == 2
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
    assert len(list_runs(workspace / "runs")) == runs


def test_runs_lists_state_step_and_last_loss(trained, workspace):
    answer = tunekit(workspace, "runs")
    assert re.search(r"^double-\d{8}-\d{6}\S* +finished +6/6 +loss \d\.\d{4}", answer.stdout, re.MULTILINE)


def test_runs_show_draws_the_loss_in_text_and_as_a_picture(trained, workspace):
    name = next(run.name for run in list_runs(workspace / "runs") if run.status()["step"] == 6)
    answer = tunekit(workspace, "runs", "show", name)
    assert answer.returncode == 0, answer.stderr
    assert "training loss" in answer.stdout and "double 0" in answer.stdout
    assert re.search(r"[\u2800-\u28ff]", answer.stdout)
    picture = tunekit(workspace, "runs", "show", name, "--plot", "loss.png")
    assert picture.returncode == 0, picture.stderr
    assert (workspace / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_an_earlier_version_is_shown_with_what_it_told(trained, workspace, tmp_path):
    run = next(run for run in list_runs(workspace / "runs") if run.status()["step"] == 6)
    shutil.copytree(run.path, tmp_path / "old")
    told = {"first_loss", "last_loss", "first_eval_loss", "eval_loss", "num_tokens", "tokens_per_second"}
    told |= {"step_seconds", "seconds", "peak_memory_bytes", "planned_memory_bytes", "model", "event", "time"}
    events = [
        {name: value for name, value in event.items() if event["event"] != "result" or name in told}
        for event in run.events()
    ]
    (tmp_path / "old" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    answer = tunekit(tmp_path, "runs", "show", "old")
    assert answer.returncode == 0, answer.stderr
    result = run.result()
    assert f"{result['first_loss']:.4f} → {result['last_loss']:.4f}" in answer.stdout
    assert re.search(r"^peak memory +\d.*planned", answer.stdout, re.MULTILINE)


def test_no_runs_is_said_so(tmp_path):
    assert "no runs here" in tunekit(tmp_path, "runs").stdout


def test_doctor_names_versions_devices_and_features(workspace):
    answer = tunekit(workspace, "doctor")
    assert answer.returncode == 0, answer.stderr
    for word in ("tunekit", "python", "CPU", "torch", "transformers", "trl", "feature"):
        assert word in answer.stdout


def test_recipes_can_be_listed_copied_and_checked(tmp_path):
    assert "sft/quickstart" in tunekit(tmp_path, "recipes").stdout
    assert tunekit(tmp_path, "recipes", "copy", "sft/quickstart").returncode == 0
    assert tunekit(tmp_path, "check", "quickstart.yaml").returncode == 0
    first = (tmp_path / "quickstart.yaml").read_text().splitlines()[0]
    schema = tmp_path / first.removeprefix("# yaml-language-server: $schema=")
    assert schema.read_text() == json.dumps(json_schema())


@pytest.mark.slow
def test_ctrl_c_ends_the_run_with_130_and_the_status_says_so(workspace):
    process = subprocess.Popen(
        command("train", "double.yaml", "train.max_steps=100000", "output.name=stopped"),
        cwd=workspace,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in the background with the signal ignored, and the tests may run there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in errors
    run = next(run for run in list_runs(workspace / "runs") if run.name.startswith("stopped"))
    assert run.state == "interrupted"


@pytest.mark.slow
def test_a_terminal_sees_a_live_bar(workspace):
    output = in_terminal(workspace, "train", "double.yaml", "output.name=seen")
    assert re.search(r"step +6/6", output)
    assert "tokens/s" in output and "left" in output
    assert "\x1b[?25l" in output  # the cursor is hidden while the bar is drawn


def in_terminal(folder: Path, *arguments) -> str:
    """What a command writes to a terminal of 160 columns."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(COLUMNS="160", LINES="50", TERM="xterm-256color")
        os.execv(sys.executable, command(*arguments))
    output = b""
    while True:
        assert select.select([terminal], [], [], LIMIT_SECONDS)[0], output[-3000:]
        try:
            block = os.read(terminal, 65536)
        except OSError:
            break
        if not block:
            break
        output += block
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, output[-3000:]
    return output.decode(errors="replace")


def test_the_folder_of_a_run_is_enough_to_read_it(trained, workspace):
    run = next(run for run in list_runs(workspace / "runs") if run.status()["step"] == 6)
    assert Run(run.path).result()["model"] == str(Path("runs") / run.name / "model")
