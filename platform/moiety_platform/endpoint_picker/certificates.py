"""TLS certificate of the picker's listener: files, or one that signs itself, for proxies that do not verify it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from moiety_platform.endpoint_picker.errors import BadCertificate

NAME = "moiety-endpoint-picker"
VALID_DAYS = 3650  # longer than a process runs
CLOCK_SKEW = timedelta(hours=1)

log = structlog.get_logger(__name__)


class ServedCertificate:
    """Key and certificate chain of a listener, in PEM."""

    def __init__(self, pair: tuple[bytes, bytes]) -> None:
        self.pair = pair

    def renewed(self) -> tuple[bytes, bytes] | None:
        """Return the pair if it has changed since the last call, else None."""
        return None


class CertificateFiles(ServedCertificate):
    """Key and certificate of two files, which are read again when they change, as when a Secret is renewed.

    While the files do not fit together, the last pair is served. For one thread at a time.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files. Raises BadCertificate."""
        self._files = certificate, key
        super().__init__(read_certificate(certificate, key))
        self._seen = self._states()

    def renewed(self) -> tuple[bytes, bytes] | None:
        states = self._states()
        if states == self._seen:
            return None
        self._seen = states
        try:
            self.pair = read_certificate(*self._files)
        except BadCertificate as exc:
            log.warning(
                "certificate_not_renewed", reason=str(exc), advice="correct the files; the last ones are served"
            )
            return None
        log.info("certificate_renewed", certificate=str(self._files[0]))
        return self.pair

    def _states(self) -> list[tuple[int, int] | None]:
        found: list[tuple[int, int] | None] = []
        for file in self._files:
            try:
                state = file.stat()
                found.append((state.st_mtime_ns, state.st_ino))
            except OSError:
                found.append(None)
        return found


def read_certificate(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """Return key and certificate chain in PEM. Raises BadCertificate."""
    try:
        key_pem, chain_pem = key.read_bytes(), certificate.read_bytes()
        private = serialization.load_pem_private_key(key_pem, None)
        first = x509.load_pem_x509_certificates(chain_pem)[0]
    except (OSError, ValueError, TypeError) as exc:
        raise BadCertificate(f"{certificate} and {key} are no certificate and key in PEM ({exc})") from exc
    if private.public_key() != first.public_key():
        raise BadCertificate(f"{key} is not the key of {certificate}: give files that belong together")
    return key_pem, chain_pem


def self_signed_certificate() -> tuple[bytes, bytes]:
    """Return a new key and a certificate for it, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key_pem = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key_pem, certificate.public_bytes(pem)
