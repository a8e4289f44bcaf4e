"""One recipe trains alike in one process, in several, and on every backend: the table, and that it would show a fault.

The tolerance of the losses is the issue's: 1e-4 nats in float32. Sums of float32 in another order differ by some
1e-7 of their size; losses of 5 nats then by some 1e-6, which training carries on without making it larger in ten steps.
That of the weights is a share of how far training moved them. Adam divides each gradient by its own size, so that only
weights whose gradient is nearly nothing can go another way, by a step that is as long as the others': at 1e-6 of
relative rounding of gradients that is a share of 1e-6 of the weights, and sqrt(1e-6) = 1e-3 of the distance at most.
"""

import dataclasses

import pytest

import tunekit
from tests.processes import in_processes
from tests.training import equality
from tests.training.equality import (
    BATCH,
    CAUSE,
    HEADER,
    MAX_LOSS,
    OFFLOADED,
    SPREADS,
    SUBJECTS,
    difference,
    recipe_of,
    train,
)
from tunekit.api import verbs
from tunekit.errors import PlanError

DDP_2, DDP_4, FSDP2_2 = SPREADS[:3]
FULL, FULL_PACKED, LORA, LORA_PACKED, DPO, GRPO, *_ = SUBJECTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("equality")


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_every_layout_trains_as_one_process_does(subject, folder, capsys):
    lines, equal = zip(*equality.table_of(subject, folder), strict=True)
    table = HEADER + "".join(lines)
    (folder / f"{subject.name}.md").write_text(table, encoding="utf-8")
    with capsys.disabled():
        print(f"\n{table}", end="")
    assert all(equal), table


@pytest.mark.slow
def test_offloading_with_fsdp2_cannot_run_on_a_cpu(folder):
    """As the table says: the plan refuses it, and the libraries fail where the plan is forced."""
    recipe = recipe_of(LORA, folder, micro_batch_size=2)
    with pytest.raises(PlanError, match="FSDP2 offloads to pinned memory"):
        tunekit.plan({**recipe, "parallel": OFFLOADED.parallel})
    run = verbs.make_run({**recipe, "parallel": FSDP2_2.parallel, "output": {"dir": str(folder / "forced")}})
    offloaded = {"offload_param_device": "cpu", "offload_optimizer_device": "cpu"}
    plan = run.plan.model_copy(update={"layout": run.plan.layout.model_copy(update=offloaded)})
    (run.path / "plan.yaml").write_text(plan.to_yaml(), encoding="utf-8")
    with pytest.raises(AssertionError, match=CAUSE):
        in_processes(2, equality.work_in, str(run.path))


@pytest.mark.slow
@pytest.mark.parametrize("subject", [LORA, LORA_PACKED, DPO], ids=lambda subject: subject.name)
def test_a_step_is_the_same_however_it_is_cut_in_one_process(subject, folder):
    runs = [
        train(recipe_of(subject, folder, micro_batch_size=size), {}, folder / f"{subject.name}-cut-{size}")
        for size in (1, 2, BATCH)
    ]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, abs=1e-5)
        assert run.eval_losses == pytest.approx(runs[0].eval_losses, abs=1e-5)
        assert run.num_tokens == runs[0].num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_trains_alike_in_two_processes(packing, folder):
    subject = dataclasses.replace(LORA, name=f"stream, packing {packing}", packing=packing)
    runs = []
    for parallel, size in (({}, BATCH), ({}, 2), (DDP_2.parallel, 2)):
        recipe = recipe_of(subject, folder, micro_batch_size=size)
        del recipe["data"]["eval"]
        recipe["data"]["streaming"] = True
        runs.append(train(recipe, parallel, folder / f"{subject.name}-{len(runs)}"))
    assert runs[1].losses == pytest.approx(runs[0].losses, abs=1e-5)
    assert runs[2].losses == pytest.approx(runs[0].losses, abs=1e-5)
    # The last of three steps of an epoch has 5 rows, and 3 empty ones where it is cut or not.
    assert len({run.num_tokens for run in runs}) == 1


def work_with_mean_over_rows(path):
    """A loss that weighs each micro-batch alike, however many tokens it has: what is to be seen as a fault."""
    from tunekit.methods.sft import TokenMeanSFTTrainer

    compute = TokenMeanSFTTrainer.compute_loss

    def mean_over_rows(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if num_items_in_batch is not None:
            num_micro_batches = self.args.gradient_accumulation_steps * self.accelerator.num_processes
            num_items_in_batch = (inputs["labels"][:, 1:] != -100).sum() * num_micro_batches
        return compute(self, model, inputs, return_outputs, num_items_in_batch)

    TokenMeanSFTTrainer.compute_loss = mean_over_rows
    equality.work_in(path)


def work_with_repeated_rows(path):
    from tunekit.methods import run_trainer

    run_trainer.filled = lambda rows, *_: rows
    run_trainer.num_missing = lambda *_: 0
    equality.work_in(path)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [work_with_mean_over_rows, work_with_repeated_rows])
def test_the_table_would_show_a_fault(fault, folder, monkeypatch):
    recipe = recipe_of(LORA, folder, micro_batch_size=2)
    alone = train(recipe_of(LORA, folder, micro_batch_size=BATCH), {}, folder / f"{fault.__name__}-alone")
    monkeypatch.setattr(equality, "work_in", fault)
    found = difference(recipe, alone, train(recipe, DDP_2.parallel, folder / fault.__name__))
    assert not found.is_small
    assert found.loss > 10 * MAX_LOSS
    assert found.weights > 10 * equality.MAX_WEIGHTS


@pytest.mark.slow
def test_what_fills_an_epoch_is_counted_as_a_token_each(folder):
    """The only difference of what is logged: rows that fill the last step of an epoch have one token."""
    alone, spread = (
        train(recipe_of(LORA, folder, micro_batch_size=size), parallel, folder / f"tokens-{size}")
        for size, parallel in ((BATCH, {}), (1, DDP_4.parallel))
    )
    num_filled = 3 * (-equality.NUM_ROWS % 4)
    assert spread.num_tokens == alone.num_tokens + num_filled
