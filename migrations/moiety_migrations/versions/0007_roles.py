"""Administrator roles, and in the audit log the actor's role and the tenant of the changed object."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

FOREIGN_KEY = "fk_api_keys_tenant_id_tenants"
CHECKS = {
    "ck_api_keys_role_known": "role IN ('owner', 'operator', 'tenant-admin', 'viewer')",
    "ck_api_keys_project_or_role": "(project_id IS NULL) = (role IS NOT NULL)",
    "ck_api_keys_tenant_by_role": "CASE role WHEN 'tenant-admin' THEN tenant_id IS NOT NULL WHEN 'viewer' THEN 1 = 1 "
    "ELSE tenant_id IS NULL END",
}


def upgrade() -> None:
    """Make administrators' keys owners' keys, and add the tenant of the changed object to audit log entries."""
    op.add_column("api_keys", sa.Column("role", sa.String(16)))
    op.add_column("api_keys", sa.Column("tenant_id", sa.String(32)))
    op.execute("UPDATE api_keys SET role = 'owner' WHERE project_id IS NULL")
    with op.batch_alter_table("api_keys") as keys:
        keys.create_foreign_key(FOREIGN_KEY, "tenants", ["tenant_id"], ["id"])
        for name, condition in CHECKS.items():
            keys.create_check_constraint(op.f(name), condition)
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.add_column("audit_log", sa.Column("actor_role", sa.String(16)))
    op.add_column("audit_log", sa.Column("tenant_id", sa.String(32)))
    op.create_index("ix_audit_log_tenant_id_seq", "audit_log", ["tenant_id", "seq"])
    _fill_tenants()


def downgrade() -> None:
    """Drop the columns. Keys of other roles than owner are revoked: without the role they would allow everything."""
    op.drop_index("ix_audit_log_tenant_id_seq", "audit_log")
    op.drop_column("audit_log", "tenant_id")
    op.drop_column("audit_log", "actor_role")
    op.execute("UPDATE api_keys SET revoked_at = CURRENT_TIMESTAMP WHERE role <> 'owner' AND revoked_at IS NULL")
    op.drop_index("ix_api_keys_tenant_id", "api_keys")
    with op.batch_alter_table("api_keys") as keys:
        keys.drop_constraint(FOREIGN_KEY, type_="foreignkey")
        for name in _checks_to_drop():
            keys.drop_constraint(op.f(name), type_="check")
        keys.drop_column("tenant_id")
        keys.drop_column("role")


def _checks_to_drop() -> list[str]:
    """Return all checks; on SQLite, which recreates the table, those that were reflected.

    SQLAlchemy before 2.1 does not reflect them.
    """
    connection = op.get_bind()
    if connection.dialect.name != "sqlite":
        return list(CHECKS)
    read_back = sa.Table("api_keys", sa.MetaData(), autoload_with=connection)
    return [name for name in CHECKS if name in {constraint.name for constraint in read_back.constraints}]


def _fill_tenants() -> None:
    """Fill in the tenants of the objects in earlier entries."""
    of_project = "SELECT projects.tenant_id FROM projects WHERE projects.id = {}"
    of_key = (
        "SELECT projects.tenant_id FROM projects JOIN api_keys ON api_keys.project_id = projects.id "
        "WHERE api_keys.id = {}"
    )
    op.execute("UPDATE audit_log SET tenant_id = object_id WHERE object_kind = 'tenants'")
    for kind, found in (("projects", of_project), ("api_keys", of_key)):
        op.execute(
            f"UPDATE audit_log SET tenant_id = ({found.format('audit_log.object_id')}) WHERE object_kind = '{kind}'"
        )
    log = sa.table("audit_log", sa.column("seq"), sa.column("object_kind"), sa.column("tenant_id"),
                   sa.column("before", sa.JSON), sa.column("after", sa.JSON))  # fmt: skip
    owner = {"tenant": "SELECT :id", "project": of_project.format(":id"), "key": of_key.format(":id")}
    connection = op.get_bind()
    for seq, before, after in connection.execute(
        sa.select(log.c.seq, log.c.before, log.c.after).where(log.c.object_kind == "quotas")
    ).all():
        row = after or before
        tenant_id = connection.scalar(sa.text(owner[row["level"]]), {"id": row["scope_id"]})
        connection.execute(log.update().where(log.c.seq == seq).values(tenant_id=tenant_id))
