"""Spot classes: their price follows the idle capacity of the engines, and is fixed for a request at its admission."""
