"""Snapshots: what is saved, what is told, and which files are refused."""

import os
import stat
import sys
import tempfile
import unittest

from kernelhost import snapshots


class Passing:
    fails = False

    def __setstate__(self, state):
        if self.fails:
            raise RuntimeError("not here")

    def __getstate__(self):
        return {"a": [1, 2]}


class Snapshots(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "snapshot")

    def test_shared_references_are_kept_and_a_bad_variable_costs_only_itself(self):
        shared = [1]
        shared.append(shared)
        names = {"a": shared, "lock": [shared, (n for n in shared)], "b": {"it": shared}, "os": os, "_x": 2, "__x__": 1}
        report = snapshots.save(self.path, names)
        self.assertEqual(report["saved"], ["a", "b", "os", "_x"])
        self.assertEqual([each["name"] for each in report["skipped"]], ["lock"])
        self.assertIn("generator", report["skipped"][0]["why"])
        self.assertEqual(stat.S_IMODE(os.stat(self.path).st_mode), 0o600)
        fresh = {}
        self.assertEqual(snapshots.load(self.path, fresh)["saved"], ["a", "b", "os", "_x"])
        self.assertIs(fresh["a"], fresh["b"]["it"])
        self.assertIs(fresh["a"][1], fresh["a"])
        self.assertIs(fresh["os"], os)

    def test_limits_cost_the_variable_that_breaks_them(self):
        report = snapshots.save(self.path, {"big": b"x" * 5000, "small": 1}, max_variable_bytes=1000)
        self.assertEqual(report["saved"], ["small"])

    def test_several_failures_one_after_the_other_leave_the_numbers_right(self):
        generator = (n for n in ())
        shared = [[n] for n in range(300)]
        names = {"first": shared}
        for n in range(20):
            names[f"bad{n}"] = [shared[n], [object()] * 3, {n: generator}]
            names[f"good{n}"] = [shared[n], str(n) * 3]
        report = snapshots.save(self.path, names)
        self.assertEqual([each["name"] for each in report["skipped"]], [f"bad{n}" for n in range(20)])
        fresh = {}
        self.assertEqual(snapshots.load(self.path, fresh)["skipped"], [])
        for n in range(20):
            self.assertIs(fresh[f"good{n}"][0], fresh["first"][n])

    def test_functions_come_back_on_the_namespace_they_are_loaded_into(self):
        names = {"__name__": "__main__", "__builtins__": __builtins__}
        exec("x = 1\ndef f(y=2, *, z: int = 3):\n    def g(): return f, x, y, z\n    return g\ng = f(7)", names)
        self.assertEqual(snapshots.save(self.path, names)["skipped"], [])
        fresh = {"__name__": "__main__"}
        snapshots.load(self.path, fresh)
        fresh["x"] = 5
        self.assertEqual(fresh["g"](), (fresh["f"], 5, 7, 3))
        self.assertIs(fresh["f"].__globals__, fresh)
        self.assertEqual(fresh["f"].__annotations__, {"z": int})

    def test_variables_that_cannot_be_loaded_cost_what_shares_something_with_them(self):
        inner = [1]
        names = {"a": [inner], "b": [Passing(), {2: 3}], "c": inner, "d": [Passing()], "e": 4}
        names["f"] = [names["b"][1]]
        names["g"] = [inner, names["a"]]
        self.assertEqual(snapshots.save(self.path, names)["skipped"], [])
        fresh = {}
        Passing.fails = True
        try:
            report = snapshots.load(self.path, fresh)
        finally:
            Passing.fails = False
        if sys.version_info >= (3, 15):
            self.assertEqual([each["name"] for each in report["skipped"]], ["b", "c", "d", "e", "f", "g"])
            self.assertIn("comes after what could not be loaded", report["skipped"][1]["why"])
            self.assertEqual(fresh, {"a": [[1]]})
            return
        self.assertEqual([each["name"] for each in report["skipped"]], ["b", "d", "f"])
        self.assertIn("could not be loaded: b", report["skipped"][2]["why"])
        self.assertEqual((fresh["e"], fresh["g"][0]), (4, [1]))
        self.assertIs(fresh["g"][1], fresh["a"])
        self.assertIs(fresh["c"], fresh["g"][0])

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
