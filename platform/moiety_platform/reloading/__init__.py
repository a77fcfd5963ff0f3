"""A process's configuration file, watched while it runs: what changed in it is taken, or waits for a restart."""
