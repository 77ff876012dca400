"""Files of a model hub, through huggingface_hub, which knows the hub's address and its token.

A revision is resolved to a commit once, so that both files are of one commit. Blocks, so call it in
a thread.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cluster.adapters.peft.files import COPIED_AT_ONCE
from cluster.adapters.peft.strict_json import shown
from cluster.adapters.sources.allow_list import PARAM, Address
from cluster.errors import InvalidRequest, NotFound, TopworkError, Unavailable

TIMEOUT = 30.0
RETRY_SECONDS = 5

logger = logging.getLogger("topwork.pool")


def resolve(address: Address) -> Address:
    """Return an address with the commit that its revision stands for now.

    Raises:
        NotFound: if there is no such repository or revision, or the pool's host may not see it.
        Unavailable: if the hub does not answer.
    """
    from huggingface_hub import HfApi  # takes a while, and few need it

    with _explained(address):
        info = HfApi().model_info(_repo(address), revision=address.revision, timeout=TIMEOUT)
    if info.sha is None:
        raise Unavailable(f"{shown(str(address))}: the hub names no commit", PARAM)
    return replace(address, revision=info.sha)


@contextmanager
def open_hub(address: Address, name: str) -> Iterator[Iterator[bytes]]:
    """Hold a file of a resolved folder open; its bytes come as they are sent.

    Raises:
        NotFound: if there is no such file.
        InvalidRequest: if the pool's host may not read it.
        Unavailable: if the hub does not answer.
    """
    from huggingface_hub import HfFileSystem

    inside = "/".join((*address.parts[2:], name))
    with _explained(address):
        files = HfFileSystem(skip_instance_cache=True)
        path = f"{_repo(address)}@{address.revision}/{inside}"
        with files.open(path, "rb", block_size=0) as file:  # as one stream
            yield iter(lambda: file.read(COPIED_AT_ONCE), b"")


def _repo(address: Address) -> str:
    return "/".join(address.parts[:2])


@contextmanager
def _explained(address: Address) -> Iterator[None]:
    """Have what goes wrong at a hub told as what it means for the caller."""
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = shown(str(address))
    try:
        yield
    except TopworkError:
        raise  # of who reads
    except GatedRepoError as error:
        raise InvalidRequest(f"{where} is gated: the pool's host may not read it", PARAM) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, FileNotFoundError) as error:
        raise NotFound(
            f"{where} is not there, holds no adapter, or the pool's host may not see it", PARAM
        ) from error
    except OfflineModeIsEnabled as error:
        raise InvalidRequest(f"{where}: the pool's host is told to be offline", PARAM) from error
    except Exception as error:  # its HTTP client is another one from version to version
        logger.warning("%s cannot be fetched", address, exc_info=True)
        raise Unavailable(
            f"{where} cannot be fetched: {type(error).__name__}",
            PARAM,
            retry_after=RETRY_SECONDS,
        ) from error
