"""What a node's environment says of TLS between hosts, for Topwork, Ray and HAProxy alike.

Ray reads its part when its processes start, so it is set before `ray start`, on every node. Must
not import Ray. Also owns what TLS does not reach: the sums of GPUs.
"""

import re
import ssl
import stat
from pathlib import Path

from deploy.config import ConfigError, ServeConfig
from worker.transport.tls import DIRECTORY_VARIABLE, NodeTls, node_tls

# What HAProxy's configuration takes without quotes.
_PLAIN_PATH = re.compile(r"[\w./@+-]+", re.ASCII)


def tls_environment(directory: Path) -> dict[str, str]:
    """Return the environment of a node whose certificate lies in a directory, if all is well there.

    Raises:
        ValueError: saying what is wrong with the certificate, or with who may read its key.
        OSError: naming a file that cannot be read.
    """
    directory = directory.expanduser().absolute()
    if not _PLAIN_PATH.fullmatch(str(directory)):
        raise ValueError(f"tls: {directory} may have letters, digits and any of ./@+-_ only")
    tls = NodeTls(directory)
    authority, certificate, key = tls.files()
    if key.stat().st_mode & stat.S_IRWXO:
        raise ValueError(f"tls: everyone on this machine may read {key}: chmod o= {key}")
    try:
        tls.check("localhost")
    except ssl.SSLError as error:
        raise ValueError(
            f"tls: other hosts will not take {certificate}: {error}. It must be signed by the CA "
            f"in {authority}, be for serving and asking (serverAuth, clientAuth), and name "
            "localhost, 127.0.0.1 and each address and name of this host"
        ) from error
    return {
        DIRECTORY_VARIABLE: str(directory),
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(authority),
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_SERVER_KEY": str(key),
        # What Ray measures of itself is shown on ports that know neither token nor TLS. Two of them
        # have no switch; there is no such port, so that they are not opened, as Ray's log says.
        "RAY_enable_metrics_collection": "0",
        "DASHBOARD_METRIC_PORT": "-1",
        "AUTOSCALER_METRIC_PORT": "-1",
    }


def ranks_stay_on_one_host(config: ServeConfig) -> bool:
    """Tell whether a scheduler's ranks must share a host, as they cannot encrypt what they send.

    So it is with NCCL, where the cluster has certificates and nobody vouches for the network.
    """
    is_nccl = config.device == "cuda" and config.tp > 1
    return is_nccl and node_tls() is not None and not config.trust_rank_network


def check_rank_hosts(config: ServeConfig, gpus: list[float]) -> None:
    """Compare the ranks that must share a host with the GPUs of each host that there is.

    Raises:
        ConfigError: if no host has enough.
    """
    most = max(gpus, default=0)
    if ranks_stay_on_one_host(config) and most < config.tp:
        raise ConfigError(
            f"tp: no host has {config.tp} GPUs, the largest has {most:g}, and what GPUs of several "
            "hosts send each other (NCCL) cannot be put behind the cluster's TLS: lower tp, or set "
            "trust_rank_network if the network itself encrypts (WireGuard, IPsec)"
        )
