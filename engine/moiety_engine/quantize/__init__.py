"""Writing a checkpoint anew in few bits, and what that costs in quality."""
