"""Data that would take forever or all memory if a reader were careless: told in full, in time and memory in proportion.

Each file is read by a process of its own, whose time is limited far above what it takes.
"""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.data.memory import STATUS
from tests.waiting import LIMIT_SECONDS

LENGTH = 50_000_000
LONG = b"x" * LENGTH
FIRST = b'{"text":"a"}\n'
READ = """
import json, sys
from tests.data.memory import STATUS, peak_mib
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection
before = peak_mib() if STATUS.exists() else 0
try:
    rows = load_data(DataSection(train=sys.argv[1])).train[0]
    said = [len(rows), rows.place(len(rows) - 1), sum(len(row["text"]) for row in rows.rows)]
except DataError as error:
    said = str(error)
print(json.dumps([said, peak_mib() - before if STATUS.exists() else 0]))
"""


def read(path, content: bytes) -> tuple[object, int]:
    """What is said of a file, or its rows, their last place and their length; and the memory it took in MiB."""
    path.write_bytes(content)
    command = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    path.unlink()  # pytest keeps the folders of its last runs
    assert done.returncode == 0, done.stderr
    said, grown_mib = json.loads(done.stdout)
    return (said.replace(str(path), path.name) if isinstance(said, str) else said), grown_mib


LINES: dict[str, tuple[str, Callable[[], bytes], object]] = {
    "jsonl": ("a.jsonl", lambda: FIRST + b'{"text":"' + LONG + b'"}\n' + FIRST, 3),
    "jsonl_not_closed": (
        "a.jsonl",
        lambda: FIRST + b'{"text":"' + LONG + b"}\n" + FIRST,
        "a.jsonl:2:9: invalid JSON: unterminated string starting at",
    ),
    "jsonl_broken_at_its_end": (
        "a.jsonl",
        lambda: FIRST + b'{"text":"' + LONG + b'" 7}\n' + FIRST,
        "a.jsonl:2:50000012: invalid JSON: expecting ',' delimiter",
    ),
    "jsonl_with_a_nul_byte": (
        "a.jsonl",
        lambda: FIRST + b'{"text":"' + LONG + b'\0"}\n',
        "a.jsonl:2:50000010: NUL byte in a text file; check whether it is a binary file, or save it as UTF-8",
    ),
    "jsonl_not_utf8": (
        "a.jsonl",
        lambda: FIRST + b'{"text":"' + LONG + b'\xff"}\n',
        "a.jsonl:2: not UTF-8 (byte 0xff at position 50000010); save the file as UTF-8",
    ),
    "json": ("a.json", lambda: b'[{"text":"a"},\n{"text":"' + LONG + b'"},\n{"text":"a"}]', 3),
    "json_not_closed": (
        "a.json",
        lambda: b'[{"text":"a"},\n{"text":"' + LONG + b"},\n]",
        "a.json:2:50000012: invalid JSON: invalid control character at",
    ),
    "csv": ("a.csv", lambda: b'text\na\n"' + LONG + b'"\na\n', 3),
    "csv_not_closed": (
        "a.csv",
        lambda: b'text\na\n"' + LONG + b"\na\n",
        "a.csv:3: unclosed quote",
    ),
    "tsv": ("a.tsv", lambda: b"text\tid\na\t1\n" + LONG + b"\t2\na\t3\n", 3),
    "txt": ("a.txt", lambda: b"a\n\n\n" + LONG + b"\n\n\na\n", 3),
    "brackets": ("a.jsonl", lambda: FIRST + b"[" * LENGTH + b"\n", "a.jsonl:2: JSON is nested too deeply"),
    "brackets_in_a_list": ("a.json", lambda: b"[" * LENGTH, "a.json:1: JSON is nested too deeply"),
    "braces": ("a.jsonl", lambda: FIRST + b'{"a":' * (LENGTH // 5), "a.jsonl:2: JSON is nested too deeply"),
    "brackets_in_a_string": (
        "a.jsonl",
        lambda: (
            b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"","tool_calls":'
            b'[{"name":"f","arguments":"' + b"[" * LENGTH + b'"}]}]}'
        ),
        "a.jsonl:1: nested too deeply",
    ),
    "commas": (
        "a.csv",
        lambda: b"text\na\n" + b"," * LENGTH + b"\n",
        "a.csv:3: 50,000,001 cells, but the header has 1; quote cells that contain a comma",
    ),
    "quotes": ("a.csv", lambda: b"text\na\n" + b'"' * LENGTH + b"\na\n", [3, "a.csv:4", LENGTH // 2 + 1]),
    "digits": (
        "a.jsonl",
        lambda: FIRST + b'{"text":1.' + b"1" * LENGTH + b"}",
        "a.jsonl:2: text must be a string, got the number 1.1111111111111112",
    ),
    "blanks": ("a.json", lambda: b" " * LENGTH + b'[{"text":"a"}]', [1, "a.json:1", 1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_a_line_of_fifty_megabytes_is_read_or_refused_in_proportion(name, tmp_path):
    file, content, answer = LINES[name]
    said, grown_mib = read(tmp_path / file, content())
    if answer == 3:
        place = {"a.csv": 4, "a.tsv": 4, "a.txt": 7}.get(file, 3)
        answer = [3, f"{tmp_path / file}:{place}", LENGTH + 2]
    elif isinstance(answer, list):
        answer = [answer[0], str(tmp_path / answer[1]), answer[2]]
    assert said == answer
    assert grown_mib < 12 * LENGTH // 2**20 or not STATUS.exists()


@pytest.mark.slow
def test_a_header_of_many_columns_is_compared_in_one_pass(tmp_path):
    header = ",".join(f"c{i}" for i in range(200_000))
    said, _ = read(tmp_path / "a.csv", f"{header},c7,\na\n".encode())
    assert said == "a.csv:1: duplicate columns c7 in the header; rename one of them"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "content", "last"),
    [
        ("a.jsonl", b"3\n" * 200_000, "a row must be an object, got the number 3"),
        ("a.csv", b"text\n" + b'"a"b\n' * 200_000, "invalid CSV: ',' expected after '\"'"),
    ],
)
def test_many_bad_rows_are_counted_and_not_kept(file, content, last, tmp_path):
    said, grown_mib = read(tmp_path / file, content)
    lines = said.splitlines()
    assert len(lines) == 6
    assert lines[4] == f"{file}:{5 if file == 'a.jsonl' else 6}: {last}"
    assert lines[5] == f"{file}: and 199,995 more invalid rows"
    assert grown_mib < 20


@pytest.mark.parametrize("depth", [400, 900, 985, 5000])
@pytest.mark.parametrize("where", ["name", "tools", "text"])
def test_deep_nesting_is_read_or_refused_but_breaks_nothing(depth, where, tmp_path):
    deep = "[" * depth + "1" + "]" * depth
    user, answer = '{"role":"user","content":"a"%s}', '{"role":"assistant","content":"b"}'
    rows = {
        "name": f'{{"messages":[{user % (f", {chr(34)}name{chr(34)}:{deep}")},{answer}]}}',
        "tools": f'{{"messages":[{user % ""},{answer}],"tools":[{{"name":"f","x":{deep}}}]}}',
        "text": f'{{"text":{deep}}}',
    }
    (tmp_path / "a.jsonl").write_text(rows[where])
    from tunekit.data.sources.load import load_data
    from tunekit.errors import DataError
    from tunekit.recipe.sections.data import DataSection

    try:
        assert len(load_data(DataSection(train=str(tmp_path / "a.jsonl"))).train[0]) == 1
        assert where != "text" and depth < 5000
    except DataError as error:
        assert "nested too deeply" in str(error) or where == "text"
