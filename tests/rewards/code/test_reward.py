"""Code as a reward: what passes, what fails and as what, and what programs try in order to pass."""

from __future__ import annotations

import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.errors import ConfigError
from grupo.rewards import RewardRunner, code_reward, extract_code
from grupo.rewards.code.reward import run_tests
from grupo.rewards.code.sandbox import runner as sandbox
from grupo.rewards.code.sandbox.runner import Limits
from grupo.rewards.code.test_cases import AssertTest, FunctionTest, OutputTest, ScriptTest, read_tests, same_value

ADD = [{"function": "add", "args": [2, 3], "expected": 5}, {"function": "add", "args": [-1, 1], "expected": 0}]
FORMS = {
    "function": ADD,
    "assert": ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"],
    "script": [{"script": "for a in range(3):\n    assert add(a, a) == 2 * a"}],
}
RIGHT = "def add(a, b):\n    return a + b"
LIMITS = Limits(seconds=3.0)


def fenced(code, language="python"):
    return f"Here it is:\n```{language}\n{code}\n```\nDone."


# ---- extraction


def test_the_last_closed_block_is_the_program():
    for text, code in [
        (fenced("x = 1"), "x = 1\n"),
        (fenced("x = 1", "py"), "x = 1\n"),
        (fenced("x = 1", "Python3"), "x = 1\n"),
        (fenced("x = 1") + fenced("x = 2"), "x = 2\n"),
        (fenced("x = 1") + "\n```\noutput\n```", "x = 1\n"),
        (fenced("x = 1") + "\n```bash\nls\n```", "x = 1\n"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("```python\r\nx = 1\r\n```", "x = 1\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```python title='a'\nx = 1\n```", "x = 1\n"),
    ]:
        assert extract_code(text) == code, text
    for text in (
        *(fenced("x = 1", ""), fenced("x = 1", "cpp"), "```python\nx = 1", "```python\n\n```", "x = 1", ""),
        "inline ```python x = 1```",
    ):
        assert extract_code(text) is None, text


def test_whole_texts_are_programs_only_when_asked_and_unfenced():
    assert extract_code("x = 1", whole_text=True) == "x = 1"
    assert extract_code(fenced("x = 1"), whole_text=True) == "x = 1\n"
    assert extract_code("so:\n```cpp\nint x;\n```", whole_text=True) is None
    assert extract_code("  \n", whole_text=True) is None


# ---- reading tests


def test_forms_of_tests():
    cell = [
        {"input": "1\n", "output": "2\n", "function": None},
        {"output": "hello"},
        {"function": "f", "args": [1], "expected": None},
        {"function": "Solution().two_sum", "args": [[1]], "kwargs": {"target": 1}, "expected": [0]},
        {"assert": "assert f(1) == 2"},
        "assert f(1)\nassert not f(0), 'zero'",
        {"script": "check(f)"},
    ]
    kinds = [OutputTest, OutputTest, FunctionTest, FunctionTest, AssertTest, AssertTest, ScriptTest]
    assert [type(test) for test in read_tests(cell)] == kinds
    assert read_tests(json.dumps(cell)) == read_tests(cell)


def test_unusable_tests_say_why():
    for cell, why in [
        *((None, "NoneType instead of a list"), ([], "an empty list"), ("", "not JSON"), ("[1", "not JSON")),
        *(({"input": ""}, "a dict instead of a list"), ([3], "a int is not a test"), ([{}], "keys none")),
        *(([{"input": "1"}], "keys input"), ([{"input": 1, "output": "1"}], "must be strings")),
        ([{"function": "f"}], "keys function"),
        ([{"function": "f", "expected": 1, "arguments": [1]}], "keys arguments"),
        ([{"function": "f", "args": 3, "expected": 1}], "'args' must be a list"),
        ([{"function": "f(", "args": [], "expected": 1}], "'function' is not Python"),
        ([{"function": "f", "args": [object()], "expected": 1}], "plain values"),
        *((["f(1) == 2"], "no assert"), (["assert f(1 =="], "not Python"), ([{"script": "assert ("}], "not Python")),
    ]:
        with pytest.raises(ValueError, match=why):
            read_tests(cell)


@pytest.mark.parametrize(
    ("code", "calls", "conditions"),
    [
        ("assert f(2) == 4", ["f(2)"], ["answer_0 == 4"]),
        ("assert sorted(f([2, 1])) == [1, 2], 'no'", ["f([2, 1])"], ["sorted(answer_0) == [1, 2]"]),
        ("assert abs(f(2) - 1.5) < 1e-6", ["f(2)"], ["abs(answer_0 - 1.5) < 1e-06"]),
        ("assert not f(g(1)) and f(0) is None", ["f(g(1))", "f(0)"], ["not answer_0 and answer_1 is None"]),
        ("assert Stack([1]).pop() == 1", ["Stack([1]).pop()"], ["answer_0 == 1"]),
        ("assert len(f(1)[0]) == 2 and isinstance(f(1), list)", ["f(1)[0]", "f(1)"], None),
        ("assert math.isclose(f(1), 0.1, rel_tol=1e-3)", ["f(1)"], ["math.isclose(answer_0, 0.1, rel_tol=0.001)"]),
        (
            "assert f([x * 2 for x in range(3)]) == [0, 2, 4]",
            ["f([x * 2 for x in range(3)])"],
            ["answer_0 == [0, 2, 4]"],
        ),
        ("assert {1: f(2)} == {1: 4}", ["f(2)"], ["{1: answer_0} == {1: 4}"]),
    ],
)
def test_asserts_are_cut_between_program_and_expectation(code, calls, conditions):
    (test,) = read_tests([code])
    assert isinstance(test, AssertTest)
    assert [call.expression for call in test.calls] == calls
    assert conditions is None or list(test.conditions) == conditions


def test_what_cannot_be_split_runs_as_a_whole():
    for code in (
        "assert all(f(x) == x for x in range(3))",
        "x = f(1)\nassert x == 2",
        "for x in (1, 2):\n    assert f(x)",
        "assert f(2) == 10 ** 9",
        "assert (y := f(1)) == 2 and y",
        "assert f'{f(1)}' == '2'",
        "assert 1 == 1",
    ):
        assert [type(test) for test in read_tests([code])] == [ScriptTest], code


def test_values_that_are_equal():
    nan = float("nan")
    for found, expected in [
        *(([1, (2, 3)], [1, [2, 3]]), (0.1 + 0.2, 0.3), (3, 3.0), (nan, nan), ({"a": (1,)}, {"a": [1]})),
        ({1, 2}, {2, 1}),
    ]:
        assert same_value(found, expected) is True, (found, expected)
    for found, expected in [
        *(((1,), [1, 2]), (0.3001, 0.3), (10**400, 1.0), ("1", 1), ({"a": 1}, {"b": 1}), ([1, 2], {1, 2}), (None, 0)),
        *(("ab", ["a", "b"]), (float("inf"), 1e308)),
    ]:
        assert same_value(found, expected) is False, (found, expected)


# ---- verdicts


@pytest.mark.parametrize("form", FORMS)
def test_a_right_program_passes_and_a_wrong_one_does_not(form):
    tests = read_tests(FORMS[form])
    assert run_tests(RIGHT, tests, LIMITS).is_right
    verdict = run_tests("def add(a, b):\n    return a - b", tests, LIMITS)
    assert verdict.passed == 0 and set(verdict.faults) == {"wrong_output"}


def test_printed_output_is_compared_by_lines():
    tests = read_tests([{"input": "3 4\n5\n", "output": "7\n\n12"}])
    program = (
        "a, b = map(int, input().split())\nif __name__ == '__main__':\n"
        "    print(a + b, ' ')\n    print()\n    print(a * b)"
    )
    assert run_tests(program, tests, LIMITS).is_right
    assert run_tests(program.replace("print()", ""), tests, LIMITS).faults == ("wrong_output",)
    assert run_tests(program + "\nexit(1)", tests, LIMITS).faults == ("exception",)


@pytest.mark.parametrize(
    ("program", "fault", "detail"),
    [
        ("def add(a, b) return a", "syntax_error", "NotPython: "),
        ("def add(a, b): return a / 0", "exception", "ZeroDivisionError: division by zero"),
        ("def sub(a, b): return a", "exception", "NameError: name 'add' is not defined"),
        ("def add(a, b):\n    while True: pass", "timeout", "timeout"),
        ("def add(a, b): return 'x' * (1 << 31)", "memory", "MemoryError"),
        ("while True: print('x' * 1000)", "limit", "output"),
        ("def add(a, b): return a * b", "wrong_output", "6"),
        ("def add(a, b): return 10**5000", "wrong_output", "an integer of more than 1,000 digits"),
        ("def add(a, b): return [-(10**5000)]", "wrong_output", "a list that is too large"),
        ("def add(a, b): raise ValueError('\\ud800')", "exception", "ValueError: ?"),
        ("def add(a, b): return lambda: 5", "exception", "TypeError: a function is not a plain value"),
    ],
)
def test_faults_are_told_apart(program, fault, detail):
    verdict = run_tests(program, read_tests(ADD), Limits(seconds=1.0))
    assert verdict.faults[0] == fault and verdict.detail.startswith(detail)


def test_a_timeout_ends_the_tests_of_a_program_and_a_wrong_value_does_not():
    slow_first = "def add(a, b):\n    if a > 0:\n        while True: pass\n    return a + b"
    verdict = run_tests(slow_first, read_tests(ADD), Limits(seconds=0.5))
    assert (verdict.passed, verdict.total, verdict.faults) == (0, 2, ("timeout",))
    wrong_first = "def add(a, b): return 0"
    assert run_tests(wrong_first, read_tests(ADD), LIMITS).passed == 1
    assert run_tests(wrong_first, read_tests(ADD), LIMITS, all_or_nothing=True).passed == 0


# ---- reward hacking

FAKES = {
    "prints what a harness might": "print('OK'); print('PASSED'); print('True'); print('5')",
    "ends before the tests": "import sys\nsys.exit(0)",
    "ends at once": "import os\nos._exit(0)",
    "ends when called": "import os\ndef add(a, b): os._exit(0)",
    "kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "equals everything": "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "an int that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n"
        "    __hash__ = int.__hash__\ndef add(a, b): return Any(99)"
    ),
    "a float that compares as it likes": (
        "class Any(float):\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0.0\n"
        "def add(a, b): return Any(99)"
    ),
    "swallows assertions": "import builtins\nbuiltins.AssertionError = ValueError\ndef add(a, b): return 99",
    "patches what compares": (
        "import builtins\nfor name in ('all', 'any', 'abs', 'isinstance', 'bool', 'sorted', 'len'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\ndef add(a, b): return 99"
    ),
    "writes to every channel": (
        "import os, json\nfor n in range(1, 20):\n"
        "    try: os.write(n, json.dumps({'values': [5], 'token': 'x'}).encode())\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "writes to the channel and goes on": (
        'import os\nos.write(4, b\'{"values": [5], "token": "x"}\')\ndef add(a, b): return 99'
    ),
    "replaces what runs it": (
        "import __main__\n__main__.encode = lambda value: 5\n"
        "__main__.send = lambda message: None\ndef add(a, b): return 99"
    ),
    "looks for the expected value": (
        "import gc\ndef add(a, b):\n"
        "    found = [o['expected'] for o in gc.get_objects() if type(o) is dict and 'expected' in o]\n"
        "    return found[0] if found else 99"
    ),
    "prints at exit": "import atexit\natexit.register(print, 'PASSED')\nimport sys\nsys.exit()",
    "raises a skip": "raise SystemExit(0)",
    "replaces itself": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(5)'])",
}


