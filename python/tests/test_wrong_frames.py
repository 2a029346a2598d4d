"""A host that does not keep to the format: seeded frames, arbitrary or changed, against all that reads frames here.

A failure names its seed; KERNELHOST_TEST_SEED runs it again.
"""

import contextlib
import json
import os
import random
import resource
import select
import sys
import time
import unittest
from pathlib import Path

import driver
from kernel_case import KernelCase

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernelhost import wires

SEED = int(os.environ.get("KERNELHOST_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
ROUNDS = 3000
LIVE_ROUNDS = 10
BEFORE_LINE = b"kernelhost: the host does not keep to the protocol: "
KNOWN = frozenset((*range(1, 4), *range(16, 23), 32, 33, *range(64, 68), *range(80, 86)))
# A process that has grown by this much has believed a length, or kept what it should have refused.
GROWTH_KB = 48 * 1024


def any_json(draw, depth=0):
    kinds = ["null", "bool", "int", "float", "text"] + (["list", "object"] if depth < 3 else [])
    kind = draw.choice(kinds)
    if kind == "null":
        return None
    if kind == "bool":
        return draw.random() < 0.5
    if kind == "int":
        return draw.choice((0, 1, -1, 1 << 31, -(1 << 63), 10**30))
    if kind == "float":
        return draw.choice((0.5, -1e300))
    if kind == "text":
        return "".join(draw.choice('aé€\U0001f600\0\n"\\') for _ in range(draw.randrange(8)))
    if kind == "list":
        return [any_json(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {str(number): any_json(draw, depth + 1) for number in range(draw.randrange(4))}


def any_frame(draw, kinds):
    thing = {str(number): any_json(draw) for number in range(draw.randrange(4))}
    payload = b"" if draw.random() < 0.2 else json.dumps(thing, ensure_ascii=False).encode()
    return wires.frame(draw.choice(kinds), draw.getrandbits(64), payload)


def pieces(draw, data):
    while data:
        size = draw.choice((1, 2, 15, 16, 17, 64, len(data)))
        yield data[:size]
        data = data[size:]


def changed(draw, data):
    data = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(data)) if data else 0
        way = draw.randrange(4)
        if way == 0 and data:
            data[at] ^= 1 << draw.randrange(8)
        elif way == 1 and data:
            data[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif way == 2:
            data[at:at] = draw.randbytes(draw.randrange(1, 20))
        else:
            del data[at : at + draw.randrange(1, 20)]
    return bytes(data)


def read_all(parts, kinds):
    """The frames of a stream, and the message of what ended it."""
    buffer, seen = wires.FrameBuffer(kinds), []
    for part in parts:
        buffer.data += part
        try:
            while (found := buffer.next_frame()) is not None:
                seen.append(found)
        except wires.ProtocolError as error:
            return seen, str(error)
    return seen, None


def resident_kb(pid):
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1])
    return 0


class Seeded(unittest.TestCase):
    """Each test draws from a source of its own, so that one can be run alone with the same result."""

    def draw(self):
        name = self.id().rpartition(".")[2]
        return random.Random(f"{SEED} {name}")

    def run(self, result=None):
        result = super().run(result)
        if result is not None and any(case is self for case, _ in (*result.failures, *result.errors)):
            print(f"\nrun it again with KERNELHOST_TEST_SEED={SEED}", file=sys.stderr)
        return result


class Buffers(Seeded):
    def test_frames_come_out_as_they_went_in_whatever_the_pieces(self):
        draw = self.draw()
        for _ in range(ROUNDS // 4):
            frames = [any_frame(draw, sorted(KNOWN)) for _ in range(draw.randrange(6))]
            seen, error = read_all(pieces(draw, b"".join(frames)), KNOWN)
            self.assertIsNone(error)
            self.assertEqual([wires.frame(*each) for each in seen], frames)

    def test_changed_streams_are_read_the_same_in_any_pieces_or_refused(self):
        draw = self.draw()
        refused = 0
        for _ in range(ROUNDS):
            stream = changed(draw, b"".join(any_frame(draw, sorted(KNOWN)) for _ in range(draw.randrange(1, 6))))
            whole = read_all([stream], KNOWN)
            self.assertEqual(read_all(pieces(draw, stream), KNOWN), whole)
            refused += whole[1] is not None
            for _, _, payload in whole[0]:
                with contextlib.suppress(wires.ProtocolError):
                    self.assertIsInstance(wires.object_of(payload), dict)
        self.assertGreater(refused, ROUNDS // 20)

    def test_arbitrary_payloads_are_objects_or_refused(self):
        draw = self.draw()
        for _ in range(ROUNDS):
            payload = changed(draw, json.dumps(any_json(draw), ensure_ascii=False).encode())
            with contextlib.suppress(wires.ProtocolError):
                self.assertIsInstance(wires.object_of(payload), dict)
        for deep in (b"[" * 200_000, b'{"a":' * 200_000, b"[" * 100_000 + b"]" * 100_000, b"", b"NaN", b'{"a":NaN}'):
            with self.assertRaises(wires.ProtocolError, msg=deep[:10]):
                wires.object_of(deep)

    def test_an_announced_length_takes_no_memory(self):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        buffers = []
        for _ in range(100):
            buffer = wires.FrameBuffer(KNOWN)
            buffer.data += driver.HEADER.pack(wires.LIMIT, wires.EXECUTE, 0, 1)
            self.assertIsNone(buffer.next_frame())
            buffers.append(buffer)
        self.assertLess(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 8 * 1024)


class Lives(Seeded, KernelCase):
    """A live kernel: it leaves with the exit of a broken protocol and one line, or has understood."""

    shells = ("plain",)

    def answer_of(self, life, data, deadline=driver.DEADLINE):
        """Sends the bytes and the end of the stream. Returns the exit code."""
        with contextlib.suppress(OSError):
            life.wires.requests.sendall(data)
        with contextlib.suppress(OSError):
            life.wires.requests.shutdown(1)
        code = life.wait(deadline)
        # What it said between the last look and its end.
        with contextlib.suppress(driver.Ended, OSError):
            life.step(0)
        return code

    def check(self, life, code, data):
        if code == wires.PROTOCOL_ERROR_EXIT:
            lines = life.err.splitlines()
            self.assertEqual(len(lines), 1, (life.err, data))
            self.assertTrue(lines[0].startswith(BEFORE_LINE), (life.err, data))
            self.assertLess(len(lines[0]), 400)
            lines[0].decode()
        else:
            # 0: all was allowed, and then the stream ended. 1: it could not start, and has said so.
            self.assertIn(code, (0, 1), (life.err, data))
            self.assertEqual(life.err, b"", data)

    def execute(self, number, code="1"):
        return wires.frame(wires.EXECUTE, number, json.dumps({"code": code, "silent": False}).encode())

    def test_changed_requests(self):
        draw = self.draw()
        codes = []
        for _ in range(LIVE_ROUNDS):
            for life in self.lives():
                # Comments: a change of the code is a change of nothing.
                frames = [self.execute(number, "#" * 40) for number in range(1, 4)]
                data = changed(draw, b"".join(frames))
                peak = resident_kb(life.pid)
                codes.append(self.answer_of(life, data))
                self.assertLess(resident_kb(life.pid) - peak, GROWTH_KB)
                self.check(life, codes[-1], data)
        self.assertIn(wires.PROTOCOL_ERROR_EXIT, codes)

    def test_arbitrary_bytes(self):
        draw = self.draw()
        for _ in range(LIVE_ROUNDS):
            for life in self.lives():
                data = draw.randbytes(draw.choice((1, 15, 16, 17, 100, 70_000)))
                code = self.answer_of(life, data)
                self.check(life, code, data)
                if len(data) >= 16:
                    self.assertIn(code, (0, wires.PROTOCOL_ERROR_EXIT))

    def configure(self, config):
        """The exit code of a cold life that has been told this, and then nothing more."""
        life = driver.cold(driver.configuration("plain", env={"PATH": os.environ["PATH"]}), configure=False)
        self.addCleanup(self._end, life)
        code = self.answer_of(life, driver.frame(driver.CONFIGURE, 0, config))
        self.check(life, code, config)
        if code == 1:
            self.assertEqual(life.frames[0][0], driver.START_FAILED, config)
        self._end(life)
        return code

    def test_changed_configurations(self):
        draw = self.draw()
        for _ in range(LIVE_ROUNDS):
            config = driver.configuration("plain", env={"PATH": os.environ["PATH"]})
            config[draw.choice(sorted(config))] = any_json(draw)
            # Code that nobody has written may do anything.
            config["init"] = None
            self.configure(config)

    def test_a_mistyped_or_missing_field_of_the_configuration_is_a_broken_format(self):
        good = driver.configuration("plain", env={"PATH": os.environ["PATH"]})
        for name in ("shell", "env"):
            for wrong in (None, 1, [], 0.5):
                with self.subTest(name, wrong=wrong):
                    self.assertEqual(self.configure({**good, name: wrong}), wires.PROTOCOL_ERROR_EXIT)
            with self.subTest(name, wrong="missing"):
                left = {key: value for key, value in good.items() if key != name}
                self.assertEqual(self.configure(left), wires.PROTOCOL_ERROR_EXIT)

    def test_wrong_answers_on_calls(self):
        draw = self.draw()
        wrong = [
            driver.HEADER.pack(wires.LIMIT + 1, wires.BARRIER_PASSED, 0, 1),
            driver.HEADER.pack(0, wires.BARRIER_PASSED, 7, 1),
            driver.frame(wires.EXECUTE, 1),
            draw.randbytes(16),
        ]
        for data in wrong:
            for life in self.lives():
                life.hold_barriers = True
                life.start_cell("display(1)\n2")
                life.next(driver.DISPLAY)
                life.wires.calls.sendall(data)
                # The cell must not be able to catch it either: it is not the cell's mistake.
                code = life.wait(deadline=5)
                self.assertEqual(code, wires.PROTOCOL_ERROR_EXIT, (data, life.err))
                self.check(life, code, data)

    def test_answers_to_barriers_that_were_never_asked_for_hold_nothing_up(self):
        for life in self.lives():
            life.wires.calls.sendall(driver.frame(wires.BARRIER_PASSED, 7) + driver.frame(wires.BARRIER_PASSED, 1))
            self.assert_ok(life.run("display(1)\n2"))
            self.assert_alive(life)

    def test_a_frame_that_never_becomes_whole_costs_no_cpu_and_no_memory(self):
        for life in self.lives():
            before, peak = cpu_ticks(life.pid), resident_kb(life.pid)
            life.wires.requests.sendall(driver.HEADER.pack(wires.LIMIT, wires.EXECUTE, 0, 1) + b"{")
            time.sleep(0.3)
            self.assertLess(cpu_ticks(life.pid) - before, 10)
            self.assertLess(resident_kb(life.pid) - peak, GROWTH_KB)
            self.assertEqual(self.answer_of(life, b""), 0)

    def test_garbage_for_interrupts_interrupts_nothing_and_kills_nothing(self):
        draw = self.draw()
        for life in self.lives():
            for size in (1, 7, 8, 9, 4096):
                os.write(life.wires.interrupts, draw.randbytes(size))
            self.assert_ok(life.run("sum(range(1000))"))
            life.interrupt(cell=draw.getrandbits(64), group=False)
            self.assert_alive(life)


def cpu_ticks(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


class Templates(Seeded):
    """A live template."""

    def answer_of(self, template, data, fds=()):
        with contextlib.suppress(OSError):
            if fds:
                driver.socket.send_fds(template.control, [data], fds)
            else:
                template.control.sendall(data)
        with contextlib.suppress(OSError):
            template.control.shutdown(1)
        until = time.monotonic() + driver.DEADLINE
        while (code := template.reap(0.02)) is None:
            self.assertLess(time.monotonic(), until, ("the template hangs", data[:200]))
            while select.select([template.control], [], [], 0)[0]:
                with contextlib.suppress(ConnectionResetError):
                    if template.control.recv(65536):
                        continue
                break
        return code

    def check(self, template, code, data):
        error = template.drain()["err"]
        if code == wires.PROTOCOL_ERROR_EXIT:
            lines = error.splitlines()
            self.assertEqual(len(lines), 1, (error, data))
            self.assertTrue(lines[0].startswith(BEFORE_LINE), (error, data))
        else:
            self.assertIn(code, (0, 1), (error, data))
            self.assertEqual(error, b"", data)

    def ready(self):
        template = driver.Template("plain")
        self.addCleanup(template.close)
        template.ready()
        return template

    def test_changed_and_arbitrary_frames(self):
        draw = self.draw()
        codes = []
        for number in range(LIVE_ROUNDS):
            template = self.ready()
            if number % 2:
                data = draw.randbytes(draw.choice((1, 16, 100, 70_000)))
            else:
                frames = [wires.frame(draw.choice((wires.RELEASE, wires.ABANDON)), number) for number in range(6)]
                data = changed(draw, b"".join(frames))
            peak = resident_kb(template.pid)
            codes.append(self.answer_of(template, data))
            self.assertLess(resident_kb(template.pid) - peak, GROWTH_KB)
            self.check(template, codes[-1], data)
        self.assertIn(wires.PROTOCOL_ERROR_EXIT, codes)

    def test_forks_that_are_not_what_they_should_be(self):
        good = driver.configuration("plain", env={})
        bad = {
            "no descriptors": (driver.frame(driver.FORK, 1, good), 0),
            "too few descriptors": (driver.frame(driver.FORK, 1, good), 5),
            "no JSON": (wires.frame(wires.FORK, 1, b"{"), 6),
            "no object": (wires.frame(wires.FORK, 1, b"[]"), 6),
            "no environment": (driver.frame(driver.FORK, 1, {**good, "env": None}), 6),
            "a second prepare": (driver.frame(driver.PREPARE, 0, {"protocol": 1, "shell": "plain", "preload": []}), 0),
        }
        for name, (data, count) in bad.items():
            with self.subTest(name):
                template = self.ready()
                fds = [os.open(os.devnull, os.O_RDWR) for _ in range(count)]
                try:
                    code = self.answer_of(template, data, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
                self.assertEqual(code, wires.PROTOCOL_ERROR_EXIT, template.drain())
                self.check(template, code, data)

    def test_environments_that_are_none_do_not_end_the_template(self):
        """The fork fails, says why, and the template goes on."""
        for env in ({"A": 1}, {"A=B": "c"}, {"": "x"}, {"A": "a\0b"}, {"A": []}):
            with self.subTest(env=env):
                template = self.ready()
                life = template.fork({**driver.configuration("plain"), "env": env})
                self.addCleanup(life.close)
                self.assertEqual(life.wait(deadline=10), 1, life.err)
                self.assertNotEqual(life.err, b"")
                other = template.fork(driver.configuration("plain"))
                self.addCleanup(other.close)
                other.next(driver.READY)
                self.assertEqual(other.text("40 + 2"), "42")

    def test_changed_preparations(self):
        draw = self.draw()
        for _ in range(LIVE_ROUNDS):
            request = {"protocol": 1, "shell": "plain", "preload": []}
            request[draw.choice(sorted(request))] = any_json(draw)
            template = driver.Template("plain")
            self.addCleanup(template.close)
            # The first frame is right; this one is the second, and a template has only one.
            code = self.answer_of(template, driver.frame(driver.PREPARE, 0, request))
            self.assertEqual(code, wires.PROTOCOL_ERROR_EXIT)


if __name__ == "__main__":
    unittest.main()
