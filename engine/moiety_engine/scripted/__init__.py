"""A core that answers by a script, without model and torch: for tests, and for measuring all around a core."""
