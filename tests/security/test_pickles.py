"""No pickle runs anything: not in a checkpoint, a model, an adapter or rows, by whatever way it is come upon."""

import json
import os
import pickle
import shutil
import signal

import pytest
import torch

from tests.security import pickles
from tests.security.entries import ENTRIES
from tests.tiny import save_chats, save_tiny_model
from tunekit.api import verbs
from tunekit.errors import DataError, RunError, TunekitError
from tunekit.runs.checkpoints.complete import MANIFEST, as_written, files_in, manifest_of
from tunekit.training.checkpointing.safe_load import check_states, load_states

STATES = (
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state.pth",
    "rng_state_1.pth",
    "pytorch_model.bin",
    "adapter_model.bin",
    "custom_checkpoint_0.pkl",
    "global_step2/mp_rank_00_model_states.pt",
    "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "optimizer_0/.metadata",
    "pytorch_model_fsdp_0/.metadata",
)
"""Files of checkpoints that are pickles, or hold some."""

KINDS = {"bare": pickles.bare, "zipped": pickles.zipped}


@pytest.fixture
def sentinel(tmp_path):
    path = tmp_path / "sentinel"
    yield path
    assert not path.exists(), "a pickle ran what it names"


def test_the_pickles_of_these_tests_do_run_what_they_name(tmp_path):
    pickles.checked(tmp_path / "sentinel")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STATES)
def test_a_checkpoint_with_a_pickle_that_names_other_things_is_refused_by_the_file(name, kind, tmp_path, sentinel):
    file = tmp_path / "checkpoint-2" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(KINDS[kind](sentinel))
    with pytest.raises(RunError) as refused:
        check_states(tmp_path / "checkpoint-2")
    assert str(refused.value).startswith(f"{file} ") and "could run code" in str(refused.value)


def test_arguments_of_a_trainer_are_never_opened(tmp_path, sentinel):
    (tmp_path / "training_args.bin").write_bytes(pickles.zipped(sentinel))
    check_states(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_deepspeed_opens_its_states_as_data(kind, tmp_path, sentinel):
    file = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    file.write_bytes(KINDS[kind](sentinel))
    with pytest.raises(RunError, match="could run code"):
        load_states(str(file))


def test_what_deepspeed_saves_is_opened_whole(tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = DynamicLossScaler(2**16, 1000, 1, 1, False, dtype=torch.float16)
    state = {
        "scaler": scaler,
        "none": LossScaler(1.0),
        "stage": ZeroStageEnum(2),
        "at": fragment_address(numel=3, start=4),
        "weights": torch.arange(3),
    }
    torch.save(state, tmp_path / "rank_optim_states.pt")
    found = load_states(str(tmp_path / "rank_optim_states.pt"))
    check_states(tmp_path)
    assert (found["stage"], found["at"], vars(found["scaler"])) == (state["stage"], state["at"], vars(scaler))
    assert torch.equal(found["weights"], state["weights"])


@pytest.fixture
def distributed(tmp_path):
    """A checkpoint of torch's distributed kind, with tensors and numbers."""
    import torch.distributed.checkpoint as dcp

    state = {"weight": torch.arange(6.0), "lr": 0.1, "betas": (0.9, 0.99), "name": "adamw"}
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "checkpoint-2" / "optimizer_0", no_dist=True)
    return tmp_path / "checkpoint-2"


def test_a_distributed_checkpoint_is_opened_whole(distributed):
    check_states(distributed)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_distributed_checkpoint_holds_besides_tensors_is_opened_as_data(kind, distributed, sentinel):
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    folder = distributed / "optimizer_0"
    (part,) = folder.glob("*.distcp")
    table = pickle.loads((folder / ".metadata").read_bytes())
    evil = KINDS[kind](sentinel)
    where = _StorageInfo(part.name, part.stat().st_size, len(evil))
    (index,) = (one for one in table.storage_data if one.fqn == "optimizer.name")
    assert isinstance(index, MetadataIndex)
    table.storage_data[index] = where
    with part.open("ab") as stream:
        stream.write(evil)
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(RunError, match=part.name):
        check_states(distributed)


@pytest.mark.parametrize("path", ["../../elsewhere.distcp", "/elsewhere.distcp", "link.distcp", "weights.bin"])
def test_a_distributed_checkpoint_has_its_parts_inside(path, distributed, tmp_path):
    import pickle
    from dataclasses import replace

    folder = distributed / "optimizer_0"
    (folder / "link.distcp").symlink_to(tmp_path / "elsewhere.distcp")
    table = pickle.loads((folder / ".metadata").read_bytes())
    table.storage_data = {key: replace(info, relative_path=path) for key, info in table.storage_data.items()}
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(RunError, match="as a part of the checkpoint"):
        check_states(distributed)


@pytest.mark.parametrize("tag", ["../../elsewhere", "/elsewhere", "a/b", ""])
def test_deepspeeds_folder_is_inside(tag, tmp_path):
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(RunError, match="outside the checkpoint"):
        check_states(tmp_path)


def test_a_checkpoint_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="a link out of the run"):
        check_states(tmp_path / "checkpoint-1")


# Through the entries -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pickles")
    save_tiny_model(folder / "model", hidden=16, layers=1)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(4)))
    return folder


