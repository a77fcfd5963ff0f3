"""Entry point of `python -m moiety_platform.cli`, which is the same as `moiety`."""

from __future__ import annotations

from moiety_platform.cli.main import main

if __name__ == "__main__":
    main()
