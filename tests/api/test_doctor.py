"""The doctor tells what is installed, what is missing for which feature, and how to get it."""

import subprocess
import sys
from importlib import metadata

import pytest

from tunekit.api.doctor import Diagnosis, Driver, Feature, Package, compare, diagnose, features, installed
from tunekit.api.doctor import stack as names_of_stack
from tunekit.estimates.facts import Device, Hardware

GIB = 2**30
LAPTOP = Hardware(
    cpu=Device(
        kind="cpu",
        name="CPU (test)",
        memory_total_bytes=16 * GIB,
        memory_free_bytes=8 * GIB,
        native_bfloat16=False,
    ),
    num_cores=2,
)


def server(*capabilities: tuple[int, int]) -> Hardware:
    """A machine with one GPU of each compute capability."""
    gpus = [
        Device(
            kind="cuda",
            name=f"GPU {major}.{minor}",
            memory_total_bytes=80 * GIB,
            memory_free_bytes=79 * GIB,
            native_bfloat16=major >= 8,
            compute_capability=(major, minor),
        )
        for major, minor in capabilities
    ]
    return LAPTOP.model_copy(update={"accelerators": tuple(gpus)})


def stack(**versions: str | None) -> tuple[Package, ...]:
    """The whole stack, absent but for `versions`; underscores stand for hyphens."""
    given = {name.replace("_", "-"): version for name, version in versions.items()}
    requires = ["torch>=2.11,<2.14", "bitsandbytes>=0.50,<1", 'matplotlib>=3.9,<4; extra == "notebook"']
    return compare(requires, ["notebook"], dict.fromkeys(names_of_stack()) | given)


def feature(
    name: str, packages: tuple[Package, ...], hardware: Hardware | None, driver: Driver | None = None
) -> Feature:
    """The one feature whose name holds `name`."""
    (found,) = [row for row in features(packages, hardware, driver=driver) if name in row.name]
    return found


@pytest.mark.parametrize(
    ("version", "state", "hint"),
    [
        ("2.11.0", "ok", None),
        ("2.13.0+cpu", "ok", None),
        ("2.12.0.dev20260101", "ok", None),
        ("2.10.1", "outside", "pip install 'torch>=2.11,<2.14'"),
        ("2.14.0", "outside", "pip install 'torch>=2.11,<2.14'"),
        (None, "missing", "pip install 'torch>=2.11,<2.14'"),
    ],
)
def test_core_package_must_be_inside_its_bounds(version: str | None, state: str, hint: str | None) -> None:
    (torch,) = compare(["torch>=2.11,<2.14"], [], {"torch": version})
    assert (torch.state, torch.hint) == (state, hint)


def test_package_of_an_extra_can_be_absent_and_names_the_extra() -> None:
    requires = ['matplotlib>=3.9; extra == "all"', 'matplotlib>=3.9; extra == "notebook"']
    (plots,) = compare(requires, ["all", "notebook"], {"matplotlib": None})
    assert (plots.state, plots.hint) == ("absent", "pip install 'tunekit[notebook]'")


def test_fixes_are_a_script_that_installs_what_is_needed_and_names_the_rest() -> None:
    requires = ["torch>=2.11,<2.14", "peft>=0.21,<1", 'vllm>=0.24; extra == "vllm"', 'wandb>=0.22; extra == "tracking"']
    versions = {"torch": "2.10.1", "peft": None, "vllm": None, "wandb": "0.21"}
    packages = compare(requires, ["vllm", "tracking"], versions)
    slow = Feature("attention", False, "needs flash-attn", "pip install flash-attn --no-build-isolation")
    packaged = Feature("trackers", False, "needs vllm", "pip install 'tunekit[vllm]'")
    diagnosis = Diagnosis("0.1.0", "CPython", "Linux", None, packages, (slow, packaged))
    script = diagnosis.fixes()
    assert script.splitlines() == [
        "# torch 2.10.1, needs >=2.11,<2.14",
        "# peft is missing, needs >=0.21,<1",
        "# wandb 0.21, needs >=0.22",
        f"{sys.executable} -m pip install 'torch>=2.11,<2.14' 'peft>=0.21,<1' 'wandb>=0.22'",
        "# attention: pip install flash-attn --no-build-isolation",
        f"# optional, vllm: {sys.executable} -m pip install 'tunekit[vllm]'",
    ]
    # A shell runs that one command: with this in place of pip, its arguments come out whole.
    command = script.replace(f"{sys.executable} -m pip install", "printf '%s\\n'")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["torch>=2.11,<2.14", "peft>=0.21,<1", "wandb>=0.22"]


