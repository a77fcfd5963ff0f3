"""Check of the pepper: whether it hashed the stored keys, and during a rotation, which keys need the old one."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Sequence

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.keys import hash_key, hashes_match, mark_of, parse_key
from moiety_platform.auth.pepper import (
    FILE_NAME,
    PREVIOUS_FILE_NAME,
    BadPepper,
    PepperRotation,
    pepper_of,
    pepper_rotation_of,
)
from moiety_platform.cli.doctor.finding import Finding, fail, ok, warn
from moiety_platform.clock import Clock
from moiety_platform.jwt_issuers.models import JwtGrantRecord
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.models import ApiKey

AREA = "store"
NUM_NAMED = 5  # keys


async def check_pepper(
    session: AsyncSession, settings: GatewaySettings, admin_key: str | None, clock: Clock
) -> Finding:
    """Check the pepper by the marks of the stored keys.

    Of older keys without marks, only the administrator's is checked.
    """
    has_text = ApiKey.id.not_in(select(JwtGrantRecord.key_id))
    working = ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > clock.now()), has_text
    keys = (await session.scalars(select(ApiKey).where(*working).order_by(ApiKey.created_at, ApiKey.name))).all()
    file = settings.data_dir / FILE_NAME
    if settings.key_pepper is None and not file.exists():
        if not keys:
            return ok(AREA, "pepper", "there is no pepper yet, and no key needs one")
        advice = f"restore the pepper from the backup at {file} (or in MOIETY_KEY_PEPPER); without it no key is valid"
        return fail(AREA, "pepper_missing", f"{len(keys)} keys are stored, but there is no pepper", advice)
    try:
        pepper, turn = pepper_of(settings), pepper_rotation_of(settings)
    except BadPepper as exc:
        return fail(AREA, "pepper_bad", str(exc), "restore the pepper from the backup")
    return (
        _open_to_others(settings)
        or _of_another(keys, pepper, turn, admin_key)
        or _being_replaced(keys, pepper, turn)
        or ok(AREA, "pepper", "the pepper fits" if keys else "there is a pepper, and no stored key needs it")
    )


def _open_to_others(settings: GatewaySettings) -> Finding | None:
    if settings.key_pepper is not None:
        return None
    for file in (settings.data_dir / FILE_NAME, settings.data_dir / PREVIOUS_FILE_NAME):
        if file.exists() and (mode := stat.S_IMODE(file.stat().st_mode)) & 0o077:
            told, command = f"{file} can be read by others (mode {mode:o})", f"chmod 600 {shlex.quote(str(file))}"
            return fail(AREA, "pepper_open", told, "make it readable by its owner only", command)
    return None


def _of_another(keys: Sequence[ApiKey], pepper: bytes, turn: PepperRotation, admin_key: str | None) -> Finding | None:
    peppers = [one for one in (pepper, turn.coming, turn.previous) if one is not None]
    marks = {mark_of(one) for one in peppers}
    lost = [key for key in keys if key.pepper_mark is not None and key.pepper_mark not in marks]
    text = parse_key(admin_key or "")
    for key in keys:
        if text is not None and key.id == text.key_id and key not in lost:
            lost += [] if any(hashes_match(hash_key(text, one), key.secret_hash) for one in peppers) else [key]
    if not lost:
        return None
    advice = (
        "restore the pepper from the backup (or set it as the previous one): keys that were created with it work again"
    )
    return fail(AREA, "pepper_other", f"the pepper is not the one that {_named(lost)} were made with", advice)


def _being_replaced(keys: Sequence[ApiKey], pepper: bytes, turn: PepperRotation) -> Finding | None:
    if turn.previous is None:
        return None
    left = [key for key in keys if key.pepper_mark != mark_of(pepper)]
    if not left:
        advice = f"remove MOIETY_KEY_PEPPER_PREVIOUS (or the file {PREVIOUS_FILE_NAME}), and destroy it"
        return warn(AREA, "pepper_previous", "no key needs the previous pepper any more", advice)
    advice = "keep it until these keys have been used, or rotate the unused keys"
    return warn(AREA, "pepper_turning", f"{_named(left)} still need the previous pepper", advice)


def _named(keys: Sequence[ApiKey]) -> str:
    names = ", ".join(f"{key.name} ({key.id})" for key in keys[:NUM_NAMED])
    more = len(keys) - NUM_NAMED
    return f"{len(keys)} keys: {names}{f' and {more} more' if more > 0 else ''}"
