"""What the front tells every gateway of the engine: the model's card and the engine's load."""

from __future__ import annotations

import time

from moiety_engine.messages import CoreHello, CoreLoad
from moiety_text.folder import TextModel
from moiety_wire.messages import Card, Load, SleepState
from moiety_wire.roles import EngineRole


def make_load(
    engine_id: str,
    seq: int,
    load: CoreLoad,
    *,
    draining: bool,
    sleep: SleepState,
    sleep_problem: str,
    running_for_s: float,
    unsettled_replicas: list[str],
) -> Load:
    return Load(
        engine_id=engine_id,
        seq=seq,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_paused=load.num_paused,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_cached=load.kv_blocks_cached,
        block_size=load.block_size,
        steps_total=load.steps_total,
        prompt_tokens_total=load.prompt_tokens_total,
        cached_tokens_total=load.cached_tokens_total,
        output_tokens_total=load.output_tokens_total,
        requests_total=load.requests_total,
        draining=draining,
        host_blocks_total=load.host_blocks_total,
        host_blocks_used=load.host_blocks_used,
        swapped_out_blocks_total=load.swapped_out_blocks_total,
        swapped_in_blocks_total=load.swapped_in_blocks_total,
        classes=load.classes,
        overshot_tokens_total=load.overshot_tokens_total,
        running_for_s=running_for_s,
        sleep=sleep,
        sleep_problem=sleep_problem,
        unsettled_replicas=unsettled_replicas,
        drafted_tokens_total=load.drafted_tokens_total,
        accepted_tokens_total=load.accepted_tokens_total,
        max_batch_tokens=load.max_batch_tokens,
        max_running=load.max_running,
        step_costs=load.step_costs,
        handed_over_requests_total=load.handed_over_requests_total,
        taken_over_requests_total=load.taken_over_requests_total,
        lost_transfers_total=load.lost_transfers_total,
        rebalances_total=load.rebalances_total,
        moved_expert_bytes_total=load.moved_expert_bytes_total,
        rank_balancedness=load.rank_balancedness,
        rank_balancedness_planned=load.rank_balancedness_planned,
    )


def make_card(
    model: str,
    engine_id: str,
    text: TextModel,
    hello: CoreHello,
    role: EngineRole = EngineRole.BOTH,
    adapters: tuple[str, ...] = (),
) -> Card:
    return Card(
        engine_id=engine_id,
        model=model,
        family=hello.family,
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        special_tokens=text.special_tokens,
        eos_token_ids=tuple(token_id for token_id in text.eos_token_ids if token_id < hello.vocab_size),
        max_context_tokens=hello.max_context_tokens,
        vocab_size=hello.vocab_size,
        max_num_logprobs=hello.max_num_logprobs,
        created_unix_s=int(time.time()),
        dtype=hello.dtype,
        device=hello.device,
        embedding_width=hello.embedding_width,
        follows_guides=hello.follows_guides,
        role=role,
        hands_over=hello.hands_over,
        kv_address=hello.kv_address,
        kv_host=hello.kv_host,
        takes_adapters=hello.takes_adapters,
        adapters=adapters,
    )