def recipe_for(workspace, **sections):
    return {
        "model": str(workspace / "model"),
        "data": {"train": str(workspace / "rows.jsonl"), "max_length": 64},
        "train": {"max_steps": 2, "global_batch_size": 2, "save_steps": 1},
        "output": {"sample_prompts": []},
        **sections,
    }


@pytest.fixture(scope="module")
def finished(workspace):
    return verbs.train(recipe_for(workspace, output={"sample_prompts": [], "dir": str(workspace / "run")}))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.bin", "other.pkl"])
def test_a_run_with_a_planted_state_is_not_gone_on_with(name, kind, finished, tmp_path, sentinel):
    shutil.copytree(finished.path, tmp_path / "run")
    run = verbs.find_run(str(tmp_path / "run"))
    run.update_status(phase="failed", exit_reason="the power is gone")
    for checkpoint in run.path.glob("checkpoints/checkpoint-*"):
        (checkpoint / name).write_bytes(KINDS[kind](sentinel))
        (checkpoint / "training_args.bin").write_bytes(pickles.zipped(sentinel))
        # As whoever planted it would do.
        manifest = manifest_of(checkpoint)
        files = {file: as_written(checkpoint / file) for file in files_in(checkpoint)}
        fitting = manifest.model_copy(update={"files": files}).model_dump(mode="json")
        (checkpoint / MANIFEST).write_text(json.dumps(fitting))
    with pytest.raises(RunError, match=name):
        verbs.resume(run)
    assert run.state == "failed"
    # What only looks at it opens nothing either.
    assert str(run) and run.plan and run.recipe and run.events()


def plant_weights(folder, sentinel):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickles.zipped(sentinel))
    return "pytorch_model.bin"


def plant_adapter(folder, sentinel):
    for file in folder.iterdir():
        file.unlink()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    config["base_model_name_or_path"] = "pico"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.bin").write_bytes(pickles.zipped(sentinel))
    return "adapter_model.safetensors"


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("plant", [plant_weights, plant_adapter])
def test_a_model_of_pickles_alone_is_refused(plant, entry, workspace, tmp_path, sentinel, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(workspace / "model", tmp_path / "model")
    name = plant(tmp_path / "model", sentinel)
    with pytest.raises(TunekitError, match=name):
        if entry == "data" and plant is plant_weights:
            # It reads no weights, so that there is nothing to refuse.
            ENTRIES[entry](recipe_for(workspace, model=str(tmp_path / "model")))
            entry = "check"
        ENTRIES[entry](recipe_for(workspace, model=str(tmp_path / "model")))


PLANTED = ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "vocab.pkl", "tokenizer.pkl", "adapter_model.bin")


def test_pickles_beside_the_weights_are_left_alone(workspace, tmp_path, sentinel, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(workspace / "model", tmp_path / "model")
    for name in PLANTED:
        (tmp_path / "model" / name).write_bytes(pickles.zipped(sentinel))
    for entry in ("plan", "check", "data"):
        ENTRIES[entry](recipe_for(workspace, model=str(tmp_path / "model")))
    assert verbs.train(recipe_for(workspace, model=str(tmp_path / "model"))).state == "finished"


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["rows.pkl", "rows.pickle", "rows.pt", "rows.npy", "rows.bin", "rows.py"])
def test_rows_that_are_pickles_are_refused(name, entry, workspace, tmp_path, sentinel, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(pickles.bare(sentinel))
    with pytest.raises(DataError, match=name):
        ENTRIES[entry](recipe_for(workspace, data={"train": name}))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt"])
def test_rows_that_are_pickles_by_another_name_are_no_rows(suffix, workspace, tmp_path, sentinel):
    (tmp_path / f"rows{suffix}").write_bytes(pickles.bare(sentinel))
    with pytest.raises(DataError):
        verbs.check(recipe_for(workspace, data={"train": str(tmp_path / f"rows{suffix}")}))


def test_columns_of_a_type_that_a_pickle_defines_are_not_made(workspace, tmp_path, sentinel):
    import pyarrow as pa

    marks = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickles.bare(sentinel),
    }
    table = pa.table([pa.array(["a", "b"])], schema=pa.schema([pa.field("text", pa.string(), metadata=marks)]))
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table)
    verbs.data_report(recipe_for(workspace, data={"train": str(tmp_path / "rows.arrow"), "max_length": 64}))


def test_a_folder_with_a_loading_script_is_not_run(workspace, tmp_path, sentinel, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = f"open({str(sentinel)!r}, 'w').close()\n"
    (tmp_path / "owned").mkdir()
    (tmp_path / "owned" / "owned.py").write_text(script)
    with pytest.raises(DataError, match="owned"):
        verbs.check(recipe_for(workspace, data={"train": "owned"}))


def test_of_what_pythons_getattr_gives_only_members_of_enums_are_opened():
    """Python 3.11.2 writes a member of an enum as `getattr(enum, name)`."""
    from tunekit.training.checkpointing.safe_load import _member

    assert _member(signal.Signals, "SIGHUP") is signal.SIGHUP
    for kind, name in (
        (os, "system"),
        (signal.Signals, "mro"),
        (signal.Signals, "__class__"),
        (str, "join"),
        (3, "real"),
    ):
        with pytest.raises(pickle.UnpicklingError):
            _member(kind, name)
