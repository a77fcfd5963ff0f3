"""Weights in few bits: whole numbers beside the scales that make weights of them."""

from moiety_kernels.quantization.reference import dequantize, quantize
from moiety_kernels.quantization.weight import FORMATS, INT4, INT8, MXFP4, QuantizedWeight, Weight, WeightFormat

__all__ = ["FORMATS", "INT4", "INT8", "MXFP4", "QuantizedWeight", "Weight", "WeightFormat", "dequantize", "quantize"]
