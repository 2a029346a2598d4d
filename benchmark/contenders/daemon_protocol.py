"""The Python half of `protocol.ts`: JSON lines in, JSON lines out, one at a time."""

import json
import os
import sys
import traceback


def serve(answer):
    """Answers every request with `answer(request)` until the input ends. What a contender prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception:
            reply = {"error": traceback.format_exc()}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
