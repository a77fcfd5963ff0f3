"""Known properties of the GPU that holds a tensor."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from moiety_kernels.gpu.targets import GFX942, H200, SM_80, SM_90, SM_100, DeviceModel

_KNOWN = {model.name: model for model in (H200,)}
_OLDER_FLOPS = 0.35  # products per multiprocessor, relative to Hopper, on older GPUs


@functools.cache
def device_model(device: torch.device) -> DeviceModel:
    """Return the model of that GPU: the measured one if known, else a Hopper scaled to its multiprocessors.

    For a CPU, where kernels are interpreted, it is the H200's, so that its choices can be inspected.
    """
    if device.type == "cpu":
        return H200
    properties = torch.cuda.get_device_properties(device)
    if properties.name in _KNOWN:
        return _KNOWN[properties.name]
    if torch.version.hip is not None:
        target, speed = GFX942, 1.0
    else:
        capability = torch.cuda.get_device_capability(device)
        target = SM_100 if capability >= (10, 0) else SM_90 if capability >= (9, 0) else SM_80
        speed = 1.0 if capability >= (9, 0) else _OLDER_FLOPS
    share = properties.multi_processor_count / H200.num_sms
    return replace(
        H200,
        name=properties.name,
        target=target,
        num_sms=properties.multi_processor_count,
        memory_bytes_per_s=H200.memory_bytes_per_s * min(1.0, share) * (0.5 if speed < 1.0 else 1.0),
        flops_bf16=H200.flops_bf16 * share * speed,
        flops_fp8=H200.flops_fp8 * share * speed,
        l2_bytes=properties.L2_cache_size,
    )
