"""tunekit's kernels beside torch, torch.compile, liger-kernel, TRL, PEFT and bitsandbytes, on an accelerator.

    python -m benchmarks.kernels [--only WORDS ...] [--save [--goes-on]]
    python -m benchmarks.kernels --dry-run            every comparison once, at tiny shapes, also on a CPU

Each form runs on fresh inputs: once for its error, its peak memory, and its time, which is the median of many runs by
CUDA events with a cold L2 cache. What a run moves or computes by the mathematics, by its time, is given as a share of
what the same device did in the same minutes: a copy of 2 GiB, and a product of random 8192 x 8192 bfloat16 matrices.
The error is that of all results and gradients beside the formula in float64: the norm of the difference by the norm,
the largest of them. Rivals that are not installed are left out, by name.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.circumstances import circumstances
from benchmarks.kernel_cases import REAL, TINY, Case, Form, Sizes, cases
from tunekit.kernels import backend

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "liger-kernel", "bitsandbytes")
ONLY_TRITON = ("liger",)
"""Forms that run on an accelerator only, or in Triton's interpreter."""

CHECKED_TOKENS = 512
"""Of the error, as logits in float64 take eight bytes."""


def results_of(outputs: Any) -> list[Tensor]:
    """The tensors that a form returned."""
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return [output for output in outputs if isinstance(output, Tensor)]


def with_gradients(form: Form, inputs: Sequence[Any]) -> list[Tensor]:
    """Results of a form, and the gradients of its inputs for the same random gradients of the results."""
    outputs = results_of(form(*inputs))
    learning = [tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(output.shape, generator=generator).to(output.device, output.dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, learning, grads)]


def error(case: Case, form: Form, sizes: Sizes, device: str) -> float | None:
    """The largest relative error of a form's results and gradients, or None where there is no formula."""
    if case.exact is None:
        return None
    inputs = case.make(sizes, device)
    doubles = [
        tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for tensor in inputs
    ]
    expected = [value.detach() for value in with_gradients(case.exact, doubles)]
    computed = [value.detach() for value in with_gradients(form, inputs)]
    pairs = zip(computed, expected, strict=True)
    return max(float((value.double() - exact).norm() / exact.norm()) for value, exact in pairs)


