"""Objects in the gateway that requests of `openapi_hooks.py` can name, made when they are first needed."""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from typing import Any

import httpx


def new() -> str:
    """Return a name that nothing has."""
    return f"x{secrets.token_hex(8)}"


class World:
    """Objects in the gateway that requests can name."""

    def __init__(self) -> None:
        self.keys = {"public": os.environ["MOIETY_KEY"], "admin": os.environ["MOIETY_ADMIN_KEY"]}
        self.http = httpx.Client(base_url=os.environ["MOIETY_URL"], timeout=30)
        self.made = {"name": "standard"}
        self.latest = ""  # conversation
        self.own_tenant = os.environ["MOIETY_TENANT_ID"]  # of the public key
        self.tenants = {self.own_tenant}
        self.answered: Counter[Any] = Counter()

    def make(self, path: str, body: dict[str, Any], who: str = "admin", method: str = "POST") -> Any:
        return self.ask(method, path, who, json=body).raise_for_status().json()

    def ask(self, method: str, path: str, who: str = "admin", **more: Any) -> Any:
        return self.http.request(method, path, headers={"Authorization": f"Bearer {self.keys[who]}"}, **more)

    def make_room(self) -> None:
        """Delete classes and webhooks, whose number is limited."""
        for path, name in (("/admin/v1/classes", "name"), ("/admin/v1/webhooks", "id")):
            for one in self.ask("GET", path).json()["data"]:
                self.ask("DELETE", f"{path}/{one[name]}")  # no shipped class, which it refuses

    def known(self, name: str) -> Any:
        """Return an object that exists already, for operations that do not change it."""
        if name == "item_id":
            return self.item_of(self.known("conversation_id"))
        if name not in self.made:
            self.made[name] = getattr(self, name)()
        return self.made[name]

    def key_of(self, tenant_id: str) -> str:
        """Return the key of an administrator of a tenant."""
        if tenant_id not in self.keys:
            key = {"name": "k", "role": "tenant-admin", "tenant_id": tenant_id}
            self.keys[tenant_id] = self.make("/admin/v1/keys", key)["secret"]
        return self.keys[tenant_id]

    def trace_id(self) -> Any:
        return os.environ["MOIETY_TRACE_ID"]

    def tenant_id(self) -> Any:
        tenant_id = self.make("/admin/v1/tenants", {"name": new()})["id"]
        self.tenants.add(tenant_id)
        return tenant_id

    def project_id(self) -> Any:
        return self.make("/admin/v1/projects", {"name": "p", "tenant_id": self.tenant_id()})["id"]

    def key_id(self) -> Any:
        return self.make("/admin/v1/keys", {"name": "k", "project_id": self.project_id()})["key"]["id"]

    def user_id(self) -> Any:
        user = {"email": f"{new()}@example.com", "role": "developer", "tenant_id": self.tenant_id()}
        return self.make("/admin/v1/users", user)["id"]

    def policy_tenant_id(self) -> Any:
        """Return a tenant with a key policy."""
        return self.make("/admin/v1/key-policies", {"tenant_id": self.tenant_id()}, method="PUT")["tenant_id"]

    def quota_id(self) -> Any:
        limit = {"level": "tenant", "scope_id": self.tenant_id(), "kind": "tokens_per_day", "cap": 9}
        return self.make("/admin/v1/quotas", limit, method="PUT")["id"]

    def name(self) -> Any:
        """Create a class; return its name."""
        self.make_room()
        return self.make("/admin/v1/classes", {"name": new(), "rank": 9, "ttft_s": 1})["name"]

    def model(self) -> Any:
        """Create a price; return its model."""
        price = {"model": new(), "input": "1", "output": "1"}
        return self.make("/admin/v1/prices", price, method="PUT")["model"]

    def route(self) -> Any:
        """Create a route; return its name."""
        route = {"name": new(), "targets": [{"model": "m"}]}
        return self.make("/admin/v1/routes", route, method="PUT")["name"]

    def guardrail(self) -> Any:
        """Create a guardrail; return its name."""
        guardrail = {"name": "one", "stage": "output", "action": "observe", "detectors": ["secrets"]}
        return self.make("/admin/v1/guardrails", guardrail, method="PUT")["name"]

    def issuer(self) -> Any:
        """Create an issuer of JWTs; return its name."""
        grants = [{"project": self.known("project_id")}]
        issuer = {"name": "one", "url": "https://issuer.example", "audience": "one", "grants": grants}
        return self.make("/admin/v1/issuers", issuer, method="PUT")["name"]

    def chat(self, **headers: str) -> Any:
        """Send a chat, which no guardrail checks; return its id."""
        for one in self.ask("GET", "/admin/v1/guardrails").json()["data"]:
            self.ask("DELETE", f"/admin/v1/guardrails/{one['name']}")
        body = {"model": self.model_id(), "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        answer = self.http.post(
            "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {self.keys['public']}", **headers}
        )
        return answer.raise_for_status().json()["id"]

    def run_id(self) -> Any:
        """Begin a run; return its id."""
        name = new()
        self.chat(**{"x-moiety-run": name})
        return self.ask("GET", f"/admin/v1/runs?name={name}").json()["data"][0]["id"]

    def request_id(self) -> Any:
        """Return a request in the log, with its content, which the administrator of the key's tenant can read."""
        self.key_of(self.own_tenant)
        logging = f"/admin/v1/request-contents/logging/{self.own_tenant}"
        self.make(logging, {"keep_days": 1}, self.own_tenant, "PUT")
        request_id = self.chat()
        self.wait_for(f"/admin/v1/requests/{request_id}")
        self.wait_for(f"/admin/v1/request-contents/{request_id}", self.own_tenant)
        return request_id

    def wait_for(self, path: str, who: str = "admin") -> None:
        """Return once something is stored, which is a moment after the end of its request."""
        deadline = time.monotonic() + 30
        while (answer := self.ask("GET", path, who)).status_code == 404 and time.monotonic() < deadline:
            time.sleep(0.02)
        answer.raise_for_status()

    def webhook_id(self) -> Any:
        self.make_room()
        return self.make("/admin/v1/webhooks", {"url": "https://hooks.invalid/x"})["webhook"]["id"]

    def engine_id(self) -> Any:
        return self.ask("GET", "/admin/v1/engines").json()["data"][0]["card"]["engine_id"]

    def file_id(self) -> Any:
        line = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"tiny","prompt":"a"}}'
        form = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", line)}}
        return self.ask("POST", "/v1/files", "public", **form).raise_for_status().json()["id"]

    def batch_id(self) -> Any:
        body = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": self.file_id()}
        return self.make("/v1/batches", body, "public")["id"]

    def message_batch_id(self) -> Any:
        params = {"model": self.model_id(), "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        return self.make("/v1/messages/batches", {"requests": [{"custom_id": "a", "params": params}]}, "public")["id"]

    def response_id(self) -> Any:
        body = {"model": self.model_id(), "input": "a", "max_output_tokens": 1, "background": True}
        return self.make("/v1/responses", body, "public")["id"]

    def conversation_id(self) -> Any:
        item = {"role": "user", "content": "a"}
        self.latest = self.make("/v1/conversations", {"items": [item, item]}, "public")["id"]
        return self.latest

    def item_id(self) -> Any:
        """Return an item of the conversation that was created last."""
        return self.item_of(self.latest)

    def item_of(self, conversation_id: str) -> Any:
        return self.ask("GET", f"/v1/conversations/{conversation_id}/items", "public").json()["data"][0]["id"]

    def declaration(self) -> Any:
        return self.make("/admin/v1/declarations", {"kind": "tenant", "name": new(), "source": "file"}, method="PUT")

    def model_id(self) -> str:
        return "tiny"
