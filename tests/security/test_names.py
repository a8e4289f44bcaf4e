"""Names and paths that a user gives stay words: no shell reads them, and they lead where they should."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import tunekit
from tests.tiny import save_chats, save_tiny_model
from tests.waiting import LIMIT_SECONDS
from tunekit.api import clusters, verbs
from tunekit.errors import RecipeError, RunError, TunekitError
from tunekit.files import has_controls, is_inside
from tunekit.launching import cluster, ssh_hosts
from tunekit.launching.cluster import Wishes
from tunekit.recipe.load import load_recipe
from tunekit.runs.run import Run, find_run, list_runs

EVIL = (
    "a b",
    "a;touch pwned",
    "a$(touch pwned)",
    "a`touch pwned`",
    "a'\"; touch pwned #",
    "a|touch pwned",
    "a&&touch pwned",
    "a>pwned",
    "-oProxyCommand=touch pwned",
    "a%b",
    "a\\b",
    "${HOME}",
)
"""Names that mean something to a shell, within one line."""

LINES = ("a\ntouch pwned", "a\r\ntouch pwned", "a\x1b[2J", "a\x00b", "a\u2028touch pwned")
"""Names that would be not fit on one line, or that a terminal would not show."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    save_tiny_model(folder / "model", hidden=16, layers=1)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(4)))
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "pwned").exists(), "a shell read a name"


def recipe_for(workspace, folder):
    data = {"train": str(workspace / "rows.jsonl"), "max_length": 64}
    train = {"max_steps": 1, "global_batch_size": 2}
    return {
        "model": str(workspace / "model"),
        "data": data,
        "train": train,
        "output": {"dir": str(folder).replace("${", "$${"), "sample_prompts": []},
    }


