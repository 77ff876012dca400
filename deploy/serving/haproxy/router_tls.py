"""TLS from HAProxy to the routers, which may be on other hosts: text of a configuration to text."""

import re
from contextlib import suppress
from pathlib import Path

_SERVER = re.compile(r"^( +server \S+ \S+:\d+ (?:check|track)\b.*)$", re.MULTILINE)


def link_certificate(folder: Path, certificate: Path, key: Path) -> Path:
    """Let a host's certificate and key lie where HAProxy wants them: NAME and NAME.key.

    Args:
        folder: of HAProxy's files, where links are made.
        certificate: of the host.
        key: of the certificate.

    Returns:
        The link to the certificate.

    Raises:
        OSError: if a link cannot be made.
    """
    link = folder / "node.pem"
    for name, target in ((link, certificate), (link.with_name(f"{link.name}.key"), key)):
        with suppress(FileExistsError):  # by the manager before
            name.symlink_to(target)
    return link


def with_router_tls(text: str, authority: str, certificate: str) -> str:
    """Return a configuration whose servers are reached by mutual TLS, by health checks too.

    Args:
        text: the configuration as Serve writes it.
        authority: file of the CA whose certificates routers and HAProxy must have.
        certificate: file of HAProxy's own, with its key beside it, `.key` after the same name.

    Returns:
        The same but for that. A server's name is not compared with its certificate, for HAProxy
        compares no addresses: each host of the cluster may be any router.
    """
    tls = f"ssl verify required ca-file {authority} crt {certificate} ssl-min-ver TLSv1.3"
    return _SERVER.sub(rf"\1 {tls}", text)
