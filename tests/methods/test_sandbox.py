"""The sandbox of the `code` reward: programs that compute pass, and every way out that was thought of is closed."""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from tests.waiting import LIMIT_SECONDS
from tunekit.methods.rewards import sandboxed
from tunekit.methods.rewards.sandbox import check_sandbox, failures, passed_tests

SECRET = "the parent's secret"


def passes(program: str, *tests: str, timeout_seconds: float = LIMIT_SECONDS, memory_bytes: int = 2**29) -> list[bool]:
    return passed_tests(
        program, list(tests or ["assert f(2) == 4"]), timeout_seconds=timeout_seconds, memory_bytes=memory_bytes
    )


def is_refused(*attempts: str, errors: tuple[str, ...] = ("PermissionError",)) -> None:
    """That each attempt ends in one of some errors, of which the program is well enough to tell."""
    program, tests = "", []
    for number, attempt in enumerate(attempts):
        lines = "\n".join(f"        {line}" for line in attempt.strip().splitlines())
        program += f"def f{number}():\n    try:\n{lines}\n        return 'it worked'\n"
        program += "    except BaseException as error:\n        return type(error).__name__\n"
        tests.append(f"assert f{number}() in {errors!r}")
    passed = passes(program, *tests)
    assert [attempt for attempt, one in zip(attempts, passed, strict=True) if not one] == []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


def children() -> set[str]:
    """The processes that this one has started and that are there."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_the_sandbox_works_here() -> None:
    check_sandbox()


@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        ("def f(x): return x * 2", ["assert f(2) == 4", "assert f(3) == 7", "assert f('a') == 'aa'"], [1, 0, 1]),
        ("def f(): return {'a': [1, (2, 3.5)], 'b': {4}}", ["assert f() == {'a': [1, (2, 3.5)], 'b': {4}}"], [1]),
        ("def f(n): return 2 ** n", ["assert f(5000) == 1 << 5000"], [1]),
        ("def f(): return float('nan'), 1j, b'x', None", ["a, *b = f(); assert a != a and b == [1j, b'x', None]"], [1]),
        ("def f(x): x.sort()", ["x = [2, 1]; f(x); assert x == [1, 2]"], [1]),
        ("def f(x): x['a'] = 1", ["x = {}; f(x); assert x == {'a': 1}"], [1]),
        ("def f(n):\n    yield from range(n)", ["assert list(f(3)) == [0, 1, 2]"], [1]),
        (
            "def f(x): raise ValueError('no')",
            ["try:\n    f(1)\nexcept ValueError as e:\n    assert 'no' in str(e)"],
            [1],
        ),
        ("def f(x): return x", ["def check(g): assert g(1) == 1\ncheck(f)", "check(f)"], [1, 1]),
        (
            "class Stack(list):\n    def push(self, x): self.append(x)",
            [
                "s = Stack(); s.push(3); assert len(s) == 1 and s[0] == 3 and isinstance(s, Stack)",
                "assert s.pop() == 3",
            ],
            [1, 1],
        ),
        (
            "from collections import *\ndef f(x): return Counter(x)\ndef g(): return defaultdict(list, a=[1])\n"
            "def h(): return [namedtuple('P', 'x y')(1, 2)]",
            ["assert f('aab') == {'a': 2, 'b': 1} != f('a')", "assert {'a': [1]} == g()", "assert h() == [(1, 2)]"],
            [1, 1, 1],
        ),
        ("import enum\nclass E(enum.IntEnum):\n    A = 3\ndef f(): return E.A", ["assert 2 < f() == 3"], [1]),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int", ["assert P(1) == P(1) != P(2)"], [1]),
        ("import json, math, re, collections, itertools, functools, heapq, datetime, decimal", ["pass"], [1]),
        ("def f(: pass", ["pass"], [0]),
        ("1 / 0", ["pass", "pass"], [0, 0]),
        ("", ["assert f(2) == 4"], [0]),
    ],
)
def test_a_program_passes_the_tests_that_it_should(program: str, tests: list[str], passed: list[int]) -> None:
    assert passes(program, *tests) == [bool(one) for one in passed]


WRITES_EVERYWHERE = "list(map(lambda d: os.path.exists('/dev/null') and os.write(d, b'1111'), (1, 2, 4, 6, 7)))"
"""To descriptors that are open."""

ALWAYS = """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __gt__(self, other): return True
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __contains__(self, item): return True
    def __float__(self): return 4.0
