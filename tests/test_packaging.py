"""The wheel: what is in it, and that it works where only its light dependencies are installed."""

import importlib.metadata as metadata
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LIGHT = ("filelock", "packaging", "platformdirs", "psutil", "pydantic", "pyyaml", "rich", "typer")
"""All that `tunekit recipes` needs."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("tunekit-*.whl")
    return built


@pytest.fixture(scope="module")
def files(wheel: Path) -> set[str]:
    """Names of the files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def shipped(folder: str, inside: str) -> set[str]:
    """The checkout's data files under `folder`, by the names that they have in the wheel; scripts stay behind."""
    paths = (ROOT / folder).rglob("*")
    kept = [path for path in paths if path.is_file() and path.suffix not in (".py", ".pyc")]
    return {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in kept}


def test_wheel_holds_every_recipe_and_example_file(files: set[str]) -> None:
    wanted = shipped("recipes", "tunekit/_recipes") | shipped("examples/data", "tunekit/_examples")
    assert "tunekit/_recipes/sft/quickstart.yaml" in wanted
    assert wanted <= files


def test_wheel_holds_pico_with_weights_and_tokenizer(files: set[str]) -> None:
    pico = {name.rpartition("/")[2] for name in files if name.startswith("tunekit/models/pico/")}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= pico
    vision = {name.rpartition("/")[2] for name in files if name.startswith("tunekit/models/pico_vision/")}
    assert {"config.json", "model.safetensors", "tokenizer.json", "processor_config.json"} <= vision


def test_wheel_holds_the_table_of_well_known_models(files: set[str]) -> None:
    assert "tunekit/estimates/models/models.yaml" in files


def test_wheel_holds_the_tables_of_other_tools(files: set[str]) -> None:
    wanted = shipped("tunekit/migration/tables", "tunekit/migration/tables")
    assert "tunekit/migration/tables/axolotl.yaml" in wanted
    assert wanted <= files


def test_wheel_holds_the_texts_and_the_looks_of_the_web_ui(files: set[str]) -> None:
    paths = [path for kind in ("yaml", "css") for path in (ROOT / "webui").rglob(f"*.{kind}")]
    wanted = {path.relative_to(ROOT).as_posix() for path in paths}
    assert "webui/locales/zh/runs.yaml" in wanted and "webui/styles/shell.css" in wanted
    assert wanted <= files


def test_wheel_is_typed_and_licensed(files: set[str]) -> None:
    assert "tunekit/py.typed" in files
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)


def test_wheel_holds_the_packages_and_nothing_else(files: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in files} == {"tunekit", "webui"}
    assert not [name for name in files if "test" in Path(name).stem or "__pycache__" in name]


def test_wheel_is_small_enough_to_ship(wheel: Path) -> None:
    assert wheel.stat().st_size < 12 * 2**20


def closure(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """The installed distributions with these names, and those that they need."""
    found: dict[str, metadata.Distribution] = {}
    queue = list(names)
    while queue:
        name = queue.pop()
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        requirements = [Requirement(line) for line in found[name].requires or []]
        queue += [need.name for need in requirements if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of an environment that holds the wheel and its light dependencies, and no torch.

    The dependencies are copied from the running environment, so the test needs no network.
    """
    home = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    for dist in closure(LIGHT).values():
        for file in dist.files or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(dist.locate_file(file), site / file)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return home / "bin"


def run(bare: Path, cwd: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of the bare environment."""
    return subprocess.run([bare / command[0], *command[1:]], capture_output=True, text=True, check=False, cwd=cwd)


def test_installed_wheel_lists_its_recipes_without_torch(bare: Path, tmp_path: Path) -> None:
    assert run(bare, tmp_path, "python", "-c", "import torch").returncode != 0
    done = run(bare, tmp_path, "tunekit", "recipes")
    assert done.returncode == 0, done.stderr
    paths = (ROOT / "recipes").rglob("*.yaml")
    names = {path.relative_to(ROOT / "recipes").with_suffix("").as_posix() for path in paths}
    assert "sft/quickstart" in names
    assert names <= set(done.stdout.split())


def test_installed_wheel_copies_and_checks_recipes(bare: Path, tmp_path: Path) -> None:
    copied = run(bare, tmp_path, "tunekit", "recipes", "copy", "sft/quickstart", "mine.yaml")
    assert copied.returncode == 0, copied.stderr
    original = (ROOT / "recipes" / "sft" / "quickstart.yaml").read_text()
    first, _, rest = (tmp_path / "mine.yaml").read_text().partition("\n")
    assert first == "# yaml-language-server: $schema=recipe.schema.json" and rest == original
    assert (tmp_path / "recipe.schema.json").is_file()
    checked = run(bare, tmp_path, "tunekit", "check", "mine.yaml", "train.learning_rte=1")
    assert checked.returncode == 2
    assert "did you mean" in checked.stderr and "Traceback" not in checked.stderr