@pytest.mark.parametrize("fake", FAKES)
@pytest.mark.parametrize("form", ["function", "assert"])
def test_nothing_but_the_right_value_passes(form, fake):
    # The second test expects 0, which no fake returns by accident.
    verdict = run_tests(FAKES[fake], read_tests(FORMS[form]), LIMITS)
    assert verdict.passed == 0 and verdict.faults


@pytest.mark.parametrize(
    "fake", ["prints what a harness might", "ends before the tests", "ends at once", "kills itself"]
)
def test_simple_fakes_fail_in_tests_that_run_as_a_whole(fake):
    tests = read_tests(FORMS["script"] + [{"script": "check(add)"}])
    assert run_tests(FAKES[fake], tests, LIMITS).passed == 0


def test_what_runs_as_a_whole_can_be_deceived():
    """Stated in the docs: an object that equals everything passes such a test."""
    assert run_tests(FAKES["equals everything"], read_tests(FORMS["script"]), LIMITS).is_right


def test_expected_values_do_not_reach_the_program():
    program = (
        "import gc, os, sys\ndef add(a, b):\n    f, seen = sys._getframe(), []\n"
        "    while f:\n        seen.append(repr(f.f_locals) + repr(f.f_globals))\n"
        "        f = f.f_back\n    for folder, _, names in os.walk('.'):\n"
        "        seen += [open(os.path.join(folder, n)).read() for n in names]\n"
        "    return 'EXP' + 'ECTED' in ''.join(seen)"
    )
    tests = read_tests([{"function": "add", "args": [1, 2], "expected": "EXPECTED"}, "assert add(1, 2) == 'EXPECTED'"])
    verdict = run_tests(program, tests, LIMITS)
    assert verdict.faults == ("wrong_output", "wrong_output") and verdict.detail == "False"


