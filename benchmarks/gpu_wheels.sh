#!/bin/sh
# Collects in a folder the wheels that `python -m benchmarks.gpu` needs on a machine without a network that has Python
# 3.12, torch 2.11 for CUDA 13 and the rest of pyproject.toml's dependencies: benchmarks/gpu_wheels.sh [FOLDER] [MIB]
# There: pip install --no-index --no-deps --target SITE FOLDER/*.whl
set -eu
folder=${1:-wheels}
limit_mib=${2:-60}
mkdir -p "$folder"
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d "$folder" \
    transformers==5.24.0 huggingface_hub==2.4.0 tokenizers==0.23.3 trl==1.16.0 peft==0.21.2 accelerate==1.15.0 \
    datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 liger_kernel==0.8.5 bitsandbytes==0.50.2 torchao==0.18.0 \
    pydantic==2.14.4 pydantic_core==2.50.5 annotated_types typing_inspection typing_extensions \
    httpx2==2.16.2 httpcore2==2.16.2 truststore idna plotext rich==15.0.0 typer==0.29.2 click platformdirs \
    schedulefree filelock regex pytest_random_order
# Of bitsandbytes, what is for that CUDA alone; it is 43 MB for all of them.
python3 - "$folder" "$limit_mib" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

folder, limit = Path(sys.argv[1]), float(sys.argv[2]) * 2**20
for wheel in folder.glob("bitsandbytes-*.whl"):
    whole = wheel.rename(wheel.with_suffix(".whole"))
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if not name.endswith(".so") or name.endswith(("_cpu.so", "_cuda130.so")):
                new.writestr(name, old.read(name))
    whole.unlink()
size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.0f} MiB in {folder}")
sys.exit(size > limit)
PYTHON
