"""Gain of speculative (next-turn) prefill for the next turn of a conversation.

    python benchmarks/speculative_prefill.py [--conversations 8] [--turns 4] [--trace mooncake/conversation_trace.jsonl]

One engine, one gateway, two tenants with the same requests in turn: one with speculative prefill, one without. Two
models: the demo model with its own template, and one of random weights with a template that opens a reasoning block and
omits reasoning from later prompts. There `</think>` and the end are made likely, so that reasoning has some 60 tokens
and the answer some 200. Between two turns a client waits for a second. The output has the TTFT of all turns but the
first, cached tokens, and the tokens that were prefilled, used and wasted.

With a trace in Mooncake's form, it also reports how often a predicted next turn arrives: every prompt is a turn,
identified by the hash of its last whole block; conversations of the same number of turns share a pattern, since the
trace names no tenants.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import date
from pathlib import Path
from typing import Any

import httpx
from disaggregation import CLI, START_S, Engines, _is_up, _start, until

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.scheduling.speculative_prefill.return_patterns import ConversationWatch, ReturnPatterns
from moiety_engine.scheduling.speculative_prefill.speculative_prefill import LIKELY
from moiety_platform.bench.environment import describe_environment
from moiety_platform.speculative_prefill.next_turn_prefill import MAX_DEPTH
from moiety_platform.supervisor.ports import claim_port

HERE = Path(__file__).parent
THINK_S = 1.0
SHAPE = {
    "vocab_size": 2050,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 8192,
}
OPENER, CLOSER, END = 2048, 2049, 2044
THINKING = (
    "{% for message in messages %}{% set text = message['content'] or '' %}{% if message['role'] == 'assistant' %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + text + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "speculative_tokens", "speculative_used_tokens")
WORDS = "What is {a} + {b}? Add {a} to {b}, and tell the capital of France as well."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--models", nargs="+", choices=("demo", "thinking"), default=("demo", "thinking"))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "speculative_prefill.json")
    options = parser.parse_args()
    report: dict[str, Any] = {"date": date.today().isoformat(), "command": " ".join(["python", *sys.argv])}
    report["environment"] = describe_environment()
    with tempfile.TemporaryDirectory(prefix="moiety-speculative_prefill-") as name:
        for model in options.models:
            report[model] = asyncio.run(measure(model, Path(name) / model, options))
            print(json.dumps({model: report[model]["ttft_ms"]}), file=sys.stderr)
    if options.trace is not None:
        report["trace"] = {"name": options.trace.name, **replay(options.trace)}
    options.output.write_text(json.dumps(report, indent=2) + "\n")


async def measure(model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model with the same conversations for both tenants, turn by turn."""
    flags = [] if model == "demo" else ["--model", str(make_thinking(folder)), "--load-format", "dummy"]
    extra = {} if model == "demo" else {"logit_bias": {str(CLOSER): 3.5, str(END): 2.5}, "min_tokens": 150}
    async with serving(folder / "run", flags) as (client, admin, keys):
        pairs: list[dict[str, dict[str, Any]]] = []
        for number in range(options.conversations):
            chats: dict[str, list[dict[str, Any]]] = {name: [] for name in keys}
            for turn in range(options.turns):
                pair = {}
                for name in sorted(keys, reverse=bool((number + turn) % 2)):
                    chats[name].append({"role": "user", "content": words(number, turn)})
                    body = {"messages": chats[name], "temperature": 1.0, "seed": 1000 * number + turn, **extra}
                    pair[name] = await ask(client, keys[name], body | {"model": "model", "max_tokens": 600})
                    chats[name].append({"role": "assistant", "content": pair[name].pop("content")})
                if turn and all(pair[name]["ended"] == "stop" for name in keys):
                    pairs.append(pair)
                await asyncio.sleep(THINK_S)
        await asyncio.sleep(THINK_S)
        usage = (await admin("GET", "/admin/v1/usage?group_by=tenant"))["data"]
        load = (await admin("GET", "/admin/v1/engines"))["data"][0]["load"]
        return summary(pairs) | {
            "usage": {one["group"]["tenant_name"]: {count: one["totals"][count] for count in COUNTS} for one in usage},
            "engine": {name: value for name, value in load.items() if name.startswith("speculative")},
        }


