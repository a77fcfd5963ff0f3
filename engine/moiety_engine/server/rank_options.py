"""Command-line options of `moiety engine` for distributed inference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RANKS = "Over several devices"

TpOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_TP",
        min=1,
        rich_help_panel=RANKS,
        help="Ranks that share the heads and columns of each layer. Ranks = pp × dp-attention × tp.",
    ),
]
DpAttentionOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_DP_ATTENTION",
        min=1,
        rich_help_panel=RANKS,
        help="Groups of such ranks, each with sequences of its own, that share the experts.",
    ),
]
EpOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_EP",
        min=1,
        rich_help_panel=RANKS,
        help="Parts that the experts are divided into; divides dp-attention × tp, the ranks that have them.",
    ),
]
PpOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_PP", min=1, rich_help_panel=RANKS, help="Stages of layers, one after the other."
    ),
]
FfnRanksOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_FFN_RANKS",
        min=0,
        rich_help_panel=RANKS,
        help="Further ranks that have the experts and nothing else; the others then have none, and --ep divides these.",
    ),
]
MicroBatchesOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_MICRO_BATCHES",
        min=1,
        rich_help_panel=RANKS,
        help="With --ffn-ranks: into how many a step is cut at most, by turns at attention and at the experts.",
    ),
]
MicroBatchTokensOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_MICRO_BATCH_TOKENS",
        min=1,
        rich_help_panel=RANKS,
        help="The fewest tokens of a micro-batch, of the group that has the most: smaller steps are not cut.",
    ),
]
RedundantExpertsOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_REDUNDANT_EXPERTS",
        min=0,
        rich_help_panel=RANKS,
        help="Slots of each layer for second replicas of hot experts, over all parts; --ep divides it.",
    ),
]
RebalanceEveryOption = Annotated[
    float | None,
    typer.Option(
        envvar="MOIETY_ENGINE_REBALANCE_EVERY_S",
        min=0,
        rich_help_panel=RANKS,
        help="Seconds after which experts move between ranks where that pays; 0: never. "
        "Left out: 60 with --redundant-experts, else never.",
    ),
]
JoinTimeoutOption = Annotated[
    float,
    typer.Option(
        envvar="MOIETY_ENGINE_JOIN_TIMEOUT_S",
        min=1,
        rich_help_panel=RANKS,
        help="Seconds that ranks wait for each other at the start.",
    ),
]
AllowUnauthenticatedRanksOption = Annotated[
    bool,
    typer.Option(
        "--allow-unauthenticated-ranks",
        envvar="MOIETY_ENGINE_ALLOW_UNAUTHENTICATED_RANKS",
        rich_help_panel=RANKS,
        help="Let ranks of several hosts talk over links without keys; for a network of their own.",
    ),
]
ExcludeRankAfterOption = Annotated[
    float | None,
    typer.Option(
        envvar="MOIETY_ENGINE_EXCLUDE_RANK_AFTER_S",
        min=1,
        rich_help_panel=RANKS,
        help="Seconds after which ranks start without those that have not come, if they can have their experts. "
        "Left out: they wait for all.",
    ),
]
RankFailureLogOption = Annotated[
    Path | None,
    typer.Option(
        envvar="MOIETY_ENGINE_RANK_FAILURE_LOG",
        dir_okay=False,
        rich_help_panel=RANKS,
        help="With --exclude-rank-after-s: where the first rank notes which others were lost, for its next start.",
    ),
]
ExcludeRankAfterFailuresOption = Annotated[
    int | None,
    typer.Option(
        envvar="MOIETY_ENGINE_EXCLUDE_RANK_AFTER_FAILURES",
        min=1,
        rich_help_panel=RANKS,
        help="A rank that was lost so often of late, by --rank-failure-log, is done without. Left out: 3 times.",
    ),
]
RankFailuresWithinOption = Annotated[
    float | None,
    typer.Option(
        envvar="MOIETY_ENGINE_RANK_FAILURES_WITHIN_S",
        min=1,
        rich_help_panel=RANKS,
        help="Seconds for which a loss counts; more than so many starts of the group take. Left out: 600.",
    ),
]
