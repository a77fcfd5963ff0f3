"""Chains of receipts after a restore of both databases: they continue, and what is broken or lost is said."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import select

from moiety_platform.clock import SystemClock
from moiety_platform.db.session import Database
from moiety_platform.receipts.models import ReceiptChain, ReceiptRecord
from moiety_platform.receipts.service import Receipts
from moiety_platform.receipts.signing import load_signer
from moiety_platform.receipts.verification import InvalidReceipt, check_chain, check_receipt, missing_numbers
from moiety_platform.settings import GatewaySettings

from .deployments import Deployment, backed_up, restored


async def test_chains_of_receipts_and_their_signatures_continue_after_a_restore(
    deployment: Deployment, new_settings: Callable[[str], GatewaySettings], tmp_path: Path
) -> None:
    async with deployment.database() as database:
        receipts = receipts_of(deployment, database)
        before = [await deployment.add_receipt(database) for _ in range(3)]
        held = [await receipts.receipt_of(deployment.owner, request_id) for request_id in before]
        folder = await backed_up(deployment, tmp_path)
        lost = await receipts.receipt_of(deployment.owner, await deployment.add_receipt(database))
    target = new_settings("second")
    report = await restored(folder, target)
    assert (report.problems, report.receipts, report.receipt_key) == ([], 3, receipts.signer.key_id)
    (notice,) = report.notices
    assert "chains of receipts (1, one for each tenant) continue" in notice
    assert report.created_at.isoformat(timespec="seconds") in notice
    copy = deployment.at(target)
    async with copy.database() as database:
        receipts = receipts_of(copy, database)
        after = await receipts.receipt_of(deployment.owner, await copy.add_receipt(database))
        again = await receipts.list_receipts(deployment.owner, 0, 10)
        keys = await receipts.public_keys()
    assert again == [*held, after], "contents, hashes, signatures and salts are the same"
    contents = [check_receipt(one, keys) for one in again]
    assert (check_chain(contents), missing_numbers(contents)) == (4, [])
    with pytest.raises(InvalidReceipt, match=r"two receipts with the number 4: .* After a restore"):
        check_chain([*contents, check_receipt(lost, keys)])


async def test_broken_chains_of_receipts_and_a_lost_key_are_reported(
    deployment: Deployment, new_settings: Callable[[str], GatewaySettings], tmp_path: Path
) -> None:
    async with deployment.database() as database:
        ids = [await deployment.add_receipt(database) for _ in range(3)]

        numbers = count()

        async def problems(spoil: Callable[[ReceiptRecord, ReceiptChain], object]) -> list[str]:
            async with database.write() as session:
                wanted = select(ReceiptRecord).where(ReceiptRecord.request_id == ids[1])
                record = (await session.scalars(wanted)).one()
                chain = await session.get_one(ReceiptChain, deployment.tenant_id)
                was = {one: {**one.__dict__} for one in (record, chain)}
                spoil(record, chain)
            report = await restored(await backed_up(deployment, tmp_path), new_settings(f"copy-{next(numbers)}"))
            assert "no private key of receipts" in report.notices[1] and report.receipt_key is None
            async with database.write() as session:
                for one, values in was.items():
                    copy = await session.merge(one)
                    for column in one.__table__.columns:
                        setattr(copy, column.name, values[column.name])
            return report.problems

        whose = f"the receipts of the tenant {deployment.tenant_id}: "
        assert await problems(lambda record, chain: None) == []
        changed = await problems(
            lambda record, chain: setattr(record, "content", (record.content or "").replace("demo", "other"))
        )
        assert changed == [f"{whose}receipt 2 was changed"]
        cut_off = await problems(lambda record, chain: setattr(record, "content", '{"sequence":1'))
        assert cut_off == [f"{whose}receipt 2 was changed"]
        ahead = await problems(lambda record, chain: setattr(chain, "num_receipts", 7))
        assert ahead == [f"{whose}its head is not the newest receipt"]
        missing = await problems(lambda record, chain: setattr(record, "tenant_id", "ten_other"))
        lost = [f"{whose}receipt 2 is missing", "the receipts of the tenant ten_other: receipt 1 is missing"]
        assert sorted(missing) == sorted(lost)


def receipts_of(deployment: Deployment, database: Database) -> Receipts:
    """Return the receipts of a gateway of the deployment."""
    file = deployment.settings.data_dir / "receipts.pem"

    async def flush() -> None:
        pass

    return Receipts(database, load_signer(file), SystemClock(), lambda _: False, flush)
