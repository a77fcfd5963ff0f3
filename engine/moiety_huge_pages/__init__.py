"""Memory of a process in pages of 2 MiB, which need fewer address translations. Linux 6.1 or later."""