def replay(trace: Path) -> dict[str, Any]:
    """Return the numbers of turns that arrived, of predicted turns, and of predicted turns that arrived."""
    patterns = ReturnPatterns()
    watch: ConversationWatch[tuple[int, bool]] = ConversationWatch(
        patterns
    )  # how many turns it had, and whether it was likely to go on
    seen: set[int] = set()
    counts: dict[str, Counter[str]] = {str(depth): Counter() for depth in range(MAX_DEPTH + 1)}
    for line in trace.read_text().splitlines():
        request = json.loads(line)
        now_s, blocks = request["timestamp"] / 1000, request["hash_ids"]
        watch.advance(now_s)
        depth = 0
        for block in blocks:
            found = watch.found(b"%d" % block, now_s)
            if found is not None and found.wanted is not None:
                before, was_likely = found.wanted
                depth = min(MAX_DEPTH, before + 1)
                counts[found.pattern].update(came=1, came_likely=was_likely)
        tip = blocks[-2] if len(blocks) > 1 else None  # the last is not whole
        if tip is not None and tip not in seen:  # else many prompts begin so, and it tells no conversation
            is_likely = patterns.likelihood(str(depth), 0.0) >= LIKELY
            watch.open(b"%d" % tip, str(depth), now_s).wanted = depth, is_likely
            counts[str(depth)].update(turns=1, likely=is_likely)
        seen.update(blocks)
    total = sum(counts.values(), Counter[str]())
    return {
        "turns": total["turns"],
        "came_back": round(total["came"] / total["turns"], 3),
        "came_back_by_turns_before": {name: round(one["came"] / one["turns"], 3) for name, one in counts.items()},
        "held_for_likely": round(total["likely"] / total["turns"], 3),
        "of_those_came_back": round(total["came_likely"] / total["likely"], 3),
        "of_those_that_came_back_held_for_likely": round(total["came_likely"] / total["came"], 3),
    }


def summary(pairs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return medians, and the ratio of each pair."""
    ratios = sorted(pair["speculative"]["ttft_ms"] / pair["plain"]["ttft_ms"] for pair in pairs)
    return {
        "turns": len(pairs),
        "load_average": os.getloadavg()[0],
        "ttft_ms": {
            name: round(statistics.median(pair[name]["ttft_ms"] for pair in pairs), 1)
            for name in ("speculative", "plain")
        },
        "ttft_ratio": {
            name: round(ratios[int(part * (len(ratios) - 1))], 3)
            for name, part in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))
        },
        "uncached_tokens": {
            name: round(statistics.mean(pair[name]["prompt"] - pair[name]["cached"] for pair in pairs), 1)
            for name in ("speculative", "plain")
        },
        "prompt_tokens": round(statistics.mean(pair["plain"]["prompt"] for pair in pairs), 1),
    }


async def ask(client: httpx.AsyncClient, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send one streamed turn."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    begin_s, first_s, content, ended = time.monotonic(), 0.0, "", ""
    usage: dict[str, Any] = {}
    headers = {"Authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                assert answer.status_code == 200, line
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if not first_s and (delta.get("content") or delta.get("reasoning_content")):
                    first_s = time.monotonic()
                content += delta.get("content") or ""
                ended = choice["finish_reason"] or ended
    return {
        "ttft_ms": (first_s - begin_s) * 1000,
        "content": content,
        "ended": ended,
        "prompt": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


def words(number: int, turn: int) -> str:
    draw = random.Random(1000 * number + turn)
    return WORDS.format(a=draw.randrange(100), b=draw.randrange(100))


def make_thinking(folder: Path) -> Path:
    """Write a configuration, the demo model's tokenizer with two more tokens, and a template of a reasoning model."""
    demo = resolve_checkpoint("")
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    shutil.copy(demo / "generation_config.json", checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(json.loads((demo / "config.json").read_text()) | SHAPE))
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    for token_id, content in ((OPENER, "<think>"), (CLOSER, "</think>")):
        tokenizer["added_tokens"].append(like | {"id": token_id, "content": content, "special": False})
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((demo / "tokenizer_config.json").read_text())
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": THINKING}))
    return checkpoint


@contextlib.asynccontextmanager
async def serving(folder: Path, flags: list[str]) -> AsyncIterator[Any]:
    """Start one engine behind a gateway; yield (client, admin call, a key of each tenant)."""
    engines = Engines(folder, ["both"], flags)
    port = claim_port("127.0.0.1", 0, "--port")
    arguments = ["--data-dir", str(folder), "--port", str(port), "--migrate", "--first-keys", str(folder / "keys")]
    with contextlib.ExitStack() as stack:
        stack.callback(engines.stop)
        await engines.start_all()
        gateway = _start([*CLI, "gateway", *arguments, "--engine", engines.addresses[0]], folder / "gateway.log")
        stack.callback(gateway.wait)
        stack.callback(gateway.terminate)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as client:
            await until(lambda: _is_up(port))
            owner = {"Authorization": f"Bearer {json.loads((folder / 'keys').read_text())['admin_key']}"}

            async def admin(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
                told = await client.request(method, path, json=body, headers=owner)
                assert told.is_success, told.text
                return told.json()

            keys = {}
            for name, speculative_prefill in (("speculative", "free"), ("plain", "off")):
                tenant = await admin(
                    "POST", "/admin/v1/tenants", {"name": name, "speculative_prefill": speculative_prefill}
                )
                project = await admin("POST", "/admin/v1/projects", {"tenant_id": tenant["id"], "name": "p"})
                made = await admin("POST", "/admin/v1/keys", {"project_id": project["id"], "name": "k"})
                keys[name] = made["secret"]
            await asyncio.sleep(2.0)  # a gateway hears of a key within
            yield client, admin, keys


if __name__ == "__main__":
    main()
