"""What the web UI costs: its start, its memory with many visitors, and how much it reads.

    python -m benchmarks.webui --save

- start: from the command to the first page, as a ratio to `python -c "import gradio"`, medians of turns side by side.
- visitors: browsers on the pages of runs that go on and have many events; each asks, as the page's own script does, at
  every tick. The answers' times, and the memory of the server at its peak, with what it starts to read long files.
- reading: bytes that it reads for the charts of one long run, as a ratio to the file, and until when they are there.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.circumstances import circumstances

RESULT = Path(__file__).parent / "results" / "webui.json"
RECIPE = """\
model: pico
data: {train: 'example:pirate.jsonl', max_length: 128}
adapter: lora
train: {max_steps: 2, global_batch_size: 2}
output: {dir: runs/first}
"""
LIMIT_MIB = 400
LIMIT_SECONDS = 1.0


@contextlib.contextmanager
def served(root: Path) -> Iterator[tuple[str, int]]:
    """The server over a folder: its address and its process."""
    command = [sys.executable, "-m", "tunekit", "ui", "--root", str(root), "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.match(r"(http://\S+)/", process.stdout.readline())
    try:
        assert found is not None, "the server did not say where it is"
        yield found[1], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def start_ratio(root: Path, turns: int) -> dict[str, float]:
    """Seconds to the first page and to an import of gradio, and the ratio of their medians."""
    pages, imports = [], []
    for _ in range(turns):
        before = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import gradio"], check=True)
        imports.append(time.perf_counter() - before)
        before = time.perf_counter()
        with served(root) as (url, _):
            httpx.get(f"{url}/runs", timeout=60).raise_for_status()
            pages.append(time.perf_counter() - before)
    page, gradio = statistics.median(pages), statistics.median(imports)
    return {"first_page_seconds": page, "import_gradio_seconds": gradio, "ratio": page / gradio}


def make_runs(root: Path, num_runs: int, num_events: int) -> list[Path]:
    """Runs that are training and have said much: copies of a real one with more steps."""
    (root / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "tunekit", "train", "recipe.yaml"], cwd=root, check=True, capture_output=True)
    first = root / "runs" / "first"
    events = [json.loads(line) for line in (first / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    log = next(event for event in events if event["event"] == "log")
    before = events[: events.index(log)]
    runs = []
    for number in range(num_runs):
        run = root / "runs" / f"long-{number}"
        shutil.copytree(first, run)
        with (run / "events.jsonl").open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(event) + "\n" for event in before)
            stream.writelines(step_of(log, step) for step in range(1, num_events + 1))
        runs.append(run)
    return runs


def step_of(log: dict[str, Any], step: int) -> str:
    """The line of a step."""
    loss = 3 / (1 + step / 1000) + (step * 7919 % 101) / 500
    return json.dumps({**log, "step": step, "loss": loss, "time": log["time"] + step}) + "\n"


def going_on(runs: list[Path], num_events: int, ended: threading.Event) -> None:
    """Have the runs say a step a second."""
    logs = [json.loads(run.joinpath("events.jsonl").read_bytes().splitlines()[-1]) for run in runs]
    for step in range(num_events + 1, 10 * num_events):
        if ended.wait(1):
            return
        for run, log in zip(runs, logs, strict=True):
            with (run / "events.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(step_of(log, step))


class Visitor:
    """A browser on the page of a run: what its script keeps, and what it asks at every tick.

    Args:
        config: What the server tells a page.
        client: The connection.
        run: The run's name.
    """

    def __init__(self, config: dict[str, Any], client: httpx.AsyncClient, run: str) -> None:
        self.client, self.session = client, uuid.uuid4().hex[:11]
        parts = {part["id"]: part for part in config["components"]}
        self.values = {number: part["props"].get("value") for number, part in parts.items()}
        timers = {number for number, part in parts.items() if part["type"] == "timer"}
        shown = set(config["page"]["runs"]["dependencies"])
        self.asked = [
            one
            for one in config["dependencies"]
            if one["id"] in shown and any(number in timers and event == "tick" for number, event in one["targets"])
        ]
        names = [number for one in self.asked for number in one["inputs"][:1] if parts[number]["type"] == "textbox"]
        for number in names:
            self.values[number] = run

    async def tick(self) -> list[float]:
        """Ask all that the page asks, as one session with one stream of answers, and return how long each took."""
        asked = dict(await asyncio.gather(*(self._ask(one) for one in self.asked)))
        times = []
        where = {"session_hash": self.session}
        async with self.client.stream("GET", "/gradio_api/queue/data", params=where) as stream:
            async for line in stream.aiter_lines():
                message = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                if message.get("msg") == "process_completed":
                    assert message["success"], message
                    function, before = asked.pop(message["event_id"])
                    times.append(time.perf_counter() - before)
                    self._keep(function, message["output"]["data"])
                if not asked:
                    break
        return times

    @property
    def is_told_to_wait(self) -> bool:
        """Whether the page says that what happened is still being read."""
        return any("runs-reading" in value for value in self.values.values() if isinstance(value, str))

    async def _ask(self, function: dict[str, Any]) -> tuple[str, tuple[dict[str, Any], float]]:
        """Put a question: its id, with what it asks and when that was."""
        data = [self.values[number] for number in function["inputs"]]
        before = time.perf_counter()
        asked = {"data": data, "fn_index": function["id"], "session_hash": self.session, "trigger_id": None}
        joined = await self.client.post("/gradio_api/queue/join?", json=asked)
        joined.raise_for_status()
        return joined.json()["event_id"], (function, before)

    def _keep(self, function: dict[str, Any], answers: list[Any]) -> None:
        for number, answer in zip(function["outputs"], answers, strict=True):
            if isinstance(answer, dict) and answer.get("__type__") == "update":
                if "value" in answer:
                    self.values[number] = answer["value"]
            else:
                self.values[number] = answer


async def visit(url: str, runs: list[Path], num_visitors: int, seconds: float) -> dict[str, Any]:
    """Visitors on the runs' pages, each with its own ticks, for a while."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        config = (await client.get("/config")).json()
        visitors = [Visitor(config, client, runs[n % len(runs)].name) for n in range(num_visitors)]
        first: list[float] = []
        later: list[float] = []
        ends = time.monotonic() + seconds

        async def stay(visitor: Visitor, delay: float) -> None:
            await asyncio.sleep(delay)
            first.extend(await visitor.tick())
            while time.monotonic() < ends:
                begun = time.monotonic()
                later.extend(await visitor.tick())
                await asyncio.sleep(max(0.0, 2.0 - (time.monotonic() - begun)))

        await asyncio.gather(*(stay(visitor, 2.0 * n / num_visitors) for n, visitor in enumerate(visitors)))
        return {
            "questions_a_tick": len(visitors[0].asked),
            "first_median_seconds": statistics.median(first),
            "median_seconds": statistics.median(later),
            "p95_seconds": statistics.quantiles(later, n=20)[-1],
            "num_answers": len(later),
        }


