"""Adapters in the store: uploaded part by part within bounds, published once they are whole, erased when deleted."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from
from litestar import Litestar
from sqlalchemy import delete, func, select, update

from moiety_platform.adapters.cache import AdapterCache, NamedAdapter
from moiety_platform.adapters.contents import AdapterContents
from moiety_platform.adapters.controller import AdapterController, AdapterStorage
from moiety_platform.adapters.magnitudes import bound_of
from moiety_platform.adapters.models import Adapter, AdapterChunk
from moiety_platform.adapters.naming import allowed_of
from moiety_platform.adapters.service import ABANDONED_MS
from moiety_platform.administration.router import admin_router
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.classes.cache import ClassCache
from moiety_platform.clock import ManualClock
from moiety_platform.controllers import with_services
from moiety_platform.db.session import Database
from moiety_platform.errors import NotFound, PlatformError
from moiety_platform.http_errors import answer_platform_error
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.store import LeaseStore
from moiety_platform.request_rules.cache import RequestRulesCache

from .conftest import PEPPER, Admin, Demo

LORA = json.dumps({"peft_type": "LORA", "r": 4})


def tensors(*names: str, num_bytes: int = 400) -> bytes:
    """A safetensors file of so many bytes of data."""
    size = num_bytes // max(1, len(names))
    entries = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    head = json.dumps(entries).encode()
    return len(head).to_bytes(8, "little") + head + bytes(size * len(names))


GOOD = tensors("base_model.model.a.lora_A.weight", "base_model.model.a.lora_B.weight")


@pytest.fixture
def cache(database: Database, clock: ManualClock) -> AdapterCache:
    return AdapterCache(database, clock)


@pytest.fixture
async def api(
    database: Database, objects: ObjectStore, clock: ManualClock, demo: Demo, cache: AdapterCache
) -> AsyncIterator[Admin]:
    classes, prices = ClassCache(database, clock), RequestRulesCache(database, clock)
    quotas = QuotaEnforcer(database, LeaseStore("replica", 20.0), clock)
    routes = with_services(
        AdapterController, adapter_cache=cache, adapter_storage=AdapterStorage(2000, 3000), objects=objects
    )
    parts = (database, Authenticator(database, PEPPER, clock), classes, prices, quotas, PEPPER, clock)
    app = Litestar(
        [admin_router(*parts, more=[routes])],
        logging_config=None,
        exception_handlers={PlatformError: answer_platform_error},
        openapi_config=None,
    )
    admin = Admin(app, demo.admin_key)
    async with admin.http:
        yield admin


async def begin(api: Admin, demo: Demo, name: str = "a", expect: int = 201, **changes: Any) -> Any:
    new = {"tenant_id": demo.tenant_id, "model": "m", "name": name, "config": LORA} | changes
    return await api.call("POST", "adapters", expect, json=new)


async def begin_with_part(api: Admin, demo: Demo) -> Any:
    """Begin an upload and send its first part."""
    made = await begin(api, demo)
    await send(api, made["id"], 0, GOOD)
    return made


async def send(api: Admin, adapter_id: str, start: int, data: bytes, expect: int = 200) -> Any:
    body = {"start": start, "data": base64.b64encode(data).decode()}
    return await api.call("POST", f"adapters/{adapter_id}/parts", expect, json=body)


async def test_an_upload_in_parts_comes_out_as_it_went_in_and_has_a_name_then(
    api: Admin, demo: Demo, cache: AdapterCache, database: Database, objects: ObjectStore
) -> None:
    made = await begin(api, demo)
    await send(api, made["id"], 0, GOOD[:100])
    wrong = await send(api, made["id"], 50, GOOD[100:], 409)
    assert "must begin at 100" in wrong["error"]["message"]
    assert await cache.find(demo.tenant_id, "m:a") is None
    await send(api, made["id"], 100, GOOD[100:])
    published = await api.call("POST", f"adapters/{made['id']}/publish", 200)
    assert (published["state"], published["num_bytes"]) == ("ready", len(GOOD))
    assert published["digest"] == hashlib.sha256(GOOD).hexdigest()
    found = await cache.find(demo.tenant_id, "m:a")
    assert found is not None
    assert (found.model, found.engine_name) == ("m", made["id"])
    assert await cache.find("ten_another", "m:a") is None
    parts = [part async for part in AdapterContents(database, objects).parts(made["id"])]
    assert b"".join(part.data for part in parts) == GOOD
    assert [(part.index, part.config, part.is_last) for part in parts] == [(0, LORA, True)]
    await send(api, made["id"], len(GOOD), b"more", 409)


async def test_a_name_is_taken_once_a_tenant_and_free_again_after_a_deletion(api: Admin, demo: Demo) -> None:
    made = await begin(api, demo)
    assert (await begin(api, demo, expect=409))["error"]["code"] == "adapter_exists"
    await begin(api, demo, "b")
    await api.call("DELETE", f"adapters/{made['id']}", 200)
    await api.call("GET", f"adapters/{made['id']}", 404)
    await begin(api, demo)
    assert [one["name"] for one in (await api.call("GET", "adapters", 200))["data"]] == ["a", "b"]


async def test_sizes_of_one_and_of_all_of_a_tenant_are_bounded(api: Admin, demo: Demo) -> None:
    first, second = await begin(api, demo), await begin(api, demo, "b")
    await send(api, first["id"], 0, bytes(2000))
    assert "2,000 bytes" in (await send(api, first["id"], 2000, b"x", 413))["error"]["message"]
    full = await send(api, second["id"], 0, bytes(1001), 413)
    assert full["error"]["code"] == "adapter_storage_full"
    await send(api, second["id"], 0, bytes(1000))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"short", id="no head"),
        pytest.param(b"\xff" * 100, id="a head without end"),
        pytest.param(GOOD[:-1], id="cut"),
        pytest.param(tensors("model.embed_tokens.weight"), id="no factors"),
        pytest.param((4).to_bytes(8, "little") + b"[{}]", id="another JSON"),
    ],
)
async def test_invalid_adapter_files_are_not_published(api: Admin, demo: Demo, content: bytes) -> None:
    made = await begin(api, demo)
    if content:
        await send(api, made["id"], 0, content)
    refused = await api.call("POST", f"adapters/{made['id']}/publish", 400)
    assert refused["error"]["message"]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "a:b"},
        {"name": ""},
        {"model": ""},
        {"config": None},
        {"config": "{}"},
        {"config": "nonsense"},
        {"engine_adapter": "there"},
    ],
)
async def test_invalid_adapter_requests_are_refused(api: Admin, demo: Demo, changes: dict[str, Any]) -> None:
    assert (await begin(api, demo, expect=400, **changes))["error"]["message"]


def test_a_key_for_some_models_may_use_what_it_names_and_all_adapters_of_a_model_that_it_names() -> None:
    adapter = NamedAdapter("m:a", "m", "ada_1", 0)
    assert allowed_of(None, adapter) is None
    assert allowed_of(frozenset({"m"}), adapter) == {"m"}
    assert allowed_of(frozenset({"m:a"}), adapter) == {"m", "m:a"}
    assert allowed_of(frozenset({"m:a"}), None) == {"m:a"}
    assert allowed_of(frozenset({"m:b"}), adapter) == {"m:b"}


async def test_one_that_is_on_the_engines_needs_no_upload(api: Admin, demo: Demo, cache: AdapterCache) -> None:
    made = await begin(api, demo, config=None, engine_adapter="there")
    assert made["state"] == "ready"
    found = await cache.find(demo.tenant_id, "m:a")
    assert found is not None
    assert found.engine_name == "there"


async def test_an_adapter_named_like_another_ones_id_does_not_keep_that_from_being_deleted(
    api: Admin, demo: Demo
) -> None:
    first = await begin(api, demo)
    second = await begin(api, demo, first["id"])
    for adapter, num_left in ((first, 1), (second, 0)):
        await api.call("DELETE", f"adapters/{adapter['id']}", 200)
        listed = await api.call("GET", "adapters", 200)
        assert [one["id"] for one in listed["data"]] == [second["id"]][:num_left]


async def test_contents_of_deleted_adapters_are_erased_part_by_part(
    api: Admin, demo: Demo, database: Database, objects: ObjectStore
) -> None:
    made, kept = await begin(api, demo), await begin(api, demo, "b")
    for one in (made, kept):
        await send(api, one["id"], 0, b"x" * 10)
    await api.call("DELETE", f"adapters/{made['id']}", 200)
    assert [await AdapterContents(database, objects).purge() for _ in range(3)] == [1, 1, 0]
    async with database.read() as session:
        assert (await session.scalars(select(Adapter.id))).all() == [kept["id"]]
        assert await session.scalar(select(func.count()).select_from(AdapterChunk)) == 1


async def test_an_upload_that_was_given_up_cannot_be_ended_once_its_parts_are_erased(
    api: Admin, demo: Demo, database: Database, objects: ObjectStore
) -> None:
    made = await begin_with_part(api, demo)
    async with database.write() as session:
        await session.execute(update(Adapter).values(touched_ms=Adapter.touched_ms - ABANDONED_MS - 1))
    assert await AdapterContents(database, objects).purge() == 1
    await api.call("POST", f"adapters/{made['id']}/publish", 404)


async def test_a_part_that_is_gone_is_missed_by_whoever_reads_an_adapter(
    api: Admin, demo: Demo, database: Database, objects: ObjectStore
) -> None:
    made = await begin_with_part(api, demo)
    async with database.write() as session:
        await session.execute(delete(AdapterChunk))
    with pytest.raises(NotFound):
        [part async for part in AdapterContents(database, objects).parts(made["id"])]


def floats(dtype: str, *halves: tuple[str, list[float]]) -> bytes:
    """A safetensors file of factors with these numbers."""
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
    entries, data = {}, b""
    for half, values in halves:
        if dtype == "BF16":
            part = (np.array(values, dtype="<f4").view("<u4") >> 16).astype("<u2").tobytes()
        else:
            part = np.array(values, dtype=kinds[dtype]).tobytes()
        name = f"base_model.model.a.lora_{half}.weight"
        offsets = [len(data), len(data) + len(part)]
        entries[name] = {"dtype": dtype, "shape": [1, len(values)], "data_offsets": offsets}
        data += part
    head = json.dumps(entries).encode()
    return len(head).to_bytes(8, "little") + head + data


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16", "F16"])
@pytest.mark.parametrize("half", ["A", "B"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
async def test_weights_that_are_not_finite_or_overflow_are_not_published(
    api: Admin, demo: Demo, dtype: str, half: str, value: float
) -> None:
    if dtype == "F16" and value == 3e38:
        value = 65504.0  # times 65504 and the scale it is too large, too
    values = {"A": [0.1] * 7, "B": [0.2] * 7} | {half: [0.1] * 5 + [value, 0.1]}
    content = floats(dtype, *values.items())
    config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4e8 if dtype == "F16" else 16})
    made = await begin(api, demo, config=config)
    first = len(content) - 9  # in the middle of a number
    await send(api, made["id"], 0, content[:first])
    await send(api, made["id"], first, content[first:])
    refused = await api.call("POST", f"adapters/{made['id']}/publish", 400)
    assert "finite" in refused["error"]["message"] or "too large" in refused["error"]["message"]


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16", "F16"])
async def test_weights_as_training_leaves_them_are_published(api: Admin, demo: Demo, dtype: str) -> None:
    made = await begin(
        api, demo, config=json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 64, "use_rslora": True})
    )
    weights = floats(dtype, ("A", [-3.0, 0.0, 1e-6, 40.0]), ("B", [0.0, -12.0]))
    await send(api, made["id"], 0, weights)
    published = await api.call("POST", f"adapters/{made['id']}/publish", 200)
    assert (published["state"], published["digest"]) == ("ready", hashlib.sha256(weights).hexdigest())


@pytest.mark.parametrize("alpha", ["1e308", "-1e300", "1e999", "1" + "0" * 400, "true", '"16"'])
@pytest.mark.parametrize("rslora", ["true", "false"])
async def test_a_scale_that_overflows_is_refused_before_the_upload(
    api: Admin, demo: Demo, alpha: str, rslora: str
) -> None:
    config = f'{{"peft_type": "LORA", "r": 4, "lora_alpha": {alpha}, "use_rslora": {rslora}}}'
    refused = await begin(api, demo, expect=400, config=config)
    assert refused["error"]["param"] == "config"


@given(bits=integers(0, (1 << 64) - 1), dtype=sampled_from(["F64", "F32", "F16"]))
def test_the_highest_byte_bounds_every_number(bits: int, dtype: str) -> None:
    size = {"F64": 8, "F32": 4, "F16": 2}[dtype]
    data = (bits & (1 << 8 * size) - 1).to_bytes(size, "little")
    (value,) = struct.unpack({"F64": "<d", "F32": "<f", "F16": "<e"}[dtype], data)
    bound = bound_of(data[-1] & 0x7F, dtype)
    assert math.isinf(bound) or abs(value) < bound * (1 if dtype != "F64" else 65_536)
    if not math.isfinite(value):
        assert math.isinf(bound)
    if 1e-3 < abs(value) < 1e3:
        assert bound <= 4 * abs(value)
