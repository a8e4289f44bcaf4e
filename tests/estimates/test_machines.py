"""Machines by name and by file, and what is said of names and files that are none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.estimates.shapes import GIB, LLAMA_1B, LLAMA_8B
from tunekit.errors import PlanError
from tunekit.estimates.facts import DataFacts
from tunekit.estimates.hardware.catalogue import NOT_TRAINED_ON, catalogue
from tunekit.estimates.hardware.machines import find_machine, machines
from tunekit.planner.resolve import resolve
from tunekit.recipe.schema import Recipe

ROWS = DataFacts(num_train=800, num_eval=80)
QUICKSTART = Recipe.model_validate(
    {
        "model": "some-model",
        "data": {"train": "example:pirate.jsonl", "eval": "example:pirate_eval.jsonl", "max_length": 256},
        "adapter": {"type": "lora", "rank": 32, "alpha": 64},
        "train": {"num_epochs": 3, "learning_rate": 2e-3},
    }
)


@pytest.mark.parametrize(
    ("on", "name", "num_accelerators", "num_nodes"),
    [
        ("h200", "h200", 1, 1),
        ("8xh100", "h100", 8, 1),
        ("8XH100", "h100", 8, 1),
        (" 8 x H100 ", "h100", 8, 1),
        ("8×H100", "h100", 8, 1),
        ("2*8*h100", "h100", 8, 2),
        ("2x8xrtx5090", "rtx5090", 8, 2),
        ("4090", "rtx4090", 1, 1),
        ("8x4090", "rtx4090", 8, 1),
        ("2x4x4090", "rtx4090", 4, 2),
        ("RTX 4090", "rtx4090", 1, 1),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 1, 1),
        ("RTX Pro 6000", "rtxpro6000", 1, 1),
        ("a100", "a100-80gb", 1, 1),
        ("a100-40gb", "a100-40gb", 1, 1),
        ("A100_80GB", "a100-80gb", 1, 1),
        ("h100-sxm", "h100", 1, 1),
        ("H100 PCIe", "h100-pcie", 1, 1),
        ("Tesla T4", "t4", 1, 1),
        ("gb200-nvl72", "gb200", 1, 1),
        ("72xgb200", "gb200", 72, 1),
        ("AMD Instinct MI300X", "mi300x", 1, 1),
        ("intel gaudi 3", "gaudi3", 1, 1),
        ("16xtrainium2", "trn2", 16, 1),
        ("tpu v5p", "tpu-v5p", 1, 1),
    ],
)
def test_a_name_says_nodes_accelerators_and_kind(on, name, num_accelerators, num_nodes):
    machine = find_machine(on)
    assert (machine.accelerator.name, machine.num_accelerators, machine.num_nodes) == (
        name,
        num_accelerators,
        num_nodes,
    )


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("8xh1000", "'8xh1000': unknown accelerator 'h1000'; did you mean '8xh100'"),
        ("2x8xrtx590", "did you mean '2x8xrtx5090'"),
        ("tpu-v5", "did you mean 'tpu-v5p'"),
        ("abacus", "'abacus': unknown accelerator 'abacus'; available: a100-40gb, a100-80gb, h100-pcie, h100,"),
        ("16xh100", "16 H100 SXM 80 GB in one node; nodes have at most 8; did you mean '2x8xh100'?"),
        ("3x16xh100", "did you mean '6x8xh100'?"),
        ("12xh100", "write how many nodes, or pass a YAML file"),
        ("0xh100", "at least one node and one accelerator; write h100, 8xh100 or 2x8xh100"),
        ("0x8xh100", "at least one node and one accelerator"),
        ("", "'': invalid machine name"),
        ("8x", "'8x': invalid machine name"),
        ("2x2x8xh100", "'2x2x8xh100': invalid machine name"),
        ("8h100", "unknown accelerator '8h100'; did you mean 'h100'"),
        ("-1xh100", "unknown accelerator '-1xh100'"),
        ("missing.yaml", "missing.yaml: file not found"),
    ],
)
def test_a_name_that_is_none_is_refused_with_what_was_meant(on, message):
    with pytest.raises(PlanError) as caught:
        find_machine(on)
    assert message in str(caught.value)


def test_no_name_stands_for_two_accelerators():
    for kind in catalogue():
        for name in (kind.name, *kind.aliases, *kind.reported):
            assert find_machine(name).accelerator is kind, name


@given(nodes=st.integers(1, 999_999), accelerators=st.integers(1, 8), upper=st.booleans())
def test_any_counts_are_kept(nodes, accelerators, upper):
    on = f"{nodes}x{accelerators}xh100"
    hardware = find_machine(on.upper() if upper else on).hardware()
    assert (hardware.num_nodes, len(hardware.accelerators)) == (nodes, accelerators)
    assert hardware.num_accelerators == nodes * accelerators


@given(st.text(max_size=30))
def test_any_text_is_a_machine_or_one_clear_error(text):
    try:
        find_machine(text).hardware()
    except PlanError as error:
        assert "\n" not in str(error) or "\n" in text


@pytest.mark.parametrize("name", [kind.name for kind in catalogue()])
def test_every_accelerator_can_be_planned_for_or_says_why_not(name):
    machine = find_machine(name)
    if machine.accelerator.platform in NOT_TRAINED_ON:
        with pytest.raises(PlanError, match=rf"^{name}: tunekit supports CUDA devices only"):
            machine.hardware()
    else:
        assert resolve(QUICKSTART, machine.hardware(), LLAMA_1B, ROWS)


def test_a_plan_for_rocm_says_that_it_is_only_a_plan():
    plan = resolve(QUICKSTART, find_machine("8xmi300x").hardware(), LLAMA_8B, ROWS)
    assert "tunekit is untested on ROCm" in plan.explain()
    assert plan.dtype == "bfloat16"


def test_flash_attention_may_be_asked_for_on_a_machine_that_is_not_here():
    asked = QUICKSTART.model_copy(
        update={"model": QUICKSTART.model.model_copy(update={"attn_implementation": "flash_attention_2"})}
    )
    hardware = find_machine("h100").hardware()
    assert resolve(asked, hardware, LLAMA_8B, ROWS).attn_implementation == "flash_attention_2"
    assert resolve(QUICKSTART, hardware, LLAMA_8B, ROWS).attn_implementation == "tunekit_varlen"
    with pytest.raises(PlanError, match=r"compute capability 8\.0 or newer"):
        resolve(asked, find_machine("t4").hardware(), LLAMA_8B, ROWS)


def written(folder, text):
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_a_file_lays_its_figures_over_the_catalogue(tmp_path):
    text = "accelerator: H100\nnum_accelerators: 4\nnum_nodes: 3\nnetwork_gb_per_second: 12.5\nusd_per_hour: 1.5\n"
    text += "disk_gb_per_second: 7\n"
    hardware = find_machine(
        written(tmp_path, text + "free_memory_gib: 70\nhost_memory_gib: 1024\nnum_cores: 96\n")
    ).hardware()
    assert (hardware.num_accelerators, hardware.num_nodes, hardware.num_cores) == (12, 3, 96)
    assert hardware.device.memory_free_bytes == 70 * GIB < hardware.device.memory_total_bytes
    assert hardware.figures.network_bytes_per_second == 12.5e9
    assert hardware.figures.disk_bytes_per_second == 7e9
    assert hardware.figures.flops_16bit == 989e12
    assert hardware.figures.usd_per_hour == 1.5 and "mine.yaml" in hardware.figures.price_source
    assert hardware.cpu.memory_total_bytes == 1024 * GIB


def test_a_file_may_describe_an_accelerator_that_nobody_knows(tmp_path):
    text = "accelerator: Abacus 9\nmemory_gib: 48\ncompute_capability: [8, 6]\nflash_attn: true\npcie_generation: 4\n"
    hardware = find_machine(written(tmp_path, text)).hardware()
    assert hardware.device.name == "Abacus 9"
    assert hardware.device.native_bfloat16 and hardware.flash_attn is True
    assert hardware.figures.link_bytes_per_second == pytest.approx(31.5e9, rel=0.001)
    assert resolve(QUICKSTART, hardware, LLAMA_8B, ROWS).attn_implementation == "flash_attention_2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accelerator: h100\nnum_node: 2\n", ":2:1: num_node: unknown key; did you mean 'num_nodes'?"),
        ("accelerator: h100\nnum_nodes: 0\n", ":2:12: num_nodes: input should be greater than or equal to 1, got 0"),
        ("accelerator: h100\nmemory_gib: .inf\n", ":2:13: memory_gib: input should be a finite number"),
        ("num_nodes: 2\n", "accelerator: missing required key"),
        ("accelerator: abacus\n", ":1:14: accelerator: 'abacus' is not in the catalogue; memory_gib and"),
        ("accelerator: h100\nfree_memory_gib: 90\n", ":2:18: free_memory_gib: exceeds its memory of 79.6475 GiB"),
        ("accelerator: h100\naccelerator: h200\n", ":2:1"),
        ("- h100\n", "must be a mapping with accelerator"),
        ("", "must be a mapping with accelerator"),
        ("a: [\n", "mine.yaml:"),
    ],
)
def test_a_fault_in_a_file_is_told_with_its_place(tmp_path, text, message):
    with pytest.raises(PlanError) as caught:
        find_machine(written(tmp_path, text))
    assert "mine.yaml" in str(caught.value) and message in str(caught.value)


def test_all_faults_of_a_file_are_told_at_once(tmp_path):
    with pytest.raises(PlanError) as caught:
        find_machine(written(tmp_path, "num_nodes: 0\nmemory: 3\n"))
    assert len(str(caught.value).splitlines()) == 3


def test_a_file_that_is_not_text_or_not_a_file_is_one_line(tmp_path):
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(PlanError, match=r"bytes\.yaml: is not UTF-8 text"):
        find_machine(str(tmp_path / "bytes.yaml"))
    with pytest.raises(PlanError, match=r"folder\.yaml: cannot be read: Is a directory"):
        find_machine(str(tmp_path / "folder.yaml"))


def test_every_machine_that_is_listed_can_be_planned_for():
    names = machines()
    assert {"h200", "8xh100", "rtx4090"} <= set(names) and not any("tpu" in name for name in names)
    for name in names:
        hardware = find_machine(name).hardware()
        assert name.startswith(f"{hardware.num_accelerators}x") == (hardware.num_accelerators > 1)
