"""`python -m moiety_engine.core --address ipc://…`: one core, started by a front."""

import gc
import sys

gc.disable()  # thousands of objects that stay are about to be made; `process` turns it on when they are there

from moiety_engine.core.process import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