# ---- the reward


def score(reward, completions, tests):
    """Scores, and what was logged."""
    extras, metrics = {}, {}
    scores = reward(completions, tests=tests, log_extra=extras.__setitem__, log_metric=metrics.__setitem__)
    return scores, extras, metrics


def test_the_share_of_tests_or_all_of_them():
    half = fenced("def add(a, b): return 0")
    assert score(code_reward(), [fenced(RIGHT), half, None, "no code"], [ADD] * 4)[0] == [1.0, 0.5, 0.0, 0.0]
    assert score(code_reward(per_test=False), [fenced(RIGHT), half], [ADD] * 2)[0] == [1.0, 0.0]
    assert score(code_reward(whole_text=True), [RIGHT], [ADD])[0] == [1.0]
    messages = [{"role": "assistant", "content": fenced(RIGHT)}]
    assert score(code_reward(), [messages], [json.dumps(ADD)])[0] == [1.0]


def test_faults_are_counted_and_logged():
    completions = [fenced(RIGHT), fenced("def add(a, b): return a - b"), fenced("x ="), "no code"]
    reward = code_reward()
    _, extras, metrics = score(reward, completions, [ADD] * 4)
    assert metrics["code/wrong_output"] == metrics["code/syntax_error"] == metrics["code/no_code"] == 0.25
    assert metrics["code/exception"] == metrics["code/unusable_tests"] == metrics["code/not_run"] == 0.0
    assert extras["code_tests"] == ["2/2", "0/2", "0/2", "0/2"]
    assert extras["code_error"][0] == "" and extras["code_error"][1] == "wrong_output: -1"
    assert extras["code_error"][2].startswith("syntax_error: NotPython") and extras["code_error"][3] == "no_code"
    assert reward.faults == {"wrong_output": 1, "syntax_error": 1, "no_code": 1}


