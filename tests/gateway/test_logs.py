"""Log lines of one turn of the event loop are written at once and in order; a warning is written immediately."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
from pathlib import Path
from typing import TextIO, cast

import pytest
import structlog

from moiety_platform.logs import Lines, configure_logging
from moiety_wire.lossy_stream import LossyStream


class Writes(io.StringIO):
    """Records each write."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def write(self, text: str) -> int:
        self.made.append(text)
        return super().write(text)


async def test_log_lines_of_one_loop_iteration_are_written_at_once() -> None:
    writes = Writes()
    lines = Lines(writes)
    lines.info("one")
    lines.debug("two")
    assert writes.made == []
    await asyncio.sleep(0)
    assert writes.made == ["one\ntwo\n"]
    lines.info("three")
    await asyncio.sleep(0)
    assert writes.made == ["one\ntwo\n", "three\n"]


async def test_a_warning_is_written_at_once_after_earlier_lines() -> None:
    writes = Writes()
    lines = Lines(writes)
    lines.info("one")
    lines.warning("two")
    assert writes.getvalue() == "one\ntwo\n"
    await asyncio.to_thread(lines.info, "in a thread")
    assert writes.getvalue() == "one\ntwo\nin a thread\n"


def test_log_lines_without_a_running_loop_are_written() -> None:
    writes = Writes()
    lines = Lines(writes)

    async def tell_and_stop(loop: asyncio.AbstractEventLoop) -> None:
        loop.stop()  # this turn is the last, so the next one never runs
        lines.info("one")

    loop = asyncio.new_event_loop()
    task = loop.create_task(tell_and_stop(loop))
    loop.run_forever()
    assert task.done()
    loop.close()
    lines.info("two")
    assert writes.getvalue() == "one\ntwo\n"


def test_a_full_disk_loses_log_lines_and_raises_nothing_and_the_log_says_how_much_is_missing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Path("/dev/full").open("w") as full, log.open("w") as empty:
        stream = LossyStream(full)
        lines = Lines(cast(TextIO, stream))
        lines.warning("lost")
        lines.warning("lost as well")
        os.dup2(empty.fileno(), full.fileno())  # there is space again
        lines.warning("written")
    lost = len("lost\n") + len("lost as well\n")
    assert stream.total_lost_bytes == lost
    told, written = log.read_text().strip().splitlines()
    event = json.loads(told)
    assert (event["event"], event["bytes"], event["reason"]) == ("log_output_lost", lost, "No space left on device")
    assert written == "written"


def test_configured_loggers_survive_a_full_disk(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Path("/dev/full").open("w") as full, log.open("w") as empty:
        configure_logging("info", "json", full)
        try:
            structlog.get_logger().error("engine_lost")
            logging.getLogger("library").error("of a library")
            os.dup2(empty.fileno(), full.fileno())
            structlog.get_logger().error("engine_lost_again")
            assert [json.loads(line)["event"] for line in log.read_text().split("\n") if line] == [
                "log_output_lost", "engine_lost_again",
            ]  # fmt: skip
        finally:
            structlog.reset_defaults()
            logging.getLogger().handlers.clear()


HOSTILE = "a\x1b[2J\x9b2J\r\nb\u202egnp\u2028"


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_log_lines_contain_no_terminal_control_characters(log_format: str) -> None:
    stream = io.StringIO()
    configure_logging("info", log_format, stream)
    try:
        structlog.get_logger().warning("engine_lost", name=HOSTILE, named=HOSTILE.replace("\n", ""))
        logging.getLogger("library").warning("of %s", HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            structlog.get_logger().warning("failed", exc_info=True)
    finally:
        structlog.reset_defaults()
        logging.getLogger().handlers.clear()
    told = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())  # our own colours
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", told)
    if log_format == "json":
        first, second, _ = map(json.loads, told.splitlines())  # a line each, which nobody can forge
        assert first["name"] == HOSTILE
        assert HOSTILE in second["event"]
