"""The catalogue of models, and the list of batches: what each administrator sees of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from moiety_platform.access.roles import Role
from moiety_platform.adapters.models import AdapterState
from moiety_platform.adapters.schemas import NewAdapter
from moiety_platform.adapters.service import create_adapter
from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key
from moiety_platform.batches.models import Batch
from moiety_platform.clock import ManualClock
from moiety_platform.controllers import with_services
from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.model_catalog.controller import ModelCatalogController
from moiety_platform.model_catalog.features import ModelFeature, features_of
from moiety_platform.routing.replicas import Replicas
from moiety_platform.tenants.schemas import NewProject, NewTenant
from moiety_platform.tenants.service import create_project, create_tenant
from moiety_wire.messages import ModelCard

from .admin_api_access import LORA
from .conftest import PEPPER, Admin, Demo, admin_app
from .people import people_of

CARD = ModelCard(
    "engine-1", "tiny", "scripted", "{}", "", {}, (0,), 64, 8, 5, 0, "float32", "none",
    follows_grammars=True, takes_adapters=True,
)  # fmt: skip
QWEN = (
    "{% for tool in tools %}<tools>{{ tool | tojson }}</tools>{% endfor %}"
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    cards = [CARD, msgspec.structs.replace(CARD, engine_id="engine-2", max_context_tokens=128)]
    async with Replicas([FakeEngineClient(card) for card in cards]) as found:
        yield found


@pytest.fixture
async def admin(
    database: Database, clock: ManualClock, demo: Demo, replicas: Replicas
) -> AsyncIterator[tuple[Admin, Admin]]:
    """An owner, and a viewer of the tenant acme."""
    app = admin_app(database, clock, more=[with_services(ModelCatalogController, replicas=replicas)])
    async with database.write() as session:
        new = NewKey(name="v", role=Role.VIEWER, tenant_id=demo.tenant_id)
        _, text = await create_key(session, new, PEPPER, clock.now())
    owner, viewer = Admin(app, demo.admin_key), Admin(app, text.text)
    async with owner.http, viewer.http:
        yield owner, viewer


async def add_tenant(database: Database, clock: ManualClock, name: str, models: list[str] | None) -> str:
    async with database.write() as session:
        tenant = await create_tenant(session, NewTenant(name=name), clock.now())
        project = await create_project(session, NewProject(tenant.id, "p"), clock.now())
        await create_key(session, NewKey(name="k", project_id=project.id, allowed_models=models), PEPPER, clock.now())
    return tenant.id


async def test_the_catalogue_shows_prices_load_and_who_may_use_a_model(
    admin: tuple[Admin, Admin], database: Database, clock: ManualClock, demo: Demo
) -> None:
    owner, viewer = admin
    allowed = await add_tenant(database, clock, "globex", ["tiny"])
    await add_tenant(database, clock, "initech", ["other"])
    await owner.call("PUT", "prices", 200, json={"model": "tiny", "input": "1", "output": "2"})
    price = {"model": "tiny", "service_class": "priority", "input": "5", "output": "6"}
    await owner.call("PUT", "prices", 200, json=price)
    await owner.call("PUT", "routes", 200, json={"name": "best", "targets": [{"model": "tiny"}]})
    (entry,) = (await owner.call("GET", "models", 200))["data"]
    assert (entry["model"], entry["status"], entry["max_context_tokens"]) == ("tiny", "ready", 128)
    assert entry["prices"]["standard"] == {"input": "1", "cached_input": "1", "output": "2"}
    assert entry["prices"]["flex"]["input"] == "0.5", "half the price, by the factor of the class"
    assert entry["prices"]["priority"]["output"] == "6"
    assert entry["routes"] == ["best"]
    assert [user["name"] for user in entry["tenants"]] == ["acme", "globex"]
    assert entry["tenants"][1] == {"tenant_id": allowed, "name": "globex", "service_class": "standard"}
    assert entry["num_tenants"] == 2
    load = entry["load"]
    assert (load["num_ready"], load["num_replicas"], load["num_running"], load["num_waiting"]) == (2, 2, 0, 0)
    (own,) = (await viewer.call("GET", "models", 200))["data"]
    assert (own["load"], own["num_tenants"]) == (None, 1)
    assert [user["tenant_id"] for user in own["tenants"]] == [demo.tenant_id]
    assert own["prices"] == entry["prices"]


async def test_a_tenant_without_a_valid_key_may_use_no_model(
    admin: tuple[Admin, Admin], demo: Demo, clock: ManualClock
) -> None:
    owner, viewer = admin
    await owner.call("POST", f"keys/{demo.key_id}/revoke", 200)
    for who in (owner, viewer):
        (entry,) = (await who.call("GET", "models", 200))["data"]
        assert (entry["num_tenants"], entry["tenants"]) == (0, [])


async def test_a_developer_sees_the_catalogue_without_load_and_other_tenants(
    database: Database, clock: ManualClock, demo: Demo, replicas: Replicas
) -> None:
    other = await add_tenant(database, clock, "globex", None)
    async with database.write() as session:
        for tenant_id, name in ((demo.tenant_id, "own"), (other, "theirs")):
            adapter = await create_adapter(session, NewAdapter(tenant_id, "tiny", name, LORA.format()))
            adapter.state = AdapterState.READY
    catalog = with_services(ModelCatalogController, replicas=replicas)
    async with people_of(database, clock, demo, more=[catalog]) as people:
        await people.join("ada", "developer", demo.tenant_id)
        (seen,) = (await people.call("ada", "GET", "models"))["data"]
        (all_of_it,) = (await people.call("owner", "GET", "models"))["data"]
    assert (seen["model"], seen["load"], seen["adapters"]) == ("tiny", None, ["tiny:own"])
    assert [user["tenant_id"] for user in seen["tenants"]] == [demo.tenant_id]
    assert all_of_it["adapters"] == ["tiny:own", "tiny:theirs"]
    assert {user["tenant_id"] for user in all_of_it["tenants"]} == {demo.tenant_id, other}


async def test_a_model_whose_engines_are_gone_is_unavailable(admin: tuple[Admin, Admin], replicas: Replicas) -> None:
    for client in replicas.clients():
        await client.close()
    (entry,) = (await admin[0].call("GET", "models", 200))["data"]
    assert (entry["status"], entry["load"]["num_ready"], entry["load"]["num_replicas"]) == ("unavailable", 0, 2)


def test_features_follow_from_the_model_card() -> None:
    assert features_of(CARD) == [
        ModelFeature.COMPLETIONS, ModelFeature.STRUCTURED_OUTPUTS, ModelFeature.LORA, ModelFeature.LOGPROBS,
    ]  # fmt: skip
    chat = features_of(msgspec.structs.replace(CARD, chat_template=QWEN))
    assert {ModelFeature.CHAT, ModelFeature.TOOLS, ModelFeature.REASONING} <= set(chat)
    encoder = msgspec.structs.replace(CARD, generates=False, embedding_width=8, takes_adapters=False)
    assert features_of(msgspec.structs.replace(encoder, follows_grammars=False)) == [ModelFeature.EMBEDDINGS]
    broken = features_of(msgspec.structs.replace(CARD, chat_template="{% if %}"))
    assert not {ModelFeature.TOOLS, ModelFeature.REASONING} & set(broken)
    hosted = features_of(msgspec.structs.replace(CARD, family="hosted-openai"))
    assert ModelFeature.CHAT in hosted
    assert ModelFeature.COMPLETIONS not in hosted


def make_batch(tenant_id: str, number: int, **fields: Any) -> Batch:
    given: dict[str, Any] = {
        "id": f"batch_{number:020d}", "tenant_id": tenant_id, "project_id": "prj", "key_id": "key",
        "endpoint": "/v1/chat/completions", "input_file_id": "file", "status": "in_progress", "total": 10,
        "completed": 3, "failed": 1, "prompt_tokens": 5, "cached_tokens": 0, "output_tokens": 6, "available_ms": 0,
        "created_ms": 1_700_000_000_000 + number, "expires_ms": 1_700_086_400_000,
    }  # fmt: skip
    return Batch(**given | fields)


async def test_batches_are_listed_with_their_progress_newest_first(
    admin: tuple[Admin, Admin], database: Database, demo: Demo
) -> None:
    owner, viewer = admin
    async with database.write() as session:
        session.add_all([make_batch(demo.tenant_id, 1), make_batch("ten_other", 2)])
        session.add(make_batch(demo.tenant_id, 3, status="completed", completed=9, completed_ms=1_700_000_060_000))
    shown = await owner.call("GET", "batches", 200)
    assert [one["id"][-1] for one in shown["data"]] == ["3", "2", "1"]
    newest = shown["data"][0]
    assert (newest["status"], newest["total"], newest["completed"], newest["failed"]) == ("completed", 10, 9, 1)
    assert newest["ended_at"] == "2023-11-14T22:14:20Z"
    assert (shown["data"][2]["ended_at"], shown["truncated"]) == (None, False)
    own = await owner.call("GET", "batches", 200, params={"tenant_id": "ten_other"})
    assert [one["id"][-1] for one in own["data"]] == ["2"]
    assert [one["id"][-1] for one in (await viewer.call("GET", "batches", 200))["data"]] == ["3", "1"]
