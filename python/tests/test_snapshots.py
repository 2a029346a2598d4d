"""Snapshots: what is saved, what is told, and which files are refused."""

import os
import stat
import tempfile
import threading
import unittest

from kernelhost import snapshots


class Snapshots(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "snapshot")

    def test_shared_references_are_kept_and_a_bad_variable_costs_only_itself(self):
        shared = [1]
        shared.append(shared)
        names = {"a": shared, "lock": [shared, threading.Lock()], "b": {"it": shared}, "os": os, "In": [], "__x__": 1}
        report = snapshots.save(self.path, names)
        self.assertEqual(report["saved"], ["a", "b", "os"])
        self.assertEqual([each["name"] for each in report["skipped"]], ["lock"])
        self.assertIn("lock", report["skipped"][0]["why"])
        self.assertEqual(stat.S_IMODE(os.stat(self.path).st_mode), 0o600)
        fresh = {}
        self.assertEqual(snapshots.load(self.path, fresh)["saved"], ["a", "b", "os"])
        self.assertIs(fresh["a"], fresh["b"]["it"])
        self.assertIs(fresh["a"][1], fresh["a"])
        self.assertIs(fresh["os"], os)

    def test_limits_cost_the_variable_that_breaks_them(self):
        report = snapshots.save(self.path, {"big": b"x" * 5000, "small": 1}, max_variable_bytes=1000)
        self.assertEqual(report["saved"], ["small"])

    def test_damaged_files_are_refused_before_anything_is_unpickled(self):
        snapshots.save(self.path, {"a": list(range(100))})
        with open(self.path, "rb") as file:
            whole = file.read()
        flipped = bytearray(whole)
        flipped[40] ^= 1
        for bad in (b"", whole[:5], whole[:20], whole[:-1], bytes(flipped), b"x" + whole[1:], whole + b"x"):
            with open(self.path, "wb") as file:
                file.write(bad)
            names = {}
            with self.assertRaises(snapshots.SnapshotError):
                snapshots.load(self.path, names)
            self.assertEqual(names, {})


if __name__ == "__main__":
    unittest.main()