class Memory(threading.Thread):
    """Looks at the memory of a process and of those that it starts, until it is told to end.

    Args:
        pid: The process.
        ended: The end.
    """

    def __init__(self, pid: int, ended: threading.Event) -> None:
        super().__init__()
        self._process, self._ended = psutil.Process(pid), ended
        self.now_mib = self.peak_mib = 0.0

    def run(self) -> None:
        """Look ten times a second."""
        while not self._ended.wait(0.1):
            self.now_mib = self._process.memory_info().rss / 2**20
            total = self.now_mib
            for child in self._process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += child.memory_info().rss / 2**20
            self.peak_mib = max(self.peak_mib, total)


def bytes_read(pid: int) -> int:
    """Bytes that a process has read so far, and those that it started and that have ended."""
    return int(re.search(r"rchar: (\d+)", Path(f"/proc/{pid}/io").read_text(encoding="utf-8"))[1])  # type: ignore[index]


def reading(url: str, pid: int, run: Path) -> dict[str, float]:
    """How much is read for the charts of one run, of which nothing was read before, and at later ticks."""

    async def ask() -> tuple[int, int, float]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            config = (await client.get("/config")).json()
            # With the first charts come libraries, which are read as well.
            await Visitor(config, client, "first").tick()
            visitor = Visitor(config, client, run.name)
            before, began = bytes_read(pid), time.perf_counter()
            await visitor.tick()
            while visitor.is_told_to_wait:
                await visitor.tick()
            between, ended = bytes_read(pid), time.perf_counter()
            for _ in range(5):
                await visitor.tick()
            return between - before, bytes_read(pid) - between, ended - began

    size = (run / "events.jsonl").stat().st_size
    once, later, seconds = asyncio.run(ask())
    return {
        "file_bytes": size,
        "first_ratio": once / size,
        "five_later_ratio": later / size,
        "charts_seconds": seconds,
    }


def measure(num_runs: int, num_events: int, num_visitors: int, seconds: float, turns: int) -> dict[str, Any]:
    """All of it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        runs = make_runs(root, num_runs + 1, num_events)
        result: dict[str, Any] = {"start": start_ratio(root, turns)}
        with served(root) as (url, pid):
            result["reading"] = reading(url, pid, runs.pop())
            ended = threading.Event()
            writer, memory = threading.Thread(target=going_on, args=(runs, num_events, ended)), Memory(pid, ended)
            writer.start()
            memory.start()
            try:
                result["visitors"] = asyncio.run(visit(url, runs, num_visitors, seconds))
            finally:
                ended.set()
                writer.join()
                memory.join()
        result["visitors"] |= {"server_mib": memory.now_mib, "peak_mib": memory.peak_mib}
    result["visitors"] |= {"num_visitors": num_visitors, "num_runs": num_runs, "num_events": num_events}
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and save where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--dry-run", action="store_true", help="small sizes, to see that it works")
    asked = parser.parse_args(arguments)
    sizes = (2, 60_000, 3, 4.0, 1) if asked.dry_run else (10, 100_000, 20, 60.0, 5)
    result = {**circumstances(["gradio", "altair"]), **measure(*sizes)}
    print(json.dumps(result, indent=2))
    visitors = result["visitors"]
    is_within = visitors["peak_mib"] < LIMIT_MIB and visitors["median_seconds"] < LIMIT_SECONDS
    print(f"{'within' if is_within else 'OVER'} the limits of {LIMIT_MIB} MiB and {LIMIT_SECONDS} s", file=sys.stderr)
    if asked.save:
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
