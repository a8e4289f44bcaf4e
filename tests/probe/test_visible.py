"""The variables that hide devices mean to us what they mean to torch."""

import pytest
import torch

from tunekit.probe.found import visible_devices

UUIDS = [f"GPU-{letter}{number:07x}-0000" for number, letter in enumerate("aabcdef0")]

SETTINGS = ["", "0", "0,1", "3,1,2", "7", "-1", "0,-1,1", "0,1,0", " 2 , 1", "1gpu2,2ampere", "nothing", "NoDevFiles"]
BY_UUID = [
    UUIDS[3],
    f"{UUIDS[5]},{UUIDS[0]}",
    "GPU-b,GPU-c",
    "GPU-a",
    "GPU-b,GPU-nothing,GPU-c",
    "GPU-b,GPU-b",
    "GPU-b,0x",
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_indices_are_read_as_torch_reads_them(setting, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert visible_devices(setting, UUIDS) == torch.cuda._parse_visible_devices()


@pytest.mark.parametrize("setting", BY_UUID)
def test_uuids_and_their_beginnings_are_read_as_torch_reads_them(setting, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    wanted = torch.cuda._transform_uuid_to_ordinals(torch.cuda._parse_visible_devices(), UUIDS)
    assert visible_devices(setting, UUIDS) == wanted


def test_all_devices_are_visible_where_nothing_hides_them():
    assert visible_devices(None, UUIDS) == list(range(8))


def test_an_index_beyond_the_last_device_ends_the_list():
    assert visible_devices("1,8,2", UUIDS) == [1]
