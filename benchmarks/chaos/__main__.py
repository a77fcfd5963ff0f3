"""`python -m chaos [--faults NAME …] [--short]`: inject all faults under load, then compare usage records.

Exits with 1 if a check fails, with 2 if this machine lacks something that the run needs. Needs Linux, iproute2,
util-linux and the `dev` extra.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from chaos.command import add_places, perform
from chaos.faults import HARD, SHORT, SOFT
from chaos.play import Play, play
from chaos.report import as_markdown


def main() -> None:
    options = _options()
    report = perform("chaos", options, partial(play, _play(options)))
    table = as_markdown(report)
    options.output.with_suffix(".md").write_text(table)
    print(table)
    sys.exit(0 if all(report["verdict"].values()) else 1)


def _options() -> argparse.Namespace:
    every = [*SOFT, *HARD]
    parser = argparse.ArgumentParser(
        prog="chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", nargs="+", choices=every, metavar="NAME", default=every, help=", ".join(every))
    parser.add_argument(
        "--short", action="store_true", help="inject three faults on the scripted engine, in about a minute"
    )
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second to the scripted engines")
    parser.add_argument("--demo-rate", type=float, default=0.5, help="requests per second to the demo model")
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds of load before the first fault")
    parser.add_argument(
        "--filling", type=int, default=20_000, help="requests before the warm-up, sent as fast as they are answered"
    )
    parser.add_argument("--quiet", type=float, default=22.0, help="seconds of load without a fault after each fault")
    parser.add_argument("--batch-lines", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    add_places(parser, "chaos.json")  # and the table beside it, as .md
    return parser.parse_args()


def _play(options: argparse.Namespace) -> Play:
    names = SHORT if options.short else options.faults
    return Play(
        soft={name: fault for name, fault in SOFT.items() if name in names},
        hard={name: fault for name, fault in HARD.items() if name in names},
        rate=options.rate,
        demo_rate=options.demo_rate,
        warm_up_s=4.0 if options.short else options.warm_up,
        num_filling=0 if options.short else options.filling,
        quiet_s=11.0 if options.short else options.quiet,
        batch_lines=60 if options.short else options.batch_lines,
        seed=options.seed,
        demo=not options.short,
    )


if __name__ == "__main__":
    main()
