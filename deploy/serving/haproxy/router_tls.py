"""TLS from HAProxy to the routers, which may be on other hosts: text of a configuration to text."""

import re

_GLOBAL = re.compile(r"^global$", re.MULTILINE)
_SERVER = re.compile(r"^( +server \S+ \S+:\d+ (?:check|track)\b.*)$", re.MULTILINE)


def with_router_tls(text: str, authority: str, certificate: str) -> str:
    """Return a configuration whose servers are reached by mutual TLS, by health checks too.

    Args:
        text: the configuration as Serve writes it.
        authority: file of the CA whose certificates routers and HAProxy must have.
        certificate: HAProxy's own, NAME.pem; its key is NAME.key beside it.

    Returns:
        The same but for that. A server's name is not compared with its certificate, for HAProxy
        compares no addresses: each host of the cluster may be any router.
    """
    tls = f"ssl verify required ca-file {authority} crt {certificate} ssl-min-ver TLSv1.3"
    # The key is where the CA's other files of a host are: else HAProxy wants NAME.pem.key.
    text, num_globals = _GLOBAL.subn("global\n    ssl-load-extra-del-ext", text)
    assert num_globals == 1, "Serve begins with one section of this name"
    return _SERVER.sub(rf"\1 {tls}", text)
