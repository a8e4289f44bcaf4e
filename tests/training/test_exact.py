"""A run that was cut off and gone on with is the run that was not, bit for bit: a sample of `benchmarks/exact.py`."""

import pytest

from benchmarks.exact import CASES, played
from benchmarks.soak import soaked
from tunekit.errors import RunError
from tunekit.runs.small_files import Place
from tunekit.training.checkpointing.restore import check_whole

SAMPLE = (
    "SFT LoRA, packed, dropout",
    "SFT full, logged every third step",
    "SFT full, cut while saving",
    "SFT full, stream, second passage",
    "SFT full, pure bf16",
    "SFT full, pure bf16, 8 bits",
    "SFT full, pure bf16, DDP",
    "SFT full, pure bf16, fsdp2",
    "DPO full",
    "GRPO full, dynamic sampling",
    "GRPO LoRA, DDP, replay",
    "GRPO LoRA, DDP, two iterations",
    "SFT full, DDP, SIGTERM",
    "SFT LoRA, fsdp2, dropout",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exact")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name in SAMPLE], ids=lambda case: case.name)
def test_a_run_that_was_cut_off_ends_as_the_one_that_was_not(case, folder):
    assert played(case, folder) == []


def test_the_sample_is_of_cases_that_are_there():
    assert set(SAMPLE) <= {case.name for case in CASES}


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_the_one_in_peace(tmp_path):
    outcome = soaked(tmp_path, {}, steps=40, seed=1, max_kills=2, span_steps=12)
    assert sum(outcome.num_kills) == 2
    assert outcome.num_twice > 0
    assert outcome.differences == []


SECOND = Place(rank=1, local_rank=1, num_processes=2, num_local=2)
FILES = {
    "ddp": ("trainer_state.json", "scheduler.pt", "carried-1.pt", "rng_state_1.pth", "optimizer.pt"),
    "zero2": ("trainer_state.json", "scheduler.pt", "carried-1.pt", "rng_state_1.pth", "latest"),
    "fsdp2": ("trainer_state.json", "scheduler.pt", "carried-1.pt", "rng_state_1.pth", "optimizer_0"),
}


@pytest.mark.parametrize("strategy", FILES)
def test_nothing_is_gone_on_with_that_lacks_what_a_process_needs(strategy, tmp_path):
    for name in FILES[strategy]:
        (tmp_path / name).touch()
    check_whole(tmp_path, strategy, SECOND)
    for name in FILES[strategy]:
        (tmp_path / name).unlink()
        with pytest.raises(RunError, match=rf"lacks {name}: rank 1 cannot resume exactly"):
            check_whole(tmp_path, strategy, SECOND)
        (tmp_path / name).touch()
