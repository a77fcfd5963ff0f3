"""The engine's front process: gateways on one side, the core on the other, text in between. Imports no torch."""
