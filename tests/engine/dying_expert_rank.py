"""An expert rank that joins a running group and is killed when it begins to create the group's next process groups."""

from __future__ import annotations

import os
import signal
import sys
from unittest.mock import patch

from moiety_engine.core.worker import main
from moiety_engine.distribution import rank_scaling

if __name__ == "__main__":
    with patch.object(rank_scaling, "_create_groups", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
        sys.exit(main())
