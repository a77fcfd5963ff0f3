"""Decoding of images of clients, in processes with enforced limits of memory and time."""
