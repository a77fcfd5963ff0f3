"""Operations of a decoder, one folder each.

`reference.py` is the definition. The package's function checks its input and chooses the fastest implementation for the
device that holds the tensors. The package handles tensors only; models and requests are outside it.
"""
