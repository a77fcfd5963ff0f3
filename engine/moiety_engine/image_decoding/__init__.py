"""Decoding of images that strangers chose, in processes with enforced limits of memory and time."""
