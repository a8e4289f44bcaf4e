"""How many nodes a run has, by the variables that launchers set."""

import subprocess
import sys

import pytest

from tunekit.errors import PlanError
from tunekit.estimates.facts import Hardware
from tunekit.estimates.hardware.catalogue import catalogue
from tunekit.probe.hardware import with_nodes

H100 = next(kind for kind in catalogue() if kind.name == "h100")

# `env | grep SLURM` in a step of a job of 4 nodes, from a public gist of jerinphilip ("Put run.sh").
STEP = dict(
    line.split("=", 1)
    for line in """\
SLURM_NODELIST=gnode[10,20,25,37]
SLURM_JOB_NAME=test-multi-nodes
SLURMD_NODENAME=gnode10
SLURM_NTASKS_PER_NODE=4
SLURM_JOB_GPUS=2
SLURM_NNODES=4
SLURM_NTASKS=4
SLURM_TASKS_PER_NODE=1(x4)
SLURM_JOB_ID=200505
SLURM_NODEID=0
SLURM_PROCID=0
SLURM_JOB_CPUS_PER_NODE=4(x4)
SLURM_JOB_NUM_NODES=4""".splitlines()
)
SALLOC = {
    name: value for name, value in STEP.items() if name not in ("SLURMD_NODENAME", "SLURM_NODEID", "SLURM_PROCID")
}
TORCHRUN = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "RANK": "8", "LOCAL_RANK": "0"}
SKYPILOT = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "0"}
ALIKE = "nodes by {}, all assumed identical to this one"


def node(num=8):
    return Hardware(accelerators=(H100.device,) * num, figures=H100.figures, num_cores=64)


def test_without_a_launcher_there_is_one_node():
    assert with_nodes(node(), {}) == node()


@pytest.mark.parametrize(
    ("environment", "num_nodes", "launcher"),
    [
        (TORCHRUN, 2, "torchrun"),
        (STEP, 4, "Slurm"),
        (STEP | {"SLURM_GPUS_ON_NODE": "8"}, 4, "Slurm"),
        (SKYPILOT, 2, "SkyPilot"),
        (STEP | TORCHRUN, 2, "torchrun"),
        (SKYPILOT | TORCHRUN, 2, "torchrun"),
        ({"WORLD_SIZE": "24", "LOCAL_WORLD_SIZE": "8"}, 3, "torchrun"),
        ({"WORLD_SIZE": "24", "LOCAL_WORLD_SIZE": "8", "NNODES": "3"}, 3, "torchrun"),
    ],
)
def test_nodes_are_those_of_the_innermost_launcher_and_the_plan_says_what_is_assumed(environment, num_nodes, launcher):
    hardware = with_nodes(node(), environment)
    assert (hardware.num_nodes, hardware.num_accelerators) == (num_nodes, 8 * num_nodes)
    assert hardware.note == f"{num_nodes} " + ALIKE.format(launcher)


def test_one_node_needs_no_words():
    for environment in (SKYPILOT | {"SKYPILOT_NUM_NODES": "1"}, STEP | {"SLURM_JOB_NUM_NODES": "1"}):
        assert with_nodes(node(), environment) == node()


@pytest.mark.slow
def test_what_torchrun_tells_its_processes_is_understood():
    """By torchrun itself, of this machine's torch."""
    code = (
        "import os; from tunekit.probe.nodes import read_launch; launch = read_launch(os.environ); "
        "os.write(1, f'{launch.launcher} {launch.num_nodes} {launch.num_local}\\n'.encode())"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    answer = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(answer.stdout.splitlines()) == ["torchrun 1 2"] * 2


def test_a_shell_on_the_login_node_counts_the_nodes_and_says_that_it_cannot_see_them():
    hardware = with_nodes(node(0), SALLOC | {"SLURM_GPUS_PER_NODE": "h100:8"})
    assert (hardware.num_nodes, hardware.accelerators) == (4, ())
    assert hardware.note == (
        "not on a node of the Slurm allocation: its 4 nodes are assumed identical to this machine, which has 0 "
        "accelerators instead of 8: set the node type with --on"
    )


def test_fewer_processes_than_devices_leave_the_rest_unused():
    hardware = with_nodes(node(), TORCHRUN | {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert (len(hardware.accelerators), len(hardware.unused), hardware.num_accelerators) == (4, 4, 8)
    assert "torchrun runs 4 processes on this node of 8 accelerators" in hardware.note


def test_fewer_visible_devices_than_were_given_are_said():
    hardware = with_nodes(node(2), SKYPILOT)
    assert hardware.note.endswith("SkyPilot allocated 8 accelerators on this node; 2 usable")


def test_processes_on_a_machine_without_accelerators_are_no_contradiction():
    assert with_nodes(node(0), TORCHRUN).num_nodes == 2


CONTRADICTIONS = {
    "more-processes": (
        4,
        TORCHRUN,
        "torchrun runs 8 processes on this node, but this process sees 4 accelerators; "
        "start as many processes as there are accelerators, or check CUDA_VISIBLE_DEVICES",
    ),
    "more-processes-on-one-node": (
        1,
        TORCHRUN | {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"},
        "torchrun runs 8 processes on this node, but this process sees 1 accelerator; "
        "start as many processes as there are accelerators, or check CUDA_VISIBLE_DEVICES",
    ),
    "devices-of-others": (
        8,
        STEP | {"SLURM_GPUS_ON_NODE": "1"},
        "Slurm allocated 1 accelerator on this node, but this process sees 8 accelerators; "
        "hide the others: set CUDA_VISIBLE_DEVICES to the allocated ones",
    ),
    "uneven": (
        8,
        TORCHRUN | {"WORLD_SIZE": "12"},
        "the launcher set WORLD_SIZE=12, but 2 nodes with 8 processes each are 16; "
        "start the same number of processes on every node",
    ),
    "no-number": (
        8,
        SKYPILOT | {"SKYPILOT_NUM_NODES": "two"},
        "SKYPILOT_NUM_NODES is 'two', not a number; unset SKYPILOT_NUM_NODES, or check what set it",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_one_clear_line(name):
    num, environment, message = CONTRADICTIONS[name]
    with pytest.raises(PlanError) as caught:
        with_nodes(node(num), environment)
    assert str(caught.value) == message