def test_nothing_to_fix_is_a_comment() -> None:
    (torch,) = compare(["torch>=2.11,<2.14"], [], {"torch": "2.12.0"})
    assert Diagnosis("0.1.0", "CPython", "Linux", None, (torch,), ()).fixes() == "# nothing is missing"


def test_package_that_tunekit_does_not_ask_for_has_no_bounds() -> None:
    (engine,) = compare([], [], {"vllm": "0.1"})
    assert (engine.state, engine.bounds, engine.hint) == ("ok", "", None)


def test_core_requirement_wins_over_the_same_one_in_an_extra() -> None:
    requires = ["pandas>=2", 'pandas>=9; extra == "notebook"']
    (pandas,) = compare(requires, ["notebook"], {"pandas": "2.2"})
    assert (pandas.bounds, pandas.extra) == (">=2", None)


def test_requirement_for_another_system_is_not_ours() -> None:
    (torch,) = compare(['torch>=9; sys_platform == "nowhere"'], ["gpu"], {"torch": "2.13.0"})
    assert torch.bounds == ""


def test_missing_plots_name_the_extra_that_brings_them() -> None:
    plots = feature("plots", stack(), LAPTOP)
    assert (plots.available, plots.detail) == (False, "needs matplotlib")
    assert plots.hint == "pip install 'tunekit[notebook]'"
    assert feature("plots", stack(matplotlib="3.11"), LAPTOP).available


def test_four_bit_works_on_a_processor() -> None:
    assert feature("4-bit", stack(bitsandbytes="0.50.2"), LAPTOP).available
    assert not feature("4-bit", stack(), LAPTOP).available


def test_four_bit_is_refused_on_an_old_gpu() -> None:
    row = feature("4-bit", stack(bitsandbytes="0.50.2"), server((8, 0), (5, 2)))
    assert (row.available, row.detail) == (False, "GPU 5.2 is older than compute capability 6.0")


def test_flash_attention_is_no_wish_without_a_gpu_for_it() -> None:
    for hardware in (LAPTOP, server((7, 5)), server((9, 0), (7, 5))):
        row = feature("flash", stack(), hardware)
        assert (row.available, row.hint) == (False, None)


def test_flash_attention_that_fits_the_gpu_says_how_to_get_it() -> None:
    assert feature("flash", stack(), server((9, 0))).hint == "pip install flash-attn --no-build-isolation"
    assert feature("flash", stack(flash_attn="2.8"), server((9, 0))).available


def test_cpu_build_of_torch_beside_a_driver_is_noticed() -> None:
    row = feature("training on a GPU", stack(torch="2.13.0+cpu"), LAPTOP, driver="NVIDIA")
    assert not row.available
    assert "2.13.0+cpu" in row.detail and row.hint and "CUDA build" in row.hint


def test_build_of_torch_for_another_maker_is_noticed() -> None:
    for version in ("2.13.0+cu130", "2.13.0+cpu"):
        row = feature("training on a GPU", stack(torch=version), LAPTOP, driver="AMD")
        assert row.hint and "ROCm build" in row.hint
    row = feature("training on a GPU", stack(torch="2.13.0+rocm7.1"), LAPTOP, driver="AMD")
    assert row.hint and "HIP_VISIBLE_DEVICES" in row.hint