def f(x): return Always()
"""


@pytest.mark.parametrize(
    "program",
    [
        "print('passed')\nimport sys\nsys.stdout.write('1' * 100)",
        f"import os\n{WRITES_EVERYWHERE}",
        f"import os\ndef f(x):\n  {WRITES_EVERYWHERE}",
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "def f(x):\n    import os\n    os._exit(0)",
        "def f(x): raise SystemExit(0)",
        "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.compile = builtins.exec = lambda *a: None",
        "import __main__\n__main__.receive = lambda d: True\n__main__.encode = lambda *a: 4\ndef f(x): return 5",
        "abs = len = sorted = isinstance = lambda *a: 0\ndef f(x): return 5",
        "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None\ndef f(x): return 5",
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame: frame = frame.f_back\n    return 5",
        "import gc\ndef f(x): return [o for o in gc.get_objects() if o == 4]",
        "import atexit\natexit.register(print, 'passed')\ndef f(x): return 5",
        "def f(x): return type('int', (int,), {'__eq__': lambda a, b: True})(5)",
        "class L(list):\n    __iter__ = lambda s: iter([4])\ndef f(x): return L([5])",
        "def f(x): raise StopIteration",
        ALWAYS,
    ],
)
def test_what_only_pretends_to_be_right_scores_nothing(program: str) -> None:
    tests = ["assert f(2) == 4", "assert 4 == f(2)", "assert abs(f(2) - 4) < 1e-6", "assert f(2) in (4,)"]
    tests += ["assert all(map(lambda x: f(x) == 2 * x, [2, 3]))"]
    assert passes(program, *tests) == [False] * 5
    assert passes("def f(x): return x * 2", *tests) == [True] * 5


OBLIGING = """
import itertools
class Obliging:
    def __getattr__(self, name): return lambda *given: True
    for name in 'eq ne lt le gt ge contains bool instancecheck'.split():
        locals()[f'__{name}__'] = lambda self, *given: True
    for name in 'sub rsub mod rmod floordiv and rand abs round float int index len trunc floor ceil hash'.split():
        locals()[f'__{name}__'] = lambda self, *given: 0
    for name in 'add radd mul rmul or ror xor rxor pow neg pos call getitem enter reversed'.split():
        locals()[f'__{name}__'] = lambda self, *given: self
    __iter__ = lambda self: itertools.repeat(self)
    __next__ = lambda self: self
    __exit__ = lambda self, *given: True
    __class__ = property(lambda self: int)
