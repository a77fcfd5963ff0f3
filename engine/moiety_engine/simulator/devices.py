"""Step-time model of a device: a roofline with few constants, as presets or calibrated on a real engine.

    seconds = overhead + (weights^p + rows · token)^(1/p) + rows beyond each bend · its more
              + prefill_step, where the step has prompt tokens
              + rows that end a sequence's step · row
              + KV tokens read · kv_token + attended pairs · pair + blocks copied to or from the host / bandwidth

`weights` is the time to read the weights that a step of that many rows touches: always the dense part, and of the
experts the share that uniform routing activates, 1 − (1 − fraction)^rows. p = 2 lets reading and multiplying overlap
imperfectly, as they do near the ridge; p = 1 is the additive form that a calibration fits.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from moiety_engine.errors import InvalidConfig


class SimulatedDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica: a model on a device, its limits and the constants of its step time. All times are in seconds."""

    name: str
    overhead_s: float  # constant part of a step: launch, scheduling, sampling
    dense_s: float = 0.0  # read the weights that every step reads
    experts_s: float = 0.0  # read all experts
    expert_fraction: float = 1.0  # share of the experts that one token activates
    token_s: float  # multiply, per row
    row_s: float = 0.0  # per sequence in the step
    prefill_step_s: float = 0.0  # added to a step that has prompt tokens
    kv_token_s: float  # read one token's KV in decode
    pair_s: float  # attention of one prompt token to one token
    exponent: float = 2.0
    bends: tuple[tuple[int, float], ...] = ()  # (rows, seconds per row beyond them)
    kv_tokens: int
    block_size: int = 16
    max_batch_tokens: int = 2048
    chunk_tokens: int | None = None  # rows of a step under policies that do not size it by time
    max_running: int = 256
    kv_token_bytes: int
    host_tokens: int = 0  # size of the host-memory tier; 0: none
    copy_bytes_per_s: float = 25e9
    fit_error: float | None = None  # mean relative error of a calibration

    def step_s(
        self, rows: int, sequences: int, decode_context: int, attended_pairs: int, copied_blocks: int = 0
    ) -> float:
        """Return the seconds of a step.

        `rows` counts all rows and `sequences` the sequences that they belong to; `decode_context` counts the tokens
        whose KV the decode rows read, and `attended_pairs` the pairs of a prompt token and a token that it attends to.
        """
        weights_s = self.dense_s
        if self.experts_s:
            weights_s += self.experts_s * (1 - (1 - self.expert_fraction) ** rows)
        multiply_s = rows * self.token_s
        exponent = self.exponent
        roofline_s: float = (weights_s**exponent + multiply_s**exponent) ** (1 / exponent)
        copies_s = copied_blocks * self.block_size * self.kv_token_bytes / self.copy_bytes_per_s
        return (
            self.overhead_s
            + (self.prefill_step_s if attended_pairs else 0.0)
            + roofline_s
            + sum(max(0, rows - bend) * more_s for bend, more_s in self.bends)
            + sequences * self.row_s
            + decode_context * self.kv_token_s
            + attended_pairs * self.pair_s
            + copies_s
        )

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // self.block_size

    @property
    def host_blocks(self) -> int:
        return self.host_tokens // self.block_size


# VTC's setting: S-LoRA's runtime with Llama-2-7B in fp16 on an A10G, and a pool of 10,000 tokens (launch_server.py of
# its artefact). 6.74e9 parameters; 600 GB/s nominal, taken at 85 %; 125 TFLOP/s nominal for dense fp16, taken at half.
# KV: 2 · 32 layers · 4,096 · 2 bytes. Attention: 4 · 4,096 · 32 FLOP per pair at 40 TFLOP/s. Its measured batch costs
# (cost_profile.json: 37 ms for a step of 19 rows over 7,300 tokens, 213 µs per prompt token) agree with these to about
# a tenth and give row_s. The overhead is chosen so that FCFS on the artefact's real trace completes 777 tokens/s, as in
# its logs, with 50 ms between tokens (logs: 45).
A10G_LLAMA2_7B = SimulatedDevice(
    name="a10g-llama2-7b",
    overhead_s=0.0063,
    dense_s=13.48e9 / 510e9,
    row_s=6e-5,
    token_s=2 * 6.74e9 / 62e12,
    kv_token_s=524_288 / 510e9,
    pair_s=4 * 4096 * 32 / 40e12,
    kv_tokens=10_000,
    max_batch_tokens=2048,
    max_running=256,
    kv_token_bytes=524_288,
    host_tokens=40_000,  # 21 GB of the instance's memory
    copy_bytes_per_s=12e9,  # PCIe 4.0, as virtual machines with this card provide it
)

