"""Errors of the engine.

EngineError
├── InvalidConfig         a setting that cannot work, and what to set instead
├── CheckpointError       the checkpoint folder is missing, incomplete or not of a known family
├── OutOfMemory           the weights or the KV cache do not fit in the memory or on the disk that is there
├── SleepFileError        the weights of a sleeping engine cannot be read again
├── AdapterError          an adapter cannot be served beside this model
├── RanksError            the ranks of a model do not come together, or one of them is lost
└── InvalidRequest        a request of a program to the model in its own process is invalid
"""


class EngineError(Exception):
    """Root of the engine's errors."""


class InvalidConfig(EngineError):
    pass


class CheckpointError(EngineError):
    pass


class OutOfMemory(EngineError):
    pass


class SleepFileError(EngineError):
    pass


class AdapterError(EngineError):
    pass


class RanksError(EngineError):
    pass


class InvalidRequest(EngineError):
    pass