def test_apples_gpu_is_said_to_be_left_out() -> None:
    gpu = Device(
        kind="mps",
        name="Apple M2 Max GPU",
        memory_total_bytes=48 * GIB,
        memory_free_bytes=8 * GIB,
        native_bfloat16=False,
    )
    row = feature("training on a GPU", stack(torch="2.13.0"), LAPTOP.model_copy(update={"unused": (gpu,)}))
    assert (row.available, row.detail) == (False, "tunekit does not train on the Apple M2 Max GPU; the CPU is used")


def test_amds_gpu_has_no_compute_capability_to_be_too_old_by() -> None:
    gpu = server((9, 0)).accelerators[0].model_copy(update={"compute_capability": None, "gfx": "gfx942"})
    hardware = LAPTOP.model_copy(update={"accelerators": (gpu,)})
    assert feature("4-bit", stack(bitsandbytes="0.50.2"), hardware).available


def test_launcher_that_contradicts_the_machine_is_shown_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "12")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = diagnose()
    assert found.hardware is not None and found.problem is not None
    assert "WORLD_SIZE=12" in found.problem


def test_gpu_that_is_hidden_from_us_is_noticed() -> None:
    row = feature("training on a GPU", stack(torch="2.13.0"), LAPTOP, driver="NVIDIA")
    assert row.hint and "CUDA_VISIBLE_DEVICES" in row.hint
    assert feature("training on a GPU", stack(torch="2.13.0"), LAPTOP).hint is None


def test_features_without_torch_leave_the_devices_out() -> None:
    names = [row.name for row in features(stack(), None, driver=None)]
    assert names[:2] == ["4-bit base model (adapter: qlora)", "plots as figures and PNG"]
    assert all(name.startswith("output.report_to: ") for name in names[2:])


def test_missing_core_package_makes_the_installation_unhealthy() -> None:
    def healthy(**versions: str | None) -> bool:
        return Diagnosis("0", "3", "os", None, stack(**versions), ()).healthy

    assert healthy(torch="2.13.0", bitsandbytes="0.50.2")
    assert not healthy(torch="2.13.0")
    assert not healthy(torch="2.13.0", bitsandbytes="0.50.2", matplotlib="2.0")


def test_installed_reads_the_version_that_pip_recorded() -> None:
    assert installed(["pytest", "no-such-package-here"]) == {
        "pytest": pytest.__version__,
        "no-such-package-here": None,
    }


def test_diagnosis_of_this_machine_is_whole() -> None:
    found = diagnose()
    assert tuple(package.name for package in found.packages) == tuple(names_of_stack())
    by_name = {package.name: package for package in found.packages}
    assert by_name["torch"].version == metadata.version("torch")
    assert found.hardware is not None and found.hardware.num_cores >= 1


def test_our_own_metadata_has_the_extra_that_brings_plots() -> None:
    by_name = {package.name: package for package in diagnose().packages}
    assert (by_name["matplotlib"].extra, by_name["torch"].extra) == ("notebook", None)
    assert all(by_name[name].bounds for name in ("torch", "transformers", "trl", "peft", "matplotlib"))


@pytest.mark.slow
def test_diagnosis_imports_no_torch() -> None:
    code = "import sys; from tunekit.api.doctor import diagnose; diagnose(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_each_tracker_is_a_feature_that_its_package_brings() -> None:
    assert feature("report_to: mlflow", stack(mlflow="3.17.2"), LAPTOP).available
    missing = compare(['wandb>=0.22,<1; extra == "tracking"'], ["tracking"], dict.fromkeys(names_of_stack()))
    found = feature("report_to: wandb", stack(), LAPTOP)
    assert not found.available
    assert next(one.hint for one in missing if one.name == "wandb") == "pip install 'tunekit[tracking]'"
