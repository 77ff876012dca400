"""What the catalogue says of a name, put together from its history and its content."""

from cluster.adapters.loaded_adapters import Contents
from cluster.adapters.records import AdapterRecord, Tier, VersionRecord
from cluster.adapters.versions import History, Version


def adapter_record(history: History, contents: Contents) -> AdapterRecord:
    """Return the record of a name."""
    current = history.current
    known = current.outline if current.digest is None else contents.facts(current.digest).outline
    return AdapterRecord(
        name=history.name,
        digest=current.digest,
        version=current.number,
        path=current.outline.source.path,
        lora_rank=known.lora_rank,
        num_bytes=known.num_bytes,
        modules=known.modules,
        pinned=history.pinned,
        tier=_tier(current, contents),
        watched=history.watched,
        owner=history.owner,
        versions=tuple(_version_record(history, version, contents) for version in history.versions),
    )


def _version_record(history: History, version: Version, contents: Contents) -> VersionRecord:
    return VersionRecord(
        version=version.number,
        digest=version.digest,
        path=version.outline.source.path,
        share=history.shares.get(version.number, 0),
        since=next(
            one.number
            for one in history.versions
            if one is version or (one.digest == version.digest and one.digest is not None)
        ),
        tier=_tier(version, contents),
    )


def _tier(version: Version, contents: Contents) -> Tier:
    if version.digest is None:
        return "disk"
    return contents.tier(version.digest, version.outline.source)
