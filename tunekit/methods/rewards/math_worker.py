"""The process that compares mathematical expressions for `maths`. It is started by its path.

It reads lines of JSON, an answer and what was expected, and writes a line for each: 1, 0, or ? where the expected
expression cannot be read. Its argument is the process that starts it, with which it ends, whatever it computes.
"""

import ctypes
import json
import logging
import os
import resource
import signal
import sys

_MEMORY_BYTES = 2**32
_PARENT_DEATH_SIGNAL = 1
_DELIMITERS = ("$", r"\boxed", r"\[", r"\(")


def main() -> None:
    """Compare until there is nothing more to read."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != int(sys.argv[1]):
            sys.exit(1)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    from math_verify import parse, verify

    logging.disable()
    print("ready", flush=True)
    for line in sys.stdin:
        answer, expected = json.loads(line)
        delimited = expected if any(sign in expected for sign in _DELIMITERS) else f"${expected}$"
        # The process that reads this ends it when it takes too long, which an alarm could not.
        expected_values = parse(delimited, parsing_timeout=None)
        if all(isinstance(expected_value, str) for expected_value in expected_values):
            print("?", flush=True)
            continue
        equal = verify(expected_values, parse(answer, parsing_timeout=None), timeout_seconds=None)
        print(int(equal), flush=True)


if __name__ == "__main__":
    main()
