"""Parts of the fleet measurements: engines in one process, and their gateways."""
