"""The moiety policy and its parts."""
