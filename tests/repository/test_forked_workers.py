"""Worker processes that are forked after collection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
Run = Callable[..., pytest.RunResult]
CONFIGURATION = """
    [pytest]
    worker_groups =
        test_shared
    worker_imports =
        xml.dom.minidom
        wsgiref.validate
    imports_of_workers =
        xml.sax
    filterwarnings =
        default
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(*options, file=text, …)`: pytest with two workers on these files, and those of the runs before."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run_files(*options: str, **files: str) -> pytest.RunResult:
        pytester.makeini(CONFIGURATION)
        if files:
            pytester.makepyfile(**files)
        return pytester.runpytest_subprocess("-p", "tests.forked_workers", "--workers=2", *options)

    return run_files


NOTE_PROCESS = """
    import os
    from pathlib import Path

    def test_it(tmp_path_factory):
        with Path("log").open("a") as log:
            log.write(f"{{os.getpid()}} {{os.getppid()}} {name} {{tmp_path_factory.getbasetemp()}}\\n")
"""


def test_a_module_is_imported_once_and_its_tests_run_in_a_fork(run: Run, pytester: pytest.Pytester) -> None:
    imported = 'from pathlib import Path\nPath("imported").open("a").write("once ")\n\ndef test_{}(): pass'
    files = {f"test_{name}": imported.format(name) + dedent(NOTE_PROCESS.format(name=name)) for name in "abc"}
    run(**files).assert_outcomes(passed=6)
    assert (pytester.path / "imported").read_text() == "once once once "
    lines = [line.split() for line in (pytester.path / "log").read_text().splitlines()]
    assert {name for _, _, name, _ in lines} == set("abc")
    assert len({parent for _, parent, _, _ in lines}) == 1
    assert {process for process, *_ in lines}.isdisjoint(parent for _, parent, _, _ in lines)
    assert len({folder for *_, folder in lines}) == len({process for process, *_ in lines})


def test_files_of_a_group_run_in_one_worker_and_share_fixtures_of_the_session(
    run: Run, pytester: pytest.Pytester
) -> None:
    conftest = """
        import pytest
        from pathlib import Path

        @pytest.fixture(scope="session")
        def server():
            with Path("servers").open("a") as file:
                file.write("begin ")
            yield 1
            with Path("servers").open("a") as file:
                file.write("end ")
    """
    files = {f"test_shared_{number}": "def test_it(server): pass" for number in range(4)}
    run(conftest=conftest, **files).assert_outcomes(passed=4)
    assert (pytester.path / "servers").read_text() == "begin end "


def test_modules_of_packages_that_tests_use_are_imported_before_the_fork(run: Run) -> None:
    file = """
        import sys
        import xml

        def test_it():
            assert "xml.dom.minidom" in sys.modules
            assert "wsgiref.validate" not in sys.modules
    """
    run(test_imports=file).assert_outcomes(passed=1)


def test_a_module_whose_threads_workers_would_lack_is_refused_before_the_fork(run: Run) -> None:
    early = run(test_early="import xml.sax\n\ndef test_it(): pass")
    assert early.ret == pytest.ExitCode.USAGE_ERROR
    early.stderr.fnmatch_lines(["*xml.sax was imported during collection; import it in tests and fixtures"])


def test_a_module_that_starts_threads_is_imported_in_a_worker(run: Run) -> None:
    run(test_late="def test_it():\n    import xml.sax").assert_outcomes(passed=1)


def test_failures_output_warnings_and_skips_are_reported(run: Run, pytester: pytest.Pytester) -> None:
    failing = """
        import warnings
        import pytest

        def test_fails():
            print("printed before")
            assert [1, 2] == [1, 3]

        def test_warns():
            warnings.warn("beware of this")

        @pytest.mark.skip(reason="not here")
        def test_is_skipped(): pass

        @pytest.fixture
        def broken():
            raise ValueError("no fixture")

        def test_has_no_fixture(broken): pass
    """
    result = run("-ra", "--junit-xml=report.xml", test_failing=failing, test_other="def test_it(): pass")
    result.assert_outcomes(passed=2, failed=1, skipped=1, errors=1, warnings=1)
    result.stdout.fnmatch_lines_random(["*printed before*", "*beware of this*", "*not here*", "*no fixture*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert (pytester.path / "report.xml").read_text().count("<testcase") == 5
    again = run("--last-failed")
    again.assert_outcomes(failed=1, errors=1)


def test_a_worker_that_dies_fails_its_test_and_another_runs_the_rest(run: Run) -> None:
    dies = """
        import os

        def test_before(): pass
        def test_dies(): os._exit(7)
        def test_after(): pass
    """
    result = run(test_dies=dies, test_other="def test_it(): pass")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*test_dies.py::test_dies: the worker process ended with exit code 7*"])


def test_a_fixture_of_the_session_that_cannot_end_is_an_error(run: Run) -> None:
    broken = """
        import pytest

        @pytest.fixture(scope="session")
        def server():
            yield
            raise ValueError("cannot end")

        def test_it(server): pass
    """
    result = run(test_broken=broken)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_it*", "*ValueError: cannot end*"])


def test_the_first_failure_ends_all_workers_and_their_fixtures(run: Run, pytester: pytest.Pytester) -> None:
    fails = """
        import time
        from pathlib import Path

        def test_fails():
            while not Path("begun").exists():
                time.sleep(0.01)
            assert False
    """
    waits = """
        import time
        import pytest
        from pathlib import Path

        @pytest.fixture
        def server():
            yield
            Path("ended").touch()

        def test_waits(server):
            Path("begun").touch()
            time.sleep(60)

        def test_later(): Path("later").touch()
    """
    result = run("--exitfirst", test_fails=fails, test_waits=waits)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])
    assert (pytester.path / "ended").exists()
    assert not (pytester.path / "later").exists()


def test_an_error_of_the_collection_runs_nothing(run: Run, pytester: pytest.Pytester) -> None:
    touches = "from pathlib import Path\n\ndef test_it(): Path('ran').touch()"
    result = run(test_broken="import no_such_module", test_touches=touches)
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert not (pytester.path / "ran").exists()
