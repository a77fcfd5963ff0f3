"""Moiety under faults: a small cluster of real processes in networks of their own, steady load of all classes, one
fault after the other with quiet between, and at the end the books. `docs/chaos.md` says what is broken and what must
hold.

    command  where the two commands run: `python -m chaos`, and `python -m chaos.soak`
    places   networks, a small disk, a clock: what can be broken that is no process
    stage    the processes
    load     what is asked of them, and what each client saw; `batch` and `poison` are asked beside it
    faults   what breaks and is mended
    play     a run: load, faults, verdict; `soak` is one of a day
    watch    health of the stage, and what its processes hold
    judge    what must hold, from clients, books and engines; `books` and `store` read them
    report   the table
"""