# Llama-3-8B in bf16 on an A100 of 80 GB. 8.03e9 parameters; 2,039 GB/s at 85 %; 312 TFLOP/s at 58 %, which gives 10 to
# 11 thousand prompt tokens/s at large chunks. KV: 2 · 32 layers · 1,024 · 2 bytes; 52 GB. QoServe's baselines run a
# fixed chunk of 256 tokens on this card, chosen for 50 ms between tokens; here, that step takes about 37 ms.
A100_LLAMA3_8B = SimulatedDevice(
    name="a100-llama3-8b",
    overhead_s=0.006,
    dense_s=16.06e9 / 1.73e12,
    token_s=2 * 8.03e9 / 181e12,
    kv_token_s=131_072 / 1.73e12,
    pair_s=4 * 4096 * 32 / 150e12,
    kv_tokens=400_000,
    max_batch_tokens=2048,
    chunk_tokens=256,
    max_running=256,
    kv_token_bytes=131_072,
    host_tokens=800_000,  # 105 GB
    copy_bytes_per_s=22e9,  # PCIe 4.0 x16, pinned memory
)

# The same card with the runtime that QoServe was measured on. The paper gives the profile of its steps (section 4.1.4,
# figure 4): 256 rows keep 50 ms per token, which is why it uses them, and steps of 2,500 rows have twice their
# throughput (here more than 1.3 times). The constant part of a step is chosen so that both hold, with products at 63 %.
# The shortest step takes 33 ms, so the shipped TPOT target of `priority` cannot be attained on it.
A100_LLAMA3_8B_QOSERVE = msgspec.structs.replace(
    A100_LLAMA3_8B, name="a100-llama3-8b-qoserve", overhead_s=0.0238, token_s=2 * 8.03e9 / 197e12
)

# Qwen3-30B-A3B in bf16 on an H200: copies at 4.3 TB/s and products at 790 TFLOP/s, both measured, are the floor of one
# MoE layer (18, 278, 302, 1,566 µs at 1, 64, 1,024, 16,384 tokens, which dense_s, experts_s and token_s with exponent 2
# reproduce); here at 85 % and 55 % of them, which good kernels reach. 48 layers of 128 experts, top 8: 1.208 GB of
# experts per layer, 1.81 GB of attention and 0.62 GB of output head. KV: 2 · 48 · 512 · 2 bytes; 60 GB in total.
H200_QWEN3_30B_A3B = SimulatedDevice(
    name="h200-qwen3-30b-a3b",
    overhead_s=0.003,
    dense_s=2.43e9 / (0.85 * 4.3e12),
    experts_s=48 * 1.208e9 / (0.85 * 4.3e12),
    expert_fraction=8 / 128,
    token_s=48 * (1566e-6 / 16384 + 2 * 18.9e6 / 790e12) / 0.55,
    kv_token_s=98_304 / (0.85 * 4.3e12),
    pair_s=4 * 4096 * 48 / (0.5 * 790e12),
    kv_tokens=600_000,
    max_batch_tokens=8192,
    max_running=256,
    kv_token_bytes=98_304,
    host_tokens=2_000_000,  # 197 GB
    copy_bytes_per_s=45e9,  # PCIe 5.0 x16, pinned memory
)

PRESETS = {
    device.name: device for device in (A10G_LLAMA2_7B, A100_LLAMA3_8B, A100_LLAMA3_8B_QOSERVE, H200_QWEN3_30B_A3B)
}


def find_device(name_or_path: str) -> SimulatedDevice:
    """Return a preset by its name, or the device that `moiety bench engine --calibrate FILE` wrote.

    Raises InvalidConfig.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise InvalidConfig(
            f"{name_or_path!r} is neither a preset ({', '.join(PRESETS)}) nor a file; create one with: "
            f"moiety bench engine --calibrate {path.name or 'device.json'}"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=SimulatedDevice)
    except msgspec.DecodeError as exc:
        raise InvalidConfig(f"{path} does not describe a device: {exc}") from exc
