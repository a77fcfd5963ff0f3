"""The commands of users, of key policies and of the details of keys, against a real gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_a_user_is_invited_changed_disabled_enabled_and_deleted(moiety: Callable[..., Any]) -> None:
    moiety("tenant", "create", "users-inc")
    moiety("project", "create", "web", "--tenant", "users-inc")
    refused = moiety("user", "invite", "ada@example.com", "--tenant", "users-inc")
    assert (refused.returncode, "give --role" in refused.stderr) == (2, True)
    invited = moiety("user", "invite", "Ada@example.com", "--role", "developer", "--tenant", "users-inc",
                     "--project", "web", "--dashboard", "https://d.example.com/")  # fmt: skip
    assert invited.stdout.startswith("https://d.example.com/?invitation=inv_usr_"), invited.stderr
    assert "valid until" in invited.stderr
    again = moiety("user", "invite", "ada@example.com", "--tenant", "users-inc")
    assert again.stdout.startswith("inv_usr_")
    assert again.stdout.strip() not in invited.stdout
    shown = json.loads(moiety("user", "show", "ada@example.com", "--json").stdout)
    assert (shown["state"], len(shown["project_ids"])) == ("invited", 1)
    listed = moiety("user", "list", "--tenant", "users-inc").stdout
    for word in ("ada@example.com", "developer", "users-inc", "invited"):
        assert word in listed
    moiety("user", "change", "ada@example.com", "--all-projects", "--name", "Ada")
    assert json.loads(moiety("user", "show", shown["id"], "--json").stdout)["project_ids"] is None
    assert json.loads(moiety("user", "disable", "ada@example.com", "--json").stdout)["state"] == "disabled"
    assert json.loads(moiety("user", "enable", "ada@example.com", "--json").stdout)["state"] == "invited"
    moiety("tenant", "create", "users-two")
    moiety("user", "invite", "ada@example.com", "--role", "viewer", "--tenant", "users-two")
    ambiguous = moiety("user", "disable", "ada@example.com")
    assert (ambiguous.returncode, "has 2 roles" in ambiguous.stderr) == (1, True)
    moiety("user", "disable", "ada@example.com", "--everywhere")
    users = json.loads(moiety("user", "list", "--json").stdout)["data"]
    states = [one["state"] for one in users if one["email"] == "ada@example.com"]
    assert states == ["disabled", "disabled"]
    assert json.loads(moiety("user", "delete", shown["id"], "--json").stdout)["id"] == shown["id"]
    missing = moiety("user", "show", "nobody@example.com")
    assert (missing.returncode, "there is no user" in missing.stderr) == (1, True)


def test_a_key_policy_is_set_in_parts_shown_and_deleted(moiety: Callable[..., Any]) -> None:
    moiety("tenant", "create", "policies-inc")
    moiety("key-policy", "set", "policies-inc", "--max-keys", "3", "--limit", "dollars_per_month=1.5")
    moiety("key-policy", "set", "policies-inc", "--max-days", "30", "--limit", "tokens-per-day=9")
    shown = json.loads(moiety("key-policy", "show", "policies-inc", "--json").stdout)
    assert (shown["makes_keys"], shown["max_keys"], shown["max_days"]) == (True, 3, 30)
    assert shown["limits"] == {"money_per_month": 1_500_000_000, "tokens_per_day": 9}
    cleared = moiety("key-policy", "set", "policies-inc", "--max-days", "0", "--no-limits", "--no-keys", "--json")
    policy = json.loads(cleared.stdout)
    assert (policy["max_days"], policy["limits"], policy["makes_keys"]) == (None, {}, False)
    assert "policies-inc" in moiety("key-policy", "list").stdout
    assert moiety("key-policy", "set", "policies-inc", "--limit", "tokens=9").returncode == 2
    assert moiety("key-policy", "delete", "policies-inc").returncode == 0
    assert moiety("key-policy", "show", "policies-inc").returncode == 1


def test_a_keys_quotas_last_use_and_spend_are_listed(moiety: Callable[..., Any]) -> None:
    moiety("tenant", "create", "details-inc")
    made = moiety("key", "create", "ci", "--tenant", "details-inc", "--limit", "tokens_per_day=123")
    assert made.stdout.startswith("mty_"), made.stderr
    (key,) = json.loads(moiety("key", "list", "--tenant", "details-inc", "--json").stdout)["data"]
    assert key["details"]["limits"] == {"tokens_per_day": 123}
    listed = moiety("key", "list", "--tenant", "details-inc", "--wide").stdout
    for word in ("last used", "spend", "tokens_per_day 123"):
        assert word in listed


def test_developers_of_a_file_are_restricted_to_projects(moiety: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "declared.yaml"

    def apply(projects: str, listed: str = "{name: web}, {name: lab}") -> Any:
        file.write_text(
            f"tenants:\n  - {{name: narrow, projects: [{listed}]}}\n"
            f"users:\n  - {{email: bea@example.com, role: developer, tenant: narrow{projects}}}\n"
        )
        return moiety("apply", "-f", str(file), "--source", "narrow", "--json")

    def reached() -> set[str] | None:
        ids = json.loads(moiety("user", "show", "bea@example.com", "--json").stdout)["project_ids"]
        rows = json.loads(moiety("project", "list", "--tenant", "narrow", "--json").stdout)["data"]
        return None if ids is None else {one["name"] for one in rows if one["id"] in ids}

    refused = apply(", projects: [shop]")
    assert refused.returncode == 1
    assert "there is no project 'narrow/shop'" in refused.stdout + refused.stderr
    made = apply(", projects: [web, lab]")
    assert made.returncode == 0, made.stdout + made.stderr
    assert reached() == {"web", "lab"}
    assert json.loads(apply(", projects: [lab, web]").stdout)["to_do"] == 0
    assert apply(", projects: [shop]", "{name: web}, {name: lab}, {name: shop}").returncode == 0
    assert reached() == {"shop"}, "a project of the same plan"
    assert json.loads(apply("").stdout)["to_do"] == 0, "the file does not say"
    assert apply(", projects: null").returncode == 0
    assert reached() is None
    for wrong in (", projects: []", ", projects: [none]"):
        assert apply(wrong).returncode != 0
        assert reached() is None
    file.write_text("users:\n  - {email: eve@example.com, role: viewer, tenant: narrow, projects: [web]}\n")
    told = moiety("apply", "-f", str(file), "--source", "narrow")
    assert told.returncode == 1
    assert "users[0].projects: must be left out for roles other than developer" in told.stderr


def test_users_and_key_policies_of_a_file_are_applied_and_removed(moiety: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "declared.yaml"
    file.write_text(
        "tenants:\n  - name: declared-users\n    key_policy: {max_days: 30, limits: {dollars_per_month: 2}}\n"
        "users:\n  - {email: Eve@example.com, role: developer, tenant: declared-users}\n"
    )
    applied = moiety("apply", "-f", str(file), "--source", "users")
    assert applied.returncode == 0, applied.stderr
    policy = json.loads(moiety("key-policy", "show", "declared-users", "--json").stdout)
    assert (policy["max_days"], policy["limits"]) == (30, {"money_per_month": 2_000_000_000})
    eve = json.loads(moiety("user", "show", "eve@example.com", "--json").stdout)
    assert (eve["role"], eve["state"]) == ("developer", "invited")
    again = moiety("apply", "-f", str(file), "--source", "users", "--dry-run")
    assert "create" not in again.stdout, again.stdout
    file.write_text(
        "tenants:\n  - name: declared-users\n    key_policy: {max_days: 60}\n"
        "users:\n  - {email: eve@example.com, role: viewer, tenant: declared-users}\n"
    )
    assert moiety("apply", "-f", str(file), "--source", "users").returncode == 0
    policy = json.loads(moiety("key-policy", "show", "declared-users", "--json").stdout)
    assert (policy["max_days"], policy["limits"]) == (60, {"money_per_month": 2_000_000_000})
    assert json.loads(moiety("user", "show", "eve@example.com", "--json").stdout)["role"] == "viewer"
    file.write_text("tenants:\n  - name: declared-users\n")
    pruned = moiety("apply", "-f", str(file), "--source", "users", "--prune")
    assert pruned.returncode == 0, pruned.stderr
    for removed in (("delete", "key_policy", "declared-users"), ("delete", "user", "declared-users/eve@example.com")):
        assert any(all(word in line.split() for word in removed) for line in pruned.stdout.splitlines()), pruned.stdout
    assert moiety("user", "show", "eve@example.com").returncode == 1
    assert moiety("key-policy", "show", "declared-users").returncode == 1
