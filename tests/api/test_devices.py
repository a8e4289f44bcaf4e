"""How a run is given devices: by index, by UUID or the beginning of one, and no other than there are."""

import pytest

import tunekit
from tunekit.api.devices import chosen, visible_to
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine


@pytest.fixture
def found():
    devices = find_machine("4xh100").hardware().accelerators
    uuids = ("GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44")
    return [device.model_copy(update={"visible_as": uuid}) for device, uuid in zip(devices, uuids, strict=True)]


@pytest.mark.parametrize(
    ("names", "visible"),
    [(["0"], "GPU-aa11"), (["3", "1"], "GPU-cc44,GPU-aa22"), (["GPU-bb", " GPU-aa22"], "GPU-bb33,GPU-aa22")],
)
def test_devices_are_chosen_by_index_or_uuid_and_seen_by_uuid(found, names, visible):
    assert chosen(names, found) == {"CUDA_VISIBLE_DEVICES": visible}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["4"], "available: 0 H100 SXM 80 GB GPU-aa11"),
        (["GPU-aa"], "no device 'GPU-aa'"),
        ([""], "no device ''"),
        (["cpu"], "no device 'cpu'"),
        (["0", "GPU-aa11"], "lists a device twice"),
    ],
)
def test_a_device_that_is_not_there_or_not_one_is_refused(found, names, words):
    with pytest.raises(PlanError) as raised:
        chosen(names, found)
    assert words in str(raised.value)


def test_devices_of_rocm_are_named_by_its_own_variable(found):
    rocm = [device.model_copy(update={"gfx": "gfx942"}) for device in found]
    assert chosen(["1"], rocm) == {"HIP_VISIBLE_DEVICES": "GPU-aa22"}


@pytest.mark.slow
def test_without_accelerators_there_is_the_processor_and_nothing_else():
    (device,) = tunekit.devices()
    assert device.uuid == "cpu" and 0 < device.free_bytes <= device.total_bytes
    assert visible_to(["cpu"]) == {}
    with pytest.raises(PlanError, match="no accelerator"):
        tunekit.start("sft/quickstart", devices=["0"])
