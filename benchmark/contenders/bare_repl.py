"""Reads JSON lines with code, runs it, answers with the last expression's value and what was printed."""

import ast
import io
import json
import sys
from contextlib import redirect_stdout


def run(code, namespace):
    module = ast.parse(code, "<cell>")
    last = module.body.pop() if module.body and isinstance(module.body[-1], ast.Expr) else None
    if module.body:
        exec(compile(module, "<cell>", "exec"), namespace)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    return None if value is None else repr(value)


def main():
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    namespace = {"__name__": "__main__"}
    answers.write(b"{}\n")
    answers.flush()
    for line in requests:
        printed, value, error = io.StringIO(), None, None
        try:
            with redirect_stdout(printed):
                value = run(json.loads(line)["code"], namespace)
        except Exception as exception:
            error = repr(exception)
        answer = {"value": value, "stdout": printed.getvalue(), "error": error}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


main()
