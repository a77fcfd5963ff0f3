"""Entry point of a core process, started by an engine server: `python -m moiety_engine.core --address ipc://…`."""

import gc
import sys

gc.disable()  # start-up creates thousands of long-lived objects; `service` enables collection afterwards

from moiety_engine.core.process import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
