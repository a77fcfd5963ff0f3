"""Hot reload of a process's configuration file: a change is applied, or waits for a restart."""
