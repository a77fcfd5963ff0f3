"""The Triton kernels of attention: a running softmax over paged keys, for chunks of prompts and for decoding."""
