"""Code that the interpreter in the sandbox executes: the untrusted program, then the calls to evaluate in it.

Never imported: `runner.py` passes the text of this file to a fresh interpreter with `-c`. File descriptor 3 holds the
job, 4 takes one JSON message. All of this shares a process with the program, so nothing here is trusted: the message is
what the program claims, and the expected values never come here.

Only modules written in C are imported, because every run pays for them: json alone would double the start-up time.
"""

import builtins
import marshal
import os
import sys
import types
from _json import encode_basestring_ascii as text

JOB, MESSAGE = 3, 4


def send(**message):  # type: ignore[no-untyped-def]
    data = as_object((text(name), value) for name, value in message.items()).encode()
    while data:
        data = data[os.write(MESSAGE, data) :]


def as_object(pairs):  # type: ignore[no-untyped-def]
    return "{" + ", ".join(f"{name}: {value}" for name, value in pairs) + "}"


def as_list(items):  # type: ignore[no-untyped-def]
    return "[" + ", ".join(items) + "]"


def encode(value):  # type: ignore[no-untyped-def]
    """A value in JSON: None, bool, float, str and small int unchanged, the rest as {type: content}."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float):
        special = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
        return special.get(float.__repr__(value), float.__repr__(value))
    if isinstance(value, int):
        return str(int(value)) if abs(value) < 2**63 else as_object([(text("int"), text(hex(value)))])
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else "set"
        return as_object([(text(kind), as_list(encode(item) for item in value))])
    if isinstance(value, dict):
        pairs = (as_list([encode(key), encode(item)]) for key, item in value.items())
        return as_object([(text("dict"), as_list(pairs))])
    if isinstance(value, (bytes, bytearray)):
        return as_object([(text("bytes"), text(value.hex()))])
    if isinstance(value, complex):
        return as_object([(text("complex"), as_list([encode(value.real), encode(value.imag)]))])
    if hasattr(value, "tolist"):  # numpy
        return encode(value.tolist())
    raise TypeError(f"a {type(value).__name__} is not a plain value (number, string, list, tuple, set, dict or bytes)")


def main():  # type: ignore[no-untyped-def]
    with os.fdopen(JOB, "rb") as file:
        job = marshal.load(file)
    # Programs end with exit(), which only the site module defines; `-S` skips that.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    has_calls = job["calls"] or job["script"] is not None
    module = types.ModuleType("program" if has_calls else "__main__")
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    try:
        exec(compile(job["source"], "program.py", "exec"), module.__dict__)
        values = []
        for expression, arguments, keywords in job["calls"]:
            value = eval(compile(expression, "test", "eval"), module.__dict__)
            values.append(encode(value if arguments is None else value(*arguments, **keywords)))
        if job["script"] is not None:
            exec(compile(job["script"], "test", "exec"), module.__dict__)
        if has_calls:
            send(values=as_list(values), token=text(job["token"]))
    except SystemExit:
        if has_calls:
            send(error=text("SystemExit"), text=text("the program ended itself"))
        raise
    except BaseException as error:
        inner = error.__traceback__ and error.__traceback__.tb_next  # without the frame of this function
        sys.__excepthook__(type(error), error.with_traceback(inner), inner)
        # A program that is not Python, as opposed to one that calls eval on such text.
        syntax = isinstance(error, SyntaxError) and error.filename == "program.py" and inner is None
        name = "NotPython" if syntax else type(error).__name__
        send(error=text(name), text=text(str(error)[:500]))
        sys.stdout.flush()
        os._exit(1)
    if has_calls:
        sys.stdout.flush()
        os._exit(0)  # threads and exit handlers of the program must not run


if __name__ == "__main__":
    main()
