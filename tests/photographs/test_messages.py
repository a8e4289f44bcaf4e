"""What the command line says of wrong inputs, in full: beside the table for broken YAML in `tests/recipe`.

The commands run in a folder with a recipe and rows of every method, and with runs in several states.
"""

import os
import re
import shlex
from pathlib import Path

import psutil
import pytest
import yaml

from tests.commands import run_command
from tests.photographs.recorded import check_recorded
from tests.photographs.test_help import FRAME, PROGRAM, WIDTH
from tests.rows import save_rows
from tests.smoke.methods import METHODS
from tests.training.folders import made_run

COMMANDS = {
    "recipes": """
        check nosuch.yaml
        check sft/quikstart
        check typo.yaml
        check sft.yaml adapter.rnak=8
        check sft.yaml adapter=lroa
        check sft.yaml adapter.type=full adapter.rank=8
        check sft.yaml train.learning_rate=-1 data.max_length=2 method=ppo
        check sft.yaml method.beta=0.2
        check sft.yaml train.max_steps
        check sft.yaml train.max_steps=0
        check sft.yaml data.curriculum=length
        check sft.yaml train.early_stopping_threshold=0.1
        check sft.yaml 'train.learning_rates={layers.(: 1e-5}'
        check sft.yaml adapter.type=full adapter.unfrozen_parameters=[layers.(]
        check sft.yaml model=./nowhere
        check sft.yaml data.train=nowhere.jsonl
        check sft.yaml data.train=empty.jsonl
        check sft.yaml data.train=broken.jsonl
        check sft.yaml data.train=nokind.jsonl
        check sft.yaml data.max_length=100000
        explain adapter.rnak
        recipes copy sft/quikstart
        migrate nowhere.yaml
    """,
    "methods": """
        check dpo.yaml data.train=sft.jsonl
        check kto.yaml data.train=sft.jsonl
        check orpo.yaml data.train=sft.jsonl
        check cpo.yaml data.train=kto.jsonl
        check reward.yaml data.train=sft.jsonl
        check grpo.yaml data.train=dpo.jsonl
        check rloo.yaml data.train=dpo.jsonl
        check distillation.yaml data.train=dpo.jsonl
        check sft.yaml data.train=dpo.jsonl
        check dpo.yaml data.packing=true
        check dpo.yaml data.loss_on=all
        check dpo.yaml adapter.dropout=0.1
        check dpo.yaml method.label_smoothing=0.1
        check dpo.yaml method.trainer_args.beta=1
        check dpo.yaml method.trainer_args.lable_smoothing=0.1
        check dpo.yaml data.streaming=true train.max_steps=5
        check kto.yaml train.global_batch_size=1
        check orpo.yaml method.trainer_args.generate_during_eval=true
        check cpo.yaml method.simpo_gamma=1.0
        check cpo.yaml method.loss_type=alphapo
        check reward.yaml output.sample_prompts=[hi]
        check reward.yaml data.packing=true
        check grpo.yaml method.rewards=[]
        check grpo.yaml method.rewards=[score]
        check grpo.yaml method.rewards=[tests.smoke.methods:nosuch]
        check grpo.yaml method.num_generations=1
        check grpo.yaml method.num_generations=3
        check grpo.yaml method.max_completion_length=64
        check grpo.yaml method.loss_type=luspo
        check grpo.yaml method.trainer_args.use_vllm=true
        check rloo.yaml method.epsilon_high=0.1
        check distillation.yaml method.teacher=null
        check distillation.yaml method.rewards=[length]
        rewards sft.yaml
        check sft.yaml train.metric_for_best_model=reward
    """,
    "plans": """
        plan sft.yaml --on 8xh1000
        plan sft.yaml --on nowhere.yaml
        plan sft.yaml --on trn2
        plan sft.yaml --on small.yaml adapter=full
        plan sft.yaml --on h100 parallel.strategy=fsdp2
        plan sft.yaml --on 2xh100 parallel.num_processes=4
        plan sft.yaml --on 2xh100 parallel.strategy=ddp parallel.tp_size=2
        plan sft.yaml --on 8xh100 parallel.cp_size=2 parallel.sp_size=2
        plan sft.yaml --on h100 train.micro_batch_size=3
        plan sft.yaml --on 2xh100 parallel.strategy=fsdp2 parallel.tp_size=2
        plan sft.yaml --on 2xh100 parallel.strategy=zero3 adapter=qlora
        plan sft.yaml --on h100 train.fp8=true
        plan sft.yaml train.activation_offloading=true
        plan sft.yaml --on 2xh100 train.activation_offloading=true
        plan sft.yaml --on 2xh100 train.tiled_mlp=true
        plan sft.yaml --on h100 train.tiled_mlp=true train.fp8=true adapter=full
        plan sft.yaml --on h100 adapter=full adapter.last_layers=40
        plan sft.yaml --on h100 adapter=full adapter.unfrozen_parameters=[lm_head]
        plan sft.yaml --on 2xh100 adapter=full adapter.last_layers=1 parallel.strategy=fsdp2
        plan sft.yaml --on h100 'train.learning_rates={embed_tokens: 1e-5}'
        plan sft.yaml --on 2xh100 adapter.loraplus_lr_ratio=16 parallel.strategy=zero3
        plan sft.yaml --on h100 train.early_stopping_patience=2
        plan sft.yaml --on h100 train.early_stopping_patience=2 data.eval_size=0.5
        plan sft.yaml --on 8xh100 parallel.num_processes=8 parallel.strategy=ddp train.global_batch_size=4
        plan dpo.yaml --on 2xh100 parallel.strategy=fsdp2 method.precompute_ref_log_probs=true
        plan sft.yaml --on t4 train.fp8=true
        plan dpo.yaml --on 2xh100 parallel.strategy=zero3 parallel.sp_size=2
        plan kto.yaml --on 2xh100 parallel.strategy=zero3 parallel.sp_size=2
        plan orpo.yaml --on 2xh100 parallel.strategy=zero3 parallel.sp_size=2
        plan cpo.yaml --on 2xh100 parallel.strategy=zero3 parallel.sp_size=2
        plan reward.yaml --on 2xh100 parallel.strategy=zero3 parallel.sp_size=2
        plan grpo.yaml --on 2xh100 parallel.strategy=zero3 parallel.sp_size=2
        plan rloo.yaml --on 2xh100 parallel.strategy=zero3 parallel.sp_size=2
        plan distillation.yaml --on 2xh100 parallel.strategy=zero3 parallel.sp_size=2
        plan sft.yaml --sweep adapter.rank
        plan sft.yaml --sweep adapter.rank=4 --fit batch
        plan sft.yaml --sweep adapter.type=lora,qlorra
    """,
    "runs": """
        runs show nosuch
        runs tag done '  '
        runs tag done a --clear
        runs delete done
        runs delete don
        runs delete training --yes
        resume nosuch
        resume done
        resume done train.max_steps=1
        resume done train.max_steps=5
        resume done train.max_stps=5
        resume done --from 7
        resume failed --from 7
        resume training
        resume failed --detach --nodes a,b
        train sft.yaml output.dir=runs/done
        train sft.yaml train.max_stps=3
        train grpo.yaml method.rewards=[]
        train sft.yaml --detach --resume
        stop nosuch
        stop done
        rerun nosuch
        rerun failed
        export nosuch
        export done
        export training
        export done --checkpoint 3
        export done --merged --adapter
        generate nosuch --prompts prompts.jsonl --out answers.jsonl
        chat done
        eval done
        serve done --checkpoint 3
        eval nosuch
        serve nosuch
        chat nosuch
        report nosuch
        report done --out nowhere/page.html
        compare done nosuch
        launch sft.yaml
        launch sft.yaml --sky
        launch sft.yaml --ray --print
        launch sft.yaml --nodes a,b --time 01:00:00
        sweep sft.yaml
        sweep show nosuch
        doctor sft.yaml
        trian sft.yaml
        train
    """,
}
"""What is wrong, by what it is wrong about."""

