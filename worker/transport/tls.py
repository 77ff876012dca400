"""TLS between hosts: each shows that it belongs to the cluster by a certificate of its CA.

Owns where a host's certificate lies, and what both ends of a connection demand of each other: TLS
1.3, and a certificate on either side. Who opens a connection also looks at which host has it.
"""

import os
import ssl
from functools import cache
from pathlib import Path

DIRECTORY_VARIABLE = "TOPWORK_CLUSTER_TLS"  # names the directory in the environment of a node's Ray
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "node.pem", "node.key"


class NodeTls:
    """This host's part in mutual TLS: a context for each side of a connection."""

    def __init__(self, directory: Path) -> None:
        """Read the files of a host.

        Args:
            directory: with the CA's certificate, and the host's own with its key.

        Raises:
            OSError: naming a file that is missing, or that is not what it should be.
        """
        self.directory = directory
        self.server = self._context(ssl.PROTOCOL_TLS_SERVER)
        self.server.num_tickets = 0  # nobody resumes, and an idle connection has nothing to read
        self.client = self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        authority, certificate, key = self.files()
        for file in (authority, certificate, key):
            file.open("rb").close()  # OpenSSL's own error would not say which one
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError as error:
            raise OSError(f"{authority} is no certificate of a CA: {error}") from error
        try:
            context.load_cert_chain(certificate, key)
        except ssl.SSLError as error:
            raise OSError(f"{certificate} and {key} are no pair: {error}") from error
        return context

    def files(self) -> tuple[Path, Path, Path]:
        """Return the files of the CA's certificate, the host's own, and its key."""
        where = self.directory
        return where / CA_FILE, where / CERTIFICATE_FILE, where / KEY_FILE

    def check(self, host: str) -> None:
        """Shake hands with oneself, as another host would under the name or address `host`.

        Raises:
            ssl.SSLError: saying why no other host would take the certificate.
        """
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client.wrap_bio(to_client, to_server, server_hostname=host)
        server = self.server.wrap_bio(to_server, to_client, server_side=True)
        waiting = [client, server]
        for _ in range(4):  # flights of a handshake
            for side in list(waiting):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                waiting.remove(side)
        assert not waiting, "a handshake of TLS 1.3 has three flights"


def node_tls() -> NodeTls | None:
    """Return this process's TLS, None if its environment asks for none.

    Raises:
        OSError: if it asks for one that cannot be had.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    return _read(Path(directory)) if directory else None


_read = cache(NodeTls)  # once in the life of a process
