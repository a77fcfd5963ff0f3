"""Write long_tests.txt: the test functions that `make test-fast` leaves out, from a JUnit report of a run on two cores.

MOIETY_TEST_FAST=all .venv/bin/python -m pytest -n 2 --dist=loadfile --junit-xml=report.xml
python tests/long_tests.py report.xml
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

LONG_S = 0.3
LIST = Path(__file__).with_name("long_tests.txt")


def main() -> None:
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ET.parse(sys.argv[1]).getroot().iter("testcase"):
        path = case.attrib["classname"].replace(".", "/") + ".py"
        function = re.split(r"\[", case.attrib["name"], maxsplit=1)[0]
        seconds[f"{path}::{function}"] += float(case.attrib["time"])
    LIST.write_text("".join(f"{name}\n" for name in sorted(seconds) if seconds[name] > LONG_S))


if __name__ == "__main__":
    main()
