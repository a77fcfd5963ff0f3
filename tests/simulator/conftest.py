"""A small device with simple step times, and the requests that the tests simulate on it."""

from __future__ import annotations

import pytest

from moiety_engine.simulator.devices import SimulatedDevice
from moiety_platform.cli.main import main


def run_command(*arguments: object) -> int:
    """Run the command `moiety` with these arguments, and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    return int(ended.value.code or 0)


@pytest.fixture(scope="session")
def small() -> SimulatedDevice:
    return SimulatedDevice(
        name="small",
        overhead_s=0.004,
        dense_s=0.01,
        token_s=0.0001,
        kv_token_s=1e-6,
        pair_s=1e-8,
        kv_tokens=2048,
        max_batch_tokens=128,
        max_running=16,
        kv_token_bytes=1000,
        host_tokens=1024,
        copy_bytes_per_s=1e9,
    )
