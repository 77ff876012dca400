"""Files in buckets, through fsspec; credentials are those of the pool's host.

The packages behind it are optional. Blocks, so call it in a thread.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.adapters.peft.files import COPIED_AT_ONCE
from cluster.adapters.peft.strict_json import shown
from cluster.adapters.sources.allow_list import PARAM, Address
from cluster.errors import InvalidRequest, NotFound, TopworkError, Unavailable

logger = logging.getLogger("topwork.pool")

RETRY_SECONDS = 5
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}


@contextmanager
def open_bucket(address: Address, name: str) -> Iterator[Iterator[bytes]]:
    """Hold a file of a folder open; its bytes come as they are read.

    Raises:
        NotFound: if there is no such file.
        InvalidRequest: if the package for it is not installed, or the host may not read it.
        Unavailable: if it cannot be read.
    """
    import fsspec  # takes a while, and few need it

    url = f"{address}/{name}"
    try:
        files = fsspec.filesystem(address.scheme)
        with files.open(f"{address.path}/{name}", "rb") as file:
            yield iter(lambda: file.read(COPIED_AT_ONCE), b"")
    except TopworkError:
        raise  # of who reads
    except ImportError as error:
        raise InvalidRequest(
            f"{address.scheme}:// needs the package {PACKAGES[address.scheme]} on the adapter "
            f"pool's host: pip install 'topwork[{address.scheme}]'",
            PARAM,
        ) from error
    except FileNotFoundError as error:
        raise NotFound(f"there is no {shown(url)}", PARAM) from error
    except PermissionError as error:
        raise InvalidRequest(f"the pool's host may not read {shown(url)}", PARAM) from error
    except Exception as error:  # these packages raise what the packages below them raise
        logger.warning("%s cannot be read", url, exc_info=True)
        raise Unavailable(
            f"{shown(url)} cannot be read: {type(error).__name__}",
            PARAM,
            retry_after=RETRY_SECONDS,
        ) from error
