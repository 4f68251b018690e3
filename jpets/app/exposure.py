"""What a server shows to whom: who can reach it, and the files of TLS."""

from __future__ import annotations

import ipaddress
import ssl

from jpets.errors import InvalidInput
from serving.options.options import Options
from serving.tenants.keyring import Keyring


def check_open_to_all(options: Options, keyring: Keyring) -> None:
    """Raises ``InvalidInput`` where other machines would be let in, and anyone there could do everything."""
    if options.insecure or keyring.required or is_loopback(options.host):
        return
    where = "" if options.catalogue is None else ", with JPETS_CATALOGUE set"
    raise InvalidInput(
        f"--host: {options.host} lets other machines in, and the repository has no keys; make one first by jpets key "
        f"create{where}, or give --insecure"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. Names other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls_files(options: Options) -> tuple[bytes, bytes] | None:
    """The contents of private key and certificates; None without TLS. Raises ``InvalidInput`` for files that do not
    belong together or need a password, and ``OSError``."""
    if options.tls_certificate is None or options.tls_key is None:
        return None
    try:
        found = options.tls_key.read_bytes(), options.tls_certificate.read_bytes()
    except OSError as error:
        raise OSError(f"--tls-certificate, --tls-key: cannot be read: {error.strerror}") from error
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.tls_certificate, options.tls_key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise InvalidInput(
            f"--tls-certificate, --tls-key: expected a certificate and its key without password, in PEM: {reason}"
        ) from None
    return found


def _no_password() -> str:
    raise ValueError("the key has a password")
