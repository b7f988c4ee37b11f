"""What the syntax tree of a program gives away, and what it does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.errors import ConfigError
from grupo.rewards import RewardRunner, no_cheating
from grupo.rewards.code.static_checks import cheating_signs

CLEAN = [
    "import math\nfrom collections import Counter, defaultdict\nprint(math.gcd(4, 6), Counter('ab').most_common(1))",
    (
        "import sys\nfor line in sys.stdin:\n    sys.stdout.write(line)\n"
        "sys.setrecursionlimit(10**6)\ninput = sys.stdin.readline"
    ),
    (
        "import collections.abc\nfrom datetime import datetime, time\n"
        "import datetime as dt\nprint(dt.time(1), collections.abc.Sized)"
    ),
    "class P:\n    def __init__(self, x): self._x = x\n    def __eq__(self, other): return self._x == other._x\n"
    "    def __repr__(self): return f'{self._x!r}'",
    "def f(x):\n    return getattr(x, 'real') + (1 if hasattr(x, 'imag') else 0)",
    "from operator import attrgetter, itemgetter\nprint(sorted([], key=attrgetter('real.imag')), itemgetter(1))",
    "from functools import lru_cache\n@lru_cache(None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)",
    "print('{0} {a.b} {_}'.replace('_', 'x'), '__class__')",
    (
        "class Queue:\n    def __init__(self): self.queue, self.token, self.copy, self.code = [], 1, 2, 3\n"
        "    def get(self): return self.queue"
    ),
    "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\nprint(P(1)._replace(x=2), P.__name__)",
    "if __name__ == '__main__':\n    print(min(map(int, input().split())))",
]

CHEATS = {
    "import os": "imports os",
    "import os.path as p": "imports os.path",
    "def f():\n    from subprocess import run": "imports subprocess",
    "import importlib": "imports importlib",
    "import ctypes, math": "imports ctypes",
    "from . import secrets": "uses a relative import",
    "from pathlib import Path\nPath('gold').read_text()": "imports pathlib",
    "import io": "imports io",
    "m = __import__('os')": "uses __import__",
    "__builtins__['open']('x')": "uses __builtins__",
    "eval('1')": "uses eval",
    "e = exec": "uses exec",
    "compile('1', '', 'eval')": "uses compile",
    "open('/etc/passwd').read()": "uses open",
    "globals()['f'] = 1": "uses globals",
    "vars()": "uses vars",
    "getattr(__builtins__, 'ev' + 'al')": "getattr with a computed name",
    "getattr(1, '__class__')": "getattr of __class__",
    "f = getattr\nf(1, 'x')": "uses getattr",
    "import operator\noperator.attrgetter('x.__globals__')": "attrgetter of x.__globals__",
    "from operator import methodcaller as m, attrgetter\nattrgetter(name)": "attrgetter with a computed name",
    "().__class__.__bases__[0].__subclasses__()": "accesses __subclasses__",
    "(lambda: 0).__globals__": "accesses __globals__",
    "(lambda: 0).__code__": "accesses __code__",
    "try: 1/0\nexcept Exception as e: e.__traceback__.tb_frame.f_back": "accesses f_back",
    "import sys\nsys.modules['os']": "uses sys.modules",
    "import sys as s\ns._getframe()": "uses sys._getframe",
    "import sys\nsys.settrace(None)": "uses sys.settrace",
    "from sys import modules": "uses sys.modules",
    "import sys\nx = sys": "uses sys itself",
    "import random\nrandom._os.system('ls')": "accesses random._os",
    "from random import _os": "accesses random._os",
    "import json\njson.codecs.open('x')": "accesses the module codecs through json",
    "from json import codecs": "accesses the module codecs through json",
    "import typing\ntyping.sys.modules": "accesses the module sys through typing",
    "from typing import sys": "accesses the module sys through typing",
    "import dataclasses as d\nd.builtins.open": "accesses the module builtins through dataclasses",
    "import enum\nenum.bltns": "accesses enum.bltns",
    "'{0.__class__}'.format(1)": "a format string that accesses hidden attributes",
    "class A:\n    def __eq__(self, other):\n        'any'\n        return True": "__eq__ always returns True",
    "def add(a, b):\n    breakpoint()": "uses breakpoint",
}


@pytest.mark.parametrize("program", CLEAN)
def test_clean_programs_show_no_sign(program):
    assert cheating_signs(program) == []


def test_cheats_are_named():
    for program, expected in CHEATS.items():
        assert any(sign.startswith(expected) for sign in cheating_signs(program)), (program, cheating_signs(program))


def test_the_list_decides():
    assert cheating_signs("import numpy as np\nnp.random.rand()\nimport numpy.linalg", ["numpy"]) == []
    assert cheating_signs("import numpy as np") == ["imports numpy"]
    assert cheating_signs("import math", ["numpy"]) == ["imports math"]
    assert cheating_signs("import os.path", ["os.path"]) == []
    assert cheating_signs("import os", ["os.path"]) == ["imports os"]


def fenced(code):
    return f"```python\n{code}\n```"


def test_the_reward_and_what_it_logs():
    reward = no_cheating(allowed=("math",), clean=0.5, cheating=-2.0)
    extras, metrics = {}, {}
    completions = [fenced("import math"), fenced("import os; eval('1')"), "no code", None, fenced("def (")]
    scores = reward(completions, log_extra=extras.__setitem__, log_metric=metrics.__setitem__)
    assert scores == [0.5, -2.0, 0.0, 0.0, 0.0] and reward.value_range == (-2.0, 0.5)
    assert extras["cheating_signs"] == ["", "imports os; uses eval", "", "", ""] and metrics == {
        "no_cheating/caught": 0.2
    }
    runner = RewardRunner(no_cheating())
    table = runner.score(prompts=["p"] * 5, completions=completions, completion_ids=[[1]] * 5, columns={})
    assert [value for (value,) in table.scores] == [0.0, -1.0, 0.0, 0.0, 0.0]
    assert no_cheating(allowed="math").allowed == ("math",)


def test_a_penalty_that_is_none_is_refused():
    for arguments in ({"cheating": 0.0}, {"clean": -2.0}, {"clean": float("nan")}):
        with pytest.raises(ConfigError, match="punishes nothing"):
            no_cheating(**arguments)


@pytest.mark.parametrize(
    "program", ["(" * 5000, "-" * 50_000 + "1", "x" * 300_000, "a\0b", "1" * 10_000, "a." * 20_000 + "b"]
)
def test_hostile_text_is_no_program(program):
    reward = no_cheating(whole_text=True)
    assert reward([program])[0] in (0.0, -1.0)


@settings(deadline=None, max_examples=200)
@given(st.text() | st.text(alphabet="import os\n()._=\"'{}"))
def test_any_text_has_a_value_in_the_range(text):
    reward = no_cheating(clean=1.0, whole_text=True)
    (value,) = reward([text])
    assert reward.value_range[0] <= value <= reward.value_range[1]
    assert value <= 0 or text.strip()