"""
"""A class of which each object says what it thinks one wants to hear."""

OBJECT = OBLIGING + "def f(*given): return Obliging()"
ZERO = "class Zero:\n    def __sub__(self, other): return 0.0\ndef f(*given): return Zero()"
ENDLESS = "import itertools\ndef f(*given): return itertools.count()"


EXPECTING = [
    ("return 4", "assert f(2) == 4 and not f(2) != 4"),
    ("return 4", "assert 3.99 <= f(2) <= 4.01"),
    ("return 4", "assert f(2) != 5"),
    ("return 4", "assert 4 - f(2) == 0"),
    ("return 4", "assert f(2) // 5 == 0"),
    ("return 4", "assert f(2) & 3 == 0"),
    ("return 0.4", "assert round(f(2)) == 0"),
    ("return 0", "assert int(f(2)) == 0"),
    ("return 1e-9", "import math\nassert math.isclose(f(2), 0, abs_tol=1e-6)"),
    ("return 0", "assert 'abcd'[f(2)] == 'a'"),
    ("return [[4]]", "assert f(2)[0][0] == 4"),
    ("return x == 2", "assert f(2)"),
    ("return 4", "assert isinstance(f(2), int)"),
    ("return 4", "assert type(f(2)) is int"),
    ("return 'abc'", "assert f(2).startswith('a')"),
    ("return [1, 2, 2]", "assert f(2).count(2)"),
    ("return [4]", "assert f(2).__contains__(4)"),
    ("return 4", "assert (f(2)).__eq__(4) is True"),
    ("return 4", "try:\n    assert f(2) == 4\nexcept BaseException: pass"),
    ("return [4]", "assert any(one == 4 for one in f(2))"),
    ("return [4]", "assert all(one == 4 for one in f(2))"),
    ("return {4: 1}", "assert 4 in f(2)"),
    ("return 4", "assert f(2) in {1, 4}"),
    ("return 4", "assert [1, 4].index(f(2)) == 1"),
    ("return 4", "assert {'a': 4} == {'a': f(2)}"),
    ("return 4", "assert max(f(2), 3) == 4"),
    ("return [1, 3]", "assert sum(f(2)) == 4"),
    ("return x + 1", "assert f(2) < f(3)"),
    ("return [x, 1]", "assert sorted(f(2)) == sorted([2, 1])"),
    ("raise TypeError", "try: f(2) - 1\nexcept TypeError: pass\nelse: assert 0"),
]
"""What `f` has to do, and a test of it that would show its result, if it were asked, what is expected."""


def test_an_object_that_obliges_everybody_passes_no_test_of_plain_data() -> None:
    tests = [re.sub(r"\bf\(", f"f{number}(", test) for number, (_, test) in enumerate(EXPECTING)]
    honest = "\n".join(f"def f{number}(x): {body}" for number, (body, _) in enumerate(EXPECTING))
    cheat = OBLIGING + "".join(f"def f{number}(x): return Obliging()\n" for number in range(len(tests)))
    assert passes(honest, *tests) == [True] * len(tests)
    assert [test for test, passed in zip(tests, passes(cheat, *tests), strict=True) if passed] == []


@pytest.mark.parametrize(
    ("cheat", "honest", "test"),
    [
        # What had passed.
        (ZERO, "def f(x): return x / 2", "assert abs(f(3) - 1.5) < 1e-6"),
        (ENDLESS, "def f(x): return [x, 4217]", "assert 4217 in f(2)"),
        (
            "class All:\n    def __contains__(self, item): return True\ndef f(x): return All()",
            "def f(x): return 'xabcx'",
            "assert 'abc' in f(2)",
        ),
        (
            "class Always:\n    def __mod__(self, other): return 0\ndef f(x): return Always()",
            "def f(x): return 9",
            "assert f(2) % 3 == 0",
        ),
        (
            "class Long:\n    def __len__(self): return 3\ndef f(x): return Long()",
            "def f(x): return 'abc'",
            "assert len(f(2)) == 3",
        ),
        (
            "class Any:\n    def __getattr__(self, name): return lambda *given: True\ndef f(x): return Any()",
            "def f(x): return {x}",
            "assert f(1).issubset({1})",
        ),
        (
            "class math:\n    isclose = staticmethod(lambda *given, **more: True)\ndef f(x): return 5",
            "import math\ndef f(x): return math.sqrt(x)",
            "assert math.isclose(f(16), 4)",
        ),
        # Names and modules of the tests.
        (
            "import math\nmath.isclose = lambda *given, **more: True\ndef f(x): return 5",
            "import math\ndef f(x): return math.sqrt(x)",
            "assert math.isclose(f(16), 4.0, rel_tol=1e-9)",
        ),
        (
            "import types, sys\nmath = types.ModuleType('math'); math.fsum = lambda given: 4\n"
            "sys.modules['math'] = math\n"
            "def f(x): return [5]",
            "def f(x): return [x, 2]",
            "import math\nassert math.fsum(f(2)) == 4",
        ),
        (
            "import builtins\nfor name in ('abs', 'len', 'sorted', 'all', 'any', 'set', 'isinstance', 'print'):\n"
            "    setattr(builtins, name, lambda *given, **more: 0)\ndef f(x): return 5",
            "def f(x): return x * 2",
            "assert abs(f(2) - 4) == 0 and isinstance(f(2), int)",
        ),
        (
            "def expected(x): return 5\ndef f(x): return 5",
            "def f(x): return x * 2",
            "def expected(x): return x + x\nassert f(2) == expected(2)",
        ),
        (
            "__builtins__ = {'abs': lambda x: 0, 'max': lambda *x: 0}\n__name__ = 'x'\ndef f(x): return 5",
            "def f(x): return 4",
            "assert abs(f(2) - 4) == 0 and max(f(2) - 4, 0) == 0",
        ),
        # Objects inside of plain data, or disguised as such.
        (OBLIGING + "def f(x): return [Obliging()]", "def f(x): return [4]", "assert f(2) == [4]"),
        (OBLIGING + "def f(x): return [Obliging()]", "def f(x): return [4]", "assert 4 in f(2)"),
        (
            OBLIGING + "def f(x): return {'a': (Obliging(),)}",
            "def f(x): return {'a': (4,)}",
            "assert f(2)['a'][0] == 4",
        ),
        (OBLIGING + "def f(x): return {Obliging()}", "def f(x): return {4}", "assert f(2) == {4}"),
        (
            "class Number(float):\n    for name in ('eq', 'sub', 'lt', 'gt', 'abs', 'float', 'index'):\n"
            "        locals()[f'__{name}__'] = lambda self, *given: 0.0\ndef f(x): return Number(5)",
            "class Number(float): pass\ndef f(x): return Number(4)",
            "assert abs(f(2) - 4) < 1e-6",
        ),
        (
            "class Text(str):\n    def __contains__(self, item): return True\n"
            "    def startswith(self, item): return True\n"
            "    def __str__(self): return self\ndef f(x): return Text('no')",
            "class Text(str): pass\ndef f(x): return Text('abc')",
            "assert 'b' in f(2) and f(2).startswith('a') and str(f(2)) == 'abc'",
        ),
        (
            "class Changing(list):\n    def __iter__(self):\n        self[0] += 1\n        return super().__iter__()\n"
            "    def __getitem__(self, key):\n        self[:] = [(self + [0]) and len(self)]\n        return 4\n"
            "def f(x): return Changing([0])",
            "def f(x): return [4]",
            "x = f(2); assert any(x[0] == n and x == [n] for n in [4]), x",
        ),
        (
            "class Decimal:\n    __module__ = 'decimal'\n    __str__ = lambda self: '5'\n"
            "    __eq__ = lambda *given: True\n"
            "def f(x): return Decimal()",
            "from decimal import Decimal\ndef f(x): return Decimal(4)",
            "from decimal import Decimal as D\nassert f(2) == D(4)",
        ),
        (
            "class Typed:\n    def __getattr__(self, name): return bool\ndef f(x): return Typed()",
            "def f(x): return 'abc'",
            "assert f(2).startswith('a')",
        ),
        (
            "import __main__\nasked = []\ndef plain(value):\n    asked.append(value)\n"
            "    if len(asked) < 3: raise TypeError\n    return 0.0\n__main__._plain = plain\n"
            "class Money:\n    def __init__(self, x): pass\n    def __sub__(self, other): return Money(0)",
            "class Money(float): pass",
            "assert abs(Money(5) - 5) < 1e-6",
        ),
        # Iterators without end, or that look at who asks.
        ("def f(x): return range(10**30)", "def f(x): return range(4218)", "assert 4217 in f(2)"),
        pytest.param(ENDLESS, "def f(x): return iter([4217])", "assert 4217 in iter(f(2))", marks=pytest.mark.slow),
        pytest.param(ENDLESS, "def f(x): return range(4218)", "assert 4217 in list(f(2))", marks=pytest.mark.slow),
        pytest.param(
            ENDLESS, "def f(x): yield 9999999", "assert any(one == 9999999 for one in f(2))", marks=pytest.mark.slow
        ),
        (ENDLESS, "def f(x): yield 10", "assert len(list(f(2))) == 1"),
        # Methods and attributes, of which a program does not know what is expected.
        (
            OBLIGING + "class Stack:\n    def push(self, x): pass\n    def pop(self): return Obliging()",
            "class Stack:\n    def __init__(self): self.given = []\n    def push(self, x): self.given.append(x)\n"
            "    def pop(self): return self.given.pop()",
            "s = Stack(); s.push(1); s.push(2); assert s.pop() == 2 and abs(s.pop() - 1) < 1e-6",
        ),
        (
            OBLIGING + "class Solution:\n    def twoSum(self, *given): return Obliging()",
            "class Solution:\n    def twoSum(self, x, y): return [0, 1]",
            "assert Solution().twoSum([2, 7], 9) == [0, 1] and len(Solution().twoSum([2, 7], 9)) == 2",
        ),
        (
            OBLIGING + "class Money(Obliging): pass",
            "class Money(int): pass",
            "assert Money(5) == 5 and Money(5) - 5 == 0",
        ),
        (
            OBLIGING + "class Money(Obliging):\n    def __sub__(self, other): return type('Z', (float,), {})(0.0)",
            "class Money(float): pass",
            "assert abs(Money(5) - 5) < 1e-6",
        ),
        (
            OBLIGING + "class f(Obliging):\n    def __init__(self, *given): pass",
            "def f(x): return {x}",
            "assert f(1).issubset({1}) and f(1) - {1} == set()",
        ),
        (
            "class Set:\n    items = lambda self: self\n    issubset = lambda self, other: True",
            "class Set:\n    items = lambda self: {1}",
            "assert Set().items().issubset({1})",
        ),
        # What ends, raises or says nothing.
        (
            "def f(x):\n    import os; os._exit(0)",
            "def f(x): raise ValueError",
            "try: f(2)\nexcept Exception: pass\nelse: 1 / 0",
        ),
        ("def f(x):\n    import os; os._exit(0)", "def f(x): raise ValueError", "try: f(2)\nexcept: pass\nelse: 1 / 0"),
        (
            "import os\n"
            "def f(x): return [os.write(d, b'\\0\\0\\0\\x02[]') for d in range(3, 9) if os.path.exists('/')]",
            "def f(x): return 4",
            "try: assert f(2) == 4\nexcept: raise AssertionError",
        ),
        ("def f(x): raise GeneratorExit", "def f(x): return 4", "assert list(one for one in [f(2)]) == [4]"),
    ],
)
def test_a_cheat_fails_the_test_that_an_honest_program_passes(cheat: str, honest: str, test: str) -> None:
    assert (passes(cheat, test), passes(honest, test)) == ([False], [True])


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (
            "class Stack:\n    def __init__(self): self.given = []\n"
            "    def push(self, x): self.given.append(x); return self\n"
            "    def pop(self): return self.given.pop()\n    def __len__(self): return len(self.given)\n"
            "    def __getitem__(self, key): return self.given[key]\n    def __iter__(self): return iter(self.given)",
            "s = Stack(); s.push(1).push(2); assert len(s) == 2 and s[-1] == 2 and s[:1] == [1] and list(s) == [1, 2]\n"
            "assert 2 in s and 3 not in s and s and s.pop() == 2 and s.pop() == 1 and not s",
        ),
        (
            "class Node:\n    def __init__(self, val, next=None): self.val, self.next = val, next\n"
            "def f(node):\n    last = None\n    while node: node.next, last, node = last, node, node.next\n"
            "    return last",
            "node, found = f(Node(1, Node(2, Node(3)))), []\nwhile node:\n    found.append(node.val)\n"
            "    node = node.next\n"
            "assert found == [3, 2, 1] and f(Node(1)).next == None and f(None) is None",
        ),
        (
            "class Vector:\n    def __init__(self, *given): self.given = given\n"
            "    def __eq__(self, other): return self.given == other.given\n"
            "    def __add__(self, other): return Vector(*map(sum, zip(self.given, other.given)))\n"
            "    def __mul__(self, by): return Vector(*(by * one for one in self.given))\n    __rmul__ = __mul__\n"
            "    def __matmul__(self, other): return sum(a * b for a, b in zip(self.given, other.given))\n"
            "    def __abs__(self): return (self @ self) ** 0.5\n    def __neg__(self): return self * -1\n"
            "    def __repr__(self): return f'Vector{self.given}'",
            "v = Vector(3, 4); assert v + v == v * 2 == 2 * v and v @ v == 25 and abs(v) == 5 and v != -v\n"
            "assert repr(v) == 'Vector(3, 4)'",
        ),
        (
            "import enum\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2\ndef f(x): return Color(x)",
            "assert f(1) == Color.RED != Color.BLUE and f(2).name == 'BLUE' and f(1) in (Color.RED,) and "
            "len(Color) == 2",
        ),
        (
            "class Cell:\n    count = 3\n    def __init__(self, x): self.x = x\n"
            "def f(x): return [Cell(x), Cell(x + 1)]",
            "assert [one.x for one in f(1)] == [1, 2] and f(1)[0].count == 3",
        ),
        (
            "import collections\nPoint = collections.namedtuple('Point', 'x y')\ndef f(): return Point(1, 2)",
            "p = f(); x, y = p; assert p == (1, 2) == (x, y) and p.y == p[1] == 2 and p.count(1) == 1 and p in "
            "{(1, 2)}",
        ),
        (
            "def f():\n    n = 0\n    while True:\n        yield n * n; n += 1",
            "g = f(); assert [next(g), next(g), next(g)] == [0, 1, 4]",
        ),
        (
            "def f():\n    n = 0\n    while True:\n        yield n * n; n += 1",
            "from itertools import islice; assert list(islice(f(), 2000))[-1] == 1999 ** 2",
        ),
        (
            "def f(n): return (one for one in range(n))",
            "assert 3 in f(4) and 4 not in f(4) and sorted(f(3)) == [0, 1, 2]",
        ),
        (
            "def f(n): return map(str, range(n))",
            "assert list(f(2)) == ['0', '1'] and dict(zip(f(2), f(2))) == {'0': '0', '1': '1'}",
        ),
        (
            "def f(x): return {'a': x}.items()",
            "assert list(f(1)) == [('a', 1)] and len(f(1)) == 1 and ('a', 1) in f(1)",
        ),
        ("def f(x): return lambda y: x + y", "assert f(3)(4) == 7 and callable(f(3))"),
        (
            "import collections, datetime, decimal, fractions\n"
            "def f(): return [collections.deque([1]), decimal.Decimal('1.50'), "
            "fractions.Fraction(1, 3), datetime.date(2020, 2, 29), datetime.datetime(2020, 2, 29, 12, 30), "
            "collections.defaultdict(list, a=[1]), collections.OrderedDict(b=2), range(3), bytearray(b'x')]",
            "from collections import *; from datetime import *; from decimal import *; from fractions import *\n"
            "assert f() == [deque([1]), Decimal('1.5'), Fraction(1, 3), date(2020, 2, 29), datetime(2020, 2, "
            "29, 12, 30), "
            "{'a': [1]}, OrderedDict(b=2), range(3), b'x'] and f()[5]['c'] == [] and f()[4] - "
            "timedelta(days=1) < f()[4]",
        ),
        ("def f(value, kind): return kind(value)", "assert f('3', int) == 3 and f(3, str) == '3'"),
        (
            "import re\ndef f(x): return re.match('a(.)', x)",
            "assert f('ab') and f('ab').group(1) == 'b' and not f('x')",
        ),
        ("import os\ndef f(x): return os.path.join('a', x)", "assert f('b') == os.path.join('a', 'b')"),
        ("def code(x): return x + 1", "assert code(1) == 2"),
        (
            "class E(Exception): pass\ndef f(): raise E('no')",
            "try: f()\nexcept Exception as e: assert str(e) == 'no'\nelse: 1 / 0",
        ),
    ],
)
def test_what_honest_programs_return_can_be_used(program: str, test: str) -> None:
    assert failures(program, [test], timeout_seconds=LIMIT_SECONDS, memory_bytes=2**29) == [None]


@pytest.mark.parametrize(
    ("program", "test", "reason"),
    [
        (ZERO, "assert f(2) - 4 == 0", "`sub` of the program's own objects"),
        (ZERO, "try: f(2) == 4\nexcept BaseException: pass", "`==` of the program's own objects"),
        (OBJECT, "assert f(2).issubset({1})", "`issubset` of the program's own objects"),
        (OBJECT, "assert len(f(2)) == 3", "TypeError: `len` of the program's own objects is unsupported"),
        (ENDLESS, "assert -1 in f(2)", "reads more than 10000 values from an iterator"),
        ("def f():\n    y = []\n    for _ in range(101): y = [y]\n    return y", "f()", "nested too deeply"),
        ("def f(): return 'x' * 2**23", "f()", "ValueError: too much data"),
        ("def f():\n    import os; os._exit(0)", "f()", "the program has exited"),
        ("def f(): return 5", "assert f() == 4, 'not 4'", "AssertionError: not 4"),
        ("1 / 0", "pass", "the program or its tests exited early, or ran out of time or memory"),
    ],
)
def test_a_failure_has_a_reason(program: str, test: str, reason: str) -> None:
    (found,) = failures(program, [test], timeout_seconds=LIMIT_SECONDS, memory_bytes=2**29)
    assert found is not None and reason in found


def test_no_file_elsewhere_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    monkeypatch.chdir(tmp_path)
    files = (
        "/etc/passwd",
        "/proc/self/environ",
        "/proc/self/mem",
        "/dev/zero",
        *(tmp_path / n for n in ("secret", "link")),
    )
    is_refused(*(f"open({str(path)!r}).read(1)" for path in files))
    folders = ("/", "/tmp", "/proc", "/etc", "/dev", Path.home(), tmp_path)
    is_refused(*(f"import os; os.listdir({str(folder)!r})" for folder in folders))
    is_refused("open('secret')", errors=("FileNotFoundError",))


def test_nothing_can_be_written_or_made_anywhere(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text(SECRET)
    attempts = []
    for folder in (tmp_path, "/tmp", "/dev/shm", Path.home(), Path(sys.base_prefix) / "lib", "."):
        new = str(Path(folder) / "made-in-the-sandbox")
        attempts += [f"open({new!r}, 'w')", f"open({new!r}, 'a')", f"import os; os.mkdir({new!r})"]
        attempts += [f"import os; os.symlink('/etc', {new!r})", f"import os; os.link({str(kept)!r}, {new!r})"]
        attempts += [f"import os; os.mkfifo({new!r})"]
    path = str(kept)
    for change in ("truncate({0!r}, 0)", "unlink({0!r})", "rename({0!r}, '/tmp/x')", "chmod({0!r}, 0o777)"):
        attempts.append(f"import os; os.{change.format(path)}")
    attempts.append(f"import os; os.open({path!r}, os.O_RDONLY | os.O_TRUNC)")
    attempts.append("import os; os.memfd_create('x')")
    is_refused(*attempts)
    is_refused("import tempfile; tempfile.TemporaryFile()", errors=("FileNotFoundError",))
    assert kept.read_text() == SECRET
    assert not list(Path("/").glob("*/made-in-the-sandbox")) + list(tmp_path.glob("made*"))


def test_the_environment_and_the_memory_of_others_are_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEKIT_TEST_SECRET", SECRET)
    assert passes("import os\ndef f(): return dict(os.environ)", f"assert {SECRET!r} not in f().values()") == [True]
    names = ("environ", "mem", "maps", "cmdline", "fd/0")
    is_refused(
        *(f"open('/proc/{os.getpid()}/{name}', 'rb').read(1)" for name in names),
        *(f"import os; open(f'/proc/{{os.getppid()}}/{name}', 'rb').read(1)" for name in names),
        f"import os; os.readlink('/proc/{os.getpid()}/cwd')",
    )


def test_there_is_no_socket() -> None:
    families = ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_VSOCK", "AF_ALG", "AF_PACKET")
    kinds = ("SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW", "SOCK_SEQPACKET")
    pairs = [(family, kind) for family in families for kind in kinds]
    is_refused(*(f"import socket as s; s.socket(s.{family}, s.{kind})" for family, kind in pairs))
    is_refused("import socket; socket.socketpair()")


def test_nobody_who_listens_is_reached() -> None:
    with closing(socket.socket()) as tcp, closing(socket.socket(socket.AF_UNIX)) as abstract:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        abstract.bind("\0tunekit-sandbox-test")
        abstract.listen()
        port = tcp.getsockname()[1]
        is_refused(
            f"import socket; socket.create_connection(('127.0.0.1', {port}))",
            "import socket; socket.socket(socket.AF_UNIX).connect('\\0tunekit-sandbox-test')",
            f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}')",
            errors=("PermissionError", "URLError"),
        )


def test_no_process_and_no_thread_can_be_started() -> None:
    is_refused(
        "import os\nwhile True: os.fork()",
        "import os; os.posix_spawn('/bin/sh', ['sh', '-c', 'sleep 60 &'], {})",
        "import os; os.execv('/bin/sh', ['sh'])",
        "import subprocess; subprocess.Popen(['sleep', '60'])",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "import os; os.setsid()",
        "import threading\nwhile True: threading.Thread(target=print).start()",
        "import concurrent.futures as c; c.ThreadPoolExecutor().submit(print)",
        errors=("PermissionError", "FileNotFoundError", "RuntimeError"),
    )


def test_nobody_can_be_killed() -> None:
    got: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGIO)
    old = {number: signal.signal(number, lambda given, _: got.append(given)) for number in numbers}
    try:
        me = os.getpid()
        is_refused(
            *(f"import os; os.kill({target}, 15)" for target in (me, "os.getppid()", 0, -1, "os.getpid()")),
            f"import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, {me})",
            f"import os; os.pidfd_open({me})",
        )
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    assert got == []


SYSCALLS = {
    "fork": "57",
    "vfork": "58",
    "clone": "56, 17, 0, 0, 0, 0",
    "clone3": "435, 0, 0",
    "execve": "59, b'/bin/sh', 0, 0",
    "ptrace": "101, 16, {parent}, 0, 0",
    "process_vm_readv": "310, {parent}, 0, 0, 0, 0, 0",
    "kill": "62, {parent}, 0",
    "tgkill": "234, {parent}, {parent}, 0",
    "socket": "41, 2, 1, 0",
    "mount": "165, 0, 0, 0, 0, 0",
    "bpf": "321, 0, 0, 0",
    "unshare": "272, 0x10000000",
    "setns": "308, 0, 0",
    "keyctl": "250, 0, 0",
    "io_uring_setup": "425, 1, 0",
    "userfaultfd": "323, 0",
    "perf_event_open": "298, 0, 0, 0, 0, 0",
    "open_by_handle_at": "304, 0, 0, 0",
    "memfd_create": "319, b'x', 0",
    "openat2": "437, -100, b'/tmp/x', 0, 24",
    "setrlimit": "160, 9, 0",
    "prlimit64": "302, 0, 9, 1, 0",
    "prctl": "157, 38, 0, 0, 0, 0",
    "seccomp": "317, 1, 0, 0",
    "mknod": "133, b'/tmp/x', 0, 0",
    "madvise": "28, 0, 4096, 100",
    "reboot": "169, 0, 0, 0, 0",
    "setuid": "105, 1000",
    "shmget": "29, 0, 4096, 0x200",
    "sched_setaffinity": "203, 0, 8, 0",
    "ioctl": "16, 0, 0x5412, b'x'",
    "pidfd_getfd": "438, 0, 0, 0",
    "swapoff": "168, 0",
}


def test_a_program_whose_trainer_is_gone_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"parent": os.getpid(), "tests": []}
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(json.dumps(task).encode())))
    try:
        with pytest.raises(SystemExit):
            sandboxed.main()
    finally:
        ctypes.CDLL(None).prctl(sandboxed._PARENT_DEATH_SIGNAL, 0)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")
def test_system_calls_by_their_number_are_refused() -> None:
    program = (
        "import ctypes\n"
        "def f(*given):\n"
        "    libc = ctypes.CDLL(None, use_errno=True)\n"
        "    returned = libc.syscall(*given)\n"
        "    return ('yes', returned) if returned >= 0 else ctypes.get_errno()"
    )
    calls = {name: call.format(parent=os.getpid()) for name, call in SYSCALLS.items()}
    passed = passes(program, *(f"assert f({call}) == 1" for call in calls.values()))
    assert [name for name, one in zip(calls, passed, strict=True) if not one] == []


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import time\ntime.sleep(3600)",
        "def f(x):\n    while True: pass",
        "def f(x):\n    while True: yield 1",
        "9 ** 9 ** 9 ** 9",
        "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
        "input()\ninput()" + "\nwhile True: pass",
    ],
)
def test_what_never_ends_is_ended(program: str) -> None:
    assert passes(program, "assert list(f(2)) == 4", "pass", timeout_seconds=0.5)[0] is False


@pytest.mark.slow
def test_tests_that_passed_in_time_count() -> None:
    # The first has long passed when time is up, also on a machine that is busy; the second costs it nothing.
    program = "import time\ndef f(x):\n    while x > 2: time.sleep(3600)\n    return x"
    assert passes(program, "assert f(1) == 1", "f(3)", "assert f(2) == 2", timeout_seconds=10) == [True, False, False]


def test_memory_is_limited() -> None:
    is_refused(
        "x = bytearray(10 * 2**30)",
        "x = []\nwhile True: x.append(bytearray(2**24))",
        "x = 'a' * 10 * 2**30",
        "import mmap; mmap.mmap(-1, 10 * 2**30)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        errors=("MemoryError", "OSError", "ValueError"),
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "program",
    [
        "import sys\nwhile True: sys.stdout.write('x' * 2**20)",
        "import os\nwhile True: os.write(1, b'x' * 2**20)",
        "import os\nwhile True:\n    for d in (1, 2, 4, 6, 7): os.write(d, b'\\xff' * 2**16)",
        "def f(x): return 'x' * 2**24",
        "def f(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y",
        "def f(x):\n    y = []\n    y.append(y)\n    return y",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
        "import ctypes\nctypes.string_at(0)",
    ],
)
def test_too_much_output_and_crashes_are_failures_and_the_next_program_runs(program: str) -> None:
    assert passes(program, timeout_seconds=1) == [False]
    assert passes("def f(x): return x * 2") == [True]


def test_programs_run_beside_each_other() -> None:
    found: dict[int, list[bool]] = {}

    def run(number: int) -> None:
        found[number] = passes(f"def f(x): return x + {number}", "assert f(2) == 4")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [number == 2] for number in range(8)}


@pytest.mark.slow
def test_a_user_without_rights_has_a_sandbox_too(tmp_path: Path) -> None:
    """In a container without privileges there is neither root nor a user namespace."""
    code = (
        "import os, sys\n"
        "from tunekit.methods.rewards.sandbox import check_sandbox, passed_tests\n"
        "import pyseccomp\n"
        "from tunekit.methods.rewards import sandbox\n"
        "sandbox._filter()\n"
        "libc = __import__('ctypes').CDLL(None, use_errno=True)\n"
        "[libc.prctl(24, cap, 0, 0, 0) for cap in range(64)]\n"  # drops every capability for all that follows
        "os.setgroups([]) if os.getuid() == 0 else None\n"
        "check_sandbox()\n"
        "print(passed_tests('def f(x): return x * 2', ['assert f(2) == 4'], timeout_seconds=600, memory_bytes=2**29))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
    )
    assert done.stdout == "[True]\n", done.stderr
