"""The base of tests that need kernels: every combination of launch and shell, and nothing left over."""

import os
import unittest
from pathlib import Path

import driver

_templates = {}


def template(shell):
    """One template per shell for all tests that do not need their own."""
    if shell not in _templates:
        _templates[shell] = driver.Template(shell)
        _templates[shell].ready()
    return _templates[shell]


def close_templates():
    while _templates:
        _templates.popitem()[1].close()


class KernelCase(unittest.TestCase):
    """`for life in self.lives():` runs the body once per launch and shell."""

    launches = ("cold", "fork")
    shells = driver.SHELLS

    @classmethod
    def tearDownClass(cls):
        close_templates()
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert not children, f"processes were left over: {children}"

    def start(self, launch, shell, **config):
        config = driver.configuration(shell, **config)
        life = driver.cold(config) if launch == "cold" else template(shell).fork(config)
        self.addCleanup(self._end, life)
        return life

    def _end(self, life):
        if not getattr(life, "closed", False):
            life.closed = True
            life.close()
            driver.wait_gone(life.pid)
            life.reap(driver.DEADLINE)

    def lives(self, launches=None, shells=None, **config):
        for launch in launches or self.launches:
            for shell in shells or self.shells:
                self.subject = f"{launch}, {shell}"
                life = self.start(launch, shell, **config)
                life.launch, life.shell = launch, shell
                life.introduction = life.next(driver.READY)[2]
                yield life
                self._end(life)

    subject = ""

    def shortDescription(self):
        return self.subject

    def assert_ok(self, done):
        self.assertEqual(done["status"], "ok", done["error"] and "\n".join(done["error"]["traceback"]))

    def assert_error(self, done, name, value=None):
        self.assertEqual(done["status"], "error")
        self.assertEqual(done["error"]["name"], name, done["error"])
        if value is not None:
            self.assertEqual(done["error"]["value"], value)

    def assert_alive(self, life):
        self.assertEqual(life.text("40 + 2"), "42")
