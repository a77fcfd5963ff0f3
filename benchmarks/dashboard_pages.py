"""Render time of the dashboard's pages on a large store, and their cost to the serving latency.

    python benchmarks/dashboard_pages.py [--stores sqlite,postgres] [--tenants 500] [--requests 2000000]
        [--spans 5000000] [--rounds 12] [--pairs 10] [--seconds 20]
    python benchmarks/dashboard_pages.py --stores sqlite --made /tmp/large [--postgres-url URL] [--parts idle,serving]

Each store is made by `large_store.py`, or read from a folder where that script left it. The script of every page draws
it against a real gateway, several times on an idle gateway and several times under a request rate; each admin API read
of the page is timed. Then serving latency is measured with and without visitors, who open another page every three
seconds, in pairs of runs in random order. `--parts` measures some of these and keeps the other figures of the output;
pairs are added to the existing ones. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from large.load import RATE, send, send_until  # noqa: E402 - the script's own folder
from large.requests import Sender  # noqa: E402
from large.visits import Visitor, all_views, timing_reads, visit_until  # noqa: E402
from large_store import add_options, new_store, read_senders, serving  # noqa: E402
from open_loop import Sent  # noqa: E402

from moiety_platform.bench.environment import describe_environment  # noqa: E402

PARTS = ("idle", "under_load", "serving")
BOUND_S = 1.5
NUM_RESAMPLES = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", default="sqlite,postgres")
    parser.add_argument(
        "--rounds", type=int, default=12, help="number of times that each page is rendered, idle and under load"
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each run of a pair")
    parser.add_argument("--visitors", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="folder for the stores, which are deleted afterwards")
    parser.add_argument("--made", type=Path, help="data folder of an existing store, which is kept")
    parser.add_argument("--postgres-url", help="database of the existing store, if it is PostgreSQL")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "dashboard_pages.json")
    add_options(parser)
    options = parser.parse_args()
    if set(options.parts) < set(PARTS) and not options.output.exists():
        parser.error(f"--parts adds to an --output that is there, and {options.output} is not: leave --parts out")
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment(),
        "bound_ms": 1000 * BOUND_S,
        "stores": json.loads(options.output.read_text())["stores"] if set(options.parts) < set(PARTS) else {},
    }
    for name in options.stores.split(","):
        found = report["stores"].setdefault(name, {})
        if options.made is None:
            with tempfile.TemporaryDirectory(prefix=f"moiety-large-{name}-", dir=options.folder) as folder:
                Path(folder).chmod(0o755)  # PostgreSQL runs as a user of its own
                make_and_measure(name, Path(folder), options, found)
        else:
            measure_store(options.made, options.postgres_url, options, found)
        parts = [found[part]["pages"] for part in PARTS[:2] if part in found]
        found["slowest_page_p95_ms"] = max((one["p95_ms"] for pages in parts for one in pages.values()), default=None)
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    slow = {name: store["slowest_page_p95_ms"] for name, store in report["stores"].items()}
    print(json.dumps(slow))
    sys.exit(0 if all(p95_ms is None or p95_ms <= 1000 * BOUND_S for p95_ms in slow.values()) else 1)


def make_and_measure(name: str, folder: Path, options: argparse.Namespace, found: dict[str, Any]) -> None:
    with new_store(name, folder, options) as (data_dir, url, found["store"]):
        measure_store(data_dir, url, options, found)


def measure_store(data_dir: Path, url: str | None, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure each of the requested parts."""
    senders = read_senders(data_dir)
    with serving(data_dir, url) as (gateway, _, admin_key):
        visitor = Visitor(gateway, admin_key, senders[0].tenant_id)
        if "idle" in options.parts:
            found["idle"] = draw_all(visitor, options.rounds, lambda: cpu_s_of(data_dir))
        if "under_load" in options.parts:
            with beside(send_until, gateway, senders):
                found["under_load"] = draw_all(visitor, options.rounds, lambda: cpu_s_of(data_dir))
        if "serving" in options.parts:
            found["serving"] = compare(gateway, admin_key, senders, options, found.get("serving", {}))


def cpu_s_of(data_dir: Path) -> float:
    """Return the CPU seconds of the gateway on this folder and of this process, which renders, so far."""
    mine = [str(data_dir), "gateway"]
    gateways = [
        one for one in psutil.process_iter(["cmdline"]) if all(part in (one.info["cmdline"] or ()) for part in mine)
    ]
    return sum(sum(one.cpu_times()[:2]) for one in (*gateways, psutil.Process()))