def passes(case: Case, form: Form, inputs: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """What is timed of a form: the forward pass alone, and with the backward pass."""

    def forward() -> Any:
        with torch.no_grad():
            return form(*inputs)

    if not case.backward:
        return {"forward": forward}
    learning = [tensor for tensor in inputs if tensor.requires_grad]
    grads = [torch.randn_like(output) for output in results_of(forward())]
    return {
        "forward": forward,
        "both": lambda: torch.autograd.grad(results_of(form(*inputs)), learning, grads),
    }


def peak_bytes(run: Callable[[], Any]) -> int:
    """Bytes that a run takes beside what was there."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


TIMED_MS = 200
"""Milliseconds of runs whose median counts."""


def milliseconds(run: Callable[[], Any]) -> float:
    """The median of as many runs as fit in that time."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=TIMED_MS // 5, rep=TIMED_MS, return_mode="median"))


def ceilings() -> dict[str, float]:
    """What the device does at best, by unit: bytes of a copy, and operations of a product, a second."""
    tensors = torch.randn(2, 2**29, device="cuda")
    copied = 2 * tensors[0].nbytes / milliseconds(lambda: tensors[1].copy_(tensors[0])) * 1e3
    matrices = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {"B": copied, "FLOP": 2 * 8192**3 / milliseconds(lambda: matrices[0] @ matrices[1]) * 1e3}


def measured(case: Case, name: str, form: Form, best: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each pass of a form."""
    # Fewer tokens, but columns and heads as they are.
    few = Sizes(**{**vars(REAL), "tokens": CHECKED_TOKENS})
    wrong = error(case, form, few, "cuda")
    rows = []
    for pass_name in ("forward", "both") if case.backward else ("forward",):
        run = passes(case, form, case.make(REAL, "cuda"))[pass_name]
        peak, time = peak_bytes(run), milliseconds(run)
        rate = case.work(REAL)[pass_name == "both"] / time * 1e3
        rows.append(
            {
                "case": case.name,
                "form": name,
                "pass": pass_name,
                "milliseconds": time,
                "rate": rate,
                "unit": f"{case.unit}/s",
                "share_of_ceiling": rate / best[case.unit],
                "peak_bytes": peak,
                "relative_error": wrong,
            }
        )
        del run
        torch.cuda.empty_cache()
    return rows


def tried(case: Case, name: str, form: Form, device: str) -> str:
    """Run a form at tiny shapes, and say how far it is from the formula."""
    wrong = error(case, form, TINY, device)
    for run in passes(case, form, case.make(TINY, device)).values():
        run()
    return f"{case.name:32} {name:16} {'runs' if wrong is None else f'error {wrong:.1e}'}"


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def forms_of(case: Case) -> dict[str, Form]:
    """The forms that can be imported; says which of others cannot."""
    forms = {}
    for name, load in case.forms.items():
        try:
            forms[name] = load()
        except ImportError as missing:
            if name == "tunekit":
                raise
            print(f"{case.name}: {name} is left out: {missing}")
    return forms


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and with `--save` keep it; 2 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these words in it")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/kernels-DEVICE.json")
    parser.add_argument("--dry-run", action="store_true", help="run everything once at tiny shapes")
    parser.add_argument("--without", nargs="+", default=[], help="rivals to leave out")
    parser.add_argument("--goes-on", action="store_true", help="with --save: measure what is not saved yet")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (benchmarks/results)")
    args = parser.parse_args(arguments)
    wanted = [case for case in cases() if any(words in case.name for words in args.only)]
    if not torch.cuda.is_available() and not args.dry_run:
        print("There is no accelerator here. On one, this would be measured:")
        print(*(f"  {case.name}: {', '.join(case.forms)}" for case in wanted), sep="\n")
        return 2
    if args.dry_run:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for case in wanted:
            for name, form in forms_of(case).items():
                if name in args.without:
                    continue
                if device == "cpu" and name in ONLY_TRITON and not backend.interprets:
                    print(f"{case.name:32} {name:16} needs an accelerator")
                else:
                    print(tried(case, name, form, device), flush=True)
        return 0
    device_name = torch.cuda.get_device_name()
    path = args.results / f"kernels-{device_name.lower().replace(' ', '-')}.json"
    best = ceilings()
    report = {**circumstances(()), "device": device_name, "versions": versions(), "ceilings": best, "rows": []}
    if args.goes_on and path.exists():
        report["rows"] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    rows = report["rows"]
    known = {(row["case"], row["form"]) for row in rows}
    for case in wanted:
        for name, form in forms_of(case).items():
            if name in args.without or (case.name, name) in known:
                continue
            try:
                new = measured(case, name, form, best)
            except Exception as failure:  # noqa: BLE001  (what does not compile or run is a result)
                new = [{"case": case.name, "form": name, "left_out": f"{type(failure).__name__}: {failure}"[:2000]}]
            rows += new
            print(*map(shown, new), sep="\n", flush=True)
            if args.save:
                path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            torch.compiler.reset()
            if "left_out" in new[0] and not answers():
                return 3
    print(f"\n{device_name}: copies {best['B'] / 1e12:.2f} TB/s, multiplies {best['FLOP'] / 1e12:.0f} TFLOP/s")
    print(*map(shown, rows), sep="\n")
    return 0


def answers() -> bool:
    """Return whether the device still computes: after some errors, no more in this process."""
    try:
        torch.ones(2, device="cuda").sum().item()
    except RuntimeError:
        return False
    return True


def shown(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    if "left_out" in row:
        return f"{row['case']:32} {row['form']:16} left out: {row['left_out'].strip().splitlines()[0]}"
    wrong = "" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
    return (
        f"{row['case']:32} {row['form']:16} {row['pass']:8} {row['milliseconds']:9.3f} ms "
        f"{row['share_of_ceiling']:6.1%} {row['peak_bytes'] / 2**20:8.0f} MiB  {wrong}"
    )


if __name__ == "__main__":
    sys.exit(main())
