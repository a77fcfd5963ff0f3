"""Frames of the catalogue, batches, adapters, prices, webhooks and alerts."""

from __future__ import annotations

from typing import Any

from moiety_dashboard.frames import catalogue as frames
from moiety_dashboard.views.adapters import total_bytes
from moiety_dashboard.views.webhooks import reason_of

MODEL: dict[str, Any] = {
    "model": "tiny", "family": "f", "status": "ready", "max_context_tokens": 4096, "max_output_tokens": None,
    "embedding_width": 0, "features": ["chat", "structured_outputs", "new_feature"],
    "prices": {"priority": {"input": "2", "cached_input": "1", "output": "4"},
               "standard": {"input": "1", "cached_input": "0.5", "output": "2"}},
    "load": {"num_ready": 1, "num_replicas": 2, "num_running": 3, "num_waiting": 4, "prompt_tokens_total": 5,
             "output_tokens_total": 6},
    "routes": ["best"], "adapters": ["tiny:a", "tiny:b"], "num_tenants": 7,
    "tenants": [{"tenant_id": "ten_1", "name": "acme", "service_class": "standard"}],
}  # fmt: skip


def test_models_have_prices_of_the_usual_class_and_load() -> None:
    bare = MODEL | {"model": "bare", "prices": {}, "load": None, "routes": [], "adapters": []}
    frame = frames.models_frame([MODEL, bare], frames.usual_class_of([MODEL, bare]), {"tiny": 12.5})
    tiny = frame.to_dict("records")[0]
    assert (tiny["input"], tiny["output"], tiny["replicas"], tiny["output_per_s"]) == (1.0, 2.0, "1 of 2", 12.5)
    assert tiny["features"] == "chat, structured outputs, new_feature"
    assert (tiny["running"], tiny["waiting"], tiny["adapters"], tiny["routes"]) == (3, 4, 2, "best")
    assert frame["running"].isna().tolist() == [False, True]
    assert frame["input"].isna().tolist() == [False, True]
    assert frame["replicas"].isna().tolist() == [False, True]


def test_requests_name_models_with_their_adapters_and_then_routes_each_once() -> None:
    other = MODEL | {"model": "large", "adapters": [], "routes": ["best", "cheap"]}
    assert frames.names_for_requests([MODEL, other]) == ["tiny", "tiny:a", "tiny:b", "large", "best", "cheap"]


def test_the_usual_class_is_standard_or_the_first_priced_one() -> None:
    assert frames.usual_class_of([MODEL]) == "standard"
    assert frames.usual_class_of([MODEL | {"prices": {"gold": {}}}]) == "gold"
    assert frames.usual_class_of([]) == "standard"


def test_prices_by_class_and_users_of_a_model() -> None:
    assert frames.class_prices_frame(MODEL)["cached_input"].tolist() == [1.0, 0.5]
    assert frames.users_frame(MODEL).to_dict("records") == [{"tenant": "acme", "class": "standard"}]
    price = {"model": "m", "service_class": None, "input": "0.15", "cached_input": "no amount", "output": "1"}
    (row,) = frames.prices_frame([price]).to_dict("records")
    assert (row["class"], row["input"]) == ("all", 0.15)


def test_progress_of_a_batch_is_the_share_of_its_lines_that_have_ended() -> None:
    batch = {
        "id": "batch_1", "tenant_id": "ten_1", "project_id": "prj_1", "key_id": "k", "endpoint": "/v1/embeddings",
        "status": "in_progress", "total": 8, "completed": 3, "failed": 1, "prompt_tokens": 5, "cached_tokens": 0,
        "output_tokens": 6, "created_at": "2026-01-01T00:00:00Z", "expires_at": "2026-01-02T00:00:00Z",
        "ended_at": None,
    }  # fmt: skip
    empty = batch | {"total": 0, "completed": 0, "failed": 0, "status": "validating"}
    frame = frames.batches_frame([batch, empty], {"ten_1": "acme"})
    assert frame["progress"].tolist()[0] == 0.5
    assert frame["progress"].isna().tolist() == [False, True]
    assert (frame["tenant"][0], frame["status"][0], frame["tokens"][0]) == ("acme", "in progress", 11)


def test_lists_without_rows_have_their_columns() -> None:
    assert list(frames.batches_frame([], {})) == list(frames.BATCH_COLUMNS)
    assert list(frames.models_frame([], "standard", {})) == list(frames.MODEL_COLUMNS)
    assert list(frames.alerts_frame([], {})) == list(frames.ALERT_COLUMNS)
    assert list(frames.firing_frame([])) == list(frames.FIRING_COLUMNS)
    assert list(frames.webhooks_frame([])) == list(frames.WEBHOOK_COLUMNS)
    assert list(frames.adapters_frame([], {})) == list(frames.ADAPTER_COLUMNS)


def test_the_size_of_an_adapter_that_engines_have_is_unknown() -> None:
    adapter = {"served_as": "m:a", "tenant_id": "ten_1", "state": "ready", "created_at": None, "id": "ada_1"}
    uploaded, granted = ({"num_bytes": 0, "engine_adapter": name} for name in (None, "a-v2"))
    sizes = frames.adapters_frame([adapter | uploaded, adapter | granted], {})["bytes"]
    assert (sizes[0], sizes.isna().tolist()) == (0, [False, True])
    assert total_bytes(frames.adapters_frame([adapter | uploaded, adapter | granted], {})) == 0
    assert total_bytes(frames.adapters_frame([adapter | granted], {})) is None
    assert total_bytes(frames.adapters_frame([], {})) == 0


def test_alerts_of_quotas_have_the_name_of_their_tenant() -> None:
    alert = {
        "id": "evt_1", "type": "quota.threshold", "at": "2026-01-01T00:00:00Z", "status": "firing",
        "severity": "warning", "subject": "tenant ten_1", "summary": "80 %", "tenant_id": "ten_1",
    }  # fmt: skip
    other = alert | {"type": "engine.down", "tenant_id": None, "subject": "tcp://e:1"}
    found = frames.alerts_frame([alert, other], {"ten_1": "acme"})
    tenants = found["tenant"]
    assert list(found["subject"]) == ["tenant acme", "tcp://e:1"]
    assert (tenants[0], tenants.isna().tolist()) == ("acme", [False, True])


def test_a_test_of_a_webhook_says_in_words_why_it_was_not_delivered() -> None:
    reports = [("name_not_resolved", None), ("status_500", 500), ("of_a_later_release", None)]
    assert [reason_of({"error": error, "status": status}) for error, status in reports] == [
        "the name of the host is not resolved", "the receiver answered with status 500", "of a later release",
    ]  # fmt: skip


def test_the_secret_path_of_a_slack_webhook_is_not_shown() -> None:
    slack = {"url": "https://hooks.slack.com/services/T0/B0/secretpart9f3c", "format": "slack"}
    assert frames.shown_address(slack) == "https://hooks.slack.com/…9f3c"
    assert frames.shown_address({"url": "https://a.example/in?b=1", "format": "generic"}) == "https://a.example/in?b=1"
