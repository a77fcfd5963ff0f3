"""The Triton kernels of attention: a running softmax over paged keys, for prefill chunks and for decode."""