def draw_all(visitor: Visitor, rounds: int, cpu_s: Callable[[], float]) -> dict[str, Any]:
    """Return the seconds of each page and read, and of pages' CPU time; report what failed."""
    pages: defaultdict[str, list[float]] = defaultdict(list)
    on_cpu: defaultdict[str, list[float]] = defaultdict(list)
    failed: list[str] = []
    with timing_reads() as reads:
        for _ in range(rounds):
            for name, view in all_views().items():
                before_s = cpu_s()
                try:
                    drawn_s = visitor.look(view)
                except RuntimeError as problem:
                    failed.append(f"{name}: {problem}")
                else:
                    pages[name].append(drawn_s)
                    on_cpu[name].append(cpu_s() - before_s)
    listed = {"pages": pages, "pages_on_processor": on_cpu, "reads": reads}
    figures = {what: {name: spread(values) for name, values in sorted(of.items())} for what, of in listed.items()}
    return {"load_average": round(os.getloadavg()[0], 1), "failed": failed, **figures}


def spread(seconds: list[float]) -> dict[str, float]:
    p50, p95 = np.percentile(seconds, [50, 95])
    return {"times": len(seconds), "p50_ms": round(1000 * float(p50), 1), "p95_ms": round(1000 * float(p95), 1)}


@contextlib.contextmanager
def beside(target: Any, *arguments: Any, number: int = 1) -> Iterator[Any]:
    """Run the function in separate processes until the block ends; yield the total number of calls.

    The block begins when each process has begun.
    """
    spawn = mp.get_context("spawn")
    ended, done = spawn.Event(), [spawn.Value("i", 0) for _ in range(number)]
    workers = [spawn.Process(target=target, args=(*arguments, ended, one)) for one in done]
    for worker in workers:
        worker.start()
    try:
        while not all(one.value for one in done):
            if not all(worker.is_alive() for worker in workers):
                sys.exit("a process beside the measurement has ended; its complaint stands above")
            time.sleep(0.1)
        yield lambda: sum(one.value for one in done)
    finally:
        ended.set()
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit("a process beside the measurement has failed; its complaint stands above")


def compare(
    gateway: str, admin_key: str, senders: list[Sender], options: argparse.Namespace, before: dict[str, Any]
) -> dict[str, Any]:
    """Compare the serving latency with and without visitors, in pairs added to earlier ones.

    The first run is not counted, since a tenant's first request at a gateway waits for its key and leases.
    """
    rng, pairs = random.Random(), []
    send(gateway, senders, options.seconds)
    num_drawn = before.get("pages_drawn_meanwhile", 0)
    for _ in range(options.pairs):
        pair: dict[str, list[Sent]] = {}
        for kind in rng.sample(["without", "with"], 2):
            if kind == "without":
                pair[kind] = send(gateway, senders, options.seconds)
                continue
            with beside(visit_until, gateway, admin_key, senders[0].tenant_id, number=options.visitors) as drawn:
                num_drawn -= drawn()
                pair[kind] = send(gateway, senders, options.seconds)
                num_drawn += drawn()
        pairs.append(pair)
    answers, p99 = before.get("answers", {}), before.get("p99_ms", {})
    for kind in ("without", "with"):
        p99[kind] = [*p99.get(kind, ()), *(round(p99_ms(pair[kind]), 2) for pair in pairs)]
        ended = Counter(f"{one.status} {one.code}".strip() for pair in pairs for one in pair[kind])
        answers[kind] = dict(ended + Counter(answers.get(kind, {})))
    differences = np.subtract(p99["with"], p99["without"])
    resampled = np.random.default_rng(7).choice(differences, (NUM_RESAMPLES, len(differences))).mean(axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {
        "requests_per_s": RATE,
        "visitors": options.visitors,
        "pages_drawn_meanwhile": num_drawn,
        "seconds_a_run": options.seconds,
        "answers": answers,
        "p99_ms": p99,
        "p99_difference_ms": {
            "mean": round(float(differences.mean()), 2), "low": round(float(low), 2), "high": round(float(high), 2),
        },
    }  # fmt: skip


def p99_ms(sent: list[Sent]) -> float:
    """Return the p99 of the time from when each request was due to its answer."""
    return 1000 * float(np.percentile([one.latency_s for one in sent], 99))


if __name__ == "__main__":
    main()
