"""TLS certificate of the picker's listener: files, or one that signs itself, for proxies that do not verify it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from moiety_platform.endpoint_picker.errors import BadCertificate

NAME = "moiety-endpoint-picker"
VALID_DAYS = 3650  # longer than a process runs
CLOCK_SKEW = timedelta(hours=1)


def read_certificate(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """Return key and certificate chain in PEM. Raises BadCertificate."""
    try:
        key_pem, chain_pem = key.read_bytes(), certificate.read_bytes()
        serialization.load_pem_private_key(key_pem, None)
        x509.load_pem_x509_certificates(chain_pem)
    except (OSError, ValueError, TypeError) as exc:
        raise BadCertificate(f"{certificate} and {key} are no certificate and key in PEM ({exc})") from exc
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
