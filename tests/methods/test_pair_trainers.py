"""Log-probabilities of a reference are taken from the cache for the same rows, and for no others."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig

from tunekit.data.media.collate import MEDIA
from tunekit.methods.pair_trainers import remembered

ROW = {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5], "completion_mask": [0, 1], MEDIA: ["cat"]}


def trainer():
    """All of a trainer that the key of the cache reads."""
    return SimpleNamespace(
        accelerator=SimpleNamespace(is_main_process=True, mixed_precision="no", device=torch.device("cpu")),
        model=SimpleNamespace(config=LlamaConfig()),
        ref_model=None,
        args=SimpleNamespace(loss_type=["sigmoid"]),
        data_collator=None,
        is_deepspeed_enabled=False,
        _precompute_model_hash="weights",
    )


def log_prob_of(row, computed):
    """The log-probability of a row: from the cache, or else the one that is computed."""
    rows = Dataset.from_list([row])
    scored = remembered(trainer(), rows, "train", lambda: rows.add_column("ref_chosen_logps", [computed]))
    return scored[0]["ref_chosen_logps"]


@pytest.mark.parametrize(("column", "value"), [("chosen_ids", [3, 6]), ("completion_mask", [1, 1]), (MEDIA, ["dog"])])
def test_log_probabilities_are_remembered_for_rows_that_are_the_same_in_all_that_is_scored(
    column, value, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert log_prob_of(ROW, -1.0) == -1.0
    assert log_prob_of(ROW, -2.0) == -1.0
    assert log_prob_of({**ROW, column: value}, -3.0) == -3.0