MASKS = (
    (re.compile(r"\d[\d,.]*(?= [KMG]iB)"), "N"),
    (re.compile(r"\b\d{8}-\d{6}(-\w+)?"), "TIME"),
    (re.compile(r"\bprocess \d+ of [\w.-]+"), "process N of HOST"),
)
"""Sizes that a calibration changes, and what is another one each time."""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messages")
    for method, options in METHODS.items():
        save_rows(folder / f"{method}.jsonl", method, 8)
        recipe = {
            "model": "pico",
            "data": {"train": f"{method}.jsonl", "max_length": 64},
            "method": {"type": method, **options, **({"teacher": "pico"} if "teacher" in options else {})},
            "train": {"max_steps": 2, "global_batch_size": 4},
        }
        (folder / f"{method}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    (folder / "typo.yaml").write_text("model: pico\ndata: {trian: sft.jsonl}\nadapter: {type: lora, rnak: 8}\n")
    (folder / "small.yaml").write_text(
        "accelerator: Small\nmemory_gib: 0.25\ncompute_capability: [8, 0]\nhost_memory_gib: 0.5\n"
    )
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"messages": [}\n')
    (folder / "nokind.jsonl").write_text('{"a": 1}\n' * 8)
    made_run(folder / "runs" / "done", phase="finished", step=2, num_steps=2)
    made_run(folder / "runs" / "failed", phase="failed", step=1, num_steps=2, exit_reason="the power is gone")
    process = psutil.Process()
    made_run(folder / "runs" / "training", phase="training", step=1, num_steps=2, pid=process.pid)
    return folder


def statuses(folder: Path) -> dict[str, bytes]:
    """Return the status file of every run."""
    return {path.parent.name: path.read_bytes() for path in (folder / "runs").glob("*/status.json")}


def said(folder: Path, words: str) -> str:
    """Return a command, its exit status and what it wrote, without what is another one on each machine."""
    before = statuses(folder)
    answer = run_command(*shlex.split(words), cwd=folder, env=WIDTH)
    assert statuses(folder) == before, f"{words} was not refused"
    wrote = PROGRAM.sub("", FRAME.sub("", answer.stderr or answer.stdout))
    text = "\n".join(line.rstrip() for line in wrote.splitlines() if line.strip())
    text = text.replace(f"{folder}{os.sep}", "").replace(str(folder), ".")
    for mask, word in MASKS:
        text = mask.sub(word, text)
    return f"$ tunekit {words}\nexit {answer.returncode}\n{text}\n"


@pytest.mark.parametrize("about", COMMANDS)
def test_what_is_said_of_wrong_inputs_is_what_was_recorded(about, here):
    commands = [line.strip() for line in COMMANDS[about].strip().splitlines()]
    check_recorded(f"messages-{about}.txt", "\n".join(said(here, words) for words in commands))
