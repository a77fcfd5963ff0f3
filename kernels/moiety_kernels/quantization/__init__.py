"""Quantized weights: numbers with the scales that restore the weights."""

from moiety_kernels.quantization.reference import dequantize, quantize
from moiety_kernels.quantization.weight import (
    DENSE_MXFP4,
    FORMATS,
    FP8,
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    QuantizedWeight,
    Weight,
    WeightFormat,
)

__all__ = [
    "DENSE_MXFP4",
    "FORMATS",
    "FP8",
    "INT4",
    "INT8",
    "MXFP4",
    "NVFP4",
    "QuantizedWeight",
    "Weight",
    "WeightFormat",
    "dequantize",
    "quantize",
]