def test_unusable_tests_abstain_are_counted_and_said_once():
    reward = code_reward()
    with pytest.warns(UserWarning, match=r"abstains on 2 of 3 completions \(column 'tests'\).*an empty list"):
        scores, extras, metrics = score(reward, [fenced(RIGHT), "", fenced(RIGHT)], [[], [], ADD])
    assert scores == [None, None, 1.0] and metrics["code/unusable_tests"] == 2
    assert extras["code_tests"][0].startswith("unusable tests") and extras["code_error"][:2] == ["", ""]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert score(reward, [fenced(RIGHT)], [None])[0] == [None]
    assert reward.unusable_tests == 3


def test_a_call_that_takes_too_long_keeps_what_it_has():
    reward = code_reward(timeout=0.6, workers=1, call_seconds=0.3)
    endless = fenced("while True: pass")
    with pytest.warns(UserWarning, match=r"not run: the call had already taken call_seconds=0\.3 s"):
        scores, _, metrics = score(reward, [endless, fenced(RIGHT), "no code"], [ADD] * 3)
    assert scores == [0.0, None, 0.0] and metrics["code/not_run"] == 1


def test_it_works_under_the_runner_and_requires_its_column():
    runner = RewardRunner(code_reward(tests_column="cases"))
    table = runner.score(prompts=["p"], completions=[fenced(RIGHT)], completion_ids=[[1]], columns={"cases": [ADD]})
    assert table.scores == [(1.0,)] and not table.failures
    assert table.extras["code_tests"] == ["2/2"] and table.metrics["code/wrong_output"] == [0.0]
    with pytest.raises(Exception, match="'code_reward' requires 'cases'"):
        runner.check_columns(["tests"])


def test_wrong_arguments_are_refused(monkeypatch):
    for arguments in ({"timeout": 0}, {"memory_mb": 1}, {"workers": 0}, {"call_seconds": -1.0}):
        with pytest.raises(ConfigError):
            code_reward(**arguments)
    monkeypatch.setattr(
        "grupo.rewards.code.reward.isolation", lambda: sandbox.Isolation(False, False, "no user namespaces")
    )
    with pytest.raises(ConfigError, match=r"is not possible here: no namespaces \(no user namespaces\)"):
        code_reward(require_isolation=True)


@settings(deadline=None, max_examples=200)
@given(st.text() | st.text(alphabet="`python\n x=1"), st.booleans())
def test_extraction_never_fails(text, whole):
    code = extract_code(text, whole)
    assert code is None or code.strip()


@settings(deadline=None, max_examples=100)
@given(
    st.recursive(
        st.none() | st.text() | st.integers() | st.floats(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["input", "output", "function", "args", "expected", "assert", "script"]), inner
            )
        ),
    )
)
def test_reading_tests_never_fails_in_another_way(cell):
    try:
        tests = read_tests(cell)
    except ValueError:
        return
    assert tests


@settings(deadline=None, max_examples=15)
@given(st.text(max_size=200))
def test_arbitrary_programs_stay_in_the_range(text):
    reward = code_reward(timeout=1.0)
    low, high = reward.value_range
    for completion in (text, fenced(text)):
        (value,) = score(reward, [completion], [ADD])[0]
        assert value is not None and low <= value <= high and value == 0.0


def test_a_program_that_ends_its_supervisor_is_wrong_and_not_spared(monkeypatch):
    """It can without namespaces; to abstain would be better than to be wrong."""
    monkeypatch.setattr(
        "grupo.rewards.code.sandbox.runner.isolation", lambda: sandbox.Isolation(False, False, "asked for")
    )
    verdict = run_tests("import os\nos.kill(os.getppid(), 9)\nwhile True: pass", read_tests(ADD[:1]), LIMITS)
    assert verdict.faults == ("exception",)
