"""The gateway runs where torch and the engine are not installed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, importlib.abc, pkgutil, sys

ABSENT = {"torch", "triton", "numba", "moiety_engine", "moiety_kernels", "transformers", "streamlit"}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)
        return None

sys.meta_path.insert(0, Absent())
import moiety_platform.app, moiety_platform.gateway
names = [m.name for m in pkgutil.walk_packages(moiety_platform.__path__, "moiety_platform.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
assert not ABSENT & {name.partition(".")[0] for name in sys.modules}
print(len(names))
"""


def test_every_module_of_the_platform_imports_without_torch_and_without_the_engine() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
