"""Formats of quantized checkpoints: how their tensors are read, as stored or dequantized. Independent of families."""
