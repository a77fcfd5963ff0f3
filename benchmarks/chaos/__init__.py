"""Fault injection: a small cluster of real processes under steady load, with one fault after the other.

Each process has its own network, and at the end usage records are compared. `docs/chaos.md` lists the faults and the
checks.

    command  where the two commands run: `python -m chaos`, and `python -m chaos.soak`
    places   networks, a small disk, a clock: breakable things that are not processes
    stage    the processes
    load     requests, and what each client saw; `batch` and `poison` are sent at the same time
    faults   injected faults and their repair
    play     a run: load, faults, verdict; `soak` is one of a day
    watch    health of the stage, and what its processes hold
    judge    checks, from clients, usage records and engines; `books` and `store` read them
    report   the table
"""
