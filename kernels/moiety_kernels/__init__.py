"""Operations of a decoder, one folder each: `reference.py` is the definition, the package's function checks its input
and chooses the implementation that is fast where the tensors live. Knows tensors; knows no model and no request.
"""