def programs(folder, *names):
    """Programs of these names that write down what they were given, first on the path."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {shlex.quote(str(folder))}/{name}.given\n')
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EVIL)
def test_a_run_of_any_name_trains_and_is_a_job(name, workspace, here, monkeypatch):
    monkeypatch.setenv("PATH", programs(here / "bin", "sbatch", "srun", "scontrol", "grep"))
    wishes = Wishes(partition=name, account=name, sbatch_args=(f"--comment={name}",))
    made = clusters.launch_slurm(recipe_for(workspace, here / "runs" / name), wishes=wishes)
    assert made.run.name == name
    assert (here / "bin" / "sbatch.given").read_text().splitlines() == ["--parsable", str(made.script)]
    lines = made.script.read_text().splitlines()
    # Slurm reads its options as far as the first line that is a command, and the shell none of them.
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert lines[1 : 1 + len(options)] == options
    assert f"#SBATCH --partition={shlex.quote(name)}" in options
    job = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_CPUS_PER_TASK": "1"}
    subprocess.run(["bash", str(made.script)], env=job, check=False, timeout=LIMIT_SECONDS, stdin=subprocess.DEVNULL)
    given = (here / "bin" / "srun.given").read_text()
    # What each node's shell is given is one word for the folder.
    command = given[given.index("exec ") :]
    assert shlex.split(command)[-1] == str(made.run.path.resolve())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LINES)
def test_a_name_of_several_lines_is_refused(name, workspace, here):
    with pytest.raises(TunekitError):
        verbs.make_run(recipe_for(workspace, here / name))
    for wishes in (Wishes(partition=name), Wishes(account=name), Wishes(sbatch_args=(f"--comment={name}",))):
        with pytest.raises(RunError, match="not fit on one line"):
            clusters.launch_slurm(recipe_for(workspace, here / os.urandom(4).hex()), wishes=wishes, submit=False)


@pytest.mark.parametrize("word", ["touch pwned", "; touch pwned", "", "$(touch pwned)"])
def test_what_is_no_option_is_not_given_to_sbatch(word, workspace, here):
    with pytest.raises(RunError, match="is not an option"):
        clusters.launch_slurm(recipe_for(workspace, here / "run"), wishes=Wishes(sbatch_args=(word,)), submit=False)


def test_a_secret_in_an_option_of_sbatch_is_refused(workspace, here):
    secret = "hf_" + "q" * 30
    with pytest.raises(RunError) as refused:
        wishes = Wishes(sbatch_args=(f"--export=ALL,X={secret}",))
        clusters.launch_slurm(recipe_for(workspace, here / "run"), wishes=wishes, submit=False)
    assert secret not in str(refused.value)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EVIL)
def test_a_run_of_any_name_is_a_task_of_a_cloud(name, workspace, here, monkeypatch):
    monkeypatch.setenv("PATH", programs(here / "bin", "sky"))
    made = clusters.launch_sky(recipe_for(workspace, here / "runs" / name), on="h100")
    given = (here / "bin" / "sky.given").read_text().splitlines()
    assert re.fullmatch(r"tunekit-[A-Za-z0-9-]*", given[2]) and given[-1] == str(made.script)
    command = cluster.yaml.safe_load(made.script.read_text())["run"]
    assert shlex.split(command)[-1] == str(made.run.path.resolve())


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=touch pwned", "a b", "$(touch pwned)", "a;b", "u;x@host", "$(x)@host"]
)
def test_what_is_no_host_is_not_given_to_ssh(name, here):
    with pytest.raises(RunError, match="invalid host"):
        ssh_hosts.Hosts([name])


@pytest.mark.parametrize(
    "name", ["`x`@host", "-u@host", "a\n", "host\nb", "u@-host", "host:22;x", "host:-1", "", "@host"]
)
def test_nor_is_this(name, here):
    with pytest.raises(RunError, match="invalid host"):
        ssh_hosts.Hosts([name])


@pytest.mark.parametrize("folder", [name for name in EVIL if "/" not in name])
def test_what_ssh_is_told_to_do_there_is_one_command(folder, here, monkeypatch):
    (here / folder).mkdir()
    monkeypatch.chdir(here / folder)
    monkeypatch.setenv("PYTHONPATH", f"/x/{folder}")
    *options, there = ssh_hosts._command("ada@host")
    assert options[:2] == ["ssh", "-T"] and options[-2:] == ["--", "ada@host"]
    command = there.replace(shlex.quote(ssh_hosts.sys.executable), "printenv PYTHONPATH; pwd; :")
    shown = subprocess.run(
        ["bash", "-c", command.replace("exec env", "env")], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == [f"/x/{folder}", str(here / folder)]
    assert not (here / folder / "pwned").exists()


@pytest.mark.parametrize("name", [*EVIL, "../x", "a/b", "/abs", ".hidden", "", "a\n", "x" * 101])
def test_a_name_of_a_run_is_a_name(name):
    with pytest.raises(RecipeError, match=r"output\.name"):
        load_recipe({"model": "pico", "data": {"train": "a.jsonl"}, "output": {"name": name}})


def make_run(workspace, folder) -> Run:
    return verbs.make_run(recipe_for(workspace, folder))


def test_a_run_is_found_by_its_name_inside_of_runs_alone(workspace, here):
    inside, outside = make_run(workspace, here / "runs" / "inside"), make_run(workspace, here / "outside")
    (here / "runs" / "link").symlink_to(outside.path)
    (here / "runs" / "near").symlink_to(inside.path)
    assert {run.name for run in list_runs()} == {"inside", "near"}
    assert find_run("inside").path == Path("runs/inside")
    with pytest.raises(RunError, match="a link out of runs"):
        find_run("link")
    # A path is the user's own, and is taken as it is.
    for path in ("outside", "runs/../outside", str(here / "outside"), "runs/link"):
        assert find_run(path).path == Path(path)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", ["../outside", "inside/../../outside", "..", ".", "", "a\0b", "no\nsuch", "/", *EVIL])
def test_what_is_no_run_is_refused(name, workspace, here):
    make_run(workspace, here / "runs" / "inside")
    (here / "elsewhere").mkdir()
    for verb in (find_run, verbs.resume):
        with pytest.raises(RunError):
            verb(name)


def test_runs_may_be_a_link_itself(workspace, here):
    (here / "big disk").mkdir()
    (here / "runs").symlink_to(here / "big disk")
    make_run(workspace, here / "runs" / "one")
    assert [run.name for run in list_runs()] == ["one"]


def test_a_run_writes_into_no_folder_of_others(workspace, here, monkeypatch):
    (here / "foreign").mkdir()
    (here / "foreign" / "file").write_text("mine")
    (here / "link").symlink_to(here / "elsewhere")
    (here / "home").mkdir()
    monkeypatch.setenv("HOME", str(here / "home"))
    for folder in ("/", here / "foreign", here / "link", here / "home", "~", here / "foreign" / "file"):
        with pytest.raises(RunError, match=r"output\.dir"):
            make_run(workspace, folder)
    assert not (here / "elsewhere").exists() and list((here / "home").iterdir()) == []


def test_inside_is_where_links_lead(tmp_path):
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "out").symlink_to(tmp_path)
    (tmp_path / "root" / "in").symlink_to(tmp_path / "root" / "a")
    (tmp_path / "root" / "loop").symlink_to(tmp_path / "root" / "loop")
    root = tmp_path / "root"
    assert all(is_inside(root / name, root) for name in ("a", "a/new", "in", "in/new", "."))
    assert not any(is_inside(root / name, root) for name in ("..", "../roots", "out", "out/x", "/etc", "a\0b", "loop"))
    assert [has_controls(text) for text in ("a b", "ä;$(x)", "a\nb", "a\x7f")] == [False, False, True, True]


def test_no_program_is_started_by_a_shell():
    source = Path(tunekit.__file__).parent
    words = re.compile(r"shell\s*=\s*True|os\.system\(|os\.popen\(|getoutput\(")
    found = [file.name for file in source.rglob("*.py") if words.search(file.read_text(encoding="utf-8"))]
    assert found == []
